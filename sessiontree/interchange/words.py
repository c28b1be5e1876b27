"""How a turn is written on its node, and read from there again.

All that a turn says beside its tokens is metadata of its node, and so outside its id: ``message``, the message as JSON text, which
keeps the order of keys and numbers of any size; ``images``, for each picture its identity, or its bytes where it stands at no
token; ``created_at``; ``tool_calls`` and ``tool_call_id``, by which :meth:`Session.validate` finds results without calls;
``finish_reason`` where the file has one; ``fields``, what only one format understands, as JSON text under that format's name. What
is said of the whole session is the annotation ``interchange`` of its root, JSON text too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from sessiontree.interchange.conversations import Conversation, Message, Turn, messages_of
from sessiontree.node import Node
from sessiontree.store import Session
from sessiontree.stored import LoneNode

#: The annotation of a session's root that says what its conversation was.
ANNOTATION: Final = "interchange"
MESSAGE: Final = "message"
IMAGES: Final = "images"
FIELDS: Final = "fields"
CREATED_AT: Final = "created_at"
FINISH_REASON: Final = "finish_reason"
DERIVED_FROM: Final = "derived_from"


_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: Any) -> str:
    """JSON text that can be encoded: lone surrogates stay escapes. Raises TypeError, ValueError, RecursionError as json does."""
    text = _JSON.encode(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(value, separators=(",", ":"))
    return text


def metadata_of(turn: Turn, said: str | None, format_name: str, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of a turn's node. ``said``: its message as JSON text; ``images``: for each picture where it is kept."""
    metadata: dict[str, Any] = {}
    message = turn.message
    if message is not None:
        metadata[MESSAGE] = said
        if calls := _calls(message):
            metadata["tool_calls"] = calls
        answered = [answer for each in messages_of(turn) if is_text(answer := each.get("tool_call_id"))]
        if answered:
            metadata["tool_call_id"] = answered[0] if len(answered) == 1 else answered
    if images:
        metadata[IMAGES] = list(images)
    if turn.created_at is not None:
        metadata[CREATED_AT] = float(turn.created_at)
    if turn.finish_reason is not None:
        metadata[FINISH_REASON] = turn.finish_reason
    if turn.derived_from:
        metadata[DERIVED_FROM] = list(turn.derived_from)
    if turn.fields or message is None:  # of what says nothing, that it was read so
        metadata[FIELDS] = to_json({format_name: turn.fields})
    return metadata


def _calls(message: Message) -> list[str]:
    """The ids of the tool calls that a message makes; those that have none make no promise."""
    calls = message.get("tool_calls")
    ids = (call.get("id") for call in calls if isinstance(call, Mapping)) if isinstance(calls, (list, tuple)) else ()
    return list(dict.fromkeys(each for each in ids if is_text(each)))


def is_text(text: Any) -> TypeGuard[str]:
    """Whether it is text that can be encoded: it has no lone surrogate."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def message_of(node: Node | LoneNode) -> dict[str, Any] | None:
    """The message that a node was imported of, in the form of OpenAI's chat messages; None where it was none.

    Pictures are parts ``{"type": "image", "image": n}``; ``node.metadata["images"][n]`` says where the n-th is kept.
    """
    return _mapping(node._details.metadata.get(MESSAGE))


def fields_of(node: Node) -> dict[str, Any]:
    """What only the format understands that it was imported from: under that format's name."""
    return _mapping(node._details.metadata.get(FIELDS)) or {}


def _mapping(said: Any) -> dict[str, Any] | None:
    """A mapping of JSON text; None for anything else, which somebody else has put there."""
    try:
        value = json.loads(said) if isinstance(said, str) else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def facts_of(conversation: Conversation, session_id: str, format_name: str, mark: str | None, heads: Mapping[str, bytes]) -> str:
    """What is said of a whole conversation. ``session_id``: what it became; ``heads``: where the import has them."""
    facts = {
        "id": conversation.id,
        "session": session_id,
        "format": format_name,
        "mark": mark,
        "heads": {name: node_id.hex() for name, node_id in heads.items()},
        "title": conversation.title,
        "created_at": conversation.created_at,
        "tools": list(conversation.tools),
        "fields": conversation.fields,
    }
    return to_json({name: value for name, value in facts.items() if value})


def facts_from(said: Any) -> dict[str, Any]:
    """What :func:`facts_of` gave; empty where a session was not imported. A fork reads what is said of what it was made from."""
    return _mapping(said) or {}


def is_own(facts: Mapping[str, Any], session_id: str) -> bool:
    """Whether it is said of that session, and not of one that it was forked from."""
    return bool(facts) and facts.get("session", session_id) == session_id


def created_at_of(session: Session) -> float | None:
    """When the conversation was begun that a session was imported of: seconds since 1970, UTC. None where nothing says it."""
    facts = facts_from(session.annotation(session.root, ANNOTATION))
    began = facts.get("created_at")
    return float(began) if is_own(facts, session.id) and isinstance(began, (int, float)) else None


def title_of(session: Session) -> str | None:
    """The title of the conversation that a session was imported of; None where it has none, or was forked from that."""
    facts = facts_from(session.annotation(session.root, ANNOTATION))
    title = facts.get("title")
    return title if is_own(facts, session.id) and isinstance(title, str) else None
