"""Positions of a turn for a page, by their runs: a few numbers each, of which it makes the very same table.

Each run is a list: its kind, how many tokens it covers, and the other fields of the run of that name in
:mod:`sessiontree.positions.runs`. What is no formula there, and a canvas, goes as a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sessiontree.positions import PositionScheme
from sessiontree.positions.runs import AbsoluteRun, FloatTextRun, FrameRun, GridRun, Run, Runs, TextRun, unpacked
from sessiontree.viewer.packing import Arrays


def run_facts(scheme: PositionScheme, runs: Runs, num_tokens: int, arrays: Arrays) -> list[list[Any]]:
    """The runs of a turn of ``num_tokens`` tokens."""
    return [_facts(scheme, run, arrays) for run in unpacked(runs, num_tokens) if run.length]


def _facts(scheme: PositionScheme, run: Run, arrays: Arrays) -> list[Any]:
    match run:
        case TextRun():
            return ["text", *run]
        case FloatTextRun():
            return ["float", *run]
        case GridRun():
            return ["grid", *run]
        case FrameRun():
            return ["frames", *run[:2], arrays.add(run.frame_times()), *run[3:]]
        case AbsoluteRun():
            return ["absolute", *run]
    table = np.empty((scheme.num_axes, run.length), scheme.dtype)
    run.write(0, run.length, table)
    return ["table", run.length, arrays.add(table)]
