"""What was read of the machine during a measurement."""

from __future__ import annotations

from dataclasses import dataclass

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

    joules: float | None = None
    joules_per_output_token: float | None = None
    mean_watts: float | None = None
    idle_watts: float | None = None
    joules_above_idle: float | None = None
    window_s: float | None = None
    method: str | None = None  # "nvml" | "rapl"
    reason: str | None = None  # why the figures are null, or what to be careful about


@dataclass
class Roofline:
    """How far from the hardware's limit, as measured at the start of the run."""

    bandwidth_bytes_per_s: float | None = None
    matrix_flops_per_s: float | None = None
    matrix_dtype: str | None = None
    decode_bytes: float | None = None  # over all pure decode steps of the window
    decode_flops: float | None = None
    decode_s: float | None = None
    mbu: float | None = None
    prefill_bytes: float | None = None  # over all pure prefill steps
    prefill_flops: float | None = None
    prefill_s: float | None = None
    mfu: float | None = None
    # the streamed bytes fit the last-level cache, so MBU may exceed 1
    fits_cache: bool | None = None
    least_s: float | None = None  # that all steps would have taken at these limits
    share: float | None = None  # of the window's duration
