"""Transcripts of Claude Code: a JSON line for each message, event or remark; messages in the form of Anthropic's API.

As ``~/.claude/projects`` holds them; the format is documented nowhere and was read off what version 2.1 writes. A line with a
``uuid`` is a turn: one of a user or an assistant a message, any other a note. One answer of the model is a line for each of its
blocks, so it is as many turns; a line that brings several results is one. Lines without a ``uuid`` (titles, snapshots of files, the
queue of prompts) are no part of the tree: they are kept with the turn that follows them, and those at the end with the session.
Subagents write files of their own, which are sessions of their own; older versions kept them in the same file, as further first
turns. A compaction starts anew too: its boundary is a first turn, derived from the last of those that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_OID, UUID, uuid5

from sessiontree.interchange.blocks import Block, Form, put_together, take_apart, usual_layout
from sessiontree.interchange.conversations import MAIN, Conversation, Image, Message, Turn, text_of
from sessiontree.interchange.formats import Format
from sessiontree.interchange.images import to_base64
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile, expect, write_lines
from sessiontree.interchange.times import iso, seconds

_VERSION: Final = "2.1.197"  # which the lines are like that we write
_MESSAGES: Final = ("user", "assistant")
_SYNTHETIC: Final = "<synthetic>"  # the model of what Claude Code says itself
_REASONS: Final = {
    "end_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "stop_sequence": "stop",
    "refusal": "content_filter",
}
_REASON_OF: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_TITLES: Final = {"custom-title": "customTitle", "ai-title": "aiTitle"}  # the first of these counts
_NO_USAGE: Final = {"input_tokens": 0, "output_tokens": 0}
_MISSING: Final = "missing"  # layouts of content that is no list: there is none,
_TEXT: Final = "text"  # or it is text where lists are usual
_COPIED: Final = 64  # characters from which on a text that stands in a line twice is kept once
_COPY_DEPTH: Final = 4


def _take_image(block: Block) -> tuple[str, str] | str | None:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data), **rest} if not rest:
            del block["source"]
            return data, kind
        case {"type": "url", "url": str(url), **rest} if not rest:
            del block["source"]
            return url
    return None


_FORM: Final = Form(
    "tool_use",
    "input",
    _take_image,
    lambda data, kind: {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}},
    lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    results=True,
)


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """The one session of a file, called as the file is: Claude Code's own lines may name others, which they were copied from."""
    conversation = Conversation(id=Path(file.path.name).stem, turns=())
    conversation.turns = _Transcript(conversation, losses).turns(file)
    yield conversation


class _Remarks:
    """What lines say of the session as a whole. ``main``: the turn to go on from; None where there are only those of subagents."""

    def __init__(self) -> None:
        self.main: str | None = None
        self._titles: dict[str, str] = {}
        self._summaries: dict[str, str] = {}  # by the turn that each sums up, which may be another file's

    def title(self, known: Container[str]) -> str | None:
        """What the session is called. ``known``: the turns there are."""
        titles = [self._titles[kind] for kind in _TITLES if kind in self._titles]
        titles += [text for leaf, text in reversed(self._summaries.items()) if leaf in known]
        return titles[0] if titles else None

    def tell(self, line: Any, known: Container[str]) -> None:
        """A line without a uuid. ``known``: the turns before it."""
        match line:
            case {"type": "custom-title" | "ai-title" as kind} if isinstance(title := line.get(_TITLES[kind]), str) and title:
                self._titles[kind] = title
            case {"type": "summary", "summary": str(text), "leafUuid": str(leaf)} if text:
                self._summaries.pop(leaf, None)
                self._summaries[leaf] = text
            case {"type": "last-prompt", "leafUuid": str(leaf)} if leaf in known:
                self.main = leaf

    def turn(self, name: str, line: Mapping[str, Any]) -> None:
        """A line that is a turn."""
        if line.get("isSidechain") is not True:
            self.main = name


class _Transcript:
    """A file, read line by line."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self._conversation = conversation
        self._losses = losses
        self._ids: set[str] = set()
        self._calls: set[str] = set()

    def turns(self, file: SourceFile) -> Iterator[Turn]:
        """A turn for each line with a uuid; all else goes to the conversation at last."""
        conversation, remarks = self._conversation, _Remarks()
        before: list[Any] = []
        empty = foreign = True
        for place, line in file.lines(self._losses):
            empty = False
            if not (
                expect(line, dict, "a line", place, self._losses)
                and expect(line.get("uuid"), (str, type(None)), "a uuid", place, self._losses)
                and expect(line.get("parentUuid"), (str, type(None)), "a parentUuid", place, self._losses)
            ):
                continue
            foreign = foreign and ("type" not in line or "parentId" in line or line["type"] == "session")  # the latter are pi's
            if line.get("uuid") is None:
                remarks.tell(line, self._ids)
                before.append(line)
                continue
            try:
                turn = self._turn(dict(line), before, place)
            except RecursionError:
                self._losses.fault("nested too deep", place)
                continue
            if turn is not None:
                before = []
                self._ids.add(line["uuid"])
                remarks.turn(line["uuid"], line)
                yield turn
        if empty:
            self._losses.fault("no transcript: it has no lines", "the whole file")
        elif foreign:
            self._losses.fault("no transcript of Claude Code", "the whole file")
        if before:
            conversation.fields["after"] = before
        if remarks.main is not None:
            conversation.heads[MAIN] = remarks.main
        conversation.title = remarks.title(self._ids)

    def _turn(self, line: dict[str, Any], before: list[Any], place: str) -> Turn | None:
        """A turn of a line with a uuid; None where that is a fault. What the message says is taken out of the line."""
        losses = self._losses
        kind = line.get("type")
        if not expect(kind, str, "a line's type", place, losses):
            return None
        fields: dict[str, Any] = {"line": line}
        if before:
            fields["before"] = before
        if "parentUuid" not in line:
            fields["rootless"] = True
        name, parent = line.pop("uuid"), line.pop("parentUuid", None)
        images: list[Image] = []
        message: dict[str, Any] | None = None
        if kind in _MESSAGES and line.get("message") is not None:
            if not expect(line["message"], dict, "a message", place, losses):
                return None
            fields["message"] = dict(line.pop("message"))
            message = self._message(str(kind), fields, images, f"{place}, message")
            if message is None:
                return None
            _keep_once(line, fields, _texts(message, images))
        rest, subtype = fields.get("message", {}), line.get("subtype")
        reason, source = rest.get("stop_reason"), line.get("logicalParentUuid")
        return Turn(
            id=name,
            parent=parent,
            message=message,
            role=subtype if kind == "system" and isinstance(subtype, str) else str(kind),
            images=tuple(images),
            created_at=seconds(line.get("timestamp")),
            generated=kind == "assistant" and message is not None and rest.get("model") != _SYNTHETIC,
            finish_reason=_REASONS.get(reason, reason) if isinstance(reason, str) else None,
            derived_from=(source,) if isinstance(source, str) and source in self._ids else (),
            fields=fields,
            place=place,
        )

    def _message(self, kind: str, fields: dict[str, Any], images: list[Image], place: str) -> dict[str, Any] | None:
        """The normal form of a message, what it says being taken out of ``fields``; None where that is a fault."""
        rest = fields["message"]
        content = rest.get("content")
        if not expect(content, (str, list, type(None)), "a message's content", place, self._losses):
            return None
        if rest.get("role") == kind:
            del rest["role"]
        elif "role" not in rest:
            fields["roleless"] = True
        if content is None:
            if "content" not in rest:
                fields["layout"] = _MISSING
            return {"role": kind, "content": None}
        del rest["content"]
        if isinstance(content, str):
            if kind == "assistant":
                fields["layout"] = _TEXT
            return {"role": kind, "content": content}
        apart = take_apart(content, _FORM, images, f"{place}.content", self._losses)
        results = [part for part in apart.content if part["type"] == "tool_result"]
        for part in results:
            if part["tool_call_id"] not in self._calls:
                self._losses.add("a tool result without its call", place)
        self._calls.update(call["id"] for call in apart.calls)
        message = apart.message(kind)
        if results and len(results) == len(apart.content) and message.keys() == {"role", "content"}:
            one = results[0] if len(results) == 1 else None
            said = {"content": results} if one is None else {key: one[key] for key in ("tool_call_id", "content")}
            message = {"role": "tool", **said}
        if apart.layout != usual_layout(message):
            fields["layout"] = apart.layout
        return message


def _texts(message: Message, images: Iterable[Image]) -> list[str]:
    """Long texts of a message, in order, and the base64 of its pictures."""
    found: list[str] = []
    waiting: list[Any] = [message.get("content")]
    while waiting:
        content = waiting.pop()
        if isinstance(content, str):
            found += [content] if len(content) >= _COPIED else []
        elif isinstance(content, (list, tuple)):
            waiting += [part.get("text", part.get("content")) for part in reversed(content) if isinstance(part, Mapping)]
    return found + [to_base64(image) for image in images]


def _keep_once(line: dict[str, Any], fields: dict[str, Any], texts: list[str]) -> None:
    """Takes out of a tool's own result what the message says; ``fields`` get the path of each and its number in ``texts``."""
    numbers = {text: number for number, text in reversed(list(enumerate(texts)))}
    found: list[list[Any]] = []
    waiting: list[tuple[list[Any], Any]] = [([], line.get("toolUseResult"))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and value in numbers:
            found.append([path, numbers[value]])
        elif isinstance(value, (dict, list)) and len(path) < _COPY_DEPTH:
            items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [([*path, key], each) for key, each in items]
    if found:
        fields["copies"] = found
        for path, _ in found:
            line["toolUseResult"] = _put(line["toolUseResult"], path, None)


def _put(value: Any, path: list[Any], item: Any) -> Any:
    """A value with an item at a path; the value stays as it is."""
    if not path:
        return item
    copied: Any = dict(value) if isinstance(value, Mapping) else list(value)
    copied[path[0]] = _put(copied[path[0]], path[1:], item)
    return copied


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """A line for each turn, and those that stood between them."""
    write_lines(path, (line for conversation in conversations for line in _Lines(conversation, losses)))


class _Lines:
    """The lines of a session."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self._conversation = conversation
        self._losses = losses
        self._remarks = _Remarks()
        self._names: dict[str, str] = {}  # uuids, by ids of turns
        self._aside: set[str] = set()  # turns of subagents
        self._time = 0.0
        self._session = _uuid(conversation.id, conversation.id)
        #: What each line says of where the session is; as the line before did.
        self._around: dict[str, Any] = {
            "userType": "external",
            "cwd": "/",
            "sessionId": self._session,
            "version": _VERSION,
            "gitBranch": "",
        }

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        conversation, remarks = self._conversation, self._remarks
        after = conversation.fields.get("after", ())
        last: str | None = None
        for turn in conversation.turns:
            own = "line" in turn.fields
            last = str(turn.id) if own else _uuid(conversation.id, str(turn.id))
            self._names[str(turn.id)] = last
            if own:
                yield from self._remarked(turn.fields.get("before", ()))
                line = self._renamed(self._own(turn))
                self._around |= {key: line[key] for key in self._around if key in line}
            else:
                yield from self._remarked(after)  # what stood at the end stays before what is new
                after = ()
                line = self._line(turn)
            self._time = seconds(line.get("timestamp")) or self._time
            remarks.turn(last, line)
            if line.get("isSidechain") is True:
                self._aside.add(last)
            yield line
        yield from self._remarked(after)
        session = {"sessionId": self._around["sessionId"]}
        if conversation.title and conversation.title != remarks.title(self._names):
            yield {"type": "custom-title", "customTitle": conversation.title, **session}
        main = self._names.get(conversation.heads.get(MAIN, ""))
        if main is not None and main != (remarks.main or last):
            yield {"type": "last-prompt", "leafUuid": main, **session}
        if conversation.tools:
            self._losses.add("tools: Claude Code has its own", conversation.id)

    def _remarked(self, lines: Iterable[Any]) -> Iterator[Any]:
        for line in lines:
            self._remarks.tell(line, self._names)
            yield self._renamed(line)

    def _renamed(self, line: dict[str, Any]) -> dict[str, Any]:
        """A line that was read, of the session that it stands in now."""
        forked = self._conversation.read_as is not None and "sessionId" in line
        return line | {"sessionId": self._session} if forked else line

    def _own(self, turn: Turn) -> dict[str, Any]:
        """The line that a turn was read from."""
        fields, said = turn.fields, turn.message
        line = {**fields["line"], "uuid": turn.id}
        if "rootless" not in fields:
            line["parentUuid"] = self._parent(turn)
        if said is None:
            return line
        message = dict(fields["message"])
        line["message"] = message
        if "roleless" not in fields:
            message.setdefault("role", line["type"])
        layout = fields.get("layout")
        if layout != _MISSING and "content" not in message:  # else it is null
            content = said["content"]
            whole = layout == _TEXT or (layout is None and said["role"] == "user" and isinstance(content, str))
            message["content"] = content if whole else put_together(turn, said, layout, _FORM, self._losses)
        if "copies" in fields:
            texts = _texts(said, turn.images)
            for path, number in fields["copies"]:
                line["toolUseResult"] = _put(line["toolUseResult"], path, texts[number])
        return line

    def _parent(self, turn: Turn) -> str | None:
        return self._names[turn.parent] if isinstance(turn.parent, str) else None

    def _line(self, turn: Turn) -> dict[str, Any]:
        """The line of a turn that was none of Claude Code's."""
        losses, place, message = self._losses, str(turn.id), turn.message
        name = self._names[place]
        if name != place:
            losses.add("ids that are no UUIDs are others", place)
        time = self._time + 0.001 if turn.created_at is None else turn.created_at
        parent = self._parent(turn)
        line = {"parentUuid": parent, "isSidechain": parent in self._aside, **self._around, "uuid": name, "timestamp": iso(time)}
        if message is None:
            losses.add("turns that are no messages are remarks of the system", place)
            return line | _remark(turn.role)
        role = message["role"]
        if role in ("system", "developer"):
            losses.add("messages of the system are remarks: Claude Code sends the model its own", place)
            return line | _remark(text_of(message))
        blocks: Any = put_together(turn, message, None, _FORM, losses)
        if role == "assistant":
            if message.get("reasoning_content"):
                losses.add("reasoning has no signature, without which Anthropic's API takes none back", place)
                blocks[0]["signature"] = ""
            reason = _REASON_OF.get(turn.finish_reason or "", "tool_use" if message.get("tool_calls") else "end_turn")
            said = {"id": f"msg_{name}", "type": "message", "role": role, "model": "unknown", "content": blocks}
            return line | {"type": role, "message": {**said, "stop_reason": reason, "stop_sequence": None, "usage": _NO_USAGE}}
        if role not in ("user", "tool"):
            losses.add(f"the role {role} is the user's", place)
        if "name" in message and role != "tool":
            losses.add("names of who speaks", place)
        content = message.get("content")
        if role != "tool" and isinstance(content, str):
            blocks = content
        return line | {"type": "user", "message": {"role": "user", "content": blocks}}


def _remark(text: str) -> dict[str, Any]:
    return {"type": "system", "subtype": "informational", "content": text, "level": "info", "isMeta": False}


def _uuid(session: str, text: str) -> str:
    """A text that is a UUID, or one made of it."""
    try:
        if str(UUID(text)) == text:
            return text
    except ValueError:
        pass
    return str(uuid5(NAMESPACE_OID, json.dumps([session, text])))


FORMAT: Final = Format(
    "claude-code",
    "transcripts of Claude Code (JSONL)",
    ".jsonl",
    read,
    write,
    single=True,
    lacks=frozenset({"created_at", "heads", "token_ids", "derived_from", "annotations"}),
    keys=frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}),
)
