"""OpenAI chat messages: a JSON line for each conversation, ``{"messages": [...], "tools": [...]}`` or the list of messages alone.

What fine-tuning files, evaluation sets and request logs hold, and what servers take. Messages are as
https://platform.openai.com/docs/api-reference/chat has them; pictures as data URLs become images, and others stay URLs. A line
holds no tree: of one, a line for each branch is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sessiontree.interchange.conversations import Conversation, Image, Message, Tree, Turn
from sessiontree.interchange.formats import Format
from sessiontree.interchange.images import as_data_url, from_data_url
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile, expect

_LIST: Final = "list"  # in `fields` of a conversation that was no mapping


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each line, called by its number."""
    for place, line in file.lines(losses):
        row = {"messages": line} if isinstance(line, list) else line
        if not expect(row, dict, "a conversation", place, losses):
            continue
        messages, tools = row.pop("messages", None), row.pop("tools", None)
        if not (expect(messages, list, "messages", place, losses) and expect(tools, (list, type(None)), "tools", place, losses)):
            continue
        fields: dict[str, Any] = {_LIST: True} if isinstance(line, list) else row
        if tools == []:
            fields["tools"] = []
        name = f"{file.stem}-{place.removeprefix('line ')}"
        yield Conversation(
            id=name, mark=file.mark, turns=turns_of(messages, place, losses), tools=tuple(tools or ()), fields=fields
        )


def turns_of(messages: list[Any], line: str, losses: Losses) -> Iterator[Turn]:
    """A turn for each message."""
    for number, message in enumerate(messages):
        place = f"{line}, messages[{number}]"
        if expect(message, dict, "a message", place, losses) and expect(message.get("role"), str, "its role", place, losses):
            content, images = with_images(message.get("content"), place, losses)
            yield Turn(message=message | {"content": content} if "content" in message else message, images=images, place=place)


def with_images(content: Any, place: str, losses: Losses) -> tuple[Any, tuple[Image, ...]]:
    """Content in the form of :class:`Turn`: parts that are data URLs of pictures refer to the images that come back beside it."""
    if not isinstance(content, list):
        return content, ()
    parts, images = [], []
    for number, part in enumerate(content):
        url = _url(part)
        if url is not None and url.startswith("data:"):
            image = from_data_url(url, f"{place}.content[{number}]", losses)
            if image is not None:
                images.append(image)
                rest = {name: value for name, value in part["image_url"].items() if name != "url"}
                part = {"type": "image", "image": len(images) - 1} | ({"image_url": rest} if rest else {})  # noqa: PLW2901
        parts.append(part)
    return parts, tuple(images)


def _url(part: Any) -> str | None:
    if isinstance(part, Mapping) and part.get("type") == "image_url" and isinstance(part.get("image_url"), Mapping):
        url = part["image_url"].get("url")
        return url if isinstance(url, str) else None
    return None


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """A line for each branch."""
    with path.open("w", encoding="utf-8") as file:
        for conversation in conversations:
            tree = Tree(conversation)
            branches = list(tree.branches())
            if len(branches) > 1:
                losses.add("a tree is written branch by branch: turns that branches share stand in each", conversation.id)
            for branch in branches or [()]:
                messages = [as_openai(turn, losses) for turn in branch if turn.message is not None]
                if count := len(branch) - len(messages):
                    losses.add("turns that are no messages", conversation.id, count)
                row = {"messages": messages} | ({"tools": list(conversation.tools)} if conversation.tools else {})
                fields = conversation.fields
                value = messages if fields == {_LIST: True} and not conversation.tools else row | fields
                file.write(json.dumps(value, ensure_ascii=False) + "\n")


def as_openai(turn: Turn, losses: Losses) -> Message:
    """A message with its pictures as data URLs."""
    message = dict(turn.message or {})
    if isinstance(content := message.get("content"), list):
        message["content"] = [_with_url(part, turn) for part in content]
    return message


def _with_url(part: Any, turn: Turn) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "image":
        image = turn.images[part["image"]]
        return {"type": "image_url", "image_url": {"url": as_data_url(image)} | part.get("image_url", {})}
    return part


FORMAT: Final = Format("openai", "OpenAI chat messages, a conversation a line (JSONL)", ".jsonl", read, write)
