"""The same paths as flat rows, for trainers that take those: padded, or one behind the other. Their loss is the packed tree's.

Targets are shifted already: column s of ``shift_labels`` is what the logits at column s predict. A token that stands in several
rows counts in them together what it counts in the pack: each row's share under "per_branch_mean", else all in the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, get_args

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from engine_bridge.forest import Segment, model_dtype
from engine_bridge.loss_weights import Annotations, Leaves, Said, Weighting, planned
from engine_bridge.rows import BatchSpan
from sessiontree import MediaItem, Node, Unsupported
from sessiontree.annotations import LOSS_WEIGHT
from sessiontree.frozen import checked_text
from sessiontree.media import each_content_once
from sessiontree.node import clipped_spans
from sessiontree.positions import Mode
from sessiontree.tokens import MAX_TOKEN_ID, in_range

RowPadding = Literal["left", "right", "packed"]

#: What is no target, to transformers and to PyTorch's ``cross_entropy``.
IGNORED: Final = -100


@attrs.frozen(eq=False)
class PackedRows:
    """Paths as rows: B rows of S columns, the widest path's; or, packed, one row of all T tokens.

    ``rows``: the last node of each path. ``input_ids``: (B, S) int64. ``position_ids``: (num_axes, B, S), (B, S) for text schemes;
    packed (1 + num_axes, 1, T), first a text row that begins at 0 in each path, (1, T) for text schemes. ``attention_mask``: (B, S)
    int64, 1 for tokens, 0 for padding; None for packed rows, which are kept apart by the text row or by ``cu_seq_lens``:
    transformers goes by the text row only with ``use_cache=False``; else, without a word, paths see each other.
    ``shift_labels``: (B, S) int64, the next token where that is trained, else -100. ``weights``: of these targets, 0 elsewhere.
    ``cu_seq_lens``: (B + 1,) int32, where each path's tokens begin, counted without padding. ``max_length``: the longest path.
    ``media_spans``: placeholders, row by row; their columns are those of their row.
    """

    rows: tuple[Node, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    shift_labels: torch.Tensor
    weights: torch.Tensor
    cu_seq_lens: torch.Tensor
    max_length: int
    media_spans: tuple[BatchSpan, ...]
    _tokens: NDArray[np.int64]  # (B, S): which of the segments' tokens stands there, -1 for padding
    _segments: Sequence[Segment]
    _said: Said

    @property
    def needed_items(self) -> tuple[MediaItem, ...]:
        """The items whose features they take, each content once, in order."""
        return each_content_once(span.item for span in self.media_spans)

    def token_values(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What annotations say of each token: values (B, S, ...) and whether they are known (B, S) bool, zeros where not.

        Column s has those of its own token: ``[:, 1:]`` stand beside ``shift_labels[:, :-1]``. The rest as for
        :meth:`engine_bridge.TreePack.token_values`.
        """
        values, known = self._said.of_each_token(self._segments, name)
        there, device = self._tokens >= 0, self.input_ids.device
        placed, known_there = np.zeros((*there.shape, *values.shape[1:]), values.dtype), np.zeros(there.shape, np.bool_)
        placed[there], known_there[there] = values[self._tokens[there]], known[self._tokens[there]]
        return torch.from_numpy(placed).to(device), torch.from_numpy(known_there).to(device)


def pack_rows(
    leaves: Leaves,
    *,
    padding: RowPadding = "right",
    pad_token_id: int = 0,
    mode: Mode = "as_decoded",
    annotations: Annotations | None = None,
    weighting: Weighting = "once",
    factors: Iterable[str] = (LOSS_WEIGHT,),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PackedRows:
    """The paths of some nodes as rows; arguments and errors are those of :func:`engine_bridge.pack_tree`.

    ``padding``: where padding stands, or "packed". Columns are those that ``to_transformers(rows.rows, padding=...)`` gives, which
    also has what else its models take. Raises Unsupported for a text scheme's positions that do not count from 0, packed.
    """
    if checked_text(padding, "padding") not in get_args(RowPadding):
        raise Unsupported(f"no padding {padding!r}; {', '.join(get_args(RowPadding))}")
    pad_token_id = in_range(pad_token_id, MAX_TOKEN_ID, "pad_token_id", "rows")
    said, weights = planned(leaves, mode, annotations, weighting, factors, dtype)
    forest = weights.forest
    rows = forest.rows
    lengths = [row.stop for row in rows]
    longest, packed = max(lengths, default=0), padding == "packed"
    bounds = np.cumsum([0, *lengths])
    shape = (1, int(bounds[-1])) if packed else (len(rows), longest)
    axes = rows[0].scheme.num_axes if rows else 1
    ids = np.full(shape, pad_token_id, np.int64)
    positions = np.zeros((axes, *shape), model_dtype(rows[0].scheme) if rows else np.int64)
    counted, mask = np.zeros(shape, positions.dtype), np.zeros(shape, np.int64)
    labels, row_weights = np.full(shape, IGNORED, np.int64), np.zeros(shape)
    places, numbers = np.full(shape, -1, np.int64), np.arange(forest.num_tokens)
    spans: list[BatchSpan] = []
    tokens, table = forest.input_ids(), forest.positions(mode) if rows else positions
    for number, (row, length, ranges) in enumerate(zip(rows, lengths, forest.path_ranges(), strict=True)):
        start = int(bounds[number]) if packed else longest - length if padding == "left" else 0
        line, columns = (0 if packed else number), slice(start, start + length)

        def along(values: NDArray[Any], ranges: list[slice] = ranges) -> NDArray[Any]:
            return np.concatenate([values[..., each] for each in ranges], axis=-1) if ranges else values[..., :0]

        ids[line, columns], positions[:, line, columns] = along(tokens), along(table)
        mask[line, columns], counted[line, columns] = 1, np.arange(length)
        places[line, columns] = along(numbers)
        if length > 1:
            target = along(weights.trained)[1:]
            shifted = slice(start, start + length - 1)
            labels[line, shifted] = np.where(target, ids[line, start + 1 : start + length], IGNORED)
            row_weights[line, shifted] = np.where(target, np.concatenate([weights.in_row(number, each) for each in ranges])[1:], 0)
        spans += [BatchSpan(number, item, at + start, end + start, first) for item, at, end, first in clipped_spans(row, 0, length)]
    position_ids: NDArray[Any] = positions[0] if axes == 1 else positions
    if packed and axes == 1:
        if (position_ids != counted).any():
            raise Unsupported("positions that do not count from 0 tell packed rows of a text scheme apart no more")
    elif packed:
        position_ids = np.concatenate([counted[None], positions])

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return PackedRows(
        rows,
        tensor(ids),
        tensor(position_ids),
        None if packed else tensor(mask),
        tensor(labels),
        tensor(row_weights).to(dtype),
        tensor(bounds.astype(np.int32)),
        longest,
        tuple(spans),
        places,
        forest.segments,
        said,
    )
