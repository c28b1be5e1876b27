"""What recording rollouts costs: the whole prompt sent with every request, as clients without a tree send it.

Expected before the first run of this file, from parts measured by themselves: 2M tokens copied once (0.4 ms), checked (0.2),
compared with what is known (0.6-0.7, which is what comparing two arrays takes), and the new turn hashed and attached (0.05):
1.3-1.5 ms, where lists of ids cost 20 ns a token to slice and compare, 40 ms. A drift that is to be explained, a reply of 500
tokens: those and as many of the prompt made text, 0.1-0.2 ms more. Memory: 8 bytes a token and some 2 KB a turn, so 9 MB a million.

What came: 1.2 ms, 1.7 beside others; 3-4 where the tokens move to a larger buffer, every 65 turns. 10.1 MB at first: 0.5 of it was
room that tokens may grow into, never touched; a turn, two nodes and an annotation, took 3 KB, a third of which found histories
again. Without digests of what no search asks for, states that say no more than an index does and details that are all alike, a turn
takes 1.5 KB, and the room is a sixteenth: 8.8 MB, 8.7 to 9.0 as the room goes.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from harness import Figure, median_of, microseconds, report
from numpy.typing import NDArray

from sessiontree import Session, SessionStore
from sessiontree.annotations import LOGPROBS
from sessiontree.positions import scheme

TURNS, TURN, REPLY = 1_000, 2_000, 500
WORDS = 50_000  # a token and this many more say the same
RULES = scheme("text@hf5", max_position_limit=2**28)


def rollout(turns: int) -> NDArray[np.int32]:
    """The ids of a whole rollout."""
    return np.random.default_rng(7).integers(100, WORDS, turns * TURN).astype(np.int32)


def record(session: Session, ids: NDArray[np.int32], turn: int) -> None:
    """The request of one turn: all that came before it, and its reply."""
    stop = (turn + 1) * TURN
    recorded = session.record(ids[: stop - REPLY], ids[stop - REPLY : stop])
    assert recorded.fork is None
    assert recorded.reused_tokens == turn * TURN


@attrs.frozen(eq=False)
class Message:
    """A message with the ids that it adds, in a list."""

    parent: Message | None
    ids: list[int]


def add_request(last: Message | None, prompt: list[int], completion: list[int]) -> Message:
    """As trainers keep rollouts: the messages of a path are compared with the prompt, one slice each, and the rest is added."""
    path, node = [], last
    while node is not None:
        path.append(node)
        node = node.parent
    at, known = 0, None
    for message in reversed(path):
        if prompt[at : at + len(message.ids)] != message.ids:
            break
        at, known = at + len(message.ids), message
    return Message(Message(known, prompt[at:]), completion)


def of_lists(ids: list[int]) -> float:
    """Milliseconds of the last request of a rollout that is kept so."""
    last = None
    for start in range(0, len(ids) - TURN, TURN):
        last = Message(Message(last, ids[start : start + TURN - REPLY]), ids[start + TURN - REPLY : start + TURN])
    prompt, completion = ids[:-REPLY], ids[-REPLY:]
    return median_of(lambda: add_request(last, prompt, completion), 9) / 1000


def recording() -> Iterator[Figure]:
    ids = rollout(TURNS + 60)
    session = SessionStore.in_memory().create("rollout", scheme=RULES)
    turns = iter(range(TURNS + 60))
    for _ in range(TURNS):
        record(session, ids, next(turns))
    taken = microseconds(lambda: record(session, ids, next(turns)), 50) / 1000
    whole = ids[: TURNS * TURN]
    other = whole.copy()
    peers = {
        "comparing alone": median_of(lambda: np.array_equal(whole, other), 50) / 1000,
        "lists of ids": of_lists(whole.tolist()),
    }
    note = f"GC on; {TURNS:,} turns of {TURN:,} before it; least {taken.min():.2f}, max {taken.max():.2f} ms"
    yield Figure("record a turn given the 2M-token prompt, int32", float(np.median(taken)), "ms", 2, peers=peers, note=note)


def drifting() -> Iterator[Figure]:
    """The last reply of the same history, sent in other tokens that say the same, with a decoder and without."""
    ids = rollout(TURNS)
    session = SessionStore.in_memory().create("rollout", scheme=RULES)
    for turn in range(TURNS):
        record(session, ids, turn)
    drifted = ids.copy()

    def decode(tokens: list[int]) -> str:
        return (np.array(tokens) % WORDS).astype("<u2").tobytes().hex()

    def drift(**options: Any) -> None:
        drifted[-REPLY:] += WORDS
        recorded = session.record(drifted, [1], **options)
        assert recorded.fork is not None
        assert recorded.fork.drift == ("retokenised" if options else None)

    plain = median_of(drift, 30) / 1000
    asked = median_of(lambda: drift(decode=decode, special_ids=range(100)), 30) / 1000
    note = f"in the last reply of 2M tokens, {REPLY} tokens read twice"
    yield Figure("record a drift and say of what kind", asked, "ms", peers={"not asked": plain}, note=note)


def held_bytes(make: Callable[[], object]) -> int:
    """What stays of something that is made."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        del made


def memory() -> Iterator[Figure]:
    """Every token sampled, each with its log-probability."""
    ids, logprobs = rollout(TURNS), np.random.default_rng(8).normal(-1, 1, TURNS * TURN).astype(np.float32)
    few = TURN * TURNS // 10  # of lists: all of it would take minutes

    def tree() -> object:
        session = SessionStore.in_memory().create("rollout", scheme=RULES)
        for start in range(0, len(ids), TURN):
            stop = start + TURN
            session.record(ids[: start + 1], ids[start + 1 : stop], annotations={LOGPROBS: logprobs[start + 1 : stop]})
        return session

    def lists() -> object:
        last, said = None, []
        for start in range(0, few, TURN):
            last = add_request(last, ids[: start + 1].tolist(), ids[start + 1 : start + TURN].tolist())
            said.append(logprobs[start + 1 : start + TURN].tolist())
        return last, said

    ours, theirs = held_bytes(tree) / len(ids), held_bytes(lists) / few
    note = f"{TURNS:,} turns of {TURN:,}, recorded with the whole prompt each time; bytes a token are as many MB"
    yield Figure("memory of a million tokens with float32 logprobs", ours, "MB", 9, peers={"lists of ids": theirs}, note=note)


def figures() -> Iterator[Figure]:
    yield from recording()
    yield from drifting()
    yield from memory()


if __name__ == "__main__":
    sys.exit(not report(figures()))
