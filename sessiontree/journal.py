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
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.base import Durability, Log, Overtaken, WriteLost
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree, IncompatibleStore, StoreFailed, Unsupported
from sessiontree.features import FeatureStore
from sessiontree.index import NodeIndex
from sessiontree.locks import new_lock
from sessiontree.node import Lineage, Namespace, Node, make_root
from sessiontree.positions import scheme
from sessiontree.stored import Stored, StoredHead, StoredIndex
from sessiontree.tokens import Extent, PathCache
from sessiontree.tree import SessionTree, stored_tree
from sessiontree.turns import Turn

__all__ = ["Durability", "Journal", "Overtaken", "SessionNodes", "WriteLost"]

MISSING: Final = -1  # the place of a node that is nowhere
_REMEMBERED: Final = 64  # batches, above which those that are durable are forgotten
_FEW: Final = 16  # ids looked for one by one before they are sorted


_PREFIX: Final = Struct("<BIII32sQ")


_UNKNOWN: Final = 255  # a kind or version of record that a later library wrote


def prefix_of(record: bytes) -> bytes:
    """What the log's index is to know of a record."""
    try:
        return _PREFIX.pack(*codec.entry_of(record))
    except IncompatibleStore:
        return _PREFIX.pack(_UNKNOWN, 0, 0, 0, bytes(ID_BYTES), 0)


def _with_prefixes(records: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return [(record, prefix_of(record)) for record in records]


class Columns:
    """What the log knows of its records, as one array a field: to look at one field of all takes a pass over that field alone."""

    def __init__(self, entries: NDArray[Any]) -> None:
        self.entries = entries
        self.kinds, self.sessions, self.ordinals, self.parents = (
            np.ascontiguousarray(entries[name]) for name in ("kind", "session", "ordinal", "parent")
        )
        self._others = np.flatnonzero(self.kinds != codec.NODE)  # mostly few

    def places(self, kind: int, session: int | None = None) -> NDArray[np.int64]:
        """Where records of a kind are, in order."""
        if kind == codec.NODE:
            assert session is not None
            return np.flatnonzero((self.sessions == session) & (self.kinds == kind))
        places: NDArray[np.int64] = self._others[self.kinds[self._others] == kind]
        return places if session is None else places[self.sessions[places] == session]

    def ids(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The first eight bytes of each id."""
        ids = np.ascontiguousarray(self.entries["id"][places])
        return ids.view(np.uint64).reshape(len(places), 4)[:, 0]

    def named(self, places: NDArray[np.int64], identity: bytes) -> list[int]:
        """Those that have this id."""
        alike = places[self.ids(places) == np.frombuffer(identity, np.uint64)[0]].tolist()
        return [place for place in alike if self.entries[place]["id"].tobytes() == identity]


class SessionNodes:
    """The nodes of one session, by ordinal: a :class:`~sessiontree.stored.NodeSource`. ``places``: theirs, in that order."""

    def __init__(self, log: Log, columns: Columns, places: NDArray[np.int64], first: int) -> None:
        self.first = first
        self._log = log
        self._columns = columns
        self._places = places
        self.lenient = bool(log.damaged)
        self._asked = 0
        self._by_id: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None
        self._by_parent: tuple[NDArray[np.uint32], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._places)

    def read(self, ordinal: int, parent: Node) -> Stored:
        known = self._columns.entries[self._place(ordinal)]
        record = codec.decode(self._log.read(known))
        if not isinstance(record, codec.NodeRecord) or (record.session, record.ordinal, record.parent, record.id) != (
            known["session"],
            ordinal,
            known["parent"],
            known["id"].tobytes(),
        ):
            raise CorruptTree(f"the record of node {ordinal} of session {known['session']} is that of another")
        codec.check_digest(record, parent.id)
        codec.check_positions(record, parent.stop, parent.scheme)
        content = (record.id, record.data, record.media, record.origin, record.role, record.key)
        return Stored(Turn(*content, record.runs, record.state, record.replayed), record.details)

    def raw(self, ordinal: int) -> bytes:
        return self._log.read(self._columns.entries[self._place(ordinal)])

    def parent_of(self, ordinal: int) -> int:
        return int(self._columns.parents[self._place(ordinal)])

    def _place(self, ordinal: int) -> int:
        at = ordinal - self.first
        place = int(self._places[at]) if 0 <= at < len(self._places) else MISSING
        if place == MISSING:
            raise CorruptTree(f"node {ordinal} of a session is missing; it has up to {self.first + len(self._places) - 1}")
        return place

    def children_of(self, ordinal: int) -> Sequence[int]:
        if self._by_parent is None:
            parents = np.where(self._places == MISSING, codec.NONE, self._columns.parents[self._places])
            order = np.argsort(parents, kind="stable")
            self._by_parent = parents[order], order
        parents, order = self._by_parent
        low, high = np.searchsorted(parents, ordinal, "left"), np.searchsorted(parents, ordinal, "right")
        children: list[int] = (order[low:high] + self.first).tolist()
        return children

    def find(self, node_id: bytes) -> int | None:
        if len(node_id) != ID_BYTES:
            return None
        wanted = np.frombuffer(node_id, np.uint64)[0]
        for at in self._alike(wanted).tolist():
            if self._places[at] != MISSING and self._columns.entries[self._places[at]]["id"].tobytes() == node_id:
                ordinal: int = at + self.first
                return ordinal
        return None

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

    def find_key(self, parent: int, key: str) -> Sequence[int]:
        wanted, keys = codec.key_digest(key), self._columns.entries["key"]
        return [child for child in self.children_of(parent) if keys[self._places[child - self.first]] == wanted]


class Journal:
    """The sessions of one log. Any thread may call it; it is told what a session did by whoever holds that session's lock.

    ``waits``: whether a change is to be waited for before anybody sees it. ``follows``: whether others write, and this one looks
    after them.
    """

    def __init__(self, log: Log, path: str, features: FeatureStore, paths: PathCache) -> None:
        self.path = path
        self.follows = log.read_only
        self.waits = log.durability == "commit"
        self._log = log
        self._features = features
        self._paths = paths
        self._lock = new_lock()
        self._underway: deque[tuple[int, tuple[bytes, ...]]] = deque()  # ids of nodes that may not be durable, by what to wait for
        self._ids: dict[str, int] = {}  # numbers of sessions that were found or made, by id
        self._listed: tuple[str, ...] = ()  # ids of the sessions that the log was seen to hold
        self._indexes: WeakValueDictionary[int, StoredIndex] = WeakValueDictionary()
        self._columns = columns = Columns(log.entries())
        later = np.flatnonzero((columns.kinds < codec.SESSION) | (columns.kinds > codec.ALIAS))
        if len(later) and not self.read_only:
            raise IncompatibleStore(f"{path} holds {len(later)} records of a later version; open it read_only", path=path)
        self._next = int(columns.sessions[columns.places(codec.SESSION)].astype(np.int64).max(initial=-1)) + 1
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
        *,
        durability: Durability,
        read_only: bool,
        strict: bool,
    ) -> Journal:
        """The journal in a directory. Raises StoreLocked, IncompatibleStore, CorruptTree."""
        log = SegmentLog.open(path, read_only=read_only, durability=durability, strict=strict, entry_of=prefix_of)
        try:
            return cls(log, os.fspath(path), features, paths)
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
    def failed(self) -> bool:
        """Whether nothing is written any more, for good."""
        return self._log.failed

    @property
    def recovered_bytes(self) -> int:
        return self._log.recovered_bytes

    def is_durable(self, number: int) -> bool | None:
        """Whether what :meth:`changed` gave a number for is on disk; None while that is not known."""
        return self._log.is_durable(number)

    def wait(self, number: int) -> None:
        """Until it is on disk. Raises StoreFailed where it never will be, naming the nodes."""
        try:
            self._log.wait(number)
        except StoreFailed as error:
            raise self._naming(error) from error.__cause__

    def relieve(self) -> None:
        """Where changes come faster than the disk takes them, wait for it."""
        self._log.relieve()

    def flush(self) -> None:
        """Until everything is on disk. Raises StoreFailed naming the nodes that never will be."""
        try:
            self._log.flush()
        except StoreFailed as error:
            raise self._naming(error) from error.__cause__

    def _naming(self, error: StoreFailed) -> StoreFailed:
        """The same error with the nodes that it is about."""
        numbers = getattr(error, "numbers", ())
        lost = [node for number, nodes in tuple(self._underway) if number in numbers for node in nodes]
        some = ", ".join(node[:4].hex() for node in lost[:8])
        named = f"; nodes {some}{f' and {len(lost) - 8} more' if len(lost) > 8 else ''}" if lost else ""
        return type(error)(f"{error}{named}", numbers=numbers, nodes=tuple(lost))

    def _remember(self, number: int, nodes: tuple[bytes, ...]) -> int:
        underway = self._underway
        underway.append((number, nodes))
        if len(underway) > _REMEMBERED:
            durable = self._log.durable
            with suppress(IndexError):  # somebody else was quicker
                while underway[0][0] <= durable:
                    underway.popleft()
        return number

    def close(self) -> None:
        self._log.close()

    def _look(self) -> None:
        """Take in what the log has by now."""
        if self.follows:
            self._log.refresh()
        entries = self._log.entries()
        if len(entries) != len(self._columns.entries):
            self._columns = Columns(entries)

    # Reading

    def number_of(self, session_id: str) -> int | None:
        """The number of a stored session."""
        number = self._ids.get(session_id)
        if number is None:
            if self.follows:
                self._look()
            columns = self._columns
            for place in columns.named(columns.places(codec.SESSION), codec.name_digest(session_id)):
                number = self._ids[session_id] = int(columns.sessions[place])
        return number

    def session_ids(self) -> tuple[str, ...]:
        """In the order they were created."""
        if self.follows:
            self._look()
        columns, listed = self._columns, self._listed
        places = columns.places(codec.SESSION)
        if len(listed) < len(places):
            new = [self._session(columns, place).session_id for place in places[len(listed) :]]
            listed = self._listed = listed + tuple(new)
        return tuple(dict.fromkeys([*listed, *self._ids]))

    def tip_of(self, number: int) -> tuple[int, int] | None:
        """Of a stored fork: the number of the session it was made from, and the ordinal of the node it was made at."""
        self._look()
        places = self._columns.places(codec.SESSION, number)
        return self._session(self._columns, places[0]).tip if len(places) else None

    def tree(self, number: int) -> SessionTree:
        """The tree of a stored session, as it is now: its nodes are read when they are asked for."""
        if not self.read_only:
            with suppress(StoreFailed):  # what is there can be read after a failure too
                self._log.flush()  # or what a closed session wrote a moment ago might not be there
        self._look()
        columns = self._columns
        index = self._index(columns, number)
        top = NodeIndex(index.root, index.limits, base=index, base_count=index.count)
        heads: dict[str, StoredHead] = {}
        moves = 0
        places = columns.places(codec.HEAD, number)
        _, last = np.unique(columns.ids(places)[::-1], return_index=True)  # of each name
        for place in places[::-1][last]:
            record = codec.decode(self._log.read(columns.entries[place]))
            if not isinstance(record, codec.HeadRecord) or record.session != number:
                raise CorruptTree(f"the record of a head of session {number} is that of something else")
            moves = max(moves, record.version)
            if record.ordinal is not None:
                heads[record.name] = StoredHead(index, record.ordinal, record.version)
        return stored_tree(top, top.count, heads, moves)

    def _index(self, columns: Columns, number: int) -> StoredIndex:
        """The nodes of a session, as far as the log has them."""
        chain = []  # of a fork, also the session it was forked from, and so on
        at: int | None = number
        while at is not None:
            mine = columns.places(codec.SESSION, at)
            if not len(mine):
                raise CorruptTree(f"session {at} has no record")
            record = self._session(columns, mine[0])
            chain.append(record)
            if record.tip is not None and record.tip[0] >= at:
                raise CorruptTree(f"session {at} is a fork of session {record.tip[0]}, which is none before it")
            at = None if record.tip is None else record.tip[0]
        index = None
        for record in reversed(chain):
            index = self._opened_index(columns, record, index)
        assert index is not None
        return index

    def _opened_index(self, columns: Columns, record: codec.SessionRecord, source: StoredIndex | None) -> StoredIndex:
        """The nodes of one session, over the path of one of ``source`` where it is a fork."""
        places = columns.places(codec.NODE, record.session)
        with self._lock:
            index = self._indexes.get(record.session)
            if index is not None and index.told == len(places):
                return index
        if record.tip is None or source is None:
            rules = scheme(record.scheme, **dict(record.params))
            lineage = Lineage(rules, record.namespace, record.model_fingerprint, weakref.ref(self._features))
            tip, root, first = None, make_root(lineage, Extent(None, None, 0, b"", self._paths)), 1
        else:
            tip = source.node(record.tip[1])
            root, first = tip.ancestor(0), tip.depth + 1
        if root.id != record.root_id:
            raise CorruptTree(f"session {record.session_id!r} has root {record.root_id[:4].hex()}, not {root.id[:4].hex()}")
        index = StoredIndex(root, record.limits, self._nodes(columns, places, first, record.session), tip=tip)
        index.told = len(places)
        with self._lock:
            self._indexes[record.session] = index
        return index

    def _nodes(self, columns: Columns, places: NDArray[np.int64], first: int, number: int) -> SessionNodes:
        """Nodes by ordinal, each once; where one is missing, it is when it is asked for."""
        ordinals = columns.ordinals
        if len(places) and ordinals[places[-1]] != first + len(places) - 1:  # some were told of more than once, or are missing
            known, once = np.unique(ordinals[places], return_index=True)
            if int(known[0]) < first or int(known[-1]) - first > 2 * len(columns.kinds):
                raise CorruptTree(f"session {number} has nodes {known[0]} to {known[-1]}, the first can be {first}")
            by_ordinal = np.full(int(known[-1]) - first + 1, MISSING, np.int64)
            by_ordinal[known.astype(np.int64) - first] = places[once]
            places = by_ordinal
        return SessionNodes(self._log, columns, places, first)

    def _session(self, columns: Columns, place: int) -> codec.SessionRecord:
        record = codec.decode(self._log.read(columns.entries[place]))
        if not isinstance(record, codec.SessionRecord) or record.session != columns.sessions[place]:
            raise CorruptTree(f"the record of session {columns.sessions[place]} is that of something else")
        return record

    # Writing

    def create(self, session_id: str, tree: SessionTree, tip: tuple[int, int] | None) -> tuple[int, int]:
        """Record a new session with all that its tree holds: its number, and which opening of the store this is.

        ``tip``: whose node's path it shares. Waits for it where changes are waited for.
        """
        self._check_writable()
        root = tree.root
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._openings += 1
            incarnation = self._openings
        rules = root.scheme
        # What a fork is of follows from the session it was forked from.
        constants = (rules.name, tuple(sorted(rules.params.items())), root.namespace, root.model_fingerprint)
        what = constants if tip is None else ("", (), Namespace(), "")
        record = codec.SessionRecord(number, session_id, *what, tree.limits, root.id, tip)
        first = 1 if tip is None else tree._index.base_count
        waiting = self._log.enqueue(_with_prefixes([codec.encode(record), *self._node_records(number, tree, first)]))
        if self.waits:
            self._log.wait(waiting)
        self._ids[session_id] = number
        return number, incarnation

    def opened(self, number: int) -> int:
        """Record that a session is opened to be written to: which opening of the store that is, counted from 1."""
        with self._lock:
            self._openings += 1
            incarnation = self._openings
        if self.read_only or self._log.damaged:
            return incarnation
        try:
            waiting = self._log.enqueue(_with_prefixes([codec.encode(codec.OpenedRecord(number, incarnation))]))
            if self.waits:
                self._log.wait(waiting)
        except StoreFailed:
            if not self._log.failed:  # what can be written to later must not be this opening
                raise
        return incarnation

    def alias(self, namespace: Namespace, alias: str, identity: bytes | None) -> None:
        """Record what an alias names; None: nothing any more. Waits for it where changes are waited for."""
        self._check_writable()
        waiting = self._log.enqueue(_with_prefixes([codec.encode(codec.AliasRecord(namespace, alias, identity))]))
        if self.waits:
            self._log.wait(waiting)

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
        self._look()
        columns = self._columns
        records = (codec.decode(self._log.read(columns.entries[place])) for place in columns.places(codec.ALIAS))
        return {(each.namespace, each.alias): each.identity for each in records if isinstance(each, codec.AliasRecord)}

    def _check_writable(self) -> None:
        if self.read_only:
            raise Unsupported(f"the store at {self.path} was opened to be read")
        if self._log.damaged:
            raise CorruptTree(f"the store at {self.path} is damaged in {len(self._log.damaged)} places; it can only be read")

    def changed(self, number: int, before: SessionTree, after: SessionTree, waiting: int, told: Sequence[object]) -> int:
        """Record what ``after`` has that ``before`` had not, together: what to wait for until it is durable.

        ``waiting``: what was to be waited for before; ``told``: holds ``before`` for as long as nothing else is recorded. Raises
        WriteLost where what was before was lost, Overtaken, StoreFailed.
        """
        self._check_writable()
        if after._heads is before._heads and after._count - before._count == 1:  # by far the commonest case
            index, ordinal = after._index, before._count
            node = index.nodes[ordinal - index.base_count]
            assert node.parent is not None
            parent = index.find_ordinal(node.parent, ordinal)
            assert parent is not None
            key = 0 if node.key is None else codec.key_digest(node.key)
            prefix = _PREFIX.pack(codec.NODE, number, ordinal, parent, node.id, key)
            record = codec.node_parts(number, ordinal, parent, node)
            return self._remember(self._log.enqueue(((record, prefix),), waiting, told, before), (node.id,))
        records = self._node_records(number, after, before._count)
        nodes = tuple(codec.entry_of(record).id for record in records)
        for name, head in after._heads.items():
            if before._heads.get(name) is not head:
                at = after._index.find_ordinal(head.node, after._count)
                records.append(codec.encode(codec.HeadRecord(number, name, at, head.version)))
        for name in before._heads:
            if name not in after._heads:
                records.append(codec.encode(codec.HeadRecord(number, name, None, after._moves)))
        return self._remember(self._log.enqueue(_with_prefixes(records), waiting, told, before), nodes)

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
