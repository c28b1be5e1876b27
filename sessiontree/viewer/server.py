"""The page over HTTP, from the standard library alone, for whoever sits at this machine.

It answers GET and HEAD, under an address or a name of its own: a page elsewhere whose name was made to lead here is refused. What
it shows comes from a :class:`Source`; it keeps nothing of its own. Nothing on it changes anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, gethostname
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from sessiontree.errors import SessionTreeError
from sessiontree.viewer.page import page, policy

_SECONDS: Final = 30  # that a client may be silent in the middle of a request
_PORT: Final = re.compile(r":\d*$")


class Source(Protocol):
    """What a server shows. Each call may come from another thread. Raises SessionTreeError where something cannot be read."""

    def sessions(self) -> list[dict[str, Any]]:
        """What there is, in order: the ``id`` of each, how many ``nodes`` it has, and whether it is ``first``."""

    def tree(self, session_id: str, known: str) -> bytes | None:
        """A session's shape, packed; ``known``: the mark of what is known of it. None where nothing is new. Raises the same."""

    def chunk(self, session_id: str, number: int) -> bytes:
        """Its nodes of one number, packed."""

    def picture(self, session_id: str, name: str) -> bytes:
        """A thumbnail that a chunk named, packed."""

    def said_of(self, error: SessionTreeError) -> str:
        """What a reader is told of an error."""


class Server(ThreadingHTTPServer):
    """``host``, ``port``: where it listens; port 0: any that is free. ``url``: where its page is."""

    daemon_threads = True

    def __init__(self, source: Source, host: str, port: int) -> None:
        self.address_family: int = AF_INET6 if ":" in host else AF_INET
        super().__init__((host, port), _Handler)
        self.source = source
        self.port: int = int(self.server_address[1])
        self._names = {"localhost", host.lower(), gethostname().lower()}
        self.url: str = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def is_called(self, host: str) -> bool:
        """Whether a request's Host may be this one: an address, which nobody else can have lead here, or a name of its own."""
        name = host.rpartition(":")[0] if _PORT.search(host) else host
        try:
            ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return name in self._names
        return True

    def server_bind(self) -> None:
        """Without asking what this machine is called."""
        self.allow_reuse_address = True
        super(ThreadingHTTPServer, self).server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever went away in the middle is no error of ours."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "sessiontree"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS

    def do_GET(self) -> None:
        if not self.server.is_called(self.headers.get("Host", "").lower()):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "this server is not called that")
            return
        parts = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        source = self.server.source
        answers: dict[str, Callable[[], bytes | None]] = {
            "/sessions": lambda: json.dumps(source.sessions()).encode(),
            "/tree": lambda: source.tree(asked["session"], asked.get("known", "")),
            "/chunk": lambda: source.chunk(asked["session"], int(asked["number"])),
            "/picture": lambda: source.picture(asked["session"], asked["name"]),
        }
        if parts.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", "".join(page(live=True)).encode())
        elif (answer := answers.get(parts.path)) is None:
            self._say(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            try:
                data = answer()
            except (KeyError, ValueError):
                self._say(HTTPStatus.BAD_REQUEST, "asked wrongly")
            except SessionTreeError as error:
                self._say(HTTPStatus.CONFLICT, source.said_of(error))
            else:
                kind = "application/json" if parts.path == "/sessions" else "application/octet-stream"
                self._answer(HTTPStatus.NO_CONTENT if data is None else HTTPStatus.OK, kind, data or b"")

    do_HEAD = do_GET

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", text.encode("utf-8", "backslashreplace"))

    def _answer(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        if status != HTTPStatus.NO_CONTENT:
            headers["Content-Length"] = str(len(data))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said of what goes well; the page shows what does not."""
