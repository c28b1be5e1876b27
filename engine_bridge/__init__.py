"""From session nodes to what engines run on. The only package here that knows PyTorch."""

from engine_bridge.adapters.transformers import to_transformers
from engine_bridge.adapters.vllm import to_vllm, to_vllm_prompt
from engine_bridge.request import RequestInputs, request_inputs

__all__ = ["RequestInputs", "request_inputs", "to_transformers", "to_vllm", "to_vllm_prompt"]
