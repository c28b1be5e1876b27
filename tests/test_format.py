"""The format: stores that its first version wrote are read for good, also by a reader that has nothing but docs/format.md."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any
from unittest.mock import patch

import msgpack
import numpy as np
import pytest

from sessiontree import CorruptTree, IncompatibleStore, SessionStore, Unsupported, codec
from sessiontree.backends import blobs, bundle_file, frames, segment_log
from sessiontree.backends.bundle_file import zstandard
from sessiontree.backends.system import System
from sessiontree.bundle_contents import FEATURES
from sessiontree.digest import FORMAT
from sessiontree.fsck import fsck
from sessiontree.positions import known_schemes, runs, scheme
from tests.command_line import ROOT, json_of
from tests.golden.stores import make

PAGE = (ROOT / "docs" / "format.md").read_text()
READER = ROOT / "examples" / "read_store.py"
V1 = ROOT / "tests" / "golden" / "stores" / "v1"
EXPECTED: dict[str, Any] = json.loads((V1 / "expected.json").read_text())
NAMES = tuple(EXPECTED)
STORES = tuple(name for name in NAMES if (V1 / name).is_dir())


def copied(name: str, to: Path) -> Path:
    """A golden store elsewhere, so that nothing that is done to it reaches the one here."""
    to.mkdir(exist_ok=True)
    source = V1 / name
    return Path(shutil.copytree(source, to / name) if source.is_dir() else shutil.copy(source, to / name))


@pytest.fixture(scope="module")
def reader() -> Any:
    """The independent reader, in this process."""
    spec = importlib.util.spec_from_file_location("read_store", READER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(reader: Any, path: Path) -> Any:
    """What it prints. Raises SystemExit."""
    found: list[Any] = []
    torn = reader.read(path, found)
    return json.loads(json.dumps({"torn": torn, "sessions": [*reader.contents(found)]}, default=bytes.hex))


# --- what is there is read -----------------------------------------------------------------------------------------------------
def test_the_golden_stores_are_all_there_is() -> None:
    assert set(NAMES) == set(make.ALL) == {path.name for path in V1.iterdir()} - {"expected.json"}
    assert sum(path.stat().st_size for path in V1.rglob("*") if path.is_file()) < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_them(name: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    with make.open_golden(path) as store:
        torn = EXPECTED[name]["read"]["torn"]
        assert json.loads(json.dumps(make.what_a_reader_prints(store, torn))) == EXPECTED[name]["read"]
        assert json.loads(json.dumps(make.facts(store))) == EXPECTED[name]["facts"]
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            assert file.read_bytes() == (V1 / file.relative_to(tmp_path)).read_bytes(), "who reads writes nothing"


@pytest.mark.parametrize("name", STORES)
def test_they_are_sound_and_can_be_written_to(name: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    assert fsck(path).ok
    with SessionStore.open(path) as store:
        assert store.recovered_bytes == EXPECTED[name]["read"]["torn"]
        session = store.get(store.sessions()[0])
        node = session.append(session.root, [77])
    with SessionStore.open(path, read_only=True) as store:
        assert store.get(session.id).node(node.id).token_ids.tolist() == [77]


@pytest.mark.parametrize("name", NAMES)
def test_the_independent_reader_reads_them(name: str) -> None:
    done = subprocess.run([sys.executable, READER, V1 / name], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == EXPECTED[name]["read"]


@pytest.mark.parametrize("name", NAMES)
def test_its_digests_are_those_that_our_own_command_prints(name: str, tmp_path: Path) -> None:
    facts = json_of("copy", copied(name, tmp_path), tmp_path / "copy.bundle")
    assert {each["session_id"]: each["source"] for each in facts["sessions"]} == {
        each["id"]: each["digest"] for each in EXPECTED[name]["read"]["sessions"]
    }


def test_the_independent_reader_is_short_and_independent() -> None:
    source = READER.read_text()
    assert len(source.splitlines()) <= 150
    names = set()
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.ImportFrom):
            names.add(str(each.module).partition(".")[0])
        elif isinstance(each, ast.Call) and getattr(each.func, "id", "") == "import_module":
            names |= {str(argument.value) for argument in each.args if isinstance(argument, ast.Constant)}
    assert names - sys.stdlib_module_names == {"msgpack", "zstandard"}


def test_what_they_hold_covers_the_format() -> None:
    kinds, ran = set(), set()
    for name in NAMES:
        for record in records(V1 / name):
            kinds.add(record[1])
            if record[1] == codec.NODE:
                _, _, _, _, laid, _, replayed, _, _ = msgpack.unpackb(record[61:])
                for each in (laid, *(replayed or ())[:1]):
                    ran |= {0} if isinstance(each, int) else {run[0] for run in msgpack.unpackb(each)}
    assert kinds == {*range(codec.SESSION, codec.ANNOTATION + 1), FEATURES}
    assert ran == set(range(len(runs._KINDS)))


def records(path: Path) -> Iterator[bytes]:
    """Every record of a golden store or bundle, as our own code finds them."""

    def prefix(record: bytes) -> bytes:
        return bytes(frames.PREFIX_SIZE)

    log: Any
    if path.is_dir():
        log = segment_log.SegmentLog.open(path, read_only=True, entry_of=prefix)
    else:
        log = bundle_file.BundleFile(System(), str(path), prefix, 2**24)
    try:
        yield from log.read_all(log.entries())
    finally:
        log.close()


# --- what is written today -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_the_same_operations_write_the_same_bytes(name: str, tmp_path: Path) -> None:
    """But for a store's name, which is drawn, and for what a release of zstd makes of a stream."""
    path, golden = tmp_path / name, V1 / name
    identity = (golden / "FORMAT").read_bytes().split()[3] if golden.is_dir() else b""
    with patch.object(segment_log, "new_identity", lambda: identity):
        make.ALL[name](path)
    if golden.is_file():
        assert expanded(path) == expanded(golden)
        return
    made, there = (
        {each.relative_to(top): each.read_bytes() for each in top.rglob("*") if each.is_file()} for top in (path, golden)
    )
    assert made.keys() == there.keys()
    for file, data in there.items():
        assert made[file] == data, file


def expanded(path: Path) -> tuple[bytes, bytes]:
    """The store's name in a bundle's line, and its frames."""
    line, _, data = path.read_bytes().partition(b"\n")
    if b" zstd " in line:
        data = zstandard().ZstdDecompressor().decompressobj().decompress(data)
    return line.split()[3], data


# --- what is damaged is refused --------------------------------------------------------------------------------------------------
def refusal(reader: Any, path: Path) -> str:
    with pytest.raises(SystemExit) as caught:
        printed(reader, path)
    message = caught.value.code
    assert isinstance(message, str)
    assert re.search(r", offset \d+: ", message) is not None
    return message


@pytest.mark.parametrize("name", [name for name in NAMES if name != "killed"])
def test_the_independent_reader_refuses_whatever_is_changed_or_cut(reader: Any, name: str, tmp_path: Path) -> None:
    path = copied(name, tmp_path)
    judged = [path] if path.is_file() else [path / "FORMAT", *path.glob("BASE"), *path.glob("segments/*.seg")]
    for file in judged:
        data = file.read_bytes()
        for at in range(0, len(data), 1 + len(data) // 160):
            file.write_bytes(data[:at] + bytes((data[at] ^ 1 << at % 8,)) + data[at + 1 :])
            assert str(file) in refusal(reader, path), at
            file.write_bytes(data[:at])
            assert str(file) in refusal(reader, path), at
        file.write_bytes(data)
    assert printed(reader, path) == EXPECTED[name]["read"]


def test_sidecars_are_believed_for_nothing_but_what_was_synced(reader: Any, tmp_path: Path) -> None:
    path = copied("text", tmp_path)
    (sidecar,) = path.glob("segments/*.idx")
    data = sidecar.read_bytes()
    for at in range(0, len(data), 7):
        sidecar.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        assert printed(reader, path) == EXPECTED["text"]["read"]
    sidecar.unlink()
    assert printed(reader, path) == EXPECTED["text"]["read"]


def test_a_frame_is_torn_or_damaged_as_the_page_says(reader: Any, tmp_path: Path) -> None:
    """Of the store of a killed writer: segment by segment, at every bit of a byte in each record."""
    path = copied("killed", tmp_path)
    *sealed, last = sorted(path.glob("segments/*.seg"))
    for file in sealed:
        data = file.read_bytes()
        for at in range(0, len(data), 13):
            file.write_bytes(data[:at] + bytes((data[at] ^ 2,)) + data[at + 1 :])
            assert str(file) in refusal(reader, path)
        file.write_bytes(data[:-1])
        assert str(file) in refusal(reader, path)
        file.unlink()
        assert f"{file}, offset 0: the segment is missing" in refusal(reader, path)
        file.write_bytes(data)
    data = last.read_bytes()
    end = data.rindex(frames.FRAME_MAGIC)
    begin = data.rindex(frames.FRAME_MAGIC, 0, end)
    for at in range(begin):  # a later frame says that this was synced
        last.write_bytes(data[:at] + bytes((data[at] ^ 2,)) + data[at + 1 :])
        assert f"{last}, offset " in refusal(reader, path)
    last.write_bytes(data[:end])
    assert printed(reader, path) == EXPECTED["killed"]["read"] | {"torn": 0}
    last.write_bytes(data[: end - 1])  # nothing says that the last one was
    assert printed(reader, path)["torn"] == end - 1 - begin
    with SessionStore.open(path) as store:
        assert store.recovered_bytes == end - 1 - begin


@pytest.mark.parametrize(("kind", "version", "error"), [(9, 2, IncompatibleStore), (4, 2, IncompatibleStore), (9, 1, CorruptTree)])
def test_records_of_a_later_version_keep_a_store_from_being_written_to(
    reader: Any, tmp_path: Path, kind: int, version: int, error: type[Exception]
) -> None:
    """They say so by their version; a kind that nobody knows, of the version there is, is no record."""
    path = copied("text", tmp_path)
    (segment,) = path.glob("segments/*.seg")
    whole = segment.read_bytes()
    keys = frames.Keys.of((path / "FORMAT").read_bytes().split()[3])
    known = frames.header_at(whole[-44:-4], keys, 1, len(whole) - 44)
    assert known is not None
    sound = codec.encode(codec.OpenedRecord(0, 99))
    later = [(sound[:1] + bytes((kind, version)) + sound[3:], b"")]
    frame = frames.build_frame(keys, frames.End(1, len(whole), known.sequence), known.sequence, 1, [later])
    segment.write_bytes(whole + b"".join(frame.parts))
    assert f"a record of kind {kind} and version {version}" in refusal(reader, path)
    if version > codec.FORMAT_VERSION:
        with SessionStore.open(path, read_only=True) as store:
            assert json.loads(json.dumps(make.what_a_reader_prints(store, 0))) == EXPECTED["text"]["read"]
            chat = store.get("chat")
            with pytest.raises(Unsupported):
                chat.append(chat.root, [1])
    with pytest.raises(error):
        SessionStore.open(path)


# --- the page and the code say the same ------------------------------------------------------------------------------------------
def rows(beginning: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    lines = PAGE[PAGE.index(f"\n| {beginning}") :].strip().splitlines()[2:]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[: next(n for n, each in enumerate(lines) if not each)]
    ]


def test_the_page_quotes_the_layouts_of_the_code() -> None:
    for layout, size in ((frames.HEADER, "40 bytes"), (frames._BLOCK, "64 bytes"), (frames.HEAD, "12 bytes")):
        assert f"`{layout.format}`, {size}" in PAGE
        assert size == f"{layout.size} bytes"
    codes = {"|u1": "B", "<u4": "I", "<u8": "Q", "|V32": "32s"}
    row = "<" + "".join(codes[frames.ENTRY[name].str] for name in frames.ENTRY.names or ())
    assert f"A row, `{row}`" in PAGE
    assert f"rows of {frames.ENTRY.itemsize} bytes" in PAGE
    assert codec._READ.size == 61 and "61 bytes" in PAGE
    for data in (frames.FRAME_MAGIC, frames._BLOCK_MAGIC):
        assert f"`{data.hex(' ')}`" in PAGE
    assert repr(blobs._MAGIC)[2:-1] in PAGE
    assert f"{codec.NONE}" in PAGE and codec.MAX_RECORD_BYTES == frames.MAX_RECORD and f"{frames.MAX_RECORD} bytes" in PAGE
    at = 0
    for cells, code in zip(
        rows("offset | bytes | |\n|---|---|---|\n| 0 | 4 "), re.findall(r"\d*[a-zA-Z]", frames.HEADER.format), strict=True
    ):
        assert (int(cells[0]), int(cells[1])) == (at, Struct(f"<{code}").size)
        at += int(cells[1])


def test_the_page_knows_the_kinds_of_records_and_runs() -> None:
    named = {int(cells[0]): cells[1] for cells in rows("kind | is")}
    assert named == {getattr(codec, name.upper()): name for name in named.values() if name != "features"} | {FEATURES: "features"}
    assert set(named) - {FEATURES} == set(codec._READERS)
    found = re.findall(r"\| (\d) (\w+Run) \|", PAGE)
    assert [(int(number), name) for number, name in found] == [(n, kind.__name__) for n, kind in enumerate(runs._KINDS)]


def test_the_page_knows_the_versions() -> None:
    versions = {cells[0]: int(cells[1]) for cells in rows("where | now")}
    assert list(versions.values()) == [frames.VERSION, codec.FORMAT_VERSION, bundle_file.VERSION, blobs._MAGIC[-2], FORMAT]


def test_the_page_knows_the_axes() -> None:
    """And which tables are handed out as float32."""
    assert "1 for `text`, for `hunyuan_vl` its parameter `num_axes`, else 3" in PAGE
    assert "int64; float32 for `qwen3_omni@hf5`" in PAGE
    for name in known_schemes():
        rule = scheme(name)
        axes = 1 if name.startswith("text@") else rule.params["num_axes"] if name.startswith("hunyuan_vl@") else 3
        assert rule.num_axes == axes
        assert rule.dtype == np.dtype(np.float32 if name == "qwen3_omni@hf5" else np.int64)


def test_features_lie_as_the_page_says() -> None:
    files = [path for path in (V1 / "media" / "blobs").rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        data = path.read_bytes()
        size = int.from_bytes(data[8:12], "little")
        described = msgpack.unpackb(data[12 : 12 + size])
        assert data[:8] == b"STBLOB\x01\n" and path.parent.name == path.name[:2]
        assert data[-32:] == sha256(path.name.encode() + data[:-32]).digest()
        assert len(data) == 12 + size + sum(each[4] for each in described) + 32
