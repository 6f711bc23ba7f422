"""The vision tower of Qwen3-VL (Bai et al. 2025): learned positions, and features of several depths
that the first layers of the text model add (DeepStack, Meng et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.config import ModelConfig
from minivllm.models.vision.qwen_tower import (
    EPS,
    Grids,
    PatchEmbedding,
    QwenTower,
    TowerBlock,
    TowerSizes,
    in_runs,
    patch_positions,
    rotations,
)

_DEFAULTS = TowerSizes(
    depth=27, hidden=1152, inner=4304, heads=16, out=3584, patch=16, merge=2, frames=2
)


class _MLP(nn.Module):
    """Feed-forward with a GELU."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.hidden, sizes.inner)
        self.linear_fc2 = nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to the same."""
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class _Merger(nn.Module):
    """The patches of a block to one embedding: [patches, hidden] to [blocks, out].

    Args:
        sizes: of the tower.
        deep: whether whole blocks are normalised, as those of a layer in between.
    """

    def __init__(self, sizes: TowerSizes, deep: bool) -> None:
        super().__init__()
        self.width = sizes.hidden * sizes.merge**2
        self.deep, self.norm = deep, nn.LayerNorm(self.width if deep else sizes.hidden, EPS)
        self.linear_fc1 = nn.Linear(self.width, self.width)
        self.linear_fc2 = nn.Linear(self.width, sizes.out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width) if self.deep else x).view(-1, self.width)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return out


class _Tower(nn.Module):
    """Patches to embeddings.

    Args:
        sizes: of the tower.
        side: the learned positions are a grid of side x side.
        deep: layers whose output the text model's first layers add, in this order.
    """

    def __init__(self, sizes: TowerSizes, side: int, deep: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.side, self.deep = sizes, side, deep
        self.patch_embed = PatchEmbedding(sizes, bias=True)
        self.pos_embed = nn.Embedding(side**2, sizes.hidden)
        self.blocks = nn.ModuleList(
            TowerBlock(sizes, nn.LayerNorm, _MLP) for _ in range(sizes.depth)
        )
        self.merger = _Merger(sizes, deep=False)
        self.deepstack_merger_list = nn.ModuleList(_Merger(sizes, deep=True) for _ in deep)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        """Patches [patches, values] of images, one after another, to [blocks, (1 + deep) x out]:
        the embedding of each block, then what each of the text model's first layers adds."""
        positions = patch_positions(grids, self.sizes.merge)
        x = self.patch_embed(patches) + self._learned(positions, grids).to(patches.dtype)
        turned = rotations(positions.to(patches.device), self.sizes.head_dim)
        runs = in_runs(rows * columns for rows, columns in grids)
        mergers = dict(zip(self.deep, self.deepstack_merger_list, strict=True))
        features = []
        for index, layer in enumerate(self.blocks):
            x = layer(x, *turned, runs)
            if index in mergers:
                features.append(mergers[index](x))
        return torch.cat([self.merger(x), *features], -1)

    def _learned(self, positions: Tensor, grids: Grids) -> Tensor:
        """The learned position of each patch, float32 [patches, hidden]: the grid that was learned
        is stretched over the image, corner on corner, and its four nearest are mixed."""
        last = torch.tensor([[rows - 1, columns - 1] for rows, columns in grids])
        counts = torch.tensor([rows * columns for rows, columns in grids])
        exact = positions.float() * (self.side - 1) / last.repeat_interleave(counts, 0)
        low = exact.floor().long()
        near = torch.stack((low, (low + 1).clamp(max=self.side - 1)))  # [2, patches, 2]
        shares = torch.stack((1 - (exact - low), exact - low))
        places = (near[:, None, :, 0] * self.side + near[None, :, :, 1]).flatten(0, 1)
        weights = (shares[:, None, :, 0] * shares[None, :, :, 1]).flatten(0, 1)
        device = self.pos_embed.weight.device
        rows = self.pos_embed(places.to(device)) * weights[..., None].to(device)
        return rows.sum(0)


class Qwen3VLTower(QwenTower):
    """Tower and mergers of Qwen3-VL."""

    mlp_matrices = 2

    def __init__(self, config: Mapping[str, Any]) -> None:
        sizes, values = TowerSizes.read(config, "gelu_pytorch_tanh", _DEFAULTS)
        super().__init__(config, sizes)
        count = values.integer("num_position_embeddings", 2304, high=1 << 24)
        if isqrt(count) ** 2 != count:
            values.fail("num_position_embeddings", "must be a square: positions are a grid")
        deep = values.integers("deepstack_visual_indexes", high=sizes.depth - 1)
        deep = (8, 16, 24) if deep is None else deep
        if list(deep) != sorted(set(deep)):
            values.fail("deepstack_visual_indexes", "must rise")
        if len(deep) >= (layers := ModelConfig.from_dict(config).num_layers):
            values.fail(
                "deepstack_visual_indexes", f"needs more layers than the text model's {layers}"
            )
        self.width = sizes.out * (1 + len(deep))
        self.visual = _Tower(sizes, isqrt(count), deep)

    @property
    def _embedding_numbers(self) -> int:
        """The four nearest positions of a patch, and the same in float32 while they are mixed."""
        return (6 + 5 * (4 // self.dtype.itemsize)) * self.sizes.hidden
