"""The Qwen3 mixture-of-experts family (Yang et al. 2025): Qwen3 with experts in some or all
layers."""

from __future__ import annotations

from torch import nn

from minivllm.models.families.qwen3 import Qwen3ForCausalLM
from minivllm.models.moe import MoE, MoEForCausalLM


class Qwen3MoeForCausalLM(MoEForCausalLM, Qwen3ForCausalLM):
    """Qwen3-30B-A3B and 235B-A22B."""

    def make_mlp(self, layer: int) -> nn.Module:
        if layer in self.config.dense_layers:
            return super().make_mlp(layer)
        return MoE(self.config, self.config.norm_topk_prob)
