"""What threads see of each other where sessions are opened, closed, expired and dropped, and where changes go to disk.

As ``test_publication.py``, with the code itself as the oracle: whatever two operations do to each other, what both return and what
is there afterwards, in memory and on the disk, is what it would be had one of them come after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from sessiontree import Draft, Evicted, Head, Node, Recorded, Session, SessionStore, SessionTreeError
from sessiontree.compaction import GcReport
from tests.disk import Disk
from tests.disk_model import let_go, open_on, outline, reopened
from tests.interleaving import Run, at_every_place, seen_disk, seen_locks

__all__ = ["seen_disk", "seen_locks"]
pytestmark = pytest.mark.usefixtures("seen_disk")


class Home:
    """A store with one session: a path of two turns with a head, a leaf beside them, a draft, and an idle time of 10."""

    def __init__(self, where: str) -> None:
        self.disk = Disk()
        self.where = where
        options: dict[str, Any] = {"idle_ttl": 10}
        self.store = SessionStore.in_memory(**options) if where == "memory" else open_on(self.disk, durability=where, **options)
        self.session = self.store.create("s", scheme="text@hf5")
        self.one = self.session.append(self.session.root, [1, 2])
        self.two = self.session.append(self.one, [3])
        self.leaf = self.session.append(self.one, [9])
        self.head = self.session.set_head("main", self.one)
        cold = self.store.create("cold", scheme="text@hf5")
        cold.append(cold.root, [1])
        del cold
        self.drafts: list[Draft] = []
        if where != "memory":
            self.store.flush()
        self.store.tick(0)
        self.store.tick(9)
        self.told: list[tuple[str, Any]] = []
        self.seen: list[Any] = []

    def draft(self) -> Draft:
        """One that is open, whose request will be committed."""
        draft = self.session.draft(self.two, key="request")
        draft.extend([7, 8])
        self.drafts.append(draft)
        self.store._fresh.clear()  # the session is as idle as it was
        return draft

    def do(self, name: str) -> None:
        try:
            told: Any = plain(OPERATIONS[name](self))
        except SessionTreeError as error:
            told = type(error).__name__
            if (actual := getattr(error, "actual", None)) is not None:
                told = told, plain(actual)
        self.told.append((name, told))

    def state(self) -> Any:
        """All there is."""
        session = self.session
        kept = self.store.usage().sessions, session.closed, outline(session.tree), session.pins, len(session._drafts())
        if self.where != "memory" and not self.store._closed:
            self.store.flush()
        return kept, self.on_disk()

    def on_disk(self) -> Any:
        if self.where == "memory":
            return None
        with reopened(self.disk) as store:
            return {name: (outline(store.get(name).tree), store.get(name).pins) for name in store.sessions()}


def plain(result: Any) -> Any:
    """What was returned, as something that two runs can be compared by."""
    match result:
        case Node():
            return result.id
        case Head():
            return result.node.id, result.version
        case Session():
            return result.id, result.incarnation
        case GcReport() | Evicted():
            return None
        case Recorded():
            return result.prompt.id, result.completion.id, result.reused_tokens
    return result


def _commit(home: Home) -> Node:
    return home.drafts[0].commit()


OPERATIONS: dict[str, Callable[[Home], Any]] = {
    "append": lambda h: h.session.append(h.two, [4]),
    "append to the leaf": lambda h: h.session.append(h.leaf, [5]),
    "append elsewhere": lambda h: h.session.append(h.one, [6]),
    "commit": _commit,
    "record": lambda h: h.session.record([1, 2, 3], [10], key="r"),
    "truncate": lambda h: h.session.truncate(h.two, 1),
    "replace": lambda h: h.session.replace(h.two, [11], head="main", expected=h.head),
    "set_head": lambda h: h.session.set_head("main", h.two, expected=h.head),
    "set_head to the leaf": lambda h: h.session.set_head("main", h.leaf, expected=h.head),
    "drop_head": lambda h: h.session.drop_head("main"),
    "pin the leaf": lambda h: h.session.pin(h.leaf),
    "draft at the leaf": lambda h: h.drafts.append(h.session.draft(h.leaf)),
    "drop": lambda h: h.session.drop(h.leaf),
    "close": lambda h: h.session.close(),
    "tick": lambda h: h.store.tick(18),
    "get": lambda h: h.store.get("s"),
    "create": lambda h: h.store.create("t", scheme="text@hf5"),
    "fork": lambda h: h.store.fork(h.session, h.leaf, "t"),
    "drop the session": lambda h: h.store.drop("s"),
    "gc": lambda h: h.store.gc(recent=1),
    "flush": lambda h: h.store.flush(),
    "evict": lambda h: h.store.evict(),
    "get the cold": lambda h: tuple(node.id for node in h.store.get("cold").tree),
    "append to the cold": lambda h: h.store.get("cold").append(h.store.get("cold").root, [2]),
    "drop the cold": lambda h: h.store.drop("cold"),
}


@cache
def one_after_the_other(where: str, drafted: bool, *names: str) -> Any:
    home = Home(where)
    if drafted:
        home.draft()
    for name in names:
        home.do(name)
    found = sorted(home.told, key=repr), home.state()
    let_go(home.store)
    return found


def two(where: str, first: str, second: str, step: int = 1) -> int:
    """Stop the first at each of its opcodes, run the second there, and see that it is as if one had come after the other."""
    drafted = "commit" in (first, second)
    orders = [one_after_the_other(where, drafted, *names) for names in ((first, second), (second, first))]

    def make() -> Run:
        home = Home(where)
        if drafted:
            home.draft()

        def check() -> None:
            found = sorted(home.told, key=repr), home.state()
            assert found in orders, f"{found}\nis neither\n{orders[0]}\nnor\n{orders[1]}"
            let_go(home.store)

        return Run(partial(home.do, first), partial(home.do, second), check)

    return at_every_place(make, step=step)


#: What publishes something on its way to the disk, or takes it away.
PUBLISHING = ("append", "commit", "record", "replace", "set_head", "drop", "close", "tick", "flush", "gc", "evict")


def look(home: Home) -> None:
    """All that can be seen without waiting for anybody; under "commit" with what the disk has at that moment."""
    session = home.session
    heads = {name: session.head(name) for name in session.heads}
    tree = session.tree  # after them, so that it has where they are
    nodes = tuple(tree)
    seen = {node.id for node in nodes}
    assert all(node.parent is None or node.parent.id in seen for node in nodes)
    assert home.one.id in seen
    assert [tree.node(node.id) for node in nodes] == list(nodes)
    assert set(tree.children(home.one)) == {node for node in nodes if node.parent == home.one}
    assert all(head.node.id in seen for head in heads.values())
    for node in nodes:
        found = tree.longest_prefix(node.input_ids())
        assert (found.length, found.node.stop) == (node.stop, node.stop)
    durable = home.disk.copy() if home.where == "commit" else None  # the scheduler lets nobody in between
    home.seen.append((seen, {name: plain(head) for name, head in heads.items()}, durable))


def check_seen(home: Home) -> None:
    """What was seen stays, but for what is dropped, and was durable where it had to be."""
    for seen, heads, durable in home.seen:
        if durable is None:
            continue
        with reopened(durable) as store:
            session = store.get("s")
            gone = seen - {node.id for node in home.session.tree}
            assert seen - gone <= {node.id for node in session.tree}
            assert all(session.head(name).version >= version for name, (_, version) in heads.items())


@pytest.mark.parametrize("where", ["memory", "group", "commit"])
@pytest.mark.parametrize("name", PUBLISHING)
def test_readers_of_a_store_at_every_place_of_an_operation(name: str, where: str) -> None:
    """They wait for nobody. Under "commit" they see nothing that a crash at that moment would take away."""
    drafted = name == "commit"
    after = one_after_the_other(where, drafted, name)

    def make() -> Run:
        home = Home(where)
        if drafted:
            home.draft()

        def check() -> None:
            check_seen(home)
            assert (sorted(home.told, key=repr), home.state()) == after
            let_go(home.store)

        return Run(partial(home.do, name), partial(look, home), check)

    waits = name == "record"  # which looks up a history too: one adds to the trie at a time
    assert at_every_place(make, may_wait=(True, waits), step=(401 if name == "gc" else 101) if where != "memory" else 5) > 0


LIFE = [
    *(("evict", other) for other in ("append", "commit", "close", "tick", "drop", "fork", "gc", "evict")),
    *(("evict", other) for other in ("get the cold", "append to the cold", "drop the cold", "drop the session")),
    *((other, "evict") for other in ("append", "commit", "set_head", "close", "tick", "drop", "gc")),
    *((other, "evict") for other in ("get the cold", "append to the cold", "drop the cold")),
    ("append", "close"),
    ("close", "commit"),
    ("commit", "close"),
    ("tick", "append"),
    ("append", "tick"),
    ("tick", "commit"),
    ("commit", "tick"),
    ("tick", "close"),
    ("drop", "append to the leaf"),
    ("append to the leaf", "drop"),
    ("drop", "set_head to the leaf"),
    ("set_head to the leaf", "drop"),
    ("drop", "pin the leaf"),
    ("draft at the leaf", "drop"),
    ("drop", "draft at the leaf"),
    ("drop the session", "append"),
    ("append", "drop the session"),
    ("drop the session", "commit"),
    ("drop the session", "fork"),
    ("fork", "drop"),
    ("create", "fork"),
    ("gc", "append"),
    ("append", "gc"),
    ("gc", "commit"),
    ("gc", "pin the leaf"),
    ("record", "gc"),
    ("record", "drop"),
    ("set_head", "set_head to the leaf"),
    ("replace", "set_head"),
    ("drop_head", "set_head"),
    ("append", "append elsewhere"),
    ("append", "append"),
    ("commit", "append"),
    ("record", "append"),
    ("truncate", "append elsewhere"),
    ("flush", "append"),
    ("append", "flush"),
]


@pytest.mark.parametrize(("first", "second"), [pair for pair in LIFE if "flush" not in pair])
def test_two_operations_in_memory_are_as_one_after_the_other(first: str, second: str) -> None:
    assert two("memory", first, second, step=3) > 2


@pytest.mark.parametrize("where", ["group", "commit"])
@pytest.mark.parametrize(("first", "second"), LIFE)
def test_two_operations_on_disk_are_as_one_after_the_other(where: str, first: str, second: str) -> None:
    assert two(where, first, second, step=401 if "gc" in (first, second) else 101) > 0


#: gc goes through sessions one by one, and leaves alone what was opened or closed meanwhile.
ATOMIC = [name for name in OPERATIONS if name != "gc"]


@pytest.mark.soak
@pytest.mark.parametrize("where", ["memory", "group", "commit"])
@pytest.mark.parametrize(("first", "second"), sorted(set(itertools.product(ATOMIC, repeat=2)) - set(LIFE)))
def test_any_two_operations_are_as_one_after_the_other(where: str, first: str, second: str) -> None:
    if {first, second} in ({"get", "tick"}, {"drop the session", "tick"}):
        pytest.skip("a session may be closed for its idleness as it is found: who writes to it is told")
    if first == second == "commit":
        pytest.skip("a draft has one owner")
    assert two(where, first, second, step=7) >= 0
