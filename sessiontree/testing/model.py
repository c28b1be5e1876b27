"""A second answer to everything a session is asked: a plain list of what was done to it, read anew from the start each time.

A :class:`Log` has one entry for each node, in the order they were made. What a path holds (token ids, spans of media, positions in
both modes) is put together from its turns, one token after the other. Only node ids are the library's choice: the log says when an
append must give a new node and when one that is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pyrsistent import thaw

from sessiontree import Annotation, MediaItem, Node, Ragged, Session, Spans, TokenValues, media_identity
from sessiontree.positions import scheme

MODES: Final = ("as_decoded", "as_replayed")
MERGE: Final = 2  # patches along each side of a placeholder
PLACEHOLDER: Final = 151655
SCHEME: Final = scheme("qwen2_vl@hf5", spatial_merge_size=MERGE, image_token_id=PLACEHOLDER, video_token_id=151656)


@dataclass(frozen=True)
class Picture:
    """An image, or a video of more than one frame, whose placeholders begin ``at`` in its turn. Sizes are in placeholders."""

    number: int
    frames: int
    height: int
    width: int
    at: int

    def __len__(self) -> int:
        return self.frames * self.height * self.width

    def item(self) -> MediaItem:
        """As the library is given it."""
        return MediaItem(
            "image" if self.frames == 1 else "video",
            media_identity("picture", b"%d" % self.number),
            spans=[(self.at, len(self))],
            grid_thw=(self.frames, self.height * MERGE, self.width * MERGE),
        )


@dataclass(frozen=True)
class Turn:
    """The content of a node. ``generated``: by a draft, token by token."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    role: str = "user"
    key: str | None = None
    generated: bool = False

    def items(self) -> list[MediaItem]:
        """Its media, as the library is given them."""
        return [picture.item() for picture in self.pictures]


def add(session: Session, parent: Node | bytes, turn: Turn) -> Node:
    """Append a turn, or commit it as a draft."""
    if not turn.generated:
        return session.append(parent, turn.tokens, media=turn.items(), role=turn.role, key=turn.key)
    with session.draft(parent, role=turn.role, key=turn.key) as draft:
        draft.extend(turn.tokens)
        return draft.commit()


def ids_of(turns: Iterable[Turn]) -> list[int]:
    """All tokens of a path."""
    return [token for turn in turns for token in turn.tokens]


def spans_of(turns: Iterable[Turn]) -> list[tuple[MediaItem, int, int]]:
    """(item, start, stop) of all media of a path, half-open, in path coordinates."""
    spans, start = [], 0
    for turn in turns:
        for picture in turn.pictures:
            spans.append((picture.item(), start + picture.at, start + picture.at + len(picture)))
        start += len(turn.tokens)
    return spans


def positions_of(turns: Iterable[Turn], mode: str) -> NDArray[np.int64]:
    """Positions of a path by the rule of :data:`SCHEME`: (3, T) int64.

    A picture's placeholders stand at its base plus (frame, row, column), and text goes on at its base plus its longer side. A
    decoded token stands one behind the highest position so far.
    """
    columns: list[tuple[int, int, int]] = []
    following, highest = 0, -1
    for turn in turns:
        places = {picture.at + k: (picture, k) for picture in turn.pictures for k in range(len(picture))}
        base = 0
        for index in range(len(turn.tokens)):
            if index in places:
                picture, k = places[index]
                if k == 0:
                    base, following = following, following + max(picture.height, picture.width)
                frame, rest = divmod(k, picture.height * picture.width)
                row, column = divmod(rest, picture.width)
                columns.append((base + frame, base + row, base + column))
            else:
                if turn.generated and mode == "as_decoded":
                    following = highest + 1
                columns.append((following,) * 3)
                following += 1
            highest = max(highest, *columns[-1])
    return np.array(columns, np.int64).reshape(-1, 3).T


@dataclass(frozen=True)
class Said:
    """An annotation, where all that can be told of it is compared. ``tokens``: what it says of each token; None: it is a scalar."""

    kind: str
    scalar: Any = None
    tokens: Mapping[int, Any] | None = None

    @classmethod
    def of(cls, value: Annotation) -> Said:
        """That of a value as the library has it."""
        if isinstance(value, TokenValues):
            rows = {start + at: row.tobytes() for start, values in value.stretches for at, row in enumerate(values)}
            return cls(f"rows of {value.dtype} {value.row_shape}", tokens=rows)
        if isinstance(value, Ragged):
            lists = {token: (str(each.dtype), each.tobytes()) for token, each in value.lists().items()}
            return cls("lists", tokens=lists)
        if isinstance(value, Spans):
            each = {token: (type(which).__name__, which) for start, stop, which in value for token in range(start, stop)}
            return cls("spans", tokens=each)
        return cls(type(value).__name__, value.hex() if isinstance(value, float) else value)

    def over(self, older: Said | None) -> Said:
        """What was said before, where this says nothing."""
        if older is None or self.tokens is None or older.tokens is None:
            return self
        return Said(self.kind, tokens={**older.tokens, **self.tokens}) if self.tokens else older

    def of_first(self, count: int) -> Said:
        """What it says of the first so many tokens."""
        return Said(self.kind, tokens={token: each for token, each in (self.tokens or {}).items() if token < count})


@dataclass
class Entry:
    """A node: its id, its parent's and its turn, None for the root. Logs of forks share those of their path."""

    id: bytes
    parent: bytes | None
    turn: Turn | None


@dataclass
class Log:
    """What was done to the session of an id.

    ``shared``: how many of its nodes, the first ones, go with it alone: the root, and of a fork the path it began with. ``said``:
    of nodes, by name. ``wholes``: of which node each is a prefix.
    """

    session_id: str
    entries: list[Entry]
    heads: dict[str, bytes] = field(default_factory=dict)
    pins: set[bytes] = field(default_factory=set)
    shared: int = 1
    said: dict[bytes, dict[str, Said]] = field(default_factory=dict)
    wholes: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Log:
        """That of a session in which nothing was done."""
        return cls(session.id, [Entry(session.root.id, None, None)])

    @property
    def ids(self) -> list[bytes]:
        """Of all nodes, in order."""
        return [entry.id for entry in self.entries]

    def path(self, node: bytes) -> list[Entry]:
        """The entries from the root to a node."""
        by_id = {entry.id: entry for entry in self.entries}
        path = [by_id[node]]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        return path[::-1]

    def turns(self, node: bytes) -> list[Turn]:
        """The turns of a node's path."""
        return [entry.turn for entry in self.path(node) if entry.turn is not None]

    def children(self, node: bytes) -> list[Entry]:
        """In the order they were made."""
        return [entry for entry in self.entries if entry.parent == node]

    def known(self, parent: bytes, turn: Turn) -> bytes | None:
        """The child that has this turn already. Raises LookupError where another one has its key."""
        for entry in self.children(parent):
            if entry.turn == turn:
                return entry.id
            if turn.key is not None and entry.turn is not None and entry.turn.key == turn.key:
                raise LookupError(turn.key)
        return None

    def add(self, node: bytes, parent: bytes, turn: Turn) -> None:
        """A node was made."""
        assert node not in self.ids, "a new node has the id of another"
        self.entries.append(Entry(node, parent, turn))

    def forked(self, node: bytes, fork: Session) -> Log:
        """That of a session that was forked there."""
        path = self.path(node)
        return Log(fork.id, path, shared=len(path), said={entry.id: self.annotations(entry.id) for entry in path})

    def annotate(self, node: bytes, values: Mapping[str, Annotation]) -> None:
        """Something more was said of a node."""
        own = self.said.setdefault(node, {})
        for name, value in values.items():
            own[name] = Said.of(value).over(own.get(name))

    def annotations(self, node: bytes) -> dict[str, Said]:
        """What is said of a node, and of its tokens where they are another's too: what stands nearest counts."""
        found = dict(self.said.get(node, {}))
        turn, whole = self.path(node)[-1].turn, self.wholes.get(node)
        if turn is not None and whole is not None:
            for name, value in self.annotations(whole).items():
                clipped = value.of_first(len(turn.tokens))
                if clipped.tokens:
                    found[name] = found[name].over(clipped) if name in found else clipped
        return found

    def _let_go(self, gone: set[bytes]) -> None:
        """Nodes go, and what is said of them; of those that stay and are prefixes of them, all is said itself from here on."""
        for node in [node for node, whole in self.wholes.items() if whole in gone and node not in gone]:
            self.said[node] = self.annotations(node)
            del self.wholes[node]
        self.entries = [entry for entry in self.entries if entry.id not in gone]
        self.said = {node: said for node, said in self.said.items() if node not in gone}
        self.wholes = {node: whole for node, whole in self.wholes.items() if node not in gone}

    def below(self, nodes: Iterable[bytes]) -> set[bytes]:
        """These nodes and all that come from them."""
        wanted = set(nodes)
        for entry in self.entries:  # a parent comes before its children
            if entry.parent in wanted:
                wanted.add(entry.id)
        return wanted

    def held(self) -> set[bytes]:
        """Where heads and pins are."""
        return {*self.heads.values(), *self.pins}

    def drop(self, nodes: Iterable[bytes]) -> None:
        """Forget these nodes and all that come from them."""
        self._let_go(self.below(nodes))

    def collect(self, recent: int) -> None:
        """Forget what leads to no head and no pin, nor to one of the last ``recent`` nodes."""
        ids = self.ids
        alive = set(ids[: self.shared])
        for node in {*self.held(), *ids[max(0, len(ids) - recent) :]}:
            alive.update(entry.id for entry in self.path(node))
        self._let_go({*ids} - alive)


def reached(logs: Iterable[Log]) -> int:
    """How many nodes these sessions have together, roots not counted, and what forks share once."""
    return len({id(entry) for log in logs for entry in log.entries[1:]})


def check_node(node: Node, turns: Sequence[Turn]) -> None:
    """Everything that can be read along a node's path is what its turns say."""
    own = turns[-1]
    ids, spans = ids_of(turns), spans_of(turns)
    assert (node.depth, node.start, node.stop) == (len(turns), len(ids) - len(own.tokens), len(ids))
    assert (node.origin, node.role) == ("generated" if own.generated else "input", own.role)
    assert own.key is None or node.key == own.key
    assert node.token_ids.tolist() == list(own.tokens)
    assert list(node.media) == own.items()
    assert node.input_ids().tolist() == ids
    assert list(node.media_spans()) == spans
    for mode in MODES:
        table = node.positions(mode=mode)
        assert table.shape == (SCHEME.num_axes, len(ids))
        assert np.array_equal(table, positions_of(turns, mode)), mode
    decoded = positions_of(turns, "as_decoded")
    assert node.mrope_position_delta == (int(decoded.max()) + 1 if ids else 0) - len(ids)
    after = positions_of([*turns, Turn((0,))], "as_decoded")
    assert node.next_position == after[0, -1]


def check_session(session: Session, log: Log) -> None:
    """A session is what its log says: its nodes in order, who is whose child, heads, pins, and every path."""
    assert [node.id for node in session.tree] == log.ids
    assert {name: node.id for name, node in session.heads.items()} == log.heads
    assert session.pins == log.pins
    for entry in log.entries:
        node = session.node(entry.id)
        assert [each.id for each in node.path()] == [each.id for each in log.path(entry.id)]
        assert [child.id for child in session.children(node)] == [child.id for child in log.children(entry.id)]
        if entry.turn is not None:
            check_node(node, log.turns(entry.id))
        assert said_of(session, node) == log.annotations(entry.id)


def said_of(session: Session, node: Node | bytes) -> dict[str, Said]:
    """What a session says of a node, by name."""
    return {name: Said.of(value) for name, value in session.annotations(node).items()}


def seen(node: Node) -> bytes:
    """A digest of everything that a reader sees of a node and its path."""
    plain = (
        *(node.id, node.parent and node.parent.id, node.depth, node.start, node.stop, node.origin, node.role, node.key),
        *(node.finish_reason, node.tail_policy, json.dumps(thaw(node.metadata), sort_keys=True)),
        [tuple(link) for link in node.links],
        [(repr(item), item.content(), start, stop) for item, start, stop in node.media_spans()],
        (float(node.next_position), float(node.mrope_position_delta)),
    )
    digest = sha256(repr(plain).encode())
    digest.update(node.input_ids().tobytes())
    for mode in MODES:
        digest.update(node.positions(mode=mode).tobytes())
    return digest.digest()


def all_seen(session: Session) -> dict[str, Any]:
    """The same of all its nodes, in order, what is said of them, and heads, with versions, and pins: equal for equal sessions."""
    heads = {name: (head.node.id, head.version) for name, head in session.tree.heads.items()}
    nodes = list(session.tree)
    said = [said_of(session, node) for node in nodes]
    return {"nodes": [seen(node) for node in nodes], "said": said, "heads": heads, "pins": session.pins}
