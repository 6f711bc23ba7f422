"""The knobs of `attention`, `batching` and `cache`: how requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.cache.eviction.policies import make_eviction
from minivllm.options.base import Options, knob, option


@option(
    "minivllm.attention.auto.select",
    "minivllm.attention.eager.EagerBackend",
    "minivllm.attention.invariant.InvariantBackend",
    "minivllm.attention.kernels.cpu.CPUBackend",
    "minivllm.attention.sdpa.SDPABackend",
    "minivllm.attention.torch_varlen.TorchVarlenBackend",
)
@dataclass(frozen=True)
class PlainAttentionOptions(Options):
    """A backend that has no knobs."""

    group = "attention"


@option("minivllm.attention.triton.TritonBackend")
@dataclass(frozen=True)
class TritonAttentionOptions(Options):
    """attention=triton."""

    group = "attention"
    split_size: int | None = knob(512, at_least=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_size is not None and self.split_size & (self.split_size - 1):
            raise self.bad("split_size", "must be a power of two, or null (never split)")


@option("minivllm.attention.flex.FlexBackend")
@dataclass(frozen=True)
class FlexAttentionOptions(Options):
    """attention=flex."""

    group = "attention"
    compile: bool | Literal["auto"] = "auto"


@option("minivllm.attention.flash.FlashBackend")
@dataclass(frozen=True)
class FlashAttentionOptions(Options):
    """attention=flash."""

    group = "attention"
    version: Literal["auto", 2, 3, 4] = "auto"


Preemption = Literal["recompute", "swap", "reserve"]


@option("minivllm.engine.batching.Continuous")
@dataclass(frozen=True)
class ContinuousOptions(Options):
    """batching=continuous."""

    group = "batching"
    max_num_seqs: int = knob(64, at_least=1)
    max_num_batched_tokens: int = knob(2048, at_least=1)
    chunked_prefill: bool = True
    prefill_first: bool = False
    fair_prefill: bool = False
    preemption: Preemption = "recompute"
    watermark: float = knob(0.01, at_least=0, at_most=1)
    aging_s: float = knob(60.0, above=0)
    shed: bool = False


@option("minivllm.engine.batching.Sequential")
@dataclass(frozen=True)
class SequentialOptions(Options):
    """batching=sequential."""

    group = "batching"
    max_num_batched_tokens: int = knob(2048, at_least=1)
    chunked_prefill: bool = True
    aging_s: float = knob(60.0, above=0)
    shed: bool = False


@option("minivllm.engine.batching.Static")
@dataclass(frozen=True)
class StaticOptions(Options):
    """batching=static."""

    group = "batching"
    max_num_seqs: int = knob(64, at_least=1)
    max_num_batched_tokens: int = knob(2048, at_least=1)
    chunked_prefill: bool = True
    group_by_length: bool = False
    preemption: Preemption = "recompute"
    watermark: float = knob(0.01, at_least=0, at_most=1)
    aging_s: float = knob(60.0, above=0)
    shed: bool = False


@option("minivllm.engine.batching.Dynamic")
@dataclass(frozen=True)
class DynamicOptions(StaticOptions):
    """batching=dynamic."""

    max_wait_ms: float = knob(50.0, at_least=0)


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
        make_eviction(
            self.eviction,
            self.block_size,
            self.eviction_budget,
            self.eviction_sinks,
            self.eviction_window,
            self.prefix_caching,
        )
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
