"""The mini scheduler as a process of its own: started on a port of the loopback, stopped, killed, started again on its store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
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

    ``url`` is new with every start. What it prints is in ``log``, of all its lives.
    """

    def __init__(
        self, store: Path | str, *arguments: object, keys: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.store = store
        self.log = log or Path(store).with_name(f"{Path(store).name}.log")
        named = [f"{tenant}={key}" for tenant, key in (keys or {}).items()]
        options = [str(each) for each in arguments] + [each for pair in named for each in ("--api-key", pair)]
        self.command = [sys.executable, "-m", "mini_scheduler", "--store", str(store), "--port", "0", *options]
        self.url = ""
        self._http = httpx.Client(timeout=PATIENCE, verify=False)  # of TLS there is none: looking for certificates takes its time
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()
        if self.process is not None:
            self.kill()

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the server is not running"
        return self.process

    def start(self) -> None:
        """Start it, and wait until it is healthy."""
        assert self.process is None
        path = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            told = log.tell()
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
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


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
