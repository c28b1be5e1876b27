"""What is known of nodes, kept for as long as they live and there is room. It holds no node, and nobody waits for anybody."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from sessiontree import Node

Value = TypeVar("Value")


class _Entry(weakref.ref[Node]):
    """What is known of a node, by its key, while the node lives. ``size``: how much room it takes."""

    __slots__ = ("key", "size", "value")

    key: bytes
    value: Any
    size: int


class Memo(Generic[Value]):
    """Values by key, in two generations: what is used moves to the young one; when that fills half of the room, the old one goes
    and the young one is old. So what was not used for longest goes first.

    Two threads that come here at once, or a finalizer or signal handler in between, can at most make it forget something.
    """

    __slots__ = ("_held", "_old", "_young", "limit")

    def __init__(self, limit: int) -> None:
        """``limit``: the room there is, in the unit of what is put."""
        self.limit: int = limit
        self._young: dict[bytes, _Entry] = {}
        self._old: dict[bytes, _Entry] = {}
        self._held = 0  # by the young, those that died meanwhile counted

    def get(self, key: bytes) -> Value | None:
        """What is known by this key; None if nothing is."""
        entry = self._young.get(key)
        if entry is None:
            entry = self._old.pop(key, None)
            if entry is None:
                return None
            self._keep(entry)
        value: Value = entry.value
        return value

    def put(self, key: bytes, value: Value, size: int, node: Node) -> None:
        """Keep a value while ``node`` lives, at most."""
        entry = _Entry(node, self._died)
        entry.key, entry.value, entry.size = key, value, size
        self._keep(entry)

    def _keep(self, entry: _Entry) -> None:
        self._young[entry.key] = entry
        self._held += entry.size
        if self._held > self.limit // 2:
            self._old, self._young, self._held = self._young, {}, 0

    def _died(self, entry: Any) -> None:
        key: bytes = entry.key
        for entries in (self._young, self._old):
            if entries.get(key) is entry:  # else a later one has the key
                entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
