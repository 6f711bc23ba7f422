"""The dense Qwen3 family (Yang et al. 2025): Llama with a norm of each query and key head."""

from __future__ import annotations

from minivllm.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 0.6B to 32B."""

    qk_norm = True
