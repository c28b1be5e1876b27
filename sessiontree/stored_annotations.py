"""Annotations that lie in a store: those of a session, over those of the sessions that it was forked from."""

from __future__ import annotations

from collections.abc import Sequence

from sessiontree.annotation_log import on_path
from sessiontree.annotations import Annotation
from sessiontree.errors import CorruptTree, UnknownNode
from sessiontree.node import Node
from sessiontree.stored import StoredIndex


class StoredAnnotations:
    """An :class:`~sessiontree.annotation_log.AnnotationSource`. ``indexes``: the nodes of each of those sessions, its own last.

    It reads from where these read their nodes, so that it holds no place that the log has left.
    """

    def __init__(self, indexes: Sequence[StoredIndex]) -> None:
        self._indexes = tuple(indexes)

    def named(self, name: str) -> dict[bytes, Annotation]:
        found: dict[bytes, Annotation] = {}
        *above, own = self._indexes
        if own.tip is not None:
            path = own.tip.path()
            found = {node.id: said[name] for node, said in zip(path, self._read(above, path, name), strict=True) if said}
        if own.source.annotated:
            for record in own.source.annotations(None, name):
                if own.source.has(record.ordinal):  # else it was dropped, and what is made again begins anew
                    found[record.node_id] = record.value
        return found

    def read(self, nodes: Sequence[Node], name: str | None) -> list[dict[str, Annotation]]:
        return self._read(self._indexes, nodes, name)

    @staticmethod
    def _read(indexes: Sequence[StoredIndex], nodes: Sequence[Node], name: str | None) -> list[dict[str, Annotation]]:
        found: list[dict[str, Annotation]] = [{} for _ in nodes]
        numbers = list(range(len(nodes)))
        asked = []
        for index in reversed(indexes):
            asked.append((index, numbers))
            if index.tip is not None:  # the sessions before it say something of its path, and of nothing that is made again
                numbers = [number for number in numbers if on_path(nodes[number], index.tip)]
        for index, numbers in reversed(asked):  # what a fork says itself comes last, and counts
            if not index.source.annotated:
                continue
            at: dict[int, list[int]] = {}  # a node may be asked for more than once
            for number in numbers:
                node = nodes[number]
                if (ordinal := index.ordinal_of(node)) is not None:
                    at.setdefault(ordinal, []).append(number)
            for record in index.source.annotations(list(at), name):
                number = at[record.ordinal][0]
                if nodes[number].id != record.node_id:
                    said = f"annotation {record.name!r} of node {record.ordinal} of session {record.session} is of another node"
                    if index.source.shared:
                        raise UnknownNode(f"{said}: that one was dropped and removed elsewhere", node_id=nodes[number].id)
                    raise CorruptTree(said, session=record.session)
                for number in at[record.ordinal]:
                    found[number][record.name] = record.value
        return found
