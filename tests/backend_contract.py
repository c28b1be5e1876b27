"""What a store that many processes write asks of a backend, as tests. How to run them: docs/backends.md.

A backend that passes does what the docstrings of :mod:`sessiontree.backends.shared` say: alone, with many threads and with many
processes, and like :class:`~tests.backend_histories.Plain` in any history.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sessiontree.backends.shared import Backend, Blobs, Change, Look, NewNode, NewSession, NodeRow, Removal
from sessiontree.errors import Unsupported
from sessiontree.testing.together import in_threads
from tests.backend_histories import Histories, Plain
from tests.backend_processes import SPAWN, Processes, appended, created, drawn, write_until_killed
from tests.backend_writing import Connect, commit, looked, made, merged, node, nodes, noise, row_of, since_of

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"
MEGABYTE = 2**20
ODD_NAMES = [
    "",
    " ",
    "name ",
    "Name",
    "NAME",
    'it\'s "quoted" `so`',
    "100%_\\%",
    "two\nlines\r\n",
    "nul\0inside",
    "nul\0",
    "é",
    "e\u0301",
    "\u202eright to left\u202c",
    "\ufeffbom",
    "\uffff\ufffe\U0010ffff",
    "🜁" * 512,
    "x" * 512,
    "; DROP TABLE sessions; --",
    "None",
    "1",
    "01",
]
KEYS = [0, 1, 255, 2**31, 2**63 - 1, 2**63, 2**64 - 1]


class BackendContract:
    """Override the fixture ``connect``, and ``connect_tenant`` where there are tenants."""

    @pytest.fixture
    def connect(self) -> Connect:
        """To be overridden: what connects to the place of this test, which was empty. It goes to other processes by pickle."""
        raise NotImplementedError("override the fixture connect")

    @pytest.fixture
    def connect_tenant(self) -> Callable[[str], Backend] | None:
        """What connects a tenant to the place of this test; None: there are no tenants."""
        return None

    @pytest.fixture
    def closing(self) -> Iterator[ExitStack]:
        """What closes what a test connected."""
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def connect_again(self, connect: Connect, closing: ExitStack) -> Connect:
        """Connects, and closes when the test ends."""

        def connected() -> Backend:
            backend = connect()
            closing.callback(backend.close)
            return backend

        return connected

    @pytest.fixture
    def backend(self, connect_again: Connect) -> Backend:
        return connect_again()

    @pytest.fixture
    def tenants(self, connect_tenant: Callable[[str], Backend] | None, closing: ExitStack) -> Callable[[str], Backend]:
        if connect_tenant is None:
            pytest.skip("of a backend with tenants")

        def connected(tenant: str) -> Backend:
            backend = connect_tenant(tenant)
            closing.callback(backend.close)
            return backend

        return connected

    @pytest.fixture
    def blobs(self, backend: Backend) -> Blobs:
        if backend.blobs is None:
            pytest.skip("of a backend with blobs")
        return backend.blobs

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[Processes]:
        processes = Processes(8 if SOAK else 3)
        yield processes
        processes.close()

    # Numbers and sessions

    def test_numbers_are_given_once(self, backend: Backend, connect_again: Connect) -> None:
        other = connect_again()
        numbers = [list(each.sessions.draw(count)) for each in (backend, other, backend) for count in (1, 5, 100)]
        assert [len(some) for some in numbers] == [1, 5, 100] * 3
        assert all(some == sorted(some) for some in numbers)
        every = [number for some in numbers for number in some]
        assert len(set(every)) == len(every) and min(every) >= 1 and max(every) < 2**32 - 1

    def test_a_session_is_there_as_it_was_made(self, backend: Backend, connect_again: Connect) -> None:
        (number,) = backend.sessions.draw(1)
        some = [node(ordinal, noise(100, ordinal), key) for ordinal, key in enumerate(KEYS, 1)]
        some.append(NewNode(NodeRow(len(some) + 1, 2, bytes(32), 0), b"\0\xff\0"))
        record = b"\0a record\xff" * 1000
        assert backend.sessions.create(NewSession(number, "one", None, record, some)) == "made"
        for each in (backend, connect_again()):
            assert looked(each, number) == Look(record, 0, 0, 0, False, True, [one.row for one in some], {})
            assert list(each.nodes.read(number, range(1, len(some) + 1))) == [one.record for one in some]
            assert each.sessions.find("one") == number
            assert list(each.sessions.names()) == [(number, "one")]
            assert list(each.sessions.all()) == [(number, False)]
            assert list(each.sessions.tips()) == []

    def test_what_is_not_there(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 1))
        (other,) = backend.sessions.draw(1)
        assert backend.sessions.find("other") is None
        assert backend.sessions.look(other) is None
        assert backend.sessions.look(other, (0, 0, 0)) is None
        assert list(backend.nodes.read(other, [1])) == [None]
        assert backend.sessions.named(b"name") is None
        assert not commit(backend, Change(other, 0, 1, nodes(1, 1)))
        assert not backend.sessions.remove(Removal(other, 0, [1], [], 0))
        assert list(backend.nodes.read(number, [1, 2])) == [b"record 1", None]

    def test_names_of_any_text(self, backend: Backend, connect_again: Connect) -> None:
        numbers = {name: made(backend, name) for name in ODD_NAMES}
        other = connect_again()
        assert [other.sessions.find(name) for name in ODD_NAMES] == list(numbers.values())
        assert list(other.sessions.names()) == [(number, name) for name, number in numbers.items()]
        assert [other.sessions.find(name) for name in ("nul", "%", "_", "ONE", "E\u0301", "x" * 511)] == [None] * 6

    def test_a_name_that_is_taken_changes_nothing(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 1))
        before = looked(backend, number)
        (other,) = backend.sessions.draw(1)
        assert backend.sessions.create(NewSession(other, "one", None, b"another", nodes(1, 3))) == "taken"
        assert backend.sessions.look(other) is None
        assert list(backend.nodes.read(other, [1, 2, 3])) == [None] * 3
        assert looked(backend, number) == before

    def test_a_session_that_is_gone_frees_its_name_and_stays(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 2))
        assert commit(backend, Change(number, 0, 4, refs={b"d": b"dropped"}, drops=True, gone=True))
        assert backend.sessions.find("one") is None
        assert list(backend.sessions.names()) == []
        assert list(backend.sessions.all()) == [(number, True)]
        look = looked(backend, number)
        assert (look.gone, look.version, look.drops, look.refs) == (True, 4, 1, {b"d": b"dropped"})
        assert list(backend.nodes.read(number, [1, 2])) == [b"record 1", b"record 2"]
        again = made(backend, "one")
        assert backend.sessions.find("one") == again
        commit(backend, Change(number, 4, 5, drops=True))  # it may take effect or not
        assert looked(backend, number).gone and backend.sessions.find("one") == again

    # Forks

    def test_a_fork_names_its_tip(self, backend: Backend) -> None:
        below = made(backend, "below", nodes(1, 3))
        fork = made(backend, "fork", nodes(1, 1), tip=(below, 3))
        other = made(backend, "other", tip=(fork, 1))
        assert sorted(backend.sessions.tips()) == [(fork, below, 3), (other, fork, 1)]
        assert commit(backend, Change(fork, 0, 1, gone=True))
        assert sorted(backend.sessions.tips()) == [(fork, below, 3), (other, fork, 1)]

    def test_a_fork_of_what_was_dropped_meanwhile_is_refused(self, backend: Backend) -> None:
        below = made(backend, "below", nodes(1, 3))
        assert commit(backend, Change(below, 0, 1, nodes(4, 4)))  # that drops nothing
        made(backend, "in time", tip=(below, 3))
        assert commit(backend, Change(below, 1, 2, drops=True))
        (number,) = backend.sessions.draw(1)
        late = NewSession(number, "late", None, b"", nodes(1, 1), (below, 3), 0)
        for new in (late, late._replace(tip_drops=2)):
            assert backend.sessions.create(new) == "dropped"
            assert backend.sessions.find("late") is None
            assert backend.sessions.look(number) is None
            assert list(backend.nodes.read(number, [1])) == [None]
        assert [fork for fork, _, _ in backend.sessions.tips()] == [backend.sessions.find("in time")]
        assert backend.sessions.create(late._replace(tip_drops=1)) == "made"

    def test_a_fork_of_a_session_that_is_gone(self, backend: Backend) -> None:
        below = made(backend, "below", nodes(1, 3))
        assert commit(backend, Change(below, 0, 1, drops=True, gone=True))
        made(backend, "of what is there still", tip=(below, 3), tip_drops=1)
        gone = made(backend, "gone", nodes(1, 1))
        assert commit(backend, Change(gone, 0, 1, drops=True, gone=True))
        assert backend.sessions.remove(Removal(gone, 1, [1], [], 0, whole=True))
        (number,) = backend.sessions.draw(1)
        for drops in (0, 1):
            assert backend.sessions.create(NewSession(number, "late", None, b"", (), (gone, 1), drops)) == "dropped"

    # Changes

    def test_a_change_takes_effect_whole(self, backend: Backend, connect_again: Connect) -> None:
        number = made(backend, "one", nodes(1, 1))
        refs = {b"head": noise(200), b"\0" * 64: b"", b"\xff": b"\0"}
        assert commit(backend, Change(number, 0, 7, nodes(2, 4), refs, drops=True))
        for each in (backend, connect_again()):
            assert looked(each, number) == Look(
                b"of one", 7, 1, 0, False, True, [row_of(ordinal) for ordinal in (1, 2, 3, 4)], refs
            )
            assert list(each.nodes.read(number, [4, 3, 2])) == [b"record 4", b"record 3", b"record 2"]

    def test_a_change_for_another_version_does_nothing(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 1))
        assert commit(backend, Change(number, 0, 2, refs={b"head": b"1"}))
        before = looked(backend, number)
        for version in (0, 1, 3):
            assert not commit(backend, Change(number, version, version + 9, nodes(2, 3), {b"head": b"2", b"new": b"3"}, True, True))
            assert looked(backend, number) == before
            assert list(backend.nodes.read(number, [2, 3])) == [None, None]
            assert backend.sessions.find("one") == number

    def test_a_change_takes_effect_once(self, backend: Backend) -> None:
        number = made(backend, "one")
        change = Change(number, 0, 1, nodes(1, 1), {b"head": b"1"}, drops=True)
        assert [commit(backend, change) for _ in range(3)] == [True, False, False]
        assert looked(backend, number).drops == 1

    def test_refs_take_each_others_place(self, backend: Backend) -> None:
        number = made(backend, "one")
        for version, refs in enumerate([{b"a": b"1", b"b": b"1"}, {b"a": b"2"}, {b"b": b"3", b"A": b"3"}, {}]):
            assert commit(backend, Change(number, version, version + 1, refs=refs))
        assert looked(backend, number).refs == {b"a": b"2", b"b": b"3", b"A": b"3"}

    def test_changes_of_one_call_stand_each_on_its_own(self, backend: Backend) -> None:
        numbers = [made(backend, f"session {at}") for at in range(60)]
        (missing,) = backend.sessions.draw(1)
        stale = set(numbers[::3])
        changes = [Change(number, number in stale, 2, nodes(1, 2), {b"of": b"%d" % number}) for number in reversed(numbers)]
        changes.insert(20, Change(missing, 0, 1, nodes(1, 1)))
        expected = [change.session not in stale and change.session != missing for change in changes]
        assert list(backend.sessions.commit(changes)) == expected
        assert list(backend.sessions.commit([])) == []
        for number in numbers:
            look = looked(backend, number)
            assert (look.version, look.refs) == ((0, {}) if number in stale else (2, {b"of": b"%d" % number}))
            assert [record is None for record in backend.nodes.read(number, [1, 2])] == [number in stale] * 2

    def test_records_of_any_size(self, backend: Backend, connect_again: Connect) -> None:
        sizes = [1, 100, 1999, 2000, 2001, 4096, 8191, 65_536, MEGABYTE + 1, 5 * MEGABYTE]
        records = {ordinal: noise(size, ordinal) for ordinal, size in enumerate(sizes, 1)}
        new = [node(ordinal, record) for ordinal, record in records.items()]
        number = made(backend, "one", new[:5])
        assert commit(backend, Change(number, 0, 1, new[5:]))
        other = connect_again()
        assert looked(other, number).nodes == [one.row for one in new]
        found = other.nodes.read(number, list(records))
        assert [record == kept for record, kept in zip(found, records.values(), strict=True)] == [True] * len(sizes)

    # Looks

    def test_a_look_since_another_brings_what_is_new_alone(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 2))
        looks = [looked(backend, number)]
        refs: list[dict[bytes, bytes]] = [{}, {b"a": b"1", b"b": b"1"}, {b"a": b"2"}, {}, {b"c": b"4"}, {b"b": b"5"}]
        ordinals = [[1, 2], [3], [], [4, 5, 6], [7], []]
        versions = [0, 1, 2, 5, 6, 10]
        for at in range(1, len(versions)):
            assert commit(
                backend, Change(number, versions[at - 1], versions[at], [node(ordinal) for ordinal in ordinals[at]], refs[at])
            )
            looks.append(merged(looks[-1], looked(backend, number, since_of(looks[-1]))))
            assert looks[-1] == looked(backend, number)
        for at, earlier in enumerate(looks):
            later = looked(backend, number, since_of(earlier))
            assert not later.whole
            assert [row.ordinal for row in later.nodes] == [ordinal for each in ordinals[at + 1 :] for ordinal in each]
            assert later.refs == {name: record for each in refs[at + 1 :] for name, record in each.items()}
            assert (later.version, later.record) == (10, b"of one")

    def test_a_look_is_whole_where_something_was_removed_since(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 3))
        assert commit(backend, Change(number, 0, 1, refs={b"a": b"1", b"b": b"1"}))
        early = looked(backend, number)
        assert backend.sessions.remove(Removal(number, 1, [2], [b"a"], 0))
        late = looked(backend, number, since_of(early))
        assert late == Look(b"of one", 1, 0, 1, False, True, [row_of(1), row_of(3)], {b"b": b"1"})
        assert commit(backend, Change(number, 1, 2, nodes(4, 4)))
        assert merged(late, looked(backend, number, since_of(late))) == looked(backend, number)
        assert not looked(backend, number, since_of(late)).whole
        assert looked(backend, number, since_of(early)).whole

    def test_looks_at_many_nodes(self, backend: Backend, connect_again: Connect) -> None:
        count = 10_000
        number = made(backend, "many", nodes(1, count))
        made(backend, "beside", nodes(1, 1))
        other = connect_again()
        look = looked(other, number)
        assert look.nodes == [row_of(ordinal) for ordinal in range(1, count + 1)]
        assert commit(backend, Change(number, 0, 1, nodes(count + 1, count + 1)))
        assert looked(other, number, since_of(look)).nodes == [row_of(count + 1)]
        backwards = range(count + 2, 0, -1)
        assert list(other.nodes.read(number, backwards)) == [None, *(b"record %d" % ordinal for ordinal in backwards[1:])]

    def test_reads_in_the_order_that_was_asked_for(self, backend: Backend) -> None:
        one, two = made(backend, "one", nodes(1, 5)), made(backend, "two", nodes(1, 2, b"of two"))
        assert list(backend.nodes.read(one, [])) == []
        assert list(backend.nodes.read(one, (4, 1, 4, 99, 2))) == [b"record 4", b"record 1", b"record 4", None, b"record 2"]
        assert list(backend.nodes.read(two, range(1, 4))) == [b"of two", b"of two", None]

    # Removals

    def test_a_removal_takes_out_what_it_names(self, backend: Backend) -> None:
        number, other = made(backend, "one", nodes(1, 5)), made(backend, "other", nodes(1, 5))
        for each in (number, other):
            assert commit(backend, Change(each, 0, 1, refs={b"a": b"1", b"b": b"2", b"c": b"3"}))
        beside = looked(backend, other)
        assert backend.sessions.remove(Removal(number, 1, [2, 5], [b"a", b"c"], 0))
        rows = [row_of(ordinal) for ordinal in (1, 3, 4)]
        assert looked(backend, number) == Look(b"of one", 1, 0, 1, False, True, rows, {b"b": b"2"})
        assert list(backend.nodes.read(number, [1, 2, 3, 4, 5])) == [b"record 1", None, b"record 3", b"record 4", None]
        assert looked(backend, other) == beside
        assert list(backend.nodes.read(other, [2])) == [b"record 2"]

    def test_a_removal_is_refused_where_something_changed(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 3))
        fork = made(backend, "fork", tip=(number, 1))
        assert commit(backend, Change(number, 0, 1, refs={b"a": b"1"}))
        before = looked(backend, number)
        right = Removal(number, 1, [2, 3], [b"a"], 1)
        for wrong in (
            right._replace(version=0),
            right._replace(version=2),
            right._replace(forks=0),
            right._replace(forks=2),
            right._replace(ordinals=[1, 2, 3], forks=0, whole=True),
            right._replace(whole=True),  # it is not gone
        ):
            assert not backend.sessions.remove(wrong)
            assert looked(backend, number) == before
            assert list(backend.nodes.read(number, [2, 3])) == [b"record 2", b"record 3"]
        assert commit(backend, Change(fork, 0, 1, drops=True, gone=True))
        assert not backend.sessions.remove(right._replace(forks=0))  # the fork is gone, but it is there
        assert backend.sessions.remove(Removal(fork, 1, [], [], 0, whole=True))
        assert not backend.sessions.remove(right)
        assert backend.sessions.remove(right._replace(forks=0))

    def test_a_session_that_is_gone_is_removed_whole(self, backend: Backend) -> None:
        below = made(backend, "below", nodes(1, 1))
        number = made(backend, "one", nodes(1, 2), tip=(below, 1))
        other = made(backend, "other")
        assert commit(backend, Change(number, 0, 1, refs={b"a": b"1"}, gone=True))
        assert backend.sessions.remove(Removal(number, 1, [1, 2], [b"a"], 0, whole=True))
        assert backend.sessions.look(number) is None
        assert backend.sessions.look(number, (0, 0, 1)) is None
        assert list(backend.nodes.read(number, [1, 2])) == [None, None]
        assert sorted(backend.sessions.all()) == [(below, False), (other, False)]
        assert list(backend.sessions.tips()) == []
        assert not commit(backend, Change(number, 1, 2))

    def test_ordinals_that_were_removed_are_free(self, backend: Backend) -> None:
        number = made(backend, "one", nodes(1, 3))
        assert backend.sessions.remove(Removal(number, 0, [2, 3], [], 0))
        assert commit(backend, Change(number, 0, 1, [node(2, b"another")]))
        assert list(backend.nodes.read(number, [1, 2, 3])) == [b"record 1", b"another", None]

    # Names of the whole store

    def test_a_name_is_set_where_it_stands_for_what_is_expected(self, backend: Backend, connect_again: Connect) -> None:
        other = connect_again()
        assert not backend.sessions.name(b"a", b"1", b"0")
        assert backend.sessions.name(b"a", b"1", None)
        assert not other.sessions.name(b"a", b"2", None)
        assert not other.sessions.name(b"a", b"2", b"")
        assert other.sessions.name(b"a", b"", b"1")
        assert not backend.sessions.name(b"a", b"2", None)  # an empty record is one
        assert backend.sessions.name(b"a", b"3", b"")
        assert backend.sessions.name(b"\0\xff" * 32, b"long", None)
        assert [each.sessions.named(b"a") for each in (backend, other)] == [b"3", b"3"]
        assert other.sessions.named(b"A") is None
        assert dict(other.sessions.all_named()) == {b"a": b"3", b"\0\xff" * 32: b"long"}

    # Blobs

    def test_a_blob_is_written_once(self, blobs: Blobs, connect_again: Connect) -> None:
        began = time.monotonic()
        content = {"empty": b"", "a/b": b"\0\xff", "large": noise(3 * MEGABYTE)}
        assert [blobs.put(name, data) for name, data in content.items()] == [True] * 3
        assert not blobs.put("a/b", b"another")
        other = connect_again().blobs
        assert other is not None
        assert not other.put("empty", b"another")
        assert all(other.get(name) == data for name, data in content.items())
        assert other.get("a") is None
        ages = dict(other.names())
        assert sorted(ages) == sorted(content)
        assert all(0 <= age <= time.monotonic() - began + 2 for age in ages.values())  # some servers count whole seconds

    def test_blobs_by_the_beginning_of_their_names(self, blobs: Blobs) -> None:
        names = ["a", "a/1", "a/12", "a/%2", "a/_", "A/1", "b/1", "ba/1"]
        for name in names:
            assert blobs.put(name, name.encode())
        for prefix in ("", "a", "a/", "a/1", "a/%", "a/_", "b", "/", "c", "%", "_"):
            assert sorted(name for name, _ in blobs.names(prefix)) == sorted(name for name in names if name.startswith(prefix)), (
                prefix
            )
        assert blobs.delete(["a/1", "c", "a/_"]) == 2
        assert blobs.delete(name for name in ["a/1"]) == 0
        assert blobs.get("a/1") is None and blobs.get("a/12") == b"a/12"
        assert blobs.put("a/1", b"new") and blobs.get("a/1") == b"new"

    def test_of_blobs_that_are_put_at_once_one_is_there(self, blobs: Blobs) -> None:
        new: list[tuple[str, bytes]] = []

        def put(number: int) -> None:
            for at in range(10):
                data = b"%d of %d" % (at, number)
                if blobs.put(f"blob {at}", data):
                    new.append((f"blob {at}", data))

        in_threads(4, put)
        assert len(new) == 10
        assert all(blobs.get(name) == data for name, data in new)

    # Threads

    def test_of_threads_that_write_one_version_one_wins(self, backend: Backend) -> None:
        number = made(backend, "one")
        won: list[tuple[int, int]] = []

        def write(who: int) -> None:
            for version in range(20):
                if commit(
                    backend, Change(number, version, version + 1, [node(version + 1, b"of %d" % who)], {b"who": b"%d" % who})
                ):
                    won.append((version, who))
                assert looked(backend, number, (version, 0, version)).version > version  # mine, or whoever was first

        in_threads(4, write)
        assert [version for version, _ in sorted(won)] == list(range(20))
        assert list(backend.nodes.read(number, range(1, 22))) == [*(b"of %d" % who for _, who in sorted(won)), None]
        assert looked(backend, number).refs == {b"who": b"%d" % sorted(won)[-1][1]}

    def test_threads_at_all_of_it(self, backend: Backend) -> None:
        """Each at sessions of its own, through one backend: nobody sees another's answer."""

        def work(who: int) -> None:
            plain = Plain()
            for at in range(6):
                (number,) = backend.sessions.draw(1)
                new = NewSession(number, f"{who} {at}", None, b"%d" % who, [node(1, noise(500, who))])
                assert backend.sessions.create(new) == plain.create(new)
                for version in range(4):
                    change = Change(
                        number, version, version + 1, [node(version + 2, noise(3000, 10 * who + version))], {b"a": b"%d" % who}
                    )
                    assert list(backend.sessions.commit([change])) == plain.commit([change])
                    assert looked(backend, number) == plain.look(number)
                    assert list(backend.nodes.read(number, [version + 2, 1])) == plain.read(number, [version + 2, 1])
                removal = Removal(number, 4, [3], [b"a"], 0)
                assert backend.sessions.remove(removal) and plain.remove(removal)
                assert looked(backend, number) == plain.look(number)
                assert backend.sessions.find(f"{who} {at}") == number

        in_threads(6, work)
        assert len(backend.sessions.names()) == 36

    def test_looks_beside_a_writer_are_of_one_moment(self, backend: Backend, connect_again: Connect) -> None:
        number = made(backend, "one")
        others = [backend, connect_again()]
        written = threading.Event()

        def write() -> None:
            for version in range(60):
                told = b"%d" % (version + 1)
                some = nodes(3 * version + 1, 3 * version + 3)
                assert commit(backend, Change(number, version, version + 1, some, {b"a": told, b"b": told}))

        def read(other: Backend) -> None:
            known = looked(other, number)
            while not written.is_set():
                known = merged(known, looked(other, number, since_of(known)))
                for look in (known, looked(other, number)):
                    told = b"%d" % look.version
                    assert [row.ordinal for row in look.nodes] == list(range(1, 3 * look.version + 1))
                    assert look.refs == ({b"a": told, b"b": told} if look.version else {})

        def work(who: int) -> None:
            if who < len(others):
                read(others[who])
            else:
                try:
                    write()
                finally:
                    written.set()

        in_threads(3, work)
        assert looked(backend, number).version == 60

    # Processes

    def test_of_processes_that_write_one_version_one_wins(self, backend: Backend, connect: Connect, processes: Processes) -> None:
        number = made(backend, "one")
        versions = 300 if SOAK else 40
        won = processes(appended, connect, number, versions)
        assert sorted(version for each in won for version in each) == list(range(versions))
        winners = {version: b"process %d" % who for who, each in enumerate(won) for version in each}
        assert list(backend.nodes.read(number, range(1, versions + 1))) == [winners[version] for version in range(versions)]

    def test_of_processes_that_make_a_session_of_one_name_one_does(
        self, backend: Backend, connect: Connect, processes: Processes
    ) -> None:
        names = [f"name {at}" for at in range(10)]
        mine = processes(created, connect, names)
        assert sorted(name for each in mine for name in each) == names
        for who, each in enumerate(mine):
            for name in each:
                number = backend.sessions.find(name)
                assert number is not None and looked(backend, number).record == b"process %d" % who
        assert len(backend.sessions.all()) == len(names)

    def test_processes_draw_numbers_that_no_other_has(self, connect: Connect, processes: Processes) -> None:
        numbers = [number for each in processes(drawn, connect, 15) for number in each]
        assert len(set(numbers)) == len(numbers) == 30 * processes.count

    def test_processes_that_are_killed_leave_whole_changes(self, backend: Backend, connect: Connect) -> None:
        number = made(backend, "one")
        acknowledged = 0
        for kill in range(20 if SOAK else 2):
            listen, tell = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(target=write_until_killed, args=(connect, number, tell))
            process.start()
            tell.close()
            for _ in range(5 + kill):
                acknowledged = listen.recv()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            try:
                while True:
                    acknowledged = listen.recv()
            except EOFError:
                listen.close()
            look = looked(backend, number)
            assert look.version in (acknowledged, acknowledged + 1)
            assert len(look.nodes) == 20 * look.version and look.refs == {b"version": b"%d" % look.version}
            assert set(backend.nodes.read(number, range(1, 20 * look.version + 1))) == {noise(2000)}
        last = looked(backend, number).version
        assert commit(backend, Change(number, last, last + 1))  # whoever was killed holds nothing

    # Tenants

    def test_a_tenant_sees_what_is_its_own(self, backend: Backend, tenants: Callable[[str], Backend]) -> None:
        red, blue = tenants("red"), tenants("blue's; --")
        of_red = made(red, "one", nodes(1, 2), tenant="red")
        of_blue = made(blue, "one", nodes(1, 1, b"blue"), tenant="blue's; --")
        of_none = made(backend, "two", nodes(1, 1))
        for each, own in ((red, of_red), (blue, of_blue)):
            assert list(each.sessions.names()) == [(own, "one")] and list(each.sessions.all()) == [(own, False)]
            assert (each.sessions.find("one"), each.sessions.find("two")) == (own, None)
        assert sorted(backend.sessions.names()) == sorted([(of_red, "one"), (of_blue, "one"), (of_none, "two")])
        assert looked(tenants("red"), of_red) == looked(backend, of_red)
        for each, other in ((red, of_blue), (blue, of_red), (red, of_none)):
            before = looked(backend, other)
            assert each.sessions.look(other) is None
            assert list(each.nodes.read(other, [1])) == [None]
            assert not commit(each, Change(other, 0, 1, nodes(5, 5), {b"a": b"1"}))
            assert not each.sessions.remove(Removal(other, 0, [1], [], 0))
            (number,) = each.sessions.draw(1)
            tenant = "red" if each is red else "blue's; --"
            assert each.sessions.create(NewSession(number, "fork", tenant, b"", (), (other, 1), 0)) == "dropped"
            assert looked(backend, other) == before

    def test_a_name_of_several_tenants(self, backend: Backend, tenants: Callable[[str], Backend]) -> None:
        red = made(tenants("red"), "one", tenant="red")
        assert backend.sessions.find("one") == red
        (number,) = backend.sessions.draw(1)
        assert backend.sessions.create(NewSession(number, "one", None, b"")) == "taken"
        blue = tenants("blue")
        made(blue, "one", tenant="blue")
        with pytest.raises(Unsupported, match="tenant="):
            backend.sessions.find("one")
        (number,) = blue.sessions.draw(1)
        assert blue.sessions.create(NewSession(number, "one", "blue", b"")) == "taken"
        assert commit(backend, Change(red, 0, 1, gone=True))  # who sees all may write to all
        assert backend.sessions.find("one") == blue.sessions.find("one")

    def test_names_of_one_tenant_are_not_there_for_another(self, tenants: Callable[[str], Backend]) -> None:
        red, blue = tenants("red"), tenants("blue")
        assert red.sessions.name(b"a", b"1", None) and blue.sessions.name(b"b", b"2", None)
        assert (red.sessions.named(b"b"), blue.sessions.named(b"a")) == (None, None)
        assert (dict(red.sessions.all_named()), dict(blue.sessions.all_named())) == ({b"a": b"1"}, {b"b": b"2"})
        assert not red.sessions.name(b"b", b"3", b"2")
        red.sessions.name(b"b", b"3", None)  # it may be taken, or another one of the same name
        assert blue.sessions.named(b"b") == b"2"

    # Any history

    def test_any_history_is_as_over_dicts(self, backend: Backend, connect_again: Connect) -> None:
        class Here(Histories):
            backends = (backend, connect_again())

        examples = 200 if SOAK else 12
        run_state_machine_as_test(
            Here, settings=settings(max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck))
        )
