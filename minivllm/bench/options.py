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
    tpot_ms: float | None = knob(None, above=0)
    e2e_ms: float | None = knob(None, above=0)


@dataclass(frozen=True)
class PriceOptions(Options):
    """measure.price: money a device-hour and a kilowatt-hour, and a million tokens of prompts
    (those that the prefix cache had apart) and of answers."""

    group = "measure.price"
    device_hour: float | None = knob(None, at_least=0)
    kwh: float | None = knob(None, at_least=0)
    million_input: float | None = knob(None, at_least=0)
    million_cached: float | None = knob(None, at_least=0)
    million_output: float | None = knob(None, at_least=0)
    currency: str = "USD"


@option("measure")
@dataclass(frozen=True)
class MeasureOptions(Options):
    """measure."""

    group = "measure"
    warmup_requests: Literal["auto"] | int = knob("auto", at_least=0)
    repeats: int = knob(1, at_least=1, at_most=MAX_REPEATS)
    target_ci: float | None = knob(None, above=0)
    max_repeats: int = knob(40, at_least=1, at_most=MAX_REPEATS)
    prefix_cache: Literal["cold", "warm"] = "cold"
    seed: int = knob(0, at_least=0)
    timeout_s: float = knob(1800, above=0)
    duration_s: float | None = knob(None, above=0, unasked=True)
    cooldown_s: float = knob(0.0, at_least=0, unasked=True)
    max_error_rate: float | None = knob(None, at_least=0, at_most=1)
    isolation: Literal["cell", "run"] = "cell"
    slo: SLOOptions = field(default_factory=SLOOptions)
    price: PriceOptions = field(default_factory=PriceOptions)
    quality: bool = False
    roofline: bool = True
    memory_limit_gb: float | None = knob(None, above=0)
    telemetry_interval_s: float = knob(0.2, at_least=0.01)
    metrics: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    events: bool = False
    events_mb: float = knob(64, above=0, at_most=1024)

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
    max_tokens: int | None = knob(8192, at_least=2)
    window: int | None = knob(None, at_least=2)
    stride: int | None = knob(None, at_least=1)
    reference: Literal["fp32", "bf16", "fp16"] = "fp32"
    max_reference_gb: float = knob(2.0, above=0)
    prompts: int = knob(8, at_least=1)
    prompt_len: int = knob(64, at_least=1)
    output_len: int = knob(64, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise self.bad(
                "stride",
                f"must be at most quality.window={self.window}, or tokens would be left out",
            )
