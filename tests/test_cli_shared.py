"""The command line on stores that many processes write: it says what it says of a store on disk, and no password, ever."""

from __future__ import annotations

import random
import shlex
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlite_backend

from sessiontree import SessionStore, UnknownSession, Unsupported, codec, store
from sessiontree.backends.sealed import seal, unseal
from sessiontree.backends.shared import Backend
from sessiontree.cli import source
from sessiontree.copying import copy_sessions, session_digest
from sessiontree.fsck import Report, fsck_shared, stats, stats_shared
from sessiontree.testing.together import in_threads
from tests.command_line import json_of, run, text_of
from tests.disk_model import all_seen
from tests.test_copying import SOAK, Killing, chats, check_chats, killing
from tests.test_store_disk import say, text_session

PASSWORD = "hunter2"
SQLITE = f"postgresql://somebody:{PASSWORD}@nowhere/shared?password={PASSWORD}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of SQLite that is behind the URL SQLITE."""

    def backend_at(url: str, *, tenant: str | None, **options: Any) -> Backend:
        return sqlite_backend.connect(str(tmp_path / url.rpartition("/")[2].partition("?")[0]), tenant)

    monkeypatch.setattr(store, "backend_at", backend_at)
    monkeypatch.setattr(source, "backend_at", backend_at)
    return tmp_path / "shared"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A store that many processes write, empty."""
    if request.param == "sqlite":
        request.getfixturevalue("file")
        return SQLITE
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def filled(url: str, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The same with :func:`chats`, and a store on disk that has the same."""
    with chats() as original, SessionStore.connect(url) as shared, SessionStore.open(tmp_path / "log") as log:
        assert copy_sessions(original, shared).ok and copy_sessions(original, log).ok
    return url, tmp_path / "log"  # type: ignore[return-value]


# --- looking ----------------------------------------------------------------------------------------------------------
def test_it_says_what_it_says_of_a_store_on_disk(filled: tuple[str, Path], tmp_path: Path) -> None:
    url, log = filled
    for arguments in (
        ["ls"],
        ["tree", "all"],
        ["tree", "chat", "--from", "main", "--depth", "2"],
        ["show", "chat"],
        ["show", "fork/main", "--ids"],
        ["log", "zeta"],
        ["replay"],
        ["replay", "all", "--inputs"],
    ):
        for more in ([], ["--json"]):
            here, there = run(arguments[0], url, *arguments[1:], *more), run(arguments[0], log, *arguments[1:], *more)
            assert here.exit_code == there.exit_code and here.exit_code in (0, 1)
            told = here.stdout.replace(f'"path": "{source_shown(url)}"', f'"path": "{log}"')
            assert told == there.stdout, arguments
    assert run("diff", url, "all", "all", "--in", log).exit_code == run("diff", log, "all", "all", "--in", url).exit_code == 0
    assert run("diff", url, "chat", "zeta").stdout == run("diff", log, "chat", "zeta").stdout
    for place in (url, log):
        name = tmp_path / f"{place == url}.bundle"
        assert json_of("export", place, name, "--features")["media"] == 4
    copied = json_of("copy", tmp_path / "True.bundle", tmp_path / "False.bundle")
    assert copied["ok"] and not any(each["added"] for each in copied["sessions"])


def source_shown(url: str) -> str:
    return str(json_of("ls", url)["path"])


def test_stats_count_what_those_of_a_store_on_disk_do(filled: tuple[str, Path]) -> None:
    url, log = filled
    with SessionStore.connect(url) as shared, SessionStore.open(log) as local:
        for each in (shared, local):
            session = each.get("chat")
            session.drop(say(session, session.root, 1, key="dropped"))
            session.append(session.root, [8])
    there, here = stats(log).to_dict(), json_of("stats", url)
    for each in (*here["sessions"], *there["sessions"]):
        del each["bytes"]  # on disk, with what holds the records together
        if each["session_id"] == "fork of the root":
            each["fork_of"] = "all"  # where many write, a fork is one of the session that made the node
    different = {name for name in here if here[name] != there[name]}
    assert different <= {"path", "bytes", "live", "loose", "dead"}
    assert there["bytes"]["node"] - here["bytes"]["node"] == (12 - 4) * (there["nodes"] + 1), "what holds a record"
    assert here["dead"] > 0 and sum(here["bytes"].values()) == here["live"] + here["loose"] + here["dead"]
    json_of("gc", url)
    assert json_of("stats", url)["dead"] == 0
    assert "nodes           37" in text_of("stats", url)


# --- changing -------------------------------------------------------------------------------------------------------------
def test_pins_heads_drops_and_gc_beside_another_process(filled: tuple[str, Path]) -> None:
    url, _ = filled
    with SessionStore.connect(url) as other:
        node = other.get("chat").head("main").node
        assert json_of("unpin", url, "chat/main") == {"session": "chat", "node": node.id.hex(), "pinned": False}
        assert other.get("chat").pins == frozenset()
        refused = run("drop", url, f"chat/{node.id.hex()}")
        assert refused.exit_code == 2 and "head 'main' of session 'chat' holds it" in refused.stderr
        (remedy,) = [line for line in refused.stderr.splitlines() if "lets go" in line]
        assert shlex.split(remedy.partition("`sessiontree ")[2].partition("`")[0])[-1] == "chat/main"
        json_of("drop", url, "chat/main", "--head")
        assert not other.get("chat").heads
        mine = other.get("chat").append(node, [5])  # and on it goes
        json_of("drop", url, f"chat/{mine.id.hex()}")
        assert mine not in other.get("chat").tree
        report = json_of("gc", url)
        assert report["nodes_before"] - report["nodes_after"] == 1
        json_of("drop", url, "zeta", "--session")
        with pytest.raises(UnknownSession):
            other.get("zeta")
        assert json_of("fsck", url)["ok"]


def test_bundles_come_and_go(filled: tuple[str, Path], tmp_path: Path) -> None:
    url, log = filled
    json_of("export", log, tmp_path / "b", "--features")
    json_of("drop", url, "zeta", "--session")
    report = json_of("import", url, tmp_path / "b")
    assert report["created"] == ["zeta"] and report["heads_kept"] == []
    assert json_of("import", url, tmp_path / "b")["nodes_added"] == 0
    json_of("export", url, tmp_path / "again", "--features")
    with SessionStore.open(tmp_path / "new") as new:
        assert json_of("copy", tmp_path / "again", tmp_path / "c.bundle")["ok"]
        assert copy_sessions(chats(), new).ok


# --- copies ---------------------------------------------------------------------------------------------------------------
def test_copies_from_to_and_between(filled: tuple[str, Path], tmp_path: Path) -> None:
    url, log = filled
    assert text_of("copy", url, log).endswith("both sides are equal\n"), "all of it is there"
    assert json_of("copy", log, url)["ok"]
    for there in (tmp_path / "new", tmp_path / "new.bundle"):
        assert json_of("copy", url, there)["ok"]
    with chats() as original, SessionStore.open(tmp_path / "new") as found:
        check_chats(found, original)
    with SessionStore.connect(url) as shared:
        shared.drop("zeta")
    json_of("gc", url)
    assert {each["session_id"]: each["added"] for each in json_of("copy", tmp_path / "new.bundle", url)["sessions"]}["zeta"] == 1
    with SessionStore.connect(url) as shared, chats() as original:
        assert shared.get("zeta").append(shared.get("chat").head("main").node, [1]) in original.get("zeta").tree
        shared.get("zeta").append(shared.get("zeta").root, [99])
    assert run("copy", log, url).exit_code == 1, "what came there is not lost"


def test_killed_at_each_step_it_goes_on(postgres_url: str, tmp_path: Path, killing: Killing) -> None:
    """To PostgreSQL and from there: the same copy is killed at its first step, started again, killed at the next, and so on."""
    with chats() as original, SessionStore.open(tmp_path / "log") as log:
        copy_sessions(original, log)
    for one, two in ((tmp_path / "log", postgres_url), (postgres_url, tmp_path / "back")):
        rounds = 0
        while killing.run(one, two, 1 + rounds * (1 if SOAK else 3), "after")[0] == -9:
            rounds += 1
        assert rounds > 3 and killing.run(one, two) == (0, 0)
    with chats() as original, SessionStore.open(tmp_path / "back") as back, SessionStore.connect(postgres_url) as shared:
        check_chats(back, original)
        check_chats(shared, original)


def test_a_fork_of_what_another_process_made_has_a_number_above_it(url: str) -> None:
    """Each process draws numbers ahead, so one that forks may have lower ones left."""
    with SessionStore.connect(url) as one, SessionStore.connect(url) as two:
        text_session(one, "drawn before")
        made = text_session(two, "made")
        node = made.append(made.root, [1])
        two.fork(made, node, "forked here")
        for name in ("forked", "forked again"):
            one.fork(one.get("made"), node, name).append(node, [2])
    with SessionStore.connect(url) as found:
        assert len(all_seen(found)) == 5
    assert json_of("fsck", url)["ok"]


def test_three_that_copy_the_same_at_once_make_one_copy(url: str) -> None:
    with chats() as original:

        def copied(number: int) -> None:
            with SessionStore.connect(url) as target:
                assert copy_sessions(original, target).ok

        in_threads(3, copied)
        with SessionStore.connect(url) as found:
            assert all_seen(found) == all_seen(original)
            assert {name: session_digest(found.get(name)) for name in found.sessions()} == {
                name: session_digest(original.get(name)) for name in original.sessions()
            }


def test_a_copy_to_a_tenant(file: Path, tmp_path: Path) -> None:
    with chats() as original, SessionStore.open(tmp_path / "log") as log:
        copy_sessions(original, log)
    assert json_of("--tenant", "acme", "copy", tmp_path / "log", SQLITE, "chat", "zeta")["ok"]
    assert run("--tenant", "acme", "copy", tmp_path / "log", SQLITE, "empty").exit_code == 6, "it is another's"
    assert run("--tenant", "t", "copy", tmp_path / "log", SQLITE).exit_code == 6
    assert "damage" not in run("--tenant", "t", "copy", tmp_path / "log", SQLITE).stderr
    assert [each["id"] for each in json_of("--tenant", "acme", "ls", SQLITE)["sessions"]] == ["chat", "zeta"]
    assert json_of("--tenant", "t", "ls", SQLITE)["sessions"] == []
    assert json_of("--tenant", "acme", "copy", SQLITE, tmp_path / "b.bundle")["features"] == 4
    assert json_of("--tenant", "acme", "fsck", SQLITE)["ok"]


def test_of_many_a_copy_to_a_tenant_brings_none_where_one_is_anothers(file: Path, tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "log") as log:
        log.create("first", scheme="text@hf5", namespace="acme")
        log.create("second", scheme="text@hf5")
    assert run("--tenant", "acme", "copy", tmp_path / "log", SQLITE).exit_code == 6
    assert json_of("--tenant", "acme", "ls", SQLITE)["sessions"] == []


@pytest.mark.parametrize("command", [["ls"], ["gc"], ["fsck"], ["stats"], ["pin", "x"], ["drop", "x"], ["export", "x.bundle"]])
def test_a_database_without_a_store_gets_none_by_looking(command: list[str], postgres_url: str) -> None:
    name, *more = command
    ended = run(name, postgres_url, *more)
    assert ended.exit_code == 3 and "holds no store" in ended.stderr
    assert run("ls", postgres_url).exit_code == 3, "nor by that"


def test_a_url_of_something_else_is_not_shown(tmp_path: Path) -> None:
    url = f"mysql://somebody:{PASSWORD}@nowhere/shared"
    for arguments in (["ls", url], ["copy", url, tmp_path], ["gc", url], ["fsck", url]):
        ended = run(*arguments)
        assert ended.exit_code == 3 and PASSWORD not in ended.stderr and "postgresql://" in ended.stderr
    with pytest.raises(Unsupported, match="not mysql") as caught:
        SessionStore.connect(url)
    assert PASSWORD not in str(caught.value)


def test_options_of_all_commands_stand_before_them() -> None:
    ended = run("ls", SQLITE, "--tenant", "acme")
    assert ended.exit_code == 2 and "it stands before the command" in ended.stderr


__all__ = ["killing"]  # the fixture


# --- what is never said ---------------------------------------------------------------------------------------------------
def test_no_password_is_ever_printed(file: Path, tmp_path: Path) -> None:
    wrong = SQLITE.replace("shared", "no/such/place")
    with SessionStore.connect(SQLITE) as shared:
        session = text_session(shared)
        session.set_head("main", session.append(session.root, [1]))
        session.pin(session.head("main").node)
    commands: list[list[object]] = [
        ["ls", "URL"],
        ["tree", "URL"],
        ["show", "URL"],
        ["show", "URL", "nothing"],
        ["log", "URL"],
        ["diff", "URL", "s", "s", "--in", "URL"],
        ["replay", "URL"],
        ["stats", "URL"],
        ["fsck", "URL"],
        ["fsck", "URL", "--salvage", tmp_path / "x"],
        ["export", "URL", tmp_path / "b"],
        ["import", "URL", tmp_path / "b"],
        ["pin", "URL", "s/main"],
        ["drop", "URL", "s/main"],
        ["drop", "URL", "s", "--session"],
        ["copy", "URL", "URL"],
        ["copy", "URL", tmp_path / "y"],
        ["copy", tmp_path / "y", "URL"],
        ["gc", "URL"],
        ["gc", "URL", "URL"],
        ["ls", "URL", "--nothing"],
        ["export", tmp_path / "y", "URL"],
    ]
    said = ""
    for place in (SQLITE, wrong):
        for command in commands:
            for more in ([], ["--json"]):
                result = run(*(place if each == "URL" else each for each in command), *more)
                said += result.stdout + result.stderr
    assert "somebody@nowhere/shared" in said and PASSWORD not in said
    assert not list(Path().glob("postgres*")), "no URL was taken for a path"


# --- fsck -----------------------------------------------------------------------------------------------------------------
def tampered(file: Path, *statement: Any) -> int:
    with closing(sqlite3.connect(file)) as db, db:
        return db.execute(*statement).rowcount


def checked(file: Path) -> Report:
    backend = sqlite_backend.connect(str(file))
    try:
        return fsck_shared(backend)
    finally:
        backend.close()


@pytest.fixture
def sound(file: Path) -> Path:
    """A session of four nodes, of which one is on no path to a head; a fork of the second; a pin, an alias, features."""
    with SessionStore.connect(SQLITE) as shared, chats() as original:
        assert copy_sessions(original, shared, ["chat", "zeta"]).ok
        session = text_session(shared)
        one = session.append(session.root, [1])
        two = session.append(one, [2], key="two")
        three = say(session, two, 3, key="three")
        session.append(one, [4])
        session.set_head("main", three)
        session.pin(two)
        fork = shared.fork(session, two, "fork")
        fork.set_head("main", fork.append(two, [5]))
    assert checked(file).ok and checked(file).unreachable == ()
    return file


S = "(SELECT number FROM sessions WHERE name = 's')"
FORK = "(SELECT number FROM sessions WHERE name = 'fork')"
TAMPERINGS: dict[str, tuple[str, Callable[[Report], object]]] = {
    "a record of a node": (
        f"UPDATE nodes SET record = flip(record) WHERE session = {S} AND ordinal = 2",
        lambda report: (
            [(each.session_id, len(each.dependents)) for each in report.damaged] == [("s", 2)]
            and {each.what.partition(",")[0] for each in report.dangling}
            == {
                "head 'main' of session 's' is at node 3",
                "head 'main' of session 'fork' is at node 3",
                "a pin of session 's' is at node 2",
            }
        ),
    ),
    "a record that is gone": (
        f"UPDATE nodes SET record = NULL WHERE session = {S} AND ordinal = 3",
        lambda report: "its record is not" in report.damaged[0].what and len(report.dangling) == 1,
    ),
    "a row that is gone": (
        f"DELETE FROM nodes WHERE session = {S} AND ordinal = 2",
        lambda report: "node 2 of session 's' is missing" in {each.what for each in report.dangling} and report.damaged,
    ),
    "a parent": (
        f"UPDATE nodes SET parent = 1 WHERE session = {S} AND ordinal = 3",
        lambda report: "another node than its row" in report.damaged[0].what,
    ),
    "a parent that comes later": (
        f"UPDATE nodes SET parent = 4 WHERE session = {S} AND ordinal = 3",
        lambda report: "its parent's 4" in report.damaged[0].what,
    ),
    "an id": (
        f"UPDATE nodes SET id = flip(id) WHERE session = {S} AND ordinal = 4",
        lambda report: len(report.damaged) == 1 and not report.dangling,
    ),
    "a key": (
        f"UPDATE nodes SET key = flip(key) WHERE session = {S} AND ordinal = 2",
        lambda report: len(report.misleading) == 1 and report.lossless and "another key" in report.misleading[0].what,
    ),
    "another's record": (
        f"UPDATE nodes SET record = (SELECT record FROM nodes WHERE session = {S} AND ordinal = 4) "
        f"WHERE session = {S} AND ordinal = 3",
        lambda report: len(report.damaged) == 1,
    ),
    "the record of a session": (
        f"UPDATE sessions SET record = flip(record) WHERE number = {S}",
        lambda report: report.damaged[0].what.startswith("the record of session 's'"),
    ),
    "the name of a session": (
        f"UPDATE sessions SET name = 'other' WHERE number = {S}",
        lambda report: "calls itself 's'" in report.damaged[0].what,
    ),
    "where a fork begins": (
        f"UPDATE sessions SET tip_ordinal = 1 WHERE number = {FORK}",
        lambda report: report.lossless and "its row says node 1 of session" in report.misleading[0].what,
    ),
    "a session that a fork needs": (
        f"DELETE FROM sessions WHERE number = {S}",
        lambda report: "which is missing" in report.damaged[0].what,
    ),
    "a head": (
        f"UPDATE refs SET record = flip(record) WHERE session = {S} AND substr(name, 1, 1) = x'68'",
        lambda report: report.damaged[0].what.startswith("head "),
    ),
    "the name of a head": (
        f"UPDATE refs SET name = CAST(x'68' || zeroblob(32) AS BLOB) WHERE session = {S} AND substr(name, 1, 1) = x'68'",
        lambda report: "its name is that of another head" in report.damaged[0].what,
    ),
    "a pin": (
        f"UPDATE refs SET record = flip(record) WHERE session = {S} AND substr(name, 1, 1) = x'70'",
        lambda report: report.damaged[0].what.startswith("pin "),
    ),
    "a ref of no kind": (
        f"INSERT INTO refs SELECT session, x'7a7a', version, record FROM refs WHERE session = {S} LIMIT 1",
        lambda report: "no store names one so" in report.damaged[0].what,
    ),
    "an alias": ("UPDATE names SET record = flip(record)", lambda report: report.damaged[0].what.startswith("alias ")),
    "features": (
        "UPDATE blobs SET data = flip(data) WHERE rowid = (SELECT min(rowid) FROM blobs)",
        lambda report: len(report.damaged) == 1 and len(report.damaged[0].named_by) == 1 and not report.dangling,
    ),
    "features of nothing": (
        "DELETE FROM nodes WHERE session = (SELECT number FROM sessions WHERE name = 'chat') AND ordinal = 7",
        lambda report: "features that no node names" in {each.what for each in report.unreachable},
    ),
}


def flipped(data: bytes | None) -> bytes | None:
    """One bit in the middle."""
    if data is None:
        return None
    changed = bytearray(data)
    changed[len(data) // 2] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("what", TAMPERINGS)
def test_what_is_damaged_is_named(sound: Path, what: str) -> None:
    statement, named = TAMPERINGS[what]
    with closing(sqlite3.connect(sound)) as db, db:
        db.create_function("flip", 1, flipped)
        assert db.execute(statement).rowcount > 0
    report = checked(sound)
    assert not report.ok and named(report), report
    facts = json_of("fsck", SQLITE, code=1)
    assert facts["ok"] is False and facts["salvage"] is None
    assert text_of("fsck", SQLITE, code=1).startswith("DAMAGED")
    stats_shared(sqlite_backend.connect(str(sound)))  # counts what is sound


def test_a_node_that_starts_elsewhere_than_its_parent_ends_is_damaged(sound: Path) -> None:
    """Its own positions fit, and no id covers where a node starts."""
    with closing(sqlite3.connect(sound)) as db, db:
        ((rowid, data),) = db.execute(f"SELECT rowid, record FROM nodes WHERE session = {S} AND ordinal = 4").fetchall()
        record = codec.decode(unseal(data, "it"))
        assert isinstance(record, codec.NodeRecord)
        state = record.state._replace(num_tokens=record.state.num_tokens + 5, max_position=record.state.max_position + 5)
        db.execute("UPDATE nodes SET record = ? WHERE rowid = ?", (seal(codec.encode(record._replace(state=state))), rowid))
    (damage,) = checked(sound).damaged
    assert "it starts at token 6, and its parent ends at 1" in damage.what


def test_nodes_that_are_removed_while_they_are_read_are_no_damage(sound: Path) -> None:
    backend = sqlite_backend.connect(str(sound))

    class Racing:
        """Another process drops a node and collects it, between the rows of a session and the records."""

        done = False

        def read(self, number: int, ordinals: Sequence[int], *, fresh: bool = False) -> Iterable[bytes | None]:
            if not self.done:
                self.done = True
                with SessionStore.connect(SQLITE) as other:
                    session = other.get("s")
                    session.drop(session.tree.leaves()[-1])
                    other.get("chat").drop_head("main")
                    other.get("chat").unpin(next(iter(other.get("chat").pins)))
                    other.get("chat").drop(other.get("chat").tree.leaves()[0])
                    other.drop("zeta")
                    assert other.gc().nodes_after < 14
            return backend.nodes.read(number, ordinals)

    racing = Racing()
    report = fsck_shared(backend._replace(nodes=racing))
    assert racing.done and report.ok, report.damaged
    backend.close()


def test_any_byte_of_any_record_is_missed_by_none(sound: Path) -> None:
    drawn = random.Random(3)
    for table, column in (("nodes", "record"), ("sessions", "record"), ("refs", "record"), ("names", "record"), ("blobs", "data")):
        with closing(sqlite3.connect(sound)) as db:
            rows = db.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
        for rowid, data in rows:
            changed = bytearray(data)
            changed[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
            tampered(sound, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (bytes(changed), rowid))
            assert not checked(sound).ok, (table, rowid)
            tampered(sound, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (data, rowid))
    assert checked(sound).ok


def test_beside_those_who_write_and_collect_it_finds_nothing(url: str) -> None:
    with SessionStore.connect(url) as shared:
        for number in range(3):
            text_session(shared, f"s{number}")
    done: list[bool] = []

    def write(number: int) -> None:
        with SessionStore.connect(url) as mine:
            session = mine.get(f"s{number}")
            for each in range(40):
                node = session.append(session.root, [each])
                below = session.append(node, [number])
                mine.fork(session, below, f"{number} fork {each}").append(below, [1])
                if each % 3:
                    mine.drop(f"{number} fork {each}")
                    session.drop(node)
                if each % 10 == 9:
                    mine.gc()
        done.append(True)

    def check() -> None:
        with source.backend(url) as backend:
            while len(done) < 3:
                report = fsck_shared(backend)
                assert report.ok, [*report.damaged, *report.dangling, *report.misleading, *report.wrong_ordinals]
                stats_shared(backend)

    in_threads(4, lambda number: write(number) if number < 3 else check())
    with SessionStore.connect(url) as shared:
        shared.gc()
        assert len(all_seen(shared)) == 3 + 3 * 14
    report = json_of("fsck", url)
    assert report["ok"] and report["sessions"] == 45
