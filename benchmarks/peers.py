"""The ways of keeping a history that figures are compared with, each as its users do it. All run in the process of the figures.

``lists``: request objects, every turn copies its parent's ids and adds its own. ``torch.cat``: the same with tensors.
``ChainNode``: a parent pointer and an array a turn, concatenated when the path is read. ``langgraph_turns``: LangGraph's
InMemorySaver with the ids as a state channel, an optional install (``make bench PEERS=1``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def langgraph_turns(turn: list[int]) -> Callable[[int], float] | None:
    """A function that puts so many turns into a new saver and gives its seconds; None where LangGraph is not installed."""
    try:
        from langgraph.checkpoint.base import empty_checkpoint
        from langgraph.checkpoint.memory import InMemorySaver
    except ImportError:
        return None

    def put(count: int) -> float:
        saver = InMemorySaver()
        config: Any = {"configurable": {"thread_id": "bench", "checkpoint_ns": ""}}
        ids: list[int] = []
        start = time.perf_counter()
        for number in range(count):
            ids = ids + turn
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"token_ids": ids}
            checkpoint["channel_versions"] = {"token_ids": number}
            config = saver.put(config, checkpoint, {"step": number}, {"token_ids": number})
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
        turns, size = time.perf_counter() - start, _bytes(folder)
        start = time.perf_counter()
        for number in range(100):
            put(config, ids + turn[:16], 1000 + number)
        return turns, size, time.perf_counter() - start, _bytes(folder) - size


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
        turns, size = time.perf_counter() - start, _bytes(folder)
        start = time.perf_counter()
        for number in range(100):
            await session.create_branch_from_turn(1000, f"fork{number}")
            await session.add_items([{"role": "user", "content": str(turn[:16])}])
        return turns, size, time.perf_counter() - start, _bytes(folder) - size

    return asyncio.run(measure())


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
