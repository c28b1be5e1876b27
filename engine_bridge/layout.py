"""How a batch lies in a staging area: one run of int32 words at fixed places, so that one copy moves it.

An extend area is a header, columns with a word for each request, columns with a word for each position run, and a payload: the
token ids, and behind them the numbers of whatever no formula gives (tables, times of frames). Only as much of the payload is
copied as is used. Floats stand as their bits.

A row of the run columns is ``dst`` (the column of the batch where the run begins; it ends where the next begins), ``kind`` and six
numbers, which mean by kind, with i the column of the batch and k = i + f5:

==============  =======================================================================================================
TEXT            every axis: f0 + i
FLOAT_TEXT      every axis: float32(f1 + i) + f0
GRID            t = f1 + k // f3 * f2, h = f0 + k % f3 // f4, w = f0 + k % f4
FRAMES          t = payload[f1 + k // f3], h and w as in GRID
FLOAT_FRAMES    the same in float32
ABSOLUTE        the last three axes: k % f4, k // f4, f1; those before: f0 + i
TABLE           axis a: payload[f1 + a * f2 + k]
FLOAT_TABLE     the same in float32
==============  =======================================================================================================
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

WORD: Final = np.dtype("<i4")
WORD_BYTES: Final = 4

TEXT, FLOAT_TEXT, GRID, FRAMES, FLOAT_FRAMES, ABSOLUTE, TABLE, FLOAT_TABLE = range(8)

HEADER: Final = 8
#: Words of the header: how much of the columns and the payload is used, and how much of the outputs is to be written.
NUM_TOKENS, NUM_REQUESTS, NUM_RUNS, DIRTY_TOKENS, DIRTY_REQUESTS = range(5)

FIELDS: Final = 6  # of a run, beside ``dst`` and ``kind``


class ExtendLayout(NamedTuple):
    """Where each part of an extend area begins, in words. ``payload`` has room for all tokens and a table of all of them.

    ``fields``: ``FIELDS`` columns, one behind the other.
    """

    max_requests: int
    max_runs: int
    cu_seqlens_q: int
    seq_lens: int
    prefix_lens: int
    req_slots: int
    logits_indices: int
    deltas: int
    dst: int
    kind: int
    fields: int
    payload: int
    words: int

    @classmethod
    def of(cls, max_tokens: int, max_requests: int, max_runs: int, num_axes: int) -> ExtendLayout:
        requests = [max_requests + 1, *[max_requests] * 5]
        sizes = (*requests, max_runs + 1, max_runs, FIELDS * max_runs, max_tokens * (1 + num_axes))
        return cls(max_requests, max_runs, *itertools.accumulate(sizes, initial=HEADER))


def bytes_of(words: NDArray[np.int32]) -> memoryview:
    """A view of an array through which its bytes can be written."""
    memory: Any = words
    return memoryview(memory).cast("B")


class ExtendArea:
    """One extend area as arrays: a view of each of its parts.

    ``num_requests``, ``num_kinds``: how much of the columns, and of ``kind``, the last batch has written.
    """

    __slots__ = (
        "cu_seqlens_q",
        "deltas",
        "dst",
        "fields",
        "header",
        "kind",
        "logits_indices",
        "num_kinds",
        "num_requests",
        "payload",
        "pen",
        "prefix_lens",
        "req_slots",
        "seq_lens",
        "words",
        "words_pen",
    )

    def __init__(self, layout: ExtendLayout, words: NDArray[np.int32]) -> None:
        requests, runs = layout.max_requests, layout.max_runs
        self.num_requests: int = 0
        self.num_kinds: int = 0
        self.header: NDArray[np.int32] = words[:HEADER]
        self.words_pen: memoryview = bytes_of(words)
        self.words: memoryview = self.words_pen.cast("i")
        self.cu_seqlens_q: NDArray[np.int32] = words[layout.cu_seqlens_q :][: requests + 1]
        self.seq_lens: NDArray[np.int32] = words[layout.seq_lens :][:requests]
        self.prefix_lens: NDArray[np.int32] = words[layout.prefix_lens :][:requests]
        self.req_slots: NDArray[np.int32] = words[layout.req_slots :][:requests]
        self.logits_indices: NDArray[np.int32] = words[layout.logits_indices :][:requests]
        self.deltas: NDArray[np.int32] = words[layout.deltas :][:requests]
        self.dst: NDArray[np.int32] = words[layout.dst :][: runs + 1]
        self.kind: NDArray[np.int32] = words[layout.kind :][:runs]
        self.fields: NDArray[np.int32] = words[layout.fields :][: FIELDS * runs].reshape(FIELDS, runs)
        self.payload: NDArray[np.int32] = words[layout.payload :]
        self.pen: memoryview = bytes_of(self.payload)
