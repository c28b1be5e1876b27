"""Is a store sound; what is damaged, and what hangs on it; saving the rest; what it is made of.

:func:`fsck` reads a store from end to end and checks everything it can: checksums of frames and records, every node's digest
against its parent, that its positions can follow its parent's under its session's scheme, every file of features; that what a
record names is there. :func:`salvage` writes what is sound to a new store. :func:`stats` counts. None of them changes the store it
looks at, or takes its lock: they work beside a process that writes, and see the store as it was when they read it.

:func:`fsck_shared` and :func:`stats_shared` do the same with a store that many processes write.
"""

from sessiontree.backends.base import Progress
from sessiontree.fsck.report import Damage, Finding, Report, fsck
from sessiontree.fsck.salvage import SalvageReport, salvage
from sessiontree.fsck.shared import fsck_shared, stats_shared
from sessiontree.fsck.stats import SessionStats, Stats, stats

__all__ = [
    "Damage",
    "Finding",
    "Progress",
    "Report",
    "SalvageReport",
    "SessionStats",
    "Stats",
    "fsck",
    "fsck_shared",
    "salvage",
    "stats",
    "stats_shared",
]
