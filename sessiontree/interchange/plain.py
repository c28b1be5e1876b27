"""Values of files that are more than JSON, as JSON and back again: what pickles and msgpack hold beside it.

A mapping of one name that begins with "$" stands for such a value, ``{"$bytes": "iVBO"}``; a mapping of the file that looks like
one, or that has keys other than text, is ``{"$dict": [[key, value], ...]}``. So each value has one form, and comes back as it was.
Classes and their instances are never looked up: they are :class:`Foreign`, names and what stood beside them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any, Final

import attrs

from sessiontree.errors import LimitExceeded

#: Levels of containers that the JSON of one value has, so that whoever takes it apart never runs out of stack.
MAX_DEPTH: Final = 150


@attrs.define(eq=False)
class Foreign:
    """A value of a kind that we only carry. ``kind``: what :func:`to_plain` calls it; ``parts``: what it is made of."""

    kind: str
    parts: list[Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and (self.kind, self.parts) == (other.kind, other.parts)

    def __hash__(self) -> int:  # as a key of a mapping it is its own; so nothing is hashed to any depth
        return object.__hash__(self)


class Room:
    """How much a file's values may come to, for files in which one value may be named a thousand times. ``left``: of those."""

    def __init__(self, left: int) -> None:
        self.limit = left
        self.left: int = left

    def take(self, count: int) -> None:
        """Takes as much; raises LimitExceeded where there is no more."""
        self.left -= count
        if self.left < 0:
            raise LimitExceeded(
                f"values named again and again come to more than {self.limit}", value=self.limit + 1, limit=self.limit
            )


def to_plain(value: Any, room: Room | None = None, depth: int = 0, replace: Callable[[Foreign], Foreign] | None = None) -> Any:
    """A value as JSON; ``replace`` may put another Foreign in the place of each.

    Raises LimitExceeded past ``MAX_DEPTH`` levels, which a value that holds itself has too.
    """
    if depth > MAX_DEPTH:
        raise LimitExceeded(f"a value is nested deeper than {MAX_DEPTH} levels", value=depth, limit=MAX_DEPTH)
    if room is not None:
        room.take(1 + len(value) // 64 if isinstance(value, (str, bytes)) else 1)
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case list():
            return [to_plain(each, room, depth + 1, replace) for each in value]
        case tuple():
            return {"$tuple": [to_plain(each, room, depth + 2, replace) for each in value]}
        case dict() if all(isinstance(name, str) and not name.startswith("$") for name in value):
            return {name: to_plain(each, room, depth + 1, replace) for name, each in value.items()}
        case dict():
            return {"$dict": [[to_plain(part, room, depth + 3, replace) for part in pair] for pair in value.items()]}
        case Foreign():
            value = replace(value) if replace is not None else value
            return {f"${value.kind}": [to_plain(each, room, depth + 2, replace) for each in value.parts]}
    raise TypeError(f"no value of a file: {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """The value that :func:`to_plain` made JSON of. Sequences and mappings may be any, as a store gives them."""
    if isinstance(value, (list, tuple)):
        return [from_plain(each) for each in value]
    if not hasattr(value, "items"):
        return value
    name, each = next(iter(value.items())) if len(value) == 1 else ("", "")
    if not name.startswith("$"):
        return {key: from_plain(entry) for key, entry in value.items()}
    match name:
        case "$int":
            return int(each, 16)
        case "$float":
            return float(each)
        case "$bytes":
            return base64.b64decode(each)
        case "$tuple":
            return tuple(from_plain(each))
        case "$dict":
            return dict(from_plain(each))
    return Foreign(name[1:], from_plain(each))
