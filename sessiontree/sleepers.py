"""Sessions that are open and on disk alone: what is to be known of each, in a few bytes, by its number in the journal."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree.locks import new_lock

_ROW: Final = np.dtype([("incarnation", "<u8"), ("generations", "<u8"), ("last_used", "<f8")])


class Sleeper(NamedTuple):
    """``generations``: how many keys it has made. ``last_used``: the time when it was, -inf before the first tick."""

    incarnation: int
    generations: int
    last_used: float


class Sleepers:
    """Numbers are dense, so each has a row, whose incarnation is 0 for a session that is not asleep."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._rows: NDArray[Any] = np.zeros(0, _ROW)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def put(self, number: int, sleeper: Sleeper) -> None:
        with self._lock:
            if number >= len(self._rows):
                rows = np.zeros(number + number // 8 + 64, _ROW)
                rows[: len(self._rows)] = self._rows
                self._rows = rows
            self._count += not self._rows[number]["incarnation"]
            self._rows[number] = sleeper

    def get(self, number: int) -> Sleeper | None:
        """What was put there."""
        with self._lock:
            if number >= len(self._rows) or not self._rows[number]["incarnation"]:
                return None
            return Sleeper(*self._rows[number].item())

    def remove(self, number: int) -> None:
        """It is asleep no longer."""
        with self._lock:
            if self.get(number) is not None:
                self._rows[number] = Sleeper(0, 0, 0.0)
                self._count -= 1

    def idle(self, now: float, idle_ttl: float) -> list[tuple[int, int]]:
        """(incarnation, number) of those that lay idle for so long; who was used before the first tick was at ``now``."""
        with self._lock:
            rows = self._rows
            asleep = rows["incarnation"] > 0
            rows["last_used"][asleep & (rows["last_used"] == -math.inf)] = now
            found = np.flatnonzero(asleep & (now - rows["last_used"] >= idle_ttl))
            return list(zip(rows["incarnation"][found].tolist(), found.tolist(), strict=True))
