"""Sessions as one file, to be kept, sent and taken in elsewhere: :func:`export_bundle`, :func:`import_bundle`, :func:`open_bundle`.

A bundle holds the records that a store holds (:mod:`sessiontree.codec`), in frames of the same kind
(:mod:`sessiontree.backends.bundle_file`), in an order of its own (:mod:`sessiontree.bundle_contents`), and stands alone: with every
node comes its path. A fork of a session that is there too shares its path, others bring theirs. One state of a store gives one
sequence of bytes.

What is read is never believed: checksums when a bundle is opened; when a node is taken, its digest under its parent's id, and that
its positions fit. No rule of positions is applied again.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple

import attrs
import numpy as np

from sessiontree import codec
from sessiontree.annotated import annotated
from sessiontree.annotation_log import Said
from sessiontree.annotations import Annotation, OfTokens, said_over, same
from sessiontree.backends.base import Progress
from sessiontree.backends.blobs import content_digest, encoded_arrays
from sessiontree.backends.bundle_file import BundleWriter
from sessiontree.backends.system import System
from sessiontree.bundle_contents import VERSION, BundledFeatures, Contents, encode_piece, open_contents
from sessiontree.details import Details
from sessiontree.digest import ID_BYTES, pack, root_id
from sessiontree.errors import (
    CorruptTree,
    IncompatibleStore,
    KeyTaken,
    LimitExceeded,
    StoreClosed,
    StoreFailed,
    UnknownNode,
    UnknownSession,
    Unsupported,
)
from sessiontree.heads import Head
from sessiontree.index import Limits, NodeIndex
from sessiontree.journal import Journal, Overtaken
from sessiontree.media import MediaItem
from sessiontree.node import Namespace, Node
from sessiontree.positions import PositionScheme
from sessiontree.store import Session, SessionStore
from sessiontree.stored import NodeSource, StoredHead, StoredIndex
from sessiontree.tree import SessionTree
from sessiontree.turns import Turn

__all__ = ["AnnotationKept", "Bundle", "ExportReport", "HeadKept", "ImportReport", "export_bundle", "import_bundle", "open_bundle"]

#: What a compressed bundle may expand to, unless the reader says otherwise.
MAX_BYTES: Final = 2**34
_PIECE: Final = 2**22  # bytes of features in one record
_BATCH: Final = 1000  # nodes that become durable together
_BATCH_BYTES: Final = 2**20
_SYSTEM: Final = System()


@attrs.frozen
class ExportReport:
    """What a bundle holds. ``nodes``: roots not counted, nor paths that forks share; ``media``: contents whose features are there.

    ``skipped``: nodes that cannot be read, in a store that was opened to serve what is sound of it, and those below them;
    ``left_out``: ids of sessions that cannot be read at all there. ``annotations``: names, of each node by itself; ``unread``: of
    how many nodes there they cannot be read, and none is taken.
    """

    path: str
    sessions: tuple[str, ...]
    nodes: int
    heads: int
    media: int
    aliases: int
    bytes: int
    skipped: int
    pins: int
    left_out: tuple[str, ...] = ()
    annotations: int = 0
    unread: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types."""
        return attrs.asdict(self) | {"sessions": list(self.sessions), "left_out": list(self.left_out)}


@attrs.frozen
class HeadKept:
    """A head that an import left where it is: ``here``, not at ``bundled``; neither is behind the other, or here is further on."""

    session_id: str
    name: str
    here: bytes
    bundled: bytes


@attrs.frozen
class AnnotationKept:
    """An annotation that stayed as it was where the bundle says something else: of a whole node, of some tokens, or of a kind."""

    session_id: str
    node_id: bytes
    name: str


@attrs.frozen
class ImportReport:
    """What an import did. ``created``, ``merged``: sessions that were not there, and that were.

    ``nodes_added``: that were not there; ``nodes_known``: that were. ``heads_set``: made or moved. ``media``: contents whose
    features came; ``aliases``, ``pins``: that came, or were there. ``ids``: where another namespace was asked for, the new id of
    each node and root, by the old one; else empty. ``annotations``: that were not there, or lacked tokens.
    """

    path: str
    created: tuple[str, ...]
    merged: tuple[str, ...]
    nodes_added: int
    nodes_known: int
    heads_set: int
    heads_kept: tuple[HeadKept, ...]
    media: int
    aliases: int
    ids: Mapping[bytes, bytes]
    pins: int
    annotations: int = 0
    annotations_kept: tuple[AnnotationKept, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types, ids in hexadecimal."""
        kept = [attrs.asdict(head) | {"here": head.here.hex(), "bundled": head.bundled.hex()} for head in self.heads_kept]
        return attrs.asdict(self, recurse=False) | {
            "created": list(self.created),
            "merged": list(self.merged),
            "heads_kept": kept,
            "annotations_kept": [attrs.asdict(each) | {"node_id": each.node_id.hex()} for each in self.annotations_kept],
            "ids": {old.hex(): new.hex() for old, new in self.ids.items()},
        }


# Export


class _Snapshot(NamedTuple):
    """A session as it is exported. ``tip``: of a fork of one that is exported too, the number of that one and the ordinal there.

    ``above``: the trees of that one and of what it is a fork of itself, the nearest first.
    """

    session_id: str
    tree: SessionTree
    pins: Collection[bytes]
    tip: tuple[int, int] | None = None
    above: tuple[SessionTree, ...] = ()


def export_bundle(
    store: SessionStore,
    path: str | os.PathLike[str],
    sessions: Iterable[str] | None = None,
    *,
    subtree: Node | None = None,
    features: bool = False,
    compress: Literal["zstd"] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write sessions to one file, which takes the place of one of that name when all of it is on disk.

    ``sessions``: ids; None: all. Each is written as it is at one moment, whoever writes to it meanwhile. ``subtree``: only this
    node, its path, and what stands below it, with the heads there; ``sessions`` then names the one it is in, where several hold it.
    ``features``: with those of the media, where they are held. ``compress``: "zstd" takes the package zstandard. ``progress`` is
    called with nodes written and nodes to write.

    Raises UnknownSession, UnknownNode, Unsupported also for a path inside a store, NeedsExtra where the package is missing,
    CorruptTree where a node cannot be read, StoreFailed where the disk refuses. What has the name is then what had it before, or a
    whole bundle.
    """
    if compress not in (None, "zstd"):
        raise Unsupported(f"compress={compress!r}; zstd, or None", compress=compress)
    if isinstance(sessions, (str, bytes)):
        raise TypeError(f"sessions are a list of ids, not {type(sessions).__name__}")
    try:
        store.flush()
    except StoreClosed:
        raise
    except StoreFailed:
        pass  # what is there, and what this process sees, can be kept elsewhere all the same
    path = os.path.abspath(path)
    _check_outside(path)
    left_out: list[str] = []
    snapshots = _snapshots(store, sessions, subtree, left_out)
    report = _written(store, snapshots, path, subtree=subtree, features=features, compress=compress, progress=progress)
    return attrs.evolve(report, left_out=tuple(left_out))


def _written(
    store: SessionStore,
    snapshots: Sequence[_Snapshot],
    path: str,
    *,
    subtree: Node | None = None,
    features: bool,
    compress: Literal["zstd"] | None,
    progress: Progress | None,
) -> ExportReport:
    """Write snapshots of sessions to the file of a path that was checked."""
    outline = [
        (
            each.session_id,
            each.tree.root.id,
            len(each.tree),
            sorted((name, head.version) for name, head in each.tree._heads.items()),
        )
        for each in snapshots
    ]
    identity = sha256(pack((outline, None if subtree is None else subtree.id, features))).digest()[:16]
    writer = BundleWriter(_SYSTEM, path, identity, compress=compress is not None)
    try:
        return _Export(store, snapshots, writer, features, progress).run(path, subtree)
    except BaseException:
        writer.abandon()
        raise


def _check_outside(path: str) -> None:
    """Raises Unsupported for a place in the directory of a store."""
    where = os.path.realpath(path)
    while (above := os.path.dirname(where)) != where:
        where = above
        if os.path.isfile(f"{where}/FORMAT") and os.path.isdir(f"{where}/segments"):
            raise Unsupported(f"{path} lies in the store at {where}; a bundle is written elsewhere")


def _snapshots(store: SessionStore, sessions: Iterable[str] | None, subtree: Node | None, left_out: list[str]) -> list[_Snapshot]:
    """Sessions in the order of the store, so that forks come behind what they were made from.

    ``left_out``: takes the ids of those that cannot be read, where a store serves what is sound of it and all are asked for.
    """
    known = store.sessions()
    wanted = frozenset(known if sessions is None else sessions)
    for name in wanted.difference(known):
        raise UnknownSession(f"no session {name!r} in {store!r}", session_id=name)
    found: list[_Snapshot] = []
    for name in known:
        try:
            view = store._view_of(name) if name in wanted else None
        except CorruptTree:
            if sessions is not None or not store.damaged:
                raise
            left_out.append(name)
            continue
        if view is not None:
            found.append(_Snapshot(name, *view))
        elif name in wanted and sessions is not None:
            raise UnknownSession(f"session {name!r} was closed", session_id=name)
    if subtree is None:
        return _with_tips(store, found)
    if not isinstance(subtree, Node):
        raise TypeError(f"a subtree is that of a Node, not of {type(subtree).__name__}")
    holding = [each for each in found if subtree in each.tree]
    if len(holding) > 1:
        some = ", ".join(repr(each.session_id) for each in holding[:8])
        raise Unsupported(f"{subtree!r} is in {len(holding)} sessions: {some}; name one", node=subtree)
    if not holding:
        raise UnknownNode(f"{subtree!r} is in none of {len(found)} sessions", node_id=subtree.id)
    return holding


def _with_tips(store: SessionStore, found: Sequence[_Snapshot]) -> list[_Snapshot]:
    """Snapshots, forks of others among them known to be such."""
    journal = store._journal
    numbers: dict[Any, int] = {}  # by what a fork knows of where it came from
    snapshots: list[_Snapshot] = []
    for number, (name, tree, pins, *_) in enumerate(found):
        layers = [index for index, _ in tree._index.layers_upward(tree._count)]
        tip: tuple[int, int] | None = None
        if journal is not None:
            mine = journal.number_of(name)
            numbers[mine] = number
            at = None if mine is None else journal.tip_of(mine)
            if at is not None and at[0] in numbers:
                tip = numbers[at[0]], at[1]
        else:
            numbers |= {id(index): number for index in layers}
            tip = _tip_in_memory(layers[0], numbers, snapshots)
        source = None if tip is None else snapshots[tip[0]]
        above = () if source is None else (source.tree, *source.above)
        snapshots.append(_Snapshot(name, tree, pins, tip, above))
    return snapshots


def _tip_in_memory(lowest: NodeIndex, numbers: Mapping[Any, int], snapshots: Sequence[_Snapshot]) -> tuple[int, int] | None:
    index = None if lowest._tip_source is None else lowest._tip_source()
    number = numbers.get(id(index))
    if lowest.tip is None or number is None:
        return None
    tree = snapshots[number].tree
    ordinal = tree._index.find_ordinal(lowest.tip, tree._count)
    return None if ordinal is None else (number, ordinal)


def _aliases(store: SessionStore, snapshots: Sequence[_Snapshot]) -> dict[tuple[Namespace, str], bytes]:
    """What aliases name in the namespaces of the sessions."""
    found = {} if store._journal is None else store._journal.aliases()
    found.update(store._aliases)
    scopes = {each.tree.root.namespace for each in snapshots}
    return {key: identity for key, identity in found.items() if identity is not None and key[0] in scopes}


class _Export:
    def __init__(
        self,
        store: SessionStore,
        snapshots: Sequence[_Snapshot],
        writer: BundleWriter,
        features: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._snapshots = snapshots
        self._writer = writer
        self._features = features
        self._progress = progress
        self._done = self._skipped = self._annotations = 0
        self._unread: list[bytes] = []  # nodes whose annotations cannot be read
        self._total = sum(len(each.tree) for each in snapshots)
        self._ordinals: list[Any] = []  # of each session, the new ordinals of its nodes by the old ones; -1: none
        self._alone: set[int] = set()  # sessions that share no path there
        self._next = 0
        self._pins: list[bytes] = []
        self._heads: list[bytes] = []
        self._aliases = _aliases(store, snapshots)
        self._items: dict[bytes, MediaItem] = {}  # one of each content
        self._named: set[tuple[Namespace, bytes]] = set()  # identities that stand in sessions of a namespace

    def run(self, path: str, subtree: Node | None) -> ExportReport:
        for number, snapshot in enumerate(self._snapshots):
            if subtree is None:
                self._session(number, snapshot)
            else:
                self._subtree(snapshot, subtree)
        for number in range(len(self._snapshots)) if subtree is None else ():
            self._said(number)
        media = sum(self._put_features(content, item) for content, item in self._items.items()) if self._features else 0
        aliases = [(*key, identity) for key, identity in self._aliases.items() if (key[0], identity) in self._named]
        for scope, alias, identity in sorted(aliases, key=pack):
            self._writer.add(codec.encode(codec.AliasRecord(scope, alias, identity)))
        for record in (*self._pins, *self._heads):
            self._writer.add(record)
        size = self._writer.finish()
        if self._progress is not None:
            self._progress(self._done, self._done)
        names = tuple(each.session_id for each in self._snapshots)
        return ExportReport(
            path,
            names,
            self._done,
            len(self._heads),
            media,
            len(aliases),
            size,
            self._skipped,
            len(self._pins),
            annotations=self._annotations,
            unread=len(self._unread),
        )

    def _begin(self, number: int, snapshot: _Snapshot, tip: tuple[int, int] | None) -> None:
        root = snapshot.tree.root
        rules = root.scheme
        constants = (rules.name, tuple(sorted(rules.params.items())), root.namespace, root.model_fingerprint)
        what = constants if tip is None else ("", (), Namespace(), "")
        record = codec.SessionRecord(number, snapshot.session_id, *what, snapshot.tree.limits, root.id, tip)
        self._writer.add(codec.encode(record))

    def _session(self, number: int, snapshot: _Snapshot) -> None:
        tree, source = snapshot.tree, snapshot.tip
        ordinals = np.full(tree._count, -1, np.int64)
        self._ordinals.append(ordinals)
        layers = tree._index.layers_upward(tree._count)
        lowest = layers[0][0]
        tip = None if source is None else int(self._ordinals[source[0]][source[1]])
        if source is None or tip is None or tip < 0 or lowest.tip is None:
            self._alone.add(number)
            self._begin(number, snapshot, None)
            ordinals[0], self._next = 0, 1
            for node in () if lowest.tip is None else lowest.tip.path()[1:]:
                self._node(number, node, ordinals, node.depth, node.depth - 1)
        else:
            self._begin(number, snapshot, (source[0], tip))
            self._next = lowest.tip.depth + 1
            ordinals[: self._next] = np.arange(self._next)
        for index, visible in layers:
            if isinstance(index, StoredIndex):
                stored = index.source
                for ordinal in range(stored.first, visible):
                    if stored.lenient or stored.has(ordinal):  # or it was dropped
                        self._stored(number, stored, ordinals, ordinal, tree.root.namespace)
                continue
            for ordinal, node in enumerate(index.nodes[: visible - index.base_count], index.base_count):
                parent = None if node.parent is None else index.find_ordinal(node.parent, visible)
                if parent is not None:
                    self._node(number, node, ordinals, ordinal, parent)
        heads = []
        for name, head in tree._heads.items():
            at = head.ordinal if isinstance(head, StoredHead) else tree._index.find_ordinal(head.node, tree._count)
            lost = at is None or at >= len(ordinals)  # damage hides the node
            heads.append((name, -1 if lost else int(ordinals[at]), head.version))
        self._keep_heads(number, heads)
        self._keep_pins(number, snapshot, lambda node: int(ordinals[tree._index.find_ordinal(node, tree._count)]))

    def _subtree(self, snapshot: _Snapshot, top: Node) -> None:
        tree = snapshot.tree
        top = tree._resolve(top)
        self._begin(0, snapshot, None)
        ordinals = {tree.root.id: 0}
        self._next = 1
        above = top.path()[1:]
        below: Iterator[Node] = tree.descendants(top)
        for node in (*above, *below):
            assert node.parent is not None
            self._encode(0, node, self._next, ordinals[node.parent.id])
            ordinals[node.id] = self._next
            self._next += 1
        if tree._log is not None:
            for node_id, ordinal in ordinals.items():
                self._write_said(0, ordinal, tree.node(node_id), self._own_said(tree, node_id, ordinals))
        inside = ordinals.keys() - {node.id for node in top.path()[:-1]}
        heads = []
        for name, head in tree._heads.items():
            with suppress(*((CorruptTree,) if self._store.damaged else ())):
                heads.append((name, ordinals[head.node.id] if head.node.id in inside else -1, head.version))
        self._keep_heads(0, heads)
        self._keep_pins(0, snapshot, lambda node: ordinals[node.id] if node.id in inside else -1)

    def _own_said(self, tree: SessionTree, node_id: bytes, there: Collection[bytes]) -> Mapping[str, Annotation]:
        """What is said of a node; also what it has as a prefix of one that does not come along."""
        node = tree.node(node_id)
        try:
            if any(link.kind == "prefix_of" and link.node_id not in there for link in node.links):
                return tree.annotations(node)
            return tree._read_said([node], None)[0]
        except CorruptTree:
            if not self._store.damaged:
                raise
            self._unread.append(node_id)
            return {}

    def _said(self, number: int) -> None:
        """The annotations of a session; of the path that it shares there, those that the other sessions have not."""
        ordinals = self._ordinals[number]
        above = () if number in self._alone else self._snapshots[number].above
        unread = self._unread if self._store.damaged else None
        for ordinal, node, values in annotated(self._snapshots[number].tree, above, alone=True, unread=unread):
            at = int(ordinals[ordinal]) if ordinal < len(ordinals) else -1
            if at >= 0:
                self._write_said(number, at, node, values)

    def _write_said(self, number: int, ordinal: int, node: Node, values: Mapping[str, Annotation]) -> None:
        for name, value in sorted(values.items()):
            self._writer.add(codec.encode(codec.AnnotationRecord(number, ordinal, node.id, name, value, VERSION)))
            self._annotations += 1

    def _keep_pins(self, number: int, snapshot: _Snapshot, ordinal_of: Callable[[Node], int]) -> None:
        pinned = []
        for pin in snapshot.pins:
            with suppress(UnknownNode, *((CorruptTree,) if self._store.damaged else ())):  # one that came after the tree was taken
                pinned.append((ordinal_of(snapshot.tree.node(pin)), pin))
        self._pins += [codec.encode(codec.PinRecord(number, at, pin, True)) for at, pin in sorted(pinned) if at >= 0]

    def _keep_heads(self, number: int, heads: list[tuple[str, int, int]]) -> None:
        for name, ordinal, version in sorted(heads, key=lambda head: (head[2], head[0])):
            if ordinal >= 0:
                self._heads.append(codec.encode(codec.HeadRecord(number, name, ordinal, version)))

    def _node(self, number: int, node: Node, ordinals: Any, ordinal: int, parent: int) -> None:
        self._encode(number, node, self._next, int(ordinals[parent]))
        ordinals[ordinal] = self._next
        self._next += 1

    def _encode(self, number: int, node: Node, ordinal: int, parent: int) -> None:
        self._writer.add(codec.node_parts(number, ordinal, parent, node))
        self._count(node.media, node.namespace)

    def _stored(self, number: int, source: NodeSource, ordinals: Any, ordinal: int, scope: Namespace) -> None:
        """A node that lies in a store, as it lies there."""
        try:
            parent, record = source.parent_of(ordinal), source.raw(ordinal)
            entry = codec.entry_of(record)
            if entry.kind != codec.NODE or (entry.ordinal, entry.parent) != (ordinal, parent) or not parent < ordinal:
                raise CorruptTree(f"the record of node {ordinal} is that of another")
            above = int(ordinals[parent])
            node = codec.decode(record) if self._features or self._aliases else None
        except CorruptTree:
            if not source.lenient:
                raise
            above = -1
        if above < 0:
            self._skipped += 1
            return
        self._writer.add(codec.renumbered(record, number, self._next, above))
        self._count(node.media if isinstance(node, codec.NodeRecord) else (), scope)
        ordinals[ordinal] = self._next
        self._next += 1

    def _count(self, media: Sequence[MediaItem], scope: Namespace) -> None:
        for item in media if self._features or self._aliases else ():
            self._items.setdefault(content_digest(item.content()), item)
            self._named.add((scope, item.identity))
        self._done += 1
        if self._progress is not None and not self._done % _BATCH:
            self._progress(self._done, max(self._done, self._total))

    def _put_features(self, content: bytes, item: MediaItem) -> bool:
        arrays = self._store._features.kept(item)
        if arrays is None:
            return False
        number, waiting = 0, bytearray()
        for data in encoded_arrays(content.hex(), arrays):
            waiting += data
            if len(waiting) >= _PIECE:
                self._writer.add(encode_piece(number, content, bytes(waiting)))
                number, waiting = number + 1, bytearray()
        self._writer.add(encode_piece(number, content, bytes(waiting)))
        return True


# Reading


class Bundle(SessionStore):
    """The sessions of a bundle: a store that is only read. Made by :func:`open_bundle`.

    ``sessions``, ``get``, and what a session answers, are those of a store: nodes are read as they are asked for. What would change
    something raises Unsupported. ``nodes``: how many are there, roots not counted, nor paths that forks share. ``media``: contents
    whose features are there. ``size``: bytes of the file. ``compressed``: whether by zstd.
    """

    path: str
    nodes: int
    media: int
    size: int
    compressed: bool

    def __enter__(self) -> Bundle:
        return self


def open_bundle(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Bundle:
    """A bundle, to be read like a store; close it, or leave a ``with`` block.

    All of its checksums are compared, no node is read. ``max_bytes``: what a compressed one may expand to, in a temporary file.
    Raises IncompatibleStore for what is no bundle, CorruptTree for one that is damaged or was cut, LimitExceeded, StoreFailed.
    """
    contents = open_contents(_SYSTEM, os.path.abspath(path), max_bytes)
    bundle, file = Bundle(), contents.file
    bundle._journal = Journal(file, contents.path, bundle._features, bundle._paths, bundle._nodes)
    bundle._features.files = BundledFeatures(contents)
    bundle.path, bundle.nodes, bundle.media = contents.path, contents.nodes, len(contents.features)
    bundle.size, bundle.compressed = file.size, file.compressed
    return bundle


# Import


def import_bundle(
    store: SessionStore,
    path: str | os.PathLike[str],
    *,
    namespace: Namespace | Mapping[str, str | None] | str | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> ImportReport:
    """Take the sessions of a bundle into a store: what is missing is added, what is there stays. Doing it again changes nothing.

    A session that is not there is made, with the same commit order and versions of heads. One that is there, with the same root,
    gets the nodes that it has not, under the same ids; what it has stays as it is. A head is set where there is none of its name,
    and moved where it is on the path of the bundled one; others stay and are reported. Heads come last, when all else is there.
    Annotations are added of nodes, and of tokens, of which nothing is said by that name; others stay and are reported.
    ``namespace``: take them into this one, where they get other ids, with the keys and at the positions they have. ``max_bytes``:
    as for :func:`open_bundle`. ``progress`` is called with steps done and steps to do, two a node. What has returned is on disk.

    Raises IncompatibleStore for a session that has another root here, KeyTaken for an alias or key that names other content here,
    LimitExceeded for paths above a session's limit, and what open_bundle raises: nothing has changed then. What writing raises may
    leave whole nodes under their parents, as a process that was killed does: do it again, and it goes on.
    """
    contents = open_contents(_SYSTEM, os.path.abspath(path), max_bytes)
    try:
        return _Import(store, contents, None if namespace is None else Namespace.of(namespace), progress).run()
    finally:
        contents.file.close()


_Wanted = tuple[bytes, str, Annotation]  # the id of a node, a name, and what is to be said


class _Import:
    """``ids``: those that places get; ``renamed``: where they are other ones than in the bundle, by those."""

    def __init__(self, store: SessionStore, contents: Contents, namespace: Namespace | None, progress: Progress | None) -> None:
        self._store = store
        self._contents = contents
        self._namespace = namespace
        self._progress = progress
        self._ids = contents.ids()
        self._renamed: dict[bytes, bytes] = {}
        self._stops = array("q", bytes(8 * len(contents.entries)))  # tokens on the path of each place
        self._items: dict[bytes, MediaItem] = {}  # one of each content whose features come
        self._created: dict[str, Session] = {}
        self._added = self._known = self._set = self._steps = 0
        self._kept: list[HeadKept] = []
        self._annotations = 0
        self._annotations_kept: list[AnnotationKept] = []

    def run(self) -> ImportReport:
        store, contents = self._store, self._contents
        store._check_open()
        if store._journal is not None:
            store._journal.check_writable()
        aliases = [(each.alias, each.identity or b"", self._scope(each.namespace)) for each in contents.aliases]
        for alias, identity, scope in aliases:
            self._check_alias(alias, identity, scope)
        for number in range(len(contents.sessions)):
            self._check(number)
        for number in range(len(contents.sessions)):
            self._take(number)
            self._annotate(number)  # before a fork is made, which sees it then
        for content, item in self._items.items():
            store._features.take(item, contents.arrays(content) or {})
        for alias, identity, scope in aliases:
            store.alias_media(alias, identity, scope)
        for number, pins in enumerate(contents.pins):
            if pins:
                self._pin(number, pins)
        for number, heads in enumerate(contents.heads):
            if heads:
                self._set_heads(contents.sessions[number].session_id, heads)
        store.flush()
        if self._progress is not None:
            self._progress(2 * contents.nodes, 2 * contents.nodes)
        names = [record.session_id for record in contents.sessions]
        return ImportReport(
            contents.path,
            tuple(self._created),
            tuple(name for name in names if name not in self._created),
            self._added,
            self._known,
            self._set,
            tuple(self._kept),
            len(self._items),
            len(aliases),
            self._renamed,
            sum(map(len, contents.pins)),
            self._annotations,
            tuple(self._annotations_kept),
        )

    def _scope(self, namespace: Namespace) -> Namespace:
        return namespace if self._namespace is None else self._namespace

    def _id(self, place: int) -> bytes:
        return bytes(self._ids[ID_BYTES * place : ID_BYTES * (place + 1)])

    def _rename(self, place: int, old: bytes, new: bytes) -> None:
        self._ids[ID_BYTES * place : ID_BYTES * (place + 1)] = new
        self._renamed[old] = new

    def _step(self) -> None:
        self._steps += 1
        if self._progress is not None and not self._steps % _BATCH:
            self._progress(min(self._steps, 2 * self._contents.nodes), 2 * self._contents.nodes)

    def _tree(self, number: int) -> SessionTree | None:
        view = self._store._view_of(self._contents.sessions[number].session_id)
        return None if view is None else view[0]

    def _places(self, number: int, tree: SessionTree) -> Iterator[int]:
        """Where the nodes of a session stand, those of a fork's path before them, as far as the tree has them not."""
        above = itertools.takewhile(lambda place: not _holds(tree, self._id(place)), self._contents.path_above(number))
        return itertools.chain(reversed(tuple(above)), range(self._contents.starts[number] + 1, self._contents.stops[number]))

    # Before anything is changed

    def _check_alias(self, alias: str, identity: bytes, scope: Namespace) -> None:
        with self._store._opening:
            known = self._store._alias(scope, alias)
        if known is not None and known != identity:
            raise KeyTaken(f"alias {alias!r} names {known[:4].hex()} here, not {identity[:4].hex()}", key=alias, identity=known)

    def _check(self, number: int) -> None:
        """Read a session, and see whether all of it can be taken."""
        contents = self._contents
        record, origin, start = contents.sessions[number], contents.origin(number), contents.starts[number]
        scope = self._scope(origin.namespace)
        if self._namespace is not None:
            self._rename(start, record.root_id, root_id(origin.scheme, origin.params, scope, origin.model_fingerprint))
        tree = self._tree(number)
        if tree is not None and tree.root.id != self._id(start):
            here, there = tree.root, self._id(start)
            raise IncompatibleStore(
                f"session {record.session_id!r} has root {here.id[:4].hex()} here, of "
                f"{_described(here.scheme, here.namespace, here.model_fingerprint)}; the bundle's would be {there[:4].hex()}, of "
                f"{_described(contents.rules[number], scope, origin.model_fingerprint)}",
                session_id=record.session_id,
                expected=here.id,
                found=there,
            )
        limit = record.limits.max_tokens if tree is None else tree.limits.max_tokens
        for place in range(start + 1, contents.stops[number]):
            self._check_node(number, place)
        for place in range(start + 1, contents.stops[number]) if tree is None else self._places(number, tree):
            if limit is not None and self._stops[place] > limit and (tree is None or not _holds(tree, self._id(place))):
                raise LimitExceeded(
                    f"a path of {self._stops[place]} tokens; session {record.session_id!r} allows {limit}",
                    value=self._stops[place],
                    limit=limit,
                )
            if tree is not None and contents.entries["key"][place]:
                self._check_key(tree, place)

        for place in contents.said[number]:
            at, annotation = contents.annotation(place)
            count = self._stops[at] - self._stops[contents.parents[at]] if contents.parents[at] >= 0 else 0
            if isinstance(annotation.value, OfTokens) and annotation.value.stop > count:
                what = f"annotation {annotation.name!r} of node {self._id(at)[:4].hex()}"
                raise contents.wrong(f"{what} goes to token {annotation.value.stop} of {count}")

    def _check_node(self, number: int, place: int) -> None:
        contents = self._contents
        record = contents.check(number, place, self._stops)
        if self._namespace is not None:
            self._rename(place, record.id, codec.id_below(record, self._id(contents.parents[place])))
        for item in record.media if contents.features else ():
            content = content_digest(item.content())
            if content in contents.features:
                self._items.setdefault(content, item)
        self._step()

    def _check_key(self, tree: SessionTree, place: int) -> None:
        """Whether a node's key is free, or its own, under its parent."""
        parent = self._id(self._contents.parents[place])
        if _holds(tree, self._id(place)) or not _holds(tree, parent):
            return
        key = self._contents.node(place).key
        node = None if key is None else tree._index.find_child(tree.node(parent), self._id(place), key, tree._count)
        if node is not None:
            raise KeyTaken(
                f"key {key!r} under {parent[:4].hex()} names {node!r} here, and {self._id(place)[:4].hex()} in the bundle",
                key=key,
                node=node,
            )

    # Changing it

    def _take(self, number: int) -> None:
        """Add what is missing of a session."""
        contents, store = self._contents, self._store
        session_id = contents.sessions[number].session_id
        tree = self._tree(number)
        session: Session | None = None
        if tree is None:
            session = self._created[session_id] = self._create(number)
            tree = session.tree
        waiting: list[tuple[bytes, Turn, Details]] = []
        size = 0
        for place in self._places(number, tree):
            self._step()
            if _holds(tree, self._id(place)):
                self._known += 1
                continue
            waiting.append(self._turn(place))
            size += int(contents.entries["length"][place])
            if len(waiting) >= _BATCH or size >= _BATCH_BYTES:
                session = session or store.get(session_id)
                self._add(session, waiting)
                size = 0
        if waiting:
            self._add(session or store.get(session_id), waiting)

    def _add(self, session: Session, waiting: list[tuple[bytes, Turn, Details]]) -> None:
        added = session._take(waiting)
        self._added += added
        self._known += len(waiting) - added
        waiting.clear()

    def _create(self, number: int) -> Session:
        contents, store = self._contents, self._store
        record, tip = contents.sessions[number], contents.tips[number]
        if record.tip is None or tip is None:
            return store.create(
                record.session_id,
                scheme=contents.rules[number],
                namespace=self._scope(record.namespace),
                model_fingerprint=record.model_fingerprint,
                max_tokens=record.limits.max_tokens,
                reserve_output=record.limits.reserve_output,
            )
        source = contents.sessions[record.tip[0]].session_id
        return _forked(store, source, self._id(tip), record.session_id, record.limits)

    def _turn(self, place: int) -> tuple[bytes, Turn, Details]:
        """A node that was checked, as it is to be taken: its parent's id, and what it is."""
        record = self._contents.node(place)
        details = record.details
        if self._namespace is not None and details.links:  # what they name came before, or is not here
            links = (link._replace(node_id=self._renamed.get(link.node_id, link.node_id)) for link in details.links)
            details = details._replace(links=tuple(links))
        what = (record.data, record.media, record.origin, record.role, record.key, record.runs, record.state, record.replayed)
        return self._id(self._contents.parents[place]), Turn(self._id(place), *what), details

    def _annotate(self, number: int) -> None:
        """Say what the bundle says of nodes, where that changes nothing that is said."""
        waiting: list[_Wanted] = []
        size = 0
        for place in self._contents.said[number]:
            at, annotation = self._contents.annotation(place)
            waiting.append((self._id(at), annotation.name, annotation.value))
            size += int(self._contents.entries["length"][place])
            if len(waiting) >= _BATCH or size >= _BATCH_BYTES:
                self._say(number, waiting)
                waiting, size = [], 0
        if waiting:
            self._say(number, waiting)

    def _say(self, number: int, wanted: Sequence[_Wanted]) -> None:
        session_id = self._contents.sessions[number].session_id
        tree, _ = self._view(session_id)
        say = partial(_said_as_is if session_id in self._created else _said_too, wanted)
        after, (count, kept) = say(tree)
        if after is not tree:
            count, kept = self._store.get(session_id)._swap(say)
        self._annotations += count
        self._annotations_kept += [AnnotationKept(session_id, *each) for each in kept]

    def _view(self, session_id: str) -> tuple[SessionTree, Collection[bytes]]:
        view = self._store._view_of(session_id)
        if view is None:
            raise UnknownSession(f"session {session_id!r} was closed", session_id=session_id)
        return view

    def _pin(self, number: int, places: Sequence[int]) -> None:
        session_id = self._contents.sessions[number].session_id
        _, pins = self._view(session_id)
        for node_id in map(self._id, places):
            if node_id not in pins:
                self._store.get(session_id).pin(node_id)

    def _set_heads(self, session_id: str, heads: Sequence[tuple[str, int, int]]) -> None:
        wanted = [(name, self._id(place), version) for name, place, version in heads]
        tree, _ = self._view(session_id)
        after, (count, kept) = _moved(tree, wanted)
        if after is not tree:
            count, kept = self._store.get(session_id)._swap(lambda tree: _moved(tree, wanted))
        self._set += count
        self._kept += [HeadKept(session_id, *each) for each in kept]


def _forked(store: SessionStore, source_id: str, node_id: bytes, session_id: str, limits: Limits) -> Session:
    """A new session over the path of a node of another. Raises UnknownNode, SessionExists."""
    while True:
        source = store.get(source_id)
        tree, drops = source._seen()
        node = tree.node(node_id)
        with suppress(Overtaken):  # something was dropped: perhaps this node
            return store._fork(source, tree, node, session_id, tree._over_path(node, limits), drops)


def _moved(
    tree: SessionTree, wanted: Sequence[tuple[str, bytes, int]]
) -> tuple[SessionTree, tuple[int, list[tuple[str, bytes, bytes]]]]:
    """A tree with heads set where that loses nothing: how many, and those that stay, with where they are and would be."""
    count = 0
    kept = []
    for name, node_id, version in wanted:
        there = tree._head(name)
        if there is not None and there.node.id == node_id:
            continue
        node = tree.node(node_id)
        if there is not None and (there.node.depth > node.depth or node.ancestor(there.node.depth).id != there.node.id):
            kept.append((name, there.node.id, node_id))
            continue
        moves = max(version, tree._moves + 1)  # so that none comes twice
        tree = tree._after_move(name, Head(node, moves))
        count += 1
    return tree, (count, kept)


def _said_as_is(wanted: Sequence[_Wanted], tree: SessionTree) -> tuple[SessionTree, tuple[int, list[tuple[bytes, str]]]]:
    """A tree where this is said, and nothing else by these names: of how many, and none that stays otherwise."""
    nodes = [tree.node(node_id) for node_id, _, _ in wanted]
    there = tree._read_said(nodes, None)
    more = [Said(*each) for each, known in zip(wanted, there, strict=True) if not same(each[2], known.get(each[1]))]
    return tree._saying(more), (len(more), [])


def _said_too(wanted: Sequence[_Wanted], tree: SessionTree) -> tuple[SessionTree, tuple[int, list[tuple[bytes, str]]]]:
    """A tree where more is said, of whole nodes or tokens of which nothing was: of how many names; and where something else is."""
    count = 0
    kept = []
    for node_id, name, value in wanted:
        node = tree.node(node_id)
        there = tree._read_said([node], name)[0].get(name)
        try:
            both = value if there is None else there if not isinstance(there, OfTokens) else said_over(there, value, name)
            if there is not None and not same(both, said_over(value, there, name)):
                kept.append((node_id, name))
        except Unsupported:  # of two kinds
            kept.append((node_id, name))
            continue
        if not same(both, there):
            tree = tree._annotated(node, {name: both})
            count += 1
    return tree, (count, kept)


def _holds(tree: SessionTree, node_id: bytes) -> bool:
    """Whether a tree has a node, without reading it."""
    index: NodeIndex | None = tree._index
    count = tree._count
    while index is not None:
        ordinal = index.by_id.get(node_id)
        if ordinal is not None and ordinal < count:
            return True
        if index.tip is not None:
            return index._find_on_tip(node_id) is not None
        count = min(count, index.base_count)
        index = index.base
    return False


def _described(rules: PositionScheme, namespace: Namespace, fingerprint: str) -> str:
    """What a root's id is made of."""
    fields = {**namespace._asdict(), "model fingerprint": fingerprint or None}
    return ", ".join((rules.name, *(f"{name} {value!r}" for name, value in fields.items() if value is not None)))
