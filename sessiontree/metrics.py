"""Prometheus metrics of a store: what it holds is read when it is scraped, what happens in it is counted as it happens.

The one module that reads a clock, to measure. A store that has no :class:`StoreMetrics` counts and measures nothing. Needs
prometheus-client, which is imported when one is made: ``pip install 'sessiontree[metrics]'``.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, get_args
from weakref import ref

import numpy as np

from sessiontree.draft import HowClosed
from sessiontree.errors import NeedsExtra, Unsupported
from sessiontree.events import Batch
from sessiontree.locks import new_lock
from sessiontree.store import SessionStore

BUCKETS: Final = (
    1e-6,
    2e-6,
    5e-6,
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    1e-2,
    2e-2,
    5e-2,
    0.1,
    1.0,
    10.0,
)  # seconds
_AT_ONCE: Final = 1024  # observations that are sorted into buckets together


class StoreMetrics:
    """A collector of one store's metrics, registered until it is closed. The store is held weakly.

    ``registry``: prometheus_client's own by default; two stores need two. Counters count from here on. Names, labels and units are
    in ``docs/events.md``. Raises NeedsExtra, StoreClosed, and Unsupported for a store that another one measures.
    """

    def __init__(self, store: SessionStore, registry: Any = None) -> None:
        try:
            import prometheus_client  # noqa: PLC0415
            from prometheus_client import metrics_core  # noqa: PLC0415
        except ImportError as error:
            what = f"metrics need prometheus-client: pip install 'sessiontree[metrics]' ({error})"
            raise NeedsExtra(what, extra="metrics") from error
        if not isinstance(store, SessionStore):
            raise TypeError(f"metrics are of a SessionStore, not of a {type(store).__name__}")
        self._families: Any = metrics_core
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._store = ref(store)
        self._feed = feed = store._feed
        self._tally = _Tally()
        self._meter = _Meter()

        def measure() -> None:
            if feed.meter is not None:
                raise Unsupported(f"{store!r} is measured already")
            feed.meter = self._meter

        feed.alone(measure)
        try:
            store._listen(self._tally)
            self._registry.register(self)
        except BaseException:
            self._detach()
            raise

    def close(self) -> None:
        """Count and measure nothing any more, and be scraped no more. Closing it again does nothing."""
        if self._feed.meter is self._meter:
            self._registry.unregister(self)
            self._detach()

    def _detach(self) -> None:
        self._feed.meter = None
        self._feed.remove(self._tally)

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now."""
        tally, meter = self._tally, self._meter
        nodes, tokens = dict(tally.nodes), dict(tally.tokens)
        stored, paths = sum(tokens.values()), tally.path_tokens
        yield from self._held()
        yield self._counter("nodes_committed", "Nodes that became visible.", nodes, "origin")
        yield self._counter("tokens_committed", "Tokens of those nodes, each node's own.", tokens, "origin")
        yield self._counter(
            "path_tokens_committed", "Tokens of their whole paths: what a store that copies lists would keep.", paths
        )
        ratio = "path_tokens_committed_total over tokens_committed_total: how many times as much as is stored; 1 before any."
        yield self._gauge("dedupe_ratio", ratio, paths / stored if stored else 1.0)
        yield self._counter("drafts", "Drafts by what became of them, and those opened.", dict(meter.drafts), "event")
        yield self._counter("sessions_expired", "Sessions that were closed because they lay idle.", tally.expired)
        yield self._counter("sessions_evicted", "Times that a session left memory for the disk.", tally.evicted)
        yield self._counter("evicted_bytes", "Bytes of memory that evictions gave back.", tally.evicted_bytes)
        yield self._counter("events_lost", "Events that subscriptions had no room for.", self._feed.lost)
        yield self._histogram("append_seconds", "Seconds that an append took, the wait for the disk included.", meter.appends)
        yield self._histogram("commit_seconds", "Seconds that the commit of a draft took, likewise.", meter.commits)

    describe = collect  # so that a registry refuses names that it has

    def _held(self) -> Iterator[Any]:
        """What the store holds, as long as there is one."""
        store = self._store()
        if store is None:
            return
        usage = store.usage()._asdict()
        yield self._gauge("sessions_open", "Sessions that are open.", usage["sessions"])
        budgets = {_before(name, "_budget_bytes"): value for name, value in usage.items() if name.endswith("_budget_bytes")}
        budgets = {kind: value for kind, value in budgets.items() if value is not None}  # None: no limit
        held = {_before(name, "_bytes"): value for name, value in usage.items() if name.endswith("_bytes")}
        held = {kind: value for kind, value in held.items() if not kind.endswith("_budget")}
        yield self._gauge("held_bytes", "Bytes held in memory.", held, "kind")
        yield self._gauge("budget_bytes", "The most that may be held of a kind.", budgets, "kind")
        commits, size = (0, 0) if store._journal is None else store._journal.lag
        yield self._gauge("durability_lag_commits", "Changes that were made and are not known to be on disk.", commits)
        yield self._gauge("durability_lag_bytes", "Bytes of those changes.", size)

    def _gauge(self, name: str, text: str, values: Any, label: str | None = None) -> Any:
        return _filled(self._families.GaugeMetricFamily, name, text, values, label)

    def _counter(self, name: str, text: str, values: Any, label: str | None = None) -> Any:
        return _filled(self._families.CounterMetricFamily, name, text, values, label)

    def _histogram(self, name: str, text: str, latency: _Latency) -> Any:
        counts, seconds = latency.now()
        limits = [*map(str, BUCKETS), "+Inf"]
        buckets = list(zip(limits, itertools.accumulate(counts), strict=True))
        return self._families.HistogramMetricFamily(f"sessiontree_{name}", text, buckets=buckets, sum_value=seconds)

    def __enter__(self) -> StoreMetrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _filled(family: Any, name: str, text: str, values: Any, label: str | None) -> Any:
    if label is None:
        return family(f"sessiontree_{name}", text, value=values)
    made = family(f"sessiontree_{name}", text, labels=[label])
    for value_of, value in values.items():
        made.add_metric([value_of], value)
    return made


def _before(name: str, suffix: str) -> str:
    return name[: -len(suffix)]


class _Tally:
    """A sink that keeps numbers alone."""

    kinds: Final = frozenset({"node_committed", "evicted", "expired"})

    def __init__(self) -> None:
        self._last: Batch = ()
        self.nodes = {"input": 0, "generated": 0}  # by origin; replaced, never changed
        self.tokens = self.nodes
        self.path_tokens = self.evicted = self.evicted_bytes = self.expired = 0

    def _take(self, batch: Batch) -> None:
        if self._last is batch:
            return
        nodes, tokens = dict(self.nodes), dict(self.tokens)
        paths, evicted, freed, expired = self.path_tokens, self.evicted, self.evicted_bytes, self.expired
        for event in batch:
            kind, _, _, _, _, _, start, stop, origin, _, _, _, nbytes = event
            if kind == "node_committed":
                nodes[origin] += 1
                tokens[origin] += stop - start
                paths += stop
            elif kind == "evicted":
                evicted += 1
                freed += nbytes or 0
            elif kind == "expired":
                expired += 1
        self._last = batch  # from here on nothing comes in between
        self.nodes, self.tokens, self.path_tokens = nodes, tokens, paths
        self.evicted, self.evicted_bytes, self.expired = evicted, freed, expired

    def _wake(self) -> None:
        pass

    def _end(self) -> None:
        pass


class _Latency:
    """How long something took, by buckets. Adding to it takes no lock but for one in ``_AT_ONCE`` times."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque()
        self._lock = new_lock()
        self._counts = np.zeros(len(BUCKETS) + 1, np.int64)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        self._seen.append(seconds)
        if len(self._seen) >= _AT_ONCE:
            self._sort()

    def now(self) -> tuple[list[int], float]:
        """How many fell into each bucket, and seconds in all."""
        self._sort()
        with self._lock:
            return self._counts.tolist(), self._seconds

    def _sort(self) -> None:
        if self._lock._is_owned():  # a signal handler came in there
            return
        with self._lock:
            seen = [self._seen.popleft() for _ in range(len(self._seen))]
            places = np.searchsorted(BUCKETS, seen)  # a limit is inclusive
            counts, seconds = self._counts + np.bincount(places, minlength=len(BUCKETS) + 1), self._seconds + sum(seen)
            self._counts, self._seconds = counts, seconds


class _Meter:
    """What sessions tell while it is attached to their store."""

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.appends, self.commits = _Latency(), _Latency()
        self.drafts = dict.fromkeys(("opened", *get_args(HowClosed)), 0)
        self._lock = new_lock()

    def appended(self, begun: float) -> None:
        self.appends.add(self.now() - begun)

    def committed(self, begun: float) -> None:
        self.commits.add(self.now() - begun)

    def opened_draft(self) -> None:
        self.closed_draft("opened")

    def closed_draft(self, how: str) -> None:
        drafts = self.drafts
        with self._lock:
            drafts[how] += 1  # a signal handler comes in before or after
