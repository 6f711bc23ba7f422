"""The cache's memory: keys and values of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.cache.manager import CacheLayout


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory only once they are written to, where the system can do that.

    torch.zeros writes every page; numpy asks the system for zeroed pages, which come when touched. A
    pool of many GB on a CPU is then free until it is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * dtype.itemsize


class KVCache:
    """Keys and values, one tensor each a layer: [num_blocks, block_size, num_kv_heads, head_dim].

    Args:
        specs: attention of each layer.
        layout: block size and number of blocks.
        dtype: the model's dtype.
        device: where the cache lives.
    """

    def __init__(
        self, specs: Sequence[AttentionSpec], layout: CacheLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for spec in specs:
            shape = (layout.num_blocks, layout.block_size, spec.num_kv_heads, spec.head_dim)
            # Zeros, not empty: padded reads are masked, and a stray NaN would survive the mask.
            self.keys.append(zeros(shape, dtype, device))
            self.values.append(zeros(shape, dtype, device))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new keys and values. slots: int64 [T]; k, v: [T, num_kv_heads, head_dim]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, layer: int, block_table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of R requests, padded to `num_tokens`.

        Args:
            layer: index of the layer.
            block_table: int32 or int64 [R, B].
            num_tokens: tokens to return a request; at most B * block_size.

        Returns:
            Two tensors [R, num_tokens, num_kv_heads, head_dim]; views where one block holds it all.
        """
        rows, blocks = block_table.shape
        gathered = []
        for cache in (self.keys[layer], self.values[layer]):
            if rows == 1 and blocks == 1:
                taken = cache[block_table[0, 0]][None]
            else:
                taken = (
                    cache.index_select(0, block_table.flatten()).unflatten(0, (rows, blocks)).flatten(1, 2)
                )
            gathered.append(taken[:, :num_tokens])
        return gathered[0], gathered[1]
