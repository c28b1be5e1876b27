"""A disk in memory: it records what is asked of it, fails on request, and shows what a crash may leave.

What a crash may leave: of what was synced, all; of what was not, any subset of sectors of 512 bytes, any subset of truncations, and
any subset of the changes of names since the last sync of their directory. A failed sync makes nothing durable, and what it failed
for is never made durable by a later sync, only by being written again.
"""

from __future__ import annotations

import errno
import os
import posixpath
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sessiontree.backends.system import System

SECTOR = 512
DIRECTORY = -1

# What happened, by kind: create path file; mkdir path; rename old new; unlink path; write file offset data; truncate file size;
# sync file; failed file; syncdir path; mark value.
Event = tuple[Any, ...]


class Fault(NamedTuple):
    """From the n-th call on that ``hits`` picks: ``error``, for one call or, ``forever``, for all. ``part`` of a write is done."""

    n: int
    error: int
    hits: frozenset[str] = frozenset({"open", "pwrite", "fdatasync", "fsync_dir", "fallocate", "ftruncate", "rename", "mkdir"})
    forever: bool = False
    part: float = 0.5


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


class _Cache:
    """One file's bytes, and what a sync has yet to make durable."""

    def __init__(self, disk: bytes) -> None:
        self.disk = bytearray(disk)
        self.pending: list[tuple[Event, bool]] = []  # and whether a sync failed for it

    def land(self, rng: random.Random, *, synced: bool) -> None:
        """Bring pending changes to the disk: all in sound order after a sync, otherwise as luck has it."""
        odds = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for event, failed in self.pending:
            sure = synced and not failed
            if event[0] == "truncate":
                if sure or rng.random() < odds:
                    _resize(self.disk, event[2])
                continue
            _, _, offset, data = event
            stop = offset + len(data)
            for start in [offset, *range(offset - offset % SECTOR + SECTOR, stop, SECTOR)]:
                if sure or rng.random() < odds:
                    part = data[start - offset : min(start - start % SECTOR + SECTOR, stop) - offset]
                    _resize(self.disk, max(len(self.disk), start))
                    self.disk[start : start + len(part)] = part
        self.pending.clear()


class Disk(System):
    """A System in memory. ``trace`` is all that changed it; ``mark`` puts the test's own events in between."""

    def __init__(self, names: dict[str, int] | None = None, files: dict[int, bytearray] | None = None) -> None:
        self.names = {"/": DIRECTORY, **(names or {})}
        self.files = files or {}
        self._base = dict(self.names), {file: bytes(data) for file, data in self.files.items()}  # durable
        self.acked = 0  # of what a test stored before
        self.trace: list[Event] = []
        self.calls: list[str] = []
        self.fault: Fault | None = None
        self._hit = 0
        self._handles: dict[int, int] = {}
        self._next = 10_000  # no descriptor of the operating system's
        self._locked: dict[int, set[int]] = {}  # descriptors that hold a lock of each file
        self._shared: set[int] = set()  # those of them that share it
        self._lock = threading.RLock()

    # for tests

    def mark(self, value: Any) -> None:
        with self._lock:
            self.trace.append(("mark", value))

    def path(self, suffix: str) -> str:
        """The one path, or the last, that ends so."""
        return max(path for path in self.names if path.endswith(suffix))

    def content(self, suffix: str) -> bytearray:
        return self.files[self.names[self.path(suffix)]]

    def copy(self) -> Disk:
        """What another process finds after this one was killed."""
        with self._lock:
            return Disk(dict(self.names), {file: bytearray(data) for file, data in self.files.items()})

    def crash(self, rng: random.Random, events: int) -> Disk:
        """A disk that a loss of power after so many events may leave, drawn by rng."""
        with self._lock:
            return _crashed(self.trace[:events], rng, self._base)

    # the system calls

    def _call(self, name: str) -> Fault | None:
        self.calls.append(name)
        fault = self.fault
        if fault is None or name not in fault.hits:
            return None
        self._hit += 1
        if self._hit < fault.n or (self._hit > fault.n and not fault.forever):
            return None
        if name == "pwrite":
            return fault
        raise OSError(fault.error, os.strerror(fault.error))

    def _file(self, path: str) -> int:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path]

    def _open_file(self, fd: int) -> int:
        if fd not in self._handles:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._handles[fd]

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            if path not in self.names and flags & os.O_CREAT:
                self._call("open")
                self._file(posixpath.dirname(path))
                file = self.names[path] = len(self.files) + 1
                self.files[file] = bytearray()
                self.trace.append(("create", path, file))
            file = self._file(path)
            if flags & os.O_TRUNC and self.files[file]:
                self.trace.append(("truncate", file, 0))
                self.files[file].clear()
            self._next += 1
            self._handles[self._next] = file
            return self._next

    def close(self, fd: int) -> None:
        with self._lock:
            file = self._open_file(fd)
            del self._handles[fd]
            self._locked.get(file, set()).discard(fd)
            self._shared.discard(fd)

    def size(self, fd: int) -> int:
        return len(self.files[self._open_file(fd)])

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        with self._lock:
            return bytes(self.files[self._open_file(fd)][offset : offset + length])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        with self._lock:
            file = self._open_file(fd)
            fault = self._call("pwrite")
            done = bytes(data if fault is None else data[: int(len(data) * fault.part)])
            content = self.files[file]
            if done:
                _resize(content, max(len(content), offset))
                content[offset : offset + len(done)] = done
                self.trace.append(("write", file, offset, done))
            if fault is not None and (fault.error != errno.ENOSPC or not done):
                raise OSError(fault.error, os.strerror(fault.error))
            if fault is not None and not fault.forever:
                self.fault = fault._replace(n=self._hit + 1, part=0.0)  # a short write, and then the error
            return len(done)

    def pwritev(self, fd: int, parts: Sequence[bytes | memoryview], offset: int, *, sync: bool = False) -> int:
        """A write and a sync, either of which may fail, or see a crash come in between."""
        done = self.pwrite(fd, b"".join(parts), offset)
        if sync:
            self.fdatasync(fd)
        return done

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            file = self._open_file(fd)
            try:
                self._call("fdatasync")
            except OSError:
                self.trace.append(("failed", file))
                raise
            self.trace.append(("sync", file))

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        with self._lock:
            self._call("fallocate")
            file = self._open_file(fd)
            if offset + length > len(self.files[file]):
                self._resize(file, offset + length)

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            self._call("ftruncate")
            self._resize(self._open_file(fd), size)

    def _resize(self, file: int, size: int) -> None:
        _resize(self.files[file], size)
        self.trace.append(("truncate", file, size))

    def fsync_dir(self, path: str) -> None:
        with self._lock:
            self._file(path)
            self._call("fsync_dir")
            self.trace.append(("syncdir", path))

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._call("rename")
            self._file(old)
            self.names[new] = self.names.pop(old)
            self.trace.append(("rename", old, new))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._call("unlink")
            self._file(path)
            del self.names[path]
            self.trace.append(("unlink", path))

    def mkdir(self, path: str) -> None:
        with self._lock:
            if path in self.names:
                return
            self._call("mkdir")
            self._file(posixpath.dirname(path))
            self.names[path] = DIRECTORY
            self.trace.append(("mkdir", path))

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            self._file(path)
            return [posixpath.basename(name) for name in self.names if posixpath.dirname(name) == path and name != path]

    def flock(self, fd: int, *, shared: bool = False) -> bool:
        with self._lock:
            holders = self._locked.setdefault(self._open_file(fd), set())
            others = holders - {fd}
            if others and not (shared and others <= self._shared):
                return False
            holders.add(fd)
            if shared:
                self._shared.add(fd)
            return True


def _crashed(events: list[Event], rng: random.Random, base: tuple[dict[str, int], dict[int, bytes]]) -> Disk:
    names = dict(base[0])
    files = {file: _Cache(data) for file, data in base[1].items()}
    pending: list[Event] = []
    for event in events:
        kind = event[0]
        if kind in ("create", "mkdir", "rename", "unlink"):
            pending.append(event)
            if kind == "create":
                files[event[2]] = _Cache(b"")
        elif kind == "syncdir":
            for change in [change for change in pending if posixpath.dirname(change[-1 if kind == "rename" else 1]) == event[1]]:
                _rename(names, change)
                pending.remove(change)
        elif kind == "sync":
            files[event[1]].land(rng, synced=True)
        elif kind == "failed":
            cache = files[event[1]]
            cache.pending = [(change, True) for change, _ in cache.pending]
        elif kind != "mark":
            files[event[1]].pending.append((event, False))
    for cache in files.values():
        cache.land(rng, synced=False)
    odds = rng.choice((0.0, 0.5, 1.0))
    inodes = _inodes(events, base[0])
    for change in pending:
        if rng.random() < odds:
            _rename(names, change, inodes)
    kept = {path: file for path, file in names.items() if _reachable(path, names)}
    return Disk(kept, {file: cache.disk for file, cache in files.items()})


def _inodes(events: list[Event], base: dict[str, int]) -> dict[str, int]:
    """The file that each name ever had last, so that a rename can land without the creation before it."""
    found = dict(base)
    for event in events:
        if event[0] == "create":
            found[event[1]] = event[2]
        elif event[0] == "rename":
            found[event[2]] = found[event[1]]
    return found


def _rename(names: dict[str, int], change: Event, inodes: dict[str, int] | None = None) -> None:
    kind = change[0]
    if kind == "create":
        names[change[1]] = change[2]
    elif kind == "mkdir":
        names[change[1]] = DIRECTORY
    elif kind == "unlink":
        names.pop(change[1], None)
    else:
        file = names.pop(change[1], None)
        names[change[2]] = (inodes or {})[change[1]] if file is None else file


def _reachable(path: str, names: dict[str, int]) -> bool:
    while path != "/":
        path = posixpath.dirname(path)
        if path not in names:
            return False
    return True


def mutated(rng: random.Random, whole: bytes, magic: bytes, forge: Callable[[bytearray], None]) -> tuple[bytearray, bool]:
    """Some bytes of a file of frames changed, moved or left out, and whether one was forged: with checksums made to fit."""
    data = bytearray(whole)
    forged = False
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, size, other = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 12, 40, 300)), rng.randrange(len(whole))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + size] = rng.choice((rng.randbytes(size), bytes(size), magic * (size // 4)))
            case 2:
                data[at : at + size] = whole[other : other + size]
            case 3:
                data[at:at] = whole[other : other + size]
            case 4:
                del data[at : at + size]
            case _ if len(data) == len(whole):
                forge(data)
                forged = True
    return data, forged
