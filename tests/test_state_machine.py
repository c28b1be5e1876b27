"""One state machine over everything a session does, against the naive reference; and 10,000 random operations.

The machine keeps a naive tree beside each session. After every step each live node's ids, spans, positions in both
modes, delta and next position equal the reference's answer from the whole history, and the fingerprint that the test
took of each node when it appeared is still the node's fingerprint. Node ids are the library's choice; the naive tree
says when a node must be new and when it must be one that exists.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sessiontree
from sessiontree import (
    Draft,
    Edit,
    Head,
    HeadMoved,
    LimitExceeded,
    MediaItem,
    Node,
    Session,
    SessionStore,
    SessionTree,
    SessionTreeError,
    extend_drafts,
)
from sessiontree.positions import PositionScheme, scheme
from tests import reference as ref
from tests.reference import MODES, Refused, Segment

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 151655, 151656, 151652, 151653
PAD_VALUE = 1_000_007
TOKENS = (0, 1, 5, 77, IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END, ref.MAX_TOKEN)
FILLS = (IMAGE_PAD, VIDEO_PAD, PAD_VALUE, VISION_START, 3)
SECONDS = (1.0, 1.4, 0.5, 2.0, 0.36136263608932495, 0.0667, 3.7, 1e9)
FAULTS = ("shift", "long", "short", "twice", "no spans", "unfinished", "before", "forgotten", "token", "other item")
TAIL_POLICIES: tuple[Literal["keep", "drop_last"], ...] = ("keep", "keep", "drop_last")
HEAD_NAMES = ("main", "draft")
MAX_SESSIONS = 3
MAX_DRAFTS = 4


@dataclass(frozen=True)
class Block:
    """An image or video to place somewhere; `grid` counts merged cells."""

    modality: str
    grid: tuple[int, int, int]
    seconds: float
    number: int
    fill: int

    def item(self, merge: int) -> ref.Item:
        frames, height, width = self.grid
        grid = (min(frames, 2) if self.modality == "image" else frames, height * merge, width * merge)
        seconds = self.seconds if self.modality == "video" else None
        identity = hashlib.sha256(repr((self.modality, grid, seconds, self.number)).encode()).digest()
        return ref.Item(self.modality, identity, grid, seconds, ())


@dataclass(frozen=True)
class Turn:
    """What a turn is made of, before anything is known of the parent it is appended to."""

    pieces: tuple[tuple[int, ...] | Block, ...]
    tail: Block | None = None
    tail_cut: int = 0
    rest_cut: int | None = None
    order: int = 0

    def segment(self, positions_of: ref.Scheme, pending: ref.Cell) -> Segment:
        """The turn's content after a history that leaves `pending` unfinished."""
        tokens: list[int] = []
        items: list[ref.Item] = []

        def place(item: ref.Item, before: int, count: int, fill: int) -> None:
            whole = ref.placeholder_count(positions_of, item)
            if positions_of.family != "text":
                span = ((len(tokens), count),)
                unfinished = before + count < whole
                items.append(replace(item, spans=span, placeholders_before=before, unfinished=unfinished))
            tokens.extend([fill] * count)

        if pending is not None:
            item, before = pending
            rest = ref.placeholder_count(positions_of, item) - before
            count = rest if self.rest_cut is None else 1 + self.rest_cut % rest
            place(item, before, count, PAD_VALUE)
            if count < rest:
                return Segment("input", tuple(tokens), tuple(items))
        for piece in self.pieces:
            if isinstance(piece, Block):
                item = piece.item(positions_of.spatial_merge_size)
                place(item, 0, ref.placeholder_count(positions_of, item), piece.fill)
            else:
                tokens.extend(piece)
        if self.tail is not None:
            item = self.tail.item(positions_of.spatial_merge_size)
            whole = ref.placeholder_count(positions_of, item)
            if whole > 1:
                place(item, 0, 1 + self.tail_cut % (whole - 1), self.tail.fill)
        random.Random(self.order).shuffle(items)
        return Segment("input", tuple(tokens), tuple(items))


def faulty(segment: Segment, fault: str) -> Segment:
    """The segment with one thing wrong; the reference decides whether it really is."""
    if fault == "token":
        return replace(segment, tokens=(*segment.tokens, -1 if len(segment.tokens) % 2 else 2**31))
    if not segment.items:
        return segment
    first, *others = segment.items
    if fault == "twice":
        return replace(segment, items=(first, *segment.items))
    if fault == "forgotten":
        return replace(segment, items=tuple(others))
    [(offset, length)] = first.spans
    changed = {
        "shift": {"spans": ((offset + 1, length),)},
        "long": {"spans": ((offset, length + 1),)},
        "short": {"spans": ((offset, length - 1),)},
        "no spans": {"spans": ()},
        "unfinished": {"unfinished": not first.unfinished},
        "before": {"placeholders_before": first.placeholders_before + 1},
        "other item": {"identity": bytes(32)},
    }[fault]
    return replace(segment, items=(replace(first, **changed), *others))  # type: ignore[arg-type]


PICK = st.integers(0, 1000)
TOKEN = st.sampled_from(TOKENS) | st.integers(0, ref.MAX_TOKEN)
RUN = st.lists(TOKEN, min_size=1, max_size=5).map(tuple)
BLOCK = st.builds(
    Block,
    modality=st.sampled_from(("video", "image", "video")),
    grid=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    seconds=st.sampled_from(SECONDS),
    number=st.integers(0, 1),
    fill=st.sampled_from(FILLS),
)
PIECES = st.lists(RUN | BLOCK, max_size=4).map(tuple)
TURN = st.builds(
    Turn,
    pieces=PIECES,
    tail=st.none() | st.none() | BLOCK,
    tail_cut=PICK,
    rest_cut=st.none() | PICK,
    order=PICK,
)
REPLY = st.lists(TOKEN, min_size=1, max_size=8)
TALK = st.lists(TURN | TURN | REPLY, min_size=1, max_size=5)
WHOLE_TURN = st.builds(Turn, pieces=PIECES, order=PICK)
ROLE = st.sampled_from(("user", "system", "tool"))
KEY = st.sampled_from((None, None, None, "k1", "k2"))
SCHEME = st.builds(
    ref.Scheme,
    family=st.sampled_from(("qwen2_5_vl", "qwen2_vl", "qwen2_5_vl", "text")),
    rule=st.sampled_from((*ref.RULES, "hf5")),
    spatial_merge_size=st.sampled_from((2, 1)),
    tokens_per_second=st.sampled_from((2, 1, 4, 25)),
    max_position_limit=st.sampled_from((2**24, 2**24, 2**24, 80)),
)


def library_scheme(given: ref.Scheme) -> PositionScheme:
    params: dict[str, Any] = {"max_position_limit": given.max_position_limit}
    if given.family != "text":
        params |= {
            "image_token_id": IMAGE_PAD,
            "video_token_id": VIDEO_PAD,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "spatial_merge_size": given.spatial_merge_size,
        }
    if given.family == "qwen2_5_vl":
        params["tokens_per_second"] = given.tokens_per_second
    return scheme(given.name, **params)


def library_media(items: Sequence[ref.Item]) -> list[MediaItem]:
    return [MediaItem(**item.kwargs()) for item in items]


def item_of(given: MediaItem) -> ref.Item:
    assert given.grid_thw is not None
    t, h, w = given.grid_thw
    spans = tuple((offset, length) for offset, length in given.spans)
    return ref.Item(
        given.modality,
        given.identity,
        (t, h, w),
        given.second_per_grid_ts,
        spans,
        given.placeholders_before,
        given.unfinished,
    )


def fingerprint(node: Node) -> bytes:
    """Everything that a reader can see of a node, apart from what its ancestors own."""
    digest = hashlib.sha256(node.id)
    digest.update(node.token_ids.tobytes())
    for mode in MODES:
        digest.update(node.positions(node.start, node.stop, mode=mode).tobytes())
    spans = [(item_of(item), start, stop) for item, start, stop in node.media_spans(node.start, node.stop)]
    seen = (
        *(node.parent.id if node.parent is not None else None, node.depth, node.start, node.stop),
        *(node.origin, node.role, node.key, node.links, node.finish_reason, node.tail_policy, node.metadata),
        *(int(node.next_position), node.mrope_position_delta, spans, [item_of(item) for item in node.media]),
    )
    digest.update(repr(seen).encode())
    return digest.digest()


def absurd(segment: Segment) -> Refused | None:
    """A video so slow that its frames may be refused before its placeholders are counted."""
    slow = [item for item in segment.items if (item.second_per_grid_ts or 0) > 1e6]
    return Refused("PositionLimitExceeded", "frame time") if slow else None


def either(*verdicts: Refused | None) -> Refused | None:
    """How an operation must fail that has all of these faults; which one is named first is the library's choice."""
    found = [verdict for verdict in verdicts if verdict is not None]
    return Refused("SessionTreeError", "; ".join(map(str, found))) if len(found) > 1 else next(iter(found), None)


@dataclass(frozen=True)
class Expected:
    """The reference's answers for one history, computed from the whole of it."""

    ids: np.ndarray
    spans: list[ref.Span]
    tables: dict[str, ref.Replay]
    pending: ref.Cell

    @classmethod
    def of(cls, positions_of: ref.Scheme, segments: Sequence[Segment]) -> Expected:
        return cls(
            np.array(ref.input_ids(segments), dtype=np.int32),
            ref.media_spans(segments),
            {mode: ref.replay(positions_of, segments, mode) for mode in MODES},
            ref.check_history(positions_of, segments),
        )

    def check(self, reader: Node | Draft, start: int, stop: int) -> None:
        """What a node or draft gives for a window of its path."""
        ids = reader.input_ids(start, stop)
        assert ids.dtype == np.int32 and np.array_equal(ids, self.ids[start:stop])
        for mode in MODES:
            positions = reader.positions(start, stop, mode=mode)
            assert positions.dtype == np.int64
            assert positions.shape == (self.tables[mode].positions.shape[0], stop - start)
            assert np.array_equal(positions, self.tables[mode].positions[:, start:stop]), mode
        given = [(item_of(item), first, last) for item, first, last in reader.media_spans(start, stop)]
        assert given == ref.clip_spans(self.spans, start, stop)

    def check_whole(self, reader: Node | Draft) -> None:
        assert reader.stop == len(self.ids)
        self.check(reader, 0, reader.stop)
        decoded = self.tables["as_decoded"]
        assert reader.mrope_position_delta == decoded.delta
        if self.pending is None:  # inside of a block no text can follow
            assert reader.next_position == decoded.next_position


@dataclass
class Place:
    """A session of the library, its naive tree, and a reference to every node that appeared in it."""

    session: Session
    tree: ref.Tree
    nodes: dict[bytes, Node] = field(default_factory=dict)
    fingerprints: dict[bytes, bytes] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    stale_heads: list[tuple[str, Head]] = field(default_factory=list)

    def surface(self) -> tuple[list[bytes], dict[str, tuple[bytes, int]]]:
        tree = self.session.tree
        return [node.id for node in tree], {name: (head.node.id, head.version) for name, head in tree.heads.items()}

    def pick_dropped(self, number: int) -> list[bytes]:
        """A node that was there once."""
        gone = [node for node in self.nodes if node not in self.tree.nodes]
        return [gone[number % len(gone)]] if gone else []

    def pick(self, number: int) -> bytes:
        """A node; small numbers are the newest ones."""
        ids = list(self.tree.nodes)
        return ids[-1 - number % len(ids)]


@dataclass
class OpenDraft:
    place: Place
    parent: bytes
    draft: Draft
    model: ref.Draft
    role: str

    def segments(self, tokens: Sequence[int]) -> list[Segment]:
        return [*self.place.tree.nodes[self.parent].segments, Segment("generated", tuple(tokens))]


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = SessionStore.in_memory()
        self.places: list[Place] = []
        self.closed: list[Place] = []
        self.drafts: list[OpenDraft] = []
        self.expected: dict[bytes, Expected] = {}
        self.identities: dict[tuple[Any, ...], bytes] = {}
        self.snapshots: list[tuple[SessionTree, list[bytes], dict[str, Head]]] = []
        self.made = 0
        self.windows = random.Random(0)

    def teardown(self) -> None:
        self.store.close()

    # Bookkeeping

    def place(self, number: int) -> Place:
        return self.places[number % len(self.places)]

    def pending(self, place: Place, node: bytes) -> ref.Cell:
        return ref.check_history(place.tree.scheme, place.tree.nodes[node].segments)

    def attempt(self, place: Place, refused: Refused | None, act: Callable[[], Any], *, doubtful: bool = False) -> Any:
        """Runs an operation that must succeed, or fail as `refused` says and change nothing; None where it failed.

        `doubtful`: the operation may also be refused for a limit that only the part still due of a block reaches.
        """
        before = place.surface()
        try:
            result = act()
        except SessionTreeError as error:
            limited = place.tree.max_tokens is not None or place.tree.scheme.max_position_limit < 2**24
            over_limit = isinstance(error, LimitExceeded) and (doubtful or (limited and refused is not None))
            if not over_limit:
                assert refused is not None, f"refused a valid operation: {error!r}"
                assert isinstance(error, getattr(sessiontree, refused.kind)), (refused, error)
            assert place.surface() == before
            return None
        assert refused is None, f"accepted what must fail: {refused}"
        return result

    def verdict(self, check: Callable[[], Any]) -> Refused | None:
        try:
            check()
        except Refused as refused:
            return refused.with_traceback(None)  # whose frames would keep drafts that nobody else holds
        return None

    def near_limit(self, place: Place, parent: bytes, segment: Segment) -> bool:
        """Whether only the part still due of an open block reaches the position limit."""
        segments = [*place.tree.nodes[parent].segments, segment]
        limit = place.tree.scheme.max_position_limit
        return any(ref.replay(place.tree.scheme, segments, mode).ceiling >= limit for mode in MODES)

    def learn(self, place: Place, node: Node, *, parent: bytes, role: str | None, key: str | None, segment: Segment) -> bool:
        """Records a node that an operation returned; False where it must be, and is, one that was there before."""
        known = place.tree.known(parent, role, segment, key)
        assert self.identities.setdefault((parent, role, segment.in_order(), key), node.id) == node.id
        if known is not None:
            assert node.id == known
            assert len(place.session.tree) == len(place.tree.nodes)
            return False
        assert node.id not in place.tree.nodes
        place.tree.add(node.id, parent, role, key, segment)
        place.nodes[node.id] = node
        place.fingerprints[node.id] = fingerprint(node)
        if node.id not in self.expected:
            self.expected[node.id] = Expected.of(place.tree.scheme, place.tree.nodes[node.id].segments)
        self.check_new(place, node)
        return True

    def check_new(self, place: Place, node: Node) -> None:
        record = place.tree.nodes[node.id]
        path = place.tree.path(node.id)
        own = record.segments[-1]
        assert len(node.id) == 32
        assert [ancestor.id for ancestor in node.path()] == path
        assert node.parent is not None and node.parent.id == record.parent
        assert (node.depth, node.start, node.stop) == (len(path) - 1, record.stop - len(own.tokens), record.stop)
        assert (node.origin, node.role, node.key) == (own.origin, record.role, record.key)
        assert node.token_ids.tolist() == list(own.tokens)
        assert sorted(map(repr, map(item_of, node.media))) == sorted(map(repr, own.items))
        assert place.session.node(node.id) == node
        assert [child.id for child in place.session.children(node.parent)] == place.tree.children(node.parent.id)
        assert [child.id for child in place.session.siblings(node)] == place.tree.siblings(node.id)
        self.expected[node.id].check_whole(node)

    def new_place(self, session: Session, tree: ref.Tree) -> Place:
        place = Place(session, tree)
        for node in tree.nodes:
            place.nodes[node] = session.node(node)
            if node not in self.expected:
                self.expected[node] = Expected.of(tree.scheme, tree.nodes[node].segments)
            place.fingerprints[node] = fingerprint(place.nodes[node])
        self.places.append(place)
        return place

    # Sessions

    @initialize(
        positions_of=SCHEME,
        max_tokens=st.sampled_from((None, None, 60, 200)),
        reserve_output=st.sampled_from((0, 8)),
        talk=TALK,
        drafts=st.sampled_from((1, 2, 0)),
    )
    def start(
        self, *, drafts: int, positions_of: ref.Scheme, max_tokens: int | None, reserve_output: int, talk: list[Turn | list[int]]
    ) -> None:
        reserve = 0 if max_tokens is None else reserve_output
        session = self.store.create("s0", scheme=library_scheme(positions_of), max_tokens=max_tokens, reserve_output=reserve)
        self.new_place(session, ref.Tree(positions_of, session.root.id, max_tokens, reserve))
        self.converse(0, 0, talk)
        for at in range(drafts):
            self.open_draft(0, at, "assistant", None)

    @precondition(lambda self: 0 < len(self.places) < MAX_SESSIONS)
    @rule(number=PICK, at=PICK, taken=st.sampled_from((False, False, True)))
    def fork(self, number: int, at: int, taken: bool) -> None:
        place = self.place(number)
        node = place.pick(at)
        if taken:
            refused = Refused("SessionExists", "an open session has this id")
            self.attempt(place, refused, lambda: self.store.fork(place.session, place.nodes[node], "s0"))
            return
        self.made += 1
        session = self.store.fork(place.session, place.nodes[node], f"fork {self.made}")
        tree = place.tree.forked(node)
        assert [each.id for each in session.tree] == list(tree.nodes)
        assert not session.heads
        copy = self.new_place(session, tree)
        assert all(place.fingerprints[each] == copy.fingerprints[each] for each in tree.nodes)

    @precondition(lambda self: len(self.places) > 1)
    @rule(number=PICK, at=PICK)
    def close(self, number: int, at: int) -> None:
        place = self.places.pop(1 + number % (len(self.places) - 1))
        self.closed.append(place)
        drafts = [each for each in self.drafts if each.place is place]
        self.drafts = [each for each in self.drafts if each.place is not place]
        place.session.close()
        refused = Refused("StaleSession", "closed")
        node = place.nodes[place.pick(at)]
        self.attempt(place, refused, lambda: place.session.append(place.session.root, [1]))
        self.attempt(place, refused, lambda: place.session.set_head("main", node))
        for each in drafts:
            self.attempt(place, refused, each.draft.commit)

    # Turns

    @precondition(lambda self: self.places)
    @rule(number=PICK, at=PICK, talk=TALK)
    def converse(self, number: int, at: int, talk: list[Turn | list[int]]) -> None:
        """Turns and replies one below the other; one that is refused is left out."""
        place = self.place(number)
        node = place.pick(at)
        for said in talk:
            if isinstance(said, Turn):
                segment = said.segment(place.tree.scheme, self.pending(place, node))
                node = self.append_segment(place, node, segment, role="user", key=None) or node
            else:
                node = self.reply(place, node, said) or node

    def reply(self, place: Place, parent: bytes, tokens: list[int]) -> bytes | None:
        segment = Segment("generated", tuple(tokens))
        refused = self.verdict(lambda: place.tree.check_new(parent, segment))
        keys: list[str] = []

        def act() -> Node:
            draft = place.session.draft(place.nodes[parent])
            keys.append(draft.key)
            draft.extend(np.array(tokens, dtype=np.int32))
            return draft.commit()

        node: Node | None = self.attempt(place, refused, act)
        if node is None:
            return None
        assert self.learn(place, node, parent=parent, role="assistant", key=keys[0], segment=segment)
        return node.id

    @rule(
        number=PICK,
        at=PICK,
        turn=TURN,
        role=ROLE,
        key=KEY,
        fault=st.none() | st.none() | st.sampled_from(FAULTS),
        by_id=st.booleans(),
        tags=st.none() | st.lists(st.integers(0, 9), max_size=2),
    )
    def append(
        self,
        *,
        number: int,
        at: int,
        turn: Turn,
        role: str,
        key: str | None,
        fault: str | None,
        by_id: bool,
        tags: list[int] | None,
    ) -> None:
        place = self.place(number)
        parent = place.pick(at)
        segment = turn.segment(place.tree.scheme, self.pending(place, parent))
        if fault is not None:
            segment = faulty(segment, fault)
        metadata = None if tags is None else {"tags": tags, "nested": {"tags": tags}}
        self.append_segment(place, parent, segment, role=role, key=key, by_id=by_id, metadata=metadata)

    def append_segment(
        self,
        place: Place,
        parent: bytes,
        segment: Segment,
        *,
        role: str,
        key: str | None,
        by_id: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> bytes | None:
        tree, segment = place.tree, replace(segment, keyed=key is not None)
        valid = self.verdict(lambda: tree.check_new(parent, segment, room=tree.reserve_output))
        if valid is not None:
            valid = either(valid, absurd(segment))
        refused = either(valid, self.verdict(lambda: tree.known(parent, role, segment, key)))
        wide = not all(0 <= token <= ref.MAX_TOKEN for token in segment.tokens)
        given: Any = list(segment.tokens) if wide or by_id else np.array(segment.tokens, dtype=np.int32)
        wanted = repr(metadata)

        def act() -> Node:
            return place.session.append(
                parent if by_id else place.nodes[parent],
                given,
                media=library_media(segment.items),
                role=role,
                key=key,
                metadata=metadata,
            )

        doubtful = valid is None and self.near_limit(place, parent, segment)
        node: Node | None = self.attempt(place, refused, act, doubtful=doubtful)
        assert repr(metadata) == wanted
        assert list(given) == list(segment.tokens)
        for position in range(len(given)):
            given[position] = 9
        if node is None:
            return None
        if self.learn(place, node, parent=parent, role=role, key=key, segment=segment) and metadata is not None:
            assert node.metadata["tags"] == node.metadata["nested"]["tags"] == tuple(metadata["tags"])
            metadata["tags"].append(-1)
        return node.id

    @rule(number=PICK, at=PICK)
    def retry(self, number: int, at: int) -> None:
        place = self.place(number)
        node = place.pick(at)
        record = place.tree.nodes[node]
        if record.parent is None or record.role is None:
            return
        segment = record.segments[-1]
        count = len(place.tree.nodes)
        if segment.origin == "input" and place.tree.max_tokens is None:
            self.append_segment(place, record.parent, segment, role=record.role, key=record.key)
        elif segment.origin == "generated" and record.key is not None:
            draft = place.session.draft(place.nodes[record.parent], role=record.role, key=record.key)
            draft.extend(segment.tokens)
            assert draft.commit("length").id == node
        assert len(place.session.tree) == len(place.tree.nodes) == count

    @precondition(lambda self: self.places)
    @rule(number=PICK, token=TOKEN, at=PICK)
    def append_to_an_unknown_node(self, number: int, token: int, at: int) -> None:
        place = self.place(number)
        strangers = [node for other in self.places for node in other.tree.nodes if node not in place.tree.nodes]
        refused = Refused("UnknownNode", "not of this session")
        for node in [bytes(32), *strangers[:1], *place.pick_dropped(at)]:
            self.attempt(place, refused, lambda node=node: place.session.append(node, [token]))  # type: ignore[misc]
            self.attempt(place, refused, lambda node=node: place.session.draft(node))  # type: ignore[misc]

    @rule(number=PICK, at=PICK, length=PICK, by=st.sampled_from(("truncate", "drop_last")), near=st.booleans())
    def truncate(self, *, number: int, at: int, length: int, by: str, near: bool) -> None:
        place = self.place(number)
        node = place.pick(at)
        stop = place.tree.nodes[node].stop
        kept = length % (stop + 3) - 1
        pictured = [each for each, record in place.tree.nodes.items() if record.segments and record.segments[-1].items]
        if near and pictured:
            node = pictured[at % len(pictured)]
            stop = place.tree.nodes[node].stop
            kept = stop - length % len(place.nodes[node])
        refused = self.verdict(lambda: place.tree.cut(node, kept))

        def act() -> Node:
            if by == "truncate":
                return place.session.truncate(place.nodes[node], kept)
            return place.session.drop_last(place.nodes[node], stop - kept)

        result = self.attempt(place, refused, act)
        if result is None:
            return
        parent, segment = place.tree.cut(node, kept)
        if segment is None:
            assert result.id == parent
            return
        role = place.tree.cut_role(node, kept)
        if self.learn(place, result, parent=parent, role=role, key=result.key, segment=segment):
            source = next(each for each in place.nodes[node].path() if each.start < kept < each.stop)
            assert result.finish_reason is None
            assert result.metadata == source.metadata
            assert [(link.kind, link.node_id) for link in result.links] == [("prefix_of", source.id)]
        assert place.session.truncate(place.nodes[node], kept) == result

    @rule(number=PICK, at=PICK, edits=st.lists(st.tuples(PICK, PICK, WHOLE_TURN), max_size=3))
    def rewrite(self, number: int, at: int, edits: list[tuple[int, int, Turn]]) -> None:
        place = self.place(number)
        node = place.pick(at)
        tree = place.tree
        source = tree.nodes[node]
        drawn = sorted(sorted((low % (source.stop + 1), high % (source.stop + 1))) for low, high, _ in edits)
        planned: list[ref.Edit] = []
        for (start, stop), (_, _, turn) in zip(drawn, edits, strict=True):
            content = turn.segment(tree.scheme, None)
            if not planned or start > planned[-1].stop:
                planned.append(ref.Edit(start, stop, content.tokens, content.items))
        refused = self.verdict(lambda: ref.rewritten(tree.scheme, source.segments, planned))
        given = [Edit(each.start, each.stop, each.tokens, library_media(each.items)) for each in planned]

        def act() -> Node:
            return place.session.rewrite(place.nodes[node], given)

        contents = [*source.segments, *(Segment("input", each.tokens, each.items) for each in planned)]
        slow = any(absurd(content) for content in contents)
        limited = tree.max_tokens is not None or tree.scheme.max_position_limit < 2**24
        result = self.attempt(place, refused, act, doubtful=limited or slow)
        if result is None:
            return
        ids, blocks = ref.rewritten(tree.scheme, source.segments, planned)
        path = list(result.path())
        assert result.input_ids().tolist() == ids
        old_path = tree.path(node)
        first = planned[0].start if planned else source.stop
        for ancestor in old_path[1:]:
            record = tree.nodes[ancestor]
            if record.stop < first or (record.stop == first and record.segments[-1].tokens):
                assert ancestor in [each.id for each in path]
        kept = [each for each in path if each.id in old_path]
        remade = path[len(kept) :]
        shared = {kept[-1].stop}
        if remade and remade[0].id in tree.nodes:
            shared.add(remade[0].stop)
        elif remade and remade[0].links[0].kind == "prefix_of":
            shared = {remade.pop(0).stop}
        last = 0
        for each in path[1:]:
            if each.id in tree.nodes:
                continue
            assert each.parent is not None
            segment = Segment(each.origin, tuple(each.token_ids.tolist()), tuple(map(item_of, each.media)))
            self.learn(place, each, parent=each.parent.id, role=each.role, key=each.key, segment=segment)
            [link] = each.links
            made_from = place.nodes[link.node_id]
            assert link.node_id in old_path
            assert link.reused_tokens in shared
            at = old_path.index(link.node_id)
            stood_for = [place.nodes[one] for one in old_path[min(at, last + 1) : at + 1]]  # the link names the last of them
            assert (each.role, each.metadata) in [(one.role or "user", one.metadata) for one in stood_for]
            last = at - (link.kind == "prefix_of")  # what follows may stand for the rest of a turn that was cut too
            if each in remade:
                assert (each.origin, link.kind) == ("input", "derived_from")
            else:
                assert (each.origin, link.kind) == (made_from.origin, "prefix_of")
        assert ref.whole_blocks(tree.nodes[result.id].segments) == blocks

    # Heads

    def head_check(self, place: Place, name: str, how: str, pick: int) -> tuple[dict[str, Any], Refused | None]:
        """The `expected` argument of an operation that moves a head, and how it must fail."""
        now = place.tree.heads.get(name)
        moved = Refused("HeadMoved", name)
        if how == "free":
            return {"expected": None}, Refused("NameTaken", name) if now is not None else None
        if how == "head" and now is not None:
            return {"expected": place.session.head(name)}, None
        if how == "node" and now is not None:
            return {"expected": place.nodes[now[0]]}, None
        if how == "other node":
            node = place.pick(pick)
            return {"expected": place.nodes[node]}, None if now is not None and now[0] == node else moved
        if how == "stale head":
            old = [head for of, head in place.stale_heads if of == name]
            here = [head for head in old if now is not None and head.node.id == now[0]]
            old = here or old  # a head that moved away and came back is the one to mistake
            if old:
                return {"expected": old[pick % len(old)]}, moved
        return {}, None

    def head_moved(self, place: Place, name: str, node: bytes) -> None:
        head = place.session.head(name)
        assert head.node.id == node
        assert head.version > place.versions.get(name, -1)
        place.versions[name] = head.version
        place.tree.heads[name] = (node, head.version)

    HOW = st.sampled_from(("any", "free", "head", "node", "other node", "stale head"))

    @rule(number=PICK, at=PICK, name=st.sampled_from(HEAD_NAMES), how=HOW, pick=PICK, again=st.booleans())
    def set_head(self, *, number: int, at: int, name: str, how: str, pick: int, again: bool) -> None:
        place = self.place(number)
        node = place.pick(at)
        kwargs, refused = self.head_check(place, name, how, pick)
        now = place.session.head(name) if name in place.tree.heads else None

        def act() -> Head:
            try:
                return place.session.set_head(name, place.nodes[node], **kwargs)
            except HeadMoved as error:
                assert error.actual == now
                raise

        head = self.attempt(place, refused, act)
        if head is not None:
            self.head_moved(place, name, node)
            assert head == place.session.head(name)
            if now is not None:
                place.stale_heads.append((name, now))
            if again:
                assert place.session.set_head(name, place.nodes[node], expected=head) != head
                self.head_moved(place, name, node)
                place.stale_heads.append((name, head))

    @rule(number=PICK, name=st.sampled_from(HEAD_NAMES))
    def drop_head(self, number: int, name: str) -> None:
        place = self.place(number)
        if name not in place.tree.heads:
            refused = Refused("UnknownHead", name)
            self.attempt(place, refused, lambda: place.session.drop_head(name))
            self.attempt(place, refused, lambda: place.session.head(name))
            return
        place.stale_heads.append((name, place.session.head(name)))
        place.session.drop_head(name)
        del place.tree.heads[name]

    @rule(
        number=PICK,
        at=PICK,
        turn=TURN,
        role=st.none() | ROLE,
        key=KEY,
        name=st.sampled_from(HEAD_NAMES),
        how=HOW,
        pick=PICK,
    )
    def replace(
        self, *, number: int, at: int, turn: Turn, role: str | None, key: str | None, name: str, how: str, pick: int
    ) -> None:
        place = self.place(number)
        node = place.pick(at)
        tree = place.tree
        parent = tree.nodes[node].parent
        if parent is None:
            return
        segment = turn.segment(tree.scheme, self.pending(place, parent))
        new_role = role or tree.nodes[node].role
        kwargs, moved = self.head_check(place, name, how, pick)
        valid = self.verdict(lambda: tree.check_new(parent, segment, room=tree.reserve_output))
        refused = either(valid, self.verdict(lambda: tree.known(parent, new_role, segment, key)), moved)
        now = place.session.head(name) if name in tree.heads else None

        def act() -> Node:
            return place.session.replace(
                place.nodes[node],
                np.array(segment.tokens, dtype=np.int32),
                head=name,
                media=library_media(segment.items),
                role=role,
                key=key,
                **kwargs,
            )

        doubtful = valid is None and self.near_limit(place, parent, segment)
        result = self.attempt(place, refused, act, doubtful=doubtful)
        if result is None:
            return
        self.learn(place, result, parent=parent, role=new_role, key=key, segment=segment)
        self.head_moved(place, name, result.id)
        if now is not None:
            place.stale_heads.append((name, now))

    # Pins, drops and gc

    def parents_of_drafts(self, place: Place) -> list[bytes]:
        return [each.parent for each in self.drafts if each.place is place]

    @rule(number=PICK, at=PICK, pinned=st.booleans())
    def pin(self, number: int, at: int, pinned: bool) -> None:
        place = self.place(number)
        node = place.pick(at)
        if pinned:
            place.session.pin(place.nodes[node])
            place.tree.pins.add(node)
        else:
            node = sorted(place.tree.pins)[at % len(place.tree.pins)] if place.tree.pins else node
            place.session.unpin(node)
            place.tree.pins.discard(node)
        for gone in place.pick_dropped(at):
            self.attempt(place, Refused("UnknownNode", "dropped"), lambda: place.session.pin(gone))  # noqa: B023

    @rule(number=PICK, at=st.lists(PICK, min_size=1, max_size=2))
    def drop(self, number: int, at: list[int]) -> None:
        place = self.place(number)
        nodes = [place.pick(each) for each in at]
        refused = self.verdict(lambda: place.tree.check_drop(nodes, self.parents_of_drafts(place)))
        self.attempt(place, refused, lambda: place.session.drop(*(place.nodes[node] for node in nodes)))
        if refused is None:
            place.tree.drop(nodes)
        for gone in place.pick_dropped(at[0]):
            self.attempt(place, Refused("UnknownNode", "dropped"), lambda: place.session.drop(gone))  # noqa: B023

    @rule(recent=st.none() | st.none() | st.integers(0, 12))
    def collect(self, recent: int | None) -> None:
        before = sum(len(place.tree.nodes) - 1 for place in self.places)
        report = self.store.gc(recent=recent)
        if recent is not None:
            for place in self.places:
                place.tree.collect(recent, self.parents_of_drafts(place))
        after = sum(len(place.tree.nodes) - 1 for place in self.places)
        assert (report.nodes_before, report.nodes_after) == (before, after)

    # Drafts

    def pick_draft(self, number: int) -> OpenDraft:
        return self.drafts[number % len(self.drafts)]

    def grown(self, each: OpenDraft, tokens: Sequence[int]) -> Refused | None:
        """How adding tokens to a draft must fail."""
        after = [*each.model.tokens, *tokens]
        return self.verdict(lambda: each.place.tree.check_new(each.parent, Segment("generated", tuple(after))))

    @precondition(lambda self: len(self.drafts) < MAX_DRAFTS)
    @rule(number=PICK, at=PICK, role=st.sampled_from(("assistant", "user")), key=KEY)
    def open_draft(self, number: int, at: int, role: str, key: str | None) -> None:
        place = self.place(number)
        parent = place.pick(at)
        if self.pending(place, parent) is not None:

            def act() -> None:
                draft = place.session.draft(place.nodes[parent], role=role, key=key)
                draft.append(5)
                draft.commit()

            self.attempt(place, Refused("MediaSpanError", "a reply inside of an item"), act)
            return
        draft = place.session.draft(place.nodes[parent], role=role, key=key)
        self.drafts.append(OpenDraft(place, parent, draft, ref.Draft(), role))

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, tokens=st.lists(TOKEN, max_size=6), singly=st.booleans())
    def extend_draft(self, number: int, tokens: list[int], singly: bool) -> None:
        each = self.pick_draft(number)
        if singly:
            for token in tokens:
                refused = self.grown(each, [token])
                self.attempt(each.place, refused, lambda token=token: each.draft.append(token))  # type: ignore[misc]
                if refused is None:
                    each.model.tokens.append(token)
        elif tokens or each.model.tokens or each.place.tree.nodes[each.parent].stop:
            refused = self.grown(each, tokens)
            self.attempt(each.place, refused, lambda: each.draft.extend(tokens))
            if refused is None:
                each.model.tokens += tokens

    @precondition(lambda self: self.drafts)
    @rule(
        tokens=st.lists(TOKEN, min_size=1, max_size=4),
        ragged=st.booleans(),
        fault=st.sampled_from((False, False, True)),
    )
    def extend_a_batch(self, tokens: list[int], ragged: bool, fault: bool) -> None:
        batch = self.drafts[-len(tokens) :]
        rows = [[token] * (1 + k % 2 if ragged else 1) for k, token in enumerate(tokens[: len(batch)])]
        if fault:
            rows[-1][-1] = -1
        verdicts = [self.grown(each, row) for each, row in zip(batch, rows, strict=True)]
        refused = next((verdict for verdict in verdicts if verdict is not None), None)
        if refused is not None and fault:
            refused = Refused("SessionTreeError", "a token out of range, perhaps over a limit too")
        given: Any = rows if ragged else [row[0] for row in rows]
        self.attempt(batch[0].place, refused, lambda: extend_drafts([each.draft for each in batch], given))
        if refused is None:
            for each, row in zip(batch, rows, strict=True):
                each.model.tokens += row

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, length=PICK)
    def rollback(self, number: int, length: int) -> None:
        each = self.pick_draft(number)
        kept = length % (len(each.model.tokens) + 3) - 1
        refused = self.verdict(lambda: each.model.rollback(kept))
        self.attempt(each.place, refused, lambda: each.draft.rollback(kept))

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, state=st.binary(max_size=3))
    def set_state(self, number: int, state: bytes) -> None:
        each = self.pick_draft(number)
        given: Any = bytearray(state)
        each.draft.set_state(given)
        given[:] = b"changed"
        each.model.states.append((len(each.model.tokens), state))

    @precondition(lambda self: self.drafts)
    @rule(number=PICK, steps=st.lists(st.tuples(REPLY, st.binary(max_size=3)), min_size=1, max_size=4), length=PICK)
    def speculate(self, number: int, steps: list[tuple[list[int], bytes]], length: int) -> None:
        """Tokens and states in turn, then back to somewhere on the way."""
        for tokens, state in steps:
            self.extend_draft(number, tokens, singly=False)
            self.set_state(number, state)
        self.rollback(number, length)

    @precondition(lambda self: self.drafts)
    @rule(
        number=PICK,
        finish=st.sampled_from(("stop", "stop", "length", "interrupted", "abort", "Error")),
        length=st.none() | PICK,
        tail=st.sampled_from(TAIL_POLICIES),
    )
    def commit(self, number: int, finish: str, length: int | None, tail: Literal["keep", "drop_last"]) -> None:
        each = self.pick_draft(number)
        place = each.place
        kept = None if length is None else length % (len(each.model.tokens) + 3) - 1
        segment = None
        refused = self.verdict(lambda: each.model.committed(kept, tail))
        if finish in ("abort", "Error"):
            kept, refused = None, Refused("FinishRefused", finish)
        elif refused is None:
            segment = Segment("generated", each.model.committed(kept, tail))
            refused = self.refused_reply(each, segment)
        node = self.attempt(place, refused, lambda: each.draft.commit(finish, kept, tail_policy=tail))
        if node is None:
            assert not each.draft.closed
            return
        assert segment is not None
        self.drafts.remove(each)
        if self.learn(place, node, parent=each.parent, role=each.role, key=each.draft.key, segment=segment):
            assert (node.finish_reason, node.tail_policy) == (finish, tail)
        self.check_closed(each)

    def refused_reply(self, each: OpenDraft, segment: Segment) -> Refused | None:
        tree = each.place.tree
        return either(
            self.verdict(lambda: tree.check_new(each.parent, segment)),
            self.verdict(lambda: tree.known(each.parent, each.role, segment, each.draft.key)),
        )

    def check_closed(self, each: OpenDraft) -> None:
        assert each.draft.closed
        for act in (each.draft.commit, lambda: each.draft.append(1), lambda: each.draft.rollback(0)):
            self.attempt(each.place, Refused("DraftClosed", "closed"), act)

    @precondition(lambda self: self.drafts)
    @rule(number=PICK)
    def abort(self, number: int) -> None:
        each = self.pick_draft(number)
        self.drafts.remove(each)
        before = each.place.surface()
        each.draft.abort()
        each.draft.abort()
        assert each.place.surface() == before
        self.check_closed(each)

    @precondition(lambda self: self.drafts)
    @rule(number=PICK)
    def drop_draft(self, number: int) -> None:
        each = self.pick_draft(number)
        before = each.place.surface()
        self.drafts.remove(each)
        place = each.place
        del each
        assert place.surface() == before

    # What must hold

    @invariant()
    def old_trees_stay_what_they_were(self) -> None:
        now = [place.session.tree for place in self.places if place.session.tree not in [old[0] for old in self.snapshots]]
        self.snapshots += [(tree, [node.id for node in tree], dict(tree.heads)) for tree in now]
        del self.snapshots[1:-8]
        for tree, ids, heads in self.snapshots:
            assert len(tree) == len(ids)
            assert [node.id for node in tree] == ids
            assert dict(tree.heads) == heads

    @invariant()
    def trees_agree(self) -> None:
        for place in self.places:
            ids, heads = place.surface()
            assert ids == list(place.tree.nodes)
            assert heads == place.tree.heads
            assert {name: node.id for name, node in place.session.heads.items()} == {
                name: node for name, (node, _) in heads.items()
            }
            assert [node.id for node in place.session.leaves()] == place.tree.leaves()
            assert place.session.pins == place.tree.pins

    @invariant()
    def nodes_agree_and_never_change(self) -> None:
        for place in [*self.places, *self.closed]:
            for node_id, node in place.nodes.items():
                expected = self.expected[node_id]
                expected.check_whole(node)
                for _ in range(2):
                    start, stop = sorted((self.windows.randint(0, node.stop), self.windows.randint(0, node.stop)))
                    expected.check(node, start, stop)
                assert fingerprint(node) == place.fingerprints[node_id]

    @invariant()
    def drafts_read_like_nodes(self) -> None:
        for each in self.drafts:
            assert len(each.draft) == len(each.model.tokens)
            assert each.draft.token_ids.tolist() == each.model.tokens
            assert each.draft.state == each.model.state
            segments = each.segments(each.model.tokens) if each.model.tokens else each.segments(())[:-1]
            expected = Expected.of(each.place.tree.scheme, segments)
            expected.check_whole(each.draft)
            start, stop = sorted(self.windows.randint(0, each.draft.stop) for _ in range(2))
            expected.check(each.draft, start, stop)


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(
    max_examples=2000 if SOAK else 100,
    stateful_step_count=60 if SOAK else 30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def unfinished_at(node: Node) -> ref.Cell:
    """The item that the path of a node ends inside of, and its placeholders so far."""
    for at in reversed(node.path()):
        if len(at):
            open_items = [item_of(item) for item in at.media if item.unfinished]
            return (open_items[0], open_items[0].placeholders_before + open_items[0].spans[0][1]) if open_items else None
    return None


def random_turn(rng: random.Random) -> Turn:
    pieces: list[tuple[int, ...] | Block] = []
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.6:
            pieces.append(tuple(rng.choice(TOKENS) for _ in range(rng.randrange(1, 6))))
        else:
            pieces.append(random_block(rng))
    tail = random_block(rng) if rng.random() < 0.2 else None
    rest_cut = rng.randrange(100) if rng.random() < 0.3 else None
    return Turn(tuple(pieces), tail, rng.randrange(100), rest_cut, rng.randrange(100))


def random_block(rng: random.Random) -> Block:
    grid = (rng.randrange(1, 4), rng.randrange(1, 3), rng.randrange(1, 4))
    return Block(rng.choice(("image", "video")), grid, rng.choice(SECONDS[:-1]), rng.randrange(3), rng.choice(FILLS))


def path_fingerprint(node: Node) -> bytes:
    """All that can be read along the path of a node."""
    digest = hashlib.sha256(node.input_ids().tobytes())
    for mode in MODES:
        digest.update(node.positions(mode=mode).tobytes())
    digest.update(repr([(item_of(item), start, stop) for item, start, stop in node.media_spans()]).encode())
    digest.update(b"".join(ancestor.id for ancestor in node.path()))
    return digest.digest()


class RandomOperations:
    """One random operation after another on a session and a fork of it, without a model: only what is older counts."""

    POSITIONS = ref.Scheme("qwen2_5_vl", "hf5", 2, 2)
    WEIGHTS: ClassVar[dict[str, int]] = {
        "append": 6,
        "reply": 6,
        "aborted_reply": 2,
        "refused_append": 2,
        "retry": 2,
        "truncate": 3,
        "replace": 3,
        "rewrite": 3,
        "move_head": 2,
    }

    def __init__(self, seed: int, store: SessionStore) -> None:
        self.rng = random.Random(seed)
        self.session = store.create("main", scheme=library_scheme(self.POSITIONS))
        self.nodes: dict[bytes, Node] = {}
        self.own: dict[bytes, bytes] = {}
        self.whole: dict[bytes, bytes] = {}
        self.done: Counter[str] = Counter()
        self.learn_all()

    def learn_all(self) -> None:
        """Takes the fingerprints of the nodes that are new in the session."""
        for node in islice(self.session.tree, len(self.nodes), None):
            assert node.id not in self.nodes
            self.nodes[node.id] = node
            self.own[node.id] = fingerprint(node)
            self.whole[node.id] = path_fingerprint(node)

    def sweep(self) -> None:
        assert list(self.nodes) == [node.id for node in self.session.tree]
        assert {node: fingerprint(self.nodes[node]) for node in self.nodes} == self.own
        assert {node: path_fingerprint(self.nodes[node]) for node in self.nodes} == self.whole

    def step(self, recent: Sequence[Node]) -> None:
        """One operation on one node, whose ancestors and siblings are hashed before and after."""
        node = self.rng.choice(recent)
        kin = [*node.path(), *self.session.siblings(node), *self.session.children(node)]
        before = [fingerprint(each) for each in kin]
        assert before == [self.own[each.id] for each in kin]
        [name] = self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))
        try:
            getattr(self, name)(node)
            self.done[name] += 1
        except SessionTreeError:
            self.done[f"{name} refused"] += 1
        assert [fingerprint(each) for each in kin] == before
        self.learn_all()

    def turn(self, parent: Node) -> dict[str, Any]:
        segment = random_turn(self.rng).segment(self.POSITIONS, unfinished_at(parent))
        return {"token_ids": np.array(segment.tokens, dtype=np.int32), "media": library_media(segment.items)}

    def append(self, node: Node) -> None:
        content = self.turn(node)
        metadata = {"calls": [1, {"name": "f"}]}
        self.session.append(node, **content, metadata=metadata)
        content["token_ids"][:] = 4
        content["media"].clear()
        metadata["calls"].append(2)

    def reply(self, node: Node) -> None:
        draft = self.session.draft(node)
        for _ in range(self.rng.randrange(1, 4)):
            draft.extend([self.rng.choice(TOKENS) for _ in range(self.rng.randrange(1, 5))])
            draft.append(self.rng.choice(TOKENS))
            draft.rollback(self.rng.randrange(1, len(draft) + 1))
        draft.commit(self.rng.choice(("stop", "length")), self.rng.choice((None, 1)))

    def aborted_reply(self, node: Node) -> None:
        draft = self.session.draft(node)
        draft.extend([1, 2, 3])
        if self.rng.random() < 0.5:
            draft.abort()

    def refused_append(self, node: Node) -> None:
        segment = random_turn(self.rng).segment(self.POSITIONS, unfinished_at(node))
        wrong = faulty(segment, self.rng.choice(FAULTS))
        self.session.append(node, list(wrong.tokens), media=library_media(wrong.items))

    def retry(self, node: Node) -> None:
        if node.parent is not None and node.role is not None and node.origin == "input":
            count = len(self.session.tree)
            again = self.session.append(
                node.parent, node.token_ids, media=node.media, role=node.role, key=node.key, metadata={"try": count}
            )
            assert again == node and len(self.session.tree) == count

    def truncate(self, node: Node) -> None:
        self.session.truncate(node, self.rng.randrange(node.stop + 1))

    def replace(self, node: Node) -> None:
        assert node.parent is not None or node == self.session.root
        content = self.turn(node.parent or node)
        self.session.replace(node, **content, head="main")

    def rewrite(self, node: Node) -> None:
        start, stop = sorted((self.rng.randrange(node.stop + 1), self.rng.randrange(node.stop + 1)))
        segment = random_turn(self.rng).segment(self.POSITIONS, None)
        if not any(item.unfinished for item in segment.items):
            self.session.rewrite(node, [Edit(start, stop, segment.tokens, library_media(segment.items))])

    def move_head(self, node: Node) -> None:
        self.session.set_head(self.rng.choice(HEAD_NAMES), node)


@pytest.mark.soak  # test_cases_tree.py has as many of the row, without forks
def test_c35_ten_thousand_random_operations_change_no_older_node() -> None:
    with SessionStore.in_memory() as store:
        run = RandomOperations(35, store)
        fork = store.fork(run.session, run.session.root, "fork")
        for number in range(10_000):
            if number % 40 == 0:
                pool = [node for node in run.nodes.values() if node.stop < 120 and node.depth < 16]
                recent = run.rng.sample(pool, min(len(pool), 40))
            run.step(recent)
            if number % 1000 == 999:
                fork = store.fork(run.session, run.rng.choice(recent), f"fork {number}")
                fork.append(fork.root, [number, 7])
                run.sweep()
        assert all(run.done[name] > 100 for name in run.WEIGHTS), run.done
        assert len(run.nodes) > 3000
