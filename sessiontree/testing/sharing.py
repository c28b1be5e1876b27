"""Many at once: threads of one store, and processes that each have it open."""

from __future__ import annotations

from collections import Counter

import pytest

from sessiontree import HeadMoved, Node, SessionExists, UnknownSession
from sessiontree.testing.base import Conformance, Home, Opener
from sessiontree.testing.together import in_processes, in_threads
from sessiontree.testing.work import append_to_one, count_up, create_all, open_first_and_append

THREADS = 16
PROCESSES = 16


class SharingTests(Conformance):
    def test_threads_append_to_one_session(self, home: Home) -> None:
        session = home.session()
        parent = session.append(session.root, [1])
        made: dict[int, list[Node]] = {}

        def write(number: int) -> None:
            made[number] = [session.append(parent, [number])]
            for turn in range(8):
                made[number].append(session.append(made[number][-1], [number, turn]))

        in_threads(THREADS, write)
        again = home.again(session)
        assert len(again.tree) == 2 + THREADS * 9
        assert {child.id for child in again.children(parent.id)} == {nodes[0].id for nodes in made.values()}
        for number, nodes in made.items():
            wanted = [1, number, *(token for turn in range(8) for token in (number, turn))]
            assert again.node(nodes[-1].id).input_ids().tolist() == wanted

    def test_equal_appends_of_threads_are_one_node_and_their_drafts_many(self, home: Home) -> None:
        session = home.session()
        parent = session.append(session.root, [1])
        equal: list[Node] = []
        samples: list[Node] = []

        def write(number: int) -> None:
            equal.append(session.append(parent, [7], metadata={"by": number}))
            with session.draft(parent) as draft:
                draft.extend([7])
                samples.append(draft.commit())

        in_threads(THREADS, write)
        assert len({node.id for node in equal}) == 1
        assert len({node.id for node in samples}) == THREADS
        assert len(home.again(session).children(parent.id)) == THREADS + 1

    def test_one_of_many_threads_moves_a_head(self, home: Home) -> None:
        session = home.session()
        nodes = [session.append(session.root, [number]) for number in range(THREADS)]
        start = session.set_head("main", session.root)
        lost: list[HeadMoved] = []

        def move(number: int) -> None:
            try:
                session.set_head("main", nodes[number], expected=start)
            except HeadMoved as error:
                lost.append(error)

        in_threads(THREADS, move)
        assert len(lost) == THREADS - 1
        assert {error.actual for error in lost} == {session.head("main")}

    def test_threads_write_to_sessions_of_their_own(self, home: Home) -> None:
        def write(number: int) -> None:
            session = home.store.create(f"of thread {number}", scheme="text@hf5")
            node = session.root
            for turn in range(10):
                node = session.append(node, [number, turn])
                session.set_head("main", node)

        in_threads(THREADS, write)
        home.reopen()
        assert sorted(home.store.sessions()) == sorted(f"of thread {number}" for number in range(THREADS))
        for number in range(THREADS):
            main = home.store.get(f"of thread {number}").head("main").node
            assert main.input_ids().tolist() == [token for turn in range(10) for token in (number, turn)]

    def test_of_threads_that_create_one_session_one_does(self, home: Home) -> None:
        refused: list[SessionExists] = []

        def create(number: int) -> None:
            try:
                home.store.create("s", scheme="text@hf5")
            except SessionExists as error:
                refused.append(error)

        in_threads(THREADS, create)
        assert len(refused) == THREADS - 1
        assert home.store.sessions() == ("s",)

    def test_processes_open_a_new_store_at_once(self, elsewhere: Opener) -> None:
        """D30: 16 open it first and append 100 each: 1,600 nodes, and no error."""
        self.need("many_writers")
        made = in_processes(PROCESSES, open_first_and_append, elsewhere, 100)
        with elsewhere() as store:
            assert len(store.sessions()) == PROCESSES
            total = 0
            for number, ids in enumerate(made):
                session = store.get(f"of process {number}")
                assert [node.id for node in session.tree][1:] == ids
                tip = session.node(ids[-1])
                assert tip.input_ids().tolist() == [token for turn in range(100) for token in (number, turn)]
                total += len(ids)
            assert total == 1600

    def test_of_processes_that_create_one_session_one_does(self, elsewhere: Opener) -> None:
        self.need("many_writers")
        names = [f"s{number}" for number in range(10)]
        with elsewhere():
            made = in_processes(4, create_all, elsewhere, names)
        assert sorted(name for each in made for name in each) == names
        with elsewhere() as store:
            assert sorted(store.sessions()) == names

    def test_processes_append_to_one_node(self, elsewhere: Opener) -> None:
        self.need("many_writers")
        with elsewhere() as store:
            session = store.create("s", scheme="text@hf5")
            parent = session.append(session.root, [1]).id
        made = in_processes(4, append_to_one, elsewhere, "s", parent, 20)
        with elsewhere() as store:
            children = store.get("s").children(parent)
            assert Counter(child.id for child in children) == Counter(node for ids in made for node in ids)
            assert sorted(child.token_ids.tolist() for child in children) == [[n, turn] for n in range(4) for turn in range(20)]
            for ids in made:
                assert [child.id for child in children if child.id in ids] == ids, "each in its own order"

    def test_processes_move_one_head_by_compare_and_set(self, elsewhere: Opener) -> None:
        """D28: each move is on top of the one before it, so none is lost; whoever was second was told, and none of its nodes is."""
        self.need("many_writers")
        with elsewhere() as store:
            session = store.create("s", scheme="text@hf5")
            session.set_head("main", session.root)
        lost = sum(in_processes(4, count_up, elsewhere, "s", 10))
        with elsewhere() as store:
            session = store.get("s")
            path = session.head("main").node.path()
            assert sorted(node.token_ids.tolist() for node in path[1:]) == [[n, turn] for n in range(4) for turn in range(10)]
            assert len(session.tree) <= len(path) + lost

    def test_drafts_of_two_stores_are_siblings_however_equal(self, home: Home, make_store: Opener) -> None:
        self.need("many_writers")
        here = home.session()
        prompt = here.append(here.root, [1])
        there = home.beside(make_store).get(here.id)
        drafts = [session.draft(prompt.id) for session in (here, there) for _ in range(3)]
        for draft in drafts:
            draft.extend([5, 6])
        nodes = [draft.commit() for draft in drafts]
        assert len({node.id for node in nodes}) == 6
        assert [child.id for child in home.again(here).children(prompt.id)] == [node.id for node in nodes]

    def test_two_stores_that_are_open_see_each_other(self, home: Home, make_store: Opener) -> None:
        self.need("many_writers")
        here = home.session()
        other = home.beside(make_store)
        there = other.get(here.id)
        one = here.append(here.root, [1])
        known = here.set_head("main", one)
        two = there.append(there.root, [2])
        assert [node.id for node in there.tree] == [here.root.id, one.id, two.id], "a write is on top of what is there"
        with pytest.raises(HeadMoved) as refusal:
            there.set_head("main", two, expected=None)
        assert refusal.value.actual == known
        there.set_head("main", two, expected=known)
        with pytest.raises(HeadMoved):
            here.set_head("main", one, expected=known)
        assert here.append(two.id, [3]).path()[1].id == two.id
        with pytest.raises(SessionExists):
            other.create(here.id, scheme="text@hf5")
        home.store.drop(here.id)
        with pytest.raises(UnknownSession):
            other.get(here.id)
