"""A prompt that is in no tree yet reads as the node that it becomes, and a layout as the prompt."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.adapters.pending import PendingPrompt
from engine_bridge.adapters.sglang_media import Layout
from sessiontree import LimitExceeded, MediaItem, MediaSpanError, Node, OutOfRange, Session
from tests.conftest import SOAK
from tests.reference import Segment
from tests.toy import A_IDS, IMG, VS, a_turn, fingerprint, grow, histories, image, media, new_session, reply, turn

EXAMPLES = settings(max_examples=400 if SOAK else 50)


def on(session: Session, history: list[Segment]) -> Node:
    return grow(session, session.root, *history)


def same(prompt: PendingPrompt, node: Node) -> None:
    assert prompt.stop == node.stop
    assert np.array_equal(prompt.input_ids(), node.input_ids())
    assert np.array_equal(prompt.positions(), node.positions())
    assert prompt.state == node.position_state() and prompt.mrope_position_delta == node.mrope_position_delta
    spans = [(item.content(), *span) for item, of_item in prompt.media() for span in of_item]
    assert sorted(spans, key=lambda span: span[1]) == [(item.content(), first, last) for item, first, last in node.media_spans()]
    assert prompt.has_media == bool(node.media_spans())


@EXAMPLES
@given(history=histories(), new=histories(max_turns=3), data=st.data())
def test_a_prompt_reads_as_the_node_it_becomes(history: list[Segment], new: list[Segment], data: st.DataObject) -> None:
    session = new_session()
    node = on(session, history)
    length = data.draw(st.integers(0, node.stop))
    before = fingerprint(node)
    try:
        prompt = PendingPrompt.of(node, length)
    except MediaSpanError:
        first, last = next((first, last) for _, first, last in node.media_spans() if first < length < last)
        assert first < length < last
        return
    for segment in new:
        prompt = prompt.extended(segment.tokens, media(segment))
    size = len(session.tree)
    for start in {0, length, data.draw(st.integers(0, prompt.stop))}:
        assert np.array_equal(prompt.input_ids(start), prompt.input_ids()[start:])
        assert np.array_equal(prompt.positions(start), prompt.positions()[:, start:])
    assert len(session.tree) == size and fingerprint(node) == before  # nothing of it is in the tree
    same(prompt, prompt.committed(session))


@EXAMPLES
@given(history=histories(), new=histories(max_turns=3), data=st.data())
def test_a_cut_prompt_is_a_prompt_that_ends_there(history: list[Segment], new: list[Segment], data: st.DataObject) -> None:
    session = new_session()
    node = on(session, history)
    prompt = PendingPrompt.of(node, node.stop)
    for segment in new:
        prompt = prompt.extended(segment.tokens, media(segment))
    length = data.draw(st.integers(0, prompt.stop))
    inside = [(first, last) for item, spans in prompt.media() for first, last in spans if first < length < last]
    if inside:
        with pytest.raises(MediaSpanError) as caught:
            prompt.cut(length)
        assert caught.value.span == inside[0] and str(length) in str(caught.value)
        return
    cut = prompt.cut(length)
    assert np.array_equal(cut.input_ids(), prompt.input_ids()[:length])
    assert np.array_equal(cut.positions(), prompt.positions()[:, :length])
    same(cut, cut.committed(session))


def test_c06_every_cut_of_a_committed_and_of_a_new_image() -> None:
    session = new_session()
    node = grow(session, session.root, a_turn(), reply(8, 9))
    prompt = PendingPrompt.of(node, node.stop).extended(A_IDS, media(a_turn(number=1)))
    refused = []
    for length in range(prompt.stop + 1):
        try:
            prompt.cut(length)
        except MediaSpanError as error:
            refused.append((length, error.span))
    assert refused == [(4, (3, 7)), (5, (3, 7)), (6, (3, 7)), (15, (14, 18)), (16, (14, 18)), (17, (14, 18))]


@pytest.mark.parametrize("length", [-1, 10, 10**6])
def test_a_length_outside_is_refused(length: int) -> None:
    session = new_session()
    node = grow(session, session.root, a_turn())
    with pytest.raises(OutOfRange):
        PendingPrompt.of(node, length)
    with pytest.raises(OutOfRange):
        PendingPrompt.of(node, 9).cut(length)


def test_a_limit_and_a_part_of_an_item_are_refused() -> None:
    session = new_session()
    prompt = PendingPrompt.of(grow(session, session.root, a_turn()), 9)
    assert prompt.extended([1, 2], limit=11).stop == 11
    with pytest.raises(LimitExceeded, match="11 are allowed"):
        prompt.extended([1, 2, 3], limit=11)
    part = MediaItem("image", b"\1" * 32, [(1, 2)], (1, 4, 4), unfinished=True)
    with pytest.raises(MediaSpanError, match="not whole"):
        prompt.extended([VS, IMG, IMG], [part])
    assert prompt.extended([]).stop == 9


# Layouts


class Item:
    """What a layout asks of SGLang's items."""

    def __init__(self, number: int, offsets: Any = None) -> None:
        self.number, self.offsets, self.model_specific_data = number, offsets, {"number": number}

    def __copy__(self) -> Item:
        return Item(self.number, self.offsets)

    def padding_sequence(self, length: int) -> list[int]:
        return [self.number * 10 + at % 4 for at in range(length)]

    @staticmethod
    def has_cuda_ipc_proxy() -> bool:
        return False


def numbered(item: MediaItem) -> Item:
    return Item(100_000 + item.identity[0])


def check_layout(layout: Layout, prompt: PendingPrompt) -> tuple[Any, ...]:
    """It is what somebody who knows nothing of layouts makes of the prompt."""
    ids = prompt.input_ids()
    offsets = []
    for item, spans in prompt.media():
        for first, last in spans:
            ids[first:last] = numbered(item).padding_sequence(last - first)
        offsets.append((numbered(item).number, [(first, last - 1) for first, last in spans]))
    padded = array("q", [0]) * prompt.stop
    layout.write(padded)
    assert padded.tolist() == ids.tolist()
    assert np.array_equal(layout.table().numpy(), prompt.positions())
    assert [(item.number, item.offsets) for item in layout.items()] == offsets
    return layout.table(), layout.table().clone()


@EXAMPLES
@given(data=st.data(), first=histories(max_turns=2))
def test_whatever_is_laid_out_next_what_was_handed_out_stays(first: list[Segment], data: st.DataObject) -> None:
    session = new_session()
    nodes, handed, layout = [session.root, on(session, first)], [], Layout(session.scheme)
    for _ in range(data.draw(st.integers(1, 8))):
        node = data.draw(st.sampled_from(nodes))
        length = data.draw(st.sampled_from([node.stop, node.start, *(each.stop for each in node.path())]))
        prompt = PendingPrompt.of(node, length)
        for segment in data.draw(histories(max_turns=2)):
            prompt = prompt.extended(segment.tokens, media(segment))
        layout = layout.behind(prompt.node, prompt.kept)
        layout.lay(prompt, numbered)
        handed.append(check_layout(layout, prompt))
        if data.draw(st.booleans()) and prompt.stop:
            nodes.append(grow(session, prompt.committed(session), reply(*data.draw(st.lists(st.integers(1, 9), max_size=3)))))
            layout.ended(prompt, nodes[-1])
    for view, copy in handed:
        assert np.array_equal(view, copy)


def test_a_line_of_turns_is_laid_out_once() -> None:
    session = new_session()
    node, layout, written = session.root, Layout(session.scheme), 0
    for number in range(200):
        prompt = PendingPrompt.of(node, node.stop).extended(
            [1, 2, VS, *[IMG] * 4, 3], media(turn(1, 2, VS, image(number=number), 3))
        )
        there = layout.behind(prompt.node, prompt.kept)
        assert there is layout
        written += prompt.stop - there.stop
        there.lay(prompt, numbered)
        node = grow(session, prompt.committed(session), reply(5, 6))
        there.ended(prompt, node)
        layout = there
    assert written == 8 * 200 and layout.stop == node.stop == 10 * 200
    check_layout(layout, PendingPrompt.of(node, node.stop))
    branch = layout.behind(node, 15)
    assert branch is not layout and branch.stop == 15 and layout.stop == 2000
