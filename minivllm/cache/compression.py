"""KV compression: keys and values in 8 bits, with one scale for each head of each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, CacheLayout

# The stored dtype, and the largest magnitude of a scaled head.
KV_DTYPES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
SCALE_DTYPE = torch.float32


def compress(x: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Scale each vector so that its largest element becomes the largest number of the stored dtype,
    and round.

    Each head of each token has its own scale, so the stored values depend on nothing else: there is
    no calibration, and a batch changes nothing (KIVI, Liu et al. 2024, scales values by token; here
    keys are scaled by token too). With m the vector's largest magnitude, the error of an element x
    is at most m / 254 for int8, and for fp8 (e4m3: 3 bits of mantissa) at most |x| / 16, or m / 448
    / 1024 where that is more.

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
    """Keys or values from their stored bits, rounded to `dtype`: the inverse of `compress`. bits:
    int8 [..., head_dim]; scale: [...]."""
    return bits.view(KV_DTYPES[kv_dtype][0]).to(SCALE_DTYPE).mul_(scale[..., None]).to(dtype)


class EightBitKVCache(KVCache):
    """KV cache that stores keys and values as int8 bits, with a scale for each head of each token.

    Args:
        specs, layout, dtype, device: as KVCache takes them.
        kv_dtype: "int8" or "fp8".
    """

    compressed = True

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str,
    ) -> None:
        self.kv_dtype = kv_dtype
        super().__init__(specs, layout, dtype, device)

    def part_shapes(self, spec: AttentionSpec) -> list[tuple[tuple[int, ...], torch.dtype]]:
        heads = (spec.num_kv_heads,)
        return [((*heads, spec.head_dim), torch.int8)] * 2 + [(heads, SCALE_DTYPE)] * 2

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        (k, k_scale), (v, v_scale) = compress(k, self.kv_dtype), compress(v, self.kv_dtype)
        return k, v, k_scale, v_scale

    def restored(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = parts
        keys = expand(k, k_scale, self.kv_dtype, self.dtype)
        return keys, expand(v, v_scale, self.kv_dtype, self.dtype)
