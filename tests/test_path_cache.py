"""Whole paths as views: what they show, that nobody writes through them, and what the cache that keeps those of forks may take."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sessiontree import MediaItem, Node, OutOfRange, Position, Session, SessionStore, SessionTree
from sessiontree import tokens as tokens_module
from sessiontree.frozen import writable_bytes
from sessiontree.tokens import TOKEN_BYTES, Extent, PathCache
from sessiontree.tree import DEFAULT_PATH_CACHE_BYTES
from tests.test_freezing import assert_sealed
from tests.test_robustness import alarms, coming_in, forked
from tests.toy import store_of

MIB = 2**20


def text_session(path_cache_bytes: int = MIB) -> Session:
    return SessionStore.in_memory(path_cache_bytes=path_cache_bytes).create("s", scheme="text@hf5")


def paths_of(session: Session) -> PathCache:
    return store_of(session)._paths


def kept(paths: PathCache) -> dict[int, bytes]:
    """The byte strings that can be reached from a cache, by id, as the garbage collector sees it: what it really keeps."""
    found: dict[int, bytes] = {}
    seen: set[int] = set()
    queue: list[Any] = [paths]
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        assert not isinstance(value, (Extent, Node)), "it keeps alive what it was read for"
        if type(value) is bytes:
            found[id(value)] = value
        elif not isinstance(value, (type, str)) and not callable(value):
            queue += gc.get_referents(value)
    return found


def check(paths: PathCache) -> None:
    """What it says it holds is what it holds, within the budget."""
    held = paths.held_bytes
    assert held == sum(map(len, kept(paths).values()))
    assert 0 <= held <= max(0, paths.budget_bytes)


def is_kept(paths: PathCache, view: np.ndarray[Any, Any]) -> bool:
    """Whether a view is over a buffer of the cache."""
    return any(np.shares_memory(view, np.frombuffer(buffer, "<i4", len(buffer) // 4)) for buffer in kept(paths).values())


def forks_of(session: Session, length: int, count: int, own: int = 1) -> list[Node]:
    """Children of one node of ``length`` tokens that each have an extent of their own."""
    trunk = session.append(session.root, range(length))
    session.append(trunk, [2**31 - 1])
    return [session.append(trunk, [number] * own) for number in range(count)]


@contextmanager
def traced() -> Iterator[Callable[[], tuple[int, int]]]:
    """How many bytes more than at the beginning there are, and were at most since the last call."""
    gc.collect()
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]

        def growth() -> tuple[int, int]:
            now, most = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            return now - begin, most - begin

        yield growth
    finally:
        tracemalloc.stop()


# --- views ----------------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[Node, list[int]]]:
    """Nodes of a random tree, with the tokens of their paths."""
    session = text_session(draw(st.sampled_from([0, 40, 200, MIB])))
    made: list[tuple[Node, list[int]]] = [(session.root, [])]
    outside: list[tuple[Node, list[int]]] = []  # of values, and of a fork of the session
    fresh = itertools.count(1)
    for _ in range(draw(st.integers(1, 14))):
        parent, path = made[draw(st.integers(0, len(made) - 1))]
        what = draw(st.sampled_from(["append", "append", "append", "commit", "truncate", "rewrite", "value", "fork"]))
        own = [next(fresh) for _ in range(draw(st.sampled_from([1, 2, 3, 17])))]
        if what == "truncate":
            length = draw(st.integers(0, parent.stop))
            made.append((session.truncate(parent, length), path[:length]))
        elif what == "rewrite":
            at = draw(st.integers(0, parent.stop))
            made.append((session.rewrite(parent, [(at, at, own)]), path[:at] + own + path[at:]))
        elif what == "value":
            tree, node = session.tree.append(parent, own)
            outside += [(node, path + own), (tree.append(node, own)[1], path + own + own)]
        elif what == "fork":
            with store_of(session).fork(session, parent, "f") as other:
                outside.append((other.append(parent, own), path + own))
        elif what == "commit":
            with session.draft(parent) as draft:
                draft.extend(own)
                made.append((draft.commit(), path + own))
        else:
            made.append((session.append(parent, own), path + own))
    return made + outside


@given(trees(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_view_of_any_window_is_what_a_copy_is(made: list[tuple[Node, list[int]]], chance: random.Random) -> None:
    views = []
    windows = [
        (node, path, start, stop) for node, path in made for start in range(len(path) + 1) for stop in range(start, len(path) + 1)
    ]
    for node, path, start, stop in chance.sample(windows, min(len(windows), 400)):
        view = node.input_ids(start, stop, copy=False)
        assert (view.dtype, view.shape) == (np.dtype("<i4"), (stop - start,))
        assert view.tolist() == path[start:stop] == node.input_ids(start, stop).tolist()
        views.append((view, path[start:stop]))
    for node, path in made:
        assert node.input_ids(copy=False).tolist() == path
        assert node.input_ids(stop=node.stop, copy=False).tolist() == path
        check(node._extent.paths)
    for view, expected in views:
        assert view.tolist() == expected


@given(trees())
@settings(max_examples=15, deadline=None)
def test_a_view_is_read_only_along_its_bases(made: list[tuple[Node, list[int]]]) -> None:
    for node, path in made:
        for start, stop in {(0, len(path)), (len(path) // 2, len(path)), (0, len(path) // 2), (len(path), len(path))}:
            assert_sealed(node.input_ids(start, stop, copy=False))
        assert node.input_ids().tolist() == path


def test_views_of_a_path_that_grew_in_the_cache_are_read_only() -> None:
    session = text_session()
    node = forks_of(session, 100, 2)[1]
    for number in range(50):
        assert_sealed(node.input_ids(copy=False))
        node = session.append(node, [number] * 3)
    assert len(kept(paths_of(session))) == 1


@pytest.mark.parametrize("start", [-1, 5, 1.0, True, Position(0), None, "0"])
def test_a_window_is_checked_as_for_a_copy(start: Any) -> None:
    session = text_session()
    for node in forks_of(session, 3, 1):
        for copy in (True, False):
            with pytest.raises((TypeError, OutOfRange)):
                node.input_ids(start, copy=copy)


@pytest.mark.parametrize("stop", [-1, 5, 2.0, False, Position(1), "1"])
def test_the_end_of_a_window_is_checked_as_for_a_copy(stop: Any) -> None:
    session = text_session()
    for node in forks_of(session, 3, 1):
        for copy in (True, False):
            with pytest.raises((TypeError, OutOfRange)):
                node.input_ids(0, stop, copy=copy)


def test_views_of_the_main_line_share_its_memory() -> None:
    session = text_session()
    first = session.append(session.root, range(1000))
    tip = session.append(first, range(1000, 1100))
    assert len(tip._extent.buffer) >= 1100 * TOKEN_BYTES
    whole = tip.input_ids(copy=False)
    assert np.shares_memory(whole, tip.input_ids(copy=False))
    assert np.shares_memory(whole, first.input_ids(copy=False))
    assert np.shares_memory(whole, tip.input_ids(5, 7, copy=False))
    assert not np.shares_memory(whole, tip.input_ids())
    assert kept(paths_of(session)) == {}


def test_views_of_the_main_line_allocate_nothing() -> None:
    session = text_session()
    node = session.append(session.append(session.root, range(500_000)), range(500_000))
    node.input_ids(copy=False)
    with traced() as growth:
        for _ in range(100):
            node.input_ids(copy=False)
            node.input_ids(100, 900_000, copy=False)
        now, most = growth()
    assert max(now, most) < 10_000


def test_a_forks_view_of_what_it_shares_is_the_trunks() -> None:
    session = text_session()
    trunk = session.append(session.root, range(1000))
    session.append(trunk, [1])
    fork = session.append(trunk, [2, 3])
    session.append(fork, [4])
    inner = session.append(fork, [5])
    whole = trunk.input_ids(copy=False)
    for node in (fork, inner):
        assert np.shares_memory(node.input_ids(0, 1000, copy=False), whole)
        assert np.shares_memory(node.input_ids(10, 900, copy=False), whole)
    assert np.shares_memory(inner.input_ids(1000, 1002, copy=False), fork.input_ids(1000, 1002, copy=False))
    assert kept(paths_of(session)) == {}  # no path was gathered for any of it
    assert inner.input_ids(999, copy=False).tolist() == [999, 2, 3, 5]
    assert kept(paths_of(session)) == {}  # nor for a window of a few tokens
    assert inner.input_ids(99, copy=False).tolist() == [*range(99, 1000), 2, 3, 5]
    assert len(kept(paths_of(session))) == 1


def test_a_forks_own_window_is_over_its_own_tokens() -> None:
    session = text_session()
    for node in forks_of(session, 1000, 3, own=4):
        assert np.shares_memory(node.input_ids(1000, 1004, copy=False), np.frombuffer(node._extent.buffer, "<i4"))
    assert kept(paths_of(session)) == {}


def test_a_forks_path_is_gathered_once() -> None:
    session = text_session()
    fork = forks_of(session, 50_000, 1)[0]
    whole = fork.input_ids(copy=False)
    assert is_kept(paths_of(session), whole)
    with traced() as growth:
        for _ in range(50):
            assert np.shares_memory(fork.input_ids(copy=False), whole)
            assert np.shares_memory(fork.input_ids(7, copy=False), whole)
        assert max(growth()) < 10_000


def test_a_view_outlives_all_else() -> None:
    session = text_session()
    forks = forks_of(session, 300, 2)
    views = [node.input_ids(copy=False) for node in (*forks, *session.tree)]
    expected = [view.tolist() for view in views]
    paths = paths_of(session)
    store_of(session).close()
    del session, forks
    gc.collect()
    assert [view.tolist() for view in views] == expected
    assert paths.held_bytes == 0
    assert kept(paths) == {}


# --- what is held ---------------------------------------------------------------------------------------------------------


def test_held_is_what_is_really_held() -> None:
    session = text_session(path_cache_bytes=10 * MIB)
    forks = forks_of(session, 50_000, 8)
    paths = paths_of(session)
    with traced() as growth:
        for number, node in enumerate(forks, 1):
            node.input_ids(copy=False)
            check(paths)
            assert paths.held_bytes == number * node.stop * TOKEN_BYTES
        assert 0 <= growth()[0] - paths.held_bytes < 20_000
        grown = [session.append(node, range(20_000)) for node in forks]
        extents = growth()[0] - paths.held_bytes
        for node in grown:
            node.input_ids(copy=False)
            check(paths)
        assert abs(growth()[0] - extents - paths.held_bytes) < 20_000
        paths.clear()
        assert paths.held_bytes == 0
        assert abs(growth()[0] - extents) < 20_000


def test_usage_is_what_is_really_held() -> None:
    store = SessionStore.in_memory(path_cache_bytes=5000, feature_bytes=9000)
    sessions = [store.create(name, scheme="text@hf5") for name in "ab"]
    for session in sessions:
        for node in forks_of(session, 300, 3):
            node.input_ids(copy=False)
    item = MediaItem("image", bytes(32), [(0, 1)], (1, 2, 2))
    features = store.put_features(item, np.zeros(1000, np.uint8))
    usage = store.usage()
    assert usage.sessions == len(store.sessions()) == 2
    assert (usage.path_cache_budget_bytes, usage.feature_budget_bytes) == (5000, 9000)
    assert usage.path_cache_bytes == sum(map(len, kept(store._paths).values())) == 4 * 301 * TOKEN_BYTES
    assert usage.feature_bytes == features.nbytes >= 1000
    del features
    store.drop_features(item)
    assert store.usage().feature_bytes == 0
    sessions[0].close()
    assert store.usage().sessions == 1
    store.close()
    assert store.usage().path_cache_bytes == 0
    assert kept(store._paths) == {}


def test_the_least_recently_read_path_goes_first() -> None:
    session = text_session(path_cache_bytes=3 * 101 * TOKEN_BYTES)
    paths, forks = paths_of(session), forks_of(session, 100, 5)
    views = {number: forks[number].input_ids(copy=False) for number in (0, 1, 2)}

    def now() -> set[int]:
        check(paths)
        return {number for number, view in views.items() if is_kept(paths, view)}

    assert now() == {0, 1, 2}
    forks[0].input_ids(5, copy=False)  # any window that needs the path is a read of it
    views[3] = forks[3].input_ids(copy=False)
    assert now() == {0, 2, 3}
    forks[2].input_ids(0, 50, copy=False)  # the trunk's: no read of the path
    views[4] = forks[4].input_ids(copy=False)
    assert now() == {0, 3, 4}
    forks[0].input_ids()  # a copy reads no path
    views[1] = forks[1].input_ids(copy=False)
    assert now() == {1, 3, 4}


def test_a_path_that_grows_makes_others_go() -> None:
    session = text_session(path_cache_bytes=1000 * TOKEN_BYTES)
    paths, forks = paths_of(session), forks_of(session, 300, 3)
    views = [node.input_ids(copy=False) for node in forks]
    assert paths.held_bytes == 3 * 301 * TOKEN_BYTES
    grown = session.append(forks[0], range(300))
    view = grown.input_ids(copy=False)
    assert view.tolist() == [*range(300), 0, *range(300)]
    assert is_kept(paths, view)
    assert not is_kept(paths, views[1])
    check(paths)
    assert [view.tolist() for view in views] == [[*range(300), number] for number in range(3)]


@pytest.mark.parametrize("budget", [0, 4, 100, 101 * TOKEN_BYTES - 1])
def test_what_does_not_fit_is_read_right_and_not_kept(budget: int) -> None:
    session = text_session(path_cache_bytes=budget)
    paths, forks = paths_of(session), forks_of(session, 100, 3)
    for node in (*forks, *forks):
        view = node.input_ids(copy=False)
        assert view.tolist() == node.input_ids().tolist()
        assert_sealed(view)
        assert not is_kept(paths, view)
    assert paths.held_bytes == 0
    assert kept(paths) == {}


def test_a_path_that_outgrows_the_budget_is_read_right_all_the_way() -> None:
    session = text_session(path_cache_bytes=200 * TOKEN_BYTES)
    paths, node = paths_of(session), forks_of(session, 100, 1)[0]
    path = [*range(100), 0]
    for number in range(60):
        own = [number] * 3
        node, path = session.append(node, own), path + own
        view = node.input_ids(copy=False)
        assert view.tolist() == path
        assert is_kept(paths, view) == (len(path) <= 200)
        check(paths)


def test_a_path_that_grows_is_copied_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    writable, read_bytes = writable_bytes, Extent.read_bytes

    def counting_writable(size: int) -> tuple[bytes, memoryview]:
        nonlocal copied
        copied += size  # zeroed, and at most that much is copied
        return writable(size)

    def counting_read(self: Extent, start: int, stop: int) -> bytes:
        nonlocal copied
        copied += (stop - start) * TOKEN_BYTES
        return read_bytes(self, start, stop)

    session = text_session(path_cache_bytes=64 * MIB)
    node = forks_of(session, 100, 1)[0]
    monkeypatch.setattr(tokens_module, "writable_bytes", counting_writable)
    monkeypatch.setattr(Extent, "read_bytes", counting_read)
    for number in range(5000):
        node = session.append(node, [number] * 8)
        assert node.input_ids(copy=False)[-1] == number
        assert node.input_ids(3, copy=False)[-1] == number
    # A geometric series of 1.25 for the extent's buffer, one for the path's, and the new tokens.
    assert copied < 14 * node.stop * TOKEN_BYTES
    assert node.input_ids(copy=False).tobytes() == node.input_ids().tobytes()
    check(paths_of(session))


def test_paths_of_forks_that_are_gone_are_let_go() -> None:
    store = SessionStore.in_memory()
    trunk_session = store.create("trunk", scheme="text@hf5")
    trunk = trunk_session.append(trunk_session.root, range(10_000))
    ends = []
    for number in range(20):
        session = store.fork(trunk_session, trunk, f"f{number}")
        node = session.append(trunk, [number])
        node.input_ids(copy=False)
        ends.append(weakref.ref(node._extent))
        session.close()
    assert store.usage().path_cache_bytes == 10_001 * TOKEN_BYTES  # that of the last one, which is still here
    del session, node
    assert [end() for end in ends] == [None] * 20
    assert store.usage().path_cache_bytes == 0
    assert kept(store._paths) == {}


def test_extents_in_cycles_are_let_go() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")

    class Holder:
        pass

    holder: Any = Holder()
    holder.itself = holder
    value: SessionTree = session.tree
    for _ in range(3):
        value, holder.node = value.append(session.root, range(1000 + len(value)))
        value, holder.fork = value.append(holder.node, [1])
        value, holder.fork = value.append(holder.node, [2])
    holder.value = value
    holder.fork.input_ids(copy=False)
    end = weakref.ref(holder.fork._extent)
    assert store.usage().path_cache_bytes > 0
    del value, holder
    gc.collect()
    assert end() is None
    assert store.usage().path_cache_bytes == 0


def test_a_fork_in_the_place_of_one_that_is_gone_has_its_own_path() -> None:
    """Extents come and go in the same places of memory."""
    paths, owner = PathCache(MIB), object()
    trunk = Extent(owner, None, 0, np.arange(100, dtype="<i4").tobytes(), paths)
    places = set()
    for number in range(200):
        fork = Extent(owner, trunk, 99, np.full(3, number, "<i4").tobytes(), paths)
        places.add(id(fork))
        for stop in (100, 102, 101):
            assert fork.view(0, stop).tolist() == [*range(99), *[number] * (stop - 99)]
        if number % 3 == 0:
            check(paths)
        del fork
    assert len(places) < 100
    assert paths.held_bytes == 0


def test_64_forks_of_a_million_tokens_take_40_mb_at_most() -> None:
    session = SessionStore.in_memory().create("s", scheme="text@hf5")
    trunk = session.append(session.root, np.arange(1_000_000, dtype=np.int32))
    session.append(trunk, [0])
    forks = [session.append(trunk, [number]) for number in range(64)]
    with traced() as growth:
        for number, node in enumerate(forks):
            view = node.input_ids(copy=False)
            assert len(view) == 1_000_001
            assert view[-1] == number
            del view
        now, most = growth()
        assert now <= DEFAULT_PATH_CACHE_BYTES + 100_000 < 40_000_000
        assert most <= 40_000_000
    assert store_of(session).usage().path_cache_bytes <= DEFAULT_PATH_CACHE_BYTES
    assert store_of(session).usage().path_cache_budget_bytes == DEFAULT_PATH_CACHE_BYTES
    check(paths_of(session))


def test_a_tree_without_a_store_has_a_cache_of_its_own() -> None:
    tree = SessionTree("text@hf5")
    tree, trunk = tree.append(tree.root, range(10))
    tree, _ = tree.append(trunk, [1])
    tree, fork = tree.append(trunk, [2])
    view = fork.input_ids(copy=False)
    assert view.tolist() == [*range(10), 2]
    assert is_kept(fork._extent.paths, view)
    assert not is_kept(SessionTree("text@hf5").root._extent.paths, view)


def test_clear_and_close() -> None:
    session = text_session()
    paths, forks = paths_of(session), forks_of(session, 100, 3)
    views = [node.input_ids(copy=False) for node in forks]
    paths.clear()
    assert (paths.held_bytes, kept(paths)) == (0, {})
    again = [node.input_ids(copy=False) for node in forks]
    assert paths.held_bytes == 3 * 101 * TOKEN_BYTES
    grown = session.append(forks[0], [7])
    assert grown.input_ids(copy=False).tolist() == [*range(100), 0, 7]
    store_of(session).close()
    store_of(session).close()
    assert (paths.held_bytes, kept(paths)) == (0, {})
    late = [node.input_ids(copy=False) for node in forks]  # nodes work on
    check(paths)
    for views_of in (views, again, late):
        assert [view.tolist() for view in views_of] == [[*range(100), number] for number in range(3)]


@pytest.mark.parametrize("budget", [-1, 2.5, 1e6, "1", None, True, Position(5)])
def test_a_budget_is_a_number_of_bytes(budget: Any) -> None:
    """As for features: said at once, not by the first reader."""
    with pytest.raises((TypeError, OutOfRange)):
        SessionStore.in_memory(path_cache_bytes=budget)


# --- whoever comes in between ----------------------------------------------------------------------------------------------


def _interrupt() -> None:
    raise KeyboardInterrupt


def in_another_thread(work: Callable[[], None]) -> list[BaseException] | None:
    """What ``work`` raises there; None if it does not come to an end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    return None if thread.is_alive() else errors


class Between:
    """A cache in the middle of whose reads, on the same thread, something else is done: what is about to happen to it."""

    def __init__(self, budget: int = 60 * TOKEN_BYTES) -> None:
        self.paths = PathCache(budget)
        self.owner = object()
        self.trunk = Extent(self.owner, None, 0, np.arange(20, dtype="<i4").tobytes(), self.paths)
        self.forks = [self.new_fork(number) for number in range(4)]
        self.views: list[tuple[np.ndarray[Any, Any], list[int]]] = []
        self.see(1, 22)
        self.see(2, 22)

    def new_fork(self, number: int) -> Extent:
        return Extent(self.owner, self.trunk, 20, np.full(10, 100 + number, "<i4").tobytes(), self.paths)

    def see(self, number: int, stop: int) -> None:
        view = self.forks[number].view(0, stop)
        expected = [*range(20), *[100 + number] * (stop - 20)]
        self.views.append((view, expected))
        assert view.tolist() == expected

    def check(self) -> None:
        for view, expected in self.views:
            assert view.tolist() == expected
        check(self.paths)
        for number, stop in ((0, 25), (1, 26), (2, 27), (3, 30), (0, 30)):
            self.see(number, stop)
            check(self.paths)
        assert len(kept(self.paths)) >= 1, "it keeps nothing any longer"
        self.forks[:] = [self.new_fork(number) for number in range(4)]
        assert self.paths.held_bytes == 0
        assert kept(self.paths) == {}


def _read(between: Between) -> None:
    between.see(3, 24)
    between.see(1, 24)


def _look(between: Between) -> None:
    assert between.paths.held_bytes >= 0


def _lose(between: Between) -> None:
    """A fork goes, and somebody looks at what is held."""
    between.forks[2] = between.new_fork(2)
    _look(between)


def _clear(between: Between) -> None:
    between.paths.clear()


def _clear_and_read(between: Between) -> None:
    _clear(between)
    between.see(3, 24)


def _evict(between: Between) -> None:
    between.see(3, 30)
    between.see(0, 30)


def _bury(between: Between) -> None:
    between.forks[2] = between.new_fork(2)
    between.see(0, 30)


ACTIONS: dict[str, Callable[[Between], None]] = {
    "read": _read,
    "look": _look,
    "lose and look": _lose,
    "clear": _clear,
    "clear and read": _clear_and_read,
}
READS: dict[str, Callable[[Between], None]] = {
    "again": lambda between: between.see(1, 22),
    "grown": lambda between: between.see(1, 26),
    "another": lambda between: between.see(0, 22),
    "evicts": _evict,
    "after one is gone": _bury,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("read", READS)
def test_a_signal_handler_comes_in_between(read: str, action: str) -> None:
    """At every place inside a read where the interpreter runs signal handlers."""
    places = 0
    while True:
        between = Between()
        with coming_in(places, partial(ACTIONS[action], between)) as ran:
            READS[read](between)
        if not ran:
            break
        try:
            between.check()
        except BaseException as error:
            error.add_note(f"place {places}")
            raise
        places += 1
    assert places > 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt of what runs when an extent goes
@pytest.mark.parametrize("read", READS)
def test_a_read_is_interrupted(read: str) -> None:
    """At every such place. Afterwards the cache counts right and still keeps what is read, for every thread."""
    places = 0
    while True:
        between = Between()
        with suppress(KeyboardInterrupt), coming_in(places, _interrupt) as ran:
            READS[read](between)
        if not ran:
            break
        errors = in_another_thread(between.check)
        assert errors is not None, f"place {places}: it waits for a lock that nobody holds"
        for error in errors:
            error.add_note(f"place {places}")
            raise error
        places += 1
    assert places > 3


def test_signals_while_paths_are_read_and_grow() -> None:
    session = text_session(path_cache_bytes=5000 * TOKEN_BYTES)
    store = store_of(session)
    forks = forks_of(session, 1000, 6)
    path = {node.id: [*range(1000), number] for number, node in enumerate(forks)}
    chance = random.Random(5)
    handled = 0

    def read(node: Node) -> None:
        assert node.input_ids(copy=False).tolist() == path[node.id]

    def handler() -> None:
        nonlocal handled
        handled += 1
        read(forks[handled % 6])
        assert store.usage().path_cache_bytes <= 5000 * TOKEN_BYTES
        if not handled % 7:
            store._paths.clear()

    with alarms(handler, 0.001):
        end = time.monotonic() + 20
        while handled < 100 and time.monotonic() < end:
            at = chance.randrange(6)
            if chance.random() < 0.3 and forks[at].stop < 2500:
                own = [at] * chance.randrange(1, 40)
                node = session.append(forks[at], own)
                path[node.id] = path[forks[at].id] + own
                forks[at] = node
            read(forks[at])
    assert handled >= 100
    check(store._paths)


def test_a_forked_child_reads_views_and_keeps_them() -> None:
    """Whatever another thread was in the middle of when the process forked."""
    session = text_session(path_cache_bytes=8000 * TOKEN_BYTES)
    paths, forks = paths_of(session), forks_of(session, 2000, 6)
    stop = Event()

    def read() -> None:
        while not stop.is_set():
            for node in forks:
                node.input_ids(copy=False)

    def child() -> None:
        for number, node in enumerate(forks):
            assert node.input_ids(copy=False).tolist() == [*range(2000), number]
        view = session.append(forks[0], [5]).input_ids(copy=False)
        assert view.tolist() == [*range(2000), 0, 5]
        check(paths)
        assert is_kept(paths, view), "the child keeps nothing"
        store_of(session).close()
        assert paths.held_bytes == 0

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [Thread(target=read, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        exits = [forked(child) for _ in range(10)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)
        sys.setswitchinterval(interval)
    assert exits == [0] * 10
    check(paths)


def test_a_child_forked_in_the_middle_of_another_threads_read_keeps_paths() -> None:
    """At every place where that thread may be switched off. It is not there in the child, and the cache does not wait for it."""
    for places in itertools.count():
        between = Between()
        paused, go = Event(), Event()
        thread = Thread(target=pausing, args=(places, partial(between.see, 1, 30), paused, go), daemon=True)
        thread.start()
        while not paused.wait(0.01) and thread.is_alive():
            pass
        if not paused.is_set():
            break

        def child(between: Between = between) -> None:
            between.see(0, 30)
            assert is_kept(between.paths, between.views[-1][0]), "the child keeps nothing"
            between.check()

        status = forked(child)
        go.set()
        thread.join(20)
        assert status == 0, f"place {places}"
        between.check()
    assert places > 10


def pausing(places: int, work: Callable[[], None], paused: Event, go: Event) -> None:
    """Do ``work``, with a pause inside it after so many places where the interpreter switches threads."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal places
        if event in ("call", "c_return") and frame.f_globals.get("__name__") == tokens_module.__name__:
            places -= 1
            if places < 0:
                sys.setprofile(None)
                paused.set()
                go.wait(20)

    sys.setprofile(profile)
    work()
    sys.setprofile(None)


def test_threads_that_read_grow_and_drop_paths() -> None:
    store = SessionStore.in_memory(path_cache_bytes=3000 * TOKEN_BYTES)
    session = store.create("s", scheme="text@hf5")
    trunk = session.append(session.root, range(500))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        own: list[tuple[Node, list[int]]] = []
        views: list[tuple[np.ndarray[Any, Any], list[int]]] = []
        try:
            for step in range(400):
                what = chance.random()
                if what < 0.2 or not own:
                    own.append((session.append(trunk, [seed, step]), [*range(500), seed, step]))
                at = chance.randrange(len(own))
                node, path = own[at]
                if what < 0.5:
                    more = [seed] * chance.randrange(1, 9)
                    node, path = session.append(node, more), path + more
                    own[at] = node, path
                start = chance.randrange(len(path))
                view = node.input_ids(start, copy=False)
                assert view.tolist() == path[start:]
                views.append((view, path[start:]))
                if what > 0.97:
                    store._paths.clear()
                if what > 0.9:
                    assert 0 <= store.usage().path_cache_bytes <= 3000 * TOKEN_BYTES
                    fork = store.fork(session, node, f"{seed}/{step}")
                    assert fork.append(node, [step]).input_ids(copy=False).tolist() == [*path, step]
                    fork.close()
            for view, expected in views:
                assert view.tolist() == expected
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors, errors
    check(store._paths)


# --- against a naive model --------------------------------------------------------------------------------------------------


class Paths(RuleBasedStateMachine):
    """A cache under a small budget, against lists, and against an order of use that is worked out anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.session = text_session()
        self.made: list[tuple[Node, list[int]]] = []
        self.views: list[tuple[np.ndarray[Any, Any], list[int]]] = []
        self.order: list[int] = []  # extents whose paths are kept, by id, the longest unread first
        self.sizes: dict[int, int] = {}  # path tokens that are known of each
        self.extents: list[Extent] = []  # kept here, so that no two have one id

    @initialize(budget=st.sampled_from([0, 4, 80, 200, 1000, 10_000]))
    def begin(self, budget: int) -> None:
        self.session = text_session(path_cache_bytes=budget)
        self.made = [(self.session.root, [])]

    @property
    def paths(self) -> PathCache:
        return paths_of(self.session)

    @rule(at=st.integers(0, 10**6), own=st.lists(st.integers(0, 99), min_size=1, max_size=12))
    def append(self, at: int, own: list[int]) -> None:
        node, path = self.made[at % len(self.made)]
        self.made.append((self.session.append(node, own, key=str(len(self.made))), path + own))

    @rule(at=st.integers(0, 10**6), length=st.integers(0, 10**6))
    def truncate(self, at: int, length: int) -> None:
        node, path = self.made[at % len(self.made)]
        length %= len(path) + 1
        self.made.append((self.session.truncate(node, length), path[:length]))

    @rule(at=st.integers(0, 10**6), start=st.integers(0, 10**6), stop=st.integers(0, 10**6))
    def view(self, at: int, start: int, stop: int) -> None:
        node, path = self.made[at % len(self.made)]
        start, stop = sorted((start % (len(path) + 1), stop % (len(path) + 1)))
        view = node.input_ids(start, stop, copy=False)
        self.views.append((view, path[start:stop]))
        self.model_read(node._extent, start, stop)

    @rule(at=st.integers(0, 10**6))
    def view_whole(self, at: int) -> None:
        node, path = self.made[at % len(self.made)]
        self.views.append((node.input_ids(copy=False), path))
        self.model_read(node._extent, 0, len(path))

    @rule()
    def clear(self) -> None:
        self.paths.clear()
        self.order.clear()
        self.sizes.clear()

    @precondition(lambda self: len(self.views) > 20)
    @rule()
    def let_go(self) -> None:
        del self.views[::2]

    def model_read(self, extent: Extent, start: int, stop: int) -> None:
        """What a reader does to the cache: a path is needed for a window of half of it that crosses into another extent."""
        if start == stop or start > stop // 2:
            return
        at: Extent | None = extent
        while at is not None and stop <= at.origin:
            at = at.parent
        assert at is not None
        if start >= at.origin:
            return
        key = id(at)
        if self.sizes.get(key, 0) < stop:
            if stop * TOKEN_BYTES > self.paths.budget_bytes:
                return
            self.sizes[key] = stop
            self.extents.append(at)
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)
        # How much room a path that grew is given is the cache's business; what goes for it is not.
        buffers = {key: len(entry.buffer) for key, entry in self.paths._paths.items()}
        while self.order and self.order[0] not in buffers:
            self.sizes.pop(self.order.pop(0))
        assert key in buffers

    @invariant()
    def all_views_hold(self) -> None:
        for view, expected in self.views[-30:]:
            assert view.tolist() == expected

    @invariant()
    def it_holds_what_it_says(self) -> None:
        check(self.paths)
        assert list(self.paths._paths) == self.order
        for key, entry in self.paths._paths.items():
            assert entry.stop == self.sizes[key]
            assert entry.stop * TOKEN_BYTES <= len(entry.buffer) <= max(entry.stop * 5, entry.stop * 4 + 4)

    def teardown(self) -> None:
        for view, expected in self.views:
            assert view.tolist() == expected


TestPaths = Paths.TestCase
TestPaths.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
