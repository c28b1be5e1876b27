"""An asyncio front over a store: what may touch the disk is awaited, and the loop never waits for it.

An :class:`AsyncStore` and its :class:`AsyncSession` have the operations of the store and the session that they are fronts of, under
the same names. What touches no disk is done on those directly: ``session.session.tree``, nodes, the tokens of drafts.

An operation runs on one of a few threads. Those of one session run one after the other, in the order in which they were begun,
whoever began them. Where a change is to be durable before anybody sees it, a thread only hands it over; one thread waits for all
that was handed over, so many waiting tasks share each sync and hold no thread. In a store in memory there is nothing to wait for:
there the operation runs where it is awaited.

Whoever stops waiting (a cancelled task, a timeout, a loop that is closed) undoes nothing: the operation goes on, and what it did is
there. What it raises then goes to the log of this module, ``logging.getLogger("sessiontree.aio")``.

Nothing here belongs to a loop: tasks of several loops, in several threads, may use one store, beside threads that use it directly.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from sessiontree.details import TailPolicy
from sessiontree.draft import Draft
from sessiontree.errors import StoreClosed
from sessiontree.events import DEFAULT_CAPACITY, Event, Kind, Subscription
from sessiontree.heads import UNSET, Head
from sessiontree.journal import Wait, waits_handed_over
from sessiontree.locks import new_lock
from sessiontree.node import Node
from sessiontree.session import Session
from sessiontree.store import SessionStore

__all__ = ["AsyncSession", "AsyncStore", "AsyncSubscription"]

P = ParamSpec("P")
R = TypeVar("R")
Async = Coroutine[Any, Any, R]

_THREADS: Final = 8
_TURN: Final = 32  # operations of one lane that a thread does before it looks after other lanes
_STORE: Final = object()  # the lane of what is of the whole store
_log: Final = logging.getLogger(__name__)


class _Operation(Generic[R]):
    """One call under way. It goes on, whatever becomes of who waits for it.

    ``then``: what is to be waited for once the call has returned, beside what it hands over. ``undo``: called where that fails.
    """

    __slots__ = ("_abandoned", "_call", "_errors", "_future", "_result", "_then", "_undo", "_what", "loop", "waits")

    def __init__(self, call: Callable[[], R], what: str, then: Wait | None = None, undo: Callable[[], None] | None = None) -> None:
        self._call: Callable[[], R] | None = call
        self._what = what
        self._then = then
        self._undo = undo
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self.loop.create_future()
        self._result: R | None = None
        self._errors: list[BaseException] = []  # what it raised, until somebody takes it
        self._abandoned = False
        self.waits: list[Wait] = []

    def run(self) -> None:
        """On one of the threads."""
        call, self._call = self._call, None
        assert call is not None
        with waits_handed_over() as self.waits:
            try:
                self._result = call()
            except BaseException as error:
                self._errors.append(error)
        del call  # an error is not to hold what the call was given
        if self._then is not None and not self._errors:
            self.waits.append(self._then)

    def settle(self, durable: set[Wait]) -> None:
        """Wait for what was handed over, but for what is known to be durable."""
        for wait in self.waits:
            if wait in durable:
                continue
            try:
                anew = wait()
                if anew is not None and isinstance(self._result, Head):  # its version is another; nodes are what they were
                    self._result = anew.result
            except BaseException as error:
                if self._undo is not None and not self._errors:
                    self._undo()
                self._errors = self._errors or [error]
            else:
                durable.add(wait)

    def arrive(self) -> None:
        """On its loop, once it has ended."""
        if not self._future.done():
            self._future.set_result(None)

    async def outcome(self) -> R:
        """What it returned. Raises what it raised."""
        try:
            await self._future
        except BaseException:  # cancelled, or thrown away with its loop
            self.abandon()
            raise
        if self._errors:
            raise self._errors.pop()
        return self._result  # type: ignore[return-value]  # it returned

    def abandon(self) -> None:
        """Nobody waits for it from now on."""
        self._abandoned = True
        self.report()

    def report(self) -> None:
        """Where nobody waits, the error it ended with is not lost. Whichever of the two comes last, its end or that, finds it."""
        if not self._abandoned:
            return
        try:
            error = self._errors.pop()
        except IndexError:
            return
        _log.error("%s failed, and nobody waited for it any more: %s", self._what, error, exc_info=error)


class _Threads:
    """A few threads that operations run on. Those of one lane run one after the other, in the order they were begun."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "sessiontree-aio")
        self._lock = new_lock()  # never held over a call of an operation
        self._under_way: set[_Operation[Any]] = set()
        self._lanes: dict[object, deque[_Operation[Any]]] = {}  # none is empty
        self._handed: list[_Operation[Any]] = []  # whose waits were handed over
        self._settling = False
        self._ended: dict[asyncio.AbstractEventLoop, list[_Operation[Any]]] = {}  # that a loop has yet to be told of
        self._closing = False
        self._idle = threading.Event()  # closing, and nothing is under way
        self._shutting = new_lock()

    async def do(
        self,
        call: Callable[[], R],
        what: str,
        lane: object = None,
        then: Wait | None = None,
        undo: Callable[[], None] | None = None,
    ) -> R:
        """Begin an operation and wait for it. ``lane`` None: it is in no order."""
        operation = _Operation(call, what, then, undo)
        with self._lock:
            if self._closing:
                raise StoreClosed("this store is closed")
            queue = self._lanes.get(lane)
            if queue is not None:
                queue.append(operation)
            elif lane is not None:
                self._lanes[lane] = deque((operation,))
            self._under_way.add(operation)
        if lane is None:
            self._pool.submit(self._run, operation)
        elif queue is None:
            self._pool.submit(self._take_turn, lane)
        return await operation.outcome()

    def _take_turn(self, lane: object) -> None:
        queue = self._lanes[lane]  # only who does its operations takes it away
        for _ in range(_TURN):
            self._run(queue[0])
            with self._lock:
                queue.popleft()
                if not queue:
                    del self._lanes[lane]
                    return
        self._pool.submit(self._take_turn, lane)

    def _run(self, operation: _Operation[Any]) -> None:
        operation.run()
        if not operation.waits:
            self._end((operation,))
            return
        with self._lock:
            self._handed.append(operation)
            settling, self._settling = self._settling, True
        if not settling:
            self._pool.submit(self._settle)

    def _settle(self) -> None:
        """Wait for what was handed over, all there is at a time: what was put in line together is written together."""
        while True:
            with self._lock:
                operations, self._handed = self._handed, []
                if not operations:
                    self._settling = False
                    return
            durable = set[Wait]()
            for operation in operations:
                operation.settle(durable)
            self._end(operations)

    def _end(self, operations: Sequence[_Operation[Any]]) -> None:
        """Tell those who wait. A loop is woken once for all that has ended since it looked."""
        for operation in operations:
            operation.report()
        with self._lock:
            to_wake = {operation.loop for operation in operations if operation.loop not in self._ended}
            for operation in operations:
                self._ended.setdefault(operation.loop, []).append(operation)
            to_wake.update(loop for loop in self._ended if loop.is_closed())
        for loop in to_wake:
            try:
                loop.call_soon_threadsafe(self._tell, loop)
            except RuntimeError:  # it is closed, so nobody waits there
                self._forget(loop)
        with self._lock:
            self._under_way.difference_update(operations)
            if self._closing and not self._under_way:
                self._idle.set()

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop, [])
        for operation in ended:
            operation.arrive()

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            ended = self._ended.pop(loop, [])
        for operation in ended:
            operation.abandon()

    def close(self, last: Callable[[], None]) -> _Operation[None]:
        """Take nothing new, let all that is under way come to its end, do the last thing, and end the threads."""

        def shut() -> None:
            self._idle.wait()
            with self._shutting:
                try:
                    last()
                finally:
                    self._pool.shutdown()

        operation = _Operation(shut, "close")
        with self._lock:
            self._closing = True
            if not self._under_way:
                self._idle.set()
        threading.Thread(target=self._run, args=(operation,), name="sessiontree-aio-close").start()
        return operation


def _in_order(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[AsyncSession, P], Async[R]]:
    """An operation of a session, after those that were begun on it before."""

    @wraps(method)
    async def operation(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._do(partial(method, self.session, *args, **kwargs), method.__name__)

    return operation


def _reading(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[AsyncSession, P], Async[R]]:
    """What may read nodes from the disk, and waits for no operation."""

    @wraps(method)
    async def operation(self: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.session, *args, **kwargs) if self._in_memory else await self.run(method, *args, **kwargs)

    return operation


def _of_store(
    method: Callable[Concatenate[SessionStore, P], R], lane: object = None
) -> Callable[Concatenate[AsyncStore, P], Async[R]]:
    """An operation of a store."""

    @wraps(method)
    async def operation(self: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._threads.do(partial(method, self.store, *args, **kwargs), method.__name__, lane)

    return operation


def _opening(method: Callable[Concatenate[SessionStore, P], Session]) -> Callable[Concatenate[AsyncStore, P], Async[AsyncSession]]:
    """An operation of a store that gives a session, after those that were begun on a session of that id before."""

    @wraps(method)
    async def operation(self: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        session_id = args[0] if args else kwargs.get("session_id")
        return await self._open(partial(method, self.store, *args, **kwargs), method.__name__, session_id)

    return operation


class AsyncSession:
    """A front of ``session``: its operations, awaited. Made by an :class:`AsyncStore`; two of one session are as good as one."""

    __slots__ = ("_store", "session")

    def __init__(self, session: Session, store: AsyncStore) -> None:
        self.session: Session = session
        self._store = store

    append: Final = _in_order(Session.append)
    draft: Final = _in_order(Session.draft)
    adopt: Final = _in_order(Session.adopt)
    record: Final = _in_order(Session.record)
    truncate: Final = _in_order(Session.truncate)
    drop_last: Final = _in_order(Session.drop_last)
    replace: Final = _in_order(Session.replace)
    rewrite: Final = _in_order(Session.rewrite)
    linearize: Final = _in_order(Session.linearize)
    annotate: Final = _in_order(Session.annotate)
    set_head: Final = _in_order(Session.set_head)
    drop_head: Final = _in_order(Session.drop_head)
    pin: Final = _in_order(Session.pin)
    unpin: Final = _in_order(Session.unpin)
    drop: Final = _in_order(Session.drop)
    close: Final = _in_order(Session.close)
    refresh: Final = _in_order(Session.refresh)

    node: Final = _reading(Session.node)
    children: Final = _reading(Session.children)
    siblings: Final = _reading(Session.siblings)
    leaves: Final = _reading(Session.leaves)
    longest_prefix: Final = _reading(Session.longest_prefix)
    validate: Final = _reading(Session.validate)
    annotations: Final = _reading(Session.annotations)
    annotation: Final = _reading(Session.annotation)
    annotation_of_each: Final = _reading(Session.annotation_of_each)
    token_values: Final = _reading(Session.token_values)
    spans: Final = _reading(Session.spans)

    async def commit(
        self,
        draft: Draft,
        finish_reason: str = "stop",
        length: int | None = None,
        tail_policy: TailPolicy = "keep",
        *,
        metadata: Mapping[str, Any] | None = None,
        head: str | None = None,
        expected: Head | Node | bytes | None = UNSET,
        annotations: Mapping[str, Any] | None = None,
    ) -> Node:
        """Commit a draft of this session. See :meth:`Draft.commit`. Until this raises, the draft is to be left alone."""
        if not isinstance(draft, Draft):
            raise TypeError(f"a Draft is committed, not {type(draft).__name__}")
        reopen = partial(draft._reopen, draft._host)
        commit = partial(draft.commit, finish_reason, length, tail_policy, metadata=metadata, head=head, expected=expected)
        commit = partial(commit, annotations=annotations)
        return await self._do(commit, "commit", undo=reopen)

    async def abort(self, draft: Draft) -> None:
        """Give a draft of this session up. See :meth:`Draft.abort`, which may wait for who writes to the session."""
        await self._do(draft.abort, "abort")

    async def hand_over(self, draft: Draft, *, with_path: bool = False) -> bytes:
        """Close a draft here, to go on elsewhere. See :meth:`Draft.hand_over`."""
        return await self._do(partial(draft.hand_over, with_path=with_path), "hand_over")

    async def head(self, name: str) -> Head:
        """A head with its version, its node read. Raises UnknownHead, CorruptTree."""
        return await self.run(_head_of, name)

    async def heads(self) -> dict[str, Node]:
        """Named nodes, all of them read. Raises CorruptTree."""
        return await self.run(lambda session: dict(session.heads))

    async def flush(self) -> None:
        """Wait until all that was begun on this session before, and all that any has written, is on disk."""
        await self._do(_nothing, "flush", then=self._store.store.flush)

    async def run(self, function: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(session, ...)`` on a thread, in no order: for whatever else may touch the disk."""
        return await self._store._threads.do(partial(function, self.session, *args, **kwargs), _named(function))

    @property
    def _in_memory(self) -> bool:
        return self._store._in_memory

    async def _do(self, call: Callable[[], R], what: str, then: Wait | None = None, undo: Callable[[], None] | None = None) -> R:
        if self._in_memory:
            return call()
        session_id = self.session.id
        return await self._store._threads.do(call, f"{what} of session {session_id!r}", session_id, then, undo)

    def __repr__(self) -> str:
        return f"<AsyncSession of {self.session!r}>"


class AsyncSubscription:
    """Events of a store from the moment on that it was made, awaited one by one. Made by :meth:`AsyncStore.subscribe`.

    It ends when it or its store is closed and all events are read. ``subscription``: what it is a front of. It belongs to the
    loop on which it was made.
    """

    __slots__ = ("_events", "_there", "subscription")

    def __init__(self, store: SessionStore, capacity: int, kinds: Iterable[Kind] | None) -> None:
        loop, there = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(there.set)

        self._there = there
        self._events: deque[Event] = deque()
        self.subscription: Subscription = store.subscribe(capacity, kinds, notify=notify)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            self._there.clear()
            closed = self.subscription.closed
            self._events.extend(self.subscription.poll())
            if not self._events:
                if closed:
                    raise StopAsyncIteration
                await self._there.wait()
        return self._events.popleft()

    def close(self) -> None:
        """Be told nothing any more."""
        self.subscription.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _opened(method: Callable[P, SessionStore]) -> Callable[Concatenate[type[AsyncStore], P], Async[AsyncStore]]:
    """A store that is opened on a thread; where nobody waits for it any more, it is closed again."""

    @wraps(getattr(method, "__func__", method))  # with its class as the first argument, as this has
    async def operation(cls: type[AsyncStore], /, *args: P.args, **kwargs: P.kwargs) -> AsyncStore:
        threads, found = _Threads(_THREADS), list[SessionStore]()

        def close() -> None:
            for store in found:
                store.close()

        try:
            await threads.do(lambda: found.append(method(*args, **kwargs)), "open")
        except BaseException:
            threads.close(close).abandon()
            raise
        return cls(found[0], threads)

    return operation


class AsyncStore:
    """A front of ``store``: its operations, awaited. As a context manager it closes on exit.

    Others may use the store itself at the same time; to close it belongs to this.
    """

    __slots__ = ("_in_memory", "_threads", "store")

    def __init__(self, store: SessionStore, threads: int | _Threads = _THREADS) -> None:
        """``threads``: how many operations can be at the disk at a time. How many wait for a sync has no limit."""
        self.store: SessionStore = store
        self._in_memory = store._journal is None
        self._threads = _Threads(threads) if isinstance(threads, int) else threads

    open: Final = classmethod(_opened(SessionStore.open))
    connect: Final = classmethod(_opened(SessionStore.connect))

    create: Final = _opening(SessionStore.create)
    get: Final = _opening(SessionStore.get)

    async def fork(self, session: AsyncSession | Session, node: Node | bytes, new_session_id: str) -> AsyncSession:
        """A session that holds the path of ``node``. See :meth:`SessionStore.fork`."""
        source = session.session if isinstance(session, AsyncSession) else session
        return await self._open(partial(self.store.fork, source, node, new_session_id), "fork", new_session_id)

    async def drop(self, session_id: str) -> None:
        """Forget a session and close it, after what was begun on it before. See :meth:`SessionStore.drop`."""
        await self._threads.do(partial(self.store.drop, session_id), f"drop of session {session_id!r}", session_id)

    tick: Final = _of_store(SessionStore.tick, _STORE)
    alias_media: Final = _of_store(SessionStore.alias_media, _STORE)
    drop_alias: Final = _of_store(SessionStore.drop_alias, _STORE)

    adopt: Final = _of_store(SessionStore.adopt)
    sessions: Final = _of_store(SessionStore.sessions)
    gc: Final = _of_store(SessionStore.gc)
    evict: Final = _of_store(SessionStore.evict)
    put_features: Final = _of_store(SessionStore.put_features)
    get_features: Final = _of_store(SessionStore.get_features)
    drop_features: Final = _of_store(SessionStore.drop_features)
    aliased_media: Final = _of_store(SessionStore.aliased_media)

    def subscribe(self, capacity: int = DEFAULT_CAPACITY, kinds: Iterable[Kind] | None = None) -> AsyncSubscription:
        """Be told what happens in the store from now on, in order. See :meth:`SessionStore.subscribe`."""
        return AsyncSubscription(self.store, capacity, kinds)

    async def flush(self) -> None:
        """Wait until all that any session has written is on disk. See :meth:`SessionStore.flush`."""
        await self._threads.do(_nothing, "flush", then=self.store.flush)

    async def run(self, function: Callable[Concatenate[SessionStore, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(store, ...)`` on a thread, in no order: for whatever else may touch the disk."""
        return await self._threads.do(partial(function, self.store, *args, **kwargs), _named(function))

    async def close(self) -> None:
        """Take no more calls, let all that is under way come to its end, and close the store. Again: wait for that, once more."""
        await self._threads.close(self.store.close).outcome()

    async def _open(self, call: Callable[[], Session], what: str, session_id: object) -> AsyncSession:
        what = f"{what} of session {session_id!r}"
        return AsyncSession(call() if self._in_memory else await self._threads.do(call, what, session_id), self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncStore of {self.store!r}>"


def _head_of(session: Session, name: str) -> Head:
    head = session.head(name)
    _ = head.node  # which it keeps, once it was read
    return head


def _nothing() -> None: ...


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
