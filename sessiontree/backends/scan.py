"""Finding what a log holds, from its sidecars and frames, and telling a torn tail from damage. Never writes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from sessiontree.backends.frames import (
    CHUNK,
    CRC,
    ENTRY,
    FRAME_MAGIC,
    FRAME_OVERHEAD,
    HEAD,
    HEADER,
    MAX_RECORD,
    NO_BASE,
    PLACE,
    PREFIX_SIZE,
    Base,
    Cover,
    End,
    Entries,
    Header,
    Keys,
    Window,
    crc32,
    header_at,
    is_sound,
    numbered,
    read_cover,
    segment_path,
)
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, IncompatibleStore

_WRONG: Final = "it is not what was written"


class _Found(NamedTuple):
    """A whole record: from its head to its end. ``head``: as it was written, and as it is there if ``headed``."""

    start: int
    stop: int
    row: bytes
    head: bytes
    headed: bool = True


class Scan:
    """Reads on from ``at``. Never writes. What it found since ``take`` was last called is in ``rows``."""

    def __init__(
        self,
        system: System,
        directory: str,
        keys: Keys,
        entry_of: Callable[[bytes], bytes],
        strict: bool,
        base: Base = NO_BASE,
    ) -> None:
        self._system = system
        self._directory = directory
        self._keys = keys
        self._entry_of = entry_of
        self._strict = strict
        self._first = base.segment
        self.at: End = End(sequence=base.sequence)
        self.synced: int = max(base.sequence, base.synced)
        self.torn: int = 0  # bytes after the last frame that are no frame
        self.sealed: bool = False  # nothing may be appended to the last segment
        self.damaged: list[tuple[int, int, int]] = []
        self.reasons: list[str] = []  # of each
        self.harmless: list[bool] = []  # of each: whether every record that was there is known and whole
        self.tail: deque[End] = deque()  # ends before the frames of this segment that are not known to be synced
        self.walked: list[tuple[End, End, Cover | None]] = []  # of each segment: from, to, its sidecar
        self._rows: list[bytes | memoryview] = []
        self._gap = False  # sequences may jump: damage that was reported hides how many are missing
        self._covers: dict[int, Cover | None] = {}
        self._covered: tuple[int, Entries] = 0, np.empty(0, ENTRY)  # what the sidecar of one segment says
        self._checked = False  # the rest of this segment was looked at once
        self._sidecars: list[int] = []

    def take(self) -> list[bytes | memoryview]:
        rows, self._rows = self._rows, []
        return rows

    def losses(self) -> Iterator[tuple[int, int, int]]:
        """Those of what is damaged that may have held records which are lost."""
        return (where for where, harmless in zip(self.damaged, self.harmless, strict=True) if not harmless)

    def walk(self) -> None:
        """Go on to the end of the log as it is now."""
        for _ in self.segments():
            pass

    def segments(self) -> Iterator[int]:
        """The same, one segment after the other: each when it was looked at."""
        try:
            names = self._system.listdir(self._directory)
        except FileNotFoundError as error:  # it was made before FORMAT
            raise CorruptTree(f"{self._directory} is missing") from error
        segments = sorted(numbered(names, ".seg", self._first))
        self.walked = []
        self._covers = {}
        self._covered = 0, np.empty(0, ENTRY)
        self._sidecars = numbered(names, ".idx", self._first)
        if not self.at.segment and (segments or self._sidecars or self.synced):
            self._enter(self._first)
        while self.at.segment:
            later = segments[-1:] > [self.at.segment]
            segment = self.at.segment
            self._walk_segment(later, segment in segments)
            yield segment
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
        fd = self._system.open(segment_path(self._directory, segment, "seg"), os.O_RDONLY)
        try:
            window = Window(self._system, fd)
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

    def _still(self, window: Window) -> None:
        """A writer may take back a frame whose write failed after a reader found it whole."""
        header = header_at(window.get(self.at.frame, HEADER.size), self._keys, self.at.segment, self.at.frame)
        if header is None or header.crc != self.at.frame_crc:
            raise CorruptTree(
                f"segment {self.at.segment}, offset {self.at.frame}: a frame that was read is there no more; open the log again",
                segment=self.at.segment,
                offset=self.at.frame,
            )

    def _use_cover(self, window: Window) -> Cover | None:
        cover = self._cover(self.at.segment)
        if cover is None or cover.first != self.at.sequence + 1 or cover.stop > window.size():
            return None
        header = header_at(window.get(cover.frame, HEADER.size), self._keys, self.at.segment, cover.frame)
        if header is None or (header.sequence, header.crc) != (cover.last, cover.frame_crc):
            return None
        if cover.frame + FRAME_OVERHEAD + header.length != cover.stop:
            return None
        self._rows.extend(cover.rows)
        count = self.at.records + cover.records
        self.at = End(self.at.segment, cover.stop, cover.last, count, cover.frame, cover.frame_crc)
        self.synced = max(self.synced, cover.last)
        return cover

    def _frame(self, window: Window) -> bool:
        """Read the frame at ``at`` if it is whole and the next in sequence."""
        at = self.at
        header = header_at(window.get(at.offset, HEADER.size), self._keys, at.segment, at.offset)
        if header is None or not self._next(header):
            return False
        rows: list[bytes] = []
        heads: list[bytes] = []
        place = at.offset + HEADER.size
        stop = place + header.length
        for _ in range(header.records):
            found = self._record(window, place, stop)
            if found is None:
                return False
            head, row, place = found
            heads.append(head)
            rows.append(row)
        if place != stop or window.get(stop, CRC.size) != CRC.pack(crc32(b"".join(heads), header.crc)):
            return False
        self._rows.append(b"".join(rows))
        self._gap = False
        self.tail.append(at)
        self.at = End(at.segment, stop + CRC.size, header.sequence, at.records + header.records, at.offset, header.crc)
        self.synced = max(self.synced, header.synced)
        while self.tail and self.tail[0].sequence < self.synced:
            self.tail.popleft()
        return True

    def _next(self, header: Header) -> bool:
        return header.sequence == self.at.sequence + 1 or (self._gap and header.sequence > self.at.sequence)

    def _record(self, window: Window, place: int, stop: int) -> tuple[bytes, bytes, int] | None:
        """The record whose head stands at place, if it is whole: head, row, where it ends."""
        head = window.get(place, HEAD.size)
        if len(head) < HEAD.size:
            return None
        magic, length, crc = HEAD.unpack(head)
        place += HEAD.size
        if magic != self._keys.magic or place + length > stop:
            return None
        if length > CHUNK and place + length > window.size():  # forged: do not make room for it
            return None
        record = window.get(place, length)
        if len(record) < length or crc32(record, self._keys.seed ^ length) != crc:
            return None
        row = self._entry_of(record) + PLACE.pack(self.at.segment, place, length, crc)
        if len(row) != ENTRY.itemsize:
            raise ValueError(f"entry_of gave {len(row) - PLACE.size} bytes; an entry's prefix has {PREFIX_SIZE}")
        return head, row, place + length

    def _bad(self, window: Window, later: bool) -> bool:
        """No next frame stands at ``at``. False: the segment ends here. True: go on, behind damage or with a frame that came."""
        at = self.at
        if self._checked and not later and not any(window.get(at.offset, HEADER.size)):
            return False
        stop = window.filled(at.offset)
        if stop == at.offset and later:
            return False
        if not later and self._proof(window) <= at.sequence:
            if not at.offset and self._foreign(window):
                raise IncompatibleStore(f"segment {at.segment} is of another store than FORMAT")
            self.torn = stop - at.offset
            self._checked = True
            return False
        window.forget()  # a writer may have been in the middle of it
        if self._frame(window):
            return True
        cover = self._cover(at.segment)
        return self._skip(window, max(stop, min(cover.stop, window.size())) if cover else stop, later)

    def _foreign(self, window: Window) -> bool:
        """Whether a segment starts with a whole frame that has another store's keys: no tail of a write to this one."""
        data = window.get(0, HEADER.size)
        if len(data) < HEADER.size or data[:4] != FRAME_MAGIC:
            return False
        _, _, _, count, _, _, length, crc = HEADER.unpack(data)
        place, stop = HEADER.size, HEADER.size + length
        heads: list[bytes] = []
        while len(heads) < count:
            head = window.get(place, HEAD.size)
            if len(head) < HEAD.size or place >= stop:
                return False
            magic, size, _ = HEAD.unpack(head)
            if magic == self._keys.magic:
                return False
            heads.append(head)
            place += HEAD.size + size
        return bool(heads) and place == stop and window.get(stop, CRC.size) == CRC.pack(crc32(b"".join(heads), crc))

    def _proof(self, window: Window | None) -> int:
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

    def _headers(self, window: Window, start: int) -> Iterator[tuple[int, Header]]:
        while (start := window.find(FRAME_MAGIC, start)) >= 0:
            header = header_at(window.get(start, HEADER.size), self._keys, self.at.segment, start)
            if header is not None and header.sequence > self.at.sequence:
                yield start, header
            start += 1

    def _cover(self, segment: int) -> Cover | None:
        if segment not in self._covers:
            path = segment_path(self._directory, segment, "idx")
            self._covers[segment] = read_cover(self._system, path, self._keys, segment)
        return self._covers[segment]

    def _damage(self, start: int, stop: int, what: str, *, harmless: bool = False) -> None:
        segment = self.at.segment
        if self._strict:
            raise CorruptTree(
                f"segment {segment}, offset {start}: {what}; frame {self.at.sequence + 1} was synced",
                segment=segment,
                offset=start,
            )
        self.damaged.append((segment, start, stop))
        self.reasons.append(what)
        self.harmless.append(harmless)

    def _skip(self, window: Window, stop: int, later: bool) -> bool:
        """Note the damage at ``at``, keep the records in it that are whole, and go behind it."""
        at = self.at
        start, header = next(self._headers(window, at.offset), (stop, None))
        if header is None or start > at.offset:
            self._salvage_frames(window, start, header)
            self.at = self.at._replace(offset=start)
            self._gap = True
        elif not self._next(header):
            self._damage(at.offset, at.offset, f"frame {header.sequence} stands here")
            self._gap = True
        else:
            self._salvage_frame(window, header)
            end = at.offset + FRAME_OVERHEAD + header.length
            self.at = self.at._replace(offset=end, sequence=header.sequence, frame=at.offset, frame_crc=header.crc)
        if header is None and not later:
            self.at = self.at._replace(sequence=max(self.at.sequence, self._proof(None)))
            self.sealed = True
        return header is not None

    def _salvage_frames(self, window: Window, stop: int, following: Header | None) -> None:
        """Keep what is whole between ``at`` and ``stop``, where no header is sound. ``following``: the header there."""
        start, segment = self.at.offset, self.at.segment
        found = self._whole_records(window, start, stop)
        cover = self._cover(segment)
        if following is not None:
            alone = following.sequence == self.at.sequence + 2
        else:
            alone = cover is not None and (cover.last, cover.stop) == (self.at.sequence + 1, stop)
        body, end = start + HEADER.size, stop - CRC.size
        ends, starts = [body, *(each.stop for each in found)], [*(each.start for each in found), end]
        harmless = alone and not self._gap and ends == starts
        self._keep(found, start, stop, harmless=harmless)

    def _salvage_frame(self, window: Window, header: Header) -> None:
        """Keep what is whole of the frame at ``at``, whose header is."""
        body = self.at.offset + HEADER.size
        end = body + header.length
        found = self._whole_records(window, body, min(end, window.size()))
        footer = window.get(end, CRC.size)
        if len(found) < header.records:
            found = self._with_one_more(window, found, body, end, header, footer)
        complete = len(found) == header.records
        sound = footer == CRC.pack(crc32(b"".join(each.head for each in found), header.crc))
        beside = complete and not sound  # of an incomplete frame nobody can say
        self._keep(found, body, end + CRC.size if beside else end, harmless=complete)

    def _keep(self, found: list[_Found], start: int, stop: int, *, harmless: bool) -> None:
        """Note records, and as damage all that lies beside them, or that there is nothing where something was."""
        done = start
        known = len(self.damaged)
        for record in found:
            begun = record.start if record.headed else record.start + HEAD.size
            if begun > done:
                only_head = not record.headed and done == record.start
                what = "the head of a whole record is damaged" if only_head else _WRONG
                self._damage(done, begun, what, harmless=harmless)
            done = record.stop
        if done < stop or len(self.damaged) == known:
            self._damage(done, stop, _WRONG, harmless=harmless)
        self._rows.append(b"".join(record.row for record in found))
        self.at = self.at._replace(records=self.at.records + len(found))

    def _whole_records(self, window: Window, start: int, stop: int) -> list[_Found]:
        """The records between two places that are whole, if need be by what a sidecar or their own crc says, in order."""
        magic = CRC.pack(self._keys.magic)
        found: list[_Found] = []
        done, place = start, window.find(magic, start)
        while 0 <= place < stop:
            record = self._record(window, place, stop)
            if record is None:
                place = window.find(magic, place + 1)
                continue
            head, row, end = record
            found += [*self._headless(window, done, place), _Found(place, end, row, head)]
            done = end
            place = window.find(magic, done)
        return [*found, *self._headless(window, done, stop)]

    def _headless(self, window: Window, start: int, stop: int) -> Iterator[_Found]:
        """Records between two places that are whole but for their heads: as a sidecar says, or as what is left of a head says."""
        for place, length, crc in self._entries_between(start + HEAD.size, stop):
            if place - HEAD.size >= start and (record := self._found(window, stop, place, length, crc)):
                yield from self._beheaded(window, start, record.start)
                yield record
                start = record.stop
        yield from self._beheaded(window, start, stop)

    def _beheaded(self, window: Window, start: int, stop: int) -> Iterator[_Found]:
        """The same, one behind the other from ``start`` on, without a sidecar."""
        while start + HEAD.size < stop:
            place = start + HEAD.size
            _, length, crc = HEAD.unpack(window.get(start, HEAD.size).ljust(HEAD.size, b"\0"))
            record = self._found(window, stop, place, length, crc) or self._found(window, stop, place, stop - place, crc)
            if record is None:
                return
            yield record
            start = record.stop

    def _found(self, window: Window, stop: int, place: int, length: int, crc: int | None = None) -> _Found | None:
        """The record that lies at a place and ends before ``stop``, if its checksum is ``crc``. None: whatever it is."""
        if not 0 < length <= min(stop - place, MAX_RECORD):
            return None
        record = window.get(place, length)
        crc = crc32(record, self._keys.seed ^ length) if crc is None else crc
        if not is_sound(record, length, crc, self._keys.seed):
            return None
        row = self._entry_of(record) + PLACE.pack(self.at.segment, place, length, crc)
        return _Found(place - HEAD.size, place + length, row, HEAD.pack(self._keys.magic, length, crc), headed=False)

    def _with_one_more(
        self, window: Window, found: list[_Found], start: int, stop: int, header: Header, footer: bytes
    ) -> list[_Found]:
        """The records of a frame with the only one that is missing, if the checksum of all heads says that it is whole."""
        ends = [start, *(each.stop for each in found)], [*(each.start for each in found), stop]
        gaps = [(number, a, b) for number, (a, b) in enumerate(zip(*ends, strict=True)) if b > a]
        if len(gaps) != 1 or len(found) + 1 != header.records:
            return found
        [(number, begin, end)] = gaps
        try:
            record = self._found(window, end, begin + HEAD.size, end - begin - HEAD.size)
        except CorruptTree:  # bytes that are no record
            record = None
        if record is None:
            return found
        more = [*found[:number], record, *found[number:]]
        return more if footer == CRC.pack(crc32(b"".join(each.head for each in more), header.crc)) else found

    def _entries_between(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Offset, length and crc of the records that begin there as the sidecar of this segment says."""
        segment = self.at.segment
        if self._covered[0] != segment:
            cover = self._cover(segment)
            self._covered = segment, np.frombuffer(b"" if cover is None else b"".join(cover.rows), ENTRY)
        rows = self._covered[1]
        low, high = np.searchsorted(rows["offset"], (start, stop))
        found: list[tuple[int, int, int]] = rows[["offset", "length", "crc"]][low:high].tolist()
        return found
