"""``/v1/chat/completions``: replies as OpenAI's clients read them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mini_scheduler import schemas
from mini_scheduler.failures import Refused
from mini_scheduler.generations import Answer, Generation
from mini_scheduler.requests import Sampling
from mini_scheduler.streams import DONE, check_finished, event


def sampling_of(body: schemas.ChatCompletion) -> Sampling:
    """Raises Refused, OutOfRange, LimitExceeded."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise Refused(400, "max_tokens is the older name of max_completion_tokens; one of them is enough", param="max_tokens")
    given: dict[str, Any] = {
        "max_new_tokens": body.max_completion_tokens or body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": body.seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    prompt, completion = generations[0].prompt.stop, sum(len(generation.token_ids) for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": max(generation.cached_tokens for generation in generations)},
    }


def completion(completion_id: str, model: str, generations: Sequence[Generation]) -> dict[str, Any]:
    choices = []
    for index, generation in enumerate(generations):
        check_finished(generation)
        assert generation.last is not None
        message = {"role": "assistant", "content": generation.text, "refusal": None}
        choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": generation.last.finish_reason})
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(generations),
    }


async def chunks(completion_id: str, model: str, answer: Answer, *, with_usage: bool) -> AsyncIterator[str]:
    """One event for each piece of text; the role of each choice first, its finish_reason last, usage behind them all."""
    head = {"id": completion_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    more = {"usage": None} if with_usage else {}

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> str:
        return event({**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}], **more})

    for index in range(len(answer.generations)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for generation, output in answer.outputs():
        check_finished(generation)
        index = answer.generations.index(generation)
        if output.text:
            yield chunk(index, {"content": output.text})
        if output.finish_reason is not None:
            yield chunk(index, {}, output.finish_reason)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(answer.generations)})
    yield DONE
