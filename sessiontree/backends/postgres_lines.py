"""Connections to PostgreSQL, and what is done when they fail.

Reads are tried again, and so is what writes: a :class:`Writer` numbers its batches, and the server keeps, in the transaction of
each, which was the last and what came of it. So after a connection is lost, or a server stops, the writer asks; what did not happen
is sent again under the same number, and of two that are under way the server lets one through. An attempt whose end is not known is
*in doubt*. Where the server answers with an error, the end is known: nothing happened.

A process that was forked off begins anew: it uses none of the connections and writers of its parent.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from struct import pack
from threading import BoundedSemaphore
from typing import Any, Final, NoReturn
from weakref import WeakSet

import psycopg
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format

from sessiontree.errors import IncompatibleStore, StoreFailed
from sessiontree.locks import new_lock

VERSION: Final = 1  # of the tables
EVERYTHING: Final = uuid.UUID(int=0)  # the scope of all tenants
_MIGRATION: Final = 0x73657373_74726565  # the advisory lock of who makes the tables
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0  # seconds
_READERS: Final = 4  # connections for all but writing
_FORGOTTEN: Final = "30 days"  # a writer that has written nothing for so long may be forgotten
#: Seconds without an answer of the peer's system after which a connection is lost, by keepalives and by data that wait.
_KEEPALIVE: Final = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 20_000}
_SETTINGS: Final = {
    "search_path": "sessiontree, pg_temp",
    "default_transaction_isolation": "read committed",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

_NOT_AT_BATCH: Final = "ST001"
_NO_TABLES: Final = frozenset(("3F000", "42P01", "42703", "42883"))
#: Errors that pass: serialization, deadlock, cancelled (a time-out), lock not available, too many connections, read only (it is a
#: standby by now).
_PASSING: Final = frozenset(("40001", "40P01", "57014", "55P03", "53300", "25006"))
_LOST: Final = ("08", "57P")  # of the connection, and of a server that stops or starts
_REFUSED: Final = ("authentication failed", "no pg_hba.conf entry", "does not exist", "no password supplied", "not permitted")


class Longs(tuple[int | None, ...]):
    """A bigint[]."""

    __slots__ = ()


class Ints(tuple[int, ...]):
    """An integer[]."""

    __slots__ = ()


class Texts(tuple[bytes | None, ...]):
    """A bytea[]."""

    __slots__ = ()


class _LongsDumper(Dumper):
    format, oid = Format.BINARY, 1016

    def dump(self, values: Longs) -> bytes:
        parts = [b"\0\0\0\x08" + value.to_bytes(8, signed=True) if value is not None else b"\xff\xff\xff\xff" for value in values]
        return pack(">5i", 1, None in values, 20, len(values), 1) + b"".join(parts)


class _IntsDumper(Dumper):
    format, oid = Format.BINARY, 1007

    def dump(self, values: Ints) -> bytes:
        return pack(">5i", 1, 0, 23, len(values), 1) + b"".join([b"\0\0\0\x04" + value.to_bytes(4) for value in values])


class _TextsDumper(Dumper):
    format, oid = Format.BINARY, 1001

    def dump(self, values: Texts) -> bytes:
        parts = [pack(">5i", 1, None in values, 17, len(values), 1)]
        for value in values:
            parts += (b"\xff\xff\xff\xff",) if value is None else (len(value).to_bytes(4), value)
        return b"".join(parts)


class Line(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no answer is waited for longer than ``seconds``: a server that hangs is one that is lost."""

    seconds: float

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, self.seconds if timeout is None else timeout)


def is_lost(line: Line | None, error: psycopg.Error) -> bool:
    """Whether nobody knows what became of the statement that raised this."""
    state = error.sqlstate
    if state is None:
        return line is None or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_LOST)


def may_pass(error: psycopg.Error) -> bool:
    """Whether to try again."""
    state = error.sqlstate
    if state is None:
        said = str(error)
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not any(each in said for each in _REFUSED)
    return state in _PASSING or state.startswith(_LOST)


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

    ``scope``: of the tenant whose rows are seen. ``seconds``: how long something is tried.
    """

    def __init__(self, url: str, scope: uuid.UUID, read_only: bool, seconds: float) -> None:
        self.where, given = _described(url)
        self.scope = scope
        self.read_only = read_only
        self.seconds = seconds
        self._url = url
        self._statement = seconds / 3
        options: dict[str, Any] = {"connect_timeout": max(2, round(seconds / 6)), "application_name": "sessiontree", **_KEEPALIVE}
        if not read_only:
            options["target_session_attrs"] = "read-write"
        self._options = {name: value for name, value in options.items() if name not in given}
        self._idle: list[Line] = []
        self._free = BoundedSemaphore(_READERS)
        _forkable.add(self)

    def __repr__(self) -> str:
        return f"Server({self.where!r})"

    def begin_anew(self) -> None:
        """In a forked child: what the parent connected is the parent's."""
        _inherited.extend(self._idle)
        self._idle, self._free = [], BoundedSemaphore(_READERS)

    def connect(self) -> Line:
        """A connection, as all are set up."""
        line = Line.connect(self._url, autocommit=True, **self._options)
        line.seconds = self._statement + 5
        for kind, dumper in ((Longs, _LongsDumper), (Ints, _IntsDumper), (Texts, _TextsDumper)):
            line.adapters.register_dumper(kind, dumper)
        settings = {
            **_SETTINGS,
            "sessiontree.scope": str(self.scope),
            "statement_timeout": f"{round(self._statement * 1000)}ms",
            "default_transaction_read_only": "on" if self.read_only else "off",
        }
        try:
            line.execute(
                f"SELECT {', '.join(['set_config(%s, %s, false)'] * len(settings))},"
                " CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END",
                [part for pair in settings.items() for part in pair],
            )
        except BaseException:
            line.close()
            raise
        return line

    @contextmanager
    def connection(self) -> Iterator[Line]:
        """A connection for one thread, at most a few at a time. One that fails in any way is not used again."""
        with self._free:
            try:
                line = self._idle.pop()
            except IndexError:
                line = self.connect()
            try:
                yield line
            except psycopg.Error as error:
                if is_lost(line, error) or not _is_idle(line):
                    line.close()
                    self.close()  # the others are as old
                else:
                    self._idle.append(line)
                raise
            except BaseException:
                line.close()
                raise
            self._idle.append(line)

    def rows(self, what: str, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a statement that only reads gives. Raises StoreFailed, IncompatibleStore."""
        for _ in attempts(self.seconds):
            try:
                with self.connection() as line, line.cursor(binary=True) as cursor:
                    return cursor.execute(statement, parameters, prepare=True).fetchall()
            except psycopg.Error as error:
                failure = error
                if not may_pass(error):
                    break
        self.fail(what, failure)

    def fail(self, what: str, error: psycopg.Error, known: str = "") -> NoReturn:
        """Raise what is to be raised for an error that did not pass."""
        said = str(error).strip() or type(error).__name__
        if error.sqlstate in _NO_TABLES:
            raise IncompatibleStore(f"{self.where} is no store of version {VERSION}: {said}") from error
        raise StoreFailed(f"{self.where} could not {what}: {said}{known}") from error

    def prepare(self) -> None:
        """Make the tables where there are none, and check their version. Raises IncompatibleStore, StoreFailed."""
        for _ in attempts(self.seconds):
            try:
                with self.connection() as line:
                    version = _version(line)
                    if version is None and not self.read_only:
                        with line.transaction():
                            line.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION,))
                            if _version(line) is None:
                                line.execute(files(__package__).joinpath("postgres.sql").read_bytes())
                        version = _version(line)
                if version != VERSION:
                    found = "holds no store" if version is None else f"holds tables of version {version}"
                    raise IncompatibleStore(f"{self.where} {found}; this library writes version {VERSION}")
                return
            except psycopg.Error as error:
                failure = error
                if not may_pass(error):
                    break
        self.fail("make its tables", failure)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            with suppress(IndexError):
                self._idle.pop().close()


class Writer:
    """Writes batches to a server, one at a time, each exactly once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = new_lock()
        self._line: Line | None = None
        self._name: uuid.UUID | None = None
        self._batch = 0  # the last that is done
        _forkable.add(self)

    def begin_anew(self) -> None:
        """In a forked child."""
        _inherited.append(self._line)
        self._line = self._name = None

    def write(self, what: str, function: str, parameters: Sequence[Any]) -> str:
        """What came of calling a function of the schema, which is done once. Raises StoreFailed, IncompatibleStore."""
        statement = f"SELECT sessiontree.{function}({', '.join(['%b'] * (len(parameters) + 2))})"
        with self._lock:
            done = False
            try:
                came = self._write(what, statement, parameters)
                done = True
                return came
            finally:
                if not done:
                    self._forget()

    def _write(self, what: str, statement: str, parameters: Sequence[Any]) -> str:
        server, doubt = self._server, False
        for _ in attempts(server.seconds):
            sent = False
            try:
                line = self._ready()
                if doubt and (came := self._came(line)) is not None:
                    return came
                sent = True
                row = (
                    line.cursor(binary=True).execute(statement, (self._name, self._batch + 1, *parameters), prepare=True).fetchone()
                )
                assert row is not None
                self._batch += 1
                return str(row[0])
            except psycopg.Error as error:
                failure = error
                lost = is_lost(self._line, error)
                doubt = doubt or (sent and lost)
                if lost or error.sqlstate == "25006":
                    self._hang_up()
                if error.sqlstate == _NOT_AT_BATCH and not doubt:
                    self._name = None  # it was forgotten; nothing of this was done
                elif error.sqlstate != _NOT_AT_BATCH and not may_pass(error):
                    break
        if not doubt:
            server.fail(what, failure, "; nothing of it was done")
        try:
            came = self._settled(self._ready())
        except psycopg.Error:
            server.fail(what, failure, "; whether it was done is not known")
        if came is not None:
            return came
        server.fail(what, failure, "; nothing of it was done, and never will be")

    def _ready(self) -> Line:
        """The connection, and a row for this writer."""
        line = self._line
        if line is None or line.closed:
            line = self._line = self._server.connect()
        if self._name is None:
            name = uuid.uuid4()
            line.execute("DELETE FROM sessiontree.writers WHERE moved < now() - %s::interval", (_FORGOTTEN,))
            line.execute("INSERT INTO sessiontree.writers (writer) VALUES (%s)", (name,))
            self._name, self._batch = name, 0
        return line

    def _came(self, line: Line) -> str | None:
        """What came of the batch that is in doubt; None where it is not done."""
        row = line.execute("SELECT batch, outcome FROM sessiontree.writers WHERE writer = %s", (self._name,)).fetchone()
        if row is None:
            raise StoreFailed(f"{self._server.where} has forgotten this writer; whether its last batch was done is not known")
        if row[0] != self._batch + 1:
            return None
        self._batch += 1
        return str(row[1])

    def _settled(self, line: Line) -> str | None:
        """The same, but where it is not done it never will be."""
        off = "UPDATE sessiontree.writers SET batch = batch + 1, outcome = NULL WHERE writer = %s AND batch = %s RETURNING batch"
        if line.execute(off, (self._name, self._batch)).fetchone() is not None:
            return None
        return self._came(line)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _forget(self) -> None:
        """Write as another from now on."""
        self._hang_up()
        self._name = None

    def close(self) -> None:
        """Leave no row behind. Raises nothing."""
        with self._lock:
            if self._line is not None and self._name is not None:
                with suppress(psycopg.Error):
                    self._line.execute("DELETE FROM sessiontree.writers WHERE writer = %s", (self._name,))
            self._forget()


def _version(line: Line) -> int | None:
    """Of the tables; None where there are none."""
    try:
        row = line.execute("SELECT to_regclass('sessiontree.format') IS NOT NULL").fetchone()
        if row is None or not row[0]:
            return None
        row = line.execute("SELECT version FROM sessiontree.format").fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    return None if row is None else int(row[0])


def _is_idle(line: Line) -> bool:
    return not line.closed and line.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _described(url: str) -> tuple[str, dict[str, Any]]:
    """What to call a database, without its password, and what its URL says. Raises StoreFailed."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise StoreFailed("the place of a store is to be a URL that begins with postgresql://")
    try:
        given = conninfo_to_dict(url)
    except psycopg.Error:
        raise StoreFailed("the URL of a PostgreSQL database cannot be read") from None  # what it says may be the password
    user = f"{given['user']}@" if "user" in given else ""
    port = f":{given['port']}" if "port" in given else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}", given


_forkable: Final[WeakSet[Any]] = WeakSet()
_inherited: Final[list[Any]] = []  # connections of a parent process: to let go of one would tell the server that it is over


def _in_child() -> None:
    for each in list(_forkable):
        each.begin_anew()


os.register_at_fork(after_in_child=_in_child)
