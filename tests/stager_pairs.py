"""Two stagers that make the same batches, one in NumPy and one by the kernels: every output, tails included, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine_bridge import InputStager
from sessiontree import Draft
from tests.test_stager import forest, windows_of

MAX_TOKENS, MAX_REQUESTS, MAX_RUNS = 4_096, 16, 512


def same(one: InputStager, two: InputStager, what: object) -> None:
    for name, tensor in one.buffers.items():
        assert tensor.cpu().numpy().tobytes() == two.buffers[name].cpu().numpy().tobytes(), (name, what)


def compare(family: str, rule: str, seed: int, by_kernels: Callable[..., InputStager]) -> None:
    """Random batches of random forests of a family's golden histories, then slots that decode, in each dtype and number of axes."""
    rng = random.Random(f"{family}@{rule} {seed}")
    found = forest(family, rule, rng, 3)
    for axes in {holder.scheme.num_axes for holder in found}:
        holders = [holder for holder in found if holder.scheme.num_axes == axes]
        for dtype in (torch.int64, torch.int32, torch.float32):
            one, two = (
                made(MAX_TOKENS, MAX_REQUESTS, MAX_RUNS, axes, dtype=dtype, max_decode_width=3)
                for made in (InputStager, by_kernels)
            )
            modes: tuple[Any, ...] = ("as_decoded", "as_replayed", "as_decoded")
            for mode in modes:
                some = [rng.choice(holders) for _ in range(rng.randrange(1, 12))]
                starts, stops = windows_of(some, rng)
                while sum(stops) - sum(starts) > MAX_TOKENS:
                    some, starts, stops = some[1:], starts[1:], stops[1:]
                for stager in (one, two):
                    stager.extend(some, starts, stops, mode=mode)
                same(one, two, (family, rule, seed, mode))
            drafts = [holder for holder in holders if isinstance(holder, Draft) and holder.stop > 3]
            drafts = [draft for draft in drafts if draft.scheme.decode_room(draft.position_state()) is None][:MAX_REQUESTS]
            slots = rng.sample(range(MAX_REQUESTS), len(drafts))
            for stager in (one, two):
                stager.admit(drafts, slots)
            for _ in range(4):
                step, width = rng.sample(slots, rng.randrange(len(slots) + 1)), rng.randrange(1, 3)
                counts = [rng.randrange(4) for _ in step]
                tokens = np.array([[rng.randrange(2**31) for _ in range(3)] for _ in step], np.int64).reshape(len(step), 3)
                for stager in (one, two):
                    stager.advance(step, torch.from_numpy(tokens).to(stager.device) if width == 2 else tokens, counts)
                    stager.rollback(
                        step, [int(stager._lengths[slot]) - min(count, 2) for slot, count in zip(step, counts, strict=True)]
                    )
                    stager.decode(step, width)
                same(one, two, (family, rule, seed, "decode"))
                for turn in range(4):  # the same slots again and again, with tokens that are on the device
                    for stager in (one, two):
                        sampled = torch.from_numpy(tokens[:, turn % 3]).to(stager.device)
                        if turn % 2:  # where they are to be, or there in a row
                            place = stager.sampled_tokens[:, 0] if turn == 1 else stager.sampled_tokens.view(-1)
                            place[: len(step)].copy_(sampled)
                            sampled = place[: len(step)]
                        stager.advance(step, sampled)
                        stager.decode(np.array(step, np.int32), width)
                    same(one, two, (family, rule, seed, "advance"))
