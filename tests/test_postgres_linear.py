"""Eight processes on one database, some of which are killed, and the server too: what they were told has an order, and is there.

What a client does is in ``postgres_clients.py``, what has to hold in ``client_histories.py``; both are tried here on what is wrong.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlite_backend

from sessiontree import CorruptTree, Head, SessionStore
from sessiontree.backends.shared import Backend, Change, Sessions
from sessiontree.testing.together import in_threads
from tests.client_histories import MAKING, History, Operation, operations
from tests.linearizability import NEVER
from tests.postgres_clients import ROOTS, Client, rules
from tests.postgres_server import ROOT, Server

CLIENTS = 8
PATIENCE = 120  # seconds that a client may take for its last call, on whatever machine


class Lives:
    """Clients, each a process, and another in its place when it is killed."""

    def __init__(self, where: str, directory: Path, until: int) -> None:
        self._where, self._directory, self._until = where, directory, until
        self._lives = [0] * CLIENTS
        self.killed = 0
        self.processes = [self._start(number) for number in range(CLIENTS)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        life, self._lives[number] = self._lives[number], self._lives[number] + 1
        log = self._directory / f"{number}.{life}.log"
        command = [sys.executable, "-m", "tests.postgres_clients", self._where, str(log), str(number), str(self._until)]
        with (self._directory / "errors").open("ab") as errors:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        process.kill()
        if process.wait() == -signal.SIGKILL:  # else it had come to its end
            self.killed += 1
            self.processes[number] = self._start(number)

    def pause(self, number: int, seconds: float) -> None:
        """Have one sleep, wherever it is, and wake up late."""
        self.processes[number].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes[number].send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Wait until all have come to their end by themselves."""
        ends = [process.wait(PATIENCE) for process in self.processes]
        said = (self._directory / "errors").read_text()
        assert (ends, said) == ([0] * CLIENTS, "")

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def disturbed(server: Server, where: str, directory: Path, seconds: float, seed: str) -> list[Operation]:
    """Clients for some time, meanwhile kills, pauses, and three stops of the server: what they said."""
    rng = random.Random(seed)
    start = time.monotonic()
    with SessionStore.connect(where) as store:
        for name in ROOTS:
            store.create(name, scheme=rules())
    stops = [(0.25, "immediate", rng.uniform(0, 1)), (0.5, "fast", rng.uniform(0, 2)), (0.75, "immediate", rng.uniform(4, 6))]
    with Lives(where, directory, time.monotonic_ns() + int(seconds * 1e9)) as lives:
        while (passed := time.monotonic() - start) < seconds:
            time.sleep(rng.uniform(0, 2))
            if stops and passed > stops[0][0] * seconds:
                _, mode, down = stops.pop(0)
                server.stop(mode)  # type: ignore[arg-type]
                time.sleep(down)
                server.start()
            elif rng.random() < 0.8:
                lives.kill(rng.randrange(CLIENTS))
            else:
                lives.pause(rng.randrange(CLIENTS), rng.uniform(0, 1))
        lives.end()
        assert not stops
        assert lives.killed > seconds / 10
    return operations(directory.glob("*.log"))


@pytest.mark.parametrize("seconds", [60, *(pytest.param(300, marks=pytest.mark.soak, id=f"300 {n}") for n in "ab")])
def test_eight_clients_kills_and_restarts_of_the_server(own_postgres: Server, tmp_path: Path, seconds: int) -> None:
    seed = str(random.randrange(2**32)) if os.environ.get("SESSIONTREE_SOAK") == "1" else "clients"
    print(f"seed {seed}")
    with own_postgres.database() as where, ExitStack() as ends:
        done = disturbed(own_postgres, where, tmp_path, seconds, seed)
        store = ends.enter_context(SessionStore.connect(where))
        History(done).check_all(store)


# --- what is wrong is found ------------------------------------------------------------------------------------------------

Wrap = Callable[[Backend], Backend]


def in_one_process(directory: Path, wrap: Wrap, client: type[Client] = Client, seed: str = "") -> tuple[History, SessionStore]:
    """Clients, each a thread with a store of its own over one file: what they said, and a store to look at the end."""

    def store(wrapped: Wrap) -> SessionStore:
        backend: Any = sqlite_backend.connect(str(directory / "store"))
        for _, connection in backend.sessions.db.connections.values():
            connection.execute("PRAGMA synchronous = OFF")  # nothing here is about the disk
        return SessionStore.connect(wrapped(backend))

    with store(lambda backend: backend) as first:
        for name in ROOTS:
            first.create(name, scheme=rules())

    def work(number: int) -> None:
        with store(wrap) as mine:
            each = client(mine, directory / f"{number}.log", number, f"{seed}{number}")
            for _ in range(200):
                each.step()
            each.close()

    in_threads(4, work)
    return History(operations(directory.glob("*.log"))), store(lambda backend: backend)


class Wrapped(Sessions):
    """Sessions of a backend, with a fault."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._rng = random.Random(1)

    def __getattribute__(self, name: str) -> Any:
        if name in ("commit", "_sessions", "_rng"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_sessions"), name)


class SaysYes(Wrapped):
    """A write that came too late is acknowledged."""

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return [True for _ in self._sessions.commit(changes)]


class SaysNo(Wrapped):
    """Some writes are done, and done again."""

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return [came and self._rng.random() > 0.1 for came in self._sessions.commit(changes)]


class Loses(Wrapped):
    """A version comes without its heads."""

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return self._sessions.commit([each._replace(refs={} if self._rng.random() < 0.2 else each.refs) for each in changes])


class Forgets(Wrapped):
    """Some nodes that were acknowledged are not there."""

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return self._sessions.commit([each._replace(nodes=() if self._rng.random() < 0.05 else each.nodes) for each in changes])


class Careless(Client):
    """A client that does not say what it expects."""

    def _swap(self, session: Any, name: str, expected: Head | None) -> None:
        move, session_of = type(session).set_head, session

        class Moving:
            id = session.id
            root = session.root

            def set_head(self, name: str, node: bytes, expected: Head | None) -> Head:
                head: Head = move(session_of, name, node)
                return head

        super()._swap(Moving(), name, expected)  # type: ignore[arg-type]


def test_clients_in_one_process_are_right(tmp_path: Path) -> None:
    history, store = in_one_process(tmp_path, lambda backend: backend)
    with store:
        history.check_all(store)
    kinds = {each.kind for each in history.done if each.was_done}
    assert kinds >= {"append", "generate", "read", "set", "cas", "fork", "pin", "alias", "drop"}
    assert sum(each.kind == "cas" and each.result[0] == "moved" for each in history.done if each.was_done) > 5


@pytest.mark.parametrize(
    ("broken", "found"), [(SaysNo, "have an order"), (Loses, "given out twice|have an order"), (Careless, "have an order")]
)
def test_a_history_of_what_is_broken_has_no_order(broken: Any, found: str, tmp_path: Path) -> None:
    history, store = in_one_process(tmp_path, *_with(broken))
    with store, pytest.raises(AssertionError, match=found):
        history.check_heads(store)


@pytest.mark.parametrize("broken", [SaysYes, Forgets])
def test_what_was_acknowledged_and_is_not_there_is_missed(broken: Any, tmp_path: Path) -> None:
    history, store = in_one_process(tmp_path, *_with(broken))
    with store, pytest.raises((AssertionError, CorruptTree)):
        history.check_nodes(store)


def _with(broken: Any) -> tuple[Wrap, type[Client]]:
    if issubclass(broken, Client):
        return lambda backend: backend, broken
    return lambda backend: backend._replace(sessions=broken(backend.sessions)), Client


def changed(done: Sequence[Operation], which: Callable[[Operation], bool], **fields: Any) -> list[Operation]:
    """The same but for the last operation of a kind."""
    at = max(number for number, each in enumerate(done) if which(each))
    return [*done[:at], done[at]._replace(**fields), *done[at + 1 :]]


def test_a_history_that_is_not_of_what_is_there_is_told_apart(tmp_path: Path) -> None:
    history, store = in_one_process(tmp_path, lambda backend: backend)
    done = history.done
    end = max(each.returned for each in done) + 1

    def and_then(kind: str, session: str, **given: Any) -> list[Operation]:
        return [*done, Operation("x", end, end + 1, kind, {"session": session, **given})]

    turn = {"parent": store.get("a").root.id.hex(), "tokens": [77, 77], "image": None, "key": None}
    name, pin = next((name, pin.hex()) for name in store.sessions() for pin in store.get(name).pins)
    leaves = {leaf.id.hex() for leaf in store.get("a").leaves() if leaf.origin == "generated"}
    with store:
        wrong: dict[str, tuple[list[Operation], str]] = {
            "was acknowledged": (and_then("append", "a", **turn), "check_nodes"),
            "nobody made": (changed(done, lambda each: each.result in leaves, error="KeyTaken"), "check_nodes"),
            "refused for nothing": (changed(done, lambda each: each.kind in MAKING, error="UnknownSession"), "check_kinds"),
            "unpin": (and_then("unpin", name, node=pin), "check_pins"),
            "alias .* name": (changed(done, lambda each: each.kind == "alias" and each.was_done, result="00"), "check_aliases"),
        }
        for said, (told, check) in wrong.items():
            with pytest.raises(AssertionError, match=said):
                getattr(History(told), check)(*([] if check == "check_kinds" else [store]))
        # What nobody knows the end of may have been done.
        for kind in ("set", "generate", "cas", "append", "pin"):
            unknown = changed(done, lambda each: each.kind == kind and each.was_done, returned=NEVER, result=None)  # noqa: B023
            History(unknown).check_all(store)
