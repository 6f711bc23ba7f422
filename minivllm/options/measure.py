"""The knobs of `runtime` and `measure`: on what is measured, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from minivllm.options.base import Options, knob
from minivllm.platform.threads import wanted_cores

MAX_REPEATS = 10_000  # each is a record of its own


@dataclass(frozen=True)
class RuntimeOptions(Options):
    """runtime."""

    group = "runtime"
    device: str = "auto"
    threads: int | None = knob(None, at_least=1, at_most=1024)
    cores: str | int | None = None
    determinism: Literal["off", "run", "batch"] = "off"
    cpu_kernels: Literal["auto", "on", "off"] = "auto"
    fused_kernels: Literal["auto", "triton", "off"] = "auto"
    linear_kernel: Literal["torch", "triton"] = "torch"
    moe: Literal["auto", "grouped", "loop"] = "auto"
    native_layers: bool = True
    trim_last_layer: bool = True
    overlap: bool = False
    cuda_graphs: bool | Literal["auto"] = "auto"
    compile: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise self.bad("device", "must be auto, cpu, cuda or cuda:<number>")
        wanted_cores({"cores": self.cores})
        if self.compile and (self.cpu_kernels == "on" or self.fused_kernels == "triton"):
            knob = "cpu_kernels=on" if self.cpu_kernels == "on" else "fused_kernels=triton"
            raise self.bad(
                "compile",
                f"cannot look into the kernels of runtime.{knob}: use auto or off there, or compile=false",
            )
        if self.compile and self.determinism == "batch":
            raise self.bad(
                "compile",
                "makes kernels that may differ between one token and several: use determinism=run or compile=false",
            )


@dataclass(frozen=True)
class SLOOptions(Options):
    """measure.slo: what a request must meet to count for goodput, in milliseconds."""

    group = "measure.slo"
    ttft_ms: float | None = knob(None, above=0)
    tpot_ms: float | None = knob(None, above=0)
    e2e_ms: float | None = knob(None, above=0)


@dataclass(frozen=True)
class PriceOptions(Options):
    """measure.price: money a device-hour and a kilowatt-hour."""

    group = "measure.price"
    device_hour: float | None = knob(None, at_least=0)
    kwh: float | None = knob(None, at_least=0)
    currency: str = "USD"


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
    isolation: Literal["cell", "run"] = "cell"
    slo: SLOOptions = field(default_factory=SLOOptions)
    price: PriceOptions = field(default_factory=PriceOptions)
    quality: bool = False
    roofline: bool = True
    memory_limit_gb: float | None = knob(None, above=0)
    telemetry_interval_s: float = knob(0.2, at_least=0.01)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_ci is not None and self.max_repeats < self.repeats:
            raise self.bad("max_repeats", f"must be at least measure.repeats={self.repeats}")


@dataclass(frozen=True)
class QualityOptions(Options):
    """quality: what `measure.quality` and `task=quality` measure, on which text, against which precision."""

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
                "stride", f"must be at most quality.window={self.window}, or tokens would be left out"
            )
