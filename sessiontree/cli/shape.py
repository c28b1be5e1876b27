"""The shape of a tree, by ordinals: who is whose child, which ids there are, where heads are. No node is read for it.

Nodes of a stored session are read one by one, when :meth:`Shape.node` is asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree
from sessiontree.index import NodeIndex
from sessiontree.node import Node
from sessiontree.stored import LoneNode, StoredHead, StoredIndex
from sessiontree.tree import SessionTree


class Shape:
    """Each of these is derived when it is first asked for."""

    def __init__(self, tree: SessionTree) -> None:
        self._tree = tree
        self._layers: list[tuple[NodeIndex, int]] = tree._index.layers_upward(tree._count)

    @cached_property
    def parents(self) -> list[int]:
        """By ordinal, in commit order, the parent's ordinal; -1 for the root, and for what is not there or names none."""
        parents = np.full(self._tree._count, -1, np.int64)
        for first, some in self._known_parents():
            before = some < np.arange(first, first + len(some))
            parents[first : first + len(some)] = np.where(before, some, -1)
        found: list[int] = parents.tolist()
        return found

    @cached_property
    def below(self) -> list[int]:
        """How many nodes stand below each."""
        parents = self.parents
        below = [0] * len(parents)
        for ordinal in range(len(parents) - 1, 0, -1):
            if parents[ordinal] >= 0:
                below[parents[ordinal]] += below[ordinal] + 1
        return below

    @property
    def lost(self) -> int:
        """How many nodes there are that do not stand below the root."""
        return len(self._tree) - 1 - self.below[0]

    @cached_property
    def _by_parent(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ordinals sorted by their parents, and where the children of each begin there; where the last ones end."""
        parents = np.asarray(self.parents)
        order = np.argsort(parents, kind="stable")
        return order, np.searchsorted(parents[order], np.arange(len(parents) + 1))

    def _known_parents(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(the first ordinal, the parents of the nodes from there on) for each stretch; of one that is missing, none before it."""
        for index, visible in self._layers:
            if index.tip is not None:
                yield 0, np.arange(-1, index.tip.depth)
            first = max(index.base_count, 1)
            if isinstance(index, StoredIndex):
                yield first, index.source.parents()[: visible - first]
            else:
                above = (node.parent for node in index.nodes[first - index.base_count : visible - index.base_count])
                yield first, np.array([index.find_ordinal(parent, visible) for parent in above if parent is not None], np.int64)

    def children(self, ordinal: int) -> list[int]:
        """In commit order."""
        order, starts = self._by_parent
        found: list[int] = order[starts[ordinal] : starts[ordinal + 1]].tolist()
        return found

    def node(self, ordinal: int) -> Node:
        """Raises CorruptTree where it, or a node before it, is damaged."""
        if ordinal >= len(self.parents):
            raise CorruptTree(f"node {ordinal} of the session is missing")
        for index, _ in reversed(self._layers):
            if ordinal >= index.base_count:
                node: Node = index.nodes[ordinal - index.base_count]
                return node
            if index.tip is not None:
                return index.tip.ancestor(ordinal)
        raise AssertionError(ordinal)

    def with_key(self, key: str) -> list[int]:
        """Ordinals of the nodes that have this key. Every node is read for that."""
        found = []
        for ordinal in range(1, len(self.parents)):
            with suppress(CorruptTree):
                if self.node(ordinal).key == key:
                    found.append(ordinal)
        return found

    def upward(self, ordinal: int) -> Iterator[Node | LoneNode]:
        """The path of a node, from there to the root: each is read when it is asked for, and nothing else is.

        Raises CorruptTree where one is damaged, before the first one where the path does not lead to the root.
        """
        if ordinal >= len(self.parents):
            self.node(ordinal)  # which says why
        path = [ordinal]
        while path[-1]:
            path.append(self.parents[path[-1]])
            if path[-1] < 0:
                self.node(ordinal)  # which says why
                raise CorruptTree(f"the path of node {ordinal} does not lead to the root")
        below: Node | LoneNode | None = None
        for depth, at in zip(range(len(path) - 1, -1, -1), path, strict=True):
            node = self._alone(at, depth)
            if below is not None and below.start != node.stop:
                raise CorruptTree(f"node {node.id[:4].hex()} ends at {node.stop}, and its child starts at {below.start}")
            yield node
            below = node

    def _alone(self, ordinal: int, depth: int) -> Node | LoneNode:
        for index, _ in self._layers:
            if isinstance(index, StoredIndex) and ordinal < index.count:
                return index.alone(ordinal, depth)
        return self.node(ordinal)

    def newest(self) -> int:
        """The ordinal of the node that was committed last, of those that stand below the root."""
        ordinals = range(len(self.parents) - 1, 0, -1)
        return next((ordinal for ordinal in ordinals if self.parents[ordinal] >= 0), 0)

    def ordinal(self, node: Node) -> int:
        """Of a node of this tree."""
        found = self._tree._index.find_ordinal(node, self._tree._count)
        assert found is not None
        return found

    def heads(self) -> dict[int, list[str]]:
        """Names of the heads at each ordinal where there are any, sorted."""
        found: dict[int, list[str]] = {}
        for name, ordinal in self.ordinals_of_heads().items():
            found.setdefault(ordinal, []).append(name)
        return found

    def ordinals_of_heads(self) -> dict[str, int]:
        """Where each head is, by name in order."""
        return {name: self.ordinal_of_head(name) for name in sorted(self._tree._heads)}

    def ordinal_of_head(self, name: str) -> int:
        """Where a head is that there is."""
        head = self._tree._heads[name]
        return head.ordinal if isinstance(head, StoredHead) else self.ordinal(head.node)

    @cached_property
    def ids(self) -> NDArray[np.uint8]:
        """The ids of all nodes, by ordinal: (n, 32); zeros where none is known."""
        ids = np.zeros((len(self.parents), ID_BYTES), np.uint8)
        for first, some in self._known_ids():
            ids[first : first + len(some)] = some
        return ids

    def _known_ids(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for index, visible in self._layers:
            if index.tip is not None:
                yield 0, _rows(node.id for node in index.tip.path())
            source: Any = getattr(index, "source", None)
            first = index.base_count
            if hasattr(source, "ids"):
                if first == 0:
                    yield 0, _rows((index.root.id,))
                yield source.first, source.ids()[: visible - source.first]
            elif visible > first:
                yield first, _rows(self._id_of(ordinal) for ordinal in range(first, visible))

    def _id_of(self, ordinal: int) -> bytes:
        try:
            return self.node(ordinal).id
        except CorruptTree:
            return bytes(ID_BYTES)

    def matching(self, prefix: str) -> list[int]:
        """Ordinals of the nodes whose id begins with hexadecimal digits."""
        whole, odd = bytes.fromhex(prefix[: len(prefix) // 2 * 2]), prefix[len(prefix) // 2 * 2 :]
        ids = self.ids
        alike = (ids[:, : len(whole)] == np.frombuffer(whole, np.uint8)).all(axis=1) & ids.any(axis=1)
        if odd:
            alike &= ids[:, len(whole)] >> 4 == int(odd, 16)
        found: list[int] = np.flatnonzero(alike).tolist()
        return found

    def id_at(self, ordinal: int) -> bytes | None:
        """The id of a node, which need not be readable; None where nothing is left that says it."""
        found: bytes = self.ids[ordinal].tobytes() if ordinal < len(self.ids) else b""
        return found if any(found) else None

    def lost_heads(self) -> list[str]:
        """Names of the heads that are at nodes of which nothing is left."""
        return [name for name, ordinal in self.ordinals_of_heads().items() if self.id_at(ordinal) is None]


def _rows(ids: Any) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES)
