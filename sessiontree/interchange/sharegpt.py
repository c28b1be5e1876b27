"""ShareGPT conversations: ``{"id", "conversations": [{"from", "value"}, ...]}``, a JSON list of them or a line for each.

What fine-tuning takes (LLaMA-Factory, Axolotl, FastChat, LLaVA, Unsloth), in the dialects that these read: who speaks is "human",
"gpt", "system", "function_call", "observation" and a few more, or ``role`` and ``content`` instead of ``from`` and ``value``;
beside the list there may be ``system``, ``tools`` (JSON, as text or as it is), ``images`` (for each "<image>" in the text a path, a
URL or a data URL) and, of a preference, ``chosen`` and ``rejected``, which are two children of the last turn.

Each entry, and ``system`` beside them, is a turn. A row holds no tree: of one, a row for each branch is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import attrs

from sessiontree.interchange.conversations import MAIN, Branch, Conversation, Image, Tree, Turn, calls_of, parts_of
from sessiontree.interchange.formats import LACKING, Format
from sessiontree.interchange.images import as_data_url, from_data_url, from_file
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.openai import with_images, with_urls
from sessiontree.interchange.source import SourceFile, expect
from sessiontree.interchange.words import to_json

_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
_WRITTEN: Final = {
    "user": "human",
    "assistant": "gpt",
    "system": "system",
    "developer": "system",
    "tool": "observation",
    "function": "observation",
}
_CALL: Final = "function_call"
_IMAGE: Final = "<image>"
_PREFERENCE: Final = ("chosen", "rejected")
#: What a row says of its answer.
_JUDGEMENTS: Final = frozenset({"kto_tag", "label"})

#: What an entry may say in OpenAI's form beside its text.
_AS_OPENAI: Final = ("name", "reasoning_content", "tool_calls", "tool_call_id")

#: How JSON is written as text: by index in `fields`.
_STYLES: Final = tuple(
    json.JSONEncoder(ensure_ascii=escaped, separators=separators)
    for escaped, separators in product((False, True), ((", ", ": "), (",", ":")))
)


# Reading


def read(file: SourceFile, losses: Losses) -> Iterator[Conversation]:
    """A conversation for each row, called by its ``id``; by the file and its number where it has none, or one that was there."""
    seen: set[str] = set()
    for place, row in file.items(losses) if file.first_byte() == b"[" else file.lines(losses):
        if not expect(row, dict, "a row", place, losses):
            continue
        entries = row.pop("conversations", None)
        if not expect(entries, list, "conversations", place, losses):
            continue
        number = "".join(filter(str.isdigit, place))
        name = row.get("id")
        name = str(name) if isinstance(name, (str, int)) and name != "" else f"{file.stem}-{number}"
        while name in seen:
            name = f"{name}-{number}"
        seen.add(name)
        fields: dict[str, Any] = {"row": row}
        yield Conversation(
            id=name,
            mark=file.mark,
            tools=_tools(row, fields, place, losses),
            turns=_Row(file, fields, entries, place, losses).turns(),
            heads={MAIN: "chosen"} if _is_preference(row) else {},
            fields=fields,
        )


def _is_preference(row: Mapping[str, Any]) -> bool:
    return all(isinstance(row.get(name), dict) for name in _PREFERENCE)


def _tools(row: dict[str, Any], fields: dict[str, Any], place: str, losses: Losses) -> tuple[Mapping[str, Any], ...]:
    """Definitions in OpenAI's form. Where ``_as_tools`` makes the same of them again, they are taken out of the row."""
    said = row.get("tools")
    if not said:
        return ()
    try:
        found = json.loads(said) if isinstance(said, str) else said
    except (ValueError, RecursionError) as error:
        losses.add("tools that are no JSON", f"{place}: {error}")
        return ()
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        losses.add("tools that are no list of mappings", place)
        return ()
    tools = tuple(each if isinstance(each.get("function"), dict) else {"type": "function", "function": each} for each in found)
    for style, bare in product((None, *range(len(_STYLES))), (True, False)):
        again = _as_tools(tools, style, bare)
        if type(again) is type(said) and again == said:
            row["tools"] = None
            fields["tools"] = [style, bare]
            break
    return tools


def _as_tools(tools: Iterable[Mapping[str, Any]], style: int | None, bare: bool) -> Any:
    made = [each["function"] if bare else each for each in tools]
    return made if style is None else _STYLES[style].encode(made)


class _Row:
    """A row on its way to turns. What these take over of it, it says no more."""

    def __init__(self, file: SourceFile, fields: dict[str, Any], entries: list[Any], place: str, losses: Losses) -> None:
        self._file = file
        self._fields = fields
        self._row: dict[str, Any] = fields["row"]
        self._entries = entries
        self._place = place
        self._losses = losses
        self._calls: list[str] = []  # ids of those without a result

    def turns(self) -> Iterator[Turn]:
        """Turns; with ids where two of them have the same parent."""
        row, place = self._row, self._place
        pictures = iter(self._pictures())
        named = _is_preference(row)
        before: str | None = None
        if isinstance(row.get("system"), str) and row["system"]:
            before = "system"
            message = {"role": "system", "content": row["system"]}
            row["system"] = ""
            yield Turn(id=before if named else None, message=message, fields={"as": "system"}, place=f"{place}.system")
        for number, entry in enumerate(self._entries):
            turn = self._turn(entry, f"{number}", f"{place}.conversations[{number}]", pictures)
            if turn is not None:
                yield attrs.evolve(turn, id=f"{number}", parent=before) if named else turn
                before = f"{number}"
        for name in _PREFERENCE if named else ():
            turn = self._turn(row.pop(name), name, f"{place}.{name}", iter(()))
            if turn is not None:
                yield attrs.evolve(turn, id=name, parent=before, fields={**turn.fields, "as": name})

    def _turn(self, entry: Any, name: str, place: str, pictures: Iterator[Image | str]) -> Turn | None:
        losses = self._losses
        if not expect(entry, dict, "an entry", place, losses):
            return None
        speaker, key = entry.get("role") if entry.get("from") is None else entry["from"], _text_key(entry)
        text = entry.get(key)
        if not (
            expect(speaker, str, "who speaks", place, losses)
            and expect(text, (str, list, type(None)), "what is said", place, losses)
        ):
            return None
        message: dict[str, Any] = {"role": _ROLES.get(speaker, speaker), "content": text}
        fields: dict[str, Any] = {"entry": entry}
        images: tuple[Image, ...] = ()
        if said := [each for each in _AS_OPENAI if each in entry and _is_openai(each, entry[each])]:
            fields["said"] = said
            message |= {each: entry.pop(each) for each in said}
        elif "tool_calls" in entry:
            losses.add("tool calls that are not as OpenAI has them", place)
        if isinstance(text, list):
            entry[key] = []
            message["content"], images = with_images(text, place, losses)
        elif text is not None:
            entry[key] = ""
            if speaker == _CALL and "tool_calls" not in message:
                self._call(message, text, name, fields, place)
            elif _IMAGE in text:
                message["content"], images = _with_pictures(text, pictures)
        self._pair(message, place)
        return Turn(message=message, images=images, fields=fields, place=place)

    def _call(self, message: dict[str, Any], text: str, name: str, fields: dict[str, Any], place: str) -> None:
        """Makes an entry of calls, ``{"name", "arguments"}`` or a list of them, tool calls."""
        try:
            found = json.loads(text)
            calls = found if isinstance(found, list) else [found]
            functions = [{"name": each["name"], "arguments": _as_text(each["arguments"])} for each in calls]
        except (ValueError, RecursionError, LookupError, TypeError):
            functions = []
        if not functions or not all(isinstance(each["name"], str) for each in functions):
            self._losses.add("function calls that are no JSON of a name and arguments", place)
            return
        message["content"] = None
        message["tool_calls"] = [
            {"id": f"call_{name}_{number}", "type": "function", "function": function} for number, function in enumerate(functions)
        ]
        for how in product(range(len(_STYLES)), (False, True), (False, True)):
            if _call_text(message["tool_calls"], *how) == text:
                fields["call"] = list(how)
                return
        fields["entry"][_text_key(fields["entry"])] = text  # nothing else makes it again

    def _pair(self, message: dict[str, Any], place: str) -> None:
        """Results without an id answer calls in their order."""
        if message["role"] == "user":
            self._calls = []
        elif calls := message.get("tool_calls"):
            self._calls = [call["id"] for call in calls]
        elif message["role"] == "tool":
            answered = message.get("tool_call_id", next(iter(self._calls), None))
            if answered in self._calls:
                self._calls.remove(answered)
                message["tool_call_id"] = answered
            else:
                self._losses.add("a tool result without its call", place)

    def _pictures(self) -> list[Image | str]:
        """What each "<image>" of the text stands for, in order: a picture, or its name where that is all there is."""
        row, losses = self._row, self._losses
        key = _pictures_key(row)
        said = row.get(key)
        names = [said] if isinstance(said, str) else said
        if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
            return []
        texts = (entry.get(_text_key(entry)) for entry in self._entries if isinstance(entry, dict))
        if sum(text.count(_IMAGE) for text in texts if isinstance(text, str)) != len(names):
            losses.add("pictures of a row that has not as many <image> in its text", self._place, len(names))
            return []
        pictures: list[Image | str] = [self._picture(each) for each in names]
        left = [None if _is_data(each) and isinstance(found, Image) else each for each, found in zip(names, pictures, strict=True)]
        row[key] = left if said is names else left[0]
        self._fields["pictures"] = True
        return pictures

    def _picture(self, name: str) -> Image | str:
        if _is_data(name):
            image = from_data_url(name, self._place, self._losses)
            return image if image is not None and as_data_url(image) == name else name
        if "://" in name:
            return name
        folder = Path(str(self._file.path)).parent.resolve()
        try:
            path = (folder / name).resolve()
            if path.is_relative_to(folder) and path.is_file():  # a file of others reads none outside of its folder
                return from_file(path)
        except (OSError, ValueError):
            pass
        self._losses.add("pictures whose files are not there", self._place)
        return name


def _text_key(entry: Mapping[str, Any]) -> str:
    return "value" if "value" in entry else "content"


def _pictures_key(row: Mapping[str, Any]) -> str:
    return "images" if "images" in row else "image"


def _is_data(name: str) -> bool:
    return name.startswith("data:")


def _is_openai(name: str, value: Any) -> bool:
    """Whether what an entry says under that name has the form that OpenAI's messages have it in."""
    if name != "tool_calls":
        return isinstance(value, str)
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(call, dict)
            and isinstance(call.get("id"), str)
            and isinstance(call.get("function"), dict)
            and isinstance(call["function"].get("name"), str)
            and isinstance(call["function"].get("arguments"), str)
            for call in value
        )
    )


def _with_pictures(text: str, pictures: Iterator[Image | str]) -> tuple[Any, tuple[Image, ...]]:
    """Content of a text in which "<image>" stands for the next of the pictures; the text where there are none."""
    first, *others = text.split(_IMAGE)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    images: list[Image] = []
    for other in others:
        picture = next(pictures, None)
        if picture is None:
            return text, ()
        if isinstance(picture, Image):
            parts.append({"type": "image", "image": len(images)})
            images.append(picture)
        else:
            parts.append({"type": "image_url", "image_url": {"url": picture}})
        if other:
            parts.append({"type": "text", "text": other})
    return parts, tuple(images)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call_text(calls: Iterable[Mapping[str, Any]], style: int, many: bool, as_text: bool) -> str | None:
    """The entry that says these calls. ``many``: in a list; ``as_text``: arguments are text in it. None where they cannot be."""
    try:
        made = [
            {"name": call["function"]["name"], "arguments": arguments if as_text else json.loads(arguments)}
            for call in calls
            for arguments in [call["function"]["arguments"]]
        ]
        return _STYLES[style].encode(made if many or len(made) != 1 else made[0])
    except (ValueError, RecursionError):
        return None


# Writing


def write(conversations: Iterable[Conversation], path: Path, losses: Losses) -> None:
    """A list of rows, one for each branch; a line for each where the name of the file says ``.jsonl``."""
    lines = ".jsonl" in path.suffixes
    with path.open("w", encoding="utf-8") as file:
        before = "" if lines else "["
        for conversation in conversations:
            for row in _rows(conversation, losses):
                file.write(before + to_json(row) + ("\n" if lines else ""))
                before = "" if lines else ",\n"
        if not lines:
            file.write("[]\n" if before == "[" else "]\n")


def _rows(conversation: Conversation, losses: Losses) -> Iterator[dict[str, Any]]:
    """A row for each branch; for two answers of which one was preferred, one for both, also where more was said after either."""
    tree, count = Tree(conversation), 0
    pairs: dict[Any, dict[str, Turn]] = {}
    for turn in tree.turns.values():
        if turn.fields.get("as") in _PREFERENCE:
            pairs.setdefault(turn.parent, {})[turn.fields["as"]] = turn
    waiting = {parent: pair for parent, pair in pairs.items() if len(pair) == len(_PREFERENCE)}
    if alone := len(pairs) - len(waiting):
        losses.add("that an answer was preferred to another, which is not written", conversation.id, alone)
    said: set[Any] = set()
    for branch in tree.branches() if tree.turns else [()]:
        tip = branch[-1] if branch else None
        if tip is not None and tip.fields.get("as") in _PREFERENCE and tip.parent in waiting:
            if tip.parent in said:
                continue
            said.add(tip.parent)
            yield _Written(conversation, losses).row(branch[:-1], waiting[tip.parent])
        else:
            yield _Written(conversation, losses).row(branch, {})
        count += 1
    for parent in waiting.keys() - said:
        yield _Written(conversation, losses).row(tree.path(parent) if parent is not None else (), waiting[parent])
        count += 1
    if count > 1:
        losses.add("a tree is written branch by branch: turns that branches share stand in each", conversation.id)


class _Written:
    """A row on its way to be written."""

    def __init__(self, conversation: Conversation, losses: Losses) -> None:
        self._conversation = conversation
        self._losses = losses
        name = {"id": conversation.id}
        self._row: dict[str, Any] = conversation.fields.get("row", name) | (name if conversation.read_as is not None else {})
        said = self._row.get(_pictures_key(self._row))
        self._one = not isinstance(said, list)
        self._names: list[Any] = [said] if self._one else list(said or ())
        self._met = 0  # of these, those that stand in turns
        self._added: list[Any] = []

    def row(self, branch: Branch, preferred: Mapping[str, Turn]) -> dict[str, Any]:
        conversation, row = self._conversation, self._row
        own = "row" in conversation.fields
        if own and branch and not preferred and not {"entry", "as"} & branch[-1].fields.keys():
            for name in _JUDGEMENTS & row.keys():
                del row[name]
                self._losses.add(f"{name} of a row, which is said of the answer that was read", conversation.id)
        entries: list[dict[str, Any]] = []
        for turn in branch:
            if turn.message is None:
                self._losses.add("turns that are no messages", conversation.id)
            elif turn.fields.get("as") == "system" and own:
                row["system"] = turn.message["content"]
            else:
                entries.extend(self._entries(turn))
        row |= {name: self._own(turn) for name, turn in preferred.items()}
        key = _pictures_key(row)
        names = [*(self._names[: self._met] if "pictures" in conversation.fields else self._names), *self._added]
        if key in row:
            row[key] = names[0] if self._one and len(names) == 1 else names
        elif self._added:
            row["images"] = self._added
        if "tools" in conversation.fields:
            row["tools"] = _as_tools(conversation.tools, *conversation.fields["tools"])
        elif conversation.tools and not own:
            row["tools"] = _as_tools(
                conversation.tools, 0, all(isinstance(each.get("function"), Mapping) for each in conversation.tools)
            )
        if not own and not _takes_turns([each["from"] for each in entries]):
            self._losses.add("rows whose sides do not take turns, which LLaMA-Factory passes over", conversation.id)
        return row | {"conversations": entries}

    def _entries(self, turn: Turn) -> Iterator[dict[str, Any]]:
        if "entry" in turn.fields:
            yield self._own(turn)
            return
        message, place = turn.message or {}, f"{self._conversation.id}, {turn.id}"
        if sum(part.get("type") == "text" for part in parts_of(message)) > 1:
            self._losses.add("parts of text, written as one", place)
        role = message.get("role")
        speaker = _WRITTEN.get(str(role))
        if speaker is None or role in ("developer", "function"):
            speaker = speaker or "human"
            self._losses.add(f"the role {role}, written as {speaker}", place)
        text = "".join(self._texts(turn, place))
        calls = list(calls_of(message))
        if text or not calls:
            yield {"from": speaker, "value": text}
        if calls:
            if text:
                self._losses.add("a message of text and calls, written as two", place)
            made = [{"name": name, "arguments": _value(arguments)} for _, name, arguments in calls]
            yield {"from": _CALL, "value": to_json(made if len(made) > 1 else made[0])}
            self._losses.add("ids of tool calls, which their order says", place)

    def _texts(self, turn: Turn, place: str) -> Iterator[str]:
        message = turn.message or {}
        if reasoning := message.get("reasoning_content"):
            self._losses.add("reasoning, written into the text between <think> and </think>", place)
            yield f"<think>\n{reasoning}\n</think>\n\n"
        for part in parts_of(message):
            kind, text = part.get("type"), part.get("text")
            if kind == "image" and isinstance(part.get("image"), int):
                self._added.append(as_data_url(turn.images[part["image"]]))
                yield _IMAGE
            elif isinstance(text, str):
                if _IMAGE in text:
                    self._losses.add("text that says <image> and means none", place)
                yield text
            elif kind == "image_url" and isinstance(part.get("image_url"), Mapping):
                self._added.append(part["image_url"].get("url"))
                yield _IMAGE
            else:
                self._losses.add(f"parts of messages of type {kind}", place)
        if isinstance(refusal := message.get("refusal"), str):
            self._losses.add("a refusal, written as text", place)
            yield refusal

    def _own(self, turn: Turn) -> dict[str, Any]:
        """The entry that a turn was read from."""
        message, fields = turn.message or {}, turn.fields
        entry = dict(fields["entry"])
        key = _text_key(entry)
        content = message.get("content")
        if "call" in fields:
            entry[key] = _call_text(message["tool_calls"], *fields["call"])
        elif isinstance(entry.get(key), (list, tuple)):
            entry[key] = with_urls(content, turn)
        elif isinstance(content, str):
            entry[key] = content
        elif isinstance(content, (list, tuple)):
            entry[key] = "".join(part["text"] if part["type"] == "text" else self._placed(part, turn) for part in content)
        return entry | {name: message[name] for name in fields.get("said", ())}

    def _placed(self, part: Mapping[str, Any], turn: Turn) -> str:
        if part["type"] == "image":
            if self._names[self._met] is None:
                self._names[self._met] = as_data_url(turn.images[part["image"]])
            else:
                self._losses.add("pictures that are files: named, not written", self._conversation.id)
        self._met += 1
        return _IMAGE


def _value(arguments: str) -> Any:
    """Arguments as they stand in an entry: a value, or the text where that is no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _takes_turns(speakers: list[str]) -> bool:
    """Whether who asks and who answers follow each other, after what the system says."""
    asks = [speaker in ("human", "observation") for speaker in speakers[speakers[:1] == ["system"] :]]
    return "system" not in speakers[1:] and all(asked == (at % 2 == 0) for at, asked in enumerate(asks)) and len(asks) % 2 == 0


FORMAT: Final = Format(
    "sharegpt",
    "ShareGPT conversations as fine-tuning takes them, a JSON list or JSONL",
    ".json",
    read,
    write,
    lacks=frozenset(LACKING),
    keys=frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "function_call", "refusal"}),
    one_result=True,
)
