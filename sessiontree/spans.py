"""Which placeholder of which media item stands where on a path.

Two paths have the same at a path index if both have text there, or both the same placeholder of the same content, however the item
is cut into spans and turns. :class:`Placeholders` are such stretches, sorted, with those that run on joined into one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sessiontree.media import MediaItem


class Placeholders(NamedTuple):
    """Path tokens ``[start, stop)`` are the placeholders of ``content`` from number ``first`` on."""

    start: int
    stop: int
    content: tuple[Any, ...]
    first: int


def placeholders_of(media: Iterable[MediaItem], start: int) -> list[Placeholders]:
    """The media of a turn that starts at path index ``start``, in path order; what runs on is one."""
    pieces = []
    for item in media:
        content, first = item.content(), item.placeholders_before
        for offset, length in item.spans:
            pieces.append(Placeholders(start + offset, start + offset + length, content, first))
            first += length
    pieces.sort(key=lambda piece: piece.start)
    joined: list[Placeholders] = []
    join_placeholders(joined, pieces)
    return joined


def join_placeholders(media: list[Placeholders], pieces: Iterable[Placeholders]) -> None:
    """Put ``pieces`` behind ``media``; one that runs on from the one before makes that longer."""
    for piece in pieces:
        before = media[-1] if media else None
        if (
            before is not None
            and before.stop == piece.start
            and before.first + before.stop - before.start == piece.first
            and before.content == piece.content
        ):
            media[-1] = before._replace(stop=piece.stop)
        else:
            media.append(piece)


def placeholder_at(media: Sequence[Placeholders], at: int) -> Placeholders | None:
    """The piece that covers path index ``at``."""
    number = bisect_right(media, at, key=lambda piece: piece.start) - 1
    return media[number] if number >= 0 and media[number].stop > at else None


def placeholders_behind(media: Sequence[Placeholders], start: int) -> list[Placeholders]:
    """What of ``media`` stands at or behind path index ``start``."""
    return [_clipped(piece, start, piece.stop) for piece in media[_first_behind(media, start) :]]


def placeholders_between(media: Sequence[Placeholders], start: int, stop: int) -> list[Placeholders]:
    """What of ``media`` stands in path tokens ``[start, stop)``."""
    found = []
    for piece in itertools.islice(media, _first_behind(media, start), None):
        if piece.start >= stop:
            break
        found.append(_clipped(piece, start, stop))
    return found


def common_placeholders(one: Sequence[Placeholders], two: Sequence[Placeholders], start: int, stop: int) -> int:
    """Path index up to which the same placeholders stand on both; at most ``stop``."""
    at, other = _first_behind(one, start), _first_behind(two, start)
    while True:
        mine = _clipped(one[at], start, stop) if at < len(one) and one[at].start < stop else None
        its = _clipped(two[other], start, stop) if other < len(two) and two[other].start < stop else None
        if mine is None or its is None:
            return min([stop, *(piece.start for piece in (mine, its) if piece is not None)])
        if mine != its:
            alike = (mine.start, mine.content, mine.first) == (its.start, its.content, its.first)
            return min(mine.stop, its.stop) if alike else min(mine.start, its.start)
        at, other = at + 1, other + 1


def _first_behind(media: Sequence[Placeholders], start: int) -> int:
    """The number of the first piece that ends behind path index ``start``."""
    return bisect_right(media, start, key=lambda piece: piece.stop)


def _clipped(piece: Placeholders, start: int, stop: int) -> Placeholders:
    begin = max(piece.start, start)
    return Placeholders(begin, min(piece.stop, stop), piece.content, piece.first + begin - piece.start)
