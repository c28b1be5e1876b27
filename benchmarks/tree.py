"""Appending at any depth: the cost of a turn must not know how long the session is.

Expected before the first run: 5-6 µs for 16 tokens (1 µs for the node, 0.5 for SHA-256, 1 for checks, the rest for the tree value,
positions and two locks), the same at every depth; a list copy a turn grows with the history.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from harness import Figure, report

from sessiontree import Node, Session, SessionStore
from sessiontree.positions import scheme

TURN = 16
SAMPLES = 20_000


def append_turns(session: Session, tip: Node, count: int) -> tuple[Node, np.ndarray]:
    """Append ``count`` turns of fresh tokens, each to the tip the one before made: the last tip, and each one's microseconds."""
    clock = time.perf_counter_ns
    ids = np.arange(TURN, dtype=np.int32)
    taken = np.empty(count)
    for turn in range(count):
        ids[0] = turn
        start = clock()
        tip = session.append(tip, ids)
        taken[turn] = clock() - start
    return tip, taken / 1000


def copy_lists(history: int, count: int) -> np.ndarray:
    """The way of request objects: every turn copies the ids of its parent and adds its own. Microseconds of each."""
    clock = time.perf_counter_ns
    ids, new = list(range(history)), list(range(TURN))
    taken = np.empty(count)
    for turn in range(count):
        start = clock()
        ids + new
        taken[turn] = clock() - start
    return taken / 1000


def append_at(depth: int) -> list[Figure]:
    positions = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)
    session = SessionStore.in_memory().create("bench", scheme=positions)
    tip, _ = append_turns(session, session.root, depth - 1)
    _, taken = append_turns(session, tip, SAMPLES)
    copied = copy_lists(depth * TURN, 20 if depth > 10_000 else 200)
    name = f"append {TURN} tokens to a tip, {depth:,} nodes"
    peers = {"list copy per turn": float(np.median(copied))}
    note = f"GC on, id and tree value included; max {taken.max():.0f} µs; grows to {depth + SAMPLES:,} nodes meanwhile"
    return [
        Figure(f"{name}, median", float(np.median(taken)), "µs", 6, peers=peers, note=note),
        Figure(f"{name}, p99", float(np.percentile(taken, 99)), "µs", 100),
    ]


def main() -> int:
    warm = SessionStore.in_memory().create("warm", scheme="text@hf5")
    append_turns(warm, warm.root, 5_000)
    figures = [figure for depth in (10, 1_000, 100_000) for figure in append_at(depth)]
    return 0 if report(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
