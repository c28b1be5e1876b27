"""What the viewer is given, and how its server answers; what a browser makes of it is in test_viewer_browser.py."""

from __future__ import annotations

import http.client
import json
import re
import struct
import threading
import zlib
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sessiontree import MediaItem, SessionStore, UnknownNode
from sessiontree.annotations import Ragged, Spans, TokenValues
from sessiontree.bundles import export_bundle
from sessiontree.cli import viewed
from sessiontree.cli.viewed import Viewed
from sessiontree.cli.viewing import Live
from sessiontree.features import FeatureArray
from sessiontree.viewer.packing import Arrays
from sessiontree.viewer.page import page, policy
from sessiontree.viewer.pictures import MAX_SIDE, thumbnail
from sessiontree.viewer.server import Server
from tests.command_line import conversation, flip, generate, json_of, run, text_of


def taken_apart(data: bytes) -> dict[str, Any]:
    """What packing made: its facts, and ``read``, its arrays, as the page's data.js does it."""
    raw = zlib.decompress(data)
    size = int.from_bytes(raw[:4], "little")
    facts: dict[str, Any] = json.loads(raw[4 : 4 + size])
    at, arrays = 4 + size, []
    for kind, count in facts["arrays"]:
        width = np.dtype(kind).itemsize
        planes = np.frombuffer(raw, np.uint8, count * width, at).reshape(width, count)
        arrays.append(np.ascontiguousarray(planes.T).view(f"<{kind}")[:, 0] if count else np.empty(0, kind))
        at += count * width
    assert at == len(raw)
    return facts | {"read": arrays}


def blocks_of(path: Path) -> dict[str, dict[str, Any]]:
    """The blocks of a file."""
    found = re.findall(
        r'<script type="application/octet-stream" id="block-([a-z0-9-]+)">([A-Za-z0-9+/=]*)</script>', path.read_text()
    )
    return {name: taken_apart(b64decode(data)) for name, data in found}


# --- packing and pictures ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values",
    [
        np.array([0, 1, 151_655, 2**31 - 1], np.int32),
        np.array([-(2**63), 2**63 - 1]),
        np.array([5, -6]),  # small ones of a large type
        np.array([2**64 - 1], np.uint64),
        np.array([0.1, np.nan, -np.inf], np.float32),
        np.array([0.1], np.float64),
        np.array([0.5, -2.0], np.float16),
        np.array([True, False]),
        np.array([-1, 300], np.int16),
        np.array([255, 0], np.uint8),
        np.array([[1, 2], [3, 4]]),
        np.empty(0, np.int32),
    ],
)
def test_arrays_come_out_as_they_went_in(values: NDArray[Any]) -> None:
    arrays = Arrays()
    assert [arrays.add(np.array([7])), arrays.add(values)] == [0, 1]
    facts = taken_apart(arrays.packed({"said": "é\ud800"}))
    assert facts["said"] == "é\ud800"
    assert np.array_equal(facts["read"][1], values.ravel(), equal_nan=values.dtype.kind == "f")


def item_of(grid: tuple[int, int, int] | None = None) -> MediaItem:
    return MediaItem("image", bytes(32), spans=[(0, 1)], grid_thw=grid)


def kept(values: NDArray[Any], name: str | None = None) -> dict[str, FeatureArray]:
    return {"x": FeatureArray(name or values.dtype.name, values.dtype, values.shape, values.tobytes())}


def pixels(png: bytes) -> NDArray[np.uint8]:
    """A PNG of 8-bit colours without filters, which is what thumbnails are, each chunk's checksum compared."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", (0, 0)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(png[at + 8 + length : at + 12 + length], "big")
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(size[1], 1 + 3 * size[0])
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(size[1], size[0], 3)


def test_a_thumbnail_of_an_image_is_that_image() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8)
    for shape in (colours, np.moveaxis(colours, -1, 0), colours[None], (colours / 255).astype(np.float32)):
        found = thumbnail(item_of(), kept(shape), 2)
        assert found is not None and (found.width, found.height) == (30, 20)
        assert np.array_equal(pixels(found.png), colours)


def test_a_large_image_gets_small_by_means() -> None:
    colours = np.zeros((640, 320, 3), np.uint8)
    colours[::2] = 100
    found = thumbnail(item_of(), kept(colours), 2)
    assert found is not None and (found.width, found.height) == (MAX_SIDE // 2, MAX_SIDE)
    assert np.array_equal(np.unique(pixels(found.png)), [50])


def test_a_thumbnail_of_patches_is_what_the_processor_was_given() -> None:
    """Against the processor of transformers, which shifts, scales and cuts."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    colours = np.zeros((56, 84, 3), np.uint8)
    colours[..., 0] = np.arange(56)[:, None] * 4
    colours[..., 1] = np.arange(84) * 3
    given = Qwen2VLImageProcessorPil(merge_size=2)(images=[Image.fromarray(colours)], return_tensors="np")
    grid = tuple(int(each) for each in given["image_grid_thw"][0])
    found = thumbnail(item_of(grid), kept(given["pixel_values"].astype(np.float32)), 2)  # type: ignore[arg-type]
    assert found is not None
    assert np.array_equal(pixels(found.png), colours)


def test_what_an_encoder_made_is_shown_by_its_norms() -> None:
    values = np.zeros((6, 16), np.float32)
    values[4] = 1
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, kept as its bits
    for features in (kept(values), kept(bits, "bfloat16")):
        found = thumbnail(item_of((1, 4, 6)), features, 2)
        assert found is not None
        shown = pixels(found.png)
        bright = shown[shown.shape[0] // 2 :, shown.shape[1] // 3 : 2 * shown.shape[1] // 3]
        assert (bright == 255).all() and np.count_nonzero(shown) == bright.size


def test_what_is_no_picture_has_none() -> None:
    for values in (np.zeros(5, np.float32), np.zeros((7, 3), np.float32), np.zeros((0, 3), np.float32), np.full((9, 9), np.nan)):
        assert thumbnail(item_of((1, 4, 4)), kept(values), 2) is None
    nothing = thumbnail(item_of(), kept(np.full((9, 9, 3), np.nan, np.float32)), 2)
    assert nothing is not None and not pixels(nothing.png).any()


# --- what a file holds ------------------------------------------------------------------------------------------------
@pytest.fixture
def chats(tmp_path: Path) -> Path:
    with SessionStore.open(tmp_path / "chats") as store:
        session = conversation(store)
        asked = next(iter(session.tree.leaves())).path()[1]
        store.put_features(asked.media[0], np.zeros((20, 20, 3), np.uint8))
        session.annotate(asked, {"score": 0.5, "logprobs": TokenValues(np.arange(3, dtype=np.float32), start=1)})
        session.annotate(asked, {"spans": Spans([(0, 2, "a")]), "lists": Ragged.of([[1, 2], [3]])})
        session.pin(asked)
    return tmp_path / "chats"


def test_view_writes_all_that_show_says(chats: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    said = text_of("view", chats, "-o", file)
    assert said == f"{file}  {file.stat().st_size:,} bytes, 5 nodes\n"
    blocks = blocks_of(file)
    tree, chunk = blocks["tree"], blocks["chunk-0"]
    assert tree["parents"] == [-1, 0, 1, 1, 3, 4] and tree["heads"] == [["first", 2, False], ["main", 5, False]]
    assert tree["pins"] == [1] and tree["lost"] == 0 and tree["generated"] == "001101"
    assert [tree["names"][at] for at in tree["roles"]] == [None, "user", "assistant", "assistant", "tool", "assistant"]
    for at, node in enumerate(chunk["nodes"]):
        shown = json_of("show", chats, tree["ids"][8 * at : 8 * at + 8])
        assert node["id"] == shown["id"] and tree["sizes"][at] == shown["stop"] - shown["start"]
        assert chunk["read"][node["token_ids"]].tolist() == shown["token_ids"]
        for name in ("key", "finish_reason", "metadata", "links", "tail_policy"):
            assert node[name] == shown[name]
        for mode in ("as_decoded", "as_replayed"):
            assert node[mode] == [shown["positions"][mode][name] for name in ("next_position", "mrope_position_delta")]
        assert [{name: each[name] for name in each if name != "content"} for each in node["media"]] == shown["media"]
        assert [{name: each[name] for name in each if name != "values"} for each in node["annotations"]] == shown["annotations"]
    (logprobs,) = (each for each in chunk["nodes"][1]["annotations"] if each["name"] == "logprobs")
    assert chunk["read"][logprobs["values"][0]].tolist() == [0, 1, 2]
    columns = {each["name"]: (each["ordinals"], each["values"]) for each in tree["annotations"]}
    assert columns == {
        "score": ([1], [0.5]),
        "logprobs (mean)": ([1], [1.0]),
        "spans (first)": ([1], ["a"]),
        "lists (mean length)": ([1], [1.5]),
    }
    (picture,) = (block for name, block in blocks.items() if name.startswith("picture-"))
    assert (picture["width"], picture["height"]) == (20, 20)


@pytest.mark.parametrize("tokenizer", [[], ["--tokenizer", "qwen"]])
def test_what_was_imported_as_words_shows_them(tmp_path: Path, tokenizer: list[str]) -> None:
    """Also where a tokenizer is given, which tells nothing of nodes without tokens; and calls, where nothing was said."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "said.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    chats = str(tmp_path / "chats")
    assert run("import", chats, str(tmp_path / "said.jsonl"), "--format", "openai").exit_code == 0
    assert run("view", chats, *tokenizer, "-o", str(tmp_path / "page.html")).exit_code == 0
    blocks = blocks_of(tmp_path / "page.html")
    texts = [node.get("text") for block in blocks.values() for node in block.get("nodes", ()) if isinstance(node, dict)]
    assert texts.count("Where is it?") == 1 and texts.count('look({"at": 1})') == 1


def test_view_takes_what_the_other_commands_take(chats: Path, tmp_path: Path, postgres_url: str) -> None:
    from sessiontree.copying import copy_sessions

    with SessionStore.open(chats, read_only=True) as store:
        export_bundle(store, tmp_path / "chats.bundle", features=True)
        with SessionStore.connect(postgres_url) as shared:
            assert copy_sessions(store, shared).ok
    found = []
    for number, place in enumerate((chats, tmp_path / "chats.bundle", postgres_url)):
        file = tmp_path / f"{number}.html"
        assert json_of("view", place, "chat", "-o", file)["nodes"] == 5
        blocks = blocks_of(file)
        assert [each["features"] for each in blocks["chunk-0"]["nodes"][1]["media"]] == [True]
        arrays = {name: [each.tolist() for each in block.pop("read")] for name, block in blocks.items()}
        del blocks["tree"]["mark"], blocks["tree"]["epoch"]
        found.append((blocks, arrays))
    assert found[0] == found[1] == found[2]


def test_a_file_that_is_there_stays(chats: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("mine")
    result = run("view", chats, "-o", file)
    assert result.exit_code == 2 and "--force" in result.stderr and file.read_text() == "mine"
    text_of("view", chats, "-o", file, "--force")
    assert "block-tree" in file.read_text()


def test_a_file_that_cannot_be_written_leaves_nothing(chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("view", chats, "-o", tmp_path / "nowhere" / "page.html").exit_code == 7

    def broken(self: Viewed, number: int) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Viewed, "chunk", broken)
    assert run("view", chats, "-o", tmp_path / "page.html").exit_code == 7
    assert [each.name for each in tmp_path.iterdir()] == ["chats"]


def test_a_session_names_its_file_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"../../etc/x": "_.._etc_x.html", "-rf": "rf.html", "a b/<c>": "a_b__c_.html", "...": "session.html"}
    with SessionStore.open(tmp_path / "chats") as store:
        for name in names:
            store.create(name, scheme="text@hf5")
    for name, file in names.items():
        assert text_of("view", tmp_path / "chats", "--", name).startswith(f"{file}  ")
        assert (tmp_path / file).exists()


def test_whole_numbers_that_javascript_would_round_are_text(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "chats") as store:
        session = store.create("chat", scheme="text@hf5")
        session.append(session.root, [1], metadata={"n": 2**60 + 1, "few": [2**53, 2**53 + 1], "nan": float("nan")})
        session.annotate(session.leaves()[0], {"score": 2**60 + 1})
    text_of("view", tmp_path / "chats", "-o", tmp_path / "page.html")
    blocks = blocks_of(tmp_path / "page.html")
    node = blocks["chunk-0"]["nodes"][1]
    assert node["metadata"]["n"] == {"$int": str(2**60 + 1)} and node["metadata"]["few"] == [2**53, {"$int": str(2**53 + 1)}]
    assert node["metadata"]["nan"] == {"$float": "nan"}
    assert {each["name"]: each["values"] for each in blocks["tree"]["metadata"]} == {"n": [str(2**60 + 1)], "nan": ["nan"]}
    assert blocks["tree"]["annotations"][0]["values"] == [str(2**60 + 1)]


def test_the_oldest_are_left_out_of_a_file_that_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewed, "CHUNK", 4)
    with SessionStore.open(tmp_path / "chats", durability="relaxed") as store:
        session = store.create("chat", scheme="text@hf5")
        node = session.root
        rng = np.random.default_rng(1)
        for _ in range(31):
            node = session.append(node, rng.integers(0, 150_000, 40_000))
    size = json_of("view", tmp_path / "chats", "-o", tmp_path / "page.html", "--max-mb", 2)["bytes"]
    assert size <= 2_000_000
    blocks = blocks_of(tmp_path / "page.html")
    chunks = sorted(int(name.partition("-")[2]) for name in blocks if name.startswith("chunk"))
    assert len(blocks["tree"]["parents"]) == 32 and chunks == list(range(8 - len(chunks), 8)) and 1 <= len(chunks) < 8


def test_a_damaged_node_says_why_and_the_rest_is_there(chats: Path, tmp_path: Path) -> None:
    flip(chats, b"other")
    for options, file, unread, lost in (((), "strict", [3, 4, 5], 0), (("--lenient",), "lenient", [4, 5], 2)):
        result = run("view", chats, "-o", tmp_path / file, *options)
        assert result.exit_code == 5 and result.stdout, result.output
        blocks = blocks_of(tmp_path / file)
        tree, nodes = blocks["tree"], blocks["chunk-0"]["nodes"]
        errors = dict(tree["errors"])
        assert sorted(errors) == unread and tree["lost"] == lost  # what is known to be damaged has no place in the tree
        assert all(nodes[at] == {"error": errors[at]} for at in unread)
        assert tree["sizes"] == [0, 9, 2, 0, 0, 0] and nodes[2]["key"] == "first"


# --- the page ---------------------------------------------------------------------------------------------------------
def test_a_page_names_nothing_that_lies_elsewhere() -> None:
    text = "".join(page())
    assert "http:" not in text and "https:" not in text and " src=" not in text and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and "connect-src 'none'" in text and "unsafe" not in policy(live=True)
    assert policy(live=False) in text


# --- following --------------------------------------------------------------------------------------------------------
def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "chats", durability="commit") as writer:
        session = writer.create("chat", scheme="text@hf5")
        node = session.append(session.root, [1, 2])
        with SessionStore.open(tmp_path / "chats", read_only=True) as follower:
            live = Live(follower, None, None)

            def told(known: str) -> dict[str, Any] | None:
                data = live.tree("chat", known)
                return None if data is None else taken_apart(data)

            first = told("")
            assert first is not None and first["first"] == 0 and first["parents"] == [-1, 0]
            assert told(first["mark"]) is None
            session.set_head("main", node)
            second = told(first["mark"])
            assert (
                second is not None and second["first"] == 2 and second["parents"] == [] and second["heads"] == [["main", 1, False]]
            )
            session.annotate(node, {"score": 1})
            third = told(second["mark"])
            assert third is not None and third["annotations"][0]["values"] == [1] and third["said"] != second["said"]
            late = generate(session, node, 5, key="late")
            fourth = told(third["mark"])
            assert fourth is not None and (fourth["first"], fourth["parents"], fourth["sizes"]) == (2, [1], [1])
            assert taken_apart(live.chunk("chat", 0))["nodes"][2]["key"] == "late"
            session.drop(late)
            fifth = told(fourth["mark"])
            assert fifth is not None and fifth["first"] == 0 and fifth["epoch"] != fourth["epoch"]
            assert told(fifth["mark"]) is None
            assert [each["id"] for each in live.sessions()] == ["chat"]
            with pytest.raises(UnknownNode):
                live.chunk("chat", 1)


def test_what_is_said_of_nodes_is_followed(tmp_path: Path) -> None:
    """Said anew of the same tokens too; and of the path that a fork shares."""
    with SessionStore.open(tmp_path / "chats", durability="commit") as writer:
        session = writer.create("chat", scheme="text@hf5")
        node = session.append(session.root, [1, 2])
        fork = writer.fork(session, node, "fork")
        fork.append(node, [3])
        with SessionStore.open(tmp_path / "chats", read_only=True) as follower:
            live = Live(follower, None, None)

            def values(session_id: str, known: str | None) -> tuple[list[Any], list[Any], str | None]:
                data = live.tree(session_id, known or "")
                facts = taken_apart(live.tree(session_id, "") or b"")
                columns = [each["values"] for each in facts["annotations"]]
                chunk = taken_apart(live.chunk(session_id, 0))
                arrays = [chunk["read"][at].tolist() for each in chunk["nodes"][1]["annotations"] for at in each["values"]]
                return columns, arrays, None if data is None else facts["mark"]

            marks: dict[str, str | None] = {}
            for value in (1.0, 3.0, 3.0, 2.0):
                changed = value != 3.0 or marks.get("value") != "3.0"
                session.annotate(node, {"logprobs": np.full(2, value)})
                for name in ("chat", "fork"):
                    columns, arrays, mark = values(name, marks.get(name))
                    assert columns == [[value]] and arrays == [[value, value]]
                    assert (mark is not None) == changed
                    marks[name] = mark or marks[name]
                marks["value"] = str(value)


def test_a_server_of_many_writers_is_followed(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as writer, SessionStore.connect(postgres_url, read_only=True) as follower:
        session = writer.create("chat", scheme="text@hf5")
        node = session.append(session.root, [1, 2], annotations={"score": 1})
        live = Live(follower, None, None)
        first = taken_apart(live.tree("chat", "") or b"")
        assert first["parents"] == [-1, 0] and first["annotations"][0]["values"] == [1]
        assert live.tree("chat", first["mark"]) is None
        session.annotate(node, {"score": 2})
        generate(session, node, 3, key="reply")
        second = taken_apart(live.tree("chat", first["mark"]) or b"")
        assert (second["first"], second["parents"], second["annotations"][0]["values"]) == (2, [1], [2])
        assert taken_apart(live.chunk("chat", 0))["nodes"][2]["key"] == "reply"


# --- the server -------------------------------------------------------------------------------------------------------
@contextmanager
def served(store: SessionStore) -> Iterator[Server]:
    with Server(Live(store, None, None), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(chats: Path) -> Iterator[Server]:
    with SessionStore.open(chats, read_only=True) as store, served(store) as found:
        yield found


def asked(server: Server, path: str, method: str = "GET", host: str | None = None) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_the_server_answers_what_the_page_asks(server: Server) -> None:
    answer, body = asked(server, "/")
    assert answer.status == 200 and b'data-mode="live"' in body and b"block-tree" not in body
    assert json.loads(asked(server, "/sessions")[1]) == [{"id": "chat-1", "first": False}]
    tree = taken_apart(asked(server, "/tree?session=chat-1&known=")[1])
    assert len(tree["parents"]) == 6
    assert asked(server, f"/tree?session=chat-1&known={tree['mark']}")[0].status == 204
    (item,) = taken_apart(asked(server, "/chunk?session=chat-1&number=0")[1])["nodes"][1]["media"]
    assert taken_apart(asked(server, f"/picture?session=chat-1&name={item['content']}")[1])["width"] == 20
    assert "png" not in taken_apart(asked(server, "/picture?session=chat-1&name=other")[1])
    answer, body = asked(server, "/sessions", "HEAD")
    assert answer.status == 200 and body == b"" and int(answer.headers["Content-Length"]) > 0


@pytest.mark.parametrize("path", ["/", "/sessions", "/tree?session=none", "/nowhere"])
def test_every_answer_is_guarded(server: Server, path: str) -> None:
    headers = asked(server, path)[0].headers
    assert (
        "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        and "default-src 'none'" in headers["Content-Security-Policy"]
    )
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers


def test_other_hosts_and_methods_are_refused(server: Server) -> None:
    for host in (
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "[::1",
        "a:b:c",
        "",
    ):
        answer, body = asked(server, "/sessions", host=host)
        assert answer.status == 421 and b"chat-1" not in body
    for host in (f"localhost:{server.port}", "LOCALHOST:9000", f"[::1]:{server.port}", "[::1]", "127.0.0.1", "10.0.0.7:80"):
        assert asked(server, "/sessions", host=host)[0].status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, "/sessions", method)[0].status == 501


def test_what_is_asked_wrongly_is_said(server: Server) -> None:
    for path, status in (
        ("/tree", 400),
        ("/chunk?session=chat-1", 400),
        ("/chunk?session=chat-1&number=x", 400),
        ("/chunk?session=chat-1&number=7", 409),
        ("/chunk?session=chat-1&number=-1", 409),
        ("/tree?session=none", 409),
        ("/tree?session=chat-1&known=x.y.z", 200),
        ("/../etc/passwd", 404),
        ("/view.css", 404),
    ):
        assert asked(server, path)[0].status == status, path


def test_serve_says_where_and_ends_with_the_keyboard(chats: Path) -> None:
    import os
    import signal
    import subprocess
    import sys
    import urllib.request

    from tests.command_line import environment

    command = [sys.executable, "-m", "sessiontree", "serve", str(chats), "--port", "0", "--json"]
    with (
        SessionStore.open(chats),  # whoever writes is not in its way
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}sessions", timeout=30) as answer:
            assert json.load(answer) == [{"id": "chat-1", "first": False}]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == ""


def test_a_port_that_is_taken_is_named(server: Server, chats: Path) -> None:
    result = run("serve", chats, "--port", server.port)
    assert result.exit_code == 7 and str(server.port) in result.stderr
