"""What follows from a survey: what is damaged, what hangs on it, and what else does not fit, as a report."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from sessiontree import codec
from sessiontree.annotations import STANDARD_NAMES
from sessiontree.backends import blobs
from sessiontree.backends.base import Progress
from sessiontree.backends.frames import HEAD, NO_BASE, segment_path
from sessiontree.fsck.survey import ALIEN, NONE, Move, Problem, SaidOf, Sidecar, Survey, surveyed


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
    """Bytes that are not what was written, or a record that cannot be what a store writes; what was there, if anything says so.

    ``harmless``: nothing that the store shows is lost by it. ``named_by``: of features, ids of the nodes that name them, which can
    be read without.
    """

    harmless: bool = False
    named_by: tuple[bytes, ...] = ()


@attrs.frozen
class Report:
    """What :func:`fsck` found.

    Faults, any of which makes ``ok`` false: ``damaged``; ``dangling``, records that name what is not there; ``wrong_ordinals``;
    ``cycles``, nodes and forks that do not come after what they rest on; ``misleading``, sidecars with a sound checksum and wrong
    entries. No faults: ``torn_bytes`` of a commit that never finished, which the next writer cuts; ``sidecars`` that are damaged,
    which readers pass over and the next writer makes again; ``unreachable``, what nothing needs any more (features that no node
    names, aliases of such media); ``strays``, files that are no part of a store; ``unknown_records`` of a later version.

    ``annotations``: names that are said of nodes. ``repeated``: records that are there twice, which an interrupted writer may
    leave. ``unknown_bytes``: damage of which nobody can say what was there. ``older_heads``, (session, name): of which a later move
    is damaged; ``uncertain_heads``: of which there may have been one.
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
    unknown_bytes: int = 0
    annotations: int = 0
    damaged: tuple[Damage, ...] = ()
    dangling: tuple[Finding, ...] = ()
    wrong_ordinals: tuple[Finding, ...] = ()
    cycles: tuple[Finding, ...] = ()
    misleading: tuple[Finding, ...] = ()
    sidecars: tuple[Finding, ...] = ()
    unreachable: tuple[Finding, ...] = ()
    strays: tuple[str, ...] = ()
    older_heads: tuple[tuple[str | None, str | None], ...] = ()
    uncertain_heads: tuple[tuple[str | None, str | None], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was ever durable is there and can be read."""
        return not (self.damaged or self.dangling or self.wrong_ordinals or self.cycles or self.misleading)

    @property
    def lossless(self) -> bool:
        """Whether nothing that the store ever said is durable is lost, though it may not be ok."""
        others = self.dangling or self.wrong_ordinals or self.cycles
        return not others and all(damage.harmless for damage in self.damaged)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; ids in hexadecimal."""
        return {"ok": self.ok, "lossless": self.lossless, **plain(self)}


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
        self.lost: set[int] = {number for number in survey.bad if is_node[number]}
        for number in np.flatnonzero(is_node & (survey.parents == NONE) & ~survey.aside).tolist():
            if number not in self.lost:
                _, session, _, parent = survey.rows[number].item()[:4]
                self._orphans[self._cause(session, parent)].append(number)
        #: Sessions that were dropped; what stays of them is there for forks.
        self.dropped: set[int] = {number for number, ordinals in survey.drops.items() if 0 in ordinals}
        self._explained: set[_Cause] = set()
        self._gone_moves = {number: self._move_of(number) for number in survey.gone if survey.rows["kind"][number] == codec.HEAD}
        self.damaged: tuple[Damage, ...] = (*self._files(), *self._stretches(), *self._bad_records(), *self._bad_features())
        self.dangling: tuple[Finding, ...] = (
            *self._dangling_nodes(),
            *self._dangling_forks(),
            *self._dangling_heads(),
            *self._dangling_pins(),
            *self._dangling_annotations(),
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

    def _move_of(self, number: int) -> tuple[int, str | None, Move | None]:
        """Of a lost move of a head: its session, its name if that is known, the last move of it that is sound."""
        session, identity = int(self.survey.rows["session"][number]), self.survey.id_of(number)
        for (of, name), move in self.survey.heads.items():
            if of == session and codec.name_digest(name) == identity:
                return session, name, move
        return session, self.survey.names.get(number), None

    def session_id(self, session: int) -> str | None:
        """The id of a session, though its record be damaged; None where nobody can say."""
        held = self.survey.sessions.get(session)
        if held is not None:
            return held.record.session_id
        names = (name for number, name in self.survey.names.items() if self._is_record_of(number, session))
        return next(names, None)

    def _is_record_of(self, number: int, session: int) -> bool:
        kind, of, *_ = self.survey.rows[number].item()
        return bool(kind == codec.SESSION and of == session)

    def _named(self, kind: int, session: int, ordinal: int) -> str:
        """What a record is, or was."""
        whose = self._whose(session)
        return {
            codec.SESSION: f"the record of {whose}",
            codec.NODE: f"node {ordinal} of {whose}",
            codec.OPENED: f"an opening of {whose}",
            codec.ALIAS: "an alias",
            codec.PIN: f"a pin in {whose}",
            codec.DROP: f"what was dropped of {whose}",
            codec.ANNOTATION: f"an annotation of node {ordinal} of {whose}",
        }.get(kind, "a record of a later version")

    def _whose(self, session: int) -> str:
        name = self.session_id(session)
        return f"session {session}" if name is None else f"session {name!r}"

    def _moved(self, number: int) -> str:
        """What a lost move of a head was, and what follows."""
        session, name, last = self._gone_moves[number]
        what = "a head whose name is lost" if name is None else f"head {name!r}"
        if last is None:
            return f"{what} of {self._whose(session)}, of which nothing else tells"
        if last.number > number:
            return f"a move of {what} of {self._whose(session)}, which was moved again since"
        where = "is dropped" if last.ordinal is None else f"is at node {last.ordinal}"
        return f"the last move of {what} of {self._whose(session)}, which {where} by the one before"

    def _unsaid(self, number: int) -> str:
        """What a lost annotation was, and what follows."""
        name, last = self._lost_word(number)
        _, session, ordinal, *_ = self.survey.rows[number].item()
        what = f"{'an annotation' if name is None else f'annotation {name!r}'} of node {ordinal} of {self._whose(session)}"
        if last is None:
            return what
        return f"{what}, {'which was said anew since' if self._is_later(last, number) else 'which says what it did before'}"

    def _lost_word(self, number: int) -> tuple[str | None, SaidOf | None]:
        """Of a lost annotation: its name, if that is known, and what else is said of the same node by it."""
        _, session, ordinal, *_ = self.survey.rows[number].item()
        name = self.survey.names.get(number) or self._names_said.get(self.survey.id_of(number))
        return name, None if name is None else self.survey.said.get((session, ordinal, name))

    def _is_later(self, last: SaidOf, number: int) -> bool:
        return last.version > int(self.survey.rows["key"][number])

    @cached_property
    def _names_said(self) -> dict[bytes, str]:
        """Names of annotations, those that are used and those that are known, by their digests."""
        return {codec.name_digest(name): name for name in {*STANDARD_NAMES, *(name for _, _, name in self.survey.said)}}

    def lost_annotations(self) -> Iterator[tuple[int, bytes | None, str | None]]:
        """Session, node and name, as far as they are known, of annotations that are lost, or whose node is."""
        for number in sorted(self.survey.bad):
            kind, session, ordinal, *_ = self.survey.rows[number].item()
            if kind == codec.ANNOTATION and session not in self.dropped:
                name, last = self._lost_word(number)
                if last is None or not self._is_later(last, number):
                    yield session, self._id_or_none(self.survey.find(session, ordinal)), name
        for (session, ordinal, name), said in self.survey.said.items():
            if session not in self.dropped and self.misplaced(session, ordinal, said) is not None:
                yield session, said.node_id, name

    def misplaced(self, session: int, ordinal: int, said: SaidOf) -> str | None:
        """What is wrong with where an annotation stands; None: nothing."""
        survey = self.survey
        at = survey.find(session, ordinal)
        if self._is_lost(at):
            return self._how(at)
        held = survey.sessions[session]
        if (survey.id_of(at) if at >= 0 else held.record.root_id) != said.node_id:
            return "is another"
        count = int(survey.stops[at] - survey.starts[at]) if at >= 0 else 0
        return f"has {count} tokens, not {said.stop}" if said.stop > count else None

    def older_heads(self) -> Iterator[tuple[int, str]]:
        """Session and name of heads of which the last move is damaged, and one before it is not."""
        for number, (session, name, last) in self._last_gone_moves():
            if last is not None and name is not None and last.number < number and session not in self.dropped:
                yield session, name

    def lost_heads(self) -> Iterator[tuple[int, str | None]]:
        """Session and name, if that is known, of heads of which no move is sound."""
        for _, (session, name, last) in self._last_gone_moves():
            if last is None and session not in self.dropped:
                yield session, name

    def _last_gone_moves(self) -> Iterator[tuple[int, tuple[int, str | None, Move | None]]]:
        """The last lost move of each head that has one."""
        last = {(move[0], self.survey.id_of(number)): (number, move) for number, move in sorted(self._gone_moves.items())}
        yield from last.values()

    def lost_sessions(self) -> Iterator[tuple[int, str | None]]:
        """Number and id, if that is known, of sessions that cannot be read: their own records, or those they rest on, are lost."""
        survey = self.survey
        known = {number for number, held in survey.sessions.items() if held.rules is not None}
        of_sessions = np.isin(survey.rows["kind"], (codec.SESSION, codec.NODE, codec.HEAD, codec.ANNOTATION))
        numbers = set(survey.rows["session"][of_sessions].tolist()) | {session for session, _ in self._orphans}
        for number in sorted(numbers - known - self.dropped):
            yield number, self.session_id(number)

    def lost_words(self, kind: int) -> Iterator[int]:
        """Numbers of the lost records of a kind, pins or aliases, after which nothing else was said of the same."""
        rows = self.survey.rows
        for number in self.survey.gone:
            if rows["kind"][number] == kind:
                same = (rows["kind"] == kind) & (rows["session"] == rows["session"][number]) & (rows["id"] == rows["id"][number])
                if int(np.flatnonzero(same)[-1]) == number:
                    yield number

    def uncertain_heads(self) -> Iterator[tuple[int, str]]:
        """Session and name of heads that may have been moved later, in bytes of which nobody can say what they were."""
        last = max(((stretch.segment, stretch.start) for stretch in self.survey.blind), default=(0, 0))
        older = set(self.older_heads())
        for head, move in self.survey.heads.items():
            *_, segment, offset, _, _ = self.survey.rows[move.number].item()
            if move.ordinal is not None and (segment, offset) < last and head not in older and head[0] not in self.dropped:
                yield head

    # damage

    def _files(self) -> Iterator[Damage]:
        """FORMAT and BASE."""
        instead = {
            "FORMAT": "what seeds the checksums was taken from the frames",
            "BASE": "the log is read from the first segment on that is there, and what was dropped may have come back",
        }
        for name, why in self.survey.files_damaged.items():
            yield Damage(f"{why}; {instead[name]}", name, harmless=name == "FORMAT")

    def _stretches(self) -> Iterator[Damage]:
        """Damaged stretches of which nobody knows a record that was in them."""
        survey = self.survey
        known = sorted(
            (int(survey.rows["segment"][number]), int(survey.rows["offset"][number]))
            for number in survey.gone
            if number in survey.bad
        )
        behind = {place: number for number, place in self._places_of_sound()} if survey.stretches else {}
        for stretch in survey.stretches:
            segment, start, stop, why, harmless = stretch
            if bisect_left(known, (segment, start)) != bisect_left(known, (segment, stop + HEAD.size)):
                continue
            where = _file_of(segment), segment, start
            number = behind.get((segment, stop))
            if harmless and number is not None and stop - start == HEAD.size:
                kind, session, ordinal, *_ = survey.rows[number].item()
                what = self._named(kind, session, ordinal) if kind != codec.HEAD else f"a move of a head of {self._whose(session)}"
                identity = survey.id_of(number) if kind == codec.NODE else None
                yield Damage(f"{why}: {what}", *where, self.session_id(session), identity, harmless=True)
            elif harmless:
                yield Damage(f"{stop - start} bytes around records that are all there", *where, harmless=True)
            else:
                yield Damage(f"{stop - start} bytes are not what was written" if stop > start else why, *where)

    def _places_of_sound(self) -> Iterator[tuple[int, tuple[int, int]]]:
        rows = self.survey.rows
        for number, place in enumerate(zip(rows["segment"].tolist(), rows["offset"].tolist(), strict=True)):
            if number not in self.survey.gone:
                yield number, place

    def _bad_records(self) -> Iterator[Damage]:
        survey = self.survey
        for number, why in sorted(survey.bad.items()):
            kind, session, ordinal, _, identity, _, segment, offset, _, _ = survey.rows[number].item()
            what = why
            if number in survey.gone:
                sure = "" if survey.gone[number] else ", as what is left of it says"
                named = self._named(kind, session, ordinal)
                if kind in (codec.HEAD, codec.ANNOTATION):
                    named = self._moved(number) if kind == codec.HEAD else self._unsaid(number)
                what = f"{named}{sure}: {why}"
            where = what, _file_of(segment), segment, offset
            if kind == codec.NODE:
                aside = survey.aside[number]
                below = () if aside else self._below([*self._children_of([number]), *self._orphaned((session, ordinal))])
                yield Damage(*where, self.session_id(session), identity, below)
            elif kind == codec.SESSION:
                yield Damage(*where, self.session_id(session), None, self._below(self._orphaned((session, NONE))))
            else:
                last = self._gone_moves[number][2] if number in self._gone_moves else None
                harmless = kind == codec.OPENED or (last is not None and last.number > number)
                node_id = None
                if kind == codec.ANNOTATION:
                    _, since = self._lost_word(number)
                    harmless = since is not None and self._is_later(since, number)
                    node_id = self._id_or_none(survey.find(session, ordinal))
                whose = None if kind in (codec.ALIAS, ALIEN) else self.session_id(session)
                yield Damage(*where, whose, node_id, harmless=harmless)

    def _bad_features(self) -> Iterator[Damage]:
        bad: dict[str, list[bytes]] = {os.path.basename(name): [] for name, why in self.survey.features.items() if why is not None}
        for content, node_id in self._contents() if bad else ():
            if content in bad:
                bad[content].append(node_id)
        for name, why in self.survey.features.items():
            if why is not None:
                nodes = tuple(dict.fromkeys(bad[os.path.basename(name)]))
                yield Damage(why, self.below_store(name), named_by=nodes, harmless=not nodes)

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        """Names of the files that features of media have, or would have, and the nodes that name them."""
        survey = self.survey
        with survey.reader() as read:
            for number in np.flatnonzero((survey.rows["kind"] == codec.NODE) & ~survey.aside).tolist():
                if number not in survey.bad:
                    for content in codec.contents_of(read(survey.rows[number])):
                        yield blobs.file_name(content), survey.id_of(number)

    def below_store(self, name: str) -> str:
        return os.path.relpath(name, self.survey.path)

    # what names nothing

    def _dangling_nodes(self) -> Iterator[Finding]:
        """Nodes without a parent, or without a session, for which no damage was found."""
        for (session, ordinal), numbers in sorted(self._orphans.items()):
            if below := self._below(numbers):
                missing = self._named(codec.SESSION if ordinal == NONE else codec.NODE, session, ordinal)
                where = self._place(numbers[0])
                yield Finding(f"{missing} is missing", *where, self.session_id(session), self.survey.id_of(numbers[0]), below)

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

    def _dangling_annotations(self) -> Iterator[Finding]:
        """Annotations whose node is lost, or is not the one that they are of: those of one node together."""
        found: defaultdict[tuple[int, int, bytes, str], list[tuple[int, str]]] = defaultdict(list)
        for (session, ordinal, name), said in self.survey.said.items():
            if session in self.survey.sessions and session not in self.dropped:
                how = self.misplaced(session, ordinal, said)
                if how is not None:
                    found[session, ordinal, said.node_id, how].append((said.number, name))
        for (session, ordinal, identity, how), records in sorted(found.items()):
            names = ", ".join(repr(name) for _, name in sorted(records))
            what = f"annotation {names} of session {self.session_id(session)!r} is of node {ordinal}, which {how}"
            yield Finding(what, *self._place(records[0][0]), self.session_id(session), identity)

    def _of_no_session(self) -> Iterator[Finding]:
        """What else names a session that has no record."""
        known = {number: f"head {name!r}" for (_, name), (number, _, _) in self.survey.heads.items()}
        known |= {number: "a pin" for number, _, _ in self.survey.pins.values()}
        known |= {said.number: f"annotation {name!r}" for (_, _, name), said in self.survey.said.items()}
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
            annotations=sum(of not in self.dropped for of, _, _ in survey.said),
            aliases=sum(identity is not None for _, identity in survey.aliases.values()),
            features=len(survey.features),
            unknown_records=survey.unknown,
            repeated=survey.repeated,
            torn_bytes=survey.torn,
            unreadable_bytes=survey.unreadable,
            unknown_bytes=sum(stretch.stop - stretch.start for stretch in survey.blind),
            damaged=self.damaged,
            dangling=self.dangling,
            wrong_ordinals=(*map(self._finding, survey.wrong_ordinals), *self._gaps(), *self._names()),
            cycles=tuple(map(self._finding, survey.cycles)),
            misleading=tuple(_of_sidecar(each) for each in survey.sidecars if each.misleads),
            sidecars=tuple(_of_sidecar(each) for each in survey.sidecars if not each.misleads),
            unreachable=tuple(self._unreachable()),
            strays=tuple(survey.strays()),
            older_heads=tuple(self.named_heads(self.older_heads())),
            uncertain_heads=tuple(self.named_heads(self.uncertain_heads())),
        )

    def named_heads(self, heads: Iterable[tuple[int, str | None]]) -> Iterator[tuple[str | None, str | None]]:
        """The same with the ids of the sessions, as far as these are known."""
        return ((self.session_id(session), name) for session, name in heads)

    def _finding(self, problem: Problem) -> Finding:
        number = problem.number
        identity = self.survey.id_of(number) if self.survey.rows["kind"][number] == codec.NODE else None
        return Finding(problem.what, *self._place(number), self.session_id(problem.session), identity)

    def _gaps(self) -> Iterator[Finding]:
        """Ordinals that are skipped, with nothing to say why. Compaction leaves such gaps."""
        if self.survey.blind or self.survey.base != NO_BASE:
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
                yield Finding("features that no sound node names", self.below_store(name))
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
