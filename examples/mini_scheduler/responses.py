"""``/v1/responses``: what a response is made from and remembered as, and its events.

All that a response is, beside its tokens, is kept with its node: what was given to it, and how it was asked for. Pictures are kept
as what they are, never as their bytes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from mini_scheduler import schemas
from mini_scheduler.failures import Refused
from mini_scheduler.generations import Answer, Generation
from mini_scheduler.requests import Sampling
from mini_scheduler.streams import check_finished, event
from mini_scheduler.text import IM_END, IM_START, encode
from sessiontree import MediaItem, Node

KEPT: Final = "response"  # what of a node's metadata is a response's


def sampling_of(body: schemas.CreateResponse) -> Sampling:
    given = {"max_new_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    return Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def instruction_ids(instructions: str | None) -> list[int]:
    """The tokens that a response's path begins with."""
    return [] if not instructions else [IM_START, *encode(f"system\n{instructions}"), IM_END, *encode("\n")]


def kept(body: schemas.CreateResponse, pictures: Sequence[MediaItem], sampling: Sampling) -> dict[str, Any]:
    """What is remembered of a request, JSON to the bottom."""
    return {
        "created_at": int(time.time()),
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "metadata": dict(body.metadata or {}),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": body.max_output_tokens,
        "store": body.store is not False,
        "input": input_items(body.input, pictures),
    }


def input_items(given: str | Sequence[schemas.InputItem], pictures: Sequence[MediaItem]) -> list[dict[str, Any]]:
    """The items of a request as they are listed, each with an id; texts as parts, pictures by their identity."""
    shown = iter(pictures)
    items = [schemas.MessageItem(role="user", content=given)] if isinstance(given, str) else given
    listed = []
    for item in items:
        fields = item.model_dump(exclude_none=True)
        fields["id"] = fields.get("id") or f"{_PREFIX[item.type]}_{uuid.uuid4().hex}"
        fields["status"] = fields.get("status") or "completed"
        if isinstance(item, schemas.MessageItem):
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts: list[dict[str, Any]] = (
                [{"type": kind, "text": item.content}] if isinstance(item.content, str) else fields["content"]
            )
            for part in parts:
                if part["type"] == "input_image":
                    part["image_url"] = None
                    part["file_id"] = next(shown).identity.hex()
                    part.setdefault("detail", "auto")
                elif part["type"] == "output_text":
                    part.setdefault("annotations", [])
            fields["content"] = parts
        listed.append(fields)
    return listed


def listed(node: Node) -> dict[str, Any]:
    """The items of a stored response's request."""
    items = _plain(node.metadata[KEPT]["input"])
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False}


def _plain(value: Any) -> Any:
    """Frozen metadata as JSON's own types."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


_PREFIX: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def response(
    response_id: str, model: str, asked: Mapping[str, Any], reply: Generation | Node | None, status: str
) -> dict[str, Any]:
    """A response; ``reply``: None before any of it is there."""
    cut = isinstance(reply, Node) and reply.finish_reason == "length"
    cut = cut or (isinstance(reply, Generation) and reply.last is not None and reply.last.finish_reason == "length")
    text = None
    if reply is not None:
        text = str(reply.metadata.get("text", "")) if isinstance(reply, Node) else reply.text
    return {
        "id": response_id,
        "object": "response",
        "created_at": asked["created_at"],
        "status": "incomplete" if cut else status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": asked["instructions"],
        "metadata": dict(asked["metadata"]),
        "model": model,
        "output": [] if text is None else [message(response_id, text, "incomplete" if cut else "completed")],
        "parallel_tool_calls": False,
        "previous_response_id": asked["previous_response_id"],
        "temperature": asked["temperature"],
        "top_p": asked["top_p"],
        "max_output_tokens": asked["max_output_tokens"],
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "store": asked["store"],
        "background": False,
        "usage": None if reply is None else usage(reply),
    }


def message(response_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [part(text)]
    return {"id": _message_id(response_id), "type": "message", "role": "assistant", "status": status, "content": content}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage(reply: Generation | Node) -> dict[str, Any]:
    if isinstance(reply, Node):
        prompt, completion, cached = reply.start, len(reply), 0
    else:
        prompt, completion, cached = reply.prompt.stop, len(reply.token_ids), reply.cached_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


class Events:
    """The events of one response, numbered."""

    def __init__(self, response_id: str, model: str, asked: Mapping[str, Any]) -> None:
        self._id = response_id
        self._model = model
        self._asked = asked
        self._number = 0
        self._where = {"item_id": _message_id(response_id), "output_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": f"response.{kind}", "sequence_number": number, **fields}, f"response.{kind}")

    def _response(self, reply: Generation | None, status: str) -> dict[str, Any]:
        return response(self._id, self._model, self._asked, reply, status)

    async def of(self, answer: Answer) -> AsyncIterator[str]:
        (generation,) = answer.generations
        where, place = self._where, {**self._where, "content_index": 0}
        yield self._event("created", response=self._response(None, "in_progress"))
        yield self._event("in_progress", response=self._response(None, "in_progress"))
        yield self._event("output_item.added", output_index=0, item=message(self._id, None, "in_progress"))
        yield self._event("content_part.added", **place, part=part(""))
        async for _, output in answer.outputs():
            check_finished(generation)
            if output.text:
                yield self._event("output_text.delta", **place, delta=output.text, logprobs=[])
        text, ended = generation.text, self._response(generation, "completed")
        yield self._event("output_text.done", **place, text=text, logprobs=[])
        yield self._event("content_part.done", **place, part=part(text))
        yield self._event("output_item.done", output_index=where["output_index"], item=ended["output"][0])
        yield self._event(ended["status"], response=ended)

    def failed(self, error: Refused) -> str:
        failure = {"code": "server_error", "message": str(error)}
        return self._event("failed", response=self._response(None, "failed") | {"error": failure})


def _message_id(response_id: str) -> str:
    return "msg_" + response_id.removeprefix("resp_")
