"""Rotary positions in time, height and width (M-RoPE, Wang et al. 2024), for models that see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.attention.base import StepBatch
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.rope import Rotary
from minivllm.models.rope_config import RopeConfig


class MRotary(Rotary):
    """Rotary whose pairs of dimensions turn by a token's position in time, in height or in width.

    The three are the same in text, so a step without images is Rotary's.

    Args:
        rope: has sections.
        head_dim: width of a head.
        max_positions: of the longest sequence.
        dtype: of cosines and sines.
        device: where they are.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(rope, head_dim, max_positions, dtype, device)
        axes = torch.tensor(pair_axes(rope), device=device).repeat(2)
        # Of each dimension, bool [dim].
        self.by_height = nn.Buffer(axes == 1, persistent=False)
        self.by_width = nn.Buffer(axes == 2, persistent=False)

    def forward(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """A step with images has positions int64 [3, tokens]."""
        positions = None if batch.inputs is None else batch.inputs.positions
        if positions is None:
            return super().forward(batch)
        time, height, width = (self.table.index_select(0, axis) for axis in positions)
        rows = torch.where(self.by_height, height, torch.where(self.by_width, width, time))
        cos, sin = rows.unbind(1)
        return cos, sin


def pair_axes(rope: RopeConfig) -> list[int]:
    """What turns each pair of rotated dimensions: 0 time, 1 height, 2 width."""
    if not rope.interleaved:
        return [axis for axis, count in enumerate(rope.sections) for _ in range(count)]
    axes = [0] * sum(rope.sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * rope.sections[axis], len(axes)), 3):
            axes[pair] = axis
    return axes


def make_mrotary(model: LlamaForCausalLM, max_positions: int, device: torch.device) -> None:
    """Set up the rotary embeddings of a model with M-RoPE, as LlamaForCausalLM.make_rotary does."""
    config = model.config
    rotary = MRotary(config.rope, config.head_dim, max_positions, model.dtype, device)
    model.model.rotaries.append(rotary)
