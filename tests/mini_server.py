"""The mini scheduler as a process of its own: started on a port of the loopback, stopped, killed, started again on its store.

A start by the command takes seconds of a core, nearly all of them for imports. So most tests fork their servers from a process
that has done them; the tests of the README run the command.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

import httpx
from openai import OpenAI

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0  # seconds that a start, an end or an answer may take before something is wrong
ANNOUNCED = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Server:
    """A server on ``store``, a path or a URL; ``keys``: each tenant's key; ``arguments``: others of its command line; ``log``:
    where that is to be. It runs inside ``with``.

    ``url`` is new with every start. What it prints is in ``log``, of all its lives. Each start runs the command, unless a subclass
    knows a quicker way to the same.
    """

    def __init__(
        self, store: Path | str, *arguments: object, keys: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.store = store
        self.log = log or Path(store).with_name(f"{Path(store).name}.log")
        named = [f"{tenant}={key}" for tenant, key in (keys or {}).items()]
        options = [str(each) for each in arguments] + [each for pair in named for each in ("--api-key", pair)]
        self.arguments = ["--store", str(store), "--port", "0", *options]
        self.url = ""
        self._http = httpx.Client(timeout=PATIENCE, verify=False)  # of TLS there is none: looking for certificates takes its time
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def launched(self) -> subprocess.Popen[bytes] | Forked:
        """A process that is about to serve."""
        command = [sys.executable, "-m", "mini_scheduler", *self.arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment())

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()
        if self.process is not None:
            self.kill()

    @property
    def running(self) -> subprocess.Popen[bytes] | Forked:
        assert self.process is not None, "the server is not running"
        return self.process

    def start(self) -> None:
        """Start it, and wait until it is healthy."""
        assert self.process is None
        self.log.touch()
        told = self.log.stat().st_size
        self.process = self.launched()
        stop = time.monotonic() + PATIENCE
        while not (found := ANNOUNCED.search(self.log.read_bytes()[told:].decode(errors="replace"))):
            self.wait_a_moment(stop)
        self.url = found[0]
        while True:
            try:
                self._http.get(f"{self.url}/health").raise_for_status()
                return
            except httpx.TransportError:
                self.wait_a_moment(stop)

    def wait_a_moment(self, stop: float) -> None:
        ended = self.running.poll() is not None
        if ended or time.monotonic() > stop:
            raise AssertionError(f"the server {'has ended' if ended else 'does not come up'}:\n{self.log.read_text()[-5000:]}")
        time.sleep(0.02)

    def stop(self) -> None:
        """Ask it to end, as whoever runs it would; it does what it has to, and then says that it was asked to."""
        told = self.log.stat().st_size
        assert self.end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert b"Traceback" not in self.log.read_bytes()[told:]

    def kill(self) -> int:
        """``kill -9``."""
        return self.end(signal.SIGKILL)

    def end(self, how: signal.Signals) -> int:
        process, self.process = self.running, None
        process.send_signal(how)
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not end:\n{self.log.read_text()[-5000:]}") from None

    def check_healthy(self) -> None:
        answer = self._http.get(f"{self.url}/health")
        assert answer.status_code == 200 and answer.json()["status"] == "ok", answer.text
        assert self.running.poll() is None

    def memory(self) -> int:
        """Bytes of the process that are in memory."""
        status = Path(f"/proc/{self.running.pid}/status").read_text()
        (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kilobytes) * 1024

    def metrics(self, key: str | None = None) -> dict[str, float]:
        """Every sample of /metrics, by its name with its labels."""
        answer = self._http.get(f"{self.url}/metrics", headers=bearer(key)).raise_for_status()
        samples = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def http(self, key: str | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=bearer(key), timeout=PATIENCE, verify=False)

    def openai(self, key: str | None = None) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=PATIENCE, max_retries=0)


class ForkedServer(Server):
    """One whose processes begin with all that a server imports, which is most of what a start takes. Otherwise each is as any."""

    def launched(self) -> Forked:
        return nest().fork(self.log, self.arguments)


class Nest:
    """A process that has imported what a server imports, on one thread, and forks one for each that is asked for.

    It ends with its owner.
    """

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", "tests.mini_server"], subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, env=environment())
        self._lock = threading.Lock()

    def _asked(self, *what: object) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            stdin.write(json.dumps([str(each) for each in what]).encode() + b"\n")
            stdin.flush()
            return int(stdout.readline())

    def fork(self, log: Path, arguments: Sequence[str]) -> Forked:
        return Forked(self, self._asked("fork", log, *arguments))

    def status(self, pid: int) -> int:
        """What a process that has ended returned, as Popen has it."""
        return self._asked("status", pid)


class Forked:
    """A child of the nest, as Popen shows one of our own."""

    def __init__(self, nest: Nest, pid: int) -> None:
        self.pid = pid
        self._nest = nest
        self._ended = os.pidfd_open(pid)  # the nest lets nobody else have the number before it is asked for the status
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and select.select([self._ended], [], [], 0)[0]:
            self._status = self._nest.status(self.pid)
            os.close(self._ended)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("mini_scheduler", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def nest() -> Nest:
    """That of this process."""
    return Nest()


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def sit() -> None:
    """What a nest does, until its owner closes the pipe."""
    from mini_scheduler.__main__ import main

    assert len(os.listdir("/proc/self/task")) == 1  # a child has no other thread, and would miss what it holds
    for line in sys.stdin:
        match json.loads(line):
            case ["fork", log, *arguments]:
                pid = os.fork()
                if pid == 0:
                    become(Path(log))
                    main(arguments)
                    return
                print(pid, flush=True)
            case ["status", pid]:
                _, status = os.waitpid(int(pid), 0)
                print(os.waitstatus_to_exitcode(status), flush=True)


def become(log: Path) -> None:
    """Have the standard streams of a server."""
    with log.open("ab") as said, open(os.devnull, "rb") as nothing:
        for file, number in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(file.fileno(), number)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


if __name__ == "__main__":
    sit()
