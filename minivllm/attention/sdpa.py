"""attention=sdpa: torch's scaled_dot_product_attention over keys and values gathered from the
cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.attention.eager import visible
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, require_unscored
from minivllm.errors import BadInput


@dataclass(frozen=True)
class Extend:
    """One request that computes several tokens: a prompt, or a chunk of one."""

    row: int
    tokens: slice  # along the batch's token axis
    query_len: int
    seq_len: int
    masks: dict[int | None, Tensor]  # by window; empty when no token is cached before


@dataclass(frozen=True)
class SDPAPlan:
    """What the layers of one step share."""

    # int64 [D], rows of the token axis; None if the whole batch decodes
    decode_tokens: Tensor | None
    decode_blocks: Tensor | None  # int32 [D * B], block tables one after another
    decode_rows: int  # D
    decode_len: int  # longest sequence among them
    decode_stale: Tensor | None  # int64, gathered tokens of no request in this batch
    # By window: bool [D, 1, 1, decode_len]; none where all tokens are seen.
    decode_masks: dict[int | None, Tensor]
    extends: tuple[Extend, ...]


class SDPABackend:
    """All decoding requests in one padded call, every other request in a call of its own.

    In a decoding request the heads that share a key-value head are adjacent along SDPA's query
    axis, so that grouped queries need no copies of keys and values.

    Raises:
        BadInput: a layer has a soft cap, which SDPA cannot apply; eviction goes by attention, which
            SDPA does not return.
    """

    name = "sdpa"

    def __init__(self, specs: Sequence[AttentionSpec], kv: KVCache) -> None:
        if any(spec.soft_cap is not None for spec in specs):
            raise BadInput(
                "attention=sdpa cannot apply this model's soft cap on scores; use attention=eager"
            )
        require_unscored(self.name, kv.layout.eviction)
        self.specs = specs
        self.kv = kv
        self.windows = {spec.window for spec in specs}

    def prepare(self, batch: StepBatch) -> SDPAPlan:
        """Split the batch into decoding and extending requests and make their masks."""
        device = batch.token_ids.device
        extends = []
        decode_rows: list[int] = []
        decode_tokens: list[int] = []
        start = 0
        for row, (query_len, seq_len) in enumerate(
            zip(batch.query_lens_host, batch.seq_lens_host, strict=True)
        ):
            if query_len == 1:
                decode_rows.append(row)
                decode_tokens.append(start)
            else:
                masks = {
                    window: visible(query_len, seq_len, window, device)
                    for window in self.windows
                    if query_len < seq_len or (window is not None and window < seq_len)
                }
                extends.append(
                    Extend(row, slice(start, start + query_len), query_len, seq_len, masks)
                )
            start += query_len
        if not decode_rows:
            return SDPAPlan(None, None, 0, 0, None, {}, tuple(extends))

        lens = [batch.seq_lens_host[row] for row in decode_rows]
        longest, size = max(lens), self.kv.layout.block_size
        blocks = -(-longest // size)
        rows = torch.tensor(decode_rows, device=device) if extends else slice(None)
        table, lengths = batch.block_table[rows, :blocks], batch.seq_lens[rows]
        positions = torch.arange(longest, device=device)
        masks = {}
        for window in self.windows:
            if len(decode_rows) == 1 and (window is None or window >= longest):
                continue  # one sequence, whose tokens are all seen
            mask = positions < lengths[:, None]
            if window is not None:
                mask &= positions >= lengths[:, None] - window
            masks[window] = mask[:, None, None, :]
        # The end of a last block may hold infinity, and a weight of zero times infinity is not
        # zero.
        width = longest if blocks == 1 else blocks * size
        stale = [
            row * width + token
            for row, length in enumerate(lens)
            for token in range(length, min(-(-length // size) * size, longest))
        ]
        return SDPAPlan(
            torch.tensor(decode_tokens, device=device) if extends else None,
            table.flatten(),
            len(lens),
            longest,
            torch.tensor(stale, device=device) if stale else None,
            masks,
            tuple(extends),
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan: SDPAPlan = batch.attention
        self.kv.write(layer, batch.slot_mapping, k, v)
        if not plan.extends:
            return self._decode(layer, q, plan)
        out = torch.empty_like(q)
        if plan.decode_tokens is not None:
            out[plan.decode_tokens] = self._decode(layer, q[plan.decode_tokens], plan)
        for part in plan.extends:
            out[part.tokens] = self._extend(layer, q, k, v, part, batch)
        return out

    def _decode(self, layer: int, q: Tensor, plan: SDPAPlan) -> Tensor:
        """q: [D, num_heads, head_dim], one token a request."""
        assert plan.decode_blocks is not None
        spec = self.specs[layer]
        keys, values = self.kv.gather(layer, plan.decode_blocks, plan.decode_rows, plan.decode_len)
        if plan.decode_stale is not None:
            for gathered in (keys, values):
                gathered.flatten(0, 1).index_fill_(0, plan.decode_stale, 0.0)
        keys, values = keys[:, : plan.decode_len], values[:, : plan.decode_len]
        grouped = q.unflatten(1, (spec.num_kv_heads, -1))
        out = F.scaled_dot_product_attention(
            grouped,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=plan.decode_masks.get(spec.window),
            scale=spec.scale,
        )
        return out.flatten(1, 2)

    def _extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, part: Extend, batch: StepBatch
    ) -> Tensor:
        """Attention of several tokens of one request: [query_len, num_heads, head_dim]."""
        spec = self.specs[layer]
        # Nothing cached before: the new keys are all there are. But what is compressed is seen as
        # it is stored, also by the step that stores it: tokens would depend on how a prompt is cut
        # otherwise.
        if part.query_len == part.seq_len and not self.kv.compressed:
            keys, values = k[part.tokens][None], v[part.tokens][None]
        else:
            blocks = -(-part.seq_len // self.kv.layout.block_size)
            keys, values = self.kv.gather(
                layer, batch.block_table[part.row, :blocks], 1, part.seq_len
            )
            keys, values = keys[:, : part.seq_len], values[:, : part.seq_len]
        mask = part.masks.get(spec.window)
        group = spec.num_heads // spec.num_kv_heads
        if mask is not None and group > 1 and q.is_cuda:
            # Of a GPU's kernels only the plain one, which stores all scores, takes a mask and fewer
            # heads of keys.
            keys, values, group = (
                keys.repeat_interleave(group, 2),
                values.repeat_interleave(group, 2),
                1,
            )
        out = F.scaled_dot_product_attention(
            q[part.tokens][None].transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=group > 1,
        )
        return out[0].transpose(0, 1)
