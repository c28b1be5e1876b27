"""Recording a generation of somebody who keeps no tree: the whole prompt, the completion, and where they belong.

A stateless client resends its history with every request. :func:`plan_record` finds how far that history is known, goes on from
there, or forks at the first token that differs, and says where and why. Nothing is attached here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sessiontree.details import Details
from sessiontree.edits import Plan, items_behind, plan_prefix
from sessiontree.errors import MediaSpanError, OutOfRange, Unsupported
from sessiontree.media import MediaItem
from sessiontree.node import Node
from sessiontree.prefixes import PrefixMatch
from sessiontree.tokens import TOKEN_BYTES, token_array
from sessiontree.turns import Pending, Turn, plan_turn

ForkKind = Literal["token", "media", "end"]


class Fork(NamedTuple):
    """Where a recorded history left what was known: drift, or just another conversation.

    ``at``: the first path index at which the two differ. ``kind``: "token": another id stands there; "media": the ids may be
    the same, the item is not; "end": the prompt ends there, inside ``node``. ``node``: the earliest node that goes on otherwise;
    it is not on the recorded path. ``known``, ``given``: the token there in ``node`` and in the history, None past the end.
    """

    at: int
    kind: ForkKind
    node: Node
    known: int | None
    given: int | None


class Recorded(NamedTuple):
    """A recorded generation.

    ``prompt``: the node that ends with the prompt. ``completion``: the node of the completion, under it. ``reused_tokens``: how
    many tokens of the prompt were known and are shared; known, not computed: no KV holds the last token of a reply. ``fork``:
    None where the prompt only went on from a known history.
    """

    prompt: Node
    completion: Node
    reused_tokens: int
    fork: Fork | None


def plan_record(
    match: PrefixMatch,
    beyond: Node | None,
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

    ``beyond``: the earliest node that goes on behind what is known. Raises what appending and committing the turns would.
    """
    count = len(prompt) // TOKEN_BYTES
    if not prompt and not completion:
        raise OutOfRange("an empty completion of an empty prompt says nothing", value=0, limit=1)
    cut, (parent, turns) = _known_part(match)
    at: Node | Turn = turns[-1].turn if turns else parent
    made = list(turns)
    scheme = match.node.scheme
    if cut < count:
        turn = plan_turn(scheme, at, prompt[cut * TOKEN_BYTES :], items_behind(media, cut), "input", role)
        made.append(Pending(turn, prompt_details))
        at = turn
    made.append(Pending(plan_turn(scheme, at, completion, (), "generated", completion_role, key), details))
    return Plan(parent, tuple(made)), cut, _fork(match, beyond, prompt)


def with_key(plan: Plan, key: str) -> Plan:
    """The plan with another key of its completion."""
    *turns, (turn, details, _) = plan.turns
    at = turns[-1].turn if turns else plan.parent
    keyed = plan_turn(plan.parent.scheme, at, turn.data, (), turn.origin, turn.role, key)
    return Plan(plan.parent, (*turns, Pending(keyed, details)))


def _known_part(match: PrefixMatch) -> tuple[int, Plan]:
    """What of the known tokens can be shared, and the path of them.

    A media span cannot be cut, nor an item under a position table, nor a table that only makes sense as a whole: then what stands
    before the span, the item or the turn.
    """
    within = match.within
    if within is not None:
        for cut in _cuts(within, match.length):
            try:
                if cut > match.node.stop:
                    return cut, plan_prefix(within, cut)
            except (MediaSpanError, Unsupported):
                continue
    return match.node.stop, Plan(match.node, ())


def _cuts(node: Node, at: int) -> list[int]:
    """Path index ``at``, and where the span and the item begin that it lies inside of."""
    begins = {at}
    for item in node.media:
        spans = [(node.start + offset, node.start + offset + size) for offset, size in item.spans]
        begins |= {begin for begin, end in (*spans, (spans[0][0], spans[-1][1])) if begin < at < end}
    return sorted(begins, reverse=True)


def _fork(match: PrefixMatch, other: Node | None, prompt: bytes) -> Fork | None:
    at = match.length
    given = int(token_array(prompt)[at]) if at < len(prompt) // TOKEN_BYTES else None
    if other is None or (given is None and match.within is None):
        return None  # nothing goes on from there, or the prompt ends where a turn does
    known = int(other.input_ids(at, at + 1)[0])
    kind: ForkKind = "end" if given is None else "media" if known == given else "token"
    return Fork(at, kind, other, known, given)
