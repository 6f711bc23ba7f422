"""The layers that the families share. Tokens are ragged, [tokens, hidden]; nothing is padded.

Modules are built on the meta device and describe, as data, which tensors of the checkpoint they take
(`Linear.parts`, `HeadNorm.parts`); the loader fills them. At batch 1 on a CPU an operation costs about
10 us, so a layer does as few as it can: fused projections, and norm and rotation of queries and keys
in one go.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from minivllm.attention.base import AttentionBackend
    from minivllm.engine.step import StepBatch


def weight(*shape: int) -> nn.Parameter:
    """An unfilled weight; inference only, so it never takes a gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """Stands where a linear layer will be until the loader puts the quantisation's module in its place.

    Args:
        in_features: width of the input.
        parts: output rows of each checkpoint tensor, in order, by the name it has beside this module;
            more than one are fused into one matrix.
        bias: whether each part has a bias too.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.parts, self.has_bias = in_features, parts, bias

    def forward(self, x: Tensor) -> Tensor:
        """Replaced by the loader; a call means that it was not."""
        raise RuntimeError(f"linear layer {'+'.join(self.parts)} was never loaded")


class Embedding(nn.Module):
    """Token ids [tokens] to [tokens, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look the rows up."""
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension.

    The weight is applied after rounding to the compute dtype, as transformers does, so that 16-bit
    results are the same to the bit.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head at once, [tokens, heads + kv_heads, head_dim].

    `parts` gives, for each checkpoint tensor [head_dim], how many heads share it; the loader repeats it.
    """

    def __init__(self, head_dim: int, parts: dict[str, int], eps: float) -> None:
        super().__init__()
        self.parts, self.shape, self.eps = parts, (head_dim,), eps
        self.weight = weight(sum(parts.values()), head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to the same."""
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight


class Rotary(nn.Module):
    """Cosines and sines of every position, computed once in float32 and shared by all layers.

    The sines carry the sign of `rotate_half`, so that a rotation is two products and a roll.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        angles = torch.arange(max_positions).float()[:, None] * inverse_frequencies(rope, head_dim)
        cos, sin = angles.cos(), angles.sin()
        rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        table = rows.unsqueeze(2).to(dtype=dtype, device=device)  # [positions, 2, 1, head_dim]
        self.table = nn.Buffer(table, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [tokens] to cosines and signed sines, each [tokens, 1, head_dim]."""
        cos, sin = self.table.index_select(0, positions).unbind(1)
        return cos, sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2].

    "llama3" divides the frequencies of wavelengths beyond the original context by `factor` and blends
    between the two bounds (Llama 3 Herd of Models, Dubey et al. 2024, and its reference code).
    """
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope.kind == "default":
        return inverse
    factor, low, high, original = (
        rope.scaling[key]
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] by its position; cos and sin as Rotary gives them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query self-attention, with or without a norm of queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.heads, self.kv_heads, self.dim = layer, heads, kv_heads, dim
        self.qk_width, self.v_width = (heads + kv_heads) * dim, kv_heads * dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim},
            config.attention_bias,
        )
        self.o_proj = Linear(heads * dim, {"o_proj": config.hidden_size}, config.attention_bias)
        self.qk_norm = (
            HeadNorm(dim, {"q_norm": heads, "k_norm": kv_heads}, config.rms_norm_eps) if qk_norm else None
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same; keys and values go to the backend's cache."""
        tokens = x.shape[0]
        qk, v = self.qkv_proj(x).split((self.qk_width, self.v_width), -1)
        qk = qk.view(tokens, self.heads + self.kv_heads, self.dim)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        q, k = rotate(qk, cos, sin).split((self.heads, self.kv_heads), 1)
        out = attention.forward(self.layer, q, k, v.view(tokens, self.kv_heads, self.dim), batch)
        return self.o_proj(out.reshape(tokens, self.heads * self.dim))


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate).mul_(up))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer. Attribute names are those of the checkpoint."""

    def __init__(self, config: ModelConfig, layer: int, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, batch, attention)
        return x + self.mlp(self.post_attention_layernorm(x))
