"""Inputs of a Hugging Face transformers model, version 5.24, for one request.

transformers finds media by scanning ids, keeps ``rope_deltas`` on the model, and computes positions that miss a cached prefix. So
positions are always given, placeholders get the ids the model looks for, and an id that only looks like one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from engine_bridge.request import request_inputs
from sessiontree import Draft, Node, Unsupported
from sessiontree.positions import Mode

_TOKEN_TYPES: Final = {"image": 1, "video": 2}
# Families whose models mark placeholders by mm_token_type_ids and take (3, batch, tokens) positions.
_FAMILIES: Final = ("text", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl", "paddleocr_vl", "hy_v4_vl")


def to_transformers(
    nodes: Node | Draft | Sequence[Node | Draft], prefix_len: int = 0, device: torch.device | str = "cpu", mode: Mode = "as_decoded"
) -> dict[str, torch.Tensor]:
    """Keyword arguments of a model's forward for a path's tokens from ``prefix_len`` on; T = stop - prefix_len.

    ``nodes``: a node or draft, or a sequence of one.

    ``input_ids`` (1, T) int64, placeholders written as the model's own ids; ``position_ids`` (3, 1, T), or (1, T) for text
    schemes; ``attention_mask`` (1, stop), the cached prefix included; for schemes with media also ``mm_token_type_ids`` (1, T): 0
    text, 1 image, 2 video. Pixels and the cache are the caller's to add.

    Raises Unsupported where the window begins or the path ends inside an item, whose pixels transformers takes whole, where an id
    outside every span is a placeholder id, and where the scheme was not given the placeholder ids it needs. Otherwise as
    request_inputs.
    """
    node: Any = nodes
    if isinstance(nodes, (list, tuple)) and nodes and all(isinstance(each, (Node, Draft)) for each in nodes):
        if len(nodes) > 1:
            raise Unsupported(f"{len(nodes)} nodes at once; this version makes the inputs of one request at a time")
        node = nodes[0]
    if isinstance(node, (Node, Draft)) and node.scheme.family not in _FAMILIES:
        raise Unsupported(f"{node.scheme.name}: inputs are made for {', '.join(_FAMILIES)}", scheme=node.scheme.name)
    inputs = request_inputs(node, prefix_len, device, mode)
    prefix_len = inputs.prefix_len
    count = inputs.input_ids.shape[0]
    given: dict[str, torch.Tensor] = {
        "input_ids": inputs.input_ids[None],
        "position_ids": inputs.positions if inputs.positions.shape[0] == 1 else inputs.positions[:, None],
        "attention_mask": torch.ones((1, prefix_len + count), dtype=torch.int64, device=device),
    }
    if inputs.positions.shape[0] == 1:
        return given
    types = torch.zeros(count, dtype=torch.int64, device=device)
    params = node.scheme.params
    if node.position_state(mode).open_block is not None:
        item = inputs.media_spans[-1][0] if inputs.media_spans else None
        raise Unsupported(f"{node!r} ends inside an item; transformers takes an item whole", item=item, prefix_len=prefix_len)
    rows_seen = 0  # of the item the spans are in; another begins at row 0
    for (item, start, stop), row in zip(inputs.media_spans, inputs.first_rows, strict=True):
        if row and row != rows_seen:
            raise Unsupported(
                f"the window from {prefix_len} on begins inside {item}; transformers takes an item whole",
                item=item,
                prefix_len=prefix_len,
            )
        rows_seen = row + stop - start
        # Frames of a glm4v video are images to the model, marked as a video's.
        kind = "image" if node.scheme.family == "glm4v" else item.modality
        placeholder = params.get(f"{kind}_token_id")
        if placeholder is None:
            raise Unsupported(f"{node.scheme.name} was not given {kind}_token_id, which transformers scans for", item=item)
        inputs.input_ids[start - prefix_len : stop - prefix_len] = placeholder
        types[start - prefix_len : stop - prefix_len] = _TOKEN_TYPES[item.modality]
    _refuse_strays(params, inputs.input_ids, types, prefix_len)
    given["mm_token_type_ids"] = types[None]
    return given


def _refuse_strays(params: Any, input_ids: torch.Tensor, types: torch.Tensor, prefix_len: int) -> None:
    for modality in _TOKEN_TYPES:
        placeholder = params.get(f"{modality}_token_id")
        if placeholder is None:
            continue
        stray = ((input_ids == placeholder) & (types == 0)).nonzero()
        if len(stray):
            at = prefix_len + int(stray[0])
            raise Unsupported(
                f"token {at} is {modality}_token_id {placeholder} outside every span; transformers would look for its pixels",
                index=at,
            )
