"""All that is said in a tree, node by node in commit order: for whoever writes it elsewhere, or compares it.

Nodes of which nothing is said are not read for it, but those of the path that a fork shares; a few are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import numpy as np

from sessiontree.annotations import Annotation, same
from sessiontree.errors import CorruptTree
from sessiontree.node import Node
from sessiontree.stored import StoredIndex
from sessiontree.tree import SessionTree

_TOGETHER: Final = 256  # nodes that are read together

T = TypeVar("T")
Numbered = tuple[int, Node]  # its ordinal, and a node
Annotated = tuple[int, Node, dict[str, Annotation]]


def annotated(
    tree: SessionTree, above: Sequence[SessionTree] = (), *, alone: bool = False, unread: list[bytes] | None = None
) -> Iterator[Annotated]:
    """(ordinal, node, what is said of it) of each node of which something is, without what it has as a prefix of another.

    ``above``: of a fork, the trees that it shares its path with, the nearest first: what these say of that path counts where the
    fork itself says nothing by that name, also where they said it later. ``alone``: only what they do not say too. ``unread``:
    takes the ids of nodes whose annotations cannot be read; None: that raises CorruptTree.
    """
    if all(each._log is None for each in (tree, *above)):
        return
    tip = tree._index.bottom.tip
    for path in _few(() if tip is None else tip.path()):
        yield from _said(tree, above, [(node.depth, node) for node in path], alone, unread)
    for nodes in _own_nodes(tree) if tree._log is not None else ():
        yield from _said(tree, (), nodes, False, unread)


def _said(
    tree: SessionTree, above: Sequence[SessionTree], nodes: list[Numbered], alone: bool, unread: list[bytes] | None
) -> Iterator[Annotated]:
    theirs: list[dict[str, Annotation]] = [{} for _ in nodes]
    try:
        for other in reversed(above):
            for known, more in zip(theirs, other._read_said([node for _, node in nodes], None), strict=True):
                known.update(more)
        mine = tree._read_said([node for _, node in nodes], None)
    except CorruptTree:
        if unread is None:
            raise
        if len(nodes) > 1:
            for each in nodes:
                yield from _said(tree, above, [each], alone, unread)
        else:
            unread.append(nodes[0][1].id)
        return
    for (ordinal, node), own, others in zip(nodes, mine, theirs, strict=True):
        values = others | own
        if alone:
            values = {name: value for name, value in own.items() if not same(value, others.get(name))}
        if values:
            yield ordinal, node, values


def _own_nodes(tree: SessionTree) -> Iterator[list[Numbered]]:
    """The nodes of a tree, without the path that a fork shares; of those in a store, those of which something may be said."""
    for index, visible in tree._index.layers_upward(tree._count):
        first = index.base_count
        if not isinstance(index, StoredIndex):
            yield from _few(enumerate(index.nodes[: visible - first], first))
            continue
        for ordinals in _few(_ordinals(tree, index, visible)):
            index.source.read_ahead([ordinal for ordinal in ordinals if ordinal])
            nodes = []
            for ordinal in ordinals:
                try:
                    nodes.append((ordinal, index.node(ordinal)))
                except CorruptTree:
                    if not index.source.lenient:
                        raise
            yield nodes


def _ordinals(tree: SessionTree, index: StoredIndex, visible: int) -> list[int]:
    """Of the nodes that lie in a store, those of which it says something, or somebody has since."""
    ids = () if tree._log is None else tree._log.node_ids(tree._said)
    since = [ordinal for node_id in ids if (ordinal := index.by_id.get(node_id)) is not None]
    every = np.union1d(index.source.annotated_ordinals(), np.array(since, np.int64))
    mine = every[(every >= index.base_count) & (every < visible)].tolist()
    return [ordinal for ordinal in mine if not ordinal or index.source.has(ordinal)]


def _few(all_of_them: Iterable[T]) -> Iterator[list[T]]:
    left = iter(all_of_them)
    while some := list(islice(left, _TOGETHER)):
        yield some
