"""An append-only log of records in a directory: atomic frames, group commit, recovery that tells a torn tail from damage.

It knows bytes and index entries, nothing of nodes. Little endian throughout::

    FORMAT                  format version and the store's uuid, whose crc seeds every other checksum
    BASE                    where the log begins, once it was compacted; before, at segment 1
    LOCK                    flock of the one writer
    segments/NNNNNNNN.seg   frames, one after the other; zeros after the last are preallocation
    segments/NNNNNNNN.idx   blocks of ENTRY rows for frames known to be synced; derived, may be deleted
    segments/NNNNNNNN.lease shared flock of every reader of the log that begins at this segment

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

Compaction. Records that are to stay are written again, behind all there is, while others go on writing; then BASE, renamed into
place, says that the log begins behind the old segments. What goes before the rename leaves a log with copies in it, which is the
same log. What stood before is removed once nobody reads it: no process holds the lease of an earlier beginning, nothing in this one
holds its :class:`Lease`.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import mmap
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any, Final, TypeVar
from weakref import WeakSet, ref

import numpy as np

from sessiontree.backends.base import Durability, Overtaken, Records, WriteLost
from sessiontree.backends.frames import (
    CHUNK,
    ENTRY,
    FRAME_OVERHEAD,
    HEAD,
    MAX_RECORD,
    NO_BASE,
    PREFIX_SIZE,
    VERSION,
    Base,
    End,
    Entries,
    Frame,
    Keys,
    Window,
    block_of,
    build_frame,
    crc32,
    is_sound,
    numbered,
    read_base,
    read_format,
    segment_path,
    size_of,
    write_all,
    write_new,
)
from sessiontree.backends.scan import Scan
from sessiontree.backends.system import System
from sessiontree.errors import CorruptTree, IncompatibleStore, LimitExceeded, StoreClosed, StoreFailed, StoreLocked, Unsupported
from sessiontree.locks import new_lock

__all__ = ["ENTRY", "PREFIX_SIZE", "Durability", "Lease", "SegmentLog"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH: Final = 2**31
MAX_BACKLOG: Final = 64 * 2**20  # bytes in line, above which who hands over helps to write
_FRAME_BYTES: Final = 2**20  # what one frame takes of what is pending, unless one batch alone is larger
_BLOCK_ROWS: Final = 4096
_ROW_BYTES: Final = ENTRY.itemsize
_RESERVE: Final = 2**20
_AHEAD: Final = (2**18, 2**24)  # bytes of zeros to keep in front of what is written, at least and at most
_ZEROS: Final = bytes(2**18)
_PAGE: Final = 2**12
_MAPPED: Final = 2**20  # bytes of a table, from which on it is mapped
_LOCK_SECONDS: Final = 0.8
_POLL: Final = (0.01, 0.05)  # seconds between two looks of the background thread: after work, and at most
_SWEEP: Final = 16  # looks between two at what can be removed
_PATIENCE: Final = 0.001
_BREATH: Final = 0.0002  # seconds between two pieces of zeros
_CACHED_FILES: Final = 128
# What a write fails with before anything of it counts; nothing else tells a failed write from a failed sync.
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class _Table:
    """Rows that only grow. What a view shows is never written again. ``count``: how many are shown.

    ``before``: a table whose rows come before its own ones, and which grows no more.
    """

    def __init__(self, before: _Table | None = None) -> None:
        self.before = before
        self.first: int = 0 if before is None else before.count
        self.count: int = self.first
        self._rows: Entries = np.empty(0, ENTRY)
        self._bytes = self._rows.view(np.uint8).data  # theirs

    def put(self, start: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write rows from start on: to do it twice is to do it once."""
        at = (start - self.first) * _ROW_BYTES
        stop = at
        for part in parts:
            stop += len(part)
        if stop > len(self._bytes):
            self._grow(start - self.first, stop // _ROW_BYTES)
        for part in parts:
            stop = at + len(part)
            self._bytes[at:stop] = part
            at = stop

    def _grow(self, kept: int, count: int) -> None:
        """Have room for so many rows, and more; of those there are, the first ``kept`` stay."""
        room = max(1024, count + count // 8)
        if room * _ROW_BYTES < _MAPPED:
            rows = np.empty(room, ENTRY)
        else:  # which goes back to the system at once when it is outgrown, and takes no memory where nothing was written yet
            rows = np.frombuffer(mmap.mmap(-1, room * _ROW_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), ENTRY)
        rows[:kept] = self._rows[:kept]
        self._rows, self._bytes = rows, rows.view(np.uint8).data

    def behind(self, start: int) -> _Table:
        """A table of the rows from start on, in the place of this one."""
        table = _Table()
        if self.first == start:
            table._rows, table._bytes = self._rows, self._bytes
        else:
            table.put(0, [self.view(self.count, start).tobytes()])
        table.count = self.count - start
        return table

    def view(self, count: int, start: int = 0) -> Entries:
        """Rows ``[start, count)``; a copy where some of them lie before."""
        view: Entries = self._rows[max(0, start - self.first) : count - self.first]
        if self.before is not None and start < self.first:
            view = np.concatenate([self.before.view(self.first, start), view])
        view.flags.writeable = False
        return view


class Lease:
    """As long as this is held, the entries that came with it can be read."""

    __slots__ = ("__weakref__", "_fd", "_system", "first", "records")

    def __init__(self, system: System, base: Base, fd: int = -1) -> None:
        self.first: int = base.segment
        self.records: int = base.records
        self._system = system
        self._fd = fd

    def lock(self, path: str) -> None:
        """Keep other processes from removing what it stands for, by the lock of a file, which a forked child inherits."""
        if self._fd < 0:
            with suppress(FileNotFoundError):  # nobody has written yet, or what it stands for is gone
                self._fd = self._system.open(path, os.O_RDONLY)
                self._system.flock(self._fd, shared=True)

    def end(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)

    __del__ = end


# the log --------------------------------------------------------------------------------------------------------------------

_SYSTEM: Final = System()
_open_logs: Final[WeakSet[SegmentLog]] = WeakSet()

_Lost = tuple[int, int, OSError]
# Number of the last batch that was taken; batches after it, each with its bytes in a frame; the frame being written; batches that
# were rolled back.
# One tuple, put in place by one assignment: an interrupt, a signal handler or a fork finds this state or the next.
_Queue = tuple[int, list[tuple[Records, int]], Frame | None, tuple[_Lost, ...]]


def new_identity() -> bytes:
    """What a new store is known by. It is no part of any node's id, nor of any state."""
    return uuid.uuid4().hex.encode()


class SegmentLog:
    """One writer's, or one reader's, view of the log. Thread-safe.

    Batches are numbered from 1 as they are enqueued and reach the disk in that order, each whole. One thread at a time writes:
    one that waits, or the background thread. A step that an interrupt cuts short is done again by the next, with the same bytes
    at the same place. After a failed sync, and under ``group`` and ``relaxed`` after a failed write, nothing is written any more.
    """

    costly = False

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
        self._keys: Keys | None = None
        self._lock_fd = -1
        self._mutex = new_lock()
        self._writer = new_lock()
        self._reader = new_lock()
        self._files: dict[int, int] = {}
        self._leader = 0  # the thread that writes
        self._gates: dict[Any, int] = {}  # of threads that wait, in order, and the batch that each waits for
        self._queue: _Queue = (0, [], None, ())
        self._backlog = 0  # bytes in line, more or less
        self._refused = False  # enqueue raises _refuse()
        self._forked = False
        self._closed = False
        self._failure: tuple[str, OSError] | None = None
        self._table = _Table()
        self._base = NO_BASE
        self.lease: Lease = Lease(system, NO_BASE)  # of what entries() shows
        self._cut = 0  # how many entries there were when it was cut
        self._before: list[ref[Lease]] = []  # of what it showed before
        self._litter = True  # there may be files of what it showed before
        self._end = End()
        self._covered = End()
        self._index_size = 0
        self._room = 0
        self._zeroed = 0  # up to where zeros were written, and not only reserved
        self._ahead = 0  # how many of them to keep
        self._looked = End()  # the end at the background thread's last look
        self._synced = 0
        self._written = 0
        self._durable = 0
        self._unsynced = 0  # bytes that are written
        self._followed = 0
        self._due = 0
        self._crowd = 0  # batches in the last frame that was synced
        self._patience = 0.0
        self._scan: Scan | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.recovered_bytes: int = 0
        self.damaged: tuple[tuple[int, int, int], ...] = ()
        self.losses: tuple[tuple[int, int, int], ...] = ()

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
        ``damaged``, (segment, start, stop) each, that which may have held records that are lost also in ``losses``, and everything
        whole is served. Raises StoreLocked within a second,
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
    def identity(self) -> bytes:
        """What the store is known by, to itself and to who reads it: no other has it, but a copy of its files."""
        return b"" if self._keys is None else self._keys.store

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
        table = self._table
        if table.before is not None:  # while it is compacted, or where that failed
            with self._writer:
                table = self._flattened()
        return table.view(table.count)

    def refresh(self) -> Entries:
        """The entries that came since the last call. A reader, or a forked child, looks on the disk."""
        with self._reader:
            if self._lock_fd < 0:
                self._follow()
            entries = self.entries()
            start, self._followed = self._followed, len(entries)
            return entries[start:]

    def read(self, entry: Any) -> bytes:
        """The record of an entry, or of an index into ``entries()``, checked. Raises CorruptTree, StoreFailed."""
        if isinstance(entry, (int, np.integer)):
            entry = self.entries()[entry]
        segment, offset, length, crc = entry.item()[-4:]
        if self._keys is None or self._closed:
            raise self._refuse()
        try:
            record = self._pread(segment, offset, length)
        except OSError as error:
            raise self._unreadable(segment, offset, error) from error
        if not is_sound(record, length, crc, self._keys.seed):
            raise _mismatched(segment, offset, length)
        return record

    def _unreadable(self, segment: int, offset: int, error: OSError) -> CorruptTree | StoreFailed:
        if error.errno in (errno.EIO, errno.ENOENT):
            return _damaged(segment, offset, str(error))
        return StoreFailed(f"{self._path} cannot be read: {error}", errno=error.errno)

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
            size = len(record) if isinstance(record, bytes) else size_of(record)
            if size > MAX_RECORD:
                raise LimitExceeded(f"a record of {size} bytes; at most {MAX_RECORD}", value=size, limit=MAX_RECORD)
            total += HEAD.size + size
        if total > MAX_BATCH:
            raise LimitExceeded(f"a batch of {total} bytes; at most {MAX_BATCH}", value=total, limit=MAX_BATCH)
        with self._mutex:
            if self._refused:
                raise self._refuse()
            lost = self._queue[3]
            if lost and any(first <= after <= last for first, last, _ in lost):
                raise WriteLost(f"{self._path}: batch {after} was lost, and what was to be written rests on it")
            base, items, _, _ = self._queue  # only now: a signal handler may have come in since
            if told[0] is not expected:  # from here to the call nothing comes in between
                raise Overtaken(f"{self._path}: something else was put in line meanwhile")
            if batch:
                items.append((batch, total))
                self._backlog += total
            return base + len(items)  # too high, never too low, if a signal handler came in between

    @property
    def failed(self) -> bool:
        """Whether nothing is written any more, for good."""
        return self._failure is not None

    @property
    def leading(self) -> bool:
        """Whether this thread is in the middle of writing, so that nothing that comes in here can wait."""
        return self._leader == get_ident()

    @property
    def lag(self) -> tuple[int, int]:
        """How many batches were taken and are neither durable nor lost, and about how many bytes they are."""
        base, items, frame, _ = self._queue
        batches, end = items[:], self._end
        size = sum(size for _, size in batches) + self._unsynced
        count = base - self._written + len(batches)
        if frame is not None and frame.end is not end:
            size += frame.end.offset - end.offset
        if self._durability == "relaxed":
            count += self._written - self._durable
        return max(0, count), max(0, size)

    def is_durable(self, number: int) -> bool | None:
        """Whether that batch is durable; False where it never will be, None while that is open."""
        if number <= self._durable and not self._queue[3]:
            return True
        try:
            return self._settled(number) or None
        except StoreFailed:
            return False

    def wait(self, number: int) -> None:
        """Return when that batch is durable. Raises StoreFailed if it never will be. An interrupt undoes nothing."""
        base, items, _, _ = self._queue
        if number > base + len(items):
            raise ValueError(f"batch {number} of {self.enqueued}")
        while not self._settled(number):
            if self._lead(number, sync=True):
                continue
            gate = threading.Lock()
            gate.acquire()
            self._gates[gate] = number
            try:
                if self._leader:
                    gate.acquire()
            finally:
                del self._gates[gate]

    def relieve(self) -> None:
        """Where more is in line than MAX_BACKLOG, write until it is not. Raises nothing: the next ``enqueue`` does."""
        while self._backlog > MAX_BACKLOG and self._written < self.enqueued and not self._refused and not self.leading:
            try:
                if not self._lead(self.enqueued, sync=False):
                    time.sleep(0.001)
            except StoreFailed:
                return

    def flush(self) -> None:
        """Return when everything enqueued is durable; at once where nothing can be."""
        if self._failure is not None:
            raise self._failed()
        if self._forked:
            raise self._refuse()
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
        first = self._failure is None
        with self._mutex:
            if self._failure is None:
                self._failure = reason, error
            self._refused = True
        failed = self._failed()
        if first:
            _logger.error("%s", failed)
        return failed

    def _reject(self, error: OSError) -> None:
        """Undo a failed write on the disk, and lose all batches in line: a later one may rest on an earlier one."""
        if self._durability != "commit":
            raise self._stop("a write failed", error)
        self._undo(error)
        with self._mutex:
            base, items, frame, lost = self._queue
            first = base + 1 if frame is None else frame.first
            n = len(items)
            if lost and lost[-1][1] == first - 1:
                first, lost = lost[-1][0], lost[:-1]
            # No call between the slice and the assignment: no signal handler's batch falls in between.
            self._queue = (base + n, items[n:], None, (*lost, (first, base + n, error)))
            self._written = base + n
            self._backlog = 0

    def _undo(self, error: OSError) -> None:
        """Cut what a failed write may have left behind the end."""
        end = self._end
        try:
            if end.fd >= 0:
                self._system.ftruncate(end.fd, end.offset)
                self._system.fdatasync(end.fd)
                self._room, self._zeroed = end.offset, 0
        except OSError as second:
            raise self._stop(f"a write failed ({error}) and could not be undone", second) from error

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
        me = get_ident()
        claimed = False
        try:
            with self._mutex:
                leader = self._leader
                if not leader:
                    claimed, self._leader = True, me
            if not claimed:
                if leader == me:
                    raise RuntimeError("a signal handler or finalizer may enqueue, not wait, while its thread commits")
                return False
            with self._writer:
                if self._pid != os.getpid():
                    raise self._refuse()
                while self._written < number and self._failure is None and self._step():
                    pass
                if sync and self._durable < number and self._failure is None and self._durability == "relaxed":
                    self._sync()
            return True
        finally:
            if claimed:
                self._leader = 0
                if self._gates:
                    self._wake()

    def _wake(self) -> None:
        """Let those go on whose batch is settled, and the first of the others, to write. Who is let go is not let go again."""
        over = self._failure is not None or self._closed or self._forked
        led = False
        for gate, number in list(self._gates.items()):
            settled = over or number <= self._written
            if (settled or not led) and gate.locked():
                try:  # noqa: SIM105  # suppress takes three times as long, for every thread that waits
                    gate.release()
                except RuntimeError:  # another thread was quicker
                    pass
            led = led or not settled

    def _step(self) -> bool:
        """Write one frame. False: nothing was in line, or what was is lost."""
        try:
            frame = self._queue[2]
            if frame is None:
                if self._crowd > 1:
                    self._gather()
                frame = self._stage()
                if frame is None:
                    return False
        except OSError as error:
            self._reject(error)
            return False
        first, last, parts, _, end = frame
        if end is not self._end:  # an interrupt may have come between that and the rest of _publish
            if end.offset > self._room:
                self._reserve(end.offset)
            sync = self._durability != "relaxed"
            crowd = last - first + 1 if sync else 0
            began = time.perf_counter() if crowd > 1 else 0.0
            try:
                write_all(self._system, end.fd, parts, end.frame, sync=sync)
            except OSError as error:
                if sync and error.errno not in _FULL:
                    raise self._stop("a write, or its sync, failed", error) from error
                self._reject(error)
                return False
            if crowd > 1:
                self._patience = min(_PATIENCE, (time.perf_counter() - began) / 2)
            self._crowd = crowd
        self._publish(frame)
        return True

    def _gather(self) -> None:
        """Let the threads that the last commit woke enqueue again, for half the time of a sync at most: they share the next."""
        deadline = time.perf_counter() + self._patience
        while len(self._queue[1]) < self._crowd and time.perf_counter() < deadline:
            time.sleep(0)

    def _stage(self) -> Frame | None:
        """Take what is in line, up to _FRAME_BYTES, and make its frame, in a new segment if this one is full."""
        assert self._keys is not None
        base, items, _, _ = self._queue
        batches: list[Records] = []
        size = FRAME_OVERHEAD
        for batch, more in items:
            if batches and size + more > _FRAME_BYTES:
                break
            batches.append(batch)
            size += more
        n = len(batches)
        if not n:
            return None
        self._fit(size)
        frame = build_frame(self._keys, self._end, self._synced, base + 1, batches)
        with self._mutex:
            base, items, _, lost = self._queue
            self._queue = (base + n, items[n:], frame, lost)
            self._backlog = self._backlog - size if self._queue[1] else 0  # a signal handler may have come in while it was added to
        return frame

    def _fit(self, size: int) -> None:
        """Be in a segment that has room for a frame of so many bytes."""
        end = self._end
        if end.fd < 0 or (end.offset and end.offset + size > self._segment_bytes):
            self._roll()

    def _publish(self, frame: Frame) -> None:
        if self._durability == "relaxed":
            self._unsynced += frame.end.offset - self._end.offset  # to do it twice is to do it once, from the next line on
        self._put(frame)
        if self._durability != "relaxed":
            self._synced = frame.end.sequence
            self._durable = frame.last
        self._written = frame.last
        base, items, _, lost = self._queue  # only who leads puts another in its place
        self._queue = (base, items, None, lost)
        if items:  # this thread may go on writing
            self._wake()

    def _put(self, frame: Frame) -> None:
        rows, end = frame.rows, frame.end
        while True:
            table = self._table
            table.put(end.records - len(rows) // _ROW_BYTES, (rows,))
            if table is self._table:  # else a signal handler has asked for the entries in the middle of a compaction
                break
        self._end = end
        table.count = end.records

    def _sync(self) -> None:
        """Make what is written durable."""
        end, written = self._end, self._written
        if end.fd >= 0 and self._synced < end.sequence:
            self._sync_fd(end.fd)
        self._synced, self._durable, self._unsynced = end.sequence, written, 0

    def _sync_fd(self, fd: int) -> None:
        try:
            self._system.fdatasync(fd)
        except OSError as error:
            raise self._stop("a sync failed", error) from error

    def _reserve(self, stop: int) -> None:
        room = max(stop, min(stop + max(_RESERVE, stop), self._segment_bytes))
        start = max(self._room, self._end.offset)
        try:
            self._system.fallocate(self._end.fd, start, room - start)
            self._room = room
        except OSError:
            self._room = sys.maxsize  # the write will tell

    def _plan_ahead(self) -> bool:
        """Whether zeros are to be written: under ``commit``, four times what came since the last look, within _AHEAD."""
        end, before = self._end, self._looked
        self._looked = end
        came = end.offset - (before.offset if end.segment == before.segment else 0)
        self._ahead = min(max(_AHEAD[0], 4 * came), _AHEAD[1])
        return self._durability == "commit" and came > 0

    def _zero(self) -> bool:
        """Write a piece of the zeros that the next records are to replace. False: there are enough, or it is of no use.

        A file system notes of bytes that are only reserved that nobody wrote them, and to sync the first record there is to sync
        that it changed, too: of 4 kB half as much again, of 256 kB twice the time. So who has to wait for no disk does it before.
        """
        with self._writer:
            end = self._end
            start = -(-max(self._zeroed, end.offset) // _PAGE) * _PAGE  # no page has a record and zeros of here
            size = min(len(_ZEROS), self._segment_bytes - start)
            if end.fd < 0 or self._failure is not None or size <= 0 or start >= end.offset + self._ahead:
                return False
            if self._queue[2] is not None:  # an interrupt left a frame, which may stand there already
                return False
            if start + size > self._room:
                self._reserve(start + size)
            try:
                if self._room == sys.maxsize:  # there may be too little to waste any
                    raise OSError(errno.ENOSPC, "nothing could be reserved")
                write_all(self._system, end.fd, (_ZEROS[:size],), start, sync=True)
            except OSError:
                self._zeroed = sys.maxsize  # records go where they can; their own writes will tell
                return False
            self._zeroed = start + size
            return True

    def _roll(self) -> None:
        """Seal this segment, synced to its end, and start the next one, whose name is synced before it is used."""
        end, system = self._end, self._system
        if end.fd >= 0:
            self._sync()
            self._index()
            system.ftruncate(end.fd, end.offset)
            self._sync_fd(end.fd)
        fd = system.open(segment_path(self._segments, end.segment + 1, "seg"), os.O_RDWR | os.O_CREAT)
        try:
            system.fsync_dir(self._segments)
        except OSError as error:
            system.close(fd)
            raise self._stop("a sync of the directory failed", error) from error
        self._room = self._zeroed = 0
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

    def _append_block(self, start: End, end: End, size: int, sync: bool = False) -> int:
        assert self._keys is not None
        path = segment_path(self._segments, end.segment, "idx")
        data = block_of(self._keys, start, end, self._table.view(end.records, start.records))
        if not size:
            write_new(self._system, path, data, sync=sync)
            return len(data)
        fd = self._system.open(path, os.O_RDWR)
        try:
            write_all(self._system, fd, (data,), size)
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
                    frame = build_frame(self._keys, end, self._synced, 0, ())
                    write_all(self._system, end.fd, frame.parts, end.offset)
                    self._system.ftruncate(end.fd, frame.end.offset)
                    self._system.fdatasync(end.fd)
                    self._end = frame.end
                    self._synced = frame.end.sequence
                self._index(sync=True)
                self._system.fsync_dir(self._segments)
            except OSError:
                return

    # compaction

    def _alone(self, work: Callable[[], T]) -> T:
        """Do something while no frame is being written."""
        me = get_ident()
        while True:
            claimed = False
            try:
                if self._leader == me:
                    raise Unsupported("a signal handler or finalizer cannot compact while its thread is writing to the disk")
                with self._mutex:
                    if not self._leader:
                        claimed, self._leader = True, me
                if claimed:
                    with self._writer:
                        if self._refused or self._pid != os.getpid():
                            raise self._refuse()
                        while self._queue[2] is not None and self._step():  # that an interrupt left
                            pass
                        if self._failure is not None:
                            raise self._failed()
                        done = work()
                    return done
            except OSError as error:
                raise StoreFailed(f"{self._path} was not compacted: {error}", errno=error.errno) from error
            finally:
                if claimed:
                    self._leader = 0
                    self._wake()
            time.sleep(0.0005)

    def _flattened(self) -> _Table:
        """All rows in one table. The caller holds the writer."""
        table = self._table
        if table.before is not None:
            flat = _Table()
            flat.put(0, [table.view(table.count).tobytes()])
            flat.count = table.count
            self._table = flat
        return self._table

    def cut(self) -> tuple[Entries, Base]:
        """Begin a new segment: all entries before it, and where it begins. Nothing that is in line is waited for."""

        def roll() -> tuple[Entries, Base]:
            if self._end.offset or self._end.fd < 0:
                self._roll()
            entries = self.entries()
            self._cut = len(entries)
            self._table = _Table(self._table)
            return entries, Base(self._end.segment, self._end.sequence)

        return self._alone(roll)

    def stored_bytes(self) -> int:
        """How many bytes its records take, without frames and what is only preallocated or waits to be removed."""
        entries = self.entries()
        return int(entries["length"].sum(dtype=np.int64)) + HEAD.size * len(entries)

    def read_all(self, entries: Entries) -> Iterator[bytes]:
        """The records of entries in order, checked; those that lie side by side are read together. Raises CorruptTree."""
        if self._keys is None or self._closed:
            raise self._refuse()
        window, fd, current = None, -1, -1
        try:
            for segment, offset, length, crc in entries[["segment", "offset", "length", "crc"]].tolist():
                if window is None or segment != current:
                    before, fd, current = fd, -1, segment  # closed once, whatever comes in between
                    if before >= 0:
                        self._system.close(before)
                    fd = self._system.open(segment_path(self._segments, segment, "seg"), os.O_RDONLY)
                    window = Window(self._system, fd)
                record = window.get(offset, length)
                if not is_sound(record, length, crc, self._keys.seed):
                    raise _mismatched(segment, offset, length)
                yield record
        except OSError as error:
            raise self._unreadable(current, 0, error) from error
        finally:
            if fd >= 0:
                self._system.close(fd)

    def copy(self, records: Records) -> None:
        """Write records behind all there is, durably, past what is in line. Raises StoreFailed; nothing is lost then."""
        self._alone(lambda: self._write_aside(records))

    def begin_at(self, base: Base, last: Callable[[Entries], Records]) -> None:
        """Let the log begin where ``cut`` said last. ``last``: given the entries since then, what else is to be copied first."""

        def switch() -> None:
            table = self._table
            if records := last(table.view(table.count, self._cut)):
                self._write_aside(records)
            self._sync()
            now = base._replace(synced=self._synced, records=self._base.records + self._cut)
            body = b"sessiontree base %d %d %d %d" % now
            assert self._keys is not None
            self._make_lease(now.segment)
            self._system.fsync_dir(self._segments)  # or who opens the log after a crash to read it would find no lease to take
            data = body + b" %08x\n" % crc32(body, self._keys.seed)
            write_new(self._system, self._path + "/BASE", data, sync=True)
            try:
                self._system.fsync_dir(self._path)
            except OSError as error:  # it begins there or not
                raise self._stop("a sync of the directory failed", error) from error
            dropped, alone = self._cut, self._table.behind(self._cut)
            end = self._end._replace(records=self._end.records - dropped)
            covered = self._covered._replace(records=self._covered.records - dropped)
            followed, before, lease = max(0, self._followed - dropped), [*self._before, ref(self.lease)], Lease(self._system, now)
            # No call from here on: an interrupt finds all of it or nothing. The table first: see Journal.columns.
            self._table, self._end, self._covered, self._followed, self._cut = alone, end, covered, followed, 0
            self._before, self._base, self._litter, self.lease = before, now, True, lease

        self._alone(switch)

    def _make_lease(self, first: int) -> None:
        """The file that readers lock."""
        self._system.close(self._system.open(segment_path(self._segments, first, "lease"), os.O_RDWR | os.O_CREAT))

    def _write_aside(self, records: Records) -> None:
        """One frame of records that are in no line. The caller is alone."""
        assert self._keys is not None
        size = FRAME_OVERHEAD + sum([HEAD.size + size_of(record) for record, _ in records])
        self._fit(size)
        frame = build_frame(self._keys, self._end, self._synced, 0, (records,))
        if frame.end.offset > self._room:
            self._reserve(frame.end.offset)
        try:
            write_all(self._system, frame.end.fd, frame.parts, frame.end.frame)
        except OSError as error:
            self._undo(error)
            raise
        self._sync_fd(frame.end.fd)  # all of the segment, under relaxed too
        self._put(frame)
        self._synced, self._durable, self._unsynced = frame.end.sequence, self._written, 0

    def sweep(self) -> bool:
        """Remove what stands before the beginning, if nobody reads it any more. True: nothing is left of it.

        The background thread goes on trying.
        """
        with self._writer, suppress(OSError):
            if not self._refused and self._litter:
                self._litter = not self._sweep()
        return not self._litter

    def _sweep(self) -> bool:
        system, first = self._system, self._base.segment
        names = system.listdir(self._segments)
        if not any(numbered(names, suffix, 0, first) for suffix in (".seg", ".idx", ".lease")):
            return True
        if not self._unread():
            return False
        for number in numbered(names, ".lease", 0, first):
            fd = system.open(segment_path(self._segments, number, "lease"), os.O_RDWR)
            try:
                if not system.flock(fd):
                    return False
            finally:
                system.close(fd)
        for suffix in ("seg", "idx", "lease"):
            for number in numbered(names, f".{suffix}", 0, first):
                system.unlink(segment_path(self._segments, number, suffix))
        system.fsync_dir(self._segments)
        return True

    def _leases(self) -> list[Lease]:
        """Those that are held by anybody here."""
        return [lease for lease in (*(each() for each in self._before), self.lease) if lease is not None]

    def _unread(self) -> bool:
        """Whether nobody here reads what stood before the beginning any more; then its files are let go of."""
        self._before = [lease for lease in self._before if lease() is not None]
        if self._before:
            return False
        for number in list(self._files):
            if number < self._base.segment:
                self._system.close(self._files.pop(number))
        return True

    # the background thread

    def _run(self) -> None:
        pause, longest = _POLL
        for look in itertools.count(1):
            if self._failure is not None or self._closing.wait(pause):
                break
            try:
                busy = self._tend()
                if self._litter and look % _SWEEP == 0:
                    self.sweep()
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
        if self._plan_ahead():
            while not self._closing.is_set() and self._zero():
                time.sleep(_BREATH)  # who has a record to write goes first
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
            with suppress(FileNotFoundError):  # nobody has written yet
                if any(name.endswith(".seg") for name in self._system.listdir(self._segments)):
                    raise IncompatibleStore(f"{self._path} holds segments and no FORMAT")
            return
        assert self._keys is not None
        self._unread()
        begun = self._take_lease()
        if begun is not None:
            base, lease = begun
            scan, table = Scan(self._system, self._segments, self._keys, self._entry_of, self._strict, base), _Table()
            scan.walk()
            if rows := scan.take():
                table.put(0, rows)
            table.count = scan.at.records
            before = [*self._before, ref(self.lease)]
            # The table first: see Journal.columns.
            self._table, self._end, self._followed, self._scan = table, scan.at, 0, scan
            self.damaged, self.losses = tuple(scan.damaged), tuple(scan.losses())
            self._before, self._base, self.lease = before, base, lease
            return
        known, start = self._scan, self._end.records
        assert known is not None
        try:
            known.walk()
        finally:
            if rows := known.take():
                self._table.put(start, rows)
            self._end = known.at
            self._table.count = known.at.records
            self.damaged, self.losses = tuple(known.damaged), tuple(known.losses())

    def _take_lease(self) -> tuple[Base, Lease] | None:
        """Where the log begins by now, and what keeps what stands there from being removed. None: where it did."""
        base = self._read_base()
        while self._scan is None or base != self._base:
            lease = Lease(self._system, base)
            lease.lock(segment_path(self._segments, base.segment, "lease"))
            seen, base = base, self._read_base()
            if seen == base:
                return base, lease
        return None

    def _read_base(self) -> Base:
        assert self._keys is not None
        return read_base(self._system, self._path, self._keys)

    def _open_writer(self) -> None:
        system = self._system
        system.mkdir(self._path)
        names = set(system.listdir(self._path))
        if not self._identify():
            begun = {"LOCK", "FORMAT", "FORMAT.new", "segments"}
            if names - begun or ("segments" in names and system.listdir(self._segments)):
                raise IncompatibleStore(f"{self._path} holds other things than a store")
        self._take_lock()
        if not self._identify():
            system.mkdir(self._segments)
            system.fsync_dir(self._path)
            self._format()
        system.fsync_dir(self._path)
        with suppress(PermissionError):  # a parent that may not be read: its owner made this directory, and synced it or not
            system.fsync_dir(os.path.dirname(self._path))
        self._base = self._read_base()
        self._recover()
        self.lease = Lease(system, self._base)
        with suppress(OSError):
            self._litter = not self._sweep()
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
        self._keys = read_format(self._system, self._path)
        return self._keys is not None

    def _format(self) -> None:
        body = b"sessiontree log %d %s" % (VERSION, new_identity())
        write_new(self._system, self._path + "/FORMAT", body + b" %08x\n" % crc32(body), sync=True)
        self._identify()

    def _recover(self) -> None:
        """Find the end of the log, cut what is torn, and make the rest durable again."""
        assert self._keys is not None
        system = self._system
        scan = Scan(system, self._segments, self._keys, self._entry_of, self._strict, self._base)
        scan.walk()
        end = scan.at
        if rows := scan.take():
            self._table.put(0, rows)
        self._table.count = end.records
        self.damaged, self.losses = tuple(scan.damaged), tuple(scan.losses())
        broken = scan.sealed or any(segment == end.segment for segment, _, _ in scan.damaged)
        if end.segment >= self._base.segment and not broken:
            fd = system.open(segment_path(self._segments, end.segment, "seg"), os.O_RDWR)
            self._end = end = end._replace(fd=fd)
            self._renew(fd, scan)
            self._room = system.size(fd)
            self.recovered_bytes = scan.torn
        self._end = self._looked = end
        self._followed = end.records
        self._synced = end.sequence
        self._covered = end._replace(offset=0)
        self._make_lease(self._base.segment)
        system.fsync_dir(self._segments)
        self._rebuild_index(scan)

    def _renew(self, fd: int, scan: Scan) -> None:
        """Cut the torn tail, and store again what is not known to be synced."""
        system, end = self._system, scan.at
        if scan.torn:
            system.ftruncate(fd, end.offset)
        window = Window(system, fd)
        at = scan.tail[0].offset if scan.tail else end.offset
        while at < end.offset:
            data = window.get(at, min(CHUNK, end.offset - at))
            if not data:
                raise _damaged(end.segment, at, "the file was cut while it was opened")
            write_all(system, fd, (data,), at)
            at += len(data)
        system.fdatasync(fd)

    def _rebuild_index(self, scan: Scan) -> None:
        """Write the sidecars that are missing or fall short, but for the last segment's if it only has to grow."""
        damaged = {segment for segment, _, _ in scan.damaged}
        for start, stop, cover in scan.walked:
            if stop.segment in damaged or stop.sequence == start.sequence:
                continue
            current = stop.segment == self._end.segment
            covered, size = start, 0
            if cover is not None and cover.whole:
                covered = End(stop.segment, cover.stop, cover.last, start.records + cover.records, cover.frame, cover.frame_crc)
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
        fd = system.open(segment_path(self._segments, segment, "seg"), os.O_RDONLY)
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
        if not self._forked:  # nobody reads any more, whoever holds them
            for lease in self._leases():
                lease.end()

    def __del__(self) -> None:  # a reader that nobody closed; a writer's thread holds it
        if not self._closed and self._pid == os.getpid():
            self._release()

    def _after_fork(self) -> None:
        """In the child: no descriptor of the parent's, no writing. The lock stays the parent's."""
        self._forked = self._refused = True
        self._leader = 0
        self._release()
        self._queue = (self._queue[0], [], None, self._queue[3])


def _never_durable(reason: str, first: int, last: int, error: OSError) -> StoreFailed:
    failed = StoreFailed(f"{reason}; never durable: writes {first} to {last}", numbers=range(first, last + 1), errno=error.errno)
    failed.__cause__ = error
    return failed


def _damaged(segment: int, offset: int, what: str) -> CorruptTree:
    return CorruptTree(f"segment {segment}, offset {offset}: {what}", segment=segment, offset=offset)


def _mismatched(segment: int, offset: int, length: int) -> CorruptTree:
    return _damaged(segment, offset, f"the record of {length} bytes does not match its checksum")


_forking: Final = new_lock()


def _before_fork() -> None:
    """The child goes on reading what it sees now: it inherits a lock of that."""
    _forking.acquire()
    for log in list(_open_logs):
        for lease in log._leases():
            with suppress(OSError):
                lease.lock(segment_path(log._segments, lease.first, "lease"))


def _in_parent() -> None:
    for log in list(_open_logs):
        for lease in log._leases():
            lease.end()
    _forking.release()


def _in_child() -> None:
    for log in list(_open_logs):
        log._after_fork()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
