"""Forks, siblings and edits: they share what they come from, and change nothing of it."""

from __future__ import annotations

import pytest

from sessiontree import Session, SessionExists, SessionStore
from sessiontree.testing.base import Conformance, Home
from sessiontree.testing.drawn import conversation
from sessiontree.testing.model import SCHEME, Log, Turn, add, all_seen, check_session, seen
from sessiontree.testing.turns import said


def branch_off(session: Session, log: Log) -> None:
    """Everything that comes from the nodes of a session: siblings, replies, cuts, rewrites, heads."""
    for number, node in enumerate(log.ids):
        session.append(node, [77, number])
        with session.draft(node) as draft:
            draft.extend([88, number])
            session.set_head(f"reply {number}", draft.commit())
    tip = session.node(log.ids[-1])
    session.truncate(tip, tip.stop - 1)
    session.rewrite(tip, [(0, 1, [4, 4, 4])])


class ForkTests(Conformance):
    def test_nothing_changes_a_parent(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        held = [session.node(node) for node in log.ids]
        before = [seen(node) for node in held]
        branch_off(session, log)
        home.store.fork(session, log.ids[3], home.name())
        assert [seen(node) for node in held] == before, "who holds a node"
        assert [seen(session.node(node)) for node in log.ids] == before
        again = home.again(session)
        assert [seen(again.node(node)) for node in log.ids] == before

    def test_siblings_know_nothing_of_each_other(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        parent = log.ids[-1]
        for number in range(20):
            turn = Turn((number, 1, 2), role="assistant" if number % 2 else "user", key=f"k{number}", generated=bool(number % 2))
            log.add(add(session, parent, turn).id, parent, turn)
            below = Turn((number,) * 3)
            log.add(add(session, log.ids[-1], below).id, log.ids[-1], below)
        check_session(session, log)
        check_session(home.again(session), log)

    def test_a_fork_shares_its_path_and_grows_apart(self, home: Home) -> None:
        session = home.session(max_tokens=1000)
        log = said(session, conversation())
        session.set_head("main", log.ids[-1])
        session.pin(log.ids[2])
        log.heads["main"] = log.ids[-1]
        log.pins.add(log.ids[2])
        for node in log.ids:
            fork = home.store.fork(session, node, home.name())
            of_fork = log.forked(node, fork)
            check_session(fork, of_fork)
            assert fork.max_tokens == 1000
            for parent in (of_fork.ids[0], of_fork.ids[-1]):
                turn = Turn((6, len(of_fork.ids)))
                of_fork.add(add(fork, parent, turn).id, parent, turn)
            fork.set_head("main", of_fork.ids[-1])
            of_fork.heads["main"] = of_fork.ids[-1]
            check_session(fork, of_fork)
            check_session(home.again(fork), of_fork)
            session = home.store.get(session.id)
        check_session(session, log)

    def test_forks_of_forks(self, home: Home) -> None:
        session = home.session()
        logs = [said(session, conversation()[:2])]
        for number in range(12):
            source = logs[-1]
            fork = home.store.fork(home.store.get(source.session_id), source.ids[-1], home.name())
            log = source.forked(source.ids[-1], fork)
            for turn in (Turn((number,) * 2, key="aside"), Turn((number,), role="assistant", key="reply", generated=True)):
                log.add(add(fork, log.ids[-1], turn).id, log.ids[-1], turn)
            logs.append(log)
        for log in logs:
            check_session(home.store.get(log.session_id), log)
        home.reopen()
        for log in logs:
            check_session(home.store.get(log.session_id), log)

    def test_a_fork_of_a_session_of_another_store(self, home: Home) -> None:
        with SessionStore.in_memory() as other:
            source = other.create("elsewhere", scheme=SCHEME)
            log = said(source, conversation())
            fork = home.store.fork(source, log.ids[-2], home.name())
        log = log.forked(log.ids[-2], fork)
        check_session(fork, log)
        check_session(home.again(fork), log)

    def test_a_fork_to_an_id_that_is_taken_changes_nothing(self, home: Home) -> None:
        session, other = home.session(), home.session()
        log = said(session, conversation())
        before = all_seen(session), all_seen(other), home.store.sessions()
        with pytest.raises(SessionExists):
            home.store.fork(session, log.ids[-1], other.id)
        assert (all_seen(session), all_seen(other), home.store.sessions()) == before

    def test_edits_say_what_they_come_from(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        tip = session.node(log.ids[-1])
        cut, changed = session.truncate(tip, tip.stop - 1), session.rewrite(tip, [(0, 1, [4, 4, 4])])
        assert cut.input_ids().tolist() == tip.input_ids(0, tip.stop - 1).tolist()
        assert changed.input_ids().tolist() == [4, 4, 4, *tip.input_ids(1)]
        before = [seen(cut), seen(changed)]
        again = home.again(session)
        assert [seen(again.node(node.id)) for node in (cut, changed)] == before
        assert [(link.kind, link.node_id) for link in again.node(cut.id).links] == [("prefix_of", tip.id)]
        assert again.truncate(tip.id, tip.stop - 1).id == cut.id
