"""cache=paged: small blocks handed out as sequences grow."""

from __future__ import annotations

from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import CacheDemand, CacheLayout
from minivllm.cache.tiers.sizes import probe_disk, with_tiers


class PagedCache(PagedOptions):
    """Paged KV cache (PagedAttention, Kwon et al. 2023): at most one block of a request is partly
    empty.

    Raises:
        BadInput: the budget leaves nothing to evict; prefix caching with an eviction that needs
            scores; `offload_dir` cannot be written to.
    """

    name = "paged"

    def __post_init__(self) -> None:
        super().__post_init__()
        probe_disk(self)
        self._policy = make_eviction(self)

    def layout(self, demand: CacheDemand) -> CacheLayout:
        usable, policy = self.num_blocks, self._policy
        if usable is None:
            longest = -(-demand.max_model_len // self.block_size)
            if policy is not None:
                longest = min(longest, policy.budget)
            most = longest * demand.max_num_seqs
            usable = demand.affordable(self.memory_fraction, self.block_size, most)
        layout = CacheLayout(self.block_size, usable + 1, self.prefix_caching, eviction=policy)
        return with_tiers(layout, self, demand.bytes_per_token * self.block_size)
