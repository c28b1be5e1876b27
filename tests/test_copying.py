"""Copies of sessions between stores and bundles: all arrives, whatever breaks a copy off, and nothing that is there is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessiontree import (
    CorruptTree,
    KeyTaken,
    Session,
    SessionDiffers,
    SessionStore,
    UnknownAlias,
    UnknownSession,
    Unsupported,
    copying,
    journal,
)
from sessiontree.backends import segment_log
from sessiontree.bundles import export_bundle, open_bundle
from sessiontree.copying import CopyReport, copy_sessions, session_digest
from tests.command_line import ROOT, flip, json_of, run, text_of
from tests.disk import Disk
from tests.disk_model import DURABILITIES, all_seen, golden, grow, open_on, scheme_of, seen
from tests.test_store_disk import an_image, append, blob_files, everything, in_process, pixels, say, text_session
from tests.toy import a_turn, toy_scheme

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
KINDS = ("memory", "log", "bundle")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes are taken at a time, and what is taken together is a frame of its own."""
    monkeypatch.setattr(copying, "_BATCH", 2)
    monkeypatch.setattr(segment_log, "_FRAME_BYTES", 1)


def chats() -> SessionStore:
    """In memory: one of everything; a conversation with pictures whose features are held, a pin and an alias; its fork."""
    store = SessionStore.in_memory()
    everything(store)
    chat = store.create("chat", scheme=toy_scheme(), namespace="acme", model_fingerprint="tiny")
    tip = chat.root
    for number in range(4):
        tip = say(chat, append(chat, tip, a_turn(number), metadata={"n": number}), 7, number, key=f"request {number}")
        store.put_features(an_image(number), {"pixel_values": pixels(number), "encoded": pixels(number)[:10]})
    chat.pin(tip)
    chat.set_head("main", tip)
    store.alias_media("cat", an_image(1), "acme")
    store.alias_media("elsewhere", an_image(1), "other")  # no session of that namespace names it
    store.fork(chat, chat.head("main").node, "zeta").append(tip, [1])
    return store


def pins_of(store: SessionStore) -> dict[str, Any]:
    return {name: store.get(name).pins for name in store.sessions()}


def shared(session: Session) -> int:
    """How many nodes of its path a fork has from where it was forked."""
    tip = session._tree._index.bottom.tip
    return 0 if tip is None else tip.depth


def check_chats(store: SessionStore, source: SessionStore) -> None:
    """All of :func:`chats` is there."""
    assert all_seen(store) == all_seen(source)
    assert pins_of(store) == pins_of(source)
    assert [session_digest(store.get(name)) for name in store.sessions()] == [
        session_digest(source.get(name)) for name in source.sessions()
    ]
    for number in range(4):
        found = store.get_features(an_image(number))
        assert found is not None and found["pixel_values"].tobytes() == pixels(number).tobytes()
        assert found["encoded"].tobytes() == pixels(number)[:10].tobytes()
    assert store.aliased_media("cat", "acme") == an_image(1).identity
    with pytest.raises(UnknownAlias):
        store.aliased_media("elsewhere", "other")


@contextmanager
def source_of(kind: str, path: Path) -> Iterator[SessionStore]:
    with chats() as store:
        if kind == "memory":
            yield store
        elif kind == "bundle":
            export_bundle(store, path, features=True)
            with open_bundle(path) as bundle:
                yield bundle
        else:
            with SessionStore.open(path) as log:
                copy_sessions(store, log)
            with SessionStore.open(path, read_only=True) as log:
                yield log


@pytest.mark.parametrize(("one", "two"), [*itertools.product(KINDS, KINDS)])
def test_all_of_it_arrives_and_a_second_time_nothing_is_done(tmp_path: Path, one: str, two: str) -> None:
    place = tmp_path / "target"
    with source_of(one, tmp_path / "source") as source, chats() as original:
        nodes = sum(len(source.get(name).tree) - 1 for name in source.sessions())
        target = SessionStore.in_memory() if two == "memory" else place if two == "bundle" else SessionStore.open(place)
        told: list[tuple[int, int]] = []
        report = copy_sessions(source, target, progress=lambda *done: told.append(done))
        assert report.ok and report.absent == 0
        assert [(each.session_id, each.source) for each in report.sessions] == [
            (name, session_digest(source.get(name))) for name in source.sessions()
        ]
        assert sum(each.added for each in report.sessions) == nodes - (
            0 if two == "bundle" else sum(shared(source.get(name)) for name in source.sessions())
        )
        assert (report.features, report.aliases) == (4, 1)
        assert told and told == sorted(told) and told[-1][0] == told[-1][1]
        before = {file: file.read_bytes() for file in (place, *place.rglob("*")) if file.is_file()}
        again = copy_sessions(source, target)
        assert again.ok and (again.features, sum(each.added for each in again.sessions)) == (0, 0)
        assert {file: file.read_bytes() for file in before} == before
        if isinstance(target, SessionStore):
            check_chats(target, original)
            target.close()
        if two != "memory":
            with open_bundle(place) if two == "bundle" else SessionStore.open(place) as found:
                check_chats(found, original)
                assert {name: shared(found.get(name)) for name in found.sessions()} == {
                    name: shared(original.get(name)) for name in original.sessions()
                }


@pytest.mark.parametrize("through", ["log", "bundle"])
def test_sessions_of_every_family_arrive(tmp_path: Path, through: str) -> None:
    with SessionStore.in_memory() as source, SessionStore.in_memory() as target:
        for name, history in golden():
            grow(source.create(name, scheme=scheme_of(name, history), max_tokens=10_000), history)
        if through == "log":
            with SessionStore.open(tmp_path / "log") as log:
                assert copy_sessions(source, log).ok
        else:
            assert copy_sessions(source, tmp_path / "log", compress="zstd").ok
        with SessionStore.open(tmp_path / "log") if through == "log" else open_bundle(tmp_path / "log") as log:
            assert copy_sessions(log, target).ok
        assert all_seen(target) == all_seen(source)


# --- forks ------------------------------------------------------------------------------------------------------------
def test_a_fork_without_what_it_was_forked_from_takes_its_path_along(tmp_path: Path) -> None:
    with chats() as source, SessionStore.open(tmp_path / "store") as target:
        assert copy_sessions(source, target, ["zeta", "fork of a fork"]).ok
        assert all_seen(target) == {name: seen(source.get(name)) for name in ("fork of a fork", "zeta")}
        assert [shared(target.get(name)) for name in target.sessions()] == [0, 0]
        report = copy_sessions(source, target)  # what is there stays; others share as there
        assert report.ok and shared(target.get("zeta")) == 0 and shared(target.get("fork")) > 0
        assert {name: seen(target.get(name)) for name in source.sessions()} == all_seen(source)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_fork_of_a_node_that_was_dropped_takes_its_path_along(tmp_path: Path, on_disk: bool) -> None:
    source = SessionStore.open(tmp_path / "source") if on_disk else SessionStore.in_memory()
    with source, SessionStore.open(tmp_path / "store") as target:
        session = text_session(source)
        stays, goes = session.append(session.root, [1]), session.append(session.root, [2])
        source.fork(session, goes, "fork").append(goes, [3])
        session.drop(goes)
        assert copy_sessions(source, target).ok
        assert all_seen(target) == all_seen(source)
        assert stays in target.get("s").tree and goes not in target.get("s").tree


def test_results_beside_a_fork_that_came_later_stay_out_of_it(tmp_path: Path) -> None:
    """A fork takes results of parallel calls along that are there by then, and no later ones."""
    with SessionStore.in_memory() as source, SessionStore.open(tmp_path / "store") as target:
        session = text_session(source)
        calls = session.append(session.root, [1], role="assistant", metadata={"tool_calls": ["x", "y"]})
        first = session.append(calls, [2], role="tool", metadata={"tool_call_id": "x"})
        source.fork(session, first, "fork")
        session.append(calls, [3], role="tool", metadata={"tool_call_id": "y"})
        assert copy_sessions(source, target).ok
        assert all_seen(target) == all_seen(source)


# --- going on -----------------------------------------------------------------------------------------------------------------
def a_state_of(store: SessionStore, whole: dict[str, Any]) -> None:
    """Each session holds the first nodes of one of ``whole``, and heads of it only where it holds all."""
    for name in store.sessions():
        found = seen(store.get(name))
        assert found["nodes"] == whole[name]["nodes"][: len(found["nodes"])]
        assert not found["heads"] or len(found["nodes"]) == len(whole[name]["nodes"])


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_copy_that_a_crash_breaks_off_is_gone_on_with(durability: journal.Durability, small: None) -> None:
    """Power lost after each system call of a copy into a store that holds another session: that one is as it was."""
    with SessionStore.in_memory() as source:
        session = text_session(source, "chat")
        tip = session.root
        for number in range(5):
            tip = session.append(tip, [number], metadata={"n": number})
        session.set_head("main", tip)
        session.pin(tip)
        source.fork(session, tip, "fork").append(tip, [9])
        whole, pins = all_seen(source), pins_of(source)
        disk = Disk()
        with open_on(disk, durability=durability, segment_bytes=900) as store:
            mine = text_session(store, "mine")
            mine.append(mine.root, [1, 2, 3])
            store.flush()
            before, began = seen(mine), len(disk.trace)
            copy_sessions(source, store)
            ended = len(disk.trace)
        partial = 0
        for events in range(began, ended + 1):
            after = disk.crash(random.Random(events), events)
            with open_on(after, durability=durability) as found:
                partial += 1 < len(found.sessions()) < 3
                assert seen(found.get("mine")) == before
                for name in set(found.sessions()) - {"mine"}:
                    assert seen(found.get(name))["nodes"] == whole[name]["nodes"][: len(found.get(name).tree)]
                assert copy_sessions(source, found).ok
            with open_on(after) as found:
                assert all_seen(found) == {"mine": before, **whole}
                assert pins_of(found) == {"mine": frozenset(), **pins}
        assert partial


KILLED = """
import json, os, signal, sys, time
from sessiontree import copying, store, session
from sessiontree.bundles import BundleWriter
from sessiontree.cli import main
from sessiontree.cli.app import app
from sessiontree.features import FeatureStore

copying._BATCH = int(sys.argv[1])
left, when, taken = 0, "", 0

def stepping(owner, name):
    done = getattr(owner, name)
    def step(*given, **named):
        global taken
        taken += len(given[1]) if name == "_take" else 0
        if when == "before":
            fall()
        found = done(*given, **named)
        if when == "after":
            fall()
        return found
    setattr(owner, name, step)

def fall():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

for owner, name in (
    (store.SessionStore, "create"), (store.SessionStore, "_fork"), (store.SessionStore, "alias_media"), (session.Session, "pin"),
    (session.Session, "_swap"), (session.Session, "_take"), (FeatureStore, "take"), (BundleWriter, "add"), (BundleWriter, "finish"),
):
    stepping(owner, name)

for line in sys.stdin:
    source, target, number, how, seconds = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        left, when = number, how
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv[1:] = ["copy", source, target]
        try:
            main()
        except SystemExit as error:
            os.write(writing, b"%d" % taken)
            os._exit(error.code)
        os._exit(99)
    os.close(writing)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        print(json.dumps([os.waitstatus_to_exitcode(status), int(pipe.read() or -1)]), flush=True)
"""


class Killing:
    """Runs the command line in children that are killed at a step of a copy, or some seconds after they began."""

    def __init__(self, batch: int = 2) -> None:
        self._process = in_process(KILLED, str(batch), stdin=subprocess.PIPE)

    def run(
        self, source: Path | str, target: Path | str, step: int = 0, when: str = "never", seconds: float | None = None
    ) -> tuple[int, int]:
        """The exit code, -9 of one that was killed, and how many nodes it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(source), str(target), step, when, seconds]) + "\n")
        self._process.stdin.flush()
        code, taken = json.loads(self._process.stdout.readline())
        return code, taken


@pytest.fixture
def killing() -> Iterator[Killing]:
    made = Killing()
    yield made
    made._process.communicate()


@pytest.mark.parametrize(("one", "two"), [("log", "log"), ("log", "bundle"), ("bundle", "log")])
@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.soak)])
def test_killed_at_each_step_and_started_again_it_goes_on(tmp_path: Path, killing: Killing, one: str, two: str, when: str) -> None:
    """The same copy is killed at its first step, started again, killed at the next one, and so on until nothing is left to do."""
    place, target = tmp_path / "source", tmp_path / ("t.bundle" if two == "bundle" else "target")
    with source_of(one, place), chats() as original:
        whole = all_seen(original)
        rounds = 0
        for step in itertools.count(1, 1 if SOAK else 3 if two == "log" else 7):
            code, _ = killing.run(place, target, step, when)
            if code != -signal.SIGKILL:
                break
            rounds += 1
            if two == "log" and target.exists():
                with SessionStore.open(target, read_only=True) as found:
                    a_state_of(found, whole)
            elif target.exists():
                open_bundle(target).close()  # whole, or not there
        assert code == 0 and rounds > 5
        assert killing.run(place, target) == (0, 0), "a copy of what is there takes nothing"
        with open_bundle(target) if two == "bundle" else SessionStore.open(target) as found:
            check_chats(found, original)


def test_what_was_done_is_not_done_again(tmp_path: Path, killing: Killing) -> None:
    """A copy that was killed half-way takes, when it goes on, the nodes that are not there."""
    place, target = tmp_path / "source", tmp_path / "target"
    with source_of("log", place) as source:
        nodes = sum(len(source.get(name).tree) - 1 - shared(source.get(name)) for name in source.sessions())
    assert killing.run(place, target, 25, "after")[0] == -signal.SIGKILL
    with SessionStore.open(target, read_only=True) as found:
        there = sum(len(found.get(name).tree) - 1 - shared(found.get(name)) for name in found.sessions())
    assert 0 < there < nodes
    assert killing.run(place, target) == (0, nodes - there)


def test_killed_at_random_it_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "source"
    with SessionStore.open(place) as source:
        session = source.create("s", scheme=toy_scheme())
        tip = session.root
        for number in range(400):
            tip = append(session, tip, a_turn(number % 20), metadata={"n": number})
            if not number % 20:
                session.set_head(f"at {number}", tip)
        source.fork(session, tip, "fork").append(tip, [1])
        for number in range(20):
            source.put_features(an_image(number), pixels(number))
        whole = {name: session_digest(source.get(name)) for name in source.sessions()}
    killing = Killing(50)
    began = time.monotonic()
    assert killing.run(place, tmp_path / "once")[0] == 0
    took = time.monotonic() - began
    broken = 0
    drawn = random.Random(10)
    for loop in range(12 if SOAK else 2):
        target = tmp_path / f"target {loop}"
        for _ in range(5):
            broken += killing.run(place, target, seconds=took * drawn.uniform(0, 1))[0] == -signal.SIGKILL
        assert killing.run(place, target)[0] == 0
        with SessionStore.open(target) as found:
            assert {name: session_digest(found.get(name)) for name in found.sessions()} == whole
            assert len(found.get("s").heads) == 20
        assert len(blob_files(target)) == 20
    assert broken
    killing._process.communicate()


@pytest.mark.parametrize("name", ["store", "all.bundle"])
def test_a_copy_goes_on_from_an_earlier_state(tmp_path: Path, name: str) -> None:
    """What came to the source since: nodes, a fork, heads that were moved on and back, pins."""
    target = tmp_path / name
    with SessionStore.in_memory() as source:
        session = text_session(source)
        one = session.append(session.root, [1])
        two = session.append(one, [2])
        session.set_head("main", two)
        for change in (
            lambda: None,
            lambda: session.append(two, [3]),
            lambda: session.set_head("main", one),
            lambda: session.set_head("other", session.append(one, [4])),
            lambda: session.pin(two),
            lambda: source.fork(session, two, "fork").append(two, [5]),
            lambda: source.get("fork").set_head("main", two),
        ):
            change()
            if target.suffix:
                assert copy_sessions(source, target).ok
            else:
                with SessionStore.open(target) as store:
                    assert copy_sessions(source, store).ok
            with open_bundle(target) if target.suffix else SessionStore.open(target) as found:
                assert all_seen(found) == all_seen(source)
                assert pins_of(found) == pins_of(source)


# --- what is there is never lost --------------------------------------------------------------------------------------
def _another_root(store: SessionStore) -> None:
    store.drop("s")
    text_session(store, "s", namespace="other")


def _other_limits(store: SessionStore) -> None:
    store.drop("s")
    text_session(store, "s", max_tokens=99)


OTHERS: dict[str, tuple[Callable[[SessionStore], Any], str]] = {
    "root": (_another_root, "its root is"),
    "limits": (_other_limits, "its limits are (99, 0), not (None, 0)"),
    "node": (lambda store: store.get("s").append(store.get("s").root, [77]), "it has 3 nodes, not 2"),
    "head": (lambda store: store.get("s").set_head("main", store.get("s").root), "its head 'main' was moved to"),
    "another head": (lambda store: store.get("s").set_head("mine", store.get("s").root), "it has a head 'mine'"),
    "pin": (lambda store: store.get("s").pin(store.get("s").root), "it has a pin of"),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("through", ["library", "command"])
def test_a_session_with_other_content_is_refused_by_name(tmp_path: Path, what: str, through: str) -> None:
    change, message = OTHERS[what]
    with SessionStore.open(tmp_path / "source") as source:
        text_session(source, "first").append(source.get("first").root, [5])
        session = text_session(source)
        session.set_head("main", session.append(session.append(session.root, [1]), [2]))
        with SessionStore.open(tmp_path / "target") as target:
            copy_sessions(source, target, ["s"])
            change(target)
            target.flush()
            before = all_seen(target)
        if through == "library":
            with SessionStore.open(tmp_path / "target") as target:
                with pytest.raises(SessionDiffers, match="session 's' is there with other content") as refused:
                    copy_sessions(source, target)
                assert refused.value.session_id == "s" and message in str(refused.value)
    if through == "command":
        refusal = run("copy", tmp_path / "source", tmp_path / "target", "--json")
        error = json.loads(refusal.stdout)["error"]
        assert (refusal.exit_code, error["type"]) == (1, "SessionDiffers") and message in error["message"]
        assert "session 's' is there with other content" in refusal.stderr
    with SessionStore.open(tmp_path / "target") as target:
        assert all_seen(target) == before, "nothing has changed, of any session"


def test_other_nodes_in_the_place_of_those_copied_are_refused(tmp_path: Path) -> None:
    with SessionStore.in_memory() as source, SessionStore.in_memory() as target:
        for store, token in ((source, 1), (target, 2)):
            session = text_session(store)
            session.append(session.append(session.root, [0]), [token])
        source.get("s").append(source.get("s").root, [9])
        with pytest.raises(SessionDiffers, match="its node 2 is"):
            copy_sessions(source, target)
        with pytest.raises(SessionDiffers):
            copy_sessions(target, source)
        export_bundle(target, tmp_path / "b")
        before = (tmp_path / "b").read_bytes()
        with pytest.raises(SessionDiffers):
            copy_sessions(source, tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == before


def test_metadata_that_differ_are_told_in_the_end(tmp_path: Path) -> None:
    """They stand outside the ids, so only reading both sides shows it."""
    with SessionStore.open(tmp_path / "one") as one, SessionStore.open(tmp_path / "two") as two:
        for store, what in ((one, "here"), (two, "away")):
            session = text_session(store)
            session.append(session.root, [1], metadata={"what": what})
            text_session(store, "same")
        report = copy_sessions(one, two)
        assert not report.ok and [each.equal for each in report.sessions] == [False, True]
    facts = json_of("copy", tmp_path / "one", tmp_path / "two", code=1)
    assert not facts["ok"] and [each["equal"] for each in facts["sessions"]] == [False, True]
    lines = text_of("copy", tmp_path / "one", tmp_path / "two", code=1).splitlines()
    (first, second) = facts["sessions"]
    assert lines[0] == f"✗ s  1 node, 0 new, {first['source'][:16]} here, {first['target'][:16]} there"
    assert lines[1] == f"same  0 nodes, 0 new, {second['source'][:16]}" and lines[-1] == "THEY DIFFER"


def test_what_is_compared_is_what_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that keeps something else than it was given is found out, though this process has the right nodes in memory."""
    with SessionStore.in_memory() as source, SessionStore.open(tmp_path / "store") as target:
        session = text_session(source)
        session.append(session.root, [1], metadata={"what": "kept as it was given"})
        flush = target.flush

        def flush_wrongly() -> None:
            flush()
            flip(tmp_path / "store", b"kept as it was given")

        monkeypatch.setattr(target, "flush", flush_wrongly)
        with pytest.raises(CorruptTree, match="node 1 "):
            copy_sessions(source, target)


def test_an_alias_of_other_media_is_refused(tmp_path: Path) -> None:
    with chats() as source, SessionStore.open(tmp_path / "store") as target:
        target.alias_media("cat", an_image(2), "acme")
        with pytest.raises(KeyTaken, match="alias 'cat'"):
            copy_sessions(source, target)
        assert target.sessions() == ()


def test_features_that_did_not_come_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with chats() as source, SessionStore.in_memory() as target:
        monkeypatch.setattr(type(target._features), "take", lambda *given: None)
        report = copy_sessions(source, target)
        assert report.absent == 4 and not report.ok and all(each.equal for each in report.sessions)


def test_features_that_came_later_are_copied_the_next_time(tmp_path: Path) -> None:
    with SessionStore.in_memory() as source, SessionStore.open(tmp_path / "store") as target:
        session = source.create("s", scheme=toy_scheme())
        append(session, session.root, a_turn(1))
        assert copy_sessions(source, target).features == 0
        source.put_features(an_image(1), pixels(1))
        assert copy_sessions(source, target).features == 1
        assert target.get_features(an_image(1)) is not None
        copy_sessions(source, tmp_path / "b")
        source.put_features(append(session, session.root, a_turn(2)).media[0], pixels(2))
        assert copy_sessions(source, tmp_path / "b").features == 2


def test_what_cannot_be_copied_changes_nothing(tmp_path: Path) -> None:
    with chats() as source, SessionStore.open(tmp_path / "store") as target:
        for sessions, error in ((["nobody"], UnknownSession), ("chat", TypeError)):
            with pytest.raises(error):
                copy_sessions(source, target, sessions)
        with pytest.raises(Unsupported):
            copy_sessions(source, source)
        with pytest.raises(Unsupported):
            copy_sessions(source, target, compress="zstd")
        with pytest.raises(Unsupported, match="lies in the store"):
            copy_sessions(source, tmp_path / "store" / "b")
        assert target.sessions() == ()
        copy_sessions(source, tmp_path / "b", ["chat", "zeta"])
        before = (tmp_path / "b").read_bytes()
        with pytest.raises(Unsupported, match="session 'zeta' in"):
            copy_sessions(source, tmp_path / "b", ["chat"])
        assert (tmp_path / "b").read_bytes() == before
        with SessionStore.open(tmp_path / "store", read_only=True) as reader, pytest.raises(Unsupported):
            copy_sessions(source, reader)


def test_a_damaged_source_is_not_copied(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "source") as source:
        session = text_session(source)
        session.append(session.root, [1], metadata={"word": "damaged here"})
        session.append(session.root, [2])
    flip(tmp_path / "source", b"damaged here")
    assert run("copy", tmp_path / "source", tmp_path / "target").exit_code == 5
    with (
        SessionStore.open(tmp_path / "source", read_only=True, strict=False) as source,
        SessionStore.in_memory() as target,
        pytest.raises(CorruptTree, match="salvage"),
    ):
        copy_sessions(source, target)


# --- any history ------------------------------------------------------------------------------------------------------
STEP = st.tuples(st.sampled_from(["append", "say", "head", "pin", "fork", "copy", "bundle"]), st.integers(0, 5), st.integers(0, 30))


@settings(max_examples=300 if SOAK else 25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=5, max_size=40))
def test_after_any_history_a_copy_is_the_same(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]) -> None:
    """As long as things only come to the source, copies in between never stand in the way of the next one."""
    bundle = tmp_path_factory.mktemp("any") / "b"
    disk = Disk()
    with SessionStore.in_memory() as source:
        text_session(source, "s0")
        for number, (what, where, value) in enumerate([*steps, ("copy", 0, 0), ("bundle", 0, 0)]):
            session = source.get(source.sessions()[where % len(source.sessions())])
            node = list(session.tree)[value % len(session.tree)]
            if what == "append":
                session.append(node, [value], metadata={"n": number})
            elif what == "say":
                say(session, node, value, key=str(number))
            elif what == "head":
                session.set_head("abc"[value % 3], node)
            elif what == "pin":
                session.pin(node)
            elif what == "fork":
                source.fork(session, node, f"s{number + 1}")
            elif what == "bundle":
                assert copy_sessions(source, bundle).ok
                with open_bundle(bundle) as found:
                    assert all_seen(found) == all_seen(source)
            else:
                with open_on(disk, durability="group") as target:
                    assert copy_sessions(source, target).ok
                with open_on(disk) as target:
                    assert all_seen(target) == all_seen(source) and pins_of(target) == pins_of(source)


def test_equal_digests_say_equal_content(tmp_path: Path) -> None:
    """Each thing that the digest is of changes it, and nothing else does."""
    changes: list[Callable[[SessionStore, Session], object]] = [
        lambda store, session: session.append(session.root, [9]),
        lambda store, session: session.set_head("main", session.root),
        lambda store, session: session.set_head("other", session.root),
        lambda store, session: session.pin(session.root),
        lambda store, session: say(session, session.root, 1, key="k"),
    ]

    def made(metadata: Any = None, **options: Any) -> tuple[SessionStore, Session]:
        store = SessionStore.in_memory()
        session = text_session(store, **options)
        session.set_head("main", session.append(session.root, [1], metadata=metadata))
        return store, session

    base = session_digest(made()[1])
    assert session_digest(made()[1]) == base
    store, session = made()
    session.set_head("main", session.root)
    session.set_head("main", list(session.tree)[1])
    assert session_digest(session) == base, "versions of heads are no content"
    others = [session_digest(made(**options)[1]) for options in ({"metadata": {"a": 1}}, {"max_tokens": 5}, {"namespace": "t"})]
    for change in changes:
        store, session = made()
        change(store, session)
        others.append(session_digest(session))
    assert len({base, *others}) == len(others) + 1


# --- the command --------------------------------------------------------------------------------------------------------------
def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "source") as store:
        copy_sessions(chats(), store)
        digests = {name: session_digest(store.get(name)).hex() for name in store.sessions()}
    facts = json_of("copy", tmp_path / "source", tmp_path / "target")
    assert (facts["from"], facts["to"], facts["ok"]) == (str(tmp_path / "source"), str(tmp_path / "target"), True)
    assert {each["session_id"]: each["source"] for each in facts["sessions"]} == digests
    assert all(each["equal"] and each["source"] == each["target"] for each in facts["sessions"])
    lines = text_of("copy", tmp_path / "source", tmp_path / "x.bundle").splitlines()
    assert lines[0] == f"all  {facts['sessions'][0]['nodes']} nodes, {facts['sessions'][0]['nodes']} new, {digests['all'][:16]}"
    assert lines[-1] == "both sides are equal" and ["features", "4"] in [line.split() for line in lines]
    with open_bundle(tmp_path / "x.bundle") as bundle:
        assert bundle.sessions() == tuple(digests) and not bundle.compressed
    json_of("copy", tmp_path / "x.bundle", tmp_path / "y", "--zstd")
    with open_bundle(tmp_path / "y") as bundle:
        assert bundle.compressed
    assert json_of("copy", tmp_path / "y", tmp_path / "z", "--bundle")["ok"] and (tmp_path / "z").is_file()
    assert json_of("copy", tmp_path / "z", tmp_path / "back")["ok"] and (tmp_path / "back").is_dir()
    assert text_of("ls", tmp_path / "back") == text_of("ls", tmp_path / "source")


def test_sessions_are_named_by_id_beginning_and_pattern(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "source") as store:
        for name in ("run-1/a", "run-1/b", "run-2/a", "other", "run-*"):
            text_session(store, name)
    for command in ("copy", "export"):
        number = itertools.count()

        def taken(*names: str) -> list[str]:
            to = tmp_path / f"{command}{next(number)}.bundle"  # noqa: B023
            found = json_of(command, tmp_path / "source", to, *names)["sessions"]  # noqa: B023
            return [each["session_id"] for each in found] if command == "copy" else found  # noqa: B023

        assert taken("oth") == ["other"]
        assert taken("run-1/*") == ["run-1/a", "run-1/b"]
        assert taken("run-?/a", "other", "run-2/a") == ["run-1/a", "run-2/a", "other"]
        assert taken("run-*") == ["run-*"], "exact names come first"
        assert taken("run-[12]/b") == ["run-1/b"]
        for wrong in ("nobody*", "run-"):
            assert run(command, tmp_path / "source", tmp_path / "no.bundle", wrong).exit_code == 2
        assert not (tmp_path / "no.bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere", "new"], 3),
        (["source", "source"], 2),
        (["source", "./source"], 2),
        (["source", "new", "nobody"], 2),
        (["source", "notes.txt"], 6),
        (["notes.txt", "new"], 6),
        (["source", "nowhere/new"], 7),
        (["source", "nowhere/new.bundle"], 7),
        (["source", "source/new.bundle"], 2),
        (["source", "one.bundle", "t"], 2),
        (["cut.bundle", "new"], 5),
    ],
)
def test_a_copy_that_cannot_be_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with SessionStore.open("source") as store:
        text_session(store, "s"), text_session(store, "t")
    text_of("copy", "source", "one.bundle")
    Path("cut.bundle").write_bytes(Path("one.bundle").read_bytes()[:-20])
    Path("notes.txt").write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    result = run("copy", *arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("sessiontree: ")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_store_that_is_written_to_is_copied_from_and_not_to(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "busy") as busy:
        session = text_session(busy)
        session.append(session.root, [1])
        busy.flush()
        assert json_of("copy", tmp_path / "busy", tmp_path / "copy")["ok"]
        assert run("copy", tmp_path / "copy", tmp_path / "busy").exit_code == 4


def test_a_report_is_plain(tmp_path: Path) -> None:
    with chats() as source, SessionStore.in_memory() as target:
        report = copy_sessions(source, target, ["chat"])
    assert isinstance(report, CopyReport)
    facts = json.loads(json.dumps(report.to_dict()))
    assert facts["ok"] and facts["sessions"][0]["session_id"] == "chat" and len(facts["sessions"][0]["source"]) == 64


def test_the_page_says_what_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `copy` | ") and "`ok`" in line]
    with SessionStore.open(tmp_path / "source") as store:
        text_session(store)
    facts = json_of("copy", tmp_path / "source", tmp_path / "target")
    assert {key for key in (*facts, *facts["sessions"][0]) if f"`{key}`" not in row} == set()
    options = set(re.findall(r"(--[a-z]+)", text_of("copy", "--help").partition("Options:")[2])) - {"--help", "--json"}
    assert options == {"--bundle", "--zstd"} and "`copy FROM TO [SESSION]...`" in page
    assert all(f"`{option} " in page for option in ("--tenant", "--blobs"))
