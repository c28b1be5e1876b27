"""A PostgreSQL server for tests: of the packages that are installed, on a port of the loopback, as an ordinary user.

PostgreSQL refuses to run as root, so there it runs as ``postgres`` or ``nobody``; elsewhere as oneself. All of it is in a directory
of its own. Each server has an owner, a process; when that ends, however it ends, the server's keeper stops it and removes the
directory. The keeper is this module as a process, in a session of its own, so that neither Ctrl-C nor a kill of the tests ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import attrs

ROOT = Path(__file__).parent.parent
PATIENCE = 60  # seconds that a start or an end may take before something is wrong
PROGRAMS = ("initdb", "pg_ctl", "postgres")
SETTINGS = ("listen_addresses = '127.0.0.1'", "unix_socket_directories = ''", "max_connections = 200")
# A server that is killed loses nothing by the first two: what it wrote is the system's by then. Only a machine that fails would. A
# worker that analyzes something, whatever that is, keeps old versions of rows from being cleared away: bytes would vary.
QUICK = ("fsync = off", "full_page_writes = off", "autovacuum = off")


@cache
def programs() -> Path | None:
    """The directory of PostgreSQL's own programs; None where it is not installed."""
    config = shutil.which("pg_config")
    named = [Path(subprocess.check_output([config, "--bindir"], text=True).strip())] if config else []
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    found = shutil.which("postgres")
    on_path = [Path(found).resolve().parent] if found else []
    return next((each for each in (*named, *debian, *on_path) if all((each / name).exists() for name in PROGRAMS)), None)


@attrs.frozen
class Server:
    """One that was made. In ``with``, it is gone at the end."""

    directory: Path = attrs.field(converter=Path)
    port: int
    password: str = attrs.field(repr=False)

    @classmethod
    def make(cls, *, owner: int | None = None, settings: tuple[str, ...] = ()) -> Server:
        """A server that has started. ``owner``: the process that it is for, this one unless told."""
        directory = Path(tempfile.mkdtemp(prefix="sessiontree-postgres-"))
        keep(directory, os.getpid() if owner is None else owner)
        password = secrets.token_hex(16)
        (directory / "password").write_text(password)
        for each in (directory, directory / "password"):
            shutil.chown(each, *account())
        options = ("--pwfile", directory / "password", "--auth", "scram-sha-256", "--username", "postgres")
        run(directory, "initdb", *options, "--no-sync", "--encoding", "UTF8", "--locale", "C")
        with (directory / "data" / "postgresql.conf").open("a") as config:
            config.write("\n".join(("", *SETTINGS, *settings, "")))
        server = cls(directory, free_port(), password)
        server.start()
        return server

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        remove(self.directory)

    def url(self, database: str = "postgres") -> str:
        """What clients connect to; the same after a restart."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start it, and wait until it answers; after an immediate stop, from its log."""
        log = self.directory / "log"
        run(self.directory, "pg_ctl", "start", "-w", "-t", PATIENCE, "-l", log, "-o", f"-p {self.port}")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop it with all its connections: in order, or at once as a crash would."""
        run(self.directory, "pg_ctl", "stop", "-w", "-t", PATIENCE, "-m", mode)

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new database, which is dropped at the end with whoever is still connected."""
        import psycopg
        from psycopg.sql import SQL, Identifier

        name = Identifier(label := f"test_{secrets.token_hex(8)}")
        with psycopg.connect(self.url(), autocommit=True) as connection:
            # Half the time of the other strategy, which came with PostgreSQL 15.
            strategy = SQL("STRATEGY file_copy" if connection.info.server_version >= 150_000 else "")
            connection.execute(SQL("CREATE DATABASE {} TEMPLATE template0 {}").format(name, strategy))
        try:
            yield self.url(label)
        finally:
            with psycopg.connect(self.url(), autocommit=True) as connection:
                connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def shared(place: Path, owner: int) -> Server:
    """The one server of all processes that give the same directory; whoever is first makes it."""
    with (place / "postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = place / "postgres.json"
        if not made.exists():
            made.write_text(json.dumps(attrs.asdict(Server.make(owner=owner, settings=QUICK)), default=str))
        return Server(**json.loads(made.read_text()))


def account() -> tuple[str | int, str | int]:
    """The user and the group that servers run as."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    known = {each.pw_name: each.pw_gid for each in pwd.getpwall()}
    name = next(name for name in ("postgres", "nobody") if name in known)
    return name, known[name]


def run(directory: Path, program: str, *arguments: object) -> None:
    """One of PostgreSQL's programs on the directory's data, to its end."""
    bin = programs()
    assert bin is not None, "PostgreSQL is not installed"
    user, group = account()
    other: Mapping[str, Any] = {"user": user, "group": group, "extra_groups": []} if os.geteuid() == 0 else {}
    given = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
    command = [str(bin / program), "-D", str(directory / "data"), *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=directory, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **other
    )
    if ended.returncode:
        log = directory / "log"
        said = log.read_text(errors="replace")[-5000:] if log.exists() else ""
        raise AssertionError(f"{program} failed\n{ended.stdout}{ended.stderr}\n{said}")


def free_port() -> int:
    """One that the system gives to no client: a client that asks for a server that is down would meet itself there, and keep it."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)  # from 32,768 on they are the clients'
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def remove(directory: Path) -> None:
    """Stop the server, if it runs, and remove all of it."""
    with suppress(AssertionError, OSError):  # it does not run
        run(directory, "pg_ctl", "stop", "-w", "-t", PATIENCE, "-m", "immediate")
    shutil.rmtree(directory, ignore_errors=True)


def keep(directory: Path, owner: int) -> None:
    """Start the keeper of a directory."""
    process = os.pidfd_open(owner)
    try:
        command = [sys.executable, "-m", "tests.postgres_server", str(directory), str(process)]
        none = subprocess.DEVNULL
        subprocess.run(
            command, cwd=ROOT, pass_fds=(process,), start_new_session=True, stdin=none, stdout=none, stderr=none, check=True
        )
    finally:
        os.close(process)


def wait_and_remove(directory: Path, process: int) -> None:
    """What a keeper does, until the directory is gone. ``process``: a descriptor of the owner, readable once it has ended."""
    while directory.exists():
        ended, _, _ = select.select([process], [], [], 0.5)
        if ended:
            remove(directory)
            time.sleep(0.1)  # an initdb that the owner left behind may still be writing


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:  # is there one?
            sys.exit(programs() is None)
        case [directory, process]:
            if os.fork() == 0:  # a child of nobody: none has to wait for it
                wait_and_remove(Path(directory), int(process))
