"""examples/sqlite_backend.py keeps the contract of a backend; and what is its own: one file, which whoever is first makes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import sqlite_backend

from sessiontree.backends.shared import Backend, Change
from sessiontree.errors import CorruptTree, IncompatibleStore, StoreFailed
from tests.backend_contract import BackendContract
from tests.backend_processes import Processes, drawn
from tests.backend_writing import Connect, commit, looked, made, nodes, noise


def come_first(where: Path, processes: Processes, times: int) -> None:
    for at in range(times):
        numbers = processes(drawn, partial(sqlite_backend.connect, f"{where}/{at}"), 1)
        assert sorted(number for each in numbers for number in each) == list(range(1, processes.count + 1))
        assert len(list(where.iterdir())) == at + 1  # nothing else is left


class TestSqlite(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return partial(sqlite_backend.connect, f"{tmp_path}/store")

    @pytest.fixture
    def connect_tenant(self, tmp_path: Path) -> Callable[[str], Backend]:
        return partial(sqlite_backend.connect, f"{tmp_path}/store")

    def test_of_several_that_come_first_one_makes_the_file(self, tmp_path: Path, processes: Processes) -> None:
        come_first(tmp_path, processes, 10)

    @pytest.mark.soak
    def test_of_sixteen_that_come_first_one_makes_the_file(self, tmp_path: Path) -> None:
        processes = Processes(16)
        come_first(tmp_path, processes, 100)
        processes.close()

    def test_what_is_acknowledged_is_on_disk(self, backend: Backend, tmp_path: Path) -> None:
        with backend.sessions.db.transaction() as db:  # type: ignore[attr-defined]
            assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: each commit syncs the log

    def test_a_writer_that_waits_too_long_changes_nothing(self, backend: Backend, tmp_path: Path) -> None:
        number = made(backend, "one")
        change = Change(number, 0, 1, nodes(1, 1), drops=True)
        _, writer = backend.sessions.db.connections["BEGIN IMMEDIATE"]  # type: ignore[attr-defined]
        writer.execute("PRAGMA busy_timeout = 1")
        with closing(sqlite3.connect(tmp_path / "store", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreFailed, match=f"{tmp_path}/store: database is locked"):
                commit(backend, change)
            assert looked(backend, number).version == 0  # who reads waits for nobody
        assert commit(backend, change)

    def test_a_full_disk_refuses_a_call_whole(self, backend: Backend) -> None:
        first, second = made(backend, "one"), made(backend, "two")
        _, writer = backend.sessions.db.connections["BEGIN IMMEDIATE"]  # type: ignore[attr-defined]
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages + 20}")
        changes = [Change(first, 0, 1, nodes(1, 2), {b"a": b"1"}), Change(second, 0, 1, nodes(1, 1, noise(200_000)))]
        with pytest.raises(StoreFailed, match="full"):
            backend.sessions.commit(changes)
        assert [looked(backend, number).version for number in (first, second)] == [0, 0]
        assert list(backend.nodes.read(first, [1, 2])) == [None, None]
        assert commit(backend, changes[0])

    def test_a_file_of_something_else_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store"
        path.write_bytes(noise(10_000))
        with pytest.raises(CorruptTree, match="not a database"):
            sqlite_backend.connect(f"{path}")
        path.unlink()
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE theirs (x)")
        with pytest.raises(IncompatibleStore, match="version 0, not 1"):
            sqlite_backend.connect(f"{path}")


def test_it_is_as_short_as_the_docs_say() -> None:
    assert len(Path(sqlite_backend.__file__).read_text().splitlines()) < 200
