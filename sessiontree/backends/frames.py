"""The bytes of a log: frames of records in segments, and the sidecars that say where the records are.

What they look like stands at the head of :mod:`sessiontree.backends.segment_log`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sessiontree.backends.base import Bytes, Records
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, IncompatibleStore

try:  # the same CRC-32, nine times as fast
    from isal import isal_zlib as zlib
except ImportError:
    import zlib  # type: ignore[no-redef]


class Crc32(Protocol):
    """The CRC-32 of bytes that follow those whose CRC-32 is ``value``."""

    def __call__(self, data: bytes | memoryview, value: int = 0, /) -> int: ...


crc32: Crc32 = zlib.crc32

Entries = npt.NDArray[np.void]

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
PLACE: Final = Struct("<IQII")
PREFIX_SIZE: Final = ENTRY.itemsize - PLACE.size

VERSION: Final = 1
HEADER: Final = Struct("<4sB3xIIQQII")
_HEADER: Final = Struct("<4sB3xIIQQI")  # without the crc of itself
HEAD: Final = Struct("<III")
CRC: Final = Struct("<I")
_BLOCK: Final = Struct("<4sB3xIIQQQQQII")
FRAME_MAGIC: Final = b"\xf5stf"
_BLOCK_MAGIC: Final = b"\xf5sti"
FRAME_OVERHEAD: Final = HEADER.size + CRC.size
_pack_header, _pack_head, _pack_place, _pack_crc = _HEADER.pack, HEAD.pack, PLACE.pack, CRC.pack

CHUNK: Final = 2**20
MAX_RECORD: Final = 2**28
_MASK: Final = 0xFFFFFFFF
_HELD = 5120  # crc32 keeps the GIL up to this length
_SLICED = 2**16
_LARGE = 2**14
_MOST_PARTS = 512  # of one system call


def checksum(data: bytes, seed: int) -> int:
    """crc32 that gives the GIL away only for long data: to get it back beside a busy thread costs 5 ms."""
    if len(data) <= _HELD or len(data) > _SLICED:
        return crc32(data, seed)
    view = memoryview(data)
    for start in range(0, len(data), _HELD):
        seed = crc32(view[start : start + _HELD], seed)
    return seed


def size_of(record: Bytes) -> int:
    return len(record) if isinstance(record, bytes) else sum(map(len, record))


def is_sound(record: bytes, length: int, crc: int, seed: int) -> bool:
    """Whether a record is what its entry says, under its store's seed."""
    return len(record) == length and crc32(record, seed ^ length) == crc


# frames ---------------------------------------------------------------------------------------------------------------------


class End(NamedTuple):
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
        return self.offset - self.frame == FRAME_OVERHEAD


class Base(NamedTuple):
    """Where a log begins: at a segment, behind a sequence. ``synced``: the sequence that was synced when it was made to.

    ``records``: how many ever stood before.
    """

    segment: int = 1
    sequence: int = 0
    synced: int = 0
    records: int = 0


NO_BASE: Final = Base()


class Frame(NamedTuple):
    first: int  # numbers of the batches in it
    last: int
    parts: tuple[bytes, ...]  # its bytes
    rows: bytes
    end: End  # behind it


_as_end = partial(tuple.__new__, End)  # as End(*value), without a Python call
_as_frame = partial(tuple.__new__, Frame)


class Header(NamedTuple):
    records: int
    sequence: int
    synced: int
    length: int
    crc: int


class Keys(NamedTuple):
    """What binds bytes to their store. Nothing that users store can hold a record's magic but by chance.

    ``store``: what FORMAT calls it; empty where that is not known.
    """

    seed: int
    magic: int
    store: bytes = b""

    @classmethod
    def of(cls, store: bytes) -> Keys:
        return cls.of_seed(crc32(store))._replace(store=store)

    @classmethod
    def of_seed(cls, seed: int) -> Keys:
        return cls(seed, crc32(b"record", seed))


def build_frame(keys: Keys, at: End, synced: int, first: int, batches: Sequence[Records]) -> Frame:
    seed, magic, _ = keys
    segment, start, sequence, records, _, _, fd = at
    place = start + HEADER.size
    parts: list[bytes] = [b"", b""]  # of the header, which comes last
    heads: list[bytes] = []
    rows: list[bytes] = []
    for batch in batches:
        for record, prefix in batch:
            if isinstance(record, bytes):
                length = len(record)
                crc = crc32(record, seed ^ length) if length <= _HELD else checksum(record, seed ^ length)
                pieces: tuple[bytes, ...] = (record,)
            else:
                length = size_of(record)
                crc = seed ^ length
                for piece in (pieces := record):
                    crc = checksum(piece, crc)
            head = _pack_head(magic, length, crc)
            place += HEAD.size
            heads.append(head)
            parts.append(head)
            parts += pieces
            rows.append(prefix)
            rows.append(_pack_place(segment, place, length, crc))
            place += length
    sequence += 1
    parts[0] = header = _pack_header(FRAME_MAGIC, VERSION, segment, len(heads), sequence, synced, place - start - HEADER.size)
    crc = crc32(header, (seed ^ start) & _MASK)
    parts[1] = _pack_crc(crc)
    parts.append(_pack_crc(crc32(b"".join(heads), crc)))
    end = _as_end((segment, place + CRC.size, sequence, records + len(heads), start, crc, fd))
    whole = (b"".join(parts),) if place - start < _LARGE else _joined(parts)
    return _as_frame((first, first + len(batches) - 1, whole, b"".join(rows), end))


def _joined(parts: list[bytes]) -> tuple[bytes, ...]:
    """The same bytes in few parts: what is large is not copied once more."""
    joined: list[bytes] = []
    small: list[bytes] = []
    for part in parts:
        if len(part) < _LARGE:
            small.append(part)
        else:
            joined += (b"".join(small), part)
            small.clear()
    return (*joined, b"".join(small))


def header_at(data: bytes, keys: Keys, segment: int, offset: int) -> Header | None:
    """The header that stands there, if it was written for this place. Raises IncompatibleStore for a newer version's."""
    if len(data) < HEADER.size or data[:4] != FRAME_MAGIC:
        return None
    _, version, at, count, sequence, synced, length, crc = HEADER.unpack(data)
    if crc != crc32(data[: -CRC.size], (keys.seed ^ offset) & _MASK) or at != segment:
        return None
    if version != VERSION:
        raise IncompatibleStore(f"segment {segment}, offset {offset}: a frame of version {version}; this reads {VERSION}")
    return Header(count, sequence, synced, length, crc)


# files ----------------------------------------------------------------------------------------------------------------------


class Window:
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

    def _fill(self, offset: int, length: int = CHUNK) -> None:
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
            self._fill(offset, max(length, CHUNK))
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
            if len(self._data) < CHUNK:
                return -1
            start = self._start + len(self._data) - len(pattern) + 1

    def filled(self, start: int) -> int:
        """Where the bytes from start on end, trailing zeros left out."""
        stop = start
        while data := self.get(start, CHUNK):
            if used := len(data.rstrip(b"\0")):
                stop = start + used
            start += len(data)
        return stop


def read_file(system: System, path: str) -> bytes | None:
    try:
        fd = system.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return Window(system, fd).get(0, system.size(fd))
    finally:
        system.close(fd)


def read_format(system: System, path: str) -> Keys | None:
    """The keys of the store in a directory; None without a FORMAT. Raises IncompatibleStore, CorruptTree."""
    data = read_file(system, path + "/FORMAT")
    if data is None:
        return None
    words = data.split()
    if words[:2] != [b"sessiontree", b"log"] or len(words) < 3:
        raise IncompatibleStore(f"{path}/FORMAT is not that of a log")
    if words[2] != b"%d" % VERSION:
        raise IncompatibleStore(f"{path} has format {words[2].decode(errors='replace')}; this reads {VERSION}")
    body, _, crc = data.rstrip(b"\n").rpartition(b" ")
    if len(words) != 5 or crc != b"%08x" % crc32(body) or not data.endswith(b"\n"):
        raise CorruptTree(f"{path}/FORMAT does not match its checksum")
    return Keys.of(words[3])


def read_base(system: System, path: str, keys: Keys) -> Base:
    """Where the log in a directory begins. Raises CorruptTree."""
    data = read_file(system, path + "/BASE")
    if data is None:
        return NO_BASE
    body, _, crc = data.rstrip(b"\n").rpartition(b" ")
    words = body.split()
    if crc != b"%08x" % crc32(body, keys.seed) or words[:2] != [b"sessiontree", b"base"] or len(words) != 6:
        raise CorruptTree(f"{path}/BASE does not match its checksum")
    return Base(*map(int, words[2:]))


def write_new(system: System, path: str, data: bytes, *, sync: bool) -> None:
    """Put a whole file in place by renaming it. The name is durable after the directory's sync."""
    new = path + ".new"
    fd = system.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(system, fd, (data,), 0)
        if sync:
            system.fdatasync(fd)
    finally:
        system.close(fd)
    system.rename(new, path)


def write_all(system: System, fd: int, parts: Sequence[bytes], offset: int, *, sync: bool = False) -> None:
    """Write bytes that stand in parts; with sync each call also makes durable what it wrote."""
    while len(parts) > _MOST_PARTS:
        some, parts = parts[:_MOST_PARTS], parts[_MOST_PARTS:]
        write_all(system, fd, some, offset, sync=sync)
        offset += sum(map(len, some))
    size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
    done = system.pwritev(fd, parts, offset, sync=sync)
    if done < size:
        rest = memoryview(b"".join(parts))
        while done < size:
            more = system.pwritev(fd, (rest[done:],), offset + done, sync=sync)
            if not more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += more


def segment_path(directory: str, segment: int, suffix: str) -> str:
    return f"{directory}/{segment:08d}.{suffix}"


def numbered(names: Sequence[str], suffix: str, first: int = 0, stop: int = 2**62) -> list[int]:
    """Numbers in ``[first, stop)`` of the files with that suffix."""
    size = len(suffix)
    found = (int(name[:-size]) for name in names if name.endswith(suffix) and name[:-size].isdigit())
    return [number for number in found if first <= number < stop]


# sidecars -------------------------------------------------------------------------------------------------------------------


class Cover(NamedTuple):
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


def block_of(keys: Keys, start: End, stop: End, rows: Entries) -> bytes:
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
    )[: -CRC.size]
    data = rows.tobytes()
    return header + CRC.pack(crc32(data, crc32(header, keys.seed))) + data


def read_cover(system: System, path: str, keys: Keys, segment: int) -> Cover | None:
    """What a sidecar covers; None for one that is missing or that starts with no valid block."""
    data = read_file(system, path)
    if data is None:
        return None
    view = memoryview(data)
    cover: Cover | None = None
    at = 0
    while at + _BLOCK.size <= len(view):
        magic, version, owner, count, first, last, start, stop, frame, frame_crc, crc = _BLOCK.unpack_from(view, at)
        body = at + _BLOCK.size
        rows = view[body : body + count * ENTRY.itemsize]
        if magic != _BLOCK_MAGIC or version != VERSION or owner != segment or len(rows) != count * ENTRY.itemsize:
            break
        if crc != crc32(rows, crc32(view[at : body - CRC.size], keys.seed)):
            break
        if (start, first) != ((cover.stop, cover.last + 1) if cover else (0, first)):
            break
        at = body + len(rows)
        known = cover or Cover([], first, 0, 0, 0, 0, 0, 0, False)
        known.rows.append(rows)
        cover = Cover(known.rows, known.first, last, known.records + count, stop, frame, frame_crc, at, at == len(view))
    return cover
