"""Turns: their tokens, positions, keys, drafts, limits and namespaces, as they are made and when the store is opened again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyrsistent import thaw

from sessiontree import (
    DraftClosed,
    FinishRefused,
    IncompatibleStore,
    KeyTaken,
    LimitExceeded,
    Namespace,
    OutOfRange,
    Session,
    SessionExists,
    SessionTreeError,
    StaleSession,
    UnknownNode,
    UnknownSession,
    media_identity,
)
from sessiontree.testing.base import Conformance, Home
from sessiontree.testing.drawn import CONVERSATION, MAX_TOKEN, conversation
from sessiontree.testing.model import MODES, Log, Turn, add, all_seen, check_session, ids_of, positions_of, spans_of

SESSION_IDS = (
    "a",
    "ein längerer Name",
    "../up",
    "a/b\\c",
    "'; DROP TABLE nodes; --",
    "%s {0}",
    " ",
    "\n",
    "\0",
    "😀" * 8,
    "x" * 512,
)


def said(session: Session, turns: list[Turn]) -> Log:
    """Say turns one after the other; the log of the session."""
    log = Log.of(session)
    for turn in turns:
        parent = log.ids[-1]
        log.add(add(session, parent, turn).id, parent, turn)
    return log


class TurnTests(Conformance):
    def test_a_conversation_is_read_as_it_was_said(self, home: Home) -> None:
        session = home.session()
        log = said(session, conversation())
        check_session(session, log)
        check_session(home.again(session), log)

    def test_any_window_of_a_path(self, home: Home) -> None:
        session = home.session()
        turns = conversation()
        log = said(session, turns)
        ids, spans = ids_of(turns), spans_of(turns)
        tables = {mode: positions_of(turns, mode) for mode in MODES}
        assert not np.array_equal(tables["as_decoded"], tables["as_replayed"]), "the conversation tells the two modes apart"
        for reader in home.twice(session):
            tip = reader.node(log.ids[-1])
            for start in range(len(ids) + 1):
                for stop in range(start, len(ids) + 1, 3):
                    assert tip.input_ids(start, stop).tolist() == ids[start:stop]
                    clipped = [(item, max(first, start), min(last, stop)) for item, first, last in spans]
                    assert list(tip.media_spans(start, stop)) == [span for span in clipped if span[1] < span[2]]
                    for mode in MODES:
                        assert np.array_equal(tip.positions(start, stop, mode), tables[mode][:, start:stop])
            with pytest.raises(OutOfRange):
                tip.input_ids(0, len(ids) + 1)

    def test_any_conversation(self, home: Home) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(CONVERSATION, st.data())
        def check(turns: list[Turn], data: st.DataObject) -> None:
            session = home.session()
            log = Log.of(session)
            for turn in turns:
                parent = data.draw(st.sampled_from(log.ids[-2:])) if turn.tokens else log.ids[-1]
                try:
                    known = log.known(parent, turn)
                except LookupError:
                    with pytest.raises(KeyTaken):
                        add(session, parent, turn)
                    continue
                node = add(session, parent, turn)
                if known is None:
                    log.add(node.id, parent, turn)
                assert node.id == (known or node.id)
            check_session(session, log)
            logs.append(log)

        logs: list[Log] = []
        check()
        home.reopen()
        for log in logs:
            check_session(home.store.get(log.session_id), log)

    def test_a_turn_of_many_tokens(self, home: Home) -> None:
        session = home.session()
        tokens = np.arange(1_000_000, dtype=np.int64) * 2147 % MAX_TOKEN
        node = session.append(session.root, tokens)
        below = session.append(node, [1])
        for reader in home.twice(session):
            assert np.array_equal(reader.node(node.id).token_ids, tokens)
            assert reader.node(below.id).input_ids(999_998).tolist() == [*tokens[-2:], 1]

    def test_what_is_refused_changes_nothing(self, home: Home) -> None:
        session, other = home.session(), home.session()
        log = said(session, conversation())
        foreign = other.append(other.root, [1, 2, 3])
        before = all_seen(session)
        for tokens in ([-1], [2**31], [1, 2, 2**40]):
            with pytest.raises(OutOfRange):
                session.append(session.root, tokens)
        for unknown in (foreign, foreign.id, bytes(32)):
            with pytest.raises(UnknownNode):
                session.append(unknown, [1])
            with pytest.raises(UnknownNode):
                session.set_head("main", unknown)
        with pytest.raises(SessionTreeError):
            session.append(session.root, [1, 1], media=conversation()[1].items())
        with pytest.raises(TypeError):
            session.append(session.root, "text")  # type: ignore[arg-type]
        assert all_seen(session) == before
        check_session(home.again(session), log)

    def test_equal_content_is_one_node_and_a_key_names_one_content(self, home: Home) -> None:
        session = home.session()
        parent = session.append(session.root, [1, 2])
        node = session.append(parent, [3], key="a", metadata={"first": True})
        assert session.append(parent, [3], key="a", metadata={"first": False}) == node
        plain, other_key = session.append(parent, [3]), session.append(parent, [3], key="b")
        elsewhere = session.append(node, [4], key="a")
        for reader in home.twice(session):
            assert len({node, plain, other_key, elsewhere}) == 4
            assert reader.append(parent.id, [3], key="a", metadata={"first": 2}).id == node.id
            assert reader.append(parent.id, [3]).id == plain.id
            assert thaw(reader.node(node.id).metadata) == {"first": True}
            for taken in ([3, 3], [4], []):
                with pytest.raises(KeyTaken) as refusal:
                    reader.append(parent.id, taken, key="a")
                assert (refusal.value.key, refusal.value.node.id) == ("a", node.id)
            with pytest.raises(KeyTaken):
                reader.append(parent.id, [3], key="a", role="tool")
            assert len(reader.tree) == 6

    def test_a_commit_that_is_repeated_is_one_node(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1])
        reply = Turn((2, 3), role="assistant", key="request 7", generated=True)
        node = add(session, prompt, reply)
        assert add(session, prompt, reply) == node
        again = home.again(session)
        assert add(again, prompt.id, reply).id == node.id
        with again.draft(prompt.id, key="request 7") as draft:
            draft.extend([2, 3, 4])
            with pytest.raises(KeyTaken):
                draft.commit()
            assert not draft.closed
        assert [child.id for child in again.children(prompt.id)] == [node.id]

    def test_drafts_are_siblings_however_equal(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1, 2])
        drafts = [session.draft(prompt) for _ in range(8)]
        for draft in drafts:
            draft.extend([5, 6])
        nodes = [draft.commit() for draft in drafts]
        assert len({node.id for node in nodes}) == 8
        again = home.again(session)
        assert [child.id for child in again.children(prompt.id)] == [node.id for node in nodes]
        with again.draft(prompt.id) as draft:
            draft.extend([5, 6])
            assert draft.commit().id not in {node.id for node in nodes}, "a key of its own in every opening"

    def test_drafts_that_end_otherwise(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1])
        aborted, left, refused, kept, cut = (session.draft(prompt, key=key) for key in ("a", "b", "c", "d", "e"))
        for draft in (aborted, left, refused, kept, cut):
            draft.extend([7, 8, 9])
        before = all_seen(session)
        aborted.abort()
        with pytest.raises(DraftClosed):
            aborted.commit()
        for reason in ("abort", "error"):
            with pytest.raises(FinishRefused):
                refused.commit(reason)
        assert all_seen(session) == before, "none of them was ever in the tree"
        cut.rollback(2)
        nodes = [kept.commit("interrupted", length=1), cut.commit("length", tail_policy="drop_last")]
        facts = [(node.id, node.token_ids.tolist(), node.finish_reason, node.tail_policy) for node in nodes]
        assert [fact[1:] for fact in facts] == [([7], "interrupted", "keep"), ([7], "length", "drop_last")]
        children = home.again(session).children(prompt.id)
        assert [(node.id, node.token_ids.tolist(), node.finish_reason, node.tail_policy) for node in children] == facts

    def test_a_draft_of_a_closed_session_is_stale(self, home: Home) -> None:
        session = home.session()
        prompt = session.append(session.root, [1])
        draft = session.draft(prompt)
        draft.extend([2])
        session.close()
        with pytest.raises(StaleSession):
            draft.commit()
        with pytest.raises(StaleSession):
            session.append(prompt, [3])
        assert prompt.input_ids().tolist() == [1], "who holds a node goes on reading it"
        if self.survives_reopen:
            again = home.again(session)
            assert again.incarnation > session.incarnation
            assert [node.id for node in again.tree] == [again.root.id, prompt.id]

    def test_limits_of_a_path(self, home: Home) -> None:
        session = home.session(max_tokens=10, reserve_output=3)
        prompt = session.append(session.root, [1] * 7)
        for reader in home.twice(session):
            assert (reader.max_tokens, reader.reserve_output) == (10, 3)
            with pytest.raises(LimitExceeded) as refusal:
                reader.append(prompt.id, [1])
            assert refusal.value.limit == 7
            with reader.draft(prompt.id, key="reply") as draft:
                draft.extend([1, 2, 3])
                with pytest.raises(LimitExceeded):
                    draft.append(4)
                draft.commit()
            assert len(reader.tree) == 3

    def test_namespaces_keep_equal_content_apart(self, home: Home) -> None:
        spaces = [None, "a", {"lora": "a"}, {"cache_salt": "a"}, Namespace("s", "l", "t"), {"tenant": "a", "lora": "a"}]
        sessions = [home.session(namespace=space) for space in spaces]
        nodes = [session.append(session.root, [1, 2]) for session in sessions]
        assert len({node.id for node in nodes}) == len({session.root.id for session in sessions}) == len(spaces)
        home.reopen()
        for session, node, space in zip(sessions, nodes, spaces, strict=True):
            again = home.store.get(session.id)
            assert again.namespace == Namespace.of(space)
            assert again.node(node.id).input_ids().tolist() == [1, 2]
        twin = home.session(namespace="a")
        assert twin.append(twin.root, [1, 2]).id == nodes[1].id, "an id says what a node is, wherever it is"

    def test_a_tenant_sees_its_own_sessions_alone(self, make_tenant_store: Any, home: Home) -> None:
        if make_tenant_store is None:
            pytest.skip("of a store that can be opened for one tenant")
        with make_tenant_store("one") as one, make_tenant_store("two") as two:
            mine = one.create("same name", scheme="text@hf5", namespace="one")
            theirs = two.create("same name", scheme="text@hf5", namespace="two")
            nodes = [session.append(session.root, [3]) for session in (mine, theirs)]
            assert nodes[0].id != nodes[1].id
            only = one.create("only one's", scheme="text@hf5", namespace="one")
            assert one.sessions() == ("same name", "only one's")
            assert two.sessions() == ("same name",)
            with pytest.raises(UnknownSession):
                two.get(only.id)
        with make_tenant_store("one") as one:
            assert [node.id for node in one.get("same name").tree] == [mine.root.id, nodes[0].id]
            with pytest.raises(IncompatibleStore):
                one.create("of nobody", scheme="text@hf5")

    def test_a_tenant_has_aliases_of_its_own(self, make_tenant_store: Any, home: Home) -> None:
        if make_tenant_store is None:
            pytest.skip("of a store that can be opened for one tenant")
        with make_tenant_store("one") as one, make_tenant_store("two") as two:
            ids = [media_identity("image", b"%d" % number) for number in range(3)]
            home.store.alias_media("a", ids[0], "one")
            one.alias_media("b", ids[1], "one")
            assert [each.aliased_media(name, "one") for each in (home.store, one) for name in "ab"] == ids[:2] * 2
            with pytest.raises(KeyTaken):
                one.alias_media("a", ids[2], "one")
            with pytest.raises(IncompatibleStore):
                two.alias_media("a", ids[2], "one")
            assert two.alias_media("a", ids[2], "two") == home.store.aliased_media("a", "two") == ids[2]

    def test_metadata_come_back_as_they_were(self, home: Home) -> None:
        session = home.session()
        metadata = {"text": "ä\0😀", "numbers": [0, -1, 2**63 - 1, 1.5, None, True], "deep": {"list": [{"a": []}, {}]}, "": "empty"}
        given = json.loads(json.dumps(metadata))
        node = session.append(session.root, [1], metadata=given)
        given["deep"]["list"].append("later")
        for reader in home.twice(session):
            found = thaw(reader.node(node.id).metadata)
            assert json.loads(json.dumps(found)) == metadata

    def test_ids_of_sessions(self, home: Home) -> None:
        tips = {}
        for session_id in SESSION_IDS:
            session = home.store.create(session_id, scheme="text@hf5")
            tips[session_id] = session.append(session.root, [len(session_id)]).id
            with pytest.raises(SessionExists):
                home.store.create(session_id, scheme="text@hf5")
        for unknown in ("b", "A", "..", "x" * 511):
            with pytest.raises(UnknownSession):
                home.store.get(unknown)
        for refused in ("", "x" * 513):
            with pytest.raises(OutOfRange):
                home.store.create(refused, scheme="text@hf5")
        home.reopen()
        assert home.store.sessions() == SESSION_IDS
        for session_id, tip in tips.items():
            assert home.store.get(session_id).node(tip).input_ids().tolist() == [len(session_id)]
