"""Many writers of one session: none is refused, and what one does while others wait for it does not grow with the session."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sessiontree import HeadMoved, Node, Session, SessionStore
from sessiontree.journal import SessionNodes
from sessiontree.testing.together import in_threads
from sessiontree.tokens import Extent
from tests.disk import Disk
from tests.disk_model import open_on

STORES: dict[str, Callable[[], SessionStore]] = {
    "memory": SessionStore.in_memory,
    "group": lambda: open_on(Disk(), durability="group"),
    "commit": lambda: open_on(Disk(), durability="commit"),
}
stores = pytest.mark.parametrize("where", STORES)


def a_session(store: SessionStore, nodes: int) -> tuple[Session, Node]:
    """A session of so many nodes, one behind the other, and the middle one."""
    session = store.create("s", scheme="text@hf5")
    path = [session.root]
    for number in range(nodes):
        path.append(session.append(path[-1], [number]))
    return session, path[nodes // 2]


class Held:
    """Counts what each thread calls while it holds a session's lock: Python and C functions."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: list[Counter[str]] = []

    def append(self, parent: Node, token: int) -> None:
        calls, lock = Counter[str](), self._session._lock

        def called(frame: FrameType, event: str, arg: Any) -> None:
            if event in ("call", "c_call") and lock._is_owned():
                calls[frame.f_code.co_qualname if event == "call" else arg.__qualname__] += 1

        sys.setprofile(called)
        try:
            self._session.append(parent, [token])
        finally:
            sys.setprofile(None)
        self.calls.append(calls)


def calls_of_20_appends(nodes: int, *, opened: bool) -> list[Counter[str]]:
    disk = Disk()
    where: Callable[[], SessionStore] = (lambda: open_on(disk)) if opened else SessionStore.in_memory
    store = where()
    session, middle = a_session(store, nodes)
    if opened:
        store.close()
        store = open_on(disk)
        session = store.get("s")
        middle = session.node(middle.id)
        for _ in range(20):  # ids are sorted once so many were asked for
            session.node(middle.id)
    held = Held(session)
    in_threads(20, lambda number: held.append(middle, 100_000 + number))
    store.close()
    return held.calls


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="a thread misses calls after sys.setprofile there")
@pytest.mark.parametrize("opened", [False, True], ids=["in memory", "opened from disk"])
def test_d29_what_20_appends_do_under_the_lock_is_the_same_for_10_and_10_000_nodes(opened: bool) -> None:
    few, many = (calls_of_20_appends(nodes, opened=opened) for nodes in (10, 10_000))
    assert len(few) == len(many) == 20
    assert all(calls == few[0] for calls in (*few, *many))
    assert 0 < few[0].total() < 100


@stores
def test_d29_nobody_reads_history_under_the_lock(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens of nodes before, nor records, whoever appends where."""
    with STORES[where]() as store:
        session, middle = a_session(store, 300)
        tip = max(session.tree, key=lambda node: node.depth)
        read: list[str] = []
        for owner, names in ((Extent, ("read", "view", "read_bytes")), (SessionNodes, ("_read", "raw")), (Node, ("path",))):
            for name in names:
                real = getattr(owner, name)

                def watched(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
                    if session._lock._is_owned():
                        read.append(_name)
                    return _real(*args, **options)

                monkeypatch.setattr(owner, name, watched)

        def write(number: int) -> None:
            for node in (middle, tip, session.root):
                session.append(node, [1_000 + number])

        in_threads(20, write)
        assert read == []
        assert len(session.tree) == 301 + 60
        assert len(session.children(middle)) == 21
        with session._lock:
            tip.input_ids()
        assert read == ["read"], "the watch works"


@stores
def test_c59_20_appends_to_one_parent_are_20_siblings_equal_ones_one_and_drafts_always_many(where: str) -> None:
    with STORES[where]() as store:
        session, parent = a_session(store, 3)
        before = len(session.children(parent))
        made: list[Node] = []
        in_threads(20, lambda number: made.append(session.append(parent, [100 + number])))
        assert len({node.id for node in made}) == 20
        assert [*session.children(parent)[before:]] == sorted(made, key=session.children(parent).index)
        equal: list[Node] = []
        in_threads(20, lambda number: equal.append(session.append(parent, [7], metadata={"by": number})))
        assert len({node.id for node in equal}) == 1
        assert len(session.children(parent)) == before + 21

        def sample(_: int) -> None:
            with session.draft(parent) as draft:
                draft.append(7)
                made.append(draft.commit())

        in_threads(20, sample)
        assert len({node.id for node in made}) == 40
        assert len(session.children(parent)) == before + 41


@stores
def test_d28_a_stale_writer_is_told_what_is_there_and_can_still_branch(where: str) -> None:
    with STORES[where]() as store:
        session, parent = a_session(store, 3)
        head = session.set_head("main", parent)
        told: list[Any] = []
        lock = threading.Lock()

        def write(number: int) -> None:
            node = session.append(parent, [100 + number])
            try:
                outcome: Any = session.set_head("main", node, expected=head)
            except HeadMoved as error:
                outcome = error
                branch = session.append(parent, [200 + number])  # the old parent takes whatever comes
                assert branch.parent == parent
            with lock:
                told.append(outcome)

        in_threads(20, write)
        moved = [each for each in told if not isinstance(each, HeadMoved)]
        assert moved == [session.head("main")]
        assert all(each.actual == moved[0] for each in told if isinstance(each, HeadMoved))
        assert len(session.children(parent)) == 1 + 20 + 19
