"""Messages and tools of ``verifiers``, which are those of OpenAI with tool calls that are flat: ``id``, ``name``, ``arguments``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from sessiontree.interchange.conversations import Image, Message, text_of
from sessiontree.interchange.images import as_data_url
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import expect

_WORDS: Final = ("name", "reasoning_content", "tool_call_id")


def from_verifiers(value: Any, place: str, losses: Losses) -> dict[str, Any] | None:
    """A message in the common form, pictures still being URLs; None where it is a fault."""
    if not (expect(value, dict, "a message", place, losses) and expect(value.get("role"), str, "its role", place, losses)):
        return None
    if not expect(value.get("content"), (str, list, type(None)), "its content", place, losses):
        return None
    message = {"role": value["role"], "content": value.get("content")}
    message |= {word: value[word] for word in _WORDS if isinstance(value.get(word), str)}
    calls = value.get("tool_calls")
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [call for each in calls if (call := _call(each)) is not None]
    return message


def _call(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):  # as rows of results have it
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, dict):
        return None
    said = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = said.get("name"), said.get("arguments")
    function = {"name": name if isinstance(name, str) else "", "arguments": arguments if isinstance(arguments, str) else "{}"}
    if isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments)
    return {"id": value["id"] if isinstance(value.get("id"), str) else "", "type": "function", "function": function}


def to_verifiers(message: Message, images: tuple[Image, ...], losses: Losses, place: str) -> dict[str, Any]:
    """A message as ``verifiers`` has it, whatever format it came from."""
    role = message.get("role")
    content = message.get("content")
    if role != "tool" and message.get("name") is not None:
        losses.add("name of a message", place)
    if role == "assistant":
        return _assistant(message, losses, place)
    if role == "developer":
        losses.add("the role developer: it is system", place)
        role = "system"
    elif role not in ("system", "user", "tool"):
        losses.add(f"the role {role}: it is user", place)
        role = "user"
    parts = content if isinstance(content, list) else ()
    made: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    if parts:
        made["content"] = [part for each in parts if (part := _part(each, images, losses, place)) is not None]
    if role == "tool":
        answered = message.get("tool_call_id")
        if not isinstance(answered, str):
            losses.add("a tool result without its call", place)
        made["tool_call_id"] = answered if isinstance(answered, str) else ""
        if isinstance(message.get("name"), str):
            made["name"] = message["name"]
    return made


def _assistant(message: Message, losses: Losses, place: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant"}
    content = message.get("content")
    if content is not None:
        made["content"] = text_of(message)
    if isinstance(content, list):
        losses.add("parts of an assistant's message: their text is one", place)
    if isinstance(message.get("reasoning_content"), str):
        made["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        if count := sum(not (isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)) for call in calls):
            losses.add("tool calls that are no functions", place, count)
        made["tool_calls"] = [
            {"id": call.get("id") or "", "type": "function", "name": said.get("name"), "arguments": said.get("arguments")}
            for call in calls
            if isinstance(call, Mapping) and isinstance(said := call.get("function"), Mapping)
        ]
    return made


def _part(part: Any, images: tuple[Image, ...], losses: Losses, place: str) -> dict[str, Any] | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": as_data_url(images[part["image"]])}}
    if kind == "image_url" and isinstance(part.get("image_url"), Mapping) and isinstance(part["image_url"].get("url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]["url"]}}
    losses.add(f"a part of the type {kind}", place)
    return None


def tools_from(value: Any) -> tuple[dict[str, Any], ...]:
    """Definitions of tools in OpenAI's form; those that are no functions are left out."""
    found = []
    for tool in value if isinstance(value, list) else ():
        if isinstance(tool, dict) and tool.get("type", "function") == "function":
            said = tool["function"] if isinstance(tool.get("function"), dict) else tool
            function = {key: said[key] for key in ("name", "description", "parameters", "strict") if key in said}
            found.append({"type": "function", "function": function})
    return tuple(found)


def tools_to(tools: tuple[Mapping[str, Any], ...]) -> list[dict[str, Any]]:
    """Definitions as ``verifiers`` has them since 0.2."""
    made = []
    for tool in tools:
        if isinstance(said := tool.get("function"), Mapping):
            made.append({"type": "function"} | {key: value for key, value in said.items() if value is not None})
    return made


def number(value: Any) -> float | None:
    """A finite number; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
