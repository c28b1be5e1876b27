"""Sessions that many processes write, on a backend that fails, or is written to by somebody else, exactly where a test has it so.

The backend is that over SQLite. What is right is said by a store in memory, in which the same is done one after the other.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import pytest
import sqlite_backend
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import Head, Node, Session, SessionStore, SessionTreeError, StoreFailed
from sessiontree.backends.shared import Backend, Change, Look, Nodes, Sessions
from sessiontree.tree import UNSET

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
NAMES = ("main", "side")


class FaultySessions(Sessions):
    """Sessions of a backend. ``before``, ``after``: called with the changes around the next commits; what they raise is raised."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.before: Callable[[Sequence[Change]], object] | None = None
        self.after: Callable[[Sequence[Change]], object] | None = None
        self.looking: Callable[[], object] | None = None
        self.commits = 0

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own or name in ("commit", "look", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(own["sessions"], name)

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        self.commits += 1
        if self.before is not None:
            self.before(changes)
        came = self.sessions.commit(changes)
        if self.after is not None:
            self.after(changes)
        return came

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        if self.looking is not None:
            self.looking()
        return self.sessions.look(number, since)


class Place:
    """A store over a file, what its backend goes through, and another process's store over the same file."""

    def __init__(self, directory: str | Path) -> None:
        self.path = f"{directory}/store"
        backend = sqlite_backend.connect(self.path)
        self.faults = FaultySessions(backend.sessions)
        self.backend = backend._replace(sessions=self.faults)
        self.store = SessionStore.connect(self.backend)
        self.rival = SessionStore.connect(sqlite_backend.connect(self.path))

    def fresh(self) -> SessionStore:
        return SessionStore.connect(sqlite_backend.connect(self.path))

    def close(self) -> None:
        self.faults.before = self.faults.after = self.faults.looking = None
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
        return None


def place(head: Head | None) -> tuple[bytes, int] | None:
    return None if head is None else (head.node.id, head.version)


def outline(session: Session) -> tuple[Any, ...]:
    """All there is to a session, in order."""
    nodes = [
        (node.id, node.parent and node.parent.id, node.token_ids.tolist(), node.stop, node.role, node.finish_reason)
        for node in session.descendants(session.root)
    ]
    return nodes, {name: place(session.head(name)) for name in sorted(session.heads)}, session.pins


ACTS = st.builds(
    Act,
    st.sampled_from(["append", "append", "generate", "replace", "truncate", "set", "swap", "swap", "drop_head", "pin", "unpin", "drop"]),
    node=st.integers(0, 6),
    token=st.integers(0, 2),
    name=st.sampled_from(("main", "side")),
    key=st.sampled_from((None, None, "k")),
    when=st.none() | st.integers(0, 3),
)
Fault = Literal["before it is written", "after it was written", "before the call", "meanwhile", "looking"]
FAULTS: st.SearchStrategy[Fault] = st.sampled_from(get_args(Fault))
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
                faults.before = once(down)
            case "after it was written":
                faults.after = once(down)
            case "looking":
                faults.looking = once(down)
            case "before the call":
                other()
            case "meanwhile":
                faults.before = once(other)
        result = act.on(self.mine, known, heads)
        faults.before = faults.after = faults.looking = None
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
        shown, heads, version = {self.model.root.id: self.model.root.id}, dict[str, bytes](), 0
        for event in self.events.poll():
            assert event.node_id is not None or event.kind == "head_moved"
            match event.kind:
                case "node_committed":
                    assert event.node_id not in shown and event.parent_id in shown
                    shown[event.node_id] = event.parent_id
                case "nodes_dropped":
                    below = {event.node_id}
                    for node, parent in shown.items():
                        below |= {node} if parent in below else set()
                    assert event.node_id in shown
                    shown = {node: parent for node, parent in shown.items() if node not in below}
                case "head_moved":
                    assert event.version > version
                    version = event.version
                    heads.pop(event.head, None)
                    if event.node_id is not None:
                        heads[event.head] = event.node_id
        right, places, _ = outline(self.model)
        assert shown == {self.model.root.id: self.model.root.id} | {node: parent for node, parent, *_ in right}
        assert heads == {name: node for name, (node, _) in places.items()}


@given(STEPS)
def test_whatever_fails_and_whoever_comes_first_it_is_as_if_one_did_it_all(steps: list[tuple[Act, tuple[Fault, Act] | None]]) -> None:
    with TemporaryDirectory() as directory, Place(directory) as at:
        both = Modelled(at)
        for act, fault in steps:
            both.step(act, fault)
        both.end()
