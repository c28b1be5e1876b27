"""Threads and processes that begin together, and what they tell of each other.

A process is made by a server that has this library loaded and never opened a store, so it begins quickly and with nothing that a
test left open. What it is given goes there by pickle.
"""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

PATIENCE: Final = 120.0  # seconds after which a process that says nothing has failed its test
_PROCESSES: Final = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["sessiontree", "sessiontree.testing.work"])


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """``work(number)`` in threads that begin together; the first error is raised here, when all have ended."""
    barrier, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Line:
    """The process's end of the line to its test."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def tell(self, what: Any) -> None:
        """Tell the test something. It arrives even where the process is killed right after."""
        self._connection.send(("told", what))

    def wait(self) -> None:
        """Say that this process is ready, and wait for the others to be."""
        self._connection.send(("ready", None))
        self._connection.recv()


class Process:
    """``work(line, *given)`` in a process of its own; ``work`` is a function of a module."""

    def __init__(self, work: Callable[..., object], *given: Any) -> None:
        self._connection, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_run, args=(theirs, work, given), daemon=True)
        try:
            self._process.start()
        finally:
            theirs.close()

    def _hear(self, kind: str) -> Any:
        if not self._connection.poll(PATIENCE):
            raise AssertionError(f"a process said nothing for {PATIENCE:.0f} s")
        heard, what = self._connection.recv()  # EOFError: it has ended
        if heard == "failed":
            raise AssertionError(f"in another process:\n{what}")
        assert heard == kind, f"heard {heard!r}, not {kind!r}"
        return what

    def told(self) -> Any:
        """The next thing that it tells."""
        return self._hear("told")

    def rest(self) -> Iterator[Any]:
        """What else it told, up to its end."""
        while True:
            try:
                yield self.told()
            except (EOFError, OSError):
                return

    def result(self) -> Any:
        """What its work returned."""
        return self._hear("done")

    def go(self) -> None:
        """Wait until it is ready, and let it go on."""
        self._hear("ready")
        self._connection.send(None)

    def kill(self) -> None:
        """Kill it (SIGKILL), wherever it is."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Be done with it."""
        self.kill()
        self._connection.close()
        self._process.close()


@contextmanager
def process(work: Callable[..., object], *given: Any) -> Iterator[Process]:
    """A process that is gone at the end."""
    child = Process(work, *given)
    try:
        yield child
    finally:
        child.close()


def in_processes(count: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What ``work(line, number, *given)`` returns in processes that begin together: each calls ``line.wait()`` once."""
    children: list[Process] = []
    try:
        for number in range(count):
            children.append(Process(work, number, *given))
        for child in children:
            child._hear("ready")
        for child in children:
            child._connection.send(None)
        return [child.result() for child in children]
    finally:
        for child in children:
            child.close()


def _run(connection: Connection[Any, Any], work: Callable[..., object], given: tuple[Any, ...]) -> None:
    try:
        result = work(Line(connection), *given)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    else:
        connection.send(("done", result))
