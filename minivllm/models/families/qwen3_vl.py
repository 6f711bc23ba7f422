"""The language model of Qwen3-VL (Bai et al. 2025), which is Qwen3 with positions in time, height
and width, and with features of images in its first layers; its tower is in models/vision/."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.models.config import ModelConfig
from minivllm.models.families.llama import Decoder
from minivllm.models.families.qwen3 import Qwen3ForCausalLM
from minivllm.models.mrope import make_mrotary


class DeepStackDecoder(Decoder):
    """Decoder whose first layers add features of images to their output (DeepStack, Meng et al.
    2024)."""

    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        if batch.inputs is None or not len(batch.inputs.rows):
            return super().forward(batch, attention)
        x = batch.inputs.put(self.embed_tokens(batch.token_ids))
        features = batch.inputs.values.split(x.shape[1], 1)[1:]
        rotations = [rotary(batch) for rotary in self.rotaries]
        for index, (layer, rope) in enumerate(zip(self.layers, self.rope_of_layer, strict=True)):
            x = layer(x, *rotations[rope], batch, attention)
            if index < len(features):
                x = x.index_add(0, batch.inputs.rows, features[index])
        out: Tensor = self.norm(x)
        return out


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL 2B to 32B."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        plain = self.model
        self.model = DeepStackDecoder(plain.embed_tokens, [*plain.layers], plain.norm, config)

    def make_rotary(self, max_positions: int, device: torch.device) -> None:
        make_mrotary(self, max_positions, device)
