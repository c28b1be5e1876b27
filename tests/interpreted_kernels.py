"""Run by test_stager in a process of its own, with TRITON_INTERPRET set before Triton is imported: the kernels, on the CPU."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from engine_bridge import InputStager, kernels
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


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        for family, rule in CASES:
            if seed or rule in ("sglang", "hf5"):
                compare(family, rule, seed, Interpreted)
    print("the kernels and NumPy agree")
