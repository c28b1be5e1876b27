"""Sessions from one store to another, or to a bundle: :func:`copy_sessions`.

What is copied is each session as it was at one moment: nodes in commit order, annotations, heads, pins, aliases of its media and
their features. A fork shares its path there too where what it was forked from is copied with it. Whatever is there already has to
be an earlier state of the same session, so a copy goes on where one ended that was killed, and nothing that is there is ever taken
away.

In the end both sides are read and compared, session by session: see :func:`session_digest`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import islice
from typing import Any, Final, Literal, NamedTuple
from weakref import ref

import attrs

from sessiontree import codec
from sessiontree.annotated import Annotated, annotated
from sessiontree.annotations import Annotation, said_over, same, value_bytes
from sessiontree.backends.base import Progress
from sessiontree.backends.blobs import content_digest
from sessiontree.bundles import (
    _aliases,
    _check_outside,
    _forked,
    _said_as_is,
    _Snapshot,
    _snapshots,
    _Wanted,
    _written,
    open_bundle,
)
from sessiontree.details import Details
from sessiontree.digest import pack
from sessiontree.errors import CorruptTree, KeyTaken, SessionDiffers, SessionExists, Unsupported
from sessiontree.heads import Head
from sessiontree.index import NodeIndex
from sessiontree.media import MediaItem
from sessiontree.node import Namespace, Node
from sessiontree.store import Session, SessionStore
from sessiontree.stored import StoredHead, StoredIndex
from sessiontree.tree import SessionTree
from sessiontree.turns import Turn

_Placed = tuple[bytes, Turn, Details]  # the id of what a node stands below, and what it is

__all__ = ["CopyReport", "SessionCopy", "copy_sessions", "session_digest"]

_BATCH: Final = 1000  # nodes that become durable together
_BATCH_BYTES: Final = 2**20
_TOGETHER: Final = 256  # nodes that are read together
_LAST: Final = 16  # sessions that are held for what the next ones may share
_NODE_BYTES: Final = 500  # of one in memory beside its tokens
_HELD: Final = 2**28  # bytes of copied sessions that stay in memory
_LOOK: Final = 2**26  # bytes copied before somebody looks how many those are


@attrs.frozen
class SessionCopy:
    """What became of a session. ``nodes``: of its tree, the root not counted; ``added``: those of them that were not there.

    ``source``, ``target``: digests of either side, read in the end.
    """

    session_id: str
    nodes: int
    added: int
    source: bytes
    target: bytes

    @property
    def equal(self) -> bool:
        """Whether both sides are the same."""
        return self.source == self.target


@attrs.frozen
class CopyReport:
    """What a copy did. ``features``: contents whose features came; ``absent``: whose features only the source has in the end.

    ``aliases``: that came or were there.
    """

    sessions: tuple[SessionCopy, ...]
    features: int
    aliases: int
    absent: int = 0

    @property
    def ok(self) -> bool:
        """Whether both sides are the same."""
        return not self.absent and all(each.equal for each in self.sessions)

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types, digests in hexadecimal."""
        sessions = [
            attrs.asdict(each) | {"source": each.source.hex(), "target": each.target.hex(), "equal": each.equal}
            for each in self.sessions
        ]
        return {"ok": self.ok} | attrs.asdict(self, recurse=False) | {"sessions": sessions}


def copy_sessions(
    source: SessionStore,
    target: SessionStore | str | os.PathLike[str],
    sessions: Iterable[str] | None = None,
    *,
    compress: Literal["zstd"] | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Bring sessions of one store to where ``target`` is: another store, or the path of a bundle.

    ``sessions``: ids; None: all. A session that is there with the same content is left as it is; one that is an earlier state of it
    gets what it lacks, heads last; one that is there with anything else is an error, and nothing has changed then. A bundle is
    written as a whole, unless it holds all of that already; ``compress``: a bundle, by "zstd". ``progress``: is told of nodes
    looked at, and how many there are on both sides. What has returned is durable.

    Raises SessionDiffers for another root or limits, nodes, heads, pins or annotations that the source has not, a head that was
    moved there, or an annotation that says something else of a node or of one of its tokens;
    KeyTaken for an alias that names other media there; IncompatibleStore for another tenant's session; UnknownSession; CorruptTree
    for a source that was opened damaged, or a node that cannot be read; Unsupported for a bundle that holds other sessions too; and
    what writing raises. Killed or refused half-way it has added whole nodes under their parents: do it again, and it goes on.
    """
    if isinstance(sessions, (str, bytes)):
        raise TypeError(f"sessions are a list of ids, not {type(sessions).__name__}")
    if source is target:
        raise Unsupported("sessions are copied to another store than their own")
    if source.damaged:
        raise CorruptTree(f"{source!r} is damaged in {len(source.damaged)} places; fsck and salvage, or export, save what is sound")
    source.flush()
    snapshots = _snapshots(source, source.sessions() if sessions is None else tuple(sessions), None, [])
    if isinstance(target, SessionStore):
        if compress is not None:
            raise Unsupported("a bundle is compressed; a store is not")
        return _Copy(source, target, snapshots, progress).run()
    return _to_bundle(source, os.path.abspath(target), snapshots, compress, progress)


def session_digest(session: Session) -> bytes:
    """32 bytes that are equal for two sessions of the same content, wherever they lie. Reads every node. Raises CorruptTree.

    Of the root and the limits, all nodes in commit order with what stands outside their ids (finish reasons, metadata, links),
    annotations, heads with the nodes they are at, and pins. Not of versions of heads, nor of whether a path is shared.
    """
    tree = session._tree
    digest = _Digest(tree)
    deque(_add_all(digest, tree), maxlen=0)
    return digest.finished(tree, session.pins)


class _Digest:
    """Of one session. ``paths``: what is known of those that forks share."""

    def __init__(self, tree: SessionTree, paths: _Paths | None = None) -> None:
        self._paths = paths
        self._sum = sha256(b"sessiontree session\0" + pack([tree.root.id, *tree.limits]))

    def add(self, above: bytes, record: bytes) -> None:
        """A node, by its parent's id and its record as the only one of a session. Where it stands is said by the order."""
        self._sum.update(sha256(above + record).digest())

    def add_node(self, node: Node) -> None:
        """The same of a node in memory."""
        assert node.parent is not None
        digest = None if self._paths is None else self._paths.get(node)
        if digest is None:
            digest = sha256(node.parent.id + codec.encode_node(0, 1, 0, node)).digest()
            if self._paths is not None:
                self._paths.put(node, digest)
        self._sum.update(digest)

    def finished(self, tree: SessionTree, pins: Collection[bytes], above: Sequence[SessionTree] = ()) -> bytes:
        """All of it. ``above``: trees that a fork shares its path with, and what they say of it."""
        heads = sorted((name, node_id) for name, (node_id, _) in _heads(tree).items())
        self._sum.update(pack([heads, sorted(pins)]))
        for _, node, values in annotated(tree, above):
            for name, value in sorted(values.items()):
                self._sum.update(sha256(codec.encode(codec.AnnotationRecord(0, 0, node.id, name, value, 0))).digest())
        return self._sum.digest()


class _Paths:
    """Digests of nodes that forks share, made once for all of them: as long as somebody holds the nodes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Node], bytes]] = {}

    def get(self, node: Node) -> bytes | None:
        known = self._known.get(id(node))
        return None if known is None or known[0]() is not node else known[1]

    def put(self, node: Node, digest: bytes) -> None:
        self._known[id(node)] = ref(node), digest


def _add_all(digest: _Digest, tree: SessionTree) -> Iterator[None]:
    """Add all nodes in commit order, as they lie in a store: none is made for that, but those that a fork shares."""
    for node in _shared_path(tree)[1:]:
        digest.add_node(node)
        yield
    for index, batch in _batches(tree):
        for ordinal in batch:
            if isinstance(index, StoredIndex) and ordinal:
                source = index.source
                digest.add(index.id_of(source.parent_of(ordinal)), codec.renumbered(source.raw(ordinal), 0, 1, 0))
                yield
            elif ordinal:
                digest.add_node(index.nodes[ordinal - index.base_count])
                yield


def _nodes(tree: SessionTree) -> Iterator[Node]:
    """All nodes in commit order, the root first."""
    yield from _shared_path(tree)
    for index, batch in _batches(tree):
        yield from (index.nodes[ordinal - index.base_count] for ordinal in batch)


def _ids(tree: SessionTree) -> Iterator[bytes]:
    """Their ids. Nodes that lie in a store are not read for it, but those that a fork shares."""
    yield from (node.id for node in _shared_path(tree))
    for index, batch in _batches(tree, read=False):
        yield from map(index.id_of, batch)


def _shared_path(tree: SessionTree) -> tuple[Node, ...]:
    """Of a fork, the nodes that it has from where it was forked, from the root on."""
    tip = tree._index.bottom.tip
    return () if tip is None else tip.path()


def _batches(tree: SessionTree, *, read: bool = True) -> Iterator[tuple[NodeIndex, Sequence[int]]]:
    """The layers of a tree, the lowest first, with ordinals of the nodes in them: as many as are read together."""
    for index, visible in tree._index.layers_upward(tree._count):
        for start in range(index.base_count, visible, _TOGETHER):
            batch: Sequence[int] = range(start, min(start + _TOGETHER, visible))
            if isinstance(index, StoredIndex):
                batch = [ordinal for ordinal in batch if index.source.has(ordinal)]
                if read:
                    index.source.read_ahead([ordinal for ordinal in batch if ordinal])
            yield index, batch


def _heads(tree: SessionTree) -> dict[str, tuple[bytes, int]]:
    """Of each head the id of its node, which is not read for that, and its version."""
    return {
        name: (tree._index.id_of(head.ordinal) if isinstance(head, StoredHead) else head.node.id, head.version)
        for name, head in tree._heads.items()
    }


# Whether what is there is an earlier state


class _Views:
    """Sessions of a store, looked at one after the other. What forks rest on is held meanwhile, so it is read once for all of them.

    ``paths``: digests of that.
    """

    def __init__(self, store: SessionStore, snapshots: Sequence[_Snapshot]) -> None:
        self._store = store
        self._sources = {snapshots[each.tip[0]].session_id for each in snapshots if each.tip is not None}
        self.clear()

    def clear(self) -> None:
        self.paths = _Paths()
        self._held: dict[str, SessionTree] = {}
        self._last: deque[SessionTree] = deque(maxlen=_LAST)

    def of(self, session_id: str) -> tuple[SessionTree, Collection[bytes]] | None:
        """None where there is none."""
        view = self._store._view_of(session_id)
        if view is not None:
            self._last.append(view[0])
            if session_id in self._sources:
                self._held[session_id] = view[0]
        return view


class _There(NamedTuple):
    """A session in the target."""

    tree: SessionTree
    pins: Collection[bytes]

    def has_heads(self, snapshot: _Snapshot) -> bool:
        there = _heads(self.tree)
        return all(
            name in there and there[name][0] == node_id and there[name][1] >= version
            for name, (node_id, version) in _heads(snapshot.tree).items()
        )

    def is_all_of(self, snapshot: _Snapshot) -> bool:
        complete = len(self.tree) == len(snapshot.tree) and frozenset(self.pins).issuperset(snapshot.pins)
        return complete and self.has_heads(snapshot)


def _there(views: _Views, snapshot: _Snapshot) -> _There | None:
    """The session of a snapshot's id, if there is one. Raises SessionDiffers where it is no earlier state of that."""
    view = views.of(snapshot.session_id)
    if view is None:
        return None
    found = _There(*view)
    difference = _difference(snapshot, found)
    if difference is not None:
        raise SessionDiffers(
            f"session {snapshot.session_id!r} is there with other content: {difference}", session_id=snapshot.session_id
        )
    return found


def _difference(here: _Snapshot, there: _There) -> str | None:
    """Why one is no earlier state of the other."""
    if there.tree.root.id != here.tree.root.id:
        return f"its root is {there.tree.root.id[:4].hex()}, not {here.tree.root.id[:4].hex()}"
    if there.tree.limits != here.tree.limits:
        return f"its limits are {tuple(there.tree.limits)}, not {tuple(here.tree.limits)}"
    if len(there.tree) > len(here.tree):
        return f"it has {len(there.tree) - 1} nodes, not {len(here.tree) - 1}"
    for number, (one, other) in enumerate(zip(_ids(here.tree), _ids(there.tree), strict=False)):
        if one != other:
            return f"its node {number} is {other[:4].hex()}, not {one[:4].hex()}"
    heads = _heads(here.tree)
    for name, (node_id, version) in _heads(there.tree).items():
        if name not in heads:
            return f"it has a head {name!r}"
        if node_id != heads[name][0] and version >= heads[name][1]:
            return f"its head {name!r} was moved to {node_id[:4].hex()}"
    for pin in sorted(frozenset(there.pins).difference(here.pins)):
        return f"it has a pin of {pin[:4].hex()}"
    for _, node, values in annotated(there.tree):
        known = _values_of(node, (here.tree, *here.above))
        for name, value in values.items():
            if not _is_part(value, known[0].get(name), name) and not any(same(value, other.get(name)) for other in known[1:]):
                return f"its annotation {name!r} of node {node.id[:4].hex()} says something else"
    return None


def _values_of(node: Node, trees: Sequence[SessionTree]) -> list[dict[str, Annotation]]:
    """What is said of a node by each of some trees and those behind it, the last of which says least."""
    found: list[dict[str, Annotation]] = [{}]
    for tree in reversed(trees):
        found.insert(0, found[0] | tree._read_said([node], None)[0])
    return found


def _is_part(value: Annotation, whole: Annotation | None, name: str) -> bool:
    """Whether all that a value says is said by another one."""
    try:
        return whole is not None and same(said_over(value, whole, name), whole)
    except Unsupported:
        return False


# To a store


class _Steps:
    """Tells of progress, not for each step."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done, self._total = 0, total

    def take(self) -> None:
        self.reach(self._done + 1)

    def reach(self, done: int) -> None:
        before, self._done = self._done, done
        if self._progress is not None and (before // _BATCH < self._done // _BATCH or self._done == self._total):
            self._progress(self._done, self._total)


def _count(snapshots: Sequence[_Snapshot]) -> int:
    """Nodes, roots not counted."""
    return sum(len(each.tree) - 1 for each in snapshots)


class _Media:
    """What was met on the way. ``items``: one of each content; ``named``: identities that stand in sessions of a namespace."""

    def __init__(self) -> None:
        self.items: dict[bytes, MediaItem] = {}
        self.named: set[tuple[Namespace, bytes]] = set()

    def add(self, node: Node) -> Iterator[MediaItem]:
        """Those of a node's items whose content is new."""
        for item in node.media:
            self.named.add((node.namespace, item.identity))
            if self.items.setdefault(content_digest(item.content()), item) is item:
                yield item

    def absent(self, source: SessionStore, target: SessionStore) -> int:
        """Of how many contents only the source has features."""
        return sum(_holds(source, item) and not _holds(target, item) for item in self.items.values())


class _Copy:
    def __init__(
        self, source: SessionStore, target: SessionStore, snapshots: Sequence[_Snapshot], progress: Progress | None
    ) -> None:
        self._source = source
        self._target = target
        self._snapshots = snapshots
        self._steps = _Steps(progress, 2 * _count(snapshots))
        self._open = frozenset(target._sessions)
        self._views = _Views(target, snapshots)
        self._paths = _Paths()  # of the source
        self._media = _Media()
        self._features = 0  # contents whose features came
        self._copied = 0  # bytes since somebody looked what is held

    def run(self) -> CopyReport:
        target = self._target
        if target._journal is not None:
            target._journal.check_writable()
            for snapshot in self._snapshots:
                target._journal.check_tenant(snapshot.tree.root.namespace, f"session {snapshot.session_id!r}")
        aliases = _aliases(self._source, self._snapshots)
        for (scope, alias), identity in aliases.items():
            self._check_alias(scope, alias, identity)
        names = frozenset(target.sessions())
        for snapshot in self._snapshots:
            if snapshot.session_id in names:
                _there(self._views, snapshot)
        copies = [self._copy(snapshot) for snapshot in self._snapshots]
        came = 0
        for (scope, alias), identity in aliases.items():
            if (scope, identity) in self._media.named:
                target.alias_media(alias, identity, scope)
                came += 1
        target.flush()
        self._let_go()
        target.evict()  # what is compared is what anybody finds there
        compared = [
            attrs.evolve(copy, target=_digest_there(self._views, snapshot.session_id, self._steps))
            for copy, snapshot in zip(copies, self._snapshots, strict=True)
        ]
        return CopyReport(tuple(compared), self._features, came, self._media.absent(self._source, target))

    def _let_go(self) -> None:
        """Hold nothing of the target, and have no session of it open that was not before."""
        self._views.clear()
        for snapshot in self._snapshots if self._target._journal is not None else ():
            session = self._target._sessions.get(snapshot.session_id)
            if session is not None and snapshot.session_id not in self._open:
                session.close()

    def _check_alias(self, scope: Namespace, alias: str, identity: bytes) -> None:
        with self._target._opening:
            known = self._target._alias(scope, alias)
        if known is not None and known != identity:
            raise KeyTaken(f"alias {alias!r} names {known[:4].hex()} there, not {identity[:4].hex()}", key=alias, identity=known)

    def _copy(self, snapshot: _Snapshot) -> SessionCopy:
        tree, session_id = snapshot.tree, snapshot.session_id
        there = _there(self._views, snapshot) or self._made(snapshot)
        session = cache(partial(self._target.get, session_id))  # opened where something is to be written alone
        digest, added = _Digest(tree, self._paths if _shared_path(tree) else None), 0
        for turns in _grouped(islice(self._read(tree, digest), len(there.tree), None)):
            added += session()._take(turns)
            self._make_room(turns)
        for pin in frozenset(snapshot.pins).difference(there.pins):
            session().pin(pin)
        self._annotate(snapshot, session)
        if not there.has_heads(snapshot):
            wanted = sorted((version, name, node_id) for name, (node_id, version) in _heads(tree).items())
            session()._swap(lambda now: (_with_heads(now, wanted), None))
        return SessionCopy(session_id, len(tree) - 1, added, digest.finished(tree, snapshot.pins, snapshot.above), b"")

    def _annotate(self, snapshot: _Snapshot, session: Callable[[], Session]) -> None:
        """Say what is said of nodes, as far as it is not said there."""
        for some in _some(annotated(snapshot.tree, snapshot.above)):
            view = self._views.of(snapshot.session_id)
            after, _ = (None, None) if view is None else _said_as_is(some, view[0])
            if view is None or after is not view[0]:
                session()._swap(partial(_said_as_is, some))

    def _made(self, snapshot: _Snapshot) -> _There:
        """A session that is not there, made: of a fork with the path that it shares."""
        try:
            session = self._create(snapshot)
        except SessionExists:  # somebody else is copying it too
            there = _there(self._views, snapshot)
            if there is None:
                raise
            return there
        return _There(session._tree, ())

    def _create(self, snapshot: _Snapshot) -> Session:
        tree, target = snapshot.tree, self._target
        tip = tree._index.bottom.tip
        if snapshot.tip is not None and tip is not None:
            above = self._snapshots[snapshot.tip[0]].session_id
            view = self._views.of(above)
            if view is not None and tip.id in view[0]:  # or it was dropped, and is kept for the fork alone
                return _forked(target, above, tip.id, snapshot.session_id, tree.limits)
        root, limits = tree.root, tree.limits
        return target.create(
            snapshot.session_id,
            scheme=root.scheme,
            namespace=root.namespace,
            model_fingerprint=root.model_fingerprint,
            max_tokens=limits.max_tokens,
            reserve_output=limits.reserve_output,
        )

    def _read(self, tree: SessionTree, digest: _Digest) -> Iterator[Node]:
        """All nodes in order, each when its media's features are there, if they are held."""
        for node in _nodes(tree):
            if node.parent is not None:
                digest.add_node(node)
                self._steps.take()
            for item in self._media.add(node):
                arrays = None if _holds(self._target, item) else self._source._features.kept(item)
                if arrays is not None:
                    self._target._features.take(item, arrays)
                    self._features += 1
            yield node

    def _make_room(self, turns: Sequence[_Placed]) -> None:
        self._copied += _NODE_BYTES * len(turns) + sum(len(turn.data) for _, turn, _ in turns)
        if self._copied >= _LOOK:
            self._copied = 0
            self._views.clear()
            self._target.evict(_HELD)


def _some(said: Iterable[Annotated]) -> Iterator[list[_Wanted]]:
    """Annotations, as many as become durable together."""
    waiting: list[_Wanted] = []
    size = 0
    for _, node, values in said:
        for name, value in sorted(values.items()):
            waiting.append((node.id, name, value))
            size += value_bytes(value)
        if len(waiting) >= _BATCH or size >= _BATCH_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _grouped(nodes: Iterable[Node]) -> Iterator[list[_Placed]]:
    """Nodes as they are to be taken, as many as become durable together."""
    turns: list[_Placed] = []
    size = 0
    for node in nodes:
        turns.append(_placed(node))
        size += len(turns[-1][1].data)
        if len(turns) >= _BATCH or size >= _BATCH_BYTES:
            yield turns
            turns, size = [], 0
    if turns:
        yield turns


def _placed(node: Node) -> _Placed:
    """A node as it is to be taken: its parent's id, and what it is."""
    assert node.parent is not None
    data = node._extent.read_bytes(node.start, node.stop)
    what = (data, node.media, node.origin, node.role or "", node.key, node.runs, node.state, node.replayed)
    return node.parent.id, Turn(node.id, *what), node._details


def _with_heads(tree: SessionTree, wanted: Sequence[tuple[int, str, bytes]]) -> SessionTree:
    """A tree with heads where they are to be, in the order of their versions, which stay where that is later than all there are."""
    for version, name, node_id in wanted:
        there = tree._head(name)
        if there is None or there.node.id != node_id or there.version < version:
            tree = tree._after_move(name, Head(tree.node(node_id), max(version, tree._moves + 1)))
    return tree


def _holds(store: SessionStore, item: MediaItem) -> bool:
    features = store._features
    return item in features if features.files is None else item.content() in features.files


def _digest_there(views: _Views, session_id: str, steps: _Steps) -> bytes:
    view = views.of(session_id)
    if view is None:
        return b""
    tree, pins = view
    digest = _Digest(tree, views.paths)
    for _ in _add_all(digest, tree):
        steps.take()
    return digest.finished(tree, pins)


# To a bundle


def _to_bundle(
    source: SessionStore,
    path: str,
    snapshots: Sequence[_Snapshot],
    compress: Literal["zstd"] | None,
    progress: Progress | None,
) -> CopyReport:
    _check_outside(path)
    nodes = _count(snapshots)
    known: dict[str, int] = {}
    if os.path.exists(path):
        with open_bundle(path) as bundle:
            for other in set(bundle.sessions()).difference(each.session_id for each in snapshots):
                raise Unsupported(f"a bundle is written as a whole, and session {other!r} in {path} is not copied to it")
            views = _Views(bundle, snapshots)
            found = [(each, _there(views, each)) for each in snapshots]
            known = {each.session_id: len(there.tree) - 1 for each, there in found if there is not None}
            if all(there is not None and there.is_all_of(each) for each, there in found):
                report = _compared(source, bundle, snapshots, known, _Steps(progress, 2 * nodes))
                if report.ok:
                    return report
    steps = _Steps(progress, 3 * nodes)
    written = _written(
        source, snapshots, path, features=True, compress=compress, progress=lambda done, _: steps.reach(min(done, nodes))
    )
    steps.reach(nodes)
    with open_bundle(path) as bundle:
        report = _compared(source, bundle, snapshots, known, steps)
    return attrs.evolve(report, features=written.media)


def _compared(
    source: SessionStore, bundle: SessionStore, snapshots: Sequence[_Snapshot], known: Mapping[str, int], steps: _Steps
) -> CopyReport:
    """Both sides, where nothing needs to be copied any more. ``known``: nodes of each session that had been there."""
    media, views, paths = _Media(), _Views(bundle, snapshots), _Paths()
    copies = []
    for snapshot in snapshots:
        digest = _Digest(snapshot.tree, paths if _shared_path(snapshot.tree) else None)
        for node in _nodes(snapshot.tree):
            if node.parent is not None:
                digest.add_node(node)
                steps.take()
            deque(media.add(node), maxlen=0)
        mine, there = (
            digest.finished(snapshot.tree, snapshot.pins, snapshot.above),
            _digest_there(views, snapshot.session_id, steps),
        )
        nodes = len(snapshot.tree) - 1
        copies.append(SessionCopy(snapshot.session_id, nodes, nodes - known.get(snapshot.session_id, 0), mine, there))
    aliases = _aliases(source, snapshots)
    came = sum((scope, identity) in media.named for (scope, _), identity in aliases.items())
    return CopyReport(tuple(copies), 0, came, media.absent(source, bundle))
