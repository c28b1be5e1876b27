"""Turns: new content, checked and placed, before any tree holds it.

:func:`plan_turn` does all of an append that can fail: token ids, media, positions, identity. What it returns only needs to be
attached. A plan may continue from another plan, so several turns can be checked before the first of them becomes a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from sessiontree.details import NO_DETAILS, Details
from sessiontree.digest import content_prefix, node_id
from sessiontree.errors import PositionError
from sessiontree.frozen import checked_text
from sessiontree.media import MediaItem, in_token_order
from sessiontree.node import Node, Origin, TurnPositions
from sessiontree.positions import ExternalPositions, PositionScheme, PositionState
from sessiontree.positions.runs import Runs
from sessiontree.tokens import TOKEN_BYTES, Extent


class Turn(NamedTuple):
    """A turn ready to be a node: its id, token bytes, what it is, and its positions, as for a node."""

    id: bytes
    data: bytes
    media: tuple[MediaItem, ...]
    origin: Origin
    role: str
    key: str | None
    runs: Runs
    state: PositionState
    replayed: TurnPositions | None


def plan_turn(
    scheme: PositionScheme,
    parent: Node | Turn,
    data: bytes,
    media: Iterable[MediaItem] = (),
    origin: Origin = "input",
    role: str = "user",
    key: str | None = None,
    external: ExternalPositions | ArrayLike | None = None,
) -> Turn:
    """Check and place token bytes that follow ``parent``. ``external`` replaces the scheme's positions for this turn.

    Raises TypeError, MediaSpanError, PositionError, PositionLimitExceeded; changes nothing.
    """
    if type(role) is not str or not role.isascii():
        role = checked_text(role, "role")
    if key is not None and (type(key) is not str or not key.isascii()):
        key = checked_text(key, "key")
    before = parent.state
    otherwise = None if parent.replayed is None else parent.replayed.state  # where replaying leads to another state
    items: tuple[MediaItem, ...] = tuple(media)
    table: Any = None
    if external is not None:
        external = external if isinstance(external, ExternalPositions) else ExternalPositions(external)
        if external.max_position is not None and external.max_position < before.max_position:
            raise PositionError(
                f"max_position {external.max_position} is below the path's own, {before.max_position}",
                value=external.max_position,
                limit=before.max_position,
            )
        count = len(data) // TOKEN_BYTES
        placed = scheme.plan_table(before, count, external, items)
        replayed = None if otherwise is None else scheme.plan_table(otherwise, count, external, items)
        table = placed if data else None
    elif origin == "input":
        placed = scheme.plan(before, data, items)
        replayed = None if otherwise is None else scheme.plan(otherwise, data, items)
    else:
        placed = scheme.plan_decode(before, len(data) // TOKEN_BYTES)
        if otherwise is None and before[1] == before[2] + 1 and not (before[4] or placed[1][4]):
            replayed = None  # no family places plain text otherwise where it goes on right behind all there is
        else:
            replayed = scheme.plan(otherwise or before, data)
    runs, state = placed
    differs = None if replayed is None or replayed == placed else TurnPositions(*replayed)
    if items:
        items = in_token_order(items)
        head = content_prefix(origin, role, key, tuple([item.fields() for item in items]), table)
    else:
        head = content_prefix(origin, role, key, (), table)
    return _turn((node_id(parent.id, head, data), data, items, origin, role, key, runs, state, differs))


_turn = partial(tuple.__new__, Turn)  # as Turn(...), without a Python call


class Pending(NamedTuple):
    """A turn with what it carries outside its identity; ``extent``: where its tokens already are, None: nowhere yet."""

    turn: Turn
    details: Details = NO_DETAILS
    extent: Extent | None = None
