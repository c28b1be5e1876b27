"""The next token of each request from its row of logits. A row's token depends on that row, the seed and the place in the reply
alone: not on the batch, so a request that was preempted goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from qwen_reference import TEXT

from mini_scheduler.requests import Request
from mini_scheduler.text import IM_END


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """``logits``: (B, vocabulary) float32. Of ids that are text, and the end of the turn."""
    return [_pick(row, request) for row, request in zip(logits, requests, strict=True)]


def logprob(row: torch.Tensor, request: Request, token: int) -> float:
    """Of a token that was picked, at the request's temperature (0: at 1), before ``top_k`` and ``top_p``."""
    below = _allowed(row, request).double() / (request.sampling.temperature or 1.0)
    return float(below[token if token < TEXT else TEXT] - torch.logsumexp(below, 0))


def _allowed(row: torch.Tensor, request: Request) -> torch.Tensor:
    """Logits of what may be picked: the end of the turn stands behind the ids that are text."""
    return row[:TEXT] if request.sampling.ignore_eos else torch.cat((row[:TEXT], row[IM_END : IM_END + 1]))


def _pick(row: torch.Tensor, request: Request) -> int:
    allowed = _allowed(row, request)
    at = int(allowed.argmax()) if request.sampling.temperature == 0 else _draw(allowed, request)
    return at if at < TEXT else IM_END


def _draw(row: torch.Tensor, request: Request) -> int:
    """By the inverse of the cumulative distribution, so that one number decides."""
    sampling = request.sampling
    below = row.double() - row.max()  # so that the smallest temperature leaves the likeliest as it is
    chances = torch.softmax(below / sampling.temperature, 0)
    ids = None  # in their own order, unless only the likeliest count: sorting them all takes 50 times as long as the rest
    if sampling.top_k > 0 or sampling.top_p < 1:
        chances, ids = torch.sort(chances, descending=True, stable=True)
        if sampling.top_k > 0:
            chances[sampling.top_k :] = 0
        sums = chances.cumsum(0)
        # Those before which less than top_p lies: the likeliest is always one of them.
        chances[(sums - chances) >= sampling.top_p * sums[-1]] = 0
    sums = chances.cumsum(0)
    seed = request.draft.key if sampling.seed is None else sampling.seed
    word = blake2b(f"{seed}:{len(request.draft)}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    at = int(torch.searchsorted(sums, sums[-1] * (int.from_bytes(word, "little") / 2**64), right=True))
    at = min(at, len(sums) - 1)
    return at if ids is None else int(ids[at])
