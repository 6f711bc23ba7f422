"""The figures that every measurement has, part by part of a record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.platform.described import measured


@dataclass
class Percentiles:
    """Distribution of one metric; a percentile is null where fewer than 1/(1 - p) samples exist."""

    mean: float | None = None
    """Mean of all samples."""
    p50: float | None = None
    """The median; from 2 samples on."""
    p90: float | None = None
    """From 10 samples on."""
    p95: float | None = None
    """From 20 samples on."""
    p99: float | None = None
    """From 100 samples on."""
    n: int = 0
    """Samples."""


@dataclass
class Window:
    """Throughput over one span of time."""

    duration_s: float | None = measured("s")
    """Length of the window; null if the batch is never full, or no request waits once it is."""
    output_tokens_per_s: float | None = measured("tokens/s", "higher")
    """Output tokens per second of the window."""
    total_tokens_per_s: float | None = measured("tokens/s", "higher")
    """Prompt and output tokens per second of the window."""
    requests_per_s: float | None = measured("requests/s", "higher")
    """Completed requests per second of the window."""


@dataclass
class Attainment:
    """Share of the requests that meet each objective of `measure.slo`; null for one that is not
    set."""

    ttft_ms: float | None = None
    """Of `measure.slo.ttft_ms`."""
    tpot_ms: float | None = None
    """Of `measure.slo.tpot_ms`."""
    e2e_ms: float | None = None
    """Of `measure.slo.e2e_ms`."""
    all: float | None = None
    """Of all objectives that are set."""


@dataclass
class RequestCounts:
    """Which requests the figures count; see the metric `counted`."""

    due: int = 0
    """Requests that were due within the window, failed ones among them."""
    ended: int = 0
    """Those of them whose last token came within the window: `requests_per_s`."""
    good: int | None = None
    """Those of these that meet every objective: goodput; null where goodput is."""
    steady: int | None = None
    """Those that ended within the steady window; null without one."""
    served_s: float | None = measured("s")
    """Seconds from the first arrival to the end of the last that was due."""


@dataclass
class Metrics:
    """What the requests saw, in milliseconds and seconds: each field is the metric of its name,
    whose class describes it."""

    ttft_ms: Percentiles = field(default_factory=Percentiles)
    ttfo_ms: Percentiles | None = None
    itl_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_ms: Percentiles = field(default_factory=Percentiles)
    queue_ms: Percentiles = field(default_factory=Percentiles)
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    goodput_requests_per_s: float | None = None
    goodput_tokens_per_s: float | None = None
    attainment: Attainment | None = None
    duration_s: float | None = None
    num_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    steady: Window = field(default_factory=Window)
    counted: RequestCounts = field(default_factory=RequestCounts)
    own: dict[str, Any] = field(default_factory=dict)
    """Metrics of `measure.metrics`: a number, or an object as `Percentiles`, for each name."""


@dataclass
class Memory:
    """Bytes. Device figures are null on a CPU; there the weights and the pool lie in host
    memory."""

    weights: int | None = measured("bytes", "lower")
    """All weights as the quantisation stores them, scales included, tied tensors once.

    Formula: sum of the tensors' bytes.
    Example: 0.6 billion parameters at 2 bytes are 1.2 GB; at half a byte and a 4-byte scale for
    every 64, 0.34 GB.
    """
    weights_16bit: int | None = measured("bytes", "lower")
    """The same tensors at two bytes per value."""
    linear: int | None = measured("bytes", "lower")
    """The layers' linear layers only, as stored."""
    linear_16bit: int | None = measured("bytes", "lower")
    """The same linear layers at two bytes per value."""
    kv_pool: int | None = measured("bytes", "lower")
    """Size of the key-value cache that was set aside; on a CPU its pages take memory only once they
    are written to.

    Formula: blocks * block_size * bytes of one token's keys and values.
    Example: 1,000 blocks of 16 tokens at 4,096 bytes: 65.5 MB.
    """
    kv_waste: float | None = measured("share", "lower")
    """Share of the allocated cache slots that hold no token, mean over the steps.

    Formula: wasted slots / allocated slots of each step, mean over the steps.
    Example: a request of 20 tokens in 2 blocks of 16 wastes 12 of 32 slots: 0.375.
    """
    device_peak_allocated: int | None = measured("bytes", "lower")
    """Most device memory that torch's allocator had handed out at once; null on a CPU.

    Formula: torch.cuda.max_memory_allocated() of the window.
    Example: weights of 16 GB, a pool of 40 GB and 2 GB of activations at the worst moment: 58 GB.
    """
    device_peak_reserved: int | None = measured("bytes", "lower")
    """Most that torch's allocator held, its reserve included."""
    device_process: int | None = measured("bytes", "lower")
    """The driver's value for the worker (NVML)."""
    host_rss_peak: int | None = measured("bytes", "lower")
    """Greatest resident memory of the worker and what it started (the sum of their own peaks),
    without the probe; of an engine in processes of its own, without the worker; null of a server
    that runs already.

    Formula: the kernel's high-water mark (VmHWM), of loading and of the window, the greater; reset
    before the window where that is allowed.
    Example: Python and torch with 0.4 GB and weights of 1.2 GB: 1.6 GB.
    """
    reason: str | None = None
    """Why no field of these is known."""


@dataclass
class Cost:
    """Money, from `measure.price`."""

    currency: str | None = None
    """`measure.price.currency`."""
    per_million_output_tokens: float | None = measured("currency", "lower")
    """Money for a million output tokens, at the prices of `measure.price`.

    Formula: 1e6 * (price of a device-hour / 3600 + price of a kWh * mean watts / 3.6e6) / output
    tokens a second.
    Example: 3.60 an hour and no price of energy, at 1,000 tokens/s: 1.00.
    """


@dataclass
class DeviceFigures:
    """What one of several devices took. Memory in bytes, at its greatest."""

    name: str | None = None
    """The driver's name of it."""
    memory_used: int | None = measured("bytes", "lower")
    """Most memory in use, by all processes (NVML)."""
    memory_process: int | None = measured("bytes", "lower")
    """By the worker and its child processes."""
    joules: float | None = measured("J", "lower")
    """Its part of the energy."""
    mean_watts: float | None = measured("W", "lower")
    """Its mean power over the window."""
    cost_per_million_output_tokens: float | None = measured("currency", "lower")
    """Its part of the cost."""


@dataclass
class Devices:
    """Several devices: their number, throughput by device, and what each took."""

    count: int = 0
    """Number of devices."""
    output_tokens_per_s: float | None = measured("tokens/s", "higher")
    """Output throughput by device."""
    total_tokens_per_s: float | None = measured("tokens/s", "higher")
    """Throughput of prompt and output tokens by device."""
    requests_per_s: float | None = measured("requests/s", "higher")
    """Completed requests per second by device."""
    each: list[DeviceFigures] = field(default_factory=list)
    """In the order of `runtime.device`."""


@dataclass
class Breakdown:
    """Mean milliseconds a step, by phase."""

    steps: int = 0
    """Engine steps of the window; the other fields are means over them."""
    schedule_ms: float | None = measured("ms", "lower")
    """Scheduling."""
    draft_ms: float | None = measured("ms", "lower")
    """Drafting by a model."""
    prepare_ms: float | None = measured("ms", "lower")
    """Building the tensors."""
    forward_ms: float | None = measured("ms", "lower")
    """The model's part of a mean step; on a GPU its launch: the wait is in sample_ms.

    Formula: sum of the steps' forward times / steps.
    Example: 400 steps that spend 36 s in the model: 90 ms.
    """
    sample_ms: float | None = measured("ms", "lower")
    """Sampling; on a GPU it includes waiting for the model."""
    emit_ms: float | None = measured("ms", "lower")
    """Accepting tokens, ending requests."""
    gap_ms: float | None = measured("ms", "lower")
    """From the end of one step to the start of the next: what the driver takes. Time without any
    request, or waiting for a fuller batch, is no gap.

    Formula: sum of the gaps / steps.
    Example: 400 gaps of 20 ms in all: 0.05 ms.
    """
    collective_ms: float | None = measured("ms", "lower")
    """Of `forward_ms`, what collectives took."""
    collective_share: float | None = measured("share", "lower")
    """Share of communication in a step, the gap after it included; null with one rank, and on GPUs.

    Formula: rank 0's time in collectives, waits for slower ranks included / time of the steps.
    Example: 10 ms in collectives of steps of 40 ms: 0.25.
    """


@dataclass
class Cold:
    """What happens once, before the steady state, in seconds."""

    load_s: float | None = measured("s", "lower")
    """Building the engine, weights included: what is paid once, before anything is measured; the
    same in every record of a worker.

    Formula: seconds from the start of building to the engine being ready, without cold.compile_s.
    Example: 1.2 GB of weights from a disk that reads 0.6 GB/s: 2 s and a little.
    """
    compile_s: float | None = measured("s", "lower")
    """Compiling or capturing."""
    first_batch_s: float | None = measured("s", "lower")
    """The first warm-up batch, in which kernels are chosen and memory is touched for the first
    time; null in later measurements of a worker.

    Formula: seconds of the first warm-up.
    Example: 0.8 s, where the same batch later takes 0.3 s.
    """
    packed_weights: str | None = None
    """What `model.packed_cache` did: "hit", "written", or "off" with the reason; null of another
    engine."""
    packed_write_s: float | None = measured("s", "lower")
    """Seconds of `load_s` in which packed weights were written; null where none were."""
