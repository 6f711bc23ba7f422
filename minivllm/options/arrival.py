"""The knobs of `arrival`: when it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.options.base import Options, knob, option

AT_ONCE = "for all requests at the start use arrival=offline"

LEAST, MOST = 1e-6, 1e9  # of a rate: beyond them times are no numbers


@option("minivllm.bench.workloads.arrivals.Offline")
@dataclass(frozen=True)
class OfflineOptions(Options):
    """arrival=offline."""

    group = "arrival"


@option("minivllm.bench.workloads.arrivals.Concurrency")
@dataclass(frozen=True)
class ConcurrencyOptions(Options):
    """arrival=concurrency."""

    group = "arrival"
    concurrency: int = knob(8, at_least=1)


@option("minivllm.bench.workloads.arrivals.Constant", "minivllm.bench.workloads.arrivals.Poisson")
@dataclass(frozen=True)
class RateOptions(Options):
    """arrival=constant and arrival=poisson."""

    group = "arrival"
    rate: float = knob(2.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)


@option("minivllm.bench.workloads.arrivals.Gamma")
@dataclass(frozen=True)
class GammaOptions(RateOptions):
    """arrival=gamma."""

    burstiness: float = knob(0.5, above=0, at_least=LEAST, at_most=MOST)


@option("minivllm.bench.workloads.arrivals.Ramp")
@dataclass(frozen=True)
class RampOptions(Options):
    """arrival=ramp."""

    group = "arrival"
    start_rate: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    end_rate: float = knob(8.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    duration_s: float | None = knob(None, above=0)


@option("minivllm.bench.workloads.arrivals.Replay")
@dataclass(frozen=True)
class ReplayOptions(Options):
    """arrival=replay."""

    group = "arrival"
    rate_scale: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
