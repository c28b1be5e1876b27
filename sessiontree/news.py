"""What of a session's change is told: events made of the trees before and after it. See :mod:`sessiontree.events`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessiontree.digest import ID_BYTES
from sessiontree.draft import Draft
from sessiontree.errors import SessionTreeError
from sessiontree.events import Batch, Event, Fields, Kind, lost
from sessiontree.heads import Dropped, Head
from sessiontree.index import NodeIndex
from sessiontree.node import Node
from sessiontree.query import lowest_common_ancestor
from sessiontree.stored import StoredHead, StoredIndex
from sessiontree.tree import SessionTree

_logger = logging.getLogger(__name__)

Drafts = Callable[[], Iterable[Draft]]


def changed(
    session_id: str, incarnation: int, before: SessionTree, after: SessionTree, wanted: frozenset[str], drafts: Drafts
) -> Batch:
    """What ``after`` has that ``before`` had not: nodes, a parent before its children; then heads; then branches that ended by it.

    ``drafts``: gives those that are open. Nodes that are gone are not among it.
    """
    events: list[Fields] = []
    if "node_committed" in wanted:
        nodes = after._index.nodes_from(before._count, after._count)
        events += [committed(session_id, incarnation, node) for node in nodes]
    events += _moved(session_id, incarnation, before, after, wanted, drafts)
    return tuple(events)


def followed(
    session_id: str, incarnation: int, before: SessionTree, after: SessionTree, wanted: frozenset[str], drafts: Drafts
) -> Batch:
    """The same of what another process wrote, and what it dropped: two looks at what lies in a store. New nodes are read."""
    old, new = before._index.bottom, after._index.bottom
    assert isinstance(old, StoredIndex) and isinstance(new, StoredIndex)
    made, gone = new.source.differing(old.source)
    events: list[Fields] = []
    events += _made(session_id, incarnation, new, made if "node_committed" in wanted else ())
    events += _moved(session_id, incarnation, before, after, wanted, drafts)
    return tuple(events) + dropped(session_id, incarnation, map(old.source.id_of, gone), wanted)


def looked_anew(
    session_id: str, incarnation: int, before: SessionTree, after: SessionTree, wanted: frozenset[str], drafts: Drafts
) -> Batch:
    """The same where many write, and this process may have written since it looked. What was dropped may have been made again."""
    events: list[Fields] = []
    if wanted & {"node_committed", "nodes_dropped"}:
        made, gone = _differing(before, after)
        events += dropped(session_id, incarnation, gone, wanted)
        events += _made(session_id, incarnation, after._index.bottom, made if "node_committed" in wanted else ())
    events += _moved(session_id, incarnation, before, after, wanted, drafts)
    return tuple(events)


def _differing(before: SessionTree, after: SessionTree) -> tuple[Sequence[int], Sequence[bytes]]:
    """Ordinals of nodes that ``after``, which lies in a store, shows and ``before`` did not; ids of those that are gone.

    Of those that lie below each other, the topmost.
    """
    stored = after._index.bottom
    assert isinstance(stored, StoredIndex)
    count = max(before._count, after._count)
    old, new = _ids(before, count), _ids(after, count)
    other = (old != new).any(axis=1)
    other[: stored.source.first] = False  # the path that it is forked from
    made, gone = np.flatnonzero(other & new.any(axis=1)), np.flatnonzero(other & old.any(axis=1))
    ids = {ordinal: old[ordinal].tobytes() for ordinal in gone.tolist()}
    every = set(ids.values())
    return made.tolist(), [node_id for ordinal, node_id in ids.items() if _parent_of(before, ordinal, old) not in every]


def _ids(tree: SessionTree, count: int) -> NDArray[np.uint8]:
    """Ids by ordinal: (count, 32); zeros where there is none, or it is on the path that a stored fork shares."""
    ids = np.zeros((count, ID_BYTES), np.uint8)
    for index, visible in tree._index.layers_upward(tree._count):
        if isinstance(index, StoredIndex):
            ids[index.source.first : visible] = index.source.ids()[: visible - index.source.first]
        elif visible > index.base_count:
            joined = b"".join([node.id for node in index.nodes[: visible - index.base_count]])
            ids[index.base_count : visible] = np.frombuffer(joined, np.uint8).reshape(-1, ID_BYTES)
    return ids


def _parent_of(tree: SessionTree, ordinal: int, ids: NDArray[np.uint8]) -> bytes | None:
    """The id of a node's parent, without reading either."""
    layers = tree._index.layers_upward(tree._count)
    index = next(index for index, visible in reversed(layers) if index.base_count <= ordinal < visible)
    if isinstance(index, StoredIndex):
        return bytes(ids[index.source.parent_of(ordinal)])
    parent = index.nodes[ordinal - index.base_count].parent
    return None if parent is None else parent.id


def _made(session_id: str, incarnation: int, stored: NodeIndex, made: Iterable[int]) -> Iterator[Fields]:
    """That nodes are visible which were made elsewhere, and are read for it."""
    for ordinal in made:
        try:
            yield committed(session_id, incarnation, stored.nodes[ordinal - stored.base_count])
        except SessionTreeError as error:  # nobody is to fail for a listener's sake
            _logger.warning("session %r: a new node cannot be told of: %s", session_id, error)
            yield lost(1)


def committed(session_id: str, incarnation: int, node: Node, _kind: Kind = "node_committed") -> Fields:
    """That a node is visible."""
    parent = node.parent
    assert parent is not None
    return (
        _kind,
        session_id,
        incarnation,
        node.id,
        parent.id,
        node._up[3],
        node.start,
        node.stop,
        node.origin,
        None,
        None,
        None,
        None,
    )


def opened(session_id: str, incarnation: int, tree: SessionTree, wanted: frozenset[str], *, again: bool) -> Batch:
    """That a session is open. ``again``: it was before, and nothing is told of what it has; of a fork, what its path has not."""
    lowest = tree._index.bottom
    tip = lowest.root if lowest.tip is None else lowest.tip
    count = len(tree) if again else tip.depth + 1
    events: list[Fields] = []
    if "session_opened" in wanted:
        events.append(Event("session_opened", session_id, incarnation, tip.id, depth=tip.depth, count=count))
    if not again and "node_committed" in wanted:
        events += [committed(session_id, incarnation, node) for node in tree._index.nodes_from(count, tree._count)]
    return tuple(events)


def closed(session_id: str, incarnation: int, wanted: frozenset[str], *, expired: bool = False) -> Batch:
    """That an incarnation has ended."""
    kinds: Any = ("expired", "session_closed") if expired else ("session_closed",)
    return tuple([Event(kind, session_id, incarnation) for kind in kinds if kind in wanted])


def dropped(session_id: str, incarnation: int, node_ids: Iterable[bytes], wanted: frozenset[str]) -> Batch:
    """That nodes, and all below them, are forgotten."""
    if "nodes_dropped" not in wanted:
        return ()
    return tuple([Event("nodes_dropped", session_id, incarnation, node_id) for node_id in node_ids])


def ended(
    session_id: str, incarnation: int, tree: SessionTree, left: Iterable[Head | StoredHead | Draft], drafts: Drafts
) -> list[Fields]:
    """The topmost node of each branch that is done since heads or drafts left it. O(heads and drafts × log depth) each.

    ``left``: a head as it was, or a draft that is not open any more.
    """
    if not tree._moves:  # heads say nothing here, see Session.branch_done
        return []
    found: dict[bytes, Node] = {}
    try:
        held = [*(head.node for head in tree._heads.values()), *(draft.parent for draft in drafts())]
        for holder in left:
            tip = holder.parent if isinstance(holder, Draft) else holder.node
            meeting = [lowest_common_ancestor(tip, other) for other in held]
            depth = max((node.depth for node in meeting if node is not None), default=-1)
            if depth < tip.depth:
                top = tip.ancestor(depth + 1)
                found[top.id] = top
    except SessionTreeError as error:  # a head whose node cannot be read
        _logger.warning("session %r: nobody can say which branches ended: %s", session_id, error)
    return [Event("branch_ended", session_id, incarnation, node.id, depth=node.depth) for node in found.values()]


def _moved(
    session_id: str, incarnation: int, before: SessionTree, after: SessionTree, wanted: frozenset[str], drafts: Drafts
) -> list[Fields]:
    """Of heads that are elsewhere, and of the branches that they have left."""
    if after._heads is before._heads:
        return []
    moved = after._moves_since(before)
    events: list[Fields] = []
    for name, head in moved if "head_moved" in wanted else ():
        node_id = None if isinstance(head, Dropped) else _id_of(head)
        events.append(Event("head_moved", session_id, incarnation, node_id, head=name, version=head.version))
    if "branch_ended" in wanted:
        left = [before._heads[name] for name, _ in moved if name in before._heads]
        events += ended(session_id, incarnation, after, left, drafts)
    return events


def _id_of(head: Head | StoredHead) -> bytes:
    """Of the node that a head is at, which is not read for it."""
    if isinstance(head, Head):
        return head.node.id
    return head.nodes.id_of(head.ordinal)
