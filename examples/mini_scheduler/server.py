"""The HTTP front: routes, and what becomes of errors. What a route does is in :mod:`mini_scheduler.service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from mini_scheduler import completions, native, responses, schemas
from mini_scheduler.failures import Json, Refused
from mini_scheduler.limits import BodyLimit
from mini_scheduler.service import Config, Service, serving
from mini_scheduler.sessions import session_store_id
from mini_scheduler.streams import EventStream, check_finished, whole
from sessiontree import SessionTreeError

_logger = logging.getLogger("mini_scheduler")


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "a value that cannot be",
        401: "no tenant's key",
        404: "nothing of this name",
        409: "taken, or moved",
        408: "the body did not come",
        413: "too large",
        415: "no JSON",
        422: "not of this shape",
        429: "too many requests wait",
        503: "the store or the engine cannot go on",
        504: "timed out",
    }.items()
}
_STREAMED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "whole, or as server-sent events", "content": {"application/json": {}, "text/event-stream": {}}}
}
router = APIRouter(responses=_ERRORS)
_bearer = HTTPBearer(auto_error=False)


def service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def tenant(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None) -> str:
    return service(request).config.tenants.name(request.headers.get("authorization"))


def admin(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None) -> None:
    service(request).config.tenants.check_admin(request.headers.get("authorization"))


Here = Annotated[Service, Depends(service)]
Tenant = Annotated[str, Depends(tenant)]
Admin = Annotated[None, Depends(admin)]


# --- SGLang's -----------------------------------------------------------------------------------------------------------
@router.post("/open_session")
async def open_session(here: Here, tenant: Tenant, body: schemas.OpenSession) -> Response:
    made = await here.sessions.open(tenant, body.session_id, streaming=body.streaming or False, timeout=body.timeout)
    return Json(made)


@router.post("/close_session")
async def close_session(here: Here, tenant: Tenant, body: schemas.CloseSession) -> Response:
    await here.sessions.close(session_store_id(tenant, body.session_id))
    return Json({})


@router.post("/generate", responses=_STREAMED)
async def generate(request: Request, here: Here, tenant: Tenant, body: schemas.Generate) -> Response:
    answer = await here.generate(tenant, body)
    timeout = here.config.limits.timeout
    if body.stream:
        return EventStream(answer, native.events(answer), timeout)
    replies = [native.reply(generation) for generation in await whole(request, answer, timeout)]
    return Json(replies[0] if len(replies) == 1 else replies)


@router.post("/abort_request")
async def abort_request(here: Here, tenant: Tenant, body: schemas.AbortRequest) -> Response:
    here.sessions.abort(tenant, body.rid, everything=body.abort_all or False)
    return Json({})


@router.get("/sessions/{session_id}")
async def describe_session(here: Here, tenant: Tenant, session_id: str) -> Response:
    streaming, requests = await here.sessions.describe(session_store_id(tenant, session_id))
    return Json({"session_id": session_id, "streaming": streaming, "requests": requests})


@router.post("/sessions/{session_id}/fork")
async def fork_session(here: Here, tenant: Tenant, session_id: str, body: schemas.Fork) -> Response:
    made, rid, tokens = await here.sessions.fork(tenant, session_id, body.rid, body.session_id)
    return Json({"session_id": made, "rid": rid, "tokens": tokens})


# --- OpenAI's -----------------------------------------------------------------------------------------------------------
@router.post("/v1/chat/completions", responses=_STREAMED)
async def chat_completions(request: Request, here: Here, tenant: Tenant, body: schemas.ChatCompletion) -> Response:
    completion_id, answer = await here.complete(tenant, body)
    name, timeout = here.model.name, here.config.limits.timeout
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage is True
        return EventStream(answer, completions.chunks(completion_id, name, answer, with_usage=with_usage), timeout)
    return Json(completions.completion(completion_id, name, await whole(request, answer, timeout)))


@router.post("/v1/responses", responses=_STREAMED)
async def create_response(request: Request, here: Here, tenant: Tenant, body: schemas.CreateResponse) -> Response:
    response_id, asked, answer = await here.respond(tenant, body)
    name, timeout = here.model.name, here.config.limits.timeout
    if body.stream:
        events = responses.Events(response_id, name, asked)
        return EventStream(answer, events.of(answer), timeout, events.failed)
    (reply,) = await whole(request, answer, timeout)
    check_finished(reply)
    return Json(responses.response(response_id, name, asked, reply, "completed"))


@router.get("/v1/responses/{response_id}")
async def get_response(here: Here, tenant: Tenant, response_id: str) -> Response:
    node = await here.stored_response(tenant, response_id)
    return Json(responses.response(response_id, here.model.name, node.metadata[responses.KEPT], node, "completed"))


@router.delete("/v1/responses/{response_id}")
async def delete_response(here: Here, tenant: Tenant, response_id: str) -> Response:
    await here.forget_response(tenant, response_id)
    return Json({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(here: Here, tenant: Tenant, response_id: str) -> Response:
    node = await here.stored_response(tenant, response_id)
    return Json(responses.listed(node))


@router.get("/v1/models")
async def models(here: Here, tenant: Tenant) -> Response:
    model = {"id": here.model.name, "object": "model", "created": 0, "owned_by": "sessiontree"}
    return Json({"object": "list", "data": [model]})


# --- operation ----------------------------------------------------------------------------------------------------------
@router.get("/health")
async def health(here: Here) -> Response:
    try:
        async with asyncio.timeout(5):
            healthy = await here.healthy()
    except (SessionTreeError, TimeoutError):
        healthy = False
    if not healthy:
        raise Refused(503, "the engine or the store has stopped", type="unhealthy")
    return Json({"status": "ok", "model": here.model.name})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(here: Here, _: Admin) -> Response:
    return PlainTextResponse(await asyncio.to_thread(here.figures.text), media_type="text/plain; version=0.0.4")


# --- errors -------------------------------------------------------------------------------------------------------------
async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, SessionTreeError)
    refused = Refused.of(error)
    if refused.status >= 500:
        _logger.error("%s", error)
    return refused.response()


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = Refused(error.status_code, str(error.detail)).response()
    response.headers.update(error.headers or {})
    return response


async def _other_shape(request: Request, error: Exception) -> Response:
    """Says which fields, and never what stood in them."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if not request.headers.get("content-type", "").partition(";")[0].strip().endswith("json") and found[0]["loc"] == ("body",):
        return Refused(415, "the body is JSON: send Content-Type: application/json", code="no_json").response()
    if any(each["type"] == "json_invalid" for each in found):
        return Refused(400, "the body is no JSON", code="invalid_json").response()
    fields = [".".join(str(step)[:64] for step in each["loc"][1:]) or "body" for each in found]
    what = "; ".join(f"{field}: {each['msg']}" for field, each in zip(fields[:3], found, strict=False))
    return Refused(422, what, param=fields[0]).response()


async def _fault(_: Request, error: Exception) -> Response:
    return Refused(500, "a fault of the server's", type="server_error").response()


def make_app(config: Config) -> FastAPI:
    """The app; its service begins and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with serving(config) as app.state.service:
            yield

    app = FastAPI(title="mini_scheduler", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(router)
    app.add_middleware(BodyLimit, limits=config.limits, check=config.tenants.name)
    for kind, handler in (
        (Refused, _refused),
        (SessionTreeError, _failed),
        (HTTPException, _no_route),
        (RequestValidationError, _other_shape),
        (Exception, _fault),
    ):
        app.add_exception_handler(kind, handler)
    return app
