"""Nodes that lie in a store, made when they are first asked for: the lowest layer of a session that was opened again.

A :class:`StoredIndex` answers what a :class:`~sessiontree.index.NodeIndex` does, from a :class:`NodeSource` that knows ids, parents
and places of all nodes without reading them. A node is made from its record, checked against its id, with all of its path; what
nobody holds any more is forgotten and read again the next time, so that reading a path takes memory for that path. Nothing is
added to it: what a session writes after it was opened lies in a layer above.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree.details import Details, Link, TailPolicy
from sessiontree.errors import CorruptTree
from sessiontree.index import Limits, NodeIndex
from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.memory import HeldNodes
from sessiontree.node import MediaSpan, Node, Origin, is_on_path, make_child, own_spans
from sessiontree.positions import PositionScheme
from sessiontree.prefixes import PrefixIndex
from sessiontree.stored_prefixes import Content, StoredPrefixes
from sessiontree.tokens import TOKEN_BYTES, Extent, token_array
from sessiontree.turns import Turn

_AHEAD: Final = 4096  # nodes of a path that are read together
_TOGETHER_BYTES: Final = 16 * 2**20  # of their tokens that are gathered before nodes are made of them
_RECENT: Final = 4  # nodes that are kept, with their paths, although nobody holds them


class Stored(NamedTuple):
    """A node as its record has it; ``turn.id`` is what the record says it is. ``turn.data`` may be a view of the record."""

    turn: Turn
    details: Details


@attrs.frozen(eq=False)
class LoneNode:
    """A node as its record has it, without its path: what is said of one, and no more. Names mean what they mean for a Node.

    Its record was checked as any, against the id that its parent is to have. That of its parent was not read.
    """

    id: bytes
    parent_id: bytes
    depth: int
    start: int
    stop: int
    role: str
    origin: Origin
    key: str | None
    media: tuple[MediaItem, ...]
    scheme: PositionScheme
    _data: bytes
    _details: Details

    @property
    def finish_reason(self) -> str | None:
        return self._details.finish_reason

    @property
    def tail_policy(self) -> TailPolicy | None:
        return self._details.tail_policy

    @property
    def links(self) -> tuple[Link, ...]:
        return self._details.links

    def input_ids(self, start: int, stop: int) -> NDArray[np.int32]:
        """Path tokens ``[start, stop)``, of its own."""
        return token_array(self._data)[start - self.start : stop - self.start]

    def media_spans(self, start: int, stop: int) -> tuple[MediaSpan, ...]:
        """(item, start, stop) for each of its spans that meets the window, in path order and coordinates, clipped to it."""
        return tuple((item, begin, end) for item, begin, end, _ in own_spans(self.media, self.start, start, stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return True


class NodeSource(Protocol):
    """Nodes of one session by their ordinals, in commit order.

    ``first``: that of the first one here, behind the root or a path; ``len``: how many ordinals there are from there on, of which
    ``missing`` have no node, or none any more. ``lenient``: damage is known and told of, so whoever goes through all of them goes
    on behind a node that cannot be read. ``shared``: others may remove what is here, and give its ordinals to other nodes.
    """

    first: int
    missing: int
    lenient: bool
    shared: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tables by which nodes are found."""

    def __len__(self) -> int: ...

    def has(self, ordinal: int) -> bool: ...

    def read_path(self, ordinals: Sequence[int], parent: Node) -> Iterator[Stored]:
        """The nodes of a path below ``parent``, each checked to be a child of the one before. Raises CorruptTree.

        Where each costs a call of another machine, they are asked for together.
        """

    def read_alone(self, ordinal: int, parent_id: bytes, rules: PositionScheme) -> Stored:
        """One without its parent, of which only the id is known: it starts where it says itself. Raises CorruptTree."""

    def read_ahead(self, ordinals: Sequence[int]) -> None:
        """These are read next: where each costs a call of another machine, they are asked for together."""

    def raw(self, ordinal: int) -> bytes:
        """Its record as it lies there, its checksum checked and nothing else. Raises CorruptTree."""

    def parent_of(self, ordinal: int) -> int: ...

    def parents(self) -> NDArray[np.int64]:
        """Of all its nodes, in order; of one that is missing, an ordinal behind all there are."""

    def id_of(self, ordinal: int) -> bytes: ...

    def children_of(self, ordinal: int) -> Sequence[int]:
        """In commit order."""

    def parents_outside(self) -> Sequence[int]:
        """Those of all parents that are not here."""

    def contents(self, ordinals: Sequence[int]) -> Iterator[Content]:
        """What nodes hold, in any order. The checksums of their records are checked and nothing else. Raises CorruptTree."""

    def find(self, node_id: bytes, is_it: Callable[[int], bool] | None = None) -> int | None:
        """The ordinal of a node; of several, where it was dropped and made again: of the one that ``is_it``, or the first."""

    def differing(self, older: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Ordinals of the nodes here that an older look at the same session had not, and of those that only that one had.

        Of the latter without those below them.
        """

    def ids(self) -> NDArray[np.uint8]:
        """The ids of all its nodes, in order: (n, 32), zeros where one is missing. Nothing is read for it."""

    def find_key(self, parent: int, key: str) -> Sequence[int]:
        """Ordinals of the children of ``parent`` that may have this key."""

    @property
    def annotated(self) -> bool:
        """Whether anything is said of any node here, or of one of the path it lies over."""

    def annotated_ordinals(self, since: int = -1) -> NDArray[np.int64]:
        """Those of the nodes of which it says something, behind version ``since``, in order; some may be of nodes that are gone."""

    def annotations(self, ordinals: Sequence[int] | None, name: str | None) -> Iterator[Any]:
        """What is said of nodes (None: of all), of each in the order in which it was said; ``name``: by that one alone.

        Raises CorruptTree.
        """


class StoredIndex(NodeIndex):
    """The nodes of ``source`` below the root, or below the path of ``tip`` in a forked session. Never written to.

    ``held``: counts the nodes that are made. ``told``: what its maker made it of, for its maker to know whether that is still what
    there is. ``source`` may be replaced by one of the same nodes.
    """

    __slots__ = ("_held", "_known", "_loading", "_recent", "source", "told")

    def __init__(self, root: Node, limits: Limits, source: NodeSource, held: HeldNodes, *, tip: Node | None = None) -> None:
        super().__init__(root, limits, tip=tip)
        self.source: NodeSource = source
        self.told: object = None
        self._known: WeakValueDictionary[int, Node] = WeakValueDictionary()
        self._held = held
        self._recent: deque[Node] = deque(maxlen=_RECENT)
        self._loading = new_lock()
        # Proxies: it goes when nobody holds it, and with it what keeps its records on disk.
        self.nodes: Any = _Nodes(weakref.proxy(self))
        self.by_id: Any = _ById(weakref.proxy(self))
        self.by_key: Any = _ByKey(weakref.proxy(self))

    @property
    def missing(self) -> int:
        return self.source.missing

    def put(self, node: Node, node_id: bytes, slot: bytes | None) -> None:
        raise AssertionError("a stored index is never written to")

    def own_parents(self, count: int) -> Iterator[tuple[int, int]]:
        source = self.source
        if self.tip is None and count:
            yield 0, -1
        for ordinal, parent in enumerate(source.parents()[: max(0, count - source.first)].tolist(), source.first):
            if source.has(ordinal):
                yield ordinal, parent

    def own_children(self, parent: Node, visible: int) -> Iterator[tuple[int, Node]]:
        ordinal = self.ordinal_of(parent)
        if ordinal is None:
            return
        for child in self.source.children_of(ordinal):
            if child >= visible:
                return
            try:
                node = self.node(child)
            except CorruptTree:
                if not self.source.lenient:
                    raise
            else:
                yield child, node

    def _own_prefixes(self, count: int, below: PrefixIndex | None) -> PrefixIndex:
        with self._adding_lock:
            known = self._prefixes
            if known is None or known.count != count:
                known = self._prefixes = self._new_prefixes(None, count)
        return known

    def _new_prefixes(self, below: PrefixIndex | None, count: int) -> PrefixIndex:
        return StoredPrefixes(weakref.proxy(self), count)

    def _add_prefixes(self, prefixes: PrefixIndex, count: int) -> PrefixIndex:
        return prefixes  # it takes them in by itself

    def living(self) -> list[tuple[int, Node]]:
        """Those of its nodes that somebody holds, by ordinal."""
        while True:
            try:
                return list(self._known.items())
            except RuntimeError:  # somebody read another meanwhile
                continue

    def held_bytes(self) -> int:
        """Bytes of what finds its nodes; those that somebody holds are counted by whoever counts all of these."""
        known = self._prefixes
        return self.source.nbytes + (0 if known is None else known.held_bytes())

    def forget(self) -> None:
        """Keep nothing that nobody asks for: the nodes read last, and what is known of prefixes.

        Without the lock that readers take to make that: who makes it at this moment keeps it, and it goes the next time.
        """
        self._recent.clear()
        self._prefixes = None

    def adopt(self, ordinal: int, node: Node) -> None:
        """A node that is in memory already: it is given out from now on, for as long as somebody holds it."""
        self._known[ordinal] = node
        self._held.count(node)

    def adopt_living(self, nodes: Iterable[tuple[int, Node]]) -> None:
        """The same of those of an older look at the session that are still what stands under their ordinals."""
        source = self.source
        for ordinal, node in nodes:
            at = ordinal - source.first
            if 0 <= at < len(source) and source.has(ordinal) and source.id_of(ordinal) == node.id:
                self.adopt(ordinal, node)

    def children_of(self, ordinal: int) -> Sequence[int]:
        """Ordinals of the children of a node that lie here, in commit order."""
        return self.source.children_of(ordinal)

    def parents_outside(self) -> Sequence[int]:
        """Ordinals of the nodes that have children here and do not lie here themselves."""
        return self.source.parents_outside()

    def contents(self, ordinals: Sequence[int]) -> Iterator[Content]:
        """What nodes hold, in any order. Raises CorruptTree; where the source is lenient, those that are damaged are left out."""
        source = self.source
        if len(ordinals) > 1 and not source.lenient:
            yield from source.contents(ordinals)
            return
        for ordinal in ordinals:  # a single one will mostly be asked for as well
            try:
                node = self.node(ordinal)
            except CorruptTree:
                if not source.lenient:
                    raise
            else:
                yield ordinal, node._extent.read_bytes(node.start, node.stop), node.media

    def ordinal_of(self, node: Node, below: int | None = None) -> int | None:
        """The ordinal of a node that is here, or on the path it lies over.

        ``below``: that of a node whose path it is on, which tells it from others of its id, that were dropped or made after it was.
        """
        if node.parent is None:
            return 0
        if self.tip is not None and is_on_path(node, self.tip):
            return node.depth
        return self.source.find(node.id, None if below is None else partial(self._is_above, below))

    def _is_above(self, below: int, ordinal: int) -> bool:
        while below > ordinal:
            below = self.source.parent_of(below)
        return below == ordinal

    def node(self, ordinal: int) -> Node:
        """The node of an ordinal. Raises CorruptTree where its record, or that of a node before it, is damaged."""
        found = self._known.get(ordinal)
        if found is None:
            found = self._below(ordinal)
        if found is None:
            with self._loading:
                found = self._loaded(ordinal)
        self._recent.append(found)
        return found

    def alone(self, ordinal: int, depth: int) -> Node | LoneNode:
        """What is known of the node of an ordinal, which stands at this depth, without reading its path. Raises CorruptTree."""
        found = self._below(ordinal) or self._known.get(ordinal)
        if found is not None:
            return found
        parent = self.source.parent_of(ordinal)
        above, rules = self._below(parent), self.root.scheme
        parent_id = self.source.id_of(parent) if above is None else above.id
        turn, details = self.source.read_alone(ordinal, parent_id, rules)
        stop = turn.state.num_tokens
        start = stop - len(turn.data) // TOKEN_BYTES
        content = (turn.role, turn.origin, turn.key, turn.media)
        return LoneNode(turn.id, parent_id, depth, start, stop, *content, rules, turn.data, details)

    def id_of(self, ordinal: int) -> bytes:
        """The id of the node of an ordinal, which is not read for it."""
        below = self._below(ordinal)
        return self.source.id_of(ordinal) if below is None else below.id

    def _below(self, ordinal: int) -> Node | None:
        """A node that is not one of the source's."""
        if ordinal == 0:
            return self.root
        return self.tip.ancestor(ordinal) if self.tip is not None and ordinal <= self.tip.depth else None

    def _loaded(self, ordinal: int) -> Node:
        missing = []
        at = ordinal
        below = 0 if self.tip is None else self.tip.depth
        known, parent_of = self._known.get, self.source.parent_of
        while (node := self._below(at) if at <= below else known(at)) is None:
            missing.append(at)
            parent = parent_of(at)
            if not parent < at:
                raise CorruptTree(f"node {at} of the session names node {parent} as its parent, which is none before it")
            at = parent
        missing.reverse()
        for start in range(0, len(missing), _AHEAD):
            batch = missing[start : start + _AHEAD]
            made, stored, nbytes = start, list[Stored](), 0
            for each in self.source.read_path(batch, node):
                stored.append(each)
                nbytes += len(each[0][1])
                if nbytes > _TOGETHER_BYTES:
                    node = self._made(node, missing[made : made + len(stored)], stored)
                    made, stored, nbytes = made + len(stored), [], 0
            if stored:
                node = self._made(node, missing[made : made + len(stored)], stored)
        return node

    def _made(self, parent: Node, ordinals: Sequence[int], stored: Sequence[Stored]) -> Node:
        """Make the nodes of a path below ``parent``: its last. Their tokens are written at once, as what grows is copied."""
        extent = parent._extent
        data = b"".join([each.turn.data for each in stored])
        if data:
            if extent.writer is self.writer and extent.end == parent.stop:
                extent.append(data)
            else:
                extent = Extent(self.writer, extent, parent.stop, data, extent.paths)
        made: list[Node] = []
        node = parent
        for turn, details in stored:
            identity, _, media, origin, role, key, runs, state, replayed = turn
            stop = state[0]
            node = make_child(node, identity, stop, media, origin, role, key, runs, state, replayed, details, extent)
            made.append(node)
        self._held.count(*made)
        self._known.update(zip(ordinals, made, strict=True))
        return node


class StoredHead(NamedTuple):
    """A head whose node is made when it is asked for. ``uncertain``: damage may hide where it went later."""

    nodes: StoredIndex
    ordinal: int
    version: int
    uncertain: bool = False

    @property
    def node(self) -> Node:
        """Raises CorruptTree where it, or a node before it, is damaged."""
        return self.nodes.node(self.ordinal)


class _Nodes(Sequence[Node]):
    """As the list of nodes of another index; slices are gone through one node at a time."""

    def __init__(self, index: StoredIndex) -> None:
        self._index = index

    def __len__(self) -> int:
        source = self._index.source
        return source.first - self._index.base_count + len(source)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self._through(range(*at.indices(len(self))))
        return self._index.node(self._index.base_count + at)

    def _through(self, numbers: range) -> Iterator[Node]:
        source, base = self._index.source, self._index.base_count
        for number in numbers:
            if source.missing and not source.has(base + number):
                continue
            try:
                node = self[number]
            except CorruptTree:
                if not self._index.source.lenient:
                    raise
            else:
                yield node


class _ById:
    def __init__(self, index: StoredIndex) -> None:
        self._index = index

    def get(self, node_id: bytes) -> int | None:
        index = self._index
        return 0 if index.tip is None and node_id == index.root.id else index.source.find(node_id)


class _ByKey:
    def __init__(self, index: StoredIndex) -> None:
        self._index = index

    def get(self, slot: bytes) -> int | None:
        """The ordinal of the child of a parent that has a key; ``slot``: the parent's id and the key."""
        index, parent, key = self._index, slot[:32], slot[32:].decode()
        tip = index.tip
        ordinal = index.by_id.get(parent)
        if ordinal is None and tip is not None:
            node = index.find(parent, index.count)
            ordinal = None if node is None else node.depth
        for child in () if ordinal is None else index.source.find_key(ordinal, key):
            if index.node(child).key == key:
                return child
        return None
