"""attention=flex: torch's flex_attention, a kernel that is compiled from a mask function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from minivllm.attention.batch import StepBatch
from minivllm.attention.options import FlexAttentionOptions
from minivllm.attention.ragged import sequence_slots
from minivllm.cache.eviction.policies import require_unscored
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.errors import BadInput

QUERIES = 128  # of a tile, which requests share
MOST_KEYS = 128  # of a tile, within one block of the cache
LEAST_KEYS = 16  # least keys of one product of the compiled kernel
# Variants of the compiled kernel: windows, caps, and sizes of one, which torch compiles apart.
VARIANTS = 64


@dataclass(frozen=True)
class FlexPlan:
    """What the layers of one step share."""

    masks: dict[int | None, BlockMask]  # by window
    # int64 [keys], slots of the gathered keys; None: the kernel gets the whole cache.
    slots: Tensor | None


class FlexBackend:
    """One call for the whole ragged batch (FlexAttention, Dong et al. 2024).

    Compiled, the kernel gets the whole cache. Its mask maps the place of a key in the cache to the
    place in the query's own sequence, and a table of tiles lists the parts of the cache that a tile
    of queries reads, as in torch's own paged attention. Keys in a tile that are not of the sequence
    get a weight of zero, so they must be finite. Not compiled, the backend computes scores for
    every pair, so it gathers the keys of the batch first: slow, for tests and for inspection.

    Args:
        specs: attention of each layer.
        kv: the cache.
        options: the knobs; None takes their defaults.

    Raises:
        BadInput: the cache is compressed; eviction goes by attention, which is not returned;
            compiled, blocks are not of a multiple of 16 tokens, or there is no GPU.
    """

    name = "flex"

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv: KVCache,
        options: FlexAttentionOptions | None = None,
    ) -> None:
        on_gpu = kv.parts[0][0].is_cuda
        compiles = (options or FlexAttentionOptions()).compile
        self.compiled = on_gpu if compiles == "auto" else compiles
        require_unscored(self.name, kv.layout.eviction)
        if kv.compressed:
            raise BadInput(
                "attention=flex reads no compressed cache; use attention=sdpa or "
                "cache.kv_dtype=auto"
            )
        self.keys = gcd(kv.layout.block_size, MOST_KEYS)
        if self.compiled and self.keys < LEAST_KEYS:
            raise BadInput(
                f"attention=flex needs blocks of a multiple of {LEAST_KEYS} tokens, not "
                f"{kv.layout.block_size}; use cache.block_size=16, or attention.compile=false"
            )
        self.specs, self.kv = specs, kv
        self.windows = {spec.window for spec in specs}
        self.score_mods = {spec.soft_cap: _capped(spec.soft_cap) for spec in specs}
        self.attend: Callable[..., Any] = flex_attention
        if self.compiled:
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, VARIANTS
            )
            kernel_options = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_N": min(self.keys, 64)}
            self.attend = partial(
                torch.compile(flex_attention, fullgraph=True), kernel_options=kernel_options
            )
        self.library = (
            f"torch {torch.__version__}, {'compiled' if self.compiled else 'not compiled'}"
        )
        self.counters = {"launches": 0}

    def prepare(self, batch: StepBatch) -> FlexPlan:
        """The place of the keys, and for each window the tiles of keys that each tile of queries
        reads."""
        device, requests = batch.block_table.device, len(batch.seq_lens_host)
        rows, index, slots = sequence_slots(batch, self.kv.layout.block_size)
        if self.compiled:
            page, pages = self.kv.layout.block_size, self.kv.layout.num_blocks
            physical = slots // page
        else:
            page, pages = 1, len(slots)
            physical = torch.arange(pages, device=device)
        logical = torch.full((requests, pages), -1, dtype=torch.int32, device=device)
        logical[rows, physical] = (index // page).int()
        count = len(batch.token_ids)
        owner = torch.repeat_interleave(batch.query_start_loc.diff(), output_size=count)
        positions = (
            torch.arange(count, device=device) + (batch.seq_lens - batch.query_start_loc[1:])[owner]
        )
        masks = {}
        for window in self.windows:
            number, order = self._tiles(batch, logical, page, window)
            masks[window] = BlockMask.from_kv_blocks(
                number[None, None],
                order[None, None],
                BLOCK_SIZE=(QUERIES, min(page, self.keys)),
                mask_mod=_visible(owner, positions, logical, page, window),
                seq_lengths=(count, pages * page),
                compute_q_blocks=False,  # for a backward pass alone
            )
        return FlexPlan(masks, None if self.compiled else slots)

    def _tiles(
        self, batch: StepBatch, logical: Tensor, page: int, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """For each tile of queries: how many tiles of keys it looks at (int32 [tiles]), and which
        ones come first in the order of all of them (int32 [tiles, all])."""
        # one request's part of one tile: tile, row, its first and its last position
        pieces, start = [], 0
        for row, (query_len, seq_len) in enumerate(
            zip(batch.query_lens_host, batch.seq_lens_host, strict=True)
        ):
            end = start + query_len
            for tile in range(start // QUERIES, (end - 1) // QUERIES + 1):
                first, last = max(start, tile * QUERIES), min(end, (tile + 1) * QUERIES) - 1
                pieces.append((tile, row, seq_len - end + first, seq_len - end + last))
            start = end
        tiles, rows, firsts, lasts = torch.tensor(pieces, device=logical.device).unbind(1)
        step = min(page, self.keys)
        offsets = torch.arange(0, page, step, device=logical.device)
        # below zero: not of this request
        begins = (logical[rows, :, None] * page + offsets).flatten(1)
        seen = (begins >= 0) & (begins <= lasts[:, None])
        if window is not None:
            seen &= begins + step > firsts[:, None] - window + 1
        by_tile = torch.zeros(
            pieces[-1][0] + 1, seen.shape[1], dtype=torch.int32, device=logical.device
        )
        looked_at = by_tile.index_add_(0, tiles, seen.int()) > 0
        order = looked_at.int().argsort(dim=1, descending=True, stable=True)
        return looked_at.sum(1, dtype=torch.int32), order.int()

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan: FlexPlan = batch.attention
        spec = self.specs[layer]
        self.kv.write(layer, batch.slot_mapping, k, v)
        if plan.slots is None:
            keys, values = (part.flatten(0, 1) for part in self.kv.parts[layer])
        else:
            keys, values = self.kv.gather_slots(layer, plan.slots)
        self.counters["launches"] += 1
        out: Tensor = self.attend(
            *(x.transpose(0, 1)[None] for x in (q, keys, values)),
            score_mod=self.score_mods[spec.soft_cap],
            block_mask=plan.masks[spec.window],
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        return out[0].transpose(0, 1)


def _visible(
    owner: Tensor, positions: Tensor, logical: Tensor, page: int, window: int | None
) -> Callable[..., Tensor]:
    """The mask: whether a token of the step may see a place of the cache.

    Args:
        owner: int64 [T], row of the batch that each token belongs to.
        positions: int64 [T], place of each token in its sequence.
        logical: int32 [R, pages], which page of its sequence a page of the cache is to each
            request; -1: none.
        page: tokens of a page.
        window: as AttentionSpec has it.
    """

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = logical[owner[query], key // page]
        position = index * page + key % page
        seen = (index >= 0) & (position <= positions[query])
        return seen if window is None else seen & (position > positions[query] - window)

    return mask


def _capped(soft_cap: float | None) -> Callable[..., Tensor] | None:
    """What is done to a score."""
    if soft_cap is None:
        return None

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return cap
