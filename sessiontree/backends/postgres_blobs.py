"""Blobs in PostgreSQL: a row for each, and its bytes in pieces of 1 MiB, so that nobody needs one of 100 MB in one piece.

All of a blob is written in one transaction and read by one statement, so it is there whole or not at all. Who writes a name that is
being written waits until that is done. Needs the extra ``postgres``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, TypeVar

import psycopg

from sessiontree.backends.postgres_lines import attempts, may_pass
from sessiontree.errors import CorruptTree, StoreFailed

PIECE: Final = 2**20  # bytes of each piece but the last
_TOGETHER: Final = 16  # blobs that are deleted at once: the bytes of each are, one by one
#: What usual statements may take is too little for large blobs.
_TAKE_YOUR_TIME: Final = "SET LOCAL statement_timeout = '10min'"
_T = TypeVar("_T")


class DatabaseBlobs:
    """The blobs in the tables of ``postgres.sql``.

    ``connection``: gives one for as long as its context lasts, idle and with these tables on its search path; it may be asked by
    many threads. ``seconds``: how long something is tried that fails for a reason that may pass, as a lost connection does. After
    that, and for any other reason, every method raises StoreFailed.
    """

    def __init__(self, connection: Callable[[], AbstractContextManager[psycopg.Connection[Any]]], *, seconds: float = 30.0) -> None:
        self._connection = connection
        self._seconds = seconds

    def put(self, name: str, data: bytes) -> bool:
        """Whether it is new. False too where an earlier attempt of this call has put it, and its answer was lost."""

        def put(connection: psycopg.Connection[Any]) -> bool:
            with connection.cursor() as cursor:
                cursor.execute(_TAKE_YOUR_TIME)
                new = "INSERT INTO blobs (name, size) VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING number"
                row = cursor.execute(new, (name.encode(), len(data))).fetchone()
                if row is None:
                    return False
                piece = "INSERT INTO blob_pieces (blob, piece, data) VALUES (%b, %b, %b)"  # COPY knows no row-level security
                for number, start in enumerate(range(0, len(data), PIECE)):
                    cursor.execute(piece, (row[0], number, data[start : start + PIECE]))
                return True

        return self._tried(f"put the blob {name}", put)

    def get(self, name: str) -> bytes | None:
        """The bytes of a blob; None where there is none. Raises CorruptTree where pieces of it are missing."""

        def get(connection: psycopg.Connection[Any]) -> tuple[int, bytes] | None:
            wanted = "SELECT size, data FROM blobs LEFT JOIN blob_pieces ON blob = number WHERE name = %s ORDER BY piece"
            size, pieces = -1, list[bytes]()
            with connection.cursor() as cursor:
                cursor.execute(_TAKE_YOUR_TIME)
                for size, piece in cursor.stream(wanted, (name.encode(),), binary=True):  # noqa: B007 (the same in each row)
                    pieces.append(piece or b"")
            return (size, b"".join(pieces)) if pieces else None

        found = self._tried(f"get the blob {name}", get)
        if found is None:
            return None
        size, data = found
        if len(data) != size:
            raise CorruptTree(f"the blob {name} has {len(data)} of {size} bytes", path=name)
        return data

    def names(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        """Names that begin so, with their age in seconds by the server's clock."""

        def names(connection: psycopg.Connection[Any]) -> list[Any]:
            wanted = (
                "SELECT name, extract(epoch FROM clock_timestamp() - made_at)::float8 FROM blobs WHERE name >= %s AND name < %s"
            )
            start = prefix.encode()
            return connection.execute(wanted, (start, start + b"\xff")).fetchall()  # no byte of UTF-8 is 255

        for name, age in self._tried(f"list the blobs {prefix}", names):
            yield name.decode(), age

    def delete(self, names: Iterable[str]) -> int:
        """How many of them were there."""
        wanted = [name.encode() for name in names]

        def delete(some: list[bytes], connection: psycopg.Connection[Any]) -> int:
            connection.execute(_TAKE_YOUR_TIME)
            return connection.execute("DELETE FROM blobs WHERE name = ANY(%s)", (some,)).rowcount

        parts = (wanted[start : start + _TOGETHER] for start in range(0, len(wanted), _TOGETHER))
        return sum(self._tried(f"delete {len(some)} blobs", partial(delete, some)) for some in parts)

    def _tried(self, what: str, work: Callable[[psycopg.Connection[Any]], _T]) -> _T:
        """What ``work`` returns in a transaction of its own. All that is done here may be done twice."""
        for _ in attempts(self._seconds):
            try:
                with self._connection() as connection, connection.transaction():
                    return work(connection)
            except psycopg.Error as error:
                failure = error
                if not may_pass(error):
                    break
        raise StoreFailed(f"could not {what}: {str(failure).strip() or type(failure).__name__}") from failure
