"""Drafts as bytes: what goes on elsewhere is what left, comes back as the node it would have been, and anything else is refused."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    CorruptTree,
    Draft,
    DraftClosed,
    IncompatibleStore,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    NodeHeld,
    OutOfRange,
    Session,
    SessionStore,
    SessionTreeError,
    StaleSession,
    StoreClosed,
    UnknownNode,
    UnknownSession,
    Unsupported,
    codec,
    extend_drafts,
    handover,
)
from sessiontree.aio import AsyncStore
from sessiontree.bundles import export_bundle, open_bundle
from sessiontree.digest import pack, root_id
from sessiontree.handover import unpacked
from sessiontree.testing.together import in_threads
from tests.reference import Segment
from tests.toy import (
    a_turn,
    check,
    fingerprint,
    grow,
    histories,
    image,
    plain,
    refuses,
    reply,
    shown,
    spans_of,
    store_of,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

PAST = [a_turn(), reply(8, 9), turn(4, *shown(video(2)), 5)]
METADATA = {"tool": {"name": "f", "ids": [1, 2]}, "array": np.arange(3), "set": {1, 2}}


def new_session(name: str = "s", **options: Any) -> Session:
    return SessionStore.in_memory().create(name, **{"scheme": toy_scheme(), "namespace": "tenant", **options})


def base(session: Session) -> Node:
    """The end of PAST in a session: the same nodes in every incarnation."""
    first, answer, last = PAST
    draft = session.draft(grow(session, session.root, first), key="reply")
    draft.extend(answer.tokens)
    return grow(session, draft.commit(), last)


def in_flight(session: Session, parent: Node | None = None, **options: Any) -> Draft:
    """A draft with tokens, states, metadata and progress."""
    draft = session.draft(parent or base(session), **{"metadata": METADATA, **options})
    draft.set_state(b"start")
    draft.extend([30, 31, 32])
    draft.set_state(b"")
    draft.append(33)
    draft.set_state(b"grammar")
    draft.num_computed_tokens = draft.start + 2
    return draft


def seen(draft: Draft) -> tuple[Any, ...]:
    """All that can be read of a draft, of every window."""
    windows = [
        (start, stop) for stop in range(draft.stop + 1) for start in (0, stop // 2, max(0, draft.start - 1), stop) if start <= stop
    ]
    return (
        (draft.parent.id, draft.key, draft.role, plain(draft.metadata), draft.start, draft.stop, draft.depth, draft.room),
        draft.token_ids.tolist(),
        draft._states,
        draft.num_computed_tokens,
        (draft.next_position, draft.mrope_position_delta, draft.position_state(), draft.position_state("as_replayed")),
        [fingerprint(node) for node in draft.path()],
        [
            (
                draft.input_ids(start, stop).tolist(),
                spans_of(draft, start, stop),
                [draft.positions(start, stop, mode).tolist() for mode in ("as_decoded", "as_replayed")],
            )
            for start, stop in windows
        ],
    )


def with_states_rolled_back(draft: Draft) -> list[tuple[int, bytes | None, int]]:
    """What is left of it after a rollback to each of its lengths, from the last on; it ends empty."""
    left = []
    for length in range(len(draft), -1, -1):
        draft.rollback(length)
        left.append((length, draft.state, draft.num_computed_tokens))
    return left


# --- there ----------------------------------------------------------------------------------------------------------------


def test_what_is_adopted_is_what_was_handed_over() -> None:
    session = new_session()
    draft, twin = in_flight(session), in_flight(session)
    before = seen(draft)
    data = draft.hand_over()
    again = session.adopt(data)
    assert seen(again) == before
    assert not again.closed
    assert with_states_rolled_back(again) == with_states_rolled_back(twin)
    assert session.tree.root is again.path()[0], "its path is this session's own"


@settings(max_examples=25)
@given(histories(), st.lists(st.integers(0, 99), max_size=9))
def test_any_draft_goes_on_in_a_process_without_the_store(history: list[Segment], tokens: list[int]) -> None:
    session = new_session()
    draft = session.draft(grow(session, session.root, *history))
    draft.extend(tokens)
    draft.num_computed_tokens = draft.stop - len(tokens) // 2
    before = seen(draft)
    there = SessionStore.in_memory().adopt(draft.hand_over(with_path=True))
    assert seen(there) == before
    there.extend([1, 2])
    check(there, [*history, reply(*tokens, 1, 2)])
    node = session.adopt(there.hand_over()).commit()
    assert node.parent is draft.parent
    check(node, [*history, reply(*tokens, 1, 2)])


@pytest.mark.parametrize("rule", ["hf5", "sglang", "vllm"])
def test_positions_are_the_originals(rule: str) -> None:
    """As decoded and as replayed differ on this path, under some rules."""
    session = new_session(scheme=toy_scheme(rule, tokens_per_second=7))
    draft = in_flight(session)
    before = seen(draft)
    there = SessionStore.in_memory().adopt(draft.hand_over(with_path=True))
    assert seen(there) == before
    assert there.scheme == session.scheme


def test_an_external_table_and_a_split_item_come_along() -> None:
    session = new_session()
    whole = image(4, 8, 3).item
    first = MediaItem("image", whole.identity, [(1, 3)], whole.grid_thw, unfinished=True)
    rest = MediaItem("image", whole.identity, [(0, 5)], whole.grid_thw, placeholders_before=3)
    node = session.append(session.root, [7, 101, 101, 101], media=[first])
    refuses(MediaSpanError, session, session.draft, node)
    node = session.append(session.append(node, [101] * 5 + [8], media=[rest]), [5, 6], positions=np.array([[50, 51]] * 3))
    draft = in_flight(session, node)
    before = seen(draft)
    assert seen(SessionStore.in_memory().adopt(draft.hand_over(with_path=True))) == before


def test_a_draft_under_the_root_needs_no_path() -> None:
    session = new_session()
    draft = session.draft(session.root)
    draft.extend([1, 2])
    there = SessionStore.in_memory().adopt(draft.hand_over())
    assert there.input_ids().tolist() == [1, 2]


def test_a_path_over_forks_comes_along() -> None:
    session = new_session()
    store, tip = store_of(session), base(session)
    fork = store.fork(session, tip, "fork")
    draft = in_flight(fork, grow(fork, tip, turn(70)))
    before = seen(draft)
    there = SessionStore.in_memory()
    adopted = there.adopt(draft.hand_over(with_path=True))
    assert seen(adopted) == before
    assert there.sessions() == ("fork",)


def test_one_draft_has_one_encoding() -> None:
    session = new_session()
    data = in_flight(session, key="request").hand_over(with_path=True)
    assert session.adopt(data).hand_over(with_path=True) == data
    assert session.adopt(bytearray(data)).hand_over(with_path=True) == data
    assert session.adopt(memoryview(data)).hand_over() == in_flight(session, key="request").hand_over()
    elsewhere = SessionStore.in_memory().adopt(data)
    assert elsewhere.hand_over(with_path=True) != data, "it says that it has been there"


def test_what_was_handed_over_is_closed_here() -> None:
    session = new_session()
    draft = in_flight(session)
    reads = seen(draft)
    data = draft.hand_over()
    assert (draft.closed, draft.how_closed) == (True, "handed over")
    assert seen(draft) == reads, "reading works on"
    for call in (
        draft.hand_over,
        draft.commit,
        draft.abort,
        draft.preempt,
        lambda: draft.append(1),
        lambda: draft.extend([1]),
        lambda: draft.rollback(0),
        lambda: draft.set_state(b""),
        lambda: setattr(draft, "num_computed_tokens", 1),
        lambda: extend_drafts([draft], [1]),
    ):
        with pytest.raises(DraftClosed, match="handed over"):
            call()
    assert session.children(draft.parent) == ()
    with session.adopt(data) as again:
        assert again.how_closed is None
    assert again.how_closed == "aborted"


def test_a_hand_over_that_raises_leaves_the_draft_open(monkeypatch: pytest.MonkeyPatch) -> None:
    session = new_session()
    draft = in_flight(session)
    before = seen(draft)
    with monkeypatch.context() as small:
        small.setattr(codec, "MAX_RECORD_BYTES", 100)
        with pytest.raises(LimitExceeded):
            draft.hand_over()
    assert seen(draft) == before
    assert not draft.closed
    assert seen(session.adopt(draft.hand_over())) == before


# --- and back -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", [1, 3])
@pytest.mark.parametrize("key", [None, "request"])
def test_it_comes_back_as_if_it_had_never_left(stores: int, key: str | None) -> None:
    home, stayed = new_session(), new_session()
    left, twin = in_flight(home, key=key), in_flight(stayed, key=key)
    data = left.hand_over(with_path=True)
    for number in range(stores):
        there = SessionStore.in_memory().adopt(data)
        there.append(number)
        there.set_state(b"%d" % number)
        twin.append(number)
        twin.set_state(b"%d" % number)
        data = there.hand_over(with_path=True)
    back = home.adopt(data)
    assert seen(back) == seen(twin)
    node, same = (draft.commit("length", tail_policy="drop_last") for draft in (back, twin))
    assert fingerprint(node) == fingerprint(same)
    assert tree_digest(home.tree) == tree_digest(stayed.tree)


def test_the_same_bytes_committed_twice_are_one_node() -> None:
    session = new_session()
    data = in_flight(session).hand_over()
    first, second, other = (session.adopt(data) for _ in range(3))
    node = first.commit()
    digest = tree_digest(session.tree)
    assert second.commit("length") is node, "a retry, whatever else it says"
    other.append(5)
    error = refuses(KeyTaken, session, other.commit)
    assert (error.node, error.key) == (node, node.key)
    assert not other.closed
    other.rollback(4)
    assert other.commit() is node
    assert tree_digest(session.tree) == digest


def test_it_can_end_where_it_went() -> None:
    home = new_session()
    draft = in_flight(home)
    away = SessionStore.in_memory()
    there = away.adopt(draft.hand_over(with_path=True))
    node = there.commit("stop")
    assert node in away.get("s").tree
    child = away.get("s").append(node, [50])
    check(child, [*PAST, reply(30, 31, 32, 33), turn(50)])
    assert len(home.tree) == len(PAST) + 1


# --- which opening --------------------------------------------------------------------------------------------------------


def reopened_in_memory(tmp_path: Path) -> tuple[SessionStore, Callable[[], Session]]:
    store = SessionStore.in_memory()

    def reopen() -> Session:
        if "s" in store.sessions():
            store.get("s").close()
        session = store.create("s", scheme=toy_scheme())
        base(session)
        return session

    return store, reopen


def reopened_on_disk(tmp_path: Path) -> tuple[SessionStore, Callable[[], Session]]:
    store = SessionStore.open(tmp_path / "store")

    def reopen() -> Session:
        if "s" not in store.sessions():
            session = store.create("s", scheme=toy_scheme())
            base(session)
        else:
            store.get("s").close()
        return store.get("s")

    return store, reopen


@pytest.mark.parametrize("make", [reopened_in_memory, reopened_on_disk])
def test_a_draft_of_a_session_that_was_reopened_is_stale(
    make: Callable[[Path], tuple[SessionStore, Callable[[], Session]]], tmp_path: Path
) -> None:
    store, reopen = make(tmp_path)
    with closing(store):
        session = reopen()
        tip = session.leaves()[0]
        data = session.draft(tip).hand_over(with_path=True)
        away = SessionStore.in_memory().adopt(data)
        away.extend([1, 2])
        back = away.hand_over(with_path=True)
        again = reopen()
        assert again.incarnation != session.incarnation
        for old in (data, back):
            error = refuses(StaleSession, again, again.adopt, old)
            assert (error.session_id, error.incarnation) == ("s", session.incarnation)
            refuses(StaleSession, again, store.adopt, old)
            refuses(StaleSession, session, session.adopt, old)
            assert SessionStore.in_memory().adopt(old).parent == tip, "that is between the two"
        fork = store.fork(again, tip, "fork")
        refuses(StaleSession, fork, fork.adopt, data)
        store.drop("s")
        with pytest.raises(StaleSession):
            store.adopt(data)
        assert store.sessions() == ("fork",), "nothing was made for it"
        fork.draft(tip).abort()


def test_another_process_that_writes_is_another_opening(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme=toy_scheme())
        data = in_flight(session).hand_over()
        assert session.adopt(data).commit().finish_reason == "stop"
    with SessionStore.open(tmp_path / "store") as store, pytest.raises(StaleSession):
        store.adopt(data)


def test_every_store_that_it_was_in_knows_it(tmp_path: Path) -> None:
    home, away = new_session(), SessionStore.in_memory()
    there = away.adopt(in_flight(home).hand_over(with_path=True))
    data = there.hand_over(with_path=True)
    first = away.get("s")
    first.close()
    again = away.create("s", scheme=toy_scheme(), namespace="tenant")
    error = refuses(StaleSession, again, again.adopt, data)
    assert error.incarnation == first.incarnation
    assert home.adopt(data).parent == there.parent


def test_stores_in_memory_know_one_another_apart() -> None:
    one, two = new_session(), new_session()
    assert one.incarnation == two.incarnation
    data = in_flight(one).hand_over()
    two.close()
    reopened = store_of(two).create("s", scheme=toy_scheme(), namespace="tenant")
    parent = base(reopened)
    assert reopened.adopt(data).parent is parent


# --- a follower -----------------------------------------------------------------------------------------------------------

FOLLOWER = """
import sys
from sessiontree import SessionStore, extend_drafts

data = sys.stdin.buffer.read()
if sys.argv[1:]:
    store = SessionStore.open(sys.argv[1], read_only=True)
else:
    store = SessionStore.in_memory()
with store:
    draft = store.adopt(data)
    assert draft.num_computed_tokens == draft.stop, draft.num_computed_tokens
    for token in range(40, 45):
        draft.set_state(b"before %d" % token)
        extend_drafts([draft], [token])
        draft.num_computed_tokens = draft.stop - 1
    draft.rollback(len(draft) - 1)
    sys.stdout.buffer.write(draft.hand_over())
"""


@pytest.mark.parametrize("shares_the_store", [True, False])
def test_prefill_here_decode_there_commit_here(shares_the_store: bool, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme=toy_scheme(), namespace="tenant")
        draft = session.draft(base(session), key="request")
        draft.append(39)
        draft.num_computed_tokens = draft.stop
        store.flush()
        root = Path(__file__).parent.parent
        command = [sys.executable, "-c", FOLLOWER, *([str(tmp_path / "store")] if shares_the_store else [])]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        data = draft.hand_over(with_path=not shares_the_store)
        ran = subprocess.run(command, input=data, capture_output=True, env=environment, check=False)
        assert ran.returncode == 0, ran.stderr.decode()
        back = session.adopt(ran.stdout)
        assert (back.state, back.num_computed_tokens) == (b"before 43" if len(back) < 5 else b"before 44", back.stop)
        node = back.commit("stop")
        assert node.token_ids.tolist() == [39, 40, 41, 42, 43]
        check(node, [*PAST, reply(39, 40, 41, 42, 43)])
        same = new_session()
        twin = same.draft(base(same), key="request")
        twin.extend([39, 40, 41, 42, 43])
        assert twin.commit().id == node.id


def test_what_a_follower_drafts_comes_to_the_writer(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme=toy_scheme())
        tip = base(session)
        store.flush()
        with SessionStore.open(tmp_path / "store", read_only=True) as reader:
            followed = reader.get("s")
            draft = in_flight(followed, followed.node(tip.id), key="request")
            refused = followed.draft(tip)
            with pytest.raises(Unsupported):
                refused.commit()
            later = session.append(tip, [60])
            store.flush()
            early = session.draft(later).hand_over()
            error = refuses(UnknownNode, followed, followed.adopt, early)
            assert error.node_id == later.id
            assert reader.adopt(early).parent == later, "get looks after the writer"
            with_new = session.draft(session.append(later, [61])).hand_over(with_path=True)
            refuses(Unsupported, followed, followed.adopt, with_new)
            data = draft.hand_over()
            store.get("s").close()
            again = store.get("s")
            assert again.adopt(data).commit().key == "request", "a follower opens nothing, so it was never in an opening"
            store.flush()
            with pytest.raises(Unsupported):
                reader.adopt(in_flight(new_session("other"), None).hand_over(with_path=True))
            assert "other" not in reader.sessions()


def test_a_bundle_takes_drafts_as_any_store_that_is_only_read(tmp_path: Path) -> None:
    session = new_session()
    tip = base(session)
    export_bundle(store_of(session), tmp_path / "b.stb")
    with open_bundle(tmp_path / "b.stb") as bundle:
        there = bundle.adopt(in_flight(session, tip).hand_over())
        there.append(1)
        assert session.adopt(there.hand_over()).commit().parent is tip


def test_tasks_adopt_by_the_asyncio_front(tmp_path: Path) -> None:
    home = new_session()
    with_path = in_flight(home).hand_over(with_path=True)

    async def work() -> None:
        async with await AsyncStore.open(tmp_path / "store", durability="commit") as store:
            draft = await store.adopt(with_path)
            session = await store.get("s")
            again = await session.adopt(draft.hand_over())
            node = await session.commit(again)
            assert (again.how_closed, await session.children(node.path()[-2])) == ("committed", (node,))
            assert home.adopt(with_path).commit().id == node.id

    asyncio.run(work())


# --- what is not there, or is another -------------------------------------------------------------------------------------


def test_its_parent_is_named_where_it_is_missing() -> None:
    session, other = new_session(), new_session()
    draft = in_flight(session)
    data = draft.hand_over()
    error = refuses(UnknownNode, other, other.adopt, data)
    assert error.node_id == draft.parent.id
    base(other)
    assert other.adopt(data).parent == draft.parent


def test_a_session_that_is_missing_is_made_of_the_path_alone() -> None:
    session = new_session(max_tokens=500, reserve_output=7)
    data, with_path = (
        in_flight(session).hand_over(),
        in_flight(session, base(session)).hand_over(with_path=True),
    )
    away = SessionStore.in_memory()
    with pytest.raises(UnknownSession):
        away.adopt(data)
    assert away.sessions() == ()
    draft = away.adopt(with_path)
    made = away.get("s")
    assert (made.max_tokens, made.reserve_output, made.namespace, made.scheme) == (500, 7, session.namespace, session.scheme)
    assert [node.id for node in made.tree] == [node.id for node in draft.path()]
    assert away.adopt(data).parent is draft.parent, "now it is there"


def test_a_path_joins_what_a_session_has() -> None:
    session, other = new_session(), new_session()
    kept = grow(other, other.root, *PAST[:1], turn(90))
    data = in_flight(session).hand_over(with_path=True)
    draft = other.adopt(data)
    assert [node.id for node in draft.path()] == [node.id for node in session.leaves()[0].path()]
    assert draft.path()[1] is kept.path()[1]
    count = len(other.tree)
    assert other.adopt(data).parent is draft.parent
    assert len(other.tree) == count


def test_a_path_with_a_key_that_is_taken_changes_nothing() -> None:
    session, other = new_session(), new_session()
    draft = session.draft(session.append(session.append(session.root, [1]), [2], key="k"))
    taken = other.append(other.append(other.root, [1]), [3], key="k")
    assert refuses(KeyTaken, other, other.adopt, draft.hand_over(with_path=True)).node is taken


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"namespace": "another"}, "another"),
        ({"namespace": None}, "tenant"),
        ({"model_fingerprint": "v2"}, "v2"),
        ({"scheme": "text@sglang"}, "text@sglang"),
        ({"scheme": toy_scheme("hf5")}, "qwen2_5_vl@hf5"),
        ({"scheme": toy_scheme(tokens_per_second=3)}, "tokens_per_second"),
    ],
)
def test_other_roots_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    other = new_session(**options)
    with_path = in_flight(new_session()).hand_over(with_path=True)
    for adopt in (other.adopt, store_of(other).adopt):
        error = refuses(IncompatibleStore, other, adopt, with_path)
        assert named in str(error)
        assert error.expected != error.found


def test_room_is_what_the_session_allows() -> None:
    session = new_session()
    draft = in_flight(session)
    stop = draft.stop
    data = draft.hand_over(with_path=True)
    for limit in (stop - 5, stop - 1):
        small = new_session(max_tokens=limit)
        error = refuses(LimitExceeded, small, small.adopt, data)
        assert error.limit == limit
        assert len(small.tree) == 1, "nor was the path taken"
    fits = new_session(max_tokens=stop + 1).adopt(data)
    assert fits.room == 1
    fits.append(1)
    with pytest.raises(LimitExceeded):
        fits.append(1)
    assert session.adopt(fits.hand_over()).room > 1


def test_threads_that_adopt_one_path_share_one_session() -> None:
    data = [in_flight(new_session(), key=f"request {number}").hand_over(with_path=True) for number in range(6)]
    away = SessionStore.in_memory()
    drafts: list[Draft] = []
    in_threads(6, lambda number: drafts.append(away.adopt(data[number])))
    assert away.sessions() == ("s",)
    assert len({id(draft.parent) for draft in drafts}) == 1
    nodes = {draft.commit().id for draft in drafts}
    assert len(nodes) == len(away.get("s").children(drafts[0].parent)) == 6


def test_a_closed_store_or_session_adopts_nothing() -> None:
    session = new_session()
    data = in_flight(session).hand_over()
    store = store_of(session)
    session.close()
    refuses(StaleSession, session, session.adopt, data)
    store.close()
    with pytest.raises(StoreClosed):
        store.adopt(data)


# --- what a draft out of house is to gc, drop and tick ---------------------------------------------------------------------


def test_nothing_here_holds_its_parent_but_a_pin() -> None:
    session = new_session()
    store, parent = store_of(session), base(session)
    kept = session.append(session.root, [1])
    open_draft = session.draft(parent)
    with pytest.raises(NodeHeld):
        session.drop(parent)
    data = open_draft.hand_over()
    session.pin(parent)
    assert store.gc(recent=0).nodes_after == len(PAST), "the pin's path, and not what nothing leads to"
    assert kept not in session.tree
    assert session.adopt(data).parent is parent
    session.unpin(parent)
    data = session.adopt(data).hand_over()
    store.gc(recent=0)
    refuses(UnknownNode, session, session.adopt, data)


def test_a_session_whose_drafts_are_out_expires_unless_it_is_used() -> None:
    store = SessionStore.in_memory(idle_ttl=10)
    session = store.create("s", scheme=toy_scheme())
    data = session.draft(base(session)).hand_over()
    store.tick(0)
    assert store.tick(9) == ()
    store.get("s")
    assert store.tick(18) == ()
    draft = session.adopt(data)
    assert store.tick(100) == (), "an open draft is use"
    draft.abort()
    assert store.tick(200) == ("s",)


def test_what_was_evicted_meanwhile_comes_back_for_it(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session: Session | None = store.create("s", scheme=toy_scheme())
        assert session is not None
        draft: Draft | None = in_flight(session)
        assert draft is not None
        incarnation, parent_id, before = session.incarnation, draft.parent.id, seen(draft)
        session = None
        store.evict()
        assert seen(draft) == before, "an open draft holds its path"
        data = draft.hand_over()
        draft = None
        store.evict()
        assert store.usage().asleep_sessions == 1
        back = store.adopt(data)
        assert seen(back) == before
        node = back.commit()
        assert (store.get("s").incarnation, node.parent and node.parent.id) == (incarnation, parent_id), "the same opening"


# --- other bytes ----------------------------------------------------------------------------------------------------------


def resealed(records: Sequence[bytes], version: int = handover.VERSION) -> bytes:
    """A well-formed frame of any records."""
    body = b"".join(struct.pack(">I", len(record)) + record for record in records)
    return handover._HEADER.pack(handover._MAGIC, version, sha256(body).digest()) + body


def records_of(data: bytes) -> list[bytes]:
    return handover._records(memoryview(data)[handover._HEADER.size :])


@pytest.fixture(scope="module")
def samples() -> Iterator[tuple[Session, list[bytes]]]:
    session = new_session()
    parent = base(session)
    yield (
        session,
        [
            in_flight(session, parent).hand_over(with_path=True),
            in_flight(session, parent).hand_over(),
            session.draft(session.root).hand_over(),
        ],
    )


def test_bytes_that_were_cut_or_flipped(samples: tuple[Session, list[bytes]]) -> None:
    session, datas = samples
    digest = tree_digest(session.tree)
    for data in datas[1:]:
        for length in range(len(data)):
            with pytest.raises(CorruptTree):
                session.adopt(data[:length])
        for at in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << at % 8
            with pytest.raises((CorruptTree, IncompatibleStore)):
                session.adopt(flipped)
        with pytest.raises(CorruptTree):
            session.adopt(data + b"\0")
    assert tree_digest(session.tree) == digest


def test_other_versions_are_named(samples: tuple[Session, list[bytes]]) -> None:
    session, (data, *_) = samples
    for version in (0, 2, 2**32 - 1):
        error = refuses(IncompatibleStore, session, session.adopt, resealed(records_of(data), version))
        assert error.found == version


@pytest.mark.parametrize("wrong", [None, "text", 5, [1], np.zeros(3)])
def test_what_is_no_bytes_is_a_type_error(wrong: Any) -> None:
    session = new_session()
    refuses(TypeError, session, session.adopt, wrong)
    refuses(TypeError, session, store_of(session).adopt, wrong)


def test_what_is_too_large_is_not_looked_at(samples: tuple[Session, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    session, (data, *_) = samples
    monkeypatch.setattr(handover, "MAX_BYTES", len(data) - 1)
    monkeypatch.setattr(handover, "sha256", None)
    refuses(LimitExceeded, session, session.adopt, data)
    draft = in_flight(session, session.leaves()[0])
    with pytest.raises(LimitExceeded):
        draft.hand_over(with_path=True)
    assert not draft.closed


def _changed(fields: tuple[Any, ...], **changes: Any) -> bytes:
    names = ("parent_id", "key", "role", "metadata", "data", "states", "computed", "openings")
    packed: bytes = pack(tuple(changes.get(name, value) for name, value in zip(names, fields, strict=True)))
    return packed


WRONG_DRAFTS: list[dict[str, Any]] = [
    {"parent_id": b"short"},
    {"parent_id": "x" * 32},
    {"key": None},
    {"key": b"k"},
    {"role": 3},
    {"metadata": (3, 1, 2)},
    {"metadata": (0, 1)},
    {"metadata": (2, "a")},
    {"metadata": (2, "b", 1, "a", 2)},
    {"metadata": (2,)},
    {"data": b"123"},
    {"data": b"\xff\xff\xff\xff"},
    {"data": "text"},
    {"states": ((5, b"beyond"),)},
    {"states": ((-1, b"before"),)},
    {"states": ((1, b"a"), (1, b"b"))},
    {"states": ((2, b"a"), (1, b"b"))},
    {"states": ((1, b"a"), (2, b"a"))},
    {"states": ((1, "text"),)},
    {"states": ((1, bytes(2**20 + 1)),)},
    {"states": ((1.0, b"a"),)},
    {"states": None},
    {"computed": -1},
    {"computed": 10**6},
    {"computed": 1.5},
    {"computed": True},
    {"openings": ((b"", 1),)},
    {"openings": ((b"s", 0),)},
    {"openings": ((b"s", 1), (b"s", 2))},
    {"openings": (("s", 1),)},
    {"openings": ((b"s",),)},
    {"openings": ((bytes(65), 1),)},
    {"openings": None},
]


@pytest.mark.parametrize("wrong", WRONG_DRAFTS, ids=str)
def test_a_right_checksum_over_a_wrong_draft(wrong: dict[str, Any], samples: tuple[Session, list[bytes]]) -> None:
    session, (data, *_) = samples
    draft, *others = records_of(data)
    fields = codec._unpacked(draft)
    assert _changed(fields) == draft
    refuses(CorruptTree, session, session.adopt, resealed([_changed(fields, **wrong), *others]))
    away = SessionStore.in_memory()
    with pytest.raises(CorruptTree):
        away.adopt(resealed([_changed(fields, **wrong), *others]))
    assert away.sessions() == ()


def test_a_right_checksum_over_wrong_records(samples: tuple[Session, list[bytes]]) -> None:
    session, (data, short, _) = samples
    draft, own, *nodes = records_of(data)
    again = codec.renumbered(nodes[0], 0, 2, 1)
    wrong: list[Sequence[bytes]] = [
        [],
        [draft],
        [own, draft],
        [draft, nodes[0]],
        [draft, own, *nodes[:-1]],
        [draft, own, *nodes[1:]],
        [draft, own, *reversed(nodes)],
        [draft, own, *nodes, own],
        [draft, own, nodes[0], again],
        [draft, own, codec.renumbered(nodes[0], 1, 1, 0), *nodes[1:]],
        [draft, own, nodes[0][:-1], *nodes[1:]],
        [draft + b"\0", own, *nodes],
        [draft, own + b"\0", *nodes],
        [draft, b"", *nodes],
        [b"", own, *nodes],
    ]
    record = codec.decode(own)
    assert isinstance(record, codec.SessionRecord)
    for changes in (
        {"session": 1},
        {"tip": (0, 1)},
        {"root_id": bytes(32)},
        {"namespace": record.namespace._replace(lora="x")},
        {"scheme": "text@hf5"},
    ):
        wrong.append([draft, codec.encode(record._replace(**changes)), *nodes])
    for records in wrong:
        with pytest.raises((CorruptTree, IncompatibleStore)):  # what is no record may say that it is of a later version
            session.adopt(resealed(records))
        with pytest.raises((CorruptTree, IncompatibleStore)):
            SessionStore.in_memory().adopt(resealed(records))
    node = codec.decode(nodes[-1])
    assert isinstance(node, codec.NodeRecord)
    further = node.state._replace(num_tokens=node.state.num_tokens + 1)
    for other in (node._replace(data=b"\1\0\0\0" + node.data[4:]), node._replace(role="tool"), node._replace(state=further)):
        refuses(CorruptTree, session, session.adopt, resealed([draft, own, *nodes[:-1], codec.encode(other)]))
    body = struct.pack(">I", 2**32 - 1) + draft
    cut = handover._HEADER.pack(handover._MAGIC, handover.VERSION, sha256(body).digest()) + body
    refuses(CorruptTree, session, session.adopt, cut)
    assert session.adopt(resealed(records_of(short))).parent is session.leaves()[0]


def test_a_session_record_that_no_scheme_fits() -> None:
    session = new_session(scheme="text@hf5")
    draft, own = records_of(session.draft(session.root).hand_over())
    record = codec.decode(own)
    assert isinstance(record, codec.SessionRecord)
    for scheme, params in (("no such@rule", ()), ("text@hf5", (("unknown", 1),)), ("text@hf5", ())):
        constants = (scheme, params, record.namespace, record.model_fingerprint)
        root = root_id(*constants)
        other = record._replace(scheme=scheme, params=params, root_id=root)
        fields = codec._unpacked(draft)
        data = resealed([_changed(fields, parent_id=root), codec.encode(other)])
        with pytest.raises(SessionTreeError):
            SessionStore.in_memory().adopt(data)
        refuses(IncompatibleStore, session, session.adopt, data)


def mutated(rng: random.Random, datas: Sequence[bytes]) -> bytes:
    """Bytes of drafts with something done to them; half of them with a checksum that is right again."""
    data = rng.choice(datas)
    if rng.random() < 0.7:
        records = records_of(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(records))
            kind = rng.randrange(6)
            if kind == 0:
                records[at] = rng.choice(records_of(rng.choice(datas)))
            elif kind == 1 and len(records) > 2:
                del records[at]
            else:
                records[at] = scrambled(rng, records[at])
            if not records:
                break
        return resealed(records)
    return scrambled(rng, data)


def scrambled(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 0x7F, 0x80, 0x90, 0x9F, 0xC0, 0xC4, 0xC6, 0xCF, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF))
            case 2:
                del changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                changed[at : at + 5] = b"\xdd" + rng.randbytes(4)  # an array that says it is long
    return bytes(changed)


def test_twenty_thousand_mutations(samples: tuple[Session, list[bytes]]) -> None:
    """Each is a typed error and nothing else, or bytes that are right, and then the only ones of what they say."""
    session, datas = samples
    rng = random.Random(8)
    digest, store = tree_digest(session.tree), store_of(session)
    taken = 0
    for number in range(20_000):
        data = mutated(rng, datas)
        try:
            parcel = unpacked(data)
        except SessionTreeError:
            continue
        taken += 1
        again = handover._encode(*parcel[1:9])
        nodes = [codec.encode(record) for record in parcel.path]
        assert resealed([again, codec.encode(parcel.session), *nodes]) == data
        if number % 3 == 0:
            try:
                draft = store.adopt(data)
            except SessionTreeError:
                continue
            assert draft.token_ids.tobytes() == parcel.data
            draft.abort()
    assert tree_digest(session.tree) == digest
    assert store.sessions() == ("s",)
    assert 100 < taken < 10_000, "some mutations are other drafts, and right"


def test_a_small_lie_takes_no_room(samples: tuple[Session, list[bytes]]) -> None:
    """Arrays that say they hold four billion entries, one in the other."""
    session, (data, *_) = samples
    _, own, *_ = records_of(data)
    for depth in (1, 5, 500, 100_000):
        refuses(CorruptTree, session, session.adopt, resealed([b"\xdd\xff\xff\xff\xff" * depth, own]))


# --- progress -------------------------------------------------------------------------------------------------------------


def test_progress_is_within_the_path() -> None:
    session = new_session()
    draft = session.draft(base(session))
    assert draft.num_computed_tokens == 0
    draft.num_computed_tokens = draft.stop
    draft.extend([1, 2, 3])
    draft.num_computed_tokens = np.int64(draft.stop)  # type: ignore[assignment]
    assert type(draft.num_computed_tokens) is int
    for wrong in (-1, draft.stop + 1, 2**70):
        with pytest.raises(OutOfRange):
            draft.num_computed_tokens = wrong
    for no_count in (1.0, True, None, draft.next_position):
        with pytest.raises(TypeError):
            draft.num_computed_tokens = no_count  # type: ignore[assignment]
    assert draft.num_computed_tokens == draft.stop
    draft.rollback(2)
    assert draft.num_computed_tokens == draft.start + 2 == draft.stop, "what was rolled back has no KV that counts"
    draft.num_computed_tokens = 4
    draft.rollback(1)
    assert draft.num_computed_tokens == 4
    draft.preempt()
    assert (draft.num_computed_tokens, draft.token_ids.tolist()) == (0, [1])
    draft.abort()
    with pytest.raises(DraftClosed):
        draft.num_computed_tokens = 1
    with pytest.raises(DraftClosed):
        draft.preempt()
    assert draft.num_computed_tokens == 0


def test_a_draft_of_ones_own_has_no_key_that_was_brought() -> None:
    source = SessionStore.in_memory().create("s", scheme="text@hf5")
    brought = SessionStore.in_memory().adopt(source.draft(source.root).hand_over(with_path=True))
    here = brought.parent
    session = brought._host
    assert isinstance(session, Session)
    own = session.draft(session.node(here.id))
    for draft in (brought, own):
        draft.extend([1, 2])
    assert brought.key != own.key and brought.commit() != own.commit()
