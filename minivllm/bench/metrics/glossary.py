"""What every figure of a record is: the metrics, and the figures that are read or counted rather
than timed."""

from __future__ import annotations

import inspect
import re
from typing import ClassVar, Literal

from minivllm.bench.metrics.metrics import METRICS, Metric


class Figure:
    """One entry of the record outside `metrics`; its docstring is written as a metric's."""

    name: ClassVar[str]  # the field's dotted name in the record
    unit: ClassVar[str]
    direction: ClassVar[Literal["lower", "higher"] | None] = None


class Weights(Figure):
    """All weights as the quantisation stores them, scales included, tied tensors once.

    Formula: sum of the tensors' bytes.
    Example: 0.6 billion parameters at 2 bytes are 1.2 GB; at half a byte and a 4-byte scale for
    every 64, 0.34 GB.
    """

    name, unit, direction = "memory.weights", "bytes", "lower"


class KVPool(Figure):
    """Size of the key-value cache that was set aside; on a CPU its pages take memory only once they
    are written to.

    Formula: blocks * block_size * bytes of one token's keys and values.
    Example: 1,000 blocks of 16 tokens at 4,096 bytes: 65.5 MB.
    """

    name, unit, direction = "memory.kv_pool", "bytes", "lower"


class KVWaste(Figure):
    """Share of the allocated cache slots that hold no token, mean over the steps.

    Formula: wasted slots / allocated slots of each step, mean over the steps.
    Example: a request of 20 tokens in 2 blocks of 16 wastes 12 of 32 slots: 0.375.
    """

    name, unit, direction = "memory.kv_waste", "share", "lower"


class DevicePeak(Figure):
    """Most device memory that torch's allocator had handed out at once.

    Formula: torch.cuda.max_memory_allocated() of the window.
    Example: weights of 16 GB, a pool of 40 GB and 2 GB of activations at the worst moment: 58 GB.
    """

    name, unit, direction = "memory.device_peak_allocated", "bytes", "lower"


class HostPeak(Figure):
    """Greatest resident memory of the worker and what it started (the sum of their own peaks),
    without the probe.

    Formula: the kernel's high-water mark (VmHWM), of loading and of the window, the greater; reset
    before the window where that is allowed.
    Example: Python and torch with 0.4 GB and weights of 1.2 GB: 1.6 GB.
    """

    name, unit, direction = "memory.host_rss_peak", "bytes", "lower"


class Joules(Figure):
    """Energy of the measured window, read from a hardware counter; null with the reason where there
    is none.

    Formula: counter after the window - counter before it, the device idle at both readings.
    Example: 9,000 J before and 13,000 J after: 4,000 J.
    """

    name, unit, direction = "energy.joules", "J", "lower"


class JoulesPerToken(Figure):
    """Energy for each output token, over the window of the throughput.

    Formula: joules / output tokens.
    Example: 4,000 J for 2,000 tokens: 2 J/token.
    """

    name, unit, direction = "energy.joules_per_output_token", "J/token", "lower"


class MeanWatts(Figure):
    """Mean power over the window.

    Formula: joules / length of the window.
    Example: 4,000 J in 10 s: 400 W.
    """

    name, unit, direction = "energy.mean_watts", "W", "lower"


class JoulesAboveIdle(Figure):
    """What the work took beyond a device that only waits, the engine loaded.

    Formula: joules - idle watts * length of the window.
    Example: 4,000 J in 10 s at 100 W idle: 3,000 J.
    """

    name, unit, direction = "energy.joules_above_idle", "J", "lower"


class CostPerMillion(Figure):
    """Money for a million output tokens, at the prices of `measure.price`.

    Formula: 1e6 * (price of a device-hour / 3600 + price of a kWh * mean watts / 3.6e6) / output
    tokens a second.
    Example: 3.60 an hour and no price of energy, at 1,000 tokens/s: 1.00.
    """

    name, unit, direction = "cost.per_million_output_tokens", "currency", "lower"


class Bandwidth(Figure):
    """Memory bandwidth as measured when the run began: the fastest of several reads of 1 GiB.

    Formula: bytes read / shortest time.
    Example: 1.07e9 bytes in 50 ms: 21.5 GB/s.
    """

    name, unit, direction = "roofline.bandwidth_bytes_per_s", "bytes/s", "higher"


class MatrixRate(Figure):
    """Rate of a square matrix product in the compute dtype, or in the 8 bits that some layers
    multiply in, by the fastest kernel at hand, as measured when the run began.

    Formula: 2 n^3 / shortest time, the better of two n.
    Example: n = 2,048 in 10 ms: 1.72 TFLOP/s.
    """

    name, unit, direction = "roofline.matrix_flops_per_s", "FLOP/s", "higher"


class MBU(Figure):
    """Model bandwidth utilisation: share of the measured bandwidth that pure decode steps needed.

    Formula: (streamed weights + keys and values of the context, summed over the steps) / their
    seconds / bandwidth.
    Example: 1.2 GB of weights and 0.3 GB of cache a step of 100 ms, at 20 GB/s: 0.75.
    """

    name, unit, direction = "roofline.mbu", "share", "higher"


class MFU(Figure):
    """Model FLOP utilisation: share of the measured matrix rate that pure prefill steps needed.

    Formula: (operations of the tokens' matrix products and attention) / their seconds / matrix
    rate.
    Example: 1,000 tokens at 1.2 GFLOP each in 1 s, at 2 TFLOP/s: 0.6.
    """

    name, unit, direction = "roofline.mfu", "share", "higher"


class RooflineShare(Figure):
    """Share of the run that its steps would have taken at the measured limits: the rest is what a
    perfect engine gains.

    Formula: sum over all steps of max(bytes / bandwidth, operations / matrix rate) / the run's
    duration.
    Example: steps that need 60 s at the limits, in a run of 80 s: 0.75.
    """

    name, unit, direction = "roofline.share", "share", "higher"


class ForwardTime(Figure):
    """The model's part of a mean step; on a GPU the time to launch it, the wait for it is in
    sample_ms.

    Formula: sum of the steps' forward times / steps.
    Example: 400 steps that spend 36 s in the model: 90 ms.
    """

    name, unit, direction = "breakdown.forward_ms", "ms", "lower"


class GapTime(Figure):
    """From the end of one step to the start of the next: what the driver takes. Time without any
    request, or waiting for a fuller batch, is no gap.

    Formula: sum of the gaps / steps.
    Example: 400 gaps of 20 ms in all: 0.05 ms.
    """

    name, unit, direction = "breakdown.gap_ms", "ms", "lower"


class Load(Figure):
    """Building the engine, weights included: what is paid once, before anything is measured.

    Formula: seconds from the start of building to the engine being ready, without cold.compile_s.
    Example: 1.2 GB of weights from a disk that reads 0.6 GB/s: 2 s and a little.
    """

    name, unit, direction = "cold.load_s", "s", "lower"


class FirstBatch(Figure):
    """The first warm-up batch, in which kernels are chosen and memory is touched for the first
    time.

    Formula: seconds of the first warm-up.
    Example: 0.8 s, where the same batch later takes 0.3 s.
    """

    name, unit, direction = "cold.first_batch_s", "s", "lower"


class Perplexity(Figure):
    """How surprised the model is by a held-out text.

    Formula: exp(mean negative log-likelihood of the next token).
    Example: tokens predicted with probabilities 1/2 and 1/8: exp((ln 2 + ln 8) / 2) = 4.
    """

    name, unit, direction = "quality.perplexity", "1", "lower"


class KL(Figure):
    """Kullback-Leibler divergence of the next-token distribution from the reference precision's.

    Formula: mean over tokens of sum of p_reference * ln(p_reference / p).
    Example: reference (1/2, 1/2) and here (1/4, 3/4): 0.144 nats.
    """

    name, unit, direction = "quality.kl_mean", "nats/token", "lower"


class Top1(Figure):
    """Share of tokens at which the likeliest next one is the reference's.

    Formula: tokens with the same argmax / tokens.
    Example: 992 of 1,000: 0.992.
    """

    name, unit, direction = "quality.top1_agreement", "share", "higher"


class Prefix(Figure):
    """Greedy tokens identical with the reference's before the first that differs, mean over
    prompts.

    Formula: sum of the identical prefixes / prompts.
    Example: 64 and 20 tokens: 42.
    """

    name, unit, direction = "quality.prefix_mean", "tokens", "higher"


# in the order of their definition
FIGURES: tuple[type[Figure], ...] = tuple(Figure.__subclasses__())


def glossary() -> list[dict[str, str | None]]:
    """Name, unit, direction, description, formula and example of every figure, from its class."""
    classes: list[type[Metric] | type[Figure]] = [*(type(metric) for metric in METRICS), *FIGURES]
    return [
        {"name": cls.name, "unit": cls.unit, "direction": cls.direction, **_parts(cls)}
        for cls in classes
    ]


def _parts(cls: type) -> dict[str, str]:
    parts = re.split(
        r"^(?:Formula|Example):", inspect.cleandoc(cls.__doc__ or ""), flags=re.MULTILINE
    )
    names = ("description", "formula", "example")
    return {name: " ".join(part.split()) for name, part in zip(names, parts, strict=True)}
