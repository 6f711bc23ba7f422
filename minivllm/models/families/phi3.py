"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose checkpoint holds fused matrices."""

from __future__ import annotations

from torch import nn

from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import MLP, Attention, Linear


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 mini to medium, Phi-3.5 mini, Phi-4 and Phi-4 mini."""

    def make_attention(self, layer: int) -> Attention:
        attention = super().make_attention(layer)
        attention.qkv_proj = _as_one("qkv_proj", attention.qkv_proj)
        return attention

    def make_mlp(self, layer: int) -> nn.Module:
        mlp = super().make_mlp(layer)
        assert isinstance(mlp, MLP)
        mlp.gate_up_proj = _as_one("gate_up_proj", mlp.gate_up_proj)
        return mlp


def _as_one(name: str, linear: Linear) -> Linear:
    """The same layer, as one tensor of the checkpoint."""
    return Linear(linear.in_features, {name: sum(linear.parts.values())})
