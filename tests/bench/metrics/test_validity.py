"""The gate: a clean measurement passes; each thing that can be wrong with one is told with its
numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.bench.driver import drive
from minivllm.bench.hardware.gpu import Gpu
from minivllm.bench.hardware.readings import Energy, Roofline
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.telemetry_validity import check_telemetry, shared
from minivllm.bench.metrics.validity import Check, Evidence, check, one_token_answers
from minivllm.bench.records.figures import Metrics
from minivllm.bench.records.record import Validity
from minivllm.bench.workloads.arrivals import Concurrency, Offline
from minivllm.bench.workloads.workload import Workload
from minivllm.engine.options import SamplingParams
from tests.bench.fake_nvml import FakeNVML
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload

Measured = tuple[list[RequestTrace], Workload, Metrics]


def measured(ignore_eos: bool = True, **script: Any) -> Measured:
    """Four requests, two at a time: 1, 2, 3 and 4 tokens."""
    engine = ScriptedEngine(ScriptedClock(10.0), **script)
    work = workload((3, 1), (3, 2), (3, 3), (3, 4), ignore_eos=ignore_eos)
    traces = drive(engine, work, Concurrency(2), SamplingParams(), engine.clock)
    return traces, work, compute(traces, {}, 2)


def test_a_clean_measurement_is_valid() -> None:
    assert check(Evidence(*measured())) == Validity(True, [], [])


def test_recordings_within_the_window_are_noted() -> None:
    notes = check(Evidence(*measured(), liveness={"runtime": {"graph_captures": 3.0}})).notes
    assert notes == ["3 CUDA graphs were recorded within the window, whose times include it"]
    assert not check(Evidence(*measured(), liveness={"runtime": {"graph_captures": 0.0}})).notes


def only_reason(validity: Validity) -> str:
    assert not validity.ok and len(validity.reasons) == 1
    return validity.reasons[0]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"eos_after": {"d": 2}}, "1 outputs are not as long as asked (d: 2 of 4)"),
        ({"refuse": {"a"}}, "1 of 4 requests did not complete (a: a can never fit)"),
        (
            {"abort": {"c", "d"}},
            "2 of 4 requests did not complete (c: the engine ended it after 2 tokens: abort; "
            "d: the engine ended it after 2 tokens: abort)",
        ),
        ({"eos_after": {"b": 0}}, "1 of 4 requests produced no token (b)"),
    ],
)
def test_work_that_is_not_what_was_asked(script: dict[str, Any], reason: str) -> None:
    assert only_reason(check(Evidence(*measured(**script)))) == reason


def test_an_early_end_is_fine_where_it_is_allowed() -> None:
    assert check(Evidence(*measured(ignore_eos=False, eos_after={"d": 2}))).ok
    traces, work, metrics = measured(ignore_eos=False)
    traces[0].token_ids.append(5)
    traces[0].token_times.append(traces[0].token_times[-1])
    assert (
        only_reason(check(Evidence(traces, work, metrics)))
        == "1 outputs are not as long as asked (a: 2 of 1)"
    )


def test_long_lists_are_cut() -> None:
    reason = only_reason(check(Evidence(*measured(refuse={"a", "b", "c", "d"}))))
    assert reason.startswith(
        "4 of 4 requests did not complete (a: a can never fit; b: "
    ) and reason.endswith("; 1 more)")


def test_missing_requests() -> None:
    traces, work, metrics = measured()
    reasons = check(Evidence(traces[:3], work, metrics)).reasons
    assert reasons[0] == "3 requests were traced and 4 asked for, or they are not the same"


def test_a_prompt_of_another_length() -> None:
    traces, work, metrics = measured()
    traces[1].input_tokens = 30
    assert (
        only_reason(check(Evidence(traces, work, metrics)))
        == "1 prompts are not as long as asked (b: 30 of 3)"
    )


def change_last_token(traces: list[RequestTrace]) -> None:
    traces[3].token_times[1] -= 1.5


def change_first_token(traces: list[RequestTrace]) -> None:
    traces[3].token_times[0] -= 1.5


def change_start(traces: list[RequestTrace]) -> None:
    traces[3].started_s = 9.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_last_token, "1 requests have token times missing or out of order (d)"),
        (
            change_first_token,
            "1 requests have times that cannot be (d: first token 0.500 s before it was due)",
        ),
        (
            change_start,
            "1 requests have times that cannot be (d: first step -3.000 s from when it was due)",
        ),
    ],
)
def test_times_that_cannot_be(change: Callable[[list[RequestTrace]], None], reason: str) -> None:
    traces, work, metrics = measured()
    change(traces)
    assert only_reason(check(Evidence(traces, work, metrics))).startswith(reason)


def test_littles_law() -> None:
    """a 10-11, b 10-12, c 11-14, d 12-16: 10 request-seconds in 6 s, and 4 / 6 requests/s times 2.5
    s."""
    traces, work, metrics = measured()
    assert metrics.requests_per_s == pytest.approx(4 / 6)
    assert metrics.e2e_ms.mean == 2500
    wrong = replace(metrics, requests_per_s=0.5)
    assert only_reason(check(Evidence(traces, work, wrong))) == (
        "Little's law fails: 1.67 requests were in the system on average, and "
        "0.5 requests/s times a mean latency of 2500.0 ms make 1.25"
    )
    traces[0].finished_s = 16.0  # held on to for 5 s after its last token
    assert "Little's law fails: 2.50 requests" in only_reason(
        check(Evidence(traces, work, metrics))
    )


def test_an_empty_window() -> None:
    engine = ScriptedEngine(ScriptedClock(), step_s=0.0)
    work = workload((1, 1))
    traces = drive(engine, work, Offline(), SamplingParams(), engine.clock)
    assert "nothing was measured" in only_reason(
        check(Evidence(traces, work, compute(traces, {}, 1)))
    )


def test_faster_than_the_hardware() -> None:
    measurement = measured()
    assert check(Evidence(*measurement, roofline=Roofline(mbu=0.99, mfu=0.2, fits_cache=False))).ok
    assert only_reason(check(Evidence(*measurement, roofline=Roofline(mbu=1.31)))) == (
        "decoding would have used 131 % of the measured memory bandwidth"
    )
    assert only_reason(
        check(Evidence(*measurement, roofline=Roofline(mfu=1.2, fits_cache=False)))
    ) == ("prefill would have used 120 % of the measured matrix rate")
    cached = check(Evidence(*measurement, roofline=Roofline(mbu=1.31, fits_cache=True)))
    assert cached.ok and "fits the last-level cache" in cached.notes[0]


def test_overlapping_steps_are_noted() -> None:
    measurement = measured()
    assert check(Evidence(*measurement, liveness={"runtime": {"overlap_steps": 0.0}})).notes == []
    validity = check(Evidence(*measurement, liveness={"runtime": {"overlap_steps": 7.0}}))
    assert validity.ok and len(validity.notes) == 1
    assert (
        validity.notes[0].startswith("7 steps overlapped")
        and "runtime.overlap=false" in validity.notes[0]
    )


def test_a_driver_that_is_held_up_is_noted() -> None:
    traces, work, metrics = measured()
    for trace in traces:
        trace.submitted_s = trace.scheduled_s + 0.5
    validity = check(Evidence(traces, work, metrics))
    assert validity.ok
    assert validity.notes[0].startswith(
        "requests were submitted 500.0 ms late on average, 20 % of their latency"
    )


def test_energy_notes() -> None:
    measurement = measured()  # of 6 s
    assert check(Evidence(*measurement, energy=Energy(reason="no counter"))).notes == []
    assert (
        check(Evidence(*measurement, energy=Energy(joules=1.0, window_s=6.1, method="nvml"))).notes
        == []
    )
    assert check(
        Evidence(*measurement, energy=Energy(joules=1.0, window_s=9.0, reason="coarse"))
    ).notes == [
        "energy: coarse",
        "energy is of 9.00 s and throughput of 6.00 s",
    ]


def samples(*times: float, other: float = 0.0) -> list[dict[str, float]]:
    return [{"t_s": time, "cpu_other_percent": other} for time in times]


def test_telemetry_gaps() -> None:
    steady = samples(*(9 + 0.2 * i for i in range(40)))
    assert check_telemetry(steady, 10, 16) == Validity(True, [], [])
    assert only_reason(check_telemetry(samples(10, 11, 13.5, 14, 16), 10, 16)) == (
        "telemetry has a gap of 2.5 s, above 2.0 s: the machine stood still or the sampler starved"
    )
    assert not check_telemetry(samples(10, 11), 10, 14).ok  # it ended early
    assert not check_telemetry([], 10, 14).ok
    assert check_telemetry(samples(10, 15), 10, 15, interval_s=1.0).ok
    (none,) = check_telemetry([], 10, 11.5).notes
    assert none == "no telemetry sample fell into the window of 1.50 s"
    unheard, short = check_telemetry([], 10, 10.1).notes
    assert unheard == "no telemetry sample fell into the window of 0.10 s"
    assert short.startswith(
        "the window lasted 0.10 s: a moment's disturbance is a large part of it"
    )


def test_busy_neighbours_are_noted_from_telemetry() -> None:
    seen = check_telemetry(samples(1, 2, 3, other=150.0), 1, 3)
    assert seen == Validity(
        True, [], ["other processes used 150 % of a core on average during the window"]
    )
    assert shared(seen.notes)
    assert check_telemetry(samples(1, 2, 3, other=5.0), 1, 3).notes == []
    assert check_telemetry([{"t_s": 1.5, "cpu_other_percent": None}], 1, 2).notes == []
    brief = check_telemetry(samples(0.9, 1.3, 1.5, other=150.0), 1, 1.1).notes
    assert len(brief) == 3 and shared(brief)  # from the sample that came next


@pytest.mark.parametrize(
    ("taken", "ok", "words"),
    [
        (0.05, True, None),
        (0.18, True, "18 % of the processor time of the cores that the run uses"),
        (0.5, True, "50 % of the processor time"),
        (0.96, False, "96 % of the processor time of the cores that the run uses"),
    ],
)
def test_a_machine_that_others_fill_gives_no_figures(
    taken: float, ok: bool, words: str | None
) -> None:
    rows = [row | {"cpu_taken": taken} for row in samples(1, 2, 3, other=200 * taken)]
    seen = check_telemetry(rows, 1, 3)
    assert seen.ok is ok and seen.cpu_taken == pytest.approx(taken)
    said = [*seen.reasons, *seen.notes]
    assert bool(said) is (words is not None)
    assert all(words is not None and words in line for line in said)
    assert shared(said) is (words is not None)


def seen_on_a_gpu(*changes: dict[str, Any]) -> Validity:
    """What the gate says of samples of a fake GPU, after `changes` of its readings, one a
    sample."""
    nvml, rows = FakeNVML(), []
    nvml.readings["nvmlDeviceGetComputeRunningProcesses"] = [
        SimpleNamespace(pid=42, usedGpuMemory=300)
    ]
    for i, change in enumerate(changes):
        nvml.readings.update(change)
        rows.append(
            {"t_s": 1.0 + 0.5 * i, "cpu_other_percent": 0.0, **Gpu(nvml, None).sample({42, 43})}
        )
    return check_telemetry(rows, 1.0, 1.0 + 0.5 * len(rows))


def test_a_quiet_gpu_is_not_remarked_on() -> None:
    assert seen_on_a_gpu(*[{}] * 20) == Validity(True, [], [])


@pytest.mark.parametrize(
    ("bits", "name"), [(0x08, "hardware slowdown"), (0x40 | 0x04, "hardware thermal slowdown")]
)
def test_a_gpu_that_protects_itself_is_not_valid(bits: int, name: str) -> None:
    throttled = {"nvmlDeviceGetCurrentClocksThrottleReasons": bits}
    seen = seen_on_a_gpu(*[{}] * 15, *[throttled] * 5)
    assert only_reason(seen) == f"the GPU was throttled in 25 % of the samples: {name}"
    once = seen_on_a_gpu(*[{}] * 39, throttled)
    assert once.ok


def test_the_power_limit_is_noted() -> None:
    seen = seen_on_a_gpu({}, *[{"nvmlDeviceGetCurrentClocksThrottleReasons": 0x04}] * 3)
    assert seen == Validity(
        True, [], ["the GPU was held at its power limit in 75 % of the samples"]
    )


def test_other_processes_on_the_gpu_are_noted() -> None:
    own, other = SimpleNamespace(pid=42, usedGpuMemory=300), SimpleNamespace(pid=7, usedGpuMemory=9)
    both = {"nvmlDeviceGetComputeRunningProcesses": [own, other]}
    seen = seen_on_a_gpu({}, both, {})
    assert seen.notes == ["another process was on the GPU"] and shared(seen.notes)
    child = SimpleNamespace(
        pid=43, usedGpuMemory=100
    )  # of the worker: an engine may compute in one of its own
    assert seen_on_a_gpu({"nvmlDeviceGetComputeRunningProcesses": [own, child]}, {}).notes == []
    renumbered = SimpleNamespace(pid=90_001, usedGpuMemory=300)
    assert seen_on_a_gpu({"nvmlDeviceGetComputeRunningProcesses": [renumbered]}, {}).notes == []
    three = {"nvmlDeviceGetComputeRunningProcesses": [own, other, other]}
    seen = seen_on_a_gpu(three, {})
    assert seen.notes == ["2 other processes were on the GPU"] and shared(seen.notes)
    assert not shared(["the GPU was held at its power limit in 75 % of the samples"])


def test_clock_changes_are_noted() -> None:
    changed = seen_on_a_gpu({}, {"nvmlDeviceGetClockInfo": 1300})
    assert changed.ok and changed.notes == [
        "the GPU clock changed within the window, from 1300 to 1500 MHz",
        "the GPU memory clock changed within the window, from 1300 to 1500 MHz",
    ]
    assert seen_on_a_gpu({}, {"nvmlDeviceGetClockInfo": 1450}).notes == []
    cpu = [{"t_s": 1.0 + i, "cpu_mhz": mhz} for i, mhz in enumerate((2600.0, None, 1900.0))]
    assert check_telemetry(cpu, 1.0, 3.5).notes == [
        "the CPU clock changed within the window, from 1900 to 2600 MHz"
    ]


def test_answers_of_one_token_throughout_are_noted() -> None:
    def answer(name: str, *ids: int) -> RequestTrace:
        trace = RequestTrace(name, 3, 0.0)
        trace.token_ids = list(ids)
        return trace

    traces = [
        answer("a", *[0] * 8),
        answer("b", *[7] * 20),
        answer("c", *range(8)),
        answer("d", 5, 5),
    ]
    assert one_token_answers(traces, served=False) == [
        "2 of 3 answers of at least 8 tokens are one token throughout (a: token 0; b: token 7)"
    ]
    assert one_token_answers(traces[2:], served=False) == []
    # A small model that decodes greedily repeats itself here and there.
    few = [*traces, answer("e", *range(8)), answer("f", *range(8))]
    assert one_token_answers(few, served=False) == []
    # A server may not tell the ids, for which 0 stands.
    assert one_token_answers(traces, served=True) == [
        "1 of 1 answers of at least 8 tokens are one token throughout (b: token 7)"
    ]


def test_telemetry_that_runs_backwards() -> None:
    rows = [{"t_s": t} for t in (1.0, 2.0, 1.5, 3.0)]
    assert only_reason(check_telemetry(rows, 0.9, 3.1)).startswith(
        "the times of telemetry run backwards"
    )


def test_a_clock_far_under_its_maximum_is_noted_where_that_is_known() -> None:
    rows = [
        {"t_s": 1.0 + i, "gpu_sm_mhz": mhz, "cpu_fastest_mhz": 800.0}
        for i, mhz in enumerate((900, 940))
    ]
    notes = check_telemetry(
        rows, 0.5, 2.5, clocks={"gpu_max_sm_mhz": 1980.0, "cpu_max_mhz": None}
    ).notes
    assert notes == [
        "the GPU ran at 940 MHz at most, 47 % of its own maximum of 1980 MHz, for the whole window"
    ]
    assert not check_telemetry(rows, 0.5, 2.5, clocks={"gpu_max_sm_mhz": 1000.0}).notes
    assert not check_telemetry(rows, 0.5, 2.5).notes


class Slow(Check):
    def __init__(self, reason_ms: float, note_ms: float) -> None:
        self.reason_ms, self.note_ms = reason_ms, note_ms

    def reasons(self, evidence: Evidence) -> list[str]:
        mean_ms = evidence.metrics.e2e_ms.mean or 0.0
        return [f"a mean of {mean_ms:g} ms"] if mean_ms > self.reason_ms else []

    def notes(self, evidence: Evidence) -> str | list[str]:
        return f"{len(evidence.traces)} took long" if self.note_ms < 2500 else []


def test_checks_of_a_user_join_the_others() -> None:
    own = {"short": Slow(2000, 9000), "long": Slow(9000, 2000), "silent": Check()}
    assert check(Evidence(*measured()), own) == Validity(
        False, ["short: a mean of 2500 ms"], ["long: 4 took long"]
    )
    traces, *others = measured()
    first, *_, last = check(Evidence(traces[:3], *others), own).reasons
    assert first.startswith("3 requests were traced") and last == "short: a mean of 2500 ms"
