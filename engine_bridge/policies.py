"""What every adapter asks of a path before an engine gets it: that it is whole, and which of its tokens the engine keeps.

Engines keep history in two ways. SGLang keeps every token up to the stop; a streaming session of vLLM leaves out the last sampled
token of each reply. Under which of the two a reply was committed is recorded (``node.tail_policy``). A :class:`Prompt` is a path
under one policy. Its media come from spans, its positions from spans and grids, never from ids. Nothing here knows an engine, and
nothing here changes a node.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import Draft, MediaItem, Node, Unsupported
from sessiontree.details import TAIL_POLICIES, TailPolicy
from sessiontree.frozen import checked_text
from sessiontree.node import clipped_spans, refuse_inside_item
from sessiontree.positions import Mode, PositionState
from sessiontree.positions.runs import Piece, is_external, write
from sessiontree.query import validate
from sessiontree.tokens import token_array, window

_UNPAIRED: Final = ("unanswered_call", "unrequested_result", "repeated_result", "malformed")


class PlacedItem(NamedTuple):
    """An item and all of its placeholders in a prompt: half-open (start, stop) runs, in order, none adjacent to the next."""

    item: MediaItem
    spans: tuple[tuple[int, int], ...]


@attrs.frozen(eq=False)
class Prompt:
    """Tokens from ``prefix_len`` on of a path, as an engine keeps it. Made by :func:`prompt_of`.

    ``input_ids``: (T,) int32, read-only. ``media``: the items in it, whole, by their first placeholder; an item that stands there
    twice is there twice. Spans are indices into ``input_ids``. ``dropped``: path indices of the tokens that were left out,
    ascending; whatever else counts tokens counts those that are left. ``source``: the node or draft.
    """

    source: Node | Draft
    prefix_len: int
    tail_policy: TailPolicy | None
    dropped: tuple[int, ...]
    input_ids: NDArray[np.int32]
    media: tuple[PlacedItem, ...]

    @property
    def stop(self) -> int:
        """Tokens of the whole prompt, those before ``prefix_len`` included."""
        return self.prefix_len + len(self.input_ids)

    def positions(self, mode: Mode = "as_decoded", *, start: int | None = None) -> NDArray[Any]:
        """Positions of its tokens, or of tokens from ``start`` on: (num_axes, stop - start) in the scheme's dtype, read-only.

        Where tokens were left out, those of the history without them. Raises OutOfRange, PositionError for the mode, Unsupported
        where a turn behind a dropped token has positions of its own.
        """
        first, _ = window(self.prefix_len if start is None else start, None, self.stop)
        return self._replanned(mode)[0][:, first:] if self.dropped else self.source.positions(first, None, mode)

    def position_state(self, mode: Mode = "as_decoded") -> PositionState:
        """The state that positions after its tokens continue from. Raises as :meth:`positions`."""
        return self._replanned(mode)[1] if self.dropped else self.source.position_state(mode)

    def _replanned(self, mode: Mode) -> tuple[NDArray[Any], PositionState]:
        """Positions of every token kept and the state after them; turns behind a dropped token are planned anew."""
        source, scheme = self.source, self.source.scheme
        turns: list[Node | Draft] = [*source.path()[1:], *([source] if isinstance(source, Draft) else [])]
        left_out = frozenset(self.dropped)
        at = self.dropped[0]
        first = next(number for number, turn in enumerate(turns) if turn.stop > at)
        at = turns[first].start
        state = source.path()[first].position_state(mode)
        table = np.empty((scheme.num_axes, self.stop), scheme.dtype)
        if at:
            table[:, :at] = turns[first - 1].positions(0, at, mode)
        pieces = []
        for turn in turns[first:]:
            if isinstance(turn, Node) and is_external(turn.runs):
                raise Unsupported(f"{turn!r} has a position table of its own, which fits no other history", node=turn)
            ids = turn.token_ids[: len(turn) - (turn.stop - 1 in left_out)]
            if turn.origin == "generated" and mode == "as_decoded":
                runs, state = scheme.plan_decode(state, len(ids))
            else:
                runs, state = scheme.plan(state, ids.tobytes(), turn.media)
            if len(ids):
                pieces.append(Piece(at - turns[first].start, runs, 0, len(ids)))
                at += len(ids)
        if pieces:
            write(pieces, table[:, turns[first].start :])
        table.flags.writeable = False
        return table, state


def committed(node: Node | Draft) -> Node:
    """The last node of a path that is in the tree: itself, or a draft's parent."""
    return node if isinstance(node, Node) else node.parent


def prompt_of(
    node: Node | Draft, prefix_len: int = 0, *, tail_policy: TailPolicy | None = None, paired_calls: bool = False
) -> Prompt:
    """A node's or draft's path from token ``prefix_len`` on, as an engine takes it.

    ``tail_policy``: None takes the path as it is. "drop_last" leaves out the last sampled token of every reply that was committed
    with it; the ones already committed without it lose no other. "keep" asks that every reply still has it. Tokens of a draft,
    and of a reply that was cut by hand, are kept: nobody sampled the last of those as an end. ``paired_calls``: refuse a path whose
    tool calls and results do not pair up.

    Raises MediaSpanError where the path ends inside an item, Unsupported where the window begins inside one, where a call has no
    result or a result no call, and where "keep" meets a reply that lost its last token; OutOfRange for ``prefix_len``.
    """
    if not isinstance(node, (Node, Draft)):
        raise TypeError(f"a prompt is made of a Node or a Draft, not {type(node).__name__}")
    last = committed(node)
    refuse_inside_item(last, node, "an engine takes an item whole")
    if paired_calls:
        check_paired_calls(last)
    dropped = _dropped(last, tail_policy)
    prefix_len, _ = window(prefix_len, None, node.stop - len(dropped), "prefix_len")
    if not dropped:
        ids = node.input_ids(prefix_len)
    else:
        ids = token_array(np.delete(node.input_ids(copy=False), list(dropped))[prefix_len:].tobytes())
    return Prompt(node, prefix_len, tail_policy, dropped, ids, _placed(last, prefix_len, dropped))


def check_paired_calls(node: Node) -> None:
    """Raises Unsupported, naming the turn and the call, for a tool call without a result on the path or a result without a call."""
    for problem in validate(node, lambda _: ()):
        if problem.kind in _UNPAIRED:
            raise Unsupported(f"{node!r}: tool calls and results do not pair up: {problem}", node=problem.node)


def _dropped(node: Node, tail_policy: TailPolicy | None) -> tuple[int, ...]:
    if tail_policy is None:
        return ()
    if checked_text(tail_policy, "tail_policy") not in TAIL_POLICIES:
        raise Unsupported(f"no tail policy {tail_policy!r}; {' or '.join(TAIL_POLICIES)}", tail_policy=tail_policy)
    replies = [turn for turn in node.path() if turn.tail_policy is not None]
    if tail_policy == "keep":
        for reply in replies:
            if reply.tail_policy == "drop_last":
                raise Unsupported(f"{reply!r} was committed without its last sampled token, which cannot be kept", node=reply)
        return ()
    return tuple(reply.stop - 1 for reply in replies if reply.tail_policy == "keep" and len(reply))


def _placed(node: Node, prefix_len: int, dropped: tuple[int, ...]) -> tuple[PlacedItem, ...]:
    """The items whose placeholders stand behind ``prefix_len``, which counts tokens that are kept, with parts put together."""
    at = prefix_len  # as a path index: no dropped token is a placeholder
    for index in dropped:
        at += index <= at
    found: list[tuple[MediaItem, list[tuple[int, int]]]] = []
    growing: dict[Any, tuple[int, list[tuple[int, int]]]] = {}  # by content: placeholders so far, and the runs they stand in
    left_out = np.array(dropped, np.int64)
    for item, start, stop, row in clipped_spans(node, at, node.stop):
        seen, spans = growing.get(item.content(), (0, []))
        if row == 0:
            spans = []
            found.append((item, spans))
        elif row != seen:
            raise Unsupported(
                f"the window from {prefix_len} on begins inside {item}; an engine takes an item whole",
                item=item,
                prefix_len=prefix_len,
            )
        first = start - prefix_len - int(np.searchsorted(left_out, start))
        last = first + stop - start
        if spans and spans[-1][1] == first:
            first, _ = spans.pop()
        spans.append((first, last))
        growing[item.content()] = row + stop - start, spans
    return tuple(PlacedItem(item, tuple(spans)) for item, spans in found)
