"""What was read of the machine during a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.described import measured

TICKS = 20  # of a clock or a counter: a difference of fewer is not a reading


@dataclass
class DeviceEnergy:
    """Energy of the measured window on one of several devices."""

    joules: float | None = None
    mean_watts: float | None = None


@dataclass
class Energy:
    """Energy of the measured window, read from a counter; null with the reason where there is
    none."""

    joules: float | None = measured("J", "lower")
    """Energy of the measured window, read from a hardware counter; null with the reason where there
    is none.

    Formula: counter after the window - counter before it, the device idle at both readings.
    Example: 9,000 J before and 13,000 J after: 4,000 J.
    """
    joules_per_output_token: float | None = measured("J/token", "lower")
    """Energy for each output token, over the window of the throughput.

    Formula: joules / output tokens.
    Example: 4,000 J for 2,000 tokens: 2 J/token.
    """
    mean_watts: float | None = measured("W", "lower")
    """Mean power over the window.

    Formula: joules / length of the window.
    Example: 4,000 J in 10 s: 400 W.
    """
    idle_watts: float | None = measured("W", "lower")
    """Power of the device with the engine loaded and idle."""
    joules_above_idle: float | None = measured("J", "lower", signed=True)
    """What the work took beyond a device that only waits, the engine loaded.

    Formula: joules - idle watts * length of the window.
    Example: 4,000 J in 10 s at 100 W idle: 3,000 J.
    """
    window_s: float | None = measured("s")
    """Length of the window between the two readings."""
    method: str | None = None
    """`nvml` or `rapl`."""
    reason: str | None = None
    """Why the values are null, or a caveat."""


@dataclass
class Roofline:
    """How far from the hardware's limit, as measured at the start of the run."""

    bandwidth_bytes_per_s: float | None = measured("bytes/s", "higher")
    """Memory bandwidth as measured when the run began, on the run's threads: the fastest of several
    reads of 1 GiB.

    Formula: bytes read / shortest time.
    Example: 1.07e9 bytes in 50 ms: 21.5 GB/s.
    """
    matrix_flops_per_s: float | None = measured("FLOP/s", "higher")
    """Rate of a square matrix product in the compute dtype, or in the 8 bits that some layers
    multiply in, by the fastest kernel at hand, as measured when the run began.

    Formula: 2 n^3 / shortest time, the better of two n.
    Example: n = 2,048 in 10 ms: 1.72 TFLOP/s.
    """
    matrix_dtype: str | None = None
    """Dtype of `matrix_flops_per_s`."""
    decode_bytes: float | None = measured("bytes")
    """Bytes that the pure decode steps had to move."""
    decode_flops: float | None = measured("FLOP")
    """Operations of the pure decode steps."""
    decode_s: float | None = measured("s")
    """Time of the pure decode steps; with overlapped steps, of steps followed by two of their kind
    (and so the two above)."""
    mbu: float | None = measured("share", "higher")
    """Model bandwidth utilisation: share of the measured bandwidth that pure decode steps needed.

    Formula: (streamed weights + keys and values of the context, summed over the steps) / their
    seconds / bandwidth.
    Example: 1.2 GB of weights and 0.3 GB of cache a step of 100 ms, at 20 GB/s: 0.75.
    """
    prefill_bytes: float | None = measured("bytes")
    """Bytes that the pure prefill steps had to move."""
    prefill_flops: float | None = measured("FLOP")
    """Operations of the pure prefill steps."""
    prefill_s: float | None = measured("s")
    """Time of the pure prefill steps, as of `decode_s`."""
    mfu: float | None = measured("share", "higher")
    """Model FLOP utilisation: share of the measured matrix rate that pure prefill steps needed.

    Formula: (operations of the tokens' matrix products and attention) / their seconds / matrix
    rate.
    Example: 1,000 tokens at 1.2 GFLOP each in 1 s, at 2 TFLOP/s: 0.6.
    """
    fits_cache: bool | None = None
    """The bytes of a step fit the last-level cache, so `mbu` may exceed 1."""
    least_s: float | None = measured("s")
    """The time of all steps at these limits; null where a step fits the cache."""
    share: float | None = measured("share", "higher")
    """Share of the run that its steps would have taken at the measured limits: the rest is what a
    perfect engine gains.

    Formula: sum over all steps of max(bytes / bandwidth, operations / matrix rate) / the run's
    duration.
    Example: steps that need 60 s at the limits, in a run of 80 s: 0.75.
    """
