"""What of a session's change is told: events made of the trees before and after it. See :mod:`sessiontree.events`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from sessiontree.draft import Draft
from sessiontree.errors import SessionTreeError
from sessiontree.events import Batch, Event, Fields, Kind, lost
from sessiontree.heads import Dropped, Head
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
    for ordinal in made if "node_committed" in wanted else ():
        try:
            events.append(committed(session_id, incarnation, new.node(ordinal)))
        except SessionTreeError as error:  # nobody is to fail for a listener's sake
            _logger.warning("session %r: a new node cannot be told of: %s", session_id, error)
            events.append(lost(1))
    events += _moved(session_id, incarnation, before, after, wanted, drafts)
    return tuple(events) + dropped(session_id, incarnation, map(old.source.id_of, gone), wanted)


def looked_anew(
    session_id: str, incarnation: int, before: SessionTree, after: SessionTree, wanted: frozenset[str], drafts: Drafts
) -> Batch:
    """As :func:`changed`, of what others wrote where many do. New nodes are read; what was dropped is told of by others."""
    events: list[Fields] = []
    if "node_committed" in wanted:
        try:
            for node in after._index.nodes_from(before._count, after._count):
                events.append(committed(session_id, incarnation, node))
        except SessionTreeError as error:  # nobody is to fail for a listener's sake
            _logger.warning("session %r: new nodes cannot be told of: %s", session_id, error)
            events.append(lost(1))
    events += _moved(session_id, incarnation, before, after, wanted, drafts)
    return tuple(events)


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
