"""Drafts: a generation in flight, from its first token to its node or to nothing."""

from __future__ import annotations

import copy
import enum
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import (
    Draft,
    DraftClosed,
    FinishRefused,
    KeyTaken,
    LimitExceeded,
    MediaItem,
    MediaSpanError,
    Node,
    OutOfRange,
    Position,
    PositionError,
    PositionLimitExceeded,
    Session,
    SessionStore,
    StaleSession,
    UnknownNode,
    extend_drafts,
)
from tests.test_tree import VIDEO_PAD, node_print, refused, tree_print, video, vl


def text_session(name: str = "s", **options: Any) -> Session:
    return SessionStore.in_memory().create(name, scheme="text@hf5", **options)


def with_video(rule: str = "hf5") -> tuple[Session, Node]:
    """A prompt after which decoded and replayed positions differ, under hf5."""
    session = SessionStore.in_memory().create("s", scheme=vl(rule, tokens_per_second=7))
    return session, session.append(session.root, [1, *[VIDEO_PAD] * 6, 2], media=[video("v", 1)])


def draft_print(draft: Draft) -> tuple[Any, ...]:
    return (
        draft.closed,
        len(draft),
        draft.start,
        draft.stop,
        draft.token_ids.tobytes(),
        draft.input_ids().tobytes(),
        draft.positions().tobytes(),
        draft.state,
        draft.key,
        draft.role,
        draft.next_position,
        draft.room,
    )


def unmoved(draft: Draft, error: type[Exception], call: Callable[[], object], session: Session | None = None) -> Any:
    """``call`` raises exactly ``error`` and leaves draft and session as they were."""
    before = draft_print(draft), None if session is None else tree_print(session)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert (draft_print(draft), None if session is None else tree_print(session)) == before
    return caught.value


# --- tokens -------------------------------------------------------------------------------------------------------------


def test_a_draft_takes_tokens_and_becomes_its_node() -> None:
    session = text_session()
    prompt = session.append(session.root, [1, 2])
    before = tree_print(session)
    draft = session.draft(prompt.id, metadata={"a": [1]})
    assert (draft.parent, draft.role, draft.closed, len(draft), draft.media) == (prompt, "assistant", False, 0, ())
    assert (draft.start, draft.stop, bool(draft), draft.origin) == (2, 2, True, "generated")
    draft.append(3)
    draft.extend([4, 5])
    draft.extend(np.array([6]))
    draft.extend([])
    extend_drafts([draft], [7])
    assert draft.token_ids.tolist() == [3, 4, 5, 6, 7]
    assert draft.token_ids.dtype == np.int32
    assert tree_print(session) == before, "nothing is in the tree before the commit"
    node = draft.commit("length")
    assert (node.parent, node.token_ids.tolist(), node.origin, node.role) == (prompt, [3, 4, 5, 6, 7], "generated", "assistant")
    assert (node.finish_reason, node.tail_policy, node.key) == ("length", "keep", draft.key)
    assert node.metadata == {"a": (1,)}
    assert draft.closed
    assert session.children(prompt) == (node,)
    assert (node.depth, node.media, node.links) == (2, (), ())


@pytest.mark.parametrize("rule", ["hf5", "sglang", "vllm"])
def test_a_draft_reads_like_the_node_it_becomes(rule: str) -> None:
    session, prompt = with_video(rule)
    for length in range(4):
        draft = session.draft(prompt)
        draft.extend(range(20, 20 + length))
        node = draft.commit()
        other = session.draft(prompt)
        other.extend(range(20, 20 + length))
        assert (other.start, other.stop, len(other)) == (node.start, node.stop, len(node))
        assert (other.next_position, other.mrope_position_delta) == (node.next_position, node.mrope_position_delta)
        assert isinstance(other.next_position, Position)
        assert other.path() == node.path()[:-1]
        for mode in ("as_decoded", "as_replayed"):
            assert other.position_state(mode) == node.position_state(mode)
            for start in range(node.stop + 1):
                for stop in range(start, node.stop + 1):
                    read, written = other.positions(start, stop, mode), node.positions(start, stop, mode)
                    assert read.shape == (3, stop - start)
                    assert (read.dtype, read.tolist()) == (written.dtype, written.tolist())
                    assert other.input_ids(start, stop).tolist() == node.input_ids(start, stop).tolist()
                    assert other.input_ids(start, stop).dtype == np.int32
                    assert other.media_spans(start, stop) == node.media_spans(start, stop)


def test_tokens_are_decoded_at_index_plus_delta() -> None:
    session, prompt = with_video("hf5")
    draft = session.draft(prompt)
    draft.extend([3, 4])
    delta = prompt.mrope_position_delta
    assert draft.positions(prompt.stop).tolist() == [[prompt.stop + delta, prompt.stop + 1 + delta]] * 3
    replayed = draft.positions(prompt.stop, mode="as_replayed")
    assert replayed[0, 0] == prompt.next_position
    assert replayed.tolist() != draft.positions(prompt.stop).tolist(), "the sample tells the modes apart"
    node = draft.commit()
    follower = session.append(node, [5])
    assert follower.positions(node.stop)[0, 0] == node.positions()[0, -1] + 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, None)])
def test_windows_outside_a_draft(start: int, stop: int | None) -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1, 2, 3]))
    draft.extend([4, 5])
    for read in (draft.input_ids, draft.positions, draft.media_spans):
        unmoved(draft, OutOfRange, lambda read=read: read(start, stop))  # type: ignore[misc]
    mode: Any = "guessed"
    unmoved(draft, PositionError, lambda: draft.positions(mode=mode))
    unmoved(draft, PositionError, lambda: draft.position_state(mode))
    for read in (draft.input_ids, draft.positions, draft.media_spans):
        unmoved(draft, TypeError, lambda read=read: read(0, Position(2)))  # type: ignore[misc]


@pytest.mark.parametrize("token", [-1, 2**31, 2**70, -(2**70)])
def test_ids_out_of_range_are_not_taken(token: int) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend([1, 2])
    error = unmoved(draft, OutOfRange, lambda: draft.append(token))
    assert error.value == token
    error = unmoved(draft, OutOfRange, lambda: draft.extend([5, token, 6]))
    assert (error.index, error.value) == (1, token)
    other = session.draft(session.root)
    unmoved(draft, OutOfRange, lambda: extend_drafts([draft, other], [5, token]), session)
    assert (draft.token_ids.tolist(), len(other)) == ([1, 2], 0)


# --- batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token_ids",
    [
        [7, 8, 9],
        (7, 8, 9),
        np.array([7, 8, 9]),
        torch.tensor([7, 8, 9]),
        torch.tensor([7, 8, 9], dtype=torch.int32),
        [[7], [8], [9]],
        [np.array([7]), (8,), torch.tensor([9])],
        [np.int64(7), np.int32(8), np.uint8(9)],
        list(torch.tensor([7, 8, 9])),
        list(np.array([7, 8, 9])),
        [np.array(7), 8, torch.tensor(9)],
        range(7, 10),
        b"\x07\x08\x09",
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_takes_a_token_each(token_ids: Any) -> None:
    session = text_session()
    drafts = [session.draft(session.root) for _ in range(3)]
    extend_drafts(drafts, token_ids)
    assert [draft.token_ids.tolist() for draft in drafts] == [[7], [8], [9]]


def test_a_batch_takes_runs_of_any_length() -> None:
    session = text_session()
    drafts = [session.draft(session.root) for _ in range(4)]
    runs: Any = [[1, 2], [], np.array([3]), range(4, 9)]
    extend_drafts(drafts, runs)
    assert [draft.token_ids.tolist() for draft in drafts] == [[1, 2], [], [3], [4, 5, 6, 7, 8]]
    extend_drafts([], [])
    extend_drafts(tuple(drafts), [1, 1, 1, 1])
    assert [len(draft) for draft in drafts] == [3, 1, 2, 6]


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2],
        [1, 2, 3, 4],
        [],
        [[1], [2]],
        1,
        None,
        {1, 2, 3},
        np.zeros((3, 1), int),
        "123",
        [1.0, 2, 3],
        [[1], 2, 3],
        [[1], [2], ["3"]],
    ],
)
def test_batches_that_do_not_fit_are_type_errors(token_ids: Any) -> None:
    session = text_session()
    drafts = [session.draft(session.root) for _ in range(3)]
    with pytest.raises(TypeError):
        extend_drafts(drafts, token_ids)
    assert [len(draft) for draft in drafts] == [0, 0, 0]


def test_a_batch_is_taken_whole_or_not_at_all() -> None:
    session = text_session(max_tokens=4)
    prompt = session.append(session.root, [1, 2])
    drafts = [session.draft(prompt) for _ in range(3)]
    drafts[1].append(5)

    def refuse(error: type[Exception], batch: list[Any], token_ids: Any) -> None:
        before = [draft_print(draft) for draft in drafts]
        with pytest.raises(error) as caught:
            extend_drafts(batch, token_ids)
        assert type(caught.value) is error
        assert [draft_print(draft) for draft in drafts] == before

    refuse(LimitExceeded, drafts, [[1], [1, 2], [1]])
    refuse(LimitExceeded, drafts, [[1, 2], [1], [1, 2, 3]])
    refuse(OutOfRange, drafts, [1, 2, -3])
    refuse(OutOfRange, drafts, [[1], [2], [2**31]])
    refuse(TypeError, [drafts[0], drafts[1], drafts[0]], [1, 2, 3])
    refuse(TypeError, [*drafts[:2], None], [1, 2, 3])
    refuse(TypeError, [*drafts[:2], session.root], [[1], [2], [3]])
    extend_drafts(drafts, [7, 7, 7])  # now the second is full
    refuse(LimitExceeded, drafts, [7, 7, 7])
    drafts[2].abort()
    drafts[1].rollback(0)
    refuse(DraftClosed, drafts, [7, 7, 7])
    refuse(DraftClosed, drafts, [[7], [7], []])
    extend_drafts(drafts[:2], [8, 8])
    assert [draft.token_ids.tolist() for draft in drafts] == [[7, 8], [8], [7]]


# --- rollback and state -------------------------------------------------------------------------------------------------


def test_rollback_keeps_the_first_tokens() -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend(range(10))
    draft.rollback(7)
    assert draft.token_ids.tolist() == list(range(7))
    draft.rollback(7)
    draft.append(99)
    eight: Any = np.int64(8)
    draft.rollback(eight)
    assert draft.token_ids.tolist() == [*range(7), 99]
    draft.rollback(0)
    assert len(draft) == 0
    for length in (-1, 1, 2**70):
        error = unmoved(draft, OutOfRange, lambda length=length: draft.rollback(length))  # type: ignore[misc]
        assert (error.value, error.limit) == (length, 0)
    for wrong in (1.0, "0", None, True, Position(0)):
        unmoved(draft, TypeError, lambda wrong=wrong: draft.rollback(wrong))  # type: ignore[misc]


def test_a_read_before_a_rollback_stays_what_it_was() -> None:
    session = text_session()
    draft = session.draft(session.append(session.root, [1]))
    draft.extend(range(10))
    ids, whole, positions = draft.token_ids, draft.input_ids(), draft.positions()
    draft.rollback(3)
    draft.extend([9] * 50)
    assert ids.tolist() == list(range(10))
    assert whole.tolist() == [1, *range(10)]
    assert positions.tolist() == [list(range(11))]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_state_rolls_back_with_its_tokens(data: st.DataObject) -> None:
    """Against a list of all that was ever set and is still covered."""
    session = text_session()
    draft = session.draft(session.root)
    tokens: list[int] = []
    states: list[tuple[int, bytes]] = []
    for step in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["extend", "set", "rollback"]))
        if what == "extend":
            new = [step] * data.draw(st.integers(0, 3))
            draft.extend(new)
            tokens += new
        elif what == "set":
            state = data.draw(st.sampled_from([b"", b"a", b"b"]))
            draft.set_state(data.draw(st.sampled_from([bytes, bytearray, memoryview]))(state))
            states.append((len(tokens), state))
        else:
            length = data.draw(st.integers(0, len(tokens)))
            draft.rollback(length)
            del tokens[length:]
            states = [(at, state) for at, state in states if at <= length]
        assert draft.state == (states[-1][1] if states else None)
        assert draft.token_ids.tolist() == tokens


def test_states_that_are_refused() -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.set_state(b"kept")
    wrongs: list[Any] = ["text", 1, None, [1]]
    for wrong in wrongs:
        unmoved(draft, TypeError, partial(draft.set_state, wrong))
    error = unmoved(draft, LimitExceeded, lambda: draft.set_state(bytes(2**20 + 1)))
    assert (error.value, error.limit) == (2**20 + 1, 2**20)
    draft.set_state(bytes(2**20))
    draft.abort()
    unmoved(draft, DraftClosed, lambda: draft.set_state(b"x"))


# --- the end ------------------------------------------------------------------------------------------------------------


class Reason(enum.Enum):
    """As engines spell it."""

    ABORT = "abort"


class NewReason(enum.StrEnum):
    ABORT = "abort"


class TextReason(str, enum.Enum):  # noqa: UP042  (StrEnum formats differently; engines still use this)
    ABORT = "abort"
    STOP = "stop"
    ERROR = "error"


@pytest.mark.parametrize(
    "reason",
    [
        "abort",
        "error",
        "Abort",
        "ABORT",
        "Error",
        " abort",
        "error\n",
        "\tABORT ",
        "",
        TextReason.ABORT,
        TextReason.ERROR,
        NewReason.ABORT,
    ],
)
def test_what_ended_badly_is_never_a_node(reason: Any) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend([1, 2])
    error = unmoved(draft, FinishRefused, lambda: draft.commit(reason), session)
    assert error.finish_reason == reason
    assert draft.commit("stop").token_ids.tolist() == [1, 2], "it stays open"


@pytest.mark.parametrize("reason", ["stop", "length", "interrupted", "tool_calls", "aborted by nobody", "конец"])
def test_other_reasons_are_kept_as_given(reason: str) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.append(1)
    assert draft.commit(reason).finish_reason == reason


def test_a_reason_from_an_enum_is_kept_as_its_text() -> None:
    session = text_session()
    draft = session.draft(session.root, role=TextReason.STOP)
    draft.append(1)
    node = draft.commit(TextReason.STOP)
    assert (node.finish_reason, node.role) == ("stop", "stop")
    assert (type(node.finish_reason), type(node.role)) == (str, str)


@pytest.mark.parametrize("reason", [None, 1, b"stop", Reason.ABORT, "\ud800", ["stop"]])
def test_a_reason_is_text(reason: Any) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.append(1)
    unmoved(draft, TypeError, lambda: draft.commit(reason), session)


@pytest.mark.parametrize("policy", ["drop", "", "KEEP"])
def test_tail_policies_that_do_not_exist(policy: Any) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.append(1)
    unmoved(draft, FinishRefused, lambda: draft.commit(tail_policy=policy), session)


@pytest.mark.parametrize("policy", [None, 1, np.array(["keep"])], ids=str)
def test_a_tail_policy_is_text(policy: Any) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.append(1)
    unmoved(draft, TypeError, lambda: draft.commit(tail_policy=policy), session)


@pytest.mark.parametrize("length", [0, 1, 3, 5, None])
def test_commit_makes_what_the_client_saw(length: int | None) -> None:
    for policy, less in (("keep", 0), ("drop_last", 1)):
        session = text_session()
        prompt = session.append(session.root, [9])
        draft = session.draft(prompt)
        draft.extend([1, 2, 3, 4, 5])
        tail: Any = policy
        node = draft.commit("stop", length, tail)
        kept = max(0, (5 if length is None else length) - less)
        assert node.token_ids.tolist() == [1, 2, 3, 4, 5][:kept]
        assert node.tail_policy == policy
        assert node.positions().tolist() == [list(range(kept + 1))]
        assert draft.token_ids.tolist() == [1, 2, 3, 4, 5], "what was generated can still be read"


def test_lengths_that_are_refused_at_commit() -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend([1, 2])
    for length in (-1, 3, 2**70):
        error = unmoved(draft, OutOfRange, partial(draft.commit, "stop", length), session)
        assert (error.value, error.limit) == (length, 2)
    wrongs: list[Any] = [1.0, "1", True, Position(1)]
    for wrong in wrongs:
        unmoved(draft, TypeError, partial(draft.commit, "stop", wrong), session)
    one: Any = np.int64(1)
    assert draft.commit("stop", one).token_ids.tolist() == [1]


def test_an_empty_turn_under_the_root_is_refused_and_elsewhere_a_node() -> None:
    session = text_session()
    draft = session.draft(session.root)
    unmoved(draft, OutOfRange, draft.commit, session)
    draft.append(1)
    unmoved(draft, OutOfRange, lambda: draft.commit("stop", 0), session)
    node = draft.commit()
    empty = session.draft(node).commit("interrupted")
    assert (len(empty), empty.depth, empty.start, empty.stop) == (0, 2, 1, 1)
    assert empty.next_position == node.next_position
    assert session.append(empty, [5]).input_ids().tolist() == [1, 5]


CLOSED: dict[str, Callable[[Draft], object]] = {
    "append": lambda draft: draft.append(1),
    "extend": lambda draft: draft.extend([1]),
    "extend by nothing": lambda draft: draft.extend([]),
    "extend_drafts": lambda draft: extend_drafts([draft], [1]),
    "rollback": lambda draft: draft.rollback(0),
    "set_state": lambda draft: draft.set_state(b""),
    "commit": lambda draft: draft.commit(),
}


@pytest.mark.parametrize("how", ["commit", "abort", "with"])
@pytest.mark.parametrize("what", CLOSED)
def test_a_closed_draft_takes_nothing_and_reads_on(what: str, how: str) -> None:
    session = text_session()
    draft = session.draft(session.root)
    draft.extend([1, 2])
    draft.set_state(b"s")
    if how == "commit":
        draft.commit()
    elif how == "abort":
        draft.abort()
    else:
        with draft:
            pass
    assert draft.closed
    unmoved(draft, DraftClosed, lambda: CLOSED[what](draft), session)
    assert draft.input_ids().tolist() == [1, 2]
    assert draft.state == b"s"
    assert how in repr(draft) or how == "with"


def test_abort_leaves_no_trace() -> None:
    session = text_session()
    prompt = session.append(session.root, range(512))
    session.set_head("main", prompt)
    before = tree_print(session)
    draft = session.draft(prompt)
    draft.extend(range(1000))
    draft.set_state(b"x")
    draft.abort()
    draft.abort()
    assert tree_print(session) == before
    committed = session.draft(prompt, key="k")
    committed.append(1)
    committed.commit()
    with pytest.raises(DraftClosed):
        committed.abort()
    assert len(session.tree) == before[0] + 1


def test_a_draft_as_a_context_manager() -> None:
    session = text_session()
    with session.draft(session.root) as draft:
        draft.append(1)
        assert not draft.closed
    assert draft.closed
    assert len(session.tree) == 1
    with session.draft(session.root) as draft:
        draft.append(1)
        node = draft.commit()
    assert session.children(session.root) == (node,)
    with pytest.raises(ZeroDivisionError), session.draft(session.root) as draft:
        draft.append(2)
        raise ZeroDivisionError
    assert draft.closed
    assert len(session.tree) == 2
    with session.draft(session.root) as draft:
        draft.abort()
    assert len(session.tree) == 2


def test_a_dropped_draft_is_gone() -> None:
    session = text_session()
    before = tree_print(session)
    draft = session.draft(session.root)
    draft.extend([1, 2, 3])
    weak = weakref.ref(draft)
    del draft
    gc.collect()
    assert weak() is None
    assert tree_print(session) == before


def test_a_draft_is_not_copied_or_pickled() -> None:
    draft = text_session().draft(text_session().root)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            call(draft)


# --- keys ---------------------------------------------------------------------------------------------------------------


def reply(session: Session, parent: Node, tokens: list[int], key: str | None = None, reason: str = "stop") -> Node:
    draft = session.draft(parent, key=key)
    draft.extend(tokens)
    return draft.commit(reason)


def test_equal_samples_stay_apart() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    samples = [reply(session, prompt, [5, 5]) for _ in range(100)]
    assert len({node.id for node in samples}) == 100
    assert len({node.key for node in samples}) == 100
    assert session.children(prompt) == tuple(samples)


def test_own_keys_are_the_same_on_every_rank() -> None:
    def rank() -> list[bytes]:
        session = text_session("the session")
        prompt = session.append(session.root, [1])
        aborted = session.draft(prompt)
        nodes = [reply(session, prompt, [2]), reply(session, prompt, [2])]
        aborted.abort()
        nodes += [reply(session, nodes[0], [3]), reply(session, prompt, [2])]
        return [node.id for node in nodes]

    assert rank() == rank()
    assert len(set(rank())) == 4


def test_own_keys_differ_between_sessions_and_incarnations() -> None:
    store = SessionStore.in_memory()
    keys = []
    for name in ("a", "b", "a", "a"):
        session = store.create(name, scheme="text@hf5")
        keys += [session.draft(session.root).key, session.draft(session.root).key]
        session.close()
    first = store.create("base", scheme="text@hf5")
    fork = store.fork(first, first.root, "fork")
    keys += [first.draft(first.root).key, fork.draft(fork.root).key]
    assert len(set(keys)) == len(keys)


def test_a_refused_draft_uses_up_no_key() -> None:
    def run(fail: bool) -> bytes:
        session = SessionStore.in_memory().create("s", scheme=vl())
        part = MediaItem("image", bytes(32), [(0, 1)], (1, 4, 4), unfinished=True)
        inside = session.append(session.root, [50], media=[part])
        if fail:
            role: Any = 1
            with pytest.raises(MediaSpanError):
                session.draft(inside)
            with pytest.raises(TypeError):
                session.draft(session.root, role=role)
            with pytest.raises(TypeError):
                session.draft(session.root, metadata=role)
            with pytest.raises(UnknownNode):
                session.draft(bytes(32))
        return reply(session, session.root, [1]).id

    assert run(False) == run(True)


def test_a_repeated_commit_of_one_request_is_one_node() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    node = reply(session, prompt, [2, 3], key="request 7")
    assert node.key == "request 7"
    assert reply(session, prompt, [2, 3], key="request 7", reason="length") is node
    assert node.finish_reason == "stop"
    other = session.draft(prompt, key="request 7")
    other.extend([2, 4])
    error = unmoved(other, KeyTaken, other.commit, session)
    assert (error.key, error.node) == ("request 7", node)
    unmoved(other, KeyTaken, lambda: other.commit("stop", 1), session)
    other.rollback(1)
    other.append(3)
    assert other.commit() is node
    with pytest.raises(KeyTaken):
        session.append(prompt, [2, 3], key="request 7")
    assert reply(session, node, [2, 4], key="request 7").parent is node


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"role": 1}, TypeError),
        ({"role": None}, TypeError),
        ({"role": "\ud800"}, TypeError),
        ({"key": 1}, TypeError),
        ({"key": "\ud800"}, TypeError),
        ({"metadata": [1]}, TypeError),
        ({"metadata": []}, TypeError),
        ({"metadata": {"a": object()}}, TypeError),
    ],
)
def test_drafts_that_cannot_be_made(arguments: dict[str, Any], error: type[Exception]) -> None:
    session = text_session()
    refused(session, error, lambda: session.draft(session.root, **arguments))
    refused(session, UnknownNode, lambda: session.draft(bytes(32)))
    wrong: Any = "root"
    refused(session, TypeError, lambda: session.draft(wrong))


def test_nothing_is_generated_inside_an_item() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl())
    part = MediaItem("image", bytes(32), [(1, 3)], (1, 4, 4), unfinished=True)
    inside = session.append(session.root, [1, 50, 50, 50], media=[part])
    error = refused(session, MediaSpanError, lambda: session.draft(inside))
    assert (error.item, error.span) == (part, (1, 4))


# --- limits -------------------------------------------------------------------------------------------------------------


def test_drafts_may_use_what_is_kept_for_output() -> None:
    session = text_session(max_tokens=10, reserve_output=4)
    prompt = session.append(session.root, range(6))
    draft = session.draft(prompt)
    assert draft.room == 4
    draft.extend([1, 2, 3])
    error = unmoved(draft, LimitExceeded, lambda: draft.extend([4, 5]))
    assert (error.value, error.limit) == (11, 10)
    draft.append(4)
    assert draft.room == 0
    error = unmoved(draft, LimitExceeded, lambda: draft.append(5))
    assert (error.value, error.limit) == (11, 10)
    unmoved(draft, LimitExceeded, lambda: extend_drafts([draft], [5]))
    draft.extend([])
    assert draft.commit().stop == 10
    refused(session, LimitExceeded, lambda: session.append(session.leaves()[0], [1]))
    full = session.draft(session.leaves()[0])
    assert full.room == 0
    unmoved(full, LimitExceeded, lambda: full.append(1))
    assert full.commit().stop == 10


def test_drafts_stop_at_the_position_limit() -> None:
    session = SessionStore.in_memory().create("s", scheme=vl("sglang", max_position_limit=12, tokens_per_second=2))
    prompt = session.append(session.root, [1, *[VIDEO_PAD] * 6, 2], media=[video("v", 1)])
    draft = session.draft(prompt)
    first = prompt.stop + prompt.mrope_position_delta
    assert draft.room == 12 - first > 0
    error = unmoved(draft, PositionLimitExceeded, lambda: draft.extend([1] * (draft.room + 1)))
    assert (error.value, error.limit) == (12, 12)
    assert isinstance(error, LimitExceeded)
    draft.extend([1] * draft.room)
    error = unmoved(draft, PositionLimitExceeded, lambda: draft.append(1))
    assert (error.value, error.limit) == (12, 12)
    node = draft.commit()
    assert node.positions().max() == 11
    refused(session, PositionLimitExceeded, lambda: session.append(node, [1]))


# --- lifecycle ----------------------------------------------------------------------------------------------------------


def test_a_draft_of_a_closed_session_cannot_commit() -> None:
    store = SessionStore.in_memory()
    session = store.create("s", scheme="text@hf5")
    prompt = session.append(session.root, [1])
    draft = session.draft(prompt)
    draft.extend([2, 3])
    session.close()
    again = store.create("s", scheme="text@hf5")
    same_prompt = again.append(again.root, [1])
    assert same_prompt == prompt
    error = unmoved(draft, StaleSession, draft.commit, again)
    assert (error.session_id, error.incarnation) == ("s", 1)
    assert draft.input_ids().tolist() == [1, 2, 3]
    draft.abort()
    assert len(again.tree) == 2
    with pytest.raises(StaleSession):
        session.draft(prompt)


def test_the_tree_moves_on_under_a_draft() -> None:
    session = text_session()
    prompt = session.append(session.root, [1])
    draft = session.draft(prompt)
    draft.append(2)
    session.append(prompt, [7])
    other = session.draft(prompt)
    other.append(3)
    after = other.commit()
    node = draft.commit()
    assert [child.token_ids.tolist() for child in session.children(prompt)] == [[7], [3], [2]]
    assert node.input_ids().tolist() == [1, 2]
    before = node_print(after)
    session.append(after, [4])
    assert node_print(after) == before
