"""Positions against tables that transformers, SGLang and vLLM computed: every family, every rule, no difference.

What the vectors leave open is not asked: of an engine's rule they give positions and delta, of long histories a sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sessiontree import MediaItem, Node, Session, SessionStore, Unsupported
from sessiontree.positions import PositionScheme, PositionState, scheme
from tests import reference as ref
from tests.histories import (
    GOLDEN_FAMILIES,
    RULES,
    History,
    Table,
    Turn,
    cases,
    histories,
    random_cuts,
    spans_of_turns,
    split,
    vectors,
    without_leading_empties,
)

#: Families whose naive rule tests/reference.py holds too.
REFERENCE_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
#: Schemes that refuse every item. minicpmv4_7@sglang has tables, but by a newline rule that nobody has shown.
NO_RULE = (
    "glm_image@vllm",
    "hunyuan_vl@sglang",
    "hunyuan_vl@vllm",
    "hy_v4_vl@sglang",
    "hy_v4_vl@vllm",
    "minicpmv4_7@sglang",
    "qwen2_5_omni@sglang",
)
#: Schemes that refuse audio-in-video and nothing else.
NO_AUDIO_IN_VIDEO = ("qwen2_5_omni@vllm", "qwen3_omni@sglang")
#: Schemes whose generated tokens do not stand at index + delta, or not in a way the vectors say.
OTHER_DECODE = ("glm_image@hf5", "glm_image@sglang", "qwen3_omni@sglang")

CASES = [(family, rule) for family in (*GOLDEN_FAMILIES, "text") for rule in RULES if f"{family}@{rule}" not in NO_RULE]


def known_cases(family: str, rule: str) -> list[tuple[History, Table]]:
    """The histories that a scheme has to place, each with its table."""
    refused = f"{family}@{rule}" in NO_AUDIO_IN_VIDEO
    found = [(history, table) for history, table in cases(family, rule) if not (refused and history.has_audio_in_video)]
    assert len(found) >= 22, "a rule with next to no vectors proves nothing"
    return found


def scheme_of(history: History, rule: str) -> PositionScheme:
    return scheme(f"{history.family}@{rule}", **history.params)


def extended(positions_of: PositionScheme, turns: Sequence[Turn]) -> tuple[NDArray[Any], PositionState]:
    """Positions of turns placed one after the other, and the state after them."""
    state = positions_of.initial_state()
    tables = []
    for turn in turns:
        table, state = positions_of.extend(state, np.array(turn.tokens, dtype=np.int32), turn.media)
        assert table.shape == (positions_of.num_axes, len(turn.tokens))
        assert table.dtype == np.dtype(positions_of.dtype)
        assert not table.flags.writeable
        tables.append(table)
    return np.concatenate(tables, axis=1), state


def assert_positions(given: NDArray[Any], table: Table, note: object) -> None:
    """The table's columns, of all axes, without a difference."""
    assert given.shape[0] == table.positions.shape[0], note
    differing = np.flatnonzero((given[:, table.columns] != table.positions).any(axis=0))
    if differing.size:
        at = differing[0]
        column = table.columns[at]
        raise AssertionError(
            f"{note}: {differing.size} columns differ, first token {column}: {given[:, column]}, not {table.positions[:, at]}"
        )


def assert_state(positions_of: PositionScheme, state: PositionState, table: Table, count: int, note: object) -> None:
    """What the table says of the positions to come; and that decoding goes on from there, if by index + delta."""
    assert state.num_tokens == count, note
    assert positions_of.mrope_position_delta(state) == table.delta, note
    if table.max_position is not None:
        assert state.max_position == table.max_position, note
    if table.next_position is not None:
        assert positions_of.next_position(state) == table.next_position, note
    if table.decode_positions is not None and positions_of.name.endswith("@hf5"):
        assert np.array_equal(positions_of.decode_positions(state), table.decode_positions), note
    if positions_of.name in OTHER_DECODE:
        return
    decoded, after = positions_of.decode(state, np.array([7, 8], dtype=np.int32))
    kind = positions_of.dtype.type
    line = [kind(kind(count + step) + kind(table.delta)) for step in range(2)]
    assert decoded.dtype == positions_of.dtype
    assert np.array_equal(decoded, np.broadcast_to(np.array(line), (positions_of.num_axes, 2))), note
    assert after.num_tokens == count + 2
    if positions_of.dtype.kind == "i":
        assert positions_of.mrope_position_delta(after) == table.delta, note
        assert positions_of.next_position(after) == line[-1] + 1, note


# A scheme by itself


def test_every_family_has_its_vectors() -> None:
    assert {family: len(vectors(family)) for family in GOLDEN_FAMILIES} == dict.fromkeys(GOLDEN_FAMILIES, 40)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_extended_turn_by_turn(family: str, rule: str) -> None:
    for number, (history, table) in enumerate(known_cases(family, rule)):
        positions_of = scheme_of(history, rule)
        assert positions_of.name == f"{family}@{rule}"
        given, state = extended(positions_of, history.turns())
        note = (number, history.note)
        assert_positions(given, table, note)
        assert_state(positions_of, state, table, len(history.tokens), note)
        if rule == "hf5":
            assert given.dtype == np.dtype(table.dtype)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_extended_over_random_cuts(family: str, rule: str) -> None:
    rng = random.Random(f"{family}@{rule} scheme")
    for number, (history, table) in enumerate(known_cases(family, rule)):
        positions_of = scheme_of(history, rule)
        for _ in range(6):
            cuts = random_cuts(rng, history)
            given, state = extended(positions_of, split(history, cuts))
            note = (number, history.note, cuts)
            assert_positions(given, table, note)
            assert_state(positions_of, state, table, len(history.tokens), note)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_extended_token_by_token(family: str, rule: str) -> None:
    """As many turns as may be: the state after a turn is all that the next one needs."""
    for number, (history, table) in enumerate(known_cases(family, rule)):
        if len(history.tokens) > 200:
            continue
        positions_of = scheme_of(history, rule)
        cuts = [at for at in range(1, len(history.tokens)) if history.may_cut(at)]
        given, state = extended(positions_of, split(history, cuts))
        note = (number, history.note)
        assert_positions(given, table, note)
        assert_state(positions_of, state, table, len(history.tokens), note)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_placing_a_prefix(family: str, rule: str) -> None:
    """Positions never depend on what comes later."""
    rng = random.Random(f"{family}@{rule} prefix")
    for number, (history, table) in enumerate(known_cases(family, rule)):
        positions_of = scheme_of(history, rule)
        for stop in random_cuts(rng, history):
            given, _ = extended(positions_of, split(history, [stop])[:1])
            assert_positions(given, table.upto(stop), (number, history.note, stop))


# Through sessions


def append_all(session: Session, parent: Node, turns: Sequence[Turn]) -> list[Node]:
    nodes = []
    for turn in turns:
        parent = session.append(parent, np.array(turn.tokens, dtype=np.int32), media=turn.media)
        nodes.append(parent)
    return nodes


def clipped(turns: Sequence[Turn], start: int, stop: int) -> list[tuple[bytes, int, int]]:
    inside = [(identity, max(first, start), min(last, stop)) for identity, first, last in spans_of_turns(turns)]
    return [(identity, first, last) for identity, first, last in inside if first < last]


def check_node(node: Node, turns: Sequence[Turn], positions_of: PositionScheme, table: Table, note: object) -> None:
    """The node that ends a history, whole and through windows of every kind."""
    tokens = np.array([token for turn in turns for token in turn.tokens], dtype=np.int32)
    count = len(tokens)
    assert node.stop == count
    assert np.array_equal(node.input_ids(), tokens)
    assert node.mrope_position_delta == table.delta, note
    if table.next_position is not None:
        assert node.next_position == table.next_position, note
    for mode in ("as_decoded", "as_replayed"):
        positions = node.positions(mode=mode)
        assert positions.dtype == positions_of.dtype
        assert_positions(positions, table, (note, mode))
    rng = random.Random(count)
    windows = [(0, 0), (count, count), (0, count), (count - 1, count)]
    windows += [(rng.randrange(count + 1), rng.randrange(count + 1)) for _ in range(20)]
    for one, other in windows:
        start, stop = min(one, other), max(one, other)
        assert np.array_equal(node.positions(start, stop), positions[:, start:stop])
        assert np.array_equal(node.input_ids(start, stop), tokens[start:stop])
        spans = [(item.identity, first, last) for item, first, last in node.media_spans(start, stop)]
        assert spans == clipped(turns, start, stop)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_session_appended_turn_by_turn(family: str, rule: str) -> None:
    with SessionStore.in_memory() as store:
        for number, (history, table) in enumerate(known_cases(family, rule)):
            positions_of = scheme_of(history, rule)
            turns = without_leading_empties(history.turns())
            session = store.create(f"s{number}", scheme=positions_of)
            nodes = append_all(session, session.root, turns)
            check_node(nodes[-1], turns, positions_of, table, (number, history.note))
            for node in nodes:
                assert_positions(node.positions(), table.upto(node.stop), (number, history.note, node.stop))


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_session_cut_anywhere_and_branched_from_random_nodes(family: str, rule: str) -> None:
    rng = random.Random(f"{family}@{rule} session")
    with SessionStore.in_memory() as store:
        for number, (history, table) in enumerate(known_cases(family, rule)):
            positions_of = scheme_of(history, rule)
            session = store.create(f"s{number}", scheme=positions_of)
            paths: list[tuple[list[Node], list[Turn]]] = [([session.root], [])]
            for _ in range(6):
                nodes, turns = rng.choice(paths)
                depth = rng.randrange(len(nodes))
                start, kept = nodes[depth].stop, turns[:depth]
                if not history.inside_block(start):
                    session.append(nodes[depth], [1, 2, 3, rng.randrange(1000)])
                rest = split(history, [start, *random_cuts(rng, history, start)])[1:]
                if start == 0:
                    rest = without_leading_empties(rest)
                grown = append_all(session, nodes[depth], rest)
                paths.append(([*nodes[: depth + 1], *grown], [*kept, *rest]))
                check_node(paths[-1][0][-1], paths[-1][1], positions_of, table, (number, history.note))
            for nodes, turns in paths[1:]:
                check_node(nodes[-1], turns, positions_of, table, (number, history.note))


# What has no rule


@pytest.mark.parametrize("name", NO_RULE)
def test_a_scheme_that_nobody_has_shown_is_refused(name: str) -> None:
    family, _, rule = name.partition("@")
    for history in histories(family):
        assert history.items
        assert history.tables[rule] is None or name == "minicpmv4_7@sglang"
        with pytest.raises(Unsupported):
            extended(scheme_of(history, rule), history.turns())


@pytest.mark.parametrize("name", NO_AUDIO_IN_VIDEO)
def test_audio_in_video_that_nobody_has_shown_is_refused(name: str) -> None:
    family, _, rule = name.partition("@")
    refused = [history for history in histories(family) if history.has_audio_in_video]
    assert len(refused) >= 10
    for history in refused:
        with pytest.raises(Unsupported):
            extended(scheme_of(history, rule), history.turns())


# The naive reference of the other tests, itself against the vectors


def reference_item(item: MediaItem) -> ref.Item:
    assert item.grid_thw is not None
    seconds = item.second_per_grid_ts
    return ref.Item(item.modality, item.identity, item.grid_thw, seconds, item.spans, item.placeholders_before, item.unfinished)


def reference_segments(turns: Sequence[Turn]) -> list[ref.Segment]:
    return [ref.Segment("input", turn.tokens, tuple(reference_item(item) for item in turn.media)) for turn in turns]


def reference_scheme(history: History, rule: str) -> ref.Scheme:
    return ref.Scheme(history.family, rule, history.params["spatial_merge_size"], history.params.get("tokens_per_second"))


@pytest.mark.parametrize("family", REFERENCE_FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_gives_the_vectors(family: str, rule: str) -> None:
    for history, table in known_cases(family, rule):
        turns = without_leading_empties(history.turns())
        for mode in ref.MODES:
            result = ref.replay(reference_scheme(history, rule), reference_segments(turns), mode)
            assert np.array_equal(result.positions, table.positions), history.note
            assert result.delta == table.delta
            assert result.next_position == table.next_position
            assert result.max_position == table.max_position


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_refuses_a_cut_that_is_not_declared(rule: str) -> None:
    history = vectors("qwen2_vl")[0]
    [offset, length] = history.items[0].spans[0]
    [whole] = reference_segments(split(history, []))
    broken = ref.Segment("input", whole.tokens[: offset + length - 1], whole.items[:1])
    with pytest.raises(ref.Refused, match="MediaSpanError"):
        ref.replay(reference_scheme(history, rule), [broken], "as_replayed")
