"""Sessions of pi, as its own SessionManager writes them, as random ones, and as pi reads what is written here.

``SESSIONTREE_PI`` names an installed package of pi (a folder) and ``SESSIONTREE_NODE`` the node that runs it, where it is not the
one on the path: then pi writes and reads here too.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessiontree import SessionStore
from sessiontree.errors import InterchangeError
from sessiontree.interchange import Conversation, Losses, Turn, export_file, import_file, message_of
from sessiontree.interchange.conversations import messages_of
from tests import transcripts
from tests.transcripts import GOLDEN, PIXEL, conversation_of, lines_of, put_lines, through_store, write_to

FOLDER = GOLDEN / "pi"
FILES = sorted(FOLDER.rglob("*.jsonl"))
VERSIONS = ("0.73.1", "1.6.0")
HEADER = {"type": "session", "version": 3, "id": "one", "timestamp": "2025-01-01T00:00:00.000Z", "cwd": "/home/user"}


def entry(name: str, parent: str | None, kind: str, **said: Any) -> dict[str, Any]:
    return {"type": kind, "id": name, "parentId": parent, "timestamp": "2025-01-01T00:00:01.000Z", **said}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "timestamp": 1, **more}


def called(*names: str) -> dict[str, Any]:
    return said("assistant", [{"type": "toolCall", "id": name, "name": "read", "arguments": {}} for name in names])


def tree_of(turns: list[Turn]) -> list[Any]:
    """What does not depend on ids: parents and sources as numbers, and messages."""
    numbers = {turn.id: number for number, turn in enumerate(turns)}
    return [
        (
            None if turn.parent is None else numbers[str(turn.parent)],
            turn.message,
            turn.role.replace("hookMessage", "custom"),
            [numbers[each] for each in turn.derived_from],
            turn.finish_reason,
            turn.created_at,
        )
        for turn in turns
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_pi_writes_comes_out_as_it_went_in(path: Path, tmp_path: Path) -> None:
    before = lines_of(path)
    report, after = through_store(path, "pi", tmp_path / "out.jsonl")
    assert after == before
    assert report.turns == len(before) - 1
    assert not report.lost and not report.faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nodes_stand_where_entries_do(path: Path) -> None:
    entries = lines_of(path)[1:]
    with SessionStore.in_memory() as store:
        session = store.get(import_file(store, path, "pi").session_ids[0])
        nodes = [node for node in session.descendants(session.root, "commit")]
        assert len(nodes) == len(entries)
        if path.name == "v1.jsonl":
            assert [node.parent for node in nodes] == [session.root, *nodes[:-1]]
        else:
            assert [node.key for node in nodes] == [each["id"] for each in entries]
            parents = [None if node.parent == session.root else node.parent.key for node in nodes if node.parent is not None]
            assert parents == [each["parentId"] for each in entries]
        assert session.head("main").node == nodes[-1]  # pi goes on from the last entry


@pytest.mark.parametrize("release", VERSIONS)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_an_old_session_is_what_pi_makes_of_it(version: str, release: str) -> None:
    _, ours = conversation_of(FOLDER / f"{version}.jsonl", "pi")
    _, theirs = conversation_of(FOLDER / release / f"{version}.migrated.jsonl", "pi")
    assert tree_of(ours) == tree_of(theirs)
    assert [turn.derived_from for turn in ours if turn.role == "compaction"] == [(ours[4].id,), (ours[7].id,)]


def test_a_session_of_version_1_that_became_a_tree_is_one_of_version_3(tmp_path: Path) -> None:
    with SessionStore.in_memory() as store:
        import_file(store, FOLDER / "v1.jsonl", "pi")
        session = store.get("old-1")
        nodes = list(session.descendants(session.root, "commit"))
        session.append(nodes[1], [], role="note", key="new")
        export_file(store, tmp_path / "out.jsonl", "pi")
    header, *entries = lines_of(tmp_path / "out.jsonl")
    assert header["version"] == 3
    ids = [each["id"] for each in entries]
    assert [each["parentId"] for each in entries] == [None, *ids[:9], ids[1], ids[9]]  # pi goes on from the last, so from there
    assert entries[6]["firstKeptEntryId"] == entries[5]["id"]
    assert not any("firstKeptEntryIndex" in each for each in entries)
    assert entries[3]["message"]["role"] == "custom"


def test_a_session_of_version_1_with_heads_of_yours_is_one_of_version_3(tmp_path: Path) -> None:
    with SessionStore.in_memory() as store:
        import_file(store, FOLDER / "v1.jsonl", "pi")
        session = store.get("old-1")
        session.set_head("best", session.head("main").node, expected=None)
        export_file(store, tmp_path / "out.jsonl", "pi")
    conversation, turns = conversation_of(tmp_path / "out.jsonl", "pi")
    assert conversation.heads == {"best": turns[9].id}


def test_what_entries_say() -> None:
    losses = Losses("")
    conversation, turns = conversation_of(FOLDER / "1.6.0" / "everything.jsonl", "pi", losses)
    by_role: dict[str, list[Turn]] = {}
    for turn in turns:
        by_role.setdefault(turn.role, []).append(turn)
    assert conversation.title == "A session with everything"
    assert [tool["function"]["name"] for tool in conversation.tools] == ["read"]
    assert by_role["system"][0].message == {"role": "system", "content": "Be brief.\n\nYou help.\n\n/home/user/project"}
    first = by_role["user"][0]
    assert conversation.heads == {"start": first.id}  # the other label was cleared
    assert first.message == {
        "role": "user",
        "content": [{"type": "text", "text": "Was ist das? 🐼"}, {"type": "image", "image": 0}],
    }
    assert first.images == (transcripts.pixel(),)
    reply, two, aborted, *_ = by_role["assistant"]
    assert reply.message is not None and two.message is not None and aborted.message is not None
    assert (reply.message["reasoning_content"], reply.message["content"]) == ("Look.", "I read two.")
    assert reply.message["tool_calls"][1] == {
        "id": "c2",
        "type": "function",
        "function": {"name": "read", "arguments": '{"path": "b"}'},
    }
    assert (reply.finish_reason, reply.generated) == ("tool_calls", True)
    assert two.message["content"] == [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert (aborted.message["content"], aborted.finish_reason) == (None, None)
    assert [turn.message for turn in by_role["toolResult"]] == [
        {"role": "tool", "content": "A", "name": "read", "tool_call_id": "c1"},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "B"}, {"type": "image", "image": 0}],
            "name": "read",
            "tool_call_id": "c2",
        },
    ]
    summary, compaction = by_role["branch_summary"][0], by_role["compaction"][0]
    assert summary.message == {"role": "user", "content": "The other branch came to nothing."}
    assert summary.derived_from == (aborted.id,)
    assert compaction.message == {"role": "user", "content": "They read a and b."}
    kept = by_role["custom_message"][1]
    assert compaction.derived_from == (kept.parent,)  # the last that is summed up
    shown, hidden = by_role["bashExecution"]
    assert shown.message is not None and "`ls`" in shown.message["content"] and "a\nb" in shown.message["content"]
    assert hidden.message is None
    for role in ("model_change", "thinking_level_change", "label", "session_info", "usage", "context_edit"):
        assert [turn.message for turn in by_role[role]] == [None] * len(by_role[role])
    assert [turn.message for turn in by_role["custom"]] == [None, {"role": "user", "content": "As a message."}]
    assert not losses.lost


def test_a_result_without_its_call_is_told(tmp_path: Path) -> None:
    result = said("toolResult", [], toolCallId="c9", toolName="read", isError=False)
    path = put_lines(
        tmp_path / "one.jsonl",
        [HEADER, entry("a", None, "message", message=called("c1")), entry("b", "a", "message", message=result)],
    )
    report, after = through_store(path, "pi", tmp_path / "out.jsonl")
    assert [(loss.what, loss.first) for loss in report.lost] == [("a tool result without its call", "line 3, message")]
    assert after == lines_of(path)


# Random sessions

content_blocks = st.one_of(
    transcripts.with_more({"type": st.just("text"), "text": transcripts.texts}),
    transcripts.with_more({"type": st.just("thinking"), "thinking": transcripts.texts}),
    transcripts.with_more({"type": st.just("image"), "data": transcripts.pictures, "mimeType": st.just("image/png")}),
    transcripts.with_more(
        {"type": st.just("toolCall"), "id": transcripts.words, "name": transcripts.words, "arguments": transcripts.mappings}
    ),
    transcripts.with_more({"type": st.sampled_from(["text", "thinking", "image", "toolCall", "tool_result", "audio", "refusal"])}),
    transcripts.mappings,
)
contents = st.none() | transcripts.texts | st.lists(content_blocks, max_size=4)
pi_messages = st.one_of(
    st.none(),
    transcripts.with_more(
        {
            "role": st.sampled_from(
                ["user", "assistant", "toolResult", "system", "custom", "hookMessage", "bashExecution", "of tomorrow"]
            ),
            "content": contents,
        }
    ),
    transcripts.with_more({"role": st.sampled_from(["user", "assistant", "toolResult", "custom"])}),
    transcripts.with_more(
        {
            "role": st.just("system"),
            "content": transcripts.texts,
            "sections": st.dictionaries(transcripts.words, st.none() | transcripts.texts),
            "toolsAdded": st.lists(transcripts.with_more({"name": transcripts.words}), max_size=2),
        }
    ),
    transcripts.with_more(
        {"role": st.just("toolResult"), "toolCallId": transcripts.words, "toolName": transcripts.words, "content": contents}
    ),
    transcripts.with_more(
        {
            "role": st.just("bashExecution"),
            "command": transcripts.texts,
            "output": transcripts.texts,
            "exitCode": st.none() | st.integers(0, 2),
            "cancelled": st.booleans(),
            "excludeFromContext": st.booleans(),
        }
    ),
)
entries = st.one_of(
    transcripts.with_more({"type": st.just("message"), "message": pi_messages}),
    transcripts.with_more({"type": st.just("custom_message"), "customType": transcripts.words, "content": contents}),
    transcripts.with_more({"type": st.sampled_from(["compaction", "branch_summary"]), "summary": transcripts.values}),
    transcripts.with_more({"type": st.just("label"), "label": st.none() | transcripts.texts}),
    transcripts.with_more({"type": st.just("session_info"), "name": st.none() | transcripts.texts}),
    transcripts.with_more({"type": st.sampled_from(["model_change", "thinking_level_change", "custom", "usage", "of tomorrow"])}),
)


@st.composite
def sessions(draw: st.DrawFn) -> list[Any]:
    """A valid session of any version."""
    version = draw(st.sampled_from([None, 1, 2, 3, 4]))
    header = draw(
        transcripts.with_more({"type": st.just("session"), "id": st.just("one"), "timestamp": st.just("2025-01-01T00:00:00Z")})
    )
    lines = [header | ({} if version is None else {"version": version})]
    if version is None:
        lines[0].pop("version", None)
    names: list[str] = []
    for number in range(draw(st.integers(0, 8))):
        made = draw(entries)
        if made["type"] == "label":
            made["targetId"] = draw(st.sampled_from([*names, "nobody"]))
        if made["type"] == "compaction":
            made["firstKeptEntryId" if (version or 1) > 1 else "firstKeptEntryIndex"] = (
                draw(st.sampled_from([*names, "nobody", str(number)])) if (version or 1) > 1 else draw(st.integers(0, 9))
            )
        if made["type"] == "branch_summary":
            made["fromId"] = draw(st.sampled_from([*names, "root"]))
        if (version or 1) > 1:
            made |= {"id": str(number), "parentId": draw(st.none() | st.sampled_from(names)) if names else None}
        names.append(str(number))
        lines.append(made)
    return lines


@given(sessions())
def test_any_session_comes_out_as_it_went_in(lines: list[Any]) -> None:
    with TemporaryDirectory() as folder:
        path = put_lines(Path(folder, "one.jsonl"), lines)
        report, after = through_store(path, "pi", Path(folder, "out.jsonl"))
        assert after == lines
        assert report.turns == len(lines) - 1


def as_pi_has_it(turn: Turn) -> list[Any]:
    """The messages that a turn of another format is, when pi's file is read again."""
    expected: list[Any] = []
    if turn.message is None:
        return [None]
    for message in messages_of(turn):
        content = message["content"]
        role = {"developer": "system", "critic": "user"}.get(message["role"], message["role"])
        if role in ("tool", "assistant"):
            content = content or None
        if role == "tool" and isinstance(content, list) and [part["type"] for part in content] == ["text"]:
            content = content[0]["text"]
        made = {**message, "role": role, "content": content}
        expected.append(made)
    return expected


@given(transcripts.conversations())
def test_any_conversation_can_be_written(conversation: Conversation) -> None:
    turns = list(conversation.turns)
    with TemporaryDirectory() as folder:
        path = Path(folder, "one.jsonl")
        losses = write_to(path, "pi", conversation)
        read, found = conversation_of(path, "pi")
    told = {loss.what for loss in losses.lost}
    assert read.title == conversation.title
    if conversation.title:
        assert "a title is an entry of its own" in told
        assert found.pop(0).role == "session_info"
    assert conversation.heads["main"] == (
        found[-1].parent if found[-1].fields["entry"].get("customType") == "main" else found[-1].id
    )
    expected = [(turn, message) for turn in turns for message in as_pi_has_it(turn)]
    found = found[: len(expected)]
    assert [compared(turn.message) for turn in found] == [message for _, message in expected]
    parents = {turn.id: turn.parent for turn in found}
    for turn in turns:
        parent = parents[turn.id]
        for number in reversed(range(1, len(messages_of(turn)))):  # several results
            assert parent == f"{turn.id}-{number}"
            parent = parents[str(parent)]
        assert parent == turn.parent


def compared(message: Any) -> Any:
    """A message without what pi adds: names of tools. All pictures are the same one."""
    if message is None:
        return None
    content = message["content"]
    if isinstance(content, list):
        content = [part | ({"image": 0} if part["type"] == "image" else {}) for part in content]
    return {key: value for key, value in message.items() if key != "name"} | {"content": content}


def test_what_pi_cannot_hold_is_told(tmp_path: Path) -> None:
    url = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    turns = [
        Turn(id="a", parent=None, message={"role": "user", "content": [url], "name": "me"}),
        Turn(
            id="b",
            parent="a",
            message={
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "no"}}],
            },
        ),
        Turn(id="c", parent="b", message={"role": "developer", "content": "x"}),
    ]
    losses = write_to(
        tmp_path / "one.jsonl", "pi", Conversation(id="x", turns=turns, tools=({"type": "function", "function": {"name": "f"}},))
    )
    assert {loss.what for loss in losses.lost} == {
        "parts of content of type image_url",
        "names of who speaks",
        "arguments of tool calls that are no JSON mapping stand in one of their text",
        "messages of the developer are the system's",
    }
    assert lines_of(tmp_path / "one.jsonl")[2]["message"]["content"][0]["arguments"] == {"arguments": "no"}


def test_a_session_becomes_messages_of_openai(tmp_path: Path) -> None:
    with SessionStore.in_memory() as store:
        import_file(store, FOLDER / "1.6.0" / "fork.jsonl", "pi")
        export_file(store, tmp_path / "out.jsonl", "openai")
    [row] = lines_of(tmp_path / "out.jsonl")
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert row["messages"][1]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    assert [tool["function"]["name"] for tool in row["tools"]] == ["read"]


# What is wrong

WRONG: list[tuple[str, list[Any], str]] = [
    ("nothing", [], "it has no lines"),
    ("no header", [entry("a", None, "custom")], "line 1: no session of pi"),
    ("a header without an id", [{"type": "session", "version": 3}], "line 1: no session of pi"),
    ("null", [None], "line 1: no session of pi"),
    ("a version of text", [{**HEADER, "version": "3"}], "line 1: the session's version"),
    ("a list", [HEADER, []], "line 2: an entry is to be a mapping"),
    ("no type", [HEADER, {"id": "a", "parentId": None}], "line 2: an entry's type"),
    ("a number for an id", [HEADER, entry("a", None, "custom") | {"id": 1}], "line 2: an entry's id"),
    ("a number for a parent", [HEADER, entry("a", None, "custom") | {"parentId": 1}], "line 2: an entry's parentId"),
    ("a list for a message", [HEADER, entry("a", None, "message", message=[])], "line 2: a message is to be"),
    ("no role", [HEADER, entry("a", None, "message", message={})], "line 2: a message's role"),
    (
        "a number for content",
        [HEADER, entry("a", None, "message", message=said("user", 1))],
        "line 2, message: a message's content",
    ),
    (
        "text for a block",
        [HEADER, entry("a", None, "message", message=said("user", ["x"]))],
        r"line 2, message.content\[0\]: a block",
    ),
    ("content of an extension", [HEADER, entry("a", None, "custom_message", content=1)], "line 2: a message's content"),
    (
        "no base64",
        [HEADER, entry("a", None, "message", message=said("user", [{"type": "image", "data": "!", "mimeType": "image/png"}]))],
        r"line 2, message.content\[0\]: no base64",
    ),
    ("a second of the same id", [HEADER, entry("a", None, "custom"), entry("a", None, "custom", x=1)], "line 3: a second turn"),
    ("no such parent", [HEADER, entry("a", "z", "custom")], "line 2: no such parent"),
    ("a cycle", [HEADER, entry("a", "b", "custom"), entry("b", "a", "custom")], "its parents lead back to itself"),
    ("its own parent", [HEADER, entry("a", "a", "custom")], "line 2: its parents lead back to itself"),
]


@pytest.mark.parametrize(("lines", "message"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_what_cannot_be_read_is_named(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = put_lines(tmp_path / "one.jsonl", lines)
    with SessionStore.in_memory() as store:
        with pytest.raises(InterchangeError, match=message):
            import_file(store, path, "pi")
        assert not list(store.sessions())
        report = import_file(store, path, "pi", salvage=True)
        assert report.faults
        export_file(store, tmp_path / "out.jsonl", "pi", report.session_ids)


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    whole = (FOLDER / "v2.jsonl").read_bytes()
    path.write_bytes(whole.replace(b"\n", b"\r\n")[:-20])
    with SessionStore.in_memory() as store:
        with pytest.raises(InterchangeError, match="line 11: no JSON"):
            import_file(store, path, "pi")
        assert import_file(store, path, "pi", salvage=True).turns == 9


def test_what_json_can_hold_and_few_expect(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    lines = [
        HEADER,
        entry("a", None, "message", message=said("user", "\ud800")),
        entry(
            "b",
            "a",
            "message",
            message=said("assistant", [{"type": "toolCall", "id": "", "name": "", "arguments": {"x": deep, "n": 10**40}}]),
        ),
        entry("c", "b", "custom", data=deep, timestamp="never"),
        entry("d", "c", "label", targetId="a", label="\udfff"),
        entry("e", "d", "message", message=said("user", [{"type": "image", "data": "QR==", "mimeType": "image/png"}])),
        entry("f", "e", "message", message=said("system", "", sections={"a": "", "b": "x", "c": None, "d": "", "e": "y"})),
    ]
    path = put_lines(tmp_path / "one.jsonl", lines)
    _, after = through_store(path, "pi", tmp_path / "out.jsonl")
    assert after == lines


def test_nesting_beyond_what_json_reads_is_a_fault(tmp_path: Path) -> None:
    line = json.dumps(entry("a", None, "message", message=called("c"))).replace("{}", '{"x": ' + "[" * 5000 + "]" * 5000 + "}")
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + line + "\n")
    with SessionStore.in_memory() as store, pytest.raises(InterchangeError, match="line 2"):
        import_file(store, path, "pi")


def test_a_long_session(tmp_path: Path) -> None:
    count = 10_000
    lines = [HEADER, entry("0", None, "message", message=said("user", "x"))]
    lines += [entry(str(at), str(at - 1), "message", message=said("user", f"x{at}")) for at in range(1, count)]
    lines += [entry(f"s{at}", "5", "message", message=said("assistant", [])) for at in range(1000)]
    path = put_lines(tmp_path / "one.jsonl", lines)
    report, after = through_store(path, "pi", tmp_path / "out.jsonl")
    assert report.turns == count + 1000
    assert after == lines


def test_children_may_stand_before_their_parents(tmp_path: Path) -> None:
    lines = [HEADER, entry("c", "b", "custom"), entry("b", "a", "custom"), entry("a", None, "custom")]
    with SessionStore.in_memory() as store:
        import_file(store, put_lines(tmp_path / "one.jsonl", lines), "pi")
        [leaf] = store.get("one").leaves()
        assert [node.key for node in leaf.path()[1:]] == ["a", "b", "c"]
        assert message_of(leaf) is None


def test_a_label_that_is_called_main_is_not_where_pi_goes_on_from(tmp_path: Path) -> None:
    lines = [HEADER, entry("a", None, "custom"), entry("b", "a", "custom"), entry("c", "b", "label", targetId="a", label="main")]
    path = put_lines(tmp_path / "one.jsonl", lines)
    assert conversation_of(path, "pi")[0].heads == {}
    _, after = through_store(path, "pi", tmp_path / "out.jsonl")
    assert after == lines


def test_times_that_name_no_zone_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    times = ["2025-01-01T00:00:00", "2025-01-01T00:00:00Z", "2025-01-01T01:00:00+01:00", "soon", 5, None]
    lines = [HEADER, *(entry(str(at), None, "custom", timestamp=said) for at, said in enumerate(times))]
    _, turns = conversation_of(put_lines(tmp_path / "one.jsonl", lines), "pi")
    monkeypatch.undo()
    time.tzset()
    assert [turn.created_at for turn in turns] == [1735689600.0] * 3 + [None] * 3


def test_labels_are_heads_and_heads_labels(tmp_path: Path) -> None:
    path = FOLDER / "1.6.0" / "everything.jsonl"
    with SessionStore.in_memory() as store:
        session = store.get(import_file(store, path, "pi").session_ids[0])
        start = session.head("start").node
        [reply, *_] = session.children(start)
        session.set_head("best", reply, expected=None)
        session.set_head("second", start, expected=None)
        session.set_head("main", start)
        report = export_file(store, tmp_path / "out.jsonl", "pi")
    assert [(loss.what, loss.count) for loss in report.lost] == [
        ("a head is an entry of its own", 1),
        ("heads at a turn that has a label", 1),
        ("that another turn than the last is main is an entry of its own", 1),
    ]
    assert lines_of(tmp_path / "out.jsonl")[:-2] == lines_of(path)
    conversation, turns = conversation_of(tmp_path / "out.jsonl", "pi")
    assert conversation.heads == {"start": start.key, "best": reply.key}
    assert turns[-1].parent == start.key  # from which pi goes on


# pi itself

PACKAGE = os.environ.get("SESSIONTREE_PI") or None
NODE = os.environ.get("SESSIONTREE_NODE") or "node"
live = pytest.mark.skipif(PACKAGE is None, reason="SESSIONTREE_PI names no pi")


def run(script: str, *arguments: Path) -> str:
    command = [NODE, str(FOLDER / script), str(PACKAGE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


@live
def test_pi_reads_what_it_wrote_and_we_write_as_the_same(tmp_path: Path) -> None:
    run("make.mjs", tmp_path / "theirs")
    paths = sorted((tmp_path / "theirs").glob("*.jsonl"))
    assert len(paths) == 4
    for path in paths:
        with SessionStore.in_memory() as store:
            import_file(store, path, "pi")
            export_file(store, tmp_path / path.name, "pi")
        assert json.loads(run("load.mjs", tmp_path / path.name)) == json.loads(run("load.mjs", path))


@live
def test_pi_goes_on_from_what_another_wrote(tmp_path: Path) -> None:
    def turn(name: str, parent: str | None, message: Any, role: str = "note") -> Turn:
        return Turn(id=name, parent=parent, message=message, role=role, images=(transcripts.pixel(),))

    asked = [{"id": name, "type": "function", "function": {"name": "read", "arguments": "{}"}} for name in ("c1", "c2")]
    answers = [{"type": "tool_result", "tool_call_id": name, "content": name} for name in ("c1", "c2")]
    turns = [
        turn("a", None, {"role": "system", "content": "Be brief."}),
        turn("b", "a", {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "image": 0}]}),
        turn("c", "b", {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": asked}),
        turn("d", "c", {"role": "tool", "content": answers}),
        turn("e", "d", None),
        turn("f", "e", {"role": "assistant", "content": "Done."}),
        turn("g", "e", {"role": "assistant", "content": "Never."}),
    ]
    write_to(tmp_path / "one.jsonl", "pi", Conversation(id="one", turns=turns, heads={"main": "f"}, title="A title"))
    loaded = json.loads(run("load.mjs", tmp_path / "one.jsonl"))
    assert loaded["branch"][:-1] == ["a", "b", "c", "d-1", "d", "e", "f"]
    assert loaded["name"] == "A title"
    messages = loaded["context"]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "toolResult", "toolResult", "assistant"]
    assert [message["toolName"] for message in messages[3:5]] == ["read", "read"]
    assert messages[1]["content"][1]["data"] == PIXEL
    assert messages[5]["content"] == [{"type": "text", "text": "Done."}]
