"""A bundle: one file that holds what a log does, whole or not at all.

A line says what it is, frames of a log's segment 1 follow::

    sessiontree bundle 1 UUID CRC                             frames, at their offsets in this file
    sessiontree bundle 1 UUID zstd FRAMES STREAM CRC32 CRC    a zstd stream of STREAM bytes and that crc: FRAMES bytes of the same

The last crc is that of the line before it; the uuid seeds the checksums of the frames, as a store's does. Only the last frame is
empty, and its ``synced`` covers all before it, so that a bundle that was cut is told from a whole one. Everything is checked when a
bundle is opened; records are read, and checked again, when they are asked for. What is compressed is expanded into a temporary file
that has no name, as much as the line says and never more than the reader allows.

Nothing here knows nodes. A bundle gets its name when all of it is on disk.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree.backends.base import Bytes, Durability, Lease, Records
from sessiontree.backends.frames import (
    CHUNK,
    CRC,
    ENTRY,
    FRAME_OVERHEAD,
    HEAD,
    HEADER,
    MAX_RECORD,
    PLACE,
    End,
    Entries,
    Keys,
    Window,
    build_frame,
    checksum,
    crc32,
    header_at,
    is_sound,
    size_of,
    write_all,
)
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, IncompatibleStore, LimitExceeded, NeedsExtra, StoreClosed, StoreFailed, Unsupported

VERSION: Final = 1
SEGMENT: Final = 1
_START: Final = b"sessiontree bundle "
_LONGEST_LINE: Final = 256
_DIGITS: Final = 20
_LINE: Final = re.compile(rb"sessiontree bundle \d+ ([0-9a-f]{32})(?: zstd (\d{20}) (\d{20}) ([0-9a-f]{8}))?")
_FRAME_BYTES: Final = 2**20
_MOST_WINDOW: Final = 2**25  # bytes that a zstd stream may ask for to be decoded


def zstandard() -> Any:
    """The optional package. Raises NeedsExtra where it is not installed."""
    try:
        import zstandard as package  # noqa: PLC0415
    except ImportError as error:
        raise NeedsExtra("zstd needs the package zstandard: pip install 'sessiontree[zstd]'", extra="zstd") from error
    return package


class _Packed(NamedTuple):
    """A stream: bytes of the frames in it, bytes of itself, and their crc."""

    frames: int = 0
    size: int = 0
    crc: int = 0


def _line(store: bytes, stream: _Packed | None) -> bytes:
    body = _START + b"%d %s" % (VERSION, store)
    if stream is not None:
        body += b" zstd %0*d %0*d %08x" % (_DIGITS, stream.frames, _DIGITS, stream.size, stream.crc)
    return body + b" %08x\n" % crc32(body)


class BundleWriter:
    """A bundle that is being written, under another name until :meth:`finish`. What the disk refuses raises StoreFailed.

    ``identity``: 16 bytes that tell it from others; the same records under the same ones give the same bytes.
    """

    def __init__(self, system: System, path: str, identity: bytes, *, compress: bool = False) -> None:
        self._system = system
        self._path = path
        self._store = uuid.UUID(bytes=identity).hex.encode()
        self._compressor = zstandard().ZstdCompressor().compressobj() if compress else None
        self._keys = Keys.of(self._store)
        self._records: list[tuple[Bytes, bytes]] = []
        self._bytes = 0
        self._temporary = f"{path}.{uuid.uuid4().hex[:8]}.new"
        line = _line(self._store, _Packed() if compress else None)
        self._start = self._size = len(line)
        self._crc = 0  # of a stream
        self._end = End(SEGMENT, len(line))
        self._fd = -1
        try:
            self._fd = system.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_all(system, self._fd, (line,), 0)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error

    def add(self, record: Bytes) -> None:
        """Put a record, whole or in parts, behind those before it."""
        self._records.append((record, b""))
        self._bytes += size_of(record)
        if self._bytes >= _FRAME_BYTES:
            self._frame()

    def _frame(self, synced: int = 0) -> None:
        frame = build_frame(self._keys, self._end, synced, 0, (self._records,))
        self._records, self._bytes, self._end = [], 0, frame.end
        self._write(frame.parts if self._compressor is None else tuple(map(self._compressor.compress, frame.parts)))

    def _write(self, parts: tuple[bytes, ...]) -> None:
        try:
            write_all(self._system, self._fd, parts, self._size)
        except OSError as error:
            raise self._failed(error) from error
        self._size += sum(map(len, parts))
        if self._compressor is not None:
            for part in parts:
                self._crc = crc32(part, self._crc)

    def finish(self) -> int:
        """Close the bundle, store it, and give it its name: how many bytes it has."""
        if self._records:
            self._frame()
        self._frame(self._end.sequence)
        system = self._system
        if self._compressor is not None:
            self._write((self._compressor.flush(),))
        try:
            if self._compressor is not None:
                stream = _Packed(self._end.offset - self._start, self._size - self._start, self._crc)
                write_all(system, self._fd, (_line(self._store, stream),), 0)
            system.fdatasync(self._fd)
            fd, self._fd = self._fd, -1
            system.close(fd)
            system.rename(self._temporary, self._path)
            system.fsync_dir(os.path.dirname(self._path) or ".")
        except OSError as error:
            raise self._failed(error) from error
        return self._size

    def abandon(self) -> None:
        """Leave nothing behind, if it has no name yet."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                self._system.close(fd)
        with suppress(OSError):
            self._system.unlink(self._temporary)

    def _failed(self, error: OSError) -> StoreFailed:
        return StoreFailed(f"the bundle {self._path} cannot be written: {error.strerror}", path=self._path, errno=error.errno)


class BundleFile:
    """The records of a bundle: a :class:`~sessiontree.backends.base.Log` that nothing is added to. Any thread may read.

    ``entry_of``: what an index is to know of a record, as for a log. ``max_bytes``: the most that a compressed one may expand to.

    Raises IncompatibleStore for what is no bundle or one of a newer version, CorruptTree for damage anywhere in it, LimitExceeded
    above ``max_bytes``, StoreFailed where it cannot be read, Unsupported for a compressed one without the package for it.
    """

    durability: Durability = "relaxed"
    recovered_bytes = 0
    costly = False
    durable = 0
    read_only = True
    failed = False
    leading = False
    lag: tuple[int, int] = (0, 0)
    damaged: tuple[tuple[int, int, int], ...] = ()
    losses: tuple[tuple[int, int, int], ...] = ()
    first = SEGMENT
    records = 0
    _fd = -1

    def __init__(self, system: System, path: str, entry_of: Callable[[bytes], bytes], max_bytes: int) -> None:
        self._path = path
        self._system = system
        try:
            self._fd = system.open(path, os.O_RDONLY)
            self.size: int = system.size(self._fd)
            store, start, packed = self._identify(system.pread(self._fd, _LONGEST_LINE, 0))
            self.compressed: bool = packed is not None
            self._keys = Keys.of(store)
            size = self.size if packed is None else self._expand(start, packed, max_bytes)
            rows = self._walk(start, size, entry_of)
        except OSError as error:
            self.close()
            raise StoreFailed(f"the bundle {path} cannot be read: {error.strerror}", path=path, errno=error.errno) from error
        except BaseException:
            self.close()
            raise
        self._entries: Entries = np.frombuffer(b"".join(rows), ENTRY)

    def _identify(self, data: bytes) -> tuple[bytes, int, _Packed | None]:
        """Whose it is, where frames or a stream begin, and what the stream is, if it is one."""
        line, end, _ = data.partition(b"\n")
        if not line.startswith(_START):
            raise IncompatibleStore(f"{self._path} is no bundle", path=self._path)
        version = line[len(_START) :].split(b" ")[0]
        if version != b"%d" % VERSION:
            shown = version.decode(errors="replace")
            raise IncompatibleStore(f"{self._path} is a bundle of format {shown}; this reads {VERSION}", path=self._path)
        body, _, crc = line.rpartition(b" ")
        if not end or crc != b"%08x" % crc32(body):
            raise CorruptTree(f"the first line of {self._path} does not match its checksum", path=self._path)
        found = _LINE.fullmatch(body)
        if found is None:
            raise IncompatibleStore(f"{self._path} is a bundle of a later kind: {body.decode(errors='replace')}", path=self._path)
        store, frames, size, stream_crc = found.groups()
        packed = None if frames is None else _Packed(int(frames), int(size), int(stream_crc, 16))
        return store, len(line) + 1, packed

    def _expand(self, start: int, packed: _Packed, max_bytes: int) -> int:
        """Put what a stream holds in a file that has no name, at the same offset; where it ends."""
        frames = packed.frames
        if start + packed.size != self.size:
            raise self._cut(self.size, f"{start + packed.size} bytes were written")
        if frames > max_bytes:
            raise LimitExceeded(
                f"{self._path} expands to {frames} bytes; max_bytes is {max_bytes}", value=frames, limit=max_bytes, path=self._path
            )
        package, source, crc, done = zstandard(), _Stream(self._system, self._fd, start), 0, 0
        while data := source.read(CHUNK):
            crc = crc32(data, crc)
        if crc != packed.crc:
            raise CorruptTree(f"the stream in {self._path} does not match its checksum", path=self._path)
        source = _Stream(self._system, self._fd, start)
        with tempfile.TemporaryFile(buffering=0) as expanded:
            expanded.seek(start)
            try:
                reader = package.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(source, closefd=False)
                while done <= frames and (data := reader.read(min(CHUNK, frames - done + 1))):
                    done += len(data)
                    left = memoryview(data)
                    while left:
                        left = left[expanded.write(left) :]
            except package.ZstdError as error:
                raise CorruptTree(f"the stream in {self._path} is damaged: {error}", path=self._path) from error
            if done != frames:
                raise CorruptTree(f"the stream in {self._path} has not the {frames} bytes that it should", path=self._path)
            before, self._fd = self._fd, os.dup(expanded.fileno())
        self._system.close(before)
        self._system = System()
        return start + frames

    def _walk(self, start: int, size: int, entry_of: Callable[[bytes], bytes]) -> list[bytes]:
        """The rows of all records, every byte of every frame checked."""
        window = Window(self._system, self._fd)
        seed, magic, _ = self._keys
        rows: list[bytes] = []
        at, sequence = start, 0
        while True:
            header = header_at(window.get(at, HEADER.size), self._keys, SEGMENT, at)
            if at + FRAME_OVERHEAD + (0 if header is None else header.length) > size:
                raise self._cut(size, "its last frame is missing")
            if header is None or header.sequence != sequence + 1:
                raise self._damaged(at, "no frame")
            sequence += 1
            place = at + HEADER.size
            stop = place + header.length
            heads: list[bytes] = []
            for _ in range(header.records):
                head = window.get(place, HEAD.size)
                if len(head) < HEAD.size:
                    raise self._damaged(place, "no record")
                found, length, crc = HEAD.unpack(head)
                place += HEAD.size
                if found != magic or place + length > stop or length > MAX_RECORD:
                    raise self._damaged(place - HEAD.size, "no record")
                record = window.get(place, length)
                if checksum(record, seed ^ length) != crc:
                    raise self._damaged(place, f"the record of {length} bytes does not match its checksum")
                heads.append(head)
                rows.append(entry_of(record) + PLACE.pack(SEGMENT, place, length, crc))
                place += length
            if place != stop or window.get(stop, CRC.size) != CRC.pack(crc32(b"".join(heads), header.crc)):
                raise self._damaged(at, "no whole frame")
            at = stop + CRC.size
            if not header.records:
                break
        if header.synced != sequence - 1 or at != size:
            raise self._damaged(at, f"the bundle ends here, and its file after {size} bytes")
        return rows

    def _cut(self, size: int, why: str) -> CorruptTree:
        return CorruptTree(f"{self._path} was cut, or never finished: it ends after {size} bytes, {why}", path=self._path)

    def _damaged(self, offset: int, what: str) -> CorruptTree:
        return CorruptTree(f"{self._path}, offset {offset}: {what}", path=self._path, offset=offset)

    # as a log

    def entries(self) -> Entries:
        return self._entries

    def refresh(self) -> Entries:
        return self._entries[:0]

    def read(self, known: Any) -> bytes:
        offset, length, crc = known.item()[-3:]
        return self._read(offset, length, crc, self._pread)

    def read_all(self, entries: Entries) -> Iterator[bytes]:
        """The records of entries in order; those that lie side by side are read together."""
        window = Window(self._system, self._fd)
        for offset, length, crc in entries[["offset", "length", "crc"]].tolist():
            yield self._read(offset, length, crc, window.get)

    def reader(self) -> Callable[[int], bytes]:
        """A function that gives the record of a place among the entries: one for each thread, best asked in their order."""
        window = Window(self._system, self._fd)
        places = [array("Q", self._entries[name].astype("<u8").tobytes()) for name in ("offset", "length", "crc")]
        offsets, lengths, crcs = places
        return lambda place: self._read(offsets[place], lengths[place], crcs[place], window.get)

    def _pread(self, offset: int, length: int) -> bytes:
        return self._system.pread(self._fd, length, offset)

    def _read(self, offset: int, length: int, crc: int, get: Callable[[int, int], bytes]) -> bytes:
        if self._fd < 0:
            raise StoreClosed(f"the bundle {self._path} was closed")
        try:
            record = get(offset, length)
        except OSError as error:
            raise StoreFailed(f"the bundle {self._path} cannot be read: {error.strerror}", errno=error.errno) from error
        if not is_sound(record, length, crc, self._keys.seed):
            raise self._damaged(offset, f"the record of {length} bytes does not match its checksum")
        return record

    @property
    def lease(self) -> Lease:
        """Itself: as long as it is open, it is there."""
        return self

    def enqueue(self, records: Records, after: int = 0, told: Sequence[object] = (None,), expected: object = None) -> int:
        raise Unsupported(f"the bundle {self._path} is only read")

    def is_durable(self, number: int) -> bool | None:
        return True

    def wait(self, number: int) -> None:
        """There is nothing to wait for."""

    def relieve(self) -> None:
        """There is nothing to help with."""

    def flush(self) -> None:
        """There is nothing to write."""

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)

    def __del__(self) -> None:
        self.close()


class _Stream:
    """The rest of a file, to be read once."""

    def __init__(self, system: System, fd: int, offset: int) -> None:
        self._system = system
        self._fd = fd
        self._offset = offset

    def read(self, count: int) -> bytes:
        data = self._system.pread(self._fd, count, self._offset)
        self._offset += len(data)
        return data
