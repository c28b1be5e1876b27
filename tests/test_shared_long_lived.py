"""What a shared store and a process that lives long do to each other: forks, interrupts, memory, and what is said of URLs."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sqlite_backend

from sessiontree import OutOfRange, Session, SessionStore, SessionTreeError, StaleSession, Unsupported
from sessiontree.backends import shared_log
from sessiontree.errors import StoreFailed
from sessiontree.journal import waits_handed_over


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[], SessionStore]]:
    stores: list[SessionStore] = []

    def connect(**options: Any) -> SessionStore:
        stores.append(SessionStore.connect(sqlite_backend.connect(f"{tmp_path}/store"), **options))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def in_child(work: Callable[[], object]) -> str:
    """What came of something in a forked child, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        with suppress(BaseException):
            try:
                said = str(work())
            except SessionTreeError as error:
                said = type(error).__name__
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


def test_forked_children_are_others_to_each_other(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as store:
        chat = store.create("chat", scheme="text@hf5")  # draws numbers that are left over
        question = chat.append(chat.root, [1, 2, 3])
        draft = chat.draft(question)
        draft.extend([4])

        def sample(name: str) -> str:
            store.create(name, scheme="text@hf5")
            mine = store.get("chat")
            draft = mine.draft(question.id)
            draft.extend([7, 8])
            draft.commit()
            return f"{mine.incarnation}"

        first, second = in_child(lambda: sample("one")), in_child(lambda: sample("two"))
        assert first.isdigit() and second.isdigit()
        assert len({int(first), int(second), chat.incarnation}) == 3
        assert in_child(lambda: chat.append(question, [5])) == in_child(draft.commit) == StaleSession.__name__
        draft.commit()
        chat.refresh()
        assert len(chat.children(question)) == 3
        assert set(store.sessions()) == {"chat", "one", "two"}


def until(there: Callable[[], bool]) -> None:
    by = time.monotonic() + 60
    while not there():
        assert time.monotonic() < by
        time.sleep(0.0005)


class Interrupt(BaseException):
    """As Ctrl-C is."""


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Whether there was a line number ``at``, counted in the shared log, at which something was interrupted."""
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != shared_log.__file__:
            return None
        # Nothing comes in between the end of a with statement's block and what is done then.
        if event == "line" and not getline(shared_log.__file__, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_of_a_write_leaves_a_store_that_goes_on(connect: Callable[[], SessionStore]) -> None:
    store, other = connect(), connect()
    chat = store.create("chat", scheme="text@hf5")
    at = 1
    while interrupted(lambda at=at: chat.append(chat.root, [at]), at):  # type: ignore[misc]
        node = chat.append(chat.root, [10_000 + at])
        there = other.get("chat")
        assert node.id in there.tree
        chat.refresh()
        assert [each.id for each in there.children(there.root)] == [each.id for each in chat.children(chat.root)]
        at += 1
    assert at > 50
    store.close()  # waits for nothing that nobody writes


@pytest.mark.parametrize("done", [False, True])
def test_who_is_written_with_one_that_is_interrupted_is_written_once(
    connect: Callable[[], SessionStore], monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    store = connect()
    chats = [store.create(f"chat-{at}", scheme="text@hf5") for at in range(3)]
    sessions: Any = store._journal._log.backend.sessions  # type: ignore[union-attr]
    commit = sessions.commit

    def interrupt(changes: Any) -> Any:
        monkeypatch.undo()
        if done:
            commit(changes)
        raise Interrupt

    with waits_handed_over() as waits:
        node = chats[0].append(chats[0].root, [1])
        chats[1].append(chats[1].root, [2], head="main")
    monkeypatch.setattr(sessions, "commit", interrupt)
    with pytest.raises(Interrupt):
        chats[2].append(chats[2].root, [3])
    waits[0]()
    with pytest.raises(StoreFailed, match="interrupted"):  # its head may be there, and whose it is nobody knows
        waits[1]()
    assert chats[0].tree.node(node.id).token_ids.tolist() == [1]
    assert chats[2].append(chats[2].root, [3]).token_ids.tolist() == [3]
    assert chats[1].append(chats[1].root, [2], head="main").id == chats[1].heads["main"].id
    other = connect()
    assert [len(other.get(chat.id).tree) for chat in chats] == [2, 2, 2]


def test_an_interrupt_at_any_line_of_a_wait_strands_nobody(
    connect: Callable[[], SessionStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connect()
    first, second, third = (store.create(f"chat-{at}", scheme="text@hf5") for at in range(3))
    log: Any = store._journal._log  # type: ignore[union-attr]
    commit = log.backend.sessions.commit
    held = threading.Event()

    def hold(changes: Any) -> Any:
        held.wait()
        return commit(changes)

    def sleeps(chat: Session) -> bool:
        return any(write.gates for write in list(log._line.values()) if write.known.number == chat._number)

    monkeypatch.setattr(log.backend.sessions, "commit", hold)
    at, more = 1, True
    with ThreadPoolExecutor(3) as pool:
        while more:
            held.clear()
            leads = pool.submit(first.append, first.root, [at])
            until(lambda: log._leader is not None)
            stopped = pool.submit(interrupted, lambda at=at: second.append(second.root, [at]), at)  # type: ignore[misc]
            until(lambda: stopped.done() or sleeps(second))  # noqa: B023
            waits = pool.submit(third.append, third.root, [at])
            until(lambda: sleeps(third))
            held.set()
            more = stopped.result(60)
            assert [each.result(60).token_ids.tolist() for each in (leads, waits)] == [[at], [at]]
            assert second.append(second.root, [at]).token_ids.tolist() == [at]
            at += 1
    assert at > 50


def test_what_nobody_has_in_hand_takes_no_memory_for_ever(connect: Callable[[], SessionStore]) -> None:
    store = connect()
    for at in range(8):
        with store.create(f"chat-{at}", scheme="text@hf5") as chat:
            for token in range(20):
                chat.append(chat.root, [token] * 100)
    assert store.usage().memory_bytes > 8 * 20 * 400
    store.evict()
    assert store.usage().memory_bytes < 4096


def test_aliases_are_not_kept_where_they_are_asked_for_each_time(connect: Callable[[], SessionStore]) -> None:
    store = connect()
    for at in range(3):
        store.alias_media(f"alias-{at}", bytes(32))
    store.drop_alias("alias-0")
    assert not store._aliases
    assert store.aliased_media("alias-1") == bytes(32)


@pytest.mark.parametrize("odd", [True, False])
def test_nodes_that_are_durable_are_not_remembered(connect: Callable[[], SessionStore], odd: bool) -> None:
    store = connect()
    chat = store.create("chat", scheme="text@hf5")
    if odd:
        chat.append(chat.root, [0])
    for token in range(1, 200):
        chat.pin(chat.append(chat.root, [token]))
    assert store._journal is not None
    assert len(store._journal._underway) <= 64


def test_a_failure_that_is_kept_holds_no_records(connect: Callable[[], SessionStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store = connect()
    chat = store.create("chat", scheme="text@hf5")
    log: Any = store._journal._log  # type: ignore[union-attr]

    def fail(changes: Any) -> Any:
        try:
            raise OSError("full")
        except OSError as error:
            raise StoreFailed("full") from error

    monkeypatch.setattr(log.backend.sessions, "commit", fail)
    with pytest.raises(StoreFailed):
        chat.append(chat.root, [1])
    for kept in log._lost.values():
        assert kept.__traceback__ is kept.__cause__.__traceback__ is None


def test_a_draft_goes_on_in_a_session_that_has_not_looked_since(connect: Callable[[], SessionStore]) -> None:
    here, there = connect(), connect()
    mine = here.create("chat", scheme="text@hf5")
    theirs: Session = there.get("chat")
    draft = mine.draft(mine.append(mine.root, [1, 2]))
    draft.extend([3])
    assert theirs.adopt(draft.hand_over()).commit().input_ids().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "where",
    [
        "host=db user=me password=SECRET",
        "mysql://db/chats?password=SECRET",
        "mysql://me:SE@SECRET/chats",
        "POSTGRESQL://me:SECRET@db/chats",
    ],
)
def test_a_place_that_is_none_is_not_repeated(where: str) -> None:
    with pytest.raises(Unsupported) as caught:
        SessionStore.connect(where)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value, limit=0))


def test_what_a_store_is_connected_with_is_checked(tmp_path: Path) -> None:
    for where in (None, 1, b"postgresql://db"):
        with pytest.raises(TypeError, match="by a URL or a Backend"):
            SessionStore.connect(where)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SessionStore.connect("postgresql://db", tenant=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SessionStore.connect("postgresql://db", tenant="\ud800")
    for grace in (-1.0, float("nan")):
        with pytest.raises(OutOfRange):
            SessionStore.connect("postgresql://db", blob_grace_seconds=grace)
