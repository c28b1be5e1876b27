"""The commands that look, beside damage: what can be read is shown, what cannot is named, and what to do next is said."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sessiontree import CorruptTree, SessionStore, replay
from sessiontree.bundles import export_bundle, open_bundle
from tests.command_line import conversation, environment, flip, generate, json_of, run, text_of

LOOKING = ("ls", "tree", "show", "log", "diff", "replay", "export")


@pytest.fixture
def parted(tmp_path: Path) -> Path:
    """The last node of "first" is damaged. Its head is on it, "fork" goes on from it, and "sound" has nothing to do with it."""
    path = tmp_path / "store"
    with SessionStore.open(path, durability="commit") as store:
        first = store.create("first", scheme="text@hf5")
        question = first.append(first.root, [1, 2, 3], role="user")
        last = generate(first, question, *range(50), key="the last")
        first.set_head("main", last)
        store.fork(first, last, "fork")
        sound = store.create("sound", scheme="text@hf5")
        sound.set_head("main", generate(sound, sound.append(sound.root, [4]), 5, key="sound"))
    flip(path, b"the last")
    return path


def test_a_head_at_a_node_of_which_nothing_is_left(parted: Path) -> None:
    first, fork, sound = json_of("ls", parted, "--lenient", code=5)["sessions"]
    assert first["heads"] == {"main": None} and first["nodes"] == 1
    assert fork.keys() == {"id", "error"} and sound["heads"]["main"]
    lines = text_of("ls", parted, "--lenient", code=5).splitlines()
    assert [line.split()[0] for line in lines] == ["first", "fork", "sound", "✗"]
    assert "at nodes that are lost: main" in lines[0] and "cannot be read" in lines[1] and "✗" not in lines[2]
    assert json_of("tree", parted, "first", "--lenient", code=5)["lost_heads"] == ["main"]
    assert text_of("tree", parted, "first", "--lenient", code=5).splitlines()[-1] == "✗ at nodes of which nothing is left: main"
    assert run("show", parted, "first/root", "--lenient").exit_code == 0
    for command in ("show", "log"):
        assert run(command, parted, "first/main", "--lenient").exit_code == 5


def test_what_cannot_be_read_stands_in_nobodys_way(parted: Path, tmp_path: Path) -> None:
    answer = json_of("replay", parted, "--lenient", code=5)
    assert [step["key"] for step in answer["steps"]] == ["sound"] and "session 'fork'" in answer["error"]["message"]
    with SessionStore.open(parted, read_only=True, strict=False) as store:
        with pytest.raises(CorruptTree, match="session 'fork' goes on from what cannot be read: node 2 of session 'first'"):
            store.get("fork")
        with pytest.raises(CorruptTree, match="session 'fork'"):
            list(replay(store))
        report = export_bundle(store, tmp_path / "some.bundle")
        assert (report.sessions, report.left_out, report.nodes, report.heads) == (("first", "sound"), ("fork",), 3, 1)
        with pytest.raises(CorruptTree, match="session 'fork'"):
            export_bundle(store, tmp_path / "none.bundle", ["fork"])
    report = json_of("export", parted, tmp_path / "other.bundle", "--lenient", code=5)
    assert report["left_out"] == ["fork"]
    assert "cannot be read: fork" in text_of("export", parted, tmp_path / "third.bundle", "--lenient", code=5)
    with open_bundle(tmp_path / "other.bundle") as bundle:
        assert bundle.sessions() == ("first", "sound")


def test_errors_name_the_node_and_the_session_and_what_to_do(parted: Path, tmp_path: Path) -> None:
    with SessionStore.open(parted, read_only=True) as store:
        with pytest.raises(CorruptTree, match=r"node 2 \([0-9a-f]{8}\) of session 'first' is damaged: segment 1") as raised:
            _ = store.get("first").head("main").node
        assert (raised.value.session, raised.value.segment) == (0, 1) and raised.value.offset > 0
    arguments: dict[str, list[object]] = {
        "tree": ["fork"],
        "show": ["first"],
        "log": ["first"],
        "diff": ["first", "sound"],
        "export": [tmp_path / "x"],
    }
    for command in LOOKING:
        result = run(command, parted, *arguments.get(command, []))
        assert result.exit_code == 5 and "of session 'first' is damaged" in result.stderr, command
        assert f"sessiontree fsck {parted}" in result.stderr and "--lenient" in result.stderr, command
    result = run("gc", parted)
    assert result.exit_code == 5 and "sessiontree fsck" in result.stderr and "--lenient" not in result.stderr
    assert "node 2" in result.stderr and "session 'first'" in result.stderr


def test_a_format_that_is_damaged_says_what_to_do(parted: Path) -> None:
    data = (parted / "FORMAT").read_bytes()
    for at in range(len(data)):
        (parted / "FORMAT").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        result = run("ls", parted)
        assert result.exit_code in (5, 6) and f"sessiontree fsck {parted}" in result.stderr, at
        assert run("fsck", parted).exit_code == 1


def test_damaged_features_are_told_of_where_they_are_wanted(tmp_path: Path) -> None:
    path, new = tmp_path / "store", tmp_path / "new"
    with SessionStore.open(path) as store:
        session = conversation(store)
        item = session.head("main").node.media_spans()[0][0]
        question = session.head("first").node.parent
        assert question is not None
        store.put_features(item, {"pixels": np.arange(40, dtype=np.float32)})
    (features,) = [file for file in (path / "blobs").rglob("*") if file.is_file()]
    data = features.read_bytes()
    features.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    answer = json_of("replay", path, code=1)
    assert all("features of" in step["problem"] and "damaged" in step["problem"] for step in answer["steps"])
    assert "cannot be run again" in text_of("replay", path, code=1)
    (damage,) = json_of("fsck", path, code=1)["damaged"]
    assert damage["named_by"] == [question.id.hex()] and not damage["dependents"] and not damage["harmless"]
    assert f"features of 1 node: {question.id.hex()[:8]}" in text_of("fsck", path, code=1)
    saved = json_of("fsck", path, "--salvage", new, code=1)["salvage"]
    assert saved["lost_features"] == [damage["path"]] and saved["lost_nodes"] == [] and saved["features"] == 0
    assert json_of("fsck", new)["ok"]


def test_a_verdict_says_how_bad_it_is(parted: Path) -> None:
    (segment,) = (parted / "segments").glob("*.seg")
    assert text_of("fsck", parted, code=1).splitlines()[0] == "DAMAGED"
    data = bytearray(segment.read_bytes())
    data[data.index(b"he last") - 1] ^= 1  # as it was
    segment.write_bytes(data)
    assert text_of("fsck", parted).splitlines()[0] == "nothing is damaged"
    (index,) = (parted / "segments").glob("*.idx")
    whole = index.read_bytes()
    index.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "an index is damaged" in text_of("fsck", parted).splitlines()[0]
    index.write_bytes(whole)
    data[0] ^= 1
    segment.write_bytes(data)
    lines = text_of("fsck", parted, code=1).splitlines()
    assert lines[0] == "DAMAGED; nothing is lost: all records can be read" and "nothing is lost by it" in "".join(lines)


def test_errors_in_what_was_asked_are_json_too(parted: Path) -> None:
    for arguments in (["ls", parted, "--bogus"], ["bogus"], ["tree"], ["tree", parted, "--depth", "x"]):
        assert json_of(*arguments, code=2)["error"]["type"] == "Usage"
        assert run(*arguments).stdout == ""


def test_a_closed_stdout_is_an_error_in_words(parted: Path) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m sessiontree ls {shlex.quote(str(parted))} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 7 and done.stderr.count("\n") == 1 and "stdout is closed" in done.stderr


@pytest.mark.parametrize("sidecar", [True, False])
def test_a_tree_never_hides_that_something_is_missing(sidecar: bool, tmp_path: Path) -> None:
    """A damaged leaf as well as a damaged node with others below it; damage that loses nothing is no reason for a code."""
    with SessionStore.open(tmp_path / "store", durability="commit") as store:
        session = store.create("chat", scheme="text@hf5")
        question = session.append(session.root, [1] * 30)
        for key in ("inner", "leaf"):
            node = generate(session, question, 2, key=key)
            generate(session, node, 3) if key == "inner" else None
    (segment,) = (tmp_path / "store" / "segments").glob("*.seg")
    whole = segment.read_bytes()
    if not sidecar:
        segment.with_suffix(".idx").unlink()
    for what in (b"inner", b"leaf"):
        flip(tmp_path / "store", what)
        for options in ([], ["--lenient"]) if sidecar else (["--lenient"],):
            assert "✗" in text_of("tree", tmp_path / "store", *options, code=5)
            assert json_of("tree", tmp_path / "store", *options, code=5)
        segment.write_bytes(whole)
    data = bytearray(whole)
    data[0] ^= 1  # the header of a frame
    segment.write_bytes(data)
    assert "✗" not in text_of("tree", tmp_path / "store", "--lenient")
