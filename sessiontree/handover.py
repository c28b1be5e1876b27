"""Drafts as bytes: a generation that one process prefills and another decodes.

The bytes are a header, which is magic, version and the SHA-256 of all that follows, and then records, each behind its length: the
draft, its session as :mod:`sessiontree.codec` has it, and, where the path comes along, the nodes of that path as bundles have them,
each checked against its id. One draft has one encoding; whatever else is given is refused before anything changes, in time and
memory proportional to it. No rule of positions is applied again.

A draft names the openings of sessions that it has been in: of each store, by its identity, one incarnation. Back in such a store
it goes on in that opening alone; others take it wherever the root is the same and its parent is there. A store on disk is known by
what its FORMAT says, so a copy of its files goes by the same name; one in memory by a number that is drawn when it first takes
part in this, and that a child forked later inherits. A store that is only read opens nothing: what was made there alone is never
stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, NamedTuple

from pyrsistent import PMap

from sessiontree import codec
from sessiontree.digest import pack
from sessiontree.draft import MAX_STATE_BYTES, Draft, Host, Openings
from sessiontree.errors import CorruptTree, IncompatibleStore, LimitExceeded, StaleSession
from sessiontree.frozen import EMPTY_METADATA
from sessiontree.index import Limits
from sessiontree.node import Node
from sessiontree.tokens import TOKEN_BYTES
from sessiontree.tree import SessionTree

VERSION: Final = 1
#: No draft with its path is larger: what is longer is not looked at.
MAX_BYTES: Final = 2**32
_MAGIC: Final = b"\x93stdraft"
_HEADER: Final = Struct(">8sI32s")
_LENGTH: Final = Struct(">I")
_MAX_IDENTITY: Final = 64


class Parcel(NamedTuple):
    """What some bytes say. ``session``: its record. ``states``: (length, state), as a draft has them. ``path``: nodes, or none.

    ``whole``: whether the path is all here, as it is where the parent is the root.
    """

    session: codec.SessionRecord
    parent_id: bytes
    key: str
    role: str
    metadata: PMap[str, Any]
    data: bytes
    states: tuple[tuple[int, bytes], ...]
    computed: int
    openings: Openings
    path: tuple[codec.NodeRecord, ...]

    @property
    def whole(self) -> bool:
        return bool(self.path) or self.parent_id == self.session.root_id

    def check_root(self, root: Node) -> None:
        """Whether it is a draft of sessions with this root. Raises IncompatibleStore."""
        mine = self.session
        if mine.root_id == root.id:
            return
        pairs: tuple[tuple[str, Any, Any], ...] = (
            ("scheme", (root.scheme.name, tuple(sorted(root.scheme.params.items()))), (mine.scheme, mine.params)),
            ("namespace", root.namespace, mine.namespace),
            ("model fingerprint", root.model_fingerprint, mine.model_fingerprint),
        )
        what, here, there = next((pair for pair in pairs if pair[1] != pair[2]), ("root", root.id.hex(), mine.root_id.hex()))
        raise IncompatibleStore(
            f"a draft of session {mine.session_id!r} with the {what} {there!r}, not {here!r}", expected=here, found=there
        )

    def check_opening(self, store: bytes | None, incarnation: int | None) -> None:
        """Whether it may go on in an opening of a store. Raises StaleSession. None: in no opening that there is now."""
        for identity, was in self.openings:
            if identity == store and was != incarnation:
                session_id = self.session.session_id
                now = "closed" if incarnation is None else f"incarnation {incarnation}"
                raise StaleSession(
                    f"a draft of session {session_id!r}, incarnation {was}; that is {now} now",
                    session_id=session_id,
                    incarnation=was,
                )

    def attached(self, tree: SessionTree) -> SessionTree:
        """The tree with the nodes of the path. Raises KeyTaken, LimitExceeded."""
        above = tree.root
        for record in self.path:
            tree, above = tree._attach(above, record.turn, record.details, reserved=0)
        return tree

    def draft(self, tree: SessionTree, host: Host) -> Draft:
        """The draft, to go on in a tree. Raises UnknownNode for its parent, LimitExceeded, CorruptTree."""
        parent = tree._resolve(self.parent_id)
        draft = Draft(
            parent,
            role=self.role,
            metadata=self.metadata,
            key=self.key,
            max_tokens=tree.limits.max_tokens,
            host=host,
            openings=self.openings,
        )
        if self.data:
            draft._make_room(len(self.data) // TOKEN_BYTES)
            draft._tokens.frombytes(self.data)
        draft._states.extend(self.states)
        if self.computed > draft.stop:
            raise _wrong(f"{self.computed} computed tokens of {draft.stop}")
        draft._computed = self.computed
        return draft


# Out


def packed(draft: Draft, session_id: str, limits: Limits, opening: tuple[bytes | None, int], with_path: bool) -> bytes:
    """The bytes of a draft of a session. ``opening``: the store's identity, None of one that is only read, and the incarnation.

    Raises LimitExceeded, Unsupported, OutOfRange for what no record holds.
    """
    identity, incarnation = opening
    openings = draft._openings if identity is None else tuple(dict((*draft._openings, (identity, incarnation))).items())
    path = draft.parent.path()
    root = path[0]
    rules = root.scheme
    constants = (rules.name, tuple(sorted(rules.params.items())), root.namespace, root.model_fingerprint)
    session = codec.SessionRecord(0, session_id, *constants, limits, root.id)
    own = (draft.parent.id, draft.key, draft.role, draft._metadata, draft._tokens.tobytes(), tuple(draft._states))
    nodes = (codec.encode_node(0, at, at - 1, node) for at, node in enumerate(path[1:], 1)) if with_path else ()
    records = itertools.chain((_encode(*own, draft.num_computed_tokens, openings), codec.encode(session)), nodes)
    body = b"".join(_framed(records))
    if len(body) > MAX_BYTES - _HEADER.size:
        raise LimitExceeded(f"a draft of {len(body)} bytes; {MAX_BYTES} is the limit", value=len(body), limit=MAX_BYTES)
    return _HEADER.pack(_MAGIC, VERSION, sha256(body).digest()) + body


def _framed(records: Iterable[bytes]) -> Iterator[bytes]:
    for record in records:
        yield _LENGTH.pack(len(record))
        yield record


def _encode(
    parent_id: bytes,
    key: str,
    role: str,
    metadata: PMap[str, Any],
    data: bytes,
    states: Sequence[tuple[int, bytes]],
    computed: int,
    openings: Openings,
) -> bytes:
    frozen = codec._packable(metadata) if metadata else None
    record = pack((parent_id, key, role, frozen, data, states, computed, openings))
    codec._check_size(len(record))
    return record


# In


def unpacked(data: bytes | bytearray | memoryview) -> Parcel:
    """What some bytes say, checked. Raises TypeError, CorruptTree, IncompatibleStore for another version, LimitExceeded."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a draft is handed over as bytes, not {type(data).__name__}")
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > MAX_BYTES:
        raise LimitExceeded(f"a draft of {size} bytes; {MAX_BYTES} is the limit", value=size, limit=MAX_BYTES)
    data = bytes(data)
    if size < _HEADER.size or not data.startswith(_MAGIC):
        raise CorruptTree(f"{size} bytes are no draft that was handed over")
    _, version, digest = _HEADER.unpack_from(data)
    if version != VERSION:
        raise IncompatibleStore(f"a draft of format {version}; this library reads {VERSION}", expected=VERSION, found=version)
    body = memoryview(data)[_HEADER.size :]
    if sha256(body).digest() != digest:
        raise _wrong("its bytes do not match their checksum")
    draft, session, *nodes = _records(body)
    record = codec.decode(session)
    if not isinstance(record, codec.SessionRecord) or record.session or record.tip is not None:
        raise _wrong("no session comes with it")
    codec.check_root(record)
    try:
        fields = _decode(draft)
    except codec._WRONG as error:
        raise _wrong(str(error) or type(error).__name__) from error
    path = _path(record, nodes)
    if path and path[-1].id != fields[0]:
        raise _wrong("the path that comes with it ends elsewhere")
    return Parcel(record, *fields, path)


def _wrong(what: str) -> CorruptTree:
    return CorruptTree(f"a draft that was handed over: {what}")


def _records(body: memoryview) -> list[bytes]:
    records = []
    at = 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise _wrong("it ends inside a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        if at > len(body):
            raise _wrong("it ends inside a record")
        records.append(bytes(body[at - length : at]))
    if len(records) < 2:
        raise _wrong("a draft and its session are two records")
    return records


def _decode(data: bytes) -> tuple[bytes, str, str, PMap[str, Any], bytes, tuple[tuple[int, bytes], ...], int, Openings]:
    if len(data) > codec.MAX_RECORD_BYTES:
        raise LimitExceeded(f"a record of {len(data)} bytes", value=len(data), limit=codec.MAX_RECORD_BYTES)
    parent_id, key, role, frozen, tokens, states, computed, openings = codec._fields(codec._unpacked(data), 8, "a draft")
    if type(tokens) is not bytes or len(tokens) % TOKEN_BYTES or not tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        raise _wrong("its tokens are int32 of 0 or more")
    fields = (
        codec._digest(parent_id, "its parent's id"),
        codec._text(key, "its key"),
        codec._text(role, "its role"),
        EMPTY_METADATA if frozen is None else codec._map(frozen),
        tokens,
        _states(states, len(tokens) // TOKEN_BYTES),
        codec._whole(computed, "num_computed_tokens"),
        _openings(openings),
    )
    if _encode(*fields) != data:
        raise _wrong("its content is encoded otherwise")
    return fields


def _states(value: Any, count: int) -> tuple[tuple[int, bytes], ...]:
    if type(value) is not tuple:
        raise _wrong("its states are an array")
    least, last = 0, None
    for entry in value:
        at, state = codec._fields(entry, 2, "a state")
        least = codec._whole(at, "a state's length", least, count) + 1
        if type(state) is not bytes or len(state) > MAX_STATE_BYTES or state == last:
            raise _wrong(f"a state is other bytes than the one before, {MAX_STATE_BYTES} at most")
        last = state
    return value


def _openings(value: Any) -> Openings:
    if type(value) is not tuple:
        raise _wrong("its openings are an array")
    for entry in value:
        identity, incarnation = codec._fields(entry, 2, "an opening")
        if type(identity) is not bytes or not 0 < len(identity) <= _MAX_IDENTITY:
            raise _wrong(f"a store's identity has 1 to {_MAX_IDENTITY} bytes")
        codec._whole(incarnation, "an incarnation", 1, 2**64 - 1)
    if len(dict(value)) < len(value):
        raise _wrong("it has been in two openings of one store")
    return value


def _path(session: codec.SessionRecord, nodes: Sequence[bytes]) -> tuple[codec.NodeRecord, ...]:
    """The nodes of a path below its root, their digests and positions checked. Raises CorruptTree."""
    if not nodes:
        return ()
    rules = codec.rules_of(session)
    path = []
    above, stop = session.root_id, 0
    for at, data in enumerate(nodes, 1):
        record = codec.decode(data)
        if not isinstance(record, codec.NodeRecord) or (record.session, record.ordinal, record.parent) != (0, at, at - 1):
            raise _wrong(f"record {at} of its path is none")
        codec.check_digest(record, above)
        codec.check_positions(record, stop, rules)
        if not record.data and at == 1 and (record.key is None or record.origin != "input"):
            raise _wrong("an empty turn under the root says nothing, unless it has a key")
        above, stop = record.id, stop + len(record.data) // TOKEN_BYTES
        path.append(record)
    return tuple(path)
