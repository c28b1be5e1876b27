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
_forkable: Final[WeakSet[Any]] = WeakSet()


def new_lock() -> Any:
    """A re-entrant lock: a signal handler or finalizer may come in while its thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def begin_anew_in_children(each: Any) -> None:
    """Have ``each._begin_anew()`` called in every child that this process forks, where locks are open."""
    _forkable.add(each)


def _open_all() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # what the forking thread holds itself, it will let go of in the child too
            lock._at_fork_reinit()
    for each in list(_forkable):
        each._begin_anew()


os.register_at_fork(after_in_child=_open_all)
