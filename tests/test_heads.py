"""Heads of a session on disk read no node before it is asked for; in all else they are what they are in memory."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyrsistent import PMap, pmap

from sessiontree import CorruptTree, Head, HeadMoved, NameTaken, Node, Session, SessionStore, StoreClosed, UnknownHead
from sessiontree.journal import SessionNodes
from tests.disk import Disk
from tests.disk_model import open_on
from tests.test_freezing import openings
from tests.toy import store_of

DEPTH = 40


def a_chain(store: SessionStore, depth: int = DEPTH) -> Session:
    """A session of one path with a head in the middle, one at its end, one at the root, and one that was dropped."""
    session = store.create("s", scheme="text@hf5")
    node = session.root
    session.set_head("start", node)
    for number in range(depth):
        node = session.append(node, [number, 7])
        if number == depth // 2:
            session.set_head("middle", node)
            session.set_head("gone", node)
    session.set_head("main", node)
    session.drop_head("gone")
    return session


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ordinals of the nodes that were read from the disk."""
    read, ordinals = SessionNodes.read_path, list[int]()

    def counted(self: SessionNodes, path: Sequence[int], parent: Node) -> Any:
        ordinals.extend(path)
        return read(self, path, parent)

    monkeypatch.setattr(SessionNodes, "read_path", counted)
    return ordinals


@pytest.fixture(params=[False, True])
def opened(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The session of an open store, to write to or to read."""
    disk = Disk()
    with open_on(disk) as store:
        a_chain(store)
    with open_on(disk, read_only=request.param) as store:
        yield store.get("s")


def test_what_needs_no_node_reads_none(opened: Session, reads: list[int]) -> None:
    heads = opened.heads
    assert sorted(heads) == sorted(heads.keys()) == sorted(opened.tree.heads) == ["main", "middle", "start"]
    assert len(heads) == len(heads.values()) == len(heads.items()) == 3
    assert "main" in heads and "gone" not in heads and heads.get("gone") is None
    assert {name: head.version for name, head in opened.tree.heads.items()} == {"start": 1, "middle": 2, "main": 4}
    assert opened.head("main").version == 4
    assert opened.head("main") == opened.head("main") != opened.head("middle")
    assert opened.head("main") == opened.tree.heads["main"]
    assert "not read yet" in repr(opened.head("main")) and "version=4" in repr(opened.head("main"))
    assert "heads=['main', 'middle', 'start']" in repr(opened.tree)
    with pytest.raises(UnknownHead):
        opened.head("gone")
    assert reads == []


def test_a_node_is_read_when_it_is_asked_for(opened: Session, reads: list[int]) -> None:
    heads = opened.heads
    assert heads["start"] is opened.root and reads == []
    assert heads["middle"].token_ids.tolist() == [DEPTH // 2, 7]
    assert reads == list(range(1, DEPTH // 2 + 2))
    assert opened.head("main").node.token_ids.tolist() == [DEPTH - 1, 7]
    assert reads == list(range(1, DEPTH + 1))


def test_a_head_keeps_its_node_and_the_tree_does_not(opened: Session, reads: list[int]) -> None:
    kept, dropped = opened.head("main"), opened.head("middle")
    node, other = weakref.ref(kept.node), weakref.ref(dropped.node)
    del dropped
    for name in ("start", "start", "start", "start", "start"):  # a few that were read last are kept
        assert opened.head(name).node.depth == 0
    assert node() is kept.node
    del kept
    gc.collect()
    assert node() is None and other() is None
    assert len(reads) == DEPTH
    assert opened.head("main").node.depth == DEPTH and len(reads) == 2 * DEPTH


def test_compare_and_set_and_drop_read_only_what_they_set(reads: list[int]) -> None:
    disk = Disk()
    with open_on(disk) as store:
        a_chain(store)
    with open_on(disk) as store:
        session = store.get("s")
        main, middle = session.head("main"), session.head("middle")
        with pytest.raises(HeadMoved, match=r"version 4, <Node [0-9a-f]{8}, not read yet>") as caught:
            session.set_head("main", session.root, expected=middle)
        assert caught.value.actual == main and isinstance(caught.value.actual, Head)
        with pytest.raises(NameTaken):
            session.set_head("main", session.root, expected=None)
        assert session.set_head("main", session.root, expected=main) == Head(session.root, 6)
        session.drop_head("middle")
        assert reads == []
        with pytest.raises(HeadMoved):
            session.set_head("main", session.root, expected=main)
        assert main.node.id[:4].hex() in str(caught.value)
    with open_on(disk, read_only=True) as store:
        assert dict(store.get("s").heads) == {"start": store.get("s").root, "main": store.get("s").root}


def test_a_deep_session_is_listed_at_once(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        a_chain(store, 20_000)
    with SessionStore.open(tmp_path / "store") as store:
        session = store.get("s")
        start = time.perf_counter()
        assert sorted(session.heads) == ["main", "middle", "start"] and session.head("main").version == 4
        listed = time.perf_counter() - start
        start = time.perf_counter()
        assert session.heads["main"].depth == 20_000
        assert listed < (time.perf_counter() - start) / 20


def test_a_damaged_node_is_an_error_where_it_is_asked_for() -> None:
    disk = Disk()
    with open_on(disk) as store:
        a_chain(store)
    data = disk.content(".seg")
    data[data.index(np.array([DEPTH // 2 + 3, 7], "<i4").tobytes())] ^= 1
    with open_on(disk) as store:
        session = store.get("s")
        assert sorted(session.heads) == ["main", "middle", "start"]
        main = session.head("main")
        for ask in (lambda: main.node, lambda: session.heads["main"], lambda: dict(session.heads), lambda: hash(main)):
            with pytest.raises(CorruptTree):
                ask()
        assert main.version == 4 and main == session.head("main")
        assert session.heads["middle"].depth == DEPTH // 2 + 1
        session.drop_head("main")
        assert sorted(session.heads) == ["middle", "start"]


def test_a_head_of_a_closed_store_has_the_node_that_was_read(opened: Session) -> None:
    one, two, heads = opened.head("middle"), opened.head("main"), opened.heads
    node = one.node
    store_of(opened).close()
    assert one.node is node
    assert two.version == 4 and sorted(heads) == ["main", "middle", "start"]
    with pytest.raises(StoreClosed):
        two.node.path()


# --- as in memory ------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["memory", "disk"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    if request.param == "memory":
        with SessionStore.in_memory() as store:
            yield a_chain(store)
        return
    disk = Disk()
    with open_on(disk) as store:
        a_chain(store)
    with open_on(disk) as store:
        yield store.get("s")


def test_a_head_is_like_the_tuple_of_both(session: Session) -> None:
    node = session.heads["main"]
    head = session.head("main")
    place, version = head
    assert (place, version, len(head)) == (node, 4, 2)
    assert head[0] is node and head[1] == head[-1] == 4 and head[:] == (node, 4)
    assert head == (node, 4) and (node, 4) == head and head == Head(node, 4) == Head(node=node, version=4)
    assert head not in (Head(node, 5), Head(session.root, 4), (node, 5), None, 4, [node, 4])
    assert hash(head) == hash((node, 4)) and {head, Head(node, 4)} == {(node, 4)}
    assert repr(head) == f"Head(node={node!r}, version=4)"
    assert type(pickle.loads(pickle.dumps(session.head("main")))) is Head
    assert pickle.loads(pickle.dumps(session.head("main"))) == copy.copy(head) == copy.deepcopy(head) == head
    match head:
        case Head(place, version):
            assert (place, version) == (node, 4)
    assert repr(Head(node, 10**5000)).endswith("bits)")
    with pytest.raises(TypeError):
        type("Other", (Head,), {})


def test_heads_are_a_persistent_map(session: Session) -> None:
    heads = session.heads
    nodes = {name: session.head(name).node for name in ("start", "middle", "main")}
    assert isinstance(heads, PMap) and isinstance(heads.set("a", session.root), PMap)
    assert heads == nodes and nodes == heads and heads == pmap(nodes) and pmap(nodes) == heads and heads == session.heads
    others: list[Any] = [{}, {**nodes, "main": session.root}, {**nodes, "more": session.root}, [], None]
    for other in others:
        assert heads != other and other != heads
    assert hash(heads) == hash(pmap(nodes)) and {heads: 1}[pmap(nodes)] == 1
    assert dict(heads) == dict(heads.items()) == nodes and set(heads.values()) == set(nodes.values())
    assert heads.main is heads["main"] is heads.get("main") is nodes["main"]
    assert ("main", nodes["main"]) in heads.items() and nodes["main"] in heads.values()
    for missing in (lambda: heads["none"], lambda: heads.remove("none")):
        with pytest.raises(KeyError):
            missing()
    with pytest.raises(AttributeError):
        heads.none  # noqa: B018
    assert heads.set("a", session.root) == heads.update({"a": session.root}) == {**nodes, "a": session.root}
    assert heads + pmap({"a": session.root}) == heads.set("a", session.root)
    assert heads.remove("main") == heads.discard("main") == {name: nodes[name] for name in ("start", "middle")}
    assert heads.discard("none") == heads and heads.transform(["main"], session.root) == {**nodes, "main": session.root}
    changed = heads.evolver()
    changed["a"] = session.root
    assert changed.persistent() == heads.set("a", session.root) and heads == nodes
    assert repr(heads) == f"pmap({dict(heads)!r})"
    assert pickle.loads(pickle.dumps(heads)) == nodes and copy.copy(heads) == nodes and heads.copy() is heads
    before = session.head("main")
    assert openings(heads, lambda: session.heads == nodes) == [] and openings(before) == []
    session.set_head("main", session.root)
    assert heads == nodes and session.heads["main"] is session.root
    assert before == (nodes["main"], 4)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_turn_and_the_head_that_moves_to_it_are_one_step(on_disk: bool, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path, durability="commit") if on_disk else SessionStore.in_memory() as store:
        session = store.create("s", scheme="text@hf5")
        events = store.subscribe(kinds=["node_committed", "head_moved"])
        first = session.append(session.root, [1], head="main", expected=None)
        head = session.head("main")
        assert (head.node, head.version) == (first, 1)
        draft = session.draft(first)
        draft.extend([2, 3])
        reply = draft.commit(head="main", expected=head)
        assert session.head("main").node == reply
        assert [(event.kind, event.node_id) for event in events.poll()] == [
            (kind, node.id) for node in (first, reply) for kind in ("node_committed", "head_moved")
        ]
        before = len(session.tree)
        with pytest.raises(HeadMoved) as caught:
            session.append(reply, [4], head="main", expected=head)
        assert caught.value.actual == session.head("main")
        with pytest.raises(NameTaken):
            session.append(reply, [4], head="main", expected=None)
        again = session.draft(reply)
        again.append(5)
        with pytest.raises(HeadMoved):
            again.commit(head="main", expected=first)
        assert len(session.tree) == before and again.how_closed is None, "neither of the two was done"
        assert session.head("main").node == reply
        last = again.commit(head="main")
        assert session.append(reply, [2], head="other") == session.append(reply, [2], head="main"), "a node that is there already"
        assert (session.head("main").version, session.head("other").version) == (5, 4) and last in session.tree
