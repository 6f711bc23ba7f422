"""What telemetry says of a measured window: whether the machine was awake, quiet and at its usual
clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from minivllm.bench.records.record import Validity

# longest stretch without a telemetry sample: the greater of the two
MAX_GAP_S, MAX_GAP_INTERVALS = 2.0, 10
SHORT_S = 1.0  # a window in which any moment's disturbance is a large part
OTHERS_PERCENT = 20.0  # of one core, used by other processes
# Of the processor time of the cores that the run uses, taken by other processes: what stands beside
# every figure, and what makes them figures of something else.
TAKEN, MOST_TAKEN = 0.1, 0.5
CLOCK_RANGE = 0.1  # of the greatest clock within the window
THROTTLED_SHARE = 0.05  # of the samples; a single one may be the end of something else
# Bits of NVML's clocks event reasons. Those of the hardware protecting itself make a slower machine
# of it.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
POWER_CAP = 0x04
SLOW_CLOCK = 0.5  # of the greatest clock that the hardware can run at


def check_telemetry(
    rows: Sequence[Mapping[str, Any]],
    start_s: float,
    end_s: float,
    interval_s: float = 0.2,
    clocks: Mapping[str, float | None] | None = None,
) -> Validity:
    """Judge the samples of a measured window.

    Args:
        rows: with `t_s` in seconds of the clock of `start_s`, `cpu_other_percent` (100 is one
            core), `cpu_taken` (a share), and what else of `Telemetry`'s columns the machine offers.
        start_s: the window's start.
        end_s: the window's end.
        interval_s: seconds between samples, as set.
        clocks: the provenance's, with the greatest that the hardware can run at.
    """
    reasons, notes = [], []
    inside = [row for row in rows if start_s <= row["t_s"] <= end_s]
    times = [start_s, *(row["t_s"] for row in inside), end_s]
    gap = max(b - a for a, b in pairwise(times))
    if any(b < a for a, b in pairwise(row["t_s"] for row in rows)):
        reasons.append("the times of telemetry run backwards: the monotonic clock jumped")
    allowed = max(MAX_GAP_S, MAX_GAP_INTERVALS * interval_s)
    if gap > allowed:
        reasons.append(
            f"telemetry has a gap of {gap:.1f} s, above {allowed:.1f} s: "
            "the machine stood still or the sampler starved"
        )
    elif not inside:
        notes.append(f"no telemetry sample fell into the window of {end_s - start_s:.2f} s")
    if end_s - start_s < SHORT_S:
        notes.append(
            f"the window lasted {end_s - start_s:.2f} s: a moment's disturbance is a large part "
            "of it, and a longer load or more repeats say more"
        )
    # What others used is known of the time up to a sample, so that the next one after a short
    # window is of it, too.
    heard = inside or [row for row in rows if row["t_s"] > end_s][:1]
    taken = _mean(heard, "cpu_taken")
    others = _others(_mean(heard, "cpu_other_percent"), taken)
    # A reading spans the time since the one before it, so that a single one may be of other times.
    filled = taken is not None and taken > MOST_TAKEN and len(inside) > 1
    (reasons if filled else notes).extend(others)
    reasons += _slowdowns(inside)
    notes += [
        *_power_cap(inside),
        *_neighbours(inside),
        *_clocks(inside),
        *_slow_clocks(inside, clocks or {}),
    ]
    return Validity(not reasons, reasons, notes, taken)


def _mean(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    values = _readings(rows, column)
    return sum(values) / len(values) if values else None


def _others(percent: float | None, taken: float | None) -> list[str]:
    """A sentence on what other processes used of the processor, where that is worth one."""
    if percent is None or (percent <= OTHERS_PERCENT and (taken or 0) < TAKEN):
        return []
    line = f"other processes used {percent:.0f} % of a core on average during the window"
    if taken is None or taken < TAKEN:
        return [line]
    return [f"{line}, and {taken_words(taken)}"]


def taken_words(taken: float) -> str:
    """What other processes took of a run's processor time, in words."""
    return f"{100 * taken:.0f} % of the processor time of the cores that the run uses"


def shared(notes: Iterable[str]) -> bool:
    """Whether a record's notes say that other processes used the machine or the GPU within the
    window."""
    return any("other process" in note for note in notes)


def _readings(rows: Sequence[Mapping[str, Any]], column: str) -> list[Any]:
    return [row[column] for row in rows if row.get(column) is not None]


def _slowdowns(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A GPU that protects itself is not the GPU that the record names."""
    flags = _readings(rows, "gpu_throttle_reasons")
    for bit, name in SLOWDOWNS.items():
        share = sum(bool(flag & bit) for flag in flags) / len(flags) if flags else 0.0
        if share > THROTTLED_SHARE:
            yield f"the GPU was throttled in {100 * share:.0f} % of the samples: {name}"


def _power_cap(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Reaching the power limit is how a loaded GPU runs, but the figures are then those of that
    limit."""
    flags = _readings(rows, "gpu_throttle_reasons")
    share = sum(bool(flag & POWER_CAP) for flag in flags) / len(flags) if flags else 0.0
    if share > THROTTLED_SHARE:
        yield f"the GPU was held at its power limit in {100 * share:.0f} % of the samples"


def _neighbours(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Processes with a context on the GPU that the worker did not start."""
    most = max(_readings(rows, "gpu_other_processes"), default=0)
    if most:
        yield (
            f"{most} other processes were on the GPU"
            if most > 1
            else "another process was on the GPU"
        )


def _clocks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for column, name in (
        ("gpu_sm_mhz", "GPU"),
        ("gpu_memory_mhz", "GPU memory"),
        ("cpu_mhz", "CPU"),
    ):
        clocks = _readings(rows, column)
        if clocks and max(clocks) - min(clocks) > CLOCK_RANGE * max(clocks):
            yield (
                f"the {name} clock changed within the window, from {min(clocks):.0f} to "
                f"{max(clocks):.0f} MHz"
            )


def _slow_clocks(
    rows: Sequence[Mapping[str, Any]], clocks: Mapping[str, float | None]
) -> Iterator[str]:
    """A machine that saves power, or is throttled by what it does not tell, is not the one that its
    name promises."""
    for column, limit, name in (
        ("cpu_fastest_mhz", "cpu_max_mhz", "CPU's fastest core"),
        ("gpu_sm_mhz", "gpu_max_sm_mhz", "GPU"),
        ("gpu_memory_mhz", "gpu_max_memory_mhz", "GPU's memory"),
    ):
        greatest, most = max(_readings(rows, column), default=None), clocks.get(limit)
        if greatest is not None and most and greatest < SLOW_CLOCK * most:
            yield (
                f"the {name} ran at {greatest:.0f} MHz at most, {100 * greatest / most:.0f} % of "
                f"its own maximum of {most:.0f} MHz, for the whole window"
            )
