"""The layout of bitsandbytes' NF4 kernel for CPUs with AVX512-BF16, and the layer on it.

32 output rows are stored together, with 32 bytes for each pair of inputs; byte 2 r + p holds input
p of the pair, for row r in its low half and for row r + 16 in its high half. bitsandbytes' own
conversion takes 32 bits for each code meanwhile."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.kernels.modules import LinearKernel
from minivllm.quant.base import frozen
from minivllm.quant.kernels.common import SLICE

# bitsandbytes' AVX-512 kernel costs the same for each row of activations; above about 40 rows it
# was slower than converting the weight and multiplying (4 times slower at 256 rows).
_KERNEL_ROWS = 40


def interleave(codes: Tensor) -> Tensor:
    """Codes uint8 [out, in / 2], the first of a pair of inputs in the high half, to the layout,
    uint8 [out, in / 2]."""
    upper, lower = codes.unflatten(0, (-1, 2, 16)).unbind(1)
    first, second = (upper >> 4) | (lower & 0xF0), (upper & 0x0F) | (lower << 4)
    return torch.stack((first, second), -1).transpose(1, 2).reshape(codes.shape)


def deinterleave(packed: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    groups, pairs = packed.shape[0] // 32, packed.shape[1]
    words = packed.view(torch.int16).view(groups, pairs, 16).transpose(1, 2).contiguous()
    codes = torch.empty(groups, 2, 16, pairs, dtype=torch.uint8)
    codes[:, 0] = ((words << 4) & 0xF0) | ((words >> 8) & 0x0F)
    codes[:, 1] = (words & 0xF0) | ((words >> 12) & 0x0F)
    return codes.view(packed.shape)


class NF4CPULinear(LinearKernel):
    """A linear layer on bitsandbytes' layout for AVX512-BF16. The weight is converted back where
    rows are many.

    The layout is that of `interleave`; scales are bfloat16 [in / block, out]."""

    kernel_name = "NF4CPULinear"

    def __init__(
        self, library: Any, codes: Tensor, scales: Tensor, state: Any, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.codes, self.scales = frozen(codes), frozen(scales)
        self.bias = None if bias is None else frozen(bias)
        self.multiply = library.matmul_4bit
        self.state = library.functional.QuantState(
            scales, state.shape, state.code, state.blocksize, state.quant_type, torch.bfloat16
        )
        self.state.packing_format_for_cpu = True
        self.rows, self.columns = state.shape
        self.step = max(32, SLICE // self.columns // 32 * 32)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] <= _KERNEL_ROWS:
            out: Tensor = self.multiply(x, self.codes, quant_state=self.state, bias=self.bias)
            return out
        starts = range(0, self.rows, self.step)
        out = torch.cat(
            [F.linear(x, self.weight(i, min(i + self.step, self.rows), x.dtype)) for i in starts],
            -1,
        )
        return out if self.bias is None else out.add_(self.bias)

    def weight(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows [begin, end), multiples of 32, of the weight [out, in] in `dtype`."""
        codes, scales = deinterleave(self.codes[begin:end]), self.scales[:, begin:end].t().float()
        return converted(
            codes, scales.reshape(-1), self.state.blocksize, (end - begin, self.columns), dtype
        )


def converted(
    codes: Tensor, scales: Tensor, block_size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The weight of this shape, by bitsandbytes' conversion for CPUs (0.50.2).

    The conversion takes the scales of blocks that begin within a row from the wrong place, and
    compiles itself again for blocks above 1024. So each block becomes a row of its own, and larger
    blocks become several with the same scale."""
    size, count = min(block_size, 1024), math.prod(shape)
    rows = (count // size, size) if count % size == 0 else (1, count)
    scales = scales.repeat_interleave(block_size // size)
    out: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scales, size, "nf4", rows, dtype
    )
    return out.view(shape)
