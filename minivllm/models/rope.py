"""Rotary position embedding (RoFormer, Su et al. 2021) and its scalings to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minivllm.attention.base import StepBatch
from minivllm.models.rope_config import RopeConfig

# Positions of a table computed at a time: its float32 intermediates take six times its memory.
_POSITIONS_AT_ONCE = 1 << 16


class Rotary(nn.Module):
    """Cosines and sines of every position, shared by all layers with the same rope.

    They are computed in float32 and kept as a table in the compute dtype. The sines include the
    sign of `rotate_half`, so that a rotation is two products and a roll.

    Two scalings need the length of the whole sequence beside the position, and have no table:
    "dynamic" and "longrope". A token's length is that of its prompt (transformers: that of one
    prefill), and for "dynamic" at least its own position + 1 (transformers: that of each further
    step). A longrope sequence that grows out of the original context is computed again, with the
    long factors (as in transformers' Phi-3; vLLM uses the long factors for all sequences if the
    longest may need them). So tokens equal those of transformers' generate, and chunks, batches and
    preemption do not change them."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.rope, self.dim, self.dtype = rope, rope.rotary_dim(head_dim), dtype
        self.factor, self.depends_on_length = attention_factor(rope), rope.depends_on_length
        if not self.depends_on_length:
            table = torch.empty(max_positions, 2, 1, self.dim, dtype=dtype, device=device)
            inverse = inverse_frequencies(rope, self.dim)
            for positions in torch.arange(max_positions).split(_POSITIONS_AT_ONCE):
                table[positions[0] : positions[-1] + 1] = self._rows(positions, inverse)
            self.table = nn.Buffer(table, persistent=False)

    def forward(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the step's tokens, each [tokens, 1, rotated dimensions]."""
        if not self.depends_on_length:
            rows = self.table.index_select(0, batch.positions)
        else:
            counts = torch.tensor(batch.query_lens_host), torch.tensor(batch.rotated_lens_host)
            lengths = counts[1].repeat_interleave(counts[0]).to(batch.positions.device)
            if self.rope.kind == "dynamic":
                lengths = torch.maximum(lengths, batch.positions + 1)
            rows = self._rows(batch.positions, inverse_frequencies(self.rope, self.dim, lengths))
        cos, sin = rows.unbind(1)
        return cos, sin

    def _rows(self, positions: Tensor, inverse: Tensor) -> Tensor:
        """Positions [n] and frequencies [dim / 2] or [n, dim / 2] to a table [n, 2, 1, dim]."""
        angles = positions.float()[:, None] * inverse
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return rows.unsqueeze(2).to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [tokens, heads, head_dim], as many as cos and sin (of
    Rotary) have."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), -1)
    return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)


def inverse_frequencies(rope: RopeConfig, dim: int, lengths: Tensor | None = None) -> Tensor:
    """Angle per position of each pair of the `dim` rotated dimensions.

    Args:
        rope: linear (position interpolation, Chen et al. 2023), dynamic (NTK-aware, bloc97 and
            emozilla 2023), yarn (Peng et al. 2023), llama3 (Dubey et al. 2024), longrope (Ding et
            al. 2024) or default.
        dim: rotated dimensions of a head.
        lengths: int [n], the length that each token's rotation depends on; only for kinds that do
            depend on it.

    Returns:
        float32 [dim / 2], or [n, dim / 2] with lengths.
    """
    exponents = (
        torch.arange(0, dim, 2, device=lengths.device if lengths is not None else None).float()
        / dim
    )
    inverse = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if rope.kind == "default":
        return inverse
    factor = scaling["factor"]
    if rope.kind == "linear":
        return inverse / factor
    original = scaling["original_max_position_embeddings"]
    if rope.kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((original * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * inverse / factor + smooth * inverse
    if rope.kind == "yarn":
        ramp = _yarn_ramp(rope, dim)
        return inverse / factor * ramp + inverse * (1 - ramp)
    assert lengths is not None
    if rope.kind == "dynamic":
        stretch = factor * lengths.clamp(min=original).float() / original - (factor - 1)
        bases = rope.theta * stretch ** (dim / (dim - 2))
        return 1.0 / bases[:, None] ** exponents
    short, long = (
        inverse / torch.tensor(scaling[f"{kind}_factor"]).to(inverse) for kind in ("short", "long")
    )
    return torch.where(lengths[:, None] > original, long, short)


def _yarn_ramp(rope: RopeConfig, dim: int) -> Tensor:
    """How far each pair is interpolated: 0 for fast pairs, 1 for pairs that make no full turn in
    the original context."""
    original = rope.scaling["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        """The pair (not a whole number) that turns so often over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = (
        pair(rope.scaling.get("beta_fast") or 32.0),
        pair(rope.scaling.get("beta_slow") or 1.0),
    )
    if rope.scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """The factor of cosines and sines that keeps the spread of scores in a longer context."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    given, factor = rope.scaling.get("attention_factor"), rope.scaling["factor"]
    if given is not None:
        return float(given)
    if factor <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(
            1 + math.log(factor) / math.log(rope.scaling["original_max_position_embeddings"])
        )
    mscale, all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0
