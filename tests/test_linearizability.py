"""Heads under many threads: what sixteen of them saw has an order in which one thread could have seen it.

The checker is in ``linearizability.py``; it is tried on histories that are wrong, and on stores with a bug planted in them.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sessiontree import Head, HeadMoved, KeyTaken, NameTaken, Node, Session, SessionStore, SessionTree, StoreFailed, UnknownHead
from sessiontree.heads import UNSET
from sessiontree.testing.together import in_threads
from tests.disk import Disk
from tests.disk_model import Stalled, fail, open_on
from tests.linearizability import NEVER, Call, NotLinearizable, Recorder, check

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
STORES: dict[str, Callable[[], SessionStore]] = {
    "memory": SessionStore.in_memory,
    "group": lambda: open_on(Disk(), durability="group"),
    "commit": lambda: open_on(Disk(), durability="commit"),
}


# --- the checker ----------------------------------------------------------------------------------------------------------


def sets(made: int, returned: int, value: str, version: int, name: str = "a") -> Call:
    return Call(made, returned, "set", name, value, result=(value, version))


def reads(made: int, returned: int, result: Any, name: str = "a") -> Call:
    return Call(made, returned, "read", name, result=result)


def swaps(made: int, returned: int, expected: Any, value: str, result: Any) -> Call:
    return Call(made, returned, "cas", "a", value, expected, result)


def drops(made: int, returned: int, result: bool = True, name: str = "a") -> Call:
    return Call(made, returned, "drop", name, result=result)


LINEARIZABLE = {
    "nothing": [],
    "a read before its write returned": [sets(1, 10, "x", 1), reads(2, 3, None), reads(4, 5, ("x", 1))],
    "two that overlap, the later version made first": [sets(1, 10, "x", 2), sets(2, 9, "y", 1), reads(11, 12, ("x", 2))],
    "one of two wins": [
        sets(1, 2, "x", 1),
        swaps(3, 9, ("x", 1), "y", ("y", 2)),
        swaps(4, 8, ("x", 1), "z", ("moved", ("y", 2))),
        reads(5, 6, ("x", 1)),
    ],
    "versions are of all heads together": [sets(1, 2, "x", 1), sets(3, 4, "x", 2, "b"), sets(5, 6, "y", 3)],
    "a drop that only its place explains": [
        sets(1, 2, "x", 1),
        sets(3, 4, "x", 2, "b"),
        drops(5, 20),
        drops(6, 20, name="b"),
        reads(7, 8, ("x", 1)),
        reads(9, 10, None, "b"),
        sets(11, 12, "y", 4, "b"),
        sets(21, 22, "z", 6),
    ],
    "made anew": [swaps(1, 2, None, "x", ("x", 1)), drops(3, 4), drops(5, 6, False), swaps(7, 8, None, "x", ("x", 3))],
}
WRONG = {
    "a lost update": [sets(1, 2, "x", 1), swaps(3, 8, ("x", 1), "y", ("y", 2)), swaps(4, 9, ("x", 1), "z", ("z", 2))],
    "a stale read": [sets(1, 2, "x", 1), sets(3, 4, "y", 2), reads(5, 6, ("x", 1))],
    "reads that go back": [sets(1, 2, "x", 1), sets(3, 20, "y", 2), reads(4, 5, ("y", 2)), reads(6, 7, ("x", 1))],
    "a version that comes twice": [sets(1, 2, "x", 1), sets(3, 4, "y", 1)],
    "a version too high": [sets(1, 2, "x", 2)],
    "told of what was not there yet": [sets(1, 2, "x", 1), swaps(3, 4, ("w", 0), "z", ("moved", ("y", 2))), sets(5, 6, "y", 2)],
    "refused, and told of what it expected": [sets(1, 2, "x", 1), swaps(3, 4, ("x", 1), "z", ("moved", ("x", 1)))],
    "seen after a drop": [sets(1, 2, "x", 1), drops(3, 4), reads(5, 6, ("x", 1))],
    "a drop of nothing": [drops(1, 2)],
    "a write after a write that saw it": [sets(1, 2, "x", 2), sets(3, 4, "y", 1)],
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_a_history_with_an_order_is_accepted(name: str) -> None:
    history = LINEARIZABLE[name]
    order = check(history)
    assert sorted(order) == sorted(history)
    assert not any(later.returned < earlier.made for at, later in enumerate(order) for earlier in order[:at])


@pytest.mark.parametrize("name", WRONG)
def test_a_history_without_one_is_not(name: str) -> None:
    with pytest.raises(NotLinearizable) as caught:
        check(WRONG[name])
    assert set(caught.value.stuck) <= set(WRONG[name])
    assert caught.value.stuck


def begins(made: int, kind: Any, value: str | None = None, expected: Any = None) -> Call:
    return Call(made, NEVER, kind, "a", value, expected)


@pytest.mark.parametrize(
    ("history", "done"),
    [
        ([begins(1, "set", "x"), reads(2, 3, ("x", 1))], 1),
        ([begins(1, "set", "x"), reads(2, 3, None)], 0),
        ([begins(1, "set", "x"), sets(2, 3, "y", 1), reads(4, 5, ("y", 1)), reads(6, 7, ("x", 2))], 1),
        ([sets(1, 2, "x", 1), begins(3, "drop"), begins(4, "set", "y"), reads(5, 6, None), reads(7, 8, ("y", 3))], 2),
        ([sets(1, 2, "x", 1), begins(3, "set", "y"), begins(3, "set", "z"), sets(5, 6, "x", 3), reads(7, 8, ("z", 4))], 2),
        ([sets(1, 2, "x", 1), begins(3, "cas", "y", ("x", 1)), begins(3, "cas", "z", ("x", 1)), reads(5, 6, ("z", 2))], 1),
    ],
)
def test_what_never_returned_may_have_been_done_once_or_not(history: list[Call], done: int) -> None:
    order = check(history)
    assert sum(call.returned == NEVER for call in order) == done
    assert {call for call in history if call.returned != NEVER} <= set(order)


@pytest.mark.parametrize(
    "history",
    [
        [reads(1, 2, ("x", 1)), begins(3, "set", "x")],  # not before it was made
        [begins(1, "set", "x"), reads(2, 3, ("x", 1)), sets(4, 5, "y", 2), reads(6, 7, ("x", 3))],  # not twice
        [sets(1, 2, "x", 1), begins(3, "cas", "z", ("w", 1)), reads(4, 5, ("z", 2))],
        [begins(1, "set", "x"), sets(2, 3, "y", 3)],  # not to make room for more than itself
        [begins(1, "drop"), sets(2, 3, "y", 2)],
    ],
)
def test_nor_does_it_explain_more_than_that(history: list[Call]) -> None:
    with pytest.raises(NotLinearizable):
        check(history)


def test_a_history_of_one_thread_cut_into_overlaps_is_accepted_and_a_changed_one_is_not() -> None:
    """Calls with an order, stretched over each other as far as that order allows; then one result is changed."""
    for seed in range(40):
        rng = random.Random(seed)
        calls, heads, moves = list[Call](), dict[str, tuple[str, int]](), 0
        for at in range(60):
            name, value = rng.choice("ab"), rng.choice("xyz")
            made, returned = 100 * at - rng.randrange(300), 100 * at + rng.randrange(300)
            kind = rng.choice(("set", "cas", "drop", "read"))
            actual, expected = heads.get(name), None
            result: Any
            if kind == "read":
                result = actual
            elif kind == "drop":
                result = name in heads
                moves += name in heads
                heads.pop(name, None)
            else:
                expected = rng.choice((actual, None, ("x", rng.randrange(1, 9)))) if kind == "cas" else None
                if kind == "cas" and expected != actual:
                    result = "moved", actual
                else:
                    moves += 1
                    result = heads[name] = value, moves
            calls.append(Call(made, returned, kind, name, value, expected, result))  # type: ignore[arg-type]
        check(calls)
        one, other = rng.sample([at for at, call in enumerate(calls) if call.kind == "set"], 2)
        calls[one] = calls[one]._replace(result=(calls[one].value, calls[other].result[1]))
        with pytest.raises(NotLinearizable):
            check(calls)


# --- stores ---------------------------------------------------------------------------------------------------------------


def place(head: Head | None) -> tuple[bytes, int] | None:
    return None if head is None else (head.node.id, head.version)


class Heads:
    """The heads of a session, as calls to be recorded."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self.session = session
        self.recorder = recorder

    def read(self, name: str) -> Head | None:
        found: list[Head | None] = [None]

        def call() -> Any:
            try:
                found[0] = self.session.head(name)
            except UnknownHead:
                found[0] = None
            return place(found[0])

        self.recorder.call(call, kind="read", name=name)
        return found[0]

    def set(self, name: str, node: Node) -> None:
        self.recorder.call(lambda: place(self.session.set_head(name, node)), kind="set", name=name, value=node.id)

    def swap(self, name: str, node: Node, expected: Head | None) -> bool:
        def call() -> Any:
            try:
                return place(self.session.set_head(name, node, expected=expected))
            except (HeadMoved, NameTaken) as error:
                return "moved", place(error.actual)

        result = self.recorder.call(call, kind="cas", name=name, value=node.id, expected=place(expected))
        return bool(result[0] != "moved")

    def drop(self, name: str) -> None:
        def call() -> bool:
            try:
                self.session.drop_head(name)
            except UnknownHead:
                return False
            return True

        self.recorder.call(call, kind="drop", name=name)


def recorded(store: SessionStore, threads: int = 16, rounds: int = 40, names: str = "ab") -> tuple[Recorder, Session]:
    """Threads that move, compare and move, read and drop the same few heads, and append as they do."""
    session = store.create("s", scheme="text@hf5")
    nodes = [session.append(session.root, [number]) for number in range(8)]
    recorder = Recorder()

    def work(number: int) -> None:
        heads, rng = Heads(session, recorder), random.Random(number)
        known: dict[str, Head | None] = {name: None for name in names}
        for _ in range(rounds):
            name, node = rng.choice(names), rng.choice(nodes)
            match rng.randrange(8):
                case 0:
                    heads.set(name, node)
                case 1 if rng.random() < 0.2:
                    heads.drop(name)
                case 2:
                    session.append(node, [100 + number])
                case 3 | 4 | 5:
                    heads.swap(name, node, known[name])
                    known[name] = heads.read(name)
                case _:
                    known[name] = heads.read(name)

    in_threads(threads, work)
    return recorder, session


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads switch as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("where", STORES)
def test_heads_under_16_threads_are_linearizable(where: str) -> None:
    for _ in range(20 if SOAK else 2):
        with STORES[where]() as store:
            recorder, session = recorded(store)
            order = check(recorder.calls)
            assert len({call.thread for call in order}) == 16
            assert {call.kind for call in order} == {"set", "cas", "drop", "read"}
            assert any(call.kind == "cas" and call.result[0] == "moved" for call in order)
            overlaps = sum(later.made < earlier.returned for earlier, later in itertools.pairwise(order))
            assert overlaps > len(order) // 20  # it was a history of threads
            end = max(call.returned for call in order)
            check([*order, *(Call(end + 1, end + 2, "read", name, result=place(_head(session, name))) for name in "ab")])


def _head(session: Session, name: str) -> Head | None:
    return session.head(name) if name in session.heads else None


def broken_swap(self: Session, operation: Callable[[SessionTree], tuple[SessionTree, Any]]) -> Any:
    """Nobody looks whether the tree is still what the operation began with."""
    after, result = operation(self._tree)
    time.sleep(0)
    self._tree = after
    return result


def broken_head(self: Session, name: str) -> Head:
    """A reader is given what another one was given a while ago."""
    tree = getattr(_kept, "tree", None)
    if tree is None or tree.root is not self.root or len(_kept.asked) % 50 == 0:
        tree = _kept.tree = self._tree
    _kept.asked.append(name)
    return tree.head(name)


class _Kept(threading.local):
    tree: Any = None

    def __init__(self) -> None:
        self.asked: list[str] = []


_kept = _Kept()


def broken_set_head(self: SessionTree, name: str, node: Node, expected: Any = UNSET) -> tuple[SessionTree, Head]:
    """Each head counts its own versions, from where it was made."""
    name = self._check_head(name, expected)
    actual = self._head(name)
    head = Head(self._resolve(node), 1 if actual is None else actual.version + 1)
    return self._with_heads({**self._heads, name: head}, self._moves + 1), head


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [(Session, "_swap", broken_swap), (Session, "head", broken_head), (SessionTree, "set_head", broken_set_head)],
    ids=["a lost update", "a stale read", "a version that repeats"],
)
def test_planted_bugs_are_found(where: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(NotLinearizable):
        for _ in range(20):
            with SessionStore.in_memory() as store:
                check(recorded(store)[0].calls)


@pytest.mark.parametrize("refused", [False, True], ids=["then durable", "then refused"])
def test_a_refusal_waits_until_what_it_saw_is_durable(refused: bool) -> None:
    """Else who is told that a head moved would still find it where it was, or be told of a move that never came to be."""
    disk = Stalled()
    with open_on(disk, durability="commit") as store:
        session = store.create("s", scheme="text@hf5")
        one, two = session.append(session.root, [1]), session.append(session.root, [2])
        head = session.set_head("main", one)
        told: list[Any] = []

        def move() -> None:
            try:
                told.append(session.set_head("main", two, expected=head))
            except (HeadMoved, StoreFailed) as error:
                told.append(error)

        if refused:
            fail(disk, 1, "pwrite")
        disk.waits.clear()
        disk.go.clear()
        first = threading.Thread(target=move)
        first.start()
        assert disk.waits.wait(60)
        second = threading.Thread(target=move)
        second.start()
        assert store._journal is not None
        log: Any = store._journal._log
        while not log._gates and second.is_alive():
            time.sleep(0)
        assert told == []
        assert session.head("main") == head
        disk.go.set()
        first.join()
        second.join()
        if refused:
            assert isinstance(told[0], StoreFailed) or isinstance(told[1], StoreFailed)
            (moved,) = (each for each in told if isinstance(each, Head))
            assert (moved.node, session.head("main")) == (two, moved)
        else:
            moved, error = sorted(told, key=lambda each: isinstance(each, HeadMoved))
            assert moved == error.actual == session.head("main")


@pytest.mark.parametrize("lost", [False, True])
def test_an_append_whose_key_names_other_content_waits_until_that_is_durable(lost: bool) -> None:
    disk = Stalled()
    with open_on(disk, durability="commit") as store:
        session = store.create("s", scheme="text@hf5")
        told: dict[int, Any] = {}

        def append(token: int) -> None:
            try:
                told[token] = session.append(session.root, [token], key="request")
            except (KeyTaken, StoreFailed) as error:
                told[token] = error

        if lost:
            fail(disk, 1, "pwrite")
        disk.waits.clear()
        disk.go.clear()
        first, second = (threading.Thread(target=append, args=(token,)) for token in (1, 2))
        first.start()
        assert disk.waits.wait(60)
        second.start()
        assert store._journal is not None
        log: Any = store._journal._log
        while not log._gates and second.is_alive():
            time.sleep(0)
        assert told == {}
        disk.go.set()
        first.join()
        second.join()
        if lost:
            assert isinstance(told[1], StoreFailed)
            assert session.children(session.root) == (told[2],)
        else:
            assert isinstance(told[2], KeyTaken)
            assert session.children(session.root) == (told[1],)
