"""The add-only index that the versions of a tree share: nodes in commit order, found by id, by key and by parent.

A version of a tree is an index and a count: it sees the first ``count`` nodes. An index may lie over another one, as a layer over
what an older version sees or over the path a session was forked at. Whoever writes holds its lock, or is alone in writing to it;
readers need none, since they never look beyond their count. Nothing is ever taken out or changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from sys import getsizeof
from threading import get_ident
from typing import Final, NamedTuple

from sessiontree.locks import new_lock
from sessiontree.memory import INT_BYTES, Ledger
from sessiontree.node import Node, is_on_path
from sessiontree.prefixes import Busy, History, PrefixIndex, PrefixMatch


class Limits(NamedTuple):
    """Context limits of a session: tokens on a path, and how many of them are kept free for output."""

    max_tokens: int | None = None
    reserve_output: int = 0


class NodeIndex:
    """Nodes in commit order, add-only, with the two ways to find them: by id and by (parent, key).

    ``base``: what it lies over, either an older version of another index (that index and a count) or, for a forked session, the
    path of ``tip``. Ordinals count from the bottom, so they agree in every layer. ``writer``: marks the extents it may write to;
    they must not hold the index itself, or every node would hold every other. ``busy``: somebody is adding to it; whoever comes
    in between on the same thread (a signal handler, a finalizer) leaves it alone.

    Whatever interrupts an addition, each step leaves the index right: at worst a node stays in it that no version sees.
    """

    __slots__ = (
        "__weakref__",
        "_adding",
        "_adding_lock",
        "_children_seen",
        "_first_child",
        "_last_child",
        "_ledger",
        "_linking",
        "_linking_lock",
        "_next_sibling",
        "_prefixes",
        "_tip_ids",
        "_tip_source",
        "base",
        "base_count",
        "busy",
        "by_id",
        "by_key",
        "layers",
        "limits",
        "lock",
        "nodes",
        "root",
        "tip",
        "writer",
    )

    def __init__(
        self,
        root: Node,
        limits: Limits,
        *,
        base: NodeIndex | None = None,
        base_count: int = 0,
        tip: Node | None = None,
        tip_source: NodeIndex | None = None,
    ) -> None:
        self.root: Node = root
        self.limits: Limits = limits
        self.base: NodeIndex | None = base
        self.tip: Node | None = tip
        self.base_count: int = base_count if tip is None else tip.depth + 1
        self.layers: int = 0 if base is None else base.layers + 1
        self.lock: Final = new_lock()
        self.busy: bool = False
        self.writer: object = object()
        self.nodes: list[Node] = []
        self.by_id: dict[bytes, int] = {}  # bytes and ints only: the garbage collector never walks it
        self.by_key: dict[bytes, int] = {}
        self._tip_source = None if tip_source is None else weakref.ref(tip_source)
        self._tip_ids: dict[bytes, int] | None = None
        self._children_seen = 0
        self._linking_lock = new_lock()  # for deriving children: readers do it, and no writer is to wait for them
        self._linking = 0  # the thread in which that is going on; a forked child has but one
        self._first_child: dict[bytes, int] = {}
        self._last_child: dict[bytes, int] = {}
        self._next_sibling: list[int] = []  # none: -1
        self._prefixes: PrefixIndex | None = None
        self._adding_lock = new_lock()  # the same for prefixes
        self._adding = 0
        self._ledger: Ledger | None = None  # none until somebody asks

    @property
    def count(self) -> int:
        return self.base_count + len(self.nodes)

    @property
    def bottom(self) -> NodeIndex:
        """The lowest layer."""
        index = self
        while index.base is not None:
            index = index.base
        return index

    @property
    def is_orphan(self) -> bool:
        """Whether it lies over the path of a session whose own index is gone."""
        return self._tip_source is not None and self._tip_source() is None

    @property
    def missing(self) -> int:
        """How many of the lowest layer's ordinals have no node any more. Only one that lies in a store has such."""
        return 0

    def add(self, node: Node) -> None:
        """Add a node; the lock is held and its id is not visible yet."""
        self.put(node, node.id, None if node.key is None or node.parent is None else slot_of(node.parent, node.key))

    def put(self, node: Node, node_id: bytes, slot: bytes | None) -> None:
        """The same, given its id and the :func:`slot_of` its key, None without one."""
        nodes = self.nodes
        ordinal = self.base_count + len(nodes)
        depth = node._up[3]
        if depth == ordinal:
            ordinal = depth  # the same object: where nobody branched, that is one int less to keep
        nodes.append(node)
        self.by_id[node_id] = ordinal
        if slot is not None:
            self.by_key[slot] = ordinal

    def held_bytes(self) -> int:
        """Bytes of its own nodes, their tokens, and what finds them; those of other layers, and of a fork's path, are not."""
        ledger = self._ledger
        if ledger is None:  # of two that are made at once either will do: each counts all there is
            ledger = self._ledger = Ledger()
        tables = (self.nodes, self.by_id, self.by_key, self._first_child, self._last_child, self._next_sibling, self._tip_ids)
        ordinals = INT_BYTES * (len(self._first_child) + len(self._last_child))
        known = self._prefixes
        prefixes = 0 if known is None else known.held_bytes()
        return ledger.held(self.nodes, self.base_count) + sum(map(getsizeof, tables)) + ordinals + prefixes

    def find(self, node_id: bytes, count: int) -> Node | None:
        """The node of this id among the first ``count``."""
        index: NodeIndex | None = self
        tip: Node | None = None  # of the first fork on the way down: only its path is seen
        while index is not None:
            ordinal = index.by_id.get(node_id)
            if ordinal is not None and ordinal < count:
                return _on_path(tip, index.nodes[ordinal - index.base_count])
            if index.tip is None:
                count = min(count, index.base_count)
                index = index.base
                continue
            tip = tip or index.tip
            source = None if index._tip_source is None else index._tip_source()
            if source is None:
                return _on_path(tip, index._find_on_tip(node_id))
            index, count = source, source.count  # where its path comes from, as long as that is there
        return None

    def find_ordinal(self, node: Node, count: int) -> int | None:
        """The ordinal of a node that is among the first ``count``."""
        index: NodeIndex | None = self
        while index is not None:
            ordinal = index.by_id.get(node.id)
            if ordinal is not None and ordinal < count:
                return ordinal
            if index.tip is not None:
                return node.depth if is_on_path(node, index.tip) else None
            count = min(count, index.base_count)
            index = index.base
        return None

    def id_of(self, ordinal: int) -> bytes:
        """The id of the node of an ordinal, which is not read for it where it lies in a store."""
        index = self._layer_of(ordinal)
        return self.node_at(ordinal).id if index is self else index.id_of(ordinal)

    @property
    def lowest(self) -> int:
        """The ordinal of the first node of the lowest layer, behind a forked session's path."""
        return self.bottom.base_count

    def nodes_from(self, first: int, count: int) -> Iterator[Node]:
        """Nodes with ordinals ``[first, count)``."""
        for index, visible in self.layers_upward(count):
            base = index.base_count
            if visible > max(first, base):
                yield from index.nodes[max(first - base, 0) : visible - base]

    def find_child(self, parent: Node, child_id: bytes, key: str | None, count: int) -> Node | None:
        """A child of ``parent`` that has this id, or else this key, among the first ``count``."""
        slot = None if key is None else slot_of(parent, key)
        index: NodeIndex | None = self
        while index is not None:
            ordinal = index.by_id.get(child_id)
            if (ordinal is None or ordinal >= count) and slot is not None:
                ordinal = index.by_key.get(slot)
            if ordinal is not None and ordinal < count:
                return index.nodes[ordinal - index.base_count]
            tip = index.tip
            if tip is not None:
                if parent.depth < tip.depth:
                    child = tip.ancestor(parent.depth + 1)
                    if child.parent == parent and (child.id == child_id or (key is not None and child.key == key)):
                        return child
                return None
            count = min(count, index.base_count)
            index = index.base
        return None

    def _find_on_tip(self, node_id: bytes) -> Node | None:
        """A node of the forked path, by ids of its own."""
        tip = self.tip
        assert tip is not None
        if self._tip_ids is None:
            self._tip_ids = {node.id: node.depth for node in tip.path()}
        depth = self._tip_ids.get(node_id)
        return None if depth is None else tip.ancestor(depth)

    def layers_upward(self, count: int) -> list[tuple[NodeIndex, int]]:
        """(layer, how many nodes are visible in it and below), the lowest first."""
        found = []
        index: NodeIndex | None = self
        while index is not None:
            found.append((index, count))
            count = min(count, index.base_count)
            index = index.base
        found.reverse()
        return found

    def walk(self, count: int) -> Iterator[Node]:
        """The first ``count`` nodes in commit order."""
        for index, visible in self.layers_upward(count):
            if index.tip is not None:
                yield from index.tip.path()
            yield from index.nodes[: visible - index.base_count]

    def own_parents(self, count: int) -> Iterator[tuple[int, int]]:
        """(ordinal, that of its parent) of its own nodes among the first ``count``. Nothing is read for it."""
        for ordinal, node in enumerate(self.nodes[: count - self.base_count], self.base_count):
            yield ordinal, -1 if node.parent is None else self.find_ordinal(node.parent, ordinal) or 0

    def leaves(self, count: int) -> Iterator[Node]:
        """Those of the first ``count`` nodes that have no child among them, in commit order. Of stored nodes no other is read."""
        inner = bytearray(count)
        layers = self.layers_upward(count)
        bottom = layers[0][0]
        there = list(range(bottom.base_count if bottom.tip is not None else 0))  # the path of a fork
        inner[: max(0, len(there) - 1)] = b"\1" * max(0, len(there) - 1)
        for index, visible in layers:
            for ordinal, parent in index.own_parents(visible):
                there.append(ordinal)
                if parent >= 0:
                    inner[parent] = 1
        yield from (self.node_at(ordinal) for ordinal in there if not inner[ordinal])

    def node_at(self, ordinal: int) -> Node:
        """The node of an ordinal."""
        index = self._layer_of(ordinal)
        if index.tip is not None and ordinal < index.base_count:
            return index.tip.ancestor(ordinal)
        return index.nodes[ordinal - index.base_count]

    def _layer_of(self, ordinal: int) -> NodeIndex:
        """The layer that has a node of this ordinal, or the lowest."""
        index = self
        while ordinal < index.base_count and index.base is not None:
            index = index.base
        return index

    def children(self, parent: Node, count: int) -> Iterator[tuple[int, Node]]:
        """(ordinal, node) for the children of ``parent`` among the first ``count``, in commit order."""
        for index, visible in self.layers_upward(count):
            if index.tip is not None and parent.depth < index.tip.depth:
                child = index.tip.ancestor(parent.depth + 1)
                if child.parent == parent:
                    yield child.depth, child
            yield from index.own_children(parent, visible)

    def own_children(self, parent: Node, visible: int) -> Iterator[tuple[int, Node]]:
        """Those of them that lie in this layer; ``visible``: how many nodes are seen in it and below."""
        base = self.base_count
        if not self._see_children():
            for at, node in enumerate(self.nodes[: visible - base], base):
                if node.parent is not None and node.parent.id == parent.id:
                    yield at, node
            return
        ordinal = self._first_child.get(parent.id, -1)
        while 0 <= ordinal < visible:
            yield ordinal, self.nodes[ordinal - base]
            ordinal = self._next_sibling[ordinal - base]

    def _see_children(self) -> bool:
        """Link every node that was added since the last time behind its elder siblings. No writer waits for it.

        False where that is going on already, further down on this thread's stack.
        """
        if self._children_seen == len(self.nodes):
            return True
        with self._linking_lock:
            if self._linking == get_ident():
                return False
            self._linking = get_ident()
            try:
                siblings, base = self._next_sibling, self.base_count
                for at in range(self._children_seen, len(self.nodes)):
                    parent = self.nodes[at].parent
                    if at == len(siblings):
                        siblings.append(-1)
                    if parent is not None:
                        elder = self._last_child.get(parent.id)
                        if elder is None:
                            self._first_child[parent.id] = base + at
                        elif elder != base + at:  # it is where an interrupted call left off
                            siblings[elder - base] = base + at
                        self._last_child[parent.id] = base + at
                    self._children_seen = at + 1
            finally:
                self._linking = 0
        return True

    def prefixes(self, count: int) -> PrefixIndex:
        """The trie of the paths of at least the first ``count`` nodes, over those of the layers below.

        Nodes that were added since the last time are added to it here, so that writers never pay for it.
        """
        known = self._prefixes
        if known is not None and known.count >= count:
            return known
        found: PrefixIndex | None = None
        for index, visible in self.layers_upward(count):
            found = index._own_prefixes(visible, found)
        assert found is not None
        return found

    def find_prefix(self, history: History, count: int) -> tuple[PrefixMatch, Node | None]:
        """How far ``history`` is known among the first ``count`` nodes. See :meth:`PrefixIndex.search`."""
        try:
            return self.prefixes(count).search(history, count)
        except Busy:  # tries for this call alone
            found: PrefixIndex | None = None
            for index, visible in self.layers_upward(count):
                found = index._add_prefixes(index._new_prefixes(found, visible), visible)
            assert found is not None
            return found.search(history, count)

    def _own_prefixes(self, count: int, below: PrefixIndex | None) -> PrefixIndex:
        """The trie of this layer, given that of the base, which holds what is seen of it."""
        known = self._prefixes
        if known is not None and known.count >= count:
            return known
        with self._adding_lock:
            if self._adding == get_ident() or (self.base is not None and below is not self.base._prefixes):
                # It, or what it lies over, is being added to further down on this stack: one for this call alone.
                return self._add_prefixes(self._new_prefixes(below, count), count)
            self._adding = get_ident()
            try:
                if self._prefixes is None:
                    self._prefixes = self._new_prefixes(below, count)
                return self._add_prefixes(self._prefixes, count)
            finally:
                self._adding = 0

    def _new_prefixes(self, below: PrefixIndex | None, count: int) -> PrefixIndex:
        return PrefixIndex(self.tip or self.root, self.by_id, below, self.base_count)

    def _add_prefixes(self, prefixes: PrefixIndex, count: int) -> PrefixIndex:
        for node in self.nodes[prefixes.count - self.base_count : count - self.base_count]:
            prefixes.add(node)
        return prefixes

    def layer(self, count: int, carry: bool) -> NodeIndex:
        """An index over what the first ``count`` nodes are.

        With ``carry``, layers are carried over into it until each that stays is more than twice as large as the one above. So n
        layers cost O(n log n) in all, and a lookup visits O(log n) of them.
        """
        index = self
        carried: list[Node] = []
        while carry and index.base is not None:
            own = count - index.base_count
            below = index.base_count - index.base.base_count if index.base.base is not None else None
            if own > 2 * len(carried) and (carried or below is None or below > 2 * own):
                break
            carried[:0] = index.nodes[:own]
            count, index = index.base_count, index.base
        layer = NodeIndex(index.root, index.limits, base=index, base_count=count)
        for node in carried:
            layer.add(node)
        return layer


def slot_of(parent: Node, key: str) -> bytes:
    """What the child of ``parent`` that has this key is found by."""
    return parent.id + key.encode()


def _on_path(tip: Node | None, node: Node | None) -> Node | None:
    """``node`` if it is on the path of ``tip``, where there is one."""
    return node if tip is None or node is None or is_on_path(node, tip) else None
