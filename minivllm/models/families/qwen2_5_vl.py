"""The language model of Qwen2.5-VL (Bai et al. 2025), which is Qwen2 with positions in time, height
and width; its tower is in models/vision/."""

from __future__ import annotations

import torch

from minivllm.models.families.qwen2 import Qwen2ForCausalLM
from minivllm.models.mrope import make_mrotary


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2.5-VL 3B to 72B."""

    def make_rotary(self, max_positions: int, device: torch.device) -> None:
        make_mrotary(self, max_positions, device)
