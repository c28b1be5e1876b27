"""A node: one immutable turn of a session, and everything that can be read along its path.

A node views its tokens in an extent, keeps the position state after its last token, and names its parent. Nothing changes
after creation; every reading is a value or a read-only view; no walk recurses. Nodes are made by trees and drafts, never by
calling the class.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyrsistent import PMap

from sessiontree.digest import root_id
from sessiontree.errors import PositionError
from sessiontree.frozen import EMPTY_METADATA, Sealed, checked_text, frozen_array, handed_out, no_subclasses, seal
from sessiontree.media import MediaItem
from sessiontree.positions import MODES, Mode, PositionScheme, PositionState
from sessiontree.positions.runs import Runs, write
from sessiontree.tokens import Extent, Position, in_range, window

Origin = Literal["input", "generated"]
LinkKind = Literal["derived_from", "prefix_of"]
TailPolicy = Literal["keep", "drop_last"]
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


class Link(NamedTuple):
    """An edge to a node this one was made from.

    ``derived_from``: a rewritten turn and the turn it replaces; ``prefix_of``: a turn cut short and the whole of it.
    ``reused_tokens``: how many tokens from the root on the two paths share.
    """

    kind: LinkKind
    node_id: bytes
    reused_tokens: int


class Details(NamedTuple):
    """What a node carries outside its identity."""

    metadata: PMap[str, Any] = EMPTY_METADATA
    finish_reason: str | None = None
    tail_policy: TailPolicy | None = None
    links: tuple[Link, ...] = ()


NO_DETAILS: Final = Details()


class TurnPositions(NamedTuple):
    """Positions of one turn: its runs, and the state after its last token."""

    runs: Runs
    state: PositionState


class Lineage(NamedTuple):
    """What is constant in a session: the fields of its root's id."""

    scheme: PositionScheme
    namespace: Namespace
    model_fingerprint: str


class Node(Sealed):
    """One turn. Equal and hashed by ``id``.

    ``id``: 32 bytes over the parent's id and everything an engine computes from. ``parent``: None for a root. ``depth``: 0 for
    a root. ``start``, ``stop``: its tokens on the path, half-open. ``media``: its items, by their first span, spans relative to
    ``start``. ``origin``: "input" for prefilled tokens, "generated" for decoded ones. ``role``: None for a root. ``key``: the
    caller's or the draft's key, None without one. ``decoded``, ``replayed``: position runs of its tokens and the state after them
    in each mode; one object where the modes agree.

    Not an attrs class: whatever walks the fields of those would walk the parents, one call deeper for each.
    """

    __slots__ = (
        "__weakref__",
        "_details",
        "_extent",
        "_jump",
        "_lineage",
        "_with_media",
        "decoded",
        "depth",
        "id",
        "key",
        "media",
        "origin",
        "parent",
        "replayed",
        "role",
        "start",
        "stop",
    )

    id: bytes
    parent: Node | None
    depth: int
    start: int
    stop: int
    media: tuple[MediaItem, ...]
    origin: Origin
    role: str | None
    key: str | None
    decoded: TurnPositions
    replayed: TurnPositions
    _details: Details
    _lineage: Lineage
    _extent: Extent
    _jump: Node  # skew-binary: an ancestor further up, so that ancestors are found in O(log depth)
    _with_media: Node | None  # the nearest node on the path, itself included, that has media

    __init_subclass__ = no_subclasses

    def __new__(cls) -> Node:
        raise TypeError("nodes are made by append, commit and the like, not by calling Node")

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
    def next_position(self) -> Position:
        """Where the next prefilled text token stands, given the positions its path was decoded with."""
        return self._lineage.scheme.next_position(self.decoded.state)

    @property
    def mrope_position_delta(self) -> int:
        """max_position + 1 - stop, as decoded: the token at index i that is decoded next stands at i + delta."""
        return self._lineage.scheme.mrope_position_delta(self.decoded.state)

    def position_state(self, mode: Mode = "as_decoded") -> PositionState:
        """The state that positions after this node continue from."""
        return positions_in(self, mode).state

    def path(self) -> tuple[Node, ...]:
        """The nodes from the root, depth 0, to this one."""
        nodes = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return tuple(nodes)

    def ancestor(self, depth: int) -> Node:
        """The node at ``depth`` on its path, itself included, in O(log depth). Raises OutOfRange."""
        depth = in_range(depth, self.depth, "depth", self)
        node = self
        while node.depth > depth:
            node = node._jump if node._jump.depth >= depth else _parent(node)
        return node

    def input_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Path tokens ``[start, stop)``: (stop - start,) int32, read-only. Raises OutOfRange.

        A copy each time: whatever is done to it, by way of PyTorch too, which ignores NumPy's read-only flag, reaches no node.
        """
        first, last = window(start, stop, self.stop)
        return self._extent.read(first, last)

    def positions(self, start: int = 0, stop: int | None = None, mode: Mode = "as_decoded") -> NDArray[Any]:
        """Positions of path tokens ``[start, stop)``: (num_axes, stop - start) in the scheme's dtype, read-only.

        ``as_decoded`` matches the KV that exists, ``as_replayed`` a prefill of the whole history. Raises OutOfRange for the
        window, PositionError for the mode.
        """
        first, last = window(start, stop, self.stop)
        out = np.empty((self._lineage.scheme.num_axes, last - first), self._lineage.scheme.dtype)
        write_positions(self, first, last, mode, out)
        return frozen_array(out)

    def media_spans(self, start: int = 0, stop: int | None = None) -> tuple[MediaSpan, ...]:
        """(item, start, stop) for each span that meets the window, in path order and coordinates, clipped to the window."""
        return tuple((item, begin, end) for item, begin, end, _ in clipped_spans(self, *window(start, stop, self.stop)))

    def shared_prefix_len(self, other: Node) -> int:
        """How many tokens from the root on the two paths have alike: ids, media, and positions as decoded.

        So many entries of one's KV cache serve the other, whatever nodes they are in. O(what stands behind the last node they
        share).
        """
        depth = min(self.depth, other.depth)
        one, two = self.ancestor(depth), other.ancestor(depth)
        while one.id != two.id:
            if one.parent is None or two.parent is None:
                return 0
            apart = one._jump.id != two._jump.id
            one, two = (one._jump, two._jump) if apart else (one.parent, two.parent)
        start, stop = one.stop, min(self.stop, other.stop)
        mine, theirs = clipped_spans(self, start, stop), clipped_spans(other, start, stop)
        for own, its in itertools.zip_longest(mine, theirs):
            if own is None or its is None or (own[0].content(), *own[1:]) != (its[0].content(), *its[1:]):
                stop = min(span[1] for span in (own, its) if span is not None)
                break
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

    def __reduce__(self) -> Any:
        raise TypeError("a node is part of a tree and is not pickled on its own")


_SET = seal(Node)
_new = object.__new__
_set_id = _SET["id"]
_set_parent = _SET["parent"]
_set_depth = _SET["depth"]
_set_start = _SET["start"]
_set_stop = _SET["stop"]
_set_media = _SET["media"]
_set_origin = _SET["origin"]
_set_role = _SET["role"]
_set_key = _SET["key"]
_set_decoded = _SET["decoded"]
_set_replayed = _SET["replayed"]
_set_details = _SET["_details"]
_set_lineage = _SET["_lineage"]
_set_extent = _SET["_extent"]
_set_jump = _SET["_jump"]
_set_with_media = _SET["_with_media"]


def make_root(lineage: Lineage, extent: Extent) -> Node:
    """The root of a session: no tokens, depth 0."""
    scheme, namespace, fingerprint = lineage
    state = scheme.initial_state()
    placed = TurnPositions(state.next_position, state)
    params = list(scheme.params.items())
    node: Node = _new(Node)
    fields: dict[str, Any] = {
        "id": root_id(scheme.name, params, namespace, fingerprint),
        "parent": None,
        "depth": 0,
        "start": 0,
        "stop": 0,
        "media": (),
        "origin": "input",
        "role": None,
        "key": None,
        "decoded": placed,
        "replayed": placed,
        "_details": NO_DETAILS,
        "_lineage": lineage,
        "_extent": extent,
        "_jump": node,
        "_with_media": None,
    }
    for name, value in fields.items():
        _SET[name](node, value)
    return node


def make_child(
    parent: Node,
    identity: bytes,
    stop: int,
    media: tuple[MediaItem, ...],
    origin: Origin,
    role: str,
    key: str | None,
    decoded: TurnPositions,
    replayed: TurnPositions,
    details: Details,
    extent: Extent,
) -> Node:
    """A node over tokens that ``extent`` already holds; everything was checked by the caller."""
    node: Node = _new(Node)
    depth = parent.depth
    jump = parent._jump
    jump_depth = jump.depth
    _set_id(node, identity)
    _set_parent(node, parent)
    _set_depth(node, depth + 1)
    _set_start(node, parent.stop)
    _set_stop(node, stop)
    _set_media(node, media)
    _set_origin(node, origin)
    _set_role(node, role)
    _set_key(node, key)
    _set_decoded(node, decoded)
    _set_replayed(node, replayed)
    _set_details(node, details)
    _set_lineage(node, parent._lineage)
    _set_extent(node, extent)
    _set_jump(node, jump._jump if depth - jump_depth == jump_depth - jump._jump.depth else parent)
    _set_with_media(node, node if media else parent._with_media)
    return node


def _parent(node: Node) -> Node:
    parent = node.parent
    assert parent is not None  # callers stop above the root
    return parent


def positions_in(node: Node, mode: Mode) -> TurnPositions:
    """The runs and state of a node in one mode."""
    if not isinstance(mode, str):
        raise TypeError(f"a mode is text, not {type(mode).__name__}")
    if mode == "as_decoded":
        return node.decoded
    if mode == "as_replayed":
        return node.replayed
    raise PositionError(f"no positions {mode!r}; a mode is one of {', '.join(MODES)}", mode=mode)


def deepest_from(node: Node, index: int) -> Node:
    """The deepest node of ``node``'s path that starts at or before token ``index``, in O(log depth)."""
    while node.start > index:
        jump = node._jump
        node = jump if jump.start > index else _parent(node)
    return node


def deepest_to(node: Node, length: int) -> Node:
    """The deepest node of ``node``'s path that ends at or before token ``length``, in O(log depth)."""
    while node.stop > length:
        jump = node._jump
        node = jump if jump.stop > length else _parent(node)
    return node


def write_positions(node: Node, start: int, stop: int, mode: Mode, out: NDArray[Any]) -> None:
    """Write the positions of path tokens ``[start, stop)`` into ``out``, (num_axes, stop - start)."""
    positions_in(node, mode)  # an empty window of an unknown mode is refused too
    if start == stop:
        return
    at = deepest_from(node, stop - 1)
    while True:
        begin, end = max(start, at.start), min(stop, at.stop)
        if begin < end:
            write(positions_in(at, mode).runs, begin - at.start, end - at.start, out[:, begin - start : end - start])
        if at.start <= start:
            return
        at = _parent(at)


def clipped_spans(node: Node, start: int, stop: int) -> list[tuple[MediaItem, int, int, int]]:
    """(item, start, stop, first placeholder) for each span that meets path tokens ``[start, stop)``, clipped to them.

    ``first placeholder``: which of the whole item's placeholders, from 0, stands at the clipped start.
    """
    found: list[tuple[MediaItem, int, int, int]] = []
    at = deepest_from(node, stop - 1)._with_media if start < stop else None
    while at is not None and at.stop > start:
        spans = []
        for item in at.media:
            placeholder = item.placeholders_before
            for offset, length in item.spans:
                begin, end = at.start + offset, at.start + offset + length
                if begin < stop and end > start:
                    clipped = max(begin, start)
                    spans.append((item, clipped, min(end, stop), placeholder + clipped - begin))
                placeholder += length
        found += sorted(spans, key=lambda span: span[1], reverse=True)
        at = _parent(at)._with_media
    found.reverse()
    return found
