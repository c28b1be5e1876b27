"""What a store holds in memory: counted as the process counts it, evicted to disk, and nothing that can be seen of it changed."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sessiontree.session
import sessiontree.sleepers
import sessiontree.store
from sessiontree import (
    Draft,
    MediaItem,
    Node,
    OutOfRange,
    Session,
    SessionStore,
    SessionTreeError,
    StaleSession,
    StoreFailed,
    UnknownHead,
    journal,
    memory,
    stored,
)
from sessiontree.testing.together import in_threads
from tests.disk import Disk, Fault
from tests.disk_model import open_on
from tests.test_segment_log import Interrupt

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
SIZE = 1500 if SOAK else 500
VL = "qwen2_5_vl@hf5"


def ids(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return (np.arange(count, dtype=np.int32) * 7 + seed * 1009) % 50_000


def picture(number: int, offset: int = 1) -> MediaItem:
    return MediaItem("image", number.to_bytes(32, "big"), [(offset, 4)], grid_thw=(1, 4, 4))


def converse(session: Session, turns: int, *, tokens: int = 64, seed: int = 0) -> Node:
    """A prompt and a reply each time; the head follows."""
    node = session.head("main").node if "main" in session.heads else session.root
    for turn in range(turns):
        node = session.append(node, ids(tokens, seed + turn))
        draft = session.draft(node)
        draft.extend(ids(tokens // 2, seed + turn))
        node = draft.commit()
    session.set_head("main", node)
    return node


# --- what is counted is what is held ------------------------------------------------------------------------------------


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """How much more memory is taken than at the beginning."""
    gc.collect()
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]

        def grown() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - first

        yield grown
    finally:
        tracemalloc.stop()


def chains(store: SessionStore) -> None:
    for number in range(20):
        converse(store.create(f"chain {number}", scheme="text@hf5"), 20, seed=number)


def long_turns(store: SessionStore) -> None:
    converse(store.create("long", scheme="text@hf5"), 100, tokens=2000)


def short_sessions(store: SessionStore) -> None:
    for number in range(SIZE // 3):
        store.create(f"short {number}", scheme="text@hf5").append(store.get(f"short {number}").root, ids(8))


def wide(store: SessionStore) -> None:
    session = store.create("wide", scheme="text@hf5")
    prompt = session.append(session.root, ids(500))
    for number in range(SIZE):
        session.append(session.append(prompt, ids(16, number)), ids(16, number + 1))


def images(store: SessionStore) -> None:
    session = store.create("images", scheme=VL)
    node = session.root
    for number in range(SIZE):
        node = session.append(node, ids(20, number), media=[picture(number)])


def metadata(store: SessionStore) -> None:
    session = store.create("metadata", scheme="text@hf5")
    node = session.root
    for number in range(SIZE):
        said = {"tool_calls": [f"call {number}"], "scores": np.arange(40.0), "text": "x" * (number % 300), "n": [number, [number]]}
        node = session.append(node, ids(20, number), metadata=said)


def keys(store: SessionStore) -> None:
    session = store.create("keys", scheme="text@hf5")
    for number in range(SIZE):
        session.append(session.root, ids(5, number), key=f"request number {number:040}")


def children_and_heads(store: SessionStore) -> None:
    wide(store)
    session = store.get("wide")
    for number, leaf in enumerate(session.leaves()[:300]):
        session.set_head(f"head {number}", leaf)
        session.children(leaf)


def many_heads(store: SessionStore) -> None:
    session = store.create("many heads", scheme="text@hf5")
    nodes = [session.append(session.root, [number]) for number in range(50)]
    for number in range(4 * SIZE):
        session.set_head(f"head {number}", nodes[number % 50])
    for number in range(0, 4 * SIZE, 3):
        session.set_head(f"head {number}", nodes[0])
    for number in range(0, 4 * SIZE, 4):
        session.drop_head(f"head {number}")


def prefixes(store: SessionStore) -> None:
    session = store.create("prefixes", scheme="text@hf5")
    for number in range(SIZE // 2):
        node = session.append(session.root, [number, *ids(60, number)])
        session.append(node, ids(600, number))
    session.longest_prefix([1, 2, 3])


BUILDERS = [chains, long_turns, short_sessions, wide, images, metadata, keys, children_and_heads, many_heads, prefixes]


def within(counted: int, held: int, share: float = 0.05) -> bool:
    return abs(counted - held) <= share * held + 25_000


@pytest.mark.parametrize("build", BUILDERS, ids=[build.__name__ for build in BUILDERS])
def test_counted_bytes_are_those_really_held(build: Callable[[SessionStore], None]) -> None:
    build(SessionStore.in_memory())  # what is made once for all
    store = SessionStore.in_memory()
    with traced() as grown:
        build(store)
        counted = store.usage().node_bytes
        share = 0.15 if build in (metadata, prefixes) else 0.05  # maps that share their parts, and tries, are estimated
        assert within(counted, grown(), share), (counted, grown())
        for name in store.sessions():
            store.get(name).close()
        assert store.usage().node_bytes < 100 and grown() < 0.1 * counted + 20_000


@pytest.mark.parametrize("build", BUILDERS[:-1], ids=[build.__name__ for build in BUILDERS[:-1]])
def test_counted_bytes_of_what_was_read_from_disk(tmp_path: Path, build: Callable[[SessionStore], None]) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        build(store)
    for _ in range(2):
        with SessionStore.open(tmp_path / "store") as store:
            sessions = [store.get(name) for name in store.sessions()]
            with traced() as grown:
                held = [list(session.tree) for session in sessions]
                counted = store.usage().node_bytes
                before = sum(session._held for session in sessions)
                now = grown() - sum(map(sys.getsizeof, held)) - 500 * len(sessions)
                assert within(counted - before, now, 0.1), (counted - before, now)
                del held
                for session in sessions:
                    stored = session.tree._index.base
                    assert stored is not None
                    stored.forget()  # type: ignore[attr-defined]
                assert store.usage().node_bytes - before < 0.02 * counted + 20_000


def test_how_most_generations_end_is_counted_for_none_of_them() -> None:
    session = SessionStore.in_memory().create("one", scheme="text@hf5")

    def ended(finish_reason: str) -> Node:
        draft = session.draft(session.root)
        draft.extend(ids(8))
        return draft.commit(finish_reason)

    usual, again, other = ended("stop"), ended("stop"), ended("interrupted")
    assert usual._details is again._details is not other._details
    assert memory.node_bytes(other) - memory.node_bytes(usual) >= sys.getsizeof(other._details)


def test_what_long_turns_take_beside_their_values() -> None:
    """With all that finds them, and finds histories again; the room behind their tokens is half a MiB at most."""
    values = np.ones(2000, np.float32)

    def rollout(turns: int) -> Session:
        session = SessionStore.in_memory().create("rollout", scheme="text@hf5")
        whole = ids(turns * 2000)
        for stop in range(2000, len(whole) + 1, 2000):
            session.record(whole[: stop - 1999], whole[stop - 1999 : stop], annotations={"logprobs": values[1:]})
        return session

    rollout(1)
    taken = []
    for turns in (200, 400):
        with traced() as grown:
            session = rollout(turns)
            extent = session.tree.leaves()[0]._extent
            room = len(extent.buffer) - turns * 8000
            assert room <= 2**19
            taken.append(grown() - room - turns * 16_000)
            del session, extent
    assert taken[1] - taken[0] < 200 * 1700


@pytest.mark.parametrize("seen", [False, True])
def test_what_a_node_takes_is_what_its_parts_take(seen: bool) -> None:
    """Each number once, whatever else is the same one; a state only where positions are not just indexes."""
    session = SessionStore.in_memory().create("one", scheme=VL)
    start = node = session.append(session.root, ids(20), media=[picture(1)]) if seen else session.root
    for count in (1, 300, 1, *[5] * 300):
        node = session.append(node, ids(count), role="user")
    draft = session.draft(node)
    draft.extend(ids(8))
    for node in draft.commit().path()[start.depth + 1 :]:
        assert isinstance(node.runs, int) and node.parent is not None
        assert (node._state is not None) == seen
        assert node.state[0] == node.stop and node.state[2] == node.state[1] - 1
        assert seen or node.state[1] == node.stop
        kept = () if node._state is None else (node._state,)
        others = [part for part in (node.key, node._up[5]) if part is not None]
        own = (node.stop, node.depth, node.runs, *(number for state in kept for number in state[1:3]))
        numbers = {id(number): number for number in own if number > 256 and number is not node.parent.state[1]}
        parts = [node, node._up, node.id, *kept, *others, *numbers.values()]
        assert memory.node_bytes(node) == sum(map(sys.getsizeof, parts))


def test_the_path_of_a_fork_is_counted_when_its_session_is_gone() -> None:
    store = SessionStore.in_memory()
    session = store.create("one", scheme="text@hf5")
    tip = converse(session, 200)
    alone = store.usage().node_bytes
    forks = [store.fork(session, tip, f"fork {number}") for number in range(3)]
    assert store.usage().node_bytes - alone < 30_000, "shared"
    session.close()
    del session
    for fork in forks:
        fork.append(tip, [1])
    assert alone < store.usage().node_bytes < alone + 30_000 + 401 * 400, "once, and what it takes to count them"
    del tip
    for fork in forks:
        fork.close()
    del forks, fork
    assert store.usage().node_bytes < 1000


@pytest.mark.parametrize("build", BUILDERS, ids=[build.__name__ for build in BUILDERS])
def test_sessions_go_without_the_garbage_collector(build: Callable[[SessionStore], None]) -> None:
    """Engines freeze or disable it."""
    store = SessionStore.in_memory()
    gc.collect()
    gc.disable()
    try:
        build(store)
        known = [weakref.ref(node) for name in store.sessions() for node in store.get(name).tree]
        for name in store.sessions():
            store.get(name).close()
        assert not [node for node in known if node() is not None]
    finally:
        gc.enable()


def test_nothing_is_counted_twice_or_left(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        empty = store.usage().memory_bytes
        for round_ in range(3):
            for number in range(30):
                name = f"{round_} {number}"
                session = store.create(name, scheme="text@hf5")
                converse(session, 10)
                store.fork(session, session.head("main").node, f"fork of {name}").close()
            store.evict()
            for number in range(0, 30, 2):
                store.get(f"{round_} {number}").head("main").node.input_ids()
            for number in range(30):
                with suppress(SessionTreeError):
                    store.get(f"{round_} {number}").close()
            del session
            usage = store.usage()
            assert usage.node_bytes < 10_000 and usage.sessions == usage.asleep_sessions == 0
            assert usage.memory_bytes - empty < (round_ + 1) * 200_000


# --- what goes, and in which order --------------------------------------------------------------------------------------


def filled(store: SessionStore, count: int = 6) -> list[str]:
    names = [f"session {number}" for number in range(count)]
    for number, name in enumerate(names):
        converse(store.create(name, scheme="text@hf5"), 5, seed=number)
    return names


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store)
        store.get(names[0])
        converse(store.get(names[1]), 1)
        store.get(names[2]).longest_prefix([1])
        store.flush()  # it has written by now, and knows where
        before = store.usage().memory_bytes
        evicted = store.evict(before - 10_000)
        assert evicted.sessions == (names[3],), "one is enough"
        assert evicted.before == before and evicted.after <= before - 10_000 and evicted.after == store.usage().memory_bytes
        store.get(names[4])
        assert store.evict().sessions == (names[5], names[0], names[1], names[2], names[4])
        assert store.usage().asleep_sessions == store.usage().sessions == 6
        assert store.evict().sessions == ()


def test_features_go_first_and_come_back(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store)
        items = [picture(number) for number in range(4)]
        for number, item in enumerate(items):
            store.put_features(item, np.full(100_000, number, np.float32))
        held = store.get_features(items[0])
        before = store.usage()
        evicted = store.evict(before.memory_bytes - 500_000)
        assert evicted.sessions == () and evicted.feature_bytes >= 500_000
        assert [item in store._features for item in items] == [True, False, False, True], "held, and used last"
        evicted = store.evict()
        assert set(evicted.sessions) == set(names) and evicted.feature_bytes and items[0] in store._features
        assert held is store.get_features(items[0])
        for number, item in enumerate(items):
            found = store.get_features(item)
            assert found is not None and (found["features"] == number).all()


def test_what_is_held_stays_as_it_is(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store)
        reader = store.get(names[0]).head("main").node.parent
        session = store.get(names[1])
        draft = session.draft(session.head("main").node)
        draft.extend([1, 2, 3])
        pinned = store.get(names[2]).head("main").node.parent
        assert reader is not None and pinned is not None
        store.get(names[2]).pin(pinned)
        handle, tip = store.get(names[3]), store.get(names[3]).head("main").node
        tree = store.get(names[4]).tree
        address = id(pinned)
        del pinned
        assert {names[0], names[4], names[5]} <= set(store.evict().sessions), "what is held frees little, or nothing"
        assert store.usage().asleep_sessions == 3
        assert store.evict().sessions == (), "nothing more can go"
        # Nodes that somebody holds are the nodes that are given out.
        assert store.get(names[0]).node(reader.id) is reader
        assert store.get(names[1]) is session and session.node(draft.parent.id) is draft.parent
        found = store.get(names[2])
        [pin] = found.pins
        assert id(found.node(pin)) == address
        assert store.get(names[3]) is handle and handle.head("main").node is tip
        assert store.get(names[4]).head("main").node is tree.head("main").node, "though the session went and was made again"
        draft.extend([4])
        node = draft.commit()
        assert session.node(node.id) is node and node.input_ids().tolist()[-4:] == [1, 2, 3, 4]
        assert store.usage().asleep_sessions == 1


def test_a_store_in_memory_gives_nothing_up() -> None:
    store = SessionStore.in_memory()
    names = filled(store)
    store.put_features(picture(1), np.zeros(100_000))
    before = [(name, store.get(name).head("main").node) for name in names]
    evicted = store.evict()
    assert evicted.sessions == () and evicted.feature_bytes == 0 and store.get_features(picture(1)) is not None
    assert all(store.get(name).head("main").node is node for name, node in before)


def test_a_budget_is_kept_at_every_tick(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", memory_bytes=400_000) as store:
        for number in range(200):
            converse(store.create(f"session {number}", scheme="text@hf5"), 5, seed=number)
            store.flush()  # what is not durable yet cannot go
            store.tick(number)
            assert store.usage().memory_bytes <= 400_000
        assert store.usage().sessions == 200 and store.usage().asleep_sessions > 150
        for number in range(200):
            assert len(store.get(f"session {number}").head("main").node.path()) == 11


@pytest.mark.parametrize("target", [-1, 1.5, "all", True, 2**70])
def test_a_target_that_is_none(tmp_path: Path, target: Any) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store, 2)
        with pytest.raises((OutOfRange, TypeError), match=r"target_bytes|integer"):
            store.evict(target)
        with pytest.raises((OutOfRange, TypeError), match=r"memory_bytes|integer"):
            SessionStore.open(tmp_path / "other", memory_bytes=target)
        assert store.usage().asleep_sessions == 0 and store.sessions() == tuple(names)


# --- nothing that can be seen of it changes -----------------------------------------------------------------------------


def seen(store: SessionStore, name: str) -> Any:
    session = store.get(name)
    nodes = [(node.id, node.depth, node.start, node.stop, node.key, node.origin) for node in session.tree]
    heads = sorted((head, session.head(head).version, node.id) for head, node in session.heads.items())
    return session.incarnation, nodes, heads, session.pins, session.closed


OPERATIONS = (
    "create",
    "append",
    "draft",
    "commit",
    "abort",
    "head",
    "rewind",
    "pin",
    "unpin",
    "fork",
    "get",
    "close",
    "tick",
    "drop",
)


class Program:
    """Any operations on a store; what each answered is what a twin that was never evicted answers."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self.sessions: list[str] = []
        self.drafts: list[Draft] = []
        self.now = 0.0

    def run(self, what: str, draw: int) -> Any:
        store = self.store
        if what == "create" or not self.sessions:
            name = f"s{len(self.sessions)}"
            self.sessions.append(name)
            return store.create(name, scheme="text@hf5").incarnation
        name = self.sessions[draw % len(self.sessions)]
        if what == "tick":
            self.now += draw % 7
            return store.tick(self.now)
        if what in ("commit", "abort"):
            if not self.drafts:
                return None
            draft = self.drafts.pop(draw % len(self.drafts))
            return draft.commit().id if what == "commit" else draft.abort()
        session = store.get(name)
        nodes = list(session.tree)
        node = nodes[draw % len(nodes)]
        match what:
            case "append":
                return session.append(node, ids(1 + draw % 40, draw)).id
            case "draft":
                draft = session.draft(node)
                draft.extend(ids(1 + draw % 5, draw))
                self.drafts.append(draft)
                return draft.key
            case "head":
                return session.set_head(f"h{draw % 3}", node).version
            case "rewind":
                return session.truncate(node, node.stop - draw % (node.stop + 1)).id
            case "pin":
                return session.pin(node)
            case "unpin":
                return session.unpin(node)
            case "drop":
                return session.drop(node)
            case "fork":
                other = f"s{len(self.sessions)}"
                self.sessions.append(other)
                return store.fork(session, node, other).incarnation
            case "close":
                return session.close()
        return session.incarnation

    def answer(self, what: str, draw: int) -> Any:
        try:
            return self.run(what, draw)
        except SessionTreeError as error:
            return type(error)


steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1000), st.booleans()), min_size=5, max_size=60)


@settings(max_examples=1500 if SOAK else 60, deadline=None)
@given(steps)
def test_a_store_that_evicts_answers_as_one_that_does_not(
    tmp_path_factory: pytest.TempPathFactory, program: list[tuple[str, int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("twins")
    with (
        SessionStore.open(folder / "one", idle_ttl=10, durability="relaxed") as store,
        SessionStore.open(folder / "two", idle_ttl=10, durability="relaxed") as twin,
    ):
        one, two = Program(store), Program(twin)
        for what, draw, evicts in program:
            assert one.answer(what, draw) == two.answer(what, draw), (what, draw)
            if evicts:
                store.evict()
        for name in two.sessions:
            assert seen(store, name) == seen(twin, name)


def test_a_session_that_slept_is_the_same_opening(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", idle_ttl=10) as store:
        store.tick(0)
        names = filled(store, 3)
        converse(store.get(names[0]), 2)
        incarnations = [store.get(name).incarnation for name in names]
        store.tick(5)
        store.get(names[1])
        store.evict()
        assert store.usage().asleep_sessions == 3
        store.tick(8)
        assert [store.get(names[1]).incarnation, store.get(names[1]).draft(store.get(names[1]).root).key] == [
            incarnations[1],
            f"{names[1]}/{incarnations[1]}/6",
        ]
        store.evict()
        assert store.tick(10) == (names[0], names[2]), "last used at 0; to sleep is no use"
        assert store.usage().sessions == 1
        assert store.get(names[0]).incarnation > max(incarnations)
        store.evict()
        assert store.tick(17.9) == () and store.tick(30) == (names[1], names[0]), "in the order they were opened"


def test_a_draft_of_a_closed_session_is_stale_though_it_slept(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store, 2)
        session = store.get(names[0])
        draft = session.draft(session.root)
        draft.extend([1])
        store.evict()
        store.get(names[0]).close()
        store.evict()
        with pytest.raises(StaleSession):
            draft.commit()
        with pytest.raises(UnknownHead):
            store.get(names[0]).head("none")


def test_evicted_sessions_are_collected_forked_dropped_and_exported(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        names = filled(store, 4)
        stray = store.get(names[0]).append(store.get(names[0]).root, ids(3)).id
        store.evict()
        fork = store.fork(store.get(names[1]), store.get(names[1]).head("main").node, "fork")
        store.evict()
        store.drop(names[2])
        store.evict()
        report = store.gc(recent=0)
        assert report.nodes_before - report.nodes_after == 11
        store.evict()
        assert stray not in {node.id for node in store.get(names[0]).tree}
        assert len(store.get(names[3]).head("main").node.path()) == 11
        assert fork.head("main") if "main" in fork.heads else len(fork.leaves()) == 1
        assert sorted(store.sessions()) == ["fork", names[0], names[1], names[3]]


# --- threads, interrupts, disks that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["group", "commit", "relaxed"])
def test_sessions_that_are_written_while_others_evict(tmp_path: Path, durability: Any) -> None:
    rounds = 150 if SOAK else 25
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        names = filled(store, 8)
        done = threading.Event()
        failed: list[BaseException] = []
        made: dict[str, list[bytes]] = {name: [] for name in names}

        def write(name: str) -> None:
            try:
                for turn in range(rounds):
                    session = store.get(name)
                    node = session.append(session.head("main").node, ids(5, turn))
                    draft = session.draft(node)
                    del session
                    draft.extend(ids(3, turn))
                    node = draft.commit()
                    store.get(name).set_head("main", node)
                    made[name].append(node.id)
            except BaseException as error:
                failed.append(error)

        def evict() -> None:
            while not done.is_set():
                store.evict()

        writers = [threading.Thread(target=write, args=(name,)) for name in names]
        evictors = [threading.Thread(target=evict) for _ in range(2)]
        for thread in (*writers, *evictors):
            thread.start()
        for thread in writers:
            thread.join()
        done.set()
        for thread in evictors:
            thread.join()
        assert not failed, failed
        for name in names:
            path = store.get(name).head("main").node.path()
            assert [node.id for node in path[12::2]] == made[name] and len({node.key for node in path[2::2]}) == len(path) // 2
        del path
        store.evict()
        assert store.usage().node_bytes < 1000 and store.usage().asleep_sessions == 8


def test_what_the_disk_refused_stays_in_memory() -> None:
    disk = Disk()
    store = open_on(disk, durability="group")
    session = store.create("one", scheme="text@hf5")
    node = session.append(session.root, [1, 2, 3])
    store.flush()
    disk.fault = Fault(1, errno.EIO, frozenset({"pwrite", "fdatasync"}), forever=True)
    late = session.append(node, [4])
    with suppress(StoreFailed):
        store.flush()
    del session
    assert store.evict().sessions == ()
    assert store.get("one").node(late.id) is late
    with suppress(StoreFailed):
        store.close()


class Anywhere(Interrupt):
    """In all that evict goes through."""

    MODULES = (sessiontree.store, sessiontree.session, sessiontree.sleepers, stored, memory, journal)
    FILES = frozenset(module.__file__ for module in MODULES)


@pytest.mark.parametrize("held", [False, True])
def test_an_interrupt_at_any_place_of_evict_leaves_one_session(held: bool) -> None:
    """And one that is not evicted, or is, and goes on."""
    disk = Disk()
    with open_on(disk) as store:
        names = filled(store, 2)
    stride = 1 if SOAK else 7
    for n in itertools.count(1, stride):
        store = open_on(disk.copy())
        before = [seen(store, name)[1:] for name in names]
        handle = store.get(names[0]) if held else None
        incarnations = [store.get(name).incarnation for name in names]
        interrupt = Anywhere(n)
        sys.settrace(interrupt)
        try:
            store.evict()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert handle is None or store.get(names[0]) is handle
        assert [store.get(name).incarnation for name in names] == incarnations
        assert [seen(store, name)[1:] for name in names] == before
        node = converse(store.get(names[1]), 1, seed=n)
        store.evict()
        assert store.get(names[1]).head("main").node == node
        assert store.usage().sessions == 2
        store.close()
        if interrupt.left >= 0:
            break
    assert n > 20


def test_a_use_while_others_are_put_away_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SessionStore.open(tmp_path / "store", idle_ttl=10) as store:
        names = filled(store, 2)
        held = store.get(names[1])
        store.tick(0)
        store.tick(9)
        put_away = SessionStore._put_away

        def use(_: int) -> None:
            held.append(held.root, ids(10_000))

        def used_meanwhile(self: SessionStore, journal: Any, session_id: str) -> bool:
            if session_id == names[0]:
                in_threads(1, use)
            return put_away(self, journal, session_id)

        monkeypatch.setattr(SessionStore, "_put_away", used_meanwhile)
        store.evict()
        assert store.tick(12) == (names[0],), "the other was used at 9"
        assert store.usage().node_bytes > 40_000


def test_gc_and_expiry_of_sleeping_sessions_name_them(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", idle_ttl=10) as store:
        names = filled(store, 3)
        incarnations = {name: store.get(name).incarnation for name in names}
        for name in names:
            store.get(name).append(store.get(name).root, [9])
        heard = store.subscribe()
        store.evict()
        store.gc(recent=0)
        told = [(event.kind, event.session_id, event.incarnation) for event in heard.poll()]
        assert told == [(kind, name, incarnations[name]) for kind in ("evicted", "nodes_dropped") for name in names]
        store.tick(0)
        assert store.tick(10) == tuple(names)
        assert [event.kind for event in heard.poll()] == ["expired", "session_closed"] * 3


def test_a_follower_that_evicts_is_told_of_all_the_same(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="commit") as store:
        session = store.create("s", scheme="text@hf5")
        node = session.append(session.root, [1])
        with SessionStore.open(tmp_path / "store", read_only=True) as reader:
            reader.get("s")
            heard = reader.subscribe(kinds=["node_committed"])
            for token in range(3):
                reader.evict()
                node = session.append(node, [token])
                assert reader.get("s").node(node.id) == node
                assert [event.node_id for event in heard.poll()] == [node.id]


def test_what_cannot_go_is_not_told_of(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", memory_bytes=0) as store:
        held = [store.get(name) for name in filled(store, 3)]
        nodes = [session.head("main").node for session in held]
        heard = store.subscribe()
        for now in range(3):
            store.tick(now)
        told = [event.session_id for event in heard.poll()]
        assert len(told) == len(set(told)), "each once at most"
        assert [session.head("main").node for session in held] == nodes


@pytest.mark.parametrize("durability", ["group", "commit"])
def test_a_session_that_is_being_made_is_got_once_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Any) -> None:
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        made, got = journal.Journal.create, list[Session]()
        others: list[threading.Thread] = []

        def create(self: journal.Journal, *args: Any) -> Any:
            answer = made(self, *args)
            others.append(threading.Thread(target=lambda: got.append(store.get("s"))))
            others[0].start()  # the disk knows it, and the store not yet
            return answer

        monkeypatch.setattr(journal.Journal, "create", create)
        session = store.create("s", scheme="text@hf5")
        others[0].join()
        assert got == [session]


def test_what_the_disk_refused_of_a_new_session_stays_in_memory() -> None:
    disk = Disk()
    store = open_on(disk, durability="group")
    source = SessionStore.in_memory().create("x", scheme="text@hf5")
    tip = source.append(source.root, [1, 2, 3])
    disk.fault = Fault(1, errno.EIO, frozenset({"pwrite", "fdatasync"}), forever=True)
    store.fork(source, tip, "fork")
    with suppress(StoreFailed):
        store.flush()
    assert store.evict().sessions == ()
    assert [node.id for node in store.get("fork").tree] == [source.root.id, tip.id]
    with suppress(StoreFailed):
        store.close()


def test_evict_beside_threads_that_make_and_read(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        filled(store, 4)
        held = store.get("session 0")
        for turn in range(300):
            held.append(held.root, [turn])
        stop = threading.Event()

        def evict() -> None:
            while not stop.is_set():
                store.evict()
                store.usage()

        evictors = [threading.Thread(target=evict) for _ in range(2)]
        for thread in evictors:
            thread.start()

        def work(number: int) -> None:
            for turn in range(40):
                session = store.create(f"new {number} {turn}", scheme="text@hf5")
                session.append(session.root, [turn])
                del session
                assert len(list(held.tree)) == 311
                assert len(store.get(f"new {number} {turn}").tree) == 2

        try:
            in_threads(3, work)
        finally:
            stop.set()
            for thread in evictors:
                thread.join()
        held.close()
        store.evict()
        assert store.usage().node_bytes < 1000, "nothing is counted that is not there"


def test_features_of_drafts_and_pins_stay(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme=VL)
        items = [picture(number) for number in range(3)]
        nodes = [session.append(session.root, ids(20, number), media=[item]) for number, item in enumerate(items)]
        for item in items:
            store.put_features(item, np.zeros(50_000, np.float32))
        session.pin(nodes[0])
        draft = session.draft(nodes[1])
        store.evict()
        assert [item in store._features for item in items] == [True, True, False]
        draft.abort()
        store.evict()
        assert [item in store._features for item in items] == [True, False, False]


def test_a_pin_holds_from_the_moment_on_that_it_is_set_until_it_is_taken_away(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        filled(store, 1)
        session = store.get("session 0")
        store.evict()
        node = session.head("main").node  # read from the disk
        session.pin(node)
        address, known = id(node), weakref.ref(node)
        del node
        store.evict()
        [pin] = session.pins
        assert id(session.node(pin)) == address
        session.unpin(pin)
        store.evict()
        assert known() is None


def test_to_tell_the_time_counts_nothing_and_holds_no_session() -> None:
    """Bytes are counted when somebody asks for them: a scheduler tells the time often."""
    store = SessionStore.in_memory(idle_ttl=10)
    kept, closed, expired = (store.create(name, scheme="text@hf5") for name in ("kept", "closed", "expired"))
    gone = [weakref.ref(closed), weakref.ref(expired)]
    for session in (kept, closed, expired):
        session.append(session.root, [1] * 1000)
    store.tick(0)
    assert store._held == 0 and not store._fresh
    counted = store.usage().node_bytes
    assert counted >= store._held > 24_000
    for now in (2, 3):
        for session in (kept, closed, expired):
            session.append(session.root, [now] * 1000)
        store.tick(now)
    assert store.usage().node_bytes > counted + 24_000
    for session in (kept, closed, expired):
        session.append(session.root, [3])
    store.tick(3)
    closed.close()
    del closed, expired, session
    store.tick(5)
    kept.append(kept.root, [5])
    assert store.tick(13) == ("expired",)
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert 8_000 < store.usage().node_bytes < counted


class ClosesFirst(dict[str, Any]):
    """Another thread closes the session at the worst time."""

    def __setitem__(self, key: str, session: Any) -> None:
        session.close()
        super().__setitem__(key, session)


def test_a_session_that_is_closed_while_it_is_noted_is_not_held() -> None:
    store = SessionStore.in_memory(idle_ttl=10)
    session = store.create("s", scheme="text@hf5")
    store._uncounted = ClosesFirst()
    store.tick(0)
    assert session.closed and not store._uncounted
