"""A session as the viewer shows it: its shape, its nodes in chunks, and thumbnails of its media.

The shape is what the picture is drawn of: for each node, by its ordinal, its parent and a few facts. A chunk has all that is known
of ``CHUNK`` nodes, and is only taken apart by the page when one of them is looked at. Of what follows a writer, only new nodes are
read again.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np

from sessiontree.annotated import annotated
from sessiontree.annotations import Annotation, OfTokens, Ragged, Spans, TokenValues, same
from sessiontree.cli.facts import Marks, annotation_facts, held, namespace_facts, node_facts, number
from sessiontree.cli.output import plain
from sessiontree.cli.shape import Shape
from sessiontree.cli.words import Words, message_text
from sessiontree.digest import ID_BYTES, pack
from sessiontree.errors import CorruptTree, UnknownNode
from sessiontree.interchange import title_of
from sessiontree.media import MediaItem
from sessiontree.node import Node
from sessiontree.positions import MODES
from sessiontree.store import Session
from sessiontree.stored import StoredIndex
from sessiontree.viewer.packing import EXACT, Arrays, packed
from sessiontree.viewer.page import Block, block_size
from sessiontree.viewer.pictures import thumbnail
from sessiontree.viewer.runs import run_facts

CHUNK: Final = 256  # nodes
MAX_LABEL: Final = 80  # characters of a node's text that its card may show
MAX_PLACEHOLDERS: Final = 8192  # tokens that are looked at for it where there are media
MAX_IDS: Final = 12  # of them where there is no text
MAX_COLUMNS: Final = 32  # names of metadata that nodes can be coloured by, those that most of them have
MAX_VALUE: Final = 60  # characters of such names and values
MAX_PICTURES: Final = 400  # thumbnails of a file


class Row(NamedTuple):
    """What the shape says of a node. ``error``: why it cannot be read, and then that is all."""

    size: int = 0
    role: str | None = None
    generated: bool = False
    finish_reason: str | None = None
    label: str = ""
    modalities: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    error: str | None = None


class Viewed:
    """One session, as ``session`` has it when this is made, and then at each :meth:`refresh`.

    ``keeps``: hold the nodes that were read for the shape, for who goes through all of their chunks next.
    """

    def __init__(self, session: Session, words: Words | None, *, keeps: bool = False) -> None:
        self.session = session
        self._words = words
        self._keeps = keeps
        self._nodes: list[Node | CorruptTree | None] = []
        self._rows: list[Row] = []
        self._ids = np.zeros((0, ID_BYTES), np.uint8)
        self._parents: list[int] = []
        self._epoch = ""  # of the same ordinals for the same nodes
        self._version = -1  # of what was said of nodes
        self._said: dict[int, dict[str, Annotation]] = {}  # by ordinal
        self._unread = 0  # of how many nodes that could not be read
        self._changes = 0  # of what is said
        self._stamp: Any = None
        self.mark: str = ""
        self._items: dict[str, tuple[Node, MediaItem]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what the session has by now. Raises CorruptTree, StoreFailed."""
        shape = Shape(self.session._tree)
        ids, parents = shape.ids, shape.parents
        known = len(self._rows)
        goes_on = len(ids) >= known > 0 and np.array_equal(ids[:known], self._ids) and parents[:known] == self._parents
        if not goes_on:
            known, self._rows, self._nodes, self._epoch = 0, [], [], secrets.token_hex(4)
        for read in self._read(shape, known, len(parents)):
            self._rows.append(self._row(read))
            if self._keeps:
                self._nodes.append(read)
        self._shape, self._ids, self._parents = shape, ids, parents
        said_anew = self._read_said(shape, anew=not goes_on)
        names = tuple((name, at, bool(head.uncertain)) for name, at, head in self._heads())
        stamp = self._epoch, len(self._rows), names, frozenset(self.session.pins)
        if said_anew or stamp != self._stamp:
            self._stamp = stamp
            self._marks = Marks(self.session, shape)
            self._changing = self._changing_facts()
            self.mark = f"{self._epoch}.{len(self._rows)}.{_digest(self._changing)}"

    def _heads(self) -> Iterator[tuple[str, int, Any]]:
        heads = self.session._tree._heads
        return ((name, at, heads[name]) for name, at in self._shape.ordinals_of_heads().items())

    def _read_said(self, shape: Shape, *, anew: bool) -> bool:
        """Read what was said of nodes since the last time, or ``anew`` all of it; whether that is anything else than before.

        What a session in a store says has versions that only grow. A fork also sees what is said of the path it shares.
        """
        tree, index = self.session._tree, shape._layers[0][0]
        if anew or index.tip is not None or not isinstance(index, StoredIndex):
            unread: list[bytes] = []
            said = {at: values for at, _, values in annotated(tree, unread=unread)}
            changed = len(unread) != self._unread or not _same(said, self._said)
            self._said, self._unread = said, len(unread)
        else:
            changed = tree._said != self._version
            for at in index.source.annotated_ordinals(self._version).tolist() if changed else ():
                if at < len(self._rows) and (at == 0 or shape.parents[at] >= 0):
                    self._said[at] = tree._read_said([shape.node(at)], None)[0]
        self._version = tree._said
        self._changes += changed
        return changed

    def _read(self, shape: Shape, first: int, stop: int) -> Iterator[Node | CorruptTree | None]:
        """Nodes by their ordinals; why one cannot be read; None for one that is gone or leads nowhere.

        All are held until the last one is read, so that each record is read once.
        """
        nodes: list[Node | CorruptTree | None] = []
        for begin in range(first, stop, CHUNK):
            ordinals = [at for at in range(begin, min(begin + CHUNK, stop)) if at == 0 or shape.parents[at] >= 0]
            for index, _ in shape._layers:
                if isinstance(index, StoredIndex):
                    source = index.source
                    source.read_ahead([at for at in ordinals if source.first <= at < source.first + len(source)])
            found: dict[int, Node | CorruptTree] = {}
            for at in reversed(ordinals):  # the last one mostly brings the others along
                try:
                    found[at] = shape.node(at)
                except CorruptTree as error:
                    found[at] = error
            some = [found.get(at) for at in range(begin, min(begin + CHUNK, stop))]
            nodes += some
            yield from some

    def _row(self, node: Node | CorruptTree | None) -> Row:
        if not isinstance(node, Node):
            return Row(error=None if node is None else str(node))
        details = node._details  # node.metadata is a copy of all of it
        values = tuple(
            (name, found)
            for name, value in details.metadata.items()
            if len(name) <= MAX_VALUE and (found := _value(value)) is not None
        )
        modalities = tuple(dict.fromkeys(item.modality for item in node.media))
        label = self._label(node)
        return Row(len(node), node.role, node.origin == "generated", node.finish_reason, label, modalities, values)

    def _has_words(self, node: Node) -> bool:
        """Whether a tokenizer tells what it says. It has nothing to tell of nodes that were imported as words alone."""
        return self._words is not None and bool(node.token_ids.any())

    def _label(self, node: Node) -> str:
        if node.parent is None:
            return node.scheme.name
        if not self._has_words(node) and (message := _message(node)):
            return message[:MAX_LABEL]
        if self._words is None:
            ids = node.input_ids(node.start, min(node.stop, node.start + MAX_IDS)).tolist()
            return " ".join(map(str, ids)) + (" …" if len(node) > MAX_IDS else "")
        most = MAX_PLACEHOLDERS if node.media else MAX_LABEL  # an item is told by how many tokens it has
        return self._words.between(node, node.start, min(node.stop, node.start + most))[:MAX_LABEL]

    # The shape

    def tree(self, known: str = "") -> bytes | None:
        """The shape, packed, without what ``known``, a mark, says is known of it; None where that is all."""
        if known == self.mark:
            return None
        epoch, _, rest = known.partition(".")
        first = int(rest.partition(".")[0]) if epoch == self._epoch else 0
        rows = self._rows[first:]
        names = list(dict.fromkeys(name for row in rows for name in (row.role, row.finish_reason)))
        number_of = {name: at for at, name in enumerate(names)}
        return packed(
            {
                "mark": self.mark,
                "epoch": self._epoch,
                "first": first,
                "chunk": CHUNK,
                "parents": self._parents[first:],
                "ids": self._ids[first:, :4].tobytes().hex(),
                "names": names,
                "sizes": [row.size for row in rows],
                "roles": [number_of[row.role] for row in rows],
                "finish_reasons": [number_of[row.finish_reason] for row in rows],
                "generated": "".join("1" if row.generated else "0" for row in rows),
                "labels": [row.label for row in rows],
                "media": [[at, row.modalities] for at, row in enumerate(rows, first) if row.modalities],
                "errors": [[at, row.error] for at, row in enumerate(rows, first) if row.error is not None],
                **self._changing,
            }
        )

    def _changing_facts(self) -> dict[str, Any]:
        """What may be another the next time, though no node is."""
        session, shape = self.session, self._shape
        pins = session.pins
        found = [at for at in range(len(self._ids)) if self._ids[at].tobytes() in pins] if pins else []
        return {
            "session": {
                "id": session.id,
                "title": title_of(session),
                "scheme": session.scheme.name,
                "scheme_params": _exact(plain(dict(session.scheme.params))),
                "axes": _axes(session.scheme.num_axes),
                "dtype": str(session.scheme.dtype),
                "namespace": namespace_facts(session.namespace),
                "model_fingerprint": session.root.model_fingerprint,
                "max_tokens": session.max_tokens,
                "reserve_output": session.reserve_output,
            },
            "words": self._words is not None,
            "heads": [[name, at, bool(head.uncertain)] for name, at, head in self._heads()],
            "pins": found,
            "lost": shape.lost,
            "unread_annotations": self._unread,
            "metadata": self._metadata(),
            "annotations": _columns(
                (f"{name} ({how})" if how else name, at, value)
                for at, values in self._said.items()
                for name, each in values.items()
                for how, value in (_one_value(each),)
                if value is not None
            ),
            "said": self._changes,
        }

    def _metadata(self) -> list[dict[str, Any]]:
        columns = _columns((name, at, value) for at, row in enumerate(self._rows) for name, value in row.values)
        return sorted(columns, key=lambda column: -len(column["ordinals"]))[:MAX_COLUMNS]

    @property
    def damaged(self) -> bool:
        """Whether something of it could not be read."""
        facts = self._changing
        return bool(facts["lost"] or facts["unread_annotations"]) or any(row.error is not None for row in self._rows)

    # Chunks and pictures

    def chunks(self) -> int:
        """How many there are."""
        return -(-len(self._rows) // CHUNK)

    def chunk(self, number: int) -> bytes:
        """All that is known of the nodes ``[number * CHUNK, ...)``, packed. Raises UnknownNode."""
        if not 0 <= number < self.chunks():
            raise UnknownNode(f"there is no chunk {number} of session {self.session.id!r}", node_id=None)
        first, stop = number * CHUNK, min((number + 1) * CHUNK, len(self._rows))
        nodes = self._nodes[first:stop] if self._keeps else list(self._read(self._shape, first, stop))
        arrays, pieces = Arrays(), set[int]()
        facts = [
            self._facts(node, self._said.get(at, {}), arrays, pieces)
            if isinstance(node, Node)
            else {"error": "it is missing" if node is None else str(node)}
            for at, node in enumerate(nodes, first)
        ]
        spelled = {} if self._words is None else {each: self._words.of_ids([each]) for each in sorted(pieces)}
        return arrays.packed({"first": first, "nodes": facts, "pieces": spelled})

    def _facts(self, node: Node, said: Mapping[str, Annotation], arrays: Arrays, pieces: set[int]) -> dict[str, Any]:
        facts = node_facts(node, self._marks, self._words)
        for name in ("heads", "pinned", "parent", "start", "stop", "depth", "role", "origin"):  # the shape says these
            del facts[name]
        for item, entry in zip(node.media, facts["media"], strict=True):
            entry["features"] = held(node, item)
            entry["content"] = content = sha256(pack(item.content())).hexdigest()[:16]
            if entry["features"]:
                self._items.setdefault(content, (node, item))
        ids = node.token_ids
        if not self._has_words(node) and (message := _message(node)):
            facts["text"] = message
        if self._words is not None:
            pieces.update(np.unique(ids).tolist())
        facts["token_ids"] = arrays.add(ids)
        facts["runs"] = run_facts(node.scheme, node.runs, len(node), arrays)
        if node.replayed is not None:
            facts["replayed_runs"] = run_facts(node.scheme, node.replayed.runs, len(node), arrays)
        for mode in MODES:
            state = node.position_state(mode)
            facts[mode] = [number(node.scheme.next_position(state)), number(node.scheme.mrope_position_delta(state))]
        facts["metadata"] = _exact(plain(node.metadata))
        facts["media"] = _exact(facts["media"])
        if any(link.kind == "prefix_of" for link in node.links):
            said = self.session.annotations(node)  # with what it has of the whole
        facts["annotations"] = [
            _exact(annotation_facts(name, value, node)) | _values_of(value, arrays) for name, value in sorted(said.items())
        ]
        return facts

    def picture(self, content: str) -> bytes:
        """The thumbnail of a content that a chunk said there are features of, packed; of nothing where it cannot be seen as one."""
        found = None
        if content in self._items:
            node, item = self._items[content]
            features = node.feature_store
            with suppress(CorruptTree):  # what is damaged cannot be seen
                kept = None if features is None else features.kept(item)
                merge_size = int(node.scheme.params.get("spatial_merge_size") or 1)
                found = None if kept is None else thumbnail(item, kept, merge_size)
        arrays = Arrays()
        if found is None:
            return arrays.packed({})
        png = arrays.add(np.frombuffer(found.png, np.uint8))
        return arrays.packed({"png": png, "width": found.width, "height": found.height, "what": found.what})

    def blocks(self, most_bytes: int) -> Iterator[Block]:
        """All of it for a page that asks nobody: the shape, and chunks, the newest first, as far as so many bytes of it go."""
        shape = self.tree()
        assert shape is not None
        yield "tree", shape
        left = most_bytes - block_size(("tree", shape))
        for at in reversed(range(self.chunks())):
            chunk = f"chunk-{at}", self.chunk(at)
            left -= block_size(chunk)
            if left < 0:
                return
            yield chunk
        for content in list(self._items)[:MAX_PICTURES]:
            picture = f"picture-{content}", self.picture(content)
            left -= block_size(picture)
            if left < 0:
                return
            yield picture


def _message(node: Node) -> str:
    """The text of the message that a node was imported of; none where it is no such node, or says it otherwise."""
    try:
        return message_text(node)
    except (ValueError, TypeError, AttributeError):  # metadata are anybody's
        return ""


def _same(one: Mapping[int, Mapping[str, Annotation]], two: Mapping[int, Mapping[str, Annotation]]) -> bool:
    return one.keys() == two.keys() and all(
        one[at].keys() == two[at].keys() and all(same(value, two[at][name]) for name, value in one[at].items()) for at in one
    )


def _axes(count: int) -> list[str]:
    """What the axes of positions are called."""
    if count == 1:
        return ["position"]
    return ["t", "h", "w"] if count == 3 else [*(f"text {at}" for at in range(count - 3)), "w", "h", "image"]


def _value(value: Any) -> bool | int | float | str | None:
    """A value that nodes can be coloured by; None where it is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > EXACT:
        return str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_VALUE else None
    return value if isinstance(value, (bool, int, float)) else None


def _one_value(value: Annotation) -> tuple[str, Any]:
    """What a node is coloured by where that is said of its tokens, and how it comes of theirs."""
    if not isinstance(value, OfTokens):
        return "", _value(value)
    if isinstance(value, Spans):
        first = next(iter(value), None)
        return "first", None if first is None else _value(first[2])
    if isinstance(value, Ragged):
        lengths = [lengths for _, lengths, _ in value.stretches]
        return "mean length", float(np.concatenate(lengths).mean()) if lengths else None
    if not isinstance(value, TokenValues) or value.row_shape or not value.stretches:
        return "", None
    return "mean", _value(float(np.concatenate([rows for _, rows in value.stretches]).mean(dtype=np.float64)))


def _values_of(value: Annotation, arrays: Arrays) -> dict[str, Any]:
    """The arrays of what is said of tokens, one number each."""
    if not isinstance(value, TokenValues) or value.row_shape:
        return {}
    return {"values": [arrays.add(rows) for _, rows in value.stretches]}


def _columns(values: Any) -> list[dict[str, Any]]:
    """(name, ordinal, value) by name, in order."""
    found: dict[str, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
    for name, at, value in values:
        ordinals, column = found[name]
        ordinals.append(at)
        column.append(value)
    return [{"name": name, "ordinals": ordinals, "values": column} for name, (ordinals, column) in sorted(found.items())]


def _exact(value: Any) -> Any:
    """What JSON holds without the whole numbers that JavaScript would round: those are mappings with ``$int``."""
    if isinstance(value, dict):
        return {name: _exact(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(entry) for entry in value]
    return {"$int": str(value)} if type(value) is int and abs(value) > EXACT else value


def _digest(facts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
