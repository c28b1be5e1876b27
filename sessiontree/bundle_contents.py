"""What stands in a bundle, looked at and checked as it is asked for; nothing here makes a session or a node.

The records come in this order, those of codec and pieces of features, a kind of their own::

    a session, then its nodes in commit order; the next session, and so on
    annotations, of a session in the order of its nodes, each name of a node once, all of version 1
    features of media, each content in pieces, where they were asked for
    what aliases name, where that is media of a session in the same namespace
    pins
    heads

Sessions are numbered from 0, nodes from 1 in each session, or from behind the path of a fork, whose session comes before it. A
:class:`Contents` is made of the entries and the session records alone: they are checked to be as export writes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.blobs import content_digest, read_arrays
from sessiontree.backends.bundle_file import BundleFile
from sessiontree.backends.frames import Entries
from sessiontree.backends.system import System
from sessiontree.digest import ID_BYTES
from sessiontree.errors import CorruptTree, Unsupported
from sessiontree.features import FeatureArray
from sessiontree.journal import _PREFIX
from sessiontree.positions import PositionScheme
from sessiontree.store import MAX_SESSION_ID
from sessiontree.tokens import TOKEN_BYTES

#: The kind of a piece of features: ``ordinal`` counts the pieces of one content, ``id`` is the digest that its file is named after.
FEATURES: Final = 64
_ORDER: Final = {
    kind: rank
    for rank, kinds in enumerate(
        ((codec.SESSION, codec.NODE), (codec.ANNOTATION,), (FEATURES,), (codec.ALIAS,), (codec.PIN,), (codec.HEAD,))
    )
    for kind in kinds
}
#: Of every annotation in a bundle, where each has but one.
VERSION: Final = 1


def encode_piece(number: int, content: bytes, data: bytes) -> bytes:
    """The record of a piece of the features of a content, by its digest."""
    return codec._record(FEATURES, codec.NONE, number, 0, content, 0, (data,))


def _decode_piece(record: bytes) -> bytes:
    """The data of a piece. Raises CorruptTree for what :func:`encode_piece` does not give."""
    _, kind, _, _, number, _, content, _ = codec._READ.unpack_from(record)
    with suppress(*codec._WRONG):
        (data,) = codec._unpacked(record[codec._READ.size :])
        if kind == FEATURES and type(data) is bytes and encode_piece(number, content, data) == record:
            return data
    raise CorruptTree(f"piece {number} of the features of {content[:4].hex()} is none")


def _prefix_of(record: bytes) -> bytes:
    """What an index is to know of a record. Raises CorruptTree, IncompatibleStore."""
    if record[1:3] == bytes((FEATURES, codec.FORMAT_VERSION)) and len(record) >= codec._READ.size:
        _, kind, _, session, number, parent, content, key = codec._READ.unpack_from(record)
        return _PREFIX.pack(kind, session, number, parent, content, key)
    return _PREFIX.pack(*codec.entry_of(record))


class _Pieces:
    """The features of one content in a bundle, as a file. ``size``: no more bytes are there."""

    def __init__(self, file: BundleFile, entries: Sequence[Any]) -> None:
        self._file = file
        self._entries = iter(entries)
        self._data = b""
        self._done = 0
        self.size = sum(int(entry["length"]) for entry in entries)

    def read(self, count: int) -> bytes:
        parts = []
        while count:
            if not self._data:
                entry = next(self._entries, None)
                if entry is None:
                    break
                self._data = _decode_piece(self._file.read(entry))
                continue
            parts.append(self._data[:count])
            self._data = self._data[count:]
            self._done += len(parts[-1])
            count -= len(parts[-1])
        return b"".join(parts)

    def tell(self) -> int:
        return self._done


class Contents:
    """What an open bundle holds. Raises CorruptTree where that is not what export writes, and what schemes raise.

    Places are numbers of entries; the place of a session is that of its root. ``sessions``: by number, their records, and beside
    them ``rules``, their schemes, ``starts`` and ``stops``, their places, ``tips``, where the path of a fork ends, ``pins``, places
    of nodes, ``said``, places of annotations, and ``heads``, each a name, a place and a version. ``parents``: the place of each
    node's parent, across forks; -1 of a root. ``features``: the places of each content's pieces.
    """

    def __init__(self, file: BundleFile, path: str) -> None:
        self.file = file
        self.path = path
        entries = file.entries()
        self.entries: Entries = entries
        self._read = file.reader()
        kinds = entries["kind"]
        ranks = np.array([_ORDER.get(kind, -1) for kind in range(256)])[kinds]
        if len(kinds) and (ranks.min() < 0 or (np.diff(ranks) < 0).any() or kinds[0] == codec.NODE):
            raise self.wrong("its records are not those of a bundle, in their order")
        self.nodes: int = int(np.count_nonzero(kinds == codec.NODE))
        self._ids = bytearray(entries["id"].tobytes())
        self.parents: array[int] = array("q", bytes(8 * len(entries)))
        self.sessions: list[codec.SessionRecord] = []
        self.rules: list[PositionScheme] = []
        self.starts: list[int] = np.flatnonzero(kinds == codec.SESSION).tolist()
        self.stops: list[int] = [*self.starts[1:], int(np.count_nonzero(ranks == 0))][: len(self.starts)]
        self.tips: list[int | None] = []
        self._roots: list[int] = []
        self._first: list[int] = []
        for start, stop in zip(self.starts, self.stops, strict=True):
            self._session(start, stop)
        if len({record.session_id for record in self.sessions}) < len(self.sessions):
            raise self.wrong("a session stands in it twice")
        self.said: list[range] = self._annotations(np.flatnonzero(kinds == codec.ANNOTATION))
        self.features: dict[bytes, list[int]] = {}
        for place in np.flatnonzero(kinds == FEATURES).tolist():
            self._piece(place)
        self.aliases: list[codec.AliasRecord] = [self._alias(place) for place in np.flatnonzero(kinds == codec.ALIAS).tolist()]
        self.pins: list[list[int]] = [[] for _ in self.sessions]
        for place in np.flatnonzero(kinds == codec.PIN).tolist():
            self._pin(place)
        self.heads: list[list[tuple[str, int, int]]] = [[] for _ in self.sessions]
        for place in np.flatnonzero(kinds == codec.HEAD).tolist():
            self._head(place)

    def wrong(self, what: str) -> CorruptTree:
        return CorruptTree(f"{self.path}: {what}", path=self.path)

    def id(self, place: int) -> bytes:
        """Of a node, or of a session's root."""
        return bytes(self._ids[ID_BYTES * place : ID_BYTES * (place + 1)])

    def ids(self) -> bytearray:
        """Those of all places, for the caller to write to."""
        return bytearray(self._ids)

    def origin(self, number: int) -> codec.SessionRecord:
        """The session that says what the root is of: of a fork, the one that it goes back to."""
        return self.sessions[int(self.entries["session"][self._roots[number]])]

    def path_above(self, number: int) -> Iterator[int]:
        """The places of a fork's path, from the tip up to below the root; none of others."""
        place = self.tips[number]
        while place is not None and self.parents[place] >= 0:
            yield place
            place = self.parents[place]

    def node(self, place: int) -> codec.NodeRecord:
        """The record of a node that was checked."""
        record = codec.decode_again(self._read(place))
        assert isinstance(record, codec.NodeRecord)
        return record

    def check(self, number: int, place: int, stops: array[int]) -> codec.NodeRecord:
        """The record of a node, read, its digest and positions checked. Raises CorruptTree.

        ``stops``: tokens on the path of each place, to be asked in order; this one's is written there.
        """
        record, parent = self._record(place), self.parents[place]
        if not isinstance(record, codec.NodeRecord):
            raise self.wrong(f"record {place} is no node")
        codec.check_digest(record, self.id(parent))
        codec.check_positions(record, stops[parent], self.rules[number])
        stops[place] = stops[parent] + len(record.data) // TOKEN_BYTES
        if not record.data and self.parents[parent] < 0:
            raise self.wrong(f"node {record.id[:4].hex()} is an empty turn under the root")
        return record

    def annotation(self, place: int) -> tuple[int, codec.AnnotationRecord]:
        """An annotation, read, and the place of its node, which it is checked to be of. Raises CorruptTree."""
        record = self._record(place)
        if not isinstance(record, codec.AnnotationRecord) or not record.session < len(self.sessions):
            raise self.wrong("an annotation is none")
        at = self._place(record.session, record.ordinal)
        if record.node_id != self.id(at):
            raise self.wrong(f"annotation {record.name!r} of node {record.node_id[:4].hex()} stands at {self.id(at)[:4].hex()}")
        return at, record

    def arrays(self, content: bytes) -> dict[str, FeatureArray] | None:
        """The features of a content, by its digest, checked. Raises CorruptTree."""
        places = self.features.get(content)
        if places is None:
            return None
        pieces = _Pieces(self.file, [self.entries[place] for place in places])
        return read_arrays(f"{self.path}/{content.hex()}", pieces, pieces.size)

    # Looking at it

    def _record(self, place: int) -> codec.Record:
        return codec.decode(self._read(place))

    def _session(self, start: int, stop: int) -> None:
        number, record = len(self.sessions), self._record(start)
        if not isinstance(record, codec.SessionRecord) or record.session != number:
            raise self.wrong(f"session {number} is none")
        if not 0 < len(record.session_id) <= MAX_SESSION_ID:
            raise self.wrong(f"session {number} has an id of {len(record.session_id)} characters")
        tip, first = None, 1
        if record.tip is None:
            rules, root = self._rules(record), start
        else:
            source, ordinal = record.tip
            if not source < number:
                raise self.wrong(f"session {number} is a fork of session {source}, which is none before it")
            tip = self._place(source, ordinal)
            rules, root = self.rules[source], self._roots[source]
            if record.root_id != self.id(root):
                raise self.wrong(f"session {number} has another root than session {source}, which it is a fork of")
            first = self._depth(tip) + 1
        self.sessions.append(record)
        self.rules.append(rules)
        self.tips.append(tip)
        self._roots.append(root)
        self._first.append(first)
        self._ids[ID_BYTES * start : ID_BYTES * (start + 1)] = record.root_id
        self.parents[start] = -1
        mine = self.entries[start + 1 : stop]
        ordinals = np.arange(first, first + len(mine))
        if (mine["session"] != number).any() or (mine["ordinal"] != ordinals).any() or (mine["parent"] >= ordinals).any():
            raise self.wrong(f"nodes of session {record.session_id!r} are missing or in another order")
        parents = mine["parent"].astype(np.int64)
        places = parents + (start + 1 - first)
        for at in np.flatnonzero(parents < first).tolist():  # the root's children, and those of a fork's path
            places[at] = self._on_path(number, int(parents[at]))
        self.parents[start + 1 : stop] = array("q", places.tobytes())
        keyed = np.flatnonzero(mine["key"])
        if len({*zip(places[keyed].tolist(), mine["key"][keyed].tolist(), strict=True)}) < len(keyed):
            raise self.wrong(f"two nodes of session {record.session_id!r} have one parent and one key")

    def _rules(self, record: codec.SessionRecord) -> PositionScheme:
        codec.check_root(record)
        try:
            return codec.rules_of(record)
        except CorruptTree as error:
            raise self.wrong(str(error)) from error

    def _depth(self, place: int) -> int:
        depth = 0
        while self.parents[place] >= 0:
            place = self.parents[place]
            depth += 1
        return depth

    def _place(self, number: int, ordinal: int) -> int:
        """Where a node of a session stands."""
        first, start = self._first[number], self.starts[number]
        if ordinal < first:
            return self._on_path(number, ordinal)
        if ordinal - first >= self.stops[number] - start - 1:
            raise self.wrong(f"session {number} has no node {ordinal}")
        return start + 1 + ordinal - first

    def _on_path(self, number: int, depth: int) -> int:
        """Where the node of a depth stands that a fork's path has; 0: the root of any session."""
        place = self.tips[number]
        if not depth or place is None:
            return self._roots[number]
        for _ in range(self._first[number] - 1 - depth):
            place = self.parents[place]
        return place

    def _annotations(self, places: NDArray[np.int64]) -> list[range]:
        """Of each session where its annotations are: theirs come in the order of sessions, and of nodes."""
        rows = self.entries[places]
        sessions = rows["session"].astype(np.int64)
        keys = rows["session"].astype(np.uint64) << np.uint64(32) | rows["ordinal"]
        names = zip(keys.tolist(), map(bytes, rows["id"]), strict=True)
        if (np.diff(keys.astype(np.int64)) < 0).any() or (rows["key"] != VERSION).any() or len(set(names)) < len(rows):
            raise self.wrong("annotations are not those of a bundle, in their order")
        ends = np.searchsorted(sessions, np.arange(len(self.sessions) + 1)).tolist()
        if ends[-1] < len(rows):
            raise self.wrong(f"annotations of session {sessions[-1]}, which it has not")
        first = int(places[0]) if len(places) else 0
        return [range(first + start, first + stop) for start, stop in pairwise(ends)]

    def _piece(self, place: int) -> None:
        content = self.id(place)
        pieces = self.features.setdefault(content, [])
        if self.entries["ordinal"][place] != len(pieces) or (pieces and pieces[-1] != place - 1):
            raise self.wrong(f"pieces of the features of {content[:4].hex()} are missing")
        pieces.append(place)

    def _alias(self, place: int) -> codec.AliasRecord:
        record = self._record(place)
        if not isinstance(record, codec.AliasRecord) or record.identity is None:
            raise self.wrong("an alias names nothing")
        return record

    def _pin(self, place: int) -> None:
        record = self._record(place)
        if not isinstance(record, codec.PinRecord) or not record.pinned or not record.session < len(self.sessions):
            raise self.wrong("a pin is nowhere")
        pinned = self._place(record.session, record.ordinal)
        if record.id != self.id(pinned):
            raise self.wrong(f"a pin of node {record.id[:4].hex()} stands at {self.id(pinned)[:4].hex()}")
        self.pins[record.session].append(pinned)

    def _head(self, place: int) -> None:
        record = self._record(place)
        if not isinstance(record, codec.HeadRecord) or record.ordinal is None or not record.session < len(self.sessions):
            raise self.wrong("a head is nowhere")
        self.heads[record.session].append((record.name, self._place(record.session, record.ordinal), record.version))


def open_contents(system: System, path: str, max_bytes: int) -> Contents:
    """The bundle of a path, which is its file's to close. Raises what BundleFile and Contents raise."""
    file = BundleFile(system, path, _prefix_of, max_bytes)
    try:
        return Contents(file, path)
    except BaseException:
        file.close()
        raise


class BundledFeatures:
    """The features in a bundle, as a store's on disk; they are only read."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def get(self, content: tuple[Any, ...]) -> dict[str, FeatureArray] | None:
        return self._contents.arrays(content_digest(content))

    def __contains__(self, content: tuple[Any, ...]) -> bool:
        return content_digest(content) in self._contents.features

    def put(self, content: tuple[Any, ...], arrays: Mapping[str, FeatureArray]) -> None:
        raise Unsupported(f"the bundle {self._contents.path} is only read")

    def drop(self, content: tuple[Any, ...]) -> None:
        raise Unsupported(f"the bundle {self._contents.path} is only read")
