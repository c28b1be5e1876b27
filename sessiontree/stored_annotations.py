"""Annotations that lie in a store: those of a session, over those of the sessions that it was forked from."""

from __future__ import annotations

from collections.abc import Sequence

from sessiontree.annotations import Annotation
from sessiontree.errors import CorruptTree, UnknownNode
from sessiontree.node import Node, is_on_path
from sessiontree.stored import StoredIndex


class StoredAnnotations:
    """An :class:`~sessiontree.annotation_log.AnnotationSource`. ``indexes``: the nodes of each of those sessions, its own last;
    ``tips``: of each, if it is a fork, the ordinal of the node that it goes on from, in the session before it.

    It reads from where these read their nodes, so that it holds no place that the log has left.
    """

    def __init__(self, indexes: Sequence[StoredIndex], tips: Sequence[int | None]) -> None:
        self._layers = tuple(zip(indexes, tips, strict=True))

    def named(self, name: str) -> dict[bytes, Annotation]:
        found: dict[bytes, Annotation] = {}
        *above, (own, last) = self._layers
        if own.tip is not None:
            path = own.tip.path()
            found = {node.id: said[name] for node, said in zip(path, self._read(above, path, name, last), strict=True) if said}
        if own.source.annotated:
            for record in own.source.annotations(None, name):
                if own.source.has(record.ordinal):  # else it was dropped, and what is made again begins anew
                    found[record.node_id] = record.value
        return found

    def read(self, nodes: Sequence[Node], name: str | None) -> list[dict[str, Annotation]]:
        return self._read(self._layers, nodes, name)

    @staticmethod
    def _read(
        layers: Sequence[tuple[StoredIndex, int | None]], nodes: Sequence[Node], name: str | None, below: int | None = None
    ) -> list[dict[str, Annotation]]:
        """``below``: the ordinal of a node whose path they are all on, if they are."""
        found: list[dict[str, Annotation]] = [{} for _ in nodes]
        wanted = list(zip(nodes, found, strict=True))
        for index, last in reversed(layers):  # what a fork says itself comes first, and counts
            if index.source.annotated:
                _read_own(index, wanted, name, below)
            below = last
            if (tip := index.tip) is not None:
                wanted = [(node, values) for node, values in wanted if is_on_path(node, tip)]
        return found


def _read_own(
    index: StoredIndex, wanted: Sequence[tuple[Node, dict[str, Annotation]]], name: str | None, below: int | None
) -> None:
    """Add what one session says of nodes to what is known of them. ``below``: as above."""
    at: dict[int, list[tuple[Node, dict[str, Annotation]]]] = {}  # one may be asked for more than once
    for each in wanted:
        if (ordinal := index.ordinal_of(each[0], below)) is not None:
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
