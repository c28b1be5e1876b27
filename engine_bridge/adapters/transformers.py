"""Inputs of a Hugging Face transformers model, version 5.24, for one request or a batch of them.

transformers finds media by scanning ids, keeps ``rope_deltas`` on the model, and computes positions that miss a cached prefix. So
positions are always given, placeholders get the ids the model looks for, and an id that only looks like one is refused. Padding
moves nothing: a real column has its node's positions, a padded one ``PAD_POSITION``. Packed rows are kept apart by the model's own
mask, which transformers builds from a text row that begins again at 0, and only where there is neither a cache nor a mask.

Nothing here imports transformers: what is made are tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.policies import Prompt, prompt_of
from sessiontree import Draft, MediaItem, Node, OutOfRange, Unsupported
from sessiontree.details import TailPolicy
from sessiontree.frozen import checked_text
from sessiontree.positions import Mode, PositionScheme
from sessiontree.tokens import MAX_TOKEN_ID, in_range, window

Padding = Literal["left", "right", "packed"]

#: Where padded columns stand, on every axis. The mask hides them, so it reaches no logit of a real token.
PAD_POSITION: Final = 0


@attrs.frozen
class _Family:
    """What the models of a family take beside ids and positions.

    ``types``: whether they take ``mm_token_type_ids``. ``routed``: the delimiters that ``moe_mm_token_type_ids`` count as media,
    with their type. ``frames``: what the frames of a video are to the model, "video", or "image", or None where it takes none.
    ``packed``, ``padded``: why batches of these kinds cannot be had, None where they can.
    """

    types: bool = True
    routed: Mapping[str, int] = attrs.field(factory=dict)
    frames: Literal["video", "image"] | None = "video"
    packed: str | None = None
    padded: str | None = None


_TOKEN_TYPES: Final = {"image": 1, "video": 2}
_DELIMITERS: Final = {f"{kind}_{side}_token_id": number for kind, number in _TOKEN_TYPES.items() for side in ("start", "end")}
# Read from the models of transformers 5.24, and each run.
_FAMILIES: Final = {
    "text": _Family(types=False),
    "qwen2_vl": _Family(),
    "qwen2_5_vl": _Family(),
    "qwen3_vl": _Family(),
    "glm4v": _Family(frames="image"),
    "ernie4_5_vl": _Family(routed=_DELIMITERS),
    "paddleocr_vl": _Family(frames=None),
    "hy_v4_vl": _Family(),
    "hunyuan_vl": _Family(packed="its model takes the text row for one axis too many"),
    "minicpmv4_7": _Family(
        packed="its linear attention runs through from one sequence to the next",
        padded="its linear attention takes padded columns for tokens",
    ),
    "qwen2_5_omni": _Family(types=False),
    "qwen3_omni": _Family(types=False),
}
_REFUSED: Final[Mapping[str, str]] = {
    "glm_image": "the model overwrites the ids of the images it is given and reads those of the images it made, and a session does "
    "not say which are which",
}


class BatchRow(NamedTuple):
    """One request of a batch, and where its tokens are.

    ``row``, ``start``, ``stop``: its logits are ``logits[row, start:stop]``, half-open; the last of them predicts its next token.
    ``window``: the path tokens they are of, half-open. ``items``: the media whose pixels the forward takes, each once for every
    time it stands in the window, in path order. ``dropped``: path indices of the sampled tokens that ``tail_policy`` left out of
    it; ``window`` counts those that are kept.
    """

    row: int
    start: int
    stop: int
    window: tuple[int, int]
    items: tuple[MediaItem, ...]
    dropped: tuple[int, ...]


class TransformersInputs(dict[str, Any]):
    """Keyword arguments of a model's forward: ``model(**inputs)``; and, as ``rows``, which request is where.

    Pixels are to be concatenated in the order of ``rows`` and of their ``items``.
    """

    rows: tuple[BatchRow, ...]

    def __init__(self, given: Mapping[str, Any], rows: Sequence[BatchRow]) -> None:
        super().__init__(given)
        self.rows = tuple(rows)


def to_transformers(
    nodes: Node | Draft | Sequence[Node | Draft],
    prefix_len: int | Sequence[int] = 0,
    device: torch.device | str = "cpu",
    mode: Mode = "as_decoded",
    *,
    stop: int | Sequence[int | None] | None = None,
    padding: Padding = "left",
    pad_token_id: int = 0,
    cache_mask: torch.Tensor | None = None,
    tail_policy: TailPolicy | None = None,
    paired_calls: bool = False,
) -> TransformersInputs:
    """Keyword arguments of a model's forward for a window ``[prefix_len, stop)`` of each path: B requests, at most T tokens each.

    ``nodes``: a node or draft, or a list or tuple of them. ``prefix_len``: how many tokens of a path the cache holds already, one
    for all or one for each; ``stop``: where its window ends, for chunked prefill, None for the end. ``tail_policy`` and
    ``paired_calls`` as in :func:`prompt_of`; where tokens are left out, ``prefix_len`` and ``stop`` count those that are kept.

    ``padding`` "left" or "right": ``input_ids`` (B, T) int64, placeholders written as the model's own ids, padded with
    ``pad_token_id``; ``position_ids`` (num_axes, B, T), or (B, T) where all schemes are text, int64, float32 where positions can be
    fractional; ``attention_mask`` (B, cached + T) int64, 1 for what is there, 0 for padding. A cache has one length for all its
    rows: equal prefixes fill it; unequal ones stand in it between padding, and ``cache_mask`` (B, cached), integers or bools, says
    where. That is the ``attention_mask`` of the call that filled the cache. Models whose attention counts columns, over a sliding
    window or linear, take the padding between tokens for tokens: they need windows of one length.

    ``padding`` "packed": one row of all T tokens, without padding and without a cache: ``input_ids`` (1, T); ``position_ids``
    (1 + num_axes, 1, T), first a text row that begins at 0 in each sequence, or (1, T) for text schemes; ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` (B + 1) int32, ``max_length_q`` and ``max_length_k`` int, for attention that takes them; and ``use_cache``
    False. No mask: transformers keeps the sequences apart by the text row, and only where it is given neither mask nor cache.

    Families with media, but the omni ones, also get ``mm_token_type_ids``: 0 text, 1 image, 2 video; and ernie4_5_vl
    ``moe_mm_token_type_ids``, which count the tokens around an item as its own. Both are shaped as ``input_ids``. Pixels, in the
    order of ``rows``, and the cache are the caller's to add. Requests of text schemes may stand in a batch with those of one other
    scheme, whose axes are alike for text.

    Raises Unsupported where a window begins or ends inside an item, whose pixels transformers takes whole; where an id outside
    every span is a placeholder id; where the scheme was not given an id that is needed; for unequal prefixes without a
    ``cache_mask``, and for packed ones; for two models' schemes in one batch; for a family, a batch of it, or audio in video that
    cannot be had, with the reason. MediaSpanError where a path ends inside an item. OutOfRange for a window, and for a
    ``cache_mask`` that does not hold the prefixes. PositionError for the mode.
    """
    holders = _holders(nodes)
    count = len(holders)
    model = _Model.of(holders)
    if checked_text(padding, "padding") not in get_args(Padding):
        raise Unsupported(f"no padding {padding!r}; {', '.join(get_args(Padding))}")
    pad_token_id = in_range(pad_token_id, MAX_TOKEN_ID, "pad_token_id", "a batch")
    starts, stops = _one_each(prefix_len, count, "prefix_len"), _one_each(stop, count, "stop")
    windows = [
        _Window.of(prompt_of(holder, start, tail_policy=tail_policy, paired_calls=paired_calls), model, end, mode)
        for holder, start, end in zip(holders, starts, stops, strict=True)
    ]
    if padding == "packed":
        if cache_mask is not None:
            raise Unsupported("packed rows have no cache, and cache_mask was given")
        return _packed(windows, model, device)
    cached = _cached(windows, cache_mask)
    return _padded(windows, model, cached, pad_token_id, padding == "left", device)


def _holders(nodes: Any) -> Sequence[Any]:
    holders: Sequence[Any] = nodes if isinstance(nodes, (list, tuple)) else (nodes,)
    for holder in holders:
        if not isinstance(holder, (Node, Draft)):
            raise TypeError(f"inputs are made of Nodes and Drafts, not {type(holder).__name__}")
    if not holders:
        raise OutOfRange("inputs of no request", value=0, limit=1)
    return holders


def _one_each(given: Any, count: int, what: str) -> Sequence[Any]:
    """``given`` for each of ``count`` requests."""
    if not isinstance(given, (list, tuple)):
        return (given,) * count
    if len(given) != count:
        raise OutOfRange(f"{len(given)} of {what} for {count} requests", value=len(given), limit=count)
    return given


@attrs.frozen(eq=False)
class _Model:
    """The model that a batch is for, as its scheme says.

    ``placeholders``: the ids that it takes for media, by modality. ``routed``: type by id, of the tokens that it routes with media.
    """

    scheme: PositionScheme
    family: _Family
    placeholders: Mapping[str, int]
    routed: Mapping[int, int]

    @classmethod
    def of(cls, holders: Sequence[Node | Draft]) -> _Model:
        """That of the requests that are not of text schemes, a text model without one."""
        scheme = holders[0].scheme
        for holder in holders[1:]:
            other = holder.scheme
            if scheme.family == "text":
                scheme = other
            elif other.family != "text" and other != scheme:
                raise Unsupported(f"{scheme.name} and {other.name}, or their parameters, in one batch; a batch is for one model")
        if scheme.family in _REFUSED:
            raise Unsupported(f"{scheme.name}: {_REFUSED[scheme.family]}", scheme=scheme.name)
        family, params = _FAMILIES[scheme.family], scheme.params
        ids = {kind: params.get(f"{kind}_token_id") for kind in ("image", "video", "audio")}
        routed: dict[int, int] = {}
        for name, number in family.routed.items():
            delimiter = params.get(name)
            if delimiter is None:
                raise Unsupported(
                    f"{scheme.name} was not given {name}, whose tokens its models route with the media", scheme=scheme.name
                )
            routed[delimiter] = number
        return cls(scheme, family, {kind: each for kind, each in ids.items() if each is not None}, routed)

    @property
    def dtype(self) -> type[np.int64 | np.float32]:
        """Of positions, as engines take them."""
        return np.int64 if self.scheme.dtype.kind == "i" else np.float32

    def placeholder(self, item: MediaItem) -> int:
        """The id of an item's tokens. Raises Unsupported."""
        if item.modality == "video" and item.audio_feature_length is not None:
            raise Unsupported(f"{item}: which of its tokens are video and which audio is not told here", item=item)
        kind = self.family.frames if item.modality == "video" else item.modality
        if kind is None:
            raise Unsupported(f"{item}: the models of {self.scheme.name} take no video", item=item)
        if kind not in self.placeholders:
            raise Unsupported(f"{self.scheme.name} was not given {kind}_token_id, which transformers scans for", item=item)
        return self.placeholders[kind]

    def refuse_strays(self, ids: NDArray[np.int64], text: NDArray[np.bool_], start: int) -> None:
        """Raises Unsupported where ``text``, tokens from path index ``start`` on that are in no span, holds a placeholder id."""
        for kind, placeholder in self.placeholders.items():
            stray = np.flatnonzero((ids == placeholder) & text)
            if stray.size:
                at = start + int(stray[0])
                raise Unsupported(
                    f"token {at} is {kind}_token_id {placeholder} outside every span; transformers would look for its features",
                    index=at,
                )

    def routes(self, ids: NDArray[np.int64], types: NDArray[np.int64]) -> NDArray[np.int64]:
        """``moe_mm_token_type_ids`` of a model that takes them."""
        routes = types.copy()
        for delimiter, number in self.routed.items():
            routes[ids == delimiter] = number
        return routes

    def typed(self, types: NDArray[np.int64], routes: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Those of the two kinds of types that the model takes."""
        given = {"mm_token_type_ids": types} if self.family.types else {}
        return {**given, "moe_mm_token_type_ids": routes} if self.routed else given


@attrs.frozen(eq=False)
class _Window:
    """Tokens ``[start, stop)`` of one request, as the model is to see them.

    ``input_ids``, ``types``, ``routes``: (T,) int64, the last two as ``mm_token_type_ids`` and ``moe_mm_token_type_ids``.
    ``positions``: (num_axes, T) int64, float32 where the scheme's are floats.
    """

    start: int
    stop: int
    dropped: tuple[int, ...]
    input_ids: NDArray[np.int64]
    positions: NDArray[Any]
    types: NDArray[np.int64]
    routes: NDArray[np.int64]
    items: tuple[MediaItem, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def row(self, row: int, start: int) -> BatchRow:
        return BatchRow(row, start, start + len(self), (self.start, self.stop), self.items, self.dropped)

    @classmethod
    def of(cls, prompt: Prompt, model: _Model, stop: Any, mode: Mode) -> _Window:
        start, stop = window(prompt.prefix_len, stop, prompt.prefix_len + len(prompt.input_ids), "prefix_len")
        count = stop - start
        ids, types, text = prompt.input_ids[:count].astype(np.int64), np.zeros(count, np.int64), np.ones(count, np.bool_)
        items = []
        for item, spans in prompt.media:
            if spans[0][0] >= count:
                break
            if spans[-1][1] > count:
                raise Unsupported(
                    f"the window [{start}, {stop}) of {prompt.source!r} ends inside {item}; transformers takes an item whole",
                    item=item,
                    node=prompt.source,
                    prefix_len=start,
                )
            items.append(item)
            placeholder = model.placeholder(item)
            for begin, end in spans:
                ids[begin:end], types[begin:end], text[begin:end] = placeholder, _TOKEN_TYPES.get(item.modality, 0), False
        model.refuse_strays(ids, text, start)
        positions = np.broadcast_to(prompt.positions(mode)[:, :count], (model.scheme.num_axes, count)).astype(model.dtype)
        return cls(
            start,
            stop,
            prompt.dropped,
            ids,
            positions,
            types,
            model.routes(ids, types),
            tuple(items),
        )


def _cached(windows: Sequence[_Window], cache_mask: Any) -> NDArray[np.int64]:
    """Which columns of the cache are real: (B, cached) int64."""
    prefixes = [each.start for each in windows]
    if cache_mask is None:
        if min(prefixes) != max(prefixes):
            raise Unsupported(
                f"cached prefixes of {min(prefixes)} to {max(prefixes)} tokens: a cache of transformers has one length for all its "
                "rows; cache_mask has to say which columns of it are real",
                prefix_len=max(prefixes),
            )
        return np.ones((len(windows), prefixes[0]), np.int64)
    if not isinstance(cache_mask, torch.Tensor):
        raise TypeError(f"cache_mask is a tensor of integers or bools, not {type(cache_mask).__name__}")
    numbers = cache_mask.is_floating_point() or cache_mask.is_complex()  # zeros of an additive mask mean the reverse
    if numbers or cache_mask.layout != torch.strided:
        raise TypeError(f"cache_mask is a dense tensor of integers or bools, not {cache_mask.dtype}, {cache_mask.layout}")
    if cache_mask.ndim != 2 or cache_mask.shape[0] != len(windows):
        raise OutOfRange(
            f"cache_mask of shape {tuple(cache_mask.shape)} for {len(windows)} requests; (requests, cached columns)",
            value=tuple(cache_mask.shape),
            limit=len(windows),
        )
    mask: NDArray[np.int64] = (cache_mask != 0).cpu().numpy().astype(np.int64)
    for row, (found, prefix) in enumerate(zip(mask.sum(axis=1).tolist(), prefixes, strict=True)):
        if found != prefix:
            raise OutOfRange(f"row {row} of cache_mask has {found} tokens; its prefix has {prefix}", value=found, limit=prefix)
    return mask


def _padded(
    windows: Sequence[_Window],
    model: _Model,
    cached: NDArray[np.int64],
    pad_token_id: int,
    left: bool,
    device: torch.device | str,
) -> TransformersInputs:
    count, width = len(windows), max(map(len, windows))
    padded = any(len(each) < width for each in windows)
    scheme, reason = model.scheme, model.family.padded
    if reason and (padded or not cached.all()):
        raise Unsupported(f"{scheme.name} cannot be padded: {reason}", scheme=scheme.name)
    if padded and pad_token_id in model.placeholders.values():
        raise Unsupported(
            f"pad_token_id {pad_token_id} is a placeholder id of {scheme.name}; transformers would look for its features"
        )
    shape = count, width
    ids = np.full(shape, pad_token_id, np.int64)
    positions = np.full((scheme.num_axes, *shape), PAD_POSITION, model.dtype)
    here, types, routes = (np.zeros(shape, np.int64) for _ in range(3))
    rows = []
    for row, each in enumerate(windows):
        start = width - len(each) if left else 0
        real = slice(start, start + len(each))
        ids[row, real], types[row, real], routes[row, real], here[row, real] = each.input_ids, each.types, each.routes, 1
        positions[:, row, real] = each.positions
        rows.append(each.row(row, start))
    given = {
        "input_ids": ids,
        "position_ids": positions[0] if scheme.num_axes == 1 else positions,
        "attention_mask": np.concatenate([cached, here], axis=1),
        **model.typed(types, routes),
    }
    return TransformersInputs({name: torch.from_numpy(array).to(device) for name, array in given.items()}, rows)


def _packed(windows: Sequence[_Window], model: _Model, device: torch.device | str) -> TransformersInputs:
    scheme = model.scheme
    if reason := model.family.packed:
        raise Unsupported(f"{scheme.name} cannot be packed: {reason}", scheme=scheme.name)
    if cached := max(each.start for each in windows):
        raise Unsupported(
            f"packed rows behind cached prefixes of up to {cached} tokens: transformers keeps packed sequences apart only where "
            "there is no cache",
            prefix_len=cached,
        )
    ids, types, routes = (
        np.concatenate([getattr(each, name) for each in windows])[None] for name in ("input_ids", "types", "routes")
    )
    positions = np.concatenate([each.positions for each in windows], axis=1)[:, None]
    text_row = np.concatenate([np.arange(len(each)) for each in windows])[None].astype(model.dtype)
    if scheme.num_axes == 1:  # there is no other row that could say where a sequence begins
        if (positions[0] != text_row).any():
            raise Unsupported(f"{scheme.name}: positions that do not count from 0 tell packed sequences apart no more")
        positions = text_row
    else:
        positions = np.concatenate([text_row[None], positions])
    bounds = np.cumsum([0, *map(len, windows)])
    longest = max(map(len, windows))
    given: dict[str, Any] = {
        name: torch.from_numpy(array).to(device)
        for name, array in {
            "input_ids": ids,
            "position_ids": positions,
            **model.typed(types, routes),
            "cu_seq_lens_q": bounds.astype(np.int32),
            "cu_seq_lens_k": bounds.astype(np.int32),
        }.items()
    }
    given.update(max_length_q=longest, max_length_k=longest, use_cache=False)
    return TransformersInputs(given, [each.row(0, int(start)) for each, start in zip(windows, bounds, strict=False)])
