"""Which sessions a tick closes: those of a model that looks at each of them every time."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessiontree import Draft, SessionStore
from sessiontree import store as store_module
from tests.disk import Disk
from tests.disk_model import open_on

NAMES = ("a", "b", "c", "d", "e")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["use", "get", "draft", "touch", "commit", "abort", "close", "tree"]), st.sampled_from(NAMES)),
        st.tuples(st.just("tick"), st.sampled_from([0, 1, 2, 3, 7, 30])),
        st.tuples(st.sampled_from(["evict", "usage"]), st.just("")),
    ),
    max_size=60,
)


class Model:
    """Sessions by name: when each was used last, its draft, and its place in the order of opening."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.now = -math.inf
        self.last: dict[str, float] = {}
        self.opened: dict[str, int] = {}
        self.drafts: dict[str, Draft] = {}

    def use(self, name: str) -> None:
        if name not in self.last:
            self.opened[name] = 1 + max(self.opened.values(), default=0)
        self.last[name] = self.now

    def tick(self, now: float) -> tuple[str, ...]:
        self.now = now
        for name in self.last:
            if name in self.drafts or self.last[name] == -math.inf:
                self.last[name] = now
        over = sorted((name for name, last in self.last.items() if now - last >= self.ttl), key=lambda name: self.opened[name])
        for name in over:
            del self.last[name]
        return tuple(over)


def live(store: SessionStore, steps: list[tuple[str, Any]], ttl: float) -> None:
    model, made = Model(ttl), set[str]()
    for count, (what, given_) in enumerate(steps):
        if what == "tick":
            now = given_ + (0.0 if model.now == -math.inf else model.now)
            assert store.tick(now) == model.tick(now)
        elif what == "evict":
            store.evict()
        elif what == "usage":
            assert store.usage().sessions == len(model.last)
        elif what in ("use", "get", "draft"):
            on_disk = store._journal is not None
            exists = given_ in (made if on_disk else model.last)
            session = store.get(given_) if exists else store.create(given_, scheme="text@hf5")
            made.add(given_)
            model.use(given_)
            if what == "use":
                session.append(session.root, [count])
            elif what == "draft" and given_ not in model.drafts:
                model.drafts[given_] = session.draft(session.root)
        elif what == "close" and given_ in model.last:
            session = store.get(given_)
            session.close()
            model.drafts.pop(given_, None)
            del model.last[given_]
        elif what == "tree" and given_ in model.last:
            assert store.tree(given_) is not None  # that is no use of it
        elif given_ in model.drafts:
            if what == "touch":
                model.drafts[given_].extend([count])
            elif what == "commit":
                draft = model.drafts.pop(given_)
                draft.extend([count])
                draft.commit()
                model.use(given_)
            elif what == "abort":
                model.drafts.pop(given_).abort()
        assert {name for name, draft in model.drafts.items() if draft.closed} == set()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("where", ["memory", "disk", "disk with a budget"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, ttl=st.sampled_from([2, 7.5, 10]))
def test_a_tick_closes_who_lay_idle(where: str, few: bool, steps: list[tuple[str, Any]], ttl: float) -> None:
    """``few``: what is kept in the order of use and of time is made anew again and again."""
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(store_module, "_OLDEST", 1)
        if where == "memory":
            with SessionStore.in_memory(idle_ttl=ttl) as store:
                live(store, steps, ttl)
        else:
            budget = 9_000 if where == "disk with a budget" else None
            with open_on(Disk(), idle_ttl=ttl, durability="relaxed", memory_bytes=budget) as store:
                live(store, steps, ttl)


def test_timers_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sessions that fall asleep and wake, or are made and closed, before anything is due."""
    monkeypatch.setattr(store_module, "_OLDEST", 4)
    with SessionStore.open(tmp_path / "store", idle_ttl=10**6, durability="relaxed") as store:
        for number in range(3):
            session = store.create(f"{number}", scheme="text@hf5")
            session.append(session.root, [number])
        del session
        for now in range(50):
            assert len(store.evict().sessions) == 3
            made = store.create(f"made {now}", scheme="text@hf5")
            for number in range(3):
                store.get(f"{number}")
            store.tick(now)
            made.close()
            assert len(store._timers) <= 2 * 3 + 4 + 4
            assert {session_id for _, _, session_id in store._timers} >= {"0", "1", "2"}
        assert store.tick(10**7) == ("0", "1", "2")


def test_timers_that_are_made_anew_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_OLDEST", 4)
    store = SessionStore.in_memory(idle_ttl=100)
    kept = {name: store.create(name, scheme="text@hf5") for name in NAMES}
    for now in range(50):
        if now % 10 == 0:
            session = kept[NAMES[now // 10]]
            session.append(session.root, [now])
        made = store.create(f"made {now}", scheme="text@hf5")
        assert store.tick(now) == ()
        made.close()
    assert len(store._timers) < 20
    assert [store.tick(now) for now in (99, 100, 108, 109, 130, 138, 139)] == [(), ("a",), (), ("b",), ("c", "d"), (), ("e",)]


def test_an_interrupt_in_a_tick_loses_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore.in_memory(idle_ttl=5)
    made = [store.create(name, scheme="text@hf5") for name in NAMES]
    store.tick(0)
    expire = type(made[0])._expire

    def interrupted(session: Any, *given_: Any) -> bool:
        if session.id == "c":
            raise KeyboardInterrupt
        return expire(session, *given_)

    monkeypatch.setattr(type(made[0]), "_expire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.tick(6)
    monkeypatch.setattr(type(made[0]), "_expire", expire)
    assert store.tick(6) == ("c", "d", "e")


@pytest.mark.parametrize("few", [1, 3, 1024])
def test_the_least_recently_used_go_first(few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One could not go, since somebody had it in use: it is the first when it can. Another was used since it was looked at."""
    monkeypatch.setattr(store_module, "_OLDEST", few)
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        for number in range(12):
            session = store.create(f"{number}", scheme="text@hf5")
            session.append(session.root, [number] * 1000)
        del session
        store.flush()
        in_use = store._sessions["1"]._lock
        gone: list[str] = []

        def evict_one() -> None:
            assert store._journal is not None
            going = store._put_away_until(store._journal, 0)
            gone.append(next(going))
            going.close()  # type: ignore[attr-defined]  # a generator

        ready, done = threading.Event(), threading.Event()

        def use() -> None:
            with in_use:
                ready.set()
                done.wait(20)

        thread = threading.Thread(target=use)
        thread.start()
        ready.wait(20)
        evict_one()
        evict_one()
        store.get("3")
        evict_one()
        done.set()
        thread.join()
        for _ in range(3):
            evict_one()
        assert gone == ["0", "2", "4", "1", "5", "6"]
        assert store.evict().sessions == ("7", "8", "9", "10", "11", "3")
        assert store.evict().sessions == ()
        for name in ("2", "6", "8"):
            store.get(name)
        evict_one()
        store._got("0")  # it wakes, which is no use of it
        assert set(store.evict().sessions) == {"6", "8", "0"}


def test_to_evict_all_ends_though_sessions_are_used_all_the_time(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("s", scheme="text@hf5")
        looked = []
        for _, name in store._by_use():
            looked.append(name)
            session._touch()  # whenever it was looked at
            assert len(looked) < 50
        assert looked == ["s"]


class OpensFirst(dict[str, Any]):
    """Another thread opens a draft at the worst time."""

    session: Any = None

    def pop(self, key: str, *default: Any) -> Any:
        self.draft = self.session.draft(self.session.root)
        return super().pop(key, *default)


def test_a_draft_that_is_opened_while_they_are_looked_for_is_found() -> None:
    store = SessionStore.in_memory(idle_ttl=100, draft_ttl=5)
    session = store.create("s", scheme="text@hf5")
    session.draft(session.root).abort()
    with_drafts = OpensFirst(store._with_drafts)
    with_drafts.session = session
    store._with_drafts = with_drafts
    store.tick(0)
    store.tick(1)
    draft = with_drafts.draft
    store.tick(6)
    store.tick(12)
    assert draft.how_closed == "timed out"
