"""What is sound in a damaged store, written to a new one.

A node is kept if it and all above it are sound. Records are the same bytes as before wherever nothing before them is missing;
behind a gap nodes move up, since a session counts its nodes without gaps. Ids stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from sessiontree import codec
from sessiontree.backends import blobs
from sessiontree.backends.base import Progress
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.errors import IncompatibleStore, StoreFailed
from sessiontree.fsck.checks import Moved
from sessiontree.fsck.report import Examined, Report, plain
from sessiontree.fsck.survey import NONE, ROOT, Held, surveyed
from sessiontree.journal import prefix_of

_BATCH_BYTES: Final = 2**20
_PENDING_BYTES: Final = 2**25
_SMALLEST: Final = 64  # bytes that the record of an opening takes at least


@attrs.frozen
class SalvageReport:
    """What :func:`salvage` wrote, and what it could not: ids of nodes and of sessions, and heads; None stands for a lost name.

    ``lost_heads``: (session, name); their node or their record is lost, and in the new store there is no such head.
    ``older_heads``: those whose last move is lost, which are where they were before; ``uncertain_heads``: those of which there may
    have been one in bytes of which nobody can say what they were. ``cut_forks``: sessions that were forked from a node that is
    lost, and begin with the nearest sound node above it now. ``lost_pins``: (session, id of the node). ``annotations``: names that
    are said of nodes there; ``lost_annotations``: (session, id of the node, name), whose records or nodes are lost; what was said
    by that name before stands, where that is sound. ``lost_aliases``: how many. ``lost_features``: damaged files, below the store.
    ``undropped``: sessions of which something was dropped that is there again, since the record of that is lost. ``later_records``:
    of a later version, which are left out. ``report``: what is wrong with the old store.
    """

    path: str
    new: str
    sessions: int
    nodes: int
    heads: int
    aliases: int
    features: int
    lost_nodes: tuple[bytes, ...]
    lost_sessions: tuple[str | None, ...]
    lost_heads: tuple[tuple[str | None, str | None], ...]
    older_heads: tuple[tuple[str | None, str | None], ...]
    uncertain_heads: tuple[tuple[str | None, str | None], ...]
    cut_forks: tuple[str, ...]
    lost_pins: tuple[tuple[str | None, bytes], ...]
    lost_aliases: int
    lost_features: tuple[str, ...]
    undropped: tuple[str | None, ...]
    later_records: int
    report: Report
    annotations: int = 0
    lost_annotations: tuple[tuple[str | None, bytes | None, str | None], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; ids in hexadecimal."""
        made: dict[str, Any] = plain(self)
        return {**made, "report": self.report.to_dict()}


def salvage(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    processes: int | None = None,
) -> SalvageReport:
    """Write every undamaged node of a store, all of whose ancestors are undamaged, to a new store in the directory ``new``.

    With them go their sessions, the heads that point at them, aliases, and the sound files of features. ``new`` must not be there,
    or be empty, and not lie in the old store, which is not changed. ``progress``: called with bytes done and bytes in all, of
    reading and of writing; ``processes``: as for fsck. Raises IncompatibleStore, StoreFailed; what is there of the new store then
    is to be deleted.
    """
    old, target = os.path.realpath(path), os.path.realpath(new)
    if os.path.commonpath([old, target]) == old:
        raise IncompatibleStore(f"{target} lies in the store at {old}")
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.isfile(target) or os.listdir(target):
            raise IncompatibleStore(f"{target} is not empty")
    reading = None if progress is None else lambda done, total: progress(done, 2 * total)
    examined = Examined(surveyed(path, reading, processes))
    writing = None if progress is None else lambda done, total: progress(total + done, 2 * total)
    try:
        return _Salvage(examined, os.fspath(new), writing).write()
    except OSError as error:
        raise StoreFailed(f"{target} cannot be written: {error}", errno=error.errno) from error


class _Salvage:
    def __init__(self, examined: Examined, new: str, progress: Progress | None) -> None:
        self._examined = examined
        self._survey = examined.survey
        self._new = new
        self._progress = progress
        self._ordinals = np.full(len(self._survey.rows), NONE, np.int64)  # new ones, of nodes that are kept
        self._kept = {number: held for number, held in self._survey.sessions.items() if held.rules is not None}
        self._nodes = 0
        self._heads = self._annotations = 0
        self._lost_heads: list[tuple[str | None, str | None]] = []
        self._lost_pins: list[tuple[str | None, bytes]] = []
        self._cut: list[str] = []

    def write(self) -> SalvageReport:
        survey = self._survey
        done = pending = 0
        log = SegmentLog.open(self._new, entry_of=prefix_of, durability="relaxed")
        try:
            batch: list[tuple[bytes, bytes]] = []
            size = 0
            for record in self._records():
                batch.append((record, prefix_of(record)))
                size += len(record)
                if size >= _BATCH_BYTES:
                    log.enqueue(batch)
                    done, pending = done + size, pending + size
                    batch, size = [], 0
                    self._tell(done)
                if pending >= _PENDING_BYTES:
                    log.flush()
                    pending = 0
            log.enqueue(batch)
        finally:
            log.close()
        copied = self._copy_features(done + size)
        self._tell(survey.total)
        report = self._examined.report()
        harm = [damage for damage in report.damaged if not damage.harmless]
        lost = {identity for damage in harm for identity in (damage.node_id, *damage.dependents) if identity is not None}
        lost |= {identity for finding in report.dangling for identity in finding.dependents}
        self._note_what_is_gone()
        examined = self._examined
        drops = {int(survey.rows["session"][number]) for number in survey.gone if survey.rows["kind"][number] == codec.DROP}
        return SalvageReport(
            path=survey.path,
            new=os.path.abspath(self._new),
            sessions=len(self._kept),
            nodes=self._nodes,
            heads=self._heads,
            aliases=report.aliases,
            features=copied,
            lost_nodes=tuple(sorted(lost)),
            lost_sessions=tuple(name for _, name in examined.lost_sessions()),
            lost_heads=tuple(self._lost_heads),
            older_heads=report.older_heads,
            uncertain_heads=report.uncertain_heads,
            cut_forks=tuple(self._cut),
            lost_pins=tuple(self._lost_pins),
            lost_aliases=len(list(examined.lost_words(codec.ALIAS))),
            lost_features=tuple(examined.below_store(name) for name, why in survey.features.items() if why is not None),
            undropped=tuple(examined.session_id(number) for number in sorted(drops - examined.dropped)),
            later_records=survey.unknown,
            report=report,
            annotations=self._annotations,
            lost_annotations=tuple((examined.session_id(of), node_id, name) for of, node_id, name in examined.lost_annotations()),
        )

    def _note_what_is_gone(self) -> None:
        """Heads and pins that are lost with their records, or with their sessions."""
        survey, examined, rows = self._survey, self._examined, self._survey.rows
        for number, ordinal, pinned in survey.pins.values():
            session = int(rows["session"][number])
            if pinned and ordinal is not None and session not in self._kept and session not in examined.dropped:
                self._lost_pins.append((examined.session_id(session), survey.id_of(number)))
        for number in examined.lost_words(codec.PIN):
            if rows["key"][number] and int(rows["session"][number]) not in examined.dropped:
                self._lost_pins.append((examined.session_id(int(rows["session"][number])), survey.id_of(number)))
        for (session, name), move in survey.heads.items():
            if move.ordinal is not None and session not in self._kept and session not in examined.dropped:
                self._lost_heads.append((examined.session_id(session), name))
        self._lost_heads += examined.named_heads(examined.lost_heads())

    def _tell(self, done: int) -> None:
        if self._progress is not None:
            self._progress(min(done, self._survey.total), self._survey.total)

    def _records(self) -> Iterator[bytes]:
        """What the new log is to hold, in order."""
        survey = self._survey
        more, said = self._of_sessions(), self._said()
        with survey.leased() as base, survey.reader() as read:
            if base != survey.base:
                raise Moved(survey.path, 0)
            for number, held in self._kept.items():
                begun, first = self._begun(held)
                yield codec.encode(begun)
                sound = [node for node in survey.numbers_of(number).tolist() if node not in self._examined.lost]
                for at, node in enumerate(sound, first):
                    self._ordinals[node] = at
                    yield self._moved(read(survey.rows[node]), node, at)
                self._nodes += len(sound)
                for at, each in said.get(number, ()):
                    if (place := self._place(held, at)) is not None:
                        record = codec.decode(read(survey.rows[each]))
                        assert isinstance(record, codec.AnnotationRecord)
                        yield codec.encode(record._replace(ordinal=place))
                        self._annotations += 1
                for write in more.get(number, ()):
                    if (other := write(held)) is not None:
                        yield codec.encode(other)
        if self._kept:
            # Drafts have keys of their own by the opening they were made in: what was lost may have been openings.
            lost = sum(stretch.stop - stretch.start for stretch in survey.stretches) // _SMALLEST
            yield codec.encode(codec.OpenedRecord(max([*self._kept, *survey.openings]), survey.opening + lost))
        for (namespace, alias), (_, identity) in survey.aliases.items():
            if identity is not None:
                yield codec.encode(codec.AliasRecord(namespace, alias, identity))

    def _said(self) -> dict[int, list[tuple[int, int]]]:
        """Of each session the ordinals of nodes, and the records that say something of them and stand where they should."""
        found: dict[int, list[tuple[int, int]]] = {}
        for (session, ordinal, _), said in self._survey.said.items():
            if session in self._kept and self._examined.misplaced(session, ordinal, said) is None:
                found.setdefault(session, []).append((ordinal, said.number))
        return found

    def _of_sessions(self) -> dict[int, list[Callable[[Held], codec.Record | None]]]:
        """What is written of each session behind its nodes."""
        found: dict[int, list[Callable[[Held], codec.Record | None]]] = {}
        for (session, name), (_, ordinal, version) in self._survey.heads.items():
            found.setdefault(session, []).append(partial(self._head, name, ordinal, version))
        for (session, identity), (_, ordinal, pinned) in self._survey.pins.items():
            if pinned:
                found.setdefault(session, []).append(partial(self._pin, identity, ordinal))
        for session, ordinals in self._survey.drops.items():
            found.setdefault(session, []).append(partial(self._drop, ordinals))
        return found

    def _begun(self, held: Held) -> tuple[codec.SessionRecord, int]:
        """A session's record, and the ordinal of its first own node."""
        if held.record.tip is None:
            return held.record, 1
        survey, tip = self._survey, held.tip
        while tip in self._examined.lost:
            tip = int(survey.parents[tip])
        if tip != held.tip or tip == NONE:
            self._cut.append(held.record.session_id)
        if tip < 0:
            return held.record._replace(tip=(held.record.tip[0], 0)), 1
        depth = survey.depth(tip)
        assert depth is not None
        return held.record._replace(tip=(int(survey.rows["session"][tip]), int(self._ordinals[tip]))), depth + 1

    def _moved(self, record: bytes, number: int, ordinal: int) -> bytes:
        """A node's record under its new ordinal."""
        _, session, was, before = self._survey.rows[number].item()[:4]
        parent = self._ordinal(session, int(self._survey.parents[number]))
        return record if (ordinal, parent) == (was, before) else codec.renumbered(record, session, ordinal, parent)

    def _ordinal(self, session: int, number: int) -> int:
        """The new ordinal of a node in a session: on the path of a fork it is its depth."""
        if number == ROOT:
            return 0
        if self._survey.rows["session"][number] == session:
            return int(self._ordinals[number])
        depth = self._survey.depth(number)
        assert depth is not None
        return depth

    def _place(self, held: Held, ordinal: int) -> int | None:
        """The new ordinal for an old one; None where the node is lost."""
        at = self._survey.find(held.number, ordinal)
        return None if at == NONE or at in self._examined.lost else self._ordinal(held.number, at)

    def _head(self, name: str, ordinal: int | None, version: int, held: Held) -> codec.Record:
        at = None if ordinal is None else self._place(held, ordinal)
        self._heads += at is not None
        if at is None and ordinal is not None and held.number not in self._examined.dropped:
            self._lost_heads.append((held.record.session_id, name))
        return codec.HeadRecord(held.number, name, at, version)

    def _pin(self, identity: bytes, ordinal: int, held: Held) -> codec.Record | None:
        at = self._place(held, ordinal)
        if at is None and held.number not in self._examined.dropped:
            self._lost_pins.append((held.record.session_id, identity))
        return None if at is None else codec.PinRecord(held.number, at, identity, True)

    def _drop(self, ordinals: set[int], held: Held) -> codec.Record | None:
        at = sorted(place for ordinal in ordinals if (place := self._place(held, ordinal)) is not None)
        return codec.DropRecord(held.number, tuple(at)) if at else None

    def _copy_features(self, done: int) -> int:
        """Copy the sound files of features: how many."""
        copied = 0
        for name, why in self._survey.features.items():
            if why is None:
                blobs.copy_file(name, os.path.join(self._new, os.path.relpath(name, self._survey.path)))
                copied += 1
                done += os.path.getsize(name)
                self._tell(done)
        return copied
