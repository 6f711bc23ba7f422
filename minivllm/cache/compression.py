"""KV compression: keys and values in 8 bits, with one scale for each head of each token."""

from __future__ import annotations

import torch
from torch import Tensor

# What is stored, and the largest magnitude that a head's vector is scaled to.
KV_DTYPES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
SCALE_DTYPE = torch.float32


def compress(x: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Scale each vector so that its largest element becomes the largest number there is, and round.

    The scale belongs to one head of one token, so that what is stored depends on nothing else: no
    calibration, and the same in any batch (as in KIVI, Liu et al. 2024, values are scaled by token,
    but here keys are too). With m the vector's largest magnitude, an element x comes back within m
    / 254 of itself from int8, and from fp8 (e4m3: 3 bits of mantissa) within |x| / 16, or m / 448 /
    1024 where that is more.

    Args:
        x: [..., head_dim].
        kv_dtype: "int8" or "fp8".

    Returns:
        What to store, [..., head_dim] as int8 (the bits, for fp8), and the scales [...], float32.
    """
    stored, largest = KV_DTYPES[kv_dtype]
    wide = x.to(SCALE_DTYPE)
    scale = wide.abs().amax(-1).div_(largest).clamp_(min=torch.finfo(SCALE_DTYPE).tiny)
    wide = wide / scale[..., None]
    if stored is torch.int8:
        wide = wide.round_()
    return wide.clamp_(-largest, largest).to(stored).view(torch.int8), scale


def expand(bits: Tensor, scale: Tensor, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to `dtype`. bits: int8 [..., head_dim]; scale: [...]."""
    return bits.view(KV_DTYPES[kv_dtype][0]).to(SCALE_DTYPE).mul_(scale[..., None]).to(dtype)
