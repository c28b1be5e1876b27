"""A server that speaks S3, on the loopback: moto's, with faults where a test asks for them. What it holds outlives a stop.

A fault is told the method and the path of each request, and says what goes wrong with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

from sessiontree.backends.buckets import BucketBlobs

#: "error": it is not done, and says 500. "lost": it is done, and says 500. "conflict": 409, as where another is at it. "refused":
#: 403. "short": half of the answer comes. "flipped": one bit of it is another.
Fault = Literal["error", "lost", "conflict", "refused", "short", "flipped"]
_SAYS = {"error": "500 Internal Server Error", "lost": "500 Internal Server Error", "conflict": "409 Conflict", "refused": "403 No"}
_buckets = itertools.count()


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class BucketServer:
    """In ``with``, it runs. ``requests``: the method and the path of each, with the query. ``fault``: see above."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self._app = DomainDispatcherApplication(create_backend_app)

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> BucketServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def bucket(self) -> str:
        """The URL of a new bucket."""
        name = f"bucket-{next(_buckets)}"
        _backend().create_bucket(name, "us-east-1")
        return f"s3://{name}"

    @property
    def options(self) -> dict[str, Any]:
        """How it is reached."""
        return {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "test",
            "secret_access_key": "test",
            "region": "us-east-1",
        }

    def blobs(self, url: str, **options: Any) -> BucketBlobs:
        return BucketBlobs(url, **self.options, **options)

    def age(self, url: str, seconds: float) -> None:
        """Have all that lies in a bucket been there for longer."""
        for key in _backend().buckets[url.split("/")[2]].keys.values():
            key.last_modified -= timedelta(seconds=seconds)

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append((method, path))
        fault = self.fault(method, path)
        if fault in ("error", "conflict", "refused"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        else:
            said: list[Any] = []
            body = b"".join(self._app(environ, lambda *answer: said.append(answer)))
            if fault != "lost":
                start(*said[-1])
                if fault == "flipped" and body:
                    body = bytes([body[0] ^ 1]) + body[1:]
                return [body[: len(body) // 2] if fault == "short" else body]
        start(_SAYS[fault or ""], [("content-length", "0")])
        return []


def _backend() -> Any:
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
