"""The dense Qwen3 family (Yang et al. 2025): Llama with a norm of each query and key head."""

from __future__ import annotations

from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Attention, HeadNorm


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 0.6B to 32B."""

    def make_attention(self, layer: int) -> Attention:
        c = self.config
        norm = HeadNorm(
            c.head_dim, {"q_norm": c.num_heads, "k_norm": c.num_kv_heads}, c.rms_norm_eps
        )
        return Attention(c, layer, norm)
