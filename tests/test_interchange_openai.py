"""OpenAI's chat messages: whatever a line says comes back, and what we write is what their own package takes."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionToolUnionParam
from pydantic import TypeAdapter

from sessiontree import InterchangeError, SessionStore
from sessiontree.interchange import (
    Conversation,
    ExportReport,
    Image,
    ImportReport,
    Losses,
    Turn,
    export_file,
    format_named,
    import_file,
    message_of,
)
from tests.openai_messages import is_valid

GOLDEN = Path(__file__).parent / "golden" / "interchange" / "openai"
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
WRITE = format_named("openai").write
TOOL: TypeAdapter[Any] = TypeAdapter(ChatCompletionToolUnionParam)


def imported(path: Path, *, salvage: bool = False) -> tuple[SessionStore, ImportReport]:
    store = SessionStore.in_memory()
    return store, import_file(store, path, "openai", salvage=salvage)


def exported(store: SessionStore, path: Path) -> tuple[list[Any], ExportReport]:
    report = export_file(store, path, "openai")
    return [json.loads(line) for line in path.read_bytes().splitlines()], report


def saved(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lost(report: ImportReport | ExportReport) -> dict[str, int]:
    return {loss.what: loss.count for loss in report.lost}


def call(call_id: str, arguments: str = '{"city": "Łódź"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def picture(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}, "strict": True}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "roles": [
        {"role": "developer", "content": "Be brief.", "name": "house"},
        {"role": "system", "content": [text("Be kind.")]},
        {"role": "user", "content": "Hello – 你好 🚢", "name": "Ann"},
        {"role": "system", "content": "It is late."},
        {"role": "assistant", "content": "Good night."},
    ],
    "pictures": [
        {
            "role": "user",
            "content": [text("See"), picture(PNG_URL, detail="low"), picture("https://example.org/a.png"), picture(PNG_URL)],
        },
        {"role": "assistant", "content": [text("A dot, twice.")]},
    ],
    "audio": [
        {"role": "user", "content": [AUDIO, {"type": "file", "file": {"file_id": "file-1"}}]},
        {"role": "assistant", "audio": {"id": "audio_1"}, "content": None},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("a"), call("b", "{}")]},
        {"role": "tool", "tool_call_id": "b", "content": "no city"},
        {"role": "tool", "tool_call_id": "a", "content": [text("rain")]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "assistant", "content": "Rain."},
    ],
    "refusals": [
        {"role": "user", "content": "How do I pick a lock?"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ],
    "functions": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "rain"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_kind_of_message_comes_back_and_is_one_for_openai(tmp_path: Path, name: str) -> None:
    messages = CONVERSATIONS[name]
    assert all(map(is_valid, messages))
    row = {"messages": messages, "tools": [WEATHER], "parallel_tool_calls": False, "metadata": {"split": "a"}}
    TOOL.validate_python(WEATHER)
    store, report = imported(saved(tmp_path / "in.jsonl", row, messages))
    assert report.session_ids == ("in-1", "in-2")
    assert report.turns == 2 * len(messages)
    assert not report.lost
    lines, told = exported(store, tmp_path / "out.jsonl")
    assert lines == [row, messages]
    assert not told.lost


def test_what_openai_agents_sends_of_its_session(tmp_path: Path) -> None:
    (row,) = (json.loads(line) for line in (GOLDEN / "agents.jsonl").read_text().splitlines())
    assert all(map(is_valid, row["messages"]))
    store, report = imported(GOLDEN / "agents.jsonl")
    assert (report.turns, report.images, report.lost) == (len(row["messages"]), 1, ())
    assert exported(store, tmp_path / "out.jsonl")[0] == [row]
    session = store.get("agents-1")
    assert session.validate(session.heads["main"]) == ()


def test_the_golden_file_is_what_openai_agents_makes_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("agents.models.chatcmpl_converter", reason="openai-agents is not installed", exc_type=ImportError)
    from tests.golden.interchange.openai import make_agents

    monkeypatch.setattr(make_agents, "HERE", tmp_path)
    make_agents.main()
    assert (tmp_path / "agents.jsonl").read_text() == (GOLDEN / "agents.jsonl").read_text()


def test_pictures_are_kept_as_bytes_and_once(tmp_path: Path) -> None:
    store, report = imported(saved(tmp_path / "in.jsonl", CONVERSATIONS["pictures"]))
    assert report.images == 2
    node = store.get("in-1").heads["main"].path()[1]
    said = message_of(node)
    assert said is not None
    assert said["content"] == [
        text("See"),
        {"type": "image", "image": 0, "image_url": {"detail": "low"}},
        picture("https://example.org/a.png"),
        {"type": "image", "image": 1},
    ]
    assert [each["mime_type"] for each in node.metadata["images"]] == ["image/png"] * 2
    assert "base64" not in json.dumps(said)


URLS = [
    "data:image/svg+xml,%3Csvg/%3E",
    "data:image/svg+xml;utf8,<svg/>",
    "data:;base64,AAAA",
    "data:image/png;charset=x;base64,AAAA",
    "data:image/png;base64;charset=x,AAAA",
    "DATA:image/png;base64,AAAA",
    "data:image/png;base64,AAA=",
    "https://example.org/a.png",
    "file:///a.png",
    "",
]


@pytest.mark.parametrize("url", URLS)
def test_a_picture_comes_back_under_the_url_it_had(tmp_path: Path, url: str) -> None:
    row = [{"role": "user", "content": [picture(url, detail="high") | {"cache_control": {"type": "ephemeral"}}, picture(url)]}]
    store, _ = imported(saved(tmp_path / "in.jsonl", row))
    assert exported(store, tmp_path / "out.jsonl")[0] == [row]


ROWS: list[Any] = [
    {"messages": [], "tools": None},
    {"messages": [], "tools": []},
    {"messages": [], "list": True},
    {"messages": [], "row": {"messages": 1}},
    {"messages": []},
    [],
    {"messages": [{"role": "narrator"}], "tools": [{}]},
    {
        "messages": [
            {"role": "user", "content": 7},
            {"role": "user", "content": {"a": [None]}},
            {"role": "user", "content": ["x", 1, []]},
        ]
    },
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "image"}, {"type": "image_url"}]}]},
    {
        "messages": [
            {"role": "assistant", "tool_calls": 7, "function_call": []},
            {"role": "assistant", "tool_calls": [1, {}, {"function": 1}]},
        ]
    },
    {"messages": [{"role": "user", "content": "\ud800 \udc00 \u0000 \u2028"}], "\udfff": "\ud800"},
    {"messages": [{"role": "user", "content": [picture("data:image/png;base64,AAAA") | {"image": 0}]}]},
    {"messages": [{"role": "user", "content": "x", "weight": 10**40, "y": 0.1}]},
]


def test_rows_come_back_as_they_were_whatever_they_say(tmp_path: Path) -> None:
    store, report = imported(saved(tmp_path / "in.jsonl", *ROWS))
    assert report.added == len(ROWS)
    assert exported(store, tmp_path / "out.jsonl")[0] == ROWS


def test_results_without_calls_are_told_of(tmp_path: Path) -> None:
    messages = [
        {"role": "tool", "tool_call_id": "a", "content": "before its call"},
        {"role": "assistant", "tool_calls": [call("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": ["a"], "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    store, report = imported(saved(tmp_path / "in.jsonl", messages))
    assert lost(report) == {"a tool result without its call": 3}
    assert report.lost[0].first == "line 1, messages[0]"
    assert exported(store, tmp_path / "out.jsonl")[0] == [messages]


KEPT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.one_of(
    st.text(max_size=6).map(text),
    st.sampled_from([picture(url) for url in [*URLS, PNG_URL]] + [picture(PNG_URL, detail="low"), AUDIO]),
    KEPT.filter(lambda part: not isinstance(part, dict)),
    st.dictionaries(st.sampled_from(["type", "text", "x"]), KEPT, max_size=3),
)
MESSAGES = st.builds(
    lambda role, said, other: {**other, **said, "role": role},
    st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic"]),
    st.fixed_dictionaries(
        {},
        optional={
            "content": st.text(max_size=6) | st.none() | st.lists(PARTS, max_size=3),
            "tool_calls": st.lists(st.sampled_from("ab").map(call) | KEPT, max_size=2),
            "tool_call_id": st.sampled_from("ab") | KEPT,
            "name": st.text(max_size=3),
        },
    ),
    st.dictionaries(st.text(max_size=4), KEPT, max_size=2),
)
LINES = st.lists(MESSAGES, max_size=4) | st.builds(
    lambda other, messages: {**other, "messages": messages},
    st.dictionaries(st.sampled_from(["id", "list", "row", "metadata"]) | st.text(max_size=3), KEPT, max_size=3).filter(
        lambda row: "tools" not in row
    ),
    st.lists(MESSAGES, max_size=4),
)


@given(st.lists(LINES, max_size=3))
def test_any_lines_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, lines: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("lines")
    store, report = imported(saved(folder / "in.jsonl", *lines))
    again, _ = exported(store, folder / "out.jsonl")
    assert json.dumps(again, sort_keys=True) == json.dumps(lines, sort_keys=True)
    assert report.turns == sum(len(line if isinstance(line, list) else line["messages"]) for line in lines)


def test_a_tree_of_another_format_is_a_line_for_each_branch(tmp_path: Path) -> None:
    turns = [
        Turn(id="s", parent=None, message={"role": "system", "content": "s"}),
        Turn(id="n", parent="s", role="compaction", fields={}),
        Turn(
            id="q",
            parent="n",
            message={"role": "user", "content": [text("q"), {"type": "image", "image": 0}]},
            images=(Image(PNG, "image/png"),),
        ),
        Turn(id="a", parent="q", message={"role": "assistant", "content": None, "tool_calls": [call("c")]}),
        Turn(id="b", parent="q", message={"role": "assistant", "content": "b", "reasoning_content": "r"}),
    ]
    losses = Losses("export")
    assert WRITE is not None
    WRITE([Conversation(id="c", turns=turns, tools=(WEATHER,)), Conversation(id="empty", turns=())], tmp_path / "out.jsonl", losses)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    asked = {"role": "user", "content": [text("q"), picture(PNG_URL)]}
    begun = [{"role": "system", "content": "s"}, asked]
    assert rows == [
        {"messages": [*begun, {"role": "assistant", "content": None, "tool_calls": [call("c")]}], "tools": [WEATHER]},
        {"messages": [*begun, {"role": "assistant", "content": "b", "reasoning_content": "r"}], "tools": [WEATHER]},
        {"messages": []},
    ]
    assert all(is_valid(message) for row in rows for message in row["messages"])
    assert {loss.what: loss.count for loss in losses.lost} == {
        "a tree is written branch by branch: turns that branches share stand in each": 1,
        "turns that are no messages": 2,
    }


def test_a_conversation_of_ten_thousand_messages(tmp_path: Path) -> None:
    messages = [{"role": "user" if at % 2 else "assistant", "content": f"{at}"} for at in range(10_000)]
    store, _ = imported(saved(tmp_path / "in.jsonl", messages))
    assert store.get("in-1").heads["main"].depth == 10_000
    assert exported(store, tmp_path / "out.jsonl")[0] == [messages]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "text": (b"hello\n", "line 1: no JSON"),
    "cut off": (b'{"messages":[]}\n{"messages":[{"role', "line 2: no JSON"),
    "a number": (b"7\n", "line 1: a conversation is to be a mapping"),
    "no messages": (b'{"message":[]}\n', "line 1: messages is to be a list: it is null"),
    "tools of text": (b'{"messages":[],"tools":"[]"}\n', "line 1: tools is to be a list or null: it is text"),
    "a tool of text": (b'{"messages":[],"tools":["x"]}\n', "line 1: a tool is to be a mapping: it is text"),
    "a message that is none": (b'[{"role":"user"},null]\n', r"line 1, messages\[1\]: a message is to be a mapping: it is null"),
    "no role": (b'[{"content":"x"}]\n', "its role is to be text: it is null"),
    "no base64": (b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,!"}}]}]', "no base64"),
    "no data": (
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]',
        "a data URL without data: data:x",
    ),
    "a picture that is a number": (
        b'[{"role":"user","content":[{"type":"image","image":3}]}]',
        r"content\[0\]: a picture that is a number: 3",
    ),
    "a list of conversations": (
        b'[{"messages":[{"role":"user","content":"x"}]}]',
        "line 1: a list of conversations, and not one a line",
    ),
    "NaN": (b'[{"role":"user","content":NaN}]', "NaN is no JSON"),
    "Infinity": (b'[{"role":"user","x":1e400}]', "1e400 is too large"),
    "deep": (b"[" * 100_000, "line 1: no JSON"),
    "no UTF-8": (b'["\xff"]', "utf-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_line_that_is_no_conversation_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    data, what = HOSTILE[name]
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(InterchangeError, match=f"in.jsonl, .*{what}"):
        imported(path)
    path.write_bytes(data.strip() + b'\n{"messages":[{"role":"user","content":"sound"}]}\n')
    store, report = imported(path, salvage=True)
    assert len(report.faults) == 1
    assert exported(store, tmp_path / "out.jsonl")[0][-1] == {"messages": [{"role": "user", "content": "sound"}]}


def test_marks_of_order_and_ends_of_lines_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"messages":[]}\r\n\r\n[{"role":"user","content":"x"}]')
    store, _ = imported(path)
    assert exported(store, tmp_path / "out.jsonl")[0] == [{"messages": []}, [{"role": "user", "content": "x"}]]
    assert sorted(store.sessions()) == ["in-1", "in-3"]
    path.write_bytes(b"")
    assert imported(path)[1].added == 0
    with pytest.raises(InterchangeError, match=re.escape("there is no file")):
        imported(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,iVBO\nRw0K",
        "data:image/png;base64, iVBORw0K",
        "data:image/png;base64,iVBORw",
        "data:image/png;base64,-_-_",
    ],
)
def test_a_data_url_that_is_not_as_we_write_it_stays_the_name_that_it_was(url: str, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    store = SessionStore.in_memory()
    report = import_file(store, tmp_path / "in.jsonl", "openai")
    assert [loss.what for loss in report.lost] == ["pictures whose data URLs are not as we write them: they stay names"]
    assert not export_file(store, tmp_path / "out.jsonl", "openai").lost
    assert json.loads((tmp_path / "out.jsonl").read_text()) == row


def test_results_as_another_api_has_them_stay_the_parts_that_they_were(tmp_path: Path) -> None:
    parts = [{"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": "no"}, {"type": "text", "text": "So?"}]
    row = {"messages": [{"role": "user", "content": parts}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    store = SessionStore.in_memory()
    import_file(store, tmp_path / "in.jsonl", "openai")
    assert not export_file(store, tmp_path / "out.jsonl", "openai").lost
    assert json.loads((tmp_path / "out.jsonl").read_text()) == row
