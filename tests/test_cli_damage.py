"""The commands that look, beside damage: what can be read is shown, what cannot is named, and what to do next is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sessiontree import CorruptTree, SessionStore, replay
from sessiontree.bundles import export_bundle, open_bundle
from tests.command_line import flip, generate, json_of, run, text_of

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
    assert first["heads"] == {"main": None} and first["nodes"] == 2
    assert fork.keys() == {"id", "error"} and sound["heads"]["main"]
    lines = text_of("ls", parted, "--lenient", code=5).splitlines()
    assert [line.split()[0] for line in lines] == ["first", "fork", "sound"]
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
