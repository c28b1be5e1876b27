"""What nodes, and what finds them, take in memory, counted as the interpreter counts it (``sys.getsizeof``).

Counted is what an index holds by itself: its nodes, their tokens with the room that is left to grow, and the tables that find them.
What nodes share, schemes and position rules, is not. A :class:`Ledger` looks at each node once, so that to ask again costs only
what came since.
"""

from __future__ import annotations

import gc
from collections import deque
from sys import getrefcount, getsizeof
from types import FunctionType, ModuleType
from typing import Any, Final
from weakref import ref

import numpy as np
from pyrsistent import pmap

from sessiontree.details import NO_DETAILS, USUAL_DETAILS, Details
from sessiontree.digest import ID_BYTES
from sessiontree.frozen import EMPTY_METADATA
from sessiontree.locks import new_lock
from sessiontree.node import Lineage, Node
from sessiontree.positions import PositionScheme, PositionState
from sessiontree.tokens import TOKEN_BYTES, Extent, PathCache

_SHARED: Final = (type, ModuleType, FunctionType, Node, Lineage, PositionScheme, Extent, PathCache)
_KNOWN: Final[tuple[object, ...]] = (None, True, False, (), b"", "", EMPTY_METADATA, pmap(), NO_DETAILS, *NO_DETAILS)
_SEEN: Final = frozenset(map(id, _KNOWN))
_SHARED_DETAILS: Final = frozenset(map(id, (NO_DETAILS, *USUAL_DETAILS.values())))
_SMALL: Final = 256  # ints up to here are the interpreter's own
INT_BYTES: Final = getsizeof(2**20)
_OWN_REFERENCES: Final = 4  # of a string that one map holds: its own, and those of whoever counts them
_BYTES: Final = getsizeof(b"")
#: Of every node: itself, its ways up and its id.
_FIXED_BYTES: Final = sum(map(getsizeof, (object.__new__(Node), (None, None, None, 0, b"", None), bytes(ID_BYTES))))
_STATE_BYTES: Final = getsizeof(PositionState(0, 0, 0))
# Measured: what writes to an extent; of a persistent map, one more version that differs by an entry.
_PEN_BYTES: Final = 544
_CALLS_BYTES: Final = 720
_GROWN_BYTES: Final = getsizeof((0, 0)) + 2 * INT_BYTES
_LOADED_BYTES: Final = 340  # of what finds a node that was read from disk, and counts it


def deep_bytes(*values: object) -> int:
    """What values take with all that is theirs alone."""
    seen, total, stack = set(_SEEN), 0, list(values)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, _SHARED) or (isinstance(value, int) and 0 <= value <= _SMALL):
            continue
        if isinstance(value, str) and getrefcount(value) > _OWN_REFERENCES:
            continue  # such as the name of a field, which others have too
        seen.add(id(value))
        total += getsizeof(value)
        if isinstance(value, np.ndarray):
            stack.append(value.base)
        elif isinstance(value, memoryview):
            stack.append(value.obj)
        else:
            stack += gc.get_referents(value)
    return total


def node_bytes(node: Node) -> int:
    """What a node takes without its tokens."""
    details, key, stop, runs = node._details, node.key, node.stop, node.runs
    _, _, _, depth, _, block = node._up
    total = _FIXED_BYTES
    blocks: Any = ()
    carried: Any = ()
    if stop > _SMALL:
        total += INT_BYTES
    if depth > _SMALL and depth is not stop:
        total += INT_BYTES
    if node._state is not None:
        _, after, top, blocks, carried = node._state
        total += _STATE_BYTES
        if after > _SMALL and after is not stop and after is not depth:
            total += INT_BYTES
        if top > _SMALL and top is not stop and top is not depth and top is not after:
            total += INT_BYTES
    if block is not None:
        total += getsizeof(block)
    if key is not None:
        total += getsizeof(key)
    role = node.role
    if getrefcount(role) <= _OWN_REFERENCES:
        total += getsizeof(role)
    if node.media or blocks or carried or node.replayed is not None or runs.__class__ is not int:
        total += deep_bytes(node.media, runs, node.replayed, blocks, carried)
    elif runs > _SMALL and node.parent is not None and runs is not node.parent.state[1]:
        total += INT_BYTES
    if id(details) not in _SHARED_DETAILS:
        parent = node.parent
        before = NO_DETAILS if parent is None else parent._details
        total += details_bytes(details, before)
    return total


def details_bytes(details: Details, before: Details) -> int:
    """What details take beside those of the node before, with which they may share the calls that are open."""
    reason = details.finish_reason
    calls = 0 if details.open_calls is before.open_calls else _CALLS_BYTES
    text = getsizeof(reason) if getrefcount(reason) <= _OWN_REFERENCES else 0
    return getsizeof(details) + deep_bytes(details.metadata, details.links) + text + calls


class Ledger:
    """Bytes of nodes that are only ever added, in order: ``count`` of them so far."""

    __slots__ = ("_grown", "_lock", "count", "nbytes")

    def __init__(self) -> None:
        self.count: int = 0
        self.nbytes: int = 0
        self._grown: dict[int, tuple[Extent, int]] = {}  # extents that more than one node wrote to; what was counted for the first
        self._lock = new_lock()

    def held(self, nodes: list[Node], first: int) -> int:
        """Bytes of ``nodes``, which are those of before and more, and of the extents that they began.

        ``first``: the ordinal of the first of them.
        """
        with self._lock:
            for at in range(self.count, len(nodes)):
                self.nbytes += self._entered(nodes[at], first + at)
                self.count = at + 1
            grown = self._grown
            return self.nbytes + _grown_bytes(grown) + getsizeof(grown)

    def _entered(self, node: Node, ordinal: int) -> int:
        extent, parent = node._extent, node.parent
        if parent is None:
            return 0  # a root is a part of its session
        total = node_bytes(node)
        if node.key is not None:
            total += getsizeof(node.id) + len(node.key.encode())  # by which it is found
        if ordinal != node.depth:
            total += INT_BYTES
        if extent is not parent._extent:
            total += _begun_bytes(extent, node)
        elif node.stop > node.start and id(extent) not in self._grown:
            self._grown[id(extent)] = extent, _begun_bytes(extent, parent)
        return total


def _grown_bytes(grown: dict[int, tuple[Extent, int]]) -> int:
    return sum(extent_bytes(extent) - counted + _GROWN_BYTES for extent, counted in grown.values())


def _begun_bytes(extent: Extent, first: Node) -> int:
    """Of an extent as the node left it that began it."""
    return getsizeof(extent) + _BYTES + TOKEN_BYTES * (first.stop - extent.origin)


def extent_bytes(extent: Extent) -> int:
    """Tokens, and the room behind them."""
    pen = extent._pen
    return getsizeof(extent) + getsizeof(extent.buffer) + (0 if pen is None else _PEN_BYTES)


class _Entry(ref[Any]):
    """Something that is counted while it lives."""

    __slots__ = ("key", "nbytes")

    key: int
    nbytes: int


class HeldNodes:
    """Nodes that no index of a session holds, but somebody does: those read from disk, and paths of sessions that are gone.

    Each is counted once, with its tokens, for as long as it lives. What goes leaves word, since finalizers run anywhere, and is
    no longer counted from the next call on.
    """

    __slots__ = ("_dead", "_died", "_entries", "_held", "_lock")

    def __init__(self) -> None:
        self._lock = new_lock()
        self._entries: dict[int, _Entry] = {}  # by id of the object
        self._held = 0
        self._dead: deque[_Entry] = deque()
        self._died = self._dead.append

    def count(self, *nodes: Node) -> None:
        """Count nodes from now on; those that are counted already may have grown their tokens."""
        extents = {id(node._extent): node._extent for node in nodes}
        with self._lock:
            self._bury()
            entries, died = self._entries, self._died
            for node in nodes:
                key = id(node)
                known = entries.get(key)
                if known is None:  # as below, without two calls for each
                    entry = _Entry(node, died)
                    entry.key, entry.nbytes = key, node_bytes(node) + _LOADED_BYTES
                    entries[key] = entry
                    self._held += entry.nbytes
                elif known() is not node:
                    self._enter(node, node_bytes(node) + _LOADED_BYTES)
            for extent in extents.values():
                self._enter(extent, extent_bytes(extent))

    def count_path(self, tip: Node) -> None:
        """Count the nodes of a path, up from its end to the first that is counted already."""
        node: Node | None = tip
        while node is not None and node.parent is not None and not self._counts(node):
            self.count(node)
            node = node.parent

    def held_bytes(self) -> int:
        """What is counted for all of them, and for the table."""
        with self._lock:
            self._bury()
            return self._held + getsizeof(self._entries) + _ENTRY * len(self._entries)

    def _counts(self, node: Node) -> bool:
        entry = self._entries.get(id(node))
        return entry is not None and entry() is node

    def _enter(self, thing: object, nbytes: int) -> None:
        known = self._entries.get(id(thing))
        if known is None or known() is not thing:
            self._forget(known)
            known = self._entries[id(thing)] = _Entry(thing, self._died)
            known.key, known.nbytes = id(thing), 0
        self._held += nbytes - known.nbytes
        known.nbytes = nbytes

    def _bury(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
            self._forget(entry)
            if not self._entries:
                self._entries = {}  # which does not shrink by itself

    def _forget(self, entry: _Entry | None) -> None:
        if entry is not None:
            self._held -= entry.nbytes
            entry.nbytes = 0


_ENTRY: Final = getsizeof(_Entry(new_lock)) + INT_BYTES
