"""Connections to PostgreSQL: how they are made, lent to one thread at a time, and what their errors mean.

A process that was forked off begins anew: it uses none of the connections of its parent.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from threading import BoundedSemaphore
from typing import Any, Final, NoReturn

import psycopg
from psycopg import capabilities
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result
from psycopg.generators import execute, fetch, send
from psycopg.pq import ExecStatus, Format, TransactionStatus

from sessiontree.backends.postgres_statements import Statement, Value
from sessiontree.errors import IncompatibleStore, StoreFailed
from sessiontree.locks import begin_anew_in_children

_logger = logging.getLogger("sessiontree.backends.postgres")

VERSION: Final = 1  # of the tables
_MIGRATION: Final = 0x7365_7373_7472_6565  # the advisory lock of who makes the tables
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0  # seconds
_CHUNK: Final = 64  # rows that are taken together while others come
_IN_CHUNKS: Final = capabilities.has_stream_chunked()  # else psycopg has an older libpq, and all come together
_READERS: Final = 4  # connections for all but writing
#: Seconds without an answer of the peer's system after which a connection is lost, by keepalives and (ms) by data that wait.
_KEEPALIVE: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
_GIVEN: Final = (ExecStatus.TUPLES_OK, ExecStatus.TUPLES_CHUNK, ExecStatus.COMMAND_OK)
_SETTINGS: Final = {
    "search_path": "sessiontree, pg_temp",
    "default_transaction_isolation": "read committed",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
#: That a statement is done is to mean that it is on disk.
_ON_DISK: Final = "SELECT set_config(name, 'on', false) FROM pg_settings WHERE name = 'synchronous_commit' AND setting = 'off'"

_READ_ONLY: Final = "25006"  # it is a standby by now
_NO_TABLES: Final = frozenset(("3F000", "42P01", "42703", "42883"))
#: Errors that pass: serialization, deadlock, cancelled (a time-out), lock not available, too many connections, and that one.
_PASSING: Final = frozenset(("40001", "40P01", "57014", "55P03", "53300", _READ_ONLY))
_LOST: Final = ("08", "57P")  # of the connection, and of a server that stops or starts
#: What is no use to try again. While a connection is made there is no code to know an error by, and some servers speak English.
_REFUSED: Final = ("authentication failed", "no pg_hba.conf entry", "does not exist", "no password supplied", "not permitted")


class Line(psycopg.Connection[tuple[Any, ...]]):
    """A connection, on which no answer is waited for longer than ``patience`` seconds: a server that hangs is one that is lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.patience: float = 60.0
        self._names: dict[str, bytes] = {}
        self._asked: set[str] = set()

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, self.patience if timeout is None else timeout)

    def ask(self, statement: Statement, values: Sequence[Value]) -> str:
        """The text that a statement returns, in one round trip once it is prepared: a cursor costs as much as the server does."""
        self.pgconn.send_query_prepared(self._name_of(statement), values, [Format.BINARY] * len(values))
        answer: bytes = self._answer().get_value(0, 0)
        return answer.decode()

    def columns(self, statement: Statement, values: Sequence[Value]) -> Iterator[list[list[Value]]]:
        """The columns of what a statement gives, in binary, of some rows after the other as they come, in one round trip.

        Each takes its memory from the one before. It is prepared when it is asked again.
        """
        formats = [Format.BINARY] * len(values)
        if statement.text in self._asked:
            self.pgconn.send_query_prepared(self._name_of(statement), values, formats, Format.BINARY)
        else:
            self._asked.add(statement.text)
            self.pgconn.send_query_params(statement.text.encode(), values, statement.types, formats, Format.BINARY)
        if _IN_CHUNKS:
            self.pgconn.set_chunked_rows_mode(_CHUNK)
        self.wait(send(self.pgconn))
        while (result := self.wait(fetch(self.pgconn))) is not None:
            value, rows = _given(result).get_value, range(result.ntuples)
            yield [[value(row, column) for row in rows] for column in range(result.nfields)]

    def _name_of(self, statement: Statement) -> bytes:
        """By which it is prepared."""
        name = self._names.get(statement.text)
        if name is None:
            name = f"sessiontree_{len(self._names)}".encode()
            self.pgconn.send_prepare(name, statement.text.encode(), statement.types)
            self._answer()
            self._names[statement.text] = name
        return name

    def _answer(self) -> Any:
        for result in self.wait(execute(self.pgconn)):
            _given(result)
        return result


def _given(result: Any) -> Any:
    """The same, where it is no error; else that is raised."""
    if result.status not in _GIVEN:
        raise error_from_result(result)
    return result


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection is, and so nobody knows what became of the statement that raised this."""
    state = error.sqlstate
    return not isinstance(error, psycopg.ProgrammingError | psycopg.DataError) if state is None else state.startswith(_LOST)


def is_over(error: psycopg.Error) -> bool:
    """Whether the connection is of no use any more."""
    return is_lost(error) or error.sqlstate == _READ_ONLY


def may_pass(error: psycopg.Error) -> bool:
    """Whether to try again."""
    return error.sqlstate in _PASSING or (is_lost(error) and not any(each in str(error) for each in _REFUSED))


def attempts(seconds: float) -> Iterator[int]:
    """Count attempts from 0, with pauses between them that grow, each drawn at random, until the time is up."""
    until, pause, count = time.monotonic() + seconds, _FIRST_PAUSE, 0
    while True:
        yield count
        drawn = random.uniform(pause / 2, pause)
        if time.monotonic() + drawn > until:
            return
        time.sleep(drawn)
        pause, count = min(2 * pause, _LONGEST_PAUSE), count + 1


class Server:
    """A server, or several of which one is the primary, as connections see it.

    ``scope``: of the tenant whose rows are seen. ``seconds``: how long anything is tried.
    """

    def __init__(self, url: str, scope: uuid.UUID, read_only: bool, seconds: float) -> None:
        self.where: str
        self.where, given = _described(url)
        self.read_only = read_only
        self.seconds = seconds
        statement = seconds / 3
        self._patience = 2 * statement
        self._url = url
        options: dict[str, Any] = {"connect_timeout": max(2, round(seconds / 6)), "application_name": "sessiontree", **_KEEPALIVE}
        if not read_only:
            options["target_session_attrs"] = "read-write"
        self._options = {name: value for name, value in options.items() if name not in given}
        settings = {
            **_SETTINGS,
            "sessiontree.scope": str(scope),
            "statement_timeout": f"{round(statement * 1000)}ms",
            "default_transaction_read_only": "on" if read_only else "off",
        }
        self._set = f"SELECT {', '.join(['set_config(%s, %s, false)'] * len(settings))}"
        self._settings = [part for pair in settings.items() for part in pair]
        self._idle: list[Line] = []
        self._free = BoundedSemaphore(_READERS)
        self._answers = True
        begin_anew_in_children(self)

    def __repr__(self) -> str:
        return f"Server({self.where!r})"

    def _begin_anew(self) -> None:
        """In a forked child."""
        leave_alone(*self._idle)
        self._idle, self._free = [], BoundedSemaphore(_READERS)

    def connect(self) -> Line:
        """A connection, set up as all are."""
        line = Line.connect(self._url, autocommit=True, **self._options)
        line.patience = self._patience
        line.prepare_threshold = 1  # to prepare what is asked once would be another round trip
        try:
            line.execute(self._set, self._settings)
            line.execute(_ON_DISK)
        except BaseException:
            line.close()
            raise
        self._answers = True
        return line

    @contextmanager
    def connection(self) -> Iterator[Line]:
        """A connection for one thread, of at most a few. Where it fails it is not used again, and neither are those as old."""
        with self._free:
            try:
                line = self._idle.pop()
            except IndexError:
                line = self.connect()
            try:
                yield line
            except psycopg.Error as error:
                if is_over(error):
                    line.close()
                    self.close()
                raise
            finally:
                if line.pgconn.transaction_status == TransactionStatus.IDLE:
                    self._idle.append(line)
                else:
                    line.close()

    def may_pass(self, error: psycopg.Error) -> bool:
        """Whether to try again here. Of a server that does not answer the log is told, once until it does."""
        passing = may_pass(error) and not (self.read_only and error.sqlstate == _READ_ONLY)
        if passing and self._answers and is_over(error):
            self._answers = False
            _logger.warning("%s does not answer, and is tried for %g s: %s", self.where, self.seconds, _said(error))
        return passing

    def rows(self, what: str, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a statement that only reads gives. Raises StoreFailed, IncompatibleStore."""
        for _ in attempts(self.seconds):
            try:
                with self.connection() as line, line.cursor(binary=True) as cursor:
                    return cursor.execute(statement, parameters).fetchall()
            except psycopg.Error as error:
                failure = error
                if not self.may_pass(error):
                    break
        self.fail(what, failure)

    def columns(self, what: str, statement: Statement, values: Sequence[Value]) -> Iterator[list[list[Value]]]:
        """What a statement that only reads gives, as :meth:`Line.columns`; what came may come again, where it is tried again.

        While there is more to come, a connection is lent. Raises StoreFailed, IncompatibleStore.
        """
        for _ in attempts(self.seconds):
            last = None
            try:
                with self.connection() as line:
                    for some in line.columns(statement, values):
                        if last is not None:
                            yield last
                        last = some
            except psycopg.Error as error:
                failure = error
                if not self.may_pass(error):
                    break
            else:
                if last is not None:
                    yield last
                return
        self.fail(what, failure)

    def prepare(self) -> None:
        """Make the tables where there are none, and check their version. Raises IncompatibleStore, StoreFailed."""
        for _ in attempts(self.seconds):
            try:
                with self.connection() as line:
                    version = _version(line)
                    if version is None and not self.read_only:
                        version = _make_tables(line)
                if version == VERSION:
                    return
                if version is None:
                    raise IncompatibleStore(f"{self.where} holds no store; whoever writes to it first makes one", found=None)
                raise IncompatibleStore(f"{self.where} holds tables of version {version}; this library knows version {VERSION}")
            except psycopg.Error as error:
                failure = error
                if not self.may_pass(error):
                    break
        self.fail("be opened", failure)

    def fail(self, what: str, error: psycopg.Error, known: str = "") -> NoReturn:
        """Raise what is to be raised for an error that did not pass. ``known``: what is known of what was to be done."""
        said = _said(error)
        if error.sqlstate in _NO_TABLES:
            raise IncompatibleStore(f"{self.where} has not the tables of version {VERSION}: {said}") from error
        raise StoreFailed(f"{self.where} could not {what}: {said}{known}") from error

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


def _said(error: psycopg.Error) -> str:
    return error.diag.message_primary or "; ".join(str(error).split("\n")) or type(error).__name__


def _version(line: Line) -> int | None:
    """Of the tables; None where there are none."""
    # Not by to_regclass: within a transaction that waited for a lock, it remembers that there was none.
    there = "SELECT FROM pg_catalog.pg_tables WHERE schemaname = 'sessiontree' AND tablename = 'format'"
    if line.execute(there).fetchone() is None:
        return None
    row = line.execute("SELECT version FROM sessiontree.format").fetchone()
    return None if row is None else int(row[0])


def _make_tables(line: Line) -> int | None:
    """Their version; of several who come at once, one makes them."""
    with line.transaction():
        line.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION,))
        if _version(line) is None:
            line.execute(files(__package__).joinpath("postgres.sql").read_bytes())
        return _version(line)


def _described(url: str) -> tuple[str, dict[str, Any]]:
    """What to call a database, without its password, and what its URL says. Raises StoreFailed."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise StoreFailed("a store in PostgreSQL, and a replica of it, is named by a URL that begins with postgresql://")
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error:
        raise StoreFailed("the URL of a PostgreSQL database cannot be read") from None  # what is wrong may be the password
    user = f"{given['user']}@" if "user" in given else ""
    port = f":{given['port']}" if "port" in given else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}", given


_inherited: Final[list[Any]] = []


def leave_alone(*lines: Line | None) -> None:
    """Keep a parent's connections for ever: to close one would tell the server that it is over."""
    _inherited.extend(lines)
