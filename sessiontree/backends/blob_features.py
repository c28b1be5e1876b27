"""Features of media as blobs that many processes share: of each content a short row of blobs, added to and never changed.

A put adds one blob with the arrays that are not there yet: number 0, then 1, and so on. Each is written by whoever is first to name
it, so all arrays of a put are there or none is, equal ones of many processes are stored once, and whoever is second sees what the
first one put. Each has the bytes of a file of :mod:`sessiontree.backends.blobs`, bound to its content and number, and is verified
whenever it is read. Nothing here knows nodes; they are whole without any of this.

Garbage is what no node names and nobody has put for ``grace_seconds``: until then somebody may be about to commit the node that
names it. Putting what is there already makes it young again, by a blob beside the others. No place removes blobs under a condition:
what is put again in the very moment in which it is removed is gone, and NeedsMedia says so to whoever needs it.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from sessiontree.backends.blobs import encoded_arrays, file_name, read_arrays
from sessiontree.backends.shared import Blobs
from sessiontree.errors import KeyTaken, StoreFailed, Unsupported
from sessiontree.features import FeatureArray
from sessiontree.locks import new_lock

_USED: Final = "used"  # what makes a content young again
_OURS: Final = re.compile(r"([0-9a-f]{64})/(0|[1-9][0-9]*|used)")
_ATTEMPTS: Final = 100  # of a put, each of which somebody else was quicker in


class BlobFeatures:
    """The features below ``prefix`` in ``blobs``, by content. Any number of processes write and read.

    ``prefix``: begins the name of each blob; what shares it shares its features. ``grace_seconds``: how long what was put is kept
    from :meth:`remove`, by the clock of the place. Every method raises StoreFailed where the place cannot be reached.
    """

    def __init__(self, blobs: Blobs, prefix: str, *, grace_seconds: float, read_only: bool) -> None:
        self._blobs = blobs
        self._prefix = prefix
        self._grace = grace_seconds
        self._read_only = read_only
        self._fresh: set[str] = set()  # put, and perhaps not named by any node yet
        self._latest: set[str] = set()  # put since names() was called last
        self._lock = new_lock()

    def put(self, content: tuple[Any, ...], arrays: Mapping[str, FeatureArray]) -> None:
        """Keep arrays beside those that are there, in one blob; none where all are there.

        Raises KeyTaken for other values under a name that is there, CorruptTree where what is there is damaged.
        """
        self._check_writable()
        name = file_name(content)
        with self._lock:
            self._fresh.add(name)
            self._latest.add(name)
        touched = False
        for _ in range(_ATTEMPTS):
            count, known = self._read(name)
            for each, array in arrays.items():
                if known.get(each, array) != array:
                    raise KeyTaken(f"other features are kept as {each!r}", key=each)
            if new := {each: array for each, array in arrays.items() if each not in known}:
                if self._blobs.put(self._blob(name, count), b"".join(encoded_arrays(_bound(name, count), new))):
                    return
            elif touched or self._is_young(name):
                return
            else:  # and look once more: it may have been removed until then
                self._touch(name)
                touched = True
        raise StoreFailed(f"features {name} are still not kept after {_ATTEMPTS} attempts: others change them all the time")

    def get(self, content: tuple[Any, ...]) -> dict[str, FeatureArray] | None:
        """The arrays of a content, in the order they were put; None without any. Raises CorruptTree where they are damaged."""
        count, arrays = self._read(file_name(content))
        return arrays if count else None

    def drop(self, content: tuple[Any, ...]) -> None:
        """Forget what is kept of a content, if there is anything: for everybody."""
        self._check_writable()
        name = file_name(content)
        self._delete({name: [each for _, each, _ in self._listed(f"{name}/")]})

    def __contains__(self, content: tuple[Any, ...]) -> bool:
        return any(each == "0" for _, each, _ in self._listed(f"{file_name(content)}/"))

    def names(self) -> set[str]:
        """Names of the contents that are there and were not put by anybody for ``grace_seconds``."""
        with self._lock:
            self._latest.clear()
        return set(self._old())

    def fresh(self) -> set[str]:
        """Names of those that were put by this process, but for those that came()."""
        with self._lock:
            return set(self._fresh)

    def came(self, names: Iterable[str]) -> None:
        """Nodes named these since they were put."""
        with self._lock:
            self._fresh.difference_update(names)

    def remove(self, names: Iterable[str]) -> int:
        """Remove contents by their names: how many. Not those that this process put since names(), or anybody within the grace."""
        self._check_writable()
        with self._lock:
            wanted = set(names) - self._latest
        gone = {name: blobs for name, blobs in self._old().items() if name in wanted} if wanted else {}
        self._delete(gone)
        with self._lock:
            self._fresh.difference_update(gone)
        return len(gone)

    def _check_writable(self) -> None:
        if self._read_only:
            raise Unsupported("the store of these features was opened to be read")

    def _blob(self, name: str, number: int | str) -> str:
        return f"{self._prefix}{name}/{number}"

    def _read(self, name: str) -> tuple[int, dict[str, FeatureArray]]:
        """How many blobs with arrays there are, and the arrays."""
        arrays: dict[str, FeatureArray] = {}
        for number in itertools.count():
            data = self._blobs.get(self._blob(name, number))
            if data is None:
                return number, arrays
            for each, array in read_arrays(_bound(name, number), io.BytesIO(data), len(data)).items():
                arrays.setdefault(each, array)
        raise AssertionError("counting ends nowhere")

    def _listed(self, below: str = "") -> Iterator[tuple[str, str, float]]:
        """The name of a content, what its blob is called, and how old that is, for each blob that is one of these."""
        for blob, age in self._blobs.names(self._prefix + below):
            if found := _OURS.fullmatch(blob, len(self._prefix)):
                yield found[1], found[2], age

    def _is_young(self, name: str) -> bool:
        """Whether some blob will not be old for half the grace yet."""
        return any(2 * age <= self._grace for _, _, age in self._listed(f"{name}/"))

    def _touch(self, name: str) -> None:
        """Have a young blob beside those that are there."""
        used = self._blob(name, _USED)
        self._blobs.delete([used])
        self._blobs.put(used, b"")

    def _old(self) -> dict[str, list[str]]:
        """The blobs of each content of which none is younger than the grace."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        young = set()
        for name, blob, age in self._listed():
            found[name].append(blob)
            if age < self._grace:
                young.add(name)
        return {name: blobs for name, blobs in found.items() if name not in young}

    def _delete(self, contents: Mapping[str, Iterable[str]]) -> None:
        """Remove blobs, the last of each row first: what is left where this ends half-way is the beginning of a row."""
        levels: defaultdict[int, list[str]] = defaultdict(list)
        for name, blobs in contents.items():
            for blob in blobs:
                levels[0 if blob == _USED else int(blob)].append(self._blob(name, blob))
        for _, level in sorted(levels.items(), reverse=True):
            self._blobs.delete(level)


def _bound(name: str, number: int) -> str:
    """What the digest in a blob covers beside its bytes: of what content it is, and which one."""
    return f"{name}.{number}"
