"""Sessions in a log: what is written of them, and how they are found again.

A :class:`Journal` turns what a session did into records that become durable together, and makes a session's tree from what the
log knows. It never holds a session: which node is where, it asks the log's entries, which are arrays, so a store of a million
nodes opens without looking at any of them.

A node is found by session and ordinal, a session by the digest of its id, a head by the digest of its name; the last entry counts.
Records of one session come in the order its nodes were made, so a node never comes before its parent.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from struct import Struct
from sys import getsizeof
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.annotation_log import Said
from sessiontree.backends.base import CompactLog, Durability, Lease, Log, Overtaken, WriteLost
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.details import Details
from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree, IncompatibleStore, SessionTreeError, StoreFailed, Unsupported
from sessiontree.features import FeatureStore
from sessiontree.heads import Dropped
from sessiontree.index import NodeIndex
from sessiontree.locks import new_lock
from sessiontree.memory import HeldNodes
from sessiontree.node import Lineage, Namespace, Node, make_root
from sessiontree.positions import PositionScheme, scheme
from sessiontree.stored import Stored, StoredHead, StoredIndex
from sessiontree.stored_annotations import StoredAnnotations
from sessiontree.stored_prefixes import Content
from sessiontree.tokens import TOKEN_BYTES, Extent, PathCache
from sessiontree.tree import SessionTree, stored_tree
from sessiontree.turns import Turn

__all__ = ["Durability", "Journal", "Overtaken", "SessionNodes", "Wait", "WriteLost", "waits_handed_over"]

R = TypeVar("R", codec.SessionRecord, codec.HeadRecord, codec.DropRecord)

MISSING: Final = -1  # the place of a node that is nowhere
_REMEMBERED: Final = 64  # batches, after which those that are durable are forgotten
_FEW: Final = 16  # ids looked for one by one before they are sorted, or records that are read one by one
_UNSORTED: Final = 256  # records of sessions and the like that are looked through for a name before they are sorted
_LISTED_BYTES: Final = 112  # of an id and a number
_BATCH: Final = 4096  # records of which the entries are looked at together


_PREFIX: Final = Struct("<BIII32sQ")
PREFIX_BYTES: Final = _PREFIX.size


_as_stored = partial(tuple.__new__, Stored)
LATER: Final = 255  # the kind of a record that a later library wrote


def prefix_of(record: bytes) -> bytes:
    """What the log's index is to know of a record."""
    try:
        return _PREFIX.pack(*codec.entry_of(record))
    except IncompatibleStore:
        return _PREFIX.pack(LATER, 0, 0, 0, bytes(ID_BYTES), 0)


def _with_prefixes(records: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return [(record, prefix_of(record)) for record in records]


class Columns:
    """What the log knows of its records, as one array a field: to look at one field of all takes a pass over that field alone.

    ``before``: what was known under the same lease, of fewer records: only what came since is looked at. What of its arrays has
    room for that goes on in them, which changes nothing that anybody sees: the rows of a log stay as they are, so whoever writes
    behind what ``before`` has, writes the same.
    """

    kinds: NDArray[np.uint8]
    sessions: NDArray[np.uint32]
    ordinals: NDArray[np.uint32]
    parents: NDArray[np.uint32]

    def __init__(self, entries: NDArray[Any], lease: Lease | None = None, before: Columns | None = None) -> None:
        self.entries = entries
        self.lease = lease  # without which the records may be gone
        start = 0 if before is None else len(before.entries)
        new = entries[start:]
        fields = [np.array(new[name]) for name in ("kind", "session", "ordinal", "parent")]
        fields.append((np.flatnonzero(fields[0] != codec.NODE) + start).astype(np.uint32))  # mostly few
        if before is not None:
            fields = [_longer(*both) for both in zip(before._fields, fields, strict=True)]
        self._fields: list[NDArray[Any]] = fields
        self.kinds, self.sessions, self.ordinals, self.parents, self._others = fields
        self._grouped: tuple[NDArray[np.int64], NDArray[np.uint32]] | None = None
        self._last: tuple[int, NDArray[np.int64]] = -1, np.empty(0, np.int64)
        # Of the first so many of the others: which sessions they drop, and those that they make, by name.
        self._dropped: tuple[int, frozenset[int]] = (0, frozenset()) if before is None else before._dropped
        self._by_name: tuple[int, NDArray[np.uint32], NDArray[np.uint32]] = (
            (0, np.empty(0, np.uint32), np.empty(0, np.uint32)) if before is None else before._by_name
        )

    def others(self) -> NDArray[np.uint32]:
        """Where records are that are of no node, in order."""
        return self._others

    def others_alone(self) -> Columns:
        """Those entries alone, copied."""
        return Columns(self.entries[self._others], self.lease)

    def places_of_nodes(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.kinds == codec.NODE)

    def by_session(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The places of nodes, each session's in order."""
        places = self.places_of_nodes()
        if not len(places):
            return
        sessions = self.sessions[places]
        order = np.argsort(sessions, kind="stable")
        starts = np.flatnonzero(np.diff(sessions[order], prepend=-1))
        for start, stop in itertools.pairwise([*starts.tolist(), len(places)]):
            yield int(sessions[order[start]]), places[order[start:stop]]

    def by_ordinal(self, places: NDArray[np.int64], first: int | None = None) -> tuple[int, NDArray[np.int64]]:
        """Nodes of one session: ``first``, or the first ordinal, and the place of each from there on, MISSING where there is none.

        Raises CorruptTree.
        """
        if not len(places):
            return first or 1, places
        ordinals = self.ordinals[places]
        lowest, last = int(ordinals.min()), int(ordinals.max())
        first = lowest if first is None else first
        # What is missing was there once. Twice, since of a damaged log nobody knows how much there was.
        if lowest < first or last - first > 2 * (len(self.entries) + (0 if self.lease is None else self.lease.records)):
            raise CorruptTree(f"session {self.sessions[places[0]]} has nodes {lowest} to {last}, the first can be {first}")
        found = np.full(last - first + 1, MISSING, np.int64)
        found[ordinals[::-1] - np.uint32(first)] = places[::-1]  # of several, the first
        return first, found

    def group(self) -> None:
        """Be asked about one session after the other: from now on not in time proportional to all."""
        order = np.argsort(self.sessions, kind="stable")
        self._grouped = order, self.sessions[order]

    def places(self, kind: int, session: int | None = None) -> NDArray[np.int64]:
        """Where records of a kind are, in order."""
        mine = None if session is None else self._of(session)
        if mine is not None:
            places: NDArray[np.int64] = mine[self.kinds[mine] == kind]
            return places
        if kind == codec.NODE:
            assert session is not None
            return np.flatnonzero((self.sessions == session) & (self.kinds == kind))
        places = self._of_kind(kind, 0)
        return places if session is None else places[self.sessions[places] == session]

    def _of(self, session: int) -> NDArray[np.int64] | None:
        """Where records of a session are, in order; None where they are many, and to look for one kind is quicker.

        Who opens a session asks for one kind after the other, so what was found last is kept.
        """
        if self._grouped is not None:
            order, sessions = self._grouped
            wanted = np.uint32(session)  # a plain int would have all of them converted
            return order[sessions.searchsorted(wanted, "left") : sessions.searchsorted(wanted, "right")]
        known, mine = self._last
        if known != session:
            marks = self.sessions == session
            if np.count_nonzero(marks) > _BATCH:
                return None
            mine = np.flatnonzero(marks)
            self._last = session, mine
        return mine

    @property
    def dropped_sessions(self) -> frozenset[int]:
        """Numbers of those that are gone."""
        looked, dropped = self._dropped
        if looked < len(self._others):
            drops = self._of_kind(codec.DROP, looked)
            dropped |= set(self.sessions[drops[self.ordinals[drops] == 0]].tolist())
            self._dropped = len(self._others), dropped
        return dropped

    @property
    def age(self) -> tuple[int, int]:
        """The later it was looked at, the higher."""
        return 0 if self.lease is None else self.lease.first, len(self.entries)

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The first eight bytes of each id."""
        ids = np.ascontiguousarray(self.entries["id"][places])
        return ids.view(np.uint64).reshape(len(places), 4)[:, 0]

    def sessions_named(self, identity: bytes) -> list[int]:
        """Where sessions of this name's digest are, in order."""
        looked, names, places = self._by_name
        if len(self._others) - looked > _UNSORTED + looked // 8:
            looked, found = len(self._others), self.places(codec.SESSION)
            names = self.ids(found).astype(np.uint32)  # a part of each: what is alike in that is looked at
            order = np.argsort(names, kind="stable")
            names, places = names[order], found[order].astype(np.uint32)
            self._by_name = looked, names, places
        wanted = np.frombuffer(identity, np.uint64).astype(np.uint32)[0]
        alike = places[names.searchsorted(wanted, "left") : names.searchsorted(wanted, "right")]
        return self.named(np.concatenate([alike.astype(np.int64), self._of_kind(codec.SESSION, looked)]), identity)

    def _of_kind(self, kind: int, first: int) -> NDArray[np.int64]:
        """Where records of a kind are, among the others from the first so many on."""
        places = self._others[first:]
        found: NDArray[np.int64] = places[self.kinds[places] == kind].astype(np.int64)
        return found

    @property
    def nbytes(self) -> int:
        """What its arrays take, with their room, without the entries."""
        _, *by_name = self._by_name
        return sum(_room_of(field).nbytes for field in self._fields) + sum(each.nbytes for each in by_name)

    def named(self, places: NDArray[np.int64], identity: bytes) -> list[int]:
        """Those that have this id."""
        alike = places[self.ids(places) == np.frombuffer(identity, np.uint64)[0]].tolist()
        return [place for place in alike if self.entries[place]["id"].tobytes() == identity]


def _room_of(values: NDArray[Any]) -> NDArray[Any]:
    """The array of which these are the first."""
    return values if values.base is None else values.base


def _longer(values: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """``values`` and ``more``, in the same array if it has room."""
    count = len(values) + len(more)
    room = _room_of(values)
    if count > len(room):
        room = np.empty(count + count // 16 + 64, values.dtype)
        room[: len(values)] = values
    room[len(values) : count] = more
    return room[:count]


def parents_of(columns: Columns, places: NDArray[np.int64]) -> Sequence[int]:
    """Ordinals of the parents of nodes; of those that are MISSING, none."""
    return np.where(places == MISSING, np.uint32(codec.NONE), columns.parents[places]).data


def below(roots: Iterable[int], parents: Sequence[int], first: int) -> NDArray[np.bool]:
    """Which nodes from ordinal ``first`` on are among ``roots`` or below them."""
    marks = _marks(roots, len(parents), first)
    start = marks.find(1)
    for at in range(start, len(marks)) if start >= 0 else ():
        above = parents[at] - first
        if 0 <= above < at and marks[above]:
            marks[at] = 1
    return np.frombuffer(marks, np.bool)


def above(held: Iterable[int], parents: Sequence[int], first: int) -> NDArray[np.bool]:
    """Which nodes from ordinal ``first`` on are among ``held`` or above them."""
    marks = _marks(held, len(parents), first)
    for at in range(len(marks) - 1, -1, -1):
        above = parents[at] - first
        if marks[at] and 0 <= above < at:
            marks[above] = 1
    return np.frombuffer(marks, np.bool)


def _marks(ordinals: Iterable[int], count: int, first: int) -> bytearray:
    """A byte for each of ``count`` ordinals from ``first`` on: 1 for those that are named."""
    marks = bytearray(count)
    for ordinal in ordinals:
        if first <= ordinal < first + count:
            marks[ordinal - first] = 1
    return marks


class SessionNodes:
    """The nodes of one session, by ordinal: a :class:`~sessiontree.stored.NodeSource`. ``places``: theirs, in that order.

    An ordinal whose place is MISSING has no node. ``number``: the session's; ``whose``: itself, for messages.
    """

    def __init__(self, log: Log, columns: Columns, places: NDArray[np.int64], first: int, number: int, whose: str) -> None:
        self.first = first
        self.number = number
        self.whose = whose
        self._log = log
        self._columns = columns
        self._places = places
        self.missing: int = int(np.count_nonzero(places == MISSING))
        self.lenient: bool = bool(log.damaged)
        self.shared: bool = log.costly
        self._asked = 0
        self._by_id: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._by_parent: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._by_node: tuple[NDArray[np.int64], NDArray[np.uint32]] | None = None  # annotations

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        tables = (*(self._by_id or ()), *(self._by_parent or ()), *(self._by_node or ()))
        return int(self._places.nbytes) + sum(int(table.nbytes) for table in tables)

    def has(self, ordinal: int) -> bool:
        at = ordinal - self.first
        return at < 0 or (at < len(self._places) and bool(self._places[at] != MISSING))

    def resize(self, count: int) -> None:
        """Have so many ordinals, before anybody sees it."""
        more = np.full(max(0, count - len(self._places)), MISSING, np.int64)
        self._places = np.concatenate([self._places[:count], more])
        self.missing = int(np.count_nonzero(self._places == MISSING))

    def lies_in(self, columns: Columns) -> bool:
        """Whether it reads what is kept as those columns are."""
        return self._columns.lease is columns.lease

    def same_as(self, other: SessionNodes) -> bool:
        """Whether it has the same nodes under the same ordinals."""
        here = self._places != MISSING
        if not np.array_equal(here, other._places != MISSING):
            return False
        mine, others = self._columns.ids(self._places[here]), other._columns.ids(other._places[here])
        return np.array_equal(mine, others)

    def read_path(self, ordinals: Sequence[int], parent: Node) -> Iterator[Stored]:
        return self._read(ordinals, parent.id, parent.stop, parent.scheme)

    def read_alone(self, ordinal: int, parent_id: bytes, rules: PositionScheme) -> Stored:
        return next(self._read([ordinal], parent_id, None, rules))

    def _read(self, ordinals: Sequence[int], parent_id: bytes, start: int | None, rules: PositionScheme) -> Iterator[Stored]:
        """The nodes of a path below the node of ``parent_id``, which ends at ``start``; None: where the first says it begins."""
        rows = self._columns.entries[self._places_of(ordinals)]
        records = self._log.read_all(rows) if self._log.costly else map(self.raw, ordinals)
        known = zip(rows["session"].tolist(), ordinals, rows["parent"].tolist(), rows["id"].tolist(), strict=True)
        alike = len(ordinals) > _FEW and not rules.floats and 0 in rules.carries
        heads = codec.heads_of(rows) if alike else itertools.repeat(None, len(ordinals))
        for at, (where, head, data) in enumerate(zip(known, heads, records, strict=True)):
            if head is not None and start is not None:
                read = codec.text_turn(data, head, parent_id, start)
                if read is not None:
                    parent_id, start = where[3], read[0].state.num_tokens
                    yield _as_stored(read)
                    continue
            try:
                record = codec.decode(data)
                if not isinstance(record, codec.NodeRecord) or record[:4] != where:
                    raise CorruptTree("its record is that of another")
                codec.check_digest(record, parent_id)
                parent_id, stop = record.id, record.state.num_tokens
                codec.check_positions(record, stop - len(record.data) // TOKEN_BYTES if start is None else start, rules)
                start = stop
            except CorruptTree as error:
                raise self._named(error, where[1], rows[at]) from error
            yield Stored(record.turn, record.details)

    def read_ahead(self, ordinals: Sequence[int]) -> None:
        if self._log.costly and len(ordinals) > 1:
            deque(self._log.read_all(self._columns.entries[[self._place(ordinal) for ordinal in ordinals]]), maxlen=0)

    def raw(self, ordinal: int) -> bytes:
        known = self._columns.entries[self._place(ordinal)]
        try:
            return self._log.read(known)
        except CorruptTree as error:
            raise self._named(error, ordinal, known) from error

    def _named(self, error: CorruptTree, ordinal: int, known: Any, what: str = "") -> CorruptTree:
        """The same error, naming the node."""
        if what:
            return CorruptTree(f"{what}node {ordinal} of {self.whose} is damaged: {error}", session=self.number)
        node = f"node {ordinal} ({known['id'].tobytes()[:4].hex()}) of {self.whose}"
        where = {name: int(known[name]) for name in ("session", "segment", "offset")}
        return CorruptTree(f"{node} is damaged: {error}", **where)

    def parent_of(self, ordinal: int) -> int:
        return int(self._columns.parents[self._place(ordinal)])

    def parents(self) -> NDArray[np.int64]:
        return np.asarray(parents_of(self._columns, self._places)).astype(np.int64)

    def _place(self, ordinal: int) -> int:
        at = ordinal - self.first
        place = int(self._places[at]) if 0 <= at < len(self._places) else MISSING
        if place == MISSING:
            raise CorruptTree(f"node {ordinal} of {self.whose} is missing")
        return place

    def _places_of(self, ordinals: Sequence[int]) -> Sequence[int] | NDArray[np.int64]:
        if len(ordinals) > _FEW:
            at = np.array(ordinals) - self.first
            if at.min() >= 0 and at.max() < len(self._places):
                places: NDArray[np.int64] = self._places[at]
                if places.min() != MISSING:
                    return places
        return [self._place(ordinal) for ordinal in ordinals]

    def id_of(self, ordinal: int) -> bytes:
        identity: bytes = self._columns.entries[self._place(ordinal)]["id"].tobytes()
        return identity

    def children_of(self, ordinal: int) -> Sequence[int]:
        parents, order = self._sorted_parents()
        low, high = parents.searchsorted((ordinal, ordinal + 1)).tolist()
        children: list[int] = (order[low:high] + self.first).tolist()
        return children

    def ids(self) -> NDArray[np.uint8]:
        """The ids of all its nodes, in order: (n, 32), zeros where one is missing. Nothing is read for it."""
        ids = np.zeros((len(self._places), ID_BYTES), np.uint8)
        there = np.flatnonzero(self._places != MISSING)
        ids[there] = np.ascontiguousarray(self._columns.entries["id"][self._places[there]]).view(np.uint8).reshape(-1, ID_BYTES)
        return ids

    def differing(self, older: SessionNodes) -> tuple[Sequence[int], Sequence[int]]:
        count = max(len(self), len(older))
        mine, theirs = (np.zeros((count, ID_BYTES), np.uint8) for _ in range(2))
        mine[: len(self)], theirs[: len(older)] = self.ids(), older.ids()
        other = (mine != theirs).any(axis=1)  # an ordinal may stand for another node once the last ones were removed
        made, gone = other & mine.any(axis=1), other & theirs.any(axis=1)
        above = older.parents() - self.first
        inside = (above >= 0) & (above < len(above))
        below = np.flatnonzero(inside)
        topmost = gone[: len(older)].copy()
        topmost[below] &= ~gone[above[below]]
        return (np.flatnonzero(made) + self.first).tolist(), (np.flatnonzero(topmost) + self.first).tolist()

    def parents_outside(self) -> Sequence[int]:
        parents, _ = self._sorted_parents()
        outside: list[int] = np.unique(parents[: parents.searchsorted(self.first)]).tolist()
        return outside

    def _sorted_parents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The parents of all nodes, sorted, and which node each one is the parent of, counted from the first."""
        if self._by_parent is None:
            parents = self.parents()
            order = np.argsort(parents, kind="stable")
            self._by_parent = parents[order], order
        return self._by_parent

    def contents(self, children: Sequence[int]) -> Iterator[Content]:
        places = self._places[np.array(children, np.int64) - self.first]
        order = np.argsort(places, kind="stable")  # as they lie there
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            rows = self._columns.entries[places[batch]]
            if self._log.costly:
                records = iter(list(self._log.read_all(rows)))  # whoever looks at one may ask for another
            else:
                records = map(self._log.read, rows) if _scattered(rows) else self._log.read_all(rows)
            for at, record in zip(batch.tolist(), records, strict=True):
                yield children[at], *codec.content_of(record)

    def find(self, node_id: bytes, is_it: Callable[[int], bool] | None = None) -> int | None:
        if len(node_id) != ID_BYTES:
            return None
        wanted = np.frombuffer(node_id, np.uint64)[0]
        found: list[int] = []
        for at in self._alike(wanted).tolist():
            if self._places[at] != MISSING and self._columns.entries[self._places[at]]["id"].tobytes() == node_id:
                found.append(at + self.first)
        if is_it is None or len(found) < 2:
            return found[0] if found else None
        return next(filter(is_it, found), found[0])

    def _alike(self, wanted: np.uint64) -> NDArray[np.int64]:
        """Which ids begin with eight bytes."""
        self._asked += 1
        if self._by_id is None and self._asked > _FEW:
            heads = self._columns.ids(self._places)
            order = np.argsort(heads, kind="stable")
            self._by_id = heads[order], order
        if self._by_id is None:
            return np.flatnonzero(self._columns.ids(self._places) == wanted)
        heads, order = self._by_id
        return order[np.searchsorted(heads, wanted, "left") : np.searchsorted(heads, wanted, "right")]

    @property
    def annotated(self) -> bool:
        return bool(len(self._columns.places(codec.ANNOTATION, self.number)))

    def annotated_ordinals(self, since: int = -1) -> NDArray[np.int64]:
        places = self._columns.places(codec.ANNOTATION, self.number)
        later = places[self._columns.entries["key"][places] > since]
        return np.unique(self._columns.ordinals[later]).astype(np.int64)

    def annotations(self, ordinals: Sequence[int] | None, name: str | None) -> Iterator[codec.AnnotationRecord]:
        found, by_ordinal = self._sorted_annotations()
        if ordinals is not None:
            wanted = np.array(ordinals, np.uint32)
            starts, stops = (by_ordinal.searchsorted(wanted, side) for side in ("left", "right"))
            found = np.concatenate([found[:0], *(found[start:stop] for start, stop in zip(starts, stops, strict=True))])
        if name is not None:
            found = np.array(self._columns.named(found, codec.name_digest(name)), np.int64)
        rows = self._columns.entries[found]
        records = self._log.read_all(rows) if self._log.costly or len(rows) > _FEW else map(self._log.read, rows)
        for known in rows:
            try:
                record = codec.decode(next(records))
                if not isinstance(record, codec.AnnotationRecord) or record[:2] != (self.number, known["ordinal"]):
                    raise CorruptTree("it is that of something else")
            except CorruptTree as error:
                raise self._named(error, int(known["ordinal"]), known, "an annotation of ") from error
            yield record

    def _sorted_annotations(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Where annotations are, by the ordinals of their nodes and by version, since one may be copied behind a later one."""
        if self._by_node is None:
            places = self._columns.places(codec.ANNOTATION, self.number)
            ordinals = self._columns.ordinals[places]
            order = np.lexsort((self._columns.entries["key"][places], ordinals))
            self._by_node = places[order], ordinals[order]
        return self._by_node

    def find_key(self, parent: int, key: str) -> Sequence[int]:
        wanted, keys = codec.key_digest(key), self._columns.entries["key"]
        return [child for child in self.children_of(parent) if keys[self._places[child - self.first]] == wanted]


def _scattered(rows: NDArray[Any]) -> bool:
    """Whether records lie so far apart that to read what is between them costs more than a call for each."""
    stretches = (rows["segment"].astype(np.int64) << 32) + (rows["offset"] >> 20).astype(np.int64)
    return bool(np.count_nonzero(np.diff(stretches, prepend=-1)) * _FEW > len(rows))


class Anew(NamedTuple):
    """Somebody else wrote first, so that an operation was done once more. ``result``: what came of it."""

    result: Any


Wait = Callable[[], Anew | None]  # until a change is durable; raises StoreFailed where it never will be


class _Thread(threading.local):
    handed: list[Wait] | None = None  # the waits that it does not do itself


_thread: Final = _Thread()


@contextmanager
def waits_handed_over() -> Iterator[list[Wait]]:
    """What this thread would wait for meanwhile until a change of a tree is durable: called later, on any thread, in this order.

    What made the change returns before anybody sees it, and its caller is to tell nobody until the wait has returned.
    """
    before = _thread.handed
    handed = _thread.handed = list[Wait]()
    try:
        yield handed
    finally:
        _thread.handed = before


class Journal:
    """The sessions of one log. Any thread may call it; it is told what a session did by whoever holds that session's lock.

    ``waits``: whether a change is to be waited for before anybody sees it. ``follows``: whether others write, and this one looks
    after them. ``strict``: whether one damaged session record is an error to whoever lists the sessions.
    """

    def __init__(
        self, log: Log, path: str, features: FeatureStore, paths: PathCache, held: HeldNodes, *, strict: bool = True
    ) -> None:
        self.path = path
        self._strict = strict
        self.follows: bool = log.read_only
        self.waits: bool = log.durability == "commit"
        self._sound = not log.damaged
        self.identity: bytes | None = None  # of the store, where it can be written to
        self._log = log
        self._features = features
        self._paths = paths
        self._held = held
        self._lock = new_lock()
        self._dropping = new_lock()
        self.drops: int = 0  # so far, and perhaps some that failed
        self._underway: list[tuple[int, tuple[bytes, ...]]] = []  # ids of nodes that may not be durable, by what to wait for
        self._ids: dict[str, int] = {}  # numbers of sessions that were found or made, by id
        self._listed: dict[int, str | None] = {}  # ids of the sessions that the log was seen to hold; None: it is damaged
        self._indexes: WeakValueDictionary[tuple[int, bool], StoredIndex] = WeakValueDictionary()  # the newest
        self._living: WeakKeyDictionary[StoredIndex, tuple[int, bool]] = WeakKeyDictionary()  # all
        self._gone: set[int] = set()  # sessions that were dropped meanwhile
        self._begin()

    def _begin(self) -> None:
        """Look at what is there."""
        self._columns = columns = self._columns_now()
        later = np.flatnonzero((columns.kinds < codec.SESSION) | (columns.kinds > codec.ANNOTATION))
        if len(later) and not self.read_only:
            raise IncompatibleStore(f"{self.path} holds {len(later)} records of a later version; open it read_only", path=self.path)
        numbered = columns.sessions[np.concatenate([columns.places(codec.SESSION), columns.places(codec.OPENED)])]
        self._next = int(numbered.astype(np.int64).max(initial=-1)) + 1
        self._openings = self._last_opening(columns)

    def _last_opening(self, columns: Columns) -> int:
        """How many openings there were; to make a session is one. What a lost one was counted as does not come again."""
        made, opened = columns.places(codec.SESSION), columns.places(codec.OPENED)
        if not len(opened):
            return len(made)
        record = codec.decode(self._log.read(columns.entries[opened[-1]]))
        if not isinstance(record, codec.OpenedRecord):
            raise CorruptTree("the record of an opening is that of something else")
        return record.incarnation + int(np.count_nonzero(made > opened[-1]))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        features: FeatureStore,
        paths: PathCache,
        held: HeldNodes,
        *,
        durability: Durability,
        read_only: bool,
        strict: bool,
    ) -> Journal:
        """The journal in a directory. Raises StoreLocked, IncompatibleStore, CorruptTree."""
        log = SegmentLog.open(path, read_only=read_only, durability=durability, strict=strict, entry_of=prefix_of)
        try:
            journal = cls(log, os.fspath(path), features, paths, held, strict=strict)
            if not (read_only or log.damaged):
                journal.identity = log.identity
            return journal
        except BaseException:
            log.close()
            raise

    @property
    def read_only(self) -> bool:
        return self._log.read_only

    @property
    def leading(self) -> bool:
        """Whether this thread is in the middle of writing to the disk."""
        return self._log.leading

    @property
    def damaged(self) -> tuple[tuple[int, int, int], ...]:
        """(segment, start, stop) of every stretch that opening found damaged."""
        return self._log.damaged

    @property
    def losses(self) -> tuple[tuple[int, int, int], ...]:
        """Those of them that may have held records which are lost."""
        return self._log.losses

    @property
    def damaged_sessions(self) -> tuple[int, ...]:
        """Numbers of the sessions of which there are records, but not their own, or one that listing them found damaged."""
        columns = self._columns
        of_sessions = np.isin(columns.kinds, (codec.NODE, codec.HEAD, codec.ANNOTATION))
        lost = np.setdiff1d(columns.sessions[of_sessions], columns.sessions[columns.places(codec.SESSION)])
        damaged = [number for number, session_id in list(self._listed.items()) if session_id is None]
        return tuple(sorted({*lost.tolist(), *damaged}))

    @property
    def failed(self) -> bool:
        """Whether nothing is written any more, for good."""
        return self._log.failed

    @property
    def lag(self) -> tuple[int, int]:
        """How many changes were taken and are not known to be on disk, and about how many bytes they are."""
        return self._log.lag

    @property
    def recovered_bytes(self) -> int:
        return self._log.recovered_bytes

    def is_durable(self, number: int) -> bool | None:
        """Whether what :meth:`changed` gave a number for is on disk; None while that is not known."""
        return self._log.is_durable(number)

    def wait(self, number: int, then: Callable[[], None], again: Callable[[], object]) -> Anew | None:
        """Until it is on disk, and do ``then``, whether it is or not; or hand that over (:func:`waits_handed_over`).

        ``again``: done at last where somebody else wrote first. Raises StoreFailed where it never will be on disk, naming the
        nodes.
        """
        if _thread.handed is None:
            return self._wait(number, then, again)
        _thread.handed.append(partial(self._wait, number, then, again))
        return None

    def _wait(self, number: int, then: Callable[[], None], again: Callable[[], object]) -> Anew | None:
        try:
            self._log.wait(number)
        except Overtaken:
            pass
        except StoreFailed as error:
            raise self._naming(error) from error.__cause__
        else:
            return None
        finally:
            then()
        return Anew(again())

    def settles(self, number: int) -> bool:
        """Wait until it is known whether it is on disk: whether it is."""
        with suppress(StoreFailed):
            self._log.wait(number)
        return bool(self._log.is_durable(number))

    def relieve(self) -> None:
        """Where changes come faster than the disk takes them, wait for it."""
        self._log.relieve()

    @property
    def many_write(self) -> bool:
        """Whether other processes write to the same sessions."""
        return False

    def is_current(self, number: int) -> bool:
        """Whether the session in hand has all there is by now; whoever calls it holds that session's lock."""
        return False

    def check_tenant(self, namespace: Namespace, what: str) -> None:
        """Raises IncompatibleStore where this is a store of one tenant, and ``what`` is another's."""

    def view(self, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        """As :meth:`tree`, for somebody who only looks."""
        return self.tree(number)

    def drops_of(self, number: int | None) -> Any:
        """What :meth:`create` is to be given of a session that is forked; whoever calls it holds that session's lock."""
        return self.drops

    def flush(self) -> None:
        """Until everything is on disk. Raises StoreFailed naming the nodes that never will be."""
        try:
            self._log.flush()
        except StoreFailed as error:
            raise self._naming(error) from error.__cause__
        self._forget_durable()

    def _naming(self, error: StoreFailed) -> StoreFailed:
        """The same error with the nodes that it is about."""
        numbers = getattr(error, "numbers", ())
        lost = [node for number, nodes in self._underway.copy() if number in numbers for node in nodes]
        some = ", ".join(node[:4].hex() for node in lost[:8])
        named = f"; nodes {some}{f' and {len(lost) - 8} more' if len(lost) > 8 else ''}" if lost else ""
        return type(error)(f"{error}{named}", numbers=numbers, nodes=tuple(lost))

    def _remember(self, number: int, nodes: tuple[bytes, ...]) -> int:
        self._underway.append((number, nodes))
        if not len(self._underway) % _REMEMBERED:
            self._forget_durable()
        return number

    def _forget_durable(self) -> None:
        underway, durable = self._underway, self._log.durable
        with self._lock:
            known = next((at for at, (waiting, _) in enumerate(underway) if waiting > durable), len(underway))
            del underway[:known]

    def close(self) -> None:
        self._log.close()

    @property
    def log(self) -> CompactLog:
        """Where the records are, of a journal that can be written to."""
        self.check_writable()
        return cast(CompactLog, self._log)

    @property
    def last_opening(self) -> codec.OpenedRecord:
        """Where to count on from: no number of a session comes again, and no incarnation."""
        with self._lock:
            number, openings = self._next - 1, self._openings
        return codec.OpenedRecord(max(0, number), openings)

    def tips(self, columns: Columns) -> dict[int, tuple[int, int] | None]:
        """Of each session, what it was forked from."""
        sessions = columns.places(codec.SESSION)[::-1].tolist()  # of several records of one, the first counts
        return {int(columns.sessions[place]): self._session(columns, place).tip for place in sessions}

    def with_tip(self, session: Any, tip: tuple[int, int] | None) -> bytes:
        """The record of a session, given its entry, as a fork from there."""
        return codec.encode(self._read(session, codec.SessionRecord)._replace(tip=tip))

    def version_of(self, head: Any) -> int:
        """Of the entry of a head."""
        return self._read(head, codec.HeadRecord, "a head of ").version

    def named(self, error: CorruptTree, columns: Columns) -> CorruptTree | None:
        """The same error, naming the node that it is about; None where it does not say where in the log one is."""
        segment, offset = getattr(error, "segment", -1), getattr(error, "offset", -1)
        places = np.flatnonzero((columns.entries["segment"] == segment) & (columns.entries["offset"] == offset))
        if not len(places) or columns.kinds[places[0]] != codec.NODE:
            return None
        _, number, ordinal, _, node_id, *_ = columns.entries[places[0]].item()
        try:
            whose = f"session {self._session(columns, columns.places(codec.SESSION, number)[0]).session_id!r}"
        except (CorruptTree, IndexError):
            whose = f"session {number}"
        what = f"node {ordinal} ({node_id[:4].hex()}) of {whose} is damaged: {error}"
        return CorruptTree(what, session=number, segment=segment, offset=offset)

    def moved(self) -> None:
        """The log begins elsewhere by now: let what is open know where its nodes are, so that nothing holds the old places."""
        self._move(self.columns())

    def _move(self, columns: Columns) -> None:
        with self._lock:
            living = list(self._living.items())
        for index, (number, hiding) in living:
            old = index.source
            assert isinstance(old, SessionNodes)
            if old.lies_in(columns):
                continue
            with suppress(CorruptTree):  # it goes on reading where it did
                drops = self.dropped(columns, number) if hiding else ()
                new = self._nodes(columns, old.first, number, old.whose, drops)
                told = self._told(columns, number, hiding) if len(new) <= len(old) else None  # there are more by now
                new.resize(len(old))
                if new.same_as(old):
                    index.source, index.told = new, told

    def columns(self, number: int | None = None) -> Columns:
        """What the log has by now, at least of a session, if it is of one."""
        if self.follows:
            self._log.refresh()
        known = self._columns
        if known.lease is self._log.lease and len(self._log.entries()) == len(known.entries):
            return known
        columns = self._columns_now(known)
        with self._lock:
            if columns.age > self._columns.age:  # else somebody has seen more
                self._columns = columns
        if self.follows and columns.lease is not known.lease:
            self._move(columns)
        return columns

    def _columns_now(self, known: Columns | None = None) -> Columns:
        """Never without the lease that keeps its records, though perhaps with an earlier one, which keeps them too."""
        while True:
            lease, entries = self._log.lease, self._log.entries()
            if lease is self._log.lease:
                same = known is not None and known.lease is lease and len(known.entries) <= len(entries)
                return Columns(entries, lease, known if same else None)

    # Reading

    def number_of(self, session_id: str) -> int | None:
        """The number of a stored session."""
        columns = self.columns() if self.follows else self._columns
        number = self._ids.get(session_id)
        if number is not None and self.follows and not len(columns.places(codec.SESSION, number)):
            number = None
        if number is None or self._is_gone(columns, number):
            number = None
            for place in columns.sessions_named(codec.name_digest(session_id)):
                if not self._is_gone(columns, int(columns.sessions[place])):
                    number = int(columns.sessions[place])
                    with self._lock:
                        self._ids[session_id] = number
        return number

    def _is_gone(self, columns: Columns, number: int) -> bool:
        return number in columns.dropped_sessions or number in self._gone

    def let_go(self) -> None:
        """Hold nothing that can be read again, and that nobody has in hand."""

    def forget_numbers(self) -> None:
        """Where many sessions are known by their ids, find those that are there to be found by the log alone from now on."""
        if len(self._ids) <= _BATCH:
            return
        columns = self.columns()
        with self._lock:
            numbers = np.fromiter(self._ids.values(), np.uint32, len(self._ids))
            new = ~np.isin(numbers, columns.sessions[columns.places(codec.SESSION)])
            self._ids = dict(itertools.compress(self._ids.items(), new))

    def session_ids(self) -> dict[int, str]:
        """By their numbers, in the order they were created.

        Raises CorruptTree naming the session whose record is damaged; where that is not to be strict, those beside it.
        """
        columns, listed = self.columns() if self.follows else self._columns, self._listed
        found: dict[int, str] = {}
        for place in columns.places(codec.SESSION).tolist():
            number = int(columns.sessions[place])
            if self._is_gone(columns, number):
                continue
            if number not in listed:
                try:
                    listed[number] = self._session(columns, place).session_id
                except CorruptTree:
                    if self._strict:
                        raise
                    listed[number] = None
            if (session_id := listed[number]) is not None:
                found[number] = session_id
        for session_id, number in () if self.follows else list(self._ids.items()):
            if listed.get(number, "") is not None and not self._is_gone(columns, number):
                found[number] = session_id
        return {number: found[number] for number in sorted(found)}

    def names_of(self, numbers: Sequence[int]) -> dict[int, str]:
        """The ids of stored sessions by number, without those whose records are damaged."""
        if not numbers:
            return {}
        columns = self.columns()
        places = columns.places(codec.SESSION)
        found: dict[int, str] = {}
        for place in places[np.isin(columns.sessions[places], numbers)].tolist():
            with suppress(CorruptTree):
                found.setdefault(int(columns.sessions[place]), self._session(columns, place).session_id)
        return found

    def tip_of(self, number: int) -> tuple[int, int] | None:
        """Of a stored fork: the number of the session it was made from, and the ordinal of the node it was made at."""
        columns = self.columns(number)
        places = columns.places(codec.SESSION, number)
        return self._session(columns, places[0]).tip if len(places) else None

    def tree(self, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        """The tree of a stored session, as it is now, and its pins: ordinals by id. Nodes are read when they are asked for."""
        if not self.read_only:
            with suppress(StoreFailed):  # what is there can be read after a failure too
                self._log.flush()  # or what a closed session wrote a moment ago might not be there
        return self.stored(number)

    def stored(self, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        """The same of what is on disk."""
        return self.stored_at(self.columns(number), number)

    def stored_at(self, columns: Columns, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        """The same as ``columns`` have it."""
        chain, tips = self._indexes_of(columns, number)
        index = chain[-1]
        top = NodeIndex(index.root, index.limits, base=index, base_count=index.count)
        heads: dict[str, StoredHead] = {}
        moves = 0
        places = columns.places(codec.HEAD, number)
        _, last = np.unique(columns.ids(places)[::-1], return_index=True)  # of each name
        damage = max(((segment, start) for segment, start, _ in self._log.losses), default=(0, 0))
        for place in places[::-1][last]:
            known = columns.entries[place]
            record = self._read_at(columns, place, codec.HeadRecord, "a head of ")
            moves = max(moves, record.version)
            if record.ordinal is not None:
                uncertain = damage > (int(known["segment"]), int(known["offset"]))
                heads[record.name] = StoredHead(index, record.ordinal, record.version, uncertain)
        said = columns.entries["key"][columns.places(codec.ANNOTATION, number)]  # their versions
        told = StoredAnnotations(chain, tips) if any(index.source.annotated for index in chain) else None
        return stored_tree(top, top.count, heads, moves, told, int(said.max(initial=0))), self._pinned(columns, number)

    def _indexes_of(self, columns: Columns, number: int) -> tuple[list[StoredIndex], list[int | None]]:
        """The nodes of a session, as far as the log has them, and before them those of the sessions that it was forked from.

        And of each what it was forked from, by ordinal.
        """
        chain: list[codec.SessionRecord] = []  # of a fork, also the session it was forked from, and so on
        at: int | None = number
        found: list[Columns] = []
        while at is not None:
            columns = self._within(columns, at)
            found.append(columns)
            mine = columns.places(codec.SESSION, at)
            if not len(mine):
                what = f"session {chain[-1].session_id!r} goes on from session {at} of which" if chain else f"of session {at}"
                raise CorruptTree(f"{what} no sound record is left", session=at)
            record = self._session(columns, mine[0])
            chain.append(record)
            if record.tip is not None and record.tip[0] >= at:
                raise CorruptTree(f"session {at} is a fork of session {record.tip[0]}, which is none before it")
            at = None if record.tip is None else record.tip[0]
        indexes: list[StoredIndex] = []
        for record, columns in zip(reversed(chain), reversed(found), strict=True):
            index = self._opened_index(columns, record, indexes[-1] if indexes else None, whole=record.session != number)
            indexes.append(index)
        return indexes, [None if record.tip is None else record.tip[1] for record in reversed(chain)]

    def _within(self, columns: Columns, number: int) -> Columns:
        """What is known of a session where that of others is known."""
        return columns

    def _opened_index(
        self, columns: Columns, record: codec.SessionRecord, source: StoredIndex | None, *, whole: bool
    ) -> StoredIndex:
        """The nodes of one session, over the path of one of ``source`` where it is a fork.

        ``whole``: with those that were dropped, since a fork may share them.
        """
        drops = () if whole else self.dropped(columns, record.session)
        key = record.session, bool(drops)
        with self._lock:
            old = self._indexes.get(key)
            if old is not None and old.told == self._told(columns, *key):
                return old
        if record.tip is None or source is None:
            rules = scheme(record.scheme, **dict(record.params))
            lineage = Lineage(rules, record.namespace, record.model_fingerprint, weakref.ref(self._features))
            tip, root, first = None, make_root(lineage, Extent(None, None, 0, b"", self._paths)), 1
        else:
            try:
                tip = source.node(record.tip[1])
            except CorruptTree as error:
                what = f"session {record.session_id!r} goes on from what cannot be read: {error}"
                raise CorruptTree(what, session=record.session) from error
            root, first = tip.ancestor(0), tip.depth + 1
        if root.id != record.root_id:
            raise CorruptTree(f"session {record.session_id!r} has root {record.root_id[:4].hex()}, not {root.id[:4].hex()}")
        index = StoredIndex(
            root,
            record.limits,
            self._nodes(columns, first, record.session, f"session {record.session_id!r}", drops),
            self._held,
            tip=tip,
        )
        index.told = self._told(columns, *key)
        with self._lock:
            self._indexes[key] = index
            self._living[index] = key
        return index

    def _told(self, columns: Columns, number: int, drops: bool) -> tuple[int, ...]:
        """What an index of a session was made of: as long as that is the same, so is the index."""
        beginning = 0 if columns.lease is None else columns.lease.first
        kinds = (codec.NODE, codec.ANNOTATION, *((codec.DROP,) if drops else ()))
        return beginning, *(len(columns.places(kind, number)) for kind in kinds)

    def dropped(self, columns: Columns, number: int) -> tuple[int, ...]:
        """The ordinals that a session no longer shows, without those below them."""
        ordinals: set[int] = set()
        for place in columns.places(codec.DROP, number):
            ordinals.update(self._read_at(columns, place, codec.DropRecord, "a drop in ").ordinals)
        return tuple(sorted(ordinals))

    def _pinned(self, columns: Columns, number: int) -> dict[bytes, int]:
        pins: dict[bytes, int] = {}
        for place in columns.places(codec.PIN, number):
            entry = columns.entries[place]
            if entry["key"]:
                pins[entry["id"].tobytes()] = int(entry["ordinal"])
            else:
                pins.pop(entry["id"].tobytes(), None)
        return pins

    def _nodes(self, columns: Columns, first: int, number: int, whose: str, drops: Sequence[int] = ()) -> SessionNodes:
        """Nodes by ordinal, each once; where one is missing, it is when it is asked for."""
        places = columns.places(codec.NODE, number)
        if not np.array_equal(columns.ordinals[places], np.arange(first, first + len(places))):
            _, places = columns.by_ordinal(places, first)  # some were moved, told of more than once, or are missing
        if drops:
            places = np.where(below(drops, parents_of(columns, places), first), MISSING, places)
        return SessionNodes(self._log, columns, places, first, number, whose)

    def _session(self, columns: Columns, place: int) -> codec.SessionRecord:
        return self._read_at(columns, place, codec.SessionRecord)

    def _read_at(self, columns: Columns, place: int, kind: type[R], what: str = "") -> R:
        return self._read(columns.entries[place], kind, what)

    def _read(self, known: Any, kind: type[R], what: str = "") -> R:
        """The record of an entry, of a session or of ``what`` of one. Raises CorruptTree naming the session."""
        number, segment, offset = (int(known[name]) for name in ("session", "segment", "offset"))
        try:
            record = codec.decode(self._log.read(known))
            if not isinstance(record, kind) or record.session != number:
                raise CorruptTree("it is that of something else")
        except CorruptTree as error:
            message = f"the record of {what}session {number} is damaged: {error}"
            raise CorruptTree(message, session=number, segment=segment, offset=offset) from error
        return record

    # Writing

    def create(self, session_id: str, tree: SessionTree, tip: tuple[int, int] | None, drops: Any = 0) -> tuple[int, int, int]:
        """Record a new session with all that its tree holds: its number, which opening of the store this is, what to wait for.

        ``tip``: whose node's path it shares, ``drops``: what :meth:`drops_of` said of that session then. Raises Overtaken where
        there were more since: what it shares may have been dropped. Waits where changes are waited for.
        """
        self.check_writable()
        root = tree.root
        with self._lock:
            number, self._next = self._next, self._next + 1
        rules = root.scheme
        # What a fork is of follows from the session it was forked from.
        constants = (rules.name, tuple(sorted(rules.params.items())), root.namespace, root.model_fingerprint)
        what = constants if tip is None else ("", (), Namespace(), "")
        record = codec.SessionRecord(number, session_id, *what, tree.limits, root.id, tip)
        first = 1 if tip is None else tree._index.base_count
        records = _with_prefixes(
            [codec.encode(record), *self._node_records(number, tree, first), *said_in(number, tree, tip is None)]
        )
        with self._dropping:  # openings are written in the order in which they are counted
            if tip is not None and drops != self.drops:
                raise Overtaken(f"{self.path}: something was dropped meanwhile")
            with self._lock:
                self._openings += 1
                incarnation = self._openings
            waiting = self._log.enqueue(records)
        if self.waits:
            self._log.wait(waiting)
        with self._lock:
            self._ids[session_id] = number
        return number, incarnation, waiting

    def pin(self, number: int, ordinal: int, node_id: bytes, pinned: bool, waiting: int) -> None:
        """Record that a node, which rests on ``waiting``, is pinned or no longer. Waits for it where changes are waited for."""
        self._record(codec.PinRecord(number, ordinal, node_id, pinned), waiting)

    def drop(
        self,
        number: int,
        ordinals: Sequence[int],
        waiting: int = 0,
        told: Sequence[object] = (None,),
        expected: object = None,
    ) -> None:
        """Record that a session no longer shows some nodes and what is below them; [0]: that it is gone itself. Waits likewise.

        ``told``: holds ``expected`` for as long as nothing else is recorded. Raises Overtaken.
        """
        self.drop_all({number: ordinals}, waiting, told, expected)

    def drop_all(
        self,
        dead: Mapping[int, Sequence[int]],
        waiting: int = 0,
        told: Sequence[object] = (None,),
        expected: object = None,
    ) -> None:
        """The same of many sessions, by number."""
        if self._dropping._is_owned():  # see create
            raise Unsupported("nothing is dropped by a signal handler that comes in while its thread makes or opens a session")
        records = [codec.DropRecord(number, tuple(sorted(set(ordinals)))) for number, ordinals in dead.items()]
        gone = {number for number, ordinals in dead.items() if 0 in ordinals}
        try:
            with self._dropping:
                self.drops += 1
                try:
                    self._gone |= gone
                    taken = self._enqueue(records, waiting, told, expected)
                except SessionTreeError:
                    raise
                except BaseException:  # an interrupt: nobody knows whether it was taken, so it is told again
                    self._enqueue(records, waiting)
                    raise
            if self.waits:
                self._log.wait(taken)
        except SessionTreeError:
            self._gone -= gone
            raise
        if gone:
            with self._lock:
                self._ids = {session_id: number for session_id, number in self._ids.items() if number not in gone}

    def unreachable(self, number: int, recent: int, held: Iterable[int], columns: Columns | None = None) -> list[int]:
        """Ordinals of the nodes of a session that nothing leads to: no head, no pin, nothing ``held``, none of the last ``recent``.

        Of those that lie below each other, the topmost. Looks at what is written, or at ``columns``.
        """
        columns = self.columns(number) if columns is None else columns
        first, places = columns.by_ordinal(columns.places(codec.NODE, number))
        parents = parents_of(columns, places)
        heads = columns.places(codec.HEAD, number)
        last = {columns.entries[place]["id"].tobytes(): int(columns.ordinals[place]) for place in heads}
        shown = (places != MISSING) & ~below(self.dropped(columns, number), parents, first)
        latest = (np.flatnonzero(shown)[-recent:] + first).tolist() if recent else ()
        leads = {*last.values(), *self._pinned(columns, number).values(), *held, *latest}
        dead = shown & ~above(leads, parents, first)
        above_them = np.array(parents, np.int64) - first
        topmost = dead & ((above_them < 0) | ~dead[np.clip(above_them, 0, max(len(dead) - 1, 0))])
        return (np.flatnonzero(topmost) + first).tolist()

    def drop_unreachable(self, numbers: Iterable[int], recent: int, columns: Columns | None) -> dict[int, list[bytes]]:
        """Drop what is :meth:`unreachable` in sessions that nobody has in hand: ids by session, without those below them."""
        assert columns is not None
        found = ((number, self.unreachable(number, recent, (), columns)) for number in numbers)
        dead = {number: ordinals for number, ordinals in found if ordinals}
        for number, ordinals in dead.items():
            self._keep_prefixes(columns, number, ordinals)
        if dead:
            self.drop_all(dead)
        return {number: self._ids_of(columns, number, ordinals) for number, ordinals in dead.items()}

    def _keep_prefixes(self, columns: Columns, number: int, ordinals: Iterable[int]) -> None:
        """Before nodes go: record what is said of them of those, too, that are prefixes of them and stay."""
        if len(columns.places(codec.ANNOTATION, number)):
            tree, _ = self.stored_at(columns, number)
            kept = tree._keeping_prefixes([tree._index.node_at(ordinal) for ordinal in ordinals if ordinal])
            if kept is not tree:
                self._log.enqueue(_with_prefixes(_annotation_records(number, kept, kept._said_since(tree))))

    def _ids_of(self, columns: Columns, number: int, ordinals: Iterable[int]) -> list[bytes]:
        """The ids of nodes of a session, of those that are there."""
        first, places = columns.by_ordinal(columns.places(codec.NODE, number))
        there = (places[ordinal - first] for ordinal in ordinals if first <= ordinal < first + len(places))
        return [columns.entries[place]["id"].tobytes() for place in there if place != MISSING]

    def _record(self, record: codec.Record, waiting: int) -> None:
        taken = self._enqueue([record], waiting)
        if self.waits:
            self._log.wait(taken)

    def _enqueue(
        self, records: Sequence[codec.Record], waiting: int, told: Sequence[object] = (None,), expected: object = None
    ) -> int:
        self.check_writable()
        return self._log.enqueue(_with_prefixes(list(map(codec.encode, records))), waiting, told, expected)

    def opened(self, number: int) -> int:
        """Record that a session is opened to be written to: which opening of the store that is, counted from 1."""
        try:
            with self._dropping:  # see create
                with self._lock:
                    self._openings += 1
                    incarnation = self._openings
                if self.read_only or self._log.damaged:
                    return incarnation
                waiting = self._log.enqueue(_with_prefixes([codec.encode(codec.OpenedRecord(number, incarnation))]))
            if self.waits:
                self._log.wait(waiting)
        except StoreFailed:
            if not self._log.failed:  # what can be written to later must not be this opening
                raise
        return incarnation

    def alias(self, namespace: Namespace, alias: str, identity: bytes | None) -> bytes | None:
        """Record what an alias names; None: nothing any more. Waits for it where changes are waited for.

        What it names then: where others write, perhaps what one of them said first.
        """
        self._record(codec.AliasRecord(namespace, alias, identity), 0)
        return identity

    def aliased(self, namespace: Namespace, alias: str) -> bytes | None:
        """What an alias named when the log was looked at."""
        columns = self._columns
        places = columns.named(columns.places(codec.ALIAS), codec.alias_digest(namespace, alias))
        if not places:
            return None
        record = codec.decode(self._log.read(columns.entries[places[-1]]))
        if not isinstance(record, codec.AliasRecord) or (record.namespace, record.alias) != (namespace, alias):
            raise CorruptTree(f"the record of alias {alias!r} is that of something else")
        return record.identity

    def aliases(self) -> dict[tuple[Namespace, str], bytes | None]:
        """What each stored alias names; None: nothing any more."""
        columns = self.columns()
        records = (codec.decode(self._log.read(columns.entries[place])) for place in columns.places(codec.ALIAS))
        return {(each.namespace, each.alias): each.identity for each in records if isinstance(each, codec.AliasRecord)}

    def index_bytes(self) -> int:
        """Bytes of what finds records and sessions, and of records that wait for the disk."""
        columns = self._columns
        entries = self._log.entries()
        rows = entries if entries.base is None else entries.base  # with the room behind them
        listed = getsizeof(self._listed) + _LISTED_BYTES * len(self._listed)
        return int(rows.nbytes) + columns.nbytes + getsizeof(self._ids) + listed + self.lag[1]

    def check_writable(self) -> None:
        """Raises Unsupported where it is only read, CorruptTree where damage was found."""
        if self.read_only:
            raise Unsupported(f"the store at {self.path} was opened to be read")
        if self._log.damaged:
            raise CorruptTree(f"the store at {self.path} is damaged in {len(self._log.damaged)} places; it can only be read")

    def changed(self, number: int, before: SessionTree, after: SessionTree, waiting: int, told: Sequence[object]) -> int:
        """Record what ``after`` has that ``before`` had not, together: what to wait for until it is durable.

        ``waiting``: what was to be waited for before; ``told``: holds ``before`` for as long as nothing else is recorded. Raises
        WriteLost where what was before was lost, Overtaken, StoreFailed.
        """
        try:
            if not self._sound:
                self.check_writable()
            if after._heads is not before._heads or after._count - before._count != 1 or after._said != before._said:
                return self._changed(number, before, after, waiting, told)
            index, ordinal = after._index, before._count  # one node: by far the commonest case
            node = index.nodes[ordinal - index.base_count]
            parent = index.find_ordinal(node.parent, ordinal)  # type: ignore[arg-type]  # none is a root
            assert parent is not None
            digest = codec.key_digest(node.key)
            record = codec.node_parts(number, ordinal, parent, node)
            prefix = _PREFIX.pack(codec.NODE, number, ordinal, parent, node.id, digest)
            return self._remember(self._log.enqueue(((record, prefix),), waiting, told, before), (node.id,))
        except StoreFailed:
            self.check_writable()  # which says so where it is only read
            raise

    def attached(
        self,
        number: int,
        before: SessionTree,
        node: Node,
        turn: Turn,
        details: Details,
        waiting: int,
        told: Sequence[object],
        head: tuple[str, int] | None = None,
    ) -> int:
        """As :meth:`changed`, where all that is new behind ``before`` is ``node``, which is made of ``turn`` and ``details``.

        ``head``: of one that was moved to it, its name and its version.
        """
        try:
            if not self._sound:
                self.check_writable()
            index, ordinal, parent = before._index, before._count, node.parent
            assert parent is not None
            above = index.by_id.get(parent.id)
            if above is None or above >= ordinal:
                above = index.find_ordinal(parent, ordinal)
                assert above is not None
            if turn.media:
                turn = turn._replace(runs=node.runs)
            node_id, key = turn[0], turn[5]
            digest = 0 if key is None else codec.digest_of_key(key)
            record = codec.encode_turn(number, ordinal, above, *turn, details, digest)
            records = [(record, _PREFIX.pack(codec.NODE, number, ordinal, above, node_id, digest))]
            if head is not None:
                name, version = head
                records += _with_prefixes([codec.encode(codec.HeadRecord(number, name, ordinal, version))])
            return self._remember(self._log.enqueue(records, waiting, told, before), (node_id,))
        except StoreFailed:
            self.check_writable()  # which says so where it is only read
            raise

    def _changed(self, number: int, before: SessionTree, after: SessionTree, waiting: int, told: Sequence[object]) -> int:
        records = self._node_records(number, after, before._count) if after._count > before._count else []
        nodes = tuple(codec.entry_of(record).id for record in records)
        if after._heads is not before._heads:
            records += map(codec.encode, self._head_records(number, before, after))
        records += _annotation_records(number, after, after._said_since(before))
        return self._remember(self._log.enqueue(_with_prefixes(records), waiting, told, before), nodes)

    def _head_records(self, number: int, before: SessionTree, after: SessionTree) -> list[codec.HeadRecord]:
        """What to record of the heads that were moved or dropped."""
        records = []
        for name, head in after._moves_since(before):
            at = None if isinstance(head, Dropped) else after._index.find_ordinal(head.node, after._count)
            records.append(codec.HeadRecord(number, name, at, head.version))
        return records

    def _node_records(self, number: int, tree: SessionTree, first: int) -> list[bytes]:
        """Records of the nodes of a tree from ordinal ``first`` on."""
        records = []
        index, count = tree._index, tree._count
        nodes = index.nodes_from(first, count) if first >= index.lowest else itertools.islice(index.walk(count), first, None)
        for ordinal, node in enumerate(nodes, first):
            above = None if node.parent is None else index.find_ordinal(node.parent, count)
            assert above is not None
            records.append(codec.encode_node(number, ordinal, above, node))
        return records


def _annotation_records(number: int, tree: SessionTree, said: Iterable[Said]) -> list[bytes]:
    """Records of what is said of nodes of a tree."""
    records = []
    for node_id, name, value in said:
        ordinal = tree._index.find_ordinal(tree.node(node_id), tree._count)
        assert ordinal is not None
        records.append(codec.encode(codec.AnnotationRecord(number, ordinal, node_id, name, value, tree._said)))
    return records


def said_in(number: int, tree: SessionTree, whole: bool) -> list[bytes]:
    """Records of the annotations that a new session begins with: those that it says itself; ``whole``: all that are said in it."""
    log = tree._log
    if log is None:
        return []
    if not whole:
        return _annotation_records(number, tree, log.since(tree._said, log.base, log.base_count))
    nodes = list(tree)
    said = zip(nodes, tree._read_said(nodes, None), strict=True)
    return _annotation_records(number, tree, [Said(node.id, *each) for node, values in said for each in values.items()])
