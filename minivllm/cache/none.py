"""cache=none: nothing is kept from one step to the next."""

from __future__ import annotations

from minivllm.cache.options import NoCacheOptions
from minivllm.cache.spec import CacheDemand, CacheLayout


class NoCache(NoCacheOptions):
    """Every step computes whole sequences again: the ablation that shows what the KV cache saves.

    A request holds room for its keys and values during a step alone: one region as long as the
    context."""

    name = "none"
    kv_dtype = "auto"

    def layout(self, demand: CacheDemand) -> CacheLayout:
        length = demand.max_model_len
        slabs = demand.affordable(self.memory_fraction, length, demand.max_num_seqs)
        return CacheLayout(length, slabs + 1, retains_kv=False)
