"""Heads: named places in a tree. Where one lies on disk, its node is read when it is asked for, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from pyrsistent import PMap, pmap

from sessiontree.frozen import Sealed, no_subclasses, seal
from sessiontree.node import Node
from sessiontree.stored import StoredHead
from sessiontree.tokens import shown


class Head(Sealed):
    """A named place in a tree. Compares, hashes and unpacks as the tuple (node, version).

    ``version`` grows with every move of any head, so that it never repeats. ``node``: of a session on disk it is read when it is
    first asked for, with its path, and kept; that raises CorruptTree where it, or a node before it, is damaged, and StoreClosed
    where the store was closed before. ``uncertain``: it was read from a store that was opened with ``strict=False``, and damage
    behind its record may hide that it was moved or dropped later; what it says, it said once. No part of the tuple.
    """

    __slots__ = ("_node", "_stored", "uncertain", "version")
    __match_args__ = ("node", "version")

    version: int
    uncertain: bool
    _node: Node | None
    _stored: StoredHead | None

    __init_subclass__ = no_subclasses

    def __new__(cls, node: Node, version: int, uncertain: bool = False) -> Head:
        return new_head(node, version, uncertain)

    @property
    def node(self) -> Node:
        """Where it is. Raises CorruptTree, StoreClosed."""
        node = self._node
        if node is None:
            assert self._stored is not None
            node = self._stored.node
            _set_node(self, node)
        return node

    def __iter__(self) -> Iterator[Any]:
        return iter((self.node, self.version))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: Any) -> Any:
        return (self.node, self.version)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Head):
            if self.version != other.version:
                return False
            return (self._stored is not None and self._stored == other._stored) or self.node == other.node
        return (self.node, self.version) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.node, self.version))

    def __reduce__(self) -> Any:
        return Head, (self.node, self.version, self.uncertain)

    def __repr__(self) -> str:
        return f"Head(node={self._where}, version={shown(self.version)}{', uncertain=True' if self.uncertain else ''})"

    @property
    def _where(self) -> str:
        """Its node for messages, without reading it."""
        if self._node is None and self._stored is not None:
            return f"<node {self._stored.ordinal}, not read yet>"
        return repr(self._node)


_SET: Final = seal(Head)
_set_node = _SET["_node"]
_set_stored = _SET["_stored"]
_set_uncertain = _SET["uncertain"]
_set_version = _SET["version"]


def new_head(node: Node | None, version: int, uncertain: bool = False, stored: StoredHead | None = None) -> Head:
    """As ``Head(...)``, or one that lies on disk."""
    head: Head = object.__new__(Head)
    _set_node(head, node)
    _set_stored(head, stored)
    _set_uncertain(head, uncertain)
    _set_version(head, version)
    return head


def handed_head(head: Head | StoredHead) -> Head:
    """A head for callers: one that lies on disk keeps its node once that was read, which the tree's own does not."""
    return head if isinstance(head, Head) else new_head(None, head.version, head.uncertain, head)


class HeadNodes(PMap[str, Node]):
    """The nodes of heads by name, as a persistent map that reads a node when it is asked for that one.

    Its names and its length need none. What is made of it (``set``, ``update``) is an ordinary PMap with all of them.
    """

    __slots__ = ("_heads",)

    _heads: Mapping[str, Head]

    def __new__(cls, heads: Mapping[str, Head]) -> Self:
        made = object.__new__(cls)
        _set_heads(made, heads)
        return made

    def _whole(self) -> PMap[str, Node]:
        return pmap(dict(self.iteritems()), pre_size=8)

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, name: object) -> bool:
        return name in self._heads

    def __getitem__(self, name: str) -> Node:
        return self._heads[name].node

    def iterkeys(self) -> Iterator[str]:
        return iter(self._heads)

    def iteritems(self) -> Iterator[tuple[str, Node]]:
        for name, head in self._heads.items():
            yield name, head.node

    def evolver(self) -> Any:
        return self._whole().evolver()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, HeadNodes):
            return self._heads == other._heads or self._whole() == other._whole()
        return self._whole() == other

    def __hash__(self) -> int:
        return hash(self._whole())


_set_heads = seal(HeadNodes)["_heads"]
