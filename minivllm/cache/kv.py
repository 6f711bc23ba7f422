"""The cache's memory: keys and values of every layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import AttentionSpec
from minivllm.cache.compression import SCALE_DTYPE, compress, expand
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


def bytes_per_token(specs: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: str = "auto") -> int:
    """Bytes of keys and values, and of their scales, that one token takes over all layers."""
    heads = sum(2 * spec.num_kv_heads for spec in specs)
    elements = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs)
    return elements * dtype.itemsize if kv_dtype == "auto" else elements + heads * SCALE_DTYPE.itemsize


class KVCache:
    """Keys and values of every layer, in blocks.

    Args:
        specs: attention of each layer.
        layout: block size and number of blocks.
        dtype: the model's dtype.
        device: where the cache lives.
        kv_dtype: "auto" stores keys and values in `dtype`, "int8" and "fp8" in 8 bits (see compression.py).

    Attributes:
        parts: for each layer what lies in blocks, and moves with them: keys and values
            [num_blocks, block_size, num_kv_heads, head_dim], and if they are compressed (then they are int8
            bits) their scales [num_blocks, block_size, num_kv_heads], float32.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        layout: CacheLayout,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: str = "auto",
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.compressed = kv_dtype != "auto"
        self.bytes_per_token = bytes_per_token(specs, dtype, kv_dtype)
        self.parts: list[tuple[Tensor, ...]] = []
        self._host: list[tuple[Tensor, ...]] = []
        for spec in specs:
            heads: tuple[int, ...] = (layout.block_size, spec.num_kv_heads)
            shapes = [((*heads, spec.head_dim), torch.int8 if self.compressed else dtype)] * 2
            shapes += [(heads, SCALE_DTYPE)] * 2 * self.compressed
            self.parts.append(tuple(zeros((layout.num_blocks, *s), kind, device) for s, kind in shapes))
            if layout.host_slots:
                self._host.append(
                    tuple(
                        torch.zeros((layout.host_slots, *s), dtype=kind, pin_memory=True)
                        if device.type == "cuda"
                        else zeros((layout.host_slots, *s), kind, device)
                        for s, kind in shapes
                    )
                )
        # Views by slot, made once: a step on a CPU counts every operation of every layer.
        self._slots = [tuple(part.flatten(0, 1) for part in parts) for parts in self.parts]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store new keys and values. slots: int64 [T]; k, v: [T, num_kv_heads, head_dim]."""
        new: tuple[Tensor, ...] = (k, v)
        if self.compressed:
            (k, k_scale), (v, v_scale) = compress(k, self.kv_dtype), compress(v, self.kv_dtype)
            new = (k, v, k_scale, v_scale)
        for part, rows in zip(self._slots[layer], new, strict=True):
            part.index_copy_(0, slots, rows)

    def transfer(self, moves: Transfers) -> None:
        """Move blocks between device and host and within the device, in the order that Transfers names."""
        for pairs, move in (
            (moves.saves, self._save),
            (moves.copies, self._copy),
            (moves.loads, self._load),
        ):
            if pairs:
                source, target = torch.tensor(pairs).unbind(1)
                for layer in range(len(self.parts)):
                    move(layer, source, target)

    def _save(self, layer: int, blocks: Tensor, slots: Tensor) -> None:
        for part, host in zip(self.parts[layer], self._host[layer], strict=True):
            host[slots] = part[blocks.to(part.device)].to(host.device)

    def _copy(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        for part in self.parts[layer]:
            part[targets.to(part.device)] = part[sources.to(part.device)]

    def _load(self, layer: int, slots: Tensor, blocks: Tensor) -> None:
        for part, host in zip(self.parts[layer], self._host[layer], strict=True):
            part[blocks.to(part.device)] = host[slots].to(part.device)

    def gather(self, layer: int, blocks: Tensor, num_rows: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of R requests side by side.

        Args:
            layer: index of the layer.
            blocks: int32 or int64 [R * B], the requests' block tables one after another.
            num_rows: R.
            num_tokens: tokens wanted a request; at most B * block_size.

        Returns:
            Two new tensors [R, W, num_kv_heads, head_dim] in the model's dtype: W is `num_tokens` where one block
            holds them, else all B * block_size. What lies beyond a request's own tokens is left over from others.
        """
        parts = self.parts[layer]
        if len(blocks) == num_rows:
            found = [part[:, :num_tokens].index_select(0, blocks) for part in parts]
        else:
            found = [part.index_select(0, blocks).view(num_rows, -1, *part.shape[2:]) for part in parts]
        if not self.compressed:
            return found[0], found[1]
        k, v, k_scale, v_scale = found
        return expand(k, k_scale, self.kv_dtype, self.dtype), expand(v, v_scale, self.kv_dtype, self.dtype)
