"""The commands that keep a store healthy do what the library does, and say so; other processes go on meanwhile."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from sessiontree import SessionStore
from sessiontree.fsck import fsck, stats
from tests.command_line import conversation, flip, generate, json_of, run, sessiontree, text_of


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A store with one conversation."""
    with SessionStore.open(tmp_path / "chats") as store:
        conversation(store)
    return tmp_path / "chats"


def shown_in(path: Path, session: str = "chat-1") -> dict[str, bytes]:
    """Ids of the generated nodes, by key."""
    with SessionStore.open(path, read_only=True) as store:
        return {str(node.key): node.id for node in store.get(session).tree if node.origin == "generated"}


# --- pin, drop, gc ----------------------------------------------------------------------------------------------------
def test_pin_and_unpin(chats: Path) -> None:
    node = shown_in(chats)["other"].hex()
    assert text_of("pin", chats, node[:8]) == f"chat-1/{node[:8]} is pinned\n"
    assert json_of("pin", chats, f"chat-1/{node}") == {"session": "chat-1", "node": node, "pinned": True}, "again is the same"
    assert json_of("ls", chats)["sessions"][0]["pins"] == [node]
    assert ", 1 pin, " in text_of("ls", chats)
    assert json_of("show", chats, node[:8])["pinned"] and "pinned     yes" in text_of("show", chats, node[:8])
    assert [", pinned" in line for line in text_of("tree", chats).splitlines()].count(True) == 1
    result = run("drop", chats, node[:8])
    assert (result.exit_code, result.stdout) == (2, ""), "what is pinned stays"
    assert text_of("unpin", chats, node[:8]) == f"chat-1/{node[:8]} is not pinned\n"
    assert json_of("unpin", chats, node[:8]) == {"session": "chat-1", "node": node, "pinned": False}
    assert json_of("ls", chats)["sessions"][0]["pins"] == []


def test_drop_and_gc_give_back_what_nothing_holds(chats: Path) -> None:
    before = shown_in(chats)
    with SessionStore.open(chats) as store:
        session = store.get("chat-1")
        generate(session, session.node(before["first"]), *range(5000), key="more")
        session.drop_head("first")
    size = sum(file.stat().st_size for file in chats.rglob("*.seg"))
    refused = run("drop", chats, "chat-1/root")
    assert refused.exit_code == 2 and run("drop", chats, "main").exit_code == 2, "a head holds it"
    assert run("drop", chats, "chat-1").exit_code == 2, "a session alone is refused"
    first = before["first"].hex()
    assert text_of("drop", chats, first[:8]) == f"chat-1/{first[:8]} is dropped, with all below it\n"
    assert shown_in(chats) == {key: node for key, node in before.items() if key != "first"}
    report = json_of("gc", chats)
    assert report["nodes_before"] - report["nodes_after"] == 2 and report["bytes_after"] < report["bytes_before"]
    assert sum(file.stat().st_size for file in chats.rglob("*.seg")) < size
    assert shown_in(chats) == {key: node for key, node in before.items() if key != "first"}
    assert run("show", chats, first).exit_code == 2
    tree = text_of("tree", chats)
    with SessionStore.open(chats, read_only=True) as store:
        assert tree == store.get("chat-1").to_text() + "\n", "ordinals without a node are no damage"
    assert text_of("gc", chats).splitlines()[0].split() == ["nodes", "before", str(report["nodes_after"])]


def test_gc_with_recent_keeps_what_heads_and_pins_lead_to(chats: Path) -> None:
    with SessionStore.open(chats) as store:
        session = store.get("chat-1")
        question = session.children(session.root)[0]
        loose = [generate(session, question, number, key=f"loose {number}") for number in range(6)]
        session.pin(loose[1])
    json_of("gc", chats)
    assert {f"loose {number}" for number in range(6)} <= shown_in(chats).keys(), "nothing is dropped that nobody dropped"
    json_of("gc", chats, "--recent", 2)
    assert shown_in(chats).keys() == {"first", "other", "last", "loose 1", "loose 4", "loose 5"}
    assert run("gc", chats, "--recent", -1).exit_code == 2


def test_drop_of_a_session_wants_to_be_meant(chats: Path) -> None:
    with SessionStore.open(chats) as store:
        store.create("other", scheme="text@hf5")
    assert json_of("drop", chats, "chat-1", "--session") == {"session": "chat-1", "node": None}
    assert [each["id"] for each in json_of("ls", chats)["sessions"]] == ["other"]
    assert text_of("drop", chats, "other", "--session") == "other is dropped\n"
    assert run("drop", chats, "other", "--session").exit_code == 2


def test_a_head_is_removed_and_what_it_held_can_go(chats: Path) -> None:
    first = shown_in(chats)["first"].hex()
    refused = run("drop", chats, f"chat-1/{first}")
    assert (
        refused.exit_code == 2 and "head 'first' of session 'chat-1' holds it" in refused.stderr and "<Node" not in refused.stderr
    )
    (remedy,) = [line for line in refused.stderr.splitlines() if "lets go" in line]
    assert run("drop", chats, f"chat-1/{first}", "--head").exit_code == 2, "a node is no head"
    command = remedy.partition("`sessiontree ")[2].partition("`")[0]
    assert text_of(*shlex.split(command)) == f"chat-1/{first[:8]} is no longer head first\n"
    assert shown_in(chats)["first"].hex() == first, "the node stays"
    assert text_of("drop", chats, f"chat-1/{first}").endswith("with all below it\n")
    assert json_of("drop", chats, "chat-1/main", "--head")["head"] == "main"
    assert json_of("ls", chats)["sessions"][0]["heads"] == {}


def test_what_a_pin_holds_says_how_to_let_go(chats: Path) -> None:
    node = shown_in(chats)["other"].hex()
    text_of("pin", chats, node)
    for arguments in (["chat-1", "--session"], [f"chat-1/{node}"]):
        with SessionStore.open(chats) as store:
            for name in tuple(store.get("chat-1").heads):
                store.get("chat-1").drop_head(name)
        refused = run("drop", chats, *arguments)
        assert refused.exit_code == 2 and "pin" in refused.stderr
        command = refused.stderr.partition("`sessiontree ")[2].partition("`")[0]
        assert command.startswith("unpin ")
    assert run(*shlex.split(command)).exit_code == 0
    assert run("drop", chats, "chat-1", "--session").exit_code == 0
    assert "heads included" in text_of("drop", "--help")


@pytest.mark.parametrize("name", ["a/b", "with space", "main", "'"])
def test_a_head_of_any_name_is_removed(name: str, chats: Path) -> None:
    with SessionStore.open(chats) as store:
        session = store.get("chat-1")
        session.set_head(name, session.head("first").node)
        session.set_head("b", session.head("first").node)
    assert json_of("drop", chats, f"chat-1/{name}", "--head")["head"] == name
    assert name not in json_of("ls", chats)["sessions"][0]["heads"] and run("show", chats, "chat-1/b").exit_code == 0
    assert run("drop", chats, "chat-1/root", "--head").exit_code == 2
    assert run("drop", chats, "chat-1", "--head", "--session").exit_code == 2


def test_gc_beside_a_reader(chats: Path) -> None:
    """What somebody reads goes when they are done; nobody notices."""
    nodes = shown_in(chats)
    with SessionStore.open(chats, read_only=True) as reader:
        session = reader.get("chat-1")
        assert run("drop", chats, "first").exit_code == 2
        with SessionStore.open(chats) as store:
            store.get("chat-1").drop_head("first")
        assert sessiontree("drop", chats, nodes["first"].hex()).returncode == 0
        done = sessiontree("gc", chats, "--json")
        assert done.returncode == 0 and not json.loads(done.stdout)["swept"], done.stderr
        assert session.node(nodes["first"]).token_ids.tolist() == [7, 8]
    del session, reader
    assert json_of("gc", chats)["swept"]


# --- fsck, stats ------------------------------------------------------------------------------------------------------
def test_fsck_of_a_sound_store(chats: Path) -> None:
    assert json_of("fsck", chats) == fsck(chats).to_dict() | {"salvage": None}
    lines = text_of("fsck", chats).splitlines()
    assert lines[0] == "nothing is damaged" and ["damaged", "0"] in [line.split() for line in lines]
    assert json_of("fsck", chats.parent / "nowhere", code=3)["error"]["type"] == "NoStore"


def test_fsck_names_damage_and_saves_the_rest(chats: Path, tmp_path: Path) -> None:
    nodes = shown_in(chats)
    flip(chats, b"other")
    before = {file.name: file.read_bytes() for file in chats.rglob("*") if file.is_file()}
    answer = json_of("fsck", chats, code=1)
    (damage,) = answer["damaged"]
    assert not answer["ok"] and (damage["session_id"], damage["node_id"]) == ("chat-1", nodes["other"].hex())
    assert nodes["last"].hex() in damage["dependents"] and len(damage["dependents"]) == 2
    text = text_of("fsck", chats, code=1)
    assert text.startswith("DAMAGED\n") and nodes["other"].hex()[:16] in text and "--salvage" in text
    assert f"with it 2 nodes below: {' '.join(node[:8] for node in damage['dependents'])}" in text
    new = tmp_path / "new"
    saved = json_of("fsck", chats, "--salvage", new, code=1)
    assert saved["salvage"]["nodes"] == 2 and saved["damaged"] == answer["damaged"]
    assert shown_in(new) == {"first": nodes["first"]}
    assert json_of("fsck", new)["ok"]
    assert {file.name: file.read_bytes() for file in chats.rglob("*") if file.is_file()} == before, "nothing of it was changed"
    assert run("fsck", chats, "--salvage", new).exit_code not in (0, 1), "never over a store"


def test_stats(chats: Path) -> None:
    with SessionStore.open(chats) as store:
        item = store.get("chat-1").head("main").node.media_spans()[0][0]
        store.put_features(item, np.ones(3))
    assert json_of("stats", chats) == json.loads(json.dumps(stats(chats).to_dict()))
    text = text_of("stats", chats)
    assert "session_id chat-1" in text.replace("session id", "session_id")


def test_reports_are_safe_for_terminals(tmp_path: Path) -> None:
    name = "id\x1b[2J\u202e"
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create(name, scheme="text@hf5")
        generate(session, session.append(session.root, [1, 2]), 3, key="mark")
    for command in ("stats", "fsck"):
        flip(tmp_path / "store", b"mark") if command == "fsck" else None
        written = run(command, tmp_path / "store").output
        assert "id\\x1b" in written and all(each.isprintable() or each == "\n" for each in written)
