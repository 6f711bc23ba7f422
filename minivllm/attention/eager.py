"""attention=eager: the definition of attention, written out. Every other backend is tested against
it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec


def visible(query_len: int, seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each of the last `query_len` of `seq_len` positions sees: bool [query_len,
    seq_len]."""
    queries = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask


class EagerBackend:
    """Scores, mask, softmax in float32 and weighted sum, one request after another.

    Supports every shape, dtype, window and soft cap, and returns attention scores."""

    name = "eager"

    def __init__(self, specs: Sequence[AttentionSpec], kv: KVCache) -> None:
        self.specs = specs
        self.kv = kv

    def prepare(self, batch: StepBatch) -> None:
        """The layers share nothing."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        spec = self.specs[layer]
        self.kv.write(layer, batch.slot_mapping, k, v)
        groups = spec.num_heads // spec.num_kv_heads
        out = torch.empty_like(q)
        start = 0
        lens = zip(batch.query_lens_host, batch.seq_lens_host, strict=True)
        for row, (query_len, seq_len) in enumerate(lens):
            part = slice(start, start + query_len)
            start += query_len
            blocks = -(-seq_len // self.kv.layout.block_size)
            keys, values = (
                # [seq_len, num_heads, head_dim]
                cached[0, :seq_len].repeat_interleave(groups, dim=1)
                for cached in self.kv.gather(layer, batch.block_table[row, :blocks], 1, seq_len)
            )
            scores = torch.einsum("qhd,khd->hqk", q[part].float(), keys.float()) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores.masked_fill_(~visible(query_len, seq_len, spec.window, q.device), float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            if batch.attention_scores is not None and (count := batch.observed_host[row]):
                by_token = weights[:, -count:].sum((0, 1))
                by_token = F.pad(by_token, (0, blocks * self.kv.layout.block_size - seq_len))
                batch.attention_scores[row, :blocks] += by_token.unflatten(0, (blocks, -1)).sum(1)
            out[part] = torch.einsum("hqk,khd->qhd", weights.to(q.dtype), values)
        return out
