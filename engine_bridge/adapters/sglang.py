"""Requests of SGLang, version 0.5.23, built by its own classes.

What comes out is what its scheduler takes in: a ``TokenizedGenerateReqInput`` with the in-process ``MultimodalProcessorOutput``,
and in that one ``MultimodalDataItem`` for each item. The HTTP form cannot carry it: of two images in one dict it drops the hash,
and gives both the pad value of one. Positions, offsets, identities and padded ids are always there: what is missing SGLang
looks for in ids that it has overwritten by then.

:data:`REQUEST_FIELDS`, :data:`OUTPUT_FIELDS` and :data:`ITEM_FIELDS` say of every field of the three types whether it is set here,
passed on from the caller, left to the engine, or refused. SGLang is imported when a request is made, not before.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from pyrsistent import PMap

from engine_bridge.adapters.sglang_media import tensor_of
from engine_bridge.adapters.sglang_params import check_types
from engine_bridge.adapters.sglang_sessions import SessionTreeController
from engine_bridge.engines import importing
from engine_bridge.policies import PlacedItem, Prompt, committed, prompt_of
from engine_bridge.request import held_features
from sessiontree import Draft, Features, MediaItem, MediaSpanError, Node, OutOfRange, Unsupported
from sessiontree.details import TailPolicy
from sessiontree.frozen import checked_text
from sessiontree.positions import Mode, known_schemes
from sessiontree.tokens import MAX_TOKEN_ID

__all__ = ["ITEM_FIELDS", "LOST_IN_SESSIONS", "OUTPUT_FIELDS", "REQUEST_FIELDS", "SessionTreeController", "to_sglang"]

#: "set" from the node, "passed" from the caller's arguments, "engine": its own default; anything else is why the field is refused.
Fate = str

_OTHER_INPUT: Final = "what stands for these tokens then is no part of the node's identity"
_ENCODERS: Final = "media of encoder servers; here they are in the request"
_ONE_TURN: Final = "it is of one request, and nothing says how those of several turns go together"

#: Every field of ``TokenizedGenerateReqInput``.
REQUEST_FIELDS: Final[Mapping[str, Fate]] = {
    **dict.fromkeys(("input_ids", "mm_inputs", "lora_name"), "set"),
    **dict.fromkeys(("rid", "sampling_params", "session_params", "cache_salt", "extra_key", "lora_id"), "passed"),
    **dict.fromkeys(("input_text", "stream", "session_id", "custom_logit_processor", "require_reasoning"), "passed"),
    **dict.fromkeys(("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"), "passed"),
    **dict.fromkeys(("sampling_logprobs_mode", "return_flat_raw_top_logprobs", "return_sampling_mask"), "passed"),
    **dict.fromkeys(("return_hidden_states", "return_entropy", "return_bytes", "return_indexer_topk"), "passed"),
    **dict.fromkeys(("return_routed_experts", "routed_experts_start_len"), "passed"),
    **dict.fromkeys(("token_type_ids", "multi_item_delimiter_indices", "token_indices_to_pool", "kv_hints"), "passed"),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"), "passed"),
    **dict.fromkeys(("routed_dp_rank", "disagg_prefill_dp_rank", "routing_key", "priority"), "passed"),
    **dict.fromkeys(("http_worker_ipc", "time_stats", "no_logs"), "passed"),
    "pp_prefetch_ticketed": "engine",
    "input_embeds": _OTHER_INPUT,
    "positional_embed_overrides": _OTHER_INPUT,
    **dict.fromkeys(("need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls"), _ENCODERS),
}

#: Every field of ``MultimodalProcessorOutput``.
OUTPUT_FIELDS: Final[Mapping[str, Fate]] = {
    **dict.fromkeys(("mm_items", "input_ids", "padded_input_ids", "mrope_positions", "mrope_position_delta"), "set"),
    **dict.fromkeys(("im_token_id", "im_start_id", "im_end_id", "video_token_id"), "set"),
    **dict.fromkeys(("audio_token_id", "audio_start_id", "audio_end_id"), "set"),
    **dict.fromkeys(("slice_start_id", "slice_end_id"), "SGLang's rule for canvases is not shown, so no such scheme comes here"),
    **dict.fromkeys(("vision_position_ids", "media_nums_per_sample", "visible_frame_counts", "token_type_ids"), _ONE_TURN),
}

#: Every field of ``MultimodalDataItem``.
ITEM_FIELDS: Final[Mapping[str, Fate]] = {
    **dict.fromkeys(("modality", "offsets", "hash", "identity", "pad_value", "pad_values"), "set"),
    **dict.fromkeys(("format", "feature", "precomputed_embeddings", "model_specific_data"), "set"),
    "keep_device_embedding": "engine",
}

#: Fields of a request that SGLang's ``Session.create_req`` leaves behind.
LOST_IN_SESSIONS: Final = frozenset(
    {
        "kv_hints",
        "multi_item_delimiter_indices",
        "return_flat_raw_top_logprobs",
        "return_indexer_topk",
        "session_id",
        "token_indices_to_pool",
        "token_type_ids",
    }
)

#: Which parameter of a position scheme says the token id of a field of ``MultimodalProcessorOutput``.
_TOKEN_IDS: Final = {
    "im_token_id": ("image_token_id",),
    "im_start_id": ("vision_start_token_id", "image_start_token_id"),
    "im_end_id": ("vision_end_token_id", "image_end_token_id"),
    "video_token_id": ("video_token_id",),
    "audio_token_id": ("audio_token_id",),
    "audio_start_id": ("audio_start_token_id",),
    "audio_end_id": ("audio_end_token_id",),
}
#: What the encoder takes in, by the names that processors give it, and what it gives out. All else of the features goes along.
_PIXELS: Final = ("feature", "features", "pixel_values", "pixel_values_videos", "input_features", "audio_features")
_EMBEDDINGS: Final = ("precomputed_embeddings", "embeddings", "image_embeds", "video_embeds", "audio_embeds")
_GRIDS: Final = {"image": "image_grid_thw", "video": "video_grid_thw"}


def to_sglang(
    node: Node | Draft,
    prefix_len: int = 0,
    *,
    rid: str | None = None,
    sampling_params: Any = None,
    session_params: Any = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    mode: Mode = "as_decoded",
    tail_policy: TailPolicy | None = None,
    paired_calls: bool = False,
    features: bool = False,
    target_grids: Sequence[Sequence[int]] = (),
    **fields: Any,
) -> Any:
    """SGLang's ``TokenizedGenerateReqInput`` for the tokens of a path: all of them, or a session's turn from ``prefix_len`` on.

    Without ``session_params`` the request is the whole path. With them (a ``SessionParams`` or a mapping of its fields) SGLang puts
    its own history before the tokens, so ``prefix_len`` says how many tokens that has, and everything counts from there: offsets
    (inclusive) as indices into this turn's tokens, positions (3, T) int64 less what SGLang adds to them again.

    ``mrope_position_delta``: (1, 1) int64, rounded down where the scheme's is fractional, so that SGLang decodes at the positions
    that the node will record. ``target_grids``: of images to be generated (glm_image); their plan follows the tokens' positions.
    ``features``: bring along what the store holds of every item, an encoder's output before its input. ``cache_salt``: by default
    the namespace's, as is the LoRA adapter; no engine knows of a tenant. ``rid``: by default a draft's key. ``sampling_params``: a
    ``SamplingParams``, taken as it is, or a mapping of its fields, which SGLang checks. ``tail_policy``, ``paired_calls``: as for
    :func:`~engine_bridge.policies.prompt_of`. ``fields``: any other field of the request by its name.

    Nothing in the request is shared with a node. Raises Unsupported for schemes that SGLang does not run, fields that are refused,
    fields that SGLang's sessions lose, sampling parameters that SGLang refuses, another salt or LoRA than the namespace's,
    positions that a session would not reproduce, audio in video, and features that contradict their item or each other; NeedsMedia;
    MediaSpanError for embeddings of another length than their item; what prompt_of raises; TypeError; NeedsExtra without SGLang.
    """
    prompt = prompt_of(node, prefix_len, tail_policy=tail_policy, paired_calls=paired_calls)
    scheme, namespace = node.scheme, committed(node).namespace
    if f"{scheme.family}@sglang" not in known_schemes() or scheme.num_axes not in (1, 3):
        raise Unsupported(f"{scheme.name}: SGLang 0.5.23 has no positions for this family", scheme=scheme.name)
    _check_fields(fields)

    with importing("sglang"):
        from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

    session = _as(SessionParams, session_params, "session_params")
    if session is not None:
        check_types(session)
    in_session = session is not None and session.id is not None
    _check_session(prompt, session if in_session else None, fields, target_grids)
    if fields.get("lora_id") is not None and namespace.lora is None:
        raise Unsupported(f"{node!r} is of a session without LoRA; under {fields['lora_id']!r} it would be another node", node=node)
    if cache_salt is not None and namespace.cache_salt not in (None, checked_text(cache_salt, "cache_salt")):
        raise Unsupported(f"{node!r} has the cache salt of its namespace; under another it would be another node", node=node)
    named = {
        **_REQUIRED,
        "lora_id": namespace.lora,
        **fields,
        "lora_name": namespace.lora,
        "rid": node.key if rid is None and isinstance(node, Draft) else rid,
        "sampling_params": _sampling(SamplingParams, sampling_params),
        "session_params": session,
        "cache_salt": namespace.cache_salt if cache_salt is None else cache_salt,
        "extra_key": extra_key,
    }
    for name in ("rid", "extra_key"):
        if named[name] is not None:
            checked_text(named[name], name)
    ids = array("q", prompt.input_ids.astype(np.int64).tobytes())
    return TokenizedGenerateReqInput(input_ids=ids, mm_inputs=_mm_inputs(prompt, mode, features, target_grids, in_session), **named)


#: Fields that the request type has no default for.
_REQUIRED: Final[Mapping[str, Any]] = {
    "input_text": None,
    "input_embeds": None,
    "token_type_ids": None,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "stream": False,
}


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name in fields:
        fate = REQUEST_FIELDS.get(name)
        if fate is None:
            raise TypeError(f"SGLang's request has no field {name!r}")
        if fate in ("set", "engine"):
            raise TypeError(f"{name} is not the caller's to give")
        if fate != "passed":
            raise Unsupported(f"{name} is refused: {fate}", field=name)


def _as(kind: type[Any], given: Any, what: str) -> Any:
    """``given`` as one of SGLang's structs; of a mapping, a new one."""
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        return kind(**given)
    raise TypeError(f"{what} are a {kind.__name__} or a mapping, not {type(given).__name__}")


def _sampling(kind: type[Any], given: Any) -> Any:
    """SGLang's sampling parameters, ready for its scheduler, which takes normalised ones only; an object as it is."""
    if isinstance(given, kind):
        return given
    made = _as(kind, {} if given is None else given, "sampling_params")
    try:
        made.normalize(_LongestTokens)
        made.verify(MAX_TOKEN_ID + 1)
    except (ValueError, re.error) as error:
        raise Unsupported(f"sampling_params: {error}", sampling_params=given) from error
    return made


class _LongestTokens:
    """In place of a tokenizer, which SGLang measures stop strings with: a token for each byte, and no tokenizer makes more."""

    @staticmethod
    def encode(text: str, *, add_special_tokens: bool) -> bytes:
        return text.encode()


def _check_session(prompt: Prompt, session: Any, fields: Mapping[str, Any], target_grids: Sequence[Any]) -> None:
    """What SGLang takes with a session and what it takes without one."""
    if session is None:
        if prompt.prefix_len:
            raise Unsupported(
                f"a request from token {prompt.prefix_len} on needs session_params: without a session SGLang takes whole paths",
                prefix_len=prompt.prefix_len,
            )
        if not prompt.stop:
            raise OutOfRange(f"{prompt.source!r}: a request of no tokens", value=0, limit=1)
        return
    if session.offset and session.offset != prompt.prefix_len:
        raise OutOfRange(
            f"session_params.offset is {session.offset}, the tokens begin at {prompt.prefix_len}",
            value=session.offset,
            limit=prompt.prefix_len,
        )
    if len(target_grids):
        raise Unsupported(f"{prompt.source!r}: SGLang's sessions take the columns of tokens to come for tokens of the turn")
    lost = sorted(name for name in fields.keys() & LOST_IN_SESSIONS if fields[name] not in (None, False))
    if lost:
        raise Unsupported(f"SGLang's sessions lose {', '.join(lost)}", field=lost[0])


def _mm_inputs(prompt: Prompt, mode: Mode, features: bool, target_grids: Sequence[Sequence[int]], in_session: bool) -> Any:
    """The ``MultimodalProcessorOutput``; None where SGLang would compute the same positions without it."""
    with importing("sglang"):
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    scheme = prompt.source.scheme
    table, delta, plain = _positions(prompt, mode, in_session)
    if len(target_grids):
        plan = scheme.decode_positions(prompt.position_state(mode), target_grids)
        table, plain = np.concatenate((table, plan.astype(np.int64)), axis=1), False
    if not prompt.media and plain:
        return None
    if scheme.num_axes == 1:
        raise Unsupported(f"{prompt.source!r} has positions of its own, which SGLang does not take for {scheme.name}")
    held = _held(prompt) if features else (None,) * len(prompt.media)
    items = [_item(placed, found) for placed, found in zip(prompt.media, held, strict=True)]
    ids = prompt.input_ids.tolist()
    params = scheme.params
    token_ids = {field: next((params[name] for name in names if name in params), None) for field, names in _TOKEN_IDS.items()}
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items) if items else list(ids),
        mrope_positions=torch.tensor(table),
        mrope_position_delta=torch.tensor([[delta]], dtype=torch.int64),
        **token_ids,
    )


def _positions(prompt: Prompt, mode: Mode, in_session: bool) -> tuple[NDArray[np.int64], int, bool]:
    """Positions and delta as the request says them, and whether they are those that SGLang gives text on its own.

    SGLang's session adds to this turn's positions one past the greatest that its history has, on any axis, and computes the delta
    from the greatest of all.
    """
    first = prompt.prefix_len
    table = prompt.positions(mode, start=0 if first else None).astype(np.int64)
    exact = prompt.source.scheme.mrope_position_delta(prompt.position_state(mode))
    delta = math.floor(exact)
    base = int(table[:, :first].max()) + 1 if first else 0
    if in_session and table.size and delta != int(table.max()) + 1 - prompt.stop:
        raise Unsupported(
            f"{prompt.source!r}: its next token is decoded at index + {exact}; SGLang's session would take "
            f"{int(table.max()) + 1 - prompt.stop}"
        )
    turn = table[:, first:] - base
    plain = bool((turn == np.arange(turn.shape[1])).all()) and (not turn.size or delta == base - first)
    return turn, delta - (base - first), plain


def _item(placed: PlacedItem, features: Features | None) -> Any:
    with importing("sglang"):
        from sglang.srt.managers.schedule_batch import MultimodalDataItem
        from sglang.srt.multimodal.modality import Modality, MultimodalInputFormat

    item = placed.item
    if item.modality == "video" and item.audio_feature_length is not None:
        raise Unsupported(f"{item}: SGLang 0.5.23 has no audio in video; its encoders give a video or an audio", item=item)
    own = MultimodalDataItem(
        modality=Modality[item.modality.upper()],
        offsets=[(start, stop - 1) for start, stop in placed.spans],
        model_specific_data=_described(item),
    )
    own.set_identity(item.identity)
    if features is None:
        return own
    tensors = {name: tensor_of(features, name) for name in features}
    embeddings, pixels = (_only(item, tensors, names) for names in (_EMBEDDINGS, _PIXELS))
    if embeddings is not None:
        rows, count = len(tensors[embeddings]), sum(stop - start for start, stop in placed.spans)
        if tensors[embeddings].ndim != 2 or rows != count:
            raise MediaSpanError(
                f"{item}: {embeddings} of shape {tuple(tensors[embeddings].shape)} for {count} placeholders",
                item=item,
                span=placed.spans[0],
                limit=count,
            )
        own.precomputed_embeddings = tensors[embeddings]
        own.format = MultimodalInputFormat.PRECOMPUTED_EMBEDDING
    elif pixels is not None:
        own.feature = tensors[pixels]
    else:
        raise Unsupported(
            f"{item}: of its features {', '.join(tensors)} none is what an encoder takes or gives: "
            f"{', '.join((*_PIXELS, *_EMBEDDINGS))}",
            item=item,
        )
    for name, tensor in tensors.items():
        if name not in (*_PIXELS, *_EMBEDDINGS):
            _check_alike(item, name, own.model_specific_data.get(name), tensor)
            own.model_specific_data.setdefault(name, tensor)
    return own


def _only(item: MediaItem, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> str | None:
    """Which of these names the features have. Raises Unsupported for two of them, of which SGLang's item has one."""
    found = [name for name in names if name in tensors]
    if len(found) > 1:
        raise Unsupported(f"{item}: of its features {' and '.join(found)} SGLang takes one, and nothing says which", item=item)
    return found[0] if found else None


def _check_alike(item: MediaItem, name: str, said: Any, held: torch.Tensor) -> None:
    """Whether features repeat what an item says itself, or a field of SGLang's item. Raises Unsupported."""
    if name in ITEM_FIELDS:
        raise Unsupported(
            f"{item}: its features {name!r} have the name of a field that SGLang's item has from elsewhere", item=item
        )
    if said is None:
        return
    if not isinstance(said, torch.Tensor) or not torch.equal(said.reshape(-1), held.reshape(-1).to(said.dtype)):
        raise Unsupported(f"{item}: its features say another {name} than the item itself", item=item, field=name)


def _described(item: MediaItem) -> dict[str, Any]:
    """What models read of an item beside its features: its grid and times by SGLang's names, and its own further fields."""
    described: dict[str, Any] = {}
    if item.grid_thw is not None and item.modality in _GRIDS:
        described[_GRIDS[item.modality]] = torch.tensor([item.grid_thw], dtype=torch.int64)
    if item.second_per_grid_ts is not None:
        described["second_per_grid_ts"] = torch.tensor([item.second_per_grid_ts])
    if item.audio_feature_length is not None:
        described["audio_feature_lens"] = torch.tensor([item.audio_feature_length], dtype=torch.int64)
    for name, value in item.extra.items():
        if name in ITEM_FIELDS or name in described:
            raise Unsupported(f"{item}: its field {name!r} is one that SGLang's item has from elsewhere", item=item, field=name)
        if OUTPUT_FIELDS.get(name) == _ONE_TURN:
            raise Unsupported(f"{item}: its field {name!r} is refused: {_ONE_TURN}", item=item, field=name)
        described[name] = _thawed(value)
    return described


def _thawed(value: Any) -> Any:
    """A frozen value as processors give it: lists, dicts, tensors; nothing shared."""
    if isinstance(value, (PMap, Mapping)):
        return {key: _thawed(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_thawed(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return torch.tensor(value)
    return value


def _held(prompt: Prompt) -> tuple[Features, ...]:
    """What the store holds of each item of the prompt, in order. Raises NeedsMedia."""
    contents = {item.content(): item for item, _ in prompt.media}
    committed = prompt.source if isinstance(prompt.source, Node) else prompt.source.parent
    held = dict(zip(contents, held_features(committed, tuple(contents.values())), strict=True))
    return tuple(held[item.content()] for item, _ in prompt.media)
