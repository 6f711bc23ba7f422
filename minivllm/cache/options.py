"""The knobs of `cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option


@option("minivllm.cache.paged.PagedCache")
@dataclass(frozen=True)
class PagedOptions(Options):
    """cache=paged."""

    group = "cache"
    block_size: int = knob(16, at_least=1)
    num_blocks: int | None = knob(None, at_least=1)
    memory_fraction: float = knob(0.5, above=0, at_most=1)
    prefix_caching: bool = False
    swap_space_gb: float = knob(4.0, at_least=0)
    offload_gb: float = knob(0.0, at_least=0)
    offload_disk_gb: float = knob(0.0, at_least=0)
    offload_dir: str | None = None
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    eviction: Literal["none", "streaming", "h2o", "snapkv"] = "none"
    eviction_budget: int = knob(1024, at_least=1)
    eviction_sinks: int = knob(4, at_least=0)
    eviction_window: int | None = knob(None, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    memory_fraction: float = knob(0.5, above=0, at_most=1)


@option("minivllm.cache.none.NoCache")
@dataclass(frozen=True)
class NoCacheOptions(Options):
    """cache=none."""

    group = "cache"
    memory_fraction: float = knob(0.5, above=0, at_most=1)
