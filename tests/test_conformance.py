"""Every backend passes the public suite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import sqlite_backend

from sessiontree import SessionStore
from sessiontree.testing import DurabilityTests, Opener, SharingTests, StoreConformance


class TestMemory(StoreConformance):
    survives_reopen = durable = keeps_features = False
    counts_nodes = False  # it counts what each session shows

    @pytest.fixture
    def make_store(self) -> Opener:
        return SessionStore.in_memory


class TestSegmentLog(StoreConformance):
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


class Shared(StoreConformance):
    acknowledges = "return"
    many_writers = True
    deep_appends = 200


class TestSQLite(Shared):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Opener:
        return partial(sqlite, tmp_path / "store")

    @pytest.fixture
    def make_tenant_store(self, tmp_path: Path) -> Callable[[str], SessionStore]:
        return partial(sqlite, tmp_path / "store")

    @pytest.fixture
    def stored_nodes(self, tmp_path: Path) -> Callable[[], int]:
        return partial(rows, tmp_path / "store")


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (count,) = database.execute("SELECT count(*) FROM nodes").fetchone()
    return int(count)


class TestPostgreSQL(Shared):
    @pytest.fixture
    def make_store(self, postgres_url: str) -> Opener:
        return partial(SessionStore.connect, postgres_url)

    @pytest.fixture
    def make_tenant_store(self, postgres_url: str) -> Callable[[str], SessionStore]:
        return lambda tenant: SessionStore.connect(postgres_url, tenant=tenant)
