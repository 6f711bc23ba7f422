"""Checkpoints with weights in 8-bit floats, for quant=fp8: e4m3 with one scale, one a channel, or
one a block.

DeepSeek's form has `weight_scale_inv` [out / 128, in / 128], the factor of each block (DeepSeek-AI
2024); FBGEMM's and compressed-tensors' forms have `weight_scale`. Scales of activations in a
checkpoint are not used: activations are not quantised, or get a scale for each token where the GPU
multiplies 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import Shapes, StoredLayer
from minivllm.quant.fp8 import FP8, FP8BlockLinear, FP8Linear


class StoredFP8:
    """Weights of eight bits in floating point, with a scale a tensor, a row or a block."""

    names: tuple[str, ...] = (
        *("weight", "weight_scale", "weight_scale_inv"),
        *("activation_scale", "input_scale", "input_scale_ub", "output_scale"),
    )

    def __init__(self, settings: Mapping[str, Any], quant: FP8) -> None:
        self.quant = quant
        self.marker = (
            "weight_scale_inv"
            if str(settings.get("quant_method")).lower() == "fp8"
            else "weight_scale"
        )
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise BadInput(
                f"quantization_config: weight_block_size={block!r} must be two whole numbers"
            )
        self.block: tuple[int, int] | None = tuple(block) if block else None

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"weight": (rows, columns), self.marker: None}

    def _scales(self, part: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """float32 [rows, 1], or [rows, blocks of inputs]."""
        if part["weight"].dtype is not torch.float8_e4m3fn:
            raise BadInput(f"weights are {part['weight'].dtype}, not float8_e4m3fn")
        scale = part[self.marker].float()
        if self.block is not None:
            height, width = self.block
            shape = (-(-rows // height), -(-columns // width))
            if tuple(scale.shape) != shape:
                raise BadInput(
                    f"{self.marker} is {list(scale.shape)}, and blocks of {self.block} ask for "
                    f"{list(shape)}"
                )
            return scale.repeat_interleave(height, 0)[:rows]
        if scale.numel() not in (1, rows):
            raise BadInput(f"{self.marker} has {scale.numel()} values for {rows} outputs")
        return scale.reshape(-1, 1).expand(rows, 1)

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts, rows, columns, bias = layer
        scales = [
            self._scales(part, count, columns) for part, count in zip(parts, rows, strict=True)
        ]
        # torch does not concatenate 8-bit floats on every device.
        weight = torch.cat([part["weight"].view(torch.uint8) for part in parts]).view(
            torch.float8_e4m3fn
        )
        scale = torch.cat(scales).contiguous()
        if self.block is not None:
            return FP8BlockLinear(weight, scale, self.block[1], bias)
        return FP8Linear(weight, scale[:, 0].contiguous(), bias, self.quant.dtype)

    def weight(self, part: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        width = columns if self.block is None else self.block[1]
        scale = self._scales(part, rows, columns).repeat_interleave(width, 1)[:, :columns]
        return part["weight"].float() * scale
