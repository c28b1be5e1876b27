"""What the kernels compute, in NumPy: the inputs on the CPU, and the judge of the kernels, which agree with it bit for bit."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_bridge.layout import (
    ABSOLUTE,
    DIRTY_REQUESTS,
    DIRTY_TOKENS,
    FLOAT_FRAMES,
    FLOAT_TABLE,
    FLOAT_TEXT,
    FRAMES,
    GRID,
    NUM_REQUESTS,
    NUM_RUNS,
    NUM_TOKENS,
    TABLE,
    TEXT,
    WORD,
    ExtendArea,
)
from sessiontree.positions.runs import counted

Array = NDArray[Any]
FEW: Final = 16  # slots


def expand_extend(area: ExtendArea, input_ids: Array, positions: Array, deltas: Array) -> None:
    """Token ids, positions and deltas of an extend area. ``input_ids``: (max_tokens,), ``positions``: (axes, max_tokens)."""
    tokens, requests, runs = (int(area.header[at]) for at in (NUM_TOKENS, NUM_REQUESTS, NUM_RUNS))
    input_ids[:tokens] = area.payload[:tokens]
    deltas[:requests] = area.deltas[:requests].view(np.float32) if deltas.dtype.kind == "f" else area.deltas[:requests]
    kinds, dst = area.kind[:runs], area.dst[: runs + 1]
    if runs == 1 and tokens and not kinds[0]:
        shift = int(area.fields[0, 0])
        positions[:, :tokens] = counted(tokens + shift, shift)
    elif runs and tokens:
        shifts = np.where(kinds == TEXT, area.fields[0, :runs], 0)
        positions[:, :tokens] = counted(tokens) + np.repeat(shifts, np.diff(dst))
    for run in np.flatnonzero(kinds).tolist():
        _write_run(area, run, int(dst[run]), int(dst[run + 1]), tokens, positions)
    _reset(tokens, int(area.header[DIRTY_TOKENS]), input_ids, *positions)
    _reset(requests, int(area.header[DIRTY_REQUESTS]), deltas)


def _reset(used: int, dirty: int, *outputs: Array) -> None:
    if dirty > used:
        for output in outputs:
            output[used:dirty] = 0


def _write_run(area: ExtendArea, run: int, start: int, stop: int, num_tokens: int, positions: Array) -> None:
    kind = int(area.kind[run])
    f0, f1, f2, f3, f4, f5 = area.fields[:, run].tolist()
    column = np.arange(start, stop)
    out = positions[:, start:stop]
    k = column + f5
    behind = area.payload[num_tokens:]
    if kind == FLOAT_TEXT:
        out[:] = (column + f1).astype(np.float32) + _single(f0)
    elif kind in (GRID, FRAMES):
        frame, place = np.divmod(k, f3)
        out[0] = f1 + frame * f2 if kind == GRID else behind[f1 + frame]
        out[1], out[2] = f0 + place // f4, f0 + place % f4
    elif kind == FLOAT_FRAMES:
        frame, place = np.divmod(k, f3)
        out[0] = behind.view(np.float32)[f1 + frame]
        out[1], out[2] = _single(f0) + (place // f4).astype(np.float32), _single(f0) + (place % f4).astype(np.float32)
    elif kind == ABSOLUTE:
        out[:-3] = f0 + column
        out[-3], out[-2], out[-1] = k % f4, k // f4, f1
    else:
        assert kind in (TABLE, FLOAT_TABLE)
        numbers = behind.view(np.float32) if kind == FLOAT_TABLE else behind
        for axis, row in enumerate(out):
            row[:] = numbers[f1 + axis * f2 + k]


def _single(bits: int) -> np.float32:
    return np.float32(np.array(bits, WORD).view(np.float32))


class HostTables(NamedTuple):
    """What decodes, and the outputs of its steps, where both are the host's.

    ``state``: (3, slots), rows of length, delta, whether the delta is the bits of a float. ``history``: (slots, a power of two),
    the token at index i of a path at i modulo that. ``deltas``: (requests,).
    """

    state: Array
    history: Array
    input_ids: Array
    positions: Array
    seq_lens: Array
    deltas: Array


class HostPens:
    """The same, number by number: for a few slots that costs less than NumPy's calls, and a fifth where these are in no cache."""

    __slots__ = ("_deltas", "_floats", "_history", "_input_ids", "_positions", "_ring", "_seq_lens", "_words", "lengths", "tables")

    def __init__(self, tables: HostTables) -> None:
        self.tables: HostTables = tables
        self.lengths: memoryview
        self.lengths, self._words, self._floats = [row.data for row in tables.state]
        self._ring = tables.history.shape[1]
        self._history = tables.history.reshape(-1).data
        self._input_ids = tables.input_ids.data
        self._positions = [axis.data for axis in tables.positions]
        self._seq_lens = tables.seq_lens.data
        self._deltas = tables.deltas.data

    def put(self, slot: int, token: int) -> None:
        """One token behind the path of a slot."""
        length = self.lengths[slot]
        self._history[slot * self._ring + (length & (self._ring - 1))] = token
        self.lengths[slot] = length + 1

    def expand(self, slots: list[int]) -> bool:
        """As :func:`expand_decode` of width 1, of outputs that held no more than these; False where a delta is a float's."""
        lengths, words, floats = self.lengths, self._words, self._floats
        history, ring = self._history, self._ring
        for at, slot in enumerate(slots):
            if floats[slot]:
                return False
            length, delta = lengths[slot], words[slot]
            self._input_ids[at] = history[slot * ring + ((length - 1) & (ring - 1))]
            for axis in self._positions:
                axis[at] = length - 1 + delta
            self._seq_lens[at] = length
            self._deltas[at] = delta
        return True


def expand_decode(slots: Array, width: int, dirty: tuple[int, int], tables: HostTables) -> None:
    """The last ``width`` tokens of each of ``slots``, where they stand, and how long their paths are.

    ``dirty``: tokens and requests that the outputs held before.
    """
    state, history, input_ids, positions, seq_lens, deltas = tables
    count = len(slots)
    tokens = count * width
    lengths, words, floats = state[:, slots]
    index = (lengths - width)[:, None] + counted(width)
    input_ids[:tokens] = history[slots[:, None], index & (history.shape[1] - 1)].reshape(-1)
    if b"\1" in floats.tobytes():
        singles = words.view(np.float32)
        places: Array = np.where(floats[:, None] != 0, index.astype(np.float32) + singles[:, None], 0)
        if positions.dtype.kind != "f":
            places = places.astype(np.int64)
        positions[:, :tokens] = np.where(floats[:, None] != 0, places, index + words[:, None]).reshape(-1)
        deltas[:count] = np.where(floats != 0, singles if deltas.dtype.kind == "f" else singles.astype(np.int64), words)
    else:
        positions[:, :tokens] = (index + words[:, None]).reshape(-1)
        deltas[:count] = words
    seq_lens[:count] = lengths
    if dirty[0] > tokens or dirty[1] > count:
        _reset(tokens, dirty[0], input_ids, *positions)
        _reset(count, dirty[1], seq_lens, deltas)
