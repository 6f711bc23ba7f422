"""The Llama family (Touvron et al. 2023), and the plan that the families beside it vary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionSpec
from minivllm.models.config import ModelConfig
from minivllm.models.layers import DecoderLayer, Embedding, Linear, RMSNorm, Rotary

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionBackend
    from minivllm.engine.step import StepBatch


class Decoder(nn.Module):
    """Embedding, layers and final norm: what the checkpoint calls `model`."""

    rotary: Rotary  # set by the loader, which knows the device and the longest sequence

    def __init__(self, config: ModelConfig, qk_norm: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, qk_norm) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Token ids [tokens] to hidden states [tokens, hidden] after the final norm."""
        x = self.embed_tokens(batch.token_ids)
        cos, sin = self.rotary(batch.positions)
        for layer in self.layers:
            x = layer(x, cos, sin, batch, attention)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama 1 to 3.2 text models, and others saved in their format.

    A family that differs by a constant overrides it; module names follow the checkpoint's.
    """

    qk_norm = False  # RMSNorm of each query and key head before the rotation

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Decoder(config, self.qk_norm)
        self.lm_head: nn.Module = Linear(config.hidden_size, {"lm_head": config.vocab_size})

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One for each layer."""
        c = self.config
        spec = AttentionSpec(c.num_heads, c.num_kv_heads, c.head_dim, c.head_dim**-0.5)
        return [spec] * c.num_layers

    @torch.inference_mode()
    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """One step.

        Returns:
            [tokens, hidden] after the final norm, in the compute dtype.
        """
        hidden: Tensor = self.model(batch, attention)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] to logits [rows, vocab], in the compute dtype."""
        logits: Tensor = self.lm_head(hidden)
        return logits
