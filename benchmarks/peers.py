"""The ways of keeping a history that figures are compared with, each as its users do it. All run in the process of the figures.

``lists``: request objects, every turn copies its parent's ids and adds its own. ``torch.cat``: the same with tensors.
``ChainNode``: a parent pointer and an array a turn, concatenated when the path is read. ``langgraph_turns``: LangGraph's
InMemorySaver with the ids as a state channel, an optional install (``make bench PEERS=1``).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray


def lists(turn: list[int]) -> Iterator[list[int]]:
    """A history that grows by ``turn`` with every step."""
    ids: list[int] = []
    while True:
        ids = ids + turn  # a new list, as the child's own
        yield ids


def tensors(turn: torch.Tensor) -> Iterator[torch.Tensor]:
    ids = torch.empty(0, dtype=torch.int32)
    while True:
        ids = torch.cat([ids, turn])
        yield ids


@attrs.frozen(eq=False)
class ChainNode:
    """A turn that knows its parent."""

    parent: ChainNode | None
    ids: NDArray[np.int32]

    def path_ids(self) -> NDArray[np.int32]:
        pieces = []
        node: ChainNode | None = self
        while node is not None:
            pieces.append(node.ids)
            node = node.parent
        return np.concatenate(pieces[::-1])


def chains(turn: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    node = None
    while True:
        node = ChainNode(node, turn.copy())
        yield node.path_ids()


def langgraph_saver() -> Callable[[list[int]], object] | None:
    """A function that puts a turn behind those before it, and gives what keeps them all; None where LangGraph is not installed."""
    try:
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.memory import InMemorySaver
    except ImportError:
        return None
    saver = InMemorySaver()
    config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
    ids: list[int] = []
    number = 0

    def put(turn: list[int]) -> object:
        nonlocal config, ids, number
        ids = ids + turn
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"token_ids": ids}
        checkpoint["channel_versions"] = {"token_ids": number}
        config = saver.put(config, checkpoint, {"step": number}, {"token_ids": number})
        number += 1
        return saver

    return put


def langgraph_turns(turn: list[int]) -> Callable[[int], float] | None:
    """A function that puts so many turns into a new saver and gives its seconds; None where LangGraph is not installed."""
    if langgraph_saver() is None:
        return None

    def put(count: int) -> float:
        saver = langgraph_saver()
        assert saver is not None
        start = time.perf_counter()
        for _ in range(count):
            saver(turn)
        return time.perf_counter() - start

    return put


def langgraph_sqlite_turns(folder: Path) -> tuple[float, int, float, int] | None:
    """Seconds and bytes of 1,000 turns of 1,000 tokens, then of 100 forks with a turn each; None where it is not installed."""
    try:
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.sqlite import SqliteSaver
    except ImportError:
        return None
    folder.mkdir()
    turn = list(range(1000))
    with SqliteSaver.from_conn_string(str(folder / "db.sqlite")) as saver:

        def put(config: Any, ids: list[int], number: int) -> Any:
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"token_ids": ids}
            checkpoint["channel_versions"] = {"token_ids": number}
            return saver.put(config, checkpoint, {"step": number}, {"token_ids": number})

        config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        ids: list[int] = []
        start = time.perf_counter()
        for number in range(1000):
            ids = ids + turn
            config = put(config, ids, number)
        turns, size = time.perf_counter() - start, bytes_of(folder)
        start = time.perf_counter()
        for number in range(100):
            put(config, ids + turn[:16], 1000 + number)
        return turns, size, time.perf_counter() - start, bytes_of(folder) - size


def agents_turns(folder: Path) -> tuple[float, int, float, int] | None:
    """The same with openai-agents' AdvancedSQLiteSession, a turn an item that holds the ids; None where it is not installed."""
    try:
        from agents.extensions.memory import AdvancedSQLiteSession
    except ImportError:
        return None
    folder.mkdir()

    async def measure() -> tuple[float, int, float, int]:
        session = AdvancedSQLiteSession(session_id="bench", db_path=str(folder / "db.sqlite"), create_tables=True)
        turn = list(range(1000))
        start = time.perf_counter()
        for number in range(1000):
            await session.add_items([{"role": "user", "content": str([number, *turn[1:]])}])
        turns, size = time.perf_counter() - start, bytes_of(folder)
        start = time.perf_counter()
        for number in range(100):
            await session.create_branch_from_turn(1000, f"fork{number}")
            await session.add_items([{"role": "user", "content": str(turn[:16])}])
        return turns, size, time.perf_counter() - start, bytes_of(folder) - size

    return asyncio.run(measure())


class Conversations(Protocol):
    """Conversations on disk, by name. Each turn is a list of ids, and is durable when the call returns."""

    def begin(self, name: str, ids: list[int]) -> None:
        """A conversation that nobody has begun, with its first turn."""

    def go_on(self, ids: list[int]) -> None:
        """The next turn of the conversation begun or read last."""

    def read(self, name: str) -> Sequence[int] | NDArray[np.int32]:
        """All ids of a conversation."""

    def close(self) -> None: ...


class LangGraphConversations:
    """SqliteSaver's threads, the ids of all turns so far as a state channel, put once a turn."""

    def __init__(self, folder: Path) -> None:
        from langgraph.checkpoint.sqlite import SqliteSaver

        folder.mkdir(exist_ok=True)
        self._open = SqliteSaver.from_conn_string(str(folder / "db.sqlite"))
        self._saver = self._open.__enter__()
        self._config: Any = None
        self._ids: list[int] = []
        self._version = 0

    def begin(self, name: str, ids: list[int]) -> None:
        self._config, self._ids, self._version = {"configurable": {"thread_id": name, "checkpoint_ns": ""}}, [], 0
        self.go_on(ids)

    def go_on(self, ids: list[int]) -> None:
        from langgraph.checkpoint.base import empty_checkpoint

        self._ids, self._version = self._ids + ids, self._version + 1
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"token_ids": self._ids}
        checkpoint["channel_versions"] = {"token_ids": self._version}
        self._config = self._saver.put(self._config, checkpoint, {"step": self._version}, {"token_ids": self._version})

    def read(self, name: str) -> Sequence[int]:
        found = self._saver.get_tuple({"configurable": {"thread_id": name, "checkpoint_ns": ""}})
        assert found is not None
        self._config, self._ids = found.config, found.checkpoint["channel_values"]["token_ids"]
        self._version = int(found.checkpoint["channel_versions"]["token_ids"])
        return self._ids

    def close(self) -> None:
        self._open.__exit__(None, None, None)


class AgentsConversations:
    """openai-agents' AdvancedSQLiteSessions in one file, a turn an item that holds the ids."""

    def __init__(self, folder: Path) -> None:
        import agents.extensions.memory  # noqa: F401 (so that whoever lacks it learns it now)

        folder.mkdir(exist_ok=True)
        self._path = str(folder / "db.sqlite")
        self._loop = asyncio.new_event_loop()
        self._session: Any = None

    def _use(self, name: str) -> None:
        from agents.extensions.memory import AdvancedSQLiteSession

        if self._session is not None:
            self._session.close()
        self._session = AdvancedSQLiteSession(session_id=name, db_path=self._path, create_tables=True)

    def begin(self, name: str, ids: list[int]) -> None:
        self._use(name)
        self.go_on(ids)

    def go_on(self, ids: list[int]) -> None:
        self._loop.run_until_complete(self._session.add_items([{"role": "user", "content": str(ids)}]))

    def read(self, name: str) -> Sequence[int]:
        self._use(name)
        items = self._loop.run_until_complete(self._session.get_items())
        return [token for item in items for token in json.loads(item["content"])]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@attrs.frozen
class PostgresRun:
    """1,000 turns, then 100 forks of the last with a turn each. Medians: of turns 5 to 14, of the last ten, and of a fork."""

    early_ms: float
    late_ms: float
    turns_bytes: int
    fork_ms: float
    fork_bytes: float


def timed_runs(turn: Callable[[int], object], fork: Callable[[int], object], turns: int, forks: int, server: Any) -> PostgresRun:
    """Do so many of both, by number. ``server``: a connection of psycopg's to the same database."""
    before = postgres_bytes(server)
    taken = [_milliseconds(turn, number) for number in range(turns)]
    between = postgres_bytes(server)
    forked = [_milliseconds(fork, number) for number in range(forks)]
    fork_bytes = (postgres_bytes(server) - between) / forks
    early, late = statistics.median(taken[5:15]), statistics.median(taken[-10:])
    return PostgresRun(early, late, between - before, statistics.median(forked), fork_bytes)


def _milliseconds(call: Callable[[int], object], number: int) -> float:
    begun = time.perf_counter()
    call(number)
    return 1000 * (time.perf_counter() - begun)


def postgres_bytes(server: Any) -> int:
    """Of all tables of a database with their indexes and what is toasted."""
    tables = "SELECT sum(pg_total_relation_size(relid)) FROM pg_catalog.pg_stat_user_tables"
    return int(server.execute(tables).fetchone()[0] or 0)


def langgraph_postgres_run(url: str, turns: Sequence[list[int]]) -> PostgresRun | None:
    """LangGraph's PostgresSaver, the ids of all turns so far as a state channel; None where it is not installed."""
    try:
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.postgres import PostgresSaver
    except ImportError:
        return None
    import psycopg

    with PostgresSaver.from_conn_string(url) as saver, psycopg.connect(url, autocommit=True) as server:
        saver.setup()
        config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        ids: list[int] = []

        def put(config: Any, ids: list[int], number: int) -> Any:
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"token_ids": ids}
            checkpoint["channel_versions"] = {"token_ids": number}
            return saver.put(config, checkpoint, {"step": number}, {"token_ids": number})

        def turn(number: int) -> None:
            nonlocal config, ids
            ids = ids + turns[number]
            config = put(config, ids, number)

        def fork(number: int) -> None:
            put(config, ids + list(range(number, number + 16)), len(turns) + number)

        return timed_runs(turn, fork, len(turns), 100, server)


def agents_postgres_run(url: str, turns: Sequence[list[int]]) -> PostgresRun | None:
    """openai-agents' SQLAlchemySession over asyncpg, a turn an item that holds the ids; None where it is not installed.

    It knows no forks: one is another session that begins with the items of the first.
    """
    try:
        import asyncpg  # noqa: F401 (the driver that its documentation names)
        from agents.extensions.memory import SQLAlchemySession
        from sqlalchemy.ext.asyncio import create_async_engine
    except ImportError:
        return None
    import psycopg

    loop = asyncio.new_event_loop()
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        session = SQLAlchemySession("bench", engine=engine, create_tables=True)

        def item(ids: Sequence[int]) -> Any:
            return {"role": "user", "content": str(list(ids))}

        def turn(number: int) -> None:
            loop.run_until_complete(session.add_items([item(turns[number])]))

        async def forked(number: int) -> None:
            other = SQLAlchemySession(f"fork{number}", engine=engine)
            await other.add_items([*await session.get_items(), item(range(number, number + 16))])

        with psycopg.connect(url, autocommit=True) as server:
            loop.run_until_complete(session.get_items())  # which makes the tables
            return timed_runs(turn, lambda number: loop.run_until_complete(forked(number)), len(turns), 100, server)
    finally:
        loop.run_until_complete(engine.dispose())
        loop.close()


def bytes_of(folder: Path) -> int:
    """Of the files of a folder, as long as they say that they are."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
