"""The knobs of `workload` and `arrival`: what is asked, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minivllm.options.base import Options, knob, option

# A number of tokens, or a distribution of it, which the workload checks (minivllm/bench/lengths.py).
Length = int | dict[str, Any]


@option("minivllm.bench.workloads.Smoke")
@dataclass(frozen=True)
class SmokeOptions(Options):
    """workload=smoke."""

    group = "workload"
    num_requests: int = knob(16, at_least=1)
    input_len: Length = knob(64, at_least=1)
    output_len: Length = knob(32, at_least=1)
    ignore_eos: bool = True


@option("minivllm.bench.workloads.Chat")
@dataclass(frozen=True)
class ChatWorkloadOptions(Options):
    """workload=chat."""

    group = "workload"
    num_requests: int = knob(32, at_least=1)
    input_len: Length = knob(factory=lambda: {"distribution": "uniform", "min": 64, "max": 256}, at_least=1)
    output_len: Length = knob(factory=lambda: {"distribution": "uniform", "min": 32, "max": 128}, at_least=1)
    ignore_eos: bool = True


@option("minivllm.bench.workloads.File")
@dataclass(frozen=True)
class FileOptions(Options):
    """workload=file."""

    group = "workload"
    path: str | None = None
    num_requests: int | None = knob(None, at_least=1)
    output_len: int = knob(128, at_least=1)
    ignore_eos: bool = False


@option("minivllm.bench.traces.Trace")
@dataclass(frozen=True)
class TraceOptions(Options):
    """workload=trace."""

    group = "workload"
    path: str | None = None
    format: Literal["auto", "azure", "mooncake", "burstgpt"] = "auto"
    num_requests: int | None = knob(None, at_least=1)
    length_scale: float = knob(1.0, above=0)
    start_s: float = knob(0.0, at_least=0)
    duration_s: float | None = knob(None, above=0)
    block_tokens: int = knob(512, at_least=1)
    ignore_eos: bool = True


@option("minivllm.bench.arrivals.Offline")
@dataclass(frozen=True)
class OfflineOptions(Options):
    """arrival=offline."""

    group = "arrival"


@option("minivllm.bench.arrivals.Concurrency")
@dataclass(frozen=True)
class ConcurrencyOptions(Options):
    """arrival=concurrency."""

    group = "arrival"
    concurrency: int = knob(8, at_least=1)


@option("minivllm.bench.arrivals.Poisson")
@dataclass(frozen=True)
class PoissonOptions(Options):
    """arrival=poisson."""

    group = "arrival"
    rate: float = knob(2.0, above=0)


@option("minivllm.bench.arrivals.Replay")
@dataclass(frozen=True)
class ReplayOptions(Options):
    """arrival=replay."""

    group = "arrival"
    rate_scale: float = knob(1.0, above=0)
