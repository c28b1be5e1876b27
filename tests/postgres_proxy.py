"""A proxy before a PostgreSQL server, which cuts a connection where a test wants it cut, and counts round trips."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

#: Whose bytes are counted until the cut.
Side = Literal["client", "server"]


class Proxy:
    """In ``with``, it runs. ``url``: what clients connect to instead of the server's.

    ``round_trips``: how often a client said something after the server did, while there is one connection.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = parts.hostname or "127.0.0.1", parts.port or 5432
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password or ''}@127.0.0.1:{port}"))
        self.cuts = 0
        self.round_trips = 0
        self._last: Side = "server"
        self.refusing = False
        self._armed: tuple[Side, int] | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._generation = 0

    def cut_now(self) -> None:
        """Cut all connections that there are, once what they have carried is through."""
        self._generation += 1

    def cut(self, side: Side, after: int) -> None:
        """Cut the next connection that carries more than ``after`` bytes from that side, once they are through; one connection."""
        with self._lock:
            self._armed = side, after

    def _allowed(self, side: Side, size: int) -> int:
        """How many of so many bytes go through; fewer, and it is the end."""
        with self._lock:
            self.round_trips += side == "client" and self._last == "server"
            self._last = side
            if self._armed is None or self._armed[0] != side:
                return size
            after = self._armed[1]
            if size <= after:
                self._armed = side, after - size
                return size
            self._armed = None
            self.cuts += 1
            return after

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._server) as server, selectors.DefaultSelector() as selector:
            for each, other, side in ((client, server, "client"), (server, client, "server")):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(each, selectors.EVENT_READ, (other, side))
            generation = self._generation
            while not self._closing and generation == self._generation:
                for key, _ in selector.select(0.02):
                    other, side = key.data
                    data = key.fileobj.recv(2**20)  # type: ignore[union-attr]
                    if not data:
                        return
                    allowed = self._allowed(side, len(data))
                    other.sendall(data[:allowed])
                    if allowed < len(data):
                        return

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            thread = threading.Thread(target=self._carry, args=(client,))
            thread.start()
            self._threads.append(thread)

    def __enter__(self) -> Proxy:
        thread = threading.Thread(target=self._run)
        thread.start()
        self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()
