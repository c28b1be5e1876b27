"""A prompt that is in no tree yet: part of a committed path, and turns to be prefilled behind it.

It is a value, checked as a tree would check it, and reads like a node. Its turns become nodes when its request has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import LimitExceeded, MediaItem, MediaSpanError, Node, Session
from sessiontree.edits import plan_prefix
from sessiontree.media import placements
from sessiontree.node import deepest_from, last_with_media
from sessiontree.positions import PositionState
from sessiontree.positions.runs import Runs
from sessiontree.tokens import TOKEN_BYTES, TokenIds, in_range, token_array, token_bytes


class _Turn(NamedTuple):
    data: bytes
    media: tuple[MediaItem, ...]
    runs: Runs
    state: PositionState

    @property
    def size(self) -> int:
        return len(self.data) // TOKEN_BYTES


@attrs.frozen(eq=False)
class PendingPrompt:
    """Path tokens ``[0, kept)`` of ``node``, and what is to be prefilled behind them. Made by :meth:`of` and :meth:`extended`."""

    node: Node
    kept: int
    state: PositionState  # behind its last token, as decoded
    _turns: tuple[_Turn, ...] = ()

    @classmethod
    def of(cls, node: Node, length: int) -> PendingPrompt:
        """The first ``length`` tokens of a path. Raises MediaSpanError for a cut inside an item, OutOfRange."""
        plan = plan_prefix(node, in_range(length, node.stop, "length", node))
        state = plan.turns[-1].turn.state if plan.turns else plan.parent.position_state()
        if state.open_block is not None:  # between the frames of a video
            item, start, stop = next(span for span in reversed(node.media_spans()) if span[1] < length)
            raise MediaSpanError(f"a cut at {length} leaves a part of {item}", item=item, span=(start, stop))
        return cls(plan.parent if not plan.turns else node, length, state)

    @property
    def stop(self) -> int:
        """Tokens of it."""
        return self.state.num_tokens

    def extended(self, token_ids: TokenIds, media: Iterable[MediaItem] = (), *, limit: int | None = None) -> PendingPrompt:
        """With another turn behind it; spans relative to ``token_ids``. ``limit``: of its tokens. An empty turn adds nothing.

        Raises TypeError, OutOfRange, MediaSpanError, PositionError, Unsupported, LimitExceeded.
        """
        data, items = token_bytes(token_ids), tuple(media)
        runs, state = self.node.scheme.plan(self.state, data, items)
        if limit is not None and state.num_tokens > limit:
            raise LimitExceeded(f"a prompt of {state.num_tokens} tokens; {limit} are allowed", value=state.num_tokens, limit=limit)
        if state.open_block is not None:
            item = placements(items, len(data) // TOKEN_BYTES)[-1].item
            raise MediaSpanError(f"{item} is not whole; nothing can be generated behind it", item=item, span=item.spans[-1])
        turns = (*self._turns, _Turn(data, items, runs, state)) if data else self._turns
        return attrs.evolve(self, state=state, turns=turns)

    def cut(self, length: int) -> PendingPrompt:
        """Its first ``length`` tokens. Raises MediaSpanError for a cut inside an item, OutOfRange."""
        in_range(length, self.stop, "length", "the prompt")
        if length <= self.kept:
            return PendingPrompt.of(self.node, length)
        made, at = PendingPrompt.of(self.node, self.kept), self.kept
        for turn in self._turns:
            count = min(turn.size, length - at)
            if count <= 0:
                break
            media = []
            for item in turn.media:
                first, last = self.node.scheme.atomic_span(item) or (item.spans[0][0], sum(item.spans[-1]))
                if first < count < last:
                    raise MediaSpanError(
                        f"a cut at {length} is inside {item}, tokens [{at + first}, {at + last})",
                        item=item,
                        span=(at + first, at + last),
                    )
                if last <= count:
                    media.append(item)
            made = made.extended(token_array(turn.data[: count * TOKEN_BYTES]), media)
            at += count
        return made

    def input_ids(self, start: int = 0, *, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Its tokens from ``start`` on: (stop - start,), a new array or ``out``."""
        ids = np.empty(self.stop - start, np.int64) if out is None else out
        if start < self.kept:
            ids[: self.kept - start] = self.node.input_ids(start, self.kept, copy=False)
        for turn, at in self._placed(start):
            skipped = max(0, start - at)
            ids[at + skipped - start : at + turn.size - start] = token_array(turn.data)[skipped:]
        return ids

    def positions(self, start: int = 0, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Of its tokens from ``start`` on, as decoded: (num_axes, stop - start) in the scheme's dtype, a new array or ``out``."""
        scheme = self.node.scheme
        table = np.empty((scheme.num_axes, self.stop - start), scheme.dtype) if out is None else out
        if start < self.kept:
            self.node.positions(start, self.kept, out=table[:, : self.kept - start])
        for turn, at in self._placed(start):
            skipped = max(0, start - at)
            table[:, at + skipped - start : at + turn.size - start] = scheme.written(turn.runs, turn.size)[:, skipped:]
        return table

    def _placed(self, start: int) -> Iterator[tuple[_Turn, int]]:
        """The turns that reach past ``start``, each with where it begins."""
        at = self.kept
        for turn in self._turns:
            if at + turn.size > start:
                yield turn, at
            at += turn.size

    def last_positions(self) -> NDArray[Any]:
        """Of its last turn's tokens: (num_axes, tokens of that), read-only."""
        return self.node.scheme.written(self._turns[-1].runs, self._turns[-1].size) if self._turns else self.positions()[:, :0]

    @property
    def mrope_position_delta(self) -> int | float:
        """The token at index i that is decoded behind it stands at i + delta."""
        return self.node.scheme.mrope_position_delta(self.state)

    def media(self, start: int = 0) -> list[tuple[MediaItem, list[tuple[int, int]]]]:
        """Items that begin at ``start`` or behind it, each with its spans ``[start, stop)`` in path coordinates, by their first.

        An item that stands twice is there twice. ``start`` is not inside one.
        """
        spans = list(self.node.media_spans(min(start, self.kept), self.kept))
        for turn, at in self._placed(start):
            spans += [
                (item, at + first, at + last) for first, last, item in placements(turn.media, turn.size) if at + first >= start
            ]
        found: list[tuple[MediaItem, list[tuple[int, int]]]] = []
        begun: dict[int, list[tuple[int, int]]] = {}
        for item, first, last in spans:
            of_item = begun.get(id(item))
            if of_item is None:
                of_item = begun[id(item)] = []
                found.append((item, of_item))
            of_item.append((first, last))
            if len(of_item) == len(item.spans):  # the same object may be in a later turn too
                del begun[id(item)]
        return found

    def check_reply(self, token_ids: TokenIds, limit: int | None = None) -> None:
        """Whether these can be generated behind it. ``limit``: of all tokens. Raises OutOfRange, PositionError, LimitExceeded."""
        stop = self.stop + len(token_bytes(token_ids)) // TOKEN_BYTES
        if limit is not None and stop > limit:
            raise LimitExceeded(f"{stop} tokens with the reply; {limit} are allowed", value=stop, limit=limit)
        self.node.scheme.decode(self.state, token_ids)

    def committed(self, session: Session) -> Node:
        """The node that it ends with, made of what is not in the tree yet. Raises what truncate and append raise."""
        node = session.truncate(self.node, self.kept)
        for turn in self._turns:
            node = session.append(node, token_array(turn.data), media=turn.media)
        return node

    @property
    def has_media(self) -> bool:
        """Whether an item stands in it."""
        if any(turn.media for turn in self._turns):
            return True
        at = last_with_media(deepest_from(self.node, self.kept - 1)) if self.kept else None
        while at is not None and at.start + at.media[0].spans[0][0] >= self.kept:
            at = at._media_above
        return at is not None
