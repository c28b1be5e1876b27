"""Questions to nodes and trees. Nothing here changes anything, recurses, or looks at more than it has to.

Questions about one or two paths take nodes, whatever trees they are in. Those about what stands below a node take a function
that gives its children, as a tree's index does: (ordinal, node) pairs in commit order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import Unsupported
from sessiontree.frozen import checked_text
from sessiontree.node import MediaSpan, Node, clipped_spans, lowest_common_ancestor

__all__ = ["Diff", "Order", "Problem", "descendants", "diff", "lowest_common_ancestor", "validate"]

Order = Literal["commit", "depth_first"]
Children = Callable[[Node], Iterable[tuple[int, Node]]]
DiffKind = Literal["same", "end", "media", "token", "position"]
ProblemKind = Literal["unanswered_call", "unrequested_result", "repeated_result", "extended_truncated", "malformed"]

#: Finish reasons of replies that were cut off before the model ended them.
TRUNCATED: Final = frozenset({"length", "interrupted"})


class Diff(NamedTuple):
    """What two paths have alike, and what each has behind that.

    ``ancestor``: the deepest node on both, None where the roots differ. ``shared_prefix_len``: tokens alike from the root on: ids,
    media, and positions as decoded. ``kind``: what differs first, "end" where one path ends, "same" for equal paths. ``removed``,
    ``added``: (n,) int32, the remaining tokens of the first and of the second path. ``removed_media``, ``added_media``: (item,
    start, stop) in path coordinates for those media of the remainders that the other remainder does not hold.
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
    shared = one.shared_prefix_len(two)
    removed, added = one.input_ids(shared), two.input_ids(shared)
    gone, come = one.media_spans(shared), two.media_spans(shared)
    kind: DiffKind
    if not len(removed) or not len(added):
        kind = "end" if len(removed) or len(added) else "same"
    elif _placeholder(one, shared) != _placeholder(two, shared):
        kind = "media"
    else:
        kind = "token" if removed[0] != added[0] else "position"
    ancestor = lowest_common_ancestor(one, two)
    return Diff(ancestor, shared, kind, removed, added, _without(gone, come), _without(come, gone))


def _placeholder(node: Node, index: int) -> Any:
    """Which placeholder of which content stands at path index ``index``; None for text."""
    return next(((item.content(), number) for item, _, _, number in clipped_spans(node, index, index + 1)), None)


def _without(spans: Sequence[MediaSpan], others: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
    """Those spans whose content, counted, the others do not have."""
    held = Counter((item.content(), stop - start) for item, start, stop in others)
    left = []
    for item, start, stop in spans:
        content = (item.content(), stop - start)
        if held[content]:
            held[content] -= 1
        else:
            left.append((item, start, stop))
    return tuple(left)


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
    was cut off (finish reason "length" or "interrupted") and has a successor on the path; "malformed": metadata that name tool
    calls in another form than ids. ``call_id``: the tool call's, where there is one. ``elsewhere``: results for it that are
    recorded beside the path, as siblings of its nodes.
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

    Tool calls are what metadata say: ``tool_calls``, the ids made, and ``tool_call_id``, the id answered.
    """
    path = node.path()
    made: dict[str, Node] = {}
    answered: set[str] = set()
    problems: list[Problem] = []
    for at, turn in enumerate(path):
        calls, answer, malformed = tool_calls(turn)
        if malformed:
            problems.append(Problem("malformed", turn))
        for call in calls:
            made.setdefault(call, turn)
        if answer is not None:
            if answer not in made:
                problems.append(Problem("unrequested_result", turn, answer))
            elif answer in answered:
                problems.append(Problem("repeated_result", turn, answer))
            answered.add(answer)
        if not allow_extend_truncated and turn.finish_reason in TRUNCATED and at + 1 < len(path):
            problems.append(Problem("extended_truncated", turn))
    open_calls = {call: turn for call, turn in made.items() if call not in answered}
    if open_calls:
        beside = _results_beside(path, path, open_calls, children)
        problems += [Problem("unanswered_call", turn, call, tuple(beside.get(call, ()))) for call, turn in open_calls.items()]
        problems.sort(key=lambda problem: problem.node.depth)
    return tuple(problems)


def tool_calls(node: Node) -> tuple[tuple[str, ...], str | None, bool]:
    """Ids of the tool calls a node made, the id of the one it answers, and whether its metadata name any in another form."""
    metadata = node._details.metadata
    if not metadata:
        return (), None, False
    calls, answer = metadata.get("tool_calls") or (), metadata.get("tool_call_id")
    ids = tuple(call for call in calls if isinstance(call, str)) if isinstance(calls, tuple) else ()
    malformed = not isinstance(calls, tuple) or len(ids) < len(calls) or not (answer is None or isinstance(answer, str))
    return ids, answer if isinstance(answer, str) else None, malformed


def _results_beside(
    path: Sequence[Node], parents: Sequence[Node], calls: dict[str, Node], children: Children
) -> dict[str, list[Node]]:
    """Results for ``calls`` beside ``path``: children of ``parents`` at or behind the turn that made the call, by call."""
    found: dict[str, list[Node]] = {}
    on_path = {turn.id for turn in path}
    first = min(turn.depth for turn in calls.values())
    for parent in parents:
        if parent.depth < first:
            continue
        for _, child in children(parent):
            answer = tool_calls(child)[1]
            if answer in calls and parent.depth >= calls[answer].depth and child.id not in on_path:
                found.setdefault(answer, []).append(child)
    return found


def sibling_results(node: Node, children: Children) -> tuple[Node, ...]:
    """Where a path ends among the results of one turn's tool calls: results for those it does not answer, beside it."""
    path = [node]
    while tool_calls(path[-1])[1] is not None and path[-1].parent is not None:
        path.append(path[-1].parent)
    made = path[-1]
    calls = dict.fromkeys(tool_calls(made)[0], made)
    for turn in path[:-1]:
        calls.pop(tool_calls(turn)[1] or "", None)
    if len(path) == 1 or not calls:
        return ()
    path.reverse()
    beside = _results_beside(path, path[:-1], calls, children)
    return tuple(turn for turns in beside.values() for turn in turns)
