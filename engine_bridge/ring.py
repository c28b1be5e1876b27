"""A ring of staging areas, and how what is in them gets to the device: by hand, or as one CUDA graph for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Ring:
    """Staging areas of one size, the copy of them on the device, and what is launched to fill the outputs from it."""

    def __init__(self, words: int, depth: int, device: torch.device, pinned: bool) -> None:
        self.depth: int = depth if pinned else 1
        self.host: list[torch.Tensor] = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(self.depth)]
        self.areas: list[NDArray[np.int32]] = [host.numpy() for host in self.host]
        self.device: torch.Tensor = torch.zeros(words, dtype=torch.int32, device=device) if pinned else self.host[0]
        event: Any = torch.cuda.Event  # untyped; external: a graph records it as one of its own steps
        self.events: list[Any] = [event(external=True) for _ in range(self.depth)] if pinned else []
        self.graphs: dict[tuple[int, int, int], Any] = {}
        self.at: int = 0

    def next(self) -> int:
        """The area to be written now, whose last copy is done. It is current when ``at`` says so."""
        at = (self.at + 1) % self.depth
        if self.events and not self.events[at].query():
            self.events[at].synchronize()
        return at

    def launch(self, at: int, words: int, kernel: Callable[[int], None], graphed: bool, variant: int = 0) -> None:
        """Copy the first ``words`` of area ``at`` and run ``kernel`` behind that, on the current stream.

        0 words: the kernel reads the area by itself. ``variant``: which of the kernels that are launched with so many words.
        """
        self.at = at
        if not graphed:
            self._steps(at, words, kernel)
            return
        graph = self.graphs.get((at, words, variant))
        if graph is not None:
            graph.replay()
        else:  # this time without a graph, by which the kernel is compiled too
            self._steps(at, words, kernel)
            self.graphs[at, words, variant] = self._captured(at, words, kernel)

    def _steps(self, at: int, words: int, kernel: Callable[[int], None]) -> None:
        if words:
            self.copy(at, words)
            self.events[at].record()  # what is read behind this is the device's
            kernel(at)
        else:
            kernel(at)
            self.events[at].record()

    def copy(self, at: int, words: int) -> None:
        self.device[:words].copy_(self.host[at][:words], non_blocking=True)

    def _captured(self, at: int, words: int, kernel: Callable[[int], None]) -> Any:
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._steps(at, words, kernel)
        return graph
