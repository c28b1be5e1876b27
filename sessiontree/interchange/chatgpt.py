"""ChatGPT's data export: ``conversations.json``, ``conversations-000.json`` and on, alone, in their folder, or in the ZIP archive.

A file is a list of conversations, or one. Each has a ``mapping`` of node ids to nodes, ``{"id", "message", "parent", "children"}``;
every node becomes a turn, also those without a message, those that ChatGPT does not show, and system messages wherever they stand.
``parent`` says what the tree is; ``children``, which exports of 2026 may leave out, says in which order siblings stand.

Text and pictures of a message are taken out into its normal form, and all else of it stays in ``fields["message"]``, with "" where
text was. So each text is held once, whatever the ``content_type`` is, known to this module or not. An assistant's message to a tool
(its ``recipient``) is a tool call, "thoughts" are reasoning, and what only the page shows ("Thought for 8s") is no message.
"""

from __future__ import annotations

import json
import mimetypes
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, NamedTuple

from sessiontree.interchange.conversations import MAIN, Conversation, Image, Message, Tree, Turn, calls_of, parts_of
from sessiontree.interchange.formats import Format
from sessiontree.interchange.images import from_file
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import SourceFile, expect

_CONVERSATIONS: Final = "conversations.json"
_SHARD: Final = re.compile(r"conversations-\d+\.json")
_MANIFEST: Final = "export_manifest.json"
_POINTERS: Final = "conversation_asset_file_names.json"

#: Content that is shown to the user, or kept by ChatGPT for itself, and that no model said or was told as a message.
_NOTES: Final = ("reasoning_recap", "model_editable_context")

#: Where content has text, beside its parts: code, execution_output, tether_quote, system_error, tether_browsing_display, and so on.
_TEXTS: Final = ("text", "result", "user_profile", "user_instructions", "output_str")

#: What stands between thoughts where they are one text.
_BETWEEN: Final = "\n\n"


# Reading


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """The conversations of an export, called by their ``conversation_id``.

    ``file``: a file of conversations, or the folder or ZIP archive of the export, whose pictures are read as well.
    """
    seen: set[str] = set()
    try:
        for path, folder in _files(file.path, losses):
            part = file.part(path)
            pictures = _Pictures(folder)
            where = "" if path == file.path else path.name
            for place, value in _values(part, losses):
                made = _conversation(value, f"{part.stem}{place}", f"{where}{place}", pictures, losses)
                if made is None:
                    continue
                if made.id in seen:
                    losses.fault("a conversation of an id that was there before", f"{where}{place}", made.id)
                    continue
                seen.add(made.id)
                made.mark = part.mark or None
                yield made
    except _NO_ARCHIVE as error:
        losses.fault("a ZIP archive that cannot be read", file.path.name, str(error))


#: What reading an archive raises that is damaged or encrypted.
_NO_ARCHIVE: Final = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def _files(path: Path | zipfile.Path, losses: Losses) -> list[tuple[Path | zipfile.Path, Path | zipfile.Path]]:
    """Each file of conversations, and the folder that its pictures are in."""
    if path.is_dir():
        folder: Path | zipfile.Path = path
    elif isinstance(path, Path) and zipfile.is_zipfile(path):
        folder = zipfile.Path(path)
    else:
        assert isinstance(path, Path)
        with path.open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                losses.fault("a ZIP archive that cannot be read", "", "it was cut, or is damaged")
                return []
        return [(path, path.parent)]
    names = sorted(each.name for each in folder.iterdir() if each.name == _CONVERSATIONS or _SHARD.fullmatch(each.name))
    for name in sorted({*_declared(folder)} - {*names}):
        losses.fault("a file of the export is not there", _MANIFEST, name)
    if not names:
        losses.fault("no conversations.json", "")
    for each in sorted(each.name for each in folder.iterdir() if each.name.endswith((".json", ".html"))):
        if each not in (*names, _MANIFEST, _POINTERS):
            losses.add("files of the export that are no conversations", each)
    return [(folder / name, folder) for name in names]


def _declared(folder: Path | zipfile.Path) -> list[str]:
    """Files of conversations that the export says it has; none where it does not say."""
    path = folder / _MANIFEST
    if not path.is_file():
        return []
    try:
        names = json.loads(path.read_bytes())["logical_files"][_CONVERSATIONS]["files"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def _values(file: SourceFile, losses: Losses) -> Iterator[tuple[str, Any]]:
    if file.first_byte() == b"{":
        value = file.document(losses)
        return iter([] if value is None else [("", value)])
    return file.items(losses)


def _conversation(value: Any, other_name: str, place: str, pictures: _Pictures, losses: Losses) -> Conversation | None:
    if not expect(value, dict, "a conversation", place, losses):
        return None
    mapping = value.pop("mapping", None)
    name = value.get("conversation_id", value.get("id", other_name))
    if not (expect(mapping, dict, "its mapping", place, losses) and expect(name, str, "its id", place, losses)):
        return None
    nodes = {node_id: node for node_id, node in mapping.items() if _is_node(node, f"{place}.mapping.{node_id}", losses)}
    heads = {}
    if nodes:
        current = value.pop("current_node", None)
        if isinstance(current, str) and current in nodes:
            heads[MAIN] = current
        else:
            losses.fault("no current node", place, "none is named" if current is None else f"{current!r} is not there"[:80])
    return Conversation(
        id=name,
        turns=_turns(nodes, _ordered(nodes, place, losses), place, pictures, losses),
        title=value.pop("title") if value.get("title") and isinstance(value["title"], str) else None,
        created_at=_seconds(value.get("create_time")),
        heads=heads,
        fields={"conversation": value},
    )


def _is_node(node: Any, place: str, losses: Losses) -> bool:
    if not expect(node, dict, "a node", place, losses):
        return False
    message = node.get("message")
    if not (
        expect(node.get("parent"), (str, type(None)), "its parent", place, losses)
        and expect(node.get("children", []), list, "its children", place, losses)
        and all(expect(each, str, "a child", place, losses) for each in node.get("children", []))
        and expect(message, (dict, type(None)), "its message", place, losses)
    ):
        return False
    if message is None:
        return True
    return (
        expect(message.get("author"), dict, "its author", place, losses)
        and expect(message["author"].get("role"), str, "the role of its author", place, losses)
        and expect(message.get("content"), dict, "its content", place, losses)
    )


def _ordered(nodes: dict[str, Any], place: str, losses: Losses) -> list[str]:
    """Ids of all nodes, parents before their children, children in the order of their parents' lists.

    Those without a way to a first one, in a cycle or below it, come last.
    """
    below: dict[str | None, list[str]] = {}
    for node_id, node in nodes.items():
        below.setdefault(node.get("parent"), []).append(node_id)
    for node_id, node in nodes.items():
        listed, there = node.get("children"), below.get(node_id, [])
        if listed is not None and listed != there:
            ranks = {each: rank for rank, each in enumerate(listed)}
            if len(listed) != len(there) or ranks.keys() != {*there}:
                odd = next(iter(ranks.keys() ^ {*there}), "one is named twice")
                losses.fault("children that are not those that name it as their parent", f"{place}.mapping.{node_id}", odd)
            below[node_id] = sorted(there, key=lambda each: ranks.get(each, len(ranks)))
    order: dict[str, None] = {}
    waiting = [each for each in reversed(nodes) if nodes[each].get("parent") not in nodes]
    while waiting:
        at = waiting.pop()
        order[at] = None
        waiting.extend(reversed(below.get(at, [])))
    return [*order, *(each for each in nodes if each not in order)]


class _Call(NamedTuple):
    """A tool call that results may answer. ``tool``: whom it went to."""

    id: str
    tool: str


def _turns(nodes: Mapping[str, Any], order: list[str], place: str, pictures: _Pictures, losses: Losses) -> Iterator[Turn]:
    calls: dict[str | None, _Call | None] = {}  # the one that a result would answer, below each node
    for node_id in order:
        node, where = nodes[node_id], f"{place}.mapping.{node_id}"
        raw, parent = node.get("message"), node.get("parent")
        fields: dict[str, Any] = {"message": raw}
        if absent := [each for each in _OF_A_NODE if each not in node]:
            fields["absent"] = absent
        if beside := {name: value for name, value in node.items() if name not in _OF_A_NODE or (name == "id" and value != node_id)}:
            fields["node"] = beside
        message: Message | None = None
        images: tuple[Image, ...] = ()
        call = calls.get(parent)
        note = None if raw is None else raw["content"].get("content_type")
        if raw is not None and note not in _NOTES:
            said, images = _normal(raw, fields, pictures, where, losses)
            message, call = said, _paired(said, raw, node_id, call, fields, where, losses)
        calls[node_id] = call
        yield Turn(
            id=node_id,
            parent=parent,
            message=message,
            role=note if isinstance(note, str) else "note",
            images=images,
            created_at=None if raw is None else _seconds(raw.get("create_time")),
            fields=fields,
            place=where,
        )


_OF_A_NODE: Final = ("id", "message", "parent", "children")


def _normal(
    raw: dict[str, Any], fields: dict[str, Any], pictures: _Pictures, place: str, losses: Losses
) -> tuple[dict[str, Any], tuple[Image, ...]]:
    """A message in the form of :class:`Turn`, and its pictures. Its text is taken out of ``raw``."""
    author, content = raw["author"], raw["content"]
    message: dict[str, Any] = {"role": author["role"], "content": ""}
    if isinstance(author.get("name"), str):
        message["name"] = author["name"]
    if content.get("content_type") == "thoughts":
        thoughts = [_taken(*each) for each in _pieces(content)]
        message["reasoning_content"] = _BETWEEN.join(thoughts)
        if len(thoughts) > 1:
            fields["lengths"] = [len(each) for each in thoughts]
        return message, ()
    parts: list[dict[str, Any]] = []
    images: list[Image] = []
    for holder, key in _pieces(content):
        if isinstance(holder[key], str):
            parts.append({"type": "text", "text": _taken(holder, key)})
        elif (image := pictures.find(holder[key]["asset_pointer"], place, losses)) is None:
            losses.add("pictures whose files are not there", place)
            parts.append({"type": "image_url", "image_url": {"url": holder[key]["asset_pointer"]}})
        else:
            parts.append({"type": "image", "image": len(images)})
            images.append(image)
    if len(parts) == 1 and "text" in parts[0]:
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    return message, tuple(images)


def _pieces(content: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each text and each picture of the content of a message, in order."""
    if content.get("content_type") == "thoughts":
        thoughts = content.get("thoughts")
        for thought in thoughts if isinstance(thoughts, list) else ():
            if isinstance(thought, dict) and isinstance(thought.get("content"), str):
                yield thought, "content"
        return
    parts = content.get("parts")
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, str):
            yield parts, number
        elif isinstance(part, dict):
            kind = part.get("content_type")
            if kind == "image_asset_pointer" and isinstance(part.get("asset_pointer"), str):
                yield parts, number
            elif kind == "audio_transcription" and isinstance(part.get("text"), str):
                yield part, "text"
    for name in _TEXTS:
        if isinstance(content.get(name), str):
            yield content, name


def _taken(holder: Any, key: Any) -> str:
    text: str = holder[key]
    holder[key] = ""
    return text


def _paired(
    message: dict[str, Any],
    raw: dict[str, Any],
    node_id: str,
    call: _Call | None,
    fields: dict[str, Any],
    place: str,
    losses: Losses,
) -> _Call | None:
    """Makes a message to a tool a tool call, and gives a tool's message the id of the call it answers, which is ``call``.

    Gives the one that the next result would answer.
    """
    metadata, tool = raw.get("metadata"), raw.get("recipient")
    known = metadata.get("tool_call_id") if isinstance(metadata, dict) else None  # written by us
    role, text = message["role"], message["content"]
    if (
        role == "assistant"
        and isinstance(tool, str)
        and tool not in _NO_TOOL
        and isinstance(text, str)
        and "reasoning_content" not in message
    ):
        call = _Call(known if isinstance(known, str) else node_id, tool)
        if not _is_object(text):
            fields["input"] = True
            text = json.dumps({_INPUT: text}, ensure_ascii=False)
        message["content"] = None
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": tool, "arguments": text}}]
    elif role == "tool":
        name = message.get("name")
        if isinstance(known, str):
            message["tool_call_id"] = known
        elif call is not None and (name is None or name.partition(".")[0] == call.tool.partition(".")[0]):
            message["tool_call_id"] = call.id
        else:
            losses.add("a tool result without its call", place)
    return None if role == "user" else call


#: Recipients that are no tool.
_NO_TOOL: Final = ("", "all")

#: The argument that stands for what a tool takes as text, such as a program.
_INPUT: Final = "input"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _seconds(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15:
        return float(value)
    return None


class _Pictures:
    """Files of pictures in the folder of an export, by the ids that messages name them by."""

    def __init__(self, folder: Path | zipfile.Path) -> None:
        self._folder = folder
        self._files: dict[str, Path | zipfile.Path] | None = None

    def find(self, pointer: str, place: str, losses: Losses) -> Image | None:
        """The picture of an asset pointer, such as "file-service://file-ab12" or "sediment://file_ab12"."""
        named = _POINTER.match(pointer)
        if named is None:
            return None
        if self._files is None:
            self._files = dict(self._all())
        path = self._files.get(named[1])
        try:
            return None if path is None else from_file(path)
        except _NO_ARCHIVE as error:
            losses.fault("a picture that cannot be read", place, str(error))
            return None

    def _all(self) -> Iterator[tuple[str, Path | zipfile.Path]]:
        """Those beside conversations.json, and those in folders of pictures that were made; of two, the shorter name comes last."""
        files: list[Path | zipfile.Path] = []
        for each in self._folder.iterdir():
            files.extend(each.iterdir() if _MADE.match(each.name) and each.is_dir() else [each])
        for path in sorted(files, key=lambda each: (-len(each.name), each.name)):
            if (named := _FILE.match(path.name)) is not None and path.is_file():
                yield named[0], path


_FILE: Final = re.compile(r"file[-_](?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9A-Za-z]+)")
_POINTER: Final = re.compile(rf"(?:file-service|sediment)://({_FILE.pattern})")
_MADE: Final = re.compile(r"user-|dalle-generations")


# Writing


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """A list of all; with their pictures beside it where ``path`` is that of a ZIP archive."""
    if ".zip" not in path.suffixes:
        with path.open("wb") as file:
            _write_list(conversations, file, None, losses)
        return
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, TemporaryFile() as file:
        _write_list(conversations, file, archive, losses)
        file.seek(0)
        with archive.open(_CONVERSATIONS, "w", force_zip64=True) as out:
            shutil.copyfileobj(file, out)


def _write_list(conversations: Iterable[Conversation], file: IO[bytes], archive: zipfile.ZipFile | None, losses: Losses) -> None:
    between = b"["
    for conversation in conversations:
        made = _Writer(conversation, archive, losses).value()
        file.write(between + json.dumps(made).encode())
        between = b",\n"
    file.write(b"]" if between != b"[" else b"[]")


class _Writer:
    """Makes the value of one conversation."""

    def __init__(self, conversation: Conversation, archive: zipfile.ZipFile | None, losses: Losses) -> None:
        self._conversation = conversation
        self._tree = Tree(conversation)
        self._archive = archive
        self._losses = losses
        self._tools: dict[str, str] = {}  # called, by the ids of calls
        self._nodes: dict[str, dict[str, Any]] = {}

    def value(self) -> dict[str, Any]:
        conversation, turns = self._conversation, self._tree.turns
        own = conversation.fields.get("conversation")
        root = None if own is not None else self._add(self._free("client-created-root"), None, None)
        for turn in self._tree.depth_first():
            assert turn.id is not None and turn.parent is not ...
            parent = root if turn.parent is None else turn.parent
            if "message" in turn.fields:
                self._add(turn.id, self._own(turn), parent)
                continue
            messages = self._messages(turn, f"{conversation.id}, {turn.id}")
            for number, message in enumerate(messages, 1):
                node_id = turn.id if number == len(messages) else self._free(f"{turn.id}-{number}")
                parent = self._add(node_id, message and {"id": node_id} | message, parent)
        for turn_id, turn in turns.items():
            node = self._nodes[turn_id]
            node.update(turn.fields.get("node", {}))
            for name in turn.fields.get("absent", ()):
                del node[name]
        current = conversation.heads.get(MAIN) or next(reversed(turns), root)
        value: dict[str, Any] = {} if conversation.title is None else {"title": conversation.title}
        value |= self._skeleton() if own is None else own
        if conversation.read_as is not None:
            value |= {"conversation_id": conversation.id} | ({"id": conversation.id} if "id" in value else {})
        return value | {"mapping": self._nodes} | ({} if current is None else {"current_node": current})

    def _skeleton(self) -> dict[str, Any]:
        """What an export says of a conversation, for one that never was in ChatGPT."""
        conversation = self._conversation
        times = [turn.created_at for turn in self._tree.turns.values() if turn.created_at is not None]
        if conversation.created_at is not None:
            times.append(conversation.created_at)
        if not times:
            self._losses.add("when it was made is not known, and written as 1970", conversation.id)
        if conversation.tools:
            self._losses.add("definitions of tools", conversation.id)
        return {
            **_SKELETON,
            "title": conversation.title,
            "create_time": conversation.created_at or min(times, default=0.0),
            "update_time": max(times, default=0.0),
            "conversation_id": conversation.id,
            "id": conversation.id,
        }

    def _free(self, node_id: str) -> str:
        while node_id in self._tree.turns or node_id in self._nodes:
            node_id += "-"
        return node_id

    def _add(self, node_id: str, message: Any, parent: str | None) -> str:
        self._nodes[node_id] = {"id": node_id, "message": message, "parent": parent, "children": []}
        if parent is not None:
            self._nodes[parent]["children"].append(node_id)
        return node_id

    def _own(self, turn: Turn) -> Any:
        """The message that a turn was read from."""
        raw, message = turn.fields["message"], turn.message
        if raw is None or message is None:
            return raw
        content = {name: _loose(value) for name, value in raw["content"].items()}
        parts = message["content"] if isinstance(message["content"], (list, tuple)) else ()
        texts = _texts(message, turn.fields)
        pictures = (part for part in parts if part["type"] != "text")
        for holder, key in _pieces(content):
            if isinstance(holder[key], str):
                holder[key] = next(texts)
            else:
                named = _POINTER.match(holder[key]["asset_pointer"])
                if (part := next(pictures))["type"] == "image" and named is not None:
                    self._save(turn.images[part["image"]], named[1])
        return {**raw, "content": content}

    def _messages(self, turn: Turn, place: str) -> list[dict[str, Any] | None]:
        """Messages that together say what a turn says: its reasoning, its text and each tool call have a node of their own."""
        message = turn.message
        if message is None:
            self._losses.add("turns that are no messages: of them, only their place", place)
            return [None]
        role, name = message.get("role"), message.get("name")
        known = _ROLES.get(str(role), "user")
        author: dict[str, Any] = {"role": known, "name": name if isinstance(name, str) else None, "metadata": {}}
        made: list[dict[str, Any] | None] = []
        if role != known:
            self._losses.add(f"the role {role}, written as {known}", place)
        metadata: dict[str, Any] = {}
        if known == "tool" and isinstance(call := message.get("tool_call_id"), str):
            metadata["tool_call_id"] = call
            author["name"] = author["name"] or self._tools.get(call)
        if thoughts := message.get("reasoning_content"):
            thought = {"summary": "", "content": str(thoughts), "chunks": [], "finished": True}
            content: dict[str, Any] = {"content_type": "thoughts", "thoughts": [thought], "source_analysis_msg_id": turn.id}
            made.append(_envelope(turn, author, content, end_turn=False))
        calls = list(calls_of(message))
        parts = list(self._parts(turn, place))
        if parts or not (calls or made):
            kind = "text" if all(isinstance(part, str) for part in parts) else "multimodal_text"
            end_turn = not calls if known == "assistant" else None
            made.append(
                _envelope(turn, author, {"content_type": kind, "parts": parts or [""]}, end_turn=end_turn, metadata=metadata)
            )
        for call_id, tool, arguments in calls:
            if not _is_object(arguments):
                self._losses.add("arguments that are no JSON object: they are one of text", place)
            content = {"content_type": "code", "language": "unknown", "response_format_name": None, "text": arguments}
            metadata = {} if call_id is None else {"tool_call_id": call_id}
            recipient = f"functions.{tool}" if tool in _NO_TOOL else tool
            made.append(_envelope(turn, author, content, end_turn=False, metadata=metadata, recipient=recipient))
            if call_id is not None:
                self._tools[call_id] = recipient
        if len(made) > 1:
            self._losses.add("a message that is several nodes: its reasoning, its text, each tool call", place)
        return made

    def _parts(self, turn: Turn, place: str) -> Iterator[Any]:
        message = turn.message or {}
        for part in parts_of(message):
            kind = part.get("type")
            if kind == "image" and isinstance(part.get("image"), int):
                yield self._pointer(turn.images[part["image"]])
            elif isinstance(part.get("text"), str):
                yield part["text"]
            elif kind == "image_url" and isinstance(part.get("image_url"), Mapping):
                self._losses.add("pictures that are named only, written as links", place)
                yield f"![]({part['image_url'].get('url')})"
            else:
                self._losses.add(f"parts of messages of type {kind}", place)
        if isinstance(refusal := message.get("refusal"), str):
            self._losses.add("a refusal, written as text", place)
            yield refusal

    def _pointer(self, image: Image) -> dict[str, Any]:
        file_id = f"file_{sha256(image.data).hexdigest()[:32]}"
        self._save(image, file_id)
        pointer = {"content_type": "image_asset_pointer", "asset_pointer": f"sediment://{file_id}", "size_bytes": len(image.data)}
        return pointer | {"fovea": None, "metadata": None}

    def _save(self, image: Image, file_id: str) -> None:
        if self._archive is None:
            self._losses.add("pictures: a .zip holds them, a .json names them", self._conversation.id)
            return
        name = file_id + (mimetypes.guess_extension(image.mime_type) or ".dat")
        if name not in self._archive.NameToInfo:
            self._archive.writestr(name, image.data)


_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

_SKELETON: Final[Mapping[str, Any]] = {
    "moderation_results": [],
    "plugin_ids": None,
    "conversation_template_id": None,
    "gizmo_id": None,
    "gizmo_type": None,
    "is_archived": False,
    "is_starred": None,
    "safe_urls": [],
    "blocked_urls": [],
    "default_model_slug": None,
    "conversation_origin": None,
    "voice": None,
    "async_status": None,
    "disabled_tool_ids": [],
}


def _envelope(
    turn: Turn,
    author: Mapping[str, Any],
    content: Mapping[str, Any],
    *,
    end_turn: bool | None,
    metadata: Mapping[str, Any] | None = None,
    recipient: str = "all",
) -> dict[str, Any]:
    return {
        "author": author,
        "create_time": turn.created_at,
        "update_time": None,
        "content": content,
        "status": "finished_successfully",
        "end_turn": end_turn,
        "weight": 1.0,
        "metadata": metadata or {},
        "recipient": recipient,
        "channel": None,
    }


def _texts(message: Message, fields: Mapping[str, Any]) -> Iterator[str]:
    """The texts that were taken out of a message, in order."""
    content = message["content"]
    if "reasoning_content" in message:
        at = 0
        for length in fields.get("lengths") or [len(message["reasoning_content"])]:
            yield message["reasoning_content"][at : at + length]
            at += length + len(_BETWEEN)
    elif "tool_calls" in message:
        text = message["tool_calls"][0]["function"]["arguments"]
        yield json.loads(text)[_INPUT] if fields.get("input") else text
    elif isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if part["type"] == "text")


def _loose(value: Any) -> Any:
    """A copy of content that text can be put into."""
    if isinstance(value, (list, tuple)):
        return [dict(each) if isinstance(each, Mapping) else each for each in value]
    return value


FORMAT: Final = Format(
    "chatgpt",
    "ChatGPT's data export: conversations.json, or the folder or ZIP archive with its pictures",
    ".json",
    read,
    write,
    folder=True,
    lacks=frozenset({"heads", "token_ids", "finish_reason", "derived_from", "annotations"}),
    keys=frozenset({"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "function_call", "refusal"}),
    one_result=True,
)
