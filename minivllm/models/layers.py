"""The layers that the families share. Tokens are ragged, [tokens, hidden]; nothing is padded.

Modules are built on the meta device and describe, as data, which tensors of the checkpoint they
take (`Linear.parts`); the loader fills them. At batch 1 on a CPU an operation costs about 10 us, so
a layer runs few operations: fused projections, and norm and rotation of queries and keys together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.models.config import ModelConfig
from minivllm.models.rope import rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def weight(*shape: int) -> nn.Parameter:
    """A weight without values; it takes no gradient, as there is only inference."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """The placeholder of a linear layer, which the loader replaces by the quantisation's module.

    Args:
        in_features: width of the input.
        parts: output rows of each checkpoint tensor, in order, by the last part of its name;
            several are fused into one matrix.
        bias: whether each part has a bias too.
        exact: never quantised.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], bias: bool = False, exact: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.has_bias, self.exact = in_features, parts, bias, exact

    def forward(self, x: Tensor) -> Tensor:
        """Raises RuntimeError: the loader has not replaced the layer."""
        raise RuntimeError(f"linear layer {'+'.join(self.parts)} was never loaded")


class Embedding(nn.Module):
    """Token ids [tokens] to [tokens, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size)
        # Of the weight and token ids.
        self.look_up: Callable[[Tensor, Tensor], Tensor] = torch.embedding

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look the rows up."""
        return self.look_up(self.weight, token_ids)


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension.

    The weight is applied after rounding to the compute dtype, as transformers does: 16-bit results
    are equal to the bit."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight


def rows_with_logits(x: Tensor, batch: StepBatch) -> Tensor:
    """The rows of x [tokens, ...] whose logits are computed. Where there is none, one row: some
    kernels take no empty tensor."""
    rows = batch.logit_rows
    if len(rows) == len(x):
        return x
    return x[rows] if len(rows) else x[:1]


def remaining_rows(attended: Tensor, x: Tensor, batch: StepBatch) -> Tensor:
    """The rows of x [tokens, hidden] that attention's output [rows, hidden] has: all rows, or in a
    trimmed layer those whose logits are computed."""
    return x if len(x) == len(attended) else rows_with_logits(x, batch)


class Attention(nn.Module):
    """Grouped-query self-attention.

    Args:
        config: sizes, and whether the projections have biases.
        layer: index of the layer.
        qk_norm: norm of queries and keys before the rotation, if the family has one.
    """

    def __init__(self, config: ModelConfig, layer: int, qk_norm: nn.Module | None = None) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.heads, self.kv_heads, self.dim = layer, heads, kv_heads, dim
        self.qk_width, self.v_width = (heads + kv_heads) * dim, kv_heads * dim
        rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv_proj = Linear(config.hidden_size, rows, config.attention_bias)
        self.o_proj = Linear(heads * dim, {"o_proj": config.hidden_size}, config.attention_bias)
        self.qk_norm = qk_norm
        self.rotary_dims = [rope.rotary_dim(dim) for rope in config.ropes]
        self.trims = False  # whether the output has only rows with logits

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same, or to fewer rows if the layer trims. Keys and values go to
        the backend's cache."""
        tokens = x.shape[0]
        qk, v = self.qkv_proj(x).split((self.qk_width, self.v_width), -1)
        qk = self.rotated(qk.view(tokens, self.heads + self.kv_heads, self.dim), cos, sin)
        q, k = qk.split((self.heads, self.kv_heads), 1)
        out = attention.forward(self.layer, q, k, v.view(tokens, self.kv_heads, self.dim), batch)
        out = out.reshape(tokens, self.heads * self.dim)
        return self.o_proj(rows_with_logits(out, batch) if self.trims else out)

    def rotated(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys [tokens, heads + kv_heads, dim] after their norm and rotation."""
        return rotate(qk if self.qk_norm is None else self.qk_norm(qk), cos, sin)


class MLP(nn.Module):
    """Gated feed-forward, SwiGLU or GeGLU (Shazeer 2020).

    Args:
        hidden: width of input and output.
        inner: width between the projections.
        activation: of the gate, a key of ACTIVATIONS.
        bias: whether the projections have biases.
    """

    def __init__(self, hidden: int, inner: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.activation, self.inner = ACTIVATIONS[activation], inner
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = Linear(inner, {"down_proj": hidden}, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        return self.down_proj(self.gated(self.gate_up_proj(x)))

    def gated(self, gate_up: Tensor) -> Tensor:
        """Activation and product: [tokens, 2 inner] to [tokens, inner]."""
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate).mul_(up)


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer. Attribute names are those of the checkpoint."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norms[0], self_attn
        self.post_attention_layernorm, self.mlp = norms[1], mlp

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, batch, attention)
        x = remaining_rows(attended, x, batch) + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head at once, [tokens, heads + kv_heads, head_dim].

    `parts` holds for each tensor [head_dim] of the checkpoint how many heads share it; the loader
    repeats the tensor.
    """

    def __init__(self, head_dim: int, parts: dict[str, int], eps: float) -> None:
        super().__init__()
        self.parts, self.shape, self.eps = parts, (head_dim,), eps
        self.weight = weight(sum(parts.values()), head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to the same."""
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight
