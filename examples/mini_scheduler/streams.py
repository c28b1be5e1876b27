"""Waiting for replies while watching the client: one that leaves, or that has waited for too long, gives its request up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mini_scheduler.failures import Refused, to_json
from mini_scheduler.generations import Answer, Generation

DONE = "data: [DONE]\n\n"
TIMED_OUT = "timed out"


def timed_out(seconds: float) -> Refused:
    return Refused(504, f"no answer within {seconds:g} seconds; the request was given up", type="timeout", code="timeout")


def event(content: Any, name: str | None = None) -> str:
    """A server-sent event."""
    return f"data: {to_json(content)}\n\n" if name is None else f"event: {name}\ndata: {to_json(content)}\n\n"


def error_event(error: Refused) -> str:
    return event(error.body) + DONE


async def whole(request: Request, answer: Answer, timeout: float) -> list[Generation]:
    """The replies, complete. Raises Refused: 504, or 499 to nobody where the client has left."""
    replies = asyncio.create_task(answer.whole())
    gone = asyncio.create_task(_left(request.receive))
    try:
        done, _ = await asyncio.wait((replies, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if replies in done:
            return replies.result()
        answer.abort(TIMED_OUT if not done else "the client left")
        raise Refused(499, "the client left", type="disconnect") if done else timed_out(timeout)
    except asyncio.CancelledError:
        answer.abort("the server is shutting down")
        raise
    finally:
        replies.cancel()
        gone.cancel()


class EventStream(Response):
    """Server-sent events of an answer. ``failed``: makes the last events of one that failed on the way."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        events: AsyncIterator[str],
        timeout: float,
        failed: Callable[[Refused], str] = error_event,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._answer = answer
        self._events = events
        self._timeout = timeout
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:  # nothing is left to abort where all was sent
            self._answer.abort("the client left")
            sending.cancel()
            gone.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._timeout):
                async for text in self._events:
                    await send(_piece(text))
        except TimeoutError:
            self._answer.abort(TIMED_OUT)
            await send(_piece(self._failed(timed_out(self._timeout))))
        except Refused as error:
            self._answer.abort("another reply failed")
            await send(_piece(self._failed(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _piece(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode("ascii"), "more_body": True}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check(generation: Generation) -> None:
    """Raises Refused for a reply that ended in an error."""
    if generation.last is not None and generation.last.finish_reason == "error":
        error = generation.last.error
        raise Refused(500, "the engine failed", type="engine_error") if error is None else Refused.of(error)


def check_finished(generation: Generation) -> None:
    """Also for one that was aborted, where an answer has no word for that."""
    check(generation)
    if generation.last is not None and generation.last.finish_reason == "abort":
        raise Refused(503, f"aborted: {generation.last.reason}", type="aborted", code="aborted")
