"""cache=paged: small blocks handed out as sequences grow."""

from __future__ import annotations

from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.spec import CacheLayout
from minivllm.cache.tiers.disk import scratch_file
from minivllm.errors import BadInput


class PagedCache:
    """Paged KV cache (PagedAttention, Kwon et al. 2023): at most one block a request is partly empty.

    Args:
        block_size: tokens a block.
        num_blocks: blocks to allocate; None takes what `memory_fraction` allows, and no more than
            `max_num_seqs` requests of full length could use.
        memory_fraction: share of the memory free after loading the weights.
        prefix_caching: keep what finished requests computed, for prompts that start with the same tokens.
        swap_space_gb: host memory for requests that `batching.preemption=swap` moves out, in GB.
        offload_gb: host memory for blocks that prefix caching has no more room for on the device, in GB (1e9 bytes).
        offload_disk_gb: most that a file takes for blocks that leave that memory, in GB.
        offload_dir: folder of that file; None is the system's folder for temporary files.
        kv_dtype: "auto" stores keys and values in the model's dtype, "int8" and "fp8" (e4m3) in 8 bits, with a scale
            for each head of each token.
        eviction: what a request does that has more tokens than `eviction_budget`: "none" keeps them all,
            "streaming", "h2o" and "snapkv" drop some (see eviction.py).
        eviction_budget: most tokens that a request holds, if it evicts.
        eviction_sinks: first tokens that are never dropped.
        eviction_window: newest tokens that are never dropped; None is half of the budget.

    Raises:
        BadInput: the budget leaves nothing to evict; prefix caching with an eviction that needs scores; `offload_dir` cannot be
            written to.
    """

    name = "paged"

    def __init__(
        self,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.5,
        prefix_caching: bool = False,
        swap_space_gb: float = 4.0,
        offload_gb: float = 0.0,
        offload_disk_gb: float = 0.0,
        offload_dir: str | None = None,
        kv_dtype: str = "auto",
        eviction: str = "none",
        eviction_budget: int = 1024,
        eviction_sinks: int = 4,
        eviction_window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.memory_fraction = memory_fraction
        self.prefix_caching = prefix_caching
        self.swap_space_gb = swap_space_gb
        self.offload_gb = offload_gb
        self.offload_disk_gb = offload_disk_gb
        self.offload_dir = offload_dir
        if offload_disk_gb:
            scratch_file(offload_dir).close()  # told now rather than when the model is loaded
        self.kv_dtype = kv_dtype
        self.eviction = make_eviction(
            eviction, block_size, eviction_budget, eviction_sinks, eviction_window, prefix_caching
        )

    def layout(
        self, *, bytes_per_token: int, available_bytes: int, max_model_len: int, max_num_seqs: int
    ) -> CacheLayout:
        """See CachePolicy."""
        usable = self.num_blocks
        if usable is None:
            affordable = int(available_bytes * self.memory_fraction) // (bytes_per_token * self.block_size)
            longest = -(-max_model_len // self.block_size)
            if self.eviction is not None:
                longest = min(longest, self.eviction.budget)
            usable = min(affordable, longest * max_num_seqs)
        if usable < 1:
            raise BadInput(
                f"the KV cache gets no block of {self.block_size} tokens: {self.memory_fraction:g} of "
                f"{available_bytes / 2**20:.0f} MiB free is too little; raise cache.memory_fraction, "
                "or set cache.num_blocks"
            )
        block_bytes = bytes_per_token * self.block_size
        for name in ("offload_gb", "offload_disk_gb"):
            if 0 < getattr(self, name) * 1e9 < block_bytes:
                raise BadInput(
                    f"cache.{name}={getattr(self, name):g} holds not one block of {block_bytes / 1e9:g} GB; raise it"
                )
        return CacheLayout(
            self.block_size,
            usable + 1,
            self.prefix_caching,
            host_slots=int(self.swap_space_gb * 1e9) // block_bytes,
            offload_slots=int(self.offload_gb * 1e9) // block_bytes,
            disk_records=int(self.offload_disk_gb * 1e9) // block_bytes,
            offload_dir=self.offload_dir,
            eviction=self.eviction,
        )
