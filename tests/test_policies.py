"""Prompts: whole items put together from their parts, tail policies against a history built without the tokens, refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from engine_bridge.policies import Prompt, prompt_of
from sessiontree import MediaSpanError, Node, OutOfRange, PositionError, Session, SessionStore, Unsupported
from sessiontree.positions import scheme
from tests.histories import History, Turn, without_leading_empties
from tests.rope_oracle import RANDOMS, TEXT, draw_history
from tests.test_tree import IMAGE_PAD, VISION_END, VISION_START, identity, image, vl

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_omni", "hunyuan_vl", "minicpmv4_7")
MODES: tuple[Any, ...] = ("as_decoded", "as_replayed")


Reply = tuple[list[int], str]


def conversation(session: Session, turns: Sequence[Turn | Reply], *, cut: bool = False) -> Node:
    """``turns`` one behind the other. ``cut``: replies lose their last token before they are committed at all."""
    node = session.root
    for turn in turns:
        if isinstance(turn, Turn):
            node = session.append(node, list(turn.tokens), media=turn.media)
            continue
        tokens, policy = turn
        with session.draft(node) as draft:
            draft.extend(tokens[:-1] if cut else tokens)
            node = draft.commit(tail_policy="drop_last" if policy == "drop_last" and not cut else "keep")
    return node


def drawn_turns(rng: random.Random, family: str) -> tuple[History, list[Turn | Reply]]:
    """Turns of a random history, and replies wherever the path is not inside an item."""
    history, _ = draw_history(rng, family)
    positions_of = scheme(f"{family}@hf5", **history.params)
    state, turns = positions_of.initial_state(), list[Turn | Reply]()
    for turn in without_leading_empties(history.turns()):
        _, state = positions_of.extend(state, np.array(turn.tokens, np.int32), turn.media)
        turns.append(turn)
        if state.open_block is None and rng.random() < 0.6:
            tokens = [TEXT + rng.randrange(5) for _ in range(rng.randrange(1, 5))]
            if rng.random() < 0.2 and tokens:
                turns.append((tokens, "drop_last"))
            else:
                turns.append((tokens, "keep"))
    return history, turns


def whole_items(node: Node) -> list[tuple[bytes, list[tuple[int, int]]]]:
    """The items of a path with the tokens of each, put together token by token."""
    found: list[tuple[Any, int, list[int]]] = []
    for turn in node.path():
        for item in turn.media:
            tokens = [turn.start + offset + k for offset, length in item.spans for k in range(length)]
            if item.placeholders_before:
                [entry] = [e for e in found if e[0].content() == item.content() and len(e[2]) == item.placeholders_before]
                entry[2].extend(tokens)
            else:
                found.append((item, tokens[0], tokens))
    found.sort(key=lambda entry: entry[1])
    runs = []
    for item, _, tokens in found:
        array = np.array(tokens)
        runs.append(
            (item.identity, [(int(run[0]), int(run[-1]) + 1) for run in np.split(array, np.flatnonzero(np.diff(array) > 1) + 1)])
        )
    return runs


def media_of(prompt: Prompt) -> list[tuple[bytes, list[tuple[int, int]]]]:
    return [(item.identity, list(spans)) for item, spans in prompt.media]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(rng=RANDOMS)
def test_a_prompt_without_last_tokens_is_that_of_a_history_without_them(family: str, rng: random.Random) -> None:
    history, turns = drawn_turns(rng, family)
    positions_of = scheme(f"{family}@hf5", **history.params)
    node = conversation(SessionStore.in_memory().create("whole", scheme=positions_of), turns)
    expected = conversation(SessionStore.in_memory().create("cut", scheme=positions_of), turns, cut=True)
    if node.position_state().open_block is not None:
        for policy in (None, "drop_last"):
            with pytest.raises(MediaSpanError):
                prompt_of(node, tail_policy=policy)
        return
    kept, dropped = prompt_of(node), prompt_of(node, tail_policy="drop_last")
    assert kept.input_ids.tolist() == node.input_ids().tolist()
    assert media_of(kept) == whole_items(node)
    assert media_of(dropped) == whole_items(expected)
    assert dropped.input_ids.tolist() == expected.input_ids().tolist()
    assert np.delete(node.input_ids(), list(dropped.dropped)).tolist() == expected.input_ids().tolist()
    for mode in MODES:
        assert np.array_equal(kept.positions(mode), node.positions(mode=mode))
        assert np.array_equal(dropped.positions(mode), expected.positions(mode=mode))
        assert dropped.position_state(mode) == expected.position_state(mode)
    prefix_len = rng.randrange(dropped.stop + 1)
    try:
        window = prompt_of(node, prefix_len, tail_policy="drop_last")
    except Unsupported:
        assert any(begin < prefix_len < spans[-1][1] for _, spans in dropped.media for begin in [spans[0][0]])
        return
    assert window.input_ids.tolist() == expected.input_ids(prefix_len).tolist()
    assert np.array_equal(window.positions(), expected.positions(prefix_len))
    assert media_of(window) == [
        (name, [(begin - prefix_len, end - prefix_len) for begin, end in spans])
        for name, spans in whole_items(expected)
        if spans[0][0] >= prefix_len
    ]


def test_a_c52_the_last_sampled_token_is_kept_or_dropped_and_either_is_recorded() -> None:
    """[A1, B1, C1], [D1], [A2, B2]: the next prompt with and without D1, whichever way D1 was committed."""
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    prompt = session.append(session.root, [1, 2, 3])
    nodes = {}
    for policy in ("keep", "drop_last"):
        with session.draft(prompt) as draft:
            draft.append(4)
            reply = draft.commit("length", tail_policy=policy)
        assert reply.tail_policy == policy
        nodes[policy] = session.append(reply, [11, 12])
    assert prompt_of(nodes["keep"]).input_ids.tolist() == [1, 2, 3, 4, 11, 12]
    assert prompt_of(nodes["keep"], tail_policy="keep").input_ids.tolist() == [1, 2, 3, 4, 11, 12]
    dropped = prompt_of(nodes["keep"], tail_policy="drop_last")
    assert (dropped.input_ids.tolist(), dropped.dropped, dropped.tail_policy) == ([1, 2, 3, 11, 12], (3,), "drop_last")
    assert dropped.positions().tolist() == [[0, 1, 2, 3, 4]]
    for asked in (None, "drop_last"):
        again = prompt_of(nodes["drop_last"], tail_policy=asked)
        assert (again.input_ids.tolist(), again.dropped) == ([1, 2, 3, 11, 12], ()), "nothing is dropped twice"
    with pytest.raises(Unsupported) as caught:
        prompt_of(nodes["drop_last"], tail_policy="keep")
    assert caught.value.node == nodes["drop_last"].parent
    with pytest.raises(Unsupported):
        prompt_of(prompt, tail_policy="last")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        prompt_of(prompt, tail_policy=1)  # type: ignore[arg-type]


def test_a_draft_and_a_reply_cut_by_hand_keep_their_tokens() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@vllm")
    with session.draft(session.append(session.root, [1, 2])) as first:
        first.extend([3, 4, 5])
        reply = first.commit()
    cut = session.truncate(reply, 4)
    assert prompt_of(cut, tail_policy="drop_last").input_ids.tolist() == [1, 2, 3, 4]
    draft = session.draft(reply)
    draft.extend([6, 7])
    for source, expected in ((reply, [1, 2, 3, 4]), (draft, [1, 2, 3, 4, 6, 7])):
        prompt = prompt_of(source, tail_policy="drop_last")
        assert (prompt.input_ids.tolist(), prompt.dropped) == (expected, (4,))
        assert prompt.positions().tolist() == [[*range(len(expected))]]
    assert prompt_of(draft, 5, tail_policy="drop_last").input_ids.tolist() == [7]
    assert prompt_of(draft, 6, tail_policy="drop_last").input_ids.tolist() == []


def test_a_turn_with_a_table_of_its_own_cannot_follow_a_dropped_token() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl())
    with session.draft(session.append(session.root, [1, 2])) as draft:
        draft.extend([3, 4])
        reply = draft.commit()
    node = session.append(reply, [5, 6], positions=[[9, 9]] * 3)
    assert prompt_of(node).positions().tolist() == [[0, 1, 2, 3, 9, 9]] * 3
    prompt = prompt_of(node, tail_policy="drop_last")
    assert prompt.input_ids.tolist() == [1, 2, 3, 5, 6]
    for reading in (prompt.positions, prompt.position_state):
        with pytest.raises(Unsupported) as caught:
            reading()
        assert caught.value.node == node


def test_paths_that_end_or_windows_that_begin_inside_media() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl())
    part = image("a", 2).with_spans([(2, 3)], unfinished=True)
    open_node = session.append(session.root, [VISION_START, 7, *[IMAGE_PAD] * 3], media=[part])
    with pytest.raises(MediaSpanError) as caught:
        prompt_of(open_node)
    assert (caught.value.item, caught.value.span) == (part, (2, 5))
    rest = image("a", 0).with_spans([(0, 1)], placeholders_before=3)
    node = session.append(open_node, [IMAGE_PAD, VISION_END, *[IMAGE_PAD] * 4], media=[rest, image("a", 2)])
    assert [spans for _, spans in prompt_of(node).media] == [((2, 6),), ((7, 11),)], "parts are joined; equal items are two"
    for prefix_len in (3, 4, 5, 8, 10):
        with pytest.raises(Unsupported) as refused:
            prompt_of(node, prefix_len)
        assert (refused.value.item.identity, refused.value.prefix_len) == (identity("a"), prefix_len)
    assert [spans for _, spans in prompt_of(node, 6).media] == [((1, 5),)]
    assert prompt_of(node, 11).media == ()
    for prefix_len in (-1, 12):
        with pytest.raises(OutOfRange):
            prompt_of(node, prefix_len)


def test_unpaired_tool_calls_are_refused_when_asked() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@sglang")
    asked = session.append(session.root, [1])
    with session.draft(asked) as draft:
        draft.append(2)
        calls = draft.commit(metadata={"tool_calls": ["a", "b"]})
    one = session.append(calls, [3], role="tool", metadata={"tool_call_id": "a"})
    both = session.append(one, [4], role="tool", metadata={"tool_call_id": "b"})
    stray = session.append(both, [5], role="tool", metadata={"tool_call_id": "c"})
    assert prompt_of(both, paired_calls=True).input_ids.tolist() == [1, 2, 3, 4]
    for node, named in ((calls, "'a'"), (one, "'b'"), (stray, "'c'"), (session.draft(one), "'b'")):
        assert prompt_of(node).stop == node.stop
        with pytest.raises(Unsupported, match=named):
            prompt_of(node, paired_calls=True)


@pytest.mark.parametrize("wrong", [None, 1, "node", [1, 2]])
def test_only_nodes_and_drafts_make_prompts(wrong: Any) -> None:
    with pytest.raises(TypeError):
        prompt_of(wrong)


def test_a_mode_that_does_not_exist() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@sglang")
    with session.draft(session.append(session.root, [1])) as draft:
        draft.append(2)
        reply = draft.commit()
    guessed: Any = "guessed"
    for policy in (None, "drop_last"):
        with pytest.raises(PositionError):
            prompt_of(reply, tail_policy=policy).positions(guessed)
