"""The layout of bitsandbytes' NF4 kernel for CPUs with AVX512-BF16.

32 output rows together, for each pair of inputs 32 bytes; byte 2 r + p holds input p of the pair, for row r in its
low half and for row r + 16 in its high half. bitsandbytes' own conversion holds every code in 32 bits meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interleave(codes: Tensor) -> Tensor:
    """Codes uint8 [out, in / 2], the first of a pair of inputs in the high half, to the layout, uint8 [out, in / 2]."""
    upper, lower = codes.unflatten(0, (-1, 2, 16)).unbind(1)
    first, second = (upper >> 4) | (lower & 0xF0), (upper & 0x0F) | (lower << 4)
    return torch.stack((first, second), -1).transpose(1, 2).reshape(codes.shape)


def deinterleave(packed: Tensor) -> Tensor:
    """The way back."""
    groups, pairs = packed.shape[0] // 32, packed.shape[1]
    words = packed.view(torch.int16).view(groups, pairs, 16).transpose(1, 2).contiguous()
    codes = torch.empty(groups, 2, 16, pairs, dtype=torch.uint8)
    codes[:, 0] = ((words << 4) & 0xF0) | ((words >> 8) & 0x0F)
    codes[:, 1] = (words & 0xF0) | ((words >> 12) & 0x0F)
    return codes.view(packed.shape)
