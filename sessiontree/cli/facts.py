"""What is said of a node, as a line and in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sessiontree.annotations import Annotation, OfTokens, Ragged, Spans
from sessiontree.cli.output import plain, safe, styled
from sessiontree.cli.shape import Shape
from sessiontree.cli.words import Words, said_by
from sessiontree.media import MediaItem
from sessiontree.node import Namespace, Node
from sessiontree.render import _facts, _name
from sessiontree.store import Session
from sessiontree.stored import LoneNode

MAX_CHARACTERS = 60  # of a node's text in its line


class Marks:
    """What a session says of its nodes: heads and pins, by id."""

    def __init__(self, session: Session, shape: Shape) -> None:
        found = ((shape.id_at(ordinal), names) for ordinal, names in shape.heads().items())
        self._heads = {node_id: names for node_id, names in found if node_id is not None}
        self._pins = session.pins

    def heads(self, node_id: bytes) -> list[str]:
        """Names, sorted."""
        return self._heads.get(node_id, [])

    def pinned(self, node_id: bytes) -> bool:
        """Whether gc keeps it for a pin's sake."""
        return node_id in self._pins


def node_line(node: Node | LoneNode, marks: Marks, words: Words | None = None) -> str:
    """A node in one line, as ``to_text`` draws it: id, role, tokens; what else there is; its heads; the beginning of its text.

    Without a tokenizer that is the text of the message it was imported of.
    """
    generated = node.origin == "generated"
    line = styled("● " if generated else "○ ", fg="green" if generated else "cyan") + ", ".join(_facts(node))
    if marks.pinned(node.id):
        line += ", pinned"
    if heads := marks.heads(node.id):
        line += styled(f" ← {' '.join(map(_name, heads))}", fg="yellow", bold=True)
    if words is not None and len(node):
        line += "  " + styled(words.beginning(node, MAX_CHARACTERS), italic=True)
    elif (said := said_by(node, MAX_CHARACTERS)) is not None:
        line += "  " + styled(said, italic=True)
    return line


def node_facts(node: Node | LoneNode, marks: Marks, words: Words | None = None) -> dict[str, Any]:
    """The keys that every node has in JSON, wherever it stands."""
    parent = node.parent_id if isinstance(node, LoneNode) else None if node.parent is None else node.parent.id
    facts: dict[str, Any] = {
        "id": node.id.hex(),
        "parent": None if parent is None else parent.hex(),
        "depth": node.depth,
        "start": node.start,
        "stop": node.stop,
        "role": node.role,
        "origin": node.origin,
        "key": node.key,
        "finish_reason": node.finish_reason,
        "tail_policy": node.tail_policy,
        "media": [
            item_facts(item) | {"spans": [[node.start + at, node.start + at + size] for at, size in item.spans]}
            for item in node.media
        ],
        "links": [{"kind": kind, "node": node_id.hex(), "reused_tokens": reused} for kind, node_id, reused in node.links],
        "heads": marks.heads(node.id),
        "pinned": marks.pinned(node.id),
    }
    return facts if words is None else facts | {"text": words.text(node)}


def item_facts(item: MediaItem) -> dict[str, Any]:
    """A media item in JSON, wherever it stands."""
    return {
        "modality": item.modality,
        "identity": item.identity.hex(),
        "grid_thw": None if item.grid_thw is None else list(item.grid_thw),
        "second_per_grid_ts": item.second_per_grid_ts,
        "audio_feature_length": item.audio_feature_length,
        "target_sizes": [list(size) for size in item.target_sizes],
        "placeholders_before": item.placeholders_before,
        "unfinished": item.unfinished,
        "extra": plain(item.extra),
    }


def held(node: Node, item: MediaItem) -> bool:
    """Whether there are features of an item of it."""
    features = node.feature_store
    return features is not None and (item in features or (features.files is not None and item.content() in features.files))


def annotation_facts(name: str, value: Annotation, node: Node) -> dict[str, Any]:
    """An annotation in JSON, but for the rows of arrays: of which tokens, in path coordinates, and of what type they are."""
    facts: dict[str, Any] = {"name": name}
    if not isinstance(value, OfTokens):
        return facts | {"kind": "scalar", "value": plain(value)}
    if isinstance(value, Spans):
        return facts | {"kind": "spans", "spans": [[node.start + start, node.start + stop, each] for start, stop, each in value]}
    if isinstance(value, Ragged):
        tokens = [[node.start + start, node.start + start + len(lengths)] for start, lengths, _ in value.stretches]
        types = {str(values.dtype) for _, _, values in value.stretches}
        return facts | {"kind": "ragged", "dtype": next(iter(types), None), "tokens": tokens}
    tokens = [[node.start + start, node.start + start + len(rows)] for start, rows in value.stretches]
    dtype = None if value.dtype is None else str(value.dtype)
    return facts | {"kind": "token_values", "dtype": dtype, "row_shape": list(value.row_shape), "tokens": tokens}


def annotation_line(facts: Mapping[str, Any]) -> str:
    """The same in a line."""
    if facts["kind"] == "scalar":
        return f"{_name(facts['name'])} {safe(json.dumps(facts['value'], ensure_ascii=False))}"
    if facts["kind"] == "spans":
        where = [f"[{start}, {stop}) {safe(json.dumps(value, ensure_ascii=False))}" for start, stop, value in facts["spans"]]
        return f"{_name(facts['name'])} {', '.join(where) or 'nowhere'}"
    what = facts["dtype"] or "nothing"
    if facts["kind"] == "ragged":
        what += " lists"
    elif facts["row_shape"]:
        what += f" ({', '.join(map(str, facts['row_shape']))})"
    return f"{_name(facts['name'])} {what} of {' '.join(f'[{start}, {stop})' for start, stop in facts['tokens']) or 'no tokens'}"


def span_facts(spans: Sequence[tuple[MediaItem, int, int]]) -> list[dict[str, Any]]:
    """(item, start, stop) in JSON, in path coordinates."""
    return [item_facts(item) | {"start": start, "stop": stop} for item, start, stop in spans]


def namespace_facts(namespace: Namespace) -> Mapping[str, str | None]:
    """A namespace in JSON."""
    return namespace._asdict()


def number(value: float) -> int | float:
    """A position or delta in JSON: whole ones are ints."""
    return int(value) if value == int(value) else float(value)
