"""What other processes do to a backend that a test looks at. Each connects anew: nothing is carried over a fork."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from sessiontree.backends.shared import Change, NewSession
from tests.backend_writing import Connect, commit, looked, merged, node, nodes, noise, since_of

SPAWN: Final = multiprocessing.get_context("spawn")


def appended(connect: Connect, number: int, versions: int, who: bytes) -> list[int]:
    """Add one node a version, beside others, until there are so many versions: those that were won here."""
    backend = connect()
    won = []
    look = looked(backend, number)
    while look.version < versions:
        version = look.version
        if commit(backend, Change(number, version, version + 1, [node(version + 1, who)], {b"last": b"%d" % (version + 1)})):
            won.append(version)
        look = merged(look, looked(backend, number, since_of(look)))
        assert look.version > version  # mine, or that of whoever was first
        assert (len(look.nodes), look.refs[b"last"]) == (look.version, b"%d" % look.version)
    backend.close()
    return won


def created(connect: Connect, names: Sequence[str], who: bytes) -> list[str]:
    """Make sessions that others make too: the names that were made here."""
    backend = connect()
    mine = []
    for name in names:
        (number,) = backend.sessions.draw(1)
        outcome = backend.sessions.create(NewSession(number, name, None, who, [node(1, who)]))
        assert outcome in ("made", "taken")
        assert list(backend.nodes.read(number, [1])) == [who if outcome == "made" else None]
        if outcome == "made":
            mine.append(name)
    backend.close()
    return mine


def drawn(connect: Connect, times: int, _: bytes) -> list[int]:
    """Draw numbers, one to three at a time: all of them."""
    backend = connect()
    numbers = [number for time in range(times) for number in backend.sessions.draw(1 + time % 3)]
    backend.close()
    return numbers


def write_until_killed(connect: Connect, number: int, told: Connection) -> None:
    """Twenty nodes and a ref a version; ``told`` of each that was acknowledged."""
    backend = connect()
    version = looked(backend, number).version
    while True:
        some = nodes(20 * version + 1, 20 * version + 20, noise(2000))
        assert commit(backend, Change(number, version, version + 1, some, {b"version": b"%d" % (version + 1)}))
        version += 1
        told.send(version)


_together: Any = None  # a barrier, in processes of the pool


def _begin(barrier: Any) -> None:
    global _together  # noqa: PLW0603
    _together = barrier


def _at_once(work: Callable[[], Any]) -> Any:
    _together.wait()
    return work()


class Processes:
    """Some processes that begin together."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(count, SPAWN, _begin, (SPAWN.Barrier(count),))

    def __call__(self, work: Callable[..., Any], *values: Any) -> list[Any]:
        """What each made of ``work(*values, who)``, ``who`` being a number for each."""
        running = [self._pool.submit(_at_once, partial(work, *values, b"process %d" % who)) for who in range(self.count)]
        return [each.result() for each in running]

    def close(self) -> None:
        self._pool.shutdown()
