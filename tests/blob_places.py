"""Places for blobs, each with what a test does to one behind its clients' backs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from sessiontree.backends import postgres
from sessiontree.backends.postgres_blobs import DatabaseBlobs
from sessiontree.backends.shared import Blobs
from tests import postgres_server
from tests.bucket_server import BucketServer

KINDS = ["dict", "s3", "postgres"]


class DictBlobs:
    """The reference: what it holds, and when each came."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held: dict[str, tuple[bytes, float]] = {}

    def put(self, name: str, data: bytes) -> bool:
        new = data, self.now
        return self.held.setdefault(name, new) is new

    def get(self, name: str) -> bytes | None:
        found = self.held.get(name)
        return None if found is None else found[0]

    def names(self, prefix: str = "") -> Iterator[tuple[str, float]]:
        for name, (_, at) in list(self.held.items()):
            if name.startswith(prefix):
                yield name, self.now - at

    def delete(self, names: Iterable[str]) -> int:
        return sum(self.held.pop(name, None) is not None for name in set(names))


class Place(NamedTuple):
    """``client``: makes a further one. ``age``: all that is there is so many seconds older. ``spoil``: gives a blob other bytes."""

    client: Callable[[], Blobs]
    age: Callable[[float], None]
    spoil: Callable[[str, bytes], None]


@cache
def bucket_server() -> BucketServer:
    """One that whoever shares it leaves as it is."""
    server = BucketServer()
    server.start()
    return server


class Connections:
    """Connections to PostgreSQL, a few of them open."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.idle: deque[psycopg.Connection[Any]] = deque()

    @contextmanager
    def __call__(self) -> Iterator[psycopg.Connection[Any]]:
        try:
            one = self.idle.pop()
        except IndexError:
            one = connect(self.url)
        try:
            yield one
        finally:
            self.idle.append(one) if not one.closed and one.info.transaction_status == TransactionStatus.IDLE else one.close()

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


def connect(url: str, **given: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True, options="-c search_path=sessiontree", **given)


@cache
def _database(server: postgres_server.Server) -> str:
    """One for all tests of this process, with the tables of a store; it goes with the server."""
    name = f"blobs_{os.getpid()}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    postgres.connect(server.url(name)).close()
    return server.url(name)


def empty_tables(server: postgres_server.Server) -> str:
    """The URL of a database without blobs."""
    with connect(_database(server)) as connection:
        connection.execute("TRUNCATE blobs CASCADE")
    return _database(server)


def postgres_place(connections: Connections) -> Place:
    def do(statement: str, *given: Any) -> None:
        with connections() as connection:
            connection.execute(statement.encode(), given)

    def spoil(name: str, data: bytes) -> None:
        blob = "(SELECT number FROM blobs WHERE name = %s)"
        do(f"DELETE FROM blob_pieces WHERE blob = {blob}", name.encode())
        do(f"INSERT INTO blob_pieces SELECT {blob}, 0, %s", name.encode(), data)
        do("UPDATE blobs SET size = %s WHERE name = %s", len(data), name.encode())

    return Place(
        lambda: DatabaseBlobs(connections),
        lambda seconds: do("UPDATE blobs SET made_at = made_at - %s * interval '1 second'", seconds),
        spoil,
    )


def bucket_place() -> Place:
    server = bucket_server()
    url = server.bucket() + "/some/where"

    def spoil(name: str, data: bytes) -> None:
        blobs = server.blobs(url)
        assert blobs.delete([name]) == 1 and blobs.put(name, data)

    return Place(lambda: server.blobs(url), lambda seconds: server.age(url, seconds), spoil)


def dict_place() -> Place:
    blobs = DictBlobs()

    def age(seconds: float) -> None:
        blobs.now += seconds

    def spoil(name: str, data: bytes) -> None:
        blobs.held[name] = data, blobs.held[name][1]

    return Place(lambda: blobs, age, spoil)


def new_place(request: pytest.FixtureRequest, kind: str) -> Place:
    """An empty place of a kind, for one test."""
    if kind == "postgres":
        connections = Connections(empty_tables(request.getfixturevalue("postgres_server")))
        request.addfinalizer(connections.close)
        return postgres_place(connections)
    return bucket_place() if kind == "s3" else dict_place()
