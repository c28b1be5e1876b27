"""CASES.md, positions across turns: the rows' own numbers, and their kinds against the naive reference."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_bridge import RequestInputs, request_inputs, to_transformers
from sessiontree import (
    Draft,
    Edit,
    ExternalPositions,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    Position,
    PositionError,
    PositionLimitExceeded,
    Session,
    SessionStore,
    SessionTreeError,
)
from sessiontree.positions import Mode, scheme
from tests import reference as ref
from tests.reference import MODES, RULES, Segment
from tests.toy import (
    A_IDS,
    A_TABLE,
    IMG,
    PAD_VALUE,
    SECONDS,
    VE,
    VID,
    VS,
    Block,
    a_turn,
    attack_array,
    blocks,
    check,
    expected_spans,
    fingerprint,
    grow,
    histories,
    image,
    media,
    new_session,
    refuses,
    reply,
    same,
    shown,
    spans_of,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

EXAMPLES = settings(max_examples=40, deadline=None)


def table(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)


def on_all_axes(positions: range) -> NDArray[np.int64]:
    return np.tile(np.arange(positions.start, positions.stop), (3, 1))


def answer(segments: Sequence[Segment], mode: Mode = "as_decoded", rule: str = "sglang") -> ref.Replay:
    return ref.replay(ref.Scheme("qwen2_5_vl", rule, 2, 2), segments, mode)


# --- transformers' own answer -----------------------------------------------------------------------------------------
@cache
def qwen2_5_vl_model() -> Any:
    """Qwen2.5-VL of transformers without weights: only its position code is asked."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    layers = {"hidden_size": 16, "intermediate_size": 16}
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128}
    text_config = {**layers, **text, "bos_token_id": None, "eos_token_id": None, "rope_parameters": rope}
    vision_config = {**layers, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "spatial_merge_size": 2, "tokens_per_second": 2}
    config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config, image_token_id=IMG, video_token_id=VID)
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


def get_rope_index(segments: Sequence[Segment]) -> tuple[NDArray[Any], int]:
    """(table, delta) of transformers for the whole list of ids. Media must not touch."""
    ids = torch.tensor([ref.input_ids(segments)])
    types = torch.zeros_like(ids)
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    for item, start, stop in ref.media_spans(segments):
        types[0, start:stop] = 1 if item.modality == "image" else 2
        grids[item.modality].append(item.grid_thw)
    positions, delta = qwen2_5_vl_model().get_rope_index(
        ids,
        types,
        image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
        video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
        second_per_grid_ts=torch.tensor([SECONDS] * len(grids["video"])) if grids["video"] else None,
    )
    assert delta.shape == (1, 1)
    return positions[:, 0].numpy(), int(delta)


@st.composite
def apart(draw: st.DrawFn) -> list[Segment]:
    """Histories whose media stand between delimiters, as transformers needs them."""
    segments = [turn(1, *shown(draw(blocks())), 3)]
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.lists(st.integers(1, 99), max_size=5))
        if draw(st.booleans()):
            segments.append(reply(*text))
        else:
            segments.append(turn(*text, *(shown(draw(blocks())) if draw(st.booleans()) else ())))
    return segments


# --- C01: an image after a generated reply ----------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
def test_c01_image_after_a_reply(rule: str) -> None:
    history = [a_turn(), reply(8, 9), a_turn(number=1)]
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    expected = np.concatenate([A_TABLE, on_all_axes(range(7, 9)), A_TABLE + 9], axis=1)
    assert expected.shape == (3, 20)
    assert expected[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 12, 14, 15]
    for mode in MODES:
        assert same(node.positions(mode=mode), expected)
    assert node.mrope_position_delta == -4
    assert node.next_position == 16
    theirs, delta = get_rope_index(history)
    assert same(expected, theirs)
    assert delta == -4


@EXAMPLES
@given(apart())
def test_c01_any_conversation_equals_get_rope_index(history: list[Segment]) -> None:
    session = new_session(toy_scheme("hf5"))
    node = grow(session, session.root, *history)
    theirs, delta = get_rope_index(history)
    inputs = request_inputs(node, mode="as_replayed")
    assert same(inputs.positions, theirs)
    assert int(inputs.mrope_position_delta) == delta
    first, *later = history
    only_images = all(item.modality == "image" for segment in history for item in segment.items)
    if only_images or all(segment.origin == "input" for segment in later):
        assert same(node.positions(), theirs)  # the modes differ only behind a video
    assert first.items


@EXAMPLES
@given(histories(), st.sampled_from(RULES))
def test_c01_every_node_of_any_conversation(history: list[Segment], rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = session.root
    for count, segment in enumerate(history, 1):
        node = grow(session, node, segment)
        check(node, history[:count], rule)


# --- C02: text after an image turn ------------------------------------------------------------------------------------
def test_c02_text_after_an_image_turn() -> None:
    session = new_session()
    prompt = grow(session, session.root, turn(*range(7), *shown(image()), *range(7)))
    assert (prompt.stop, prompt.mrope_position_delta) == (20, -2)
    answered = grow(session, prompt, reply(*range(4)))
    node = grow(session, answered, turn(*range(15)))
    assert (node.start, node.stop) == (24, 39)
    assert same(node.positions(20, 24), on_all_axes(range(18, 22)))
    assert same(node.positions(24, 39), on_all_axes(range(22, 37)))
    inputs = request_inputs(node, 20)
    assert same(inputs.positions, on_all_axes(range(18, 37)))


@EXAMPLES
@given(blocks(), st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.sampled_from(RULES))
def test_c02_text_after_any_media(block: Block, before: int, replied: int, after: int, rule: str) -> None:
    history = [turn(1, *[7] * before, *shown(block)), reply(*[8] * replied), turn(*[9] * after)]
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    check(node, history, rule)
    table_width = len(history[0].tokens)
    window = node.positions(table_width, node.stop)
    assert window.shape == (3, replied + after)
    top = int(node.positions(0, table_width).max())
    if replied:
        assert same(window, on_all_axes(range(top + 1, top + 1 + replied + after)))


# --- C03: windows -----------------------------------------------------------------------------------------------------
def test_c03_every_window_has_exactly_its_width() -> None:
    history = [
        turn(*range(400), *shown(image(8, 8)), *range(480)),
        reply(*range(40)),
        turn(*shown(video(3)), *range(20)),
    ]
    session = new_session()
    node = grow(session, session.root, *history)
    assert len(history[0].tokens) == 898
    full = answer(history).positions
    total = node.stop
    assert node.positions(896, 946).shape == (3, 50)
    for start in range(total + 1):
        for length in range(1, 65):
            if start + length > total:
                continue
            window = node.positions(start, start + length)
            assert window.shape == (3, length)
            assert window.tobytes() == full[:, start : start + length].tobytes()


def test_c03_a_window_past_the_end_is_an_error_not_a_narrower_table() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn(), reply(8, 9))
    draft = session.draft(node)
    draft.extend([5])
    sources: list[Node | Draft] = [node, draft]
    for source in sources:
        stop = source.stop
        for window in [(0, stop + 1), (stop, stop + 1), (stop + 1, stop + 1), (-1, 2), (3, 2), (stop - 1, stop + 49), (-3, -1)]:
            for read in (source.positions, source.input_ids, source.media_spans):
                with pytest.raises(OutOfRange):
                    read(*window)
        with pytest.raises(OutOfRange):
            request_inputs(source, stop + 1)
        with pytest.raises(OutOfRange):
            request_inputs(source, -1)
        assert source.positions(stop, stop).shape == (3, 0)
        assert request_inputs(source, stop).positions.shape == (3, 0)


@EXAMPLES
@given(histories(), st.sampled_from(RULES), st.sampled_from(MODES))
def test_c03_every_window_of_any_conversation(history: list[Segment], rule: str, mode: Mode) -> None:
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    full = answer(history, mode, rule).positions
    for start in range(node.stop + 1):
        for stop in {start, *range(start, node.stop + 1, 3), node.stop}:
            window = node.positions(start, stop, mode)
            assert window.shape == (3, stop - start)
            assert same(window, full[:, start:stop])


# --- C04: one delta, whatever the number of media turns ---------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block", [image(), image(2, 12), video(4), video(2, 2, 2)], ids=["image", "wide", "video", "small video"])
@pytest.mark.parametrize("media_turns", range(6))
def test_c04_delta_is_one_scalar(media_turns: int, block: Block, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    history = [turn(1, 2)]
    for _ in range(media_turns):
        history += [turn(*shown(block)), reply(4, 5)]
    node = grow(session, session.root, *history)
    assert isinstance(node.mrope_position_delta, int)
    for mode in MODES:
        delta = request_inputs(node, mode=mode).mrope_position_delta
        assert delta.shape == (1, 1)
        assert delta.dtype == torch.int64
        expected = int(answer(history, mode, rule).positions.max()) + 1 - node.stop
        assert int(delta) == expected
    if block == image():
        assert node.mrope_position_delta == -2 * media_turns
    draft = session.draft(node)
    draft.extend([6, 6, 6])
    assert request_inputs(draft, node.stop).mrope_position_delta.shape == (1, 1)
    assert draft.mrope_position_delta == node.mrope_position_delta


# --- C05: a cut takes the media with it -------------------------------------------------------------------------------
def test_c05_cut_before_the_image_leaves_nothing_of_it() -> None:
    session = new_session()
    first = grow(session, session.root, turn(1, 2, image(), 3), reply(4, 5))
    assert first.mrope_position_delta == -2
    node = session.append(session.truncate(first, 2), [7, 8, 9])
    assert node.input_ids().tolist() == [1, 2, 7, 8, 9]
    assert node.media_spans() == ()
    assert [item for step in node.path() for item in step.media] == []
    assert same(node.positions(), on_all_axes(range(5)))
    assert node.mrope_position_delta == 0
    assert request_inputs(node).needed_items == ()


@EXAMPLES
@given(histories(), st.data(), st.sampled_from(RULES))
def test_c05_after_any_cut_the_path_is_its_own_history(history: list[Segment], data: st.DataObject, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    inside = {at for _, start, stop in ref.media_spans(history) for at in range(start + 1, stop)}
    length = data.draw(st.sampled_from([at for at in range(node.stop + 1) if at not in inside]))
    kept = []
    start = 0
    for segment in history:
        tokens = segment.tokens[: max(0, length - start)]
        items = tuple(item for item in segment.items if item.spans[0][0] + item.spans[0][1] <= len(tokens))
        kept.append(Segment(segment.origin, tokens, items))
        start += len(segment.tokens)
    after = turn(7, *shown(image(number=5)), 9)
    cut = session.truncate(node, length)
    child = grow(session, cut, after)
    kept = [segment for segment in kept if segment.tokens]
    if cut.depth:
        check(cut, kept, rule)
    check(child, [*kept, after], rule)


# --- C06: a cut inside media ------------------------------------------------------------------------------------------
SHAPES: dict[str, list[Segment]] = {
    "A": [a_turn()],
    "video": [turn(1, VS, video(3, 4, 6), VE, 3)],
    "begins and ends in media": [turn(image(), 7, video(2))],
    "two touching": [turn(1, image(), image(2, 6, number=1), 2)],
    "media in an ancestor": [a_turn(), reply(8, 9), turn(5, image(6, 2), 5), reply(4), turn(6, 6)],
    "one token": [turn(1, image(2, 2), 2)],
}


def check_every_cut(session: Session, node: Node) -> tuple[int, int]:
    """Try every cut of a path; (refused, allowed)."""
    ids, positions = node.input_ids(), node.positions()
    ends = {step.stop for step in node.path()}
    refused = 0
    for length in range(node.stop + 1):
        around = [span for span in node.media_spans() if span[1] < length < span[2]]
        if around and length not in ends:
            [(item, start, stop)] = around
            for cut, given_to in (
                (session.truncate, length),
                (session.drop_last, node.stop - length),
                (session.rewrite, [Edit(length, node.stop)]),
            ):
                error = refuses(MediaSpanError, session, cut, node, given_to)
                assert error.item.identity == item.identity
                assert error.span == (start, stop)
                assert str(item) in str(error)
            refused += 1
            continue
        kept = session.truncate(node, length)
        assert kept.stop == length
        assert same(kept.input_ids(), ids[:length])
        assert same(kept.positions(), positions[:, :length])
        assert kept.media_spans() == node.media_spans(0, length)
        assert session.drop_last(node, node.stop - length) == kept
    return refused, node.stop + 1 - refused


@pytest.mark.parametrize("shape", SHAPES)
def test_c06_every_cut_of(shape: str) -> None:
    session = new_session()
    history = SHAPES[shape]
    node = grow(session, session.root, *history)
    refused, allowed = check_every_cut(session, node)
    inside = sum(stop - start - 1 for _, start, stop in ref.media_spans(history))
    assert (refused, allowed) == (inside, node.stop + 1 - inside)


def test_c06_cuts_of_a() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn())
    for length in (4, 5, 6):
        error = refuses(MediaSpanError, session, session.truncate, node, length)
        assert error.item == node.media[0]
        assert error.span == (3, 7)
    assert session.truncate(node, 3).input_ids().tolist() == A_IDS[:3]
    assert session.truncate(node, 7).input_ids().tolist() == A_IDS[:7]
    assert session.truncate(node, 3).media_spans() == ()
    assert session.truncate(node, 7).media_spans() == ((node.media[0], 3, 7),)


@pytest.mark.parametrize("block", [image(), video(3, 4, 6)], ids=["image", "video"])
def test_c06_every_cut_of_an_item_split_over_nodes(block: Block) -> None:
    whole = [turn(1, VS, block, VE, 3)]
    spans = ref.media_spans(whole)
    begin, end = spans[0][1:]
    for first in range(begin + 1, end):
        session = new_session()
        parts = ref.split(whole[0].tokens, spans, [first])
        node = grow(session, session.root, *parts)
        assert same(node.positions(), answer(whole).positions)
        refused, _ = check_every_cut(session, node)
        assert refused == (end - begin - 1) - 1  # every place inside but the one where a turn ends
        assert session.truncate(node, first) == node.path()[1]


@settings(max_examples=20, deadline=None)
@given(histories(), st.data())
def test_c06_every_cut_of_any_conversation(history: list[Segment], data: st.DataObject) -> None:
    session = new_session()
    joined = ref.input_ids(history)
    spans = ref.media_spans(history)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(joined)), max_size=3)) - {len(joined)})
    node = grow(session, session.root, *ref.split(joined, spans, cuts))
    check_every_cut(session, node)


# --- C07: what follows a path that ends in media ----------------------------------------------------------------------
def test_c07_after_an_image_at_the_end() -> None:
    session = new_session()
    node = grow(session, session.root, turn(1, VS, image()))
    assert node.positions()[0].tolist() == [0, 1, 2, 2, 2, 2]
    assert int(node.positions()[1:].max()) == 3
    assert node.next_position == 4
    draft = session.draft(node)
    draft.extend([8, 9])
    assert same(draft.positions(6), on_all_axes(range(4, 6)))
    assert same(draft.commit().positions(6), on_all_axes(range(4, 6)))
    assert same(session.append(node, [8, 9]).positions(6), on_all_axes(range(4, 6)))


@EXAMPLES
@given(blocks(), st.integers(0, 3), st.sampled_from(RULES))
def test_c07_after_any_media_at_the_end(block: Block, before: int, rule: str) -> None:
    history = [turn(*[7] * before, block)]
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    draft = session.draft(node)
    draft.extend([8, 9, 8])
    top = int(node.positions().max())
    assert same(draft.positions(node.stop), on_all_axes(range(top + 1, top + 4)))
    check(draft, [*history, reply(8, 9, 8)], rule)
    check(session.append(node, [4, 4]), [*history, turn(4, 4)], rule)
    check(session.append(draft.commit(), [4, 4]), [*history, reply(8, 9, 8), turn(4, 4)], rule)


# --- C08: retraction --------------------------------------------------------------------------------------------------
def inputs_bytes(inputs: RequestInputs) -> tuple[bytes, bytes, bytes]:
    tensors = (inputs.input_ids, inputs.positions, inputs.mrope_position_delta)
    ids, positions, delta = (tensor.numpy().tobytes() for tensor in tensors)
    return ids, positions, delta


@pytest.mark.parametrize("first", [a_turn(), turn(1, VS, image()), turn(video(4, 2, 2))], ids=["A", "ends in image", "video"])
@pytest.mark.parametrize("rule", RULES)
def test_c08_preempted_again_and_again(first: Segment, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    parent = grow(session, session.root, first)
    child = grow(session, parent, turn(5, 6))
    before = [fingerprint(parent), fingerprint(child)]
    width = parent.positions().shape[1]
    draft = session.draft(child)
    draft.extend([7, 8, 9])
    prefilled = inputs_bytes(request_inputs(draft))
    for _ in range(10):  # the request waits for room, and is prefilled from its draft at every attempt
        assert inputs_bytes(request_inputs(draft)) == prefilled
    for _ in range(10):  # the engine throws the attempt away and makes the same tokens again
        draft.abort()
        draft = session.draft(child)
        draft.extend([7, 8, 9])
        assert inputs_bytes(request_inputs(draft)) == prefilled
    check(draft, [first, turn(5, 6), reply(7, 8, 9)], rule)
    assert [fingerprint(parent), fingerprint(child)] == before
    assert parent.positions().shape[1] == width
    assert inputs_bytes(request_inputs(draft.commit())) == prefilled


# --- C12: chunked prefill ---------------------------------------------------------------------------------------------
def check_chunks(session: Session, node: Node, bounds: Sequence[int], full: NDArray[Any]) -> None:
    """Chunks by windows, by the bridge from the chunk's start, and by the bridge on a path cut at the chunk's end."""
    ids = node.input_ids()
    for start, stop in pairwise(bounds):
        expected = full[:, start:stop]
        assert node.positions(start, stop).shape == (3, stop - start)
        assert same(node.positions(start, stop), expected)
        inputs = request_inputs(node, start)
        assert inputs.positions.shape == (3, node.stop - start)
        assert same(inputs.positions[:, : stop - start], expected)
        assert same(inputs.input_ids[: stop - start], ids[start:stop])
        if not any(first < stop < last for _, first, last in node.media_spans()):
            chunk = request_inputs(session.truncate(node, stop), start)
            assert chunk.positions.shape == (3, stop - start)
            assert same(chunk.positions, expected)
            assert same(chunk.input_ids, ids[start:stop])
            assert chunk.media_spans == node.media_spans(start, stop)
    joined = np.concatenate([node.positions(start, stop) for start, stop in pairwise(bounds)], axis=1)
    assert same(joined, full)


def test_c12_chunks_of_32_and_8() -> None:
    session = new_session()
    history = [turn(*range(10), *shown(image(8, 8)), *range(12))]
    node = grow(session, session.root, *history)
    assert node.stop == 40
    check_chunks(session, node, [0, 32, 40], answer(history).positions)
    second = request_inputs(node, 32)
    assert second.positions.shape == (3, 8)
    assert same(second.positions, on_all_axes(range(20, 28)))


@EXAMPLES
@given(histories(), st.data())
def test_c12_any_chunks(history: list[Segment], data: st.DataObject) -> None:
    session = new_session()
    node = grow(session, session.root, *history)
    inner = data.draw(st.sets(st.integers(0, node.stop), max_size=6))
    check_chunks(session, node, sorted({0, node.stop} | inner), answer(history).positions)


# --- C14: speculative decoding crosses the end of the prompt ----------------------------------------------------------
@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("first", [a_turn(), turn(1, VS, image()), turn(1, video(3))], ids=["A", "ends in image", "ends in video"])
def test_c14_windows_across_the_end_of_the_prompt(first: Segment, length: int) -> None:
    session = new_session()
    node = grow(session, session.root, first)
    draft = session.draft(node)
    draft.extend(range(8))
    full = answer([first, reply(*range(8))]).positions
    for start in range(max(0, node.stop - length), draft.stop - length + 1):
        window = draft.positions(start, start + length)
        assert window.shape == (3, length)
        assert same(window, full[:, start : start + length])
        assert same(draft.input_ids(start, start + length), np.array([*first.tokens, *range(8)])[start : start + length])
    draft.rollback(length)  # accepted so far
    inputs = request_inputs(draft, node.stop - 1)
    assert inputs.positions.shape == (3, length + 1)
    assert same(inputs.positions, full[:, node.stop - 1 : node.stop + length])
    draft.extend([9] * 4)
    assert draft.positions(node.stop).shape == (3, length + 4)
    assert same(draft.positions(node.stop, node.stop + length), full[:, node.stop : node.stop + length])


@EXAMPLES
@given(histories(), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=5), st.sampled_from(RULES))
def test_c14_verify_steps_after_any_conversation(history: list[Segment], steps: list[tuple[int, int]], rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    draft = session.draft(node)
    tokens: list[int] = []
    for proposed, refused in steps:
        before = draft.stop
        draft.extend([6] * proposed)
        expected = answer([*history, reply(*tokens, *[6] * proposed)], rule=rule).positions
        assert same(request_inputs(draft, before).positions, expected[:, before:])
        assert same(draft.positions(draft.stop - 1), expected[:, draft.stop - 1 :])
        check(draft, [*history, reply(*tokens, *[6] * proposed)], rule)
        tokens += [6] * (proposed - min(refused, proposed))
        draft.rollback(len(tokens))
        check(draft, [*history, reply(*tokens)], rule)


# --- C15: the engine chooses where the window starts ------------------------------------------------------------------
@EXAMPLES
@given(histories(), st.sampled_from(RULES), st.sampled_from(MODES))
def test_c15_the_bridge_serves_any_start(history: list[Segment], rule: str, mode: Mode) -> None:
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    full = answer(history, mode, rule)
    ids = ref.input_ids(history)
    for prefix in range(node.stop + 1):
        inputs = request_inputs(node, prefix, mode=mode)
        assert same(inputs.input_ids, np.array(ids[prefix:], dtype=np.int64))
        assert same(inputs.positions, full.positions[:, prefix:])
        assert int(inputs.mrope_position_delta) == full.delta
        spans = [(item.identity, start, stop) for item, start, stop in inputs.media_spans]
        assert spans == expected_spans(history, prefix, node.stop)
        assert {item.identity for item in inputs.needed_items} == {identity for identity, _, _ in spans}
        assert len(inputs.needed_items) == len({item.identity for item in inputs.needed_items})
        assert (inputs.mode, inputs.prefix_len) == (mode, prefix)


def test_c15_snapped_back_to_a_checkpoint_inside_an_ancestors_image() -> None:
    history = [turn(*range(60), *shown(image(8, 8)), *range(3)), reply(*range(5)), turn(*range(10))]
    session = new_session()
    node = grow(session, session.root, *history)
    checkpoint = 64
    assert 61 < checkpoint < 77 < node.start
    inputs = request_inputs(node, checkpoint)
    assert same(inputs.positions, answer(history).positions[:, checkpoint:])
    assert inputs.positions[:, 0].tolist() == [61, 61, 64]
    assert spans_of(node, checkpoint, node.stop) == [(node.path()[1].media[0].identity, 64, 77)]
    assert inputs.needed_items == node.path()[1].media


# --- C16: token indexes and positions ---------------------------------------------------------------------------------
INDEX_PARAMETERS: dict[str, Callable[[Session, Node, Draft, Position], object]] = {
    "node.input_ids start": lambda session, node, draft, at: node.input_ids(at),
    "node.input_ids stop": lambda session, node, draft, at: node.input_ids(0, at),
    "node.positions start": lambda session, node, draft, at: node.positions(at),
    "node.positions stop": lambda session, node, draft, at: node.positions(0, at),
    "node.media_spans start": lambda session, node, draft, at: node.media_spans(at),
    "node.media_spans stop": lambda session, node, draft, at: node.media_spans(0, at),
    "draft.input_ids start": lambda session, node, draft, at: draft.input_ids(at),
    "draft.input_ids stop": lambda session, node, draft, at: draft.input_ids(0, at),
    "draft.positions start": lambda session, node, draft, at: draft.positions(at),
    "draft.positions stop": lambda session, node, draft, at: draft.positions(0, at),
    "draft.media_spans start": lambda session, node, draft, at: draft.media_spans(at),
    "draft.media_spans stop": lambda session, node, draft, at: draft.media_spans(0, at),
    "draft.rollback": lambda session, node, draft, at: draft.rollback(at),
    "draft.commit length": lambda session, node, draft, at: draft.commit(length=at),
    "session.truncate": lambda session, node, draft, at: session.truncate(node, at),
    "session.drop_last": lambda session, node, draft, at: session.drop_last(node, at),
    "tree.truncate": lambda session, node, draft, at: session.tree.truncate(node, at),
    "tree.drop_last": lambda session, node, draft, at: session.tree.drop_last(node, at),
    "Edit start": lambda session, node, draft, at: session.rewrite(node, [Edit(at, 9, [1])]),
    "Edit stop": lambda session, node, draft, at: session.rewrite(node, [Edit(0, at, [1])]),
    "edit tuple": lambda session, node, draft, at: session.rewrite(node, [(0, at, [1])]),
    "span offset": lambda session, node, draft, at: MediaItem("image", bytes(32), [(at, 4)], (1, 4, 4)),
    "span length": lambda session, node, draft, at: MediaItem("image", bytes(32), [(0, at)], (1, 4, 4)),
    "with_spans": lambda session, node, draft, at: node.media[0].with_spans([(at, 4)]),
    "placeholders_before": lambda session, node, draft, at: MediaItem(
        "image", bytes(32), [(0, 2)], (1, 4, 4), placeholders_before=at
    ),
    "max_tokens": lambda session, node, draft, at: new_session(max_tokens=at),
    "reserve_output": lambda session, node, draft, at: new_session(max_tokens=99, reserve_output=at),
    "request_inputs": lambda session, node, draft, at: request_inputs(node, at),
    "request_inputs of a draft": lambda session, node, draft, at: request_inputs(draft, at),
    "to_transformers": lambda session, node, draft, at: to_transformers(node, at),
}


@pytest.mark.parametrize("parameter", INDEX_PARAMETERS)
def test_c16_a_position_is_no_token_index(parameter: str) -> None:
    session = new_session()
    node = grow(session, session.root, a_turn())
    draft = session.draft(node)
    draft.extend(range(8))
    call = INDEX_PARAMETERS[parameter]
    positions = (node.next_position, Position(3), node.next_position - 4, 1 + Position(2), draft.next_position - 8)
    for position in positions:
        assert isinstance(position, Position)
        error = refuses(TypeError, session, call, session, node, draft, position)
        assert "Position" in str(error)
    assert len(draft) == 8
    assert not draft.closed


def test_c16_length_and_next_position_after_an_image() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn())
    assert (node.stop, len(node), int(node.next_position)) == (9, 9, 7)
    assert type(node.next_position) is Position
    assert type(node.stop) is int
    assert type(node.start) is int
    draft = session.draft(node)
    draft.extend([8])
    assert (draft.stop, draft.next_position) == (10, 8)
    assert type(draft.next_position) is Position
    assert type(session.scheme.next_position(node.position_state())) is Position
    assert node.positions(int(node.next_position)).shape == (3, 2)  # said in so many words
    seven: Any = np.int64(7)
    assert node.positions(seven, 9).shape == (3, 2)
    for wrong in (1.0, True, "1", None, np.float64(1)):
        with pytest.raises(TypeError):
            node.positions(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            session.truncate(node, wrong)  # type: ignore[arg-type]


# --- C17: a node is enough --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ending", ["dropped", "closed", "store closed"])
def test_c17_a_node_alone_knows_its_delta(ending: str, rule: str) -> None:
    history = [turn(1, *shown(video(3)), 2), reply(8, 9), a_turn(), reply(4)]
    store = SessionStore.in_memory()
    session = store.create("toy", scheme=toy_scheme(rule))
    gone: list[Any] = [weakref.ref(session), weakref.ref(store)]
    node = grow(session, session.root, *history)
    if ending == "closed":
        session.close()
    if ending == "store closed":
        store.close()
    del session, store
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    check(node, history, rule)
    for mode in MODES:
        expected = answer(history, mode, rule)
        inputs = request_inputs(node, 3, mode=mode)
        assert int(inputs.mrope_position_delta) == expected.delta
        assert same(inputs.positions, expected.positions[:, 3:])
    # Warm continuation: decode, then text, then an image, from what the node carries.
    state = node.position_state()
    decoded, state = node.scheme.decode(state, [5, 6])
    text, state = node.scheme.extend(state, [7, 7])
    last = turn(*shown(image()))
    shown_table, state = node.scheme.extend(state, last.tokens, media(last))
    whole = answer([*history, reply(5, 6), turn(7, 7), last], rule=rule)
    assert same(np.concatenate([decoded, text, shown_table], axis=1), whole.positions[:, node.stop :])
    assert node.scheme.mrope_position_delta(state) == whole.delta


def test_c17_a_draft_alone_is_prefilled_again() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn())
    draft = session.draft(node)
    draft.extend([8, 9])
    del session, node
    gc.collect()
    check(draft, [a_turn(), reply(8, 9)])
    assert int(request_inputs(draft, 9).mrope_position_delta) == -2
    check(draft.commit(), [a_turn(), reply(8, 9)])


# --- C18, C19: no call remembers another ------------------------------------------------------------------------------
def conversations() -> list[list[Segment]]:
    """Eight conversations of different delta."""
    return [[turn(1, *shown(image(2 * number + 2, 4)), *range(number)), reply(*range(number)), turn(5)] for number in range(8)]


def test_c18_unrelated_sessions_in_any_order() -> None:
    first, second = conversations()[1], [turn(1, *shown(video(4)), 3), reply(6)]
    nodes = [grow(session, session.root, *history) for history in (first, second) for session in [new_session()]]
    deltas = [answer(first).delta, answer(second).delta]
    assert deltas[0] != deltas[1]
    for order in ([0, 1], [1, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1] * 5):
        for which in order:
            history = (first, second)[which]
            for prefix in (0, nodes[which].stop - 1, 2):
                inputs = request_inputs(nodes[which], prefix)
                assert int(inputs.mrope_position_delta) == deltas[which]
                assert same(inputs.positions, answer(history).positions[:, prefix:])
                assert same(to_transformers(nodes[which])["position_ids"][:, 0], answer(history).positions)


def test_c18_a_tensor_that_a_caller_scribbles_on_reaches_no_later_call() -> None:
    session = new_session()
    node = grow(session, session.root, *conversations()[2])
    before = inputs_bytes(request_inputs(node))
    inputs = request_inputs(node)
    for tensor in (inputs.input_ids, inputs.positions, inputs.mrope_position_delta):
        tensor.fill_(-7)
    assert inputs_bytes(request_inputs(node)) == before


def test_c19_eight_threads() -> None:
    nodes = []
    for history in conversations():
        session = new_session()
        nodes.append(grow(session, session.root, *history))
    expected = [inputs_bytes(request_inputs(node)) for node in nodes]
    assert len({node.mrope_position_delta for node in nodes}) == 8
    failures: list[str] = []
    start = threading.Barrier(8)

    def bridge(number: int) -> None:
        start.wait()
        for _ in range(150):
            got = inputs_bytes(request_inputs(nodes[number]))
            if got != expected[number] or to_transformers(nodes[number])["position_ids"].shape[2] != nodes[number].stop:
                failures.append(f"thread {number} got another's answer")

    run_threads(bridge, failures)
    assert failures == []


def test_c19_eight_threads_write_and_read_one_session() -> None:
    session = new_session()
    base = grow(session, session.root, a_turn())
    failures: list[str] = []
    start = threading.Barrier(8)
    tips: dict[int, Node] = {}

    def converse(number: int) -> None:
        history = [a_turn()]
        node = base
        start.wait()
        for step in range(10):
            segment = turn(number, step, *shown(image(2 * number + 2, 4))) if step % 2 else reply(number, step)
            history.append(segment)
            node = grow(session, node, segment)
            inputs = request_inputs(node)
            expected = answer(history)
            if not same(inputs.positions, expected.positions) or int(inputs.mrope_position_delta) != expected.delta:
                failures.append(f"thread {number}, step {step}")
        tips[number] = node

    run_threads(converse, failures)
    assert failures == []
    assert len({tip.mrope_position_delta for tip in tips.values()}) == 8
    assert len(session.tree) == 2 + 8 * 10


def run_threads(work: Callable[[int], None], failures: list[str]) -> None:
    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# --- C24: absurd times ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seconds", [1e9, 2.0**23, 1e30, 3e38, 1e300])
def test_c24_a_tiny_frame_rate_is_refused_at_append(rule: str, seconds: float) -> None:
    session = new_session(toy_scheme(rule))
    parent = grow(session, session.root, a_turn())
    before = fingerprint(parent)
    clip = MediaItem("video", bytes(32), [(1, 8)], (2, 4, 4), seconds)
    error = refuses(PositionLimitExceeded, session, lambda: session.append(parent, [VS, *[VID] * 8, VE], media=[clip]))
    assert isinstance(error, PositionError)
    assert isinstance(error, LimitExceeded)
    assert error.limit == 2**24
    assert error.value >= 2**24
    assert fingerprint(parent) == before
    check(grow(session, parent, turn(5)), [a_turn(), turn(5)], rule)  # the parent takes other turns as before


@pytest.mark.parametrize("seconds", [float("inf"), float("-inf"), float("nan"), -1.0])
def test_c24_a_time_that_is_none(seconds: float) -> None:
    with pytest.raises(PositionError):
        MediaItem("video", bytes(32), [(0, 8)], (2, 4, 4), seconds)


@pytest.mark.parametrize("rule", RULES)
def test_c24_the_limit_is_exact(rule: str) -> None:
    def clip(seconds: float) -> list[MediaItem]:
        return [MediaItem("video", bytes(32), [(0, 2)], (2, 2, 2), seconds)]

    session = new_session(toy_scheme(rule, max_position_limit=100))
    start = session.append(session.root, [1, 2])
    last = session.append(start, [VID, VID], media=clip(48.5))  # frames at 2 and 2 + 97
    assert int(last.positions().max()) == 99
    error = refuses(PositionLimitExceeded, session, lambda: session.append(start, [VID, VID], media=clip(49.0)))
    assert (error.value, error.limit) == (100, 100)
    draft = session.draft(last)
    for take in (lambda: draft.append(1), lambda: draft.extend([1, 1]), lambda: draft.extend(range(1000))):
        refuses(PositionLimitExceeded, session, take)
    assert len(draft) == 0
    if rule == "hf5":  # prefilled text goes on at max(h, w), far below
        assert session.append(last, [1] * 97).positions(4).max() == 99
        refuses(PositionLimitExceeded, session, lambda: session.append(last, [1] * 98))
    else:
        refuses(PositionLimitExceeded, session, lambda: session.append(last, [1]))


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_c24_text_at_the_limit(limit: int) -> None:
    session = new_session(scheme("text@sglang", max_position_limit=limit))
    refuses(PositionLimitExceeded, session, lambda: session.append(session.root, [1] * (limit + 1)))
    full = session.append(session.root, [1] * limit)
    assert int(full.positions().max()) == limit - 1
    refuses(PositionLimitExceeded, session, lambda: session.append(full, [1]))
    draft = session.draft(session.root)
    draft.extend([1] * limit)
    refuses(PositionLimitExceeded, session, lambda: draft.append(1))
    assert len(draft) == limit


# --- C25, C26: media are found from spans, never from ids -------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ids", [[1, VS, IMG, 3], [VS, IMG], [IMG] * 4, [VS, VID, VE], [VID, IMG, VS], [VS]], ids=str)
def test_c25_ids_that_look_like_media(ids: list[int], rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = session.append(session.root, ids)
    assert same(node.positions(), on_all_axes(range(len(ids))))
    assert node.media_spans() == ()
    assert node.mrope_position_delta == 0
    assert same(request_inputs(node).positions, on_all_axes(range(len(ids))))
    history = [a_turn(), turn(*ids), a_turn(number=1), reply(*ids), turn(*ids)]
    check(grow(session, session.root, *history), history, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [1, 3, 5, 6])
def test_c25_a_span_of_another_size_than_the_grid(length: int, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    parent = grow(session, session.root, a_turn())
    item = MediaItem("image", bytes(32), [(1, length)], (1, 4, 4))
    for ids in ([VS, *[IMG] * length, VE, 3], [VS, *[9] * 8]):
        error = refuses(MediaSpanError, session, session.append, parent, ids, media=[item])
        assert error.item == item
        assert error.span == (1, 1 + length)


def test_c25_spans_that_cannot_be() -> None:
    session = new_session()
    four = [IMG] * 4
    good = MediaItem("image", bytes(32), [(0, 4)], (1, 4, 4))
    late = MediaItem("image", bytes(32), [(1, 4)], (1, 4, 4))
    none = MediaItem("image", bytes(32), [], (1, 4, 4))
    other = MediaItem("image", bytes(31) + b"1", [(2, 4)], (1, 4, 4))
    cases: list[tuple[list[int], list[MediaItem], MediaItem]] = [
        (four, [late], late),
        ([], [good], good),
        (four, [none], none),
        ([*four, 1, 1], [good, other], other),
    ]
    for ids, items, named in cases:
        error = refuses(MediaSpanError, session, session.append, session.root, ids, media=items)
        assert error.item == named
    check(grow(session, session.root, a_turn()), [a_turn()])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fill", [PAD_VALUE, 0, VS, VE, VID, 2**31 - 1])
def test_c26_padded_ids_give_the_same_table(fill: int, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    raw = grow(session, session.root, a_turn(), reply(8), a_turn(number=1))
    padded = grow(session, session.root, a_turn(fill=fill), reply(8), a_turn(number=1, fill=fill))
    assert padded.input_ids(3, 7).tolist() == [fill] * 4
    assert raw != padded
    for mode in MODES:
        assert same(padded.positions(mode=mode), raw.positions(mode=mode))
    assert same(padded.positions(0, 9), A_TABLE)
    assert padded.mrope_position_delta == raw.mrope_position_delta == -4
    assert [span[1:] for span in padded.media_spans()] == [span[1:] for span in raw.media_spans()]


@EXAMPLES
@given(histories(), st.randoms(use_true_random=False), st.sampled_from(RULES))
def test_c26_positions_do_not_depend_on_ids(history: list[Segment], rng: Any, rule: str) -> None:
    session = new_session(toy_scheme(rule))
    node = grow(session, session.root, *history)
    other = [Segment(segment.origin, tuple(rng.randrange(2**31) for _ in segment.tokens), segment.items) for segment in history]
    twin = grow(session, session.root, *other)
    check(twin, other, rule)
    for mode in MODES:
        assert same(twin.positions(mode=mode), node.positions(mode=mode))


# --- C28, C32: tables that come from elsewhere ------------------------------------------------------------------------
PRUNED = table([[7, 7, 8, 9, 9], [7, 8, 7, 8, 9], [7, 7, 9, 8, 8]])


def test_c28_a_pruned_clip_and_what_follows() -> None:
    """A clip whose encoder kept 3 of its 12 tokens: the turn is [VS, 3 tokens, VE]."""
    session = new_session()
    parent = grow(session, session.root, a_turn())
    clip = MediaItem("video", bytes(32), [(1, 3)], (3, 4, 4), 1.0)
    ids = [VS, *[VID] * 3, VE]
    refuses(MediaSpanError, session, lambda: session.append(parent, ids, media=[clip]))  # by the grid it is wrong
    node = session.append(parent, ids, media=[clip], positions=PRUNED)
    whole = np.concatenate([A_TABLE, PRUNED], axis=1)
    for mode in MODES:
        assert same(node.positions(mode=mode), whole)
    assert node.next_position == 10
    assert node.mrope_position_delta == 10 - 14
    assert spans_of(node) == [(parent.media[0].identity, 3, 7), (bytes(32), 10, 13)]
    # Later turns go on from it.
    answered = grow(session, node, reply(8, 9))
    assert same(answered.positions(14), on_all_axes(range(10, 12)))
    later = grow(session, answered, a_turn(number=1))
    assert same(later.positions(), np.concatenate([whole, on_all_axes(range(10, 12)), A_TABLE + 12], axis=1))
    assert later.mrope_position_delta == int(later.positions().max()) + 1 - later.stop
    for start in range(later.stop + 1):
        assert same(request_inputs(later, start).positions, later.positions(start))
    # A second encoder run gives another table: another node, and the first stays.
    before = fingerprint(node), fingerprint(later)
    second = session.append(parent, ids, media=[clip], positions=PRUNED + 1)
    assert second != node
    assert same(second.positions(9), PRUNED + 1)
    assert second.next_position == 11
    assert (fingerprint(node), fingerprint(later)) == before
    assert session.children(parent) == (node, second)
    assert session.append(parent, ids, media=[clip], positions=PRUNED.tolist()) == node  # a retry
    assert session.append(parent, ids, media=[clip], positions=ExternalPositions(PRUNED)) == node


def test_c28_replaced_by_a_new_node_and_a_moved_head() -> None:
    session = new_session()
    parent = grow(session, session.root, a_turn())
    first = session.append(parent, range(5), positions=PRUNED)
    session.set_head("main", first)
    before = fingerprint(first)
    second = session.replace(first, range(5), head="main", expected=first, positions=PRUNED + 3)
    assert session.heads["main"] == second != first
    assert same(second.positions(9), PRUNED + 3)
    assert fingerprint(first) == before
    assert session.siblings(second) == (first,)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_c28_any_number_of_placeholders(length: int) -> None:
    """The table, not the grid of 4, says how many there are."""
    session = new_session()
    item = MediaItem("image", bytes(32), [(1, length)], (1, 4, 4))
    columns = np.random.default_rng(length).integers(0, 50, (3, length + 2))
    node = session.append(session.root, [VS, *[IMG] * length, VE], media=[item], positions=columns)
    assert same(node.positions(), columns)
    assert node.media_spans() == ((item, 1, 1 + length),)
    assert node.next_position == int(columns.max()) + 1
    child = grow(session, node, turn(4, 4))
    assert same(child.positions(node.stop), on_all_axes(range(int(columns.max()) + 1, int(columns.max()) + 3)))


@pytest.mark.parametrize("width", [0, 1, 4, 6, 7, 20])
@pytest.mark.parametrize("given", [np.asarray, ExternalPositions, torch.tensor, np.ndarray.tolist])
def test_c32_a_table_is_as_wide_as_its_turn(width: int, given: Callable[[Any], Any]) -> None:
    """GLM-Image's tables carry columns of tokens to come; a width is never taken for the length of a turn."""
    session = new_session()
    parent = grow(session, session.root, a_turn())
    columns = given(np.tile(np.arange(7, 7 + width), (3, 1)))
    error = refuses(PositionError, session, lambda: session.append(parent, range(5), positions=columns))
    assert "5" in str(error)
    node = session.append(parent, range(5), positions=np.tile(np.arange(7, 12), (3, 1)))
    assert same(request_inputs(node, 5).input_ids, np.array([IMG, IMG, VE, 3, 0, 1, 2, 3, 4]))
    assert request_inputs(node).positions.shape == (3, 14)


def test_c32_where_text_continues_is_a_field_of_its_own() -> None:
    session = new_session()
    external = ExternalPositions(PRUNED, next_position=30, max_position=40)
    node = session.append(session.root, range(5), positions=external)
    assert same(node.positions(), PRUNED)
    assert node.next_position == 30
    assert node.mrope_position_delta == 41 - 5
    assert same(session.append(node, [1, 2]).positions(5), on_all_axes(range(30, 32)))
    assert same(grow(session, node, reply(1, 2)).positions(5), on_all_axes(range(41, 43)))
    others = [
        session.append(session.root, range(5), positions=ExternalPositions(PRUNED, after, top))
        for after, top in [(None, None), (30, None), (30, 41), (31, 40)]
    ]
    assert len({node, *others}) == 5


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_c28_of_another_number_of_axes(axes: int) -> None:
    session = new_session()
    refuses(PositionError, session, lambda: session.append(session.root, [1, 2], positions=np.zeros((axes, 2), np.int64)))


def wrong_tables() -> dict[str, Any]:
    return {
        "one-dimensional": np.arange(5),
        "transposed": PRUNED.T,
        "three-dimensional": PRUNED[None],
        "scalar": 3,
        "float": PRUNED.astype(np.float64),
        "float tensor": torch.tensor(PRUNED, dtype=torch.float32),
        "bool": PRUNED > 8,
        "complex": PRUNED.astype(np.complex128),
        "text": PRUNED.astype(str),
        "times": PRUNED.astype("m8[s]"),
        "negative": PRUNED - 8,
        "very negative": PRUNED - 2**62,
    }


@pytest.mark.parametrize("name", wrong_tables())
def test_c28_a_table_that_cannot_be(name: str) -> None:
    session = new_session()
    parent = grow(session, session.root, a_turn())
    refuses(PositionError, session, lambda: session.append(parent, range(5), positions=wrong_tables()[name]))


@pytest.mark.parametrize("values", [[[1, object()]], ["a", None]], ids=["objects", "none"])
def test_c28_a_table_of_objects(values: list[Any]) -> None:
    session = new_session()
    refuses(TypeError, session, lambda: session.append(session.root, [1, 2], positions=values))


@pytest.mark.parametrize("value", [2**24, 2**31, 2**62, 2**63 + 5])
@pytest.mark.parametrize("limit", [None, 100])
def test_c28_a_table_beyond_the_limit(value: int, limit: int | None) -> None:
    session = new_session(toy_scheme() if limit is None else toy_scheme(max_position_limit=limit))
    columns = np.array(PRUNED, dtype=np.uint64)
    columns[1, 2] = value
    error = refuses(PositionLimitExceeded, session, lambda: session.append(session.root, range(5), positions=columns))
    assert error.limit == session.scheme.max_position_limit
    columns[1, 2] = session.scheme.max_position_limit - 1
    assert session.append(session.root, range(5), positions=columns).positions().max() == session.scheme.max_position_limit - 1


@pytest.mark.parametrize(
    ("after", "top"),
    [(-1, None), (None, 8), (None, -1), (5, 3), (2**24 + 1, None), (None, 2**24), (2**40, 2**40)],
)
def test_c28_a_next_or_greatest_position_that_cannot_be(after: int | None, top: int | None) -> None:
    session = new_session()
    external = ExternalPositions(PRUNED, next_position=after, max_position=top)
    refuses(PositionError, session, lambda: session.append(session.root, range(5), positions=external))


def test_c28_the_greatest_position_of_the_path_is_not_below_the_paths() -> None:
    session = new_session()
    parent = session.append(session.root, range(50))  # up to position 49
    external = ExternalPositions(PRUNED, max_position=9)
    refuses(PositionError, session, lambda: session.append(parent, range(5), positions=external))
    low = session.append(parent, range(5), positions=PRUNED)
    assert low.mrope_position_delta == 50 - 55
    assert low.next_position == 10


@pytest.mark.parametrize("wrong", ["10", b"10", [10], True], ids=str)
def test_c28_positions_are_numbers(wrong: Any) -> None:
    with pytest.raises(TypeError):
        ExternalPositions(PRUNED, next_position=wrong)
    with pytest.raises(TypeError):
        ExternalPositions(PRUNED, max_position=wrong)


@pytest.mark.parametrize("wrong", [12.7, 12.0, np.float32(12)], ids=repr)
def test_c28_positions_are_whole_where_the_scheme_has_no_others(wrong: Any) -> None:
    session = new_session()
    for external in (ExternalPositions(PRUNED, next_position=wrong), ExternalPositions(PRUNED, max_position=wrong)):
        refuses(TypeError, session, lambda external=external: session.append(session.root, range(5), positions=external))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_c28_positions_are_finite(wrong: float) -> None:
    with pytest.raises(PositionError):
        ExternalPositions(PRUNED, next_position=wrong)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_c28_any_integer_type(dtype: Any) -> None:
    session = new_session()
    columns = PRUNED.astype(dtype)
    node = session.append(session.root, range(5), positions=columns)
    assert node.positions().dtype == np.int64
    assert same(node.positions(), PRUNED)
    columns[:] = 0
    assert same(node.positions(), PRUNED)
    attack_array(node.positions())
    assert same(node.positions(), PRUNED)


def test_c28_items_under_a_table_are_whole_and_inside() -> None:
    session = new_session()
    columns = np.tile(np.arange(4), (3, 1))
    grid = (1, 4, 4)
    part = MediaItem("image", bytes(32), [(0, 2)], grid, unfinished=True)
    rest = MediaItem("image", bytes(32), [(0, 2)], grid, placeholders_before=2)
    outside = MediaItem("image", bytes(32), [(2, 3)], grid)
    for item in (part, rest, outside):
        refuses(MediaSpanError, session, session.append, session.root, range(4), media=[item], positions=columns)
    first = session.append(session.root, [VS, IMG, IMG], media=[MediaItem("image", bytes(32), [(1, 2)], grid, unfinished=True)])
    refuses(MediaSpanError, session, lambda: session.append(first, range(4), positions=columns))


def test_c28_in_a_text_session() -> None:
    session = new_session(scheme("text@vllm"))
    node = session.append(session.root, [1, 2, 3], positions=[[4, 9, 5]])
    assert node.positions().tolist() == [[4, 9, 5]]
    assert session.append(node, [1]).positions().tolist() == [[4, 9, 5, 10]]
    refuses(PositionError, session, lambda: session.append(session.root, [1, 2, 3], positions=[[4, 9, 5]] * 3))


@EXAMPLES
@given(st.data())
def test_c28_any_table_between_any_turns(data: st.DataObject) -> None:
    session = new_session()
    before = data.draw(histories(max_turns=3))
    parent = grow(session, session.root, *before)
    count = data.draw(st.integers(1, 6))
    columns = np.array(data.draw(st.lists(st.lists(st.integers(0, 200), min_size=count, max_size=count), min_size=3, max_size=3)))
    node = session.append(parent, range(count), positions=columns)
    assert same(node.positions(), np.concatenate([parent.positions(), columns], axis=1))
    assert node.next_position == int(columns.max()) + 1
    assert node.mrope_position_delta == int(node.positions().max()) + 1 - node.stop
    draft = session.draft(node)
    draft.extend([4, 4])
    top = int(node.positions().max())
    assert same(draft.positions(node.stop), on_all_axes(range(top + 1, top + 3)))
    digest = tree_digest(session.tree)
    with pytest.raises(SessionTreeError):
        session.append(node, range(count + 1), positions=columns)
    assert tree_digest(session.tree) == digest
