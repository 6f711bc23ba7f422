"""The knobs of `batching`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import Options, knob, option

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
