"""Nodes and trees through pickle, for workers and data loaders of one machine.

What goes over is flat: one record a node in commit order, its parent by number, so a path of any depth takes no recursion.
Positions go as they are stored, so no rule is applied again. Ids are computed again and compared, so no content comes back
damaged; positions, metadata, links, annotations and heads are no part of ids and are taken as they come. Features, and what a
session adds to a tree (its lock, its drafts, its store), stay behind; annotations go with a tree, not with a node. Several nodes of
one tree are best sent as the tree and their ids: each node brings the whole of its path.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sessiontree.annotations import Annotation
from sessiontree.details import NO_DETAILS, Details
from sessiontree.digest import content_prefix, node_id
from sessiontree.edits import has_table
from sessiontree.errors import CorruptTree
from sessiontree.frozen import freeze_metadata
from sessiontree.heads import Head
from sessiontree.index import Limits
from sessiontree.media import MediaItem
from sessiontree.node import Lineage, Namespace, Node, Origin, TurnPositions
from sessiontree.positions import PositionScheme, PositionState
from sessiontree.positions.runs import Runs
from sessiontree.tokens import TOKEN_BYTES, PathCache
from sessiontree.tree import DEFAULT_PATH_CACHE_BYTES, SessionTree, new_tree
from sessiontree.turns import Turn


class _Record(NamedTuple):
    """A node. ``parent``: the number of its record, of the root: -1. ``external``: its positions are part of its id."""

    id: bytes
    parent: int
    data: bytes
    media: tuple[MediaItem, ...]
    origin: Origin
    role: str
    key: str | None
    runs: Runs
    state: PositionState
    replayed: TurnPositions | None
    details: Details
    external: bool


_Constants = tuple[PositionScheme, Namespace, str, Limits]


def _records(nodes: Iterable[Node]) -> list[_Record]:
    """Records of nodes below one root, which comes first and has none."""
    numbers: dict[bytes, int] = {}
    records = []
    for number, node in enumerate(nodes, -1):
        numbers[node.id] = number
        if node.parent is None:
            continue
        data = node._extent.read_bytes(node.start, node.stop)
        content = (data, node.media, node.origin, str(node.role), node.key)
        details = node._details._replace(open_calls=NO_DETAILS.open_calls)  # they follow from the path
        placed = (node.runs, node.state, node.replayed, details, has_table(node))
        records.append(_Record(node.id, numbers[node.parent.id], *content, *placed))
    return records


def _constants(root: Node, limits: Limits) -> _Constants:
    return root.scheme, root.namespace, root.model_fingerprint, limits


def _rebuilt(constants: _Constants, root_id: bytes, records: Sequence[_Record]) -> tuple[SessionTree, list[Node]]:
    """The tree of some records and its nodes in their order, the root last.

    Raises CorruptTree where an id is not that of its content, or a record does not follow from those before it.
    """
    scheme, namespace, fingerprint, limits = constants
    tree = new_tree(Lineage(scheme, namespace, fingerprint), limits, PathCache(DEFAULT_PATH_CACHE_BYTES))
    nodes: list[Node] = []
    _check(tree.root.id, root_id)
    for record in records:
        if not -1 <= record.parent < len(nodes):
            raise CorruptTree(f"node {record.id[:4].hex()} has record {record.parent} as its parent, which is none before it")
        parent = nodes[record.parent] if record.parent >= 0 else tree.root
        if record.state.num_tokens != parent.stop + len(record.data) // TOKEN_BYTES:
            raise CorruptTree(
                f"node {record.id[:4].hex()} has a state of {record.state.num_tokens} tokens, which it does not end at"
            )
        table = (record.runs, record.state) if record.external else None
        head = content_prefix(record.origin, record.role, record.key, tuple(item.fields() for item in record.media), table)
        identity = node_id(parent.id, head, record.data)
        _check(identity, record.id)
        turn = Turn(identity, *record[2:10])
        # Arrays come out of a pickle writable.
        details = record.details._replace(metadata=freeze_metadata(record.details.metadata))
        tree, node = tree._attach(parent, turn, details, reserved=0)
        nodes.append(node)
    return tree, [*nodes, tree.root]


def _check(computed: bytes, stored: bytes) -> None:
    if computed != stored:
        raise CorruptTree(f"node {stored[:4].hex()} holds the content of {computed[:4].hex()}")


def _node(constants: _Constants, root_id: bytes, records: Sequence[_Record]) -> Node:
    return _rebuilt(constants, root_id, records)[1][len(records) - 1]


def _tree(
    constants: _Constants,
    root_id: bytes,
    records: Sequence[_Record],
    heads: dict[str, tuple[int, int, bool]],
    moves: int,
    said: dict[int, dict[str, Annotation]],
) -> SessionTree:
    tree, nodes = _rebuilt(constants, root_id, records)
    for number, values in said.items():
        if not -1 <= number < len(records):
            raise CorruptTree(f"something is said of record {number} of {len(records)}")
        tree = tree.annotate(nodes[number], values)
    for name, (number, _, _) in heads.items():
        if not -1 <= number < len(records):
            raise CorruptTree(f"head {name!r} is at record {number} of {len(records)}")
    named = {name: Head(nodes[number], version, uncertain) for name, (number, version, uncertain) in heads.items()}
    return tree._with_heads(named, moves)


def _reduce_node(node: Node) -> tuple[Any, ...]:
    path = node.path()
    return _node, (_constants(path[0], Limits()), path[0].id, _records(path))


def _reduce_tree(tree: SessionTree) -> tuple[Any, ...]:
    nodes = list(tree)
    numbers = {node.id: number for number, node in enumerate(nodes, -1)}
    heads = {name: (numbers[head.node.id], head.version, head.uncertain) for name, head in tree._heads.items()}
    said = {number: values for number, values in enumerate(tree._read_said(nodes, None), -1) if values}
    return _tree, (_constants(tree.root, tree.limits), tree.root.id, _records(nodes), heads, tree._moves, said)


copyreg.pickle(Node, _reduce_node)
copyreg.pickle(SessionTree, _reduce_tree)
