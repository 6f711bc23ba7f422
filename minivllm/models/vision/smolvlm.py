"""The vision tower of SmolVLM, SmolVLM2 and Idefics3 (Marafioti et al. 2025): SigLIP (Zhai et al.
2023) over tiles, then a pixel shuffle and one projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.config import ModelConfig
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.tower import VisionTower, normalised
from minivllm.platform.values import Values

MOST_TILES = 8  # computed together: more gain nothing and take memory


class _Sizes:
    """The numbers of a vision_config, with transformers' defaults."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        values = Values(config, "config.json")
        vision = values.section("vision_config")
        self.hidden = vision.integer("hidden_size", 1152, high=1 << 16)
        self.inner = vision.integer("intermediate_size", 3072, high=1 << 18)
        self.layers = vision.integer("num_hidden_layers", 12, high=1 << 10)
        self.heads = vision.integer("num_attention_heads", 16, high=1 << 12)
        self.image = vision.integer("image_size", 224, high=1 << 14)
        self.patch = vision.integer("patch_size", 32, high=self.image)
        self.eps = vision.number("layer_norm_eps", 1e-6, high=1.0)
        if vision.text("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            vision.fail("hidden_act", "is not supported, only gelu_pytorch_tanh")
        if self.hidden % self.heads:
            vision.fail("hidden_size", "is no multiple of num_attention_heads")
        self.scale = values.integer("scale_factor", 2, high=1 << 6)
        self.text = ModelConfig.from_dict(config).hidden_size


class _Embeddings(nn.Module):
    """Patches of tiles to their first hidden states."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.patch, self.across = sizes.patch, sizes.image // sizes.patch
        self.patch_embedding = nn.Conv2d(3, sizes.hidden, sizes.patch, sizes.patch)
        self.position_embedding = nn.Embedding(self.across**2, sizes.hidden)

    def forward(self, pixels: Tensor) -> Tensor:
        """[tiles, 3, side, side] to [tiles, patches, hidden]."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        return patches + self.position_embedding(self._positions(pixels.shape[-1] // self.patch))

    def _positions(self, across: int) -> Tensor:
        """The position of each of `across` times `across` patches among those that the tower was
        trained with, int64 [patches]; rounded as transformers does."""
        device, step = self.position_embedding.weight.device, 1 / self.across
        bounds = torch.arange(step, 1.0, step, device=device)
        places = torch.arange(across, device=device).float() * (1.0 / torch.tensor(across)).item()
        buckets = torch.bucketize(places.clamp(max=1.0 - 1e-6), bounds, right=True)
        return (buckets[:, None] * self.across + buckets).flatten()


class _Attention(nn.Module):
    """Attention of all patches of a tile to each other."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(sizes.hidden, sizes.hidden) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, patches, hidden] to the same."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return out


class _MLP(nn.Module):
    """Feed-forward with a GELU."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = (
            nn.Linear(sizes.hidden, sizes.inner),
            nn.Linear(sizes.inner, sizes.hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class _Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.hidden, sizes.eps)
        self.self_attn = _Attention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.hidden, sizes.eps)
        self.mlp = _MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, patches, hidden] to the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _Tower(nn.Module):
    """SigLIP without its pooling head."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.embeddings = _Embeddings(sizes)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))}
        )
        self.post_layernorm = nn.LayerNorm(sizes.hidden, sizes.eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """[tiles, 3, side, side] to [tiles, patches, hidden]."""
        x = self.embeddings(pixels)
        for layer in cast(nn.ModuleList, self.encoder["layers"]):
            x = layer(x)
        out: Tensor = self.post_layernorm(x)
        return out


class _Connector(nn.Module):
    """The projection into the language model."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        project = nn.Linear(sizes.hidden * sizes.scale**2, sizes.text, bias=False)
        self.modality_projection = nn.ModuleDict({"proj": project})

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden * scale_factor squared] to [rows, width]."""
        out: Tensor = self.modality_projection["proj"](x)
        return out


class SmolVLMTower(VisionTower):
    """Tower and connector: `scale_factor` squared patches side by side become one row."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.sizes = sizes = _Sizes(config)
        self.width = sizes.text
        self.vision_model = _Tower(sizes)
        self.connector = _Connector(sizes)

    @torch.inference_mode()
    def encode(self, images: Sequence[ProcessedImage], levels: Tensor) -> list[Tensor]:
        tiles = torch.cat([torch.from_numpy(image.pixels) for image in images])
        rows = [self._encoded(part, levels) for part in tiles.split(MOST_TILES)]
        return list(torch.cat(rows).split([image.num_tokens for image in images]))

    def _encoded(self, tiles: Tensor, levels: Tensor) -> Tensor:
        """Tiles uint8 [tiles, 3, side, side] to embeddings [rows, width]."""
        pixels = normalised(tiles.to(self.device), levels, self.dtype)
        hidden = self.vision_model(pixels)
        across, scale = pixels.shape[-1] // self.sizes.patch, self.sizes.scale
        blocks = hidden.unflatten(1, (across // scale, scale, across // scale, scale))
        shuffled = blocks.transpose(2, 3).flatten(3).flatten(0, 2)
        out: Tensor = self.connector(shuffled)
        return out

    def flops(self, image: ProcessedImage) -> float:
        sizes = self.sizes
        patches = (image.pixels.shape[-1] // sizes.patch) ** 2
        layer = 4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.inner + 2 * patches * sizes.hidden
        other = 3 * sizes.patch**2 * sizes.hidden + sizes.hidden * sizes.text
        return 2.0 * len(image.pixels) * patches * (sizes.layers * layer + other)

    def working_bytes(self, most_tokens: int) -> int:
        """Bytes of the widest activations and the pixels of `MOST_TILES` tiles, whose levels are
        looked up by int64 numbers."""
        sizes = self.sizes
        patches, size = (sizes.image // sizes.patch) ** 2, self.dtype.itemsize
        pixels = 3 * sizes.image**2
        widest = size * patches * (6 * sizes.hidden + 2 * sizes.inner)
        return MOST_TILES * (size * pixels + max(widest, 17 * pixels))
