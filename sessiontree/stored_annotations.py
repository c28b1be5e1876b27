"""Annotations that lie in a store: those of a session, over those of the sessions that it was forked from."""

from __future__ import annotations

from collections.abc import Sequence

from sessiontree.annotations import Annotation
from sessiontree.errors import CorruptTree, UnknownNode
from sessiontree.node import Node, is_on_path
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
        wanted = list(zip(nodes, found, strict=True))
        for index in reversed(indexes):  # what a fork says itself comes first, and counts
            if index.source.annotated:
                _read_own(index, wanted, name)
            if (tip := index.tip) is not None:
                wanted = [(node, values) for node, values in wanted if is_on_path(node, tip)]
        return found


def _read_own(index: StoredIndex, wanted: Sequence[tuple[Node, dict[str, Annotation]]], name: str | None) -> None:
    """Add what one session says of nodes to what is known of them."""
    at: dict[int, list[tuple[Node, dict[str, Annotation]]]] = {}  # one may be asked for more than once
    for each in wanted:
        if (ordinal := index.ordinal_of(each[0])) is not None:
            at.setdefault(ordinal, []).append(each)
    own: dict[int, dict[str, Annotation]] = {}
    for record in index.source.annotations(list(at), name):
        node = at[record.ordinal][0][0]
        if node.id != record.node_id:
            said = f"annotation {record.name!r} of node {record.ordinal} of session {record.session} is of another node"
            if index.source.shared:
                raise UnknownNode(f"{said}: that one was dropped and removed elsewhere", node_id=node.id)
            raise CorruptTree(said, session=record.session)
        own.setdefault(record.ordinal, {})[record.name] = record.value  # of several, the last
    for ordinal, said_here in own.items():
        for _, values in at[ordinal]:
            for named, value in said_here.items():
                values.setdefault(named, value)
