"""What recording rollouts costs: the whole prompt sent with every request, as clients without a tree send it.

Expected before the first run of this file, from parts measured by themselves: 2M tokens copied once (0.4 ms), checked (0.2),
compared with what is known (0.6-0.7, which is what comparing two arrays takes), and the new turn hashed and attached (0.05):
1.3-1.5 ms, where lists of ids cost 20 ns a token to slice and compare, 40 ms. A drift that is to be explained, a reply of 500
tokens: those and as many of the prompt made text, 0.1-0.2 ms more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from harness import Figure, median_of, microseconds, report
from numpy.typing import NDArray

from sessiontree import Session, SessionStore
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


def figures() -> Iterator[Figure]:
    yield from recording()
    yield from drifting()


if __name__ == "__main__":
    sys.exit(not report(figures()))
