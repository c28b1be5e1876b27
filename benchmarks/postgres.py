"""What PostgreSQL costs: turns, paths, forks and many writers, beside bare inserts and other stores on the same server.

The server is one of its own on the loopback with the settings of a new installation, so a commit is on disk when it returns
(fsync, synchronous_commit and full_page_writes on). A turn is 1,000 random token ids below 151,000: 4,000 bytes, of which nothing
can be saved.

Expected before the first run, by guess: a commit a fifth over a bare insert; 9 ms for a path of 1,000 nodes, half of it the
server's and the wire's; 32 threads 5 to 6 times over one; 4,300 bytes a turn, two of them to a page, so 1.1; 400 bytes a fork;
the same time at any turn.

What came, on two cores that others used too: bytes of a turn and of a bare fork as expected. A turn of 16 tokens on a fork took 350
more, nearly half of it a second row for its record and what the record repeats of its node's row, which it does without since. What
records repeat of their own names took the fork over 500 still: 32 bytes, and as many of each head's.
A path took 80 ms at the least at first: 31 of the client, which looked at each record alone, had the tokens copied as
they grew, and prepared a statement in a round trip of its own. Its records are looked at together since, in one round trip, and
plain text goes a short way: 22 ms, a dozen steps of 1 to 3 µs a node, the digest the longest, half of it what the server and the
wire take. A commit took twice an insert of 0.2 ms, and 1.4 times by now: 50 µs more of the client in many thin layers, 50 of the
server for two inserts and two updates in one statement. On a disk that others keep busy it is 0.9 to 1.2 times. 32 threads do 3
times what one does, and 12 times on a busy disk.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from harness import Figure, microseconds, report
from numpy.typing import NDArray
from peers import PostgresRun, agents_postgres_run, langgraph_postgres_run, postgres_bytes, timed_runs

from sessiontree import Node, Session, SessionStore, codec
from sessiontree.aio import AsyncStore
from tests.postgres_proxy import Proxy
from tests.postgres_server import Server, programs

TOKENS, RAW = 1000, 4000  # of a turn, and their bytes
VOCABULARY = 151_000
CONVERSATIONS, LONG = 8, 1000  # sessions, and their turns
WRITERS = 32
ROUND = 1.0  # seconds


def random_turns(count: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, TOKENS), dtype=np.int32)


def connect(url: str) -> SessionStore:
    return SessionStore.connect(url)


def durable_turn(url: str, blocks: int = 30, count: int = 20) -> Iterator[Figure]:
    import psycopg

    turns = iter(random_turns(4 * blocks * count, 1))
    with connect(url) as store, psycopg.connect(url, autocommit=True) as bare:
        session = store.create("turns", scheme="text@hf5")
        first = session.append(session.root, next(turns))
        record = os.urandom(len(codec.encode_node(0, 1, 0, first)))
        version = bare.info.server_version // 10_000
        bare.execute("CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, record bytea NOT NULL)")
        bare.execute("CREATE TABLE inline (LIKE bare INCLUDING ALL) WITH (toast_tuple_target = 8160)")
        bare.execute("ALTER TABLE inline ALTER COLUMN record SET STORAGE EXTERNAL")

        def insert(table: str) -> None:
            bare.execute(f"INSERT INTO {table} (record) VALUES (%b)", (record,), prepare=True)

        tip = first

        def append(head: str | None = None) -> None:
            nonlocal tip
            tip = session.append(tip, next(turns), head=head)

        def two_commits() -> None:
            append()
            session.set_head("main", tip)

        ways: dict[str, Callable[[], object]] = {
            "bare": partial(insert, "bare"),
            "bare, not toasted": partial(insert, "inline"),
            "one commit": partial(append, "main"),
            "append alone": append,
            "append, then set_head": two_commits,
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for block in range(blocks + 1):  # by turns, so that all see the same disk
            for name, way in ways.items():
                found = microseconds(way, count).tolist()
                if block:  # the first one prepares statements and makes pages
                    taken[name] += found
    medians = {name: statistics.median(found) for name, found in taken.items()}
    least = medians.pop("bare")
    ours = medians.pop("one commit")
    yield Figure(
        "durable turn, node of 4 KB and head move in one commit, over a bare insert",
        ours / least,
        "x",
        1.3,
        peers={name: found / least for name, found in medians.items()},
        note=f"{ours:.0f} µs; the insert {least:.0f}; PostgreSQL {version}",
    )


def talk(session: Session, turns: Iterable[Any], tip: Node) -> Node:
    """A conversation: each turn appended, and the head moved to it in the same commit."""
    for turn in turns:
        tip = session.append(tip, turn, head="main")
    return tip


def conversations(server: Server, url: str) -> Iterator[Figure]:
    """Several at a time, as a server has them, so that the nodes of a path lie apart; and the figures that need such sessions."""
    import psycopg

    with connect(url) as store, psycopg.connect(url, autocommit=True) as other:
        for table in ("nodes", "bodies"):  # never analyzed, whatever the time this takes
            other.execute(f"ALTER TABLE sessiontree.{table} SET (autovacuum_enabled = off)")
        empty = postgres_bytes(other)
        sessions = [store.create(f"talk{number}", scheme="text@hf5") for number in range(CONVERSATIONS)]
        turns = [random_turns(LONG, 10 + number) for number in range(CONVERSATIONS)]
        begun = time.perf_counter()
        with ThreadPoolExecutor(CONVERSATIONS) as pool:
            tips = list(pool.map(talk, sessions, turns, [session.root for session in sessions]))
        seconds = time.perf_counter() - begun
        count = CONVERSATIONS * LONG
        size = (postgres_bytes(other) - empty) / count
        note = f"{size:,.0f} B, of {count:,} turns, each with a head move, in {seconds:.1f} s"
        yield Figure("bytes of a turn over its raw tokens", size / RAW, "x", 1.6, note=note)
        yield from cold_paths(url, other, turns)
        yield from late_turns(store, sessions, tips)
        yield from forks(store, sessions[0], tips[0], other)


def cold_paths(url: str, other: Any, turns: Sequence[NDArray[np.int32]]) -> Iterator[Figure]:
    def path(store: SessionStore, number: int) -> tuple[float, float]:
        """Milliseconds until a session is here, and then until its whole path is."""
        begun = time.perf_counter()
        session = store.get(f"talk{number}")
        got = time.perf_counter()
        ids = session.head("main").node.input_ids()
        done = time.perf_counter()
        assert np.array_equal(ids, turns[number].reshape(-1))
        return 1000 * (got - begun), 1000 * (done - got)

    for state in ("never analyzed", "analyzed"):
        stats = (
            "SELECT count(coalesce(last_analyze, last_autoanalyze)) FROM pg_stat_user_tables WHERE relname IN ('nodes', 'bodies')"
        )
        if state == "analyzed":
            other.execute("ANALYZE")
            other.execute("SELECT pg_stat_clear_snapshot()")
        assert (other.execute(stats).fetchone()[0] == 0) == (state == "never analyzed")
        got, read = [], []
        for number in 3 * list(range(CONVERSATIONS)):
            with connect(url) as store:
                taken = path(store, number)
            got.append(taken[0])
            read.append(taken[1])
        yield Figure(
            f"path of {LONG:,} nodes of 4 KB, nothing in the cache, {state}",
            statistics.median(read),
            "ms",
            12,
            peers={"with get": statistics.median(map(sum, zip(got, read, strict=True))), "least": min(read)},
            note="median of 24",
        )
    with Proxy(url) as proxy, connect(proxy.url) as store:
        session = store.get("talk0")
        before = proxy.round_trips
        session.head("main").node.input_ids()
        yield Figure(
            f"round trips of a path of {LONG:,} nodes, nothing in the cache",
            proxy.round_trips - before,
            "",
            1,
            note="counted on the wire",
        )


def late_turns(store: SessionStore, old: Sequence[Session], tips: list[Node]) -> Iterator[Figure]:
    """Sessions at turn 1,000 and new ones at turn 10 take turns, so that both see the same server."""
    tips = list(tips)
    taken: dict[str, list[float]] = {"late": [], "early": []}

    def step(session: Session, tip: Node, turn: Any, which: str) -> Node:
        made: list[Node] = []
        taken[which] += microseconds(lambda: made.append(talk(session, [turn], tip)), 1).tolist()
        return made[0]

    for group in range(3):
        new = [store.create(f"new{group}-{number}", scheme="text@hf5") for number in range(len(old))]
        turns = random_turns(15, 100 + group)
        heads = [talk(session, turns[:5], session.root) for session in new]
        for turn in turns[5:]:
            for at, session in enumerate(old):
                tips[at] = step(session, tips[at], turn, "late")
                heads[at] = step(new[at], heads[at], turn, "early")
    late, early = (statistics.median(found) for found in taken.values())
    note = f"{late:.0f} µs, at 10 {early:.0f}, node and head"
    yield Figure(f"time of a turn at {LONG:,} over at 10", late / early, "x", 1.2, note=note)


def forks(store: SessionStore, session: Session, tip: Node, other: Any, count: int = 1000, own: int = 16) -> Iterator[Figure]:
    sizes = [postgres_bytes(other)]
    for what in ("bare", "turn", "turn and head"):
        for number in range(count):
            with store.fork(session, tip, f"{what} {number}") as fork:
                if what != "bare":
                    fork.append(tip.id, range(number, number + own), head="main" if what == "turn and head" else None)
        sizes.append(postgres_bytes(other))
    bare, turn, head = (np.diff(sizes) / count).tolist()
    yield Figure("bytes of a fork that has nothing of its own yet", bare, "B", 500, note=f"of {count:,}")
    peers = {"and a head": head - 4 * own}
    yield Figure(f"bytes of a fork with a turn of {own} tokens, those left out", turn - 4 * own, "B", 500, peers=peers)


def turns_by_threads(sessions: Sequence[Session], seconds: float, turns: NDArray[np.int32]) -> float:
    """Durable turns a second, a thread for each session."""
    until = time.perf_counter() + seconds

    def work(session: Session) -> int:
        tip, done = session.root, 0
        while time.perf_counter() < until:
            tip = session.append(tip, turns[done % len(turns)], key=str(until) if done == 0 else None)
            done += 1
        return done

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(sessions)) as pool:
        done = sum(pool.map(work, sessions))
    return done / (time.perf_counter() - begun)


def turns_by_tasks(store: SessionStore, ids: Sequence[str], seconds: float, turns: NDArray[np.int32]) -> float:
    """The same with a task for each, on one loop."""

    async def measure() -> float:
        front = AsyncStore(store)
        sessions = [await front.get(session_id) for session_id in ids]
        begun = time.perf_counter()

        async def work(session: Any) -> int:
            tip, done = session.session.root, 0
            while time.perf_counter() < begun + seconds:
                tip = await session.append(tip, turns[done % len(turns)], key=str(begun) if done == 0 else None)
                done += 1
            return done

        done = sum(await asyncio.gather(*map(work, sessions)))
        return done / (time.perf_counter() - begun)

    return asyncio.run(measure())


def throughput(url: str, rounds: int = 5) -> Iterator[Figure]:
    turns = random_turns(64, 3)
    with connect(url) as store:
        ids = [f"writer{number}" for number in range(WRITERS)]
        sessions = [store.create(session_id, scheme="text@hf5") for session_id in ids]
        ways: dict[str, Callable[[int], float]] = {
            "threads": lambda count: turns_by_threads(sessions[:count], ROUND, turns),
            "tasks": lambda count: turns_by_tasks(store, ids[:count], ROUND, turns),
        }
        for name, way in ways.items():
            found = [(way(1), way(WRITERS)) for _ in range(rounds)]
            one, many = (statistics.median(column) for column in zip(*found, strict=True))
            note = f"{many:,.0f} turns of 4 KB a second; one: {one:,.0f}"
            figure = f"{WRITERS} sessions through one process over one session, {name}"
            yield Figure(figure, many / one, "x", 5, "higher", note=note)


def process(url: str, number: int, start: Any, rates: Any) -> None:
    """One of several processes, each with a session."""
    turns = random_turns(64, number)
    with connect(url) as store:
        session = store.create(f"process{number}", scheme="text@hf5")
        session.append(session.root, turns[0])
        for sessions in ([session] if number == 0 else [], [session]):
            start.wait()
            if sessions:
                rates.put(turns_by_threads(sessions, 3 * ROUND, turns))
            start.wait()


def processes(url: str, count: int = 8) -> Iterator[Figure]:
    context = multiprocessing.get_context("spawn")
    start, rates = context.Barrier(count), context.Queue()
    started = [context.Process(target=process, args=(url, number, start, rates)) for number in range(count)]
    for each in started:
        each.start()
    one, *many = [rates.get(timeout=120) for _ in range(1 + count)]
    for each in started:
        each.join()
    note = f"{sum(many):,.0f} turns of 4 KB a second; one: {one:,.0f}; {os.cpu_count()} processors"
    yield Figure(f"{count} processes, a session each, over one", sum(many) / one, "x", better="higher", note=note)


def ours(url: str) -> PostgresRun:
    """What peers do too: 1,000 turns, then 100 forks of the last."""
    import psycopg

    turns = random_turns(LONG, 5)
    with connect(url) as store, psycopg.connect(url, autocommit=True) as other:
        session = store.create("bench", scheme="text@hf5")
        tip = session.root

        def turn(number: int) -> None:
            nonlocal tip
            tip = talk(session, [turns[number]], tip)

        def fork(number: int) -> None:
            made = store.fork(session, tip, f"fork{number}")
            made.append(tip.id, range(number, number + 16), head="main")

        return timed_runs(turn, fork, LONG, 100, other)


def beside_others(server: Server) -> Iterator[Figure]:
    runs: dict[str, PostgresRun] = {}
    given = random_turns(LONG, 5).tolist()
    for name, measure in (
        ("ours", ours),
        ("PostgresSaver", partial(langgraph_postgres_run, turns=given)),
        ("SQLAlchemySession", partial(agents_postgres_run, turns=given)),
    ):
        with server.database() as url:
            found = measure(url)
        if found is not None:
            runs[name] = found

    def figure(what: str, of: Callable[[PostgresRun], float], unit: str, bar: float | None = None) -> Figure:
        mine, *_ = found = {name: of(run) for name, run in runs.items()}
        return Figure(what, found.pop(mine), unit, bar, peers=found)

    turns, fork = "PostgreSQL, 1,000 turns of 1,000 tokens", "PostgreSQL, a fork of 1,000 turns, with a turn of 16"
    yield figure(f"{turns}: turn 10", lambda run: run.early_ms, "ms")
    yield figure(f"{turns}: turn 1,000", lambda run: run.late_ms, "ms")
    yield figure(f"{turns}: turn 1,000 over turn 10", lambda run: run.late_ms / run.early_ms, "x")
    yield figure(f"{turns}: bytes", lambda run: run.turns_bytes / 1e6, "MB", 1.6 * RAW * LONG / 1e6)
    yield figure(f"{fork}: time", lambda run: run.fork_ms, "ms")
    yield figure(f"{fork}: bytes", lambda run: run.fork_bytes, "B")


def figures(server: Server) -> Iterator[Figure]:
    with server.database() as url:
        yield from durable_turn(url)
    with server.database() as url:
        yield from conversations(server, url)
    with server.database() as url:
        yield from throughput(url)
        yield from processes(url)
    yield from beside_others(server)


def main() -> int:
    if programs() is None or importlib.util.find_spec("psycopg") is None:
        print("not measured: PostgreSQL or psycopg is not installed (make postgres)")
        return 0
    with Server.make() as server:
        return int(not report(figures(server)))


if __name__ == "__main__":
    sys.exit(main())
