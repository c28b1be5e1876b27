"""Questions to nodes and trees. Nothing here changes anything, recurses, or looks at more than it has to.

Questions about one or two paths take nodes, whatever trees they are in. Those about what stands below a node take a function
that gives its children, as a tree's index does: (ordinal, node) pairs in commit order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree.details import tool_calls
from sessiontree.errors import Unsupported
from sessiontree.frozen import checked_text
from sessiontree.node import MediaSpan, Node, lowest_common_ancestor, placed_media
from sessiontree.spans import Placeholders, placeholder_at

__all__ = ["Diff", "Order", "Problem", "descendants", "diff", "lowest_common_ancestor", "validate"]

Order = Literal["commit", "depth_first"]
Children = Callable[[Node], Iterable[tuple[int, Node]]]
DiffKind = Literal["same", "end", "media", "token", "position", "root"]
ProblemKind = Literal["unanswered_call", "unrequested_result", "repeated_result", "extended_truncated", "malformed"]

#: Finish reasons of replies that were cut off before the model ended them.
TRUNCATED: Final = frozenset({"length", "max_tokens", "interrupted"})


class Diff(NamedTuple):
    """What two paths have alike, and what each has behind that.

    ``ancestor``: the deepest node on both, None where the roots differ. ``shared_prefix_len``: tokens alike from the root on: ids,
    media, and positions as decoded. ``kind``: what differs first, "end" where one path ends, "root" where the roots differ, so that
    nothing is shared, "same" for equal paths. ``removed``, ``added``: (n,) int32, the remaining tokens of the first and of the
    second path. ``removed_media``, ``added_media``: (item, start, stop) in path coordinates for those media of the remainders
    that the other remainder does not hold.
    """

    ancestor: Node | None
    shared_prefix_len: int
    kind: DiffKind
    removed: NDArray[np.int32]
    added: NDArray[np.int32]
    removed_media: tuple[MediaSpan, ...]
    added_media: tuple[MediaSpan, ...]


def diff(one: Node, two: Node) -> Diff:
    """How the path of ``two`` differs from that of ``one``. O(what stands behind the deepest node on both)."""
    ancestor, shared = lowest_common_ancestor(one, two), one.shared_prefix_len(two)
    removed, added = one.input_ids(shared), two.input_ids(shared)
    gone, come = placed_media(one, shared, one.stop), placed_media(two, shared, two.stop)
    kind: DiffKind
    if ancestor is None:
        kind = "root"
    elif not len(removed) or not len(added):
        kind = "end" if len(removed) or len(added) else "same"
    elif _placeholder(gone, shared) != _placeholder(come, shared):
        kind = "media"
    else:
        kind = "token" if removed[0] != added[0] else "position"
    return Diff(ancestor, shared, kind, removed, added, _spans_without(one, gone, come), _spans_without(two, come, gone))


def _placeholder(media: Sequence[Placeholders], index: int) -> Any:
    """Which placeholder of which content stands at path index ``index``; None for text."""
    piece = placeholder_at(media, index)
    return None if piece is None else (piece.content, piece.first + index - piece.start)


def _spans_without(node: Node, media: Sequence[Placeholders], others: Sequence[Placeholders]) -> tuple[MediaSpan, ...]:
    """Spans of those ``media`` of a path that the others, counted, do not have."""
    held = Counter((piece.content, piece.first, piece.stop - piece.start) for piece in others)
    spans: list[MediaSpan] = []
    for piece in media:
        what = (piece.content, piece.first, piece.stop - piece.start)
        if held[what]:
            held[what] -= 1
        else:
            spans += node.media_spans(piece.start, piece.stop)
    return tuple(spans)


def descendants(node: Node, children: Children, order: Order = "commit") -> Iterator[Node]:
    """All nodes below ``node``, one by one: in commit order, or depth first with children in commit order.

    Takes memory for the nodes whose children are still to come, not for the subtree.
    """
    order = checked_text(order, "order")  # type: ignore[assignment]
    if order == "commit":
        return _in_commit_order(node, children)
    if order == "depth_first":
        return _depth_first(node, children)
    raise Unsupported(f"no order {order!r}; commit or depth_first", order=order)


def _in_commit_order(node: Node, children: Children) -> Iterator[Node]:
    waiting = list(children(node))  # a heap, since it is sorted; ordinals are distinct, so nodes are never compared
    while waiting:
        _, node = heapq.heappop(waiting)
        yield node
        for child in children(node):
            heapq.heappush(waiting, child)


def _depth_first(node: Node, children: Children) -> Iterator[Node]:
    waiting = [child for _, child in children(node)][::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for _, child in children(node)][::-1]


class Problem(NamedTuple):
    """Something about a path that a model or an API would stumble over.

    ``kind``: "unanswered_call": ``node`` made a tool call that no later node of the path answers; "unrequested_result": it
    answers one that no earlier node made; "repeated_result": one that is answered already; "extended_truncated": a reply that
    was cut off (finish reason "length", "max_tokens" or "interrupted") and has a successor on the path; "malformed": metadata
    that name tool calls in another form than ids. ``call_id``: the tool call's, where there is one. ``elsewhere``: results for
    it that are recorded beside the path: as other children of its nodes, or below such.
    """

    kind: ProblemKind
    node: Node
    call_id: str | None = None
    elsewhere: tuple[Node, ...] = ()

    def __str__(self) -> str:
        what = f"{self.kind} {self.call_id!r}" if self.call_id is not None else self.kind
        beside = f"; answered beside the path by {', '.join(map(repr, self.elsewhere))}" if self.elsewhere else ""
        return f"{what} at {self.node!r}{beside}"


def validate(node: Node, children: Children, *, allow_extend_truncated: bool = False) -> tuple[Problem, ...]:
    """What is wrong with the path of ``node``, in path order: see :class:`Problem`. O(depth).

    Tool calls are what metadata say: ``tool_calls``, the ids made, and ``tool_call_id``, the id answered, or a list of such.
    """
    path = node.path()
    ever_made: set[str] = set()
    problems: list[Problem] = []
    for before, turn in itertools.pairwise((path[0], *path)):
        made, answered, malformed = tool_calls(turn._details.metadata)
        if malformed:
            problems.append(Problem("malformed", turn))
        for call in answered:
            if call not in before._details.open_calls:
                problems.append(Problem("repeated_result" if call in ever_made else "unrequested_result", turn, call))
        ever_made.update(made)
        cut_off = turn.finish_reason is not None and turn.finish_reason.strip().casefold() in TRUNCATED
        if cut_off and not allow_extend_truncated and turn is not path[-1]:
            problems.append(Problem("extended_truncated", turn))
    calls = node._details.open_calls
    beside = _results_beside(node, node.depth, children)
    for depth in sorted(set(calls.values())):
        turn = path[depth]
        unanswered = (call for call in tool_calls(turn._details.metadata).made if calls.get(call) == depth)
        problems += [Problem("unanswered_call", turn, call, tuple(beside.get(call, ()))) for call in unanswered]
    problems.sort(key=lambda problem: problem.node.depth)
    return tuple(problems)


def sibling_results(node: Node, children: Children) -> tuple[Node, ...]:
    """Results for tool calls that are open behind ``node``, where they were recorded beside its path."""
    beside = _results_beside(node, node.depth - 1, children)
    results = [turn for turns in beside.values() for turn in turns]
    return tuple(sorted(results, key=lambda turn: turn.depth))


def _results_beside(node: Node, last: int, children: Children) -> dict[str, list[Node]]:
    """Results for the calls open behind ``node`` that stand beside its path, by call.

    They hang on turns of the path from the one that made the call up to depth ``last``, or on other such results. Looks at nothing
    that stands before the first open call.
    """
    calls = node._details.open_calls
    found: dict[str, list[Node]] = {}
    if not calls:
        return found
    first = min(calls.values())
    turns = [node]
    while turns[-1].depth > first:
        turns.append(turns[-1].parent)  # type: ignore[arg-type]  # the root makes no calls
    on_path = {turn.id for turn in turns}
    waiting = deque(turn for turn in reversed(turns) if turn.depth <= last)
    while waiting:
        turn = waiting.popleft()
        for _, child in children(turn):
            if child.id in on_path:
                continue
            answered = tool_calls(child._details.metadata).answered
            if here := [call for call in answered if call in calls and call in turn._details.open_calls]:
                for call in here:
                    found.setdefault(call, []).append(child)
                waiting.append(child)
    return found
