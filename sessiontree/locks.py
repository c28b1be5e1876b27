"""Locks that a forked child finds open.

``fork`` copies a lock in the state it is in, and the thread that held it does not exist in the child. What these locks guard is
left consistent by every prefix of the steps taken under them, so the child may simply go on.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final
from weakref import WeakSet

_locks: Final[WeakSet[Any]] = WeakSet()


def new_lock() -> Any:
    """A re-entrant lock: a signal handler or finalizer may come in while its thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # what the forking thread holds itself, it will let go of in the child too
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_open_all)
