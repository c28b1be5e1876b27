"""Every backend passes the public suite."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
import pytest
import sqlite_backend
from psycopg.sql import SQL, Identifier

from sessiontree import SessionStore
from sessiontree.testing import DurabilityTests, Opener, SharingTests, StoreConformance
from tests.postgres_server import Server

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


class Suite(StoreConformance):
    examples = 100 if SOAK else 8


class TestMemory(Suite):
    survives_reopen = durable = keeps_features = False
    counts_nodes = False  # it counts what each session shows

    @pytest.fixture
    def make_store(self) -> Opener:
        return SessionStore.in_memory


class TestSegmentLog(Suite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Opener:
        return partial(SessionStore.open, tmp_path / "store")

    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> Opener:
        return partial(SessionStore.open, tmp_path / "store", read_only=True)


class TestSegmentLogThatWaits(DurabilityTests, SharingTests):
    acknowledges = "return"

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Opener:
        return partial(SessionStore.open, tmp_path / "store", durability="commit")

    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> Opener:
        return partial(SessionStore.open, tmp_path / "store", read_only=True)


def sqlite(path: Path, tenant: str | None = None) -> SessionStore:
    return SessionStore.connect(sqlite_backend.connect(str(path), tenant), tenant=tenant)


class TestSQLite(Suite):
    acknowledges = "return"
    many_writers = True
    deep_appends = 200

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Opener:
        return partial(sqlite, tmp_path / "store")

    @pytest.fixture
    def make_tenant_store(self, tmp_path: Path) -> Callable[[str], SessionStore]:
        return partial(sqlite, tmp_path / "store")

    @pytest.fixture
    def stored_nodes(self, tmp_path: Path) -> Callable[[], int]:
        def count() -> int:
            with closing(sqlite3.connect(tmp_path / "store")) as database:
                return int(database.execute("SELECT count(*) FROM nodes").fetchone()[0])

        return count


@pytest.fixture(scope="module")
def database(postgres_server: Server) -> Iterator[str]:
    """One for all tests: to make a database and its tables costs more than most of them."""
    with postgres_server.database() as url:
        yield url


class TestPostgreSQL(Suite):
    acknowledges = "return"
    many_writers = True
    deep_appends = 200

    @pytest.fixture
    def make_store(self, database: str) -> Opener:
        with psycopg.connect(database) as connection:
            tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'sessiontree' AND tablename <> 'format'"
            if found := [Identifier("sessiontree", name) for (name,) in connection.execute(tables)]:
                connection.execute(SQL("TRUNCATE {}").format(SQL(", ").join(found)))
        return partial(SessionStore.connect, database)

    @pytest.fixture
    def elsewhere(self, postgres_url: str) -> Opener:
        """Processes that open it first find a database without tables."""
        return partial(SessionStore.connect, postgres_url)

    @pytest.fixture
    def make_tenant_store(self, database: str) -> Callable[[str], SessionStore]:
        return lambda tenant: SessionStore.connect(database, tenant=tenant)

    @pytest.fixture
    def stored_nodes(self, database: str) -> Callable[[], int]:
        def count() -> int:
            with psycopg.connect(database) as connection:
                (nodes,) = connection.execute("SELECT count(*) FROM sessiontree.nodes").fetchone() or (0,)
                return int(nodes)

        return count
