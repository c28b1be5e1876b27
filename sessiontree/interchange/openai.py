"""OpenAI chat messages: a JSON line for each conversation, ``{"messages": [...], "tools": [...]}`` or the list of messages alone.

What fine-tuning files, evaluation sets and request logs hold, and what servers take. Messages are as
https://platform.openai.com/docs/api-reference/chat has them; pictures as data URLs become images, and others stay URLs. A line
holds no tree: of one, a line for each branch is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sessiontree.interchange.conversations import Conversation, Image, Message, Tree, Turn, calls_of, messages_of, unanswered
from sessiontree.interchange.formats import LACKING, Format
from sessiontree.interchange.images import as_data_url, from_data_url
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile, expect
from sessiontree.interchange.words import to_json

#: In `fields` of a conversation: that its line was a list; and what else its line said, as a mapping.
_LIST: Final = "list"
_ROW: Final = "row"


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each line, called by its number."""
    for place, line in file.lines(losses):
        if isinstance(line, list) and any(isinstance(each, dict) and "messages" in each for each in line):
            losses.fault("a list of conversations, and not one a line", place)
            continue
        row = {"messages": line} if isinstance(line, list) else line
        if not expect(row, dict, "a conversation", place, losses):
            continue
        messages, tools = row.pop("messages", None), row.get("tools")
        if not (expect(messages, list, "messages", place, losses) and expect(tools, (list, type(None)), "tools", place, losses)):
            continue
        if tools:
            if not all([expect(each, dict, "a tool", place, losses) for each in tools]):
                continue
            del row["tools"]
        name = f"{file.stem}-{place.removeprefix('line ')}"
        yield Conversation(
            id=name,
            mark=file.mark,
            turns=_paired(turns_of(messages, place, losses), losses),
            tools=tuple(tools or ()),
            fields={_LIST: True} if isinstance(line, list) else {_ROW: row} if row else {},
        )


def turns_of(messages: list[Any], line: str, losses: Losses) -> Iterator[Turn]:
    """A turn for each message."""
    for number, message in enumerate(messages):
        place = f"{line}, messages[{number}]"
        if expect(message, dict, "a message", place, losses) and expect(message.get("role"), str, "its role", place, losses):
            content, images = with_images(message.get("content"), place, losses)
            yield Turn(message=message | {"content": content} if "content" in message else message, images=images, place=place)


def _paired(turns: Iterator[Turn], losses: Losses) -> Iterator[Turn]:
    """The turns; tool results that no call before them asked for are told of."""
    called: set[str | None] = set()
    for turn in turns:
        message = turn.message or {}
        called.update(call_id for call_id, _, _ in calls_of(message))
        answers = message.get("tool_call_id")
        if message["role"] == "tool" and not (isinstance(answers, str) and answers in called):
            losses.add("a tool result without its call", turn.place)
        yield turn


def with_images(content: Any, place: str, losses: Losses) -> tuple[Any, tuple[Image, ...]]:
    """Content in the form of :class:`Turn`: parts that are data URLs of pictures refer to the images that come back beside it.

    One whose URL is not as we write it, such as without base64, stays the part it was.
    """
    if not isinstance(content, list):
        return content, ()
    parts, images = [], []
    for number, part in enumerate(content):
        where = f"{place}.content[{number}]"
        if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), int):
            losses.fault("a picture that is a number", where, f"{part['image']}")
            continue
        url = _url(part)
        if url is not None and url.startswith("data:") and "image" not in part:
            image = from_data_url(url, where, losses)
            if image is not None and as_data_url(image) != url:
                losses.add("pictures whose data URLs are not as we write them: they stay names", where)
            elif image is not None:
                rest = {name: value for name, value in part["image_url"].items() if name != "url"}
                beside = {name: value for name, value in part.items() if name not in ("type", "image_url")}
                images.append(image)
                part = beside | {"type": "image", "image": len(images) - 1} | ({"image_url": rest} if rest else {})  # noqa: PLW2901
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
            branches = list(tree.talks())
            if len(branches) > 1:
                losses.add("a tree is written branch by branch: turns that branches share stand in each", conversation.id)
            for branch in branches or [()]:
                messages = [message for turn in branch for message in as_openai(turn)]
                if count := unanswered(messages):
                    losses.add("tool calls of a branch whose results stand in another, or nowhere", conversation.id, count)
                if count := sum(turn.message is None for turn in branch):
                    losses.add("turns that are no messages", conversation.id, count)
                row = {"messages": messages} | ({"tools": list(conversation.tools)} if conversation.tools else {})
                listed = conversation.fields.get(_LIST) and not conversation.tools
                file.write(to_json(messages if listed else row | conversation.fields.get(_ROW, {})) + "\n")


def as_openai(turn: Turn) -> list[Message]:
    """The messages of a turn with its pictures as data URLs."""
    return [
        {**message, "content": with_urls(message["content"], turn)} if "content" in message else message
        for message in messages_of(turn)
    ]


def with_urls(content: Any, turn: Turn) -> Any:
    """What :func:`with_images` took apart: content with the turn's pictures as data URLs."""
    return [_with_url(part, turn) for part in content] if isinstance(content, list) else content


def _with_url(part: Any, turn: Turn) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), int):
        url = {"url": as_data_url(turn.images[part["image"]])} | part.get("image_url", {})
        return {name: value for name, value in part.items() if name != "image"} | {"type": "image_url", "image_url": url}
    return part


FORMAT: Final = Format(
    "openai", "OpenAI chat messages, a conversation a line (JSONL)", ".jsonl", read, write, lacks=frozenset(LACKING)
)
