"""How time, disk and memory grow with the turns of a conversation, and with the number of conversations, beside peers.

A turn is 100 tokens, on disk durable when its call returns. LangGraph puts the ids so far as a channel of its state, openai-agents
adds an item that holds the turn's ids; each point of a curve is measured on the way to the next one. What is opened again is
opened by this process, with its files in the page cache, and the opening is part of the time. In memory every turn stays readable.
A way that has taken 60 seconds or 1.5 GB of disk (0.5 GB of memory) before it is at a point has no more points.

Expected before the first run of this file: a turn of ours 0.15-0.2 ms at any depth, 5 MB on disk after 10,000, and their path
read in 150 ms. LangGraph's 0.3 ms at first, 2 ms at 1,000 turns and 6 at 3,000, where 1.2 GB are on disk and it ends; its read is
one row, 10 ms. openai-agents' 0.5 ms at any depth, 10 MB, and 60 ms to read. Conversations: ours 0.4 ms to begin one (two
commits), 1 kB of disk each, and 10 ms to open 10,000 and read one; LangGraph 0.4 ms, 1.5 kB and 1 ms; openai-agents 3 ms (it makes
sure of its tables each time), 2 kB and 3 ms. In memory 10 MB for 10,000 turns; lists 400 MB for 1,000, LangGraph a third of that.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from harness import Figure, report
from numpy.typing import NDArray
from peers import AgentsConversations, ChainNode, Conversations, LangGraphConversations, bytes_of, langgraph_saver, lists

from sessiontree import Node, Session, SessionStore

TURN = 100
TURNS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
SESSIONS = (10, 100, 1_000, 10_000)
SECONDS, DISK, MEMORY = 60.0, 1.5e9, 0.5e9
Point = dict[str, float]  # what was measured there, by name


class OurConversations:
    """A session for each."""

    def __init__(self, folder: Path) -> None:
        self._store = SessionStore.open(folder, durability="commit")
        self._session: Session
        self._tip: Node

    def begin(self, name: str, ids: list[int]) -> None:
        self._session = self._store.create(name, scheme="text@hf5")
        self._tip = self._session.root
        self.go_on(ids)

    def go_on(self, ids: list[int]) -> None:
        self._tip = self._session.append(self._tip, ids, head="main")

    def read(self, name: str) -> NDArray[np.int32]:
        self._session = self._store.get(name)
        self._tip = self._session.head("main").node
        return self._tip.input_ids()

    def close(self) -> None:
        self._store.close()


WAYS: dict[str, Callable[[Path], Conversations]] = {
    "ours": OurConversations,
    "LangGraph SqliteSaver": LangGraphConversations,
    "openai-agents AdvancedSQLiteSession": AgentsConversations,
}


def ids_of(number: int) -> list[int]:
    """A turn that no other one is equal to."""
    ids: list[int] = np.random.default_rng(number).integers(0, 150_000, TURN).tolist()
    return ids


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def on_disk(way: Callable[[Path], Conversations], folder: Path, marks: Sequence[int], turns: bool) -> dict[int, Point]:
    """One way's points: of one conversation of as many turns, or of as many conversations of one turn."""
    points: dict[int, Point] = {}
    place, done, began = way(folder), 0, time.perf_counter()
    for mark in marks:
        taken = []
        while done < mark:
            ids = ids_of(done)
            taken.append(timed(lambda: place.go_on(ids) if turns and done else place.begin(f"c{done}", ids)))  # noqa: B023
            done += 1
            if done % 50 == 0 and (time.perf_counter() - began > SECONDS or bytes_of(folder) > DISK):
                place.close()
                return points
        place.close()  # so that a database has its log in its file, and nothing of ours is only allocated
        size = bytes_of(folder)
        asked = 0 if turns else mark // 2
        read: list[float] = []
        for _ in range(3):
            if read:
                place.close()
            opened = time.perf_counter()
            place = way(folder)
            found = place.read(f"c{asked}")
            read.append(1000 * (time.perf_counter() - opened))
            assert list(found[:TURN]) == ids_of(asked) and len(found) == (mark if turns else 1) * TURN
        points[mark] = {"time": statistics.median(taken[-10:] if turns else taken[-100:]), "bytes": size, "read": min(read)}
    place.close()
    return points


def curves(all_points: dict[str, dict[int, Point]], what: str, unit: str, name: str, of: str, scale: float) -> Iterator[Figure]:
    """A figure for each point of ours, the peers' of the same place beside it."""
    for mark, point in all_points["ours"].items():
        peers = {way: points[mark][of] / scale for way, points in all_points.items() if way != "ours" and mark in points}
        yield Figure(what.format(f"{mark:,}"), point[of] / scale, unit, peers=peers, series=name, at=mark)


def disk(folder: Path) -> Iterator[Figure]:
    over_turns: dict[str, dict[int, Point]] = {}
    over_sessions: dict[str, dict[int, Point]] = {}
    for number, (name, way) in enumerate(WAYS.items()):
        try:
            over_turns[name] = on_disk(way, folder / f"turns{number}", TURNS, turns=True)
        except ImportError:
            print(f"not measured: {name}, which is not installed (PEERS=1)")
            continue
        over_sessions[name] = on_disk(way, folder / f"sessions{number}", SESSIONS, turns=False)
        shutil.rmtree(folder / f"turns{number}")
    yield from curves(over_turns, "turn {} of a conversation, 100 tokens, durable", "ms", "turns: time of a turn", "time", 1)
    yield from curves(over_turns, "a conversation of {} turns: bytes on disk", "MB", "turns: bytes on disk", "bytes", 1e6)
    yield from curves(over_turns, "a conversation of {} turns, opened and read", "ms", "turns: path read after opening", "read", 1)
    yield from curves(over_sessions, "conversation {} begun with a turn, durable", "ms", "sessions: one begun", "time", 1)
    yield from curves(over_sessions, "{} conversations of a turn: bytes on disk", "MB", "sessions: bytes on disk", "bytes", 1e6)
    yield from curves(
        over_sessions, "one of {} conversations, opened and read", "ms", "sessions: one read after opening", "read", 1
    )


def growing_memory(steps: Iterator[object]) -> dict[int, Point]:
    """What is held after so many steps; a step gives what it made, and that is kept."""
    kept: list[object] = []
    points: dict[int, Point] = {}
    began = time.perf_counter()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, made in enumerate(steps, 1):
            kept.append(made)
            held = tracemalloc.get_traced_memory()[0] - before
            if number in TURNS:
                points[number] = {"held": held}
            if held > MEMORY or time.perf_counter() - began > SECONDS:
                break
    finally:
        tracemalloc.stop()
    return points


def memory() -> Iterator[Figure]:
    count = TURNS[-1]

    def ours() -> Iterator[Node]:
        session = SessionStore.in_memory().create("c", scheme="text@hf5")
        tip = session.root
        for number in range(count):
            tip = session.append(tip, ids_of(number))
            yield tip

    def chain() -> Iterator[ChainNode]:
        node = None
        for number in range(count):
            node = ChainNode(node, np.array(ids_of(number), np.int32))
            yield node

    def copies() -> Iterator[list[int]]:
        return (made for _, made in zip(range(count), lists(ids_of(0)), strict=False))

    ways: dict[str, Callable[[], Iterator[object]]] = {"ours": ours, "list copy": copies, "chain of arrays": chain}
    if (put := langgraph_saver()) is not None:
        ways["LangGraph InMemorySaver"] = lambda: (put(ids_of(number)) for number in range(count))
    points = {name: growing_memory(way()) for name, way in ways.items()}
    yield from curves(points, "a conversation of {} turns: memory", "MB", "turns: memory", "held", 1e6)


def figures(folder: Path) -> Iterator[Figure]:
    yield from disk(folder)
    yield from memory()


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        sys.exit(not report(figures(place)))
    finally:
        shutil.rmtree(place, ignore_errors=True)
