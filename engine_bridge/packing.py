"""Trees of turns packed for training: every token of some paths once, with its own positions, and the loss as edges between tokens.

Packed depth first, a token's subtree is contiguous, so one number a token says what attends to it (:mod:`engine_bridge.tree_mask`).
A token with several next tokens has several targets, so the loss is no shifted row: it is a list of edges from a token to one that
follows it, with a weight (:mod:`engine_bridge.loss_weights`). Loss and gradients are those of the paths one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from engine_bridge import tree_mask
from engine_bridge.forest import Forest
from engine_bridge.loss_weights import Annotations, Leaves, LossWeights, Said, Weighting, planned
from sessiontree import LimitExceeded, MediaItem, Node, OutOfRange
from sessiontree.annotations import LOSS_WEIGHT
from sessiontree.media import each_content_once
from sessiontree.node import own_spans
from sessiontree.positions import Mode
from sessiontree.tokens import as_index, in_range


class Edges(NamedTuple):
    """What is trained: the logits of token ``source`` predict token ``target``, which counts ``weight``.

    ``source``, ``target``: (E,) int64, indices into a pack, sorted by target. ``weight``: (E,), of the dtype that was asked for.
    """

    source: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor


class PackedSpan(NamedTuple):
    """Tokens ``[start, stop)`` of a pack show ``item``. ``first_row``: which row of its whole encoder output the first takes."""

    item: MediaItem
    start: int
    stop: int
    first_row: int


@attrs.frozen(eq=False)
class TreePack:
    """Paths packed into T tokens, depth first. Tensors are on the device that was asked for; masks read ``tok_end``.

    ``input_ids``: (T,) int64. ``position_ids``: (num_axes, T) int64, float32 where engines take floats. ``tok_end``: (T,) int32,
    where each token's subtree ends: token q sees token k if ``k <= q < tok_end[k]``. ``parent``: (T,) int32, the token before it on
    its path, -1 without one. ``node_id``: (T,) int32, an index into ``nodes``, the nodes whose tokens these are. ``edges``: the
    loss. ``media_spans``: the placeholders, in order. ``rows``: the last node of each path that ends here; all of it is here.
    ``num_context``: how many tokens at the beginning only repeat the path above, and are no target here.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    tok_end: torch.Tensor
    parent: torch.Tensor
    node_id: torch.Tensor
    nodes: tuple[Node, ...]
    edges: Edges
    media_spans: tuple[PackedSpan, ...]
    rows: tuple[Node, ...]
    num_context: int
    block_size: int
    _host_tok_end: NDArray[np.int32]
    _part: _Part
    _said: Said
    _made: dict[str, Any] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._host_tok_end)

    @property
    def needed_items(self) -> tuple[MediaItem, ...]:
        """The items whose features it takes, each content once, in order."""
        return each_content_once(span.item for span in self.media_spans)

    def block_mask(self) -> BlockMask:
        """The mask for FlexAttention, on the pack's device; the same object each time."""
        if "mask" not in self._made:
            self._made["mask"] = tree_mask.block_mask(self._host_tok_end, self.tok_end, self.block_size)
        mask: BlockMask = self._made["mask"]
        return mask

    def dense_mask(self) -> torch.Tensor:
        """(T, T) bool, True where the query (row) sees the key."""
        return tree_mask.dense_mask(self.tok_end)

    def rectangles(self) -> NDArray[np.int32]:
        """The mask for kernels of variable length: (n, 5) int32. See :func:`engine_bridge.tree_mask.rectangles`."""
        return tree_mask.rectangles(self._host_tok_end)

    def row_indices(self, row: int) -> torch.Tensor:
        """Where the tokens of ``rows[row]``'s path are, in path order: (its tokens,) int64. Raises OutOfRange."""
        number = in_range(row, len(self.rows) - 1, "row", self)
        ranges = [np.arange(start, stop) for start, stop in self._part.ranges(self._part.row_ends[number])]
        return torch.from_numpy(np.concatenate(ranges)).to(self.input_ids.device)

    def token_values(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What annotations say of each token: values (T, ...) and whether they are known (T,) bool, zeros where not.

        A scalar of a node is every token's of it. ``[edges.target]`` takes those of targets: their log-probabilities, advantages,
        or another loss's weights. Raises Unsupported for text and lists, and for rows of two shapes.
        """
        part, device = self._part, self.input_ids.device
        values, known = self._said.of_each_token([part.forest.segments[number] for number in part.numbers], name)
        return torch.from_numpy(values).to(device), torch.from_numpy(known).to(device)

    def __repr__(self) -> str:
        return f"<TreePack of {len(self.rows)} paths, {len(self)} tokens, {len(self.edges.target)} edges>"


class TreePacks(Sequence[TreePack]):
    """The packs of some paths, each edge in one of them.

    ``rows``: the last node of each path that is trained on. ``row_tokens``: tokens of all of them, one by one. ``packed_tokens``:
    of all packs. ``dedupe_ratio``: how many times fewer those are, 1.0 where there are none.
    """

    def __init__(self, packs: Sequence[TreePack], rows: tuple[Node, ...]) -> None:
        self._packs = tuple(packs)
        self.rows = rows
        self.row_tokens: int = sum(row.stop for row in rows)
        self.packed_tokens: int = sum(map(len, packs))
        self.dedupe_ratio: float = self.row_tokens / self.packed_tokens if self.packed_tokens else 1.0

    @overload
    def __getitem__(self, index: int) -> TreePack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TreePack]: ...
    def __getitem__(self, index: int | slice) -> TreePack | Sequence[TreePack]:
        return self._packs[index]

    def __len__(self) -> int:
        return len(self._packs)

    def __repr__(self) -> str:
        return f"<TreePacks: {len(self)} of {self.packed_tokens} tokens, for {len(self.rows)} paths of {self.row_tokens}>"


def pack_tree(
    leaves: Leaves,
    *,
    token_budget: int | None = None,
    block_size: int = 128,
    mode: Mode = "as_decoded",
    annotations: Annotations | None = None,
    weighting: Weighting = "once",
    factors: Iterable[str] = (LOSS_WEIGHT,),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TreePacks:
    """Pack the paths of some nodes, each token once.

    ``leaves``: a Session or SessionTree, whose leaves they are; a Node, for all that is below it; or Nodes or Rollouts, each a
    path, of any number of sessions. ``token_budget``: the most tokens of a pack; what does not fit goes on in another, which
    repeats the path above. Cuts are where nodes end. ``block_size``: of the block masks. ``annotations``: where they are read, a
    Session or SessionTree, or a function that gives one for a node; needed for Nodes alone. ``weighting``, ``factors``: what a
    trained token counts, see :mod:`engine_bridge.loss_weights`; factors such as ("loss_weight", "advantage"). ``dtype``: of
    weights.

    The first token of a path follows no other: nothing predicts it, and it is not trained.

    Raises LimitExceeded where a path up to the end of one of its nodes takes more than ``token_budget``; MediaSpanError where one
    ends inside an item; Unsupported for two models' paths, an unknown weighting, and annotations that say nothing, or nothing that
    can be used, of a trained token; OutOfRange for no path and numbers that are none; PositionError for the mode; TypeError.
    """
    if as_index(block_size, "block_size") < 1:
        raise OutOfRange(f"block_size {block_size}, below 1", value=block_size, limit=1)
    said, weights = planned(leaves, mode, annotations, weighting, factors, dtype)
    forest = weights.forest
    parts = [_Part(forest, *owned) for owned in _split(forest, weights.trained, token_budget)]
    ids = forest.input_ids()
    positions = forest.positions(mode) if forest.segments else ids[None]
    return TreePacks([_pack(part, ids, positions, weights, said, block_size, dtype, device) for part in parts], forest.rows)


class _Part:
    """Segments ``[first, stop)`` of a forest, and those above the first: what one pack holds.

    ``above``: numbers of the segments above. ``numbers``: of all, in order. ``bounds``: (start, stop) of each in the pack.
    ``row_ends``: the segments that rows end with which end here. ``rows``: their last nodes.
    """

    def __init__(self, forest: Forest, first: int, stop: int) -> None:
        self.forest = forest
        self.above = forest.chain(forest.segments[first].before)
        self.numbers = [*self.above, *range(first, stop)]
        self.num_context = forest.segments[first].start
        self.start, self.stop = int(forest.starts[first]), int(forest.stops[stop - 1])
        lengths = (forest.stops - forest.starts)[self.numbers]
        stops = lengths.cumsum()
        self.bounds = list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))
        self.lengths = lengths
        self.places = dict(zip(self.numbers, self.bounds, strict=True))
        rows = [(end, row) for end, row in zip(forest.row_ends, forest.rows, strict=True) if first <= end < stop]
        self.row_ends = [end for end, _ in rows]
        self.rows = tuple(row for _, row in rows)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Where in the pack the path that ends with a segment is."""
        return [self.places[each] for each in self.forest.chain(number)]

    def of(self, values: NDArray[Any]) -> NDArray[Any]:
        """What a value for each token of the forest is in the pack; the last axis is the tokens'."""
        starts, stops = self.forest.starts, self.forest.stops
        above = [values[..., starts[number] : stops[number]] for number in self.above]
        owned = values[..., self.start : self.stop]
        return np.concatenate([*above, owned], axis=-1) if above else np.ascontiguousarray(owned)

    def tok_end(self) -> NDArray[np.int32]:
        shift = self.start - self.num_context
        ends = np.minimum(self.forest.subtree_ends[self.numbers], self.stop) - shift
        return np.repeat(ends.astype(np.int32), self.lengths)

    def parent(self) -> NDArray[np.int32]:
        parent = np.arange(-1, len(self) - 1, dtype=np.int32)
        for (start, _), number in zip(self.bounds, self.numbers, strict=True):
            before = self.forest.segments[number].before
            parent[start] = self.places[before][1] - 1 if before >= 0 else -1
        return parent

    def __len__(self) -> int:
        return self.num_context + self.stop - self.start


def _split(forest: Forest, trained: NDArray[np.bool_], budget: int | None) -> list[tuple[int, int]]:
    """Ranges of segments that fit a pack each with what is above them; none that neither trains anything nor ends a row."""
    segments = forest.segments
    if budget is None:
        return [(0, len(segments))] if segments else []
    if as_index(budget, "token_budget") < 1:
        raise OutOfRange(f"token_budget {budget}, below 1", value=budget, limit=1)
    needed = np.logical_or.reduceat(trained, forest.starts).tolist() if segments else []
    for end in forest.row_ends:
        if end >= 0:
            needed[end] = True
    ranges: list[tuple[int, int]] = []
    first, tokens = 0, 0
    for number, (node, start, stop, _) in enumerate(segments):
        if stop > budget:
            raise LimitExceeded(
                f"the path of {node!r} has {stop} tokens; a pack takes {budget}, and is cut only where nodes end",
                value=stop,
                limit=budget,
                node=node,
            )
        if number > first and tokens + stop - start > budget:
            ranges.append((first, number))
            first = number
        if number == first:
            tokens = start
        tokens += stop - start
    ranges.append((first, len(segments)))
    kept = []
    for first, last in ranges:
        stop = last
        while stop > first and not needed[stop - 1]:
            stop -= 1
        if stop > first:
            kept.append((first, stop))
    return kept


def _pack(
    part: _Part,
    ids: NDArray[np.int64],
    positions: NDArray[Any],
    weights: LossWeights,
    said: Said,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> TreePack:
    segments = part.forest.segments
    parent, tok_end = part.parent(), part.tok_end()
    owned = slice(part.start, part.stop)
    chosen = np.flatnonzero(weights.trained[owned])
    target = chosen + part.num_context
    numbering: dict[bytes, int] = {}
    nodes: list[Node] = []
    node_ids = []
    spans: list[PackedSpan] = []
    for (at, _), number in zip(part.bounds, part.numbers, strict=True):
        node, start, stop, _ = segments[number]
        if node.id not in numbering:
            numbering[node.id] = len(nodes)
            nodes.append(node)
        node_ids.append(numbering[node.id])
        if node.media:
            shift = at - start
            for item, begin, end, row in own_spans(node.media, node.start, start, stop):
                spans.append(PackedSpan(item, begin + shift, end + shift, row))

    def tensor(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return TreePack(
        tensor(part.of(ids)),
        tensor(part.of(positions)),
        tensor(tok_end),
        tensor(parent),
        tensor(np.repeat(np.array(node_ids, np.int32), part.lengths)),
        tuple(nodes),
        Edges(tensor(parent[target].astype(np.int64)), tensor(target), tensor(weights.packed[owned][chosen]).to(dtype)),
        tuple(spans),
        part.rows,
        part.num_context,
        block_size,
        tok_end,
        part,
        said,
    )
