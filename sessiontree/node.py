"""A node: one immutable turn of a session, and everything that can be read along its path.

A node views its tokens in an extent, keeps the position state after its last token, and names its parent. Nothing changes
after creation; every reading is a value or a read-only view; no walk recurses. Nodes are made by trees and drafts, never by
calling the class.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyrsistent import PMap

from sessiontree.details import NO_DETAILS, Details, Link, TailPolicy, with_open_calls
from sessiontree.digest import root_id
from sessiontree.errors import MediaSpanError, OutOfRange, PositionError
from sessiontree.features import FeatureStore
from sessiontree.frozen import Sealed, checked_text, frozen_empty, handed_out, no_subclasses, seal
from sessiontree.media import MediaItem
from sessiontree.positions import MODES, Mode, PositionScheme, PositionState
from sessiontree.positions.base import OpenBlock
from sessiontree.positions.runs import INT64, Piece, Runs, plain_table, spelled_out, write
from sessiontree.spans import Placeholders, common_placeholders, join_placeholders
from sessiontree.tokens import INT32, Extent, Position, in_range, window

Origin = Literal["input", "generated"]
MediaSpan = tuple[MediaItem, int, int]


class Namespace(NamedTuple):
    """Who may share a prefix: equal content under another salt, LoRA or tenant is another node."""

    cache_salt: str | None = None
    lora: str | None = None
    tenant: str | None = None

    @classmethod
    def of(cls, value: Namespace | Mapping[str, str | None] | str | None) -> Namespace:
        """A namespace from itself, a mapping of its fields, a tenant's name, or None."""
        if isinstance(value, Namespace):
            value = value._asdict()
        elif isinstance(value, str):
            value = {"tenant": value}
        elif value is not None and not isinstance(value, Mapping):
            raise TypeError(f"a namespace is a Namespace, a mapping or a tenant's name, not {type(value).__name__}")
        fields = dict(value or {})
        if unknown := fields.keys() - set(cls._fields):
            names = ", ".join(sorted(name if isinstance(name, str) else type(name).__name__ for name in unknown))
            raise TypeError(f"a namespace has {', '.join(cls._fields)}, not {names}")
        return cls(
            **{name: None if field is None else checked_text(field, f"namespace field {name}") for name, field in fields.items()}
        )


class TurnPositions(NamedTuple):
    """Positions of one turn: its runs, and the state after its last token."""

    runs: Runs
    state: PositionState


class Lineage(NamedTuple):
    """What is constant in a session: the fields of its root's id; and where features of its media are kept, if anywhere."""

    scheme: PositionScheme
    namespace: Namespace
    model_fingerprint: str
    features: weakref.ref[FeatureStore] | None = None


#: Every so many nodes, one holds all those above it up to the one before that does, so that paths are put together from tuples.
PATH_BLOCK: Final = 32


#: (parent, above, jump, depth, id, block): the ways up from a node of ``depth`` and ``id``. Walks go from tuple to tuple, and meet
#: nodes only at their end. ``above``: those of the parent. ``jump``: skew-binary, those of an ancestor further up: ancestors are
#: found in O(log depth). ``block``: the ``PATH_BLOCK`` nodes above, in path order, of a node whose depth is a multiple of that.
#: A root has none of these. No class of its own: each node makes one.
Up = tuple["Node | None", "Up | None", "Up | None", int, bytes, "tuple[Node, ...] | None"]


class Node(Sealed):
    """One turn. Equal and hashed by ``id``.

    ``id``: 32 bytes over the parent's id and everything an engine computes from. ``parent``: None for a root. ``start``, ``stop``:
    its tokens on the path, half-open. ``media``: its items, by their first span, spans relative to ``start``. ``origin``: "input"
    for prefilled tokens, "generated" for decoded ones. ``role``: None for a root. ``key``: the caller's or the draft's key, None
    without one. ``runs``, ``state``: position runs of its tokens and the state after them, as decoded; ``replayed``: the same as
    replayed, None where the two agree.

    Not an attrs class: whatever walks the fields of those would walk the parents, one call deeper for each.
    """

    __slots__ = (
        "__weakref__",
        "_details",
        "_extent",
        "_lineage",
        "_media_above",
        "_state",
        "_up",
        "id",
        "key",
        "media",
        "origin",
        "parent",
        "replayed",
        "role",
        "runs",
        "start",
        "stop",
    )

    id: bytes
    parent: Node | None
    start: int
    stop: int
    media: tuple[MediaItem, ...]
    origin: Origin
    role: str | None
    key: str | None
    runs: Runs
    replayed: TurnPositions | None
    _details: Details
    _lineage: Lineage
    _extent: Extent
    _state: PositionState | None  # None: where every token stands at its index
    _up: Up
    _media_above: Node | None  # the nearest node above it that has media; never itself, or only the collector could free it

    __init_subclass__ = no_subclasses

    def __new__(cls) -> Node:
        raise TypeError("nodes are made by append, commit and the like, not by calling Node")

    @property
    def state(self) -> PositionState:
        """The position state after its last token, as decoded."""
        state: PositionState | None = _get_state(self)
        if state is not None:
            return state
        stop = _get_stop(self)
        return _plain_state((stop, stop, stop - 1, (), ()))

    @property
    def depth(self) -> int:
        """How many nodes stand above it; 0 for a root."""
        return self._up[3]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its own tokens: (stop - start,) int32, read-only. As for :meth:`input_ids`."""
        return self._extent.read(self.start, self.stop)

    @property
    def finish_reason(self) -> str | None:
        """Why its generation ended; None where nothing was generated. Outside its identity."""
        return self._details.finish_reason

    @property
    def tail_policy(self) -> TailPolicy | None:
        """Whether the last sampled token was kept or dropped at commit; None where nothing was generated. Outside its identity."""
        return self._details.tail_policy

    @property
    def metadata(self) -> PMap[str, Any]:
        """The caller's metadata, frozen to the bottom; a copy each time. Outside its identity."""
        metadata: PMap[str, Any] = handed_out(self._details.metadata)
        return metadata

    @property
    def links(self) -> tuple[Link, ...]:
        """Edges to the nodes it was made from. Outside its identity."""
        return self._details.links

    @property
    def scheme(self) -> PositionScheme:
        """The position scheme of its session."""
        return self._lineage.scheme

    @property
    def namespace(self) -> Namespace:
        """The namespace of its session."""
        return self._lineage.namespace

    @property
    def model_fingerprint(self) -> str:
        """The model fingerprint of its session."""
        return self._lineage.model_fingerprint

    @property
    def feature_store(self) -> FeatureStore | None:
        """Where features of its media are kept: its store's. None outside a store, or when that is gone."""
        features = self._lineage.features
        return None if features is None else features()

    @property
    def next_position(self) -> Position | float:
        """Where the next prefilled text token stands, given the positions its path was decoded with."""
        return self._lineage.scheme.next_position(self.state)

    @property
    def mrope_position_delta(self) -> int | float:
        """max_position + 1 - stop, as decoded: the token at index i that is decoded next stands at i + delta."""
        return self._lineage.scheme.mrope_position_delta(self.state)

    def position_state(self, mode: Mode = "as_decoded") -> PositionState:
        """The state that positions after this node continue from."""
        return positions_in(self, mode).state

    def path(self) -> tuple[Node, ...]:
        """The nodes from the root, depth 0, to this one."""
        run = [self]
        parent, above, _, _, _, block = self._up
        while block is None and parent is not None and above is not None:
            run.append(parent)
            parent, above, _, _, _, block = above
        run.reverse()
        blocks: list[Sequence[Node]] = [run]
        while block is not None:
            blocks.append(block)
            block = block[0]._up[5]
        blocks.reverse()
        return tuple(itertools.chain.from_iterable(blocks))

    def ancestor(self, depth: int) -> Node:
        """The node at ``depth`` on its path, itself included, in O(log depth). Raises OutOfRange."""
        up = self._up
        at = up[3]
        if depth.__class__ is not int or not 0 <= depth <= at:
            depth = in_range(depth, at, "depth", self)
        if depth == at:
            return self
        while at > depth + 1:
            _, above, jump, _, _, _ = up
            up = jump if jump[3] > depth else above  # type: ignore[index, assignment]  # only the root has none
            at = up[3]
        return up[0]  # type: ignore[return-value]

    def node_at(self, index: int) -> Node:
        """The node of its path that holds token ``index``, in O(log depth). Raises OutOfRange outside 0..stop - 1."""
        if not self.stop:
            raise OutOfRange(f"{self!r} has no tokens on its path", value=index, limit=0)
        return deepest_from(self, in_range(index, self.stop - 1, "token index", self))

    def input_ids(self, start: int = 0, stop: int | None = None, *, copy: bool = True) -> NDArray[np.int32]:
        """Path tokens ``[start, stop)``: (stop - start,) int32, read-only. Raises OutOfRange.

        A copy, unless asked otherwise: whatever is done to it, by way of PyTorch too, which ignores NumPy's read-only flag,
        reaches no node. With ``copy=False`` it is a view of what everybody reads, without touching the tokens: for code that only
        reads. The path of a fork is gathered when it is first viewed, and kept under the store's ``path_cache_bytes``.
        """
        if copy:
            first, last = window(start, stop, self.stop)
            return self._extent.read(first, last)
        if stop is None and start == 0 and start.__class__ is int:
            extent = self._extent
            if not extent.origin and self.stop:
                return np.frombuffer(extent.buffer, INT32, self.stop)
        return self._extent.view(*window(start, stop, self.stop))

    def positions(
        self, start: int = 0, stop: int | None = None, mode: Mode = "as_decoded", *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Positions of path tokens ``[start, stop)``: (num_axes, stop - start) in the scheme's dtype, read-only.

        ``as_decoded`` matches the KV that exists, ``as_replayed`` a prefill of the whole history. ``out``: an array of the
        caller's to write them into, of that shape and dtype, such as a window of pinned memory; it is what comes back then. Raises
        OutOfRange for the window, PositionError for the mode or another ``out``.
        """
        first, last = window(start, stop, self.stop)
        return positions_table(self._lineage.scheme, last - first, position_pieces(self, first, last, mode), out)

    def media_spans(self, start: int = 0, stop: int | None = None) -> tuple[MediaSpan, ...]:
        """(item, start, stop) for each span that meets the window, in path order and coordinates, clipped to the window."""
        return tuple((item, begin, end) for item, begin, end, _ in clipped_spans(self, *window(start, stop, self.stop)))

    def shared_prefix_len(self, other: Node) -> int:
        """How many tokens from the root on the two paths have alike: ids, media, and positions as decoded.

        So many entries of one's KV cache serve the other, whatever nodes they are in. O(what stands behind the last node they
        share).
        """
        shared = lowest_common_ancestor(self, other)
        if shared is None:
            return 0
        start, stop = shared.stop, min(self.stop, other.stop)
        stop = common_placeholders(placed_media(self, start, stop), placed_media(other, start, stop), start, stop)
        alike = self.input_ids(start, stop) == other.input_ids(start, stop)
        alike &= (self.positions(start, stop) == other.positions(start, stop)).all(axis=0)
        return start + (len(alike) if alike.all() else int(alike.argmin()))

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return True  # an empty turn is a node all the same

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Node) and self.id == other.id)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        media = f", media={len(self.media)}" if self.media else ""
        what = f"role={self.role!r}, {self.origin}" if self.parent is not None else f"root of {self.scheme.name}"
        return f"<Node {self.id[:4].hex()} depth={self.depth} tokens=[{self.start}, {self.stop}) {what}{media}>"


_get_state, _get_stop = (Node.__dict__[name].__get__ for name in ("_state", "stop"))
_plain_state = partial(tuple.__new__, PositionState)
_SET = seal(Node)
_new = object.__new__
_set_id = _SET["id"]
_set_parent = _SET["parent"]
_set_start = _SET["start"]
_set_stop = _SET["stop"]
_set_media = _SET["media"]
_set_origin = _SET["origin"]
_set_role = _SET["role"]
_set_key = _SET["key"]
_set_runs = _SET["runs"]
_set_state = _SET["_state"]
_set_replayed = _SET["replayed"]
_set_details = _SET["_details"]
_set_lineage = _SET["_lineage"]
_set_extent = _SET["_extent"]
_set_up = _SET["_up"]
_set_media_above = _SET["_media_above"]


def make_root(lineage: Lineage, extent: Extent) -> Node:
    """The root of a session: no tokens, depth 0."""
    scheme = lineage.scheme
    state = scheme.initial_state()
    identity = root_id(scheme.name, list(scheme.params.items()), lineage.namespace, lineage.model_fingerprint)
    node: Node = _new(Node)
    fields: dict[str, Any] = {
        "id": identity,
        "parent": None,
        "start": 0,
        "stop": 0,
        "media": (),
        "origin": "input",
        "role": None,
        "key": None,
        "runs": 0,
        "_state": state,
        "replayed": None,
        "_details": NO_DETAILS,
        "_lineage": lineage,
        "_extent": extent,
        "_up": (None, None, None, 0, identity, None),
        "_media_above": None,
    }
    for name, value in fields.items():
        _SET[name](node, value)
    return node


def is_on_path(node: Node, tip: Node) -> bool:
    """Whether a node is on the path to another, or that one. O(log depth)."""
    return node.depth <= tip.depth and tip.ancestor(node.depth).id == node.id


def make_child(
    parent: Node,
    identity: bytes,
    stop: int,
    media: tuple[MediaItem, ...],
    origin: Origin,
    role: str,
    key: str | None,
    runs: Runs,
    state: PositionState,
    replayed: TurnPositions | None,
    details: Details,
    extent: Extent,
) -> Node:
    """A node over tokens that ``extent`` already holds; everything was checked by the caller."""
    node: Node = _new(Node)
    above = parent._up
    _, _, jump, depth, _, _ = above
    beyond = None if jump is None else jump[2]
    jump = beyond if beyond is not None and depth - jump[3] == jump[3] - beyond[3] else above  # type: ignore[index]
    depth += 1
    if media and runs.__class__ is int:  # audio can stand as text does
        runs = spelled_out(runs, stop - parent.stop)
    before = parent._details
    if details is not NO_DETAILS or before is not NO_DETAILS:
        details = with_open_calls(before, details, depth)
    _set_id(node, identity)
    _set_parent(node, parent)
    _set_start(node, parent.stop)
    _set_stop(node, stop)
    _set_media(node, media)
    _set_origin(node, origin)
    _set_role(node, role)
    _set_key(node, key)
    _set_runs(node, runs)
    _, after, top, blocks, carried = state
    plain = after is stop and top == stop - 1 and not blocks and not carried  # one object: no float that is equal
    _set_state(node, None if plain else state)
    _set_replayed(node, replayed)
    _set_details(node, details)
    _set_lineage(node, parent._lineage)
    _set_extent(node, extent)
    _set_up(node, (parent, above, jump, depth, identity, None if depth % PATH_BLOCK else _block_above(parent)))
    _set_media_above(node, parent if parent.media else parent._media_above)
    return node


_piece = partial(tuple.__new__, Piece)  # as Piece(...), without a Python call


def _block_above(node: Node) -> tuple[Node, ...]:
    block = [node]
    for _ in range(PATH_BLOCK - 1):
        block.append(_parent(block[-1]))
    block.reverse()
    return tuple(block)


def _parent(node: Node) -> Node:
    parent = node.parent
    assert parent is not None  # callers stop above the root
    return parent


def lowest_common_ancestor(one: Node, two: Node) -> Node | None:
    """The deepest node that is on both paths, in O(log depth); None where the roots differ."""
    for node in (one, two):
        if type(node) is not Node:
            raise TypeError(f"an ancestor is asked for of Nodes, not {type(node).__name__}")
    depth = min(one._up[3], two._up[3])
    one, two = one.ancestor(depth), two.ancestor(depth)
    if one.id == two.id:
        return one
    # What two paths share are mostly the same objects, which costs less to see than equal ids.
    left, right = one._up, two._up
    while True:
        parent, above, jump, _, _, _ = left
        _, other_above, other_jump, _, _, _ = right
        if above is other_above:
            break
        if jump is other_jump:
            left, right = above, other_above  # type: ignore[assignment]  # only the root has none
        else:
            left, right = jump, other_jump  # type: ignore[assignment]
    if left[4] != right[4]:
        return parent
    # The same node in two objects: ids alone say how much further down the paths are the same.
    left, right = one._up, two._up
    while True:
        parent, above, jump, _, _, _ = left
        _, other_above, other_jump, _, _, _ = right
        if above[4] == other_above[4]:  # type: ignore[index]
            return parent
        if jump[4] == other_jump[4]:  # type: ignore[index]
            left, right = above, other_above  # type: ignore[assignment]
        else:
            left, right = jump, other_jump  # type: ignore[assignment]


def positions_in(node: Node, mode: Mode) -> TurnPositions:
    """The runs and state of a node in one mode."""
    if not isinstance(mode, str):
        raise TypeError(f"a mode is text, not {type(mode).__name__}")
    if mode == "as_decoded" or (mode == "as_replayed" and node.replayed is None):
        return TurnPositions(node.runs, node.state)
    if mode == "as_replayed":
        assert node.replayed is not None
        return node.replayed
    raise PositionError(f"no positions {mode!r}; a mode is one of {', '.join(MODES)}", mode=mode)


def deepest_from(node: Node, index: int) -> Node:
    """The deepest node of ``node``'s path that starts at or before token ``index``, in O(log depth)."""
    if node.start <= index:
        return node
    up = node._up
    while True:  # up from a node that starts behind the index
        parent, above, jump, _, _, _ = up
        assert parent is not None and above is not None and jump is not None  # the root starts at 0
        if parent.start <= index:
            return parent
        up = jump if jump[0] is not None and jump[0].stop > index else above


def deepest_to(node: Node, length: int) -> Node:
    """The deepest node of ``node``'s path that ends at or before token ``length``, in O(log depth)."""
    if node.stop <= length:
        return node
    up = node._up
    while True:  # up from a node that ends behind the length
        parent, above, jump, _, _, _ = up
        assert parent is not None and above is not None and jump is not None  # the root ends at 0
        if parent.stop <= length:
            return parent
        up = jump if jump[0] is not None and jump[0].stop > length else above


def positions_table(scheme: PositionScheme, count: int, pieces: list[Piece], out: NDArray[Any] | None) -> NDArray[Any]:
    """What covers ``count`` tokens, written out: a read-only table, or ``out``. Raises TypeError, PositionError."""
    shape = scheme.num_axes, count
    if out is None:
        data = plain_table(pieces, shape[0]) if scheme.dtype is INT64 else None
        if data is not None:
            return np.ndarray(shape, INT64, data)
        table, pen = frozen_empty(shape, scheme.dtype)
        write(pieces, pen)
        return table
    if type(out) not in (np.ndarray, np.memmap):
        raise TypeError(f"out is a plain array, not {type(out).__name__}")
    if out.shape != shape or out.dtype != scheme.dtype or not out.flags.writeable:
        kind = "writable" if out.flags.writeable else "read-only"
        raise PositionError(
            f"out is to be a writable array of {shape} {scheme.dtype}, not a {kind} one of {out.shape} {out.dtype}",
            value=out.shape,
            limit=shape,
        )
    write(pieces, out)
    return out


def position_pieces(node: Node, start: int, stop: int, mode: Mode) -> list[Piece]:
    """What of its path's runs covers path tokens ``[start, stop)``, in path order; columns count from ``start``."""
    if mode.__class__ is not str or mode != "as_decoded":
        positions_in(node, mode)  # an empty window of an unknown mode is refused too
    pieces: list[Piece] = []
    if start == stop:
        return pieces
    at = deepest_from(node, stop - 1)
    while True:
        own, end = at.start, min(stop, at.stop)
        begin = max(start, own)
        if begin < end:
            replayed = at.replayed
            runs = at.runs if replayed is None or mode == "as_decoded" else replayed.runs
            pieces.append(_piece((begin - start, runs, begin - own, end - own)))
        if own <= start:
            break
        at = _parent(at)
    pieces.reverse()
    return pieces


def last_with_media(node: Node) -> Node | None:
    """The nearest node of its path, itself included, that has media."""
    return node if node.media else node._media_above


def clipped_spans(node: Node, start: int, stop: int) -> list[tuple[MediaItem, int, int, int]]:
    """(item, start, stop, first placeholder) for each span that meets path tokens ``[start, stop)``, clipped to them.

    ``first placeholder``: which of the whole item's placeholders, from 0, stands at the clipped start.
    """
    found: list[tuple[MediaItem, int, int, int]] = []
    at = last_with_media(deepest_from(node, stop - 1)) if start < stop else None
    while at is not None and at.stop > start:
        found += reversed(own_spans(at.media, at.start, start, stop))
        at = at._media_above
    found.reverse()
    return found


def own_spans(media: tuple[MediaItem, ...], at: int, start: int, stop: int) -> list[tuple[MediaItem, int, int, int]]:
    """The same of the items of one turn, which starts at path index ``at``."""
    spans = []
    for item in media:
        placeholder = item.placeholders_before
        for offset, length in item.spans:
            begin, end = at + offset, at + offset + length
            if begin < stop and end > start:
                clipped = max(begin, start)
                spans.append((item, clipped, min(end, stop), placeholder + clipped - begin))
            placeholder += length
    return sorted(spans, key=lambda span: span[1])


def open_item(node: Node, block: OpenBlock) -> tuple[MediaItem, int, int]:
    """(item, start, stop) of the last part of an item that a path holds only so far; the walk ends there."""
    at = last_with_media(node)
    while at is not None:
        for item in at.media:
            if item.unfinished and item.content() == block.content:
                offset, length = item.spans[-1]
                return item, at.start + offset, at.start + offset + length
        at = at._media_above
    raise LookupError(block)


def refuse_inside_item(node: Node, what: object, why: str) -> None:
    """Raises MediaSpanError where a path ends inside an item. ``what``: what is named, that node or a draft under it."""
    block = node.state.open_block
    if block is not None:
        item, start, stop = open_item(node, block)
        raise MediaSpanError(f"{what!r} ends inside {item}, tokens [{start}, {stop}) so far; {why}", item=item, span=(start, stop))


def placed_media(node: Node, start: int, stop: int) -> list[Placeholders]:
    """The placeholders of path tokens ``[start, stop)``."""
    pieces = (Placeholders(begin, end, item.content(), first) for item, begin, end, first in clipped_spans(node, start, stop))
    placed: list[Placeholders] = []
    join_placeholders(placed, pieces)
    return placed
