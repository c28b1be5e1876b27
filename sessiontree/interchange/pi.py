"""Sessions of the pi coding agent: a header line, then a line for each entry of a tree, in versions 1 to 3 of its format.

As https://github.com/earendil-works/pi writes and reads them (``docs/session-format.md`` there). Every entry is a turn. Messages
are messages; what an extension or a summary says to the model is one of the user, as pi sends it; all else (models chosen, labels,
state of extensions, entries of newer versions) is a note. Version 1 has no ids, an entry follows the one before it: they get ids
here, their numbers in the file, and are written without again unless the session has become a tree. pi goes on from the last
entry, so that one is ``main``, and its labels are heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_OID, uuid5

from sessiontree.interchange.blocks import Block, Form, put_together, take_apart, usual_layout
from sessiontree.interchange.conversations import MAIN, Conversation, Image, Message, Turn, messages_of
from sessiontree.interchange.formats import Format
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile, expect, write_lines
from sessiontree.interchange.times import iso, seconds

_VERSION: Final = 3
_ROLES: Final = {"user": "user", "assistant": "assistant", "toolResult": "tool", "system": "system"}
_ROLE_OF: Final = {ours: role for role, ours in _ROLES.items()}
_AS_USER: Final = ("custom", "hookMessage")  # roles of messages that pi sends as the user's
_OF_BLOCKS: Final = ("assistant", "tool")  # whose content is never text alone
_OF_RESULTS: Final = {"tool_call_id": "toolCallId", "name": "toolName"}
_SUMMARIES: Final = ("compaction", "branch_summary")
_REASONS: Final = {"stop": "stop", "length": "length", "toolUse": "tool_calls"}
_REASON_OF: Final = {ours: reason for reason, ours in _REASONS.items()}
_UNKNOWN_MODEL: Final = {"api": "openai-completions", "provider": "unknown", "model": "unknown"}
_COUNTS: Final = ("input", "output", "cacheRead", "cacheWrite")
_NO_USAGE: Final = {**dict.fromkeys((*_COUNTS, "totalTokens"), 0), "cost": dict.fromkeys((*_COUNTS, "total"), 0)}
_BETWEEN: Final = "\n\n"  # sections of a prompt
_BEFORE_MESSAGES: Final = 64  # entries in which tools are looked for
_MISSING: Final = "missing"  # layouts of content that is no list: there is none,
_TEXT: Final = "text"  # or it is text where pi writes lists


def _take_image(block: Block) -> tuple[str, str] | None:
    if isinstance(block.get("data"), str) and isinstance(block.get("mimeType"), str):
        return block.pop("data"), block.pop("mimeType")
    return None


_FORM: Final = Form("toolCall", "arguments", _take_image, lambda data, kind: {"type": "image", "data": data, "mimeType": kind})


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """The one session of a file, called by the id in its header."""
    lines = file.lines(losses)
    begin = next(lines, None)
    if begin is None:
        losses.fault("no session of pi: it has no lines", "the whole file")
        return
    place, header = begin
    if not isinstance(header, dict) or header.get("type") != "session" or not isinstance(header.get("id"), str):
        losses.fault("no session of pi: its first line is to be a header with an id", place)
        lines, header = chain([begin], lines), {"id": file.stem, "version": _VERSION}
    version = header.get("version")
    if not expect(version, (int, float, type(None)), "the session's version", place, losses):
        header["version"] = version = _VERSION
    first = []
    for line in lines:
        first.append(line)
        if len(first) == _BEFORE_MESSAGES or (isinstance(line[1], dict) and line[1].get("type") == "message"):
            break
    declared = _declared(first[-1][1] if first else None)
    tools = tuple({"type": "function", "function": tool} for tool in declared)
    created_at = seconds(header.get("timestamp"))
    conversation = Conversation(id=header["id"], turns=(), tools=tools, created_at=created_at, fields={"header": header})
    conversation.turns = _Entries(version or 1, declared, losses).turns(chain(first, lines), conversation)
    yield conversation


def _declared(entry: Any) -> list[Any]:
    """The tools that a system message declares, where that is the first message."""
    message = entry.get("message") if isinstance(entry, dict) else None
    tools = message.get("toolsAdded") if isinstance(message, dict) and message.get("role") == "system" else None
    if isinstance(tools, list) and all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools):
        return tools
    return []


class _Labels:
    """Labels, as entries set and clear them one after the other. ``of``: the one label of each entry that has one."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.heads: dict[str, str] = {}

    def tell(self, entry: Mapping[str, Any]) -> None:
        """Sets or clears a label."""
        target, label = entry.get("targetId"), entry.get("label")
        if not isinstance(target, str):
            return
        before = self.of.pop(target, None)
        if before is not None and self.heads.get(before) == target:
            del self.heads[before]
        if isinstance(label, str) and label not in ("", MAIN) and label.encode(errors="ignore").decode() == label:
            self.of[target] = label
            self.heads[label] = target


class _Entries:
    """The entries of a file, read in order. ``tools``: what the first message declares: they are not told again there."""

    def __init__(self, version: float, tools: list[Any], losses: Losses) -> None:
        self._linear = version < 2
        self._tools = tools
        self._losses = losses
        self._labels = _Labels()
        self._parents: dict[str, str | None] = {}
        self._calls: set[str] = set()

    def turns(self, lines: Iterable[tuple[str, Any]], conversation: Conversation) -> Iterator[Turn]:
        last: str | None = None
        number = 0  # as pi counts: the header is 0, and lines that it cannot read are not counted
        for place, entry in lines:
            if not (expect(entry, dict, "an entry", place, self._losses) and self._sound(entry, place)):
                continue
            number += 1
            rest = dict(entry)
            if self._linear:
                name, parent = f"{number:08x}", last
            else:
                name, parent = rest.pop("id"), rest.pop("parentId", None)
            try:
                turn = self._turn(name, parent, rest, place)
            except RecursionError:
                self._losses.fault("nested too deep", place)
                continue
            if turn is not None:
                self._parents[name] = parent
                last = name
                if entry["type"] == "session_info":
                    called = entry.get("name")
                    conversation.title = (called.strip() or None) if isinstance(called, str) else None
                elif entry["type"] == "label":
                    self._labels.tell(entry)
                yield turn
        conversation.heads = {label: name for label, name in self._labels.heads.items() if name in self._parents}

    def _sound(self, entry: dict[str, Any], place: str) -> bool:
        losses = self._losses
        return expect(entry.get("type"), str, "an entry's type", place, losses) and (
            self._linear
            or (
                expect(entry.get("id"), str, "an entry's id", place, losses)
                and expect(entry.get("parentId"), (str, type(None)), "an entry's parentId", place, losses)
            )
        )

    def _turn(self, name: str, parent: str | None, entry: dict[str, Any], place: str) -> Turn | None:
        """A turn of an entry without its ids; None where that is a fault. What the message says is taken out of the entry."""
        role = entry["type"]
        fields: dict[str, Any] = {"entry": entry}
        images: list[Image] = []
        message: dict[str, Any] | None = None
        if role == "message":
            said = entry.get("message")
            if not expect(said, (dict, type(None)), "a message", place, self._losses):
                return None
            if said is not None:
                role = said.get("role")
                if not expect(role, str, "a message's role", place, self._losses):
                    return None
                if role in _ROLES or role in _AS_USER:
                    fields["message"] = dict(entry.pop("message"))
                    message = self._message(fields, images, f"{place}, message")
                    if message is None:
                        return None
                elif role == "bashExecution" and not said.get("excludeFromContext"):
                    message = _bash_message(fields)
        elif role == "custom_message":
            message = self._content("user", entry, fields, images, place)
            if message is None:
                return None
        elif role in _SUMMARIES and isinstance(entry.get("summary"), str) and entry["summary"]:
            message = {"role": "user", "content": entry.pop("summary")}
        reason = fields.get("message", {}).get("stopReason")
        return Turn(
            id=name,
            parent=parent,
            message=message,
            role=role,
            images=tuple(images),
            created_at=seconds(entry.get("timestamp")),
            generated=message is not None and message["role"] == "assistant",
            finish_reason=_REASONS.get(reason) if isinstance(reason, str) else None,
            derived_from=self._sources(parent, entry),
            fields=fields,
            place=place,
        )

    def _message(self, fields: dict[str, Any], images: list[Image], place: str) -> dict[str, Any] | None:
        """The normal form of a message of pi, what it says being taken out of ``fields``; None where that is a fault."""
        rest = fields["message"]
        role = _ROLES.get(rest["role"], "user")
        if rest["role"] in _ROLES:
            del rest["role"]
        if role == "system" and _has_sections(rest):
            content, sections = rest.pop("content"), rest.pop("sections")
            fields["sections"] = [len(content), *([name, None if text is None else len(text)] for name, text in sections.items())]
            message: dict[str, Any] | None = {"role": role, "content": _BETWEEN.join(filter(None, [content, *sections.values()]))}
        else:
            message = self._content(role, rest, fields, images, place)
        if message is None:
            return None
        if self._tools and rest.get("toolsAdded") is self._tools:
            del rest["toolsAdded"]
            fields["tools"] = True
        if role == "tool":
            if isinstance(rest.get("toolName"), str):
                message["name"] = rest.pop("toolName")
            if isinstance(rest.get("toolCallId"), str):
                message["tool_call_id"] = rest.pop("toolCallId")
            if message.get("tool_call_id") not in self._calls:
                self._losses.add("a tool result without its call", place)
        self._calls.update(call["id"] for call in message.get("tool_calls", ()))
        return message

    def _content(
        self, role: str, rest: dict[str, Any], fields: dict[str, Any], images: list[Image], place: str
    ) -> dict[str, Any] | None:
        """A message of the content of ``rest``, which is taken out of it; None where that is a fault."""
        content = rest.get("content")
        if not expect(content, (str, list, type(None)), "a message's content", place, self._losses):
            return None
        if content is None:
            if "content" not in rest:
                fields["layout"] = _MISSING
            return {"role": role, "content": None}
        del rest["content"]
        if isinstance(content, str):
            if role in _OF_BLOCKS:
                fields["layout"] = _TEXT
            return {"role": role, "content": content}
        apart = take_apart(content, _FORM, images, f"{place}.content", self._losses)
        message = apart.message(role)
        if apart.layout != usual_layout({**message, "role": "user"}):
            fields["layout"] = apart.layout
        return message

    def _sources(self, parent: str | None, entry: dict[str, Any]) -> tuple[str, ...]:
        """What a summary is of: the last of the turns that it stands for."""
        source: Any = None
        if entry["type"] == "branch_summary":
            source = entry.get("fromId")
        elif entry["type"] == "compaction":
            kept = entry.get("firstKeptEntryId")
            if isinstance(index := entry.get("firstKeptEntryIndex"), int):
                kept = f"{index:08x}"
            source = self._parents[kept] if isinstance(kept, str) and kept in self._parents else parent
        return (source,) if isinstance(source, str) and source in self._parents else ()


def _has_sections(message: Mapping[str, Any]) -> bool:
    sections = message.get("sections")
    return (
        isinstance(message.get("content"), str)
        and isinstance(sections, dict)
        and all(text is None or isinstance(text, str) for text in sections.values())
    )


def _bash_message(fields: dict[str, Any]) -> dict[str, Any] | None:
    """What a command of the user's and its output say to the model; None where they are no text, and ``fields`` as they were."""
    said = fields["entry"]["message"]
    command, output = said.get("command"), said.get("output")
    if not (isinstance(command, str) and isinstance(output, str)):
        return None
    code = said.get("exitCode")
    ended = "\n\n(cancelled)" if said.get("cancelled") else f"\n\n(exit code {code})" if code else ""
    text = f"Ran `{command}`:\n```\n{output}\n```{ended}"
    begin = len("Ran ``:\n```\n") + len(command)
    del fields["entry"]["message"]
    fields["message"] = {key: value for key, value in said.items() if key not in ("command", "output")}
    fields["bash"] = [len(command), begin, begin + len(output)]
    return {"role": "user", "content": text}


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """The header and a line for each entry."""
    write_lines(path, (line for conversation in conversations for line in _Lines(conversation, losses)))


class _Lines:
    """The lines of a session."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self._losses = losses
        self._conversation = conversation
        header = conversation.fields.get("header")
        self._header: Mapping[str, Any] | None = header
        self._turns: Iterable[Turn] = conversation.turns
        #: Version 1 as it was, or what was version 1 and is a tree now.
        self._linear = self._migrated = False
        if header is not None and (header.get("version") or 1) < 2:
            turns = self._turns = list(conversation.turns)
            ids = [None, *(turn.id for turn in turns)]
            own = all(turn.parent == parent and "entry" in turn.fields for turn, parent in zip(turns, ids, strict=False))
            self._linear = own and all(item == (MAIN, ids[-1]) for item in conversation.heads.items())
            self._migrated = not self._linear
        self._labels = _Labels()
        self._tools: list[Any] = list(conversation.tools)
        self._called: dict[str, str] = {}  # names of tools, by ids of calls

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        conversation = self._conversation
        yield self._head()
        if self._header is None and conversation.title:
            yield self._added("session_info", None, "a title is an entry of its own", name=conversation.title)
        last: str | None = None
        for turn in self._turns:
            last = turn.id
            yield from [self._own(turn)] if "entry" in turn.fields else self._entries(turn)
        if self._tools and self._header is None:
            self._losses.add("tools, where no message of the system comes first", conversation.id)
        if self._linear:
            return
        for label, name in conversation.heads.items():
            if label == MAIN or self._labels.heads.get(label) == name:
                continue
            if name in self._labels.of:
                self._losses.add("heads at a turn that has a label", label)
                continue
            made = self._added("label", last, "a head is an entry of its own", targetId=name, label=label)
            self._labels.tell(made)
            last = str(made["id"])
            yield made
        main = conversation.heads.get(MAIN)
        if main is not None and main != last:
            yield self._added("custom", main, "that another turn than the last is main is an entry of its own", customType=MAIN)

    def _head(self) -> Mapping[str, Any]:
        conversation = self._conversation
        if self._header is None:
            time = iso(conversation.created_at or 0.0)
            return {"type": "session", "version": _VERSION, "id": conversation.id, "timestamp": time, "cwd": ""}
        header = {**self._header, "type": "session"}
        if conversation.read_as is not None:
            header["id"] = conversation.id
        return header | ({"version": _VERSION} if self._migrated else {})

    def _added(self, kind: str, parent: str | None, why: str, **said: Any) -> Mapping[str, Any]:
        """An entry that is no turn."""
        conversation = self._conversation
        self._losses.add(why, conversation.id)
        name = uuid5(NAMESPACE_OID, json.dumps([conversation.id, kind, parent, said])).hex
        return {"type": kind, "id": name, "parentId": parent, "timestamp": iso(conversation.created_at or 0.0), **said}

    def _own(self, turn: Turn) -> Mapping[str, Any]:
        """The entry that a turn was read from."""
        fields, said = turn.fields, turn.message
        entry = dict(fields["entry"])
        if said is not None and "message" in fields:
            message = dict(fields["message"])
            entry["message"] = message
            message.setdefault("role", _ROLE_OF.get(said["role"], "custom"))
            if "bash" in fields:
                command, begin, end = fields["bash"]
                message |= {"command": said["content"][5 : 5 + command], "output": said["content"][begin:end]}
            elif "sections" in fields:
                message |= _sections(said["content"], fields["sections"])
            else:
                self._put_content(turn, message)
            if "tools" in fields:
                message["toolsAdded"] = [tool["function"] for tool in self._tools]
                self._tools = []
            if said["role"] == "tool":
                message |= {ours: said[name] for name, ours in _OF_RESULTS.items() if name in said}
            if self._migrated and message["role"] == "hookMessage":
                message["role"] = "custom"
        elif said is not None and entry["type"] == "custom_message":
            self._put_content(turn, entry)
        elif said is not None:
            entry["summary"] = said["content"]
        if entry["type"] == "label":
            self._labels.tell(entry)
        if self._linear:
            return entry
        if self._migrated and isinstance(index := entry.pop("firstKeptEntryIndex", None), int) and index > 0:
            entry["firstKeptEntryId"] = f"{index:08x}"
        return entry | {"id": turn.id, "parentId": turn.parent}

    def _put_content(self, turn: Turn, entry: dict[str, Any]) -> None:
        """Content of a turn's message, as it was read, into an entry or message that has all else."""
        assert turn.message is not None
        layout, content = turn.fields.get("layout"), turn.message["content"]
        if layout == _MISSING or "content" in entry:  # the latter is null
            return
        whole = layout == _TEXT or (layout is None and isinstance(content, str) and turn.message["role"] not in _OF_BLOCKS)
        entry["content"] = content if whole else put_together(turn, _unrolled(turn.message), layout, _FORM, self._losses)

    def _entries(self, turn: Turn) -> Iterator[Mapping[str, Any]]:
        """The entries of a turn that was none of pi's: one, or several for several results."""
        losses, place = self._losses, str(turn.id)
        messages = messages_of(turn)
        if len(messages) > 1:
            losses.add("a turn with several results of tools is an entry for each", place)
        time = turn.created_at or 0.0
        parent = turn.parent
        for number, message in enumerate(messages or [None], 1):
            name = turn.id if number >= len(messages) else f"{turn.id}-{number}"
            entry = {"id": name, "parentId": parent, "timestamp": iso(time)}
            if message is None:
                yield {**entry, "type": "custom", "customType": turn.role}
            else:
                yield {**entry, **self._said(turn, message, int(time * 1000))}
            parent = name

    def _said(self, turn: Turn, message: Message, time: int) -> Mapping[str, Any]:
        """What an entry says of a message in the normal form."""
        losses, place = self._losses, str(turn.id)
        role = message["role"]
        content = message.get("content")
        blocks = put_together(turn, _unrolled(message), None, _FORM, losses)
        said: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else blocks, "timestamp": time}
        match role:
            case "assistant":
                calls = [block for block in blocks if block["type"] == "toolCall"]
                self._called.update((call["id"], call["name"]) for call in calls)
                reason = _REASON_OF.get(turn.finish_reason or "", "toolUse" if calls else "stop")
                said |= {"content": blocks, **_UNKNOWN_MODEL, "usage": _NO_USAGE, "stopReason": reason}
            case "tool":
                call = message.get("tool_call_id") or ""
                name = message.get("name") or self._called.get(call, "")
                said |= {"role": "toolResult", "content": blocks, "toolCallId": call, "toolName": name, "isError": False}
            case "system" | "developer":
                if role == "developer":
                    losses.add("messages of the developer are the system's", place)
                said["role"] = "system"
                if self._tools:
                    said["toolsAdded"] = [tool.get("function", tool) for tool in self._tools]
                    self._tools = []
            case "user":
                if "name" in message:
                    losses.add("names of who speaks", place)
            case _:
                losses.add(f"the role {role}: it is custom", place)
                return {"type": "custom_message", "customType": role, "content": said["content"], "display": True}
        return {"type": "message", "message": said}


def _unrolled(message: Message) -> Message:
    """A message whose content is blocks, whoever says it: what a tool gave back is none in itself."""
    return {**message, "role": "user"}


def _sections(text: str, lengths: list[Any]) -> dict[str, Any]:
    """Content and sections of a message of the system, of their lengths."""
    pieces, at = [], 0
    for length in (lengths[0], *(length for _, length in lengths[1:])):
        pieces.append(None if length is None else text[at : at + length])
        at += length + len(_BETWEEN) if length else 0
    return {"content": pieces[0], "sections": {name: piece for (name, _), piece in zip(lengths[1:], pieces[1:], strict=True)}}


FORMAT: Final = Format(
    "pi",
    "sessions of the pi coding agent, versions 1 to 3 (JSONL)",
    ".jsonl",
    read,
    write,
    single=True,
    lacks=frozenset({"token_ids", "derived_from", "annotations"}),
    keys=frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}),
)
