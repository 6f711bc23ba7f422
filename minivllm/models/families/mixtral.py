"""The Mixtral family (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from torch import nn

from minivllm.models.moe import MoE, MoEForCausalLM


class MixtralForCausalLM(MoEForCausalLM):
    """Mixtral 8x7B and 8x22B."""

    def make_mlp(self, layer: int) -> nn.Module:
        return MoE(self.config, normalize=True)
