"""The cache's memory: keys and values of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.cache.manager import CacheLayout, Transfers


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
            self.keys.append(zeros(shape, dtype, device))
            self.values.append(zeros(shape, dtype, device))
        self._host = [
            torch.zeros((2, layout.host_slots, *k.shape[1:]), dtype=dtype, pin_memory=True)
            if device.type == "cuda"
            else zeros((2, layout.host_slots, *k.shape[1:]), dtype, device)
            for k in self.keys
            if layout.host_slots
        ]
        # Views by slot, made once: a step on a CPU counts every operation of every layer.
        self._slots = [
            (k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self.keys, self.values, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new keys and values. slots: int64 [T]; k, v: [T, num_kv_heads, head_dim]."""
        keys, values = self._slots[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def transfer(self, moves: Transfers) -> None:
        """Move blocks between device and host and within the device, in the order that Transfers names."""
        for pairs, move in (
            (moves.saves, self._save),
            (moves.copies, self._copy),
            (moves.loads, self._load),
        ):
            if pairs:
                source, target = torch.tensor(pairs).unbind(1)
                for layer in range(len(self.keys)):
                    move(layer, source, target)

    def _save(self, layer: int, blocks: Tensor, slots: Tensor) -> None:
        for part, host in zip((self.keys[layer], self.values[layer]), self._host[layer], strict=True):
            host[slots] = part[blocks.to(part.device)].to(host.device)

    def _copy(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        for part in (self.keys[layer], self.values[layer]):
            part[targets.to(part.device)] = part[sources.to(part.device)]

    def _load(self, layer: int, slots: Tensor, blocks: Tensor) -> None:
        for part, host in zip((self.keys[layer], self.values[layer]), self._host[layer], strict=True):
            part[blocks.to(part.device)] = host[slots].to(part.device)

    def gather(self, layer: int, blocks: Tensor, num_rows: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of R requests side by side.

        Args:
            layer: index of the layer.
            blocks: int32 or int64 [R * B], the requests' block tables one after another.
            num_rows: R.
            num_tokens: tokens wanted a request; at most B * block_size.

        Returns:
            Two new tensors [R, W, num_kv_heads, head_dim]: W is `num_tokens` where one block holds them,
            else all B * block_size. What lies beyond a request's own tokens is left over from others.
        """
        if len(blocks) == num_rows:
            keys, values = self.keys[layer][:, :num_tokens], self.values[layer][:, :num_tokens]
            return keys.index_select(0, blocks), values.index_select(0, blocks)
        heads = self.keys[layer].shape[2:]
        return (
            self.keys[layer].index_select(0, blocks).view(num_rows, -1, *heads),
            self.values[layer].index_select(0, blocks).view(num_rows, -1, *heads),
        )
