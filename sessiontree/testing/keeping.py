"""Pins, drops and gc: what can be reached stays byte for byte, and what cannot goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import pytest

from sessiontree import GcReport, NodeHeld, Session, SessionExists, UnknownNode, UnknownSession, Unsupported
from sessiontree.testing.base import Conformance, Home, Opener
from sessiontree.testing.drawn import conversation
from sessiontree.testing.media import features_of
from sessiontree.testing.model import PLACEHOLDER, Log, Picture, Turn, add, all_seen, check_session, reached, seen
from sessiontree.testing.together import in_threads
from sessiontree.testing.turns import said


def grow(session: Session, log: Log, random: Random, count: int) -> None:
    """Turns at random places, some with pictures, some replies."""
    for number in range(count):
        parent, tag = random.choice(log.ids[-8:]), len(log.entries)
        picture = Picture(tag, 1, 1, 2, at=1)
        turn = random.choice(
            [
                Turn((tag, number)),
                Turn((tag, PLACEHOLDER, PLACEHOLDER), (picture,)),
                Turn((tag,) * 3, role="assistant", key=f"reply {tag}", generated=True),
            ]
        )
        log.add(add(session, parent, turn).id, parent, turn)


def hold_and_drop(session: Session, log: Log, random: Random) -> None:
    """Heads and pins at random nodes, and two branches dropped that none of them holds."""
    for number, node in enumerate(random.sample(log.ids, 3)):
        session.set_head(f"head {number}", node)
        log.heads[f"head {number}"] = node
    for node in random.sample(log.ids, 2):
        session.pin(node)
        log.pins.add(node)
    for _ in range(2):
        free = [node for node in log.ids[log.shared :] if not log.below([node]) & log.held()]
        if free:
            node = random.choice(free)
            session.drop(node)
            log.drop([node])


def let_go_and_hold(session: Session, log: Log) -> None:
    """Every head and pin is given up, and at once there again."""
    for name, node in log.heads.items():
        session.drop_head(name)
        session.set_head(name, node)
    for pin in log.pins:
        session.unpin(pin)
        session.pin(pin)


class KeepingTests(Conformance):
    @pytest.fixture
    def stored_nodes(self) -> Callable[[], int] | None:
        """What counts the nodes that the backend stores, roots not among them; None: nothing does. May be overridden."""
        return None

    def test_pins(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        for node in log.ids[1:4]:
            session.pin(node)
        session.unpin(log.ids[2])
        log.pins = {log.ids[1], log.ids[3]}
        check_session(session, log)
        session = home.again(session)
        session.pin(log.ids[1])
        session.unpin(log.ids[5])
        with pytest.raises(UnknownNode):
            session.pin(bytes(32))
        check_session(session, log)
        session.unpin(log.ids[1])
        log.pins.remove(log.ids[1])
        check_session(home.again(session), log)

    def test_what_is_held_is_not_dropped(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        parent, node, below = log.ids[1:4]
        before = all_seen(session)
        with pytest.raises(Unsupported):
            session.drop(session.root)

        def check_held() -> None:
            with pytest.raises(NodeHeld) as refusal:
                session.drop(node)
            assert refusal.value.node.id in (node, below)

        session.set_head("main", below)
        check_held()
        session.drop_head("main")
        session.pin(node)
        check_held()
        session.unpin(node)
        with session.draft(below):
            check_held()
        assert all_seen(session)["nodes"] == before["nodes"]
        kept = session.node(below)
        digest = seen(kept)
        session.drop(node)
        log.drop([node])
        check_session(session, log)
        assert seen(kept) == digest, "whoever holds a node keeps it"
        for gone in (node, below):
            for act in (session.node, session.drop, session.pin, session.draft):
                with pytest.raises(UnknownNode):
                    act(gone)
        with pytest.raises(UnknownNode):
            session.append(kept, [1])
        again = home.again(session)
        check_session(again, log)
        turn = conversation()[1]
        log.add(add(again, parent, turn).id, parent, turn)
        check_session(home.again(again), log)

    def test_a_session_that_is_dropped_leaves_its_forks_whole(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        session.append(log.ids[2], [5] * 10)
        fork = home.store.fork(session, log.ids[-2], home.name())
        of_fork = log.forked(log.ids[-2], fork)
        before = all_seen(fork)
        home.store.drop(session.id)
        with pytest.raises(UnknownSession):
            home.store.get(session.id)
        report = home.store.gc()
        assert all_seen(fork) == before
        self.check_counted([of_fork], report)
        again = home.again(fork)
        assert home.store.sessions() == (fork.id,)
        check_session(again, of_fork)
        home.store.gc()
        check_session(home.again(again), of_fork)
        anew = home.store.create(session.id, scheme="text@hf5")
        assert len(anew.tree) == 1, "its id is free"
        with pytest.raises(SessionExists):
            home.store.fork(home.store.get(fork.id), log.ids[1], session.id)

    def test_a_session_that_is_held_is_not_dropped(self, home: Home) -> None:
        session = home.session()
        node = session.append(session.root, [1])
        session.pin(node)
        with pytest.raises(NodeHeld):
            home.store.drop(session.id)
        assert session.append(node, [2]).depth == 2
        session.unpin(node)
        home.store.drop(session.id)
        assert home.store.sessions() == ()

    @pytest.mark.parametrize("seed", range(3))
    def test_gc_keeps_every_path_that_can_be_reached(self, home: Home, seed: int, stored_nodes: Callable[[], int] | None) -> None:
        """D26, D27: random heads, pins, forks and drops; paths are the same bytes before and after, and the rest is gone."""
        random = Random(seed)
        logs: list[Log] = []
        for _ in range(3):
            session = home.session()
            log = Log.of(session)
            grow(session, log, random, 25)
            fork = home.store.fork(session, random.choice(log.ids), home.name())
            of_fork = log.forked(fork.leaves()[0].id, fork)
            grow(fork, of_fork, random, 10)
            logs += log, of_fork
        for log in logs:
            hold_and_drop(home.store.get(log.session_id), log, random)
        for recent in (None, 4, 0):
            before = {log.session_id: {node.id: seen(node) for node in home.store.get(log.session_id).tree} for log in logs}
            if recent is not None:
                for log in logs:
                    log.collect(recent)
            report = home.store.gc(recent=recent)
            for _ in range(2):
                for log in logs:
                    session = home.store.get(log.session_id)
                    check_session(session, log)
                    assert all(seen(node) == before[log.session_id][node.id] for node in session.tree)
                home.reopen()
            self.check_counted(logs, report)
            if stored_nodes is not None:
                assert stored_nodes() == report.nodes_after

    def test_what_comes_after_gc_is_none_of_what_went(self, home: Home) -> None:
        """The newest nodes go, and of those that were dropped with them one stays for a fork's sake."""
        session = home.session()
        kept, newest = (session.append(session.root, [number]).id for number in range(2))
        fork = home.store.fork(session, kept, home.name())
        session.drop(kept, newest)
        home.store.gc()
        session = home.again(session)
        later = [session.append(session.root, [number]).id for number in range(2, 5)]
        for reader in home.twice(session):
            assert [node.id for node in reader.tree] == [reader.root.id, *later]
        home.store.gc()
        assert [node.id for node in home.again(session).tree] == [session.root.id, *later]
        assert [node.id for node in home.store.get(fork.id).tree] == [session.root.id, kept]

    def test_gc_takes_nothing_from_those_who_write(self, home: Home, make_store: Opener) -> None:
        """Another store collects all the time, where there can be two, while this one appends, forks, drops and moves heads."""
        collector = home.beside(make_store) if self.many_writers else home.store
        random, ended = Random(5), threading.Event()
        logs = [Log.of(home.session())]

        def write() -> None:
            try:
                for number in range(40):
                    log = random.choice(logs)
                    session = home.store.get(log.session_id)
                    grow(session, log, random, 2)
                    if number % 4 == 1:
                        hold_and_drop(session, log, random)
                    if number % 10 == 2:
                        node = log.ids[-1]
                        logs.append(log.forked(node, home.store.fork(session, node, home.name())))
                    let_go_and_hold(session, log)
            finally:
                ended.set()

        def collect() -> None:
            while not ended.is_set():
                collector.gc()

        in_threads(2, lambda number: (write, collect)[number]())
        self.check_counted(logs, home.store.gc())
        home.reopen()
        for log in logs:
            check_session(home.store.get(log.session_id), log)

    def test_gc_keeps_features_that_a_node_names(self, home: Home) -> None:
        self.need("keeps_features")
        session = home.session()
        held, dropped = (Picture(number, 1, 1, 2, at=0) for number in range(2))
        for picture in (held, dropped):
            node = session.append(session.root, [PLACEHOLDER] * 2, media=[picture.item()])
            home.store.put_features(picture.item(), features_of(picture.number))
        session.drop(node)
        home.store.gc()
        home.reopen()
        found = home.store.get_features(held.item())
        assert found is not None
        assert found["pixel_values"].tobytes() == features_of(held.number)["pixel_values"].tobytes()

    def check_counted(self, logs: list[Log], report: GcReport) -> None:
        """As many nodes are stored as can be reached; what a fork shares is stored once."""
        if self.counts_nodes:
            assert report.nodes_after == reached(logs)
