"""What of a store's records is to stay, and making the log hold that alone.

A node stays if its session shows it, or if a session that stays was forked from it or from what is below it. A session stays if it
was not dropped, or if such a fork's path goes through it. Of everything else what it came to stays: of heads, pins and aliases the
last word, of openings their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.base import Progress, Records
from sessiontree.backends.blobs import FeatureFolder, file_name
from sessiontree.errors import CorruptTree
from sessiontree.journal import MISSING, PREFIX_BYTES, Columns, Journal, above, below, parents_of, prefix_of, said_in

_BATCH_BYTES: Final = 2**20
_BATCH: Final = 2**15  # entries looked at together


@attrs.frozen
class GcReport:
    """What :meth:`SessionStore.gc` did. Counts are of nodes that are stored, roots not among them; bytes are those of the log.

    ``swept``: whether all that went is gone from the disk; False where somebody reads it still: it goes when they are done.
    """

    nodes_before: int
    nodes_after: int
    bytes_before: int
    bytes_after: int
    features_removed: int
    swept: bool

    def to_dict(self) -> dict[str, Any]:
        """The same in plain types."""
        return attrs.asdict(self)


class Kept(NamedTuple):
    """``nodes``, ``annotations``: places of those that stay. ``sessions``: numbers. ``drops``: of these, what they hide that stays
    all the same. ``tips``: of some forks, where their paths end by now.
    """

    nodes: NDArray[np.int64]
    annotations: NDArray[np.int64]
    sessions: set[int]
    drops: dict[int, tuple[int, ...]]
    tips: dict[int, tuple[int, int] | None]


def kept(journal: Journal, columns: Columns) -> Kept:
    """What is to stay of the entries of ``columns``."""
    dropped = columns.dropped_sessions
    tips = journal.tips(columns)
    over = [number for number, tip in tips.items() if tip is not None and tip[0] in dropped]
    own = _own_tips(columns, tips) if over else {}  # what was dropped in between is not held on to
    moved = {number: own[number] for number in over}
    tips |= moved
    needed: dict[int, set[int]] = defaultdict(set)  # ordinals that forks begin with
    waiting = [number for number in tips if number not in dropped]
    sessions = set(waiting)
    while waiting:
        tip = tips[waiting.pop()]
        if tip is not None:
            needed[tip[0]].add(tip[1])
            if tip[0] not in sessions:
                sessions.add(tip[0])
                waiting.append(tip[0])
    columns.group()
    hiding = set(columns.sessions[columns.places(codec.DROP)].tolist())
    drops = {number: journal.dropped(columns, number) for number in hiding & sessions}
    stay = []
    for number, found in columns.by_session():
        if number not in sessions:
            continue
        first, places = columns.by_ordinal(found)
        mask = places != MISSING
        if number in drops:
            parents = parents_of(columns, places)
            gone = below(drops[number], parents, first) | (0 in drops[number])
            mask &= ~gone | above(needed[number], parents, first)
            left = set((np.flatnonzero(mask) + first).tolist())
            drops[number] = tuple(ordinal for ordinal in drops[number] if ordinal == 0 or ordinal in left)
        stay.append(places[mask])
    nodes = np.sort(np.concatenate(stay)) if stay else np.empty(0, np.int64)
    said = _last_said(columns, nodes, sessions)
    return Kept(nodes, said, sessions, {number: left for number, left in drops.items() if left}, moved)


def _last_said(columns: Columns, nodes: NDArray[np.int64], sessions: set[int]) -> NDArray[np.int64]:
    """Where the last word of each name on each node is that stays, or that is none of its session's own: one a fork shares."""
    places = columns.places(codec.ANNOTATION)
    if not len(places):
        return places
    gone = np.setdiff1d(_keys(columns, columns.places_of_nodes()), _keys(columns, nodes))
    places = places[np.isin(columns.sessions[places], list(sessions)) & ~np.isin(_keys(columns, places), gone)]
    entries = columns.entries[places]
    order = np.lexsort((entries["key"], entries["id"], _keys(columns, places)))
    ordered = entries[order]
    ends = np.ones(len(ordered), np.bool)
    ends[:-1] = (ordered["session"][1:] != ordered["session"][:-1]) | (ordered["ordinal"][1:] != ordered["ordinal"][:-1])
    ends[:-1] |= ordered["id"][1:] != ordered["id"][:-1]
    return np.sort(places[order[ends]])


def _own_tips(columns: Columns, tips: dict[int, tuple[int, int] | None]) -> dict[int, tuple[int, int] | None]:
    """The same nodes, each named as the session has it that made it."""
    sources = {tip[0] for tip in tips.values() if tip is not None}
    nodes: dict[int, tuple[int, Sequence[int]]] = {}
    for number, places in columns.by_session() if sources else ():
        if number in sources:
            first, found = columns.by_ordinal(places)
            nodes[number] = first, parents_of(columns, found)

    def parent_of(number: int, ordinal: int) -> int | None:
        """None: it is none of that session's own."""
        first, parents = nodes.get(number, (1, ()))
        parent = parents[ordinal - first] if first <= ordinal < first + len(parents) else codec.NONE
        return parent if parent < ordinal else None

    own: dict[int, tuple[int, int] | None] = {}
    for number in sorted(tips):
        tip = tips[number]
        while tip is not None and parent_of(*tip) is None and (above := own.get(tip[0])) is not None:
            (fork, depth), (source, last) = tip, above  # it lies on the path that this fork begins with, under its depth
            path = [last]
            while (parent := parent_of(source, path[-1])) is not None:
                path.append(parent)
            top = path.pop()  # a depth too
            if source >= fork or depth - top > len(path):
                raise CorruptTree(f"session {number} is a fork of node {depth} of session {fork}, which is none", session=number)
            tip = source, path[top - depth] if depth > top else depth
        own[number] = tip
    return own


def compact(journal: Journal, features: FeatureFolder | None, progress: Progress | None) -> GcReport:
    """Make the log hold what stays alone, while others go on writing. Raises StoreFailed, CorruptTree; all is as it was then."""
    log = journal.log
    journal.flush()
    bytes_before = log.stored_bytes()
    known = journal.columns()
    stay = _checked(journal, known)
    entries, base = log.cut()
    columns = known
    if len(known.entries) != len(entries):
        columns = Columns(entries, log.lease)
        stay = kept(journal, columns)
    del known
    places = columns.places_of_nodes()
    before = len(places)
    candidates = None if features is None else features.names()
    named: set[str] = set()
    for done, records in _in_batches(journal, entries, stay.nodes):
        if candidates:
            named.update(_named(record for record, _ in records))
        log.copy(records)
        if progress is not None:
            progress(done, len(stay.nodes))
    for _, records in _in_batches(journal, entries, stay.annotations):
        log.copy(records)
    for number in _past_annotations(journal, columns, stay):  # of its path it says itself what those said that it leaves
        said = said_in(number, journal.stored_at(columns, number)[0], True)
        log.copy([(record, prefix_of(record)) for record in said])
    if features is not None and candidates and (unsure := candidates - named & features.fresh()):
        # Put since the store was opened: they wait for their nodes, unless those have come and gone.
        gone = np.setdiff1d(places, stay.nodes)
        seen: set[str] = set()
        for _, records in _in_batches(journal, entries, gone):
            seen.update(_named(record for record, _ in records))
        candidates -= unsure - seen
        features.came(unsure & seen)
    mine = _keys(columns, stay.nodes) if candidates else None
    last = partial(_last_words, journal, columns.others_alone(), stay)
    del columns, places
    log.begin_at(base, last)
    del entries, last  # with what they hold nothing could be removed
    journal.moved()
    swept = log.sweep()
    removed = 0
    if features is not None and candidates and mine is not None and swept:
        journal.flush()  # what was handed over before it looks is seen
        columns = Columns(log.entries())
        came = columns.places_of_nodes()
        came = came[~np.isin(_keys(columns, came), mine)]  # what came meanwhile
        for _, records in _in_batches(journal, columns.entries, came):
            named.update(_named(record for record, _ in records))
        removed = features.remove(candidates - named)
    return GcReport(before, len(stay.nodes), bytes_before, log.stored_bytes(), removed, swept)


def _past_annotations(journal: Journal, columns: Columns, stay: Kept) -> list[int]:
    """Forks whose paths end elsewhere by now, past a session that says something of them."""
    said = set(columns.sessions[columns.places(codec.ANNOTATION)].tolist())
    tips = journal.tips(columns) if stay.tips and said else {}
    passing = []
    for number in stay.tips if tips else ():
        at, last = tips[number], stay.tips[number]
        while at is not None and last is not None and at[0] != last[0]:
            if at[0] in said:
                passing.append(number)
                break
            at = tips[at[0]]
    return passing


def _checked(journal: Journal, columns: Columns) -> Kept:
    """What is to stay, all of it read before anything is written. Raises CorruptTree naming what is damaged."""
    stay = kept(journal, columns)
    last = [entry for entry, _ in _last_entries(columns.others_alone(), stay, Columns(columns.entries[:0])).values()]
    others = np.array(last, columns.entries.dtype)
    try:
        for entries in (
            columns.entries[stay.nodes],
            columns.entries[stay.annotations],
            np.sort(others, order=("segment", "offset")),
        ):
            for _ in journal.log.read_all(entries):
                pass
    except CorruptTree as error:
        if (named := journal.named(error, columns)) is None:
            raise
        raise named from error
    return stay


def _keys(columns: Columns, places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Which node each is."""
    keys: NDArray[np.uint64] = columns.sessions[places].astype(np.uint64) << np.uint64(32) | columns.ordinals[places]
    return keys


def _named(records: Iterable[Any]) -> Iterator[str]:
    """The files of the features that nodes name."""
    return (file_name(content) for record in records for content in codec.contents_of(record))


def _in_batches(
    journal: Journal, entries: NDArray[Any], places: NDArray[np.int64]
) -> Iterator[tuple[int, list[tuple[bytes, bytes]]]]:
    """Records with their prefixes, some MiB at a time, and how many have come so far."""
    width = entries.dtype.itemsize
    done = 0
    batch: list[tuple[bytes, bytes]] = []
    size = 0
    for start in range(0, len(places), _BATCH):
        some = entries[places[start : start + _BATCH]]
        rows = some.tobytes()
        for at, record in enumerate(journal.log.read_all(some)):
            batch.append((record, rows[at * width : at * width + PREFIX_BYTES]))
            size += len(record)
            if size >= _BATCH_BYTES:
                done += len(batch)
                yield done, batch
                batch, size = [], 0
    if batch:
        yield done + len(batch), batch


def _last_entries(old: Columns, stay: Kept, since: Columns) -> dict[Any, tuple[Any, bool]]:
    """The last word on each session, head, pin and alias that is to stay: its entry, and whether it is an old one."""
    last: dict[Any, tuple[Any, bool]] = {}
    dropped = {number for number, left in stay.drops.items() if 0 in left}
    for columns in (old, since):
        for place in columns.others().tolist():
            kind, number = int(columns.kinds[place]), int(columns.sessions[place])
            entry = columns.entries[place]
            if kind == codec.SESSION and number in stay.sessions:
                last.setdefault((kind, number), (entry, columns is old))
            elif kind == codec.ALIAS or (kind in (codec.HEAD, codec.PIN) and number in stay.sessions and number not in dropped):
                last[kind, number, entry["id"].tobytes()] = entry, columns is old
    return last


def _last_words(journal: Journal, old: Columns, stay: Kept, entries: NDArray[Any]) -> Records:
    """What is to be stored once more beside nodes: of what is ``old``, that which is the last word after all ``entries`` since."""
    last = _last_entries(old, stay, Columns(entries))
    heads = [entry for entry, _ in last.values() if entry["kind"] == codec.HEAD]
    ended = {int(entry["session"]) for entry in heads if entry["ordinal"] == codec.NONE}
    moves: dict[int, int] = defaultdict(int)  # of these sessions' heads: what was moved last stays, or its version came again
    for entry in heads:
        if (number := int(entry["session"])) in ended:
            moves[number] = max(moves[number], journal.version_of(entry))
    records: list[tuple[bytes, bytes]] = []
    for entry, is_old in last.values():
        if not is_old or (entry["kind"] == codec.PIN and not entry["key"]):
            continue
        ends = entry["kind"] == codec.HEAD and entry["ordinal"] == codec.NONE
        if ends and journal.version_of(entry) < moves[int(entry["session"])]:
            continue
        record = journal.log.read(entry)
        if entry["kind"] == codec.SESSION and int(entry["session"]) in stay.tips:
            record = journal.with_tip(entry, stay.tips[int(entry["session"])])
        if entry["kind"] == codec.ALIAS and codec.decode(record).identity is None:  # type: ignore[union-attr]
            continue
        records.append((record, entry.tobytes()[:PREFIX_BYTES]))
    drops = [codec.encode(codec.DropRecord(number, left)) for number, left in stay.drops.items()]
    return [*records, *((record, prefix_of(record)) for record in (*drops, codec.encode(journal.last_opening)))]
