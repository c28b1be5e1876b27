"""HunYuan-VL: text stands at its index on every axis, an image's tokens at their column and row within the image.

Rule read from the released source of transformers 5.24 (hf5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from sessiontree.errors import PositionError, Unsupported
from sessiontree.media import MediaItem
from sessiontree.positions.base import Cursor, PositionState
from sessiontree.positions.grid import Qwen2VL
from sessiontree.positions.runs import AbsoluteRun, TextRun, parts

_MOST_AXES: Final = 16


class HunYuanVL(Qwen2VL):
    """``hunyuan_vl@hf5``: ``num_axes`` axes, 3 or more; the last three are column, row, and which image of the path it is.

    Rows end with a newline column. The two tokens that wrap an image (``wrapped``, as in every released checkpoint) belong to its
    span and stand at their index. State carries how many images came before.
    """

    __slots__ = ()

    family: ClassVar[str] = "hunyuan_vl"
    rules: ClassVar[tuple[str, ...]] = ("hf5",)
    carries: ClassVar[tuple[int, ...]] = (1,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "spatial_merge_size": 2,
        "num_axes": 4,
        "wrapped": True,
        "image_token_id": None,
        "im_start_id": None,
        "im_end_id": None,
    }

    def __new__(cls, rule: str, params: Mapping[str, Any]) -> HunYuanVL:
        self: HunYuanVL = super().__new__(cls, rule, params)  # type: ignore[assignment]
        if not 3 <= self.num_axes <= _MOST_AXES:
            raise PositionError(
                f"{self.family} has 3 to {_MOST_AXES} axes, not {self.num_axes}", parameter="num_axes", limit=_MOST_AXES
            )
        return self

    @property
    def num_axes(self) -> int:
        axes: int = self._params["num_axes"]
        return axes

    def initial_state(self) -> PositionState:
        return PositionState(0, 0, -1, (), (0,))

    def carried_behind(self, state: PositionState, media: Sequence[MediaItem], after: Any = None) -> tuple[Any, ...]:
        return (state.carried[0] + len(media),)

    def merged_grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.modality != "image":
            raise Unsupported(f"{self.name} has images alone, {item} cannot be placed", item=item)
        frames, height, width = super().merged_grid(item)
        if frames != 1:
            raise PositionError(f"{item}: an image of {self.name} has one frame, not {frames}", item=item, value=frames, limit=1)
        return 1, height, width + 1

    def num_placeholders(self, item: MediaItem) -> int:
        return super().num_placeholders(item) + (2 if self._params["wrapped"] else 0)

    def block_runs(self, cursor: Cursor, item: MediaItem, base: int, first: int, stop: int) -> Sequence[Any]:
        _, height, width = self.merged_grid(item)
        image = AbsoluteRun(height * width, base, width, cursor.carried[0], 0)
        if not self._params["wrapped"]:
            return parts((image,), first, stop)
        inside = image._replace(base=base + 1)
        return parts((TextRun(1, base), inside, TextRun(1, base + 1 + inside.length)), first, stop)

    def greatest(self, run: Any) -> int | float:
        on_index = run.base + run.length - 1 if self.num_axes > 3 else -1
        return max(on_index, super().greatest(run))

    def end_block(self, cursor: Cursor, item: MediaItem, base: int) -> None:
        cursor.next_position = base + self.num_placeholders(item)
        cursor.carried = (cursor.carried[0] + 1,)
