"""The toy of CASES.md, and the few builders that the case tests share.

The toy is Qwen2.5-VL's rule with spatial merge 2: A = [1, 2, VS, IMG x 4, VE, 3], one image of 4 tokens. Turns are written
as `reference.Segment`s, so that the naive reference can answer for whatever the library is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from sessiontree import Draft, MediaItem, Node, Session, SessionStore, SessionTree
from sessiontree.positions import PositionScheme, scheme
from tests import reference as ref
from tests.reference import Segment

VS, IMG, VID, VE = 100, 101, 102, 105
PAD_VALUE = 1_000_007  # what engines write over placeholders
SECONDS = 0.5
A_IDS = [1, 2, VS, IMG, IMG, IMG, IMG, VE, 3]
A_TABLE = np.array(
    [
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]
)


# --- schemes and sessions ---------------------------------------------------------------------------------------------
def toy_scheme(rule: str = "sglang", **params: Any) -> PositionScheme:
    given = {"image_token_id": IMG, "video_token_id": VID, "vision_start_token_id": VS, "tokens_per_second": 2}
    return scheme(f"qwen2_5_vl@{rule}", **{**given, **params})


def reference_scheme(rule: str = "sglang") -> ref.Scheme:
    return ref.Scheme("qwen2_5_vl", rule, 2, 2)


def new_session(positions_of: PositionScheme | None = None, name: str = "toy", **options: Any) -> Session:
    return SessionStore.in_memory().create(name, scheme=positions_of or toy_scheme(), **options)


# --- turns ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """An image or video to stand in a turn; `grid` counts patches, `fill` is the id of its placeholders."""

    modality: str
    grid: tuple[int, int, int]
    number: int = 0
    fill: int = IMG

    @property
    def item(self) -> ref.Item:
        name = hashlib.sha256(repr((self.modality, self.grid, self.number)).encode()).digest()
        return ref.Item(self.modality, name, self.grid, SECONDS if self.modality == "video" else None, ())

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.grid
        return frames * (height // 2) * (width // 2)


def image(height: int = 4, width: int = 4, number: int = 0, fill: int = IMG) -> Block:
    return Block("image", (1, height, width), number, fill)


def video(frames: int = 3, height: int = 4, width: int = 4, number: int = 0) -> Block:
    return Block("video", (frames, height, width), number, VID)


def turn(*pieces: int | Block, origin: str = "input") -> Segment:
    """A turn of token ids and whole blocks, in order."""
    tokens: list[int] = []
    items: list[ref.Item] = []
    for piece in pieces:
        if isinstance(piece, Block):
            items.append(replace(piece.item, spans=((len(tokens), piece.num_tokens),)))
            tokens += [piece.fill] * piece.num_tokens
        else:
            tokens.append(piece)
    return Segment(origin, tuple(tokens), tuple(items))


def reply(*tokens: int) -> Segment:
    return turn(*tokens, origin="generated")


def shown(block: Block) -> tuple[int | Block, ...]:
    """A block between its delimiters."""
    return VS, block, VE


def a_turn(number: int = 0, fill: int = IMG) -> Segment:
    return turn(1, 2, VS, image(number=number, fill=fill), VE, 3)


def media(segment: Segment) -> list[MediaItem]:
    return [MediaItem(**item.kwargs()) for item in segment.items]


def grow(session: Session, parent: Node, *segments: Segment) -> Node:
    """Append input segments and decode generated ones, one behind the other; the last node."""
    for segment in segments:
        if segment.origin == "generated":
            draft = session.draft(parent)
            draft.extend(segment.tokens)
            parent = draft.commit()
        else:
            parent = session.append(parent, segment.tokens, media=media(segment))
    return parent


def texts() -> st.SearchStrategy[list[int]]:
    """Ids of text; some look like delimiters and placeholders."""
    return st.lists(st.sampled_from([1, 7, 9, IMG, VID, VS, VE, PAD_VALUE]), max_size=4)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    height, width = draw(st.integers(1, 4)) * 2, draw(st.integers(1, 4)) * 2
    number = draw(st.integers(0, 3))
    if draw(st.booleans()):
        return image(height, width, number, draw(st.sampled_from([IMG, PAD_VALUE])))
    return video(draw(st.integers(1, 4)), height, width, number)


@st.composite
def histories(draw: st.DrawFn, max_turns: int = 5) -> list[Segment]:
    """A conversation: the first turn is input and not empty; others are input or generated. Media may touch a turn's ends."""
    segments = []
    for number in range(draw(st.integers(1, max_turns))):
        if number and draw(st.booleans()):
            segments.append(reply(*draw(texts())))
            continue
        pieces: list[int | Block] = [] if number else [1]
        for _ in range(draw(st.integers(0, 2))):
            pieces += draw(texts())
            pieces += shown(draw(blocks())) if draw(st.booleans()) else (draw(blocks()), 7)
        if pieces and pieces[-1] == 7 and draw(st.booleans()):
            pieces.pop()
        segments.append(turn(*pieces, *draw(texts()) if not pieces else ()))
    return segments


# --- what must stay as it was -----------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Nested metadata as a value with one repr."""
    if isinstance(value, Mapping):
        return sorted((repr(key), plain(entry)) for key, entry in value.items())
    if isinstance(value, (frozenset, set)):
        return sorted(repr(plain(entry)) for entry in value)
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return value


def fingerprint(node: Node) -> str:
    """Everything a node says of itself, in both modes."""
    facts = (
        node.id,
        node.parent.id if node.parent else None,
        (node.depth, node.start, node.stop, node.origin, node.role, node.key, node.finish_reason, node.tail_policy),
        plain(node.metadata),
        node.links,
        [item.fields() for item in node.media],
        node.token_ids.tobytes(),
        node.positions(node.start, node.stop).tobytes(),
        node.positions(node.start, node.stop, "as_replayed").tobytes(),
        int(node.next_position),
        node.mrope_position_delta,
        node.scheme.name,
        node.namespace,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def tree_digest(tree: SessionTree) -> str:
    """Every node of a tree, and its heads."""
    heads = sorted((name, head.node.id, head.version) for name, head in tree.heads.items())
    return hashlib.sha256(repr(([fingerprint(node) for node in tree], heads)).encode()).hexdigest()


def refuses(error: type[Exception], session: Session, call: Callable[..., object], *given: Any, **named: Any) -> Any:
    """Make a call that must raise and change nothing in the session; the error it raised."""
    before = tree_digest(session.tree)
    with pytest.raises(error) as caught:
        call(*given, **named)
    assert tree_digest(session.tree) == before
    return caught.value


def spans_of(source: Node | Draft, start: int = 0, stop: int | None = None) -> list[tuple[bytes, int, int]]:
    return [(item.identity, first, last) for item, first, last in source.media_spans(start, stop)]


def expected_spans(segments: Sequence[Segment], start: int, stop: int) -> list[tuple[bytes, int, int]]:
    return [(item.identity, first, last) for item, first, last in ref.clip_spans(ref.media_spans(segments), start, stop)]


def check(node: Node | Draft, segments: Sequence[Segment], rule: str = "sglang") -> None:
    """Ids, spans, positions, delta and next position of a path against the reference, from the whole history."""
    ids = ref.input_ids(segments)
    assert node.stop == len(ids)
    assert node.input_ids().tolist() == ids
    assert spans_of(node) == expected_spans(segments, 0, len(ids))
    for mode in ref.MODES:
        answer = ref.replay(reference_scheme(rule), segments, mode)
        assert np.array_equal(node.positions(mode=mode), answer.positions)
        if mode == "as_decoded":
            assert node.mrope_position_delta == answer.delta
            assert node.next_position == answer.next_position


def same(array: NDArray[Any] | torch.Tensor, expected: NDArray[Any]) -> bool:
    """Equal values and shape."""
    return np.array_equal(np.asarray(array), expected)


# --- attacks ----------------------------------------------------------------------------------------------------------
def attack_array(array: NDArray[Any], *, tensor: bool = True) -> None:
    """Try to write through an array that was handed out. What cannot be refused must reach nobody else: the caller looks."""
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 1
    with pytest.raises(ValueError, match="read-only"):
        array.fill(1)
    holder: Any = array
    while holder is not None:
        if isinstance(holder, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                holder.flags.writeable = True
            with pytest.raises(ValueError, match="WRITEABLE"):
                holder.setflags(write=True)
        else:
            assert memoryview(holder).readonly
        holder = getattr(holder, "base", None) if isinstance(holder, np.ndarray) else getattr(holder, "obj", None)
    with suppress(ValueError):  # a view of another type, should it turn out writable
        array.view(np.uint8)[...] = 1
    if tensor:
        torch.from_numpy(array).fill_(1)  # PyTorch knows no read-only memory
    assert not array.flags.writeable


def attack_slots(value: object, names: Sequence[str]) -> None:
    """Try to set attributes in every way Python has."""
    for name in names:
        before = getattr(value, name)
        for setter in (setattr, object.__setattr__):
            with pytest.raises((AttributeError, TypeError)):
                setter(value, name, None)
        with pytest.raises((AttributeError, TypeError)):
            object.__delattr__(value, name)
        assert repr(plain(getattr(value, name))) == repr(plain(before))
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(value, "no_such_attribute", 1)


def store_of(session: Session) -> SessionStore:
    """The store that a session is in."""
    store = session._store
    assert isinstance(store, SessionStore)
    return store
