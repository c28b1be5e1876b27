"""How far a history is known among nodes that lie in a store: a trie that takes them in where a history comes by, not before.

It is complete where it was asked: whatever begins as that history did is in it. So the children of a node are read when a history
comes as far as that node ends, once, and never otherwise. Where there are many, those without media are not even taken in: they
wait in a bundle, sorted, by a few tokens of each. Of a bundle that a history comes by, the one that goes on most like it is taken
in; of the others, those that go on like it for a while wait in bundles where they leave it.

Nodes come in any order, and are known by their ordinals: which one is the first to hold something, to end or to go on somewhere is
the lowest of those that are in, or wait there.

What is read for the trie is checked against the checksums of its records. What is answered are nodes, and these are read anew, with
all of their paths, and checked against their ids as every node is. Where damage is known, nothing else is taken in either.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from operator import itemgetter
from sys import getsizeof
from threading import get_ident
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sessiontree.locks import new_lock
from sessiontree.media import MediaItem
from sessiontree.node import Node, placed_media
from sessiontree.prefixes import (
    _BITS,
    _BLOCK_BYTES,
    _END_BYTES,
    _ENDLESS,
    _LINE_BYTES,
    _LOW,
    Busy,
    History,
    PrefixIndex,
    _common,
    _follow,
    _key,
    _Line,
    _place,
)
from sessiontree.spans import (
    Placeholders,
    common_placeholders,
    join_placeholders,
    placeholders_behind,
    placeholders_of,
)
from sessiontree.tokens import TOKEN_BYTES, Extent

_FEW: Final = 32  # children that are taken in one by one
_KEPT: Final = 32 * TOKEN_BYTES  # bytes of each of the others behind what they share
_ANSWERS: Final = 64  # nodes
_RUN_BYTES: Final = 100  # of one that waits in a bundle
_AFTER_ALL: Final = b"\xff" * TOKEN_BYTES  # no token sorts behind it

Content = tuple[int, bytes, tuple[MediaItem, ...]]  # of a node: its ordinal, token bytes, media


class StoredNodes(Protocol):
    """Nodes by ordinal: those of the path of ``tip``, or the root alone, and behind them those that lie in a store."""

    root: Node
    tip: Node | None

    def node(self, ordinal: int) -> Node: ...

    def ordinal_of(self, node: Node) -> int | None: ...

    def parents_outside(self) -> Sequence[int]:
        """Ordinals of those on the path that have children in the store."""

    def children_of(self, ordinal: int) -> Sequence[int]:
        """Those in the store, in order."""

    def contents(self, ordinals: Sequence[int]) -> Iterator[Content]:
        """What nodes hold, in any order. Raises CorruptTree, or leaves out what is damaged."""


class _Bundle(NamedTuple):
    """Siblings that wait at a place of the trie: ``[low, high)`` of ``runs``, which are sorted, beside their ``ordinals``.

    ``runs``: what each holds behind its first ``skipped`` bytes, which all of them share: all of it if that is less than ``_KEPT``
    bytes, else so many. Up to the place where they wait they also share the first ``depth`` bytes of these, and each goes on.
    ``pulled``: tokens that histories went on with: of the siblings that do so too, all that such a history needs is in the trie or
    waits further on.
    """

    runs: Sequence[bytes]
    ordinals: NDArray[np.int64]
    skipped: int
    low: int
    high: int
    depth: int
    pulled: set[bytes]

    @classmethod
    def of(cls, siblings: list[tuple[bytes, int]], skipped: int) -> _Bundle:
        """Of (run, ordinal) of each."""
        siblings.sort(key=itemgetter(0))
        runs, ordinals = [run for run, _ in siblings], np.array([ordinal for _, ordinal in siblings], np.int64)
        return cls(runs, ordinals, skipped, 0, len(runs), 0, set())

    def first(self) -> int:
        return int(self.ordinals[self.low : self.high].min())

    def going_on(self, start: bytes) -> tuple[int, int]:
        """Which of them begin with ``start``."""
        low = bisect_left(self.runs, start, self.low, self.high)
        return low, bisect_left(self.runs, start + _AFTER_ALL, low, self.high)

    def most_like(self, wanted: bytes, low: int, high: int) -> int:
        """That one of ``[low, high)`` that goes on for longest as is wanted."""
        place = bisect_left(self.runs, wanted, low, high)
        return max(range(max(low, place - 1), min(high, place + 1)), key=lambda place: _alike(self.runs[place], wanted))


class _Waiting(NamedTuple):
    """What is to be looked at once a history comes by path index ``at`` of ``line``: a node, by its ordinal, or a bundle."""

    line: _Line
    at: int
    what: Any


class StoredPrefixes(PrefixIndex):
    """The trie of the first ``count`` nodes of ``nodes``; one thread at a time completes it, under a lock of its own."""

    __slots__ = ("_answers", "_children", "_completed", "_count", "_lock", "_stored", "_taken", "_thread", "_waiting")

    def __init__(self, nodes: StoredNodes, count: int) -> None:
        super().__init__(nodes.tip or nodes.root, {})
        self._stored = nodes
        self._count = count
        self._lock = new_lock()
        self._thread = 0  # that completes it
        self._next_line = count  # for layers above: a node makes one line at most, of its own number
        self._taken: dict[int, _Line] = {}  # the line that a node ends on
        self._completed: set[int] = set()  # nodes whose whole paths were
        self._answers: dict[int, Node] = {}  # nodes that were the answer last, which are likely to be so again
        self._children: dict[int, Sequence[int]] = {}  # of some that wait
        tip = self._path.tip
        outside = {ordinal: tip.ancestor(ordinal).stop for ordinal in nodes.parents_outside()}
        self._waiting: dict[int, dict[Any, int]] = {0: outside}  # by line, path indexes

    @property
    def count(self) -> int:
        return self._count

    def held_bytes(self) -> int:
        """What it takes beside the nodes, about."""
        waiting = [dict.copy(places) for places in list(self._waiting.values())]
        bundles = [what.bundle for places in waiting for what in places if isinstance(what, _ById)]
        shared = {id(bundle.runs): (len(bundle.runs) * _RUN_BYTES, bundle.ordinals.nbytes) for bundle in bundles}
        tables = (self._branches, self._first_branches, self._ends, self._blocks, self._taken, self._completed, self._children)
        return (
            sum(map(getsizeof, (*tables, *waiting)))
            + sum(runs + ordinals for runs, ordinals in shared.values())
            + len(self._taken) * (_LINE_BYTES + _END_BYTES)
            + len(self._blocks) * _BLOCK_BYTES
        )

    def add(self, node: Node) -> None:
        raise AssertionError("nodes in a store are taken in by themselves")

    def _node(self, number: int) -> Node:
        answers = self._answers
        node = self._stored.node(number)
        answers.pop(number, None)
        answers[number] = node
        if len(answers) > _ANSWERS:
            with suppress(StopIteration, RuntimeError):  # somebody else was quicker
                answers.pop(next(iter(answers)), None)
        return node

    def _place(self, node: Node) -> _Line | None:
        ordinal = self._stored.ordinal_of(node)
        if ordinal is None or ordinal >= self._count:
            return None
        if ordinal not in self._completed:
            path = History(0, node._extent.read_bytes(0, node.stop), placed_media(node, 0, node.stop))
            self.complete(self._path, 0, path)
            self._completed.add(ordinal)
        return self._path if ordinal < self.first else self._taken[ordinal]

    def _by_branches(self, line: _Line, at: int, history: History, count: int, most: int) -> tuple[_Line, int, bool]:
        return super()._by_branches(line, at, history, count, _ENDLESS)  # it has no blocks

    def complete(self, line: _Line, at: int, history: History) -> None:
        """Take in all that goes on as ``history`` does from path index ``at`` of ``line`` on, a place up to which it is complete.

        Raises Busy where that is going on further down on this thread's stack, CorruptTree.
        """
        if line.number >= self._next_line:
            return  # of a layer above
        with self._lock:
            if self._thread == get_ident():
                raise Busy
            self._thread = get_ident()
            try:
                found = [_Waiting(line, at, what) for what, place in self._waiting.get(line.number, {}).items() if place == at]
                while True:
                    self._settle_all(found, history)
                    ahead, reached = _follow(line, at, history, ((self, _ENDLESS),), _ENDLESS)
                    found = self._waiting_between(line, at, ahead, reached)
                    if not found:
                        return
                    line, at = ahead, reached
            finally:
                self._thread = 0

    def _waiting_between(self, line: _Line, at: int, ahead: _Line, reached: int) -> list[_Waiting]:
        """What waits behind path index ``at`` of ``line``, up to path index ``reached`` of ``ahead``."""
        found = []
        while True:
            for what, place in self._waiting.get(ahead.number, {}).items():
                if place <= reached and (ahead is not line or place > at):
                    found.append(_Waiting(ahead, place, what))
            if ahead is line or ahead.parent is None:
                return found
            ahead, reached = ahead.parent, ahead.start

    def _wait(self, line: _Line, at: int, what: int | _Bundle) -> _Waiting:
        key = what if isinstance(what, int) else _ById(what)
        self._waiting.setdefault(line.number, {})[key] = at
        return _Waiting(line, at, key)

    def _settle_all(self, found: list[_Waiting], history: History) -> None:
        """Take in what ``history`` needs of all that waits on its way. In commit order: then what is noted is noted at the end."""
        numbers = itertools.count()
        todo: list[tuple[int, int, _Waiting]] = []
        while True:
            for waiting in found:
                what = waiting.what
                heappush(todo, (what if isinstance(what, int) else what.first, next(numbers), waiting))
            if not todo:
                return
            found = self._settle(heappop(todo)[2], history)

    def _settle(self, waiting: _Waiting, history: History) -> list[_Waiting]:
        """Take in what ``history``, which has come by, needs of what waits; what else waits on its way then."""
        line, at, what = waiting
        if isinstance(what, _ById):
            return self._pull(line, at, what.bundle, history)
        children = self._children.get(what) or self._stored.children_of(what)
        children = [child for child in children if child < self._count and child not in self._taken]
        on_way: list[_Waiting] = []
        plain: list[tuple[bytes, int]] = []
        for child, data, items in self._stored.contents(children):
            if len(children) > _FEW and not items:
                plain.append((data[:_KEPT], child))
                continue
            media = placeholders_of(items, at)
            ended = self._take(child, line, at, History(at, data, media))
            if ended is not None and _begins_so(history, at, data, media):
                on_way.append(ended)
        if plain:
            on_way += self._lay(_Bundle.of(plain, 0), line, at)
        self._waiting[line.number].pop(what, None)
        self._children.pop(what, None)
        return on_way

    def _lay(self, bundle: _Bundle, line: _Line, at: int) -> list[_Waiting]:
        """Let siblings wait at a place, which those of them that end there do not need; what waits there then."""
        if bundle.depth == _KEPT:
            bundle, line, at = self._read_on(bundle, line, at)
        runs, ordinals, _, low, high, depth, _ = bundle
        found = []
        while low < high and len(runs[low]) == depth:
            if (ordinal := int(ordinals[low])) not in self._taken:
                ended = self._end(ordinal, line, at)
                if ended is not None:
                    found.append(ended)
            low += 1
        if low < high:
            bundle = bundle._replace(low=low)
            self._leave(line, at, bundle.first())
            found.append(self._wait(line, at, bundle))
        return found

    def _read_on(self, bundle: _Bundle, line: _Line, at: int) -> tuple[_Bundle, _Line, int]:
        """The same siblings, of which one is in the trie, and the place up to which they are alike."""
        known = bundle.skipped + bundle.depth
        ordinals = bundle.ordinals[bundle.low : bundle.high].tolist()
        shared: bytes | None = None
        for _, data, _ in self._stored.contents(ordinals):
            shared = data[known:] if shared is None else shared[: _alike(shared, data[known:])]
        if shared:
            line, at = self._walk(bundle.first(), line, at, History(at, shared, ()))
            known += len(shared)
        siblings = [(data[known : known + _KEPT], ordinal) for ordinal, data, _ in self._stored.contents(ordinals)]
        return _Bundle.of(siblings, known), line, at

    def _pull(self, line: _Line, at: int, bundle: _Bundle, history: History) -> list[_Waiting]:
        """Take in that one of a bundle, which waits at a place on its way, that goes on most like ``history``; of the others, let
        those that go on like it wait where they leave it."""
        runs, ordinals, skipped, _, _, depth, pulled = bundle
        ahead = (at - history.origin) * TOKEN_BYTES
        wanted = runs[bundle.low][:depth] + history.data[ahead : ahead + _KEPT - depth]
        token = wanted[depth : depth + TOKEN_BYTES]
        low, high = bundle.going_on(wanted[: depth + TOKEN_BYTES]) if token and token not in pulled else (0, 0)
        if low == high:
            return []
        best = bundle.most_like(wanted, low, high)
        found = []
        if (ordinal := int(ordinals[best])) not in self._taken:
            run = runs[best] if len(runs[best]) < _KEPT else self._content(ordinal)[skipped:]
            ended = self._take(ordinal, line, at, History(at, run[depth:], ()))
            if ended is not None and _begins_so(history, at, run[depth:], ()):
                found.append(ended)
        rest = bundle._replace(low=low, high=high)
        while rest.high - rest.low > 1:
            alike = min(_alike(runs[rest.low], wanted), _alike(runs[rest.high - 1], wanted))
            on = wanted[alike : alike + TOKEN_BYTES]
            low, high = rest.going_on(wanted[:alike] + on) if on else (0, 0)
            rest = rest._replace(depth=alike, pulled={on})
            left, reached = self._walk(rest.first(), line, at, History(at, wanted[depth:alike], ()))
            found += self._lay(rest, left, reached)
            rest = rest._replace(low=low, high=high)
        pulled.add(token)
        return found

    def _content(self, ordinal: int) -> bytes:
        node = self._stored.node(ordinal)
        return node._extent.read_bytes(node.start, node.stop)

    def _walk(self, number: int, line: _Line, at: int, history: History) -> tuple[_Line, int]:
        """As far as ``history`` is known from a place on, for a node that holds it."""
        while True:
            reached = line.along(at, history, _ENDLESS)
            if reached > at:
                _hold(line, number, reached)
                at = reached
            branch = self._branches.get(_key(line, at, history)) if at < history.stop else None
            if branch is None:
                return line, at
            self._leave(line, at, number)
            line = branch

    def _take(self, number: int, line: _Line, at: int, history: History) -> _Waiting | None:
        """Take in a node that holds ``history`` behind a place. Where an interrupt came in between, it is simply done again."""
        left, known = self._walk(number, line, at, history)
        line, stop = left, history.stop
        if known < stop:
            data = history.data[(known - history.origin) * TOKEN_BYTES :]
            grows = left.number and left.grown[-1] & _LOW == known == left.extent.end
            if grows:
                left.extent.append(data)
            else:
                line = _Line(number, left, known, Extent(None, None, known, data, self._path.extent.paths))
            if history.media:
                known_media = max(known, line.media[-1].stop if line.media else 0)
                join_placeholders(line.media, placeholders_behind(history.media, known_media))
            _hold(line, number, stop)  # from here on the rest is seen
            if not grows:
                self._leave(left, known, number)
                self._branches[_key(left, known, history)] = line
        return self._end(number, line, stop)

    def _end(self, number: int, line: _Line, at: int) -> _Waiting | None:
        """Note that a node ends at a place. If it has children, it waits there."""
        self._add_end(line, at, number)
        waiting = None
        if children := self._stored.children_of(number):
            if len(children) <= _FEW:
                self._children[number] = children
            waiting = self._wait(line, at, number)
        self._taken[number] = line
        return waiting

    def _leave(self, line: _Line, at: int, number: int) -> None:
        """Note that a node goes on behind a place, another way than the line or along it."""
        place = _place(line, at)
        if number < self._first_branches.get(place, _ENDLESS):
            self._first_branches[place] = number

    def _add_end(self, line: _Line, at: int, number: int) -> None:
        for ends in self._ends.get(line.number, ()):
            end = (at << _BITS) + number
            place = bisect_left(ends, at << _BITS)
            if place < len(ends) and ends[place] >> _BITS == at:
                ends[place] = min(ends[place], end)
                return
        super()._add_end(line, at, number)


class _ById:
    """A bundle as a key: it is equal to itself alone. ``first``: the lowest ordinal in it."""

    __slots__ = ("bundle", "first")

    def __init__(self, bundle: _Bundle) -> None:
        self.bundle = bundle
        self.first = bundle.first()


def _hold(line: _Line, number: int, at: int) -> None:
    """Note that a node holds a line up to path index ``at``: kept if none with a lower number holds as much.

    A reader may have the array in hand: it grows at its end, or is replaced.
    """
    if not line.number:
        return  # the nodes of the first line come before all others
    grown = line.grown
    held = (number << _BITS) + at
    if not grown or (grown[-1] >> _BITS < number and grown[-1] & _LOW < at):
        grown.append(held)
        return
    place = bisect_left(grown, at, key=_LOW.__and__)
    if place < len(grown) and grown[place] >> _BITS <= number:
        return
    behind = place + 1 if place < len(grown) and grown[place] & _LOW == at else place
    line.grown = grown[: bisect_left(grown, number << _BITS, 0, place)] + array("Q", [held]) + grown[behind:]


def _begins_so(history: History, at: int, data: bytes, media: Sequence[Placeholders]) -> bool:
    """Whether ``history`` goes on from path index ``at`` by just these tokens and media."""
    start = (at - history.origin) * TOKEN_BYTES
    stop = at + len(data) // TOKEN_BYTES
    if stop > history.stop or history.data[start : start + len(data)] != data:
        return False
    return not (media or history.media) or common_placeholders(media, history.media, at, stop) == stop


def _alike(one: bytes, two: bytes) -> int:
    """How many bytes of whole tokens two runs begin with alike."""
    stop = min(len(one), len(two)) // TOKEN_BYTES
    return _common(two, 0, (), 0, stop, History(0, one, ())) * TOKEN_BYTES
