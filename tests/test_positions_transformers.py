"""Random histories, turn by turn, against transformers' own get_rope_index over each of them at once: no difference.

The oracle is held to the golden vectors first, which the same functions gave elsewhere.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from numpy.typing import NDArray

from sessiontree.positions import scheme
from tests.histories import CANVAS_FAMILIES, FRAME_FAMILIES, GOLDEN_FAMILIES, PLACEHOLDERS, History, cases
from tests.rope_oracle import RANDOMS, TEXT, ask, draw_history, rounded_histories

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
HISTORIES = settings(
    max_examples=2000 if SOAK else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_the_oracle_gives_the_vectors(family: str) -> None:
    for history, table in cases(family, "hf5"):
        answer = ask(history)
        assert answer.positions.dtype == np.dtype(table.dtype)
        assert np.array_equal(answer.positions[:, table.columns], table.positions), history.note
        assert answer.delta == table.delta
        if table.decode_positions is not None:
            assert answer.plan is not None
            assert np.array_equal(answer.plan, table.decode_positions)


def described(history: History) -> str:
    params = {name: value for name, value in history.params.items() if not name.endswith("_id")}
    lines = [f"{history.family} {params}", f"{len(history.tokens)} tokens, cut at {list(history.cuts)}"]
    return "\n".join(lines + [repr(item) for item in history.items])


def assert_same(mine: NDArray[np.generic], theirs: NDArray[np.generic], start: int) -> None:
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype
    differing = np.flatnonzero((mine != theirs).any(axis=0))
    if differing.size:
        at = differing[0]
        raise AssertionError(f"{differing.size} columns differ, first token {start + at}: {mine[:, at]}, not {theirs[:, at]}")


def compare(history: History, target_grids: tuple[tuple[int, int, int], ...] = ()) -> None:
    """Positions of every turn, dtype, and after every turn the greatest position and the delta; then where text goes on."""
    family = history.family
    more: dict[str, Any] = {"target_grids": target_grids} if target_grids else {}
    answer = ask(history, np.append(history.tokens, np.int32(TEXT)), **more)
    positions_of = scheme(f"{family}@hf5", **history.params)
    kind = answer.positions.dtype.type
    state = positions_of.initial_state()
    at = 0
    for turn in history.turns():
        mine, state = positions_of.extend(state, np.array(turn.tokens, dtype=np.int32), turn.media)
        assert_same(mine, answer.positions[:, at : at + len(turn.tokens)], at)
        at += len(turn.tokens)
        if at and family != "glm_image":
            greatest = answer.positions[:, :at].max()
            assert state.max_position == greatest
            assert positions_of.mrope_position_delta(state) == kind(kind(greatest + kind(1)) - kind(at))
    assert positions_of.next_position(state) == answer.positions[0, -1]
    if target_grids:
        plan = ask(history, **more).plan
        assert plan is not None
        assert np.array_equal(positions_of.decode_positions(state, target_grids), plan)
    mine, state = positions_of.extend(state, [TEXT])
    assert_same(mine, answer.positions[:, -1:], at)
    assert positions_of.mrope_position_delta(state) == answer.delta


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
@HISTORIES
@given(rng=RANDOMS)
def test_turn_by_turn_as_the_whole_history_at_once(family: str, rng: random.Random) -> None:
    history, target_grids = draw_history(rng, family)
    note(described(history))
    compare(history, target_grids)


def test_fractional_positions_around_powers_of_two() -> None:
    """Each addition of a float32 rounds where the source rounds, whatever a turn ends between."""
    count = 0
    for history in rounded_histories():
        compare(history)
        last = sum(history.items[-1].spans[0])
        compare(replace(history, cuts=(last - 1, last, last + 1) if last - 1 > history.items[-1].spans[0][0] else (last, last + 1)))
        count += 1
    assert count == 640


def kinds(history: History) -> set[str]:
    """What a history has that a rule may trip over."""
    found: set[str] = {item.modality for item in history.items}
    found |= {"audio in video"} if history.has_audio_in_video else set()
    for turn in history.turns():
        found |= {"part" for item in turn.media if item.unfinished or item.placeholders_before}
        found |= {"frames" for item in turn.media if len(item.spans) > 1}
    pads = [history.params[name] for name in PLACEHOLDERS if name in history.params]
    covered = sum(item.num_placeholders for item in history.items)
    found |= {"lookalike"} if int(np.isin(history.tokens, pads).sum()) > covered else set()
    found |= {"end on a delimiter"} if history.tokens[-1] in history.params.values() else set()
    return found


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
def test_every_kind_of_item_is_drawn(family: str) -> None:
    """What the random histories are worth."""
    seen: set[str] = set()
    for seed in range(100):
        seen |= kinds(draw_history(random.Random(seed), family).history)
    expected = {"image", "lookalike", "end on a delimiter"}
    expected |= {"video"} if family not in ("hunyuan_vl", "glm_image") else set()
    expected |= {"audio", "audio in video"} if family in ("qwen2_5_omni", "qwen3_omni") else set()
    expected |= {"part"} if family not in CANVAS_FAMILIES else set()
    expected |= {"frames"} if family in (*FRAME_FAMILIES, *CANVAS_FAMILIES) else set()
    assert seen == expected
