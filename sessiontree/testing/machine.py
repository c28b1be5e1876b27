"""Any operations in any order, on one store or on several at once, against the log of what was done.

With several stores each operation is done on all of them, and has to come to the same in each: equal ids, equal errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from sessiontree import Head, HeadMoved, KeyTaken, Node, NodeHeld, Session, SessionTreeError
from sessiontree.testing.base import Conformance, Home
from sessiontree.testing.drawn import ANNOTATIONS, FIRST, TURN, annotation
from sessiontree.testing.model import SCHEME, Log, Turn, add, check_node, check_session, ids_of, reached, said_of, seen

NAMES = ("main", "aside")
MAX_SESSIONS = 3
PICK = st.integers(0, 1000)
NAME = st.sampled_from(NAMES)


class Refusal(tuple[str, Any]):
    """That an operation was refused: the error's type, and what it says is there."""

    __slots__ = ()

    @classmethod
    def of(cls, error: SessionTreeError) -> Refusal:
        there: Any = None
        if isinstance(error, HeadMoved):
            there = error.actual and error.actual.node.id
        elif isinstance(error, KeyTaken):
            there = error.key
        return cls((type(error).__name__, there))


class StoreMachine(RuleBasedStateMachine):
    """Operations on sessions of ``homes``. Its stores go on from one example to the next; its sessions are dropped."""

    def __init__(self, homes: Sequence[Home]) -> None:
        super().__init__()
        self.homes = homes
        self.logs: list[Log] = []
        self.stale: dict[str, list[list[Head]]] = {}
        self.seen: dict[tuple[str, bytes], bytes] = {}

    # What is done to all of them

    def every(self, act: Callable[[int, Home], Any]) -> Any:
        """What an operation comes to, which is the same in every store: a node's id, a Refusal, or what it gives."""
        results = []
        for at, home in enumerate(self.homes):
            try:
                result = act(at, home)
            except SessionTreeError as error:
                result = Refusal.of(error)
            results.append(result.id if isinstance(result, Node) else result)
        assert all(result == results[0] for result in results), results
        return results[0]

    def on(self, log: Log, act: Callable[[Session], Any]) -> Any:
        """The same, of one session; afterwards it is what its log says, or was where nothing was done."""
        return self.every(lambda _, home: act(home.store.get(log.session_id)))

    def pick(self, number: int, at: int) -> tuple[Log, bytes]:
        """A session, and a node of it; small numbers are the newest ones."""
        log = self.logs[number % len(self.logs)]
        return log, log.ids[-1 - at % len(log.ids)]

    def check_shape(self, log: Log) -> None:
        """What is cheap to see of a session: its nodes, heads and pins."""
        for home in self.homes:
            session = home.store.get(log.session_id)
            assert [node.id for node in session.tree] == log.ids
            assert {name: node.id for name, node in session.heads.items()} == log.heads
            assert session.pins == log.pins

    def check_all(self) -> None:
        """Everything that is there."""
        for home in self.homes:
            for log in self.logs:
                session = home.store.get(log.session_id)
                check_session(session, log)
                for node in session.tree:
                    assert seen(node) == self.seen.setdefault((log.session_id, node.id), seen(node)), "it is as it was when it came"

    def learn(self, log: Log, node: Any, parent: bytes, turn: Turn) -> None:
        """An operation gave a node, as it should: a new one, unless the log has that content."""
        known = log.known(parent, turn)
        if known is None:
            log.add(node, parent, turn)
            for home in self.homes:
                made = home.store.get(log.session_id).node(node)
                check_node(made, log.turns(node))
                self.seen[log.session_id, node] = seen(made)
        assert node == (known or node)

    # Sessions

    @initialize(turn=FIRST)
    def begin(self, turn: Turn) -> None:
        name = self.homes[0].name()
        sessions = [home.store.create(name, scheme=SCHEME) for home in self.homes]
        assert len({session.root.id for session in sessions}) == 1
        self.logs.append(Log.of(sessions[0]))
        self.say(0, 0, turn)

    @precondition(lambda self: len(self.logs) < MAX_SESSIONS)
    @rule(number=PICK, at=PICK)
    def fork(self, number: int, at: int) -> None:
        log, node = self.pick(number, at)
        name = self.homes[0].name()
        forks = [home.store.fork(home.store.get(log.session_id), node, name) for home in self.homes]
        self.logs.append(log.forked(node, forks[0]))
        self.check_shape(self.logs[-1])

    @precondition(lambda self: len(self.logs) > 1)
    @rule(number=PICK)
    def drop_session(self, number: int) -> None:
        log = self.logs[number % len(self.logs)]
        result = self.every(lambda _, home: home.store.drop(log.session_id))
        assert result == (Refusal(("NodeHeld", None)) if log.pins else None)
        if not log.pins:
            self.logs.remove(log)

    # Turns

    @rule(number=PICK, at=PICK, turn=TURN)
    def say(self, number: int, at: int, turn: Turn) -> None:
        log, parent = self.pick(number, at)
        result = self.on(log, lambda session: add(session, parent, turn))
        if not ids_of([*log.turns(parent), turn]):
            assert isinstance(result, Refusal), "an empty turn right under the root"
        else:
            try:
                self.learn(log, result, parent, turn)
            except LookupError as taken:
                assert result == Refusal(("KeyTaken", taken.args[0]))
        self.check_shape(log)

    @rule(number=PICK, at=PICK)
    def say_again(self, number: int, at: int) -> None:
        log, node = self.pick(number, at)
        entry = log.path(node)[-1]
        parent, turn = entry.parent, entry.turn
        if parent is not None and turn is not None and (turn.key or not turn.generated):  # else it gets a key of its own
            assert self.on(log, lambda session: add(session, parent, turn)) == node
        self.check_shape(log)

    @rule(number=PICK, at=PICK, length=PICK)
    def truncate(self, number: int, at: int, length: int) -> None:
        log, node = self.pick(number, at)
        path = log.path(node)
        kept = length % (len(ids_of(log.turns(node))) + 1)
        result = self.on(log, lambda session: session.truncate(node, kept))
        stops = [len(ids_of(log.turns(entry.id))) for entry in path]
        if kept in stops:
            assert result == path[len(stops) - 1 - stops[::-1].index(kept)].id
        else:
            cut = next(at for at, stop in enumerate(stops) if stop > kept)
            whole, own = path[cut].turn, kept - stops[cut - 1]
            assert whole is not None
            if any(picture.at < own < picture.at + len(picture) for picture in whole.pictures):
                assert result == Refusal(("MediaSpanError", None))
            else:
                pictures = tuple(picture for picture in whole.pictures if picture.at < own)
                key = self.homes[0].store.get(log.session_id).node(result).key
                left = Turn(whole.tokens[:own], pictures, whole.role, key, whole.generated)
                if log.known(path[cut - 1].id, left) is None:
                    log.wholes[result] = path[cut].id
                self.learn(log, result, path[cut - 1].id, left)
        self.check_shape(log)

    # Annotations

    @rule(number=PICK, at=PICK, names=st.sets(st.sampled_from(ANNOTATIONS), min_size=1, max_size=3), seed=PICK)
    def annotate(self, number: int, at: int, names: set[str], seed: int) -> None:
        log, node = self.pick(number, at)
        entry = log.path(node)[-1]
        forks = self.logs[self.logs.index(log) + 1 :]
        if any(entry is each for fork in forks for each in fork.entries):
            return  # what forks see of what is said after they were made is for each store to say
        count = 0 if entry.turn is None else len(entry.turn.tokens)
        values = {name: annotation(name, count, seed) for name in sorted(names)}
        assert self.on(log, lambda session: session.annotate(node, values)) is None
        log.annotate(node, values)
        for home in self.homes:
            assert said_of(home.store.get(log.session_id), node) == log.annotations(node)

    # Heads and pins

    @rule(number=PICK, at=PICK, name=NAME, how=st.sampled_from(("any", "any", "free", "there", "stale")))
    def set_head(self, number: int, at: int, name: str, how: str) -> None:
        log, node = self.pick(number, at)
        now, slot = log.heads.get(name), f"{log.session_id}/{name}"
        old = self.stale.get(slot, [])

        def move(which: int, home: Home) -> bytes:
            session = home.store.get(log.session_id)
            expected: dict[str, Any] = {}
            if how == "free":
                expected = {"expected": None}
            elif how == "there" and now is not None:
                expected = {"expected": session.head(name) if at % 2 else now}
            elif how == "stale" and old:
                expected = {"expected": old[at % len(old)][which]}
            head = session.set_head(name, node, **expected)
            assert head == session.head(name)
            return head.node.id

        before = [home.store.get(log.session_id).head(name) for home in self.homes] if now is not None else None
        result = self.every(move)
        if how == "free" and now is not None:
            assert result == Refusal(("NameTaken", now))
        elif how == "stale" and old:
            assert result == Refusal(("HeadMoved", now))
        else:
            assert result == node
            log.heads[name] = node
            if before is not None:
                self.stale.setdefault(slot, []).append(before)
        self.check_shape(log)

    @rule(number=PICK, name=NAME)
    def drop_head(self, number: int, name: str) -> None:
        log = self.logs[number % len(self.logs)]
        result = self.on(log, lambda session: session.drop_head(name))
        assert result == (None if name in log.heads else Refusal(("UnknownHead", None)))
        log.heads.pop(name, None)
        self.check_shape(log)

    @rule(number=PICK, at=PICK, pinned=st.booleans())
    def pin(self, number: int, at: int, pinned: bool) -> None:
        log, node = self.pick(number, at)
        if pinned:
            self.on(log, lambda session: session.pin(node))
            log.pins.add(node)
        else:
            node = sorted(log.pins)[at % len(log.pins)] if log.pins else node
            self.on(log, lambda session: session.unpin(node))
            log.pins.discard(node)
        self.check_shape(log)

    # What goes, and what comes back

    @rule(number=PICK, at=PICK)
    def drop(self, number: int, at: int) -> None:
        log, node = self.pick(number, at)
        result = self.on(log, lambda session: session.drop(node))
        if node in log.ids[: log.shared]:
            assert isinstance(result, Refusal)
        elif log.below([node]) & log.held():
            assert result == Refusal((NodeHeld.__name__, None))
        else:
            assert result is None
            log.drop([node])
        self.check_shape(log)

    @rule(recent=st.sampled_from((None, None, 0, 1, 5)))
    def collect(self, recent: int | None) -> None:
        if recent is not None:
            for log in self.logs:
                log.collect(recent)
        for home in self.homes:
            report = home.store.gc(recent=recent)
            assert not home.counts or report.nodes_after == reached(self.logs)
        self.check_all()

    @rule(which=PICK)
    def reopen(self, which: int) -> None:
        """One store, as the others go on."""
        self.homes[which % len(self.homes)].reopen()
        self.check_all()

    @rule()
    def evict(self) -> None:
        for home in self.homes:
            home.store.evict()

    def teardown(self) -> None:
        try:
            self.check_all()
            for home in self.homes:
                home.reopen()
            self.check_all()
        finally:  # the stores are to be empty for the next example
            for home in self.homes:
                for session in map(home.store.get, home.store.sessions()):
                    for pin in session.pins:
                        session.unpin(pin)
                    home.store.drop(session.id)


def run_machine(homes: Sequence[Home], *, examples: int, steps: int = 30) -> None:
    """Let Hypothesis look for operations on these stores that come to something else than they should."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(partial(StoreMachine, homes), settings=how)  # type: ignore[arg-type]  # any callable that makes one


class MachineTests(Conformance):
    def test_any_operations_in_any_order(self, home: Home) -> None:
        run_machine([home], examples=self.examples)
