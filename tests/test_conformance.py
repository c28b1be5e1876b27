"""Every backend passes the public suite."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

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
