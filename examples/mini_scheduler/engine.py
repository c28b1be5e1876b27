"""The scheduler on a thread of its own, and the few calls by which others reach it.

A request is handed over and told of by its ``tell``; the draft in it belongs to the engine from then on. Replies are committed on
this thread, under group commit, which waits for no disk; who answers a client flushes the store first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import attrs

from mini_scheduler.model import Model
from mini_scheduler.requests import Request
from mini_scheduler.scheduler import Counters, Scheduler
from sessiontree import LimitExceeded, SessionStore, SessionTreeError, StoreClosed

_logger = logging.getLogger("mini_scheduler")


@attrs.frozen
class EngineUsage:
    """What the engine holds by now, and what it has done. Pages that are ``cached`` are in nobody's use and can be found."""

    running: int
    waiting: int
    total_pages: int
    used_pages: int
    cached_pages: int
    encoder_bytes: int
    counters: Counters


class Engine:
    """Runs requests over a store's sessions. ``max_waiting``: those not admitted yet; ``options``: those of :class:`Scheduler`."""

    def __init__(self, store: SessionStore, model: Model, *, max_waiting: int = 256, **options: Any) -> None:
        self.model = model
        self._scheduler = Scheduler(store, model, **options)
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._arrived: list[Request] = []
        self._aborts = False
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="mini-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def submit(self, requests: Sequence[Request]) -> None:
        """Run these, or none. Raises QueueFull, LimitExceeded where one can never fit, StoreClosed after :meth:`close`."""
        for request in requests:
            self._scheduler.check_fits(request)
        with self._wake:
            if self._closing:
                raise StoreClosed("the engine is closed")
            self._check_room(len(requests))
            self._arrived += requests
            self._wake.notify()

    def check_room(self, count: int) -> None:
        """Whether the queue has room for so many requests by now. Raises QueueFull."""
        with self._wake:
            self._check_room(count)

    def _check_room(self, count: int) -> None:
        if len(self._scheduler.waiting) + len(self._arrived) + count > self._max_waiting:
            most = self._max_waiting
            raise QueueFull(f"the queue is full: {most} requests may wait, and {count} would come", value=count, limit=most)

    def abort(self, request: Request, reason: str = "aborted") -> None:
        """End a request; it is told so with its last output, unless it has ended by then. Any thread may call it."""
        with self._wake:
            request.aborted = reason
            self._aborts = True
            self._wake.notify()

    def close(self) -> None:
        """Take nothing more, end what runs, and wait for that."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def usage(self) -> EngineUsage:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return EngineUsage(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._arrived),
            total_pages=pool.num_pages,
            used_pages=pool.num_pages - pool.available,
            cached_pages=pool.cached,
            encoder_bytes=scheduler.encoder.held_bytes,
            counters=attrs.evolve(scheduler.counters, evicted_pages=pool.evicted),
        )

    def _loop(self) -> None:
        scheduler = self._scheduler
        while True:
            with self._wake:
                while not (self._arrived or self._aborts or scheduler.busy or self._closing):
                    self._wake.wait()
                scheduler.waiting.extend(self._arrived)
                self._arrived = []
                self._aborts = False
                closing = self._closing
            if closing:
                for request in (*scheduler.running, *scheduler.waiting):
                    request.aborted = request.aborted or "the server is shutting down"
            try:
                scheduler.step()
            except Exception as error:  # a fault of ours or the model's: those in this batch fail, the next ones run
                _logger.exception("a step failed")
                scheduler.fail(EngineFault(f"the engine failed: {type(error).__name__}"))
            if closing and not scheduler.busy:
                return


class EngineFault(SessionTreeError):
    """A step raised what it should not. Requests that it touched have ended; others go on."""


class QueueFull(LimitExceeded):
    """More requests than may wait. Later there is room again."""
