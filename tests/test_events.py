"""Events: what is told of a store and in which order, when nobody reads, when somebody comes in between, when the disk fails."""

from __future__ import annotations

import dis
import errno
import gc
import logging
import pickle
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    CorruptTree,
    Draft,
    HeadMoved,
    Node,
    NodeHeld,
    OutOfRange,
    Session,
    SessionStore,
    SessionTreeError,
    StoreClosed,
    StoreFailed,
    Unsupported,
    events,
    news,
)
from sessiontree import session as session_module
from sessiontree.bundles import export_bundle, import_bundle
from sessiontree.events import KINDS, Event, Feed, Kind, Subscription
from sessiontree.journal import Durability
from sessiontree.testing.together import in_threads
from tests.disk import Disk
from tests.disk_model import AT, DURABILITIES, Stalled, fail, let_go, open_on
from tests.test_robustness import coming_in, forked

durabilities = pytest.mark.parametrize("durability", DURABILITIES)


def text_session(store: SessionStore, name: str = "s") -> Session:
    return store.create(name, scheme="text@hf5")


def kinds_of(found: Iterable[Event]) -> list[str]:
    return [event.kind for event in found]


def said(event: Event) -> dict[str, Any]:
    """What an event says beside its session."""
    fields = event._asdict()
    return {name: value for name, value in fields.items() if value is not None and name not in ("session_id", "incarnation")}


class Replica:
    """Trees and heads of all sessions, by what events say of them alone."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[bytes, tuple[bytes | None, int, int, int, str | None]]] = {}
        self.heads: dict[str, dict[str, tuple[bytes, int]]] = {}
        self.known: dict[bytes, tuple[bytes | None, int, int, int, str | None]] = {}
        self.open: dict[str, int] = {}
        self.ended: list[tuple[str, bytes]] = []
        self.count: Counter[str] = Counter()

    def take(self, found: Iterable[Event]) -> None:
        for event in found:
            self.count[event.kind] += 1
            getattr(self, event.kind)(event)

    def session_opened(self, event: Event) -> None:
        name, at = event.session_id, event.node_id
        assert name not in self.open, "it is open"
        self.open[name] = event.incarnation
        assert at is not None
        if name not in self.nodes:
            path = []
            if event.depth == 0:
                self.known[at] = (None, 0, 0, 0, None)
            step: bytes | None = at
            while step is not None:
                path.append(step)
                step = self.known[step][0]
            self.nodes[name] = {node_id: self.known[node_id] for node_id in reversed(path)}
            self.heads[name] = {}
        assert event.count == len(self.nodes[name])

    def session_closed(self, event: Event) -> None:
        assert self.open.pop(event.session_id) == event.incarnation

    def expired(self, event: Event) -> None:
        assert self.open[event.session_id] == event.incarnation

    def node_committed(self, event: Event) -> None:
        nodes = self.nodes[event.session_id]
        assert event.node_id is not None and event.node_id not in nodes
        assert event.parent_id is not None and event.depth is not None and event.start is not None and event.stop is not None
        parent = nodes[event.parent_id]  # it was told of before
        assert (event.depth, event.start) == (parent[1] + 1, parent[3])
        what = (event.parent_id, event.depth, event.start, event.stop, event.origin)
        nodes[event.node_id] = self.known[event.node_id] = what

    def head_moved(self, event: Event) -> None:
        heads = self.heads[event.session_id]
        assert event.head is not None and event.version is not None
        assert event.version > max((version for _, version in heads.values()), default=0)
        if event.node_id is None:
            del heads[event.head]
        else:
            assert event.node_id in self.nodes[event.session_id], "a node is told of before its head"
            heads[event.head] = (event.node_id, event.version)

    def branch_ended(self, event: Event) -> None:
        assert event.node_id is not None
        assert self.nodes[event.session_id][event.node_id][1] == event.depth
        self.ended.append((event.session_id, event.node_id))

    def nodes_dropped(self, event: Event) -> None:
        nodes = self.nodes[event.session_id]
        gone = {event.node_id}
        assert event.node_id in nodes
        for node_id, (parent, *_) in nodes.items():
            if parent in gone:
                gone.add(node_id)
        left = {node_id: what for node_id, what in nodes.items() if node_id not in gone}
        if left:
            self.nodes[event.session_id] = left
        else:
            del self.nodes[event.session_id], self.heads[event.session_id]

    def check(self, store: SessionStore) -> None:
        """That it is what the open sessions of a store are."""
        opened = {session.id: session for session in tuple(store._sessions.values())}
        assert self.open == {name: session.incarnation for name, session in opened.items()}
        for name, session in opened.items():
            tree = session.tree
            expected = [
                (node.id, (None if node.parent is None else node.parent.id, node.depth, node.start, node.stop)) for node in tree
            ]
            assert [(node_id, what[:4]) for node_id, what in self.nodes[name].items()] == expected
            assert all(what[4] == tree.node(node_id).origin for node_id, what in self.nodes[name].items() if what[0] is not None)
            heads = {head: (found.node.id, found.version) for head, found in tree.heads.items()}
            assert self.heads[name] == heads


class Tap:
    """A sink of a test's own."""

    kinds: ClassVar = KINDS

    def _take(self, batch: Any) -> None: ...

    def _wake(self) -> None: ...

    def _end(self) -> None: ...


# --- every kind -----------------------------------------------------------------------------------------------------------


def test_every_kind() -> None:
    with SessionStore.in_memory(idle_ttl=5) as store, store.subscribe(capacity=100) as heard:
        session = text_session(store)
        question = session.append(session.root, [1, 2, 3])
        session.set_head("main", question)
        draft = session.draft(question)
        draft.extend([4, 5])
        reply = draft.commit()
        session.set_head("main", reply)
        other = session.append(question, [6])
        session.set_head("main", other)
        fork = store.fork(session, other, "fork")
        session.drop(reply)
        session.drop_head("main")
        store._feed.tell(Event("evicted", "s", 1, nbytes=4096))
        store._feed.pass_on()
        store.tick(0)
        store.tick(5)
        opened, first, created, second, moved, third, again, ended, forked_, gone, dropped, all_ended, evicted, *closed = (
            heard.poll()
        )

        assert {event.session_id for event in (opened, first, created, gone, evicted)} == {"s"}
        assert {event.incarnation for event in (opened, first, created, gone, evicted)} == {1}
        assert said(opened) == {"kind": "session_opened", "node_id": session.root.id, "depth": 0, "count": 1}
        place = {"parent_id": session.root.id, "depth": 1, "start": 0, "stop": 3}
        assert said(first) == {"kind": "node_committed", "node_id": question.id, **place, "origin": "input"}
        place = {"parent_id": question.id, "depth": 2, "start": 3, "stop": 5}
        assert said(second) == {"kind": "node_committed", "node_id": reply.id, **place, "origin": "generated"}
        assert said(third)["node_id"] == other.id
        versions = [(head.kind, head.head, head.version, head.node_id) for head in (created, moved, again, dropped)]
        assert versions == [
            ("head_moved", "main", number, node_id) for number, node_id in enumerate((question.id, reply.id, other.id, None), 1)
        ]
        assert said(ended) == {"kind": "branch_ended", "node_id": reply.id, "depth": 2}
        assert (forked_.session_id, forked_.incarnation) == ("fork", fork.incarnation)
        assert said(forked_) == {"kind": "session_opened", "node_id": other.id, "depth": 2, "count": 3}
        assert said(gone) == {"kind": "nodes_dropped", "node_id": reply.id}
        assert said(all_ended) == {"kind": "branch_ended", "node_id": session.root.id, "depth": 0}
        assert said(evicted) == {"kind": "evicted", "nbytes": 4096}
        assert [(event.kind, event.session_id) for event in closed] == [
            ("expired", "s"),
            ("session_closed", "s"),
            ("expired", "fork"),
            ("session_closed", "fork"),
        ]
        assert pickle.loads(pickle.dumps(closed)) == closed


@durabilities
def test_all_ways_to_make_nodes_are_told_of(durability: Durability, tmp_path: Path) -> None:
    """Those that make many at once, or move a head with it: in one batch, a parent before its children, a head behind its node."""
    with open_on(Disk(), durability=durability) as store, store.subscribe() as heard:
        replica = Replica()
        session = text_session(store)
        one = session.append(session.root, [1, 2, 3, 4])
        two = session.append(one, [5, 6])
        session.truncate(two, 2)
        session.drop_last(two, 1)
        session.replace(two, [7], head="main")
        session.rewrite(two, [(1, 2, [9], ())])
        recorded = session.record([1, 2, 3, 4, 5, 6], [8, 8])
        assert session.append(one, [5, 6]) is two, "equal content: no node, no event"
        session.set_head("main", recorded.completion)
        heard_so_far = heard.poll()
        replica.take(heard_so_far)
        replica.check(store)
        assert replica.count["node_committed"] == len(session.tree) - 1
        export_bundle(store, tmp_path / "b.stb")
        with open_on(Disk(), durability=durability) as other, other.subscribe() as there:
            import_bundle(other, tmp_path / "b.stb")
            copy = Replica()
            copy.take(there.poll())
            copy.check(other)
            assert copy.nodes == replica.nodes


def test_a_dropped_session_is_closed_and_its_root_forgotten() -> None:
    for store in (SessionStore.in_memory(), open_on(Disk())):
        with store, store.subscribe() as heard:
            session = text_session(store)
            session.append(session.root, [1])
            store.drop("s")
            assert kinds_of(heard.poll()) == ["session_opened", "node_committed", "session_closed", "nodes_dropped"]


def test_of_nodes_that_are_dropped_together_the_topmost_are_told_of() -> None:
    for store in (SessionStore.in_memory(), open_on(Disk())):
        with store, store.subscribe(kinds=["nodes_dropped"]) as heard:
            session = text_session(store)
            one, two = (session.append(session.root, [number]) for number in range(2))
            below = session.append(session.append(one, [5]), [6])
            session.drop(below, two, one, two)
            assert {event.node_id for event in heard.poll()} == {one.id, two.id}
            assert len(session.tree) == 1


def test_what_is_told_of_is_there() -> None:
    """Whoever is told of a session or a node finds it."""
    found: list[object] = []
    with SessionStore.in_memory() as store:

        def look() -> None:
            for event in heard.poll():
                session = store.get(event.session_id)
                found.append(session.node(event.node_id) if event.node_id else session)

        heard = store.subscribe(notify=look, kinds=["session_opened", "node_committed", "head_moved"])
        session = text_session(store)
        node = session.append(session.root, [1])
        session.set_head("main", node)
        assert found == [session.root, node, node]


def test_closing_is_told_of_once() -> None:
    with SessionStore.in_memory() as store, store.subscribe(kinds=["session_closed"]) as heard:
        session = text_session(store)
        session.close()
        session.close()
        again = text_session(store)
        store.close()
        assert [(event.kind, event.incarnation) for event in heard.poll()] == [
            ("session_closed", 1),
            ("session_closed", again.incarnation),
        ]


def test_nothing_is_told_of_what_failed() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        node = session.append(session.root, [1])
        session.set_head("main", node)
        with store.subscribe() as heard:
            with pytest.raises(HeadMoved):
                session.set_head("main", session.root, expected=session.root)
            with pytest.raises(HeadMoved):
                session.replace(node, [2], head="main", expected=session.root)
            with pytest.raises(NodeHeld):
                session.drop(node)
            with pytest.raises(SessionTreeError):
                text_session(store)
            session.draft(node).abort()
            assert heard.poll() == []


# --- branches -------------------------------------------------------------------------------------------------------------


def test_a_branch_ends_when_its_last_head_or_draft_leaves() -> None:
    with SessionStore.in_memory() as store, store.subscribe(kinds=["branch_ended"]) as heard:
        session = text_session(store)
        prompt = session.append(session.root, [1])
        one, two = (session.append(prompt, [2, number]) for number in range(2))
        deep = session.append(one, [3])
        session.draft(prompt).abort()
        assert heard.poll() == [], "nobody has said where the conversation is"
        session.set_head("main", deep)
        session.set_head("side", one)
        draft = session.draft(deep)
        session.set_head("main", two)
        assert heard.poll() == [], "a draft is open there"
        draft.abort()
        assert [event.node_id for event in heard.poll()] == [deep.id], "the side head holds what is above"
        draft = session.draft(two)
        reply = draft.commit()
        assert heard.poll() == [], "a commit ends nothing"
        session.set_head("main", reply)
        assert heard.poll() == [], "what a head goes on from does not end"
        session.drop_head("side")
        assert [event.node_id for event in heard.poll()] == [one.id]
        session.close()
        assert heard.poll() == [], "that all are done, session_closed says"


def held_ids(session: Session) -> set[bytes]:
    """What heads and open drafts are at or below."""
    tips = [*session.heads.values(), *(draft.parent for draft in session._drafts())]
    return {node.id for tip in tips for node in tip.path()}


def newly_done(session: Session, held: set[bytes]) -> set[bytes]:
    """The topmost of those that were held, and are done."""
    done = {node.id for node in session.tree if node.id in held and session.branch_done(node)}
    return {node_id for node_id in done if (parent := session.node(node_id).parent) is None or parent.id not in done}


# --- a replay is the store ------------------------------------------------------------------------------------------------


class Play:
    """Random operations on the sessions of a store, each checked: what was told of branches is what the pull form says."""

    def __init__(self, store: SessionStore, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self.drafts: list[tuple[Session, Draft]] = []
        self.made = 0

    def session(self) -> Session:
        opened = list(self.store._sessions.values())
        if not opened or (len(opened) < 3 and self.rng.random() < 0.2):
            self.made += 1
            asleep = sorted(set(self.store.sessions()) - {session.id for session in opened})
            if asleep and self.rng.random() < 0.5:
                return self.store.get(self.rng.choice(asleep))
            return text_session(self.store, f"{self.made}-{self.rng.random()}")
        return self.rng.choice(opened)

    def step(self) -> tuple[Session, set[bytes]] | None:
        """Do one thing. Where it may end branches: the session, and what was held in it before."""
        rng, session = self.rng, self.session()
        nodes = list(session.tree)
        node = rng.choice(nodes)
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        held = held_ids(session)
        what = rng.randrange(20)
        if what < 6:
            session.append(node, tokens, key=rng.choice((None, None, str(rng.randrange(4)))))
        elif what < 8:
            draft = session.draft(node)
            draft.extend(tokens)
            self.drafts.append((session, draft))
        elif what < 11 and self.drafts:
            of, draft = self.drafts.pop(rng.randrange(len(self.drafts)))
            if rng.random() < 0.5:
                draft.commit()
            else:
                held = held_ids(of)
                draft.abort()
                return of, held
        elif what < 14:
            session.set_head(rng.choice("abc"), node)
            return session, held
        elif what == 14 and session.heads:
            session.drop_head(rng.choice(sorted(session.heads)))
            return session, held
        elif what == 15 and node.stop:
            session.truncate(node, rng.randrange(node.stop))
        elif what == 16:
            session.replace(node, tokens, head=rng.choice("abc"))
            return session, held
        elif what == 17:
            session.drop(node)
        elif what == 18:
            self.made += 1
            self.store.fork(session, node, f"fork {self.made} {rng.random()}")
        elif what == 19:
            if rng.random() < 0.5:
                session.close()
            elif rng.random() < 0.3:
                self.store.gc(recent=rng.choice((None, 3, 8)))
            else:
                session.record([*node.input_ids().tolist(), *tokens], tokens)
        return None


def played(store: SessionStore, replica: Replica, rng: random.Random, steps: int) -> None:
    with store.subscribe() as heard:
        for session in tuple(store._sessions.values()):
            assert session.id in replica.open
        play = Play(store, rng)
        for _ in range(steps):
            may_end = None
            with suppress(SessionTreeError):
                may_end = play.step()
            before = len(replica.ended)
            replica.take(heard.poll(rng.choice((None, 2))))
            replica.take(heard.poll())
            ended = replica.ended[before:]
            assert len(set(ended)) == len(ended)
            if may_end is None:
                assert not ended
            elif not may_end[0].closed:
                session, held = may_end
                assert {(session.id, node_id) for node_id in newly_done(session, held)} == set(ended)
            replica.check(store)


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_replay_of_all_events_is_the_store(seed: int) -> None:
    with SessionStore.in_memory() as store:
        replica = Replica()
        played(store, replica, random.Random(seed), 40)


@durabilities
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_a_replay_of_all_events_is_the_store_on_disk(durability: Durability, seed: int) -> None:
    """And goes on being it when the store is opened again."""
    disk, replica, rng = Disk(), Replica(), random.Random(seed)
    for _ in range(3):
        with open_on(disk, durability=durability) as store:
            played(store, replica, rng, 20)
        replica.open.clear()  # the subscription ended before the store was closed


@pytest.mark.parametrize("where", ["memory", *DURABILITIES])
def test_threads_write_and_the_replay_is_the_store(where: Any) -> None:
    """Four threads on three sessions, and two that read meanwhile; all that both got, each in its order, is all there is."""
    store = SessionStore.in_memory() if where == "memory" else open_on(Disk(), durability=where)
    with store:
        heard = store.subscribe()
        replica, stop = Replica(), threading.Event()

        def read() -> None:
            while not stop.is_set():
                heard.wait(1.0)
                replica.take(heard.poll())

        reader = threading.Thread(target=read)
        reader.start()
        sessions = [text_session(store, str(number)) for number in range(3)]

        def work(number: int) -> None:
            rng = random.Random(number)
            for step in range(60):
                session = rng.choice(sessions)
                node = rng.choice(list(session.tree))
                with suppress(SessionTreeError):
                    if step % 4 == 0:
                        session.set_head(rng.choice("ab"), node)
                    elif step % 4 == 1:
                        draft = session.draft(node)
                        draft.extend([number, step])
                        draft.commit()
                    else:
                        session.append(node, [rng.randrange(3)])

        in_threads(4, work)
        stop.set()
        session = text_session(store, "last")
        session.append(session.root, [1])
        reader.join(20)
        assert not reader.is_alive()
        replica.take(heard.poll())
        replica.check(store)
        assert replica.count["node_committed"] == sum(len(each.tree) - 1 for each in (*sessions, session))


def test_all_subscriptions_see_one_order() -> None:
    with SessionStore.in_memory() as store:
        one, two = store.subscribe(), store.subscribe()
        sessions = [text_session(store, str(number)) for number in range(4)]

        def work(number: int) -> None:
            session = sessions[number]
            node = session.root
            for _ in range(200):
                node = session.append(node, [1])

        in_threads(4, work)
        found = one.poll()
        assert found == two.poll() and len(found) == 804


def test_what_becomes_visible_after_subscribing_is_told_of() -> None:
    """Of writers that are in the middle of it meanwhile: each node is in the tree that was looked at afterwards, or told of."""
    with SessionStore.in_memory() as store:
        session = text_session(store)
        done = threading.Event()

        def write() -> None:
            node = session.root
            for _ in range(2000):  # or it would keep the lock for itself as long as the machine likes
                if done.is_set():
                    return
                node = session.append(node, [1])

        writer = threading.Thread(target=write)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            writer.start()
            seen = []
            for _ in range(20):
                heard = store.subscribe()
                seen.append((heard, {node.id for node in session.tree}))
            done.set()
            writer.join()
        finally:
            sys.setswitchinterval(interval)
        for heard, there in seen:
            told = {event.node_id for event in heard.poll()}
            assert there | told == {node.id for node in session.tree}


# --- what there is no room for ---------------------------------------------------------------------------------------------


class Model:
    """A subscription as its contract says: events and counts of lost ones, in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue: list[int | None] = []  # versions; None stands for a mark
        self.lost = 0
        self.marks: list[int] = []

    def take(self, versions: list[int]) -> None:
        for version in versions:
            room = self.capacity - len(self.queue)
            if self.lost:
                if room >= 2:
                    self.queue += [None, version]
                    self.marks.append(self.lost)
                    self.lost = 0
                else:
                    self.lost += 1
            elif room >= 1:
                self.queue.append(version)
            else:
                self.lost = 1

    def poll(self, limit: int | None) -> list[tuple[str, int]]:
        count = len(self.queue) if limit is None else min(limit, len(self.queue))
        found = [("lost", self.marks.pop(0)) if version is None else ("head_moved", version) for version in self.queue[:count]]
        del self.queue[:count]
        if self.lost and not self.queue and (limit is None or count < limit):
            found.append(("lost", self.lost))
            self.lost = 0
        return found


@given(st.integers(1, 6), st.lists(st.one_of(st.integers(1, 4), st.tuples(st.none() | st.integers(0, 5)))))
def test_what_is_received_and_what_is_lost_is_all_there_is(capacity: int, steps: list[Any]) -> None:
    """Batches of a few events, and polls, against a model: which are kept, where the lost ones stood, and how many they were."""
    feed = Feed()
    heard = Subscription(feed, capacity, KINDS, None)
    feed.add(heard)
    model, version, received = Model(capacity), 0, 0
    lost = 0
    for step in [*steps, (None,)]:
        if isinstance(step, int):
            batch = range(version + 1, version + 1 + step)
            version += step
            feed.put(tuple(tuple(Event("head_moved", "s", 1, version=each)) for each in batch))
            feed.pass_on()
            model.take(list(batch))
        else:
            found = heard.poll(*step)
            assert all(type(event) is Event for event in found)
            got = [(event.kind, event.count if event.kind == "lost" else event.version) for event in found]
            assert got == model.poll(*step)
            received += sum(kind != "lost" for kind, _ in got)
            lost += sum(number or 0 for kind, number in got if kind == "lost")
    assert received + lost == version
    assert feed.lost == lost


def test_a_slow_subscriber_holds_no_more_than_its_capacity_and_holds_up_nobody() -> None:
    with SessionStore.in_memory() as store:
        slow, quick = store.subscribe(capacity=10), store.subscribe()
        session = text_session(store)
        node = session.root
        for _ in range(500):
            node = session.append(node, [1])
        assert len(slow._queue) == 10
        assert len(quick.poll()) == 501
        found = slow.poll()
        assert kinds_of(found) == ["session_opened", *["node_committed"] * 9, "lost"]
        assert found[-1] == Event("lost", "", 0, count=491)
        session.append(node, [1])
        assert kinds_of(slow.poll()) == ["node_committed"], "it goes on behind the gap"


def test_a_writer_waits_for_nobody_who_tells_or_reads() -> None:
    """Another thread stands in the middle of either, with the feed's lock: the writer goes on, and what it put is told later."""
    with SessionStore.in_memory() as store:
        heard, session = store.subscribe(), text_session(store)
        began, go = threading.Event(), threading.Event()

        def hold() -> None:
            began.set()
            go.wait(20)

        class Slow(Tap):
            def _take(self, batch: Any) -> None:
                hold()

        slow = Slow()

        def read() -> None:
            store._feed.alone(hold)

        def tell() -> None:
            store._feed.add(slow)
            session.append(session.root, [1])

        for stand in (read, tell):
            began.clear()
            go.clear()
            other = threading.Thread(target=stand)
            other.start()
            assert began.wait(20)
            before = len(session.tree)
            node = session.append(session.root, [2, before])
            session.set_head("main", node)
            assert len(session.tree) == before + 1 and not go.is_set(), "it is done while the other one still stands there"
            go.set()
            other.join(20)
            assert not store._feed._inbox, "the other one told of it"
        counted = Counter(kinds_of(heard.poll()))
        assert counted == {"session_opened": 1, "node_committed": 3, "head_moved": 2, "branch_ended": 1}


def test_lost_is_told_of_whatever_kinds_are_wanted() -> None:
    with SessionStore.in_memory() as store:
        heard = store.subscribe(capacity=1, kinds=["head_moved"])
        session = text_session(store)
        node = session.append(session.root, [1])
        for _ in range(3):
            session.set_head("main", node)
        assert [(event.kind, event.count) for event in heard.poll()] == [("head_moved", None), ("lost", 2)]


# --- reading --------------------------------------------------------------------------------------------------------------


def test_wait_wakes_up_and_gives_up() -> None:
    with SessionStore.in_memory() as store:
        heard = store.subscribe()
        assert not heard.wait(0)
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(heard.wait(30)))
        waiter.start()
        text_session(store)
        waiter.join(20)
        assert found == [True]
        assert heard.wait(0) and kinds_of(heard.poll()) == ["session_opened"]
        waiter = threading.Thread(target=lambda: found.append(heard.wait()))
        waiter.start()
        heard.close()
        waiter.join(20)
        assert not waiter.is_alive() and found == [True, False]


def test_iteration_ends_with_the_store_behind_the_last_event() -> None:
    store = SessionStore.in_memory()
    heard, found = store.subscribe(), list[Event]()
    reader = threading.Thread(target=lambda: found.extend(heard))
    reader.start()
    session = text_session(store)
    node = session.root
    for _ in range(50):
        node = session.append(node, [1])
    store.close()
    reader.join(20)
    assert not reader.is_alive() and heard.closed
    assert kinds_of(found) == ["session_opened", *["node_committed"] * 50, "session_closed"]
    assert list(heard) == [] and heard.poll() == []


def test_what_was_told_before_it_was_closed_can_be_read() -> None:
    with SessionStore.in_memory() as store:
        with store.subscribe() as heard:
            session = text_session(store)
        session.append(session.root, [1])
        assert heard.closed and kinds_of(heard.poll()) == ["session_opened"]
        assert not store._feed.wanted, "nobody listens"


def test_wrong_arguments() -> None:
    store = SessionStore.in_memory()
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, lambda: store.subscribe("many")),  # type: ignore[arg-type]
        (TypeError, lambda: store.subscribe(kinds="evicted")),  # type: ignore[arg-type]
        (TypeError, lambda: store.subscribe(notify=3)),  # type: ignore[arg-type]
        (OutOfRange, lambda: store.subscribe(0)),
        (Unsupported, lambda: store.subscribe(kinds=["node_comitted"])),  # type: ignore[list-item]
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()
    assert not store._feed.wanted
    heard = store.subscribe()
    for error, call in [
        (OutOfRange, lambda: heard.poll(-1)),
        (TypeError, lambda: heard.poll("1")),  # type: ignore[arg-type]
        (OutOfRange, lambda: heard.wait(-1)),
        (OutOfRange, lambda: heard.wait(float("nan"))),
        (TypeError, lambda: pickle.dumps(heard)),
    ]:
        with pytest.raises(error):
            call()
    assert heard.poll(0) == []
    store.close()
    with pytest.raises(StoreClosed):
        store.subscribe()


# --- notify ---------------------------------------------------------------------------------------------------------------


def test_notify_is_called_once_for_each_time_that_something_is_there_again() -> None:
    calls: list[int] = []
    with SessionStore.in_memory() as store:
        heard = store.subscribe(notify=lambda: calls.append(len(heard._queue)))
        session = text_session(store)
        node = session.root
        for _ in range(4):
            node = session.append(node, [1])
        assert calls == [1]
        heard.poll(2)
        session.append(node, [2])
        assert calls == [1], "there was something all the time"
        heard.poll()
        heard.poll()
        session.append(node, [3])
        session.append(node, [4])
        assert calls == [1, 1]
        heard.poll(2)
        session.append(node, [5])
        assert calls == [1, 1, 1]


def test_threads_that_write_call_notify_at_most_once_for_each_time() -> None:
    calls: list[None] = []
    with SessionStore.in_memory() as store:
        heard = store.subscribe(notify=lambda: calls.append(None))
        sessions = [text_session(store, str(number)) for number in range(4)]

        def work(number: int) -> None:
            for each in range(100):
                sessions[number].append(sessions[number].root, [each])

        in_threads(4, work)
        assert len(calls) == 1
        assert len(heard.poll()) == 404


def test_what_notify_raises_is_logged_and_reaches_no_writer(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("broken listener")

    with SessionStore.in_memory() as store:
        heard = store.subscribe(notify=broken)
        other = store.subscribe()
        session = text_session(store)
        session.append(session.root, [1])
        assert len(other.poll()) == 2
    assert [record.name for record in caplog.records] == ["sessiontree.events"] * 2, "when something came, and at the end"
    assert "broken listener" in caplog.text
    assert len(heard.poll()) == 3


def test_a_notify_that_writes_polls_and_closes() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        replica, done = Replica(), list[Node]()
        watched = store.subscribe()
        replica.open["s"] = session.incarnation
        replica.nodes["s"], replica.heads["s"] = {session.root.id: (None, 0, 0, 0, None)}, {}

        def notify() -> None:
            if len(done) < 3:
                done.append(session.append(session.root, [7, len(done)]))
                heard.poll()
            else:
                heard.close()

        heard = store.subscribe(notify=notify)
        for number in range(5):
            session.append(session.root, [number])
        assert heard.closed and len(done) == 3
        replica.take(watched.poll())
        replica.check(store)


# --- who goes without a word ----------------------------------------------------------------------------------------------


def test_a_dropped_subscription_is_gone_and_costs_nothing_more() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        heard = store.subscribe()
        there = weakref.ref(heard)
        session.append(session.root, [1])
        assert store._feed.wanted
        del heard
        gc.collect()
        assert there() is None
        session.append(session.root, [2])
        assert not store._feed.wanted and not store._feed._sinks and not store._feed._inbox


def test_events_hold_no_nodes_and_no_store() -> None:
    store = SessionStore.in_memory()
    heard = store.subscribe()
    session = text_session(store)
    node = weakref.ref(session.append(session.root, [1]))
    store.close()
    gone = weakref.ref(store)
    del store, session
    gc.collect()
    assert node() is None and gone() is None
    assert kinds_of(heard.poll()) == ["session_opened", "node_committed", "session_closed"]


def test_after_a_fork_each_process_has_its_own() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        heard = store.subscribe()
        node = session.append(session.root, [1])
        feed = store._feed
        began, go = threading.Event(), threading.Event()

        class Slow(Tap):
            def _take(self, batch: Any) -> None:
                began.set()
                go.wait(20)

        slow = Slow()
        feed.add(slow)
        other = threading.Thread(target=session.append, args=(node, [2]))
        other.start()
        began.wait(20)  # another thread is in the middle of telling, with the lock

        def child() -> None:
            go.set()
            session.append(node, [3])
            assert not feed._inbox, "nobody else is here to tell of it"
            assert len(heard.poll()) == 3
            session.append(node, [4])
            assert heard.wait(0) and len(heard.poll()) == 1

        assert forked(child) == 0
        go.set()
        other.join(20)
        session.append(node, [5])
        assert len(heard.poll()) == 3


# --- coming in between ----------------------------------------------------------------------------------------------------


def followed(store: SessionStore) -> tuple[Session, Subscription, Replica]:
    heard, replica = store.subscribe(), Replica()
    session = text_session(store)
    session.append(session.root, [0])
    session.set_head("main", session.root)
    return session, heard, replica


WRITES: dict[str, Callable[[Session], object]] = {
    "append": lambda session: session.append(session.root, [1, len(session.tree)]),
    "set_head": lambda session: session.set_head("main", session.append(session.root, [2, len(session.tree)])),
    "replace": lambda session: session.replace(session.children(session.root)[0], [3, len(session.tree)], head="main"),
    "draft": lambda session: session.draft(session.root).abort(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_signal_handler_writes_and_reads_at_every_place_of_a_write(write: str) -> None:
    at = 0
    while True:
        with SessionStore.in_memory() as store:
            session, heard, replica = followed(store)
            between: list[Event] = []

            def handler() -> None:
                session.append(session.root, [9])  # noqa: B023
                session.set_head("side", session.root)  # noqa: B023
                between.extend(heard.poll())  # noqa: B023

            with coming_in(at, handler) as ran:
                WRITES[write](session)
            replica.take(between)
            replica.take(heard.poll())
            replica.check(store)
        if not ran:
            assert at > 15
            return
        at += 1


def test_a_signal_handler_writes_at_every_place_of_a_poll() -> None:
    at = 0
    while True:
        with SessionStore.in_memory() as store:
            calls: list[None] = []
            session, heard, replica = followed(store)
            heard._notify = lambda: calls.append(None)  # noqa: B023
            with coming_in(at, lambda: session.append(session.root, [9])) as ran:  # noqa: B023
                found = heard.poll()
            waits = heard.wait(0)
            found += heard.poll()
            replica.take(found)
            replica.check(store)
            if not ran:
                return
            assert len(found) in (3, 4) and waits == (bool(calls))
        at += 1


def test_a_signal_handler_may_not_subscribe_or_wait_where_it_would_miss_something() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        heard = store.subscribe()
        refused = Counter[str]()
        at = 0
        while True:
            late: list[tuple[Subscription, set[bytes]]] = []

            def handler() -> None:
                try:
                    late.append((store.subscribe(), {node.id for node in session.tree}))  # noqa: B023
                except Unsupported:
                    refused["subscribe"] += 1
                try:
                    heard.wait(0)
                except Unsupported:
                    refused["wait"] += 1

            with coming_in(at, handler) as ran:
                session.append(session.root, [at])
            for each, there in late:
                told = {event.node_id for event in each.poll()}
                assert there | told == {node.id for node in session.tree}
            if not ran:
                break
            at += 1
        assert refused["subscribe"] > 5 and refused["wait"] > 2


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th place of some files' code where CPython looks for signals."""

    def __init__(self, n: int) -> None:
        self.left = n
        self._last: dict[FrameType, str] = {}
        self._names: dict[CodeType, dict[int, str]] = {}

    FILES: ClassVar = frozenset(module.__file__ for module in (events, news, session_module))

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.left >= 0:
            self.left -= self._last.get(frame, "").startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if not self.left:
                self.left = -1
                raise KeyboardInterrupt
            if code not in self._names:
                self._names[code] = {each.offset: each.opname for each in dis.get_instructions(code)}
            self._last[frame] = self._names[code][frame.f_lasti]
        return self


@pytest.mark.parametrize("write", WRITES)
def test_an_interrupt_at_every_instruction_loses_nothing_and_tells_nothing_twice(write: str) -> None:
    n = 0
    while True:
        n += 1
        with SessionStore.in_memory() as store:
            calls: list[None] = []
            session, heard, replica = followed(store)
            small = store.subscribe(capacity=1, kinds=["node_committed", "head_moved"])
            other = store.subscribe(notify=lambda: calls.append(None))  # noqa: B023
            replica.take(heard.poll())
            interrupt = Interrupt(n)
            sys.settrace(interrupt)
            try:
                WRITES[write](session)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            helper = threading.Thread(target=session.append, args=(session.root, [8]))  # no lock was left behind
            helper.start()
            helper.join(20)
            assert not helper.is_alive()
            found = heard.poll()
            replica.take(found)
            replica.check(store)
            assert other.poll() == found
            assert len(calls) == 1
            wanted = [event for event in found if event.kind in small.kinds]
            kept, *lost = small.poll()
            assert kept == wanted[0] and [event.count for event in lost] == ([len(wanted) - 1] if len(wanted) > 1 else [])
        if interrupt.left > 0:
            assert n > 30
            return


# --- on disk --------------------------------------------------------------------------------------------------------------


def test_nothing_is_told_before_it_is_durable() -> None:
    """Under "commit": a write that the disk has not answered is seen by nobody, and told to nobody."""
    disk = Stalled()
    with open_on(disk, durability="commit") as store:
        session = text_session(store)
        heard = store.subscribe()
        disk.go.clear()
        writer = threading.Thread(target=session.append, args=(session.root, [1]))
        writer.start()
        assert disk.waits.wait(20)
        assert heard.poll() == [] and len(session.tree) == 1
        disk.go.set()
        assert heard.wait(20)
        assert kinds_of(heard.poll()) == ["node_committed"]
        writer.join(20)


@durabilities
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_what_the_disk_refuses_is_never_told(durability: Durability, call: str, error: int) -> None:
    """What was told is what the session shows, in memory and, under "commit", on the disk; a later write goes on from there."""
    for n in range(1, 6):
        disk = Disk()
        store = open_on(disk, durability=durability)
        heard, replica = store.subscribe(), Replica()
        session = text_session(store)
        fail(disk, n, call, error)
        shown: list[Event] = []
        for number in range(8):
            with suppress(StoreFailed):
                node = session.append(session.root, [number])
                session.set_head("main", node)
            shown += heard.poll()
        replica.take(shown)
        replica.check(store)
        disk.fault = None
        told = set(replica.nodes["s"])
        if durability == "commit":
            with open_on(disk.copy(), durability=durability) as copy:
                there = {node.id for node in copy.get("s").tree}
            assert store._journal is not None
            assert told <= there if store._journal.failed else told == there  # what a failed sync left, nobody knows
        let_go(store)


def test_threads_under_commit_are_told_of_what_the_disk_took() -> None:
    """Eight threads, a full disk now and then: what was told is what is on the disk."""
    for n in range(1, 8):
        disk = Disk()
        store = open_on(disk, durability="commit")
        heard, replica = store.subscribe(), Replica()
        session = text_session(store)
        fail(disk, n, "pwrite", errno.ENOSPC)

        def work(number: int) -> None:
            for each in range(4):
                with suppress(StoreFailed):
                    node = session.append(session.root, [number, each])  # noqa: B023
                    session.set_head(str(number), node)  # noqa: B023

        in_threads(8, work)
        with suppress(StoreFailed):
            store.flush()
        replica.take(heard.poll())
        replica.check(store)
        with open_on(disk.copy(), durability="commit") as copy:
            tree = copy.get("s").tree
            assert set(replica.nodes["s"]) == {node.id for node in tree}
            assert replica.heads["s"] == {name: (head.node.id, head.version) for name, head in tree.heads.items()}
        let_go(store)


def test_sessions_that_are_evicted_and_come_back() -> None:
    """Evicted once, with the bytes that it held; back without a word, the same incarnation; expired where it sleeps."""
    with open_on(Disk(), idle_ttl=5) as store:
        heard, replica = store.subscribe(), Replica()
        store.tick(0)
        session = text_session(store)
        node = session.append(session.root, [1] * 1000)
        replica.take(heard.poll())
        incarnation, node_id = session.incarnation, node.id
        del session, node
        gc.collect()
        assert store.evict().sessions == ("s",)
        [event] = heard.poll()
        assert (event.kind, event.session_id, event.incarnation) == ("evicted", "s", incarnation)
        assert event.nbytes is not None and event.nbytes > 4000
        assert store.get("s").node(node_id).stop == 1000 and heard.poll() == []
        replica.check(store)
        store.get("s").append(node_id, [2])
        assert kinds_of(heard.poll()) == ["node_committed"]
        gc.collect()
        store.evict()
        store.tick(9)
        store.tick(20)
        assert [(event.kind, event.incarnation) for event in heard.poll()] == [
            ("evicted", incarnation),
            ("expired", incarnation),
            ("session_closed", incarnation),
        ]


def test_gc_tells_of_sessions_that_nobody_has_open() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        kept = session.append(session.root, [1])
        loose = session.append(kept, [2])
        session.append(loose, [3])
        session.set_head("main", kept)
        session.close()
        heard = store.subscribe()
        store.gc(recent=0)
        assert heard.poll() == [Event("nodes_dropped", "s", 0, loose.id)]


def test_a_store_that_follows_tells_of_what_it_finds() -> None:
    disk = Disk()
    with open_on(disk) as store, open_on(disk, read_only=True) as reader:
        heard, replica = reader.subscribe(), Replica()
        rng = random.Random(5)
        session = text_session(store)
        for _ in range(60):
            nodes = list(session.tree)
            node = rng.choice(nodes)
            what = rng.randrange(8)
            with suppress(SessionTreeError):
                if what < 4:
                    session.append(node, [rng.randrange(5)])
                elif what < 6:
                    session.set_head(rng.choice("ab"), node)
                elif what == 6:
                    session.drop(node)
                else:
                    store.gc()
            if rng.random() < 0.5:
                store.flush()
                if "s" in reader.sessions():
                    reader.get("s")
                    found = heard.poll()
                    if "s" not in replica.nodes:  # what it had when it was opened, no event tells
                        for each in reader.get("s").tree:
                            parent = None if each.parent is None else each.parent.id
                            origin = None if parent is None else each.origin
                            replica.known[each.id] = (parent, each.depth, each.start, each.stop, origin)
                        replica.nodes["s"] = {each.id: replica.known[each.id] for each in reader.get("s").tree}
                        there = reader.get("s").tree.heads
                        replica.heads["s"] = {name: (head.node.id, head.version) for name, head in there.items()}
                    replica.take(found)
                    replica.nodes["s"] = dict(sorted(replica.nodes["s"].items()))
                    assert set(replica.nodes["s"]) == {each.id for each in reader.get("s").tree}
                    heads = {name: (head.node.id, head.version) for name, head in reader.get("s").tree.heads.items()}
                    assert replica.heads["s"] == heads
        assert replica.count["node_committed"] > 5 and replica.count["nodes_dropped"] > 1


def test_a_follower_that_cannot_read_a_node_says_that_one_is_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    with open_on(disk) as store, open_on(disk, read_only=True) as reader:
        session = text_session(store)
        store.flush()
        heard = reader.subscribe()
        opened = reader.get("s")
        one = session.append(session.root, [7] * 100)
        two = session.append(session.root, [6] * 100)
        store.flush()

        def found(*given: Any) -> Any:
            content = disk.content(".seg")
            content[content.index(bytes([7, 0, 0, 0] * 20))] ^= 1
            return followed_so_far(*given)

        followed_so_far = news.followed
        monkeypatch.setattr(news, "followed", found)
        assert reader.get("s") is opened
        assert [(event.kind, event.count, event.node_id) for event in heard.poll()] == [
            ("session_opened", 1, session.root.id),
            ("lost", 1, None),
            ("node_committed", None, two.id),
        ]
        assert one.id not in {event.node_id for event in heard.poll()}
        assert "sessiontree.news" in {record.name for record in caplog.records}
        with pytest.raises(CorruptTree):
            opened.node(one.id)


# --- the log --------------------------------------------------------------------------------------------------------------


def test_stores_log_what_happens_to_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sessiontree")
    disk = Disk()
    with open_on(disk, idle_ttl=5) as store:
        session = text_session(store)
        node = session.append(session.root, [1])
        session.append(node, [2])
        store.tick(0)
        store.tick(9)
        store.gc(recent=0)
    messages = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert {name for name, _, _ in messages} == {"sessiontree.store"} and {level for _, level, _ in messages} == {"INFO"}
    opened, closed_idle, collected, closed = [text for _, _, text in messages]
    assert opened.startswith("opened <SessionStore") and AT in opened and "durability group" in opened
    assert closed_idle == "tick(9.0) closed 1 idle sessions: 's'"
    assert "nodes_before=2, nodes_after=0" in collected
    assert closed.startswith("closed <SessionStore")


def test_recovery_and_damage_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    session.append(session.root, [1] * 100)
    killed = disk.copy()
    let_go(store)
    content = killed.content(".seg")
    stop = len(bytes(content).rstrip(b"\0"))
    torn = killed.copy()
    torn.content(".seg")[stop - 3] ^= 255
    with open_on(torn) as again:
        assert again.recovered_bytes
    assert [(record.levelname, f"cut {again.recovered_bytes} bytes" in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True)
    ]
    caplog.clear()
    damaged = disk.copy()
    damaged.content(".seg")[60] ^= 255
    with open_on(damaged, strict=False) as again:
        assert again.damaged
    assert [(record.name, record.levelname) for record in caplog.records] == [("sessiontree.store", "ERROR")]


@durabilities
def test_a_failed_sync_is_logged_once(durability: Durability, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    store = open_on(disk, durability=durability)
    session = text_session(store)
    fail(disk, 1, "fdatasync", errno.EIO, forever=True)
    for number in range(3):
        with suppress(StoreFailed):
            session.append(session.root, [number])
            store.flush()
    let_go(store)
    assert [(record.name, record.levelname) for record in caplog.records] == [("sessiontree.backends.segment_log", "ERROR")]


def test_the_library_adds_no_handlers() -> None:
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "sessiontree"]
    assert "sessiontree.store" in names
    assert not any(logging.getLogger(name).handlers for name in names)


def test_kinds_are_those_of_the_type() -> None:
    wanted: list[Kind] = ["evicted"]
    with SessionStore.in_memory() as store:
        assert store.subscribe(kinds=wanted).kinds == {"evicted", "lost"}
        assert store.subscribe().kinds == KINDS
