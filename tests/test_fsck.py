"""fsck, salvage and stats: what is damaged is found and named, what is sound is saved, and the old store stays as it is."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from sessiontree import IncompatibleStore, MediaItem, Node, SessionStore, SessionTreeError, StoreFailed, codec
from sessiontree.backends import blobs, frames, segment_log
from sessiontree.backends.frames import ENTRY, Base
from sessiontree.backends.segment_log import SegmentLog
from sessiontree.fsck import Report, Stats, checks, fsck, salvage, stats
from sessiontree.fsck.report import Examined
from sessiontree.fsck.salvage import SalvageReport, _Salvage
from sessiontree.fsck.stats import counted
from sessiontree.fsck.survey import Survey, seed_of
from sessiontree.journal import prefix_of
from tests.disk import Disk, Fault
from tests.disk_model import AT, all_seen, digest, golden, grow, let_go, logs_on, open_on, scheme_of
from tests.test_store_disk import (
    _hostile_sessions,
    an_image,
    damageable,
    damages,
    everything,
    log_of,
    records_of,
    text_session,
)
from tests.toy import toy_scheme

SOAK = os.environ.get("SESSIONTREE_SOAK") == "1"


def report_of(disk: Disk) -> Report:
    """What fsck says of a store on a disk of the tests' own."""
    return Examined(Survey(AT, disk).read()).report()


def saved(disk: Disk, new: Path) -> SalvageReport:
    return _Salvage(Examined(Survey(AT, disk).read()), str(new), None).write()


def entries_of(disk: Disk) -> Any:
    log = SegmentLog.open(AT, entry_of=prefix_of, system=disk.copy(), read_only=True)
    try:
        return log.entries()
    finally:
        log.close()


def flipped(disk: Disk, path: str, at: int, mask: int = 1) -> Disk:
    copy = disk.copy()
    copy.files[copy.names[path]][at] ^= mask
    return copy


def segment(number: int, suffix: str = "seg") -> str:
    return frames.segment_path(f"{AT}/segments", number, suffix)


def files_of(disk: Disk) -> dict[str, bytearray]:
    return {path: disk.files[file] for path, file in disk.names.items() if file >= 0 and disk.files[file]}


def whats(report: Report) -> list[str]:
    more = (*report.dangling, *report.wrong_ordinals, *report.cycles, *report.misleading)
    return [*(damage.what for damage in report.damaged), *(finding.what for finding in more)]


def told(report: Report) -> bool:
    """Whether there is anything to tell at all."""
    return bool(
        not report.ok or report.torn_bytes or report.sidecars or report.unreachable or report.strays or report.unreadable_bytes
    )


# what is sound --------------------------------------------------------------------------------------------------------------


def test_a_sound_store_of_everything_is_sound() -> None:
    disk, expected, _ = damageable()
    report = report_of(disk)
    assert report.ok and not told(report)
    assert report.sessions == len(expected) and report.heads == sum(len(each["heads"]) for each in expected.values())
    kinds = entries_of(disk)["kind"]
    assert (report.records, report.nodes) == (len(kinds), int(np.count_nonzero(kinds == codec.NODE)))
    assert report.bytes == sum(len(data) for path, data in files_of(disk).items() if path.endswith(".seg"))
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_sound_stores_of_every_family_are_sound_and_are_saved_as_they_are(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk, segment_bytes=20_000) as store:
        for name, history in golden():
            grow(store.create(name, scheme=scheme_of(name, history)), history)
        before = all_seen(store)
    assert not told(report_of(disk))
    made = saved(disk, tmp_path / "new")
    assert (made.sessions, made.nodes) == (len(before), made.report.nodes)
    assert not (made.lost_nodes or made.lost_sessions or made.lost_heads or made.cut_forks)
    with SessionStore.open(tmp_path / "new") as store:
        assert all_seen(store) == before
    assert not told(fsck(tmp_path / "new"))


def test_a_killed_writers_store_is_sound_and_its_torn_tail_is_no_damage() -> None:
    disk = Disk()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    nodes = [session.append(session.root, [number] * 20) for number in range(10)]
    killed = disk.copy()
    store.close()
    report = report_of(killed)
    assert report.ok and not told(report) and report.nodes == 10
    path = segment(1)
    end = len(bytes(killed.content(".seg")).rstrip(b"\0"))
    for cut in range(1, 60):  # into the last commit, which nobody vouches for
        torn = killed.copy()
        torn.files[torn.names[path]][end - cut :] = bytes(cut + 1000)
        report = report_of(torn)
        assert report.ok and report.nodes == 9
        assert report.torn_bytes == len(bytes(torn.content(".seg")).rstrip(b"\0")) - int(_end_of(torn, nodes[8]))
    report = report_of(flipped(killed, path, end + 500, 7))  # in what was allocated ahead
    assert report.ok and report.nodes == 10 and report.torn_bytes == 501
    report = report_of(flipped(killed, path, int(_end_of(killed, nodes[7])) - 30))
    assert not report.ok and not report.torn_bytes and report.damaged[0].node_id == nodes[7].id
    assert "what is left of it says" in report.damaged[0].what  # there is no sidecar yet


def _end_of(disk: Disk, node: Node) -> int:
    """Where the frame of a node's record ends."""
    row = next(row for row in entries_of(disk) if row["id"].tobytes() == node.id)
    return int(row["offset"]) + int(row["length"]) + frames.CRC.size


# every byte -----------------------------------------------------------------------------------------------------------------


def test_each_byte_of_a_store_that_is_flipped_is_found() -> None:
    """All of a store that has one of everything, looked at whole each time; what is wrong is told from what can be made again."""
    rng = random.Random(5)
    disk, _, _ = damageable()
    step = 1 if SOAK else 7
    for path, data in files_of(disk).items():
        for at in range(rng.randrange(step), len(data), step):
            report = report_of(flipped(disk, path, at, 1 << rng.randrange(8) if at % 2 else rng.randrange(1, 256)))
            if path.endswith(".idx"):
                assert report.ok and [finding.path for finding in report.sidecars] == [os.path.relpath(path, AT)], at
            else:
                assert not report.ok and not report.torn_bytes and not report.sidecars, (path, at)
                assert all(damage.path == os.path.relpath(path, AT) for damage in report.damaged), (path, at)
                assert any(damage.offset is None or damage.offset - 60 <= at for damage in report.damaged), (path, at)


def large(count: int) -> Disk:
    """A store of so many nodes in segments of a few, with heads and forks, closed."""
    rng = random.Random(count)
    disk = Disk()
    with open_on(disk, segment_bytes=900, durability="relaxed") as store:
        sessions = [text_session(store, f"s{number}") for number in range(5)]
        made: list[list[Node]] = [[session.root] for session in sessions]
        for number in range(count):
            which = rng.randrange(len(sessions))
            session, nodes = sessions[which], made[which]
            parent = nodes[-1] if rng.random() < 0.7 else rng.choice(nodes[-50:])
            nodes.append(session.append(parent, rng.choices(range(2**31), k=rng.randrange(1, 9)), metadata={"n": number}))
            if rng.random() < 0.1:
                session.set_head("main", nodes[-1])
            if rng.random() < 0.02:
                sessions.append(store.fork(session, nodes[-1], f"fork {number}"))
                made.append([nodes[-1]])
            if number % 4 == 0:
                store.flush()
    return disk


def part_of(disk: Disk, number: int) -> Disk:
    """One segment of a store with the one behind it, as if nothing else were there."""
    names = (f"{AT}/FORMAT", f"{AT}/segments", segment(number), segment(number, "idx"), segment(number + 1))
    kept = {path: disk.names[path] for path in names if path in disk.names}
    return Disk({AT: -1, **kept}, {file: bytearray(disk.files[file]) for file in kept.values() if file >= 0})


def every_flip(disk: Disk, shard: int, shards: int, step: int) -> int:
    """Flip bytes of every segment and sidecar of a store, and look at that segment alone: how many were found."""
    rng = random.Random(shard)
    survey = Survey(AT, disk)
    scan = survey.scan()
    base = Base()
    found = 0
    for number in scan.segments():
        rows, stretches = survey.look(scan, number)
        assert not stretches and not survey.sidecars and len(rows)
        if number % shards == shard:
            part = part_of(disk, number)
            alone = Survey(AT, part)
            for path in (segment(number), segment(number, "idx")):
                data = part.content(path)
                for at in range(rng.randrange(step), len(data), step):
                    mask = 1 << rng.randrange(8) if at % 2 else rng.randrange(1, 256)
                    data[at] ^= mask
                    again = alone.scan(base)
                    next(again.segments())
                    sound, stretches = alone.look(again, number)
                    if path.endswith(".idx"):
                        assert alone.sidecars and not stretches and sound.tobytes() == rows.tobytes(), (path, at)
                    else:
                        assert stretches and not alone.sidecars and set(map(bytes, sound)) <= set(map(bytes, rows)), (path, at)
                    data[at] ^= mask
                    alone.stretches.clear()
                    alone.sidecars.clear()
                    found += 1
        base = Base(number + 1, scan.at.sequence)
    assert not scan.torn
    return found


def test_each_byte_of_some_hundred_nodes_that_is_flipped_is_found() -> None:
    disk = large(400)
    assert not told(report_of(disk))
    assert every_flip(disk, 0, 1, 13) > 5000


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(16))
def test_each_byte_of_ten_thousand_nodes_that_is_flipped_is_found(shard: int) -> None:
    disk = large(10_000)
    size = sum(map(len, files_of(disk).values()))
    assert not told(report_of(disk))
    assert every_flip(disk, shard, 16, 1) > size // 20


def test_each_byte_of_features_that_is_flipped_is_found(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s") as store:
        session = store.create("s", scheme=toy_scheme())
        item = an_image()
        session.append(session.root, _around(item), media=[item])
        store.put_features(item, {"pixels": np.arange(40, dtype=np.float32)})
    assert not told(fsck(tmp_path / "s"))
    [name] = [path for path in (tmp_path / "s" / "blobs").rglob("*") if path.is_file()]
    whole = name.read_bytes()
    for at in range(0, len(whole), 1 if SOAK else 7):
        name.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        [damage] = fsck(tmp_path / "s").damaged
        assert damage.path == str(name.relative_to(tmp_path / "s"))
    name.write_bytes(whole[:-1])
    assert len(fsck(tmp_path / "s").damaged) == 1


def _around(item: MediaItem) -> list[int]:
    [(start, length)] = item.spans
    return list(range(100, 100 + start + length + 1))


# names ----------------------------------------------------------------------------------------------------------------------


def descendants(disk: Disk) -> dict[tuple[int, int], set[bytes]]:
    """Of each own node of each session, (session, ordinal), the ids of all that hangs on it, in forks too; in the slowest way."""
    above: dict[tuple[int, int], tuple[int, int]] = {}
    ids: dict[tuple[int, int], bytes] = {}
    tips: dict[int, tuple[int, int]] = {}
    for record in map(codec.decode, records_of(disk)):
        if isinstance(record, codec.SessionRecord) and record.tip is not None:
            tips[record.session] = record.tip
        if isinstance(record, codec.NodeRecord):
            ids[record.session, record.ordinal] = record.id
            above[record.session, record.ordinal] = record.session, record.parent

    def path_of(session: int) -> list[tuple[int, int]]:
        """A fork's path by depth, the root first."""
        if session not in tips:
            return [(session, 0)]
        at = real(*tips[session])
        path = [at]
        while at in above:
            at = real(*above[at])
            path.append(at)
        return path[::-1]

    def real(session: int, ordinal: int) -> tuple[int, int]:
        return (session, ordinal) if (session, ordinal) in ids else path_of(session)[ordinal]

    found: dict[tuple[int, int], set[bytes]] = {place: set() for place in ids}
    for place, node_id in ids.items():
        at = place
        while at in above:
            at = real(*above[at])
            if at in ids:
                found[at].add(node_id)
    return found


@pytest.mark.parametrize("sidecars", [True, False])
def test_damage_is_named_with_all_that_hangs_on_it(sidecars: bool) -> None:
    disk, _, _ = damageable()
    hang = descendants(disk)
    if not sidecars:
        for name in [name for name in disk.names if name.endswith(".idx")]:
            disk.unlink(name)
    named = 0
    for row in entries_of(disk):
        if row["kind"] != codec.NODE or int(row["length"]) < 80:
            continue
        report = report_of(flipped(disk, segment(int(row["segment"])), int(row["offset"]) + 70))
        [damage] = report.damaged
        assert (damage.segment, damage.offset, damage.node_id) == (row["segment"], row["offset"], row["id"].tobytes())
        assert damage.session_id is not None and f"node {row['ordinal']} of session {damage.session_id!r}" in damage.what
        assert ("what is left" in damage.what) == (not sidecars)
        assert set(damage.dependents) == hang[int(row["session"]), int(row["ordinal"])]
        assert len(set(damage.dependents)) == len(damage.dependents)
        named += 1
        plain = json.loads(json.dumps(report.to_dict()))["damaged"][0]
        assert plain["node_id"] == row["id"].tobytes().hex() and len(plain["dependents"]) == len(damage.dependents)
    assert named > 20


def test_what_is_left_of_a_record_is_believed_as_far_as_it_fits() -> None:
    """Without sidecars: an id that is damaged itself does not condemn the children, and an ordinal that cannot be names nobody."""
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.root
        path = [node := session.append(node, [number] * 30) for number in range(6)]
        side = session.append(path[3], [70] * 30)
        fork = store.fork(session, path[4], "fork")
        last = fork.append(path[4], [80] * 30)
    disk.unlink(segment(1, "idx"))
    row = next(row for row in entries_of(disk) if row["id"].tobytes() == path[2].id)
    offset = int(row["offset"])
    behind = {node.id for node in (*path[3:], side, last)}
    report = report_of(flipped(disk, segment(1), offset + 30))  # in its id
    [damage] = report.damaged
    assert damage.node_id != path[2].id and set(damage.dependents) == behind
    # Its ordinal, far too great, or that of another node; its parent, behind it.
    for at, mask in ((offset + 9, 255), (offset + 12, 1), (offset + 17, 4)):
        report = report_of(flipped(disk, segment(1), at, mask))
        [damage] = report.damaged
        assert damage.node_id is None and damage.session_id is None and damage.dependents == ()
        assert not report.wrong_ordinals
        fork_of, missing = sorted(report.dangling, key=lambda finding: "fork" not in finding.what)
        assert missing.what == "node 3 of session 's' is missing" and set(missing.dependents) == behind
        assert fork_of.what == "session 'fork' is a fork of node 5 of session 's', which rests on damage"
    row = next(row for row in entries_of(disk) if row["id"].tobytes() == path[5].id)  # a leaf: nothing misses it
    report = report_of(unnamed_in(disk, int(row["offset"])))
    assert len(report.damaged) == 1 and not report.dangling and not report.wrong_ordinals
    assert report.unknown_bytes == int(row["length"]) + frames.HEAD.size and not report.lossless


def unnamed_in(disk: Disk, offset: int) -> Disk:
    """A copy in which nothing says any more what a record was, or where: neither itself nor its head."""
    return flipped(flipped(disk, segment(1), offset - 12, 255), segment(1), offset + 65)


def test_a_record_that_is_there_once_more_is_not_missed(tmp_path: Path) -> None:
    """An interrupted writer may tell of the same twice."""
    (start, one, two, *_), nodes = _chain()
    disk = log_of([start, one, one, two])
    first, second = (int(row["offset"]) for row in entries_of(disk)[1:3])
    for offset in (first, second):
        broken = flipped(disk, segment(1), offset + 65)
        report = report_of(broken)
        assert [damage.dependents for damage in report.damaged] == [()] and not report.dangling
        with saved_store(broken, tmp_path / "new") as (made, store):
            assert made.nodes == 2 and [node.id for node in store.get("s").tree][1:] == [node.id for node in nodes[:2]]


def test_each_node_is_named_under_the_nearest_damage_above_it() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.root
        path = [node := session.append(node, [number] * 30) for number in range(10)]
        store.flush()
    rows = {row["ordinal"]: row for row in entries_of(disk) if row["kind"] == codec.NODE}
    for ordinal in (3, 6):
        disk = flipped(disk, segment(1), int(rows[ordinal]["offset"]) + 70)
    first, second = report_of(disk).damaged
    assert (first.node_id, second.node_id) == (path[2].id, path[5].id)
    assert first.dependents == (path[3].id, path[4].id) and second.dependents == tuple(node.id for node in path[6:])


def test_a_session_whose_record_is_damaged_takes_its_nodes_and_forks_along() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session, other = text_session(store), text_session(store, "other")
        node = session.append(session.append(session.root, [1]), [2])
        fork = store.fork(session, node, "fork")
        last = fork.append(node, [3])
        kept = other.append(other.root, [4])
        session.set_head("main", node)
    row = entries_of(disk)[0]
    report = report_of(flipped(disk, segment(1), int(row["offset"]) + 90))
    [damage] = report.damaged
    assert "the record of session 's'" in damage.what and damage.node_id is None
    assert node.parent is not None
    assert set(damage.dependents) == {node.parent.id, node.id, last.id} and kept.id not in damage.dependents
    assert [finding.what for finding in report.dangling] == ["session 'fork' is a fork of node 2 of session 's', which is missing"]


def test_heads_and_forks_of_what_is_damaged_are_dangling() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        one = session.append(session.root, [1] * 30)
        two = session.append(one, [2] * 30)
        for name, node in (("root", session.root), ("one", one), ("two", two)):
            session.set_head(name, node)
        store.fork(session, two, "fork")
    row = next(row for row in entries_of(disk) if row["id"].tobytes() == one.id)
    report = report_of(flipped(disk, segment(1), int(row["offset"]) + 80))
    assert [finding.what for finding in report.dangling] == [
        "session 'fork' is a fork of node 2 of session 's', which rests on damage",
        "head 'one' of session 's' is at node 1, which is damaged",
        "head 'two' of session 's' is at node 2, which rests on damage",
    ]
    assert [finding.node_id for finding in report.dangling] == [two.id, one.id, two.id]


# what contradicts itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(24))
def test_records_that_contradict_each_other_are_found(number: int) -> None:
    """Whatever a store refuses to read, and what it reads in one of two ways."""
    given = list(_hostile_sessions())[number]
    disk = log_of([each if isinstance(each, bytes) else codec.encode(each) for each in given])
    try:
        with open_on(disk.copy()) as store:
            all_seen(store)
        readable = True
    except SessionTreeError:
        readable = False
    report = report_of(disk)
    assert report.ok == (number in (20, 23)) and (readable or not report.ok)


def _chain() -> tuple[list[bytes], list[Node]]:
    with SessionStore.in_memory() as store:
        session = text_session(store)
        node = session.root
        nodes = [node := session.append(node, [number]) for number in range(4)]
        root = session.root
        start = codec.SessionRecord(
            0, "s", root.scheme.name, tuple(sorted(root.scheme.params.items())), root.namespace, "", session.tree.limits, root.id
        )
        return [codec.encode(start), *[codec.encode_node(0, n + 1, n, each) for n, each in enumerate(nodes)]], nodes


def test_wrong_ordinals_cycles_and_orphans_are_told_apart() -> None:
    (start, one, two, three, four), nodes = _chain()

    def at(record: bytes, ordinal: int, parent: int) -> bytes:
        return record[:9] + ordinal.to_bytes(4, "big") + record[13:14] + parent.to_bytes(4, "big") + record[18:]

    assert report_of(log_of([start, one, two, three, four])).ok
    skipped = report_of(log_of([start, one, two, at(three, 7, 2)]))
    assert [finding.what for finding in skipped.wrong_ordinals] == ["no node of session 's' is 3 to 6"]
    far = report_of(log_of([start, one, two, at(three, 2**31, 2)]))
    assert [finding.what for finding in far.wrong_ordinals] == [f"no node of session 's' is 3 to {2**31 - 1}"]
    twice = report_of(log_of([start, one, two, at(three, 2, 1)]))
    assert "there twice" in twice.wrong_ordinals[0].what and twice.wrong_ordinals[0].node_id == nodes[2].id
    low = report_of(log_of([start, one, at(two, 0, 0)]))
    assert low.wrong_ordinals and low.cycles
    cycle = report_of(log_of([start, one, at(two, 2, 3), at(three, 3, 2)]))
    assert [finding.node_id for finding in cycle.cycles] == [nodes[1].id] and cycle.damaged[0].dependents == (nodes[2].id,)
    orphans = report_of(log_of([start, one, three, four]))
    assert [finding.what for finding in orphans.dangling] == ["node 2 of session 's' is missing"]
    assert orphans.dangling[0].dependents == (nodes[2].id, nodes[3].id)
    none = report_of(log_of([one, two]))
    assert [finding.what for finding in none.dangling] == ["the record of session 0 is missing"]
    again = report_of(log_of([start, one, one, two, start]))
    assert again.ok and (again.repeated, again.nodes, again.sessions, again.records) == (2, 2, 1, 5)


def test_records_may_come_before_what_they_rest_on() -> None:
    """As they may after nodes were moved within the log."""
    disk, _, _ = damageable()
    records = records_of(disk)
    sound = report_of(disk)
    for seed in range(20 if SOAK else 4):
        shuffled = list(records)
        random.Random(seed).shuffle(shuffled)
        report = report_of(log_of(shuffled))
        assert (report.ok, report.nodes, report.damaged, report.dangling) == (True, sound.nodes, (), ())


@pytest.mark.parametrize("changed", [{"role": "tool"}, {"key": "k"}, {"data": bytes(8)}, {"id": bytes(32)}])
def test_content_is_checked_against_the_id(changed: dict[str, Any]) -> None:
    disk, _, _ = damageable()
    records = records_of(disk)
    at = next(n for n, data in enumerate(records) if codec.entry_of(data).kind == codec.NODE and len(data) > 300)
    node = codec.decode(records[at])
    assert isinstance(node, codec.NodeRecord)
    hostile = node._replace(**changed)
    if "data" in changed:
        hostile = node._replace(data=bytes(len(node.data)))
    records[at] = codec.encode(hostile)
    report = report_of(log_of(records))
    assert report.damaged[0].node_id == hostile.id and "holds the content of" in report.damaged[0].what


def test_positions_are_checked_against_the_scheme_and_the_parent() -> None:
    disk, _, _ = damageable()
    records = records_of(disk)
    at = [n for n, data in enumerate(records) if codec.entry_of(data).kind == codec.NODE][2]
    node = codec.decode(records[at])
    assert isinstance(node, codec.NodeRecord)
    state = node.state
    for changed, what in (
        (state._replace(num_tokens=state.num_tokens + 1), "it begins after"),
        (state._replace(next_position=float(state.next_position)), "no such numbers"),
        (state._replace(carried=(1, 2, 3, 4, 5)), "carries 5 numbers"),
    ):
        records[at] = codec.encode(node._replace(state=changed))
        report = report_of(log_of(records))
        assert [damage.node_id for damage in report.damaged][:1] == [node.id] and what in report.damaged[0].what
        assert len(report.damaged[0].dependents) > 5


def test_a_root_and_the_forks_of_it_are_checked() -> None:
    (start, one, *_), nodes = _chain()
    record = codec.decode(start)
    assert isinstance(record, codec.SessionRecord)
    report = report_of(log_of([codec.encode(record._replace(root_id=bytes(32)))]))
    assert "holds the content of" in report.damaged[0].what
    fork = record._replace(session=1, session_id="f", scheme="", params=())
    report = report_of(log_of([start, codec.encode(fork._replace(tip=(1, 0)))]))
    assert len(report.cycles) == 1 and not report.dangling and not report.ok
    report = report_of(log_of([codec.encode(record._replace(root_id=bytes(32))), one, codec.encode(fork._replace(tip=(0, 1)))]))
    [damage] = report.damaged  # the fork is as it should be
    assert damage.session_id == "s" and damage.dependents == (nodes[0].id,)


def test_a_node_where_a_fork_has_its_path_stands_in_nobodys_way() -> None:
    (start, one, two, three, _), _ = _chain()
    record = codec.decode(start)
    assert isinstance(record, codec.SessionRecord)
    fork = codec.encode(record._replace(session=1, session_id="f", scheme="", params=(), tip=(0, 2)))
    wrong, right = codec.renumbered(three, 1, 2, 1), codec.renumbered(three, 1, 3, 2)
    head = codec.encode(codec.HeadRecord(1, "main", 2, 1))
    report = report_of(log_of([start, one, two, fork, wrong, right, head]))
    assert [finding.what for finding in report.wrong_ordinals] == ["node 2 stands where its first node can be 3"]
    assert len(report.damaged) == 1 and "holds the content of" in report.damaged[0].what and not report.dangling
    assert report.damaged[0].dependents == () and report.nodes == 3


def test_the_copy_of_a_fork_may_name_its_first_node_otherwise() -> None:
    """As compaction does, by the session that made it; it has to be the same node."""
    (start, one, two, three, _), _ = _chain()
    record = codec.decode(start)
    assert isinstance(record, codec.SessionRecord)
    fork = record._replace(session_id="f", scheme="", params=())
    first, second = fork._replace(session=1, session_id="f", tip=(0, 3)), fork._replace(session=2, session_id="g", tip=(1, 2))
    for tip, same in (((0, 2), True), ((0, 1), False), ((0, 9), False)):
        report = report_of(log_of([start, one, two, three, *map(codec.encode, (first, second, second._replace(tip=tip)))]))
        assert report.ok == same and report.repeated == same and len(report.wrong_ordinals) == (not same)


def test_what_is_no_record_is_damage_and_what_a_later_version_wrote_is_counted() -> None:
    disk, _, _ = damageable()
    records = records_of(disk)
    for change in ((codec.NODE, 2), (9, 2), (200, 255)):
        later = bytes((records[-1][0], *change)) + records[-1][3:]
        report = report_of(log_of([*records, later, later[:3]]))
        assert report.ok and report.unknown_records == 2
    foreign = Disk()
    log = SegmentLog.open(AT, entry_of=lambda record: bytes(frames.PREFIX_SIZE), system=foreign)
    for record in (*records, b"\x98\x02\x01 no record", b""):
        log.enqueue([(record, bytes(frames.PREFIX_SIZE))])
    log.close()
    for name in [name for name in foreign.names if name.endswith(".idx")]:
        foreign.unlink(name)
    report = report_of(foreign)
    assert len(report.damaged) == 2 and report.records == len(records) + 2


# sidecars, FORMAT, and what else lies there ---------------------------------------------------------------------------------


def test_a_sidecar_with_wrong_entries_is_misleading() -> None:
    disk, _, _ = damageable()
    survey = Survey(AT, disk)
    scan = survey.scan()
    scan.walk()
    rows = np.frombuffer(b"".join(scan.take()), ENTRY).copy()
    start, end, _ = scan.walked[0]
    rows = rows[rows["segment"] == 1][: end.records]
    path = segment(1, "idx")
    for field, value in (("ordinal", 99), ("parent", 88), ("offset", 77), ("id", bytes(32))):
        wrong = rows.copy()
        wrong[field][len(rows) // 2] = value
        copy = disk.copy()
        copy.files[copy.names[path]][:] = frames.block_of(survey.keys, start, end, wrong)
        report = report_of(copy)
        assert not report.ok and [finding.path for finding in report.misleading] == ["segments/00000001.idx"]
        assert not report.damaged and not report.sidecars
    later = start._replace(sequence=start.sequence + 3)
    for data in (frames.block_of(survey.keys, later, end, rows), frames.block_of(survey.keys, start, end, rows) + b"x"):
        copy.files[copy.names[path]][:] = data  # readers pass over these
        report = report_of(copy)
        assert report.ok and [finding.path for finding in report.sidecars] == ["segments/00000001.idx"]
    copy.files[copy.names[path]][:] = frames.block_of(survey.keys, start, end, rows)
    assert not told(report_of(copy))


def test_a_store_without_its_format_is_read_by_what_frames_say(tmp_path: Path) -> None:
    disk, expected, _ = damageable()
    sound = report_of(disk)
    for how in ("gone", "empty", "other", "short"):
        copy = disk.copy()
        data = copy.content("FORMAT")
        if how == "gone":
            copy.unlink(f"{AT}/FORMAT")
        else:
            data[:] = {"empty": b"", "other": b"sessiontree log 9 whatever 00000000\n", "short": bytes(data[:-1])}[how]
        report = report_of(copy)
        assert [damage.path for damage in report.damaged] == ["FORMAT"]
        assert (report.nodes, report.records) == (sound.nodes, sound.records)
        saved(copy, tmp_path / how)
        with SessionStore.open(tmp_path / how) as store:
            assert all_seen(store) == expected


def test_what_seeds_a_checksum_is_found_from_it() -> None:
    rng = random.Random(3)
    for length in range(40):
        data, seed = rng.randbytes(length), rng.getrandbits(32)
        assert seed_of(data, crc32(data, seed)) == seed


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "FORMAT").write_text("something else")
    with SessionStore.open(tmp_path / "later") as store:
        text_session(store)
    body = (tmp_path / "later" / "FORMAT").read_bytes().rpartition(b" ")[0].replace(b" 1 ", b" 2 ")
    (tmp_path / "later" / "FORMAT").write_bytes(body + b" %08x\n" % crc32(body))
    before = (tmp_path / "later" / "FORMAT").read_bytes()
    for name in ("empty", "other", "later", "nowhere", "file"):
        for call in (fsck, stats, lambda path: salvage(path, tmp_path / "new")):
            with pytest.raises((IncompatibleStore, StoreFailed)):
                call(tmp_path / name)
    assert (tmp_path / "later" / "FORMAT").read_bytes() == before and not (tmp_path / "new").exists()


def test_what_nothing_needs_is_told_and_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        session = store.create("s", scheme=toy_scheme())
        item, other = an_image(1), an_image(2)
        session.append(session.root, _around(item), media=[item])
        store.put_features(item, np.arange(3))
        store.put_features(other, np.arange(4))
        store.alias_media("known", item)
        store.alias_media("unknown", other)
        store.alias_media("dropped", other)
        store.drop_alias("dropped")
    (path / "blobs" / "0.tmp").write_bytes(b"half")
    (path / "segments" / "00000001.idx.new").write_bytes(b"half")
    (path / "notes.txt").write_text("mine")
    report = fsck(path)
    assert report.ok and report.strays == ("notes.txt", "segments/00000001.idx.new", "blobs/0.tmp")
    features, alias = report.unreachable
    name = blobs.file_name(other.content())
    assert features.path == f"blobs/{name[:2]}/{name}" and "'unknown'" in alias.what
    assert (report.aliases, report.features) == (2, 2)


# helpers --------------------------------------------------------------------------------------------------------------------


IGNORANT = """
from sessiontree import UnknownScheme
from sessiontree.fsck import checks
def unknown(name, **params):
    raise UnknownScheme(name)
checks.scheme = unknown
checks.serve()
"""


@pytest.mark.parametrize(("processes", "known"), [(2, True), (3, True), (2, False)])
def test_helpers_find_what_one_process_finds(processes: int, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they do not know a scheme, as it may be one that a program made for itself."""
    answers: list[bool] = []
    receive = checks._Helper.receive

    def noted(self: Any) -> Any:
        answer = receive(self)
        answers.append(answer is not None)
        return answer

    do = checks.Checks.do

    def patiently(self: checks.Checks, *given: Any) -> None:
        for *_, helper, found in self._open:
            assert found is not None or helper.answers(60)
        do(self, *given)

    monkeypatch.setattr(checks._Helper, "receive", noted)
    monkeypatch.setattr(checks.Checks, "do", patiently)
    if not known:
        monkeypatch.setattr(checks, "_HELPER", IGNORANT)
    path = tmp_path / "s"
    rng = random.Random(processes)
    with logs_on(segment_log._SYSTEM, segment_bytes=20_000):
        store = SessionStore.open(path, durability="relaxed")
    with store:
        session = store.create("s", scheme=toy_scheme())
        node = session.root
        for number in range(600):
            node = session.append(node if number % 100 else session.root, [number] * rng.randrange(1, 40))
            if number % 50 == 0:
                item = an_image(number)
                session.append(node, _around(item), media=[item])
                session.set_head(f"head {number % 7}", node)
                store.flush()
        store.put_features(item, np.arange(10))
        store.alias_media("known", item)
    assert len(list((path / "segments").glob("*.seg"))) > 5
    for damage in (False, True):
        if damage:
            for file in sorted((path / "segments").glob("*.seg"))[1:4]:
                data = bytearray(file.read_bytes())
                data[len(data) // 2] ^= 4
                file.write_bytes(data)
        alone, together = Survey(path).read(), Survey(path, None, None, processes).read()
        assert Examined(alone).report() == Examined(together).report() == fsck(path, processes=processes)
        assert stats(path, processes=processes) == stats(path)
        for name in ("rows", "parents", "starts", "stops"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together, name))
        for name in ("bad", "heads", "openings", "identities", "contents", "aliases"):
            assert getattr(alone, name) == getattr(together, name), name
        assert Examined(alone).report().ok != damage
    assert set(answers) == {known} and (len(answers) > 40 or not known)  # a helper that cannot is not asked again


def test_tasks_of_helpers_that_die_are_done_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with logs_on(segment_log._SYSTEM, segment_bytes=5_000):
        store = SessionStore.open(path)
    with store:
        session = text_session(store)
        for number in range(500):
            session.append(session.root, [number] * 10)
    sound = fsck(path, processes=1)
    for code in ("", "import sys; sys.stdin.buffer.read(100); sys.exit(3)", "print('no answer'); import sys; sys.stdin.read()"):
        monkeypatch.setattr(checks, "_HELPER", code)
        assert fsck(path, processes=3) == sound
    monkeypatch.setattr(sys, "executable", "")
    assert fsck(path, processes=3) == sound


# it only looks --------------------------------------------------------------------------------------------------------------


class OnlyRead(Disk):
    """A disk that is read and nothing else."""

    def open(self, path: str, flags: int) -> int:
        assert flags == os.O_RDONLY, path
        return super().open(path, flags)

    def _call(self, name: str) -> Any:
        raise AssertionError(name)

    def flock(self, fd: int, *, shared: bool = False) -> bool:
        assert shared and self._open_file(fd) != self.names[f"{AT}/LOCK"]
        return super().flock(fd, shared=True)


def test_the_store_is_only_read(tmp_path: Path) -> None:
    disk, _, _ = damageable()
    for copy, _ in damages(disk, random.Random(7), 40):
        state = OnlyRead(copy.names, copy.files)
        content = {file: bytes(data) for file, data in state.files.items()}
        Examined(Survey(AT, state).read()).report()
        assert not state.trace and not state._handles and content == {file: bytes(data) for file, data in state.files.items()}
    path = tmp_path / "s"
    with SessionStore.open(path) as store:  # which holds the lock
        everything(store)
        store.put_features(an_image(), np.arange(3))
        store.flush()

        def state_of() -> dict[str, Any]:
            return {str(file): (file.stat().st_mtime_ns, file.is_file() and file.read_bytes()) for file in path.rglob("*")}

        before = state_of()
        fsck(path)
        stats(path)
        salvage(path, tmp_path / "new")
        assert state_of() == before


@pytest.mark.parametrize("durability", ["commit", "group", "relaxed"])
def test_it_works_beside_a_process_that_writes(durability: Any, tmp_path: Path) -> None:
    done = threading.Event()
    flushed = [0]
    with logs_on(segment_log._SYSTEM, segment_bytes=20_000):
        store = SessionStore.open(tmp_path / "s", durability=durability)

    def write() -> None:
        session = text_session(store)
        node = session.root
        number = 0
        while not done.is_set():
            node = session.append(node if node.depth < 50 else session.root, [number] * 20)
            session.set_head("main", node)
            number += 1
            if number % 20 == 0:
                store.flush()
                flushed[0] = number
            time.sleep(0.0005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = looks = 0
        deadline = time.monotonic() + 30
        while (last < (5000 if SOAK else 200) or looks < 5) and time.monotonic() < deadline:
            time.sleep(0.02)
            before = flushed[0]
            if before:
                report = fsck(tmp_path / "s")
                assert report.ok, whats(report)
                assert report.nodes >= max(before, last)
                last = report.nodes
                looks += 1
    finally:
        done.set()
        writer.join()
        store.close()
    assert last >= 200 and looks >= 5 and not told(fsck(tmp_path / "s"))


class TakenBack(Disk):
    """A disk on which a writer takes back its last frame after it was looked at once."""

    def close(self, fd: int) -> None:
        path = self._open_file(fd)
        super().close(fd)
        if path == self.names[segment(1)] and self.left:
            self.left -= 1
            if not self.left:
                self.files[path][self.end :] = b""

    left = 0
    end = 0


def test_what_a_writer_takes_back_meanwhile_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    store = open_on(disk, durability="commit")
    session = text_session(store)
    one = session.append(session.root, [1])
    session.append(one, [2])
    killed = disk.copy()
    store.close()
    taken = TakenBack(killed.names, killed.files)
    taken.end = _end_of(killed, one)
    calls: list[Survey] = []
    real = Survey.__init__

    def on_disk(self: Survey, path: Any, *_: Any, **options: Any) -> None:
        calls.append(self)
        real(self, path, taken, **options)

    monkeypatch.setattr(Survey, "__init__", on_disk)
    taken.left = 2  # its size; then the scan
    report = fsck(AT)
    assert len(calls) == 2 and report.ok and report.nodes == 1


def test_what_a_writer_moves_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s") as store:
        session = text_session(store)
        session.append(session.root, [1])
    survey = Survey(tmp_path / "s").read()
    wrong = survey.rows.copy()
    wrong["crc"][1] ^= 1
    path = str(tmp_path / "s" / "segments" / "00000001.seg")
    with pytest.raises(checks.Moved):
        checks.check(checks.Task(path, survey.keys.seed, wrong, [None] * len(wrong), {}, False), survey.system)
    real, moves = Survey.read, [checks.Moved(path, 0), FileNotFoundError(path), None]

    def moved(self: Survey) -> Survey:
        if (error := moves.pop(0)) is not None:
            raise error
        return real(self)

    monkeypatch.setattr(Survey, "read", moved)
    assert fsck(tmp_path / "s").nodes == 1 and not moves
    moves += [checks.Moved(path, 0)] * 3
    with pytest.raises(StoreFailed, match="faster"):
        fsck(tmp_path / "s")


def test_a_store_is_read_once_as_it_was_when_that_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that goes on meanwhile is no reason to read all again."""
    disk = Disk()
    place = Survey._place

    with open_on(disk, segment_bytes=500) as store:
        session = text_session(store)
        for number in range(20):
            session.append(session.root, [number])
            store.flush()

        def written_to(self: Survey) -> None:
            for number in range(20, 40):
                session.append(session.root, [number])
                store.flush()
            place(self)

        monkeypatch.setattr(Survey, "_place", written_to)
        monkeypatch.setattr(Survey, "_all_first", lambda self: pytest.fail("read again"))
        report = report_of(disk)
        assert report.ok and report.nodes == 20


class BadSectors(Disk):
    """A disk that cannot read some pages."""

    bad: frozenset[int] = frozenset()

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        if self._open_file(fd) == self.names[segment(1)] and any(
            offset < page + 4096 and page < offset + length for page in self.bad
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, length, offset)


def test_pages_that_cannot_be_read_are_damage_and_the_rest_is_saved(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        nodes = [session.append(session.root, [number] * 200) for number in range(100)]
    bad = BadSectors(disk.names, disk.files)
    bad.bad = frozenset((20_480, 40_960))
    report = report_of(bad)
    assert not report.ok and report.unreadable_bytes >= 2 * 4096
    lost = {damage.node_id for damage in report.damaged}
    assert 8 <= len(lost) <= 14 and not report.dangling
    saved(bad, tmp_path / "new")
    with SessionStore.open(tmp_path / "new") as store:
        assert {node.id for node in store.get("s").tree} == {session.root.id, *(node.id for node in nodes)} - lost


def test_memory_is_that_of_an_index(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s", durability="relaxed") as store:
        session = text_session(store)
        for number in range(400):
            session.append(session.root, np.full(20_000, number, np.int32))
    fsck(tmp_path / "s")
    tracemalloc.start()
    try:
        report = fsck(tmp_path / "s")
        assert report.bytes > 30_000_000 and report.ok
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s", durability="relaxed") as store:
        session = text_session(store)
        for number in range(100):
            session.append(session.root, np.full(20_000, number, np.int32))
        store.put_features(an_image(), np.arange(100_000))

    def watch(call: Any) -> None:
        steps: list[tuple[int, int]] = []
        call(lambda done, total: steps.append((done, total)))
        assert len({total for _, total in steps}) == 1 and len(steps) > 5
        assert [done for done, _ in steps] == sorted(done for done, _ in steps) and steps[-1][0] == steps[-1][1]

    watch(lambda progress: fsck(tmp_path / "s", progress=progress))
    watch(lambda progress: stats(tmp_path / "s", progress=progress))
    watch(lambda progress: salvage(tmp_path / "s", tmp_path / "new", progress=progress))


# saving ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def saved_store(disk: Disk, new: Path) -> Iterator[tuple[SalvageReport, SessionStore]]:
    made = saved(disk, new)
    store = SessionStore.open(new)
    try:
        yield made, store
    finally:
        store.close()
        shutil.rmtree(new)


@pytest.mark.parametrize("sidecars", [True, False])
def test_a_record_is_saved_though_its_head_is_damaged(sidecars: bool, tmp_path: Path) -> None:
    """The twelve bytes before a record say what a sidecar says too, or else what the checksum of all heads confirms."""
    disk, expected, _ = damageable()
    if not sidecars:
        for name in [name for name in disk.names if name.endswith(".idx")]:
            disk.unlink(name)
    rng = random.Random(3)
    for row in entries_of(disk):
        where = segment(int(row["segment"]))
        for at in range(int(row["offset"]) - 12, int(row["offset"])) if SOAK else (int(row["offset"]) - rng.randrange(1, 13),):
            broken = flipped(disk, where, at, 1 << rng.randrange(8))
            report = report_of(broken)
            [damage] = report.damaged
            assert damage.harmless and report.lossless and not report.ok and not report.unknown_bytes, at
            assert damage.offset == int(row["offset"]) - 12 and "the head of a whole record" in damage.what
            assert damage.node_id == (row["id"].tobytes() if row["kind"] == codec.NODE else None)
            with open_on(broken.copy(), strict=False, read_only=True) as store:
                assert all_seen(store) == expected
    row = next(row for row in entries_of(disk) if row["kind"] == codec.NODE)
    broken = flipped(disk, segment(int(row["segment"])), int(row["offset"]) - 5)
    with saved_store(broken, tmp_path / "new") as (made, store):
        assert all_seen(store) == expected
        assert not (made.lost_nodes or made.lost_heads or made.lost_sessions or made.cut_forks or made.uncertain_heads)


def test_what_stands_around_records_may_be_damaged_without_loss(tmp_path: Path) -> None:
    """Each byte of the headers and footers of frames: the report says that nothing is lost, and nothing is."""
    disk, expected, _ = damageable()
    rows = entries_of(disk)
    inside = {
        (int(row["segment"]), at) for row in rows for at in range(int(row["offset"]) - 12, int(row["offset"]) + int(row["length"]))
    }
    rng = random.Random(9)
    tried = 0
    for number in sorted(set(rows["segment"].tolist())):
        size = len(disk.files[disk.names[segment(number)]])
        around = [at for at in range(size) if (number, at) not in inside]
        for at in around if SOAK else rng.sample(around, 12):
            broken = flipped(disk, segment(number), at, 1 << rng.randrange(8))
            report = report_of(broken)
            assert not report.ok and report.lossless and all(damage.harmless for damage in report.damaged), (number, at)
            tried += 1
    assert tried >= 12
    with saved_store(broken, tmp_path / "new") as (_, store):
        assert all_seen(store) == expected


def test_whatever_is_lost_by_a_flipped_byte_is_named(tmp_path: Path) -> None:
    """Against all there was: every session, node, head and pin is in the new store as it was, or the report has it."""
    disk, expected, nodes = damageable()
    rng = random.Random(17)
    lossy = lossless = 0
    for path, data in sorted(files_of(disk).items()):
        for at in rng.sample(range(len(data)), len(data) if SOAK else 16 if path.endswith(".seg") else 2):
            with saved_store(flipped(disk, path, at, 1 << rng.randrange(8)), tmp_path / "new") as (made, store):
                there = {node.id for name in store.sessions() for node in store.get(name).tree}
                lost = {*made.lost_nodes, *_roots(expected)}
                assert {node_id for _, node_id in nodes} - there <= lost, (path, at)
                assert expected.keys() - set(store.sessions()) <= {*made.lost_sessions} or None in made.lost_sessions, (path, at)
                now = all_seen(store)
                unsure = {*made.lost_heads, *made.older_heads, *made.uncertain_heads}
                for name, before in expected.items():
                    for head in before["heads"]:
                        same = name in now and head in now[name]["heads"]
                        assert same or (name, head[0]) in unsure or (name, None) in unsure or (None, head[0]) in unsure, (path, at)
                assert not made.report.unknown_bytes, "sidecars know all there was"
                if made.report.lossless:
                    assert now == expected and not unsure, (path, at)
                    lossless += 1
                else:
                    lossy += 1
    assert lossy > 4 and lossless > 4


def test_a_frame_that_is_whole_says_nothing_of_what_was_cut_behind_it() -> None:
    """The header of the last frame that is left is damaged, its records are whole: there were others, and no sidecar says which."""
    disk = Disk()
    with open_on(disk, segment_bytes=1200, durability="commit") as store:
        session = text_session(store)
        for number in range(12):
            session.append(session.root, [number] * 20)
    disk.unlink(segment(1, "idx"))
    nodes = [row for row in entries_of(disk) if row["segment"] == 1]
    last, gone = nodes[-2:]
    end = int(last["offset"]) + int(last["length"]) + frames.CRC.size
    assert end < int(gone["offset"]) and entries_of(disk)["segment"].max() > 1
    broken = flipped(disk, segment(1), int(last["offset"]) - frames.HEAD.size - 10)
    assert report_of(broken).damaged and report_of(broken).nodes == 12
    del broken.content("00000001.seg")[end:]
    report = report_of(broken)
    assert report.nodes == 11 and not report.lossless and not any(damage.harmless for damage in report.damaged)


@pytest.mark.parametrize("sidecars", [True, False])
def test_moves_of_heads_that_are_damaged_are_told_of(sidecars: bool, tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.root
        for number in range(3):
            node = session.append(node, [number] * 30)
            session.set_head("main", node)
        session.set_head("other", node)
    if not sidecars:
        disk.unlink(segment(1, "idx"))
    ends = [int(row["offset"]) + int(row["length"]) for row in entries_of(disk) if row["kind"] == codec.HEAD]

    def after(end: int) -> tuple[Any, ...]:
        with saved_store(flipped(disk, segment(1), end - 1), tmp_path / "new") as (made, store):
            [damage] = made.report.damaged
            assert (made.nodes, made.lost_sessions, made.report.unknown_bytes) == (3, (), 0)
            heads = {name: node.depth for name, node in store.get("s").heads.items()}
            lost = made.lost_heads, made.older_heads, made.uncertain_heads
            return heads, lost, made.report.lossless, damage.what.partition(":")[0].partition(", as")[0]

    moved = "a move of head 'main' of session 's', which was moved again since"
    assert after(ends[0]) == ({"main": 3, "other": 3}, ((), (), ()), True, moved)
    back = "the last move of head 'main' of session 's', which is at node 2 by the one before"
    assert after(ends[2]) == ({"main": 2, "other": 3}, ((), (("s", "main"),), ()), False, back)
    gone = "head 'other' of session 's', of which nothing else tells"
    assert after(ends[3]) == ({"main": 3}, ((("s", "other"),), (), ()), False, gone)


def test_heads_before_bytes_of_which_nothing_is_known_are_uncertain(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.append(session.root, [1] * 30)
        session.set_head("before", node)
        session.append(node, [2] * 30)
        session.set_head("after", node)
    disk.unlink(segment(1, "idx"))
    row = entries_of(disk)[3]
    with saved_store(unnamed_in(disk, int(row["offset"])), tmp_path / "new") as (made, store):
        assert made.uncertain_heads == (("s", "before"),) and not (made.older_heads or made.lost_heads)
        assert set(store.get("s").heads) == {"before", "after"}


def test_all_that_is_undamaged_is_saved_and_nothing_else(tmp_path: Path) -> None:
    """Against what a store serves that is opened with strict=False, which is at most as much, and against all there was."""
    disk, expected, nodes = damageable()
    whole = more = 0
    for copy, what in damages(disk, random.Random(11), 600 if SOAK else 40):
        report = report_of(copy)
        served = set()
        if "FORMAT" not in what:
            with open_on(copy.copy(), strict=False, read_only=True) as store:
                for name, node_id in nodes:
                    try:
                        assert digest(store.get(name).node(node_id)) == nodes[name, node_id]
                        served.add((name, node_id))
                    except SessionTreeError:
                        pass
        with saved_store(copy, tmp_path / "new") as (made, store):
            there = {(name, node.id): node for name in store.sessions() for node in store.get(name).tree}
            assert served <= there.keys() <= nodes.keys(), what
            # The sessions of a fork name the nodes of its path too.
            assert {node_id for _, node_id in nodes.keys() - there.keys()} <= {*made.lost_nodes, *_roots(expected)} | _unnamed(
                report, nodes, there
            ), what
            for place, node in there.items():
                assert digest(node) == nodes[place], what
            for name in store.sessions():
                before = {head: (node_id, version) for head, node_id, version in expected[name]["heads"]}
                for head, node in store.get(name).heads.items():
                    assert before.get(head, (None,))[0] == node.id or not report.ok, what
                node = store.get(name).append(store.get(name).root, [99])
                assert node.id in store.get(name).tree
            whole += there.keys() == nodes.keys()
            more += len(there) > len(served)
        assert not report.ok or there.keys() == nodes.keys(), what
    assert whole > 5 and more > 2


def _roots(expected: dict[str, Any]) -> set[bytes]:
    return {each["root"] for each in expected.values()}


def _unnamed(report: Report, nodes: Any, there: Any) -> set[bytes]:
    """Nodes of which nothing is left, not even a name: where bytes are gone that no sidecar covers, or a cut tail."""
    blind = report.torn_bytes or any(damage.node_id is None for damage in report.damaged)
    return {node_id for _, node_id in nodes.keys() - there.keys()} if blind else set()


def damaged_in(disk: Disk, node: Node) -> Disk:
    """A copy in which all records of a node are damaged."""
    for row in entries_of(disk):
        if row["kind"] == codec.NODE and row["id"].tobytes() == node.id:
            disk = flipped(disk, segment(int(row["segment"])), int(row["offset"]) + 80)
    return disk


def test_a_fork_of_what_is_lost_begins_where_it_can(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        path = [session.root]
        for number in range(6):
            path.append(session.append(path[-1], [number] * 30))
        session.set_head("main", path[6])
        session.set_head("first", path[2])
        session.set_head("root", path[0])
        fork = store.fork(session, path[5], "fork")
        deep = fork.append(path[5], [7] * 30)
        high = fork.append(fork.node(path[1].id), [8] * 30)
        fork.set_head("deep", deep)
        fork.set_head("high", high)
        fork.set_head("gone", high)
        fork.drop_head("gone")
        again = store.fork(fork, high, "again")
        last = again.append(high, [9] * 30)
        root = store.fork(fork, fork.root, "root")
        other = root.append(root.root, [10] * 30)
    with saved_store(damaged_in(disk, path[3]), tmp_path / "new") as (made, store):
        assert made.cut_forks == ("fork",) and made.lost_heads == (("s", "main"), ("fork", "deep")) and not made.lost_sessions
        assert set(made.lost_nodes) == {each.id for each in (*path[3:], deep)}
        assert (made.sessions, made.nodes, made.heads) == (4, 5, 3)
        assert [node.id for node in store.get("s").tree] == [node.id for node in path[:3]]
        fork = store.get("fork")
        assert [node.id for node in fork.tree] == [path[0].id, path[1].id, path[2].id, high.id]
        assert dict(fork.heads) == {"high": fork.node(high.id)} and dict(store.get("s").heads) == {
            "first": store.get("s").node(path[2].id),
            "root": store.get("s").root,
        }
        assert store.get("again").node(last.id).depth == 3 and store.get("root").node(other.id).depth == 1
        assert fork.set_head("new", high).version == 5  # behind as many moves as there were
        with SessionStore.in_memory() as scratch:
            assert digest(scratch.fork(store.get("again"), last.id, "x").node(last.id)) == digest(last)
    with saved_store(damaged_in(disk, path[1]), tmp_path / "new") as (made, store):
        assert [node.id for node in store.get("fork").tree] == [path[0].id]
        assert made.cut_forks == ("fork", "again") and store.get("root").node(other.id).depth == 1
    blind = disk.copy()
    blind.unlink(segment(1, "idx"))
    row = next(row for row in entries_of(disk) if row["id"].tobytes() == path[5].id)
    # Nobody knows any more what the fork began with, but of what.
    with saved_store(unnamed_in(blind, int(row["offset"])), tmp_path / "new") as (made, store):
        assert made.cut_forks == ("fork", "again") and store.get("root").node(other.id).depth == 1
        assert [node.id for node in store.get("s").tree] == [node.id for node in path[:5]]


def test_where_a_session_is_lost_its_forks_are(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session, other = text_session(store), text_session(store, "other")
        store.fork(session, session.append(session.root, [1]), "fork")
        other.append(other.root, [2])
    row = entries_of(disk)[0]
    with saved_store(flipped(disk, segment(1), int(row["offset"]) + 90), tmp_path / "new") as (made, store):
        assert store.sessions() == ("other",) and made.lost_sessions == ("s", "fork")
        assert len(made.lost_nodes) == 1 and made.nodes == 1


def test_own_keys_of_drafts_do_not_come_again_after_saving(tmp_path: Path) -> None:
    disk = Disk()
    for _ in range(5):
        with open_on(disk) as store:
            session = store.get("s") if store.sessions() else text_session(store)
            last = session.incarnation
    assert last == 5
    lost = next(row for row in entries_of(disk)[::-1] if row["kind"] == codec.OPENED)
    for copy in (disk, flipped(disk, segment(1), int(lost["offset"]) + 62)):
        with saved_store(copy, tmp_path / "new") as (_, store):
            assert store.get("s").incarnation > last
    disk = Disk()
    with open_on(disk) as store:
        last = [text_session(store, f"s{number}").incarnation for number in range(4)][-1]
    with saved_store(disk, tmp_path / "new") as (_, store):
        assert store.get("s0").incarnation > last


def test_what_changes_while_it_is_saved_is_a_typed_error(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s") as store:
        session = text_session(store)
        session.append(session.root, [1] * 500)
    [path] = (tmp_path / "s" / "segments").glob("*.seg")

    def progress(done: int, total: int) -> None:
        if 2 * done == total:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    with pytest.raises(StoreFailed, match="is there no more"):
        salvage(tmp_path / "s", tmp_path / "new", progress=progress)


def test_features_and_aliases_are_saved(tmp_path: Path) -> None:
    path, new = tmp_path / "s", tmp_path / "new"
    items = [an_image(number) for number in range(4)]
    with SessionStore.open(path) as store:
        session = store.create("s", scheme=toy_scheme(), namespace="acme")
        for number, item in enumerate(items):
            session.append(session.root, _around(item), media=[item])
            store.put_features(item, {"pixels": np.arange(number + 5), "mask": np.ones(3, bool)})
            store.alias_media(f"a{number}", item, "acme")
        store.drop_alias("a0", "acme")
    name = blobs.file_name(items[1].content())
    file = path / "blobs" / name[:2] / name
    file.write_bytes(file.read_bytes()[:-1])
    made = salvage(path, new)
    assert (made.features, made.aliases, made.nodes) == (3, 3, 4) and len(made.report.damaged) == 1
    assert json.loads(json.dumps(made.to_dict()))["report"]["ok"] is False
    with SessionStore.open(new) as store:
        for number, item in enumerate(items):
            if number:
                assert store.aliased_media(f"a{number}", "acme") == item.identity
            found = store.get_features(item)
            if number == 1:
                assert found is None
            else:
                assert found is not None
                np.testing.assert_array_equal(found["pixels"], np.arange(number + 5))
        with pytest.raises(SessionTreeError):
            store.aliased_media("a0", "acme")
    assert fsck(new).ok


def test_nothing_is_written_over(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s") as store:
        text_session(store)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    for new in ("full", "file", "s", "s/new", "link/new", "link"):
        with pytest.raises(IncompatibleStore):
            salvage(tmp_path / "s", tmp_path / new)
    with pytest.raises(StoreFailed):
        salvage(tmp_path / "s", tmp_path / "no" / "parent")
    (tmp_path / "empty").mkdir()
    assert salvage(tmp_path / "s", tmp_path / "empty").sessions == 1
    assert salvage(tmp_path / "empty", tmp_path / "again").sessions == 1


def test_records_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    disk, expected, _ = damageable()
    records = records_of(disk)
    later = bytes((records[-1][0], 9, 2)) + records[-1][3:]
    with saved_store(log_of([later, *records, later]), tmp_path / "new") as (made, store):
        assert made.later_records == 2 and all_seen(store) == expected


# counting -------------------------------------------------------------------------------------------------------------------


def test_stats_are_what_the_store_itself_says(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        everything(store)
        item = an_image(9)
        store.put_features(item, np.arange(100))
        store.put_features(an_image(123), np.arange(50))
    found = stats(path)
    files = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert sum(found.bytes.values()) == sum(files.values()) - files["FORMAT"] - files["LOCK"]
    records = ("session", "node", "head", "opening", "alias", "pin", "drop", "later", "features")
    assert found.live + found.loose + found.dead == sum(found.bytes[kind] for kind in records)
    with SessionStore.open(path, read_only=True) as store:
        sessions = {name: store.get(name) for name in store.sessions()}
        own: dict[str, list[Node]] = {}
        for each in found.sessions:
            tree = sessions[each.session_id].tree
            shared = 0 if tree._index.base is None else tree._index.base.source.first  # type: ignore[attr-defined]
            own[each.session_id] = nodes = list(tree)[shared:]
            parents = {node.parent.id for node in nodes if node.parent is not None}
            assert each.nodes == len(nodes) and each.tokens == sum(node.stop - node.start for node in nodes)
            assert each.leaves == sum(node.id not in parents for node in nodes)
            assert each.depth == max((node.depth for node in nodes), default=0) and each.heads == len(tree.heads)
        assert [each.fork_of for each in found.sessions] == [None, "all", "all", "fork", "fork of a fork", None]
        assert sum(each.bytes for each in found.sessions) == found.bytes["node"]
        everyone = [node for nodes in own.values() for node in nodes]
        assert (found.nodes, found.tokens) == (len(everyone), sum(node.stop - node.start for node in everyone))
        assert found.depth_max == max(node.depth for node in everyone)
        assert found.depth_mean == pytest.approx(sum(node.depth for node in everyone) / len(everyone))
        assert found.leaves == sum(each.leaves for each in found.sessions)
        assert found.fan_out_max >= 3 and 1 < found.fan_out_mean < 3
        # A head, or a fork, is at these or below them.
        needed = {(name, node.id) for name in sessions for head in sessions[name].heads.values() for node in head.path()}
        assert needed and found.loose < found.bytes["node"] and found.dead > 0
    assert json.loads(json.dumps(found.to_dict()))["sessions"][0]["session_id"] == "all"


def test_stats_of_a_tree_that_is_known() -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        top = session.append(session.root, [0] * 100)
        leaves = [session.append(top, [number] * 10) for number in range(1, 9)]
        session.set_head("old", leaves[0])
        session.set_head("old", leaves[1])
    sizes = {row["id"].tobytes(): int(row["length"]) + frames.HEAD.size for row in entries_of(disk)}
    found = _stats_of(disk)
    assert (found.tokens, found.path_tokens, found.leaves, found.depth_max) == (180, 880, 8, 2)
    assert found.dedupe_ratio == pytest.approx(880 / 180)
    assert (found.fan_out_max, found.fan_out_mean) == (8, 4.5)
    assert found.loose == sum(sizes[leaf.id] for leaf in leaves if leaf is not leaves[1])
    assert found.dead == sizes[sha256(b"old").digest()]
    with open_on(disk) as store:
        fork = store.fork(store.get("s"), leaves[2].id, "fork")
        fork.append(fork.node(leaves[2].id), [9] * 5)
    found = _stats_of(disk)
    assert [(each.leaves, each.depth) for each in found.sessions] == [(8, 2), (1, 3)] and found.path_tokens == 880 + 115
    found = _stats_of(damaged_in(disk, leaves[2]))
    assert [(each.leaves, each.nodes) for each in found.sessions] == [(7, 8), (0, 0)] and found.tokens == 170
    assert sum(found.bytes.values()) == sum(len(data) for path, data in files_of(disk).items() if not path.endswith("FORMAT"))
    empty = Disk()
    with open_on(empty):
        pass
    assert _stats_of(empty).dedupe_ratio == 1.0 and _stats_of(empty).sessions == ()


def _stats_of(disk: Disk) -> Stats:
    return counted(Survey(AT, disk).read())


# what was dropped, and compaction -------------------------------------------------------------------------------------------


def pruned(store: SessionStore) -> None:
    """Sessions with pins, of which some was dropped, some of that is shared by forks, and one session is gone."""
    everything(store)
    session = store.get("all")
    some = session.leaves()
    held = {*session.heads.values()}
    session.pin(session.head("main").node)
    session.pin(some[0])
    session.unpin(some[0])
    for leaf in [leaf for leaf in some if leaf not in held][:3]:
        session.drop(leaf)
    text = text_session(store, "text")
    node = text.append(text.append(text.root, [1] * 10), [2] * 10)
    side = text.append(text.root, [3] * 10)
    kept = store.fork(text, side, "kept")
    text.set_head("main", node)
    text.pin(text.root)
    text.drop(side)  # which the fork shares
    kept.append(side, [4])
    inner = text.append(text.root, [8] * 10)
    for number in range(3):
        text.append(text.append(inner, [number]), [9])
    text.drop(inner)
    gone = text_session(store, "gone")
    store.fork(gone, gone.append(gone.root, [5] * 10), "of one that is gone")
    gone.set_head("main", gone.root)
    store.drop("gone")
    text_session(store, "gone").append(store.get("gone").root, [6])


def all_of(store: SessionStore) -> dict[str, Any]:
    return {name: (all_seen(store)[name], sorted(store.get(name).pins)) for name in store.sessions()}


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_dropped_is_sound_and_stays_dropped(compacted: bool, tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk, segment_bytes=2500) as store:
        pruned(store)
        if compacted:
            assert store.gc().swept
            text_session(store, "after").append(store.get("after").root, [7])
        before = all_of(store)
    report = report_of(disk)
    assert report.ok and not told(report) and report.pins == 2 and report.sessions == len(before)
    assert (report.repeated == 0) and (f"{AT}/BASE" in disk.names) == compacted
    found = _stats_of(disk)
    assert [each.session_id for each in found.sessions[: len(before)]] == list(before)
    shown = sum(len(seen["nodes"]) for seen, _ in before.values())
    assert found.nodes < shown and (found.dead > 500) == (not compacted) and (found.nodes == report.nodes) == compacted
    with saved_store(disk, tmp_path / "new") as (made, store):
        assert all_of(store) == before and not (made.lost_nodes or made.lost_sessions or made.lost_heads or made.cut_forks)
        assert store.gc().nodes_after == found.nodes
        assert all_of(store) == before
    assert not told(report)


def test_each_byte_of_a_compacted_store_that_is_flipped_is_found() -> None:
    disk = Disk()
    with open_on(disk, segment_bytes=2500) as store:
        pruned(store)
        store.gc()
    sound = report_of(disk)
    rng = random.Random(8)
    for path, data in files_of(disk).items():
        step = 1 if SOAK or path.endswith("BASE") else 11
        for at in range(rng.randrange(step), len(data), step):
            report = report_of(flipped(disk, path, at, 1 << rng.randrange(8)))
            if path.endswith(".idx"):
                assert report.ok and [finding.path for finding in report.sidecars] == [os.path.relpath(path, AT)], at
            else:
                assert not report.ok and {damage.path for damage in report.damaged} == {os.path.relpath(path, AT)}, (path, at)
            if path.endswith("BASE"):
                assert (report.nodes, report.records, len(report.damaged)) == (sound.nodes, sound.records, 1)


def test_compaction_that_breaks_off_anywhere_leaves_a_sound_store() -> None:
    disk = Disk()
    with open_on(disk, segment_bytes=2500) as store:
        pruned(store)
        before = all_of(store)
    states = 0
    twice = 0
    for n in range(1, 400):
        broken = disk.copy()
        store = open_on(broken)
        broken._hit = 0
        broken.fault = Fault(n, errno.ENOSPC, frozenset({"open", "pwrite", "fdatasync", "fsync_dir", "rename", "unlink"}))
        with suppress(SessionTreeError):
            store.gc()
        hit = broken._hit >= n
        killed = broken.copy()
        broken.fault = None
        let_go(store)
        if not hit:
            break
        report = report_of(killed)
        assert report.ok, (n, whats(report))
        twice += report.repeated > 0
        states += 1
        with open_on(killed) as store:
            assert all_of(store) == before
    assert states > 15 and twice > 3


def test_nothing_holds_what_was_dropped(tmp_path: Path) -> None:
    """A head and a pin of a session that is gone, and what was unpinned, miss nothing."""
    disk = Disk()
    with open_on(disk) as store:
        session, gone = text_session(store), text_session(store, "gone")
        node = session.append(session.root, [1] * 30)
        session.pin(node)
        session.unpin(node)
        other = gone.append(gone.root, [2] * 30)
        gone.set_head("main", other)
        store.drop("gone")
    report = report_of(damaged_in(damaged_in(disk, node), other))
    assert [damage.node_id for damage in report.damaged] == [node.id, other.id] and not report.dangling
    assert (report.heads, report.pins, report.sessions) == (0, 0, 1)


def test_compaction_between_reading_and_saving_is_a_typed_error(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "s") as store:
        session = text_session(store)
        session.append(session.root, [1])
        store.flush()

        def progress(done: int, total: int) -> None:
            if 2 * done == total:
                assert not store.gc().swept  # it reads

        with pytest.raises(StoreFailed, match="is there no more"):
            salvage(tmp_path / "s", tmp_path / "new", progress=progress)
    assert fsck(tmp_path / "s").ok


def test_what_compaction_leaves_for_readers_is_no_stray(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with SessionStore.open(path) as store:
        session = text_session(store)
        nodes = [session.append(session.root, [number] * 100) for number in range(20)]
        store.flush()
        with SessionStore.open(path, read_only=True) as reader:
            held = reader.get("s").tree
            session.drop(*nodes[:10])
            assert not store.gc().swept
            report, found = fsck(path), stats(path)
            assert not told(report) and report.nodes == 10 and found.bytes["left"] > 4000
            assert sum(found.bytes.values()) == sum(file.stat().st_size for file in (path / "segments").iterdir())
            del held


def test_the_last_session_may_be_gone() -> None:
    """Its number stays taken."""
    disk = Disk()
    with open_on(disk) as store:
        text_session(store).append(store.get("s").root, [1])
        text_session(store, "gone")
        store.drop("gone")
        store.gc()
    assert not told(report_of(disk)) and report_of(disk).sessions == 1


def test_it_works_beside_compaction(tmp_path: Path) -> None:
    path = tmp_path / "s"
    done = threading.Event()
    with logs_on(segment_log._SYSTEM, segment_bytes=20_000):
        store = SessionStore.open(path)
    counts: list[int] = []

    def write() -> None:
        session = text_session(store)
        while not done.is_set():
            made = [session.append(session.root, [number, len(counts)] * 10) for number in range(60)]
            session.drop(*made[::2])
            counts.append(store.gc().nodes_after)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        looks = 0
        deadline = time.monotonic() + 60
        while (looks < (200 if SOAK else 8) or len(counts) < 4) and time.monotonic() < deadline:
            time.sleep(0.01)
            if counts:
                report = fsck(path)
                assert report.ok, whats(report)
                looks += 1
    finally:
        done.set()
        writer.join()
        store.close()
    assert looks >= 8 and not told(fsck(path))


def test_pins_of_what_is_damaged_are_dangling(tmp_path: Path) -> None:
    disk = Disk()
    with open_on(disk) as store:
        session = text_session(store)
        node = session.append(session.root, [1] * 30)
        session.pin(node)
        session.pin(session.root)
    report = report_of(damaged_in(disk, node))
    assert [finding.what for finding in report.dangling] == ["a pin of session 's' is at node 1, which is damaged"]
    assert report.pins == 2
    with saved_store(damaged_in(disk, node), tmp_path / "new") as (_, store):
        assert list(store.get("s").pins) == [store.get("s").root.id]
