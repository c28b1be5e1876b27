"""Editing history without editing: what a cut or a rewritten path is made of.

Both functions look at a node's path and plan the turns of another one. They share every token up to the first change, move media
along with their tokens, and refuse to cut a media span. Nothing is attached here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sessiontree.details import Details, Link
from sessiontree.digest import pack
from sessiontree.errors import MediaSpanError, OutOfRange, Unsupported
from sessiontree.media import MediaItem, in_token_order, placements
from sessiontree.node import Node, deepest_from, deepest_to
from sessiontree.positions import ExternalPositions
from sessiontree.positions.runs import ExternalRun, is_external, unpacked
from sessiontree.tokens import MAX_TOKEN_ID, TOKEN_BYTES, TokenIds, as_index, in_range, shown, token_array, token_bytes
from sessiontree.turns import Pending, plan_turn


class Edit(NamedTuple):
    """Replace path tokens ``[start, stop)`` by ``token_ids``. Spans of ``media`` are relative to ``token_ids``."""

    start: int
    stop: int
    token_ids: TokenIds = ()
    media: Sequence[MediaItem] = ()


class _Rewritten(NamedTuple):
    """What takes the place of a turn, and whether any token of that remains."""

    data: bytes
    media: list[MediaItem]
    remains: bool


class Plan(NamedTuple):
    """Another path: the node it leaves from, and the turns that follow."""

    parent: Node
    turns: tuple[Pending, ...]

    @property
    def stop(self) -> int:
        """Tokens on the path."""
        return self.turns[-1].turn.state.num_tokens if self.turns else self.parent.stop


class _Change(NamedTuple):
    """An edit, checked."""

    start: int
    stop: int
    data: bytes
    media: tuple[MediaItem, ...]


class Content(NamedTuple):
    """What a turn is appended with."""

    data: bytes
    media: Iterable[MediaItem]
    positions: ExternalPositions | ArrayLike | None


def without_bos(parent: Node, content: Content, bos_token_id: int) -> Content:
    """A turn that continues a history, without the BOS token it begins with, if it does: ids, spans and positions together.

    Raises OutOfRange for what is no token id, MediaSpanError where a media span covers the token.
    """
    bos = in_range(bos_token_id, MAX_TOKEN_ID, "strip_bos", "token ids")
    data, media, positions = content.data, tuple(content.media), content.positions
    if not parent.stop or data[:TOKEN_BYTES] != bos.to_bytes(TOKEN_BYTES, "little"):
        return Content(data, media, positions)
    for start, stop, item in placements(media, len(data) // TOKEN_BYTES)[:1]:
        if start == 0:
            raise MediaSpanError(f"{item}: span [{start}, {stop}) covers the BOS token to strip", item=item, span=(start, stop))
    if positions is not None:
        given = positions if isinstance(positions, ExternalPositions) else ExternalPositions(positions)
        table = given.positions
        if table.ndim == 2:  # else it is refused with the turn
            positions = ExternalPositions(table[:, 1:], given.next_position, given.max_position)
    return Content(data[TOKEN_BYTES:], items_behind(media, 1), positions)


def links_to(sources: Iterable[Node], parent: Node, stop: int) -> tuple[Link, ...]:
    """What a turn behind the first ``stop`` tokens of a path was made of, each source once: a summary, what it sums up."""
    return tuple(Link("derived_from", source.id, min(stop, parent.shared_prefix_len(source))) for source in dict.fromkeys(sources))


def plan_prefix(node: Node, length: int) -> Plan:
    """The first ``length`` tokens of a path, 0 <= length <= node.stop. Raises MediaSpanError for a cut inside a span."""
    parent = deepest_to(node, length)
    if parent.stop == length:
        return Plan(parent, ())
    cut = deepest_from(node, length)
    keep = length - cut.start
    media = []
    for item in cut.media:
        whole = cut.scheme.atomic_span(item)
        if whole is not None and whole[0] < keep < whole[1]:
            span = (cut.start + whole[0], cut.start + whole[1])
            raise MediaSpanError(f"a cut at {length} is inside {item}, tokens [{span[0]}, {span[1]})", item=item, span=span)
        kept = [span for span in item.spans if span[0] + span[1] <= keep]
        for offset, size in item.spans:
            if offset < keep < offset + size:
                span = (cut.start + offset, cut.start + offset + size)
                raise MediaSpanError(f"a cut at {length} is inside {item}, tokens [{span[0]}, {span[1]})", item=item, span=span)
        if kept:
            media.append(item if len(kept) == len(item.spans) else item.with_spans(kept, unfinished=True))
    data = cut._extent.read_bytes(cut.start, length)
    turn = plan_turn(cut.scheme, parent, data, media, cut.origin, str(cut.role), external=_table_prefix(cut, keep))
    details = Details(cut._details.metadata, links=(Link("prefix_of", cut.id, length),))
    return Plan(parent, (Pending(turn, details, cut._extent),))


def plan_rewrite(node: Node, edits: Iterable[Edit | Sequence[Any]]) -> Plan:
    """The path that ``edits`` make of ``node``'s. Raises TypeError, OutOfRange, MediaSpanError, Unsupported.

    Turns are compared with those they come from: whole turns are shared while nothing has changed, then the beginning of the
    first that has; all that follow are made anew, since their tokens stand elsewhere or attend to others.
    """
    changes = _checked(node, edits)
    if not changes:
        return Plan(node, ())
    sources = _down_to(node, deepest_from(node, changes[0].start))
    starts, stops = [change.start for change in changes], [change.stop for change in changes]
    turns = []
    for source in sources:
        of_source = slice(bisect_left(stops, source.start), bisect_right(starts, source.stop))
        turns.append(_rewritten(source, changes[of_source], takes_end=source is node))

    changed, same = _first_difference(sources, turns)
    if changed == len(sources):
        return Plan(node, ())
    source = sources[changed]
    shared = source.start + same
    made: list[Pending] = []
    replaces = False  # whether the turn made last has nothing of the one whose place it takes
    if same == len(source):
        parent = source
    elif same:
        parent, (beginning,) = plan_prefix(source, shared)
        made.append(beginning)
    else:
        parent = source.parent or source
    data, media, remains = turns[changed]
    turns[changed] = _Rewritten(data[same * TOKEN_BYTES :], items_behind(media, same), remains)

    for source, (data, media, remains) in zip(sources[changed:], turns[changed:], strict=True):
        at = made[-1].turn if made else parent
        under_root = not made and parent.parent is None
        if not data and (source.start < source.stop or source is sources[changed] or under_root):
            # Emptied by the edits; or an empty turn, which says nothing under the root. Where one edit put something else in the
            # place of whole turns, this one among them, that stands for all of them.
            taken = (change.data and change.start < source.start and source.stop <= change.stop for change in changes)
            if made and replaces and any(taken):
                made[-1] = _standing_for(made[-1], source)
            continue
        turn = plan_turn(node.scheme, at, data, media, "input", source.role or "user", _key_of(source, data, media))
        if not made and (stood := _next_on_path(node, parent)) is not None and stood.id == turn.id:
            parent, shared = stood, stood.stop  # what the edit made is what stood there
            continue
        if source is not sources[changed] or same < len(source):
            _refuse_table(source)
        links = (Link("derived_from", source.id, shared),)
        made.append(Pending(turn, Details(source._details.metadata, source.finish_reason, source.tail_policy, links)))
        replaces = not remains
    left = (made[-1].turn if made else parent).state.open_block
    if left is not None and node.state.open_block is None:
        _, identity, *_ = left.content
        raise MediaSpanError(
            f"the edits leave {left.placeholders} placeholders of an item, {identity[:4].hex()}, that nothing completes",
            item=identity,
            span=None,
        )
    return Plan(parent, tuple(made))


def _standing_for(pending: Pending, source: Node) -> Pending:
    """A turn in the place of several, of which ``source`` is the last: it is none of those that made or answered tool calls."""
    metadata, links = pending.details.metadata, pending.details.links
    metadata = metadata.discard("tool_calls").discard("tool_call_id")
    return pending._replace(details=pending.details._replace(metadata=metadata, links=(links[0]._replace(node_id=source.id),)))


def plan_linear(nodes: Sequence[Node]) -> Plan:
    """One path through sibling turns in the order given: the first as it is, the others made anew behind it.

    Raises OutOfRange for no nodes, Unsupported for nodes that are no siblings or whose positions came from elsewhere.
    """
    if not nodes:
        raise OutOfRange("a path through no turns", value=0, limit=1)
    first = nodes[0]
    made: list[Pending] = []
    seen = {first.id}
    for node in nodes[1:]:
        if node.parent is None or node.parent != first.parent or node.id in seen:
            raise Unsupported(f"{node!r} is no sibling of {first!r}, or stands there twice", node=node)
        seen.add(node.id)
        _refuse_table(node)
        data = node._extent.read_bytes(node.start, node.stop)
        at = made[-1].turn if made else first
        turn = plan_turn(node.scheme, at, data, node.media, "input", node.role or "user", _key_of(node, data, node.media))
        links = (Link("derived_from", node.id, node.start),)
        made.append(Pending(turn, Details(node._details.metadata, node.finish_reason, node.tail_policy, links)))
    return Plan(first, tuple(made))


def _down_to(node: Node, first: Node) -> list[Node]:
    """The nodes of a path from ``first`` to ``node``."""
    found = [node]
    while found[-1] is not first and found[-1].parent is not None:
        found.append(found[-1].parent)
    found.reverse()
    return found


def _key_of(source: Node, data: bytes, media: Sequence[MediaItem]) -> str | None:
    """The key of a rewritten turn: equal samples stay apart, as their sources do, and the same edit gives the same node."""
    if source.key is None:
        return None
    content = pack([item.fields() for item in in_token_order(media)]) + data
    return f"rewritten/{sha256(source.id + content).hexdigest()}"


def _next_on_path(node: Node, parent: Node) -> Node | None:
    return node.ancestor(parent.depth + 1) if parent.depth < node.depth else None


def _first_difference(sources: Sequence[Node], turns: Sequence[_Rewritten]) -> tuple[int, int]:
    """Which source is the first that does not stay as it is, and how many tokens at its beginning do."""
    for number, (source, (data, media, _)) in enumerate(zip(sources, turns, strict=True)):
        same = _same_tokens(source, data, media)
        if same < len(source) or same < len(data) // TOKEN_BYTES:
            return number, same
    return len(sources), 0


def _same_tokens(source: Node, data: bytes, media: Sequence[MediaItem]) -> int:
    """How many tokens at the beginning of a turn stay what they were, no item cut."""
    old, new = token_array(source._extent.read_bytes(source.start, source.stop)), token_array(data)
    common = min(len(old), len(new))
    differs = old[:common] != new[:common]
    same = int(np.argmax(differs)) if differs.any() else common
    for item in set(source.media) ^ set(media):
        same = min(same, _ranges(source, item)[0][0])
    for start, stop in (each for item in source.media for each in _ranges(source, item)):
        if start < same < stop:
            same = start
    return same


def _ranges(source: Node, item: MediaItem) -> list[tuple[int, int]]:
    """Tokens ``[start, stop)`` of a turn that no cut may part."""
    whole = source.scheme.atomic_span(item)
    if whole is not None:
        return [(max(whole[0], 0), whole[1])]
    return [(offset, offset + size) for offset, size in item.spans]


def items_behind(media: Iterable[MediaItem], length: int) -> list[MediaItem]:
    """What is left of ``media`` behind the first ``length`` tokens of their turn."""
    left = []
    for item in media:
        spans = [(max(offset, length), offset + size) for offset, size in item.spans if offset + size > length]
        if spans:
            behind = sum(stop - start for start, stop in spans)
            before = item.placeholders_before + item.num_placeholders - behind
            moved = [(start - length, stop - start) for start, stop in spans]
            left.append(item.with_spans(moved, placeholders_before=before))
    return left


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
                f"edit [{shown(start)}, {shown(stop)}) is not inside [{end}, {node.stop}): edits come in order, apart, on the path",
                value=(start, stop),
                limit=(end, node.stop),
            )
        end = stop
        data = token_bytes(given.token_ids)
        media = tuple(given.media)
        placements(media, len(data) // TOKEN_BYTES)
        if start < stop or data:
            changes.append(_Change(start, stop, data, media))
    return changes


def _rewritten(source: Node, changes: Sequence[_Change], *, takes_end: bool) -> _Rewritten:
    """Tokens and media of the turn that takes ``source``'s place.

    A change belongs to the turn it starts in; one at the very end to the last turn (``takes_end``).
    """
    pieces: list[bytes] = []
    media: list[MediaItem] = []
    kept: list[tuple[int, int, int]] = []  # old start, old stop, new start
    written = 0
    at = source.start
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
        media += _moved(item, source.start, kept, changes)
    remains = source.start == source.stop or any(first < last for first, last, _ in kept)
    return _Rewritten(b"".join(pieces), media, remains)


def _moved(item: MediaItem, start: int, kept: Sequence[tuple[int, int, int]], changes: Sequence[_Change]) -> list[MediaItem]:
    """``item`` where its tokens went: itself moved, nothing where it is wholly replaced; a cut raises MediaSpanError."""
    spans, gone = [], 0
    for offset, size in item.spans:
        begin, end = start + offset, start + offset + size
        places = [new + begin - first for first, last, new in kept if first <= begin and end <= last]
        if not places and not any(change.start <= begin and end <= change.stop for change in changes):
            raise MediaSpanError(f"an edit cuts {item}, tokens [{begin}, {end})", item=item, span=(begin, end))
        spans += [(place, size) for place in places]
        gone += not places
    if spans and gone:
        raise MediaSpanError(f"an edit takes {gone} of the {gone + len(spans)} spans of {item}", item=item, span=item.spans[0])
    return [item.with_spans(spans)] if spans else []


def has_table(node: Node) -> bool:
    """Whether the positions of a turn came from elsewhere."""
    return is_external(node.runs)


def _refuse_table(node: Node) -> None:
    if has_table(node):
        raise Unsupported(f"{node!r} has positions that came from elsewhere; it cannot be moved without new ones", node=node)


def _table_prefix(node: Node, length: int) -> ExternalPositions | None:
    """The first columns of a turn's table, where what comes after them follows from them."""
    run = unpacked(node.runs, len(node))[0] if has_table(node) else None
    if not isinstance(run, ExternalRun):
        return None
    assert node.parent is not None
    table = run.table(node.scheme.num_axes)
    greatest = table.max()
    state, before = node.state, node.parent.state
    if (state.next_position, state.max_position) != (greatest + 1, max(before.max_position, greatest)):
        raise Unsupported(f"{node!r} came with a next position of its own; where a part of it continues is not known", node=node)
    return ExternalPositions(table[:, :length])
