"""The cache's memory: keys and values of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.cache.spec import AttentionSpec, CacheLayout, token_bytes
from minivllm.platform.plug_ins import locate

EIGHT_BITS = "minivllm.cache.compression.EightBitKVCache"  # imported where it is chosen


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only when they are written to, where the system can do that.

    torch.zeros writes every page; numpy asks the system for zeroed pages, which take memory on
    their first use. A pool of many GB on a CPU is then free until it is used. It begins at a
    multiple of 64 bytes, which numpy's memory does not: a vector would lie in two cache lines."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 64, dtype=np.uint8)
    begin = -raw.ctypes.data % 64
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


def bytes_per_token(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: str = "auto"
) -> int:
    """Bytes of keys and values, and of their scales, that one token takes over all layers."""
    return sum(
        token_bytes(spec.num_kv_heads, spec.head_dim, dtype.itemsize, kv_dtype) for spec in specs
    )


class KVCache:
    """Keys and values of every layer, in blocks.

    Args:
        specs: attention of each layer.
        layout: block size and number of blocks.
        dtype: the model's dtype.
        device: where the tensors lie.

    Attributes:
        parts: for each layer the tensors [num_blocks, block_size, ...] that are stored by block and
            moved with it: keys and values [..., num_kv_heads, head_dim], and if they are compressed
            (as int8 bits) their scales [..., num_kv_heads], float32. attention=cpu may keep another
            order within a block, which only moves as a whole.
    """

    kv_dtype = "auto"  # how keys and values are stored: here in `dtype`
    compressed = False

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self.bytes_per_token = bytes_per_token(specs, dtype, self.kv_dtype)
        rows = layout.num_blocks, layout.block_size
        self.parts = [
            tuple(zeros((*rows, *shape), kind, device) for shape, kind in self.part_shapes(spec))
            for spec in specs
        ]
        self.blocks = [part for parts in self.parts for part in parts]  # of all layers
        # Views by slot are made once: every operation of every layer costs time on a CPU.
        self._slots = [tuple(part.flatten(0, 1) for part in parts) for parts in self.parts]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(part.nbytes for part in self.blocks)

    def part_shapes(self, spec: AttentionSpec) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what each of a layer's `parts` holds for one token."""
        return [((spec.num_kv_heads, spec.head_dim), self.dtype)] * 2

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """New keys and values as a layer's `parts` store them."""
        return k, v

    def restored(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values in the model's dtype; the inverse of `stored`."""
        return parts[0], parts[1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new keys and values. slots: int64 [T]; k, v: [T, num_kv_heads, head_dim]."""
        for part, rows in zip(self._slots[layer], self.stored(k, v), strict=True):
            part.index_copy_(0, slots, rows)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        if blocks:
            for part in self.blocks:
                part[list(blocks)] = 0

    def gather(
        self, layer: int, blocks: Tensor, num_rows: int, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of R requests side by side.

        Args:
            layer: index of the layer.
            blocks: int32 or int64 [R * B], the requests' block tables one after another.
            num_rows: R.
            num_tokens: tokens of each request; at most B * block_size.

        Returns:
            Two new tensors [R, W, num_kv_heads, head_dim] in the model's dtype: W is `num_tokens`
            where one block holds them, else all B * block_size. What lies beyond a request's own
            tokens is left over from others.
        """
        parts = self.parts[layer]
        if len(blocks) == num_rows:
            rows = [part[:, :num_tokens].index_select(0, blocks) for part in parts]
        else:
            gathered = [part.index_select(0, blocks) for part in parts]
            rows = [part.view(num_rows, -1, *part.shape[2:]) for part in gathered]
        return self.restored(rows)


def kv_cache(
    specs: Sequence[AttentionSpec],
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: str = "auto",
) -> KVCache:
    """The KV cache that stores keys and values as `cache.kv_dtype` names it."""
    if kv_dtype == "auto":
        return KVCache(specs, layout, dtype, device)
    compressed: KVCache = locate(EIGHT_BITS)(specs, layout, dtype, device, kv_dtype)
    return compressed
