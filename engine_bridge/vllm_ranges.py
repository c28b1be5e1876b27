"""Where vLLM 0.33.0 counts an item's placeholder, and which ids it writes there.

Most items are their placeholders. A video of Qwen3-VL is for vLLM everything from its first frame's timestamp to its last frame's
end marker, one of GLM-4V everything from begin_of_video to end_of_video, and of these only the frames take embeddings. Such a
range is found from the spans of the frames and the delimiters right around them, and refused where they are not what vLLM writes
itself (``get_video_repl`` of ``models/qwen3_vl.py``, ``_construct_video_placeholder`` of ``models/glm4_1v.py``): its positions and
its block hashes go by the range. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_bridge.policies import PlacedItem
from sessiontree import MediaItem, Unsupported
from sessiontree.positions import PositionScheme

Span = tuple[int, int]

_QWEN: Final = {"image": "image_token_id", "video": "video_token_id"}
_ONE_ID: Final = {"image": "image_token_id", "video": "image_token_id"}
_OMNI: Final = {**_QWEN, "audio": "audio_token_id"}
#: By family and modality, the scheme's parameter that names the id vLLM writes at every placeholder.
PLACEHOLDER_IDS: Final[Mapping[str, Mapping[str, str]]] = {
    "text": {},
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "paddleocr_vl": {"image": "image_token_id"},
    "ernie4_5_vl": _ONE_ID,
    "glm4v": _ONE_ID,
    "qwen2_5_omni": _OMNI,
    "qwen3_omni": _OMNI,
}


class VLLMRange(NamedTuple):
    """Tokens ``[start, stop)`` are an item's placeholder.

    ``embeds``: the half-open runs of them that take a row of encoder output each. ``texts``: for an item of frames, the tokens of
    each frame's timestamp; empty otherwise. All in the coordinates of the ids.
    """

    item: MediaItem
    start: int
    stop: int
    embeds: tuple[Span, ...]
    texts: tuple[Span, ...]


def vllm_ranges(scheme: PositionScheme, input_ids: NDArray[np.int32], media: Sequence[PlacedItem]) -> tuple[VLLMRange, ...]:
    """The range of each item in ``media``, in order: sorted and without overlap.

    Raises Unsupported, naming the item, for families and modalities that vLLM has no range for, for audio in video, and for frames
    that stand otherwise than vLLM writes them.
    """
    ranges: list[VLLMRange] = []
    for number, placed in enumerate(media):
        item = placed.item
        placeholder_name(scheme, item)
        if item.modality == "video" and item.audio_feature_length is not None:
            raise Unsupported(
                f"{item}: for vLLM audio in video is a video and an audio over the same tokens; one item has one identity",
                item=item,
            )
        if item.modality == "image" and item.grid_thw is not None and item.grid_thw[0] != 1:
            raise Unsupported(f"{item}: its grid {item.grid_thw} has {item.grid_thw[0]} frames; vLLM's images have one", item=item)
        before = ranges[-1].stop if ranges else 0
        after = media[number + 1].spans[0][0] if number + 1 < len(media) else len(input_ids)
        if item.modality == "video" and scheme.family == "qwen3_vl":
            ranges.append(_qwen3_video(scheme, input_ids, placed, before))
        elif item.modality == "video" and scheme.family == "glm4v":
            ranges.append(_glm_video(scheme, input_ids, placed, before, after))
        else:
            ((start, stop),) = placed.spans
            ranges.append(VLLMRange(item, start, stop, placed.spans, ()))
    return tuple(ranges)


def placeholder_name(scheme: PositionScheme, item: MediaItem) -> str:
    """The scheme's parameter that names the id vLLM writes at the placeholders of ``item``. Raises Unsupported."""
    names = PLACEHOLDER_IDS.get(scheme.family)
    if names is None:
        known = ", ".join(PLACEHOLDER_IDS)
        raise Unsupported(f"{item}: how vLLM writes media of {scheme.name} is not known here, only of {known}", item=item)
    if item.modality not in names:
        raise Unsupported(f"{item}: vLLM's {scheme.family} has no {item.modality}", item=item)
    return names[item.modality]


def token_id(scheme: PositionScheme, name: str, item: MediaItem) -> int:
    """A parameter of the scheme that is a token id. Raises Unsupported where it was not given."""
    value = scheme.params.get(name)
    if value is None:
        raise Unsupported(f"{item}: {scheme.name} was made without {name}, which vLLM writes there", item=item, parameter=name)
    return int(value)


def _qwen3_video(scheme: PositionScheme, ids: NDArray[np.int32], placed: PlacedItem, before: int) -> VLLMRange:
    """Timestamp, vision_start, placeholders, vision_end for each frame, behind a vision_start of the whole video."""
    item = placed.item
    start, end = (token_id(scheme, name, item) for name in ("vision_start_token_id", "vision_end_token_id"))
    _check_frames(scheme, ids, placed, start, end)
    first = placed.spans[0][0] - 1
    opened = np.flatnonzero(ids[before:first] == start)
    if not len(opened):
        raise Unsupported(
            f"{item}: no vision_start {start} stands before its first timestamp, in tokens [{before}, {first}); where vLLM's "
            "placeholder begins cannot be told",
            item=item,
        )
    begin = before + int(opened[-1]) + 1
    texts = ((begin, first), *((left + 1, right - 1) for (_, left), (right, _) in pairwise(placed.spans)))
    _check_texts(item, ids, texts, (start, end))
    return VLLMRange(item, begin, placed.spans[-1][1] + 1, placed.spans, texts)


def _glm_video(scheme: PositionScheme, ids: NDArray[np.int32], placed: PlacedItem, before: int, after: int) -> VLLMRange:
    """begin_of_video; begin_of_image, placeholders, end_of_image, timestamp for each frame; end_of_video."""
    item = placed.item
    names = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
    start, end, opening, closing = (token_id(scheme, name, item) for name in names)
    _check_frames(scheme, ids, placed, start, end)
    begin, last = placed.spans[0][0] - 2, placed.spans[-1][1] + 1
    if begin < before or ids[begin] != opening:
        raise Unsupported(f"{item}: no begin_of_video {opening} stands before its first frame, at token {begin}", item=item)
    closed = np.flatnonzero(ids[last:after] == closing)
    if not len(closed):
        raise Unsupported(f"{item}: no end_of_video {closing} stands behind its last frame, in tokens [{last}, {after})", item=item)
    stop = last + int(closed[0])
    texts = (*((left + 1, right - 1) for (_, left), (right, _) in pairwise(placed.spans)), (last, stop))
    _check_texts(item, ids, texts, (start, end, opening, closing))
    return VLLMRange(item, begin, stop + 1, placed.spans, texts)


def _check_frames(scheme: PositionScheme, ids: NDArray[np.int32], placed: PlacedItem, start: int, end: int) -> None:
    """Whether every frame has a run of its own between ``start`` and ``end``."""
    item = placed.item
    frames, size = scheme.num_spans(item), scheme.num_placeholders(item) // scheme.num_spans(item)
    for first, stop in placed.spans:
        if stop - first != size or not 0 < first <= stop < len(ids) or ids[first - 1] != start or ids[stop] != end:
            raise Unsupported(
                f"{item}: tokens [{first}, {stop}) are no frame of {size} placeholders between {start} and {end}, as vLLM writes "
                f"each of its {frames}",
                item=item,
            )


def _check_texts(item: MediaItem, ids: NDArray[np.int32], texts: Sequence[Span], markers: Sequence[int]) -> None:
    for first, stop in texts:
        if np.isin(ids[first:stop], markers).any():
            raise Unsupported(
                f"{item}: the timestamp in tokens [{first}, {stop}) holds a marker; vLLM writes text there", item=item
            )
