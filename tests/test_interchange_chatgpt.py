"""ChatGPT's exports: every node comes in and goes out again as it was, and what we write has the form that theirs have."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
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
    export_file,
    format_named,
    import_file,
    message_of,
)
from sessiontree.interchange import source as source_module
from sessiontree.interchange.conversations import parts_of
from tests.openai_messages import is_valid

GOLDEN = Path(__file__).parent / "golden" / "interchange" / "chatgpt"
SHARDS = ("conversations-000.json", "conversations-001.json")
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
FORMAT = format_named("chatgpt")


def imported(path: Path, *, salvage: bool = False) -> tuple[SessionStore, ImportReport]:
    store = SessionStore.in_memory()
    return store, import_file(store, path, "chatgpt", salvage=salvage)


def exported(store: SessionStore, path: Path) -> tuple[list[dict[str, Any]], ExportReport]:
    report = export_file(store, path, "chatgpt")
    return json.loads(path.read_bytes()), report


def saved(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def lost(report: ImportReport | ExportReport) -> dict[str, int]:
    return {loss.what: loss.count for loss in report.lost}


def faults(report: ImportReport) -> dict[str, int]:
    return {loss.what: loss.count for loss in report.faults}


def turns_read(path: Path, losses: Losses | None = None) -> Iterator[tuple[Conversation, list[Turn]]]:
    assert FORMAT.read is not None
    for conversation in FORMAT.read(SourceFile(path), losses or Losses(path.name)):
        yield conversation, list(conversation.turns)


def message(role: str = "user", text: str = "hi", **said: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": [text]}
    return {"author": {"role": role, "name": None, "metadata": {}}, "content": content, "recipient": "all", "metadata": {}} | said


def conversation_of(nodes: dict[str, Any], current: str | None = None, **said: Any) -> dict[str, Any]:
    """Of (message, parent, children) by node id."""
    mapping = {
        node_id: {"id": node_id, "message": said, "parent": parent, "children": children}
        for node_id, (said, parent, children) in nodes.items()
    }
    return {"title": "T", "create_time": 1.5, "mapping": mapping, "current_node": current or list(nodes)[-1], "id": "c"} | said


# What their exports are, and so what ours are to be

CONTENT: dict[str, dict[str, type | tuple[type, ...]]] = {
    "text": {"parts": list},
    "multimodal_text": {"parts": list},
    "code": {"language": str, "response_format_name": (str, type(None)), "text": str},
    "execution_output": {"text": str},
    "thoughts": {"thoughts": list, "source_analysis_msg_id": str},
    "reasoning_recap": {"content": str},
    "user_editable_context": {"user_profile": str, "user_instructions": str},
    "model_editable_context": {"model_set_context": str},
    "tether_quote": {"url": str, "domain": str, "text": str, "title": str},
    "tether_browsing_display": {"result": str},
    "system_error": {"name": str, "text": str},
}
NODE = {"id": str, "message": (dict, type(None)), "parent": (str, type(None)), "children": list}
MESSAGE: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "author": dict,
    "create_time": (float, int, type(None)),
    "update_time": (float, int, type(None)),
    "content": dict,
    "status": str,
    "end_turn": (bool, type(None)),
    "weight": (float, int),
    "metadata": dict,
    "recipient": str,
    "channel": (str, type(None)),
}
CONVERSATION: dict[str, type | tuple[type, ...]] = {
    "title": (str, type(None)),
    "create_time": (float, int),
    "update_time": (float, int),
    "mapping": dict,
    "moderation_results": list,
    "current_node": str,
    "plugin_ids": (list, type(None)),
    "conversation_id": str,
    "conversation_template_id": (str, type(None)),
    "gizmo_id": (str, type(None)),
    "gizmo_type": (str, type(None)),
    "is_archived": bool,
    "is_starred": (bool, type(None)),
    "safe_urls": list,
    "blocked_urls": list,
    "default_model_slug": (str, type(None)),
    "conversation_origin": (str, type(None)),
    "voice": (str, type(None)),
    "async_status": (str, int, type(None)),
    "disabled_tool_ids": list,
    "id": str,
}


def has(value: dict[str, Any], fields: dict[str, Any], place: str) -> None:
    for name, kind in fields.items():
        assert name in value, f"{place}: no {name}"
        assert isinstance(value[name], kind), f"{place}.{name}: {value[name]!r}"


def check_export(value: Any) -> None:
    """Whether a file says all that ChatGPT's own says, in the same types, and its tree is one."""
    assert isinstance(value, list)
    assert len({each["id"] for each in value}) == len(value)
    for conversation in value:
        has(conversation, CONVERSATION, "conversation")
        assert conversation["id"] == conversation["conversation_id"]
        mapping = conversation["mapping"]
        assert conversation["current_node"] in mapping
        roots = [node_id for node_id, node in mapping.items() if node["parent"] is None]
        assert len(roots) == 1, roots
        assert mapping[roots[0]]["message"] is None
        for node_id, node in mapping.items():
            has(node, NODE, node_id)
            assert node.keys() == NODE.keys() and node["id"] == node_id
            assert node["children"] == [each for each in mapping if mapping[each]["parent"] == node_id]
            if node["message"] is not None:
                check_message(node["message"], node_id)
        reached = list(roots)
        for node_id in reached:
            reached.extend(mapping[node_id]["children"])
        assert sorted(reached) == sorted(mapping)


def check_message(said: dict[str, Any], node_id: str) -> None:
    assert said.keys() == MESSAGE.keys()
    has(said, MESSAGE, node_id)
    assert said["id"] == node_id
    assert said["author"].keys() == {"role", "name", "metadata"}
    has(said["author"], {"role": str, "name": (str, type(None)), "metadata": dict}, node_id)
    assert said["author"]["role"] in {"system", "user", "assistant", "tool"}
    assert said["status"] in {"finished_successfully", "finished_partial_completion", "in_progress"}
    content = said["content"]
    has(content, CONTENT[content["content_type"]], node_id)
    for part in content.get("parts", []):
        if not isinstance(part, str):
            assert content["content_type"] == "multimodal_text" and part["content_type"] == "image_asset_pointer"
            assert re.fullmatch(r"sediment://file_[0-9a-f]+", part["asset_pointer"])
            assert isinstance(part["size_bytes"], int)
    for thought in content.get("thoughts", []):
        has(thought, {"summary": str, "content": str, "chunks": list, "finished": bool}, node_id)


# The export in golden/


@pytest.mark.parametrize("name", SHARDS)
def test_a_file_of_an_export_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    store, report = imported(GOLDEN / name)
    given_ = json.loads((GOLDEN / name).read_bytes())
    again, _ = exported(store, tmp_path / "out.json")
    assert again == given_
    assert report.turns == sum(len(each["mapping"]) for each in given_)


def test_the_golden_export_says_what_theirs_say() -> None:
    for conversation in json.loads((GOLDEN / SHARDS[0]).read_bytes()):
        has(conversation, CONVERSATION, "conversation")
        for node_id, node in conversation["mapping"].items():
            if node["message"] is not None:
                has(node["message"], MESSAGE, node_id)


def test_the_folder_of_an_export_is_read_whole(tmp_path: Path) -> None:
    store, report = imported(GOLDEN)
    values = [each for name in SHARDS for each in json.loads((GOLDEN / name).read_bytes())]
    assert list(report.session_ids) == [each["id"] for each in values]
    assert report.images == 3
    assert lost(report) == {
        "files of the export that are no conversations": 1,
        "pictures whose files are not there": 1,
        "a tool result without its call": 1,
    }
    again, told = exported(store, tmp_path / "out.json")
    assert again == values
    assert lost(told) == {"pictures: a .zip holds them, a .json names them": 3}


def zipped(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                archive.write(each, each.relative_to(folder))
    return path


def test_the_archive_of_an_export_is_read_and_written_with_its_pictures(tmp_path: Path) -> None:
    store, report = imported(zipped(GOLDEN, tmp_path / "export.zip"))
    assert report.images == 3
    told = export_file(store, tmp_path / "out.zip", "chatgpt")
    assert lost(told) == {}
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        values = json.loads(archive.read("conversations.json"))
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist() if name != "conversations.json"} == {
            "file-Ab12Cd34Ef56Gh78Ij90Kl12.png": PNG,
            "file_0000000011aa.jpg": (GOLDEN / "file_0000000011aa.dat").read_bytes(),
            "file-Zz98Yy76Xx54Ww32Vv10Uu98.png": PNG,
        }
    assert values == [each for name in SHARDS for each in json.loads((GOLDEN / name).read_bytes())]
    _, again = imported(tmp_path / "out.zip")
    assert again.images == 3 and again.turns == report.turns


def test_pictures_are_found_beside_the_file_by_either_name() -> None:
    (_, turns), *_ = turns_read(GOLDEN / SHARDS[1])
    asked, made, last = turns[1], turns[3], turns[-1]
    assert [image.mime_type for image in asked.images] == ["image/png", "image/jpeg"]
    assert asked.images[0].data == PNG
    assert asked.message is not None and asked.message["content"] == [
        {"type": "image", "image": 0},
        {"type": "image", "image": 1},
        {"type": "text", "text": "What are these?"},
    ]
    assert [image.data for image in made.images] == [PNG]
    assert last.message is not None
    assert last.message["content"][1] == {"type": "image_url", "image_url": {"url": "sediment://file_0000000044dd"}}


def test_an_asset_pointer_finds_its_own_file_only(tmp_path: Path) -> None:
    pointers = [
        "file-service://file-ab",
        "sediment://file_ab",
        "sediment://file_ab?part=1",
        "sediment://../x",
        "file-abc",
        "x://file_ab",
    ]
    parts = [{"content_type": "image_asset_pointer", "asset_pointer": each} for each in pointers]
    said = message() | {"content": {"content_type": "multimodal_text", "parts": parts}}
    saved(tmp_path / "conversations.json", [conversation_of({"a": (said, None, [])})])
    for name, data in {"file-abc-x.png": b"1", "file_abc.png": b"2", "file-ab-y.png": b"3", "file_ab": b"4"}.items():
        (tmp_path / name).write_bytes(data)
    ((_, (turn,)),) = turns_read(tmp_path / "conversations.json")
    assert [image.data for image in turn.images] == [b"3", b"4", b"4"]
    uuids = [f"file-1a2b3c4d-0000-4000-8000-00000000000{end}" for end in "ab"]
    parts = [{"content_type": "image_asset_pointer", "asset_pointer": f"file-service://{each}"} for each in uuids]
    said = message() | {"content": {"content_type": "multimodal_text", "parts": parts}}
    saved(tmp_path / "conversations.json", [conversation_of({"a": (said, None, [])})])
    for each in uuids:
        (tmp_path / f"{each}.jpeg").write_text(each)
    ((_, (turn,)),) = turns_read(tmp_path / "conversations.json")
    assert [(image.data.decode(), image.mime_type) for image in turn.images] == [(each, "image/jpeg") for each in uuids]


# What a message becomes


def test_messages_have_the_form_that_other_formats_write() -> None:
    ((conversation, turns),) = turns_read(GOLDEN / SHARDS[0])
    assert conversation.title == "Miles"
    assert conversation.created_at == 1762989084.391352
    messages = [turn.message for turn in turns]
    assert [None if each is None else each["role"] for each in messages] == [
        *(None, "system", "user", "user", "assistant", "user"),
        *("system", None, "assistant", "assistant", "tool", "tool", "assistant", "tool", "tool"),
        *(None, "assistant", "assistant"),
    ]
    assert [turn.role for turn in turns if turn.message is None] == ["note", "model_editable_context", "reasoning_recap"]
    about, thoughts, call, shown, program, result = (messages[at] or {} for at in (2, 8, 9, 10, 12, 13))
    assert about["content"] == [{"type": "text", "text": "I sail."}, {"type": "text", "text": "Be brief."}]
    assert thoughts == {"role": "assistant", "content": "", "reasoning_content": "A chart would help.\n\nLook it up."}
    (asked,) = call["tool_calls"]
    assert call["content"] is None
    assert asked == {
        "id": turns[9].id,
        "type": "function",
        "function": {"name": "web.run", "arguments": '{"search_query":[{"q":"miles"}]}'},
    }
    assert shown == {"role": "tool", "name": "web.run", "content": "Miles: 1,852 m", "tool_call_id": turns[9].id}
    assert json.loads(program["tool_calls"][0]["function"]["arguments"]) == {"input": "print(1852 * 3)\n"}
    assert result["tool_call_id"] == turns[12].id
    assert (messages[-2] or {})["content"] == "Anyone there?"
    assert turns[4].created_at == json.loads((GOLDEN / SHARDS[0]).read_bytes())[0]["mapping"][turns[4].id]["message"]["create_time"]


def test_each_text_is_kept_once() -> None:
    ((_, turns),) = turns_read(GOLDEN / SHARDS[0])
    for turn in turns:
        kept = json.dumps(turn.fields)
        for text in ("How far is it?", "A chart would help.\n", "print(1852", 'I sail."', "search_query"):
            assert text not in kept or "about_user_message" in kept


def test_a_result_of_another_tool_or_after_a_question_answers_nothing(tmp_path: Path) -> None:
    call = message("assistant", '{"q": 1}', recipient="web.run")
    result = message("tool", "found")
    result["author"]["name"] = "web.search"
    other = json.loads(json.dumps(result)) | {"author": {"role": "tool", "name": "python", "metadata": {}}}
    nodes = {
        "call": (call, None, ["found", "other", "asked"]),
        "found": (result, "call", ["more"]),
        "more": (result, "found", []),
        "other": (other, "call", []),
        "asked": (message(), "call", ["late"]),
        "late": (result, "asked", []),
    }
    store, report = imported(saved(tmp_path / "in.json", conversation_of(nodes)))
    assert lost(report) == {"a tool result without its call": 2}
    session = store.get("c")
    answered = {node.key: (message_of(node) or {}).get("tool_call_id") for node in session.descendants(session.root)}
    assert answered == {"call": None, "found": "call", "more": "call", "other": None, "asked": None, "late": None}


# The tree


def test_d44_every_node_of_a_mapping_is_kept_with_its_parent(tmp_path: Path) -> None:
    """LibreChat 9491, BetterChatGPT 53: system messages in between, nodes without a message, several answers to one question."""
    hidden = message("system", "", metadata={"is_visually_hidden_from_conversation": True})
    nodes = {
        "late": (message("assistant", "C"), "mid", []),
        "root": (None, None, ["sys"]),
        "sys": (hidden, "root", ["ask"]),
        "mid": (message("system", "be kind"), "empty", ["late", "later"]),
        "ask": (message(), "sys", ["b", "a", "empty"]),
        "a": (message("assistant", "A"), "ask", []),
        "b": (message("assistant", "B"), "ask", ["thanks"]),
        "thanks": (message("user", "thanks"), "b", []),
        "empty": (None, "ask", ["mid"]),
        "later": (message("assistant", "D"), "mid", []),
    }
    value = conversation_of(nodes, "a", conversation_id="conv")
    store, report = imported(saved(tmp_path / "in.json", [value]))
    assert report.turns == report.new_nodes == len(nodes)
    session = store.get("conv")
    found = list(session.descendants(session.root))
    parents = {node.key: node.parent.key if node.parent != session.root else None for node in found if node.parent is not None}
    assert parents == {node_id: parent for node_id, (_, parent, _) in nodes.items()}
    for node in [session.root, *found]:
        wanted = nodes[node.key][2] if node.key is not None else ["root"]
        assert [child.key for child in session.children(node)] == wanted
    assert session.heads["main"].key == "a"
    again, told = exported(store, tmp_path / "out.json")
    assert again == [value]
    assert not told.lost


def test_what_is_appended_in_the_store_is_written_below_what_was_there(tmp_path: Path) -> None:
    store, _ = imported(GOLDEN / SHARDS[0])
    (name,) = store.sessions()
    session = store.get(name)
    before, _ = exported(store, tmp_path / "before.json")
    said = json.dumps({"role": "user", "content": "And back?"})
    new = session.append(session.heads["main"], [], role="user", metadata={"message": said})
    session.set_head("main", new, expected=session.head("main"))
    (after,), _ = exported(store, tmp_path / "after.json")
    assert after["current_node"] == new.id.hex()
    assert after["mapping"][new.id.hex()]["message"]["content"] == {"content_type": "text", "parts": ["And back?"]}
    assert after["mapping"][new.id.hex()]["parent"] == before[0]["current_node"]
    after["mapping"].pop(new.id.hex())
    after["mapping"][before[0]["current_node"]]["children"].clear()
    assert after | {"current_node": before[0]["current_node"]} == before[0]


CYCLE = {"a": (message(), "b", ["b"]), "b": (message(), "a", ["a"]), "r": (None, None, [])}
BROKEN: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, str | None]]] = {
    "its parents lead back to itself": (
        conversation_of(CYCLE, "r"),
        {"its parents lead back to itself": 1},
        {"a": "b", "b": None, "r": None},  # or the other way round: either is as good
    ),
    "no such parent": (
        conversation_of({"a": (message(), "gone", []), "b": (message(), None, [])}, "a"),
        {"no such parent": 1},
        {"a": None, "b": None},
    ),
    "children that are not those": (
        conversation_of({"a": (message(), None, ["c", "x"]), "b": (message(), "a", []), "c": (message(), "a", ["b"])}),
        {"children that are not those that name it as their parent": 2},
        {"a": None, "c": "a", "b": "a"},
    ),
    "one is named twice": (
        conversation_of({"a": (message(), None, ["b", "b"]), "b": (message(), "a", [])}),
        {"children that are not those that name it as their parent": 1},
        {"a": None, "b": "a"},
    ),
    "none is named": (
        conversation_of({"a": (message(), None, [])}) | {"current_node": None},
        {"no current node": 1},
        {"a": None},
    ),
    "is not there": (
        conversation_of({"a": (message(), None, [])}, "gone"),
        {"no current node": 1},
        {"a": None},
    ),
    "its author": (
        conversation_of({"a": (message(), None, ["b"]), "b": ({"content": {}}, "a", ["c"]), "c": (message(), "b", [])}),
        {"its author is to be a mapping": 1, "children that are not those that name it as their parent": 1, "no such parent": 1},
        {"a": None, "c": None},
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_tree_is_refused_by_name_and_salvaged_with_a_report(tmp_path: Path, what: str) -> None:
    value, wanted, parents = BROKEN[what]
    good = conversation_of({"g": (message(), None, [])}, id="good")
    path = saved(tmp_path / "in.json", [value, good])
    with pytest.raises(InterchangeError, match=re.escape(what)):
        imported(path)
    store, report = imported(path, salvage=True)
    assert faults(report) == wanted
    session = store.get("c")
    found = {node.key: node.parent.key if node.parent and node.parent.key else None for node in session.descendants(session.root)}
    if what == "its parents lead back to itself" and found["a"] is None:
        parents = {"a": None, "b": "a", "r": None}
    assert found == parents
    assert "good" in store.sessions()


def test_several_first_nodes_are_kept(tmp_path: Path) -> None:
    value = [conversation_of({"a": (None, None, []), "b": (message(), None, ["c"]), "c": (message("assistant"), "b", [])}, "a")]
    store, _ = imported(saved(tmp_path / "in.json", value))
    assert exported(store, tmp_path / "out.json")[0] == value


def test_a_second_conversation_of_an_id_is_a_fault(tmp_path: Path) -> None:
    first, second = (conversation_of({node_id: (message(), None, [])}) for node_id in "ab")
    path = saved(tmp_path / "in.json", [first, second])
    with pytest.raises(InterchangeError, match=r"in.json, \[1\]: a conversation of an id that was there before: c"):
        imported(path)
    store, report = imported(path, salvage=True)
    assert faults(report) == {"a conversation of an id that was there before": 1}
    assert exported(store, tmp_path / "out.json")[0] == [first]


def test_conversations_without_ids_nodes_or_titles(tmp_path: Path) -> None:
    bare = {
        "mapping": {"a": {"message": message(), "parent": None}, "b": {"id": "other", "message": None, "parent": "a", "new": [1]}}
    }
    values: list[Any] = [
        bare | {"current_node": "b"},
        {"mapping": {}},
        {"mapping": {}, "current_node": None, "title": None},
        {"mapping": {" ": {"id": " ", "parent": None, "children": []}}, "current_node": " ", "id": "empty"},
    ]
    store, report = imported(saved(tmp_path / "mine.json", values))
    assert report.session_ids == ("mine[0]", "mine[1]", "mine[2]", "empty")
    assert exported(store, tmp_path / "out.json")[0] == values


def test_one_conversation_alone_is_a_file_too(tmp_path: Path) -> None:
    (value,) = json.loads((GOLDEN / SHARDS[0]).read_bytes())
    store, _ = imported(saved(tmp_path / "one.json", value))
    assert exported(store, tmp_path / "out.json")[0] == [value]


def test_what_is_read_of_the_files_of_an_export_is_told_and_counted(tmp_path: Path) -> None:
    path = zipped(GOLDEN, tmp_path / "export.zip")
    told: list[int] = []
    file = SourceFile(path, told.append)
    assert FORMAT.read is not None
    assert [conversation.id for conversation in FORMAT.read(file, Losses("export.zip"))]
    assert told == sorted(told)
    assert told[-1] == file.done == sum((GOLDEN / name).stat().st_size for name in SHARDS)


def test_conversations_of_several_files_without_ids_have_the_names_of_these(tmp_path: Path) -> None:
    for name in SHARDS:
        saved(tmp_path / name, [{"mapping": {}}])
    assert imported(tmp_path)[1].session_ids == ("conversations-000[0]", "conversations-001[0]")


def test_a_second_import_changes_nothing() -> None:
    store, first = imported(GOLDEN)
    again = import_file(store, GOLDEN, "chatgpt")
    assert (again.known, again.new_nodes) == (first.added, 0) == (2, 0)


def chain(depth: int) -> dict[str, Any]:
    nodes: dict[str, Any] = {"n0": (None, None, ["n1"])}
    for at in range(1, depth):
        nodes[f"n{at}"] = (
            message("user" if at % 2 else "assistant", f"{at}"),
            f"n{at - 1}",
            [f"n{at + 1}"] if at < depth - 1 else [],
        )
    return conversation_of(nodes)


def test_a_mapping_2565_deep(tmp_path: Path) -> None:
    value = chain(2565)
    value["mapping"] = dict(reversed(value["mapping"].items()))
    value["current_node"] = "n2564"
    store, _ = imported(saved(tmp_path / "in.json", [value]))
    assert store.get("c").heads["main"].depth == 2565
    assert exported(store, tmp_path / "out.json")[0] == [value]


@pytest.mark.soak
def test_a_mapping_of_100_000_nodes(tmp_path: Path) -> None:
    """As deep as that on one side, as wide on the other; every order of nodes in the file gives the same turns."""
    rng = random.Random(5)
    parents: dict[str, str | None] = {"0": None}
    for at in range(1, 100_000):
        parents[str(at)] = str(at - 1) if at < 50_000 else str(rng.randrange(at)) if at < 75_000 else "7"
    children: dict[str | None, list[str]] = {each: [] for each in parents}
    for each, parent in parents.items():
        if parent is not None:
            children[parent].append(each)
    names = list(parents)
    rng.shuffle(names)
    nodes = {each: (message(text=each), parents[each], children[each]) for each in names}
    path = saved(tmp_path / "in.json", [conversation_of(nodes)])
    ((conversation, turns),) = turns_read(path)
    assert {turn.id: turn.parent for turn in turns} == parents
    places: dict[Any, int] = {turn.id: place for place, turn in enumerate(turns)}
    assert all(turn.parent is None or places[turn.parent] < places[turn.id] for turn in turns)
    assert FORMAT.write is not None
    FORMAT.write(
        [Conversation(id="c", turns=turns, title=conversation.title, heads=conversation.heads, fields=conversation.fields)],
        tmp_path / "out.json",
        Losses("export"),
    )
    assert json.loads((tmp_path / "out.json").read_bytes()) == json.loads(path.read_bytes())


# Random exports

UNICODE = st.text(st.characters(codec="utf-8") | st.sampled_from('\ud800\udc00\u0000\u2028"\\[]{}'), max_size=12)
KEPT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | UNICODE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UNICODE, inner, max_size=3),
    max_leaves=6,
)
OTHER = st.dictionaries(st.sampled_from(["new", "fovea", "is_new", ""]) | UNICODE.map("x{}".format), KEPT, max_size=2)


def typed(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda made, other: {**other, **made, "content_type": kind}, st.fixed_dictionaries({}, optional=fields), OTHER)


POINTERS = st.sampled_from(["file-service://file-ab12", "sediment://file_cd34", "sediment://file_gone", "strange"])
PARTS = st.lists(
    UNICODE
    | typed("image_asset_pointer", asset_pointer=POINTERS, size_bytes=st.integers(0, 9))
    | typed("audio_transcription", text=UNICODE, direction=st.sampled_from(["in", "out"]))
    | typed("audio_asset_pointer", asset_pointer=POINTERS)
    | KEPT.filter(lambda value: not isinstance(value, str)),
    max_size=4,
)
CONTENTS = st.one_of(
    typed("text", parts=st.lists(UNICODE, max_size=3)),
    typed("multimodal_text", parts=PARTS),
    typed("code", language=UNICODE, text=UNICODE | st.just('{"q": 1.0}')),
    typed("execution_output", text=UNICODE),
    typed("thoughts", thoughts=st.lists(typed("x", content=UNICODE, summary=UNICODE) | KEPT, max_size=3)),
    typed("reasoning_recap", content=UNICODE),
    typed("user_editable_context", user_profile=UNICODE, user_instructions=UNICODE | st.none()),
    typed("model_editable_context", model_set_context=UNICODE),
    typed("tether_quote", text=UNICODE, url=UNICODE),
    typed("tether_browsing_display", result=UNICODE, summary=UNICODE),
    typed("system_error", name=UNICODE, text=UNICODE),
    st.dictionaries(st.sampled_from(["content_type", "parts", "text", "result", "thoughts", "y"]), KEPT, max_size=4),
)
MESSAGES = st.builds(
    lambda author, content, said, other: {**other, **said, "author": author, "content": content},
    st.builds(
        lambda role, said: {**said, "role": role},
        st.sampled_from(["user", "assistant", "tool", "system", "critic"]),
        st.fixed_dictionaries({}, optional={"name": st.none() | st.sampled_from(["python", "web.run"]), "metadata": OTHER}),
    ),
    CONTENTS,
    st.fixed_dictionaries(
        {},
        optional={
            "id": UNICODE,
            "create_time": st.none() | st.floats(0, 2e9) | KEPT,
            "end_turn": st.none() | st.booleans(),
            "weight": st.sampled_from([0.0, 1.0, 1]),
            "recipient": st.sampled_from(["all", "python", "web.run", "assistant"]) | KEPT,
            "metadata": OTHER | st.fixed_dictionaries({"tool_call_id": UNICODE}) | KEPT,
            "channel": st.none() | st.sampled_from(["final", "commentary"]),
        },
    ),
    OTHER,
)


@st.composite
def exports(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        count = draw(st.integers(0, 8))
        names = [f"{number}-{at}" for at in range(count)]
        parents = [draw(st.sampled_from([None, *names[:at]])) if at else None for at in range(count)]
        listed = draw(st.booleans())
        mapping: dict[str, Any] = {}
        for at in draw(st.permutations(range(count))):
            node: dict[str, Any] = {"parent": parents[at]} if parents[at] is not None or draw(st.booleans()) else {}
            if draw(st.integers(0, 9)):
                node["id"] = draw(st.sampled_from([names[at], names[at], names[at], 7]))
            if draw(st.integers(0, 9)):
                node["message"] = draw(st.none() | MESSAGES)
            if listed:
                node["children"] = draw(st.permutations([names[child] for child in range(count) if parents[child] == names[at]]))
            mapping[names[at]] = node | draw(OTHER)
        value: dict[str, Any] = draw(OTHER) | {"mapping": mapping}
        if count:
            value["current_node"] = draw(st.sampled_from(names))
        for name, drawn in {
            "id": st.just(f"c{number}"),
            "title": st.none() | UNICODE,
            "create_time": KEPT,
            "safe_urls": KEPT,
        }.items():
            if draw(st.booleans()):
                value[name] = draw(drawn)
        made.append(value)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("export")
    (made / "file-ab12-x.png").write_bytes(PNG)
    (made / "file_cd34.dat").write_bytes(b"\xff\xd8\xff")
    return made


@given(value=exports(), block=st.sampled_from([1, 7, 2**20]))
def test_any_export_comes_back_as_it_was(folder: Path, value: list[dict[str, Any]], block: int) -> None:
    path = saved(folder / "conversations.json", value)
    (folder / "out.json").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "_BLOCK", block)
        store, report = imported(path)
    again, _ = exported(store, folder / "out.json")
    assert same(again, value)
    assert report.turns == report.new_nodes == sum(len(each["mapping"]) for each in value)
    for session_id, each in zip(report.session_ids, value, strict=True):
        session = store.get(session_id)
        found = {node.key: node.parent.key for node in session.descendants(session.root) if node.parent is not None}
        assert found == {node_id: node.get("parent") for node_id, node in each["mapping"].items()}


def same(one: Any, other: Any) -> bool:
    """The same JSON: 1, 1.0 and true are three values."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# Conversations of other formats

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(WORDS, KEPT, max_size=2).map(json.dumps)
IMAGES = st.sampled_from([Image(PNG, "image/png"), Image(b"\xff\xd8\xff\x01", "image/jpeg")])


@st.composite
def turns_of_others(draw: st.DrawFn, turn_id: str, parent: str | None) -> Turn:
    role = draw(st.sampled_from(["system", "user", "assistant", "tool", None]))
    if role is None:
        return Turn(id=turn_id, parent=parent, role="compaction")
    made: dict[str, Any] = {"role": role, "content": draw(WORDS)}
    images: tuple[Image, ...] = ()
    if role in ("user", "tool") and draw(st.booleans()):
        images = tuple(draw(st.lists(IMAGES, max_size=2)))
        parts = [{"type": "text", "text": draw(WORDS)}, *({"type": "image", "image": at} for at in range(len(images)))]
        made["content"] = draw(st.permutations(parts))
    if role == "assistant":
        if draw(st.booleans()):
            made["reasoning_content"] = draw(WORDS)
        if draw(st.booleans()):
            made["content"] = draw(st.sampled_from([None, "Let me see."]))
            names = st.sampled_from(["python", "web.run", "f"])
            made["tool_calls"] = [
                {"id": f"{turn_id}/{at}", "type": "function", "function": {"name": draw(names), "arguments": draw(ARGUMENTS)}}
                for at in range(draw(st.integers(1, 3)))
            ]
    if role == "tool":
        made["tool_call_id"] = draw(WORDS)
    created_at = draw(st.none() | st.floats(0, 2e9))
    return Turn(id=turn_id, parent=parent, message=made, images=images, created_at=created_at)


@st.composite
def trees_of_others(draw: st.DrawFn) -> list[Turn]:
    names = draw(st.lists(WORDS, unique=True, max_size=7))
    return [draw(turns_of_others(name, draw(st.sampled_from([None, *names[:at]])))) for at, name in enumerate(names)]


def said_on(branch: tuple[Turn, ...]) -> list[tuple[Any, ...]]:
    """All that a branch says, piece by piece, whatever turns it is divided into."""
    pieces: list[tuple[Any, ...]] = []
    for turn in branch:
        if turn.message is None:
            continue
        role = turn.message["role"]
        answers = turn.message.get("tool_call_id")
        if thoughts := turn.message.get("reasoning_content"):
            pieces.append((role, "thoughts", thoughts))
        for part in parts_of(turn.message):
            if part["type"] == "image":
                pieces.append((role, answers, turn.images[part["image"]]))
            elif part["text"]:
                pieces.append((role, answers, part["text"]))
        for call in turn.message.get("tool_calls", []):
            pieces.append((role, call["id"], call["function"]["name"], call["function"]["arguments"]))
    return pieces


@given(trees_of_others())
def test_what_other_formats_said_is_written_as_an_export_and_read_the_same(folder: Path, turns: list[Turn]) -> None:
    made = Conversation(id="c", turns=turns, title="T", heads={"main": turns[-1].id} if turns and turns[-1].id else {})
    assert FORMAT.write is not None
    path = folder / "others.zip"
    losses = Losses("export")
    FORMAT.write([made], path, losses)
    with zipfile.ZipFile(path) as archive:
        value = json.loads(archive.read("conversations.json"))
    check_export(value)
    ((again, read),) = turns_read(path)
    before, after = Tree(made), Tree(Conversation(id="c", turns=read))
    assert sorted(map(repr, map(said_on, before.branches()))) == sorted(map(repr, map(said_on, after.branches()))) or not turns
    known = {"turns that are no messages", "a message that is several nodes", "when it was made"}
    assert {next((each for each in known if loss.what.startswith(each)), loss.what) for loss in losses.lost} <= known
    if turns:
        assert again.heads["main"] == turns[-1].id


def written(tmp_path: Path, *turns: Turn, **said: Any) -> tuple[dict[str, Any], dict[str, int]]:
    assert FORMAT.write is not None
    losses = Losses("export")
    FORMAT.write([Conversation(**({"id": "c", "turns": turns} | said))], tmp_path / "out.json", losses)
    (value,) = json.loads((tmp_path / "out.json").read_bytes())
    check_export([value])
    return value, {loss.what: loss.count for loss in losses.lost}


def test_what_an_export_cannot_hold_is_named(tmp_path: Path) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image", "image": 0},
    ]
    turns = [
        Turn(id="a", parent=None, message={"role": "developer", "content": "Be kind."}, created_at=5.0),
        Turn(id="b", parent="a", message={"role": "user", "content": parts}, images=(Image(PNG, "image/png"),)),
        Turn(id="c", parent="b", message={"role": "assistant", "content": None, "refusal": "No."}),
        Turn(id="d", parent="c", message={"role": "assistant", "function_call": {"name": "all", "arguments": "{}"}}),
        Turn(id="e", parent="d", message={"role": "function", "name": "f", "content": "1"}),
        Turn(id="f", parent="e", role="compaction"),
        Turn(id="g", parent="f", message={"role": "narrator", "content": "Night."}),
    ]
    value, losses = written(tmp_path, *turns, tools=({"type": "function", "function": {"name": "f"}},), heads={"main": "a"})
    assert losses == {
        "the role developer, written as system": 1,
        "pictures that are named only, written as links": 1,
        "parts of messages of type input_audio": 1,
        "pictures: a .zip holds them, a .json names them": 1,
        "a refusal, written as text": 1,
        "the role function, written as tool": 1,
        "turns that are no messages: of them, only their place": 1,
        "the role narrator, written as user": 1,
        "definitions of tools": 1,
    }
    assert (value["create_time"], value["update_time"], value["current_node"]) == (5.0, 5.0, "a")
    contents = {node_id: node["message"] and node["message"]["content"] for node_id, node in value["mapping"].items()}
    assert contents["b"]["parts"][0] == "![](https://example.org/a.png)"
    assert contents["c"] == {"content_type": "text", "parts": ["No."]}
    assert value["mapping"]["d"]["message"]["recipient"] == "functions.all"
    assert value["mapping"]["e"]["message"]["author"]["name"] == "f"
    assert contents["f"] is None


def test_ids_of_others_stay_and_those_made_beside_them_are_free(tmp_path: Path) -> None:
    calls = [{"id": f"k{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(2)]
    turns = [
        Turn(id="client-created-root", parent=None, message={"role": "user", "content": "x"}),
        Turn(id="a", parent="client-created-root", message={"role": "assistant", "content": "y", "tool_calls": calls}),
        Turn(id="a-1", parent="a", message={"role": "tool", "content": "2", "tool_call_id": "k1"}),
        Turn(id="b", parent="a", message={"role": "tool", "content": "1", "tool_call_id": "k0"}),
    ]
    value, losses = written(tmp_path, *turns)
    nodes = value["mapping"]
    assert list(nodes) == ["client-created-root-", "client-created-root", "a-1-", "a-2", "a", "a-1", "b"]
    assert nodes["a"]["children"] == ["a-1", "b"] and nodes["a-1"]["message"]["author"]["name"] == "f"
    assert losses == {
        "a message that is several nodes: its reasoning, its text, each tool call": 1,
        "when it was made is not known, and written as 1970": 1,
    }


# Files that are no exports


def deep(depth: int) -> bytes:
    return b'[{"mapping":{},"x":' + b"[" * depth + b"]" * depth + b"}]"


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the list does not end"),
    "spaces": (b" \r\n", "the list does not end"),
    "cut off": (b'[{"mapping":{}},{"mapping":{"a', r"\[1\].*the list does not end"),
    "cut off after an entry": (b'[{"mapping":{}}', "the list does not end"),
    "text": (b"hello", "the list does not end"),
    "scalars": (b"[1, 2]", "no JSON list of mappings"),
    "a scalar at the end": (b'[{"mapping":{}}, null]', r"\[1\]: no JSON list of mappings: , null"),
    "no comma": (b'[{"mapping":{}} {"mapping":{}}]', r"\[1\]: no JSON list"),
    "a comma too many": (b'[{"mapping":{}},]', r"\[1\]: no JSON list"),
    "mixed brackets": (b'[{"mapping":[}]]', "no JSON"),
    "two lists": (b"[] []", "after the list"),
    "a list in it": (b"[[]]", "a conversation is to be a mapping"),
    "NaN": (b'[{"mapping":{},"create_time":NaN}]', "NaN is no JSON"),
    "too large": (b'[{"mapping":{},"create_time":1e999}]', "1e999 is too large"),
    "too many digits": (b'[{"mapping":{},"create_time":' + b"9" * 5000 + b"}]", "digits"),
    "no UTF-8": (b'[{"mapping":{"\xff":null}}]', "utf-8"),
    "deep": (deep(100_000), "recursion"),
    "one deep": (deep(100_000)[1:-1], "recursion"),
    "one cut off": (b'{"mapping": {', "the whole file: no JSON"),
    "no mapping": (b'[{"chat_messages":[]}]', "its mapping is to be a mapping: it is null"),
    "a mapping of text": (b'[{"mapping":"x"}]', "its mapping is to be a mapping: it is text"),
    "an id that is none": (b'[{"mapping":{},"id":{}}]', "its id is to be text"),
    "a node that is none": (b'[{"mapping":{"a":[]}}]', r"\[0\].mapping.a: a node is to be a mapping"),
    "a parent that is none": (b'[{"mapping":{"a":{"parent":7}}}]', "its parent is to be text or null: it is a whole number"),
    "children that are none": (b'[{"mapping":{"a":{"children":null}}}]', "its children is to be a list"),
    "a child that is none": (b'[{"mapping":{"a":{"children":[{}]}}}]', "a child is to be text"),
    "a message that is none": (b'[{"mapping":{"a":{"message":true}}}]', "its message is to be a mapping or null"),
    "no author": (b'[{"mapping":{"a":{"message":{}}}}]', "its author is to be a mapping"),
    "no role": (b'[{"mapping":{"a":{"message":{"author":{}}}}}]', "the role of its author is to be text"),
    "no content": (b'[{"mapping":{"a":{"message":{"author":{"role":"user"}}}}}]', "its content is to be a mapping"),
    "half a character as an id": (b'[{"mapping":{},"id":"\\ud800"}]', "a conversation's id is no text"),
    "half a character as a node": (b'[{"mapping":{"\\ud800":{}},"current_node":"\\ud800","id":"x"}]', "an id is no text"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_export_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    data, what = HOSTILE[name]
    path = tmp_path / "in.json"
    path.write_bytes(data)
    with pytest.raises(InterchangeError, match=f"(?s)in.json, .*{what}"):
        imported(path)
    _, report = imported(path, salvage=True)
    assert report.faults


def test_what_is_sound_beside_a_fault_is_salvaged(tmp_path: Path) -> None:
    good = [conversation_of({"a": (message(), None, [])}, id=f"g{at}") for at in range(2)]
    texts = [json.dumps(each) for each in good]
    path = tmp_path / "in.json"
    path.write_text(f'[{texts[0]}, {{"mapping": {{}}, "x": nonsense}}, {texts[1]}, {{"mapping"')
    store, report = imported(path, salvage=True)
    assert faults(report) == {"no JSON": 2}
    assert exported(store, tmp_path / "out.json")[0] == good


def test_marks_of_order_and_ends_of_lines_do_not_matter(tmp_path: Path) -> None:
    value = json.loads((GOLDEN / SHARDS[0]).read_bytes())
    for data in (b"\xef\xbb\xbf" + json.dumps(value).encode(), json.dumps(value, indent=2).replace("\n", "\r\n").encode()):
        path = tmp_path / "in.json"
        path.write_bytes(data)
        store, _ = imported(path)
        (tmp_path / "out.json").unlink(missing_ok=True)
        assert exported(store, tmp_path / "out.json")[0] == value


def archive_of(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def damaged(path: Path) -> None:
    archive_of(path, **{"conversations.json": b'[{"mapping": {}}]'})
    data = bytearray(path.read_bytes())
    data[data.index(b"mapping")] ^= 1
    path.write_bytes(data)


def encrypted(path: Path) -> None:
    archive_of(path, **{"conversations.json": b'[{"mapping": {}}]'})
    data = bytearray(path.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(header) + flags] |= 1
    path.write_bytes(data)


def with_a_damaged_picture(path: Path) -> None:
    pointer = {"content_type": "image_asset_pointer", "asset_pointer": "sediment://file_ab"}
    said = message() | {"content": {"content_type": "multimodal_text", "parts": [pointer]}}
    value = json.dumps([conversation_of({"a": (said, None, [])})]).encode()
    archive_of(path, **{"conversations.json": value, "file_ab.dat": b"a picture"})
    path.write_bytes(path.read_bytes().replace(b"a picture", b"a pixture"))


def without_a_shard(path: Path) -> None:
    shutil.copytree(GOLDEN, path)
    (path / SHARDS[1]).unlink()


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an archive of something else": (lambda path: archive_of(path, **{"a.json": b"[]"}), "no conversations.json"),
    "an empty folder": (Path.mkdir, "no conversations.json"),
    "a damaged archive": (damaged, "a ZIP archive that cannot be read: Bad CRC"),
    "an encrypted archive": (encrypted, "a ZIP archive that cannot be read: File"),
    "a damaged picture": (with_a_damaged_picture, "[0].mapping.a: a picture that cannot be read: Bad CRC"),
    "a shard that the manifest names": (without_a_shard, f"a file of the export is not there: {SHARDS[1]}"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_or_an_archive_that_is_no_export_is_refused(tmp_path: Path, name: str) -> None:
    make, what = FOLDERS[name]
    path = tmp_path / "export.zip"
    make(path)
    with pytest.raises(InterchangeError, match=re.escape(what)):
        imported(path)
    _, report = imported(path, salvage=True)
    assert sum(faults(report).values()) == 1


@pytest.mark.parametrize(
    "manifest", [b"{", b"[]", b'{"logical_files": {}}', b'{"logical_files": {"conversations.json": {"files": 1}}}']
)
def test_a_manifest_that_says_nothing_is_no_fault(tmp_path: Path, manifest: bytes) -> None:
    path = archive_of(tmp_path / "export.zip", **{"conversations.json": b'[{"mapping": {}}]', "export_manifest.json": manifest})
    _, report = imported(path)
    assert report.added == 1


def test_an_export_is_written_as_messages_that_openai_takes(tmp_path: Path) -> None:
    store, _ = imported(GOLDEN)
    report = export_file(store, tmp_path / "out.jsonl", "openai")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [len(row["messages"]) for row in rows] == [5, 11, 12, 6]
    refused = [said for row in rows for said in row["messages"] if not is_valid(said)]
    shown, orphan = sorted(refused, key=lambda said: len(json.dumps(said)), reverse=True)
    assert orphan == {"role": "tool", "content": "It is gone.", "name": "file_search"}
    assert (shown["role"], shown["content"][0]["type"]) == ("tool", "image_url")  # others take pictures of tools
    assert lost(report)["turns that are no messages"] == 7
