"""Turns as Hypothesis draws them, and one conversation that has some of everything."""

from __future__ import annotations

from typing import Final

import numpy as np
from hypothesis import strategies as st

from sessiontree import Annotation, Ragged, Spans, TokenValues
from sessiontree.testing.model import PLACEHOLDER, Picture, Turn

MAX_TOKEN: Final = 2**31 - 1
KEYS: Final = (None, None, "k1", "k2")

_TOKEN = st.sampled_from((0, 1, 5, PLACEHOLDER, MAX_TOKEN)) | st.integers(0, MAX_TOKEN)
_TEXT = st.lists(_TOKEN, max_size=4).map(tuple)
_SIZES = st.tuples(st.integers(0, 3), st.sampled_from((1, 1, 2, 5)), st.integers(1, 3), st.integers(1, 3))


def _turn(pieces: list[tuple[int, ...] | tuple[int, int, int, int]], pictured: bool, role: str, key: str | None) -> Turn:
    tokens: list[int] = []
    pictures = []
    for at, piece in enumerate(pieces):
        if pictured and at % 2:
            picture = Picture(*piece, at=len(tokens))  # type: ignore[misc]
            pictures.append(picture)
            tokens += [PLACEHOLDER] * len(picture)
        else:
            tokens += piece
    return Turn(tuple(tokens), tuple(pictures), role, key)


INPUT: Final = st.one_of(
    st.builds(_turn, st.tuples(_TEXT).map(list), st.just(False), st.sampled_from(("user", "tool")), st.sampled_from(KEYS)),
    st.builds(_turn, st.tuples(_TEXT, _SIZES, _TEXT).map(list), st.just(True), st.just("user"), st.sampled_from(KEYS)),
)
#: Replies have keys, so that they are the same node in every store.
REPLY: Final = st.builds(
    Turn,
    st.lists(_TOKEN, max_size=6).map(tuple),
    role=st.just("assistant"),
    key=st.sampled_from(("r1", "r2", "r3")),
    generated=st.just(True),
)
TURN: Final = INPUT | REPLY
FIRST: Final = TURN.filter(lambda turn: turn.tokens)  # an empty turn right under the root is refused
CONVERSATION: Final = st.tuples(FIRST, st.lists(TURN, max_size=6)).map(lambda drawn: [drawn[0], *drawn[1]])


ANNOTATIONS: Final = ("logprobs", "routed_experts", "top_p_ids", "weight_version", "reward", "train")


def annotation(name: str, count: int, number: int) -> Annotation:
    """One of these names for a node of ``count`` tokens: another for each number. Of some of the tokens, where it is of tokens."""
    random = np.random.default_rng(number)
    start, stop = sorted(random.integers(0, count + 1, 2).tolist())
    match name:
        case "logprobs":
            return TokenValues(random.normal(size=stop - start).astype(np.float32), start)
        case "routed_experts":
            return TokenValues(random.integers(0, 256, (stop - start, 2, 3), np.uint8), start)
        case "top_p_ids":
            return Ragged.of([random.integers(0, MAX_TOKEN, length) for length in random.integers(0, 4, stop - start)], start)
        case "weight_version":
            return Spans([(start, stop, number if number % 2 else f"step {number}")] if start < stop else [])
        case "reward":
            return float(random.normal())
    return bool(number % 2)


def conversation() -> list[Turn]:
    """Text, an image, a video that is longer than wide, replies, an empty turn, ids at both ends."""
    image, video = Picture(1, 1, 2, 3, at=2), Picture(2, 5, 1, 2, at=0)
    return [
        Turn((151644, 0, MAX_TOKEN), role="system"),
        Turn((1, 151652, *[PLACEHOLDER] * 6, 151653, 7), (image,)),
        Turn((5, 6, 7), role="assistant", key="first reply", generated=True),
        Turn((*[PLACEHOLDER] * 10, 8), (video,), key="the video"),
        Turn((9,) * 5, role="assistant", key="second reply", generated=True),
        Turn((), role="tool"),
        Turn((PLACEHOLDER, 3)),
    ]
