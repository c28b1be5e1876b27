"""The attention of a packed tree: a token sees those before it whose subtree it is in, ``k <= q < tok_end[k]``.

That is every path's own causal attention. All forms are made from the runs of equal ``tok_end``: within a run attention is causal,
and whatever follows it up to ``tok_end`` sees all of it. No form but the dense one looks at pairs of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask


def dense_mask(tok_end: torch.Tensor) -> torch.Tensor:
    """(T, T) bool, True where query (row) sees key (column). For checks and for short packs: it takes T * T bytes."""
    at = torch.arange(len(tok_end), device=tok_end.device)
    return (at <= at[:, None]) & (at[:, None] < tok_end)


def rectangles(tok_end: NDArray[np.int32]) -> NDArray[np.int32]:
    """The mask as rectangles for kernels of variable length: (n, 5) int32 rows q_start, q_stop, k_start, k_stop, causal.

    Half-open; causal is 1 for a square whose queries see the keys up to their own, 0 for one that is seen whole. They cover each
    pair that the mask takes once. Sorted by query, then key; at most two for each segment.
    """
    starts = np.flatnonzero(np.diff(tok_end, prepend=-1))
    stops = np.append(starts[1:], len(tok_end))
    ends = tok_end[starts]
    causal = np.stack([starts, stops, starts, stops, np.ones_like(starts)], axis=1)
    seen = np.stack([stops, ends, starts, stops, np.zeros_like(starts)], axis=1)[ends > stops]
    both = np.concatenate([causal, seen])
    return both[np.lexsort((both[:, 2], both[:, 0]))].astype(np.int32)


def block_mask(host: NDArray[np.int32], tok_end: torch.Tensor, block_size: int) -> BlockMask:
    """The mask for FlexAttention, exactly as ``create_block_mask`` would find it: blocks that are seen whole are marked as such.

    ``host``: ``tok_end`` on the host. A block of keys is seen by a later block of queries if the greatest ``tok_end`` in it is
    behind the first query, and whole if the least is behind the last one.
    """
    begins = np.arange(0, len(host), block_size, dtype=np.int32)
    queries = begins[:, None]
    earlier = begins < queries
    seen = earlier & (np.maximum.reduceat(host, begins) > queries)
    whole = seen & (np.minimum.reduceat(host, begins) >= queries + block_size)
    part = seen & ~whole
    np.fill_diagonal(part, True)

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < tok_end[key])

    def lists(table: NDArray[np.bool_]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(tok_end.device) for side in (table, table.T) for array in _block_lists(side)]

    kv_num_blocks, kv_indices, q_num_blocks, q_indices = lists(part)
    full_kv_num_blocks, full_kv_indices, full_q_num_blocks, full_q_indices = lists(whole)
    return BlockMask(
        (len(host), len(host)),
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        q_num_blocks,
        q_indices,
        full_q_num_blocks,
        full_q_indices,
        (block_size, block_size),
        mask_mod,
    )


def _block_lists(table: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each row of a (rows, columns) table how many are True, and which: (1, 1, rows) and (1, 1, rows, columns) int32."""
    rows, columns = np.nonzero(table)
    counts = np.bincount(rows, minlength=len(table)).astype(np.int32)
    places = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    indices = np.zeros(table.shape, np.int32)
    indices[rows, places] = columns
    return counts[None, None], indices[None, None]
