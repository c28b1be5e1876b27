"""Metrics: what Prometheus's own parser reads of a store whose history is known."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sessiontree import MediaItem, NeedsExtra, Session, SessionStore, StoreClosed, StoreFailed, Unsupported, metrics
from sessiontree.events import Event
from sessiontree.journal import Durability
from sessiontree.metrics import BUCKETS, StoreMetrics
from sessiontree.testing.together import in_threads
from tests.disk import Disk
from tests.disk_model import Stalled, fail, let_go, open_on

Samples = dict[tuple[str, tuple[str, ...]], float]


def text_session(store: SessionStore, name: str = "s") -> Session:
    return store.create(name, scheme="text@hf5")


def scraped(registry: CollectorRegistry) -> Samples:
    """Every sample of a scrape by its name and the values of its labels, as the text format has it."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock gives these, one after the other, and then whole seconds."""
    given: list[float] = []
    more: Iterator[float] = itertools.count(1000.0)
    monkeypatch.setattr(metrics._Meter, "now", staticmethod(lambda: given.pop(0) if given else next(more)))
    return given


def test_a_known_history(registry: CollectorRegistry) -> None:
    with SessionStore.in_memory(idle_ttl=5) as store, StoreMetrics(store, registry):
        session = text_session(store)
        question = session.append(session.root, [1, 2, 3, 4])
        for number in range(3):
            draft = session.draft(question)
            draft.extend([7, number])
            draft.commit()
        session.draft(question).abort()
        session.append(question, [9])
        session.append(question, [9])  # the same node
        slow = store.subscribe(capacity=2)
        for number in range(5):
            session.append(question, [10, number])
        assert slow.poll()[-1].count == 3
        store._feed.tell(Event("evicted", "s", 1, nbytes=500))
        store._feed.pass_on()
        found = scraped(registry)
        assert found["sessiontree_sessions_open", ()] == 1
        assert found["sessiontree_events_lost_total", ()] == 3
        store.tick(0)
        store.tick(5)
        found = scraped(registry)
        assert found["sessiontree_sessions_open", ()] == 0
        assert found["sessiontree_sessions_expired_total", ()] == 1
        assert (found["sessiontree_sessions_evicted_total", ()], found["sessiontree_evicted_bytes_total", ()]) == (1, 500)
        for what, given, generated in (("nodes", 7, 3), ("tokens", 15, 6)):
            assert found[f"sessiontree_{what}_committed_total", ("input",)] == given
            assert found[f"sessiontree_{what}_committed_total", ("generated",)] == generated
        assert found["sessiontree_path_tokens_committed_total", ()] == 4 + 3 * 6 + 5 + 5 * 6
        assert found["sessiontree_dedupe_ratio", ()] == 57 / 21
        drafts = {how: found["sessiontree_drafts_total", (how,)] for how in ("opened", "committed", "aborted")}
        assert drafts == {"opened": 4, "committed": 3, "aborted": 1}
        assert found["sessiontree_append_seconds_count", ()] == 8
        assert found["sessiontree_commit_seconds_count", ()] == 3
        assert found["sessiontree_durability_lag_commits", ()] == found["sessiontree_durability_lag_bytes", ()] == 0


def test_nothing_has_happened(registry: CollectorRegistry) -> None:
    with SessionStore.in_memory() as store, StoreMetrics(store, registry):
        found = scraped(registry)
        assert found.pop(("sessiontree_dedupe_ratio", ())) == 1
        budgets = {labels[0] for name, labels in found if name == "sessiontree_budget_bytes"}
        assert {"feature", "path_cache"} <= budgets
        held = ("sessiontree_budget_bytes", "sessiontree_held_bytes")
        assert not any(value for (name, _), value in found.items() if name not in held)


def test_the_ratio_is_that_of_a_store_that_copies_lists(registry: CollectorRegistry) -> None:
    """Against one: each node keeps the tokens of its whole path."""
    rng = random.Random(3)
    with SessionStore.in_memory() as store, StoreMetrics(store, registry):
        copies: list[list[int]] = []
        lists: dict[bytes, list[int]] = {}
        for number in range(3):
            session = text_session(store, str(number))
            nodes = [session.root]
            lists[session.root.id] = []
            for _ in range(40):
                parent = rng.choice(nodes)
                tokens = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
                there = len(session.tree)
                node = session.append(parent, tokens)
                if len(session.tree) > there:
                    lists[node.id] = [*lists[parent.id], *tokens]
                    copies.append(lists[node.id])
                    nodes.append(node)
        stored = sum(len(node) for each in tuple(store._sessions.values()) for node in each.tree)
        found = scraped(registry)
        assert found["sessiontree_path_tokens_committed_total", ()] == sum(map(len, copies))
        assert found["sessiontree_dedupe_ratio", ()] == sum(map(len, copies)) / stored > 2


def test_latencies_fall_into_their_buckets(registry: CollectorRegistry, ticking: list[float]) -> None:
    """A limit is inclusive, and what is above all of them is counted too."""
    took = [0.5e-6, 1e-6, 1.5e-6, 3e-3, 0.1, 20.0]
    with SessionStore.in_memory() as store, StoreMetrics(store, registry):
        session = text_session(store)
        for number, seconds in enumerate(took):
            ticking += [0.0, seconds]
            session.append(session.root, [number])
        ticking += [0.0, 0.25]
        draft = session.draft(session.root)
        draft.extend([1])
        draft.commit()
        found = scraped(registry)
    for limit in BUCKETS:
        assert found["sessiontree_append_seconds_bucket", (str(limit),)] == sum(each <= limit for each in took)
        assert found["sessiontree_commit_seconds_bucket", (str(limit),)] == (limit >= 0.25)
    assert found["sessiontree_append_seconds_bucket", ("+Inf",)] == found["sessiontree_append_seconds_count", ()] == 6
    assert found["sessiontree_append_seconds_sum", ()] == pytest.approx(sum(took))
    assert found["sessiontree_commit_seconds_sum", ()] == 0.25


def test_no_append_of_many_threads_is_missed(registry: CollectorRegistry) -> None:
    with SessionStore.in_memory() as store, StoreMetrics(store, registry):
        session = text_session(store)

        def work(number: int) -> None:
            for each in range(700):
                session.append(session.root, [number, each])
                draft = session.draft(session.root)
                if each % 2:
                    draft.abort()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            in_threads(4, work)
        finally:
            sys.setswitchinterval(interval)
        found = scraped(registry)
    assert found["sessiontree_append_seconds_count", ()] == found["sessiontree_nodes_committed_total", ("input",)] == 2800
    assert found["sessiontree_drafts_total", ("opened",)] == 2 * found["sessiontree_drafts_total", ("aborted",)] == 2800


def test_what_is_held_is_what_usage_says(registry: CollectorRegistry) -> None:
    with SessionStore.in_memory(feature_bytes=10_000, path_cache_bytes=20_000) as store, StoreMetrics(store, registry):
        kept = store.put_features(MediaItem("image", bytes(32), ()), np.ones(100))
        found, usage = scraped(registry), store.usage()
        assert found["sessiontree_held_bytes", ("feature",)] == usage.feature_bytes == kept.nbytes
        assert found["sessiontree_budget_bytes", ("feature",)] == 10_000
        assert found["sessiontree_budget_bytes", ("path_cache",)] == 20_000
        kinds = {name.removesuffix("_bytes") for name in usage._fields if name.endswith("_bytes") and "budget" not in name}
        assert {labels[0] for name, labels in found if name == "sessiontree_held_bytes"} == kinds


def lag(registry: CollectorRegistry) -> tuple[float, float]:
    found = scraped(registry)
    return found["sessiontree_durability_lag_commits", ()], found["sessiontree_durability_lag_bytes", ()]


@contextmanager
def disk_let_go(disk: Stalled) -> Iterator[None]:
    try:
        yield
    finally:
        disk.go.set()


@pytest.mark.parametrize("durability", ["group", "relaxed"])
def test_how_far_the_disk_is_behind(durability: Durability, registry: CollectorRegistry) -> None:
    """Commits and bytes, in line and in the frame that is being written, until they are on disk."""
    disk = Stalled()
    with open_on(disk, durability=durability) as store, StoreMetrics(store, registry), disk_let_go(disk):
        session = text_session(store)
        store.flush()
        assert lag(registry) == (0, 0)
        disk.go.clear()
        session.append(session.root, [1] * 1000)
        for number in range(2, 11):
            session.append(session.root, [number] * 1000)
        assert disk.waits.wait(20)
        commits, size = lag(registry)
        assert commits == 10 and 10 * 4000 < size < 10 * 4400
        disk.go.set()
        if durability == "relaxed":
            log: Any = store._journal._log  # type: ignore[union-attr]
            while log._written < log.enqueued:  # which the background thread does
                pass
            commits, size = lag(registry)
            assert commits == 10 and 10 * 4000 < size < 10 * 4400, "written is not durable"
        store.flush()
        assert lag(registry) == (0, 0)


def test_closed_it_counts_and_measures_nothing(registry: CollectorRegistry) -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        measured = StoreMetrics(store, registry)
        with pytest.raises(Unsupported):
            StoreMetrics(store, CollectorRegistry())
        session.append(session.root, [1])
        draft = session.draft(session.root)
        measured.close()
        measured.close()
        session.append(session.root, [2])
        draft.abort()
        assert not scraped(registry)
        assert store._feed.meter is None and not store._feed.wanted and not store._feed._sinks
        with StoreMetrics(store, registry):
            session.append(session.root, [3])
            assert scraped(registry)["sessiontree_nodes_committed_total", ("input",)] == 1
        with SessionStore.in_memory() as other, StoreMetrics(other, registry), pytest.raises(ValueError):
            StoreMetrics(store, registry)
        assert store._feed.meter is None and not store._feed._sinks, "the registry refused it"
    with pytest.raises(StoreClosed):
        StoreMetrics(store, registry)
    assert store._feed.meter is None
    with pytest.raises(TypeError):
        StoreMetrics(session, registry)  # type: ignore[arg-type]


def test_the_store_may_go_before_its_metrics(registry: CollectorRegistry) -> None:
    store = SessionStore.in_memory()
    measured = StoreMetrics(store, registry)
    session = text_session(store)
    session.append(session.root, [1])
    store.close()
    del store, session
    gc.collect()
    found = scraped(registry)
    assert found["sessiontree_nodes_committed_total", ("input",)] == 1
    assert ("sessiontree_sessions_open", ()) not in found
    measured.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with SessionStore.in_memory() as store:
        with pytest.raises(NeedsExtra, match=r"sessiontree\[metrics\]") as caught:
            StoreMetrics(store)
        assert caught.value.extra == "metrics" and store._feed.meter is None


def test_names_follow_the_conventions(registry: CollectorRegistry) -> None:
    """Counters end with _total, units are seconds and bytes, every family says what it is; OpenMetrics takes it as well."""
    with SessionStore.in_memory() as store, StoreMetrics(store, registry):
        families = list(registry.collect())
        assert {family.type for family in families} == {"gauge", "counter", "histogram"}
        for family in families:
            assert (family.name.startswith("sessiontree_") and family.documentation.endswith(".")) or ";" in family.documentation
            if family.type == "counter":
                assert all(sample.name.endswith("_total") for sample in family.samples)
            if family.type == "histogram":
                assert family.name.endswith("_seconds")
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        assert openmetrics(registry).decode().endswith("# EOF\n")  # type: ignore[no-untyped-call]


def test_a_failing_disk_is_no_reason_to_fail_a_scrape(registry: CollectorRegistry) -> None:
    disk = Disk()
    store = open_on(disk, durability="group")
    with StoreMetrics(store, registry):
        session = text_session(store)
        store.flush()
        fail(disk, 1, "fdatasync", errno.EIO, forever=True)
        with suppress(StoreFailed):
            session.append(session.root, [1])
            store.flush()
        assert lag(registry)[0] == 1, "it never will be on the disk"
        let_go(store)
        assert scraped(registry)["sessiontree_nodes_committed_total", ("input",)] == 1


def test_drafts_that_are_handed_over_or_time_out_are_counted() -> None:
    store = SessionStore.in_memory(draft_ttl=5)
    with StoreMetrics(store, CollectorRegistry()) as metrics:
        session = store.create("s", scheme="text@hf5")
        drafts = [session.draft(session.root) for _ in range(3)]
        session.adopt(drafts[0].hand_over()).abort()
        store.tick(0)
        store.tick(10)
        assert [draft.how_closed for draft in drafts] == ["handed over", "timed out", "timed out"]
        assert metrics._meter.drafts == {"opened": 4, "committed": 0, "aborted": 1, "timed out": 2, "handed over": 1}
