"""Annotations in stores on disk, in bundles and in copies: what is there after all that can happen to a store."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sessiontree import Node, Session, SessionStore, SessionTreeError, StoreFailed, bundles, codec
from sessiontree.annotations import (
    LOGPROBS,
    REWARD,
    ROUTED_EXPERTS,
    STANDARD_NAMES,
    TOP_P_IDS,
    WEIGHT_VERSION,
    Annotation,
    OfTokens,
    Ragged,
    Spans,
    TokenValues,
)
from sessiontree.bundles import export_bundle, import_bundle, open_bundle
from sessiontree.copying import copy_sessions, session_digest
from sessiontree.errors import CorruptTree, SessionDiffers
from sessiontree.fsck import fsck, salvage, stats
from sessiontree.journal import prefix_of
from tests.disk import Disk
from tests.disk_model import DURABILITIES, fail, let_go, open_on, reopened
from tests.test_annotations import by_token, seen

durabilities = pytest.mark.parametrize("durability", DURABILITIES)


def text_session(store: SessionStore, name: str = "s") -> Session:
    return store.create(name, scheme="text@hf5")


def everything(tokens: int) -> dict[str, Annotation]:
    """One of each kind."""
    return {
        LOGPROBS: TokenValues(np.linspace(-3, 0, tokens, dtype=np.float32)),
        ROUTED_EXPERTS: TokenValues(np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 3, 2)),
        TOP_P_IDS: Ragged.of([[at] * (at % 3) for at in range(tokens)]),
        WEIGHT_VERSION: Spans([(0, 1, 1), (1, tokens, "two")]),
        REWARD: 0.5,
        "mine": "text",
    }


def all_said(store: SessionStore) -> dict[str, Any]:
    return {
        name: {node.id: seen(session, node) for node in session.tree} for name in store.sessions() if (session := store.get(name))
    }


# --- what was said comes back -------------------------------------------------------------------------------------------------
@durabilities
def test_all_kinds_come_back_bit_for_bit(durability: Any) -> None:
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        session = text_session(store)
        node = session.append(session.root, range(5), annotations=everything(5))
        draft = session.draft(node)
        draft.extend([7, 8])
        reply = draft.commit("stop", annotations=everything(2))
        part = session.truncate(reply, 6)
        session.annotate(part, {REWARD: -1.0})
        session.annotate(session.root, {"of": "all"})
        session.record([0, 1, 99], [5, 6], annotations=everything(2))
        fork = store.fork(session, part, "fork")
        fork.annotate(node, {REWARD: 7, LOGPROBS: TokenValues(np.zeros(1, np.float32), 2)})
        before = all_said(store)
        assert before["s"][node.id] == {name: by_token(value) for name, value in everything(5).items()}
        assert before["s"][part.id][LOGPROBS] == by_token(TokenValues(np.array([-3], np.float32)))
    for _ in range(2):
        with open_on(disk, durability=durability) as store:
            assert all_said(store) == before
            with open_on(disk, read_only=True) as reader:
                assert all_said(reader) == before
            store.gc()
            assert all_said(store) == before
            store.evict()
            assert all_said(store) == before


def test_a_fork_sees_what_its_source_says_later_when_it_is_opened_again() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.append(session.root, [1, 2], annotations={"a": 1, "b": 1})
        fork = store.fork(session, node, "fork")
        fork.annotate(node, {"b": 2})
        session.annotate(node, {"a": 3, "b": 3, "c": 3})
        assert fork.annotations(node) == {"a": 1, "b": 2}
    with open_on(disk) as store:
        assert store.get("fork").annotations(node.id) == {"a": 3, "b": 2, "c": 3}


def test_a_fork_of_a_node_that_was_dropped_and_made_again_has_what_is_said_of_that_one() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        for number in range(3):  # each under an ordinal of its own, all of one id
            node = session.append(session.root, [1, 2], annotations={"a": number, f"only {number}": True})
            fork = store.fork(session, node, f"fork {number}")
            fork.append(node, [3])
            assert fork.annotations(node) == {"a": number, f"only {number}": True}
            session.drop(node)
        before = all_said(store)
    for _ in range(2):
        with open_on(disk) as store:
            assert all_said(store) == before
            for number in range(3):
                fork = store.get(f"fork {number}")
                assert fork.tree.annotations(fork.tree.node(node.id)) == {"a": number, f"only {number}": True}
                assert set(store.get(f"fork {number}").tree._log.source.named("a").values()) == {number}  # type: ignore[union-attr]
            store.gc()


def test_a_fork_at_a_prefix_keeps_what_the_whole_said_when_that_is_gone() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.append(session.root, [1, 2, 3], annotations={"v": [1, 2, 3]})
        deep = session.append(session.truncate(node, 2), [7], annotations={"v": [5]})
        store.fork(session, deep, "fork")
    with open_on(disk) as store:
        assert store.get("fork").token_values(deep.id, "v").values.tolist() == [1, 2, 5]
        store.drop("s")
        store.gc()
        assert store.get("fork").token_values(deep.id, "v").values.tolist() == [1, 2, 5]
    with open_on(disk) as store:
        assert store.get("fork").token_values(deep.id, "v").values.tolist() == [1, 2, 5]


@durabilities
@pytest.mark.parametrize("how", ["drop", "gc"])
def test_a_prefix_keeps_what_the_whole_said_when_that_is_gone(how: str, durability: Any) -> None:
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        session = text_session(store)
        node = session.append(session.root, range(4), annotations=everything(4))
        part = session.truncate(node, 3)
        session.annotate(part, {LOGPROBS: TokenValues(np.array([7], np.float32), 1)})
        session.set_head("main", part)
        expected = seen(session, part)
        if how == "drop":
            session.drop(node)
            assert seen(session, part) == expected
        store.gc(recent=0)
        assert len(session.tree) == 2 and seen(session, part) == expected
    with open_on(disk) as store:
        assert seen(store.get("s"), part.id) == expected


@pytest.mark.parametrize("how", ["commit", "append", "record"])
def test_a_cut_anywhere_never_shows_a_node_without_what_was_said_with_it(how: str) -> None:
    """At every byte of the log, from before it was made."""
    disk = Disk()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    node = session.append(session.root, [1, 2, 3])
    before = len(disk.content(".seg").rstrip(b"\0"))
    if how == "commit":
        draft = session.draft(node)
        draft.extend([4, 5])
        made = draft.commit("stop", annotations=everything(2), head="main")
    elif how == "append":
        made = session.append(node, [4, 5], annotations=everything(2))
    else:
        made = session.record([1, 2, 3], [4, 5], annotations=everything(2)).completion
    expected = seen(session, made)
    killed = disk.copy()
    let_go(store)
    stop = len(killed.content(".seg").rstrip(b"\0"))
    found = set()
    for size in range(before, stop + 3):
        copy = killed.copy()
        del copy.content(".seg")[size:]
        with open_on(copy) as opened:
            there = opened.get("s")
            found.add(made.id in {each.id for each in there.tree})
            for each in there.tree:
                assert seen(there, each) == (expected if each.id == made.id else {}), size
    assert found == {False, True}


def test_a_loss_of_power_leaves_what_was_acknowledged() -> None:
    rng = random.Random(5)
    disk = Disk()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    node = session.append(session.root, range(4))
    told: list[tuple[int, dict[str, Any]]] = []
    for number in range(8):
        session.annotate(node, {"v": TokenValues([number], number % 4), "n": number})
        told.append((len(disk.trace), seen(session, node)))
    killed = disk
    let_go(store)
    states = [{}, *(said for _, said in told)]
    for events, said in told:
        for _ in range(6):
            with open_on(killed.crash(rng, events)) as opened:
                found = seen(opened.get("s"), node.id)
                assert states.index(found) >= states.index(said)


@durabilities
def test_a_write_that_the_disk_refuses_says_nothing(durability: Any) -> None:
    for n, call in itertools.product((1, 2, 3), ("pwrite", "fdatasync")):
        disk = Disk()
        store = open_on(disk, durability=durability)
        session = text_session(store)
        node = session.append(session.root, [1, 2], annotations={"v": [1, 2]})
        store.flush()
        before = seen(session, node)
        fail(disk, n, call, errno.EIO, forever=True)
        acknowledged = before
        for number in range(3):
            try:
                session.annotate(node, {"v": TokenValues([7 + number], 1), "s": number})
                store.flush()
            except StoreFailed:
                break
            acknowledged = seen(session, node)
        else:
            pytest.fail("the disk refuses nothing")
        if durability == "commit":
            assert seen(session, node) == acknowledged
        disk.fault = None
        let_go(store)
        with reopened(disk) as again:
            found = seen(again.get("s"), node.id)
            wanted = [before, *({"v": by_token(TokenValues([1, 7 + k])), "s": (int, repr(k))} for k in range(3))]
            assert wanted.index(found) >= wanted.index(acknowledged)


# --- beside gc, drops and each other ---------------------------------------------------------------------------------------------
def test_what_is_said_while_gc_runs_counts() -> None:
    disk = Disk()
    with open_on(disk, segment_bytes=4096) as store:
        session = text_session(store)
        nodes = [session.append(session.root, [number], annotations={"n": 0, "v": [number]}) for number in range(40)]
        doomed = [session.append(session.root, [1000 + number], annotations={"n": 0}) for number in range(40)]
        stop = threading.Event()
        last: dict[bytes, int] = {}

        def say() -> None:
            for number in itertools.count(1):
                node = nodes[number % 40]
                session.annotate(node, {"n": number})
                last[node.id] = number
                if stop.is_set():
                    return

        thread = threading.Thread(target=say)
        thread.start()
        try:
            for node in doomed:
                session.drop(node)
                if node is doomed[-1] or not doomed.index(node) % 8:
                    store.gc()
        finally:
            stop.set()
            thread.join()
        assert {node.id: session.annotations(node)["n"] for node in nodes} == {node.id: last.get(node.id, 0) for node in nodes}
        store.gc()
    with open_on(disk) as store:
        session = store.get("s")
        assert {node.id: session.annotations(node.id)["n"] for node in nodes} == {node.id: last.get(node.id, 0) for node in nodes}
        assert [session.token_values(node.id, "v").values.tolist() for node in nodes] == [[number] for number in range(40)]


def test_gc_gives_back_what_was_said_once(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        node = session.append(session.root, range(1000))
        for number in range(50):
            session.annotate(node, {"v": np.full(1000, number, np.float64)})
        dropped = session.append(node, [1] * 1000, annotations={"v": np.ones(1000)})
        session.drop(dropped)
        store.flush()
        before = stats(tmp_path / "store")
        assert before.annotations == 1 and before.bytes["annotation"] > 51 * 8000 and before.dead > 50 * 8000
        store.gc()
        after = stats(tmp_path / "store")
        assert after.annotations == 1 and 8000 < after.bytes["annotation"] < 8500 and after.dead < 1000
        assert session.token_values(node, "v").values.tolist() == [49.0] * 1000
        assert fsck(tmp_path / "store").ok
        session.append(node, range(10_000))
        held = store.usage().node_bytes
        store.evict()
        assert store.usage().node_bytes < held - 40_000, "it can leave memory though gc has taken the last that was said"


def test_forks_of_what_was_annotated_leave_memory(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        node = session.append(session.root, range(10), annotations={"v": np.ones(10)})
        fork = store.fork(session, node, "fork")
        leaf = fork.append(node, range(10_000))
        held = store.usage().node_bytes
        store.evict()
        del leaf
        store.evict()
        assert store.usage().node_bytes < held - 40_000
        assert fork.token_values(node.id, "v").known.all()
        fork.annotate(node.id, {"v": TokenValues([2.0], 3)})
    with SessionStore.open(tmp_path / "store") as store:
        assert store.get("fork").token_values(node.id, "v", 2, 5).values.tolist() == [1, 2, 1]


def test_processes_threads_and_durability_lose_nothing(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="commit") as store:
        session = text_session(store)
        node = session.append(session.root, range(32))
        start = threading.Barrier(4)

        def say(which: int) -> None:
            start.wait()
            for number in range(8):
                session.annotate(node, {"v": TokenValues([which * 8 + number + 1], which * 8 + number), f"{which}": number})

        threads = [threading.Thread(target=say, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.token_values(node, "v").values.tolist() == list(range(1, 33))
    with SessionStore.open(tmp_path / "store", read_only=True) as store:
        assert store.get("s").token_values(node.id, "v").values.tolist() == list(range(1, 33))
        assert {name: value for name, value in store.get("s").annotations(node.id).items() if name != "v"} == dict.fromkeys(
            "0123", 7
        )


# --- a model --------------------------------------------------------------------------------------------------------------------
KINDS: Final = ("v", "rows", "lists", "spans", "n")


class Model:
    """What a session should say: by node and name a scalar, or by token what is there."""

    def __init__(self, said: dict[bytes, dict[str, Any]] | None = None) -> None:
        self.said: dict[bytes, dict[str, Any]] = {} if said is None else said
        self.whole: dict[bytes, bytes] = {}  # what nodes are prefixes of
        self.nodes: dict[bytes, tuple[bytes, int]] = {}  # by id: the parent's, and how many tokens

    def own(self, node_id: bytes) -> dict[str, Any]:
        return self.said.setdefault(node_id, {})

    def say(self, node_id: bytes, name: str, value: Any) -> None:
        own = self.own(node_id)
        own[name] = {**own.get(name, {}), **value} if isinstance(value, dict) else value

    def visible(self, node_id: bytes) -> dict[str, Any]:
        found = dict(self.said.get(node_id, {}))
        at, count = node_id, self.nodes[node_id][1]
        while (at := self.whole.get(at, b"")) in self.nodes:
            for name, tokens in self.said.get(at, {}).items():
                if isinstance(tokens, dict) and (inside := {token: each for token, each in tokens.items() if token < count}):
                    found[name] = {**inside, **found.get(name, {})}
        return found

    def copy(self, path: set[bytes]) -> Model:
        made = Model({node_id: {name: value for name, value in self.visible(node_id).items()} for node_id in path})
        made.nodes = {node_id: self.nodes[node_id] for node_id in path}
        made.whole = {node_id: whole for node_id, whole in self.whole.items() if node_id in path}
        return made


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """The model's as ``seen`` gives it."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "spans":
            spans: list[Any] = []
            for token, which in sorted(value.items()):
                if spans and spans[-1][2] == which and spans[-1][1] == token:
                    spans[-1][1] = token + 1
                else:
                    spans.append([token, token + 1, which])
            found[name] = [(start, stop, which) for start, stop, which in spans]
        else:
            found[name] = value if isinstance(value, dict) else (type(value), repr(value))
    return found


class Annotating(RuleBasedStateMachine):
    """Sessions that are annotated, cut, forked, dropped, collected, evicted and opened again."""

    durability: Any = None
    scratch: Path

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.counter = 0
        self.forked: set[bytes] = set()  # nodes on paths that forks share, of which only forks say more
        self.models: dict[str, Model] = {}

    def open(self) -> SessionStore:
        if self.durability is None:
            return SessionStore.in_memory()
        return open_on(self.disk, durability=self.durability, segment_bytes=4096)

    @initialize()
    def begin(self) -> None:
        self.store = self.open()
        session = text_session(self.store, "0")
        self.models["0"] = Model()
        self.models["0"].nodes[session.root.id] = (b"", 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for name, model in self.models.items():
                for node_id in model.nodes:
                    self.check(name, node_id)
            self.store.close()

    def pick(
        self, data: st.DataObject, liked: Callable[[Model], Collection[bytes]] = lambda _: ()
    ) -> tuple[str, Model, Session, Node]:
        """Any node of any session; each other time one that is liked, where there is one."""
        name = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[name]
        wanted = [node_id for node_id in model.nodes if node_id in liked(model)]
        likes = bool(wanted) and data.draw(st.booleans())
        at = data.draw(st.sampled_from(wanted if likes else list(model.nodes)))
        session = self.store.get(name)
        return name, model, session, session.node(at)

    def check(self, name: str, node_id: bytes) -> None:
        session = self.store.get(name)
        model = self.models[name]
        assert seen(session, node_id) == shown(model.visible(node_id))
        window = session.token_values(node_id, "v")
        expected: list[Any] = []
        at = node_id
        while at:
            parent, count = model.nodes[at]
            tokens = model.visible(at).get("v", {})
            expected[:0] = [tokens.get(token) for token in range(count)]
            at = parent
        assert window.known.tolist() == [each is not None for each in expected]
        assert [row.tobytes() for row, each in zip(window.values, expected, strict=True) if each] == [
            each[2] for each in expected if each
        ]

    def drawn(self, data: st.DataObject, count: int) -> dict[str, tuple[Any, Any]]:
        """Some values, and the same for the model."""
        found: dict[str, tuple[Any, Any]] = {}
        for kind in data.draw(st.sets(st.sampled_from(KINDS), min_size=1, max_size=3)):
            start = data.draw(st.integers(0, count))
            size = data.draw(st.integers(0, count - start))
            self.counter += 1
            if kind == "v":
                value: Any = TokenValues(np.arange(size, dtype=np.float32) + self.counter, start)
            elif kind == "rows":
                value = TokenValues(np.full((size, 2), self.counter % 251, np.uint8), start)
            elif kind == "lists":
                value = Ragged.of([np.full(at % 3, self.counter) for at in range(size)], start)
            elif kind == "spans":
                value = Spans([(start, start + size, self.counter)] if size else [])
            else:
                value = self.counter
            tokens = by_token(value) if isinstance(value, OfTokens) else value
            if kind == "spans":
                tokens = {at: which for begin, end, which in value for at in range(begin, end)}
            if kind == "n" or size:
                found[kind] = value, tokens
        return found

    def add(self, name: str, node: Node) -> None:
        model = self.models[name]
        if node.id not in model.nodes:
            assert node.parent is not None
            model.nodes[node.id] = (node.parent.id, node.stop - node.start)
            model.said.pop(node.id, None)
            model.whole.pop(node.id, None)
            for link in node.links:
                if link.kind == "prefix_of":
                    model.whole[node.id] = link.node_id

    @rule(data=st.data(), size=st.integers(2, 6), how=st.sampled_from(["append", "commit"]))
    def grow(self, data: st.DataObject, size: int, how: str) -> None:
        name, model, session, parent = self.pick(data, lambda model: model.whole)
        said = self.drawn(data, size)
        values = {each: value for each, (value, _) in said.items()}
        self.counter += 1
        tokens = [self.counter] * size
        if how == "append":
            node = session.append(parent, tokens, annotations=values)
        else:
            draft = session.draft(parent, key=f"k{self.counter}")
            draft.extend(tokens)
            node = draft.commit("stop", annotations=values)
        self.add(name, node)
        for each, (_, expected) in said.items():
            model.say(node.id, each, expected)
        self.check(name, node.id)

    @rule(data=st.data())
    def annotate(self, data: st.DataObject) -> None:
        name, model, session, node = self.pick(data, lambda model: {*model.whole, *model.whole.values()})
        if name == "0" and node.id in self.forked:
            return
        if name != "0" and sum(node.id in other.nodes for other in self.models.values()) > 2:
            return  # a fork of a fork may share it
        said = self.drawn(data, node.stop - node.start)
        before = session.tree
        old = seen(before, node)
        session.annotate(node, {each: value for each, (value, _) in said.items()})
        for each, (_, expected) in said.items():
            model.say(node.id, each, expected)
        self.check(name, node.id)
        assert seen(before, node) == old

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        name, _, session, node = self.pick(data, lambda model: {each for each, (_, count) in model.nodes.items() if count > 1})
        if node.stop > node.start + 1:
            part = session.truncate(node, data.draw(st.integers(node.start + 1, node.stop - 1)))
            self.add(name, part)
            self.check(name, part.id)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A reply of which everything is said is cut, and something else is said of what is left."""
        name, model, session, parent = self.pick(data)
        self.counter += 1
        reply = session.append(parent, [self.counter] * 6)
        self.add(name, reply)
        rows = TokenValues(np.full((6, 2), self.counter % 251, np.uint8))
        spans = Spans([(0, 6, self.counter)])
        session.annotate(reply, {"rows": rows, "spans": spans})
        model.say(reply.id, "rows", by_token(rows))
        model.say(reply.id, "spans", dict.fromkeys(range(6), self.counter))
        part = session.truncate(reply, data.draw(st.integers(reply.start + 1, reply.stop - 1)))
        self.add(name, part)
        said = self.drawn(data, part.stop - part.start)
        session.annotate(part, {each: value for each, (value, _) in said.items()})
        for each, (_, expected) in said.items():
            model.say(part.id, each, expected)
        self.check(name, part.id)
        self.check(name, reply.id)

    @precondition(lambda self: len(self.models) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        _, model, session, node = self.pick(data, lambda model: model.whole)
        name = str(len(self.models))
        made = self.store.fork(session, node, name)
        path = [each.id for each in node.path()]
        self.models[name] = model.copy(set(path))
        self.models[name].nodes = {each: model.nodes[each] for each in path}
        self.forked.update(path)
        for each in list(made.tree):
            self.check(name, each.id)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        _, model, session, node = self.pick(data, lambda model: set(model.whole.values()))
        with suppress(SessionTreeError):
            session.drop(node)
            gone = {node.id}
            for each, (parent, _) in model.nodes.items():
                if parent in gone:
                    gone.add(each)
            kept = {each: model.visible(each) for each in model.nodes if model.whole.get(each) == node.id and each not in gone}
            for each in gone:
                del model.nodes[each]
                model.said.pop(each, None)
                model.whole.pop(each, None)
            model.said.update(kept)

    @rule()
    def collect(self) -> None:
        if self.durability is not None:
            self.store.gc()

    @rule()
    def evict(self) -> None:
        self.store.evict()

    @rule()
    def reopen(self) -> None:
        if self.durability is not None:
            self.store.close()
            self.store = self.open()

    @rule()
    def export(self) -> None:
        """What is exported and taken in elsewhere says the same."""
        if self.counter % 5:
            return
        where = self.scratch / f"{self.counter}.bundle"
        export_bundle(self.store, where)
        copy = SessionStore.in_memory()
        import_bundle(copy, where)
        for name, model in self.models.items():
            assert session_digest(copy.get(name)) == session_digest(self.store.get(name))
            for node_id in model.nodes:
                assert seen(copy.get(name), node_id) == shown(model.visible(node_id))
        where.unlink()

    @invariant()
    def any_node(self) -> None:
        for name, model in self.models.items():
            node_id = list(model.nodes)[self.counter % len(model.nodes)]
            self.check(name, node_id)


@pytest.mark.parametrize("durability", [None, *DURABILITIES])
def test_whatever_happens_to_a_store_the_annotations_are_those_of_the_model(durability: Any, tmp_path: Path) -> None:
    kind = type("Machine", (Annotating,), {"durability": durability, "scratch": tmp_path})
    run_state_machine_as_test(kind, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


# --- bundles and copies -----------------------------------------------------------------------------------------------------------
def branched(store: SessionStore) -> tuple[Session, Session, list[Node]]:
    """Two sessions, one a fork that says things of the path that it shares."""
    session = text_session(store)
    node = session.append(session.root, range(5), annotations=everything(5))
    part = session.truncate(node, 3)
    deep = session.append(part, [7, 8], annotations=everything(2))
    session.annotate(session.root, {"root": True})
    fork = store.fork(session, deep, "fork")
    fork.annotate(node.parent or node, {"root": False, "fork": 1})
    fork.annotate(part, {REWARD: 9})
    own = fork.append(deep, [9, 9], annotations=everything(2))
    session.annotate(deep, {"late": 1})
    return session, fork, [node, part, deep, own]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with SessionStore.in_memory() if request.param == "memory" else SessionStore.open(tmp_path / "source") as opened:
        yield opened


def test_a_bundle_holds_what_is_said(store: SessionStore, tmp_path: Path) -> None:
    branched(store)
    report = export_bundle(store, tmp_path / "one")
    with open_bundle(tmp_path / "one") as bundle:
        late = {
            node_id: {"late": (int, "1")} for node_id in all_said(store)["fork"] if "late" in all_said(store)["s"].get(node_id, {})
        }
        assert len(late) == 1, "said of the shared path after the fork, which sees it where it is opened anew"
        assert all_said(bundle)["fork"] == {
            node_id: said | late.get(node_id, {}) for node_id, said in all_said(store)["fork"].items()
        }
        assert all_said(bundle)["s"] == all_said(store)["s"]
        assert session_digest(bundle.get("s")) == session_digest(store.get("s"))
    target = SessionStore.in_memory()
    imported = import_bundle(target, tmp_path / "one")
    assert report.annotations > imported.annotations > 15 and not imported.annotations_kept
    assert all_said(target)["s"] == all_said(store)["s"]
    export_bundle(target, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = import_bundle(target, tmp_path / "one")
    assert (again.annotations, again.annotations_kept) == (0, ())
    other = SessionStore.in_memory()
    report_of_other = import_bundle(other, tmp_path / "one", namespace="other")
    assert {report_of_other.ids[node]: said for node, said in all_said(store)["s"].items()} == all_said(other)["s"]


def test_a_subtree_takes_what_its_nodes_have_from_others(store: SessionStore, tmp_path: Path) -> None:
    session, _, (node, part, deep, _) = branched(store)
    export_bundle(store, tmp_path / "part", ["s"], subtree=deep)
    target = SessionStore.in_memory()
    import_bundle(target, tmp_path / "part")
    found = target.get("s")
    assert node.id not in {each.id for each in found.tree}
    for each in (part, deep):
        assert seen(found, each.id) == seen(session, each)


def test_an_import_adds_and_never_changes(tmp_path: Path) -> None:
    source = SessionStore.in_memory()
    session = text_session(source)
    node = session.append(session.root, range(4), annotations={"v": [1, 2, 3, 4], "n": 1, "kind": 1, "new": Spans([(0, 4, 1)])})
    export_bundle(source, tmp_path / "bundle")
    with SessionStore.open(tmp_path / "store") as target:
        mine = text_session(target)
        mine.append(mine.root, range(4), annotations={"v": TokenValues([1, 9], 0), "n": 2, "kind": [1, 2, 3, 4], "own": 1})
        report = import_bundle(target, tmp_path / "bundle")
        assert report.annotations == 2 and {kept.name for kept in report.annotations_kept} == {"v", "n", "kind"}
        expected = {"v": by_token(TokenValues([1, 9, 3, 4])), "n": (int, "2"), "kind": by_token(TokenValues([1, 2, 3, 4]))}
        assert seen(mine, node.id) == {**expected, "own": (int, "1"), "new": [(0, 4, 1)]}
        size = sum(file.stat().st_size for file in (tmp_path / "store" / "segments").iterdir())
        report = import_bundle(target, tmp_path / "bundle")
        assert report.annotations == 0 and len(report.annotations_kept) == 3
        target.flush()
        assert sum(file.stat().st_size for file in (tmp_path / "store" / "segments").iterdir()) == size


def test_damage_of_annotations_in_a_bundle_is_found(tmp_path: Path) -> None:
    source = SessionStore.in_memory()
    session = text_session(source)
    session.append(session.root, range(3), annotations=everything(3))
    export_bundle(source, tmp_path / "bundle")
    data = (tmp_path / "bundle").read_bytes()
    for at in range(data.index(b"logprobs"), len(data), 7):
        (tmp_path / "bad").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        target = SessionStore.in_memory()
        with pytest.raises(SessionTreeError):
            import_bundle(target, tmp_path / "bad")
        assert target.sessions() == ()


def forged_bundle(path: Path, *said: tuple[int, int, bytes | None, str, Any, int]) -> None:
    """A bundle with these annotations, whose checksums fit: (session, ordinal, id or None: the node's, name, value, version)."""
    plain = SessionStore.in_memory()
    session = text_session(plain)
    node = session.append(session.root, range(3))
    ids = [session.root.id, node.id]
    written: Callable[..., None] = bundles._Export._said

    def write(self: Any, number: int) -> None:
        for of, ordinal, identity, name, value, version in said:
            right = ids[ordinal] if ordinal < 2 else bytes(32)
            self._writer.add(codec.encode(codec.AnnotationRecord(of, ordinal, identity or right, name, value, version)))

    try:
        bundles._Export._said = write  # type: ignore[method-assign]
        export_bundle(plain, path)
    finally:
        bundles._Export._said = written  # type: ignore[method-assign]


FORGED: Final[dict[str, tuple[Any, ...]]] = {
    "of another node": ((0, 1, bytes(32), "a", 1, 1),),
    "of no node": ((0, 2, None, "a", 1, 1),),
    "of no session": ((1, 1, None, "a", 1, 1),),
    "of tokens behind the end": ((0, 1, None, "a", TokenValues([1], 3), 1),),
    "of tokens of the root": ((0, 0, None, "a", TokenValues([1]), 1),),
    "twice": ((0, 1, None, "a", 1, 1), (0, 1, None, "a", 2, 1)),
    "in another order": ((0, 1, None, "a", 1, 1), (0, 0, None, "a", 2, 1)),
    "of another version": ((0, 1, None, "a", 1, 2),),
}


@pytest.mark.parametrize("what", FORGED)
def test_an_annotation_that_no_export_writes_is_refused(what: str, tmp_path: Path) -> None:
    forged_bundle(tmp_path / "fine", (0, 0, None, "a", 1, 1), (0, 1, None, "a", TokenValues([1], 2), 1), (0, 1, None, "b", 1, 1))
    assert import_bundle(SessionStore.in_memory(), tmp_path / "fine").annotations == 3
    forged_bundle(tmp_path / "bad", *FORGED[what])
    target = SessionStore.in_memory()
    with pytest.raises(CorruptTree):
        import_bundle(target, tmp_path / "bad")
    assert target.sessions() == ()


def test_a_copy_is_equal_and_goes_on(store: SessionStore, tmp_path: Path) -> None:
    session, fork, (node, part, deep, own) = branched(store)
    with SessionStore.open(tmp_path / "target") as target:
        report = copy_sessions(store, target)
        assert report.ok and {each.added for each in report.sessions} == {3, 1}
        session.annotate(deep, {"more": Spans([(0, 1, 1)])})
        session.annotate(node, {"more": 1})
        fork.annotate(own, {"v": TokenValues([1], 0)})
        assert copy_sessions(store, target).ok
        for each in (node, part, deep):
            assert seen(target.get("s"), each.id) == seen(session, each)
        assert target.get("fork").annotations(own.id)["v"] == TokenValues([1])
    back = SessionStore.in_memory()
    with SessionStore.open(tmp_path / "target", read_only=True) as target:
        assert copy_sessions(target, back).ok
        assert copy_sessions(target, tmp_path / "copy.bundle").ok
        assert copy_sessions(target, tmp_path / "copy.bundle").ok
    with open_bundle(tmp_path / "copy.bundle") as bundle:
        again = SessionStore.in_memory()
        assert copy_sessions(bundle, again).ok
        assert all_said(again)["s"] == all_said(bundle)["s"]


@pytest.mark.parametrize(
    "there", [{"n": 2}, {"other": 1}, {"v": TokenValues([1, 8], 2)}, {"spans": Spans([(0, 1, 1)])}, {"n": TokenValues([1])}]
)
def test_a_copy_over_what_says_something_else_is_refused(there: dict[str, Any], tmp_path: Path) -> None:
    source = SessionStore.in_memory()
    session = text_session(source)
    said = {"n": 1, "v": [1, 1, 1, 1], "spans": Spans([(0, 2, 1)])}
    node = session.append(session.root, range(4), annotations=said)
    session.append(node, [5])
    target = SessionStore.in_memory()
    mine = text_session(target)
    mine.append(mine.root, range(4), annotations=there)
    before = seen(mine, node.id)
    with pytest.raises(SessionDiffers, match="annotation"):
        copy_sessions(source, target)
    assert len(mine.tree) == 2 and seen(mine, node.id) == before


def test_a_copy_that_was_killed_goes_on() -> None:
    """After any number of writes to the target, also before a fork says what it says of its path."""
    source = SessionStore.in_memory()
    branched(source)
    for n in range(1, 60):
        disk = Disk()
        target = open_on(disk, durability="commit")
        fail(disk, n, "pwrite", errno.EIO, forever=True)
        try:
            copy_sessions(source, target)
        except (StoreFailed, SessionTreeError):
            disk.fault = None
            let_go(target)
        else:
            let_go(target)
            break
        with open_on(disk, durability="commit") as target:
            assert copy_sessions(source, target).ok, n
    assert n == 7  # after the session, its nodes, what is said; the fork, its node, what it says


# --- fsck -------------------------------------------------------------------------------------------------------------------------
def test_fsck_names_an_annotation_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path, durability="commit") as store:
        session = text_session(store)
        node = session.append(session.root, range(5), annotations=everything(5) | {"uncommon": 4})
        session.annotate(node, {"mine": "anew"})
    report = fsck(path)
    assert report.ok and report.annotations == 7
    [segment] = (path / "segments").glob("*.seg")
    data = segment.read_bytes()
    names = [*everything(5), "uncommon"]
    for name in names:
        at = data.index(name.encode()) + len(name) + 1
        segment.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        report = fsck(path)
        [damage] = report.damaged
        assert f"annotation {name!r} of node 1 of session 's'" in damage.what and not report.ok
        assert (damage.session_id, damage.node_id, damage.harmless) == ("s", node.id, name == "mine")
        with SessionStore.open(path, read_only=True, strict=False) as store:
            session = store.get("s")
            assert (session.annotation(node.id, name) is None) == (name != "mine"), "as a node that is damaged, it is not there"
            exported = export_bundle(store, tmp_path / f"{name}.bundle")
            assert (exported.nodes, exported.annotations) == (1, 7 if name == "mine" else 6)
        saved = salvage(path, tmp_path / name)
        assert saved.lost_annotations == (() if name == "mine" else (("s", node.id, name),))
        assert saved.annotations == (7 if name == "mine" else 6) and saved.nodes == 1
        with SessionStore.open(tmp_path / name) as store:
            found = store.get("s").annotations(node.id)
            assert set(found) == {*names} - ({name} - {"mine"}) and found["mine"] == "anew"
    for sidecar in (path / "segments").glob("*.idx"):
        sidecar.unlink()  # then what is left of the record says what it was
    [damage] = fsck(path).damaged
    assert f"annotation {names[-1]!r} of node 1 of session 's'" in damage.what
    segment.write_bytes(data)
    assert set(names) - {"uncommon", "mine"} <= set(STANDARD_NAMES)


def test_what_is_damaged_while_a_store_is_open_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path, durability="commit") as store:
        session = text_session(store)
        node = session.append(session.root, range(5), annotations={"bad": 12345678, "worse": "damaged"})
        other = session.append(node, range(5), annotations={"fine": 1})
    [segment] = (path / "segments").glob("*.seg")
    data = segment.read_bytes()

    def damage(what: bytes) -> None:
        at = segment.read_bytes().index(what)
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(bytes([what[0] ^ 1]))

    with SessionStore.open(path, read_only=True) as store:
        damage(b"damaged")
        with pytest.raises(CorruptTree, match="an annotation of node 1 of session 's'"):
            store.get("s").annotations(node.id)
        with pytest.raises(CorruptTree):
            export_bundle(store, tmp_path / "bundle")
        assert store.get("s").annotations(other.id) == {"fine": 1}
        assert store.get("s").annotation(node.id, "bad") == 12345678
    with SessionStore.open(path, read_only=True, strict=False) as store:
        damage((12345678).to_bytes(4, "big"))
        exported = export_bundle(store, tmp_path / "bundle")
        assert (exported.nodes, exported.annotations, exported.unread) == (2, 1, 1)
        exported = export_bundle(store, tmp_path / "bundle", ["s"], subtree=store.get("s").node(other.id))
        assert (exported.nodes, exported.annotations, exported.unread) == (2, 1, 1)
    segment.write_bytes(data)


def test_fsck_names_what_is_said_of_nodes_that_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path, durability="commit") as store:
        session = text_session(store)
        node = session.append(session.root, [77, 78, 79], annotations={"a": 1, "b": 2})
        child = session.append(node, [1], annotations={"c": 3})
        other = session.append(session.root, [5], annotations={"d": 4})
        session.annotate(session.root, {"e": 5})
    [segment] = (path / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(np.array([77, 78, 79], "<i4").tobytes())] ^= 1
    segment.write_bytes(data)
    report = fsck(path)
    assert [finding.what for finding in report.dangling] == [
        "annotation 'a', 'b' of session 's' is of node 1, which is damaged",
        "annotation 'c' of session 's' is of node 2, which rests on damage",
    ]
    assert [finding.node_id for finding in report.dangling] == [node.id, child.id]
    saved = salvage(path, tmp_path / "saved")
    assert saved.annotations == 2 and {name for _, _, name in saved.lost_annotations} == {"a", "b", "c"}
    with SessionStore.open(tmp_path / "saved") as store:
        session = store.get("s")
        assert session.annotations(other.id) == {"d": 4} and session.annotations(session.root) == {"e": 5}
    assert fsck(tmp_path / "saved").ok
    assert stats(tmp_path / "saved").annotations == 2


def test_fsck_finds_annotations_that_stand_elsewhere(tmp_path: Path) -> None:
    """Sound records that say what cannot be: of another node, of tokens that it has not, of no node and no session."""
    path = tmp_path / "store"
    with SessionStore.open(path, durability="commit") as store:
        session = text_session(store)
        node = session.append(session.root, range(3))
        assert store._journal is not None
        records = [
            codec.AnnotationRecord(0, 1, bytes(32), "wrong", 1, 1),
            codec.AnnotationRecord(0, 1, node.id, "far", TokenValues([1], 3), 2),
            codec.AnnotationRecord(0, 9, node.id, "nowhere", 1, 3),
            codec.AnnotationRecord(5, 1, node.id, "nobody", 1, 4),
            codec.AnnotationRecord(0, 1, node.id, "fine", 1, 5),
        ]
        number = store._journal.number_of("s")
        assert number is not None
        encoded = [codec.encode(each._replace(session=each.session + number)) for each in records]
        store._journal._log.enqueue([(each, prefix_of(each)) for each in encoded])
    found = [finding.what for finding in fsck(path).dangling]
    assert sorted(found) == [
        "annotation 'far' of session 's' is of node 1, which has 3 tokens, not 4",
        f"annotation 'nobody' of session {number + 5}, which has no record",
        "annotation 'nowhere' of session 's' is of node 9, which is missing",
        "annotation 'wrong' of session 's' is of node 1, which is another",
    ]
    saved = salvage(path, tmp_path / "saved")
    assert saved.annotations == 1
    with SessionStore.open(tmp_path / "saved") as store:
        assert store.get("s").annotations(node.id) == {"fine": 1}
