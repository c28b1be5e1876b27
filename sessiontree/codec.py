"""What is stored, as records: one msgpack array each, a closed set of types, one encoding for each value.

A record of version 1 is ``[kind, version, session, ordinal, parent, id, key, body]``. All but the body have a fixed width, though
msgpack knows shorter ones: they are what an index keeps of a record (:class:`Entry`), and :func:`entry_of` reads them alone. The
body is an array of the kind's fields, as the encoder puts it together; positions, runs and media stand in it as nodes hold them.
Frozen metadata are scalars of msgpack, and arrays whose first element says what they are::

    [0, entry, ...]  tuple    [1, entry, ...]  frozenset    [2, key, value, ...]  map    [3, dtype, [size, ...], bytes]  array

Members of a set, and keys, are in the order of their bytes. Maps and extension types of msgpack's own never occur.

:func:`decode` takes what :func:`encode` gives and nothing else: the last thing it does is to encode what it has read and to
compare. What it looks at before is whatever would make a value that the library cannot have. It imports nothing and calls nothing
that a record could choose; its time and memory are proportional to the record's size. What a record says of others, its parent's
id and its session's scheme, is for :func:`check_root`, :func:`check_digest` and :func:`check_positions`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from struct import Struct
from struct import error as StructError
from types import NoneType
from typing import Any, Final, NamedTuple, NoReturn

import attrs
import msgpack
import numpy as np
from numpy.typing import NDArray
from pyrsistent import PMap, pmap

from sessiontree.annotations import MAX_NAME, Annotation, OfTokens, Ragged, Spans, TokenValues
from sessiontree.details import NO_DETAILS, TAIL_POLICIES, USUAL_DETAILS, Details, Link
from sessiontree.digest import ID_BYTES, content_prefix, node_id, pack, root_id
from sessiontree.errors import CorruptTree, IncompatibleStore, LimitExceeded, OutOfRange, SessionTreeError, Unsupported
from sessiontree.frozen import EMPTY_METADATA, MAX_DEPTH, frozen_array
from sessiontree.index import Limits
from sessiontree.media import _SET as _ITEM
from sessiontree.media import MAX_COUNT, MediaItem, in_token_order, placements
from sessiontree.node import Namespace, Node, Origin, TurnPositions
from sessiontree.positions import PositionScheme, PositionState, scheme
from sessiontree.positions.base import OpenBlock
from sessiontree.positions.runs import _KINDS, Runs, is_external
from sessiontree.tokens import TOKEN_BYTES
from sessiontree.turns import Turn

FORMAT_VERSION: Final = 1
MAX_RECORD_BYTES: Final = 256 * 2**20
#: In an entry: no ordinal (a head that was dropped), or no session (an alias).
NONE: Final = 2**32 - 1

SESSION: Final = 1
NODE: Final = 2
HEAD: Final = 3
OPENED: Final = 4
ALIAS: Final = 5
PIN: Final = 6
DROP: Final = 7
ANNOTATION: Final = 8


class SessionRecord(NamedTuple):
    """A session: what its root's id is made of, and its limits.

    ``session``: its number in the store. ``params``: of the scheme, sorted by name. ``tip``: of a fork, (session, ordinal) of the
    node whose path it begins with, under the same ordinals as depths; None for others.
    """

    session: int
    session_id: str
    scheme: str
    params: tuple[tuple[str, Any], ...]
    namespace: Namespace
    model_fingerprint: str
    limits: Limits
    root_id: bytes
    tip: tuple[int, int] | None = None


class NodeRecord(NamedTuple):
    """A node that is no root. ``ordinal``: in its session, the root's is 0; ``parent``: the parent's. ``data``: token bytes.

    ``details``: without ``open_calls``, which follow from the path. ``state.carried`` holds plain tuples.
    """

    session: int
    ordinal: int
    parent: int
    id: bytes
    data: bytes
    media: tuple[MediaItem, ...]
    origin: Origin
    role: str
    key: str | None
    runs: Runs
    state: PositionState
    replayed: TurnPositions | None
    details: Details

    @property
    def turn(self) -> Turn:
        """What the node is made of, nothing of it checked."""
        return _as_turn(self[3:-1])


class HeadRecord(NamedTuple):
    """Where a head is. ``ordinal``: of its node; None: it was dropped."""

    session: int
    name: str
    ordinal: int | None
    version: int


class OpenedRecord(NamedTuple):
    """A writer opened a session, as this incarnation of it."""

    session: int
    incarnation: int


class AliasRecord(NamedTuple):
    """What an alias names in a namespace: 32 bytes; None: nothing any more."""

    namespace: Namespace
    alias: str
    identity: bytes | None


class PinRecord(NamedTuple):
    """Whether a node is pinned. ``ordinal``, ``id``: the node's."""

    session: int
    ordinal: int
    id: bytes
    pinned: bool


class DropRecord(NamedTuple):
    """Nodes that a session no longer shows, with all below them. ``ordinals``: increasing; 0 is the whole session."""

    session: int
    ordinals: tuple[int, ...]


class AnnotationRecord(NamedTuple):
    """All that is said of a node by one name. ``ordinal``, ``node_id``: the node's. ``version``: it grows with each one."""

    session: int
    ordinal: int
    node_id: bytes
    name: str
    value: Annotation
    version: int


Record = SessionRecord | NodeRecord | HeadRecord | OpenedRecord | AliasRecord | PinRecord | DropRecord | AnnotationRecord


class Entry(NamedTuple):
    """What an index keeps of a record.

    ``id``: of a node, also of one that is pinned; of others what :func:`name_digest` or :func:`alias_digest` gives, or zeros.
    ``key``: of a node's key, as :func:`key_digest` gives it; 1 of a node that is pinned; of an annotation its version. ``ordinal``:
    of what is dropped, the first. What a kind has not is 0, or :data:`NONE`.
    """

    kind: int
    session: int
    ordinal: int
    parent: int
    id: bytes
    key: int


# Every field behind the byte that is its type in msgpack: an array of 8, uint32, bin8, uint64.
_WRITE: Final = Struct(">BBBBIBIBIBB32sBQ")
_READ: Final = Struct(">3BxIxIxIxx32sxQ")
_ID: Final = slice(20, 20 + ID_BYTES)
_PLACE: Final = Struct(">IBIBI")  # of session, ordinal and parent, behind four bytes
_ARRAY: Final = 0x98
_WHOLE_RECORD, _WITHOUT_DIGEST = b"\x98", b"\xc1"  # the latter is the one byte that msgpack never uses
_DIGESTED: Final = (bytes([SESSION]), bytes([HEAD]))
_UINT32: Final = 0xCE
_BIN8: Final = 0xC4
_UINT64: Final = 0xCF
_BIN32: Final = Struct(">BI")
_LONGEST_NAME: Final = 4096  # bytes of a name that is looked for in what is left of a record
#: The same of a node, as NumPy has it, with the types filled in.
_HEAD: Final = np.frombuffer(
    _WRITE.pack(_ARRAY, NODE, FORMAT_VERSION, _UINT32, 0, _UINT32, 0, _UINT32, 0, _BIN8, ID_BYTES, bytes(ID_BYTES), _UINT64, 0),
    np.dtype(
        {
            "names": ["session", "ordinal", "parent", "id", "key"],
            "formats": [">u4", ">u4", ">u4", f"V{ID_BYTES}", ">u8"],
            "offsets": [4, 9, 14, 20, 53],
            "itemsize": _WRITE.size,
        }
    ),
)
_SHORT: Final = 256  # characters of a key or a role, up to which it is worth keeping how it is encoded
_LARGE: Final = 2**16  # bytes of tokens, from which on msgpack gives their length 32 bits

_ORIGINS: Final[tuple[Origin, ...]] = ("input", "generated")
_ORIGIN_NUMBERS: Final = {"input": 0, "generated": 1}
_FAR: Final = 2**53  # no position is farther
_OF_TOKENS: Final = (TokenValues, Ragged, Spans)
_SCALARS: Final = frozenset((NoneType, bool, int, float, str, bytes))
_TUPLE, _SET, _MAP, _DATA = range(4)


_FEW: Final = 128  # entries of an array that need not be counted first: nested as deep as msgpack goes, these are 1 MiB


def digest_of_key(key: str) -> int:
    """What an entry says of a key: the first 8 bytes of its sha256, little-endian; never 0."""
    return int.from_bytes(sha256(key.encode()).digest()[:8], "little") or 1


@lru_cache(64)  # it is asked for by a record and again by its entry
def key_digest(key: str | None) -> int:
    """The same; 0 without a key."""
    return 0 if key is None else digest_of_key(key)


def name_digest(name: str) -> bytes:
    """The id in the entries of a session, by its id, and of a head or an annotation, by its name: sha256."""
    return sha256(name.encode()).digest()


_digest_of_name = lru_cache(256)(name_digest)  # heads of many sessions have the same few names, and annotations


def name_in(data: bytes, kind: int, digest: bytes) -> str | None:
    """The name in what is left of a record: of a session, a head or an annotation.

    None unless what stands in its place still has the :func:`name_digest`.
    """
    first = _READ.size + 1  # behind the byte of an array; then up to five for the type and the length of a text
    first += 2 + ID_BYTES if kind == ANNOTATION else 0  # which says first of which node it is
    for start in range(first, min(first + 6, len(data))):
        so_far = sha256()
        for stop in range(start, min(start + _LONGEST_NAME, len(data))):
            so_far.update(data[stop : stop + 1])
            if so_far.digest() == digest:
                return data[start : stop + 1].decode(errors="replace")
    return None


def alias_digest(namespace: Namespace, alias: str) -> bytes:
    """The id in the entries of an alias."""
    return sha256(pack((*namespace, alias))).digest()


# Encoding


def encode(record: Record) -> bytes:
    """A record's bytes: equal records, equal bytes.

    Raises OutOfRange for numbers that no record holds, Unsupported for arrays of types that NumPy has from elsewhere, LimitExceeded
    above :data:`MAX_RECORD_BYTES`.
    """
    if isinstance(record, NodeRecord):
        return _joined(encode_turn(*record))
    if isinstance(record, SessionRecord):
        return _record(SESSION, record.session, 0, 0, name_digest(record.session_id), 0, record[1:])
    if isinstance(record, HeadRecord):
        at = NONE if record.ordinal is None else record.ordinal if record.ordinal < NONE else -1
        return _record(HEAD, record.session, at, 0, _digest_of_name(record.name), 0, (record.name, record.version))
    if isinstance(record, OpenedRecord):
        return _record(OPENED, record.session, 0, 0, bytes(ID_BYTES), 0, (record.incarnation,))
    if isinstance(record, AliasRecord):
        return _record(ALIAS, NONE, 0, 0, alias_digest(record.namespace, record.alias), 0, tuple(record))
    if isinstance(record, PinRecord):
        at = record.ordinal if record.ordinal < NONE else -1
        return _record(PIN, record.session, at, 0, record.id, int(record.pinned), (record.pinned,))
    if isinstance(record, DropRecord):
        increasing = all(0 <= one < other for one, other in itertools.pairwise((*record.ordinals, NONE)))
        if not record.ordinals or not increasing:
            raise OutOfRange(
                f"ordinals to drop are one or more, increasing, within 0..{NONE - 1}", value=record.ordinals, limit=NONE
            )
        return _record(
            DROP, record.session, record.ordinals[0], 0, bytes(ID_BYTES), 0, (np.array(record.ordinals, "<u4").tobytes(),)
        )
    if isinstance(record, AnnotationRecord):
        at = record.ordinal if record.ordinal < NONE else -1
        body = record.node_id, record.name, *_annotation_form(record.value)
        return _record(ANNOTATION, record.session, at, 0, _digest_of_name(record.name), record.version, body)
    raise TypeError(f"no record: {type(record).__name__}")


def _annotation_form(value: Annotation) -> tuple[int, Any]:
    """Which kind an annotation is, and its fields as what msgpack has."""
    if not isinstance(value, OfTokens):
        return 0, value
    parts = tuple(tuple(_packable(field) if isinstance(field, np.ndarray) else field for field in part) for part in value.fields())
    return 1 + _OF_TOKENS.index(type(value)), parts


def encode_node(session: int, ordinal: int, parent: int, node: Node) -> bytes:
    """The bytes of a node that is no root. ``parent``: its parent's ordinal. Raises what :func:`encode` raises."""
    return _joined(node_parts(session, ordinal, parent, node))


def node_parts(session: int, ordinal: int, parent: int, node: Node) -> bytes | tuple[bytes, ...]:
    """As :func:`encode_node`; where there are many tokens, in parts, of which one is what the node itself holds."""
    start, extent = node.start, node._extent
    origin = extent.origin
    if start >= origin:
        data = extent.buffer[(start - origin) * TOKEN_BYTES : (node.stop - origin) * TOKEN_BYTES]
    else:
        data = extent.read_bytes(start, node.stop)
    return encode_turn(
        session,
        ordinal,
        parent,
        node.id,
        data,
        node.media,
        node.origin,
        node.role or "",
        node.key,
        node.runs,
        node.state,
        node.replayed,
        node._details,
    )


def encode_turn(
    session: int,
    ordinal: int,
    parent: int,
    identity: bytes,
    data: bytes,
    media: tuple[MediaItem, ...],
    origin: Origin,
    role: str,
    key: str | None,
    runs: Runs,
    state: PositionState,
    replayed: TurnPositions | None,
    details: Details,
    digest: int | None = None,
) -> bytes | tuple[bytes, ...]:
    """As :func:`node_parts`, given what the node is made of. ``digest``: of its key, where that is known."""
    if not 0 <= parent < ordinal < NONE:
        raise OutOfRange(
            f"node {ordinal} behind {parent}: ordinals are 1..{NONE - 1}, behind their parents'", value=ordinal, limit=NONE
        )
    packed = None
    if details is not NO_DETAILS:
        metadata, finish_reason, tail_policy, links, _ = details
        frozen = None if metadata is EMPTY_METADATA or not metadata else _packable(metadata)
        if frozen is not None or finish_reason is not None or tail_policy is not None or links:
            packed = frozen, finish_reason, tail_policy, links
    items = [_item_fields(item) for item in media] if media else ()
    by = _ORIGIN_NUMBERS[origin]
    if digest is None:
        digest = key_digest(key)
    if len(data) < _LARGE:
        body = (key, by, role, data, runs, state, replayed, items, packed)
        return _record(NODE, session, ordinal, parent, identity, digest, body)
    rest = _record(NODE, session, ordinal, parent, identity, digest, (key, by, role, b"", runs, state, replayed, items, packed))
    at = _WRITE.size + len(pack((key, by, role)))
    _check_size(len(rest) + len(data))
    return rest[:at] + _BIN32.pack(0xC6, len(data)), data, rest[at + 2 :]


def _joined(encoded: bytes | tuple[bytes, ...]) -> bytes:
    return encoded if isinstance(encoded, bytes) else b"".join(encoded)


def _item_fields(item: MediaItem) -> tuple[Any, ...]:
    fields = item.fields()
    return fields if len(fields) == 9 else (*fields[:9], _packable(item._extra))


def beginning_of_node(session: int, ordinal: int, parent: int, identity: bytes, key: int) -> bytes:
    """What the record of a node begins with: 61 bytes, which say no more than its entry does."""
    return _beginning(NODE, session, ordinal, parent, identity, key)


def _beginning(kind: int, session: int, ordinal: int, parent: int, identity: bytes, key: int) -> bytes:
    return _WRITE.pack(
        _ARRAY,
        kind,
        FORMAT_VERSION,
        _UINT32,
        session,
        _UINT32,
        ordinal,
        _UINT32,
        parent,
        _BIN8,
        ID_BYTES,
        identity,
        _UINT64,
        key,
    )


def _record(kind: int, session: int, ordinal: int, parent: int, identity: bytes, key: int, body: tuple[Any, ...]) -> bytes:
    try:
        record = _beginning(kind, session, ordinal, parent, identity, key) + pack(body)
    except (StructError, OverflowError) as error:
        raise OutOfRange(f"record {kind} of session {session}, ordinal {ordinal}, parent {parent}: {error}", value=None) from None
    _check_size(len(record))
    return record


def _check_size(size: int) -> None:
    if size > MAX_RECORD_BYTES:
        raise LimitExceeded(f"a record of {size} bytes; {MAX_RECORD_BYTES} is the limit", value=size, limit=MAX_RECORD_BYTES)


def _packable(value: Any) -> Any:
    """A frozen value as what msgpack has."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, tuple):
        return (_TUPLE, *value) if _SCALARS.issuperset(map(type, value)) else (_TUPLE, *map(_packable, value))
    if isinstance(value, PMap):
        pairs = sorted(((key, _packable(entry)) for key, entry in value.items()), key=lambda pair: pack(pair[0]))
        return (_MAP, *(part for pair in pairs for part in pair))
    if isinstance(value, frozenset):
        return (_SET, *sorted(map(_packable, value), key=pack))
    assert isinstance(value, np.ndarray)  # there is nothing else that metadata are frozen to
    return _DATA, _dtype_form(value.dtype, 0), value.shape, value.tobytes()


def _dtype_form(dtype: np.dtype[Any], depth: int) -> Any:
    """A NumPy type: its string; of records (itemsize, aligned, fields), each field (name, title, offset, type, shape)."""
    if depth >= MAX_DEPTH:
        raise LimitExceeded(f"an array's type is nested deeper than {MAX_DEPTH}", value=depth, limit=MAX_DEPTH)
    if dtype.names is None:
        if dtype.kind == "V" and dtype.type is not np.void:
            raise Unsupported(f"an array of {dtype}, a type that NumPy has from elsewhere, cannot be stored")
        return dtype.str
    fields = []
    for name in dtype.names:
        assert dtype.fields is not None
        kind, offset, *title = dtype.fields[name]
        if title and type(title[0]) is not str:
            raise Unsupported(f"an array's field {name!r} with a title of type {type(title[0]).__name__} cannot be stored")
        fields.append((name, title[0] if title else None, offset, _dtype_form(kind.base, depth + 1), kind.shape))
    return dtype.itemsize, dtype.isalignedstruct, tuple(fields)


# Decoding

_WRONG: Final = (ValueError, TypeError, OverflowError, KeyError, IndexError, SessionTreeError, msgpack.UnpackException)


def entry_of(data: bytes) -> Entry:
    """What an index keeps of a record. It reads that alone: whether the rest is right is for :func:`decode` to say.

    Raises CorruptTree for what is no record of a known kind, IncompatibleStore for one of a newer version.
    """
    try:
        first, kind, version, session, ordinal, parent, identity, key = _READ.unpack_from(data)
    except StructError:
        first, kind, version = (*data[:3], 0, 0, 0)[:3]
        if version <= FORMAT_VERSION:
            raise CorruptTree(f"{len(data)} bytes are no record") from None
    if version > FORMAT_VERSION:
        raise IncompatibleStore(f"a record of kind {kind} and version {version}; this library reads up to {FORMAT_VERSION}")
    if first != _ARRAY or version != FORMAT_VERSION or kind not in _READERS:
        raise CorruptTree(f"no record begins with {data[:3].hex()}: kind {kind} of version {version} is unknown")
    return _as_entry((kind, session, ordinal, parent, identity, key))


def id_in(data: bytes) -> bytes:
    """What stands in the place of the id of an entry; nothing else is looked at."""
    return data[_ID]


def without_digest(data: bytes, digest: bytes) -> bytes:
    """The record of a session or a head without its id, where that is ``digest``, for a place that has this beside it; any other as
    it is.

    Of these kinds the id is the digest of a name which the record holds, so :func:`decode` takes what :func:`with_digest` gives
    with no other digest. What is left begins with a byte that no record begins with.
    """
    if data[:1] != _WHOLE_RECORD or data[1:2] not in _DIGESTED or data[_ID] != digest:
        return data
    return _WITHOUT_DIGEST + data[1 : _ID.start] + data[_ID.stop :]


def with_digest(data: bytes, digest: bytes) -> bytes:
    """What :func:`without_digest` was given."""
    return _WHOLE_RECORD + data[1 : _ID.start] + digest + data[_ID.start :] if data[:1] == _WITHOUT_DIGEST else data


def renumbered(data: bytes, session: int, ordinal: int, parent: int) -> bytes:
    """The record of a node as that of another place; nothing else of it is read or changed."""
    return data[:4] + _PLACE.pack(session, _UINT32, ordinal, _UINT32, parent) + data[4 + _PLACE.size :]


def decode(data: bytes, limit: int = MAX_RECORD_BYTES) -> Record:
    """The record of some bytes. Raises CorruptTree for anything else than what :func:`encode` gives, or more than ``limit`` bytes;
    IncompatibleStore for a newer version."""
    if len(data) > limit:
        raise CorruptTree(f"a record of {len(data)} bytes; {limit} is the limit")
    entry = entry_of(data)
    try:
        record: Record = _READERS[entry[0]](entry, _unpacked(data[_READ.size :]))
        again = _joined(encode_turn(*record)) if type(record) is NodeRecord else encode(record)
    except _WRONG as error:
        raise CorruptTree(f"{_named(entry)}: {str(error) or type(error).__name__}") from error
    if again != data:
        raise CorruptTree(f"{_named(entry)}: its content is encoded otherwise")
    return record


def heads_of(entries: NDArray[Any]) -> list[bytes]:
    """What records of nodes begin with, up to their bodies, given what an index keeps of them."""
    heads = np.frombuffer(bytearray(_HEAD.tobytes() * len(entries)), _HEAD.dtype)
    for name in heads.dtype.names or ():
        heads[name] = entries[name]
    made: list[bytes] = heads.view(f"V{_WRITE.size}").tolist()
    return made


def text_turn(data: bytes, head: bytes, parent_id: bytes, start: int) -> tuple[Turn, Details] | None:
    """What :func:`decode` reads of a node, :func:`check_digest` and :func:`check_positions` done, in half their time.

    Only of what most are: text whose positions are whole numbers, in a record of up to 64 KiB that begins with ``head``, below the
    node of ``parent_id`` that ends at ``start``. None: those three are to say. What fields would be encoded as is compared with the
    bytes that stand there, so they are of the types that are encoded so. ``data`` of the turn is a view of the record's.
    """
    if not data.startswith(head) or len(data) > _LARGE:
        return None
    try:
        _, _, session, ordinal, parent, identity, digest, body = _unpack(data)
        key, by, role, tokens, runs, state, _, _, packed = body
        _, after, top, _, _ = state
        if len(role) > _SHORT or (key is not None and len(key) > _SHORT):
            return None
        count = len(tokens) // TOKEN_BYTES
        before, origin, role, content = _before_tokens(key, by, role, count)
        details = _TEXT_DETAILS[packed]
    except _WRONG:
        return None
    behind = pack((runs, (start + count, after, top, (), ()), None, (), packed))
    if (
        not data.startswith(before, _WRITE.size)
        or not data.endswith(behind[1:])
        or len(data) != _WRITE.size + len(before) + len(tokens) + len(behind) - 1
        or not runs.__class__ is after.__class__ is top.__class__ is int
        or not -_FAR <= runs <= _FAR
        or not -1 <= top < after <= _FAR
        or not tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii()
        or not parent < ordinal < NONE > session
        or digest != (0 if key is None else digest_of_key(key))
        or node_id(parent_id, content, tokens) != identity
    ):
        return None
    state = _as_state((start + count, after, top, (), ()))
    view = memoryview(data)[_WRITE.size + len(before) : len(data) - len(behind) + 1]
    return _as_turn((identity, view, (), origin, role, key, runs, state, None)), details


@lru_cache(1024)
def _before_tokens(key: Any, by: Any, role: Any, count: int) -> tuple[bytes, Origin, str, bytes]:
    """What stands in the body of a node before its tokens, its origin and role, and what its id covers before them.

    Raises CorruptTree.
    """
    key, role = _text_or_none(key, "its key"), _text(role, "its role")
    origin = _ORIGINS[_whole(by, "its origin", most=1)]
    size = count * TOKEN_BYTES
    before = pack((key, by, role, bytes(size)))[1 : -size or None]
    return b"\x99" + before, origin, role, content_prefix(origin, role, key)


_unpack: Final = partial(msgpack.unpackb, use_list=False, max_array_len=_FEW, max_map_len=0, max_ext_len=0)
#: What stands in a record for details that nearly all nodes have.
_TEXT_DETAILS: Final = {None: NO_DETAILS} | {
    (None, details.finish_reason, details.tail_policy, details.links): details for details in USUAL_DETAILS.values()
}


def contents_of(data: bytes) -> list[tuple[Any, ...]]:
    """The contents of the media that a node's record names, as their features are kept by. What it says is not checked further."""
    items = _unpacked(data[_READ.size :])[7]
    return [_item(item).content() for item in items]


def decode_again(data: bytes) -> Record:
    """The record of bytes that :func:`decode` has taken before."""
    return _READERS[data[1]](entry_of(data), _unpacked(data[_READ.size :]))


def content_of(data: bytes) -> tuple[bytes, tuple[MediaItem, ...]]:
    """Token bytes and media of a node's record. Whether they are what its id says is not checked. Raises CorruptTree."""
    try:
        _, _, _, tokens, _, _, _, items, _ = _unpacked(data[_READ.size :])
        if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES and tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return tokens, _media(items, len(tokens) // TOKEN_BYTES) if items else ()
    except _WRONG as error:
        raise CorruptTree(f"{_named(entry_of(data))}: {str(error) or type(error).__name__}") from error
    _wrong(f"{_named(entry_of(data))}: its tokens are int32 of 0 or more")


def _named(entry: Entry) -> str:
    what = ("session", "node", "head", "opening of session", "alias", "pin in session", "drop in session", "annotation in session")[
        entry.kind - 1
    ]
    if entry.kind == NODE:
        return f"node {entry.ordinal} of session {entry.session} ({entry.id[:4].hex()})"
    return what if entry.kind == ALIAS else f"{what} {entry.session}"


def _wrong(what: str) -> NoReturn:
    raise CorruptTree(what)


def _unpacked(data: bytes) -> Any:
    """The one value that some bytes are."""
    try:
        return _unpack(data)
    except ValueError:
        # msgpack makes room for what arrays say they hold, at every level at once. Long ones are counted first.
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data)
        unpacker.skip()
        return msgpack.unpackb(data, use_list=False, max_map_len=0, max_ext_len=0)


def _fields(value: Any, count: int, what: str) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) != count:
        _wrong(f"{what} has {count} fields")
    return value


def _whole(value: Any, what: str, least: int = 0, most: int = 2**63 - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        _wrong(f"{what} is a number of {least}..{most}")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        _wrong(f"{what} is text")
    return value


def _text_or_none(value: Any, what: str) -> str | None:
    return None if value is None else _text(value, what)


def _digest(value: Any, what: str) -> bytes:
    if type(value) is not bytes or len(value) != ID_BYTES:
        _wrong(f"{what} has {ID_BYTES} bytes")
    return value


def _number(value: Any, what: str) -> Any:
    """A position, or a number that positions are computed from."""
    if not ((type(value) is int or (type(value) is float and math.isfinite(value))) and -_FAR <= value <= _FAR):
        _wrong(f"{what} is no position")
    return value


def _namespace(value: Any) -> Namespace:
    return Namespace(*(_text_or_none(field, "a namespace's field") for field in _fields(value, 3, "a namespace")))


def _read_session(entry: Entry, body: Any) -> SessionRecord:
    session_id, scheme, params, namespace, fingerprint, limits, identity, tip = _fields(body, 8, "a session")
    pairs = tuple(_fields(pair, 2, "a parameter") for pair in (params if type(params) is tuple else _wrong("parameters are pairs")))
    names = [_text(name, "a parameter's name") for name, _ in pairs]
    if names != sorted(set(names)):
        _wrong("parameters are not sorted by name")
    for name, value in pairs:
        if type(value) not in _SCALARS:
            _wrong(f"parameter {name!r} is no scalar")
    max_tokens, reserve = _fields(limits, 2, "limits")
    if max_tokens is not None:
        _whole(max_tokens, "max_tokens", most=2**64 - 1)
    _whole(reserve, "reserve_output", most=2**64 - 1 if max_tokens is None else max_tokens)
    if tip is not None:
        for value in _fields(tip, 2, "a tip"):
            _whole(value, "a tip's field", most=NONE - 1)
    return SessionRecord(
        _whole(entry.session, "session", most=NONE - 1),
        _text(session_id, "a session's id"),
        _text(scheme, "a scheme's name"),
        pairs,
        _namespace(namespace),
        _text(fingerprint, "a model fingerprint"),
        Limits(max_tokens, reserve),
        _digest(identity, "a root's id"),
        tip,
    )


def _read_head(entry: Entry, body: Any) -> HeadRecord:
    name, version = _fields(body, 2, "a head")
    at = None if entry.ordinal == NONE else entry.ordinal
    return HeadRecord(
        _whole(entry.session, "session", most=NONE - 1), _text(name, "its name"), at, _whole(version, "its version", most=2**64 - 1)
    )


def _read_opened(entry: Entry, body: Any) -> OpenedRecord:
    (incarnation,) = _fields(body, 1, "an opening")
    return OpenedRecord(_whole(entry.session, "session", most=NONE - 1), _whole(incarnation, "incarnation", most=2**64 - 1))


def _read_alias(entry: Entry, body: Any) -> AliasRecord:
    namespace, alias, identity = _fields(body, 3, "an alias")
    return AliasRecord(
        _namespace(namespace), _text(alias, "its name"), None if identity is None else _digest(identity, "an identity")
    )


def _read_pin(entry: Entry, body: Any) -> PinRecord:
    (pinned,) = _fields(body, 1, "a pin")
    session, ordinal = _whole(entry.session, "session", most=NONE - 1), _whole(entry.ordinal, "ordinal", most=NONE - 1)
    return PinRecord(session, ordinal, entry.id, pinned if type(pinned) is bool else _wrong("a node is pinned or not"))


def _read_drop(entry: Entry, body: Any) -> DropRecord:
    (ordinals,) = _fields(body, 1, "a drop")
    if type(ordinals) is not bytes or len(ordinals) % 4:
        _wrong("ordinals are of 4 bytes each")
    return DropRecord(_whole(entry.session, "session", most=NONE - 1), tuple(np.frombuffer(ordinals, "<u4").tolist()))


def _read_annotation(entry: Entry, body: Any) -> AnnotationRecord:
    node_id, name, kind, value = _fields(body, 4, "an annotation")
    session, ordinal = _whole(entry.session, "session", most=NONE - 1), _whole(entry.ordinal, "ordinal", most=NONE - 1)
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        _wrong(f"an annotation's name has 1 to {MAX_NAME} characters")
    if type(kind) is int and 0 < kind <= len(_OF_TOKENS):
        if type(value) is not tuple or any(type(part) is not tuple for part in value):
            _wrong("an annotation's parts are arrays")
        value = _OF_TOKENS[kind - 1].from_fields(tuple(tuple(map(_field, part)) for part in value))
    elif kind != 0 or type(value) not in (bool, int, float, str):
        _wrong("an annotation is of no known kind")
    return AnnotationRecord(session, ordinal, _digest(node_id, "an annotation's node"), name, value, entry.key)


def _field(value: Any) -> Any:
    """A field of an annotation's part: a scalar or an array."""
    return value if type(value) in _SCALARS else _frozen(value, 0)


def _read_node(entry: Entry, body: Any) -> NodeRecord:
    _, session, ordinal, parent, identity, _ = entry
    if session == NONE:
        _wrong("it is in no session")
    if type(body) is not tuple or len(body) != 9:
        _wrong("a node has 9 fields")
    key, origin, role, data, runs, state, replayed, items, packed = body
    if key is not None:
        _text(key, "its key")
    if type(origin) is not int or origin < 0:
        _whole(origin, "its origin")
    if type(role) is not str:
        _text(role, "its role")
    if type(data) is not bytes or len(data) % TOKEN_BYTES or not data[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        _wrong("its tokens are int32 of 0 or more")
    count = len(data) // TOKEN_BYTES
    check_runs(runs, count)
    state = _state(state, count)
    if replayed is not None:
        again, after = _fields(replayed, 2, "replayed positions")
        check_runs(again, count)
        replayed = TurnPositions(again, _state(after, count))
        if replayed.state.num_tokens != state.num_tokens:
            _wrong("its two states are after different numbers of tokens")
    media = _media(items, count) if items != () else ()
    details = NO_DETAILS if packed is None else _details(packed)
    origin = _ORIGINS[origin]
    return _as_record((session, ordinal, parent, identity, data, media, origin, role, key, runs, state, replayed, details))


def _state(value: Any, count: int) -> PositionState:
    num_tokens, after, top, blocks, carried = _fields(value, 5, "a position state")
    if tuple(map(type, value)) == _PLAIN_STATE and value[3:] == _NOTHING and count <= num_tokens and -1 <= top < after <= _FAR:
        return _as_state(value)
    _whole(num_tokens, "num_tokens", least=count)
    _number(after, "next_position")
    _number(top, "max_position")
    if type(blocks) is not tuple or type(carried) is not tuple:
        _wrong("open blocks and what is carried are arrays")
    for number in carried:
        if number is not None:
            _number(number, "what is carried")
    return PositionState(num_tokens, after, top, tuple(map(_open_block, blocks)) if blocks else (), carried)


_PLAIN_STATE: Final = (int, int, int, tuple, tuple)
_NOTHING: Final = ((), ())
_as_state = partial(tuple.__new__, PositionState)  # as PositionState(*value), without a Python call
_as_turn = partial(tuple.__new__, Turn)
_as_record = partial(tuple.__new__, NodeRecord)
_as_entry = partial(tuple.__new__, Entry)


def _open_block(value: Any) -> OpenBlock:
    content, base, placeholders = _fields(value, 3, "an open block")
    if type(content) is not tuple or not 6 <= len(content) <= 7 or any(type(extra) is not bytes for extra in content[6:]):
        _wrong("an open block's content is that of an item")
    modality, identity, *described = content[:6]
    if base is not None:
        _number(base, "an open block's base")
    item = MediaItem(modality, identity, (), *described)
    return OpenBlock((*item.content(), *content[6:]), base, _whole(placeholders, "an open block's placeholders"))


def _media(value: Any, count: int) -> tuple[MediaItem, ...]:
    if type(value) is not tuple:
        _wrong("its media are an array")
    if len(value) == 1:
        item = _item(value[0])
        if item.spans and sum(item.spans[-1]) <= count:
            return (item,)
    items = tuple(map(_item, value))
    placements(items, count)
    if items != in_token_order(items):
        _wrong("its media are not in the order of their spans")
    return items


def _item(value: Any) -> MediaItem:
    if type(value) is not tuple or not 9 <= len(value) <= 10:
        _wrong("an item has 9 or 10 fields")
    if tuple(map(type, value)) == _PICTURE:  # what nearly all are, without the conversions that callers need
        modality, identity, spans, grid, _, _, sizes, before, unfinished = value
        if len(spans) == 1 and len(grid) == 3 and _WHOLE.issuperset(map(type, (*spans[0], *grid))):
            offset, length = spans[0]
            frames, height, width = grid
            if (
                modality == "image"
                and len(identity) == ID_BYTES
                and offset >= 0 < length <= MAX_COUNT - offset
                and 0 < frames < MAX_COUNT > height > 0 < width < MAX_COUNT > before >= 0
                and not sizes
            ):
                item: MediaItem = _new(MediaItem)
                _put_modality(item, modality)
                _put_identity(item, identity)
                _put_spans(item, spans)
                _put_grid(item, grid)
                _put_seconds(item, None)
                _put_audio(item, None)
                _put_sizes(item, ())
                _put_before(item, before)
                _put_unfinished(item, unfinished)
                _put_extra(item, EMPTY_METADATA)
                _put_extra_field(item, ())
                return item
    return MediaItem(*value[:9], *map(_map, value[9:]))


_PICTURE: Final = (str, bytes, tuple, tuple, NoneType, NoneType, tuple, int, bool)
(
    _put_modality,
    _put_identity,
    _put_spans,
    _put_grid,
    _put_seconds,
    _put_audio,
    _put_sizes,
    _put_before,
    _put_unfinished,
    _put_extra,
    _put_extra_field,
) = map(_ITEM.__getitem__, (*(field.name for field in attrs.fields(MediaItem)),))
_new = object.__new__


def _details(value: Any) -> Details:
    metadata, finish_reason, tail_policy, links = _fields(value, 4, "details")
    _text_or_none(finish_reason, "a finish reason")
    if tail_policy is not None and tail_policy not in TAIL_POLICIES:
        _wrong("tail_policy is none")
    if type(links) is not tuple:
        _wrong("links are an array")
    return Details(EMPTY_METADATA if metadata is None else _map(metadata), finish_reason, tail_policy, tuple(map(_link, links)))


def _link(value: Any) -> Link:
    kind, identity, reused = _fields(value, 3, "a link")
    if kind not in ("derived_from", "prefix_of"):
        _wrong("a link is derived_from or prefix_of")
    return Link(kind, _digest(identity, "a link's node"), _whole(reused, "reused_tokens"))


def _map(value: Any) -> PMap[str, Any]:
    frozen = _frozen(value, 0)
    if not isinstance(frozen, PMap):
        _wrong("metadata are a map")
    return frozen


def _frozen(value: Any, depth: int) -> Any:
    """A value of metadata, ``depth`` containers down."""
    if type(value) in _SCALARS:
        return value
    if type(value) is not tuple or not value or type(value[0]) is not int:
        _wrong("metadata hold what is no value")
    if depth >= MAX_DEPTH:
        _wrong(f"metadata are nested deeper than {MAX_DEPTH}")
    tag, entries = value[0], value[1:]
    if tag == _DATA:
        return _array(*_fields(entries, 3, "an array"))
    if not _SCALARS.issuperset(map(type, entries)):
        entries = tuple(_frozen(entry, depth + 1) for entry in entries)
    if tag == _TUPLE:
        return entries
    if tag == _SET:
        members = frozenset(entries)
        return members if len(members) == len(entries) else _wrong("a set holds something twice")
    if tag != _MAP or len(entries) % 2:
        _wrong(f"metadata hold what is no value: {len(entries)} of kind {tag}")
    keys = entries[::2]
    if not {str, int}.issuperset(map(type, keys)):
        _wrong("a key is text or a number")
    pairs = dict(zip(keys, entries[1::2], strict=True))
    return pmap(pairs) if len(pairs) == len(keys) else _wrong("a map holds a key twice")


_DTYPE: Final = re.compile(
    r"\|b1|\|[iu]1|<[iu][248]|<f(2|4|8|12|16)|<c(8|16|24|32)|<U\d{1,9}|\|[SV]\d{1,9}|<[mM]8(\[\w{1,16}\])?", re.A
)
_MOST_AXES: Final = 64  # that NumPy has


def _array(form: Any, shape: Any, data: Any) -> Any:
    if type(data) is not bytes:
        _wrong("an array has bytes")
    shape = _shape(shape)
    dtype = _dtype(form, 0)
    if math.prod(shape) * dtype.itemsize != len(data):
        _wrong(f"{len(data)} bytes are no array of {dtype} and shape {shape}")
    return frozen_array(np.ndarray(shape, dtype, data))


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MOST_AXES:
        _wrong(f"a shape has {_MOST_AXES} sizes at most")
    return tuple(_whole(size, "a size") for size in value)


def _dtype(form: Any, depth: int) -> np.dtype[Any]:
    if type(form) is str:
        return np.dtype(form) if _DTYPE.fullmatch(form) else _wrong("an array of no known type")
    if depth >= MAX_DEPTH:
        _wrong(f"an array's type is nested deeper than {MAX_DEPTH}")
    itemsize, aligned, described = _fields(form, 3, "an array's type")
    if type(described) is not tuple or type(aligned) is not bool:
        _wrong("an array's fields are an array, aligned or not")
    names, titles, offsets = [], [], []
    formats: list[Any] = []
    for field in described:
        name, title, offset, kind, shape = _fields(field, 5, "an array's field")
        names.append(_text(name, "a field's name"))
        titles.append(_text_or_none(title, "a field's title"))
        offsets.append(_whole(offset, "a field's offset"))
        inner = _dtype(kind, depth + 1)
        formats.append((inner, _shape(shape)) if shape != () else inner)
    made: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": _whole(itemsize, "an item's size")}
    if any(title is not None for title in titles):
        made["titles"] = titles
    dtype: np.dtype[Any] = np.dtype(made, align=aligned)
    return dtype


# Position runs

_TEXT, _FLOAT_TEXT, _GRID, _FRAMES, _ROWS, _CANVAS, _TABLE, _EXTERNAL = range(len(_KINDS))
_NUMBERS: Final = {(_TEXT, 3), (_GRID, 8), (_ROWS, 6)}  # runs of whole numbers alone, and how many there are with the kind
_MIXED: Final = {
    _FLOAT_TEXT: ((int, int, float, int),),
    _FRAMES: tuple((int, int, number, bytes, int, int, int) for number in (int, float)),
    _CANVAS: ((int, int, int, bytes),),
    _TABLE: ((int, int, str, bytes),),
    _EXTERNAL: ((int, int, str, bytes),),
}


def check_runs(runs: Any, num_tokens: int, num_axes: int | None = None) -> None:
    """Whether position runs cover ``num_tokens`` tokens, and can be written on ``num_axes`` axes; None: on some number of them.

    Raises CorruptTree.
    """
    if type(runs) is int:
        _number(runs, "a run's base")
        return
    if type(runs) is not bytes:
        _wrong("runs are a number or bytes")
    try:
        described = _unpacked(runs)
        if type(described) is not tuple:
            _wrong("they are an array")
        covered = 0
        for run in described:
            if len(run) == 3 and _WHOLE.issuperset(map(type, run)):  # what most are, without a call
                kind, length, base = run
                if kind == _TEXT and length >= 0 and -_FAR <= base <= _FAR:
                    covered += length
                    continue
            elif len(run) == 8 and num_axes in _THREE and _WHOLE.issuperset(map(type, run)):
                kind, length, _, _, _, height, width, skip = run
                if kind == _GRID and length >= 0 and min(run) >= -_FAR and max(run) <= _FAR:
                    _check_grid(height, width, skip)
                    covered += length
                    continue
            covered += _check_run(run, num_axes)
            if run[0] == _EXTERNAL and len(described) > 1:
                _wrong("a table that came from elsewhere is a node's only run")
    except _WRONG as error:
        raise CorruptTree(f"runs: {str(error) or type(error).__name__}") from error
    if covered != num_tokens:
        _wrong(f"runs of {covered} tokens in a node of {num_tokens}")


def _check_run(run: Any, num_axes: int | None) -> int:
    """How many tokens a run covers."""
    if type(run) is not tuple or len(run) < 3:
        _wrong("a run is of no known kind")
    kind: int = run[0]
    length: int = run[1]
    if _WHOLE.issuperset(map(type, run)):
        if (kind, len(run)) not in _NUMBERS or min(run) < -_FAR or max(run) > _FAR:
            _wrong("no run has these numbers")
    elif type(kind) is not int or tuple(map(type, run)) not in _MIXED.get(kind, ()):
        _wrong("no run has these fields")
    if length < 0:
        _wrong(f"a run of {length} tokens")
    if num_axes not in _AXES.get(kind, (num_axes,)) and not (kind == _ROWS and num_axes and num_axes > 3):
        _wrong(f"a {_KINDS[kind].__name__} on {num_axes} axes")
    if kind == _TEXT:
        pass
    elif kind == _GRID:
        _check_grid(*run[5:])
    elif kind == _FRAMES:
        _, _, base, times, height, width, skip = run
        _number(base, "a run's base")
        _check_grid(height, width, skip)
        number = np.dtype("<f4") if type(base) is float else np.dtype("<i8")
        if len(times) != -(-(skip + length) // (height * width)) * number.itemsize:
            _wrong(f"times of {len(times)} bytes for {skip + length} tokens in frames of {height * width}")
        _check_table(times, number)
    elif kind == _FLOAT_TEXT:
        _number(run[2], "a run's base")
        _whole(run[3], "where a run of text begins", most=_FAR)
    elif kind == _ROWS:
        _whole(run[3], "a row's width", 1)
        _whole(run[5], "where a run begins")
    elif kind == _CANVAS:
        _number(run[2], "a canvas's origin")
        _check_crops(length, run[3])
    else:
        _, _, dtype, data = run
        if dtype not in ("<i8", "<f4"):
            _wrong("a table of no known type")
        axis = length * int(dtype[2])
        if not axis or not data or len(data) % axis or (num_axes is not None and len(data) != num_axes * axis):
            _wrong(f"a table of {len(data)} bytes for {length} tokens")
        _check_table(data, np.dtype(dtype))
    return length


_WHOLE: Final = frozenset((int,))
_THREE: Final = (None, 3)
_AXES: Final = dict.fromkeys((_GRID, _FRAMES, _ROWS, _CANVAS), _THREE)


def _check_grid(height: int, width: int, skip: int) -> None:
    if not (0 < height < MAX_COUNT and 0 < width <= MAX_COUNT and 0 <= skip < height * width):
        _wrong(f"a run that begins at {skip} of a grid of {height} x {width}")


def _check_table(data: bytes, number: np.dtype[Any]) -> None:
    table = np.frombuffer(data, number)
    if table.size and not (table.min() >= 0 and table.max() <= _FAR):
        _wrong("a table holds what is no position")


def _check_crops(length: int, crops: bytes) -> None:
    if len(crops) % 12:
        _wrong(f"crops of {len(crops)} bytes")
    end = 0
    for offset, height, width in np.frombuffer(crops, "<i4").reshape(-1, 3).tolist():
        if offset <= end or height < 1 or width < 1 or offset + height * width > length:
            _wrong(f"a crop of {height} x {width} at {offset} of a canvas of {length} tokens")
        end = offset + height * width


_READERS: Final[dict[int, Callable[[Entry, Any], Record]]] = {
    SESSION: _read_session,
    NODE: _read_node,
    HEAD: _read_head,
    OPENED: _read_opened,
    ALIAS: _read_alias,
    PIN: _read_pin,
    DROP: _read_drop,
    ANNOTATION: _read_annotation,
}


# Where records stand


def check_root(record: SessionRecord) -> None:
    """Whether a session's root id is that of its content. Raises CorruptTree."""
    computed = root_id(record.scheme, record.params, record.namespace, record.model_fingerprint)
    if computed != record.root_id:
        _wrong(f"root {record.root_id[:4].hex()} of session {record.session_id!r} holds the content of {computed[:4].hex()}")


def rules_of(record: SessionRecord) -> PositionScheme:
    """The scheme of a session that is no fork. Raises CorruptTree where its parameters are none of the scheme's, UnknownScheme."""
    try:
        rules = scheme(record.scheme, **dict(record.params))
    except TypeError as error:
        raise CorruptTree(f"session {record.session_id!r}: {error}") from error
    if (rules.name, tuple(sorted(rules.params.items()))) != (record.scheme, record.params):
        _wrong(f"session {record.session_id!r} has not the parameters of {rules.name}")
    return rules


def id_below(record: NodeRecord, parent_id: bytes) -> bytes:
    """The id of a node's content under the parent of this id."""
    table = (record.runs, record.state) if is_external(record.runs) else None
    media = tuple(item.fields() for item in record.media) if record.media else ()
    head = content_prefix(record.origin, record.role, record.key, media, table)
    return node_id(parent_id, head, record.data)


def check_digest(record: NodeRecord, parent_id: bytes) -> None:
    """Whether a node's id is that of its content under the parent of this id. Raises CorruptTree."""
    computed = id_below(record, parent_id)
    if computed != record.id:
        _wrong(f"{_node(record)} holds the content of {computed[:4].hex()}")


def check_positions(record: NodeRecord, parent_stop: int, scheme: PositionScheme) -> None:
    """Whether a node's runs and states can follow ``parent_stop`` tokens under a scheme. Raises CorruptTree.

    Not whether the rule gives these: no rule is applied again.
    """
    count = len(record.data) // TOKEN_BYTES
    kind = float if scheme.floats else int
    for runs, state in ((record.runs, record.state), *(() if record.replayed is None else (record.replayed,))):
        num_tokens, after, top, _, carried = state
        if num_tokens != parent_stop + count:
            _wrong(f"{_node(record)} has a state of {num_tokens} tokens and ends after {parent_stop + count}")
        if runs.__class__ is not int:  # which goes on any axes
            check_runs(runs, count, scheme.num_axes)
        if type(after) is not kind or type(top) is not kind:
            _wrong(f"{_node(record)}: positions of {scheme.name} are no such numbers")
        if len(carried) not in scheme.carries:
            _wrong(f"{_node(record)} carries {len(carried)} numbers, {scheme.name} {' or '.join(map(str, scheme.carries))}")
        for number, first in zip(carried, scheme.initial_state().carried or (0,) * len(carried), strict=True) if carried else ():
            if type(number) is not type(first) and not (first is None and type(number) is float):
                _wrong(f"{_node(record)} carries other numbers than {scheme.name}")
            if type(number) is int and number < 0:
                _wrong(f"{_node(record)} carries a count of {number}")


def _node(record: NodeRecord) -> str:
    return f"node {record.id[:4].hex()}"
