"""What a store that many processes write gives back of what was dropped. What stays is what :mod:`sessiontree.compaction` says.

Each session is cleared alone: a removal names the version and the number of forks that it was chosen for, and is refused where
either is another by then. So nobody's write and nobody's fork is cut off, and what is refused is looked at once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from sessiontree import codec
from sessiontree.backends.base import Progress
from sessiontree.backends.blob_features import BlobFeatures
from sessiontree.backends.blobs import file_name
from sessiontree.backends.shared import LONG, Removal
from sessiontree.backends.shared_log import DROP, HEAD, annotation_ref
from sessiontree.compaction import GcReport, Kept, kept
from sessiontree.shared_journal import Seen, SessionColumns, SharedJournal

_ATTEMPTS: Final = 3  # at sessions that others write to meanwhile


def collect(journal: SharedJournal, features: BlobFeatures | None, progress: Progress | None) -> GcReport:
    """Remove what need not stay. Raises StoreFailed, CorruptTree; what is reachable is as it was, whenever this ends."""
    candidates = set[str]() if features is None else features.names()
    before = left = 0
    for attempt in range(_ATTEMPTS):
        seen = journal.all_sessions()
        columns = SessionColumns.of_all(seen)
        count = len(columns.places_of_nodes())
        before = before if attempt else count
        removals = _removals(seen, columns, kept(journal, columns))
        forks = {fork: session for fork, session, _ in journal.backend.sessions.tips()}
        removed, refused = _remove(journal, removals, forks, progress)
        left = count - removed
        if not refused:
            break
    unnamed = 0
    if features is not None and candidates:
        unnamed = features.remove(candidates - set(_named(journal)))
    return GcReport(before, left, 0, 0, unnamed, swept=True)


def _removals(seen: Mapping[int, Seen], columns: SessionColumns, stay: Kept) -> list[Removal]:
    """What is to go, forks before what they were forked from."""
    dead = np.setdiff1d(columns.places_of_nodes(), stay.nodes)
    numbers, ordinals = columns.sessions[dead], columns.ordinals[dead]
    said = np.setdiff1d(columns.places(codec.ANNOTATION), stay.annotations)
    removals = []
    for number in sorted(seen, reverse=True):
        each = seen[number]
        whole = number not in stay.sessions
        mine = ordinals[numbers == number].tolist() if len(dead) else []
        refs = list(each.refs) if whole else _spent(each.refs, stay.drops.get(number, ()), each.gone)
        if not whole and len(said):
            of_dead = columns.entries[said[columns.sessions[said] == number]]
            refs += [annotation_ref(int(entry["ordinal"]), entry["id"].tobytes()) for entry in of_dead]
        if mine or refs or whole:
            removals.append(Removal(number, each.version, mine, refs, 0, whole))
    return removals


def _spent(refs: Mapping[bytes, bytes], hidden: tuple[int, ...], gone: bool) -> list[bytes]:
    """Names of refs that say nothing any more, but for annotations.

    ``hidden``: what the session does not show of what stays. ``gone``: it was dropped, and stays for the sake of forks.
    """
    records = {name: codec.decode(record) for name, record in refs.items() if name[:1] != LONG}
    moves = max((each.version for each in records.values() if isinstance(each, codec.HeadRecord)), default=0)
    spent = []
    for name, record in records.items():
        if name[:1] == DROP:
            says = isinstance(record, codec.DropRecord) and any(ordinal in hidden for ordinal in record.ordinals)
        elif gone:
            says = False
        elif name[:1] == HEAD:  # what was moved last stays, or its version came again
            says = isinstance(record, codec.HeadRecord) and (record.ordinal is not None or record.version == moves)
        else:
            says = isinstance(record, codec.PinRecord) and record.pinned
        if not says:
            spent.append(name)
    return spent


def _remove(journal: SharedJournal, removals: list[Removal], forks: dict[int, int], progress: Progress | None) -> tuple[int, int]:
    """How many nodes went, and how many removals were refused."""
    removed = refused = 0
    forked = Counter(forks.values())
    for done, removal in enumerate(removals, 1):
        if journal.backend.sessions.remove(removal._replace(forks=forked[removal.session])):
            removed += len(removal.ordinals)
            if removal.whole and removal.session in forks:
                forked[forks[removal.session]] -= 1
        else:
            refused += 1
        if progress is not None:
            progress(done, len(removals))
    return removed, refused


def _named(journal: SharedJournal) -> Iterator[str]:
    """Names of the features that nodes name, as it is now."""
    columns = SessionColumns.of_all(journal.all_sessions())
    for record in journal.shared.read_all(columns.entries[columns.places_of_nodes()]):
        for content in codec.contents_of(record):
            yield file_name(content)
