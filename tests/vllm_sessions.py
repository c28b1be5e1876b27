"""Sessions as vLLM's own processors would write them, and what vLLM's own code makes of a prompt and of an engine input.

A :class:`Script` is the tokens of a history with its items, and for each item the range of tokens that vLLM counts as its
placeholder, written down from what each model's processor does. :func:`expanded_by_vllm` and :func:`positions_of_vllm` ask the
processors and models themselves.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sessiontree import MediaItem, Node, SessionStore
from sessiontree.positions import PositionScheme, scheme
from tests.histories import History, random_cuts, split, without_leading_empties
from tests.vllm_engine import load

IMAGE, VIDEO, AUDIO = 11, 12, 13
VISION_START, VISION_END, AUDIO_START, AUDIO_END = 14, 15, 16, 17
IMAGE_START, IMAGE_END, VIDEO_START, VIDEO_END = 18, 19, 20, 21
ONE_IMAGE, ONE_VIDEO = 22, 23  # ERNIE's compact ids
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
ERNIE_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": IMAGE_START,
    "image_end_token_id": IMAGE_END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}
OMNI_IDS = {**QWEN_IDS, "audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
PARAMS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": QWEN_IDS,
    "qwen2_5_vl": {**QWEN_IDS, "tokens_per_second": 2},
    "qwen3_vl": QWEN_IDS,
    "paddleocr_vl": QWEN_IDS,
    "ernie4_5_vl": ERNIE_IDS,
    "glm4v": ERNIE_IDS,
    "qwen2_5_omni": {**OMNI_IDS, "position_id_per_seconds": 25},
    "qwen3_omni": {**OMNI_IDS, "position_id_per_seconds": 13},
}
FAMILIES = tuple(PARAMS)
MODALITIES: Mapping[str, tuple[str, ...]] = {
    family: ("image",) if family == "paddleocr_vl" else ("image", "video", "audio") if "omni" in family else ("image", "video")
    for family in FAMILIES
}
COMPACT_IDS = {"ernie4_5_vl": {"image": ONE_IMAGE, "video": ONE_VIDEO}}


def rule(family: str) -> PositionScheme:
    return scheme(f"{family}@vllm", **PARAMS[family])


def encode(text: str) -> list[int]:
    """The tokenizer of these sessions: a letter, a token."""
    return [2000 + ord(letter) for letter in text]


def seconds_of(item: MediaItem) -> list[float]:
    """The timestamps of a video, which follow from nothing but its identity."""
    frames = 0 if item.grid_thw is None else item.grid_thw[0]
    return [frame * 1.5 + item.identity[0] for frame in range(frames)]


def timestamp(family: str, seconds: float) -> list[int]:
    return encode(f"<{seconds:.1f} seconds>" if family == "qwen3_vl" else f"{seconds:.1f} seconds")


def timestamp_ids(family: str) -> Any:
    return lambda item: [timestamp(family, seconds) for seconds in seconds_of(item)]


@dataclass
class Script:
    """``ranges``: for each item, in order, (start, stop) as vLLM counts it. ``compact``: the history with one id for each item."""

    family: str
    tokens: list[int] = field(default_factory=list)
    compact: list[int] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def say(self, *tokens: int) -> None:
        self.tokens += tokens
        self.compact += tokens

    def show(self, modality: Any, name: str, height: int = 2, width: int = 2, frames: int = 1) -> None:
        """An item with all that stands around it. Sizes are merged ones; ``width`` is the length of an audio."""
        digest = hashlib.sha256(f"{modality} {name} {height} {width} {frames}".encode()).digest()
        grid = (frames if modality == "video" else 1, 2 * height, 2 * width)
        if self.family == "ernie4_5_vl" and modality == "video":
            grid = (2 * frames, *grid[1:])
        if modality == "audio":
            count, length = heard(self.family, width)
            self._put(
                MediaItem("audio", digest, [(0, 1)], audio_feature_length=length),
                (AUDIO_START,),
                [AUDIO] * count,
                (AUDIO_END,),
                AUDIO,
            )
        elif self.family in ("qwen3_vl", "glm4v") and modality == "video":
            self._put_frames(MediaItem("video", digest, [(0, 1)], grid), height * width)
        elif self.family == "ernie4_5_vl":
            edges = (IMAGE_START, IMAGE_END) if modality == "image" else (VIDEO_START, VIDEO_END)
            one = ONE_IMAGE if modality == "image" else ONE_VIDEO
            count = height * width * (frames if modality == "video" else 1)
            self._put(MediaItem(modality, digest, [(0, 1)], grid), edges[:1], [IMAGE] * count, edges[1:], one)
        else:
            edges = (IMAGE_START, IMAGE_END) if self.family == "glm4v" else (VISION_START, VISION_END)
            pad = IMAGE if modality == "image" else VIDEO
            seconds = 0.5 if modality == "video" and len(name) % 2 else None
            item = MediaItem(modality, digest, [(0, 1)], grid, seconds)
            self._put(item, edges[:1], [pad] * (height * width * grid[0]), edges[1:], pad)

    def _put(self, item: MediaItem, before: Sequence[int], pads: Sequence[int], after: Sequence[int], one: int) -> None:
        self.say(*before)
        start = len(self.tokens)
        self.tokens += pads
        self.compact.append(one)
        self.items.append(item.with_spans([(start, len(pads))]))
        self.ranges.append((start, len(self.tokens)))
        self.say(*after)

    def _put_frames(self, item: MediaItem, size: int) -> None:
        qwen = self.family == "qwen3_vl"
        self.say(VISION_START if qwen else VIDEO_START)
        start = len(self.tokens)
        spans = []
        for seconds in seconds_of(item):
            text = timestamp(self.family, seconds)
            self.tokens += [*(text if qwen else ()), VISION_START if qwen else IMAGE_START]
            spans.append((len(self.tokens), size))
            self.tokens += [VIDEO if qwen else IMAGE] * size
            self.tokens += [VISION_END if qwen else IMAGE_END, *(() if qwen else text)]
        self.compact.append(VIDEO)
        self.items.append(item.with_spans(spans))
        stop = len(self.tokens)
        self.say(VISION_END if qwen else VIDEO_END)
        self.ranges.append((start, stop) if qwen else (start - 1, stop + 1))

    def embeds(self, number: int) -> list[bool]:
        """Which tokens of the range of an item take embeddings."""
        start, stop = self.ranges[number]
        taken = {at for offset, length in self.items[number].spans for at in range(offset, offset + length)}
        return [at in taken for at in range(start, stop)]

    def history(self) -> History:
        tokens = np.array(self.tokens, np.int32)
        return History(self.family, "", PARAMS[self.family], tokens, tuple(self.items), (), {})

    def build(
        self, rng: random.Random | None = None, *, namespace: Any = None, features: bool = False, noise: bool = True
    ) -> tuple[SessionStore, Node]:
        """A store, and the last node of this history. With ``rng`` turns end anywhere; with ``noise`` ids in spans differ."""
        store = SessionStore.in_memory()
        session = store.create("s", scheme=rule(self.family), namespace=namespace)
        node = session.root
        history = self.history()
        for turn in without_leading_empties(split(history, random_cuts(rng, history) if rng else ())):
            tokens = list(turn.tokens)
            if rng and noise:
                for offset, length in (span for item in turn.media for span in item.spans):
                    tokens[offset : offset + length] = [rng.randrange(3000, 4000) for _ in range(length)]
            node = session.append(node, tokens, media=turn.media)
        for item in self.items if features else ():
            store.put_features(item, features_of(self.family, item))
        return store, node


def heard(family: str, tokens: int) -> tuple[int, int]:
    """(tokens, features) of an audio of about so many tokens."""
    length = 4 * tokens + 3 if family == "qwen2_5_omni" else 8 * tokens
    return rule(family).num_placeholders(MediaItem("audio", bytes(32), [(0, 1)], audio_feature_length=length)), length


def features_of(family: str, item: MediaItem) -> dict[str, np.ndarray[Any, Any]]:
    """What a processor would give for an item: each value another."""
    patches = int(np.prod(item.grid_thw)) if item.grid_thw is not None else 0
    first = int.from_bytes(item.identity[:2])
    if item.modality == "audio":
        length = item.audio_feature_length or 0
        return {"input_audio_features": np.arange(first, first + 4 * length, dtype=np.float32).reshape(4, length)}
    name = "pixel_values" if item.modality == "image" else "pixel_values_videos"
    found: dict[str, Any] = {name: np.arange(first, first + 6 * patches, dtype=np.float32).reshape(patches, 6)}
    return {**found, "timestamps": np.array(seconds_of(item))} if family == "qwen3_vl" and item.modality == "video" else found


# --- vLLM -----------------------------------------------------------------------------------------------------------------


#: By family: the module of vLLM's, and what its processor, its processing info and its model are called behind a common prefix.
_MODELS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VL", "Qwen2VL", "Qwen2VL"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VL", "Qwen2_5_VL"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", "Qwen3VL", "Qwen3VL"),
    "paddleocr_vl": ("paddleocr_vl", "PaddleOCRVL", "PaddleOCRVL", "PaddleOCRVL"),
    "ernie4_5_vl": ("ernie45_vl", "Ernie4_5VL", "Ernie4_5_VL", "Ernie4_5_VLMoe"),
    "glm4v": ("glm4_1v", "Glm4v", "Glm4v", "Glm4v"),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", *["Qwen2_5OmniThinker"] * 3),
    "qwen3_omni": ("qwen3_omni_moe_thinker", *["Qwen3OmniMoeThinker"] * 3),
}
_VOCABULARY = {
    "<image>": IMAGE,
    "<video>": VIDEO,
    "<audio>": AUDIO,
    "<|IMAGE_PLACEHOLDER|>": IMAGE,
    "<|image@placeholder|>": ONE_IMAGE,
    "<|video@placeholder|>": ONE_VIDEO,
    "<|begin_of_video|>": VIDEO_START,
    "<|video|>": VIDEO,
    "<|end_of_video|>": VIDEO_END,
}


class _Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return _VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True, truncation: Any = None) -> list[int]:
        assert not add_special_tokens
        return [_VOCABULARY[text]] if text in _VOCABULARY else encode(text)


def _config(family: str) -> Any:
    """What processors and models read of a model's configuration."""
    vision = SimpleNamespace(spatial_merge_size=2)
    if family == "qwen2_5_vl":
        vision.tokens_per_second = PARAMS[family]["tokens_per_second"]
    return SimpleNamespace(vision_config=vision, spatial_conv_size=2, temporal_conv_size=2, **PARAMS[family])


def expanded_by_vllm(family: str, prompt: Any, kwargs: Any, items: Sequence[MediaItem]) -> tuple[list[int], Any]:
    """(ids, placeholder ranges by modality) that the model's own processor makes of a TokensPrompt.

    Of the processor that is: which ids it looks for, what it writes for an item, and how it goes over a prompt. Its Hugging Face
    processor, whose part is to make ``kwargs`` from media, is a stub.
    """
    module, name, info, _ = _MODELS[family]
    models = load(f"vllm.model_executor.models.{module}")
    processing = load("vllm.multimodal.processing.processor")
    processor = object.__new__(getattr(models, f"{name}MultiModalProcessor"))
    hf_processor = SimpleNamespace(
        image_token="<image>",
        video_token="<video>",
        audio_token="<audio>",
        image_token_id=IMAGE,
        spatial_conv_size=2,
        temporal_conv_size=2,
        image_processor=SimpleNamespace(merge_size=2),
    )
    if family == "qwen3_vl":
        from transformers import Qwen3VLProcessor

        hf_processor = object.__new__(Qwen3VLProcessor)
        hf_processor.__dict__.update(image_token_id=IMAGE)
    seconds = [seconds_of(item) for item in items if item.modality == "video"]

    def of_kind(self: Any, metadata: int, total: int) -> list[float]:
        return seconds[metadata]

    stub = type(
        "Info",
        (getattr(models, f"{info}ProcessingInfo"),),
        {
            "__init__": lambda self: None,
            "ctx": SimpleNamespace(
                get_mm_config=lambda: SimpleNamespace(get_video_pruning_spec=lambda: None, video_pruning_rate=None)
            ),
            "get_hf_processor": lambda self, **_: hf_processor,
            "get_image_processor": lambda self, **_: SimpleNamespace(merge_size=2),
            "get_tokenizer": lambda self: _Tokenizer(),
            "get_hf_config": lambda self: _config(family),
            "get_num_image_tokens": lambda self, *, image_width, image_height, **_: image_width * image_height,
            "_get_video_second_idx_glm46v": of_kind,
        },
    )
    processor.info = stub()
    images = [item for item in items if item.modality == "image"]
    sizes = [SimpleNamespace(width=item.grid_thw[2] // 2, height=item.grid_thw[1] // 2) for item in images if item.grid_thw]

    class Items(dict[str, Any]):
        def get_items(self, *_: Any) -> Any:
            return SimpleNamespace(get_image_size=lambda number: sizes[number])

    mm_items = Items(video=[((), number) for number in range(len(seconds))])
    updates: dict[str, list[Any]] = {}
    for update in processor._get_prompt_updates(mm_items, {}, kwargs):
        if update.modality in kwargs:
            updates[update.modality] = [[update.resolve(number)] for number in range(len(kwargs[update.modality]))]
    ids, placeholders = processing.BaseMultiModalProcessor._apply_prompt_updates(processor, prompt["prompt_token_ids"], updates)
    return ids, {modality: [each.to_range() for each in found] for modality, found in placeholders.items()}


def request_of(engine_input: Any) -> Any:
    """The request that vLLM's own InputProcessor makes of an engine input; what it asks of a model's configuration is a stub."""
    module = load("vllm.v1.engine.input_processor")
    params = load("vllm.sampling_params").SamplingParams(max_tokens=1)
    model = SimpleNamespace(max_model_len=10**6, get_vocab_size=lambda: 10**6, is_multimodal_model=False, runner_type="generate")
    parallel = SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False)
    processor = object.__new__(module.InputProcessor)
    processor.__dict__.update(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        model_config=model,
        lora_config=None,
        renderer=SimpleNamespace(tokenizer=None, get_eos_token_id=lambda: None, validate_token_ids=lambda ids: None),
        generation_config_fields={},
        supports_mm_inputs=True,
        skip_prompt_length_check=False,
        mm_encoder_cache_size=10**6,
        _validate_params=lambda *_: False,
        apply_watermarking=lambda *_: None,
    )
    return processor.process_inputs("request", engine_input, params, ("generate",))


def positions_of_vllm(family: str, engine_input: Any) -> tuple[list[list[int]], int]:
    """(positions (3, T), delta) that the model itself computes for a request."""
    module, *_, name = _MODELS[family]
    model = getattr(load(f"vllm.model_executor.models.{module}"), f"{name}ForConditionalGeneration")
    self = object.__new__(model)
    self.__dict__["config"] = _config(family)
    positions, delta = model.get_mrope_input_positions(self, engine_input["prompt_token_ids"], request_of(engine_input).mm_features)
    return positions.tolist(), int(delta)
