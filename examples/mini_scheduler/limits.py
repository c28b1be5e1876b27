"""How much a request may bring, and take. Bodies are counted while they are read, whatever they say of their length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_scheduler.failures import Refused


@attrs.frozen
class Limits:
    """``body_bytes``: of a request. ``image_bytes``, ``image_pixels``: of one picture, as a file and as its header says.
    ``timeout``: seconds until a request is given up, and in which its body has to come. ``grace``: seconds that running requests
    have once the server is to stop."""

    body_bytes: int = 8 * 2**20
    image_bytes: int = 4 * 2**20
    image_pixels: int = 4_000_000
    timeout: float = 120.0
    grace: float = 5.0


class BodyLimit:
    """Reads the body of each request before the app sees any of it; one that is too large or slow is answered here.

    ``check``: is given the ``Authorization`` of a request that has a body, before that is read; raises Refused.
    """

    def __init__(self, app: ASGIApp, limits: Limits, check: Callable[[str | None], object]) -> None:
        self.app = app
        self.limits = limits
        self.check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.limits.timeout):
                body = await self._read(scope, receive)
        except TimeoutError:
            refusal = Refused(408, f"the body did not come within {self.limits.timeout:g} seconds", type="timeout", code="timeout")
        except Refused as refused:
            refusal = refused
        else:
            await self._pass_on(body, scope, receive, send)
            return
        await refusal.response()(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None: the client has left. Raises Refused."""
        body, more, limit = bytearray(), True, self.limits.body_bytes
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            more = message.get("more_body", False)
            if not body and (more or message.get("body")):
                self.check(Headers(scope=scope).get("authorization"))
            body += message.get("body", b"")
            if len(body) > limit:
                raise Refused(413, f"a body has {limit} bytes at most", type="LimitExceeded", code="body_too_large")
        return bytes(body)

    async def _pass_on(self, body: bytes | None, scope: Scope, receive: Receive, send: Send) -> None:
        if body is None:
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, replay, send)
