"""`longest_prefix` of sessions that lie in a store, which reads what it needs: the answers are those of the same session in memory,
whatever was asked and written before."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from sessiontree import (
    CorruptTree,
    Node,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    StoreClosed,
    codec,
    journal,
    stored,
    stored_prefixes,
)
from sessiontree.bundles import export_bundle, open_bundle
from sessiontree.testing.together import in_threads
from sessiontree.tokens import TOKEN_BYTES, token_bytes
from tests.conftest import SOAK
from tests.disk import Disk
from tests.disk_model import open_on
from tests.test_prefixes import (
    PICTURES,
    Cell,
    Histories,
    Naive,
    add,
    as_given,
    ask_all,
    cells_of,
    codes_of,
    layers_that_stay,
    numbers,
    same,
    shown,
    small_blocks,
    text,
    tree_of,
)
from tests.test_robustness import coming_in, interrupted
from tests.test_store_disk import log_of, records_of
from tests.toy import toy_scheme


@contextmanager
def few_children(few: int, kept: int = 1) -> Iterator[None]:
    """So many children are taken in one by one; more wait in bundles, by so many tokens of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_prefixes, "_FEW", few)
        patch.setattr(stored_prefixes, "_KEPT", kept * TOKEN_BYTES)
        patch.setattr(stored_prefixes, "_ANSWERS", 2)
        patch.setattr(journal, "_BATCH", 3)
        patch.setattr(journal, "_scattered", lambda rows: len(rows) % 2 == 0)
        yield


# --- many siblings -----------------------------------------------------------------------------------------------------------
texts = st.lists(st.sampled_from((1, 1, 2)), max_size=6)
turns = texts | texts | texts | st.lists(st.sampled_from((1, 2, (PICTURES[0], 1), (PICTURES[1], 1))), max_size=3)
grown_by = st.tuples(numbers, turns, st.integers(0, 3))


def grow(session: Session, steps: list[tuple[int, list[Any], int]], wide: int) -> None:
    """Nodes under a few parents, each the first of ``wide``; many begin alike, and some are the same but for their keys."""
    nodes = list(session.tree)
    for number, turn, key in steps:
        at = number % len(nodes)
        with suppress(SessionTreeError):
            nodes.append(add(session, nodes[at - at % wide], cells_of(turn), key=f"k{number % 5}" if key == 0 else None))


@settings(max_examples=1000 if SOAK else 50)
@given(
    first=st.lists(grown_by, min_size=15, max_size=40),
    rounds=st.lists(st.lists(grown_by, max_size=3), min_size=4, max_size=6),
    chance=st.randoms(use_true_random=False),
    few=st.sampled_from((0, 0, 0, 1, 3, 32)),
    kept=st.sampled_from((1, 2, 3, 32)),
    wide=st.sampled_from((2, 5, 40)),
    fork=st.none() | st.none() | numbers,
)
def test_siblings_answer_as_in_memory(
    first: list[Any], rounds: list[Any], chance: random.Random, few: int, kept: int, wide: int, fork: int | None
) -> None:
    """What begins as one of the paths there are is asked for, in any order, and so is what goes on otherwise from there."""
    disk, naive = Disk(), Naive()
    with SessionStore.in_memory() as memory, few_children(few, kept):
        stored = open_on(disk)
        sessions = [store.create("s", scheme=toy_scheme("hf5")) for store in (stored, memory)]
        for session in sessions:
            grow(session, first, wide)
        if fork is not None:
            source = list(sessions[1].tree)[fork % len(sessions[1].tree)]
            sessions = [store.fork(session, source.id, "fork") for store, session in zip((stored, memory), sessions, strict=True)]
            for session in sessions:
                grow(session, first[::-1], wide)
        name = sessions[0].id
        for number, steps in enumerate(rounds):
            if number % 3 < 2:
                stored.close()
                stored = open_on(disk)
                sessions[0] = stored.get(name)
            paths = {tuple(naive.path(node)[:length]) for node in sessions[1].tree for length in range(node.stop + 1)}
            asked = [[*path, *text(*more)] for path in sorted(paths, key=repr) for more in ((), (chance.choice((1, 2, 3)), 1))]
            for history in chance.sample(asked, min(len(asked), 25)):
                ids, items = as_given(history)
                given = token_bytes(ids), tuple(items)
                assert sessions[0].tree._find_prefix(*given) == sessions[1].tree._find_prefix(*given), history
            for session in sessions:
                grow(session, steps, wide)
        stored.close()


def a_family(*steps: tuple[int, list[int]]) -> tuple[Session, list[Node]]:
    """A session opened again, of nodes (the ordinal of the parent, tokens), and those nodes by ordinal."""
    disk = Disk()
    with open_on(disk) as store:
        nodes = [store.create("s", scheme=toy_scheme()).root]
        for parent, tokens in steps:
            nodes.append(store.get("s").append(nodes[parent], tokens))
    session = open_on(disk, read_only=True).get("s")
    return session, [session.node(node.id) for node in nodes]


def test_siblings_that_end_where_a_longer_one_is_known() -> None:
    with few_children(0):
        family = (0, [1]), (0, [1, 2, 2, 2, 2]), (1, [2, 2]), (1, [2, 2, 2]), (1, [2, 2, 2, 2, 9]), (3, [3])
        session, nodes = a_family(*family)
        assert session.longest_prefix([1, 2, 9]).length == 2
        assert session.longest_prefix([1, 2, 2, 3]) == (nodes[6], 4, None)


def test_the_first_of_those_that_hold_a_line_as_far_as_that() -> None:
    session, nodes = a_family((0, [1]), (1, [2, 2, 2, 8]), (0, [1, 2, 2]), (0, [1, 2, 2, 2, 2]))
    assert session.longest_prefix([1, 2]) == (nodes[1], 2, nodes[2])
    assert session.longest_prefix([1, 2, 2, 2, 9]) == (nodes[3], 4, nodes[2])
    assert session.longest_prefix([1, 2, 2, 2, 2]) == (nodes[4], 5, None)


@pytest.mark.parametrize("few", [0, 32])
def test_a_value_sees_no_more_of_what_lies_below_once_the_store_was_compacted(few: int) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme=toy_scheme())
        first = session.append(session.root, [1, 2])
        gone = store.create("gone", scheme=toy_scheme())
        gone.drop(gone.append(gone.root, [1]))
    with few_children(few), open_on(disk) as store:
        session = store.get("s")
        kept = session.tree
        session.append(session.root, [1, 2, 3])
        session.append(session.append(first, [3, 4]), [5])
        store.gc()
        layer, over = kept.append(kept.node(first.id), [3, 5])
        session.close()
        again = store.get("s")
        for _ in range(2):
            assert len(kept) == 2 and kept.longest_prefix([1, 2, 3, 4, 5]) == (first, 2, None)
            assert layer.longest_prefix([1, 2, 3, 4, 5]) == (first, 3, over)
            assert again.longest_prefix([1, 2, 3, 4, 5, 6]).length == 5
            assert again.longest_prefix([1, 2, 3]).node.token_ids.tolist() == [1, 2, 3]


# --- any tree against the model ----------------------------------------------------------------------------------------------
class StoredHistories(Histories):
    """The same trees, of sessions on disk: opened again, and cut back; values of a store that was closed are asked no more."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.store = open_on(self.disk)

    @rule()
    def open_again(self) -> None:
        names = [target.id for target in self.targets if isinstance(target, Session)] or ["a"]
        self.store.close()
        self.store = open_on(self.disk)
        self.targets = [self.store.get(name) for name in dict.fromkeys(names)]

    @rule(number=numbers)
    def prune(self, number: int) -> None:
        """Nodes are dropped; values that hold them stay as they were."""
        sessions = [target for target in self.targets if isinstance(target, Session)]
        session = sessions[number % len(sessions)]
        nodes = list(session.tree)
        with suppress(SessionTreeError):
            session.drop(nodes[number % len(nodes)])
            if number % 3 == 0:
                self.store.gc()

    def teardown(self) -> None:
        super().teardown()
        self.store.close()


@pytest.mark.parametrize("few", [0, 1, 32])
@pytest.mark.parametrize("stay", [False, True], ids=["", "layers stay"])
def test_any_stored_tree_answers_as_the_model_does(few: int, stay: bool) -> None:
    options = settings(max_examples=200 if SOAK else 15, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    with few_children(few), small_blocks(*((2, 0) if few else (512, 32))), layers_that_stay() if stay else nullcontext():
        run_state_machine_as_test(StoredHistories, settings=options)


# --- what is read ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many contents were read, and how many whole nodes."""
    counts: Counter[str] = Counter()
    content_of, decode = codec.content_of, codec.decode

    def contents(*given: Any) -> Any:
        counts["contents"] += 1
        return content_of(*given)

    def records(*given: Any) -> Any:
        record = decode(*given)
        counts["nodes"] += isinstance(record, codec.NodeRecord)
        return record

    monkeypatch.setattr(codec, "content_of", contents)
    monkeypatch.setattr(codec, "decode", records)
    return counts


def test_no_more_is_read_than_the_children_of_what_a_history_comes_by(reads: Counter[str]) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(100):
            node = session.append(session.root, [7, 8, number])
            for turn in range(3):
                for other in range(2):
                    child = session.append(node, [number + turn, other])
                node = child
        deep = session.append(session.root, [9])
        for turn in range(400):
            deep = session.append(deep, [turn])
    with open_on(disk) as store:
        session = store.get("s")
        reads.clear()
        assert session.longest_prefix([5]).length == 0
        assert (reads["contents"], reads["nodes"]) == (101, 1)  # the children of the root; who goes on otherwise
        assert session.longest_prefix([7, 8, 42, 42, 1, 43, 1, 5]).length == 7
        assert reads["contents"] == 101 + 3 * 2 and reads["nodes"] <= 1 + 4
        before = reads["contents"]
        for number in (41, 41, 42, 41):
            assert session.longest_prefix([7, 8, number, 5]).length == 3
        assert reads["contents"] == before + 2
        assert session.longest_prefix([9, *range(10), 3]).length == 11
        assert reads["contents"] == before + 2 and reads["nodes"] <= 5 + 4 + 13
        fork = store.fork(session, session.children(session.root)[3], "fork")
        fork.append(fork.leaves()[0], [1, 2])
    with open_on(disk) as store:
        fork = store.get("fork")
        reads.clear()
        assert fork.longest_prefix([7, 8, 3, 1, 2, 3]).length == 5
        assert (reads["contents"], reads["nodes"]) == (0, 1)


def test_what_is_asked_for_takes_memory_and_not_what_is_there(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(200):
            node = session.append(session.root, [number])
            session.append(node, range(20_000))
    with SessionStore.open(tmp_path / "store") as store:
        session = store.get("s")
        tracemalloc.start()
        try:
            assert session.longest_prefix([7, *range(20_000), 5]).length == 20_001
            assert tracemalloc.get_traced_memory()[1] < 2**20 + 20 * 80_000
        finally:
            tracemalloc.stop()


def test_what_many_siblings_share_is_held_once(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(200):
            session.append(session.root, [*range(10_000), number % 10, *range(10_000), number])
    with SessionStore.open(tmp_path / "store") as store:
        session = store.get("s")
        tracemalloc.start()
        try:
            assert session.longest_prefix([*range(5000), 0]).length == 5000
            assert session.longest_prefix([*range(10_000), 7, *range(10_000), 77, 5]).length == 20_002
            assert session.longest_prefix([*range(10_000), 8, *range(10_000), 78, 5]).length == 20_002
            assert tracemalloc.get_traced_memory()[1] < 2**20 + 20 * 80_000
        finally:
            tracemalloc.stop()


def test_damage_beside_the_way_is_not_met_and_damage_on_it_is_named() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(5):
            node = session.append(session.root, [number, number])
            for other in range(40):
                session.append(node, [other, 1000 * number + other])
    data = disk.content(".seg")
    data[data.index(np.array([7, 3007], "<i4").tobytes())] ^= 1
    with open_on(disk) as store:
        session = store.get("s")
        for _ in range(2):
            assert session.longest_prefix([2, 2, 7, 2007, 1]).length == 4
            with pytest.raises(CorruptTree, match="does not match its checksum"):
                session.longest_prefix([3, 3, 8, 3008])
            with pytest.raises(CorruptTree, match="does not match its checksum"):
                session.longest_prefix([3, 3])  # who goes on from there?
            assert session.longest_prefix([3, 4]).length == 1
    with open_on(disk, strict=False) as store:
        session = store.get("s")
        assert session.longest_prefix([3, 3, 8, 3008, 1]).length == 4
        assert session.longest_prefix([3, 3, 7, 3007]).length == 2


@pytest.mark.parametrize("changed", [{"data": bytes(8)}, {"role": "system"}, {"key": "k"}])
@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("strict", [True, False])
def test_contents_that_are_not_what_their_ids_say_are_never_the_answer(changed: dict[str, Any], count: int, strict: bool) -> None:
    """No checksum is wrong: a record was written with another node's content."""
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(count):
            session.append(session.root, [7, number])
    records = records_of(disk)
    at = next(number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE)
    good = codec.decode(records[at])
    assert isinstance(good, codec.NodeRecord)
    records[at] = codec.encode(good._replace(**changed))
    asked = [0, 0] if "data" in changed else [7, 0]
    with open_on(log_of(records), strict=strict) as store:
        session = store.get("s")
        for _ in range(2):
            with pytest.raises(CorruptTree, match=r"node \d+ \(.{8}\) of session .s. is damaged: .* holds the content of"):
                session.longest_prefix(asked)
            assert session.longest_prefix([7, 1]).node.token_ids.tolist() == [7, 1]


@pytest.mark.parametrize("count", [3, 40])
def test_where_damage_is_known_nothing_is_taken_in_that_is_not_what_its_id_says(count: int) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(count):
            session.append(session.root, [7, 1000 + number])
    records = records_of(disk)
    at = next(number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE)
    good = codec.decode(records[at])
    assert isinstance(good, codec.NodeRecord)
    records[at] = codec.encode(good._replace(role="system"))
    disk = log_of(records)
    del disk.names[disk.path(".idx")]
    data = disk.content(".seg")
    data[data.index(np.array([7, 1001], "<i4").tobytes())] ^= 1
    with open_on(disk, strict=False) as store:
        session = store.get("s")
        for _ in range(2):
            assert [session.longest_prefix([7, 1000 + number, 5]).length for number in range(3)] == [1, 1, 2]
            assert session.longest_prefix([7, 9]).within == session.longest_prefix([7, 1002]).node


@pytest.mark.parametrize(
    "content",
    [
        b"\x99",
        b"\x99\xc0\x00\xa0\xc4\x04\xff\xff\xff\xff\x04\x00\xc0\x90\xc0",
        b"\x99\xc0\x00\xa0\xc4\x03abc\x03\x00\xc0\x90\xc0",
        b"\x90",
        b"\xc1",
    ],
)
def test_a_record_that_is_none_of_a_node_is_refused(content: bytes) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(3):
            session.append(session.root, [number])
    records = records_of(disk)
    at = next(number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE)
    body = records[at].index(b"\x99\xc0")
    records[at] = records[at][:body] + content
    with open_on(log_of(records)) as store, pytest.raises(CorruptTree, match="node 1 of session 0"):
        store.get("s").longest_prefix([1])


def test_a_store_that_was_closed_is_not_read() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        for number in range(100):
            session.append(session.root, [number])
    with open_on(disk) as store:
        kept = store.get("s").tree
    with pytest.raises(StoreClosed):
        kept.longest_prefix([1])


def test_a_bundle_is_asked_as_a_store_is(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme="text@hf5")
        nodes = [session.append(session.root, [7, *range(100), number]) for number in range(100)]
        below = session.append(nodes[50], [1, 2])
        export_bundle(store, tmp_path / "bundle")
    with open_bundle(tmp_path / "bundle") as bundle:
        assert bundle.get("s").longest_prefix([7, *range(100), 50, 1, 3]) == (nodes[50], 103, below)


# --- interrupts, coming in between, threads ----------------------------------------------------------------------------------
def a_store() -> tuple[Disk, list[list[Cell]], Naive]:
    """Siblings that begin alike, some of them whole paths of others, with media and children; and histories to ask for."""
    disk, naive = Disk(), Naive()
    with open_on(disk) as store:
        session = store.create("s", scheme=toy_scheme())
        prompt = add(session, session.root, text(1, 2))
        turns = [text(3), text(3, 4), text(3, 4, 5), text(3, 4, 6), text(3, 5), text(6), [*text(3), *shown(PICTURES[0])]]
        for number, turn in enumerate(turns):
            node = add(session, prompt, turn)
            if number % 2 == 0:
                add(session, node, text(4, 6, 7), key="k")
                add(session, add(session, node, text(4)), text(6, 8))
        add(session, session.root, text(1, 2, 3, 4, 9))
        store.fork(session, node, "fork").append(node, [5])
        paths = {tuple(naive.path(node)) for node in session.tree}
    asked = [list(path) for path in sorted(paths, key=repr)]
    return disk, [*asked, *([*path[:-1], Cell(50)] for path in asked if path)], naive


INTERRUPTED = {
    "StoredPrefixes": codes_of(stored_prefixes.StoredPrefixes),
    "what it calls": codes_of(stored_prefixes, stored_prefixes._Bundle),
    "what reads": codes_of(stored.StoredIndex, journal.SessionNodes),
}


@pytest.mark.parametrize("what", sorted(INTERRUPTED))
def test_an_interrupt_at_any_line_leaves_all_answers_right(what: str) -> None:
    disk, asked, naive = a_store()
    lines = 0
    given = [as_given(history, number % 4) for number, history in enumerate(asked)]
    with few_children(1), open_on(disk) as store:
        nodes = list(store.get("s").tree)
        expected = [naive.answer(nodes, naive.alike(nodes, history), len(nodes)) for history in asked]
    with few_children(1):
        while True:
            with open_on(disk, read_only=True) as store:
                session = store.get("s")
                first = lines % len(given)
                with interrupted(lines, INTERRUPTED[what]) as hit:
                    for arguments in (given[first], given[-1 - first]):
                        session.longest_prefix(*arguments)
                if not hit and lines > 2 * len(given):
                    break
                for arguments, answer in list(zip(given, expected, strict=True))[lines % 2 :: 2]:
                    assert same(session.longest_prefix(*arguments), answer), f"line {lines}"
            lines += 1
    assert lines > 60


def test_a_query_in_the_middle_of_another_is_exact() -> None:
    """As a signal handler's: where the trie is just being completed, whoever comes in between makes one for itself."""
    disk, asked, naive = a_store()
    places = 0
    with few_children(1):
        while True:
            with open_on(disk) as store:
                session = store.get("s")
                layer, _ = session.tree.append(session.tree.children(session.root)[0], [3, 4, 50])
                targets: list[Session | SessionTree] = [session, layer]

                def action(targets: list[Any] = targets) -> None:
                    ask_all(naive, targets, asked[::5])

                with coming_in(places, action) as ran:
                    answers = [target.longest_prefix(*as_given(asked[places % len(asked)])) for target in targets]
                if not ran:
                    break
                for target, answer in zip(targets, answers, strict=True):
                    assert same(answer, naive.expected(tree_of(target), asked[places % len(asked)]))
                ask_all(naive, targets, asked[places % 3 :: 3])
            places += 11 if SOAK else 97
    assert places > 1000


def test_threads_that_ask_a_store_that_was_just_opened() -> None:
    disk, asked, naive = a_store()
    for number in range(10):
        with few_children(number % 3), open_on(disk) as store:
            sessions = [store.get("s"), store.get("fork")]
            nodes = [list(session.tree) for session in sessions]

            def work(thread: int, sessions: list[Session] = sessions, nodes: list[list[Node]] = nodes) -> None:
                for at in range(thread, thread + len(asked)):
                    history = asked[at % len(asked)]
                    if thread == 0 and at % 4 == 0:
                        sessions[0].append(sessions[0].root, [60, at])
                    which = at % 2
                    expected = naive.answer(nodes[which], naive.alike(nodes[which], history), len(nodes[which]))
                    assert same(sessions[which].longest_prefix(*as_given(history)), expected)

            in_threads(4, work)
