"""Messages as tokens: a model's chat template, asked for one turn at a time.

A template writes whole conversations. The tokens of a turn are what it writes more when the turn is there: :class:`ChatTemplate`
asks it for the turns before and for those and the new one, and takes what differs. Only so many of the turns before are shown as a
template can look back to (the system message, the last question, a few more), so that a long history costs what it has turns.
Tool results that follow each other are asked for together, since templates put them into one block and close it behind the last.

What a template writes otherwise once more has been said (reasoning that is left out of earlier replies) stays as it was written
first, as an engine's KV cache has it. :meth:`ChatTemplate.differs` says whether that is so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import MediaSpanError, SessionTreeError, Unsupported
from sessiontree.interchange.conversations import Image, Message, Turn, messages_of
from sessiontree.interchange.source import parsed
from sessiontree.media import MediaItem
from sessiontree.placeholders import compact, expand
from sessiontree.positions import PositionScheme
from sessiontree.tokens import token_array, token_bytes

Tools = Sequence[Mapping[str, Any]]
#: Token ids of a whole conversation; pictures are one ``image_token_id`` each.
Encode = Callable[[list[Message], Tools], Any]
#: What an image processor makes of a picture: an item without spans, and its features, or None.
Place = Callable[[Image], tuple[MediaItem, Any]]
#: The roles that a conversation may begin with before anybody asks.
SYSTEM: Final = ("system", "developer")
#: How many turns before a new one a template is shown, beside the system message and the last question.
LOOKS_BACK: Final = 6


class TemplateRefused(SessionTreeError):
    """A template wrote nothing for some messages. Its own error is the cause."""


class Rendered(NamedTuple):
    """Tokens of one turn: ``token_ids`` (T,) int32, the items among them, and the features of each, None where there are none."""

    token_ids: NDArray[np.int32]
    media: tuple[MediaItem, ...]
    features: tuple[Any, ...]


class ChatTemplate:
    """Turns as tokens.

    ``template``: what has transformers' ``apply_chat_template``, which gets arguments of tool calls as objects, as engines give
    them; or a callable that takes a list of messages and a list of tools, both in OpenAI's form (arguments are text), and gives the
    ids of all of them. Pictures are parts ``{"type": "image"}``. ``image_token_id``, ``place``: for pictures, the id that stands
    for each in what the template writes, and what takes an :class:`Image` and gives ``(item, features)``: a MediaItem of it with
    spans ``()``, and a mapping of arrays to keep for it, or None. Without them a conversation with pictures is Unsupported.
    """

    def __init__(self, template: Any, *, image_token_id: int | None = None, place: Place | None = None) -> None:
        self._encode = _encoder(template)
        self._image_token_id = image_token_id
        self._place = place

    @classmethod
    def of(cls, template: Any) -> ChatTemplate:
        """A template of one, or of what makes one."""
        return template if isinstance(template, cls) else cls(template)

    def fingerprint(self) -> str:
        """A digest of what it writes for a short conversation, so that one template is told from another."""
        for said in (_SAMPLE, _SAMPLE[:1]):
            with suppress(TemplateRefused):
                return blake2b(self._ids(said, ()).tobytes(), digest_size=8).hexdigest()
        return "tokens"

    def render(
        self, before: Sequence[Turn], turns: Sequence[Turn], tools: Tools, scheme: PositionScheme, written: bool
    ) -> list[Rendered]:
        """The tokens of each of ``turns``, which follow each other behind ``before``.

        ``written``: whether anything before has tokens. Where it has none, since the template would not begin with it (a system
        message alone), the first of ``turns`` gets the tokens of both. Raises TemplateRefused, Unsupported for pictures without a
        ``place``, and what placing them raises.
        """
        shown = list(before)
        try:
            ids = self._ids(shown, tools) if shown else _NONE
        except TemplateRefused:
            if written:
                raise
            ids = _NONE
        ends = [0]
        try:
            whole = self._ids([*shown, *turns], tools)
        except TemplateRefused:
            if all(_role(turn) in SYSTEM for turn in (*shown, *turns)):
                return [Rendered(_NONE, (), ())] * len(turns)  # the next turn gets its tokens
            raise
        for count in range(1, len(turns)):
            part = self._ids([*shown, *turns[:count]], tools)
            ends.append(_alike(part, whole))
        ends[0] = self._begins(ids, whole, shown, turns, tools)
        ends.append(len(whole))
        images = [image for turn in turns for image in turn.images]
        return self._placed(whole, ends, sum(len(turn.images) for turn in shown), images, scheme)

    def _begins(
        self, ids: NDArray[np.int32], whole: NDArray[np.int32], before: Sequence[Turn], turns: Sequence[Turn], tools: Tools
    ) -> int:
        """Where the tokens of ``turns`` begin in the whole, which begins with those of the turns before, ``ids``, most often.

        Not where it goes on with a block of tool results, which is closed behind the last; and where it leaves out what was
        thought before. Raises TemplateRefused where it is neither.
        """
        alike = _alike(ids, whole)
        if alike == len(ids) or _role(before[-1]) == _role(turns[0]) == "tool":
            return alike
        short = self._ids([_without_thought(turn) for turn in before], tools)
        if _alike(short, whole) == len(short):
            return len(short)
        raise TemplateRefused(f"the template writes token {alike} otherwise once {_role(turns[0])!r} has spoken")

    def _placed(
        self, ids: NDArray[np.int32], ends: Sequence[int], begun: int, images: Sequence[Image], scheme: PositionScheme
    ) -> list[Rendered]:
        at = np.flatnonzero(ids == self._image_token_id) if self._image_token_id is not None else _NONE
        made = []
        for start, stop in itertools.pairwise(ends):
            spots = at[(at >= start) & (at < stop)]
            first = int(np.searchsorted(at, start)) - begun
            placed = [self._item(images, first + number) for number in range(len(spots))]
            items = [item.with_spans([(int(spot) - start, 1)]) for spot, (item, _) in zip(spots, placed, strict=True)]
            tokens, media = expand(scheme, ids[start:stop], items) if items else (ids[start:stop], ())
            made.append(Rendered(tokens, media, tuple(features for _, features in placed)))
        if len(at) - begun != len(images):
            raise MediaSpanError(
                f"the template has {len(at) - begun} placeholders for {len(images)} pictures",
                item=None,
                span=None,
                limit=len(images),
            )
        return made

    def _item(self, images: Sequence[Image], number: int) -> tuple[MediaItem, Any]:
        if not 0 <= number < len(images):
            raise MediaSpanError(
                f"the template has a placeholder more than there are pictures, {len(images)}", item=None, span=None
            )
        assert self._place is not None
        return self._place(images[number])

    def _ids(self, turns: Sequence[Turn], tools: Tools) -> NDArray[np.int32]:
        messages = [_shown(message) for turn in turns for message in messages_of(turn)]
        if (self._place is None or self._image_token_id is None) and any(turn.images for turn in turns):
            raise Unsupported("a picture has no tokens: ChatTemplate takes image_token_id and place for that")
        try:
            ids = self._encode(messages, tools)
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            raise TemplateRefused(f"the template refuses {len(messages)} messages: {type(error).__name__}: {line}") from error
        try:
            return token_array(token_bytes(ids))
        except (TypeError, ValueError) as error:
            raise TemplateRefused(f"what the template gives are no token ids: {error}") from error

    def differs(self, turns: Sequence[Turn], tools: Tools, ids: NDArray[np.int32], media: Sequence[MediaItem]) -> bool:
        """Whether it writes other tokens for all of ``turns`` at once than ``ids``, as they were written turn by turn."""
        try:
            return not np.array_equal(self._ids(turns, tools), compact(ids, media)[0])
        except TemplateRefused:
            return len(ids) > 0


_NONE: Final = token_array(b"")
_SAMPLE: Final = (
    Turn(message={"role": "user", "content": "Where is Łódź, and since 1423?"}),
    Turn(message={"role": "assistant", "content": 'In Poland; it\'s "boat".'}),
)


def _shown(message: Message) -> Message:
    """A message as templates take it."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [
            {"type": "image"} if isinstance(part, Mapping) and part.get("type") == "image" else part for part in content
        ]
    return message


def _with_objects(message: Message) -> Message:
    """A message as transformers' templates take it, and as vLLM and SGLang give it to them: arguments of calls are no text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)) or not calls:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        arguments = parsed(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) and function else call


def _role(turn: Turn) -> Any:
    return (turn.message or {}).get("role")


def _without_thought(turn: Turn) -> Turn:
    """A reply as templates show it once somebody has spoken again."""
    message = dict(turn.message or {})
    if message.get("role") == "assistant":
        message.pop("reasoning_content", None)
        if isinstance(content := message.get("content"), str):
            message["content"] = content.rpartition("</think>")[2].lstrip("\n")
    return attrs.evolve(turn, message=message)


def _alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids from the first on are alike."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def _encoder(template: Any) -> Encode:
    apply = getattr(template, "apply_chat_template", None)
    if apply is not None:

        def encode(messages: list[Message], tools: Tools) -> Any:
            options = {"tools": list(tools) or None, "tokenize": True, "return_dict": False, "add_generation_prompt": False}
            given = [_with_objects(message) for message in messages]
            try:
                ids = apply(given, **options)
            except Exception:
                if given == messages:
                    raise
                ids = apply(messages, **options)  # some put arguments together with text
            return ids[0] if len(ids) and isinstance(ids[0], (list, tuple)) else ids  # a processor's batch of one

        return encode
    if not callable(template):
        raise TypeError(f"a template is callable or has apply_chat_template, not {type(template).__name__}")
    encode_all: Encode = template
    return encode_all
