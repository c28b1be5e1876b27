"""An append-only log of records in a directory: atomic frames, group commit, recovery that tells a torn tail from damage.

It knows bytes and index entries, nothing of nodes. Little endian throughout::

    FORMAT                  format version and the store's uuid, whose crc seeds every other checksum
    LOCK                    flock of the one writer
    segments/NNNNNNNN.seg   frames, one after the other; zeros after the last are preallocation
    segments/NNNNNNNN.idx   blocks of ENTRY rows for frames known to be synced; derived, may be deleted

    frame   header: magic, version, segment, number of records, sequence, synced, length of the body, crc of this at its offset
            body:   each record behind its head: magic, length, crc
            footer: crc of all heads, continued from the header's

A frame is whole or absent: every byte of it is under a checksum. ``synced`` is the highest sequence that was known to be synced
when the frame was written.

Torn or damaged. Sequences count up by one. A bad frame ``e`` was synced, and is damage, if any of this is true:

- a frame with a valid header says ``synced >= e`` (any later frame does, unless ``e`` was still unsynced when it was written);
- a later segment exists: a segment is synced to its end before the next is created;
- a sidecar block, valid by its own checksum, covers ``e``: a block is written after the sync that it reports has returned.

Otherwise nobody was told that ``e`` is durable, with one exception, and it is a torn tail: cut, counted, never silent. The
exception is the last frame of a log whose writer was killed after the sync and before it wrote anything more: if that frame
rots, its bytes are those of a write that never finished, and no reader can tell. A clean close leaves an empty frame, whose
``synced`` covers all before it, and a sidecar, so that there it is damage too. What a crash left valid is written again and
synced before it counts, because a page cache may hold what a failed sync of the last process never stored.

A sidecar cannot make bad data look sound: its rows carry the crc of each record and are believed for nothing else (``read``
checks the record itself); its block is ignored unless its checksum, its sequences, and the header of the last frame it covers
agree with the segment; and that a segment is shorter than its sidecar is damage. What it does is to put off finding damage from
opening to reading; ``strict=False`` opens without it.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, Final, NamedTuple
from weakref import WeakSet
from zlib import crc32

import numpy as np
import numpy.typing as npt

from sessiontree.backends.base import Durability, Overtaken, WriteLost
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, IncompatibleStore, LimitExceeded, StoreClosed, StoreFailed, StoreLocked
from sessiontree.locks import new_lock

__all__ = ["ENTRY", "PREFIX_SIZE", "Durability", "SegmentLog"]

Entries = npt.NDArray[np.void]
Records = Sequence[tuple[bytes, bytes]]

# What the index keeps of a record: the prefix that its writer gives, then its place.
ENTRY: Final = np.dtype(
    [
        ("kind", "u1"),
        ("session", "<u4"),
        ("ordinal", "<u4"),
        ("parent", "<u4"),
        ("id", "V32"),
        ("key", "<u8"),
        ("segment", "<u4"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("crc", "<u4"),
    ]
)
_PLACE: Final = Struct("<IQII")
PREFIX_SIZE: Final = ENTRY.itemsize - _PLACE.size

VERSION: Final = 1
_HEADER: Final = Struct("<4sB3xIIQQII")
_HEAD: Final = Struct("<III")
_CRC: Final = Struct("<I")
_BLOCK: Final = Struct("<4sB3xIIQQQQQII")
_FRAME_MAGIC: Final = b"\xf5stf"
_BLOCK_MAGIC: Final = b"\xf5sti"
_FRAME_OVERHEAD: Final = _HEADER.size + _CRC.size

MAX_RECORD: Final = 2**28
MAX_BATCH: Final = 2**31
_FRAME_BYTES: Final = 2**20  # what one frame takes of what is pending, unless one batch alone is larger
_CHUNK: Final = 2**20
_BLOCK_ROWS: Final = 4096
_RESERVE: Final = 2**20
_LOCK_SECONDS: Final = 0.8
_POLL: Final = (0.002, 0.05)  # seconds between two looks of the background thread: after work, and at most
_PATIENCE: Final = 0.001
_CACHED_FILES: Final = 128
_MASK: Final = 0xFFFFFFFF
_HELD = 5120  # crc32 keeps the GIL up to this length
_SLICED = 2**16


def _checksum(data: bytes, seed: int) -> int:
    """crc32 that gives the GIL away only for long data: to get it back beside a busy thread costs 5 ms."""
    if len(data) <= _HELD or len(data) > _SLICED:
        return crc32(data, seed)
    view = memoryview(data)
    for start in range(0, len(data), _HELD):
        seed = crc32(view[start : start + _HELD], seed)
    return seed


# frames ---------------------------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """A place between two frames: what lies before it, and the last frame there."""

    segment: int = 0
    offset: int = 0
    sequence: int = 0
    records: int = 0
    frame: int = 0  # offset of the last frame in this segment
    frame_crc: int = 0
    fd: int = -1

    @property
    def marked(self) -> bool:
        """Whether the last frame is the empty one of a clean close."""
        return self.offset - self.frame == _FRAME_OVERHEAD


class _Frame(NamedTuple):
    first: int  # numbers of the batches in it
    last: int
    data: bytes
    rows: bytes
    end: _End  # behind it


class _Header(NamedTuple):
    records: int
    sequence: int
    synced: int
    length: int
    crc: int


class _Keys(NamedTuple):
    """What binds bytes to their store. Nothing that users store can hold a record's magic but by chance."""

    seed: int
    magic: int

    @classmethod
    def of(cls, store: bytes) -> _Keys:
        seed = crc32(store)
        return cls(seed, crc32(b"record", seed))


def _build(keys: _Keys, at: _End, synced: int, first: int, batches: Sequence[Records]) -> _Frame:
    seed, magic = keys
    parts: list[bytes] = [b""]
    rows: list[bytes] = []
    place = at.offset + _HEADER.size
    for records in batches:
        for record, prefix in records:
            length = len(record)
            crc = _checksum(record, seed ^ length)
            place += _HEAD.size
            parts.append(_HEAD.pack(magic, length, crc))
            parts.append(record)
            rows.append(prefix)
            rows.append(_PLACE.pack(at.segment, place, length, crc))
            place += length
    count = len(rows) // 2
    header = _HEADER.pack(_FRAME_MAGIC, VERSION, at.segment, count, at.sequence + 1, synced, place - at.offset - _HEADER.size, 0)[
        : -_CRC.size
    ]
    crc = crc32(header, (seed ^ at.offset) & _MASK)
    parts[0] = header + _CRC.pack(crc)
    parts.append(_CRC.pack(crc32(b"".join(parts[1::2]), crc)))
    end = _End(at.segment, place + _CRC.size, at.sequence + 1, at.records + count, at.offset, crc, at.fd)
    return _Frame(first, first + len(batches) - 1, b"".join(parts), b"".join(rows), end)


def _header(data: bytes, keys: _Keys, segment: int, offset: int) -> _Header | None:
    """The header that stands there, if it was written for this place. Raises IncompatibleStore for a newer version's."""
    if len(data) < _HEADER.size or data[:4] != _FRAME_MAGIC:
        return None
    _, version, at, count, sequence, synced, length, crc = _HEADER.unpack(data)
    if crc != crc32(data[: -_CRC.size], (keys.seed ^ offset) & _MASK) or at != segment:
        return None
    if version != VERSION:
        raise IncompatibleStore(f"segment {segment}, offset {offset}: a frame of version {version}; this reads {VERSION}")
    return _Header(count, sequence, synced, length, crc)


# files ----------------------------------------------------------------------------------------------------------------------


class _Window:
    """Buffered reads of one file, which may grow. Holds one chunk, or what one call asked for; ``forget`` drops it."""

    def __init__(self, system: System, fd: int) -> None:
        self._system = system
        self._fd = fd
        self._start = 0
        self._data = b""

    def forget(self) -> None:
        self._data = b""

    def size(self) -> int:
        return self._system.size(self._fd)

    def _fill(self, offset: int, length: int = _CHUNK) -> None:
        parts: list[bytes] = []
        got = 0
        while got < length and (part := self._system.pread(self._fd, length - got, offset + got)):
            parts.append(part)
            got += len(part)
        self._start, self._data = offset, parts[0] if len(parts) == 1 else b"".join(parts)

    def get(self, offset: int, length: int) -> bytes:
        """That many bytes, fewer at the end of the file."""
        start = offset - self._start
        if start < 0 or start + length > len(self._data):
            self._fill(offset, max(length, _CHUNK))
            start = 0
        return self._data[start : start + length]

    def find(self, pattern: bytes, start: int) -> int:
        """The first place of pattern at or after start; -1 without one."""
        while True:
            if not self._start <= start <= self._start + len(self._data) - len(pattern):
                self._fill(start)
            hit = self._data.find(pattern, start - self._start)
            if hit >= 0:
                return self._start + hit
            if len(self._data) < _CHUNK:
                return -1
            start = self._start + len(self._data) - len(pattern) + 1

    def filled(self, start: int) -> int:
        """Where the bytes from start on end, trailing zeros left out."""
        stop = start
        while data := self.get(start, _CHUNK):
            if used := len(data.rstrip(b"\0")):
                stop = start + used
            start += len(data)
        return stop


def _read_all(system: System, path: str) -> bytes | None:
    try:
        fd = system.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _Window(system, fd).get(0, system.size(fd))
    finally:
        system.close(fd)


def _write_new(system: System, path: str, data: bytes, *, sync: bool) -> None:
    """Put a whole file in place by renaming it. The name is durable after the directory's sync."""
    new = path + ".new"
    fd = system.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        _write(system, fd, data, 0)
        if sync:
            system.fdatasync(fd)
    finally:
        system.close(fd)
    system.rename(new, path)


def _write(system: System, fd: int, data: bytes, offset: int) -> None:
    done = system.pwrite(fd, data, offset)
    while done < len(data):
        more = system.pwrite(fd, memoryview(data)[done:], offset + done)
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += more


def _segment_path(directory: str, segment: int, suffix: str) -> str:
    return f"{directory}/{segment:08d}.{suffix}"


# sidecars -------------------------------------------------------------------------------------------------------------------


class _Cover(NamedTuple):
    """The valid blocks of one sidecar."""

    rows: list[memoryview]
    first: int  # sequences
    last: int
    records: int
    stop: int  # offset in the segment
    frame: int  # the last covered frame: its offset and the crc of its header
    frame_crc: int
    size: int  # bytes of the sidecar
    whole: bool  # nothing else is in the file


def _block(keys: _Keys, start: _End, stop: _End, rows: Entries) -> bytes:
    header = _BLOCK.pack(
        _BLOCK_MAGIC,
        VERSION,
        stop.segment,
        len(rows),
        start.sequence + 1,
        stop.sequence,
        start.offset,
        stop.offset,
        stop.frame,
        stop.frame_crc,
        0,
    )[: -_CRC.size]
    data = rows.tobytes()
    return header + _CRC.pack(crc32(data, crc32(header, keys.seed))) + data


def _read_cover(system: System, path: str, keys: _Keys, segment: int) -> _Cover | None:
    """What a sidecar covers; None for one that is missing or that starts with no valid block."""
    data = _read_all(system, path)
    if data is None:
        return None
    view = memoryview(data)
    cover: _Cover | None = None
    at = 0
    while at + _BLOCK.size <= len(view):
        magic, version, owner, count, first, last, start, stop, frame, frame_crc, crc = _BLOCK.unpack_from(view, at)
        body = at + _BLOCK.size
        rows = view[body : body + count * ENTRY.itemsize]
        if magic != _BLOCK_MAGIC or version != VERSION or owner != segment or len(rows) != count * ENTRY.itemsize:
            break
        if crc != crc32(rows, crc32(view[at : body - _CRC.size], keys.seed)):
            break
        if (start, first) != ((cover.stop, cover.last + 1) if cover else (0, first)):
            break
        at = body + len(rows)
        known = cover or _Cover([], first, 0, 0, 0, 0, 0, 0, False)
        known.rows.append(rows)
        cover = _Cover(known.rows, known.first, last, known.records + count, stop, frame, frame_crc, at, at == len(view))
    return cover


# scanning -------------------------------------------------------------------------------------------------------------------


class _Scan:
    """Reads on from ``at``. Never writes. What it found since ``take`` was last called is in ``rows``."""

    def __init__(
        self, system: System, directory: str, keys: _Keys, entry_of: Callable[[bytes], bytes], strict: bool, at: _End
    ) -> None:
        self._system = system
        self._directory = directory
        self._keys = keys
        self._entry_of = entry_of
        self._strict = strict
        self.at = at
        self.synced = at.sequence
        self.torn = 0  # bytes after the last frame that are no frame
        self.sealed = False  # nothing may be appended to the last segment
        self.damaged: list[tuple[int, int, int]] = []
        self.tail: deque[_End] = deque()  # ends before the frames of this segment that are not known to be synced
        self.walked: list[tuple[_End, _End, _Cover | None]] = []  # of each segment: from, to, its sidecar
        self._rows: list[bytes | memoryview] = []
        self._gap = False  # sequences may jump: damage that was reported hides how many are missing
        self._covers: dict[int, _Cover | None] = {}
        self._checked = False  # the rest of this segment was looked at once
        self._sidecars: list[int] = []

    def take(self) -> list[bytes | memoryview]:
        rows, self._rows = self._rows, []
        return rows

    def walk(self) -> None:
        """Go on to the end of the log as it is now."""
        try:
            names = self._system.listdir(self._directory)
        except FileNotFoundError:
            return
        segments = sorted(int(name[:-4]) for name in names if name.endswith(".seg") and name[:-4].isdigit())
        self.walked = []
        self._covers = {}
        self._sidecars = [int(name[:-4]) for name in names if name.endswith(".idx") and name[:-4].isdigit()]
        if not self.at.segment and (segments or self._sidecars):
            self._enter(1)
        while self.at.segment:
            later = segments[-1:] > [self.at.segment]
            self._walk_segment(later, self.at.segment in segments)
            if not later:
                break
            self._enter(self.at.segment + 1)
        self._covers = {}

    def _enter(self, segment: int) -> None:
        self.at = self.at._replace(segment=segment, offset=0, frame=0, frame_crc=0)
        self.tail.clear()
        self._checked = False

    def _walk_segment(self, later: bool, exists: bool) -> None:
        segment = self.at.segment
        if not exists:
            proof = self._proof(None)
            if later or proof > self.at.sequence:
                self._damage(self.at.offset, self.at.offset, "the segment is missing")
                self._gap = self.sealed = True
                self.at = self.at._replace(sequence=max(self.at.sequence, 0 if later else proof))
            else:
                self.at = self.at._replace(segment=segment - 1)
            return
        fd = self._system.open(_segment_path(self._directory, segment, "seg"), os.O_RDONLY)
        try:
            window = _Window(self._system, fd)
            start, cover = self.at, None
            if start.offset:
                self._still(window)
            elif self._strict:
                cover = self._use_cover(window)
            while self._frame(window) or self._bad(window, later):
                pass
            if not start.offset:
                self.walked.append((start, self.at, cover))
        finally:
            self._system.close(fd)

    def _still(self, window: _Window) -> None:
        """A writer may take back a frame whose write failed after a reader found it whole."""
        header = _header(window.get(self.at.frame, _HEADER.size), self._keys, self.at.segment, self.at.frame)
        if header is None or header.crc != self.at.frame_crc:
            raise CorruptTree(
                f"segment {self.at.segment}, offset {self.at.frame}: a frame that was read is there no more; open the log again",
                segment=self.at.segment,
                offset=self.at.frame,
            )

    def _use_cover(self, window: _Window) -> _Cover | None:
        cover = self._cover(self.at.segment)
        if cover is None or cover.first != self.at.sequence + 1 or cover.stop > window.size():
            return None
        header = _header(window.get(cover.frame, _HEADER.size), self._keys, self.at.segment, cover.frame)
        if header is None or (header.sequence, header.crc) != (cover.last, cover.frame_crc):
            return None
        if cover.frame + _FRAME_OVERHEAD + header.length != cover.stop:
            return None
        self._rows.extend(cover.rows)
        count = self.at.records + cover.records
        self.at = _End(self.at.segment, cover.stop, cover.last, count, cover.frame, cover.frame_crc)
        self.synced = max(self.synced, cover.last)
        return cover

    def _frame(self, window: _Window) -> bool:
        """Read the frame at ``at`` if it is whole and the next in sequence."""
        at = self.at
        header = _header(window.get(at.offset, _HEADER.size), self._keys, at.segment, at.offset)
        if header is None or not self._next(header):
            return False
        rows: list[bytes] = []
        heads: list[bytes] = []
        place = at.offset + _HEADER.size
        stop = place + header.length
        for _ in range(header.records):
            found = self._record(window, place, stop)
            if found is None:
                return False
            head, row, place = found
            heads.append(head)
            rows.append(row)
        if place != stop or window.get(stop, _CRC.size) != _CRC.pack(crc32(b"".join(heads), header.crc)):
            return False
        self._rows.append(b"".join(rows))
        self._gap = False
        self.tail.append(at)
        self.at = _End(at.segment, stop + _CRC.size, header.sequence, at.records + header.records, at.offset, header.crc)
        self.synced = max(self.synced, header.synced)
        while self.tail and self.tail[0].sequence < self.synced:
            self.tail.popleft()
        return True

    def _next(self, header: _Header) -> bool:
        return header.sequence == self.at.sequence + 1 or (self._gap and header.sequence > self.at.sequence)

    def _record(self, window: _Window, place: int, stop: int) -> tuple[bytes, bytes, int] | None:
        """The record whose head stands at place, if it is whole: head, row, where it ends."""
        head = window.get(place, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, length, crc = _HEAD.unpack(head)
        place += _HEAD.size
        if magic != self._keys.magic or place + length > stop:
            return None
        record = window.get(place, length)
        if len(record) < length or crc32(record, self._keys.seed ^ length) != crc:
            return None
        row = self._entry_of(record) + _PLACE.pack(self.at.segment, place, length, crc)
        if len(row) != ENTRY.itemsize:
            raise ValueError(f"entry_of gave {len(row) - _PLACE.size} bytes; an entry's prefix has {PREFIX_SIZE}")
        return head, row, place + length

    def _bad(self, window: _Window, later: bool) -> bool:
        """No next frame stands at ``at``. False: the segment ends here. True: go on, behind damage or with a frame that came."""
        at = self.at
        if self._checked and not later and not any(window.get(at.offset, _HEADER.size)):
            return False
        stop = window.filled(at.offset)
        if stop == at.offset and later:
            return False
        if not later and self._proof(window) <= at.sequence:
            self.torn = stop - at.offset
            self._checked = True
            return False
        window.forget()  # a writer may have been in the middle of it
        if self._frame(window):
            return True
        cover = self._cover(at.segment)
        return self._skip(window, max(stop, min(cover.stop, window.size())) if cover else stop, later)

    def _proof(self, window: _Window | None) -> int:
        """A sequence known to be synced, from sidecars and from what stands behind ``at``: the first that is enough."""
        proof = self.synced
        for segment in self._sidecars:
            if segment >= self.at.segment and (cover := self._cover(segment)):
                proof = max(proof, cover.last)
        if window is not None and proof <= self.at.sequence:
            for _, header in self._headers(window, self.at.offset):
                if header.synced > self.at.sequence:
                    return header.synced
        return proof

    def _headers(self, window: _Window, start: int) -> Iterator[tuple[int, _Header]]:
        while (start := window.find(_FRAME_MAGIC, start)) >= 0:
            header = _header(window.get(start, _HEADER.size), self._keys, self.at.segment, start)
            if header is not None and header.sequence > self.at.sequence:
                yield start, header
            start += 1

    def _cover(self, segment: int) -> _Cover | None:
        if segment not in self._covers:
            path = _segment_path(self._directory, segment, "idx")
            self._covers[segment] = _read_cover(self._system, path, self._keys, segment)
        return self._covers[segment]

    def _damage(self, start: int, stop: int, what: str) -> None:
        segment = self.at.segment
        if self._strict:
            raise CorruptTree(
                f"segment {segment}, offset {start}: {what}; frame {self.at.sequence + 1} was synced",
                segment=segment,
                offset=start,
            )
        self.damaged.append((segment, start, stop))

    def _skip(self, window: _Window, stop: int, later: bool) -> bool:
        """Note the damage at ``at``, keep the records in it that are whole, and go behind it."""
        at = self.at
        start, header = next(self._headers(window, at.offset), (stop, None))
        if header is None or start > at.offset:
            self._salvage(window, at.offset, start)
            self.at = self.at._replace(offset=start)
            self._gap = True
        elif not self._next(header):
            self._damage(at.offset, at.offset, f"frame {header.sequence} stands here")
            self._gap = True
        else:
            body = at.offset + _HEADER.size
            self._salvage(window, body, min(body + header.length, window.size()), body + header.length + _CRC.size)
            end = at.offset + _FRAME_OVERHEAD + header.length
            self.at = self.at._replace(offset=end, sequence=header.sequence, frame=at.offset, frame_crc=header.crc)
        if header is None and not later:
            self.at = self.at._replace(sequence=max(self.at.sequence, self._proof(None)))
            self.sealed = True
        return header is not None

    def _salvage(self, window: _Window, start: int, stop: int, footer: int = 0) -> None:
        magic = _CRC.pack(self._keys.magic)
        rows: list[bytes] = []
        done, place = start, window.find(magic, start)
        gaps = 0
        while 0 <= place < stop:
            found = self._record(window, place, stop)
            if found is None:
                place = window.find(magic, place + 1)
                continue
            if place > done:
                self._damage(done, place, "no whole frame")
                gaps += 1
            rows.append(found[1])
            done = found[2]
            place = window.find(magic, done)
        if done < stop or not gaps:
            self._damage(done, max(stop, footer), "no whole frame")
        self._rows.append(b"".join(rows))
        self.at = self.at._replace(records=self.at.records + len(rows))


class _Table:
    """Rows that only grow. What a view shows is never written again."""

    def __init__(self) -> None:
        self._rows: Entries = np.empty(0, ENTRY)

    def put(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write rows from start on: to do it twice is to do it once."""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        new = np.frombuffer(data, ENTRY)
        stop = start + len(new)
        if not start:
            self._rows = new
        elif stop > len(self._rows) or not self._rows.flags.writeable:
            rows = np.empty(max(1024, stop + stop // 2), ENTRY)
            rows[:start] = self._rows[:start]
            rows[start:stop] = new
            self._rows = rows
        else:
            self._rows[start:stop] = new

    def view(self, count: int, start: int = 0) -> Entries:
        view = self._rows[start:count]
        view.flags.writeable = False
        return view


# the log --------------------------------------------------------------------------------------------------------------------

_SYSTEM: Final = System()
_open_logs: Final[WeakSet[SegmentLog]] = WeakSet()

_Lost = tuple[int, int, OSError]
# Number of the last batch that was taken; batches after it; the frame being written; batches that were rolled back.
# One tuple, put in place by one assignment: an interrupt, a signal handler or a fork finds this state or the next.
_Queue = tuple[int, list[Records], _Frame | None, tuple[_Lost, ...]]


class SegmentLog:
    """One writer's, or one reader's, view of the log. Thread-safe.

    Batches are numbered from 1 as they are enqueued and reach the disk in that order, each whole. One thread at a time writes:
    one that waits, or the background thread. A step that an interrupt cuts short is done again by the next, with the same bytes
    at the same place. After a failed sync, and under ``group`` and ``relaxed`` after a failed write, nothing is written any more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        entry_of: Callable[[bytes], bytes],
        durability: Durability,
        segment_bytes: int,
        strict: bool,
        system: System,
    ) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._segments = self._path + "/segments"
        self._entry_of = entry_of
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._strict = strict
        self._system = system
        self._pid = os.getpid()
        self._keys: _Keys | None = None
        self._lock_fd = -1
        self._mutex = new_lock()
        self._writer = new_lock()
        self._reader = new_lock()
        self._files: dict[int, int] = {}
        self._leader = 0  # the thread that writes
        self._gates: deque[Any] = deque()
        self._queue: _Queue = (0, [], None, ())
        self._refused = False  # enqueue raises _refuse()
        self._forked = False
        self._closed = False
        self._failure: tuple[str, OSError] | None = None
        self._table = _Table()
        self._end = _End()
        self._covered = _End()
        self._index_size = 0
        self._room = 0
        self._synced = 0
        self._written = 0
        self._durable = 0
        self._followed = 0
        self._due = 0
        self._crowd = 0  # batches in the last frame that was synced
        self._patience = 0.0
        self._scan: _Scan | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.recovered_bytes = 0
        self.damaged: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        entry_of: Callable[[bytes], bytes],
        read_only: bool = False,
        durability: Durability = "commit",
        segment_bytes: int = 64 * 2**20,
        strict: bool = True,
        system: System = _SYSTEM,
    ) -> SegmentLog:
        """Open the log in a directory, which a writer makes if its parent is there. A reader writes and makes nothing.

        entry_of: the prefix of a record's ENTRY, for records that no sidecar covers. durability: what ``wait`` and the background
        thread do; ``commit`` also rolls a failed write back. strict: damage raises CorruptTree; otherwise it is listed in
        ``damaged``, (segment, start, stop) each, and everything whole is served. Raises StoreLocked within a second,
        IncompatibleStore, CorruptTree, StoreFailed for a failing disk, and then has changed nothing that it could not read.
        """
        if durability not in ("commit", "group", "relaxed"):
            raise ValueError(f"durability {durability!r}: commit, group or relaxed")
        log = cls(path, entry_of, durability, segment_bytes, strict, system)
        try:
            log._open_reader() if read_only else log._open_writer()
        except OSError as error:
            log._release()
            raise StoreFailed(f"{log._path} cannot be opened: {error}", errno=error.errno) from error
        except BaseException:
            log._release()
            raise
        return log

    # what is there

    @property
    def durability(self) -> Durability:
        return self._durability

    @property
    def read_only(self) -> bool:
        """Whether this one never writes: it was opened so, or it is in a forked child."""
        return self._lock_fd < 0

    @property
    def enqueued(self) -> int:
        """The number of the last batch."""
        base, items, _, _ = self._queue
        return base + len(items)

    @property
    def durable(self) -> int:
        """The last number that is durable; all before it are too, but for those whose ``wait`` raises."""
        return self._durable

    def entries(self) -> Entries:
        """All records in commit order, read-only: the durable ones, under ``relaxed`` and for a reader the written ones."""
        count = self._end.records
        return self._table.view(count)

    def refresh(self) -> Entries:
        """The entries that came since the last call. A reader, or a forked child, looks on the disk."""
        with self._reader:
            if self._lock_fd < 0:
                self._follow()
            start, self._followed = self._followed, self._end.records
            return self._table.view(self._followed, start)

    def read(self, entry: Any) -> bytes:
        """The record of an entry, or of an index into ``entries()``, checked. Raises CorruptTree."""
        if isinstance(entry, (int, np.integer)):
            entry = self.entries()[entry]
        segment, offset, length, crc = entry.item()[-4:]
        if self._keys is None or self._closed:
            raise self._refuse()
        try:
            record = self._pread(segment, offset, length)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOENT):
                raise
            raise _damaged(segment, offset, str(error)) from error
        if len(record) != length or crc32(record, self._keys.seed ^ length) != crc:
            raise _damaged(segment, offset, f"the record of {length} bytes does not match its checksum")
        return record

    # writing

    def enqueue(self, records: Records, after: int = 0, told: Sequence[object] = (None,), expected: object = None) -> int:
        """Put a batch of (record, entry prefix) in line; it will be on the disk whole or not at all. Returns its number.

        ``after``: the number of a batch that it rests on. ``told``: its first entry must still be ``expected`` then. Makes no
        system call. Raises StoreFailed after a failure, WriteLost where what it rests on was lost, Overtaken where something came
        in between. No records: nothing is put in line.
        """
        batch = tuple(records)
        total = 0
        for record, prefix in batch:
            if len(prefix) != PREFIX_SIZE:
                raise ValueError(f"an entry prefix of {len(prefix)} bytes; it has {PREFIX_SIZE}")
            if len(record) > MAX_RECORD:
                raise LimitExceeded(f"a record of {len(record)} bytes; at most {MAX_RECORD}", value=len(record), limit=MAX_RECORD)
            total += _HEAD.size + len(record)
        if total > MAX_BATCH:
            raise LimitExceeded(f"a batch of {total} bytes; at most {MAX_BATCH}", value=total, limit=MAX_BATCH)
        with self._mutex:
            if self._refused:
                raise self._refuse()
            base, items, _, lost = self._queue
            if any(first <= after <= last for first, last, _ in lost):
                raise WriteLost(f"{self._path}: batch {after} was lost, and what was to be written rests on it")
            base, items, _, _ = self._queue  # anew: a signal handler may have come in since
            if told[0] is not expected:  # from here to the call nothing comes in between
                raise Overtaken(f"{self._path}: something else was put in line meanwhile")
            if batch:
                items.append(batch)
            return base + len(items)  # too high, never too low, if a signal handler came in between

    @property
    def failed(self) -> bool:
        """Whether nothing is written any more, for good."""
        return self._failure is not None

    @property
    def leading(self) -> bool:
        """Whether this thread is in the middle of writing, so that nothing that comes in here can wait."""
        return self._leader == threading.get_ident()

    def is_durable(self, number: int) -> bool | None:
        """Whether that batch is durable; False where it never will be, None while that is open."""
        try:
            return self._settled(number) or None
        except StoreFailed:
            return False

    def wait(self, number: int) -> None:
        """Return when that batch is durable. Raises StoreFailed if it never will be. An interrupt undoes nothing."""
        if number > self.enqueued:
            raise ValueError(f"batch {number} of {self.enqueued}")
        while not self._settled(number):
            if self._lead(number, sync=True):
                continue
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            if self._leader:
                gate.acquire()

    def flush(self) -> None:
        """Return when everything enqueued is durable; at once where nothing can be."""
        if self._failure is not None:
            raise self._failed()
        if self._refused:
            return
        number = self.enqueued
        for first, last, _ in reversed(self._queue[3]):
            if first <= number <= last:  # whoever waited for those was told
                number = first - 1
        self.wait(number)

    def close(self) -> None:
        """Make everything durable and let go. After a failure it only lets go, and raises StoreFailed once more.

        An interrupt leaves the log closing: it takes nothing new, and close may be called again.
        """
        if self._closed:
            return
        try:
            if self._thread is not None and not self._forked and self._pid == os.getpid():
                with self._mutex:
                    self._refused = True
                self._closing.set()
                self._thread.join()
                if self._failure is None:
                    while not self._lead(self.enqueued, sync=True):
                        time.sleep(0.001)
                    self._close_cleanly()
                if self._failure is not None:
                    raise self._failed()
        except Exception:
            self._release()
            raise
        self._release()

    # failures

    def _refuse(self) -> StoreFailed:
        if self._failure is not None:
            return self._failed()
        if self._closed or self._closing.is_set():
            return StoreClosed(f"{self._path} was closed")
        if self._forked or self._pid != os.getpid():
            return StoreFailed(f"{self._path}: a forked child may only read")
        return StoreFailed(f"{self._path} is open for reading only")

    def _failed(self) -> StoreFailed:
        assert self._failure is not None
        reason, error = self._failure
        reason = f"{self._path}: {reason}: {error}; it takes no more writes"
        return _never_durable(reason, self._durable + 1, self.enqueued, error)

    def _stop(self, reason: str, error: OSError) -> StoreFailed:
        with self._mutex:
            if self._failure is None:
                self._failure = reason, error
            self._refused = True
        return self._failed()

    def _reject(self, error: OSError) -> None:
        """Undo a failed write on the disk, and lose all batches in line: a later one may rest on an earlier one."""
        end = self._end
        if self._durability != "commit":
            raise self._stop("a write failed", error)
        try:
            if end.fd >= 0:
                self._system.ftruncate(end.fd, end.offset)
                self._system.fdatasync(end.fd)
                self._room = end.offset
        except OSError as second:
            raise self._stop(f"a write failed ({error}) and could not be undone", second) from error
        with self._mutex:
            base, items, frame, lost = self._queue
            first = base + 1 if frame is None else frame.first
            n = len(items)
            if lost and lost[-1][1] == first - 1:
                first, lost = lost[-1][0], lost[:-1]
            # No call between the slice and the assignment: no signal handler's batch falls in between.
            self._queue = (base + n, items[n:], None, (*lost, (first, base + n, error)))
            self._written = base + n

    def _settled(self, number: int) -> bool:
        for first, last, error in self._queue[3]:
            if first <= number <= last:
                raise _never_durable(f"{self._path}: a write failed and was undone: {error}", first, last, error)
        if number <= self._durable:
            return True
        if self._failure is not None or self._closed or self._forked:
            raise self._refuse()
        return False

    # one thread at a time

    def _lead(self, number: int, *, sync: bool) -> bool:
        """Write until that batch is written, or durable if sync is asked for, or a write fails. False: another thread writes."""
        me = threading.get_ident()
        claimed = False
        try:
            if self._leader:
                if self._leader == me:
                    raise RuntimeError("a signal handler or finalizer may enqueue, not wait, while its thread commits")
                return False
            claimed, self._leader = True, me  # threads do not switch between this and the look before; the lock is what counts
            with self._writer:
                if self._pid != os.getpid():
                    raise self._refuse()
                self._write_until(number, sync and self._durability == "relaxed")
            return True
        finally:
            if claimed:
                self._leader = 0
                self._wake()

    def _wake(self) -> None:
        gates = self._gates
        while gates:
            try:
                gates.popleft().release()
            except IndexError:
                return

    def _write_until(self, number: int, sync_after: bool) -> None:
        while self._written < number and self._failure is None and self._step():
            pass
        if sync_after and self._failure is None and self._durable < number:
            self._sync()

    def _step(self) -> bool:
        """Write one frame. False: nothing was in line, or what was is lost."""
        try:
            frame = self._queue[2]
            if frame is None:
                self._gather()
                frame = self._stage()
            if frame is None:
                return False
            if frame.end is not self._end:  # an interrupt may have come between that and the rest of _publish
                self._reserve(frame.end.offset)
                _write(self._system, frame.end.fd, frame.data, frame.end.frame)
        except OSError as error:
            self._reject(error)
            return False
        if self._durability != "relaxed":
            began = time.perf_counter()
            self._sync_fd(frame.end.fd)
            self._patience = min(_PATIENCE, (time.perf_counter() - began) / 2)
            self._crowd = frame.last - frame.first + 1
        self._publish(frame)
        return True

    def _gather(self) -> None:
        """Let the threads that the last commit woke enqueue again, for half the time of a sync at most: they share the next."""
        if self._crowd > 1:
            deadline = time.perf_counter() + self._patience
            while len(self._queue[1]) < self._crowd and time.perf_counter() < deadline:
                time.sleep(0)

    def _stage(self) -> _Frame | None:
        """Take what is in line, up to _FRAME_BYTES, and make its frame, in a new segment if this one is full."""
        assert self._keys is not None
        base, items, _, _ = self._queue
        n, size = 0, _FRAME_OVERHEAD
        for batch in items:
            more = sum([_HEAD.size + len(record) for record, _ in batch])
            if n and size + more > _FRAME_BYTES:
                break
            n += 1
            size += more
        if not n:
            return None
        end = self._end
        if end.fd < 0 or (end.offset and end.offset + size > self._segment_bytes):
            self._roll()
        frame = _build(self._keys, self._end, self._synced, base + 1, items[:n])
        with self._mutex:
            base, items, _, lost = self._queue
            self._queue = (base + n, items[n:], frame, lost)
        return frame

    def _publish(self, frame: _Frame) -> None:
        self._table.put(frame.end.records - len(frame.rows) // ENTRY.itemsize, [frame.rows])
        self._end = frame.end
        if self._durability != "relaxed":
            self._synced = frame.end.sequence
            self._durable = frame.last
        self._written = frame.last
        with self._mutex:
            base, items, _, lost = self._queue
            self._queue = (base, items, None, lost)
        self._wake()

    def _sync(self) -> None:
        """Make what is written durable."""
        end, written = self._end, self._written
        if end.fd >= 0 and self._synced < end.sequence:
            self._sync_fd(end.fd)
        self._synced, self._durable = end.sequence, written

    def _sync_fd(self, fd: int) -> None:
        try:
            self._system.fdatasync(fd)
        except OSError as error:
            raise self._stop("a sync failed", error) from error

    def _reserve(self, stop: int) -> None:
        if stop <= self._room:
            return
        room = max(stop, min(stop + max(_RESERVE, stop), self._segment_bytes))
        start = max(self._room, self._end.offset)
        try:
            self._system.fallocate(self._end.fd, start, room - start)
            self._room = room
        except OSError:
            self._room = sys.maxsize  # the write will tell

    def _roll(self) -> None:
        """Seal this segment, synced to its end, and start the next one, whose name is synced before it is used."""
        end, system = self._end, self._system
        if end.fd >= 0:
            self._sync()
            self._index()
            system.ftruncate(end.fd, end.offset)
            self._sync_fd(end.fd)
        fd = system.open(_segment_path(self._segments, end.segment + 1, "seg"), os.O_RDWR | os.O_CREAT)
        try:
            system.fsync_dir(self._segments)
        except OSError as error:
            system.close(fd)
            raise self._stop("a sync of the directory failed", error) from error
        self._room = 0
        self._index_size = 0
        self._end = self._covered = end._replace(fd=fd, segment=end.segment + 1, offset=0, frame=0, frame_crc=0)
        if end.fd >= 0:
            with suppress(OSError):
                system.close(end.fd)

    def _index(self, *, sync: bool = False) -> None:
        """Bring the sidecar of this segment up to what is synced. One that fails is left alone: the next open mends it."""
        start, end = self._covered, self._end
        if self._index_size < 0 or end.sequence > self._synced or end.sequence == start.sequence:
            return
        try:
            self._index_size = self._append_block(start, end, self._index_size, sync)
            self._covered = end
        except OSError:
            self._index_size = -1

    def _append_block(self, start: _End, end: _End, size: int, sync: bool = False) -> int:
        assert self._keys is not None
        path = _segment_path(self._segments, end.segment, "idx")
        data = _block(self._keys, start, end, self._table.view(end.records, start.records))
        if not size:
            _write_new(self._system, path, data, sync=sync)
            return len(data)
        fd = self._system.open(path, os.O_RDWR)
        try:
            _write(self._system, fd, data, size)
            if sync:
                self._system.fdatasync(fd)
        finally:
            self._system.close(fd)
        return size + len(data)

    def _close_cleanly(self) -> None:
        """Leave the mark that all is synced, and the sidecar. Both are extra: that they fail loses nothing."""
        assert self._keys is not None
        end = self._end
        if end.fd < 0:
            return
        with self._writer:
            try:
                if not end.marked:
                    frame = _build(self._keys, end, self._synced, 0, ())
                    _write(self._system, end.fd, frame.data, end.offset)
                    self._system.ftruncate(end.fd, frame.end.offset)
                    self._system.fdatasync(end.fd)
                    self._end = frame.end
                    self._synced = frame.end.sequence
                self._index(sync=True)
                self._system.fsync_dir(self._segments)
            except OSError:
                return

    # the background thread

    def _run(self) -> None:
        pause, longest = _POLL
        while self._failure is None and not self._closing.wait(pause):
            try:
                busy = self._tend()
            except StoreFailed:
                continue
            except Exception as error:
                self._stop("the background thread failed", OSError(errno.EIO, repr(error)))
                continue
            pause = _POLL[0] if busy else min(2 * pause, longest)
        self._wake()

    def _tend(self) -> bool:
        """Write what is in line; under ``commit`` only what nobody wrote since the last look. True: there was something."""
        enqueued = self.enqueued
        due, self._due = self._due if self._durability == "commit" else enqueued, enqueued
        busy = self._written < enqueued
        if self._written < due:
            self._lead(due, sync=False)
        if self._end.records - self._covered.records >= _BLOCK_ROWS:
            with self._writer:
                self._index()
        if not self._leader:
            self._wake()
        return busy

    # opening and letting go

    def _open_reader(self) -> None:
        self._refused = True
        self._follow()
        self._followed = self._end.records

    def _follow(self) -> None:
        if self._closed:
            raise self._refuse()
        if self._keys is None and not self._identify():
            return
        assert self._keys is not None
        if self._scan is None:
            self._scan = _Scan(self._system, self._segments, self._keys, self._entry_of, self._strict, self._end._replace(fd=-1))
        scan, start = self._scan, self._end.records
        try:
            scan.walk()
        finally:
            if rows := scan.take():
                self._table.put(start, rows)
            self._end = scan.at
            self.damaged = tuple(scan.damaged)

    def _open_writer(self) -> None:
        system = self._system
        system.mkdir(self._path)
        names = set(system.listdir(self._path))
        if not self._identify() and names - {"LOCK", "FORMAT", "FORMAT.new"}:
            raise IncompatibleStore(f"{self._path} holds other things than a store")
        self._take_lock()
        if not self._identify():
            self._format()
        system.fsync_dir(self._path)
        with suppress(PermissionError):  # a parent that may not be read: its owner made this directory, and synced it or not
            system.fsync_dir(os.path.dirname(self._path))
        system.mkdir(self._segments)
        system.fsync_dir(self._path)
        self._recover()
        _open_logs.add(self)
        self._thread = threading.Thread(target=self._run, name="segment-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _take_lock(self) -> None:
        self._lock_fd = self._system.open(self._path + "/LOCK", os.O_RDWR | os.O_CREAT)
        _open_logs.add(self)
        deadline = time.monotonic() + _LOCK_SECONDS
        while not self._system.flock(self._lock_fd):
            if time.monotonic() > deadline:
                raise StoreLocked(f"{self._path}: another process, or another log of this one, writes to it")
            time.sleep(0.01)

    def _identify(self) -> bool:
        """Read FORMAT; False where there is none."""
        data = _read_all(self._system, self._path + "/FORMAT")
        if data is None:
            return False
        words = data.split()
        if words[:2] != [b"sessiontree", b"log"] or len(words) < 3:
            raise IncompatibleStore(f"{self._path}/FORMAT is not that of a log")
        if words[2] != b"%d" % VERSION:
            raise IncompatibleStore(f"{self._path} has format {words[2].decode(errors='replace')}; this reads {VERSION}")
        body, _, crc = data.rstrip(b"\n").rpartition(b" ")
        if len(words) != 5 or crc != b"%08x" % crc32(body) or not data.endswith(b"\n"):
            raise CorruptTree(f"{self._path}/FORMAT does not match its checksum")
        self._keys = _Keys.of(words[3])
        return True

    def _format(self) -> None:
        body = b"sessiontree log %d %s" % (VERSION, uuid.uuid4().hex.encode())
        _write_new(self._system, self._path + "/FORMAT", body + b" %08x\n" % crc32(body), sync=True)
        self._identify()

    def _recover(self) -> None:
        """Find the end of the log, cut what is torn, and make the rest durable again."""
        assert self._keys is not None
        system = self._system
        scan = _Scan(system, self._segments, self._keys, self._entry_of, self._strict, _End())
        scan.walk()
        end = scan.at
        if rows := scan.take():
            self._table.put(0, rows)
        self.damaged = tuple(scan.damaged)
        if end.segment and not scan.sealed and not any(segment == end.segment for segment, _, _ in scan.damaged):
            fd = system.open(_segment_path(self._segments, end.segment, "seg"), os.O_RDWR)
            self._end = end = end._replace(fd=fd)
            self._renew(fd, scan)
            self._room = system.size(fd)
            self.recovered_bytes = scan.torn
        self._end = end
        self._followed = end.records
        self._synced = end.sequence
        self._covered = end._replace(offset=0)
        system.fsync_dir(self._segments)
        self._rebuild_index(scan)

    def _renew(self, fd: int, scan: _Scan) -> None:
        """Cut the torn tail, and store again what is not known to be synced."""
        system, end = self._system, scan.at
        if scan.torn:
            system.ftruncate(fd, end.offset)
        window = _Window(system, fd)
        at = scan.tail[0].offset if scan.tail else end.offset
        while at < end.offset:
            data = window.get(at, min(_CHUNK, end.offset - at))
            if not data:
                raise _damaged(end.segment, at, "the file was cut while it was opened")
            _write(system, fd, data, at)
            at += len(data)
        system.fdatasync(fd)

    def _rebuild_index(self, scan: _Scan) -> None:
        """Write the sidecars that are missing or fall short, but for the last segment's if it only has to grow."""
        damaged = {segment for segment, _, _ in scan.damaged}
        for start, stop, cover in scan.walked:
            if stop.segment in damaged or stop.sequence == start.sequence:
                continue
            current = stop.segment == self._end.segment
            covered, size = start, 0
            if cover is not None and cover.whole:
                covered = _End(stop.segment, cover.stop, cover.last, start.records + cover.records, cover.frame, cover.frame_crc)
                size = cover.size
            try:
                if size == 0 or (covered.sequence < stop.sequence and not current):
                    size, covered = self._append_block(covered, stop, size), stop
            except OSError:
                size = -1
            if current:
                self._covered, self._index_size = covered, size

    def _pread(self, segment: int, offset: int, length: int) -> bytes:
        system = self._system
        fd = self._files.get(segment)
        if fd is not None:
            return system.pread(fd, length, offset)
        fd = system.open(_segment_path(self._segments, segment, "seg"), os.O_RDONLY)
        if len(self._files) < _CACHED_FILES and self._files.setdefault(segment, fd) == fd:
            return system.pread(fd, length, offset)
        try:
            return system.pread(fd, length, offset)
        finally:
            system.close(fd)

    def _release(self) -> None:
        """Close every descriptor; the lock last."""
        self._closed = not self._forked
        atexit.unregister(self.close)
        _open_logs.discard(self)
        files, self._files = self._files, {}
        for fd in (*files.values(), self._end.fd, self._lock_fd):
            if fd >= 0:
                self._system.close(fd)
        self._end = self._end._replace(fd=-1)
        self._lock_fd = -1

    def _after_fork(self) -> None:
        """In the child: no descriptor of the parent's, no writing. The lock stays the parent's."""
        self._forked = self._refused = True
        self._leader = 0
        self._release()
        self._queue = (self._queue[0], [], None, self._queue[3])


def _never_durable(reason: str, first: int, last: int, error: OSError) -> StoreFailed:
    failed = StoreFailed(f"{reason}; never durable: {first} to {last}", numbers=range(first, last + 1), errno=error.errno)
    failed.__cause__ = error
    return failed


def _damaged(segment: int, offset: int, what: str) -> CorruptTree:
    return CorruptTree(f"segment {segment}, offset {offset}: {what}", segment=segment, offset=offset)


def _fork() -> None:
    for log in list(_open_logs):
        log._after_fork()


os.register_at_fork(after_in_child=_fork)
