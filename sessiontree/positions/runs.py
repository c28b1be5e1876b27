"""Position runs: how the positions of a node are stored, and how a window of them is written out.

A node's tokens are covered by runs in order. A bare int is the commonest case: the whole node is text that begins at that
position. Otherwise a tuple of :class:`TextRun`, :class:`GridRun` and :class:`TableRun`. A run is a few numbers however many
tokens it covers; only what no grid reproduces is kept as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TextRun(NamedTuple):
    """``length`` tokens at ``base``, ``base + 1``, ... on every axis."""

    length: int
    base: int


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


class TableRun(NamedTuple):
    """``length`` tokens whose positions are the columns of a table: ``data``, (num_axes, length) in the scheme's dtype."""

    length: int
    data: bytes


Run = TextRun | GridRun | TableRun
Runs = int | tuple[Run, ...]


def write(runs: Runs, start: int, stop: int, out: NDArray[Any]) -> None:
    """Write the positions of tokens ``[start, stop)`` of a node into ``out``, (num_axes, stop - start)."""
    if isinstance(runs, int):
        out[:] = np.arange(runs + start, runs + stop)
        return
    at = 0
    for run in runs:
        first = max(start, at)
        last = min(stop, at + run.length)
        if first < last:
            _write_run(run, first - at, last - at, out[:, first - start : last - start])
        at += run.length
        if at >= stop:
            return


def _write_run(run: Run, first: int, last: int, out: NDArray[Any]) -> None:
    if isinstance(run, TextRun):
        out[:] = np.arange(run.base + first, run.base + last)
    elif isinstance(run, GridRun):
        frame, place = np.divmod(np.arange(run.skip + first, run.skip + last), run.height * run.width)
        row, column = np.divmod(place, run.width)
        out[0] = run.time + frame * run.time_step
        out[1] = run.base + row
        out[2] = run.base + column
    else:
        out[:] = np.frombuffer(run.data, out.dtype).reshape(out.shape[0], run.length)[:, first:last]


def grid_runs(base: int, frame: int, times: Sequence[int], height: int, width: int, first: int, last: int) -> list[GridRun]:
    """Runs for placeholders ``[first, last)`` of a block whose frame ``frame + f`` stands at time ``base + times[f]``.

    One run for each stretch of frames that are equally far apart; times that were rounded need several.
    """
    frame_size = height * width
    runs = []
    at = 0
    while at < len(times):
        step = times[at + 1] - times[at] if at + 1 < len(times) else 0
        beyond = at + 1
        while beyond < len(times) and times[beyond] - times[beyond - 1] == step:
            beyond += 1
        begin = (frame + at) * frame_size
        start, stop = max(first, begin), min(last, (frame + beyond) * frame_size)
        runs.append(GridRun(stop - start, base, base + times[at], step, height, width, start - begin))
        at = beyond
    return runs
