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
from typing import Any, Final

from sessiontree.interchange.conversations import Conversation, Message, Turn
from sessiontree.node import Node
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
        if isinstance(answered := message.get("tool_call_id"), str) and is_text(answered):
            metadata["tool_call_id"] = answered
    if images:
        metadata[IMAGES] = list(images)
    if turn.created_at is not None:
        metadata[CREATED_AT] = float(turn.created_at)
    if turn.finish_reason is not None:
        metadata[FINISH_REASON] = turn.finish_reason
    if turn.derived_from:
        metadata[DERIVED_FROM] = list(turn.derived_from)
    if turn.fields:
        metadata[FIELDS] = to_json({format_name: turn.fields})
    return metadata


def _calls(message: Message) -> list[str]:
    """The ids of the tool calls that a message makes; those that have none make no promise."""
    calls = message.get("tool_calls")
    ids = (call.get("id") for call in calls if isinstance(call, Mapping)) if isinstance(calls, (list, tuple)) else ()
    return list(dict.fromkeys(each for each in ids if isinstance(each, str) and is_text(each)))


def is_text(text: str) -> bool:
    """Whether it can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def message_of(node: Node | LoneNode) -> dict[str, Any] | None:
    """The message that a node was imported of, in the form of OpenAI's chat messages; None where it was none.

    Pictures are parts ``{"type": "image", "image": n}``; ``node.metadata["images"][n]`` says where the n-th is kept.
    """
    said = node._details.metadata.get(MESSAGE)
    message: dict[str, Any] | None = json.loads(said) if isinstance(said, str) else None
    return message


def fields_of(node: Node) -> dict[str, Any]:
    """What only the format understands that it was imported from: under that format's name."""
    said = node.metadata.get(FIELDS)
    fields: dict[str, Any] = json.loads(said) if isinstance(said, str) else {}
    return fields


def facts_of(conversation: Conversation, format_name: str, mark: str | None) -> str:
    """What is said of a whole conversation."""
    facts = {
        "format": format_name,
        "mark": mark,
        "title": conversation.title,
        "created_at": conversation.created_at,
        "tools": list(conversation.tools),
        "fields": conversation.fields,
    }
    return to_json({name: value for name, value in facts.items() if value})


def facts_from(said: Any) -> dict[str, Any]:
    """What :func:`facts_of` gave; empty where a session was not imported."""
    facts = json.loads(said) if isinstance(said, str) else {}
    return facts if isinstance(facts, dict) else {}
