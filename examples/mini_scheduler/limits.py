"""How much a request may bring, and take. Bodies are counted while they are read, whatever they say of their length."""

from __future__ import annotations

import attrs
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_scheduler.failures import Refused


@attrs.frozen
class Limits:
    """``body_bytes``: of a request. ``image_bytes``, ``image_pixels``: of one picture, as a file and as its header says.
    ``timeout``: seconds until a request is given up. ``grace``: seconds that running requests have once the server is to stop."""

    body_bytes: int = 8 * 2**20
    image_bytes: int = 4 * 2**20
    image_pixels: int = 4_000_000
    timeout: float = 120.0
    grace: float = 5.0


class BodyLimit:
    """Reads the body of each request before the app sees any of it; one that is too large is answered here, with 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.limit:
                refusal = Refused(413, f"a body has {self.limit} bytes at most", type="LimitExceeded", code="body_too_large")
                await refusal.response()(scope, receive, send)
                return
        read: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        del body

        async def replay() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, replay, send)
