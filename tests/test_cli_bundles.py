"""export and import on the command line; and a bundle reads like the store that it came from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from sessiontree import SessionStore
from tests.command_line import conversation, generate, json_of, run, text_of


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A store with two conversations, a fork and features."""
    with SessionStore.open(tmp_path / "chats") as store:
        session = conversation(store)
        conversation(store, "chat-2")
        store.fork(session, session.head("first").node, "fork")
        for item, _, _ in session.head("main").node.media_spans():
            store.put_features(item, np.ones(4))
    return tmp_path / "chats"


@pytest.mark.parametrize("command", ["ls", "tree", "show", "log", "diff", "replay"])
def test_a_bundle_reads_like_its_store(chats: Path, tmp_path: Path, command: str) -> None:
    bundle = tmp_path / "all.bundle"
    report = json_of("export", chats, bundle, "--features")
    assert report["sessions"] == ["chat-1", "chat-2", "fork"] and report["media"] == 1
    places = {"tree": ["fork"], "show": ["chat-1"], "log": ["chat-1/first"], "diff": ["chat-1", "fork"], "replay": ["chat-2"]}
    for more in ([], ["--json"]):
        of_store, of_bundle = (run(command, path, *places.get(command, []), *more) for path in (chats, bundle))
        assert of_store.exit_code == of_bundle.exit_code == (command == "diff")
        assert of_bundle.stdout == of_store.stdout.replace(f'"{chats}"', f'"{bundle}"')


def test_export_of_some_and_import_twice(chats: Path, tmp_path: Path) -> None:
    bundle, new = tmp_path / "some.bundle", tmp_path / "new"
    assert text_of("export", chats, bundle, "chat-2", "fo", "--zstd").startswith(f"written to {bundle}\n")
    first = json_of("import", new, bundle)
    assert sorted(first["created"]) == ["chat-2", "fork"] and first["nodes_known"] == 0
    again = json_of("import", new, bundle)
    assert again["created"] == [] and again["nodes_added"] == 0
    assert "imported from" in text_of("import", new, bundle)
    assert text_of("tree", new, "chat-2") == text_of("tree", chats, "chat-2")
    assert run("diff", chats, "fork", "fork", "--in", new).exit_code == 0


def test_export_leaves_alone_what_is_there(chats: Path, tmp_path: Path) -> None:
    """A file of any kind unless that is wanted, and the files of a store whatever is wanted."""
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    result = run("export", chats, notes)
    assert (result.exit_code, result.stdout, notes.read_text()) == (2, "", "mine") and "--force" in result.stderr
    assert "--force" in text_of("export", "--help") and "left alone" in text_of("export", "--help")
    assert json_of("export", chats, notes, "--force")["nodes"] == 10
    assert run("ls", notes).exit_code == 0
    before = {file: file.read_bytes() for file in chats.rglob("*") if file.is_file()}
    (tmp_path / "link").symlink_to(chats)
    inside = [*before, chats / "new.bundle", chats / "segments" / "new", tmp_path / "link" / "new"]
    for file in inside:
        for source in (chats, notes):
            for options in ([], ["--force"]):
                result = run("export", source, file, *options)
                assert result.exit_code == 2 and ("lies in the store" in result.stderr or not options), file
    assert {file: file.read_bytes() for file in chats.rglob("*") if file.is_file()} == before


def test_a_package_that_is_missing_has_a_code_of_its_own(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    json_of("export", chats, tmp_path / "packed", "--zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for arguments in (["export", chats, tmp_path / "x", "--zstd"], ["ls", tmp_path / "packed"]):
        result = run(*arguments)
        assert result.exit_code == 8 and "sessiontree[zstd]" in result.stderr
    assert not (tmp_path / "x").exists()


def test_what_is_no_store_says_what_it_is(chats: Path, tmp_path: Path) -> None:
    bundle, notes = tmp_path / "all.bundle", tmp_path / "notes.txt"
    json_of("export", chats, bundle)
    notes.write_text("mine")
    for command in ("fsck", "stats"):
        assert json_of(command, bundle, code=6)["error"]["type"] == "IncompatibleStore"
        assert "is a bundle; `sessiontree import`" in run(command, bundle).stderr
        assert (run(command, notes).exit_code, run(command, tmp_path / "nothing").exit_code) == (6, 3)
    assert (run("ls", notes).exit_code, run("ls", tmp_path / "nothing").exit_code) == (6, 3)


def test_everybody_counts_alike(chats: Path, tmp_path: Path) -> None:
    """Roots are no nodes; what a fork shares is counted once where all is counted, and told where the fork is."""
    listed = {each["id"]: (each["nodes"], each["shared"]) for each in json_of("ls", chats)["sessions"]}
    assert listed == {"chat-1": (5, 0), "chat-2": (5, 0), "fork": (2, 2)}
    assert sum(nodes - shared for nodes, shared in listed.values()) == json_of("stats", chats)["nodes"] == 10
    assert {each["session_id"]: each["nodes"] for each in json_of("stats", chats)["sessions"]} == {
        name: nodes - shared for name, (nodes, shared) in listed.items()
    }
    assert json_of("export", chats, tmp_path / "all")["nodes"] == 10 == json_of("fsck", chats)["nodes"]
    assert "fork  2 nodes (2 shared)" in text_of("ls", chats)
    text = text_of("export", chats, tmp_path / "again", "--features")
    assert ["features", "1"] in [line.split() for line in text.splitlines()]


def test_a_branch_goes_to_another_namespace(chats: Path, tmp_path: Path) -> None:
    bundle, new = tmp_path / "branch.bundle", tmp_path / "new"
    report = json_of("export", chats, bundle, "--from", "chat-1/first")
    assert (report["sessions"], report["nodes"], report["heads"]) == (["chat-1"], 2, 1)
    imported = json_of("import", new, bundle, "--namespace", "tenant=other", "--namespace", "lora=l1")
    assert imported["nodes_added"] == 2 and len(imported["ids"]) == 3
    assert json_of("ls", new)["sessions"][0]["namespace"] == {"cache_salt": None, "lora": "l1", "tenant": "other"}
    assert run("import", new, bundle).exit_code == 6, "its session has another root there"


def test_a_head_that_stays_is_told(chats: Path, tmp_path: Path) -> None:
    bundle, new = tmp_path / "one.bundle", tmp_path / "new"
    json_of("export", chats, bundle, "chat-1")
    json_of("import", new, bundle)
    with SessionStore.open(new) as store:
        session = store.get("chat-1")
        here = generate(session, session.children(session.root)[0], 1, key="here")
        session.set_head("main", here)
    (kept,) = json_of("import", new, bundle)["heads_kept"]
    assert (kept["name"], kept["here"]) == ("main", here.id.hex())
    assert f"chat-1/main stays at {here.id.hex()[:8]}; in the bundle it is at {kept['bundled'][:8]}" in text_of(
        "import", new, bundle
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["export", "nowhere", "x.bundle"], 3),
        (["export", "chats", "x.bundle", "nobody"], 2),
        (["export", "chats", "x.bundle", "chat-1", "--from", "chat-1/first"], 2),
        (["export", "chats", "nowhere/x.bundle"], 7),
        (["import", "new", "nowhere.bundle"], 3),
        (["import", "new", "chats/FORMAT"], 6),
        (["import", "new", "cut.bundle"], 5),
        (["import", "new", "all.bundle", "--namespace", "tenant"], 2),
        (["import", "all.bundle", "all.bundle"], 2),
        (["ls", "cut.bundle"], 5),
        (["ls", "chats/FORMAT"], 6),
        (["drop", "all.bundle", "chat-1/first"], 2),
    ],
)
def test_what_cannot_be_done_leaves_nothing_behind(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    json_of("export", chats, "all.bundle")
    Path("cut.bundle").write_bytes(Path("all.bundle").read_bytes()[:-20])
    before = sorted(tmp_path.iterdir())
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("sessiontree: ") and sorted(tmp_path.iterdir()) == before
