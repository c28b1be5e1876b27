"""From session nodes to what engines run on. The only package here that knows PyTorch."""

from engine_bridge.adapters.sglang import to_sglang
from engine_bridge.adapters.transformers import to_transformers
from engine_bridge.request import RequestInputs, request_inputs

__all__ = ["RequestInputs", "request_inputs", "to_sglang", "to_transformers"]
