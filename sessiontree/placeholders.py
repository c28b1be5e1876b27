"""Placeholders in the forms that engines take: one for each item, one for each row of encoder output, or ids that say which item.

Nodes hold the expanded form, one id per placeholder. vLLM's prompts and chat templates hold the compact one, exactly one per
item; :func:`expand` and :func:`compact` go from one to the other, by declared spans, never by looking for ids. SGLang writes over
placeholders what :func:`pad_sequence` gives, so that its prefix keys know which image stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import LimitExceeded, MediaSpanError, OutOfRange, Unsupported
from sessiontree.media import MAX_COUNT, MediaItem, Placement, placements
from sessiontree.positions import PositionScheme
from sessiontree.tokens import TokenIds, as_index, shown, token_array, token_bytes

Form = tuple[NDArray[np.int32], tuple[MediaItem, ...]]


def expand(scheme: PositionScheme, token_ids: TokenIds, media: Iterable[MediaItem], max_tokens: int = MAX_COUNT - 1) -> Form:
    """The expanded form of a compact one: (ids (T,) int32 read-only, the items in the order given, where they stand now).

    Compact is one placeholder for each item, a span of length 1, whatever its id; expanded, its id stands once for each
    placeholder that ``scheme`` gives the item. An item that has only one is the same in both forms and stays.

    Raises MediaSpanError, naming the item and its span, for what is expanded already or only a part; Unsupported for items of
    several spans and items that the scheme cannot place; PositionError for their grids; LimitExceeded for more than
    ``max_tokens``, before any is made.
    """
    ids, items, placed = _checked(token_ids, media)
    for start, stop, item in placed:
        if stop - start != 1:
            raise MediaSpanError(
                f"{item}: span [{start}, {stop}) is expanded already; in compact form an item has one placeholder",
                item=item,
                span=(start, stop),
                limit=1,
            )
    counts = [scheme.num_placeholders(item) for _, _, item in placed]
    for (_, _, item), count in zip(placed, counts, strict=True):
        if count > 1 and (scheme.num_spans(item) > 1 or (item.modality == "video" and item.audio_feature_length is not None)):
            raise Unsupported(
                f"{item}: between its placeholders other tokens stand under {scheme.name}; expand it where those are known",
                item=item,
            )
    total = len(ids) - len(counts) + sum(counts)
    most = as_index(max_tokens, "max_tokens")
    if total > most:
        raise LimitExceeded(f"{shown(total)} tokens when expanded; {shown(most)} are allowed", value=total, limit=most)
    return _resized(ids, placed, counts, items)


def compact(token_ids: TokenIds, media: Iterable[MediaItem]) -> Form:
    """The compact form of an expanded one, as :func:`expand` takes it, which gives the expanded form again.

    Items must hold as many placeholders as their scheme gives them; no scheme is here to see to it.

    Raises MediaSpanError, naming the item and its span, for parts of items and for a span that holds more than one id, which one
    placeholder cannot keep; Unsupported for items of several spans.
    """
    ids, items, placed = _checked(token_ids, media)
    for start, stop, item in placed:
        span = ids[start:stop]
        if (span != span[0]).any():
            raise MediaSpanError(
                f"{item}: span [{start}, {stop}) holds several ids, {span.min()} to {span.max()}; one placeholder cannot keep them",
                item=item,
                span=(start, stop),
            )
    return _resized(ids, placed, [1] * len(placed), items)


def _checked(token_ids: TokenIds, media: Iterable[MediaItem]) -> tuple[NDArray[np.int32], tuple[MediaItem, ...], list[Placement]]:
    """The ids, the items in the order given, and the one span of each in token order."""
    ids, items = token_array(token_bytes(token_ids)), tuple(media)
    placed = placements(items, len(ids))
    for start, stop, item in placed:
        if len(item.spans) > 1:
            raise Unsupported(f"{item} has {len(item.spans)} spans; only items of one span have a compact form", item=item)
        if item.unfinished or item.placeholders_before:
            raise MediaSpanError(
                f"{item}: span [{start}, {stop}) is a part; only whole items have a compact form", item=item, span=(start, stop)
            )
    return ids, items, placed


def _resized(ids: NDArray[np.int32], placed: Sequence[Placement], counts: Sequence[int], media: Sequence[MediaItem]) -> Form:
    """``ids`` with each span made ``counts`` long, filled with its first id."""
    pieces: list[NDArray[np.int32]] = []
    moved: dict[int, MediaItem] = {}
    at = written = 0
    for (start, stop, item), count in zip(placed, counts, strict=True):
        pieces += (ids[at:start], np.full(count, ids[start], ids.dtype))
        written += start - at
        moved[id(item)] = item.with_spans([(written, count)])
        written += count
        at = stop
    data = np.concatenate((*pieces, ids[at:])).tobytes()
    return token_array(data), tuple(moved[id(item)] for item in media)


_PAD_TAG: Final = b"sglang-mm-wide-pad-v1"
_PAD_BASE: Final = 1_000_000
_PAD_MASK: Final = (1 << 62) - 1


def pad_values(identity: bytes) -> tuple[int, int, int, int]:
    """The four ids that the media content ``identity``, 32 bytes, enters prefix keys as: 1,000,000 + 62 bits each.

    The rule of SGLang 0.5.23 (srt/managers/schedule_batch.py, ``MultimodalDataItem.set_identity``): SHA-256 of a tag and the
    identity, read as four big-endian 64-bit words. Each value alone tells contents apart, since a prefix may end after any of
    them. Raises TypeError, OutOfRange.
    """
    if not isinstance(identity, (bytes, bytearray)):
        raise TypeError(f"an identity is bytes, not {type(identity).__name__}")
    if len(identity) != 32:
        raise OutOfRange(f"an identity has 32 bytes, not {len(identity)}", value=len(identity), limit=32)
    digest = sha256(_PAD_TAG + identity).digest()
    first, second, third, fourth = (_PAD_BASE + (int.from_bytes(digest[at : at + 8]) & _PAD_MASK) for at in range(0, 32, 8))
    return first, second, third, fourth


def pad_sequence(identity: bytes, start: int, stop: int) -> NDArray[np.int64]:
    """The ids of placeholders ``[start, stop)`` of a span: (stop - start,) int64, a new array.

    SGLang 0.5.23 repeats the four values from the beginning of each span (``pad_mm_tokens``). So the id of placeholder k depends
    on the identity and k alone, and cutting a span changes none before the cut. For the rest of a block that began in an earlier
    node, count from the beginning of the block. Raises TypeError, OutOfRange.
    """
    first, last = as_index(start, "start"), as_index(stop, "stop")
    if not 0 <= first <= last <= MAX_COUNT:
        window = f"[{shown(first)}, {shown(last)})"
        raise OutOfRange(f"placeholders {window} are no window of a span", value=(first, last), limit=MAX_COUNT)
    values: NDArray[np.int64] = np.array(pad_values(identity), dtype=np.int64)[np.arange(first, last) % 4]
    return values
