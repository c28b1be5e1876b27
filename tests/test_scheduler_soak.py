"""A scheduler's day on one store, and what is left of it.

64 tasks append, generate, fork, abort, rewind and let things time out, while the store evicts, collects and is restarted, now and
then by kill -9. What was acknowledged is there, every path is what its log says, and nothing is left behind.

Each life is a process of its own. What was acknowledged to a task as durable (the store is opened with ``durability="commit"``, or
the task has flushed) it writes to its log, which survives the process. The parent then opens the store as another process would,
and compares.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sessiontree import Draft, MediaItem, Node, Session, SessionStore, SessionTreeError
from sessiontree.aio import AsyncSession, AsyncStore
from sessiontree.fsck import fsck
from sessiontree.metrics import StoreMetrics

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
SECONDS = 900.0 if SOAK else 90.0  # and as long again to check
TASKS = 64
SCHEME = "qwen2_5_vl@hf5"
WHAT = ("turn", "sample", "abort", "drop", "fork", "edit", "close", "wait", "hand over")
WEIGHTS = (40, 10, 8, 8, 4, 8, 2, 4, 6)
IMG = 151655


# --- one life -----------------------------------------------------------------------------------------------------------


class Task:
    """One client: its own sessions, and a log of what was acknowledged to it."""

    def __init__(self, number: int, life: int, store: AsyncStore, log: TextIO, seed: int) -> None:
        self.name = f"client-{number}"
        self.life = life
        self.store = store
        self.log = log
        self.rng = random.Random(seed)
        self.flushes = store.store._journal is not None and not store.store._journal.waits
        self.sessions: list[str] = []
        self.ids: dict[bytes, list[int]] = {}  # of the path of each node, as this task made it
        self.pending: list[dict[str, Any]] = []
        self.forgotten: list[Draft] = []

    async def run(self, stop: float) -> None:
        while time.monotonic() < stop:
            try:
                await self.step()
            except SessionTreeError as error:
                if type(error).__name__ not in ("StaleSession", "UnknownSession", "SessionExists", "DraftClosed", "NodeHeld"):
                    raise
        await self.acknowledge()
        self.forgotten.clear()

    async def acknowledge(self) -> None:
        """What was done so far is durable from here on."""
        told, self.pending = self.pending, []
        if self.flushes and told:
            await self.store.flush()
        for line in told:
            self.log.write(json.dumps(line) + "\n")
        self.log.flush()  # it survives the process

    async def told(self, **what: Any) -> None:
        self.pending.append(what)
        if not self.flushes or self.rng.random() < 0.2:
            await self.acknowledge()

    async def opened(self) -> AsyncSession:
        if not self.sessions or self.rng.random() < 0.02:
            name = f"{self.name}/{self.life}/{len(self.sessions)}"
            session = await self.store.create(name, scheme=SCHEME)
            self.sessions.append(name)
            return session
        return await self.store.get(self.rng.choice(self.sessions[-4:]))

    async def place(self, session: AsyncSession) -> Node:
        """Somewhere to go on: mostly the head, or a rewind from it by any depth."""
        heads = await session.heads()
        if "main" not in heads:
            return session.session.root
        node = heads["main"]
        while node.parent is not None and self.rng.random() < 0.15:
            node = node.parent
        return node

    async def step(self) -> None:
        session = await self.opened()
        rng = self.rng
        parent = await self.place(session)
        match rng.choices(WHAT, WEIGHTS)[0]:
            case "turn":
                await self.turn(session, parent)
            case "sample":
                drafts = [await session.draft(parent) for _ in range(rng.randrange(2, 5))]
                for draft in drafts:
                    draft.extend(range(rng.randrange(1, 30)))
                nodes = await asyncio.gather(*(session.commit(draft) for draft in drafts))
                assert len({node.id for node in nodes}) == len(nodes)
                for node, draft in zip(nodes, drafts, strict=True):
                    await self.noted(session, node, self.path(parent) + list(range(len(draft))))
            case "abort":
                with await session.draft(parent) as draft:
                    draft.extend([1, 2, 3])
                    if rng.random() < 0.5:
                        draft.rollback(1)
            case "drop":  # a client that disconnects, and lets go of its draft in the middle
                draft = await session.draft(parent)
                draft.extend([7] * rng.randrange(1, 100))
                if rng.random() < 0.3:
                    self.forgotten.append(draft)  # which times out
                waiting = asyncio.ensure_future(session.append(parent, [rng.randrange(1000)]))
                await asyncio.sleep(0)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting
            case "fork":
                name = f"{self.name}/{self.life}/{len(self.sessions)}"
                self.sessions.append(name)
                fork = await self.store.fork(session, parent, name)
                await self.turn(fork, parent)
            case "edit":
                length = rng.randrange(parent.stop + 1)
                if not any(start < length < stop for _, start, stop in parent.media_spans()):
                    await self.noted(session, await session.truncate(parent, length), self.path(parent)[:length])
            case "hand over":  # to another process and back, or to nobody
                draft = await session.draft(parent, key=f"request-{rng.random()}")
                draft.extend([1, 2, 3])
                data = await session.hand_over(draft, with_path=rng.random() < 0.5)
                if rng.random() < 0.7:
                    there = await session.adopt(data)
                    there.append(4)
                    await self.noted(session, await session.commit(there), [*self.path(parent), 1, 2, 3, 4])
            case "close":
                await session.close()
            case "wait":
                await asyncio.sleep(rng.random() * 0.02)

    async def turn(self, session: AsyncSession, parent: Node) -> None:
        rng, media = self.rng, []
        ids = np.array([rng.randrange(100_000) for _ in range(rng.randrange(6, 60))], np.int32)
        if rng.random() < 0.2:
            ids[1:5] = IMG
            media = [MediaItem("image", rng.randbytes(32), [(1, 4)], grid_thw=(1, 4, 4))]
        prompt = await session.append(parent, ids, media=media)
        draft = await session.draft(prompt)
        reply_ids: list[int] = []
        for _ in range(rng.randrange(1, 5)):
            tokens = [rng.randrange(1000)] * rng.randrange(1, 8)
            draft.extend(tokens)
            reply_ids += tokens
            await asyncio.sleep(0)
        reply = await session.commit(draft, rng.choice(("stop", "length")))
        await session.set_head("main", reply)
        await self.noted(session, reply, [*self.path(parent), *ids.tolist(), *reply_ids], head="main")

    def path(self, node: Node) -> list[int]:
        """The tokens of a path, as this task knows it: that of a turn from the node before it."""
        if node.parent is None:
            return []
        known = self.ids.get(node.id)
        return [*self.path(node.parent), *node.token_ids.tolist()] if known is None else known

    async def noted(self, session: AsyncSession, node: Node, ids: list[int], head: str | None = None) -> None:
        self.ids[node.id] = ids
        assert node.input_ids().tolist() == ids
        positions = int(np.asarray(node.positions()).sum())
        await self.told(
            session=session.session.id,
            node=node.id.hex(),
            path=[each.id.hex() for each in node.path()],
            ids=ids,
            sum=positions,
            head=head,
        )


async def keep_house(store: AsyncStore, stop: float, rng: random.Random) -> None:
    """What a scheduler does beside its requests: ticks, evictions, collections."""
    now = 0.0
    watch = store.subscribe(capacity=500)
    metrics = StoreMetrics(store.store, CollectorRegistry())
    while time.monotonic() < stop:
        now += rng.random() * 3
        await store.tick(now)
        watch.subscription.poll()
        list(metrics.collect())
        what = rng.random()
        if what < 0.3:
            await store.evict(rng.choice((None, 200_000, 2_000_000)))
        elif what < 0.35:
            await store.gc()
        await asyncio.sleep(0.02)
    metrics.close()
    watch.close()


def life(path: str, logs: str, number: int, seed: int, seconds: float, durability: Any, *, ends: str) -> dict[str, Any]:
    """A process's work, which ends by closing the store; what is left of it afterwards."""

    async def work() -> None:
        stop = time.monotonic() + seconds
        async with await AsyncStore.open(path, durability=durability, idle_ttl=40, draft_ttl=15, memory_bytes=4_000_000) as store:
            files = [open(os.path.join(logs, f"{task}.log"), "a") for task in range(TASKS)]  # noqa: SIM115
            tasks = [Task(task, number, store, files[task], seed * 1000 + task) for task in range(TASKS)]
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task.run(stop))
                group.create_task(keep_house(store, stop, random.Random(seed)))
            for file in files:
                file.close()
            if ends == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            await store.run(close_all)
            usage = store.store.usage()
            assert usage.sessions == usage.asleep_sessions == 0 and usage.node_bytes < 10_000, usage

    asyncio.run(work())
    return left()


def close_all(store: SessionStore) -> None:
    store.evict()
    for session_id in store.sessions():
        store.get(session_id).close()


class _Malloc(ctypes.Structure):
    """As glibc's mallinfo2 gives it: ``hblkhd``, bytes that are mapped; ``uordblks``, bytes in use otherwise."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def buffers() -> int:
    """Bytes in use that are too large to be Python's own blocks, or not Python's."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    found = mallinfo2()
    return int(found.hblkhd + found.uordblks)


def left() -> dict[str, Any]:
    gc.collect()
    return {
        "blocks": sys.getallocatedblocks(),
        "buffers": buffers(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
    }


def lives(path: str, logs: str, seed: int, seconds: float, durability: str) -> None:
    """Two lives in one process, of which the second is to leave what the first has left; told as JSON."""
    life(path, logs, 1000 * seed, seed, seconds / 3, durability, ends="closed")
    first = left()
    life(path, logs, 1000 * seed + 1, seed + 1, seconds, durability, ends="closed")
    print(json.dumps([first, left()]))


# --- from outside -------------------------------------------------------------------------------------------------------


def run_life(call: str) -> subprocess.CompletedProcess[str]:
    code = f"from tests.test_scheduler_soak import *\n{call}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=3000)


def acknowledged(logs: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(logs.iterdir()):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else the process was killed in the middle of it
                yield json.loads(line)


def check(path: Path, logs: Path) -> int:
    """Every acknowledged node is there, and what it was when it was acknowledged."""
    assert fsck(path).ok
    count = 0
    with SessionStore.open(path, read_only=True) as store:
        opened: dict[str, Session] = {}
        for told in acknowledged(logs):
            session = opened.get(told["session"]) or opened.setdefault(told["session"], store.get(told["session"]))
            node = session.node(bytes.fromhex(told["node"]))
            assert [each.id.hex() for each in node.path()] == told["path"]
            assert node.input_ids().tolist() == told["ids"]
            assert int(np.asarray(node.positions()).sum()) == told["sum"]
            if told["head"]:
                assert told["head"] in session.heads
            count += 1
    return count


@pytest.mark.parametrize("durability", ["group", "commit"])
def test_64_tasks_on_a_store_that_is_restarted_and_killed(tmp_path: Path, durability: str) -> None:
    path, logs = tmp_path / "store", tmp_path / "logs"
    logs.mkdir()
    share = SECONDS / 2
    count = 0
    rounds = max(1, int(share / 30))
    for seed in range(rounds):
        killed = run_life(
            f"life({str(path)!r}, {str(logs)!r}, {seed}, {seed}, {share / rounds / 4}, {durability!r}, ends='killed')"
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        count = check(path, logs)
    done = run_life(f"lives({str(path)!r}, {str(logs)!r}, {rounds}, {share / 2}, {durability!r})")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    assert check(path, logs) > count > 100
    first, last = json.loads(done.stdout)
    assert last["threads"] == first["threads"] == ["MainThread"] and last["files"] == first["files"]
    assert last["blocks"] <= 1.05 * first["blocks"]
    assert last["buffers"] <= 1.05 * first["buffers"] + 2**20
