"""``/generate``, as SGLang answers it: text and ids so far, and ``meta_info``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from qwen_reference import IMAGE_PAD

from mini_scheduler import schemas
from mini_scheduler.chat import num_placeholders
from mini_scheduler.failures import Refused
from mini_scheduler.generations import Answer, Generation
from mini_scheduler.requests import Sampling
from mini_scheduler.streams import DONE, check, event
from mini_scheduler.text import encode
from sessiontree import MediaItem


def prompt_of(body: schemas.Generate, pictures: Sequence[MediaItem], vocab_size: int) -> tuple[list[int], list[MediaItem]]:
    """Token ids with a placeholder for each row of a picture's, and the pictures where they stand. Raises Refused."""
    if (body.text is None) == (body.input_ids is None):
        raise Refused(400, "a prompt is text or input_ids, one of the two", param="text")
    compact = encode(body.text, special=True) if body.text is not None else list(body.input_ids or ())
    if any(token >= vocab_size for token in compact):
        raise Refused(400, f"a token id is below {vocab_size}", type="OutOfRange", param="input_ids")
    if compact.count(IMAGE_PAD) != len(pictures):
        what = f"{compact.count(IMAGE_PAD)} times <|image_pad|> ({IMAGE_PAD}) and {len(pictures)} pictures; each stands for one"
        raise Refused(400, what, type="MediaSpanError", param="image_data")
    ids: list[int] = []
    media: list[MediaItem] = []
    shown = iter(pictures)
    for token in compact:
        if token != IMAGE_PAD:
            ids.append(token)
            continue
        picture = next(shown)
        media.append(picture.with_spans([(len(ids), num_placeholders(picture))]))
        ids += [IMAGE_PAD] * num_placeholders(picture)
    return ids, media


def uploads_of(body: schemas.Generate) -> list[str]:
    return [body.image_data] if isinstance(body.image_data, str) else body.image_data or []


def sampling_of(params: schemas.SamplingParams | None) -> Sampling:
    """What is null or missing is as it is by default. Raises OutOfRange, LimitExceeded."""
    given = {} if params is None else params.model_dump(exclude_none=True, exclude={"n"})
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return Sampling(**given)


def reply(generation: Generation) -> dict[str, Any]:
    check(generation)
    last = generation.last
    reason: dict[str, Any] | None = None
    if last is not None:
        reason = {"type": last.finish_reason}
        reason |= {} if last.matched is None else {"matched": last.matched}
        reason |= {"message": last.reason} if last.finish_reason == "abort" else {}
    return {
        "text": generation.text,
        "output_ids": list(generation.token_ids),
        "meta_info": {
            "id": generation.rid,
            "finish_reason": reason,
            "prompt_tokens": generation.prompt.stop,
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": generation.cached_tokens,
        },
    }


async def events(answer: Answer) -> AsyncIterator[str]:
    many = len(answer.generations) > 1
    async for generation, _ in answer.outputs():
        index = {"index": answer.generations.index(generation)} if many else {}
        yield event(reply(generation) | index)
    yield DONE
