"""Handles of an engine by node: each is here, given back, or told of once, whoever comes in between; and no node knows of them."""

from __future__ import annotations

import dis
import gc
import itertools
import random
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sessiontree import Node, NodeHandles, Session, SessionStore, handles
from tests.test_store import in_threads
from tests.test_tree import node_print


def new_session(name: str = "s") -> Session:
    return SessionStore.in_memory().create(name, scheme="text@hf5")


def a_node(session: Session | None = None, *tokens: int) -> Node:
    """A node that nobody but the caller holds."""
    session = session or new_session()
    node = session.append(session.root, tokens or (1, 2))
    session.drop(node)
    return node


# --- what it promises ---------------------------------------------------------------------------------------------------


def test_a_handle_is_found_again_replaced_and_given_back() -> None:
    session, table = new_session(), NodeHandles[str]()
    node, other = (session.append(session.root, [number]) for number in (1, 2))
    assert (table.get(node), table.pop(node), len(table), bool(table)) == (None, None, 0, True)
    assert table.set(node, "pages 1") is None
    assert table.set(other, "pages 2") is None
    assert (table.get(node), table.get(other), len(table)) == ("pages 1", "pages 2", 2)
    assert table.set(node, "pages 3") == "pages 1", "what is replaced is the caller's again"
    assert table.set(node, table.get(node) or "") is None, "the same one again replaces nothing"
    assert table.pop(node) == "pages 3"
    assert (table.get(node), table.pop(node), len(table), table.gone()) == (None, None, 1, [])
    assert repr(table) == "<NodeHandles of 1 nodes>"


@pytest.mark.parametrize("call", [NodeHandles.get, NodeHandles.pop, lambda table, node: table.set(node, 1)])
@pytest.mark.parametrize("wrong", [None, bytes(32), "node", new_session()])
def test_handles_are_of_nodes(call: Callable[..., object], wrong: object) -> None:
    with pytest.raises(TypeError, match="Node"):
        call(NodeHandles[int](), wrong)


def test_none_is_no_handle() -> None:
    node, table = a_node(), NodeHandles[Any]()
    table.set(node, 0)
    with pytest.raises(TypeError):
        table.set(node, None)
    assert table.get(node) == 0


def test_what_nobody_holds_is_told_of_once() -> None:
    session, table = new_session(), NodeHandles[str]()
    node, kept = a_node(session, 1), a_node(session, 2)
    table.set(node, "pages")
    table.set(kept, "others")
    assert table.gone() == []
    node_id, gone = node.id, weakref.ref(node)
    del node
    assert gone() is None, "the table keeps no node alive"
    assert len(table) == 2, "here until it is told of"
    assert table.gone() == [(node_id, "pages")]
    assert (table.gone(), len(table), table.get(kept)) == ([], 1, "others")


@pytest.mark.parametrize("how", ["drop", "close", "close store", "let go", "drop session"])
def test_nodes_go_with_what_held_them(how: str) -> None:
    store, table = SessionStore.in_memory(), NodeHandles[int]()
    session: Session | None = store.create("s", scheme="text@hf5")
    assert session is not None
    tip = session.append(session.append(session.root, [1]), [2])
    ids = [node.id for node in tip.path()[1:]]
    for number, node in enumerate(tip.path()[1:]):
        table.set(node, number)
    if how == "drop":
        session.drop(ids[0])
    elif how == "close":
        session.close()
    elif how == "close store":
        store.close()
    elif how == "drop session":
        store.drop("s")
    assert table.gone() == [], "somebody holds the tip, and with it its path"
    if how != "drop":
        session = None
    if how == "let go":
        del store
    del node, tip
    gc.collect()
    assert sorted(table.gone()) == sorted(zip(ids, range(2), strict=True))


def test_a_reader_keeps_the_handle_of_what_was_dropped() -> None:
    """Its KV is still right for whoever reads there."""
    session, table = new_session(), NodeHandles[int]()
    reader = session.append(session.append(session.root, [1]), [2])
    above = reader.path()[1].id
    for node in reader.path()[1:]:
        table.set(node, node.depth)
    del node
    session.drop(above)
    assert table.gone() == []
    ids = [node.id for node in reader.path()[1:]]
    del reader
    assert sorted(table.gone()) == sorted([(ids[0], 1), (ids[1], 2)])


def test_the_table_may_go_before_its_nodes() -> None:
    session = new_session()
    node, table = session.append(session.root, [1]), NodeHandles[int]()
    table.set(node, 1)
    gone = weakref.ref(node)
    del table
    session.drop(node)
    del node
    assert gone() is None


# --- equal nodes ----------------------------------------------------------------------------------------------------------


def twins() -> tuple[Node, Node]:
    """Equal nodes that are two objects, each held by the caller alone."""
    one, two = a_node(new_session("a")), a_node(new_session("b"))
    assert one == two
    assert one is not two
    return one, two


def test_equal_nodes_share_a_slot() -> None:
    one, two = twins()
    table = NodeHandles[str]()
    table.set(one, "pages")
    assert table.get(two) == "pages", "equal ids are equal content, in the same namespace, of the same model"
    assert table.set(two, "again") == "pages", "whoever prefills it twice gets one of them back"
    assert (table.get(one), len(table)) == ("again", 1)
    assert table.pop(one) == "again"
    assert table.get(two) is None


@pytest.mark.parametrize("found_by", ["get", "set"])
def test_a_slot_stays_while_any_object_that_found_it_lives(found_by: str) -> None:
    one, two = twins()
    table = NodeHandles[str]()
    table.set(one, "pages")
    assert (table.get(two) if found_by == "get" else table.set(two, "pages")) in ("pages", None)
    del one
    assert table.gone() == []
    assert table.get(two) == "pages"
    node_id = two.id
    del two
    assert table.gone() == [(node_id, "pages")]


def test_an_object_that_never_asked_does_not_keep_a_slot() -> None:
    one, two = twins()
    table = NodeHandles[str]()
    table.set(one, "pages")
    del one
    assert table.gone() == [(two.id, "pages")]
    assert table.get(two) is None


def test_a_node_that_is_read_again_before_the_step_finds_its_slot() -> None:
    one, two = twins()
    table = NodeHandles[str]()
    table.set(one, "pages")
    del one
    assert table.get(two) == "pages"
    assert (table.gone(), table.get(two)) == ([], "pages")


def test_many_objects_one_after_the_other_leave_nothing_behind() -> None:
    table, session = NodeHandles[int](), new_session()
    node = a_node(session, 5)
    table.set(node, 1)
    for _ in range(200):
        again = a_node(session, 5)
        assert again is not node
        assert table.get(again) == 1
        node = again
        assert len(table._slots[node.id].objects) <= 2
    del again
    assert table.gone() == []
    assert len(table._dead) == 0
    del node
    assert [handle for _, handle in table.gone()] == [1]


def test_nodes_on_disk_are_held_by_who_uses_them(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme="text@hf5")
        ids = [session.append(session.root, [number]).id for number in range(9)]
    table = NodeHandles[str]()
    with SessionStore.open(tmp_path / "store") as store, SessionStore.open(tmp_path / "store", read_only=True) as reader:
        session = store.get("s")
        node = session.node(ids[0])
        table.set(node, "pages")
        again = reader.get("s").node(ids[0])
        assert table.get(again) == "pages", "another store's object of the same node"
        del node
        for node_id in ids[1:]:
            session.node(node_id)  # a few of the last are kept, whoever holds them
        assert table.gone() == []
        del again
        for node_id in ids[1:]:
            reader.get("s").node(node_id)
        assert table.gone() == [(ids[0], "pages")]
        assert table.get(session.node(ids[0])) is None, "read once more, with no KV"


def test_c66_eviction_is_told_and_changes_nothing(tmp_path: Path) -> None:
    table = NodeHandles[str]()
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme="text@hf5")
        node, held = (session.append(session.root, [number], metadata={"n": number}) for number in (1, 2))
        for each in (node, held):
            table.set(each, "pages")
        node_id, before = node.id, [node_print(each) for each in (node, held)]
        del node, each
        store.evict()
        assert table.gone() == [(node_id, "pages")], "what somebody holds stays, and so does its handle"
        assert table.get(held) == "pages"
        again = session.node(node_id)
        assert [node_print(each) for each in (again, held)] == before
        assert table.get(again) is None


# --- C66: what an engine does with its KV never changes a node --------------------------------------------------------------


def test_c66_handles_never_change_a_node() -> None:
    """sgl-project/sglang#27024: state of a session that owned its KV locked the engine up."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    table = NodeHandles[list[int]]()
    tip = session.append(session.append(session.root, [1, 2], metadata={"a": 1}), [3])
    before = [node_print(node) for node in session.tree], session.pins
    for node in tip.path():
        table.set(node, [node.depth])
        session.pin(node)  # the engine pins its pages too; that is between the engine and its pages
    for node in tip.path():
        (table.get(node) or []).append(9)
        session.unpin(node)
    assert table.pop(tip) == [2, 9]
    for node in tip.path():
        table.set(node, [])
    child = session.append(tip, [4])  # evicted, pinned, or neither: history goes on
    session.drop(child)
    assert ([node_print(node) for node in session.tree], session.pins) == before
    assert not any("handle" in name or "kv" in name for name in (*dir(tip), *dir(session)))


# --- at every place where something can come in between ---------------------------------------------------------------------

#: Behind these the interpreter looks whether a signal has come; so a handler runs there or nowhere. (Python 3.11 makes some calls
#: in PRECALL, and then leaves CALL out.)
CHECKED = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME", "PRECALL"}
UNDER_TEST = handles.__file__


@contextmanager
def coming_in(at: int, handler: Callable[[], object]) -> Iterator[list[bool]]:
    """Run ``handler`` at the ``at``-th place inside the module where a signal handler can run."""
    hit: list[bool] = []
    left, inside = at, False
    names: dict[Any, dict[int, str]] = {}
    last: dict[FrameType, int] = {}

    def opcode(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left, inside
        if inside or event != "opcode":
            return opcode
        code = names.get(frame.f_code) or {found.offset: found.opname for found in dis.get_instructions(frame.f_code)}
        names[frame.f_code] = code
        before, last[frame] = code.get(last.get(frame, -1), ""), frame.f_lasti
        if before in CHECKED and (before, code[frame.f_lasti]) != ("PRECALL", "CALL") and not hit:
            if not left:
                hit.append(True)
                inside = True
                try:
                    handler()
                finally:
                    inside = False
            left -= 1
        return opcode

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != UNDER_TEST or inside:
            return None
        frame.f_trace_opcodes = True
        return opcode

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # from 3.12 on it takes one frame that has it before the trace is set
    sys.settrace(call)
    try:
        yield hit
    finally:
        sys.settrace(before)
        last.clear()  # frames hold what their calls were given


class Engine:
    """A table, two equal nodes and another one; what was set, and what came back."""

    def __init__(self) -> None:
        self.table = NodeHandles[str]()
        self.one, self.two = twins()
        self.nodes: list[Node] = [a_node(new_session(), 9)]
        self.late: list[Node] = [a_node(new_session(), 8)]
        self.set: list[str] = []
        self.back: list[str] = []
        self.told: list[tuple[bytes, str]] = []
        for node in (self.one, self.nodes[0], self.late[0]):
            self.put(node, f"first {node.token_ids.tolist()}")

    def put(self, node: Node, handle: str) -> None:
        self.set.append(handle)
        replaced = self.table.set(node, handle)
        if replaced is not None:
            self.back.append(replaced)

    def take(self, node: Node) -> None:
        handle = self.table.pop(node)
        if handle is not None:
            self.back.append(handle)

    def step(self) -> None:
        self.told += self.table.gone()

    def die(self) -> None:
        self.nodes.clear()

    def die_and_step(self) -> None:
        self.die()
        self.step()

    def step_and_die_late(self) -> None:
        self.step()
        self.late.clear()

    def die_and_put(self) -> None:
        self.die()
        self.put(a_node(new_session(), 9), f"set {len(self.set)}")

    def operations(self) -> dict[str, Callable[[], object]]:
        return {
            "set": lambda: self.put(self.one, f"set {len(self.set)}"),
            "set the equal": lambda: self.put(self.two, f"set {len(self.set)}"),
            "get": lambda: self.table.get(self.two),
            "pop": lambda: self.take(self.one),
            "gone": self.step,
            "die": self.die,
            "die and gone": self.die_and_step,
            "die and set": self.die_and_put,
            "gone and die": self.step_and_die_late,
        }

    def check(self) -> None:
        """Every handle is in one place."""
        here = [slot.handle for slot in self.table._slots.values()]
        assert Counter(self.set) == Counter(here) + Counter(self.back) + Counter(handle for _, handle in self.told)
        assert len(self.table) == len(here)
        self.nodes.clear()
        self.late.clear()
        del self.one, self.two
        self.told += self.table.gone()
        assert Counter(self.set) == Counter(self.back) + Counter(handle for _, handle in self.told), (
            "and in the end nothing is here"
        )
        assert len(self.table) == 0


NAMES = tuple(Engine().operations())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", NAMES)
def test_another_call_at_every_place_of_a_call(name: str, other: str) -> None:
    for at in itertools.count():
        engine = Engine()
        operations = engine.operations()
        with coming_in(at, operations[other]) as hit:
            operations[name]()
        engine.check()
        if not hit:
            break
    assert at > 0 or name == "die", "there are places"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "die"])
def test_an_exception_at_every_place_of_a_call(name: str) -> None:
    """At worst what that very call was to give back is lost; nothing comes twice, and the table goes on."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for at in itertools.count():
        engine = Engine()
        with suppress(KeyboardInterrupt), coming_in(at, interrupt) as hit:
            engine.operations()[name]()
        engine.step()
        engine.put(engine.one, "last")
        assert engine.table.get(engine.two) == "last"
        del engine.one, engine.two
        engine.nodes.clear()
        engine.late.clear()
        engine.step()
        told = Counter(engine.back) + Counter(handle for _, handle in engine.told)
        assert not told - Counter(engine.set), "nothing comes twice"
        assert sum((Counter(engine.set) - told).values()) <= 2
        assert len(engine.table) == 0
        if not hit:
            break
    assert at > 0


def test_finalizers_only_leave_word() -> None:
    """A node dies while another thread holds the table's lock: it does not wait, and runs nothing."""
    table, node = NodeHandles[int](), a_node()
    table.set(node, 1)
    left = [node]
    del node
    with table._lock:
        done = threading.Thread(target=left.clear)
        done.start()
        done.join(10)
        assert not done.is_alive()
    assert [handle for _, handle in table.gone()] == [1]


def test_a_signal_handler_uses_the_table_it_interrupts() -> None:
    engine = Engine()
    rng = random.Random(5)
    operations = list(engine.operations().values())
    count = 0

    def handler(*_: object) -> None:
        nonlocal count
        count += 1
        rng.choice(operations)()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        while count < 200:
            rng.choice(operations)()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    engine.check()


def test_threads_get_every_handle_once() -> None:
    table = NodeHandles[tuple[int, int]]()
    session = new_session()
    shared = [session.append(session.root, [number]) for number in range(4)]
    back: list[list[tuple[int, int]]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        rng = random.Random(number)
        for step in range(150):
            node = rng.choice(shared) if rng.random() < 0.5 else a_node(new_session(), rng.randrange(3))
            replaced = table.set(node, (number, step))
            if replaced is not None:
                back[number].append(replaced)
            table.get(rng.choice(shared))
            if rng.random() < 0.2 and (popped := table.pop(rng.choice(shared))) is not None:
                back[number].append(popped)
            del node
            if rng.random() < 0.3:
                back[number] += [handle for _, handle in table.gone()]

    in_threads(6, work)
    session.drop(*shared)
    shared.clear()
    gc.collect()
    everything = Counter(handle for of_thread in back for handle in of_thread) + Counter(handle for _, handle in table.gone())
    assert everything == Counter((number, step) for number in range(6) for step in range(150))
    assert len(table) == 0


# --- any calls in any order -------------------------------------------------------------------------------------------------


class Handles(RuleBasedStateMachine):
    """Beside a model: which objects live, and by which of them each slot was set or found."""

    def __init__(self) -> None:
        super().__init__()
        self.table = NodeHandles[int]()
        self.count = itertools.count()
        self.objects: list[Node] = []
        self.known: dict[bytes, set[int]] = {}  # numbers of the objects that keep a slot
        self.numbers: dict[int, int] = {}  # by id() of an object that lives
        self.handles: dict[bytes, int] = {}
        self.ended: set[bytes] = set()  # slots of which no object lives, not told of yet

    def node(self, pick: int) -> Node:
        return self.objects[pick % len(self.objects)]

    def number(self, node: Node) -> int:
        return self.numbers[id(node)]

    @rule(content=st.integers(0, 3))
    def read(self, content: int) -> None:
        node = a_node(new_session(), content)
        self.objects.append(node)
        self.numbers[id(node)] = next(self.count)

    @precondition(lambda self: self.objects)
    @rule(pick=st.integers(0, 99))
    def set(self, pick: int) -> None:
        node, handle = self.node(pick), next(self.count)
        assert self.table.set(node, handle) == self.handles.get(node.id)
        self.handles[node.id] = handle
        self.known.setdefault(node.id, set()).add(self.number(node))
        self.ended.discard(node.id)

    @precondition(lambda self: self.objects)
    @rule(pick=st.integers(0, 99))
    def get(self, pick: int) -> None:
        node = self.node(pick)
        assert self.table.get(node) == self.handles.get(node.id)
        if node.id in self.handles:
            self.known[node.id].add(self.number(node))
            self.ended.discard(node.id)

    @precondition(lambda self: self.objects)
    @rule(pick=st.integers(0, 99))
    def pop(self, pick: int) -> None:
        node = self.node(pick)
        assert self.table.pop(node) == self.handles.pop(node.id, None)
        self.known.pop(node.id, None)
        self.ended.discard(node.id)

    @precondition(lambda self: self.objects)
    @rule(pick=st.integers(0, 99))
    def die(self, pick: int) -> None:
        node = self.objects.pop(pick % len(self.objects))
        number = self.numbers.pop(id(node))
        keeping = self.known.get(node.id, set())
        if number in keeping:
            keeping.discard(number)
            if not keeping:
                self.ended.add(node.id)

    @rule()
    def gone(self) -> None:
        told = self.table.gone()
        assert sorted(told) == sorted((node_id, self.handles.pop(node_id)) for node_id in self.ended)
        for node_id in self.ended:
            del self.known[node_id]
        self.ended.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.table) == len(self.handles)


TestHandles = Handles.TestCase
TestHandles.settings = settings(max_examples=60, stateful_step_count=40)
