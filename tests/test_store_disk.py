"""Stores on disk, as users have them: what was saved comes back, after a close, a crash, damage, or a failing disk."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sessiontree
from engine_bridge import request_inputs
from sessiontree import (
    CorruptTree,
    ExternalPositions,
    Head,
    HeadMoved,
    IncompatibleStore,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    NeedsMedia,
    Node,
    Session,
    SessionExists,
    SessionStore,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    StoreFailed,
    StoreLocked,
    UnknownAlias,
    UnknownNode,
    UnknownSession,
    Unsupported,
    codec,
    journal,
    stored,
)
from sessiontree.backends import blobs, segment_log
from sessiontree.bundles import export_bundle, import_bundle, open_bundle
from sessiontree.journal import Durability, prefix_of
from sessiontree.testing.together import in_threads
from tests import toy
from tests.disk import Disk
from tests.disk_model import (
    AT,
    DURABILITIES,
    Stalled,
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
    short,
)
from tests.reference import Segment
from tests.test_robustness import alarms, bounded, coming_in, forked, interrupted
from tests.toy import IMG, VE, VS, a_turn, media, toy_scheme, turn

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
ROOT = Path(__file__).parents[1]
durabilities = pytest.mark.parametrize("durability", DURABILITIES)


def in_process(code: str, *given: str, **options: Any) -> subprocess.Popen[str]:
    """Another Python, in which the tests' own modules are there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *given],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT, **options},
    )


def answer(process: subprocess.Popen[str]) -> Any:
    """The JSON that it printed last; its input, if it has one, ends here."""
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def text_session(store: SessionStore, name: str = "s", **options: Any) -> Session:
    return store.create(name, **{"scheme": "text@hf5", **options})


def an_image(number: int = 0) -> MediaItem:
    return media(a_turn(number))[0]


def append(session: Session, parent: Node, segment: Segment, **options: Any) -> Node:
    return session.append(parent, segment.tokens, media=media(segment), **options)


def say(session: Session, parent: Node, *tokens: int, **options: Any) -> Node:
    draft = session.draft(parent, **options)
    draft.extend(tokens)
    return draft.commit()


def everything(store: SessionStore) -> None:
    """Sessions that hold one of everything a session can."""
    session = store.create(
        "all",
        scheme=toy_scheme(),
        namespace={"cache_salt": "pepper", "lora": "l", "tenant": "t"},
        model_fingerprint="model 1",
        max_tokens=500,
        reserve_output=10,
    )
    metadata = {"n": 1, "deep": {"a": [1, 2.5, None, True, "é"]}, "set": {3, 4}, "array": np.arange(6, dtype="<u2").reshape(2, 3)}
    one = append(session, session.root, a_turn(), metadata=metadata, role="system", key="first")
    two = append(session, one, turn(5, VS, toy.video(), VE, 6))
    draft = session.draft(two, metadata={"by": "sampler"})
    draft.extend([11, 12, 13, 14])
    three = draft.commit("length", tail_policy="drop_last")
    say(session, two, 11, 12, key="mine")
    item = an_image(9)
    part = item.with_spans([(1, 3)], unfinished=True)
    cut = session.append(three, [VS, IMG, IMG, IMG], media=[part])
    rest = item.with_spans([(0, 1)], placeholders_before=3)
    whole = session.append(cut, [IMG, VE, 8], media=[rest])
    external = ExternalPositions(np.arange(6, dtype=np.int64).reshape(3, 2) + whole.next_position)
    placed = session.append(whole, [21, 22], positions=external)
    session.truncate(placed, whole.stop - 1)
    session.rewrite(whole, [(0, 2, [31, 32, 33])])
    calls = session.append(placed, [41], role="assistant", metadata={"tool_calls": ["x", "y"]})
    results = [session.append(calls, [42 + n], role="tool", metadata={"tool_call_id": name}) for n, name in enumerate("xy")]
    session.linearize(results)
    session.record([*three.input_ids().tolist(), 51], [52, 53], [*_path_media(three)], key="recorded")
    session.append(placed, [])
    for name, node in (("main", placed), ("other", one), ("gone", two), ("main", calls)):
        session.set_head(name, node)
    session.drop_head("gone")
    fork = store.fork(session, calls, "fork")
    store.fork(session, results[0], "fork beside a result").append(results[0], [44])  # takes the other one along
    deeper = append(fork, calls, a_turn(3))
    fork.set_head("main", deeper)
    again = store.fork(fork, append(fork, deeper, turn(61, 62)), "fork of a fork")
    say(again, say(again, again.tree.node(deeper.id), 63, key="k"), 64, key="k")
    again.set_head("tip", again.tree.node(deeper.id))
    store.fork(again, again.root, "fork of the root").append(again.root, [71])
    store.create("empty", scheme="text@vllm")


def _path_media(node: Node) -> Iterator[MediaItem]:
    """The items of a path, spans relative to its first token."""
    for each in node.path():
        for item in each.media:
            yield item.with_spans([(each.start + offset, length) for offset, length in item.spans])


# --- what was saved comes back -----------------------------------------------------------------------------------------------
@durabilities
def test_c82_sessions_of_every_family_come_back(durability: Durability) -> None:
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        for name, history in golden():
            grow(store.create(name, scheme=scheme_of(name, history), max_tokens=10_000), history)
        expected = all_seen(store)
    assert len({name.partition("@")[0] for name in expected}) == 13
    with open_on(disk, durability=durability) as store:
        assert store.recovered_bytes == 0
        assert list(store.sessions()) == list(expected)
        for name, before in expected.items():
            assert seen(store.get(name)) == before, name


@durabilities
def test_c82_everything_a_session_can_hold_comes_back(durability: Durability) -> None:
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        everything(store)
        expected = all_seen(store)
        twin = SessionStore.in_memory()
        everything(twin)
        mine = {name: outline(store.get(name).tree) for name in store.sessions()}
        assert mine == {name: outline(twin.get(name).tree) for name in twin.sessions()}
    with open_on(disk, durability=durability) as store:
        assert all_seen(store) == expected
        reader = open_on(disk, read_only=True)
        assert all_seen(reader) == expected
        reader.close()
    for part, name in itertools.product(("nodes", "children", "heads"), expected):
        assert expected[name][part] is not None


def test_c82_nodes_are_read_in_any_order() -> None:
    disk = Disk()
    with open_on(disk) as store:
        everything(store)
        expected = {name: {node.id: digest(node) for node in store.get(name).tree} for name in store.sessions()}
    rng = random.Random(1)
    for _ in range(10):
        with open_on(disk, read_only=True) as store:
            wanted = [(name, node) for name, nodes in expected.items() for node in nodes]
            rng.shuffle(wanted)
            for name, node in wanted:
                assert digest(store.get(name).node(node)) == expected[name][node]


def test_c82_media_without_pixels_cost_bytes_not_megabytes() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme=toy_scheme())
        store.flush()
        before = written(disk)
        append(session, session.root, turn(1, VS, toy.image(2, 2), VE))
        store.flush()
        assert written(disk) - before < 500


def test_c82_nothing_of_features_is_inlined(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).standard_normal(50_000)
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme=toy_scheme())
        node = append(session, session.root, a_turn())
        store.put_features(node.media[0], {"pixel_values": pixels})
        append(session, node, a_turn())
    log = b"".join(path.read_bytes() for path in (tmp_path / "store" / "segments").iterdir())
    assert len(log.rstrip(b"\0")) < 3000
    assert pixels.tobytes()[:16] not in log


def bridge_bytes(node: Node) -> list[str]:
    inputs = request_inputs(node)
    return [short(inputs.input_ids.numpy().tobytes()), short(inputs.positions.numpy().tobytes()), repr(inputs.mrope_position_delta)]


def go_on(session: Session) -> list[list[str]]:
    """Text and an image behind every leaf: what an engine gets."""
    found = []
    for number, leaf in enumerate(session.leaves()):
        with suppress(SessionTreeError):  # inside of a block
            text = session.append(leaf, [3, number])
            found.append(bridge_bytes(text))
            found.append(bridge_bytes(append(session, text, a_turn(number))))
            found.append(bridge_bytes(say(session, text, 4, key="k")))
    return found


LOADER = """
import json, sys
from sessiontree import SessionStore
from tests.disk_model import all_seen, short
from tests.test_store_disk import go_on
with SessionStore.open(sys.argv[1], durability="commit") as store:
    seen = short(all_seen(store))
    print(json.dumps([seen, [go_on(store.get(name)) for name in ("all", "fork", "fork of a fork")]]))
"""


def test_c81_text_and_image_after_loading_in_another_process(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        everything(store)
        expected = short(all_seen(store))
    never_saved = SessionStore.in_memory()
    everything(never_saved)
    loaded, inputs = answer(in_process(LOADER, str(tmp_path / "store")))
    assert loaded == expected
    assert inputs == [go_on(never_saved.get(name)) for name in ("all", "fork", "fork of a fork")]
    assert [len(found) for found in inputs] == [21, 3, 6]


@pytest.mark.parametrize("again", [False, True])
def test_c81_every_family_goes_on_as_if_never_saved(again: bool) -> None:
    disk = Disk()
    twins = SessionStore.in_memory()
    with open_on(disk) as store:
        for name, history in golden():
            for each in (store, twins):
                grow(each.create(name, scheme=scheme_of(name, history)), history)
    if again:  # what is written over what was loaded, and loaded again
        with open_on(disk) as store:
            for name, each in itertools.product(store.sessions(), (store, twins)):
                session = each.get(name)
                session.append(session.head("main").node, [5, 6, 7])
    with open_on(disk) as store:
        for name, history in golden():
            for session in (pair := (store.get(name), twins.get(name))):
                for leaf in session.leaves():
                    grow_on(session, leaf, history)
            assert seen(pair[0]) == seen(pair[1])


def grow_on(session: Session, leaf: Node, history: Any) -> None:
    with suppress(SessionTreeError):
        session.append(leaf, [3, 4])
        for each in history.turns()[-2:]:
            leaf = session.append(leaf, each.tokens, media=each.media)
        say(session, leaf, 9, key="after")


def test_c83_longest_prefix_after_loading() -> None:
    disk = Disk()
    with open_on(disk) as store:
        everything(store)
        asked = []
        for name in store.sessions():
            for node in store.get(name).tree:
                history = (node.input_ids(), tuple(_path_media(node)))
                found = store.get(name).longest_prefix(*history)
                asked.append((name, node.id, history, found.node.id, found.length))
    with open_on(disk) as store:
        for name, node_id, history, deepest, tokens in asked:
            match = store.get(name).longest_prefix(*history)
            assert (match.node.id, match.length) == (deepest, tokens)
            assert match.node is store.get(name).node(match.node.id)
            assert match.length == store.get(name).node(node_id).stop
            longer = store.get(name).longest_prefix([*history[0].tolist(), 2**31 - 1], history[1])
            assert longer.length == tokens


def test_a_retry_after_loading_changes_nothing() -> None:
    disk = Disk()
    with open_on(disk) as store:
        everything(store)
        expected = all_seen(store)
    with open_on(disk) as store:
        size = written(disk)
        for name in store.sessions():
            session = store.get(name)
            for node in list(session.tree)[1:]:
                assert node.parent is not None and node.role is not None
                if node.origin == "generated":
                    draft = session.draft(node.parent, role=node.role, key=node.key)
                    draft.extend(node.token_ids)
                    assert draft.commit() == node
                elif node.token_ids.tolist() != [21, 22]:  # whose positions were given
                    made = session.append(node.parent, node.token_ids, media=node.media, role=node.role, key=node.key)
                    assert made == node
        assert all_seen(store) == expected
        store.flush()
        assert written(disk) - size < 3000  # that they were opened
        with pytest.raises(KeyTaken):
            store.get("all").append(store.get("all").root, [1], key="first", role="system")
        session = store.get("fork of a fork")
        parent = next(node for node in session.tree if node.key == "k").parent
        with pytest.raises(KeyTaken):
            say(session, parent or session.root, 99, key="k")
        assert all_seen(store) == expected


def test_own_keys_of_drafts_never_repeat_over_openings() -> None:
    disk = Disk()
    keys: list[str | None] = []
    incarnations = []
    for _ in range(4):
        with open_on(disk) as store:
            session = store.get("s") if store.sessions() else text_session(store)
            incarnations.append(session.incarnation)
            prompt = session.append(session.root, [1])
            keys += [say(session, prompt, 2).key for _ in range(3)]
            keys.append(say(session, session.append(prompt, [3]), 2).key)
            other = text_session(store, f"other {len(keys)}")
            incarnations.append(other.incarnation)
            session.close()
            session = store.get("s")
            incarnations.append(session.incarnation)
            keys.append(say(session, prompt, 2).key)
    assert len(set(keys)) == len(keys) == 20
    assert len(set(incarnations)) == len(incarnations)
    assert incarnations == sorted(incarnations)


def test_old_handles_are_stale_and_closed_sessions_come_back() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.append(session.root, [1, 2])
        draft = session.draft(node)
        draft.extend([3])
        session.close()
        back = store.get("s")
        assert back is not session and back.incarnation > session.incarnation
        assert store.get("s") is back
        assert [each.id for each in back.tree] == [session.root.id, node.id]
        for write in (draft.commit, lambda: session.append(node, [4]), lambda: session.set_head("main", node)):
            with pytest.raises(StaleSession):
                write()
        assert back.append(node, [4]).parent == node
        with pytest.raises(SessionExists):
            text_session(store)
        with pytest.raises(SessionExists):
            store.fork(back, node, "s")
        with pytest.raises(UnknownSession):
            store.get("t")
        back.close()
        with pytest.raises(SessionExists):
            text_session(store)
    with pytest.raises(StoreClosed):
        store.get("s")
    with pytest.raises(SessionTreeError):
        back.append(node, [5])
    assert node.input_ids().tolist() == [1, 2]
    with open_on(disk) as store:
        with pytest.raises(SessionExists):
            text_session(store)
        assert len(store.get("s").tree) == 3


def test_idle_sessions_are_closed_and_come_back() -> None:
    with open_on(Disk(), idle_ttl=5) as store:
        session = text_session(store)
        session.append(session.root, [1])
        assert store.tick(0) == ()
        assert store.tick(10) == ("s",)
        assert len(store.get("s").tree) == 2
        assert store.sessions() == ("s",)


def test_sessions_come_in_the_order_they_were_created() -> None:
    disk = Disk()
    names = [f"s{n}" for n in random.Random(1).sample(range(100), 30)]
    with open_on(disk) as store:
        for name in names[:15]:
            text_session(store, name)
        assert list(store.sessions()) == names[:15]
    with open_on(disk) as store:
        store.get(names[7])
        for name in names[15:]:
            text_session(store, name)
        assert list(store.sessions()) == names
        store.get(names[20]).close()
        store.get(names[20])
        assert list(store.sessions()) == names
    with open_on(disk) as store:
        assert list(store.sessions()) == names


def test_d14_a_head_is_what_it_was_set_to_last() -> None:
    disk = Disk()
    rng = random.Random(5)
    with open_on(disk) as store:
        session = text_session(store)
        prompt = session.append(session.root, [1])
        leaves = [session.append(prompt, [2, n]) for n in range(375)]
        for n in range(200):
            session.set_head(rng.choice(("main", "b", "c")), rng.choice(leaves))
            if not n % 7:
                session.set_head("short-lived", rng.choice(leaves))
                session.drop_head("short-lived")
        last = session.set_head("main", leaves[111])
        session.append(leaves[12], [9])  # neither this nor a later leaf is one
        heads = outline(session.tree)[1]
    with open_on(disk) as store:
        session = store.get("s")
        assert outline(session.tree)[1] == heads
        assert session.head("main") == last
        with pytest.raises(HeadMoved):
            session.set_head("main", leaves[0], expected=Head(last.node, last.version - 1))
        assert session.set_head("main", leaves[0], expected=last).version == last.version + 1
        assert session.set_head("other", leaves[0]).version == last.version + 2


def test_forks_over_two_stores() -> None:
    one, two = Disk(), Disk()
    with open_on(one) as source, open_on(two) as target:
        everything(source)
        memory = SessionStore.in_memory()
        everything(memory)
        for where, store in (("disk", source), ("memory", memory)):
            for name in ("all", "fork", "fork of a fork"):
                session = store.get(name)
                for number, node in enumerate(session.tree):
                    copy = target.fork(session, node, f"{where} {name} {number}")
                    grown = copy.append(node, [81]) if node.parent and not node.media else node
                    copy.set_head("main", grown)
        back = [memory.fork(source.get("all"), leaf, f"{n}") for n, leaf in enumerate(source.get("all").leaves())]
        source.close()
        assert all(short(seen(session)) for session in back)
        expected = all_seen(target)
        target.flush()
        with reopened(two) as store:
            assert all_seen(store) == expected
    with open_on(two) as store:
        assert all_seen(store) == expected


def test_d09_d18_forks_at_every_node_hold_its_path_and_no_sibling() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        level = [session.root]
        for depth in range(3):
            level = [session.append(node, [depth, n]) for node in level for n in range(5)]
        paths = {node.id: [each.id for each in node.path()] for node in session.tree}
    for number in range(2):
        with open_on(disk) as store:
            session = store.get("s")
            for node in session.tree:
                fork = store.fork(session, node, f"{number} {node.id.hex()}")
                assert [each.id for each in fork.tree] == paths[node.id]
                assert fork.append(node, [9]).parent == node
    with open_on(disk) as store:
        for number, (node_id, path) in itertools.product(range(2), paths.items()):
            fork = store.get(f"{number} {node_id.hex()}")
            assert [node.id for node in fork.tree][:-1] == path
            assert len(fork.leaves()) == 1


def test_a_tree_that_was_taken_stays_what_it_was() -> None:
    disk = Disk()
    with open_on(disk) as store:
        text_session(store).append(store.get("s").root, [1])
    with open_on(disk) as store:
        session = store.get("s")
        before = session.tree
        mine, node = before.append(before.root, [2])
        session.append(session.root, [3])
        assert [each.token_ids.tolist() for each in before] == [[], [1]]
        assert [each.token_ids.tolist() for each in mine] == [[], [1], [2]]
        assert [each.token_ids.tolist() for each in session.tree] == [[], [1], [3]]
        with pytest.raises(UnknownNode):
            session.append(node, [4])


def test_open_tool_calls_are_known_after_loading() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        calls = session.append(session.root, [1], role="assistant", metadata={"tool_calls": ["a", "b"]})
        answered = session.append(calls, [2], role="tool", metadata={"tool_call_id": "a"})
        expected = [repr(problem) for problem in session.validate(session.append(answered, [3]))]
        assert expected
    with open_on(disk) as store:
        session = store.get("s")
        assert [repr(problem) for problem in session.validate(session.leaves()[0])] == expected


# --- aliases and features ----------------------------------------------------------------------------------------------------
def test_d40_aliases_come_back() -> None:
    disk = Disk()
    with open_on(disk) as store:
        store.alias_media("cat", an_image(1), "tenant")
        store.alias_media("cat", an_image(2), "other")
        store.alias_media("gone", an_image(3))
        store.drop_alias("gone")
        store.alias_media("moved", an_image(3))
        store.drop_alias("moved")
        store.alias_media("moved", an_image(4))
    with open_on(disk) as store:
        assert store.aliased_media("cat", "tenant") == an_image(1).identity
        assert store.aliased_media("cat", "other") == an_image(2).identity
        assert store.aliased_media("moved") == an_image(4).identity
        for alias in ("gone", "dog"):
            with pytest.raises(UnknownAlias):
                store.aliased_media(alias)
        with pytest.raises(KeyTaken):
            store.alias_media("cat", an_image(5), "tenant")
        assert store.alias_media("cat", an_image(1), "tenant") == an_image(1).identity


def pixels(number: int, size: int = 1000) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal(size)


def blob_files(path: Path) -> list[Path]:
    return sorted(file for file in (path / "blobs").rglob("*") if file.is_file())


def test_d24_features_are_kept_once_for_each_content(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        for number, _ in itertools.product(range(3), range(4)):
            store.put_features(an_image(number), {"pixel_values": pixels(number), "grid": np.array([[1, 2, 2]])})
        files = [(file.name, file.stat().st_ino) for file in blob_files(tmp_path)]
        store._features.clear()
        store.put_features(an_image(2), {"pixel_values": pixels(2)})
        assert [(file.name, file.stat().st_ino) for file in blob_files(tmp_path)] == files
        store.put_features(an_image(1), {"encoded": pixels(7).astype(np.float16)})
        assert len(blob_files(tmp_path)) == 3
        assert sum(file.stat().st_size for file in blob_files(tmp_path)) < 3 * 8000 + 2000 + 2000
        with pytest.raises(KeyTaken):
            store.put_features(an_image(1), {"pixel_values": pixels(2)})
    with SessionStore.open(tmp_path) as store:
        assert store.usage().feature_bytes == 0
        for number in range(3):
            found = store.get_features(an_image(number))
            assert found is not None
            assert found["pixel_values"].tobytes() == pixels(number).tobytes()
            assert found["grid"].dtype == np.array([1]).dtype and found["grid"].shape == (1, 3)
            assert ("encoded" in found) == (number == 1)
            assert store.get_features(an_image(number)) is found
        with pytest.raises(KeyTaken):
            store.put_features(an_image(1), {"pixel_values": pixels(2)})
        assert store.get_features(an_image(8)) is None
        store.drop_features(an_image(2))
        assert len(blob_files(tmp_path)) == 2
    with SessionStore.open(tmp_path) as store:
        assert store.get_features(an_image(2)) is None


def test_features_may_be_absent(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        everything(store)
        node = store.get("all").head("main").node
        expected = seen(store.get("all"))
        for item, _, _ in node.media_spans():
            store.put_features(item, pixels(1))
    shutil.rmtree(tmp_path / "blobs")
    with SessionStore.open(tmp_path) as store:
        session = store.get("all")
        assert seen(session) == expected
        node = session.node(node.id)
        request_inputs(node)
        with pytest.raises(NeedsMedia) as caught:
            request_inputs(node, features=True)
        missing = {item.identity for item in caught.value.items}
        assert missing == {item.identity for item, _, _ in node.media_spans()}
        for item in caught.value.items:
            store.put_features(item, pixels(1))
        assert request_inputs(node, features=True).mrope_position_delta == node.mrope_position_delta


def test_features_that_were_evicted_are_read_again(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path, feature_bytes=30_000) as store:
        for number in range(10):
            store.put_features(an_image(number), pixels(number))
            assert store.usage().feature_bytes <= 30_000
        for number in [*range(10), 3, 3, 9, 0]:
            found = store.get_features(an_image(number))
            assert found is not None and found["features"].tobytes() == pixels(number).tobytes()
            assert store.usage().feature_bytes <= 30_000
        del found
    with SessionStore.open(tmp_path, feature_bytes=20_000) as store:
        held = [store.get_features(an_image(number)) for number in range(2)]
        with pytest.raises(LimitExceeded):
            store.get_features(an_image(2))
        held.clear()
        assert store.get_features(an_image(2)) is not None


@pytest.mark.parametrize("how", ["refused", "taken"])
def test_features_that_were_refused_are_not_on_disk(tmp_path: Path, how: str) -> None:
    with SessionStore.open(tmp_path, feature_bytes=20_000) as store:
        if how == "refused":
            held = [store.put_features(an_image(number), pixels(number)) for number in range(2)]
            item = an_image(2)
            with pytest.raises(LimitExceeded):
                store.put_features(item, pixels(2))
        else:
            item = an_image(0)
            held = [store.put_features(item, pixels(0))]
            store.drop_features(item)
            with pytest.raises(KeyTaken):
                store.put_features(item, pixels(1))
        held.clear()
        found = store.get_features(item)
        assert found is None or (how == "taken" and found["features"].tobytes() == pixels(0).tobytes())


def test_d06_features_that_the_disk_refuses_are_not_kept(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.put_features(an_image(0), pixels(0))
        for call in ("fsync", "rename", "open"):
            target = "open" if call == "open" else f"os.{call}"
            with pytest.MonkeyPatch.context() as patch:
                if target == "open":
                    patch.setattr(blobs, "open", _refusing(errno.ENOSPC, open), raising=False)
                else:
                    patch.setattr(os, call, _refusing(errno.EIO))
                with pytest.raises(StoreFailed):
                    store.put_features(an_image(1), pixels(1))
            assert store.get_features(an_image(1)) is None
            assert len(blob_files(tmp_path)) == 1
        store.put_features(an_image(1), pixels(1))
        assert len(blob_files(tmp_path)) == 2


def _refusing(error: int, reads: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        if reads is not None and "w" not in given[1]:
            return reads(*given, **named)
        raise OSError(error, os.strerror(error))

    return call


def test_threads_put_features_of_one_content(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        for number in range(20):
            in_threads(4, lambda thread, number=number: _put(store, number, thread))  # type: ignore[misc]
    with SessionStore.open(tmp_path) as store:
        for number in range(20):
            found = store.get_features(an_image(number))
            assert found is not None
            assert {"features", *(f"of {thread}" for thread in range(4))} == set(found.names)


def _put(store: SessionStore, number: int, thread: int) -> None:
    store.put_features(an_image(number), {"features": pixels(number), f"of {thread}": pixels(thread)})


def test_a_reader_drops_and_puts_no_features(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.put_features(an_image(0), pixels(0))
        with SessionStore.open(tmp_path, read_only=True) as reader:
            found = reader.get_features(an_image(0))
            assert found is not None and found["features"].tobytes() == pixels(0).tobytes()
            with pytest.raises(Unsupported):
                reader.put_features(an_image(1), pixels(1))
            with pytest.raises(Unsupported):
                reader.drop_features(an_image(0))
        assert len(blob_files(tmp_path)) == 1


def test_c85_d04_features_that_are_damaged(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.put_features(an_image(0), {"a": np.arange(20, dtype=np.int16), "b": np.zeros((0, 3))})
    [file] = blob_files(tmp_path)
    whole = file.read_bytes()
    broken = [whole[:size] for size in range(len(whole))] + [whole + b"\0", b"", bytes(len(whole))]
    broken += [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    with SessionStore.open(tmp_path) as store:
        for data in broken:
            file.write_bytes(data)
            with pytest.raises(CorruptTree) as caught:
                store.get_features(an_image(0))
            assert file.name in str(caught.value)
        file.write_bytes(whole)
        found = store.get_features(an_image(0))
        assert found is not None and found["a"].tolist() == list(range(20))


def test_d04_features_under_the_name_of_others_are_damage(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        for number in range(2):
            store.put_features(an_image(number), pixels(number))
        first, second = blob_files(tmp_path)
        shutil.copyfile(first, second)
        store._features.clear()
        with pytest.raises(CorruptTree, match=second.name):
            [store.get_features(an_image(number)) for number in range(2)]


def test_features_of_a_store_that_was_opened_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with SessionStore.open("store") as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.put_features(an_image(0), pixels(0))
        store._features.clear()
        assert store.get_features(an_image(0)) is not None
    assert not list((tmp_path / "elsewhere").iterdir()) and len(blob_files(tmp_path / "store")) == 1


def test_features_are_no_way_to_bring_back_a_store_that_was_deleted(tmp_path: Path) -> None:
    store = SessionStore.open(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StoreFailed):
        store.put_features(an_image(0), pixels(0))
    with suppress(StoreFailed):
        store.close()
    assert not (tmp_path / "store").exists()


def test_what_a_killed_writer_of_features_left_is_removed(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.put_features(an_image(0), pixels(0))
    left = tmp_path / "blobs" / "7.tmp"
    left.write_bytes(b"half")
    SessionStore.open(tmp_path, read_only=True).close()
    assert left.exists()
    with SessionStore.open(tmp_path) as store:
        assert not left.exists()
        assert store.get_features(an_image(0)) is not None
        store._features.clear()
    with pytest.raises(StoreClosed):
        store.get_features(an_image(0))


def test_d42_hostile_headers_of_features(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        store.put_features(an_image(0), np.arange(4, dtype=np.int16))
    [file] = blob_files(tmp_path)
    whole = file.read_bytes()
    length = int.from_bytes(whole[8:12], "little")
    [[name, kind, code, shape, count]] = msgpack.unpackb(whole[12 : 12 + length])
    rows: list[Any] = [[], [[]], {}, None, 7, "x", [[name, kind, code, shape, count]] * 2]
    for at, values in enumerate(
        [
            (1, None, b"x", [1]),
            (1, None, b"x"),
            ("O", "object", "i4,i4", "V8", "M8[s]", "U4", "S8", "x" * 1000, "<i2, <i2", ["a"], None, 3, "?O", "(2,)i2"),
            ([-2, -2], [2.0, 2], [2**70], [0, 2**70], [4, -1, -1], ["4"], 4, None, [True] * 40 + [4], [1] * 100 + [4]),
            (8.0, -8, True, 2**70, "8", None, [8]),
        ]
    ):
        for value in values:
            row: list[Any] = [name, kind, code, shape, count]
            row[at] = value
            with suppress(OverflowError):
                msgpack.packb([row])
                rows.append([row])
    with SessionStore.open(tmp_path) as store:
        for row in rows:
            with suppress(OverflowError):
                header = msgpack.packb(row)
                data = whole[:8] + len(header).to_bytes(4, "little") + header + whole[12 + length : -32]
                file.write_bytes(data + sha256(data).digest())
                with suppress(CorruptTree, KeyTaken):
                    found = store.get_features(an_image(0))
                    assert found is not None
                    for array in found.arrays().values():
                        assert array.size * array.itemsize <= 9
                    del found
                store._features.clear()


# --- disk space --------------------------------------------------------------------------------------------------------------
def written(disk: Disk) -> int:
    """Bytes of all files, space that was taken ahead left out."""
    return sum(len(bytes(disk.files[file]).rstrip(b"\0")) for path, file in disk.names.items() if path.endswith((".seg", ".idx")))


def test_d24_a_fork_costs_its_own_delta(tmp_path: Path) -> None:
    picture = np.random.default_rng(1).integers(0, 255, 2**20, dtype=np.uint8)
    with SessionStore.open(tmp_path) as store:
        session = store.create("s", scheme=toy_scheme())
        node = session.root
        for number in range(50):
            node = append(session, node, turn(number, VS, toy.image(8, 8), VE))
            store.put_features(node.media[0], picture)
        for number in range(4):
            node = session.rewrite(node, [(1 + number, 2 + number, range(30))])
        store.flush()
        before = _files(tmp_path)
        for number in range(100):
            fork = store.fork(session, node, f"fork {number}")
            store.put_features(append(fork, node, turn(number, VS, toy.image(8, 8), VE)).media[0], picture)
        store.flush()
        assert _files(tmp_path) - before < 100 * 4096
        assert len(blob_files(tmp_path)) == 1
    forks = Disk()
    with open_on(forks) as store:
        session = text_session(store)
        node = session.append(session.root, range(100_000))
        store.flush()
        before = written(forks)
        for number in range(100):
            store.fork(session, node, f"fork {number}").append(node, [number])
        store.flush()
        assert written(forks) - before < 100 * 750  # three records and their entries


def _files(path: Path) -> int:
    """Bytes of all files, without the zeros at their ends."""
    return sum(len(file.read_bytes().rstrip(b"\0")) for file in path.rglob("*") if file.is_file())


def test_d25_disk_is_little_more_than_the_tokens() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.root
        for _ in range(1000):
            node = session.append(node, range(256))
    assert written(disk) <= 1.3 * 1000 * 1024


# --- nothing is read before it is asked for ----------------------------------------------------------------------------------
@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the nodes of a log were read, and how many of its records."""
    found = Counter[str]()
    read_path, read_record = journal.SessionNodes.read_path, segment_log.SegmentLog.read

    def path(nodes: Any, ordinals: Sequence[int], *given: Any) -> Any:
        found["nodes"] += len(ordinals)
        return read_path(nodes, ordinals, *given)

    def record(log: Any, *given: Any) -> Any:
        found["records"] += 1
        return read_record(log, *given)

    monkeypatch.setattr(journal.SessionNodes, "read_path", path)
    monkeypatch.setattr(segment_log.SegmentLog, "read", record)
    return found


def branches(store: SessionStore, count: int, depth: int, tokens: int) -> list[bytes]:
    """Ids of the ends of branches, each of so many turns of so many tokens."""
    session = text_session(store)
    ends = []
    for branch in range(count):
        node = session.root
        for number in range(depth):
            node = session.append(node, np.full(tokens, branch * depth + number, np.int32))
        ends.append(node.id)
    return ends


def test_opening_reads_no_node_and_a_path_reads_that_path(reads: Counter[str]) -> None:
    disk = Disk()
    with open_on(disk) as store:
        ends = branches(store, 30, 40, 100)
        session = store.get("s")
        for number in range(50):
            text_session(store, f"other {number}")
        store.fork(session, ends[3], "fork").append(ends[3], [1])
        for number, end in enumerate(ends):
            session.set_head(f"head {number}", end)
        store.flush()
    reads.clear()
    with open_on(disk) as store:
        assert not reads
        session = store.get("s")
        assert len(session.tree) == 1 + 30 * 40
        assert (reads["nodes"], reads["records"]) == (0, 1 + 30)
        node = session.head("head 7").node
        assert node.id == ends[7] and dict(reads) == {"nodes": 40, "records": 71}
        node.input_ids()
        node.positions()
        assert session.node(node.id) is node and session.node(node.path()[5].id) is node.path()[5]
        assert dict(reads) == {"nodes": 40, "records": 71}
        new = session.append(node, [1, 2])
        session.set_head("head 7", new)
        assert [child.id for child in session.children(node)] == [new.id]
        assert len(session.children(session.root)) == 30
        assert reads["nodes"] == 40 + 29
        reads.clear()
        assert store.get("fork").leaves()[0].stop == 4001
        assert reads["nodes"] <= 41


def test_a_path_takes_memory_for_that_path(tmp_path: Path) -> None:
    count, depth, tokens = 40, 50, 2000
    with SessionStore.open(tmp_path) as store:
        ends = branches(store, count, depth, tokens)
    path = depth * tokens * 4
    with SessionStore.open(tmp_path) as store:
        session = store.get("s")
        tracemalloc.start()
        try:
            base = tracemalloc.get_traced_memory()[0]
            node = session.node(ends[20])
            assert np.array_equal(node.input_ids(), np.repeat(np.arange(20 * depth, 21 * depth), tokens))
            assert tracemalloc.get_traced_memory()[1] - base < 6 * path + 2**19
            tracemalloc.reset_peak()
            node = session.node(ends[21])
            assert int(node.input_ids()[-1]) == 22 * depth - 1
            assert tracemalloc.get_traced_memory()[1] - base < 4 * path + 2**19
        finally:
            tracemalloc.stop()


def test_nodes_that_nobody_holds_are_dropped(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path) as store:
        ends = branches(store, 40, 50, 2000)
    path = 50 * 2000 * 4
    with SessionStore.open(tmp_path) as store:
        session = store.get("s")
        tracemalloc.start()
        try:
            base = tracemalloc.get_traced_memory()[0]
            for end in ends:
                assert session.node(end).stop == 100_000
            assert tracemalloc.get_traced_memory()[0] - base < 8 * path
        finally:
            tracemalloc.stop()


# --- readers -------------------------------------------------------------------------------------------------------------------
@durabilities
def test_d15_a_reader_sees_what_was_flushed(durability: Durability) -> None:
    disk = Disk()
    early = open_on(disk, read_only=True)
    assert early.sessions() == ()
    with pytest.raises(UnknownSession):
        early.get("s")
    with open_on(disk, durability=durability, segment_bytes=3000) as store:
        session = text_session(store)
        node = session.root
        readers = [early]
        for number in range(40):
            node = session.append(node, [number] * 20)
            session.set_head("main", node)
            if number == 10:
                store.fork(session, node, "fork").append(node, [1])
            if not number % 10:
                readers.append(open_on(disk, read_only=True))
            if durability != "commit":
                store.flush()
            for reader in readers:
                assert outline(reader.get("s").tree) == outline(session.tree)
                assert reader.get("s").head("main").node.input_ids().tolist() == node.input_ids().tolist()
                assert reader.sessions() == store.sessions()
        held = early.get("s").tree
        session.append(node, [99])
    for reader in readers:  # the writer has gone
        assert all_seen(reader).keys() == {"s", "fork"}
        assert len(reader.get("s").tree) == 42
        reader.close()
    assert len(held) == 41


FOLLOWER = """
import json, sys, time
from sessiontree import SessionStore, UnknownSession
from tests.disk_model import seen, short
with SessionStore.open(sys.argv[1], read_only=True) as store:
    print("ready", flush=True)
    counts = [0]
    while counts[-1] < 101:
        try:
            counts.append(len(store.get("s").tree))
        except UnknownSession:
            pass
        time.sleep(0.005)
    print(json.dumps([sorted(counts) == counts, short(seen(store.get("s")))]))
"""


@durabilities
def test_d15_a_process_that_began_to_read_before_the_first_write(tmp_path: Path, durability: Durability) -> None:
    reader = in_process(FOLLOWER, str(tmp_path / "store"))
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        session = text_session(store)
        node = session.root
        for number in range(100):
            node = session.append(node, [number])
            if not number % 10:
                session.set_head("main", node)
                time.sleep(0.01)
                store.flush()
        store.flush()
        assert answer(reader) == [True, short(seen(session))]


def test_a_reader_changes_nothing() -> None:
    disk = Disk()
    with open_on(disk) as store:
        everything(store)
    before = {path: bytes(disk.files[file]) for path, file in disk.names.items() if file >= 0}
    with open_on(disk, read_only=True) as reader:
        expected = all_seen(reader)
        session = reader.get("all")
        node = session.head("main").node
        draft = session.draft(node)
        draft.extend([1])
        for write in (
            lambda: session.append(node, [1]),
            lambda: session.set_head("main", node.parent or node),
            lambda: session.drop_head("main"),
            lambda: session.truncate(node, 2),
            lambda: session.record([1], [2]),
            lambda: reader.fork(session, node, "new"),
            lambda: reader.create("new", scheme="text@hf5"),
            draft.commit,
        ):
            with pytest.raises(Unsupported):
                write()
        assert all_seen(reader) == expected
    assert {path: bytes(disk.files[file]) for path, file in disk.names.items() if file >= 0} == before


def test_a_reader_takes_heads_and_nodes_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        session.set_head("main", session.append(session.root, [1]))
        store.flush()
        reader = open_on(disk, read_only=True)
        index_of = journal.Journal._indexes_of

        def meanwhile(self: journal.Journal, *given: Any) -> Any:
            found = index_of(self, *given)
            if self.read_only:
                session.set_head("main", session.append(session.root, [2, len(session.tree)]))
                store.flush()
                in_threads(1, lambda _: put(reader.sessions()))
            return found

        def put(names: Sequence[str]) -> None:
            assert names == ("s",)

        monkeypatch.setattr(journal.Journal, "_indexes_of", meanwhile)
        for _ in range(3):
            tree = reader.get("s").tree
            assert tree.head("main").node in tree
            assert tree.head("main").node == list(tree)[-1]
        reader.close()


# --- a disk that refuses -----------------------------------------------------------------------------------------------------
def operations(store: SessionStore) -> dict[str, Callable[[], object]]:
    """Operations on the session that :func:`prepared` makes, each of which changes something."""
    session = store.get("s")
    one, two = list(session.tree)[1:3]

    def commit() -> Node:
        return say(session, two, 6, 7, key="k")

    return {
        "append": lambda: session.append(two, [5], metadata={"a": 1}),
        "append more": lambda: session.append(two, range(5000)),
        "commit": commit,
        "set_head": lambda: session.set_head("new", one),
        "move head": lambda: session.set_head("main", one, expected=two),
        "drop_head": lambda: session.drop_head("main"),
        "record": lambda: session.record([*one.input_ids().tolist(), 8], [9], key="k"),
        "truncate": lambda: session.truncate(two, two.stop - 1),
        "rewrite": lambda: session.rewrite(two, [(0, 1, [7, 7])]),
        "replace": lambda: session.replace(two, [8], head="main"),
        "create": lambda: text_session(store, "new"),
        "fork": lambda: store.fork(session, two, "new"),
        "get": lambda: store.get("other").append(store.get("other").root, [1]),
    }


def prepared(disk: Disk, durability: Durability, **options: Any) -> SessionStore:
    store = open_on(disk, durability=durability, **options)
    session = text_session(store)
    node = session.append(session.append(session.root, [1, 2]), [3, 4, 5])
    session.set_head("main", node)
    other = text_session(store, "other")
    store.flush()
    other.close()
    return store


def live(store: SessionStore) -> dict[str, Any]:
    """What the sessions show that are open."""
    return {name: seen(session) for name, session in store._sessions.items()}


OPERATIONS = tuple(operations(prepared(Disk(), "relaxed")))


@pytest.mark.parametrize("name", OPERATIONS)
def test_d08_an_operation_is_one_batch_with_nodes_before_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = prepared(Disk(), "relaxed")
    act = operations(store)[name]
    if name == "get":
        store.get("other")
    batches: list[list[int]] = []
    enqueue = segment_log.SegmentLog.enqueue

    def spy(log: Any, records: Any, *given: Any, **named: Any) -> Any:
        if records:
            batches.append([codec.entry_of(record).kind for record, _ in records])
        return enqueue(log, records, *given, **named)

    monkeypatch.setattr(segment_log.SegmentLog, "enqueue", spy)
    act()
    [kinds] = [batch for batch in batches if batch != [codec.OPENED]]
    assert kinds == sorted(kinds)  # sessions, nodes, heads
    assert kinds.count(codec.NODE) >= {"record": 2, "replace": 1, "rewrite": 2}.get(name, 0)
    store.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", OPERATIONS)
def test_d03_a_write_that_fails_changes_nothing_under_commit(name: str, error: int) -> None:
    twin = Disk()
    with prepared(twin, "commit") as store:
        operations(store)[name]()
        wanted = live(store)
    for n, part in itertools.product(range(1, 4), (0.0, 0.5, 0.99)):
        disk = Disk()
        store = prepared(disk, "commit")
        expected = live(store)
        fail(disk, n, "pwrite", error, part=part)
        try:
            operations(store)[name]()
        except StoreFailed as caught:
            assert isinstance(caught.__cause__, OSError)
            assert {each: shown for each, shown in live(store).items() if each in expected} == expected
            with reopened(disk) as found:
                assert {each: seen(found.get(each)) for each in expected} == expected
                assert set(found.sessions()) <= {*expected, "other"}
                assert found.recovered_bytes == 0
            disk.fault = None  # there is space again
            operations(store)[name]()
        else:
            assert n > 1
        assert live(store) == wanted
        with reopened(disk) as found:
            assert {each: seen(found.get(each)) for each in wanted} == wanted
        store.close()
        with open_on(disk) as found:
            assert {each: seen(found.get(each)) for each in wanted} == wanted


@pytest.mark.parametrize("how", ["get", "flush", "close"])
def test_d03_what_was_refused_once_stands_in_nobodys_way(how: str) -> None:
    disk = Disk()
    store = prepared(disk, "commit")
    session = store.get("s")
    fail(disk, 1, "pwrite")
    with pytest.raises(StoreFailed):
        session.append(session.root, [9])
    disk.fault = None
    if how == "get":  # the first thing after it
        assert store.get("other").root in store.get("other").tree
    if how == "flush":
        store.flush()
    store.close()


def test_d03_incarnations_do_not_repeat_where_the_record_of_one_was_lost() -> None:
    disk = Disk()
    with prepared(disk, "commit") as store:
        last = max(store.get("s").incarnation, store.get("other").incarnation)
        store.flush()
        store.get("other").close()
        fail(disk, 1, "pwrite")
        with suppress(StoreFailed):
            store.get("other")
            store.flush()
        disk.fault = None
        session = store.get("other")
        last = session.incarnation
        node = session.append(session.root, [1])
        key = say(session, node, 2).key
    with open_on(disk) as store:
        session = store.get("other")
        assert session.incarnation > last
        assert say(session, session.append(node, [3]), 2).key != key


@pytest.mark.parametrize("sessions", [1, 4])
def test_d03_writes_in_flight_are_lost_together_or_not_at_all(sessions: int) -> None:
    for n, part in itertools.product(range(1, 6), (0.0, 0.6)):
        disk = Stalled()
        store = open_on(disk, durability="commit")
        places = [text_session(store, f"s{number}") for number in range(sessions)]
        prompts = [session.append(session.root, [1]) for session in places]
        done: list[tuple[int, bytes]] = []
        failed: list[tuple[int, int, int]] = []

        def work(
            thread: int, places: Any = places, prompts: Any = prompts, done: Any = done, failed: Any = failed, store: Any = store
        ) -> None:
            where = thread % len(places)
            node = prompts[where]
            for number in range(6):
                try:
                    made = places[where].append(node, [thread, number])
                except StoreFailed:
                    failed.append((where, thread, number))
                    continue
                done.append((where, made.id))
                node = made if number % 2 else prompts[where]

        store.flush()
        disk.go.clear()
        fail(disk, n, "pwrite", part=part)
        releasing = threading.Timer(0.02, disk.go.set)
        releasing.start()
        in_threads(8, work)
        releasing.join()
        for where, session in enumerate(places):
            mine = {node for place, node in done if place == where} | {session.root.id, prompts[where].id}
            assert {node.id for node in session.tree} == mine
        with reopened(disk) as found:
            assert all_seen(found) == all_seen(store)
        for where, thread, number in failed:
            places[where].append(prompts[where], [thread, number, 7])
        with reopened(disk) as found:
            assert all_seen(found) == all_seen(store)
        store.close()


@durabilities
def test_d06_a_sync_that_fails_stops_the_store(durability: Durability) -> None:
    disk = Disk()
    store = prepared(disk, durability)
    session = store.get("s")
    node = session.head("main").node
    before = outline(session.tree)
    reader = open_on(disk, read_only=True)
    fail(disk, 1, "fdatasync", errno.EIO)
    with pytest.raises(StoreFailed, match="sync"):
        session.append(node, [9])
        store.flush()
    if durability == "commit":
        assert outline(session.tree) == before
    for again in (
        lambda: session.append(node, [10]),
        lambda: session.append(node, [9]),
        lambda: session.append(node, [9, 9]),
        lambda: session.truncate(node, 2),
        lambda: session.set_head("main", node),
        lambda: session.record([1, 2, 3], [4, 5]),
        lambda: store.create("new", scheme="text@hf5"),
        lambda: store.fork(session, node, "new"),
        store.flush,
    ):
        with pytest.raises(StoreFailed, match="never durable"):
            again()
    assert node.input_ids().tolist() == [1, 2, 3, 4, 5]  # who reads, reads on
    assert session.node(node.id) is node
    assert store.sessions() == ("s", "other")
    assert [each.id for each in reader.get("s").tree][:3] == list(before[0])
    assert reader.get("other").tree.root is not None
    reader.close()
    with pytest.raises(StoreFailed):
        store.close()
    with open_on(disk, durability=durability) as store:
        assert outline(store.get("s").tree)[0][:3] == before[0]
        assert len(store.get("s").tree) <= 4
        store.get("s").append(node.id, [9])


@durabilities
def test_d06_sessions_can_still_be_opened_to_read_after_a_failure(durability: Durability) -> None:
    disk = Disk()
    store = prepared(disk, durability)
    session = store.get("s")
    fail(disk, 1, "fdatasync", errno.EIO)
    with pytest.raises(StoreFailed):
        session.append(session.root, [9])
        store.flush()
    assert store.get("other").id == "other"
    let_go(store)


@pytest.mark.parametrize("durability", ["group", "relaxed"])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_d06_failures_in_the_background_stop_the_store(durability: Durability, call: str) -> None:
    for n in (1, 2):
        disk = Disk()
        store = prepared(disk, durability)
        session = store.get("s")
        node = session.head("main").node
        states = [outline(session.tree)]
        fail(disk, n, call, forever=True)
        with pytest.raises(StoreFailed, match="never durable"):
            for number in range(20):
                session.append(node, [9, number])
                states.append(outline(session.tree))
                if number % 5 == 4:
                    store.flush()
        assert outline(session.tree) == states[-1]
        disk.fault = None
        with pytest.raises(StoreFailed):
            store.flush()
        with pytest.raises(StoreFailed):
            session.append(node, [8])
        assert outline(session.tree) == states[-1]
        with reopened(disk) as found:
            assert outline(found.get("s").tree) in states
        with pytest.raises(StoreFailed):
            store.close()
        with open_on(disk) as found:
            assert outline(found.get("s").tree) in states
            found.get("s").append(node.id, [8])


@durabilities
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fallocate", "ftruncate", "open", "fsync_dir"])
def test_d01_d06_any_call_that_fails_leaves_a_prefix(durability: Durability, call: str) -> None:
    """Segments so small that every few writes begin one: the n-th call fails, for all n."""
    for n in range(1, 60):
        disk = Disk()
        store = prepared(disk, durability, segment_bytes=700)
        session = store.get("s")
        states = [outline(session.tree)]
        done = 0
        fail(disk, n, call, errno.EIO)
        node = session.root
        stopped = False
        for number in range(12):
            try:
                node = session.append(node, [number] * 30)
                states.append(outline(session.tree))
                if durability != "commit" and number % 3 == 2:
                    store.flush()
                if durability == "commit" or number % 3 == 2:
                    done = len(states) - 1
            except StoreFailed:
                stopped = True
                if durability == "commit":
                    assert outline(session.tree) == states[-1]
                break
        missed = disk.fault is not None and disk._hit < n
        with reopened(disk) as found:
            at = outline(found.get("s").tree)
            if stopped and at not in states:  # the sync failed, but what it was for may have reached the disk
                assert call != "pwrite"
                assert at[0][:-1] == states[-1][0]
            else:
                assert states.index(at) >= done
        let_go(store)
        with open_on(disk) as found:
            found.get("s").append(found.get("s").root, [99])
        if missed:
            break


# --- threads, signals, interrupts, processes ---------------------------------------------------------------------------------
@durabilities
def test_d01_threads_append_to_one_session_and_to_many(durability: Durability) -> None:
    disk = Disk()
    store = open_on(disk, durability=durability)
    shared = text_session(store, "shared")
    made: list[tuple[str, bytes, list[int]]] = []

    def work(thread: int) -> None:
        own = text_session(store, f"own {thread}")
        for session in (shared, own):
            node = session.root
            for number in range(25):
                node = say(session, node, thread, number) if number % 3 else session.append(node, [thread, number])
                made.append((session.id, node.id, node.input_ids().tolist()))
            session.set_head(f"head {thread}", node)
        fork = store.fork(shared, node if node in shared.tree else shared.leaves()[0], f"fork {thread}")
        fork.append(fork.leaves()[0], [thread])

    in_threads(16, work)
    store.flush()
    expected = all_seen(store)
    with reopened(disk) as found:
        assert {name: expected[name] for name in found.sessions()} == all_seen(found)
        assert len(found.sessions()) == 33
        for name, node, tokens in made:
            assert found.get(name).node(node).input_ids().tolist() == tokens
        log = found._journal._log if found._journal else None
        assert log is not None
        _check_order(log.entries())
    store.close()


def _check_order(entries: Any) -> None:
    """Every node behind its parent, ordinals of each session without a gap."""
    next_of: dict[int, int] = {}
    for entry in entries[entries["kind"] == codec.NODE]:
        session, ordinal, parent = int(entry["session"]), int(entry["ordinal"]), int(entry["parent"])
        assert parent < ordinal
        assert next_of.setdefault(session, ordinal) == ordinal
        next_of[session] = ordinal + 1


def test_d28_heads_move_by_compare_and_set_among_threads() -> None:
    disk = Disk()
    with open_on(disk, durability="commit") as store:
        session = text_session(store)
        session.set_head("main", session.root)
        moved: list[int] = []

        def work(thread: int) -> None:
            number = 0
            while number < 10:
                head = session.head("main")
                node = session.append(head.node, [thread, number])
                try:
                    moved.append(session.set_head("main", node, expected=head).version)
                except HeadMoved:
                    continue
                number += 1

        in_threads(4, work)
        assert sorted(moved) == list(range(2, 42))
        head = session.head("main")
        assert head.node.depth == 40
    with open_on(disk) as store:
        assert store.get("s").head("main") == head


@durabilities
def test_signal_handlers_append_in_the_middle_of_appends(durability: Durability) -> None:
    """In a child, which is killed if it waits for itself."""
    assert forked(lambda: _signals(durability)) == 0


def _signals(durability: Durability) -> None:
    disk = Disk()
    store = open_on(disk, durability=durability)
    session = text_session(store)
    prompt = session.append(session.root, [1])
    made: list[bytes] = []
    handled, busy = 0, False

    def handler() -> None:
        nonlocal handled, busy
        if busy:
            return
        busy = True
        handled += 1
        with suppress(Unsupported if durability == "commit" else KeyError):  # nobody can wait for the disk there
            made.append(session.append(prompt, [2, handled]).id)
        busy = False

    with alarms(handler):
        end = time.monotonic() + 0.7
        number = 0
        while time.monotonic() < end:
            number += 1
            made.append(session.append(prompt, [3, number]).id)
            session.set_head("main", made[-1])
    assert handled > 20
    session.append(prompt, [4])
    store.flush()
    assert set(made) <= {node.id for node in session.tree}
    with reopened(disk) as found:
        assert outline(found.get("s").tree) == outline(session.tree)
    store.close()


@pytest.mark.parametrize("durability", ["group", "relaxed"])
@pytest.mark.parametrize("then", ["append", "set_head", "drop_head"])
@pytest.mark.parametrize("what", ["append", "fork", "set_head"])
def test_a_handler_writes_at_every_place_of_an_operation(durability: Durability, what: str, then: str) -> None:
    with SessionStore.in_memory() as memory:
        places = len(_places(memory, what, then))
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        assert len(_places(store, what, then)) > places > 10
        expected = live(store)
        store.flush()
        with reopened(disk) as found:
            assert all_seen(found) == expected


def _pair(store: SessionStore, session: Session, leaf: Node, what: str, then: str) -> tuple[Callable[[], object], ...]:
    """An operation, and what a handler does in the middle of it."""
    act: dict[str, Callable[[], object]] = {
        "append": lambda: session.append(leaf, [3]),
        "fork": lambda: store.fork(session, leaf, f"fork of {session.id}"),
        "set_head": lambda: session.set_head("main", leaf),
    }

    def drop() -> None:
        session.drop_head("old")
        session.set_head("new", leaf)

    come_in: dict[str, Callable[[], object]] = {
        "append": lambda: session.append(session.append(leaf, [4]), [5]),
        "set_head": lambda: session.set_head("main", leaf.parent or leaf),
        "drop_head": drop,
    }
    return act[what], come_in[then]


def _places(store: SessionStore, what: str, then: str) -> list[Session]:
    """A session for each place that a handler came in at."""
    sessions: list[Session] = []
    for at in itertools.count():
        session = text_session(store, f"{at}")
        leaf = session.append(session.append(session.root, [1]), [2])
        session.set_head("main", session.root)
        session.set_head("old", session.root)
        act, come_in = _pair(store, session, leaf, what, then)
        with coming_in(at, come_in) as ran:
            act()
        if not ran:
            return sessions
        sessions.append(session)
    return sessions


CODES = (sessiontree.store, sessiontree.session, journal, sessiontree.tree, sessiontree.index, stored)


def code_of(*modules: ModuleType) -> Iterator[CodeType]:
    """Every function of the modules, and those inside of them."""
    found: list[CodeType] = []
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            for each in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                call = getattr(each, "fget", None) or getattr(each, "__func__", each)
                if hasattr(call, "__code__"):
                    found.append(call.__code__)
    while found:
        code = found.pop()
        yield code
        found += [each for each in code.co_consts if isinstance(each, CodeType)]


def _interruptible(store: SessionStore, session: Session, prompt: Node) -> dict[str, Callable[[], object]]:
    return {
        "append": lambda: session.append(prompt, [2]),
        "set_head": lambda: session.set_head("main", prompt),
        "record": lambda: session.record([1, 5], [6]),
        "fork": lambda: store.fork(session, prompt, "new"),
        "create": lambda: text_session(store, "new"),
    }


@durabilities
@pytest.mark.parametrize("what", ["append", "set_head", "record", "fork", "create"])
def test_an_interrupt_at_any_line(durability: Durability, what: str) -> None:
    """What was interrupted is there or is not, and what comes after it is right, in memory and on disk."""
    codes = set(code_of(*CODES))
    step = 1 if SOAK else 3 if what == "append" else 7
    for at in itertools.count(0, step):
        disk = Disk()
        store = open_on(disk, durability=durability)
        session = text_session(store)
        prompt = session.append(session.root, [1])
        store.flush()
        act = _interruptible(store, session, prompt)[what]
        with interrupted(at, codes) as hit:
            act()
        other = session.append(prompt, [3])
        below = session.append(other, [4])
        session.set_head("other", below)
        if what in ("fork", "create"):
            with suppress(SessionExists):
                act()
            new = store.get("new")
            new.append(new.append(new.root, [8]) if what == "create" else prompt, [9])
        else:
            act()
        store.flush()
        session.append(prompt, [7])
        store.flush()
        expected = all_seen(store)
        with reopened(disk) as found:
            assert all_seen(found) == expected, at
        store.close()
        with open_on(disk) as found:
            assert all_seen(found) == expected, at
        if not hit:
            break
    assert at > 30


@pytest.mark.parametrize("flush", [False, True])
def test_d03_an_interrupt_at_any_line_and_then_a_full_disk(flush: bool) -> None:
    codes = set(code_of(sessiontree.store, sessiontree.session, journal))
    for at in itertools.count(0, 1 if SOAK else 3):
        disk = Disk()
        store = prepared(disk, "commit")
        session = store.get("s")
        fail(disk, 1, "pwrite", forever=True)
        with suppress(StoreFailed), interrupted(at, codes) as hit:
            session.append(session.root, [8])
        with suppress(StoreFailed):
            if flush:
                store.flush()
        with pytest.raises(StoreFailed):
            bounded(lambda session=session: session.append(session.root, [9]))  # type: ignore[misc]
        disk.fault = None
        node = bounded(lambda session=session: session.append(session.root, [9]))  # type: ignore[misc]
        session.append(node, [10])
        with reopened(disk) as found:
            assert seen(found.get("s")) == seen(session), at
        store.close()
        if not hit:
            break


def test_what_an_interrupted_wait_left_is_seen_after_a_flush() -> None:
    disk = Stalled()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    store.flush()
    disk.go.clear()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    releasing = threading.Timer(0.2, disk.go.set)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        releasing.start()
        with suppress(KeyboardInterrupt):
            session.append(session.root, [1])
    finally:
        signal.signal(signal.SIGALRM, before)
    releasing.join()
    store.flush()
    with reopened(disk) as found:
        assert outline(found.get("s").tree) == outline(session.tree)
    store.close()


@durabilities
def test_a_forked_child_may_only_read(durability: Durability, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability=durability) as store:
        everything(store)
        store.put_features(an_image(1), pixels(1))
        store.flush()
        expected = short(all_seen(store))
        session = store.get("all")
        unread = session.append(session.root, [5])

        def child() -> None:
            assert session.node(unread.id).token_ids.tolist() == [5]
            for write in (
                lambda: session.append(unread, [6]),
                lambda: session.set_head("main", session.root),
                lambda: text_session(store, "new"),
                lambda: store.fork(session, unread, "new"),
                lambda: store.put_features(an_image(2), pixels(2)),
                lambda: store.drop_features(an_image(1)),
                store.flush,
            ):
                with pytest.raises(SessionTreeError):
                    write()
            assert len(store.sessions()) == 6
            assert store.get("fork").leaves()[0].stop > 0
            with suppress(SessionTreeError):
                store.close()

        assert forked(child) == 0
        session.append(unread, [7])
        store._features.clear()
        assert store.get_features(an_image(1)) is not None and store.get_features(an_image(2)) is None
        with pytest.raises(StoreLocked):
            SessionStore.open(tmp_path / "store")
    with SessionStore.open(tmp_path / "store") as store:
        assert short(all_seen(store)) != expected
        assert [child.token_ids.tolist() for child in store.get("all").children(unread.id)] == [[7]]


def test_a_forked_child_still_sees_what_was_visible() -> None:
    disk = Stalled()
    store = open_on(disk, durability="relaxed")
    session = text_session(store)
    store.flush()
    disk.go.clear()
    node = session.append(session.root, [1])

    def child() -> None:
        assert node in session.tree
        assert node in store.get("s").tree

    try:
        assert forked(child) == 0
    finally:
        disk.go.set()
        store.close()


WRITER = """
import json, os, sys, time
from sessiontree import SessionStore, StoreLocked
at = time.monotonic()
try:
    store = SessionStore.open(sys.argv[1], durability="commit")
except StoreLocked:
    print(json.dumps(["locked", time.monotonic() - at]))
    sys.exit()
with store:
    session = store.create("s", scheme="text@hf5")
    node = session.root
    for number in range(100):
        node = session.append(node, [number])
    sys.stdin.read()
print(json.dumps(["wrote", node.id.hex()]))
"""


def test_d30_one_of_many_processes_writes(tmp_path: Path) -> None:
    processes = [in_process(WRITER, str(tmp_path / "store"), stdin=subprocess.PIPE) for _ in range(16)]
    while sum(process.poll() is None for process in processes) > 1:  # the one that writes goes on until it is asked
        time.sleep(0.02)
    answers = [answer(process) for process in processes]
    [written] = [given for given in answers if given[0] == "wrote"]
    assert max(given[1] for given in answers if given[0] == "locked") < 1.5
    with SessionStore.open(tmp_path / "store") as store:
        assert store.recovered_bytes == 0
        assert len(store.get("s").tree) == 101
        assert store.get("s").leaves()[0].id.hex() == written[1]


def test_a_second_writer_is_refused_within_a_second(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        node = text_session(store).append(store.get("s").root, [1])
        at = time.monotonic()
        with pytest.raises(StoreLocked):
            SessionStore.open(tmp_path / "store")
        assert time.monotonic() - at < 1.2
        assert answer(in_process(WRITER, str(tmp_path / "store"), stdin=subprocess.PIPE))[0] == "locked"
        store.get("s").append(node, [2])
    with SessionStore.open(tmp_path / "store") as store:
        assert len(store.get("s").tree) == 3


KILLED = """
import sys
from sessiontree import SessionStore
store = SessionStore.open(sys.argv[1], durability=sys.argv[2])
sessions = [store.get(f"s{n}") if f"s{n}" in store.sessions() else store.create(f"s{n}", scheme="text@hf5") for n in range(3)]
number = 0
while True:
    session = sessions[number % 3]
    draft = session.draft(session.head("main").node if session.heads and number % 5 else session.root)
    draft.extend([number, len(session.tree)])
    node = draft.commit()
    session.set_head("main", node)
    if sys.argv[2] != "commit":
        store.flush()
    print(session.id, node.id.hex(), flush=True)
    number += 1
"""


def test_d08_a_process_that_is_killed_loses_nothing_acknowledged(tmp_path: Path) -> None:
    known: dict[str, list[str]] = {}
    for loop in range(60 if SOAK else 4):
        durability = DURABILITIES[loop % 3]
        process = in_process(KILLED, str(tmp_path / "store"), durability)
        assert process.stdout is not None and process.stderr is not None
        read = [process.stdout.readline() for _ in range(random.Random(loop).randint(1, 60))]
        assert all(read), process.stderr.read()
        time.sleep(0.02 * (loop % 4))
        process.kill()
        out = process.communicate()[0]
        for line in (*read, *out.splitlines()):
            if len(words := line.split()) == 2 and len(words[1]) == 64:
                known.setdefault(words[0], []).append(words[1])
        with SessionStore.open(tmp_path / "store") as store:
            for name, ids in known.items():
                session = store.get(name)
                for node_id in ids:
                    node = session.node(bytes.fromhex(node_id))
                    assert [each.depth for each in node.path()] == list(range(node.depth + 1))
                assert session.head("main").node in session.tree
    assert sum(map(len, known.values())) > 20


# --- all of it, at random ----------------------------------------------------------------------------------------------------
Act = Callable[[SessionStore], object]
Outlines = dict[str, tuple[Any, ...]]
PICK = st.integers(0, 1000)
TURN = st.one_of(
    st.lists(st.integers(0, 2**31 - 1) | st.sampled_from([1, VS, VE, IMG]), min_size=1, max_size=6).map(lambda ids: turn(*ids)),
    st.builds(lambda n, m: turn(n, VS, toy.image(4, 4, m), VE, n), st.integers(0, 3), st.integers(0, 3)),
    st.builds(lambda n: turn(VS, toy.video(2, 4, 4, n), VE), st.integers(0, 2)),
)
TOKENS = st.lists(st.integers(0, 9), max_size=5)
NAME = st.sampled_from(("main", "draft"))
MAX_SESSIONS = 3


class DiskMachine(RuleBasedStateMachine):
    """A store on a disk and one in memory do the same. What is read back is always what they did up to some moment, whole.

    ``acts``: what changed something since the beginning, for a store in memory to be brought to any of those moments; ``states``:
    what was there then. ``durable``: the last moment that somebody was told is on disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[Act] = []
        self.states: list[tuple[int, Outlines]] = [(0, {})]
        self.durable = 0
        self.made = 0
        self.readers: list[tuple[SessionStore, int]] = []
        self.stale: dict[tuple[str, str], Head] = {}
        self.folder = Path(tempfile.mkdtemp())
        self.exported: list[Path] = []
        self.dropped = False  # whether anything ever was
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segment_log, "_POLL", (3600.0, 3600.0))  # the background thread works when it is told to

    @initialize(durability=st.sampled_from(DURABILITIES), segment_bytes=st.sampled_from((900, 4000, 2**26)))
    def begin(self, durability: Durability, segment_bytes: int) -> None:
        self.options: dict[str, Any] = {"durability": durability, "segment_bytes": segment_bytes}
        self.disk = Disk()
        self.store = open_on(self.disk, **self.options)
        self.twin = SessionStore.in_memory()
        self.create(0, None)

    def teardown(self) -> None:
        for store in (*(reader for reader, _ in self.readers), self.store, self.twin):
            let_go(store)
        self.patch.undo()
        shutil.rmtree(self.folder)

    # What both do

    def both(self, act: Act) -> None:
        """Do it in both stores: the same comes of it."""
        results = []
        for store in (self.twin, self.store):
            try:
                made = act(store)
                results.append(made.id if isinstance(made, (Node, Session)) else made)
            except SessionTreeError as error:
                results.append(type(error))
        assert results[0] == results[1]
        state = self.outlines(self.twin)
        if state != self.states[-1][1]:
            self.acts.append(act)
            self.states.append((len(self.acts), state))
            if self.options["durability"] == "commit":
                self.durable = len(self.states) - 1

    def outlines(self, store: SessionStore) -> Outlines:
        return {name: self.outline(store.get(name)) for name in store.sessions()}

    def outline(self, session: Session) -> tuple[Any, ...]:
        # With the moves, or a head that came and went would be none that never was.
        return (*outline(session.tree), session.tree._moves, tuple(sorted(session.pins)))

    def pick(self, number: int) -> str:
        names = self.twin.sessions()
        return names[number % len(names)]

    def node(self, name: str, number: int) -> bytes:
        """A node; small numbers are the newest ones."""
        ids = self.states[-1][1][name][0]
        found: bytes = ids[-1 - number % len(ids)]
        return found

    @rule(number=PICK, limit=st.sampled_from((None, None, 60)))
    def create(self, number: int, limit: int | None) -> None:
        if len(self.twin.sessions()) < MAX_SESSIONS:
            self.made += 1
            name = f"s{self.made}"
            self.both(lambda store: store.create(name, scheme=toy_scheme(), max_tokens=limit, namespace=f"tenant {number % 2}"))

    @rule(where=PICK, number=PICK)
    def fork(self, where: int, number: int) -> None:
        source = self.pick(where)
        node = self.node(source, number)
        if len(self.twin.sessions()) < MAX_SESSIONS:
            self.made += 1
            name = f"s{self.made}"
            self.both(lambda store: store.fork(store.get(source), node, name))

    @rule(where=PICK, number=PICK, segment=TURN, key=st.sampled_from((None, None, "k")), deep=st.booleans())
    def append(self, where: int, number: int, segment: Segment, key: str | None, deep: bool) -> None:
        name = self.pick(where)
        node = self.node(name, 0 if deep else number)
        metadata = {"n": number, "deep": [{"a": (1.5, b"x")}]} if number % 2 else None
        self.both(lambda store: store.get(name).append(node, segment.tokens, media=media(segment), key=key, metadata=metadata))

    @rule(where=PICK, number=PICK, tokens=TOKENS, reason=st.sampled_from(("stop", "length", "abort")))
    def generate(self, where: int, number: int, tokens: list[int], reason: str) -> None:
        name = self.pick(where)
        node = self.node(name, number)

        def act(store: SessionStore) -> Node:
            draft = store.get(name).draft(node, key=f"{number % 5}")
            draft.extend(tokens)
            return draft.commit(reason)

        self.both(act)

    @rule(where=PICK, number=PICK, length=PICK)
    def truncate(self, where: int, number: int, length: int) -> None:
        name = self.pick(where)
        node = self.node(name, number)
        self.both(lambda store: store.get(name).truncate(node, length % (store.get(name).node(node).stop + 2)))

    @rule(where=PICK, number=PICK, start=PICK, count=st.integers(0, 3), tokens=st.lists(st.integers(0, 9), max_size=3))
    def rewrite(self, where: int, number: int, start: int, count: int, tokens: list[int]) -> None:
        name = self.pick(where)
        node = self.node(name, number)
        at = start % (self.twin.get(name).node(node).stop + 1)
        self.both(lambda store: store.get(name).rewrite(node, [(at, at + count, tokens)]))

    @rule(where=PICK, number=PICK, tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4), key=st.sampled_from(("r1", "r2")))
    def record(self, where: int, number: int, tokens: list[int], key: str) -> None:
        name = self.pick(where)
        node = self.twin.get(name).node(self.node(name, number))
        prompt, items = [*node.input_ids().tolist(), *tokens[1:]], tuple(_path_media(node))
        self.both(lambda store: store.get(name).record(prompt, tokens, items, key=key).completion.id)

    @rule(where=PICK, number=PICK, head=NAME, expected=st.sampled_from(("no check", "free", "there", "stale")))
    def set_head(self, where: int, number: int, head: str, expected: str) -> None:
        name = self.pick(where)
        node = self.node(name, number)
        known = dict((each[0], each[1:]) for each in self.states[-1][1][name][1]).get(head)
        stale = self.stale.get((name, head))

        def act(store: SessionStore) -> object:
            session = store.get(name)
            options: dict[str, Any] = {}
            if expected == "free":
                options["expected"] = None
            elif expected == "there" and known is not None:
                options["expected"] = session.head(head)
            elif expected == "stale" and stale is not None:
                options["expected"] = Head(session.node(stale.node.id), stale.version)
            made = session.set_head(head, node, **options)
            return made.node.id, made.version

        if known is not None:
            self.stale.setdefault((name, head), Head(self.twin.get(name).node(known[0]), known[1]))
        self.both(act)

    @rule(where=PICK, head=NAME)
    def drop_head(self, where: int, head: str) -> None:
        name = self.pick(where)
        self.both(lambda store: store.get(name).drop_head(head))

    @rule(where=PICK, number=PICK, head=NAME, tokens=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def replace(self, where: int, number: int, head: str, tokens: list[int]) -> None:
        name = self.pick(where)
        node = self.node(name, number)
        self.both(lambda store: store.get(name).replace(node, tokens, head=head))

    @precondition(lambda self: self.exported)
    @rule(which=PICK)
    def take(self, which: int) -> None:
        """What was exported comes back: after a crash, also what was lost in it."""
        path = self.exported[-1 - which % len(self.exported)]
        self.both(lambda store: import_bundle(store, path))
        self.store.flush()
        self.durable = len(self.states) - 1

    @rule(where=PICK, number=PICK, pinned=st.booleans())
    def pin(self, where: int, number: int, pinned: bool) -> None:
        name = self.pick(where)
        node = self.node(name, number)
        if not pinned and (pins := self.states[-1][1][name][3]):
            node = pins[number % len(pins)]
        self.both(lambda store: store.get(name).pin(node) if pinned else store.get(name).unpin(node))

    @rule(where=PICK, numbers=st.lists(PICK, min_size=1, max_size=2))
    def drop(self, where: int, numbers: list[int]) -> None:
        name = self.pick(where)
        nodes = [self.node(name, number) for number in numbers]
        before = len(self.states)
        self.both(lambda store: store.get(name).drop(*nodes))
        if len(self.states) > before:
            self.dropped = True
            self.durable = len(self.states) - 1

    @precondition(lambda self: hasattr(self, "twin") and len(self.twin.sessions()) > 1)
    @rule(where=PICK)
    def drop_session(self, where: int) -> None:
        name = self.pick(where)
        self.both(lambda store: store.drop(name))
        self.dropped = True
        for known in [known for known in self.stale if known[0] == name]:
            del self.stale[known]

    @rule(recent=st.none() | st.none() | st.integers(0, 9))
    def collect(self, recent: int | None) -> None:
        self.both(lambda store: store.gc(recent=recent) and None)
        self.dropped = self.dropped or recent is not None
        self.durable = len(self.states) - 1
        with reopened(self.disk, read_only=True) as reader:
            assert self.outlines(reader) == self.states[-1][1]

    # What only the disk does

    @rule()
    def export(self) -> None:
        one, two = (self.folder / f"{len(self.exported)} {name}" for name in ("disk", "memory"))
        export_bundle(self.store, one)
        export_bundle(self.twin, two)
        if not self.dropped:  # else one knows for longer than the other what a fork was a fork of
            assert one.read_bytes() == two.read_bytes()
        with open_bundle(one) as disk, open_bundle(two) as memory:
            found = [{name: (*shown[:2], shown[3]) for name, shown in self.outlines(bundle).items()} for bundle in (disk, memory)]
            assert found == [{name: (*shown[:2], shown[3]) for name, shown in self.states[-1][1].items()}] * 2
        self.exported.append(one)
        self.durable = len(self.states) - 1

    @rule(where=PICK)
    def close_session(self, where: int) -> None:
        self.store.get(self.pick(where)).close()

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.durable = len(self.states) - 1
        with reopened(self.disk, read_only=True) as reader:
            assert self.outlines(reader) == self.states[-1][1]

    @rule()
    def background(self) -> None:
        log: Any = self.store._journal and self.store._journal._log
        log._tend()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.durable = len(self.states) - 1
        self.store = open_on(self.disk, **self.options)
        assert self.store.recovered_bytes == 0
        self.check_is(self.store, self.states[-1][1])

    @precondition(lambda self: len(self.readers) < 2)
    @rule()
    def open_reader(self) -> None:
        self.readers.append((open_on(self.disk, read_only=True), 0))

    @precondition(lambda self: self.readers)
    @rule(which=PICK, flush=st.booleans())
    def read(self, which: int, flush: bool) -> None:
        """A reader sees what was done up to some moment, never earlier than the last time."""
        if flush:
            self.store.flush()
            self.durable = len(self.states) - 1
        at = which % len(self.readers)
        reader, last = self.readers[at]
        if flush:
            found = len(self.states) - 1
            self.check_is(reader, self.states[-1][1])
        else:  # it looks at one session after the other, so each is at a moment of its own
            found = max(last, self.durable)
            for name in reader.sessions():
                now = self.outline(reader.get(name))
                assert any(now == state.get(name) for _, state in self.states[found:]), name
        self.readers[at] = reader, found

    @rule(power=st.booleans(), seed=PICK)
    def crash(self, power: bool, seed: int) -> None:
        """The process is killed, or power is lost. What was told to be durable is there, and nothing that never was."""
        for reader, _ in self.readers:
            reader.close()
        self.readers.clear()
        after = self.disk.crash(random.Random(seed), len(self.disk.trace)) if power else self.disk.copy()
        let_go(self.store)
        self.disk = after
        self.store = open_on(self.disk, **self.options)
        found = self.outlines(self.store)
        moments = [number for number, (_, state) in enumerate(self.states) if state == found]
        assert moments, "what is there never was"
        assert moments[-1] >= self.durable
        self.states = self.states[: moments[-1] + 1]
        self.acts = self.acts[: self.states[-1][0]]
        self.durable = len(self.states) - 1
        self.stale.clear()
        self.twin.close()
        self.twin = SessionStore.in_memory()
        for act in self.acts:
            act(self.twin)
        self.check_is(self.store, found)
        if not self.twin.sessions():
            self.create(0, None)

    def check_is(self, store: SessionStore, state: Outlines) -> None:
        """All that is in a store, and every node."""
        assert self.outlines(store) == state == self.outlines(self.twin)
        for name in state:
            session = store.get(name)
            for node in session.tree:
                assert digest(node) == digest(self.twin.get(name).node(node.id))
                assert [child.id for child in session.children(node)] == [
                    each.id for each in session.tree if each.parent is not None and each.parent.id == node.id
                ]

    @invariant()
    def both_show_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        assert list(self.store.sessions()) == list(self.twin.sessions())
        for name in self.twin.sessions():
            one, two = self.store.get(name), self.twin.get(name)
            assert outline(one.tree) == outline(two.tree)
            newest = two.node(self.states[-1][1][name][0][-1])
            assert digest(one.node(newest.id)) == digest(newest)


DiskMachine.TestCase.settings = settings(
    max_examples=5000 if SOAK else 140,
    stateful_step_count=50 if SOAK else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDiskMachine = DiskMachine.TestCase


# --- damage ------------------------------------------------------------------------------------------------------------------
def damageable() -> tuple[Disk, dict[str, Any], dict[tuple[str, bytes], str]]:
    """A store of a few segments, closed; what its sessions show, and its nodes."""
    disk = Disk()
    store = open_on(disk, segment_bytes=2500)
    everything(store)
    expected = all_seen(store)
    nodes = {(name, node.id): digest(node) for name in store.sessions() for node in store.get(name).tree}
    store.close()
    return disk, expected, nodes


def read_all(store: SessionStore, expected: dict[str, Any], nodes: dict[tuple[str, bytes], str]) -> int:
    """Ask for all there was: each is right, or a typed error says what is damaged. How many errors there were."""
    errors = 0
    for name, before in expected.items():
        try:
            session = store.get(name)
            if seen(session) != before:
                raise AssertionError(f"{name} is not what it was")
        except (CorruptTree, UnknownSession, UnknownNode) as error:
            assert str(error)
            errors += 1
    for (name, node_id), facts in nodes.items():
        try:
            assert digest(store.get(name).node(node_id)) == facts
        except (CorruptTree, UnknownSession, UnknownNode) as error:
            assert str(error)
            errors += 1
    return errors


def damages(disk: Disk, rng: random.Random, count: int) -> Iterator[tuple[Disk, str]]:
    """Copies with one thing broken each, and what."""
    files = {path: file for path, file in disk.names.items() if file >= 0 and not path.endswith("LOCK") and disk.files[file]}
    for _ in range(count):
        copy = disk.copy()
        path = rng.choice(sorted(files))
        data = copy.files[files[path]]
        at = rng.randrange(len(data))
        how = rng.choice(("flip", "flip", "zero page", "zero", "cut", "garbage"))
        if how == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif how == "cut":
            del data[at:]
        else:
            start = at // 4096 * 4096 if how == "zero page" else at
            length = min(4096 if how == "zero page" else rng.randint(1, 300), len(data) - start)
            data[start : start + length] = rng.randbytes(length) if how == "garbage" else bytes(length)
        if data != disk.files[files[path]]:
            yield copy, f"{how} {path} {at}"


@pytest.mark.parametrize("read_only", [False, True])
def test_d02_d04_c85_damage_is_a_typed_error_or_nothing_is_missing(read_only: bool) -> None:
    disk, expected, nodes = damageable()
    refused = served = 0
    for copy, what in damages(disk, random.Random(7), 4000 if SOAK else 250):
        before = {file: bytes(data) for file, data in copy.files.items()}
        try:
            store = open_on(copy, read_only=read_only)
        except (CorruptTree, IncompatibleStore) as error:
            assert str(error), what
            assert copy.files == before, f"{what}: changed what could not be read"
            refused += 1
            continue
        try:
            errors = read_all(store, expected, nodes)
            assert errors or set(store.sessions()) == set(expected), what
            served += not errors
        finally:
            store.close()
    assert refused > 20 and served > 20


def test_d02_a_tail_cut_anywhere_gives_all_before_it() -> None:
    disk = Disk()
    store = open_on(disk, durability="group")
    session = text_session(store)
    node = session.root
    states = [outline(session.tree)]
    for number in range(6):
        node = session.append(node, [number, number])
        store.flush()
        states.append(outline(session.tree))
    killed = disk.copy()  # no clean close
    let_go(store)
    data = killed.content(".seg")
    stop = len(data.rstrip(b"\0"))
    seen_states, recovered = set(), set()
    for size in range(stop - 140, stop + 3):
        copy = killed.copy()
        del copy.content(".seg")[size:]
        with open_on(copy) as found:
            at = states.index(outline(found.get("s").tree))
            assert at >= len(states) - 2
            seen_states.add(at)
            recovered.add(found.recovered_bytes)
            assert not found.recovered_bytes or at < len(states) - 1
            new = found.get("s").append(found.get("s").leaves()[0], [99])
        with open_on(copy) as found:
            assert outline(found.get("s").tree)[0] == (*states[at][0], new.id)
            assert found.recovered_bytes == 0
    assert seen_states == {len(states) - 2, len(states) - 1}
    assert len(recovered) > 50


def test_d04_what_is_sound_is_served_where_that_is_asked_for() -> None:
    disk, _, nodes = damageable()
    with open_on(disk.copy(), read_only=True) as store:
        newest = {(name, head): tuple(at) for name in store.sessions() for head, at in store.get(name).tree.heads.items()}
    whole = uncertain = 0
    for copy, what in damages(disk, random.Random(3), 1500 if SOAK else 150):
        try:
            store = open_on(copy, strict=False)
        except (CorruptTree, IncompatibleStore):
            assert "FORMAT" in what
            continue
        try:
            good = 0
            for (name, node_id), facts in nodes.items():
                with suppress(CorruptTree, UnknownNode, UnknownSession):
                    assert digest(store.get(name).node(node_id)) == facts, what
                    good += 1
            whole += good == len(nodes)
            for name in store.sessions():
                with suppress(CorruptTree, UnknownSession):
                    for head, at in store.get(name).tree.heads.items():
                        assert nodes[name, at.node.id]
                        assert at.uncertain or tuple(at) == newest[name, head], what
                        uncertain += at.uncertain
        finally:
            store.close()
    assert whole > 10 and uncertain


def lost(ordinal: int, *more: str) -> Disk:
    """A closed store of one chain 0..5 with a head and a fork at its end; the record of a node is damaged."""
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.root
        for number in range(5):
            node = session.append(node, [number] * 50)
            store.flush()
        if "head" in more:
            session.set_head("main", node)
            store.flush()
        if "fork" in more:
            store.fork(session, node, "fork")
            store.flush()
        text_session(store, "other").append(store.get("other").root, [7])
    data = disk.content(".seg")
    at = data.index(np.full(50, ordinal - 1, "<i4").tobytes())
    data[at] ^= 1
    return disk


def test_d04_nodes_beside_a_damaged_one_are_served() -> None:
    for ordinal in range(1, 6):
        with open_on(lost(ordinal), strict=False) as store:
            session = store.get("s")
            found = [node.token_ids.tolist()[:1] for node in session.tree if not node.parent or node.depth < ordinal]
            assert found == [[], *([number] for number in range(ordinal - 1))]
            assert store.get("other").leaves()[0].token_ids.tolist() == [7]


def test_d04_a_head_whose_node_is_damaged_is_a_typed_error() -> None:
    with open_on(lost(5, "head"), strict=False) as store:
        head = store.get("s").head("main")
        with pytest.raises(CorruptTree):
            head.node.path()
    with open_on(lost(5, "fork"), strict=False) as store, pytest.raises(CorruptTree):
        list(store.get("fork").tree)


def entries_of(disk: Disk, kind: int) -> list[tuple[codec.Record, int, int]]:
    """The records of a kind, and where each lies in the one segment: start, stop."""
    log = segment_log.SegmentLog.open(AT, entry_of=prefix_of, system=disk.copy(), read_only=True)
    found = [(codec.decode(log.read(row)), int(row["offset"]), int(row["offset"] + row["length"])) for row in log.entries()]
    log.close()
    return [entry for entry in found if codec.entry_of(codec.encode(entry[0])).kind == kind]


def with_heads() -> Disk:
    """A closed store: a head that moved three times beside one that moved between, and one that was dropped; other sessions."""
    disk = Disk()
    with open_on(disk, durability="commit") as store:
        for name in ("before", "s", "after"):
            session = text_session(store, name)
            node = session.root
            for number in range(3):
                node = session.append(node, [number, len(name)])
                session.set_head("main", node)
                if number == 1:
                    session.set_head("other", node)
            session.set_head("gone", node)
            session.drop_head("gone")
    return disk


@pytest.mark.parametrize("read_only", [False, True])
def test_d04_one_damaged_session_record_costs_that_session_alone(read_only: bool) -> None:
    disk = with_heads()
    with open_on(disk) as store:
        store.fork(store.get("s"), store.get("s").leaves()[0], "fork")
        store.fork(store.get("after"), store.get("after").leaves()[0], "last")
        expected = all_seen(store)
    _, start, stop = next(entry for entry in entries_of(disk, codec.SESSION) if getattr(entry[0], "session_id", "") == "s")
    for at in range(start, stop):
        copy = disk.copy()
        copy.content(".seg")[at] ^= 1 << at % 8
        with open_on(copy, read_only=read_only) as store:
            assert store.damaged == () and store.damaged_sessions == ()
            for ask in (store.sessions, store.sessions, lambda store=store: store.get("s"), lambda store=store: store.get("fork")):
                with pytest.raises(CorruptTree, match="the record of session 1 is damaged: segment 1, offset") as caught:
                    ask()
                assert (caught.value.session, caught.value.segment, caught.value.offset) == (1, 1, start)
            for name in ("before", "after", "last"):
                assert seen(store.get(name)) == expected[name]
        with open_on(copy, read_only=read_only, strict=False) as store:
            assert store.sessions() == ("before", "after", "fork", "last")
            [(segment, first, last)] = store.damaged
            assert segment == 1 and first <= at < last and store.damaged_sessions == (1,)
            for name in ("before", "after", "last"):
                assert seen(store.get(name)) == expected[name]
            with pytest.raises(UnknownSession, match="the ids of sessions 1 are lost to damage"):
                store.get("s")
            with pytest.raises(CorruptTree, match="session 1 ") as caught:
                store.get("fork")
            assert caught.value.session == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_d04_a_session_record_that_rots_in_an_open_store(read_only: bool) -> None:
    disk = with_heads()
    _, start, _ = entries_of(disk, codec.SESSION)[1]
    with open_on(disk, read_only=read_only, strict=False) as store:
        disk.content(".seg")[start + 80] ^= 1
        with pytest.raises(CorruptTree, match="session 1 "):
            store.get("s")
        for _ in range(2):
            assert store.sessions() == ("before", "after")
            assert store.damaged_sessions == (1,)
        assert store.get("after").head("main").node.depth == 3


def test_d04_a_head_is_certain_or_says_that_damage_may_hide_a_later_one() -> None:
    disk = with_heads()
    with open_on(disk) as store:
        newest = {(name, head): tuple(at) for name in store.sessions() for head, at in store.get(name).tree.heads.items()}
        assert not any(at.uncertain for name in store.sessions() for at in store.get(name).tree.heads.values())
    records = entries_of(disk, codec.HEAD)
    assert len(records) == 3 * 6
    for number, beside in itertools.product(range(len(records)), (False, True)):
        copy = disk.copy()
        for _, start, stop in {records[number], *records[:beside]}:  # the very first one is of no consequence
            copy.content(".seg")[(start + stop) // 2] ^= 1
        with open_on(copy, strict=False) as store:
            for at, name in enumerate(("before", "s", "after")):
                heads = store.get(name).tree.heads
                mine = number - 6 * at  # which of this session's six records it is: main, main, other, main, gone, gone dropped
                found = {"main": 1 if mine == 3 else 3, "other": 2, "gone": 4}  # where the last sound record is
                if mine == 2:
                    del found["other"]
                if mine != 5:
                    del found["gone"]
                assert {head: place.uncertain for head, place in heads.items()} == {head: mine > at for head, at in found.items()}
                for head, place in heads.items():
                    assert place.uncertain or tuple(place) == newest[name, head]
                    assert store.get(name).head(head).uncertain == place.uncertain
                if mine == 3:
                    assert heads["main"] != newest[name, "main"] and heads["main"].node.depth == 2
                    assert "uncertain" in repr(heads["main"])
                    loaded = pickle.loads(pickle.dumps(store.get(name).tree)).heads["main"]
                    assert loaded == heads["main"] and loaded.uncertain
                    assert pickle.loads(pickle.dumps(heads["main"])).uncertain


def test_d04_what_is_written_after_damage_never_takes_the_place_of_what_was_lost() -> None:
    disk = lost(5, "head", "fork")
    with open_on(disk, strict=False) as store, suppress(SessionTreeError):
        session = store.get("s")
        session.append(session.root, [99])
    with open_on(disk, strict=False) as store:
        with suppress(CorruptTree):
            assert store.get("s").head("main").node.token_ids.tolist() == [4] * 50
        with suppress(CorruptTree):
            assert store.get("fork").leaves()[0].token_ids.tolist() == [4] * 50


def test_c85_stores_of_a_newer_format_are_refused_untouched(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        everything(store)
    file = tmp_path / "store" / "FORMAT"
    good = file.read_bytes()
    for data, error in (
        (good.replace(b"log 1", b"log 2"), IncompatibleStore),
        (b"something else", IncompatibleStore),
        (b"", IncompatibleStore),
        (good[:-4], CorruptTree),
        (good.replace(good.split()[3], good.split()[3][::-1]), CorruptTree),
    ):
        file.write_bytes(data)
        before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
        for read_only in (False, True):
            with pytest.raises(error):
                SessionStore.open(tmp_path / "store", read_only=read_only)
        assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before
    file.write_bytes(good)
    with SessionStore.open(tmp_path / "store") as store:
        assert len(store.sessions()) == 6
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(IncompatibleStore):
        SessionStore.open(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


@pytest.mark.parametrize("kind_and_version", [(codec.NODE, 2), (9, 2)])
def test_c85_records_of_a_newer_version_can_only_be_read(kind_and_version: tuple[int, int]) -> None:
    disk, expected, _ = damageable()
    newer = bytearray(records_of(disk)[-1])
    newer[1:3] = kind_and_version
    disk = log_of([*records_of(disk), bytes(newer)])
    before = {file: bytes(data) for file, data in disk.files.items()}
    with pytest.raises(IncompatibleStore):
        open_on(disk)
    with open_on(disk, read_only=True) as store:
        assert all_seen(store) == expected
    for file, data in before.items():
        assert bytes(disk.files[file]).startswith(data.rstrip(b"\0"))


def test_d02_sidecars_may_be_deleted() -> None:
    disk, expected, _ = damageable()
    for path in [path for path in disk.names if path.endswith(".idx")]:
        copy = disk.copy()
        copy.unlink(path)
        with open_on(copy) as store:
            assert all_seen(store) == expected


# --- hostile bytes -----------------------------------------------------------------------------------------------------------
def log_of(records: Sequence[bytes]) -> Disk:
    """A sound log of records."""
    disk = Disk()
    log = segment_log.SegmentLog.open(AT, entry_of=prefix_of, system=disk)
    for record in records:
        log.enqueue([(record, prefix_of(record))])
    log.close()
    return disk


def records_of(disk: Disk) -> list[bytes]:
    log = segment_log.SegmentLog.open(AT, entry_of=prefix_of, system=disk.copy())
    found = [log.read(entry) for entry in log.entries()]
    log.close()
    return found


def take_all(disk: Disk) -> None:
    """Open, and ask for everything; what it raises is typed."""
    with suppress(SessionTreeError), open_on(disk) as store:
        for name in store.sessions():
            with suppress(SessionTreeError):
                session = store.get(name)
                for call in (lambda session=session: seen(session), lambda session=session: list(session.tree)):
                    with suppress(SessionTreeError):
                        call()
                for node in itertools.islice(session.tree, 40):
                    with suppress(SessionTreeError):
                        session.append(node, [1])


def test_c86_d42_records_that_are_hostile_are_typed_errors() -> None:
    disk, _, _ = damageable()
    records = records_of(disk)
    rng = random.Random(11)
    modules = set(sys.modules)
    for number in range(3000 if SOAK else 150):
        bad = list(records)
        at = rng.randrange(len(bad))
        data = bytearray(bad[at])
        how = number % 4
        if how == 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif how == 2:
            bad[at], bad[at - 1] = bad[at - 1], bad[at]
            data = bytearray(bad[at])
        else:
            bad.append(bytes(data))
        bad[at] = bytes(data)
        try:
            hostile = log_of(bad)
        except SessionTreeError:
            continue
        take_all(hostile)
    assert set(sys.modules) == modules


def _hostile_sessions() -> Iterator[list[Any]]:
    """Records that are sound one by one and contradict each other."""
    with SessionStore.in_memory() as store:
        session = text_session(store)
        one = session.append(session.root, [1, 2])
        two = session.append(one, [3])
        vl = store.create("vl", scheme=toy_scheme())
        pictured = append(vl, vl.root, a_turn())
    rules, root = session.scheme, session.root

    def start(number: int, **more: Any) -> Any:
        given = codec.SessionRecord(
            number, f"s{number}", rules.name, tuple(sorted(rules.params.items())), root.namespace, "", session.tree.limits, root.id
        )
        return given._replace(**more)

    def node(number: int, ordinal: int, parent: int, given: Node) -> bytes:
        data = bytearray(codec.encode_node(number, 1, 0, given))  # which refuses what cannot be
        data[9:13], data[14:18] = ordinal.to_bytes(4, "big"), parent.to_bytes(4, "big")
        assert codec.entry_of(bytes(data))[:4] == (codec.NODE, number, ordinal, parent)
        return bytes(data)

    good = [start(0), node(0, 1, 0, one), node(0, 2, 1, two)]
    yield [start(0, tip=(0, 0))]
    yield [start(0, tip=(1, 0)), start(1, tip=(0, 0))]
    yield [*good, start(1, tip=(0, 3))]
    yield [*good, start(1, tip=(0, 2**32 - 1))]
    yield [*good, start(1, tip=(0, 2), root_id=bytes(32))]
    yield [start(0, root_id=bytes(32)), *good[1:]]
    yield [start(0, scheme="no such@rule"), *good[1:]]
    yield [start(0, params=(("spatial_merge_size", 2),)), *good[1:]]
    yield [start(0), node(0, 1, 0, two)]
    yield [start(0), node(0, 1, 1, one)]
    yield [start(0), node(0, 1, 2, one), node(0, 2, 1, two)]
    yield [start(0), node(0, 2, 1, two)]
    yield [start(0), node(0, 0, 0, one)]
    yield [*good, node(0, 1, 0, two)]
    yield [node(0, 1, 0, one)]
    yield [start(0), node(0, 1, 0, pictured)]
    for ordinal in (3, 2**31, 2**32 - 2):
        yield [*good, codec.HeadRecord(0, "main", ordinal, 1)]
    yield [*good, codec.HeadRecord(7, "main", 1, 1)]
    yield [*good, codec.HeadRecord(0, "main", 1, 2**63 - 1)]
    yield [*good, start(0, session_id="twice")]
    yield [*good, start(1, session_id="s0")]
    yield [start(2**32 - 2), start(2**32 - 3, session_id="last")]


@pytest.mark.parametrize("number", range(24))
def test_c86_records_that_contradict_each_other(number: int) -> None:
    given = list(_hostile_sessions())
    assert len(given) == 24
    take_all(log_of([each if isinstance(each, bytes) else codec.encode(each) for each in given[number]]))


@pytest.mark.parametrize("changed", [{"role": "system"}, {"key": "k"}, {"data": bytes(8)}, {"id": bytes(32)}])
def test_c85_content_is_checked_against_its_id(changed: dict[str, Any]) -> None:
    disk = Disk()
    with open_on(disk) as store:
        text_session(store).append(store.get("s").root, [1, 2])
    records = records_of(disk)
    at = next(number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE)
    good = codec.decode(records[at])
    assert isinstance(good, codec.NodeRecord)
    records[at] = codec.encode(good._replace(**changed))
    with open_on(log_of(records)) as store, pytest.raises(CorruptTree):
        list(store.get("s").tree)


@pytest.mark.parametrize("how", ["floats", "carried", "axes", "replayed"])
def test_c81_positions_that_the_scheme_cannot_have_are_refused(how: str) -> None:
    """A digest covers no positions: they are checked against the scheme when a node is read."""
    with SessionStore.in_memory() as store:
        vl = store.create("vl", scheme=toy_scheme())
        pictured = vl.append(append(vl, vl.root, turn(1)), [IMG] * 4, media=[an_image().with_spans([(0, 4)])])
        disk = Disk()
        with open_on(disk) as other:
            text = text_session(other).append(other.get("s").root, [IMG] * 4)
    records = records_of(disk)
    at = next(number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE)
    good = codec.decode(records[at])
    assert isinstance(good, codec.NodeRecord) and good.id == text.id
    changes: dict[str, dict[str, Any]] = {
        "floats": {"state": good.state._replace(next_position=4.0, max_position=3.0)},
        "carried": {"state": good.state._replace(carried=(1, 2, 3))},
        "axes": {"runs": pictured.runs},
        "replayed": {"replayed": (good.runs, good.state._replace(num_tokens=3))},
    }
    try:
        records[at] = codec.encode(good._replace(**changes[how]))
        hostile = log_of(records)
    except CorruptTree:
        return
    with open_on(hostile) as store, pytest.raises(CorruptTree):
        list(store.get("s").tree)


@pytest.mark.parametrize("durability", ["commit", "group"])
def test_d06_the_error_names_the_nodes_that_were_never_durable(durability: Durability) -> None:
    disk = Disk()
    store = prepared(disk, durability)
    store.flush()
    session = store.get("s")
    fail(disk, 1, "fdatasync", forever=True)
    before = {node.id for node in session.tree}
    with pytest.raises(StoreFailed) as caught:
        session.append(session.root, [8])
        store.flush()
    [lost] = caught.value.nodes
    assert lost not in before
    assert lost[:4].hex() in str(caught.value)
    with pytest.raises(StoreFailed):
        session.append(session.root, [9])
    with suppress(StoreFailed):
        store.close()


@durabilities
def test_what_no_record_holds_is_refused_and_leaves_nothing(durability: Durability, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", 1_000)
    disk = Disk()
    with open_on(disk, durability=durability) as store:
        session = text_session(store)
        with pytest.raises(LimitExceeded):
            session.append(session.root, [1], metadata={"large": bytes(1_000)})
        assert len(session.tree) == 1
        session.append(session.root, [2])
        store.flush()
        with reopened(disk) as found:
            assert outline(found.get("s").tree) == outline(session.tree)
