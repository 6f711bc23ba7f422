"""The Mixtral family (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from minivllm.models.layers import beside
from minivllm.models.moe import MoE, MoEForCausalLM

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionBackend
    from minivllm.engine.step import StepBatch


class MixtralLayer(nn.Module):
    """DecoderLayer, with the checkpoint's own name for the mixture."""

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: nn.Module,
        post_attention_layernorm: nn.Module,
        block_sparse_moe: MoE,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.block_sparse_moe = block_sparse_moe

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, batch, attention)
        x = beside(attended, x, batch) + attended
        mixed: Tensor = x + self.block_sparse_moe(self.post_attention_layernorm(x))
        return mixed


class MixtralForCausalLM(MoEForCausalLM):
    """Mixtral 8x7B and 8x22B."""

    def make_layer(self, layer: int) -> nn.Module:
        """See LlamaForCausalLM."""
        moe = MoE(self.config, normalize=True, names=("w1", "w3", "w2"))
        return MixtralLayer(self.make_norm(), self.make_attention(layer), self.make_norm(), moe)
