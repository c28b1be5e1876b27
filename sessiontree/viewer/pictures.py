"""Thumbnails of what is kept of media: images, the patches that a processor cut them into, or what an encoder made of these.

PNG is written here, by zlib alone: who looks at a store need not have a library for pictures.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sessiontree.features import FeatureArray
from sessiontree.media import MediaItem

MAX_SIDE: Final = 160  # pixels of a thumbnail's longer side
_LEAST_SIDE: Final = 8  # of an array that is taken for an image
_COLOURS: Final = 3
# How CLIP's processors, and those of Qwen after them, shift and scale colours within 0..1.
_MEAN: Final = np.array((0.48145466, 0.4578275, 0.40821073), np.float32)
_DEVIATION: Final = np.array((0.26862954, 0.26130258, 0.27577711), np.float32)
_SLACK: Final = 0.02  # by which colours that were shifted back may miss 0..1


class Picture(NamedTuple):
    """A thumbnail: the bytes of a PNG, its size in pixels, and what it was made of, in words."""

    png: bytes
    width: int
    height: int
    what: str


def thumbnail(item: MediaItem, features: Mapping[str, FeatureArray], merge_size: int) -> Picture | None:
    """A picture of one item's features; of a video, its first frame. None where none of them can be seen as one.

    ``merge_size``: how many patches on a side become one token.
    """
    arrays = {name: _values(array) for name, array in features.items() if array.shape and 0 not in array.shape}
    for view, what in ((_image, "image"), (_patches, "pixels"), (_norms, "norm of features")):
        for name, values in arrays.items():
            found = view(item, values, merge_size)
            if found is not None:
                return _picture(found, f"{what}, {name}")
    return None


def _values(array: FeatureArray) -> NDArray[Any]:
    values = np.frombuffer(array.data, array.dtype, count=int(np.prod(array.shape))).reshape(array.shape)
    if array.name == "bfloat16":  # kept as its bits, the upper half of a float32's
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _image(item: MediaItem, values: NDArray[Any], merge_size: int) -> NDArray[Any] | None:
    """(height, width, colours), or colours first; of several, the first."""
    while values.ndim > 3:
        values = values[0]
    if values.ndim != 3 or item.modality == "audio":
        return None
    if values.shape[-1] not in (1, 3, 4):
        if values.shape[0] not in (1, 3, 4):
            return None
        values = np.moveaxis(values, 0, -1)
    if min(values.shape[:2]) < _LEAST_SIDE:
        return None
    values = values[..., :_COLOURS]
    return values if values.dtype == np.uint8 else _seen(values.astype(np.float32))


def _patches(item: MediaItem, values: NDArray[Any], merge_size: int) -> NDArray[Any] | None:
    """(frames * rows * columns, colours * frames of a patch * side * side), in the order of Qwen's processors."""
    if values.ndim != 2 or item.grid_thw is None or values.dtype.kind != "f":
        return None
    frames, rows, columns = item.grid_thw
    side = _side(values.shape[1])
    if len(values) != frames * rows * columns or side is None or rows % merge_size or columns % merge_size:
        return None
    first = values[: rows * columns].astype(np.float32).reshape(-1, _COLOURS, values.shape[1] // (_COLOURS * side**2), side, side)
    blocks = first[:, :, 0].reshape(rows // merge_size, columns // merge_size, merge_size, merge_size, _COLOURS, side, side)
    image = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, _COLOURS)
    return _seen(image)


def _side(width: int) -> int | None:
    """Pixels of a patch's side; patches of pictures span two frames, or one."""
    for frames in (2, 1):
        side = isqrt(width // (_COLOURS * frames))
        if side > 1 and side**2 * _COLOURS * frames == width:
            return side
    return None


def _norms(item: MediaItem, values: NDArray[Any], merge_size: int) -> NDArray[Any] | None:
    """(tokens, channels) of an encoder: how long each token's vector is."""
    if values.ndim != 2 or item.grid_thw is None or values.dtype.kind != "f":
        return None
    frames, rows, columns = item.grid_thw
    rows, columns = rows // merge_size, columns // merge_size
    if not rows or not columns or len(values) != frames * rows * columns:
        return None
    norms = np.linalg.norm(values[: rows * columns].astype(np.float32), axis=1).reshape(rows, columns, 1)
    times = max(1, MAX_SIDE // (2 * max(rows, columns)))
    return _stretched(np.kron(norms, np.ones((times, times, 1), np.float32)))


def _seen(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Colours as they were before a processor shifted and scaled them, if that is how; else from the least to the greatest."""
    if values.shape[-1] == _COLOURS and np.isfinite(values).all():
        for shift, scale in ((np.float32(0), np.float32(1)), (_MEAN, _DEVIATION), (np.float32(0.5), np.float32(0.5))):
            colours = values * scale + shift
            if colours.min() >= -_SLACK and colours.max() <= 1 + _SLACK:
                return (colours.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    return _stretched(values)


def _stretched(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    least, greatest = float(values.min()), float(values.max())
    return ((values - least) / max(greatest - least, 1e-12) * 255).astype(np.uint8)


def _picture(pixels: NDArray[Any], what: str) -> Picture:
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, _COLOURS, axis=-1)
    factor = min(1, MAX_SIDE / max(pixels.shape[:2]))
    height, width = (max(1, round(side * factor)) for side in pixels.shape[:2])
    small = _smaller(pixels, height, width)
    lines = np.concatenate((np.zeros((height, 1), np.uint8), small.reshape(height, -1)), axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return Picture(b"\x89PNG\r\n\x1a\n" + _chunks(parts), width, height, what)


def _chunks(parts: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in parts)


def _smaller(pixels: NDArray[Any], height: int, width: int) -> NDArray[np.uint8]:
    """(height, width, colours), each the mean of the pixels that fall on it."""
    for axis, size in enumerate((height, width)):
        starts = np.arange(size) * pixels.shape[axis] // size
        counts = np.diff((*starts, pixels.shape[axis])).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        pixels = np.add.reduceat(pixels.astype(np.float32), starts, axis=axis) / counts
    return (pixels + 0.5).astype(np.uint8)
