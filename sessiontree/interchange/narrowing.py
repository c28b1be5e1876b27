"""Messages of one format on their way to another that has places for less: in one shape, and what has no place counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from sessiontree.interchange import words
from sessiontree.interchange.conversations import Message, parts_of
from sessiontree.interchange.losses import Losses

#: Parts of messages that every format can write; others are for each to count.
_PARTS: Final = ("text", "image", "image_url")
_OF_PARTS: Final = frozenset({"type", "text", "image", "image_url", "url"})
_OF_CALLS: Final = frozenset({"id", "type", "function", "custom", "name", "arguments", "input", "index"})
_OF_ASSISTANTS: Final = ("tool_calls", "reasoning_content")


def narrowed(message: Message, keys: Collection[str] | None, place: str, losses: Losses) -> Message:
    """A message as a format takes it that has places for ``keys``; None: for anything, and the message is as it was.

    Its content is text, None or a list of mappings, and reasoning has one name. What it has beside ``keys``, and what its parts and
    tool calls have beside what is usual, is a loss.
    """
    if keys is None:
        return message
    message = dict(message)
    if isinstance(message.get("reasoning"), str) and "reasoning_content" not in message:
        message["reasoning_content"] = message.pop("reasoning")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    elif content is not None and not isinstance(content, str):
        losses.add("content that is neither text nor a list, written as its JSON", place)
        message["content"] = words.to_json(content)
    _count((key for key, value in message.items() if value is not None), keys, "a message", place, losses)
    for key in _OF_ASSISTANTS:
        if message.get(key) and message.get("role") != "assistant":
            losses.add(f"{key} of a message of the role {message.get('role')}", place)
    for part in parts_of(message):
        _count(part if part.get("type") in _PARTS else (), _OF_PARTS, "a part", place, losses)
        _count(_mapping(part.get("image_url")), _OF_PARTS, "a part", place, losses)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        _count({**_mapping(call), **_mapping(_mapping(call).get("function"))}, _OF_CALLS, "a tool call", place, losses)
        if not isinstance(_mapping(call).get("id"), str):
            losses.add("that a tool call has no id", place)
    return message


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(found: Iterable[str], known: Collection[str], what: str, place: str, losses: Losses) -> None:
    for key in sorted({*found}.difference(known)):
        losses.add(f"{key} of {what}", place)
