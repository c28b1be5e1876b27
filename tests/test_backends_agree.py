"""The same operations on every backend at once: equal trees, heads and ids after each, whichever of them was just opened again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import sqlite_backend

from sessiontree import SessionStore
from sessiontree.testing import Home, run_machine

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


def test_every_backend_comes_to_the_same(tmp_path: Path, postgres_url: str) -> None:
    openers: dict[str, Callable[[], SessionStore]] = {
        "segment log": partial(SessionStore.open, tmp_path / "log"),
        "segment log that waits": partial(SessionStore.open, tmp_path / "waiting", durability="commit"),
        "SQLite": lambda: SessionStore.connect(sqlite_backend.connect(str(tmp_path / "sqlite")), cache_bytes=0),
        "PostgreSQL": partial(SessionStore.connect, postgres_url),
    }
    with ExitStack() as stack:
        homes = [Home(SessionStore.in_memory, reopens=False, counts=False)]
        homes += [Home(opener, reopens=True, counts=True) for opener in openers.values()]
        for home in homes:
            stack.callback(home.close)
        run_machine(homes, examples=150 if SOAK else 8, steps=50 if SOAK else 30)
