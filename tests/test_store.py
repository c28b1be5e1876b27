"""Sessions and stores: lifecycle, incarnations, forks, heads, values that do not disturb, and many threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest

from sessiontree import (
    Head,
    HeadMoved,
    LimitExceeded,
    MediaSpanError,
    Namespace,
    NameTaken,
    Node,
    OutOfRange,
    Session,
    SessionExists,
    SessionStore,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    StoreFailed,
    UnknownHead,
    UnknownNode,
    UnknownScheme,
    UnknownSession,
)
from sessiontree.positions import scheme
from tests.test_tree import identity, image, node_print, refused, tree_print, vl

Call = Callable[[], object]


def new_session(name: str = "s", **options: Any) -> Session:
    return SessionStore.in_memory().create(name, **{"scheme": "text@hf5", **options})


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """``work(number)`` in ``count`` threads that start together; the first error is raised here."""
    barrier = Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(number,)) for number in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


# --- stores -------------------------------------------------------------------------------------------------------------


def test_a_session_is_what_it_was_created_with() -> None:
    with SessionStore.in_memory() as store:
        rule = vl()
        session = store.create("s", scheme=rule, namespace={"lora": "l"}, model_fingerprint="m", max_tokens=10, reserve_output=2)
        assert (session.id, session.incarnation, session.closed) == ("s", 1, False)
        assert session.scheme is rule
        assert (session.namespace, session.max_tokens, session.reserve_output) == (Namespace(lora="l"), 10, 2)
        assert session.root.model_fingerprint == "m"
        assert len(session.tree) == 1
        assert dict(session.heads) == {}
        assert store.get("s") is session
        assert store.sessions() == ("s",)
        assert "'s'" in repr(session)
        assert "1" in repr(store)
    assert new_session().max_tokens is None
    assert new_session().reserve_output == 0
    assert new_session(namespace="t").namespace == new_session(namespace=Namespace(tenant="t")).namespace == Namespace(tenant="t")


def test_ids_are_taken_while_their_session_is_open() -> None:
    store = SessionStore.in_memory()
    first = store.create("s", scheme="text@hf5")
    other = store.create("t", scheme="text@hf5")
    calls: list[Call] = [lambda: store.create("s", scheme="text@hf5"), lambda: store.fork(other, other.root, "s")]
    for call in calls:
        with pytest.raises(SessionExists) as caught:
            call()
        assert caught.value.session_id == "s"
    assert store.sessions() == ("s", "t")
    first.close()
    first.close()
    assert store.sessions() == ("t",)
    with pytest.raises(UnknownSession) as unknown:
        store.get("s")
    assert unknown.value.session_id == "s"
    again = store.create("s", scheme="text@hf5")
    assert (again.incarnation, store.get("s")) == (3, again)
    first.close()
    assert store.get("s") is again, "an old incarnation closes itself only"
    again.close()
    assert store.fork(other, other.root, "s").incarnation == 4
    assert other.incarnation == 2


@pytest.mark.parametrize(
    ("session_id", "error"),
    [("", OutOfRange), ("x" * 513, OutOfRange), (1, TypeError), (None, TypeError), (b"s", TypeError), ("\ud800", TypeError)],
)
def test_session_ids_that_are_refused(session_id: Any, error: type[Exception]) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    calls: list[Call] = [
        lambda: store.create(session_id, scheme="text@hf5"),
        lambda: store.fork(session, session.root, session_id),
    ]
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
    assert store.sessions() == ("s",)
    assert store.create("x" * 512, scheme="text@hf5").id == "x" * 512
    assert store.create("сессия", scheme="text@hf5").id == "сессия"


def test_a_create_that_fails_takes_no_id_and_no_incarnation() -> None:
    store = SessionStore.in_memory()
    wrong: Any = 1
    for error, options in (
        (UnknownScheme, {"scheme": "nope"}),
        (TypeError, {"scheme": wrong}),
        (TypeError, {"scheme": "text@hf5", "namespace": wrong}),
        (LimitExceeded, {"scheme": "text@hf5", "max_tokens": 1, "reserve_output": 2}),
    ):
        with pytest.raises(error):
            store.create("s", **options)
    assert store.sessions() == ()
    session = store.create("s", scheme="text@hf5")
    with pytest.raises(UnknownNode):
        store.fork(session, bytes(32), "f")
    assert store.sessions() == ("s",)
    assert session.incarnation == 1
    assert store.fork(session, session.root, "f").incarnation == 2


def test_a_closed_store_takes_no_calls() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.append(session.root, [1])
    store.close()
    store.close()
    for call in (
        lambda: store.create("t", scheme="text@hf5"),
        lambda: store.get("s"),
        store.sessions,
        lambda: store.fork(session, node, "f"),
    ):
        with pytest.raises(StoreClosed) as caught:
            call()
        assert isinstance(caught.value, StoreFailed)
    with pytest.raises(StaleSession):
        session.append(node, [2])
    assert node.input_ids().tolist() == [1]


WRITES: dict[str, Callable[[Session, Node], object]] = {
    "append": lambda session, node: session.append(node, [1]),
    "append what is there": lambda session, node: session.append(session.root, [5, 6]),
    "draft": lambda session, node: session.draft(node),
    "truncate": lambda session, node: session.truncate(node, 1),
    "drop_last": lambda session, node: session.drop_last(node, 1),
    "replace": lambda session, node: session.replace(node, [1], head="main"),
    "rewrite": lambda session, node: session.rewrite(node, [(0, 1, [9])]),
    "set_head": lambda session, node: session.set_head("main", node),
    "drop_head": lambda session, node: session.drop_head("main"),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_closed_session_is_read_only(what: str) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.append(session.root, [5, 6])
    session.set_head("main", node)
    with session:
        before = tree_print(session)
    assert session.closed
    error = refused(session, StaleSession, lambda: WRITES[what](session, node))
    assert (error.session_id, error.incarnation) == ("s", 1)
    assert tree_print(session) == before
    assert session.node(node.id) is node
    assert session.head("main").node is node
    assert session.children(session.root) == (node,)
    again = store.create("s", scheme="text@hf5")
    assert dict(again.heads) == {}
    assert len(again.tree) == 1
    assert WRITES["append"](again, again.root) is again.leaves()[0]


# --- heads --------------------------------------------------------------------------------------------------------------


def test_heads_of_a_session() -> None:
    session = new_session()
    a = session.append(session.root, [1])
    b = session.append(a, [2])
    first = session.set_head("main", a, expected=None)
    assert (session.head("main"), dict(session.heads)) == (first, {"main": a})
    refused(session, NameTaken, lambda: session.set_head("main", b, expected=None))
    second = session.set_head("main", b, expected=first)
    error = refused(session, HeadMoved, lambda: session.set_head("main", a, expected=first))
    assert error.actual == second == Head(b, second.version)
    third = session.set_head("main", a, expected=b)
    assert third.node == first.node
    refused(session, HeadMoved, lambda: session.set_head("main", b, expected=first))  # rewound to the same node: another version
    session.drop_head("main")
    refused(session, UnknownHead, lambda: session.head("main"))
    refused(session, UnknownHead, lambda: session.drop_head("main"))
    assert session.set_head("main", a).version > third.version
    refused(session, UnknownNode, lambda: session.set_head("x", bytes(32)))
    assert [node.id for node in session.tree] == [session.root.id, a.id, b.id], "a dropped head takes no node with it"


def test_heads_are_a_value() -> None:
    session = new_session()
    session.set_head("a", session.root)
    heads, tree = session.heads, session.tree
    session.set_head("b", session.root)
    assert list(heads) == list(tree.heads) == ["a"]
    assert sorted(session.heads) == ["a", "b"]


def test_one_of_many_threads_moves_a_head() -> None:
    session = new_session()
    start = session.append(session.root, [0])
    head = session.set_head("main", start)
    won: list[Node] = []
    lost: list[HeadMoved] = []

    def work(number: int) -> None:
        node = session.append(start, [number])
        try:
            session.set_head("main", node, expected=head)
            won.append(node)
        except HeadMoved as error:
            lost.append(error)

    in_threads(16, work)
    assert (len(won), len(lost)) == (1, 15)
    assert session.heads["main"] is won[0]
    assert {error.actual.node for error in lost} == {won[0]}
    assert len(session.children(start)) == 16, "appending is never contested"


def test_compare_and_set_counts_every_turn() -> None:
    session = new_session()
    session.set_head("main", session.root)

    def work(number: int) -> None:
        for step in range(20):
            while True:
                head = session.head("main")
                node = session.append(head.node, [number, step])
                try:
                    session.set_head("main", node, expected=head)
                    break
                except HeadMoved:
                    continue

    in_threads(8, work)
    tip = session.heads["main"]
    assert tip.depth == 160
    turns = [tuple(node.token_ids.tolist()) for node in tip.path()[1:]]
    assert sorted(turns) == sorted((number, step) for number in range(8) for step in range(20))
    for number in range(8):
        assert [step for owner, step in turns if owner == number] == list(range(20))


# --- threads ------------------------------------------------------------------------------------------------------------


def test_sixteen_threads_append_to_one_session() -> None:
    session = new_session()
    shared = session.append(session.root, [7])
    made: dict[int, list[Node]] = {}

    def work(number: int) -> None:
        nodes = [session.append(shared, [number, 0])]
        for step in range(1, 100):
            nodes.append(session.append(nodes[-1] if step % 3 else shared, [number, step]))
            assert session.node(nodes[-1].id) is nodes[-1]
        made[number] = nodes

    in_threads(16, work)
    nodes = [node for number in made for node in made[number]]
    assert len({node.id for node in nodes}) == 1600
    assert len(session.tree) == len(list(session.tree)) == 1602
    assert set(session.tree) == {session.root, shared, *nodes}
    assert len(session.children(shared)) == 16 * 34
    for number, own in made.items():
        for step, node in enumerate(own):
            assert node.token_ids.tolist() == [number, step]
            assert node.input_ids().tolist() == [7, *np.ravel([one.token_ids for one in node.path()[2:]]).tolist()]
            assert node.parent == (own[step - 1] if step % 3 else shared)
    assert session.children(shared) == tuple(node for node in session.tree if node.parent is shared), "in commit order"


def test_equal_content_from_many_threads_is_one_node() -> None:
    session = new_session()
    found: list[list[Node]] = []

    def work(number: int) -> None:
        node = session.root
        own = []
        for step in range(100):
            node = session.append(node, [step], metadata={"by": number}, key="k" if step % 2 else None)
            own.append(node)
        found.append(own)

    in_threads(16, work)
    assert len(session.tree) == 101
    for own in found:
        assert all(one is two for one, two in zip(own, found[0], strict=True))


def test_drafts_of_many_threads_are_siblings() -> None:
    session = new_session()
    prompt = session.append(session.root, [1, 2])
    nodes: list[Node] = []

    def work(number: int) -> None:
        for _ in range(20):
            draft = session.draft(prompt)
            draft.extend([5, 5])
            draft.append(number)
            nodes.append(draft.commit())

    in_threads(16, work)
    assert len({node.id for node in nodes}) == 320
    assert len({node.key for node in nodes}) == 320
    assert set(session.children(prompt)) == set(nodes)
    for node in nodes:
        assert node.input_ids(0, 4).tolist() == [1, 2, 5, 5]


def test_readers_beside_writers_see_whole_values() -> None:
    session = new_session()
    base = session.append(session.root, range(50))

    def work(number: int) -> None:
        node = base
        for step in range(150):
            if number % 2:
                node = session.append(node if step % 5 else base, [number, step])
            else:
                tree = session.tree
                nodes = list(tree)
                assert len(nodes) == len(tree)
                assert len(tree.children(base)) == sum(one.parent is base for one in nodes)
                assert nodes[-1].input_ids(0, 50).tolist() == list(range(50)) or nodes[-1] is base
                assert nodes[-1] in tree

    in_threads(8, work)
    assert len(session.tree) == 2 + 4 * 150


# --- forks --------------------------------------------------------------------------------------------------------------


def test_a_fork_holds_a_path_and_grows_apart() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=vl(), namespace="t", max_tokens=30, reserve_output=5)
    a = session.append(session.root, [1, 50, 50, 50, 50], media=[image("a", 1)])
    b = session.append(a, [2])
    c = session.append(a, [3])
    session.set_head("main", b)
    before = tree_print(session)
    fork = store.fork(session, b.id, "f")
    assert (fork.id, fork.incarnation, store.sessions()) == ("f", 2, ("s", "f"))
    assert (fork.namespace, fork.max_tokens, fork.reserve_output, fork.root) == (session.namespace, 30, 5, session.root)
    assert list(fork.tree) == [session.root, a, b]
    assert all(one is two for one, two in zip(fork.tree, b.path(), strict=True))
    assert dict(fork.heads) == {}
    assert fork.leaves() == (b,)
    assert fork.children(a) == (b,)
    refused(fork, UnknownNode, lambda: fork.append(c, [4]))
    refused(fork, UnknownNode, lambda: fork.node(c.id))
    d = fork.append(b, [5])
    e = session.append(b, [6])
    assert fork.append(a, [3]) == c, "equal content under an equal parent is an equal node"
    assert fork.append(a, [2]) is b
    assert tree_print(session)[1][: before[0]] == before[1]
    assert (d in session.tree, e in fork.tree) == (False, False)
    assert session.append(b, [5]) == d
    assert d.input_ids().tolist() == [1, 50, 50, 50, 50, 2, 5]
    assert d.media_spans()[0][0].identity == identity("a")
    refused(fork, LimitExceeded, lambda: fork.append(d, range(30)))
    session.close()
    assert fork.append(d, [7]).input_ids().tolist()[-3:] == [2, 5, 7]
    assert store.fork(session, c, "g").leaves() == (c,), "what was closed can still be read"


def test_rewound_turns_stay_out_of_a_fork() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    node = session.root
    for turn in (1, 2, 3, 4, 5):
        node = session.append(node, [turn])
    third = node.ancestor(3)
    other = session.append(third, [44])
    fork = store.fork(session, other, "f")
    assert [one.token_ids.tolist() for one in fork.tree] == [[], [1], [2], [3], [44]]
    assert other.input_ids().tolist() == [1, 2, 3, 44]


def test_forks_of_forks_with_their_own_drafts_and_edits() -> None:
    store = SessionStore.in_memory()
    session = store.create("0", scheme="text@hf5")
    node = session.append(session.root, range(10))
    prints = []
    for level in range(1, 30):
        session = store.fork(session, node, str(level))
        with session.draft(node) as draft:
            draft.extend([level, level])
            node = draft.commit()
        session.truncate(node, 5)
        session.rewrite(node, [(1, 2, [level])])
        prints.append((node, node_print(node)))
        assert session.children(node) == ()
        assert len(session.tree) == len(list(session.tree))
    assert node.input_ids().tolist() == [*range(10), *(level for level in range(1, 30) for _ in "ab")]
    for one, seen in prints:
        assert node_print(one) == seen


# --- values of a session ------------------------------------------------------------------------------------------------


def test_what_is_done_to_a_sessions_tree_does_not_reach_the_session() -> None:
    session = new_session()
    a = session.append(session.root, [1])
    tree = session.tree
    before = tree_print(session)
    grown, b = tree.append(a, [2])
    grown, _ = grown.set_head("main", b)
    grown, c = grown.append(b, [3])
    assert tree_print(session) == before
    assert tree_print(tree) == before
    d = session.append(a, [9])
    assert list(tree) == [session.root, a]
    assert list(grown) == [session.root, a, b, c]
    assert list(session.tree) == [session.root, a, d]
    assert d.input_ids().tolist() == [1, 9]
    assert c.input_ids().tolist() == [1, 2, 3]
    refused(session, UnknownNode, lambda: session.append(b, [1]))
    refused(session, UnknownNode, lambda: session.set_head("main", c))
    assert session.append(a, [2]) == b


def test_a_session_behaves_the_same_whoever_holds_its_values() -> None:
    alone, watched = new_session(), new_session()
    held = []
    for session in (alone, watched):
        node = session.root
        for step in range(100):
            if session is watched:
                held.append(session.tree)
                held[-1].append(node, [1000 + step])
            if step % 10 == 3:
                draft = session.draft(node)
                draft.extend([step])
                node = draft.commit()
            else:
                session.append(node, [step, 0])
                node = session.append(node, [step])
    assert tree_print(alone) == tree_print(watched)
    assert [len(tree) for tree in held] == sorted(len(tree) for tree in held)


def test_refusals_of_a_session_change_nothing() -> None:
    session = new_session(scheme=scheme("qwen2_vl@sglang"))
    node = session.append(session.root, [1, 2])
    session.set_head("main", node)
    wrong: Any = 3
    for error, call in (
        (UnknownNode, lambda: session.append(bytes(32), [1])),
        (TypeError, lambda: session.append(wrong, [1])),
        (OutOfRange, lambda: session.append(node, [-1])),
        (MediaSpanError, lambda: session.append(node, [1] * 4, media=[image("a", 1)])),
        (TypeError, lambda: session.append(node, [1], key=wrong)),
        (TypeError, lambda: session.append(node, [1], role=wrong)),
        (TypeError, lambda: session.append(node, [1], metadata=wrong)),
        (UnknownNode, lambda: session.node(bytes(32))),
        (TypeError, lambda: session.node(wrong)),
        (UnknownNode, lambda: session.children(bytes(32))),
        (UnknownNode, lambda: session.siblings(bytes(32))),
        (UnknownHead, lambda: session.head("x")),
        (UnknownHead, lambda: session.head(wrong)),
        (OutOfRange, lambda: session.append(session.root, [])),
    ):
        refused(session, error, call)
    assert issubclass(UnknownHead, SessionTreeError)


def test_forks_that_race_for_one_tip_do_not_share_its_arena() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    for number in range(60):
        tip = session.append(session.root, [number] * 20)
        writers = [session, *(store.fork(session, tip, f"{number}/{which}") for which in range(3))]
        made: dict[int, Node] = {}

        def work(which: int, writers: list[Session] = writers, made: dict[int, Node] = made, tip: Node = tip) -> None:
            made[which] = writers[which].append(tip, [which] * 2000)

        in_threads(len(writers), work)
        extents = {id(node._extent) for node in made.values()}
        assert len(extents) == len(writers)
        for which, node in made.items():
            assert set(node.token_ids.tolist()) == {which}
        assert set(tip.token_ids.tolist()) == {number}


def test_a_session_keeps_its_index_whatever_is_done_to_its_values() -> None:
    """Else every reader that appends to a value would cost the session a layer."""
    session = new_session()
    index = session._tree._index
    for step in range(100):
        node = session.append(session.root, [step])
        session.tree.append(node, [step])
        session.tree.truncate(node, 0)
        session.tree.set_head("x", node)
        session.tree.forked(node).append(node, [1])
    assert session._tree._index is index
    assert len(session.tree) == 101
