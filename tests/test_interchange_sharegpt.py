"""ShareGPT rows: every dialect comes back as it was, and what we write is what LLaMA-Factory and others take."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import InterchangeError, SessionStore
from sessiontree.interchange import (
    Conversation,
    ExportReport,
    Image,
    ImportReport,
    Losses,
    SourceFile,
    Tree,
    Turn,
    append_messages,
    export_file,
    format_named,
    import_file,
    message_of,
)
from sessiontree.interchange.conversations import parts_of

GOLDEN = Path(__file__).parent / "golden" / "interchange" / "sharegpt"
PNG = (GOLDEN / "pictures" / "dot.png").read_bytes()
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
FORMAT = format_named("sharegpt")
THERE = "https://example.org/a.png"


def imported(path: Path, *, salvage: bool = False) -> tuple[SessionStore, ImportReport]:
    store = SessionStore.in_memory()
    return store, import_file(store, path, "sharegpt", salvage=salvage)


def rows_in(path: Path) -> list[Any]:
    data = path.read_bytes()
    return [json.loads(line) for line in data.splitlines()] if path.suffix == ".jsonl" else json.loads(data)


def exported(store: SessionStore, path: Path) -> tuple[list[Any], ExportReport]:
    path.unlink(missing_ok=True)
    report = export_file(store, path, "sharegpt")
    return rows_in(path), report


def saved(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def lost(report: ImportReport | ExportReport | Losses) -> dict[str, int]:
    return {loss.what: loss.count for loss in report.lost}


def said(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


def messages_of(row: Any, tmp_path: Path) -> list[Any]:
    store, report = imported(saved(tmp_path / "one.json", row))
    session = store.get(report.session_ids[0])
    return [message_of(node) for node in session.descendants(session.root)]


def check_row(row: Any) -> None:
    """Whether a row has the shape that every reader takes."""
    assert isinstance(row, dict) and row.keys() <= {"id", "conversations", "tools", "images"}
    assert isinstance(row["id"], str)
    for entry in row["conversations"]:
        assert entry.keys() == {"from", "value"}
        assert entry["from"] in {"system", "human", "gpt", "function_call", "observation"}
        assert isinstance(entry["value"], str)
        if entry["from"] == "function_call":
            calls = json.loads(entry["value"])
            for call in calls if isinstance(calls, list) else [calls]:
                assert call.keys() == {"name", "arguments"} and isinstance(call["name"], str)
    images = row.get("images", [])
    assert sum(entry["value"].count("<image>") for entry in row["conversations"]) == len(images)
    assert all(isinstance(each, str) for each in images)
    for tool in json.loads(row.get("tools", "[]")):
        assert isinstance(tool["name"], str)


# Files of others


@pytest.mark.parametrize("name", ["llama_factory.json", "others.jsonl"])
def test_rows_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    store, report = imported(GOLDEN / name)
    rows = rows_in(GOLDEN / name)
    again, told = exported(store, tmp_path / f"out{Path(name).suffix}")
    assert again == rows
    assert report.added == len(rows)
    # Hermes has its calls in the text.
    assert lost(report) == ({"a tool result without its call": 1} if name == "others.jsonl" else {})
    assert lost(told) == {"pictures that are files: named, not written": 1}
    other, _ = exported(store, tmp_path / f"out.{'jsonl' if name.endswith('.json') else 'json'}")
    assert other == rows


def test_what_rows_become() -> None:
    store, report = imported(GOLDEN / "llama_factory.json")
    assert (report.turns, report.images) == (1 + 8 + 2 + 3 + 2, 2)
    weather = store.get("llama_factory-0")
    said_ = [message_of(node) or {} for node in weather.heads["main"].path()[1:]]
    assert [each["role"] for each in said_] == ["system", "user", *["assistant", "tool", "assistant", "user"] * 2][:9]
    (call,) = said_[2]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Łódź", "days": 1.0}
    assert said_[3]["tool_call_id"] == call["id"]
    assert said_[6]["tool_calls"][0]["id"] == said_[7]["tool_call_id"]
    assert len({each["id"] for message in (said_[2], said_[6]) for each in message["tool_calls"]}) == 3
    preference = store.get("llama_factory-2")
    (question,) = preference.children(preference.root)
    assert [(message_of(node) or {})["content"] for node in preference.children(question)] == ["4", "5"]
    assert preference.heads["main"] == preference.children(question)[0]
    dots = message_of(store.get("llama_factory-1").heads["main"].path()[1]) or {}
    assert dots["content"] == [
        {"type": "image", "image": 0},
        {"type": "text", "text": "And "},
        {"type": "image", "image": 1},
        {"type": "text", "text": "?"},
    ]


def test_tools_have_the_form_of_openai_wherever_they_stood() -> None:
    assert FORMAT.read is not None
    tools: list[Any] = []
    for name in ("llama_factory.json", "others.jsonl"):
        for conversation in FORMAT.read(SourceFile(GOLDEN / name), Losses(name)):
            list(conversation.turns)
            tools.extend(conversation.tools)
    assert [(tool["type"], tool["function"]["name"]) for tool in tools] == [("function", "weather")] * 2


def test_ids_that_are_there_already_or_none_are_made(tmp_path: Path) -> None:
    _, report = imported(GOLDEN / "others.jsonl")
    assert report.session_ids == ("QWJhYvA_0", "QWJhYvA_0-2", "7", "others-4", "hermes", "others-6")


CALLS = [
    '{"name": "f", "arguments": {"a": 1.0, "é": "é"}}',
    '{"name":"f","arguments":{"a":1,"\\u00e9":[]}}',
    '{"name":"f","arguments":{"é":1e5}}',
    '[{"name": "f", "arguments": "{\\"a\\": 1}"}]',
    '{"arguments": {}, "name": "f"}',
    '{"name": "f", "arguments": {}, "id": "x"}',
    '{ "name": "f", "arguments": null }\n',
    '[{"name": "f", "arguments": "x"}, {"name": "f", "arguments": {}}]',
    "[]",
    "f(1)",
    "7",
    '{"name": 7, "arguments": {}}',
    "",
]


@pytest.mark.parametrize("text", CALLS)
def test_calls_come_back_letter_by_letter(tmp_path: Path, text: str) -> None:
    row = {"conversations": said(("human", "?"), ("function_call", text), ("observation", "1"), ("gpt", "one"))}
    store, report = imported(saved(tmp_path / "in.json", row))
    assert exported(store, tmp_path / "out.json")[0] == [row]
    (_, called, answer, _) = messages_of(row, tmp_path)
    if CALLS.index(text) < 8:
        assert all(isinstance(call["function"]["arguments"], str) for call in called["tool_calls"])
        assert answer["tool_call_id"] == called["tool_calls"][0]["id"]
        assert not report.lost
    else:
        assert called == {"role": "assistant", "content": text}
        assert lost(report) == {"function calls that are no JSON of a name and arguments": 1, "a tool result without its call": 1}


TOOLS: list[Any] = [
    '[{"name": "f"}]',
    '[{"name":"f","description":"é"}]',
    '[{"type": "function", "function": {"name": "f"}}]',
    [{"name": "f"}],
    [{"type": "function", "function": {"name": "f"}}, {"name": "g"}],
    ' [{"name": "f"}]',
]
NO_TOOLS: list[Any] = ["", "[]", [], None, "f", {"name": "f"}, ["f"], 7]


@pytest.mark.parametrize("tools", TOOLS + NO_TOOLS)
def test_tools_come_back_as_they_stood(tmp_path: Path, tools: Any) -> None:
    row = {"conversations": said(("human", "?"), ("gpt", "!")), "tools": tools}
    store, report = imported(saved(tmp_path / "in.json", row))
    assert exported(store, tmp_path / "out.json")[0] == [row]
    assert FORMAT.read is not None
    (conversation,) = FORMAT.read(SourceFile(tmp_path / "in.json"), Losses("in.json"))
    assert bool(conversation.tools) == any(tools is each for each in TOOLS)
    assert all(tool["type"] == "function" and isinstance(tool["function"], dict) for tool in conversation.tools)
    assert bool(report.lost) == (tools in ("f", ["f"], {"name": "f"}, 7))


PICTURES: list[tuple[dict[str, Any], str, dict[str, int]]] = [
    ({"images": [PNG_URL, THERE]}, "<image><image>x", {}),
    ({"image": PNG_URL}, "x <image>", {}),
    ({"image": [PNG_URL]}, "x <image>", {}),
    ({"image": "dot.png"}, "<image>", {}),
    ({"images": ["../secret.png"]}, "<image>", {"pictures whose files are not there": 1}),
    ({"images": ["/etc/hostname"]}, "<image>", {"pictures whose files are not there": 1}),
    ({"images": ["gone.png"]}, "<image>", {"pictures whose files are not there": 1}),
    ({"images": ["x" * 5000]}, "<image>", {"pictures whose files are not there": 1}),
    ({"images": ["a\0b"]}, "<image>", {"pictures whose files are not there": 1}),
    ({"images": ["data:image/svg+xml,<svg/>"]}, "<image>", {}),
    ({"images": [PNG_URL]}, "none", {"pictures of a row that has not as many <image> in its text": 1}),
    ({"images": [THERE]}, "<image><image>", {"pictures of a row that has not as many <image> in its text": 1}),
    ({"images": [None]}, "<image>", {}),
    ({"images": [{"path": "x"}]}, "<image>", {}),
    ({"images": None}, "<image>", {}),
    ({"image": None}, "", {}),
    ({"images": []}, "", {}),
    ({}, "<image>", {}),
    ({"videos": ["a.mp4"], "audios": ["a.wav"]}, "<video><audio>", {}),
]


@pytest.mark.parametrize("at", range(len(PICTURES)))
def test_pictures_stand_where_the_text_says(tmp_path: Path, at: int) -> None:
    more, text, wanted = PICTURES[at]
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "dot.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    row = {"conversations": said(("human", text), ("gpt", "!"))} | more
    store, report = imported(saved(folder / "in.json", row))
    assert lost(report) == wanted
    assert report.images == (1 if at < 4 else 0)
    assert exported(store, tmp_path / "out.json")[0] == [row]


def test_entries_as_openai_has_them_say_all_they_say(tmp_path: Path) -> None:
    row = rows_in(GOLDEN / "others.jsonl")[-1]
    found = messages_of(row, tmp_path)
    assert found == row["conversations"]
    stranger = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    store, report = imported(saved(tmp_path / "in.json", {"conversations": [stranger]}))
    assert lost(report) == {"tool calls that are not as OpenAI has them": 1}
    assert exported(store, tmp_path / "out.json")[0] == [{"conversations": [stranger]}]


def test_results_without_calls_are_told_of(tmp_path: Path) -> None:
    row = {
        "conversations": said(
            ("observation", "0"),
            ("function_call", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
            ("observation", "1"),
            ("tool", "2"),
            ("observation", "3"),
            ("function_call", '{"name": "f", "arguments": {}}'),
            ("human", "never mind"),
            ("observation", "4"),
        )
    }
    _, report = imported(saved(tmp_path / "in.json", row))
    assert lost(report) == {"a tool result without its call": 3}
    found = messages_of(row, tmp_path)
    assert [each.get("tool_call_id") for each in found if each["role"] == "tool"] == [
        None,
        *(call["id"] for call in found[1]["tool_calls"]),
        None,
        None,
    ]


def test_a_preference_that_was_gone_on_from_is_a_row_beside_what_came_after(tmp_path: Path) -> None:
    row = {"id": "p", "system": "s", "conversations": said(("human", "?")), "chosen": {"from": "gpt", "value": "4"}}
    row["rejected"] = {"from": "gpt", "value": "5"}
    store, _ = imported(saved(tmp_path / "in.json", row))
    session = store.get("p")
    new = session.append(session.heads["main"], [], metadata={"message": json.dumps({"role": "user", "content": "Sure?"})})
    assert new.depth == 4
    rows, told = exported(store, tmp_path / "out.json")
    begun = {"id": "p", "system": "s"}
    answers = {"chosen": row["chosen"], "rejected": row["rejected"]}
    assert sorted(rows, key=len) == [
        begun | {"conversations": said(("human", "?"), ("gpt", "4"), ("human", "Sure?"))},
        begun | {"conversations": said(("human", "?"))} | answers,
    ]
    assert lost(told) == {"a tree is written branch by branch: turns that branches share stand in each": 1}


# Random rows

KEPT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
SPEAKERS = ["human", "gpt", "system", "function_call", "observation", "tool", "user", "assistant", "bard", "narrator"]
TEXTS = st.sampled_from(["", "<image>", "<image>a<image>", "\ud800", *CALLS]) | st.text(max_size=8)
PARTS = st.lists(
    st.sampled_from([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG_URL}}]) | KEPT, max_size=3
)
OTHER = st.dictionaries(
    st.sampled_from(["weight", "train", "name", "tool_call_id", "reasoning_content", "tool_calls", "x"]), KEPT, max_size=2
)
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ENTRIES = st.builds(
    lambda names, speaker, text, other, calls: {**other, **calls, names[0]: speaker, names[1]: text},
    st.sampled_from([("from", "value"), ("role", "content"), ("from", "content")]),
    st.sampled_from(SPEAKERS),
    TEXTS | st.none() | PARTS,
    OTHER,
    st.sampled_from([{}, {"tool_calls": [CALLED]}, {"tool_call_id": "c"}]),
)
ROWS = st.builds(
    lambda entries, said, other: {**other, **said, "conversations": entries},
    st.lists(ENTRIES, max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.text(st.characters(codec="utf-8"), max_size=3) | st.integers(0, 3) | KEPT,
            "system": st.text(max_size=3) | KEPT,
            "tools": st.sampled_from(TOOLS + NO_TOOLS) | KEPT,
            "images": st.lists(st.sampled_from([PNG_URL, THERE, "gone.png"]), max_size=3) | KEPT,
            "image": st.sampled_from([PNG_URL, THERE]) | KEPT,
            "chosen": ENTRIES | KEPT,
            "rejected": ENTRIES | KEPT,
        },
    ),
    st.dictionaries(st.text(max_size=4), KEPT, max_size=2),
).filter(
    lambda row: (
        not any(
            isinstance(row.get(name), dict) and "value" not in row[name] and "content" not in row[name]
            for name in ("chosen", "rejected")
        )
    )
)


@given(rows=st.lists(ROWS, max_size=3), suffix=st.sampled_from([".json", ".jsonl"]))
def test_any_rows_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], suffix: str) -> None:
    folder = tmp_path_factory.mktemp("rows")
    store, _ = imported(saved(folder / f"in{suffix}", *rows))
    again, told = exported(store, folder / f"out{suffix}")
    assert json.dumps(again, sort_keys=True) == json.dumps(rows, sort_keys=True)
    assert not told.lost


# Conversations of other formats

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10).filter(lambda text: "<" not in text)


@st.composite
def trees_of_others(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for at in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([None, *(turn.id for turn in turns)]))
        role = draw(st.sampled_from(["system", "user", "assistant", "tool", None]))
        message: dict[str, Any] = {"role": role, "content": draw(WORDS)}
        images: tuple[Image, ...] = ()
        if role == "user" and draw(st.booleans()):
            images = (Image(PNG, "image/png"),) * draw(st.integers(0, 2))
            parts = [{"type": "image", "image": number} for number in range(len(images))]
            message["content"] = draw(
                st.permutations([*parts, {"type": "text", "text": draw(WORDS)}, {"type": "image_url", "image_url": {"url": THERE}}])
            )
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(WORDS)
        if role == "assistant" and draw(st.booleans()):
            message["content"] = draw(st.none() | WORDS)
            arguments = st.dictionaries(WORDS, KEPT, max_size=2).map(json.dumps)
            message["tool_calls"] = [
                {"id": f"{at}/{number}", "type": "function", "function": {"name": draw(WORDS), "arguments": draw(arguments)}}
                for number in range(draw(st.integers(1, 2)))
            ]
        turns.append(Turn(id=str(at), parent=parent, message=None if role is None else message, images=images))
    return turns


def pieces(branch: tuple[Turn, ...]) -> list[tuple[Any, ...]]:
    """All that a branch says, piece by piece, reasoning as text."""
    made: list[tuple[Any, ...]] = []
    for turn in branch:
        message = turn.message
        if message is None:
            continue
        role = message["role"]
        text = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if "reasoning_content" in message else ""
        for part in parts_of(message):
            if part["type"] == "text":
                text += part["text"]
            else:
                made += [(role, text)] if text else []
                made.append((role, turn.images[part["image"]] if part["type"] == "image" else part["image_url"]["url"]))
                text = ""
        made += [(role, text)] if text else []
        for call in message.get("tool_calls", []):
            made.append((role, call["function"]["name"], json.loads(call["function"]["arguments"])))
    return made


@given(trees_of_others())
def test_what_other_formats_said_is_written_as_rows_and_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, turns: list[Turn]
) -> None:
    assert FORMAT.write is not None and FORMAT.read is not None
    path = tmp_path_factory.mktemp("rows") / "out.json"
    made = Conversation(id="c", turns=turns, tools=({"type": "function", "function": {"name": "f"}},))
    FORMAT.write([made], path, Losses("export"))
    rows = rows_in(path)
    for row in rows:
        check_row(row)
    branches = list(Tree(made).branches()) or [()]
    read = [tuple(each.turns) for each in FORMAT.read(SourceFile(path), Losses("in"))]
    assert list(map(pieces, read)) == list(map(pieces, branches))


def written(tmp_path: Path, *turns: Turn) -> tuple[list[Any], dict[str, int]]:
    assert FORMAT.write is not None
    losses = Losses("export")
    FORMAT.write([Conversation(id="c", turns=turns)], tmp_path / "out.json", losses)
    return rows_in(tmp_path / "out.json"), lost(losses)


def test_what_a_row_cannot_hold_is_named(tmp_path: Path) -> None:
    call = {"id": "k", "type": "function", "function": {"name": "f", "arguments": "not JSON"}}
    turns = [
        Turn(id="a", parent=None, message={"role": "developer", "content": "Be kind."}),
        Turn(id="b", parent="a", message={"role": "narrator", "content": [{"type": "input_audio"}, "is it <image>?"]}),
        Turn(id="c", parent="b", message={"role": "assistant", "content": "Hm.", "reasoning_content": "r", "tool_calls": [call]}),
        Turn(id="d", parent="c", message={"role": "tool", "content": "1", "tool_call_id": "k"}),
        Turn(id="e", parent="d", role="compaction"),
        Turn(id="f", parent="e", message={"role": "assistant", "content": None, "refusal": "No."}),
    ]
    (row,), losses = written(tmp_path, *turns)
    assert row == {
        "id": "c",
        "conversations": said(
            ("system", "Be kind."),
            ("human", "is it <image>?"),
            ("gpt", "<think>\nr\n</think>\n\nHm."),
            ("function_call", '{"name":"f","arguments":"not JSON"}'),
            ("observation", "1"),
            ("gpt", "No."),
        ),
    }
    assert losses == {
        "the role developer, written as system": 1,
        "the role narrator, written as human": 1,
        "parts of messages of type input_audio": 1,
        "text that says <image> and means none": 1,
        "reasoning, written into the text between <think> and </think>": 1,
        "a message of text and calls, written as two": 1,
        "ids of tool calls, which their order says": 1,
        "turns that are no messages": 1,
        "a refusal, written as text": 1,
        "rows whose sides do not take turns, which LLaMA-Factory passes over": 1,
    }


@pytest.mark.parametrize("speakers", ["hg", "shg", "hfog", "hghg", "", "s", "hs", "h", "gh", "hhg", "hgs", "hfoog", "shghf"])
def test_whether_sides_take_turns_is_said_as_llama_factory_has_it(tmp_path: Path, speakers: str) -> None:
    roles = {"s": "system", "h": "user", "g": "assistant", "f": "assistant", "o": "tool"}
    call = {"id": "k", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        Turn(
            id=str(at),
            parent=str(at - 1) if at else None,
            message={"role": roles[each]} | ({"tool_calls": [call]} if each == "f" else {"content": each}),
        )
        for at, each in enumerate(speakers)
    ]
    (row,), losses = written(tmp_path, *turns)
    named = "rows whose sides do not take turns, which LLaMA-Factory passes over" in losses
    assert named == (speakers not in ("hg", "shg", "hfog", "hghg", "", "s", "shghf"))
    converter = pytest.importorskip("llamafactory.data.converter", reason="LLaMA-Factory is not installed", exc_type=ImportError)
    parser = pytest.importorskip("llamafactory.data.parser", exc_type=ImportError)
    attributes = parser.DatasetAttr("file", dataset_name="out", formatting="sharegpt")
    taken = converter.SharegptDatasetConverter(attributes, SimpleNamespace(media_dir=""))(row)
    assert bool(taken["_response"]) == (not named and speakers not in ("", "s"))
    assert [each["content"] for each in (*taken["_prompt"], *taken["_response"])] == (
        [entry["value"] for entry in row["conversations"] if entry["from"] != "system"] if taken["_response"] else []
    )


def test_ten_thousand_rows_and_ten_thousand_entries(tmp_path: Path) -> None:
    assert FORMAT.read is not None
    long = {"id": "long", "conversations": said(*[("human", "?"), ("gpt", "!")] * 5000)}
    rows = [{"id": f"{at}", "conversations": said(("human", "?"), ("gpt", "!"))} for at in range(10_000)]
    for suffix in (".json", ".jsonl"):
        path = saved(tmp_path / f"in{suffix}", long, *rows)
        reading = FORMAT.read(SourceFile(path), Losses("in"))
        assert sum(1 for _ in next(reading).turns) == 10_000
        assert sum(1 for _ in reading) == 10_000
    store, _ = imported(saved(tmp_path / "in.json", long))
    assert exported(store, tmp_path / "out.json")[0] == [long]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "line 1: no JSON"),
    "cut off": (b'[{"conversations":[]},{"conv', r"\[1\]: no JSON"),
    "a line cut off": (b'{"conversations":[]}\n{"conv', "line 2: no JSON"),
    "a number": (b"7", "line 1: a row is to be a mapping"),
    "a list in it": (b"[[]]", r"\[0\]: a row is to be a mapping: it is a list"),
    "no conversations": (b'[{"conversation":[]}]', "conversations is to be a list: it is null"),
    "an entry that is none": (b'[{"conversations":[7]}]', r"\[0\].conversations\[0\]: an entry is to be a mapping"),
    "nobody speaks": (b'[{"conversations":[{"value":"x"}]}]', "who speaks is to be text: it is null"),
    "a number is said": (b'[{"conversations":[{"from":"gpt","value":7}]}]', "what is said is to be text or a list or null"),
    "a picture that is a number": (
        b'[{"conversations":[{"from":"gpt","value":[{"type":"image","image":0}]}]}]',
        "a picture that is a number",
    ),
    "no base64": (b'[{"images":["data:;base64,!"],"conversations":[{"from":"human","value":"<image>"}]}]', "no base64"),
    "NaN": (b'{"conversations":[],"x":NaN}', "line 1: no JSON: NaN"),
    "deep": (b'[{"conversations":' + b"[" * 100_000 + b"]" * 100_000 + b"}]", r"\[0\]: no JSON"),
    "one half": (b'[{"conversations":[],"id":"\\ud800"}]', "a conversation's id is no text"),
    "a preference of nobody": (b'[{"conversations":[],"chosen":{},"rejected":{}}]', r"\[0\].chosen: who speaks"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_row_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    data, what = HOSTILE[name]
    path = tmp_path / "in.json"
    path.write_bytes(data)
    with pytest.raises(InterchangeError, match=f"in.json, .*{what}"):
        imported(path)
    assert imported(path, salvage=True)[1].faults


def talk(*said: str, **more: Any) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {"id": "a", "conversations": [{"from": speakers[at % 2], "value": text} for at, text in enumerate(said)], **more}


def kept(tmp_path: Path, *rows: dict[str, Any]) -> tuple[SessionStore, tuple[str, ...]]:
    store = SessionStore.in_memory()
    (tmp_path / "in.json").write_text(json.dumps(rows))
    return store, import_file(store, tmp_path / "in.json", "sharegpt").session_ids


def written_out(store: SessionStore, tmp_path: Path) -> tuple[list[Any], set[str]]:
    report = export_file(store, tmp_path / "out.json", "sharegpt", overwrite=True)
    return json.loads((tmp_path / "out.json").read_text()), {loss.what for loss in report.lost}


def test_rows_never_share_a_name(tmp_path: Path) -> None:
    store, names = kept(tmp_path, talk("1", "1"), talk("2", "2") | {"id": "a-2"}, talk("3", "3"))
    assert len(set(names)) == 3 and all(len(store.get(name).tree) == 3 for name in names)


def test_what_a_row_says_of_its_answer_is_said_of_no_other(tmp_path: Path) -> None:
    store, (name,) = kept(tmp_path, talk("q", "good", kto_tag=True))
    session = store.get(name)
    append_messages(store, session, session.heads["main"].path()[-2], [{"role": "assistant", "content": "bad"}])
    (good, bad), lost = written_out(store, tmp_path)
    assert good["kto_tag"] is True and "kto_tag" not in bad
    assert "kto_tag of a row, which is said of the answer that was read" in lost


def test_a_preference_stays_one_whatever_is_said_after_it(tmp_path: Path) -> None:
    chosen, rejected = {"from": "gpt", "value": "c"}, {"from": "gpt", "value": "r"}
    store, (name,) = kept(tmp_path, talk("q", chosen=chosen, rejected=rejected))
    session = store.get(name)
    append_messages(store, session, session.heads["main"], [{"role": "user", "content": "more"}])
    rows, _ = written_out(store, tmp_path)
    assert talk("q", chosen=chosen, rejected=rejected) in rows and talk("q", "c", "more") in rows and len(rows) == 2
    tip = session.heads["main"]
    report = export_file(store, tmp_path / "one.json", "sharegpt", at=(name, tip))
    assert "that an answer was preferred to another, which is not written" in {loss.what for loss in report.lost}
    leaf = next(each for each in session.leaves() if each != tip and each.parent == tip.parent)
    append_messages(store, session, leaf, [{"role": "user", "content": "and here"}])
    rows, _ = written_out(store, tmp_path)
    assert talk("q", chosen=chosen, rejected=rejected) in rows and len(rows) == 3


def test_who_speaks_may_be_said_in_either_place(tmp_path: Path) -> None:
    row = {"id": "a", "conversations": [{"from": None, "role": "user", "value": "q"}]}
    store, (name,) = kept(tmp_path, row)
    assert store.get(name).heads["main"].role == "user" and written_out(store, tmp_path)[0] == [row]
