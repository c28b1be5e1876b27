"""Sessions that many processes write, on a backend that fails, or is written to by somebody else, exactly where a test has it so.

The backend is that over SQLite. What is right is said by a store in memory, in which the same is done one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import pytest
import sqlite_backend
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import (
    Head,
    HeadMoved,
    KeyTaken,
    NameTaken,
    Node,
    NodeHeld,
    Session,
    SessionStore,
    SessionTreeError,
    StoreFailed,
    TokenValues,
    UnknownHead,
    UnknownNode,
    UnknownSession,
)
from sessiontree.aio import AsyncStore
from sessiontree.backends.shared import Backend, Change
from tests.linearizability import Call, check
from tests.test_linearizability import recorded

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


class Faulty:
    """A part of a backend. ``before``, ``after``: by method, what is called around it, with what it is given; it may raise."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.before: dict[str, Callable[..., object]] = {}
        self.after: dict[str, Callable[..., object]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.before.get(name, nothing)(*given)
            result = getattr(self.inner, name)(*given, **named)
            self.after.get(name, nothing)(*given)
            return result

        return call

    def heal(self) -> None:
        self.before.clear()
        self.after.clear()


def nothing(*_: object) -> None:
    """What is called where nothing is to happen."""


class Place:
    """A store over a file, what its backend goes through, and another process's store over the same file."""

    def __init__(self, directory: str | Path) -> None:
        self.path = f"{directory}/store"
        backend = self.connect()
        self.faults: Any = Faulty(backend.sessions)
        self.reads: Any = Faulty(backend.nodes)
        self.store = SessionStore.connect(backend._replace(sessions=self.faults, nodes=self.reads))
        self.rival = self.fresh()

    def connect(self) -> Backend:
        backend: Any = sqlite_backend.connect(self.path)
        for _, connection in backend.sessions.db.connections.values():
            connection.execute("PRAGMA synchronous = OFF")  # nothing here is about the disk
        return backend  # type: ignore[no-any-return]

    def fresh(self) -> SessionStore:
        return SessionStore.connect(self.connect())

    def close(self) -> None:
        self.faults.heal()
        self.reads.heal()
        self.store.close()
        self.rival.close()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as place:
        yield place


class Down(StoreFailed):
    """What the backend raises here."""


def once(what: Callable[[], object]) -> Callable[..., object]:
    """The first call does it; the others do nothing."""
    left = [what]
    return lambda *_: left.pop()() if left else None


def fail(*_: object) -> None:
    raise Down("the backend is down")


# --- all of it, at random, beside a model -----------------------------------------------------------------------------------


class Act(NamedTuple):
    """An operation on a session. ``node``, ``when``: which of the nodes, and of the heads, that there ever were, the last first."""

    kind: str
    node: int = 0
    token: int = 0
    name: str = "main"
    key: str | None = None
    when: int | None = None

    def on(self, session: Session, known: Sequence[Node], heads: Sequence[Head]) -> Any:
        """What comes of it, as something that compares: it may be an error."""
        try:
            result = self._on(session, known[-1 - self.node % len(known)].id, heads)
        except SessionTreeError as error:
            return type(error), place(getattr(error, "actual", None))
        return result.id if isinstance(result, Node) else place(result)

    def _on(self, session: Session, node: bytes, heads: Sequence[Head]) -> Node | Head | None:
        match self.kind:
            case "append":
                return session.append(node, [self.token], key=self.key)
            case "generate":
                draft = session.draft(node, key=self.key or "generated")
                draft.extend([self.token, self.token])
                try:
                    return draft.commit()
                finally:
                    if not draft.closed:
                        draft.abort()
            case "replace":
                return session.replace(node, [self.token] * 3, head=self.name)
            case "truncate":
                return session.truncate(node, self.token)
            case "set":
                return session.set_head(self.name, node)
            case "swap":
                free = self.when is None or not heads
                return session.set_head(self.name, node, expected=None if free else heads[-1 - (self.when or 0) % len(heads)])
            case "drop_head":
                session.drop_head(self.name)
            case "pin":
                session.pin(node)
            case "unpin":
                session.unpin(node)
            case "drop":
                session.drop(node)
            case "annotate":
                token = TokenValues([float(self.token)], start=self.when or 0)
                session.annotate(node, {self.name: self.token, "logprobs": token})
        return None


def place(head: Head | None) -> tuple[bytes, int] | None:
    return None if head is None else (head.node.id, head.version)


def outline(session: Session) -> tuple[Any, ...]:
    """All there is to a session, in order."""
    nodes = [
        (
            *(node.id, node.parent and node.parent.id, node.token_ids.tolist(), node.stop, node.role, node.finish_reason),
            session.annotations(node),
        )
        for node in session.descendants(session.root)
    ]
    return nodes, {name: place(session.head(name)) for name in sorted(session.heads)}, session.pins


OFTEN = ("append", "swap")
KINDS = (*OFTEN, *OFTEN, "generate", "replace", "truncate", "set", "drop_head", "pin", "unpin", "drop", "annotate", "annotate")
ACTS = st.builds(
    Act,
    st.sampled_from(KINDS),
    node=st.integers(0, 6),
    token=st.integers(0, 2),
    name=st.sampled_from(("main", "side")),
    key=st.sampled_from((None, None, "k")),
    when=st.none() | st.integers(0, 3),
)
Fault = Literal["before it is written", "after it was written", "before the call", "meanwhile", "looking"]
FAULTS: st.SearchStrategy[Fault] = st.sampled_from(get_args(Fault))
Step = tuple[Act, tuple[Fault, Act] | None]
STEPS = st.lists(st.tuples(ACTS, st.none() | st.tuples(FAULTS, ACTS)), max_size=40 if SOAK else 20)


class Modelled:
    """A session whose backend fails, and another process's hand on it, beside a session in memory."""

    def __init__(self, at: Place) -> None:
        self.at = at
        self.model = SessionStore.in_memory().create("s", scheme="text@hf5")
        self.mine = at.store.create("s", scheme="text@hf5")
        self.theirs = at.rival.get("s")
        self.events = at.store.subscribe(kinds=("node_committed", "head_moved", "nodes_dropped"))
        self.known: list[Node] = [self.model.root]
        self.heads: list[Head] = []

    def step(self, act: Act, fault: tuple[Fault, Act] | None) -> None:
        known, heads = list(self.known), list(self.heads)
        faults, came = self.at.faults, list[str]()

        def other() -> None:
            came.append("other")
            assert fault is not None
            expected = self._on_model(fault[1], known, heads)
            assert fault[1].on(self.theirs, known, heads) == expected

        def down() -> None:
            came.append("down")
            fail()

        match fault and fault[0]:
            case "before it is written":
                faults.before["commit"] = once(down)
            case "after it was written":
                faults.after["commit"] = once(down)
            case "looking":
                faults.before["look"] = once(down)
            case "before the call":
                other()
            case "meanwhile":
                faults.before["commit"] = once(other)
        result = act.on(self.mine, known, heads)
        faults.heal()
        if came == ["down"]:
            assert result == (Down, None), (act, result)
            if fault and fault[0] == "after it was written":
                self._on_model(act, known, heads)
        else:
            assert result == self._on_model(act, known, heads), act

    def _on_model(self, act: Act, known: Sequence[Node], heads: Sequence[Head]) -> Any:
        result = act.on(self.model, known, heads)
        self.known += [node for node in self.model.descendants(self.model.root) if node not in self.known]
        self.heads += [head for name in self.model.heads if (head := self.model.head(name)) not in self.heads]
        return result

    def end(self) -> None:
        right = outline(self.model)
        self.mine.refresh()
        assert outline(self.mine) == right
        with self.at.fresh() as fresh:
            assert outline(fresh.get("s")) == right
        self._check_events()
        self.at.store.gc()
        with self.at.fresh() as fresh:
            assert outline(fresh.get("s")) == right

    def _check_events(self) -> None:
        """Who follows them knows what the session shows; and none is told twice."""
        root = self.model.root.id
        shown: dict[bytes, bytes | None] = {root: None}
        heads: dict[str, bytes | None] = {}
        version = 0
        for event in self.events.poll():
            node_id: Any = event.node_id
            match event.kind:
                case "node_committed":
                    assert node_id not in shown and event.parent_id in shown
                    shown[node_id] = event.parent_id
                case "nodes_dropped":
                    assert node_id in shown
                    below = {node_id}
                    for node, parent in shown.items():
                        below |= {node} if parent in below else set()
                    shown = {node: parent for node, parent in shown.items() if node not in below}
                case "head_moved":
                    assert event.version is not None and event.version > version
                    version = event.version
                    heads[str(event.head)] = node_id
        right, places, _ = outline(self.model)
        assert shown == {root: None} | {node: parent for node, parent, *_ in right}
        assert {name: node for name, node in heads.items() if node} == {name: node for name, (node, _) in places.items()}


@given(STEPS)
def test_whatever_fails_and_whoever_comes_first_it_is_as_if_one_did_it_all(steps: list[Step]) -> None:
    with TemporaryDirectory() as directory, Place(directory) as at:
        both = Modelled(at)
        for act, fault in steps:
            both.step(act, fault)
        both.end()


# --- one thing after the other ------------------------------------------------------------------------------------------------


def test_a_generation_keeps_its_own_key_where_somebody_else_came_first(at: Place) -> None:
    mine = at.store.create("s", scheme="text@hf5")
    theirs = at.rival.get("s")
    at.faults.before["commit"] = once(lambda: theirs.append(theirs.root, [9]))
    made = mine.record([1, 2], [3]).completion
    assert made in mine.tree
    assert [node.key for node in mine.descendants(mine.root) if node.origin == "generated"] == [made.key]


def test_under_asyncio_what_is_told_is_what_is_there(at: Place) -> None:
    """Each operation is done anew, since somebody else writes before each of the first few commits."""

    async def work() -> None:
        store = AsyncStore(at.store)
        session = await store.create("s", scheme="text@hf5")
        theirs = at.rival.get("s")
        others = itertools.count()

        def other(*_: object) -> None:
            if (number := next(others)) < 12 and number % 2 == 0:
                theirs.set_head("theirs", theirs.append(theirs.root, [number]))

        at.faults.before["commit"] = other
        root = session.session.root
        draft = await session.draft(root)
        draft.extend([5, 6])
        recording = asyncio.create_task(session.record([1, 2], [3]))
        committing = asyncio.create_task(session.commit(draft))
        appended = await asyncio.gather(*(session.append(root, [100 + number]) for number in range(4)))
        made, committed = await recording, await committing
        heads = [await session.set_head("main", node) for node in appended]
        replaced = await session.replace(appended[0], [7], head="main")
        heads.append(session.session.head("main"))
        assert next(others) > 8
        at.faults.heal()
        await session.refresh()
        with at.fresh() as fresh:
            there = fresh.get("s")
            for node in (made.prompt, made.completion, committed, *appended, replaced):
                assert there.node(node.id) == node
            assert there.head("main") == heads[-1]
            assert place(there.head("main")) == (replaced.id, heads[-1].version)
        versions = [head.version for head in heads]
        assert versions == sorted(set(versions))
        await store.close()

    asyncio.run(work())


def test_heads_under_threads_beside_somebody_who_writes_are_linearizable(at: Place) -> None:
    """Every third commit comes too late, for an append elsewhere: so no version is anybody else's."""
    others = itertools.count()

    def other(changes: Sequence[Change]) -> None:
        if (number := next(others)) % 3 == 2 and changes[0].before > 0:
            theirs = at.rival.get("s")
            theirs.append(theirs.root, [1000 + number])

    at.faults.before["commit"] = other
    recorder, session = recorded(at.store, threads=6, rounds=25 if SOAK else 12)
    at.faults.heal()
    order = check(recorder.calls)
    end = max(call.returned for call in order)
    with at.fresh() as fresh:
        heads = fresh.get("s").heads
        last = {name: place(fresh.get("s").head(name)) if name in heads else None for name in "ab"}
        assert sum(node.token_ids[0] >= 1000 for node in fresh.get("s").children(session.root)) == next(others) // 3
    said = {name: (bytes(at[0]), at[1]) if at else None for name, at in last.items()}
    check([*order, *(Call(end + 1, end + 2, "read", name, result=said[name]) for name in "ab")])


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_what_a_store_does_an_error_leaves_all_or_nothing(at: Place, when: str) -> None:
    def failing(method: str, what: Callable[[], object]) -> None:
        getattr(at.faults, when)[method] = once(fail)
        with pytest.raises(Down):
            what()
        at.faults.heal()

    done = when == "after"
    store = at.store
    failing("create", lambda: store.create("s", scheme="text@hf5"))
    assert store.sessions() == (("s",) if done else ())
    session = store.get("s") if done else store.create("s", scheme="text@hf5")
    node = session.append(session.root, [1])

    failing("create", lambda: store.fork(session, node, "f"))
    assert ("f" in store.sessions()) == done
    fork = store.get("f") if done else store.fork(session, node, "f")
    assert [each.id for each in fork.node(node.id).path()] == [each.id for each in node.path()]

    failing("name", lambda: store.alias_media("cat", bytes(32)))
    with pytest.raises(KeyTaken) if done else nullcontext():
        assert store.alias_media("cat", bytes([1] * 32)) == bytes([1] * 32)

    failing("commit", lambda: store.drop("f"))
    assert ("f" in store.sessions()) != done
    if done:
        with pytest.raises(UnknownSession):
            store.get("f")
    else:
        store.get("f").append(node.id, [2])
        store.drop("f")
    store.create("f", scheme="text@hf5")

    session.drop(node)
    failing("remove", store.gc)
    store.gc()
    with at.fresh() as fresh:
        assert list(fresh.get("s").descendants(session.root)) == []
    assert session.append(session.root, [1]) == node


def test_what_cannot_be_read_now_is_read_later(at: Place) -> None:
    theirs = at.rival.create("s", scheme="text@hf5")
    node = theirs.append(theirs.root, [1, 2], annotations={"reward": 1.0}).id
    theirs.set_head("main", node)
    mine = at.store.get("s")
    head = mine.head("main")
    at.reads.before["read"] = at.faults.before["look"] = fail
    for what in (lambda: head.node, mine.refresh, lambda: at.store.get("s"), lambda: mine.children(mine.root)):
        with pytest.raises(Down):
            what()
    at.reads.heal()
    at.faults.heal()
    assert head.node.token_ids.tolist() == [1, 2]
    at.faults.before["read_refs"] = fail
    with pytest.raises(Down):
        mine.annotations(node)
    with pytest.raises(Down):
        mine.annotate(node, {"reward": 2.0})
    at.faults.heal()
    assert mine.annotations(node) == {"reward": 1.0}
    assert mine.append(head.node, [3]).depth == 2


def test_a_store_that_was_down_for_a_while_goes_on_with_all_its_sessions(at: Place) -> None:
    sessions = [at.store.create(f"s{number}", scheme="text@hf5") for number in range(3)]
    before = [session.append(session.root, [1]) for session in sessions]
    at.faults.before["commit"] = at.faults.before["look"] = fail
    for _ in range(3):
        for session, node in zip(sessions, before, strict=True):
            for what in (partial(session.append, node, [2]), partial(session.set_head, "main", node), partial(session.pin, node)):
                with pytest.raises(StoreFailed):
                    what()
            assert list(session.descendants(session.root)) == [node]
            assert not session.heads and not session.pins
    at.faults.heal()
    for session, node in zip(sessions, before, strict=True):
        assert session.set_head("main", session.append(node, [2])).version == 1
        session.pin(node)
        session.drop_head("main")
        assert len(at.rival.get(session.id).tree) == 3


STALE: dict[str, tuple[Act, Act, Any]] = {
    # What somebody else does, what is done then by one who has not seen that, and what comes of it. Nodes: 1 is older, 0 newer.
    "an append of what was dropped": (Act("drop", 0), Act("append", 1, token=2), "node"),
    "an append under what was dropped": (Act("drop", 0), Act("append", 0, token=3), UnknownNode),
    "a key whose node was dropped": (Act("drop", 0), Act("append", 1, token=4, key="k"), "node"),
    "a key that is taken by now": (Act("append", 1, token=3, key="k"), Act("append", 1, token=4, key="k"), KeyTaken),
    "a head that is there by now": (Act("set", 0), Act("swap", 1), NameTaken),
    "a head that is there no longer": (Act("drop_head", name="side"), Act("swap", 1, name="side"), 3),
    "a head to drop that is there by now": (Act("set", 1), Act("drop_head"), None),
    "a head to drop that is gone": (Act("drop_head", name="side"), Act("drop_head", name="side"), UnknownHead),
    "a pin that was taken away": (Act("unpin", 1), Act("pin", 1), None),
    "a pin that was set": (Act("pin", 0), Act("unpin", 0), None),
    "a pin on what was dropped": (Act("drop", 0), Act("pin", 0), UnknownNode),
    "a drop of what is held by now": (Act("pin", 0), Act("drop", 0), NodeHeld),
    "a drop of what is no longer held": (Act("unpin", 1), Act("drop", 1), NodeHeld),  # by the head
    "a draft under what was dropped": (Act("drop", 0), Act("generate", 0, token=1), UnknownNode),
    "another turn in the place of one that was dropped": (Act("drop", 0), Act("replace", 0, token=1), UnknownNode),
}


@pytest.mark.parametrize("name", STALE)
def test_what_writes_nothing_is_checked_too(at: Place, name: str) -> None:
    """A refusal, or a call that finds nothing to do, is about what there is, not about what its session saw last."""
    theirs_does, mine_does, expected = STALE[name]
    mine, theirs = at.store.create("s", scheme="text@hf5"), at.rival
    older = mine.append(mine.root, [1])
    newer = mine.append(older, [2], key="k" if "key whose" in name else None)
    mine.pin(older)
    mine.set_head("side", older)
    first = theirs.get("s")
    known = [older, newer]
    assert not isinstance(theirs_does.on(first, known, []), tuple) or theirs_does.kind == "set"
    result = mine_does.on(mine, known, [])
    if isinstance(expected, type):
        assert result[0] is expected
    elif isinstance(expected, int):
        assert result == (older.id, expected)
    elif expected is None:
        assert result is None
    first.refresh()
    mine.refresh()
    assert outline(first) == outline(mine)
    if expected == "node":
        assert result in mine.tree
    if mine_does.kind in ("pin", "unpin") and expected is None:
        assert (known[-1 - mine_does.node].id in first.pins) == (mine_does.kind == "pin")
    if mine_does.kind == "drop_head":
        assert mine_does.name not in first.heads


def test_a_head_is_compared_with_what_is_there_not_with_what_was_seen(at: Place) -> None:
    mine = at.store.create("s", scheme="text@hf5")
    one, two = mine.append(mine.root, [1]), mine.append(mine.root, [2])
    seen = mine.set_head("main", one)
    theirs = at.rival.get("s")
    moved = theirs.set_head("main", two)
    assert mine.head("main") == seen
    again = mine.set_head("main", one, expected=moved)  # told of by somebody, not by a look
    with pytest.raises(HeadMoved) as caught:
        theirs.set_head("main", two, expected=seen)
    assert caught.value.actual == again


def test_a_node_that_was_made_elsewhere_can_be_gone_on_from_by_its_id(at: Place) -> None:
    mine = at.store.create("s", scheme="text@hf5")
    theirs = at.rival.get("s")
    calls: tuple[Callable[[bytes], object], ...] = (
        lambda node: mine.append(node, [7]),
        lambda node: mine.draft(node).abort(),
        lambda node: mine.truncate(node, 1),
        lambda node: mine.set_head("main", node),
        mine.pin,
        lambda node: at.store.fork(mine, node, "fork"),
    )
    for number, call in enumerate(calls):
        made = theirs.append(theirs.root, [number, 8, 9])
        assert made.id not in mine.tree
        call(made.id)
        assert made.id in mine.tree
    mine.drop(theirs.append(theirs.root, [10]).id)
    with pytest.raises(UnknownNode):
        mine.append(bytes(32), [1])


def test_what_a_look_brings_before_its_writer_is_told_is_there_once(at: Place) -> None:
    mine = at.store.create("s", scheme="text@hf5")
    at.faults.after["commit"] = lambda *_: at.store._view_of("s")
    one, two = mine.append(mine.root, [1]), mine.append(mine.root, [2])
    mine.set_head("main", one)
    mine.drop(two)
    at.faults.heal()
    three = mine.append(one, [3])
    mine.refresh()
    with at.fresh() as fresh:
        assert outline(fresh.get("s")) == outline(mine)
    assert list(mine.descendants(mine.root)) == [one, three]


def test_a_fork_of_a_session_that_is_younger_than_its_maker_can_be_read(at: Place) -> None:
    """Each process draws some numbers ahead; a fork has a higher one than what it was made from, whoever makes it."""
    at.store.create("early", scheme="text@hf5")
    young = at.rival.create("young", scheme="text@hf5")
    node = young.append(young.root, [1])
    at.store.fork(at.store.get("young"), node.id, "fork").append(node.id, [2])
    with at.fresh() as fresh:
        assert [each.token_ids.tolist() for each in fresh.get("fork").leaves()[0].path()] == [[], [1], [2]]
