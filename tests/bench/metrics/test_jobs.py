"""The figures of jobs, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minivllm.bench.hardware.readings import Energy
from minivllm.bench.metrics.jobs import JobContext, cache_state, job_figures
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records.feature_figures import JobFigures
from minivllm.bench.records.figures import Metrics
from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.bench.workloads.workload import Workload, WorkloadRequest


def request(name: str, prompt_len: int, start: int, session: str = "") -> WorkloadRequest:
    """Its prompt begins with 20 tokens that all share, and goes on with the session's own."""
    runs = (range(0, 20), range(start, start + prompt_len - 20))
    return WorkloadRequest(name, LazyPrompt(runs, 99, 0), 2, True, session=session or name[0])


def trace(
    name: str, prompt_len: int, due: float, end: float, cached: int | None, lag: float = 0.0
) -> RequestTrace:
    times = [end - 1, end]
    return RequestTrace(
        *(name, prompt_len, due, due + lag, due, end, times, [0, 0]),
        finish_reason="length",
        cached_tokens=cached,
    )


# Job a: two calls from 10 to 30 s; job b: one from 20 to 60 s.
WORK = Workload((request("a0", 50, 1000), request("a1", 100, 1000), request("b0", 60, 2000)))
TRACES = [
    trace("a0", 50, 10.0, 15.0, 0),
    trace("a1", 100, 18.0, 30.0, 48, lag=0.5),
    trace("b0", 60, 20.0, 60.0, 16),
]
METRICS = Metrics(duration_s=50.0, input_tokens=210, output_tokens=6)
BLOCKS: dict[str, Any] = {"cache": {"block_size": 16.0}}


def figures(
    traces: list[RequestTrace] = TRACES, work: Workload = WORK, **changes: Any
) -> JobFigures:
    context = JobContext(METRICS, Energy(joules=900.0), {}, BLOCKS, "cold")
    result = job_figures(traces, work, replace(context, **changes))
    assert result is not None
    return result


def test_latency_and_rates() -> None:
    result = figures()
    assert (result.sessions, result.num_jobs) == (2, 2)
    assert result.latency_s.mean == 30 and result.latency_s.n == 2
    assert result.jobs_per_hour == pytest.approx(2 / 50 * 3600)
    assert result.jobs_per_hour_per_user == 120
    assert figures(devices=2).jobs_per_hour_per_device == pytest.approx(72)
    assert result.client_lag_ms.mean == pytest.approx(500 / 3)


def test_hit_rates() -> None:
    """a1 begins with all 50 tokens of a0, three blocks; b0 with the 20 that all share, one."""
    result = figures()
    assert result.hit_rate == pytest.approx((48 + 16) / 210)
    assert result.optimal_hit_rate == pytest.approx((48 + 16) / 210)
    assert result.session_hit_rate.mean == pytest.approx((48 / 150 + 16 / 60) / 2)
    # by tokens, where the engine does not say how large its blocks are
    assert figures(liveness={}).optimal_hit_rate == pytest.approx((50 + 20) / 210)
    # a cache that has seen all prompts has all but the last token
    assert figures(cache_state="warm", liveness={}).optimal_hit_rate == pytest.approx(207 / 210)
    untold = [replace(one, cached_tokens=None) for one in TRACES]
    assert figures(untold).hit_rate is None and figures(untold).session_hit_rate.n == 0


def test_live_tokens_count_what_is_shared_once() -> None:
    """a holds 52 tokens from 10 s and 54 more from 18 s, b 46 from 20 to 60 s."""
    assert figures().live_tokens == 52 + 54 + 46
    after = [TRACES[0], TRACES[1], replace(TRACES[2], scheduled_s=30.0, submitted_s=30.0)]
    assert figures(after).live_tokens == 52 + 54


def test_energy_and_money_of_a_job() -> None:
    price = {"device_hour": 3.6, "kwh": 4.0}
    result = figures(price=price)
    assert result.joules_per_job == 450
    assert result.cost_per_job == pytest.approx((0.05 + 0.001) / 2)
    assert figures(price=price, devices=2).cost_per_job == pytest.approx((0.1 + 0.001) / 2)
    assert figures(price={"kwh": 4.0}, energy=Energy()).cost_per_job is None
    tokens = {"million_input": 3.0, "million_cached": 0.3, "million_output": 15.0}
    result = figures(price=tokens)
    assert result.token_cost_per_job == pytest.approx((146 * 3 + 64 * 0.3 + 6 * 15) / 1e6 / 2)
    assert result.cost_per_job is None
    assert figures(price={"million_output": 15.0}).token_cost_per_job == pytest.approx(45e-6)


def test_a_session_that_fails_or_starts_midway_is_no_job() -> None:
    failed = [TRACES[0], replace(TRACES[1], finish_reason="abort"), TRACES[2]]
    result = figures(failed)
    assert (result.sessions, result.num_jobs, result.latency_s.mean) == (2, 1, 40)
    assert result.joules_per_job is None and result.jobs_per_hour == pytest.approx(72)
    # one whose last call was not sent is none either
    assert (figures(TRACES[:1]).sessions, figures(TRACES[:1]).num_jobs) == (1, 0)
    primed = replace(WORK, priming=(request("p", 50, 1000, session="a"),))
    result = figures(work=primed)
    assert (result.num_jobs, result.cache_state, result.primed_tokens) == (1, "primed", 50)
    # a0 is known but for its last block
    assert result.optimal_hit_rate == pytest.approx((48 + 48 + 16) / 210)


def test_other_workloads_have_no_jobs() -> None:
    lone = Workload(tuple(replace(one, session=None) for one in WORK.requests))
    assert job_figures(TRACES, lone, JobContext(METRICS, Energy(), {}, {}, "cold")) is None


def test_the_state_of_a_cache_that_cannot_be_emptied() -> None:
    assert cache_state(True, "cold") == "kept"
    assert cache_state(True, "warm") == cache_state(False, "warm") == "warm"
    assert cache_state(False, "cold") == "cold"
