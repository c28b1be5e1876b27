"""Sessions that many processes write: a :class:`~sessiontree.journal.Journal` over a backend's three protocols.

What a session writes goes through the same steps as on disk, with a call of the backend in the place of a sync. Of a session only
that is known which this process asked for. A session in hand is as it was when it was looked at last, and what it writes is refused
where others wrote since: then it looks anew and does the operation on what there is by now, however often that takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.frames import ENTRY
from sessiontree.backends.segment_log import new_identity
from sessiontree.backends.shared import Backend, NewNode, NewSession, NodeRow
from sessiontree.backends.shared_log import SharedLease, SharedLog, Snapshot, annotation_ref
from sessiontree.errors import CorruptTree, IncompatibleStore, SessionExists, UnknownSession
from sessiontree.features import FeatureStore
from sessiontree.journal import Columns, Journal, Overtaken, SessionNodes, WriteLost, said_in
from sessiontree.memory import HeldNodes
from sessiontree.node import Namespace
from sessiontree.tokens import PathCache
from sessiontree.tree import SessionTree

R = TypeVar("R", codec.SessionRecord, codec.HeadRecord, codec.DropRecord)

_OPENINGS: Final = 2**20  # of sessions, for each number that is drawn for them
_DRAWN: Final = 16  # numbers drawn at a time
_ALIAS: Final = b"a"


class Seen(NamedTuple):
    """A session as it was looked at."""

    version: int
    gone: bool
    snapshot: Snapshot
    refs: Mapping[bytes, bytes]


class SessionColumns(Columns):
    """What is known of one session, or of some. ``records``: of what is no node, each where its entry's ``offset`` says."""

    def __init__(self, entries: NDArray[Any], records: Sequence[bytes], removals: int = 0) -> None:
        super().__init__(entries, SharedLease(removals))
        self.records = records

    @classmethod
    def of_all(cls, seen: Mapping[int, Seen]) -> SessionColumns:
        """Those of many sessions, one after the other."""
        parts, records = [np.empty(0, ENTRY)], list[bytes]()
        for each in seen.values():
            entries = each.snapshot.entries.copy()
            entries["offset"][entries["kind"] != codec.NODE] += len(records)
            records += each.snapshot.records
            parts.append(entries)
        return cls(np.concatenate(parts), records)


class SharedJournal(Journal):
    """The sessions of one backend."""

    def __init__(
        self,
        backend: Backend,
        features: FeatureStore,
        paths: PathCache,
        held: HeldNodes,
        *,
        cache_bytes: int,
        tenant: str | None,
        read_only: bool,
    ) -> None:
        self.shared: SharedLog = SharedLog(backend, cache_bytes=cache_bytes, read_only=read_only)
        self.backend = backend
        self._tenant = tenant
        super().__init__(self.shared, backend.where, features, paths, held)
        self.follows = True
        # Another for each process: a draft that comes from another one goes on, whatever is open here.
        self.identity = None if read_only else new_identity()

    def _begin_anew(self) -> None:
        """In a forked child: nothing that was drawn is its own, and what was being written is its parent's to write."""
        self._drawn.clear()
        self._block = 0
        if self.identity is not None:
            self.identity = new_identity()
        self.shared._begin_anew()

    def _begin(self) -> None:
        self._block = 0  # the number drawn for openings of sessions
        self._openings_here = itertools.count(1)
        self._drawn: list[int] = []

    @property
    def many_write(self) -> bool:
        return True

    @property
    def damaged_sessions(self) -> tuple[int, ...]:
        return ()

    # Reading

    def columns(self, number: int | None = None) -> SessionColumns:
        assert number is not None
        snapshot, removals = self.shared.snapshot(number)
        return SessionColumns(*snapshot, removals)

    def all_sessions(self) -> dict[int, Seen]:
        """Every session as it is now, those that are gone too, by number."""
        seen: dict[int, Seen] = {}
        for number, _ in self.backend.sessions.all():
            with suppress(UnknownSession):  # it was removed meanwhile
                known = self.shared.look(number)
                seen[number] = Seen(known.version, known.gone, known.snapshot(), dict(known.refs))
        return seen

    def _within(self, columns: Columns, number: int) -> Columns:
        return columns if number in columns.sessions[-1:] else self.columns(number)

    def _read_at(self, columns: Columns, place: int, kind: type[R], what: str = "") -> R:
        assert isinstance(columns, SessionColumns)
        record = codec.decode(columns.records[int(columns.entries[place]["offset"])])
        number = int(columns.sessions[place])
        if not isinstance(record, kind) or record.session != number:
            raise CorruptTree(f"the record of {what}session {number} is that of something else", session=number)
        return record

    def _told(self, columns: Columns, number: int, drops: bool) -> tuple[int, ...]:
        said = columns.entries["key"][columns.places(codec.ANNOTATION, number)]  # one that is said anew has the place of the old
        return *super()._told(columns, number, drops), int(said.max(initial=0))

    def _nodes(self, columns: Columns, first: int, number: int, whose: str, drops: Sequence[int] = ()) -> SessionNodes:
        nodes = super()._nodes(columns, first, number, whose, drops)
        # A drop goes on naming what gc has removed, as long as anything stays that it hides: those ordinals do not come again.
        nodes.resize(max(len(nodes), max(drops, default=0) + 1 - first))
        return nodes

    def number_of(self, session_id: str) -> int | None:
        return self.backend.sessions.find(session_id)

    def session_ids(self) -> dict[int, str]:
        return dict(self.backend.sessions.names())

    def names_of(self, numbers: Sequence[int]) -> dict[int, str]:
        names = self.session_ids() if numbers else {}
        return {number: names[number] for number in numbers if number in names}

    def is_current(self, number: int) -> bool:
        return self.shared.is_current(number)

    def tree(self, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        snapshot, removals, gone = self.shared.claim(number)
        if gone:
            raise UnknownSession(f"session {number} was dropped", session_id=str(number))
        return self.stored_at(SessionColumns(*snapshot, removals), number)

    def view(self, number: int) -> tuple[SessionTree, dict[bytes, int]]:
        known = self.shared.look(number)
        if known.gone:
            raise UnknownSession(f"session {number} was dropped", session_id=str(number))
        return self.stored(number)

    def drops_of(self, number: int | None) -> Any:
        return 0 if number is None else self.shared.known(number).seen

    def forget_numbers(self) -> None:
        pass

    def let_go(self) -> None:
        living = {number for number, _ in list(self._living.values())}
        self.shared.forget(living.__contains__)

    def index_bytes(self) -> int:
        return self.shared.nbytes

    # Writing

    def _number(self, above: int = 0) -> int:
        """One that nobody was given before. ``above``: one that somebody was."""
        while True:
            with self._lock:
                fitting = [number for number in self._drawn if number > above]
                if fitting:
                    self._drawn.remove(number := min(fitting))
                    return number
            drawn = self.backend.sessions.draw(_DRAWN)
            with self._lock:
                self._drawn += drawn

    def check_tenant(self, namespace: Namespace, what: str) -> None:
        if self._tenant is not None and namespace.tenant != self._tenant:
            said = f"{what} has tenant {namespace.tenant!r} in its namespace; this store holds those of {self._tenant!r} alone"
            raise IncompatibleStore(said, expected=self._tenant, found=namespace.tenant)

    def create(self, session_id: str, tree: SessionTree, tip: tuple[int, int] | None, drops: Any = 0) -> tuple[int, int, int]:
        self.check_writable()
        root = tree.root
        self.check_tenant(root.namespace, f"session {session_id!r}")
        rules = root.scheme
        constants = (rules.name, tuple(sorted(rules.params.items())), root.namespace, root.model_fingerprint)
        whole = tip is None  # whether it says itself all that is said of its nodes
        if tip is not None:
            if drops != self.drops_of(tip[0]):
                raise Overtaken(f"{self.path}: something was dropped meanwhile")
            own, whole = self._own_tip(*tip, tree)
            drops, tip = (drops if own[0] == tip[0] else self.shared.known(own[0]).drops), own
            constants = "", (), Namespace(), ""
        number = self._number(0 if tip is None else tip[0])  # a fork's is above that of what it was forked from
        record = codec.encode(codec.SessionRecord(number, session_id, *constants, tree.limits, root.id, tip))
        first = 1 if tip is None else tree._index.base_count
        nodes = list(map(_new_node, self._node_records(number, tree, first)))
        entries = ((codec.entry_of(said), said) for said in said_in(number, tree, whole))
        refs = {annotation_ref(entry.ordinal, entry.id): said for entry, said in entries}
        match self.backend.sessions.create(NewSession(number, session_id, root.namespace.tenant, record, nodes, tip, drops, refs)):
            case "taken":
                raise SessionExists(f"session {session_id!r} is in the store", session_id=session_id)
            case "dropped":
                if tip is not None:
                    self.shared.look(tip[0])
                raise Overtaken(f"{self.path}: something was dropped meanwhile")
        self.shared.made(number, record, nodes, refs)
        return number, self._opening(), 0

    def _own_tip(self, number: int, ordinal: int, tree: SessionTree) -> tuple[tuple[int, int], bool]:
        """The tip of a fork, named as the session has it that made the node; whether one in between says something of its path."""
        node = tree._index.bottom.tip
        node_id = tree.root.id if node is None else node.id
        said = False
        while True:
            columns = self.columns(number)
            found = columns.named(columns.places_of_nodes(), node_id)
            if found:
                return (number, int(columns.ordinals[found[0]])), said
            above = self.tip_of(number)
            if above is None:
                return (number, ordinal), said
            said = said or bool(len(columns.places(codec.ANNOTATION, number)))
            number = above[0]

    def opened(self, number: int) -> int:
        return self._opening()

    def _opening(self) -> int:
        """A number that no opening of a session has, anywhere: of this process, and then counted."""
        if self.read_only:
            return next(self._openings_here)
        while True:
            with self._lock:
                block, count = self._block, next(self._openings_here)
            if block and count < _OPENINGS:
                return block * _OPENINGS + count
            drawn = self._number()
            with self._lock:
                self._block, self._openings_here = drawn, itertools.count(1)

    def drop_all(
        self,
        dead: Mapping[int, Sequence[int]],
        waiting: int = 0,
        told: Sequence[object] = (None,),
        expected: object = None,
    ) -> None:
        self.check_writable()
        for number, ordinals in dead.items():
            record = codec.DropRecord(number, tuple(sorted(set(ordinals))))
            self._log.wait(self._enqueue([record], waiting, told, expected))

    def drop_unreachable(self, numbers: Iterable[int], recent: int, columns: Columns | None) -> dict[int, list[bytes]]:
        dead: dict[int, list[bytes]] = {}
        for number in numbers:
            with suppress(UnknownSession):  # it was dropped meanwhile
                if gone := self._drop_unreachable(number, recent):
                    dead[number] = gone
        return dead

    def _drop_unreachable(self, number: int, recent: int) -> list[bytes]:
        while True:
            self.tree(number)  # from here on it is written to
            columns = self.columns(number)
            ordinals = self.unreachable(number, recent, (), columns)
            if not ordinals:
                return []
            with suppress(Overtaken, WriteLost):
                self._keep_prefixes(columns, number, ordinals)
                self.drop(number, ordinals)
                return self._ids_of(columns, number, ordinals)

    def alias(self, namespace: Namespace, alias: str, identity: bytes | None) -> bytes | None:
        self.check_writable()
        self.check_tenant(namespace, f"alias {alias!r}")
        name = _ALIAS + codec.alias_digest(namespace, alias)
        record = None if identity is None else codec.encode(codec.AliasRecord(namespace, alias, identity))
        while True:
            there = self.backend.sessions.named(name)
            known = None if there is None else self._alias_in(there, namespace, alias).identity
            if known is not None and identity is not None:
                return known
            if record is there is None or self.backend.sessions.name(name, record, there, namespace.tenant):
                return identity

    def aliased(self, namespace: Namespace, alias: str) -> bytes | None:
        there = self.backend.sessions.named(_ALIAS + codec.alias_digest(namespace, alias))
        return None if there is None else self._alias_in(there, namespace, alias).identity

    @staticmethod
    def _alias_in(data: bytes, namespace: Namespace, alias: str) -> codec.AliasRecord:
        record = codec.decode(data)
        if not isinstance(record, codec.AliasRecord) or (record.namespace, record.alias) != (namespace, alias):
            raise CorruptTree(f"the record of alias {alias!r} is that of something else")
        return record

    def aliases(self) -> dict[tuple[Namespace, str], bytes | None]:
        named = self.backend.sessions.all_named()
        records = [codec.decode(record) for name, record in named.items() if name[:1] == _ALIAS]
        return {(each.namespace, each.alias): each.identity for each in records if isinstance(each, codec.AliasRecord)}


def _new_node(record: bytes) -> NewNode:
    entry = codec.entry_of(record)
    return NewNode(NodeRow(entry.ordinal, entry.parent, entry.id, entry.key), record)
