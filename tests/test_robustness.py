"""What hostile code in the same process can do without breaking a session: coming in between, interrupting, forking, lying."""

from __future__ import annotations

import copy
import gc
import io
import linecache
import os
import pickle
import signal
import sys
import time
import traceback
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import CodeType, FrameType
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pyrsistent import PMap, pmap

from engine_bridge import request_inputs, to_transformers
from sessiontree import (
    Draft,
    Edit,
    ExternalPositions,
    Head,
    LimitExceeded,
    MediaItem,
    Namespace,
    Node,
    OutOfRange,
    PositionError,
    PositionLimitExceeded,
    PositionState,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    Unsupported,
    extend_drafts,
    media_identity,
)
from sessiontree.index import NodeIndex
from sessiontree.positions import scheme
from sessiontree.tokens import Extent
from tests.test_tree import IMAGE_PAD, identity, image, refused, tree_print, vl

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
HUGE = 10**5000  # Python refuses to write it out: a message that tries is a ValueError
Made = list[tuple[Node, list[int]]]


def text_session(name: str = "s", **options: Any) -> Session:
    return SessionStore.in_memory().create(name, **{"scheme": "text@hf5", **options})


def index_of(call: Callable[[], int]) -> Any:
    """Something that runs ``call`` when it is taken as an int."""

    class Index:
        def __index__(self) -> int:
            return call()

    return Index()


def check(session: Session, made: Iterable[tuple[Node, Sequence[int]]] = ()) -> None:
    """The session is one consistent tree, and every node of ``made`` is in it with these tokens on its path."""
    tree = session.tree
    nodes = list(tree)
    ids = {node.id for node in nodes}
    assert len(tree) == len(nodes) == len(ids)
    for node, tokens in made:
        assert node.id in ids
        assert session.node(node.id) == node
        assert node.input_ids().tolist() == list(tokens)
    children: dict[bytes, list[Node]] = {node.id: [] for node in nodes}
    for node in nodes:
        assert node in tree
        assert node.positions()[0].tolist() == list(range(node.stop))
        if node.parent is not None:
            children[node.parent.id].append(node)
            assert node.input_ids(0, node.start).tobytes() == node.parent.input_ids().tobytes()
    for node in nodes:
        assert bounded(partial(session.children, node)) == tuple(children[node.id])
    assert session.leaves() == tuple(node for node in nodes if not children[node.id])


def bounded(call: Callable[[], Any], events: int = 300_000) -> Any:
    """What ``call`` returns; a call that does not come to an end fails."""
    left = events

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise AssertionError(f"no end after {events} events")

    sys.setprofile(count)
    try:
        return call()
    finally:
        sys.setprofile(None)


def put_in(found: list[Any], call: Callable[[], object]) -> None:
    found.append(call())


@contextmanager
def coming_in(at: int, action: Callable[[], object]) -> Iterator[list[bool]]:
    """Run ``action`` once inside the package, at the ``at``-th place where the interpreter would run a signal handler.

    Those places are the beginning of a Python call and the end of a C call. The list that is given is true once it ran.
    """
    ran: list[bool] = []
    left = at

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return") or not str(frame.f_globals.get("__name__")).startswith("sessiontree"):
            return
        if not left:
            sys.setprofile(None)
            ran.append(True)
            action()
        left -= 1

    sys.setprofile(profile)
    try:
        yield ran
    finally:
        sys.setprofile(None)


@contextmanager
def interrupted(at: int, codes: Iterable[CodeType]) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt at the ``at``-th line that is run of ``codes``, and swallow it here.

    Not where a with block ends, nor at a bare ``try:``. No interrupt comes there, and an exception of a trace function would pass
    by the exit of the block.
    """
    hit: list[bool] = []
    entered: set[tuple[FrameType, int]] = set()
    left, codes = at, set(codes)

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "line":
            place = (frame, frame.f_lineno)
            if place in entered:
                return line
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if source == "try:":
                return line
            if source.startswith("with "):
                entered.add(place)
            if not left:
                hit.append(True)
                raise KeyboardInterrupt
            left -= 1
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code in codes else None)
    try:
        with suppress(KeyboardInterrupt):
            yield hit
    finally:
        sys.settrace(before)


@contextmanager
def alarms(handler: Callable[[], object], seconds: float = 0.002) -> Iterator[None]:
    """Run ``handler`` on this thread every ``seconds``."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- coming in between: signal handlers, finalizers, user code inside a call ----------------------------------------------


def test_a_signal_handler_writes_to_the_session_it_interrupts() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    made: Made = []
    versions: list[int] = []
    handled = 0

    busy = False

    def handler() -> None:
        nonlocal handled, busy
        if busy:
            return  # it takes longer than the signals are apart
        busy = True
        handled += 1
        made.append((session.append(prompt, [2, handled]), [1, 2, handled]))
        versions.append(session.set_head("signal", prompt).version)
        busy = False

    with alarms(handler):
        end = time.monotonic() + 1.0
        turn = 0
        while time.monotonic() < end and turn < 20_000:
            turn += 1
            made.append((session.append(prompt, [3, turn]), [1, 3, turn]))
            draft = session.draft(prompt)
            draft.extend([4])
            made.append((draft.commit(), [1, 4]))
            versions.append(session.set_head("main", made[-1][0]).version)
    assert handled > 20
    assert len({node.id for node, _ in made}) == len(made)
    assert len(set(versions)) == len(versions)
    assert session.head("main").node == made[-1][0] or session.heads["main"].token_ids.tolist() == [4]
    in_tree = {node.id: node for node in session.tree}
    assert len(in_tree) == len(session.tree) == len(made) + 2
    for node, tokens in made:
        assert in_tree[node.id] is node
        assert node.input_ids().tolist() == tokens
    assert bounded(lambda: session.children(prompt), 10_000_000) == tuple(session.tree)[2:]


def operations(session: Session, parent: Node) -> dict[str, Callable[[], Node | None]]:
    """Calls that make a node of known content, or only read."""

    def commit() -> Node:
        draft = session.draft(parent, key="main's")
        draft.extend([21, 22])
        return draft.commit()

    def head() -> None:
        assert session.set_head("main", parent) == session.head("main")

    return {
        "append": lambda: session.append(parent, [20], metadata={"a": [1]}),
        "append with a key": lambda: session.append(parent, [20], key="main's"),
        "commit": commit,
        "set_head": head,
        "drop_head": lambda: session.drop_head("there"),
        "truncate": lambda: session.truncate(parent, 2),
        "drop_last": lambda: session.drop_last(parent, 1),
        "rewrite": lambda: session.rewrite(parent, [(1, 2, [9, 9])]),
        "replace": lambda: session.replace(parent, [30], head="replaced"),
        "children": lambda: (session.children(parent), None)[1],
    }


@pytest.mark.parametrize("what", sorted(operations(text_session(), text_session().root)))
def test_whatever_comes_in_between_is_kept(what: str) -> None:
    places = 0
    while True:
        session = text_session()
        prompt = session.append(session.root, [1, 2, 3])
        session.set_head("there", prompt)
        made: Made = [(prompt, [1, 2, 3])]
        made += [(session.append(prompt, [4, number]), [1, 2, 3, 4, number]) for number in range(3)]
        versions = [session.head("there").version]

        def action(session: Session = session, prompt: Node = prompt, made: Made = made, versions: list[int] = versions) -> None:
            made.append((session.append(prompt, [11]), [1, 2, 3, 11]))
            made.append((session.append(made[-1][0], [12], key="its"), [1, 2, 3, 11, 12]))
            versions.append(session.set_head("its", made[-1][0]).version)
            session.children(prompt)

        with coming_in(places, action) as ran:
            node = operations(session, prompt)[what]()
        if not ran:
            break
        if node is not None:
            made.append((node, node.input_ids().tolist()))
        versions += [head.version for name, head in session.tree.heads.items() if name in ("main", "replaced")]
        check(session, made)
        assert len(set(versions)) == len(versions)
        assert session.head("its").version == versions[1]
        assert ("there" in session.heads) == (what != "drop_head")
        if what == "replace":
            assert session.head("replaced").node == node
        places += 1
    assert places > 3


def test_drafts_that_come_in_between_have_keys_of_their_own() -> None:
    places = 0
    while True:
        session = text_session()
        prompt = session.append(session.root, [1])
        drafts: list[Draft] = []
        with coming_in(places, partial(put_in, drafts, partial(session.draft, prompt))) as ran:
            drafts.append(session.draft(prompt))
        if not ran:
            break
        for draft in drafts:
            draft.extend([7])
        assert len({draft.commit().id for draft in drafts}) == 2, f"place {places}"
        places += 1
    assert places > 3


def test_sessions_that_are_opened_in_between() -> None:
    places = 0
    while True:
        store = SessionStore.in_memory()
        opened: list[Session] = []
        with coming_in(places, partial(put_in, opened, partial(store.create, "b", scheme="text@hf5"))) as ran:
            opened.append(store.create("a", scheme="text@hf5"))
        if not ran:
            break
        assert len({session.incarnation for session in opened}) == 2, f"place {places}"
        assert sorted(store.sessions()) == ["a", "b"]
        places += 1
    assert places > 3


def test_reading_children_comes_in_between_reading_children() -> None:
    places = 0
    while True:
        session = text_session()
        prompt = session.append(session.root, [1])
        for number in range(6):
            session.append(prompt, [number])
        seen: list[tuple[Node, ...]] = []
        with coming_in(places, partial(put_in, seen, partial(session.children, prompt))) as ran:
            session._tree._index._see_children()  # the walk along the links is bounded, below
        if not ran:
            break
        assert bounded(partial(session.children, prompt)) == seen[0]
        check(session)
        places += 1
    assert places > 3


def test_edits_that_write_while_they_are_read() -> None:
    session = text_session()
    prompt = session.append(session.root, [1, 2, 3])
    draft = session.draft(prompt)
    draft.extend([5, 6])
    made: Made = []

    def edits() -> Iterator[Edit]:
        made.append((draft.commit(), [1, 2, 3, 5, 6]))
        made.append((session.append(prompt, [7]), [1, 2, 3, 7]))
        session.set_head("h", prompt)
        yield Edit(0, 1, [9])

    made.append((session.rewrite(prompt, edits()), [9, 2, 3]))
    check(session, made)
    assert session.head("h").node == prompt
    assert draft.closed


@pytest.mark.parametrize("what", ["append", "replace", "draft", "rewrite", "media", "truncate", "drop_last", "commit"])
def test_an_int_that_appends_while_it_is_taken(what: str) -> None:
    session = text_session()
    prompt = session.append(session.root, [1, 2, 3])
    draft = session.draft(prompt)
    draft.extend([5, 6])
    made: Made = [(prompt, [1, 2, 3])]

    def write() -> int:
        number = len(made)
        made.append((session.append(prompt, [40, number]), [1, 2, 3, 40, number]))
        session.set_head(f"h{number}", prompt)
        return 2

    number = index_of(write)

    def media() -> Iterator[MediaItem]:
        write()
        yield from ()

    def committed_draft() -> Node:
        draft.extend([number])
        return draft.commit()

    calls: dict[str, Callable[[], Node]] = {
        "append": lambda: session.append(prompt, [number]),
        "replace": lambda: session.replace(prompt, [number], head="main", media=media()),
        "draft": committed_draft,
        "rewrite": lambda: session.rewrite(prompt, [(0, number, [number])]),
        "media": lambda: session.append(prompt, [2], media=media()),
        "truncate": lambda: session.truncate(prompt, number),
        "drop_last": lambda: session.drop_last(prompt, number),
        "commit": lambda: draft.commit(length=number),
    }
    expected = {
        "append": [1, 2, 3, 2],
        "replace": [2],
        "draft": [1, 2, 3, 5, 6, 2],
        "rewrite": [2, 3],
        "media": [1, 2, 3, 2],
        "truncate": [1, 2],
        "drop_last": [1],
        "commit": [1, 2, 3, 5, 6],
    }
    node = bounded(calls[what])
    made.append((node, expected[what]))
    check(session, made)
    assert len(made) > 2
    assert {name for name in session.heads if name != "main"} == {f"h{at}" for at in range(1, len(made) - 1)}


def test_finalizers_that_append() -> None:
    class Cyclic:
        def __init__(self) -> None:
            self.me = self

    session = text_session()
    prompt = session.append(session.root, [1])
    made: Made = []
    references: set[Any] = set()

    def finalize(reference: Any) -> None:
        references.discard(reference)
        if len(made) < 4_000:
            tokens = [5, len(made)]
            made.append((session.append(prompt, tokens), [1, *tokens]))

    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for turn in range(3_000):
            references.add(weakref.ref(Cyclic(), finalize))
            made.append((session.append(prompt, [6, turn], metadata={"a": [{}]}), [1, 6, turn]))
    finally:
        gc.set_threshold(*thresholds)
    by_id = {node.id: node for node in session.tree}
    assert len(made) > 3_100
    assert len(by_id) == len(session.tree)
    for node, tokens in made:
        assert by_id[node.id] is node
        assert node.input_ids().tolist() == tokens


# --- exceptions at every line -------------------------------------------------------------------------------------------

INTERRUPTED: dict[str, Any] = {
    "SessionTree._attach_alone": SessionTree._attach_alone,
    "SessionTree._attach_all": SessionTree._attach_all,
    "NodeIndex.put": NodeIndex.put,
    "NodeIndex.find_child": NodeIndex.find_child,
    "Extent.__init__": Extent.__init__,
    "Extent.append": Extent.append,
    "Extent.read": Extent.read,
    "layer": NodeIndex.layer,
    "NodeIndex._see_children": NodeIndex._see_children,
    "Session._attach": Session._attach,
    "Session._swap": Session._swap,
    "Session.draft": Session.draft,
    "Draft.commit": Draft.commit,
}
LONG = np.arange(5_000, dtype=np.int32)


def use(session: Session, made: Made) -> None:
    """A bit of everything that writes. Doing it again makes the same nodes; each is put in ``made`` once it was returned."""

    def put(parent: Node, tokens: Any, **options: Any) -> Node:
        node = session.append(parent, tokens, **options)
        made.append((node, [*parent.input_ids().tolist(), *map(int, tokens)]))
        return node

    prompt = put(session.root, [1, 2, 3])
    reply = put(prompt, [4, 4, 4])  # in place
    session.children(prompt)
    long = put(reply, LONG)  # in a larger arena
    other = put(prompt, [5])  # on an extent of its own
    put(other, [6] * 40)
    put(prompt, [7, 7], key="k")
    value = session.tree
    above, what_if = value.append(reply, [8, 8])  # in a layer
    higher, _ = above.append(what_if, [8])
    again, second = above.append(what_if, [9])  # in a layer on that
    assert second.input_ids().tolist() == [1, 2, 3, 4, 4, 4, 8, 8, 9]
    assert [len(tree) - len(value) for tree in (above, higher, again)] == [1, 2, 2]
    assert [node in again for node in (long, what_if, second)] == [True] * 3
    draft = session.draft(prompt, key="d")
    draft.extend([10, 11])
    made.append((draft.commit(), [1, 2, 3, 10, 11]))
    made.append((session.truncate(reply, 4), [1, 2, 3, 4]))
    made.append((session.rewrite(reply, [(1, 2, [9])]), [1, 9, 3, 4, 4, 4]))
    session.set_head("h", reply)
    put(prompt, [12])
    assert prompt in session.tree
    session.children(prompt)


@pytest.mark.parametrize("other_first", [False, True], ids=["again", "other first"])
@pytest.mark.parametrize("what", sorted(INTERRUPTED))
def test_an_interrupt_at_any_line_leaves_the_session_right(what: str, other_first: bool) -> None:
    """Afterwards the same content is given again, at once or behind other content."""
    codes = [INTERRUPTED[what].__code__]
    clean: Made = []
    session = text_session()
    use(session, clean)
    check(session, clean)
    nodes_of_a_clean_run = {node.id for node in session.tree}
    sizes = {len(node._extent.buffer) for node, _ in clean} - {0}
    lines = 0
    while True:
        session = text_session()
        made: Made = []
        with interrupted(lines, codes) as hit:
            use(session, made)
        if not hit:
            break
        check(session, made)
        foreign = [bytes(size) for size in sizes for _ in range(4)]
        others: Made = []
        if other_first:
            for parent, path in [(session.root, []), *made]:
                others.append((session.append(parent, [99]), [*path, 99]))
        use(session, made)
        check(session, [*made, *others])
        expected = nodes_of_a_clean_run | {node.id for node, _ in others}
        assert {node.id for node in session.tree} == expected, f"line {lines}"
        fresh = session.append(made[0][0], [0x41414141] * 10)
        deep = session.append(fresh, [0x42424242] * 3_000)
        check(
            session, [*made, (fresh, [1, 2, 3, *[0x41414141] * 10]), (deep, [1, 2, 3, *[0x41414141] * 10, *[0x42424242] * 3_000])]
        )
        assert all(block.count(0) == len(block) for block in foreign), f"line {lines}"
        lines += 1 if SOAK else 3
    assert lines


def test_an_interrupted_session_does_not_stay_slow() -> None:
    """Whatever an interrupt left behind costs one layer, not one for each append."""
    lines = 0
    while True:
        session = text_session()
        prompt = session.append(session.root, [1])
        with interrupted(lines, [SessionTree._attach_alone.__code__, Session._attach.__code__]) as hit:
            session.append(prompt, [2])
        if not hit:
            break
        for number in range(60):
            session.append(prompt, [3, number])
        tree = session._tree
        assert len(tree._index.layers_upward(len(tree))) <= 3, f"line {lines}"
        lines += 1
    assert lines


# --- fork ---------------------------------------------------------------------------------------------------------------


def forked(work: Callable[[], None], seconds: float = 6.0) -> int | None:
    """The exit status of a child that does ``work``; None if it had to be killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads; this is one
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            gc.disable()  # nothing of pytest's is to be finalized here
            work()
            status = 0
        except BaseException:
            traceback.print_exc()  # nobody else will say
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def test_a_forked_child_reads_and_writes() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    prompt = session.append(session.root, [1])
    kept = [session.append(prompt, [2, number]) for number in range(50)]
    stop = Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            number = 0
            while not stop.is_set() and number < 20_000:
                number += 1
                node = session.append(prompt, [3, number % 50, *[4] * 300])
                session.rewrite(node, [(1, 2, [number])])
                session.children(prompt)
                session.set_head("h", node)
                store.create("t", scheme="text@hf5").close()
        except BaseException as error:
            errors.append(error)

    def child() -> None:
        children = session.children(prompt)
        assert list(children[:50]) == kept
        assert set(children) >= set(kept)
        assert set(session.leaves()) >= set(kept)
        assert [node.input_ids().tolist() for node in kept] == [[1, 2, number] for number in range(50)]
        node = session.append(prompt, [2**30, 78])
        assert node.input_ids().tolist() == [1, 2**30, 78]
        assert session.children(prompt)[-1] == node
        draft = session.draft(node)
        draft.extend([79])
        reply = draft.commit()
        assert session.children(node) == (reply,)
        assert session.set_head("child", node) == session.head("child")
        assert session.node(node.id) is node
        session.tree.append(node, [5])
        other = store.create("u", scheme="text@hf5")
        assert other.append(other.root, [1]).stop == 1
        store.fork(session, node, "v")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        exits = []
        for number in range(20):
            time.sleep(0.001 + number % 4 * 0.001)
            exits.append(forked(child))
            if exits[-1] is None:
                break  # each would take its whole deadline
    finally:
        stop.set()
        thread.join(5)
        sys.setswitchinterval(interval)
    assert not errors
    assert exits == [0] * 20
    assert not [node for node in session.tree if 2**30 in node.token_ids[:1]]
    assert "child" not in session.heads
    assert set(store.sessions()) <= {"s", "t"}


# --- arguments are converted once -----------------------------------------------------------------------------------------


def test_unsigned_lengths_do_not_wrap() -> None:
    session = text_session()
    long = session.append(session.root, range(300))
    draft = session.draft(long)
    draft.extend([1, 2, 3, 4, 5])
    length: Any = np.uint64(0)
    assert len(draft.commit(length=length, tail_policy="drop_last")) == 0
    three: Any = np.uint8(3)
    assert session.drop_last(long, three).stop == 297
    assert session.truncate(long, np.uint8(200)) == session.truncate(long, 200)  # type: ignore[arg-type]
    for prefix in (np.uint8(200), np.int8(100), np.uint16(299)):
        given = to_transformers(long, prefix)  # type: ignore[arg-type]
        assert given["attention_mask"].shape == (1, 300)
        assert given["input_ids"].shape == given["position_ids"].shape == (1, 300 - int(prefix))
        assert given["input_ids"][0].tolist() == list(range(int(prefix), 300))


def test_an_array_that_changes_after_the_call_changes_nothing() -> None:
    limit: Any = np.array(10)
    reserve: Any = np.array(2)
    session = text_session(max_tokens=limit, reserve_output=reserve)
    prompt = session.append(session.root, [1] * 8)
    length: Any = np.array(5)
    cut = session.truncate(prompt, length)
    limit[...], reserve[...], length[...] = 1_000, 0, 7
    assert (cut.links[0].reused_tokens, cut.stop) == (5, 5)
    assert (type(cut.links[0].reused_tokens), session.max_tokens, session.reserve_output) == (int, 10, 2)
    assert session.draft(prompt).room == 2
    with pytest.raises(LimitExceeded):
        session.append(prompt, [1])
    assert type(session.max_tokens) is int


def test_arguments_that_are_only_an_index() -> None:
    session = text_session(max_tokens=index_of(lambda: 10))
    assert session.max_tokens == 10
    prompt = session.append(session.root, [1])
    draft = session.draft(prompt)
    draft.extend([1, 2, 3, 4])
    draft.set_state(b"at 4")
    draft.rollback(index_of(lambda: 2))
    assert (draft.token_ids.tolist(), draft.state) == ([1, 2], None)
    assert session.truncate(prompt, index_of(lambda: 0)) is session.root


def test_a_rollback_that_cannot_be_changes_nothing() -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1]))
    draft.extend([1, 2])
    draft.set_state(b"at 2")
    draft.extend([3, 4])
    draft.set_state(b"at 4")

    def fail() -> NoReturn:
        raise RuntimeError("no number")

    lengths: Any = (index_of(fail), 2.0, "2", True, -1, 5, HUGE, None)
    for length in lengths:
        with pytest.raises((RuntimeError, TypeError, OutOfRange)):
            draft.rollback(length)
        assert (draft.token_ids.tolist(), draft.state) == ([1, 2, 3, 4], b"at 4")


def test_numbers_that_change_between_two_looks() -> None:
    session = text_session()
    prompt = session.append(session.root, [1, 2, 3, 4])
    looks: list[int] = []

    def changing() -> int:
        looks.append(1)
        return 2 if len(looks) == 1 else 100

    draft = session.draft(prompt)
    draft.extend([5, 6, 7])
    assert draft.commit(length=index_of(changing)).token_ids.tolist() == [5, 6]
    assert looks == [1]

    class Liar(int):
        def __sub__(self, other: object) -> int:
            return 3

        __rsub__ = __add__ = __radd__ = __sub__

        def __le__(self, other: object) -> bool:
            return True

        __ge__ = __gt__ = __lt__ = __le__

        def __index__(self) -> int:
            return 3

    below = session.append(prompt, [50, 60, 70])
    assert session.truncate(below, Liar(2)).input_ids().tolist() == [1, 2]
    assert session.truncate(below, Liar(5)).input_ids().tolist() == [1, 2, 3, 4, 50]
    with pytest.raises(OutOfRange):
        session.truncate(below, Liar(8))
    with pytest.raises(OutOfRange):
        session.rewrite(below, [(Liar(8), Liar(9), [])])


# --- keys of drafts -------------------------------------------------------------------------------------------------------


def sample(session: Session, parent: Node, tokens: list[int], key: str | None = None) -> Node:
    draft = session.draft(parent, key=key)
    draft.extend(tokens)
    return draft.commit()


@pytest.mark.parametrize("tokens", [[5], [6]])
def test_own_keys_avoid_those_that_were_imported(tokens: list[int]) -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    taken = session.draft(prompt).key
    for how in ("append", "commit"):
        session = text_session()
        prompt = session.append(session.root, [1])
        first = session.append(prompt, [5], key=taken) if how == "append" else sample(session, prompt, [5], taken)
        second, third = sample(session, prompt, tokens), sample(session, prompt, tokens)
        assert session.children(prompt) == (first, second, third)
        assert len({node.key for node in (first, second, third)}) == 3


@pytest.mark.parametrize("tokens", [[5], [6]])
def test_own_keys_of_a_fork_avoid_those_on_its_path(tokens: list[int]) -> None:
    session = text_session("A")
    prompt = session.append(session.root, [1])
    reply = sample(session, prompt, [5])
    fork = SessionStore.in_memory().fork(session, reply, "A")
    other = sample(fork, prompt, tokens)
    assert fork.children(prompt) == (reply, other)
    assert len(fork.tree) == 4


@pytest.mark.parametrize("key", [0, False, b"", (), 0.0])
def test_a_drafts_key_is_text_or_none(key: Any) -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    refused(session, TypeError, lambda: session.draft(prompt, key=key))
    assert session.draft(prompt).key == text_session().draft(prompt.parent or prompt).key


# --- external positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("next_position", "room"), [(100, 0), (97, 3), (2, 98), (1, 98)])
def test_what_fits_a_draft_can_be_committed(next_position: int, room: int) -> None:
    session = text_session(scheme=scheme("text@hf5", max_position_limit=100))
    table = ExternalPositions([[0, 1]], next_position=next_position)
    prompt = session.append(session.root, [1, 2], positions=table)
    draft = session.draft(prompt)
    assert draft.room == room
    with pytest.raises(PositionLimitExceeded):
        draft.extend([3] * (room + 1))
    draft.extend([3] * room)
    assert draft.room == 0
    with pytest.raises(PositionLimitExceeded):
        draft.append(3)
    for mode in ("as_decoded", "as_replayed"):
        assert draft.positions(mode=mode).shape == (1, 2 + room)
        assert request_inputs(draft, mode=mode).positions.shape == (1, 2 + room)
    node = draft.commit()
    assert (len(node), node.positions(2).tolist()) == (room, [list(range(2, 2 + room))])
    assert node.positions(2, mode="as_replayed").tolist() == [list(range(next_position, next_position + room))]


def test_a_tables_max_position_is_judged_against_the_decoded_path() -> None:
    session = text_session()
    prompt = session.append(session.root, [1], positions=ExternalPositions([[0]], next_position=50))
    reply = sample(session, prompt, [2])
    assert (reply.positions().tolist(), reply.positions(mode="as_replayed").tolist()) == ([[0, 1]], [[0, 50]])
    node = session.append(reply, [3], positions=ExternalPositions([[4]], max_position=5))
    assert (node.position_state().max_position, node.mrope_position_delta) == (5, 3)
    refused(session, PositionError, lambda: session.append(reply, [3], positions=ExternalPositions([[0]], max_position=0)))


def test_an_empty_turn_has_no_positions() -> None:
    session = text_session()
    prompt = session.append(session.root, [1, 2])
    empty = np.zeros((1, 0), int)
    for table in (
        ExternalPositions(empty, next_position=77),
        ExternalPositions(empty, max_position=77),
        ExternalPositions(empty, 2, 1),
    ):
        refused(session, PositionError, partial(session.append, prompt, [], positions=table))
    plain = session.append(prompt, [])
    assert session.append(prompt, [], positions=ExternalPositions(empty)) is plain
    assert session.append(prompt, [], positions=empty) is plain
    other = text_session()
    first = other.append(other.append(other.root, [1, 2]), [], positions=empty)
    assert (first.id, first.next_position) == (plain.id, 2)


def test_equal_parameters_are_equal_schemes() -> None:
    def video(rate: Any) -> Any:
        return scheme("qwen2_5_vl@hf5", tokens_per_second=rate)

    for one, two in ((2, 2.0), (2, np.int16(2)), (2, np.float64(2.0)), (1.5, np.float64(1.5))):
        first, second = video(one), video(two)
        assert first == second
        assert hash(first) == hash(second)
        assert SessionTree(first).root.id == SessionTree(second).root.id
    assert video(2) != video(2.5)
    assert SessionTree(video(2)).root.id != SessionTree(video(2.5)).root.id


def test_transformers_takes_no_window_that_begins_between_the_spans_of_an_item() -> None:
    session = text_session(scheme=vl())
    item = MediaItem("image", bytes(32), [(0, 2), (5, 2)], (1, 4, 4))
    pad = IMAGE_PAD
    node = session.append(session.root, [pad, pad, 1, 2, 3, pad, pad, 4], media=[item], positions=np.tile(np.arange(8), (3, 1)))
    for prefix in (1, 2, 3, 4, 5, 6):
        with pytest.raises(Unsupported) as caught:
            to_transformers(node, prefix)
        assert (caught.value.prefix_len, caught.value.item) == (prefix, item)
    assert to_transformers(node)["mm_token_type_ids"].tolist() == [[1, 1, 0, 0, 0, 1, 1, 0]]
    assert to_transformers(node, 7)["mm_token_type_ids"].tolist() == [[0]]


def test_a_frame_that_float32_cannot_tell_from_the_limit() -> None:
    item = MediaItem("video", bytes(32), [(0, 2)], (2, 2, 2), float(2**23))
    for rule in ("hf5", "sglang", "vllm"):
        rules = scheme(f"qwen2_5_vl@{rule}", tokens_per_second=2, max_position_limit=2**24 + 2)
        assert rules.extend(rules.initial_state(), [1, 1], [item])[0][0].tolist() == [0, 2**24]
        # one less: the frame itself still fits, text after it does where the rule puts it close to the base
        rules = scheme(f"qwen2_5_vl@{rule}", tokens_per_second=2, max_position_limit=2**24 + 1)
        assert rules.extend(rules.initial_state(), [1, 1], [item])[0][0].tolist() == [0, 2**24]
        rules = scheme(f"qwen2_5_vl@{rule}", tokens_per_second=2, max_position_limit=2**24)
        with pytest.raises(PositionLimitExceeded):
            rules.extend(rules.initial_state(), [1, 1], [item])


# --- identities and files -------------------------------------------------------------------------------------------------


def test_identities_tell_structured_types_apart() -> None:
    dtypes: list[Any] = [
        [("a", "<i4")],
        [("b", "<i4")],
        [("b", "<f4")],
        [("a", "<i2"), ("b", "<i2")],
        [("a", "<i4", (1,))],
        "<i4",
        "V4",
    ]
    found = [media_identity("x", np.zeros(1, dtype)) for dtype in dtypes]
    found += [media_identity("x", np.array(["2020-01-01"], f"M8[{unit}]")) for unit in ("s", "ms", "D")]
    found += [media_identity("x", np.zeros(1, f"m8[{unit}]")) for unit in ("s", "ms")]
    found.append(media_identity("x", np.zeros(1, "<i8")))
    assert len(set(found)) == len(found)
    assert media_identity("x", np.zeros(1, [("a", "<i4")])) == media_identity("x", np.zeros(1, [("a", "<i4")]))


@pytest.mark.parametrize("kind", ["binary", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("text", "bytes", "string"))])
def test_a_file_is_no_content_and_stays_usable(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello")
    session = text_session()
    prompt = session.append(session.root, [1])
    draft = session.draft(prompt)
    calls: list[Callable[[Any], object]] = [
        lambda file: media_identity("image", file),
        lambda file: media_identity("image", [file]),
        lambda file: media_identity("image", b"", options={"file": file}),
        lambda file: session.append(prompt, [1], metadata={"file": file}),
        lambda file: session.append(prompt, [1], metadata={"files": [file]}),
        lambda file: session.append(prompt, [1], metadata=file),
        lambda file: session.append(prompt, file),
        draft.extend,
        lambda file: session.rewrite(prompt, [(0, 1, file)]),
        lambda file: session.append(prompt, [1], positions=file),
    ]
    for call in calls:
        opened: dict[str, Callable[[], Any]] = {
            "binary": lambda: path.open("rb"),
            "text": path.open,
            "bytes": lambda: io.BytesIO(b"hello"),
            "string": lambda: io.StringIO("hello"),
        }
        with opened[kind]() as file:
            error = refused(session, TypeError, partial(call, file))
            del error
            gc.collect()
            assert not file.closed
            assert file.read() in (b"hello", "hello")


class Untouchable(Sequence[int]):
    """Far more tokens than there is room for; looking at one of them fails."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a token was looked at")

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("a token was looked at")


@pytest.mark.parametrize("token_ids", [Untouchable(3 * 10**8), Untouchable(11), range(2**40)], ids=["many", "one more", "range"])
@pytest.mark.parametrize("what", ["append", "tree", "replace", "draft"])
def test_a_limit_is_checked_before_any_token(what: str, token_ids: Sequence[int]) -> None:
    session = text_session(max_tokens=10)
    prompt = session.append(session.root, [1])
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: session.append(prompt, token_ids),
        "tree": lambda: session.tree.append(prompt, token_ids),
        "replace": lambda: session.replace(prompt, token_ids, head="h"),
        "draft": lambda: session.draft(prompt).extend(token_ids),
    }
    refused(session, LimitExceeded, calls[what])


# --- layers ---------------------------------------------------------------------------------------------------------------


def test_layers_stay_few_when_old_values_are_appended_to() -> None:
    tree = SessionTree("text@hf5")
    tree, node = tree.append(tree.root, [1])
    versions: list[tuple[SessionTree, int, list[bytes]]] = []
    ids = [item.id for item in tree]
    for turn in range(2_000):
        tree.append(node, [9, 9, turn])  # a what-if, thrown away
        if turn % 100 == 0:
            what_if, side = tree.append(node, [8, turn])
            versions.append((what_if, len(ids) + 1, [*ids, side.id]))
        for _ in range(2):
            tree, node = tree.append(node, [turn])
            ids.append(node.id)
        if turn % 50 == 0:
            versions.append((tree, len(ids), list(ids)))
        assert len(tree._index.layers_upward(len(tree))) < 25
    for version, count, seen in versions:
        assert len(version) == count
        assert [item.id for item in version] == seen
        assert all(item in version for item in seen[:: max(1, count // 20)])
        assert seen[-1] in version
        assert (ids[-1] in version) == (seen[-1] == ids[-1])
        last = version.node(seen[-1])
        assert last.parent is not None
        assert last in version.children(last.parent)
    assert [item.id for item in tree] == ids
    assert tree.children(tree.node(ids[500])) == (tree.node(ids[501]),)


# --- locks ----------------------------------------------------------------------------------------------------------------


class CallingText(str):
    """Text whose reading runs something."""

    call: Callable[[], object]

    def isascii(self) -> bool:
        self.call()
        return str.isascii(self)


@pytest.mark.parametrize(
    "what",
    [
        "append, tokens",
        "append, media",
        "append, metadata",
        "append, role",
        "commit, length",
        "draft, metadata",
        "drop_last, count",
        "replace, media",
        "replace, metadata",
        "replace, tokens",
        "rewrite, edits",
        "truncate, length",
    ],
)
def test_user_code_inside_a_call_does_not_hold_the_session(what: str) -> None:
    """Code of the caller's that waits for another thread's append to the same session is not waited for by that append."""
    session = text_session()
    prompt = session.append(session.root, [1, 2, 3])
    draft = session.draft(prompt)
    draft.extend([5, 6])
    waited: list[bool] = []

    def wait() -> int:
        thread = Thread(target=lambda: session.append(prompt, [4, 4]), daemon=True)
        thread.start()
        thread.join(1.5)
        waited.append(not thread.is_alive())
        return 1

    class Calling(dict[str, Any]):
        def items(self) -> Any:
            wait()
            return super().items()

    def media() -> Iterator[MediaItem]:
        wait()
        yield from ()

    def edits() -> Iterator[Edit]:
        wait()
        yield Edit(0, 1, [9])

    role = CallingText("user")
    role.call = wait
    calls: dict[str, Callable[[], object]] = {
        "append, tokens": lambda: session.append(prompt, [index_of(wait)]),
        "append, media": lambda: session.append(prompt, [1], media=media()),
        "append, metadata": lambda: session.append(prompt, [1], metadata=Calling(a=1)),
        "append, role": lambda: session.append(prompt, [1], role=role),
        "commit, length": lambda: draft.commit(length=index_of(wait)),
        "draft, metadata": lambda: session.draft(prompt, metadata=Calling(a=1)),
        "drop_last, count": lambda: session.drop_last(prompt, index_of(wait)),
        "replace, media": lambda: session.replace(prompt, [1], head="h", media=media()),
        "replace, metadata": lambda: session.replace(prompt, [1], head="h", metadata=Calling(a=1)),
        "replace, tokens": lambda: session.replace(prompt, [index_of(wait)], head="h"),
        "rewrite, edits": lambda: session.rewrite(prompt, edits()),
        "truncate, length": lambda: session.truncate(prompt, index_of(wait)),
    }
    calls[what]()
    assert waited
    assert all(waited)
    check(session)


def test_readers_do_not_wait_for_a_writer() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    nodes = tuple(session.append(prompt, [number]) for number in range(5))
    head = session.set_head("h", prompt)
    read: list[Any] = []

    def reader() -> None:
        read.append(session.children(prompt))  # for the first time: it has links to make
        read.append(session.siblings(nodes[0]))
        read.append(session.leaves())
        read.append(session.node(prompt.id))
        read.append((session.head("h"), dict(session.heads)))
        read.append(len(session.tree))
        repr(session)

    with session._lock:
        thread = Thread(target=reader, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
    assert read == [nodes, nodes[1:], nodes, prompt, (head, {"h": prompt}), 7]


# --- forks of a session ---------------------------------------------------------------------------------------------------


def test_many_forks_that_are_used_by_id_cost_little() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.root
    for number in range(20_000):
        node = session.append(node, [number])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        forks = [store.fork(session, node, f"f{number}") for number in range(100)]
        made = [fork.append(node.id, [7]) for fork in forks]
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 2_000_000
    assert len({child.id for child in made}) == 1
    assert {len(fork.tree) for fork in forks} == {20_002}
    aside = session.append(node.ancestor(500), [9])  # not on the path that was forked
    assert aside.id not in forks[0].tree


def test_a_fork_finds_by_id_when_its_source_is_gone() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.root
    for number in range(300):
        node = session.append(node, [number])
    aside = session.append(node.ancestor(9), [1_000]).id
    fork = SessionStore.in_memory().fork(session, node, "f")
    unused = SessionStore.in_memory().fork(session, node, "g")
    assert fork.node(node.ancestor(10).id).depth == 10
    gone = weakref.ref(session)
    session.close()
    store.close()
    del session, store
    gc.collect()
    assert gone() is None
    for each in (fork, unused):
        for depth in (0, 1, 150, 300):
            assert each.node(node.ancestor(depth).id) is node.ancestor(depth)
            assert node.ancestor(depth).id in each.tree
        assert aside not in each.tree
        assert bytes(32) not in each.tree
        assert each.append(node.ancestor(150).id, [5]).input_ids().tolist() == [*range(150), 5]
        check(each)


def test_a_long_chain_of_forks_is_used_by_id() -> None:
    store = SessionStore.in_memory()
    session = store.create("f0", scheme="text@hf5")
    first = node = session.append(session.root, [1])
    for number in range(1, 2_000):
        session = store.fork(session, node, f"f{number}")
        node = session.append(node, [number])
    assert session.node(first.id) is first
    assert bytes(32) not in session.tree
    assert session.append(first.id, [5]).input_ids().tolist() == [1, 5]


# --- numbers too large to write out ---------------------------------------------------------------------------------------


def huge_calls() -> dict[str, Callable[[], object]]:
    session = text_session(scheme=vl())
    prompt = session.append(session.root, [1, 2, 3])
    draft = session.draft(prompt)
    rules = scheme("qwen2_5_vl@hf5", tokens_per_second=2)
    store = SessionStore.in_memory()
    large: Any = HUGE
    item = image("i", 0)

    def media(**changes: Any) -> MediaItem:
        given: dict[str, Any] = {"modality": "video", "identity": bytes(32), "spans": [(0, 4)], "grid_thw": (1, 4, 4)}
        return MediaItem(**{**given, **changes})

    def over_the_limit() -> None:
        limited = store.create("limited", scheme="text@hf5", max_tokens=HUGE, reserve_output=HUGE - 1)
        try:
            limited.append(limited.root, [1, 2])
        finally:
            limited.close()

    calls: dict[str, Callable[[], object]] = {
        "a token": lambda: session.append(prompt, [large]),
        "a token below 0": lambda: session.append(prompt, [-large]),
        "a token among others": lambda: session.append(prompt, (1, large, 2)),
        "a range": lambda: session.append(prompt, range(large, large + 2)),
        "a range below 0": lambda: session.append(prompt, range(-large, 5)),
        "a range with a step": lambda: session.append(prompt, range(0, 2 * large, large)),
        "an array of objects": lambda: session.append(prompt, np.array([large], object)),
        "a drafted token": lambda: draft.append(large),
        "drafted tokens": lambda: draft.extend([1, large]),
        "a batch": lambda: extend_drafts([draft], [large]),
        "a batch of runs": lambda: extend_drafts([draft], [[large]]),
        "rollback": lambda: draft.rollback(large),
        "commit": lambda: draft.commit(length=large),
        "a draft's window": lambda: draft.positions(large),
        "a draft's tokens": lambda: draft.input_ids(0, large),
        "a draft's media": lambda: draft.media_spans(large, large),
        "set_state": lambda: draft.set_state(large),
        "input_ids": lambda: prompt.input_ids(large),
        "input_ids below 0": lambda: prompt.input_ids(-large, large),
        "positions": lambda: prompt.positions(0, large),
        "media_spans": lambda: prompt.media_spans(large),
        "ancestor": lambda: prompt.ancestor(large),
        "ancestor below 0": lambda: prompt.ancestor(-large),
        "truncate": lambda: session.truncate(prompt, large),
        "drop_last": lambda: session.drop_last(prompt, large),
        "an edit": lambda: session.rewrite(prompt, [(large, large, [])]),
        "an edit's stop": lambda: session.rewrite(prompt, [(0, large, [])]),
        "an edit's tokens": lambda: session.rewrite(prompt, [(0, 1, [large])]),
        "replace": lambda: session.replace(prompt, [large], head="h"),
        "metadata": lambda: session.append(prompt, [1], metadata={"x": [large]}),
        "a metadata key": lambda: session.append(prompt, [1], metadata={large: 1}),
        "metadata's place": lambda: session.append(prompt, [1], metadata={"x": {large: object()}}),
        "a role": lambda: session.append(prompt, [1], role=large),
        "a key": lambda: session.append(prompt, [1], key=large),
        "positions of a turn": lambda: session.append(prompt, [1], positions=[[large]] * 3),
        "a next position": lambda: session.append(prompt, [1], positions=ExternalPositions([[3]] * 3, next_position=large)),
        "a max position": lambda: session.append(prompt, [1], positions=ExternalPositions([[3]] * 3, max_position=large)),
        "a next position below 0": lambda: ExternalPositions([[3]] * 3, next_position=-large),
        "a node": lambda: session.node(large),
        "children": lambda: session.children(large),
        "a head's name": lambda: session.set_head(large, prompt),
        "an expected head": lambda: session.set_head("h", prompt, expected=large),
        "an expected version": lambda: session.set_head("h", prompt, expected=Head(prompt, HUGE)),
        "fork": lambda: store.fork(session, large, "x"),
        "a session id": lambda: store.create(large, scheme="text@hf5"),
        "a namespace": lambda: store.create("n", scheme="text@hf5", namespace=Namespace(large)),
        "a namespace's name": lambda: store.create("n", scheme="text@hf5", namespace={large: "x"}),
        "reserve_output": lambda: store.create("r", scheme="text@hf5", max_tokens=5, reserve_output=HUGE),
        "reserve_output below 0": lambda: store.create("r", scheme="text@hf5", reserve_output=-HUGE),
        "max_tokens below 0": lambda: store.create("r", scheme="text@hf5", max_tokens=-HUGE),
        "max_tokens, exceeded": over_the_limit,
        "spatial_merge_size": lambda: scheme("qwen2_vl@hf5", spatial_merge_size=HUGE),
        "tokens_per_second": lambda: scheme("qwen2_5_vl@hf5", tokens_per_second=HUGE),
        "max_position_limit": lambda: scheme("text@hf5", max_position_limit=HUGE),
        "image_token_id": lambda: scheme("qwen2_vl@hf5", image_token_id=-HUGE),
        "a scheme's name": lambda: scheme(large),
        "a state": lambda: rules.extend(PositionState(HUGE, HUGE, HUGE), [1]),
        "a state to decode from": lambda: rules.decode(PositionState(HUGE, HUGE, HUGE), [1]),
        "a state before media": lambda: rules.extend(PositionState(HUGE, HUGE, HUGE), [1] * 4, [item]),
        "a scheme's tokens": lambda: rules.extend(rules.initial_state(), [large]),
        "a grid": lambda: media(grid_thw=(1, 4, HUGE)),
        "a grid below 0": lambda: media(grid_thw=(1, -HUGE, 4)),
        "a span": lambda: media(spans=[(0, HUGE)]),
        "a span's offset": lambda: media(spans=[(HUGE, 4)]),
        "spans that overlap": lambda: media(spans=[(0, 2), (1, HUGE)]),
        "with_spans": lambda: item.with_spans([(HUGE, 1)]),
        "placeholders_before": lambda: media(placeholders_before=HUGE),
        "audio_feature_length": lambda: media(audio_feature_length=HUGE),
        "target_sizes": lambda: media(target_sizes=[(HUGE, 1)]),
        "second_per_grid_ts": lambda: media(second_per_grid_ts=HUGE),
        "unfinished": lambda: media(unfinished=HUGE),
        "media content": lambda: media_identity("image", HUGE),
        "media content in a list": lambda: media_identity("image", [[HUGE]]),
        "media options": lambda: media_identity("image", b"", options={"a": HUGE}),
        "request_inputs": lambda: request_inputs(prompt, HUGE),
        "to_transformers": lambda: to_transformers(prompt, HUGE),
        "to_transformers below 0": lambda: to_transformers(prompt, -HUGE),
    }
    return calls


@pytest.mark.parametrize("what", list(huge_calls()))
def test_a_number_too_large_to_write_out(what: str) -> None:
    call = huge_calls()[what]
    with pytest.raises((SessionTreeError, TypeError)) as caught:
        call()
    assert len(str(caught.value)) < 1_000


# --- liars ------------------------------------------------------------------------------------------------------------------


def test_a_batch_whose_length_lies_is_taken_whole_or_not_at_all() -> None:
    class Two(list[Any]):
        def __len__(self) -> int:
            return 2

    class Empty(list[Any]):
        def __len__(self) -> int:
            return 0

    session = text_session()
    prompt = session.append(session.root, [1])
    batches: list[Any] = [
        Two([5]),
        Two([5, 6, 7]),
        Two([[5]]),
        Two([[5], [6], [7]]),
        Empty([5]),
        Empty([5, 6]),
        [Two([5]), Two([6])],
    ]
    for batch in batches:
        drafts = [session.draft(prompt), session.draft(prompt)]
        try:
            extend_drafts(drafts, batch)
        except (TypeError, SessionTreeError):
            assert [len(draft) for draft in drafts] == [0, 0]
        else:
            assert [draft.token_ids.tolist() for draft in drafts] == [[5], [6]]
    drafts = [session.draft(prompt), session.draft(prompt)]
    with pytest.raises(TypeError):
        extend_drafts(Two(drafts[:1]), [1, 2])
    assert [len(draft) for draft in drafts] == [0, 0]


def test_sequences_that_lie_or_change() -> None:
    class NoItems(list[int]):
        def __getitem__(self, at: Any) -> Any:
            raise IndexError("lied")

    class Changing(Sequence[int]):
        looks = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, at: Any) -> Any:
            if at >= 2:
                raise IndexError
            self.looks += 1
            return 2**40 if self.looks == 1 else 1

    session = text_session()
    prompt = session.append(session.root, [1])
    for token_ids in (NoItems([2**40]), Changing()):
        before = tree_print(session)
        with suppress(TypeError, SessionTreeError, IndexError):  # the last is the list's own
            assert session.append(prompt, token_ids).token_ids.max() < 2**31
            continue
        assert tree_print(session) == before


def wrong_calls() -> dict[str, Callable[[], object]]:
    session = text_session()
    prompt = session.append(session.root, [1])
    arrays: Any = np.array(["image", "video"])
    nothing: Any = []

    def meta(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    def media(**changes: Any) -> MediaItem:
        given: dict[str, Any] = {"modality": "video", "identity": bytes(32), "spans": [(0, 4)], "grid_thw": (1, 4, 4)}
        return MediaItem(**{**given, **changes})

    ragged: Any = [[1], [2, 3]]
    calls: dict[str, Callable[[], object]] = {
        "meta tensor": lambda: session.append(prompt, meta(3)),
        "meta tensor in a draft": lambda: session.draft(prompt).extend(meta(3)),
        "meta tensor in a batch": lambda: extend_drafts([session.draft(prompt)], meta(1)),
        "meta tensor in metadata": lambda: session.append(prompt, [1], metadata={"x": meta(3)}),
        "meta tensor of positions": lambda: session.append(prompt, [1], positions=meta(1, 1)),
        "meta tensor of media": lambda: media_identity("image", meta(3)),
        "meta tensor as a grid": lambda: media(grid_thw=meta(3)),
        "meta tensor as spans": lambda: media(spans=meta(1, 2)),
        "meta tensor as seconds": lambda: media(second_per_grid_ts=meta()),
        "sparse tensor": lambda: session.append(prompt, torch.tensor([[1, 2]]).to_sparse()),
        "ragged positions": lambda: session.append(prompt, [1], positions=ragged),
        "ragged external positions": lambda: ExternalPositions(ragged),
        "ragged tokens": lambda: session.append(prompt, ragged),
        "positions of text": lambda: session.append(prompt, [1], positions=[["a"]]),
        "positions as text": lambda: session.append(prompt, [1], positions="abc"),
        "seconds sNaN": lambda: media(second_per_grid_ts=Decimal("sNaN")),
        "seconds NaN": lambda: media(second_per_grid_ts=Decimal("NaN")),
        "seconds of text": lambda: media(second_per_grid_ts=np.array("x")),
        "seconds of bytes": lambda: media(second_per_grid_ts=bytearray(b"x")),
        "seconds, several": lambda: media(second_per_grid_ts=np.array([1.0, 2.0])),
        "modality of arrays": lambda: media(modality=arrays),
        "modality of a list": lambda: media(modality=[]),
        "a grid that is NaN": lambda: media(grid_thw=(1, 4, float("nan"))),
        "mode of arrays": lambda: prompt.positions(mode=arrays),
        "mode of a list": lambda: prompt.positions(mode=nothing),
        "a state's mode": lambda: prompt.position_state(arrays),
        "a draft's mode": lambda: session.draft(prompt).positions(mode=arrays),
        "a request's mode": lambda: request_inputs(prompt, mode=arrays),
        "transformers' mode": lambda: to_transformers(prompt, mode=arrays),
        "tail policy of arrays": lambda: session.draft(prompt).commit(tail_policy=arrays),
        "finish reason of arrays": lambda: session.draft(prompt).commit(arrays),
        "role of arrays": lambda: session.append(prompt, [1], role=arrays),
        "key of arrays": lambda: session.append(prompt, [1], key=arrays),
        "head of arrays": lambda: session.set_head(arrays, prompt),
        "expected arrays": lambda: session.set_head("h", prompt, expected=arrays),
        "a set of tokens": lambda: session.append(prompt, {1, 2}),  # type: ignore[arg-type]
    }
    return calls


@pytest.mark.parametrize("what", list(wrong_calls()))
def test_what_is_wrong_is_a_typed_error(what: str) -> None:
    with pytest.raises((SessionTreeError, TypeError)):
        wrong_calls()[what]()


@pytest.mark.parametrize("base", [MediaItem, Node, SessionTree, ExternalPositions])
def test_values_have_no_subclasses(base: type) -> None:
    with pytest.raises(TypeError):
        type("Evil", (base,), {})
    with pytest.raises(TypeError):
        type("Evil", (base,), {"__slots__": (), "spans": property(lambda self: ())})


class Pretender:
    """Says that it is a bool."""

    __class__ = bool  # type: ignore[assignment]


@pytest.mark.parametrize("spec", [bool, int, float, str, bytes, bytearray, dict, list, tuple, set, np.ndarray, np.int64])
def test_a_mock_in_metadata_is_refused_or_frozen(spec: type) -> None:
    session = text_session()
    mock = Mock(spec=spec)
    for value in (mock, [mock], {"y": mock}, {mock}, Pretender()):
        with suppress(TypeError):
            kept = session.append(session.root, [1], metadata={"x": value}).metadata["x"]
            assert all(type(entry) in (bool, int, float, str, bytes, np.ndarray, PMap) for entry in flat(kept))
            session = text_session()
    assert len(session.tree) == 1


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, PMap):
        value = tuple(value.values())
    if type(value) in (tuple, frozenset):
        for entry in value:
            yield from flat(entry)
    else:
        yield value


def test_maps_inside_sets_are_handed_out_as_copies() -> None:
    session = text_session()
    node = session.append(session.root, [7], metadata={"s": {pmap({"a": 1})}, "t": [{(pmap({"b": 2}),)}]})

    def inner() -> list[Any]:
        return [next(iter(node.metadata["s"])), next(iter(node.metadata["t"][0]))[0]]

    one, two = inner(), inner()
    assert [map_ is other for map_, other in zip(one, two, strict=True)] == [False, False]
    for map_ in one:
        map_._size = 99
    assert list(map(len, inner())) == [1, 1]
    assert list(map(dict, inner())) == [{"a": 1}, {"b": 2}]


def test_keys_that_are_the_same_text() -> None:
    class Key(str):
        __slots__ = ()
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other

    session = text_session()
    refused(session, TypeError, lambda: session.append(session.root, [8], metadata={Key("a"): 1, Key("a"): 2}))
    refused(session, TypeError, lambda: session.append(session.root, [8], metadata={"x": [{Key("a"): 1, Key("a"): 2}]}))
    assert dict(session.append(session.root, [8], metadata={Key("a"): 1}).metadata) == {"a": 1}


def test_an_identity_is_its_real_bytes() -> None:
    class Lying(bytes):
        def __bytes__(self) -> bytes:
            return b"short"

        def __len__(self) -> int:
            return 32

    real = identity("x")
    with suppress(TypeError, SessionTreeError):
        item = MediaItem("image", Lying(real), [(0, 4)], (1, 4, 4))
        assert type(item.identity) is bytes
        assert item.identity == real
    with pytest.raises((TypeError, OutOfRange)):
        MediaItem("image", Lying(b"abc"), [(0, 4)], (1, 4, 4))

    class Text(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    evil: Any = Text("evil")
    with pytest.raises(Unsupported):
        MediaItem(evil, real, [(0, 4)], (1, 4, 4))
    text: Any = Text("image")
    assert type(MediaItem(text, real, [(0, 4)], (1, 4, 4)).modality) is str


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_one_is_not_copied(call: Callable[[Any], object]) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    draft = session.draft(session.append(session.root, [1]))
    for thing in (session, store, draft):
        with pytest.raises(TypeError):
            call(thing)
    assert session.append(session.root, [1]) == draft.parent
    assert store.sessions() == ("s",)


def test_closed_sessions_leave_nothing() -> None:
    store = SessionStore.in_memory()

    def cycle(first: int, last: int) -> None:
        for number in range(first, last):
            session = store.create(f"session {number:032d}", scheme="text@hf5")
            prompt = session.append(session.root, [1, 2, 3])
            draft = session.draft(prompt)
            draft.extend([4])
            draft.commit()
            session.children(prompt)
            session.set_head("h", prompt)
            store.fork(session, prompt, f"fork {number}").close()
            session.close()

    cycle(0, 200)
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        cycle(200, 400)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        cycle(400, 1_400)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 30_000
    assert len(gc.get_objects()) - objects < 200
    assert store.sessions() == ()
    again = store.create("one more", scheme="text@hf5")
    assert again.incarnation > 2_800


def test_a_value_of_another_thread_leaves_the_sessions_index_alone() -> None:
    """Appending to `session.tree` never marks the index, nor clears the mark of a writer who is at it."""
    session = text_session()
    prompt = session.append(session.root, [1])
    index = session._tree._index
    index.busy = True  # as while a writer of the session is in the middle of an addition
    session.tree.append(prompt, [2])
    assert index.busy
    index.busy = False
    for number in range(50):
        session.tree.append(prompt, [3, number])
        session.append(prompt, [4, number])
    assert session._tree._index is index


def test_fork_in_a_handler_while_the_lock_is_held() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    seen: list[int | None] = []

    class Forking:
        def __index__(self) -> int:
            seen.append(forked(lambda: None))
            return 2

    def append() -> None:
        session.append(prompt, [5])

    with session._lock:
        status = forked(append)
    assert status == 0
    assert session.append(prompt, [Forking()]).token_ids.tolist() == [2]  # type: ignore[list-item]
    assert seen == [0]
    reader, writer = os.pipe()

    def child() -> None:
        with session._lock:
            if os.fork() == 0:
                session.append(prompt, [6])
                os.write(writer, b"y")
            else:
                os.wait()

    assert forked(child) == 0
    os.close(writer)
    assert os.read(reader, 1) == b"y"
    os.close(reader)
