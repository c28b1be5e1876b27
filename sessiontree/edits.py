"""Editing history without editing: what a cut or a rewritten path is made of.

Both functions look at a node's path and plan the turns of another one. They share every token up to the first change, move media
along with their tokens, and refuse to cut a media span. Nothing is attached here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sessiontree.errors import MediaSpanError, OutOfRange, Unsupported
from sessiontree.media import MediaItem, placements
from sessiontree.node import Details, Link, Node, deepest_from, deepest_to
from sessiontree.positions.runs import TableRun
from sessiontree.tokens import TOKEN_BYTES, TokenIds, as_index, token_array, token_bytes
from sessiontree.turns import Pending, Turn, plan_turn


class Edit(NamedTuple):
    """Replace path tokens ``[start, stop)`` by ``token_ids``. Spans of ``media`` are relative to ``token_ids``."""

    start: int
    stop: int
    token_ids: TokenIds = ()
    media: Sequence[MediaItem] = ()


class Plan(NamedTuple):
    """Another path: the node it leaves from, and the turns that follow."""

    parent: Node
    turns: tuple[Pending, ...]


class _Change(NamedTuple):
    """An edit, checked."""

    start: int
    stop: int
    data: bytes
    media: tuple[MediaItem, ...]


def plan_prefix(node: Node, length: int) -> Plan:
    """The first ``length`` tokens of a path, 0 <= length <= node.stop. Raises MediaSpanError for a cut inside a span."""
    parent = deepest_to(node, length)
    if parent.stop == length:
        return Plan(parent, ())
    cut = deepest_from(node, length)
    keep = length - cut.start
    media = []
    for item in cut.media:
        kept = [span for span in item.spans if span[0] + span[1] <= keep]
        for offset, size in item.spans:
            if offset < keep < offset + size:
                span = (cut.start + offset, cut.start + offset + size)
                raise MediaSpanError(f"a cut at {length} is inside {item}, tokens [{span[0]}, {span[1]})", item=item, span=span)
        if kept:
            media.append(item if len(kept) == len(item.spans) else item.with_spans(kept, unfinished=True))
    _refuse_table(cut, "cut")
    data = cut._extent.read_bytes(cut.start, length)
    turn = plan_turn(cut.scheme, parent, data, media, cut.origin, str(cut.role))
    details = Details(cut._details.metadata, links=(Link("prefix_of", cut.id, length),))
    return Plan(parent, (Pending(turn, details, cut._extent),))


def plan_rewrite(node: Node, edits: Iterable[Edit | Sequence[Any]]) -> Plan:
    """The path that ``edits`` make of ``node``'s. Raises TypeError, OutOfRange, MediaSpanError, Unsupported."""
    changes = [change for change in _checked(node, edits) if not _changes_nothing(node, change)]
    if not changes:
        return Plan(node, ())
    changes[0] = _trimmed(node, changes[0])
    shared = changes[0].start
    prefix = plan_prefix(node, shared)
    made = list(prefix.turns)
    at: Node | Turn = made[0].turn if made else prefix.parent
    path = node.path()
    root, sources = path[0], path[prefix.parent.depth + 1 :] or (node,)
    for source in sources:
        data, media = _rewritten(source, shared, changes, takes_end=source is sources[-1])
        was_empty = source.start == source.stop
        if data or (was_empty and at.id != root.id):
            _refuse_table(source, "rewritten")
            turn = plan_turn(node.scheme, at, data, media, "input", source.role or "user")
            links = (Link("derived_from", source.id, shared),)
            made.append(Pending(turn, Details(source._details.metadata, source.finish_reason, source.tail_policy, links)))
            at = turn
    return Plan(prefix.parent, tuple(made))


def _checked(node: Node, edits: Iterable[Edit | Sequence[Any]]) -> list[_Change]:
    changes: list[_Change] = []
    end = 0
    for edit in edits:
        if not isinstance(edit, (tuple, list)):
            raise TypeError(f"an edit is an Edit or a (start, stop, token_ids, media) tuple, not {type(edit).__name__}")
        given = Edit(*edit)
        start, stop = as_index(given.start, "start"), as_index(given.stop, "stop")
        if not end <= start <= stop <= node.stop:
            raise OutOfRange(
                f"edit [{start}, {stop}) is not inside [{end}, {node.stop}): edits come in order, apart, on the path",
                value=(start, stop),
                limit=(end, node.stop),
            )
        end = stop
        data = token_bytes(given.token_ids)
        media = tuple(given.media)
        placements(media, len(data) // TOKEN_BYTES)
        changes.append(_Change(start, stop, data, media))
    return changes


def _changes_nothing(node: Node, change: _Change) -> bool:
    return (
        not change.media
        and not any(begin < change.stop and end > change.start for _, begin, end in node.media_spans(change.start, change.stop))
        and node._extent.read_bytes(change.start, change.stop) == change.data
    )


def _trimmed(node: Node, change: _Change) -> _Change:
    """The change without the tokens at its beginning that stay what they were."""
    old = token_array(node._extent.read_bytes(change.start, change.stop))
    new = token_array(change.data)
    common = min(len(old), len(new))
    differs = old[:common] != new[:common]
    same = int(np.argmax(differs)) if differs.any() else common
    same = min([same, *(placement.start for placement in placements(change.media, len(new)))])
    same = min([same, *(begin - change.start for _, begin, _ in node.media_spans(change.start, change.stop))])
    media = tuple(item.with_spans((offset - same, size) for offset, size in item.spans) for item in change.media)
    return _Change(change.start + same, change.stop, change.data[same * TOKEN_BYTES :], media)


def _rewritten(source: Node, shared: int, changes: Sequence[_Change], *, takes_end: bool) -> tuple[bytes, list[MediaItem]]:
    """Tokens and media of the turn that takes ``source``'s place, from path index ``shared`` on.

    A change belongs to the turn it starts in; one at the very end to the last turn (``takes_end``).
    """
    pieces: list[bytes] = []
    media: list[MediaItem] = []
    kept: list[tuple[int, int, int]] = []  # old start, old stop, new start
    written = 0
    at = max(source.start, shared)
    for change in changes:
        if source.start <= change.start < source.stop or (takes_end and change.start == source.stop):
            kept.append((at, change.start, written))
            pieces += (source._extent.read_bytes(at, change.start), change.data)
            written += change.start - at
            media += [item.with_spans((written + offset, size) for offset, size in item.spans) for item in change.media]
            written += len(change.data) // TOKEN_BYTES
        elif not change.start < source.start < change.stop:
            continue
        at = min(change.stop, source.stop)
    kept.append((at, source.stop, written))
    pieces.append(source._extent.read_bytes(at, source.stop))
    for item in source.media:
        media += _moved(item, source.start, shared, kept, changes)
    return b"".join(pieces), media


def _moved(
    item: MediaItem, start: int, shared: int, kept: Sequence[tuple[int, int, int]], changes: Sequence[_Change]
) -> list[MediaItem]:
    """``item`` where its tokens went: itself moved, nothing where it is wholly replaced; a cut raises MediaSpanError."""
    before, spans, gone = 0, [], 0
    for offset, size in item.spans:
        begin, end = start + offset, start + offset + size
        if end <= shared:
            before += size
            continue
        places = [new + begin - first for first, last, new in kept if first <= begin and end <= last]
        spans += [(place, size) for place in places]
        if not places:
            if not _covered(begin, end, changes):
                raise MediaSpanError(f"an edit cuts {item}, tokens [{begin}, {end})", item=item, span=(begin, end))
            gone += 1
    if spans and gone:
        raise MediaSpanError(f"an edit takes {gone} of the {gone + len(spans)} spans of {item}", item=item, span=item.spans[0])
    return [item.with_spans(spans, placeholders_before=item.placeholders_before + before)] if spans else []


def _covered(begin: int, end: int, changes: Sequence[_Change]) -> bool:
    return any(change.start <= begin and end <= change.stop for change in changes)


def _refuse_table(node: Node, what: str) -> None:
    runs = node.decoded.runs
    if not isinstance(runs, int) and any(isinstance(run, TableRun) for run in runs):
        raise Unsupported(f"{node!r} has positions that came from elsewhere; it cannot be {what} without new ones", node=node)
