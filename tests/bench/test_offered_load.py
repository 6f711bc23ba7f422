"""What is measured of a load that ends by time, by hand; checks of a user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.driver import drive
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.rows import recorded_requests
from minivllm.bench.metrics.validity import Check, Evidence, check
from minivllm.bench.offered_load import OfferedLoad
from minivllm.bench.options import MeasureOptions, SLOOptions
from minivllm.bench.records.figures import Attainment
from minivllm.bench.workloads.arrivals import Arrival, Constant, Offline
from minivllm.bench.workloads.stopping import Stopping
from minivllm.bench.workloads.workload import Workload
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-own-check.md"
MEASURE = MeasureOptions(duration_s=4.0, cooldown_s=2.0, slo=SLOOptions(e2e_ms=2500))


def driven(
    measure: MeasureOptions, arrival: Arrival, count: int
) -> tuple[OfferedLoad, list[RequestTrace]]:
    """Requests of 3 tokens, a step a second, due at 100 s and then every second."""
    load = OfferedLoad.of(workload(*[(2, 3)] * count), arrival, SamplingParams(), measure)
    engine = ScriptedEngine(ScriptedClock(100.0))
    traces = drive(
        engine, load.workload, arrival, load.params, engine.clock, stopping=load.stopping
    )
    return load, traces


def test_requests_of_the_window_are_measured_and_the_rest_keeps_up_the_load() -> None:
    load, traces = driven(MEASURE, Constant(1.0), 10)
    whole, figures = load.figures(traces, 64)
    assert (whole.num_requests, figures.num_requests) == (6, 4)  # due at 100..105, 100..103
    assert (whole.duration_s, figures.duration_s) == (8, 4)
    # Tokens up to 104: a's 3, b's 3, c's 2 and d's 1; ends of a and b.
    assert figures.output_tokens_per_s == 9 / 4
    assert figures.requests_per_s == 2 / 4
    assert figures.e2e_ms.mean == 3000 and figures.e2e_ms.n == 4
    assert figures.attainment == Attainment(e2e_ms=0, all=0)
    (note,) = load.notes(traces)
    assert "the 4 of 10 requests that were due within it are measured; 2 more kept up" in note
    assert check(Evidence(traces, load.sent(traces), whole, stopping=load.stopping)).reasons == []
    rows = recorded_requests(traces, until_s=load.until_s(traces))
    assert [row["e2e_ms"] for row in rows] == [3000] * 4 + [None] * 2
    assert [row["status"] for row in rows] == ["ok"] * 4 + ["unmeasured"] * 2


def test_tokens_of_the_cool_down_count_within_the_window_alone() -> None:
    """A request that was due later cannot have a token before; one at the very end is not in it."""
    load, traces = driven(replace(MEASURE, duration_s=2.5, cooldown_s=9.0), Constant(1.0), 12)
    whole, figures = load.figures(traces, 64)
    assert figures.duration_s == 2.5 and figures.output_tokens_per_s == 3 / 2.5  # 101, 102, 102
    assert whole.output_tokens == 36


def test_the_reason_for_a_null_goodput_is_a_note() -> None:
    load, traces = driven(MeasureOptions(slo=SLOOptions(tpot_ms=5000)), Constant(1.0), 3)
    assert load.notes(traces) == []
    traces[1].token_times = [traces[1].token_times[-1]] * 3
    (note,) = load.notes(traces)
    assert note.startswith("measure.slo.tpot_ms: the time per output token of 1 of 3 requests")
    assert load.figures(traces, 64)[0].goodput_requests_per_s is None


def test_a_workload_that_is_over_too_soon_is_said_to_be() -> None:
    load, traces = driven(replace(MEASURE, duration_s=60.0), Constant(1.0), 3)
    whole, figures = load.figures(traces, 64)
    assert figures is whole and load.sent(traces) is load.workload
    assert (
        "3 requests of the workload were over before measure.duration_s=60" in load.notes(traces)[0]
    )


def test_failures_within_the_allowance_are_a_note_and_others_a_reason() -> None:
    load, traces = driven(MeasureOptions(), Constant(1.0), 4)
    traces[0].finish_reason, traces[0].error = "abort", "gone"
    figures = load.figures(traces, 64)[0]
    strict = check(Evidence(traces, load.workload, figures))
    assert strict.reasons == ["1 of 4 requests did not complete (a: gone)"]
    allowed = check(
        Evidence(traces, load.workload, figures, stopping=Stopping(max_error_rate=0.25))
    )
    assert allowed.ok and allowed.notes[0].endswith("which measure.max_error_rate allows")
    less = check(Evidence(traces, load.workload, figures, stopping=Stopping(max_error_rate=0.2)))
    assert less.reasons == strict.reasons


def test_a_wait_for_a_place_is_told_as_such() -> None:
    load, traces = driven(MeasureOptions(), Constant(rate=1.0, max_concurrency=1), 4)
    whole = load.figures(traces, 64)[0]
    notes = check(Evidence(traces, load.workload, whole, max_concurrency=1)).notes
    assert any("on average for one of arrival.max_concurrency=1 places" in note for note in notes)


def test_a_cool_down_follows_a_duration() -> None:
    with pytest.raises(Exception, match=r"measure\.cooldown_s=1\.0 follows a measurement"):
        MeasureOptions(cooldown_s=1.0)


def test_progress_is_towards_the_end_by_time_or_of_the_workload() -> None:
    """12 requests of 3 tokens; measured for 4 s and cooling for 2."""
    load, _ = driven(MEASURE, Constant(1.0), 12)
    assert load.most_tokens == 36
    assert [load.tokens_expected(*at) for at in ((0, 0.0), (6, 3.0), (14, 7.0), (30, 3.0))] == [
        *(36, 12, 14, 36)
    ]
    endless, _ = driven(MeasureOptions(), Constant(1.0), 12)
    assert endless.tokens_expected(6, 3.0) == 36


def test_the_check_of_the_page_judges(user_dir: Path, cli: Callable[..., Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r"^```\w+\n# mine/(\S+)\n(.*?)^```", page, re.M | re.S):
        (user_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (user_dir / name).write_text(text)
    config = f"--config-dir={user_dir / 'conf'}"
    load = ("measure=quotable", "engine=simulated", "workload.num_requests=150")
    steps = ("engine.bandwidth_gb_s=10", "engine.tflops=1", "workload.output_len=2")
    done = cli(config, *load, *steps, "name=one")
    assert done.code == 1, done.err
    (record,) = (json.loads(path.read_text()) for path in Path("runs").glob("one/*/record.json"))
    reason = "quotable: 150 requests are fewer than the 200 that we quote"
    assert record["status"] == "invalid" and record["validity"]["reasons"] == [reason]
    assert "quotable: 150 of 150 answers were cut" in record["validity"]["notes"]
    done = cli(config, *load, "measure.checks.quotable.least=many")
    assert done.code == 2 and "least='many' must be a whole number" in done.err


def test_what_is_no_check_is_bad_input() -> None:
    for target, message in (
        ("pathlib.Path", r"measure\.checks\.mine: pathlib\.Path is no check: derive"),
        (f"{Check.__module__}.Check", r"measure\.checks\.mine: Check judges nothing: define"),
    ):
        measure = MeasureOptions(checks={"mine": {"_target_": target}})
        with pytest.raises(BadInput, match=message):
            OfferedLoad.of(Workload(()), Offline(), SamplingParams(), measure)
