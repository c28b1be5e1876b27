"""What the tests of transcripts share: files through a store and back, and random messages in the normal form."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sessiontree import SessionStore
from sessiontree.interchange import Conversation, Image, ImportReport, Losses, SourceFile, Turn, export_file, import_file
from sessiontree.interchange.formats import format_named

GOLDEN = Path(__file__).parent / "golden" / "interchange"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def lines_of(path: Path) -> list[Any]:
    """The JSON values of a file's lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]


def put_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def conversation_of(path: Path, name: str, losses: Losses | None = None) -> tuple[Conversation, list[Turn]]:
    """The one conversation of a file, and its turns."""
    read = format_named(name).read
    assert read is not None
    [conversation] = read(SourceFile(path), losses or Losses(path.name))
    turns = list(conversation.turns)
    conversation.turns = turns
    return conversation, turns


def write_to(path: Path, name: str, conversation: Conversation) -> Losses:
    """A conversation as a file; what was lost."""
    write = format_named(name).write
    assert write is not None
    losses = Losses(path.name)
    write([conversation], path, losses)
    return losses


def through_store(path: Path, name: str, out: Path) -> tuple[ImportReport, list[Any]]:
    """A file into a store and out again: the report of the import, and the lines that come out. Nothing is lost on the way out."""
    with SessionStore.in_memory() as store:
        report = import_file(store, path, name)
        exported = export_file(store, out, name)
        assert not exported.lost
        session = store.get(report.session_ids[0])
        assert len(session.tree) - 1 == report.turns == exported.turns  # the root is no turn
    found = lines_of(out)
    out.unlink()
    return report, found


def pixel() -> Image:
    """A picture."""
    return Image(base64.b64decode(PIXEL), "image/png")


texts = st.text(st.characters(exclude_categories=[]), max_size=12)  # with lone surrogates
words = st.text("abcdef 0-", min_size=1, max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6)
mappings = st.dictionaries(words, values, max_size=3)
pictures = st.binary(min_size=1, max_size=9).map(lambda data: base64.b64encode(data).decode())


@st.composite
def with_more(draw: st.DrawFn, known: Mapping[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    """A mapping of known keys, and sometimes of others."""
    return draw(st.just({}) | mappings) | {key: draw(value) for key, value in known.items()}


calls = st.builds(
    lambda name, arguments, number: {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}},
    words,
    mappings.map(lambda made: json.dumps(made, ensure_ascii=False)),
    st.integers(0, 9),
)
parts = st.builds(lambda text: {"type": "text", "text": text}, texts) | st.just({"type": "image", "image": 0})
contents = texts | st.lists(parts, min_size=1, max_size=3)
results = st.builds(
    lambda number, content: {"type": "tool_result", "tool_call_id": f"c{number}", "content": content}, st.integers(0, 9), contents
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any] | None:
    """A message in the normal form, or none."""
    match draw(st.sampled_from(["user", "assistant", "tool", "results", "system", "developer", "critic", "none"])):
        case "none":
            return None
        case "user":
            return {"role": "user", "content": draw(contents)}
        case "assistant":
            message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | texts)}
            if reasoning := draw(texts):
                message["reasoning_content"] = reasoning
            if made := draw(st.lists(calls, max_size=2)):
                message["tool_calls"] = made
            return message
        case "tool":
            return {"role": "tool", "tool_call_id": f"c{draw(st.integers(0, 9))}", "content": draw(contents)}
        case "results":
            return {"role": "tool", "content": draw(st.lists(results, min_size=2, max_size=3))}
        case role:
            return {"role": role, "content": draw(texts)}


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """A tree of messages that no format has touched."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.sampled_from([turn.id for turn in turns])) if turns else None
        created_at = draw(st.none() | st.integers(0, 2**31).map(float))
        message = draw(messages())
        turns.append(Turn(id=f"turn {number}", parent=parent, message=message, images=(pixel(),), created_at=created_at))
    heads = {"main": draw(st.sampled_from([str(turn.id) for turn in turns]))}
    return Conversation(id="a conversation", turns=turns, heads=heads, title=draw(st.none() | st.just("A title")))
