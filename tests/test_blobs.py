"""Blobs: what is true of every place for them, and what goes wrong on the way to a bucket and to a database."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessiontree import CorruptTree, NeedsExtra, StoreFailed, Unsupported
from sessiontree.backends import buckets, postgres, postgres_blobs
from sessiontree.backends.buckets import BucketBlobs
from sessiontree.backends.postgres_blobs import PIECE, DatabaseBlobs
from sessiontree.backends.shared import Blobs
from sessiontree.testing.together import in_threads
from tests.blob_places import KINDS, DictBlobs, Place, bucket_server, connect, empty_tables, new_place
from tests.bucket_server import BucketServer, Fault
from tests.postgres_server import Server

DATA = bytes(range(256)) * 10


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Place:
    return new_place(request, request.param)


@pytest.fixture
def url(postgres_server: Server) -> str:
    """A database."""
    return empty_tables(postgres_server)


@pytest.fixture
def server() -> Iterator[BucketServer]:
    """One of the test's own, to break."""
    with BucketServer() as server:
        yield server


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts on a bucket take no time."""
    monkeypatch.setattr(buckets, "_PAUSE", 0)


def names(blobs: Blobs, prefix: str = "") -> list[str]:
    return sorted(name for name, _ in blobs.names(prefix))


def first(count: int, fault: Fault) -> Callable[[str, str], Fault | None]:
    """The first so many requests of each kind go wrong."""
    seen = Counter[tuple[str, str]]()

    def goes_wrong(method: str, path: str) -> Fault | None:
        seen[method, path] += 1
        return fault if seen[method, path] <= count else None

    return goes_wrong


# --- every place -----------------------------------------------------------------------------------------------------------
def test_the_first_one_stays(place: Place) -> None:
    mine, other = place.client(), place.client()
    assert mine.get("a/1") is None and names(mine) == []
    assert mine.put("a/1", b"first")
    assert not mine.put("a/1", b"first") and not other.put("a/1", b"second")
    assert mine.get("a/1") == other.get("a/1") == b"first"
    assert mine.delete(["a/1"]) == 1 and mine.get("a/1") is None
    assert other.put("a/1", b"second") and mine.get("a/1") == b"second"


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 20 * PIECE + 7])
def test_bytes_of_any_size_come_back(place: Place, size: int) -> None:
    data = (DATA * (size // len(DATA) + 1))[:size]
    blobs = place.client()
    assert blobs.put("blob", data)
    found = blobs.get("blob")
    assert type(found) is bytes and found == data


def test_names_are_those_that_begin_so(place: Place) -> None:
    blobs = place.client()
    held = ["a", "a/b", "a/b.0", "a/bc/0", "a/bc/1", "ab/0", "b/00", "é/ü", "~/-_.!"]
    for name in held:
        assert blobs.put(name, b"")
    if isinstance(blobs, BucketBlobs):
        assert "some/where/a" not in names(blobs)
    for prefix in ["", "a", "a/", "a/b", "a/bc/", "a/bc/1", "b/0", "é", "é/ü", "x", "x/", "a/b/", "~/-"]:
        assert names(blobs, prefix) == sorted(name for name in held if name.startswith(prefix)), prefix


def test_of_what_is_deleted_only_what_was_there_counts(place: Place) -> None:
    blobs = place.client()
    for number in range(5):
        blobs.put(f"all/{number}", b"x")
    assert blobs.delete([]) == 0 and blobs.delete(["all/9", "none"]) == 0
    assert blobs.delete(iter(["all/0", "all/0", "all/9", "all/3"])) == 2
    assert names(blobs) == ["all/1", "all/2", "all/4"]
    assert blobs.delete(names(blobs)) == 3 and names(blobs) == []


def test_more_than_one_listing_or_removal_takes(place: Place) -> None:
    blobs = place.client()
    held = [f"many/{number:04}" for number in range(1005)]

    def put(number: int) -> None:
        for name in held[number::4]:
            blobs.put(name, b"")

    in_threads(4, put)
    assert names(blobs, "many/") == held
    assert blobs.delete(held) == 1005 and names(blobs) == []


def test_ages_are_seconds_by_the_clock_of_the_place(place: Place) -> None:
    blobs = place.client()
    blobs.put("old", b"")
    place.age(1000)
    place.client().put("young", b"")
    for client in (blobs, place.client()):
        ages = dict(client.names())
        assert 999 <= ages["old"] < 1100 and 0 <= ages["young"] < 100
    blobs.delete(["old"])
    blobs.put("old", b"")
    assert dict(blobs.names("old"))["old"] < 100


def test_of_sixteen_that_put_one_name_one_is_first(place: Place) -> None:
    clients = [place.client() for _ in range(16)]
    for data in (b"", DATA, DATA * 500):  # below and above a piece
        said: list[Any] = [None] * 16

        def put(number: int, data: bytes = data, said: list[Any] = said) -> None:
            mine = data + bytes([number])
            said[number] = clients[number].put(f"one/{len(data)}", mine), clients[number].get(f"one/{len(data)}")

        in_threads(16, put)
        [first] = [number for number, (new, _) in enumerate(said) if new]
        assert {found for _, found in said} == {data + bytes([first])}


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("pgnd"), st.sampled_from(["a", "b", "a/b", "c/d"]), st.binary(max_size=3)), max_size=20))
def test_a_bucket_does_as_the_reference(steps: list[tuple[str, str, bytes]]) -> None:
    server = bucket_server()
    ours, reference = server.blobs(server.bucket()), DictBlobs()
    for what, name, data in steps:
        pairs: dict[str, Any] = {
            "p": lambda blobs, name=name, data=data: blobs.put(name, data),
            "g": lambda blobs, name=name: blobs.get(name),
            "n": lambda blobs, name=name: names(blobs, name),
            "d": lambda blobs, name=name: blobs.delete([name]),
        }
        assert pairs[what](ours) == pairs[what](reference)


# --- the way to a bucket ---------------------------------------------------------------------------------------------------
def test_a_bucket_is_found_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    server = bucket_server()
    url = server.bucket()
    for name, option in {
        "ENDPOINT_URL": "endpoint",
        "ACCESS_KEY_ID": "access_key_id",
        "SECRET_ACCESS_KEY": "secret_access_key",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", server.options[option])
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert BucketBlobs(url + "/deep/down").put("a", b"1")
    assert server.blobs(url).get("deep/down/a") == b"1"


def test_two_prefixes_of_a_bucket_know_nothing_of_each_other() -> None:
    server = bucket_server()
    url = server.bucket()
    one, two = server.blobs(url + "/one"), server.blobs(url + "/two/")
    assert one.put("a", b"1") and two.put("a", b"2")
    assert (one.get("a"), two.get("a"), names(one), names(two)) == (b"1", b"2", ["a"], ["a"])


@pytest.mark.parametrize("url", ["", "bucket", "file:///tmp", "http://127.0.0.1/bucket", "gs://bucket", "s3://"])
def test_what_is_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(Unsupported):
        BucketBlobs(url)
    with pytest.raises(Unsupported, match="nonsense"):
        BucketBlobs("s3://bucket", nonsense=1)


def test_without_obstore_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(NeedsExtra) as caught:
        BucketBlobs("s3://bucket")
    assert caught.value.extra == "s3"


def test_a_bucket_that_is_not_there_is_not_empty(server: BucketServer, briefly: None) -> None:
    blobs = server.blobs("s3://no-such-bucket")
    for call in (lambda: blobs.get("a"), lambda: blobs.put("a", b""), lambda: names(blobs), lambda: blobs.delete(["a"])):
        with pytest.raises(StoreFailed, match="no-such-bucket"):
            call()


@pytest.mark.parametrize("fault", ["error", "lost", "conflict", "short"])
def test_what_passes_is_not_seen(server: BucketServer, briefly: None, fault: Fault) -> None:
    blobs = server.blobs(server.bucket())
    server.fault = first(2, fault)
    blobs.put("a/b", DATA)
    assert blobs.get("a/b") == DATA
    assert names(blobs) == ["a/b"]
    assert blobs.delete(["a/b", "a/c"]) == 1
    assert blobs.get("a/b") is None
    assert blobs.put("a/b", b"anew") and blobs.get("a/b") == b"anew"


@pytest.mark.parametrize("fault", ["error", "lost", "conflict", "refused"])
def test_what_does_not_pass_is_a_failure_after_some_attempts(server: BucketServer, briefly: None, fault: Fault) -> None:
    url = server.bucket()
    blobs = server.blobs(url)
    blobs.put("a", DATA)
    server.fault = lambda method, path: fault
    for call in (lambda: blobs.get("a"), lambda: blobs.put("b", b""), lambda: names(blobs), lambda: blobs.delete(["a"])):
        server.requests.clear()
        with pytest.raises(StoreFailed, match=url):
            call()
        assert 1 <= len(server.requests) <= 2 * buckets._ATTEMPTS
    server.fault = lambda method, path: None
    assert blobs.get("a") == DATA


def test_what_takes_too_long_is_not_tried_again(server: BucketServer, briefly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_LONGEST", -1.0)
    blobs = server.blobs(server.bucket())
    server.fault = lambda method, path: "error"
    with pytest.raises(StoreFailed, match="in 1 attempts"):
        blobs.get("a")


def test_an_object_that_always_ends_early_is_a_failure(server: BucketServer, briefly: None) -> None:
    blobs = server.blobs(server.bucket())
    blobs.put("a", DATA)
    server.fault = lambda method, path: "short"
    with pytest.raises(StoreFailed):
        blobs.get("a")


def test_who_may_not_is_told_at_once(server: BucketServer) -> None:
    blobs = server.blobs(server.bucket())
    server.fault = lambda method, path: "refused"
    with pytest.raises(StoreFailed):
        blobs.get("a")
    assert len(server.requests) == 1


def test_where_another_is_at_it_and_fails_mine_is_put(server: BucketServer, briefly: None) -> None:
    """S3 answers 409 to both of two puts in one moment, and may keep neither."""
    blobs = server.blobs(server.bucket())
    conflict = first(1, "conflict")
    server.fault = lambda method, path: conflict(method, path) if method == "PUT" else None
    assert blobs.put("a", b"mine")
    assert blobs.get("a") == b"mine"


def test_nothing_acknowledged_is_lost_where_the_server_goes_and_comes(server: BucketServer) -> None:
    url = server.bucket()
    acknowledged: list[str] = []
    halfway, back = threading.Event(), threading.Event()

    def put(number: int) -> None:
        blobs = server.blobs(url)
        if number == 0:
            halfway.wait()
            server.stop()
            with pytest.raises(StoreFailed):
                blobs.get("never")
            server.start()
            back.set()
        for each in range(30):
            if each == 10:
                halfway.set()
            name = f"{number}/{each}"
            with suppress(StoreFailed):
                blobs.put(name, name.encode())
                acknowledged.append(name)
            if each == 20:
                back.wait()

    in_threads(5, put)
    blobs = server.blobs(url)
    there = names(blobs)
    assert len(acknowledged) > 50 and set(acknowledged) <= set(there)
    assert all(blobs.get(name) == name.encode() for name in there)


def test_a_server_without_conditional_puts_is_asked_first() -> None:
    server = bucket_server()
    url = server.bucket()
    blobs = server.blobs(url, conditional_put="disabled")
    assert blobs.put("a", b"1") and not blobs.put("a", b"2")
    assert blobs.get("a") == b"1"


def test_who_only_reads_a_bucket_writes_nothing(server: BucketServer) -> None:
    url = server.bucket()
    server.blobs(url).put("old", b"1")
    server.age(url, 500)
    server.blobs(url).put("a", b"1")
    server.requests.clear()
    reader = server.blobs(url, read_only=True)
    ages = dict(reader.names())
    assert ages["a"] == 0 and 499 <= ages["old"] < 600 and reader.get("a") == b"1"
    assert {method for method, _ in server.requests} == {"GET"}


def test_a_forked_child_connects_anew() -> None:
    server = bucket_server()
    blobs = server.blobs(server.bucket())
    pid = os.getpid()
    blobs._pid = pid + 1  # as in a child: a fork of a process with threads is no test's business
    for call in (lambda: blobs.get("a"), lambda: blobs.put("a", b""), lambda: names(blobs), lambda: blobs.delete(["a"])):
        with pytest.raises(Unsupported, match="fork"):
            call()


def test_errors_tell_no_secret(server: BucketServer, briefly: None) -> None:
    blobs = BucketBlobs(server.bucket(), **server.options | {"secret_access_key": "hush", "access_key_id": "whoami"})
    server.fault = lambda method, path: "error"
    with pytest.raises(StoreFailed) as caught:
        blobs.put("a", b"")
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


# --- the way to a database -------------------------------------------------------------------------------------------------
class Cut:
    """New connections to PostgreSQL. ``given``: how many. ``cut``: how many of those to come are cut by the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.given = 0
        self.cut = 0

    @contextmanager
    def __call__(self) -> Iterator[psycopg.Connection[Any]]:
        self.given += 1
        with connect(self.url) as connection:
            if self.cut:
                self.cut -= 1
                with connect(self.url) as other:
                    other.execute("SELECT pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
            yield connection


def test_a_connection_that_is_lost_is_not_seen(url: str) -> None:
    connection = Cut(url)
    calls: list[tuple[Callable[[Blobs], Any], Any]] = [
        (lambda blobs: blobs.put("a", DATA), True),
        (lambda blobs: blobs.get("a"), DATA),
        (names, ["a"]),
        (lambda blobs: blobs.delete(["a"]), 1),
    ]
    for call, expected in calls:
        connection.cut = 3
        assert call(DatabaseBlobs(connection)) == expected
    for call, _ in calls:
        connection.cut, connection.given = 1, 0
        with pytest.raises(StoreFailed):
            call(DatabaseBlobs(connection, seconds=0))
        assert connection.given == 1


def test_a_put_that_ends_half_way_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = DatabaseBlobs(Cut(url))
    execute, written = psycopg.Cursor.execute, Counter[str]()

    def breaks(cursor: Any, query: Any, *given: Any, **more: Any) -> Any:
        if "INTO blob_pieces" in query:
            written["rows"] += 1
            if written["rows"] == 3:
                cursor.connection.close()
        return execute(cursor, query, *given, **more)

    monkeypatch.setattr(psycopg.Cursor, "execute", breaks)
    assert blobs.put("a", DATA * 2000)  # of 5 pieces
    assert written["rows"] == 3 + 5
    assert blobs.get("a") == DATA * 2000
    with connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM blob_pieces").fetchone() == (5,)


def test_an_answer_that_is_lost_is_no_second_blob(url: str) -> None:
    """The commit took effect and nobody knows: the next attempt finds it."""
    left = [1]

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        with connect(url) as one:
            yield one
        if left.pop() if left else 0:
            raise psycopg.OperationalError("the server closed the connection unexpectedly")

    blobs = DatabaseBlobs(connection)
    assert not blobs.put("a", DATA)
    assert blobs.get("a") == DATA and names(blobs) == ["a"]


@pytest.mark.soak
def test_the_server_of_a_database_is_killed_and_comes_back(own_postgres: Server) -> None:
    url = own_postgres.url()
    postgres.connect(url).close()
    acknowledged: list[str] = []
    halfway = threading.Event()

    def put(number: int) -> None:
        blobs = DatabaseBlobs(Cut(url))
        if number == 0:
            halfway.wait()
            own_postgres.restart("immediate")
        for each in range(40):
            if each == 10:
                halfway.set()
            name = f"{number}/{each}"
            with suppress(StoreFailed):
                blobs.put(name, name.encode() * 1000)
                acknowledged.append(name)

    in_threads(4, put)
    blobs = DatabaseBlobs(Cut(url))
    assert len(acknowledged) > 100 and set(acknowledged) <= set(names(blobs))
    assert all(blobs.get(name) == name.encode() * 1000 for name in names(blobs))


def test_a_database_without_the_tables_is_a_failure_at_once(postgres_server: Server) -> None:
    connection = Cut(postgres_server.url())
    with pytest.raises(StoreFailed, match="blobs"):
        DatabaseBlobs(connection).get("a")
    assert connection.given == 1


def test_pieces_that_are_missing_are_damage(url: str) -> None:
    blobs = DatabaseBlobs(Cut(url))
    blobs.put("a", DATA * 2000)
    with connect(url) as connection:
        for piece in (4, 1, 0):
            connection.execute("DELETE FROM blob_pieces WHERE piece = %s", (piece,))
            with pytest.raises(CorruptTree, match="a"):
                blobs.get("a")
        connection.execute("DELETE FROM blob_pieces")
    with pytest.raises(CorruptTree):
        blobs.get("a")


def test_blobs_are_deleted_a_few_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_blobs, "_TOGETHER", 2)
    connection = Cut(url)
    blobs = DatabaseBlobs(connection)
    for name in "abcde":
        blobs.put(name, b"1")
    before = connection.given
    assert blobs.delete([*"abcde", "f"]) == 5
    assert connection.given == before + 3


def test_deleted_blobs_leave_no_pieces(url: str) -> None:
    blobs = DatabaseBlobs(Cut(url))
    for name in "ab":
        blobs.put(name, DATA * 2000)
    assert blobs.delete(["a"]) == 1
    with connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM blob_pieces").fetchone() == (5,)


def test_a_large_blob_is_in_memory_twice_at_most(url: str) -> None:
    blobs = DatabaseBlobs(Cut(url))
    data = bytes(50 * 2**20)
    tracemalloc.start()
    try:
        blobs.put("large", data)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
        tracemalloc.reset_peak()
        assert blobs.get("large") == data
        assert tracemalloc.get_traced_memory()[1] < 2.2 * len(data)
    finally:
        tracemalloc.stop()


def test_large_blobs_take_longer_than_usual_statements_may(url: str) -> None:

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        with connect(url) as one:
            one.execute("SET statement_timeout = '50ms'")
            yield one
            assert one.execute("SHOW statement_timeout").fetchone() == ("50ms",)

    blobs, data = DatabaseBlobs(connection), bytes(40 * 2**20)
    assert blobs.put("a", data) and blobs.get("a") == data


def test_blobs_of_a_backend(url: str) -> None:
    backend = postgres.connect(url)
    assert backend.blobs is not None and backend.blobs.put("a", DATA)
    backend.close()
    reader = postgres.connect(url, read_only=True)
    assert reader.blobs is not None and reader.blobs.get("a") == DATA
    reader.close()


def test_connections_need_not_commit_by_themselves(url: str) -> None:

    @contextmanager
    def connection() -> Iterator[psycopg.Connection[Any]]:
        one = connect(url)
        one.autocommit = False
        try:
            yield one
            assert one.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        finally:
            one.close()

    blobs = DatabaseBlobs(connection)
    assert blobs.put("a", DATA) and not blobs.put("a", b"")
    assert blobs.get("a") == DATA and names(blobs) == ["a"] and blobs.delete(["a"]) == 1
