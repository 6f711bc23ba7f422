"""The knobs of every option, with types, defaults and ranges; free of torch.

Each dataclass describes what one `_target_` of conf/ takes. `minivllm.config` checks a resolved
configuration against them. A class of the user's own has no entry here: it is checked against its
constructor when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

from minivllm.engine.params import SamplingParams
from minivllm.errors import BadInput

T = TypeVar("T")
GROUPS: dict[str, str] = {
    "task": "what to do",
    "model": "which model; model=hf model.path=... takes any checkpoint folder or hub id",
    "quant": "how weights are stored",
    "attention": "attention kernel",
    "batching": "which requests share a step",
    "cache": "where keys and values are kept",
    "decoding": "how tokens are chosen",
    "workload": "what is asked",
    "arrival": "when it is asked",
    "engine": "what is measured",
    "runtime": "device and threads",
    "measure": "repeats, seeds, timeouts, SLOs, prices",
}
OPTIONS: dict[str, type] = {"minivllm.engine.params.SamplingParams": SamplingParams}


def option(*targets: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: these `_target_`s take the knobs of the decorated dataclass."""

    def register(cls: type[T]) -> type[T]:
        OPTIONS.update(dict.fromkeys(targets, cls))
        return cls

    return register


def knob(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field whose value, where it is a number, must lie in a range."""
    rules = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, default_factory=factory, metadata=rules)


class Options:
    """Base of the dataclasses: checks the ranges that `knob` declares.

    Raises:
        BadInput: a value is out of range; names the key.
    """

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if not isinstance(value, int | float):  # null, or a choice of words
                continue
            low, above, high = (item.metadata.get(rule) for rule in ("at_least", "above", "at_most"))
            wanted = [f"at least {low}"] * (low is not None and not value >= low)
            wanted += [f"above {above}"] * (above is not None and not value > above)
            wanted += [f"at most {high}"] * (high is not None and not value <= high)
            if wanted:
                raise self.bad(item.name, f"must be {wanted[0]}")

    def bad(self, name: str, complaint: str) -> BadInput:
        """The error for the knob `name`."""
        key = f"{self.group}.{name}" if self.group else name
        return BadInput(f"{key}={getattr(self, name)!r} {complaint}")


# ---- task


@option("minivllm.tasks.bench.run", "minivllm.tasks.report.run")
@dataclass(frozen=True)
class PlainTaskOptions(Options):
    """A task that has no knobs of its own."""

    group = "task"


@option("minivllm.tasks.generate.run")
@dataclass(frozen=True)
class GenerateOptions(Options):
    """task=generate."""

    group = "task"
    prompt: str | None = None


@option("minivllm.tasks.chat.run")
@dataclass(frozen=True)
class ChatOptions(Options):
    """task=chat."""

    group = "task"
    system: str | None = None
    thinking: Literal["show", "strip"] = "show"


# ---- model


@option("minivllm.models.loading.load_model")
@dataclass(frozen=True)
class ModelOptions(Options):
    """Every option of model; `architecture` is the published config.json, checked by the model."""

    group = "model"
    path: str
    weights: str = "auto"
    max_model_len: int | None = knob(None, at_least=1)
    seed: int = knob(0, at_least=0)
    architecture: dict[str, Any] | None = None


# ---- quant

Dtype = Literal["bfloat16", "float16", "float32"]


@option("minivllm.quant.plain.Plain")
@dataclass(frozen=True)
class PlainQuantOptions(Options):
    """quant=bf16, fp16, fp32."""

    group = "quant"
    dtype: Dtype = "bfloat16"


@option("minivllm.quant.int8.Int8")
@dataclass(frozen=True)
class Int8Options(Options):
    """quant=int8."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    skip: list[str] = field(default_factory=list)


@option("minivllm.quant.int8_mixed.Int8Mixed")
@dataclass(frozen=True)
class Int8MixedOptions(Options):
    """quant=int8_mixed."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    threshold: float = knob(6.0, at_least=0)
    skip: list[str] = field(default_factory=list)


@option("minivllm.quant.nf4.NF4")
@dataclass(frozen=True)
class NF4Options(Options):
    """quant=nf4."""

    group = "quant"
    dtype: Dtype = "bfloat16"
    block_size: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    double_quant: bool = True
    skip: list[str] = field(default_factory=list)


# ---- attention, batching, cache


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


# ---- workload, arrival

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


# ---- engine, runtime, measure


@option("minivllm.bench.engines.MinivllmEngine")
@dataclass(frozen=True)
class MinivllmOptions(Options):
    """engine=minivllm: its knobs are the other groups."""

    group = "engine"


@option("minivllm.peers.transformers.TransformersEngine")
@dataclass(frozen=True)
class TransformersOptions(Options):
    """engine=transformers."""

    group = "engine"
    batch_size: int = knob(32, at_least=1)
    attn_implementation: Literal[
        "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "sdpa"


@dataclass(frozen=True)
class RuntimeOptions(Options):
    """runtime."""

    group = "runtime"
    device: str = "auto"
    threads: int | None = knob(None, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise self.bad("device", "must be auto, cpu, cuda or cuda:<number>")


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
    repeats: int = knob(1, at_least=1)
    seed: int = knob(0, at_least=0)
    timeout_s: float = knob(1800, above=0)
    isolation: Literal["cell", "run"] = "cell"
    slo: SLOOptions = field(default_factory=SLOOptions)
    price: PriceOptions = field(default_factory=PriceOptions)
    roofline: bool = True
    memory_limit_gb: float | None = knob(None, above=0)
    telemetry_interval_s: float = knob(0.2, at_least=0.01)


# ---- plain settings


@dataclass(frozen=True)
class SweepOptions(Options):
    """sweep."""

    group = "sweep"
    name: str | None = None
    fresh: bool = False
    retry: Literal["failed"] | None = None
    dry_run: bool = False
    plan: str | None = None
    job: int | None = knob(None, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")


@dataclass(frozen=True)
class RootOptions(Options):
    """Settings outside every group."""

    name: str | None = None
    runs_dir: str = "runs"
    reports_dir: str = "reports"
    runs: list[str] = field(default_factory=list)
    sweep: SweepOptions = field(default_factory=SweepOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")


def require_folder_name(options: Options, name: str) -> None:
    """Raise BadInput unless the knob is null or can name one folder on any system."""
    value = getattr(options, name)
    if value is not None and not re.fullmatch(r"[\w+=,@-][\w.+=,@ -]{0,120}", value):
        raise options.bad(name, "must be a plain folder name: letters, digits and . _ - + = , @")
