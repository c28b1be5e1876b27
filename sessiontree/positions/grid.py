"""Qwen2-VL and Qwen2.5-VL: every image and video is one grid on the axes (t, h, w), text stands alike on all three.

Rules read from the released sources of transformers 5.24 (hf5), SGLang 0.5.23 and vLLM 0.33. They differ in where text
continues after a block, and, for Qwen2.5-VL, in how a frame's time is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sessiontree.errors import PositionError, PositionLimitExceeded, Unsupported
from sessiontree.media import MediaItem
from sessiontree.positions.base import PositionScheme


class Qwen2VL(PositionScheme):
    """``qwen2_vl@<rule>``: frames one position apart.

    hf5 continues text at base + max(h, w) of the merged grid, sglang and vllm one past the block's greatest position.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen2_vl"
    num_axes: ClassVar[int] = 3
    defaults: ClassVar[Mapping[str, Any]] = {
        "spatial_merge_size": 2,  # of every released checkpoint
        "image_token_id": None,
        "video_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
    }

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.modality == "audio" or item.audio_feature_length is not None:
            raise Unsupported(f"{self.name} has no audio, {item} cannot be placed", item=item)
        if item.grid_thw is None:
            raise PositionError(f"{item} has no grid_thw; {self.name} places nothing without one", item=item)
        merge = self._params["spatial_merge_size"]
        frames, height, width = item.grid_thw
        if height < merge or width < merge:
            raise PositionError(f"{item}: grid {item.grid_thw} is smaller than spatial_merge_size {merge}", item=item)
        return frames, height // merge, width // merge

    def advance(self, last_time: int, height: int, width: int) -> int:
        return max(height, width) if self.rule == "hf5" else max(last_time + 1, height, width)


class Qwen25VL(Qwen2VL):
    """``qwen2_5_vl@<rule>``: the frames of a video stand trunc(i * tokens_per_second * second_per_grid_ts) from its base.

    The product is taken in float32 by hf5, i * (tps * spg), and by sglang, (i * spg) * tps; in float64 by vllm, from a float32
    spg. A video without ``second_per_grid_ts`` has 1 second a grid, as in all three. Images are not scaled.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen2_5_vl"
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VL.defaults, "tokens_per_second": None, "time": None}

    def frame_times(self, item: MediaItem, first: int, stop: int) -> Sequence[int]:
        if item.modality == "image" or stop == 1:
            return range(first, stop)
        rate = self._params.get("tokens_per_second")
        if rate is None:
            raise PositionError(f"{item}: {self.name} was not given tokens_per_second, which videos need", item=item)
        single = np.float32
        with np.errstate(over="ignore", invalid="ignore"):  # whatever overflows is over the limit below
            seconds = single(1.0 if item.second_per_grid_ts is None else item.second_per_grid_ts)
            if self.rule == "hf5":
                times = np.arange(first, stop, dtype=single) * (single(rate) * seconds)
            elif self.rule == "sglang":
                times = (np.arange(first, stop, dtype=single) * seconds) * single(rate)
            else:
                times = np.arange(first, stop, dtype=np.float64) * (float(seconds) * rate)
        if not float(times[-1]) < self.max_position_limit:
            raise PositionLimitExceeded(
                f"{item}: frame {stop - 1} stands at {times[-1]}, {self.name}'s max_position_limit is {self.max_position_limit}",
                item=item,
                value=float(times[-1]),
                limit=self.max_position_limit,
            )
        whole: list[int] = times.astype(np.int64).tolist()
        return whole
