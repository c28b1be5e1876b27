"""Writing to PostgreSQL, each batch exactly once, whatever becomes of connections and servers.

A :class:`Writer` has a row in the database, which says how many batches it has written and what came of the last. What a batch does
and that it is done are one transaction, which fails where the row is not at the batch before. So:

- Where the server answers with an error, nothing of the batch was done, and it may be sent again.
- Where there is no answer, the batch is *in doubt*: it may be done, it may not, it may still be under way on the server. The writer
  asks for its row on a new connection. Where the batch is done, there is what came of it. Where it is not, it is sent again under
  the same number, and whichever of the two comes second fails.
- Where the time is up and it is in doubt, its number is taken by a batch that does nothing: then it can no longer happen, and that
  is known. Only where no server answers to that either is it not known, and the error says so.

A row is deleted by its writer at the end. Rows of writers that died are deleted after 30 days, by whoever begins to write. A writer
that was silent for a day takes a new row. One that was paused for so long in the middle of a batch finds its row gone: it does not
know what came of the batch, and says so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import psycopg

from sessiontree.backends.postgres_lines import (
    Line,
    Server,
    attempts,
    is_lost,
    is_over,
    leave_alone,
)
from sessiontree.backends.postgres_statements import Statement, Value, int8
from sessiontree.errors import StoreFailed
from sessiontree.locks import begin_anew_in_children, new_lock

_NOT_AT_BATCH: Final = "ST001"
_FORGET: Final = "DELETE FROM sessiontree.writers WHERE moved < now() - interval '30 days'"
_SILENT: Final = 86_400.0  # seconds after which a row is not relied on
_CALL_OFF: Final = """
UPDATE sessiontree.writers SET batch = batch + 1, outcome = NULL, moved = now() WHERE writer = %s AND batch = %s RETURNING batch
"""


class Writer:
    """Writes batches to a server, one at a time. It has a connection of its own, so it never waits for those who read."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = new_lock()
        self._line: Line | None = None
        self._name: uuid.UUID | None = None
        self._batch = 0  # the last that is done
        self._used = time.monotonic()
        begin_anew_in_children(self)

    def _begin_anew(self) -> None:
        """In a forked child."""
        leave_alone(self._line)
        self._line = self._name = None

    def write(self, what: str, statement: Statement, values: Sequence[Value]) -> str:
        """What came of a statement, which is done once. Raises StoreFailed, which says what is known, and IncompatibleStore."""
        with self._lock:
            now, before = time.monotonic(), self._used
            self._used = now
            if now - before > _SILENT:
                self._begin_again()
            answered = False
            try:
                came = self._write(what, statement, values)
                answered = True
                return came
            finally:
                if not answered:
                    self._begin_again()

    def _write(self, what: str, statement: Statement, values: Sequence[Value]) -> str:
        doubt = False
        for _ in attempts(self._server.seconds):
            sent = False
            try:
                line = self._ready()
                came = self._came(line) if doubt else None
                if came is None:
                    assert self._name is not None
                    sent = True
                    came = line.ask(statement, (self._name.bytes, int8(self._batch + 1), *values))
                self._batch += 1
                return came
            except psycopg.Error as error:
                failure = error
                doubt = doubt or (sent and is_lost(error))
                if is_over(error):
                    self._hang_up()
                if error.sqlstate == _NOT_AT_BATCH:
                    if not doubt:
                        self._name = None  # the row is gone
                elif not self._server.may_pass(error):
                    break
        if not doubt:
            self._server.fail(what, failure, "; nothing of it was done")
        try:
            came = self._called_off(self._ready())
        except psycopg.Error:
            self._server.fail(what, failure, "; whether it was done is not known")
        if came is None:
            self._server.fail(what, failure, "; nothing of it was done, nor will be")
        self._batch += 1
        return came

    def _ready(self) -> Line:
        """A connection, and a row."""
        if self._line is None:
            self._line = self._server.connect()
        if self._name is None:
            name = uuid.uuid4()
            self._line.execute(_FORGET)
            self._line.execute("INSERT INTO sessiontree.writers (writer) VALUES (%s)", (name,))
            self._name, self._batch = name, 0
        return self._line

    def _came(self, line: Line) -> str | None:
        """What came of the batch that is in doubt; None where it is not done. Raises StoreFailed where the row is gone."""
        row = line.execute("SELECT batch, outcome FROM sessiontree.writers WHERE writer = %s", (self._name,)).fetchone()
        if row is None:
            raise StoreFailed(f"{self._server.where} has forgotten this writer; whether its last batch was done is not known")
        return str(row[1]) if row[0] > self._batch else None

    def _called_off(self, line: Line) -> str | None:
        """The same, but what is not done never will be."""
        off = line.execute(_CALL_OFF, (self._name, self._batch)).fetchone()
        return self._came(line) if off is None else None

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _begin_again(self) -> None:
        """Be another writer, on another connection."""
        self._hang_up()
        self._name = None

    def close(self) -> None:
        """Leave no row behind, if that can be had. Raises nothing."""
        with self._lock:
            if self._line is not None and self._name is not None:
                with suppress(psycopg.Error):
                    self._line.execute("DELETE FROM sessiontree.writers WHERE writer = %s", (self._name,))
            self._begin_again()
