"""Position runs: how the positions of a node are stored, and how a window of them is written out.

A node's tokens are covered by runs in order. A run is a few numbers however many tokens it covers; only what no formula
reproduces is kept as a table. Runs on float positions compute in float32 as the models do, one rounding an operation. Nodes keep
runs packed: bytes are small, and the garbage collector never walks them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from sessiontree.digest import pack

INT64: Final = np.dtype(np.int64)


class TextRun(NamedTuple):
    """``length`` tokens at ``base``, ``base + 1``, ... on every axis."""

    length: int
    base: int

    def greatest(self) -> int:
        return self.base + self.length - 1

    def part(self, first: int, stop: int) -> TextRun:
        return TextRun(stop - first, self.base + first)


class FloatTextRun(NamedTuple):
    """``length`` tokens, the k-th at float32(``base`` + ``skip`` + k) on every axis; ``base`` is a float32."""

    length: int
    base: float
    skip: int

    def greatest(self) -> float:
        return float(np.float32(self.base + (self.skip + self.length - 1)))

    def part(self, first: int, stop: int) -> FloatTextRun:
        return FloatTextRun(stop - first, self.base, self.skip + first)


class GridRun(NamedTuple):
    """``length`` tokens of a grid of ``height`` x ``width`` a frame, beginning ``skip`` tokens into a frame.

    Token j, with k = skip + j and n = height * width, stands at t = ``time`` + k // n * ``time_step``,
    h = ``base`` + k % n // width, w = ``base`` + k % width.
    """

    length: int
    base: int
    time: int
    time_step: int
    height: int
    width: int
    skip: int

    def greatest(self) -> int:
        last = self.skip + self.length - 1
        row, column = _farthest(last, self.height, self.width)
        return max(self.time + last // (self.height * self.width) * self.time_step, self.base + row, self.base + column)

    def part(self, first: int, stop: int) -> GridRun:
        frame, skip = divmod(self.skip + first, self.height * self.width)
        return self._replace(length=stop - first, time=self.time + frame * self.time_step, skip=skip)

    def write(self, first: int, stop: int, out: NDArray[Any]) -> None:
        first, stop = self.skip + first, self.skip + stop
        size = self.height * self.width
        frame = first // size
        time = self.time + frame * self.time_step
        times = time + counted(-(-stop // size) - frame) * self.time_step if self.time_step else time
        _write_grid(first - frame * size, stop - frame * size, self.height, self.width, times, self.base, out)


class FrameRun(NamedTuple):
    """``length`` tokens of frames of ``height`` x ``width``, each at a time of its own, beginning ``skip`` tokens into the first.

    ``offsets``: int64 or float32 (where ``base`` is a float) times from ``base``. A token stands at t = base + its frame's time,
    h = base + row, w = base + column.
    """

    length: int
    base: int | float
    offsets: bytes
    height: int
    width: int
    skip: int

    def frame_times(self) -> NDArray[Any]:
        """Times of its frames from ``base``: int64 or float32."""
        return np.frombuffer(self.offsets, _number(self.base))

    def greatest(self) -> int | float:
        last = self.skip + self.length - 1
        row, column = _farthest(last, self.height, self.width)
        number = _number(self.base)
        ahead = max(self.frame_times()[last // (self.height * self.width)], number(row), number(column))
        greatest: int | float = (number(self.base) + ahead).item()
        return greatest

    def part(self, first: int, stop: int) -> FrameRun:
        size = self.height * self.width
        frame, skip = divmod(self.skip + first, size)
        times = self.frame_times()[frame : -(-(self.skip + stop) // size)].tobytes()
        return FrameRun(stop - first, self.base, times, self.height, self.width, skip)

    def write(self, first: int, stop: int, out: NDArray[Any]) -> None:
        first, stop = self.skip + first, self.skip + stop
        size = self.height * self.width
        frame = first // size
        times = self.frame_times()[frame : -(-stop // size)] + _number(self.base)(self.base)
        _write_grid(first - frame * size, stop - frame * size, self.height, self.width, times, self.base, out)


class AbsoluteRun(NamedTuple):
    """``length`` tokens of rows of ``width`` tokens, beginning ``skip`` tokens into the image, counted from its corner.

    Token j, with k = skip + j: column k % width, row k // width and ``image`` on the last three axes, ``base`` + j on those before.
    """

    length: int
    base: int
    width: int
    image: int
    skip: int

    def greatest(self) -> int:
        """On the axes that are no index: the last three."""
        last = self.skip + self.length - 1
        return max(min(last, self.width - 1), last // self.width, self.image)

    def part(self, first: int, stop: int) -> AbsoluteRun:
        return self._replace(length=stop - first, base=self.base + first, skip=self.skip + first)

    def write(self, first: int, stop: int, out: NDArray[Any]) -> None:
        place = np.arange(self.skip + first, self.skip + stop)
        out[:-3] = np.arange(self.base + first, self.base + stop)
        np.divmod(place, self.width, out=(out[-2], out[-3]), casting="unsafe")
        out[-1] = self.image


class CanvasRun(NamedTuple):
    """``length`` tokens of a picture's canvas: the marker before it, its crops, and the markers behind them.

    ``origin``: of the canvas, on every axis. ``crops``: int32 triples (offset from the run's first token, height, width), the
    thumbnail before its slices; without any, the markers that still lie on the coat of a picture before. See
    :mod:`sessiontree.positions.canvas`.
    """

    length: int
    origin: int
    crops: bytes

    def greatest(self) -> int:
        return self.origin + canvas_greatest(self.length, _crops(self.crops))

    def write(self, first: int, stop: int, out: NDArray[Any]) -> None:
        np.maximum(self.origin + canvas_table(self.length, self.crops)[:, first:stop], 0, out=out)


class TableRun(NamedTuple):
    """``length`` tokens whose positions are the columns of a table: ``data``, (num_axes, length) of ``dtype``."""

    length: int
    dtype: str
    data: bytes

    def table(self, num_axes: int) -> NDArray[Any]:
        """(num_axes, length)."""
        return np.frombuffer(self.data, self.dtype).reshape(num_axes, self.length)

    def write(self, first: int, stop: int, out: NDArray[Any]) -> None:
        out[:] = self.table(out.shape[0])[:, first:stop]


class ExternalRun(TableRun):
    """A table that came from elsewhere, and so is part of what its node is."""

    __slots__ = ()


Run = TextRun | FloatTextRun | GridRun | FrameRun | AbsoluteRun | CanvasRun | TableRun
_KINDS: Final[tuple[type[Run], ...]] = (
    TextRun,
    FloatTextRun,
    GridRun,
    FrameRun,
    AbsoluteRun,
    CanvasRun,
    TableRun,
    ExternalRun,
)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
_TEXT: Final = _NUMBERS[TextRun]
_FLOAT_TEXT: Final = _NUMBERS[FloatTextRun]
_GRID: Final = _NUMBERS[GridRun]
_EXTERNAL: Final = _NUMBERS[ExternalRun]

#: How a node keeps its runs: a bare int where all of it is text that begins at that position, without any media; otherwise msgpack:
#: a list with, for each run, its kind and its fields.
Runs = int | bytes


def packed(runs: Sequence[Run]) -> Runs:
    """Runs as a node keeps them."""
    if len(runs) == 1 and type(runs[0]) is TextRun:
        return runs[0].base
    return pack([(_NUMBERS[type(run)], *run) for run in runs])


def image_runs(base: int, start: int, height: int, width: int, behind: int, count: int) -> Runs:
    """Packed runs: ``start`` tokens of text from ``base`` on, an image, and ``count`` of text from ``behind`` on."""
    corner = base + start
    runs: list[tuple[int, ...]] = [(_GRID, height * width, corner, corner, 0, height, width, 0)]
    if start:
        runs.insert(0, (_TEXT, start, base))
    if count:
        runs.append((_TEXT, count, behind))
    return pack(runs)


def spelled_out(runs: Runs, num_tokens: int) -> bytes:
    """Runs that are not a bare int, for media that stand as text does."""
    return pack([(_TEXT, num_tokens, runs)]) if isinstance(runs, int) else runs


def unpacked(runs: Runs, num_tokens: int) -> list[Run]:
    """The runs of a node of ``num_tokens`` tokens."""
    if isinstance(runs, int):
        return [TextRun(num_tokens, runs)]
    return [_KINDS[kind](*fields) for kind, *fields in msgpack.unpackb(runs)]


def is_external(runs: Runs) -> bool:
    """Whether they are a table that came from elsewhere."""
    return not isinstance(runs, int) and any(kind == _EXTERNAL for kind, *_ in msgpack.unpackb(runs))


class Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a node whose positions are ``runs``, to be written from column ``at`` on."""

    at: int
    runs: Runs
    start: int
    stop: int


def clipped_runs(piece: Piece) -> Iterator[tuple[int, Run, int, int]]:
    """(column, run, first, stop) for each run that meets ``piece``: its tokens ``[first, stop)`` stand from that column on."""
    at, runs, start, stop = piece
    begin = 0  # of a run, in tokens of the node
    for run in unpacked(runs, stop):
        first, last = max(start - begin, 0), min(stop - begin, run.length)
        if first < last:
            yield at + begin + first - start, run, first, last
        begin += run.length
        if begin >= stop:
            break


def write(pieces: Sequence[Piece], out: NDArray[Any]) -> None:
    """Write positions into ``out``, (num_axes, tokens): pieces that follow one another and cover all of it.

    Text is written by one stroke for all, then everything else over it.
    """
    texts: list[Any] = []  # (column where it begins, base, what to add to the column's index before the base)
    others: list[tuple[int, Any, int, int]] = []
    whole = True  # all text stands at whole numbers
    for at, runs, start, stop in pieces:
        if isinstance(runs, int):
            texts.append((at, 0, runs + start - at))
            continue
        begin = 0  # of a run, in tokens of the node
        for kind, length, *fields in msgpack.unpackb(runs):
            first, last = max(start - begin, 0), min(stop - begin, length)
            if first < last:
                column = at + begin + first - start
                if kind == _TEXT:
                    texts.append((column, 0, fields[0] + first - column))
                elif kind == _FLOAT_TEXT:
                    whole = False
                    texts.append((column, fields[0], fields[1] + first - column))
                else:
                    others.append((column, _KINDS[kind](length, *fields), first, last))
            begin += length
            if begin >= stop:
                break
    if whole and len(texts) <= _FEW:
        stop = out.shape[1]
        for column, _, shift in reversed(texts):
            out[:, column:stop] = counted(stop + shift, column + shift)
            stop = column
    elif texts:
        columns, bases, shifts = zip(*texts, strict=True)
        first, count = columns[0], out.shape[1]
        lengths = np.diff(np.array((*columns, count)))
        places: NDArray[Any] = counted(count)[first:] + (np.repeat(shifts, lengths) if len(texts) > 1 else shifts[0])
        if any(bases):
            places = places.astype(np.float32) + np.repeat(np.array(bases, np.float32), lengths)
        out[:, first:] = places
    for column, run, begin, end in others:
        run.write(begin, end, out[:, column : column + end - begin])


def plain_table(pieces: Sequence[Piece], num_axes: int) -> bytes | None:
    """What :func:`write` writes, as int64 bytes, where it is few pieces of text at whole numbers and of whole images; else None.

    Rows are put together from numbers that are kept: most turns need no more.
    """
    if len(pieces) > _FEW:
        return None
    rows: list[list[Any]] = [[] for _ in range(num_axes)]
    for _, runs, start, stop in pieces:
        if isinstance(runs, int):
            text = counted(runs + stop, runs + start)
            for row in rows:
                row.append(text)
            continue
        begin = 0  # of a run, in tokens of the node
        for kind, length, base, *fields in msgpack.unpackb(runs):
            end = begin + length
            if end > start:
                if kind == _TEXT:
                    text = counted(base + min(stop, end) - begin, base + max(start - begin, 0))
                    for row in rows:
                        row.append(text)
                elif kind == _GRID and start <= begin and end <= stop and num_axes == 3:
                    time, _, height, width, skip = fields
                    if time != base or skip or length != height * width or length > _MOST_OF_IMAGE:
                        return None
                    for row, axis in zip(rows, _image_table(height, width) + base, strict=True):
                        row.append(axis)
                else:
                    return None
            if end >= stop:
                break
            begin = end
    return b"".join(chain.from_iterable(rows))


def parts(runs: Iterable[Any], first: int, stop: int) -> list[Any]:
    """What of ``runs`` covers their tokens ``[first, stop)``."""
    found = []
    at = 0
    for run in runs:
        begin, end = max(first, at), min(stop, at + run.length)
        if begin < end:
            found.append(run if end - begin == run.length else run.part(begin - at, end - at))
        at += run.length
    return found


def grid_run(base: int, frame: int, times: Sequence[int], height: int, width: int, first: int, stop: int) -> GridRun | FrameRun:
    """Placeholders ``[first, stop)`` of a block whose frame ``frame + f`` stands at time ``base + times[f]``."""
    skip = first - frame * height * width
    step = times[1] - times[0] if len(times) > 1 else 0
    if len(times) < 3 or isinstance(times, range) or all(later - one == step for one, later in pairwise(times)):
        return GridRun(stop - first, base, base + times[0], step, height, width, skip)
    return FrameRun(stop - first, base, np.array(times, np.int64).tobytes(), height, width, skip)


def canvas_size(crops: Sequence[tuple[int, ...]]) -> tuple[int, int, int]:
    """Slices in a row, then rows and columns of the canvas of some (offset, height, width), the thumbnail first.

    A row of slices ends where more than the two markers stand before the next; slices that make no full rows are one row.
    """
    (_, height, width), *slices = crops
    if not slices:
        return 0, height, width
    across = len(slices)
    for number, ((offset, high, broad), later) in enumerate(pairwise(slices), 1):
        if later[0] - (offset + high * broad) > 2:
            across = number if len(slices) % number == 0 else len(slices)
            break
    _, slice_height, slice_width = slices[0]
    return across, len(slices) // across * slice_height, across * slice_width


def _crops(crops: bytes) -> list[tuple[int, ...]]:
    numbers = array("i", crops)
    return list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))


def canvas_greatest(length: int, crops: Sequence[tuple[int, ...]]) -> int:
    """The greatest number in :func:`canvas_table`."""
    if not crops:
        return 0
    across, tall, wide = canvas_size(crops)
    (thumbnail, height, width), *slices = crops
    greatest = max(tall, wide) - (thumbnail + height * width == length)  # its end marker lies past the corner
    for number, (_, high, broad) in enumerate(slices):
        _, slice_height, slice_width = slices[0]
        greatest = max(greatest, number // across * slice_height + high - 1, number % across * slice_width + broad - 1)
    return greatest


def canvas_table(length: int, crops: bytes) -> NDArray[np.int64]:
    """Positions from the canvas's origin, (3, length) int64: one coat for all, markers pinned to corners, crops spread out."""
    table = np.zeros((3, length), np.int64)
    placed = _crops(crops)
    if not placed:
        return table
    rows, columns = table[1], table[2]
    across, tall, wide = canvas_size(placed)
    (thumbnail, height, width), *slices = placed
    rows[0] = columns[0] = -1
    end = thumbnail + height * width
    if end < length:
        rows[end], columns[end] = tall, wide
    rows[thumbnail:end].reshape(height, width)[:] = _spread(tall, height)[:, None]
    columns[thumbnail:end].reshape(height, width)[:] = _spread(wide, width)
    for number, (offset, high, broad) in enumerate(slices):
        _, slice_height, slice_width = slices[0]
        down, right = number // across * slice_height, number % across * slice_width
        rows[offset - 1], columns[offset - 1] = down, right
        end = offset + high * broad
        if end < length:
            rows[end], columns[end] = down + high - 1, right + broad - 1
        rows[offset:end].reshape(high, broad)[:] = np.arange(down, down + high)[:, None]
        columns[offset:end].reshape(high, broad)[:] = np.arange(right, right + broad)
        beyond = slices[number + 1][0] if number + 1 < len(slices) else end
        if beyond - end > 2:  # the newline that ends a row lies past its right edge
            rows[end + 1 : beyond - 1] = down + slice_height - 1
            columns[end + 1 : beyond - 1] = wide
    return table


def _spread(size: int, count: int) -> NDArray[np.int64]:
    """``count`` places from 0 to ``size - 1``, equally far apart in float32, then rounded half to even, as by torch.linspace."""
    if count == size:
        return np.arange(count)
    if count == 1:
        return np.zeros(1, np.int64)
    last = np.float32(size - 1)
    step = last / np.float32(count - 1)
    at = np.arange(count, dtype=np.float32)
    places = np.where(np.arange(count) < count // 2, step * at, last - step * at[::-1])
    return np.rint(places).astype(np.int64)


def _number(base: int | float) -> Any:
    return np.float32 if isinstance(base, float) else np.int64


def _farthest(last: int, height: int, width: int) -> tuple[int, int]:
    """The greatest row and column up to token ``last`` of some frames; what came before in its frame is on the path already."""
    return (height - 1 if last + 1 >= height * width else last // width), min(last, width - 1)


def _write_grid(first: int, stop: int, height: int, width: int, times: Any, base: int | float, out: NDArray[Any]) -> None:
    """Tokens ``[first, stop)`` of frames that stand at ``times``, or all at one."""
    size = height * width
    number = _number(base)
    if (stop - first) % size == 0 == first:  # whole frames
        frames = out.reshape(3, -1, height, width)
        frames[0] = times[:, None, None] if isinstance(times, np.ndarray) else times
        if isinstance(base, float):
            frames[1] = counted(height).astype(number)[:, None] + number(base)
            frames[2] = counted(width).astype(number) + number(base)
        else:
            frames[1] = counted(base + height, base)[:, None]
            frames[2] = counted(base + width, base)
        return
    frame, place = np.divmod(np.arange(first, stop), size)
    row, column = np.divmod(place, width)
    out[0] = times[frame] if isinstance(times, np.ndarray) else times
    out[1], out[2] = row.astype(number) + number(base), column.astype(number) + number(base)


@lru_cache(32)
def _image_table(height: int, width: int) -> NDArray[np.int64]:
    """Where the tokens of an image stand from its corner: (3, height * width), for reading alone."""
    table = np.empty((3, height * width), np.int64)
    _write_grid(0, height * width, height, width, 0, 0, table)
    table.setflags(write=False)
    return table


def counted(stop: int, start: int = 0) -> NDArray[np.int64]:
    """start, start + 1, ..., stop - 1, none below 0; a read-only view of numbers that are kept, as far as they are."""
    known = _numbers[0]
    if len(known) < stop:
        if stop > _MOST_KEPT:
            return np.arange(start, stop)
        known = np.arange(min(max(stop, 2 * len(known)), _MOST_KEPT))
        known.setflags(write=False)
        _numbers[0] = known
    return known[start:stop]


_FEW: Final = 4  # runs of text that are written one by one: many are written together
_MOST_KEPT: Final = 2**20
_MOST_OF_IMAGE: Final = 4096  # tokens, of one whose table is kept
_numbers = [np.arange(0)]
