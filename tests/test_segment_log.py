"""The segment log on a disk that fails, crashes and rots, and on the real one with processes that are killed."""

from __future__ import annotations

import contextlib
import dis
import errno
import functools
import gc
import hashlib
import os
import random
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import pytest

from sessiontree.backends import frames, scan, segment_log, system
from sessiontree.backends.base import Durability, WriteLost
from sessiontree.backends.segment_log import ENTRY, PREFIX_SIZE, SegmentLog
from sessiontree.backends.system import System
from sessiontree.errors import (
    CorruptTree,
    IncompatibleStore,
    LimitExceeded,
    StoreClosed,
    StoreFailed,
    StoreLocked,
)
from tests.disk import Disk, Fault, mutated

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
DURABILITIES: tuple[Durability, ...] = ("commit", "group", "relaxed")
ROOT = "/store"
Batch = list[tuple[bytes, bytes]]


def entry_of(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=PREFIX_SIZE).digest()


def batch_of(*records: bytes) -> Batch:
    return [(record, entry_of(record)) for record in records]


def some_batches(n: int, rng: random.Random, most: int = 3, size: int = 200) -> list[Batch]:
    return [
        batch_of(*[b"%d.%d " % (number, part) + rng.randbytes(rng.randrange(size)) for part in range(rng.randint(1, most))])
        for number in range(n)
    ]


def flat(batches: Sequence[Batch]) -> list[bytes]:
    return [record for batch in batches for record, _ in batch]


def opened(disk: System, **options: Any) -> SegmentLog:
    return SegmentLog.open(ROOT, entry_of=entry_of, system=disk, **options)


def records_of(log: SegmentLog) -> list[bytes]:
    return [log.read(entry) for entry in log.entries()]


def store(log: SegmentLog, batches: Sequence[Batch]) -> None:
    for batch in batches:
        log.wait(log.enqueue(batch))


def kill(log: SegmentLog) -> None:
    """End a log as a killed process does, but for the thread that it started."""
    log._closing.set()
    if log._thread is not None:
        log._thread.join()
    log._release()


def prefix_length(found: list[bytes], batches: Sequence[Batch]) -> int:
    """How many whole batches, in order, these records are."""
    left = list(found)
    for number, batch in enumerate(batches):
        if not left:
            return number
        records = flat([batch])
        assert left[: len(records)] == records, f"batch {number} is not whole, or another stands in its place"
        del left[: len(records)]
    assert not left
    return len(batches)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sidecar blocks of a few rows, zeros in small pieces. On a simulated disk the thread acts only when a test calls _tend."""
    monkeypatch.setattr(segment_log, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(segment_log, "_PAGE", 64)
    monkeypatch.setattr(segment_log, "_ZEROS", bytes(128))
    monkeypatch.setattr(segment_log, "_AHEAD", (150, 400))
    monkeypatch.setattr(segment_log, "_BREATH", 0)
    if "tmp_path" not in request.fixturenames:
        monkeypatch.setattr(segment_log, "_POLL", (1000.0, 1000.0))


# what it is for -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", DURABILITIES)
def test_what_was_stored_is_there_in_order(durability: Durability) -> None:
    rng = random.Random(1)
    batches = some_batches(50, rng)
    disk = Disk()
    log = opened(disk, durability=durability, segment_bytes=1000)
    numbers = [log.enqueue(batch) for batch in batches]
    assert numbers == list(range(1, 51)) and log.enqueued == 50 and log.enqueue([]) == 50
    log.flush()
    assert log.durable == 50 and records_of(log) == flat(batches)
    entries = log.entries()
    assert entries.dtype == ENTRY and not entries.flags.writeable
    assert [entry.tobytes()[:PREFIX_SIZE] for entry in entries] == [entry_of(record) for record in flat(batches)]
    assert log.read(3) == log.read(np.int64(3)) == flat(batches)[3]
    log.close()
    for without in (False, True):
        if without:
            for name in [name for name in disk.names if name.endswith(".idx")]:
                disk.unlink(name)
        for options in ({}, {"strict": False}, {"read_only": True}):
            log = opened(disk.copy(), segment_bytes=1000, **options)
            assert records_of(log) == flat(batches) and not log.damaged and not log.recovered_bytes
            np.testing.assert_array_equal(log.entries(), entries)
            log.close()


def test_large_and_empty_records_and_many_in_one_frame() -> None:
    rng = random.Random(2)
    sizes = [0, 1, 5120, 5121, 2**16, 2**16 + 1, 3 * 2**20, 0]
    batches = [batch_of(*[rng.randbytes(size) for size in sizes]), *some_batches(3000, rng, size=4)]
    disk = Disk()
    log = opened(disk)
    for batch in batches:
        log.enqueue(batch)
    log.flush()
    assert records_of(log) == flat(batches)
    kill(log)
    log = opened(disk)
    assert records_of(log) == flat(batches)
    log.close()


def test_enqueue_refuses_what_no_frame_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(Disk())
    with pytest.raises(ValueError, match="prefix of 3 bytes"):
        log.enqueue([(b"", b"abc")])
    monkeypatch.setattr(segment_log, "MAX_RECORD", 10)
    with pytest.raises(LimitExceeded):
        log.enqueue(batch_of(bytes(11)))
    monkeypatch.setattr(segment_log, "MAX_BATCH", 20)
    with pytest.raises(LimitExceeded):
        log.enqueue(batch_of(bytes(10), bytes(10)))
    with pytest.raises(ValueError, match="batch 1 of 0"):
        log.wait(1)
    log.close()


def test_enqueue_makes_no_system_call() -> None:
    disk = Disk()
    log = opened(disk, durability="group")
    before = len(disk.calls), len(disk.trace)
    for batch in some_batches(100, random.Random(3)):
        log.enqueue(batch)
    assert (len(disk.calls), len(disk.trace)) == before
    log.close()


def test_one_commit_is_one_write_and_one_sync() -> None:
    disk = Disk()
    log = opened(disk)
    store(log, some_batches(1, random.Random(4)))
    disk.calls.clear()
    for batch in some_batches(200, random.Random(4)):
        log.enqueue(batch)
    log.flush()
    assert disk.calls == ["pwrite", "fdatasync"]
    log.close()


def test_a_closed_log_takes_nothing_and_closes_again() -> None:
    disk = Disk()
    log = opened(disk)
    store(log, some_batches(2, random.Random(5)))
    log.close()
    log.close()
    with pytest.raises(StoreClosed):
        log.enqueue(batch_of(b"x"))
    with pytest.raises(StoreClosed):
        log.read(0)
    with pytest.raises(StoreClosed):
        log.refresh()
    sizes = {name: len(disk.files[file]) for name, file in disk.names.items() if file > 0}
    opened(disk).close()
    assert sizes == {name: len(disk.files[file]) for name, file in disk.names.items() if file > 0}


def test_a_reader_makes_nothing_and_follows_from_before_the_first_write() -> None:
    disk = Disk()
    reader = opened(disk, read_only=True)
    assert not len(reader.entries()) and not len(reader.refresh()) and not disk.trace
    log = opened(disk, segment_bytes=600)
    batches = some_batches(40, random.Random(6))
    for number, batch in enumerate(batches):
        log.wait(log.enqueue(batch))
        if number % 3 == 0:
            before = len(disk.trace)
            fresh = [reader.read(entry) for entry in reader.refresh()]
            assert fresh and fresh == records_of(reader)[-len(fresh) :]
            assert records_of(reader) == flat(batches[: number + 1]) and len(disk.trace) == before
    log.close()
    late = opened(disk, read_only=True)
    assert not len(late.refresh())
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"more")))
    assert [late.read(entry) for entry in late.refresh()] == [b"more"]
    reader.refresh()
    assert records_of(reader) == [*flat(batches), b"more"]
    with pytest.raises(StoreFailed, match="reading only"):
        reader.enqueue(batch_of(b"x"))
    log.close()


# the tail -------------------------------------------------------------------------------------------------------------------


def killed_disk(batches: Sequence[Batch], **options: Any) -> Disk:
    """A log that was never closed, without sidecars: nothing says that its last frame was synced."""
    disk = Disk()
    log = opened(disk, **options)
    store(log, batches)
    stop = log._end.offset
    kill(log)
    for name in [name for name in disk.names if name.endswith(".idx")]:
        disk.unlink(name)
    disk.ftruncate(disk.open(disk.path(".seg"), os.O_RDWR), stop)
    return disk


def goes_on(disk: Disk, prior: list[bytes]) -> None:
    """The next append and a second reopen give exactly what was there and what is new."""
    log = opened(disk)
    assert records_of(log) == prior
    more = some_batches(2, random.Random(7))
    store(log, more)
    kill(log)
    for options in ({}, {"read_only": True}):
        log = opened(disk, **options)
        assert records_of(log) == prior + flat(more) and not log.recovered_bytes
        log.close()


def frame_stops(disk: Disk, batches: Sequence[Batch]) -> list[int]:
    """Where each batch's frame ends in the one segment, and that the last byte before is no zero."""
    stops = [0]
    for batch in batches:
        stops.append(stops[-1] + 44 + sum(12 + len(record) for record, _ in batch))
    return stops


def test_d02_a_log_cut_at_every_byte_keeps_what_came_before_and_goes_on() -> None:
    batches = some_batches(5, random.Random(8), size=40)
    disk = killed_disk(batches)
    stops = frame_stops(disk, batches)
    for cut in range(len(disk.content(".seg"))):
        state = disk.copy()
        del state.content(".seg")[cut:]
        whole = max(n for n, stop in enumerate(stops) if stop <= cut)
        log = opened(state)
        assert records_of(log) == flat(batches[:whole])
        torn = bytes(disk.content(".seg")[stops[whole] : cut]).rstrip(b"\0")
        assert log.recovered_bytes == len(torn)
        kill(log)
        if cut % 7 == 0 or SOAK:
            goes_on(state, flat(batches[:whole]))


@pytest.mark.parametrize("garbage", [False, True])
def test_d02_a_tail_of_zeros_or_garbage_at_every_byte_is_cut(garbage: bool) -> None:
    rng = random.Random(9)
    batches = some_batches(5, rng, size=40)
    disk = killed_disk(batches)
    stops = frame_stops(disk, batches)
    original = disk.content(".seg")
    for cut in range(len(original) + 1):
        state = disk.copy()
        content = state.content(".seg")
        tail = rng.randrange(1, 3000)
        content[cut:] = rng.randbytes(tail) if garbage else bytes(tail)
        # A frame that ends with zeros is whole where zeros take their place.
        whole = max(n for n, stop in enumerate(stops) if content[:stop] == original[:stop])
        torn = bytes(content[stops[whole] :]).rstrip(b"\0")
        log = opened(state)
        found = records_of(log)
        assert found == flat(batches[:whole]) and log.recovered_bytes == len(torn)
        kill(log)
        if cut % 17 == 0 or SOAK:
            goes_on(state, found)


def test_a_cut_that_something_vouches_against_is_damage() -> None:
    batches = some_batches(12, random.Random(10), size=60)
    disk = Disk()
    log = opened(disk, segment_bytes=500)
    store(log, batches)
    log.close()
    segments = sorted(name for name in disk.names if name.endswith(".seg"))
    assert len(segments) > 2
    for name in segments:
        for cut in range(0, len(disk.files[disk.names[name]]), 1 if SOAK else 5):
            for sidecars in (True, False):
                last = name == segments[-1]
                if last and not sidecars:
                    continue
                state = disk.copy()
                del state.files[state.names[name]][cut:]
                if not sidecars:
                    for other in [other for other in state.names if other.endswith(".idx")]:
                        state.unlink(other)
                before = {path: bytes(state.files[file]) for path, file in state.names.items() if file > 0}
                for read_only in (True, False):
                    with pytest.raises(CorruptTree) as caught:
                        opened(state, read_only=read_only)
                    assert {"segment", "offset"} <= caught.value.__dict__.keys()
                assert before == {path: bytes(state.files[file]) for path, file in state.names.items() if file > 0}
                log = opened(state, strict=False, read_only=True)
                assert log.damaged and set(records_of(log)) <= set(flat(batches))
                log.close()


def test_segments_that_are_missing_are_damage() -> None:
    batches = some_batches(12, random.Random(11), size=60)
    disk = Disk()
    log = opened(disk, segment_bytes=500)
    store(log, batches)
    log.close()
    for name in [name for name in disk.names if name.endswith(".seg")]:
        state = disk.copy()
        state.unlink(name)
        with pytest.raises(CorruptTree):
            opened(state)
        log = opened(state, strict=False)
        lost = set(flat(batches)) - set(records_of(log))
        assert lost and log.damaged
        kept = records_of(log)
        log.wait(log.enqueue(batch_of(b"after")))
        log.close()
        log = opened(state, strict=False, read_only=True)
        assert records_of(log) == [*kept, b"after"] and log.damaged
        log.close()


# rot ------------------------------------------------------------------------------------------------------------------------


def survivors(disk: Disk, log: SegmentLog, spans: Sequence[tuple[int, int]], name: str, head: int = 12) -> list[bytes]:
    """The records that no byte of a span in that file touches, nor so many bytes before them."""
    kept = []
    for entry in log.entries():
        start, stop = int(entry["offset"]) - head, int(entry["offset"]) + int(entry["length"])
        if not name.endswith(f"/{entry['segment']:08d}.seg") or all(stop <= low or high <= start for low, high in spans):
            kept.append(log.read(entry))
    return kept


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("sidecars", [False, True])
def test_c85_a_bit_flipped_at_every_byte_is_never_returned(closed: bool, sidecars: bool) -> None:
    rng = random.Random(12)
    batches = some_batches(14, rng, size=60)
    everything = flat(batches)
    disk = Disk()
    log = opened(disk, segment_bytes=700)
    for batch in batches:
        log.wait(log.enqueue(batch))
        log._tend()
    log.close() if closed else kill(log)
    if not sidecars:
        for name in [name for name in disk.names if name.endswith(".idx")]:
            disk.unlink(name)
    whole = opened(disk.copy(), read_only=True)
    assert records_of(whole) == everything
    segments = sorted(name for name in disk.names if name.endswith(".seg"))
    for name, file in sorted(disk.names.items()):
        size = len(bytes(disk.files[file]).rstrip(b"\0")) if file > 0 else 0
        for at in range(0, size, 1 if SOAK else 5 if sidecars else 2):
            state = disk.copy()
            state.files[file][at] ^= 1 << rng.randrange(8)
            if name.endswith("FORMAT"):
                for options in ({}, {"read_only": True}):
                    with pytest.raises((CorruptTree, IncompatibleStore)):
                        opened(state, **options)
                continue
            kept = survivors(disk, whole, [(at, at + 1)], name, head=0)
            found, damaged, recovered = outcome(state.copy())
            loose = opened(state, strict=False)
            assert records_of(loose) == [record for record in everything if record in kept] or (
                loose.recovered_bytes and name == segments[-1]
            )
            if name.endswith(".seg"):
                assert loose.damaged or loose.recovered_bytes
                if found is None or damaged:
                    continue
                if sidecars and not recovered:
                    assert found == everything  # a header in what a sidecar covers, which no record needs
                else:
                    assert recovered and found == everything[: len(found)] and name == segments[-1]
                    assert not closed or found == everything
            else:
                assert found == everything and not damaged and not loose.damaged
            kill(loose)


def test_c85_mutated_files_give_typed_errors_and_nothing_that_was_not_stored() -> None:
    rng = random.Random(27)
    batches = some_batches(12, rng, size=100)
    disk = Disk()
    log = opened(disk, segment_bytes=900)
    for batch in batches:
        log.wait(log.enqueue(batch))
        log._tend()
    log.close()
    files = [file for name, file in disk.names.items() if file > 0 and "LOCK" not in name]
    for _ in range(20_000 if SOAK else 500):
        state = disk.copy()
        for _ in range(rng.randint(1, 6)):
            content = state.files[rng.choice(files)]
            at, size = rng.randrange(len(content) + 1), rng.choice((1, 4, 40, 600))
            other = state.files[rng.choice(files)]
            start = rng.randrange(len(other) + 1)
            match rng.randrange(4):
                case 0:
                    content[at : at + size] = rng.randbytes(size)
                case 1:
                    content[at : at + size] = other[start : start + size]
                case 2:
                    content[at:at] = other[start : start + size]
                case _:
                    del content[at : at + size]
        for options in ({"read_only": True}, {"strict": False}):
            with contextlib.suppress(CorruptTree, IncompatibleStore):
                log = opened(state, **options)
                found = []
                for entry in log.entries():
                    with contextlib.suppress(CorruptTree):
                        found.append(log.read(entry))
                assert set(found) <= set(flat(batches))
                kill(log)


class CountedDisk(Disk):
    """Counts the bytes that are read, and the most that one read asks for."""

    read, asked = 0, 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        data = super().pread(fd, length, offset)
        self.read += len(data)
        self.asked = max(self.asked, length)
        return data


def test_c85_mutated_frames_are_frames_of_the_log_or_none() -> None:
    """Also with checksums that were made to fit. In time and memory that the length of the file bounds, not what it says."""
    rng = random.Random(31)
    batches = some_batches(4, rng, size=60)
    disk = killed_disk(batches)
    log = opened(disk, read_only=True)
    keys, stored = log._keys, set(records_of(log))
    assert keys is not None
    whole = bytes(disk.content(".seg"))
    starts = [int(entry["offset"]) for entry in log.entries()]
    log.close()
    frame_starts = [at for at in range(len(whole)) if whole.startswith(frames.FRAME_MAGIC, at)]
    assert len(frame_starts) == 4
    disk = CountedDisk(disk.names, disk.files)
    file = disk.names[disk.path(".seg")]
    outcomes: Counter[str] = Counter()

    def forge(data: bytearray) -> None:
        """Change a field of a header, with checksums that fit."""
        start = rng.choice(frame_starts)
        fields = list(frames.HEADER.unpack_from(data, start))
        which = rng.randrange(2, 7)
        fields[which] = rng.choice((0, 1, fields[which] + 1, fields[which] - 1, 2**31, 2**32 - 1)) % 2**32
        header = frames.HEADER.pack(*fields)[:-4]
        crc = zlib.crc32(header, (keys.seed ^ start) & 0xFFFFFFFF)
        data[start : start + 40] = header + struct.pack("<I", crc)
        stop = start + 40 + fields[6]
        if rng.random() < 0.3:  # a record that claims to be longer than the file
            struct.pack_into("<I", data, start + 44, min(fields[6], rng.choice((2**24, 2**32 - 1))))
        if rng.random() < 0.5 and stop + 4 <= len(data):
            heads = [bytes(data[at - 12 : at]) for at in starts if start < at <= stop][: fields[3]]
            data[stop : stop + 4] = struct.pack("<I", zlib.crc32(b"".join(heads), crc))

    for _ in range(1_000_000 if SOAK else 20_000):
        data, forged = mutated(rng, whole, frames.FRAME_MAGIC, forge)
        disk.files[file] = data
        disk.read = disk.asked = 0
        strict = rng.random() < 0.5
        walk = scan.Scan(disk, f"{ROOT}/segments", keys, entry_of, strict)
        try:
            walk.walk()
        except (CorruptTree, IncompatibleStore) as error:
            assert strict or isinstance(error, IncompatibleStore)
            outcomes[type(error).__name__] += 1
        else:
            rows = np.frombuffer(b"".join(walk.take()), ENTRY)
            found = [bytes(data[row["offset"] : row["offset"] + row["length"]]) for row in rows]
            assert set(found) <= stored
            if strict and not forged:
                cleanly_cut = len(data.rstrip(b"\0")) in (0, *frame_starts)
                assert prefix_length(found, batches) == len(batches) or walk.torn or cleanly_cut
            outcomes["damage" if walk.damaged else "torn" if walk.torn else "whole"] += 1
        assert disk.asked <= frames.CHUNK and disk.read <= 40 * len(data) + 4096
        assert not disk._handles
    assert set(outcomes) == {"CorruptTree", "IncompatibleStore", "damage", "torn", "whole"}, outcomes


def outcome(disk: Disk) -> tuple[list[bytes] | None, bool, int]:
    """What a strict open gives: the records, or None; whether reading met damage; what was cut."""
    try:
        log = opened(disk)
    except CorruptTree:
        return None, True, 0
    found, damaged = [], False
    for entry in log.entries():
        try:
            found.append(log.read(entry))
        except CorruptTree as error:
            assert f"segment {entry['segment']}, offset {entry['offset']}" in str(error)
            damaged = True
    recovered = log.recovered_bytes
    kill(log)
    return found, damaged, recovered


def test_d04_a_page_of_zeros_is_reported_and_all_else_is_served() -> None:
    rng = random.Random(13)
    batches = some_batches(60, rng, most=8, size=900)
    disk = Disk()
    log = opened(disk, segment_bytes=60_000, durability="group")
    for number, batch in enumerate(batches):
        log.enqueue(batch)
        if number % 5 == 0:
            log._tend()
    log.close()
    whole = opened(disk.copy(), read_only=True)
    everything = records_of(whole)
    assert everything == flat(batches)
    for name in sorted(name for name in disk.names if name.endswith(".seg")):
        size = len(disk.files[disk.names[name]])
        for page in range(0, size, 4096):
            state = disk.copy()
            stop = min(page + 4096, size)
            state.files[state.names[name]][page:stop] = bytes(stop - page)
            kept = survivors(disk, whole, [(page, stop)], name)
            assert len(kept) < len(everything)
            log = opened(state, strict=False, read_only=True)
            assert records_of(log) == kept
            segment = int(name[-12:-4])
            assert any(owner == segment and start < stop and page < end for owner, start, end in log.damaged)
            log.close()
            with contextlib.suppress(CorruptTree):
                log = opened(state, read_only=True)
                for entry in whole.entries():
                    with contextlib.suppress(CorruptTree):
                        assert log.read(entry) in kept
                log.close()
            if stop == size and name == disk.path(".seg"):  # the last frames with the mark: only the sidecar knows of them
                with pytest.raises(CorruptTree, match=f"segment {segment}"):
                    opened(state)
                continue
            for other in [other for other in state.names if other.endswith(".idx")]:
                state.unlink(other)
            with pytest.raises(CorruptTree, match=f"segment {segment}"):
                opened(state)


def test_a_writer_that_opens_a_damaged_log_leaves_the_damage_as_it_is() -> None:
    batches = some_batches(10, random.Random(14))
    disk = Disk()
    log = opened(disk)
    store(log, batches)
    log.close()
    place = int(log.entries()[4]["offset"])
    disk.content(".seg")[place] ^= 1
    before = bytes(disk.content(".seg"))
    log = opened(disk, strict=False)
    kept = records_of(log)
    assert len(kept) == len(log.entries()) == len(flat(batches)) - 1
    store(log, some_batches(3, random.Random(15)))
    log.close()
    assert bytes(disk.files[disk.names[ROOT + "/segments/00000001.seg"]]) == before
    log = opened(disk, strict=False, read_only=True)
    assert records_of(log) == kept + flat(some_batches(3, random.Random(15))) and len(log.damaged) == 1
    log.close()


@pytest.mark.parametrize("text", [b"sessiontree log 2 abc\n", b"sessiontree log 99", b"something else\n", b""])
def test_c85_an_unknown_format_is_refused_and_untouched(text: bytes) -> None:
    disk = Disk()
    disk.mkdir(ROOT)
    disk.pwrite(disk.open(ROOT + "/FORMAT", os.O_RDWR | os.O_CREAT), text, 0)
    before = len(disk.trace)
    for read_only in (False, True):
        with pytest.raises(IncompatibleStore):
            opened(disk, read_only=read_only)
    assert len(disk.trace) == before


def test_a_directory_of_other_things_is_refused_and_untouched() -> None:
    disk = Disk()
    disk.mkdir(ROOT)
    disk.open(ROOT + "/letters.txt", os.O_RDWR | os.O_CREAT)
    before = len(disk.trace)
    with pytest.raises(IncompatibleStore):
        opened(disk)
    assert len(disk.trace) == before


def test_a_frame_of_a_newer_version_is_refused_and_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = killed_disk(some_batches(3, random.Random(16)))
    log = opened(disk)
    monkeypatch.setattr(frames, "VERSION", 2)
    store(log, some_batches(1, random.Random(16)))
    monkeypatch.setattr(frames, "VERSION", 1)
    kill(log)
    before = bytes(disk.content(".seg"))
    for strict in (True, False):
        with pytest.raises(IncompatibleStore, match="version 2"):
            opened(disk, strict=strict)
    assert bytes(disk.content(".seg")) == before


def test_frames_of_another_place_are_no_frames() -> None:
    batches = some_batches(4, random.Random(17))
    disk = killed_disk(batches)
    stops = frame_stops(disk, batches)
    whole = bytes(disk.content(".seg"))
    for content, kept in ((whole[: stops[2]] + whole[: stops[2]], 2), (whole[stops[1] :], 0)):
        state = disk.copy()
        state.content(".seg")[:] = content
        log = opened(state)
        assert records_of(log) == flat(batches[:kept])
        log.close()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("options", [{}, {"read_only": True}, {"strict": False}])
def test_c85_a_segment_of_another_store_is_refused_and_untouched(n: int, sidecar: bool, options: dict[str, Any]) -> None:
    """Also where it is the only one, so that nothing says that it was synced: it is no torn tail. And a foreign FORMAT."""
    batches = some_batches(n, random.Random(17))
    other = killed_disk(batches)
    disk = Disk()
    log = opened(disk)
    store(log, batches)
    log.close() if sidecar else kill(log)
    for suffix in (".seg", "/FORMAT"):
        state = disk.copy()
        state.content(suffix)[:] = other.content(suffix)
        before = {name: bytes(state.files[file]) for name, file in state.names.items() if file > 0}
        if options == {"strict": False} and sidecar and suffix == ".seg":  # which says that there was something
            log = opened(state, **options)
            assert log.damaged and records_of(log) == flat(batches), "which is, byte for byte, what lies there"
            kill(log)
        else:
            with pytest.raises((IncompatibleStore, CorruptTree)):
                opened(state, **options)
        assert {name: bytes(state.files[file]) for name, file in state.names.items() if file > 0} == before
    missing = disk.copy()
    missing.names.pop(f"{ROOT}/segments/00000001.seg")
    missing.names.pop(f"{ROOT}/segments/00000001.idx", None)
    missing.names.pop(f"{ROOT}/segments")
    with pytest.raises(CorruptTree, match="missing"):
        opened(missing, **options)
    unnamed = disk.copy()
    unnamed.names.pop(f"{ROOT}/FORMAT")
    with pytest.raises(IncompatibleStore):
        opened(unnamed, **options)


def test_a_reader_that_nobody_closes_lets_go_of_its_descriptors() -> None:
    disk = killed_disk(some_batches(3, random.Random(5)))
    before = dict(disk._handles)
    log = opened(disk, read_only=True)
    assert records_of(log) and disk._handles != before
    del log
    gc.collect()
    assert disk._handles == before


# sidecars -------------------------------------------------------------------------------------------------------------------


def cover_of(disk: Disk, log: SegmentLog, segment: int) -> frames.Cover | None:
    assert log._keys is not None
    return frames.read_cover(disk, f"{ROOT}/segments/{segment:08d}.idx", log._keys, segment)


def test_a_sidecar_that_is_missing_stale_damaged_foreign_or_too_new_changes_nothing() -> None:
    batches = some_batches(30, random.Random(18))
    disk, stale = Disk(), Disk()
    log = opened(disk, segment_bytes=4000)
    for number, batch in enumerate(batches):
        log.wait(log.enqueue(batch))
        log._tend()
        if number == 7:
            stale = disk.copy()
    kill(log)
    foreign = Disk()
    log = opened(foreign)
    store(log, batches)
    log.close()
    name = ROOT + "/segments/00000001.idx"
    good = bytes(disk.files[disk.names[name]])
    assert good and len(stale.files[stale.names[name]]) < len(good)
    newer = bytearray(good)
    newer[4] = 2
    for content in (
        None,
        bytes(stale.files[stale.names[name]]),
        bytes(foreign.files[foreign.names[name]]),
        good[:-1],
        good[:100],
        bytes(newer),
        bytes(len(good)),
        good + good,
        random.Random(1).randbytes(1000),
    ):
        state = disk.copy()
        state.unlink(name)
        if content is not None:
            state.pwrite(state.open(name, os.O_RDWR | os.O_CREAT), content, 0)
        for read_only in (True, False):
            log = opened(state, read_only=read_only)
            assert records_of(log) == flat(batches) and not log.damaged
            log.close()
        cover = cover_of(state, log, 1)
        assert cover and cover.whole and cover.stop == len(state.content("1.seg"))  # made anew


def test_after_a_clean_close_nothing_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = some_batches(30, random.Random(19))
    disk = Disk()
    log = opened(disk, segment_bytes=2000)
    store(log, batches)
    log.close()
    monkeypatch.setattr(scan.Scan, "_record", lambda *_: pytest.fail("a record was read"))
    log = opened(disk)
    assert records_of(log) == flat(batches)
    log.close()


def test_a_sidecar_never_covers_what_is_not_synced() -> None:
    rng = random.Random(20)
    batches = some_batches(30, rng)
    disk = Disk()
    log = opened(disk, durability="relaxed", segment_bytes=4000)
    for number, batch in enumerate(batches):
        log.enqueue(batch)
        log._tend()
        if number in (9, 19):
            log.flush()
        covered = cover_of(disk, log, log._end.segment)
        assert covered is None or covered.last <= log._synced
    log.close()


# crashes --------------------------------------------------------------------------------------------------------------------


def run_and_record(durability: Durability, rng: random.Random) -> tuple[Disk, list[Batch]]:
    """A short life of a log on a disk that records it; ``mark`` events say what was acknowledged."""
    disk = Disk()
    batches = some_batches(rng.randint(3, 12), rng, size=rng.choice((30, 300, 1500)))
    log = opened(disk, durability=durability, segment_bytes=rng.choice((400, 2000, 10**6)))
    for batch in batches:
        number = log.enqueue(batch)
        if durability == "commit" and rng.random() < 0.8:
            log.wait(number)
        elif durability == "relaxed" and rng.random() < 0.2:
            log.flush()
        elif rng.random() < 0.7:
            log._tend()
        disk.mark(log.durable)
        if durability == "commit" and rng.random() < 0.4:
            log._tend()
    if rng.random() < 0.5:
        log.close()
        disk.mark(log.durable)
        assert log.durable == len(batches)
    else:
        kill(log)
    return disk, batches


def check_crash(disk: Disk, events: int, batches: list[Batch], rng: random.Random) -> Disk:
    """Open what a crash left: nothing acknowledged is lost, nothing is half there. The disk on which that log then went on."""
    acked = max([event[1] for event in disk.trace[:events] if event[0] == "mark"], default=disk.acked)
    state = disk.crash(rng, events)
    if rng.random() < 0.2:
        reader = opened(state, read_only=True)
        assert acked <= prefix_length(records_of(reader), batches) and not state.trace
        reader.close()
    log = opened(state)
    found = prefix_length(records_of(log), batches)
    assert found >= acked, f"{acked} were acknowledged, {found} are there"
    assert not log.damaged
    state.mark(found)
    more = some_batches(2, rng)
    store(log, more)
    log.close() if rng.random() < 0.5 else kill(log)
    batches[found:] = more
    state.mark(found + 2)
    log = opened(state.copy(), read_only=rng.random() < 0.5)
    assert records_of(log) == flat(batches) and not log.recovered_bytes
    kill(log)
    state.acked = acked
    return state


def crash_states(total: int, seed: int) -> None:
    """Draw crash states of recorded lives, and of the recoveries from them."""
    rng = random.Random(seed)
    done = 0
    while done < total:
        disk, batches = run_and_record(rng.choice(DURABILITIES), rng)
        for events in sorted(rng.sample(range(len(disk.trace) + 1), min(len(disk.trace), 25))):
            state, known, at = disk, list(batches), events
            for _ in range(rng.choice((1, 1, 2, 3))):
                state = check_crash(state, at, known, rng)
                at = rng.randrange(len(state.trace) + 1)
                done += 1


@pytest.mark.parametrize("seed", range(4))
def test_d02_crash_states(seed: int) -> None:
    crash_states(5500 if SOAK else 300, seed)


def test_d08_of_a_batch_all_records_survive_or_none() -> None:
    """What is enqueued together, a payload and the head that names it, is never there in part."""
    rng = random.Random(21)
    for _ in range(300 if SOAK else 30):
        disk = Disk()
        log = opened(disk)
        log.wait(log.enqueue(batch_of(b"first")))
        start = len(disk.trace)
        log.wait(log.enqueue(batch_of(rng.randbytes(2000), b"head")))
        kill(log)
        for events in range(start, len(disk.trace) + 1):
            log = opened(disk.crash(rng, events), read_only=True)
            assert len(log.entries()) in (1, 3)
            log.close()


# failures -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame_bytes", [1, 2**20])
def test_d03_a_failed_write_is_undone_and_the_next_commit_works(frame_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_log, "_FRAME_BYTES", frame_bytes)
    for part in range(0, 100, 1 if SOAK else 3):
        disk = Disk()
        log = opened(disk)
        log.wait(log.enqueue(batch_of(b"before")))
        content = bytes(disk.content(".seg")[: log._end.offset])
        for error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            disk.fault = Fault(1, error, frozenset({"pwrite"}), part=part / 100)
            disk._hit = 0
            lost = log.enqueue(batch_of(b"lost" * 100))
            also = log.enqueue(batch_of(b"behind it"))
            for number in (lost, also):
                with pytest.raises(StoreFailed, match=os.strerror(error)) as caught:
                    log.wait(number)
                assert number in caught.value.numbers  # type: ignore[attr-defined]
                assert caught.value.errno == error  # type: ignore[attr-defined]
                assert log.is_durable(number) is False
            assert bytes(disk.content(".seg")) == content and [*records_of(log)] == [b"before"]
            with pytest.raises(WriteLost):
                log.enqueue(batch_of(b"x"), after=lost)
        disk.fault = None
        log.wait(log.enqueue(batch_of(b"after"), after=1))
        assert records_of(log) == [b"before", b"after"]
        for number in (lost, also):
            with pytest.raises(StoreFailed):
                log.wait(number)
        kill(log)
        goes_on(disk, [b"before", b"after"])


def test_d03_what_was_said_to_be_lost_does_not_come_back() -> None:
    """All of it reached the cache, and the write failed all the same."""
    rng = random.Random(26)
    for _ in range(300 if SOAK else 40):
        disk = Disk()
        log = opened(disk)
        log.wait(log.enqueue(batch_of(b"before")))
        disk.fault = Fault(1, errno.EDQUOT, frozenset({"pwrite"}), part=1.0)
        with pytest.raises(StoreFailed):
            log.wait(log.enqueue(batch_of(b"lost")))
        start = len(disk.trace)
        log.wait(log.enqueue(batch_of(b"x")))
        kill(log)
        for events in range(start, len(disk.trace) + 1):
            log = opened(disk.crash(rng, events), read_only=True)
            assert records_of(log) in ([b"before"], [b"before", b"x"])
            log.close()


class ReadInBetween(Disk):
    """A reader looks before anything is taken back."""

    reader: SegmentLog | None = None

    def ftruncate(self, fd: int, size: int) -> None:
        if self.reader is not None:
            self.reader.refresh()
        super().ftruncate(fd, size)


def test_a_reader_that_saw_what_was_taken_back_is_told() -> None:
    disk = ReadInBetween()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"before")))
    disk.reader = reader = opened(disk, read_only=True)
    disk.fault = Fault(1, errno.EDQUOT, frozenset({"pwrite"}), part=1.0)
    with pytest.raises(StoreFailed):
        log.wait(log.enqueue(batch_of(b"lost")))
    disk.reader = None
    assert len(reader.entries()) == 2
    log.wait(log.enqueue(batch_of(b"after, and longer")))
    with pytest.raises(CorruptTree, match="open the log again"):
        reader.refresh()
    assert records_of(opened(disk, read_only=True)) == records_of(log) == [b"before", b"after, and longer"]
    log.close()


@pytest.mark.parametrize("durability", DURABILITIES)
def test_d06_after_a_failed_sync_everything_fails_until_reopened(durability: Durability) -> None:
    disk = Disk()
    log = opened(disk, durability=durability)
    log.enqueue(batch_of(b"kept"))
    log.flush()
    disk.fault = Fault(1, errno.EIO, frozenset({"fdatasync"}))
    numbers = [log.enqueue(batch_of(b"lost")), log.enqueue(batch_of(b"too"))]
    for use in (
        lambda: log.wait(numbers[0]),
        lambda: log.wait(numbers[1]),
        log.flush,
        lambda: log.enqueue(batch_of(b"later")),
        log.close,
    ):
        with pytest.raises(StoreFailed, match=r"sync.*failed.*never durable: writes 2 to 3") as caught:
            use()
        assert list(caught.value.numbers) == numbers  # type: ignore[attr-defined]
    assert log.durable == 1
    log.close()
    log = opened(disk)
    assert records_of(log)[0] == b"kept"
    log.close()


def test_d06_a_write_whose_error_may_be_its_syncs_stops_the_log() -> None:
    """One call writes and syncs: only that there is no room says that nothing was written."""
    disk = Disk()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"kept")))
    disk.fault = Fault(1, errno.EIO, frozenset({"pwrite"}), part=0.5)
    with pytest.raises(StoreFailed, match="a write, or its sync, failed"):
        log.wait(log.enqueue(batch_of(b"lost")))
    disk.fault = None
    with pytest.raises(StoreFailed, match="takes no more writes"):
        log.enqueue(batch_of(b"more"))
    kill(log)
    goes_on(disk, [b"kept"])


@pytest.mark.parametrize("flag", [getattr(os, "RWF_DSYNC", 0), 0])
def test_writes_in_parts_reach_a_real_file(flag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than one call takes, large and small, synced by the write itself or, where the system cannot, after it."""
    monkeypatch.setattr(system, "_DSYNC", flag)
    rng = random.Random(5)
    records = [rng.randbytes(rng.choice((1, 100, 20_000))) for _ in range(1500)]
    parts = b"in ", rng.randbytes(70_000), b"parts"
    whole = [*records, b"".join(parts)]
    batch: list[Any] = [*((record, bytes(PREFIX_SIZE)) for record in records), (parts, bytes(PREFIX_SIZE))]
    with contextlib.closing(SegmentLog.open(tmp_path / "log", entry_of=lambda record: bytes(PREFIX_SIZE))) as log:
        log.wait(log.enqueue(batch))
    with contextlib.closing(SegmentLog.open(tmp_path / "log", entry_of=lambda record: bytes(PREFIX_SIZE), strict=False)) as log:
        assert records_of(log) == whole


def test_d06_what_a_failed_sync_left_in_the_cache_is_stored_again_before_it_counts() -> None:
    rng = random.Random(22)
    lost = 0
    for _ in range(200 if SOAK else 40):
        disk = Disk()
        log = opened(disk)
        log.wait(log.enqueue(batch_of(b"kept")))
        disk.fault = Fault(1, errno.EIO, frozenset({"fdatasync"}))
        with pytest.raises(StoreFailed):
            log.wait(log.enqueue(batch_of(rng.randbytes(3000))))
        kill(log)
        log = opened(disk)  # another process, the same cache
        found = records_of(log)
        kill(log)
        after = opened(disk.crash(rng, len(disk.trace)))
        assert records_of(after) == found
        lost += len(found) == 1
        after.close()


def live(disk: Disk, durability: Durability, batches: Sequence[Batch]) -> tuple[int, set[int], bool]:
    """Use a log on a disk that may fail: the highest number acknowledged, the numbers lost, and whether it still works."""
    acked, works = 0, True
    lost: set[int] = set()
    try:
        log = opened(disk, durability=durability, segment_bytes=1500)
    except StoreFailed:
        return 0, lost, False
    try:
        for batch in batches:
            number = log.enqueue(batch)
            try:
                log.flush() if durability == "relaxed" else log.wait(number)
            except StoreFailed as error:
                assert number in error.numbers  # type: ignore[attr-defined]
                lost.add(number)
            else:
                acked = number
                assert not lost or durability == "commit"
            disk.mark(number if not lost else 0)
            log._tend()
        log.close()
    except StoreFailed:
        works = False
        with contextlib.suppress(StoreFailed):
            log.close()
    return acked, lost, works


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("forever", [False, True])
def test_every_system_call_may_fail(durability: Durability, error: int, forever: bool) -> None:
    rng = random.Random(23)
    batches = some_batches(8, rng, size=400)
    clean = Disk()
    assert live(clean, durability, batches) == (8, set(), True)
    calls = sum(call in Fault(0, 0).hits for call in clean.calls)
    assert calls > 30
    for n in range(1, calls + 1):
        disk = Disk()
        disk.fault = Fault(n, error, forever=forever, part=rng.random())
        acked, lost, _ = live(disk, durability, batches)
        disk.fault = None
        expected = [batch for number, batch in enumerate(batches, 1) if number not in lost]
        sure = sum(number not in lost for number in range(1, acked + 1))
        for state in (disk.copy(), disk.crash(rng, len(disk.trace)), disk.crash(rng, len(disk.trace))):
            log = opened(state)
            found = records_of(log)
            if not lost or durability == "commit":
                # A batch that was refused while the log stopped may be there, whole, behind all that was acknowledged.
                assert found[: len(flat(expected[:sure]))] == flat(expected[:sure])
                rest = found[len(flat(expected[:sure])) :]
                assert not rest or prefix_length(rest, batches[acked:]) <= 2 or prefix_length(rest, expected[sure:])
            else:
                assert prefix_length(found, batches) >= acked
            store(log, batches[:1])
            log.close()
            log = opened(state)
            assert records_of(log) == found + flat(batches[:1])
            log.close()


@pytest.mark.parametrize("durability", ["group", "relaxed"])
def test_who_hands_over_faster_than_the_disk_takes_helps_to_write(durability: Durability, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_log, "MAX_BACKLOG", 10_000)
    monkeypatch.setattr(segment_log, "_POLL", (1000.0, 1000.0))  # nobody else writes
    disk = Disk()
    log = opened(disk, durability=durability)
    most = 0
    for number in range(100):
        log.enqueue(batch_of(bytes([number]) * 1000))
        most = max(most, log._backlog)
        log.relieve()
        assert log._backlog <= 10_000
    assert most > 10_000
    assert len(log.entries()) > 80
    disk.fault = Fault(1, errno.EIO, frozenset({"pwrite"}), forever=True)
    for number in range(20):
        with contextlib.suppress(StoreFailed):
            log.enqueue(batch_of(bytes([number]) * 1000))
        log.relieve()  # what was handed over was taken: the next change raises
    assert log.failed
    kill(log)


def test_a_commit_that_could_not_be_undone_stops_the_log() -> None:
    disk = Disk()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"kept")))
    disk.fault = Fault(1, errno.EDQUOT, frozenset({"pwrite", "ftruncate"}), forever=True)
    with pytest.raises(StoreFailed):
        log.wait(log.enqueue(batch_of(b"lost")))
    disk.fault = None
    with pytest.raises(StoreFailed, match="could not be undone"):
        log.enqueue(batch_of(b"more"))
    with pytest.raises(StoreFailed):
        log.close()
    goes_on(disk, [b"kept"])


@functools.cache
def names_of(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th place of some files' code where CPython looks for signals."""

    FILES: ClassVar = frozenset(module.__file__ for module in (segment_log, frames, scan))

    def __init__(self, n: int) -> None:
        self.left = n
        self._last: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.left >= 0:
            self.left -= self._last.get(frame, "").startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if not self.left:
                self.left = -1
                self.come()
            self._last[frame] = names_of(frame.f_code)[frame.f_lasti]
        return self

    def come(self) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_at_every_instruction_undoes_nothing() -> None:
    """KeyboardInterrupt at the n-th place of enqueue, wait and what they call where CPython looks for signals, for every n."""
    batches = some_batches(3, random.Random(24), size=20)
    n = 0
    while True:
        n += 1
        disk = Disk()
        log = opened(disk, segment_bytes=200)
        log.wait(log.enqueue(batches[0]))
        interrupt = Interrupt(n)
        sys.settrace(interrupt)
        try:
            log.wait(log.enqueue(batches[1]))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if log.enqueued == 1:
            log.enqueue(batches[1])
        helper = threading.Thread(target=log.flush)  # no lock was left behind
        helper.start()
        helper.join(20)
        assert not helper.is_alive()
        log.wait(log.enqueue(batches[2]))
        assert records_of(log) == flat(batches)
        kill(log)
        log = opened(disk, read_only=True)
        assert records_of(log) == flat(batches)
        log.close()
        if interrupt.left > 0:
            break
    assert n > 100


class Stingy(Disk):
    """Writes at most 7 bytes a call."""

    def pwritev(self, fd: int, parts: Sequence[bytes | memoryview], offset: int, *, sync: bool = False) -> int:
        return super().pwritev(fd, (b"".join(parts)[:7],), offset, sync=sync)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_disk_that_writes_a_few_bytes_at_a_time_gets_all_of_them(durability: Durability) -> None:
    batches = some_batches(5, random.Random(26))
    disk = Stingy()
    log = opened(disk, durability=durability)
    store(log, batches)
    assert records_of(log) == flat(batches)
    log.close()
    log = opened(disk, read_only=True)
    assert records_of(log) == flat(batches)
    log.close()


class Looked(Interrupt):
    """A signal handler that looks at the entries."""

    def __init__(self, n: int, log: SegmentLog) -> None:
        super().__init__(n)
        self._log = log

    def come(self) -> None:
        self._log.entries()


def test_the_entries_are_looked_at_anywhere_in_a_commit_beside_a_compaction() -> None:
    """Which has them in two tables; whoever asks puts one in their place."""
    batches = some_batches(3, random.Random(25), size=20)
    n = 0
    while True:
        n += 1
        log = opened(Disk())
        log.wait(log.enqueue(batches[0]))
        log.cut()
        looked = Looked(n, log)
        sys.settrace(looked)
        try:
            log.wait(log.enqueue(batches[1]))
        finally:
            sys.settrace(None)
        assert records_of(log) == flat(batches[:2])
        log.wait(log.enqueue(batches[2]))
        assert records_of(log) == flat(batches)
        kill(log)
        if looked.left > 0:
            break
    assert n > 50


# threads and processes ------------------------------------------------------------------------------------------------------


def zeroed(disk: Disk) -> list[tuple[int, int]]:
    """Where zeros alone were written in segments: offset and size of each write."""
    segments = {file for name, file in disk.names.items() if name.endswith(".seg")}
    writes = [event for event in disk.trace if event[0] == "write" and event[1] in segments]
    return [(event[2], len(event[3])) for event in writes if not any(event[3])]


def test_zeros_stand_where_the_next_records_go() -> None:
    """Of a commit, at the next look: as far as records came since the last one, times four, and in no page of theirs."""
    disk = Disk()
    log = opened(disk)
    assert not zeroed(disk)
    log._tend()
    assert not zeroed(disk), "nothing came yet"
    stop = 0
    for size in (10, 500, 30, 5000):
        before = log._end.offset
        log.wait(log.enqueue(batch_of(bytes(size))))
        end, done = log._end.offset, len(zeroed(disk))
        log._tend()
        new = zeroed(disk)[done:]
        starts = [start for start, _ in new]
        assert starts == sorted(starts) and all(start % 64 == 0 and start >= max(end, stop) for start in starts)
        stop = sum(new[-1]) if new else stop
        assert end + min(max(150, 4 * (end - before)), 400) <= stop < end + 400 + 128 + 64
        log._tend()
        assert len(zeroed(disk)) == done + len(new), "nothing came since"
    log.close()
    assert opened(disk, read_only=True)._end.offset == len(disk.content(".seg")), "none of them outlives a clean close"


@pytest.mark.parametrize("durability", ["group", "relaxed"])
def test_no_zeros_where_nobody_waits_for_a_sync(durability: Durability) -> None:
    disk = Disk()
    log = opened(disk, durability=durability)
    store(log, some_batches(5, random.Random(1)))
    log._tend()
    assert not zeroed(disk)
    log.close()


def test_no_zeros_on_a_full_disk() -> None:
    """They would take the room of records."""
    disk = Disk()
    log = opened(disk)
    disk.fault = Fault(1, errno.ENOSPC, frozenset({"fallocate"}), forever=True)
    log.wait(log.enqueue(batch_of(b"kept")))
    log._tend()
    assert not zeroed(disk)
    log.close()
    goes_on(disk, [b"kept"])


def test_zeros_that_fail_are_done_without() -> None:
    disk = Disk()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"one")))
    disk.fault = Fault(1, errno.EIO, frozenset({"pwrite"}), part=0.0)
    log._tend()
    disk.fault = None
    for record in (b"two", b"three"):
        log.wait(log.enqueue(batch_of(record)))
        log._tend()
    assert not zeroed(disk) and log.durable == 3
    log.close()
    goes_on(disk, [b"one", b"two", b"three"])


def test_zeros_are_written_anew_where_a_failed_write_was_undone() -> None:
    disk = Disk()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"kept")))
    log._tend()
    first = zeroed(disk)
    disk.fault = Fault(1, errno.ENOSPC, frozenset({"pwrite"}))
    with pytest.raises(StoreFailed):
        log.wait(log.enqueue(batch_of(b"lost")))
    log.wait(log.enqueue(batch_of(b"more")))
    log._tend()
    assert zeroed(disk)[len(first)][0] < sum(first[-1])
    log.close()
    goes_on(disk, [b"kept", b"more"])


def test_to_open_a_log_writes_no_zeros() -> None:
    disk = Disk()
    log = opened(disk)
    store(log, some_batches(3, random.Random(1)))
    log.close()
    before, whole = len(zeroed(disk)), bytes(disk.content(".seg"))
    log = opened(disk)
    log._tend()
    log.close()
    assert len(zeroed(disk)) == before and bytes(disk.content(".seg")) == whole


def test_zeros_end_with_the_segment() -> None:
    disk = Disk()
    log = opened(disk, segment_bytes=1000)
    for _ in range(10):
        log.wait(log.enqueue(batch_of(bytes(100))))
        log._tend()
    assert max(map(sum, zeroed(disk))) == 1000
    log.close()


def test_zeros_wait_for_a_frame_that_an_interrupt_left() -> None:
    """It may stand on the disk before anybody knows that it ends there."""
    disk = Disk()
    log = opened(disk)
    log.wait(log.enqueue(batch_of(b"one")))
    log.enqueue(batch_of(bytes(1000)))
    log._stage()
    log._plan_ahead()
    assert not log._zero() and not zeroed(disk)
    log.flush()
    assert log._plan_ahead() and log._zero() and zeroed(disk)
    log.close()


def test_zeros_reach_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads commit while zeros are written all the time; segments are rolled, and one is cut."""
    monkeypatch.setattr(segment_log, "_POLL", (1000.0, 1000.0))
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, segment_bytes=30_000)
    stop = threading.Event()
    pieces = 0

    def zero() -> None:
        nonlocal pieces
        while not stop.is_set():
            if log._plan_ahead():
                while log._zero():
                    pieces += 1

    def write(thread: int) -> None:
        rng = random.Random(thread)
        for part in range(200):
            log.wait(log.enqueue(batch_of(b"%d.%d " % (thread, part) + rng.randbytes(rng.choice((10, 300, 3000))))))
            if thread == 0 and part == 100:
                log.cut()

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(3)]
    background = threading.Thread(target=zero)
    for thread in (background, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    background.join()
    stored = records_of(log)
    assert pieces > 100
    assert {record.split(b" ")[0] for record in stored} == {b"%d.%d" % (thread, part) for thread in range(3) for part in range(200)}
    log.close()
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
    assert records_of(log) == stored and not log.damaged and not log.recovered_bytes
    log.close()


class SlowSync(System):
    """fdatasync that takes a while, as on a disk, and counts."""

    syncs = 0

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        time.sleep(0.0005)


@pytest.mark.parametrize("durability", DURABILITIES)
def test_16_threads_share_their_syncs(durability: Durability, tmp_path: Path) -> None:
    system = SlowSync()
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, durability=durability, system=system, segment_bytes=20_000)
    mine: list[list[tuple[int, bytes]]] = [[] for _ in range(16)]

    def work(thread: int) -> None:
        for part in range(50):
            record = b"%d.%d" % (thread, part)
            number = log.enqueue(batch_of(record))
            if durability == "commit" or part % 10 == 0:
                log.wait(number)
                assert log.durable >= number
            mine[thread].append((number, record))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush()
    numbered = sorted(pair for pairs in mine for pair in pairs)
    assert [number for number, _ in numbered] == list(range(1, 801))
    assert records_of(log) == [record for _, record in numbered]
    assert system.syncs < 500
    log.close()
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
    assert records_of(log) == [record for _, record in numbered]
    log.close()


class SlowDisk(Disk):
    def fdatasync(self, fd: int) -> None:
        time.sleep(0.0002)
        super().fdatasync(fd)


def test_every_waiter_is_woken_without_the_background_thread() -> None:
    log = opened(SlowDisk())
    threads = [threading.Thread(target=store, args=(log, some_batches(60, random.Random(n))), daemon=True) for n in range(16)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
        assert not thread.is_alive()
    assert log.durable == 960
    log.close()


@pytest.mark.parametrize("durability", ["group", "relaxed"])
def test_the_background_thread_writes_soon(durability: Durability, tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, durability=durability)
    reader = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
    number = log.enqueue(batch_of(b"x"))
    deadline = time.monotonic() + 10
    while not len(reader.entries()) or (durability == "group" and log.durable < number):
        assert time.monotonic() < deadline
        time.sleep(0.005)
        reader.refresh()  # which may see it written a moment before it is synced
    assert log.durable == (number if durability == "group" else 0)
    log.flush()
    assert log.durable == number
    log.close()
    reader.close()


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that runs code, with the names of this module and ``arguments``."""
    prelude = "import os, sys, time\nfrom tests.test_segment_log import *\narguments = sys.argv[1:]\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path) + os.pathsep + os.getcwd()}
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def output(process: subprocess.Popen[bytes]) -> str:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.decode()


def test_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    code = """
log = SegmentLog.open(arguments[0], entry_of=entry_of, segment_bytes=5000)
numbered = len(log.entries())
out = sys.stdout.fileno()
os.write(out, b"ready\\n")
while True:
    n = numbered + 1
    records = [b"%d.%d " % (n, part) + bytes(n % 300) for part in range(2)]
    log.wait(log.enqueue(batch_of(*records)))
    numbered += 2
    os.write(out, b"%d\\n" % numbered)
"""
    rng = random.Random(25)
    acked = 0
    for _ in range(200 if SOAK else 10):
        process = start(code, str(tmp_path / "s"))
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.1)
        process.kill()
        acked = max([acked, *map(int, process.communicate()[0].split())])
        log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
        found = records_of(log)
        assert len(found) >= acked and len(found) % 2 == 0
        for n in range(1, len(found), 2):
            assert found[n - 1 : n + 1] == [b"%d.%d " % (n, part) + bytes(n % 300) for part in range(2)]
        log.close()
        acked = len(found)


def test_d30_16_processes_open_a_new_log_at_once(tmp_path: Path) -> None:
    code = """
out = []
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
slowest = 0.0
while True:
    began = time.monotonic()
    try:
        log = SegmentLog.open(arguments[0], entry_of=entry_of)
        break
    except StoreLocked:
        slowest = max(slowest, time.monotonic() - began)
for part in range(100):
    log.enqueue(batch_of(b"%s.%d" % (arguments[1].encode(), part)))
log.flush()
log.close()
print(slowest)
"""
    processes = [start(code, str(tmp_path / "s"), str(process)) for process in range(16)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    assert max(float(output(process)) for process in processes) < 2  # under one second on a machine that is not this busy
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
    found = records_of(log)
    assert len(found) == 1600
    for n in range(16):
        assert [record for record in found if record.startswith(b"%d." % n)] == [b"%d.%d" % (n, part) for part in range(100)]
    log.close()


def test_d30_a_second_writer_is_told_within_a_second(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of)
    began = time.monotonic()
    with pytest.raises(StoreLocked):
        SegmentLog.open(tmp_path / "s", entry_of=entry_of)
    assert time.monotonic() - began < 2
    log.wait(log.enqueue(batch_of(b"unharmed")))
    assert records_of(log) == [b"unharmed"]
    log.close()
    SegmentLog.open(tmp_path / "s", entry_of=entry_of).close()


def test_d15_another_process_sees_what_was_acknowledged(tmp_path: Path) -> None:
    code = """
log = SegmentLog.open(arguments[0], entry_of=entry_of, read_only=True)
while (line := sys.stdin.readline()):
    log.refresh()
    print(len(log.entries()), log.read(-1).decode(), flush=True)
"""
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, segment_bytes=2000)
    reader = start(code, str(tmp_path / "s"))
    assert reader.stdin is not None and reader.stdout is not None
    for n in range(100):
        log.wait(log.enqueue(batch_of(b"node-%d" % n)))
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        assert reader.stdout.readline().decode().split() == [str(n + 1), f"node-{n}"]
    assert output(reader) == ""
    log.close()


def test_a_reader_beside_a_busy_writer_sees_a_prefix(tmp_path: Path) -> None:
    code = """
log = SegmentLog.open(arguments[0], entry_of=entry_of, read_only=True)
print("ready", flush=True)
seen = []
while not seen or seen[-1] != b"end":
    seen += [log.read(entry) for entry in log.refresh()]
    assert len(log.entries()) == len(seen)
assert seen[:-1] == [b"%d" % n * (n % 50) for n in range(len(seen) - 1)], len(seen)
print(len(seen))
"""
    reader = start(code, str(tmp_path / "s"))
    assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, durability="relaxed", segment_bytes=50_000)
    for n in range(5000):
        log.enqueue(batch_of(b"%d" % n * (n % 50)))
        if n % 10 == 0:
            time.sleep(0.0005)
    log.enqueue(batch_of(b"end"))
    log.flush()
    assert output(reader).strip() == "5001"
    log.close()


def test_a_forked_child_reads_and_leaves_the_log_to_its_parent(tmp_path: Path) -> None:
    code = """
log = SegmentLog.open(arguments[0], entry_of=entry_of)
log.wait(log.enqueue(batch_of(b"before")))
pid = os.fork()
if not pid:
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    assert [path for path in held if path.startswith(arguments[0])] == [arguments[0] + "/segments/00000001.lease"], held
    assert log.read(0) == b"before"
    for use in (lambda: log.enqueue(batch_of(b"x")), lambda: log.wait(log.enqueue(batch_of(b"x")))):
        try:
            use()
        except StoreFailed as error:
            assert "forked" in str(error)
        else:
            sys.exit(3)
    deadline = time.monotonic() + 20
    while len(log.entries()) < 3 and time.monotonic() < deadline:
        log.refresh()
    assert records_of(log) == [b"before", b"during", b"after"], records_of(log)
    log.close()
    try:
        SegmentLog.open(arguments[0], entry_of=entry_of)
    except StoreLocked:
        sys.exit(0)
    sys.exit(4)
log.wait(log.enqueue(batch_of(b"during", b"after")))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
log.wait(log.enqueue(batch_of(b"still")))
log.close()
log = SegmentLog.open(arguments[0], entry_of=entry_of)
assert records_of(log) == [b"before", b"during", b"after", b"still"]
log.close()
"""
    assert output(start(code, str(tmp_path / "s"))) == ""


def test_descriptors_are_closed_on_exec(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of)
    log.wait(log.enqueue(batch_of(b"x")))
    log.read(0)
    for fd in (log._lock_fd, log._end.fd, *log._files.values()):
        assert not os.get_inheritable(fd)
    log.close()


def test_what_is_enqueued_is_stored_when_the_program_ends(tmp_path: Path) -> None:
    code = """
log = SegmentLog.open(arguments[0], entry_of=entry_of, durability="relaxed")
log.enqueue(batch_of(b"x"))
"""
    assert output(start(code, str(tmp_path / "s"))) == ""
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, read_only=True)
    assert records_of(log) == [b"x"]
    log.close()


def test_d25_the_log_is_hardly_larger_than_its_records(tmp_path: Path) -> None:
    log = SegmentLog.open(tmp_path / "s", entry_of=entry_of, system=SlowSync())
    for n in range(1000):
        log.wait(log.enqueue(batch_of(n.to_bytes(4, "little") * 256)))
    log.close()
    assert sum(path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file()) <= 1.3 * 1000 * 1024
