"""PostgreSQL as a backend: what it holds, what becomes of a write when connections and servers fail, and who sees what.

Whatever is cut, an answer is that of a write that was done once. Each history is looked at on a connection of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from sessiontree import IncompatibleStore, SessionStore, SessionTreeError, StoreFailed, codec
from sessiontree.backends import shared
from sessiontree.backends.postgres import _SHOWN, PostgresSessions, connect, scope_of
from sessiontree.backends.postgres_lines import Line
from sessiontree.backends.postgres_statements import (
    BODY,
    CHANGE,
    CHANGES,
    CREATE,
    LONGEST_HEAD,
    byteas,
    columns,
    int4,
    int8,
    many_changes,
    one_change,
)
from sessiontree.backends.postgres_writer import Writer
from sessiontree.backends.shared import BEGINNING, LONG, Backend, Change, Look, NewNode, NewSession, NodeRow, Removal
from sessiontree.index import Limits
from sessiontree.node import Namespace
from sessiontree.testing.together import in_threads
from tests.backend_contract import BackendContract
from tests.backend_writing import Connect
from tests.postgres_proxy import Proxy, Side
from tests.postgres_server import Server, account, free_port, remove, run

ROOT: Final = Path(__file__).parent.parent
SHORT: Final = 1.5  # seconds that something is tried where it is to fail


def node(ordinal: int, size: int = 100, key: int = 0) -> NewNode:
    """The same whenever it is asked for."""
    seed = b"%d %d" % (ordinal, size)
    return NewNode(NodeRow(ordinal, ordinal - 1, hashlib.sha256(seed).digest(), key), hashlib.shake_128(seed).digest(size))


def look(backend: Backend, number: int) -> Look:
    found = backend.sessions.look(number)
    assert found is not None
    return found


def sessions_of(backend: Backend) -> PostgresSessions:
    assert isinstance(backend.sessions, PostgresSessions)
    return backend.sessions


def committing(backend: Backend) -> Writer:
    return sessions_of(backend)._committing


@pytest.fixture
def open_at() -> Iterator[Callable[..., Backend]]:
    """Connects; what is connected is closed at the end."""
    with ExitStack() as stack:

        def opened(url: str, **options: Any) -> Backend:
            backend = connect(url, **{"blobs": None, **options})
            stack.callback(backend.close)
            return backend

        yield opened


@pytest.fixture
def backend(open_at: Callable[..., Backend], postgres_url: str) -> Backend:
    return open_at(postgres_url)


@pytest.fixture
def sql(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection beside the backend's."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    with Proxy(postgres_url) as proxy:
        yield proxy


def make(backend: Backend, name: str = "s", nodes: int = 0, **more: Any) -> int:
    (number,) = backend.sessions.draw(1)
    new = NewSession(number, name, more.pop("tenant", None), b"record", [node(at) for at in range(1, nodes + 1)], **more)
    assert backend.sessions.create(new) == "made"
    return number


def fork_of(number: int, fork: int, tip: int = 500) -> NewSession:
    """A fork of a session, with the record that a store writes of one. ``tip``: the ordinal of its tip."""
    name = f"fork-{fork}"
    record = codec.SessionRecord(fork, name, "", (), Namespace(), "", Limits(None, 0), bytes(32), (number, tip))
    return NewSession(fork, name, None, codec.encode(record), (), (number, tip))


def wait_for(sql: psycopg.Connection[Any], condition: str, *parameters: Any) -> Any:
    """The first row of a query, once it has one."""
    for _ in range(6_000):
        row = sql.execute(condition, parameters).fetchone()
        if row is not None:
            return row
        sql.execute("SELECT pg_sleep(0.01)")
    raise AssertionError(f"never: {condition}")


def blocked(sql: psycopg.Connection[Any], count: int = 1, beside: int = 0) -> list[int]:
    """The server's processes that wait for a lock, once there are so many beside one."""
    wanted = """
        SELECT array_agg(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> %s HAVING count(*) >= %s
    """
    pids: list[int] = wait_for(sql, wanted, beside, count)[0]
    return pids


@contextmanager
def holding(url: str, *numbers: int) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that has locked the rows of these sessions, in that order."""
    with psycopg.connect(url) as connection:
        for number in numbers:
            connection.execute("SELECT FROM sessiontree.sessions WHERE number = %s FOR UPDATE", (number,))
        yield connection


class TestContract(BackendContract):
    @pytest.fixture
    def connect(self, postgres_url: str) -> Connect:
        return partial(connect, postgres_url)

    @pytest.fixture
    def connect_tenant(self, postgres_url: str) -> Callable[[str], Backend]:
        return lambda tenant: connect(postgres_url, tenant=tenant)


# --- what it holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, BODY - 1, BODY, BODY + 1, BODY + LONGEST_HEAD, BODY + LONGEST_HEAD + 1, 9000, 3_000_000])
def test_records_of_any_size_come_back(backend: Backend, size: int) -> None:
    number = make(backend)
    written = [node(1, size), node(2, 10), node(3, size)]
    assert backend.sessions.commit([Change(number, 0, 1, written[:1])]) == [True]  # by the statement for one
    assert backend.sessions.commit([Change(number, 1, 2, written[1:])]) == [True]  # and by that for many
    assert list(backend.nodes.read(number, [3, 1, 4, 2, 1])) == [
        written[2].record,
        written[0].record,
        None,
        written[1].record,
        written[0].record,
    ]
    assert list(backend.nodes.read(number, [1, 2, 3])) == [each.record for each in written]
    assert list(backend.nodes.read(number, [])) == []
    (other,) = backend.sessions.draw(1)
    assert backend.sessions.create(NewSession(other, "made with nodes", None, b"record", written)) == "made"
    assert list(backend.nodes.read(other, [1, 2, 3])) == [each.record for each in written]


@pytest.mark.parametrize("more", [-1, 0, 1, LONGEST_HEAD, LONGEST_HEAD + 1, BODY, 9000])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_what_a_row_says_of_a_record_is_put_before_it_again(
    backend: Backend, sql: psycopg.Connection[Any], more: int, key: int
) -> None:
    """Records as the codec has them: what such a record begins with, and ``more`` bytes. One less, or that of another: no such."""
    number = make(backend)
    written = []
    for ordinal, at in ((1, 1), (2, 2), (3, 2)):
        row = node(ordinal, key=key).row
        record = codec.beginning_of_node(number, at, row.parent, row.id, key) + bytes(max(more, 0))
        written.append(NewNode(row, record[: len(record) + min(more, 0)]))
    assert backend.sessions.commit([Change(number, 0, 1, written[:1])]) == [True]
    assert backend.sessions.commit([Change(number, 1, 2, written[1:])]) == [True]
    records = [each.record for each in written]
    assert list(backend.nodes.read(number, [1, 2, 3])) == list(backend.nodes.read(number, [1, 2, 3, 5]))[:3] == records
    whole = sql.execute("SELECT array_agg(ordinal) FROM sessiontree.bodies WHERE session = %s", (number,)).fetchone()
    assert whole == ([3] if 0 <= more <= LONGEST_HEAD else [1, 2, 3],)


def test_the_digest_of_a_name_does_not_stand_beside_it(backend: Backend, sql: psycopg.Connection[Any]) -> None:
    """Nor of a head's; in each way of writing. Where it is another's, or of another kind, it is a record's own."""
    source = make(backend, nodes=1)
    (number,) = backend.sessions.draw(1)
    new = fork_of(source, number, tip=1)
    refs = {}
    for name in ("main", "other", "third"):
        record = codec.encode(codec.HeadRecord(number, name, 1, 1))
        refs[b"h" + codec.id_in(record)] = record
    refs[b"h" + bytes(32)] = record
    pin = codec.encode(codec.PinRecord(number, 1, codec.id_in(record), True))
    refs[b"p" + codec.id_in(pin)] = pin
    one, two, *more = refs.items()
    assert backend.sessions.create(new._replace(refs=dict([one]))) == "made"
    assert backend.sessions.commit([Change(number, 0, 1, (), dict([two]))]) == [True]
    assert backend.sessions.commit([Change(number, 1, 2, (), dict(more))]) == [True]
    found = look(backend, number)
    assert (found.record, found.refs) == (new.record, refs)
    assert backend.sessions.read_refs(number, [*refs, b"h"]) == [*refs.values(), None]
    rows = "SELECT name, record FROM sessiontree.{} WHERE {} = %s"
    ((_, kept),) = sql.execute(rows.format("sessions", "number"), (number,)).fetchall()
    assert len(kept) == len(new.record) - 32
    saved = [len(refs[name]) - len(kept) for name, kept in sql.execute(rows.format("refs", "session"), (number,)).fetchall()]
    assert sorted(saved) == [0, 0, 32, 32, 32]


def test_numbers_are_unsigned_where_a_record_begins(sql: psycopg.Connection[Any], backend: Backend) -> None:
    number, identity = 2**32 - 2, hashlib.sha256().digest()
    told = sql.execute("SELECT sessiontree.beginning(%s, %s, %s, %s, %s)", (number, 2**31 - 1, 0, identity, -1)).fetchone()
    assert told == (codec.beginning_of_node(number, 2**31 - 1, 0, identity, 2**64 - 1),)


def test_many_records_are_taken_as_they_come(backend: Backend, postgres_url: str, open_at: Callable[..., Backend]) -> None:
    """Whatever is asked meanwhile; what is left alone in the middle takes no connection with it."""
    number = make(backend)
    written = [node(at, 100 + at) for at in range(1, 1001)]
    assert backend.sessions.commit([Change(number, 0, 1, written)]) == [True]
    everything = [each.record for each in written]
    with Proxy(postgres_url) as proxy:
        cold = open_at(proxy.url)
        for wanted in (range(1, 1001), [*range(1, 500), *range(501, 1001)]):
            for _ in range(3):  # at first it is not prepared
                before = proxy.round_trips
                assert list(cold.nodes.read(number, wanted)) == [everything[at - 1] for at in wanted]
                assert proxy.round_trips - before <= 2
    for _ in range(10):  # more often than there are connections
        some = iter(backend.nodes.read(number, range(1, 1001)))
        assert [next(some), next(some)] == everything[:2]
        assert list(backend.nodes.read(number, [7, 1500])) == [everything[6], None]
        del some
    others = [iter(backend.nodes.read(number, range(1, 1001))) for _ in range(3)]
    assert [next(other) for other in others] == everything[:1] * 3
    assert [list(other) for other in others] == [everything[1:]] * 3


@pytest.mark.parametrize("after", [0, 1000, 50_000, 300_000, 500_000])
def test_many_records_of_a_connection_that_is_lost(
    backend: Backend, proxy: Proxy, open_at: Callable[..., Backend], after: int
) -> None:
    """Each comes once, from this connection or the next."""
    number = make(backend)
    written = [node(at, 600) for at in range(1, 1001)]
    assert backend.sessions.commit([Change(number, 0, 1, written)]) == [True]
    cutting = open_at(proxy.url)
    assert look(cutting, number).version == 1
    for wanted in (range(1, 1001), range(1, 1001, 2)):
        cuts = proxy.cuts
        proxy.cut("server", after // 2 if wanted.step == 2 else after)
        assert list(cutting.nodes.read(number, wanted)) == [written[at - 1].record for at in wanted]
        assert proxy.cuts == cuts + 1


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_keys_are_unsigned(backend: Backend, key: int) -> None:
    number = make(backend)
    one, two, three = node(1, key=key), node(2, key=key), node(3, key=key)
    assert backend.sessions.commit([Change(number, 0, 1, [one])]) == [True]
    assert backend.sessions.commit([Change(number, 1, 2, [two, three])]) == [True]
    assert look(backend, number).nodes == [one.row, two.row, three.row]


def test_a_batch_takes_effect_by_session(backend: Backend) -> None:
    first, second, third = (make(backend, name) for name in "abc")
    changes = [
        Change(third, 0, 7, [node(1), node(2)], {b"h": b"3", b"i": b"4"}),
        Change(first, 5, 6, [node(1)], {b"h": b"1"}),  # it is at 0
        Change(second, 0, 1, [node(1)], {b"h": b"2"}, drops=True, gone=True),
        Change(9999, 0, 1, [node(1)], {b"h": b"2"}),  # there is none
    ]
    assert backend.sessions.commit(changes) == [True, False, True, False]
    assert look(backend, third) == Look(b"record", 7, 0, 0, False, True, [node(1).row, node(2).row], {b"h": b"3", b"i": b"4"})
    assert look(backend, first) == Look(b"record", 0, 0, 0, False, True, [], {})
    assert look(backend, second) == Look(b"record", 1, 1, 0, True, True, [node(1).row], {b"h": b"2"})
    assert list(backend.nodes.read(first, [1])) == list(backend.nodes.read(9999, [1])) == [None]
    assert backend.sessions.find("b") is None


def test_reading_does_not_rest_on_statistics(backend: Backend, sql: psycopg.Connection[Any]) -> None:
    """Tables that were never analyzed: nothing is read that was not asked for."""
    numbers = [make(backend, str(at)) for at in range(4)]
    for number in numbers:
        assert backend.sessions.commit([Change(number, 0, 1, [node(at, 4132) for at in range(1, 301)])]) == [True]
    wanted = list(range(1, 301))
    for ordinals in (wanted, wanted[::2]):
        list(backend.nodes.read(numbers[1], ordinals))
        sql.execute("SELECT pg_stat_force_next_flush()")
        before = _tuples_read(sql, backend)
        list(backend.nodes.read(numbers[1], ordinals))
        assert _tuples_read(sql, backend) - before <= 2 * len(ordinals) + 10


def _tuples_read(sql: psycopg.Connection[Any], backend: Backend) -> int:
    """By all sessions so far; the reader tells of them when it is asked to."""
    sessions_of(backend)._server.rows("flush", "SELECT pg_stat_force_next_flush()")
    sessions_of(backend)._server.rows("flush", "SELECT 1")
    sql.execute("SELECT pg_stat_clear_snapshot()")
    row = sql.execute("SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables").fetchone()
    assert row is not None
    return int(row[0])


def test_bytes_on_disk(backend: Backend, sql: psycopg.Connection[Any]) -> None:
    """Turns of 1,000 tokens, as records of 4,132 bytes: at most 1.2 times their tokens. A fork: at most 500 bytes beside tokens."""

    def size() -> int:
        tables = "SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'sessiontree'::regnamespace"
        row = sql.execute(f"SELECT sum(pg_total_relation_size(oid)) FROM ({tables}) t").fetchone()
        assert row is not None
        return int(row[0])

    for table in TABLES:  # whoever analyzes one keeps rows that are no longer seen from being cleared away
        sql.execute(f"ALTER TABLE sessiontree.{table} SET (autovacuum_enabled = off)")
    taken = []  # of several, the least: a transaction of another database keeps old versions of rows too, as long as it runs
    for name in "abc":
        number, empty = make(backend, name), size()
        for version in range(500):
            assert backend.sessions.commit(
                [Change(number, version, version + 1, [node(version + 1, 4132)], {b"hmain": bytes(90)})]
            ) == [True]
        taken.append(size() - empty)
    assert min(taken) < 1.2 * 4000 * 500
    taken = []
    for fork in range(3100):
        if fork % 1000 == 100:  # the tables have their maps of free space by then
            taken.append(size())
        (drawn,) = backend.sessions.draw(1)
        assert backend.sessions.create(fork_of(number, drawn)) == "made"
        row = node(501).row  # a turn of 16 tokens
        turn = NewNode(row, codec.beginning_of_node(drawn, 501, 500, row.id, 0) + bytes(104))
        assert backend.sessions.commit([Change(drawn, 0, 1, [turn])]) == [True]
    taken.append(size())
    assert min(after - before for before, after in pairwise(taken)) < (500 + 64) * 1000


# --- done once, whatever is cut --------------------------------------------------------------------------------------------

FORK: Final = 1000  # what the number of a fork of a session is more than its own
#: Each on a session of two nodes and a ref, at version 1, with an empty one beside it, whose number is one less.
WRITES: Final[dict[str, Callable[[Backend, int], object]]] = {
    "one change": lambda to, number: to.sessions.commit([Change(number, 1, 2, [node(3, 4132)], {b"h": b"new"})]),
    "a head": lambda to, number: to.sessions.commit([Change(number, 1, 2, (), {b"h": b"new"})]),
    "changes": lambda to, number: to.sessions.commit(
        [Change(number, 1, 2, [node(3, 4132), node(4)], {b"h": b"new", b"i": b"i"}), Change(number - 1, 0, 5, [node(1)])]
    ),
    "a stale change": lambda to, number: to.sessions.commit([Change(number, 0, 2, [node(3)], {b"h": b"new"})]),
    "a session": lambda to, number: to.sessions.create(
        NewSession(number + FORK, f"fork {number}", None, b"", [node(1)], (number, 2), 0)
    ),
    "a name that is taken": lambda to, number: to.sessions.create(NewSession(number + FORK, f"{number}", None, b"")),
    "a removal": lambda to, number: to.sessions.remove(Removal(number, 1, [1], [b"h"], 0)),
    "a name": lambda to, number: to.sessions.name(b"%d" % number, b"new", b"old"),
}


def written_to(backend: Backend) -> int:
    """A session for WRITES."""
    beside, number = backend.sessions.draw(2)
    for each in (beside, number):
        assert backend.sessions.create(NewSession(each, str(each), None, b"record")) == "made"
    assert backend.sessions.commit([Change(number, 0, 1, [node(1), node(2)], {b"h": b"old"})]) == [True]
    assert backend.sessions.name(b"%d" % number, b"old", None)
    return number


def state_of(backend: Backend, number: int) -> object:
    """What there is of it, and of what WRITES make beside it."""
    sessions = backend.sessions
    looks = [sessions.look(each) for each in (number - 1, number, number + FORK)]
    records = [list(backend.nodes.read(each, [1, 2, 3, 4])) for each in (number - 1, number, number + FORK)]
    tips = [ordinal for fork, session, ordinal in sessions.tips() if session == number]
    return looks, records, tips, sessions.find(f"fork {number}") is None, sessions.named(b"%d" % number)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_done_once_wherever_its_connection_is_cut(
    write: str, backend: Backend, proxy: Proxy, open_at: Callable[..., Backend]
) -> None:
    """Before the statement and in the middle of it, before the answer and in the middle of that."""
    number = written_to(backend)
    right, state = WRITES[write](backend, number), state_of(backend, number)
    cutting = open_at(proxy.url)
    cuts: list[tuple[Side, int]] = [*(("client", after) for after in (0, 1, 60)), *(("server", after) for after in (0, 1, 40))]
    for count, (side, after) in enumerate(cuts, 1):
        number = written_to(backend)
        WRITES[write](cutting, written_to(backend))  # so that the next thing it sends is the statement
        proxy.cut(side, after)
        assert WRITES[write](cutting, number) == right, (side, after)
        assert proxy.cuts == count
        assert state_of(backend, number) == state, (side, after)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("overtaken", [False, True])
def test_a_statement_left_behind_on_the_server_and_the_one_sent_again(
    many: bool,
    overtaken: bool,
    backend: Backend,
    postgres_url: str,
    proxy: Proxy,
    open_at: Callable[..., Backend],
    sql: psycopg.Connection[Any],
    pool: ThreadPoolExecutor,
) -> None:
    """Both wait for a row's lock, and whoever holds that changes the session or not: one of the two takes effect, or none."""
    number = written_to(backend)
    write = WRITES["changes" if many else "one change"]
    cutting = open_at(proxy.url)
    write(cutting, written_to(backend))
    with holding(postgres_url, number) as holder:
        running = pool.submit(write, cutting, number)
        blocked(sql)
        proxy.cut_now()
        blocked(sql, 2)
        if overtaken:
            holder.execute("UPDATE sessiontree.sessions SET version = 77 WHERE number = %s", (number,))
        holder.commit()
        moved = not overtaken
        assert running.result() == ([moved, True] if many else [moved])
    seen = look(backend, number)
    assert seen.version == (77 if overtaken else 2)
    assert [row.ordinal for row in seen.nodes] == [1, 2, *((3, 4) if many else (3,))][: 2 if overtaken else None]
    assert wait_for(sql, "SELECT count(*) FROM sessiontree.writers WHERE outcome IS NULL AND batch > 0") == (0,)


def test_what_was_called_off_never_happens(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    """A statement that waits on the server while its writer, who has lost it, takes its number: it wakes up and fails."""
    number = written_to(backend)
    writer = committing(backend)
    assert backend.sessions.commit([Change(number, 1, 2)]) == [True]
    assert writer._name is not None
    for statement, values in (
        (CHANGE, one_change(Change(number, 2, 3, [node(3)], {b"h": b"new"}))),
        (CHANGES, many_changes([Change(number, 2, 3, [node(3), node(4)], {b"h": b"new"}), Change(number - 1, 0, 1)])),
    ):
        assert values is not None
        with ExitStack() as stack:
            left = stack.enter_context(sessions_of(backend)._server.connect())
            holder = stack.enter_context(holding(postgres_url, number))
            running = pool.submit(left.ask, statement, (writer._name.bytes, int8(writer._batch + 1), *values))
            blocked(sql)
            assert writer._called_off(writer._ready()) is None
            writer._batch += 1
            holder.rollback()
            with pytest.raises(psycopg.Error, match="is not at batch"):
                running.result()
        assert look(backend, number) == Look(b"record", 2, 0, 0, False, True, [node(1).row, node(2).row], {b"h": b"old"})
        assert list(backend.nodes.read(number, [3, 4])) == [None, None]
        assert look(backend, number - 1).version == 0


def test_of_two_of_one_batch_the_second_is_refused(backend: Backend) -> None:
    """The second begins when the first is done, with changes that would still fit."""
    number = written_to(backend)
    writer = committing(backend)
    assert backend.sessions.commit([Change(number, 1, 2)]) == [True]
    assert writer._name is not None
    for values in (one_change(Change(number, 2, 3, [node(3)], {b"h": b"new"})), many_changes([Change(number, 2, 3, [node(3)])])):
        assert values is not None
        with pytest.raises(psycopg.Error, match="is not at batch"):
            writer._ready().ask(CHANGE if len(values) == 12 else CHANGES, (writer._name.bytes, int8(writer._batch), *values))
    assert look(backend, number).version == 2 and list(backend.nodes.read(number, [3])) == [None]


def test_connections_that_an_administrator_ends(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    number = written_to(backend)
    for version in (1, 2, 3):
        with holding(postgres_url, number) as holder:
            running = pool.submit(backend.sessions.commit, [Change(number, version, version + 1, [node(version + 2)])])
            (left,) = blocked(sql)
            sql.execute("SELECT pg_terminate_backend(%s)", (left,))
            blocked(sql, beside=left)
            holder.rollback()
            assert running.result() == [True]
    sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    assert backend.sessions.commit([Change(number, 4, 5)]) == [True]
    assert [row.ordinal for row in look(backend, number).nodes] == [1, 2, 3, 4, 5]


def test_a_server_that_crashes_and_starts_again(own_postgres: Server, pool: ThreadPoolExecutor) -> None:
    """While one writes and one reads: what was acknowledged is there, and nothing is there twice."""
    backend = connect(own_postgres.url(), blobs=None)
    try:
        number = make(backend)
        written = threading.Semaphore(0)
        over = threading.Event()

        def write() -> int:
            version = 0
            while not over.is_set():
                change = Change(number, version, version + 1, [node(version + 1)], {b"h": b"%d" % (version + 1)})
                assert backend.sessions.commit([change]) == [True]
                version += 1
                written.release()
            return version

        def read() -> None:
            while not over.is_set():
                seen = look(backend, number)
                assert seen.refs.get(b"h", b"0") == b"%d" % seen.version == b"%d" % len(seen.nodes)

        running: list[Future[Any]] = [pool.submit(write), pool.submit(read)]
        for mode in ("immediate", "fast", "immediate"):
            for _ in range(20):
                written.acquire()
            own_postgres.restart(mode)
        for _ in range(20):
            written.acquire()
        over.set()
        version = running[0].result()
        running[1].result()
        seen = look(backend, number)
        assert seen.version == version and [row.ordinal for row in seen.nodes] == list(range(1, version + 1))
        assert list(backend.nodes.read(number, range(1, version + 1))) == [node(at).record for at in range(1, version + 1)]
    finally:
        backend.close()


def test_a_server_process_that_hangs(open_at: Callable[..., Backend], postgres_url: str, sql: psycopg.Connection[Any]) -> None:
    """It is given up for another; when it goes on, what it was asked to do is refused."""
    backend = open_at(postgres_url, seconds=SHORT)
    number = written_to(backend)
    assert backend.sessions.commit([Change(number, 1, 2)]) == [True]
    line = committing(backend)._line
    assert line is not None
    hanging = line.info.backend_pid
    line.patience = 0.1
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert backend.sessions.commit([Change(number, 2, 3, [node(3)])]) == [True]
    finally:
        os.kill(hanging, signal.SIGCONT)
    wait_for(sql, "SELECT 1 WHERE NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)", hanging)
    assert look(backend, number) == Look(b"record", 3, 0, 0, False, True, [node(at).row for at in (1, 2, 3)], {b"h": b"old"})


def test_two_batches_that_wait_for_each_other(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    """Somebody locks the same sessions in the other order: the server ends one of the two, and it is sent again."""
    number = written_to(backend)
    with holding(postgres_url, number) as holder:
        holder.execute("SET deadlock_timeout = '1h'")  # so that it is the other who finds out
        running = pool.submit(WRITES["changes"], backend, number)
        blocked(sql)
        other = pool.submit(holder.execute, "SELECT FROM sessiontree.sessions WHERE number = %s FOR UPDATE", (number - 1,))
        other.result()
        holder.rollback()
        assert running.result() == [True, True]
    assert wait_for(sql, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database() AND deadlocks > 0") == (1,)


def test_batches_lock_their_sessions_in_order_of_number(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    """Not in the order that they are given in, nor in that of the table: so no two batches wait for each other."""
    low, high = backend.sessions.draw(2)
    for number in (high, low):
        assert backend.sessions.create(NewSession(number, str(number), None, b"")) == "made"
    with holding(postgres_url, low) as holder:
        running = pool.submit(backend.sessions.commit, [Change(high, 0, 1), Change(low, 0, 1)])
        blocked(sql)
        with sql.transaction():
            sql.execute("SELECT FROM sessiontree.sessions WHERE number = %s FOR UPDATE NOWAIT", (high,))
        holder.rollback()
        assert running.result() == [True, True]


def test_of_long_refs_a_look_reads_the_beginnings_alone(backend: Backend, sql: psycopg.Connection[Any]) -> None:
    """Megabytes in pieces, of which the first is read: a few pages each, not hundreds."""
    number = make(backend)
    refs = {LONG + b"%d" % at: node(at, 2**21).record for at in range(5)}
    assert backend.sessions.commit([Change(number, 0, 1, (), refs)]) == [True]
    assert look(backend, number).refs == {name: record[:BEGINNING] for name, record in refs.items()}
    pages = []
    for what in (_SHOWN, "r.record::text"):
        row = sql.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT {what} FROM sessiontree.refs r").fetchone()
        assert row is not None
        plan = row[0][0]["Plan"]
        pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    assert pages[0] < 100 and pages[1] > 1000


def test_a_fork_waits_for_a_drop_and_gc_for_a_fork(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    """Each in a transaction that is not over yet when the other comes."""
    number = written_to(backend)
    new = NewSession(number + FORK, "fork", None, b"", (), (number, 2), 0)
    with psycopg.connect(postgres_url) as dropping:
        dropping.execute("UPDATE sessiontree.sessions SET drops = 1, version = 2 WHERE number = %s", (number,))
        running: Future[object] = pool.submit(backend.sessions.create, new)
        blocked(sql)
        dropping.commit()
        assert running.result() == "dropped"
    writer = sessions_of(backend)._other
    assert writer._name is not None
    with sessions_of(backend)._server.connect() as forking:
        forking.execute("BEGIN")
        session = int8(new.number), b"fork", None, b"", int8(number), int4(2), int4(1)
        assert forking.ask(CREATE, (another_writer(forking), int8(1), *session, *columns(()), byteas(()), byteas(()))) == "made"
        running = pool.submit(backend.sessions.remove, Removal(number, 2, [2], [], 0))
        blocked(sql)
        forking.execute("COMMIT")
        assert running.result() is False
    assert list(backend.nodes.read(number, [2])) == [node(2).record]


def another_writer(line: Line) -> bytes:
    """Another writer."""
    row = line.execute("INSERT INTO sessiontree.writers (writer) VALUES (gen_random_uuid()) RETURNING writer").fetchone()
    assert row is not None
    name: bytes = row[0].bytes
    return name


def test_of_one_name_that_two_tenants_are_given_at_once_one_is_made(
    backend: Backend, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    """By stores that see all tenants: the second waits for what comes of the first."""
    first, second = backend.sessions.draw(2)
    with sessions_of(backend)._server.connect() as making:
        making.execute("BEGIN")
        session = int8(first), b"one", scope_of("a").bytes, b"", None, None, int4(0)
        assert making.ask(CREATE, (another_writer(making), int8(1), *session, *columns(()), byteas(()), byteas(()))) == "made"
        running = pool.submit(backend.sessions.create, NewSession(second, "one", "b", b""))
        blocked(sql)
        making.execute("COMMIT")
        assert running.result() == "taken"


# --- errors, and how long they are tried -----------------------------------------------------------------------------------


def fails(sql: psycopg.Connection[Any], code: str, times: int) -> None:
    """Have inserts of nodes fail so often."""
    sql.execute("DROP SEQUENCE IF EXISTS failures; CREATE SEQUENCE failures")
    sql.execute(
        f"""
        CREATE OR REPLACE FUNCTION failing() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('public.failures') <= {times} THEN RAISE EXCEPTION 'as told' USING ERRCODE = '{code}'; END IF;
            RETURN NEW;
        END $$
        """
    )
    sql.execute("CREATE OR REPLACE TRIGGER failing BEFORE INSERT ON sessiontree.nodes FOR EACH ROW EXECUTE FUNCTION failing()")


@pytest.mark.parametrize("code", ["40001", "40P01", "57014", "55P03", "57P01", "08006"])
def test_errors_that_pass_are_waited_for(code: str, backend: Backend, sql: psycopg.Connection[Any]) -> None:
    number = make(backend)
    fails(sql, code, 3)
    assert backend.sessions.commit([Change(number, 0, 1, [node(1)])]) == [True]
    assert wait_for(sql, "SELECT last_value FROM failures") == (4,)
    assert look(backend, number).nodes == [node(1).row]


@pytest.mark.parametrize("code", ["53100", "42501", "23505", "XX000"])
def test_other_errors_are_told_at_once(code: str, backend: Backend, sql: psycopg.Connection[Any]) -> None:
    number = make(backend)
    fails(sql, code, 1)
    with pytest.raises(StoreFailed, match=r"write to session \d+: as told.*nothing of it was done$"):
        backend.sessions.commit([Change(number, 0, 1, [node(1)])])
    assert wait_for(sql, "SELECT last_value FROM failures") == (1,)
    assert list(backend.nodes.read(number, [1])) == [None]
    assert backend.sessions.commit([Change(number, 0, 1, [node(1)])]) == [True]


def test_a_lock_that_is_held_too_long(open_at: Callable[..., Backend], postgres_url: str) -> None:
    backend = open_at(postgres_url, seconds=SHORT)
    number = written_to(backend)
    for write in ("one change", "changes", "a removal"):
        with holding(postgres_url, number), pytest.raises(StoreFailed, match=r"timeout; nothing of it was done$"):
            WRITES[write](backend, number)
        assert look(backend, number).version == 1
    assert backend.sessions.commit([Change(number, 1, 2)]) == [True]


def test_a_lock_that_is_held_longer_than_one_statement_waits(
    open_at: Callable[..., Backend], postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    backend = open_at(postgres_url, seconds=3 * SHORT)
    number = written_to(backend)
    with holding(postgres_url, number) as holder:
        running = pool.submit(backend.sessions.commit, [Change(number, 1, 2, [node(3)])])
        (pid,) = blocked(sql)
        (first,) = wait_for(sql, "SELECT query_start FROM pg_stat_activity WHERE pid = %s", pid)
        wait_for(sql, "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND query_start > %s AND wait_event_type = 'Lock'", pid, first)
        holder.rollback()
        assert running.result() == [True]


def test_a_server_that_cannot_be_reached(backend: Backend, proxy: Proxy, open_at: Callable[..., Backend]) -> None:
    """After a statement was sent nobody knows; before, nothing was done."""
    cutting = open_at(proxy.url, seconds=SHORT)
    number = written_to(backend)
    assert cutting.sessions.commit([Change(number, 1, 2)]) == [True]
    proxy.cut("server", 0)
    proxy.refusing = True
    with pytest.raises(StoreFailed, match=r"whether it was done is not known$"):
        cutting.sessions.commit([Change(number, 2, 3)])
    with pytest.raises(StoreFailed, match=r"nothing of it was done$"):
        cutting.sessions.commit([Change(number, 3, 4)])
    proxy.cut_now()
    for read in (lambda: cutting.sessions.look(number), lambda: list(cutting.nodes.read(number, [1]))):
        with pytest.raises(StoreFailed, match="could not"):
            read()
    with pytest.raises(StoreFailed, match="could not be opened"):
        connect(proxy.url, seconds=SHORT)
    proxy.refusing = False
    assert look(cutting, number).version == 3
    assert cutting.sessions.commit([Change(number, 3, 4)]) == [True]


def test_a_lost_batch_is_called_off_when_time_is_up(
    backend: Backend,
    postgres_url: str,
    proxy: Proxy,
    open_at: Callable[..., Backend],
    sql: psycopg.Connection[Any],
    pool: ThreadPoolExecutor,
) -> None:
    cutting = open_at(proxy.url, seconds=SHORT)
    number = written_to(backend)
    assert cutting.sessions.commit([Change(number, 1, 2)]) == [True]
    with holding(postgres_url, number):
        running = pool.submit(cutting.sessions.commit, [Change(number, 2, 3)])
        blocked(sql)
        proxy.cut_now()
        with pytest.raises(StoreFailed, match=r"nothing of it was done, nor will be$"):
            running.result()
    assert wait_for(sql, "SELECT count(*) FROM sessiontree.writers WHERE outcome IS NULL AND batch > 0") == (1,)
    assert look(cutting, number).version == 2
    assert cutting.sessions.commit([Change(number, 2, 3)]) == [True]


def test_a_client_that_was_paused_for_very_long(
    backend: Backend, proxy: Proxy, open_at: Callable[..., Backend], sql: psycopg.Connection[Any]
) -> None:
    """Its connections are gone, and so is what the server knew of it. Others have written meanwhile."""
    day = 86_400
    number = written_to(backend)
    late = open_at(proxy.url)
    assert late.sessions.commit([Change(number, 1, 2)]) == [True]
    proxy.cut_now()
    sql.execute("DELETE FROM sessiontree.writers")
    committing(late)._used -= day
    assert backend.sessions.commit([Change(number, 2, 3, [node(3)])]) == [True]
    assert late.sessions.commit([Change(number, 2, 3, [node(3)])]) == [False]
    assert late.sessions.commit([Change(number, 3, 4, [node(4)])]) == [True]

    sql.execute("DELETE FROM sessiontree.writers")  # its connection is there
    assert late.sessions.commit([Change(number, 4, 5)]) == [True]

    proxy.cut("server", 0)  # and paused in the middle of a write
    writer = committing(late)
    came = writer._came

    def forgotten(line: Line) -> str | None:
        sql.execute("DELETE FROM sessiontree.writers")
        return came(line)

    writer._came = forgotten  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="has forgotten this writer; whether its last batch was done is not known"):
        late.sessions.commit([Change(number, 5, 6)])
    del writer._came
    assert late.sessions.commit([Change(number, 6, 7)]) == [True]


def test_writers_are_forgotten_when_they_are_closed_or_long_silent(
    backend: Backend, postgres_url: str, open_at: Callable[..., Backend], sql: psycopg.Connection[Any]
) -> None:
    number = written_to(backend)  # by two writers, of which one makes sessions
    sql.execute("INSERT INTO sessiontree.writers VALUES (gen_random_uuid(), 5, now() - interval '31 days', '')")
    sql.execute("INSERT INTO sessiontree.writers VALUES (gen_random_uuid(), 5, now() - interval '29 days', '')")
    other = open_at(postgres_url)
    assert other.sessions.commit([Change(number, 1, 2)]) == [True]
    assert wait_for(sql, "SELECT count(*) FROM sessiontree.writers") == (4,)
    other.close()
    assert wait_for(sql, "SELECT count(*) FROM sessiontree.writers") == (3,)


# --- opening ---------------------------------------------------------------------------------------------------------------

MANY_AT_ONCE = """
import os, sys
import sessiontree.backends.postgres as postgres
begin, go = os.pipe()
children = []
for _ in range(16):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(begin, 1)
        backend = postgres.connect(sys.argv[1], blobs=None)
        drawn = backend.sessions.draw(10)
        backend.close()
        os._exit(0 if len(drawn) == 10 else 1)
    children.append(child)
os.close(go)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_many_processes_that_connect_first(postgres_url: str, sql: psycopg.Connection[Any]) -> None:
    subprocess.run([sys.executable, "-c", MANY_AT_ONCE, postgres_url], cwd=ROOT, check=True)
    assert wait_for(sql, "SELECT version FROM sessiontree.format") == (1,)
    assert wait_for(sql, "SELECT last_value FROM sessiontree.numbers") == (160,)


def test_tables_of_another_version(backend: Backend, postgres_url: str, sql: psycopg.Connection[Any]) -> None:
    sql.execute("UPDATE sessiontree.format SET version = 2")
    with pytest.raises(IncompatibleStore, match="holds tables of version 2; this library knows version 1"):
        connect(postgres_url)
    sql.execute("DROP SCHEMA sessiontree CASCADE")
    with pytest.raises(IncompatibleStore, match="has not the tables of version 1"):
        backend.sessions.look(1)
    with pytest.raises(IncompatibleStore, match="has not the tables of version 1"):
        backend.sessions.commit([Change(1, 0, 1)])
    with pytest.raises(IncompatibleStore, match="holds no store"):
        connect(postgres_url, read_only=True)
    assert sql.execute("SELECT FROM pg_namespace WHERE nspname = 'sessiontree'").fetchone() is None


def test_the_log_is_told_once_of_a_server_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreFailed):
        connect("postgresql://me:hunter2@127.0.0.1:1/chats", seconds=0.5)
    (told,) = [each for each in caplog.records if each.name == "sessiontree.backends.postgres"]
    assert told.levelname == "WARNING" and "postgresql://me@127.0.0.1:1/chats does not answer" in told.getMessage()
    assert "hunter2" not in told.getMessage()


def test_a_role_that_makes_no_schemas_makes_the_tables_in_one_that_was_made_for_it(
    postgres_url: str, sql: psycopg.Connection[Any]
) -> None:
    given, role = conninfo_to_dict(postgres_url), f"owner_{uuid.uuid4().hex[:8]}"
    sql.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'word'")
    try:
        sql.execute(f"CREATE SCHEMA sessiontree AUTHORIZATION {role}")
        backend = connect(f"postgresql://{role}:word@{given['host']}:{given['port']}/{given['dbname']}")
        try:
            assert backend.sessions.draw(2) == [1, 2]
        finally:
            backend.close()
    finally:
        sql.execute(f"DROP OWNED BY {role}")
        sql.execute(f"DROP ROLE {role}")


def test_a_password_is_never_shown(postgres_url: str, backend: Backend, open_at: Callable[..., Backend]) -> None:
    secret = conninfo_to_dict(postgres_url)["password"]
    assert isinstance(secret, str)
    wrong = postgres_url.replace(secret, f"wrong-{secret}")
    shown = [backend.where, repr(backend), repr(sessions_of(backend)._server)]
    for url in (wrong, f"postgresql://x:{secret}@127.0.0.1:port/%zz", secret, f"postgresql://a:{secret}@127.0.0.1/db?{secret}=1"):
        with pytest.raises(SessionTreeError) as caught:  # at once: it would be no use to try again
            connect(url, seconds=3600)
        shown += traceback.format_exception(caught.value)
    number = make(backend)
    with pytest.raises(StoreFailed) as caught:
        backend.sessions.create(NewSession(number, "another", None, b""))
    shown += traceback.format_exception(caught.value)
    assert not [each for each in shown if secret in each]
    assert backend.where.startswith("postgresql://postgres@127.0.0.1:")


def test_answers_mean_that_it_is_on_disk(postgres_url: str, sql: psycopg.Connection[Any], open_at: Callable[..., Backend]) -> None:
    for setting, expected in (("off", "on"), ("on", "on"), ("local", "local")):
        sql.execute(f"ALTER ROLE postgres IN DATABASE {sql.info.dbname} SET synchronous_commit = {setting}")
        backend = open_at(postgres_url)
        assert sessions_of(backend)._server.rows("ask", "SHOW synchronous_commit") == [(expected,)]


def test_a_forked_child_has_connections_of_its_own(backend: Backend) -> None:
    number = written_to(backend)
    assert backend.sessions.commit([Change(number, 1, 2)]) == [True]
    look(backend, number)
    mine = sessions_of(backend)._server.rows("ask", "SELECT pg_backend_pid()")
    child = os.fork()
    if child == 0:
        right = False
        with suppress(BaseException):
            right = backend.sessions.commit([Change(number, 2, 3, [node(3)])]) == [True] and look(backend, number).version == 3
            right = right and sessions_of(backend)._server.rows("ask", "SELECT pg_backend_pid()") != mine
            backend.close()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sessions_of(backend)._server.rows("ask", "SELECT pg_backend_pid()") == mine
    assert backend.sessions.commit([Change(number, 3, 4, [node(4)])]) == [True]
    assert list(backend.nodes.read(number, [3, 4])) == [node(3).record, node(4).record]


def test_reads_do_not_wait_for_a_write(
    backend: Backend, postgres_url: str, sql: psycopg.Connection[Any], pool: ThreadPoolExecutor
) -> None:
    number = written_to(backend)
    with holding(postgres_url, number) as holder:
        running = [pool.submit(WRITES[write], backend, number) for write in ("one change", "a removal")]
        blocked(sql, 2)
        in_threads(8, lambda _: [look(backend, number) for _ in range(20)].clear())
        assert not any(each.done() for each in running)
        holder.rollback()
        assert sum(map(bool, (each.result() for each in running))) >= 1


def test_a_path_is_one_round_trip_on_a_new_connection(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as store:
        session = store.create("s", scheme="text@hf5")
        node = session.root
        for turn in range(20):
            node = session.append(node, [turn], head="main")
    with Proxy(postgres_url) as proxy, SessionStore.connect(proxy.url) as store:
        session = store.get("s")
        before = proxy.round_trips
        assert session.head("main").node.input_ids().tolist() == list(range(20))
        assert proxy.round_trips == before + 1


# --- replicas --------------------------------------------------------------------------------------------------------------


def test_nodes_come_from_the_replica_and_what_it_lacks_from_the_primary(
    postgres_server: Server, postgres_url: str, backend: Backend, open_at: Callable[..., Backend]
) -> None:
    with postgres_server.database() as other_url, Proxy(other_url) as proxy:
        copy = open_at(other_url)
        number = make(backend, "s", 3)
        assert make(copy, "s") == number
        assert copy.sessions.commit([Change(number, 0, 1, [node(1, 77)])]) == [True]  # to be told from the primary's
        both = open_at(postgres_url, replica=proxy.url, seconds=3.0)
        assert list(both.nodes.read(number, [2, 1, 9])) == [node(2).record, node(1, 77).record, None]
        assert look(both, number) == look(backend, number)
        proxy.refusing = True
        proxy.cut_now()
        assert list(both.nodes.read(number, [1, 2])) == [node(1).record, node(2).record]
        proxy.refusing = False
        assert list(both.nodes.read(number, [1])) == [node(1).record]  # it rests
        both.nodes._rests_until = 0.0  # type: ignore[attr-defined]
        assert list(both.nodes.read(number, [1])) == [node(1, 77).record]
        both.close()


def test_a_standby_is_read(own_postgres: Server, open_at: Callable[..., Backend]) -> None:
    """One that follows by PostgreSQL's own replication; what is not there yet is read from the primary."""
    backend = open_at(own_postgres.url())
    number = make(backend, "s", 2)
    directory = Path(tempfile.mkdtemp(prefix="sessiontree-standby-"))
    shutil.chown(directory, *account())
    try:
        run(directory, "pg_basebackup", "-R", "-X", "stream", "-c", "fast", "-d", own_postgres.url())
        standby = Server(directory, free_port(), own_postgres.password)
        standby.start()
        reader = open_at(standby.url(), read_only=True)
        assert look(reader, number) == look(backend, number)
        assert reader.sessions.names() == [(number, "s")]
        assert list(reader.nodes.read(number, [1, 2, 3])) == [node(1).record, node(2).record, None]
        with pytest.raises(StoreFailed, match="read-only transaction"):
            reader.sessions.commit([Change(number, 0, 1)])
        both = open_at(own_postgres.url(), replica=standby.url())
        with psycopg.connect(standby.url(), autocommit=True) as sql:
            sql.execute("SELECT pg_wal_replay_pause()")
            wait_for(sql, "SELECT 1 WHERE pg_get_wal_replay_pause_state() = 'paused'")
        assert both.sessions.commit([Change(number, 0, 1, [node(3)])]) == [True]
        assert list(reader.nodes.read(number, [3])) == [None]
        assert list(both.nodes.read(number, [1, 2, 3])) == [node(1).record, node(2).record, node(3).record]
    finally:
        remove(directory)


def test_what_is_only_read_writes_nothing(backend: Backend, postgres_url: str, open_at: Callable[..., Backend]) -> None:
    number = written_to(backend)
    reader = open_at(postgres_url, read_only=True)
    assert look(reader, number) == look(backend, number)
    for write in WRITES.values():
        with pytest.raises(StoreFailed, match="read-only transaction"):
            write(reader, number)


# --- tenants ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def role(sql: psycopg.Connection[Any], backend: Backend, postgres_url: str) -> Iterator[str]:
    """The URL of a role as an application has it: it may write to the tables, and is bound by their policies."""
    name = f"app_{sql.info.dbname}"
    sql.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'app'")
    sql.execute(
        f"""
        GRANT USAGE ON SCHEMA sessiontree TO {name};
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA sessiontree TO {name};
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA sessiontree TO {name}
        """
    )
    given = conninfo_to_dict(postgres_url)
    yield f"postgresql://{name}:app@{given['host']}:{given['port']}/{given['dbname']}"
    sql.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


@pytest.mark.parametrize("bound", [False, True])
def test_tenants_see_their_own_rows(
    bound: bool, role: str, postgres_url: str, backend: Backend, open_at: Callable[..., Backend]
) -> None:
    """By a role that policies bind, and by one that they do not."""
    url = role if bound else postgres_url
    a, b, every = open_at(url, tenant="a"), open_at(url, tenant="b"), open_at(url)
    ours = {tenant: make(to, "same name", 2, tenant=tenant) for tenant, to in (("a", a), ("b", b))}
    nobodys = make(every, "of none", 1)
    for tenant, to in (("a", a), ("b", b)):
        assert to.sessions.commit([Change(ours[tenant], 0, 1, [node(3)], {b"h": tenant.encode()})]) == [True]
        assert to.sessions.name(tenant.encode(), b"record", None)
    others = [ours["b"], nobodys]
    assert a.sessions.names() == [(ours["a"], "same name")]
    assert a.sessions.all() == [(ours["a"], False)]
    assert a.sessions.find("same name") == ours["a"] and a.sessions.find("of none") is None
    assert [a.sessions.look(number) for number in others] == [None, None]
    assert [list(a.nodes.read(number, ordinals)) for number in others for ordinals in ([1, 2], [1, 3])] == [[None, None]] * 4
    assert a.sessions.commit([Change(number, 1, 2) for number in others]) == [False, False]
    assert a.sessions.commit([Change(ours["b"], 1, 2)]) == [False]
    assert not a.sessions.remove(Removal(ours["b"], 1, [1], [], 0))
    assert a.sessions.all_named() == {b"a": b"record"} and a.sessions.named(b"b") is None
    assert not a.sessions.name(b"b", b"", b"record") and not a.sessions.name(b"b", b"", None)
    (number,) = a.sessions.draw(1)
    assert a.sessions.create(NewSession(number, "fork", "a", b"", (), (ours["b"], 1), 0)) == "dropped"
    with pytest.raises(StoreFailed, match="for another tenant"):
        a.sessions.create(NewSession(number, "x", "b", b""))
    assert [look(every, each).version for each in (ours["a"], ours["b"], nobodys)] == [1, 1, 0]
    (number,) = every.sessions.draw(1)
    assert every.sessions.create(NewSession(number, "same name", "c", b"")) == "taken"
    assert every.sessions.create(NewSession(number, "of none", "a", b"")) == "taken"
    with pytest.raises(SessionTreeError, match="tenant="):
        every.sessions.find("same name")


TABLES: Final = ("sessions", "nodes", "bodies", "refs", "names", "blobs", "blob_pieces")


def test_policies_hold_for_statements_that_forget_the_tenant(role: str, backend: Backend, open_at: Callable[..., Backend]) -> None:
    a, b = (open_at(role, tenant=tenant, blobs="database") for tenant in "ab")
    for tenant, to in (("a", a), ("b", b)):
        number = make(to, "s", 1, tenant=tenant)
        assert to.sessions.commit([Change(number, 0, 1, (), {b"h": b""})]) == [True]
        assert to.sessions.name(tenant.encode(), b"", None)
        assert to.blobs is not None and to.blobs.put(f"{shared.scope_of(tenant).hex()}/name", b"bytes")
    with psycopg.connect(role, autocommit=True) as sql:
        for scope, count in (("", 0), (str(scope_of("a")), 1), (str(scope_of("c")), 0), (str(scope_of(None)), 2)):
            sql.execute("SELECT set_config('sessiontree.scope', %s, false)", (scope,))
            assert [sql.execute(f"SELECT count(*) FROM sessiontree.{table}").fetchone() for table in TABLES] == [(count,)] * 7
        sql.execute("SELECT set_config('sessiontree.scope', %s, false)", (str(scope_of("a")),))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sql.execute("UPDATE sessiontree.sessions SET tenant = %s", (scope_of("b"),))
        assert sql.execute("DELETE FROM sessiontree.nodes").rowcount == 1
    assert a.blobs is not None and b.blobs is not None
    (ours, theirs) = (f"{shared.scope_of(tenant).hex()}/name" for tenant in ("a", "b"))
    assert [a.blobs.get(name) for name in (ours, theirs)] == [b"bytes", None]
    with pytest.raises(StoreFailed):
        a.blobs.put(f"{shared.scope_of('b').hex()}/other", b"")
    assert a.blobs.delete([ours, theirs]) == 1 and b.blobs.get(theirs) == b"bytes"


def test_who_owns_the_tables_is_bound_too(postgres_server: Server, postgres_url: str, sql: psycopg.Connection[Any]) -> None:
    name = f"owner_{sql.info.dbname}"
    sql.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'app'; GRANT CREATE ON DATABASE {sql.info.dbname} TO {name}")
    given = conninfo_to_dict(postgres_url)
    url = f"postgresql://{name}:app@{given['host']}:{given['port']}/{given['dbname']}"
    try:
        backend = connect(url, tenant="a", blobs=None)
        number = make(backend, "s", 2, tenant="a")
        assert backend.sessions.commit([Change(number, 0, 1, [node(3)])]) == [True]
        backend.close()
        with psycopg.connect(url) as owner:
            assert [owner.execute(f"SELECT count(*) FROM sessiontree.{table}").fetchone() for table in TABLES] == [(0,)] * 7
    finally:
        sql.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")
