"""What was acknowledged is there, however the process ended that wrote it."""

from __future__ import annotations

import pytest

from sessiontree import HeadMoved, SessionStore
from sessiontree.testing.base import Conformance, Home, Opener
from sessiontree.testing.drawn import conversation
from sessiontree.testing.model import all_seen
from sessiontree.testing.together import process
from sessiontree.testing.turns import said
from sessiontree.testing.work import read, write


class DurabilityTests(Conformance):
    def test_a_store_that_is_opened_again_is_as_it_was(self, home: Home) -> None:
        self.need("survives_reopen")
        session = home.session(max_tokens=1000, reserve_output=7, namespace={"tenant": "t", "lora": "l"}, model_fingerprint="sha")
        log = said(session, conversation())
        session.set_head("main", log.ids[-1])
        session.pin(log.ids[2])
        before, incarnation = all_seen(session), session.incarnation
        for _ in range(3):
            session = home.again(session)
            assert all_seen(session) == before
            assert (session.max_tokens, session.reserve_output, session.root.model_fingerprint) == (1000, 7, "sha")
            assert session.incarnation > incarnation, "another opening of it"
            incarnation = session.incarnation
        with pytest.raises(HeadMoved):
            session.set_head("main", session.root, expected=log.ids[0])

    @pytest.mark.parametrize("told", [1, 7, 40])
    def test_what_a_killed_process_acknowledged_is_there(self, elsewhere: Opener, told: int) -> None:
        """SIGKILL while it writes on; the store is opened again, and goes on from there."""
        self.need("survives_reopen", "durable")
        with elsewhere() as store:
            store.create("s", scheme="text@hf5")
        for _ in range(2):
            with process(write, elsewhere, "s", 2**31, self.acknowledges == "flush") as child:
                acknowledged = [child.told() for _ in range(told)]
                child.kill()
                acknowledged += child.rest()
            self.check(elsewhere, acknowledged)

    def test_what_a_process_acknowledged_that_closed_nothing_is_there(self, elsewhere: Opener) -> None:
        self.need("survives_reopen", "durable")
        with elsewhere() as store:
            store.create("s", scheme="text@hf5")
        with process(write, elsewhere, "s", 25, self.acknowledges == "flush") as child:
            acknowledged = list(child.rest())
        assert len(acknowledged) == 25
        self.check(elsewhere, acknowledged)

    def check(self, opener: Opener, acknowledged: list[tuple[int, bytes]]) -> None:
        """Each is there with its whole path, the head is at the last one or one that came behind, and more can be written."""
        with opener() as store:
            session = store.get("s")
            assert [number for number, _ in acknowledged] == list(range(len(acknowledged)))
            for number, node in acknowledged:
                assert session.node(node).input_ids().tolist() == [token for n in range(number + 1) for token in (n, n % 7)]
            main = session.head("main").node
            assert main.depth >= len(acknowledged)
            assert main.ancestor(len(acknowledged)).id == acknowledged[-1][1]
            assert session.append(main, [99]).depth == main.depth + 1

    def test_a_reader_beside_a_writer_sees_what_was_acknowledged(self, home: Home, make_reader: Opener | None) -> None:
        """D15, C87: a process that opens the store after an acknowledgement sees the node; one that has it open looks again."""
        if make_reader is None:
            pytest.skip("of a store that can be read beside its writer")
        session = home.session()
        home.store.flush()
        beside = home.beside(make_reader)
        for number in range(3):
            node = session.append(session.root, [number])
            session.set_head("main", node)
            home.store.flush()
            with process(read, make_reader, session.id) as child:
                assert node.id in child.result()
            seen = beside.get(session.id)
            assert [each.id for each in seen.tree] == [each.id for each in session.tree]
            assert seen.head("main").node.token_ids.tolist() == [number]
        other = home.session()
        home.store.flush()
        assert isinstance(beside, SessionStore)
        assert beside.sessions() == (session.id, other.id)
