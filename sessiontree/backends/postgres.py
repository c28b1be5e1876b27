"""Sessions and nodes in PostgreSQL 15 or newer: the protocols of :mod:`sessiontree.backends.shared`. Needs the extra ``postgres``.

The tables, and the functions that write, are in ``postgres.sql``. They are in a schema of their own, ``sessiontree``, and not in
that of the search path: their names are plain words, which an application that shares the database may use too.

Everything but :meth:`PostgresNodes.read` asks the primary. That one asks the replica where there is one, and the primary for what
the replica does not have.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from struct import Struct
from typing import Final, Literal
from uuid import UUID

from psycopg.types.numeric import Int4, Int8

from sessiontree import codec
from sessiontree.backends import shared
from sessiontree.backends.postgres_blobs import DatabaseBlobs
from sessiontree.backends.postgres_lines import Server
from sessiontree.backends.postgres_statements import (
    CHANGE,
    CHANGES,
    CREATE,
    INT4,
    INT4S,
    INT8,
    REMOVE,
    SET_NAME,
    Statement,
    byteas,
    columns,
    given_ref,
    int4,
    int4s,
    int8,
    kept_ref,
    many_changes,
    one_change,
)
from sessiontree.backends.postgres_writer import Writer
from sessiontree.backends.shared import BEGINNING, LONG, Backend, Blobs, Change, Look, NewSession, NodeRow, Removal
from sessiontree.errors import CorruptTree, IncompatibleStore, StoreFailed, Unsupported

EVERYTHING: Final = UUID(int=0)  # the scope of all tenants
_REST: Final = 5.0  # seconds for which a replica that has failed is not asked
_ROW: Final = Struct(">IIQ32s")  # as rows_after in postgres.sql

_NEWER: Final = "sessiontree.refs r WHERE r.session = s.number AND r.version > CASE s.removals WHEN %b THEN %b ELSE -1 END"
_SHOWN: Final = f"CASE WHEN substr(r.name, 1, 1) = '\\x{LONG.hex()}' THEN substr(r.record, 1, {BEGINNING}) ELSE r.record END"
_LOOK: Final = f"""
SELECT s.name, s.record, s.version, s.drops, s.removals, s.gone, s.removals = %b,
    sessiontree.rows_after(s.number, CASE s.removals WHEN %b THEN %b ELSE 0 END),
    ARRAY(SELECT r.name FROM {_NEWER} ORDER BY r.name), ARRAY(SELECT {_SHOWN} FROM {_NEWER} ORDER BY r.name)
FROM sessiontree.sessions s WHERE s.number = %b AND sessiontree.sees(s.tenant)
"""
#: A record's body is looked up by its key, whatever the server thinks of tables that have grown since it last counted their rows.
_RECORD: Final = """
coalesce(
    (SELECT coalesce(n.head || b.body, b.body) FROM sessiontree.bodies b WHERE b.session = n.session AND b.ordinal = n.ordinal),
    sessiontree.beginning(n.session, n.ordinal, n.parent, n.id, n.key) || n.head
)
"""
_REFS: Final = """
SELECT r.name, r.record FROM sessiontree.refs r
WHERE r.session = %b AND r.name = ANY (%b::bytea[])
    AND EXISTS (SELECT FROM sessiontree.sessions s WHERE s.number = r.session AND sessiontree.sees(s.tenant))
"""
_SEEN: Final = "EXISTS (SELECT FROM sessiontree.sessions s WHERE s.number = $1 AND sessiontree.sees(s.tenant))"
#: A run of nodes, as a path without branches is: a quarter less work than to look each up.
_RUN: Final = Statement(
    f"""
SELECT n.ordinal, {_RECORD} FROM sessiontree.nodes n
WHERE {_SEEN} AND n.session = $1 AND n.ordinal BETWEEN $2 AND $3
""",
    (INT8, INT4, INT4),
)
_THESE: Final = Statement(
    f"""
SELECT wanted.ordinal, (SELECT {_RECORD} FROM sessiontree.nodes n WHERE n.session = $1 AND n.ordinal = wanted.ordinal)
FROM unnest($2) AS wanted(ordinal) WHERE {_SEEN}
""",
    (INT8, INT4S),
)


class PostgresSessions:
    """Sessions in a database; ``tenant``: those that are seen, None is all. See :class:`~sessiontree.backends.shared.Sessions`."""

    def __init__(self, server: Server, tenant: str | None) -> None:
        self._server = server
        self._tenant = tenant
        self._committing = Writer(server)
        self._other = Writer(server)  # what takes longer than a commit

    def draw(self, count: int) -> Sequence[int]:
        drawn = self._server.rows(
            "draw numbers", "SELECT nextval('sessiontree.numbers') FROM generate_series(1, %b)", (Int4(count),)
        )
        return sorted(number for (number,) in drawn)

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        session, ordinal = new.tip or (None, None)
        values = (
            int8(new.number),
            new.name.encode(),
            None if new.tenant is None else scope_of(new.tenant).bytes,
            codec.without_digest(new.record, codec.name_digest(new.name)),
            None if session is None else int8(session),
            None if ordinal is None else int4(ordinal),
            int4(new.tip_drops),
            *columns([(new.number, node) for node in new.nodes]),
            byteas(new.refs),
            byteas(itertools.starmap(kept_ref, new.refs.items())),
        )
        return self._other.write(f"create session {new.name!r}", CREATE, values)  # type: ignore[return-value]

    def find(self, name: str) -> int | None:
        wanted = "SELECT number FROM sessiontree.sessions WHERE name = %b AND NOT gone AND sessiontree.sees(tenant)"
        found = self._server.rows(f"find session {name!r}", wanted, (name.encode(),))
        if len(found) > 1:
            raise Unsupported(f"{len(found)} tenants have a session {name!r}: connect with tenant= for one of them")
        return found[0][0] if found else None

    def names(self) -> Sequence[tuple[int, str]]:
        wanted = "SELECT number, name FROM sessiontree.sessions WHERE NOT gone AND sessiontree.sees(tenant) ORDER BY number"
        return [(number, name.decode()) for number, name in self._server.rows("list sessions", wanted)]

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        version, removals, last = since or (-1, -1, 0)
        at, on = Int4(removals), Int8(version)
        found = self._server.rows(f"look at session {number}", _LOOK, (at, at, Int4(last), at, on, at, on, Int8(number)))
        if not found:
            return None
        name, record, version, drops, removals, gone, partial, rows, names, records = found[0]
        if len(rows or b"") % _ROW.size:
            raise CorruptTree(f"{self._server.where}: an id of a node of session {number} is not of 32 bytes", session=number)
        nodes = [NodeRow(ordinal, parent, id, key) for ordinal, parent, key, id in _ROW.iter_unpack(rows or b"")]
        record = codec.with_digest(record, sha256(name).digest())
        refs = {ref: given_ref(ref, kept) for ref, kept in zip(names, records, strict=True)}
        return Look(record, version, drops, removals, gone, not partial, nodes, refs)

    def read_refs(self, number: int, names: Sequence[bytes]) -> Sequence[bytes | None]:
        found = dict(self._server.rows(f"read session {number}", _REFS, (Int8(number), list(names)))) if names else {}
        return [given_ref(name, found[name]) if name in found else None for name in names]

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        what = f"write to session {changes[0].session}" if len(changes) == 1 else f"write to {len(changes)} sessions"
        values = one_change(changes[0]) if len(changes) == 1 else None
        if values is not None:
            came = self._committing.write(what, CHANGE, values)
        else:
            came = self._committing.write(what, CHANGES, many_changes(changes))
        moved = set(map(int, came.split()))
        return [change.session in moved for change in changes]

    def tips(self) -> Sequence[tuple[int, int, int]]:
        wanted = (
            "SELECT number, tip_session, tip_ordinal FROM sessiontree.sessions WHERE tip_session > 0 AND sessiontree.sees(tenant)"
        )
        return [(fork, session, ordinal) for fork, session, ordinal in self._server.rows("list forks", wanted)]

    def all(self) -> Sequence[tuple[int, bool]]:
        wanted = "SELECT number, gone FROM sessiontree.sessions WHERE sessiontree.sees(tenant) ORDER BY number"
        return [(number, gone) for number, gone in self._server.rows("list sessions", wanted)]

    def remove(self, removal: Removal) -> bool:
        values = (
            int8(removal.session),
            int8(removal.version),
            int4s(removal.ordinals),
            byteas(removal.refs),
            int8(removal.forks),
            bytes([removal.whole]),
        )
        return self._other.write(f"remove nodes of session {removal.session}", REMOVE, values) == "1"

    def named(self, name: bytes) -> bytes | None:
        found = self._server.rows(
            "read a name", "SELECT record FROM sessiontree.names WHERE name = %b AND sessiontree.sees(tenant)", (name,)
        )
        return found[0][0] if found else None

    def name(self, name: bytes, record: bytes | None, expected: bytes | None, tenant: str | None = None) -> bool:
        owner = tenant if self._tenant is None else self._tenant
        values = name, None if owner is None else scope_of(owner).bytes, record, expected
        return self._other.write("set a name", SET_NAME, values) == "1"

    def all_named(self) -> Mapping[bytes, bytes]:
        return dict(self._server.rows("list names", "SELECT name, record FROM sessiontree.names WHERE sessiontree.sees(tenant)"))

    def close(self) -> None:
        self._committing.close()
        self._other.close()


class PostgresNodes:
    """Records in a database, and in a copy of it that may lag. See :class:`~sessiontree.backends.shared.Nodes`."""

    def __init__(self, primary: Server, replica: Server | None) -> None:
        self._primary = primary
        self._replica = replica
        self._rests_until = 0.0  # the replica, which has failed

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterator[bytes | None]:
        found: dict[int, bytes] = {}
        given = 0
        for server in self._asked(fresh):
            missing = {ordinal for ordinal in ordinals[given:] if ordinal not in found}
            try:
                for records in _read(server, session, missing):
                    found.update(records)
                    while given < len(ordinals) and ordinals[given] in found:
                        given += 1
                        yield found[ordinals[given - 1]]
            except (StoreFailed, IncompatibleStore):
                if server is self._primary:
                    raise
                self._rests_until = time.monotonic() + _REST
        for ordinal in ordinals[given:]:
            yield found.get(ordinal)

    def _asked(self, fresh: bool) -> Iterator[Server]:
        """One after the other, for what is missing still."""
        if self._replica is not None and not fresh and time.monotonic() >= self._rests_until:
            yield self._replica
        yield self._primary


def _read(server: Server, session: int, ordinals: Collection[int]) -> Iterator[Iterator[tuple[int, bytes]]]:
    """Those that are there, as they come: some after the other."""
    if not ordinals:
        return
    first, last = min(ordinals), max(ordinals)
    statement, values = _THESE, [int8(session), int4s(ordinals)]
    if last - first < len(ordinals):
        statement, values = _RUN, [int8(session), int4(first), int4(last)]
    for numbers, records in server.columns(f"read session {session}", statement, values):
        found = zip(numbers, records, strict=True)
        yield ((int.from_bytes(number), record) for number, record in found if number is not None and record is not None)


def scope_of(tenant: str | None) -> UUID:
    """The scope of a tenant's rows."""
    return EVERYTHING if tenant is None else UUID(bytes=shared.scope_of(tenant))


def connect(
    url: str,
    *,
    tenant: str | None = None,
    replica: str | None = None,
    blobs: str | None = "database",
    read_only: bool = False,
    seconds: float = 30.0,
) -> Backend:
    """A backend over a database, whose tables are made where there are none.

    ``url``, ``replica``: ``postgresql://`` URLs. ``tenant``: only its rows are seen. ``blobs``: where features of media are kept.
    ``read_only``: nothing is written; a standby will do. ``seconds``: how long anything is tried before it fails.

    Raises IncompatibleStore for tables of another version, StoreFailed where the server cannot be reached.
    """
    server = Server(url, scope_of(tenant), read_only, seconds)
    copy = None if replica is None else Server(replica, scope_of(tenant), True, seconds / 10)  # the primary can do the same
    try:
        server.prepare()
    except BaseException:
        server.close()
        raise
    sessions = PostgresSessions(server, tenant)

    def close() -> None:
        sessions.close()
        server.close()
        if copy is not None:
            copy.close()

    return Backend(server.where, sessions, PostgresNodes(server, copy), _blobs(server, blobs), close)


def _blobs(server: Server, where: str | None) -> Blobs | None:
    if where is None:
        return None
    if where == "database":
        return DatabaseBlobs(server.connection, seconds=server.seconds)
    from sessiontree.backends.buckets import BucketBlobs  # noqa: PLC0415 (needs an extra of its own)

    return BucketBlobs(where, read_only=server.read_only)
