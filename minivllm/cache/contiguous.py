"""cache=contiguous: every request reserves the longest sequence it could become."""

from __future__ import annotations

from minivllm.cache.options import ContiguousOptions
from minivllm.cache.spec import CacheDemand, CacheLayout


class ContiguousCache(ContiguousOptions):
    """KV cache with one slab of `max_model_len` tokens a request, as engines had before paging.

    It is the paged cache with one block a sequence: scheduler, runner and attention are the same
    code, and only the waste differs."""

    name = "contiguous"
    kv_dtype = "auto"

    def layout(self, demand: CacheDemand) -> CacheLayout:
        length, slabs = demand.max_model_len, self.num_sequences
        if slabs is None:
            slabs = demand.affordable(self.memory_fraction, length, demand.max_num_seqs)
        return CacheLayout(length, slabs + 1)
