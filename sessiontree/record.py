"""Recording a generation of somebody who keeps no tree: the whole prompt, the completion, and where they belong.

A stateless client resends its history with every request. :func:`plan_record` finds how far that history is known, goes on from
there, or forks at the first token that differs, and says where and why. Nothing is attached here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from sessiontree.edits import Plan, items_behind, plan_prefix
from sessiontree.errors import Unsupported
from sessiontree.media import MediaItem
from sessiontree.node import Details, Node
from sessiontree.prefixes import PrefixMatch
from sessiontree.tokens import TOKEN_BYTES, token_array
from sessiontree.turns import Pending, Turn, plan_turn

ForkKind = Literal["token", "media", "end"]


class Fork(NamedTuple):
    """Where a recorded history left what was known.

    ``at``: the first path index at which the two differ. ``kind``: "token": another id stands there; "media": the ids may be
    the same, the item is not; "end": the prompt ends there, inside ``node``. ``node``: the earliest node that goes on otherwise.
    ``known``, ``given``: the token there in ``node`` and in the history, None past the end.
    """

    at: int
    kind: ForkKind
    node: Node
    known: int | None
    given: int | None


class Recorded(NamedTuple):
    """A recorded generation.

    ``prompt``: the node that ends with the prompt. ``completion``: the node of the completion, under it. ``reused_tokens``: how
    many tokens of the prompt were known and are shared. ``fork``: None where the prompt only went on from a known history.
    """

    prompt: Node
    completion: Node
    reused_tokens: int
    fork: Fork | None


def plan_record(
    match: PrefixMatch,
    beside: Iterable[Node],
    prompt: bytes,
    completion: bytes,
    media: Sequence[MediaItem],
    *,
    role: str,
    completion_role: str,
    key: str | None,
    prompt_details: Details,
    details: Details,
) -> tuple[Plan, int, Fork | None]:
    """The turns to attach for a prompt of which ``match`` is known, the completion last; what is reused, and the fork.

    ``beside``: children of the match's node. Raises what appending and committing the turns would.
    """
    count = len(prompt) // TOKEN_BYTES
    cut, (parent, turns) = _known_part(match)
    at: Node | Turn = turns[-1].turn if turns else parent
    made = list(turns)
    scheme = match.node.scheme
    if cut < count:
        turn = plan_turn(scheme, at, prompt[cut * TOKEN_BYTES :], items_behind(media, cut), "input", role)
        made.append(Pending(turn, prompt_details))
        at = turn
    made.append(Pending(plan_turn(scheme, at, completion, (), "generated", completion_role, key), details))
    return Plan(parent, tuple(made)), cut, _fork(match, beside, prompt)


def _known_part(match: PrefixMatch) -> tuple[int, Plan]:
    """What of the known tokens is shared: all but a part of a media span, which cannot be cut; and the path of them."""
    if match.within is None:
        return match.length, Plan(match.node, ())
    start = match.within.start
    spans = (span for item in match.within.media for span in item.spans)
    inside = [start + offset for offset, size in spans if start + offset < match.length < start + offset + size]
    cut = max(match.node.stop, inside[0]) if inside else match.length
    try:
        return cut, plan_prefix(match.within, cut)
    except Unsupported:  # a position table that only makes sense as a whole
        return match.node.stop, Plan(match.node, ())


def _fork(match: PrefixMatch, beside: Iterable[Node], prompt: bytes) -> Fork | None:
    index = match.length
    given = int(token_array(prompt)[index]) if index < len(prompt) // TOKEN_BYTES else None
    other = match.within
    if other is None and given is not None:
        other = next((child for child in beside if len(child)), None)
    if other is None:
        return None  # nothing goes on from there, or the prompt ends where a turn does
    known = int(other.input_ids(index, index + 1)[0])
    kind: ForkKind = "end" if given is None else "media" if known == given else "token"
    return Fork(index, kind, other, known, given)
