"""What positions cost: one turn planned from the state before it, beside a recompute of the whole history by the engines' own code.

Each history has about 131,072 tokens in 130 turns, an image in each turn and a video in place of every fourth.

Expected before the first run of this file, with single turns of the grid families measured before: an image turn 10 µs (some
15 Python calls, one pack of its runs), 20-30 µs in the omni families (NumPy on frames, delimiters looked for), 50 µs on a canvas
(its table is made once, for the greatest position); 256 text tokens 0.5 µs, 5 µs where delimiters count. Recompute: 20-200 ms,
so a thousand times and more. The runs of an image turn 80-120 B. The whole table 1 ms: 25 MB/ms of writing, 3 µs a run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import Figure, median_of, memory_of, report

from sessiontree import MediaItem, SessionStore
from sessiontree.positions import PositionScheme, PositionState, scheme
from sessiontree.positions.runs import Runs
from sessiontree.tokens import token_bytes
from tests import rope_oracle
from tests.histories import GOLDEN_FAMILIES, History, vectors
from tests.sglang_engine import missing as missing_sglang
from tests.test_positions_sglang import FAMILIES as SGLANG_FAMILIES
from tests.test_positions_sglang import ask as ask_sglang

TURNS = 130
TOKENS = 2**17
OMNI = ("qwen2_5_omni", "qwen3_omni")
SIDE = 16  # placeholders of an image, each way
FRAMES = 4


class Turn(NamedTuple):
    """Tokens, and the item in them with spans relative to these."""

    data: bytes
    media: tuple[MediaItem, ...]


def params_of(family: str) -> Mapping[str, Any]:
    """Those of released checkpoints, as the vectors have them."""
    for history in vectors(family):
        if history.params.get("spatial_merge_size", 2) == 2 and history.params.get("wrapped", True):
            return history.params
    raise LookupError(family)


def make_turn(family: str, params: Mapping[str, Any], number: int) -> Turn:
    """Text, an item, and text up to the length of a turn."""
    video = number % 4 == 3 and family not in ("hunyuan_vl", "glm_image")
    modality: Any = "video" if video else "image"
    pad = params["image_token_id" if family == "glm4v" else f"{modality}_token_id"]
    merge = params.get("spatial_merge_size", 1) if family != "glm_image" else 1
    grid = (FRAMES, 8 * merge, 8 * merge) if video else (1, SIDE * merge, SIDE * merge)
    ids: list[int] = [1000 + (number * 31 + at) % 50_000 for at in range(300)]
    open_id, close_id = _around(params, modality)
    ids.append(open_id)
    spans = []
    more: dict[str, Any] = {}
    if family == "minicpmv4_7":
        patches = SIDE * (2 if params["downsample_mode"] == "4x" else 4)
        more["target_sizes"] = [(patches, patches)]
        grid = None  # type: ignore[assignment]
        counts = [SIDE * SIDE]
    elif family == "ernie4_5_vl":
        grid = (grid[0] * params["temporal_merge_size"], *grid[1:]) if video else grid
        counts = [FRAMES * 64 if video else SIDE * SIDE]
    elif family == "hy_v4_vl":
        counts = [FRAMES * 8 * 9 if video else SIDE * (SIDE + 1)]
    elif family == "hunyuan_vl":
        counts = [SIDE * (SIDE + 1) + 2]
    elif family in ("qwen3_vl", "glm4v") and video:
        counts = [64] * FRAMES
    else:
        counts = [FRAMES * 64 if video else SIDE * SIDE]
    for frame, count in enumerate(counts):
        if frame:
            ids += [close_id, 2000 + frame, open_id]
        spans.append((len(ids), count))
        ids += [pad] * count
    ids.append(close_id)
    ids += [60_000 + at for at in range(TOKENS // TURNS + 1 - len(ids))]
    seconds = 0.4 if video and family in ("qwen2_5_vl", *OMNI) else None
    item = MediaItem(modality, number.to_bytes(32, "little"), spans, grid, seconds, **more)
    return Turn(token_bytes(np.array(ids, np.int32)), (item,))


def _around(params: Mapping[str, Any], modality: str) -> tuple[int, int]:
    """The tokens before and after a block."""
    for name in ("vision_start_token_id", f"{modality}_start_token_id", "image_start_token_id", "image_start_id", "im_start_id"):
        if name in params:
            return params[name], params[name.replace("start", "end")]
    raise LookupError(modality)


def whole(family: str, params: Mapping[str, Any], turns: list[Turn]) -> History:
    """The history of all turns, its items in path coordinates."""
    tokens = np.concatenate([np.frombuffer(turn.data, np.int32) for turn in turns])
    items, at = [], 0
    for turn in turns:
        items += [item.with_spans([(at + offset, length) for offset, length in item.spans]) for item in turn.media]
        at += len(turn.data) // 4
    return History(family, "benchmark", params, tokens, tuple(items), (), {})


def stepped(rules: PositionScheme, turns: list[Turn]) -> PositionState:
    state = rules.initial_state()
    for turn in turns:
        _, state = rules.plan(state, turn.data, turn.media)
    return state


def append_costs(rules: PositionScheme, turns: list[Turn], state: PositionState) -> tuple[float, float, float]:
    """Microseconds of an image turn, a video turn, and 256 text tokens, at the end of a history."""
    image, video = (turns[number] for number in (0, 3))
    text = token_bytes(np.arange(1000, 1256, dtype=np.int32))
    return (
        median_of(lambda: rules.plan(state, image.data, image.media), 2000),
        median_of(lambda: rules.plan(state, video.data, video.media), 1000),
        median_of(lambda: rules.plan(state, text), 400, each=10),
    )


def kept_runs(rules: PositionScheme, state: PositionState, turn: Turn) -> tuple[float, Runs]:
    """Bytes of memory that the runs of a turn take, on average, and the runs."""

    def make() -> list[Runs]:
        kept: list[Any] = [None] * 1000
        for number in range(len(kept)):
            kept[number] = rules.plan(state, turn.data, turn.media)[0]
        return kept

    size, kept = memory_of(make)
    return size / len(kept) - 8, kept[0]


def figures() -> Iterator[Figure]:
    torch.set_num_threads(1)
    appends: dict[str, dict[str, float]] = {"grid": {}, "omni": {}}
    videos: dict[str, float] = {}
    texts: dict[str, float] = {}
    ratios: dict[str, float] = {}
    sglang_ratios: dict[str, float] = {}
    expansions: dict[str, float] = {}
    fresh: dict[str, float] = {}
    sizes: dict[str, float] = {}
    packed: dict[str, float] = {}
    for family in GOLDEN_FAMILIES:
        params = params_of(family)
        turns = [make_turn(family, params, number) for number in range(TURNS)]
        history = whole(family, params, turns)
        rules = scheme(f"{family}@hf5", **params)
        state = stepped(rules, turns)
        answer = rope_oracle.ask(history)
        image, video, text = append_costs(rules, turns, state)
        appends["omni" if family in OMNI else "grid"][family] = image
        videos[family], texts[family] = video, text
        gc.collect()
        ratios[family] = median_of(lambda history=history: rope_oracle.ask(history), 5) / image  # type: ignore[misc]
        if missing_sglang() is None and family in SGLANG_FAMILIES:
            theirs = scheme(f"{family}@sglang", **params)
            after = stepped(theirs, turns)
            mine = append_costs(theirs, turns, after)[0]
            sglang_ratios[family] = median_of(lambda history=history: ask_sglang(history, history.tokens), 5) / mine  # type: ignore[misc]

        with SessionStore.in_memory() as store:
            session = store.create("bench", scheme=rules)
            tip = session.root
            for turn in turns:
                tip = session.append(tip, np.frombuffer(turn.data, np.int32), media=turn.media)
            assert np.array_equal(tip.positions(), answer.positions), family
            staging = np.empty((rules.num_axes, tip.stop), rules.dtype)
            expansions[family] = median_of(lambda tip=tip, staging=staging: tip.positions(out=staging), 15)  # type: ignore[misc]
            fresh[family] = median_of(tip.positions, 15)
        sizes[family], runs = kept_runs(rules, state, turns[0])
        packed[family] = len(runs) if isinstance(runs, bytes) else 0

    for kind, bar in (("grid", 60), ("omni", 130)):
        worst = max(appends[kind].values())
        yield Figure(f"append one image turn, positions only: {kind} families", worst, "µs", bar, note=_each(appends[kind]))
    yield Figure("append one video turn, positions only", max(videos.values()), "µs", note=_each(videos))
    yield Figure("append 256 text tokens, positions only", max(texts.values()), "µs", 8, note=_each(texts))
    yield Figure(
        "transformers' recompute over our append, least of 12 families",
        min(ratios.values()),
        "x",
        300,
        "higher",
        note=_each(ratios),
    )
    if sglang_ratios:
        least = min(sglang_ratios.values())
        yield Figure(
            "SGLang's recompute over our append, least of its families", least, "x", 300, "higher", note=_each(sglang_ratios)
        )
    table = 3 * 8 * 300
    yield Figure(
        "position runs of an image turn, in memory", max(sizes.values()), "B", 200, peers={"table": table}, note=_each(sizes)
    )
    yield Figure("position runs of an image turn, packed", max(packed.values()), "B", 200, note=_each(packed))
    worst = max(expansions.values()) / 1000
    yield Figure("a path of 131k tokens into a table of the caller's", worst, "ms", 2, note=_each(expansions))
    worst = max(fresh.values()) / 1000
    yield Figure("a path of 131k tokens to a table of its own, on new pages or not", worst, "ms", note=_each(fresh))


def _each(values: Mapping[str, float]) -> str:
    return ", ".join(f"{family} {value:,.0f}" if value >= 10 else f"{family} {value:.1f}" for family, value in values.items())


if __name__ == "__main__":
    sys.exit(not report(figures()))
