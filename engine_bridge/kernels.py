"""The kernels of :mod:`engine_bridge.stager`, in Triton. Imported only where a GPU is used, or Triton's interpreter is asked for.

One kernel for each kind of batch. What it reads is laid out in :mod:`engine_bridge.layout`; what it computes is said once more, in
NumPy, in :mod:`engine_bridge.expand`, and the two agree bit for bit: integers throughout, floats rounded once by each operation.
"""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from engine_bridge import layout

TEXT = tl.constexpr(layout.TEXT)
FLOAT_TEXT = tl.constexpr(layout.FLOAT_TEXT)
GRID = tl.constexpr(layout.GRID)
FRAMES = tl.constexpr(layout.FRAMES)
FLOAT_FRAMES = tl.constexpr(layout.FLOAT_FRAMES)
ABSOLUTE = tl.constexpr(layout.ABSOLUTE)
TABLE = tl.constexpr(layout.TABLE)
FLOAT_TABLE = tl.constexpr(layout.FLOAT_TABLE)
NUM_TOKENS = tl.constexpr(layout.NUM_TOKENS)
NUM_REQUESTS = tl.constexpr(layout.NUM_REQUESTS)
NUM_RUNS = tl.constexpr(layout.NUM_RUNS)
DIRTY_TOKENS = tl.constexpr(layout.DIRTY_TOKENS)
DIRTY_REQUESTS = tl.constexpr(layout.DIRTY_REQUESTS)
HEADER = tl.constexpr(layout.HEADER)

BLOCK = 256


@triton.jit
def _cast(whole, single, is_float, FLOATS: tl.constexpr, out):
    """One of two numbers, as what ``out`` points to: a float goes to an integer towards zero, and is not rounded twice."""
    if FLOATS:
        return tl.where(is_float, single, whole.to(tl.float32))
    else:
        return tl.where(is_float, single.to(out.dtype.element_ty), whole.to(out.dtype.element_ty))


@triton.jit
def extend_kernel(
    area,
    input_ids,
    positions,
    deltas,
    MAX_TOKENS: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    MAX_RUNS: tl.constexpr,
    AXES: tl.constexpr,
    DELTAS: tl.constexpr,
    DST: tl.constexpr,
    KIND: tl.constexpr,
    FIELDS: tl.constexpr,
    PAYLOAD: tl.constexpr,
    STEPS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token ids and positions, a program for ``BLOCK`` columns; the first also write deltas. ``STEPS``: log2 of the runs."""
    first = tl.program_id(0) * BLOCK
    lane = first + tl.arange(0, BLOCK)
    requests = tl.load(area + NUM_REQUESTS)
    if first < MAX_REQUESTS:
        written = lane < tl.maximum(requests, tl.load(area + DIRTY_REQUESTS))
        word = tl.load(area + DELTAS + lane, lane < requests, 0)
        if FLOATS:
            tl.store(deltas + lane, word.to(tl.float32, bitcast=True), written)
        else:
            tl.store(deltas + lane, word.to(deltas.dtype.element_ty), written)
    tokens = tl.load(area + NUM_TOKENS)
    most = tl.maximum(tokens, tl.load(area + DIRTY_TOKENS))
    if first < most:
        written = lane < most
        used = lane < tokens
        token = tl.load(area + PAYLOAD + lane, used, 0)
        tl.store(input_ids + lane, token.to(input_ids.dtype.element_ty), written)
        # The last run that begins at or before the column.
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + tl.load(area + NUM_RUNS)
        for _ in range(STEPS):
            middle = (low + high) >> 1
            more = (high - low) > 1
            behind = tl.load(area + DST + middle, used & more, 0) <= lane
            low = tl.where(more & behind, middle, low)
            high = tl.where(more & (behind == 0), middle, high)
        kind = tl.load(area + KIND + low, used, 0)
        f0 = tl.load(area + FIELDS + low, used, 0)
        other = used & (kind != TEXT)
        f1 = tl.load(area + FIELDS + MAX_RUNS + low, other, 0)
        f2 = tl.load(area + FIELDS + 2 * MAX_RUNS + low, other, 0)
        f3 = tl.load(area + FIELDS + 3 * MAX_RUNS + low, other, 1)
        f4 = tl.load(area + FIELDS + 4 * MAX_RUNS + low, other, 1)
        k = lane + tl.load(area + FIELDS + 5 * MAX_RUNS + low, other, 0)
        single = f0.to(tl.float32, bitcast=True)
        numbers = area + PAYLOAD + tokens
        is_frames = (kind == FRAMES) | (kind == FLOAT_FRAMES)
        is_grid = is_frames | (kind == GRID)
        is_table = (kind == TABLE) | (kind == FLOAT_TABLE)
        is_float = (kind == FLOAT_TEXT) | (kind == FLOAT_FRAMES) | (kind == FLOAT_TABLE)
        frame = k // f3
        place = k % f3
        row = place // f4
        column = place % f4
        time = tl.load(numbers + f1 + frame, used & is_frames, 0)
        text = (f1 + lane).to(tl.float32) + single
        for axis in tl.static_range(AXES):
            whole = f0 + lane
            if axis == 0:
                whole = tl.where(kind == GRID, f1 + frame * f2, whole)
                whole = tl.where(kind == FRAMES, time, whole)
                value = time.to(tl.float32, bitcast=True)
            else:
                across = tl.where(axis == 1, row, column)
                whole = tl.where(is_grid, f0 + across, whole)
                value = single + across.to(tl.float32)
            if AXES >= 3:
                if axis == AXES - 3:
                    whole = tl.where(kind == ABSOLUTE, k % f4, whole)
                if axis == AXES - 2:
                    whole = tl.where(kind == ABSOLUTE, k // f4, whole)
                if axis == AXES - 1:
                    whole = tl.where(kind == ABSOLUTE, f1, whole)
            bits = tl.load(numbers + f1 + axis * f2 + k, used & is_table, 0)
            whole = tl.where(kind == TABLE, bits, whole)
            value = tl.where(kind == FLOAT_TEXT, text, value)
            value = tl.where(kind == FLOAT_TABLE, bits.to(tl.float32, bitcast=True), value)
            out = positions + axis * MAX_TOKENS + lane
            position = _cast(whole, tl.where(is_float, value, 0.0), is_float, FLOATS, positions)
            tl.store(out, tl.where(used, position, tl.zeros_like(position)), written)


@triton.jit
def decode_kernel(
    staged,
    area,
    state,
    history,
    input_ids,
    positions,
    seq_lens,
    deltas,
    STAGED: tl.constexpr,
    MAX_SLOTS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    AXES: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last ``WIDTH`` tokens of each slot and where they stand, a program for ``BLOCK``; the first also write lengths, deltas.

    If ``STAGED``, the slots are read where the host wrote them, in one trip, and kept in ``area``; otherwise they are there.
    """
    source = area
    if STAGED:
        source = staged
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = lane // WIDTH
    slot = tl.load(source + HEADER + request, request < MAX_SLOTS, 0)
    own_slot = tl.load(source + HEADER + lane, lane < MAX_SLOTS, 0)
    requests = tl.load(source + NUM_REQUESTS)
    dirty_tokens = tl.load(source + DIRTY_TOKENS)
    dirty_requests = tl.load(source + DIRTY_REQUESTS)
    own = lane < requests
    own_slot = tl.where(own, own_slot, 0)
    if STAGED:
        tl.store(area + HEADER + lane, own_slot, lane < MAX_SLOTS)
        if tl.program_id(0) == 0:
            tl.store(area + NUM_REQUESTS, requests)
            tl.store(area + DIRTY_TOKENS, dirty_tokens)
            tl.store(area + DIRTY_REQUESTS, dirty_requests)
    used = request < requests
    slot = tl.where(used, slot, 0)
    written = lane < tl.maximum(requests * WIDTH, dirty_tokens)
    length = tl.load(state + slot, used, 0)
    word = tl.load(state + MAX_SLOTS + slot, used, 0)
    is_float = tl.load(state + 2 * MAX_SLOTS + slot, used, 0) != 0
    own_length = tl.load(state + own_slot, own, 0)
    own_word = tl.load(state + MAX_SLOTS + own_slot, own, 0)
    own_float = tl.load(state + 2 * MAX_SLOTS + own_slot, own, 0) != 0
    index = length - WIDTH + lane % WIDTH
    token = tl.load(history + slot * RING + (index & (RING - 1)), used, 0)
    tl.store(input_ids + lane, token.to(input_ids.dtype.element_ty), written)
    single = word.to(tl.float32, bitcast=True)
    place = _cast(index + word, tl.where(is_float, index.to(tl.float32) + single, 0.0), is_float, FLOATS, positions)
    place = tl.where(used, place, tl.zeros_like(place))
    for axis in tl.static_range(AXES):
        tl.store(positions + axis * MAX_TOKENS + lane, place, written)
    each = lane < tl.maximum(requests, dirty_requests)
    tl.store(seq_lens + lane, own_length, each)
    delta = _cast(own_word, tl.where(own_float, own_word.to(tl.float32, bitcast=True), 0.0), own_float, FLOATS, deltas)
    tl.store(deltas + lane, tl.where(own, delta, tl.zeros_like(delta)), each)


@triton.jit
def advance_kernel(
    area,
    counts,
    tokens,
    state,
    history,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNTED: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tokens of each row, the first ``counts`` of ``WIDTH``, behind its slot's path; a count below 0 takes it back.

    ``area``: a header and the slots, as of a decode step. ``counts`` is read if ``COUNTED``; otherwise every row is taken whole.
    """
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = lane < tl.load(area + NUM_REQUESTS)
    slot = tl.load(area + HEADER + lane, used, 0)
    count = tl.zeros([BLOCK], tl.int32) + WIDTH
    if COUNTED:
        count = tl.load(counts + lane, used, 0)
    length = tl.load(state + slot, used, 0)
    for step in range(WIDTH):
        taken = used & (step < count)
        token = tl.load(tokens + lane * STRIDE + step, taken, 0).to(tl.int32)
        tl.store(history + slot * RING + ((length + step) & (RING - 1)), token, taken)
    tl.store(state + slot, length + count, used)
