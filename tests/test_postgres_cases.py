"""CASES.md on PostgreSQL: the rows' numbers, and their kinds."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import psycopg
import pytest

from sessiontree import HeadMoved, IncompatibleStore, SessionExists, SessionStore, SessionTreeError, UnknownAlias
from sessiontree.backends import postgres
from sessiontree.backends.shared import Backend, Look, Removal
from sessiontree.testing.drawn import conversation
from sessiontree.testing.keeping import grow, hold_and_drop
from sessiontree.testing.media import features_of
from sessiontree.testing.model import PLACEHOLDER, SCHEME, Log, Picture, Turn, all_seen, check_session, reached, seen
from sessiontree.testing.together import Line, in_processes, in_threads, process
from sessiontree.testing.turns import said
from sessiontree.testing.work import count_up

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


@pytest.fixture
def database(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The tables themselves."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def backend(postgres_url: str) -> Iterator[Backend]:
    """A backend that stores may be opened over again and again."""
    made = postgres.connect(postgres_url)
    yield made._replace(close=lambda: None)
    made.close()


def rows(database: psycopg.Connection[Any], table: str) -> int:
    (count,) = database.execute(f"SELECT count(*) FROM sessiontree.{table}").fetchone() or (0,)
    return int(count)


# C85: stale or foreign snapshots


def test_c85_tables_of_another_version_are_refused_untouched(postgres_url: str, database: psycopg.Connection[Any]) -> None:
    with SessionStore.connect(postgres_url) as store:
        store.create("s", scheme="text@hf5")
    for version in (0, 2, 2**31 - 1):
        database.execute("UPDATE sessiontree.format SET version = %s", (version,))
        for read_only in (False, True):
            with pytest.raises(IncompatibleStore, match=str(version)):
                SessionStore.connect(postgres_url, read_only=read_only)
    database.execute("UPDATE sessiontree.format SET version = 1")
    with SessionStore.connect(postgres_url) as store:
        assert store.sessions() == ("s",)


def test_c85_a_foreign_schema_of_that_name_is_refused_untouched(postgres_url: str, database: psycopg.Connection[Any]) -> None:
    database.execute("CREATE SCHEMA sessiontree CREATE TABLE format (name text)")
    database.execute("INSERT INTO sessiontree.format VALUES ('theirs')")
    with pytest.raises(SessionTreeError):
        SessionStore.connect(postgres_url)
    assert rows(database, "format") == 1


def test_c85_another_model_or_scheme_is_refused(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as store:
        store.create("s", scheme=SCHEME, model_fingerprint="sha256:1")
    with SessionStore.connect(postgres_url) as store:
        for expected in ({"model_fingerprint": "sha256:2"}, {"scheme": "text@hf5"}):
            with pytest.raises(IncompatibleStore):
                store.get("s", **expected)
        assert store.get("s", model_fingerprint="sha256:1", scheme=SCHEME).root.depth == 0


COLUMNS = [
    *(("sessions", "name"), ("sessions", "record"), ("nodes", "id"), ("nodes", "parent"), ("nodes", "head"), ("bodies", "body")),
    *(("refs", "name"), ("refs", "record"), ("names", "record")),
]


def everything(backend: Backend) -> list[Any]:
    """All that can be read in a store that is opened anew."""
    with SessionStore.connect(backend) as store:
        found: list[Any] = [store.sessions()]
        for session in map(store.get, store.sessions()):
            found += session.id, all_seen(session), session.max_tokens, session.namespace
        with suppress(UnknownAlias):
            found.append(store.aliased_media("alias"))
        return found


def damaged(value: Any, random: Random) -> Iterator[Any]:
    """The value with one bit flipped, or cut short; everywhere in a soak."""
    if isinstance(value, int):
        yield from (value ^ 1 << bit for bit in range(5))
        return
    places = range(len(value)) if SOAK else sorted(random.sample(range(len(value)), min(6, len(value))))
    for at in places:
        yield value[:at] + bytes([value[at] ^ 1 << random.randrange(8)]) + value[at + 1 :]
        yield value[:at]


@pytest.mark.parametrize(("table", "column"), COLUMNS)
def test_c85_damage_is_a_typed_error_or_nothing_is_missing(
    backend: Backend, database: psycopg.Connection[Any], table: str, column: str
) -> None:
    with SessionStore.connect(backend) as store:
        session = store.create("s", scheme=SCHEME, max_tokens=10_000)
        log = said(session, conversation())
        session.append(log.ids[-1], [7] * 30, metadata={"tool": "of one's own", "score": 0.25}, key="k")
        session.set_head("main", log.ids[-1])
        session.set_head("gone", log.ids[1])
        session.drop_head("gone")
        session.pin(log.ids[2])
        session.append(log.ids[1], [8] * 300)  # its record has a body
        session.append(log.ids[1], [6] * 1000)  # and this one both
        session.drop(session.append(log.ids[1], [9, 9]))
        store.alias_media("alias", bytes(32))
        store.fork(session, log.ids[3], "fork").append(log.ids[3], [5])
    right = everything(backend)
    database.execute(f"ALTER TABLE sessiontree.{table} ADD COLUMN place integer GENERATED ALWAYS AS IDENTITY")
    change = f"UPDATE sessiontree.{table} SET {column} = %s WHERE place = %s"
    tried, silent = 0, []
    for place, value in database.execute(f"SELECT place, {column} FROM sessiontree.{table} WHERE {column} IS NOT NULL").fetchall():
        for wrong in damaged(value, Random(place)):
            with suppress(psycopg.errors.UniqueViolation):  # it is another row's
                database.execute(change, (wrong, place))
                tried += 1
                with suppress(SessionTreeError):
                    if everything(backend) != right:
                        silent.append((value, wrong))
        database.execute(change, (value, place))
    assert everything(backend) == right
    assert tried > 0
    assert not silent, f"{len(silent)} of {tried}: {silent[0]}"


# C87: a store that never shrinks, is lost on restart, and is not shared


def test_c87_memory_is_given_back_and_everything_is_there_again(postgres_url: str) -> None:
    """Under a budget of memory the least recently used sessions go; what a head leads to is read again, here and elsewhere."""
    budget = 300_000
    with SessionStore.connect(postgres_url, memory_bytes=budget, cache_bytes=50_000) as store:
        tips = {}
        for number in range(30):
            session = store.create(f"s{number}", scheme="text@hf5")
            node = session.root
            for turn in range(5):
                node = session.append(node, [number, turn] * 400)
            session.set_head("main", node)
            tips[session.id] = seen(node)
            del session, node
        assert store.usage().memory_bytes > budget
        store.tick(1)
        assert store.usage().memory_bytes <= budget
        with process(read_heads, postgres_url) as elsewhere:
            assert {name: seen(store.get(name).head("main").node) for name in tips} == tips
            assert elsewhere.result() == tips
        store.tick(2)
        assert store.usage().memory_bytes <= budget


def read_heads(line: Line, url: str) -> dict[str, bytes]:
    with SessionStore.connect(url) as store:
        return {name: seen(store.get(name).head("main").node) for name in store.sessions()}


# D15: a fork from another process sees an old state


def test_d15_a_fork_in_another_process_sees_what_was_acknowledged(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as store:
        session = store.create("s", scheme="text@hf5")
        node = session.root
        for number in range(3):
            node = session.append(node, [number])
            session.set_head("main", node)
            with process(fork_head, postgres_url, f"fork {number}") as elsewhere:
                assert elsewhere.result() == node.id
            fork = store.get(f"fork {number}")
            assert [each.id for each in fork.tree][:-1] == [each.id for each in node.path()]


def fork_head(line: Line, url: str, name: str) -> bytes:
    """Fork the head of a session that another process writes, and go on from there: where it was."""
    with SessionStore.connect(url) as store:
        session = store.get("s")
        node = session.head("main").node
        store.fork(session, node, name).append(node, [9])
        return node.id


# D26: a prune breaks descendants. D27: a delete leaves orphan keys


def grown(store: SessionStore, random: Random) -> list[Log]:
    """Sessions and forks with heads, pins and dropped branches, and turns whose records have bodies."""
    logs: list[Log] = []
    for number in range(3):
        session = store.create(f"s{number}", scheme=SCHEME)
        log = Log.of(session)
        grow(session, log, random, 20)
        fork = store.fork(session, random.choice(log.ids), f"fork of s{number}")
        of_fork = log.forked(fork.leaves()[0].id, fork)
        grow(fork, of_fork, random, 8)
        for count in (300, 1000):
            log.add(session.append(session.root, [7] * count).id, session.root.id, Turn((7,) * count))
        logs += log, of_fork
    for log in logs:
        hold_and_drop(store.get(log.session_id), log, random)
    return logs


@pytest.mark.parametrize("killed_at", [0, 1, 2, 4])
def test_d26_gc_that_is_killed_leaves_every_path_as_it_was(
    postgres_url: str, database: psycopg.Connection[Any], killed_at: int
) -> None:
    with SessionStore.connect(postgres_url) as store:
        logs = grown(store, Random(killed_at))
        before = {log.session_id: all_seen(store.get(log.session_id)) for log in logs}
    stored = rows(database, "nodes")
    with process(collect_until, postgres_url, killed_at) as collector, pytest.raises(EOFError):
        collector.result()
    with SessionStore.connect(postgres_url) as store:
        assert {log.session_id: all_seen(store.get(log.session_id)) for log in logs} == before
        for log in logs:
            check_session(store.get(log.session_id), log)
        assert reached(logs) < rows(database, "nodes") <= stored
        assert store.gc().nodes_after == reached(logs) == rows(database, "nodes")
        assert rows(database, "bodies") == rows(database, "bodies JOIN sessiontree.nodes USING (session, ordinal)")
        assert {log.session_id: all_seen(store.get(log.session_id)) for log in logs} == before


def collect_until(line: Line, url: str, count: int) -> None:
    """Collect garbage, and be killed before the removal of that number, counted from 0."""
    right, removals = postgres.PostgresSessions.remove, itertools.count()

    def remove(sessions: postgres.PostgresSessions, removal: Removal) -> bool:
        if next(removals) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(sessions, removal)

    postgres.PostgresSessions.remove = remove  # type: ignore[assignment, method-assign]
    SessionStore.connect(url).gc()


def test_d26_a_pinned_leaf_keeps_its_path_and_its_features(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url, blob_grace_seconds=0) as store:
        session = store.create("s", scheme=SCHEME)
        pictures = [Picture(number, 1, 1, 2, at=0) for number in range(4)]
        node = session.root
        for picture in pictures[:2]:
            node = session.append(node, [PLACEHOLDER] * 2, media=[picture.item()])
        session.append(session.root, [PLACEHOLDER] * 2, media=[pictures[2].item()])
        for picture in pictures:
            store.put_features(picture.item(), features_of(picture.number))
        session.pin(node)
        store.gc(recent=0)
        before = seen(node)
    with SessionStore.connect(postgres_url) as store:
        assert seen(store.get("s").node(node.id)) == before
        found = [store.get_features(picture.item()) is not None for picture in pictures]
        assert found == [True, True, False, False]


def test_d27_after_drops_and_gc_there_are_as_many_rows_as_can_be_reached(
    postgres_url: str, database: psycopg.Connection[Any]
) -> None:
    tables = ("sessions", "nodes", "bodies", "refs", "names", "blobs", "blob_pieces")
    with SessionStore.connect(postgres_url, blob_grace_seconds=0) as store:
        logs = grown(store, Random(7))
        item = Picture(1, 1, 1, 2, at=0).item()
        for log in logs:
            store.get(log.session_id).append(log.ids[0], [PLACEHOLDER] * 2, media=[item])
            log.add(store.get(log.session_id).leaves()[-1].id, log.ids[0], Turn((PLACEHOLDER,) * 2, (Picture(1, 1, 1, 2, at=0),)))
        store.put_features(item, features_of(1))
        store.alias_media("kept", item)
        store.alias_media("dropped", item)
        store.drop_alias("dropped")
        store.get_features(item)
        assert rows(database, "bodies") > 0
        while logs:
            store.gc()
            assert rows(database, "nodes") == reached(logs)
            assert rows(database, "bodies") == rows(database, "bodies JOIN sessiontree.nodes USING (session, ordinal)")
            held = sum(len(log.heads) + len(log.pins) for log in logs)
            assert held <= rows(database, "refs") <= held + 2 * len(logs)
            assert rows(database, "blobs") == 1
            log = logs.pop(0)
            session = store.get(log.session_id)
            for pin in log.pins:
                session.unpin(pin)
            store.drop(log.session_id)
        store.drop_alias("kept")
        store.gc()
        assert {table: rows(database, table) for table in tables} == dict.fromkeys(tables, 0)
    assert rows(database, "writers") == 0


# D28: a stale writer


def test_d28_a_stale_writer_is_told_what_is_there_and_its_branch_is_made(postgres_url: str) -> None:
    with SessionStore.connect(postgres_url) as here, SessionStore.connect(postgres_url) as there:
        session = here.create("s", scheme="text@hf5")
        old = session.append(session.root, [1])
        known = session.set_head("main", old)
        other = there.get("s")
        newer = other.set_head("main", other.append(old.id, [2]), expected=known)
        mine = session.append(old, [3])
        for expected in (known, old, None):
            with pytest.raises(HeadMoved) as refusal:
                session.set_head("main", mine, expected=expected)
            assert refusal.value.actual == newer
        assert [child.token_ids.tolist() for child in there.get("s").children(old.id)] == [[2], [3]]
        moved = session.set_head("main", mine, expected=newer)
        assert there.get("s").head("main") == moved


def test_d28_of_many_processes_none_writes_over_another(postgres_url: str) -> None:
    opener = partial(SessionStore.connect, postgres_url)
    with opener() as store:
        session = store.create("s", scheme="text@hf5")
        session.set_head("main", session.root)
    in_processes(6, count_up, opener, "s", 100 if SOAK else 8)
    with opener() as store:
        path = store.get("s").head("main").node.path()
        counts = Counter(node.token_ids.tolist()[0] for node in path[1:])
        assert counts == dict.fromkeys(range(6), 100 if SOAK else 8)


# D29: history is read under a lock


class Counting:
    """Counts what is read of a session: rows that are looked at, and records."""

    def __init__(self, backend: Backend) -> None:
        self.rows = self.records = self.calls = 0
        self.backend = backend._replace(sessions=self, nodes=self)
        self._backend = backend

    def look(self, number: int, since: tuple[int, int, int] | None = None) -> Look | None:
        look = self._backend.sessions.look(number, since)
        self.calls += 1
        self.rows += 0 if look is None else len(look.nodes)
        return look

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
        self.calls += 1
        self.records += len(ordinals)
        return self._backend.nodes.read(session, ordinals)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend.sessions, name)


@pytest.mark.parametrize("nodes", [10, 10_000])
def test_d29_concurrent_appends_read_nothing_of_the_history(postgres_url: str, backend: Backend, nodes: int) -> None:
    """Twenty threads here, and another process's writes between theirs: only what those wrote is looked at."""
    with SessionStore.in_memory() as memory:
        source = memory.create("s", scheme="text@hf5")
        node = source.root
        for number in range(nodes):
            node = source.append(node, [number])
        counting = Counting(backend)
        with SessionStore.connect(counting.backend) as store, SessionStore.connect(postgres_url) as other:
            theirs = other.fork(source, node, "s")
            session = store.get("s")
            middle = session.node(node.ancestor(nodes // 2).id)
            counting.rows = counting.records = counting.calls = 0
            in_threads(20, lambda number: session.append(middle, [1_000 + number]))
            assert (counting.rows, counting.records) == (0, 0)
            for number in range(5):
                theirs.append(middle.id, [2_000 + number])
                in_threads(4, lambda at, number=number: session.append(middle, [3_000 + 10 * number + at]))  # type: ignore[misc]
            assert counting.records == 0
            assert 5 <= counting.rows <= 5 * 25, "what was written meanwhile, as often as somebody looked"
            assert len(other.get("s").children(middle.id)) == 1 + 20 + 5 + 20


# D30: the first opening of a store


def test_d30_processes_open_a_new_store_and_make_one_session_at_once(postgres_url: str) -> None:
    """The suite has 16 of them append 100 each to sessions of their own; here it is one session, which one of them makes."""
    count = 100 if SOAK else 5
    made = in_processes(16, open_and_append, postgres_url, count)
    with SessionStore.connect(postgres_url) as store:
        session = store.get("s")
        assert sorted(node.token_ids.tolist() for node in session.tree) == sorted(
            [[], *([number, turn] for number in range(16) for turn in range(count))]
        )
        assert {node.id for node in session.tree} == {session.root.id, *(node for ids in made for node in ids)}


def open_and_append(line: Line, number: int, url: str, count: int) -> list[bytes]:
    line.wait()
    with SessionStore.connect(url) as store:
        try:
            session = store.create("s", scheme="text@hf5")
        except SessionExists:
            session = store.get("s")
        return [session.append(session.root, [number, turn]).id for turn in range(count)]
