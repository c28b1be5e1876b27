"""Heads: named places in a tree, and maps of them by name, which never change.

A session may have a hundred thousand. A few are a plain dict that each move copies: nothing costs less. Many are a
:class:`HeadMap`, of which a move copies a small part. Callers get a view of either, which hands a head out when it is asked for;
where one lies on disk, its node is read then, and not before.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from sys import getsizeof
from typing import Any, Final, NamedTuple, Self, TypeVar

from pyrsistent import PMap, pmap

from sessiontree.errors import CorruptTree
from sessiontree.frozen import Sealed, no_subclasses, seal
from sessiontree.memory import INT_BYTES
from sessiontree.node import Node
from sessiontree.stored import StoredHead
from sessiontree.tokens import shown


class _Unset:
    def __repr__(self) -> str:
        return "<no check>"


#: What a head is expected to be where nothing is.
UNSET: Final[Any] = _Unset()


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
            try:
                which = self._stored.nodes.id_of(self._stored.ordinal)[:4].hex()
            except CorruptTree:
                which = str(self._stored.ordinal)
            return f"<Node {which}, not read yet>"
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


class Dropped(NamedTuple):
    """What a move left of a head that it dropped."""

    version: int


Heads = Mapping[str, Head | StoredHead]
Move = tuple[str, Head | StoredHead | Dropped]

#: So many heads are a :class:`HeadMap`.
MANY: Final = 16
#: What is recent becomes a part of the base where its square is so many times the base: about where both cost a move the same.
_RECENT: Final = 16
#: What an entry takes beside its name and its place in a dict: itself, and its numbers.
_BYTES: Final = {Head: 64 + INT_BYTES, StoredHead: 80 + 2 * INT_BYTES, Dropped: 56 + INT_BYTES}


class HeadMap(Heads):
    """Many heads by name: a base, and over it what was moved since, in the order of the moves. Neither ever changes.

    A move copies ``recent`` alone. Where that has grown to four times the square root of the base, both become a new base. What
    the last moves came to stands at the end of ``recent``.

    ``since``: how many moves there were, at most, when the base was made. ``line``: the same object in all maps that came of one
    by moves. ``base_bytes``: what the names and heads of the base take.
    """

    __slots__ = ("_count", "base", "base_bytes", "line", "recent", "since")

    def __init__(
        self,
        base: dict[str, Head | StoredHead],
        base_bytes: int,
        since: int,
        line: object,
        recent: dict[str, Head | Dropped],
        count: int,
    ) -> None:
        self.base: dict[str, Head | StoredHead] = base
        self.base_bytes: int = base_bytes
        self.since: int = since
        self.line: object = line
        self.recent: dict[str, Head | Dropped] = recent
        self._count = count

    def moved(self, name: str, change: Head | Dropped) -> HeadMap:
        """The heads after one more move."""
        count = self._count - (name in self) + (type(change) is not Dropped)
        base, base_bytes, since = self.base, self.base_bytes, self.since
        if len(self.recent) ** 2 < _RECENT * len(base):
            recent = self.recent.copy()
            recent.pop(name, None)  # it goes to the end
        else:
            base, base_bytes = self._merged()
            since, recent = change.version - 1, {}
        recent[name] = change
        return HeadMap(base, base_bytes, since, self.line, recent, count)

    def newest(self, moves: int) -> Iterator[Move]:
        """What came of the moves after the first so many, at least ``since``; the last first."""
        for move in reversed(self.recent.items()):
            if move[1].version <= moves:
                return
            yield move

    def whole(self) -> dict[str, Head | StoredHead]:
        """All heads as a dict of its own. O(heads)."""
        return self._merged()[0]

    def _merged(self) -> tuple[dict[str, Head | StoredHead], int]:
        """All heads, and what they and their names take."""
        whole, nbytes = self.base.copy(), self.base_bytes
        for name, change in self.recent.items():
            was = whole.get(name)
            if was is not None:
                nbytes -= _bytes_of(name, was)
            if not isinstance(change, Dropped):
                nbytes += _bytes_of(name, change)
                whole[name] = change
            elif was is not None:
                del whole[name]
        return whole, nbytes

    def held_bytes(self) -> int:
        """What it takes, names and heads with it. O(recent)."""
        return getsizeof(self.base) + self.base_bytes + heads_bytes(self.recent)

    def get(self, name: Any, default: Any = None) -> Any:
        found = self.recent.get(name)
        if found is None:
            return self.base.get(name, default)
        return default if type(found) is Dropped else found

    def __getitem__(self, name: str) -> Head | StoredHead:
        found: Head | StoredHead | None = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def items(self) -> ItemsView[str, Head | StoredHead]:
        return self.whole().items()

    def values(self) -> ValuesView[Head | StoredHead]:
        return self.whole().values()


def heads_of(heads: dict[str, Any], moves: int) -> Heads:
    """Heads as they are after so many moves. The dict is theirs from now on."""
    return heads if len(heads) < MANY else HeadMap(heads, heads_bytes(heads) - getsizeof(heads), moves, object(), {}, len(heads))


def moved(heads: Heads, moves: int, name: str, change: Head | Dropped) -> Heads:
    """Heads of so many moves after one more. A head that is dropped is one of them."""
    if len(heads) < MANY:
        few: dict[str, Any] = {**heads, name: change}
        if type(change) is Dropped:
            del few[name]
        return few
    many = heads if type(heads) is HeadMap else heads_of(dict(heads), moves)
    assert type(many) is HeadMap
    return many.moved(name, change)


def moves_between(before: Heads, first: int, after: Heads, last: int) -> list[Move]:
    """What came of the moves between two values of the same heads, in their order: of each name that is elsewhere, or gone.

    ``first``, ``last``: how many moves there were before, and are. O(what came) for ``after`` that was made of ``before``, unless
    there are few or they were merged in between; else O(heads).
    """
    if type(before) is HeadMap and type(after) is HeadMap and before.line is after.line and after.since <= first <= last:
        moves = [move for move in after.newest(first) if type(move[1]) is not Dropped or move[0] in before]
        return moves[::-1]
    old, new = _plain(before), _plain(after)
    moves = [move for move in new.items() if (was := old.get(move[0])) is None or was.version != move[1].version]
    moves.sort(key=lambda move: move[1].version)
    moves += [(name, Dropped(last)) for name in old if name not in new]
    return moves


def heads_bytes(heads: Mapping[str, Head | StoredHead | Dropped]) -> int:
    """What heads take, with their names."""
    if type(heads) is HeadMap:
        return heads.held_bytes()
    return getsizeof(heads) + sum(_bytes_of(name, head) for name, head in heads.items())


def _bytes_of(name: str, head: Head | StoredHead | Dropped) -> int:
    return getsizeof(name) + _BYTES[type(head)]


def _plain(heads: Heads) -> Heads:
    return heads.whole() if type(heads) is HeadMap else heads


T = TypeVar("T")


class _View(PMap[str, T]):
    """What there is of heads by name, as a persistent map that makes an entry when it is asked for that one.

    Its names and its length need none. What is made of it (``set``, ``update``) is an ordinary PMap with all of them.
    """

    __slots__ = ("_handed", "_heads")

    _heads: Heads
    _handed: dict[str, Head]  # of those that lie on disk: they keep their nodes

    def __new__(cls, heads: Heads) -> Self:
        made = object.__new__(cls)
        _set_heads(made, heads)
        _set_handed(made, {})
        return made

    def _head(self, name: str) -> Head:
        head = self._heads[name]
        if isinstance(head, Head):
            return head
        return self._handed.get(name) or self._handed.setdefault(name, handed_head(head))

    def _by_name(self) -> dict[str, Head]:
        return {name: self._head(name) for name in self._heads}

    def _whole(self) -> PMap[str, T]:
        return pmap(dict(self.iteritems()), pre_size=2 * len(self) + 8)

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, name: object) -> bool:
        return name in self._heads

    def iterkeys(self) -> Iterator[str]:
        return iter(self._heads)

    def iteritems(self) -> Iterator[tuple[str, T]]:
        for name in self._heads:
            yield name, self[name]

    def evolver(self) -> Any:
        return self._whole().evolver()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, type(self)):  # where the heads are the same, no node is read
            return self._heads is other._heads or self._by_name() == other._by_name() or self._whole() == other._whole()
        return self._whole() == other

    def __hash__(self) -> int:
        return hash(self._whole())


_SET_VIEW: Final = seal(_View)
_set_handed = _SET_VIEW["_handed"]
_set_heads = _SET_VIEW["_heads"]


class HeadsByName(_View[Head]):
    """Heads by name."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Head:
        return self._head(name)


class HeadNodes(_View[Node]):
    """The nodes of heads by name."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Node:
        return self._head(name).node
