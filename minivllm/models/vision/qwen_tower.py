"""What the towers of the Qwen families share: their sizes, the rotation of patches, and attention
within segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.config import ModelConfig
from minivllm.models.layers import weight
from minivllm.models.rope import rotate
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.tower import VisionTower, normalised
from minivllm.platform.values import Values

# Computed together, but for the first image: more gain nothing and take memory.
MOST_PATCHES = 16384
EPS = 1e-6  # of every norm
_THETA = 10000.0
_CHANNELS = 3
# How many segments of which length follow each other.
Runs = Sequence[tuple[int, int]]
Grids = Sequence[tuple[int, ...]]  # rows and columns of patches of each image


@dataclass(frozen=True)
class TowerSizes:
    """The sizes in a vision_config.

    Attributes:
        depth: layers.
        hidden: width of a patch.
        inner: width between the projections of an MLP.
        heads: of attention.
        out: width of an embedding of the text model.
        patch: side of a patch, pixels.
        merge: patches of a side of a block.
        frames: of a patch; those of a picture are equal.
    """

    depth: int
    hidden: int
    inner: int
    heads: int
    out: int
    patch: int
    merge: int
    frames: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of a patch."""
        return _CHANNELS, self.frames, self.patch, self.patch

    @classmethod
    def read(
        cls, config: Mapping[str, Any], activation: str, defaults: TowerSizes
    ) -> tuple[TowerSizes, Values]:
        """The sizes in a config.json, and its vision_config.

        Args:
            config: the parsed file.
            activation: the only one that the family has.
            defaults: transformers' values of what the file omits.

        Raises:
            BadInput: a value is out of its range or not supported; names the key.
        """
        values = Values(config, "config.json").section("vision_config")
        sizes = cls(
            depth=values.integer("depth", defaults.depth, high=1 << 10),
            hidden=values.integer("hidden_size", defaults.hidden, high=1 << 16),
            inner=values.integer("intermediate_size", defaults.inner, high=1 << 18),
            heads=values.integer("num_heads", defaults.heads, high=1 << 12),
            out=values.integer("out_hidden_size", defaults.out, high=1 << 16),
            patch=values.integer("patch_size", defaults.patch, high=1 << 10),
            merge=values.integer("spatial_merge_size", defaults.merge, high=1 << 5),
            frames=values.integer("temporal_patch_size", defaults.frames, high=1 << 5),
        )
        if sizes.hidden % sizes.heads or sizes.head_dim % 4:
            values.fail("num_heads", f"must divide hidden_size={sizes.hidden} into multiples of 4")
        if (text := ModelConfig.from_dict(config).hidden_size) != sizes.out:
            values.fail("out_hidden_size", f"is not the text model's hidden_size={text}")
        if values.text("hidden_act", activation) != activation:
            values.fail("hidden_act", f"is not supported, only {activation}")
        for key in ("in_channels", "in_chans"):
            if values.integer(key, _CHANNELS) != _CHANNELS:
                values.fail(key, f"is not supported, only {_CHANNELS}")
        return sizes, values


class QwenTower(VisionTower):
    """A tower over the patches of whole images, of any number and size.

    Args:
        config: config.json of the checkpoint.
        sizes: read from it.
    """

    visual: nn.Module  # takes patches [patches, values] and their grids to [rows, width]
    mlp_matrices: int  # between the width of a patch and the inner width, of a layer

    def __init__(self, config: Mapping[str, Any], sizes: TowerSizes) -> None:
        super().__init__(config)
        self.sizes = sizes

    @torch.inference_mode()
    def encode(self, images: Sequence[ProcessedImage], levels: Tensor) -> list[Tensor]:
        rows: list[Tensor] = []
        group: list[ProcessedImage] = []
        for image in images:
            if group and sum(len(one.pixels) for one in (*group, image)) > MOST_PATCHES:
                rows += self._together(group, levels)
                group = []
            group.append(image)
        return [*rows, *self._together(group, levels)] if group else rows

    def _together(self, images: Sequence[ProcessedImage], levels: Tensor) -> Sequence[Tensor]:
        patches = torch.cat([torch.from_numpy(image.pixels) for image in images])
        pixels = normalised(patches.to(self.device), levels, self.dtype)
        frames = pixels[:, :, None].expand(-1, -1, self.sizes.frames, -1, -1)
        rows: Tensor = self.visual(frames.flatten(1), [image.grid for image in images])
        return rows.split([image.num_tokens for image in images])

    def flops(self, image: ProcessedImage) -> float:
        sizes, patches = self.sizes, len(image.pixels)
        matrices = 4 * sizes.hidden**2 + self.mlp_matrices * sizes.hidden * sizes.inner
        layers = patches * sizes.depth * matrices + 2 * sizes.hidden * self._pairs(image)
        block = sizes.hidden * sizes.merge**2
        mergers = image.num_tokens * block * (block + sizes.out) * (self.width // sizes.out)
        first = patches * sizes.hidden * torch.Size(sizes.patch_shape).numel()
        return 2.0 * (first + layers + mergers)

    def _pairs(self, image: ProcessedImage) -> int:
        """Pairs of patches that attend to each other, summed over the layers."""
        return self.sizes.depth * len(image.pixels) ** 2

    def working_bytes(self, most_tokens: int) -> int:
        """Bytes that one layer keeps beside the patches, their values and rotations, of
        `MOST_PATCHES` or of one larger image. Attention keeps no scores, whole or in windows."""
        sizes, size = self.sizes, self.dtype.itemsize
        hidden, wide = sizes.hidden, 4 // size  # numbers that a float32 takes the place of
        values = torch.Size(sizes.patch_shape).numel()
        pixels = values // sizes.frames
        # Residual, norm and projections; queries and keys in float32, rotated in three parts.
        rotated = 5 * hidden + (8 * wide if wide > 1 else 6) * hidden
        attended = 11 * hidden
        numbers = max(rotated, attended, 3 * (hidden + sizes.inner), self._embedding_numbers)
        # Cosines and sines. Twice as much and 32 bytes are an allowance for what a thread of
        # torch's attention takes on a CPU, about half a megabyte: it counts only where a tower is
        # narrow.
        numbers += values + pixels + 6 * sizes.head_dim * wide
        # Levels of pixels are looked up by int64 numbers.
        each = max(size * numbers + pixels + 32, (17 + size) * pixels)
        return max(MOST_PATCHES, most_tokens * sizes.merge**2) * each

    @property
    def _embedding_numbers(self) -> int:
        """Numbers of the compute dtype that the first hidden state of a patch takes at its peak."""
        return 2 * self.sizes.hidden


class PatchProjection(nn.Module):
    """Patches [patches, values] to [patches, hidden]. A convolution whose stride is its kernel, as
    the checkpoint has it, is one matrix product.

    Args:
        sizes: of the tower.
        bias: whether the checkpoint has one.
    """

    def __init__(self, sizes: TowerSizes, bias: bool) -> None:
        super().__init__()
        self.weight = weight(sizes.hidden, *sizes.patch_shape)
        self.bias = weight(sizes.hidden) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PatchEmbedding(nn.Module):
    """PatchProjection under the checkpoint's name."""

    def __init__(self, sizes: TowerSizes, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(sizes, bias)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class TowerAttention(nn.Module):
    """Attention among the patches of a segment, in both directions.

    Args:
        sizes: of the tower.
    """

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.heads, self.dim, hidden = sizes.heads, sizes.head_dim, sizes.hidden
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, runs: Runs) -> Tensor:
        """[patches, hidden] to the same.

        Args:
            x: the patches, the segments one after another.
            cos: of `rotations`.
            sin: of `rotations`.
            runs: the segments.
        """
        qkv = self.qkv(x).view(len(x), 3 * self.heads, self.dim)
        qk, v = qkv.split((2 * self.heads, self.heads), 1)
        q, k = rotate(qk.float(), cos, sin).to(x.dtype).split(self.heads, 1)
        parts, start = [], 0
        for count, length in runs:
            end = start + count * length
            own = (
                one[start:end].view(count, length, self.heads, self.dim).transpose(1, 2)
                for one in (q, k, v)
            )
            attended = F.scaled_dot_product_attention(*own)
            parts.append(attended.transpose(1, 2).reshape(count * length, -1))
            start = end
        out: Tensor = self.proj(torch.cat(parts))
        return out


class TowerBlock(nn.Module):
    """Pre-norm transformer layer.

    Args:
        sizes: of the tower.
        norm: makes the norm of a width.
        mlp: makes the feed-forward.
    """

    def __init__(
        self,
        sizes: TowerSizes,
        norm: Callable[[int, float], nn.Module],
        mlp: Callable[[TowerSizes], nn.Module],
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(sizes.hidden, EPS), norm(sizes.hidden, EPS)
        self.attn, self.mlp = TowerAttention(sizes), mlp(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, runs: Runs) -> Tensor:
        """[patches, hidden] to the same; see TowerAttention."""
        x = x + self.attn(self.norm1(x), cos, sin, runs)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def in_runs(lengths: Iterable[int]) -> Runs:
    """Segments of these lengths: neighbours of the same length are computed together."""
    return [(len(list(same)), length) for length, same in groupby(lengths)]


def patch_positions(grids: Grids, merge: int) -> Tensor:
    """Row and column of each patch of images, blocks of merge x merge one after another: int64
    [patches, 2]."""
    positions = []
    for rows, columns in grids:
        both = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        blocks = both.view(rows // merge, merge, columns // merge, merge, 2)
        positions.append(blocks.transpose(1, 2).reshape(-1, 2))
    return torch.cat(positions)


def rotations(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of rows and columns [patches, 2], as `rotate` takes them: float32
    [patches, 1, dim]. Half of the pairs of a head turn by the row, half by the column."""
    exponents = torch.arange(0, dim // 2, 2, device=positions.device).float() / (dim // 2)
    angles = (positions[..., None].float() * (1.0 / _THETA**exponents)).flatten(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
