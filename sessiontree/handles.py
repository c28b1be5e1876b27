"""What an engine keeps for nodes, KV pages mostly, and the word that a node has gone: :class:`NodeHandles`.

The tree never owns KV and does not know who does. An engine sets a handle of its own for a node, finds it again, and asks once a
step what belongs to nodes that are gone. Nothing here keeps a node alive or changes one, and no code of the engine runs where a
node dies: a finalizer only leaves word, by one call into a queue.

Equal nodes share one slot: a node's id covers all that its KV is computed from, so one handle serves every object that has the id,
whichever session or disk it was read from. The slot stays for as long as any of the objects lives that it was set or found by. One
that was found by none of them, and never set by them, does not count: whoever decodes on a node has asked for its handle. Until
:meth:`NodeHandles.gone` has told of a slot, an equal node that is read again finds it, and then it stays.

A signal handler or finalizer may use a table in the middle of a call to it, on the same thread. So a slot is looked up and its
successor made first; it is put in place without a call, only if nothing has changed meanwhile, and otherwise all is done again.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sessiontree.locks import new_lock
from sessiontree.node import Node

__all__ = ["NodeHandles"]

H = TypeVar("H")


class _Object(weakref.ref[Node]):
    """One of the objects that a slot was set or found by, and the id that they share."""

    __slots__ = ("node_id",)

    node_id: bytes


class _Slot(NamedTuple, Generic[H]):
    handle: H
    objects: tuple[_Object, ...]


_Told = tuple[bytes, Any, Any] | None  # (node id, handle, those told of before)


class NodeHandles(Generic[H]):
    """Handles by node, each its engine's own. Any thread may use it.

    Every handle that was set is exactly one of: here, given back by :meth:`set` or :meth:`pop`, or told of by :meth:`gone`; what a
    call that an exception ends from outside would have given back is lost with it. ``len``: how many are here, those included that
    gone has yet to tell of.
    """

    __slots__ = ("_changes", "_dead", "_died", "_lock", "_slots", "_told")

    def __init__(self) -> None:
        self._lock = new_lock()
        self._slots: dict[bytes, _Slot[H]] = {}
        self._changes = 0
        self._dead: deque[_Object] = deque()  # objects that went since gone was called
        self._died: Final = self._dead.append
        self._told: _Told = None  # what gone is about to tell of

    def set(self, node: Node, handle: H) -> H | None:
        """Keep a handle for a node: the one that it replaces, which is the caller's again, or None. Raises TypeError for None."""
        self._check(node)
        if handle is None:
            raise TypeError("None says that there is no handle")
        with self._lock:
            while True:
                seen = self._changes
                slot = self._slots.get(node.id)
                made = _Slot(handle, self._with(node, () if slot is None else slot.objects))
                key, now = node.id, seen + 1
                if self._changes == seen:
                    self._slots[key] = made
                    self._changes = now
                    return None if slot is None or slot.handle is handle else slot.handle

    def get(self, node: Node) -> H | None:
        """The handle of a node; None where there is none."""
        self._check(node)
        with self._lock:
            while True:
                seen = self._changes
                slot = self._slots.get(node.id)
                if slot is None or any(known() is node for known in slot.objects):
                    return None if slot is None else slot.handle
                made = _Slot(slot.handle, self._with(node, slot.objects))
                key, now = node.id, seen + 1
                if self._changes == seen:
                    self._slots[key] = made
                    self._changes = now
                    return slot.handle

    def pop(self, node: Node) -> H | None:
        """The handle of a node, which is the caller's again; None where there is none."""
        self._check(node)
        with self._lock:
            while True:
                seen = self._changes
                slot = self._slots.get(node.id)
                if slot is None:
                    return None
                key, now = node.id, seen + 1
                if self._changes == seen:
                    del self._slots[key]
                    self._changes = now
                    return slot.handle

    def gone(self) -> list[tuple[bytes, H]]:
        """(node id, handle) of the nodes that nobody holds any more, each once; the handles are the caller's again.

        Nodes of a session in memory are held by it until they are dropped or it is closed and let go of; those of a session on disk
        by whoever uses them, so hold a node for as long as its KV is wanted. O(nodes that went).
        """
        dead = self._dead
        with self._lock:
            while dead:
                with suppress(IndexError):  # a signal handler was quicker
                    first = dead[0]
                    self._bury(first.node_id)
                    if dead and dead[0] is first:
                        dead.popleft()
            while True:
                told = self._told
                found: list[tuple[bytes, H]] = []
                at = told
                while at is not None:
                    found.append(at[:2])
                    at = at[2]
                found.reverse()
                if self._told is told:
                    self._told = None
                    return found

    def _bury(self, node_id: bytes) -> None:
        """Have gone tell of a slot, if none of its objects lives."""
        while True:
            seen, told = self._changes, self._told
            slot = self._slots.get(node_id)
            if slot is None or any(known() is not None for known in slot.objects):
                return
            telling, now = (node_id, slot.handle, told), seen + 1
            if self._changes == seen and self._told is told:
                del self._slots[node_id]
                self._told = telling
                self._changes = now
                return

    def _with(self, node: Node, objects: tuple[_Object, ...]) -> tuple[_Object, ...]:
        """The objects that live, and this one."""
        living = tuple(known for known in objects if known() is not None)
        if any(known() is node for known in living):
            return living
        made = _Object(node, self._died)
        made.node_id = node.id
        return (*living, made)

    def _check(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise TypeError(f"a handle is kept for a Node, not for {type(node).__name__}")

    def __len__(self) -> int:
        return len(self._slots)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<NodeHandles of {len(self)} nodes>"

    def __reduce__(self) -> Any:
        raise TypeError("handles belong to the engine of this process")
