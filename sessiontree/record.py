"""Recording a generation of somebody who keeps no tree: the whole prompt, the completion, and where they belong.

A stateless client resends its history with every request. :func:`plan_record` finds how far that history is known, goes on from
there, or forks at the first token that differs, and says where and, given a decoder, why. Nothing is attached here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Final, Literal, NamedTuple

from sessiontree.details import Details
from sessiontree.drift import DRIFTS, Decoder, Drift, drift_of
from sessiontree.edits import Plan, items_behind, links_to, plan_prefix
from sessiontree.errors import MediaSpanError, OutOfRange, Unsupported
from sessiontree.media import MediaItem
from sessiontree.node import Node
from sessiontree.prefixes import PrefixMatch
from sessiontree.spans import placeholders_of
from sessiontree.tokens import TOKEN_BYTES, token_array
from sessiontree.turns import Pending, Turn, plan_turn

ForkKind = Literal["token", "media", "end"]
_MOST_COMPARED: Final = 64  # turns


class Fork(NamedTuple):
    """Where a recorded history left what was known: drift, or just another conversation.

    ``at``: the first path index at which the two differ. ``kind``: "token": another id stands there; "media": the ids may be
    the same, the item is not; "end": the prompt ends there, inside ``node``. ``node``: the earliest node that goes on otherwise;
    it is not on the recorded path. ``known``, ``given``: the token there in ``node`` and in the history, None past the end.

    ``drift``: where another token stands there and a decoder was given, what differs between the history and ``node``, from there
    to its end (or for some thousand tokens); ``node`` is then the one that differs least, of it and its first siblings, 64.
    "retokenised": nothing but the ids, both say the same. "whitespace": nothing but whitespace. "special": nothing but special
    tokens (left out, added, repeated, spelled as text), the whitespace that a template puts between two of them, the ids of an
    item's placeholders, and perhaps other whitespace. "content": what is said, as in another conversation. "unknown": the decoder
    failed.
    """

    at: int
    kind: ForkKind
    node: Node
    known: int | None
    given: int | None
    drift: Drift | None = None


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
    sources: Sequence[Node],
    decoder: Decoder | None,
    children: Callable[[Node], Iterable[tuple[int, Node]]],
) -> tuple[Plan, int, Fork | None]:
    """The turns to attach for a prompt of which ``match`` is known, the completion last; what is reused, and the fork.

    ``beyond``: the earliest node that goes on behind what is known. ``sources``: what the new part of the prompt was made of.
    ``children``: of a node, with their numbers. Raises what appending and committing the turns would.
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
        links = links_to(sources, match.within or match.node, cut)
        made.append(Pending(turn, prompt_details._replace(links=links) if links else prompt_details))
        at = turn
    made.append(Pending(plan_turn(scheme, at, completion, (), "generated", completion_role, key), details))
    fork = _fork(match, beyond, prompt)
    if decoder is not None and fork is not None and fork.kind == "token":
        assert fork.node.parent is not None
        beside = (node for _, node in islice(children(fork.node.parent), _MOST_COMPARED))
        fork = _nearest(fork, beside, prompt, media, decoder)
    return Plan(parent, tuple(made)), cut, fork


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


def _nearest(fork: Fork, beside: Iterable[Node], prompt: bytes, media: Sequence[MediaItem], decoder: Decoder) -> Fork:
    """The fork from whichever differs least: the node that it names, or one of those ``beside`` that hold the same up to there."""
    start, at, spans = fork.node.start, fork.at, placeholders_of(media, 0)
    same = prompt[start * TOKEN_BYTES : at * TOKEN_BYTES]
    found = fork
    for node in chain((fork.node,), (other for other in beside if other != fork.node)):
        if node.stop <= at or node._extent.read_bytes(start, at) != same:
            continue
        known = int(node.input_ids(at, at + 1)[0])
        if known == fork.given:  # another item stands there
            continue
        drift = drift_of(decoder, at, node, prompt, spans)
        if found.drift is None or DRIFTS.index(drift) < DRIFTS.index(found.drift):
            found = fork._replace(node=node, known=known, drift=drift)
        if drift in ("retokenised", "unknown"):
            break
    return found
