"""A ragged batch gathered from nodes and drafts: token bytes, rows of position runs, and what a batch says about its requests.

Whatever is wrong is found here. Token bytes go to their place in a payload that nobody sees before the batch is complete; nothing
else is written. A window that lies in one node of text, as nearly all do, takes a few attribute reads and one slice; everything
else goes run by run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_bridge.layout import (
    ABSOLUTE,
    FLOAT_FRAMES,
    FLOAT_TABLE,
    FLOAT_TEXT,
    FRAMES,
    GRID,
    TABLE,
    TEXT,
    WORD,
)
from engine_bridge.policies import committed
from sessiontree import Draft, LimitExceeded, MediaItem, Node, PositionError, Unsupported
from sessiontree.draft import position_pieces as draft_pieces
from sessiontree.node import clipped_spans
from sessiontree.node import position_pieces as node_pieces
from sessiontree.positions import MODES, Mode, PositionScheme
from sessiontree.positions.runs import (
    AbsoluteRun,
    FloatTextRun,
    FrameRun,
    GridRun,
    Piece,
    Run,
    TextRun,
    clipped_runs,
    packed,
    write,
)
from sessiontree.tokens import as_index, window

_MOST: Final = 2**31 - 1
_LARGE: Final = 4_096  # tokens, from which on a memoryview costs less than a copy of them

Row = tuple[int, int, int, int, int, int, int, int]  # dst, kind, f0 to f5


class BatchSpan(NamedTuple):
    """Placeholders of a batch: columns ``[start, stop)`` of its packed tokens, of request number ``request``, show ``item``.

    ``first_row``: which row of the whole item's encoder output the first of them takes.
    """

    request: int
    item: MediaItem
    start: int
    stop: int
    first_row: int


class Gathered(NamedTuple):
    """A batch whose tokens are in their place.

    ``deltas``: of each request's whole path, by request, where it is not 0. ``bases``: where each request's positions begin, if all
    of it is text in one run each; otherwise ``rows``, all runs of the batch, and ``payload``, what they refer to.
    """

    num_tokens: int
    deltas: dict[int, int | float]
    bases: list[int]
    rows: list[Row] | None
    payload: list[NDArray[np.int32]]
    spans: list[BatchSpan]


_gathered = partial(tuple.__new__, Gathered)  # as Gathered(...), without a Python call


def windows(nodes: Sequence[Any], start: Any, stop: Any) -> tuple[list[int], list[int]]:
    """First and last path index of each window, given as one for all, one each, or None for the path's ends. Raises TypeError."""
    return _bounds(nodes, start, "start"), _bounds(nodes, stop, "stop")


def _bounds(nodes: Sequence[Any], given: Any, what: str) -> list[int]:
    if given is None:
        if what == "start":
            return [0] * len(nodes)
        usual = {*map(type, nodes)} <= {Node, Draft}  # a call for each node costs more than this one does
        return [node.stop for node in nodes] if usual else [path_of(node).stop for node in nodes]
    if isinstance(given, np.ndarray) and given.ndim:
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise TypeError(f"{what} is an index or a sequence of them, not an array of {given.shape} {given.dtype}")
        bounds: list[int] = given.tolist()
    elif isinstance(given, (list, tuple)) or (isinstance(given, Sequence) and not isinstance(given, (str, bytes))):
        # A float or a position among them is found by as_index; this only sees whether one has to look.
        bounds = list(given) if set(map(type, given)) <= {int} else [as_index(bound, what) for bound in given]
    else:
        return [as_index(given, what)] * len(nodes)
    if len(bounds) != len(nodes):
        raise TypeError(f"{len(nodes)} nodes and {what} for {len(bounds)}")
    return bounds


def path_of(node: Any) -> Node | Draft:
    if not isinstance(node, (Node, Draft)):
        raise TypeError(f"a batch is of Nodes and Drafts, not {type(node).__name__}")
    return node


def gather(
    nodes: Sequence[Any],
    starts: list[int],
    stops: list[int],
    mode: Mode,
    num_axes: int,
    floats: bool,
    pen: memoryview,
    max_tokens: int,
) -> Gathered:
    """Path tokens ``[start, stop)`` of each of ``nodes``, with their positions on ``num_axes`` axes, given out as floats or not.

    Writes their ids to ``pen``, bytes with room for ``max_tokens`` of them. Raises TypeError, OutOfRange, LimitExceeded,
    PositionError, Unsupported for a scheme that has other axes.
    """
    deltas: dict[int, int | float] = {}
    bases: list[int] = []
    special: list[int] = []
    place, room = 0, max_tokens * 4
    if mode.__class__ is not str or mode not in MODES:
        _refuse_mode(mode)
    kinds = {*map(type, nodes)}
    if mode == "as_decoded" and kinds <= {Node}:
        for node, first, last in zip(nodes, starts, stops, strict=True):
            runs, extent, state = node.runs, node._extent, node._state
            at = extent.origin
            end = place + (last - first) * 4
            index = state is None and runs.__class__ is int  # every token stands at its index
            if index and end <= room and at <= first >= runs and first <= last <= node.stop and last - first < _LARGE:
                pen[place:end] = extent.buffer[(first - at) * 4 : (last - at) * 4]
                place = end
                bases.append(first)
                continue
            count, after, top, _, carried = node.state if state is None else state
            # A node whose runs are one int is text, on every axis of its scheme. Text goes on at `after` behind it, so it begins at
            # token count - (after - runs).
            plain = runs.__class__ is int and not carried
            if plain and count - after + runs <= first <= last <= count and first >= at and end <= room:
                delta = top + 1 - count
                if not delta or (delta <= _MOST and node._lineage.scheme.usual_delta):
                    if last - first < _LARGE:
                        pen[place:end] = extent.buffer[(first - at) * 4 : (last - at) * 4]
                    else:
                        pen[place:end] = memoryview(extent.buffer)[(first - at) * 4 : (last - at) * 4]
                    place = end
                    if delta:
                        deltas[len(bases)] = delta
                    bases.append(first + after - count)
                    continue
            special.append(len(bases))
            _check_window(node, first, last, nodes, starts, stops, max_tokens, end)
            place = end
            bases.append(0)
    elif mode == "as_decoded" and kinds <= {Node, Draft}:
        for node, first, last in zip(nodes, starts, stops, strict=True):
            end = place + (last - first) * 4
            own = None if end > room else _own_delta(node, first, last)
            if own is None:
                special.append(len(bases))
                _check_window(node, first, last, nodes, starts, stops, max_tokens, end)
                bases.append(0)
            else:
                pen[place:end] = node.input_ids(first, last, copy=False).data.cast("B")
                if own:
                    deltas[len(bases)] = own
                bases.append(first + own)
            place = end
    else:
        for node, first, last in zip(nodes, starts, stops, strict=True):
            place += (last - first) * 4
            _check_window(node, first, last, nodes, starts, stops, max_tokens, place)
        special += range(len(nodes))
        bases += [0] * len(nodes)
    if bases and max(bases) + place // 4 > _MOST:
        for node in nodes:
            check_limit(node.scheme)
    if not special:
        return _gathered((place // 4, deltas, bases, None, [], []))
    rows: list[Row] = []
    payload: list[NDArray[np.int32]] = []
    spans: list[BatchSpan] = []
    builder = _Rows(rows, payload, num_axes, floats)
    others = iter((*special, -1))
    other = next(others)
    column = 0
    for number, (node, first, last) in enumerate(zip(nodes, starts, stops, strict=True)):
        if number == other:
            other = next(others)
            check_limit(node.scheme)
            deltas[number] = node.scheme.mrope_position_delta(node.position_state(mode))
            if last > first:
                pen[column * 4 : (column + last - first) * 4] = node.input_ids(first, last, copy=False).data.cast("B")
            pieces_of = node_pieces if isinstance(node, Node) else draft_pieces
            for piece in pieces_of(node, first, last, mode):
                for at, run, begin, end in clipped_runs(piece):
                    builder.add(column + at, run, begin, end, node.scheme)
            placed = committed(node)
            for item, begin, end, row in clipped_spans(placed, min(first, placed.stop), min(last, placed.stop)):
                spans.append(BatchSpan(number, item, column + begin - first, column + end - first, row))
        elif last > first:
            builder.text(column, bases[number] - column)
        column += last - first
    return Gathered(column, deltas, bases, rows, payload, spans)


def _own_delta(node: Any, first: int, last: int) -> int | None:
    """The delta at which path tokens ``[first, last)`` of a draft stand, where all are its own; None: they are to be planned."""
    if node.__class__ is not Draft or not node.start <= first <= last <= node.stop:
        return None
    state, scheme = node.parent.state, node.scheme
    delta = state.max_position + 1 - state.num_tokens
    usual = scheme.usual_delta and not state.carried and scheme.decode_room(state) is None
    return delta if usual and delta.__class__ is int and delta <= _MOST else None


def _check_window(
    node: Any, first: int, last: int, nodes: Sequence[Any], starts: list[int], stops: list[int], max_tokens: int, end: int
) -> None:
    """Raises OutOfRange for what is no window of the node's path, LimitExceeded where the batch gets too long by it."""
    window(first, last, path_of(node).stop)
    if end > max_tokens * 4:
        for each, start, stop in zip(nodes, starts, stops, strict=True):
            window(start, stop, path_of(each).stop)  # one that is no window at all is the better thing to name
        tokens = sum(stops) - sum(starts)
        raise LimitExceeded(f"a batch with {tokens} tokens; max_tokens is {max_tokens}", value=tokens, limit=max_tokens)


def _refuse_mode(mode: Any) -> None:
    """Raises TypeError, PositionError; a subclass of str may be right all the same."""
    if not isinstance(mode, str):
        raise TypeError(f"a mode is text, not {type(mode).__name__}")
    if mode not in MODES:
        raise PositionError(f"no positions {mode!r}; a mode is one of {', '.join(MODES)}", mode=mode)


def check_limit(scheme: PositionScheme) -> None:
    """Raises Unsupported for a scheme whose positions need more than 32 bits."""
    if scheme.max_position_limit > _MOST:
        limit = scheme.max_position_limit
        raise Unsupported(f"{scheme.name}'s max_position_limit of {limit} does not fit 32 bits", value=limit, limit=_MOST)


class _Rows:
    """Rows of runs, in order; a run of text that goes on where the one before it ends is no row of its own."""

    __slots__ = ("_floats", "_num_axes", "_payload", "_rows", "_shift", "_used")

    def __init__(self, rows: list[Row], payload: list[NDArray[np.int32]], num_axes: int, floats: bool) -> None:
        self._rows = rows
        self._payload = payload
        self._num_axes = num_axes
        self._floats = floats
        self._used = 0  # words of the payload
        self._shift: int | None = None  # of the text that is the last row

    def text(self, dst: int, shift: int) -> None:
        if shift != self._shift:
            self._put(dst, TEXT, shift)
            self._shift = shift

    def _put(self, dst: int, kind: int, f0: int = 0, f1: int = 0, f2: int = 0, f3: int = 1, f4: int = 1, f5: int = 0) -> None:
        self._rows.append((dst, kind, f0, f1, f2, f3, f4, f5))
        self._shift = None

    def _keep(self, numbers: NDArray[Any], floats: bool) -> int:
        """Words for the payload; returns where they begin, counted behind the token ids."""
        kind = np.float32 if floats else WORD
        words: NDArray[np.int32] = np.ascontiguousarray(numbers, kind).reshape(-1).view(WORD)
        at = self._used
        self._payload.append(words)
        self._used += len(words)
        return at

    def add(self, dst: int, run: Run, first: int, stop: int, scheme: PositionScheme) -> None:
        """Tokens ``[first, stop)`` of ``run``, from column ``dst`` of the batch on. Raises Unsupported for other axes.

        Plain text has the same position on any number of axes.
        """
        if not isinstance(run, (TextRun, FloatTextRun)) and scheme.num_axes not in (1, self._num_axes):
            raise Unsupported(
                f"{scheme.name} has {scheme.num_axes} axes, the batch {self._num_axes}", scheme=scheme.name, limit=self._num_axes
            )
        if self._floats and scheme.floats and scheme.dtype.kind == "i":
            table: NDArray[Any] = np.empty((scheme.num_axes, stop - first), scheme.dtype)  # its floats are cast before all else
            write([Piece(0, packed([run]), first, stop)], table)
            self._table(dst, table)
        elif type(run) is TextRun:
            self.text(dst, run.base + first - dst)
        elif type(run) is FloatTextRun:
            self._put(dst, FLOAT_TEXT, _bits(run.base), run.skip + first - dst)
        elif type(run) is GridRun:
            size, skip = run.height * run.width, run.skip + first
            frame, skip = divmod(skip, size)  # so that what stands before the window takes no bits
            time = run.time + frame * run.time_step
            self._put(dst, GRID, run.base, time, run.time_step, size, run.width, skip - dst)
        elif type(run) is FrameRun:
            size, skip = run.height * run.width, run.skip + first
            frame, skip = divmod(skip, size)
            floats = isinstance(run.base, float)
            times = run.frame_times()[frame : -(-(run.skip + stop) // size)]
            at = self._keep(times + times.dtype.type(run.base), floats)
            base = _bits(run.base) if floats else int(run.base)
            self._put(dst, FLOAT_FRAMES if floats else FRAMES, base, at, 0, size, run.width, skip - dst)
        elif type(run) is AbsoluteRun:
            self._put(dst, ABSOLUTE, run.base + first - dst, run.image, 0, 1, run.width, run.skip + first - dst)
        else:
            assert not isinstance(run, (TextRun, FloatTextRun))
            table = np.empty((scheme.num_axes, stop - first), getattr(run, "dtype", np.int64))
            run.write(first, stop, table)
            self._table(dst, table)

    def _table(self, dst: int, table: NDArray[Any]) -> None:
        axes, count = table.shape
        floats = table.dtype.kind == "f"
        stride = count
        if axes != self._num_axes:  # one row serves all axes: that of a text scheme, or any of text
            stride, table = 0, table[:1]
        self._put(dst, FLOAT_TABLE if floats else TABLE, 0, self._keep(table, floats), stride, 1, 1, -dst)


def _bits(number: float) -> int:
    return int(np.float32(number).view(WORD))
