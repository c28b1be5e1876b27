"""Models of transformers in small: random float64 weights that set wrong positions apart, one for each family of schemes.

With weights of the usual size all logits are nearly alike and a wrong position changes no token; 0.2 sets them apart, and so does
the low ``rope_theta`` for the axes that turn slowly. Features come in place of pixels, by the identity of their item.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import transformers

from sessiontree import MediaItem
from sessiontree.positions import PositionScheme, scheme

AUDIO, IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = 49, 50, 51, 52, 53, 54, 55
SLICE_START, SLICE_END, NEWLINE = 60, 61, 62
VOCABULARY: Final = 128
WIDTH: Final = 64
SPREAD: Final = 0.2
IDS: Final = {"image_token_id": IMAGE, "video_token_id": VIDEO}
DELIMITERS: Final = {
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}
MARKERS: Final = {
    "image_start_id": START,
    "image_end_id": END,
    "slice_start_id": SLICE_START,
    "slice_end_id": SLICE_END,
    "newline_id": NEWLINE,
}
OMNI: Final = {
    "audio_token_id": AUDIO,
    "vision_start_token_id": START,
    "audio_start_token_id": VIDEO_START,
    "position_id_per_seconds": 25,
}


def text_config(*sections: int, **more: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    if sections:
        rope["mrope_section"] = list(sections)
    if "partial_rotary_factor" in more:
        rope["partial_rotary_factor"] = more.pop("partial_rotary_factor")
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": rope,
        **more,
    }


def _tower(**more: Any) -> dict[str, Any]:
    """A vision tower, in the words of most families."""
    return {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "initializer_range": SPREAD, **more}


def _siglip(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, **more}


_EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_AUDIO: Final = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "output_dim": WIDTH,
}


def _qwen2_5_vl() -> Any:
    tower = _tower(out_hidden_size=WIDTH, fullatt_block_indexes=[0], tokens_per_second=2)
    return transformers.Qwen2_5_VLConfig(text_config=text_config(2, 3, 3), vision_config=tower, vision_start_token_id=START, **IDS)


def _qwen3_vl() -> Any:
    tower = _tower(out_hidden_size=WIDTH, depth=2, patch_size=14, deepstack_visual_indexes=[0], num_position_embeddings=16)
    text = text_config(2, 3, 3, head_dim=16)
    return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, vision_start_token_id=START, **IDS)


def _qwen2_vl() -> Any:
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(text_config=text_config(2, 3, 3), vision_config=tower, **IDS)


def _glm4v() -> Any:
    text = text_config(2, 3, 3, partial_rotary_factor=1.0)
    tower = _tower(out_hidden_size=WIDTH, image_size=56, patch_size=14)
    return transformers.Glm4vConfig(text_config=text, vision_config=tower, **IDS)


def _ernie4_5_vl() -> Any:
    text = text_config(
        3,
        3,
        2,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=[32, 16],
        mlp_layer_types=["dense", "sparse"],
    )
    return transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=_tower(), **IDS)


def _paddleocr_vl() -> Any:
    tower = _siglip(image_size=56, patch_size=14)
    return transformers.PaddleOCRVLConfig(text_config=text_config(2, 3, 3, head_dim=16), vision_config=tower, **IDS)


def _hy_v4_vl() -> Any:
    text = text_config(
        4,
        2,
        2,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        qk_head_dim=24,
        v_head_dim=16,
        head_dim=16,
        index_head_dim=24,
        index_n_heads=2,
        index_topk=WIDTH,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        hc_mult=2,
        layer_types=["indexed_attention"] * 2,
        indexer_types=["full", "shared"],
        mlp_layer_types=["dense", "sparse"],
    )
    tower = _siglip(num_key_value_heads=2, out_hidden_size=WIDTH, max_image_size=64)
    return transformers.HYV4VLConfig(text_config=text, vision_config=tower, **IDS)


def _hunyuan_vl() -> Any:
    tower = _siglip(out_hidden_size=WIDTH)
    text = text_config(2, 2, 2, 2, head_dim=16)
    return transformers.HunYuanVLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE)


def _minicpmv4_7() -> Any:
    text = text_config(
        2,
        3,
        3,
        model_type="qwen3_5_text",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        partial_rotary_factor=1.0,
    )
    tower = _siglip(image_size=56, patch_size=14)
    return transformers.MiniCPMV4_7Config(text_config=text, vision_config=tower, **IDS, **MARKERS)


def _omni(config: Any, **text: Any) -> Any:
    tower = _tower(out_hidden_size=WIDTH, **({"deepstack_visual_indexes": []} if text else {"fullatt_block_indexes": [0]}))
    audio = {**_AUDIO, **({"downsample_hidden_size": 8} if text else {})}
    made = config(text_config=text_config(2, 3, 3, **text), vision_config=tower, audio_config=audio, **IDS, audio_token_id=AUDIO)
    made.vision_start_token_id, made.audio_start_token_id = START, VIDEO_START
    return made


_CONFIGS: Final[Mapping[str, Callable[[], Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen2_vl": _qwen2_vl,
    "glm4v": _glm4v,
    "ernie4_5_vl": _ernie4_5_vl,
    "paddleocr_vl": _paddleocr_vl,
    "hy_v4_vl": _hy_v4_vl,
    "hunyuan_vl": _hunyuan_vl,
    "minicpmv4_7": _minicpmv4_7,
    "qwen2_5_omni": lambda: _omni(transformers.Qwen2_5OmniThinkerConfig),
    "qwen3_omni": lambda: _omni(transformers.Qwen3OmniMoeThinkerConfig, head_dim=16, num_experts=4, **_EXPERTS),
}
_MODELS: Final = {
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen2_vl": "Qwen2VL",
    "glm4v": "Glm4v",
    "ernie4_5_vl": "Ernie4_5_VLMoe",
    "paddleocr_vl": "PaddleOCRVL",
    "hy_v4_vl": "HYV4VL",
    "hunyuan_vl": "HunYuanVL",
    "minicpmv4_7": "MiniCPMV4_7",
    "qwen2_5_omni": "Qwen2_5OmniThinker",
    "qwen3_omni": "Qwen3OmniMoeThinker",
}
FAMILIES: Final = tuple(_MODELS)
_PARAMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2_5_vl": {"tokens_per_second": 2, "vision_start_token_id": START},
    "qwen3_vl": {"vision_start_token_id": START},
    "ernie4_5_vl": DELIMITERS,
    "minicpmv4_7": MARKERS,
    "qwen2_5_omni": OMNI,
    "qwen3_omni": OMNI,
}


def tiny_scheme(family: str, rule: str = "hf5") -> PositionScheme:
    """The scheme of a tiny model."""
    params = {**IDS, **_PARAMS.get(family, {})}
    if family == "hunyuan_vl":
        del params["video_token_id"]
    return scheme(f"{family}@{rule}", **params)


@cache
def tiny_model(family: str) -> Any:
    """A model of the family, float64, in eval mode."""
    config = _CONFIGS[family]()
    config._experts_implementation = "eager"  # the other has no float64
    return grown(getattr(transformers, f"{_MODELS[family]}ForConditionalGeneration"), config)


@cache
def tiny_text_model() -> Any:
    return grown(transformers.LlamaForCausalLM, transformers.LlamaConfig(**text_config()))


def grown(model: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = model(config).double().eval()
        for name, weight in made.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                torch.nn.init.normal_(weight, std=SPREAD)
    return made.requires_grad_(False)


def identity(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def picture(positions_of: PositionScheme, name: str, offset: int, height: int, width: int) -> MediaItem:
    """An image of height x width merged patches at ``offset``, with as many placeholders as its family gives it."""
    if positions_of.family == "minicpmv4_7":
        return MediaItem("image", identity(name), [(offset, height * width)], target_sizes=[(4 * height, 4 * width)])
    item = MediaItem("image", identity(name), [(offset, 1)], (1, 2 * height, 2 * width))
    return item.with_spans([(offset, positions_of.num_placeholders(item))])


def clip(positions_of: PositionScheme, name: str, offset: int, between: int) -> MediaItem:
    """A video of two frames (four where two are merged into one), 1 x 2 merged patches each, ``between`` tokens between those that
    have spans of their own."""
    merged = positions_of.family == "ernie4_5_vl"
    item = MediaItem("video", identity(name), [(offset, 1)], (4 if merged else 2, 2, 4), 1.0)
    count = positions_of.num_placeholders(item)
    if positions_of.per_frame:
        return item.with_spans([(offset, count // 2), (offset + count // 2 + between, count // 2)])
    return item.with_spans([(offset, count)])


def features_of(item: MediaItem, rows: int) -> torch.Tensor:
    """What an encoder might make of an item: (rows, WIDTH) float64, the same for the same identity."""
    generator = torch.Generator().manual_seed(int.from_bytes(item.identity[:4], "big"))
    return torch.randn((rows, WIDTH), generator=generator, dtype=torch.float64)


def encoded(model: Any, items: Sequence[MediaItem]) -> dict[str, Any]:
    """``mm_encoder_outputs`` of items, in this order."""
    module = type(model).__module__
    output: Any = transformers.modeling_outputs.BaseModelOutputWithPooling
    if "qwen3_vl" in module or "qwen3_omni" in module:
        output = importlib.import_module(module).BaseModelOutputWithDeepstackFeatures
    kinds = {"image": "image", "video": "image" if "glm4v" in module else "video", "audio": "audio"}
    outputs = {}
    for modality in ("image", "video"):
        features = [features_of(item, item.num_placeholders) for item in items if kinds[item.modality] == modality]
        more = {}
        if "Deepstack" in output.__name__:
            more = {"deepstack_features": [[feature / 2 for feature in features]] if "qwen3_vl" in module else []}
        if features:
            outputs[modality] = output(pooler_output=features, **more)
    return {"mm_encoder_outputs": outputs} if outputs else {}


def grids(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """What a model needs to compute positions on its own."""
    if items and items[0].target_sizes:
        return {"target_sizes": torch.tensor([item.target_sizes[0] for item in items])}
    shown = {modality: [item.grid_thw for item in items if item.modality == modality] for modality in ("image", "video")}
    return {f"{modality}_grid_thw": torch.tensor(grid) for modality, grid in shown.items() if grid}
