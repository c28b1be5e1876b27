"""Histories of the golden vectors: tokens, whole items with their spans, where turns end, and the table of every rule.

The vectors give items without spans; here they are derived from the runs of placeholder ids (the library never does that).
Items stand in the coordinates of their history; :func:`split` turns a history into turns, with the parts of an item declared
wherever a cut runs through it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessiontree import MediaItem

VECTORS = Path(__file__).parent / "golden" / "mrope"
RULES = ("hf5", "sglang", "vllm")
GOLDEN_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "ernie4_5_vl",
    "paddleocr_vl",
    "qwen3_vl",
    "glm4v",
    "qwen2_5_omni",
    "qwen3_omni",
    "hy_v4_vl",
    "hunyuan_vl",
    "minicpmv4_7",
    "glm_image",
)
FRAME_FAMILIES = ("qwen3_vl", "glm4v")
CANVAS_FAMILIES = ("minicpmv4_7",)
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True)
class Turn:
    """The content of one node: spans are relative to its tokens."""

    tokens: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """Positions of the tokens ``columns`` (all, or a sample), (num_axes, len(columns)); what a rule does not say is None."""

    columns: NDArray[np.int64]
    positions: NDArray[Any]
    delta: float
    dtype: str
    next_position: float | None
    max_position: float | None
    decode_positions: NDArray[np.int64] | None = None

    def upto(self, stop: int) -> Table:
        """The part of the table before token ``stop``; it says nothing of what comes next."""
        kept = int(np.searchsorted(self.columns, stop))
        return Table(self.columns[:kept], self.positions[:, :kept], self.delta, self.dtype, None, None)


@dataclass(frozen=True, eq=False)
class History:
    """One history. ``items``: whole, spans in path coordinates, in token order. ``cuts``: where its turns end.

    ``tables``: by rule; None where the engine refuses the history, absent where nobody asked it.
    """

    family: str
    note: str
    params: Mapping[str, Any]
    tokens: NDArray[np.int32]
    items: tuple[MediaItem, ...]
    cuts: tuple[int, ...]
    tables: Mapping[str, Table | None]

    @property
    def has_audio_in_video(self) -> bool:
        return any(item.modality == "video" and item.audio_feature_length is not None for item in self.items)

    def turns(self) -> list[Turn]:
        return split(self, self.cuts)

    def whole(self) -> list[tuple[int, int]]:
        """Token ranges that no cut may run through: the crops of a canvas and the marker before them."""
        if self.family not in CANVAS_FAMILIES:
            return []
        return [(item.spans[0][0] - 1, sum(item.spans[-1])) for item in self.items]

    def may_cut(self, at: int) -> bool:
        return not any(start < at < stop for start, stop in self.whole())

    def inside_block(self, at: int) -> bool:
        """Whether tokens ``at - 1`` and ``at`` belong to one span, so that nothing else may follow the first."""
        return any(offset < at < offset + length for item in self.items for offset, length in item.spans)


def split(history: History, cuts: Sequence[int]) -> list[Turn]:
    """Turns that end at the given token indexes and at the end, items that cuts run through declared in parts."""
    bounds = [0, *cuts, len(history.tokens)]
    turns = []
    for start, stop in pairwise(bounds):
        media = []
        for item in history.items:
            clipped = [(max(offset, start), min(offset + length, stop)) for offset, length in item.spans]
            spans = [(low - start, high - low) for low, high in clipped if low < high]
            if spans:
                before = sum(min(offset + length, start) - offset for offset, length in item.spans if offset < start)
                held = sum(length for _, length in spans)
                unfinished = before + held < item.num_placeholders
                media.append(item.with_spans(spans, placeholders_before=before, unfinished=unfinished))
        turns.append(Turn(tuple(history.tokens[start:stop].tolist()), tuple(media)))
    return turns


def without_leading_empties(turns: Sequence[Turn]) -> list[Turn]:
    """An empty turn directly under the root is no node."""
    first = next(number for number, turn in enumerate(turns) if turn.tokens)
    return list(turns[first:])


def random_cuts(rng: random.Random, history: History, start: int = 0, most: int = 7) -> list[int]:
    """Up to ``most`` legal cuts from ``start`` on, sorted; half of them around the edges of spans, where rules are most fragile."""
    blocks = [(offset, offset + length) for item in history.items for offset, length in item.spans] + history.whole()
    edges = [edge + by for block in blocks for edge in block for by in (-1, 0, 1)]
    near = [edge for edge in edges if start <= edge <= len(history.tokens) and history.may_cut(edge)]
    cuts = [
        rng.choice(near) if near and rng.random() < 0.5 else rng.randint(start, len(history.tokens))
        for _ in range(rng.randint(0, most))
    ]
    return sorted(cut for cut in cuts if history.may_cut(cut))


def spans_of_turns(turns: Sequence[Turn]) -> list[tuple[bytes, int, int]]:
    """Every declared span of the path as (identity, start, stop), in path coordinates and token order."""
    spans = []
    start = 0
    for turn in turns:
        spans += [(item.identity, start + offset, start + offset + length) for item in turn.media for offset, length in item.spans]
        start += len(turn.tokens)
    return sorted(spans, key=lambda span: span[1])


# The vector files


@cache
def vectors(family: str) -> tuple[History, ...]:
    """The histories of one vector file."""
    data = json.loads((VECTORS / f"{family}.json").read_text())
    assert data["schema"] == 1
    assert data["family"] == family
    return tuple(_history(family, given) for given in data["histories"])


@cache
def text_histories() -> tuple[History, ...]:
    """The cuts of the qwen2_vl vectors with every item taken away: plain text, whose positions are the indexes."""
    histories = []
    for history in vectors("qwen2_vl"):
        count = len(history.tokens)
        table = Table(np.arange(count), np.arange(count)[None], 0, "int64", count, count - 1)
        tables = dict.fromkeys(RULES, table)
        histories.append(History("text", history.note, {}, history.tokens, (), history.cuts, tables))
    return tuple(histories)


def histories(family: str) -> tuple[History, ...]:
    return text_histories() if family == "text" else vectors(family)


def cases(family: str, rule: str) -> Iterator[tuple[History, Table]]:
    """The histories that have a table under a rule."""
    for history in histories(family):
        table = history.tables.get(rule)
        if table is not None:
            yield history, table


def _history(family: str, given: Mapping[str, Any]) -> History:
    parts = [_tokens(segment) for segment in given["segments"]]
    tokens = np.array([token for part in parts for token in part], dtype=np.int32)
    tokens.setflags(write=False)
    cuts = tuple(np.cumsum([len(part) for part in parts])[:-1].tolist())
    described = [item for segment in given["segments"] for item in segment["items"]]
    items = items_from_ids(family, given["params"], tokens, described)
    expected = given["expected"]
    assert expected["num_tokens"] == len(tokens)
    tables: dict[str, Table | None] = {"hf5": _table(expected, len(tokens))}
    for engine, answer in given.get("engines", {}).items():
        rule = engine.partition("_")[0]
        tables[rule] = None if answer == "unsupported" else _engine_table(family, rule, expected, answer, len(tokens))
    return History(family, given["note"], given["params"], tokens, items, cuts, tables)


def _tokens(segment: Mapping[str, Any]) -> list[int]:
    if "fill" in segment:
        token, count = segment["fill"]
        return [token] * count
    tokens: list[int] = segment["tokens"]
    return tokens


def items_from_ids(
    family: str, params: Mapping[str, Any], tokens: NDArray[np.int32], described: Sequence[Mapping[str, Any]]
) -> tuple[MediaItem, ...]:
    """Items in the order of their tokens, each with its runs of placeholder ids: one, or one a frame or a crop."""
    pads = {params[name] for name in PLACEHOLDERS if name in params}
    runs = []
    at = 0
    for is_pad, group in groupby(tokens.tolist(), lambda token: token in pads):
        length = len(list(group))
        if is_pad:
            runs.append((at, length))
        at += length
    items = []
    for number, given in enumerate(described):
        count = 1
        if family in FRAME_FAMILIES and given["modality"] == "video":
            count = given["grid_thw"][0]
        if family in CANVAS_FAMILIES:
            count = len(given["target_sizes"])
        spans, runs = runs[:count], runs[count:]
        items.append(media_item(given, number.to_bytes(32, "little"), spans))
    assert not runs, "placeholders that belong to no item"
    return tuple(items)


def media_item(given: Mapping[str, Any], identity: bytes, spans: Sequence[tuple[int, int]]) -> MediaItem:
    """An item as the vectors describe it; ``av`` is a video with the length of its audio."""
    modality: Any = "video" if given["modality"] == "av" else given["modality"]
    return MediaItem(
        modality,
        identity,
        spans,
        given.get("grid_thw"),
        given.get("second_per_grid") if modality == "video" else None,
        given.get("audio_feature_length"),
        given.get("target_sizes", ()),
    )


def _table(answer: Mapping[str, Any], count: int) -> Table:
    dtype = answer["dtype"]
    if "probes" in answer:
        columns = np.array([index for index, _ in answer["probes"]], dtype=np.int64)
        positions = np.array([column for _, column in answer["probes"]], dtype=dtype).T
    else:
        columns = np.arange(count)
        positions = np.array(answer["positions"], dtype=dtype)
        assert positions.shape[1] == count
    plan = answer.get("decode_positions")
    decode_positions = None if plan is None else np.array(plan, dtype=np.int64)
    known = answer.get("next_text_position"), answer.get("max_position")
    return Table(columns, positions, answer["delta"], dtype, *known, decode_positions)


def _engine_table(family: str, rule: str, expected: Mapping[str, Any], answer: Any, count: int) -> Table:
    """An engine's table; what it does not say of the positions to come follows from it where its rule is max + 1."""
    same = answer == "same"
    table = _table(expected if same else answer, count)
    if family == "qwen3_omni" and rule == "sglang":  # cast from floats that it does not show
        known: tuple[float | None, float | None] = (None, table.delta + count - 1)
    elif family == "glm_image":  # delta is 0 by decree
        known = (int(table.positions.max()) + 1, int(table.positions.max()))
    elif family == "minicpmv4_7":  # an open coat of markers: only what hf5 says too
        known = (table.next_position if same else None, int(table.positions.max()))
    else:
        known = (int(table.positions.max()) + 1, int(table.positions.max()))
        assert table.delta == known[0] - count
    return Table(table.columns, table.positions, table.delta, table.dtype, *known, table.decode_positions)
