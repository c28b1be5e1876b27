"""MiniCPM-V 4.7: a picture is a thumbnail and slices on one canvas; a video is a picture for every frame.

An item has a span for every crop, and ``target_sizes`` says the size of each. Between the crops stand markers, which are read
by their ids: the marker before a slice tells it from the next frame's thumbnail. A picture is one coat of positions at the canvas's
origin, from the marker before its thumbnail on to the last of the markers and newlines behind it, even if a later turn holds
them; on it the crops are spread out and the markers pinned to their corners. So an item is atomic: the marker before it and all of
its crops are in one node.

Rule read from the released sources of transformers 5.24 (hf5) and vLLM 0.33, which agree. SGLang 0.5.23 treats newlines otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sessiontree.errors import MediaSpanError, PositionError, Unsupported
from sessiontree.media import MediaItem, Placement
from sessiontree.positions.base import Cursor, PositionScheme, PositionState
from sessiontree.positions.runs import CanvasRun, Runs, TableRun, canvas_size
from sessiontree.tokens import INT32, TOKEN_BYTES

_MARKERS = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")


class _Coat(NamedTuple):
    """A coat that further markers would lie on: its origin, and from there the corner that the first of them is pinned to."""

    origin: int
    row: int
    column: int


class _Crop(NamedTuple):
    """``height`` x ``width`` tokens from ``offset`` on."""

    offset: int
    height: int
    width: int

    @property
    def stop(self) -> int:
        return self.offset + self.height * self.width


class MiniCPMV47(PositionScheme):
    """``minicpmv4_7@<rule>``: rules hf5 and vllm. ``downsample_mode``: "16x" merges 4 x 4 patches into a token, "4x" 2 x 2.

    Text continues at the canvas's origin + max(height, width) + 1. State carries the coat of a picture that the path ends with.
    """

    __slots__ = ()

    family: ClassVar[str] = "minicpmv4_7"
    rules: ClassVar[tuple[str, ...]] = ("hf5", "vllm")
    carries: ClassVar[tuple[int, ...]] = (0, 3)
    defaults: ClassVar[Mapping[str, Any]] = {
        "downsample_mode": "16x",
        "image_token_id": None,
        "video_token_id": None,
        **dict.fromkeys(_MARKERS),
    }

    def crops(self, item: MediaItem) -> list[tuple[int, int]]:
        """Rows and columns of tokens of each crop of ``item``. Raises Unsupported or PositionError."""
        if item.modality == "audio" or item.audio_feature_length is not None:
            raise Unsupported(f"{self.name} has no audio, {item} cannot be placed", item=item)
        if not item.target_sizes:
            raise PositionError(f"{item} has no target_sizes; {self.name} places nothing without them", item=item)
        merge = 2 if self._params["downsample_mode"] == "4x" else 4
        if any(min(size) < merge for size in item.target_sizes):
            raise PositionError(f"{item}: target sizes {item.target_sizes} are not all {merge} patches or more", item=item)
        return [(height // merge, width // merge) for height, width in item.target_sizes]

    def num_placeholders(self, item: MediaItem) -> int:
        return sum(height * width for height, width in self.crops(item))

    def num_spans(self, item: MediaItem) -> int:
        return len(self.crops(item))

    def atomic_span(self, item: MediaItem) -> tuple[int, int]:
        return item.spans[0][0] - 1, sum(item.spans[-1])

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        return ()

    def text(self, cursor: Cursor, data: bytes, item: MediaItem | None = None) -> None:
        """Markers lie on the coat of the picture before them, if they follow it at once; all else is plain text."""
        if cursor.carried:
            on_coat = self._leading_markers(data)
            if on_coat:
                origin, row, column = cursor.carried
                if row or column:
                    corner = np.array([[0], [row], [column]]) + origin
                    cursor.add(TableRun(1, "<i8", corner.astype("<i8").tobytes()), int(corner.max()))
                    cursor.carried = _Coat(origin, 0, 0)
                if on_coat > (1 if row or column else 0):
                    cursor.add(CanvasRun(on_coat - (1 if row or column else 0), origin, b""), origin)
                data = data[on_coat * TOKEN_BYTES :]
            if data:
                cursor.carried = ()
        if data:
            super().text(cursor, data)

    def _leading_markers(self, data: bytes) -> int:
        """How many tokens at the beginning are markers or newlines."""
        known = {self._params.get(name) for name in _MARKERS}
        return sum(1 for _ in takewhile(known.__contains__, memoryview(data).cast("i")))

    def _plan_blocks(self, state: PositionState, data: bytes, placed: list[Placement]) -> tuple[Runs, PositionState]:
        cursor = Cursor(state)
        pictures = self._pictures(data, placed)
        at = 0
        for number, crops in enumerate(pictures):
            start = crops[0].offset - 1
            if start > at:
                self.text(cursor, data[at * TOKEN_BYTES : start * TOKEN_BYTES])
            limit = pictures[number + 1][0].offset - 1 if number + 1 < len(pictures) else len(data) // TOKEN_BYTES
            end = crops[-1].stop
            at = end + self._leading_markers(data[end * TOKEN_BYTES : limit * TOKEN_BYTES])
            self._add_picture(cursor, [crop._replace(offset=crop.offset - start) for crop in crops], at - start)
        if at * TOKEN_BYTES < len(data):
            self.text(cursor, data[at * TOKEN_BYTES :])
        self._check_limit(max(cursor.max_position, cursor.next_position - 1))
        return self.compact(cursor.runs), cursor.state()

    def _add_picture(self, cursor: Cursor, crops: list[_Crop], length: int) -> None:
        """A picture of ``length`` tokens, from the marker before it on, where its crops' offsets are counted from."""
        origin = int(cursor.next_position)
        run = CanvasRun(length, origin, np.array(crops, np.int32).tobytes())
        across, tall, wide = canvas_size([tuple(crop) for crop in crops])
        self._check_limit(origin + max(tall, wide))
        cursor.add(run, run.greatest())
        cursor.next_position = origin + max(tall, wide) + 1
        corner = (0, 0)
        if length == crops[-1].stop:  # what closes it is still to come
            last = len(crops) - 2
            _, height, width = crops[-1]
            _, slice_height, slice_width = crops[min(1, len(crops) - 1)]
            corner = (tall, wide)
            if last >= 0:
                corner = last // across * slice_height + height - 1, last % across * slice_width + width - 1
        cursor.carried = _Coat(origin, *corner)

    def _pictures(self, data: bytes, placed: list[Placement]) -> list[list[_Crop]]:
        """The crops of each picture, its thumbnail first. Raises MediaSpanError, PositionError."""
        ids = np.frombuffer(data, INT32)
        pictures: list[list[_Crop]] = []
        sizes: list[tuple[int, int]] = []
        current: MediaItem | None = None
        end = 0
        for start, stop, item in placed:
            span = (start, stop)
            first = item is not current
            if first:
                if sizes or item.unfinished or item.placeholders_before:
                    whose = current if sizes and current is not None else item
                    raise MediaSpanError(
                        f"{whose}: items of {self.name} are atomic: a node holds all crops of one, and none of others between them",
                        item=whose,
                        span=span,
                    )
                current, sizes = item, self.crops(item)
                for name in _MARKERS:
                    self._parameter(name, item, "pictures")
                if len(sizes) != len(item.spans):
                    raise MediaSpanError(
                        f"{item} has {len(sizes)} target sizes and {len(item.spans)} spans, one is due for each crop",
                        item=item,
                        span=span,
                        limit=len(sizes),
                    )
            if start == end:
                raise MediaSpanError(
                    f"{item}: span [{start}, {stop}) has no marker before it in its node, and items of {self.name} are atomic",
                    item=item,
                    span=span,
                )
            height, width = sizes.pop(0)
            if height * width != stop - start:
                raise MediaSpanError(
                    f"{item}: span [{start}, {stop}) is a crop of {height} x {width} tokens",
                    item=item,
                    span=span,
                    limit=height * width,
                )
            crop = _Crop(start, height, width)
            if not first and ids[start - 1] == self._params["slice_start_id"]:
                pictures[-1].append(crop)
            else:
                pictures.append([crop])
            end = stop
        if sizes and current is not None:
            raise MediaSpanError(f"{current}: {len(sizes)} of its crops are missing", item=current, span=None, limit=len(sizes))
        return pictures
