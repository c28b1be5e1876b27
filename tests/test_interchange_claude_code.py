"""Transcripts of Claude Code: those it writes itself, with a model that answers from a script; one with each kind of line that is
known of older versions, made by hand; random ones; and what Claude Code makes of those that are written here.

``SESSIONTREE_CLAUDE_CODE`` names its executable: then it writes and reads here too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import SessionStore
from sessiontree.errors import InterchangeError
from sessiontree.interchange import Conversation, Losses, Turn, export_file, import_file
from sessiontree.interchange.conversations import messages_of
from tests import transcripts
from tests.transcripts import GOLDEN, PIXEL, conversation_of, lines_of, put_lines, through_store, write_to

NAME = "claude-code"
FOLDER = GOLDEN / "claude_code"
FILES = sorted(FOLDER.rglob("*.jsonl"))
SESSION = FOLDER / "2.1.197" / "session.jsonl"


def line(name: str, parent: str | None, kind: str = "user", **said: Any) -> dict[str, Any]:
    return {"parentUuid": parent, "isSidechain": False, "type": kind, "uuid": name, "timestamp": "2025-01-01T00:00:01.000Z", **said}


def user(name: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    return line(name, parent, "user", message={"role": "user", "content": content}, **more)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_claude_code_writes_comes_out_as_it_went_in(path: Path, tmp_path: Path) -> None:
    before = lines_of(path)
    report, after = through_store(path, NAME, tmp_path / "out.jsonl")
    assert after == before
    assert report.turns == sum("uuid" in each for each in before)
    assert not report.faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nodes_stand_where_lines_do(path: Path) -> None:
    lines = [each for each in lines_of(path) if "uuid" in each]
    with SessionStore.in_memory() as store:
        import_file(store, path, NAME)
        session = store.get(path.stem)
        nodes = list(session.descendants(session.root, "commit"))
        assert [node.key for node in nodes] == [each["uuid"] for each in lines]
        parents = [None if node.parent == session.root else node.parent.key for node in nodes if node.parent is not None]
        assert parents == [each["parentUuid"] for each in lines]


def test_what_lines_say() -> None:
    losses = Losses("")
    conversation, turns = conversation_of(SESSION, NAME, losses)
    assert not losses.lost
    assert conversation.heads == {"main": turns[-1].id}
    said = [turn.message for turn in turns if turn.message is not None]
    at = next(number for number, message in enumerate(said) if message.get("reasoning_content"))
    thought, sealed, text, *rest = said[at : at + 9]
    assert thought == {"role": "assistant", "content": None, "reasoning_content": "Thought 2."}
    assert sealed == {"role": "assistant", "content": None}
    assert text == {"role": "assistant", "content": "I call."}
    assert [message["tool_calls"][0]["function"]["name"] for message in rest[:3]] == ["Bash", "Read", "Read"]
    results = {message["tool_call_id"]: message for message in rest[3:]}
    assert results["toolu_20"] == {"role": "tool", "tool_call_id": "toolu_20", "content": "héllo"}
    assert results["toolu_21"] == {"role": "tool", "tool_call_id": "toolu_21", "content": [{"type": "image", "image": 0}]}
    assert "does not exist" in results["toolu_22"]["content"]
    [shown] = [turn for turn in turns if turn.images]
    assert shown.images == (transcripts.pixel(),)
    assert PIXEL not in json.dumps(shown.fields)  # though the line holds it twice
    boundary = next(turn for turn in turns if turn.role == "compact_boundary")
    before = turns[turns.index(boundary) - 1]
    assert (boundary.parent, boundary.message, boundary.derived_from) == (None, None, (before.id,))
    generated = [turn for turn in turns if turn.generated]
    assert {turn.fields["message"]["model"] for turn in generated} == {"claude-opus-4-8"}  # not what Claude Code says itself
    assert {turn.finish_reason for turn in generated} == {"stop", "tool_calls"}
    assert {turn.role for turn in turns} == {"user", "assistant", "attachment", "compact_boundary", "local_command"}


def test_several_results_are_one_turn_and_several_messages(tmp_path: Path) -> None:
    losses = Losses("")
    conversation, turns = conversation_of(FOLDER / "kinds.jsonl", NAME, losses)
    assert (conversation.title, conversation.heads) == ("My title", {"main": turns[10].id})
    mixed, only = turns[2], turns[9]
    long, *_ = messages_of(mixed)
    assert [(message["role"], message.get("tool_call_id"), message["content"]) for message in messages_of(mixed)] == [
        ("tool", "toolu_1", long["content"]),
        ("tool", "toolu_2", [{"type": "text", "text": "A picture"}, {"type": "image", "image": 0}]),
        ("tool", "toolu_3", ""),
        ("user", None, [{"type": "text", "text": "[Request interrupted by user]"}]),
    ]
    assert [message["tool_call_id"] for message in messages_of(only)] == ["toolu_1", "toolu_9"]
    assert [(loss.what, loss.count) for loss in losses.lost] == [("a tool result without its call", 1)]
    assert long["content"] not in json.dumps(mixed.fields)
    first = turns[0].message
    assert first is not None
    assert [part["type"] for part in first["content"]] == ["text", "image", "image_url", "document"]


def test_a_subagent_in_the_same_file_is_another_first_turn() -> None:
    lines = [user("a", None, "x"), user("b", None, "Look", isSidechain=True), user("c", "b", "y", isSidechain=True)]
    with TemporaryDirectory() as folder:
        conversation, turns = conversation_of(put_lines(Path(folder, "s.jsonl"), lines), NAME)
    assert [turn.parent for turn in turns] == [None, None, "b"]
    assert conversation.heads == {"main": "a"}


def test_titles(tmp_path: Path) -> None:
    asked = user("a", None, "x")
    summaries = [{"type": "summary", "summary": text, "leafUuid": leaf} for text, leaf in (("its", "a"), ("another file's", "z"))]
    said = {"type": "ai-title", "aiTitle": "the model's"}
    given = {"type": "custom-title", "customTitle": "yours"}
    titles = []
    for lines in ([summaries[1]], summaries, [*summaries, said], [given, *summaries, said]):
        conversation, _ = conversation_of(put_lines(tmp_path / "one.jsonl", [*lines, asked]), NAME)
        titles.append(conversation.title)
    assert titles == [None, "its", "the model's", "yours"]


# Random transcripts

sources = st.fixed_dictionaries({"type": st.just("base64"), "media_type": st.just("image/png"), "data": transcripts.pictures})
inner = st.one_of(
    transcripts.with_more({"type": st.just("text"), "text": transcripts.texts}),
    transcripts.with_more({"type": st.just("image"), "source": sources}),
    transcripts.with_more({"type": st.just("image"), "source": transcripts.values}),
    st.fixed_dictionaries({"type": st.just("image"), "source": st.just({"type": "url", "url": "https://example.org/a.png"})}),
    transcripts.with_more(
        {"type": st.sampled_from(["text", "thinking", "image", "image_url", "tool_use", "tool_result", "document", "refusal"])}
    ),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": transcripts.words, "content": transcripts.texts}),
    transcripts.mappings,
)
blocks = st.one_of(
    inner,
    transcripts.with_more({"type": st.just("thinking"), "thinking": transcripts.texts}),
    transcripts.with_more({"type": st.just("redacted_thinking"), "data": transcripts.texts}),
    transcripts.with_more(
        {"type": st.just("tool_use"), "id": transcripts.words, "name": transcripts.words, "input": transcripts.mappings}
    ),
    transcripts.with_more({"type": st.just("tool_result"), "tool_use_id": transcripts.words}),
    transcripts.with_more(
        {
            "type": st.just("tool_result"),
            "tool_use_id": transcripts.words,
            "content": st.none() | transcripts.texts | st.lists(inner, max_size=3),
        }
    ),
)
contents = st.none() | transcripts.texts | st.lists(blocks, max_size=4)
long_text = st.just("A text so long that it is kept once, wherever in a line of the transcript it stands.")
said = st.one_of(
    transcripts.with_more({"role": st.sampled_from(["user", "assistant", "system"]), "content": contents}),
    transcripts.with_more({"content": contents}),
    transcripts.with_more({"role": st.just("user")}),
    st.fixed_dictionaries({"role": st.just("user"), "content": long_text}),
    st.none(),
)
kept = st.recursive(
    transcripts.scalars | long_text,
    lambda deeper: st.lists(deeper, max_size=2) | st.dictionaries(transcripts.words, deeper, max_size=2),
    max_leaves=5,
)
events = st.one_of(
    transcripts.with_more({"type": st.sampled_from(["user", "assistant"]), "message": said}),
    transcripts.with_more({"type": st.just("user"), "message": said, "toolUseResult": kept}),
    transcripts.with_more({"type": st.sampled_from(["user", "assistant", "attachment", "of tomorrow"])}),
    transcripts.with_more({"type": st.just("system"), "subtype": transcripts.values, "content": transcripts.texts}),
)
remarks = st.one_of(
    transcripts.with_more({"type": st.sampled_from(["summary", "mode", "queue-operation"])}),
    transcripts.with_more({"type": st.just("custom-title"), "customTitle": transcripts.values}),
    transcripts.with_more({"type": transcripts.values}),
)


@st.composite
def sessions(draw: st.DrawFn) -> list[Any]:
    """A valid transcript."""
    lines: list[Any] = []
    names: list[str] = []
    for number in range(draw(st.integers(1, 9))):
        if draw(st.integers(0, 3)) == 0:
            remark = draw(remarks)
            lines.append(remark | ({"leafUuid": draw(st.sampled_from([*names, "nobody"]))} if draw(st.booleans()) else {}))
            continue
        made = draw(events) | {"uuid": str(number)}
        if draw(st.booleans()):
            made["parentUuid"] = draw(st.none() | st.sampled_from(names)) if names else None
        if draw(st.booleans()):
            made["logicalParentUuid"] = draw(st.sampled_from([*names, "nobody"]))
        if draw(st.booleans()):
            made["isSidechain"] = draw(st.booleans())
        names.append(str(number))
        lines.append(made)
    return lines


@given(sessions())
def test_any_transcript_comes_out_as_it_went_in(lines: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        path = put_lines(Path(folder, "one.jsonl"), lines)
        report, after = through_store(path, NAME, Path(folder, "out.jsonl"))
        assert after == lines
        assert report.turns == sum("uuid" in each for each in lines)


def expected_of(turn: Turn) -> Any:
    """The message of a turn of another format, when Claude Code's file is read again."""
    message = turn.message
    if message is None or message["role"] in ("system", "developer"):
        return None
    content = message["content"]
    if message["role"] == "assistant":
        return {**message, "content": content or None}
    if message["role"] == "critic":
        return {**message, "role": "user"}
    return message


@given(transcripts.conversations())
def test_any_conversation_can_be_written(conversation: Conversation) -> None:
    turns = list(conversation.turns)
    with TemporaryDirectory() as folder:
        path = Path(folder, "one.jsonl")
        losses = write_to(path, NAME, conversation)
        read, found = conversation_of(path, NAME)
        lines = lines_of(path)
    assert [pictures_as_one(turn.message) for turn in found] == [expected_of(turn) for turn in turns]
    for each in lines:
        if "uuid" in each:
            UUID(each["uuid"])
    names = {turn.id: made.id for turn, made in zip(turns, found, strict=True)}
    assert [made.parent for made in found] == [None if turn.parent is None else names[str(turn.parent)] for turn in turns]
    assert read.title == conversation.title
    assert read.heads["main"] == names[conversation.heads["main"]]
    told = {loss.what for loss in losses.lost}
    assert "ids that are no UUIDs are others" in told
    roles = {None if turn.message is None else turn.message["role"] for turn in turns}
    assert ("turns that are no messages are remarks of the system" in told) == (None in roles)
    of_system = "messages of the system are remarks: Claude Code sends the model its own"
    assert (of_system in told) == bool(roles & {"system", "developer"})


def pictures_as_one(value: Any) -> Any:
    """A message with every picture as the first: they are all the same one."""
    if isinstance(value, dict):
        return {key: 0 if key == "image" else pictures_as_one(each) for key, each in value.items()}
    return [pictures_as_one(each) for each in value] if isinstance(value, list) else value


def test_turns_of_others_go_on_as_the_session_does(tmp_path: Path) -> None:
    with SessionStore.in_memory() as store:
        import_file(store, SESSION, NAME)
        session = store.get("session")
        session.append(session.head("main").node, [], role="note", key="new", head="main")
        report = export_file(store, tmp_path / "out.jsonl", NAME)
    *before, made = lines_of(tmp_path / "out.jsonl")
    assert before == lines_of(SESSION)
    assert (made["sessionId"], made["cwd"]) == ("11111111-2222-4333-8444-555555555555", "/home/user/project")
    assert made["parentUuid"] == next(each["uuid"] for each in reversed(before) if "uuid" in each)
    assert {loss.what for loss in report.lost} == {
        "ids that are no UUIDs are others",
        "turns that are no messages are remarks of the system",
    }


def test_what_claude_code_cannot_hold_is_told(tmp_path: Path) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    named = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    call = {"id": "c", "function": {"name": "f", "arguments": "[]"}}
    turns = [
        Turn(id="a", parent=None, message={"role": "user", "content": [audio, named], "name": "me"}),
        Turn(id="b", parent="a", message={"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call]}),
        Turn(id="c", parent="b", message={"role": "critic", "content": "x"}),
    ]
    tools = ({"type": "function", "function": {"name": "f"}},)
    losses = write_to(tmp_path / "one.jsonl", NAME, Conversation(id="x", turns=turns, tools=tools))
    assert {loss.what for loss in losses.lost} == {
        "parts of content of type input_audio",
        "names of who speaks",
        "arguments of tool calls that are no JSON mapping stand in one of their text",
        "reasoning has no signature, without which Anthropic's API takes none back",
        "the role critic is the user's",
        "ids that are no UUIDs are others",
        "tools: Claude Code has its own",
    }
    asked, replied, _ = lines_of(tmp_path / "one.jsonl")
    assert asked["message"]["content"] == [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}]
    assert replied["message"]["content"][0] == {"type": "thinking", "thinking": "y", "signature": ""}
    assert replied["message"]["content"][2]["input"] == {"arguments": "[]"}


def test_a_transcript_becomes_a_session_of_pi(tmp_path: Path) -> None:
    with SessionStore.in_memory() as store:
        import_file(store, FOLDER / "kinds.jsonl", NAME)
        export_file(store, tmp_path / "out.jsonl", "pi")
    results = [each["message"] for each in lines_of(tmp_path / "out.jsonl") if each.get("message", {}).get("role") == "toolResult"]
    assert [each["toolCallId"] for each in results] == ["toolu_1", "toolu_2", "toolu_3", "toolu_1", "toolu_9"]
    assert results[1]["toolName"] == "Read"
    assert results[1]["content"][1] == {"type": "image", "data": PIXEL, "mimeType": "image/png"}


# What is wrong

WRONG: list[tuple[str, list[Any], str]] = [
    ("nothing", [], "the whole file: no transcript"),
    ("a list", [user("a", None, "x"), []], "line 2: a line is to be a mapping"),
    ("null", [None], "line 1: a line is to be a mapping"),
    ("a number for a uuid", [line("a", None) | {"uuid": 1}], "line 1: a uuid"),
    ("a number for a parent", [line("a", None) | {"parentUuid": 1}], "line 1: a parentUuid"),
    ("no type", [{"uuid": "a", "parentUuid": None}], "line 1: a line's type"),
    ("text for a message", [line("a", None, message="x")], "line 1: a message is to be"),
    ("a number for content", [user("a", None, 1)], "line 1, message: a message's content"),
    ("text for a block", [user("a", None, ["x"])], r"line 1, message.content\[0\]: a block"),
    (
        "text in a result",
        [user("a", None, [{"type": "tool_result", "tool_use_id": "c", "content": [1]}])],
        r"line 1, message.content\[0\].content\[0\]: a block",
    ),
    (
        "no base64",
        [user("a", None, [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}])],
        r"line 1, message.content\[0\]: no base64",
    ),
    ("a second of the same id", [user("a", None, "x"), user("a", None, "y")], "line 2: a second turn"),
    ("no such parent", [user("a", "z", "x")], "line 1: no such parent"),
    ("a cycle", [user("a", "b", "x"), user("b", "a", "y")], "its parents lead back to itself"),
]


@pytest.mark.parametrize(("lines", "message"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_what_cannot_be_read_is_named(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = put_lines(tmp_path / "one.jsonl", lines)
    with SessionStore.in_memory() as store:
        with pytest.raises(InterchangeError, match=message):
            import_file(store, path, NAME)
        assert not list(store.sessions())
        report = import_file(store, path, NAME, salvage=True)
        assert report.faults
        export_file(store, tmp_path / "out.jsonl", NAME, report.session_ids)


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(SESSION.read_bytes().replace(b"\n", b"\r\n")[:-20])
    with SessionStore.in_memory() as store:
        with pytest.raises(InterchangeError, match="line 58: no JSON"):
            import_file(store, path, NAME)
        assert import_file(store, path, NAME, salvage=True).turns == sum("uuid" in each for each in lines_of(SESSION))


def test_what_json_can_hold_and_few_expect(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"x": [deep]}
    call = {"type": "tool_use", "id": "", "name": "\ud800", "input": {"x": deep, "n": 10**40}}
    lines = [
        user("a", None, "\udfff"),
        line("b", "a", "assistant", message={"role": "assistant", "content": [call]}),
        user("c", "b", [{"type": "tool_result", "tool_use_id": "", "content": "x"}], toolUseResult=deep),
        {"type": "of tomorrow", "deep": deep},
    ]
    path = put_lines(tmp_path / "one.jsonl", lines)
    _, after = through_store(path, NAME, tmp_path / "out.jsonl")
    assert after == lines


def test_a_long_transcript(tmp_path: Path) -> None:
    count = 10_000
    lines = [user("0", None, "x"), *(user(str(at), str(at - 1), f"x{at}") for at in range(1, count))]
    lines += [user(f"s{at}", "5", "x") for at in range(1000)]
    path = put_lines(tmp_path / "one.jsonl", lines)
    report, after = through_store(path, NAME, tmp_path / "out.jsonl")
    assert report.turns == count + 1000
    assert after[:-1] == lines[:-1] and after[-1] == lines[-1]


# Claude Code itself

EXECUTABLE = os.environ.get("SESSIONTREE_CLAUDE_CODE") or None
live = pytest.mark.skipif(EXECUTABLE is None, reason="SESSIONTREE_CLAUDE_CODE names no Claude Code")


@pytest.fixture
def make() -> Iterator[ModuleType]:
    """The script that made the transcripts."""
    spec = importlib.util.spec_from_file_location("make_transcripts", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@live
def test_claude_code_goes_on_from_what_is_written_as_from_what_it_wrote(make: ModuleType, tmp_path: Path) -> None:
    claude = make.Claude(EXECUTABLE, tmp_path)
    with claude.serving():
        claude.converse()
        path = claude.sessions / f"{make.SESSION}.jsonl"
        written = path.read_bytes()
        claude.model.asked.clear()
        claude.run("Go on", "--resume", make.SESSION)
        [theirs] = claude.model.asked
        path.write_bytes(written)
        with SessionStore.in_memory() as store:
            for each in sorted(claude.sessions.rglob("*.jsonl")):
                _, after = through_store(each, NAME, tmp_path / "out.jsonl")
                assert after == lines_of(each)
            import_file(store, path, NAME)
            path.unlink()
            export_file(store, path, NAME)
        claude.model.asked.clear()
        claude.run("Go on", "--resume", make.SESSION)
        [ours] = claude.model.asked
    assert ours == theirs


@live
def test_claude_code_goes_on_from_what_another_wrote(make: ModuleType, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    asked = [{"type": "text", "text": "See"}, {"type": "image", "image": 0}]
    turns = [
        Turn(id="a", parent=None, message={"role": "system", "content": "Be brief."}),
        Turn(id="b", parent="a", message={"role": "user", "content": asked}, images=(transcripts.pixel(),)),
        Turn(id="c", parent="b", message={"role": "assistant", "content": None, "tool_calls": [call]}),
        Turn(id="d", parent="c", message={"role": "tool", "tool_call_id": "c1", "content": "Read."}),
        Turn(id="e", parent="d"),
        Turn(id="f", parent="e", message={"role": "assistant", "content": "Done."}),
        Turn(id="g", parent="e", message={"role": "assistant", "content": "Never."}),
    ]
    name = "11111111-2222-4333-8444-666666666666"
    claude = make.Claude(EXECUTABLE, tmp_path)
    claude.sessions.mkdir(parents=True)
    write_to(tmp_path / "one.jsonl", NAME, Conversation(id=name, turns=turns, heads={"main": "f"}, title="A title"))
    shutil.move(tmp_path / "one.jsonl", claude.sessions / f"{name}.jsonl")
    with claude.serving():
        claude.run("Go on", "--resume", name)
    [messages] = claude.model.asked
    said = json.dumps(messages)
    assert "Never." not in said
    assert PIXEL in said
    assert [message["content"] for message in messages if message["role"] == "assistant"] == [
        [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}],
        [{"type": "text", "text": "Done."}],
    ]
    assert {"type": "tool_result", "tool_use_id": "c1", "content": "Read."} in messages[2]["content"]


def test_a_fork_is_another_session_of_claude_codes(tmp_path: Path) -> None:
    """Its lines say so, those that it shares and those of its own; those of the session that it was forked from do not."""
    with SessionStore.in_memory() as store:
        import_file(store, SESSION, NAME)
        session = store.get("session")
        at = session.heads["main"].path()[-3]
        fork = store.fork(session, at, "22222222-3333-4444-8555-666666666666")
        fork.set_head("main", fork.append(fork.node(at.id), [], role="note", key="new"))
        export_file(store, tmp_path / "out", NAME)
    named = {
        path.stem: {line["sessionId"] for line in lines_of(path) if "sessionId" in line} for path in (tmp_path / "out").iterdir()
    }
    assert named["22222222-3333-4444-8555-666666666666"] == {"22222222-3333-4444-8555-666666666666"}
    assert named["session"] == {"11111111-2222-4333-8444-555555555555"}
