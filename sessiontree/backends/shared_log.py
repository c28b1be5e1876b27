"""The sessions of a backend that many processes write, as a log for :class:`~sessiontree.journal.Journal`.

What a session writes is put in line, and whoever is first to wait for something writes all that is in line by then, in one call of
the backend: so threads that wait together commit together, and no thread is woken for one that waits alone. Whoever has written
calls the first of those who wait for what is in line now, to write that, and those who waited for what is written, and no others.

Of each session it knows what it saw last, its rows and refs, and two versions: ``version``, that of what it knows, and ``pending``,
that of the session in hand once all that is in line for it is written. A write is made for ``pending``, so it is refused where
somebody else wrote meanwhile; then everything behind it in line is lost too, ``pending`` is forgotten, and nothing is put in line
again before the session has looked anew (:meth:`claim`).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.base import Durability, Overtaken, Records, WriteLost
from sessiontree.backends.frames import ENTRY
from sessiontree.backends.shared import LONG, Backend, Change, Look, NewNode, NodeRow, shown
from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree, SessionTreeError, StoreFailed, UnknownNode, UnknownSession
from sessiontree.locks import new_lock

_PREFIX: Final = Struct("<BIII32sQ")
_VERSION: Final = Struct(">Q")
_TOGETHER: Final = 1024  # writes in one call
_TOGETHER_BYTES: Final = 16 * 2**20
_AT_ONCE: Final = 4096  # records read in one call
_SESSIONS: Final = 4096  # that are remembered
_LOST: Final = 65_536  # numbers of writes that were refused, remembered
_FIELDS: Final = ("ordinal", "parent", "id", "key")
_OVERHEAD: Final = 200  # bytes of a record in the cache beside its own
HEAD, PIN, DROP = b"h", b"p", b"d"

# Of a record: its session, how often something had been removed from that, a node's ordinal, and of an annotation of that node the
# digest of its name, and its version.
Place = tuple[int, int, int] | tuple[int, int, int, bytes, int]


class SharedLease(NamedTuple):
    """What entries are of. ``first``: how often something had been removed. ``records``: as many as there may ever have been."""

    first: int
    records: int = 2**31


class Known:
    """What is known of a session."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.version: int = -1  # of what follows; before it was looked at
        self.removals: int = 0
        self.drops: int = 0
        self.gone: bool = False
        self.record: bytes = b""
        self.refs: dict[bytes, bytes] = {}
        self.last: int = 0  # the last ordinal
        self.pending: int | None = None  # the version of the session in hand, with all that is in line
        self.told = 0  # the last ordinal that the session in hand has put in line
        self.seen = 0  # drops that the session in hand knows of
        self._rows: NDArray[Any] = _rows(())
        self._more: list[NodeRow] = []  # behind them
        self._snapshot: Snapshot | None = None

    @property
    def since(self) -> tuple[int, int, int] | None:
        return None if self.version < 0 else (self.version, self.removals, self.last)

    def take(self, look: Look) -> None:
        """Know what a look brought, which was made since what is known."""
        if look.whole:
            self._rows, self._more, self.refs, self.last = _rows(()), [], {}, 0
        self._add(look.nodes, look.refs)
        self.record, self.version, self.removals = look.record, look.version, look.removals
        self.drops, self.gone = look.drops, look.gone

    def fold(self, change: Change) -> None:
        """Know what was written from here, unless a look has brought it."""
        if self.version != change.before:
            return
        self._add([node.row for node in change.nodes], change.refs)
        self.version, self.gone = change.after, self.gone or change.gone

    def _add(self, nodes: Sequence[NodeRow], refs: Mapping[bytes, bytes]) -> None:
        if nodes:
            self._more += nodes
            self.last = nodes[-1].ordinal
        self.refs.update((name, shown(name, record)) for name, record in refs.items())
        self._snapshot = None

    def snapshot(self) -> Snapshot:
        """All that is known, as it is now."""
        if self._snapshot is None:
            if self._more:
                self._rows = np.concatenate([self._rows, _rows(self._more)])
                self._more = []
            rows, records = self._rows, [self.record, *self.refs.values()]
            entries = np.zeros(len(rows) + len(records), ENTRY)
            nodes, others = entries[: len(rows)], entries[len(rows) :]
            nodes["kind"] = codec.NODE
            for name in _FIELDS:
                nodes[name] = rows[name]
            for at, (ref, record) in enumerate([(b"", self.record), *self.refs.items()]):
                entry = codec.entry_of(record)
                if ref[:1] == LONG and ref != annotation_ref(entry.ordinal, entry.id):
                    raise CorruptTree(f"{ref!r} in session {self.number} is that of something else", session=self.number)
                others[at] = (*entry[:4], np.void(entry.id), entry.key, 0, at, 0, 0)
            entries["session"], entries["segment"] = self.number, self.removals
            self._snapshot = Snapshot(entries, records)
        return self._snapshot

    @property
    def nbytes(self) -> int:
        refs = sum(len(name) + len(record) + _OVERHEAD for name, record in self.refs.items())
        rows = int(self._rows.nbytes) + len(self._more) * _OVERHEAD
        return refs + rows + (0 if self._snapshot is None else int(self._snapshot.entries.nbytes))


class Snapshot(NamedTuple):
    """Entries of one session: one for itself, one for each of its nodes, one for each ref. ``records``: of those that are no nodes,
    each where its entry's ``offset`` says; of annotations, their beginnings.
    """

    entries: NDArray[Any]
    records: list[bytes]


def annotation_ref(ordinal: int, digest: bytes) -> bytes:
    """The ref of an annotation, given its node's ordinal and the digest of its name."""
    return LONG + ordinal.to_bytes(4) + digest


def _places_said(annotations: NDArray[Any]) -> list[Place]:
    return list(zip(*(annotations[name].tolist() for name in ("session", "segment", "ordinal", "id", "key")), strict=True))


def _place_of(number: int, removals: int, annotation: bytes) -> Place:
    """Of the record of an annotation."""
    entry = codec.entry_of(annotation)
    return number, removals, entry.ordinal, entry.id, entry.key


def _rows(nodes: Sequence[NodeRow]) -> NDArray[Any]:
    rows = np.empty(len(nodes), [(name, ENTRY[name]) for name in _FIELDS])
    if nodes:
        ordinals, parents, ids, keys = zip(*nodes, strict=True)
        rows["ordinal"], rows["parent"], rows["key"] = ordinals, parents, np.array(keys, np.uint64)
        joined = b"".join(ids)
        if len(joined) != ID_BYTES * len(nodes):
            raise CorruptTree(f"an id of {len(nodes)} nodes has not {ID_BYTES} bytes")
        rows["id"] = np.frombuffer(joined, f"V{ID_BYTES}")
    return rows


class _Write:
    """What is in line. ``gates``: held locks of the threads that wait for it; let go of when its thread is to look."""

    __slots__ = ("change", "gates", "known", "nbytes", "number")

    def __init__(self, number: int, known: Known, change: Change, nbytes: int) -> None:
        self.number = number
        self.known = known
        self.change = change
        self.nbytes = nbytes
        self.gates: tuple[threading.Lock, ...] = ()

    def gate(self) -> threading.Lock:
        """One more. The log's lock is held here and in :meth:`call`."""
        gate = threading.Lock()
        gate.acquire()
        self.gates += (gate,)
        return gate

    def call(self) -> None:
        """Have those who wait for it look. To do it again does no harm."""
        for gate in self.gates:
            if gate.locked():
                gate.release()
        self.gates = ()


class RecordCache:
    """Records of nodes under a budget of bytes; those asked for last stay."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes: int = 0
        self._records: OrderedDict[Place, bytes] = OrderedDict()
        self._lock = new_lock()

    def get_all(self, places: Sequence[Place]) -> list[bytes | None]:
        with self._lock:
            records = self._records
            found = [records.get(place) for place in places]
            for place, record in zip(places, found, strict=True):
                if record is not None:
                    records.move_to_end(place)
            return found

    def put_all(self, records: Iterable[tuple[Place, bytes]]) -> None:
        with self._lock:
            for place, record in records:
                size = len(record) + _OVERHEAD
                if size <= self.budget_bytes and place not in self._records:
                    self._records[place] = record
                    self.held_bytes += size
            while self.held_bytes > self.budget_bytes:
                _, old = self._records.popitem(last=False)
                self.held_bytes -= len(old) + _OVERHEAD

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self.held_bytes = 0


class SharedLog:
    """See the module. It is a :class:`~sessiontree.backends.base.Log` but for :meth:`entries`, which are those of one session."""

    recovered_bytes = 0
    costly = True
    durability: Durability = "commit"
    failed = False
    damaged: tuple[tuple[int, int, int], ...] = ()
    losses: tuple[tuple[int, int, int], ...] = ()

    def __init__(self, backend: Backend, *, cache_bytes: int, read_only: bool) -> None:
        self.backend = backend
        self.read_only = read_only
        self.cache: RecordCache = RecordCache(cache_bytes)
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._line: dict[int, _Write] = {}  # by number, in order; also what is being written
        self._lock = new_lock()  # of all that is here
        self._last = 0  # the number given out last
        self._lost: dict[int, SessionTreeError] = {}
        self._leader: int | None = None  # the thread that writes
        self._closed = False

    def _begin_anew(self) -> None:
        """In a forked child: have no session in hand, and nothing in line."""
        self._line.clear()
        self._leader = None
        self._known.clear()

    # Writing

    def enqueue(self, records: Records, after: int = 0, told: Sequence[object] = (None,), expected: object = None) -> int:
        """Put records of one session in line. Raises WriteLost where the session is to look anew first, Overtaken."""
        nodes: list[NewNode] = []
        refs: dict[bytes, bytes] = {}
        drops = gone = False
        nbytes = number = 0
        for parts, prefix in records:
            record = parts if isinstance(parts, bytes) else b"".join(parts)
            kind, number, ordinal, parent, identity, key = _PREFIX.unpack(prefix)
            nbytes += len(record)
            if kind == codec.NODE:
                nodes.append(NewNode(NodeRow(ordinal, parent, identity, key), record))
            elif kind == codec.DROP:
                drops, gone = True, gone or not ordinal
                refs[DROP + identity] = record  # its name is completed below
            elif kind == codec.ANNOTATION:
                refs[annotation_ref(ordinal, identity)] = record
            else:
                refs[(HEAD if kind == codec.HEAD else PIN) + identity] = record
        with self._lock:
            if self._closed or self.read_only:
                raise StoreFailed(f"{self.backend.where} was {'closed' if self._closed else 'opened to be read'}")
            if told[0] is not expected:
                raise Overtaken("something came in between")
            known = self._known.get(number)
            if known is None or known.pending is None:
                raise WriteLost(f"session {number} was written to elsewhere")
            if nodes and nodes[0].row.ordinal <= known.told:  # an interrupt left that unknown to the session
                raise WriteLost(f"session {number} was told of more than it knows")
            before = known.pending
            if drops:
                refs = {(DROP + _VERSION.pack(before) if name[:1] == DROP else name): each for name, each in refs.items()}
            known.pending = before + 1
            known.told = nodes[-1].row.ordinal if nodes else known.told
            self._last += 1
            change = Change(number, before, before + 1, nodes, refs, drops, gone)
            self._line[self._last] = _Write(self._last, known, change, nbytes)
            return self._last

    def is_durable(self, number: int) -> bool | None:
        with self._lock:
            return None if number in self._line else number not in self._lost

    def wait(self, number: int) -> None:
        """Until it is written; who comes first writes all that is in line.

        Raises Overtaken where somebody else wrote first, StoreFailed where the backend refuses.
        """
        try:
            while number in self._line:  # what has become of it is noted before it is taken out
                gate = self._lead_or_gate(number)
                if gate is not None:
                    gate.acquire()
        except BaseException:  # perhaps this one was called to lead, or would be
            with self._lock:
                for write in self._line.values():
                    write.call()
            raise
        lost = self._lost.get(number)
        if lost is not None:
            raise type(lost)(str(lost), numbers=frozenset([number])) from lost.__cause__

    def _lead_or_gate(self, number: int) -> threading.Lock | None:
        with self._lock:
            write = self._line.get(number)
            if write is None:
                return None
            if self._leader is not None:
                return write.gate()
            self._lead()
            return None

    def flush(self) -> None:
        with self._lock:
            numbers = list(self._line)
        for number in numbers:
            with suppress(Overtaken):  # whoever wrote that does it anew
                self.wait(number)

    def relieve(self) -> None:
        pass

    @property
    def durable(self) -> int:
        with self._lock:
            return next(iter(self._line), self._last + 1) - 1

    @property
    def lag(self) -> tuple[int, int]:
        with self._lock:
            return len(self._line), sum(write.nbytes for write in self._line.values())

    @property
    def leading(self) -> bool:
        return self._leader == threading.get_ident() or bool(self._lock._is_owned())

    def _lead(self) -> None:
        """Write what is in line; the lock is held. The end of it is done twice, since an interrupt can come in anywhere once."""
        told: list[_Write] = []
        try:
            try:
                self._write(told)
            finally:
                self._end_of_lead(told)
        finally:
            self._end_of_lead(told)

    def _end_of_lead(self, told: Sequence[_Write]) -> None:
        """Call the first of those who wait for what is in line, to lead, and all who wait for what was told of."""
        if not self._lock._is_owned():
            self._lock.acquire()
        if self._leader is not None:
            following = next((write for write in self._line.values() if write.gates), None)
            if following is not None:
                following.call()
            for write in told:
                write.call()
            self._leader = None

    def _write(self, told: list[_Write]) -> None:
        """Write what is in line, and add to ``told`` what is told of; the lock is held, and let go of meanwhile.

        What is written stays in line until it was told what has become of it, so an interrupt leaves it there.
        """
        writes = self._first()
        changes = _merged(writes)
        self._leader = threading.get_ident()
        outcome: Sequence[bool] | SessionTreeError | None = None
        try:
            self._lock.release()
            try:
                outcome = self.backend.sessions.commit(changes)
            except SessionTreeError as error:
                outcome = _bare(error)
            finally:
                self._lock.acquire()
        finally:
            with self._lock:  # which an interrupt may have left open
                self._tell(writes, changes, outcome, told)

    def _first(self) -> list[_Write]:
        """Those that are written together."""
        writes: list[_Write] = []
        nbytes = 0
        for write in self._line.values():
            nbytes += write.nbytes
            if writes and (len(writes) == _TOGETHER or nbytes > _TOGETHER_BYTES):
                break
            writes.append(write)
        return writes

    def _tell(
        self,
        writes: Sequence[_Write],
        changes: Sequence[Change],
        outcome: Sequence[bool] | SessionTreeError | None,
        told: list[_Write],
    ) -> None:
        """Note what has become of writes. None: an interrupt came in, and nobody knows.

        Then they stay in line: those that were done are refused, and done anew on what there is. Only who moved a head could not
        tell itself from others there, and fails.
        """
        known = {write.known.number: write.known for write in writes}
        why: dict[int, SessionTreeError] = {}
        records: list[tuple[Place, bytes]] = []
        for at, change in enumerate(changes):
            number = change.session
            if isinstance(outcome, SessionTreeError):
                why[number] = outcome
            elif outcome is None:
                if any(name[:1] == HEAD for name in change.refs):
                    why[number] = StoreFailed(f"{self.backend.where}: interrupted while it was written to")
            elif outcome[at]:
                known[number].fold(change)
                removals = known[number].removals
                records += [((number, removals, node.row.ordinal), node.record) for node in change.nodes]
                said = (record for name, record in change.refs.items() if name[:1] == LONG)
                records += [(_place_of(number, removals, record), record) for record in said]
            else:
                why[number] = Overtaken(f"session {number} was written to elsewhere")
        self.cache.put_all(records)
        for number in why:
            known[number].pending = None
        told += writes if outcome is not None else ()
        if why:  # also what is behind it in line
            lost = [write for write in self._line.values() if write.known.number in why]
            self._lost.update((write.number, why[write.known.number]) for write in lost)
            told += lost
        for write in told:
            self._line.pop(write.number, None)
        while len(self._lost) > _LOST:
            del self._lost[next(iter(self._lost))]

    # Looking

    def look(self, number: int) -> Known:
        """What there is by now of a session. One call of the backend. Raises UnknownSession."""
        while True:
            with self._lock:
                known = self._known.setdefault(number, Known(number))
                since = known.since
            look = self.backend.sessions.look(number, since)
            if look is None:
                with self._lock:
                    self._known.pop(number, None)
                raise UnknownSession(f"there is no session {number} in {self.backend.where} any more", session_id=number)
            with self._lock:
                if known.since != since:
                    continue  # somebody else has brought more
                if look.whole or (look.version, look.drops, look.gone) != (known.version, known.drops, known.gone):
                    known.take(look)
                self._remember(known)
                return known

    def claim(self, number: int) -> tuple[Snapshot, int, bool]:
        """The same for the session in hand, which writes on from there; whoever calls it holds that session's lock.

        What there is, how often something was removed, and whether the session is gone.
        """
        self._settle(number)
        known = self.look(number)
        with self._lock:
            known.pending, known.seen, known.told = known.version, known.drops, known.last
            return known.snapshot(), known.removals, known.gone

    def made(self, number: int, record: bytes, nodes: Sequence[NewNode], refs: Mapping[bytes, bytes]) -> None:
        """Know a session that was made here, and have it in hand."""
        known = Known(number)
        known.take(Look(record, 0, 0, 0, False, True, [node.row for node in nodes], refs))
        known.pending, known.told = 0, known.last
        with self._lock:
            self._remember(known)

    def is_current(self, number: int) -> bool:
        """Whether the session in hand has all there is by now; whoever calls it holds that session's lock."""
        self._settle(number)
        with self._lock:
            before = self._known.get(number)
        known = self.look(number)
        with self._lock:
            return known is before and known.pending == known.version

    def known(self, number: int) -> Known:
        """What is known of a session, which is looked at where that is nothing yet."""
        with self._lock:
            known = self._known.get(number)
            if known is not None and known.version >= 0:
                self._known.move_to_end(number)
                return known
        return self.look(number)

    def snapshot(self, number: int) -> tuple[Snapshot, int]:
        """What is known of a session, and how often something was removed from it."""
        known = self.known(number)
        with self._lock:
            return known.snapshot(), known.removals

    def _settle(self, number: int) -> None:
        """Until nothing is in line for a session."""
        with self._lock:
            mine = [write.number for write in self._line.values() if write.known.number == number]
        for each in mine:
            with suppress(StoreFailed):
                self.wait(each)

    def _remember(self, known: Known) -> None:
        self._known[known.number] = known
        self._known.move_to_end(known.number)
        if len(self._known) > _SESSIONS:
            busy = {write.known.number for write in self._line.values()}
            for number in list(self._known)[: len(self._known) - _SESSIONS]:
                if number not in busy and number != known.number:
                    del self._known[number]

    def forget(self, keep: Callable[[int], bool]) -> None:
        """Hold nothing of sessions but those that are to be kept, and no records."""
        self.cache.clear()
        with self._lock:
            busy = {write.known.number for write in self._line.values()}
            for number in [number for number in self._known if number not in busy and not keep(number)]:
                del self._known[number]

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self.cache.held_bytes + sum(known.nbytes for known in self._known.values())

    # Reading

    def entries(self) -> NDArray[Any]:
        raise AssertionError("a shared log has entries for each session")

    refresh = entries

    @property
    def lease(self) -> SharedLease:
        return SharedLease(0)

    def read(self, known: Any) -> bytes:
        """The record of an entry of a node or an annotation. Raises what :meth:`read_all` raises."""
        (record,) = self.read_all(np.array([known], ENTRY))
        return record

    def read_all(self, entries: NDArray[Any]) -> Iterator[bytes]:
        """Those of many entries in order, which are all of nodes or all of annotations. Where none is in the cache they are given
        out as they come: whoever asks for other things meanwhile makes a list of them first.

        Annotations that are not in the cache are as they are now: of an entry's version, or of another where somebody said more
        since, or the node was removed and another has its ordinal. Raises UnknownNode where it was removed elsewhere, CorruptTree,
        StoreFailed.
        """
        if len(entries) and entries["kind"][0] == codec.ANNOTATION:
            yield from self._read_said(entries)
            return
        for start in range(0, len(entries), _AT_ONCE):
            batch = entries[start : start + _AT_ONCE]
            numbers = batch["session"].tolist()
            places: list[Place] = list(zip(numbers, batch["segment"].tolist(), batch["ordinal"].tolist(), strict=True))
            records = self.cache.get_all(places)
            missing = [at for at, record in enumerate(records) if record is None]
            ids = batch["id"].tolist() if missing else ()
            of = dict.fromkeys(numbers[at] for at in missing)
            at_once = len(missing) == len(records) and len(of) == 1  # each as it comes
            for number in of:
                mine = [at for at in missing if numbers[at] == number]
                fetched = self._fetched(number, [places[at][2] for at in mine], [ids[at] for at in mine])
                for at, each in zip(mine, fetched, strict=True):
                    records[at] = each
                    if at_once:
                        yield each
            self.cache.put_all((places[at], record) for at in missing if (record := records[at]) is not None)
            if not at_once:
                yield from records  # type: ignore[misc]  # none is missing

    def _read_said(self, entries: NDArray[Any]) -> Iterator[bytes]:
        for start in range(0, len(entries), _AT_ONCE):
            batch = entries[start : start + _AT_ONCE]
            places = _places_said(batch)
            records = self.cache.get_all(places)
            missing = [at for at, record in enumerate(records) if record is None]
            for number in dict.fromkeys(places[at][0] for at in missing):
                mine = [at for at in missing if places[at][0] == number]
                for at, fetched in zip(mine, self._said(number, batch[mine]), strict=True):
                    records[at] = fetched
                    places[at] = _place_of(number, places[at][1], fetched)
            self.cache.put_all((places[at], record) for at in missing if (record := records[at]) is not None)
            yield from records  # type: ignore[misc]  # none is missing

    def _said(self, number: int, entries: NDArray[Any]) -> Iterator[bytes]:
        """Records of annotations, given their entries."""
        wanted = list(zip(entries["ordinal"].tolist(), entries["id"].tolist(), strict=True))
        found = self.backend.sessions.read_refs(number, list(itertools.starmap(annotation_ref, wanted)))
        for (ordinal, digest), record in zip(wanted, found, strict=True):
            if record is None:
                what = f"node {ordinal} of session {number}, of which something was said, was dropped and removed elsewhere"
                raise UnknownNode(what, node_id=b"")
            entry = codec.entry_of(record)
            if (entry.kind, entry.session, entry.ordinal, entry.id) != (codec.ANNOTATION, number, ordinal, digest):
                raise CorruptTree(f"an annotation of node {ordinal} is that of something else", session=number)
            yield record

    def _fetched(self, number: int, ordinals: Sequence[int], ids: Sequence[bytes]) -> Iterator[bytes]:
        """Records of nodes in that order, given their ids, as they come. Raises UnknownNode."""
        found = iter(self.backend.nodes.read(number, ordinals))
        for at, record in enumerate(found):
            if record is None or codec.id_in(record) != ids[at]:
                rest = [record, *found]  # all of them, before others are asked for
                yield from self._fetched_afresh(number, ordinals[at:], ids[at:], rest)
                return
            yield record

    def _fetched_afresh(
        self, number: int, ordinals: Sequence[int], ids: Sequence[bytes], found: Sequence[bytes | None]
    ) -> list[bytes]:
        """The same, where some of those that were found are of other nodes, or none."""
        records = {at: record for at, record in enumerate(found) if record is not None and codec.id_in(record) == ids[at]}
        left = [at for at in range(len(ids)) if at not in records]
        again = self.backend.nodes.read(number, [ordinals[at] for at in left], fresh=True)
        for at, each in zip(left, again, strict=True):
            if each is None or codec.id_in(each) != ids[at]:
                what = f"node {ordinals[at]} ({ids[at][:4].hex()}) of session {number} was dropped and removed elsewhere"
                raise UnknownNode(what, node_id=ids[at])
            records[at] = each
        return [records[at] for at in range(len(ids))]

    def close(self) -> None:
        try:
            with suppress(StoreFailed):
                self.flush()
        finally:
            with self._lock:
                first, self._closed = not self._closed, True
            if first:
                self.backend.close()


def _bare(error: SessionTreeError) -> SessionTreeError:
    """An error to be kept: without the frames that it came through, and what those hold."""
    for each in (error, error.__cause__, error.__context__):
        if each is not None:
            each.__traceback__ = None
    return error


def _merged(writes: Sequence[_Write]) -> list[Change]:
    """One change a session, of all that is in line for it."""
    by_session: dict[int, list[Change]] = {}
    for write in writes:
        by_session.setdefault(write.change.session, []).append(write.change)
    return [changes[0] if len(changes) == 1 else _one(changes) for changes in by_session.values()]


def _one(changes: Sequence[Change]) -> Change:
    refs: dict[bytes, bytes] = {}
    for change in changes:
        refs.update(change.refs)
    return changes[0]._replace(
        after=changes[-1].after,
        nodes=[node for change in changes for node in change.nodes],
        refs=refs,
        drops=any(change.drops for change in changes),
        gone=any(change.gone for change in changes),
    )
