"""Gemma (Mesnard et al. 2024): Llama with GeGLU, scaled embeddings, and norms that scale by 1 +
weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.models.config import ModelConfig
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Embedding, HeadNorm, RMSNorm


class GemmaNorm(RMSNorm):
    """RMSNorm that scales by 1 + weight. The sum is never rounded to the weight's 16 bits, which
    would lose most of a small weight."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        normed = F.rms_norm(x, self.shape, None, self.eps)
        return torch.addcmul(normed, normed, self.weight)


class GemmaHeadNorm(HeadNorm):
    """GemmaNorm of all query and key heads at once."""

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to the same."""
        normed = F.rms_norm(x, self.shape, None, self.eps)
        return torch.addcmul(normed, normed, self.weight)


class ScaledEmbedding(Embedding):
    """Embedding times the square root of its width. The root is rounded to the compute dtype, as in
    training."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale = float(torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu"))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look the rows up and scale them."""
        return super().forward(token_ids) * self.scale


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma 2B and 7B."""

    def make_embedding(self) -> Embedding:
        return ScaledEmbedding(self.config, self.dtype)

    def make_norm(self) -> RMSNorm:
        return GemmaNorm(self.config.hidden_size, self.config.rms_norm_eps)
