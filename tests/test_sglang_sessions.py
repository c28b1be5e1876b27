"""The session controller beside SGLang 0.5.23's own: the same requests through the same scheduler code, on the CPU.

Where SGLang is right, both give the same ids, positions, delta, offsets and sentinels. Where it is wrong, a test shows what its own
functions make of it, as found, and what is right. Tests are named by the rows of CASES.md.
"""

from __future__ import annotations

import gc
import inspect
import random
import shutil
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from weakref import ref as weak

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_bridge import to_sglang
from engine_bridge.adapters import sglang_media, sglang_sessions
from engine_bridge.adapters.sglang_sessions import CARRIED, REFUSED, SessionTreeController
from sessiontree import MediaItem, SessionStore, Unsupported
from sessiontree.positions import scheme
from tests import reference as ref
from tests.conftest import SOAK
from tests.disk import Disk
from tests.disk_model import fail, let_go, open_on
from tests.histories import without_leading_empties
from tests.reference import Segment
from tests.rope_oracle import RANDOMS, draw_history
from tests.sglang_engine import engine, needs_sglang
from tests.sglang_scheduler import (
    CONTROLLER,
    MESSAGES,
    REQUESTS,
    Engine,
    configured,
    decoded,
    prefilled,
    processed,
    refused,
)
from tests.test_positions_sglang import FAMILIES
from tests.toy import (
    A_IDS,
    A_TABLE,
    IMG,
    VE,
    VID,
    VS,
    Block,
    a_turn,
    grow,
    image,
    new_session,
    reference_scheme,
    reply,
    toy_scheme,
    turn,
    video,
)

pytestmark = needs_sglang
MEDIA_AT_END = [1, VS, IMG, IMG, IMG, IMG]
BOS = 999


@pytest.fixture(autouse=True, scope="module")
def sglang() -> Iterator[None]:
    with configured():
        yield


def theirs(**options: Any) -> Engine:
    made = Engine(**options)
    made.open()
    return made


def ours(tokenizer: Any = None, streaming: bool = False, **options: Any) -> Engine:
    made = Engine(controller(**options), tokenizer)
    made.open(streaming=streaming)
    return made


def controller(**options: Any) -> SessionTreeController:
    return SessionTreeController(**{"scheme": toy_scheme(), **options})


def both(tokenizer: Any = None, streaming: bool = False) -> tuple[Engine, Engine]:
    pair = Engine(None, tokenizer), Engine(controller(), tokenizer)
    for each in pair:
        each.open(streaming=streaming)
    return pair


def seen(request: Any) -> dict[str, Any]:
    """All that a session decides of a request."""
    inputs = request.multimodal_inputs
    items = [] if inputs is None else inputs.mm_items
    return {
        "refused": refused(request) is not None,
        "ids": list(request.origin_input_ids),
        "unpadded": list(request.origin_input_ids_unpadded),
        "items": [(each.modality, each.hash, tuple(each.padding_values()), list(each.offsets)) for each in items],
        "features": [each.feature.tolist() for each in items],
        "positions": prefilled(request).tolist(),
        "next": decoded(request).tolist(),
        "delta": None if inputs is None else (tuple(inputs.mrope_position_delta.shape), inputs.mrope_position_delta.item()),
        "token_ids": None if inputs is None else (inputs.im_token_id, inputs.video_token_id),
        "counts": request.get_mm_token_counts(),
        "salt": (request.cache_salt, request.extra_key),
    }


def frozen(request: Any) -> Any:
    """Everything of a request's history that must not change behind its back."""
    inputs = request.multimodal_inputs
    return (
        list(request.origin_input_ids),
        list(request.origin_input_ids_unpadded),
        None
        if inputs is None
        else (
            [(list(each.offsets), None if each.feature is None else each.feature.tolist()) for each in inputs.mm_items],
            None if inputs.mrope_positions is None else inputs.mrope_positions.tolist(),
            inputs.mrope_position_delta.tolist(),
            inputs.token_modalities and list(inputs.token_modalities),
        ),
    )


# Where SGLang is right: the same


def test_one_line_puts_it_in_place() -> None:
    made = SessionTreeController.configured(scheme=toy_scheme(), strip_bos=False)
    cache = object()
    there = made(cache)
    assert there.tree_cache is cache and not there.strip_bos and made.adjust_mm_offsets is SessionTreeController.adjust_mm_offsets
    original = engine(CONTROLLER)
    for name in ("open", "close", "get", "maybe_reap", "adjust_mm_offsets", "__contains__"):
        mine, their = (inspect.signature(getattr(each, name)) for each in (SessionTreeController, original.SessionController))
        assert [(each.name, each.default) for each in mine.parameters.values()] == [
            (each.name, each.default) for each in their.parameters.values()
        ], name
    session = sglang_sessions.TreeSession
    for name in ("create_req", "finish_req", "abort_req", "is_timed_out"):
        mine, their = (inspect.signature(getattr(each, name)) for each in (session, original.Session))
        assert [*mine.parameters] == [*their.parameters], name
    with pytest.raises(TypeError, match="no option stores"):
        SessionTreeController.configured(stores=1)


Step = tuple[Any, ...]
SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "text": [{"ids": [1, 2, 3]}, {"ids": [4], "after": 0}, {"ids": [5, 6], "after": 1}],
    "a_reply_then_an_image": [{"ids": A_IDS, "blocks": [image()]}, {"ids": A_IDS, "blocks": [image(number=1)], "after": 0}],
    "text_after_an_image": [{"ids": A_IDS, "blocks": [image()]}, {"ids": [7, 7, 7], "after": 0}, {"ids": [7], "after": 1}],
    "an_image_after_text": [{"ids": [1, 2]}, {"ids": A_IDS, "blocks": [image()], "after": 0}],
    "an_image_at_the_end": [{"ids": MEDIA_AT_END, "blocks": [image()]}, {"ids": [7], "after": 0}],
    "the_same_image_twice": [{"ids": A_IDS, "blocks": [image()]}, {"ids": A_IDS, "blocks": [image()], "after": 0}],
    "two_images_in_a_turn": [{"ids": A_IDS + A_IDS, "blocks": [image(), image(number=1)]}, {"ids": [7], "after": 0}],
    "a_video": [{"ids": [1, VS, *[VID] * 12, VE], "blocks": [video()]}, {"ids": A_IDS, "blocks": [image()], "after": 0}],
    "branches": [
        {"ids": A_IDS, "blocks": [image()]},
        {"ids": [4], "after": 0},
        {"ids": A_IDS, "blocks": [image(number=2)], "after": 0},
        {"ids": [5], "after": 1},
        {"ids": [6], "after": 2},
    ],
    "two_roots": [{"ids": A_IDS, "blocks": [image()]}, {"ids": [1, 2]}, {"ids": [3], "after": 1}, {"ids": [4], "after": 0}],
    "without_the_reply": [
        {"ids": A_IDS, "blocks": [image()]},
        {"ids": [7], "after": 0, "drop_previous_output": True},
        {"ids": A_IDS, "blocks": [image(number=1)], "after": 0, "drop_previous_output": True},
    ],
    "offsets_behind_media": [
        {"ids": A_IDS, "blocks": [image()]},
        {"ids": [7], "after": 0, "offset": -1},
        {"ids": [7], "after": 0, "offset": 9},
        {"ids": [7], "after": 0, "offset": 8, "drop_previous_output": True},
        {"ids": [7], "after": 0, "offset": 0},
        {"ids": [7], "after": 0, "offset": 11},
        {"ids": A_IDS, "blocks": [image(number=1)], "after": 0, "offset": 10},
    ],
    "nothing_new": [{"ids": A_IDS, "blocks": [image()]}, {"ids": [], "after": 0}, {"ids": [], "after": 1}],
    "no_reply": [{"ids": [1, 2], "output": []}, {"ids": [3], "after": 0}],
    "regenerated": [
        {"ids": [1, 2]},
        {"ids": [3], "after": 0, "replace": True},
        {"ids": [4], "after": 1, "replace": True, "offset": -1},
    ],
    "refused": [
        {"ids": [1, 2]},
        {"ids": [3], "after": "nobody"},
        {"ids": [3], "after": "nobody", "replace": True},
        {"ids": A_IDS, "after": 0},
    ],
    "empty": [{"ids": []}],
}


def played(there: Engine, steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A scenario; ``after`` names a step by number."""
    answers = []
    for number, step in enumerate(steps):
        given = {**step}
        ids, blocks, output = given.pop("ids"), given.pop("blocks", ()), given.pop("output", [8, 9])
        if isinstance(given.get("after"), int):
            given["after"] = f"r{given['after']}"
        request = there.send(f"r{number}", ids, *blocks, **given)
        answers.append(seen(request) if refused(request) is None else {"refused": True, "ids": list(request.origin_input_ids)})
        if refused(request) is None:
            there.generate(request, output)
        else:
            request.update_finish_state()
    return answers


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_where_sglang_is_right(name: str) -> None:
    their, our = (played(each, SCENARIOS[name]) for each in both())
    assert our == their


@pytest.mark.parametrize("name", ["text", "a_reply_then_an_image", "text_after_an_image", "a_video"])
def test_streaming_is_the_same_where_sglang_is_right(name: str) -> None:
    steps = [{key: value for key, value in step.items() if key != "after"} for step in SCENARIOS[name]]
    their, our = (played(each, steps) for each in both(streaming=True))
    assert our == their
    assert [answer["refused"] for answer in our] == [False] * len(steps)


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Histories in which SGLang is right: no cut before the end of the last item, no rid twice, no aborts of branches."""
    steps: list[dict[str, Any]] = []
    lengths: list[tuple[int, int, int]] = []  # of each: prompt, context, where its last item ends
    for number in range(draw(st.integers(1, 7))):
        step: dict[str, Any] = {"output": draw(st.lists(st.integers(5, 50), max_size=3))}
        before = last = 0
        if number and draw(st.integers(0, 4)):
            after = step["after"] = draw(st.integers(0, number - 1))
            prompt, before, last = lengths[after]
            if draw(st.booleans()):
                step["drop_previous_output"] = True
                before = prompt
            kept = draw(st.integers(max(last, 1), before))
            if draw(st.booleans()):
                step["offset"] = kept - before if kept < before and draw(st.booleans()) else kept
                before = kept
        ids, blocks = [], []
        for _ in range(draw(st.integers(0, 2))):
            ids += draw(st.lists(st.integers(5, 50), max_size=3))
            block = draw(st.sampled_from([image(), image(8, 4, 1), image(2, 6, 2), video(2, 4, 4, 3)]))
            ids += [VS, *[block.fill] * block.num_tokens]
            blocks.append(block)
            last = before + len(ids)
            ids += [VE] * draw(st.integers(0, 1))
        ids += draw(st.lists(st.integers(5, 50), min_size=0 if before + len(ids) else 1, max_size=3))
        salt = draw(st.sampled_from([None, None, "x"]))
        steps.append({**step, "ids": ids, "blocks": blocks, "cache_salt": salt, "extra_key": draw(st.sampled_from([None, "k"]))})
        lengths.append((before + len(ids), before + len(ids) + len(step["output"]), last))
    return steps


@settings(max_examples=400 if SOAK else 40)
@given(steps=requests())
def test_any_history_is_the_same_where_sglang_is_right(steps: list[dict[str, Any]]) -> None:
    their, our = (played(each, steps) for each in both())
    assert our == their
    assert not any(answer["refused"] for answer in our)


# Where it is wrong: found, and right


def test_c05_an_offset_before_an_image_leaves_nothing_of_it() -> None:
    answers = []
    for there in both():
        there.turn("a", [1, VS, IMG, IMG, IMG, IMG, 3], image(), output=[4, 5])
        answers.append(there.send("b", [7, 8, 9], after="a", offset=2))
    found, right = answers
    assert list(found.origin_input_ids) == list(right.origin_input_ids) == [1, VS, 7, 8, 9]
    assert [each.offsets for each in found.multimodal_inputs.mm_items] == [[(2, 5)]]  # over text
    assert found.multimodal_inputs.mrope_position_delta.item() == -2
    assert prefilled(found)[0].tolist() == [0, 1, 2, 2, 2]
    assert right.multimodal_inputs is None and right.get_mm_token_counts() == (0, 0, 0)
    assert prefilled(right).tolist() == [[0, 1, 2, 3, 4]] * 3 and decoded(right).tolist() == [5, 5, 5]


def test_c05_an_offset_between_two_images() -> None:
    their, our = both()
    for each in (their, our):
        each.turn("a", A_IDS, image())
        each.turn("b", A_IDS, image(number=1), after="a")
    found, right = (each.send("c", [7, 7], after="b", offset=13) for each in (their, our))
    assert len(found.multimodal_inputs.mm_items) == 2 and len(right.multimodal_inputs.mm_items) == 1
    expected = np.hstack([A_TABLE, [range(7, 13)] * 3])  # reply, then 1 and 2 of the second turn, then 7, 7
    assert np.array_equal(prefilled(right), expected)
    assert right.multimodal_inputs.mrope_position_delta.item() == -2 and decoded(right).tolist() == [13] * 3
    assert found.multimodal_inputs.mrope_position_delta.item() == -4  # that of both images
    assert right.get_mm_token_counts() == (4, 0, 0)


@pytest.mark.parametrize("offset", [4, 5, 6, -5, -7])
def test_c06_an_offset_inside_an_image_is_refused_by_name(offset: int) -> None:
    their, our = both()
    found, right = (each.turn("a", A_IDS, image()) and each.send("b", [7], after="a", offset=offset) for each in (their, our))
    assert refused(found) is None  # an image of 4 features for fewer placeholders
    assert sum(found.origin_input_ids[at] > 10**6 for at in range(len(found.origin_input_ids))) < 4
    assert "inside image" in str(refused(right)) and "[3, 7)" in str(refused(right))
    assert right.session is None and list(right.origin_input_ids) == [0]
    assert our.turn("c", [7], after="a").finished_reason is not None  # nothing was left behind
    assert our.controller.get("s").reply("b") is None


def test_c06_a_cut_between_the_frames_of_a_video_is_refused() -> None:
    our = ours()
    frames = SimpleNamespace(offsets=[(1, 4), (6, 9)])
    ids = [VS, *[VID] * 4, VE, *[VID] * 4, 3]
    given = processed([VS, *[VID] * 8], [video(2)])
    given.mm_items[0].offsets = frames.offsets
    given.input_ids, given.mrope_positions, given.mrope_position_delta = ids, None, None
    our.controller._session_options["scheme"] = sglang_sessions_scheme("qwen3_vl@sglang")
    our.controller.open(engine(MESSAGES).OpenSessionReqInput(capacity_of_str_len=1, session_id="v"))
    assert refused(our.turn("a", ids, mm_inputs=given, session_id="v")) is None
    cut = our.send("b", [7], after="a", offset=5, session_id="v")
    assert "leaves a part of video" in str(refused(cut))
    assert refused(our.send("c", [7], after="a", offset=10, session_id="v")) is None


def sglang_sessions_scheme(name: str) -> Any:
    from sessiontree.positions import scheme

    return scheme(name, image_token_id=IMG, video_token_id=VID, vision_start_token_id=VS)


def retracted(request: Any) -> Any:
    request.reset_for_retract()
    request.init_next_round_input(None)
    return request


def test_c07_a_retracted_request_goes_on_behind_the_image_not_in_it() -> None:
    found, right = (each.send("a", MEDIA_AT_END, image()) for each in both())
    for request in (found, right):
        request.output_ids.extend([8, 9])
        retracted(request)
    assert found.multimodal_inputs.mrope_positions[:, -2:].tolist() == [[3, 4]] * 3  # the image ends at 3
    assert right.multimodal_inputs.mrope_positions[:, -2:].tolist() == [[4, 5]] * 3
    assert prefilled(right)[:, -2:].tolist() == [[4, 5]] * 3 == decode_by_decode(right)


def decode_by_decode(request: Any) -> list[list[int]]:
    delta = request.multimodal_inputs.mrope_position_delta.item()
    return [[len(request.origin_input_ids) + step + delta for step in range(len(request.output_ids))]] * 3


def test_c08_retracting_again_and_again_changes_nothing_of_the_parent() -> None:
    widths: dict[str, list[tuple[int, int]]] = {}
    for name, there in zip(("theirs", "ours"), both(), strict=True):
        parent = there.turn("a", A_IDS[:7], image())
        child = there.send("b", [7], after="a")
        child.output_ids.extend([4, 5, 6])
        before, widths[name] = frozen(parent), []
        tables = []
        for _ in range(3):
            retracted(child)
            tables.append(child.multimodal_inputs.mrope_positions.clone())
            widths[name].append((parent.multimodal_inputs.mrope_positions.shape[1], tables[-1].shape[1]))
        if name == "ours":
            assert frozen(parent) == before
            assert torch.equal(tables[0], tables[2]) and np.array_equal(prefilled(child), tables[0])
            assert tables[0][0, 6:].tolist() == [3, 5, 6, 7, 8, 9, 10]  # image, reply, text, and what was generated
    assert widths["theirs"] == [(10, 10), (13, 13), (16, 16)]
    assert widths["ours"] == [(7, 13)] * 3


def test_c35_a_childs_image_leaves_the_parents_modalities_alone() -> None:
    lengths = {}
    for name, there in zip(("theirs", "ours"), both(), strict=True):
        there.scheduler.model_config.requires_mm_token_modalities = True
        parent = there.turn("a", A_IDS, image())
        before = list(parent.multimodal_inputs.token_modalities)
        child = there.send("b", A_IDS, image(number=1), after="a")
        lengths[name] = len(parent.multimodal_inputs.token_modalities), len(child.multimodal_inputs.token_modalities)
        if name == "ours":
            assert parent.multimodal_inputs.token_modalities == before
            kind = engine(REQUESTS).Modality.IMAGE.value
            assert [at for at, said in enumerate(child.multimodal_inputs.token_modalities) if said == kind] == [
                3,
                4,
                5,
                6,
                14,
                15,
                16,
                17,
            ]
            text = there.generate(child, [8]) and there.send("c", [7], after="b")
            assert len(text.multimodal_inputs.token_modalities) == len(text.origin_input_ids)
    assert lengths["theirs"] == (18, 18)  # the parent's grew, and the reply has none
    assert lengths["ours"] == (9, 20)


def test_c36_a_finished_streaming_request_keeps_its_ids() -> None:
    their, our = both(streaming=True)
    first = {}
    for each in (their, our):
        first[each] = each.turn("a", [1, 2, 3])
        assert list(first[each].origin_input_ids) == [1, 2, 3]
        each.send("b", [4], after=None)
    assert list(first[their].origin_input_ids) == [1, 2, 3, 8, 9, 4]
    assert list(first[our].origin_input_ids) == [1, 2, 3]


def test_c37_an_aborted_turn_is_no_history() -> None:
    our = ours()
    our.turn("a", range(10, 522), output=range(3, 51))
    aborted = our.send("b", range(1000, 1064), after="a")
    our.generate(aborted, [5, 6], end=False)
    aborted.to_finish = engine(REQUESTS).FINISH_ABORT()
    aborted.update_finish_state()
    again = our.send("c", range(2000, 2064), after="a")
    assert list(again.origin_input_ids) == [*range(10, 522), *range(3, 51), *range(2000, 2064)]
    assert len(again.origin_input_ids) == 624


def test_c39_nothing_goes_on_from_a_request_that_was_refused() -> None:
    their, our = both()
    answers = []
    for each in (their, our):
        each.scheduler.max_req_input_len = 5
        too_long = each.send("a", [1, 2, 3, 4, 5, 6])
        assert refused(too_long)
        too_long.update_finish_state()
        answers.append(each.send("b", [7], after="a"))
    assert list(answers[0].origin_input_ids) == [0, 7] and refused(answers[0]) is None
    assert "no request 'a' has finished" in str(refused(answers[1]))
    assert len(our.controller.get("s").tree.tree) == 1


@pytest.mark.parametrize("rejected", ["sampling mask", "abandoned", "media that fail", "too long"])
def test_c40_whatever_became_of_a_streaming_request_the_next_one_is_served(rejected: str) -> None:
    answers = []
    for there in both(streaming=True):
        there.turn("a", [1, 2])
        if rejected == "sampling mask":
            there.scheduler.output_streamer = SimpleNamespace(stream_output=lambda *_: None)
            tracing = SimpleNamespace(abort=lambda **_: None)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine(REQUESTS).SchedulerReqTimeStats, "trace_ctx", tracing, raising=False)
                there.send("b", [3], return_sampling_mask=True)
        elif rejected == "abandoned":
            there.send("b", [3])
            there.queue.clear()
        elif rejected == "media that fail":
            given = processed(A_IDS, [image()])
            given.mm_items[0].offsets = [(3, 7)]
            there.send("b", A_IDS, mm_inputs=given)
        else:
            there.scheduler.max_req_input_len = 3
            there.send("b", [3])
            there.scheduler.max_req_input_len = 100
        answers.append(there.send("c", [4]))
    if rejected == "sampling mask":  # the scheduler answers, and tells the session nothing
        assert "active request" in str(refused(answers[0]))
    assert refused(answers[1]) is None and list(answers[1].origin_input_ids) == [1, 2, 8, 9, 4]


def test_c40_a_thousand_attempts_dropped_at_random_points() -> None:
    our = ours(streaming=True)
    our.turn("a", [1, 2])
    for number in range(1000):
        request = our.send(f"b{number}", [3, 4])
        assert refused(request) is None
        if number % 3:
            our.generate(request, [5] * (number % 4), end=False)
        if number % 5 == 0:
            request.session.abort_req()
        del request
        our.queue.clear()
    assert list(our.send("c", [7]).origin_input_ids) == [1, 2, 8, 9, 7]
    assert len(our.controller.get("s").tree.tree) == 3  # the root, a prompt, a reply


def test_c40_a_refused_request_does_not_end_the_one_that_runs() -> None:
    their, our = both(streaming=True)
    for each in (their, our):
        each.turn("a", [1])
        running = each.send("b", [2])
        turned_away = each.send("c", [3])
        assert refused(turned_away)
        if turned_away.session is not None:  # what the scheduler does with it
            turned_away.session.abort_req()
        third = each.send("d", [4])
        assert (refused(third) is None) == (each is their)  # two at once, on one KV record
        assert refused(running) is None


def test_c41_beginning_anew_is_no_crash_and_deletes_nothing() -> None:
    their, our = both()
    for each in (their, our):
        each.turn("a", [1, 2])
        each.turn("b", [3], after="a")
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        their.send("c", [5], replace=True)
    session = our.controller.get("s")
    old, running = session.reply("b"), our.send("r", [9], after="b")
    anew = our.send("c", [5], replace=True)
    assert list(anew.origin_input_ids) == [5] and refused(anew) is None
    assert running.to_finish is not None and session.reply("b") == old  # it has not succeeded yet
    our.generate(anew, [6])
    assert session.reply("a") is None and session.reply("b") is None
    assert old.input_ids().tolist() == [1, 2, 8, 9, 3, 8, 9] and session.tree.node(old.id) == old
    assert refused(our.send("d", [7], after="b"))
    assert list(our.turn("a", [7], after="c").origin_input_ids) == [5, 6, 7]  # the rid is free again
    our.turn("e", [1, 2], output=[1], replace=True)
    assert list(our.turn("a", [1, 2], output=[4], replace=True).origin_input_ids) == [1, 2]
    assert list(our.send("f", [5], after="a").origin_input_ids) == [1, 2, 4, 5]


def test_c74_a_new_beginning_lets_go_of_the_features_before_it() -> None:
    """As far as nothing that still runs has them."""
    our = ours()
    session = our.controller.get("s")
    our.turn("a", A_IDS, image(number=0))
    our.turn("a2", A_IDS, image(number=1))
    for number in range(2, 6):
        held = [weak(each.feature) for each in session.engine_items.values()]
        anew = our.send(f"b{number}", A_IDS, image(number=number), replace=True)
        late = our.send("late", [7], after="a") if number == 2 else None
        our.generate(anew, [1])
        del anew
        our.queue.clear()
        gc.collect()
        alive = [each for each in held if each() is not None]
        assert (len(session.engine_items), len(alive)) == ((2, 1) if late else (1, 0))
        if late is not None:
            our.generate(late, [1])
            again = our.send("later", [7], after="late")
            assert refused(again) is None and len(again.multimodal_inputs.mm_items) == 1
            del again
        del late, alive
    assert list(our.send("c", [7], after="b5").origin_input_ids)[-2:] == [1, 7]
    held = [weak(each.feature) for each in session.engine_items.values()]
    our.turn("text", [1], replace=True)
    our.queue.clear()
    gc.collect()
    assert not session.engine_items and held and all(each() is None for each in held), "nor does what was laid out last hold any"


def test_c41_a_new_beginning_that_fails_leaves_everything() -> None:
    our = ours()
    our.turn("a", [1, 2])
    anew = our.send("b", [5], replace=True)
    anew.to_finish = engine(REQUESTS).FINISH_ABORT()
    anew.update_finish_state()
    assert list(our.send("c", [3], after="a").origin_input_ids) == [1, 2, 8, 9, 3]


def test_c42_regenerating_leaves_the_other_branches() -> None:
    their, our = both()
    for each in (their, our):
        each.turn("a", [1])
        each.turn("b", [2], after="a")
        each.turn("c", [3], after="a")
        each.turn("d", [4], after="a", replace=True)
    assert [*their.controller.get("s").req_nodes] == ["a", "d"]
    assert refused(their.send("e", [5], after="b"))
    for after, ids in (("b", [1, 8, 9, 2, 8, 9, 5]), ("c", [1, 8, 9, 3, 8, 9, 5]), ("d", [1, 8, 9, 4, 8, 9, 5])):
        assert list(our.send(f"e{after}", [5], after=after).origin_input_ids) == ids


def test_c42_replacing_a_running_request_aborts_that_one_alone() -> None:
    their, our = both()
    answers = []
    for each in (their, our):
        each.turn("a", [1])
        other = each.send("b", [2], after="a")
        running = each.generate(each.send("c", [3], after="a"), [30, 31], end=False)
        again = each.send("d", [4], after="c", replace=True)
        running.update_finish_state()
        assert refused(running) == "Aborted" and refused(other) is None
        answers.append(list(again.origin_input_ids))
        each.generate(again, [40])
        each.generate(other, [20])
        if each is our:
            assert refused(each.send("e", [5], after="c"))
            assert list(each.send("f", [5], after="b").origin_input_ids) == [1, 8, 9, 2, 20, 5]
            assert list(each.send("g", [5], after="d").origin_input_ids) == [1, 8, 9, 3, 4, 40, 5]
    assert answers == [[1, 8, 9, 3, 30, 31, 4], [1, 8, 9, 3, 4]]  # with what an aborted request said; without


def test_c42_an_image_of_a_replaced_request_stays_with_the_new_one() -> None:
    our = ours()
    our.turn("a", [1])
    running = our.send("b", A_IDS, image(number=5), after="a")
    again = our.send("c", [7], after="b", replace=True)
    running.update_finish_state()
    running.release_mm_inputs_on_abort()
    (held,) = again.multimodal_inputs.mm_items
    assert held.offsets == [(6, 9)] and held.feature is not None and held.feature[0, 0] == 5
    cut = our.send("d", [7], after="c", replace=True, offset=5)
    assert cut.multimodal_inputs is None and list(cut.origin_input_ids) == [1, 8, 9, 1, 2, 7]
    our.generate(cut, [4])
    assert list(our.send("f", [5], after="d").origin_input_ids) == [1, 8, 9, 1, 2, 7, 4, 5]


def test_c43_a_rid_names_one_request() -> None:
    their, our = both()
    for each in (their, our):
        each.turn("a", [1])
        each.turn("b", [2], after="a")
    assert refused(their.turn("a", [5], after="b")) is None
    assert list(their.send("c", [3], after="a").origin_input_ids) == [1, 8, 9, 2, 8, 9, 5, 8, 9, 3]  # the first is gone
    again = our.send("a", [5], after="b")
    assert "has a request 'a' already" in str(refused(again))
    running = our.send("r", [5], after="b")
    assert refused(our.send("r", [6], after="b")) and refused(running) is None
    assert list(our.send("c", [3], after="a").origin_input_ids) == [1, 8, 9, 3]


def test_c45_closing_waits_for_what_is_running() -> None:
    their, our = both()
    for each in (their, our):
        each.turn("a", A_IDS, image())
        running = each.send("b", [7], after="a")
        each.close()
        if each is their:
            assert running.multimodal_inputs is None and "s" not in each.controller  # under a running request
            continue
        assert running.multimodal_inputs is not None and running.multimodal_inputs.mm_items[0].feature is not None
        assert "close was requested" in str(refused(each.send("c", [1])))
        session = each.controller.get("s")
        assert each.controller.tick(1.0) == () and "s" in each.controller
        each.generate(running, [5])
        node = session.reply("b")
        assert each.controller.tick(2.0) == ("s",)
        assert "s" not in each.controller and "does not exist" in str(refused(each.send("d", [1])))
        assert node.input_ids().tolist() == [*A_IDS, 8, 9, 7, 5] and node.mrope_position_delta == -2
        each.cache.release_session.assert_called_once_with("s")
        each.cache.release_radix_session.assert_called_once_with("s")


def test_c45_idle_time_counts_from_the_last_activity_and_not_while_one_runs() -> None:
    our = Engine(controller())
    our.open(timeout=10.0)
    our.controller.maybe_reap(100.0)
    request = our.send("a", [1])
    our.controller.maybe_reap(200.0)
    assert "s" in our.controller
    our.generate(request, [2])
    our.controller.maybe_reap(209.0)
    assert "s" in our.controller
    our.controller.maybe_reap(209.5)  # within a second of the last look
    our.turn("b", [3], after="a")
    our.controller.maybe_reap(219.4)
    assert "s" in our.controller
    our.controller.maybe_reap(220.5)
    assert "s" not in our.controller


def test_c45_a_request_that_ran_long_and_was_aborted_was_use() -> None:
    our = Engine(controller())
    our.open(timeout=10.0)
    our.controller.tick(100.0)
    request = our.send("a", [1])
    our.controller.tick(200.0)
    request.to_finish = engine(REQUESTS).FINISH_ABORT()
    request.update_finish_state()
    assert our.controller.tick(209.0) == ()
    assert our.controller.tick(210.5) == ("s",)


def test_c46_the_same_calls_give_the_same_sessions_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def no_clock() -> float:
        raise AssertionError("a clock was read")

    ranks = []
    for _ in range(2):
        our = Engine(controller())
        our.open(timeout=5.0)
        our.controller.tick(1.0)
        our.turn("a", A_IDS, image())
        our.turn("b", [7], after="a", offset=8)
        ranks.append(our)
    assert [each.controller.get("s").reply("b").id for each in ranks] == [ranks[0].controller.get("s").reply("b").id] * 2
    monkeypatch.setattr(time, "monotonic", no_clock)
    monkeypatch.setattr(time, "time", no_clock)
    assert [each.controller.tick(6.0) for each in ranks] == [(), ()]
    assert [each.controller.tick(6.5) for each in ranks] == [("s",)] * 2


@pytest.mark.parametrize("offset", [12, 999, -12, -999])
def test_c47_an_offset_outside_the_context_is_refused(offset: int) -> None:
    their, our = both()
    found, right = (each.turn("a", A_IDS, image()) and each.send("b", [7], after="a", offset=offset) for each in (their, our))
    assert refused(found) is None and len(found.origin_input_ids) in (1, 12)  # silently everything, or nothing
    assert "outside the 11 tokens" in str(refused(right))


def test_c48_offsets_and_spans_have_one_coordinate_system() -> None:
    our = ours()
    our.turn("a", A_IDS, image())
    request = our.send("b", A_IDS, image(number=1), after="a", offset=10)
    assert len(request.origin_input_ids) == len(request.origin_input_ids_unpadded) == 19
    for each in request.multimodal_inputs.mm_items:
        for first, last in each.offsets:
            assert set(request.origin_input_ids_unpadded[first : last + 1]) == {IMG}
            assert list(request.origin_input_ids[first : last + 1]) == each.padding_sequence(last + 1 - first)


class Tokenizer:
    bos_token_id = BOS
    eos_token_id = 2
    additional_stop_token_ids = None

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)


def test_c50_a_bos_is_left_out_with_its_column_and_spans_move() -> None:
    ids = [BOS, VS, IMG, IMG, IMG, IMG, VE]
    their, our = both(Tokenizer())
    answers = []
    for each in (their, our):
        each.turn("a", MEDIA_AT_END, image(), output=[])  # history ends in media
        answers.append(each.send("b", ids, image(number=1), after="a"))
    found, right = answers
    assert list(found.origin_input_ids) == list(right.origin_input_ids)
    assert [each.offsets for each in found.multimodal_inputs.mm_items] == [
        each.offsets for each in right.multimodal_inputs.mm_items
    ]
    # The table kept the column of a token that is gone: the image's last column was overwritten, and all behind it moved.
    expected = [[0, 1, 2, 2, 2, 2, 4, 5, 5, 5, 5, 7], [0, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 5, 6, 7]]
    assert prefilled(right).tolist() == expected
    assert prefilled(found).tolist() != expected
    assert prefilled(found)[:, 5].tolist() != [2, 3, 3]
    assert right.multimodal_inputs.mrope_position_delta.item() == 8 - 12


def test_c50_media_over_the_bos_are_refused() -> None:
    ids = [BOS, IMG, IMG, IMG, 7]
    their, our = both(Tokenizer())
    answers = []
    for each in (their, our):
        each.turn("a", [1, 2])
        given = processed([VS, IMG, IMG, IMG, IMG, 7], [image()])
        given.input_ids, given.mm_items[0].offsets = ids, [(0, 3)]
        given.mrope_positions = given.mrope_position_delta = None
        answers.append(each.send("b", ids, mm_inputs=given, after="a"))
    assert [each.offsets for each in answers[0].multimodal_inputs.mm_items] == [[(4, 6)]]  # four features, three placeholders
    assert "covers the BOS" in str(refused(answers[1]))


def test_c50_a_bos_stays_where_a_path_begins_or_stripping_is_off() -> None:
    our = ours(Tokenizer())
    assert list(our.turn("a", [BOS, 1]).origin_input_ids) == [BOS, 1]
    assert list(our.turn("b", [BOS, 1], after="a").origin_input_ids) == [BOS, 1, 8, 9, 1]
    assert list(our.turn("c", [BOS, BOS, 1], after="a").origin_input_ids) == [BOS, 1, 8, 9, BOS, 1]
    off = ours(Tokenizer(), strip_bos=False)
    off.turn("a", [BOS, 1])
    assert list(off.turn("b", [BOS, 1], after="a").origin_input_ids) == [BOS, 1, 8, 9, BOS, 1]


def test_c51_history_ends_where_the_client_saw_it_end() -> None:
    answers = []
    for there in both():
        request = there.send("a", [1], max_new_tokens=64)
        request.output_ids.extend([10, 11, 2, 12, 13])  # accepted in one step of speculation; 2 is the end
        request.update_finish_state(5)
        assert request.finished_len == 3 and list(request.output_ids_through_stop) == [10, 11, 2]
        answers.append(list(there.send("b", [7], after="a").origin_input_ids))
    assert answers == [[1, 10, 11, 2, 12, 13, 7], [1, 10, 11, 2, 7]]


def test_c51_a_stop_string_in_the_middle_of_a_step() -> None:
    answers = []
    for there in both(Tokenizer()):
        request = there.send("a", [1])
        request.sampling_params.stop_strs, request.sampling_params.stop_str_max_len = ["ab"], 2
        request.output_ids.extend([ord("x"), ord("a"), ord("b"), ord("c"), ord("d")])
        request.update_finish_state(5)
        assert request.finished_len == 3
        answers.append(list(there.send("b", [7], after="a").origin_input_ids))
    assert answers[0] == [1, *map(ord, "xabcd"), 7] and answers[1] == [1, *map(ord, "xab"), 7]


def test_c51_a_limit_reached_in_the_middle_of_a_step() -> None:
    our = ours()
    request = our.send("a", [1], max_new_tokens=2)
    request.output_ids.extend([10, 11, 12])
    request.update_finish_state(3)
    assert our.controller.get("s").reply("a").finish_reason == "length"
    assert list(our.send("b", [7], after="a").origin_input_ids) == [1, 10, 11, 7]


@pytest.mark.parametrize(("policy", "expected"), [("keep", [1, 8, 9, 7]), ("drop_last", [1, 8, 7])])
def test_c52_the_last_sampled_token_is_history_or_not(policy: Any, expected: list[int]) -> None:
    our = ours(tail_policy=policy)
    our.turn("a", [1])
    reply = our.controller.get("s").reply("a")
    assert reply.tail_policy == policy
    assert list(our.send("b", [7], after="a").origin_input_ids) == expected


def test_c53_nothing_new_is_a_turn_where_there_is_history_only() -> None:
    our = ours()
    our.turn("a", [1, 2], output=[3, 4])
    again = our.send("b", [], after="a")
    assert list(again.origin_input_ids) == [1, 2, 3, 4]
    our.generate(again, [5])
    assert list(our.send("c", [6], after="b").origin_input_ids) == [1, 2, 3, 4, 5, 6]
    assert "without tokens and without history" in str(refused(our.send("d", [])))
    assert list(our.send("e", [], after="a", drop_previous_output=True).origin_input_ids) == [1, 2]


def test_c55_what_an_attempt_says_is_its_own() -> None:
    our = ours()
    our.turn("a", [1], cache_salt="x", extra_key="k", lora_id="l", priority=3, routing_key="r", max_new_tokens=5)
    child = our.send("b", [2], after="a")
    assert child.cache_salt is None and child.extra_key is None and child.lora_id is None and child.priority is None
    assert child.routing_key is None and child.sampling_params.max_new_tokens == 64
    our.generate(child, [3])
    session = our.controller.get("s")
    assert dict(session.reply("a").metadata) == {"rid": "a", "cache_salt": "x", "extra_key": "k", "lora_id": "l"}
    assert dict(session.reply("b").metadata) == {"rid": "b", "continues": "a"}


def test_c56_every_field_is_carried_made_or_refused() -> None:
    """Fails when SGLang's request gains a field: then somebody has to say what sessions do with it."""
    made = {
        "origin_input_text",
        "origin_input_ids",
        "origin_input_ids_unpadded",
        "session",
        "vocab_size",
        "eos_token_ids",
        "disagg_mode",
    }
    scheduler = {"dllm_config", "metrics_collector"}  # set by the scheduler, or by a diffusion model's own path
    embeddings = {"dimensions", "return_pooled_hidden_states", "decision_layout"}  # of requests that are no generation
    parameters = set(inspect.signature(engine(REQUESTS).Req.__init__).parameters) - {"self"}
    assert parameters == {*CARRIED, *REFUSED, *made, *scheduler, *embeddings}
    session = {"input_text", "input_ids", "mm_inputs", "session_params"}
    of_others = {  # of the tokenizer, the encoder servers, the scheduler's own routing
        "bootstrap_pair_key",
        "decode_tp_size",
        "encoder_urls",
        "logprob_start_len",
        "lora_name",
        "need_wait_for_mm_inputs",
        "no_logs",
        "num_items_assigned",
        "pp_prefetch_ticketed",
        "return_bytes",
        "return_entropy",
    }
    fields = set(engine(MESSAGES).TokenizedGenerateReqInput.__struct_fields__)
    assert fields == {*CARRIED, *REFUSED, *session, *of_others}


CARRIED_VALUES: dict[str, Any] = {
    "bootstrap_host": "h",
    "bootstrap_port": 5,
    "bootstrap_room": 6,
    "cache_salt": "salt",
    "disagg_prefill_dp_rank": 1,
    "extra_key": "key",
    "http_worker_ipc": "ipc",
    "kv_hints": SimpleNamespace(),
    "priority": 4,
    "require_reasoning": True,
    "return_flat_raw_top_logprobs": True,
    "return_hidden_states": True,
    "return_indexer_topk": True,
    "return_routed_experts": True,
    "routed_dp_rank": 2,
    "routed_experts_start_len": 0,
    "routing_key": "route",
    "sampling_logprobs_mode": "support",
    "stream": True,
}


@pytest.mark.parametrize("path", ["first", "append", "offset", "drop", "replace", "empty", "image", "running"])
def test_c56_fields_reach_the_request_on_every_path(path: str) -> None:
    our = ours()
    our.turn("a", [1, 2])
    running = our.send("r", [5], after="a")
    paths: dict[str, tuple[list[int], list[Block], dict[str, Any]]] = {
        "first": ([1], [], {}),
        "append": ([1], [], {"after": "a"}),
        "offset": ([1], [], {"after": "a", "offset": 1}),
        "drop": ([1], [], {"after": "a", "drop_previous_output": True}),
        "replace": ([1], [], {"replace": True}),
        "empty": ([], [], {"after": "a"}),
        "image": (A_IDS, [image()], {"after": "a"}),
        "running": ([1], [], {"after": "r", "replace": True}),
    }
    ids, blocks, params = paths[path]
    request = our.send("b", ids, *blocks, **params, **CARRIED_VALUES)
    assert refused(request) is None and refused(running) in (None, "Aborted")
    assert {name: getattr(request, name) for name in CARRIED_VALUES} == CARRIED_VALUES
    our.generate(request, [3])
    metadata = our.controller.get("s").reply("b").metadata
    assert (metadata["cache_salt"], metadata["extra_key"]) == ("salt", "key")


@pytest.mark.parametrize("name", REFUSED)
def test_c56_what_counts_a_turns_tokens_is_refused_by_name(name: str) -> None:
    our = ours()
    our.turn("a", [1, 2])
    request = our.send("b", [3], after="a", **{name: [1]} if name != "input_embeds" else {name: [[1.0]]})
    assert name in str(refused(request))


def test_c57_a_prompt_beyond_the_limit_is_refused_and_a_shorter_one_served() -> None:
    our = ours(max_tokens=10, reserve_output=3)
    our.turn("a", [1, 2, 3], output=[4])
    assert "7 are allowed" in str(refused(our.send("b", [5, 6, 7, 8], after="a")))
    media_turn = our.send("c", A_IDS, image(), after="a")
    assert "7 are allowed" in str(refused(media_turn))
    assert media_turn.multimodal_inputs is None
    assert refused(our.turn("d", [5, 6, 7], after="a")) is None
    assert len(our.controller.get("s").tree.tree) == 5


@pytest.mark.parametrize("options", [{"max_tokens": 6}, {"scheme": toy_scheme(max_position_limit=6)}])
def test_c57_a_reply_beyond_the_limit_is_not_half_recorded(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    our = ours(**options)
    our.turn("a", [1], output=[2])
    our.turn("b", [3], after="a", output=[4, 5, 6, 7])
    assert "request b of session s is not recorded" in caplog.text
    assert len(our.controller.get("s").tree.tree) == 3
    assert refused(our.send("c", [1], after="b")) and refused(our.send("d", [1], after="a")) is None


def test_c57_a_position_beyond_the_limit_is_refused() -> None:
    our = ours(scheme=toy_scheme(max_position_limit=12))
    our.turn("a", A_IDS, image())
    assert "12" in str(refused(our.send("b", [1, 2, 3, 4], after="a")))
    assert refused(our.send("c", [1, 2], after="a")) is None


def test_c58_a_request_of_a_closed_session_does_not_reach_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    our = ours()
    session = our.controller.get("s")
    late = our.send("a", [1])
    session.tree.close()  # the store closes it, whatever the scheduler does
    del our.controller.sessions["s"]
    assert our.open()
    our.generate(late, [2])
    assert our.controller.get("s").reply("a") is None and "is closed" in caplog.text
    assert our.controller.get("s").tree.incarnation != session.tree.incarnation
    assert list(our.turn("a", [3]).origin_input_ids) == [3]


def test_c58_a_session_that_is_opened_again_is_empty() -> None:
    our = ours()
    our.turn("a", [1])
    our.close()
    assert our.open() and not our.open()
    assert refused(our.send("b", [2], after="a"))


def test_c59_requests_that_run_at_once_are_siblings() -> None:
    our = ours()
    our.turn("a", [1])
    running = [our.send(f"b{number}", [2], after="a") for number in range(50)]
    for number, request in enumerate(reversed(running)):
        our.generate(request, [number])
    session = our.controller.get("s")
    replies = [session.reply(f"b{number}") for number in range(50)]
    assert len({reply.id for reply in replies}) == 50 and len({reply.parent for reply in replies}) == 1
    assert [reply.token_ids.tolist() for reply in replies] == [[49 - number] for number in range(50)]


def test_c60_a_long_chain_is_walked_without_recursion() -> None:
    turns = 1500
    our, nodes = ours(), engine(CONTROLLER)
    chain = root = nodes.SessionReqNode(SimpleNamespace(rid="0", finished_reason=object()))
    known = {"0": root}
    for number in range(1, turns):
        chain = known[str(number)] = nodes.SessionReqNode(SimpleNamespace(rid=str(number), finished_reason=object()), chain)
    with pytest.raises(RecursionError):
        root.clear_children(known)
    our.turn("r0", [1])
    for number in range(1, turns):
        our.turn(f"r{number}", [2], after=f"r{number - 1}", output=[3])
        our.queue.clear()
    assert len(our.send("x", [5], after=f"r{turns - 1}").origin_input_ids) == 3 * 1 + 2 * (turns - 1) + 1
    assert list(our.send("y", [5], after="r0", replace=True).origin_input_ids) == [1, 8, 9, 5]
    assert list(our.send("z", [5], replace=True).origin_input_ids) == [5]
    our.close()


def test_c65_a_streaming_session_rewinds_by_an_earlier_requests_id() -> None:
    our = ours(streaming=True)
    our.turn("a", A_IDS, image())
    our.turn("b", [7])
    our.cache.release_session.assert_not_called()
    again = our.turn("c", [5], after="a", output=[20])
    assert list(again.origin_input_ids)[9:] == [8, 9, 5]
    our.cache.release_session.assert_called_once_with("s")  # the KV that it keeps is another branch's
    other = our.turn("d", [5], after="a", output=[21])
    assert list(our.turn("e", [6]).origin_input_ids)[9:] == [8, 9, 5, 21, 6]
    session = our.controller.get("s")
    assert session.reply("c").parent == session.reply("d").parent and session.reply("c") != session.reply("d")
    assert refused(our.send("f", [1], after="nobody")) and other.finished_reason is not None


def test_sglangs_own_streaming_cache_runs_on_it() -> None:
    cache = engine("sglang.srt.session.streaming_session").StreamingSession(MagicMock(page_size=1))
    our = ours(streaming=True)

    def admitted(request: Any) -> Any:
        request.kv.req_pool_idx, request.kv.kv_allocated_len, request.kv.kv_committed_len = 0, 6, 6
        cache.take(request)
        return request

    first = admitted(our.send("a", [1, 2]))
    first.output_ids.extend([10, 11, 2, 12])
    first.update_finish_state(4)
    assert cache.try_cache_finished_req(first) and list(first.output_ids) == [10, 11, 2]
    second = our.send("b", [5])
    assert cache.find_active_slot(second) is cache.slots["s"] and cache.slots["s"].kv.kv_committed_len == 5
    second.kv = cache.slots["s"].kv
    second.finished_reason = engine(REQUESTS).FINISH_ABORT()
    assert not cache.try_cache_finished_req(second) and "s" not in cache.slots
    third = admitted(our.send("c", [6]))
    turned_away = our.send("d", [7])
    assert refused(turned_away) and cache.find_active_slot(turned_away) is None
    assert list(our.generate(third, [8]).origin_input_ids) == [1, 2, 10, 11, 2, 6]
    assert our.controller.get("s").in_flight() == () and our.controller.get("s").reply("b") is None


@pytest.mark.parametrize("params", [{"replace": True}, {"drop_previous_output": True}, {"offset": 1}])
def test_streaming_only_appends(params: dict[str, Any]) -> None:
    their, our = both(streaming=True)
    for each in (their, our):
        each.turn("a", [1, 2])
        assert refused(each.send("b", [3], **params))
        assert list(each.send("c", [4]).origin_input_ids) == [1, 2, 8, 9, 4]


def test_c80_an_aborted_turn_takes_no_ancestors_features_with_it() -> None:
    our = ours()
    parent = our.turn("a", A_IDS, image())
    child = our.send("b", A_IDS, image(number=1), after="a")
    assert [each.feature is None for each in child.multimodal_inputs.mm_items] == [False, False]
    child.multimodal_inputs.mm_items[0].feature = "on the device"
    child.multimodal_inputs.mm_items[0].rows = "on the device"  # goes into model_specific_data
    child.set_finish_with_abort("no")
    child.update_finish_state()
    assert parent.multimodal_inputs.mm_items[0].feature is not None
    assert [*parent.multimodal_inputs.mm_items[0].model_specific_data] == ["image_grid_thw"]
    again = our.send("c", A_IDS, image(number=1), after="a")
    assert [each.feature[0, 0].item() for each in again.multimodal_inputs.mm_items] == [0.0, 1.0]
    assert [[*each.model_specific_data] for each in again.multimodal_inputs.mm_items] == [["image_grid_thw"]] * 2


def test_c25_text_that_looks_like_placeholders_stays_text_whatever_padded_it() -> None:
    our = ours()
    our.scheduler.pad_input_ids_func = lambda ids, inputs: array(
        "q", [inputs.mm_items[0].pad_value if token == IMG else token for token in ids]
    )
    our.turn("a", [1, IMG, 2])
    request = our.send("b", [*A_IDS, IMG], image(), after="a")
    assert refused(request) is None and len(request.multimodal_inputs.mm_items) == 1
    (held,) = request.multimodal_inputs.mm_items
    assert list(request.origin_input_ids) == [1, IMG, 2, 8, 9, 1, 2, VS, *held.padding_sequence(4), VE, 3, IMG]
    assert prefilled(request)[0].tolist() == [*range(8), 8, 8, 8, 8, 10, 11, 12]


def test_c49_placeholders_are_padded_even_where_the_engine_pads_nothing() -> None:
    our = ours()
    our.scheduler.pad_input_ids_func = None
    for rid, after, at in (("a", None, 3), ("b", "a", 14)):
        request = our.turn(rid, A_IDS, image(number=at), after=after)
        assert list(request.origin_input_ids[at : at + 4]) == request.multimodal_inputs.mm_items[-1].padding_sequence(4)
        assert list(request.origin_input_ids_unpadded[at : at + 4]) == [IMG] * 4


def test_c32_a_table_of_another_width_is_refused() -> None:
    our = ours()
    given = processed(A_IDS, [image()])
    given.mrope_positions = torch.cat([given.mrope_positions] * 2, dim=1)
    assert "18" in str(refused(our.send("a", A_IDS, mm_inputs=given)))


def test_a_scheme_that_is_not_the_engines_is_found_out() -> None:
    our = ours(scheme=toy_scheme(spatial_merge_size=1))
    request = our.send("a", A_IDS, image())
    assert refused(request)
    their_turn = processed(A_IDS, [image()])
    their_turn.mrope_positions[1, 4] += 1
    assert "places token 4 elsewhere" in str(refused(ours().send("a", A_IDS, mm_inputs=their_turn)))


@pytest.mark.parametrize("name", ["vision_position_ids", "media_nums_per_sample", "visible_frame_counts"])
def test_c79_a_field_without_a_rule_for_several_turns_is_refused(name: str) -> None:
    our = ours()
    given = processed(A_IDS, [image()])
    setattr(given, name, torch.ones(1, dtype=torch.int64))
    assert name in str(refused(our.send("a", A_IDS, mm_inputs=given)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_grid_thw", torch.tensor([4, 4])),
        ("image_grid_thw", "1, 4, 4"),
        ("image_grid_thw", [[1, 4, 4], [1, 4]]),
        ("image_grid_thw", []),
        ("image_grid_thw", torch.tensor([[1.5, 4, 4]])),
        ("second_per_grid_ts", "soon"),
        ("second_per_grid_ts", []),
        ("audio_feature_lens", []),
        ("audio_feature_lens", ["long"]),
        ("audio_feature_lens", torch.tensor([2.5])),
    ],
)
def test_an_item_whose_numbers_are_none_is_refused(name: str, value: Any) -> None:
    our = ours()
    given = processed(A_IDS, [image()])
    given.mm_items[0].model_specific_data[name] = value
    assert refused(our.send("a", A_IDS, mm_inputs=given))
    given = processed(A_IDS, [image()])
    given.mrope_positions = given.mrope_positions.tolist()
    assert refused(our.send("a", A_IDS, mm_inputs=given))
    assert refused(our.turn("a", A_IDS, image())) is None


@pytest.mark.parametrize("name", ["rid", "cache_salt", "extra_key", "lora_id"])
def test_text_that_is_none_is_refused_before_it_runs(name: str) -> None:
    our = ours()
    nodes = len(our.controller.get("s").tree.tree)
    given: Any = {"rid": "a", "ids": [1, 2], name: "\ud800"}
    assert refused(our.send(**given))
    assert len(our.controller.get("s").tree.tree) == nodes


@pytest.mark.parametrize("session_id", ["", "\ud800", "x" * 10_000, 5, None])
def test_a_session_that_cannot_have_its_id_is_not_opened(session_id: Any) -> None:
    our = ours()
    assert not our.open(session_id)
    assert [*our.controller.sessions] == ["s"] and refused(our.turn("a", [1])) is None


def test_a_store_that_failed_ends_no_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are served, sessions close and time out; what could not be recorded is logged."""
    disk = Disk()
    store = open_on(disk, durability="commit")
    our = Engine(controller(store=store))
    for name in ("s", "idle", "ended", "pinned"):
        assert our.open(name, timeout=5.0)
        our.turn("a", [1, 2], session_id=name)
    pinned = our.controller.get("pinned")
    pinned.tree.pin(pinned.reply("a"))
    our.controller.tick(0.0)
    fail(disk, 1, "pwrite", forever=True)
    served = our.turn("b", [3], after="a")
    assert list(served.origin_input_ids) == [1, 2, 8, 9, 3] and "not recorded" in caplog.text
    assert not our.open("new")
    for name in ("ended", "pinned"):
        our.close(name)
    assert set(our.controller.tick(50.0)) == {"s", "idle"}
    assert not our.controller.sessions and "open again when the store is" in caplog.text
    assert not our.open("s") and "cannot be opened" in caplog.text
    let_go(store)


def test_a_model_without_media_takes_text_and_says_so() -> None:
    our = ours(scheme=None)
    assert list(our.turn("a", [1, 2]).origin_input_ids) == [1, 2]
    assert "text@sglang has no media" in str(refused(our.send("b", A_IDS, image(), after="a")))
    assert list(our.send("c", [3], after="a").origin_input_ids) == [1, 2, 8, 9, 3]


def test_a_refused_turn_hands_no_media_to_the_engine() -> None:
    our = ours()
    request = our.send("a", A_IDS, image(), after="nobody")
    assert refused(request) and request.multimodal_inputs is None and list(request.origin_input_ids) == [0]


# Nothing half done


@settings(max_examples=150 if SOAK else 25)
@given(steps=requests(), data=st.data())
def test_whatever_fails_leaves_everything_as_it_was(steps: list[dict[str, Any]], data: st.DataObject) -> None:
    our = ours()
    played(our, steps)
    session = our.controller.get("s")
    finished = list(our.queue)
    before = [frozen(request) for request in finished], list(session.tree.tree.heads), len(session.tree.tree)
    for number in range(data.draw(st.integers(1, 4))):
        after = f"r{data.draw(st.integers(0, len(steps) - 1))}"
        given: dict[str, Any] = data.draw(
            st.sampled_from(
                [
                    {"ids": [1], "after": after, "offset": 10_000},
                    {"ids": [1], "after": "nobody"},
                    {"ids": [1], "after": after, "token_type_ids": [1]},
                    {"ids": A_IDS, "after": after, "mm_inputs": "broken"},
                    {"ids": [1, 2], "after": after},
                    {"ids": [1, 2], "replace": True},
                    {"ids": A_IDS, "after": after, "mm_inputs": "good"},
                ]
            )
        )
        if "mm_inputs" in given:
            inputs = processed(A_IDS, [image(number=9)])
            if given["mm_inputs"] == "broken":
                inputs.mm_items[0].offsets = [(3, 30)]
            given = {**given, "mm_inputs": inputs}
        request = our.send(f"x{number}", given.pop("ids"), **given)
        if refused(request) is None:
            request.output_ids.extend([5, 6])
            retracted(request)
            request.to_finish = engine(REQUESTS).FINISH_ABORT()
        request.update_finish_state()
        assert session.in_flight() == ()
    assert ([frozen(request) for request in finished], list(session.tree.tree.heads), len(session.tree.tree)) == before


# Anything at all, against lists


def cut(context: list[Segment], length: int) -> list[Segment] | None:
    """The first tokens of a context; None where that cuts an item."""
    kept: list[Segment] = []
    for segment in context:
        size = min(len(segment.tokens), length)
        length -= size
        ends = [(item, item.spans[0][0], sum(item.spans[-1])) for item in segment.items]
        if any(first < size < last for _, first, last in ends):
            return None
        kept.append(Segment(segment.origin, segment.tokens[:size], tuple(item for item, _, last in ends if last <= size)))
    return [segment for segment in kept if segment.tokens]


class Lists:
    """What is known of a session, as lists: contexts of finished requests by rid, and prompts of those that run."""

    def __init__(self) -> None:
        self.contexts: dict[str, tuple[int, list[Segment]]] = {}
        self.running: dict[str, tuple[Any, list[Segment], bool]] = {}

    def prompt(self, rid: str, new: Segment, given: dict[str, Any]) -> list[Segment] | None:
        """The prompt that a request has; None if it is refused."""
        after, offset = given.get("after"), given.get("offset")
        if rid in self.contexts or rid in self.running:
            return None
        before: list[Segment] | None = []
        if after is not None:
            if after in self.running and given.get("replace"):
                before = self.running[after][1]
            elif after in self.contexts and after not in self.running:
                length, before = self.contexts[after]
                before = cut(before, length) if given.get("drop_previous_output") else before
            else:
                return None
            total = len(ref.input_ids(before or []))
            length = offset if offset and offset > 0 else total + (offset or 0)
            if not 0 <= length <= total:
                return None
            before = cut(before or [], length)
        prompt = None if before is None else [segment for segment in (*before, new) if segment.tokens]
        return prompt or None


def same_as(request: Any, prompt: list[Segment]) -> None:
    ids, table = ref.input_ids(prompt), ref.replay(reference_scheme(), prompt, "as_decoded")
    assert list(request.origin_input_ids_unpadded) == ids
    spans = [(first, last) for _, first, last in ref.media_spans(prompt)]
    inputs = request.multimodal_inputs
    held = [] if inputs is None else inputs.mm_items
    assert [offset for each in held for offset in each.offsets] == [(first, last - 1) for first, last in spans]
    for each in held:
        for first, last in each.offsets:
            ids[first : last + 1] = each.padding_sequence(last + 1 - first)
    assert list(request.origin_input_ids) == ids
    assert np.array_equal(prefilled(request, 0, len(ids)), table.positions)
    assert inputs is None or inputs.mrope_position_delta.item() == table.delta


@settings(max_examples=2000 if SOAK else 100)
@given(data=st.data())
def test_whatever_happens_it_is_what_lists_would_be(data: st.DataObject) -> None:
    draw = data.draw
    our, known = ours(keep_features=True), Lists()
    for number in range(draw(st.integers(1, 14))):
        what = draw(st.sampled_from(["send", "send", "send", "finish", "finish", "abort", "forget", "retract", "restart"]))
        if what == "send":
            rids = [*known.contexts, *known.running, "nobody"]
            rid = draw(st.sampled_from(rids[:-1])) if rids[1:] and draw(st.integers(0, 9)) == 9 else f"r{number}"
            given: dict[str, Any] = {}
            if draw(st.integers(0, 4)):
                given["after"] = draw(st.sampled_from(rids))
            for name in ("replace", "drop_previous_output"):
                if draw(st.integers(0, 3)) == 3:
                    given[name] = True
            if draw(st.booleans()):
                given["offset"] = draw(st.integers(-12, 25))
            blocks = draw(st.lists(st.sampled_from([image(), image(8, 4, 1), video(2, 4, 4, 3)]), max_size=2))
            pieces: list[Any] = draw(st.lists(st.integers(5, 50), max_size=3))
            for block in blocks:
                pieces += [VS, block, *draw(st.lists(st.integers(5, 50), max_size=2))]
            new = turn(*pieces)
            prompt = known.prompt(rid, new, given)
            request = our.send(rid, new.tokens, *blocks, **given)
            our.queue.clear()
            assert (refused(request) is None) == (prompt is not None), refused(request)
            if prompt is None:
                continue
            same_as(request, prompt)
            reset = given.get("replace") and given.get("after") is None
            for other in [*known.running] if reset else [given["after"]] if given.get("replace") else []:
                if other in known.running:
                    assert refused(known.running.pop(other)[0]) == "Aborted"
            known.running[rid] = request, prompt, bool(reset)
        elif known.running and what != "restart":
            rid = draw(st.sampled_from([*known.running]))
            request, prompt, resets = known.running[rid]
            if what == "retract":
                request.output_ids.extend(draw(st.lists(st.integers(5, 50), max_size=3)))
                retracted(request)
                so_far = [*prompt, Segment("generated", tuple(request.output_ids))]
                assert np.array_equal(prefilled(request), ref.replay(reference_scheme(), so_far, "as_decoded").positions)
                continue
            del known.running[rid]
            if what == "forget":
                del request
            elif what == "abort":
                request.to_finish = engine(REQUESTS).FINISH_ABORT()
                request.update_finish_state()
            else:
                step = draw(st.lists(st.sampled_from([2, 7, 8, 9]), min_size=1, max_size=4))
                request.output_ids.extend(step)
                request.sampling_params.max_new_tokens = len(request.output_ids)
                request.update_finish_state(len(step))
                stop = len(request.output_ids) - len(step) + (step.index(2) + 1 if 2 in step else len(step))
                if resets:
                    known.contexts.clear()
                known.contexts[rid] = len(ref.input_ids(prompt)), [*prompt, Segment("generated", tuple(request.output_ids[:stop]))]
        elif what == "restart":
            our = Engine(controller(store=our.controller.store, keep_features=True))
            known.running.clear()
        session = our.controller.get("s")
        assert set(session.in_flight()) == {*known.running}
        for rid, (length, context) in known.contexts.items():
            reply, table = session.reply(rid), ref.replay(reference_scheme(), context, "as_decoded")
            assert (reply.start, reply.input_ids().tolist()) == (length, ref.input_ids(context))
            assert [span for _, *span in reply.media_spans()] == [[*span] for _, *span in ref.media_spans(context)]
            assert np.array_equal(reply.positions(), table.positions) and reply.mrope_position_delta == table.delta


# On disk


def reopened(path: Path, into: Path, **options: Any) -> Engine:
    """A process that was killed, and another that goes on with what was on disk."""
    shutil.copytree(path, into)
    return Engine(controller(store=SessionStore.open(into), **options))


CONVERSATION: list[Callable[[Engine], Any]] = [
    lambda there: there.turn("a", A_IDS, image()),
    lambda there: there.turn("b", [7, 7], after="a"),
    lambda there: there.turn("c", A_IDS, image(number=1), after="b"),
    lambda there: there.turn("d", [5], after="b", offset=9),
    lambda there: there.turn("e", [VS, *[VID] * 12, VE], video(), after="c", drop_previous_output=True),
    lambda there: there.turn("f", [6], after="e"),
]


@pytest.mark.parametrize("killed_after", range(1, len(CONVERSATION)))
def test_killed_and_reopened_it_goes_on_as_if_nothing_had_been(killed_after: int, tmp_path: Path) -> None:
    never = ours()
    expected = [seen(serve(never)) for serve in CONVERSATION]
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit"), keep_features=True))
    first.open(timeout=30.0)
    for serve in CONVERSATION[:killed_after]:
        serve(first)
    running = first.send("lost", [1], after="a")
    second = reopened(tmp_path / "one", tmp_path / "two", keep_features=True)
    assert refused(running) is None and refused(second.send("x", [1], after="lost"))
    again = [seen(serve(second)) for serve in CONVERSATION[killed_after:]]
    assert again == expected[killed_after:]
    ids = [each.controller.get("s").reply("f").id for each in (never, second)]
    assert ids[0] == ids[1] and second.controller.get("s").timeout == 30.0
    for each in (first, second):
        each.controller.store.close()


def test_what_to_sglang_makes_of_a_node_is_that_node_in_a_session() -> None:
    outside, our = new_session(), ours()
    node = grow(outside, outside.root, a_turn(), reply(8, 9), a_turn(number=1))
    first, rest = node.path()[1], node
    turns = (
        to_sglang(first, rid="a", session_params={"id": "s"}, sampling_params={"max_new_tokens": 2}),
        to_sglang(rest, prefix_len=11, rid="b", session_params={"id": "s", "rid": "a"}, sampling_params={"max_new_tokens": 2}),
    )
    for request in turns:
        with our.intake():
            our.scheduler.handle_generate_request(request)
        assert refused(our.queue[-1]) is None
        our.generate(our.queue[-1], [8, 9])
    there = our.controller.get("s").reply("b").parent
    spans = [[(item.identity, *span) for item, *span in each.media_spans()] for each in (there, node)]
    assert spans[0] == spans[1]
    assert np.array_equal(there.input_ids(), node.input_ids()) and np.array_equal(there.positions(), node.positions())
    assert np.array_equal(prefilled(our.queue[-1], 0, node.stop), node.positions())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "glm_image"])  # that one decodes by a plan
@settings(max_examples=200 if SOAK else 15)
@given(rng=RANDOMS)
def test_every_family_stands_where_its_nodes_do(family: str, rng: random.Random) -> None:
    """C11, C21: prefilled, decoded and retracted, cast once; also where positions and delta are fractional."""
    history, _ = draw_history(rng, family)
    try:
        rule = scheme(f"{family}@sglang", **history.params)
        session = SessionStore.in_memory().create("s", scheme=rule)
        node = session.root
        our = ours(scheme=rule, streaming=rng.random() < 0.5)
        after, held = None, 0
        for number, each in enumerate(without_leading_empties(history.turns())):
            node = session.append(node, list(each.tokens), media=each.media)
            if node.position_state().open_block is not None or node.stop == held:
                continue
            request = to_sglang(node, held, rid=f"r{number}", session_params={"id": "s", "rid": after})
            with our.intake():
                our.scheduler.handle_generate_request(request)
            made = our.queue[-1]
            assert refused(made) is None
            output = [rng.randrange(100, 105) for _ in range(rng.randrange(1, 4))]
            assert np.array_equal(prefilled(made), whole_numbers(node.positions()))
            with session.draft(node) as draft:
                draft.extend(output)
                assert decoded(made).tolist() == whole_numbers(draft.positions(node.stop))[:, 0].tolist()
                node = draft.commit("length")
            if made.multimodal_inputs is not None and not made.session.streaming and rng.random() < 0.5:
                made.output_ids.extend(output)
                retracted(made)
                assert np.array_equal(prefilled(made), whole_numbers(node.positions()))
                made.output_ids = made.output_ids[:0]
            our.generate(made, output)
            recorded = our.controller.get("s").reply(f"r{number}")
            assert np.array_equal(recorded.positions(), node.positions())
            after, held = f"r{number}", node.stop
    except Unsupported as error:
        assert "audio in video" in str(error)


def whole_numbers(table: NDArray[Any]) -> NDArray[np.int64]:
    return np.broadcast_to(table.astype(np.int64), (3, table.shape[1]))


def test_c11_a_fractional_delta_is_rounded_down() -> None:
    ids: Any = {"image_token_id": 90, "video_token_id": 91, "audio_token_id": 92, "vision_start_token_id": 93}
    rule = scheme("qwen3_omni@sglang", position_id_per_seconds=2, audio_start_token_id=94, **ids)
    session, our = SessionStore.in_memory().create("s", scheme=rule), ours(scheme=rule)
    clip = MediaItem("video", bytes(32), [(2, 2)], grid_thw=(2, 2, 2), second_per_grid_ts=0.4)
    node = session.append(session.root, [8, 8, 91, 91, 8, 8], media=[clip])
    with our.intake():
        our.scheduler.handle_generate_request(to_sglang(node, rid="a", session_params={"id": "s"}))
    made = our.queue[-1]
    assert node.mrope_position_delta == pytest.approx(-0.2), "the next token stands at 5.8"
    assert made.multimodal_inputs.mrope_position_delta.tolist() == [[-1]]
    assert decoded(made).tolist() == [5, 5, 5]


def test_streaming_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit")))
    first.open(streaming=True)
    first.turn("a", [1])
    first.turn("b", [2])
    second = reopened(tmp_path / "one", tmp_path / "two")
    assert second.controller.get("s").streaming
    assert list(second.turn("c", [3]).origin_input_ids) == [1, 8, 9, 2, 8, 9, 3]
    for each in (first, second):
        each.controller.store.close()


def test_features_come_back_as_they_were(tmp_path: Path) -> None:
    kinds = engine(REQUESTS)
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit"), keep_features=True))
    first.open()
    given = processed(A_IDS, [image()])
    [item] = given.mm_items
    item.feature, item.precomputed_embeddings = None, torch.arange(12.0).reshape(4, 3).to(torch.bfloat16)
    item.format = kinds.MultimodalInputFormat.PRECOMPUTED_EMBEDDING
    item.model_specific_data |= {
        "scale": 0.25,
        "tiles": 3,
        "thumbnail": True,
        "mask": torch.ones(2, dtype=torch.bool),
        "none": None,
    }
    first.generate(first.send("a", A_IDS, mm_inputs=given), [8])
    pixels = processed(A_IDS, [image(number=1)])
    pixels.mm_items[0].feature = pixels.mm_items[0].feature.to(torch.float8_e4m3fn)
    first.generate(first.send("b", A_IDS, mm_inputs=pixels, after="a"), [8])
    second = reopened(tmp_path / "one", tmp_path / "two", keep_features=True)
    before, after = (each.send("c", [7], after="b").multimodal_inputs.mm_items for each in (first, second))
    for was, found in zip(before, after, strict=True):
        assert (found.format, found.hash, found.offsets) == (was.format, was.hash, was.offsets)
        for name in ("feature", "precomputed_embeddings"):
            one, two = getattr(was, name), getattr(found, name)
            assert (one is None) == (two is None)
            assert one is None or (one.dtype == two.dtype and torch.equal(one.float(), two.float()))
        own = {name: value for name, value in was.model_specific_data.items() if value is not None}
        assert own.keys() == found.model_specific_data.keys()
        for name, value in own.items():
            assert type(value) is type(found.model_specific_data[name])
            assert np.array_equal(value, found.model_specific_data[name])
    for each in (first, second):
        each.controller.store.close()


def test_without_its_features_a_session_says_which_image_to_send_again(tmp_path: Path) -> None:
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit")))
    first.open()
    first.turn("t", [1, 2])
    first.turn("a", A_IDS, image(), after="t")
    second = reopened(tmp_path / "one", tmp_path / "two")
    assert "features of image" in str(refused(second.send("b", [7], after="a")))
    assert refused(second.turn("c", A_IDS, image(), after="t")) is None
    assert refused(second.turn("d", [7], after="a")) is None  # the same image came again
    for each in (first, second):
        each.controller.store.close()


def test_a_closed_session_is_gone_after_a_restart_and_a_pinned_one_is_not(tmp_path: Path) -> None:
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit")))
    for name in ("gone", "pinned", "open"):
        first.open(name)
        first.turn(name, [1], session_id=name)
    session = first.controller.get("pinned")
    node = session.reply("pinned")
    session.tree.pin(node)
    first.close("gone")
    first.close("pinned")
    first.controller.store.create("somebody's own", scheme=toy_scheme())
    second = reopened(tmp_path / "one", tmp_path / "two")
    assert [*second.controller.sessions] == ["open"]
    assert second.controller.store.sessions() == ("pinned", "open", "somebody's own")
    assert second.controller.store.get("pinned").node(node.id).input_ids().tolist() == [1, 8, 9]
    assert second.open("gone") and not second.open("pinned") and not second.open("open")
    for each in (first, second):
        each.controller.store.close()


def test_an_idle_session_is_not_closed_before_anybody_told_the_time(tmp_path: Path) -> None:
    first = Engine(controller(store=SessionStore.open(tmp_path / "one", durability="commit")))
    first.open(timeout=5.0)
    first.turn("a", [1])
    second = reopened(tmp_path / "one", tmp_path / "two")
    second.controller.maybe_reap(1_000_000.0)
    assert "s" in second.controller
    second.controller.maybe_reap(1_000_006.0)
    assert "s" not in second.controller
    for each in (first, second):
        each.controller.store.close()


def test_without_sglang_it_imports_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = controller()
    sglang_media.sglang.cache_clear()
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", None)
    try:
        with pytest.raises(ImportError, match=r"pip install sglang==0\.5\.23"):
            made.open(SimpleNamespace(session_id="s", capacity_of_str_len=1, streaming=None, timeout=None))
    finally:
        sglang_media.sglang.cache_clear()
