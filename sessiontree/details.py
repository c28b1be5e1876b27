"""What a node carries outside its identity: metadata, how its generation ended, links, and the tool calls open on its path.

Tool calls are what metadata say: ``tool_calls``, the ids a turn made (or mappings that have an ``id``), and ``tool_call_id``, the
id it answers. A call is open until a later turn of the path answers it; each node knows those open behind it, so nobody has to walk
the path for them.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from pyrsistent import PMap, pmap

from sessiontree.frozen import EMPTY_METADATA

LinkKind = Literal["derived_from", "prefix_of"]
TailPolicy = Literal["keep", "drop_last"]
TAIL_POLICIES: Final[tuple[str, ...]] = get_args(TailPolicy)


class Link(NamedTuple):
    """An edge to a node this one was made from.

    ``derived_from``: a rewritten turn and the last turn it stands for, or what a caller says that a turn was made of;
    ``prefix_of``: a turn cut short and the whole of it.
    ``reused_tokens``: how many tokens from the root on the two paths share.
    """

    kind: LinkKind
    node_id: bytes
    reused_tokens: int


class Details(NamedTuple):
    """What a node carries outside its identity. ``open_calls``: by id, the depth of the turn that made the call first."""

    metadata: PMap[str, Any] = EMPTY_METADATA
    finish_reason: str | None = None
    tail_policy: TailPolicy | None = None
    links: tuple[Link, ...] = ()
    open_calls: PMap[str, int] = pmap()


NO_DETAILS: Final = Details()
#: Of generations without metadata, by how nearly all of them end: one object each for all nodes.
USUAL_DETAILS: Final = {reason: Details(EMPTY_METADATA, reason, "keep") for reason in ("stop", "length", "tool_calls")}


class ToolCalls(NamedTuple):
    """What metadata say of tool calls: ids made, ids answered, and whether either is said in another form."""

    made: tuple[str, ...]
    answered: tuple[str, ...]
    malformed: bool


_NONE: Final = ToolCalls((), (), False)


def tool_calls(metadata: PMap[str, Any]) -> ToolCalls:
    """The tool calls that frozen metadata name."""
    if not metadata:
        return _NONE
    calls, answers = metadata.get("tool_calls"), metadata.get("tool_call_id")
    if calls is None or (not isinstance(calls, np.ndarray) and not calls):
        calls = ()
    made, malformed = [], not isinstance(calls, tuple)
    for call in calls if isinstance(calls, tuple) else ():
        name = call.get("id") if isinstance(call, PMap) else call
        if isinstance(name, str):
            made.append(name)
        else:
            malformed = True
    answers = () if answers is None else answers if isinstance(answers, tuple) else (answers,)
    answered = [answer for answer in answers if isinstance(answer, str)]
    return ToolCalls(tuple(dict.fromkeys(made)), tuple(dict.fromkeys(answered)), malformed or len(answered) < len(answers))


def with_open_calls(before: Details, details: Details, depth: int) -> Details:
    """The details of a turn at ``depth``, behind one with those ``before``, with the calls that are open behind it."""
    calls = before.open_calls
    if details.metadata is not EMPTY_METADATA:
        made, answered, _ = tool_calls(details.metadata)
        for call in answered:
            calls = calls.discard(call)
        for call in made:
            if call not in calls:
                calls = calls.set(call, depth)
    return details if calls is details.open_calls else details._replace(open_calls=calls)
