"""The Llama family (Touvron et al. 2023), which the other families vary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.cache.spec import AttentionSpec
from minivllm.models.config import SLIDING, ModelConfig
from minivllm.models.layers import MLP, Attention, DecoderLayer, Embedding, Linear, RMSNorm
from minivllm.models.rope import Rotary


class Decoder(nn.Module):
    """Embedding, layers and final norm: what the checkpoint calls `model`."""

    def __init__(
        self, embed_tokens: Embedding, layers: list[nn.Module], norm: nn.Module, config: ModelConfig
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embed_tokens, nn.ModuleList(layers), norm
        local = config.local_rope is not None
        self.rope_of_layer = [int(local and kind == SLIDING) for kind in config.layer_types]
        # The loader adds them, as it knows device and longest sequence.
        self.rotaries = nn.ModuleList()

    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Token ids [tokens] to hidden states after the final norm, [tokens, hidden], or fewer rows
        if the model trims."""
        x = self.embed_tokens(batch.token_ids)
        if batch.inputs is not None:
            x = batch.inputs.put(x)
        rotations = [rotary(batch) for rotary in self.rotaries]
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, *rotations[rope], batch, attention)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama 1 to 3.2 text models, and other models in their format.

    A family is a subclass that overrides some of the `make_` methods; ModelConfig holds the
    differences that are numbers. Module names are those of the checkpoint."""

    make_decoder = Decoder

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.trims = False  # whether the last layer trims its rows, see passes/order.py
        layers = [self.make_layer(i) for i in range(config.num_layers)]
        self.model = self.make_decoder(self.make_embedding(), layers, self.make_norm(), config)
        self.lm_head: nn.Module = Linear(config.hidden_size, {"lm_head": config.vocab_size})

    def make_embedding(self) -> Embedding:
        """The embedding of token ids."""
        return Embedding(self.config.vocab_size, self.config.hidden_size)

    def make_norm(self) -> nn.Module:
        """A norm of hidden states."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def make_attention(self, layer: int) -> Attention:
        """Attention of one layer."""
        return Attention(self.config, layer)

    def make_mlp(self, layer: int) -> nn.Module:
        """Feed-forward of one layer: [tokens, hidden] to the same."""
        c = self.config
        return MLP(c.hidden_size, c.intermediate_size, c.activation, c.mlp_bias)

    def make_layer(self, layer: int) -> nn.Module:
        """One layer of norms, attention and MLP."""
        norms = [self.make_norm() for _ in range(2)]
        return DecoderLayer(self.make_attention(layer), self.make_mlp(layer), norms)

    def make_rotary(self, max_positions: int, device: torch.device) -> None:
        """Set up the rotary embeddings, once the weights are loaded."""
        for rope in self.config.ropes:
            rotary = Rotary(rope, self.config.head_dim, max_positions, self.dtype, device)
            self.model.rotaries.append(rotary)

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """The attention of each layer."""
        c = self.config
        shape = c.num_heads, c.num_kv_heads, c.head_dim, c.attention_scale
        return [AttentionSpec(*shape, window, c.attention_soft_cap) for window in c.windows]

    @property
    def experts_run(self) -> int | Tensor:
        """Experts that the last step computed, over all layers; 0 in a dense model. A tensor (int64
        []) where reading the number would wait for the device."""
        return 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts as stored."""
        return 0

    @torch.inference_mode()
    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """One step.

        Returns:
            [tokens, hidden] after the final norm, in the compute dtype; of a trimmed model the rows
            alone whose logits are wanted, or one where none are.
        """
        hidden: Tensor = self.model(batch, attention)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] to logits [rows, vocab], in the compute dtype."""
        logits: Tensor = self.lm_head(hidden)
        cap = self.config.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
