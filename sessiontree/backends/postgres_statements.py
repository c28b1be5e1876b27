"""What writes to the tables of ``postgres.sql``, as prepared statements, and their parameters in PostgreSQL's binary form.

The first two parameters of each are the writer and the number of its batch; what is returned is its outcome, a text.

Changes of sessions are one statement, whose parts share one snapshot. What makes it sound, in READ COMMITTED:

- ``held`` moves the sessions that are at the version which a change was made for. Where somebody else holds such a row, it waits,
  and looks again at what the row is by then. All else is made from what ``held`` returns, so it is done under its session's lock.
- ``moved`` moves the writer's row in the same way. Where that is not at the batch before, nothing comes of it, and ``refuse`` ends
  the statement with an error, which undoes all of it. So of two of one batch, one left behind by a connection that was lost, the
  second finds the sessions moved, or the writer, however they overtake each other.
- Several sessions are locked first, in order of number, so that no two batches wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct, pack
from typing import Final, NamedTuple

from sessiontree import codec
from sessiontree.backends.shared import Change, NewNode

BODY: Final = 4032  # bytes of a record's body of which two fill a page
LONGEST_HEAD: Final = 1024  # bytes of what stands with a node's row
NULL: Final = b"\xff\xff\xff\xff"
INT8, INT4, INT4S = 20, 23, 1007
_BOOL, _BYTEA, _UUID, _BYTEAS, _INT8S = 16, 17, 2950, 1001, 1016
_NODES: Final = INT4S, INT4S, _INT8S, _BYTEAS, _BYTEAS, _BYTEAS  # as columns gives them

Value = bytes | None
int4: Final = Struct(">i").pack
int8: Final = Struct(">q").pack


class Statement(NamedTuple):
    """``types``: the object ids of its parameters' types."""

    text: str
    types: tuple[int, ...]


_MOVED: Final = """moved AS (
    UPDATE sessiontree.writers w SET batch = $2, moved = now(), outcome = coalesce((SELECT {} FROM held h), '')
    WHERE w.writer = $1 AND w.batch = $2 - 1
    RETURNING w.outcome
)
SELECT coalesce((SELECT m.outcome FROM moved m), sessiontree.refuse($1, $2))
"""
_UPSERT: Final = "ON CONFLICT (session, name) DO UPDATE SET version = EXCLUDED.version, record = EXCLUDED.record"

#: One change of at most one node and one ref, by far the commonest; NULL where there is none. Its outcome is that of CHANGES.
CHANGE: Final = Statement(
    f"""
WITH held AS (
    UPDATE sessiontree.sessions s SET version = $5, drops = s.drops + ($6 & 1), gone = s.gone OR $6 > 1
    WHERE s.number = $3 AND s.version = $4 AND sessiontree.sees(s.tenant)
    RETURNING s.number, s.version, s.tenant
), new_node AS (
    INSERT INTO sessiontree.nodes (session, ordinal, parent, key, tenant, id, head)
    SELECT h.number, $7, $8, $9, h.tenant, $10, $11 FROM held h WHERE $7 IS NOT NULL
), new_body AS (
    INSERT INTO sessiontree.bodies (session, ordinal, tenant, body)
    SELECT h.number, $7, h.tenant, $12 FROM held h WHERE $12 IS NOT NULL
), new_ref AS (
    INSERT INTO sessiontree.refs (session, version, tenant, name, record)
    SELECT h.number, h.version, h.tenant, $13, $14 FROM held h WHERE $13 IS NOT NULL
    {_UPSERT}
), {_MOVED.format("h.number::text")}""",
    (_UUID, INT8, INT8, INT8, INT8, INT4, INT4, INT4, INT8, _BYTEA, _BYTEA, _BYTEA, _BYTEA, _BYTEA),
)

#: Any changes. Its outcome names the sessions that were moved.
CHANGES: Final = Statement(
    f"""
WITH changes AS MATERIALIZED (
    SELECT * FROM unnest($3, $4, $5, $6) AS c(number, before, after, marks)
), locked AS MATERIALIZED (
    SELECT s.number FROM sessiontree.sessions s WHERE s.number = ANY ($3) ORDER BY s.number FOR NO KEY UPDATE
), held AS (
    UPDATE sessiontree.sessions s SET version = c.after, drops = s.drops + (c.marks & 1), gone = s.gone OR c.marks > 1
    FROM changes c
    WHERE (SELECT count(*) FROM locked) > 0 AND s.number = c.number AND s.version = c.before AND sessiontree.sees(s.tenant)
    RETURNING s.number, s.version, s.tenant
), new_nodes AS (
    INSERT INTO sessiontree.nodes (session, ordinal, parent, key, tenant, id, head)
    SELECT h.number, n.ordinal, n.parent, n.key, h.tenant, n.id, n.head
    FROM unnest($7, $8, $9, $10, $11, $12) AS n(session, ordinal, parent, key, id, head) JOIN held h ON h.number = n.session
), new_bodies AS (
    INSERT INTO sessiontree.bodies (session, ordinal, tenant, body)
    SELECT h.number, n.ordinal, h.tenant, n.body FROM unnest($7, $8, $13) AS n(session, ordinal, body)
    JOIN held h ON h.number = n.session WHERE n.body IS NOT NULL
), new_refs AS (
    INSERT INTO sessiontree.refs (session, version, tenant, name, record)
    SELECT h.number, h.version, h.tenant, r.name, r.record FROM unnest($14, $15, $16) AS r(session, name, record)
    JOIN held h ON h.number = r.session
    {_UPSERT}
), {_MOVED.format("string_agg(h.number::text, ' ')")}""",
    (_UUID, INT8, _INT8S, _INT8S, _INT8S, INT4S, _INT8S, *_NODES, _INT8S, _BYTEAS, _BYTEAS),
)


def _function(name: str, *types: int) -> Statement:
    every = (_UUID, INT8, *types)
    return Statement(f"SELECT sessiontree.{name}({', '.join(f'${at}' for at in range(1, len(every) + 1))})", every)


CREATE: Final = _function("create_session", INT8, _BYTEA, _UUID, _BYTEA, INT8, INT4, INT4, *_NODES, _BYTEAS, _BYTEAS)
REMOVE: Final = _function("remove", INT8, INT8, INT4S, _BYTEAS, INT8, _BOOL)
SET_NAME: Final = _function("set_name", _BYTEA, _UUID, _BYTEA, _BYTEA)


def one_change(change: Change) -> Sequence[Value] | None:
    """Parameters for :data:`CHANGE`; None where it is not for that."""
    if len(change.nodes) > 1 or len(change.refs) > 1:
        return None
    node: tuple[Value, ...] = None, None, None, None, None, None
    for each in change.nodes:
        ordinal, parent, identity, key = each.row
        node = int4(ordinal), int4(parent), _key(key), identity, *cut(change.session, each)
    name, ref = next(iter(change.refs.items()), (None, None))
    if name is not None and ref is not None:
        ref = kept_ref(name, ref)
    return int8(change.session), int8(change.before), int8(change.after), int4(_marks(change)), *node, name, ref


def many_changes(changes: Sequence[Change]) -> Sequence[Value]:
    """Parameters for :data:`CHANGES`."""
    nodes = [(change.session, node) for change in changes for node in change.nodes]
    refs = [(change.session, *ref) for change in changes for ref in change.refs.items()]
    return (
        int8s(change.session for change in changes),
        int8s(change.before for change in changes),
        int8s(change.after for change in changes),
        int4s(_marks(change) for change in changes),
        int8s(session for session, _ in nodes),
        *columns(nodes),
        int8s(session for session, _, _ in refs),
        byteas(name for _, name, _ in refs),
        byteas(kept_ref(name, record) for _, name, record in refs),
    )


def columns(nodes: Sequence[tuple[int, NewNode]]) -> tuple[bytes, ...]:
    """Nodes, each with its session, as arrays: ordinals, parents, keys, ids, heads, bodies."""
    cuts = [cut(*each) for each in nodes]
    return (
        int4s(node.row.ordinal for _, node in nodes),
        int4s(node.row.parent for _, node in nodes),
        _array(INT8, [_key(node.row.key) for _, node in nodes]),
        byteas(node.row.id for _, node in nodes),
        byteas(head for head, _ in cuts),
        byteas(body for _, body in cuts),
    )


def cut(session: int, node: NewNode) -> tuple[bytes | None, bytes | None]:
    """A record's head and its body, one of which may be None. Without a body, the head lacks what the row says already."""
    (ordinal, parent, identity, key), record = node
    over = len(record) - BODY
    if 0 < over <= LONGEST_HEAD:
        return record[:over], record[over:]
    if over <= 0:
        beginning = codec.beginning_of_node(session, ordinal, parent, identity, key)
        if len(record) <= len(beginning) + LONGEST_HEAD and record.startswith(beginning):
            return record[len(beginning) :], None
    return None, record


def kept_ref(name: bytes, record: bytes) -> bytes:
    """What stands in the row of a ref, which says the digest of a head's name already."""
    return codec.without_digest(record, name[1:])


def given_ref(name: bytes, kept: bytes) -> bytes:
    """Its record, given what stands there."""
    return codec.with_digest(kept, name[1:])


def _marks(change: Change) -> int:
    return change.drops + 2 * change.gone


def _key(key: int) -> bytes | None:
    """A key's digest, of which PostgreSQL knows that it is 64 bits, and not that they are unsigned."""
    return key.to_bytes(8) if key else None


def int4s(values: Iterable[int]) -> bytes:
    return _array(INT4, [int4(value) for value in values])


def int8s(values: Iterable[int]) -> bytes:
    return _array(INT8, [int8(value) for value in values])


def byteas(values: Iterable[bytes | None]) -> bytes:
    return _array(_BYTEA, list(values))


def _array(kind: int, values: Sequence[Value]) -> bytes:
    """An array of one dimension, from 1 on."""
    parts = [pack(">5i", 1, None in values, kind, len(values), 1)]
    for value in values:
        parts += (NULL,) if value is None else (int4(len(value)), value)
    return b"".join(parts)
