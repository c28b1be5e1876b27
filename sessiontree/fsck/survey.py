"""All that the log of a store holds, read once from end to end and checked: what is sound, and what hangs on what.

A :class:`Survey` reads each segment twice while it is at hand: frames and checksums first, then what the records say. It believes
no sidecar; it compares each with the frames. It only reads, takes no lock, and holds about 200 bytes of each record, never the
records.

Records are numbered as they stand in the log. A node whose parent has not come yet waits for it until the end.
"""

from __future__ import annotations

import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from sessiontree import codec
from sessiontree.backends import blobs
from sessiontree.backends.frames import (
    CRC,
    ENTRY,
    HEAD,
    HEADER,
    PLACE,
    PREFIX_SIZE,
    End,
    Entries,
    Keys,
    Window,
    header_at,
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
from sessiontree.journal import prefix_of
from sessiontree.positions import PositionScheme, scheme

Progress = Callable[[int, int], None]

# Instead of a record's number:
ROOT: Final = -1  # the root of its session
NONE: Final = -2  # no node, or none that is there

ALIEN: Final = 254  # the kind of what has a sound checksum and is no record
_FAR: Final = 1024  # ordinals that may be missing before one that comes
_LATER: Final = 255  # the kind of a record that a later library wrote
_PAGE: Final = 4096
_ATTEMPTS: Final = 3
_MUCH: Final = 2**27  # bytes from which on helpers are worth their start
_MOST_PROCESSES: Final = 4  # there is but one that finds the records


class Move(NamedTuple):
    """The last record of a head. ``ordinal``: None where the head was dropped."""

    number: int
    ordinal: int | None
    version: int


class Problem(NamedTuple):
    """Something that records say and that cannot be. ``number``: of the record, NONE where it is about none."""

    number: int
    session: int
    what: str


class Stretch(NamedTuple):
    """Damaged bytes of a segment."""

    segment: int
    start: int
    stop: int
    why: str


class Sidecar(NamedTuple):
    """A sidecar that is not what it should be. ``misleads``: readers believe it, and it is wrong."""

    segment: int
    what: str
    misleads: bool


class Held:
    """What is known of one session. ``first``: the ordinal of its first own node; None where nobody can say."""

    __slots__ = ("_path", "far", "first", "number", "numbers", "record", "row", "rules", "tip")

    def __init__(self, row: int, record: codec.SessionRecord, rules: PositionScheme | None, tip: int, first: int | None) -> None:
        self.row = row  # the number of its record
        self.number = record.session
        self.record = record
        self.rules = rules
        self.tip = tip  # of a fork: the node whose path it begins with; ROOT otherwise
        self.first = first
        self.numbers = array("q")  # of its own nodes, by ordinal
        self.far: dict[int, int] = {}  # ordinals far beyond
        self._path: dict[int, int] = {}  # those nodes of the tip's path that were asked for, by depth

    def find(self, ordinal: int, survey: Survey) -> int:
        """The number of the node of an ordinal; ROOT, or NONE."""
        if self.first is None:
            return NONE if ordinal or self.rules is None else ROOT
        at = ordinal - self.first
        if at >= 0:
            return self.numbers[at] if at < len(self.numbers) else self.far.get(ordinal, NONE)
        if not ordinal:
            return ROOT
        found = self._path.get(ordinal)
        if found is None:
            found, parents = self.tip, survey.parents
            for _ in range(survey.depths[found] - ordinal):
                found = parents[found]
            self._path[ordinal] = found
        return found

    def put(self, ordinal: int, number: int, instead: bool = False) -> int:
        """Say which node an ordinal is, where none was or ``instead`` of that: the number of the node that it is."""
        assert self.first is not None
        at, numbers = ordinal - self.first, self.numbers
        if len(numbers) <= at <= 2 * len(numbers) + _FAR:
            numbers.extend([NONE] * (at + 1 - len(numbers)))
        if at >= len(numbers):
            return self.far.setdefault(ordinal, number)
        if numbers[at] == NONE or instead:
            numbers[at] = number
        return numbers[at]

    def missing(self) -> Iterator[int]:
        """Own ordinals without a node and with others behind them."""
        for at, number in enumerate(self.numbers):
            if number == NONE:
                assert self.first is not None
                yield self.first + at


class _Patient:
    """A system that only reads, and reads what the disk cannot give as zeros: the checksums tell."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.open, self.close, self.size, self.listdir = system.open, system.close, system.size, system.listdir
        self.unreadable = 0

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        try:
            return self._system.pread(fd, length, offset)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        if length > _PAGE:
            return self.pread(fd, min(length, _PAGE - offset % _PAGE), offset)
        count = max(0, min(length, self.size(fd) - offset))
        self.unreadable += count
        return bytes(count)


def _entry_of(record: bytes) -> bytes:
    try:
        return prefix_of(record)
    except CorruptTree:
        return bytes((ALIEN,)).ljust(PREFIX_SIZE, b"\0")


class Survey:
    """What was found in a store. Made whole by :meth:`read`; raises IncompatibleStore for what is no store of this version.

    Of each record, by its number: ``rows``, its place; ``ids``; ``parents``, the number of a node's parent, ROOT or NONE;
    ``depths``, 0 where it is not known; ``starts`` and ``stops``, the tokens before a node and up to its end. ``bad``: why a record
    cannot be believed; ``gone``: records that are not there, and whether their entry is what a sidecar says, or what is left.
    ``aside``: nodes that are not what their ordinal names. ``waiting``: nodes whose parent, or whose session, is nowhere.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        system: System | None = None,
        progress: Progress | None = None,
        processes: int | None = 1,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.segments = self.path + "/segments"
        self._patient = _Patient(system or System())
        self.system: Any = self._patient
        self._progress = progress
        self._processes = processes
        self._checks = Checks(self.system, 0, self._take)
        self.format_damage: str | None = None
        self.keys = self._identify()
        self._done = self._told = 0
        self.total = 0
        self.rows: Entries = np.empty(0, ENTRY)
        self._parts: list[Entries] = []
        self.ids = bytearray()
        self.parents = array("q")
        self.depths = array("q")
        self.starts = array("q")
        self.stops = array("q")
        self.bad: dict[int, str] = {}
        self.gone: dict[int, bool] = {}
        self.aside: set[int] = set()
        self.repeated = 0
        self.unknown = 0
        self.waiting: list[int] = []
        self._adrift: list[int] = []  # behind such nodes
        self.wrong_ordinals: list[Problem] = []
        self.cycles: list[Problem] = []
        self.sessions: dict[int, Held] = {}
        self.names: dict[str, int] = {}
        self.heads: dict[tuple[int, str], Move] = {}
        self.openings: dict[int, int] = {}  # the last of each session
        self.opening = 0  # how many openings there were
        self.aliases: dict[tuple[Any, str], tuple[int, bytes | None]] = {}
        self.identities: set[bytes] = set()  # of media in nodes
        self.contents: set[str] = set()  # names of the files that these have, or would have
        self.stretches: list[Stretch] = []
        self.sidecars: list[Sidecar] = []
        self.features: dict[str, str | None] = {}  # what is wrong with each file of features, None: nothing
        self.torn = 0
        self.free = 0  # bytes behind the end of the log
        self.sidecar_bytes = 0
        self.sizes: dict[int, int] = {}  # of the segments
        self.feature_files: list[tuple[str, int]] = []

    @property
    def unreadable(self) -> int:
        """Bytes that the disk could not give."""
        return self._patient.unreadable

    @property
    def records(self) -> int:
        return len(self.parents)

    def source_of(self, held: Held) -> str | None:
        """The id of the session that one was forked from."""
        source = None if held.record.tip is None else self.sessions.get(held.record.tip[0])
        return None if source is None else source.record.session_id

    def id_of(self, number: int) -> bytes:
        return bytes(self.ids[number * ID_BYTES : (number + 1) * ID_BYTES])

    def read(self) -> Survey:
        """Read and check everything."""
        self.sizes = {segment: self._size(segment) for segment in self._numbers("seg")}
        self.feature_files = blobs.files_in(self.path + "/blobs")
        self.total = sum(self.sizes.values()) + sum(size for _, size in self.feature_files)
        scan = self.scan()
        self._checks = Checks(self.system, self._helpers(), self._take)
        try:
            for segment in scan.segments():
                self.add(segment, *self.look(scan, segment))
            self._checks.finish()
            self._end()
        finally:
            self._checks.stop()
        self.torn = scan.torn
        self.free = max(0, self.sizes.get(scan.at.segment, 0) - scan.at.offset)
        self.sidecar_bytes = sum(self._size(segment, "idx") for segment in self._numbers("idx"))
        self._look_at_features()
        return self

    def _helpers(self) -> int:
        """How many processes are to help this one."""
        if self._processes is None:
            return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) - 1 if self.total >= _MUCH else 0
        return max(self._processes - 1, 0)

    # files

    def _identify(self) -> Keys:
        """What seeds the checksums. A damaged FORMAT gives way to what frames say."""
        keys = None
        try:
            keys = read_format(self.system, self.path)
        except (IncompatibleStore, CorruptTree) as error:
            body, _, crc = (read_file(self.system, self.path + "/FORMAT") or b"").rstrip(b"\n").rpartition(b" ")
            if crc == b"%08x" % crc32(body):  # that of something else, and sound
                raise
            self.format_damage = str(error)
        if keys is None:
            self.format_damage = self.format_damage or f"{self.path}/FORMAT is missing"
            with suppress(FileNotFoundError, NotADirectoryError):
                keys = next(self._keys_of_frames(), None)
        if keys is None:
            raise IncompatibleStore(f"{self.path} holds no store that can be read: {self.format_damage}")
        return keys

    def _keys_of_frames(self) -> Iterator[Keys]:
        for segment in self._numbers("seg"):
            fd = self.system.open(segment_path(self.segments, segment, "seg"), os.O_RDONLY)
            try:
                data = self.system.pread(fd, HEADER.size + HEAD.size, 0)
            finally:
                self.system.close(fd)
            if len(data) == HEADER.size + HEAD.size:
                header = data[: HEADER.size]
                keys = Keys.of_seed(seed_of(header[: -CRC.size], *CRC.unpack(header[-CRC.size :])))
                if HEAD.unpack(data[HEADER.size :])[0] == keys.magic and header_at(header, keys, segment, 0):
                    yield keys

    def _numbers(self, suffix: str) -> list[int]:
        """Of the segments, or sidecars, that are there."""
        names = [name.rpartition(".") for name in self.system.listdir(self.segments)]
        return sorted(int(stem) for stem, _, end in names if end == suffix and stem.isdigit())

    def _size(self, segment: int, suffix: str = "seg") -> int:
        fd = self.system.open(segment_path(self.segments, segment, suffix), os.O_RDONLY)
        try:
            size: int = self.system.size(fd)
        finally:
            self.system.close(fd)
        return size

    def _tell(self, offset: int) -> None:
        if self._progress is not None:
            self._told = max(self._told, min(self._done + offset, self.total))
            self._progress(self._told, self.total)

    # the log

    @contextmanager
    def reader(self) -> Iterator[Callable[[Any], bytes]]:
        """A function that gives the record of an entry. Raises Moved."""
        opened = 0
        fd = -1

        def read(row: Any) -> bytes:
            nonlocal opened, fd
            segment, offset, length, crc = row.item()[-4:]
            if segment != opened:
                close()
                fd = self.system.open(segment_path(self.segments, segment, "seg"), os.O_RDONLY)
                opened = segment
            record = b""
            while len(record) < length and (part := self.system.pread(fd, length - len(record), offset + len(record))):
                record += part
            if len(record) != length or crc32(record, self.keys.seed ^ length) != crc:
                raise Moved(segment_path(self.segments, segment, "seg"), offset)
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

    def scan(self, at: End | None = None) -> Scan:
        """What is to be read, from ``at`` on."""
        return Scan(self.system, self.segments, self.keys, _entry_of, False, at or End())

    def look(self, scan: Scan, segment: int) -> tuple[Entries, list[Stretch]]:
        """What the scan found in a segment, and whether its sidecar agrees: entries of sound records, and stretches of damage."""
        rows = np.frombuffer(b"".join(scan.take()), ENTRY)
        known = len(self.stretches)
        new = [Stretch(*where, why) for where, why in zip(scan.damaged[known:], scan.reasons[known:], strict=True)]
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
            yield Sidecar(segment, f"{0 if cover is None else cover.size} of {len(data)} bytes are sound", False)
        if cover is None or first is None:
            return
        if cover.first != first and not self.stretches:  # behind damage nobody can say how many frames there were
            yield Sidecar(segment, f"it begins with frame {cover.first}, the segment with {first}", False)
        elif b"".join(cover.rows) != rows[: cover.records].tobytes():
            yield Sidecar(segment, "its entries are not those of the segment", True)

    def add(self, segment: int, rows: Entries, stretches: Sequence[Stretch] = ()) -> None:
        """Take in the records of a segment, and check each; and take in what is known of those that were in damaged stretches."""
        first, found = self.records, len(rows)
        if stretches:
            gone = self._gone(segment, rows, stretches)
            rows = np.concatenate([rows, np.array([row for row, _, _ in gone], ENTRY)])
            order = np.argsort(rows["offset"], kind="stable")
            rows = rows[order]
            for at in np.flatnonzero(order >= found).tolist():
                _, self.bad[first + at], self.gone[first + at] = gone[order[at] - found]
        count = len(rows)
        self._parts.append(rows)
        self.ids += rows["id"].tobytes()
        self.parents.extend(array("q", [NONE]) * count)
        for column in (self.depths, self.starts, self.stops):
            column.frombytes(bytes(8 * count))
        fields = (rows[name].tolist() for name in ("kind", "session", "ordinal", "parent"))
        for number, kind, session, ordinal, parent in zip(range(first, first + count), *fields, strict=True):
            if not self.gone.get(number, True) and not self._fits(kind, session, ordinal, parent, len(stretches)):
                del self.bad[number]
            elif kind == codec.NODE:
                self._place(number, session, ordinal, parent)
            elif kind == codec.SESSION and number not in self.gone:
                self._begin(number, rows[number - first])
        numbers: Sequence[int] = range(first, first + count)
        if stretches:
            numbers = [number for number in numbers if number not in self.gone]
            rows = rows[np.array(numbers, np.int64) - first]
        self._check(segment, rows, numbers)
        self._done += self.sizes.get(segment, 0)
        self._tell(0)

    def _gone(self, segment: int, rows: Entries, stretches: Sequence[Stretch]) -> list[tuple[Any, str, bool]]:
        """Records that were in a segment and are not sound: the entry of each, why, and whether its sidecar says so."""
        starts = [stretch.start for stretch in stretches]

        def why(offset: int) -> str:
            return stretches[max(bisect_right(starts, offset) - 1, 0)].why

        sound = set(rows["offset"].tolist())
        cover = read_cover(self.system, segment_path(self.segments, segment, "idx"), self.keys, segment)
        told = () if cover is None else np.frombuffer(b"".join(cover.rows), ENTRY)
        found = {row["offset"]: (row, why(row["offset"]), True) for row in told if row["offset"] not in sound}
        if segment in self.sizes:
            for row in self._left_overs(segment, stretches):
                if row["offset"] not in sound:
                    found.setdefault(row["offset"], (row, why(row["offset"]), False))
        return list(found.values())

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
                    row = np.frombuffer(prefix + PLACE.pack(segment, at + HEAD.size, length, crc), ENTRY)[0]
                    yield row
                    at = window.find(magic, at + 1)
        finally:
            self.system.close(fd)

    def _fits(self, kind: int, session: int, ordinal: int, parent: int, stretches: int) -> bool:
        """Whether what is left of a record can be what it says: a node that would be the next, but for others that are gone."""
        held = self.sessions.get(session)
        if kind == codec.NODE and held is not None and held.first is not None:
            return parent < ordinal and 0 <= ordinal - held.first - len(held.numbers) <= stretches
        return (
            held is None
            if kind == codec.SESSION
            else kind == codec.ALIAS or (held is not None and kind in (codec.HEAD, codec.OPENED))
        )

    def _begin(self, number: int, row: Any) -> None:
        """Take in a session."""
        try:
            with self.reader() as read:
                record = codec.decode(read(row))
            assert isinstance(record, codec.SessionRecord)
        except CorruptTree as error:
            self.bad[number] = str(error)
            return
        known = self.sessions.get(record.session)
        if known is not None:
            self.aside.add(number)
            self.repeated += known.record == record
            if known.record != record:
                self.wrong_ordinals.append(
                    Problem(number, record.session, f"{record.session_id!r} has the number of another session")
                )
            return
        try:
            self.sessions[record.session] = self._held(number, record)
        except SessionTreeError as error:
            self.bad[number] = f"session {record.session_id!r}: {error}"
            self.sessions[record.session] = Held(number, record, None, NONE, None)
        if self.names.setdefault(record.session_id, record.session) != record.session:
            self.wrong_ordinals.append(Problem(number, record.session, f"{record.session_id!r} is the name of another session too"))

    def _held(self, number: int, record: codec.SessionRecord) -> Held:
        if record.tip is None:
            codec.check_root(record)
            return Held(number, record, scheme(record.scheme, **dict(record.params)), ROOT, 1)
        source, ordinal = record.tip
        if source >= record.session:
            self.bad[number] = f"it is a fork of session {source}, which is none before it"
            self.cycles.append(Problem(number, record.session, self.bad[number]))
            return Held(number, record, None, NONE, None)
        held = self.sessions.get(source)
        tip = NONE if held is None else held.find(ordinal, self)
        if held is None or tip == NONE or (tip != ROOT and not self.depths[tip]):
            return Held(number, record, None if held is None else held.rules, tip, None)
        if record.root_id != held.record.root_id:
            raise CorruptTree(f"root {record.root_id[:4].hex()} is not that of session {held.record.session_id!r}")
        return Held(number, record, held.rules, tip, (0 if tip == ROOT else self.depths[tip]) + 1)

    def _place(self, number: int, session: int, ordinal: int, parent: int) -> None:
        """Take in a node, behind its parent if that is there."""
        held = self.sessions.get(session)
        if held is None or held.first is None:
            self.waiting.append(number)
            return
        if number not in self.aside and not self._put(held, number, ordinal):
            self.aside.add(number)
        if parent >= ordinal:
            self.bad[number] = f"node {ordinal} stands behind node {parent}, which is none before it"
            self.cycles.append(Problem(number, session, self.bad[number]))
            return
        above = held.find(parent, self)
        if above == NONE:
            self.waiting.append(number)
            return
        self.parents[number] = above
        self._measure(number)

    def _measure(self, number: int) -> None:
        """Set the depth of a node whose parent is there, if that is known."""
        above = self.parents[number]
        depth = self.depths[number] = 1 if above == ROOT else self.depths[above] + 1 if self.depths[above] else 0
        if not depth:
            self._adrift.append(number)

    def _put(self, held: Held, number: int, ordinal: int) -> bool:
        """Whether a node is the one that its ordinal names."""
        assert held.first is not None
        if ordinal < held.first:
            what = f"node {ordinal} stands where its first node can be {held.first}"
        elif (placed := held.put(ordinal, number)) == number:
            return True
        elif placed in self.gone:  # which was told of twice, and once is left
            held.put(ordinal, number, instead=True)
            self.aside.add(placed)
            return True
        elif self.id_of(placed) == self.id_of(number):  # told of twice, as an interrupt may leave it
            self.repeated += 1
            return False
        else:
            what = f"node {ordinal} is there twice, with other content"
        self.wrong_ordinals.append(Problem(number, held.number, what))
        return False

    def _check(self, segment: int, rows: Entries, numbers: Sequence[int]) -> None:
        """Have records of one segment checked."""
        above = [self._id_above(number, session) for number, session in zip(numbers, rows["session"].tolist(), strict=True)]
        known = [self.sessions[session] for session in np.unique(rows["session"]).tolist() if session in self.sessions]
        rules = {held.number: held.rules for held in known if held.rules is not None}
        path = segment_path(self.segments, segment, "seg")
        self._checks.do(numbers, Task(path, self.keys.seed, rows, above, rules, bool(self.feature_files)), self._tell)

    def _id_above(self, number: int, session: int) -> bytes | None:
        """The id of a node's parent, where it is known for sure."""
        above = self.parents[number]
        if above >= 0:
            return self.id_of(above) if self.gone.get(above, True) else None
        return self.sessions[session].record.root_id if above == ROOT else None

    def _take(self, numbers: Sequence[int], checked: Checked) -> None:
        """Take in what was found of records."""
        for column, values in ((self.starts, checked.starts), (self.stops, checked.stops)):
            if isinstance(numbers, range):
                column[numbers.start : numbers.stop] = array("q", values)
            else:
                for number, value in zip(numbers, array("q", values), strict=True):
                    column[number] = value
        for at, why in checked.bad.items():
            self.bad[numbers[at]] = why
        self.identities |= checked.identities
        self.contents |= checked.contents
        for at, record in checked.others.items():
            number = numbers[at]
            self._note(number, _entry_of(record)[0], record)

    def _note(self, number: int, kind: int, data: bytes) -> None:
        """Note what a record says that is no node's."""
        if kind == ALIEN:
            self.bad[number] = "a record of no known kind"
            return
        if kind == _LATER:
            self.unknown += 1
            return
        try:
            record = codec.decode(data)
        except CorruptTree as error:
            self.bad[number] = str(error)
            return
        if isinstance(record, codec.HeadRecord):
            self.heads[record.session, record.name] = Move(number, record.ordinal, record.version)
        elif isinstance(record, codec.OpenedRecord):
            self.opening = record.incarnation
            self.openings[record.session] = number
        elif isinstance(record, codec.AliasRecord):
            self.aliases[record.namespace, record.alias] = number, record.identity
        elif isinstance(record, codec.SessionRecord):
            self.opening += 1

    def _end(self) -> None:
        """Place and check the nodes that came before what they rest on, and see that all begin where their parents end."""
        self.rows = np.concatenate([np.empty(0, ENTRY), *self._parts])
        self._parts.clear()
        while self.waiting:
            adrift, self._adrift = self._adrift, []
            for number in self._in_order(adrift):
                self._measure(number)
            for number, held in sorted(self.sessions.items()):
                if held.first is None and held.row not in self.bad:
                    self.sessions[number] = self._held(held.row, held.record)
            waiting, self.waiting = self.waiting, []
            for number in self._in_order(waiting):
                _, session, ordinal, parent = self.rows[number].item()[:4]
                self._place(number, session, ordinal, parent)
            came = np.array(sorted(set(waiting).difference(self.waiting)), np.int64)
            if not len(came) and len(self._adrift) == len(adrift):
                break
            for segment in np.unique(self.rows["segment"][came]).tolist():
                numbers = came[self.rows["segment"][came] == segment]
                self._check(segment, self.rows[numbers], numbers.tolist())
            self._checks.finish()
        parents, starts, stops = (np.frombuffer(column, np.int64) for column in (self.parents, self.starts, self.stops))
        ends = np.where(parents == ROOT, 0, stops[np.maximum(parents, 0)]) if len(parents) else starts
        for number in np.flatnonzero((parents != NONE) & (starts != ends)).tolist():
            if number not in self.bad and self.parents[number] not in self.bad:
                self.bad[number] = f"it begins after {starts[number]} tokens and its parent ends after {ends[number]}"

    def _in_order(self, numbers: list[int]) -> list[int]:
        """Parents before children."""
        some = np.array(numbers, np.int64)
        ordered: list[int] = some[np.lexsort((self.rows["ordinal"][some], self.rows["session"][some]))].tolist()
        return ordered

    def strays(self) -> Iterator[str]:
        """Files, below the store, that are no part of one."""
        known = {"FORMAT", "LOCK", "segments", "blobs"}
        yield from sorted(set(self.system.listdir(self.path)) - known)
        with suppress(FileNotFoundError):
            for name in sorted(self.system.listdir(self.segments)):
                stem, _, end = name.rpartition(".")
                if end not in ("seg", "idx") or not stem.isdigit() or int(stem) not in self.sizes:
                    yield f"segments/{name}"
        for name, _ in self.feature_files:
            if not blobs.is_place(name):
                yield os.path.relpath(name, self.path)

    # features

    def _look_at_features(self) -> None:
        for name, size in self.feature_files:
            if not blobs.is_place(name):
                continue
            with suppress(FileNotFoundError):  # it was dropped meanwhile
                try:
                    blobs.check_file(name)
                    self.features[name] = None
                except (CorruptTree, OSError) as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    self.features[name] = str(error)
            self._done += size
            self._tell(0)


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
