"""The knobs of `cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class


@option("minivllm.cache.paged.PagedCache")
@dataclass(frozen=True)
class PagedOptions(Options):
    """cache=paged."""

    group = "cache"
    block_size: int = knob(16, at_least=1)
    """Tokens a block."""
    num_blocks: int | None = knob(None, at_least=1)
    """Blocks to allocate; null: as many as memory_fraction holds, and no more than max_num_seqs
    requests of full length could use."""
    memory_fraction: float = knob(0.5, above=0, at_most=1)
    """Share of the memory that is free after loading the model."""
    prefix_caching: bool = False
    """true: keep blocks of finished requests for prompts that start with the same tokens."""
    swap_space_gb: float = knob(4.0, at_least=0)
    """Host memory for requests that batching.preemption=swap moves out, 10^9 bytes."""
    offload_gb: float = knob(0.0, at_least=0)
    """Host memory for cached prefixes that no longer fit the device, 10^9 bytes; 0: they are
    dropped."""
    offload_disk_gb: float = knob(0.0, at_least=0)
    """Largest file for prefixes that no longer fit host memory, 10^9 bytes; 0: none."""
    offload_dir: str | None = None
    """Folder of that file, and of those of parallel.handover=file; null: the system's folder for
    temporary files."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """auto: keys and values in the model's dtype; int8, fp8 (e4m3): in 8 bits, with a scale for
    each head of each token."""
    eviction: Literal["none", "streaming", "h2o", "snapkv"] | dict[str, Any] = "none"
    """Policy beyond the budget: none keeps all blocks; streaming, h2o, snapkv drop some
    (docs/internals/eviction.md); {_target_: my_package.MyEviction, ...} is your own."""
    eviction_budget: int = knob(1024, at_least=1)
    """Most cached tokens of a request with an eviction policy."""
    eviction_sinks: int = knob(4, at_least=0)
    """First tokens that are never dropped."""
    eviction_window: int | None = knob(None, at_least=1)
    """Newest tokens that are never dropped; null: half of the budget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.eviction, dict) and not names_class(self.eviction):
            raise self.bad("eviction", "must name a class, as {_target_: my_package.MyClass}")
        if self.offload_gb and not self.prefix_caching:
            raise self.bad("offload_gb", "keeps prefixes, so it needs cache.prefix_caching=true")
        if self.offload_disk_gb and not self.offload_gb:
            raise self.bad(
                "offload_disk_gb", "goes through host memory, so it needs cache.offload_gb above 0"
            )


@option("minivllm.cache.contiguous.ContiguousCache")
@dataclass(frozen=True)
class ContiguousOptions(Options):
    """cache=contiguous."""

    group = "cache"
    num_sequences: int | None = knob(None, at_least=1)
    """Sequences that have a region; null: as many as memory_fraction holds, and no more than
    max_num_seqs."""
    memory_fraction: float = knob(0.5, above=0, at_most=1)
    """Share of the memory that is free after loading the model."""


@option("minivllm.cache.none.NoCache")
@dataclass(frozen=True)
class NoCacheOptions(Options):
    """cache=none."""

    group = "cache"
    memory_fraction: float = knob(0.5, above=0, at_most=1)
    """Share of the memory free after loading, for the keys and values of one step."""
