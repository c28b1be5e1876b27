"""What goes wrong, as HTTP says it: a status and ``{"error": {"message", "type", "param", "code"}}``, always in ASCII."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.responses import Response

from mini_scheduler.engine import EngineFault, QueueFull
from sessiontree import (
    CorruptTree,
    HeadMoved,
    IncompatibleStore,
    KeyTaken,
    NeedsMedia,
    SessionExists,
    SessionTreeError,
    StaleSession,
    StoreFailed,
    UnknownHead,
    UnknownNode,
    UnknownSession,
)

# The first that fits. NameTaken is a HeadMoved, StoreClosed a StoreFailed.
_STATUS: Final[tuple[tuple[type[SessionTreeError], int], ...]] = (
    (QueueFull, 429),
    (EngineFault, 500),
    (UnknownSession, 404),
    (UnknownHead, 404),
    (UnknownNode, 404),
    (StaleSession, 404),
    (SessionExists, 409),
    (KeyTaken, 409),
    (HeadMoved, 409),
    (IncompatibleStore, 409),
    (NeedsMedia, 503),
    (StoreFailed, 503),
    (CorruptTree, 503),
)


class Refused(Exception):
    """A request that gets no answer but this. ``param``: the field at fault. ``code``: a word that programs may look for."""

    def __init__(
        self, status: int, message: str, *, type: str = "invalid_request", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code

    @classmethod
    def of(cls, error: SessionTreeError) -> Refused:
        """A failure of the library's: its message and its type's name. What is nobody's fault but the request's is a 400."""
        name = type(error).__name__
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
        if isinstance(error, UnknownSession):  # not its own message, which names what tenants do not: the store's id
            return cls(404, "there is no session of this name", type=name)
        if status == 404:
            return cls(404, "nothing that has finished has this name", type=name)
        if isinstance(error, SessionExists):
            return cls(409, "there is a session of this name; go on with it, or close it", type=name)
        if isinstance(error, NeedsMedia):
            return cls(503, "the pixels of a picture in this history are lost", type=name)
        if status == 503:
            return cls(503, "the store takes no request at this time", type=name)
        return cls(status, str(error), type=name)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return Json(self.body, self.status, headers)


class Json(Response):
    """JSON in ASCII, so that a lone surrogate that somebody sent is no fault of the answer's."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def to_json(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)
