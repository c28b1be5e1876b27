"""Messages that are one list of blocks (text, reasoning, calls, pictures, results), as coding agents write them.

:func:`take_apart` makes the normal form of them, :func:`put_together` the blocks again. Which block stood where, and what else it
said, is a *layout*: a list of a mapping for each block, in order, of ``of``: "content" for the next part of the content,
"reasoning" for the next ``length`` characters of it, "call" for the next tool call, each with what ``also`` stood in the block; or
"block" with a whole ``block`` that no part of the normal form is like. So texts and pictures are kept once. A layout that is the
usual one is left out: reasoning, then content, then calls, with nothing else in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from sessiontree.interchange.conversations import Image, Message, Turn
from sessiontree.interchange.images import from_base64, to_base64
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import expect, parsed

Block = dict[str, Any]
Layout = list[dict[str, Any]]

_JSON: Final = json.JSONEncoder(ensure_ascii=False)
#: Between the reasoning of one block and the next.
_BETWEEN: Final = "\n\n"
#: Types that mean something in the normal form, or that only the model's maker can read: one that is unlike it is kept aside.
_KEPT_ASIDE: Final = ("text", "thinking", "redacted_thinking", "image", "image_url", "tool_result")


@attrs.frozen
class Form:
    """How a format writes blocks.

    ``call``: the type of a tool call, and ``arguments`` the key of what it is called with. ``take_image(block)``: takes base64 and
    MIME type of a picture out of the mapping, or its URL; None, and nothing taken, where it is another kind.
    ``image(base64, mime_type)``, ``image_url(url)``: such blocks; None where there is none. ``results``: whether results of tools
    are blocks, of type "tool_result", rather than messages.
    """

    call: str
    arguments: str
    take_image: Callable[[Block], tuple[str, str] | str | None]
    image: Callable[[str, str], Block]
    image_url: Callable[[str], Block | None] = lambda _: None
    results: bool = False


@attrs.define
class Apart:
    """What a list of blocks is in the normal form: parts of ``content``, texts of ``reasoning``, ``calls``, and the layout."""

    content: list[Block] = attrs.Factory(list)
    reasoning: list[str] = attrs.Factory(list)
    calls: list[Block] = attrs.Factory(list)
    layout: Layout = attrs.Factory(list)

    def say(self, entry: dict[str, Any], block: Block) -> None:
        """What a block is, and what is left of it."""
        also = {key: value for key, value in block.items() if key != "type"}
        self.layout.append(entry | ({"also": also} if also else {}))

    def message(self, role: str) -> dict[str, Any]:
        """A message of it. What an assistant or a tool says is text where it is one text, and None where it is nothing."""
        content: Any = self.content
        if role in ("assistant", "tool"):
            one = len(content) == 1 and content[0]["type"] == "text"
            content = (content[0]["text"] if one else content) if content else None
        message: dict[str, Any] = {"role": role, "content": content}
        if reasoning := _BETWEEN.join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def take_apart(blocks: list[Any], form: Form, images: list[Image], place: str, losses: Losses) -> Apart:
    """Blocks in the normal form; the bytes of pictures go to the end of ``images``."""
    apart = Apart()
    for number, block in enumerate(blocks):
        at = f"{place}[{number}]"
        if not expect(block, dict, "a block", at, losses):
            continue
        kind, rest = block.get("type"), dict(block)
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            text = rest.pop("thinking")
            apart.reasoning.append(text)
            apart.say({"of": "reasoning", "length": len(text)}, rest)
        elif kind == form.call and _is_call(block, form):
            function = {"name": rest.pop("name"), "arguments": _JSON.encode(rest.pop(form.arguments))}
            apart.calls.append({"id": rest.pop("id"), "type": "function", "function": function})
            apart.say({"of": "call"}, rest)
        elif kind == "tool_result" and form.results and isinstance(block.get("tool_use_id"), str):
            entry = {"of": "content"}
            apart.content.append(_result(rest, entry, form, images, at, losses))
            apart.say(entry, rest)
        elif kind == form.call:
            apart.layout.append({"of": "block", "block": block})
        else:
            _take_part(block, form, apart, images, at, losses)
    return apart


def _take_part(block: Block, form: Form, apart: Apart, images: list[Image], place: str, losses: Losses) -> None:
    """A block that is a part of the content, or kept aside."""
    kind, rest = block.get("type"), dict(block)
    part: Block | None = None
    if kind == "text" and isinstance(block.get("text"), str):
        part = {"type": "text", "text": rest.pop("text")}
    elif kind == "image" and (taken := form.take_image(rest)) is not None:
        if isinstance(taken, str):
            part = {"type": "image_url", "image_url": {"url": taken}}
        else:
            image = from_base64(*taken, place, losses)
            if image is not None and to_base64(image) == taken[0]:  # otherwise it could not be written as it was
                images.append(image)
                part = {"type": "image", "image": len(images) - 1}
    elif isinstance(kind, str) and kind not in _KEPT_ASIDE:
        part, rest = block, {}
    if part is None:
        apart.layout.append({"of": "block", "block": block})
    else:
        apart.content.append(part)
        apart.say({"of": "content"}, rest)


def _result(rest: Block, entry: dict[str, Any], form: Form, images: list[Image], place: str, losses: Losses) -> Block:
    """The part that a tool's result is. What it says is taken out of the block; ``entry`` gets the layout of its own blocks."""
    part = {"type": "tool_result", "tool_call_id": rest.pop("tool_use_id"), "content": ""}
    content = rest.get("content")
    if isinstance(content, (str, list)):
        del rest["content"]
        part["content"] = content
    elif "content" not in rest:
        entry["layout"] = None
    if isinstance(content, list):
        inner = Apart()
        for number, block in enumerate(content):
            at = f"{place}.content[{number}]"
            if expect(block, dict, "a block", at, losses):
                _take_part(block, form, inner, images, at, losses)
        part["content"] = inner.content
        if inner.layout != usual_layout({"content": inner.content}):
            entry["layout"] = inner.layout
    return part


def _is_call(block: Block, form: Form) -> bool:
    return isinstance(block.get("id"), str) and isinstance(block.get("name"), str) and isinstance(block.get(form.arguments), dict)


def usual_layout(message: Message) -> Layout:
    """The layout of a message of which nothing else is known."""
    layout: Layout = []
    if reasoning := message.get("reasoning_content"):
        layout.append({"of": "reasoning", "length": len(reasoning)})
    layout += [{"of": "content"}] * (0 if message.get("content") == "" and message.get("role") != "tool" else len(_parts(message)))
    return layout + [{"of": "call"}] * len(message.get("tool_calls") or ())


def _parts(message: Message) -> Sequence[Any]:
    """The parts of its content; what a tool gave back is one part, or as many as it holds already."""
    content = message.get("content")
    parts: Sequence[Any] = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else ()
    )
    if message.get("role") == "tool" and not any(_is_result(part) for part in parts):
        return [{"type": "tool_result", "tool_call_id": message.get("tool_call_id"), "content": content}]
    return parts


def _is_result(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "tool_result"


def put_together(turn: Turn, message: Message, layout: Layout | None, form: Form, losses: Losses) -> list[Block]:
    """The blocks of a message of a turn; where ``layout`` is None, the usual ones.

    Parts that the format has no block for are a loss, but for those that came from the format itself, as ``Turn.fields`` tell.
    """
    return list(_blocks(turn, message, usual_layout(message) if layout is None else layout, form, losses))


def _blocks(turn: Turn, message: Message, layout: Layout, form: Form, losses: Losses) -> Iterator[Block]:
    parts, calls = iter(_parts(message)), iter(message.get("tool_calls") or ())
    reasoning, at = message.get("reasoning_content") or "", 0
    for entry in layout:
        also = entry.get("also", {})
        match entry["of"]:
            case "content":
                if (made := _block(turn, next(parts), entry, form, losses)) is not None:
                    yield {**made, **also}
            case "reasoning":
                yield {"type": "thinking", "thinking": reasoning[at : at + entry["length"]], **also}
                at += entry["length"] + len(_BETWEEN)
            case "call":
                if (made := _call(turn, next(calls), form, losses)) is not None:
                    yield {**made, **also}
            case _:
                yield entry["block"]


def _call(turn: Turn, call: Any, form: Form, losses: Losses) -> Block | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        losses.add("tool calls that are no functions", str(turn.id))
        return None
    text = function.get("arguments")
    try:
        arguments = parsed(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        losses.add("arguments of tool calls that are no JSON mapping stand in one of their text", str(turn.id))
        arguments = {"arguments": text}
    elif _JSON.encode(arguments) != text:
        losses.add("how the JSON of a tool call's arguments is written", str(turn.id))
    name = function.get("name")
    return {"type": form.call, "id": str(call.get("id") or ""), "name": str(name or ""), form.arguments: arguments}


def _block(turn: Turn, part: Any, entry: Mapping[str, Any], form: Form, losses: Losses) -> Block | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    made: Block | None = None
    match kind:
        case "text" if isinstance(part.get("text"), str):
            made = {"type": "text", "text": part["text"]}
        case "image":
            image = turn.images[part["image"]]
            made = form.image(to_base64(image), image.mime_type)
        case "image_url" if isinstance(part.get("image_url"), Mapping):
            made = form.image_url(str(part["image_url"].get("url")))
        case "tool_result" if form.results:
            made = _result_block(turn, part, entry.get("layout", ...), form, losses)
        case _ if kind is not None and turn.fields:
            return dict(part)
        case "refusal":
            losses.add("a refusal, written as text", str(turn.id))
            made = {"type": "text", "text": str(part.get("refusal"))}
    if made is None:
        losses.add(f"parts of content of type {kind}", str(turn.id))
    return made


def _result_block(turn: Turn, part: Mapping[str, Any], layout: Any, form: Form, losses: Losses) -> Block:
    made: Block = {"type": "tool_result", "tool_use_id": str(part.get("tool_call_id") or "")}
    content = part.get("content")
    if isinstance(content, str) and layout is not None:
        made["content"] = content
    elif isinstance(content, (list, tuple)):
        made["content"] = put_together(turn, {"content": content}, None if layout is ... else layout, form, losses)
    return made
