"""What vLLM 0.33.0 takes for one request: its engine input, and the public prompt with one placeholder for each item.

:func:`to_vllm` makes the expanded form, the door for an outside layer: ids, ranges and hashes are ours, nothing is tokenized or
looked for. :func:`to_vllm_prompt` collapses that to a ``TokensPrompt``, which vLLM expands again; where its expansion would not
give back exactly the same ids, the item is refused by name. vLLM computes positions itself, always as replayed, so no table of a
turn's own can be handed over. Both are made by vLLM's own functions, which are imported when they are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
import torch

from engine_bridge.engines import importing
from engine_bridge.policies import Prompt, committed, prompt_of
from engine_bridge.request import held_features
from engine_bridge.vllm_ranges import VLLMRange, placeholder_name, token_id, vllm_ranges
from sessiontree import Draft, Features, MediaItem, Node, OutOfRange, Unsupported
from sessiontree.details import TailPolicy
from sessiontree.media import Modality
from sessiontree.positions.runs import is_external
from sessiontree.tokens import MAX_TOKEN_ID, in_range, token_array, token_bytes

EngineInput = dict[str, Any]  # vLLM's TypedDicts: TokensInput and MultiModalInput
TokensPrompt = dict[str, Any]
TimestampIds = Callable[[MediaItem], Sequence[Sequence[int]]]

_SET: Final = "set"
_INHERITED: Final = "inherited"
#: Every field of vLLM's types, and what becomes of it: "set" here, "inherited" (vLLM's own value is right), or why it is refused.
FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "MultiModalInput": {
        "type": _SET,
        "prompt_token_ids": _SET,
        "mm_kwargs": _SET,
        "mm_hashes": _SET,
        "mm_placeholders": _SET,
        "cache_salt": _SET,
        "arrival_time": _INHERITED,
        "prompt": "refused: ids are the only source, text of them would be a second one",
    },
    "TokensInput": {
        "type": _SET,
        "prompt_token_ids": _SET,
        "cache_salt": _SET,
        "arrival_time": _INHERITED,
        "prompt": "refused: ids are the only source, text of them would be a second one",
        "prompt_token_offsets": "refused: they point into a text, and there is none",
    },
    "TokensPrompt": {
        "prompt_token_ids": _SET,
        "multi_modal_data": _SET,
        "multi_modal_uuids": _SET,
        "cache_salt": _SET,
        "media_io_kwargs": "refused: it takes part in hashes of media that have no uuid, and each has one",
        "mm_processor_kwargs": "refused: an identity covers the options that its media were processed with",
        "prompt": "refused: ids are the only source, text of them would be a second one",
        "prompt_token_offsets": "refused: they point into a text, and there is none",
        "token_type_ids": "refused: for cross encoders, which have no sessions",
    },
    "PlaceholderRange": {"offset": _SET, "length": _SET, "is_embed": _SET},
}

# Names of arrays in the store that are arguments of vLLM's models, by modality: the dimension along which vLLM joins items.
_PATCHES: Final = {"image": {"pixel_values": 0}, "video": {"pixel_values_videos": 0}}
_ROWS: Final = {"image": {"image_embeds": 0}, "video": {"video_embeds": 0}}
_SOUND: Final = {"audio": {"input_audio_features": 1}}
#: The families that take pixels alone. All others take encoder output of images and videos in their place.
_NO_ROWS: Final = ("ernie4_5_vl", "paddleocr_vl")
#: The families whose videos have seconds; without them vLLM takes 1 or, for Qwen3-Omni, 2, so they are always said.
_TIMED: Final = ("qwen2_5_vl", "qwen2_5_omni", "qwen3_omni")
#: In prompts, vLLM's parsers take a mapping of these in place of media. Of videos they would drop what Qwen2.5-VL places them by.
_PROMPT_DATA: Final = {"image": "image_embeds", "audio": "input_audio_features"}


def to_vllm(
    node: Node | Draft,
    prefix_len: int = 0,
    *,
    features: bool = False,
    tail_policy: TailPolicy | None = None,
    paired_calls: bool = False,
) -> EngineInput:
    """The engine input of a node's or draft's path from token ``prefix_len`` on: what ``add_request`` and ``generate`` take.

    ``prompt_token_ids``: expanded, as list[int], vLLM's own ids at placeholders. With media also, by modality and in path
    order, ``mm_placeholders`` (half-open ranges from ``prefix_len``, sorted, without overlap), ``mm_hashes`` (identities in
    hex) and ``mm_kwargs``: with ``features`` what the store holds, an encoder's output before its input, else None for each,
    which vLLM allows for items that it has cached. ``cache_salt``: the namespace's. Its LoRA is ``add_request``'s to take, its
    tenant nobody's: tenants that share no KV get salts.

    ``prefix_len`` is for chunks of a streaming session, which counts ranges from the chunk's first token too; a request of its own
    begins at 0. ``tail_policy``, ``paired_calls``: as for ``engine_bridge.policies.prompt_of``.

    Raises Unsupported, naming the item, for what vLLM has no form for (see ``engine_bridge.vllm_ranges``), for an identity that
    stands for two contents, since vLLM keeps features by the identity alone, for a turn with a position table of its own and for an
    empty prompt; NeedsMedia with ``features``, whose ``items`` are the ones to put first; otherwise as ``prompt_of``.
    """
    with importing("vllm"):
        from vllm.inputs import mm_input, tokens_input

    prompt, ranges = _checked(node, prefix_len, tail_policy, paired_calls)
    salt = committed(node).namespace.cache_salt or None
    ids = _written(prompt, ranges).tolist()
    if not ranges:
        given: EngineInput = tokens_input(ids, cache_salt=salt)
        return given
    with importing("vllm"):
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    held = _held(node, ranges) if features else {}
    kwargs: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    placeholders: dict[str, list[Any]] = {}
    for placed in ranges:
        item = placed.item
        kwargs.setdefault(item.modality, []).append(_arguments(node, item, held[item.content()]) if features else None)
        hashes.setdefault(item.modality, []).append(item.identity.hex())
        placeholders.setdefault(item.modality, []).append(
            PlaceholderRange(offset=placed.start, length=placed.stop - placed.start, is_embed=_mask(placed))
        )
    given = mm_input(ids, MultiModalKwargsItems(kwargs), hashes, placeholders, cache_salt=salt)
    return given


def to_vllm_prompt(
    node: Node | Draft,
    *,
    features: bool = False,
    tail_policy: TailPolicy | None = None,
    paired_calls: bool = False,
    compact_ids: Mapping[str, int] | None = None,
    timestamp_ids: TimestampIds | None = None,
) -> TokensPrompt:
    """The same request as vLLM's public ``TokensPrompt``: one placeholder for each item, which vLLM expands.

    Its expansion is what :func:`to_vllm` gives. ``multi_modal_uuids``: identities in hex. ``multi_modal_data``: None for each item,
    which vLLM allows for those it has cached; with ``features``, in the form in which vLLM's parsers take them in place of media,
    what the store holds of encoder outputs of images ("image_embeds") and of audio features ("input_audio_features").

    ``compact_ids``: by modality, the id that stands for an item in a prompt where it is not the one that stands at its
    placeholders; ERNIE 4.5 VL needs it. ``timestamp_ids``: what vLLM's tokenizer makes of the timestamps of a video, a sequence for
    each frame; videos of Qwen3-VL and GLM-4V need it, since vLLM writes them anew.

    Raises as :func:`to_vllm`, and Unsupported, naming the item or the index, where vLLM's expansion would be another: without
    ``compact_ids`` or ``timestamp_ids`` where they are needed, where timestamps differ, and where an id that stands for an item
    stands outside every item too; for ``compact_ids`` of what is no modality; and for features that a prompt cannot
    take: pixels, and videos, of which it loses the times. OutOfRange, TypeError for what are no token ids.
    """
    with importing("vllm"):
        from vllm.inputs import TokensPrompt as Prompted

    prompt, ranges = _checked(node, 0, tail_policy, paired_calls)
    ids = _written(prompt, ranges)
    compact_ids = {} if compact_ids is None else compact_ids
    if not isinstance(compact_ids, Mapping):
        raise TypeError(f"compact_ids are a mapping from modalities to ids, not {type(compact_ids).__name__}")
    if unknown := compact_ids.keys() - get_args(Modality):
        raise Unsupported(f"compact_ids for {', '.join(sorted(map(str, unknown)))}; an item is {' or '.join(get_args(Modality))}")
    compact = {placed.item.modality: _compact_id(node, placed.item, compact_ids) for placed in ranges}
    if len(set(compact.values())) < len(compact):
        raise Unsupported(f"vLLM tells items of a prompt apart by their ids, and {compact} are not apart", item=ranges[0].item)
    pieces: list[Any] = []
    stands = []  # where the one placeholder of each item is
    at = length = 0
    for placed in ranges:
        _check_timestamps(ids, placed, timestamp_ids)
        # The range of a GLM-4V video begins and ends with begin_of_video and end_of_video, which stand in a prompt too.
        around = int(bool(placed.texts) and node.scheme.family == "glm4v")
        pieces += (ids[at : placed.start + around], [compact[placed.item.modality]])
        length += placed.start + around - at
        stands.append(length)
        length += 1
        at = placed.stop - around
    collapsed = np.concatenate((*pieces, ids[at:])) if pieces else ids
    strays = np.setdiff1d(np.flatnonzero(np.isin(collapsed, list(compact.values()))), stands)
    if len(strays):
        index = int(strays[0])
        raise Unsupported(
            f"token {index} of the prompt is {collapsed[index]} and no item; vLLM would take it for one", index=index, item=None
        )
    given: TokensPrompt = Prompted(prompt_token_ids=collapsed.tolist())
    if ranges:
        modalities: dict[str, list[MediaItem]] = {}
        for placed in ranges:
            modalities.setdefault(placed.item.modality, []).append(placed.item)
        given["multi_modal_uuids"] = {modality: [item.identity.hex() for item in items] for modality, items in modalities.items()}
        if features:
            held = _held(node, ranges)
            given["multi_modal_data"] = {name: _data(node, items, held) for name, items in modalities.items()}
        else:
            given["multi_modal_data"] = {name: [None] * len(items) for name, items in modalities.items()}
    if salt := committed(node).namespace.cache_salt:
        given["cache_salt"] = salt
    return given


def _checked(
    node: Node | Draft, prefix_len: int, tail_policy: TailPolicy | None, paired_calls: bool
) -> tuple[Prompt, tuple[VLLMRange, ...]]:
    """The prompt and its ranges, or why vLLM cannot have it."""
    prompt = prompt_of(node, prefix_len, tail_policy=tail_policy, paired_calls=paired_calls)
    if not len(prompt.input_ids):
        raise Unsupported(f"{node!r} has no tokens from {prompt.prefix_len} on; vLLM takes no empty prompt", node=node)
    for turn in node.path():
        if is_external(turn.runs):
            raise Unsupported(f"{turn!r} has a position table of its own; vLLM computes positions itself", node=turn)
    contents: dict[bytes, MediaItem] = {}
    for item, _ in prompt.media:
        known = contents.setdefault(item.identity, item)
        if known.content() != item.content():
            raise Unsupported(f"{item!r} and {known!r} have one identity, by which alone vLLM keeps features", item=item)
    return prompt, vllm_ranges(node.scheme, prompt.input_ids, prompt.media)


def _written(prompt: Prompt, ranges: Iterable[VLLMRange]) -> Any:
    """A copy of the ids with vLLM's own at every placeholder."""
    scheme = prompt.source.scheme
    ids = prompt.input_ids.copy()
    for placed in ranges:
        for start, stop in placed.embeds:
            ids[start:stop] = token_id(scheme, placeholder_name(scheme, placed.item), placed.item)
    return ids


def _mask(placed: VLLMRange) -> torch.Tensor | None:
    """Which tokens of a range take embeddings: (length,) bool; None, as vLLM has it, where all do."""
    if placed.embeds == ((placed.start, placed.stop),):
        return None
    mask = torch.zeros(placed.stop - placed.start, dtype=torch.bool)
    for start, stop in placed.embeds:
        mask[start - placed.start : stop - placed.start] = True
    return mask


def _compact_id(node: Node | Draft, item: MediaItem, given: Mapping[str, int]) -> int:
    if item.modality in given:
        return in_range(given[item.modality], MAX_TOKEN_ID, "compact_ids", item)
    if node.scheme.family == "ernie4_5_vl":
        raise Unsupported(f"{item}: vLLM's prompts have an id of their own for one {item.modality}; give compact_ids", item=item)
    return token_id(node.scheme, f"{item.modality}_token_id", item)


def _check_timestamps(ids: Any, placed: VLLMRange, timestamp_ids: TimestampIds | None) -> None:
    """Whether the timestamps that vLLM would write are those that stand there."""
    item = placed.item
    if not placed.texts:
        return
    if timestamp_ids is None:
        raise Unsupported(f"{item}: vLLM writes its timestamps anew, and nobody says how; give timestamp_ids", item=item)
    ours = [ids[start:stop].tolist() for start, stop in placed.texts]
    theirs = [token_array(token_bytes(text)).tolist() for text in timestamp_ids(item)]
    if ours != theirs:
        frame = next(
            (frame for frame, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
        )
        raise Unsupported(f"{item}: the timestamp of frame {frame} is not the one that vLLM would write", item=item)


def _held(node: Node | Draft, ranges: Iterable[VLLMRange]) -> dict[Any, Features]:
    """The features of every item by content. Raises NeedsMedia with those that are missing."""
    items = {placed.item.content(): placed.item for placed in ranges}
    return dict(zip(items, held_features(committed(node), tuple(items.values())), strict=True))


def _taken(node: Node | Draft, item: MediaItem) -> dict[str, int]:
    """Names of features that vLLM's model takes for an item, with the dimension along which vLLM joins items."""
    rows = {} if node.scheme.family in _NO_ROWS else _ROWS.get(item.modality, {})
    return {**_PATCHES.get(item.modality, {}), **rows, **_SOUND.get(item.modality, {})}


def _arguments(node: Node | Draft, item: MediaItem, features: Features) -> Any:
    """One item of ``mm_kwargs``: arrays of the store, and what the item itself says."""
    with importing("vllm"):
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    modality, taken = item.modality, _taken(node, item)
    if not any(name in taken for name in features):
        raise Unsupported(f"{item}: of its features {', '.join(features)} vLLM takes none, only {', '.join(taken)}", item=item)
    values, fields = {}, {}
    encoded = any(name in features for name in _ROWS.get(modality, {}) if name in taken)
    for name, dim in taken.items():
        if name in features and not (encoded and name in _PATCHES.get(modality, {})):  # vLLM would encode the pixels again
            values[name] = tensor = _tensor(features, name)
            _check_rows(node, item, name, tensor, dim)
            whole = slice(tensor.shape[dim])
            fields[name] = MultiModalFieldConfig.flat(modality, [(slice(None),) * dim + (whole,)] if dim else [whole], dim)
    for name, value in _facts(node, item, features).items():
        values[name] = value[None]
        fields[name] = MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
    (arguments,) = MultiModalKwargsItems.from_hf_inputs(values, fields)[modality]
    return arguments


def _facts(node: Node | Draft, item: MediaItem, features: Features) -> dict[str, torch.Tensor]:
    """What vLLM's models read of an item beside its arrays; ``timestamps`` of frames are in the store, all else in the item."""
    family = node.scheme.family
    facts: dict[str, torch.Tensor] = {}
    if item.grid_thw is not None:
        facts[f"{item.modality}_grid_thw"] = torch.tensor(item.grid_thw)
    if item.modality == "video" and family in _TIMED:
        facts["second_per_grid_ts"] = torch.tensor(1.0 if item.second_per_grid_ts is None else item.second_per_grid_ts)
    if item.modality == "audio" and item.audio_feature_length is not None:
        facts["audio_feature_lengths"] = torch.tensor(item.audio_feature_length)
    if item.modality == "video" and family == "qwen3_vl" and "timestamps" in features:
        facts["timestamps"] = _tensor(features, "timestamps")
    return facts


def _data(node: Node | Draft, items: Sequence[MediaItem], held: Mapping[Any, Features]) -> dict[str, torch.Tensor]:
    """All items of one modality in the form that vLLM's parsers take in place of media: arrays joined, facts stacked."""
    name = _PROMPT_DATA.get(items[0].modality)
    if name is None:
        raise Unsupported(
            f"{items[0]}: a prompt takes no features of a {items[0].modality}; hand over the engine input", item=items[0]
        )
    facts: dict[str, list[torch.Tensor]] = {}
    arrays = []
    for item in items:
        features, dim = held[item.content()], _taken(node, item).get(name)
        if dim is None or name not in features:
            raise Unsupported(
                f"{item}: a prompt takes its {name}, not {', '.join(features)}; hand over the engine input",
                item=item,
            )
        arrays.append(_tensor(features, name))
        _check_rows(node, item, name, arrays[-1], dim)
        for fact, value in _facts(node, item, features).items():
            facts.setdefault(fact, []).append(value)
    return {name: torch.cat(arrays, dim=dim or 0), **{fact: torch.stack(values) for fact, values in facts.items()}}


def _check_rows(node: Node | Draft, item: MediaItem, name: str, tensor: torch.Tensor, dim: int) -> None:
    """Whether an array has as many rows as vLLM would cut out for this item."""
    if name in _ROWS.get(item.modality, {}):
        rows = node.scheme.num_placeholders(item)
    elif item.modality == "audio":
        rows = item.audio_feature_length or 0
    else:
        rows = math.prod(item.grid_thw or (0,))
    if tensor.ndim <= dim or tensor.shape[dim] != rows:
        raise OutOfRange(f"{item}: {name} of shape {tuple(tensor.shape)} has no {rows} rows", value=tuple(tensor.shape), limit=rows)


def _tensor(features: Features, name: str) -> torch.Tensor:
    """A tensor of its own, in the dtype that was put, those that NumPy lacks too."""
    tensor = torch.from_numpy(features[name].copy())
    dtype = getattr(torch, features.dtype(name))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
