"""Conversations: what stands between the files of others and the trees of a store.

A format reads a file as conversations and writes them; it knows nothing of stores. ``loading`` puts conversations into a store and
``saving`` takes them out, and neither knows a format. So each pair of formats is two small modules, not one of their own.

A :class:`Turn` is what becomes a node, one for one: nothing is merged, split or left out, also where it says nothing. Its message
has the form of OpenAI's chat messages, which most others resemble: a mapping of ``role``, ``content`` (text, None, or a list of
parts), and where they apply ``name``, ``tool_calls`` (of ``id``, ``type`` and ``function``: ``name`` and ``arguments``, JSON as
text), ``tool_call_id``, ``reasoning_content``. A picture that is there in bytes is a part ``{"type": "image", "image": n}``, n
being its place in ``Turn.images``; one that is only named stays the part it was, ``{"type": "image_url", ...}``. What a format has
beyond that, it keeps in ``fields``, as JSON's types, and finds there again when it writes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Any

import attrs

from sessiontree.media import MediaItem
from sessiontree.tokens import TokenIds

#: The head of the turn that a conversation goes on from.
MAIN = "main"

Message = Mapping[str, Any]


@attrs.frozen
class Image:
    """A picture as it lies in a file: ``data`` are its bytes, ``mime_type`` what they are said to be, such as "image/png"."""

    data: bytes = attrs.field(repr=False)
    mime_type: str


@attrs.frozen(kw_only=True, eq=False)
class Turn:
    """A turn of a conversation, to become one node.

    ``id``: its own, unique in its conversation; None where the format has none: it gets one of what it says. ``parent``: the id
    of the turn before it, None for a first one, ``...`` for the turn that came before it in ``turns``. ``message``: see this
    module; None for what is no message, such as a note that the model was changed. ``role``: the node's, where there is none.
    ``created_at``: seconds since 1970, UTC.

    ``token_ids``: its own tokens, where the file has them; they are never made again from text then. ``media``: where pictures,
    videos and audio stand among them. ``generated``: whether they were sampled; ``finish_reason``: why that ended.
    ``annotations``: as :meth:`Session.annotate` takes them. ``derived_from``: ids of turns it was made of, such as what a
    compaction sums up. ``place``: where it stands in the file, for messages.
    """

    id: str | None = None
    parent: str | EllipsisType | None = ...
    message: Message | None = None
    role: str = "note"
    images: tuple[Image, ...] = ()
    created_at: float | None = None
    token_ids: TokenIds | None = None
    media: tuple[MediaItem, ...] = ()
    generated: bool = False
    finish_reason: str | None = None
    annotations: Mapping[str, Any] = attrs.Factory(dict)
    derived_from: tuple[str, ...] = ()
    fields: Mapping[str, Any] = attrs.Factory(dict)
    place: str = ""


@attrs.define(kw_only=True, eq=False)
class Conversation:
    """A tree of turns.

    ``id``: what its session is called. ``turns``: in any order; parents stand before their children where they can, since a turn
    waits in memory for its parent. Children of one parent are in the order in which they come. It may be read once only.
    ``tools``: definitions in OpenAI's form, which chat templates show to the model. ``heads``: names for turns, by their ids,
    "main" for the one to go on from; without it, that is the last turn. ``fields``: what else the format has to say of the whole.

    ``read_as``: the id under which its turns were read, where ``id`` is another: that of a fork of the session that they became.
    What ``fields`` of it and of its turns say of an id is then of that one, and a writer puts ``id`` in its place: no two
    conversations of a file have the same.

    ``mark``: a digest of the text it was read from; None where that is the whole file. An import passes over what it knows.

    All but ``id``, ``read_as``, ``mark``, ``tools`` and ``turns`` is looked at when ``turns`` are used up: a reader may set it
    until then.
    """

    id: str
    turns: Iterable[Turn]
    read_as: str | None = None
    mark: str | None = None
    title: str | None = None
    created_at: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    heads: dict[str, str] = attrs.Factory(dict)
    fields: dict[str, Any] = attrs.Factory(dict)


def text_of(message: Message | None) -> str:
    """The text of a message, parts that are text put together."""
    parts = () if message is None else parts_of(message)
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def messages_of(turn: Turn) -> list[Message]:
    """The messages of a turn, in OpenAI's form: one, none where it is no message, or several where tools gave several results.

    Such a turn holds them as parts ``{"type": "tool_result", "tool_call_id": ..., "content": ...}`` of one content: each is a
    message of a tool, and what stands beside them is a message after them.
    """
    message = turn.message
    if message is None:
        return []
    content = message.get("content")
    results: list[Any] = []
    rest: list[Any] = []
    for part in content if isinstance(content, (list, tuple)) else ():
        is_result = isinstance(part, Mapping) and part.get("type") == "tool_result" and "tool_call_id" in part
        (results if is_result else rest).append(part)
    if not results:
        return [message]
    made: list[Message] = [
        {"role": "tool", "tool_call_id": part.get("tool_call_id"), "content": part.get("content")} for part in results
    ]
    return [*made, {**message, "content": rest}] if rest else made


def parts_of(message: Message) -> Iterator[Mapping[str, Any]]:
    """The parts of a message's content; content that is text is one part of type "text". What is neither is left out."""
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else ():
        if isinstance(part, str):
            yield {"type": "text", "text": part}
        elif isinstance(part, Mapping):
            yield part


def calls_of(message: Message) -> Iterator[tuple[str | None, str, str]]:
    """(id, name, arguments as text) of each tool call, also of the one that ``function_call`` was before there were several."""
    calls = message.get("tool_calls")
    calls = [each for each in calls if isinstance(each, Mapping)] if isinstance(calls, (list, tuple)) else []
    if isinstance(message.get("function_call"), Mapping):
        calls.append({"function": message["function_call"]})
    for call in calls:
        function = call.get("function") or call.get("custom")
        if isinstance(function, Mapping):
            call_id, arguments = call.get("id"), function.get("arguments", function.get("input"))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield call_id if isinstance(call_id, str) else None, str(function.get("name")), text


def unanswered(messages: Iterable[Message]) -> int:
    """How many tool calls of a branch have no result in it, though more was said after them."""
    waiting: set[str] = set()
    last: set[str] = set()  # calls after which nothing was said but results
    for message in messages:
        if message.get("role") == "tool":
            waiting.discard(str(message.get("tool_call_id")))
        else:
            last = {call_id for call_id, _, _ in calls_of(message) if call_id is not None}
            waiting |= last
    return len(waiting - last)


def _parent(turn: Turn) -> str | None:
    assert turn.parent is not ...  # `saving` gives each one
    return turn.parent


Branch = tuple[Turn, ...]


class Tree:
    """The turns of a conversation, all read, with their shape. For formats that write children lists, or branch by branch."""

    def __init__(self, conversation: Conversation) -> None:
        self.turns: dict[str, Turn] = {}
        self.children: dict[str | None, list[str]] = {None: []}
        for turn in conversation.turns:
            assert turn.id is not None
            self.turns[turn.id] = turn
            self.children[turn.id] = []
            self.children[_parent(turn)].append(turn.id)

    @property
    def leaves(self) -> list[str]:
        """Ids of the turns that nothing follows, in order."""
        return [each for each in self.turns if not self.children[each]]

    def path(self, turn_id: str) -> Branch:
        """From the first turn to that one."""
        path = []
        at: str | None = turn_id
        while at is not None:
            turn = self.turns[at]
            path.append(turn)
            at = _parent(turn)
        return tuple(reversed(path))

    def branches(self) -> Iterator[Branch]:
        """The path of each leaf, in order."""
        return map(self.path, self.leaves)

    def talks(self) -> Iterator[Branch]:
        """The same for files that hold one branch as a conversation: each call with its result.

        Where calls were made at once, a tool may have its result beside the turn that goes on (Claude Code writes them so). Such a
        leaf is no branch of its own then, but stands behind its call in each that lacks it.
        """
        aside = {each: self._answered(each) for each in self.leaves}
        taken: set[str] = set()
        made: list[Branch] = []
        for branch in self.branches():
            there = {call for turn in branch for call in self._answered(turn.id)}
            whole: list[Turn] = []
            for turn, after in itertools.zip_longest(branch, branch[1:]):
                whole.append(turn)
                for each in self.children[turn.id] if after is not None else ():
                    if each != after.id and aside.get(each) and not there & aside[each]:
                        there |= aside[each]
                        taken.add(each)
                        whole.append(self.turns[each])
            made.append(tuple(whole))
        return (branch for branch in made if branch[-1].id not in taken)

    def _answered(self, turn_id: str | None) -> set[str]:
        """Calls of the turn before it that a turn answers, which says nothing else."""
        turn = self.turns[str(turn_id)]
        before = self.turns.get(str(turn.parent))
        messages = messages_of(turn)
        if before is None or not messages or any(message.get("role") != "tool" for message in messages):
            return set()
        called = {call_id for message in messages_of(before) for call_id, _, _ in calls_of(message)}
        return {answer for message in messages if isinstance(answer := message.get("tool_call_id"), str) and answer in called}

    def depth_first(self) -> Iterator[Turn]:
        """Every turn, parents before their children, children in order."""
        waiting = list(reversed(self.children[None]))
        while waiting:
            at = waiting.pop()
            yield self.turns[at]
            waiting.extend(reversed(self.children[at]))
