"""Histories of a backend beside the plainest implementation there is: dicts, for one thread."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sessiontree.backends.shared import Backend, Change, Look, NewNode, NewSession, Removal
from tests.backend_writing import Since, looked, merged, node, nodes, since_of


@dataclass
class PlainSession:
    new: NewSession
    version: int = 0
    drops: int = 0
    removals: int = 0
    gone: bool = False
    nodes: dict[int, NewNode] = field(default_factory=dict)
    refs: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # each with the version it came with


class Plain:
    """Sessions and Nodes over dicts, for one thread."""

    def __init__(self) -> None:
        self.sessions: dict[int, PlainSession] = {}
        self.by_name: dict[bytes, bytes] = {}

    def create(self, new: NewSession) -> Literal["made", "taken", "dropped"]:
        if self.find(new.name) is not None:
            return "taken"
        if new.tip is not None:
            below = self.sessions.get(new.tip[0])
            if below is None or below.drops != new.tip_drops:
                return "dropped"
        self.sessions[new.number] = PlainSession(new, nodes={node.row.ordinal: node for node in new.nodes})
        return "made"

    def find(self, name: str) -> int | None:
        return next((number for number, found in self.names() if found == name), None)

    def names(self) -> Sequence[tuple[int, str]]:
        return [(number, each.new.name) for number, each in sorted(self.sessions.items()) if not each.gone]

    def look(self, number: int) -> Look | None:
        each = self.sessions.get(number)
        if each is None:
            return None
        rows = [node.row for _, node in sorted(each.nodes.items())]
        refs = {name: record for name, (_, record) in each.refs.items()}
        return Look(each.new.record, each.version, each.drops, each.removals, each.gone, True, rows, refs)

    def commit(self, changes: Sequence[Change]) -> Sequence[bool]:
        return [self._commit(change) for change in changes]

    def _commit(self, change: Change) -> bool:
        each = self.sessions.get(change.session)
        if each is None or each.version != change.before:
            return False
        each.version = change.after
        each.drops += change.drops
        each.gone = change.gone
        each.nodes.update((node.row.ordinal, node) for node in change.nodes)
        each.refs.update((name, (change.after, record)) for name, record in change.refs.items())
        return True

    def tips(self) -> Sequence[tuple[int, int, int]]:
        return [(number, *each.new.tip) for number, each in self.sessions.items() if each.new.tip is not None]

    def all(self) -> Sequence[tuple[int, bool]]:
        return [(number, each.gone) for number, each in self.sessions.items()]

    def remove(self, removal: Removal) -> bool:
        each = self.sessions.get(removal.session)
        forks = sum(session == removal.session for _, session, _ in self.tips())
        if each is None or each.version != removal.version or forks != removal.forks or (removal.whole and not each.gone):
            return False
        each.removals += 1
        for ordinal in removal.ordinals:
            del each.nodes[ordinal]
        for name in removal.refs:
            del each.refs[name]
        if removal.whole:
            del self.sessions[removal.session]
        return True

    def name(self, name: bytes, record: bytes, expected: bytes | None, tenant: str | None = None) -> bool:
        if self.by_name.get(name) != expected:
            return False
        self.by_name[name] = record
        return True

    def read(self, session: int, ordinals: Sequence[int], *, fresh: bool = False) -> Sequence[bytes | None]:
        nodes = self.sessions[session].nodes if session in self.sessions else {}
        return [nodes[ordinal].record if ordinal in nodes else None for ordinal in ordinals]


class Histories(RuleBasedStateMachine):
    """One history after the other in one place, through two backends by turns. What others left there is looked past."""

    backends: ClassVar[tuple[Backend, Backend]]
    histories: ClassVar = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self._turns = itertools.cycle(self.backends)
        self.plain = Plain()
        self.called = next(self.histories)
        self.numbers: list[int] = []
        self.looks: dict[int, list[tuple[Since, Look]]] = {}  # all that were made, as they were

    @property
    def backend(self) -> Backend:
        """Another one for each call."""
        return next(self._turns)

    def mine(self, rows: Sequence[tuple[int, *tuple[Any, ...]]]) -> list[tuple[int, *tuple[Any, ...]]]:
        return [row for row in rows if row[0] in self.numbers]

    def session(self, drawn: int) -> PlainSession:
        """Any that is there."""
        return list(self.plain.sessions.values())[drawn % len(self.plain.sessions)]

    @initialize()
    def begin(self) -> None:
        self.create(0, 3, None, 0)

    @rule(
        name=st.integers(0, 5),
        count=st.integers(0, 3),
        tip=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 9)),
        late=st.booleans(),
    )
    def create(self, name: int, count: int, tip: tuple[int, int] | None, late: bool | int) -> None:
        self.numbers += self.backend.sessions.draw(1)
        more: dict[str, Any] = {}
        if tip is not None and self.plain.sessions:
            below = self.session(tip[0])
            if below.nodes:
                more = {"tip": (below.new.number, sorted(below.nodes)[tip[1] % len(below.nodes)]), "tip_drops": below.drops + late}
        new = NewSession(self.numbers[-1], f"history {self.called}, {name}", None, b"%d" % name, nodes(1, count), **more)
        assert self.backend.sessions.create(new) == self.plain.create(new)

    @precondition(lambda self: self.plain.sessions)
    @rule(
        which=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=4),
        count=st.integers(0, 3),
        step=st.integers(1, 3),
        refs=st.dictionaries(st.sampled_from([b"a", b"b", b"c" * 64]), st.binary(max_size=8), max_size=2),
        drops=st.booleans(),
        gone=st.sampled_from([False, False, False, True]),
    )
    def commit(
        self, which: list[tuple[int, int]], count: int, step: int, refs: Mapping[bytes, bytes], drops: bool, gone: bool
    ) -> None:
        changes: dict[int, Change] = {}
        for drawn_session, off in which:
            each = self.session(drawn_session)
            if not each.gone:
                first = max(each.nodes, default=0) + 1
                some = [node(first + at, b"%d in %d" % (at, each.version)) for at in range(count)]
                before = each.version + off
                changes[each.new.number] = Change(each.new.number, before, before + step, some, refs, drops, gone and not off)
        assert list(self.backend.sessions.commit(list(changes.values()))) == self.plain.commit(list(changes.values()))

    @precondition(lambda self: self.plain.sessions)
    @rule(
        which=st.integers(0, 99),
        kept=st.sets(st.integers(1, 6)),
        kept_refs=st.sets(st.sampled_from([b"a", b"b"])),
        off=st.sampled_from([0, 0, 0, 1]),
        forks_off=st.sampled_from([0, 0, 0, 1]),
        whole=st.booleans(),
    )
    def remove(self, which: int, kept: set[int], kept_refs: set[bytes], off: int, forks_off: int, whole: bool) -> None:
        each = self.session(which)
        forks = sum(session == each.new.number for _, session, _ in self.plain.tips())
        whole = whole and not forks
        ordinals = [ordinal for ordinal in each.nodes if whole or ordinal not in kept]
        refs = [name for name in each.refs if whole or name not in kept_refs]
        removal = Removal(each.new.number, each.version + off, ordinals, refs, forks + forks_off, whole)
        assert self.backend.sessions.remove(removal) == self.plain.remove(removal)

    @precondition(lambda self: self.numbers)
    @rule(which=st.integers(0, 99), earlier=st.integers(0, 99))
    def look(self, which: int, earlier: int) -> None:
        number = self.numbers[which % len(self.numbers)]
        looks = self.looks.setdefault(number, [])
        expected = self.plain.look(number)
        if expected is None:
            assert self.backend.sessions.look(number) is None
            return
        look = looked(self.backend, number)
        assert look == expected
        if looks:
            since, known = looks[earlier % len(looks)]
            later = looked(self.backend, number, since)
            assert later.whole or later.removals == since[1]
            assert merged(known, later) == expected
        looks.append((since_of(look), look))

    @rule(name=st.integers(0, 2), record=st.binary(max_size=4), right=st.sampled_from([True, True, False]))
    def name(self, name: int, record: bytes, right: bool) -> None:
        key = b"%d in %d" % (name, self.called)
        there = self.plain.by_name.get(key)
        expected = there if right else b"?" if there is None else None
        assert self.backend.sessions.name(key, record, expected) == self.plain.name(key, record, expected)
        assert self.backend.sessions.named(key) == self.plain.by_name.get(key)

    @rule()
    def everything(self) -> None:
        backend = self.backend
        assert self.mine(backend.sessions.names()) == self.plain.names()
        assert sorted(self.mine(backend.sessions.all())) == sorted(self.plain.all())
        assert sorted(self.mine(backend.sessions.tips())) == sorted(self.plain.tips())
        named = backend.sessions.all_named()
        assert {key: named.get(key) for key in self.plain.by_name} == self.plain.by_name
        for name in range(6):
            assert backend.sessions.find(f"history {self.called}, {name}") == self.plain.find(f"history {self.called}, {name}")
        for number in self.numbers:
            assert list(backend.nodes.read(number, range(1, 12))) == self.plain.read(number, range(1, 12))

    def teardown(self) -> None:
        self.everything()
        for number in self.numbers:
            assert (None if self.plain.look(number) is None else looked(self.backend, number)) == self.plain.look(number)
