"""What a store is made of, by counting what a survey found."""

from __future__ import annotations

import os
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.base import Progress
from sessiontree.backends.frames import HEAD
from sessiontree.fsck.report import Examined, plain
from sessiontree.fsck.survey import NONE, ROOT, Survey, surveyed


@attrs.frozen
class SessionStats:
    """One session. ``nodes``, ``tokens``, ``bytes``: its own, without the path that a fork shares; ``depth``: of its deepest node.

    ``fork_of``: the session it was forked from.
    """

    session_id: str
    nodes: int
    leaves: int
    tokens: int
    bytes: int
    depth: int
    heads: int
    fork_of: str | None


@attrs.frozen
class Stats:
    """A store by numbers. Bytes add up to those of its files.

    ``bytes``: by kind of record, ``session``, ``node``, ``head``, ``opening``, ``alias``, ``pin``, ``drop``, ``annotation``,
    ``later`` (of a later version); ``framing``, what holds them together, damage included; ``free``, allocated ahead or torn;
    ``sidecars``; ``left``, what compaction has left behind for those who read it still; ``features``. Of the bytes of records and
    features: ``live``, nodes that a head, a pin or a fork is at or behind, what was said of them last, the sessions, and the last
    word on heads, pins, openings and aliases; ``loose``, the same of nodes that are kept by being there alone, which
    ``gc(recent=0)`` would drop; ``dead``, what ``gc()`` gives back: what was dropped, what was said once and does not count any
    more, and features that no node names.

    ``nodes`` to ``annotations`` count what sessions show, or forks share; the last of these, names that are said of nodes.
    ``tokens``: stored. ``path_tokens``: what all paths have, from the root to each leaf, one by one; ``dedupe_ratio``: how many
    times as much as is stored. ``fan_out``: children of a node or root that has any. A node below which only a fork goes on is a
    leaf.
    """

    path: str
    bytes: dict[str, int]
    live: int
    loose: int
    dead: int
    nodes: int
    leaves: int
    tokens: int
    path_tokens: int
    dedupe_ratio: float
    depth_max: int
    depth_mean: float
    fan_out_max: int
    fan_out_mean: float
    sessions: tuple[SessionStats, ...]
    annotations: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        made: dict[str, Any] = plain(self)
        return made


_KINDS = {
    codec.SESSION: "session",
    codec.NODE: "node",
    codec.HEAD: "head",
    codec.OPENED: "opening",
    codec.ALIAS: "alias",
    codec.PIN: "pin",
    codec.DROP: "drop",
    codec.ANNOTATION: "annotation",
}


def stats(path: str | os.PathLike[str], *, progress: Progress | None = None, processes: int | None = None) -> Stats:
    """Count what is sound in a store, which is read from end to end. As :func:`fsck`."""
    return counted(surveyed(path, progress, processes))


def counted(survey: Survey) -> Stats:
    """What a survey amounts to."""
    rows, examined = survey.rows, Examined(survey)
    kinds, parents, depths = rows["kind"], survey.parents, survey.depths()
    starts, stops = survey.starts, survey.stops
    sizes = rows["length"].astype(np.int64) + HEAD.size
    sizes[list(survey.gone)] = 0
    sound = (kinds == codec.NODE) & (parents != NONE) & ~survey.aside
    sound[list(examined.lost)] = False
    forked = _behind(survey, sound, _tips(examined))
    sound &= forked | ~_hidden(examined, sound)
    reached = forked | _behind(survey, sound, _held_places(examined))

    by_kind = {name: int(sizes[kinds == kind].sum()) for kind, name in _KINDS.items()}
    by_kind["later"] = int(sizes.sum()) - sum(by_kind.values())
    by_kind["free"] = survey.free
    by_kind["framing"] = sum(survey.sizes.values()) - int(sizes.sum()) - survey.free
    by_kind["sidecars"] = survey.sidecar_bytes
    by_kind["left"] = survey.left_bytes
    by_kind["features"] = sum(size for _, size in survey.feature_files)

    dropped = examined.dropped
    last = [held.row for held in survey.sessions.values()]
    last += [move.number for (of, _), move in survey.heads.items() if move.ordinal is not None and of not in dropped]
    last += [number for (of, _), (number, _, pinned) in survey.pins.items() if pinned and of not in dropped]
    last += [number for number, identity in survey.aliases.values() if identity is not None]
    last += sorted(survey.openings.values())[-1:]
    named = sum(size for name, size in survey.feature_files if os.path.basename(name) in survey.contents)
    there = _said_there(examined, sound)
    of_reached = [number for number, at in there if at == ROOT or reached[at]]
    of_loose = [number for number, at in there if at >= 0 and not reached[at]]
    live = int(sizes[reached].sum() + sizes[last].sum() + sizes[of_reached].sum()) + named
    loose = int(sizes[sound & ~reached].sum() + sizes[of_loose].sum())

    own = np.flatnonzero(sound)
    # Of each node the session it is in, as an index into those that are there; of a root, the same with -1 for a parent.
    shown = [held for number, held in survey.sessions.items() if number not in dropped]
    of_forks = set(np.unique(rows["session"][own]).tolist()) & dropped  # what is left of them is there for forks
    shown += [survey.sessions[number] for number in sorted(of_forks)]
    known = {held.number: at for at, held in enumerate(shown)}
    session = np.array([known[number] for number in rows["session"][own].tolist()], np.int64)
    above = parents[own]
    inside = above >= 0
    inside[inside] = rows["session"][above[inside]] == rows["session"][own[inside]]
    is_leaf = sound.copy()
    is_leaf[above[inside]] = False
    leaf = is_leaf[own]
    _, children = np.unique(np.stack([np.where(above == ROOT, -1 - session, above)]), return_counts=True)

    def summed(values: Any) -> list[int]:
        return np.bincount(session, values, len(known)).astype(np.int64).tolist() if len(known) else []

    deepest = np.zeros(len(known), np.int64)
    np.maximum.at(deepest, session, depths[own])
    tokens = stops[own] - starts[own]
    heads = [0] * len(known)
    for (number, _), move in survey.heads.items():
        if number in known:
            heads[known[number]] += move.ordinal is not None
    columns: tuple[list[Any], ...] = (
        [held.record.session_id for held in shown],
        *map(summed, (np.ones(len(own)), leaf, tokens, sizes[own])),
        deepest.tolist(),
        heads,
        [survey.source_of(held) for held in shown],
    )
    path_tokens = int(stops[own][leaf].sum())
    return Stats(
        path=survey.path,
        bytes=by_kind,
        live=live,
        loose=loose,
        dead=int(sizes.sum()) + by_kind["features"] - live - loose,
        nodes=len(own),
        leaves=int(leaf.sum()),
        tokens=int(tokens.sum()),
        path_tokens=path_tokens,
        dedupe_ratio=path_tokens / max(int(tokens.sum()), 1) if path_tokens else 1.0,
        depth_max=int(depths[own].max(initial=0)),
        depth_mean=float(depths[own].mean()) if len(own) else 0.0,
        fan_out_max=int(children.max(initial=0)),
        fan_out_mean=float(children.mean()) if len(children) else 0.0,
        annotations=len(there),
        sessions=tuple(SessionStats(*of_it) for of_it in zip(*columns, strict=True)),
    )


def _said_there(examined: Examined, sound: NDArray[np.bool]) -> list[tuple[int, int]]:
    """The last words of annotations, and the nodes they are of, which are there; ROOT of a session that is."""
    survey = examined.survey
    found = []
    for (session, ordinal, _), said in survey.said.items():
        if session in survey.sessions and examined.misplaced(session, ordinal, said) is None:
            at = survey.find(session, ordinal)
            if sound[at] if at >= 0 else session not in examined.dropped:
                found.append((said.number, at))
    return found


def _tips(examined: Examined) -> list[int]:
    """The nodes that sessions were forked from, which are there."""
    return [held.tip for number, held in examined.survey.sessions.items() if number not in examined.dropped]


def _held_places(examined: Examined) -> list[int]:
    """The nodes that heads and pins are at."""
    survey = examined.survey
    places = [(of, ordinal) for (of, _), (_, ordinal, _) in survey.heads.items() if ordinal is not None]
    places += [(of, ordinal) for (of, _), (_, ordinal, pinned) in survey.pins.items() if pinned]
    return [survey.find(of, ordinal) for of, ordinal in places if of not in examined.dropped]


def _behind(survey: Survey, sound: NDArray[np.bool], nodes: list[int]) -> NDArray[np.bool]:
    """Which sound nodes are among some, or on their paths."""
    behind = np.zeros(len(sound), np.bool)
    for node in nodes:
        at = node
        while at >= 0 and sound[at] and not behind[at]:
            behind[at] = True
            at = int(survey.parents[at])
    return behind


def _hidden(examined: Examined, sound: NDArray[np.bool]) -> NDArray[np.bool]:
    """Which sound nodes their own session does not show."""
    survey = examined.survey
    hidden = np.zeros(len(sound), np.bool)
    for session, ordinals in survey.drops.items():
        numbers = survey.numbers_of(session)
        if 0 in ordinals:
            hidden[numbers] = True
            continue
        hidden[numbers] = np.isin(survey.rows["ordinal"][numbers], list(ordinals))
        for number in numbers.tolist():  # parents come before their children
            above = int(survey.parents[number])
            if above >= 0 and hidden[above] and survey.rows["session"][above] == session:
                hidden[number] = True
    return hidden & sound
