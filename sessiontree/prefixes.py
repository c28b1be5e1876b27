"""Which paths of a tree begin as a given history does: a radix trie over the paths of many nodes, whatever turns they are cut into.

The trie consists of lines. A line is a stretch of path tokens that lies in one extent, so it is compared by one look at memory
however many nodes end on it; other lines leave it wherever a path differs first. A position on a path is the same on two
paths if the token is, and the placeholder of a media item if it is one. So every prefix has one place in the trie.

Nodes come in commit order, and each adds to the trie what no path before it had, in time proportional to its own tokens. A
search never looks at what came after the count it is given. One thread at a time adds; searching needs no lock, since what is
there stays there and every step leaves the trie right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree.node import Node
from sessiontree.spans import (
    Placeholders,
    common_placeholders,
    join_placeholders,
    placeholder_at,
    placeholders_behind,
    placeholders_of,
)
from sessiontree.tokens import INT32, TOKEN_BYTES, Extent

_FIRST_LOOK: Final = 256 * TOKEN_BYTES
_LONGEST_LOOK: Final = 2**16 * TOKEN_BYTES
_ENDLESS: Final = 2**63


class History(NamedTuple):
    """Path tokens from ``origin`` on, as bytes, and the media in them."""

    origin: int
    data: bytes
    media: Sequence[Placeholders]

    @property
    def stop(self) -> int:
        return self.origin + len(self.data) // TOKEN_BYTES


class PrefixMatch(NamedTuple):
    """How far a history is known.

    ``node``: the deepest node whose whole path is a prefix of it, the earliest of those that end at the same place. ``length``:
    how many tokens are known. ``within``: where that is more than ``node`` has, the earliest node that holds the rest of them.
    """

    node: Node
    length: int
    within: Node | None

    @property
    def offset(self) -> int:
        """How many tokens are known behind ``node``: those that ``within`` begins with."""
        return self.length - self.node.stop


class _Line:
    """Path tokens ``[start, ...)`` of ``extent``. ``grown``: (number of a node, path index up to which it brought the line).

    ``ends``: (path index, number of the node) for the first node that ends there. ``media``: the placeholders on it.
    """

    __slots__ = ("ends", "extent", "grown", "media", "number")

    def __init__(self, number: int, extent: Extent) -> None:
        self.number = number
        self.extent = extent
        self.grown: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []
        self.media: list[Placeholders] = []

    def visible(self, count: int) -> int:
        """Path index up to which the first ``count`` nodes brought it; 0 where none of them did."""
        at = bisect_left(self.grown, (count, 0)) - 1
        return self.grown[at][1] if at >= 0 else 0


class PrefixIndex:
    """The trie of the first ``len(nodes)`` nodes of a tree, root first."""

    __slots__ = ("_branches", "_lines", "_places", "nodes")

    def __init__(self, root: Node) -> None:
        line = _Line(0, root._extent)
        line.grown.append((0, 0))
        line.ends.append((0, 0))
        self.nodes = [root]
        self._lines = [line]
        self._branches: dict[Any, _Line] = {}  # by line, path index and what stands there
        self._places: dict[bytes, int] = {root.id: 0}  # the line that each node ends on

    def add(self, node: Node) -> None:
        """Add the next node in commit order. Where this was interrupted, the same node is simply added again."""
        assert node.parent is not None
        number = len(self.nodes)
        start, stop = node.start, node.stop
        line = self._lines[self._places[node.parent.id]]
        if start < stop:
            extent = node._extent
            history = History(start, extent.read_bytes(start, stop), placeholders_of(node.media, start))
            line, known = self._follow(line, start, history, _ENDLESS)[-1]
            if known < stop:
                reached = line.grown[-1][1]
                if known < reached or line.extent is not extent:
                    branch = _Line(len(self._lines), extent)
                    branch.media += placeholders_behind(history.media, known)
                    branch.grown.append((number, stop))
                    self._lines.append(branch)
                    self._branches[_key(line, known, history)] = branch
                    line = branch
                else:
                    join_placeholders(
                        line.media, placeholders_behind(history.media, max(known, line.media[-1].stop if line.media else 0))
                    )
                    line.grown.append((number, stop))
            at = bisect_left(line.ends, (stop, 0))
            if at == len(line.ends) or line.ends[at][0] != stop:
                insort(line.ends, (stop, number))
        self._places[node.id] = line.number
        self.nodes.append(node)

    def search(self, history: History, count: int) -> PrefixMatch:
        """How far ``history``, from the root on, is known among the first ``count`` nodes."""
        route = self._follow(self._lines[0], 0, history, count)
        line, length = route[-1]
        node = next(node for passed, left in reversed(route) if (node := self._last_end(passed, left, count)) is not None)
        if length == node.stop:
            return PrefixMatch(node, length, None)
        maker = bisect_left(line.grown, length, key=lambda grown: grown[1])
        return PrefixMatch(node, length, self.nodes[line.grown[maker][0]])

    def _last_end(self, line: _Line, left: int, count: int) -> Node | None:
        """The node that ends last on ``line`` at or before path index ``left``."""
        at = bisect_right(line.ends, (left, _ENDLESS)) - 1
        while at >= 0 and line.ends[at][1] >= count:
            at -= 1
        return self.nodes[line.ends[at][1]] if at >= 0 else None

    def _follow(self, line: _Line, at: int, history: History, count: int) -> list[tuple[_Line, int]]:
        """The lines that ``history`` goes along from path index ``at`` of ``line``, each with the path index where it leaves it."""
        route = []
        stop = history.stop
        while True:
            number, reached = line.grown[-1]
            if number >= count:
                reached = line.visible(count)
            if at < reached:
                at = _common(line, at, min(reached, stop), history)
            route.append((line, at))
            if at >= stop:
                return route
            branch = self._branches.get(_key(line, at, history))
            if branch is None or branch.grown[0][0] >= count:
                return route
            line = branch


def _key(line: _Line, at: int, history: History) -> Any:
    """By what a branch that leaves ``line`` at path index ``at`` is found."""
    offset = (at - history.origin) * TOKEN_BYTES
    plain = (line.number << 64) + (at << 32) + _token(history.data, offset)[0]
    piece = placeholder_at(history.media, at) if history.media else None
    return plain if piece is None else (plain, piece.content, piece.first + at - piece.start)


_token = Struct("<i").unpack_from


def _common(line: _Line, start: int, stop: int, history: History) -> int:
    """Path index up to which ``history`` is what stands on ``line`` from ``start`` on; at most ``stop``, which may be before it."""
    ours, theirs = history.data, line.extent.buffer
    shift, their_shift = history.origin * TOKEN_BYTES, line.extent.origin * TOKEN_BYTES
    at, last, look = start * TOKEN_BYTES, stop * TOKEN_BYTES, _FIRST_LOOK
    while at < last:  # looks grow with what was found alike, so that a difference is found soon after where it is
        size = min(last - at, look)
        if size > _FIRST_LOOK or ours[at - shift : at - shift + size] != theirs[at - their_shift : at - their_shift + size]:
            own = np.frombuffer(ours, INT32, size // TOKEN_BYTES, at - shift)
            differs = own != np.frombuffer(theirs, INT32, size // TOKEN_BYTES, at - their_shift)
            alike = int(differs.argmax())
            if differs[alike]:
                at += alike * TOKEN_BYTES
                break
        at += size
        look = min(look * 4, _LONGEST_LOOK)
    at //= TOKEN_BYTES
    if at > start and (line.media or history.media):
        return common_placeholders(line.media, history.media, start, at)
    return at
