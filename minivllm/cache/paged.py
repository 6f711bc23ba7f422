"""cache=paged: small blocks handed out as sequences grow, and the sizes of the tiers below the
device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import CacheDemand, CacheLayout
from minivllm.cache.tiers.disk import scratch_file
from minivllm.errors import BadInput

if TYPE_CHECKING:
    from minivllm.cache.eviction.policies import Eviction


def probe_disk(options: PagedOptions) -> None:
    """Check before a model is loaded that the disk tier's file can be made.

    Raises:
        BadInput: `cache.offload_dir` cannot be written to.
    """
    if options.offload_disk_gb:
        scratch_file(options.offload_dir).close()


def with_tiers(layout: CacheLayout, options: PagedOptions, block_bytes: int) -> CacheLayout:
    """A layout with as many slots in host memory and records on disk as the knobs allow.

    Raises:
        BadInput: a tier holds not one block of `block_bytes` bytes.
    """
    for name in ("offload_gb", "offload_disk_gb"):
        if 0 < getattr(options, name) * 1e9 < block_bytes:
            raise BadInput(
                f"cache.{name}={getattr(options, name):g} holds not one block of "
                f"{block_bytes / 1e9:g} GB; raise it"
            )
    return replace(
        layout,
        host_slots=int(options.swap_space_gb * 1e9) // block_bytes,
        offload_slots=int(options.offload_gb * 1e9) // block_bytes,
        disk_records=int(options.offload_disk_gb * 1e9) // block_bytes,
        offload_dir=options.offload_dir,
    )


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
        self._policy: Eviction | None = None
        if self.eviction != "none":
            from minivllm.cache.eviction.policies import make_eviction

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
