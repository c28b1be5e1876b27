"""Random trees of rollouts with annotations, and what a walk over their paths, token by token, says of the loss."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sessiontree import MediaItem, MediaSpanError, Node, Session, SessionStore
from sessiontree.annotations import ADVANTAGE, LOSS_MASK, LOSS_WEIGHT, TRAIN, TokenValues
from sessiontree.positions import scheme
from tests.histories import History
from tests.rope_oracle import draw_history

FAMILIES = ("text", "qwen2_5_vl", "qwen3_vl", "hunyuan_vl", "qwen3_omni")  # 1, 3, 3, 4 and 3 axes, the last of floats
AUDIO, IMAGE, VIDEO, START, AUDIO_START, END = range(100, 106)
OMNI = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": AUDIO,
    "vision_start_token_id": START,
    "audio_start_token_id": AUDIO_START,
    "position_id_per_seconds": 25,
}
#: Any tree is as likely as any other: those that hypothesis would draw by itself are nearly all small.
SEEDED = st.integers(0, 2**64).map(random.Random)
#: What identifies a token that was written once: the node that has it first, and its place there.
TokenKey = tuple[bytes, int]


def decode(session: Session, parent: Node, ids: Sequence[int], **more: Any) -> Node:
    with session.draft(parent) as draft:
        draft.extend(ids)
        return draft.commit(**more)


@cache
def short_history(family: str, number: int) -> History:
    """A history with media of at most 100 tokens, one of a few of its family."""
    if family == "qwen3_omni":  # few that are drawn are short
        ids = [START, *[VIDEO] * 8, END, 7, START, *[IMAGE] * 4, END]
        clip = MediaItem("video", bytes([number] * 32), [(1, 8)], (2, 4, 4), 0.7)
        picture = MediaItem("image", bytes([9] * 32), [(12, 4)], (1, 4, 4))
        return History(family, "made", OMNI, np.array(ids, np.int32), (clip, picture), (11, len(ids)), {})
    rng = random.Random(number)
    while True:
        history = draw_history(rng, family).history
        if history.items and len(history.tokens) <= 100:
            return history


def random_tree(rng: random.Random, family: str) -> Session:
    """A tree with replies, turns with media, forks, turns cut short, and annotations of all that packing reads."""
    if family == "text":
        session, turns = SessionStore.in_memory().create("s", scheme=scheme("text@hf5")), []
    else:
        history = short_history(family, rng.randint(0, 2))
        session = SessionStore.in_memory().create("s", scheme=scheme(f"{family}@hf5", **history.params))
        turns = history.turns()
    whole = [session.root]
    for _ in range(rng.randint(3, 10)):
        parent = rng.choice(whole)
        kind = rng.random()
        if kind < 0.5:
            node = decode(session, parent, [rng.randint(1, 40) for _ in range(rng.randint(0, 6) if parent.stop else 3)])
        elif kind < 0.65 or not turns:
            node = session.append(parent, [rng.randint(1, 40) for _ in range(rng.randint(1, 4))])
        elif kind < 0.8:
            node = parent
            for turn in turns:
                if turn.tokens or node.stop:
                    node = session.append(node, turn.tokens, media=turn.media)
        else:
            node = parent
            with suppress(MediaSpanError):
                node = session.truncate(parent, rng.randint(0, parent.stop))
        if node.position_state().open_block is None:
            whole.append(node)
    for node in session.tree:
        annotate(session, rng, node)
    return session


def annotate(session: Session, rng: random.Random, node: Node) -> None:
    cut = any(link.kind == "prefix_of" for link in node.links)  # reads those of the turn that it was cut of
    if len(node) and not cut:
        start = rng.randint(0, len(node) - 1)
        count = rng.randint(1, len(node) - start)
        if rng.random() < 0.3:
            session.annotate(node, {LOSS_MASK: TokenValues([rng.random() < 0.5 for _ in range(count)], start)})
        if rng.random() < 0.3:
            session.annotate(node, {LOSS_WEIGHT: TokenValues([rng.choice((0.0, 0.5, 3.0)) for _ in range(count)], start)})
        session.annotate(node, {ADVANTAGE: TokenValues([node.depth + at / 8 - 1 for at in range(len(node))])})
    if node.depth and rng.random() < 0.1:
        session.annotate(node, {TRAIN: rng.random() < 0.3})


def scale_of(node: Node) -> Any:
    """A weighting of one's own: the same for a turn and for one that was cut of it."""
    return (node.start + np.arange(len(node))) % 5 / 4 if node.depth % 2 else node.depth


class Walk:
    """The paths that are trained on, and by token what it is: ``trained`` and ``base``, the weight before the weighting's scale."""

    def __init__(self, session: Session, leaves: Sequence[Node], factors: Sequence[str]) -> None:
        self.session = session
        self.trained: dict[TokenKey, bool] = {}
        self.base: dict[TokenKey, float] = {}
        self.scale: dict[TokenKey, float] = {}
        self._keys: dict[bytes, list[TokenKey]] = {}
        cut: dict[bytes, Node] = {}
        whole: dict[bytes, Node] = {}
        order: list[Node] = []
        for leaf in leaves:
            kept = leaf
            for node in leaf.path():
                if node.depth and session.annotations(node).get(TRAIN) is False:
                    assert node.parent is not None
                    kept = node.parent
                    while kept.parent is not None and kept.position_state().open_block is not None:
                        kept = kept.parent
                    break
            (whole if kept is leaf else cut)[kept.id] = kept
            if kept not in order:
                order.append(kept)
        self.rows = []
        for row in order:
            keys = self.keys(row, factors)
            ahead = any(row != other and row in other.path() for other in order)
            if row.id in whole or (not ahead and any(self.trained[key] for key in keys)):
                self.rows.append(row)

    def keys(self, row: Node, factors: Sequence[str] = ()) -> list[TokenKey]:
        """Of each token of a path."""
        if row.id in self._keys:
            return self._keys[row.id]
        found = self._keys[row.id] = []
        for node in row.path():
            source, said = node.id, self.session.annotations(node)
            while links := [link.node_id for link in self.session.node(source).links if link.kind == "prefix_of"]:
                (source,) = links
            scale = np.broadcast_to(scale_of(node), len(node))
            for at in range(len(node)):
                key = source, at
                found.append(key)
                if key in self.trained:
                    continue
                mask = _at(said, LOSS_MASK, at)
                sampled = node.origin == "generated" if mask is None else bool(mask)
                self.trained[key] = sampled and node.start + at > 0
                weight = float(self.trained[key])
                for name in factors:
                    value = _at(said, name, at)
                    weight *= 1 if value is None else value
                self.base[key], self.scale[key] = weight, float(scale[at])
        return found

    def row_weights(self, weighting: Any) -> list[list[float]]:
        """Of each token of each row, as a trainer of flat rows would weigh them."""
        keys = [self.keys(row) for row in self.rows]
        counts = [sum(self.trained[key] for key in row) for row in keys]
        seen: set[TokenKey] = set()
        found = []
        for row, count in zip(keys, counts, strict=True):
            weights = []
            for key in row:
                if weighting == "per_branch_mean":
                    weights.append(self.base[key] / count / sum(each > 0 for each in counts) if self.trained[key] else 0.0)
                else:
                    scale = 1.0 if weighting == "once" else self.scale[key]
                    weights.append(0.0 if key in seen else self.base[key] * scale)
                    seen.add(key)
            found.append(weights)
        return found

    def weights(self, weighting: Any) -> dict[TokenKey, float]:
        """What a token counts in all rows together, of those that are trained."""
        sums: dict[TokenKey, float] = defaultdict(float)
        for row, weights in zip(self.rows, self.row_weights(weighting), strict=True):
            for key, weight in zip(self.keys(row), weights, strict=True):
                if self.trained[key]:
                    sums[key] += weight
        return dict(sums)


def _at(said: Mapping[str, Any], name: str, at: int) -> Any:
    value = said.get(name)
    if not isinstance(value, TokenValues):
        return value
    values, known = value.read(at, at + 1)
    return values[0].item() if known[0] else None


WEIGHTINGS: tuple[str | Callable[[Node], Any], ...] = ("once", "per_branch_mean", scale_of)
