"""Which paths of a tree begin as a given history does: a radix trie over the paths of many nodes, whatever turns they are cut into.

The trie consists of lines. A line is a stretch of path tokens that lies in one extent, so it is compared by one look at memory
however many nodes end on it; other lines leave it wherever a path differs first. The first line is a whole path, a fork's or just
the root's, which is looked at where it lies. A position on a path is the same on two paths if the token is, and the placeholder of
a media item if it is one. So every prefix has one place in the trie: a line, and a path index on it.

Nodes come in commit order, and each adds to the trie what no path before it had, in time proportional to its own tokens. A
search goes along lines, which is fastest, until a path has forked too often; then it goes from one block of tokens to the next
by digests, which only what lies behind so many forks has. It never looks at what came after the count it is given. One thread at
a time adds; searching needs no lock, since what is there stays there and every step leaves the trie right.

A trie may lie over an older version of another one, as a layer that holds what its own nodes add to that and leaves it as it is.
No place is in both. So a search goes through the layers once, upwards, each from where the one below it had to stop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from hashlib import sha256
from struct import Struct
from sys import getsizeof
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree.digest import pack
from sessiontree.node import Node, deepest_to, placed_media
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
_PATIENCE: Final = 32  # lines, one behind another
_MOST_BETWEEN: Final = 512
_FIRST_LOOK: Final = 256  # tokens
_LONGEST_LOOK: Final = 2**16  # tokens
_ENDLESS: Final = 2**63
_BITS: Final = 32  # of a path index, and of a number of a node or a line
_LOW: Final = 2**_BITS - 1
_LINE_BYTES: Final = 620  # measured: of a line with its arrays and what finds it
_END_BYTES: Final = 18  # of a node's place: how far it brought its line, and where it ends
_BLOCK_BYTES: Final = 140


class Busy(Exception):
    """What is wanted is in the middle of being made, further down on this thread's stack."""


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

    ``number``: no two lines that one trie sees have the same. ``forks``: how many lines of its own trie lead to it, itself
    included. ``grown``: (number, path index up to which that node brought the line) as one number, ``number * 2**32 + index``; both
    ascend. ``media``: the placeholders on it. ``digests``: see :meth:`PrefixIndex._digest_before`; by block, for those that end
    on it.
    """

    __slots__ = ("digests", "extent", "forks", "grown", "media", "number", "parent", "start")

    def __init__(self, number: int, parent: _Line | None, start: int, extent: Extent, forks: int = 0) -> None:
        self.number: int = number
        self.parent: _Line | None = parent
        self.start: int = start
        self.extent: Extent = extent
        self.forks: int = forks
        self.grown: array[int] = array("Q")
        self.media: list[Placeholders] = []
        self.digests: dict[int, bytes] = {}

    def along(self, at: int, history: History, count: int) -> int:
        """Path index up to which ``history`` is what the first ``count`` nodes brought from ``at`` on."""
        last = self.grown[-1]
        reached = last & _LOW if last >> _BITS < count else self.visible(count)
        if at >= reached:
            return at
        return _common(self.extent.buffer, self.extent.origin, self.media, at, min(reached, history.stop), history)

    def visible(self, count: int) -> int:
        """Path index up to which the first ``count`` nodes brought it; 0 where none of them did."""
        grown = self.grown
        at = bisect_left(grown, count << _BITS) - 1
        return grown[at] & _LOW if at >= 0 else 0

    def maker(self, at: int) -> int:
        """The number of the node that brought it as far as path index ``at``; endless where none has."""
        grown = self.grown
        place = bisect_left(grown, at, key=_LOW.__and__)
        return grown[place] >> _BITS if place < len(grown) else _ENDLESS


class _Path(_Line):
    """The first line of a trie, number 0: the path of ``tip``, in whatever extents it lies. Its nodes are known by their depths."""

    __slots__ = ("tip",)

    def __init__(self, tip: Node) -> None:
        super().__init__(0, None, 0, tip._extent)
        self.tip = tip

    def along(self, at: int, history: History, count: int) -> int:
        """As for other lines; all of it is seen, whatever the ``count``."""
        tip = self.tip
        stop, look = min(tip.stop, history.stop), _FIRST_LOOK
        while at < stop:  # look by look, so that nothing far behind a difference is gathered
            end = min(at + look, stop)
            node = tip.node_at(end - 1)
            at = _common(node._extent.read_bytes(at, end), at, placed_media(node, at, end), at, end, history)
            if at < end:
                break
            look = min(look * 4, _LONGEST_LOOK)
        return at

    def maker(self, at: int) -> int:
        return self.tip.node_at(at - 1).depth if at <= self.tip.stop else _ENDLESS

    def last_end(self, left: int) -> Node:
        """The earliest of the nodes that end last at or before path index ``left``."""
        stop = deepest_to(self.tip, left).stop
        return self.tip.node_at(stop - 1) if stop else self.tip.ancestor(0)


_Ends = tuple["array[int]", "array[int]"]


class PrefixIndex:
    """The trie of the first ``count`` nodes of a tree.

    ``numbers``: of its own nodes, by id, where whoever adds them keeps that. ``first``: the number of the first of its own
    ``nodes``: behind the path of ``tip``, or, for a layer, behind the first ``base_count`` nodes of ``base``, which has taken them
    in.
    """

    __slots__ = (
        "_below",
        "_blocks",
        "_branches",
        "_ends",
        "_first_branches",
        "_first_line",
        "_lines",
        "_next_line",
        "_numbers",
        "_path",
        "first",
        "nodes",
    )

    def __init__(self, tip: Node, numbers: Mapping[bytes, int], base: PrefixIndex | None = None, base_count: int = 0) -> None:
        self._numbers = numbers
        self.nodes: list[Node] = []
        if base is None:
            self.first: int = tip.depth + 1
            self._path = _Path(tip)
            self._below: _Layers = ()
            self._first_line = 1
        else:
            self.first = base_count
            self._path = base._path
            self._below = (*base._below, (base, base_count))
            self._first_line = base._next_line  # what has a higher number down there is not seen from here
        self._next_line: int = self._first_line
        self._branches: dict[Any, _Line] = {}  # by line, path index and what stands there
        self._first_branches: dict[int, int] = {}  # by line and path index, the number of the node
        # By line, (path index, number) of the first node that ends there, as ``index * 2**32 + number``, in two sorted arrays:
        # those that came in order, and some of those that came in between. One that a reader may have in hand grows at its end.
        self._ends: dict[int, _Ends] = {}
        self._lines: list[_Line] = []  # that each node ends on; one of them may not be in ``nodes`` yet
        self._blocks: dict[bytes, _Line] = {}  # by digest, the line that the block ends on

    @property
    def count(self) -> int:
        return self.first + len(self.nodes)

    def add(self, node: Node) -> None:
        """Add the next node in commit order. Where this was interrupted, the same node is simply added again."""
        assert node.parent is not None
        number = self.first + len(self.nodes)
        start, stop = node.start, node.stop
        line = self._place_of(node.parent)
        if start < stop:
            history = History(start, node._extent.read_bytes(start, stop), placeholders_of(node.media, start))
            if self._below:
                self._below[0][0].complete(line, start, history)
            left, known = _follow(line, start, history, _layers_of(line, self._layers(_ENDLESS)), _ENDLESS)
            line = left
            if known < stop:
                line = self._line_from(left, known, node)
                known_media = max(known, line.media[-1].stop if line.media else 0)
                join_placeholders(line.media, placeholders_behind(history.media, known_media))
                self._add_blocks(line, node, known)
                line.grown.append((number << _BITS) + stop)  # from here on the rest is seen
                if line is not left:
                    self._first_branches.setdefault(_place(left, known), number)
                    self._branches[_key(left, known, history)] = line
            self._add_end(line, stop, number)
        self._lines[number - self.first :] = (line,)
        self.nodes.append(node)

    def _place_of(self, node: Node) -> _Line:
        """The line that a node, of its own or below, ends on."""
        own = self._numbers.get(node.id, -1) - self.first
        if own >= 0:
            return self._lines[own]
        below = (trie._place(node) for trie, _ in reversed(self._below))
        return next((line for line in below if line is not None), self._path)

    def _place(self, node: Node) -> _Line | None:
        """The line that a node of its own ends on."""
        at = self._numbers.get(node.id, -1) - self.first
        return self._lines[at] if 0 <= at < len(self.nodes) else None

    def complete(self, line: _Line, at: int, history: History) -> None:
        """Take in all that goes on as ``history`` does from a place on. Here that is so from the start: see StoredPrefixes."""

    def _line_from(self, left: _Line, at: int, node: Node) -> _Line:
        """The line for the tokens of the next node behind path index ``at`` of ``left``: that one, if it can grow, or a branch."""
        own = left.number >= self._first_line
        if own and left.grown[-1] & _LOW == at and left.extent is node._extent:
            return left
        number = self._next_line
        self._next_line = number + 1
        return _Line(number, left, at, node._extent, left.forks + 1 if own else 1)

    def _add_blocks(self, line: _Line, node: Node, known: int) -> None:
        """Take in the blocks that end on a line because of ``node``, behind path index ``known``.

        Only behind so many forks are they ever looked for.
        """
        first, last = known // BLOCK, node.stop // BLOCK
        if first == last or line.forks <= _PATIENCE:
            return
        digest = self._digest_before(line, known)
        start, stop = first * BLOCK, last * BLOCK
        history = History(start, node._extent.read_bytes(start, stop), placed_media(node, start, stop))
        for block in range(first + 1, last + 1):
            digest = _digest(digest, block, history)
            line.digests[block] = digest
            self._blocks[digest] = line

    def _add_end(self, line: _Line, at: int, number: int) -> None:
        """Note that a node ends at path index ``at`` of ``line``, if it is the first."""
        ends, between = self._ends.get(line.number) or self._ends.setdefault(line.number, (array("Q"), array("Q")))
        if _end_before(ends, at)[0] == at or _end_before(between, at)[0] == at:
            return
        end = (at << _BITS) + number
        if not ends or ends[-1] < end:
            ends.append(end)
        elif not between or between[-1] < end:
            between.append(end)
        else:
            between = array("Q", sorted([*between, end]))
            self._ends[line.number] = ends, between
        if len(between) > _MOST_BETWEEN:
            self._ends[line.number] = array("Q", sorted(ends + between)), array("Q")

    def held_bytes(self) -> int:
        """What it takes beside the nodes, about: its tables, and for each line and each end what they hold of it."""
        tables = (self.nodes, self._branches, self._first_branches, self._ends, self._lines, self._blocks)
        lines = self._next_line - self._first_line + 1
        return sum(map(getsizeof, tables)) + lines * _LINE_BYTES + len(self.nodes) * _END_BYTES + len(self._blocks) * _BLOCK_BYTES

    def search(self, history: History, count: int) -> tuple[PrefixMatch, Node | None]:
        """How far ``history``, from the root on, is known among the first ``count`` nodes.

        And the earliest node that goes on from there, otherwise than the history where that goes on too; None where none does.
        """
        layers = self._layers(count)
        layers[0][0].complete(self._path, 0, history)
        line, length = _follow(self._path, 0, history, layers, _PATIENCE)
        node = _last_end(line, length, layers)
        layers = _layers_of(line, layers)
        within = None if length == node.stop else layers[0][0]._node(line.maker(length))
        number = line.maker(length + 1)
        for trie, seen in layers:
            number = min(number, trie._first_branches.get(_place(line, length), _ENDLESS))
            if number < seen:
                return PrefixMatch(node, length, within), trie._node(number)
            number = _ENDLESS
        return PrefixMatch(node, length, within), None

    def _layers(self, count: int) -> _Layers:
        """(trie, how many nodes are seen in it and below) for those below and this one, the lowest first."""
        return (*self._below, (self, count))

    def _node(self, number: int) -> Node:
        return self.nodes[number - self.first] if number >= self.first else self._path.tip.ancestor(number)

    def _end_before(self, line: _Line, left: int, count: int) -> tuple[int, int]:
        """(path index, number) of the node of its own, of the first ``count``, that ends last on ``line`` at or before ``left``.

        (-1, -1) without any.
        """
        ends = self._ends.get(line.number)
        return (-1, -1) if ends is None else max(_end_before(ends[0], left, count), _end_before(ends[1], left, count))

    def _by_branches(self, line: _Line, at: int, history: History, count: int, most: int) -> tuple[_Line, int, bool]:
        """Where ``history`` leads to from a place where ``line`` does not go on as it does.

        And whether it goes on there: after ``most`` branches.
        """
        stop = history.stop
        while at < stop:
            branch = self._branches.get(_key(line, at, history))
            if branch is None or branch.grown[0] >> _BITS >= count:
                break
            if not most:
                return line, at, True
            line, most = branch, most - 1
            at = line.along(at, history, count)
        return line, at, False

    def _by_blocks(self, line: _Line, at: int, history: History, count: int) -> tuple[_Line, int]:
        """As far as ``history``, known up to path index ``at`` of ``line``, is known by whole blocks, and along the last line."""
        digest = self._digest_before(line, at)
        known: _Line | None = None
        for block in range(at // BLOCK + 1, history.stop // BLOCK + 1):
            digest = _digest(digest, block, history)
            found = self._blocks.get(digest)
            if found is None or found.visible(count) < block * BLOCK:
                break
            known, at = found, block * BLOCK
        return (line, at) if known is None else (known, known.along(at, history, count))

    def _digest_before(self, line: _Line, at: int) -> bytes:
        """The digest of a path up to the last end of a block at or before path index ``at`` of ``line``.

        Digests start from the place where a search by lines would have to stop, which it has come by.
        """
        block = at // BLOCK
        while line.number >= self._first_line and line.forks > _PATIENCE:
            if line.start < block * BLOCK:
                return line.digests[block]
            assert line.parent is not None  # only the first line has none, which is not one of its own
            line, at = line.parent, line.start
        return _place(line, at).to_bytes(32, "little")


_Layers = tuple[tuple[PrefixIndex, int], ...]


def _layers_of(line: _Line, layers: _Layers) -> _Layers:
    """The trie that ``line`` belongs to, and those over it, which alone may have something on it."""
    lowest = len(layers) - 1
    while lowest and layers[lowest][0]._first_line > line.number:
        lowest -= 1
    return layers[lowest:] if lowest else layers


def _follow(line: _Line, at: int, history: History, layers: _Layers, patience: int) -> tuple[_Line, int]:
    """Where ``history`` leads to from path index ``at`` of ``line``, which the lowest of ``layers`` holds.

    In each of them by blocks, after ``patience`` branches.
    """
    at = line.along(at, history, layers[0][1])
    for trie, count in layers:
        line, at, on = trie._by_branches(line, at, history, count, patience)
        if on:
            line, at = trie._by_blocks(line, at, history, count)
            line, at, _ = trie._by_branches(line, at, history, count, _ENDLESS)
    return line, at


def _last_end(line: _Line, left: int, layers: _Layers) -> Node:
    """The earliest of the nodes that end last at or before path index ``left`` of ``line``."""
    while True:
        node = line.last_end(left) if isinstance(line, _Path) else None
        last = -1 if node is None else node.stop
        for trie, count in _layers_of(line, layers):
            at, number = trie._end_before(line, left, count)
            if at > last:
                last, node = at, trie._node(number)
        if node is not None:
            return node
        assert line.parent is not None  # the root ends on the first line
        line, left = line.parent, line.start


def _end_before(ends: array[int], at: int, count: int = _ENDLESS) -> tuple[int, int]:
    place = bisect_right(ends, (at << _BITS) + _LOW) - 1
    while place >= 0 and ends[place] & _LOW >= count:
        place -= 1
    return divmod(ends[place], 2**_BITS) if place >= 0 else (-1, -1)


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
    return (line.number << _BITS) + at


_token = Struct("<i").unpack_from


def _common(known: bytes, origin: int, media: Sequence[Placeholders], start: int, stop: int, history: History) -> int:
    """Path index up to which ``history`` is what is known from ``start`` on; at most ``stop``.

    ``known``: path tokens from ``origin`` on; ``media``: those in them.
    """
    at, look, data = start, _FIRST_LOOK, history.data
    while at < stop:  # looks grow with what was found alike, so that a difference is found soon after where it is
        size = min(stop - at, look)
        length, own, other = size * TOKEN_BYTES, (at - history.origin) * TOKEN_BYTES, (at - origin) * TOKEN_BYTES
        if size > _FIRST_LOOK or data[own : own + length] != known[other : other + length]:
            differs = np.frombuffer(data, INT32, size, own) != np.frombuffer(known, INT32, size, other)
            alike = int(differs.argmax())
            if differs[alike]:
                at += alike
                break
        at += size
        look = min(look * 4, _LONGEST_LOOK)
    if at > start and (media or history.media):
        return common_placeholders(media, history.media, start, at)
    return at
