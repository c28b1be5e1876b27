"""All of a store that many processes write, read through its three protocols, and what is wrong with each part of it.

There are no segments here and no sidecars: that bytes are whole is for the database to say, and what it gives back is believed as
little as a disk. Every record is read, its checksum compared and its id computed anew from its parent's. It is read beside those
who write to it: each session as it is when it is looked at, forks behind what they were forked from.
"""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import attrs

from sessiontree import codec
from sessiontree.annotations import OfTokens
from sessiontree.backends.base import Progress
from sessiontree.backends.blobs import file_name, read_arrays
from sessiontree.backends.sealed import unseal
from sessiontree.backends.shared import LONG, Backend, Look
from sessiontree.backends.shared_log import DROP, HEAD, PIN, annotation_ref
from sessiontree.errors import CorruptTree, IncompatibleStore, SessionTreeError
from sessiontree.fsck.report import Damage, Finding
from sessiontree.positions import PositionScheme
from sessiontree.tokens import TOKEN_BYTES

R = TypeVar("R", bound=codec.Record)
Key = tuple[int, int]  # the number of a session, and an ordinal in it; of a root, 0

_TOGETHER: Final = 128  # records that are read together
_FEATURES: Final = re.compile(r"(?:[0-9a-f]{64}/)?([0-9a-f]{64})/(0|[1-9][0-9]*|used)")
_ALIAS: Final = b"a"


class Held(NamedTuple):
    """A node whose row is there. ``nbytes``: of its record; ``why``: it cannot be read."""

    parent: int
    id: bytes
    start: int
    stop: int
    nbytes: int
    why: str | None = None


class HeldAnnotation(NamedTuple):
    """What is said of a node by one name. ``ordinal``, ``id``: the node's. ``nbytes``: of its record."""

    name: str
    ordinal: int
    id: bytes
    nbytes: int
    stop: int  # where the last of the tokens ends that it says something of


@attrs.define(eq=False)
class HeldSession:
    """A session whose row is there. ``record``, ``rules``: None where they are damaged. ``path``: of a fork the nodes that it
    begins with, by depth; of others, the root alone.
    """

    number: int
    name: str | None
    gone: bool
    record: codec.SessionRecord | None
    rules: PositionScheme | None
    nbytes: int
    path: list[Key]
    nodes: dict[int, Held] = attrs.Factory(dict)
    heads: list[codec.HeadRecord] = attrs.Factory(list)
    pins: list[codec.PinRecord] = attrs.Factory(list)
    annotations: list[HeldAnnotation] = attrs.Factory(list)
    dropped: set[int] = attrs.Factory(set)
    ref_bytes: Counter[str] = attrs.Factory(Counter)
    spent_bytes: int = 0  # of refs that say nothing any more

    def key(self, ordinal: int) -> Key:
        """What an ordinal means in it."""
        return self.path[ordinal] if ordinal < len(self.path) else (self.number, ordinal)

    def above(self, ordinal: int) -> Key:
        """What stands above a node of its own."""
        return self.key(self.nodes[ordinal].parent)

    def whose(self) -> str:
        return f"session {self.number}" if self.name is None else f"session {self.name!r}"


class SharedSurvey:
    """All that was found. Nodes take some 300 bytes of memory each."""

    def __init__(self, backend: Backend, progress: Progress | None) -> None:
        self.backend = backend
        self.sessions: dict[int, HeldSession] = {}
        self.damaged: list[Damage] = []
        self.misleading: list[Finding] = []
        self.wrong: list[Finding] = []
        self.dangling: list[Finding] = []
        self.contents: defaultdict[str, list[bytes]] = defaultdict(list)  # ids of the nodes that name each
        self.identities: set[bytes] = set()
        self.aliases: list[codec.AliasRecord] = []
        self.alias_bytes: int = 0
        self.unknown: int = 0  # records of a later version
        self.features: dict[str, dict[str, int]] = {}  # bytes of the blobs of each content
        self.strays: list[str] = []
        names = dict(backend.sessions.names())
        numbers = sorted(backend.sessions.all())
        for done, (number, _) in enumerate(numbers):
            if progress is not None:
                progress(done, len(numbers) + 1)
            self._session(number, names.get(number))
        self._names(names)
        self._tips()
        self._named()
        self._blobs()
        if progress is not None:
            progress(len(numbers) + 1, len(numbers) + 1)

    def find(self, key: Key) -> Held | None:
        """The node of a key that is none of a root."""
        session = self.sessions.get(key[0])
        return None if session is None else session.nodes.get(key[1])

    def id_of(self, key: Key) -> bytes | None:
        session = self.sessions.get(key[0])
        if session is None:
            return None
        if not key[1]:
            return None if session.record is None else session.record.root_id
        node = session.nodes.get(key[1])
        return None if node is None else node.id

    # One session

    def _session(self, number: int, name: str | None) -> None:
        while True:
            look = self.backend.sessions.look(number)
            if look is None:  # it was removed meanwhile
                return
            records, refs = dict(self._records(number, look)), dict(self._refs(number, look))
            if None not in (*records.values(), *refs.values()):
                break
            again = self.backend.sessions.look(number)
            if again is not None and again.removals == look.removals:  # else some were removed meanwhile
                break
        session = self._begun(number, name, look)
        self.sessions[number] = session
        for row in look.nodes:
            self._node(session, row.ordinal, row.parent, row.id, row.key, records[row.ordinal])
        for ref, data in refs.items():
            self._ref(session, ref, data, look.refs[ref])
        _hide(session)

    def _records(self, number: int, look: Look) -> Iterator[tuple[int, bytes | None]]:
        for start in range(0, len(look.nodes), _TOGETHER):
            ordinals = [row.ordinal for row in look.nodes[start : start + _TOGETHER]]
            yield from zip(ordinals, self.backend.nodes.read(number, ordinals), strict=True)

    def _refs(self, number: int, look: Look) -> Iterator[tuple[bytes, bytes | None]]:
        """Whole, also those of which a look gives the beginnings."""
        long = [ref for ref in look.refs if ref[:1] == LONG]
        yield from ((ref, data) for ref, data in look.refs.items() if ref[:1] != LONG)
        for start in range(0, len(long), _TOGETHER):
            some = long[start : start + _TOGETHER]
            yield from zip(some, self.backend.sessions.read_refs(number, some), strict=True)

    def _begun(self, number: int, name: str | None, look: Look) -> HeldSession:
        """What its own record says."""
        session = HeldSession(number, name, look.gone, None, None, len(look.record), [(number, 0)])
        try:
            record = _decoded(look.record, codec.SessionRecord, number)
            session.name = name or record.session_id
            if name is not None and record.session_id != name:
                raise CorruptTree(f"it is found as {name!r}, and calls itself {record.session_id!r}")
            if record.tip is None:
                codec.check_root(record)
                session.rules = codec.rules_of(record)
            else:
                session.path, session.rules = self._fork(record)
            session.record = record
        except SessionTreeError as error:
            self.damaged.append(Damage(f"the record of {session.whose()}: {error}", session_id=session.name))
        return session

    def _fork(self, record: codec.SessionRecord) -> tuple[list[Key], PositionScheme | None]:
        """The path that a fork begins with, as far as it is there, and its scheme. Raises CorruptTree."""
        assert record.tip is not None
        number, ordinal = record.tip
        source = self.sessions.get(number)
        if not number < record.session:
            raise CorruptTree(f"it is a fork of session {number}, which is none before it")
        if source is None or source.record is None:
            raise CorruptTree(f"it is a fork of session {number}, which {'is missing' if source is None else 'is damaged'}")
        if record.root_id != source.record.root_id:
            raise CorruptTree(
                f"its root is {record.root_id[:4].hex()}, and that of session {number}, which it is a fork of, another"
            )
        path: list[Key] = []
        at = ordinal
        while at >= len(source.path):
            path.append((number, at))
            node = source.nodes.get(at)
            if node is None:
                raise CorruptTree(f"it is a fork of node {ordinal} of session {number}, of which node {at} is missing")
            at = node.parent
        return [*source.path[: at + 1], *reversed(path)], source.rules

    # One record

    def _node(self, session: HeldSession, ordinal: int, parent: int, identity: bytes, key: int, data: bytes | None) -> None:
        first = len(session.path)
        session.nodes[ordinal] = held = Held(parent, identity, 0, 0, len(data or b""))
        try:
            if ordinal < first or not parent < ordinal:
                raise CorruptTree(f"its ordinal is {ordinal} and its parent's {parent}; the first can be {first}")
            if data is None:
                raise CorruptTree("its row is there, and its record is not")
            record = _decoded(data, codec.NodeRecord, session.number)
            if (record.ordinal, record.parent, record.id) != (ordinal, parent, identity):
                raise CorruptTree("its record is that of another node than its row")
            stop = record.state.num_tokens
            start = stop - len(record.data) // TOKEN_BYTES
            session.nodes[ordinal] = held = held._replace(start=start, stop=stop)
            above = session.key(parent)
            if (above_id := self.id_of(above)) is not None:
                codec.check_digest(record, above_id)
            before = self.find(above)
            if above[1] and before is not None and before.why is None and before.stop != start:
                raise CorruptTree(f"it starts at token {start}, and its parent ends at {before.stop}")
            if session.rules is not None:
                codec.check_positions(record, start, session.rules)
            if key != codec.entry_of(data).key:
                what = f"the row of node {ordinal} of {session.whose()} has another key than its record: it is not found by its own"
                self.misleading.append(Finding(what, session_id=session.name, node_id=identity))
            for item in record.media:
                self.identities.add(item.identity)
                self.contents[file_name(item.content())].append(identity)
        except SessionTreeError as error:
            session.nodes[ordinal] = held._replace(why=str(error))

    def _ref(self, session: HeldSession, ref: bytes, data: bytes | None, shown: bytes) -> None:
        kinds: dict[bytes, tuple[str, type[Any]]] = {
            HEAD: ("head", codec.HeadRecord),
            PIN: ("pin", codec.PinRecord),
            DROP: ("drop", codec.DropRecord),
            LONG: ("annotation", codec.AnnotationRecord),
        }
        what, kind = kinds.get(ref[:1], ("ref", codec.HeadRecord))
        try:
            if ref[:1] not in kinds:
                raise CorruptTree("no store names one so")
            if data is None:
                raise CorruptTree("its beginning is there, and its record is not")
            record = _decoded(data, kind, session.number)
            entry = codec.entry_of(data)
            named = annotation_ref(entry.ordinal, entry.id) if ref[:1] == LONG else ref[:1] + entry.id
            if ref[:1] != DROP and ref != named:
                raise CorruptTree(f"its name is that of another {what}")
            if not data.startswith(shown) and entry.key <= codec.entry_of(shown).key:  # else it was said anew since
                raise CorruptTree("its beginning is that of something else")
            session.ref_bytes[what] += len(data)
            if isinstance(record, codec.DropRecord):
                session.dropped.update(record.ordinals)
            elif isinstance(record, codec.HeadRecord):
                session.heads.append(record)
                session.spent_bytes += len(data) if record.ordinal is None else 0
            elif isinstance(record, codec.AnnotationRecord):
                stop = record.value.stop if isinstance(record.value, OfTokens) else 0
                session.annotations.append(HeldAnnotation(record.name, record.ordinal, record.node_id, len(data), stop))
            else:
                session.pins.append(record)
                session.spent_bytes += len(data) if not record.pinned else 0
        except IncompatibleStore:
            self.unknown += 1
        except SessionTreeError as error:
            self.damaged.append(Damage(f"{what} {ref.hex()} of {session.whose()}: {error}", session_id=session.name))

    # All of them

    def _names(self, names: Mapping[int, str]) -> None:
        called = Counter((self._tenant(session), session.name) for session in self.sessions.values() if not session.gone)
        for (_, name), count in called.items():
            if count > 1 and name is not None:
                self.wrong.append(Finding(f"{count} sessions are called {name!r}", session_id=name))
        for number in names.keys() - self.sessions.keys():
            if number in dict(self.backend.sessions.names()):  # else it was removed meanwhile
                self.dangling.append(Finding(f"session {number} has a name and no row", session_id=names[number]))

    def _tenant(self, session: HeldSession) -> str | None:
        root = self.sessions[session.path[0][0]]
        return None if root.record is None else root.record.namespace.tenant

    def _tips(self) -> None:
        """Whether what keeps nodes for forks is what forks say."""
        tips = {fork: (session, ordinal) for fork, session, ordinal in self.backend.sessions.tips()}
        for session in self.sessions.values():
            record = session.record
            if record is None or tips.get(session.number) == record.tip or self.backend.sessions.look(session.number) is None:
                continue
            said = "none" if session.number not in tips else "node {1} of session {0}".format(*tips[session.number])
            is_fork = "no fork" if record.tip is None else "a fork of node {1} of session {0}".format(*record.tip)
            what = f"{session.whose()} is {is_fork}; its row says {said}, and by that gc goes"
            self.misleading.append(Finding(what, session_id=session.name))

    def _named(self) -> None:
        for name, data in self.backend.sessions.all_named().items():
            self.alias_bytes += len(data)
            try:
                record = codec.decode(_opened(data))
                if name[:1] != _ALIAS or not isinstance(record, codec.AliasRecord) or codec.entry_of(data).id != name[1:]:
                    raise CorruptTree("its name is that of something else")
            except IncompatibleStore:
                self.unknown += 1
            except SessionTreeError as error:
                self.damaged.append(Damage(f"alias {name.hex()}: {error}"))
            else:
                self.aliases.append(record)

    def _blobs(self) -> None:
        blobs = self.backend.blobs
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for name, _ in () if blobs is None else list(blobs.names()):
            assert blobs is not None
            found = _FEATURES.fullmatch(name)
            if found is None:
                self.strays.append(name)
                continue
            row, _, number = name.rpartition("/")
            sizes = self.features.setdefault(row, {})
            data = blobs.get(name)
            if data is None:  # it was removed meanwhile
                continue
            sizes[name] = len(data)
            if number == "used":
                continue
            rows[row].append(int(number))
            try:
                read_arrays(f"{found[1]}.{number}", io.BytesIO(data), len(data))
            except CorruptTree as error:
                nodes = tuple(dict.fromkeys(self.contents.get(found[1], ())))
                self.damaged.append(Damage(f"features: {error}", name, named_by=nodes, harmless=not nodes))
        for row, numbers in rows.items():
            if sorted(numbers) != list(range(len(numbers))):
                nodes = tuple(dict.fromkeys(self.contents.get(row.rpartition("/")[2], ())))
                self.damaged.append(Damage("features: some of their blobs are missing", row, named_by=nodes, harmless=not nodes))


def _opened(data: bytes) -> bytes:
    """A record without its checksum, which it matches. Raises CorruptTree."""
    return unseal(data, "it")


def _decoded(data: bytes, kind: type[R], number: int) -> R:
    """A record of a session. Raises CorruptTree, IncompatibleStore."""
    record = codec.decode(_opened(data))
    if not isinstance(record, kind) or getattr(record, "session", None) != number:
        raise CorruptTree("it is the record of something else")
    return record


def _hide(session: HeldSession) -> None:
    """Count as dropped what stands below what was."""
    if session.dropped:
        for ordinal in sorted(session.nodes):
            if session.nodes[ordinal].parent in session.dropped:
                session.dropped.add(ordinal)
