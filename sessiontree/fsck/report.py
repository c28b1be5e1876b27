"""What follows from a survey: what is damaged, what hangs on it, and what else does not fit, as a report."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.backends.base import Progress
from sessiontree.backends.frames import HEAD, NO_BASE, segment_path
from sessiontree.fsck.survey import ALIEN, NONE, Problem, Sidecar, Survey, surveyed


@attrs.frozen
class Finding:
    """Something that is worth knowing of a record or a file.

    ``path``: the file, below the store's directory; ``segment`` and ``offset``: where in the log. ``session_id``, ``node_id``: what
    it is about, as far as anything says so. ``dependents``: ids of the nodes that cannot be read because of it, each named once,
    under the nearest damage above it.
    """

    what: str
    path: str | None = None
    segment: int | None = None
    offset: int | None = None
    session_id: str | None = None
    node_id: bytes | None = None
    dependents: tuple[bytes, ...] = ()


@attrs.frozen
class Damage(Finding):
    """Bytes that are not what was written, or a record that cannot be what a store writes; what was there, if anything says so."""


@attrs.frozen
class Report:
    """What :func:`fsck` found.

    Faults, any of which makes ``ok`` false: ``damaged``; ``dangling``, records that name what is not there; ``wrong_ordinals``;
    ``cycles``, nodes and forks that do not come after what they rest on; ``misleading``, sidecars with a sound checksum and wrong
    entries. No faults: ``torn_bytes`` of a commit that never finished, which the next writer cuts; ``sidecars`` that are damaged,
    which readers pass over and the next writer makes again; ``unreachable``, what nothing needs any more (features that no node
    names, aliases of such media); ``strays``, files that are no part of a store; ``unknown_records`` of a later version.

    ``repeated``: records that are there twice, which an interrupted writer may leave.
    """

    path: str
    bytes: int
    records: int
    sessions: int
    nodes: int
    heads: int
    pins: int
    aliases: int
    features: int
    unknown_records: int
    repeated: int
    torn_bytes: int
    unreadable_bytes: int
    damaged: tuple[Damage, ...] = ()
    dangling: tuple[Finding, ...] = ()
    wrong_ordinals: tuple[Finding, ...] = ()
    cycles: tuple[Finding, ...] = ()
    misleading: tuple[Finding, ...] = ()
    sidecars: tuple[Finding, ...] = ()
    unreachable: tuple[Finding, ...] = ()
    strays: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was ever durable is there and can be read."""
        return not (self.damaged or self.dangling or self.wrong_ordinals or self.cycles or self.misleading)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; ids in hexadecimal."""
        return {"ok": self.ok, **plain(self)}


def plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value.hex() if isinstance(value, bytes) else value


# What hangs on what ---------------------------------------------------------------------------------------------------------

_Cause = tuple[int, int]  # the session and the ordinal of a node that is missing; the ordinal NONE: the session is


class Examined:
    """A survey, and what follows from it: which nodes are lost, for what reason, and what else does not fit."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self._children: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._orphans: defaultdict[_Cause, list[int]] = defaultdict(list)
        is_node = survey.rows["kind"] == codec.NODE
        #: Nodes that cannot be read, damaged themselves or behind what is.
        self.lost = {number for number in survey.bad if is_node[number]}
        for number in np.flatnonzero(is_node & (survey.parents == NONE) & ~survey.aside).tolist():
            if number not in self.lost:
                _, session, _, parent = survey.rows[number].item()[:4]
                self._orphans[self._cause(session, parent)].append(number)
        #: Sessions that were dropped; what stays of them is there for forks.
        self.dropped = {number for number, ordinals in survey.drops.items() if 0 in ordinals}
        self._explained: set[_Cause] = set()
        self._unexplained = False  # a stretch of damage that says nothing of what was there
        self.damaged = (*self._files(), *self._stretches(), *self._bad_records(), *self._bad_features())
        self.dangling = (
            *self._dangling_nodes(),
            *self._dangling_forks(),
            *self._dangling_heads(),
            *self._dangling_pins(),
            *self._of_no_session(),
        )

    def _cause(self, session: int, parent: int) -> _Cause:
        """What is missing where a node's parent is: that, or what its session rests on, as far up as anything is known."""
        survey = self.survey
        held = survey.sessions.get(session)
        if held is None or held.row in survey.bad or held.record.tip is None:
            return session, NONE if held is None or held.row in survey.bad else parent
        if held.first is not None and parent:
            return session, parent
        source, ordinal = held.record.tip
        return self._cause(source, ordinal if parent else 0)

    def _children_of(self, numbers: list[int]) -> list[int]:
        if self._children is None:
            order = np.argsort(self.survey.parents, kind="stable")
            self._children = self.survey.parents[order], order
        parents, order = self._children
        low, high = np.searchsorted(parents, numbers, "left"), np.searchsorted(parents, numbers, "right")
        return [child for first, last in zip(low, high, strict=True) for child in order[first:last].tolist()]

    def _below(self, left: list[int]) -> tuple[bytes, ...]:
        """The ids of some nodes, and of all below them, that were not lost before: they are now."""
        rows, found = self.survey.rows, []
        while left := [number for number in left if number not in self.lost and not self.survey.aside[number]]:
            self.lost.update(left)
            found += left
            here = zip(rows["session"][left].tolist(), rows["ordinal"][left].tolist(), strict=True)
            left = self._children_of(left)
            for cause in here:  # forks, of which nobody can say where they begin
                left += self._orphaned(cause)
        return tuple(dict.fromkeys(map(self.survey.id_of, sorted(found))))

    def _orphaned(self, cause: _Cause) -> list[int]:
        self._explained.add(cause)
        return self._orphans.get(cause, [])

    def _session_id(self, session: int) -> str | None:
        held = self.survey.sessions.get(session)
        return None if held is None else held.record.session_id

    def _named(self, kind: int, session: int, ordinal: int, identity: bytes = b"") -> str:
        """What a record is, or was."""
        name = self._session_id(session)
        whose = f"session {session}" if name is None else f"session {name!r}"
        heads = [name for of, name in self.survey.heads if of == session and codec.name_digest(name) == identity]
        return {
            codec.SESSION: f"the record of {whose}",
            codec.NODE: f"node {ordinal} of {whose}",
            codec.HEAD: f"a move of {f'head {heads[0]!r}' if heads else 'a head'} of {whose}",
            codec.OPENED: f"an opening of {whose}",
            codec.ALIAS: "an alias",
            codec.PIN: f"a pin in {whose}",
            codec.DROP: f"what was dropped of {whose}",
        }.get(kind, "a record of a later version")

    # damage

    def _files(self) -> Iterator[Damage]:
        """FORMAT and BASE."""
        instead = {
            "FORMAT": "what seeds the checksums was taken from the frames",
            "BASE": "the log is read from the first segment on that is there, and what was dropped may have come back",
        }
        for name, why in self.survey.files_damaged.items():
            yield Damage(f"{why}; {instead[name]}", name)

    def _stretches(self) -> Iterator[Damage]:
        """Damaged stretches of which nobody knows a record that was in them."""
        survey = self.survey
        known = sorted(
            (int(survey.rows["segment"][number]), int(survey.rows["offset"][number]))
            for number in survey.gone
            if number in survey.bad
        )
        for segment, start, stop, why in survey.stretches:
            if bisect_left(known, (segment, start)) == bisect_left(known, (segment, stop + HEAD.size)):
                self._unexplained |= stop - start >= HEAD.size
                yield Damage(f"{why} in {stop - start} bytes" if stop > start else why, _file_of(segment), segment, start)

    def _bad_records(self) -> Iterator[Damage]:
        survey = self.survey
        for number, why in sorted(survey.bad.items()):
            kind, session, ordinal, _, identity, _, segment, offset, _, _ = survey.rows[number].item()
            what = why
            if number in survey.gone:
                sure = "" if survey.gone[number] else ", as what is left of it says"
                what = f"{self._named(kind, session, ordinal, identity)}{sure}: {why}"
            where = what, _file_of(segment), segment, offset
            if kind == codec.NODE:
                aside = survey.aside[number]
                below = () if aside else self._below([*self._children_of([number]), *self._orphaned((session, ordinal))])
                yield Damage(*where, self._session_id(session), identity, below)
            elif kind == codec.SESSION:
                yield Damage(*where, self._session_id(session), None, self._below(self._orphaned((session, NONE))))
            else:
                yield Damage(*where, None if kind in (codec.ALIAS, ALIEN) else self._session_id(session))

    def _bad_features(self) -> Iterator[Damage]:
        for name, why in self.survey.features.items():
            if why is not None:
                yield Damage(why, self._below_store(name))

    def _below_store(self, name: str) -> str:
        return os.path.relpath(name, self.survey.path)

    # what names nothing

    def _dangling_nodes(self) -> Iterator[Finding]:
        """Nodes without a parent, or without a session, for which no damage was found."""
        for (session, ordinal), numbers in sorted(self._orphans.items()):
            if below := self._below(numbers):
                missing = self._named(codec.SESSION if ordinal == NONE else codec.NODE, session, ordinal)
                where = self._place(numbers[0])
                yield Finding(f"{missing} is missing", *where, self._session_id(session), self.survey.id_of(numbers[0]), below)

    def _dangling_forks(self) -> Iterator[Finding]:
        for held in self.survey.sessions.values():
            if held.record.tip is not None and held.row not in self.survey.bad and self._is_lost(held.tip):
                tip = self._named(codec.NODE, *held.record.tip)
                what = f"session {held.record.session_id!r} is a fork of {tip}, which {self._how(held.tip)}"
                yield Finding(what, *self._place(held.row), held.record.session_id, self._id_or_none(held.tip))

    def _dangling_heads(self) -> Iterator[Finding]:
        for (session, name), (number, ordinal, _) in self.survey.heads.items():
            held = self.survey.sessions.get(session)
            if held is None or ordinal is None or session in self.dropped:
                continue
            at = self.survey.find(session, ordinal)
            if self._is_lost(at):
                what = f"head {name!r} of session {held.record.session_id!r} is at node {ordinal}, which {self._how(at)}"
                yield Finding(what, *self._place(number), held.record.session_id, self._id_or_none(at))

    def _dangling_pins(self) -> Iterator[Finding]:
        for (session, identity), (number, ordinal, pinned) in self.survey.pins.items():
            held = self.survey.sessions.get(session)
            if held is None or not pinned or session in self.dropped:
                continue
            at = self.survey.find(session, ordinal)
            if self._is_lost(at) or (self.survey.id_of(at) if at >= 0 else held.record.root_id) != identity:
                how = self._how(at) if self._is_lost(at) else "is another"
                what = f"a pin of session {held.record.session_id!r} is at node {ordinal}, which {how}"
                yield Finding(what, *self._place(number), held.record.session_id, identity)

    def _of_no_session(self) -> Iterator[Finding]:
        """What else names a session that has no record."""
        known = {number: f"head {name!r}" for (_, name), (number, _, _) in self.survey.heads.items()}
        known |= {number: "a pin" for number, _, _ in self.survey.pins.values()}
        for number, what in sorted(known.items()):
            session = int(self.survey.rows["session"][number])
            if session not in self.survey.sessions and (session, NONE) not in self._explained:
                yield Finding(f"{what} of session {session}, which has no record", *self._place(number))

    def _is_lost(self, number: int) -> bool:
        return number == NONE or number in self.lost

    def _how(self, number: int) -> str:
        return "is missing" if number == NONE else "is damaged" if number in self.survey.bad else "rests on damage"

    def _id_or_none(self, number: int) -> bytes | None:
        return None if number < 0 else self.survey.id_of(number)

    def _place(self, number: int) -> tuple[str, int, int]:
        *_, segment, offset, _, _ = self.survey.rows[number].item()
        return _file_of(segment), segment, offset

    # the rest

    def report(self) -> Report:
        survey = self.survey
        there = ~survey.aside
        there[list(survey.gone)] = False
        kinds = Counter(survey.rows["kind"][there].tolist())
        heads = [of for (of, _), move in survey.heads.items() if move.ordinal is not None]
        pins = [of for (of, _), (_, _, pinned) in survey.pins.items() if pinned]
        return Report(
            path=survey.path,
            bytes=survey.total,
            records=len(survey.rows) - len(survey.gone),
            sessions=len(survey.sessions.keys() - self.dropped),
            nodes=kinds[codec.NODE],
            heads=sum(of not in self.dropped for of in heads),
            pins=sum(of not in self.dropped for of in pins),
            aliases=sum(identity is not None for _, identity in survey.aliases.values()),
            features=len(survey.features),
            unknown_records=survey.unknown,
            repeated=survey.repeated,
            torn_bytes=survey.torn,
            unreadable_bytes=survey.unreadable,
            damaged=self.damaged,
            dangling=self.dangling,
            wrong_ordinals=(*map(self._finding, survey.wrong_ordinals), *self._gaps(), *self._names()),
            cycles=tuple(map(self._finding, survey.cycles)),
            misleading=tuple(_of_sidecar(each) for each in survey.sidecars if each.misleads),
            sidecars=tuple(_of_sidecar(each) for each in survey.sidecars if not each.misleads),
            unreachable=tuple(self._unreachable()),
            strays=tuple(survey.strays()),
        )

    def _finding(self, problem: Problem) -> Finding:
        number = problem.number
        identity = self.survey.id_of(number) if self.survey.rows["kind"][number] == codec.NODE else None
        return Finding(problem.what, *self._place(number), self._session_id(problem.session), identity)

    def _gaps(self) -> Iterator[Finding]:
        """Ordinals that are skipped, with nothing to say why. Compaction leaves such gaps."""
        if self._unexplained or self.survey.base != NO_BASE:
            return
        for number, held in self.survey.sessions.items():
            if held.first is None:
                continue
            ordinals = self.survey.rows["ordinal"][self.survey.numbers_of(number)].astype(np.int64)
            before = np.concatenate([[held.first - 1], ordinals])[:-1]
            skips = ordinals > before + 1
            for last, following in zip(before[skips].tolist(), ordinals[skips].tolist(), strict=True):
                which = f"{last + 1} to {following - 1}" if following > last + 2 else f"{last + 1}"
                yield Finding(f"no node of session {held.record.session_id!r} is {which}", session_id=held.record.session_id)

    def _names(self) -> Iterator[Finding]:
        """Sessions of one name."""
        names: dict[str, int] = {}
        for number, held in self.survey.sessions.items():
            name = held.record.session_id
            if number not in self.dropped and names.setdefault(name, number) != number:
                yield Finding(f"{name!r} is the name of another session too", *self._place(held.row), name)

    def _unreachable(self) -> Iterator[Finding]:
        survey = self.survey
        for name, why in survey.features.items():
            if why is None and os.path.basename(name) not in survey.contents:
                yield Finding("features that no sound node names", self._below_store(name))
        for (_, alias), (number, identity) in survey.aliases.items():
            if identity is not None and identity not in survey.identities:
                yield Finding(f"alias {alias!r} of media that no sound node has", *self._place(number))


def _file_of(segment: int) -> str:
    return segment_path("segments", segment, "seg")


def _of_sidecar(sidecar: Sidecar) -> Finding:
    return Finding(sidecar.what, segment_path("segments", sidecar.segment, "idx"), sidecar.segment)


def fsck(path: str | os.PathLike[str], *, progress: Progress | None = None, processes: int | None = None) -> Report:
    """Check a store, and change nothing.

    ``progress``: called with bytes done and bytes in all. ``processes``: how many work on it; None: one for each core, up to four,
    where the store is large. Raises IncompatibleStore for what is no store, or one of a later format; StoreFailed where it cannot
    be read at all.
    """
    return Examined(surveyed(path, progress, processes)).report()
