"""Bundles: what was exported comes back in another store, whole, once, however often; damage changes nothing."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import sessiontree
from engine_bridge import request_inputs
from sessiontree import (
    CorruptTree,
    ExternalPositions,
    IncompatibleStore,
    KeyTaken,
    LimitExceeded,
    Namespace,
    NeedsExtra,
    Node,
    Session,
    SessionStore,
    SessionTreeError,
    StoreClosed,
    StoreFailed,
    UnknownAlias,
    UnknownNode,
    UnknownSession,
    Unsupported,
    bundle_contents,
    bundles,
    codec,
    edits,
    journal,
)
from sessiontree.backends import bundle_file, frames, segment_log
from sessiontree.backends.bundle_file import BundleWriter
from sessiontree.backends.system import System
from sessiontree.bundles import HeadKept, export_bundle, import_bundle, open_bundle
from sessiontree.positions import scheme
from sessiontree.testing.together import in_threads
from tests.disk import Disk, mutated
from tests.disk_model import (
    DURABILITIES,
    all_seen,
    digest,
    fail,
    golden,
    grow,
    let_go,
    open_on,
    outline,
    reopened,
    scheme_of,
    seen,
)
from tests.reference import Segment
from tests.test_robustness import interrupted
from tests.test_store_disk import (
    NAME,
    PICK,
    TOKENS,
    TURN,
    an_image,
    answer,
    append,
    blob_files,
    code_of,
    everything,
    in_process,
    pixels,
    say,
    text_session,
)
from tests.toy import a_turn, toy_scheme

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
COMPRESS = (None, "zstd")
compressed = pytest.mark.parametrize("compress", COMPRESS)
durabilities = pytest.mark.parametrize("durability", DURABILITIES)
few = settings(max_examples=400 if SOAK else 60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports take two nodes at a time, and what is taken together is a frame of its own."""
    monkeypatch.setattr(bundles, "_BATCH", 2)
    monkeypatch.setattr(segment_log, "_FRAME_BYTES", 1)


def on_disk(disk: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles are written to, and read from, this disk."""
    monkeypatch.setattr(bundles, "_SYSTEM", disk)


class Hasty(System):
    """What is written is as good as on disk."""

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: str) -> None:
        pass


def some_store(**options: Any) -> SessionStore:
    """In memory: conversations with pictures, replies, a rewritten history, forks, heads."""
    store = SessionStore.in_memory()
    session = store.create("chat", scheme=toy_scheme(), **options)
    one = append(session, session.root, a_turn(), metadata={"n": 1}, role="system")
    two = say(session, one, 11, 12, key="mine", metadata={"by": ["a", 1.5, b"x"]})
    three = session.append(two, [5, 6, 7])
    session.rewrite(three, [(0, 2, [31])])
    session.truncate(three, three.stop - 1)
    session.set_head("main", three)
    session.set_head("other", one)
    fork = store.fork(session, two, "fork")
    fork.set_head("main", say(fork, two, 13, key="k"))
    text_session(store, "text").append(store.get("text").root, [1])
    return store


def taken(path: Path, **options: Any) -> SessionStore:
    """A new store in memory with what a bundle holds."""
    store = SessionStore.in_memory()
    import_bundle(store, path, **options)
    return store


def content_of(folder: Path) -> dict[str, bytes]:
    """Every byte of every file."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def records_of(path: Path) -> list[bytes]:
    contents = bundle_contents.open_contents(System(), str(path), bundles.MAX_BYTES)
    found = [contents.file.read(entry) for entry in contents.entries]
    contents.file.close()
    return found


def bundle_of(path: Path, records: Sequence[bytes | codec.Record]) -> Path:
    """A sound bundle of records, whatever they are."""
    writer = BundleWriter(Hasty(), str(path), bytes(16))
    for record in records:
        writer.add(record if isinstance(record, bytes) else codec.encode(record))
    writer.finish()
    return path


# --- what was exported comes back --------------------------------------------------------------------------------------------
@compressed
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_everything_comes_back_and_is_exported_to_the_same_bytes(tmp_path: Path, where: str, compress: Any) -> None:
    store = SessionStore.in_memory() if where == "memory" else SessionStore.open(tmp_path / "store")
    everything(store)
    expected = all_seen(store)
    first = tmp_path / "first.bundle"
    report = export_bundle(store, first, compress=compress)
    assert report.sessions == store.sessions() and report.bytes == first.stat().st_size
    assert (report.heads, report.skipped, report.media, report.aliases) == (4, 0, 0, 0)
    store.close()
    assert len([name for name in os.listdir(tmp_path) if name != "store"]) == 1
    if where == "disk":  # sessions that nobody has opened
        with SessionStore.open(tmp_path / "store", read_only=True) as store:
            export_bundle(store, tmp_path / "again.bundle", compress=compress)
            assert (tmp_path / "again.bundle").read_bytes() == first.read_bytes()
    for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "target")):
        imported = import_bundle(target, first)
        assert imported.created == report.sessions and not imported.merged and not imported.ids
        assert (imported.nodes_added, imported.nodes_known, imported.heads_set) == (report.nodes, 0, 4)
        assert all_seen(target) == expected
        export_bundle(target, tmp_path / "again.bundle", compress=compress)
        assert (tmp_path / "again.bundle").read_bytes() == first.read_bytes()
        target.close()
    with SessionStore.open(tmp_path / "target") as target:
        assert all_seen(target) == expected
    with open_bundle(first) as bundle:
        assert all_seen(bundle) == expected
        assert (bundle.nodes, bundle.size, bundle.compressed) == (report.nodes, report.bytes, compress is not None)
        export_bundle(bundle, tmp_path / "again.bundle", compress=compress)
    assert (tmp_path / "again.bundle").read_bytes() == first.read_bytes()


def test_sessions_of_every_family_come_back(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        for name, history in golden():
            grow(store.create(name, scheme=scheme_of(name, history)), history)
        expected = all_seen(store)
        export_bundle(store, tmp_path / "bundle")
    assert len(expected) > 60
    target = taken(tmp_path / "bundle")
    assert all_seen(target) == expected
    with open_bundle(tmp_path / "bundle") as bundle:
        assert all_seen(bundle) == expected


@pytest.mark.parametrize("durability", DURABILITIES)
def test_twice_is_once_byte_by_byte(tmp_path: Path, durability: journal.Durability) -> None:
    source = SessionStore.in_memory()
    everything(source)
    source.put_features(an_image(9), pixels(1))
    source.alias_media("cat", an_image(9), source.get("all").namespace)
    source.get("all").pin(source.get("all").head("other").node)
    report = export_bundle(source, tmp_path / "bundle", features=True)
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        import_bundle(store, tmp_path / "bundle")
        expected = all_seen(store)
    before = content_of(tmp_path / "store")
    assert any(name.startswith("blobs") for name in before)
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        again = import_bundle(store, tmp_path / "bundle")
        assert (again.nodes_added, again.nodes_known, again.heads_set, again.heads_kept) == (0, report.nodes, 0, ())
        assert again.merged == report.sessions and not again.created
        assert not store._sessions  # it opened none
    assert content_of(tmp_path / "store") == before
    with SessionStore.open(tmp_path / "store") as store:
        assert all_seen(store) == expected == all_seen(source)


def test_some_sessions_and_forks_that_stand_alone(tmp_path: Path) -> None:
    for store in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        everything(store)
        for names in (["fork"], ["fork of a fork"], ["fork of a fork", "fork"], ["fork beside a result", "all"], ["empty"], []):
            expected = {name: seen(store.get(name)) for name in names}
            assert set(export_bundle(store, tmp_path / "bundle", names).sessions) == set(names)
            target = taken(tmp_path / "bundle")
            assert all_seen(target) == expected
            with open_bundle(tmp_path / "bundle") as bundle:
                assert all_seen(bundle) == expected
            again = export_bundle(store, tmp_path / "again", reversed(names))
            assert (tmp_path / "again").read_bytes() == (tmp_path / "bundle").read_bytes() and again.sessions == target.sessions()
        store.close()


def test_d24_forks_of_exported_sessions_cost_their_own_delta(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        tip = session.root
        for _ in range(200):
            tip = session.append(tip, rng.integers(0, 9, 100, np.int32))
        alone = export_bundle(store, tmp_path / "alone").bytes
        for number in range(100):
            fork = store.fork(session, tip, f"fork {number}")
            fork.append(tip, [number])
        live = export_bundle(store, tmp_path / "live").bytes
    with SessionStore.open(tmp_path / "store", read_only=True) as store:
        assert export_bundle(store, tmp_path / "stored").bytes == live <= alone + 100 * 600
    assert (tmp_path / "live").read_bytes() == (tmp_path / "stored").read_bytes()
    with SessionStore.open(tmp_path / "other") as other:
        import_bundle(other, tmp_path / "live")
        assert [len(other.get(name).tree) for name in other.sessions()] == [201] + [202] * 100
    size = sum(file.stat().st_size for file in (tmp_path / "other" / "segments").glob("*.seg"))
    assert size <= alone + 100 * 800
    memory = taken(tmp_path / "live")
    assert len({id(memory.get(name).node(tip.id)) for name in memory.sessions()}) == 1  # shared, as forks share


def test_a_fork_keeps_its_own_limits_and_no_result_that_came_later(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store, max_tokens=50)
    calls = session.append(session.root, [1], metadata={"tool_calls": ["x", "y"]})
    first = session.append(calls, [2], metadata={"tool_call_id": "x"})
    store.fork(session, first, "fork")
    session.append(calls, [3], metadata={"tool_call_id": "y"})
    assert len(store.get("fork").tree) == 3
    export_bundle(store, tmp_path / "bundle")
    target = taken(tmp_path / "bundle")
    assert all_seen(target) == all_seen(store)
    assert target.get("fork").max_tokens == 50


def test_subtrees(tmp_path: Path) -> None:
    for store in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        everything(store)
        session = store.get("all")
        tree = session.tree
        nodes = list(tree)
        for node in nodes:
            report = export_bundle(store, tmp_path / "bundle", ["all"], subtree=node)
            below = [each for each in nodes if node in each.path()]
            above = list(node.path()[1:-1])
            with open_bundle(tmp_path / "bundle") as bundle:
                found = bundle.get("all")
                assert [digest(each) for each in found.tree] == [
                    digest(each) for each in nodes if each in (tree.root, *above, *below)
                ]
                inside = {name: head for name, head in tree.heads.items() if head.node in below}
                assert {name: (head.node.id, head.version) for name, head in found.tree.heads.items()} == {
                    name: (head.node.id, head.version) for name, head in inside.items()
                }
                assert (report.nodes, report.heads) == (len(found.tree) - 1, len(inside))
                assert outline(taken(tmp_path / "bundle").get("all").tree) == outline(found.tree)
        store.close()


def test_a_subtree_belongs_to_one_session(tmp_path: Path) -> None:
    store = some_store()
    shared = store.get("fork").head("main").node.parent
    assert shared is not None
    with pytest.raises(Unsupported, match=r"2 sessions: 'chat', 'fork'"):
        export_bundle(store, tmp_path / "bundle", subtree=shared)
    with pytest.raises(UnknownNode):
        export_bundle(store, tmp_path / "bundle", ["text"], subtree=shared)
    assert export_bundle(store, tmp_path / "bundle", ["chat"], subtree=shared).sessions == ("chat",)
    own = store.get("fork").head("main").node
    assert export_bundle(store, tmp_path / "bundle", subtree=own).sessions == ("fork",)
    assert outline(taken(tmp_path / "bundle").get("fork").tree) == outline(store.get("fork").tree)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    store = some_store()
    with pytest.raises(UnknownSession, match="'none'"):
        export_bundle(store, tmp_path / "bundle", ["chat", "none"])
    with pytest.raises(TypeError, match="list of ids"):
        export_bundle(store, tmp_path / "bundle", "chat")
    with pytest.raises(TypeError, match="a Node"):
        export_bundle(store, tmp_path / "bundle", subtree=store.get("chat").root.id)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="gzip"):
        export_bundle(store, tmp_path / "bundle", compress="gzip")  # type: ignore[arg-type]
    with pytest.raises(StoreFailed, match="No such file"):
        export_bundle(store, tmp_path / "none" / "bundle")
    store.close()
    with pytest.raises(StoreClosed):
        export_bundle(store, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_an_empty_store(tmp_path: Path) -> None:
    assert export_bundle(SessionStore.in_memory(), tmp_path / "bundle").nodes == 0
    with open_bundle(tmp_path / "bundle") as bundle:
        assert bundle.sessions() == () and bundle.nodes == 0
    assert taken(tmp_path / "bundle").sessions() == ()


def test_reports_are_plain_and_progress_is_told(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    tip = session.root
    for number in range(2500):
        tip = session.append(tip, [number])
    session.set_head("main", tip)
    told: list[tuple[int, int]] = []
    report = export_bundle(store, tmp_path / "bundle", progress=lambda *step: told.append(step))
    assert told == sorted(told) and told[-1] == (2500, 2500) and len(told) > 2
    assert json.loads(json.dumps(report.to_dict())) == {
        **dict.fromkeys(("media", "aliases", "skipped", "pins", "annotations", "unread"), 0),
        **{"path": str(tmp_path / "bundle"), "sessions": ["s"], "nodes": 2500, "heads": 1, "bytes": report.bytes, "left_out": []},
    }
    told.clear()
    target = SessionStore.in_memory()
    imported = import_bundle(target, tmp_path / "bundle", namespace="other", progress=lambda *step: told.append(step))
    assert told == sorted(told) and told[-1] == (5000, 5000) and len(told) > 4
    plain = json.loads(json.dumps(imported.to_dict()))
    assert plain["ids"][tip.id.hex()] == target.get("s").head("main").node.id.hex()
    assert (plain["created"], plain["merged"], plain["heads_kept"], plain["annotations_kept"]) == (["s"], [], [], [])


def test_a_bundle_takes_the_place_of_what_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(b"old")
    export_bundle(some_store(), tmp_path / "bundle")
    expected = all_seen(some_store())
    with open_bundle(tmp_path / "bundle") as bundle:
        export_bundle(bundle, tmp_path / "bundle", ["text"])  # over itself
        assert all_seen(bundle) == expected
    assert taken(tmp_path / "bundle").sessions() == ("text",)


def test_d31_a_chain_of_100_000_turns(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    tip = session.root
    for number in range(100_000):
        tip = session.append(tip, [number])
    session.set_head("main", tip)
    store.fork(session, tip, "fork").set_head("main", tip)
    export_bundle(store, tmp_path / "bundle")
    target = taken(tmp_path / "bundle")
    for name in ("s", "fork"):
        node = target.get(name).head("main").node
        assert node.id == tip.id and np.array_equal(node.input_ids(), tip.input_ids())
    export_bundle(store, tmp_path / "fork", ["fork"])
    with open_bundle(tmp_path / "fork") as bundle:
        assert bundle.get("fork").head("main").node.id == tip.id


# --- at random ---------------------------------------------------------------------------------------------------------------
Op = Callable[[SessionStore], object]


def session_of(store: SessionStore, where: int) -> Session:
    names = store.sessions()
    return store.get(names[where % len(names)])


def node_of(session: Session, number: int) -> Node:
    nodes = list(session.tree)
    return nodes[-1 - number % len(nodes)]


def _create(number: int, limit: int | None, scope: Any, store: SessionStore) -> None:
    if len(store.sessions()) < 4:
        name = f"s{len(store.sessions())}"
        store.create(name, scheme=toy_scheme(), max_tokens=limit, namespace=scope(number), model_fingerprint=f"m{number % 2}")


def _append(where: int, number: int, segment: Segment, key: str | None, store: SessionStore) -> None:
    session = session_of(store, where)
    metadata = {"n": number, "deep": [{"a": (1.5, b"x")}, {3, "y"}]} if number % 2 else None
    append(session, node_of(session, number // 2), segment, key=key, metadata=metadata, role=("user", "tool")[number % 2])


def _generate(where: int, number: int, tokens: list[int], key: str | None, store: SessionStore) -> None:
    session = session_of(store, where)
    draft = session.draft(node_of(session, number), key=key, metadata={"t": number} if number % 3 else None)
    draft.extend(tokens)
    draft.commit(("stop", "length", "interrupted")[number % 3], tail_policy=("keep", "drop_last")[number % 2])


def _edit(where: int, number: int, start: int, tokens: list[int], store: SessionStore) -> None:
    session = session_of(store, where)
    node = node_of(session, number)
    at = start % (node.stop + 1)
    if number % 2:
        session.truncate(node, at)
    else:
        session.rewrite(node, [(at, min(at + 2, node.stop), tokens)])


def _place(where: int, number: int, store: SessionStore) -> None:
    session = session_of(store, where)
    node = node_of(session, number)
    table = np.arange(6, dtype=np.int64).reshape(3, 2) + int(node.next_position)
    session.append(node, [21, 22], positions=ExternalPositions(table))


def _fork(where: int, number: int, store: SessionStore) -> None:
    if len(store.sessions()) < 4:
        session = session_of(store, where)
        store.fork(session, node_of(session, number), f"s{len(store.sessions())}")


def _head(where: int, number: int, name: str, drop: bool, store: SessionStore) -> None:
    session = session_of(store, where)
    if drop:
        session.drop_head(name)
    else:
        session.set_head(name, node_of(session, number))


def operations(scope: Any) -> st.SearchStrategy[list[Op]]:
    """Things to do with a store; what is refused is refused everywhere."""
    keys = st.sampled_from((None, None, "k", "l"))
    create = st.builds(partial, st.just(_create), PICK, st.sampled_from((None, None, 80)), st.just(scope))
    others = st.one_of(
        st.builds(partial, st.just(_append), PICK, PICK, TURN, keys),
        st.builds(partial, st.just(_append), PICK, PICK, TURN, keys),
        st.builds(partial, st.just(_generate), PICK, PICK, TOKENS, keys),
        st.builds(partial, st.just(_edit), PICK, PICK, PICK, TOKENS),
        st.builds(partial, st.just(_place), PICK, PICK),
        st.builds(partial, st.just(_fork), PICK, PICK),
        st.builds(partial, st.just(_head), PICK, PICK, NAME, st.sampled_from((False, False, True))),
        create,
    )
    return st.builds(lambda first, rest: [first, *rest], create, st.lists(others, max_size=14))


def perform(store: SessionStore, ops: Sequence[Op]) -> SessionStore:
    for op in ops:
        with suppress(SessionTreeError):
            op(store)
    return store


def tenants(number: int) -> str:
    return f"tenant {number % 2}"


@few
@given(
    ops=operations(tenants), compress=st.sampled_from(COMPRESS), chosen=st.none() | st.sets(st.integers(0, 3)), disk=st.booleans()
)
def test_random_stores_come_back(
    tmp_path_factory: pytest.TempPathFactory, ops: list[Op], compress: Any, chosen: set[int] | None, disk: bool
) -> None:
    folder = tmp_path_factory.mktemp("bundles")
    store = perform(open_on(Disk(), durability="relaxed") if disk else SessionStore.in_memory(), ops)
    names = [name for number, name in enumerate(store.sessions()) if chosen is None or number in chosen]
    expected = {name: seen(store.get(name)) for name in names}
    report = export_bundle(store, folder / "bundle", None if chosen is None else names, compress=compress)
    for target in (SessionStore.in_memory(), open_on(Disk(), durability="commit")):
        imported = import_bundle(target, folder / "bundle")
        assert all_seen(target) == expected and imported.nodes_added == report.nodes
        again = import_bundle(target, folder / "bundle")
        assert all_seen(target) == expected and (again.nodes_added, again.nodes_known) == (0, report.nodes)
        export_bundle(target, folder / "again", compress=compress)
        assert (folder / "again").read_bytes() == (folder / "bundle").read_bytes()
        target.close()
    with open_bundle(folder / "bundle") as bundle:
        assert all_seen(bundle) == expected
    store.close()


@few
@given(ops=operations(tenants), more=operations(tenants))
def test_two_exports_that_overlap(tmp_path_factory: pytest.TempPathFactory, ops: list[Op], more: list[Op]) -> None:
    """The later one brings what is missing, whatever was there; the earlier one then brings nothing."""
    folder = tmp_path_factory.mktemp("bundles")
    store = perform(SessionStore.in_memory(), ops)
    export_bundle(store, folder / "early")
    early = {name: outline(store.get(name).tree) for name in store.sessions()}
    perform(store, more)
    export_bundle(store, folder / "late")
    expected = all_seen(store)
    target = taken(folder / "early")
    assert {name: outline(target.get(name).tree) for name in target.sessions()} == early
    report = import_bundle(target, folder / "late")
    assert [all_seen(target)[name]["nodes"] for name in expected] == [each["nodes"] for each in expected.values()]
    kept = {(head.session_id, head.name): head.here for head in report.heads_kept}
    for name in expected:
        found, wanted = target.get(name).tree.heads, store.get(name).tree.heads
        for head, (node, _) in wanted.items():
            there = dict((each[0], each[1]) for each in early.get(name, ((), ()))[1]).get(head)
            if (name, head) in kept:
                assert found[head].node.id == there == kept[name, head]
                assert store.get(name).node(there) not in node.path()
            else:
                assert found[head].node == node
                assert there is None or store.get(name).node(there) in node.path()
    before = all_seen(target)
    again = import_bundle(target, folder / "early")
    assert again.nodes_added == again.heads_set == 0 and all_seen(target) == before


@few
@given(ops=operations(lambda number: {"tenant": f"tenant {number % 2}"}))
def test_another_namespace_is_as_if_it_had_been_done_there(tmp_path_factory: pytest.TempPathFactory, ops: list[Op]) -> None:
    folder = tmp_path_factory.mktemp("bundles")
    there = SessionStore.in_memory()
    first = Namespace(cache_salt="salt", lora="lora")
    create = SessionStore.create
    with pytest.MonkeyPatch.context() as patch:
        # Keys are taken as they are; those that rewriting makes name ids.
        patch.setattr(edits, "_key_of", lambda source, data, media: None if source.key is None else f"{source.key} {data.hex()}")
        store = perform(SessionStore.in_memory(), ops)
        patch.setattr(SessionStore, "create", lambda self, name, **given: create(self, name, **{**given, "namespace": first}))
        perform(there, ops)
    expected = all_seen(there)
    export_bundle(store, folder / "bundle")
    target = SessionStore.in_memory()
    report = import_bundle(target, folder / "bundle", namespace=first)
    assert all_seen(target) == expected
    for name in store.sessions():
        pairs = zip(store.get(name).tree, target.get(name).tree, strict=True)
        assert all(report.ids[old.id] == new.id != old.id for old, new in pairs)
    again = import_bundle(target, folder / "bundle", namespace=first)
    assert all_seen(target) == expected and again.nodes_added == 0 and again.ids == report.ids
    with pytest.raises(IncompatibleStore, match=r"tenant 'tenant .'"):
        import_bundle(target, folder / "bundle")
    assert all_seen(target) == expected


class Machine(RuleBasedStateMachine):
    """Stores that send each other bundles. Beside them, of each store and session: what nodes it has, and where its heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["BUNDLES_TMP"])
        self.disk = Disk()
        self.stores = [SessionStore.in_memory(), open_on(self.disk, durability="group"), SessionStore.in_memory()]
        self.nodes: list[dict[str, dict[bytes, str]]] = [{}, {}, {}]
        self.heads: list[dict[str, dict[str, bytes]]] = [{}, {}, {}]
        self.paths: dict[bytes, tuple[bytes, ...]] = {}
        self.made = itertools.count()

    def teardown(self) -> None:
        for store in self.stores:
            let_go(store)

    def session(self, at: int, where: int) -> Session | None:
        names = self.stores[at].sessions()
        return self.stores[at].get(names[where % len(names)]) if names else None

    def note(self, at: int, session: Session) -> None:
        """What an operation did is known by looking; what an import does, never."""
        known = self.nodes[at].setdefault(session.id, {})
        for node in session.tree:
            if node.id not in known:
                known[node.id] = digest(node)
                self.paths[node.id] = tuple(each.id for each in node.path())
        self.heads[at][session.id] = {name: node.id for name, node in session.heads.items()}

    @rule(at=st.integers(0, 2), number=st.integers(0, 2))
    def create(self, at: int, number: int) -> None:
        with suppress(SessionTreeError):
            self.note(at, self.stores[at].create(f"s{number}", scheme="text@hf5", namespace=f"tenant {number % 2}"))

    @rule(at=st.integers(0, 2), where=PICK, number=PICK, token=st.integers(0, 2), generate=st.booleans())
    def append(self, at: int, where: int, number: int, token: int, generate: bool) -> None:
        if (session := self.session(at, where)) is not None:
            node = node_of(session, number)
            if generate:
                say(session, node, token, key=f"request {next(self.made)}")
            else:
                session.append(node, [token], metadata={"made": token})
            self.note(at, session)

    @rule(at=st.integers(0, 2), where=PICK, number=PICK, new=st.integers(3, 5))
    def fork(self, at: int, where: int, number: int, new: int) -> None:
        if (session := self.session(at, where)) is not None:
            with suppress(SessionTreeError):
                self.note(at, self.stores[at].fork(session, node_of(session, number), f"s{new}"))

    @rule(at=st.integers(0, 2), where=PICK, number=PICK, name=NAME)
    def head(self, at: int, where: int, number: int, name: str) -> None:
        if (session := self.session(at, where)) is not None:
            session.set_head(name, node_of(session, number))
            self.note(at, session)

    @rule(one=st.integers(0, 2), two=st.integers(0, 2), some=st.none() | st.integers(1, 63), compress=st.sampled_from(COMPRESS))
    def send(self, one: int, two: int, some: int | None, compress: Any) -> None:
        names = [name for name in self.stores[one].sessions() if some is None or some >> int(name[1:]) & 1]
        path = self.folder / "sent"
        export_bundle(self.stores[one], path, names, compress=compress)
        roots = {name: self.stores[one].get(name).root.id for name in names}
        clash = [name for name in names if name in self.nodes[two] and roots[name] not in self.nodes[two][name]]
        if clash:
            with pytest.raises(IncompatibleStore):
                import_bundle(self.stores[two], path)
            return
        report = import_bundle(self.stores[two], path)
        kept = {(each.session_id, each.name) for each in report.heads_kept}
        for name in names:
            here, there = self.nodes[two].setdefault(name, {}), self.nodes[one][name]
            for node_id, facts in there.items():
                here.setdefault(node_id, facts)
            heads = self.heads[two].setdefault(name, {})
            for head, node_id in self.heads[one][name].items():
                if head not in heads or heads[head] in self.paths[node_id]:
                    heads[head] = node_id
                    assert (name, head) not in kept
                else:
                    assert (name, head) in kept

    @rule()
    def reopen(self) -> None:
        self.stores[1].close()
        self.stores[1] = open_on(self.disk, durability="group")

    @invariant()
    def they_have_what_they_should(self) -> None:
        for at, store in enumerate(self.stores):
            assert set(store.sessions()) == set(self.nodes[at])
            for name, nodes in self.nodes[at].items():
                tree = store.get(name).tree
                assert {node.id for node in tree} == set(nodes)
                assert {head: each.node.id for head, each in tree.heads.items()} == self.heads[at][name]
                for node in list(tree)[-2:]:
                    assert digest(node) == nodes[node.id]


Machine.TestCase.settings = settings(
    max_examples=1000 if SOAK else 60,
    stateful_step_count=40 if SOAK else 25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def _folder_of_the_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUNDLES_TMP", str(tmp_path_factory.mktemp("machine")))
        yield


TestMachine = Machine.TestCase


# --- what does not fit --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_session_of_another_root_is_named_with_both(tmp_path: Path, where: str) -> None:
    export_bundle(some_store(namespace="acme"), tmp_path / "bundle")
    target = SessionStore.in_memory() if where == "memory" else SessionStore.open(tmp_path / "store")
    text_session(target, "text")
    target.create("chat", scheme=toy_scheme(), namespace="other", model_fingerprint="m")
    before = all_seen(target)
    with pytest.raises(IncompatibleStore) as caught:
        import_bundle(target, tmp_path / "bundle")
    message = str(caught.value)
    assert "'chat'" in message and "tenant 'other'" in message and "tenant 'acme'" in message and "fingerprint 'm'" in message
    here, there = target.get("chat").root.id, some_store(namespace="acme").get("chat").root.id
    assert (caught.value.expected, caught.value.found) == (here, there)  # type: ignore[attr-defined]
    assert here[:4].hex() in message and there[:4].hex() in message
    assert all_seen(target) == before
    target.close()


def test_an_alias_or_a_key_that_names_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_BATCH", 1)
    store = some_store()
    store.alias_media("cat", an_image(), None)
    export_bundle(store, tmp_path / "bundle")
    target = SessionStore.in_memory()
    target.alias_media("cat", an_image(1))
    with pytest.raises(KeyTaken, match="alias 'cat' names") as caught:
        import_bundle(target, tmp_path / "bundle")
    assert caught.value.identity == an_image(1).identity and not target.sessions()
    chat = store.get("chat")
    say(chat, chat.node(chat.head("main").node.ancestor(1).id), 98, key="yours")
    export_bundle(store, tmp_path / "bundle")
    target = SessionStore.in_memory()
    session = target.create("chat", scheme=toy_scheme())
    one = append(session, session.root, a_turn(), role="system")
    mine = say(session, one, 99, key="yours")
    before = all_seen(target)
    with pytest.raises(KeyTaken, match="key 'yours' under") as caught:
        import_bundle(target, tmp_path / "bundle")
    assert caught.value.node is mine
    assert all_seen(target) == before  # not even what came before it in the bundle


def test_a_path_that_is_longer_than_a_session_allows(tmp_path: Path) -> None:
    export_bundle(some_store(), tmp_path / "bundle")
    target = SessionStore.in_memory()
    target.create("chat", scheme=toy_scheme(), max_tokens=12, reserve_output=5)
    before = all_seen(target)
    with pytest.raises(LimitExceeded, match="14 tokens; session 'chat' allows 12"):
        import_bundle(target, tmp_path / "bundle")
    assert all_seen(target) == before
    target = SessionStore.in_memory()
    target.create("chat", scheme=toy_scheme(), max_tokens=14, reserve_output=5)
    import_bundle(target, tmp_path / "bundle")  # what was generated into the reserve is no longer than it was
    assert (target.get("chat").max_tokens, target.get("chat").reserve_output) == (14, 5)


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    store = some_store()
    export_bundle(store, tmp_path / "bundle")
    for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        session = target.create("chat", scheme=toy_scheme(), max_tokens=1000)
        one = append(session, session.root, a_turn(), role="system", metadata={"mine": True})
        session.append(one, [77])
        session.set_head("other", one)
        session.set_head("main", session.append(one, [88]))
        session.drop_head("other")
        report = import_bundle(target, tmp_path / "bundle")
        assert (report.created, report.merged) == (("fork", "text"), ("chat",))
        assert one.metadata == {"mine": True} and session.node(one.id) is one
        assert session.max_tokens == 1000
        assert [node.token_ids.tolist() for node in session.children(one)] == [[77], [88], [11, 12]]
        assert session.head("main").node.token_ids.tolist() == [88]
        assert report.heads_kept == (
            HeadKept("chat", "main", session.head("main").node.id, store.get("chat").head("main").node.id),
        )
        assert session.head("other").version > session.head("main").version  # none comes twice
        assert [node.id for node in target.get("fork").tree] == [node.id for node in store.get("fork").tree]
        target.close()


def test_a_fork_that_is_there_and_is_none(tmp_path: Path) -> None:
    """It gets all of the path, not only what is the fork's own."""
    store = some_store()
    export_bundle(store, tmp_path / "bundle")
    for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        fork = target.create("fork", scheme=toy_scheme())
        other = fork.append(fork.root, [5])
        import_bundle(target, tmp_path / "bundle")
        assert [node.id for node in fork.tree] == [fork.root.id, other.id, *(node.id for node in list(store.get("fork").tree)[1:])]
        assert fork.head("main").node == store.get("fork").head("main").node
        assert import_bundle(target, tmp_path / "bundle").nodes_added == 0
        target.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_d26_pins_come_along_and_hold(tmp_path: Path, where: str) -> None:
    """What was kept for a pin's sake is kept where it is taken to."""
    store = SessionStore.in_memory() if where == "memory" else SessionStore.open(tmp_path / "store")
    session = text_session(store)
    one = session.append(session.root, [1])
    two, other = session.append(one, [2]), session.append(one, [3])
    fork = store.fork(session, two, "fork")
    last = fork.append(two, [4])
    for node in (two, session.root):
        session.pin(node)
    for node in (one, last):
        fork.pin(node)
    fork.unpin(one)
    report = export_bundle(store, tmp_path / "bundle")
    assert report.pins == 3
    for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "target")):
        assert import_bundle(target, tmp_path / "bundle").pins == 3
        assert target.get("s").pins == {two.id, session.root.id} and target.get("fork").pins == {last.id}
        export_bundle(target, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "bundle").read_bytes()
        target.gc(recent=0)
        assert [node.id for node in target.get("s").tree] == [session.root.id, one.id, two.id]
        assert [node.id for node in target.get("fork").tree] == [session.root.id, one.id, two.id, last.id]
        target.close()
    with SessionStore.open(tmp_path / "target") as target:
        import_bundle(target, tmp_path / "bundle")  # which brings back what nothing held
        assert other.id in target.get("s").tree
    with open_bundle(tmp_path / "bundle") as bundle:
        assert bundle.get("s").pins == session.pins
    moved = SessionStore.in_memory()
    ids = import_bundle(moved, tmp_path / "bundle", namespace="other").ids
    assert moved.get("fork").pins == {ids[last.id]}
    assert export_bundle(store, tmp_path / "bundle", ["s"], subtree=two).pins == 1
    assert taken(tmp_path / "bundle").get("s").pins == {two.id}
    store.close()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_was_dropped_is_not_exported_and_comes_back_by_an_import(tmp_path: Path, where: str) -> None:
    store = SessionStore.in_memory() if where == "memory" else SessionStore.open(tmp_path / "store")
    everything(store)
    export_bundle(store, tmp_path / "before", ["all"])
    session = store.get("all")
    doomed = session.children(session.root)[0]
    whole = {node.id: digest(node) for node in session.tree}
    for name in session.heads:
        session.drop_head(name)
    session.drop(session.children(doomed)[-1])
    left = {node.id: digest(node) for node in session.tree}
    assert len(left) < len(whole)
    for gone in (False, True):
        if gone:
            store.gc()
        export_bundle(store, tmp_path / "after", ["all"])
        for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / f"target {gone}")):
            import_bundle(target, tmp_path / "after")
            assert {node.id: digest(node) for node in target.get("all").tree} == left
            target.close()
        if where == "disk":
            store.close()
            store = SessionStore.open(tmp_path / "store")
    report = import_bundle(store, tmp_path / "before")
    assert report.nodes_added == len(whole) - len(left)
    assert {node.id: digest(node) for node in store.get("all").tree} == whole
    assert import_bundle(store, tmp_path / "before").nodes_added == 0
    store.close()


def test_heads_go_forward_and_never_back(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    one = session.append(session.root, [1])
    session.set_head("main", one)
    export_bundle(store, tmp_path / "one")
    two = session.append(one, [2])
    session.set_head("main", two)
    export_bundle(store, tmp_path / "two")
    session.set_head("main", session.append(one, [3]))
    export_bundle(store, tmp_path / "three")
    target = taken(tmp_path / "one")
    before = target.get("s").head("main")
    assert import_bundle(target, tmp_path / "two").heads_set == 1
    assert target.get("s").head("main").node == two and target.get("s").head("main").version > before.version
    for other in ("one", "three"):
        report = import_bundle(target, tmp_path / other)
        assert not report.heads_set and [(head.name, head.here) for head in report.heads_kept] == [("main", two.id)]
    assert target.get("s").head("main").node == two


def test_what_is_only_read_takes_nothing(tmp_path: Path) -> None:
    export_bundle(some_store(), tmp_path / "bundle")
    with SessionStore.open(tmp_path / "store") as store:
        text_session(store)
    with SessionStore.open(tmp_path / "store", read_only=True) as reader, pytest.raises(Unsupported, match="to be read"):
        import_bundle(reader, tmp_path / "bundle")
    with open_bundle(tmp_path / "bundle") as bundle:
        session = bundle.get("chat")
        acts: list[Callable[[], object]] = [
            lambda: import_bundle(bundle, tmp_path / "bundle"),
            lambda: session.append(session.root, [1]),
            lambda: session.set_head("main", session.root),
            lambda: text_session(bundle, "new"),
            lambda: bundle.fork(session, session.root, "new"),
            lambda: bundle.alias_media("a", an_image()),
            lambda: bundle.put_features(an_image(), pixels(1)),
            lambda: bundle.drop_features(an_image()),
        ]
        before = all_seen(bundle)
        for act in acts:
            with pytest.raises(Unsupported, match=r"read"):
                act()
        assert all_seen(bundle) == before
        copy = SessionStore.in_memory().fork(session, session.head("main").node, "copy")
        assert copy.append(session.head("main").node, [5]).path()[:-1] == session.head("main").node.path()
    with pytest.raises(StoreClosed):
        bundle.get("chat")
    target = SessionStore.in_memory()
    target.close()
    with pytest.raises(StoreClosed):
        import_bundle(target, tmp_path / "bundle")


# --- reading a bundle ---------------------------------------------------------------------------------------------------------
def test_a_bundle_reads_no_more_than_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    leaves = []
    for branch in range(20):
        tip = session.append(session.root, [branch])
        for number in range(30):
            tip = session.append(tip, [number])
        leaves.append(tip.id)
    session.set_head("main", leaves[7])
    export_bundle(store, tmp_path / "bundle")
    reads = []
    real = codec.decode
    monkeypatch.setattr(codec, "decode", lambda data: reads.append(codec.entry_of(data).kind) or real(data))  # type: ignore[func-returns-value]
    monkeypatch.setattr(codec, "text_turn", lambda *_: None)  # which reads most nodes otherwise
    with open_bundle(tmp_path / "bundle") as bundle:
        assert codec.NODE not in reads
        found = bundle.get("s")
        assert found.head("main").node.id == leaves[7]
        assert reads.count(codec.NODE) == 31
        assert found.node(leaves[3]).depth == 31
        assert reads.count(codec.NODE) == 62


def test_c87_two_processes_read_one_bundle(tmp_path: Path) -> None:
    store = some_store()
    export_bundle(store, tmp_path / "bundle")
    code = (
        "import sys, json; from sessiontree.bundles import open_bundle; from tests.disk_model import all_seen, short\n"
        "with open_bundle(sys.argv[1]) as bundle: sys.stdin.readline(); print(json.dumps(short(all_seen(bundle))))"
    )
    from tests.disk_model import short

    processes = [in_process(code, str(tmp_path / "bundle")) for _ in range(2)]
    with open_bundle(tmp_path / "bundle") as bundle:
        assert {answer(process) for process in processes} == {short(all_seen(bundle))} == {short(all_seen(store))}


def test_threads_read_one_bundle(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    everything(store)
    export_bundle(store, tmp_path / "bundle", compress="zstd")
    expected = all_seen(store)
    with open_bundle(tmp_path / "bundle") as bundle:
        in_threads(6, lambda _: _same(all_seen(bundle), expected))


def _same(found: Any, expected: Any) -> None:
    assert found == expected


def test_requests_are_made_from_a_bundle(tmp_path: Path) -> None:
    store = some_store()
    store.put_features(an_image(), {"pixels": pixels(1)})
    export_bundle(store, tmp_path / "bundle", features=True)
    node = store.get("chat").head("main").node
    with open_bundle(tmp_path / "bundle") as bundle:
        assert bundle.media == 1
        found = request_inputs(bundle.get("chat").head("main").node, features=True)
        expected = request_inputs(node, features=True)
        assert torch.equal(found.input_ids, expected.input_ids) and torch.equal(found.positions, expected.positions)
        item = bundle.get("chat").head("main").node.path()[1].media[0]
        kept = bundle.get_features(item)
        assert kept is not None and np.array_equal(kept["pixels"], pixels(1))
        assert bundle.get_features(an_image(8)) is None


# --- features and aliases -----------------------------------------------------------------------------------------------------
@compressed
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_features_come_in_pieces_where_they_are_asked_for(
    tmp_path: Path, where: str, compress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "_PIECE", 3000)
    monkeypatch.setattr("sessiontree.backends.blobs._CHUNK", 1000)
    store = SessionStore.in_memory() if where == "memory" else SessionStore.open(tmp_path / "store")
    everything(store)
    arrays: dict[str, Any] = {
        "pixels": pixels(1, 5000),
        "empty": np.empty((0, 3), np.float32),
        "one": np.array(7, np.uint8),
        "brain": torch.arange(6, dtype=torch.bfloat16),
    }
    held = store.put_features(an_image(9), arrays)
    store.put_features(an_image(8), pixels(2))  # which no node has
    for features in (True, False):
        report = export_bundle(store, tmp_path / "bundle", features=features, compress=compress)
        assert report.media == features
        for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / f"target {features}")):
            assert import_bundle(target, tmp_path / "bundle").media == features
            assert import_bundle(target, tmp_path / "bundle").media == features
            found = target.get_features(an_image(9))
            assert (found is not None) == features
            if found is not None:
                assert found._arrays == held._arrays and found.dtype("brain") == "bfloat16"
            assert target.get_features(an_image(8)) is None
            export_bundle(target, tmp_path / "again", features=features, compress=compress)
            assert (tmp_path / "again").read_bytes() == (tmp_path / "bundle").read_bytes()
            target.close()
    store.close()


def test_features_go_to_disk_without_being_held(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    for number in range(6):
        append(session, session.root, a_turn(number))
        store.put_features(an_image(number), pixels(number, 10_000))
    export_bundle(store, tmp_path / "bundle", features=True)
    with SessionStore.open(tmp_path / "store", feature_bytes=100_000) as target:
        assert import_bundle(target, tmp_path / "bundle").media == 6
        assert target.usage().feature_bytes == 0 and len(blob_files(tmp_path / "store")) == 6
        for number in range(6):
            found = target.get_features(an_image(number))
            assert found is not None and np.array_equal(found["features"], pixels(number, 10_000))
            del found  # what is held is not evicted
    small = SessionStore.in_memory(feature_bytes=200_000)
    import_bundle(small, tmp_path / "bundle")  # as if they had been put one after the other
    assert 0 < small.usage().feature_bytes <= 200_000
    with pytest.raises(LimitExceeded):
        import_bundle(SessionStore.in_memory(feature_bytes=50_000), tmp_path / "bundle")


def test_other_features_of_the_same_content_are_refused(tmp_path: Path) -> None:
    store = some_store()
    store.put_features(an_image(), {"pixels": pixels(1), "more": pixels(3)})
    export_bundle(store, tmp_path / "bundle", features=True)
    for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        target.put_features(an_image(), {"pixels": pixels(2)})
        with pytest.raises(KeyTaken):
            import_bundle(target, tmp_path / "bundle")
        target.drop_features(an_image())
        target.put_features(an_image(), {"pixels": pixels(1)})
        import_bundle(target, tmp_path / "bundle")
        found = target.get_features(an_image())
        assert found is not None and set(found) == {"pixels", "more"}
        target.close()


def test_features_that_are_damaged_are_not_exported(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        append(store.create("s", scheme=toy_scheme()), store.get("s").root, a_turn())
        store.put_features(an_image(), pixels(1))
        [file] = blob_files(tmp_path / "store")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptTree, match="damaged"):
            export_bundle(store, tmp_path / "bundle", features=True)
        assert not (tmp_path / "bundle").exists()
        assert export_bundle(store, tmp_path / "bundle").media == 0


def test_features_under_the_name_of_others_are_damage(tmp_path: Path) -> None:
    store = some_store()
    append(store.get("chat"), store.get("chat").root, a_turn(1))
    for number in (0, 1):
        store.put_features(an_image(number), pixels(number))
    export_bundle(store, tmp_path / "bundle", features=True)
    records = records_of(tmp_path / "bundle")
    pieces = [at for at, record in enumerate(records) if record[1] == bundle_contents.FEATURES]
    assert len(pieces) == 2
    ids = [records[at][20:52] for at in pieces]
    for at, other in zip(pieces, reversed(ids), strict=True):
        records[at] = records[at][:20] + other + records[at][52:]
    bundle_of(tmp_path / "bundle", records)
    with pytest.raises(CorruptTree, match="damaged"):
        taken(tmp_path / "bundle")
    with open_bundle(tmp_path / "bundle") as bundle, pytest.raises(CorruptTree):
        bundle.get_features(an_image())


def test_aliases_of_media_come_along_within_their_namespace(tmp_path: Path) -> None:
    scope = Namespace(tenant="acme")
    for store in (SessionStore.in_memory(), SessionStore.open(tmp_path / "store")):
        session = store.create("s", scheme=toy_scheme(), namespace=scope)
        append(session, session.root, a_turn())
        append(store.create("other", scheme=toy_scheme()), store.get("other").root, a_turn(1))
        for alias, number, namespace in (
            ("cat", 0, scope),
            ("dog", 1, scope),
            ("cat", 0, None),
            ("gone", 0, scope),
            ("kit", 0, scope),
        ):
            store.alias_media(alias, an_image(number), namespace)
        store.drop_alias("gone", scope)
        assert export_bundle(store, tmp_path / "bundle").aliases == 2  # no tenant's names for what only another has
        assert export_bundle(store, tmp_path / "bundle", ["s"]).aliases == 2
        for target in (SessionStore.in_memory(), SessionStore.open(tmp_path / "target")):
            for _ in range(2):
                assert import_bundle(target, tmp_path / "bundle").aliases == 2
            for alias in ("cat", "kit"):
                assert target.aliased_media(alias, scope) == an_image().identity
            for alias, namespace in (("dog", scope), ("gone", scope), ("cat", None)):
                with pytest.raises(UnknownAlias):
                    target.aliased_media(alias, namespace)
            target.close()
        moved = taken(tmp_path / "bundle", namespace="else")
        assert moved.aliased_media("cat", "else") == an_image().identity
        with pytest.raises(UnknownAlias):
            moved.aliased_media("cat", scope)
        with open_bundle(tmp_path / "bundle") as bundle:
            assert bundle.aliased_media("kit", scope) == an_image().identity
        store.close()


# --- zstd ---------------------------------------------------------------------------------------------------------------------
def test_zstd_makes_less_of_it(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    tip = session.root
    for number in range(300):
        tip = session.append(tip, [number] * 500)
    plain = export_bundle(store, tmp_path / "plain").bytes
    packed = export_bundle(store, tmp_path / "packed", compress="zstd").bytes
    assert packed < plain / 8
    assert all_seen(taken(tmp_path / "packed")) == all_seen(store)


def test_zstd_is_asked_for_by_name_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_bundle(some_store(), tmp_path / "packed", compress="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for act in (lambda: export_bundle(some_store(), tmp_path / "b", compress="zstd"), lambda: open_bundle(tmp_path / "packed")):
        with pytest.raises(NeedsExtra, match=r"sessiontree\[zstd\]") as caught:
            act()
        assert caught.value.extra == "zstd"
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    taken(bundle_of(tmp_path / "plain", []))


def packed(path: Path, stream: bytes, says: int) -> Path:
    path.write_bytes(a_stream(stream, says))
    return path


def a_stream(stream: bytes, says: int) -> bytes:
    """A compressed bundle of any stream, with a line that is right but for what it says of the stream."""
    body = b"sessiontree bundle 1 %s zstd %020d %020d %08x" % (uuid.UUID(int=0).hex.encode(), says, len(stream), crc32(stream))
    return body + b" %08x\n" % crc32(body) + stream


def test_d42_streams_that_are_hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle"
    most = bundles.MAX_BYTES
    frames_of = (bundle_of(tmp_path / "plain", []).read_bytes().split(b"\n", 1)[1],)
    bomb = zstandard.ZstdCompressor().compressobj()
    parts = [bomb.compress(bytes(2**20)) for _ in range(512)]
    stream = b"".join(parts) + bomb.flush()
    assert len(stream) < 2**17
    written: list[int] = []
    real = os.dup
    monkeypatch.setattr(os, "dup", lambda fd: written.append(os.fstat(fd).st_size) or real(fd))  # type: ignore[func-returns-value]
    tracemalloc.start()
    with pytest.raises(LimitExceeded, match="max_bytes") as caught:
        open_bundle(packed(path, stream, most + 1))
    assert (caught.value.value, caught.value.limit) == (most + 1, most)
    with pytest.raises(LimitExceeded):
        open_bundle(packed(path, stream, 2**29), max_bytes=2**29 - 1)
    with pytest.raises(CorruptTree, match="has not the 1000 bytes"):  # more than it says: not read to its end
        open_bundle(packed(path, stream, 1000))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    with pytest.raises(CorruptTree, match="no frame"):  # as much as it says, and nothing in it
        open_bundle(packed(path, stream, 2**29))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    wide = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=False)
    for stream, says in (
        (zstandard.ZstdCompressor(compression_params=wide).compressobj().compress(b"") or b"", 0),
        (_wide(wide), 2**20),
        (b"", 0),
        (b"", 44),
        (b"\0" * 100, 44),
        (zstandard.compress(frames_of[0])[:-1], len(frames_of[0])),
        (zstandard.compress(frames_of[0]), len(frames_of[0]) + 1),
    ):
        with pytest.raises(CorruptTree):
            open_bundle(packed(path, stream, says))
    assert written == [] or max(written) <= 2**29 + 200
    assert not list(tmp_path.glob("*.new"))


def _wide(parameters: Any) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(bytes(2**20)) + compressor.flush()


# --- damage -------------------------------------------------------------------------------------------------------------------
def little_bundle(path: Path, compress: Any) -> SessionStore:
    store = some_store()
    store.put_features(an_image(), np.arange(3, dtype=np.uint8))
    store.alias_media("cat", an_image())
    store.get("text").pin(store.get("text").root)
    export_bundle(store, path, features=True, compress=compress)
    return store


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[bytes, dict[str, Any]]]:
    """A bundle of a few frames, plain and compressed, and what is in it."""
    path = tmp_path_factory.mktemp("little") / "bundle"
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_file, "_FRAME_BYTES", 500)
        for compress in COMPRESS:
            expected = all_seen(little_bundle(path, compress))
            found[compress] = path.read_bytes(), expected
    return found


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """What takes the bytes of a file, which is in memory, and gives its name."""
    disk = Disk({"/bundle": 1}, {1: bytearray()})
    on_disk(disk, monkeypatch)

    def put(data: bytes) -> str:
        disk.files[1] = bytearray(data)
        return "/bundle"

    return put


def refuses(path: str) -> bool:
    """Whether a file is refused with a typed error, and nothing changed."""
    target = SessionStore.in_memory()
    try:
        import_bundle(target, path)
    except SessionTreeError as error:
        assert path in str(error) and type(error) in (CorruptTree, IncompatibleStore, LimitExceeded)
        assert not target.sessions() and not target.usage().feature_bytes and not target._aliases
        return True
    return False


@compressed
def test_a_bundle_that_was_cut_anywhere_changes_nothing(
    compress: Any, little: dict[Any, Any], file: Callable[[bytes], str]
) -> None:
    whole = little[compress][0]
    for stop in range(len(whole)):
        assert refuses(file(whole[:stop])), stop
    for more in (b"\0", b"\n", whole, bytes(50)):
        assert refuses(file(whole + more))
    assert not refuses(file(whole))
    with pytest.raises(CorruptTree, match="was cut, or never finished"):
        open_bundle(file(whole[:-1]))


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@compressed
def test_a_byte_that_was_changed_anywhere_changes_nothing(
    compress: Any, little: dict[Any, Any], file: Callable[[bytes], str]
) -> None:
    whole = little[compress][0]
    for at in range(len(whole)):
        for flip in range(8) if SOAK else (at % 8,):
            data = bytearray(whole)
            data[at] ^= 1 << flip
            assert refuses(file(bytes(data))), (at, flip)


def test_files_that_are_none(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        text_session(store).append(store.get("s").root, [1])
    path = tmp_path / "bundle"
    whole = bundle_of(path, []).read_bytes()
    for data, error, says in (
        (b"", IncompatibleStore, "no bundle"),
        (b"\n", IncompatibleStore, "no bundle"),
        (bytes(1000), IncompatibleStore, "no bundle"),
        (b"sessiontree bundle", IncompatibleStore, "no bundle"),
        (b"sessiontree bundle 1", CorruptTree, "first line"),
        ((tmp_path / "store" / "FORMAT").read_bytes(), IncompatibleStore, "no bundle"),
        (next((tmp_path / "store" / "segments").glob("*.seg")).read_bytes(), IncompatibleStore, "no bundle"),
        (b"sessiontree bundle 1 " + b"x" * 32 + b"\n", CorruptTree, "first line"),
        (whole.replace(b"bundle 1", b"bundle 2"), IncompatibleStore, "format 2; this reads 1"),
        (whole.replace(b"0000", b"0001", 1), CorruptTree, "first line"),
        (b"sessiontree bundle 1 " + b"x" * 400, CorruptTree, "first line"),
        (_line(b"sessiontree bundle 1 %s lz4 1 2" % bytes(b"0" * 32)), IncompatibleStore, "later kind"),
        (_line(b"sessiontree bundle 1 %s zstd x -2" % bytes(b"0" * 32)), IncompatibleStore, "later kind"),
        (_line(b"sessiontree bundle 1 %s zstd 1" % bytes(b"0" * 32)), IncompatibleStore, "later kind"),
        (packed(path, b"", 0).read_bytes() + b"x", CorruptTree, "was cut"),
        (packed(path, b"abc", 0).read_bytes()[:-1] + b"x", CorruptTree, "stream in .* does not match its checksum"),
    ):
        with pytest.raises(error, match=says):
            open_bundle(_written(path, data))
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(StoreFailed, match="cannot be read"):
            open_bundle(missing)


def _line(body: bytes) -> bytes:
    return body + b" %08x\n" % crc32(body)


def test_frames_that_lie(tmp_path: Path) -> None:
    """With checksums that fit: sequences, counts, lengths and what the last frame says."""
    record = codec.encode(codec.AliasRecord(Namespace(), "a", bytes(32)))
    line = bundle_of(tmp_path / "bundle", []).read_bytes().split(b"\n")[0] + b"\n"
    keys = frames.Keys.of(uuid.UUID(int=0).hex.encode())
    begin = frames.End(1, len(line))

    def frame(at: frames.End, synced: int, *records: bytes) -> tuple[bytes, frames.End]:
        made = frames.build_frame(keys, at, synced, 0, ([(each, b"") for each in records],))
        return b"".join(made.parts), made.end

    first, behind = frame(begin, 0, record)
    for data in (
        first,
        first + frame(behind, 0)[0],
        first + frame(behind, 2)[0],
        first + frame(behind._replace(sequence=2), 2)[0],
        first + frame(behind._replace(segment=2), 1)[0],
        first + frame(behind, 1)[0] + frame(frame(behind, 1)[1], 2)[0],
        first + frame(behind, 1)[0] + frame(frame(behind, 1)[1], 2, record)[0],
        frame(begin._replace(offset=begin.offset + 1), 0)[0],
        frame(begin._replace(sequence=1), 1)[0],
        _with_length(first, len(record) + 1) + frame(behind, 1)[0],
        _with_length(first, 2**32 - 1) + frame(behind, 1)[0],
        _with_length(first, len(record) - 1) + frame(behind, 1)[0],
    ):
        tracemalloc.start()
        with pytest.raises(CorruptTree):
            open_bundle(_written(tmp_path / "bundle", line + data))
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()
    with open_bundle(_written(tmp_path / "bundle", line + first + frame(behind, 1)[0])) as bundle:
        assert bundle.aliased_media("a") == bytes(32)


def _with_length(frame: bytes, length: int) -> bytes:
    at = frames.HEADER.size + 4
    return frame[:at] + length.to_bytes(4, "little") + frame[at + 4 :]


def contradictions() -> Iterator[tuple[str, list[bytes | codec.Record]]]:
    """Records that are sound one by one, and what is wrong with them together."""
    store = SessionStore.in_memory()
    session = text_session(store)
    one = session.append(session.root, [1, 2])
    two = session.append(one, [3], key="k")
    other = session.append(session.root, [4], key="k")
    beside, below = session.append(one, [5]), session.append(two, [6])
    vl = store.create("vl", scheme=toy_scheme())
    pictured = append(vl, vl.root, a_turn())
    rules, root = session.scheme, session.root
    params = tuple(sorted(rules.params.items()))

    def start(number: int, **more: Any) -> codec.SessionRecord:
        limits = session.tree.limits
        return codec.SessionRecord(number, f"s{number}", rules.name, params, root.namespace, "", limits, root.id)._replace(**more)

    def node(number: int, ordinal: int, parent: int, given: Node) -> bytes:
        return codec.renumbered(codec.encode_node(number, 1, 0, given), number, ordinal, parent)

    def hashed(**more: Any) -> codec.SessionRecord:
        made = start(0, **more)
        return made._replace(root_id=sessiontree.digest.root_id(made.scheme, made.params, made.namespace, made.model_fingerprint))

    fork = {"scheme": "", "params": ()}
    good: list[bytes | codec.Record] = [start(0), node(0, 1, 0, one), node(0, 2, 1, two)]
    piece = bundle_contents.encode_piece
    yield "", good
    yield "", [*good, start(1, tip=(0, 2), **fork), node(1, 3, 0, other), node(1, 4, 2, below), node(1, 5, 1, beside)]
    yield "", [*good, start(1, tip=(0, 0), **fork), node(1, 1, 0, one), start(2, tip=(1, 1), **fork), node(2, 2, 1, two)]
    yield "another root", [*good, start(1, tip=(0, 2), root_id=bytes(32), **fork)]
    yield "a fork of itself", [start(0, tip=(0, 0))]
    yield "a fork of a later one", [start(0, tip=(1, 0)), start(1)]
    yield "a tip that is nowhere", [*good, start(1, tip=(0, 3), **fork)]
    yield "a tip in the sky", [*good, start(1, tip=(0, 2**32 - 2), **fork)]
    yield "a fork's node on its path", [*good, start(1, tip=(0, 2), **fork), node(1, 2, 1, two)]
    yield "the content of another root", [start(0, root_id=bytes(32)), *good[1:]]
    yield "no such scheme", [hashed(scheme="no such@rule")]
    yield "a scheme from a config", [hashed(scheme="auto", params=(("config", 1),))]
    yield "a parameter it has not", [hashed(params=(("spatial_merge_size", 2),))]
    yield "a parameter that is a name", [hashed(params=(("name", "text@hf5"),))]
    yield "a parameter that it would be given", [hashed(params=())]
    yield "an id that is too long", [start(0, session_id="x" * 513)]
    yield "an id that is none", [start(0, session_id="")]
    yield "one session twice", [start(0), start(1, session_id="s0")]
    yield "a number left out", [start(1)]
    yield "two sessions of one number", [start(0), start(0, session_id="x")]
    yield "a node of no session", [good[1]]
    yield "a node of a later session", [start(0), node(1, 1, 0, one)]
    yield "a node of an earlier session", [start(0), start(1), node(0, 1, 0, one)]
    yield "an ordinal left out", [start(0), node(0, 2, 1, two)]
    yield "an ordinal twice", [*good, node(0, 2, 1, two)]
    yield "ordinal 0", [start(0), node(0, 0, 0, one)]
    yield "its own parent", [start(0), node(0, 1, 1, one)]
    yield "a parent behind it", [start(0), node(0, 1, 2, one), node(0, 2, 1, two)]
    yield "another parent", [start(0), node(0, 1, 0, two)]
    yield "one key twice", [*good, node(0, 3, 0, other), node(0, 4, 0, other)]
    yield "a node of another scheme", [start(0), node(0, 1, 0, pictured)]
    yield "a limit that it breaks", [start(0, limits=sessiontree.index.Limits(1, 0)), *good[1:]]
    yield "a head nowhere", [*good, codec.HeadRecord(0, "main", 3, 1)]
    yield "a pin nowhere", [*good, codec.PinRecord(0, 3, two.id, True)]
    yield "a pin of another node", [*good, codec.PinRecord(0, 1, two.id, True)]
    yield "a pin of no session", [*good, codec.PinRecord(1, 1, one.id, True)]
    yield "a pin that is none", [*good, codec.PinRecord(0, 1, one.id, False)]
    yield "a pin behind a head", [*good, codec.HeadRecord(0, "main", 1, 1), codec.PinRecord(0, 1, one.id, True)]
    yield "what was dropped", [*good, codec.DropRecord(0, (2,))]
    yield "a head of no session", [*good, codec.HeadRecord(1, "main", 0, 1)]
    yield "a head that was dropped", [*good, codec.HeadRecord(0, "main", None, 1)]
    yield "a head before the nodes", [start(0), codec.HeadRecord(0, "main", 0, 1), *good[1:]]
    yield "an alias that was dropped", [*good, codec.AliasRecord(Namespace(), "a", None)]
    yield "an alias behind a head", [*good, codec.HeadRecord(0, "main", 1, 1), codec.AliasRecord(Namespace(), "a", bytes(32))]
    yield "an opening", [*good, codec.OpenedRecord(0, 1)]
    yield "a kind of later", [*good, bytes([0x98, 9, 2]) + bytes(60)]
    yield "a kind of no version", [*good, bytes([0x98, 9, 1]) + bytes(60)]
    yield "a piece left out", [*good, piece(1, bytes(32), b"x")]
    yield "pieces in another order", [*good, piece(0, bytes(32), b"x"), piece(2, bytes(32), b"x")]
    yield "pieces apart", [*good, piece(0, bytes(32), b"x"), piece(0, b"1" * 32, b"x"), piece(1, bytes(32), b"x")]
    yield "a piece of too few bytes", [*good, piece(0, bytes(32), b"x")[:40]]


CONTRADICTIONS = tuple(contradictions())


@pytest.mark.parametrize("number", range(len(CONTRADICTIONS)), ids=[name or "sound" for name, _ in CONTRADICTIONS])
def test_c86_d42_records_that_contradict_each_other(tmp_path: Path, number: int) -> None:
    name, records = CONTRADICTIONS[number]
    modules = set(sys.modules)
    path = bundle_of(tmp_path / "bundle", records)
    target = SessionStore.in_memory()
    if name:
        with pytest.raises(SessionTreeError) as caught:
            import_bundle(target, path)
        expected = (CorruptTree, IncompatibleStore, sessiontree.UnknownScheme, sessiontree.PositionError, LimitExceeded)
        assert isinstance(caught.value, expected)
        assert not target.sessions()
    else:
        assert import_bundle(target, path).nodes_added == len(records) - len(target.sessions())
    with suppress(SessionTreeError), open_bundle(path) as bundle:
        for each in bundle.sessions():
            with suppress(SessionTreeError):
                seen(bundle.get(each))
    assert set(sys.modules) == modules


@pytest.mark.parametrize("changed", [{"role": "system"}, {"key": "k"}, {"data": bytes(8)}, {"id": bytes(32)}, {"state": 1}])
def test_c85_content_is_checked_against_its_id(tmp_path: Path, changed: dict[str, Any]) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    session.append(session.append(session.root, [1, 2]), [3])
    export_bundle(store, tmp_path / "bundle")
    records = records_of(tmp_path / "bundle")
    good = codec.decode(records[2])
    assert isinstance(good, codec.NodeRecord)
    if "state" in changed:
        changed = {"state": good.state._replace(num_tokens=4)}
    records[2] = codec.encode(good._replace(**changed))
    target = SessionStore.in_memory()
    with pytest.raises(CorruptTree):
        import_bundle(target, bundle_of(tmp_path / "bundle", records))
    assert not target.sessions()  # not even the node before it
    with open_bundle(tmp_path / "bundle") as bundle, pytest.raises(CorruptTree):
        list(bundle.get("s").tree)


def _forged(rng: random.Random, data: bytearray, starts: Sequence[int], keys: frames.Keys) -> None:
    """Change a frame's header, and give it a checksum that fits."""
    start = rng.choice(starts)
    fields = list(frames.HEADER.unpack_from(data, start))
    which = rng.randrange(2, 7)
    fields[which] = rng.choice((0, 1, fields[which] + 1, fields[which] - 1, 2**31, 2**32 - 1)) % 2**32
    header = frames.HEADER.pack(*fields)[:-4]
    crc = crc32(header, (keys.seed ^ start) & 0xFFFFFFFF)
    data[start : start + frames.HEADER.size] = header + crc.to_bytes(4, "little")


def test_c85_mutated_bundles_are_typed_errors_or_what_was_stored(little: dict[Any, Any], file: Callable[[bytes], str]) -> None:
    """Bundles as frames were: 20,000 in a test, a million in soak; one of twenty compressed afterwards."""
    whole, expected = little[None]
    line, rest = whole.split(b"\n", 1)
    keys = frames.Keys.of(line.split()[3])
    starts = [at for at in range(len(whole)) if whole.startswith(frames.FRAME_MAGIC, at)]
    assert len(starts) > 4
    rng = random.Random(5)
    modules, refused = set(sys.modules), 0
    count = 1_000_000 if SOAK else 20_000
    for number in range(count):
        data = bytes(mutated(rng, whole, frames.FRAME_MAGIC, lambda data: _forged(rng, data, starts, keys))[0])
        if number % 20 == 0:  # to expand them costs more
            data = a_stream(zstandard.compress(data.split(b"\n", 1)[-1]), len(rest))
        try:
            bundle = open_bundle(file(data))
        except (CorruptTree, IncompatibleStore, LimitExceeded) as error:
            assert "/bundle" in str(error) or "version" in str(error)
            refused += 1
            continue
        assert all_seen(bundle) == expected
        bundle.close()
    assert refused > count * 0.9
    assert set(sys.modules) == modules


def test_c86_d42_mutated_records_behind_sound_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes a bundle makes its checksums too: what is taken in then is sound all the same, and can be sent on."""
    on_disk(Hasty(), monkeypatch)
    little_bundle(tmp_path / "bundle", None)
    good = records_of(tmp_path / "bundle")
    rng = random.Random(6)
    modules, path, refused = set(sys.modules), tmp_path / "mutated", 0
    count = 100_000 if SOAK else 2000
    for _ in range(count):
        records = list(good)
        for _ in range(rng.choice((1, 1, 2))):
            at, other = rng.randrange(len(records)), rng.randrange(len(good))
            data = bytearray(records[at])
            where = rng.randrange(len(data)) if rng.random() < 0.5 else min(int(rng.expovariate(0.05)), len(data) - 1)
            match rng.randrange(6):
                case 0:
                    data[where] ^= 1 << rng.randrange(8)
                case 1:
                    data[where] = rng.choice((0, 1, 0x7F, 0x80, 0x90, 0x91, 0xA1, 0xC0, 0xC2, 0xC4, 0xC7, 0xCF, 0xDD, 0xFF))
                case 2:
                    data[where : where + 4] = rng.choice((bytes(4), b"\xff" * 4, good[other][where : where + 4]))
                case 3:
                    records[other], data = bytes(data), bytearray(good[other])
                case 4:
                    del data[where : where + rng.randint(1, 9)]
                case _:
                    records.insert(at, good[other])
            records[at] = bytes(data)
        target = SessionStore.in_memory()
        try:
            import_bundle(target, bundle_of(path, records))
        except SessionTreeError:
            refused += 1
            # What can be seen before anything is written leaves nothing; features are read when they are taken.
            assert not target.sessions() or any(record[1] == bundle_contents.FEATURES for record in records)
        found = all_seen(target)
        export_bundle(target, tmp_path / "again", features=True)
        assert all_seen(taken(tmp_path / "again")) == found
    assert refused > count / 2
    assert set(sys.modules) == modules


# --- crashes ------------------------------------------------------------------------------------------------------------------
def a_prefix(store: SessionStore, whole: dict[str, Any]) -> None:
    """Every session of a store holds the first nodes of one of ``whole``, each as it should be, and no head that should not be."""
    for name in whole.keys() & set(store.sessions()):
        found = seen(store.get(name))
        assert found["nodes"] == whole[name]["nodes"][: len(found["nodes"])]
        assert set(found["heads"]) <= set(whole[name]["heads"])
        if found["heads"]:
            assert all(len(seen(store.get(each))["nodes"]) == len(whole[each]["nodes"]) for each in whole)


@durabilities
def test_d08_an_import_that_a_crash_breaks_off_is_gone_on_with(tmp_path: Path, durability: journal.Durability, small: None) -> None:
    """Power lost after each system call of an import into a store that holds other sessions: these are as they were."""
    source = some_store()
    export_bundle(source, tmp_path / "bundle")
    whole = all_seen(source)
    disk = Disk()
    store = open_on(disk, durability=durability, segment_bytes=900)
    mine = text_session(store, "mine")
    mine.set_head("main", mine.append(mine.root, [1, 2, 3]))
    store.flush()
    before, began = all_seen(store), len(disk.trace)
    import_bundle(store, tmp_path / "bundle")
    ended = len(disk.trace)
    store.close()
    assert ended - began >= 8
    partial = 0
    for events in range(began, ended + 1):
        for seed in range(6 if SOAK else 2):
            after = disk.crash(random.Random(events * 100 + seed), events)
            with open_on(after, durability=durability) as found:
                names = set(found.sessions())
                assert seen(found.get("mine")) == before["mine"]
                partial += 1 < len(names) < 4
                a_prefix(found, whole)
                import_bundle(found, tmp_path / "bundle")
                assert all_seen(found) == {"mine": before["mine"], **whole}
            with open_on(after) as found:
                assert all_seen(found) == {"mine": before["mine"], **whole}
    assert partial


@durabilities
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fallocate", "ftruncate", "open", "fsync_dir"])
def test_d01_d06_any_call_that_fails_in_an_import_leaves_a_prefix(
    tmp_path: Path, durability: journal.Durability, call: str, small: None
) -> None:
    source = some_store()
    export_bundle(source, tmp_path / "bundle")
    whole = all_seen(source)
    failed = 0
    for n in itertools.count(1):
        disk = Disk()
        store = open_on(disk, durability=durability, segment_bytes=900)
        fail(disk, n, call, errno.EIO)
        try:
            import_bundle(store, tmp_path / "bundle")
        except StoreFailed:
            failed += 1
        missed = disk.fault is not None and disk._hit < n
        disk.fault = None
        let_go(store)
        with open_on(disk) as found:
            a_prefix(found, whole)
            import_bundle(found, tmp_path / "bundle")
            assert all_seen(found) == whole
        if missed:
            break
    assert failed or call in ("fallocate", "ftruncate")  # which nothing rests on; nor on sidecars


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, small: None) -> None:
    """Under commit the store itself goes on: the same import, in the same process."""
    source = some_store()
    export_bundle(source, tmp_path / "bundle")
    for n in range(1, 12):
        disk = Disk()
        with open_on(disk, durability="commit") as store:
            fail(disk, n, "pwrite")
            with suppress(StoreFailed):
                import_bundle(store, tmp_path / "bundle")
            a_prefix(store, all_seen(source))
            import_bundle(store, tmp_path / "bundle")
            assert all_seen(store) == all_seen(source)
        with open_on(disk) as store:
            assert all_seen(store) == all_seen(source)


def test_an_export_that_a_crash_breaks_off_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_file, "_FRAME_BYTES", 500)
    old, new = SessionStore.in_memory(), some_store()
    text_session(old, "old")
    expected = {"old": all_seen(old), "new": all_seen(new)}
    for before in (False, True):
        disk = Disk()
        on_disk(disk, monkeypatch)
        if before:
            export_bundle(old, "/bundle")
        began = len(disk.trace)
        export_bundle(new, "/bundle")
        found: list[str] = []
        for events in range(began, len(disk.trace) + 1):
            for seed in range(20 if SOAK else 5):
                after = disk.crash(random.Random(events * 100 + seed), events)
                on_disk(after, monkeypatch)
                if "/bundle" in after.names:
                    with open_bundle("/bundle") as bundle:
                        found.append("old" if "old" in bundle.sessions() else "new")
                        assert all_seen(bundle) == expected[found[-1]]
                else:
                    assert not before
                    found.append("none")
        assert set(found) == ({"old", "new"} if before else {"none", "new"})
        assert found[-1] == "new"


@pytest.mark.parametrize("call", ["open", "pwrite", "fdatasync", "rename", "fsync_dir"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_export_that_the_disk_refuses(call: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_file, "_FRAME_BYTES", 500)
    store = some_store()
    for n in itertools.count(1):
        disk = Disk()
        on_disk(disk, monkeypatch)
        export_bundle(store, "/bundle", ["text"])
        fail(disk, n, call, error, forever=True)
        try:
            export_bundle(store, "/bundle")
        except StoreFailed as failed:
            assert failed.errno == error and failed.path == "/bundle"  # type: ignore[attr-defined]
        else:
            assert disk._hit < n
        disk.fault = None
        assert set(disk.names) == {"/", "/bundle"}
        with open_bundle("/bundle") as bundle:
            assert bundle.sessions() in (("text",), store.sessions())
            assert bundle.sessions() == ("text",) or disk._hit < n or call == "fsync_dir"
        if disk._hit < n:
            break
    assert n > 1


@pytest.mark.parametrize("what", ["import", "export"])
def test_an_interrupt_at_any_line(tmp_path: Path, what: str, small: None) -> None:
    source = some_store()
    export_bundle(source, tmp_path / "bundle")
    whole, data = all_seen(source), (tmp_path / "bundle").read_bytes()
    codes = set(code_of(bundles, bundle_contents, bundle_file, sessiontree.store, sessiontree.session))
    for at in itertools.count(0, 3 if SOAK else 17):
        disk = Disk()
        with open_on(disk, durability="group") as store:
            with interrupted(at, codes) as hit:
                if what == "import":
                    import_bundle(store, tmp_path / "bundle")
                else:
                    export_bundle(source, tmp_path / "other")
            if what == "import":
                a_prefix(store, whole)
                import_bundle(store, tmp_path / "bundle")
                assert all_seen(store) == whole
                with reopened(disk) as found:
                    assert all_seen(found) == whole
            else:
                export_bundle(source, tmp_path / "other")
                assert (tmp_path / "other").read_bytes() == data
                assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "other"]
        if not hit:
            break
    assert at > 300


KILLED = """
import sys
from sessiontree import SessionStore, bundles
bundles._BATCH = 3
print("go", flush=True)
with SessionStore.open(sys.argv[1], durability=sys.argv[3]) as store:
    bundles.import_bundle(store, sys.argv[2])
print("done", flush=True)
"""


def test_d08_a_process_that_is_killed_in_the_middle_of_an_import(tmp_path: Path) -> None:
    source = SessionStore.in_memory()
    session = source.create("s", scheme=toy_scheme())
    tip = session.root
    for number in range(400):
        tip = append(session, tip, a_turn(number % 20), metadata={"n": number})
    session.set_head("main", tip)
    source.fork(session, tip, "fork").append(tip, [1])
    for number in range(20):
        source.put_features(an_image(number), pixels(number))
    export_bundle(source, tmp_path / "bundle", features=True)
    whole = all_seen(source)
    broken = 0
    for loop in range(30 if SOAK else 5):
        place = tmp_path / f"store {loop}"
        process = in_process(KILLED, str(place), str(tmp_path / "bundle"), DURABILITIES[loop % 3])
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(0.03 + 0.03 * loop % 0.3)
        process.send_signal(signal.SIGKILL)
        out = process.communicate()[0]
        with SessionStore.open(place) as store:
            broken += "done" not in out
            if store.sessions():
                a_prefix(store, whole)
            import_bundle(store, tmp_path / "bundle")
            assert all_seen(store) == whole
            for number in range(20):
                found = store.get_features(an_image(number))
                assert found is not None and np.array_equal(found["features"], pixels(number))
        assert len(blob_files(place)) == 20
    assert broken


# --- stores that are in use ---------------------------------------------------------------------------------------------------
@durabilities
def test_an_export_beside_writers_is_of_one_moment_of_each_session(tmp_path: Path, durability: journal.Durability) -> None:
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        for number in range(3):
            text_session(store, f"s{number}")
        stop = threading.Event()
        done: list[int] = [0] * 3

        def write(number: int) -> None:
            session = store.get(f"s{number}")
            tip = session.root
            while not stop.is_set():
                tip = session.append(tip, [done[number]])
                session.set_head("main", tip)
                done[number] += 1
                if done[number] % 20 == 0 and number == 0 and len(store.sessions()) < 30:
                    store.fork(session, tip, f"fork {done[number]}").append(tip, [7])
                time.sleep(0.001)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        found = []
        with SessionStore.open(tmp_path / "store", read_only=True) as reader:
            for loop in range(10):
                while loop == 5 and len(store.sessions()) < 4 and threads[0].is_alive():
                    time.sleep(0.01)
                began = list(done)
                export_bundle(reader if loop % 2 else store, tmp_path / "bundle")
                target = taken(tmp_path / "bundle")
                for number in range(3):
                    tree = target.get(f"s{number}").tree
                    path = list(tree)
                    assert [node.depth for node in path] == list(range(len(path)))
                    assert [node.token_ids.tolist() for node in path[1:]] == [[at] for at in range(len(path) - 1)]
                    if path[2:]:
                        assert tree.head("main").node in path[-2:]
                    if loop % 2 == 0:
                        assert len(path) > began[number]  # what was visible is there
                found.append(len(target.sessions()))
        stop.set()
        for thread in threads:
            thread.join()
        assert max(found) > 3


def test_an_import_beside_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write to one session: all of both is there."""
    monkeypatch.setattr(bundles, "_BATCH", 2)
    source = SessionStore.in_memory()
    session = text_session(source)
    tip = session.root
    for number in range(300):
        tip = session.append(tip, [number])
    session.set_head("main", tip)
    export_bundle(source, tmp_path / "bundle")
    with SessionStore.open(tmp_path / "store") as store:
        mine = text_session(store)
        nodes: list[bytes] = []
        stop = threading.Event()

        def write() -> None:
            node = mine.root
            while not stop.is_set():
                node = mine.append(node, [1_000_000 + len(nodes)])
                nodes.append(node.id)

        thread = threading.Thread(target=write)
        thread.start()
        report = import_bundle(store, tmp_path / "bundle")
        stop.set()
        thread.join()
        assert report.nodes_added == 300 and mine.head("main").node.id == tip.id
        expected = outline(mine.tree)
        assert set(expected[0]) == {mine.root.id, *nodes, *(node.id for node in session.tree)}
    with SessionStore.open(tmp_path / "store") as store:
        assert outline(store.get("s").tree) == expected


def test_a_store_whose_disk_failed_can_still_be_exported(tmp_path: Path) -> None:
    """What this process sees goes elsewhere, what never became durable too."""
    disk = Disk()
    store = open_on(disk, durability="group")
    session = text_session(store)
    one = session.append(session.root, [1])
    store.flush()
    fail(disk, 1, "pwrite", errno.EIO, forever=True)
    two = session.append(one, [2])
    with pytest.raises(StoreFailed):
        store.flush()
    export_bundle(store, tmp_path / "bundle")
    assert [node.id for node in taken(tmp_path / "bundle").get("s").tree] == [session.root.id, one.id, two.id]
    let_go(store)


def test_what_is_sound_of_a_damaged_store_can_be_exported(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = text_session(store)
        one = session.append(session.root, [1])
        two = session.append(one, [0x5A5A5A5A] * 50)
        below = session.append(two, [3])
        beside = session.append(one, [4])
        session.set_head("sound", beside)
        session.set_head("lost", below)
    [segment] = (tmp_path / "store" / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(b"\x5a" * 100)] ^= 1
    segment.write_bytes(data)
    with SessionStore.open(tmp_path / "store") as store, pytest.raises(CorruptTree):
        export_bundle(store, tmp_path / "bundle")
    with SessionStore.open(tmp_path / "store", strict=False) as store:
        report = export_bundle(store, tmp_path / "bundle")
        assert (report.nodes, report.skipped, report.heads) == (2, 2, 1)
        export_bundle(store, tmp_path / "subtree", ["s"], subtree=store.get("s").node(one.id))
    for path in ("bundle", "subtree"):
        target = taken(tmp_path / path)
        assert [node.id for node in target.get("s").tree] == [session.root.id, one.id, beside.id]
        assert {name: node.id for name, node in target.get("s").heads.items()} == {"sound": beside.id}


# --- rows of CASES.md ---------------------------------------------------------------------------------------------------------
def compacted(session: Session) -> tuple[Node, Node, Node]:
    """A history, the node before its end, and a path on which its beginning is a summary."""
    one = session.append(session.root, [1] * 20)
    two = say(session, one, *[2] * 20)
    three = session.append(two, [3, 4])
    return two, three, session.rewrite(three, [(0, 40, [9, 9])])


def test_d20_forks_before_and_after_a_compaction_travel_alone(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    before, whole, summary = compacted(session)
    store.fork(session, before, "before")
    store.fork(session, summary, "after")
    for name, tokens in (("before", [1] * 20 + [2] * 20), ("after", [9, 9, 3, 4])):
        export_bundle(store, tmp_path / name, [name])
        [leaf] = taken(tmp_path / name).get(name).tree.leaves()
        assert leaf.input_ids().tolist() == tokens
    export_bundle(store, tmp_path / "all")
    target = taken(tmp_path / "all")
    after = target.get("after").tree.leaves()[0]
    links = [link.node_id for node in after.path() for link in node.links]
    assert links and all(node_id in target.get("s").tree for node_id in links)  # raw ancestors stay readable
    assert target.get("s").node(whole.id).input_ids().tolist() == whole.input_ids().tolist()


def test_d21_siblings_keep_their_own_compactions(tmp_path: Path) -> None:
    store = SessionStore.in_memory()
    session = text_session(store)
    trunk = session.append(session.root, [1] * 30)
    sides = [say(session, trunk, number, key=f"k{number}") for number in (5, 6)]
    summaries = [session.rewrite(side, [(0, 30, [90 + side.input_ids()[-1]])]) for side in sides]
    for name, node in zip("ab", summaries, strict=True):
        session.set_head(name, node)
    for top, name in zip(summaries, "ab", strict=True):
        export_bundle(store, tmp_path / name, subtree=top)
    target = SessionStore.in_memory()
    for name in "ba":  # in either order, one after the other
        import_bundle(target, tmp_path / name)
    heads = target.get("s").heads
    assert [heads[name].input_ids().tolist() for name in "ab"] == [[95, 5], [96, 6]]


def test_d22_what_was_there_is_whole_after_an_import_that_fails_at_each_step(tmp_path: Path, small: None) -> None:
    source = SessionStore.in_memory()
    whole = compacted(text_session(source))[1]
    export_bundle(source, tmp_path / "bundle")
    for n in range(1, 8):
        disk = Disk()
        with open_on(disk, durability="commit") as store:
            session = text_session(store)
            node = session.append(say(session, session.append(session.root, [1] * 20), *[2] * 20), [3, 4])
            session.set_head("main", node)
            expected = [digest(each) for each in node.path()]
            fail(disk, n, "pwrite", forever=True)
            with suppress(StoreFailed):
                import_bundle(store, tmp_path / "bundle")
            disk.fault = None
        with open_on(disk) as store:
            assert [digest(each) for each in store.get("s").head("main").node.path()] == expected
            assert store.get("s").head("main").node.input_ids().tolist() == whole.input_ids().tolist()


def test_d44_an_export_and_import_is_the_identity_for_any_shape(tmp_path: Path) -> None:
    """Mid-conversation system turns, empty turns, many children."""
    store = SessionStore.in_memory()
    session = text_session(store)
    top = session.append(session.root, [1], role="system")
    middle = session.append(say(session, top, 2), [3], role="system", metadata={"create_time": None, "weight": 0})
    empty = session.append(middle, [])
    for number in range(40):
        session.append(empty, [number], key=str(number))
    export_bundle(store, tmp_path / "bundle")
    target = taken(tmp_path / "bundle")
    assert all_seen(target) == all_seen(store)
    assert len(target.get("s").children(empty.id)) == 40


def test_positions_of_a_model_that_is_not_here_are_carried(tmp_path: Path) -> None:
    """Tables from elsewhere are part of ids: another namespace has them too."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme=scheme("qwen2_vl@sglang", spatial_merge_size=2), namespace="a")
    table = ExternalPositions(np.array([[5, 9], [1, 2], [3, 4]]), next_position=30, max_position=29)
    node = session.append(session.root, [1, 2], positions=table)
    export_bundle(store, tmp_path / "bundle")
    target = taken(tmp_path / "bundle", namespace="b")
    found = target.get("s").tree.leaves()[0]
    assert np.array_equal(found.positions(), node.positions()) and found.next_position == 30
    again = target.get("s").append(target.get("s").root, [1, 2], positions=table)
    assert again is found  # the id is that of its content under the new root
