"""All that the log of a store holds, read from end to end and checked: what is sound, and what hangs on what.

A :class:`Survey` numbers the records as they stand in the log, and finds each node's parent among them. It only reads, and holds an
index of the records, never the records.

Where sidecars say what to expect, each segment is read once: its frames and checksums, then, while it is at hand, what its records
say. What was expected is believed only when it is what was found; where it is not, because something is damaged or a sidecar is
wrong, all is read again without sidecars, and they are but asked what was where damage is.
"""

from __future__ import annotations

import errno
import os
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends import blobs
from sessiontree.backends.base import Progress
from sessiontree.backends.frames import (
    CRC,
    ENTRY,
    HEAD,
    HEADER,
    NO_BASE,
    PLACE,
    PREFIX_SIZE,
    Base,
    Entries,
    Keys,
    Window,
    crc32,
    header_at,
    is_sound,
    numbered,
    read_base,
    read_cover,
    read_file,
    read_format,
    segment_path,
)
from sessiontree.backends.scan import Scan
from sessiontree.backends.system import System
from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree, IncompatibleStore, SessionTreeError, StoreFailed
from sessiontree.fsck.checks import Checked, Checks, Moved, Task
from sessiontree.journal import LATER, prefix_of
from sessiontree.positions import PositionScheme, scheme

Numbers = NDArray[np.int64]

# Instead of a record's number:
ROOT: Final = -1  # the root of its session
NONE: Final = -2  # no node, or none that is there

ALIEN: Final = 254  # the kind of what has a sound checksum and is no record
_PAGE: Final = 4096
_ATTEMPTS: Final = 3
_MUCH: Final = 2**27  # bytes from which on helpers are worth their start
_MOST_PROCESSES: Final = 4  # there is but one that finds the records


class Move(NamedTuple):
    """The last record of a head. ``ordinal``: None where the head was dropped."""

    number: int
    ordinal: int | None
    version: int


class SaidOf(NamedTuple):
    """A sound annotation. ``number``: of its record; ``stop``: where the last of its tokens ends in the node."""

    number: int
    node_id: bytes
    name: str
    stop: int
    version: int


class Problem(NamedTuple):
    """Something that records say and that cannot be. ``number``: of the record."""

    number: int
    session: int
    what: str


class Stretch(NamedTuple):
    """Damaged bytes of a segment. ``harmless``: every record that was in its frame is there."""

    segment: int
    start: int
    stop: int
    why: str
    harmless: bool


class Sidecar(NamedTuple):
    """A sidecar that is not what it should be. ``misleads``: readers believe it, and it is wrong."""

    segment: int
    what: str
    misleads: bool


class Part(NamedTuple):
    """Records of one segment: numbers from ``start`` to ``stop``."""

    segment: int
    start: int
    stop: int


class Held:
    """What is known of one session. ``first``: the ordinal of its first own node; None where nobody can say.

    ``tip``: of a fork, the node whose path it begins with; ROOT of others. ``rules``: None where its root is not known.
    """

    __slots__ = ("first", "number", "path", "record", "row", "rules", "tip")

    def __init__(self, row: int, record: codec.SessionRecord, rules: PositionScheme | None, tip: int, first: int | None) -> None:
        self.row: int = row  # the number of its record
        self.number: int = record.session
        self.record: codec.SessionRecord = record
        self.rules: PositionScheme | None = rules
        self.tip: int = tip
        self.first: int | None = first
        self.path: dict[int, int] = {}  # those nodes of the tip's path that were asked for, by depth


class _Patient:
    """A system that only reads, and reads what the disk cannot give as zeros: the checksums tell."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.close, self.size, self.listdir, self.flock = system.close, system.size, system.listdir, system.flock
        self._paths: dict[int, str] = {}
        self.unreadable: set[tuple[str, int]] = set()  # pages

    def open(self, path: str, flags: int) -> int:
        fd = self._system.open(path, flags)
        self._paths[fd] = path
        return fd

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        try:
            return self._system.pread(fd, length, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        if length > _PAGE:
            return self.pread(fd, min(length, _PAGE - offset % _PAGE), offset)
        count = max(0, min(length, self.size(fd) - offset))
        self.unreadable.add((self._paths[fd], offset // _PAGE))
        return bytes(count)


class _Unexpected(Exception):
    """The log is not what its sidecars say."""


def _entry_of(record: bytes) -> bytes:
    try:
        return prefix_of(record)
    except CorruptTree:
        return bytes((ALIEN,)).ljust(PREFIX_SIZE, b"\0")


class Survey:
    """What was found in a store by :meth:`read`. Raises IncompatibleStore for what is no store of this version.

    Of each record, by its number: ``rows``, its entry; ``parents``, the number of a node's parent, ROOT or NONE; ``starts`` and
    ``stops``, the tokens before a node and up to its end. ``bad``: why a record cannot be believed; ``gone``: records that are not
    there, and whether their entry is what a sidecar says, or what is left. ``aside``: nodes and sessions that are not what their
    number names.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        system: System | None = None,
        progress: Progress | None = None,
        processes: int | None = 1,
        *,
        sidecars: bool = True,
    ) -> None:
        self.path: str = os.path.abspath(os.fspath(path))
        self.segments: str = self.path + "/segments"
        self._given = (path, system, progress, processes)
        self._patient = _Patient(system or System())
        self.system: Any = self._patient
        self._progress = progress
        self._processes = processes
        self._sidecars = sidecars
        self.files_damaged: dict[str, str] = {}  # of FORMAT and BASE, what is wrong with them
        self.keys: Keys = self._identify()
        self.base: Base = NO_BASE
        self.total: int = 0
        self._done = self._told = 0
        self._checks = Checks(self.system, 0, self._take)

        self.rows: Entries = np.empty(0, ENTRY)
        self.parts: list[Part] = []
        self.parents: NDArray[np.int64] = np.empty(0, np.int64)
        self.starts: NDArray[np.int64] = self.parents
        self.stops: NDArray[np.int64] = self.parents
        self.bad: dict[int, str] = {}
        self.gone: dict[int, bool] = {}
        self.names: dict[int, str] = {}
        self.aside: NDArray[np.bool] = np.empty(0, np.bool)
        self.repeated: int = 0
        self.unknown: int = 0
        self.wrong_ordinals: list[Problem] = []
        self.cycles: list[Problem] = []
        self.sessions: dict[int, Held] = {}
        self.heads: dict[tuple[int, str], Move] = {}
        self.pins: dict[tuple[int, bytes], tuple[int, int, bool]] = {}  # the last word: its number, the ordinal, whether
        self.drops: dict[int, set[int]] = {}  # ordinals
        self.said: dict[tuple[int, int, str], SaidOf] = {}  # the last word on a node, by session, ordinal and name
        self.openings: dict[int, int] = {}  # the last of each session
        self.opening: int = 0  # how many openings there were
        self.aliases: dict[tuple[Any, str], tuple[int, bytes | None]] = {}
        self.identities: set[bytes] = set()  # of media in nodes
        self.contents: set[str] = set()  # names of the files that these have, or would have
        self.stretches: list[Stretch] = []
        self.blind: list[Stretch] = []
        self.sidecars: list[Sidecar] = []
        self.feature_files: list[tuple[str, int]] = []
        self.features: dict[str, str | None] = {}  # what is wrong with each file of features, None: nothing
        self.torn: int = 0
        self.free: int = 0  # bytes behind the end of the log
        self.sizes: dict[int, int] = {}  # of the segments
        self.sidecar_bytes: int = 0
        self._sidecar_sizes: dict[int, int] | None = None  # as they were before anything was scanned
        self.left_bytes: int = 0  # of what stands before the beginning, and goes when nobody reads it
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)  # of all nodes that count, (session, ordinal), in order
        self._at: Numbers = np.empty(0, np.int64)  # and their numbers
        self._depths: dict[int, int] = {}

    @property
    def unreadable(self) -> int:
        """Bytes that the disk could not give."""
        return _PAGE * len(self._patient.unreadable)

    def read(self) -> Survey:
        """Read and check everything."""
        try:
            with self.leased() as self.base:
                self._read()
        except _Unexpected:
            again = Survey(*self._given, sidecars=False)
            again._told = self._told
            return again.read()
        return self

    def _read(self) -> None:
        before = (0, self.base.segment)
        self.sizes = {segment: self._size(segment, "seg") for segment in self._numbers(".seg", self.base.segment)}
        self._sidecar_sizes = {segment: self._size(segment, "idx") for segment in self._numbers(".idx", self.base.segment)}
        self.sidecar_bytes = sum(self._sidecar_sizes.values())
        self.left_bytes = sum(self._size(n, suffix) for suffix in ("seg", "idx") for n in self._numbers(f".{suffix}", *before))
        self.feature_files = blobs.files_in(self.path + "/blobs")
        self.total = sum(self.sizes.values()) + sum(size for _, size in self.feature_files)
        expected = self._expected() if self._sidecars else None
        self._checks = Checks(self.system, self._helpers(), self._take)
        try:
            scan = self._as_expected(expected) if expected is not None else self._all_first()
            self._checks.finish()
        finally:
            self._checks.stop()
        self.torn = scan.torn
        self.free = max(0, self.sizes.get(scan.at.segment, 0) - scan.at.offset)
        self._compare_ends()
        self._look_at_features()

    def _expected(self) -> list[tuple[int, Entries]] | None:
        """The entries of each segment as sidecars have them, where there is no damage that opening would find."""
        scan = self.scan(strict=True)
        try:
            return [(segment, _entries(scan)) for segment in scan.segments()]
        except CorruptTree:
            return None

    def _as_expected(self, expected: list[tuple[int, Entries]]) -> Scan:
        """Check each segment while it is at hand. Raises _Unexpected."""
        self._number(expected)
        expected.clear()
        try:
            self._place()
        except Moved as error:
            raise _Unexpected from error
        scan = self.scan()
        segments = scan.segments()
        for part in self.parts:
            found, _ = self.look(scan, next(segments, 0))
            if part is self.parts[-1]:  # a writer may have gone on
                found = found[: part.stop - part.start]
            if found.tobytes() != self.rows[part.start : part.stop].tobytes():
                raise _Unexpected
            self._check(part)
        return scan

    def _all_first(self) -> Scan:
        """Find all records, and what is known of those that are gone, then check each."""
        scan = self.scan()
        found = [(segment, *self.look(scan, segment)) for segment in scan.segments()]
        fits = self._fitting([rows for _, rows, _ in found])
        number = 0
        parts = []
        for segment, rows, stretches in found:
            if stretches:
                gone = [each for each in self._gone(segment, rows, stretches) if each[2] or fits(each[0])]
                self.blind += self._blind(segment, [row for row, _, _ in gone], stretches)
                sound = len(rows)
                rows = np.concatenate([rows, np.array([row for row, _, _ in gone], ENTRY)])  # noqa: PLW2901
                order = np.argsort(rows["offset"], kind="stable")
                rows = rows[order]  # noqa: PLW2901
                for at in np.flatnonzero(order >= sound).tolist():
                    row, self.bad[number + at], self.gone[number + at] = gone[order[at] - sound]
                    if (name := self._name_in(row)) is not None:
                        self.names[number + at] = name
            parts.append((segment, rows))
            number += len(rows)
        del found
        self._number(parts)
        del parts
        self._place()
        for part in self.parts:
            self._check(part)
        return scan

    def _helpers(self) -> int:
        """How many processes are to help this one."""
        if self._processes is None:
            return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) - 1 if self.total >= _MUCH else 0
        return max(self._processes - 1, 0)

    def _tell(self, segment: int, offset: int | None = None) -> None:
        """Say how far it is: up to an offset in a segment, or through with it."""
        self._done += self.sizes.get(segment, 0) if offset is None else 0
        if self._progress is not None:
            self._told = max(self._told, min(self._done + (offset or 0), self.total))
            self._progress(self._told, self.total)

    # files

    def _identify(self) -> Keys:
        """What seeds the checksums. A damaged FORMAT gives way to what frames say."""
        keys = None
        try:
            keys = read_format(self.system, self.path)
        except (IncompatibleStore, CorruptTree) as error:
            body, _, crc = (read_file(self.system, self.path + "/FORMAT") or b"").rstrip(b"\n").rpartition(b" ")
            if isinstance(error, IncompatibleStore) and crc == b"%08x" % crc32(body):  # that of something else, and sound
                raise
            self.files_damaged["FORMAT"] = str(error)
        if keys is None:
            self.files_damaged.setdefault("FORMAT", f"{self.path}/FORMAT is missing")
            with suppress(FileNotFoundError, NotADirectoryError):
                keys = next((keys for _, _, keys in self._first_frames()), None)
        if keys is None:
            raise IncompatibleStore(f"{self.path} holds no store that can be read: {self.files_damaged['FORMAT']}")
        return keys

    def _first_frames(self) -> Iterator[tuple[int, int, Keys]]:
        """Of each segment whose first frame is sound: its number, that of the frame, and what seeds its checksum."""
        for segment in self._numbers(".seg"):
            fd = self.system.open(segment_path(self.segments, segment, "seg"), os.O_RDONLY)
            try:
                data = self.system.pread(fd, HEADER.size + HEAD.size, 0)
            finally:
                self.system.close(fd)
            if len(data) == HEADER.size + HEAD.size:
                start = data[: HEADER.size]
                keys = Keys.of_seed(seed_of(start[: -CRC.size], *CRC.unpack(start[-CRC.size :])))
                header = header_at(start, keys, segment, 0) if HEAD.unpack(data[HEADER.size :])[0] == keys.magic else None
                if header is not None:
                    yield segment, header.sequence, keys

    @contextmanager
    def leased(self) -> Iterator[Base]:
        """Where the log begins, and nothing of it is removed meanwhile."""
        while True:
            base, fd = self._read_base(), -1
            try:
                with suppress(FileNotFoundError):  # no writer was there since leases came up, or it has just moved on
                    fd = self.system.open(segment_path(self.segments, base.segment, "lease"), os.O_RDONLY)
                    self.system.flock(fd, shared=True)
                if base == self._read_base():
                    yield base
                    return
            finally:
                if fd >= 0:
                    self.system.close(fd)

    def _read_base(self) -> Base:
        """Where the log begins. A damaged BASE gives way to what is there: what was dropped may come back."""
        try:
            return read_base(self.system, self.path, self.keys)
        except CorruptTree as error:
            self.files_damaged["BASE"] = str(error)
        segment, sequence, _ = next(self._first_frames(), (1, 1, None))
        return Base(segment, sequence - 1, 0)

    def _numbers(self, suffix: str, first: int = 0, stop: int = 2**62) -> list[int]:
        """Of the segments, or sidecars, that are there."""
        return sorted(numbered(self.system.listdir(self.segments), suffix, first, stop))

    def _size(self, segment: int, suffix: str) -> int:
        with suppress(FileNotFoundError):
            fd = self.system.open(segment_path(self.segments, segment, suffix), os.O_RDONLY)
            try:
                size: int = self.system.size(fd)
            finally:
                self.system.close(fd)
            return size
        return 0

    def strays(self) -> Iterator[str]:
        """Files, below the store, that are no part of one."""
        known = {"FORMAT", "BASE", "LOCK", "segments", "blobs"}
        yield from sorted(set(self.system.listdir(self.path)) - known)
        with suppress(FileNotFoundError):
            for name in sorted(self.system.listdir(self.segments)):
                stem, _, end = name.rpartition(".")
                if not stem.isdigit() or (end != "lease" and (end not in ("seg", "idx") or not self._is_of(int(stem)))):
                    yield f"segments/{name}"
        for name, _ in self.feature_files:
            if not blobs.is_place(name):
                yield os.path.relpath(name, self.path)

    def _is_of(self, segment: int) -> bool:
        return segment in self.sizes or segment < self.base.segment

    # the log

    @contextmanager
    def reader(self) -> Iterator[Callable[[Any], bytes]]:
        """A function that gives the record of an entry. Raises Moved."""
        opened = 0
        fd = -1

        def read(row: Any) -> bytes:
            nonlocal opened, fd
            segment, offset, length, crc = row.item()[-4:]
            path = segment_path(self.segments, segment, "seg")
            if segment != opened:
                close()
                fd, opened = self.system.open(path, os.O_RDONLY), segment
            record = b""
            while len(record) < length and (part := self.system.pread(fd, length - len(record), offset + len(record))):
                record += part
            if not is_sound(record, length, crc, self.keys.seed):
                raise Moved(path, offset)
            return record

        def close() -> None:
            nonlocal opened, fd
            if opened:
                opened = 0
                self.system.close(fd)

        try:
            yield read
        finally:
            close()

    def scan(self, base: Base | None = None, *, strict: bool = False) -> Scan:
        """What is to be read, from a beginning on."""
        return Scan(self.system, self.segments, self.keys, _entry_of, strict, base or self.base)

    def look(self, scan: Scan, segment: int) -> tuple[Entries, list[Stretch]]:
        """What the scan found in a segment, and whether its sidecar agrees: entries of sound records, and stretches of damage."""
        rows = _entries(scan)
        known = len(self.stretches)
        found = zip(scan.damaged[known:], scan.reasons[known:], scan.harmless[known:], strict=True)
        new = [Stretch(*where, why, harmless) for where, why, harmless in found]
        self.stretches += new
        first = next((start.sequence + 1 for start, _, _ in scan.walked if start.segment == segment), None)
        self.sidecars += self._sidecar(segment, rows, None if new else first)
        return rows, new

    def _sidecar(self, segment: int, rows: Entries, first: int | None) -> Iterator[Sidecar]:
        """What is wrong with a sidecar. ``first``: the sequence of its segment's first frame; None: its rows are not compared."""
        path = segment_path(self.segments, segment, "idx")
        cover = read_cover(self.system, path, self.keys, segment)
        for _ in range(2):
            if cover is None or not cover.whole:  # a writer may be in the middle of it
                cover = read_cover(self.system, path, self.keys, segment)
        if cover is None or not cover.whole:
            data = read_file(self.system, path)
            if data is None:
                return
            sound = 0 if cover is None else cover.size
            yield Sidecar(segment, f"of this index {sound} of {len(data)} bytes are sound; the next writer makes it again", False)
        if cover is None or first is None:
            return
        if cover.first != first and not self.stretches:  # behind damage nobody can say how many frames there were
            yield Sidecar(segment, f"it begins with frame {cover.first}, the segment with {first}", False)
            return
        named = b"".join(cover.rows)
        sizes = self._sidecar_sizes
        if sizes is not None and self._size(segment, "idx") != sizes.get(segment):  # a writer has gone on behind what was scanned
            named = named[: rows.nbytes]
        if named != rows[: cover.records].tobytes():
            yield Sidecar(segment, "its entries are not those of the segment", True)

    def _gone(self, segment: int, rows: Entries, stretches: Sequence[Stretch]) -> list[tuple[Any, str, bool]]:
        """Records that were in a segment and are not sound: the entry of each, why, and whether its sidecar says so."""
        starts = [stretch.start for stretch in stretches]

        def why(row: Any) -> str:
            return stretches[max(bisect_right(starts, row["offset"]) - 1, 0)].why

        sound = set(rows["offset"].tolist())
        cover = read_cover(self.system, segment_path(self.segments, segment, "idx"), self.keys, segment)
        told = () if cover is None else np.frombuffer(b"".join(cover.rows), ENTRY)
        found = {row["offset"]: (row, why(row), True) for row in told if row["offset"] not in sound}
        if segment in self.sizes:
            for row in self._left_overs(segment, stretches):
                if row["offset"] not in sound:
                    found.setdefault(row["offset"], (row, why(row), False))
        return list(found.values())

    def _blind(self, segment: int, gone: Sequence[Any], stretches: Sequence[Stretch]) -> Iterator[Stretch]:
        """Stretches that no sidecar covers, and that are not just the records that are known to have been there."""
        cover = read_cover(self.system, segment_path(self.segments, segment, "idx"), self.keys, segment)
        covered = 0 if cover is None else cover.stop
        lengths = {row["offset"] - HEAD.size: HEAD.size + row["length"] for row in gone}
        for stretch in stretches:
            at = stretch.start
            while at in lengths:
                at += lengths[at]
            known = stretch.start < at <= stretch.stop <= at + CRC.size
            if not stretch.harmless and not known and (stretch.stop > covered or not covered):
                yield stretch

    def _name_in(self, row: Any) -> str | None:
        """The name of what is gone, if it is to be read in what is left: it must have the digest that the entry says."""
        if row["kind"] not in (codec.SESSION, codec.HEAD, codec.ANNOTATION) or row["segment"] not in self.sizes:
            return None
        fd = self.system.open(segment_path(self.segments, row["segment"], "seg"), os.O_RDONLY)
        try:
            data = Window(self.system, fd).get(int(row["offset"]), min(int(row["length"]), _PAGE))
        finally:
            self.system.close(fd)
        return codec.name_in(data, int(row["kind"]), row["id"].tobytes())

    def _left_overs(self, segment: int, stretches: Sequence[Stretch]) -> Iterator[Any]:
        """What stands behind all that can be the head of a record in damaged stretches."""
        magic = self.keys.magic.to_bytes(4, "little")
        fd = self.system.open(segment_path(self.segments, segment, "seg"), os.O_RDONLY)
        try:
            window = Window(self.system, fd)
            for stretch in stretches:
                at = window.find(magic, stretch.start)
                while stretch.start <= at < stretch.stop:
                    _, length, crc = HEAD.unpack(window.get(at, HEAD.size).ljust(HEAD.size))
                    prefix = _entry_of(window.get(at + HEAD.size, PREFIX_SIZE + HEAD.size))
                    yield np.frombuffer(prefix + PLACE.pack(segment, at + HEAD.size, length, crc), ENTRY)[0]
                    at = window.find(magic, at + 1)
        finally:
            self.system.close(fd)

    def _fitting(self, parts: Sequence[Entries]) -> Callable[[Any], bool]:
        """Whether what is left of a record can be what it says: a node, say, that others leave room for."""
        rows = np.concatenate([np.empty(0, ENTRY), *parts]) if self.stretches else np.empty(0, ENTRY)
        keys = np.sort(_keys_of(rows[rows["kind"] == codec.NODE]))
        sessions = set(rows["session"][rows["kind"] == codec.SESSION].tolist())

        def fits(row: Any) -> bool:
            kind, session, ordinal, parent = row.item()[:4]
            if kind != codec.NODE:
                known = session in sessions
                return kind in (codec.ALIAS, codec.SESSION) or (codec.HEAD <= kind <= codec.ANNOTATION and known)
            if session not in sessions or parent >= ordinal:
                return False
            low, at, behind = np.searchsorted(keys, _bounds(session, ordinal)).tolist()
            last = int(keys[behind - 1]) & _MASK if behind > low else 0
            taken = at < len(keys) and int(keys[at]) == session << 32 | ordinal
            return ordinal <= last + len(self.stretches) and not taken

        return fits

    # the nodes

    def _number(self, parts: Sequence[tuple[int, Entries]]) -> None:
        """Give every record its number."""
        self.rows = np.concatenate([np.empty(0, ENTRY), *(rows for _, rows in parts)])
        start = 0
        for segment, rows in parts:
            self.parts.append(Part(segment, start, start + len(rows)))
            start += len(rows)
        self.starts, self.stops = np.zeros((2, start), np.int64)
        self.aside = np.zeros(start, np.bool)

    def _place(self) -> None:
        """Find the sessions, and each node's parent."""
        rows = self.rows
        self.parents = np.full(len(rows), NONE, np.int64)
        nodes = np.flatnonzero(rows["kind"] == codec.NODE)
        self._order(nodes)
        ordinals, parents = rows["ordinal"][nodes], rows["parent"][nodes]
        sound = parents < ordinals
        for number in nodes[~sound].tolist():
            _, session, ordinal, parent = rows[number].item()[:4]
            what = f"node {ordinal} stands behind node {parent}, which is none before it"
            self.bad.setdefault(number, what)
            self.cycles.append(Problem(number, session, what))
        above = _keys_of(rows[nodes], "parent")
        at = np.minimum(np.searchsorted(self._keys, above), max(len(self._keys) - 1, 0))
        own = sound & (parents > 0) & (self._keys[at] == above) if len(nodes) else sound
        self.parents[nodes[own]] = self._at[at[own]]
        top = nodes[sound & (parents == 0)]
        self.parents[top] = ROOT
        elsewhere: defaultdict[int, list[int]] = defaultdict(list)
        for number in nodes[sound & (parents > 0) & ~own].tolist():
            elsewhere[int(rows["session"][number])].append(number)
        for number, ((row, record), *others) in sorted(self._records().items()):
            self.sessions[number] = held = self._held(row, record)
            for other in others:
                self._compare(held, *other)
            self._set_aside_below(held)
            for node in elsewhere.get(number, ()):
                self.parents[node] = self._on_path(held, int(rows["parent"][node]))
        rooted = [number for number, held in self.sessions.items() if held.rules is not None]
        self.parents[top[~np.isin(rows["session"][top], rooted)]] = NONE

    def _order(self, nodes: Numbers) -> None:
        """Which node is which: of several the first that is there."""
        rows = self.rows
        gone = np.zeros(len(rows), np.bool)
        gone[list(self.gone)] = True
        keys = _keys_of(rows[nodes])
        order = np.lexsort((gone[nodes], keys))
        keys, nodes = keys[order], nodes[order]
        first = np.ones(len(keys), np.bool)
        first[1:] = keys[1:] != keys[:-1]
        self._keys, self._at = keys[first], nodes[first]
        others = np.flatnonzero(~first)
        same = np.flatnonzero(first)[np.cumsum(first)[others] - 1]
        self.aside[nodes[others]] = True
        equal = rows["id"][nodes[others]] == rows["id"][nodes[same]]
        self.repeated += int(np.count_nonzero(equal & ~gone[nodes[others]]))
        for number in nodes[others[~equal]].tolist():
            if number not in self.gone:
                _, session, ordinal = rows[number].item()[:3]
                self.wrong_ordinals.append(Problem(number, session, f"node {ordinal} is there twice, with other content"))

    def _records(self) -> dict[int, list[tuple[int, codec.SessionRecord]]]:
        """The records of the sessions that are there, by their numbers, and where they are. The first of several counts."""
        found: dict[int, list[tuple[int, codec.SessionRecord]]] = {}
        with self.reader() as read:
            for number in np.flatnonzero(self.rows["kind"] == codec.SESSION).tolist():
                if number in self.gone:
                    continue
                try:
                    record = codec.decode(read(self.rows[number]))
                    assert isinstance(record, codec.SessionRecord)
                except CorruptTree as error:
                    self.bad[number] = str(error)
                    continue
                found.setdefault(record.session, []).append((number, record))
        return found

    def _compare(self, held: Held, number: int, record: codec.SessionRecord) -> None:
        """Look at another record of a session, which compaction may have left: a fork may name its first node otherwise there."""
        self.aside[number] = True
        tips = (held.record.tip, record.tip)
        same = held.record == record
        if not same and None not in tips and held.record._replace(tip=record.tip) == record:
            same = record.tip is not None and self.find(*record.tip) == held.tip
        self.repeated += same
        if not same:
            what = f"{record.session_id!r} has the number of another session"
            self.wrong_ordinals.append(Problem(number, record.session, what))

    def _held(self, number: int, record: codec.SessionRecord) -> Held:
        """A session. One that cannot be is bad, and nobody knows its root."""
        nothing = Held(number, record, None, NONE, None)
        try:
            if record.tip is None:
                codec.check_root(record)
                return Held(number, record, scheme(record.scheme, **dict(record.params)), ROOT, 1)
            source = self.sessions.get(record.tip[0])
            if record.tip[0] >= record.session:
                what = f"it is a fork of session {record.tip[0]}, which is none before it"
                self.cycles.append(Problem(number, record.session, what))
                raise CorruptTree(what)
            if source is None or source.rules is None:
                return nothing
            if record.root_id != source.record.root_id:
                raise CorruptTree(f"root {record.root_id[:4].hex()} is not that of session {source.record.session_id!r}")
        except SessionTreeError as error:
            self.bad[number] = f"session {record.session_id!r}: {error}"
            return nothing
        tip = self.find(*record.tip)
        depth = self.depth(tip)
        return Held(number, record, source.rules, tip, None if depth is None else depth + 1)

    def _set_aside_below(self, held: Held) -> None:
        """Nodes of a session that stand where its root, or the path of its fork, is."""
        if held.first is None:
            return
        low, high, _ = np.searchsorted(self._keys, _bounds(held.number, held.first)).tolist()
        for number in self._at[low:high].tolist():
            self.aside[number] = True
            if number not in self.gone:
                what = f"node {self.rows['ordinal'][number]} stands where its first node can be {held.first}"
                self.wrong_ordinals.append(Problem(number, held.number, what))
            for child in np.flatnonzero(self.parents == number).tolist():
                self.parents[child] = self._on_path(held, int(self.rows["parent"][child]))

    def find(self, session: int, ordinal: int) -> int:
        """The number of a node; ROOT, or NONE."""
        held = self.sessions.get(session)
        key = np.uint64(session << 32 | ordinal)
        at = int(np.searchsorted(self._keys, key))
        if at < len(self._keys) and self._keys[at] == key and not self.aside[self._at[at]]:
            return int(self._at[at])
        if held is None:
            return NONE
        return self._on_path(held, ordinal) if ordinal else NONE if held.rules is None else ROOT

    def _on_path(self, held: Held, depth: int) -> int:
        """The node of the path that a fork begins with, by its depth."""
        if held.first is None or not 0 < depth < held.first:
            return NONE
        found = held.path.get(depth)
        if found is None:
            found = held.tip
            for _ in range(held.first - 1 - depth):
                found = int(self.parents[found])
            held.path[depth] = found
        return found

    def depth(self, number: int) -> int | None:
        """How deep a node is; None where that cannot be said, since something above it is missing."""
        known, above = self._depths, number
        path = []
        while above >= 0 and above not in known:
            path.append(above)
            above = int(self.parents[above])
        depth = known[above] if above >= 0 else 0 if above == ROOT else -1
        for each in reversed(path):
            depth = known[each] = depth + 1 if depth >= 0 else -1
        return depth if depth >= 0 else None

    def depths(self) -> Numbers:
        """The depth of every node; 0 of what has none."""
        depths = [0] * len(self.rows)
        parents = self.parents.tolist()
        for number in self._at.tolist():  # parents come before their children, and what was forked before the fork
            above = parents[number]
            depths[number] = 1 if above == ROOT else depths[above] + 1 if above >= 0 and depths[above] else 0
        return np.array(depths, np.int64)

    def numbers_of(self, session: int) -> Numbers:
        """A session's own nodes, by their ordinals."""
        low, _, high = np.searchsorted(self._keys, _bounds(session, 0)).tolist()
        numbers = self._at[low:high]
        return numbers[~self.aside[numbers]]

    def id_of(self, number: int) -> bytes:
        identity: bytes = self.rows["id"][number].tobytes()
        return identity

    def source_of(self, held: Held) -> str | None:
        """The id of the session that one was forked from."""
        source = None if held.record.tip is None else self.sessions.get(held.record.tip[0])
        return None if source is None else source.record.session_id

    # checking

    def _check(self, part: Part) -> None:
        """Have the records of one segment checked that are there."""
        numbers = np.arange(part.start, part.stop)
        if self.gone:
            numbers = np.array([number for number in range(part.start, part.stop) if number not in self.gone], np.int64)
        rows, parents = self.rows[numbers], self.parents[numbers]
        ids = self.rows["id"][np.maximum(parents, 0)].tobytes()
        above: list[bytes | None] = []
        for at, (parent, session) in enumerate(zip(parents.tolist(), rows["session"].tolist(), strict=True)):
            if parent >= 0:
                above.append(ids[at * ID_BYTES : (at + 1) * ID_BYTES] if self.gone.get(parent, True) else None)
            else:
                above.append(self.sessions[session].record.root_id if parent == ROOT else None)
        known = [self.sessions[session] for session in np.unique(rows["session"]).tolist() if session in self.sessions]
        rules = {held.number: held.rules for held in known if held.rules is not None}
        path = segment_path(self.segments, part.segment, "seg")
        task = Task(path, self.keys.seed, rows, above, rules, bool(self.feature_files))
        if len(numbers):
            self._checks.do(numbers, task, lambda offset: self._tell(part.segment, offset))
        self._tell(part.segment)

    def _take(self, numbers: Numbers, checked: Checked) -> None:
        """Take in what was found of records."""
        self.starts[numbers] = np.frombuffer(checked.starts, np.int64)
        self.stops[numbers] = np.frombuffer(checked.stops, np.int64)
        for at, why in checked.bad.items():
            self.bad.setdefault(int(numbers[at]), why)
        self.identities |= checked.identities
        self.contents |= checked.contents
        for at, (node_id, name, stop, version) in checked.said.items():
            number = int(numbers[at])
            _, session, ordinal, *_ = self.rows[number].item()
            last = self.said.get((session, ordinal, name))
            if last is None or last.version <= version:  # one may be copied behind a later one
                self.said[session, ordinal, sys.intern(name)] = SaidOf(number, node_id, name, stop, version)
        for at, record in checked.others.items():
            self._note(int(numbers[at]), _entry_of(record)[0], record)

    def _note(self, number: int, kind: int, data: bytes) -> None:
        """Note what a record says that is no node's."""
        if kind == LATER:
            self.unknown += 1
            return
        try:
            record = codec.decode(data)
        except CorruptTree as error:
            self.bad.setdefault(number, str(error))
            return
        if isinstance(record, codec.HeadRecord):
            self.heads[record.session, record.name] = Move(number, record.ordinal, record.version)
        elif isinstance(record, codec.PinRecord):
            self.pins[record.session, record.id] = number, record.ordinal, record.pinned
        elif isinstance(record, codec.DropRecord):
            self.drops.setdefault(record.session, set()).update(record.ordinals)
        elif isinstance(record, codec.OpenedRecord):
            self.opening = record.incarnation
            self.openings[record.session] = number
        elif isinstance(record, codec.AliasRecord):
            self.aliases[record.namespace, record.alias] = number, record.identity
        elif isinstance(record, codec.SessionRecord):
            self.opening += 1

    def _compare_ends(self) -> None:
        """Whether every node begins where its parent ends."""
        parents, starts, stops = self.parents, self.starts, self.stops
        ends = np.where(parents == ROOT, 0, stops[np.maximum(parents, 0)]) if len(parents) else starts
        for number in np.flatnonzero((parents != NONE) & (starts != ends)).tolist():
            if number not in self.bad and int(parents[number]) not in self.bad:
                self.bad[number] = f"it begins after {starts[number]} tokens and its parent ends after {ends[number]}"

    def _look_at_features(self) -> None:
        for name, size in self.feature_files:
            if blobs.is_place(name):
                with suppress(FileNotFoundError):  # it was dropped meanwhile
                    self.features[name] = _wrong_with(name)
            self._done += size
            self._tell(-1)


def _entries(scan: Scan) -> Entries:
    return np.frombuffer(b"".join(scan.take()), ENTRY)


def _keys_of(rows: Entries, field: str = "ordinal") -> NDArray[np.uint64]:
    """Numbers that are in the order of (session, ordinal), or of (session, parent)."""
    keys: NDArray[np.uint64] = rows["session"].astype(np.uint64) << np.uint64(32) | rows[field]
    return keys


def _bounds(session: int, ordinal: int) -> NDArray[np.uint64]:
    """The keys of the root of a session, of one of its nodes, and of the root of the next session."""
    return np.array([session << 32, session << 32 | ordinal, (session + 1) << 32], np.uint64)


def _wrong_with(name: str) -> str | None:
    try:
        blobs.check_file(name)
    except FileNotFoundError:
        raise
    except (CorruptTree, OSError) as error:
        return str(error)
    return None


def surveyed(path: str | os.PathLike[str], progress: Progress | None, processes: int | None) -> Survey:
    """A store, read as it is. Raises IncompatibleStore for what is none, StoreFailed where it cannot be read."""
    try:
        for _ in range(_ATTEMPTS):
            with suppress(Moved, FileNotFoundError):  # a writer took back, or moved, what was there a moment ago
                return Survey(path, None, progress, processes).read()
    except OSError as error:
        raise StoreFailed(f"{os.fspath(path)} cannot be read: {error}", errno=error.errno) from error
    raise StoreFailed(f"{os.fspath(path)} changes faster than it can be read; try again when less is written")


def seed_of(data: bytes, crc: int) -> int:
    """What crc32 was begun with that gave ``crc`` for ``data``."""
    crc ^= _MASK
    for byte in reversed(data):
        at = _BY_TOP[crc >> 24]
        crc = ((crc ^ _TABLE[at]) << 8) & _MASK | (at ^ byte)
    return crc ^ _MASK


_MASK: Final = 0xFFFFFFFF
_TABLE: Final = [crc32(bytes((byte,)), _MASK) ^ _MASK for byte in range(256)]
_BY_TOP: Final = {entry >> 24: byte for byte, entry in enumerate(_TABLE)}
