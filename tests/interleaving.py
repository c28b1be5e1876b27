"""A scheduler of two threads: it stops one before its n-th opcode inside the package, lets the other run, and lets the first go on.

The other runs to its end, or until it waits for a lock that the first one holds. Opcodes are a finer grid than what the interpreter
switches at. Nothing waits for a time: locks say by themselves that somebody waits for them. What has no place here is the middle of
one opcode, where NumPy lets others run while it copies a large array.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

import sessiontree
from sessiontree.backends import segment_log
from sessiontree.locks import new_lock

PACKAGE = Path(sessiontree.__file__).parent
#: What touches anything that two threads see. Left out is what checks and plans before any of it (digests, media, positions), and
#: what fills a node that nobody has yet.
MODULES = (
    *("tokens", "node", "index", "tree", "session", "store", "draft", "prefixes", "query", "features", "heads"),
    *("journal", "stored", "backends/segment_log"),
)
UNDER_TEST = frozenset(str(PACKAGE / f"{name}.py") for name in MODULES)
PRIVATE = frozenset({"as_index", "in_range", "make_child", "token_bytes", "window", "_converted", "_make_room", "_readable"})
SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
Operation = Callable[[], Any]


class Wrong(AssertionError):
    """Something went wrong at one of the places."""


class Seen:
    """A lock that tells the scheduler when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = new_lock()

    def acquire(self, blocking: bool = True) -> bool:
        while not self._lock.acquire(blocking=False):
            if not blocking:
                return False
            assert Interleaving.current is not None, "somebody left with a lock"
            Interleaving.current.wait_for(self)
        return True

    def release(self) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@pytest.fixture
def seen_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of the scheduler's for all that is made during a test, and no garbage collector: it is the same run every time."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sessiontree.") and getattr(module, "new_lock", None) is new_lock:
            monkeypatch.setattr(module, "new_lock", Seen)
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


def under_test(code: CodeType) -> bool:
    """Whether a function is traced: those of the package, and bugs that tests plant."""
    if code.co_filename in UNDER_TEST:
        return code.co_name not in PRIVATE
    return code.co_name.startswith("broken_") and Path(code.co_filename).parent == Path(__file__).parent


class Gate(Seen):
    """A lock that another one lets go: who waits for the disk waits here."""

    def __init__(self) -> None:
        self._locked = False

    def acquire(self, blocking: bool = True) -> bool:
        while self._locked:
            if not blocking:
                return False
            assert Interleaving.current is not None, "nobody is there to let it go"
            Interleaving.current.wait_for(self)
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False

    def locked(self) -> bool:
        return self._locked

    def _is_owned(self) -> bool:
        return False


class Absent:
    """A thread that is never there: what it would do comes at no place that a test chose."""

    def __init__(self, **given: object) -> None: ...

    def start(self) -> None: ...

    def join(self) -> None: ...


def _give_way(seconds: float) -> None:
    """As sleeping: it is the other's turn."""
    if Interleaving.current is not None:
        Interleaving.current.give_way()


@pytest.fixture
def seen_disk(seen_locks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log waits where the scheduler sees it, and has no thread of its own."""
    waits = SimpleNamespace(Lock=Gate, Thread=Absent, Event=threading.Event)
    monkeypatch.setattr(segment_log, "threading", waits)
    monkeypatch.setattr(
        segment_log, "time", SimpleNamespace(sleep=_give_way, perf_counter=time.perf_counter, monotonic=time.monotonic)
    )


class Places:
    """A trace function that calls ``stop`` before the ``left``-th opcode under test, from 0, that its thread runs from here on.

    ``stop`` is given where that is, and says how many opcodes there are up to the next stop; None for no other.
    """

    def __init__(self, left: int, stop: Callable[[str], int | None]) -> None:
        self.left = left
        self.stop = stop
        sys._getframe().f_trace_opcodes = True  # from 3.12 on it takes one frame that has it before the trace is set
        sys.settrace(self.call)

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not under_test(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Places:
        if event == "opcode":
            if self.left:
                self.left -= 1
            else:
                left = self.stop(f"{frame.f_code.co_name}:{frame.f_lineno}")
                if left is None:
                    sys.settrace(None)
                else:
                    self.left = left
        return self


class Side:
    """One of the two threads: what it does, how many opcodes it has left in each of its turns, whether it may wait for a lock."""

    def __init__(self, call: Operation, turns: Sequence[int], may_wait: bool) -> None:
        self.call = call
        self.turns = list(turns)
        self.may_wait = may_wait
        self.stops: list[str] = []
        self.waits_for: Seen | None = None
        self.done = False
        self.error: BaseException | None = None
        self.awake = threading.Lock()
        self.awake.acquire()


class Interleaving:
    """Runs ``first`` and ``second`` by turns: ``turns`` opcodes of the first, of the second, of the first; then each to its end.

    ``switches``: how many turns came to their end before the operation did.
    """

    current: Interleaving | None = None
    _jobs: SimpleQueue[Callable[[], None]] | None = None

    def __init__(
        self, first: Operation, second: Operation, turns: Sequence[int], may_wait: tuple[bool, bool] = (True, True)
    ) -> None:
        self.sides = (Side(first, turns[::2], may_wait[0]), Side(second, turns[1::2], may_wait[1]))
        self.running = 0
        Interleaving.current = self
        try:
            self._start(partial(self._run, 1))
            self._run(0)
        finally:
            Interleaving.current = None
        self.switches = sum(len(side.stops) for side in self.sides)
        for side in self.sides:
            if side.error is not None:
                raise Wrong(f"{side.error!r}; {self}") from side.error

    def __str__(self) -> str:
        places = (f"{name} stopped at {', '.join(side.stops)}" for name, side in zip("AB", self.sides, strict=True) if side.stops)
        return "; ".join(places) or "no stop"

    @classmethod
    def _start(cls, job: Callable[[], None]) -> None:
        if cls._jobs is None:
            jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

            def work() -> None:
                while True:
                    jobs.get()()

            threading.Thread(target=work, daemon=True).start()
            cls._jobs = jobs
        cls._jobs.put(job)

    def _run(self, number: int) -> None:
        me, other = self.sides[number], self.sides[1 - number]
        if number:
            me.awake.acquire()
        before = sys.gettrace()
        try:
            if me.turns:
                Places(me.turns.pop(0), partial(self._stop, number))
            me.call()
        except BaseException as error:
            me.error = error
        finally:
            sys.settrace(before)
        me.done = True
        if number:
            self.running = 0
            other.awake.release()
            return
        while not other.done:
            self._switch(0)

    def _stop(self, number: int, place: str) -> int | None:
        me = self.sides[number]
        me.stops.append(place)
        self._switch(number)
        return me.turns.pop(0) if me.turns else None

    def _switch(self, number: int) -> None:
        """Let the other one run until it is my turn again."""
        me, other = self.sides[number], self.sides[1 - number]
        if other.done:
            return
        self.running = 1 - number
        other.awake.release()
        me.awake.acquire()

    def give_way(self) -> None:
        """The one that runs looks again later."""
        me = self.sides[self.running]
        assert me.may_wait, f"a reader waits, {self}"
        self._switch(self.running)

    def wait_for(self, lock: Seen) -> None:
        """The one that runs cannot have a lock: it is the other's turn."""
        number = self.running
        me, other = self.sides[number], self.sides[1 - number]
        assert me.may_wait, f"a reader waits for a lock, {self}"
        assert not other.done, "the other one left with a lock"
        assert other.waits_for is None or not other.waits_for._is_owned(), f"a deadlock, {self}"
        me.waits_for = lock
        self._switch(number)
        me.waits_for = None


class Run(NamedTuple):
    """Two operations on things made for them, and what has to be true afterwards."""

    first: Operation
    second: Operation
    check: Callable[[], None]


def at_every_place(make: Callable[[], Run], may_wait: tuple[bool, bool] = (True, True), step: int = 1) -> int:
    """Stop the first operation at each of its opcodes in turn, and run the whole second one there. How many there were.

    ``step``: at every so many of them, unless there is time.
    """
    for at in itertools.count(0, 1 if SOAK else step):
        run = make()
        done = Interleaving(run.first, run.second, [at], may_wait)
        _checked(run, done)
        if not done.switches:
            return at
    raise AssertionError


def at_every_two_places(make: Callable[[], Run], may_wait: tuple[bool, bool] = (True, True)) -> int:
    """Stop the first at each of its opcodes, then the second at each of its own; the first ends, then the second. How many pairs.

    Every fourth of both, unless there is time.
    """
    pairs, step = 0, 1 if SOAK else 4
    for at in itertools.count(0, step):
        for then in itertools.count(at // step % step, step):
            run = make()
            done = Interleaving(run.first, run.second, [at, then], may_wait)
            _checked(run, done)
            if done.switches < 2:
                break
            pairs += 1
        if not done.sides[0].stops:
            return pairs
    raise AssertionError


def _checked(run: Run, done: Interleaving) -> None:
    try:
        run.check()
    except BaseException as error:
        raise Wrong(f"{error!r}; {done}") from error
