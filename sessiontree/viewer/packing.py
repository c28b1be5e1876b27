"""What is told of some nodes, as bytes that a page takes apart: JSON, and arrays beside it, compressed by zlib.

The bytes before compression: the length of the JSON, uint32, little-endian; the JSON, padded with spaces to a multiple of 8; the
arrays. The JSON has under ``arrays``, for each in order, its type and how many values it has. Of an array all first bytes come
first, then all second ones: ids and log-probabilities take a third less that way.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LEVEL: Final = 6
#: NumPy's types that JavaScript has no arrays of, by kind and bytes of a value, and what holds all their values there.
_WIDER: Final = {"b1": "u1", "i1": "i4", "i2": "i4", "u2": "i4", "f2": "f4"}
EXACT: Final = 2**53  # the greatest whole number up to which JavaScript's numbers have all


class Arrays:
    """Arrays that go beside JSON, which refers to them by their numbers."""

    def __init__(self) -> None:
        self._types: list[tuple[str, int]] = []
        self._parts: list[bytes] = []

    def add(self, values: NDArray[Any]) -> int:
        """The number of an array of numbers or bools, flattened; types that JavaScript has not are widened."""
        kind = f"{values.dtype.kind}{values.dtype.itemsize}"
        kind = _WIDER.get(kind, kind)
        flat = np.ascontiguousarray(values, dtype=f"<{kind}").ravel()
        if kind == "i8" and (not len(flat) or (flat.min() >= -(2**31) and flat.max() < 2**31)):
            kind, flat = "i4", flat.astype("<i4")
        planes = flat.view(np.uint8).reshape(len(flat), flat.itemsize).T
        self._types.append((kind, len(flat)))
        self._parts.append(planes.tobytes())
        return len(self._types) - 1

    def packed(self, facts: Mapping[str, Any]) -> bytes:
        """``facts``, which hold what JSON has, and the arrays."""
        text = json.dumps({**facts, "arrays": self._types}, allow_nan=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return zlib.compress(b"".join((len(text).to_bytes(4, "little"), text, *self._parts)), _LEVEL)


def packed(facts: Mapping[str, Any]) -> bytes:
    """The same without arrays."""
    return Arrays().packed(facts)
