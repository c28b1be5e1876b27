"""Messages to turns, in ChatML as Qwen's models know it. What users say is text and never becomes a control token.

A turn ends where somebody else speaks: the assistant's holds its text alone, and the markers around it belong to its neighbours,
so that a reply is a turn as it was generated. The one in front ends with ``<|im_start|>assistant`` and a line break; the one behind
begins by closing it, which depends on how the reply ended and is left to :func:`closing`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import attrs
from qwen_reference import IMAGE_PAD, MERGE, VISION_END, VISION_START

from mini_scheduler import schemas
from mini_scheduler.failures import Refused
from mini_scheduler.text import IM_END, IM_START, encode
from sessiontree import MediaItem

Role = Literal["system", "user", "assistant", "tool"]
_LINE_BREAK: Final = "\n"
_THOUGHT_ENDS: Final = "</think>"


@attrs.frozen
class Said:
    """One message, whoever's: texts, and pictures where they stand."""

    role: Role
    parts: tuple[str | MediaItem, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@attrs.frozen
class Turn:
    """What becomes a node. Spans begin at the turn's start.

    ``text``: of an assistant's turn, what it said; None for the others. ``after_reply``: whether it stands behind an assistant's
    turn, which it is to close.
    """

    role: Role
    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    text: str | None = None
    after_reply: bool = False

    @property
    def shown(self) -> Turn:
        """As a template shows it once the user has spoken again: without what the assistant thought."""
        shown = self.text if self.text is None else without_thought(self.text)
        return self if shown is None or shown == self.text else assistants(shown)


def assistants(text: str) -> Turn:
    return Turn("assistant", tuple(encode(text)), text=text)


def without_thought(text: str) -> str:
    """Qwen3's rule: what stands behind the last ``</think>`` and the empty lines after it."""
    return text.rpartition(_THOUGHT_ENDS)[2].lstrip(_LINE_BREAK) if _THOUGHT_ENDS in text else text


def closing(last_token: int) -> list[int]:
    """What comes behind an assistant's turn, given the last token of its path. A reply that was cut off lacks its end."""
    return [*([] if last_token == IM_END else [IM_END]), *encode(_LINE_BREAK)]


def render(messages: Sequence[Said], *, after_reply: bool = False) -> list[Turn]:
    """The turns of a conversation, up to where the assistant speaks next. ``after_reply``: whether one stands before it all."""
    turns: list[Turn] = []

    def end(role: Role | None) -> None:
        turns.append(attrs.evolve(_turn(role or "system", parts), after_reply=turns[-1].text is not None if turns else after_reply))
        parts.clear()

    parts: list[int | str | MediaItem] = []
    role: Role | None = None  # whose the parts are
    for message in _tools_together(messages):
        if message.role == "assistant":
            parts += [IM_START, "assistant\n"]
            end(role)
            turns.append(assistants(message.text))
            role = None
            continue
        if role is not None and (role != message.role or role == "user"):  # each question begins a turn of its own
            end(role)
        role = message.role
        name = "user" if role == "tool" else role
        parts += [IM_START, f"{name}\n", *message.parts, IM_END, _LINE_BREAK]
    parts += [IM_START, "assistant\n"]
    end(role)
    return turns


def _turn(role: Role, parts: Iterable[int | str | MediaItem]) -> Turn:
    ids: list[int] = []
    media: list[MediaItem] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part  # texts that meet are one text: a tokenizer would not cut there
            continue
        ids += encode(text)
        text = ""
        if isinstance(part, int):
            ids.append(part)
        else:
            count = num_placeholders(part)
            media.append(part.with_spans([(len(ids) + 1, count)]))
            ids += [VISION_START, *[IMAGE_PAD] * count, VISION_END]
    return Turn(role, tuple(ids + encode(text)), tuple(media))


def num_placeholders(item: MediaItem) -> int:
    assert item.grid_thw is not None
    time, height, width = item.grid_thw
    return time * height * width // MERGE**2


def _tools_together(messages: Iterable[Said]) -> Iterator[Said]:
    """Results of tools that follow each other are one message, which Qwen's template gives to the user."""
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.text}\n</tool_response>")
            continue
        if results:
            yield Said("tool", (_LINE_BREAK.join(results),))
            results = []
        yield message
    if results:
        yield Said("tool", (_LINE_BREAK.join(results),))


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


# --- from what clients send ---------------------------------------------------------------------------------------------
def uploads_of(body: schemas.ChatCompletion | schemas.CreateResponse) -> list[str]:
    """The pictures of a body, in order."""
    found: list[str] = []
    messages = body.messages if isinstance(body, schemas.ChatCompletion) else body.input
    for message in () if isinstance(messages, str) else messages:
        for part in getattr(message, "content", None) or ():
            if isinstance(part, schemas.ImagePart):
                found.append(part.image_url.url)
            elif isinstance(part, schemas.InputImage):
                found.append(part.image_url)
    return found


def from_messages(messages: Iterable[schemas.Message], pictures: Iterable[MediaItem]) -> list[Said]:
    """``pictures``: those of :func:`uploads_of`, in its order."""
    shown = iter(pictures)
    said = []
    for message in messages:
        role: Role = "system" if message.role == "developer" else message.role
        parts = list(_parts(message.content or "", shown))
        if isinstance(message, schemas.AssistantMessage):
            calls = [_call(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            parts = [_LINE_BREAK.join([*([text] if (text := "".join(map(str, parts))) else []), *calls])]
        said.append(Said(role, tuple(parts)))
    return said


def from_items(items: str | Iterable[schemas.InputItem], pictures: Iterable[MediaItem]) -> list[Said]:
    """Input of a response. What an assistant thought, said and called, one behind the other, is one message."""
    if isinstance(items, str):
        return [Said("user", (items,))]
    shown = iter(pictures)
    said: list[Said] = []
    spoken: list[str] = []  # by the assistant, since somebody else did

    def end() -> None:
        if spoken:
            said.append(Said("assistant", ("".join(spoken),)))
            spoken.clear()

    before: schemas.InputItem | None = None
    for item in items:
        if isinstance(item, schemas.FunctionCallOutput):
            end()
            said.append(Said("tool", (item.output,)))
        elif isinstance(item, schemas.MessageItem) and item.role != "assistant":
            end()
            said.append(Said("user" if item.role == "user" else "system", tuple(_parts(item.content, shown))))
        else:
            between = [_LINE_BREAK] if spoken and not isinstance(before, schemas.Reasoning) else []
            spoken += [*between, _assistants_text(item, shown)]
        before = item
    end()
    return said


def _assistants_text(item: schemas.InputItem, shown: Iterator[MediaItem]) -> str:
    if isinstance(item, schemas.Reasoning):
        thought = _LINE_BREAK.join(part.text for part in (*item.summary, *(item.content or ())))
        return f"<think>\n{thought}\n</think>\n\n"
    if isinstance(item, schemas.FunctionCall):
        return _call(item.name, item.arguments)
    assert isinstance(item, schemas.MessageItem)
    parts = tuple(_parts(item.content, shown))
    if not all(isinstance(part, str) for part in parts):
        raise Refused(400, "an assistant's message shows no pictures", param="input")
    return Said("assistant", parts).text


def _parts(content: str | Sequence[schemas.Part | schemas.Content], shown: Iterator[MediaItem]) -> Iterator[str | MediaItem]:
    if isinstance(content, str):
        yield content
        return
    for part in content:
        if isinstance(part, (schemas.ImagePart, schemas.InputImage)):
            yield next(shown)
        else:
            yield part.text
