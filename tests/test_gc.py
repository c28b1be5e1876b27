"""Pins, drop and gc: what is shown stays byte for byte, what is not goes, whatever crashes, fails, reads or writes meanwhile."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sessiontree
from sessiontree import (
    CorruptTree,
    Draft,
    GcReport,
    Node,
    NodeHeld,
    OutOfRange,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    StoreFailed,
    UnknownNode,
    UnknownSession,
    Unsupported,
    codec,
    compaction,
    journal,
)
from sessiontree.backends import frames, scan, segment_log
from sessiontree.fsck import fsck, salvage
from sessiontree.journal import Durability
from sessiontree.testing.together import in_threads
from tests import toy
from tests.disk import Disk
from tests.disk_model import (
    AT,
    DURABILITIES,
    digest,
    fail,
    let_go,
    open_on,
    outline,
    reopened,
    seen,
    short,
)
from tests.test_robustness import coming_in, forked
from tests.test_segment_log import Interrupt
from tests.test_store_disk import ROOT, an_image, answer, append, blob_files, in_process, pixels, say, text_session
from tests.toy import VE, VS, a_turn, toy_scheme, turn

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
KINDS = ("memory", *DURABILITIES)
durabilities = pytest.mark.parametrize("durability", DURABILITIES)


class Where:
    """A store in memory, or on a disk of the tests' own, which can be opened again."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.disk = Disk()
        self.store = self._opened()

    def _opened(self) -> SessionStore:
        if self.kind == "memory":
            return SessionStore.in_memory()
        return open_on(self.disk, durability=self.kind, segment_bytes=4000)

    def again(self) -> SessionStore:
        """The store opened again; one in memory as it is."""
        if self.kind != "memory":
            self.store.close()
            self.store = self._opened()
        return self.store


@pytest.fixture(params=KINDS)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    place = Where(request.param)
    yield place
    let_go(place.store)


def words(number: int) -> list[int]:
    """Tokens that stand in no other node, nor do the bytes of any four of them."""
    return [1_000_000_000 + number, 7_919 * number + 3, number, 2_000_000_011 - number]


def bytes_of(number: int) -> bytes:
    return np.array(words(number), "<i4").tobytes()


def comb(session: Session, width: int = 3, depth: int = 3, start: int = 0) -> list[list[Node]]:
    """``width`` branches of ``depth`` turns each under one prompt, made in turn; each turn says another number."""
    prompt = session.append(session.root, words(start), metadata={"n": start})
    branches = [[prompt] for _ in range(width)]
    for level, branch in itertools.product(range(depth), branches):
        number = start + 1 + level * width + branches.index(branch) if len(branch) > 1 else start + 1 + branches.index(branch)
        branch.append(session.append(branch[-1], words(number), metadata={"n": number}))
    return branches


def without_versions(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "heads": [head[:2] for head in found["heads"]]}


def ids_of(session: Session) -> list[bytes]:
    return [node.id for node in session.tree]


def on_disk(disk: Disk) -> bytes:
    return b"".join(bytes(disk.files[file]) for path, file in sorted(disk.names.items()) if path.endswith((".seg", ".idx")))


def log_of(store: SessionStore) -> Any:
    assert store._journal is not None
    return store._journal.log


def files_of(disk: Disk) -> list[str]:
    return sorted(path.removeprefix(AT + "/") for path, file in disk.names.items() if file >= 0)


# --- drop and pin ------------------------------------------------------------------------------------------------------------
def test_c87_d26_what_is_held_stays_with_all_above_it(where: Where) -> None:
    session = text_session(where.store)
    [_, one, two, three], [_, other, *_], _ = comb(session)
    before = seen(session)

    def held(holder: str, at: Node) -> None:
        nonlocal before
        now = seen(session)
        for node in (one, two, three) if at is three else (one, two):
            for given in (node, node.id):
                with pytest.raises(NodeHeld, match=holder) as caught:
                    session.drop(given)
                assert caught.value.node == at and holder in caught.value.holder
            with pytest.raises(NodeHeld):
                session.drop(other, node)
        assert seen(session) == now

    session.set_head("main", three)
    held("head 'main'", three)
    session.set_head("main", two)
    held("head 'main'", two)
    session.drop_head("main")
    session.pin(three)
    session.pin(three)
    assert session.pins == {three.id}
    held("pin", three)
    session.unpin(three.id)
    session.unpin(three)
    session.unpin(one)
    assert session.pins == frozenset()
    draft = session.draft(two)
    draft.extend([5])
    held("an open draft", two)
    draft.abort()
    assert without_versions(seen(session)) == without_versions(before)
    session.drop(one)
    assert len(session.tree) == 8
    assert not {one.id, two.id, three.id} & set(ids_of(session))
    assert one.input_ids().tolist() == [*words(0), *words(1)]  # whoever holds it keeps it
    assert len(where.again().get("s").tree if where.kind != "memory" else session.tree) == 8


def test_a_draft_that_was_dropped_or_committed_holds_nothing(where: Where) -> None:
    session = text_session(where.store)
    node = session.append(session.root, [1])
    draft = session.draft(node)
    del draft
    gc.collect()
    done = say(session, session.append(session.root, [2]), 3)
    assert done.parent is not None
    session.drop(done.parent, node)
    assert ids_of(session) == [session.root.id]


def test_the_root_and_the_path_that_a_fork_shares_go_with_their_session(where: Where) -> None:
    store = where.store
    session = text_session(store)
    [_, one, two, _], _, _ = comb(session)
    fork = store.fork(session, two, "fork")
    own = fork.append(two, [9])
    for place, node in ((session, session.root), (fork, fork.root), (fork, one), (fork, two)):
        expected = seen(place)
        with pytest.raises(Unsupported):
            place.drop(node)
        with pytest.raises(Unsupported):
            place.drop(place.tree.leaves()[-1], node.id)
        assert seen(place) == expected
    fork.drop(own)
    assert ids_of(fork) == [node.id for node in two.path()]


def test_what_is_not_there_cannot_be_dropped_or_pinned(where: Where) -> None:
    store = where.store
    session, other = text_session(store), text_session(store, "other")
    node, foreign = session.append(session.root, [1]), other.append(other.root, [2])
    session.drop()
    session.drop(node)
    for call in (session.drop, session.pin, session.unpin):
        for given in (node, node.id, foreign, bytes(32)):
            with pytest.raises(UnknownNode):
                call(given)
        with pytest.raises(TypeError):
            call("node")  # type: ignore[arg-type]
    assert ids_of(session) == [session.root.id]
    session.pin(session.root)
    assert session.pins == {session.root.id}
    session.close()
    for call in (session.drop, session.pin, session.unpin):
        with pytest.raises(StaleSession):
            call(session.root)


def everywhere(session: Session, gone: Iterable[Node]) -> None:
    """No way leads to what is gone, and every way still leads to all else."""
    ids = {node.id for node in gone}
    tree = session.tree
    nodes = list(tree)
    assert len(tree) == len(nodes) == len({node.id for node in nodes}) and not ids & {node.id for node in nodes}
    for node in gone:
        assert node not in tree and node.id not in tree
        for call in (session.node, session.children, session.siblings, session.validate, session.draft):
            with pytest.raises(UnknownNode):
                call(node.id)
        writes: list[tuple[Callable[..., object], Sequence[Any]]] = [
            (session.append, (node, [1])),
            (session.set_head, ("main", node)),
            (session.truncate, (node, 1)),
            (session.diff, (node, session.root)),
            (session.lowest_common_ancestor, (session.root, node)),
        ]
        for write, given in writes:
            with pytest.raises(UnknownNode):
                write(*given)
        assert session.longest_prefix(node.input_ids()).node.id not in ids
        assert node.id not in {each.id for each in session.search(lambda _: True)}
    assert set(nodes) == {session.root, *session.descendants(session.root)}
    for node in nodes:
        assert session.node(node.id) == node
        match = session.longest_prefix(node.input_ids())
        assert match.length == node.stop
        children = [each.id for each in nodes if each.parent is not None and each.parent.id == node.id]
        assert [each.id for each in session.children(node)] == children
        if node.parent is not None:
            assert [*session.siblings(node)] == [each for each in session.children(node.parent) if each != node]
    assert session.leaves() == tuple(node for node in nodes if not session.children(node))
    assert ("1 nodes" in session.to_text()) == (len(nodes) == 1) or len(nodes) > 1


def test_what_was_dropped_is_unknown_from_then_on(where: Where) -> None:
    """In the middle of a commit order, over layers of what was written before and after opening, and after gc."""
    store, twin = where.store, SessionStore.in_memory()
    session, other = text_session(store), text_session(twin)
    branches = comb(session)
    others = comb(other)
    session.set_head("main", branches[2][-1])
    for _ in range(2):
        session = where.again().get("s") if where.kind != "memory" else session
        store = where.store
        late = session.append(branches[1][1].id, words(50))
        session.append(late, words(51))
        gone = [branches[0][2], branches[0][3], late, *session.children(late)]
        assert len({node.id for node in gone}) == 4
        session.drop(branches[0][2].id, late)
        everywhere(session, gone)
        later = session.append(branches[2][1].id, words(52))
        everywhere(session, gone)
        store.gc()
        everywhere(session, gone)
        kept = set(ids_of(session))
        session.drop(later)
        branches[0][2] = session.append(branches[0][1].id, words(4), metadata={"n": 4})
        branches[0][3] = session.append(branches[0][2], words(7), metadata={"n": 7})
        assert set(ids_of(session)) == kept - {later.id} | {branches[0][2].id, branches[0][3].id}
    other.drop(others[0][2])
    other.append(other.append(others[0][1], words(4), metadata={"n": 4}), words(7), metadata={"n": 7})
    other.set_head("main", others[2][-1])
    session = where.again().get("s") if where.kind != "memory" else session
    assert without_versions(seen(session)) == without_versions(seen(other))
    if where.kind != "memory":
        where.store.gc()
        assert without_versions(seen(session)) == without_versions(seen(other))
        with reopened(where.disk) as found:
            assert without_versions(seen(found.get("s"))) == without_versions(seen(other))


def test_equal_content_again_is_a_new_node(where: Where) -> None:
    session = text_session(where.store)
    prompt = session.append(session.root, [1])
    old = session.append(prompt, [2], metadata={"old": True}, key="k")
    below = session.append(old, [3])
    session.append(prompt, [4])
    session.drop(old)
    new = session.append(prompt, [2], metadata={"new": True}, key="k")
    assert new.id == old.id and new is not old and "new" in new.metadata
    assert ids_of(session)[-1] == new.id and below not in session.tree
    assert session.children(new) == () and [*session.children(prompt)][-1] == new
    session.drop(new)
    other = session.append(prompt, [9], key="k")  # nor is the key taken
    assert other.id != new.id
    new = session.append(prompt, [2], metadata={"new": 2})
    expected = seen(session)
    for _ in range(2):
        session = where.again().get("s") if where.kind != "memory" else session
        assert seen(session) == expected
        where.store.gc()
        assert seen(session) == expected
        assert session.node(new.id).metadata["new"] == 2


def test_trees_that_were_taken_stay_what_they_were(where: Where) -> None:
    session = text_session(where.store)
    branches = comb(session)
    if where.kind != "memory":
        session = where.again().get("s")
    before = session.tree
    walking = iter(before)
    next(walking)
    below = before.descendants(before.root)
    next(below)
    expected = outline(before)
    session.append(branches[1][1].id, words(50))
    middle = session.tree
    session.drop(branches[0][1].id)
    where.store.gc()
    session.append(branches[2][1].id, words(51))
    where.store.gc()
    assert len(before) == 11 and len(middle) == 12
    assert outline(before) == expected
    assert outline(middle)[0][:-1] == expected[0]
    assert [node.id for node in walking] == list(expected[0][1:])
    assert len(list(below)) == 9
    assert [len(before.children(node)) for node in before] == [1, 3, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def test_a_tree_drops_as_a_session_does(where: Where) -> None:
    """As a value, also where its lowest layer lies on disk: the session stays as it is, and so do older values."""
    store = where.store
    session = text_session(store)
    branches = comb(session)
    session.set_head("main", branches[2][2])
    fork = store.fork(session, branches[1][2], "fork")
    fork.append(branches[1][2], words(40))
    if where.kind != "memory":
        session, fork = (where.again().get("s"), where.store.get("fork"))
    session.append(branches[0][1].id, words(50))
    expected = seen(session), seen(fork)
    tree = session.tree
    with pytest.raises(NodeHeld):
        tree.drop(branches[2][1].id)
    with pytest.raises(Unsupported):
        tree.drop(tree.root)
    with pytest.raises(UnknownNode):
        tree.drop(bytes(32))
    for node in fork.tree.leaves()[0].path()[:-1]:
        with pytest.raises(Unsupported):
            fork.tree.drop(node)
    dropped = tree.drop(branches[0][2].id, branches[1][1].id)
    assert len(dropped) == len(tree) - 5
    grown, node = dropped.append(branches[0][1].id, words(60))
    more, _ = grown.set_head("x", node)
    assert [each.id for each in more][:-1] == [each.id for each in dropped]
    assert more.head("x").version > tree.head("main").version
    assert more.longest_prefix(node.input_ids()).node == node
    assert more.longest_prefix(branches[0][3].input_ids()).length == branches[0][1].stop
    assert [each.id for each in fork.tree.drop(fork.tree.leaves()[0])] == [each.id for each in branches[1][2].path()]
    assert (seen(session), seen(fork)) == expected


def test_forks_keep_what_was_dropped_from_where_they_come(where: Where) -> None:
    store = where.store
    session = store.create("s", scheme=toy_scheme(), namespace="tenant", max_tokens=300)
    node = session.root
    path = []
    for number in range(5):
        node = append(session, node, turn(number, VS, toy.image(4, 4, number), VE), metadata={"n": number})
        path.append(node)
    beside = session.append(path[1], [7])
    fork = store.fork(session, path[3], "fork")
    own = fork.append(path[3], [11], metadata={"own": 1})
    fork.set_head("main", own)
    again = store.fork(fork, own, "again")  # a fork of a fork
    deep = store.fork(again, path[1], "deep")  # at a node that its source shares with others
    deep.append(path[1], [12])
    expected = {name: seen(store.get(name)) for name in ("fork", "again", "deep")}

    def check() -> None:
        assert {name: seen(where.store.get(name)) for name in expected} == expected

    session.drop(path[2])
    assert len(session.tree) == 4
    check()
    where.store.gc(recent=0)  # of the source nothing is held
    assert len(session.tree) == 1
    del expected["deep"]
    assert [node.id for node in deep.tree] == [each.id for each in path[1].path()]
    check()
    if where.kind == "memory":
        return
    assert len(where.again().get("s").tree) == 1
    check()
    where.store.gc()
    check()
    for name in ("s", "fork"):
        where.store.drop(name)
        with pytest.raises(UnknownSession):
            where.store.get(name)
    del expected["fork"]
    for _ in range(2):
        check()
        report = where.store.gc()
        check()
        assert set(where.store.sessions()) == {"again", "deep"}
        assert report.nodes_after == 5
        where.again()
    again = where.store.get("again")
    again.append(again.leaves()[0], [99])
    where.store.drop("again")
    assert where.store.gc().nodes_after == 2
    assert beside.id not in where.store.get("deep").tree
    where.store.drop("deep")
    assert where.store.gc().nodes_after == 0
    assert where.again().sessions() == ()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_dropped_session_is_gone_and_its_id_is_free(where: Where, fresh: bool) -> None:
    store = where.store
    incarnations = []
    for number in range(3):
        session = text_session(store, max_tokens=100 + number)
        text_session(store, f"other {number}")
        incarnations.append(session.incarnation)
        if fresh:
            node = session.append(session.root, [number])
            session.set_head("main", node)
            if where.kind != "memory":
                store = where.again()
                session = store.get("s")
                incarnations.append(session.incarnation)
        else:
            node = session.append(session.root, [number])
        draft = session.draft(node.id)
        with pytest.raises(NodeHeld, match="an open draft"):
            store.drop("s")
        draft.abort()
        session.pin(node.id)
        with pytest.raises(NodeHeld, match="pin"):
            store.drop("s")
        session.unpin(node.id)
        assert store.get("s") is session and not session.closed
        kept = session.tree
        store.drop("s")
        assert session.closed and len(kept) == 2
        assert store.sessions() == tuple(f"other {each}" for each in range(number + 1))
        with pytest.raises(UnknownSession):
            store.get("s")
        with pytest.raises(UnknownSession):
            store.drop("s")
        for write in (session.append, session.set_head, session.drop):
            with pytest.raises(StaleSession):
                write(*{"append": (node, [1]), "set_head": ("main", node)}.get(write.__name__, (node,)))
        if number == 1:
            store.gc()
            store = where.again()
            assert "s" not in store.sessions()
    session = text_session(store)
    assert len(session.tree) == 1 and not session.heads and session.pins == frozenset()
    assert session.max_tokens is None
    incarnations.append(session.incarnation)
    assert incarnations == sorted(set(incarnations))
    expected = seen(session)
    if where.kind != "memory":
        assert seen(where.again().get("s")) == expected


def test_d28_versions_and_incarnations_never_come_again() -> None:
    """Over gc and opening, also where the last that moved was dropped, and where the last session was."""
    rng = random.Random(3)
    disk = Disk()
    versions: dict[str, list[int]] = {"s": [], "t": []}
    incarnations: list[int] = []
    numbers: list[int] = []
    for round_ in range(40 if SOAK else 12):
        with open_on(disk, durability=DURABILITIES[round_ % 3]) as store:
            for name, seen_versions in versions.items():
                session = store.get(name) if name in store.sessions() else text_session(store, name)
                incarnations.append(session.incarnation)
                for _ in range(rng.randrange(6)):
                    head = rng.choice("abcd")
                    if head in session.heads and rng.random() < 0.4:
                        session.drop_head(head)
                        seen_versions.append(seen_versions[-1] + 1)  # that is one too
                    else:
                        seen_versions.append(session.set_head(head, session.root).version)
                    if rng.random() < 0.3:
                        store.gc()
            short_lived = text_session(store, "short-lived")
            incarnations.append(short_lived.incarnation)
            assert short_lived._number is not None
            numbers.append(short_lived._number)
            store.drop("short-lived")
            for _ in range(rng.randrange(3)):
                store.gc()
    for found in (*versions.values(), incarnations, numbers):
        assert found == sorted(set(found)) and len(found) > 10


def test_pins_and_drops_survive_opening_and_reach_readers() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        branches = comb(session)
        session.pin(branches[0][3])
        session.pin(branches[1][1])
        session.unpin(branches[1][1])
        session.pin(branches[2][2])
        session.drop(branches[1][2])
        store.flush()
        reader = open_on(disk, read_only=True)
        found = reader.get("s")
        assert found.pins == session.pins == {branches[0][3].id, branches[2][2].id}
        assert seen(found) == seen(session)
    for _ in range(3):
        with open_on(disk) as store:
            session = store.get("s")
            assert session.pins == {branches[0][3].id, branches[2][2].id}
            with pytest.raises(NodeHeld):
                session.drop(branches[2][1].id)
            with pytest.raises(UnknownNode):
                session.node(branches[1][2].id)
            store.gc()
            assert reader.get("s").pins == session.pins
            assert seen(reader.get("s")) == seen(session)
            text_session(store, "t")
            store.flush()
            assert reader.sessions() == ("s", "t") and reader.get("t").root is not None
            store.drop("t")
            store.flush()
            assert reader.sessions() == ("s",)
            with pytest.raises(UnknownSession):
                reader.get("t")
    with open_on(disk) as store:
        session = store.get("s")
        session.unpin(branches[0][3].id)
        store.gc(recent=0)
        assert ids_of(session) == [node.id for node in branches[2][2].path()]
        text_session(store, "t", max_tokens=7)
        store.flush()
        assert reader.get("t").max_tokens == 7  # not what it was
        assert seen(reader.get("s")) == seen(session)
    reader.close()


def test_who_may_not_is_told_so(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        node = session.append(session.root, words(1))
        text_session(store, "other").append(store.get("other").root, words(2))
        store.flush()
        with SessionStore.open(tmp_path / "store", read_only=True) as reader:
            found = reader.get("s")
            for write in (
                lambda: found.pin(node.id),
                lambda: found.drop(node.id),
                lambda: reader.drop("s"),
                reader.gc,
                lambda: reader.gc(recent=0),
            ):
                with pytest.raises(Unsupported):
                    write()
            assert seen(found) == seen(session) and not found.closed

        def child() -> None:
            for write in (
                lambda: session.pin(node),
                lambda: session.drop(node),
                lambda: store.drop("s"),
                lambda: store.gc(recent=0),
            ):
                with pytest.raises((Unsupported, StoreFailed)):
                    write()
            assert node in session.tree

        assert forked(child) == 0
        for wrong in (-1, -(10**9)):
            with pytest.raises(OutOfRange):
                store.gc(recent=wrong)
        for kind in (1.5, "3", b"1"):
            with pytest.raises(TypeError):
                store.gc(recent=kind)  # type: ignore[arg-type]
        store.gc(recent=10**30)
        assert len(session.tree) == 2
    for call in (store.gc, lambda: store.drop("s")):
        with pytest.raises(StoreClosed):
            call()
    with pytest.raises(SessionTreeError):
        session.drop(node)
    [segment] = (tmp_path / "store" / "segments").glob("*.seg")
    data = segment.read_bytes()
    segment.write_bytes(data.replace(bytes_of(1), bytes_of(3)))
    with SessionStore.open(tmp_path / "store") as store:  # where a sidecar vouches for it, it is found when it is read
        before = {path.name: path.read_bytes() for path in segment.parent.iterdir() if path.suffix == ".seg"}
        with pytest.raises(CorruptTree):
            store.gc()
        assert {path.name: path.read_bytes() for path in segment.parent.iterdir()}.items() >= before.items()
        assert store.get("other").leaves()[0].token_ids.tolist() == words(2)
        store.drop("s")  # and nothing stands in the way of letting it go
        assert store.gc().nodes_after == 1
    with SessionStore.open(tmp_path / "store", strict=False) as store:
        assert not store.damaged


def test_a_store_in_which_damage_was_found_is_not_compacted() -> None:
    disk = Disk()
    with open_on(disk) as store:
        node = text_session(store).append(store.get("s").root, words(1))
    data = disk.content(".seg")
    data[data.index(bytes_of(1))] ^= 1
    with open_on(disk, strict=False) as store:
        for write in (store.gc, lambda: store.drop("s"), lambda: store.get("s").drop(node.id)):
            with pytest.raises((CorruptTree, UnknownNode)):
                write()


def test_gc_in_the_middle_of_gc_is_refused() -> None:
    """By what it calls, and by a signal handler at any place of it."""
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        comb(session)
        expected = seen(session)
        refused = []

        def again(*_: int) -> None:
            with pytest.raises(Unsupported) as caught:
                store.gc()
            refused.append(caught.value)

        store.gc(progress=again)
        assert refused

        def handler() -> None:
            with suppress(Unsupported):  # also where its thread is writing to the disk
                store.gc()
            with suppress(Unsupported):
                session.pin(session.root)
            with suppress(Unsupported):
                session.drop(session.append(session.root, [5]))

        for at in itertools.count(0, 1 if SOAK else 23):
            with coming_in(at, handler) as ran:
                store.gc()
            if not ran:
                break
        with suppress(UnknownNode):
            session.drop(session.append(session.root, [5]))
        assert at > 100
        assert seen(session) == expected
    with open_on(disk) as store:
        assert seen(store.get("s")) == expected


# --- against a model ---------------------------------------------------------------------------------------------------------
class Own:
    """What a session shows: its path, if it is a fork, and its nodes in commit order as (id, parent, number)."""

    def __init__(self, path: list[tuple[bytes, bytes | None, int]]) -> None:
        self.path = path
        self.nodes: list[tuple[bytes, bytes | None, int]] = []
        self.heads: dict[str, bytes] = {}
        self.pins: set[bytes] = set()
        self.drafts: list[tuple[Draft | None, bytes, int]] = []

    def shown(self) -> list[tuple[bytes, bytes | None, int]]:
        return [*self.path, *self.nodes]

    def held(self) -> set[bytes]:
        return {*self.heads.values(), *self.pins, *(parent for _, parent, _ in self.drafts)}

    def above(self, nodes: Iterable[bytes]) -> set[bytes]:
        """These, and all above them."""
        parents = {node: parent for node, parent, _ in self.shown()}
        found: set[bytes] = set()
        for at in nodes:
            up: bytes | None = at
            while up is not None and up not in found:
                found.add(up)
                up = parents[up]
        return found

    def below(self, nodes: Iterable[bytes]) -> set[bytes]:
        found = set(nodes)
        for node, parent, _ in self.nodes:
            if parent in found:
                found.add(node)
        return found


class Run:
    """Random operations on a store and on a model of it, which knows nothing of how anything is stored."""

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(seed)
        self.where = Where(kind)
        self.own: dict[str, Own] = {}
        self.digests: dict[bytes, str] = {}
        self.dropped: list[tuple[bytes, bytes | None, int]] = []
        self.made = 0
        self.numbers = 0
        self.incarnation = 0
        self.done = 0
        self.versions: dict[str, int] = {}
        self.create()

    @property
    def store(self) -> SessionStore:
        return self.where.store

    def create(self) -> None:
        self.made += 1
        session = text_session(self.store, f"s{self.made}")
        self.opened(session)
        self.own[session.id] = Own([(session.root.id, None, -1)])

    def opened(self, session: Session) -> None:
        if session.incarnation != self.incarnation:
            assert session.incarnation > self.incarnation or session.id in self.own
            self.incarnation = max(self.incarnation, session.incarnation)

    def pick(self) -> tuple[Session, Own]:
        name = self.rng.choice(list(self.own))
        session = self.store.get(name)
        self.opened(session)
        return session, self.own[name]

    def node(self, own: Own) -> bytes:
        shown = own.shown()
        return shown[-1 - min(int(self.rng.expovariate(0.3)), len(shown) - 1)][0]

    def append(self) -> None:
        session, own = self.pick()
        parent = self.node(own)
        again = [number for node, above, number in self.dropped if above == parent] if self.rng.random() < 0.3 else []
        if again:
            number = self.rng.choice(again)
        else:
            self.numbers += 1
            number = self.numbers
        node = session.append(parent, words(number), metadata={"n": number})
        if node.id not in {each for each, _, _ in own.shown()}:
            own.nodes.append((node.id, parent, number))
        assert self.digests.setdefault(node.id, digest(node)) == digest(node)

    def draft(self) -> None:
        session, own = self.pick()
        if own.drafts and self.rng.random() < 0.7:
            at, parent, number = own.drafts.pop(self.rng.randrange(len(own.drafts)))
            assert at is not None
            if self.rng.random() < 0.5:
                at.abort()
                return
            node = at.commit()
            own.nodes.append((node.id, parent, number))
            self.digests[node.id] = digest(node)
            return
        self.numbers += 1
        parent = self.node(own)
        draft = session.draft(parent, key=f"{self.numbers}")
        draft.extend(words(self.numbers))
        own.drafts.append((draft, parent, self.numbers))

    def head(self) -> None:
        session, own = self.pick()
        name = self.rng.choice("abc")
        if name in own.heads and self.rng.random() < 0.4:
            session.drop_head(name)
            del own.heads[name]
            self.versions[session.id] = self.versions.get(session.id, 0) + 1
        else:
            own.heads[name] = self.node(own)
            version = session.set_head(name, own.heads[name]).version
            assert version > self.versions.get(session.id, 0)
            self.versions[session.id] = version

    def pin(self) -> None:
        session, own = self.pick()
        node = self.node(own)
        if own.pins and self.rng.random() < 0.5:
            node = self.rng.choice(sorted(own.pins))
            session.unpin(node)
            own.pins.discard(node)
        else:
            session.pin(node)
            own.pins.add(node)
        assert session.pins == own.pins

    def drop(self) -> None:
        session, own = self.pick()
        nodes = [self.node(own) for _ in range(self.rng.choice((1, 1, 2)))]
        gone = own.below(nodes)
        if any(node in nodes for node, _, _ in own.path):
            expected: Any = Unsupported
        else:
            expected = NodeHeld if gone & own.held() else None
        if expected is not None:
            with pytest.raises(expected):
                session.drop(*nodes)
            return
        session.drop(*nodes)
        self.forget(own, gone)

    def forget(self, own: Own, gone: set[bytes]) -> None:
        self.dropped += [each for each in own.nodes if each[0] in gone]
        own.nodes = [each for each in own.nodes if each[0] not in gone]

    def fork(self) -> None:
        if len(self.own) > 5:
            return
        session, own = self.pick()
        node = self.node(own)
        self.made += 1
        fork = self.store.fork(session, node, f"s{self.made}")
        self.opened(fork)
        path = own.above([node])
        self.own[fork.id] = Own([each for each in own.shown() if each[0] in path])

    def drop_session(self) -> None:
        if len(self.own) < 3:
            return
        session, own = self.pick()
        if own.pins or own.drafts:
            with pytest.raises(NodeHeld):
                self.store.drop(session.id)
            return
        self.store.drop(session.id)
        self.dropped += own.nodes
        del self.own[session.id]
        if self.rng.random() < 0.5:  # its id is free
            text_session(self.store, session.id)
            self.own[session.id] = Own([own.path[0]] if own.path[0][0] == self.store.get(session.id).root.id else [])
            self.versions.pop(session.id, None)

    def close(self) -> None:
        session, own = self.pick()
        if self.where.kind != "memory" and not own.drafts:
            session.close()

    def reopen(self) -> None:
        for own in self.own.values():
            own.drafts.clear()
        self.where.again()
        self.check()

    def collect(self) -> None:
        recent = self.rng.choice((None, None, 0, 1, 2, 5, 10**9))
        if recent is not None:
            for own in self.own.values():
                leads = own.held() | {each[0] for each in own.shown()[max(0, len(own.shown()) - recent) :]}
                alive = own.above(leads)
                self.forget(own, {node for node, _, _ in own.nodes if node not in alive})
        before = {name: without_versions(seen(self.store.get(name))) for name in self.own} if recent is None else {}
        report = self.store.gc(recent=recent)
        assert report.swept
        for name, shown in before.items():
            assert without_versions(seen(self.store.get(name))) == shown
        self.check()
        if self.where.kind != "memory":
            self.check_files(report)

    def check(self) -> None:
        assert set(self.store.sessions()) == set(self.own)
        for name, own in self.own.items():
            session = self.store.get(name)
            self.opened(session)
            nodes = list(session.tree)
            assert [node.id for node in nodes] == [node for node, _, _ in own.shown()]
            assert len(session.tree) == len(nodes)
            for node, (_, parent, number) in zip(nodes, own.shown(), strict=True):
                assert (None if node.parent is None else node.parent.id) == parent
                assert number < 0 or (node.token_ids.tolist() == words(number) and digest(node) == self.digests[node.id])
            assert {head: node.id for head, node in session.heads.items()} == own.heads
            assert session.pins == own.pins

    def check_files(self, report: GcReport) -> None:
        """No byte of what nothing leads to, every byte of all else, and as many records and files as that takes."""
        self.store.flush()
        disk = self.where.disk
        data = on_disk(disk)
        kept = {number for own in self.own.values() for _, _, number in own.shown()}
        for number in range(1, self.numbers + 1):
            assert (bytes_of(number) in data) == (number in kept), number
        log = segment_log.SegmentLog.open(AT, entry_of=journal.prefix_of, system=disk, read_only=True)
        entries = log.entries()
        kinds = entries["kind"].tolist()
        first = log._base.segment
        nodes = set(entries[entries["kind"] == codec.NODE][["session", "ordinal"]].tolist())
        log.close()
        assert kinds.count(codec.NODE) == len(nodes) == report.nodes_after
        assert kinds.count(codec.HEAD) <= sum(len(own.heads) + 1 for own in self.own.values())
        assert kinds.count(codec.PIN) == sum(len(own.pins) for own in self.own.values())
        names = {name for name in files_of(disk) if not name.startswith("segments/")}
        assert names == {"BASE", "FORMAT", "LOCK"}
        leases = [name for name in files_of(disk) if name.endswith(".lease")]
        assert leases == [f"segments/{first:08d}.lease"]
        assert all(int(name[9:17]) >= first for name in files_of(disk) if name.startswith("segments/"))

    WEIGHTS = (
        ("append", 12),
        ("draft", 4),
        ("head", 3),
        ("pin", 2),
        ("drop", 4),
        ("fork", 2),
        ("drop_session", 1),
        ("close", 1),
        ("reopen", 1),
        ("collect", 3),
    )

    def go(self, steps: int) -> None:
        for _ in range(steps):
            [what] = self.rng.choices([name for name, _ in self.WEIGHTS], [weight for _, weight in self.WEIGHTS])
            getattr(self, what)()
            self.done += 1
        self.reopen()
        self.collect()
        self.reopen()
        let_go(self.store)


@pytest.mark.parametrize("seed", range(4))
def test_d26_d27_what_leads_somewhere_stays_and_no_byte_of_all_else(where: Where, seed: int) -> None:
    for number in range(100 if SOAK else 1):
        Run(1000 * number + seed, where.kind).go(160)


@pytest.mark.parametrize("recent", [0, 1, 3, 100])
def test_d26_recent_counts_what_is_shown(where: Where, recent: int) -> None:
    """Not what was dropped before; of each session by itself; in memory as on disk; sessions that are closed too."""
    store = where.store
    kept = {}
    for name in ("open", "closed"):
        session = text_session(store, name)
        nodes = [session.append(session.root, words(number)) for number in range(8)]
        chain = session.append(session.append(nodes[1], words(20)), words(21))
        session.drop(nodes[7], *nodes[5:6])
        session.set_head("main", nodes[0])
        held = {nodes[0].id, *[node.id for node in [*nodes[2:5], nodes[6], chain.parent, chain][-recent:] if node and recent]}
        kept[name] = {each.id for node in held for each in session.node(node).path()} | {session.root.id}
        if name == "closed" and where.kind != "memory":
            session.close()
    before = store.gc(recent=recent)
    for name, ids in kept.items():
        assert set(ids_of(store.get(name))) == ids
    again = store.gc(recent=recent)
    assert again.nodes_before == again.nodes_after == before.nodes_after == sum(len(ids) - 1 for ids in kept.values())
    for name, ids in kept.items():
        assert set(ids_of(where.again().get(name))) == ids


@durabilities
def test_d27_after_a_drop_and_gc_the_files_are_those_of_what_is_left(durability: Durability, tmp_path: Path) -> None:
    """Features too: those stay that a node names which is shown, or that a fork shares, or whose node is still to come."""
    with SessionStore.open(tmp_path, durability=durability) as store:
        session = store.create("s", scheme=toy_scheme())

        def picture(number: int, parent: Node, into: Session = session) -> Node:
            node = append(into, parent, turn(number, VS, toy.image(4, 4, number), VE))
            store.put_features(node.media[0], pixels(number))
            return node

        nodes = [picture(number, session.root) for number in range(6)]
        fork = store.fork(session, nodes[4], "fork")
        own = picture(7, nodes[4], fork)
        again = append(session, nodes[0], turn(50, VS, toy.image(4, 4, 1), VE))  # names what another one does
        items = {number: node.media[0] for number, node in enumerate(nodes)}
        items[7] = own.media[0]
        store.put_features(an_image(8), pixels(8))  # whose node is still to come
        assert len(blob_files(tmp_path)) == 8
        session.drop(nodes[1], nodes[2], nodes[4])
        report = store.gc()
        assert (report.features_removed, report.swept, report.nodes_before, report.nodes_after) == (1, True, 8, 6)
        assert report.bytes_after < report.bytes_before

        def kept() -> set[int]:
            store._features.clear()
            found = {number: store.get_features(item) for number, item in {**items, 8: an_image(8)}.items()}
            for number, features in found.items():
                assert features is None or features["features"].tobytes() == pixels(number).tobytes()
            return {number for number, features in found.items() if features is not None}

        assert kept() == {0, 1, 3, 4, 5, 7, 8} and len(blob_files(tmp_path)) == 7
        session.drop(again)
        assert store.gc().features_removed == 1 and kept() == {0, 3, 4, 5, 7, 8}
        store.drop("fork")
        assert store.gc().features_removed == 2 and kept() == {0, 3, 5, 8}
        node = append(session, session.root, a_turn(8))
        assert store.gc().features_removed == 0
        session.drop(node)
        assert store.gc().features_removed == 1 and kept() == {0, 3, 5}
        store.put_features(an_image(9), pixels(9))
    with SessionStore.open(tmp_path, durability=durability) as store:
        assert store.gc().features_removed == 1  # nobody waits for its node any more
        session = store.get("s")
        assert kept() == {0, 3, 5}
        store.drop("s")
        report = store.gc()
        assert (report.nodes_after, report.features_removed, report.swept) == (0, 0, False)
        del session  # which could still be read
        report = store.gc()
        assert (report.nodes_after, report.features_removed, report.swept) == (0, 3, True)
        store.flush()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert [name.rpartition(".")[2] for name in left] == ["BASE", "FORMAT", "LOCK", "idx", "lease", "seg"]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1500


def test_d26_a_pinned_leaf_keeps_all_above_it_and_their_features(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        session = store.create("s", scheme=toy_scheme())
        node = session.root
        for number in range(4):
            node = append(session, node, turn(number, VS, toy.image(4, 4, number), VE))
            store.put_features(node.media[0], pixels(number))
            beside = append(session, node, turn(number, VS, toy.image(4, 4, 10 + number), VE))
            store.put_features(beside.media[0], pixels(10 + number))
        session.pin(node)
        expected = [digest(each) for each in node.path()]
    for _ in range(2):
        with SessionStore.open(tmp_path) as store:
            session = store.get("s")
            store.gc(recent=0)
            assert [digest(each) for each in session.tree] == expected
            assert [digest(each) for each in session.node(node.id).path()] == expected
            for number, each in enumerate(list(session.tree)[1:]):
                features = store.get_features(each.media[0])
                assert features is not None and features["features"].tobytes() == pixels(number).tobytes()
            assert len(blob_files(tmp_path)) == 4
    with SessionStore.open(tmp_path) as store:
        store.get("s").unpin(node.id)
        store.gc(recent=0)
        assert len(store.get("s").tree) == 1 and not blob_files(tmp_path)


def test_d27_features_that_could_not_go_at_once_go_with_the_next_gc(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        session = store.create("s", scheme=toy_scheme())
        node = append(session, session.root, a_turn())
        store.put_features(node.media[0], pixels(1))
        store.flush()
        reader = SessionStore.open(tmp_path, read_only=True)
        session.drop(node)
        report = store.gc()
        assert not report.swept and not report.features_removed
        assert reader.get_features(node.media[0]) is not None
        reader.close()
        report = store.gc()
        assert report.swept and report.features_removed == 1 and not blob_files(tmp_path)


def test_c87_two_processes_read_one_file_during_gc(tmp_path: Path) -> None:
    """And ancestors of a live head never go."""
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        node = session.root
        for number in range(300):
            node = session.append(node, words(number))
            session.append(node, words(1000 + number))
        session.set_head("main", node)
        store.flush()
        readers = [in_process(READS, str(tmp_path / "store")) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        for _ in range(5):
            report = store.gc(recent=0)
            assert report.nodes_after == 300
            session.append(node.path()[5], words(5000))
        assert [each.id for each in session.head("main").node.path()] == [each.id for each in node.path()]
        expected = [digest(each) for each in node.path()]
        for reader in readers:
            assert answer(reader) == [expected, True]


READS = """
import json, sys, time
from sessiontree import SessionStore
from tests.disk_model import digest
with SessionStore.open(sys.argv[1], read_only=True) as store:
    session = store.get("s")
    counts = [len(session.tree)]
    print("ready", flush=True)
    end = time.monotonic() + 1
    found = None
    while time.monotonic() < end:
        found = [digest(node) for node in session.head("main").node.path()]
        session = store.get("s")
        counts.append(len(session.tree))
    print(json.dumps([found, counts[0] == 601 and counts[-1] <= 302]))
"""


# --- crashes -----------------------------------------------------------------------------------------------------------------
View = dict[str, Any]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No background thread does anything by itself, so that what is done is the same each time."""
    monkeypatch.setattr(segment_log, "_POLL", (1000.0, 1000.0))


def view(store: SessionStore) -> View:
    """All that anybody can see of a store."""
    found: View = {"ids": store.sessions(), "aliases": {}}
    for name in store.sessions():
        session = store.get(name)
        tree = session.tree
        ids, heads = outline(tree)
        found[name] = {
            "nodes": ids,
            "digests": [digest(node) for node in tree],
            "paths": [[node.id for node in leaf.path()] for leaf in tree.leaves()],
            "children": [[child.id for child in tree.children(node)] for node in tree],
            "heads": heads,
            "pins": session.pins,
            "moves": tree._moves,
            "limits": (session.max_tokens, session.namespace, session.scheme.name),
        }
    for alias in ("cat", "dog"):
        with suppress(SessionTreeError):
            found["aliases"][alias] = store.aliased_media(alias)
    return found


DEAD = range(100, 112)


def grown(disk: Disk, durability: Durability, segment_bytes: int = 1800) -> SessionStore:
    """A store over some segments with something of everything; what says DEAD numbers is dropped."""
    store = open_on(disk, durability=durability, segment_bytes=segment_bytes)
    session = text_session(store)
    one = session.append(session.root, words(1), metadata={"n": 1})
    two = session.append(one, words(2))
    gone = session.append(two, words(100))
    store.fork(session, gone, "shares what is dropped").append(gone, words(3))
    session.append(gone, words(101))
    session.set_head("main", two)
    session.set_head("short-lived", gone)
    store.alias_media("cat", bytes(32))
    store.alias_media("dog", bytes(32))
    lost = text_session(store, "lost")
    lost.set_head("main", lost.append(lost.root, words(102)))
    store.close()
    store = open_on(disk, durability=durability, segment_bytes=segment_bytes)
    session = store.get("s")
    three = session.append(two.id, words(4), key="k")
    session.pin(three)
    session.append(session.append(one.id, words(103)), words(104))
    side = session.append(one.id, words(5))
    fork = store.fork(session, side, "fork")
    fork.set_head("tip", fork.append(side, words(6)))
    between = store.fork(fork, fork.head("tip").node, "between")
    store.fork(between, side, "early").append(side, words(7))
    between.append(fork.head("tip").node, words(105))
    store.drop_alias("dog")
    session.drop_head("short-lived")
    session.drop(gone.id, *[node for node in session.children(one.id) if node.token_ids.tolist() == words(103)])
    store.drop("lost")
    store.drop("between")
    lost = text_session(store, "lost")
    lost.append(lost.root, words(8))
    store.flush()
    return store


def check_left(state: Disk, expected: View, acked: Sequence[bytes], durability: Durability) -> None:
    """What a crash left is opened: all is as before, a second gc works, and nothing dead is left."""
    with open_on(state, read_only=True) as reader:
        assert shown_of(view(reader), acked) == expected
    with open_on(state, durability=durability, segment_bytes=1800) as store:
        assert not store.damaged
        assert shown_of(view(store), acked) == expected
        report = store.gc()
        assert report.swept
        assert shown_of(view(store), acked) == expected
        session = store.get("s")
        assert session.set_head("new", session.root).version == expected["s"]["moves"] + 1
        session.drop_head("new")
    data = on_disk(state)
    assert not [number for number in DEAD if bytes_of(number) in data and number != 100]
    assert [name.rpartition(".")[2] for name in files_of(state)].count("lease") == 1
    with open_on(state, durability=durability, segment_bytes=1800) as store:
        found = shown_of(view(store), acked)
        assert found["s"].pop("moves") == expected["s"]["moves"] + 2
        assert found == {**expected, "s": {part: value for part, value in expected["s"].items() if part != "moves"}}


def shown_of(found: View, acked: Sequence[bytes]) -> View:
    """Without the session that was written to meanwhile, which has all that was acknowledged."""
    busy = found.pop("busy", None)
    if busy is not None:
        assert set(busy["nodes"]) >= set(acked)
        found["ids"] = tuple(name for name in found["ids"] if name != "busy")
    return found


def traced(durability: Durability, *, busy: bool) -> tuple[Disk, View, int]:
    """A gc on a disk that records it, where it began, and what was to be seen before. ``busy``: others write meanwhile."""
    disk = Disk()
    store = grown(disk, durability)
    expected = view(store)
    session = text_session(store, "busy") if busy else None
    store.flush()
    begun = len(disk.trace)

    def write(*_: int) -> None:
        if session is not None:
            for _time in range(2):
                node = session.append(session.leaves()[0], words(1000 + len(session.tree)))
                session.set_head("main", node)
                store.flush()
                disk.mark(node.id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_BATCH_BYTES", 300)  # so that there is something in between
        report = store.gc(progress=write)
    assert report.swept and report.nodes_after < report.nodes_before
    write()
    found = view(store)
    assert shown_of(found, [event[1] for event in disk.trace[begun:] if event[0] == "mark"]) == expected
    let_go(store)
    return disk, expected, begun


CRASHES = {"states": 0}


@pytest.mark.usefixtures("still")
@durabilities
@pytest.mark.parametrize("busy", [False, True])
def test_d26_a_crash_after_every_event_of_gc(durability: Durability, busy: bool) -> None:
    rng = random.Random(26)
    disk, expected, begun = traced(durability, busy=busy)
    for events in range(begun, len(disk.trace) + 1, 1 if SOAK or (durability == "group" and not busy) else 5):
        acked = [event[1] for event in disk.trace[begun:events] if event[0] == "mark"]
        for _ in range(40 if SOAK else 1):
            check_left(disk.crash(rng, events), expected, acked, durability)
            CRASHES["states"] += 1


@pytest.mark.usefixtures("still")
def test_d26_a_crash_in_the_gc_after_a_crash_in_gc() -> None:
    rng = random.Random(27)
    for _ in range(300 if SOAK else 8):
        durability = rng.choice(DURABILITIES)
        disk, expected, begun = traced(durability, busy=False)
        for _ in range(3):
            disk = disk.crash(rng, rng.randint(begun, len(disk.trace)))
            store = open_on(disk, durability=durability, segment_bytes=1800)
            begun = len(disk.trace)
            store.gc()
            assert view(store) == expected
            let_go(store)
        check_left(disk.crash(rng, rng.randint(begun, len(disk.trace))), expected, (), durability)
        CRASHES["states"] += 4


# --- a disk that refuses -----------------------------------------------------------------------------------------------------
class Refusing(Disk):
    """Reading fails on request too."""

    reads = False

    def _asked(self, name: str) -> None:
        if self.reads:
            calls = list(self.calls)
            self._call(name)
            self.calls = calls

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._asked("pread")
        return super().pread(fd, length, offset)

    def listdir(self, path: str) -> list[str]:
        self._asked("listdir")
        return super().listdir(path)

    def open(self, path: str, flags: int) -> int:
        self._asked("open to read")
        return super().open(path, flags)


CALLS = (
    "open",
    "open to read",
    "pwrite",
    "fdatasync",
    "fsync_dir",
    "fallocate",
    "ftruncate",
    "rename",
    "unlink",
    "pread",
    "listdir",
)


@pytest.mark.usefixtures("still")
@durabilities
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_of_gc_may_fail(durability: Durability, error: int, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, or it need not: all can be seen as before, the store goes on or has stopped, and the next one is fine."""
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 300)
    rng = random.Random(5)
    refused = 0
    for n in itertools.count(1, 1 if SOAK else 7 if call in ("pread", "open to read") else 2):
        disk = Refusing()
        store = grown(disk, durability)
        expected = view(store)
        store.flush()
        disk.reads = True
        fail(disk, n, call, error, part=rng.random())
        try:
            store.gc()
        except (StoreFailed, CorruptTree) as caught:
            assert isinstance(caught.__cause__, OSError) or isinstance((caught.__cause__ or caught).__cause__, OSError)
            assert call in ("pread", "open to read") or not isinstance(caught, CorruptTree)
            refused += 1
        missed = disk._hit < n
        disk.fault = None
        disk.reads = False
        assert view(store) == expected
        session = store.get("s")
        log = log_of(store)
        try:
            node = session.append(session.root, words(50))
            store.flush()
        except StoreFailed:
            assert log.failed and (call in ("fdatasync", "fsync_dir") or (call == "ftruncate" and error == errno.EIO))
            with pytest.raises(StoreFailed):
                store.gc()
        else:
            assert not log.failed
            assert store.gc().swept
            session.drop(node)
            store.gc()
            assert view(store) == expected
        for state in (disk.copy(), disk.crash(rng, len(disk.trace))):
            with open_on(state, durability=durability) as found:
                again = found.get("s")
                with suppress(UnknownNode):
                    again.drop(*[each for each in again.children(again.root) if each.token_ids.tolist() == words(50)])
                assert view(found) == expected
                assert found.gc().swept
                assert view(found) == expected
            assert not [number for number in DEAD if bytes_of(number) in on_disk(state) and number != 100]
        let_go(store)
        if missed:
            break
    assert n > 1
    assert refused or call in ("unlink", "fallocate", "listdir") or (call == "ftruncate" and durability != "commit") or n < 3


@pytest.mark.usefixtures("still")
@durabilities
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["drop", "drop session", "pin", "unpin", "collect"])
def test_d03_d06_a_drop_or_pin_that_the_disk_refuses_never_was(durability: Durability, call: str, error: int, what: str) -> None:
    for n in (1, 2):
        disk = Disk()
        store = grown(disk, durability)
        session = store.get("s")
        one = next(node for node in session.tree if node.token_ids.tolist() == words(1))
        extra = session.append(one, words(106))
        [pinned] = session.pins
        store.flush()
        before = view(store)
        acts: dict[str, Callable[[], object]] = {
            "drop": lambda session=session, extra=extra: session.drop(extra),  # type: ignore[misc]
            "drop session": lambda store=store: store.drop("early"),  # type: ignore[misc]
            "pin": lambda session=session, extra=extra: session.pin(extra),  # type: ignore[misc]
            "unpin": lambda session=session, pinned=pinned: session.unpin(pinned),  # type: ignore[misc]
            "collect": lambda store=store: store.gc(recent=0),  # type: ignore[misc]
        }
        store.get("early")
        fail(disk, n, call, error)
        try:
            acts[what]()
            store.flush()
            refused = False
        except StoreFailed:
            refused = True
        assert refused or n > 1 or what == "collect"
        missed = disk._hit < n
        disk.fault = None
        after = view(store)
        log = log_of(store)
        if not log.failed:
            assert after == before if refused and what != "collect" else missed or what == "collect" or after != before
            if refused:
                acts[what]()
                after = view(store)
            node = session.append(session.root, words(50))
            session.drop(node)
            assert view(store) == after
        with reopened(disk) as found:
            if not log.failed:
                assert view(found) == after
            else:
                assert {name: view(found).get(name, before[name]) for name in ("fork", "lost")} == {
                    name: before[name] for name in ("fork", "lost")
                }
                found.gc()
        let_go(store)


# --- interrupts --------------------------------------------------------------------------------------------------------------
class Anywhere(Interrupt):
    """In all that gc, pin and drop go through."""

    FILES = frozenset(
        module.__file__
        for module in (
            segment_log,
            frames,
            scan,
            journal,
            compaction,
            sessiontree.store,
            sessiontree.session,
            sessiontree.stored,
            sessiontree.tree,
        )
    )


def interrupt(n: int, act: Callable[[], object]) -> bool:
    """Do it, with a KeyboardInterrupt at the n-th place. Whether it came."""
    at = Anywhere(n)
    before = sys.gettrace()
    sys.settrace(at)
    try:
        with suppress(KeyboardInterrupt):
            act()
    finally:
        sys.settrace(before)
    return at.left < 0


INTERRUPTS = {"come": 0}


def places_of(act: Callable[[SessionStore], object], durability: Durability) -> int:
    """How many places it has."""
    store = grown(Disk(), durability)
    for name in store.sessions():
        store.get(name)
    at = Anywhere(10**9)
    sys.settrace(at)
    try:
        act(store)
    finally:
        sys.settrace(None)
    let_go(store)
    return 10**9 - at.left


@pytest.mark.usefixtures("still")
@durabilities
def test_an_interrupt_anywhere_in_gc_undoes_nothing(durability: Durability) -> None:
    """Neither in memory nor on disk; what follows works, from another thread too."""
    count = places_of(lambda store: store.gc(), durability)
    assert count > 500
    for n in range(1, count, 1 if SOAK else max(1, count // 25)):
        disk = Disk()
        store = grown(disk, durability)
        expected = view(store)
        assert interrupt(n, store.gc) or n > count - 40
        INTERRUPTS["come"] += 1
        if n % 2:
            assert view(store) == expected
        session = store.get("s")
        done: list[GcReport] = []

        def work(_: int, session: Session = session, store: SessionStore = store, done: list[GcReport] = done) -> None:
            node = session.append(session.root, words(50))
            session.drop(node)
            done.append(store.gc())

        in_threads(1, work)
        assert done and view(store) == expected, n
        store.flush()
        with reopened(disk) as found:
            assert view(found) == expected, n
        store.gc()
        assert view(store) == expected
        let_go(store)
        with open_on(disk) as found:
            assert view(found) == expected, n
        assert not [number for number in DEAD if bytes_of(number) in on_disk(disk) and number != 100]


@pytest.mark.usefixtures("still")
@durabilities
@pytest.mark.parametrize("what", ["drop", "drop session", "pin", "unpin", "collect"])
def test_an_interrupt_anywhere_in_drop_and_pin(durability: Durability, what: str) -> None:
    """It is done or not, and memory and disk agree on which, whatever comes after."""

    def act(store: SessionStore) -> None:
        session = store.get("s")
        if what == "drop":
            session.drop(*[each for each in session.tree if each.token_ids.tolist() == words(5)])
        elif what == "drop session":
            if "fork" in store.sessions():
                store.drop("fork")
        elif what == "pin":
            session.pin(session.root)
        elif what == "unpin":
            for pin in session.pins:
                session.unpin(pin)
        else:
            for name in store.sessions():
                store.get(name)._collect(0)

    count = places_of(act, durability)
    for n in range(1, count, 1 if SOAK else max(1, count // 9)):
        disk = Disk()
        store = grown(disk, durability)
        for name in store.sessions():
            store.get(name)
        assert interrupt(n, lambda store=store: act(store)) or n > count - 40  # type: ignore[misc]
        INTERRUPTS["come"] += 1
        session = store.get("s")
        for parent in (session.root, *[each for each in session.tree if each.token_ids.tolist() == words(5)]):
            with suppress(UnknownNode):  # it is gone after all
                session.append(parent, words(51))
        store.flush()
        expected = view(store)
        with reopened(disk) as found:
            assert view(found) == expected, n
        if n % 2:
            store.gc()
            assert view(store) == expected, n
        act(store)
        expected = view(store)
        store.flush()
        with reopened(disk) as found:
            assert view(found) == expected, n
        let_go(store)


# --- killed ------------------------------------------------------------------------------------------------------------------
KILLED = """
import os, random, sys, threading
from sessiontree import SessionStore
store = SessionStore.open(sys.argv[1], durability=sys.argv[2])
rng = random.Random(int(sys.argv[3]))
sessions = [store.get(f"s{n}") if f"s{n}" in store.sessions() else store.create(f"s{n}", scheme="text@hf5") for n in range(2)]
sessions.append(store.fork(sessions[0], rng.choice(list(sessions[0].tree)), f"fork {sys.argv[3]}"))

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: there are two threads

def collect():
    while True:
        tell("gc", store.gc().nodes_after)

threading.Thread(target=collect, daemon=True).start()
mine = []
number = 0
while True:
    session = rng.choice(sessions)
    number += 1
    parent = rng.choice([session.root, *session.leaves()[-3:]])
    node = session.append(parent, [number, int(sys.argv[3]), rng.randrange(2**31)])
    if number % 3 == 0:
        session.set_head("main", node)
    store.flush()
    tell(session.id, node.id.hex(), "made")
    mine.append((session, node.id))
    if number % 4 == 0:
        session, node = mine.pop(rng.randrange(len(mine)))
        if not session.children(node) and session.head("main").node.id != node if "main" in session.heads else False:
            tell(session.id, node.hex(), "dropped")
            session.drop(node)
"""


def test_d26_a_process_that_is_killed_in_gc_loses_nothing_acknowledged(tmp_path: Path) -> None:
    known: set[tuple[str, str]] = set()
    gone: set[tuple[str, str]] = set()
    collected = 0
    path = tmp_path / "store"
    for loop in range(80 if SOAK else 4):
        process = in_process(KILLED, str(path), DURABILITIES[loop % 3], str(loop))
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline(), process.stderr.read()
        time.sleep(0.05 + 0.3 * random.Random(loop).random())
        process.kill()
        out, _ = process.communicate()
        for line in out.splitlines():
            if len(parts := line.rsplit(" ", 2)) == 3 and parts[2] in ("made", "dropped") and len(parts[1]) == 64:
                (known if parts[2] == "made" else gone).add((parts[0], parts[1]))
            collected += line.startswith("gc ")
        for options in ({"read_only": True}, {"durability": DURABILITIES[loop % 2]}):
            with SessionStore.open(path, **options) as store:
                for name, node_id in known - gone:
                    node = store.get(name).node(bytes.fromhex(node_id))
                    assert [each.depth for each in node.path()] == list(range(node.depth + 1))
                if "read_only" not in options:
                    expected = view(store)
                    assert store.gc().swept
                    assert view(store) == expected
        with SessionStore.open(path) as store:
            for name in store.sessions():
                assert store.get(name).tree
    assert len(known) > 20 and gone and collected > 4


# --- readers -----------------------------------------------------------------------------------------------------------------
READER = """
import json, os, sys
from sessiontree import SessionStore
from tests.disk_model import digest, seen, short
store = SessionStore.open(sys.argv[1], read_only=True)
session = store.get("s")
tree = session.tree
known = [node.id for node in tree] if len(sys.argv) > 2 else None
print("ready", flush=True)
for line in sys.stdin:
    what = line.strip()
    if what == "read":  # what it began with, all of it
        print(json.dumps([[digest(node) for node in tree], len(tree)]), flush=True)
    elif what == "refresh":
        tree = None
        session = store.get("s")
        print(json.dumps(short(seen(session))), flush=True)
    elif what == "let go":
        store.close()
        print(json.dumps(None), flush=True)
"""


class Reader:
    """Another process that reads a store, told what to do line by line."""

    def __init__(self, path: Path, code: str = READER) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def segments(path: Path, suffix: str = "seg") -> list[str]:
    return sorted(file.name for file in (path / "segments").iterdir() if file.suffix == f".{suffix}")


def soon(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["refresh", "let go", "kill", "kill, and the writer too"])
def test_d26_a_reader_of_before_goes_on_reading_until_it_looks_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "store"
    store = SessionStore.open(path)
    session = text_session(store)
    branches = comb(session, width=4, depth=20)
    session.set_head("main", branches[0][-1])
    store.flush()
    expected = [digest(node) for node in session.tree]
    reader = Reader(path)
    try:
        session.drop(branches[1][1], branches[2][5])
        for number in range(3):
            assert not store.gc(recent=1).swept
            session.append(branches[0][-1], words(900 + number))
        assert segments(path)[0] == "00000001.seg" and len(segments(path, "lease")) == 4
        assert reader.ask("read") == [expected, len(expected)]  # none of which it had read
        store.flush()
        now = seen(session)
        if how == "refresh":
            assert reader.ask("refresh") == short(now)
        elif how == "let go":
            reader.ask("let go")
        else:
            reader.end()
        if how == "kill, and the writer too":
            store.close()  # nobody is there to remove anything
            reader = Reader(path)
            assert reader.ask("refresh") == short(now)
            store = SessionStore.open(path)
            assert len(segments(path)) == 1 and reader.ask("refresh") == short(now)
        soon(lambda: "00000001.seg" not in segments(path))  # without another gc
        soon(lambda: len(segments(path, "lease")) == 1)
        assert seen(store.get("s")) == now
        assert store.gc().swept or how in ("refresh", "kill, and the writer too")
    finally:
        reader.end()
        store.close()


WRITER = """
import sys
from sessiontree import SessionStore
store = SessionStore.open(sys.argv[1])
session = store.get("s")
session.drop(*[child for child in session.children(session.root) if child.token_ids[0] % 2])
store.gc()
print("done", flush=True)
sys.stdin.read()
"""


def test_files_that_a_killed_writer_left_go_when_the_last_reader_has(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path) as store:
        session = text_session(store)
        for number in range(20):
            session.append(session.root, [number, *words(number)])
        expected = [digest(node) for node in session.tree]
    reader = Reader(path)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"done\n"
    writer.kill()
    writer.communicate()
    try:
        assert segments(path)[0] == "00000001.seg"
        with SessionStore.open(path) as store:
            assert len(store.get("s").tree) == 11
            assert segments(path)[0] == "00000001.seg"
            assert reader.ask("read") == [expected, 21]
            assert not store.gc().swept
            reader.end()
            soon(lambda: segments(path)[0] != "00000001.seg" and len(segments(path, "lease")) == 1)
        data = b"".join(file.read_bytes() for file in (path / "segments").iterdir())
        assert bytes_of(2) in data and bytes_of(3) not in data
    finally:
        reader.end()


class Watched(Disk):
    """Somebody looks before every call that changes something."""

    look: Callable[[], None] | None = None

    def _call(self, name: str) -> Any:
        look, self.look = self.look, None
        if look is not None:
            look()
            self.look = look
        return super()._call(name)


@pytest.mark.usefixtures("still")
@durabilities
def test_readers_that_open_at_any_moment_of_a_gc(durability: Durability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees all there is, and goes on seeing it, whether it looks again or not; nothing is left behind them."""
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 300)
    disk = Watched()
    store = grown(disk, durability)
    expected = view(store)
    store.flush()
    readers: list[SessionStore] = []
    trees: list[tuple[SessionTree, list[bytes]]] = []

    def look() -> None:
        reader = open_on(disk, read_only=True)
        assert view(reader) == expected
        if len(readers) % 2:
            tree = reader.get("s").tree
            trees.append((tree, [node.id for node in tree]))
        readers.append(reader)

    disk.look = look
    report = store.gc()
    disk.look = None
    assert len(readers) > 10 and not report.swept
    for number, reader in enumerate(readers):
        if number % 3 == 0:
            assert view(reader) == expected  # it looks again
    for tree, ids in trees:
        assert [node.id for node in tree] == ids
    assert not store.gc().swept
    log = log_of(store)
    for reader in readers:
        assert not log.sweep()
        assert view(reader) == expected
    assert log.sweep()
    for tree, ids in trees:  # which are read where they lie by now
        assert [digest(node) for node in tree] == expected["s"]["digests"] and len(ids) == len(tree)
    assert len([name for name in files_of(disk) if name.endswith(".lease")]) == 1
    for reader in readers:
        reader.close()
    store.close()
    assert not disk._handles


def test_a_reader_follows_over_many_gcs_and_holds_no_old_file(tmp_path: Path) -> None:
    """Also sessions that it got once and does not get again are read where they lie by now."""
    with SessionStore.open(tmp_path) as store, SessionStore.open(tmp_path, read_only=True) as reader:
        names = ["a", "b", "c"]
        for name in names:
            session = text_session(store, name)
            for number in range(30):
                session.append(session.root, words(number))
        store.flush()
        idle = reader.get("c")
        for number in range(12):
            session = store.get(names[number % 2])
            session.drop(session.leaves()[0])
            session.append(session.root, words(100 + number))
            store.gc()
            for name in names[:2]:
                assert outline(reader.get(name).tree) == outline(store.get(name).tree)
            list(reader.get(names[0]).tree)
            assert log_of(store).sweep() and len(segments(tmp_path, "lease")) == 1
            reader.sessions()
            held = [
                os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
            ]
            assert not [name for name in held if str(tmp_path) in name and "deleted" in name]
        assert len(idle.tree) == 31 and [node.id for node in idle.tree] == ids_of(store.get("c"))
        session = store.get("c")
        session.drop(*session.leaves()[:3])
        assert not store.gc().swept
        reader.sessions()
        assert not log_of(store).sweep()  # of what it got once some is gone
        assert len(list(idle.tree)) == 31
        reader.get("c")
        assert len(list(idle.tree)) == 28 and log_of(store).sweep()


def test_a_lease_does_not_outlive_who_reads(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        session = text_session(store)
        nodes = [session.append(session.root, words(number)) for number in range(50)]

        def collected() -> bool:
            session.drop(nodes.pop())
            return store.gc().swept

        store.flush()
        reader = SessionStore.open(tmp_path, read_only=True)
        found = reader.get("s")
        tree, head, first = found.tree, found.heads, list(found.tree)[3]
        assert not collected()
        reader.close()  # though all of these are held
        assert collected()
        assert first.input_ids().tolist() == words(2) and not head
        with pytest.raises(SessionTreeError):
            list(tree)
        reader = SessionStore.open(tmp_path, read_only=True)
        tree = reader.get("s").tree
        del reader, found
        gc.collect()
        assert not collected()
        assert len(list(tree)) == 48 + 1  # a tree alone reads on
        del tree
        assert store.gc().swept
        for wrong in (tmp_path / "none", tmp_path / "segments"):
            with suppress(SessionTreeError):
                SessionStore.open(wrong, read_only=True)
        assert collected()


def test_what_is_held_in_this_process_stays_readable_until_it_is_let_go() -> None:
    """Trees, walks half-way, heads that were not read yet, sessions that were closed, and only as long as they are held."""
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        comb(session, width=6, depth=4)
        session.set_head("main", session.leaves()[5])
        expected = ids_of(session)
    with open_on(disk) as store:
        holders: dict[str, Callable[[Session], Any]] = {
            "tree": lambda session: session.tree,
            "walk": lambda session: _begun(iter(session.tree)),
            "descendants": lambda session: _begun(session.descendants(session.root)),
            "depth first": lambda session: _begun(session.descendants(session.root, "depth_first")),
            "search": lambda session: _begun(session.search(lambda node: node.depth > 1)),
            "head": lambda session: session.head("main"),
            "closed": lambda session: session,
        }
        for number, (what, hold) in enumerate(holders.items()):
            session = store.get("s")
            if what == "closed":
                session.close()
            held = hold(session)
            again = store.get("s")
            doomed = next(leaf for leaf in again.leaves() if leaf != again.head("main").node)
            if what == "head":
                again.drop_head("main")
                again.set_head("main", again.leaves()[-1])
                doomed = again.leaves()[0]
            gone = {doomed.id}
            count = len(expected)
            again.drop(doomed.id)
            del doomed, session, again
            report = store.gc()
            assert not report.swept, what
            if what in ("tree", "closed"):
                tree = held if what == "tree" else held.tree
                assert [node.id for node in tree] == expected
                tree = None
            elif what == "head":
                assert held.node.path()[0].depth == 0
            elif what == "search":
                assert len(list(held)) == count - 3
            else:
                assert len(list(held)) == count - (1 if what == "walk" else 2)
            held = None
            assert log_of(store).sweep(), what
            expected = [node for node in expected if node not in gone]
            assert ids_of(store.get("s")) == expected
            assert number < 7


def _begun(walk: Iterator[Node]) -> Iterator[Node]:
    next(walk)
    return walk


def test_an_open_session_whose_fork_was_opened_later_holds_nothing_old() -> None:
    """It is read through an index of its own, older than the fork's."""
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        nodes = [session.append(session.root, words(number)) for number in range(10)]
        store.fork(session, nodes[3], "fork")
    with open_on(disk) as store:
        session = store.get("s")
        session.append(session.root, words(50))
        store.get("fork").append(store.get("fork").leaves()[0], words(51))
        for number in range(4):
            expected = view(store)
            store.fork(session, nodes[5].id, f"another {number}")
            assert store.gc().swept
            store.drop(f"another {number}")
            assert view(store) == expected


@durabilities
def test_a_forked_child_goes_on_reading_what_its_parent_removes(durability: Durability, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        session = text_session(store)
        comb(session, width=4, depth=10)
        text_session(store, "other").append(store.get("other").root, words(500))
    with SessionStore.open(tmp_path, durability=durability) as store:
        session = store.get("s")
        expected = len(session.tree)
        told, tell = os.pipe()
        done, finish = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            status = 1
            with suppress(BaseException):
                os.read(told, 1)
                assert len([digest(node) for node in session.tree]) == expected
                assert store.get("other").leaves()[0].token_ids.tolist() == words(500)  # which it had not opened
                status = 0
            os.write(finish, b"x")
            os.read(told, 1)
            os._exit(status)
        session.drop(session.leaves()[0], session.leaves()[2].parent or session.root)
        assert not store.gc().swept
        store.gc()
        assert "00000001.seg" in segments(tmp_path)
        os.write(tell, b"x")
        os.read(done, 1)
        assert "00000001.seg" in segments(tmp_path)
        os.write(tell, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for fd in (told, tell, done, finish):
            os.close(fd)
        soon(lambda: "00000001.seg" not in segments(tmp_path))


@pytest.mark.usefixtures("still")
def test_a_reader_that_comes_first_after_a_crash_has_a_lease_too() -> None:
    """The file of it is as durable as the place where the log begins."""
    rng = random.Random(8)
    disk, expected, begun = traced("group", busy=False)
    for events in range(begun, len(disk.trace) + 1, 3):
        state = disk.crash(rng, events)
        reader = open_on(state, read_only=True)
        tree = reader.get("s").tree
        with open_on(state) as store:
            session = store.get("s")
            for pin in session.pins:
                session.unpin(pin)
            session.drop_head("main")
            session.drop(*session.children(session.root))
            assert not store.gc().swept
            assert [digest(node) for node in tree] == expected["s"]["digests"]
            del tree
            assert not log_of(store).sweep()
            assert view(reader).keys() == expected.keys()
            assert log_of(store).sweep()
        reader.close()


# --- threads -----------------------------------------------------------------------------------------------------------------
class Busy:
    """Threads that do everything to one store while it is collected, and note what was acknowledged."""

    def __init__(self, store: SessionStore, seconds: float) -> None:
        self.store = store
        self.end = time.monotonic() + seconds
        self.shared = text_session(store, "shared")
        self.made: dict[tuple[str, bytes], list[int]] = {}
        self.gone: set[tuple[str, bytes]] = set()
        self.heads: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.pictured: dict[tuple[str, bytes], int] = {}
        self.dropped: set[str] = set()
        self.reports: list[GcReport] = []
        self.done = [0] * 10

    def work(self, thread: int) -> None:
        if thread == 0:
            while time.monotonic() < self.end or len(self.reports) < 3:  # however slow the machine
                self.reports.append(self.store.gc())
            return
        acts = (self.append, self.head, self.fork, self.drop, self.reopen, self.picture, self.append)
        number = 0
        while time.monotonic() < self.end:
            number += 1
            acts[thread % len(acts)](thread, number)
            self.done[thread] += 1

    def note(self, session: Session, node: Node, tokens: Sequence[int]) -> Node:
        assert node.token_ids.tolist() == list(tokens)
        self.made[session.id, node.id] = node.input_ids().tolist()
        return node

    def append(self, thread: int, number: int) -> None:
        """A chain in the session that all share."""
        parent = self.shared.root
        for part in range(5):
            tokens = [thread, number, part]
            parent = self.note(self.shared, self.shared.append(parent, tokens), tokens)
        self.note(self.shared, say(self.shared, parent, 1, number), [1, number])

    def head(self, thread: int, number: int) -> None:
        tokens = [thread, number]
        node = self.note(self.shared, self.shared.append(self.shared.root, tokens), tokens)
        name = f"head {number % 3}"
        if number % 5 == 4 and name in self.shared.heads:
            self.shared.drop_head(name)
            self.heads.pop(("shared", name))
        else:
            self.heads["shared", name] = node.id, self.shared.set_head(name, node).version

    def fork(self, thread: int, number: int) -> None:
        node = self.note(self.shared, self.shared.append(self.shared.root, [thread, number, 7]), [thread, number, 7])
        fork = self.store.fork(self.shared, node, f"fork {thread} {number}")
        self.note(fork, fork.append(node, [8, number]), [8, number])
        self.made[fork.id, node.id] = node.input_ids().tolist()
        if number % 2:
            self.gone.add(("shared", node.id))
            self.shared.drop(node)  # which the fork keeps
        if number % 3 == 0:
            self.dropped.add(fork.id)
            self.store.drop(fork.id)

    def drop(self, thread: int, number: int) -> None:
        session = self.store.get("droppers") if "droppers" in self.store.sessions() else text_session(self.store, "droppers")
        top = session.append(session.root, [thread, number])
        below = [session.append(top, [part, number]) for part in range(3)]
        kept = self.note(session, session.append(session.root, [thread, number, 1]), [thread, number, 1])
        if number % 2:
            session.pin(kept)
        session.drop(top) if number % 3 else session.drop(*below)
        for node in (top, *below) if number % 3 else below:
            self.gone.add((session.id, node.id))
        if not number % 3:
            self.note(session, top, [thread, number])

    def reopen(self, thread: int, number: int) -> None:
        name = f"own {thread} {number // 10}"
        session = self.store.get(name) if name in self.store.sessions() else text_session(self.store, name)
        leaf = session.leaves()[-1]
        self.note(session, session.append(leaf, [thread, number]), [thread, number])
        self.heads[name, "main"] = session.leaves()[-1].id, session.set_head("main", session.leaves()[-1]).version
        session.close()

    def picture(self, thread: int, number: int) -> None:
        """Features just before their node; every other node is dropped again, and its content may come once more."""
        session = (
            self.store.get("pictures")
            if "pictures" in self.store.sessions()
            else self.store.create("pictures", scheme=toy_scheme())
        )
        segment = turn(number, VS, toy.image(4, 4, thread * 100_000 + number), VE)
        item = toy.media(segment)[0]
        self.store.put_features(item, pixels(number, 10))
        node = append(session, session.root, segment)
        if number % 2:
            session.drop(node)
            self.gone.add(("pictures", node.id))
        else:
            self.note(session, node, segment.tokens)
            self.pictured["pictures", node.id] = number

    def check(self, store: SessionStore) -> None:
        """All that was acknowledged is there, and nothing that was dropped."""
        names = set(store.sessions())
        assert not names & self.dropped
        for (name, node_id), tokens in self.made.items():
            if name not in self.dropped and (name, node_id) not in self.gone:
                assert store.get(name).node(node_id).input_ids().tolist() == tokens
        for name, node_id in self.gone:
            assert node_id not in store.get(name).tree
        for (name, head), (node_id, version) in self.heads.items():
            found = store.get(name).head(head)
            assert (found.node.id, found.version) == (node_id, version)
        store._features.clear()
        for (name, node_id), number in self.pictured.items():
            features = store.get_features(store.get(name).node(node_id).media[0])
            assert features is not None and features["features"].tobytes() == pixels(number, 10).tobytes()


@durabilities
def test_threads_do_everything_while_gc_runs_in_a_loop(durability: Durability, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path, durability=durability) as store:
        busy = Busy(store, 20 if SOAK else 0.8)
        in_threads(8, busy.work)
        assert len(busy.reports) > 2 and all(busy.done[1:8]), busy.done
        busy.check(store)
        store.flush()
        shown = {name: outline(store.get(name).tree) for name in store.sessions()}
        pins = store.get("droppers").pins
        store._features.clear()
        gone = store.gc()
        assert gone.swept
        busy.check(store)
        assert {name: outline(store.get(name).tree) for name in store.sessions()} == shown
        assert len(blob_files(tmp_path)) == len(busy.pictured)
    with SessionStore.open(tmp_path, durability=durability) as store:
        busy.check(store)
        assert {name: outline(store.get(name).tree) for name in store.sessions()} == shown
        assert store.get("droppers").pins == pins
        assert store.gc().swept
        assert {name: outline(store.get(name).tree) for name in store.sessions()} == shown


def test_threads_use_a_store_in_memory_while_gc_runs_in_a_loop() -> None:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        session.set_head("main", session.root)
        end = time.monotonic() + 0.7
        kept: list[Node] = []

        def work(thread: int) -> None:
            number = 0
            while time.monotonic() < end:
                number += 1
                if thread == 0:
                    store.gc(recent=3)
                elif thread == 1:
                    text_session(store, f"s{number}").append(store.get(f"s{number}").root, [1])
                    if number % 2:
                        store.drop(f"s{number}")
                elif thread == 2:
                    with suppress(UnknownNode):
                        node = session.append(session.append(session.root, [number]), [1])
                        session.pin(node)
                        kept.append(node)
                else:
                    with suppress(UnknownNode):
                        parent = session.root
                        for part in range(4):
                            parent = session.append(parent, [thread, number, part])

        in_threads(5, work)
        tree = session.tree
        assert all(node in tree for node in kept) and kept
        nodes = list(tree)
        assert len({node.id for node in nodes}) == len(nodes) == len(tree)
        assert all(node.parent is None or node.parent in tree for node in nodes)


@pytest.mark.parametrize("what", ["append", "draft", "truncate", "rewrite", "record", "linearize", "fork", "pin", "set_head"])
@pytest.mark.parametrize("by", ["drop", "gc", "drop session"])
def test_a_drop_comes_in_at_any_place_of_another_operation(where: Where, what: str, by: str) -> None:
    """Whichever is first: nothing stands below what is gone, and memory and disk agree."""
    store = where.store
    if what == "fork" and by == "drop session" and where.kind == "memory":
        return
    for at in itertools.count(0, 1 if SOAK else 13):
        session = text_session(store, f"s{at}")
        prompt = session.append(session.root, [1, 2, 3])
        calls = session.append(prompt, [4], role="assistant", metadata={"tool_calls": ["a", "b"]})
        results = [session.append(calls, [5 + n], role="tool", metadata={"tool_call_id": name}) for n, name in enumerate("ab")]
        store.flush()
        acts: dict[str, Callable[[], object]] = {
            "append": lambda: session.append(calls, [8]),  # noqa: B023
            "draft": lambda: say(session, calls, 9),  # noqa: B023
            "truncate": lambda: session.truncate(prompt, 2),  # noqa: B023
            "rewrite": lambda: session.rewrite(calls, [(3, 4, [7, 7])]),  # noqa: B023
            "record": lambda: session.record([1, 2, 3, 4], [6], key="r"),  # noqa: B023
            "linearize": lambda: session.linearize(results),  # noqa: B023
            "fork": lambda: store.fork(session, results[0], f"fork {session.id}"),  # noqa: B023
            "pin": lambda: session.pin(results[1]),  # noqa: B023
            "set_head": lambda: session.set_head("main", results[1]),  # noqa: B023
        }

        def come_in() -> None:
            with suppress(NodeHeld, StaleSession, Unsupported):  # that it is held, or that its thread is writing
                if by == "drop":
                    session.drop(prompt)  # noqa: B023
                elif by == "gc":
                    store.gc(recent=0)
                else:
                    store.drop(session.id)  # noqa: B023

        with suppress(UnknownNode, StaleSession, UnknownSession), coming_in(at, come_in) as ran:
            acts[what]()
        if not ran:
            break
        for name in store.sessions():
            tree = store.get(name).tree
            nodes = list(tree)
            assert len(tree) == len(nodes)
            assert all(node.parent is None or node.parent in tree for node in nodes), (at, name)
        if where.kind != "memory":
            store.flush()
            expected = view(store)
            with reopened(where.disk) as found:
                assert view(found) == expected, at
        for name in store.sessions():
            found_session = store.get(name)
            for pin in found_session.pins:
                found_session.unpin(pin)
            store.drop(name)
        if at % 8 == 0:
            store.gc()
    assert at > 10


def test_a_store_that_is_closed_ends_its_gc(tmp_path: Path) -> None:
    for way in ("thread", "progress"):
        store = SessionStore.open(tmp_path / way)
        session = text_session(store)
        for number in range(40):
            session.append(session.root, range(number * 10_000, number * 10_000 + 10_000))
        store.flush()
        expected = seen(session)
        told: list[int] = []

        def progress(done: int, total: int, way: str = way, store: SessionStore = store, told: list[int] = told) -> None:
            told.append(done)
            if way == "progress":
                store.close()
            else:
                time.sleep(0.05)

        def work(thread: int, store: SessionStore = store, told: list[int] = told) -> None:
            if thread:
                soon(lambda: told)
                store.close()
                return
            with pytest.raises(StoreClosed), pytest.MonkeyPatch.context() as patch:
                patch.setattr(compaction, "_BATCH_BYTES", 50_000)
                store.gc(progress=progress)

        in_threads(2 if way == "thread" else 1, work)
        with SessionStore.open(tmp_path / way) as store:
            assert store.recovered_bytes == 0 and seen(store.get("s")) == expected
            assert store.gc().swept and seen(store.get("s")) == expected


def test_features_that_are_put_again_in_the_middle_of_a_gc_stay(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        session = store.create("s", scheme=toy_scheme())
        nodes = [append(session, session.root, turn(number, VS, toy.image(4, 4, number), VE)) for number in range(3)]
        for number, node in enumerate(nodes):
            store.put_features(node.media[0], pixels(number))
        session.drop(nodes[0], nodes[1])

        def progress(*_: int) -> None:
            store.put_features(nodes[0].media[0], pixels(0))  # for a node that comes later
            append(session, session.root, turn(7, VS, toy.image(4, 4, 1), VE))  # and this one has what is there

        store.gc(progress=progress)
        store._features.clear()
        assert len(blob_files(tmp_path)) == 3
        append(session, session.root, turn(8, VS, toy.image(4, 4, 0), VE))
        assert store.gc().features_removed == 0
        for number, node in enumerate(nodes):
            features = store.get_features(node.media[0])
            assert features is not None and features["features"].tobytes() == pixels(number).tobytes()


def test_sessions_are_written_to_while_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile lies before what is copied: places are not in the order of nodes, of sessions or of heads."""
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 200)
    disk = Disk()
    store = open_on(disk, segment_bytes=2000)
    for name in "abc":
        session = text_session(store, name)
        comb(session, width=2, depth=3)
        for head in "xyz":
            session.set_head(head, session.leaves()[0])
    store.alias_media("cat", bytes(32))
    copy = segment_log.SegmentLog.copy
    made = 0

    def meanwhile(log: Any, records: Any) -> None:
        nonlocal made
        made += 1
        session = store.get("abc"[made % 3])
        session.append(session.root, words(1000 + made))
        session.set_head("xyz"[made % 3], session.leaves()[-1])
        if made % 5 == 0:
            session.drop_head("xyz"[made % 3])
        if made == 3:
            text_session(store, "new")
            store.drop_alias("cat")
            store.alias_media("cat", bytes([1] * 32))
        store.flush()
        copy(log, records)

    monkeypatch.setattr(segment_log.SegmentLog, "copy", meanwhile)
    for _ in range(4):
        store.gc()
        session = store.get("a")
        session.append(session.root, words(5000 + made))
        expected = view(store)
        assert store.sessions() == ("a", "b", "c", "new")
        store.flush()
        with reopened(disk) as found:
            assert view(found) == expected
    assert made > 20
    store.close()
    with open_on(disk) as found:
        assert view(found) == expected


def test_ordinals_that_come_again_are_no_other_node_to_who_held_the_first(tmp_path: Path) -> None:
    """After gc and opening, what is appended takes the place of what was dropped last. Who reads on sees what was there."""
    with SessionStore.open(tmp_path) as store:
        session = text_session(store)
        for number in range(4):
            last = session.append(session.root, words(number))
        text_session(store, "other").append(store.get("other").root, words(9))
        store.flush()
        reader = SessionStore.open(tmp_path, read_only=True)
        tree = reader.get("s").tree
        expected = ids_of(reader.get("s"))
        reader.get("s").close()
        session.drop(last)
        store.gc()
    with SessionStore.open(tmp_path) as store:
        again = store.get("s").append(store.get("s").root, words(50))
        store.flush()
        for _ in range(2):
            reader.sessions()
            reader.get("other")
            assert [node.id for node in tree] == expected and again not in tree
            assert ids_of(reader.get("s")) == [*expected[:-1], again.id]
            store.gc()
        assert again.id in reader.get("s").tree and len(store.get("s").tree) == 5
    with SessionStore.open(tmp_path) as store:
        assert ids_of(store.get("s")) == [*expected[:-1], again.id]
    reader.close()


@pytest.mark.usefixtures("still")
@durabilities
def test_sidecars_know_where_all_is_after_a_gc(durability: Durability, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a segment that was begun before it, and when they are missing or older."""
    monkeypatch.setattr(segment_log, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 300)
    disk = Disk()
    store = grown(disk, durability)
    log = log_of(store)

    def busy(*_: int) -> None:
        session = store.get("lost")
        for _time in range(3):
            session.append(session.root, words(1000 + len(session.tree)))
        store.flush()
        log._tend()

    for number in range(3):
        busy()
        store.gc(progress=busy)
        busy()
        session = store.get("lost")
        session.drop(*session.leaves()[:2])
        expected = view(store)
        store.flush()
        for state in (disk.copy(), disk.copy()):
            with open_on(state, durability=durability) as found:
                assert view(found) == expected, number
            for name in [name for name in state.names if name.endswith(".idx")]:
                state.unlink(name)
    store.close()
    kept = disk.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan.Scan, "_record", lambda *_: pytest.fail("a record was read"))
        with open_on(disk, durability=durability) as found:
            assert view(found) == expected
    with open_on(kept, strict=False) as found:  # which looks at every frame
        assert view(found) == expected and not found.damaged


def test_threads_of_a_reader_while_it_follows_over_gcs(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        names = ["a", "b", "c"]
        kept: dict[str, list[bytes]] = {}
        for name in names:
            session = text_session(store, name)
            comb(session, width=3, depth=10)
            session.set_head("main", session.leaves()[0])
            kept[name] = [node.id for node in session.leaves()[0].path()]
        store.flush()
        end = time.monotonic() + (10 if SOAK else 0.8)
        with SessionStore.open(tmp_path, read_only=True) as reader:
            looks = [0] * 5

            def work(thread: int) -> None:
                rng = random.Random(thread)
                held: list[tuple[SessionTree, int]] = []
                while time.monotonic() < end:
                    name = rng.choice(names)
                    looks[thread] += 1
                    if thread == 0:
                        session = store.get(name)
                        session.drop(session.append(session.root, [rng.randrange(2**31)]))
                        session.append(session.head("main").node.path()[3], [rng.randrange(2**31)])
                        if rng.random() < 0.5:
                            session.drop(*[node for node in session.leaves() if node != session.head("main").node][:2])
                        store.gc()
                        continue
                    assert sorted(reader.sessions()) == names
                    session = reader.get(name)
                    tree = session.tree
                    held = [*held[-3:], (tree, len(tree))]
                    old, count = rng.choice(held)
                    assert len(list(old)) == len(old) == count
                    path = [node.id for node in tree.head("main").node.path()]
                    assert path == kept[name]

            in_threads(5, work)
            assert min(looks) > 3, looks
            assert {name: outline(reader.get(name).tree) for name in names} == {
                name: outline(store.get(name).tree) for name in names
            }


@pytest.mark.parametrize("seed", range(3))
def test_fsck_finds_nothing_in_what_gc_left(seed: int, tmp_path: Path) -> None:
    """Nor does it find anything that nothing leads to."""
    with SessionStore.open(tmp_path / "store", durability=DURABILITIES[seed]) as store:
        rng = random.Random(seed)
        session = text_session(store)
        for number in range(60):
            node = session.append(rng.choice(list(session.tree)), words(number))
            if rng.random() < 0.1:
                store.fork(session, node, f"fork {number}").append(node, words(100 + number))
            if rng.random() < 0.1:
                session.set_head(rng.choice("ab"), node)
            if rng.random() < 0.1:
                with suppress(NodeHeld, Unsupported):
                    session.drop(rng.choice(list(session.tree)))
            if rng.random() < 0.05 and (names := [name for name in store.sessions() if name != "s"]):
                store.drop(rng.choice(names))
            if number % 20 == 19:
                assert store.gc().swept
                store.flush()
                report = fsck(tmp_path / "store")
                assert report.ok and not report.dangling and not report.wrong_ordinals and not report.unreachable
        expected = view(store)
    salvage(tmp_path / "store", tmp_path / "new")
    with SessionStore.open(tmp_path / "new") as store:
        assert view(store) == expected


def test_gc_of_what_is_damaged_writes_nothing_and_names_it(tmp_path: Path) -> None:
    """However often it is tried: nodes, heads, sessions and pins that are to stay; what is to go may be damaged."""
    path = tmp_path / "s"
    with SessionStore.open(path, durability="commit") as store:
        session = store.create("chat", scheme="text@hf5")
        node = session.append(session.root, [1] * 40)
        gone = session.append(node, [2] * 40)
        session.set_head("main", node)
        session.pin(node)
        session.drop(gone)
    [segment] = (path / "segments").glob("*.seg")
    whole = segment.read_bytes()
    with SessionStore.open(path, read_only=True) as store:
        assert store._journal is not None
        rows = {(int(row["kind"]), int(row["ordinal"])): int(row["offset"]) for row in store._journal.columns().entries}
    before = {file.name: file.read_bytes() for file in path.rglob("*.seg")}
    for place, offset in rows.items():
        segment.write_bytes(whole[: offset + 50] + bytes([whole[offset + 50] ^ 1]) + whole[offset + 51 :])
        broken = {**before, segment.name: segment.read_bytes()}
        if place in ((codec.NODE, 2), (codec.OPENED, 0)):
            continue
        for _ in range(2):
            with SessionStore.open(path) as store, pytest.raises(CorruptTree) as raised:
                store.gc()
            assert {file.name: file.read_bytes() for file in path.rglob("*.seg")} == broken, place
        if place == (codec.NODE, 1):
            assert f"node 1 ({node.id[:4].hex()}) of session 'chat' is damaged" in str(raised.value)
    offset = rows[codec.NODE, 2]
    segment.write_bytes(whole[: offset + 50] + bytes([whole[offset + 50] ^ 1]) + whole[offset + 51 :])
    with SessionStore.open(path) as store:
        assert store.gc().nodes_after == 1
