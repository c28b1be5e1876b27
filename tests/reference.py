"""A second, naive implementation of what sessiontree promises, for tests to compare against.

It imports nothing from sessiontree. Positions are computed one token at a time over the whole history, from scratch
at each call; the tree is dicts, lists and full copies. Token indexes are path coordinates, spans are half-open.

What the two modes mean: `as_replayed` applies the model's rule to the whole history and takes generated tokens for
text; `as_decoded` puts a generated token at index + delta, where delta = max_position + 1 - num_tokens so far, and the
next prefilled token at the last decoded position + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Mode = Literal["as_decoded", "as_replayed"]
MODES: tuple[Mode, Mode] = ("as_decoded", "as_replayed")
RULES = ("hf5", "sglang", "vllm")
FAMILIES = ("text", "qwen2_vl", "qwen2_5_vl")
MAX_TOKEN = 2**31 - 1


class Refused(Exception):
    """The reference's answer to an operation that must fail; `kind` is the error class the library should raise."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True)
class Scheme:
    """A family, a rule and its parameters."""

    family: str
    rule: str
    spatial_merge_size: int = 2
    tokens_per_second: int | None = None
    max_position_limit: int = 2**24

    @property
    def name(self) -> str:
        return f"{self.family}@{self.rule}"

    @property
    def num_axes(self) -> int:
        return 1 if self.family == "text" else 3


@dataclass(frozen=True)
class Item:
    """An image or video as one node declares it: spans are relative to the node's tokens."""

    modality: str
    identity: bytes
    grid_thw: tuple[int, int, int]
    second_per_grid_ts: float | None
    spans: tuple[tuple[int, int], ...]
    placeholders_before: int = 0
    unfinished: bool = False

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of sessiontree.MediaItem."""
        return {
            "modality": self.modality,
            "identity": self.identity,
            "grid_thw": self.grid_thw,
            "second_per_grid_ts": self.second_per_grid_ts,
            "spans": list(self.spans),
            "placeholders_before": self.placeholders_before,
            "unfinished": self.unfinished,
        }

    def continues(self, other: Item) -> bool:
        mine = (self.modality, self.identity, self.grid_thw, self.second_per_grid_ts)
        return mine == (other.modality, other.identity, other.grid_thw, other.second_per_grid_ts)


@dataclass(frozen=True)
class Segment:
    """The content of one node. ``keyed``: whether its node has a key of the caller's."""

    origin: str
    tokens: tuple[int, ...]
    items: tuple[Item, ...] = ()
    keyed: bool = field(default=False, compare=False)

    def in_order(self) -> Segment:
        """The same content, items in the order of their tokens."""
        return replace(self, items=tuple(sorted(self.items, key=lambda item: item.spans)))


Span = tuple[Item, int, int]
Cell = tuple[Item, int] | None


def merged_grid(scheme: Scheme, item: Item) -> tuple[int, int, int]:
    t, h, w = item.grid_thw
    return t, h // scheme.spatial_merge_size, w // scheme.spatial_merge_size


def placeholder_count(scheme: Scheme, item: Item) -> int:
    t, h, w = merged_grid(scheme, item)
    return t * h * w


def frame_time(scheme: Scheme, item: Item, frame: int) -> int:
    """Offset on the time axis of frame `frame` of an item."""
    if scheme.family == "qwen2_vl" or item.modality == "image":
        return frame
    assert scheme.tokens_per_second is not None and item.second_per_grid_ts is not None
    tps, spg = np.float32(scheme.tokens_per_second), np.float32(item.second_per_grid_ts)
    if scheme.rule == "hf5":
        return int(np.float32(frame) * (tps * spg))
    if scheme.rule == "sglang":
        return int((np.float32(frame) * spg) * tps)
    return int(frame * (float(spg) * scheme.tokens_per_second))


def block_width(scheme: Scheme, item: Item) -> int:
    """How far after its base the text after a whole item stands."""
    t, h, w = merged_grid(scheme, item)
    if scheme.rule == "hf5":
        return max(h, w)
    return max(frame_time(scheme, item, t - 1) + 1, h, w)


def block_column(scheme: Scheme, item: Item, ordinal: int) -> tuple[int, int, int]:
    """(t, h, w) of the item's placeholder number `ordinal`, relative to the base of the item."""
    _, h, w = merged_grid(scheme, item)
    frame, in_frame = divmod(ordinal, h * w)
    row, column = divmod(in_frame, w)
    return frame_time(scheme, item, frame), row, column


def check_segment(scheme: Scheme, segment: Segment, pending: Cell) -> Cell:
    """Refuses a segment whose media do not add up; returns the item left unfinished and its placeholders so far."""
    if any(not 0 <= token <= MAX_TOKEN for token in segment.tokens):
        raise Refused("OutOfRange", "token id")
    if segment.items and scheme.family == "text":
        raise Refused("Unsupported", "media in a text scheme")
    covered: set[int] = set()
    left_open: Cell = None
    continued = False
    for item in segment.items:
        if len(item.spans) != 1:
            raise Refused("MediaSpanError", "an item of these families has one span in a node")
        [(offset, length)] = item.spans
        tokens = set(range(offset, offset + length))
        if offset < 0 or length < 1 or offset + length > len(segment.tokens):
            raise Refused("MediaSpanError", "span outside of the node")
        if covered & tokens:
            raise Refused("MediaSpanError", "overlapping spans")
        covered |= tokens
        if item.placeholders_before:
            if pending is None or offset != 0:
                raise Refused("MediaSpanError", "a rest that continues nothing")
            if not item.continues(pending[0]) or item.placeholders_before != pending[1]:
                raise Refused("MediaSpanError", "a rest of something else")
            continued = True
        so_far = item.placeholders_before + length
        if item.unfinished:
            if so_far >= placeholder_count(scheme, item) or offset + length != len(segment.tokens):
                raise Refused("MediaSpanError", "unfinished, but whole or not at the end")
            left_open = (item, so_far)
        elif so_far != placeholder_count(scheme, item):
            raise Refused("MediaSpanError", "placeholder count")
    if pending is not None and not segment.tokens:
        return pending
    if pending is not None and not continued:
        raise Refused("MediaSpanError", "an unfinished item is not continued")
    return left_open


def check_history(scheme: Scheme, segments: Sequence[Segment]) -> Cell:
    """Refuses an impossible history; returns what its end leaves unfinished."""
    pending: Cell = None
    for segment in segments:
        pending = check_segment(scheme, segment, pending)
    if segments and not segments[0].tokens and not segments[0].keyed:
        raise Refused("SessionTreeError", "an empty turn without a key directly under the root")
    return pending


def placeholder_cells(segments: Sequence[Segment]) -> list[Cell]:
    """For every token of the path: None for text, or its item and the ordinal of the placeholder in the whole item."""
    cells: list[Cell] = []
    for segment in segments:
        own: list[Cell] = [None] * len(segment.tokens)
        for item in segment.items:
            for offset, length in item.spans:
                for k in range(length):
                    own[offset + k] = (item, item.placeholders_before + k)
        cells += own
    return cells


@dataclass(frozen=True)
class Replay:
    """Positions of a whole history: `positions` is (num_axes, T) int64; `ceiling` counts the rest of an open block."""

    positions: np.ndarray
    max_position: int
    next_position: int
    delta: int
    ceiling: int


def replay(scheme: Scheme, segments: Sequence[Segment], mode: Mode) -> Replay:
    check_history(scheme, segments)
    origins = [segment.origin for segment in segments for _ in segment.tokens]
    columns: list[tuple[int, int, int]] = []
    base, next_position, max_position, ceiling = 0, 0, -1, -1
    for index, cell in enumerate(placeholder_cells(segments)):
        if cell is not None:
            item, ordinal = cell
            if ordinal == 0:
                base = next_position
                next_position = base + block_width(scheme, item)
                last = block_column(scheme, item, placeholder_count(scheme, item) - 1)
                ceiling = max(ceiling, base + max(last), next_position - 1)
            t, h, w = block_column(scheme, item, ordinal)
            column = (base + t, base + h, base + w)
        elif origins[index] == "generated" and mode == "as_decoded":
            delta = max_position + 1 - index
            position = index + delta
            column = (position, position, position)
            next_position = position + 1
        else:
            column = (next_position, next_position, next_position)
            next_position += 1
        columns.append(column)
        max_position = max(max_position, *column)
    if max_position >= scheme.max_position_limit:
        raise Refused("PositionLimitExceeded", f"position {max_position}")
    table = np.array(columns, dtype=np.int64).reshape(-1, 3).T[: scheme.num_axes]
    return Replay(table, max_position, next_position, max_position + 1 - len(columns), max(ceiling, max_position))


def input_ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.tokens]


def media_spans(segments: Sequence[Segment]) -> list[Span]:
    """Every declared span of the path in path coordinates, in order."""
    spans: list[Span] = []
    start = 0
    for segment in segments:
        for item in segment.items:
            spans += [(item, start + offset, start + offset + length) for offset, length in item.spans]
        start += len(segment.tokens)
    return sorted(spans, key=lambda span: span[1])


def clip_spans(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    clipped = [(item, max(first, start), min(last, stop)) for item, first, last in spans]
    return [span for span in clipped if span[1] < span[2]]


def whole_blocks(segments: Sequence[Segment]) -> list[tuple[bytes, int, int]]:
    """The media of a path as (identity, start, stop), the parts of a split item joined."""
    blocks: list[tuple[bytes, int, int]] = []
    for item, start, stop in media_spans(segments):
        if item.placeholders_before:
            identity, first, last = blocks.pop()
            assert identity == item.identity and last == start
            blocks.append((identity, first, stop))
        else:
            blocks.append((item.identity, start, stop))
    return blocks


@dataclass(frozen=True)
class Edit:
    start: int
    stop: int
    tokens: tuple[int, ...]
    items: tuple[Item, ...] = ()


def rewritten(scheme: Scheme, segments: Sequence[Segment], edits: Sequence[Edit]) -> tuple[list[int], list[tuple[bytes, int, int]]]:
    """The token ids and whole media blocks that a rewrite of this path must have."""
    ids, blocks = input_ids(segments), whole_blocks(segments)
    unfinished = check_history(scheme, segments)
    part_starts = {start for item, start, _ in media_spans(segments) if item.placeholders_before}
    previous = 0
    edits = [edit for edit in edits if edit.start < edit.stop or edit.tokens]
    for edit in edits:
        if not previous <= edit.start <= edit.stop <= len(ids):
            raise Refused("OutOfRange", "edits must be sorted, inside the path and not overlapping")
        previous = edit.stop
        check_segment(scheme, Segment("input", edit.tokens, edit.items), None)
        for _, first, last in blocks:
            if edit.start == edit.stop:
                cut = first < edit.start < last
            else:
                overlaps = edit.start < last and first < edit.stop
                cut = overlaps and not (edit.start <= first and last <= edit.stop)
                # As with truncate: what is left of the path may end between two parts of an item.
                cut = cut and not (edit.start in part_starts and edit.stop == len(ids) and not edit.tokens)
            if cut or (unfinished is not None and edit.start == len(ids) and edit.tokens):
                raise Refused("MediaSpanError", "an edit cuts an item")
    for edit in reversed(edits):
        shift = len(edit.tokens) - (edit.stop - edit.start)
        moved = []
        for identity, first, last in blocks:
            if last <= edit.start:
                moved.append((identity, first, last))
            elif first < edit.start and last > edit.start:
                moved.append((identity, first, edit.start))
            elif first >= edit.stop:
                moved.append((identity, first + shift, last + shift))
        inserted = whole_blocks([Segment("input", edit.tokens, edit.items)])
        moved += [(identity, edit.start + first, edit.start + last) for identity, first, last in inserted]
        blocks = sorted(moved, key=lambda block: block[1])
        ids[edit.start : edit.stop] = edit.tokens
    return ids, blocks


@dataclass
class Record:
    """A node of the naive tree: `segments` is a full copy of its path without the root."""

    id: bytes
    parent: bytes | None
    role: str | None
    key: str | None
    segments: list[Segment]

    @property
    def stop(self) -> int:
        return len(input_ids(self.segments))

    @property
    def content(self) -> tuple[str | None, Segment | None]:
        return self.role, self.segments[-1].in_order() if self.segments else None


@dataclass
class Tree:
    """The naive tree. Ids are whatever the library chose; the tree says where a node must be new and where not."""

    scheme: Scheme
    root: bytes
    max_tokens: int | None = None
    reserve_output: int = 0
    nodes: dict[bytes, Record] = field(default_factory=dict)
    heads: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    pins: set[bytes] = field(default_factory=set)
    shared: int = 1  # how many of its nodes, the first ones, go with it alone: the root, of a fork the path it begins with

    def __post_init__(self) -> None:
        self.nodes.setdefault(self.root, Record(self.root, None, None, None, []))

    def path(self, node: bytes) -> list[bytes]:
        ids: list[bytes] = []
        at: bytes | None = node
        while at is not None:
            ids.insert(0, at)
            at = self.nodes[at].parent
        return ids

    def children(self, node: bytes) -> list[bytes]:
        return [record.id for record in self.nodes.values() if record.parent == node]

    def siblings(self, node: bytes) -> list[bytes]:
        parent = self.nodes[node].parent
        return [] if parent is None else [child for child in self.children(parent) if child != node]

    def leaves(self) -> list[bytes]:
        return [node for node in self.nodes if not self.children(node)]

    def known(self, parent: bytes, role: str | None, segment: Segment, key: str | None) -> bytes | None:
        """The node that this content under this key already is, or None; another content under the key is refused."""
        for child in self.children(parent):
            record = self.nodes[child]
            if record.key == key and record.content == (role, segment.in_order()):
                return child
            if record.key == key and key is not None:
                raise Refused("KeyTaken", key)
        return None

    def check_new(self, parent: bytes, segment: Segment, *, room: int = 0) -> None:
        """Refuses a segment that may not follow `parent`. `room` is what must stay free for output."""
        segments = [*self.nodes[parent].segments, segment]
        for mode in MODES:
            replay(self.scheme, segments, mode)
        if self.max_tokens is not None and len(input_ids(segments)) > self.max_tokens - room:
            raise Refused("LimitExceeded", "max_tokens")

    def add(self, node: bytes, parent: bytes, role: str | None, key: str | None, segment: Segment) -> None:
        assert node not in self.nodes
        self.nodes[node] = Record(node, parent, role, key, [*self.nodes[parent].segments, segment])

    def cut(self, node: bytes, length: int) -> tuple[bytes, Segment | None]:
        """(existing node, None) where a node of the path ends at `length`, else (parent, content of the new child)."""
        path = self.path(node)
        if not 0 <= length <= self.nodes[node].stop:
            raise Refused("OutOfRange", "length")
        for ancestor in reversed(path):
            if self.nodes[ancestor].stop == length:
                return ancestor, None
        for _, first, last in media_spans(self.nodes[node].segments):
            if first < length < last:
                raise Refused("MediaSpanError", "a cut inside a span")
        for parent, child in pairwise(path):
            start = self.nodes[parent].stop
            if start < length < self.nodes[child].stop:
                whole = self.nodes[child].segments[-1]
                kept = tuple(item for item in whole.items if item.spans[0][0] + item.spans[0][1] <= length - start)
                return parent, Segment(whole.origin, whole.tokens[: length - start], kept)
        raise AssertionError("unreachable")

    def cut_role(self, node: bytes, length: int) -> str | None:
        """The role of the node of the path that a cut at `length` runs through."""
        for ancestor in self.path(node):
            if self.nodes[ancestor].stop > length:
                return self.nodes[ancestor].role
        raise AssertionError("no node is cut")

    def forked(self, node: bytes) -> Tree:
        """A tree of its own that holds the path of `node`."""
        copies = {ancestor: replace(self.nodes[ancestor]) for ancestor in self.path(node)}
        return Tree(self.scheme, self.root, self.max_tokens, self.reserve_output, copies, shared=len(copies))

    def below(self, nodes: Iterable[bytes]) -> set[bytes]:
        """These nodes, and all below them."""
        wanted = set(nodes)
        return {node for node in self.nodes if wanted & set(self.path(node))}

    def held(self, drafts: Iterable[bytes]) -> set[bytes]:
        """What heads, pins and drafts hold, whose parents are given."""
        return {*(node for node, _ in self.heads.values()), *self.pins, *drafts}

    def check_drop(self, nodes: Iterable[bytes], drafts: Iterable[bytes]) -> None:
        if set(nodes) & set(list(self.nodes)[: self.shared]):
            raise Refused("Unsupported", "it goes with its session")
        if self.below(nodes) & self.held(drafts):
            raise Refused("NodeHeld", "held")

    def drop(self, nodes: Iterable[bytes]) -> None:
        for node in self.below(nodes):
            del self.nodes[node]

    def collect(self, recent: int, drafts: Iterable[bytes]) -> None:
        """Drop what leads to nothing that is held, nor to one of the last ``recent`` nodes."""
        ids = list(self.nodes)
        alive = set(ids[: self.shared])
        for node in {*self.held(drafts), *ids[max(0, len(ids) - recent) :]}:
            alive.update(self.path(node))
        self.drop(set(ids) - alive)


@dataclass
class Draft:
    """A generation in flight: tokens, and every state that was set with the length at which it was set."""

    tokens: list[int] = field(default_factory=list)
    states: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def state(self) -> bytes | None:
        return self.states[-1][1] if self.states else None

    def rollback(self, length: int) -> None:
        if not 0 <= length <= len(self.tokens):
            raise Refused("OutOfRange", "length")
        self.tokens = self.tokens[:length]
        self.states = [(at, state) for at, state in self.states if at <= length]

    def committed(self, length: int | None, tail_policy: str) -> tuple[int, ...]:
        if length is not None and not 0 <= length <= len(self.tokens):
            raise Refused("OutOfRange", "length")
        tokens = tuple(self.tokens[:length])
        return tokens[:-1] if tail_policy == "drop_last" else tokens


def split(tokens: Sequence[int], blocks: Sequence[Span], cuts: Sequence[int]) -> list[Segment]:
    """Cuts a history at the given token indexes, with a block that a cut runs through declared in parts."""
    bounds = [0, *cuts, len(tokens)]
    segments = []
    for start, stop in pairwise(bounds):
        items = []
        for item, first, last in blocks:
            low, high = max(first, start), min(last, stop)
            if low < high:
                span = ((low - start, high - low),)
                items.append(replace(item, spans=span, placeholders_before=low - first, unfinished=high < last))
        segments.append(Segment("input", tuple(tokens[start:stop]), tuple(items)))
    return segments
