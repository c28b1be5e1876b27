"""Whole batches: each equals the concatenation of what its nodes and drafts answer by themselves, on the CPU and by the kernels."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import random
import subprocess
import sys
import weakref
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_bridge import BatchSpan, ExtendBatch, InputStager, request_inputs
from engine_bridge import stager as stager_module
from engine_bridge.expand import FEW
from sessiontree import (
    Draft,
    LimitExceeded,
    MediaItem,
    Node,
    OutOfRange,
    PositionError,
    Session,
    SessionStore,
    SessionTreeError,
    Unsupported,
)
from sessiontree.node import clipped_spans, make_child
from sessiontree.positions import ExternalPositions, PositionScheme, scheme
from sessiontree.positions.runs import TextRun, unpacked
from tests.histories import random_cuts, split
from tests.test_positions_golden import CASES, known_cases, scheme_of
from tests.test_tree import IMAGE_PAD, VISION_END, VISION_START, identity, image, video, vl

Holder = Node | Draft
TEXT = scheme("text@hf5")
SOAK = bool(os.environ.get("SESSIONTREE_SOAK"))


def grown(positions_of: PositionScheme, turns: Sequence[Any], rng: random.Random, name: str = "s") -> list[Holder]:
    """Nodes of a history's turns, with replies, branches that write behind a shared node, empty turns and open drafts between."""
    session = SessionStore.in_memory().create(name, scheme=positions_of)
    tip = session.root
    found: list[Holder] = []
    for turn in turns:
        if not turn.tokens and tip is session.root:
            continue
        tip = session.append(tip, turn.tokens, media=turn.media)
        found.append(tip)
        if tip.position_state().open_block is not None or rng.random() < 0.4:
            continue
        draft = session.draft(tip)
        draft.extend([rng.randrange(100) for _ in range(rng.randrange(1, 5))][: draft.room])
        found.append(draft)
        if rng.random() < 0.7:
            side = session.append(tip, [7] * rng.randrange(1, 4))
            reply = session.draft(side)
            reply.extend([3, 4][: reply.room])
            found += [side, reply.commit()]
        if rng.random() < 0.3:
            found.append(session.append(found[-1], [5, 6]) if isinstance(found[-1], Node) else session.append(tip, ()))
    return [holder for holder in found if holder.stop]


def windows_of(holders: Sequence[Holder], rng: random.Random) -> tuple[list[int], list[int]]:
    starts, stops = [], []
    for holder in holders:
        kind = rng.random()
        first, last = sorted((rng.randrange(holder.stop + 1), rng.randrange(holder.stop + 1)))
        if kind < 0.25:
            first, last = holder.start, holder.stop
        elif kind < 0.4:
            first, last = holder.stop - 1, holder.stop
        elif kind < 0.5:
            first, last = 0, holder.stop
        starts.append(first)
        stops.append(last)
    return starts, stops


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()


def cast(positions: NDArray[Any], dtype: torch.dtype, axes: int) -> NDArray[Any]:
    """A table as a stager gives it: cast once, a text scheme's one row on each axis."""
    table = positions.astype(as_array(torch.zeros(1, dtype=dtype)).dtype)
    return np.broadcast_to(table, (axes, table.shape[1])) if len(table) == 1 else table


def check(
    batch: ExtendBatch,
    holders: Sequence[Holder],
    starts: Sequence[int],
    stops: Sequence[int],
    stager: InputStager,
    mode: Any = "as_decoded",
    slots: Sequence[int] | None = None,
) -> None:
    """Against each holder's own answers, one by one."""
    bounds = np.cumsum([0, *(stop - start for start, stop in zip(starts, stops, strict=True))])
    axes, dtype = stager.num_position_axes, stager.dtype
    assert batch.cu_seqlens_q.tolist() == bounds.tolist()
    assert batch.num_tokens == bounds[-1] and batch.num_requests == len(holders)
    assert batch.input_ids.shape == (bounds[-1],) and batch.input_ids.dtype == torch.int64
    assert batch.positions.shape == (axes, bounds[-1]) and batch.positions.dtype == dtype
    assert batch.seq_lens.tolist() == list(stops) and batch.prefix_lens.tolist() == list(starts)
    assert batch.req_slots.tolist() == (list(range(len(holders))) if slots is None else list(slots))
    assert batch.logits_indices.tolist() == (bounds[1:] - 1).tolist()
    assert batch.mrope_deltas.shape == (len(holders), 1) and batch.mrope_deltas.dtype == dtype
    assert batch.max_seqlen_q == max(np.diff(bounds), default=0) and batch.max_seqlen_k == max(stops, default=0)
    ids, positions, spans = as_array(batch.input_ids), as_array(batch.positions), []
    for number, (holder, start, stop) in enumerate(zip(holders, starts, stops, strict=True)):
        first, last = bounds[number], bounds[number + 1]
        assert ids[first:last].tolist() == holder.input_ids(start, stop).tolist(), (number, holder)
        expected = cast(holder.positions(start, stop, mode), dtype, axes)
        assert positions[:, first:last].tobytes() == np.ascontiguousarray(expected).tobytes(), (number, holder, start, stop)
        delta = holder.scheme.mrope_position_delta(holder.position_state(mode))
        assert batch.mrope_deltas[number, 0].item() == (delta if dtype == torch.float32 else int(delta))
        committed = holder if isinstance(holder, Node) else holder.parent
        for item, begin, end, row in clipped_spans(committed, min(start, committed.stop), min(stop, committed.stop)):
            spans.append(BatchSpan(number, item, first + begin - start, first + end - start, row))
    assert list(batch.media_spans) == spans
    assert [item.content() for item in batch.needed_items] == list(dict.fromkeys(span.item.content() for span in spans))
    check_tails(batch, stager)


def check_tails(batch: ExtendBatch, stager: InputStager) -> None:
    """Behind what the batch uses everything is reset."""
    tails = stager.buffers
    tokens, requests = batch.num_tokens, batch.num_requests
    assert not tails["extend.input_ids"][tokens:].any() and not tails["extend.positions"][:, tokens:].any()
    assert (tails["extend.cu_seqlens_q"][requests:] == tokens).all()
    for name in ("seq_lens", "prefix_lens", "req_slots", "logits_indices", "mrope_deltas"):
        assert not tails[f"extend.{name}"][requests:].any(), name


def forest(family: str, rule: str, rng: random.Random, most: int = 4) -> list[Holder]:
    found: list[Holder] = []
    known = [history for history, _ in known_cases(family, rule) if len(history.tokens) < 3_000]
    for number, history in enumerate(rng.sample(known, min(most, len(known)))):
        turns = split(history, random_cuts(rng, history))
        found += grown(scheme_of(history, rule), turns, rng, f"s{number}")
    return found


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_batches_of_every_family(family: str, rule: str) -> None:
    """Random windows over random forests of the golden histories: several batches from one stager, in every dtype it has."""
    rng = random.Random(f"{family}@{rule}")
    found = forest(family, rule, rng)
    text = SessionStore.in_memory().create("text", scheme=TEXT)
    for axes in {holder.scheme.num_axes for holder in found}:
        holders = [holder for holder in found if holder.scheme.num_axes == axes]
        holders.append(text.append(text.root, range(50)))
        stagers = [InputStager(20_000, 64, 4_000, axes, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int32)]
        for turn in range(8):
            some = [rng.choice(holders) for _ in range(rng.randrange(1, 24))]
            starts, stops = windows_of(some, rng)
            slots = [rng.randrange(1000) for _ in some] if turn % 2 else None
            mode: Any = rng.choice(("as_decoded", "as_replayed"))
            for stager in stagers:
                check(stager.extend(some, starts, stops, slots=slots, mode=mode), some, starts, stops, stager, mode, slots)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_where_plain_text_begins_follows_from_where_it_goes_on(family: str, rule: str) -> None:
    """What the batch's quick way rests on, for nodes that it takes."""
    seen = 0
    for seed in range(3):
        for node in forest(family, rule, random.Random(f"{family}@{rule} {seed}"), 6):
            if isinstance(node, Node) and isinstance(node.runs, int) and not node.state.carried:
                seen += 1
                assert not node.media
                assert node.stop - (node.state.next_position - node.runs) == node.start
    assert seen or family in ("qwen2_5_omni", "qwen3_omni", "minicpmv4_7", "hunyuan_vl"), "these carry more along"


# --- one batch, closely ---------------------------------------------------------------------------------------------------------


def sample() -> tuple[Session, Node, Draft]:
    """image [1, 5), video [8, 14), a reply, a turn with the first image again [18, 22), a draft."""
    session = SessionStore.in_memory().create("s", scheme=vl("hf5", tokens_per_second=7))
    first = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END, 7], media=[image("a", 1)])
    second = session.append(first, [8, *[9] * 6, 9], media=[video("v", 1)])
    draft = session.draft(second)
    draft.extend([20, 21, 22])
    third = session.append(draft.commit(), [*[IMAGE_PAD] * 4, 5], media=[image("a", 0)])
    draft = session.draft(third)
    draft.extend([30, 31])
    return session, third, draft


@pytest.mark.parametrize("mode", ["as_decoded", "as_replayed"])
def test_every_window_of_a_node_and_a_draft(mode: Any) -> None:
    """The same windows, one request at a time and all in one batch; what request_inputs says of them too."""
    _, node, draft = sample()
    stager = InputStager(8_000, 512, 4_000)
    for holder in (node, draft):
        pairs = [(start, stop) for start in range(holder.stop + 1) for stop in range(start, holder.stop + 1)]
        starts, stops = [start for start, _ in pairs], [stop for _, stop in pairs]
        check(stager.extend([holder] * len(pairs), starts, stops, mode=mode), [holder] * len(pairs), starts, stops, stager, mode)
        for start, stop in pairs:
            batch = stager.extend([holder], start, stop, mode=mode)
            check(batch, [holder], [start], [stop], stager, mode)
            if stop == holder.stop:
                inputs = request_inputs(holder, start, mode=mode)
                assert torch.equal(batch.input_ids, inputs.input_ids) and torch.equal(batch.positions, inputs.positions)
                assert torch.equal(batch.mrope_deltas, inputs.mrope_position_delta)
                assert batch.needed_items == inputs.needed_items
                assert [(span.start + start, span.stop + start) for span in batch.media_spans] == [
                    (begin, end) for _, begin, end in inputs.media_spans
                ]
                assert tuple(span.first_row for span in batch.media_spans) == inputs.first_rows


def test_delta_never_depends_on_the_window() -> None:
    _, node, draft = sample()
    stager = InputStager(100, 8)
    for holder in (node, draft):
        seen = {
            stager.extend([holder], start, stop).mrope_deltas.item()
            for start in range(holder.stop + 1)
            for stop in range(start, holder.stop + 1)
        }
        assert seen == {holder.mrope_position_delta}


def test_text_rows_of_a_mixed_batch_are_text_rows() -> None:
    """Beside requests with media a text request has one run, no span, and the same position on each axis."""
    session, node, _ = sample()
    text = session.append(session.root, range(100, 140))
    stager = InputStager(200, 4, 40)
    batch = stager.extend([node, text, node], 0)
    row = batch.positions[:, node.stop : node.stop + 40]
    assert torch.equal(row, torch.arange(40).expand(3, 40))
    assert {span.request for span in batch.media_spans} == {0, 2}


def test_tokens_of_long_paths_in_many_nodes_and_forks() -> None:
    """A thousand turns of text are one run, forked ones too."""
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    tip, side = session.root, session.root
    for turn in range(1_000):
        tip = session.append(tip, [turn, turn + 1, turn + 2])
        if turn == 500:
            side = tip
    other = session.append(session.append(side, [9] * 5), [8] * 5)
    stager = InputStager(10_000, 8, 3)
    holders, starts, stops = [tip, other, tip], [0, 3, 1_490], [3_000, other.stop, 1_510]
    check(stager.extend(holders, starts, stops), holders, starts, stops, stager)
    one = InputStager(3_000, 1, 1)
    check(one.extend([tip], 0, None), [tip], [0], [3_000], one)


def test_a_batch_may_be_empty_and_its_windows_too() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 4)
    check(stager.extend([], [], []), [], [], [], stager)
    check(stager.extend([node, draft], [3, draft.stop], [3, draft.stop]), [node, draft], [3, draft.stop], [3, draft.stop], stager)
    session = SessionStore.in_memory().create("t", scheme=vl("hf5"))
    check(stager.extend([session.root], 0), [session.root], [0], [0], stager)


def test_plain_text_goes_with_any_number_of_axes() -> None:
    """It stands at the same position on each of them, whatever its scheme."""
    session, node, _ = sample()
    other = SessionStore.in_memory().create("h", scheme=scheme("hunyuan_vl@hf5", num_axes=4, spatial_merge_size=2))
    four, three = other.append(other.root, [1, 2, 3]), session.append(session.root, [4, 5])
    batch = InputStager(64, 4).extend([four, three])
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]] * 3
    assert InputStager(64, 4, num_position_axes=5).extend([four, three]).positions.tolist() == [[0, 1, 2, 0, 1]] * 5
    with pytest.raises(Unsupported):
        InputStager(64, 4, num_position_axes=4).extend([four, node])


def test_external_positions_travel_as_tables() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    table = np.array([[5, 9, 1000], [7, 7, 7], [0, 1, 2]])
    node = session.append(session.append(session.root, [1, 2]), [3, 4, 5], positions=ExternalPositions(table))
    stager = InputStager(64, 4)
    for start in range(6):
        check(stager.extend([node, node], [start, 0], [5, start]), [node, node], [start, 0], [5, start], stager)


def test_outputs_stay_where_they_are() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 4, 16)
    before = {name: tensor.data_ptr() for name, tensor in stager.buffers.items()}
    batches: tuple[list[Holder], ...] = ([node], [node, draft], [draft])
    for some in batches:
        batch = stager.extend(some)
        assert batch.input_ids.data_ptr() == before["extend.input_ids"]
        assert batch.positions.data_ptr() == before["extend.positions"]
    assert {name: tensor.data_ptr() for name, tensor in stager.buffers.items()} == before


def test_a_batch_that_was_overwritten_is_not_read() -> None:
    _, node, _ = sample()
    stager = InputStager(64, 4)
    old = stager.extend([node], 0, 3)
    new = stager.extend([node], 3, 5)
    for name in (
        "input_ids",
        "positions",
        "cu_seqlens_q",
        "seq_lens",
        "prefix_lens",
        "req_slots",
        "mrope_deltas",
        "logits_indices",
    ):
        getattr(new, name)
        with pytest.raises(Unsupported, match="overwritten"):
            getattr(old, name)
    assert (old.num_tokens, old.max_seqlen_q, old.max_seqlen_k) == (3, 3, 3)


def test_nothing_of_a_batch_reaches_a_node() -> None:
    """What an engine does to its inputs in place stays there."""
    _, node, draft = sample()
    stager = InputStager(64, 4)
    ids, positions = node.input_ids().tolist(), node.positions().tolist()
    batch = stager.extend([node, draft])
    for tensor in stager.buffers.values():
        tensor.fill_(77)
    assert batch.input_ids.tolist() == [77] * batch.num_tokens
    assert (node.input_ids().tolist(), node.positions().tolist()) == (ids, positions)


def refused(error: type[Exception], stager: InputStager, act: Any) -> SessionTreeError:
    """It raises, and the batch before it is still there, whole."""
    _, node, _ = sample()
    batch = stager.extend([node], 2, 9)
    before = {name: tensor.clone() for name, tensor in stager.buffers.items()}
    with pytest.raises(error) as caught:
        act()
    assert batch.seq_lens.tolist() == [9], "still the batch of before"
    for name, tensor in stager.buffers.items():
        assert torch.equal(tensor, before[name]), name
    return caught.value  # type: ignore[return-value]


def test_capacities_are_kept_before_anything_is_written() -> None:
    session, node, draft = sample()
    stager = InputStager(40, 3, 9)
    many = [node.ancestor(1)] * 4
    error = refused(LimitExceeded, stager, lambda: stager.extend(many, 0, 1))
    assert (error.value, error.limit) == (4, 3) and "max_requests" in str(error)  # type: ignore[attr-defined]
    error = refused(LimitExceeded, stager, lambda: stager.extend([node, draft, node], 0))
    assert error.limit == 40 and "max_tokens" in str(error)  # type: ignore[attr-defined]
    long = session.append(session.root, range(41))
    refused(LimitExceeded, stager, lambda: stager.extend([long]))
    small = InputStager(64, 3, 4)
    error = refused(LimitExceeded, small, lambda: small.extend([node, node]))
    assert error.limit == 4 and "max_runs" in str(error)  # type: ignore[attr-defined]


def test_what_is_no_batch_is_refused() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 4, 16)
    other = SessionStore.in_memory().create("h", scheme=scheme("hunyuan_vl@hf5", num_axes=4, spatial_merge_size=2))
    foreign = other.append(other.root, [IMAGE_PAD] * 8, media=[MediaItem("image", identity("a"), [(0, 8)], grid_thw=(1, 4, 4))])
    far = SessionStore.in_memory().create("f", scheme=vl("hf5", max_position_limit=2**40))
    table = far.append(far.root, [1], positions=ExternalPositions([[2**33]] * 3))
    beyond = far.append(table, [2])
    for error, act in (
        (OutOfRange, lambda: stager.extend([node], 0, node.stop + 1)),
        (OutOfRange, lambda: stager.extend([node], -1, 3)),
        (OutOfRange, lambda: stager.extend([node], 4, 3)),
        (OutOfRange, lambda: stager.extend([node, draft], [0, draft.stop + 1], None)),
        (OutOfRange, lambda: stager.extend([node.ancestor(1)], 2, 2**70)),
        (PositionError, lambda: stager.extend([node], 0, 3, mode="as_dreamt")),  # type: ignore[arg-type]
        (Unsupported, lambda: stager.extend([node, foreign])),
        (Unsupported, lambda: stager.extend([foreign])),
        (Unsupported, lambda: stager.extend([table])),
        (Unsupported, lambda: stager.extend([beyond], 1)),
        (Unsupported, lambda: stager.extend([beyond, draft], [1, 0])),
        (TypeError, lambda: stager.extend([node, "node"], 0, 1)),  # type: ignore[list-item]
        (TypeError, lambda: stager.extend([node], 0.5, 3)),  # type: ignore[arg-type]
        (TypeError, lambda: stager.extend([node], [True], 3)),
        (TypeError, lambda: stager.extend([node], [0, 1], 3)),
        (TypeError, lambda: stager.extend([node], np.array([0.0]), 3)),
        (TypeError, lambda: stager.extend([node], slots=[1, 2])),
        (OutOfRange, lambda: stager.extend([node], slots=[-1])),
    ):
        refused(error, stager, act)


@pytest.mark.parametrize("rule", ["hf5", "sglang", "vllm"])
def test_audio_that_stands_as_text_does_is_media_all_the_same(rule: str) -> None:
    """It takes a position a token under every rule; its spans and the item are in the batch, whole or in parts."""
    found = [
        node
        for seed in range(12)
        for node in forest("qwen3_omni", rule, random.Random(seed), 4)
        if isinstance(node, Node) and node.media and len(unpacked(node.runs, len(node))) == 1
    ]
    assert "audio" in {item.modality for node in found for item in node.media}
    assert not any(isinstance(node.runs, int) for node in found), "a bare int says that there is no media"
    stager = InputStager(4_000, 1, 400)
    for node in found:
        for start, stop in ((node.start, node.stop), (0, node.stop), (node.stop - 1, node.stop)):
            batch = stager.extend([node], start, stop)
            check(batch, [node], [start], [stop], stager)
            inputs = request_inputs(node, start)
            assert [span.item for span in batch.media_spans] == [item for item, *_ in inputs.media_spans]
            assert batch.needed_items == inputs.needed_items
        assert stager.extend([node], node.start).needed_items


def test_a_record_that_says_audio_by_a_bare_int_is_a_node_with_a_run() -> None:
    """As nodes of the first stores said it; the batch has to see that there is an item."""
    history, item = next(
        (history, item) for history, _ in known_cases("qwen3_omni", "vllm") for item in history.items if item.modality == "audio"
    )
    positions_of = scheme("qwen3_omni@vllm", **history.params)
    count = positions_of.num_placeholders(item)
    audio = MediaItem("audio", item.identity, [(0, count)], audio_feature_length=item.audio_feature_length)
    session = SessionStore.in_memory().create("s", scheme=positions_of)
    node = session.append(session.root, [5] * count, media=[audio])
    (run,) = unpacked(node.runs, count)
    assert isinstance(run, TextRun)
    fields = (node.media, node.origin, "user", None, run.base, node.state, node.replayed, node._details, node._extent)
    again = make_child(session.root, node.id, count, *fields)
    assert again.runs == node.runs
    stager = InputStager(4_000, 1)
    check(stager.extend([again]), [again], [0], [count], stager)


@pytest.mark.parametrize("rule", ["hf5", "sglang"])
def test_text_of_a_float_scheme_goes_along_on_other_axes(rule: str) -> None:
    """In as little room as the tokens need: its one row serves all axes."""
    positions_of = scheme(f"qwen3_omni@{rule}", **known_cases("qwen3_omni", rule)[0][0].params)
    session = SessionStore.in_memory().create("s", scheme=positions_of)
    node = session.append(session.root, range(20))
    draft = session.draft(session.append(node, [4]))
    draft.extend([5, 6])
    for axes in (1, 2, 3, 4, 5):
        for dtype in (torch.float32, torch.int64, torch.int32):
            stager = InputStager(43, 2, 4, axes, dtype=dtype)
            modes: tuple[Any, ...] = ("as_decoded", "as_replayed")
            for mode in modes:
                batch = stager.extend([node, draft], mode=mode)
                assert batch.positions.tolist() == [[*range(20), *range(23)]] * axes
                check_tails(batch, stager)


def test_a_delta_beyond_32_bits_is_refused() -> None:
    """Also where the window itself stands low: a table of before stood far out."""
    session = SessionStore.in_memory().create("f", scheme=vl("hf5", max_position_limit=2**40))
    table = session.append(session.root, [1], positions=ExternalPositions([[2**33]] * 3, next_position=5))
    low = session.append(table, [2, 3])
    assert low.mrope_position_delta > 2**32 and low.positions(1).max() < 10
    stager = InputStager(64, 4, 16)
    for some in ([low], [low, sample()[1]]):
        refused(Unsupported, stager, partial(stager.extend, some, 1, 3))


def test_an_unknown_mode_is_refused_of_no_requests_too() -> None:
    stager = InputStager(64, 4, 16)
    unknown: tuple[tuple[type[Exception], Any], ...] = (
        (PositionError, "as_dreamt"),
        (TypeError, None),
        (TypeError, np.array(["as_decoded", "as_replayed"])),
    )
    for error, mode in unknown:
        refused(error, stager, partial(stager.extend, [], mode=mode))
    assert stager.extend([], mode=np.str_("as_replayed")).num_tokens == 0  # type: ignore[arg-type]


def test_numbers_of_thousands_of_digits_are_refused_like_others() -> None:
    far = 10**5_000
    stager = InputStager(64, 4, 16)
    for error, act in (
        (OutOfRange, lambda: InputStager(-far, 4)),
        (LimitExceeded, lambda: InputStager(far, 4)),
        (LimitExceeded, lambda: InputStager(64, 4, num_position_axes=far)),
        (LimitExceeded, lambda: InputStager(64, 4, max_decode_width=far)),
        (LimitExceeded, lambda: InputStager(64, 4, max_decode_width=2**30)),
        (LimitExceeded, lambda: stager.decode([], far)),
        (OutOfRange, lambda: stager.decode([], -far)),
        (OutOfRange, lambda: stager.extend([sample()[1]], 0, far)),
        (OutOfRange, lambda: stager.extend([sample()[1]], slots=[far])),
    ):
        refused(error, stager, act)


def test_windows_come_in_many_shapes() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 4, 16)
    shapes: tuple[tuple[Any, Any], ...] = (
        (3, 9),
        ([3, 3], [9, 9]),
        (np.array([3, 3]), np.array([9, 9], np.uint8)),
        ((3, 3), np.int32(9)),
        (np.int64(3), [np.int64(9), 9]),
        (range(3, 5), range(9, 11)),
        (array("i", [3, 3]), array("Q", [9, 9])),
    )
    for start, stop in shapes:
        starts, stops = ([3, 4], [9, 10]) if isinstance(start, range) else ([3, 3], [9, 9])
        check(stager.extend([node, draft], start, stop), [node, draft], starts, stops, stager)
    assert stager.extend([], np.array([]), []).num_tokens == 0


def test_c56_every_field_of_a_batch_is_there_in_both_phases() -> None:
    """What an engine needs in prefill it finds in decode under the same name."""
    common = {"input_ids", "positions", "seq_lens", "mrope_deltas", "req_slots", "cu_seqlens_q", "logits_indices", "num_tokens"}
    _, node, _ = sample()
    stager = InputStager(64, 4, 16)
    stager.admit([node], [2])
    for batch in (stager.extend([node]), stager.decode([2])):
        for name in common:
            assert getattr(batch, name) is not None


# --- decoding -------------------------------------------------------------------------------------------------------------------


def check_step(batch: Any, drafts: Sequence[Draft], slots: Sequence[int], width: int = 1) -> None:
    """Against drafts that took the same tokens."""
    count = len(drafts)
    assert (batch.num_requests, batch.width, batch.num_tokens) == (count, width, count * width)
    assert batch.req_slots.tolist() == list(slots)
    assert batch.seq_lens.tolist() == [draft.stop for draft in drafts]
    assert batch.cu_seqlens_q.tolist() == list(range(0, count * width + 1, width))
    assert batch.logits_indices.tolist() == list(range(width - 1, count * width, width))
    for number, draft in enumerate(drafts):
        columns = slice(number * width, (number + 1) * width)
        assert batch.input_ids[columns].tolist() == draft.input_ids(draft.stop - width).tolist()
        expected = np.arange(draft.stop - width, draft.stop) + draft.mrope_position_delta
        assert batch.positions[:, columns].tolist() == [expected.tolist()] * len(batch.positions)
        assert batch.mrope_deltas[number].tolist() == [draft.mrope_position_delta]


@pytest.fixture(scope="module", params=[FEW, 0], ids=["number by number", "by NumPy"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Steps of a few slots on the host, and the same steps as many would be made."""
    with mock.patch.object(stager_module, "FEW", request.param):
        yield


@pytest.mark.usefixtures("either_way")
def test_c21_step_k_stands_at_length_minus_one_plus_k_plus_delta() -> None:
    """And where the draft says that its tokens stand; every step has its delta on the device, in prefill and in decode."""
    session, node, _ = sample()
    stager = InputStager(64, 4, 16)
    draft = session.draft(node)
    delta, length = node.mrope_position_delta, node.stop
    assert delta
    stager.admit([node], [3])
    for k in range(1, 10):
        stager.advance([3], [50 + k])
        draft.append(50 + k)
        batch = stager.decode([3])
        assert batch.positions.tolist() == [[length - 1 + k + delta]] * 3
        assert batch.mrope_deltas.tolist() == stager.extend([draft]).mrope_deltas.tolist() == [[delta]]
        assert batch.positions[:, 0].tolist() == draft.positions(draft.stop - 1)[:, 0].tolist()
        check_step(batch, [draft], [3])


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slots_against_drafts(dtype: torch.dtype, data: st.DataObject) -> None:
    """Admit, advance by one or several, roll back, decode any width and retire, beside a draft for each slot."""
    size, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    stager = InputStager(64, size, 16, dtype=dtype, max_decode_width=width)
    store = SessionStore.in_memory()
    drafts: dict[int, Draft] = {}
    back: dict[int, int] = {}  # how far behind its longest a path is

    def some() -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(drafts)), unique=True)) if drafts else []

    for turn in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(("admit", "advance", "advance", "rollback", "decode", "decode", "retire")))
        if what == "admit" and len(drafts) < size:
            slot = data.draw(st.sampled_from(sorted(set(range(size)) - drafts.keys())))
            session = store.create(f"s{turn}", scheme=vl("sglang"))
            parent = session.append(session.root, [VISION_START, *[IMAGE_PAD] * 4, VISION_END], media=[image("a", 1)])
            parent = session.append(parent, [turn] * data.draw(st.integers(0, 3)))
            drafts[slot] = session.draft(parent)
            if data.draw(st.booleans()):
                drafts[slot].extend([9] * 3)
                stager.admit([drafts[slot]], [slot])
            else:
                stager.admit([parent], [slot])
            back[slot] = 0
        elif what == "advance":
            slots, k = some(), data.draw(st.integers(0, width))
            tokens = [[data.draw(st.integers(0, 2**31 - 1)) for _ in range(k)] for _ in slots]
            counts = [data.draw(st.integers(0, k)) for _ in slots]
            if not slots:
                continue
            if data.draw(st.booleans()):
                counts = [k] * len(slots)
                stager.advance(slots, np.array(tokens, np.int64).reshape(len(slots), k))
            else:
                stager.advance(slots, torch.tensor(tokens, dtype=torch.int64).reshape(len(slots), k), counts)
            for slot, row, count in zip(slots, tokens, counts, strict=True):
                drafts[slot].extend(row[:count])
                back[slot] = max(0, back[slot] - count)
        elif what == "rollback":
            slots = some()
            counts = [data.draw(st.integers(0, min(len(drafts[slot]), 2 * width - 1 - back[slot]))) for slot in slots]
            least = {slot: int(stager._shortest[slot]) for slot in slots}
            counts = [min(count, drafts[slot].stop - least[slot]) for slot, count in zip(slots, counts, strict=True)]
            stager.rollback(slots, [drafts[slot].stop - count for slot, count in zip(slots, counts, strict=True)])
            for slot, count in zip(slots, counts, strict=True):
                drafts[slot].rollback(len(drafts[slot]) - count)
                back[slot] += count
        elif what == "decode":
            slots = data.draw(st.lists(st.sampled_from(sorted(drafts)), max_size=size)) if drafts else []
            across = data.draw(st.integers(1, width))
            if all(2 * width - back[slot] >= across for slot in slots):
                given_slots: Any = data.draw(st.sampled_from((list, tuple, np.array, lambda slots: np.array(slots, np.int32))))
                batch = stager.decode(given_slots(slots) if slots else [], across)
                check_step(batch, [drafts[slot] for slot in slots], slots, across)
                tails = stager.buffers
                assert not tails["decode.input_ids"][batch.num_tokens :].any()
                assert not tails["decode.positions"][:, batch.num_tokens :].any()
                for name in ("seq_lens", "mrope_deltas", "req_slots"):
                    assert not tails[f"decode.{name}"][batch.num_requests :].any()
        elif what == "retire":
            slots = some()
            stager.retire(slots)
            for slot in slots:
                del drafts[slot], back[slot]


@pytest.mark.usefixtures("either_way")
def test_fractional_deltas_decode_as_the_model_computes() -> None:
    """float32(index) + delta, then cast once where positions are integers."""
    positions_of = scheme("qwen3_omni@hf5", **known_cases("qwen3_omni", "hf5")[0][0].params)
    found = [
        holder
        for seed in range(40)
        for holder in forest("qwen3_omni", "hf5", random.Random(seed), 2)
        if isinstance(holder, Draft) and not float(holder.mrope_position_delta).is_integer()
    ]
    assert found and positions_of.floats
    for dtype, some in itertools.product((torch.float32, torch.int64), (found, found[:8])):
        stager = InputStager(4_000, len(some), dtype=dtype)
        stager.admit(some, range(len(some)))
        batch = stager.decode(range(len(some)))
        for number, draft in enumerate(some):
            expected = cast(draft.positions(draft.stop - 1), dtype, 3)
            assert batch.positions[:, number].tolist() == expected[:, 0].tolist()


def test_what_cannot_decode_is_refused() -> None:
    session, node, draft = sample()
    stager = InputStager(64, 4, 16, max_decode_width=2)
    stager.admit([node, draft], [0, 1])
    stager.advance([0], [5])
    open_item = session.append(session.root, [VISION_START, IMAGE_PAD], media=[part()])
    glm = SessionStore.in_memory().create("g", scheme=scheme("glm_image@hf5"))
    planned = glm.append(glm.root, [1, 2])
    for error, act in (
        (Unsupported, lambda: stager.admit([node], [1])),
        (Unsupported, lambda: stager.admit([open_item], [2])),
        (Unsupported, lambda: stager.admit([planned], [2])),
        (OutOfRange, lambda: stager.admit([session.root], [2])),
        (OutOfRange, lambda: stager.admit([node], [4])),
        (OutOfRange, lambda: stager.admit([node], [-1])),
        (OutOfRange, lambda: stager.admit([node, node], [2, 2])),
        (TypeError, lambda: stager.admit([node], [2, 3])),
        (TypeError, lambda: stager.admit(["node"], [2])),  # type: ignore[list-item]
        (OutOfRange, lambda: stager.decode([0, 2])),
        (OutOfRange, lambda: stager.decode([4])),
        (OutOfRange, lambda: stager.decode(np.array([-1], np.int32))),
        (OutOfRange, lambda: stager.decode(np.array([0, 2**31 - 1], np.int32))),
        (OutOfRange, lambda: stager.decode([0], 0)),
        (LimitExceeded, lambda: stager.decode([0], 3)),
        (LimitExceeded, lambda: stager.decode([0] * 5)),
        (TypeError, lambda: stager.decode([0.0])),
        (TypeError, lambda: stager.decode([0], 1.0)),  # type: ignore[arg-type]
        (OutOfRange, lambda: stager.advance([0, 3], [1, 2])),
        (OutOfRange, lambda: stager.advance([0, 0], [1, 2])),
        (OutOfRange, lambda: stager.advance([0], [-1])),
        (OutOfRange, lambda: stager.advance([0], [[1, 2]], [3])),
        (LimitExceeded, lambda: stager.advance([0], [[1, 2, 3]])),
        (TypeError, lambda: stager.advance([0], [1, 2])),
        (TypeError, lambda: stager.advance([0], [[[1]]])),
        (TypeError, lambda: stager.advance([0, 1], [[1, 2], [3]])),
        (TypeError, lambda: stager.advance([0], range(2**60))),
        (TypeError, lambda: stager.advance([0], torch.ones(1, requires_grad=True))),
        (TypeError, lambda: stager.advance([0], [None])),
        (OutOfRange, lambda: stager.advance([0], [2**70])),
        (OutOfRange, lambda: stager.advance([0], [[2**70]])),
        (LimitExceeded, lambda: stager.decode([0], np.int64(3))),  # type: ignore[arg-type]
        (TypeError, lambda: stager.decode([0], True)),
        (OutOfRange, lambda: stager.rollback([0], [node.stop - 1])),
        (OutOfRange, lambda: stager.rollback([0], [node.stop + 2])),
        (OutOfRange, lambda: stager.rollback([0], [2**40])),
        (OutOfRange, lambda: stager.rollback([2], [1])),
        (TypeError, lambda: stager.rollback([0], [node.stop, node.stop])),
        (OutOfRange, lambda: stager.retire([2])),
    ):
        step = stager.decode([0, 1])
        before = {name: tensor.clone() for name, tensor in stager.buffers.items()}
        state, history, lengths = stager._state.clone(), stager._history.clone(), stager._lengths.copy()
        with pytest.raises(error):
            act()
        assert step.seq_lens.tolist() == [node.stop + 1, draft.stop]
        for name, tensor in stager.buffers.items():
            assert torch.equal(tensor, before[name]), (error, name)
        assert torch.equal(state, stager._state) and torch.equal(history, stager._history), error
        assert (lengths == stager._lengths).all()


def test_a_width_may_be_any_integer() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 4, 16, max_decode_width=2)
    stager.admit([node, draft], [0, 1])
    for width in (np.int64(2), np.uint8(1), 2):
        check_step(stager.decode([1], width), [draft], [1], int(width))  # type: ignore[arg-type]


def interrupted(number: int, act: Any) -> bool:
    """Run ``act``, and interrupt it at its ``number``-th line of the bridge's. Whether it came so far."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "engine_bridge" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("long_first", [False, True])
def test_an_interrupted_extend_leaves_the_last_batch_or_none_and_the_next_is_whole(long_first: bool) -> None:
    """At any line: a batch of many runs between batches of text, shorter and longer ones."""
    session, node, draft = sample()
    text = session.append(session.root, range(30))
    first: list[Holder] = [text, text, text] if long_first else [text]
    middle: list[Holder] = [draft] if long_first else [node, draft, text]
    last: list[Holder] = [text] if long_first else [text, text]
    stager = InputStager(96, 4, 32)
    number = 0
    while True:
        number += 1
        old = stager.extend(first)
        done = not interrupted(number, lambda: stager.extend(middle))
        try:
            whole = old.input_ids.tolist(), old.positions.tolist(), old.cu_seqlens_q.tolist(), old.seq_lens.tolist()
        except Unsupported:
            pass
        else:
            ids = list(range(30)) * len(first)
            assert whole == (ids, [ids] * 3, [30 * at for at in range(len(first) + 1)], [30] * len(first)), number
        check(stager.extend(last), last, [0] * len(last), [30] * len(last), stager)
        if done:
            break
    assert number > 50


@pytest.mark.usefixtures("either_way")
def test_an_interrupted_step_leaves_the_last_one_or_none_and_the_next_is_whole() -> None:
    _, node, draft = sample()
    stager = InputStager(64, 3, max_decode_width=2)
    stager.admit([node, draft, draft], [0, 1, 2])
    number = 0
    while True:
        number += 1
        old = stager.decode([1, 2], 2)
        done = not interrupted(number, lambda: stager.decode([1, 1, 2], 2))
        try:
            slots, ids = old.req_slots.tolist(), old.input_ids.tolist()
        except Unsupported:
            pass
        else:
            assert (slots, ids) == ([1, 2], [30, 31] * 2), number
        check_step(
            stager.decode([1, 1, 2] if number % 2 else [1], 2),
            [draft] * (3 if number % 2 else 1),
            [1, 1, 2] if number % 2 else [1],
            2,
        )
        used = 6 if number % 2 else 2
        assert not stager.buffers["decode.input_ids"][used:].any() and not stager.buffers["decode.positions"][:, used:].any()
        if done:
            break
    assert number > 20


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("what", ["admit", "advance", "rollback", "retire"])
def test_an_interrupt_leaves_a_slot_as_it_was_or_as_it_was_to_be_or_free(what: str) -> None:
    """Never with a length of one and tokens of another; a free one is admitted again."""
    _, node, _ = sample()
    session = SessionStore.in_memory().create("s", scheme=node.scheme)
    parent = session.append(session.root, [1, 2, 3])
    number = done = 0
    while not done:
        number += 1
        stager = InputStager(64, 2, max_decode_width=2)
        before, after = session.draft(parent), session.draft(parent)
        stager.admit([node if what == "admit" else parent] * 2, [0, 1])
        if what != "admit":
            before.extend([5, 6])
            stager.advance([0, 1], [[5, 6]] * 2)
        stager.decode([0, 1])
        if what == "advance":
            after.extend([5, 6, 7, 8])
            done = not interrupted(number, partial(stager.advance, [0, 1], [[7, 8]] * 2))
        elif what == "rollback":
            after.extend([5])
            done = not interrupted(number, partial(stager.rollback, [0, 1], [parent.stop + 1] * 2))
        elif what == "retire":
            done = not interrupted(number, partial(stager.retire, [0, 1]))
        else:
            after = before
            stager.retire([0, 1])
            done = not interrupted(number, partial(stager.admit, [parent] * 2, [0, 1]))
        for slots in ([0, 1], [1, 0]):
            try:
                step = stager.decode(slots)
            except OutOfRange:
                assert not done or what == "retire"
                free = [slot for slot in slots if not stager._live[slot]]
                stager.admit([before] * len(free), free)
                step = stager.decode(slots)
            lengths = step.seq_lens.tolist()
            assert stager._lengths[slots].tolist() == lengths, number
            for row, length in enumerate(lengths):
                found = {before.stop: before, after.stop: after}[length]
                assert step.input_ids[row] == found.input_ids()[-1], (number, slots)
                assert not done or what == "retire" or found is after
    assert number > 10


def part() -> MediaItem:
    whole = image("a", 1)
    return MediaItem("image", whole.identity, [(1, 1)], grid_thw=whole.grid_thw, unfinished=True)


@pytest.mark.usefixtures("either_way")
def test_a_rollback_keeps_what_the_next_step_needs() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang"))
    stager = InputStager(64, 1, max_decode_width=2)
    draft = session.draft(session.append(session.root, [1]))
    stager.admit([draft.parent], [0])
    for token in range(2, 12):
        stager.advance([0], [token])
        draft.append(token)
    draft.rollback(len(draft) - 3)
    stager.rollback([0], [draft.stop])
    check_step(stager.decode([0]), [draft], [0])
    with pytest.raises(OutOfRange, match="its last 1"):
        stager.decode([0], 2)
    with pytest.raises(LimitExceeded, match="nor than the last 4"):
        stager.rollback([0], [draft.stop - 1])


@pytest.mark.usefixtures("either_way")
def test_a_preempted_request_comes_back_from_its_draft() -> None:
    session, node, _ = sample()
    stager = InputStager(64, 2, 16)
    draft = session.draft(node)
    stager.admit([node], [0])
    for token in (4, 5, 6):
        stager.advance([0], [token])
        draft.append(token)
    stager.retire([0])
    check(stager.extend([draft], 0, draft.stop - 1), [draft], [0], [draft.stop - 1], stager)
    stager.admit([draft], [1])
    check_step(stager.decode([1]), [draft], [1])


def test_a_stager_holds_no_node() -> None:
    """A batch holds media items; nodes and drafts go when their owners let go."""
    _, node, draft = sample()
    stager = InputStager(64, 4, 16)
    batch = stager.extend([node, draft])
    stager.admit([node], [0])
    gone = weakref.ref(node), weakref.ref(draft)
    del _, node, draft
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert batch.media_spans and stager.decode([0]).num_tokens == 1


# --- the kernels -----------------------------------------------------------------------------------------------------------------

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed: make test brings it where there is a wheel")
def test_the_kernels_agree_with_numpy_bit_for_bit() -> None:
    """In Triton's interpreter, which has to be asked for before Triton is imported: so in a process of its own."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    rounds = "40" if SOAK else "1"
    done = subprocess.run([sys.executable, script, rounds], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "agree" in done.stdout
