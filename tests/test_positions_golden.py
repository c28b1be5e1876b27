"""Positions against tables that transformers, SGLang and vLLM computed: every history, every rule, no difference.

The vectors give no spans, so the tests derive them from the runs of placeholder ids (the library never does) and
declare the parts of items that reach past their segment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sessiontree import MediaItem, Node, Session, SessionStore
from sessiontree.positions import PositionScheme, scheme
from tests.reference import (
    RULES,
    History,
    Refused,
    Segment,
    Span,
    blocks_from_ids,
    clip_spans,
    input_ids,
    load_histories,
    media_spans,
    replay,
    split,
)

VECTORS = Path(__file__).parent / "golden" / "mrope"
GOLDEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
CASES = [(family, rule) for family in (*GOLDEN_FAMILIES, "text") for rule in RULES]


@cache
def vectors(family: str) -> list[History]:
    return load_histories((VECTORS / f"{family}.json").read_text())


@cache
def text_histories() -> list[History]:
    """The vectors' cuts with every item taken away: plain text, whose positions are the indexes."""
    histories = []
    for history in vectors("qwen2_vl"):
        segments = tuple(Segment("input", segment.tokens) for segment in history.segments)
        count = len(input_ids(segments))
        table = {"positions": [list(range(count))], "delta": 0, "dtype": "int64", "max_position": count - 1}
        table["next_text_position"] = count
        histories.append(History("text", history.note, {}, segments, table, {"sglang": "same", "vllm": "same"}))
    return histories


def histories(family: str) -> list[History]:
    return text_histories() if family == "text" else vectors(family)


def cases(family: str, rule: str) -> Iterator[tuple[History, PositionScheme, np.ndarray, int, int]]:
    """History, scheme, expected positions, delta and next position of the text after it."""
    for history in histories(family):
        table = history.table(rule)
        assert table is not None, "no vector of these families is unsupported"
        positions = np.array(table["positions"], dtype=np.int64)
        after = int(positions.max()) + 1 if rule != "hf5" else table["next_text_position"]
        yield history, scheme(f"{family}@{rule}", **history.params), positions, table["delta"], after


def media(segment: Segment) -> list[MediaItem]:
    return [MediaItem(**item.kwargs()) for item in segment.items]


def whole_history(history: History) -> tuple[list[int], list[Span]]:
    if history.family == "text":
        return input_ids(history.segments), []
    tokens = input_ids(history.segments)
    firsts = [item for item, _, _ in media_spans(history.segments) if not item.placeholders_before]
    given = [{"modality": i.modality, "grid_thw": i.grid_thw, "second_per_grid": i.second_per_grid_ts} for i in firsts]
    return tokens, blocks_from_ids(history.params, tokens, given)


def without_leading_empties(segments: Sequence[Segment]) -> list[Segment]:
    """An empty turn directly under the root is no node."""
    first = next(k for k, segment in enumerate(segments) if segment.tokens)
    return list(segments[first:])


def random_cuts(rng: random.Random, length: int) -> list[int]:
    return sorted(rng.randrange(length + 1) for _ in range(rng.randrange(8)))


def append_all(session: Session, parent: Node, segments: Sequence[Segment]) -> list[Node]:
    nodes = []
    for segment in segments:
        parent = session.append(parent, np.array(segment.tokens, dtype=np.int32), media=media(segment))
        nodes.append(parent)
    return nodes


def spans_of(node: Node, start: int, stop: int) -> list[tuple[bytes, int, int]]:
    return [(item.identity, first, last) for item, first, last in node.media_spans(start, stop)]


def check_node(node: Node, segments: Sequence[Segment], positions: np.ndarray, delta: int, after: int) -> None:
    """A node of `segments` as input turns, whole and through windows of every kind."""
    tokens = np.array(input_ids(segments), dtype=np.int32)
    count = len(tokens)
    assert node.stop == count
    assert np.array_equal(node.input_ids(), tokens)
    assert node.mrope_position_delta == delta
    assert node.next_position == after
    for mode in ("as_decoded", "as_replayed"):
        table = node.positions(mode=mode)
        assert table.dtype == np.int64
        assert np.array_equal(table, positions)
    rng = random.Random(count)
    spans = media_spans(segments)
    windows = [(0, 0), (count, count), (0, count), (count - 1, count)]
    windows += [(rng.randrange(count + 1), rng.randrange(count + 1)) for _ in range(20)]
    for one, other in windows:
        start, stop = min(one, other), max(one, other)
        assert np.array_equal(node.positions(start, stop), positions[:, start:stop])
        assert np.array_equal(node.input_ids(start, stop), tokens[start:stop])
        expected = [(item.identity, first, last) for item, first, last in clip_spans(spans, start, stop)]
        assert spans_of(node, start, stop) == expected


def extended(positions_of: PositionScheme, segments: Sequence[Segment]) -> tuple[np.ndarray, Any]:
    state = positions_of.initial_state()
    tables = []
    for segment in segments:
        table, state = positions_of.extend(state, np.array(segment.tokens, dtype=np.int32), media(segment))
        assert table.shape == (positions_of.num_axes, len(segment.tokens))
        assert table.dtype == np.dtype(positions_of.dtype)
        tables.append(table)
    return np.concatenate(tables, axis=1), state


def check_state(positions_of: PositionScheme, state: Any, positions: np.ndarray, delta: int, after: int) -> None:
    assert positions_of.mrope_position_delta(state) == delta
    assert positions_of.next_position(state) == after
    first_decoded, decoded_state = positions_of.decode(state, np.array([7, 8], dtype=np.int32))
    begin = int(positions.max()) + 1
    assert state.max_position == begin - 1
    assert np.array_equal(first_decoded, np.broadcast_to([begin, begin + 1], (positions_of.num_axes, 2)))
    assert positions_of.mrope_position_delta(decoded_state) == delta
    assert positions_of.next_position(decoded_state) == begin + 2


@pytest.mark.parametrize("family", GOLDEN_FAMILIES)
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_gives_the_vectors(family: str, rule: str) -> None:
    assert len(vectors(family)) == 40
    for history in vectors(family):
        table = history.table(rule)
        assert table is not None
        for mode in ("as_decoded", "as_replayed"):
            result = replay(history.scheme(rule), without_leading_empties(history.segments), mode)
            assert np.array_equal(result.positions, np.array(table["positions"])), history.note
            assert result.delta == table["delta"]
            if rule == "hf5":
                assert result.next_position == table["next_text_position"]
                assert result.max_position == table["max_position"]


@pytest.mark.parametrize("rule", RULES)
def test_the_reference_refuses_a_cut_that_is_not_declared(rule: str) -> None:
    history = vectors("qwen2_vl")[0]
    tokens, blocks = whole_history(history)
    [_, start, stop] = blocks[0]
    broken = [Segment("input", tuple(tokens[: stop - 1]), split(tokens, blocks, [])[0].items)]
    assert start < stop
    with pytest.raises(Refused, match="MediaSpanError"):
        replay(history.scheme(rule), broken, "as_replayed")


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_extended_segment_by_segment(family: str, rule: str) -> None:
    for history, positions_of, positions, delta, after in cases(family, rule):
        assert positions_of.name == f"{family}@{rule}"
        table, state = extended(positions_of, history.segments)
        assert table.dtype == np.dtype(history.expected["dtype"])
        assert np.array_equal(table, positions), history.note
        check_state(positions_of, state, positions, delta, after)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_scheme_extended_over_random_cuts(family: str, rule: str) -> None:
    rng = random.Random(f"{family}@{rule} scheme")
    for history, positions_of, positions, delta, after in cases(family, rule):
        tokens, blocks = whole_history(history)
        for _ in range(4):
            cuts = random_cuts(rng, len(tokens))
            table, state = extended(positions_of, split(tokens, blocks, cuts))
            assert np.array_equal(table, positions), (history.note, cuts)
            check_state(positions_of, state, positions, delta, after)


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_session_appended_segment_by_segment(family: str, rule: str) -> None:
    with SessionStore.in_memory() as store:
        for number, (history, positions_of, positions, delta, after) in enumerate(cases(family, rule)):
            segments = without_leading_empties(history.segments)
            session = store.create(f"s{number}", scheme=positions_of)
            nodes = append_all(session, session.root, segments)
            check_node(nodes[-1], segments, positions, delta, after)
            for node in nodes:
                assert np.array_equal(node.positions(), positions[:, : node.stop]), history.note


@pytest.mark.parametrize(("family", "rule"), CASES)
def test_session_cut_anywhere_and_branched_from_random_nodes(family: str, rule: str) -> None:
    rng = random.Random(f"{family}@{rule} session")
    with SessionStore.in_memory() as store:
        for number, (history, positions_of, positions, delta, after) in enumerate(cases(family, rule)):
            tokens, blocks = whole_history(history)
            session = store.create(f"s{number}", scheme=positions_of)
            paths: list[tuple[list[Node], list[Segment]]] = [([session.root], [])]
            for _ in range(6):
                nodes, segments = rng.choice(paths)
                depth = rng.randrange(len(nodes))
                start, kept = nodes[depth].stop, segments[:depth]
                if not any(first < start < last for _, first, last in blocks):
                    session.append(nodes[depth], [1, 2, 3, rng.randrange(1000)])
                cuts = [start + cut for cut in random_cuts(rng, len(tokens) - start)]
                rest = split(tokens, blocks, [start, *cuts])[1:]
                if start == 0:
                    rest = without_leading_empties(rest)
                grown = append_all(session, nodes[depth], rest)
                paths.append(([*nodes[: depth + 1], *grown], [*kept, *rest]))
                check_node(paths[-1][0][-1], paths[-1][1], positions, delta, after)
            for nodes, segments in paths[1:]:
                check_node(nodes[-1], segments, positions, delta, after)
