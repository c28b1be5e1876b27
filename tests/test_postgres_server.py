"""The server that other tests stand on: what it is, and that nothing of it is left, whatever becomes of whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psycopg
import pytest

from tests.postgres_server import PATIENCE, ROOT, Server, shared

CRASHED = """
import time
from tests.postgres_server import Server
print(Server.make().directory, flush=True)
time.sleep(600)
"""
SHARING = """
import sys
from pathlib import Path
from tests.postgres_server import shared
print(shared(Path(sys.argv[1]), int(sys.argv[2])).url())
"""


def until(true: Callable[[], bool]) -> None:
    stop = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < stop
        time.sleep(0.02)


def postmaster(directory: Path) -> int:
    return int((directory / "data" / "postmaster.pid").read_text().split("\n")[0])


def ended(pid: int) -> bool:
    """A process that nobody waits for may be left as a zombie where no init is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_it_runs_as_an_ordinary_user_on_the_loopback_alone(postgres_server: Server, postgres_url: str) -> None:
    assert Path(f"/proc/{postmaster(postgres_server.directory)}").stat().st_uid != 0
    with psycopg.connect(postgres_url) as connection:
        listening = (
            connection.execute("SHOW listen_addresses").fetchone(),
            connection.execute("SHOW unix_socket_directories").fetchone(),
        )
    assert listening == (("127.0.0.1",), ("",))


def test_nobody_comes_in_without_the_password(postgres_server: Server) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres_server.url().replace(postgres_server.password, "guessed"))


def test_each_database_is_new_and_dropped_with_whoever_is_in_it(postgres_server: Server) -> None:
    with postgres_server.database() as first, postgres_server.database() as second:
        left = psycopg.connect(first, autocommit=True)
        left.execute("CREATE TABLE mine (number int)")
        with psycopg.connect(second) as other:
            assert other.execute("SELECT to_regclass('mine')").fetchone() == (None,)
    with pytest.raises(psycopg.OperationalError):
        left.execute("SELECT 1")
    left.close()
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(first)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_what_was_committed_is_there_after_a_restart_at_the_same_place(
    own_postgres: Server, mode: Literal["fast", "immediate"]
) -> None:
    with own_postgres.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            assert connection.execute("SHOW fsync").fetchone() == ("on",)
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
            own_postgres.stop(mode)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(url)
        own_postgres.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


def test_nothing_is_left_of_it_after_its_block(postgres_programs: None) -> None:
    with Server.make() as server:
        pid = postmaster(server.directory)
        assert not ended(pid)
    assert ended(pid) and not server.directory.exists()


def test_nothing_is_left_of_it_after_its_owner_is_killed(postgres_programs: None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CRASHED], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        pid = postmaster(directory)
        os.killpg(owner.pid, signal.SIGKILL)
    until(lambda: ended(pid) and not directory.exists())


def test_nothing_is_left_of_it_after_its_owner_is_killed_while_it_is_made(postgres_programs: None) -> None:
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        environment = {**os.environ, "TMPDIR": place}
        with subprocess.Popen([sys.executable, "-c", CRASHED], cwd=ROOT, stdout=subprocess.DEVNULL, env=environment) as owner:
            until(lambda: any(Path(place).glob("*/data")))
            owner.kill()
        until(lambda: not os.listdir(place))


def test_processes_of_a_run_share_one(postgres_programs: None, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        command = [sys.executable, "-c", SHARING, str(tmp_path), str(owner.pid)]
        asking = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        told = {each.communicate()[0].strip() for each in asking}
        server = shared(tmp_path, owner.pid)
        assert told == {server.url()}
        with psycopg.connect(server.url()) as connection:  # the processes that asked have ended; it is there as long as its owner
            assert connection.execute("SELECT 1").fetchone() == (1,)
        owner.kill()
    until(lambda: not server.directory.exists())
