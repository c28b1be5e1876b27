"""Which paths of a tree begin as a given history does: a radix trie over the paths of many nodes, whatever turns they are cut into.

The trie consists of lines. A line is a stretch of path tokens that lies in one extent, so it is compared by one look at memory
however many nodes end on it; other lines leave it wherever a path differs first. A position on a path is the same on two
paths if the token is, and the placeholder of a media item if it is one. So every prefix has one place in the trie.

Nodes come in commit order, and each adds to the trie what no path before it had, in time proportional to its own tokens. A
search goes along lines, which is fastest, until a path has forked too often; then it goes from one block of tokens to the next
by digests. It never looks at what came after the count it is given. One thread at a time adds; searching needs no lock, since what
is there stays there and every step leaves the trie right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree.digest import pack
from sessiontree.node import Node, placed_media
from sessiontree.spans import (
    Placeholders,
    common_placeholders,
    join_placeholders,
    placeholder_at,
    placeholders_behind,
    placeholders_between,
    placeholders_of,
)
from sessiontree.tokens import INT32, TOKEN_BYTES, Extent

BLOCK: Final = 512  # tokens
_PATIENCE: Final = 32  # lines
_MOST_BETWEEN: Final = 512
_NO_DIGEST: Final = bytes(32)
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
    """Path tokens ``[start, ...)`` of ``extent``, where ``parent`` is left. Made by nodes, which are known by their numbers.

    ``grown``: (number, path index up to which that node brought the line). ``ends``: (path index, number) of the first node that
    ends there, in two sorted lists: those that came in order, and some of those that came in between; a list that a reader may
    have in hand only grows at its end. ``media``: the placeholders on it. ``digests``: of the path up to the end of each block
    that ends on it.
    """

    __slots__ = ("digests", "ends", "extent", "grown", "media", "number", "parent", "start")

    def __init__(self, number: int, parent: _Line | None, start: int, extent: Extent) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        self.extent = extent
        self.grown: list[tuple[int, int]] = []
        self.ends: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.media: list[Placeholders] = []
        self.digests: dict[int, bytes] = {}

    def add_end(self, at: int, number: int) -> None:
        """Note the node that ends at path index ``at``, if it is the first."""
        ends, between = self.ends
        if _end_before(ends, at)[0] == at or _end_before(between, at)[0] == at:
            return
        if not ends or ends[-1][0] < at:
            ends.append((at, number))
        elif not between or between[-1][0] < at:
            between.append((at, number))
        else:
            self.ends = ends, sorted([*between, (at, number)])
        if len(self.ends[1]) > _MOST_BETWEEN:
            self.ends = sorted(ends + self.ends[1]), []

    def end_before(self, at: int, count: int) -> int:
        """The number of the node, of the first ``count``, that ends last at or before path index ``at``; -1 without any."""
        ends, between = self.ends
        return max(_end_before(ends, at, count), _end_before(between, at, count))[1]

    def visible(self, count: int) -> int:
        """Path index up to which the first ``count`` nodes brought it; 0 where none of them did."""
        at = bisect_left(self.grown, (count, 0)) - 1
        return self.grown[at][1] if at >= 0 else 0

    def maker(self, at: int) -> int:
        """The number of the node that brought it as far as path index ``at``; endless where none has."""
        number = bisect_left(self.grown, at, key=lambda grown: grown[1])
        return self.grown[number][0] if number < len(self.grown) else _ENDLESS

    def digest(self, block: int) -> bytes:
        """The digest of its path up to the end of a block."""
        line: _Line | None = self
        while line is not None and line.start >= block * BLOCK:
            line = line.parent
        return _NO_DIGEST if line is None else line.digests[block]


def _end_before(ends: Sequence[tuple[int, int]], at: int, count: int = _ENDLESS) -> tuple[int, int]:
    place = bisect_right(ends, (at, _ENDLESS)) - 1
    while place >= 0 and ends[place][1] >= count:
        place -= 1
    return ends[place] if place >= 0 else (-1, -1)


class PrefixIndex:
    """The trie of the first ``len(nodes)`` nodes of a tree, root first."""

    __slots__ = ("_blocks", "_branches", "_first_branches", "_lines", "_places", "nodes")

    def __init__(self, root: Node) -> None:
        line = _Line(0, None, 0, root._extent)
        line.grown.append((0, 0))
        line.add_end(0, 0)
        self.nodes = [root]
        self._lines = [line]
        self._branches: dict[Any, _Line] = {}  # by line, path index and what stands there
        self._first_branches: dict[int, int] = {}  # by line and path index, the number of the node
        self._places: dict[bytes, int] = {root.id: 0}  # the line that each node ends on
        self._blocks: dict[bytes, _Line] = {}  # by digest, the line that the block ends on

    def add(self, node: Node) -> None:
        """Add the next node in commit order. Where this was interrupted, the same node is simply added again."""
        assert node.parent is not None
        number = len(self.nodes)
        start, stop = node.start, node.stop
        line = self._lines[self._places[node.parent.id]]
        if start < stop:
            history = History(start, node._extent.read_bytes(start, stop), placeholders_of(node.media, start))
            line, known, _ = self._follow(line, start, history, _ENDLESS, _ENDLESS)
            if known < stop:
                branches = known < line.grown[-1][1] or line.extent is not node._extent
                left, line = line, _Line(len(self._lines), line, known, node._extent) if branches else line
                known_media = max(known, line.media[-1].stop if line.media else 0)
                join_placeholders(line.media, placeholders_behind(history.media, known_media))
                self._add_blocks(line, node, known)
                line.grown.append((number, stop))  # from here on the rest is seen
                if branches:
                    self._lines.append(line)
                    self._first_branches.setdefault(_place(left, known), number)
                    self._branches[_key(left, known, history)] = line
            line.add_end(stop, number)
        self._places[node.id] = line.number
        self.nodes.append(node)

    def _add_blocks(self, line: _Line, node: Node, known: int) -> None:
        """Take in the blocks that end on a line because of ``node``, behind path index ``known``."""
        first, last = known // BLOCK, node.stop // BLOCK
        if first == last:
            return
        digest = line.digest(first)
        start, stop = first * BLOCK, last * BLOCK
        history = History(start, node._extent.read_bytes(start, stop), placed_media(node, start, stop))
        for block in range(first + 1, last + 1):
            digest = _digest(digest, block, history)
            line.digests[block] = digest
            self._blocks[digest] = line

    def search(self, history: History, count: int) -> tuple[PrefixMatch, Node | None]:
        """How far ``history``, from the root on, is known among the first ``count`` nodes.

        And the earliest node that goes on from there, otherwise than the history where that goes on too; None where none does.
        """
        line, length, on = self._follow(self._lines[0], 0, history, count, _PATIENCE)
        if on:
            line, length = self._skip(line, length, history, count)
            line, length, _ = self._follow(line, length, history, count, _ENDLESS)
        node = self._last_end(line, length, count)
        within = None if length == node.stop else self.nodes[line.maker(length)]
        beyond = min(line.maker(length + 1), self._first_branches.get(_place(line, length), _ENDLESS))
        return PrefixMatch(node, length, within), self.nodes[beyond] if beyond < count else None

    def _last_end(self, line: _Line, left: int, count: int) -> Node:
        """The node that ends last at or before path index ``left`` of ``line``."""
        while (number := line.end_before(left, count)) < 0:
            assert line.parent is not None  # the root ends on the first line
            line, left = line.parent, line.start
        return self.nodes[number]

    def _follow(self, line: _Line, at: int, history: History, count: int, most: int) -> tuple[_Line, int, bool]:
        """Where ``history`` leads to from path index ``at`` of ``line``, and whether it goes on there: after ``most`` branches."""
        stop = history.stop
        while True:
            number, reached = line.grown[-1]
            if number >= count:
                reached = line.visible(count)
            if at < reached:
                at = _common(line, at, min(reached, stop), history)
            if at >= stop:
                return line, at, False
            branch = self._branches.get(_key(line, at, history))
            if branch is None or branch.grown[0][0] >= count:
                return line, at, False
            if not most:
                return line, at, True
            line, most = branch, most - 1

    def _skip(self, line: _Line, at: int, history: History, count: int) -> tuple[_Line, int]:
        """As far as ``history``, known up to path index ``at`` of ``line``, is known by whole blocks."""
        digest = line.digest(at // BLOCK)
        for block in range(at // BLOCK + 1, history.stop // BLOCK + 1):
            digest = _digest(digest, block, history)
            found = self._blocks.get(digest)
            if found is None or found.visible(count) < block * BLOCK:
                break
            line, at = found, block * BLOCK
        return line, at


def _digest(before: bytes, block: int, history: History) -> bytes:
    """The digest of a path up to the end of a block; ``before``: that of the block before."""
    start, stop = (block - 1) * BLOCK, block * BLOCK
    shift = history.origin * TOKEN_BYTES
    data = history.data[start * TOKEN_BYTES - shift : stop * TOKEN_BYTES - shift]
    media = [tuple(piece) for piece in placeholders_between(history.media, start, stop)] if history.media else None
    return sha256(before + data + pack(media)).digest() if media else sha256(before + data).digest()


def _key(line: _Line, at: int, history: History) -> Any:
    """By what a branch that leaves ``line`` at path index ``at`` is found."""
    offset = (at - history.origin) * TOKEN_BYTES
    plain = (_place(line, at) << 32) + _token(history.data, offset)[0]
    piece = placeholder_at(history.media, at) if history.media else None
    return plain if piece is None else (plain, piece.content, piece.first + at - piece.start)


def _place(line: _Line, at: int) -> int:
    return (line.number << 32) + at


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
