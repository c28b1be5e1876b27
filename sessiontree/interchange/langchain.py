"""LangChain's messages as LangGraph keeps them: the name of a class, and a mapping of what it holds. LangChain is not needed.

A message is read into the normal form, and what that does not say goes to ``fields["langchain"]``: entries that a message made of
the normal form alone would not have, or have otherwise. So each comes back as it was, and text and pictures are kept once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sessiontree.errors import LimitExceeded
from sessiontree.interchange.conversations import Image, Message, Turn
from sessiontree.interchange.images import as_data_url, from_base64, from_data_url, to_base64
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.plain import Foreign, from_plain, to_plain
from sessiontree.interchange.source import parsed

_PYDANTIC: Final = 5  # the code under which LangGraph's msgpack has models of pydantic
_BUILT: Final = "model_validate_json"
_MODULES: Final = {
    "HumanMessage": "human",
    "AIMessage": "ai",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
    "ChatMessage": "chat",
    "RemoveMessage": "modifier",
}
_ROLES: Final = {
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "tool",
}
_CLASSES: Final = {"user": "HumanMessage", "assistant": "AIMessage", "system": "SystemMessage", "tool": "ToolMessage"}
_DEVELOPER: Final = "__openai_role__"  # where LangChain says that a system message is a developer's
_THOUGHT: Final = {"thinking": "thinking", "reasoning": "reasoning"}  # blocks of reasoning, and where their text is


def as_message(value: Any) -> tuple[str, str, dict[str, Any]] | None:
    """(module, class, entries) of a value that is a message of LangChain's; None for others."""
    match value:
        case Foreign("ext", [5, [str() as module, str() as name, dict() as entries, "model_validate_json"]]):
            kind = name.removesuffix("Chunk")
            if (
                kind in _MODULES
                and module == f"langchain_core.messages.{_MODULES[kind]}"
                and all(isinstance(key, str) for key in entries)
            ):
                return module, name, entries
    return None


def read_message(value: Foreign, turn: Mapping[str, Any], place: str, losses: Losses) -> Turn:
    """The turn of a message; ``turn``: what else is said of it."""
    found = as_message(value)
    assert found is not None
    module, name, entries = found
    kind = name.removesuffix("Chunk")
    if kind == "RemoveMessage":
        return Turn(role="remove", fields={"langchain": {"removed": _plain(entries, place, losses)}}, place=place, **turn)
    role = _ROLES.get(kind) or (entries["role"] if isinstance(entries.get("role"), str) else "user")
    more = entries.get("additional_kwargs")
    more = more if isinstance(more, dict) else {}
    if role == "system" and more.get(_DEVELOPER) == "developer":
        role = "developer"
    images: list[Image] = []
    content, thought, blocks = _content(entries.get("content"), images, place, losses)
    message: dict[str, Any] = {"role": role, "content": content}
    if isinstance(entries.get("name"), str):
        message["name"] = entries["name"]
    if role == "assistant":
        if isinstance(said := more.get("reasoning_content"), str) and thought is None:
            thought = said
        if thought is not None:
            message["reasoning_content"] = thought
        if calls := _calls(entries):
            message["tool_calls"] = calls
    if role == "tool" and isinstance(entries.get("tool_call_id"), str):
        message["tool_call_id"] = entries["tool_call_id"]
    made_module, made_name, made = _made(message, images, blocks, Losses(losses.file))
    rest: dict[str, Any] = {}
    if (made_module, made_name) != (module, name):
        rest["class"] = [module, name]
    if changed := {key: each for key, each in entries.items() if key not in made or not _same(made[key], each)}:
        rest["set"] = _plain(changed, place, losses)
    if missing := [key for key in made if key not in entries]:
        rest["unset"] = missing
    if blocks:
        rest["blocks"] = blocks
    return Turn(message=message, images=tuple(images), fields={"langchain": rest}, place=place, **turn)


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal and of the same types: 1, 1.0 and True are three."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    try:
        return json.dumps(to_plain(one), sort_keys=True) == json.dumps(to_plain(other), sort_keys=True)
    except LimitExceeded:
        return False


def _plain(value: Any, place: str, losses: Losses) -> Any:
    try:
        return to_plain(value)
    except LimitExceeded as error:
        losses.fault("nested too deep", place, str(error))
        return {}


def _calls(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, those with arguments that are no JSON after the others."""
    calls = []
    for each in [*_list(entries.get("tool_calls")), *_list(entries.get("invalid_tool_calls"))]:
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            arguments = each.get("args")
            try:
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError):
                text = repr(arguments)
            function = {"name": each["name"], "arguments": text}
            calls.append({"id": each.get("id"), "type": "function", "function": function})
    return calls


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


Content = str | list[dict[str, Any]] | None
_Blocks = dict[str, Any]  # by their number, what the parts of the normal form do not say of them


def _content(value: Any, images: list[Image], place: str, losses: Losses) -> tuple[Content, str | None, _Blocks]:
    """Content in the normal form, what was thought before it, and what is to be known to put it back."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None, None, {}
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    blocks: _Blocks = {}
    for number, block in enumerate(value):
        known = dict(block) if isinstance(block, dict) and all(isinstance(key, str) for key in block) else None
        kind = known.get("type") if known is not None else None
        thought = _THOUGHT.get(kind) if isinstance(kind, str) else None
        if isinstance(block, str):
            parts.append({"type": "text", "text": block})
            blocks[str(number)] = {"is": "text"}
        elif known is not None and thought is not None and isinstance(known.get(thought), str):
            thoughts.append(text := known.pop(thought))
            blocks[str(number)] = {"is": "thought", "length": len(text), "rest": _plain(known, place, losses)}
        elif known is None or kind in ("tool_use", "tool_call") or _plain(known, place, losses) != known:
            blocks[str(number)] = {
                "is": "beside",
                "rest": _plain(block, place, losses),
            }  # said in tool_calls too, or no part at all
        else:
            part, rest = _part(known, images, losses.file)
            parts.append(part)
            if rest is not None:
                blocks[str(number)] = {"is": "picture", "rest": rest}
    return parts, "".join(thoughts) if thoughts else None, blocks


#: Where pictures lie in blocks of a type: the keys down to it, and where what kind it is stands.
_PLACES: Final[dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]]] = {
    "image_url": ((("image_url", "url"), ()), (("image_url",), ())),
    "image": (
        (("source", "data"), ("source", "media_type")),
        (("source", "url"), ()),
        (("base64",), ("mime_type",)),
        (("data",), ("mime_type",)),
        (("url",), ()),
    ),
}


def _part(block: dict[str, Any], images: list[Image], file: str) -> tuple[dict[str, Any], Any]:
    """A block as a part of the normal form, and where that says less, the block without its picture and the place of that."""
    for where, kind_at in _PLACES.get(block["type"] if isinstance(block.get("type"), str) else "", ()):
        payload = _at(block, where)
        if not isinstance(payload, str):
            continue
        aside = Losses(file, salvage=True)  # what is no base64 stays the text that it is
        if payload.startswith("data:"):
            image = from_data_url(payload, "", aside)
            image = image if image is not None and as_data_url(image) == payload else None
        elif where[-1] in ("data", "base64"):
            kind = _at(block, kind_at)
            image = from_base64(payload, kind if isinstance(kind, str) else "application/octet-stream", "", aside)
            image = image if image is not None and to_base64(image) == payload else None
            if image is None:
                return block, None
        else:
            image = None
        if image is not None:
            part: dict[str, Any] = {"type": "image", "image": len(images)}
            images.append(image)
            if where == ("image_url", "url") and len(block["image_url"]) > 1:
                part["image_url"] = {key: each for key, each in block["image_url"].items() if key != "url"}
        elif payload.startswith("data:"):
            return block, None
        else:
            part = {"type": "image_url", "image_url": {"url": payload}}
        if _block(part, images) == block:
            return part, None
        return part, {"at": list(where), "block": _without(block, where)}
    return block, None


def _at(block: Any, where: Sequence[str]) -> Any:
    for key in where:
        block = block.get(key) if isinstance(block, Mapping) else None
    return block


def _without(block: dict[str, Any], where: Sequence[str]) -> dict[str, Any]:
    return block | {where[0]: _without(block[where[0]], where[1:]) if len(where) > 1 else None}


def _with(block: Any, where: Sequence[str], value: Any) -> Any:
    return value if not where else {**block, where[0]: _with(block[where[0]], where[1:], value)}


def _block(part: Mapping[str, Any], images: Sequence[Image]) -> dict[str, Any]:
    """A part as a block in OpenAI's form, which LangChain takes for all models."""
    if part.get("type") == "image" and isinstance(part.get("image"), int):
        return {"type": "image_url", "image_url": {"url": as_data_url(images[part["image"]]), **part.get("image_url", {})}}
    return from_plain(dict(part))  # type: ignore[no-any-return]


def _blocks(content: Any, thought: str | None, images: Sequence[Image], blocks: Mapping[str, Any]) -> Any:
    """Content as LangChain has it: the other way of :func:`_content`."""
    if content is None or isinstance(content, str):
        return content or ""
    made: list[Any] = []
    parts, thought = iter(content), thought or ""
    for number in range(len(content) + sum(each["is"] in ("thought", "beside") for each in blocks.values())):
        said = blocks.get(str(number), {"is": ""})
        if said["is"] == "thought":
            rest = from_plain(said["rest"])
            made.append(rest | {_THOUGHT[rest["type"]]: thought[: said["length"]]})
            thought = thought[said["length"] :]
        elif said["is"] == "beside":
            made.append(from_plain(said["rest"]))
        else:
            part = next(parts)
            made.append(_picture(part, images, said["rest"]) if said["is"] == "picture" else _block(part, images))
            if said["is"] == "text":
                made[-1] = made[-1]["text"]
    return made


def _picture(part: Mapping[str, Any], images: Sequence[Image], rest: Mapping[str, Any]) -> Any:
    if part["type"] == "image_url":
        payload = part["image_url"]["url"]
    else:
        image = images[part["image"]]
        payload = to_base64(image) if rest["at"][-1] in ("data", "base64") else as_data_url(image)
    return _with(from_plain(rest["block"]), rest["at"], payload)


def _made(message: Message, images: Sequence[Image], blocks: Mapping[str, Any], losses: Losses) -> tuple[str, str, dict[str, Any]]:
    """(module, class, entries) of a message, of the normal form alone."""
    role = message["role"]
    name = _CLASSES.get("system" if role == "developer" else role, "ChatMessage")
    thought = message.get("reasoning_content")
    inside = any(each["is"] == "thought" for each in blocks.values())
    more: dict[str, Any] = {_DEVELOPER: "developer"} if role == "developer" else {}
    entries: dict[str, Any] = {
        "content": _blocks(message.get("content"), thought if inside else None, images, blocks),
        "additional_kwargs": more,
        "response_metadata": {},
        "type": _MODULES[name],
        "name": message.get("name"),
        "id": None,
    }
    if name == "ChatMessage":
        entries["role"] = role
    if name == "AIMessage":
        if thought is not None and not inside:
            more["reasoning_content"] = thought
        calls, invalid = [], []
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                losses.add("tool calls that are no functions", "")
                continue
            text = function.get("arguments")
            made = {"name": function.get("name"), "args": _arguments(text, losses), "id": call.get("id")}
            if made["args"] is not None:
                calls.append(made | {"type": "tool_call"})
            else:
                invalid.append(made | {"args": text, "error": None, "type": "invalid_tool_call"})
        entries |= {"tool_calls": calls, "invalid_tool_calls": invalid, "usage_metadata": None}
    if name == "ToolMessage":
        entries |= {"tool_call_id": message.get("tool_call_id") or "", "artifact": None, "status": "success"}
    return f"langchain_core.messages.{_MODULES[name]}", name, entries


def _arguments(text: Any, losses: Losses) -> dict[str, Any] | None:
    """What arguments say; None where they are no JSON object, or one that msgpack cannot hold."""
    try:
        value = parsed(text)
        if not isinstance(value, dict) or to_plain(value) != value:
            return None
    except (TypeError, ValueError, RecursionError, LimitExceeded):
        return None
    if json.dumps(value, ensure_ascii=False) != text:
        losses.add("how the JSON of a tool call's arguments is written", str(text)[:40])
    return value


def write_message(turn: Turn, losses: Losses) -> Foreign:
    """The message of a turn: the one it was read from, or one of its normal form."""
    kept = turn.fields.get("langchain")
    if kept is not None and "removed" in kept:
        return _value("langchain_core.messages.modifier", "RemoveMessage", from_plain(kept["removed"]))
    message = turn.message
    assert message is not None
    if kept is None:
        kept, message = {"set": {"id": turn.id}}, _encodable(message)
        if message != turn.message:
            losses.add("lone surrogates in text, which msgpack cannot hold", str(turn.id))
    module, name, entries = _made(message, turn.images, kept.get("blocks", {}), losses)
    module, name = kept.get("class", (module, name))
    entries = {key: each for key, each in entries.items() if key not in kept.get("unset", ())}
    return _value(module, name, entries | from_plain(kept.get("set", {})))


def _encodable(value: Any) -> Any:
    """JSON with U+FFFD where its text has lone surrogates."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case Mapping():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
    return value


def _value(module: str, name: str, entries: dict[str, Any]) -> Foreign:
    return Foreign("ext", [_PYDANTIC, [module, name, entries, _BUILT]])
