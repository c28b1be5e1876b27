"""The inputs of one request: a window of a node's or draft's path as tensors.

Tensors are fresh copies: writing to them, on the CPU too, reaches no node. Positions are cast once, here, to what engines take.
Nothing in this module remembers anything between calls.
"""

from __future__ import annotations

import attrs
import torch

from engine_bridge.policies import committed
from sessiontree import Draft, Features, MediaItem, NeedsMedia, Node, OutOfRange
from sessiontree.media import each_content_once
from sessiontree.node import MediaSpan, clipped_spans
from sessiontree.positions import Mode
from sessiontree.tokens import window


@attrs.frozen(eq=False)
class RequestInputs:
    """What an engine needs to run path tokens ``[prefix_len, prefix_len + T)`` behind a KV cache of the tokens before.

    ``input_ids``: (T,) int64. ``positions``: (num_axes, T) int64, float32 where the scheme's engine takes floats.
    ``mrope_position_delta``: (1, 1) int64, float32 where it can be fractional; the token at index i that is decoded after them
    stands at i + delta, whatever the window. ``media_spans``: (item, start, stop) clipped to the window, in path coordinates.
    ``first_rows``: for each of them, which row of the whole item's encoder output its first token takes. ``needed_items``: the
    items that have a placeholder in the window, in path order, each content once. ``features``: what the store holds for each of
    them, safe from eviction for as long as this is held; None unless they were asked for. ``mode``: which positions these are.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    mrope_position_delta: torch.Tensor
    media_spans: tuple[MediaSpan, ...]
    first_rows: tuple[int, ...]
    needed_items: tuple[MediaItem, ...]
    mode: Mode
    prefix_len: int
    features: tuple[Features, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.positions.shape[1] != self.input_ids.shape[0]:  # never hand over a table narrower than its tokens
            raise OutOfRange(
                f"{self.positions.shape[1]} positions for {self.input_ids.shape[0]} tokens",
                value=self.positions.shape[1],
                limit=self.input_ids.shape[0],
            )


def request_inputs(
    node: Node | Draft,
    prefix_len: int = 0,
    device: torch.device | str = "cpu",
    mode: Mode = "as_decoded",
    features: bool = False,
) -> RequestInputs:
    """Request inputs for the tokens of a node's or draft's path from ``prefix_len`` on.

    ``prefix_len``: how many tokens the engine has in its KV cache already, 0..stop; it may lie in any ancestor, inside media
    too. ``mode``: "as_decoded" matches the KV that exists, "as_replayed" a prefill of the whole history. ``features``: bring
    along those of every needed item, or raise NeedsMedia, whose ``items`` are the ones to put first.

    Raises OutOfRange, PositionError for the mode, NeedsMedia.
    """
    if not isinstance(node, (Node, Draft)):
        raise TypeError(f"request inputs are made of a Node or a Draft, not {type(node).__name__}")
    prefix_len, stop = window(prefix_len, None, node.stop, "prefix_len")
    ids = node.input_ids(prefix_len)
    positions = node.positions(prefix_len, None, mode)
    last = committed(node)
    clipped = clipped_spans(last, min(prefix_len, last.stop), min(stop, last.stop))
    needed = each_content_once(item for item, *_ in clipped)
    held = held_features(last, needed) if features else None
    delta = node.scheme.mrope_position_delta(node.position_state(mode))
    dtype = torch.int64 if positions.dtype.kind == "i" else torch.float32
    return RequestInputs(
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=dtype, device=device),
        torch.tensor([[delta]], dtype=torch.float32 if isinstance(delta, float) else torch.int64, device=device),
        tuple((item, begin, end) for item, begin, end, _ in clipped),
        tuple(row for *_, row in clipped),
        needed,
        mode,
        prefix_len,
        held,
    )


def held_features(node: Node, items: tuple[MediaItem, ...]) -> tuple[Features, ...]:
    """What the store of ``node`` holds of each of ``items``, in their order. Raises NeedsMedia."""
    store = node.feature_store
    if store is not None:
        return store.need(items)
    if items:
        raise NeedsMedia(f"features of {', '.join(map(str, items))} are not held: {node!r} belongs to no open store", items=items)
    return ()
