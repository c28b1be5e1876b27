"""Many heads: as a plain dict of them, whatever moved; what a move touches and what is told of it is what changed."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from sys import getsizeof
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import Head, Node, Session, SessionStore, SessionTree
from sessiontree.heads import MANY, Dropped, HeadMap, heads_bytes
from sessiontree.stored import StoredHead
from tests.disk import Disk
from tests.disk_model import open_on

Model = dict[str, tuple[Node, int]]


def a_tree(nodes: int = 5) -> SessionTree:
    tree = SessionTree("text@hf5")
    for number in range(nodes):
        tree, _ = tree.append(tree.root, [number])
    return tree


def walked(moves: list[int], names: int) -> list[tuple[SessionTree, Model]]:
    """A tree after each of some moves, and what its heads are then. A move below zero drops the head, if there is one."""
    tree = a_tree()
    nodes, model = list(tree), dict[str, tuple[Node, int]]()
    values = [(tree, model)]
    for move in moves:
        name = f"head {abs(move) % names}"
        if move >= 0:
            tree, head = tree.set_head(name, nodes[move % len(nodes)])
            model = {**model, name: (head.node, head.version)}
        elif name in model:
            tree = tree.drop_head(name)
            model = {other: place for other, place in model.items() if other != name}
        values.append((tree, model))
    return values


def check(tree: SessionTree, model: Model) -> None:
    heads, nodes = tree._heads, {name: node for name, (node, _) in model.items()}
    assert {**heads} == dict(heads.items()) == model == dict(tree.heads)
    assert len(heads) == len(tree.heads) == len(model) and sorted(heads) == sorted(tree.heads) == sorted(model)
    assert sorted(head.version for head in heads.values()) == sorted(version for _, version in model.values())
    for name in [*model, "none"]:
        assert (name in heads) == (name in tree.heads) == (name in model)
        assert heads.get(name) == tree.heads.get(name) == model.get(name)
    assert tree._named() == nodes
    if isinstance(heads, HeadMap):
        alone = heads_bytes(heads.base) - getsizeof(heads.base)
        assert heads.base_bytes == alone
        assert len(heads.recent) ** 2 <= 16 * (len(heads.base) + len(heads.recent))
        for missing in ("none", "head 9999"):
            with pytest.raises(KeyError):
                heads[missing]


def check_moves(before: tuple[SessionTree, Model], after: tuple[SessionTree, Model]) -> None:
    (older, was), (newer, now) = before, after
    moves = newer._moves_since(older)
    said = {name: None if isinstance(head, Dropped) else (head.node, head.version) for name, head in moves}
    expected: dict[str, Any] = {name: place for name, place in now.items() if was.get(name) != place}
    assert said == expected | {name: None for name in was if name not in now}
    assert len(moves) == len(said)
    versions = [head.version for _, head in moves]
    assert versions == sorted(versions) and all(older._moves < version <= newer._moves for version in versions)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), names=st.sampled_from([3, MANY, MANY + 1, 40, 200]), sets=st.sampled_from([0.5, 0.7, 1.0]))
def test_heads_are_as_a_dict_of_them_and_what_moved_is_how_two_differ(seed: int, names: int, sets: float) -> None:
    rng = random.Random(seed)
    values = walked([rng.randrange(names) * rng.choice([1, 7]) * (1 if rng.random() < sets else -1) for _ in range(400)], names)
    for at in {0, len(values) - 1, *rng.sample(range(len(values)), 20)}:
        check(*values[at])
        for step in (1, 2, 30):
            check_moves(values[max(0, at - step)], values[at])
        check_moves(values[rng.randint(0, at)], values[at])


def test_many_become_few_and_many_again() -> None:
    up, down = list(range(100)), [-number for number in range(99, 2, -1)]
    values = walked([*up, *down, *up], 1_000)
    kinds = [kind for kind, _ in itertools.groupby(type(tree._heads) for tree, _ in values)]
    assert set(kinds) == {dict, HeadMap} and type(values[-1][0]._heads) is HeadMap
    for before, after in itertools.pairwise(values):
        check(*after)
        check_moves(before, after)
    check_moves(values[50], values[150])
    check_moves(values[150], values[-1])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[HeadMap]:
    """The maps that were gone through as a whole."""
    merged, found = HeadMap._merged, []

    def counted(self: HeadMap) -> Any:
        found.append(self)
        return merged(self)

    monkeypatch.setattr(HeadMap, "_merged", counted)
    return found


def test_a_move_copies_what_is_recent_and_seldom_more(passes: list[HeadMap]) -> None:
    tree, rng = a_tree(), random.Random(0)
    node = tree.root
    tree = tree._with_heads({f"head {number}": Head(node, number + 1) for number in range(10_000)}, 10_000)
    for turn in range(4_000):
        tree = tree.set_head(f"head {rng.randrange(10_000)}", node)[0] if turn % 10 else tree.set_head(f"new {turn}", node)[0]
        assert isinstance(tree._heads, HeadMap) and len(tree._heads.recent) <= 420
    assert 5 <= len(passes) <= 10
    passes.clear()
    for _ in range(1_000):  # of one name, none
        tree, _ = tree.set_head("main", node)
    assert len(passes) <= 1


def many(store: SessionStore, count: int = 300) -> Session:
    session = store.create("s", scheme="text@hf5")
    nodes = [session.append(session.root, [number]) for number in range(7)]
    for number in range(count):
        session.set_head(f"head {number}", nodes[number % 7])
    return session


@pytest.fixture(params=["memory", "disk", "opened again"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    disk = Disk()
    with SessionStore.in_memory() if request.param == "memory" else open_on(disk) as store:
        made = many(store)
        if request.param != "opened again":
            yield made
    if request.param == "opened again":
        with open_on(disk) as store:
            yield store.get("s")


def test_what_asks_for_one_head_goes_through_none(session: Session, passes: list[HeadMap]) -> None:
    session.set_head("one more", session.root)
    passes.clear()
    for heads in (session.heads, session.tree.heads):
        assert "head 7" in heads and "head 300" not in heads and len(heads) == 301
        assert heads.get("none") is None and heads["one more"] == heads.get("one more")
    assert session.heads["head 7"].token_ids.tolist() == [0] and session.head("head 8").version == 9
    assert session._count_bytes() > 301 * 96
    assert passes == []


def test_the_journal_and_who_listens_look_at_what_moved_alone(session: Session, passes: list[HeadMap]) -> None:
    store: Any = session._store
    nodes = session.leaves()
    with store.subscribe(kinds=["head_moved"]) as heard:
        session.set_head("head 5", nodes[0])
        session.drop_head("head 6")
        session.drop_head("head 5")
        session.set_head("head 5", nodes[1])
        session.set_head("new", nodes[2])
        moves = [(event.head, event.version, event.node_id) for event in heard.poll()]
    assert moves == [
        ("head 5", 301, nodes[0].id),
        ("head 6", 302, None),
        ("head 5", 303, None),
        ("head 5", 304, nodes[1].id),
        ("new", 305, nodes[2].id),
    ]
    assert passes == []


@pytest.mark.parametrize("count", [10, 60, 400])
def test_what_moved_is_on_disk_and_what_is_told_is_what_there_is(count: int) -> None:
    disk, rng = Disk(), random.Random(count)
    told: dict[str, tuple[bytes, int]] = {}
    for _ in range(3):
        with open_on(disk) as store, store.subscribe(kinds=["head_moved"]) as heard:
            session = store.get("s") if "s" in store.sessions() else store.create("s", scheme="text@hf5")
            nodes = [session.append(session.root, [number]) for number in range(7)]
            assert {name: (node.id, session.head(name).version) for name, node in session.heads.items()} == told
            for _ in range(400):
                name = f"head {rng.randrange(count)}"
                if name in session.heads and rng.random() < 0.3:
                    session.drop_head(name)
                else:
                    session.set_head(name, rng.choice(nodes))
                for event in heard.poll():
                    assert event.head is not None and event.version is not None
                    assert event.version > max((version for _, version in told.values()), default=0)
                    if event.node_id is None:
                        del told[event.head]
                    else:
                        told[event.head] = event.node_id, event.version
            assert {name: (node.id, session.head(name).version) for name, node in session.heads.items()} == told


def test_values_of_other_lines_are_compared_as_wholes() -> None:
    """As when something was lost, and the disk has other moves of the same numbers."""
    start = a_tree()
    for number in range(40):
        start, _ = start.set_head(f"head {number}", start.root)
    other = pickle.loads(pickle.dumps(start))
    nodes = list(start)
    ours, theirs = start.drop_head("head 1"), other.set_head("head 2", nodes[1])[0]
    assert isinstance(ours._heads, HeadMap) and isinstance(theirs._heads, HeadMap) and ours._moves == theirs._moves
    moved = [(name, type(head), head.version) for name, head in theirs._moves_since(ours)]
    assert moved == [("head 1", Head, 2), ("head 2", Head, 41)]
    assert ours._moves_since(theirs) == [("head 2", start.head("head 2")), ("head 1", Dropped(41))]
    assert start._moves_since(ours.drop_head("head 3")) == [(f"head {at}", start.head(f"head {at}")) for at in (1, 3)]


def test_a_view_stays_and_keeps_the_nodes_that_it_gave() -> None:
    disk = Disk()
    with open_on(disk) as store:
        many(store)
    with open_on(disk) as store:
        session = store.get("s")
        assert isinstance(session._tree._heads["head 7"], StoredHead)
        view, tree = session.heads, session.tree
        heads = tree.heads
        assert heads["head 7"] is heads["head 7"] and view["head 7"] is view["head 7"] is heads["head 7"].node
        assert session.heads == view and tree.heads == heads and session.tree.heads == heads
        session.set_head("head 7", session.root)
        session.drop_head("head 8")
        assert view["head 7"].token_ids.tolist() == [0] and "head 8" in view and heads["head 8"].version == 9
        assert session.heads["head 7"] is session.root and "head 8" not in session.heads
        assert session.heads != view and view != session.heads and session.tree.heads != heads
        assert session.heads.set("head 7", view["head 7"]).set("head 8", view["head 8"]) == view
        assert hash(view) == hash(store.get("s").heads.set("head 7", view["head 7"]).set("head 8", view["head 8"]))
