"""What is said of a node, as a line and in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessiontree.cli.output import plain, styled
from sessiontree.cli.shape import Shape
from sessiontree.cli.words import Words
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
    """A node in one line, as ``to_text`` draws it: id, role, tokens; what else there is; its heads; the beginning of its text."""
    generated = node.origin == "generated"
    line = styled("● " if generated else "○ ", fg="green" if generated else "cyan") + ", ".join(_facts(node))
    if marks.pinned(node.id):
        line += ", pinned"
    if heads := marks.heads(node.id):
        line += styled(f" ← {' '.join(map(_name, heads))}", fg="yellow", bold=True)
    if words is not None and len(node):
        line += "  " + styled(words.beginning(node, MAX_CHARACTERS), italic=True)
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


def span_facts(spans: Sequence[tuple[MediaItem, int, int]]) -> list[dict[str, Any]]:
    """(item, start, stop) in JSON, in path coordinates."""
    return [item_facts(item) | {"start": start, "stop": stop} for item, start, stop in spans]


def namespace_facts(namespace: Namespace) -> Mapping[str, str | None]:
    """A namespace in JSON."""
    return namespace._asdict()


def number(value: float) -> int | float:
    """A position or delta in JSON: whole ones are ints."""
    return int(value) if value == int(value) else float(value)
