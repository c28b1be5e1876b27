"""Stores that share a backend: what one writes the other sees, and what both write at once is in the tree in some order, whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import sqlite_backend

from sessiontree import (
    CorruptTree,
    HeadMoved,
    IncompatibleStore,
    KeyTaken,
    MediaItem,
    Namespace,
    Node,
    NodeHeld,
    Session,
    SessionExists,
    SessionStore,
    StaleSession,
    UnknownNode,
    UnknownSession,
    Unsupported,
)
from sessiontree.aio import AsyncStore
from sessiontree.backends.shared import Backend, Change, Look, NewNode, NodeRow
from sessiontree.backends.shared_log import Known, RecordCache
from sessiontree.shared_journal import SharedJournal

SCHEME = "text@hf5"


class Counted:
    """The sessions of a backend, and how often each method was called."""

    def __init__(self, backend: Backend) -> None:
        self.inner = backend.sessions
        self.commits: list[Sequence[Change]] = []
        self.looks: list[Look | None] = []
        self.hold: threading.Event | None = None
        self.first: Callable[[], object] | None = None  # done once, before the next commit
        self.then: Callable[[], object] | None = None  # done once, after the next look

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        if self.hold is not None:
            self.hold.wait()
        first, self.first = self.first, None
        if first is not None:
            first()
        self.commits.append(changes)
        return self.inner.commit(changes)

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        look = self.inner.look(number, since)
        self.looks.append(look)
        then, self.then = self.then, None
        if then is not None:
            then()
        return look

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CountedNodes:
    def __init__(self, backend: Backend) -> None:
        self.inner = backend.nodes
        self.reads: list[Sequence[int]] = []

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
        self.reads.append(ordinals)
        return self.inner.read(session, ordinals, fresh=fresh)


class Place:
    """A file of a database, and stores on it, each as another process has it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack

    def backend(self, tenant: str | None = None) -> Backend:
        backend = sqlite_backend.connect(str(self.path), tenant)
        return backend._replace(sessions=Counted(backend), nodes=CountedNodes(backend))

    def store(self, **options: Any) -> SessionStore:
        backend = self.backend(options.get("tenant"))
        return self._stack.enter_context(SessionStore.connect(backend, **options))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path / "db", stack)


def sessions_of(store: SessionStore) -> Counted:
    counted = store._journal.backend.sessions.inner  # type: ignore[union-attr]
    assert isinstance(counted, Counted)
    return counted


def reads_of(store: SessionStore) -> list[Sequence[int]]:
    counted = store._journal.backend.nodes.inner  # type: ignore[union-attr]
    assert isinstance(counted, CountedNodes)
    return counted.reads


def shown(session: Session) -> list[tuple[int, ...]]:
    """Every node of a session by its path's tokens, in commit order."""
    return [tuple(node.input_ids(0, node.stop).tolist()) for node in session.descendants(session.root)]


def test_what_one_writes_the_other_sees_when_it_looks(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME, max_tokens=100)
    node = here.append(here.root, [1, 2, 3], metadata={"a": 1})
    here.set_head("main", node)
    there = two.get("s")
    assert there.head("main").node == node and there.head("main").version == 1 and there.max_tokens == 100
    more = there.append(there.head("main").node, [4], role="tool")
    assert more.id not in here.tree
    assert here.children(node) == ()
    here.refresh()
    assert here.children(node) == (more,)
    assert one.get("s") is here
    assert here.incarnation != there.incarnation


def test_a_look_that_brings_nothing_leaves_the_tree_and_its_nodes_as_they_are(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    node = here.append(here.root, [1, 2, 3])
    tree = here._tree
    here.refresh()
    assert one.get("s")._tree is tree
    two.get("s").append(node.id, [4])
    here.refresh()
    assert here._tree is not tree
    assert here.node(node.id) is node, "who holds a node has the one there is"
    assert reads_of(one) == []
    assert shown(here) == [(1, 2, 3), (1, 2, 3, 4)]
    assert reads_of(one) == [[2]], "and only what others wrote is read"


def test_an_append_behind_anything_succeeds_and_a_stale_head_does_not_move(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    first = here.append(here.root, [1])
    head = here.set_head("main", first)
    there = two.get("s")
    theirs = there.append(first.id, [2])
    moved = there.set_head("main", theirs, expected=there.head("main"))
    mine = here.append(first, [3])
    with pytest.raises(HeadMoved) as caught:
        here.set_head("main", mine, expected=head)
    assert caught.value.actual == moved
    assert here.head("main") == moved, "and what there is is known by then"
    assert here.set_head("main", mine, expected=caught.value.actual).version == 3
    assert shown(here) == [(1,), (1, 2), (1, 3)]
    there.refresh()
    assert shown(there) == shown(here)


def test_a_head_that_moves_with_a_turn_is_there_for_all(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    first = here.append(here.root, [1], head="main")
    second = here.append(first, [2], head="main", expected=first)
    there = two.get("s")
    found = there.head("main")
    assert (found.node.id, found.version) == (second.id, here.head("main").version) == (second.id, 2)
    with pytest.raises(HeadMoved):
        here.append(second, [3], head="main", expected=first)
    there.append(second.id, [4], head="main", expected=found)
    with pytest.raises(HeadMoved):
        here.append(second, [5], head="main", expected=second)
    assert shown(here) == [(1,), (1, 2), (1, 2, 4)]


def test_threads_and_stores_write_to_one_session_at_once(place: Place) -> None:
    stores = [place.store(), place.store()]
    stores[0].create("s", scheme=SCHEME)
    tips: dict[int, Node] = {}

    def write(number: int) -> None:
        session = stores[number % 2].get("s")
        node = session.root
        for turn in range(30):
            node = session.append(node, [number, turn])
            session.append(session.root, [99, turn])  # everybody's
        tips[number] = node

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trees = []
    for store in stores:
        session = store.get("s")
        trees.append([node.id for node in session.descendants(session.root)])
        for number, tip in tips.items():
            assert session.node(tip.id).input_ids(0, 60).tolist() == [each for turn in range(30) for each in (number, turn)]
    assert trees[0] == trees[1] and len(trees[0]) == len(set(trees[0])) == 6 * 30 + 30


def test_those_who_wait_together_are_written_together(place: Place) -> None:
    store = place.store()
    sessions = [store.create(f"s{number}", scheme=SCHEME) for number in range(8)]
    counted = sessions_of(store)
    counted.hold = threading.Event()
    threads = [
        threading.Thread(target=session.append, args=(session.root, [number, turn]))
        for number, session in enumerate(sessions)
        for turn in range(4)
    ]
    for thread in threads:
        thread.start()
    journal = store._journal
    assert journal is not None
    while journal.lag[0] < len(threads):
        pass
    counted.hold.set()
    for thread in threads:
        thread.join()
    assert [len(session.children(session.root)) for session in sessions] == [4] * 8
    assert len(counted.commits) == 2, "the first wrote what was there by then, the next all the others"
    assert sum(len(change.nodes) for changes in counted.commits for change in changes) == 32


def test_nobody_sees_what_is_not_written_yet(place: Place) -> None:
    store = place.store()
    session = store.create("s", scheme=SCHEME)
    counted = sessions_of(store)
    counted.hold = threading.Event()
    thread = threading.Thread(target=session.append, args=(session.root, [1]))
    thread.start()
    while not store._journal.lag[0]:  # type: ignore[union-attr]
        pass
    assert len(session.tree) == 1
    counted.hold.set()
    thread.join()
    assert len(session.tree) == 2


def test_a_path_is_read_in_one_call(place: Place) -> None:
    one = place.store()
    session = one.create("s", scheme=SCHEME)
    node = session.root
    for turn in range(300):
        node = session.append(node, [turn, turn])
        session.append(node, [7])  # beside the path
    two = place.store()
    there = two.get("s")
    assert len(sessions_of(two).looks) == 1
    assert there.node(node.id).input_ids(0, 600).tolist() == [each for turn in range(300) for each in (turn, turn)]
    (read,) = reads_of(two)
    assert len(read) == 300
    there.node(node.id)
    two.evict()
    del there
    assert two.get("s").node(node.id).stop == 600
    assert len(reads_of(two)) == 2, "what was let go of is read again"


def test_a_fork_shares_what_it_does_not_add_and_outlives_what_it_came_from(place: Place) -> None:
    one, two = place.store(), place.store()
    session = one.create("a", scheme=SCHEME)
    first = session.append(session.root, [1])
    second = session.append(first, [2])
    fork = two.fork(two.get("a"), second.id, "b")
    own = fork.append(second.id, [3])
    deeper = two.fork(fork, first.id, "c")  # its tip is a node of the first session
    deepest = two.fork(fork, own, "d")
    grown = deepest.append(own, [4])
    assert [tip for _, *tip in two._journal.backend.sessions.tips()] == [[1, 2], [1, 1], [fork._number, 3]]  # type: ignore[union-attr]
    one.drop("a")
    two.drop("b")
    with pytest.raises(UnknownSession):
        one.get("b")
    report = one.gc()
    assert (report.nodes_before, report.nodes_after) == (4, 4), "the paths of forks that are left"
    assert one.get("d").node(grown.id).input_ids(0, 4).tolist() == [1, 2, 3, 4]
    assert shown(one.get("c")) == [(1,)]
    two.drop("d")
    assert one.gc().nodes_after == 1
    one.drop("c")
    assert one.gc().nodes_after == 0
    assert one._journal.backend.sessions.all() == []  # type: ignore[union-attr]
    assert deeper.closed or deeper.tree is not None


def test_a_session_that_is_dropped_elsewhere_is_closed_at_the_next_write(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    node = here.append(here.root, [1])
    two.get("s")
    two.drop("s")
    with pytest.raises(StaleSession):
        here.append(node, [2])
    assert here.closed and node.input_ids(0, 1).tolist() == [1]
    with pytest.raises(UnknownSession):
        one.get("s")
    again = one.create("s", scheme=SCHEME)
    assert len(again.tree) == 1
    third = two.create("other", scheme=SCHEME)
    one.get("other")
    two.drop("other")
    assert one.create("other", scheme=SCHEME).incarnation != third.incarnation, "though it was open here"


def test_what_is_dropped_elsewhere_is_not_gone_on_from(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    node = here.append(here.root, [1])
    child = here.append(node, [2])
    kept = here.append(here.root, [9])
    there = two.get("s")
    events = one.subscribe(kinds=["nodes_dropped", "node_committed"])
    there.drop(node)
    with pytest.raises(UnknownNode):
        here.append(child, [3])
    with pytest.raises(UnknownNode):
        one.fork(here, node.id, "f")
    assert [(event.kind, event.node_id) for event in events.poll()] == [("nodes_dropped", node.id)]
    assert shown(here) == [(9,)]
    assert two.gc().nodes_after == 1
    more = here.append(kept, [4])
    there.refresh()
    assert shown(there) == [(9,), (9, 4)] and there.node(more.id) == more
    assert child.input_ids(0, 2).tolist() == [1, 2]


def test_a_fork_of_what_is_dropped_at_the_same_time_fails(place: Place) -> None:
    one, two = place.store(), place.store()
    here = one.create("s", scheme=SCHEME)
    node = here.append(here.root, [1])
    two.get("s").drop(node)
    with pytest.raises(UnknownNode):  # refused, looked at again, and then it is not there
        one.fork(here, node, "f")
    assert two.sessions() == ("s",)


def test_a_session_is_forked_whatever_was_dropped_beside_its_path(place: Place) -> None:
    one, two = place.store(), place.store()
    session = one.create("a", scheme=SCHEME)
    node, other = session.append(session.root, [1]), session.append(session.root, [2])
    fork = two.fork(two.get("a"), node.id, "f")
    session.drop(other)  # of which the other knows nothing yet
    assert shown(two.fork(fork, fork.node(node.id), "g")) == [(1,)]


def test_others_come_first_once_more_where_something_is_dropped(place: Place) -> None:
    one, two = place.store(), place.store()
    here, there = one.create("s", scheme=SCHEME), two.get("s")
    node = here.append(here.root, [1])
    there.refresh()
    sessions_of(one).first = lambda: there.append(node.id, [2])
    here.drop(node)
    assert shown(here) == []
    kept = here.append(here.root, [3])
    there.refresh()
    sessions_of(one).first = lambda: there.append(kept.id, [4])
    here.pin(kept)
    assert here.pins == {kept.id} and shown(here) == [(3,), (3, 4)]
    here.unpin(kept)
    there.refresh()
    sessions_of(one).first = lambda: there.append(kept.id, [5])
    one.drop("s")
    assert two.sessions() == () and len(sessions_of(one).commits) > 6


def test_what_is_under_way_is_there_for_who_opens_the_session_again(place: Place) -> None:
    store = place.store()
    session = store.create("s", scheme=SCHEME)
    counted = sessions_of(store)
    counted.hold = threading.Event()
    made: list[Node] = []
    opened: list[Session] = []
    writer = threading.Thread(target=lambda: made.append(session.append(session.root, [1])))
    writer.start()
    while not store._journal.lag[0]:  # type: ignore[union-attr]
        pass
    session.close()
    reader = threading.Thread(target=lambda: opened.append(store.get("s")))
    reader.start()
    counted.hold.set()
    writer.join()
    reader.join()
    assert opened[0].node(made[0].id) == made[0] and opened[0].append(made[0], [2]).stop == 2


def test_two_looks_at_once_bring_each_node_once(place: Place) -> None:
    one, two = place.store(), place.store()
    session, there = one.create("s", scheme=SCHEME), two.get("s")
    node = session.append(session.root, [1])
    journal = two._journal
    assert isinstance(journal, SharedJournal) and there._number is not None

    def beside() -> None:
        session.append(node, [2])
        journal.shared.look(there._number or 0)

    sessions_of(two).then = beside
    there.refresh()
    assert shown(there) == [(1,), (1, 2)]
    assert journal.shared.known(there._number).snapshot().entries["ordinal"].tolist()[:2] == [1, 2]
    assert len(journal.columns(there._number).places_of_nodes()) == 2


def test_an_ordinal_that_was_another_nodes_is_the_new_nodes(place: Place) -> None:
    one, two = place.store(), place.store()
    here, there = one.create("s", scheme=SCHEME), two.get("s")
    here.append(here.root, [1])
    old = here.append(here.root, [2])
    there.refresh()
    held = there.node(old.id)  # so it is in the cache too
    here.drop(old)
    one.gc()
    one.close()
    with place.store() as three:
        again = three.get("s")
        new = again.append(again.root, [3, 3])
    there.refresh()
    assert there._tree._index.find_ordinal(there.node(new.id), there._tree._count) == 2
    assert there.node(new.id).input_ids(0, 2).tolist() == [3, 3] and shown(there) == [(1,), (3, 3)]
    assert held.input_ids(0, 1).tolist() == [2]
    assert there.append(held.parent or there.root, [4]).id in there.tree


def test_who_has_dropped_something_forks_what_is_left(place: Place) -> None:
    one, two = place.store(), place.store()
    session = one.create("s", scheme=SCHEME)
    kept, gone = session.append(session.root, [1]), session.append(session.root, [2])
    session.drop(gone)
    assert shown(one.fork(session, kept, "f")) == [(1,)]
    session.append(kept, [3])
    session.drop(session.append(kept, [4]))
    assert shown(two.fork(two.get("s"), kept.id, "g")) == [(1,)]
    session.close()
    one.gc(recent=0)
    assert shown(one.fork(one.get("s"), one.get("s").root, "h")) == []


def test_what_a_look_has_brought_is_not_known_twice() -> None:
    known = Known(1)
    row = NodeRow(1, 0, bytes(32), 0)
    known.take(Look(b"", 0, 0, 0, False, True, [], {}))
    change = Change(1, 0, 1, [NewNode(row, b"record")])
    known.take(Look(b"", 2, 0, 0, False, False, [row, NodeRow(2, 1, bytes(32), 0)], {}))
    known.fold(change)
    assert known.since == (2, 0, 2)
    known.fold(Change(1, 2, 3, [NewNode(NodeRow(3, 2, bytes(32), 0), b"record")]))
    assert known.since == (3, 0, 3)
    assert known._more == [row, NodeRow(2, 1, bytes(32), 0), NodeRow(3, 2, bytes(32), 0)]


def test_openings_have_numbers_of_their_own_and_draw_few(place: Place) -> None:
    one, two = place.store(), place.store()
    one.create("s", scheme=SCHEME)
    seen = [store.get("s").incarnation for store in (one, two)]
    for _ in range(100):
        for store in (one, two):
            store.get("s").close()
            seen.append(store.get("s").incarnation)
    assert len(set(seen)) == 202
    (number,) = place.backend().sessions.draw(1)
    assert number < 100


def test_a_pin_elsewhere_holds(place: Place) -> None:
    one, two = place.store(), place.store()
    here, there = one.create("s", scheme=SCHEME), two.get("s")
    node = here.append(here.root, [1])
    there.refresh()
    there.pin(node.id)
    with pytest.raises(NodeHeld):
        here.drop(node)
    with pytest.raises(NodeHeld):
        one.drop("s")
    there.unpin(node.id)
    here.drop(node)
    assert there.pins == frozenset()


def test_forks_of_forks_that_are_all_gone_go_at_once(place: Place) -> None:
    store = place.store()
    session = store.create("0", scheme=SCHEME)
    for number in range(1, 7):
        session = store.fork(session, session.append(session.leaves()[-1], [number]), str(number))
        session.append(session.leaves()[-1], [100 + number])
    for session_id in store.sessions():
        store.drop(session_id)
    assert store.gc().nodes_after == 0
    assert place.backend().sessions.all() == []


def test_gc_leaves_rows_of_what_can_be_reached_alone(place: Place) -> None:
    one, two = place.store(), place.store()
    session = one.create("s", scheme=SCHEME)
    for turn in range(20):
        session.set_head(f"head {turn % 3}", session.append(session.root, [turn]))
    session.set_head("gone", session.root)
    session.drop_head("gone")
    session.pin(session.children(session.root)[0])
    session.unpin(session.children(session.root)[0])
    two.get("s")
    report = two.gc(recent=0)
    assert (report.nodes_before, report.nodes_after) == (20, 3)
    session.refresh()
    assert sorted(shown(session)) == [(17,), (18,), (19,)]
    look = two._journal.backend.sessions.look(session._number)  # type: ignore[union-attr]
    assert look is not None
    assert len(look.nodes) == 3 and len(look.refs) == 4, "three heads, and the last word on versions"
    assert session.set_head("gone", session.root).version > 22
    assert two.gc().nodes_after == 3


def test_aliases_of_two_processes_name_one_thing(place: Place) -> None:
    one, two = place.store(), place.store()
    this, that = (MediaItem("image", bytes([number]) * 32, ((0, 1),)) for number in (1, 2))
    one.alias_media("cat", this)
    assert two.aliased_media("cat") == this.identity
    with pytest.raises(KeyTaken):
        two.alias_media("cat", that)
    two.drop_alias("cat")
    one.alias_media("cat", that)
    assert two.aliased_media("cat") == that.identity
    assert two._journal is not None
    assert two._journal.alias(Namespace(), "cat", this.identity) == that.identity, "who was first is asked, in the same step"
    assert one.aliased_media("cat") == that.identity


def test_an_alias_belongs_to_the_tenant_of_its_namespace(place: Place) -> None:
    everybody, red = place.store(), place.store(tenant="red")
    item, other = (MediaItem("image", bytes([number]) * 32, ((0, 1),)) for number in (1, 2))
    everybody.alias_media("cat", item, "red")
    assert red.aliased_media("cat", "red") == item.identity
    with pytest.raises(IncompatibleStore):
        red.alias_media("cat", other, "blue")
    with pytest.raises(KeyTaken):
        red.alias_media("cat", other, "red")


def test_features_are_found_by_others(place: Place) -> None:
    one, two = place.store(), place.store()
    item = MediaItem("image", b"i" * 32, ((0, 2),))
    one.put_features(item, {"pixels": np.arange(12.0)})
    found = two.get_features(item)
    assert found is not None and np.array_equal(np.asarray(found["pixels"]), np.arange(12.0))


def test_a_store_of_a_tenant_makes_no_session_of_another(place: Place) -> None:
    store = place.store(tenant="acme")
    assert store.create("s", scheme=SCHEME, namespace="acme").namespace.tenant == "acme"
    with pytest.raises(IncompatibleStore):
        store.create("t", scheme=SCHEME, namespace="other")
    with pytest.raises(SessionExists):
        store.create("s", scheme=SCHEME, namespace="acme")


def test_a_store_that_only_reads_writes_nothing(place: Place) -> None:
    one = place.store()
    session = one.create("s", scheme=SCHEME)
    node = session.append(session.root, [1])
    two = place.store(read_only=True)
    there = two.get("s")
    assert shown(there) == [(1,)]
    for write in (lambda: there.append(node.id, [2]), lambda: there.pin(node.id), two.gc, lambda: two.create("t", scheme=SCHEME)):
        with pytest.raises(Unsupported):
            write()
    session.append(node, [3])
    there.refresh()
    assert shown(there) == [(1,), (1, 3)]


def test_a_record_that_is_not_what_was_written_is_told_of(place: Place) -> None:
    one = place.store()
    session = one.create("s", scheme=SCHEME)
    node = session.append(session.root, [1, 2, 3])
    backend = place.backend()
    (record,) = backend.nodes.read(1, [1])
    assert record is not None
    flipped = record[:-30] + bytes([record[-30] ^ 1]) + record[-29:]

    class Damaged:
        def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
            return [flipped for _ in ordinals]

    with SessionStore.connect(backend._replace(nodes=Damaged())) as two, pytest.raises(CorruptTree):
        two.get("s").node(node.id)


def test_a_copy_that_lags_gives_no_node_for_another(place: Place) -> None:
    one = place.store()
    session = one.create("s", scheme=SCHEME)
    session.append(session.root, [1])
    gone = session.append(session.root, [2, 2, 2])
    backend = place.backend()
    old = {ordinal: record for ordinal, record in zip((1, 2), backend.nodes.read(1, [1, 2]), strict=True)}
    session.drop(gone)
    one.gc()
    again = place.store().get("s")  # which knows of no second node
    new = again.append(again.root, [3, 3, 3])
    assert list(backend.nodes.read(1, [2])) != [old[2]]

    class Lagging:
        def read(self, number: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
            return backend.nodes.read(number, ordinals) if fresh else [old.get(ordinal) for ordinal in ordinals]

    with SessionStore.connect(backend._replace(nodes=Lagging())) as two:
        there = two.get("s")
        assert there.longest_prefix([3, 3, 3]).node == new
        assert shown(there) == [(1,), (3, 3, 3)]


def test_any_bit_of_a_path_that_flips_is_damage_that_names_its_node(place: Place) -> None:
    one, backend = place.store(), place.backend()
    session, metadata = one.create("s", scheme=SCHEME), {"text": "a" * 40}
    node = session.root
    for turn in range(4):
        node = session.append(node, [turn], metadata=metadata)
    session.set_head("main", node)

    @attrs.frozen
    class Flipping:
        backend: Backend
        at: int

        def read(self, number: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
            records = [bytearray(record or b"") for record in self.backend.nodes.read(number, ordinals)]
            for record in records[1:2]:
                record[self.at] ^= 1
            return list(map(bytes, records))

    (record,) = backend.nodes.read(1, [2])
    assert record is not None and b"aaaa" in record
    for at in (record.index(b"aaaa"), len(record) - 1):
        other = place.backend()
        with SessionStore.connect(other._replace(nodes=Flipping(other, at))) as two:
            with pytest.raises(CorruptTree, match=r"^the record of node 2 of session 1 does not match"):
                _ = two.get("s").head("main").node
            assert two.get("s").node(session.node(node.path()[1].id).id).input_ids().tolist() == [0]


def test_a_node_that_was_removed_elsewhere_is_no_damage(place: Place) -> None:
    one, two = place.store(), place.store()
    session = one.create("s", scheme=SCHEME)
    nodes = [session.append(session.root, [turn]) for turn in range(3)]
    there = two.get("s")
    tree = there.tree
    session.drop(*nodes)
    one.gc()
    session.append(session.root, [7])
    with pytest.raises(UnknownNode):
        tree.node(nodes[0].id)
    there.refresh()
    assert shown(there) == [(7,)]


def test_events_tell_what_others_wrote_once(place: Place) -> None:
    one, two = place.store(), place.store()
    here, there = one.create("s", scheme=SCHEME), two.get("s")
    events = one.subscribe(kinds=["node_committed", "head_moved"])
    mine = here.append(here.root, [1])
    theirs = there.append(there.root, [2])
    there.set_head("main", theirs)
    again = here.append(mine, [3])  # comes upon what they wrote
    here.refresh()
    told = [(event.kind, event.node_id) for event in events.poll()]
    assert sorted(told) == sorted(
        [("node_committed", mine.id), ("node_committed", theirs.id), ("head_moved", theirs.id), ("node_committed", again.id)]
    )


def test_the_asyncio_front_does_what_was_refused_anew(place: Place) -> None:
    async def run() -> None:
        store, other = AsyncStore(place.store()), place.store()
        async with store:
            session = await store.create("s", scheme="qwen2_vl@hf5")
            there = other.get("s")
            root = there.root
            there.set_head("main", there.append(root, [1]))
            counted = sessions_of(store.store)
            counted.hold = threading.Event()
            both = asyncio.gather(session.append(root.id, [2]), session.set_head("mine", root.id))
            while store.store._journal.lag[0] < 2:  # type: ignore[union-attr]
                await asyncio.sleep(0)
            counted.hold.set()
            node, head = await both
            assert head.version == 2 and session.session.head("mine") == head
            there.append(root, [3])
            draft = await session.draft(node)
            draft.extend([4, 5])
            reply = await session.commit(draft)
            there.refresh()
            assert there.node(reply.id).input_ids(0, 3).tolist() == [2, 4, 5]
            there.set_head("main", root)
            with pytest.raises(HeadMoved):
                await session.set_head("main", node, expected=session.session.head("main"))
            there.append(root, [6])
            media = [MediaItem("image", b"i" * 32, ((0, 2),), (1, 2, 4))]
            made = await session.append(root.id, [151655] * 2, media=iter(media))
            assert [item.identity for item, *_ in made.media_spans()] == [b"i" * 32], "an iterator is gone through once"

    asyncio.run(run())


def test_equal_generations_stay_apart_and_equal_appends_are_one(place: Place) -> None:
    one, two = place.store(), place.store()
    here, there = one.create("s", scheme=SCHEME), two.get("s")
    for session in (here, there, here, there):
        draft = session.draft(session.root)
        draft.append(5)
        draft.commit()
        session.append(session.root, [6])
    here.refresh()
    assert sorted(shown(here)) == [(5,)] * 4 + [(6,)]
    here.append(here.root, [7], key="k")
    with pytest.raises(KeyTaken):
        there.append(there.root, [8], key="k")
    assert there.append(there.root, [7], key="k").id == here.append(here.root, [7], key="k").id


def test_a_budget_of_memory_covers_what_was_read(place: Place) -> None:
    one = place.store()
    for number in range(20):
        session = one.create(f"s{number}", scheme=SCHEME)
        session.append(session.root, np.arange(2_000))
        session.close()
    two = place.store(memory_bytes=20_000)
    held = two.get("s3")
    node = held.leaves()[0]
    for session_id in two.sessions():
        two.get(session_id).leaves()[0].input_ids()
    assert two.usage().index_bytes > 160_000
    two.tick(1.0)
    assert two.usage().index_bytes < 20_000
    assert held.append(node, [1]).stop == 2_001
    assert [len(two.get(session_id).tree) for session_id in two.sessions()] == [2] * 3 + [3] + [2] * 16


def test_the_cache_holds_what_its_budget_allows() -> None:
    cache = RecordCache(1_000)
    places = [(1, 0, number) for number in range(13)]

    def held() -> list[int]:
        return [place[2] for place in places if place in cache._records]

    for place in places[:10]:
        cache.put_all([(place, bytes(200))])
    assert held() == [8, 9] and cache.held_bytes == 800
    cache.put_all([(places[11], bytes(2_000))])
    assert cache.get_all([places[11]]) == [None]
    assert cache.get_all([places[8], places[3]]) == [bytes(200), None]
    cache.put_all([(places[12], bytes(200))])
    assert held() == [8, 12], "that which was asked for last stays"


def test_a_store_closes_its_backend_once(tmp_path: Path) -> None:
    closed: list[object] = []
    backend = sqlite_backend.connect(str(tmp_path / "chats.db"))
    at = SessionStore.connect(backend._replace(close=lambda: closed.append(backend.close())))
    for _ in range(2):
        at.close()
    assert closed == [None]


def test_what_is_no_place_to_connect_to(tmp_path: Path) -> None:
    backend = sqlite_backend.connect(str(tmp_path / "chats.db"))
    for where in (tmp_path, None, 5):
        with pytest.raises(TypeError, match="a URL or a Backend"):
            SessionStore.connect(where)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tenant is text"):
        SessionStore.connect(backend, tenant=5)  # type: ignore[arg-type]
    for options in ({"replica": "postgresql://there"}, {"blobs": "s3://bucket/prefix"}):
        with pytest.raises(Unsupported, match="said of a URL"):
            SessionStore.connect(backend, **options)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"connect\(\)"):
        SessionStore.open("postgresql://me@db/chats")
    backend.close()
