"""The life of requests: in chunks, preempted, aborted, retried, sampled, edited, rewound, timed out, handed over.

Each scenario runs in memory and on disk, beside the list of tokens that its client or engine would keep. What it made is looked at
again at the end, on disk after reopening. At the end of the module any of it happens in any order, with drafts on their way between
two stores.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_bridge import InputStager, request_inputs
from sessiontree import (
    Draft,
    DraftClosed,
    Edit,
    FinishRefused,
    HeadMoved,
    KeyTaken,
    MediaSpanError,
    NeedsMedia,
    Node,
    OutOfRange,
    Session,
    SessionStore,
    SessionTreeError,
    StaleSession,
    UnknownNode,
    UnknownSession,
    extend_drafts,
)
from sessiontree.testing.together import in_threads
from tests.toy import (
    A_IDS,
    a_turn,
    check,
    fingerprint,
    grow,
    refuses,
    reply,
    shown,
    toy_scheme,
    tree_digest,
    turn,
    video,
)

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
TailPolicy = Literal["keep", "drop_last"]


class Requests:
    """A session in a store, and the tokens of every path as a client keeps them: what was made is looked at again at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.store = SessionStore.in_memory() if path is None else SessionStore.open(path)
        self.session = self.store.create("s", scheme=toy_scheme())
        self.root = self.session.root
        self.log: dict[bytes, list[int]] = {}
        self.prints: dict[bytes, str] = {}

    def kept(self, node: Node, tokens: Sequence[int]) -> Node:
        """A node whose whole path is to be these tokens, from now on."""
        assert node.input_ids().tolist() == list(tokens)
        self.log[node.id], self.prints[node.id] = list(tokens), fingerprint(node)
        return node

    def turn(self, parent: Node, tokens: Sequence[int], **options: Any) -> Node:
        return self.kept(self.session.append(parent, tokens, **options), [*self.log.get(parent.id, []), *tokens])

    def answer(self, parent: Node, tokens: Sequence[int], finish_reason: str = "stop", **options: Any) -> Node:
        draft = self.session.draft(parent, **options)
        draft.extend(tokens)
        return self.kept(draft.commit(finish_reason), [*self.log[parent.id], *tokens])

    def check(self) -> None:
        """Everything is what it was when it was made."""
        if self.path is not None:
            count = len(self.session.tree)
            self.store.close()
            self.store = SessionStore.open(self.path)
            self.session = self.store.get("s")
            assert len(self.session.tree) == count
        for node_id, tokens in self.log.items():
            node = self.session.node(node_id)
            assert node.input_ids().tolist() == tokens
            assert fingerprint(node) == self.prints[node_id]


@pytest.fixture(params=["memory", "disk"])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Requests]:
    found = Requests(tmp_path / "store" if request.param == "disk" else None)
    yield found
    found.check()
    found.store.close()


# --- prefill in chunks, and again -----------------------------------------------------------------------------------------


def chunks(stager: InputStager, draft: Draft, most: int) -> list[tuple[int, int]]:
    """Prefill a draft's path in chunks; what they say is what the path says."""
    done = []
    while draft.num_computed_tokens < draft.stop:
        start = draft.num_computed_tokens
        stop = min(draft.stop, start + most)
        batch = stager.extend([draft], start, stop)
        assert batch.input_ids.tolist() == draft.input_ids(start, stop).tolist()
        assert batch.positions.tolist() == draft.positions(start, stop).tolist()
        assert (batch.prefix_lens.tolist(), batch.seq_lens.tolist()) == ([start], [stop])
        draft.num_computed_tokens = stop
        done.append((start, stop))
    return done


def test_a_prompt_is_prefilled_in_chunks(life: Requests) -> None:
    prompt = life.kept(grow(life.session, life.root, a_turn()), A_IDS)
    prompt = life.turn(prompt, range(10, 30))
    draft, stager = life.session.draft(prompt), InputStager(max_tokens=64, max_requests=4, device="cpu")
    draft.num_computed_tokens = 5  # a prefix cache had them, to the middle of the image
    assert chunks(stager, draft, 8) == [(5, 13), (13, 21), (21, 29)]
    for token in range(3):
        draft.append(40 + token)  # sampled, and not fed yet: no KV holds it
        assert draft.num_computed_tokens == draft.stop - 1
        assert chunks(stager, draft, 8) == [(draft.stop - 1, draft.stop)]
    node = life.kept(draft.commit(), [*A_IDS, *range(10, 30), 40, 41, 42])
    check(node, [a_turn(), turn(*range(10, 30)), reply(40, 41, 42)])


def test_a_preempted_request_goes_on_where_it_was(life: Requests) -> None:
    prompt = life.turn(life.kept(grow(life.session, life.root, a_turn()), A_IDS), [4, 5])
    draft, stager = life.session.draft(prompt), InputStager(max_tokens=64, max_requests=4, device="cpu")
    before = draft.positions().tolist()
    for _ in range(3):  # retracted again and again: SGLang's table grows at every attempt (C08)
        chunks(stager, draft, 100)
        draft.extend([20, 21])
        draft.preempt()
        assert draft.num_computed_tokens == 0
        assert draft.positions(0, draft.start).tolist() == before
    chunks(stager, draft, 4)
    assert draft.num_computed_tokens == draft.stop
    node = life.kept(draft.commit(), [*A_IDS, 4, 5, *[20, 21] * 3])
    check(node, [a_turn(), turn(4, 5), reply(*[20, 21] * 3)])


def test_c75_a_retracted_request_names_what_is_to_be_encoded_again(life: Requests, tmp_path: Path) -> None:
    """Also where it was handed over to a process that never had the pixels."""
    prompt = grow(life.session, life.root, a_turn(), turn(4, *shown(video(2)), 5))
    draft = life.session.draft(prompt)
    draft.extend([20, 21])
    picture, clip = (node.media[0] for node in prompt.path()[1:])
    for item in (picture, clip):
        life.store.put_features(item, np.zeros(4, np.float32))
    assert request_inputs(draft, features=True).features is not None
    life.store.drop_features(picture)
    draft.preempt()
    away = SessionStore.in_memory()
    there = away.adopt(draft.hand_over(with_path=True))
    for cached, missing in ((0, (picture, clip)), (7, (clip,)), (6, (picture, clip)), (prompt.stop, ())):
        assert request_inputs(there, cached).needed_items == missing
        if missing:
            with pytest.raises(NeedsMedia) as caught:
                request_inputs(there, cached, features=True)
            assert caught.value.items == missing
    back = life.session.adopt(there.hand_over())
    with pytest.raises(NeedsMedia) as caught:
        request_inputs(back, features=True)
    assert caught.value.items == (picture,), "the clip is still here"
    back.abort()


def test_speculation_takes_computed_tokens_back(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2, 3])
    draft, tokens = life.session.draft(prompt), [1, 2, 3]
    rng = random.Random(3)
    draft.num_computed_tokens = draft.stop
    for _ in range(30):
        proposed = [rng.randrange(100) for _ in range(4)]
        draft.extend(proposed)
        draft.num_computed_tokens = draft.stop  # verified in one step
        accepted = rng.randrange(5)
        draft.rollback(len(draft) - 4 + accepted)
        tokens += proposed[:accepted]
        assert draft.input_ids().tolist() == tokens
        assert draft.num_computed_tokens == draft.stop == len(tokens)
    life.kept(draft.commit(), tokens)


# --- attempts that end badly, and the next one ----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["abort", "drop", "refused", "handed over and lost", "handed over and aborted", "timed out"])
def test_c37_c40_an_attempt_that_ends_badly_leaves_no_trace(life: Requests, ending: str) -> None:
    base = life.answer(life.turn(life.root, range(512)), range(48))
    prompt = life.turn(base, range(600, 664))
    digest = tree_digest(life.session.tree)
    draft: Draft | None = life.session.draft(prompt, key="request")
    assert draft is not None
    draft.extend(range(16))
    if ending == "abort":
        draft.abort()
    elif ending == "drop":
        draft = None
        gc.collect()
    elif ending == "refused":
        with pytest.raises(FinishRefused):
            draft.commit("error")
    elif ending == "handed over and lost":
        draft.hand_over(with_path=True)
    elif ending == "handed over and aborted":
        there = SessionStore.in_memory().adopt(draft.hand_over(with_path=True))
        there.append(1)
        there.abort()
    else:
        for now in (0.0, 10.0):
            life.session._time_out_drafts(now, 10.0)
        assert draft.how_closed == "timed out"
    assert tree_digest(life.session.tree) == digest
    second = life.turn(base, range(700, 764))
    assert second.stop == 624
    again = life.answer(prompt, range(16), key="request")  # the client asks again, by the same request id
    assert again.key == "request"


@pytest.mark.parametrize("reason", ["abort", "error", " Abort\n"])
def test_c38_an_adopted_draft_refuses_what_any_refuses(life: Requests, reason: str) -> None:
    draft = life.session.draft(life.turn(life.root, [1]))
    there = life.session.adopt(draft.hand_over())
    refuses(FinishRefused, life.session, there.commit, reason)
    assert not there.closed
    there.abort()


def test_c39_a_rejected_attempt_that_went_elsewhere_is_unknown(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2])
    there = SessionStore.in_memory().adopt(life.session.draft(prompt, key="r").hand_over(with_path=True))
    there.extend([7, 8])
    attempt = there.commit()  # over there; here nobody heard of it
    refuses(UnknownNode, life.session, life.session.append, attempt.id, [1])
    assert life.session.children(prompt) == ()
    assert life.answer(prompt, [7, 8], key="r").id == attempt.id, "the retry here is the very node"


def test_c40_a_thousand_attempts_dropped_on_their_way(life: Requests) -> None:
    prompt, rng = life.turn(life.root, [1, 2]), random.Random(40)
    away = SessionStore.in_memory()
    digest = tree_digest(life.session.tree)
    kept: list[Draft] = []
    for number in range(1000):
        draft = life.session.draft(prompt, key="request" if number % 3 else None)
        for _ in range(rng.randrange(6)):
            match rng.randrange(6):
                case 0:
                    draft.extend(range(rng.randrange(20)))
                case 1:
                    draft.set_state(b"state")
                case 2:
                    draft.num_computed_tokens = rng.randrange(draft.stop + 1)
                case 3:
                    draft.rollback(rng.randrange(len(draft) + 1))
                case _:
                    host: SessionStore | Session = rng.choice((away, life.session))
                    draft = host.adopt(draft.hand_over(with_path=host is away))
        if rng.random() < 0.05:
            kept.append(draft)
    del draft
    assert tree_digest(life.session.tree) == digest
    assert away.get("s").children(prompt.id) == ()
    assert len(life.session._drafts()) + len(away.get("s")._drafts()) == len(kept)
    for number in range(9):
        life.turn(prompt, [number])


def test_c43_the_same_request_id_twice(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2])
    first, second, third = (life.session.draft(prompt, key="rid") for _ in range(3))
    for draft, tokens in ((first, [3, 4]), (second, [3, 4]), (third, [3, 5])):
        draft.extend(tokens)
    node = life.kept(first.commit("length"), [1, 2, 3, 4])
    assert second.commit("stop") is node, "a commit that is repeated is the same node"
    assert node.finish_reason == "length"
    error = refuses(KeyTaken, life.session, third.commit)
    assert (error.key, error.node) == ("rid", node)
    assert not third.closed
    below = life.answer(node, [9], key="rid")
    assert below.key == "rid", "a key has the scope of its parent"


def test_c43_a_retry_after_reopening_is_the_same_node(tmp_path: Path) -> None:
    made = []
    for answer in ([3, 4], [3, 4], [5]):
        with SessionStore.open(tmp_path / "store") as store:
            session = store.get("s") if store.sessions() else store.create("s", scheme=toy_scheme())
            draft = session.draft(session.append(session.root, [1, 2]), key="rid")
            draft.extend(answer)
            if answer == [5]:
                refuses(KeyTaken, session, draft.commit)
            else:
                made.append(draft.commit().id)
            assert len(session.leaves()) == 1
    assert made[0] == made[1]


# --- samples, regenerate, edit, rewind ------------------------------------------------------------------------------------


def test_c59_several_samples_of_one_prompt(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2, 3])
    drafts = [life.session.draft(prompt) for _ in range(5)]
    logs: list[list[int]] = [[] for _ in drafts]
    for step in range(6):
        sampled = [step * number % 3 for number in range(5)]
        extend_drafts(drafts, sampled)
        for log, token in zip(logs, sampled, strict=True):
            log.append(token)
    drafts[3] = life.session.adopt(drafts[3].hand_over())  # one of them elsewhere for a while
    nodes = [life.kept(draft.commit(), [1, 2, 3, *log]) for draft, log in zip(drafts, logs, strict=True)]
    assert len({node.id for node in nodes}) == 5
    assert logs[0] == logs[3], "equal samples"
    assert nodes[0] != nodes[3], "stay apart"
    assert life.session.children(prompt) == tuple(nodes)
    assert life.session.heads == {}, "no commit moves a head"


def test_c42_regenerate_keeps_every_answer(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2])
    answers = [life.answer(prompt, [3])]
    head = life.session.set_head("main", answers[0])
    below = life.turn(answers[0], [4])
    for number in range(4):
        answers.append(life.answer(answers[-1].path()[-2], [3, number]))
        head = life.session.set_head("main", answers[-1], expected=head)
    assert life.session.children(prompt) == tuple(answers)
    assert life.session.children(answers[0]) == (below,)
    with pytest.raises(HeadMoved):
        life.session.set_head("main", answers[0], expected=answers[1])
    assert life.session.heads["main"] == answers[-1]


def test_c41_rewind_to_the_root_and_begin_anew(life: Requests) -> None:
    old = life.answer(life.turn(life.root, [1, 2]), [3])
    life.session.set_head("main", old)
    life.session.set_head("main", life.root, expected=old)
    draft = life.session.draft(life.session.heads["main"])  # a generation with no prompt at all
    draft.extend([5, 6])
    life.session.set_head("main", life.kept(draft.commit(), [5, 6]), expected=life.root)
    assert old in life.session.tree
    life.turn(old, [9])


def test_an_earlier_turn_is_edited(life: Requests) -> None:
    first = life.turn(life.root, [1, 2, 3])
    answer = life.answer(first, [4, 5])
    last = life.answer(life.turn(answer, [6, 7]), [8])
    # By replacing the turn: a new branch, and the conversation goes on there.
    life.session.set_head("main", last)
    edited = life.session.replace(first, [1, 9, 3], head="main", expected=last)
    life.kept(edited, [1, 9, 3])
    life.answer(edited, [4, 4])
    # By rewriting tokens in place, what stands behind kept: it is prefilled again, links say from what.
    rewritten = life.kept(life.session.rewrite(last, [Edit(1, 2, [9, 9])]), [1, 9, 9, 3, 4, 5, 6, 7, 8])
    assert [link.kind for link in rewritten.links] == ["derived_from"]
    # By cutting the history off inside a turn and going on.
    cut = life.kept(life.session.truncate(last, 4), [1, 2, 3, 4])
    life.turn(cut, [50])
    for node in (first, answer, last):
        assert life.session.node(node.id).input_ids().tolist() == life.log[node.id]


def test_rewind_by_any_depth(life: Requests) -> None:
    tip, tokens = life.root, list[int]()
    for number in range(6):
        tip = life.turn(tip, [number, number + 10]) if number % 2 == 0 else life.answer(tip, [number] * 3)
        tokens = life.log[tip.id]
    for depth in range(1, tip.depth + 1):  # to a turn
        back = tip.ancestor(depth)
        life.answer(back, [90 + depth])
    for length in range(1, len(tokens) + 1):  # to a token
        back = life.kept(life.session.truncate(tip, length), tokens[:length])
        life.turn(back, [80, length])
    for count in range(len(tokens)):
        life.kept(life.session.drop_last(tip, count), tokens[: len(tokens) - count])
    refuses(OutOfRange, life.session, life.session.truncate, tip, len(tokens) + 1)


def test_nothing_is_rewound_into_an_image(life: Requests) -> None:
    tip = life.kept(grow(life.session, life.root, a_turn()), A_IDS)
    for length in range(1, tip.stop):
        if 3 < length < 7:
            refuses(MediaSpanError, life.session, life.session.truncate, tip, length)
        else:
            life.turn(life.kept(life.session.truncate(tip, length), A_IDS[:length]), [60])


@pytest.mark.parametrize("tail_policy", ["keep", "drop_last"])
def test_a_streaming_session_with_rewind_and_branch(life: Requests, tail_policy: TailPolicy) -> None:
    """Input comes in chunks while replies are made: SGLang keeps a reply's last sampled token in history, vLLM drops it."""
    rng = random.Random(7)
    tip, tokens = life.root, list[int]()
    tips: list[tuple[Node, list[int]]] = []
    for step in range(25):
        chunk = [rng.randrange(100) for _ in range(rng.randint(1, 4))]
        tip, tokens = life.turn(tip, chunk), [*tokens, *chunk]
        draft, sampled = life.session.draft(tip), [rng.randrange(100) for _ in range(rng.randint(1, 5))]
        for token in sampled:
            draft.append(token)
        if step % 5 == 4:  # the user speaks over it: what was heard is history
            heard = rng.randrange(len(sampled) + 1)
            tip = draft.commit("interrupted", heard, tail_policy)
            sampled = sampled[:heard]
        else:
            tip = draft.commit("stop", tail_policy=tail_policy)
        tokens = [*tokens, *(sampled if tail_policy == "keep" else sampled[:-1])]
        tips.append((life.kept(tip, tokens), tokens))
        assert (tip.tail_policy, tip.finish_reason) == (tail_policy, "interrupted" if step % 5 == 4 else "stop")
        if step % 7 == 6:  # rewind, and go on from there; what was said since is still a branch
            tip, tokens = tips[rng.randrange(len(tips))]
    assert len(life.session.leaves()) > 2


def test_how_generations_ended_survives_reopening(life: Requests) -> None:
    prompt = life.turn(life.root, [1])
    expected: dict[bytes, tuple[Any, ...]] = {prompt.id: (None, None)}
    policies: tuple[TailPolicy, ...] = ("keep", "drop_last")
    for number, reason in enumerate(("stop", "length", "tool_calls", "interrupted", "a reason of the engine's own")):
        for policy in policies:
            draft = life.session.draft(prompt, key=f"{reason} {policy}")
            draft.extend([number, 7])
            node = draft.commit(reason, tail_policy=policy)
            life.kept(node, [1, number, *([7] if policy == "keep" else [])])
            expected[node.id] = reason, policy
    life.check()
    for node_id, facts in expected.items():
        node = life.session.node(node_id)
        assert (node.finish_reason, node.tail_policy) == facts


def test_an_operation_that_fails_on_the_way_changes_nothing(life: Requests) -> None:
    prompt = life.turn(life.root, [1, 2])
    draft = life.session.draft(prompt)
    draft.extend([3])
    draft.num_computed_tokens = 3
    digest = tree_digest(life.session.tree)
    for call in (
        lambda: draft.rollback(2),
        lambda: draft.extend([1, -1]),
        lambda: setattr(draft, "num_computed_tokens", 4),
        lambda: draft.commit(length=2),
        lambda: draft.commit("abort"),
        lambda: life.session.adopt(b"no draft"),
    ):
        with pytest.raises(SessionTreeError):
            call()
        assert (draft.token_ids.tolist(), draft.num_computed_tokens, draft.closed) == ([3], 3, False)
    assert tree_digest(life.session.tree) == digest
    life.kept(draft.commit(), [1, 2, 3])


# --- C45: time-outs -------------------------------------------------------------------------------------------------------


def timed(ttl: float = 10, **options: Any) -> tuple[SessionStore, Session, Node]:
    store = SessionStore.in_memory(draft_ttl=ttl, **options)
    session = store.create("s", scheme="text@hf5")
    store.tick(0)
    return store, session, session.append(session.root, [1, 2])


USES: dict[str, Callable[[Draft], object]] = {
    "append": lambda draft: draft.append(1),
    "extend": lambda draft: draft.extend([1, 2]),
    "a batch of tokens": lambda draft: extend_drafts([draft], [1]),
    "a batch of runs": lambda draft: extend_drafts([draft], [[1, 2]]),
    "rollback": lambda draft: draft.rollback(0),
    "set_state": lambda draft: draft.set_state(b"s"),
    "progress": lambda draft: setattr(draft, "num_computed_tokens", 1),
    "preempt": lambda draft: draft.preempt(),
}


@pytest.mark.parametrize("use", USES)
def test_c45_a_draft_times_out_when_nothing_was_done_to_it(use: str) -> None:
    store, session, prompt = timed()
    draft, idle = session.draft(prompt), session.draft(prompt)
    digest = tree_digest(session.tree)
    now = 0
    for _ in range(4):
        now += 19  # longer than the ttl: it was used since, nobody knows when
        USES[use](draft)
        assert store.tick(now) == (), "a draft that times out is no session that expires"
    assert (draft.closed, idle.how_closed) == (False, "timed out")
    last = now
    while not draft.closed:
        now += 1
        assert store.tick(now) == ()
    assert now == last + 10
    assert draft.how_closed == "timed out"
    assert tree_digest(session.tree) == digest
    with pytest.raises(DraftClosed, match="timed out"):
        draft.append(1)
    with pytest.raises(DraftClosed, match="timed out"):
        draft.commit()
    draft.abort()  # it is
    assert draft.how_closed == "timed out"
    assert session.children(prompt) == ()


def test_c45_reading_a_draft_and_refused_writes_are_no_use() -> None:
    store, session, prompt = timed()
    draft = session.draft(prompt)
    draft.append(1)
    store.tick(5)
    for now in (8, 11, 14):
        draft.positions()
        draft.input_ids()
        _ = draft.state, draft.num_computed_tokens, draft.room
        for refused in (partial(draft.append, -1), partial(draft.rollback, 5), partial(setattr, draft, "num_computed_tokens", 99)):
            with pytest.raises(OutOfRange):
                refused()
        with pytest.raises(FinishRefused):
            draft.commit("abort")
        store.tick(now)
    assert not draft.closed
    store.tick(15)
    assert draft.closed


def test_c45_a_batch_says_which_draft_timed_out() -> None:
    store, session, prompt = timed()
    idle = session.draft(prompt)
    store.tick(5)
    busy = session.draft(prompt)
    store.tick(15)
    with pytest.raises(DraftClosed) as caught:
        extend_drafts([busy, idle], [1, 2])
    assert repr(idle) in str(caught.value)
    assert len(busy) == 0, "all of a batch or none"
    running = [draft for draft in (busy, idle) if not draft.closed]
    extend_drafts(running, [1])
    assert busy.token_ids.tolist() == [1]


def test_c45_a_session_counts_from_its_last_draft_token() -> None:
    store, session, prompt = timed(ttl=50, idle_ttl=10)
    draft = session.draft(prompt)
    for now in range(5, 100, 5):  # a long decode, while nobody writes to the session
        draft.append(now)
        assert store.tick(now) == ()
    for now in range(100, 150, 5):  # its client is gone; the draft keeps the session until it times out
        assert draft.how_closed is None
        assert store.tick(now) == ()
    assert draft.how_closed == "timed out"
    assert [now for now in range(146, 170) if store.tick(now)] == [150], "idle since the last tick that saw the draft open"
    assert session.closed
    assert draft.token_ids.tolist() == list(range(5, 100, 5)), "readers go on"


def test_c45_drafts_of_every_session_time_out_and_no_others() -> None:
    store, session, prompt = timed()
    fork = store.fork(session, prompt, "fork")
    away = SessionStore.in_memory()
    drafts = [session.draft(prompt), fork.draft(prompt)]
    out = session.draft(prompt).hand_over(with_path=True)
    there = away.adopt(out)
    committed = session.draft(prompt)
    node = committed.commit()
    store.tick(1)
    adopted = session.adopt(out)
    assert [store.tick(now) for now in (6, 11)] == [(), ()]
    assert [draft.how_closed for draft in drafts] == ["timed out"] * 2
    assert (there.how_closed, adopted.how_closed, committed.how_closed) == (None, None, "committed")
    store.tick(16)
    assert adopted.how_closed == "timed out", "its time here counts from when it was adopted"
    assert node in session.tree
    again = session.adopt(out)
    again.append(4)
    assert again.commit().parent == prompt, "who has the bytes can go on"


def test_c45_without_a_ttl_no_draft_times_out(tmp_path: Path) -> None:
    for store in (SessionStore.in_memory(idle_ttl=5), SessionStore.open(tmp_path / "store")):
        with store:
            session = store.create("s", scheme="text@hf5")
            draft = session.draft(session.root)
            for now in (0, 100, 1e9):
                store.tick(now)
            assert not draft.closed


def test_c45_a_store_on_disk_has_the_same(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", draft_ttl=2.5) as store:
        session = store.create("s", scheme="text@hf5")
        draft = session.draft(session.root)
        store.tick(-7)
        store.tick(-5)
        assert not draft.closed
        store.tick(-4.5)
        assert draft.how_closed == "timed out"


@pytest.mark.parametrize(("ttl", "error"), [(0, OutOfRange), (-1, OutOfRange), (float("nan"), OutOfRange), ("5", TypeError)])
def test_c45_a_draft_ttl_that_is_no_time(ttl: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="draft_ttl"):
        SessionStore.in_memory(draft_ttl=ttl)
    with pytest.raises(error, match="draft_ttl"):
        SessionStore.open(tmp_path / "store", draft_ttl=ttl)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("what", ["_attach", "_packed"])
def test_c45_what_is_being_committed_or_handed_over_does_not_time_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be slow, and another thread tells the time."""
    store, session, prompt = timed()
    draft = session.draft(prompt)
    store.tick(9)
    original = getattr(Session, what)

    def slow(session: Session, *given: Any) -> Any:
        ticking = threading.Thread(target=store.tick, args=(1000,))
        ticking.start()
        ticking.join()
        assert not draft.closed
        return original(session, *given)

    monkeypatch.setattr(Session, what, slow)
    if what == "_attach":
        node = draft.commit()
        assert session.children(prompt) == (node,)
        assert draft.how_closed == "committed"
    else:
        data = draft.hand_over()
        assert draft.how_closed == "handed over"
        assert session.adopt(data).commit().parent is prompt
    refused = session.draft(prompt)
    with pytest.raises(FinishRefused):
        refused.commit("abort")
    store.tick(2000)
    store.tick(3000)
    assert refused.how_closed == "timed out", "a commit that was refused is over"


def test_c45_a_tick_and_a_commit_agree_on_how_a_draft_ended() -> None:
    store, session, prompt = timed(ttl=1)
    now = iter(range(1, 10**6))
    committed = timed_out = 0
    for number in range(300):
        draft = session.draft(prompt)
        draft.append(number)
        store.tick(next(now))
        made: list[Node] = []

        def work(thread: int, draft: Draft = draft, made: list[Node] = made) -> None:
            if thread:
                store.tick(next(now))
                store.tick(next(now))
            else:
                with suppress(DraftClosed):
                    made.append(draft.commit())

        in_threads(2, work)
        assert draft.how_closed == ("committed" if made else "timed out")
        assert all(node in session.tree for node in made)
        committed += len(made)
        timed_out += not made
    assert committed + timed_out == 300
    assert len(session.children(prompt)) == committed


def test_c45_the_same_calls_time_out_the_same_on_every_rank() -> None:
    def rank() -> list[Any]:
        store, session, prompt = timed(ttl=7, idle_ttl=30)
        rng, drafts, told = random.Random(11), list[Draft](), list[Any]()
        for now in range(200):
            if session.closed:
                break
            if rng.random() < 0.4:
                drafts.append(session.draft(prompt))
            for draft in drafts:
                if not draft.closed and rng.random() < 0.2:
                    draft.append(now)
            told.append((store.tick(now), [(draft.how_closed, len(draft), draft.key) for draft in drafts]))
        return told

    assert rank() == rank()
    assert {how for how, _, _ in rank()[-1][1]} == {None, "timed out"}


# --- all of it, in any order ----------------------------------------------------------------------------------------------


@dataclass
class Going:
    """A draft, or the bytes of one, and the log of what was done to it."""

    where: str  # "home", "away", or "out" on its way
    draft: Draft | None
    path: list[int]
    parent: bytes
    key: str
    opening: int  # of the session at home, as counted by the machine
    tokens: list[int] = field(default_factory=list)
    states: list[tuple[int, bytes]] = field(default_factory=list)
    computed: int = 0
    data: bytes = b""
    with_path: bool = False

    @property
    def state(self) -> bytes | None:
        return self.states[-1][1] if self.states else None

    @property
    def stop(self) -> int:
        return len(self.path) + len(self.tokens)


PICK = st.integers(0, 999)
RUN = st.lists(st.integers(0, 9), max_size=4)


class Lives(RuleBasedStateMachine):
    """Requests of a session at home, in memory or on disk, and of the same session in another process' store.

    ``log``: the tokens of the path of every node, by id. ``here``, ``there``: ids of the nodes that each session must hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.opening = 0
        self.now = 0.0
        self.log: dict[bytes, list[int]] = {}
        self.here: list[bytes] = []
        self.there: list[bytes] = []
        self.ended: dict[bytes, tuple[str | None, str | None]] = {}
        self.made: dict[tuple[str, bytes, str], bytes] = {}  # which node has a key, at home or away
        self.ids: dict[tuple[bytes, str, tuple[int, ...]], bytes] = {}  # of generations, by content
        self.going: list[Going] = []
        self.count = 0

    @initialize(on_disk=st.booleans())
    def begin(self, on_disk: bool) -> None:
        if on_disk:
            self.folder = tempfile.TemporaryDirectory()
            self.home = SessionStore.open(f"{self.folder.name}/store", durability="relaxed", draft_ttl=20)
        else:
            self.home = SessionStore.in_memory(draft_ttl=20)
        self.away = SessionStore.in_memory()
        self.session = self.home.create("s", scheme="text@hf5")
        self.log[self.session.root.id], self.ended[self.session.root.id] = [], (None, None)
        self.here.append(self.session.root.id)

    def teardown(self) -> None:
        self.going.clear()
        if hasattr(self, "home"):
            self.home.close()
        if self.folder is not None:
            self.folder.cleanup()

    def node(self, pick: int) -> Node:
        return self.session.node(self.here[pick % len(self.here)])

    def at_home(self, node: Node, tokens: list[int], ended: tuple[str | None, str | None] = (None, None)) -> None:
        if node.id not in self.here:
            self.here.append(node.id)
        assert self.log.setdefault(node.id, tokens) == tokens, "one id, one path"
        self.ended.setdefault(node.id, ended)

    def open_drafts(self) -> list[Going]:
        return [each for each in self.going if each.draft is not None]

    def draft(self, pick: int) -> Going:
        found = self.open_drafts()
        return found[pick % len(found)]

    # Turns

    @rule(pick=PICK, tokens=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def append(self, pick: int, tokens: list[int]) -> None:
        parent = self.node(pick)
        self.at_home(self.session.append(parent, tokens), [*self.log[parent.id], *tokens])

    @precondition(lambda self: len(self.here) > 1)
    @rule(pick=PICK, cut=PICK)
    def rewind(self, pick: int, cut: int) -> None:
        node = self.node(pick)
        length = cut % (node.stop + 1)
        before = set(self.here)
        back = self.session.truncate(node, length)
        self.at_home(
            back, self.log[node.id][:length], (back.finish_reason, back.tail_policy) if back.id in before else (None, None)
        )

    @precondition(lambda self: any(self.log.values()))
    @rule(pick=PICK, at=PICK, tokens=RUN)
    def edit(self, pick: int, at: int, tokens: list[int]) -> None:
        node = self.node(pick)
        path = self.log[node.id]
        if not path:
            return
        start = at % len(path)
        stop = start + 1 + at % min(3, len(path) - start)
        if len(path) - (stop - start) + len(tokens) == 0:
            return
        made = self.session.rewrite(node, [Edit(start, stop, tokens)])
        whole = [*path[:start], *tokens, *path[stop:]]
        assert made.input_ids().tolist() == whole
        for each in made.path()[1:]:
            self.at_home(each, whole[: each.stop], (each.finish_reason, each.tail_policy))

    @precondition(lambda self: len(self.here) > 1)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 9), min_size=1, max_size=3))
    def replace(self, pick: int, tokens: list[int]) -> None:
        node = self.node(pick)
        if node.parent is None:
            return
        siblings = self.session.children(node.parent)
        made = self.session.replace(node, tokens, head="main")
        self.at_home(made, [*self.log[node.parent.id], *tokens])
        assert self.session.children(node.parent)[: len(siblings)] == siblings, "nobody went"
        assert self.session.heads["main"] == made

    # Generations

    @rule(pick=PICK, named=st.sampled_from([None, None, "rid"]))
    def generate(self, pick: int, named: str | None) -> None:
        if len(self.open_drafts()) > 5:
            return
        parent = self.node(pick)
        draft = self.session.draft(parent, key=named)
        self.going.append(Going("home", draft, self.log[parent.id], parent.id, draft.key, self.opening))

    @precondition(lambda self: self.open_drafts())
    @rule(pick=PICK, tokens=RUN, state=st.sampled_from([None, None, b"a", b"b"]))
    def decode(self, pick: int, tokens: list[int], state: bytes | None) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        each.draft.extend(tokens)
        each.tokens += tokens
        if state is not None:
            each.draft.set_state(state)
            if each.states and each.states[-1][0] == len(each.tokens):
                each.states.pop()
            each.states.append((len(each.tokens), state))

    @precondition(lambda self: self.open_drafts())
    @rule(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=8))
    def step(self, tokens: list[int]) -> None:
        batch = self.open_drafts()[:8]
        extend_drafts([each.draft for each in batch if each.draft is not None], tokens[: len(batch)])
        for each, token in zip(batch, tokens, strict=False):
            each.tokens.append(token)

    @precondition(lambda self: self.open_drafts())
    @rule(pick=PICK, at=PICK)
    def roll_back(self, pick: int, at: int) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        length = at % (len(each.tokens) + 1)
        each.draft.rollback(length)
        del each.tokens[length:]
        each.states = [state for state in each.states if state[0] <= length]
        each.computed = min(each.computed, each.stop)

    @precondition(lambda self: self.open_drafts())
    @rule(pick=PICK, at=PICK, preempted=st.booleans())
    def compute(self, pick: int, at: int, preempted: bool) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        if preempted:
            each.draft.preempt()
            each.computed = 0
        else:
            each.draft.num_computed_tokens = each.computed = at % (each.stop + 1)

    @precondition(lambda self: self.open_drafts())
    @rule(pick=PICK, with_path=st.booleans())
    def hand_over(self, pick: int, with_path: bool) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        each.data, each.with_path = each.draft.hand_over(with_path=with_path), with_path
        each.draft, each.where = None, "out"

    @precondition(lambda self: any(each.where == "out" for each in self.going))
    @rule(pick=PICK, home=st.booleans())
    def adopt(self, pick: int, home: bool) -> None:
        out = [each for each in self.going if each.where == "out"]
        each = out[pick % len(out)]
        if home:
            if each.opening != self.opening:
                with pytest.raises(StaleSession):
                    self.home.adopt(each.data)
                self.going.remove(each)
                return
            if each.parent not in self.here:
                with pytest.raises(UnknownNode):
                    self.session.adopt(each.data)
                return
            each.draft, each.where = self.home.adopt(each.data), "home"
            return
        if each.parent not in self.there and not each.with_path and each.path:
            with pytest.raises((UnknownNode, UnknownSession)):
                self.away.adopt(each.data)
            return
        keyed = [
            (("away", node.parent.id, node.key), node.id)
            for node in self.session.node(each.parent).path()
            if node.parent is not None and node.key is not None
        ]
        try:
            each.draft, each.where = self.away.adopt(each.data), "away"
        except KeyTaken:
            assert any(self.made.get(slot, node_id) != node_id for slot, node_id in keyed), "the path has a key that is taken there"
            return
        self.made.update(keyed)
        for node in each.draft.path():
            if node.id not in self.there:
                self.there.append(node.id)

    @precondition(lambda self: self.open_drafts())
    @rule(pick=PICK, how=st.sampled_from(["abort", "drop", "refused"]))
    def give_up(self, pick: int, how: str) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        if how == "refused":
            with pytest.raises(FinishRefused):
                each.draft.commit("abort")
            return
        if how == "abort":
            each.draft.abort()
        self.going.remove(each)

    @precondition(lambda self: self.open_drafts())
    @rule(
        pick=PICK,
        reason=st.sampled_from(["stop", "length", "interrupted"]),
        length=st.none() | PICK,
        policy=st.sampled_from(["keep", "drop_last"]),
    )
    def commit(self, pick: int, reason: str, length: int | None, policy: TailPolicy) -> None:
        each = self.draft(pick)
        assert each.draft is not None
        count = None if length is None else length % (len(each.tokens) + 1)
        tokens = each.tokens[:count]
        tokens = tokens[:-1] if policy == "drop_last" else tokens
        at_home = each.where == "home"
        slot, content = (each.where, each.parent, each.key), (each.parent, each.key, tuple(tokens))
        known = self.made.get(slot)  # what the other session has made of the same request, this one does not know
        if not each.path and not tokens:
            with pytest.raises((OutOfRange, KeyTaken)):
                each.draft.commit(reason, count, policy)
            return
        try:
            node = each.draft.commit(reason, count, policy)
        except KeyTaken as error:
            assert error.node.id == known != self.ids.get(content)
            assert not each.draft.closed
            return
        assert known in (None, node.id)
        assert self.ids.setdefault(content, node.id) == node.id, "wherever it is committed, it is the same node"
        whole = [*each.path, *tokens]
        assert node.input_ids().tolist() == whole
        self.going.remove(each)
        if at_home:
            fresh = node.id not in self.here
            self.at_home(node, whole, (reason, policy) if fresh else self.ended[node.id])
            if fresh:
                self.ended[node.id] = reason, policy
        else:
            assert self.log.setdefault(node.id, whole) == whole
            if node.id not in self.there:
                self.there.append(node.id)
        self.made[slot] = node.id

    # Time, and the other things that happen

    @rule(passed=st.sampled_from([1, 5, 30]))
    def tick(self, passed: int) -> None:
        self.now += passed
        assert self.home.tick(self.now) == ()
        for each in self.open_drafts():
            if each.draft is not None and each.draft.closed:
                assert (each.draft.how_closed, each.where) == ("timed out", "home")
                self.going.remove(each)

    @rule()
    def reopen(self) -> None:
        """The session, or the whole process, at home begins anew."""
        if self.folder is None:
            return  # in memory, it would be an empty one
        self.count += 1
        for each in [each for each in self.open_drafts() if each.where == "home"]:
            self.going.remove(each)
        if self.count % 2:
            self.session.close()
        else:
            self.home.close()
            self.home = SessionStore.open(f"{self.folder.name}/store", durability="relaxed", draft_ttl=20)
            self.now = 0.0
        self.session = self.home.get("s")
        self.opening += 1

    # What holds

    @invariant()
    def drafts_are_their_logs(self) -> None:
        for each in self.open_drafts():
            draft = each.draft
            assert draft is not None
            assert draft.input_ids().tolist() == [*each.path, *each.tokens]
            assert (draft.parent.id, draft.key, draft.state) == (each.parent, each.key, each.state)
            assert draft.num_computed_tokens == each.computed
            assert draft.positions().tolist() == [list(range(each.stop))]

    @invariant()
    def paths_are_their_logs(self) -> None:
        if not self.here:
            return
        for session, ids in ((self.session, self.here), (self.away.get("s") if self.there else None, self.there)):
            if session is None:
                continue
            for node_id in ids[-12:]:
                assert session.node(node_id).input_ids().tolist() == self.log[node_id]
            assert {node.id for node in session.tree} >= set(ids)
        for node_id in self.here[-12:]:
            node = self.session.node(node_id)
            assert (node.finish_reason, node.tail_policy) == self.ended[node_id]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=600 if SOAK else 25, stateful_step_count=60 if SOAK else 30)
