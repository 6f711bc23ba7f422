"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values alone."""

from __future__ import annotations

from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Attention


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5, 0.5B to 72B."""

    def make_attention(self, layer: int) -> Attention:
        attention = super().make_attention(layer)
        attention.qkv_proj.has_bias = True
        return attention
