"""What a store needs of a place to keep records in: small protocols that every backend is an implementation of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from sessiontree.errors import StoreFailed

Progress = Callable[[int, int], object]  # is told how much of how much is done
Durability = Literal["commit", "group", "relaxed"]
Bytes = bytes | tuple[bytes, ...]  # of one record, whole or in parts
Records = Sequence[tuple[Bytes, bytes]]  # of one batch: the bytes, and what an index is to know of them


class Lease(Protocol):
    """As long as it is held, what came with it can be read.

    ``first``: which beginning of the log it is of. ``records``: how many records ever stood before that.
    """

    @property
    def first(self) -> int: ...

    @property
    def records(self) -> int: ...


class WriteLost(StoreFailed):
    """What was to be written stands behind something that was lost; nothing of it was taken."""


class Overtaken(StoreFailed):
    """Something else came first; nothing was taken, and it is to be looked at anew."""


class Log(Protocol):
    """Records in order, added only. Those enqueued together are there together or not at all, and never without those before."""

    recovered_bytes: int
    costly: bool  # whether each call to read goes to another machine

    @property
    def durability(self) -> Durability: ...

    @property
    def read_only(self) -> bool: ...

    @property
    def failed(self) -> bool: ...

    @property
    def durable(self) -> int: ...

    @property
    def lag(self) -> tuple[int, int]:
        """How many batches were taken and are not known to be on disk, and about how many bytes they are."""

    @property
    def leading(self) -> bool: ...

    @property
    def damaged(self) -> tuple[tuple[int, int, int], ...]: ...

    @property
    def losses(self) -> tuple[tuple[int, int, int], ...]:
        """Those of what is damaged that may have held records which are lost."""

    def enqueue(
        self,
        records: Records,
        after: int = 0,
        told: Sequence[object] = (None,),
        expected: object = None,
    ) -> int:
        """Take records, whole or in parts, each with what an index is to know of it: a number to wait for. No I/O is waited for.

        ``after``: the number of what they rest on. ``told``: its first entry must still be ``expected``. Raises WriteLost where
        what they rest on was lost, Overtaken where something came in between, StoreFailed where nothing is taken any more.
        """

    def is_durable(self, number: int) -> bool | None:
        """Whether they are on disk; False where they never will be, None while that is open."""

    def wait(self, number: int) -> None:
        """Until they are on disk. Raises StoreFailed where they never will be."""

    def relieve(self) -> None:
        """Where more is taken than the disk keeps up with, help to write. Raises nothing."""

    def flush(self) -> None:
        """Until everything taken is on disk."""

    def entries(self) -> NDArray[Any]:
        """What an index knows of every record, in order: kind, session, ordinal, parent, id, key, and its place."""

    def refresh(self) -> NDArray[Any]:
        """Those that came since the last call; who only reads looks for what others have written."""

    def read(self, known: Any) -> bytes:
        """The record of an entry. Raises CorruptTree."""

    def read_all(self, entries: NDArray[Any]) -> Iterator[bytes]:
        """Those of many entries in order, read together where they lie side by side. Raises CorruptTree."""

    @property
    def lease(self) -> Lease:
        """What keeps the entries readable that there are now: hold it with them."""

    def close(self) -> None: ...


class CompactLog(Log, Protocol):
    """A log that can be made to hold part of what it holds."""

    def cut(self) -> tuple[NDArray[Any], Any]:
        """Begin anew behind all there is: the entries so far, and the place to give to ``begin_at``."""

    def stored_bytes(self) -> int:
        """How many bytes all of it takes, about."""

    def copy(self, records: Records) -> None:
        """Store records once more, past what is in line, durably."""

    def begin_at(self, base: Any, last: Callable[[NDArray[Any]], Records]) -> None:
        """Forget what stands before a place, once the records that ``last`` names, given all entries since then, are stored too.

        What is forgotten goes when nothing holds the lease of earlier entries, in any process.
        """

    def sweep(self) -> bool:
        """Whether all that was forgotten is gone by now."""
