"""Sessions and nodes in PostgreSQL 15 or newer: the protocols of :mod:`sessiontree.backends.shared`. Needs the extra ``postgres``.

The tables, and the functions that write, are in ``postgres.sql``. They are in a schema of their own, ``sessiontree``, and not in
that of the search path: their names are plain words, which an application that shares the database may use too.

Everything but :meth:`PostgresNodes.read` asks the primary. That one asks the replica where there is one, and the primary for what
the replica does not have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import Final, Literal
from uuid import UUID

from psycopg.types.numeric import Int4, Int8

from sessiontree.backends.buckets import BucketBlobs
from sessiontree.backends.postgres_blobs import DatabaseBlobs
from sessiontree.backends.postgres_lines import EVERYTHING, Ints, Longs, Server, Texts, Writer
from sessiontree.backends.shared import Backend, Blobs, Change, Look, NewNode, NewSession, NodeRow, Removal
from sessiontree.errors import Unsupported

BODY: Final = 4032  # bytes of a record's body where two are to fill a page
_LONGEST_HEAD: Final = 1024  # what more a record may have, if it is to be cut there
_ROW: Final = Struct(">IIQ32s")  # as rows_after in postgres.sql
_HALF: Final = 2**63

_NEWER: Final = "sessiontree.refs r WHERE r.session = s.number AND r.version > CASE s.removals WHEN %b THEN %b ELSE -1 END"
_LOOK: Final = f"""
SELECT s.record, s.version, s.drops, s.removals, s.gone, s.removals = %b,
    sessiontree.rows_after(s.number, CASE s.removals WHEN %b THEN %b ELSE 0 END),
    ARRAY(SELECT r.name FROM {_NEWER} ORDER BY r.name), ARRAY(SELECT r.record FROM {_NEWER} ORDER BY r.name)
FROM sessiontree.sessions s WHERE s.number = %b AND sessiontree.sees(s.tenant)
"""
_JOINED: Final = "sessiontree.nodes n JOIN sessiontree.bodies b ON b.session = n.session AND b.ordinal = n.ordinal"
_SEEN: Final = "EXISTS (SELECT FROM sessiontree.sessions s WHERE s.number = %b AND sessiontree.sees(s.tenant))"
_RANGE: Final = f"""
SELECT n.ordinal, n.head, b.body FROM {_JOINED}
WHERE {_SEEN} AND n.session = %b AND n.ordinal BETWEEN %b AND %b AND b.session = %b AND b.ordinal BETWEEN %b AND %b
"""
_THESE: Final = f"""
SELECT n.ordinal, n.head, b.body FROM unnest(%b) AS wanted(ordinal)
    JOIN sessiontree.nodes n ON n.session = %b AND n.ordinal = wanted.ordinal
    JOIN sessiontree.bodies b ON b.session = %b AND b.ordinal = wanted.ordinal
WHERE {_SEEN}
"""


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
        parameters = (
            Int8(new.number),
            new.name.encode(),
            None if new.tenant is None else scope_of(new.tenant),
            new.record,
            None if session is None else Int8(session),
            None if ordinal is None else Int4(ordinal),
            Int4(new.tip_drops),
            *_columns(new.nodes),
        )
        came = self._other.write(f"create session {new.name!r}", "create_session", parameters)
        return came  # type: ignore[return-value]

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
        record, version, drops, removals, gone, partial, rows, names, records = found[0]
        nodes = [NodeRow(ordinal, parent, id, key) for ordinal, parent, key, id in _ROW.iter_unpack(rows or b"")]
        return Look(record, version, drops, removals, gone, not partial, nodes, dict(zip(names, records, strict=True)))

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        order = sorted(range(len(changes)), key=lambda at: changes[at].session)
        ordered = [changes[at] for at in order]
        nodes = [node for change in ordered for node in change.nodes]
        refs = [ref for change in ordered for ref in change.refs.items()]
        parameters = (
            Longs(change.session for change in ordered),
            Longs(change.before for change in ordered),
            Longs(change.after for change in ordered),
            Ints(change.drops + 2 * change.gone for change in ordered),
            Ints(_ends(len(change.nodes) for change in ordered)),
            Ints(_ends(len(change.refs) for change in ordered)),
            *_columns(nodes),
            Texts(name for name, _ in refs),
            Texts(record for _, record in refs),
        )
        came = self._committing.write(f"write to {len(changes)} sessions", "commit", parameters)
        held = dict(zip(order, came, strict=True))
        return [held[at] == "1" for at in range(len(changes))]

    def tips(self) -> Sequence[tuple[int, int, int]]:
        wanted = (
            "SELECT number, tip_session, tip_ordinal FROM sessiontree.sessions WHERE tip_session > 0 AND sessiontree.sees(tenant)"
        )
        return [(fork, session, ordinal) for fork, session, ordinal in self._server.rows("list forks", wanted)]

    def all(self) -> Sequence[tuple[int, bool]]:
        wanted = "SELECT number, gone FROM sessiontree.sessions WHERE sessiontree.sees(tenant) ORDER BY number"
        return [(number, gone) for number, gone in self._server.rows("list sessions", wanted)]

    def remove(self, removal: Removal) -> bool:
        parameters = (
            Int8(removal.session),
            Int8(removal.version),
            Ints(removal.ordinals),
            Texts(removal.refs),
            Int8(removal.forks),
            removal.whole,
        )
        return self._other.write(f"remove nodes of session {removal.session}", "remove", parameters) == "1"

    def named(self, name: bytes) -> bytes | None:
        found = self._server.rows(
            "read a name", "SELECT record FROM sessiontree.names WHERE name = %b AND sessiontree.sees(tenant)", (name,)
        )
        return found[0][0] if found else None

    def name(self, name: bytes, record: bytes, expected: bytes | None, tenant: str | None = None) -> bool:
        """``tenant``: whose it is; unless told, that of the connection."""
        owner = self._tenant if tenant is None else tenant
        parameters = (name, None if owner is None else scope_of(owner), record, expected)
        return self._other.write("set a name", "set_name", parameters) == "1"

    def all_named(self) -> Mapping[bytes, bytes]:
        return dict(self._server.rows("list names", "SELECT name, record FROM sessiontree.names WHERE sessiontree.sees(tenant)"))

    def close(self) -> None:
        self._committing.close()
        self._other.close()


class PostgresNodes:
    """Records in a database, and in a copy of it that may lag. See :class:`~sessiontree.backends.shared.Nodes`."""

    def __init__(self, primary: Server, replica: Server | None) -> None:
        self._servers = (primary,) if replica is None else (replica, primary)

    def read(self, session: int, ordinals: Sequence[int]) -> Sequence[bytes | None]:
        found: dict[int, bytes] = {}
        wanted = ordinals
        for server in self._servers:
            if wanted:
                found |= _read(server, session, wanted)
                wanted = [ordinal for ordinal in ordinals if ordinal not in found]
        return [found.get(ordinal) for ordinal in ordinals]


def _read(server: Server, session: int, ordinals: Sequence[int]) -> dict[int, bytes]:
    number, first, last = Int8(session), min(ordinals), max(ordinals)
    if last - first < len(ordinals):  # all from the first to the last: a path without branches
        ends = Int4(first), Int4(last)
        rows = server.rows(f"read session {session}", _RANGE, (number, number, *ends, number, *ends))
    else:
        rows = server.rows(f"read session {session}", _THESE, (Ints(sorted(set(ordinals))), number, number, number))
    return {ordinal: body if head is None else head + body for ordinal, head, body in rows}


def _columns(nodes: Sequence[NewNode]) -> tuple[Ints, Ints, Longs, Texts, Texts, Texts]:
    """Nodes as the functions take them: ordinals, parents, keys, ids, heads, bodies."""
    rows = [node.row for node in nodes]
    cuts = [len(node.record) - BODY if BODY < len(node.record) <= BODY + _LONGEST_HEAD else 0 for node in nodes]
    return (
        Ints(row.ordinal for row in rows),
        Ints(row.parent for row in rows),
        Longs((row.key - 2 * _HALF if row.key >= _HALF else row.key) or None for row in rows),
        Texts(row.id for row in rows),
        Texts(node.record[:cut] or None for node, cut in zip(nodes, cuts, strict=True)),
        Texts(node.record[cut:] for node, cut in zip(nodes, cuts, strict=True)),
    )


def _ends(counts: Iterable[int]) -> list[int]:
    """Where each of some runs ends that stand one behind the other."""
    ends, end = [], 0
    for count in counts:
        end += count
        ends.append(end)
    return ends


def scope_of(tenant: str | None) -> UUID:
    """The scope of a tenant's rows."""
    return EVERYTHING if tenant is None else UUID(bytes=hashlib.sha256(b"tenant " + tenant.encode()).digest()[:16])


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
    copy = None if replica is None else Server(replica, scope_of(tenant), True, seconds)
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
    return BucketBlobs(where, read_only=server.read_only)
