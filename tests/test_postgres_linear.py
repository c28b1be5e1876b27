"""Eight processes on one database, of which some are killed, and the server with them: what they were told has an order, and is there.

What a client does is in ``postgres_clients.py``, what has to hold in ``client_histories.py``; both are tried here on what is wrong.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from sessiontree import SessionStore
from tests.client_histories import History, Operation, operations
from tests.postgres_clients import ROOTS, rules
from tests.postgres_server import ROOT, Server

CLIENTS = 8
PATIENCE = 120  # seconds that a client may take for its last call, on whatever machine


class Lives:
    """Clients, each a process, and another in its place when it is killed."""

    def __init__(self, where: str, directory: Path, until: int) -> None:
        self._where, self._directory, self._until = where, directory, until
        self._lives = [0] * CLIENTS
        self.killed = 0
        self.processes = [self._start(number) for number in range(CLIENTS)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        life, self._lives[number] = self._lives[number], self._lives[number] + 1
        log = self._directory / f"{number}.{life}.log"
        command = [sys.executable, "-m", "tests.postgres_clients", self._where, str(log), str(number), str(self._until)]
        with (self._directory / "errors").open("ab") as errors:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        process.kill()
        if process.wait() == -signal.SIGKILL:  # else it had come to its end
            self.killed += 1
            self.processes[number] = self._start(number)

    def pause(self, number: int, seconds: float) -> None:
        """Have one sleep, wherever it is, and wake up late."""
        self.processes[number].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes[number].send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Wait until all have come to their end by themselves."""
        ends = [process.wait(PATIENCE) for process in self.processes]
        said = (self._directory / "errors").read_text()
        assert (ends, said) == ([0] * CLIENTS, "")

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def disturbed(server: Server, where: str, directory: Path, seconds: float, seed: str) -> list[Operation]:
    """Clients for some time, meanwhile kills, pauses, and three stops of the server: what they said."""
    rng = random.Random(seed)
    start = time.monotonic()
    with SessionStore.connect(where) as store:
        for name in ROOTS:
            store.create(name, scheme=rules())
    stops = [(0.25, "immediate", rng.uniform(0, 1)), (0.5, "fast", rng.uniform(0, 2)), (0.75, "immediate", rng.uniform(4, 6))]
    with Lives(where, directory, time.monotonic_ns() + int(seconds * 1e9)) as lives:
        while (passed := time.monotonic() - start) < seconds:
            time.sleep(rng.uniform(0, 2))
            if stops and passed > stops[0][0] * seconds:
                _, mode, down = stops.pop(0)
                server.stop(mode)  # type: ignore[arg-type]
                time.sleep(down)
                server.start()
            elif rng.random() < 0.8:
                lives.kill(rng.randrange(CLIENTS))
            else:
                lives.pause(rng.randrange(CLIENTS), rng.uniform(0, 1))
        lives.end()
        assert not stops
        assert lives.killed > seconds / 10
    return operations(directory.glob("*.log"))


@pytest.mark.parametrize("seconds", [60, *(pytest.param(300, marks=pytest.mark.soak, id=f"300 {n}") for n in "ab")])
def test_eight_clients_kills_and_restarts_of_the_server(own_postgres: Server, tmp_path: Path, seconds: int) -> None:
    seed = str(random.randrange(2**32)) if os.environ.get("SESSIONTREE_SOAK") == "1" else "clients"
    print(f"seed {seed}")
    with own_postgres.database() as where, ExitStack() as ends:
        done = disturbed(own_postgres, where, tmp_path, seconds, seed)
        store = ends.enter_context(SessionStore.connect(where))
        History(done).check_all(store)
