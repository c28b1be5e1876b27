"""The system calls that a store on disk makes, as one object, so that a test can be the disk.

Every descriptor is close-on-exec. A failing call raises ``OSError`` and is never repeated here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from typing import Final

__all__ = ["System"]

_DSYNC: Final[int] = getattr(os, "RWF_DSYNC", 0)


class System:
    """The operating system's own calls. A test passes an object with the same methods."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def pwritev(self, fd: int, parts: Sequence[bytes | memoryview], offset: int, *, sync: bool = False) -> int:
        """Write bytes that stand in parts; with sync what was written is durable on return.

        One call, and the interpreter's lock is given away once. An error does not say which of the two failed.
        """
        if _DSYNC or not sync:
            return os.pwritev(fd, parts, offset, _DSYNC if sync else 0)
        done = os.pwritev(fd, parts, offset)
        os.fdatasync(fd)
        return done

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Take the space, which reads as zeros; the file grows to its end."""
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory; one that is there already is no error."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def flock(self, fd: int, *, shared: bool = False) -> bool:
        """Try to lock an open file, alone or with others; False: another descriptor's lock forbids it."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
