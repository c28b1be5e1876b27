"""Features of media on disk: one file for each content, written once, verified whenever it is read.

A file is a magic number, the length of a msgpack header, the header (for each array its name, what its dtype is called, NumPy's
name of it, shape and bytes), the arrays' bytes, and a SHA-256 over the file's name and all of it. It gets that name when all of it
is on disk, so a file that is there is whole or damaged, never unfinished. Nothing here knows nodes; they are whole without any of
this.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import msgpack
import numpy as np

from sessiontree.digest import pack
from sessiontree.errors import CorruptTree, KeyTaken, StoreFailed, Unsupported
from sessiontree.features import FeatureArray
from sessiontree.locks import new_lock

_MAGIC: Final = b"STBLOB\x01\n"
_MOST_HEADER: Final = 2**20
_CHUNK: Final = 2**20
_DIGEST: Final = 32
_temporaries: Final = itertools.count()  # a signal handler may write in the middle of a write


class FeatureFolder:
    """The features below ``path``, by content. One process writes, any number read."""

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._pid = os.getpid()
        if not read_only:  # nobody else writes: these are of processes that were killed
            for name in glob.glob(os.path.join(glob.escape(path), "*.tmp")):
                with suppress(OSError):
                    os.unlink(name)
        self._fresh: set[str] = set()  # put, and perhaps not named by any node yet
        self._latest: set[str] = set()  # put since names() was called last
        self._lock = new_lock()  # what is added to a file is added to what was read of it

    def put(self, content: tuple[Any, ...], arrays: Mapping[str, FeatureArray]) -> None:
        """Keep arrays beside those that are there.

        Raises KeyTaken for other values under a name that is there, StoreFailed where the disk refuses it: nothing is changed.
        """
        self._check_writable()
        with self._lock:
            self._fresh.add(file_name(content))
            self._latest.add(file_name(content))
            self._put(content, arrays)

    def _put(self, content: tuple[Any, ...], arrays: Mapping[str, FeatureArray]) -> None:
        known = self.get(content)
        if known is not None:
            for each, array in arrays.items():
                if known.get(each, array) != array:
                    raise KeyTaken(f"other features are kept as {each!r}", key=each)
            if known.keys() >= arrays.keys():
                return
            arrays = {**known, **arrays}
        folder, name = self._place(content)
        temporary = os.path.join(self._path, f"{next(_temporaries)}.tmp")
        try:
            for each in (self._path, folder):  # not what lies above: a store that was deleted does not come back
                with suppress(FileExistsError):
                    os.mkdir(each)
            with open(temporary, "wb", buffering=0) as file:
                for chunk in encoded_arrays(name, arrays):
                    _write(file, chunk)
                os.fsync(file.fileno())
            os.rename(temporary, name)
            _sync_folder(folder)
            _sync_folder(self._path)
            _sync_folder(os.path.dirname(self._path) or ".")
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise StoreFailed(f"features cannot be written to {name}: {error.strerror}", path=name) from error
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def get(self, content: tuple[Any, ...]) -> dict[str, FeatureArray] | None:
        """The arrays of a content; None without any. Raises CorruptTree where the file is damaged."""
        _, name = self._place(content)
        try:
            file = open(name, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            return None
        with file:
            return read_arrays(name, file, os.fstat(file.fileno()).st_size)

    def drop(self, content: tuple[Any, ...]) -> None:
        """Forget what is kept of a content, if there is anything."""
        self._check_writable()
        with suppress(FileNotFoundError):
            os.unlink(self._place(content)[1])

    def names(self) -> set[str]:
        """Names of the files that are there."""
        with self._lock:
            self._latest.clear()
        return {name for where, _, files in os.walk(self._path) for name in files if is_place(os.path.join(where, name))}

    def fresh(self) -> set[str]:
        """Names of those that were put by this process, but for those that came()."""
        with self._lock:
            return set(self._fresh)

    def came(self, names: Iterable[str]) -> None:
        """Nodes named these since they were put."""
        with self._lock:
            self._fresh.difference_update(names)

    def remove(self, names: Iterable[str]) -> int:
        """Remove files by their names, but for those put since names(): how many. One that the disk keeps stays."""
        self._check_writable()
        removed = 0
        with self._lock:
            for name in set(names) - self._latest:
                with suppress(OSError):
                    os.unlink(os.path.join(self._path, name[:2], name))
                    removed += 1
                self._fresh.discard(name)
                with suppress(OSError):
                    os.rmdir(os.path.join(self._path, name[:2]))
        return removed

    def _check_writable(self) -> None:
        if self._read_only:
            raise Unsupported(f"the store of {self._path} was opened to be read")
        if self._pid != os.getpid():
            raise Unsupported(f"the store of {self._path} may only be read in a forked child")

    def __contains__(self, content: tuple[Any, ...]) -> bool:
        return os.path.exists(self._place(content)[1])

    def _place(self, content: tuple[Any, ...]) -> tuple[str, str]:
        text = file_name(content)
        folder = os.path.join(self._path, text[:2])
        return folder, os.path.join(folder, text)


class _Reader:
    """Reads one file from its beginning to its end. Every step raises CorruptTree where the file is not what it says."""

    def __init__(self, name: str, file: Any, size: int) -> None:
        self._file = file
        self._name = name
        self._size = size
        self._digest = _started(name)

    def read(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        if len(data) != count:
            raise CorruptTree(f"features in {self._name} end after {self._file.tell()} of {self._size} bytes", path=self._name)
        self._digest.update(data)
        return data

    def header(self) -> list[tuple[str, str, np.dtype[Any], tuple[int, ...], int]]:
        start = self.read(len(_MAGIC) + 4)
        length = int.from_bytes(start[len(_MAGIC) :], "little")
        if start[: len(_MAGIC)] != _MAGIC or length > min(self._size, _MOST_HEADER):
            raise CorruptTree(f"{self._name} is no file of features", path=self._name)
        return _described(self.read(length), self._size, self._name)

    def end(self) -> None:
        if self._file.read(_DIGEST + 1) != self._digest.digest():
            raise CorruptTree(f"features in {self._name} are damaged", path=self._name)


def check_file(name: str) -> None:
    """Read a file of features to its end, holding a chunk at a time. Raises CorruptTree where it is damaged."""
    with open(name, "rb") as file:
        reader = _Reader(name, file, os.fstat(file.fileno()).st_size)
        for *_, count in reader.header():
            for start in range(0, count, _CHUNK):
                reader.read(min(_CHUNK, count - start))
        reader.end()


def copy_file(name: str, new: str) -> None:
    """A copy of a file in another folder of features, which is made if it is not there; on disk when this returns."""
    folder = os.path.dirname(new)
    os.makedirs(folder, exist_ok=True)
    shutil.copyfile(name, new + ".tmp")
    fd = os.open(new + ".tmp", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(new + ".tmp", new)
    for _ in range(3):  # its folder, that of all features, the store's
        _sync_folder(folder)
        folder = os.path.dirname(folder)


def files_in(path: str) -> list[tuple[str, int]]:
    """Every file below a folder, and how many bytes it has."""
    return [
        (name, os.path.getsize(name)) for where, _, names in os.walk(path) for name in sorted(os.path.join(where, n) for n in names)
    ]


def is_place(name: str) -> bool:
    """Whether a file has the name and the folder that some content's has; a writer that was killed leaves others."""
    folder, base = os.path.split(name)
    return re.fullmatch("[0-9a-f]{64}", base) is not None and os.path.basename(folder) == base[:2]


def content_digest(content: tuple[Any, ...]) -> bytes:
    """What the file of a content is named after."""
    return sha256(pack(content)).digest()


def file_name(content: tuple[Any, ...]) -> str:
    return content_digest(content).hex()


def _started(name: str) -> Any:
    """A digest that binds a file to the content it is named after."""
    return sha256(os.path.basename(name).encode())


def read_arrays(name: str, file: Any, size: int) -> dict[str, FeatureArray]:
    """The arrays of a file: ``read`` and ``tell`` are all that is asked of it. ``size``: the most bytes that are there.

    Raises CorruptTree for what :func:`encoded_arrays` does not give under that name.
    """
    reader = _Reader(name, file, size)
    arrays = {each: FeatureArray(kind, dtype, shape, reader.read(count)) for each, kind, dtype, shape, count in reader.header()}
    reader.end()
    return arrays


def encoded_arrays(name: str, arrays: Mapping[str, FeatureArray]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of this name, in pieces; the last part of its path is what they are bound to."""
    header = pack([[each, blob.name, blob.dtype.str, blob.shape, len(blob.data)] for each, blob in arrays.items()])
    digest = _started(name)
    for piece in (_MAGIC + len(header).to_bytes(4, "little") + header, *(blob.data for blob in arrays.values())):
        for at in range(0, len(piece), _CHUNK):
            chunk = memoryview(piece)[at : at + _CHUNK]
            digest.update(chunk)
            yield chunk
    yield digest.digest()


def _write(file: Any, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _described(header: bytes, size: int, name: str) -> list[tuple[str, str, np.dtype[Any], tuple[int, ...], int]]:
    """What a header says of each array, checked against the file's size before anything is read."""
    try:
        found = []
        for key, kind, code, shape, count in msgpack.unpackb(header, use_list=False):
            dtype = np.dtype(code)
            ends = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if any(type(each) is not int for each in (*shape, count)) or not isinstance(key + kind, str):
                raise ValueError(key)
            if dtype.kind not in "biufc" or not (ends <= count <= ends + 1 and count <= size):
                raise ValueError(key)
            np.broadcast_to(np.empty((), dtype), shape)  # which says so where NumPy has no such shape
            found.append((key, kind, dtype, shape, count))
    except Exception as error:
        raise CorruptTree(f"{name} has a header that says nothing", path=name) from error
    return found


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
