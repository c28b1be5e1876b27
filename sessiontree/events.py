"""What happens in a store, told to whoever listens: events, the feed that writers put them into, and subscriptions.

A writer puts a batch of events into the feed's inbox in the same step in which it shows the change, under its session's lock: so
events of one session stand there in the order in which its changes became visible. Then it passes on what is in the inbox, unless
another thread is at it, which will then find this batch too: no writer ever waits here, and all subscriptions see one order.

One thread at a time passes on, under the feed's lock, which whoever reads takes too. A signal handler or finalizer that comes in
there leaves its batch in the inbox. A batch is taken out when every subscription has it, and each knows the last one that it took:
what an interrupt left half told is told to the others the next time, and to nobody twice. What a subscription has no room for it
counts, and says so where it would have stood.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args
from weakref import WeakSet, ref

from sessiontree.errors import OutOfRange, StoreClosed, Unsupported
from sessiontree.locks import new_lock
from sessiontree.node import Origin
from sessiontree.tokens import as_index

_logger = logging.getLogger(__name__)

T = TypeVar("T")

Kind = Literal[
    "session_opened",
    "session_closed",
    "node_committed",
    "branch_ended",
    "head_moved",
    "nodes_dropped",
    "evicted",
    "expired",
    "lost",
]
KINDS: Final[frozenset[str]] = frozenset(get_args(Kind))

DEFAULT_CAPACITY: Final = 65_536


class Event(NamedTuple):
    """One thing that happened. What its kind does not need is None.

    There is one type for all kinds: it is a flat tuple of plain values, so it is cheap to make, holds no node and no session, goes
    through ``pickle`` and into a log as it is, and a router that looks at ``kind`` first needs no other.

    =================  =======================================================================================================
    kind               what it says
    =================  =======================================================================================================
    session_opened     ``node_id``, ``depth``: its root, or the node it was forked at; ``count``: the nodes it has, that one among
                       them, of which no other event tells
    session_closed     this incarnation has ended
    node_committed     a node is visible: ``node_id``, ``parent_id``, ``depth``, path tokens ``[start, stop)``, ``origin``
    branch_ended       no turn is to come at ``node_id`` or below it, see :meth:`Session.branch_done`; ``depth``
    head_moved         ``head`` is at ``node_id`` by now, as of ``version``; None: it was dropped
    nodes_dropped      ``node_id`` and all below it are forgotten; of a root: the session is
    evicted            it left memory for the disk and comes back on first use; ``nbytes`` were held
    expired            it lay idle for too long, and is closed
    lost               ``count`` events that stood here had no room
    =================  =======================================================================================================

    ``session_id``: "" for lost. ``incarnation``: as of :attr:`Session.incarnation`; 0 of a session that is not open, and for lost.
    """

    kind: Kind
    session_id: str
    incarnation: int
    node_id: bytes | None = None
    parent_id: bytes | None = None
    depth: int | None = None
    start: int | None = None
    stop: int | None = None
    origin: Origin | None = None
    head: str | None = None
    version: int | None = None
    count: int | None = None  # type: ignore[assignment]  # it hides what tuples have of that name
    nbytes: int | None = None


#: The fields of an event. Writers make no more than that: it takes a third of the time, and the garbage collector leaves it alone.
Fields = tuple[Any, ...]
Batch = tuple[Fields, ...]


class Sink(Protocol):
    """Who is told. Of both calls none raises, and none waits."""

    @property
    def kinds(self) -> frozenset[str]: ...

    def _take(self, batch: Batch) -> None:
        """Take a batch, once; the feed's lock is held."""

    def _wake(self) -> None:
        """Something has come that was waited for, or nothing more will; no lock is held for it."""

    def _end(self) -> None:
        """Nothing more will come; the feed's lock is held."""


class Meter(Protocol):
    """Who measures. ``now``: a clock, in seconds."""

    now: Callable[[], float]

    def appended(self, begun: float) -> None: ...

    def committed(self, begun: float) -> None: ...

    def opened_draft(self) -> None: ...

    def closed_draft(self, how: str) -> None: ...


class Feed:
    """Where the writers of one store put what they did. ``wanted``: the kinds that somebody takes; empty: nobody listens.

    ``put``: takes a batch, which is no empty one and was never put before, in one step that nothing interrupts. ``meter``: who
    measures, if anybody does. ``lost``: how many events had no room so far, in all subscriptions.
    """

    __slots__ = ("__weakref__", "_closed", "_inbox", "_leader", "_lock", "_sinks", "due", "lost", "meter", "put", "wanted")

    def __init__(self) -> None:
        self._inbox: deque[Batch] = deque()
        self.put: Callable[[Batch], None] = self._inbox.append
        self._lock = new_lock()
        # The thread that passes on or reads, for writers to leave it to that one. The lock is what counts: without a GIL, two
        # that look at the same time may wait for each other for as long as one takes.
        self._leader = 0
        self._sinks: tuple[ref[Any], ...] = ()
        self._closed = False
        self.due: bool = False  # some sink may have to be woken
        self.wanted: frozenset[str] = frozenset()
        self.meter: Meter | None = None
        self.lost: int = 0
        _feeds.add(self)

    @property
    def leading(self) -> bool:
        """Whether this thread is in the middle of telling or reading."""
        return bool(self._lock._is_owned())

    def tell(self, event: Event) -> None:
        """Put one event, if anybody wants it. Whoever holds a lock calls :meth:`pass_on` when it has let go of it."""
        if event.kind in self.wanted:
            self.put((tuple(event),))

    def pass_on(self) -> None:
        """Have all that was put told, by this thread or by the one that is at it. Waits for nobody, raises nothing."""
        me = get_ident()
        while self._inbox and not self._leader:  # whoever led a moment ago may have missed what was put then
            claimed = False
            try:
                claimed, self._leader = True, me
                with self._lock:
                    self._leader = me
                    self._drain()
            finally:
                if claimed:
                    self._leader = 0
            if self.due:
                self._wake()

    def alone(self, work: Callable[[], T]) -> T:
        """Do something while nobody passes anything on, when all is told that was put before."""
        if self.leading:  # a signal handler came in there
            return work()
        me = get_ident()
        try:
            with self._lock:
                try:
                    self._leader = me
                    self._drain()
                    return work()
                finally:
                    self._leader = 0
        finally:
            if self.due:
                self._wake()
            self.pass_on()

    def add(self, sink: Sink) -> None:
        """Tell a sink too, of all that is put from now on. It is held weakly. Raises StoreClosed."""

        def add() -> None:
            if self._closed:
                raise StoreClosed("this store is closed")
            self._set((*self._sinks, ref(sink)))

        self.alone(add)

    def remove(self, sink: Sink) -> None:
        """Tell a sink nothing any more."""

        def remove() -> None:
            sink._end()
            self._set(tuple(each for each in self._sinks if each() is not sink))

        self.alone(remove)
        sink._wake()

    def close(self) -> None:
        """There is nothing more to tell."""

        def close() -> list[Sink]:
            self._closed = True
            ended = [sink for each in self._sinks if (sink := each()) is not None]
            for sink in ended:
                sink._end()
            self._set(())
            return ended

        for sink in self.alone(close):
            sink._wake()

    def _drain(self) -> None:
        """Tell what is in the inbox; the lock is held."""
        inbox, dead = self._inbox, False
        while inbox:
            batch = inbox[0]
            for each in self._sinks:
                sink = each()
                if sink is None:
                    dead = True
                else:
                    sink._take(batch)
            inbox.popleft()
        if dead:
            self._set(tuple(each for each in self._sinks if each() is not None))

    def _set(self, sinks: tuple[ref[Any], ...]) -> None:
        found = [sink for each in sinks if (sink := each()) is not None]
        self._sinks, self.wanted = sinks, frozenset().union(*(sink.kinds for sink in found))

    def _wake(self) -> None:
        done = False
        try:
            self.due = False
            for each in self._sinks:
                if (sink := each()) is not None:
                    sink._wake()
            done = True
        finally:
            if not done:
                self.due = True


_feeds: Final[WeakSet[Feed]] = WeakSet()


def _no_leaders() -> None:
    for feed in list(_feeds):
        if feed._leader != get_ident():  # it does not exist here
            feed._leader = 0


os.register_at_fork(after_in_child=_no_leaders)


class Subscription:
    """Events of a store, in order, from the moment on that it was made. Made by ``SessionStore.subscribe``.

    ``capacity``: the most events that wait to be read. The store holds it weakly: whoever drops it is told nothing more. Any thread
    may read; each event goes to one of them. After ``close``, or that of its store, what is there can still be read.
    """

    __slots__ = (
        "__weakref__",
        "_armed",
        "_closed",
        "_due",
        "_feed",
        "_gates",
        "_last",
        "_lost",
        "_notify",
        "_queue",
        "_waking",
        "capacity",
        "kinds",
    )

    capacity: int
    kinds: frozenset[str]

    def __init__(self, feed: Feed, capacity: int, kinds: frozenset[str], notify: Callable[[], object] | None) -> None:
        self.capacity = capacity
        self.kinds = kinds
        self._feed = feed
        self._notify = notify
        self._queue: deque[Fields] = deque()
        self._lost = 0  # behind what is in the queue
        self._last: Batch = ()  # that it took
        self._armed = True  # nothing is there
        self._due = False  # something has come since, and nobody was woken for it yet
        self._waking = new_lock()
        self._gates: list[Any] = []  # of threads that wait
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def poll(self, limit: int | None = None) -> list[Event]:
        """The next events, at most ``limit``, taken out; those that are there, maybe none. Raises OutOfRange for a negative limit.

        It waits for no event, only for the moment in which another thread tells or takes some. A signal handler that comes in there
        gets what was told by then.
        """
        if limit is not None and as_index(limit, "limit") < 0:
            raise OutOfRange(f"a limit of {limit} events", value=limit, limit=0)
        return list(map(Event._make, self._feed.alone(lambda: self._taken(limit))))

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until something can be polled, for at most ``timeout`` seconds: whether something can be.

        False: the time is over, nothing more will come, or another thread was quicker to poll it. Raises Unsupported in a signal
        handler that comes in while its own thread is telling or reading.
        """
        if timeout is not None and not timeout >= 0:
            raise OutOfRange(f"a timeout of {timeout} seconds", value=timeout, limit=0)
        if self._feed.leading:
            raise Unsupported("a signal handler that comes in while its thread tells or reads events cannot wait for them")
        gate = threading.Lock()
        gate.acquire()
        try:
            if self._feed.alone(lambda: self._gated(gate)):
                gate.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._feed.alone(lambda: self._ungated(gate))
        return bool(self._queue or self._lost)

    def close(self) -> None:
        """Be told nothing any more."""
        self._feed.remove(self)

    def __iter__(self) -> Iterator[Event]:
        """All events, each waited for, until it is closed and all are read."""
        while True:
            if events := self.poll(1):
                yield events[0]
            elif self._closed:
                if not (events := self.poll()):  # what came before it was closed, and after the last look
                    return
                yield from events
            else:
                self.wait()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a subscription is one; a copy would be told nothing")

    def __repr__(self) -> str:
        lost = f", {self._lost} lost behind them" if self._lost else ""
        return f"<Subscription {'closed' if self._closed else 'open'}: {len(self._queue)} of {self.capacity} events{lost}>"

    # The feed's lock is held from here on. A signal handler may still come in, and read or close.

    def _take(self, batch: Batch) -> None:
        if self._last is batch:
            return
        kinds = self.kinds
        events = batch if kinds is KINDS else tuple([event for event in batch if event[0] in kinds])
        if not events:
            return
        while True:
            queue, missing = self._queue, self._lost
            room = self.capacity - len(queue)
            kept, more, left = events, 0, 0
            if missing or len(events) > room:
                mark = (lost(missing),) if missing else ()
                some = events[: max(0, room - len(mark))]
                more = len(events) - len(some)
                kept, left = ((*mark, *some), more) if some else ((), missing + more)
            add, feed = queue.extend, self._feed
            if self._queue is queue and self._lost == missing:  # from here to the call nothing comes in between
                self._last = batch
                self._lost = left
                feed.lost += more
                if self._armed:
                    self._armed, self._due, feed.due = False, True, True
                add(kept)
                return

    def _taken(self, limit: int | None) -> list[Fields]:
        if limit is None or limit > len(self._queue) or (limit == len(self._queue) and not self._lost):
            fresh: deque[Fields] = deque()
            queue, missing = self._queue, self._lost  # in these three lines nothing comes in between
            self._queue = fresh
            self._lost, self._armed = 0, True
            return [*queue, lost(missing)] if missing else list(queue)
        events: list[Fields] = []
        while len(events) < limit and self._queue:
            events.append(self._queue.popleft())
        return events

    def _gated(self, gate: Any) -> bool:
        """Whether there is something to wait for: then it is, at this gate."""
        if self._queue or self._lost or self._closed:
            return False
        self._gates.append(gate)
        return True

    def _ungated(self, gate: Any) -> None:
        if gate in self._gates:
            self._gates.remove(gate)

    def _end(self) -> None:
        self._due = self._due or not self._closed
        self._closed = True
        self._open_gates()

    # None is held here.

    def _wake(self) -> None:
        claimed = False
        try:
            with self._waking:
                if self._due:
                    claimed, self._due = True, False
            if claimed:
                self._open_gates()
                notify = self._notify
                claimed = False
                if notify is not None:
                    notify()
        except Exception:
            _logger.exception("a subscription's notify raised")
        finally:
            if claimed:  # an interrupt came in between
                self._due = True

    def _open_gates(self) -> None:
        for gate in tuple(self._gates):
            try:  # noqa: SIM105  # as in SegmentLog._wake
                gate.release()
            except RuntimeError:  # it was open
                pass


def lost(count: int) -> Fields:
    """That so many events are missing here."""
    return tuple(Event("lost", "", 0, count=count))


def checked_kinds(kinds: Iterable[str] | None) -> frozenset[str]:
    """Kinds that somebody wants, and "lost" in any case; None: all. Raises TypeError, Unsupported for what is none."""
    if kinds is None:
        return KINDS
    if isinstance(kinds, str):
        raise TypeError("kinds are several names, not a str")
    wanted = frozenset(kinds) | {"lost"}
    if unknown := sorted(map(str, wanted - KINDS)):
        raise Unsupported(f"no kind of event is {', '.join(unknown)}; there are {', '.join(sorted(KINDS))}")
    return wanted


def checked_capacity(capacity: int) -> int:
    """Raises TypeError, OutOfRange below 1."""
    if as_index(capacity, "capacity") < 1:
        raise OutOfRange(f"a capacity of {capacity} events, below 1", value=capacity, limit=1)
    return capacity
