"""Ids and numbers by token, as files of rollouts have them: lists, of all tokens of a turn or of those that were sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sessiontree.annotations import LOSS_MASK, TokenValues
from sessiontree.interchange.conversations import Turn
from sessiontree.interchange.losses import Losses
from sessiontree.interchange.source import expect
from sessiontree.tokens import MAX_TOKEN_ID

Mask = NDArray[np.bool_]


def checked_ids(value: Any, what: str, place: str, losses: Losses) -> NDArray[np.int32] | None:
    """(n,) token ids of a list; None where that is a fault."""
    if not expect(value, list, what, place, losses):
        return None
    if not set(map(type, value)) <= {int} or (value and not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID):
        losses.fault(f"{what} are to be whole numbers within 0..{MAX_TOKEN_ID}", place)
        return None
    return np.array(value, np.int32)


def numbers(value: Any, count: int) -> NDArray[np.float64] | None:
    """(count,) numbers of a list of that many; None where it is none."""
    if not isinstance(value, list) or len(value) != count or not set(map(type, value)) <= {int, float}:
        return None
    try:
        return np.array(value, np.float64)
    except OverflowError:
        return None


def over(values: NDArray[Any], mask: Mask) -> TokenValues:
    """What is said of those tokens of a turn that a mask names. ``values``: (m,), one for each; ``mask``: (tokens,)."""
    at = np.flatnonzero(mask)
    runs = np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) > 1) + 1)
    return TokenValues.from_fields(tuple((int(at[run[0]]), values[run]) for run in runs if len(run)))


def under(said: Any, mask: Mask) -> list[Any] | None:
    """What an annotation says of the tokens that a mask names, as a list; None where it does not speak of each."""
    try:
        values = said if isinstance(said, TokenValues) else TokenValues(said)
    except TypeError:
        return None
    window = values.read(0, len(mask))
    if not window.known[mask].all():
        return None
    listed: list[Any] = window.values[mask].tolist()
    return listed


def ids_of(turn: Turn) -> NDArray[np.int32]:
    """(n,) ids of a turn; none where all there is stands for pictures, since nobody made tokens of it."""
    if turn.token_ids is None:
        return np.empty(0, np.int32)
    ids = np.asarray(turn.token_ids, np.int32)
    return ids if not turn.media or ids.any() else ids[:0]


def trained_mask(turn: Turn, count: int, otherwise: bool) -> Mask:
    """(count,) which of its tokens are trained on: what is said of them, or else all or none."""
    said = under(turn.annotations[LOSS_MASK], np.ones(count, bool)) if LOSS_MASK in turn.annotations else None
    return np.full(count, otherwise) if said is None else np.array(said, bool)
