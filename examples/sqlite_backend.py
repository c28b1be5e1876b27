"""A backend over SQLite: sessions in one file, written by many threads and many processes of one machine.

Three small classes, ``Sessions``, ``Nodes`` and ``Blobs``, are all that a store needs of a database. docs/backends.md takes this
file apart. Every write is one ``BEGIN IMMEDIATE`` transaction: one writer at a time, which sees what the others wrote before it.
Readers see a snapshot and never wait. A connection serves one call at a time and is not carried over a fork: connect in the child.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from sessiontree.backends.shared import Backend, Change, Look, NewNode, NewSession, NodeRow, Removal
from sessiontree.errors import CorruptTree, IncompatibleStore, StoreClosed, StoreFailed, Unsupported

SCHEMA_VERSION = 1
BUSY_SECONDS = 60.0  # how long a writer waits for the others before StoreFailed

# What a look reads lies apart from the records, so it costs the same however large they are. A key is of 64 bits without a sign,
# which SQLite's integers are not: it is stored as 8 bytes.
SCHEMA = """
CREATE TABLE counter (drawn INTEGER NOT NULL);
INSERT INTO counter VALUES (0);
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, tenant TEXT, record BLOB NOT NULL, tip_session INTEGER, tip_ordinal INTEGER,
    version INTEGER NOT NULL DEFAULT 0, drops INTEGER NOT NULL DEFAULT 0, removals INTEGER NOT NULL DEFAULT 0,
    gone INTEGER NOT NULL DEFAULT 0);
CREATE INDEX sessions_by_name ON sessions (name);
CREATE INDEX sessions_by_tip ON sessions (tip_session);
CREATE TABLE nodes (
    session INTEGER, ordinal INTEGER, parent INTEGER NOT NULL, id BLOB NOT NULL, key BLOB NOT NULL,
    PRIMARY KEY (session, ordinal)) WITHOUT ROWID;
CREATE TABLE records (session INTEGER, ordinal INTEGER, record BLOB NOT NULL, PRIMARY KEY (session, ordinal));
CREATE TABLE refs (
    session INTEGER, name BLOB, version INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (session, name)) WITHOUT ROWID;
CREATE TABLE names (owner TEXT NOT NULL, name BLOB, record BLOB NOT NULL, PRIMARY KEY (owner, name)) WITHOUT ROWID;
CREATE TABLE blobs (owner TEXT NOT NULL, name TEXT, made REAL NOT NULL, data BLOB NOT NULL, PRIMARY KEY (owner, name));
"""


class Database:
    """A file of SQLite, and its idle connections. ``tenant``: whose rows there are; None: everybody's."""

    def __init__(self, path: str | Path, tenant: str | None = None) -> None:
        self.path = path
        self.tenant = tenant
        self.owner = "" if tenant is None else f"tenant {tenant}"  # of names and blobs, which are in no session
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        with self.writing() as db:  # whoever comes first makes the tables; the others wait
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0 and not db.execute("SELECT * FROM sqlite_schema").fetchone():
                for statement in SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                version = SCHEMA_VERSION
        if version != SCHEMA_VERSION:
            self.close()
            raise IncompatibleStore(f"{path}: the tables are of version {version}, not {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        db = None
        try:
            db = self._connection()
            db.execute(begin)
            yield db
            db.execute("COMMIT")
        except (
            sqlite3.Error
        ) as error:  # what it does not name is a damaged file; else: locked for too long, disk full, an I/O error
            kind = CorruptTree if type(error) is sqlite3.DatabaseError else StoreFailed
            raise kind(f"{self.path}: {error}") from error
        finally:
            if db is not None:
                self._done(db)

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """All that is read in it is of one moment."""
        return self.transaction("BEGIN")

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """Nobody else writes meanwhile. On disk when it ends; nothing of it is, where it ends by an exception."""
        return self.transaction("BEGIN IMMEDIATE")

    def _connection(self) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise StoreClosed(f"{self.path} was closed")
            if self._idle:
                return self._idle.pop()
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _done(self, db: sqlite3.Connection) -> None:
        if db.in_transaction:
            db.execute("ROLLBACK")
        with self._lock:
            if not self._closed:
                self._idle.append(db)
                return
        db.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()


class Sessions:
    """What moves: sessions, their refs, and what is known of their nodes. ``OURS`` selects the tenant's."""

    OURS = "(:tenant IS NULL OR tenant = :tenant)"

    def __init__(self, database: Database) -> None:
        self.database = database

    def _session(self, db: sqlite3.Connection, number: int) -> sqlite3.Row | None:
        ask = f"SELECT record, version, drops, removals, gone FROM sessions WHERE number = :number AND {self.OURS}"
        return db.execute(ask, {"number": number, "tenant": self.database.tenant}).fetchone()

    def _select(self, what: str) -> list[Any]:
        with self.database.reading() as db:
            return db.execute(f"SELECT {what}", {"tenant": self.database.tenant}).fetchall()

    def draw(self, count: int) -> Sequence[int]:
        with self.database.writing() as db:
            (last,) = db.execute("UPDATE counter SET drawn = drawn + ? RETURNING drawn", [count]).fetchone()
        return range(last - count + 1, last + 1)

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        with self.database.writing() as db:
            ask = f"SELECT 1 FROM sessions WHERE name = :name AND NOT gone AND {self.OURS}"
            if db.execute(ask, {"name": new.name, "tenant": self.database.tenant}).fetchone():
                return "taken"
            tip = (None, None) if new.tip is None else new.tip
            if new.tip is not None:
                below = self._session(db, new.tip[0])
                if below is None or below["drops"] != new.tip_drops:
                    return "dropped"
            db.execute(
                "INSERT INTO sessions (number, name, tenant, record, tip_session, tip_ordinal) VALUES (?, ?, ?, ?, ?, ?)",
                [new.number, new.name, new.tenant, new.record, *tip],
            )
            add_nodes(db, new.number, new.nodes)
        return "made"

    def find(self, name: str) -> int | None:
        with self.database.reading() as db:
            ask = f"SELECT number FROM sessions WHERE name = :name AND NOT gone AND {self.OURS}"
            found = db.execute(ask, {"name": name, "tenant": self.database.tenant}).fetchall()
        if len(found) > 1:
            raise Unsupported(f"{len(found)} tenants have a session {name!r}: connect with tenant=")
        return found[0]["number"] if found else None

    def names(self) -> Sequence[tuple[int, str]]:
        return [tuple(row) for row in self._select(f"number, name FROM sessions WHERE NOT gone AND {self.OURS} ORDER BY number")]

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        with self.database.reading() as db:
            now = self._session(db, number)
            if now is None:
                return None
            whole = since is None or since[1] != now["removals"]
            version, _, last = (-1, 0, 0) if since is None or whole else since
            nodes = db.execute(
                "SELECT ordinal, parent, id, key FROM nodes WHERE session = ? AND ordinal > ? ORDER BY ordinal", [number, last]
            ).fetchall()
            refs = db.execute("SELECT name, record FROM refs WHERE session = ? AND version > ?", [number, version]).fetchall()
        rows = [NodeRow(ordinal, parent, id, int.from_bytes(key)) for ordinal, parent, id, key in nodes]
        return Look(
            now["record"], now["version"], now["drops"], now["removals"], bool(now["gone"]), whole, rows, dict(map(tuple, refs))
        )

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        with self.database.writing() as db:
            return [self._apply(db, change) for change in changes]

    def _apply(self, db: sqlite3.Connection, change: Change) -> bool:
        now = self._session(db, change.session)
        if now is None or now["gone"] or now["version"] != change.before:
            return False
        db.execute(
            "UPDATE sessions SET version = ?, drops = drops + ?, gone = ? WHERE number = ?",
            [change.after, change.drops, change.gone, change.session],
        )
        add_nodes(db, change.session, change.nodes)
        db.executemany(
            "INSERT OR REPLACE INTO refs (session, name, version, record) VALUES (?, ?, ?, ?)",
            [(change.session, name, change.after, record) for name, record in change.refs.items()],
        )
        return True

    def tips(self) -> Sequence[tuple[int, int, int]]:
        forks = self._select(f"number, tip_session, tip_ordinal FROM sessions WHERE tip_session IS NOT NULL AND {self.OURS}")
        return [tuple(row) for row in forks]

    def all(self) -> Sequence[tuple[int, bool]]:
        return [
            (number, bool(gone)) for number, gone in self._select(f"number, gone FROM sessions WHERE {self.OURS} ORDER BY number")
        ]

    def remove(self, removal: Removal) -> bool:
        number = removal.session
        with self.database.writing() as db:
            now = self._session(db, number)
            (forks,) = db.execute("SELECT count(*) FROM sessions WHERE tip_session = ?", [number]).fetchone()
            if now is None or now["version"] != removal.version or forks != removal.forks or (removal.whole and not now["gone"]):
                return False
            for table in ("nodes", "records"):
                db.executemany(f"DELETE FROM {table} WHERE session = ? AND ordinal = ?", [(number, n) for n in removal.ordinals])
            db.executemany("DELETE FROM refs WHERE session = ? AND name = ?", [(number, name) for name in removal.refs])
            db.execute("UPDATE sessions SET removals = removals + 1 WHERE number = ?", [number])
            if removal.whole:
                for table, column in (("nodes", "session"), ("records", "session"), ("refs", "session"), ("sessions", "number")):
                    db.execute(f"DELETE FROM {table} WHERE {column} = ?", [number])
        return True

    def named(self, name: bytes) -> bytes | None:
        return self.all_named().get(name)

    def name(self, name: bytes, record: bytes, expected: bytes | None) -> bool:
        with self.database.writing() as db:
            owner = self.database.owner
            now = db.execute("SELECT record FROM names WHERE owner = ? AND name = ?", [owner, name]).fetchone()
            if (now and now["record"]) != expected:
                return False
            db.execute("INSERT OR REPLACE INTO names (owner, name, record) VALUES (?, ?, ?)", [owner, name, record])
        return True

    def all_named(self) -> Mapping[bytes, bytes]:
        with self.database.reading() as db:
            return dict(map(tuple, db.execute("SELECT name, record FROM names WHERE owner = ?", [self.database.owner])))


def add_nodes(db: sqlite3.Connection, session: int, nodes: Sequence[NewNode]) -> None:
    rows = [(session, row.ordinal, row.parent, row.id, row.key.to_bytes(8)) for row, _ in nodes]
    db.executemany("INSERT INTO nodes (session, ordinal, parent, id, key) VALUES (?, ?, ?, ?, ?)", rows)
    records = [(session, row.ordinal, record) for row, record in nodes]
    db.executemany("INSERT INTO records (session, ordinal, record) VALUES (?, ?, ?)", records)


class Nodes:
    """Records of nodes, which never change."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def read(self, session: int, ordinals: Sequence[int]) -> Sequence[bytes | None]:
        ask = f"""SELECT ordinal, record FROM records WHERE session = (SELECT number FROM sessions WHERE number = :session AND {Sessions.OURS})
            AND ordinal IN (SELECT value FROM json_each(:ordinals))"""
        with self.database.reading() as db:
            rows = db.execute(ask, {"session": session, "ordinals": json.dumps(list(ordinals)), "tenant": self.database.tenant})
            found = dict(map(tuple, rows))
        return [found.get(ordinal) for ordinal in ordinals]


class Blobs:
    """Bytes under names that say what they are, written once."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def put(self, name: str, data: bytes) -> bool:
        with self.database.writing() as db:
            done = db.execute(
                "INSERT OR IGNORE INTO blobs (owner, name, made, data) VALUES (?, ?, julianday('now'), ?)",
                [self.database.owner, name, data],
            )
            return done.rowcount == 1

    def get(self, name: str) -> bytes | None:
        with self.database.reading() as db:
            row = db.execute("SELECT data FROM blobs WHERE owner = ? AND name = ?", [self.database.owner, name]).fetchone()
            return row and row["data"]

    def names(self, prefix: str = "") -> Iterable[tuple[str, float]]:
        ask = "SELECT name, max(0, julianday('now') - made) * 86400 FROM blobs WHERE owner = ? AND substr(name, 1, ?) = ?"
        with self.database.reading() as db:
            return [tuple(row) for row in db.execute(ask, [self.database.owner, len(prefix), prefix])]

    def delete(self, names: Iterable[str]) -> int:
        with self.database.writing() as db:
            rows = [(self.database.owner, name) for name in names]
            return db.executemany("DELETE FROM blobs WHERE owner = ? AND name = ?", rows).rowcount


def connect(path: str | Path, tenant: str | None = None) -> Backend:
    """What is at ``path``, made where nothing is. ``tenant``: the one whose sessions there are; None: everybody's."""
    database = Database(path, tenant)
    return Backend(f"sqlite {path}", Sessions(database), Nodes(database), Blobs(database), database.close)
