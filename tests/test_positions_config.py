"""scheme("auto"): family, rule and parameters from a model's config.json, against transformers' own config classes and rules."""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sessiontree import PositionError, UnknownScheme, Unsupported
from sessiontree.positions import PositionScheme, known_schemes, scheme
from sessiontree.positions.config import ENGINES
from tests.histories import History, split
from tests.rope_oracle import as_ids, draw_history, grids_of, seconds_of, without_lookalikes

#: Model types of transformers 5.24 and the family each has the rule of.
FAMILY: Mapping[str, str] = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "paddleocr_vl": "paddleocr_vl",
    "ernie4_5_vl_moe": "ernie4_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
    "cosmos3_omni": "qwen3_vl",
    "cosmos3_edge": "qwen3_vl",
    "cohere_compass": "qwen3_vl",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm46v": "glm4v",
    "glm_ocr": "glm4v",
    "qwen2_5_omni": "qwen2_5_omni",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe": "qwen3_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
    "hy_v4_vl": "hy_v4_vl",
    "hunyuan_vl": "hunyuan_vl",
    "minicpmv4_7": "minicpmv4_7",
    "glm_image": "glm_image",
}
#: Known by the names of their own repositories; transformers has no class for them.
ELSEWHERE = ("Keye", "KeyeVL1_5", "ernie4_5_moe_vl", "isaac")
TEXT = (
    *("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "glm4_moe", "gpt_oss", "granite", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "minimax", "mistral", "mixtral"),
    *("olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2"),
)
#: Parameters that no config says.
UNSAID = {"max_position_limit", "time", "split_frames", "wrapped"}
#: What the saved configs of the omni models have and transformers' config classes do not, although its rules read the first.
OMNI_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
VISION = ("spatial_merge_size", "temporal_merge_size", "tokens_per_second")


def config_of(model_type: str) -> Any:
    """The config object of a model type, as its class makes it, with the sections of HunYuan-VL's rope, which have no default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    if model_type == "hunyuan_vl":
        config.text_config.rope_parameters["mrope_section"] = [16, 16, 16, 16]
    return config


def said(config: Any, name: str) -> Any:
    """What a config object itself says of a parameter, None where it has none."""
    config = getattr(config, "thinker_config", config)
    if name in OMNI_IDS and config.model_type.endswith("_thinker"):
        return getattr(config, name, OMNI_IDS[name])
    if name == "num_axes":
        return len(config.text_config.rope_parameters["mrope_section"])
    if name == "n_window":
        return config.audio_config.n_window
    if name in VISION:
        return getattr(config.vision_config, name)
    return getattr(config, name, None)


def told(config: Any, name: str, value: Any) -> None:
    """Let a config object say so."""
    config = getattr(config, "thinker_config", config)
    if name == "num_axes":
        config.text_config.rope_parameters["mrope_section"] = [8] * value
    elif name == "n_window":
        config.audio_config.n_window = value
    elif name in VISION:
        setattr(config.vision_config, name, value)
    else:
        setattr(config, name, value)


def dicts_of(config: Any) -> list[dict[str, Any]]:
    """What a config is, what save_pretrained writes of it, and that through JSON."""
    return [
        config.to_dict(),
        config.to_diff_dict(),
        json.loads(config.to_json_string()),
        json.loads(json.dumps(config.to_diff_dict())),
    ]


def engines_of(family: str) -> list[tuple[str, str]]:
    return [(engine, rule) for engine, rule in ENGINES.items() if f"{family}@{rule}" in known_schemes()]


# --- Families and parameters ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model_type", FAMILY)
def test_what_a_config_says(model_type: str) -> None:
    config = config_of(model_type)
    family = FAMILY[model_type]
    assert engines_of(family)
    for engine, rule in engines_of(family):
        for content in dicts_of(config):
            before = json.dumps(content, default=repr)
            found = scheme("auto", config=content, engine=engine)
            assert found.name == f"{family}@{rule}"
            for name in type(found).defaults:
                if name not in UNSAID:
                    assert found.params.get(name) == said(config, name), name
            assert json.dumps(content, default=repr) == before
            assert found == scheme(found.name, **found.params)
        assert scheme("auto", config=config, engine=engine) == found  # the object itself


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_a_config_leaves_out_is_its_class_default(model_type: str) -> None:
    """An old config.json may hold next to nothing."""
    config = config_of(model_type)
    bare: dict[str, Any] = {"model_type": model_type}
    if model_type == "hunyuan_vl":
        bare["text_config"] = {"rope_parameters": {"mrope_section": [1, 1, 1, 1]}}
    contents = [bare, {**bare, "vision_config": {}, "audio_config": {}}]
    if hasattr(config, "thinker_config"):
        contents.append({**bare, "thinker_config": {}})
    for content in contents:
        found = scheme("auto", config=content, engine="transformers")
        for name in type(found).defaults:
            if name not in UNSAID:
                assert found.params.get(name) == said(config, name), name


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_a_config_says_otherwise(model_type: str) -> None:
    """Every parameter, changed in the config object, comes through; and what a caller gives goes before it."""
    family = FAMILY[model_type]
    engine = engines_of(family)[0][0]
    known = scheme("auto", config=config_of(model_type).to_dict(), engine=engine)
    for number, name in enumerate(sorted(set(type(known).defaults) - UNSAID)):
        config = config_of(model_type)
        if said(config, name) is None and not (name == "num_axes" or family == "minicpmv4_7"):
            continue
        value: Any = 7 + number
        if name == "downsample_mode":
            value = "4x"
        if name == "num_axes":
            value = 3
        told(config, name, value)
        assert said(config, name) == value
        for content in dicts_of(config):
            found = scheme("auto", config=content, engine=engine)
            assert found.params[name] == value
            assert {key for key in found.params if found.params[key] != known.params.get(key)} == {name}
            given: Any = {"downsample_mode": "16x", "num_axes": 5}.get(name, 3)
            own = scheme("auto", config=content, engine=engine, **{name: given})
            assert own.params[name] == given
            assert own == scheme(found.name, **{**found.params, name: given})
    limited = scheme("auto", config=config_of(model_type), engine=engine, max_position_limit=99)
    assert (limited.max_position_limit, known.max_position_limit) == (99, 2**24)
    with pytest.raises(PositionError) as caught:
        scheme("auto", config=config_of(model_type), engine=engine, no_such=1)
    assert caught.value.parameter == "no_such"


def test_a_thinkers_config_lies_inside_its_models() -> None:
    for outer, inner in (("qwen2_5_omni", "qwen2_5_omni_thinker"), ("qwen3_omni_moe", "qwen3_omni_moe_thinker")):
        config = config_of(outer)
        told(config, "position_id_per_seconds", 13)
        told(config, "spatial_merge_size", 3)
        whole = scheme("auto", config=config.to_diff_dict(), engine="transformers")
        assert whole == scheme("auto", config=config.thinker_config.to_diff_dict(), engine="transformers")
        assert whole == scheme("auto", config=config.thinker_config, engine="transformers")
        assert (whole.params["position_id_per_seconds"], whole.params["spatial_merge_size"]) == (13, 3)
        misplaced = {**config.to_dict(), "position_id_per_seconds": 99}
        assert scheme("auto", config=misplaced, engine="transformers") == whole
        assert config.thinker_config.model_type == inner


@pytest.mark.parametrize("model_type", TEXT)
def test_text_models(model_type: str) -> None:
    """Their positions are indexes: transformers has no other rule for them."""
    config = config_of(model_type)
    for engine, rule in ENGINES.items():
        for content in (config.to_dict(), config.to_diff_dict(), {"model_type": model_type}):
            assert scheme("auto", config=content, engine=engine) == scheme(f"text@{rule}")
    modeling = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    assert not any(hasattr(found, "get_rope_index") for found in vars(modeling).values())
    assert "mrope_section" not in (getattr(config, "rope_parameters", None) or {})


def test_models_with_code_of_their_own() -> None:
    for model_type in ("Keye", "KeyeVL1_5"):
        content: dict[str, Any] = {"model_type": model_type, "image_token_id": 5, "vision_config": {"spatial_merge_size": 3}}
        found = scheme("auto", config=content, engine="sglang")
        assert (found.name, found.params["image_token_id"], found.params["spatial_merge_size"]) == ("qwen3_vl@sglang", 5, 3)
    ernie: dict[str, Any] = {"model_type": "ernie4_5_moe_vl", "spatial_conv_size": 4, "temporal_conv_size": 3}
    found = scheme("auto", config=ernie, engine="vllm")
    assert found.name == "ernie4_5_vl@vllm"
    assert (found.params["spatial_merge_size"], found.params["temporal_merge_size"]) == (4, 3)
    for engine in ENGINES:
        with pytest.raises(Unsupported, match="a later image moves"):
            scheme("auto", config={"model_type": "isaac"}, engine=engine)
    for model_type in ("hunyuan_vl", "hy_v4_vl"):
        for engine in ("sglang", "vllm"):
            with pytest.raises(Unsupported, match="neither"):
                scheme("auto", config=config_of(model_type), engine=engine)
    for model_type, engine in (("glm_image", "vllm"), ("qwen2_5_omni", "sglang"), ("minicpmv4_7", "sglang")):
        with pytest.raises(Unsupported) as caught:
            scheme("auto", config=config_of(model_type), engine=engine)
        assert vars(caught.value)["scheme"] == f"{FAMILY[model_type]}@{ENGINES[engine]}"


# --- Refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model_type", ["", "llava", "Qwen2_VL", "qwen2_vl_text", "video_llama_3", None, 7, ["qwen2_vl"], {"a": 1}], ids=str
)
def test_an_unknown_model_type_says_what_is_known(model_type: Any) -> None:
    for content in ({"model_type": model_type}, {"model_type": model_type, "text_config": {"model_type": "qwen2"}}):
        with pytest.raises(UnknownScheme) as caught:
            scheme("auto", config=content, engine="vllm")
        assert caught.value.name == model_type
        assert caught.value.known == tuple(sorted({*FAMILY, *TEXT, *ELSEWHERE}))
        assert all(known in str(caught.value) for known in caught.value.known)


def test_a_config_without_a_model_type() -> None:
    for content in ({}, {"architectures": ["Qwen2VLForConditionalGeneration"]}):
        with pytest.raises(UnknownScheme):
            scheme("auto", config=content, engine="vllm")


@pytest.mark.parametrize("engine", ["", "hf4", "SGLang", "tgi", "vllm "])
def test_an_unknown_engine_says_what_is_known(engine: str) -> None:
    with pytest.raises(UnknownScheme) as caught:
        scheme("auto", config={"model_type": "qwen2_vl"}, engine=engine)
    assert caught.value.known == ("hf5", "transformers", "sglang", "vllm")
    assert caught.value.name == engine


@pytest.mark.parametrize(
    "content", ["qwen2_vl", b"{}", 3, ["model_type", "qwen2_vl"], '{"model_type": "qwen2_vl"}', {1, 2}], ids=repr
)
def test_a_config_is_a_mapping(content: Any) -> None:
    with pytest.raises(TypeError, match="mapping"):
        scheme("auto", config=content, engine="vllm")


def test_what_goes_with_auto() -> None:
    content = {"model_type": "qwen2_vl"}
    for given in ({}, {"config": content}, {"engine": "vllm"}, {"config": None, "engine": None}):
        with pytest.raises(TypeError, match="config= and engine="):
            scheme("auto", **given)
    for wrong in ({"config": content}, {"engine": "vllm"}, {"config": content, "engine": "vllm"}):
        with pytest.raises(TypeError, match="auto"):
            scheme("qwen2_vl@hf5", **wrong)
    for engine in (3, b"vllm", ["vllm"], True):
        with pytest.raises(TypeError):
            scheme("auto", config=content, engine=engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("spatial_merge_size", "2", TypeError),
        ("spatial_merge_size", 0, PositionError),
        ("spatial_merge_size", [2], TypeError),
        ("spatial_merge_size", 2.5, TypeError),
        ("tokens_per_second", -1, PositionError),
        ("tokens_per_second", True, TypeError),
        ("image_token_id", -1, PositionError),
        ("image_token_id", "<image>", TypeError),
    ],
)
def test_a_config_with_values_that_cannot_be(name: str, value: Any, error: type[Exception]) -> None:
    content = config_of("qwen2_5_vl").to_dict()
    (content["vision_config"] if name in VISION else content)[name] = value
    with pytest.raises(error):
        scheme("auto", config=content, engine="vllm")


def test_sections_that_are_none() -> None:
    """A section that is missing or is no mapping says nothing; HunYuan-VL's rope is the only one that has to be there."""
    empty: tuple[Any, ...] = (None, 3, "x", [])
    for section in empty:
        content: dict[str, Any] = {
            "model_type": "qwen2_5_vl",
            "vision_config": section,
            "thinker_config": section,
            "image_token_id": None,
        }
        assert scheme("auto", config=content, engine="vllm").params["tokens_per_second"] == 4
    hunyuan: dict[str, Any] = {"model_type": "hunyuan_vl"}
    texts: list[dict[str, Any]] = [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"mrope_section": None}},
        {"rope_scaling": {"mrope_section": 4}},
    ]
    for text in texts:
        for content in ({**hunyuan, "text_config": text}, {**hunyuan, **text}):
            with pytest.raises(PositionError, match="mrope_section") as caught:
                scheme("auto", config=content, engine="hf5")
            assert caught.value.parameter == "num_axes"
    for rope in ("rope_parameters", "rope_scaling"):
        for key in ("mrope_section", "xdrope_section"):
            for content in ({**hunyuan, rope: {key: [1] * 3}}, {**hunyuan, "text_config": {rope: {key: (1, 2, 3)}}}):
                assert scheme("auto", config=content, engine="hf5").num_axes == 3


# --- The rules that model types share ---------------------------------------------------------------------------------
def model_shell(config: Any) -> Any:
    """An object with the position methods of a config's model, and with that config."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    classes = [found for found in vars(modeling).values() if inspect.isclass(found) and hasattr(found, "get_rope_index")]
    assert classes, "no rule in transformers"
    rules = {found.get_rope_index for found in classes}
    assert len(rules) <= 2  # that of the model, and one that passes it on
    shell: Any = classes[0].__new__(classes[0])
    shell.config = getattr(config, "thinker_config", config)
    return shell


def get_rope_index(config: Any, found: History) -> tuple[NDArray[Any], float]:
    """The table and the delta that a config's model gives a history."""
    shell = model_shell(config)
    items, count = found.items, len(found.tokens)
    ids = as_ids(without_lookalikes(found.tokens, found.params, items))
    parameters = inspect.signature(shell.get_rope_index).parameters
    types = torch.zeros(1, count, dtype=torch.int32)
    for item in items:
        for offset, length in item.spans:
            types[0, offset : offset + length] = 1 if item.modality == "image" else 2
    if found.family == "minicpmv4_7":
        sizes = [[size for item in items if item.modality == kind for size in item.target_sizes] for kind in ("image", "video")]
        positions, delta = shell.get_rope_index(ids, types, *[torch.tensor(kind) if kind else None for kind in sizes])
        return positions[:, 0].numpy(), delta.reshape(()).item()
    lengths = [item.audio_feature_length for item in items if item.audio_feature_length is not None]
    seconds = seconds_of(items) if found.family in ("qwen2_5_vl", "qwen2_5_omni", "qwen3_omni") else None
    given: dict[str, Any] = {
        "mm_token_type_ids": types,
        "image_grid_thw": grids_of(items, "image"),
        "video_grid_thw": grids_of(items, "video"),
        "second_per_grid_ts": seconds,
        "second_per_grids": seconds,
        "attention_mask": torch.ones_like(ids) if "audio_seqlens" in parameters else None,
        "use_audio_in_video": found.has_audio_in_video,
        "audio_seqlens": torch.tensor(lengths) if lengths else None,
    }
    shell.spatial_merge_size = found.params.get("spatial_merge_size")
    with torch.no_grad():
        positions, delta = shell.get_rope_index(ids, **{name: given[name] for name in parameters if name in given})
    return positions[:, 0].numpy(), delta.reshape(()).item()


@pytest.mark.parametrize("model_type", FAMILY)
def test_a_model_type_has_the_rule_of_its_family(model_type: str) -> None:
    """Random histories by a config's own model and by the scheme that its config.json leads to."""
    family = FAMILY[model_type]
    for number in range(6):
        rng = random.Random(f"{model_type} {number}")
        found = draw_history(rng, family).history
        while not len(found.items) > 0 or len(found.tokens) > 800:
            found = draw_history(rng, family).history
        config = config_of(model_type)
        own: dict[str, Any] = {}
        for name, value in found.params.items():
            if name == "wrapped" or (said(config, name) is None and family != "minicpmv4_7"):
                own[name] = value  # no config says it
            else:
                told(config, name, value)
        assert set(own) <= {"wrapped", "audio_end_token_id", "im_start_id", "im_end_id"}
        positions_of: PositionScheme = scheme("auto", config=config.to_diff_dict(), engine="transformers", **own)
        assert {**positions_of.params, **found.params} == positions_of.params
        state = positions_of.initial_state()
        tables = []
        for turn in split(found, found.cuts):
            table, state = positions_of.extend(state, np.array(turn.tokens, np.int32), turn.media)
            tables.append(table)
        theirs, delta = get_rope_index(config, found)
        assert np.array_equal(np.concatenate(tables, axis=1), theirs)
        assert positions_of.mrope_position_delta(state) == delta
