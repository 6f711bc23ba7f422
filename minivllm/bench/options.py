"""The knobs of `measure` and `quality`: how it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class

MAX_REPEATS = 10_000  # each is a record of its own


@dataclass(frozen=True)
class SLOOptions(Options):
    """measure.slo: what a request must meet to count for goodput, in milliseconds."""

    group = "measure.slo"
    ttft_ms: float | None = knob(None, above=0)
    """Longest time to the first token, milliseconds; null: any."""
    tpot_ms: float | None = knob(None, above=0)
    """Longest mean time of a further token, milliseconds; null: any."""
    e2e_ms: float | None = knob(None, above=0)
    """Longest time from arrival to the last token, milliseconds; null: any."""


@dataclass(frozen=True)
class PriceOptions(Options):
    """measure.price: money a device-hour and a kilowatt-hour, and a million tokens of prompts
    (those that the prefix cache had apart) and of answers."""

    group = "measure.price"
    device_hour: float | None = knob(None, at_least=0)
    """Money for an hour of a device; null: no cost is reported."""
    kwh: float | None = knob(None, at_least=0)
    """Money for a kilowatt-hour."""
    million_input: float | None = knob(None, at_least=0)
    """Money for a million tokens of prompts that are computed."""
    million_cached: float | None = knob(None, at_least=0)
    """Money for a million tokens of prompts that the prefix cache has."""
    million_output: float | None = knob(None, at_least=0)
    """Money for a million tokens of answers."""
    currency: str = "USD"
    """Name of the money."""


@option("measure")
@dataclass(frozen=True)
class MeasureOptions(Options):
    """measure."""

    group = "measure"
    warmup_requests: Literal["auto"] | int = knob("auto", at_least=0)
    """Requests before the measured ones; auto: enough to fill the measured batch once."""
    repeats: int = knob(1, at_least=1, at_most=MAX_REPEATS)
    """Measurements of each cell, a record each."""
    target_ci: float | None = knob(None, above=0)
    """For sweeps: repeat until confidence intervals are narrower than this (0.05: 5 per cent)."""
    max_repeats: int = knob(40, at_least=1, at_most=MAX_REPEATS)
    """Most repeats with target_ci."""
    prefix_cache: Literal["cold", "warm"] = "cold"
    """cold: emptied before measuring; warm: all prompts of the workload are in it
    (cache.prefix_caching)."""
    seed: int = knob(0, at_least=0)
    """Seed of workload, arrivals and sampling."""
    timeout_s: float = knob(1800, above=0)
    """A measurement that takes longer is stopped and recorded as a timeout."""
    duration_s: float | None = knob(None, above=0, unasked=True)
    """Measured are requests due within so many seconds of the start; null: all of the workload."""
    cooldown_s: float = knob(0.0, at_least=0, unasked=True)
    """With duration_s: go on with the load for so long, unmeasured."""
    max_error_rate: float | None = knob(None, at_least=0, at_most=1)
    """Share of requests that may fail; above it the measurement stops (null: it goes on, and none
    may fail)."""
    isolation: Literal["cell", "run"] = "cell"
    """cell: one process for all repeats of an engine; run: a process for each measurement, and arms
    take turns."""
    slo: SLOOptions = field(default_factory=SLOOptions)
    """Goodput counts the requests that meet all of these objectives."""
    price: PriceOptions = field(default_factory=PriceOptions)
    """prices, from which the cost is reported; null: none is."""
    quality: bool = False
    """true: also measure perplexity, KL and more after the measured window, see `quality`."""
    roofline: bool = True
    """true: measure bandwidth and matrix rate first, the limits of a cell."""
    memory_limit_gb: float | None = knob(None, above=0)
    """Limit of the worker's resident memory; above it the cell is stopped and recorded as oom."""
    telemetry_interval_s: float = knob(0.2, at_least=0.01)
    """Time between two samples of power, memory and clocks."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of your own, by their names in the record: {mine: {_target_:
    my_package.MyMetric}}."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Checks of your own: {mine: {_target_: my_package.MyCheck}}. docs/guides/your-own-check.md."""
    events: bool = False
    """true: keep what happened in each step, for task=view. docs/live-view.md."""
    events_mb: float = knob(64, above=0, at_most=1024)
    """Most text of these events; later ones are left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_ci is not None and self.max_repeats < self.repeats:
            raise self.bad("max_repeats", f"must be at least measure.repeats={self.repeats}")
        if self.cooldown_s and self.duration_s is None:
            raise self.bad("cooldown_s", "follows a measurement that ends by measure.duration_s")
        for name, example in (("metrics", "MyMetric"), ("checks", "MyCheck")):
            if not all(map(names_class, getattr(self, name).values())):
                problem = "must name a class each, such as {mine: {_target_: my_package.%s}}"
                raise self.bad(name, problem % example)

    @property
    def sent_s(self) -> float | None:
        """Seconds after the start from which on no request is sent; None is no end."""
        return None if self.duration_s is None else self.duration_s + self.cooldown_s


@option("quality")
@dataclass(frozen=True)
class QualityOptions(Options):
    """quality: what `measure.quality` and `task=quality` measure, on which text, against which
    precision."""

    group = "quality"
    text: str | None = None
    """A UTF-8 file; null: the held-out text of the embedded model."""
    max_tokens: int | None = knob(8192, at_least=2)
    """Tokens of the text; null: all."""
    window: int | None = knob(None, at_least=2)
    """Tokens in each forward pass; null: 1024, or a shorter context."""
    stride: int | None = knob(None, at_least=1)
    """Tokens from one window to the next; null: half a window."""
    reference: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the reference."""
    max_reference_gb: float = knob(2.0, above=0)
    """Limit of the reference's stored log-probabilities; KL is over the tokens that fit."""
    prompts: int = knob(8, at_least=1)
    """Number of prompts from the text, each continued greedily."""
    prompt_len: int = knob(64, at_least=1)
    """Tokens of such a prompt."""
    output_len: int = knob(64, at_least=1)
    """Tokens that continue it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise self.bad(
                "stride",
                f"must be at most quality.window={self.window}, or tokens would be left out",
            )
