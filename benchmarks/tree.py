"""Appending at any depth: the cost of a turn must not know how long the session is.

Expected before the first run: 5-6 µs for 16 tokens (1 µs for the node, 0.5 for SHA-256, 1 for checks, the rest for the tree value,
positions and two locks), the same at every depth; a list copy a turn grows with the history.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from harness import Figure, report, timed

from sessiontree import Node, Session, SessionStore
from sessiontree.positions import scheme

TURN = 16
SAMPLES = 20_000


def appends(session: Session, count: int) -> Iterator[Callable[[], object]]:
    """Appends of fresh tokens, each to the tip the one before made."""
    tip: list[Node] = [max(session.leaves(), key=lambda node: node.depth)]
    ids = np.arange(TURN, dtype=np.int32)

    def append(token_ids: np.ndarray) -> None:
        tip[0] = session.append(tip[0], token_ids)

    for turn in range(count):
        yield partial(append, (ids + turn).astype(np.int32))


def list_copies(tokens: int, count: int) -> Iterator[Callable[[], object]]:
    """The way of request objects: every turn copies the ids of its parent and adds its own."""
    history = list(range(tokens))
    new = list(range(TURN))

    def append() -> list[int]:
        return history + new

    for _ in range(count):
        yield append


def append_at(depth: int) -> list[Figure]:
    positions = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2)
    session = SessionStore.in_memory().create("bench", scheme=positions)
    for call in appends(session, depth - 1):
        call()
    taken = timed(appends(session, SAMPLES))
    copied = timed(list_copies(depth * TURN, 20 if depth > 10_000 else 200))
    name = f"append {TURN} tokens to a tip, {depth:,} nodes"
    peers = {"list copy per turn": float(np.median(copied))}
    note = f"GC on, id and tree value included; max {taken.max():.0f} µs; grows to {depth + SAMPLES:,} nodes meanwhile"
    return [
        Figure(f"{name}, median", float(np.median(taken)), "µs", 6, peers=peers, note=note),
        Figure(f"{name}, p99", float(np.percentile(taken, 99)), "µs", 100),
    ]


def main() -> int:
    for call in timed(appends(SessionStore.in_memory().create("warm", scheme="text@hf5"), 5_000)):
        del call
    figures = [figure for depth in (10, 1_000, 100_000) for figure in append_at(depth)]
    return 0 if report(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
