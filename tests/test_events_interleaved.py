"""Two threads at every pair of places of what tells and reads events: as without a GIL, by the scheduler of interleaving."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import sessiontree
from sessiontree import SessionStore
from sessiontree.events import Event, Subscription
from tests import interleaving
from tests.interleaving import Run, at_every_place, at_every_two_places, seen_locks
from tests.test_events import Replica

__all__ = ["seen_locks"]

PACKAGE = Path(sessiontree.__file__).parent


@pytest.fixture(autouse=True)
def what_is_under_test(seen_locks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("events", "news", "session", "store")
    monkeypatch.setattr(interleaving, "UNDER_TEST", frozenset(str(PACKAGE / f"{name}.py") for name in names))


class World:
    """Two sessions, and two subscriptions: one that nobody reads until the end, and one that is read by whoever wants to."""

    def __init__(self) -> None:
        self.store = SessionStore.in_memory()
        self.calls = 0
        self.kept = self.store.subscribe()
        self.read = self.store.subscribe(notify=self.called)
        self.sessions = [self.store.create(name, scheme="text@hf5") for name in "ab"]
        self.found: list[Event] = []
        self.late: list[tuple[Subscription, set[bytes]]] = []

    def called(self) -> None:
        self.calls += 1

    def append(self, number: int) -> None:
        session = self.sessions[number]
        session.append(session.root, [number + 1])

    def move(self, number: int) -> None:
        session = self.sessions[number]
        session.set_head("main", session.root)

    def same(self, number: int) -> None:
        session = self.sessions[0]
        session.append(session.root, [7, number])

    def poll(self, number: int) -> None:
        self.found += self.read.poll()

    def few(self, number: int) -> None:
        self.found += self.read.poll(1)

    def wait(self, number: int) -> None:
        assert self.read.wait(0)

    def subscribe(self, number: int) -> None:
        late = self.store.subscribe()
        self.late.append((late, self.there()))

    def leave(self, number: int) -> None:
        self.store.subscribe().close()

    def close(self, number: int) -> None:
        self.sessions[1].close()

    def there(self) -> set[bytes]:
        return {node.id for session in self.sessions for node in session.tree}

    def check(self) -> None:
        assert not self.store._feed._inbox and not self.store._feed.due, "all was passed on, whoever did it"
        told = list(self.kept._queue)
        replica = Replica()
        found = self.kept.poll()
        assert len(told) == len(found)
        replica.take(found)
        replica.check(self.store)
        read_before = bool(self.found)
        assert self.calls in ((1, 2) if read_before else (1,))
        assert [*self.found, *self.read.poll()] == found
        for late, there in self.late:
            assert there | {event.node_id for event in late.poll()} >= self.there()


OPERATIONS: dict[str, Callable[[World, int], None]] = {
    "append": World.append,
    "move a head": World.move,
    "append to the same": World.same,
    "poll": World.poll,
    "poll one": World.few,
    "wait": World.wait,
    "subscribe": World.subscribe,
    "leave": World.leave,
    "close": World.close,
}
PAIRS = [
    ("append", "append"),
    ("append", "move a head"),
    ("append", "poll"),
    ("append", "subscribe"),
    ("append", "leave"),
    ("append", "close"),
    ("append", "wait"),
    ("append to the same", "append to the same"),
    ("append to the same", "poll one"),
    ("poll", "append"),
    ("poll", "poll"),
    ("poll one", "append"),
    ("subscribe", "append"),
    ("leave", "append"),
    ("close", "append"),
]


def run_of(first: str, second: str) -> Run:
    world = World()
    return Run(partial(OPERATIONS[first], world, 0), partial(OPERATIONS[second], world, 1 if first != "close" else 0), world.check)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_at_every_place_of_another(first: str, second: str) -> None:
    assert at_every_place(partial(run_of, first, second)) > 50


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_both_at_every_pair_of_places(first: str, second: str) -> None:
    assert at_every_two_places(partial(run_of, first, second)) > 100


@pytest.mark.parametrize("write", ["append", "set_head"])
def test_the_first_subscriber_misses_nothing(write: str) -> None:
    """Stopped anywhere in a write that began when nobody listened: it is seen by who looks after subscribing, or told."""

    def make() -> Run:
        store = SessionStore.in_memory()
        session = store.create("s", scheme="text@hf5")
        found: list[tuple[Subscription, bool]] = []

        def there() -> bool:
            return len(session.tree) == 2 if write == "append" else bool(session.heads)

        def subscribe() -> None:
            found.append((store.subscribe(), there()))

        def check() -> None:
            [(heard, seen)] = found
            assert there() and len(heard.poll()) in ((0, 1) if seen else (1,))

        first = partial(session.append, session.root, [1]) if write == "append" else partial(session.set_head, "a", session.root)
        return Run(first, subscribe, check)

    assert at_every_place(make) > 50
