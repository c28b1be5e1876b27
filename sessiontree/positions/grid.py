"""Families whose images and videos are grids on the axes (t, h, w), while text stands alike on all three.

Rules read from the released sources of transformers 5.24 (hf5), SGLang 0.5.23 and vLLM 0.33. They differ in where text continues
after a video, and, for Qwen2.5-VL, in how a frame's time is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sessiontree.errors import OutOfRange, PositionError, PositionLimitExceeded, Unsupported
from sessiontree.frozen import frozen_array
from sessiontree.media import MediaItem
from sessiontree.positions.base import Cursor, PositionScheme, PositionState
from sessiontree.positions.runs import GridRun, Runs, packed
from sessiontree.tokens import as_index

IDS_2_VL: Mapping[str, Any] = {
    "image_token_id": None,
    "video_token_id": None,
    "vision_start_token_id": None,
    "vision_end_token_id": None,
}


class Qwen2VL(PositionScheme):
    """``qwen2_vl@<rule>``: frames one position apart.

    hf5 continues text at base + max(h, w) of the merged grid, sglang and vllm one past the block's greatest position.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen2_vl"
    defaults: ClassVar[Mapping[str, Any]] = {"spatial_merge_size": 2, **IDS_2_VL}  # 2: of every released checkpoint

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.modality == "audio" or item.audio_feature_length is not None:
            raise Unsupported(f"{self.name} has no audio, {item} cannot be placed", item=item)
        return self._merged(item, self._params["spatial_merge_size"])

    def _merged(self, item: MediaItem, merge: int, frames_merged: int = 1) -> tuple[int, int, int]:
        if item.grid_thw is None:
            raise PositionError(f"{item} has no grid_thw; {self.name} places nothing without one", item=item)
        frames, height, width = item.grid_thw
        if height < merge or width < merge:
            raise PositionError(f"{item}: grid {item.grid_thw} is smaller than spatial_merge_size {merge}", item=item)
        if frames < frames_merged:
            raise PositionError(f"{item}: grid {item.grid_thw} is shorter than temporal_merge_size {frames_merged}", item=item)
        return frames // frames_merged, height // merge, width // merge

    def advance(self, last_time: int, height: int, width: int) -> int:
        return max(height, width) if self.rule == "hf5" else max(last_time + 1, height, width)


class PaddleOCRVL(Qwen2VL):
    """``paddleocr_vl@<rule>``: as Qwen2-VL."""

    __slots__ = ()

    family: ClassVar[str] = "paddleocr_vl"


class Ernie45VL(Qwen2VL):
    """``ernie4_5_vl@<rule>``: as Qwen2-VL, with ``temporal_merge_size`` frames of a video merged into one."""

    __slots__ = ()

    family: ClassVar[str] = "ernie4_5_vl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "spatial_merge_size": 2,
        "temporal_merge_size": 2,
        "image_token_id": None,
        "video_token_id": None,
        "image_start_token_id": None,
        "image_end_token_id": None,
        "video_start_token_id": None,
        "video_end_token_id": None,
    }

    def _merged(self, item: MediaItem, merge: int, frames_merged: int = 1) -> tuple[int, int, int]:
        return super()._merged(item, merge, self._params["temporal_merge_size"] if item.modality == "video" else 1)


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
        rate = self._parameter("tokens_per_second", item, "videos")
        single = np.float32
        with np.errstate(over="ignore", invalid="ignore"):  # whatever overflows is over the limit below
            seconds = single(1.0 if item.second_per_grid_ts is None else item.second_per_grid_ts)
            if self.rule == "hf5":
                times = np.arange(first, stop, dtype=single) * (single(rate) * seconds)
            elif self.rule == "sglang":
                times = (np.arange(first, stop, dtype=single) * seconds) * single(rate)
            else:
                times = np.arange(first, stop, dtype=np.float64) * (float(seconds) * rate)
        whole: list[int] = checked_times(self, item, times, stop).astype(np.int64).tolist()
        return whole


def checked_times(scheme: PositionScheme, item: MediaItem, times: NDArray[Any], stop: int) -> NDArray[Any]:
    """Times of the frames of ``item`` before frame ``stop``. Raises PositionLimitExceeded."""
    if not float(times[-1]) < scheme.max_position_limit:
        raise PositionLimitExceeded(
            f"{item}: frame {stop - 1} stands at {times[-1]}, {scheme.name}'s max_position_limit is {scheme.max_position_limit}",
            item=item,
            value=float(times[-1]),
            limit=scheme.max_position_limit,
        )
    return times


class Qwen3VL(Qwen2VL):
    """``qwen3_vl@<rule>``: every frame of a video is an image of its own, with a span of its own; text stands between them.

    One item holds all its frames; what a turn ends between is declared ``unfinished``. The three rules agree.
    """

    __slots__ = ()

    family: ClassVar[str] = "qwen3_vl"
    per_frame: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VL.defaults, "split_frames": None}

    def frame_times(self, item: MediaItem, first: int, stop: int) -> Sequence[int]:
        return (0,)


class Glm4V(Qwen3VL):
    """``glm4v@<rule>`` (4.1V, 4.5V, 4.6V, OCR): as Qwen3-VL. Images and videos share a placeholder id; an item says what it is."""

    __slots__ = ()

    family: ClassVar[str] = "glm4v"
    defaults: ClassVar[Mapping[str, Any]] = {
        "spatial_merge_size": 2,
        "split_frames": None,
        "image_token_id": None,
        "video_token_id": None,
        "image_start_token_id": None,
        "image_end_token_id": None,
        "video_start_token_id": None,
        "video_end_token_id": None,
    }


class HyV4VL(Qwen2VL):
    """``hy_v4_vl@hf5``: rows end with a newline column, and each frame lies max(h, w + 1) behind the one before on all axes."""

    __slots__ = ()

    family: ClassVar[str] = "hy_v4_vl"
    rules: ClassVar[tuple[str, ...]] = ("hf5",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "spatial_merge_size": 2,
        "image_token_id": None,
        "video_token_id": None,
        "im_start_id": None,
        "im_end_id": None,
    }

    def _merged(self, item: MediaItem, merge: int, frames_merged: int = 1) -> tuple[int, int, int]:
        frames, height, width = super()._merged(item, merge)
        return frames, height, width + 1

    def block_runs(self, cursor: Cursor, item: MediaItem, base: int, first: int, stop: int) -> Sequence[GridRun]:
        _, height, width = self.merged_grid(item)
        size, step = height * width, max(height, width)
        self._check_limit(base + (stop - 1) // size * step)
        runs = []
        while first < stop:
            frame, skip = divmod(first, size)
            end = min(stop, (frame + 1) * size)
            corner = base + frame * step
            runs.append(GridRun(end - first, corner, corner, 0, height, width, skip))
            first = end
        return runs

    def end_block(self, cursor: Cursor, item: MediaItem, base: int) -> None:
        frames, height, width = self.merged_grid(item)
        cursor.next_position = base + frames * max(height, width)


class GlmImage(Qwen2VL):
    """``glm_image@<rule>``: images are grids of tokens without merging; the images it makes are decoded by a plan.

    Text continues at base + max(h, w) under both rules, hf5 and sglang; the delta is always 0. What is generated stands where
    :meth:`decode_positions` says; behind a plan without target grids there is the end marker alone. State carries whether it was
    generated.
    """

    __slots__ = ()

    family: ClassVar[str] = "glm_image"
    rules: ClassVar[tuple[str, ...]] = ("hf5", "sglang")
    carries: ClassVar[tuple[int, ...]] = (0, 1)
    usual_delta: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"image_token_id": None, "image_start_token_id": None, "image_end_token_id": None}

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.modality != "image" or item.audio_feature_length is not None:
            raise Unsupported(f"{self.name} has images alone, {item} cannot be placed", item=item)
        frames, height, width = self._merged(item, 1)
        if frames != 1:
            raise PositionError(f"{item}: an image of {self.name} has one frame, not {frames}", item=item, value=frames, limit=1)
        return frames, height, width

    def advance(self, last_time: int, height: int, width: int) -> int:
        return max(height, width)

    def mrope_position_delta(self, state: PositionState) -> int:
        return 0

    def decode_positions(self, state: PositionState, target_grids: Sequence[Sequence[int]] = ()) -> NDArray[Any]:
        """Where the tokens of generated images stand: (3, sum of h * w, and one more for the end marker) int64, read-only.

        ``target_grids``: (t, h, w) or (h, w) of each image to make, in the order of the prompt's grids; the last is made first, as
        in the released model. Each begins max(h, w) behind the one before.
        """
        at = int(state.next_position)
        tables = []
        for grid in reversed(target_grids):
            sides = (1, *grid)[-3:] if len(grid) in (2, 3) else (0, 0, 0)
            frames, height, width = (as_index(side, "a side of a target grid") for side in sides)
            if frames != 1 or height < 1 or width < 1:
                raise OutOfRange(f"target grid {tuple(grid)} is no (t, h, w) or (h, w)", value=tuple(grid))
            self._check_limit(at + max(height, width))
            if math.prod((height, width)) > self.max_position_limit:
                self._check_limit(height * width)
            tables.append(self.written(packed([GridRun(height * width, at, at, 0, height, width, 0)]), height * width))
            at += max(height, width)
        self._check_limit(at)
        tables.append(np.full((3, 1), at))
        return frozen_array(np.concatenate(tables, axis=1))

    def text(self, cursor: Cursor, data: bytes, item: MediaItem | None = None) -> None:
        cursor.carried = ()
        super().text(cursor, data)

    def begin_block(self, cursor: Cursor, item: MediaItem) -> int | float:
        cursor.carried = ()
        return super().begin_block(cursor, item)

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        return (1,) if after is None else ()

    def decode_room(self, state: PositionState) -> int:
        return 0 if state.carried else 1

    def plan_decode(self, state: PositionState, count: int) -> tuple[Runs, PositionState]:
        if count > self.decode_room(state):
            raise Unsupported(
                f"{self.name} decodes by its plan: here that is the end marker alone, not {count} tokens; "
                "append a generated image with its grid",
                scheme=self.name,
                limit=self.decode_room(state),
            )
        runs, after = super().plan_decode(state._replace(max_position=state.next_position - 1), count)
        return runs, after._replace(max_position=max(after.max_position, state.max_position))
