"""The knobs of `cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class


@option("minivllm.cache.paged.PagedCache")
@dataclass(frozen=True)
class PagedOptions(Options):
    """cache=paged.

    Args:
        block_size: tokens a block.
        num_blocks: blocks to allocate; None takes what `memory_fraction` allows, and no more than
            `max_num_seqs` requests of full length could use.
        memory_fraction: share of the memory free after loading the weights.
        prefix_caching: keep what finished requests computed, for prompts that start with the same
            tokens.
        swap_space_gb: host memory for requests that `batching.preemption=swap` moves out, in GB.
        offload_gb: host memory for blocks that prefix caching has no more room for on the device,
            in GB (1e9 bytes).
        offload_disk_gb: most that a file takes for blocks that leave that memory, in GB.
        offload_dir: folder of that file; None is the system's folder for temporary files.
        kv_dtype: "auto" stores keys and values in the model's dtype, "int8" and "fp8" (e4m3) in 8
            bits, with a scale for each head of each token.
        eviction: what a request does that has more tokens than `eviction_budget`: "none" keeps them
            all, "streaming", "h2o" and "snapkv" drop some (see eviction/policies.py); a class of
            the user's own is {"_target_": "my_package.MyEviction"} with its knobs beside.
        eviction_budget: most tokens that a request holds, if it evicts.
        eviction_sinks: first tokens that are never dropped.
        eviction_window: newest tokens that are never dropped; None is half of the budget.
    """

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
    eviction: Literal["none", "streaming", "h2o", "snapkv"] | dict[str, Any] = "none"
    eviction_budget: int = knob(1024, at_least=1)
    eviction_sinks: int = knob(4, at_least=0)
    eviction_window: int | None = knob(None, at_least=1)

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
    """cache=contiguous.

    Args:
        num_sequences: slabs; None takes what `memory_fraction` allows, at most `max_num_seqs`.
        memory_fraction: share of the memory free after loading the weights.
    """

    group = "cache"
    num_sequences: int | None = knob(None, at_least=1)
    memory_fraction: float = knob(0.5, above=0, at_most=1)


@option("minivllm.cache.none.NoCache")
@dataclass(frozen=True)
class NoCacheOptions(Options):
    """cache=none.

    Args:
        memory_fraction: share of the memory free after loading the weights that a step's keys and
            values may take.
    """

    group = "cache"
    memory_fraction: float = knob(0.5, above=0, at_most=1)
