"""A backend over SQLite: sessions in one file, for any threads and processes of one machine. docs/backends.md takes it apart.

Whatever writes is one ``BEGIN IMMEDIATE`` transaction: it sees all that was written before it, and nobody else writes meanwhile.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sessiontree.backends.shared import BEGINNING, LONG, Backend, Change, Look, NewNode, NewSession, NodeRow, Removal
from sessiontree.errors import CorruptTree, IncompatibleStore, StoreFailed, Unsupported

SCHEMA = f"""
PRAGMA journal_mode = WAL;  -- who reads waits for no writer
PRAGMA user_version = 1; CREATE TABLE counter AS SELECT 0 AS drawn;
CREATE TABLE sessions (number PRIMARY KEY, name, tenant, record, tip_session, tip_ordinal, version, drops, removals, gone);
CREATE INDEX sessions_by_name ON sessions (name); CREATE INDEX sessions_by_tip ON sessions (tip_session);
CREATE VIEW ours AS SELECT * FROM sessions WHERE seen(tenant);  -- those of another tenant are not there
CREATE TABLE nodes (session, ordinal, parent, id, key, record, PRIMARY KEY (session, ordinal));  -- key: 8 bytes
CREATE INDEX nodes_without_records ON nodes (session, ordinal, parent, id, key);
CREATE TABLE refs (session, name, version, long AS (iif(substr(name, 1, 1) = x'{LONG.hex()}', substr(record, 1, {BEGINNING}), NULL))
    STORED, record, PRIMARY KEY (session, name));
CREATE TABLE names (name PRIMARY KEY, tenant, record); CREATE TABLE blobs (name PRIMARY KEY, made, data);
"""


class Database:
    """A file of SQLite, and two connections to it: one reads and one writes, each for a thread at a time."""

    def __init__(self, path: str, tenant: str | None) -> None:
        if not os.path.exists(path):  # made elsewhere and put there whole: of several who do so at once, one is first
            with TemporaryDirectory(dir=os.path.dirname(path) or ".") as scratch:
                with closing(sqlite3.connect(f"{scratch}/store")) as db:
                    db.executescript(SCHEMA)
                with suppress(FileExistsError):
                    os.link(f"{scratch}/store", path)
        self.path, self.tenant = path, tenant
        self.connections: dict[str, tuple[threading.Lock, sqlite3.Connection]] = {}
        for begin in ("BEGIN", "BEGIN IMMEDIATE"):
            db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
            db.create_function("seen", 1, lambda owner: tenant in (None, owner), deterministic=True)
            self.connections[begin] = threading.Lock(), db
        ((version,),) = self.select("user_version FROM pragma_user_version")
        if version != 1:
            self.close()
            raise IncompatibleStore(f"{path} has tables of version {version}, not 1")

    @contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """What is done in it is on disk when it ends, all of it; nothing of it is where an error comes out."""
        lock, db = self.connections[begin]
        try:
            with lock, db:
                db.execute(begin)
                yield db
        except sqlite3.Error as error:  # a damaged file is the base class; what passes, a lock or a full disk, is one below it
            kind = CorruptTree if type(error) is sqlite3.DatabaseError else StoreFailed
            raise kind(f"{self.path}: {error}") from error

    def select(self, what: str, *values: object) -> list[Any]:
        with self.transaction("BEGIN") as db:
            return db.execute(f"SELECT {what}", values).fetchall()

    def close(self) -> None:
        for lock, db in self.connections.values():
            with lock:
                db.close()


class Part:
    def __init__(self, database: Database) -> None:
        self.db = database


class Sessions(Part):
    def _add(self, db: sqlite3.Connection, session: int, at: int, nodes: Sequence[NewNode], refs: Mapping[bytes, bytes]) -> None:
        rows = [(session, row.ordinal, row.parent, row.id, row.key.to_bytes(8), record) for row, record in nodes]
        db.executemany("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?)", rows)
        named = [(session, name, at, record) for name, record in refs.items()]
        db.executemany("REPLACE INTO refs VALUES (?, ?, ?, ?)", named)

    def draw(self, count: int) -> Sequence[int]:
        with self.db.transaction() as db:
            ((last,),) = db.execute("UPDATE counter SET drawn = drawn + ? RETURNING drawn", [count])
        return range(last - count + 1, last + 1)

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        tip = new.tip or (None, None)
        with self.db.transaction() as db:
            if db.execute("SELECT 1 FROM ours WHERE name = ? AND NOT gone", [new.name]).fetchone():
                return "taken"
            if new.tip and not db.execute("SELECT 1 FROM ours WHERE number = ? AND drops = ?", [tip[0], new.tip_drops]).fetchone():
                return "dropped"
            db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0, 0)", [*new[:4], *tip])
            self._add(db, new.number, 0, new.nodes, new.refs)
        return "made"

    def find(self, name: str) -> int | None:
        found = self.db.select("number FROM ours WHERE name = ? AND NOT gone", name)
        if len(found) > 1:
            raise Unsupported(f"{len(found)} tenants have a session {name!r}: connect with tenant=")
        return found[0][0] if found else None

    def names(self) -> Sequence[tuple[int, str]]:
        return self.db.select("number, name FROM ours WHERE NOT gone ORDER BY number")

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        with self.db.transaction("BEGIN") as db:
            found = db.execute("SELECT record, version, drops, removals, gone FROM ours WHERE number = ?", [number]).fetchone()
            if found is None:
                return None
            record, version, drops, removals, gone = found
            whole = since is None or since[1] != removals
            after, _, last = (-1, 0, 0) if since is None or whole else since
            nodes = db.execute("SELECT ordinal, parent, id, key FROM nodes WHERE session = ? AND ordinal > ?", [number, last])
            rows = sorted(NodeRow(ordinal, parent, id, int.from_bytes(key)) for ordinal, parent, id, key in nodes)
            refs = db.execute("SELECT name, coalesce(long, record) FROM refs WHERE session = ? AND version > ?", [number, after])
            return Look(record, version, drops, removals, bool(gone), whole, rows, dict(refs.fetchall()))

    def read_refs(self, number: int, names: Sequence[bytes]) -> Sequence[bytes | None]:
        found = "record FROM refs WHERE session = (SELECT number FROM ours WHERE number = ?) AND name = ?"
        return [row[0][0] if (row := self.db.select(found, number, name)) else None for name in names]

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        done = []
        move = """UPDATE sessions SET version = ?, drops = drops + ?, gone = ?
            WHERE number = ? AND version = ? AND NOT gone AND seen(tenant)"""
        with self.db.transaction() as db:
            for session, before, after, nodes, refs, drops, gone in changes:
                done.append(db.execute(move, [after, drops, gone, session, before]).rowcount == 1)
                if done[-1]:
                    self._add(db, session, after, nodes, refs)
        return done

    def tips(self) -> Sequence[tuple[int, int, int]]:
        return self.db.select("number, tip_session, tip_ordinal FROM ours WHERE tip_session NOT NULL")

    def all(self) -> Sequence[tuple[int, bool]]:
        return [(number, bool(gone)) for number, gone in self.db.select("number, gone FROM ours")]

    def remove(self, removal: Removal) -> bool:
        session, version, ordinals, refs, forks, whole = removal
        move = """UPDATE sessions SET removals = removals + 1 WHERE number = ? AND version = ? AND gone >= ? AND seen(tenant)
            AND ? = (SELECT count(*) FROM sessions WHERE tip_session = ?)"""
        with self.db.transaction() as db:
            if not db.execute(move, [session, version, whole, forks, session]).rowcount:
                return False
            db.executemany("DELETE FROM nodes WHERE session = ? AND ordinal = ?", [(session, ordinal) for ordinal in ordinals])
            db.executemany("DELETE FROM refs WHERE session = ? AND name = ?", [(session, name) for name in refs])
            db.execute("DELETE FROM sessions WHERE number = ? AND ?", [session, whole])
        return True

    def named(self, name: bytes) -> bytes | None:
        found = self.db.select("record FROM names WHERE name = ? AND seen(tenant)", name)
        return found[0][0] if found else None

    def name(self, name: bytes, record: bytes | None, expected: bytes | None, tenant: str | None = None) -> bool:
        with self.db.transaction() as db:  # nobody writes meanwhile
            move = "INSERT INTO names VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET record = ?3 WHERE seen(tenant)"
            free = "DELETE FROM names WHERE name = ?1 AND seen(tenant) AND (?2, ?3) IS (?2, NULL)"
            given = free if record is None else move, [name, self.db.tenant or tenant, record]
            return self.named(name) == expected and db.execute(*given).rowcount == 1

    def all_named(self) -> Mapping[bytes, bytes]:
        return dict(self.db.select("name, record FROM names WHERE seen(tenant)"))


class Nodes(Part):
    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Sequence[bytes | None]:
        found = "session = (SELECT number FROM ours WHERE number = ?) AND ordinal IN (SELECT value FROM json_each(?))"
        records = dict(self.db.select(f"ordinal, record FROM nodes WHERE {found}", session, str(list(ordinals))))
        return [records.get(ordinal) for ordinal in ordinals]


class Blobs(Part):
    def put(self, name: str, data: bytes) -> bool:
        with self.db.transaction() as db:
            return db.execute("INSERT OR IGNORE INTO blobs VALUES (?, julianday('now'), ?)", [name, data]).rowcount == 1

    def get(self, name: str) -> bytes | None:
        found = self.db.select("data FROM blobs WHERE name = ?", name)
        return found[0][0] if found else None

    def names(self, prefix: str = "") -> Iterable[tuple[str, float]]:
        return self.db.select("name, max(0, julianday('now') - made) * 86400 FROM blobs WHERE instr(name, ?) = 1", prefix)

    def delete(self, names: Iterable[str]) -> int:
        with self.db.transaction() as db:
            return db.executemany("DELETE FROM blobs WHERE name = ?", [(name,) for name in names]).rowcount


def connect(path: str, tenant: str | None = None) -> Backend:
    """What is at ``path``, made where nothing is. ``tenant``: only that one's sessions and names."""
    database = Database(path, tenant)
    return Backend(f"sqlite {path}", Sessions(database), Nodes(database), Blobs(database), database.close)
