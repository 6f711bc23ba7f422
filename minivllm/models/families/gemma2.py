"""Gemma 2 (Riviere et al. 2024): Gemma with norms on both sides, soft caps, and a window in every
other layer."""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.models.families.gemma import GemmaForCausalLM
from minivllm.models.layers import remaining_rows


class SandwichLayer(nn.Module):
    """Transformer layer with a norm before and after attention, and before and after the MLP."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, batch, attention)
        x = remaining_rows(attended, x, batch) + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2, 2B to 27B; windows, soft caps and the scale of the scores are in ModelConfig."""

    def make_layer(self, layer: int) -> nn.Module:
        norms: list[nn.Module] = [self.make_norm() for _ in range(4)]
        return SandwichLayer(self.make_attention(layer), self.make_mlp(layer), norms)
