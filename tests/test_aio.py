"""Stores under asyncio: the loop never waits for the disk, who stops waiting undoes nothing, and order is as it was begun.

The disk stands still until a test lets it go on, so nothing here depends on how fast anything is.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import inspect
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sessiontree import (
    Draft,
    DraftClosed,
    HeadMoved,
    KeyTaken,
    MediaItem,
    Node,
    OutOfRange,
    Session,
    SessionExists,
    SessionStore,
    StoreClosed,
    StoreFailed,
    UnknownNode,
    UnknownSession,
)
from sessiontree.aio import AsyncSession, AsyncStore
from sessiontree.backends.blobs import FeatureFolder
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.journal import Durability
from tests.disk import Disk
from tests.disk_model import AT, fail, logs_on, open_on, outline, reopened

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


class Halted(Disk):
    """A disk whose calls wait while it is halted. ``waits``: whether one does."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go = threading.Event()
        self.go.set()
        self.waits = threading.Event()

    def halt(self) -> None:
        self.waits.clear()
        self.go.clear()

    def _halted(self) -> None:
        if not self.go.is_set():
            self.waits.set()
            assert self.go.wait(60), "nobody let the disk go on"

    def open(self, path: str, flags: int) -> int:
        self._halted()
        return super().open(path, flags)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._halted()
        return super().pread(fd, length, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._halted()
        return super().pwrite(fd, data, offset)


async def until(true: Callable[[], object]) -> int:
    """Let the loop run until something is true: how many times it came round."""
    rounds, start = 0, time.monotonic()
    while not true():
        rounds += 1
        assert time.monotonic() < start + 60, "it never came"
        await asyncio.sleep(0)
    return rounds


async def beat(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it; nothing may be left to complain about."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await work
        gc.collect(1)

    asyncio.run(watched())
    gc.collect(1)
    assert complaints == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("sessiontree-aio_")] == []


def opened(disk: Disk, durability: Durability = "commit", **options: Any) -> AsyncStore:
    return AsyncStore(open_on(disk, durability=durability), **options)


async def created(store: AsyncStore, name: str = "s") -> AsyncSession:
    return await store.create(name, scheme="text@hf5")


# --- what is done ---------------------------------------------------------------------------------------------------------


class World(NamedTuple):
    """A session ``s`` of two turns with a head, a pin and a draft."""

    store: AsyncStore
    session: AsyncSession
    one: Node
    two: Node
    draft: Draft

    @classmethod
    async def made(cls, store: AsyncStore) -> World:
        session = await created(store)
        one = await session.append(session.session.root, [1, 2])
        two = await session.append(one, [3])
        await session.set_head("main", one)
        await session.pin(one)
        draft = await session.draft(two, key="request")
        draft.extend([4, 5])
        return cls(store, session, one, two, draft)

    def state(self) -> Any:
        """All that operations may change, as one sees it."""
        store = self.store.store
        sessions = {name: (outline(store.get(name).tree), store.get(name).pins) for name in store.sessions()}
        with suppress(Exception):
            sessions["alias"] = store.aliased_media("a")  # type: ignore[assignment]
        return sessions


OPERATIONS: dict[str, Callable[[World], Awaitable[object]]] = {
    "append": lambda w: w.session.append(w.two, [7]),
    "commit": lambda w: w.session.commit(w.draft, "length", 1),
    "record": lambda w: w.session.record([1, 2, 9], [10], key="r"),
    "truncate": lambda w: w.session.truncate(w.two, 1),
    "drop_last": lambda w: w.session.drop_last(w.two, 2),
    "replace": lambda w: w.session.replace(w.two, [8], head="main", expected=w.one),
    "rewrite": lambda w: w.session.rewrite(w.two, [(0, 1, [6])]),
    "set_head": lambda w: w.session.set_head("main", w.two, expected=w.one),
    "drop_head": lambda w: w.session.drop_head("main"),
    "pin": lambda w: w.session.pin(w.two),
    "unpin": lambda w: w.session.unpin(w.one),
    "create": lambda w: created(w.store, "t"),
    "fork": lambda w: w.store.fork(w.session, w.two, "f"),
    "alias_media": lambda w: w.store.alias_media("a", bytes(32)),
}
WRITES_NOTHING: dict[str, Callable[[World], Awaitable[object]]] = {
    "flush": lambda w: w.session.flush(),
    "flush all": lambda w: w.store.flush(),
    "tick": lambda w: w.store.tick(1.0),
    "sessions": lambda w: w.store.sessions(),
    "get": lambda w: w.store.get("s"),
    "node": lambda w: w.session.node(w.one.id),
    "head": lambda w: w.session.head("main"),
    "heads": lambda w: w.session.heads(),
    "children": lambda w: w.session.children(w.one),
}
durabilities = pytest.mark.parametrize("durability", ["commit", "group"])


@durabilities
@pytest.mark.parametrize("name", [*OPERATIONS, *WRITES_NOTHING])
def test_operations_do_what_the_store_does_and_the_loop_goes_on_while_the_disk_stands_still(
    name: str, durability: Durability
) -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk, durability) as store:
            world = await World.made(store)
            await store.flush()
            disk.halt()
            task = asyncio.ensure_future({**OPERATIONS, **WRITES_NOTHING}[name](world))
            if durability == "commit" and name in OPERATIONS:
                assert await until(disk.waits.is_set) > 0
                await beat()
                assert not task.done()  # nobody is told of what is not durable
            else:
                await beat()
            disk.go.set()
            made = await task
            if isinstance(made, AsyncSession):
                assert made.session.id in ("s", "t", "f")
            state = world.state()
        async with opened(Disk(), durability) as store:
            twin = await World.made(store)
            await {**OPERATIONS, **WRITES_NOTHING}[name](twin)
            assert twin.state() == state
        with reopened(disk) as again:
            assert {name: outline(again.get(name).tree) for name in again.sessions()} == {
                name: seen[0] for name, seen in state.items() if name != "alias"
            }

    run(work())


def test_a_lock_that_somebody_holds_over_the_disk_holds_up_no_loop() -> None:
    """To drop a node takes the session's lock for as long as the disk needs."""

    async def work() -> None:
        disk = Halted()
        async with opened(disk, "group") as store:
            world = await World.made(store)
            world.draft.abort()
            gone = await world.session.append(world.one, [50])
            disk.halt()
            dropping = threading.Thread(target=world.session.session.drop, args=(gone,))
            dropping.start()
            await until(disk.waits.is_set)
            task = asyncio.ensure_future(world.session.append(world.two, [7]))
            draft = asyncio.ensure_future(world.session.draft(world.two))
            await beat()
            assert not task.done()
            assert not draft.done()
            other = await store.run(lambda store: len(store.get("s").tree))  # readers wait for no lock
            assert other == 4
            disk.go.set()
            assert (await task).parent == world.two
            await draft
            dropping.join()
            with pytest.raises(UnknownNode):
                world.session.session.node(gone.id)

    run(work())


def test_nodes_that_lie_on_the_disk_are_read_beside_the_loop() -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            ids = [world.one.id, world.two.id]
        store = AsyncStore(open_on(disk.copy()))
        halted = Halted(dict(disk.names), {file: bytearray(data) for file, data in disk.files.items()})
        await store.close()
        async with opened(halted) as store:
            session = await store.get("s")
            halted.halt()
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(each)
                for each in (session.node(ids[1]), session.head("main"), session.heads(), session.leaves(), session.run(len_of))
            ]
            await until(halted.waits.is_set)
            await beat()
            assert not any(task.done() for task in tasks[:4])
            halted.go.set()
            node, head, heads, leaves, count = await asyncio.gather(*tasks)
            assert (node.id, head.node.id, heads["main"].id, leaves, count) == (ids[1], ids[0], ids[0], (node,), 3)

    run(work())


def len_of(session: Session) -> int:
    return len(session.tree)


def test_features_are_put_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()
    put = FeatureFolder.put

    def halted(*args: Any) -> None:
        reached.set()
        assert go.wait(60)
        put(*args)

    monkeypatch.setattr(FeatureFolder, "put", halted)
    item = MediaItem("image", bytes(range(32)), [(0, 1)], (1, 2, 2))

    async def work() -> None:
        async with await AsyncStore.open(tmp_path / "store", durability="group") as store:
            task = asyncio.ensure_future(store.put_features(item, np.arange(4)))
            await until(reached.is_set)
            await beat()
            assert not task.done()
            go.set()
            await task
            found = await store.get_features(item)
            assert found is not None
            assert found["features"].tolist() == [0, 1, 2, 3]
            await store.drop_features(item)
            del found, task
            assert await store.get_features(item) is None

    run(work())


def test_gc_and_drop_of_sessions() -> None:
    async def work() -> None:
        disk = Disk()
        async with opened(disk) as store:
            world = await World.made(store)
            world.draft.abort()
            lone = await world.session.append(world.one, [9])
            report = await store.gc(recent=0)
            assert (report.nodes_before, report.nodes_after) == (3, 1)
            with pytest.raises(UnknownNode):
                await world.session.node(lone.id)
            await world.session.unpin(world.one)
            await store.drop("s")
            with pytest.raises(UnknownSession):
                await store.get("s")
            assert await store.sessions() == ()

    run(work())


# --- who waits, shares syncs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["append", "commit", "flush"])
def test_64_tasks_share_a_sync_and_hold_no_thread(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentLog, "_plan_ahead", lambda log: False)  # zeros are synced too

    async def work() -> None:
        disk = Halted()
        async with opened(disk, "group" if how == "flush" else "commit", threads=3) as store:
            sessions = [await created(store, f"s{number}") for number in range(64)]
            drafts = [await session.draft(session.session.root) for session in sessions]
            await store.flush()
            for draft in drafts:
                draft.append(7)
            before = disk.calls.count("fdatasync")

            async def do(number: int) -> Node:
                session = sessions[number]
                if how == "commit":
                    return await session.commit(drafts[number])
                node = await session.append(session.session.root, [7])
                if how == "flush":
                    await session.flush()
                return node

            disk.halt()
            first = asyncio.ensure_future(do(0))
            await until(disk.waits.is_set)
            tasks = [asyncio.ensure_future(do(number)) for number in range(1, 64)]
            handed = store._threads._handed
            await until(lambda: len(store._threads._handed) == 63)
            assert sum(thread.name.startswith("sessiontree-aio") for thread in threading.enumerate()) <= 3
            del handed
            disk.go.set()
            nodes = await asyncio.gather(first, *tasks)
            syncs = disk.calls.count("fdatasync") - before
            assert syncs <= (2 if how != "flush" else 4)  # the background thread of a group takes some along
            assert all(len(session.session.tree) == 2 for session in sessions)
            assert [node.token_ids.tolist() for node in nodes] == [[7]] * 64

    run(work())


def test_what_is_not_durable_is_seen_by_nobody() -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            session = await created(store)
            disk.halt()
            one = asyncio.ensure_future(session.append(session.session.root, [1]))
            two = asyncio.ensure_future(session.append(session.session.root, [2]))
            await until(disk.waits.is_set)
            await beat()
            assert len(session.session.tree) == 1
            disk.go.set()
            assert [node.token_ids.tolist() for node in await asyncio.gather(one, two)] == [[1], [2]]
            assert len(session.session.tree) == 3

    run(work())


# --- cancelling -----------------------------------------------------------------------------------------------------------

STAGES = ("before it began", "in its lane", "at the disk", "ended, and not told yet")


async def cancelled(world: World, disk: Halted, name: str, stage: str) -> bool:
    """Cancel the wait for an operation at a stage of it: whether it had begun."""
    store = world.store
    ahead: list[asyncio.Future[object]] = []
    if stage == "in its lane":
        disk.halt()
        for lane in ("s", "t", "f"):  # somebody reads at the disk, in every lane that the operation may have
            ahead.append(asyncio.ensure_future(store._threads.do(disk._halted, "halted", lane)))
        ahead.append(asyncio.ensure_future(store.tick(2.0)))
        await until(disk.waits.is_set)
    elif stage == "at the disk":
        disk.halt()
    task = asyncio.ensure_future(OPERATIONS[name](world))
    if stage != "before it began":
        await asyncio.sleep(0)
    if stage == "at the disk":
        await until(lambda: disk.waits.is_set() or task.done())
        await beat()
    if stage == "ended, and not told yet":
        while not store._threads._ended:  # the loop stands meanwhile
            os.sched_yield()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.go.set()
    await asyncio.gather(*ahead)
    return stage != "before it began"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_cancelled_wait_undoes_nothing(name: str, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            begun = await cancelled(world, disk, name, stage)
            await until(lambda: not store._threads._under_way)
            state, closed = world.state(), world.draft.closed
        async with opened(Disk()) as store:
            twin = await World.made(store)
            if begun:
                await OPERATIONS[name](twin)
            assert (twin.state(), twin.draft.closed) == (state, closed)
            assert begun is (name == "commit" and closed) or name != "commit"
        with reopened(disk) as again:
            assert outline(again.get("s").tree) == state["s"][0]

    run(work())
    assert caplog.records == []


def test_what_was_begun_first_is_done_first_though_nobody_waits_for_it() -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            disk.halt()
            ahead = asyncio.ensure_future(store._threads.do(disk._halted, "halted", "s"))
            await until(disk.waits.is_set)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await world.session.set_head("main", world.two)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await store.create("t", scheme="text@hf5")
            last = asyncio.ensure_future(world.session.set_head("main", world.one))
            got = asyncio.ensure_future(store.get("t"))
            await beat()
            disk.go.set()
            await ahead
            head = await last
            assert (head.node, head.version) == (world.one, 3)
            assert world.session.session.head("main") == head
            assert (await got).session.id == "t"

    run(work())


def test_an_abandoned_session_flush_covers_what_was_begun_before() -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk, "group") as store:
            world = await World.made(store)
            disk.halt()
            ahead = asyncio.ensure_future(store._threads.do(disk._halted, "halted", "s"))
            await until(disk.waits.is_set)
            append = asyncio.ensure_future(world.session.append(world.two, [7]))
            await asyncio.sleep(0)
            append.cancel()
            flush = asyncio.ensure_future(world.session.flush())
            await beat()
            disk.go.set()
            await asyncio.gather(ahead, flush)
            with reopened(disk) as again:
                assert len(again.get("s").tree) == 4
            with pytest.raises(asyncio.CancelledError):
                await append

    run(work())


@pytest.mark.parametrize("when", ["before it fails", "after it failed", "thrown away"])
def test_what_an_abandoned_operation_raises_is_logged_once(when: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            disk.halt()
            ahead = asyncio.ensure_future(store._threads.do(disk._halted, "halted", "s"))
            await until(disk.waits.is_set)
            coroutine = world.session.set_head("main", world.two, expected=world.two)
            if when == "thrown away":
                coroutine.send(None)
                coroutine.close()
            else:
                task = asyncio.ensure_future(coroutine)
                await asyncio.sleep(0)
                if when == "after it failed":
                    disk.go.set()
                    while not any(operation._errors for operations in store._threads._ended.values() for operation in operations):
                        os.sched_yield()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            disk.go.set()
            await ahead
            await until(lambda: not store._threads._under_way)
            await beat()
            assert len(world.session.session.tree) == 3

    run(work())
    (record,) = caplog.records
    assert record.name == "sessiontree.aio"
    assert record.levelno == logging.ERROR
    assert "set_head of session 's'" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], HeadMoved)


def test_a_task_group_whose_task_fails_undoes_nothing_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            disk.halt()
            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(world.session.append(world.two, [7]))
                    group.create_task(world.session.append(world.two, [8]))
                    group.create_task(world.session.node(bytes(32)))
            assert isinstance(caught.value.exceptions[0], UnknownNode)
            disk.go.set()
            await world.session.flush()
            assert len(world.session.session.tree) == 5

    run(work())
    assert caplog.records == []


# --- errors ---------------------------------------------------------------------------------------------------------------


def test_what_an_operation_raises_reaches_who_waits() -> None:
    async def work() -> None:
        async with opened(Disk()) as store:
            world = await World.made(store)
            with pytest.raises(HeadMoved) as moved:
                await world.session.set_head("main", world.two, expected=world.two)
            assert moved.value.actual.node == world.one
            with pytest.raises(SessionExists):
                await created(store)
            with pytest.raises(UnknownSession):
                await store.get("t")
            with pytest.raises(TypeError):
                await store.create(scheme="text@hf5")  # type: ignore[call-arg]
            with pytest.raises(TypeError):
                await world.session.append(world.two, "words")  # type: ignore[arg-type]
            with pytest.raises(OutOfRange):
                await store.tick(float("nan"))
            await store.tick(5)
            with pytest.raises(OutOfRange):
                await store.tick(4)
            await world.session.append(world.two, [1], key="k")
            with pytest.raises(KeyTaken):
                await world.session.append(world.two, [2], key="k")

    run(work())


def test_a_full_disk_reaches_who_waits_and_leaves_the_draft_open() -> None:
    async def work() -> None:
        disk = Halted()
        async with opened(disk) as store:
            world = await World.made(store)
            before = world.state()
            disk.halt()
            fail(disk, 1, "pwrite")
            commit = asyncio.ensure_future(world.session.commit(world.draft))
            await until(disk.waits.is_set)
            append = asyncio.ensure_future(world.session.append(world.two, [8]))
            await until(lambda: len(store._threads._handed) == 1)
            disk.go.set()
            failed = await asyncio.gather(commit, append, return_exceptions=True)
            assert [type(error) for error in failed] == [StoreFailed, StoreFailed]
            assert world.state() == before
            assert not world.draft.closed
            world.draft.append(6)
            node = await world.session.commit(world.draft)
            assert node.token_ids.tolist() == [4, 5, 6]
            with pytest.raises(DraftClosed):
                await world.session.commit(world.draft)
        with reopened(disk) as again:
            assert again.get("s").node(node.id).finish_reason == "stop"

    run(work())


def test_a_disk_that_fails_for_good_reaches_who_flushes() -> None:
    async def work() -> None:
        disk = Disk()
        store = opened(disk, "group")
        world = await World.made(store)
        await store.flush()
        fail(disk, 1, "fdatasync", errno.EIO, forever=True)
        await world.session.append(world.two, [8])
        for flush in (world.session.flush, store.flush):
            with pytest.raises(StoreFailed):
                await flush()
        with pytest.raises(StoreFailed):
            await world.session.append(world.two, [9])
        with pytest.raises(StoreFailed):
            await store.close()
        await store.close()  # closed it is

    run(work())


# --- closing, and loops ---------------------------------------------------------------------------------------------------


@durabilities
def test_closing_waits_for_what_is_under_way(durability: Durability) -> None:
    async def work() -> None:
        disk = Halted()
        store = opened(disk, durability)
        world = await World.made(store)
        await store.flush()
        disk.halt()
        tasks = [asyncio.ensure_future(world.session.append(world.two, [number])) for number in range(50)]
        tasks[0].cancel()  # before it began
        await asyncio.sleep(0)
        tasks[1].cancel()
        closing = [asyncio.ensure_future(store.close()) for _ in range(2)]
        await until(lambda: store._threads._closing)
        for call in (
            lambda: world.session.append(world.two, [99]),
            lambda: store.get("s"),
            store.flush,
            lambda: world.session.node(world.one.id),
        ):
            with pytest.raises(StoreClosed):
                await call()
        await beat()
        assert not any(task.done() for task in closing)
        disk.go.set()
        await asyncio.gather(*closing)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(found, Node) for found in done[2:])
        await store.close()
        with reopened(disk) as again:
            assert len(again.get("s").tree) == 3 + 49

    run(work())


def test_closing_can_be_abandoned_too() -> None:
    async def work() -> None:
        disk = Halted()
        store = opened(disk)
        world = await World.made(store)
        disk.halt()
        append = asyncio.ensure_future(world.session.append(world.two, [7]))
        await until(disk.waits.is_set)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await store.close()
        disk.go.set()
        await append
        await store.close()
        with pytest.raises(StoreClosed):
            store.store.get("s")

    run(work())


def test_opening_that_is_abandoned_leaves_no_store_open() -> None:
    async def work() -> None:
        disk = Halted()
        disk.halt()
        with logs_on(disk):
            task = asyncio.ensure_future(AsyncStore.open(AT, durability="group"))
            await until(disk.waits.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            disk.go.set()
            closers = [thread for thread in threading.enumerate() if thread.name == "sessiontree-aio-close"]
            for closer in closers:
                await asyncio.to_thread(closer.join)
            async with await AsyncStore.open(AT, durability="commit") as store:  # nobody holds its lock
                await created(store)

    run(work())


def test_a_loop_that_is_closed_early_takes_nothing_with_it(caplog: pytest.LogCaptureFixture) -> None:
    disk = Halted()
    store = AsyncStore(open_on(disk, durability="commit"))
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it complains of the tasks that are left
    world = loop.run_until_complete(World.made(store))
    disk.halt()
    go = threading.Event()

    def fail_late(session: Session) -> None:
        assert go.wait(60)
        session.node(bytes(32))

    tasks: list[asyncio.Task[Any]] = [
        loop.create_task(world.session.run(fail_late)),
        loop.create_task(store._threads.do(disk._halted, "halted", "s")),
        loop.create_task(world.session.append(world.two, [7])),
        loop.create_task(world.session.set_head("main", world.one, expected=world.two)),
    ]
    loop.run_until_complete(until(disk.waits.is_set))
    go.set()
    while not store._threads._ended:  # which the loop is never told of
        os.sched_yield()
    loop.close()
    disk.go.set()

    async def work() -> None:
        await until(lambda: not store._threads._under_way)
        tasks.clear()
        gc.collect()
        assert len((await store.get("s")).session.tree) == 4
        await store.close()

    asyncio.run(work())
    records = [record for record in caplog.records if record.name == "sessiontree.aio"]
    assert [type(record.exc_info[1]) for record in records if record.exc_info] == [UnknownNode, HeadMoved]
    assert store._threads._ended == {}


def test_loops_in_several_threads_use_one_store() -> None:
    store = AsyncStore(open_on(Disk(), durability="commit"))
    session = AsyncSession(store.store.create("s", scheme="text@hf5"), store)
    root = session.session.root
    made: dict[int, list[Node]] = {}

    def loop(number: int) -> None:
        async def work() -> None:
            tasks = [session.append(root, [number, count]) for count in range(20)]
            made[number] = await asyncio.gather(*tasks)

        asyncio.run(work())

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {node.token_ids.tobytes() for node in session.session.children(root)} == {
        np.array([number, count], "<i4").tobytes() for number in range(4) for count in range(20)
    }
    assert all(made[number][count].token_ids.tolist() == [number, count] for number in range(4) for count in range(20))
    asyncio.run(store.close())


# --- in memory, and what it looks like ------------------------------------------------------------------------------------


def test_in_memory_operations_run_where_they_are_awaited() -> None:
    async def work() -> None:
        async with AsyncStore(SessionStore.in_memory()) as store:
            world = await World.made(store)
            await world.session.commit(world.draft)
            await store.fork(world.session, world.two, "f")
            await world.session.flush()
            with pytest.raises(HeadMoved):
                await world.session.set_head("main", world.two, expected=world.two)
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("sessiontree-aio_")]
            assert await store.sessions() == ("s", "f")
            assert (await world.session.heads()) == {"main": world.one}
            await world.session.close()
            with pytest.raises(UnknownSession):
                await store.get("s")
        with pytest.raises(StoreClosed):
            await created(store)

    run(work())


def test_operations_show_the_signatures_of_what_they_are_fronts_of() -> None:
    for front, behind in ((AsyncSession, Session), (AsyncStore, SessionStore)):
        for name, method in vars(front).items():
            if (
                name.startswith("_")
                or not callable(method)
                or not hasattr(behind, name)
                or name in ("fork", "flush", "head", "heads", "subscribe")
            ):
                continue
            assert inspect.iscoroutinefunction(method), name
            assert [*inspect.signature(method).parameters][1:] == [*inspect.signature(getattr(behind, name)).parameters][1:], name
            assert method.__doc__
    assert inspect.signature(AsyncSession.append) == inspect.signature(Session.append)
    assert inspect.signature(AsyncStore.open) == inspect.signature(SessionStore.open)
    commit, draft = inspect.signature(AsyncSession.commit), inspect.signature(Draft.commit)
    assert [*commit.parameters.values()][2:] == [*draft.parameters.values()][1:]


# --- many tasks against an oracle -----------------------------------------------------------------------------------------


class Oracle:
    """What tasks were told, and so must find."""

    def __init__(self) -> None:
        self.paths: dict[str, dict[bytes, list[int]]] = {}  # of each session: tokens of the path, by id
        self.heads: dict[tuple[str, str], tuple[int, bytes]] = {}  # the highest version of each, and where it is

    def knows(self, session: AsyncSession, node: Node, path: list[int]) -> None:
        self.paths[session.session.id][node.id] = path

    def check(self, store: SessionStore) -> None:
        for name, known in self.paths.items():
            session = store.get(name)
            assert {node.id: node.input_ids().tolist() for node in session.tree} == known
            for head, node in session.heads.items():
                assert (session.head(head).version, node.id) == self.heads[name, head]


@pytest.mark.parametrize("durability", ["commit", "group", "memory"])
def test_64_tasks_do_what_an_oracle_says(durability: Any) -> None:
    async def work() -> None:
        disk, oracle, seed = Disk(), Oracle(), random.randrange(2**32) if SOAK else 1
        store = AsyncStore(SessionStore.in_memory() if durability == "memory" else open_on(disk, durability=durability))
        sessions = [await created(store, f"s{number}") for number in range(8)]
        for session in sessions:
            oracle.paths[session.session.id] = {session.session.root.id: []}

        async def task(number: int) -> None:
            rng = random.Random(seed + number)
            for step in range(60 if SOAK else 12):
                session = rng.choice(sessions)
                node_id, path = rng.choice(list(oracle.paths[session.session.id].items()))
                node = await session.node(node_id)
                tokens = [number, step]
                match rng.randrange(6):
                    case 0 | 1:
                        oracle.knows(session, await session.append(node, tokens), path + tokens)
                    case 2:
                        draft = await session.draft(node)
                        draft.extend([*tokens, 9])
                        if rng.random() < 0.3:
                            draft.abort()
                            continue
                        oracle.knows(session, await session.commit(draft, length=2), path + tokens)
                    case 3:
                        child = await session.append(node, [*tokens, 8])
                        oracle.knows(session, child, [*path, *tokens, 8])
                        cut = await session.truncate(child, len(path) + 1)
                        oracle.knows(session, cut, [*path, number])
                    case 4:
                        name = rng.choice("ab")
                        head = await session.set_head(name, node)
                        key = session.session.id, name
                        oracle.heads[key] = max(oracle.heads.get(key, (0, b"")), (head.version, node.id))
                    case _:
                        waiting = asyncio.ensure_future(session.append(node, [*tokens, 5]))
                        await beat(rng.randrange(1, 4))
                        waiting.cancel()
                        with suppress(asyncio.CancelledError):
                            await waiting
                        oracle.knows(session, await session.append(node, [*tokens, 5]), [*path, *tokens, 5])
                if rng.random() < 0.1:
                    await session.flush()

        async with asyncio.TaskGroup() as group:
            for number in range(64):
                group.create_task(task(number))
        await store.flush()
        oracle.check(store.store)
        await store.close()
        if durability != "memory":
            with reopened(disk) as again:
                oracle.check(again)

    run(work())


def test_events_are_awaited_from_the_subscription_on_to_the_closing_of_the_store() -> None:
    async def work() -> list[tuple[str, str]]:
        store = opened(Disk())
        await created(store, "before")
        seen = store.subscribe()
        waiting = asyncio.ensure_future(anext(seen))
        await asyncio.sleep(0)
        session = await created(store, "s")
        first = await waiting
        node = await session.append(session.session.root, [1])
        await asyncio.to_thread(session.session.set_head, "main", node)  # beside the front
        told = [first, await anext(seen), await anext(seen)]
        late = asyncio.ensure_future(anext(seen, None))
        await asyncio.sleep(0)
        await store.close()
        told += [event for event in (await late, *[event async for event in seen]) if event is not None]
        assert await anext(seen, None) is None
        return [(event.kind, event.session_id) for event in told]

    expected = [("session_opened", "s"), ("node_committed", "s"), ("head_moved", "s")]
    assert asyncio.run(work())[:3] == expected


def test_a_subscription_that_is_closed_ends_and_so_does_one_whose_loop_is_gone() -> None:
    store = opened(Disk())

    async def work() -> int:
        async with store.subscribe(kinds=["node_committed"]) as seen:
            session = await created(store, "s")
            await session.append(session.session.root, [1])
            seen.close()
            return len([event async for event in seen])

    assert asyncio.run(work()) == 1

    async def leave() -> Any:
        return store.subscribe(), await created(store, "t")

    seen, session = asyncio.run(leave())
    session.session.append(session.session.root, [2])  # its loop is closed; no writer minds
    assert [event.kind for event in seen.subscription.poll()] == ["session_opened", "node_committed"]
    store.store.close()
