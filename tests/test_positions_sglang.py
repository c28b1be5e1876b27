"""Random histories, turn by turn, against SGLang's own position functions over each of them at once: no difference.

Its code runs on the CPU by way of ``tests/sglang_engine.py``. Held to the golden vectors first. Runs in ``make soak``.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from numpy.typing import NDArray

from sessiontree import MediaItem
from sessiontree.positions import scheme
from tests.histories import History, cases
from tests.rope_oracle import RANDOMS, TEXT, as_ids, draw_history, grids_of, seconds_of, without_lookalikes
from tests.sglang_engine import engine, needs_sglang
from tests.test_positions_transformers import assert_same, described

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "ernie4_5_vl", "paddleocr_vl", "qwen3_vl", "glm4v", "qwen3_omni", "glm_image")
HISTORIES = settings(
    max_examples=2000 if os.environ.get("SESSIONTREE_SOAK") == "1" else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


pytestmark = [pytest.mark.soak, needs_sglang]


class Answer(NamedTuple):
    """Positions of the tokens, the delta after them, and positions planned for tokens to be generated."""

    positions: NDArray[Any]
    delta: float
    plan: NDArray[np.int64]


# SGLang's functions


def rope_index() -> Any:
    return engine("sglang.srt.layers.rotary_embedding.mrope_rope_index")


def glm_image_processor() -> Any:
    return engine("sglang.srt.multimodal.processors.glm_image").GlmImageProcessor


def ask(history: History, tokens: NDArray[np.int32], target_grids: tuple[tuple[int, int, int], ...] = ()) -> Answer:
    """What SGLang gives for these tokens with the items of a history."""
    params, items = history.params, history.items
    images, videos = grids_of(items, "image"), grids_of(items, "video")
    ids = as_ids(without_lookalikes(tokens, params, items))
    count = len(tokens)
    if history.family == "glm_image":
        grids = [item.grid_thw for item in items] + list(target_grids)
        start, end = params["image_start_token_id"], params["image_end_token_id"]
        processor = SimpleNamespace(IMAGE_START_TOKEN_ID=start, IMAGE_END_TOKEN_ID=end)
        compute = glm_image_processor()._compute_glm_image_mrope_positions
        positions, delta = compute(processor, ids[0], torch.tensor(grids, dtype=torch.int64) if grids else None)
        table = positions.numpy()
        return Answer(table[:, :count], delta.item(), table[:, count:])
    if history.family in ("glm4v", "ernie4_5_vl"):
        positions, delta = ask_by_depth(history, ids, images, videos)
    else:
        more = {}
        if history.family == "qwen3_omni":
            more = {name: params[name] for name in ("audio_token_id", "audio_start_token_id", "position_id_per_seconds")}
            lengths = [item.audio_feature_length for item in items if item.modality == "audio"]
            more["audio_seqlens"] = torch.tensor(lengths, dtype=torch.int64) if lengths else None
        scaled = history.family in ("qwen2_5_vl", "qwen3_omni")
        positions, delta = rope_index().get_rope_index(
            params["spatial_merge_size"],
            params["image_token_id"],
            params["video_token_id"],
            params["vision_start_token_id"],
            {"qwen3_omni": "qwen3_omni_moe"}.get(history.family, history.family),
            params.get("tokens_per_second", 1),
            ids,
            images,
            videos,
            seconds_of(items) if scaled else None,
            **more,
        )
    return Answer(positions[:, 0].numpy(), delta.reshape(()).item(), np.empty((3, 0), dtype=np.int64))


def ask_by_depth(history: History, ids: torch.Tensor, images: Any, videos: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Families of which SGLang knows one placeholder id, and an item's modality by what encloses it."""
    params = history.params
    ids = torch.where(ids == params["video_token_id"], params["image_token_id"], ids)
    names = {name: params[name] for name in ("image_token_id", "video_start_token_id", "video_end_token_id")}
    merge = params["spatial_merge_size"]
    if history.family == "glm4v":
        config = SimpleNamespace(**names, vision_config=SimpleNamespace(spatial_merge_size=merge))
        answer = rope_index().get_rope_index_glm4v(ids, config, images, videos, None)
    else:
        temporal = params["temporal_merge_size"]
        config = SimpleNamespace(
            **names, im_patch_id=params["image_token_id"], spatial_conv_size=merge, temporal_conv_size=temporal
        )
        answer = rope_index().get_rope_index_ernie45(ids, config, images, videos)
    positions, delta = answer
    return positions, delta


def whole(positions: NDArray[Any]) -> NDArray[np.int64]:
    """As SGLang hands positions to a model: cast to int64."""
    return positions.astype(np.int64)


# Tests


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_gives_the_vectors(family: str) -> None:
    compared = 0
    for history, table in cases(family, "sglang"):
        answer = ask(history, history.tokens)
        assert np.array_equal(whole(answer.positions), whole(table.positions)), history.note
        assert answer.delta == table.delta
        compared += 1
    assert compared >= 22


@pytest.mark.parametrize("family", FAMILIES)
@HISTORIES
@given(rng=RANDOMS)
def test_turn_by_turn_as_the_whole_history_at_once(family: str, rng: random.Random) -> None:
    history, target_grids = draw_history(rng, family, scanned=True)
    note(described(history))
    answer = ask(history, np.append(history.tokens, np.int32(TEXT)))
    expected = whole(answer.positions)
    positions_of = scheme(f"{family}@sglang", **history.params)
    state = positions_of.initial_state()
    at = 0
    for turn in history.turns():
        mine, state = positions_of.extend(state, np.array(turn.tokens, dtype=np.int32), turn.media)
        assert_same(mine, expected[:, at : at + len(turn.tokens)], at)
        at += len(turn.tokens)
    if target_grids:
        plan = ask(history, history.tokens, target_grids).plan
        assert np.array_equal(positions_of.decode_positions(state, target_grids), plan)
    mine, state = positions_of.extend(state, [TEXT])
    assert_same(mine, expected[:, -1:], at)
    assert positions_of.mrope_position_delta(state) == answer.delta


def test_every_kind_of_item_is_drawn() -> None:
    """What these histories are worth: each modality, parts of items, and text that looks like more."""
    seen: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for family in FAMILIES:
        for seed in range(200):
            history, _ = draw_history(random.Random(seed), family, scanned=True)
            for turn in history.turns():
                seen[family] |= {kind for item in turn.media for kind in kinds(item)}
    assert seen["glm_image"] == {"image", "part"}
    assert seen["qwen3_omni"] == {"image", "video", "audio", "part"}
    assert all(seen[family] == {"image", "video", "part"} for family in FAMILIES if family not in ("glm_image", "qwen3_omni"))


def kinds(item: MediaItem) -> set[str]:
    return {item.modality, *(["part"] if item.unfinished or item.placeholders_before else [])}
