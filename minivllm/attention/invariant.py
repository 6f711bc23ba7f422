"""attention=invariant: the result of a query is the same to the bit, whatever else the step
computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from minivllm.attention.base import StepBatch
from minivllm.attention.eager import visible
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, require_unscored

TILE = 16


class InvariantBackend:
    """Attention in float32 by tiles of queries that begin at multiples of 16 in the sequence.

    A sum in floating point depends on the order of its terms, and a kernel chooses the order by
    shapes. Here a query's shapes follow from its position alone: its tile is padded to 16 queries
    and to the keys up to the tile's end, whether the step computes the other queries of the tile or
    not. So chunks, prefix cache and other requests change nothing (the problem and the idea of
    fixed splits: He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Supports every
    shape, dtype, window and soft cap.

    Raises:
        BadInput: eviction goes by attention, which is not returned.
    """

    name = "invariant"

    def __init__(self, specs: Sequence[AttentionSpec], kv: KVCache) -> None:
        require_unscored(self.name, kv.layout.eviction)
        self.specs = specs
        self.kv = kv

    def prepare(self, batch: StepBatch) -> dict[tuple[int, int | None], Tensor]:
        """The keys that the queries of each tile see, by the tile's end and the window."""
        masks = {}
        for query_len, seq_len in zip(batch.query_lens_host, batch.seq_lens_host, strict=True):
            for end in _tile_ends(query_len, seq_len):
                for window in {spec.window for spec in self.specs}:
                    if (end, window) not in masks:
                        masks[end, window] = ~visible(TILE, end, window, batch.token_ids.device)
        return masks

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        spec = self.specs[layer]
        self.kv.write(layer, batch.slot_mapping, k, v)
        out = torch.empty_like(q)
        start = 0
        for row, (query_len, seq_len) in enumerate(
            zip(batch.query_lens_host, batch.seq_lens_host, strict=True)
        ):
            blocks = -(-seq_len // self.kv.layout.block_size)
            padding = -seq_len % TILE
            keys, values = (
                F.pad(cached[0, :seq_len].float(), (0, 0, 0, 0, 0, padding)).transpose(0, 1)
                for cached in self.kv.gather(layer, batch.block_table[row, :blocks], 1, seq_len)
            )  # [kv_heads, tiles * TILE, head_dim]
            first = seq_len - query_len
            for end in _tile_ends(query_len, seq_len):
                begin, stop = max(first, end - TILE), min(seq_len, end)
                rows = slice(start + begin - first, start + stop - first)
                tile = q.new_zeros(TILE, *q.shape[1:], dtype=torch.float32)
                inside = slice(begin - (end - TILE), stop - (end - TILE))
                tile[inside] = q[rows].float()
                attended = self._tile(
                    tile, keys[:, :end], values[:, :end], spec, batch.attention[end, spec.window]
                )
                out[rows] = attended[inside].to(q.dtype)
            start += query_len
        return out

    @staticmethod
    def _tile(
        q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, hidden: Tensor
    ) -> Tensor:
        """q: [TILE, num_heads, head_dim]; keys and values: [kv_heads, end, head_dim]; hidden: bool
        [TILE, end]."""
        # Heads that share keys lie along the query axis: [kv_heads, group * TILE, head_dim].
        grouped = q.transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim)
        scores = (grouped @ keys.transpose(1, 2)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.unflatten(1, (-1, TILE)).masked_fill_(hidden, float("-inf"))
        attended = torch.softmax(scores, dim=-1).flatten(1, 2) @ values
        return attended.unflatten(1, (-1, TILE)).flatten(0, 1).transpose(0, 1)


def _tile_ends(query_len: int, seq_len: int) -> range:
    """The ends of the tiles that hold the last `query_len` of `seq_len` positions."""
    first = (seq_len - query_len) // TILE
    return range((first + 1) * TILE, seq_len + TILE, TILE)
