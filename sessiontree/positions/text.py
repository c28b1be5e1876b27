"""Text-only models: a token's position is its index, on one axis."""

from __future__ import annotations

from typing import ClassVar

from sessiontree.positions.base import PositionScheme


class Text(PositionScheme):
    """``text@<rule>``: one axis, no media. The three rules agree."""

    __slots__ = ()

    family: ClassVar[str] = "text"

    @property
    def num_axes(self) -> int:
        return 1
