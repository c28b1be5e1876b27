"""What being on disk costs: records, commits, handing over, opening again, beside bare system calls and other stores.

Expected before the first run of this file, from single pieces measured while they were built: a node of 1,000 tokens encoded in
3 µs (msgpack and one copy of its tokens) and decoded in 8; 4.2 kB of it on disk, 90 of them its record's own; a commit a tenth
over a bare write and sync of as many bytes, a quarter for 256 kB (three passes of CRC-32 and one of SHA-256 beside the write);
handing over 4 µs; a million nodes opened in 100-200 ms, most of it reading their index. Disks differ: the ratios count.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Figure, median_of, microseconds, report
from peers import agents_turns, langgraph_sqlite_turns

from sessiontree import MediaItem, Node, Session, SessionStore, codec, media_identity
from sessiontree.backends.system import System
from sessiontree.positions import scheme

PAUSE = 0.03  # seconds in which each is done with what it does in the background
RULES = scheme("qwen2_5_vl@sglang", spatial_merge_size=2, tokens_per_second=2, max_position_limit=2**28)


def size_of(path: Path) -> int:
    """Bytes of the records, without what is only preallocated: measured after a close."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def append(session: Session, parent: Node, length: int, number: int, media: Any = ()) -> Node:
    ids = np.arange(length, dtype=np.int32)
    ids[0] = number
    return session.append(parent, ids, media=media)


def records() -> Iterator[Figure]:
    session = SessionStore.in_memory().create("bench", scheme=RULES)
    image = MediaItem("image", media_identity("png", b"one"), [(10, 256)], grid_thw=(1, 32, 32))
    node = append(session, session.root, 1000, 1, [image])
    record = codec.encode_node(0, 1, 0, node)
    yield Figure("encode a node of 1,000 tokens with an image", median_of(lambda: codec.encode_node(0, 1, 0, node), 5000), "µs", 4)
    yield Figure(
        "decode a node of 1,000 tokens with an image",
        median_of(lambda: codec.decode(record), 5000),
        "µs",
        8,
        note="all of it checked",
    )
    yield Figure("record of a node of 1,000 tokens with an image", len(record), "B", 4300)


def bare(path: Path, size: int, *, zeroed: bool = False) -> Callable[[], None]:
    """One write and one sync of as many bytes, at the end of a file that is allocated ahead; ``zeroed``: and was written once."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 2**28)
    if zeroed:
        for start in range(0, 2**26, 2**20):
            os.pwrite(fd, bytes(2**20), start)
    os.fsync(fd)
    data, at = os.urandom(size), 0

    def commit() -> None:
        nonlocal at
        os.pwrite(fd, data, at)
        os.fdatasync(fd)
        at += size

    return commit


def sqlite(path: Path, size: int) -> Callable[[], None]:
    """One row of as many bytes, as durable as SQLite makes it: WAL, synchronous FULL."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = full")
    database.execute("create table nodes (id integer primary key, record blob)")
    data = os.urandom(size)
    return lambda: database.execute("insert into nodes (record) values (?)", (data,))  # type: ignore[return-value]


def commits(folder: Path) -> Iterator[Figure]:
    """By turns, so that all see the same disk; a few at once and then a pause, as in a process that serves."""
    for tokens, name, bar, count in (
        (256 - 28, "1 KB", 1.3, 25),
        (1024 - 30, "4 KB", None, 25),
        (64 * 1024 - 30, "256 KB", 1.6, 5),
    ):
        with SessionStore.open(folder / f"commit{tokens}", durability="commit") as store:
            session = store.create("bench", scheme=RULES)
            size = len(codec.encode_node(0, 1, 0, append(session, session.root, tokens, 2**20)))
            turns = list(np.arange(tokens, dtype=np.int32) + np.arange(24 * count, dtype=np.int32)[:, None])

            def ours(session: Session = session, turns: list[Any] = turns) -> None:
                session.append(session.root, turns.pop())

            commits = {
                "ours": ours,
                "bare": bare(folder / f"bare{tokens}", size),
                "zeroed": bare(folder / f"zeroed{tokens}", size, zeroed=True),
                "SQLite": sqlite(folder / f"sqlite{tokens}", size),
            }
            taken: dict[str, list[float]] = {which: [] for which in commits}
            for _ in range(12):
                for which, commit in commits.items():
                    taken[which] += microseconds(commit, count).tolist()
                    time.sleep(PAUSE)
            median = {which: statistics.median(each) for which, each in taken.items()}
            mean = {which: statistics.mean(each) for which, each in taken.items()}
            at_once = microseconds(ours, 12 * count)
        yield Figure(
            f"durable commit of one node of {name} over a bare write and sync",
            median["ours"] / median["bare"],
            "x",
            bar,
            peers={
                "bare, µs": median["bare"],
                "bare over zeros": median["zeroed"] / median["bare"],
                "SQLite": median["SQLite"] / median["bare"],
            },
            note=f"{median['ours']:.0f} µs; of means {mean['ours'] / mean['bare']:.2f}; "
            f"{12 * count} without a pause {statistics.median(at_once):.0f} µs",
        )


class Slower(System):
    """As a disk that takes a little longer to sync."""

    def pwritev(self, *given: Any, **named: Any) -> int:
        done = super().pwritev(*given, **named)
        time.sleep(0.0002)
        return done


def per_second(store: SessionStore, threads: int, seconds: float = 2.0) -> float:
    session = store.create(f"by{threads}", scheme=RULES)
    done = [0] * threads
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            append(session, session.root, 16, number * 10**6 + done[number])
            done[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - start)


def throughput(folder: Path) -> Iterator[Figure]:
    with SessionStore.open(folder / "throughput", durability="commit") as store:
        one = per_second(store, 1)
        many = per_second(store, 16)
    yield Figure("durable nodes per second, 16 waiting threads", many, "1/s", 10_000, "higher", peers={"one thread": one})
    yield Figure("durable nodes per second, 16 waiting threads over one", many / one, "x", 3, "higher")
    with SessionStore.open(folder / "slower", durability="commit") as store:
        log: Any = store._journal
        log._log._system = Slower()
        one = per_second(store, 1)
        many = per_second(store, 16)
    yield Figure(
        "durable nodes per second, 16 threads over one, were a sync 0.2 ms slower",
        many / one,
        "x",
        peers={"16 threads, 1/s": many, "one thread, 1/s": one},
    )


def handing_over(folder: Path) -> Iterator[Figure]:
    """What the journal takes of the thread that appends, beside the log's own thread, which writes and syncs all the time."""
    with SessionStore.open(folder / "handing", durability="group") as store:
        session = store.create("bench", scheme=RULES)
        journal: Any = store._journal
        taken: list[int] = []
        real = journal.attached

        def timed(*given: Any) -> int:
            start = time.perf_counter_ns()
            number: int = real(*given)
            taken.append(time.perf_counter_ns() - start)
            return number

        journal.attached = timed
        tip = session.root
        for number in range(20_000):
            tip = append(session, tip if tip.depth < 100 else session.root, 1000, number)
    found = np.array(taken) / 1000
    yield Figure("handing a node of 1,000 tokens over, encoding included, median", float(np.median(found)), "µs", 4)
    yield Figure("handing a node of 1,000 tokens over, encoding included, p99.9", float(np.quantile(found, 0.999)), "µs", 300)


def opening(folder: Path, count: int) -> Iterator[Figure]:
    path = folder / "million"
    with SessionStore.open(path, durability="relaxed") as store:
        session = store.create("bench", scheme=RULES)
        tip = session.root
        for number in range(count):
            tip = append(session, tip if tip.depth < 100 else session.root, 8, number)
        session.set_head("main", tip)
        depth = tip.depth
    opened, first = [], []
    for _ in range(3):
        start = time.perf_counter()
        store = SessionStore.open(path)
        opened.append(time.perf_counter() - start)
        start = time.perf_counter()
        store.get("bench").head("main").node.input_ids()
        first.append(time.perf_counter() - start)
        store.close()
    note = f"{count:,} nodes, {size_of(path) / count:.0f} B each; the path has {depth}"
    yield Figure("reopen a million nodes", min(opened) * 1000, "ms", 300, note=note)
    yield Figure("the first path after opening a million nodes", min(first) * 1000, "ms", 10)


def prefixes(folder: Path, count: int = 100_000) -> Iterator[Figure]:
    """The first question for a prefix of a session that was opened again, beside reading all of its nodes."""
    start = [151644, 8948, 198]
    rng = np.random.default_rng(1)
    path = folder / "prefixes"
    with SessionStore.open(path, durability="relaxed") as store:
        wide, deep = store.create("wide", scheme="text@hf5"), store.create("deep", scheme="text@hf5")
        turns = rng.integers(0, 150_000, (count, 13)).tolist()
        tip = deep.root
        for turn in turns:
            wide.append(wide.root, [*start, *turn])
            tip = deep.append(tip, turn)
    history = np.array(turns[:1000]).reshape(-1)
    for session_id, asked, what, bar in (
        ("wide", [*start, *turns[count // 2]], f"one of {count:,} children of the root", 0.3),
        ("deep", history, f"the first 1,000 of {count:,} turns in a line", 0.05),
    ):
        first, again = [], []
        for _ in range(3):
            with SessionStore.open(path, read_only=True) as store:
                session = store.get(session_id)
                first += microseconds(partial(session.longest_prefix, asked), 1).tolist()
                again += microseconds(partial(session.longest_prefix, asked), 100).tolist()
                assert session.longest_prefix(asked).length == len(asked)
        with SessionStore.open(path, read_only=True) as store:
            begun = time.perf_counter()
            for _ in store.get(session_id).tree:
                pass
            whole = time.perf_counter() - begun
        taken = statistics.median(first) / 1e6
        note = f"{taken * 1000:.0f} ms, the next one {statistics.median(again):.0f} µs"
        figure = f"first longest_prefix after opening, {what}, over reading all nodes"
        yield Figure(figure, taken / whole, "x", bar, peers={"reading all nodes, ms": whole * 1000}, note=note)


def beside_others(folder: Path) -> Iterator[Figure]:
    """1,000 turns of 1,000 tokens, then 100 forks of the last, each with a turn of 16."""
    turn = np.arange(1000, dtype=np.int32)
    path = folder / "ours"
    start = time.perf_counter()
    with SessionStore.open(path, durability="commit") as store:
        session = store.create("bench", scheme=RULES)
        tip = session.root
        for number in range(1000):
            turn[0] = number
            tip = session.append(tip, turn)
    turns = time.perf_counter() - start
    size = size_of(path)
    start = time.perf_counter()
    with SessionStore.open(path, durability="commit") as store:
        session = store.get("bench")
        tip = session.node(tip.id)
        for number in range(100):
            fork = store.fork(session, tip, f"fork{number}")
            append(fork, fork.node(tip.id), 16, number)
    forks = time.perf_counter() - start
    more = size_of(path) - size
    peers: dict[str, tuple[float, int, float, int]] = {}
    for name, measure in (("LangGraph SqliteSaver", langgraph_sqlite_turns), ("AdvancedSQLiteSession", agents_turns)):
        measured = measure(folder / name.replace(" ", ""))
        if measured is not None:
            peers[name] = measured
    yield Figure("1,000 turns of 1,000 tokens: bytes", size / 1e6, "MB", 4.5, peers={n: p[1] / 1e6 for n, p in peers.items()})
    yield Figure("1,000 turns of 1,000 tokens: time, each turn durable", turns, "s", peers={n: p[0] for n, p in peers.items()})
    yield Figure(
        "100 forks of 1,000 turns, a turn of 16 each: bytes", more / 1e6, "MB", 0.1, peers={n: p[3] / 1e6 for n, p in peers.items()}
    )
    yield Figure("100 forks of 1,000 turns, a turn of 16 each: time", forks, "s", peers={n: p[2] for n, p in peers.items()})
    with SessionStore.open(path, durability="commit") as store:
        session = store.get("bench")
        tip = session.node(tip.id)
        for number in range(100):
            store.fork(session, tip, f"bare{number}")
    yield Figure("bytes of a fork that has nothing of its own yet", (size_of(path) - size - more) / 100, "B", 250)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="sessiontree-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        parts = (
            records(),
            commits(folder),
            throughput(folder),
            handing_over(folder),
            beside_others(folder),
            opening(folder, count),
            prefixes(folder),
        )
        return int(not report(figure for part in parts for figure in part))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
