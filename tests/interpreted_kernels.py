"""Run by test_stager in a process of its own, with TRITON_INTERPRET set before Triton is imported: the kernels, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from engine_bridge import InputStager, kernels
from sessiontree import SessionStore
from sessiontree.positions import scheme
from tests.stager_pairs import compare
from tests.test_positions_golden import CASES


def launch(ring: Any, at: int, words: int, kernel: Any, graphed: bool, variant: int = 0) -> None:
    ring.at = at
    kernel(at)


class Interpreted(InputStager):
    """A stager on the CPU whose outputs come from the kernels. Without a device there is nothing to copy."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._kernels = kernels
        for ring in (self._extend_ring, self._decode_ring, self._update_ring):
            ring.launch = partial(launch, ring)  # type: ignore[method-assign]


def sampled_views() -> None:
    """Tokens that lie in ``sampled_tokens`` in another order than it gives them are taken as they were given."""
    session = SessionStore.in_memory().create("s", scheme=scheme("text@hf5"))
    node = session.append(session.root, [1])
    slots = np.arange(4, dtype=np.int32)
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda sampled: sampled[:, :2],
        lambda sampled: sampled[:, 1:],
        lambda sampled: sampled.view(-1)[:8].reshape(4, 2),
        lambda sampled: sampled.view(-1)[4:].reshape(4, 2),
        lambda sampled: sampled.view(-1)[:4].reshape(4, 1),
        lambda sampled: sampled[:, :1],
        lambda sampled: sampled.view(torch.int32)[:, :2],
        lambda sampled: sampled.flip(0)[:, :2],
    )
    for view in views:
        stager = Interpreted(16, 4, max_decode_width=3)
        stager.admit([node] * 4, slots)
        stager.sampled_tokens.copy_(torch.arange(10, 22).reshape(4, 3))
        rows = view(stager.sampled_tokens)
        expected = rows.flatten().tolist()
        stager._update(slots, None, rows, rows.shape[1])
        assert stager.decode(slots, rows.shape[1]).input_ids.tolist() == expected, expected


if __name__ == "__main__":
    sampled_views()
    for seed in range(int(sys.argv[1])):
        for family, rule in CASES:
            if seed or rule in ("sglang", "hf5"):
                compare(family, rule, seed, Interpreted)
    print("the kernels and NumPy agree")
