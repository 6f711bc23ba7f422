"""The knobs of `attention`, `batching` and `cache`: how requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.options.base import Options, knob, option


@option(
    "minivllm.attention.auto.select",
    "minivllm.attention.eager.EagerBackend",
    "minivllm.attention.sdpa.SDPABackend",
)
@dataclass(frozen=True)
class PlainAttentionOptions(Options):
    """A backend that has no knobs."""

    group = "attention"


@option("minivllm.engine.batching.Continuous")
@dataclass(frozen=True)
class ContinuousOptions(Options):
    """batching=continuous."""

    group = "batching"
    max_num_seqs: int = knob(64, at_least=1)
    max_num_batched_tokens: int = knob(2048, at_least=1)
    chunked_prefill: bool = True
    preemption: Literal["recompute"] = "recompute"


@option("minivllm.engine.batching.Sequential")
@dataclass(frozen=True)
class SequentialOptions(Options):
    """batching=sequential."""

    group = "batching"
    max_num_batched_tokens: int = knob(2048, at_least=1)
    chunked_prefill: bool = True


@option("minivllm.cache.paged.PagedCache")
@dataclass(frozen=True)
class PagedOptions(Options):
    """cache=paged."""

    group = "cache"
    block_size: int = knob(16, at_least=1)
    num_blocks: int | None = knob(None, at_least=1)
    memory_fraction: float = knob(0.5, above=0, at_most=1)


@option("minivllm.cache.contiguous.ContiguousCache")
@dataclass(frozen=True)
class ContiguousOptions(Options):
    """cache=contiguous."""

    group = "cache"
    num_sequences: int | None = knob(None, at_least=1)
    memory_fraction: float = knob(0.5, above=0, at_most=1)
