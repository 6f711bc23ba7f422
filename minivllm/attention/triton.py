"""attention=triton: this project's kernels over the paged cache, for every mix of prompts and
decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.attention.kernels import tiles
from minivllm.attention.kernels.tiles import Tiles
from minivllm.attention.options import TritonAttentionOptions
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, require_unscored
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.kernels.transfer import upload

# (query, head) pairs of a tile where requests have few queries: the minimum of a tensor core.
DECODE_ROWS = 16


def _table(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Tiles as int32 [n, 2]; a GPU copies them without a wait."""
    return upload(np.array(pairs, np.int32).ravel(), device).view(-1, 2)


class TritonBackend:
    """Reads keys and values in place, compressed ones too; writes them in one kernel with norm and
    rotation.

    Requests with few queries are computed in one launch, in narrow tiles and, where sequences are
    long, split over their keys. All other requests are computed in a second launch, so that they do
    not widen the tiles of the first.

    Args:
        specs: attention of each layer.
        kv: the cache.
        options: the knobs; None takes their defaults.
        context: with `invariant`, tiles have one shape and no splits, so that a query's result is
            the same to the bit whatever else is computed in the step.

    Raises:
        BadInput: no GPU and no interpreter; Triton is missing; eviction goes by attention.
    """

    name = "triton"
    supports_graphs = True  # tiles depend on an upper bound of lengths

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv: KVCache,
        options: TritonAttentionOptions | None = None,
        context: BuildContext | None = None,
    ) -> None:
        try:
            from minivllm.attention.kernels import paged, write
            from minivllm.kernels.common import check_device
        except ImportError as error:
            raise BadInput(
                f"attention=triton needs triton, which does not load ({error}): pip install "
                "triton, or use attention=sdpa"
            ) from None
        check_device("attention=triton", kv.parts[0][0].device, "attention=sdpa")
        require_unscored(self.name, kv.layout.eviction)
        self.paged, self.write = paged, write
        self.specs, self.kv = specs, kv
        self.invariant = context is not None and context.invariant
        split_size = (options or TritonAttentionOptions()).split_size
        self.split_size = None if self.invariant else split_size
        self.processors = tiles.processors(kv.parts[0][0].device)
        self.counters = {"launches": 0, "launches_split": 0}
        # Layers of one shape share their tiles.
        self._shapes = {(spec.num_heads, spec.num_kv_heads, spec.head_dim): spec for spec in specs}
        # Tiles of batches in which every request has one query, by number of requests.
        self._one_each: dict[int, Tensor] = {}

    def prepare(self, batch: StepBatch) -> dict[tuple[int, int, int], tuple[Tiles, ...]]:
        """The tiles of each launch, for each shape of heads that the layers have."""
        return {key: self._tiles(spec, batch) for key, spec in self._shapes.items()}

    def _tiles(self, spec: AttentionSpec, batch: StepBatch) -> tuple[Tiles, ...]:
        few = tiles.tile_shape(spec, DECODE_ROWS)
        rows = tiles.prompt_rows(spec.head_dim, self.kv.dtype, self.kv.compressed)
        many = tiles.tile_shape(spec, rows)
        lens = batch.query_lens_host
        if self.invariant:
            return (self._launch(spec, range(len(lens)), batch, *many),)
        if max(lens) <= few[1]:
            return (self._launch(spec, range(len(lens)), batch, *few, self.split_size),)
        narrow = [row for row, count in enumerate(lens) if count <= few[1]]
        wide = [row for row, count in enumerate(lens) if count > few[1]]
        launches = [self._launch(spec, wide, batch, *many)]
        if narrow:
            launches.append(self._launch(spec, narrow, batch, *few, self.split_size))
        return tuple(launches)

    def _launch(
        self,
        spec: AttentionSpec,
        rows: Sequence[int],
        batch: StepBatch,
        block_m: int,
        queries: int,
        split_size: int | None = None,
    ) -> Tiles:
        """Tiles of the requests in `rows` of the batch."""
        lens, device = batch.query_lens_host, batch.block_table.device
        if len(batch.token_ids) == len(rows) == len(lens):
            count, queries = len(rows), 1
            if count not in self._one_each:
                self._one_each[count] = _table([(row, 0) for row in rows], device)
            table = self._one_each[count]
        else:
            pairs = [(row, first) for row in rows for first in range(0, lens[row], queries)]
            # Tiles with the most keys begin first, so that none of them ends last.
            pairs.sort(key=lambda pair: lens[pair[0]] - batch.seq_lens_host[pair[0]] - pair[1])
            table, count = _table(pairs, device), len(pairs)
        longest = max(batch.seq_lens_host[row] for row in rows)
        size = tiles.piece_size(split_size, longest, count * spec.num_kv_heads, self.processors)
        return Tiles(table, count, block_m, queries, -(-longest // size) if size else 1, size)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        self.write.write(self.kv, layer, batch.slot_mapping, k, v)
        return self._attend(layer, q, batch)

    def forward_projected(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: tuple[Tensor, float, str] | None,
        batch: StepBatch,
    ) -> Tensor:
        """Attention of queries, keys and values as the projection returns them: `forward` after
        norm and rotation.

        Args:
            layer: index of the layer.
            qk: [tokens, num_heads + num_kv_heads, head_dim]; v: [tokens, num_kv_heads, head_dim].
            cos, sin: [tokens, 1, rotated dimensions].
            norm: of queries and keys: weight [num_heads + num_kv_heads, head_dim], epsilon, and
                "plain" or "gemma".
            batch: the step.

        Returns:
            [tokens, num_heads, head_dim] in qk's dtype.
        """
        heads = self.specs[layer].num_heads
        q = self.write.rotate_and_write(
            qk, v, heads, cos, sin, norm, self.kv, layer, batch.slot_mapping
        )
        return self._attend(layer, q, batch)

    def _attend(self, layer: int, q: Tensor, batch: StepBatch) -> Tensor:
        spec = self.specs[layer]
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in batch.attention[spec.num_heads, spec.num_kv_heads, spec.head_dim]:
            self.counters["launches"] += 1
            self.counters["launches_split"] += launch.splits > 1
            self.paged.attend(q, self.kv, layer, spec, launch, out, batch)
        return out
