"""Which scheme a model needs, from its ``config.json``.

Model types and the names and defaults of their parameters are those of the released sources of transformers 5.24: a saved
config leaves out what is its class's default. Whether a model type shares a family's rule was read from there, line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from sessiontree.errors import PositionError, UnknownScheme
from sessiontree.frozen import checked_text

ENGINES: Final = {"hf5": "hf5", "transformers": "hf5", "sglang": "sglang", "vllm": "vllm"}
_TEXT: Final = """
    cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss granite
    hunyuan_v1_dense hunyuan_v1_moe llama minimax mistral mixtral olmo2 olmo3 phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next
    smollm3 starcoder2
"""


class _Model(NamedTuple):
    """``family``, and what its config class says where a config says nothing."""

    family: str
    defaults: Mapping[str, Any]


def _qwen(family: str, first: int = 151652, pads: int = 151655, **more: int) -> _Model:
    ids = {"vision_start_token_id": first, "vision_end_token_id": first + 1, "image_token_id": pads, "video_token_id": pads + 1}
    return _Model(family, {"spatial_merge_size": 2, **ids, **more})


def _glm(image: int, start: int, video_start: int) -> _Model:
    return _Model("glm4v", {"spatial_merge_size": 2, **_delimited(image, image + 1, start, video_start)})


def _delimited(image: int, video: int, start: int, video_start: int) -> dict[str, int]:
    return {
        "image_token_id": image,
        "video_token_id": video,
        "image_start_token_id": start,
        "image_end_token_id": start + 1,
        "video_start_token_id": video_start,
        "video_end_token_id": video_start + 1,
    }


_ERNIE: Final = _Model(
    "ernie4_5_vl", {"spatial_merge_size": 2, "temporal_merge_size": 2, **_delimited(100295, 103367, 101304, 101306)}
)
_OMNI_2_5: Final = _Model(
    "qwen2_5_omni",
    {
        "spatial_merge_size": 2,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "audio_token_id": 151646,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "audio_start_token_id": 151647,
        "audio_end_token_id": 151648,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    },
)
_OMNI_3: Final = _Model(
    "qwen3_omni",
    {
        "spatial_merge_size": 2,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "audio_token_id": 151646,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "audio_start_token_id": 151647,
        "position_id_per_seconds": 25,
        "n_window": 50,
    },
)
_MODELS: Final[Mapping[str, _Model]] = {
    **dict.fromkeys(_TEXT.split(), _Model("text", {})),
    "qwen2_vl": _qwen("qwen2_vl"),
    "qwen2_5_vl": _qwen("qwen2_5_vl", tokens_per_second=4),
    "paddleocr_vl": _Model(
        "paddleocr_vl",
        {
            "spatial_merge_size": 2,
            "image_token_id": 100295,
            "video_token_id": 100296,
            "vision_start_token_id": 101305,
            "vision_end_token_id": 101306,
        },
    ),
    "ernie4_5_vl_moe": _ERNIE,
    "ernie4_5_moe_vl": _ERNIE,  # as its own repository names it
    "qwen3_vl": _qwen("qwen3_vl"),
    "qwen3_vl_moe": _qwen("qwen3_vl"),
    "qwen3_5": _qwen("qwen3_vl", 248053, 248056),
    "qwen3_5_moe": _qwen("qwen3_vl", 248053, 248056),
    "qwen4_exp": _qwen("qwen3_vl", 248053, 248056),
    "cosmos3_omni": _qwen("qwen3_vl"),
    "cosmos3_edge": _Model(
        "qwen3_vl",
        {
            "spatial_merge_size": 2,
            "image_token_id": 19,
            "video_token_id": 18,
            "vision_start_token_id": 20,
            "vision_end_token_id": 21,
        },
    ),
    "cohere_compass": _qwen("qwen3_vl", 255028, 255031),
    "Keye": _Model("qwen3_vl", {"spatial_merge_size": 2}),
    "KeyeVL1_5": _Model("qwen3_vl", {"spatial_merge_size": 2}),
    "glm4v": _glm(151343, 151339, 151341),
    "glm4v_moe": _glm(151363, 151339, 151341),
    "glm46v": _glm(151343, 151339, 151361),
    "glm_ocr": _glm(59280, 59256, 59258),
    "qwen2_5_omni": _OMNI_2_5,
    "qwen2_5_omni_thinker": _OMNI_2_5,
    "qwen3_omni_moe": _OMNI_3,
    "qwen3_omni_moe_thinker": _OMNI_3,
    "hy_v4_vl": _Model("hy_v4_vl", {"spatial_merge_size": 2, "image_token_id": 120120, "video_token_id": 120124}),
    "hunyuan_vl": _Model(
        "hunyuan_vl", {"spatial_merge_size": 2, "image_token_id": 120120, "im_start_id": 120118, "im_end_id": 120119}
    ),
    "minicpmv4_7": _Model("minicpmv4_7", {"downsample_mode": "16x"}),
    "glm_image": _Model("glm_image", {"image_token_id": 167855, "image_start_token_id": 16384, "image_end_token_id": 16385}),
    "isaac": _Model("isaac", {}),
}
# Where a config has what a scheme calls by another name, or keeps deeper down; everything else it has under the same name.
_PLACES: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "image_token_id": (("image_token_id",), ("image_token_index",)),
    "video_token_id": (("video_token_id",), ("video_token_index",)),
    "audio_token_id": (("audio_token_id",), ("audio_token_index",)),
    "spatial_merge_size": (("vision_config", "spatial_merge_size"), ("spatial_conv_size",)),
    "temporal_merge_size": (("vision_config", "temporal_merge_size"), ("temporal_conv_size",)),
    "tokens_per_second": (("vision_config", "tokens_per_second"),),
    "n_window": (("audio_config", "n_window"),),
}
_SECTIONS: Final = tuple(
    (*outer, rope, section)
    for outer in (("text_config",), ())
    for rope in ("rope_parameters", "rope_scaling")
    for section in ("mrope_section", "xdrope_section")
)


def scheme_of_config(config: Any, engine: Any, known_parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the scheme that ``config`` needs under ``engine``, and its parameters.

    ``known_parameters``: by family, the parameters it takes. Raises UnknownScheme for a model type or engine that is not known,
    naming those that are; PositionError for a parameter that the config should have and has not.
    """
    if config is None or engine is None:
        raise TypeError('scheme("auto") takes config= and engine=')
    rule = ENGINES.get(checked_text(engine, "engine"))
    if rule is None:
        raise UnknownScheme(f"no engine {engine!r}; known are {', '.join(ENGINES)}", name=engine, known=tuple(ENGINES))
    content = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(content, Mapping):
        raise TypeError(f"a config is a mapping, not {type(config).__name__}")
    model_type = content.get("model_type")
    model = _MODELS.get(model_type) if isinstance(model_type, str) else None
    if model is None:
        raise UnknownScheme(
            f"no position scheme is known for model type {model_type!r}; known are {', '.join(sorted(_MODELS))}",
            name=model_type,
            known=tuple(sorted(_MODELS)),
        )
    inner = content.get("thinker_config")
    if isinstance(inner, Mapping):
        content = inner
    params = {}
    for name in known_parameters.get(model.family, ()):
        value = next(_found(content, _PLACES.get(name, ((name,),))), model.defaults.get(name))
        if value is not None:
            params[name] = value
    if model.family == "hunyuan_vl":
        section = next(_found(content, _SECTIONS), None)
        if not isinstance(section, (list, tuple)):
            raise PositionError("a config of hunyuan_vl says its axes by rope_parameters.mrope_section", parameter="num_axes")
        params["num_axes"] = len(section)
    return f"{model.family}@{rule}", params


def _found(content: Mapping[str, Any], places: tuple[tuple[str, ...], ...]) -> Iterator[Any]:
    """What stands at some places of a nested mapping, where it is not None."""
    for place in places:
        value: Any = content
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield value
