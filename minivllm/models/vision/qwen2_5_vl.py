"""The vision tower of Qwen2.5-VL (Bai et al. 2025): attention in windows, and in a few layers over
the whole image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.layers import RMSNorm
from minivllm.models.vision.inputs import ProcessedImage
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
    depth=32, hidden=3584, inner=3420, heads=16, out=3584, patch=14, merge=2, frames=2
)


class _MLP(nn.Module):
    """Gated feed-forward with biases."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Merger(nn.Module):
    """The patches of a block to one embedding: [patches, hidden] to [blocks, out]."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.width = sizes.hidden * sizes.merge**2
        self.ln_q = RMSNorm(sizes.hidden, EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, sizes.out)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(-1, self.width))
        return out


class _Tower(nn.Module):
    """Patches to embeddings.

    Args:
        sizes: of the tower.
        window: blocks of a window's side.
        whole: layers with attention over the whole image.
    """

    def __init__(self, sizes: TowerSizes, window: int, whole: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes, self.window, self.whole = sizes, window, whole
        self.patch_embed = PatchEmbedding(sizes, bias=False)
        self.blocks = nn.ModuleList(TowerBlock(sizes, RMSNorm, _MLP) for _ in range(sizes.depth))
        self.merger = _Merger(sizes)

    def forward(self, patches: Tensor, grids: Grids) -> Tensor:
        """Patches [patches, values] of images, one after another, to [blocks, out]."""
        sizes, block = self.sizes, self.sizes.merge**2
        order, windows = window_order(grids, sizes.merge, self.window)
        positions = patch_positions(grids, sizes.merge).view(-1, block, 2)[order].view(-1, 2)
        order = order.to(patches.device)
        turned = rotations(positions.to(patches.device), sizes.head_dim)
        x = self.patch_embed(patches).view(-1, block, sizes.hidden)[order].view(-1, sizes.hidden)
        near = in_runs(count * block for count in windows)
        far = in_runs(rows * columns for rows, columns in grids)
        for index, layer in enumerate(self.blocks):
            x = layer(x, *turned, far if index in self.whole else near)
        merged: Tensor = self.merger(x)
        return torch.empty_like(merged).index_copy_(0, order, merged)


class Qwen2_5_VLTower(QwenTower):
    """Tower and merger of Qwen2.5-VL."""

    mlp_matrices = 3
    visual: _Tower

    def __init__(self, config: Mapping[str, Any]) -> None:
        sizes, values = TowerSizes.read(config, "silu", _DEFAULTS)
        super().__init__(config, sizes)
        side = sizes.patch * sizes.merge
        if not (window := values.integer("window_size", 112, high=1 << 16) // side):
            values.fail("window_size", f"is less than a block, which has {side} pixels")
        whole = values.integers("fullatt_block_indexes", high=sizes.depth - 1)
        self.width = sizes.out
        self.visual = _Tower(sizes, window, (7, 15, 23, 31) if whole is None else whole)

    def _pairs(self, image: ProcessedImage) -> int:
        sizes, tower = self.sizes, self.visual
        _, windows = window_order([image.grid], sizes.merge, tower.window)
        near = sum((count * sizes.merge**2) ** 2 for count in windows)
        far = len({*tower.whole} & {*range(sizes.depth)})
        return far * len(image.pixels) ** 2 + (sizes.depth - far) * near


def window_order(grids: Grids, merge: int, window: int) -> tuple[Tensor, list[int]]:
    """The blocks of images, window by window, int64 [blocks]; and the blocks of each window.
    Windows of the same size follow each other, so that they are computed together.

    Args:
        grids: of the images.
        merge: patches of a block's side.
        window: blocks of a window's side.
    """
    order, sizes, start = [], [], 0
    for grid in grids:
        rows, columns = (count // merge for count in grid)
        blocks = torch.arange(start, start + rows * columns).view(rows, columns)
        cut = [part for row in blocks.split(window) for part in row.split(window, 1)]
        cut.sort(key=torch.numel)
        order += [part.flatten() for part in cut]
        sizes += [part.numel() for part in cut]
        start += rows * columns
    return torch.cat(order), sizes
