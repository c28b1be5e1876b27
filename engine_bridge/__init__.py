"""From session nodes to what engines run on. The only package here that knows PyTorch."""

from engine_bridge.adapters.sglang import to_sglang
from engine_bridge.adapters.transformers import to_transformers
from engine_bridge.adapters.vllm import to_vllm, to_vllm_prompt
from engine_bridge.batches import DecodeBatch, ExtendBatch
from engine_bridge.packed_rows import PackedRows, pack_rows
from engine_bridge.packing import Edges, PackedSpan, TreePack, TreePacks, pack_tree
from engine_bridge.page_hashes import PageHashes, page_hashes
from engine_bridge.request import RequestInputs, request_inputs
from engine_bridge.rows import BatchSpan
from engine_bridge.stager import InputStager

__all__ = [
    "BatchSpan",
    "DecodeBatch",
    "Edges",
    "ExtendBatch",
    "InputStager",
    "PackedRows",
    "PackedSpan",
    "PageHashes",
    "RequestInputs",
    "TreePack",
    "TreePacks",
    "pack_rows",
    "pack_tree",
    "page_hashes",
    "request_inputs",
    "to_sglang",
    "to_transformers",
    "to_vllm",
    "to_vllm_prompt",
]
