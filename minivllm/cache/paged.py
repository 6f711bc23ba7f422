"""cache=paged: small blocks handed out as sequences grow."""

from __future__ import annotations

from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import CacheLayout
from minivllm.cache.tiers.disk import scratch_file
from minivllm.errors import BadInput


class PagedCache(PagedOptions):
    """Paged KV cache (PagedAttention, Kwon et al. 2023): at most one block a request is partly
    empty.

    Raises:
        BadInput: the budget leaves nothing to evict; prefix caching with an eviction that needs
            scores; `offload_dir` cannot be written to.
    """

    name = "paged"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload_disk_gb:
            scratch_file(self.offload_dir).close()  # told now rather than when the model is loaded
        self._policy = make_eviction(
            self.eviction,
            self.block_size,
            self.eviction_budget,
            self.eviction_sinks,
            self.eviction_window,
            self.prefix_caching,
        )

    def layout(
        self, *, bytes_per_token: int, available_bytes: int, max_model_len: int, max_num_seqs: int
    ) -> CacheLayout:
        """See CachePolicy."""
        usable, policy = self.num_blocks, self._policy
        if usable is None:
            affordable = int(available_bytes * self.memory_fraction) // (
                bytes_per_token * self.block_size
            )
            longest = -(-max_model_len // self.block_size)
            if policy is not None:
                longest = min(longest, policy.budget)
            usable = min(affordable, longest * max_num_seqs)
        if usable < 1:
            raise BadInput(
                f"the KV cache gets no block of {self.block_size} tokens: "
                f"{self.memory_fraction:g} of {available_bytes / 2**20:.0f} MiB free is too "
                "little; raise cache.memory_fraction, or set cache.num_blocks"
            )
        block_bytes = bytes_per_token * self.block_size
        for name in ("offload_gb", "offload_disk_gb"):
            if 0 < getattr(self, name) * 1e9 < block_bytes:
                raise BadInput(
                    f"cache.{name}={getattr(self, name):g} holds not one block of "
                    f"{block_bytes / 1e9:g} GB; raise it"
                )
        return CacheLayout(
            self.block_size,
            usable + 1,
            self.prefix_caching,
            host_slots=int(self.swap_space_gb * 1e9) // block_bytes,
            offload_slots=int(self.offload_gb * 1e9) // block_bytes,
            disk_records=int(self.offload_disk_gb * 1e9) // block_bytes,
            offload_dir=self.offload_dir,
            eviction=policy,
        )
