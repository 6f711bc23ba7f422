"""Every metric against numbers worked out by hand on a scripted clock."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.driver import drive, full_batch
from minivllm.bench.metrics.glossary import glossary
from minivllm.bench.metrics.latency import percentiles, token_gaps
from minivllm.bench.metrics.metrics import METRICS, compute, request_rows
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.figures import Attainment, Metrics, Percentiles, RequestCounts, Window
from minivllm.bench.records.reading import read_record
from minivllm.bench.records.storage import REQUESTS
from minivllm.bench.records.tables import read_table
from minivllm.bench.workloads.arrivals import Arrival, Concurrency, Offline
from minivllm.bench.workloads.workload import Workload
from minivllm.engine.options import SamplingParams
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload

EXAMPLES = Path(__file__).resolve().parents[3] / "reports" / "examples" / "cpu" / "runs"


class At(Arrival):
    """Open loop at given times."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def schedule(self, n: int, seed: int) -> list[float]:
        return self.times


def measure(
    engine: ScriptedEngine, work: Workload, arrival: Arrival, **slo: float | None
) -> tuple[Metrics, list[RequestTrace]]:
    traces = drive(engine, work, arrival, SamplingParams(), engine.clock)
    return compute(traces, slo, full_batch(engine.max_num_seqs, arrival, len(work))), traces


def queue_of_two(**slo: float | None) -> tuple[Metrics, list[RequestTrace]]:
    """One at a time. a: 1 token at 101, 2 at 102, 1 at 103. b starts at 103: tokens at 104 and
    105."""
    engine = ScriptedEngine(ScriptedClock(100.0), max_num_seqs=1, bursts={"a": [1, 2, 1]})
    return measure(engine, workload((3, 4), (5, 2)), Offline(), **slo)


def test_latencies_with_a_queue_and_a_burst() -> None:
    metrics, traces = queue_of_two()
    assert [trace.token_times for trace in traces] == [[101, 102, 102, 103], [104, 105]]
    assert metrics.ttft_ms == Percentiles(mean=2500, p50=2500, n=2)  # 1000, 4000
    assert metrics.queue_ms == Percentiles(mean=1500, p50=1500, n=2)  # 0, 3000
    assert metrics.itl_ms == Percentiles(mean=750, p50=750, n=4)  # 500, 500, 1000 and 1000
    assert metrics.tpot_ms.mean == pytest.approx(833.3333333)  # 2000 / 3 and 1000
    assert metrics.tpot_ms.n == 2
    assert metrics.e2e_ms == Percentiles(mean=4000, p50=4000, n=2)  # 3000, 5000


def test_throughput_with_a_queue_and_a_burst() -> None:
    metrics, _ = queue_of_two()
    assert (metrics.num_requests, metrics.input_tokens, metrics.output_tokens) == (2, 8, 6)
    assert metrics.duration_s == 5
    assert metrics.output_tokens_per_s == 1.2  # 6 tokens in 5 s
    assert metrics.total_tokens_per_s == 2.8  # 14
    assert metrics.requests_per_s == 0.4
    # Full from 100; nothing waits from 103, when b starts. In between: a's prompt of 3, 4 tokens
    # and its end.
    assert metrics.steady == Window(3, 4 / 3, 7 / 3, 1 / 3)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({}, None),
        ({"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}, None),
        ({"ttft_ms": 4000}, 0.4),  # both: at the limit is within it
        ({"ttft_ms": 2000}, 0.2),  # a alone
        ({"tpot_ms": 700}, 0.2),  # a alone: 667 and 1000
        ({"e2e_ms": 2000}, 0.0),
        ({"ttft_ms": 4000, "e2e_ms": 3000}, 0.2),
    ],
)
def test_goodput(slo: dict[str, float | None], expected: float | None) -> None:
    assert queue_of_two(**slo)[0].goodput_requests_per_s == expected


def test_a_request_of_one_token_has_no_tpot_and_meets_any() -> None:
    metrics, traces = measure(
        ScriptedEngine(ScriptedClock()), workload((2, 1)), Offline(), tpot_ms=1
    )
    assert metrics.tpot_ms == metrics.itl_ms == Percentiles()
    assert metrics.goodput_requests_per_s == 1.0  # one in 1 s
    assert request_rows(traces)[0]["tpot_ms"] is None


def test_tokens_with_the_first_one_have_no_gap() -> None:
    engine = ScriptedEngine(ScriptedClock(), bursts={"a": [3, 1, 2]})
    metrics, _ = measure(engine, workload((2, 6)), Offline())
    # Tokens at 1, 1, 1, 2, 3, 3: gaps 1000, 500, 500.
    assert metrics.itl_ms == Percentiles(mean=2000 / 3, p50=500, n=3)
    assert metrics.tpot_ms.mean == 2000 / 3
    assert metrics.ttft_ms.mean == 1000


def test_open_loop_counts_from_the_scheduled_arrival() -> None:
    """A slow engine holds the driver up; the wait of those who came meanwhile must not be
    omitted."""
    engine = ScriptedEngine(ScriptedClock(50.0), max_num_seqs=1, step_s=10.0)
    metrics, traces = measure(engine, workload((2, 1), (2, 1), (2, 1)), At(0.0, 1.0, 2.0))
    assert [trace.scheduled_s for trace in traces] == [50, 51, 52]
    # the driver sat in the first step
    assert [trace.submitted_s for trace in traces] == [50, 60, 60]
    assert [row["ttft_ms"] for row in request_rows(traces)] == [10_000, 19_000, 28_000]
    assert [row["queue_ms"] for row in request_rows(traces)] == [0, 9_000, 18_000]
    assert metrics.duration_s == 30
    assert metrics.requests_per_s == 0.1


def test_closed_loop_counts_from_the_free_slot() -> None:
    """Two clients. a: 0-2, b: 0-3, c takes a's slot: 2-3, d takes one of the slots free at 3:
    3-4."""
    engine = ScriptedEngine(ScriptedClock())
    metrics, traces = measure(engine, workload((7, 2), (5, 3), (3, 1), (1, 1)), Concurrency(2))
    assert [trace.scheduled_s for trace in traces] == [0, 0, 2, 3]
    assert [trace.token_times[-1] for trace in traces] == [2, 3, 3, 4]
    assert metrics.ttft_ms.mean == 1000
    assert metrics.queue_ms.mean == 0
    assert metrics.e2e_ms.mean == 1750  # 2000, 3000, 1000, 1000
    assert metrics.duration_s == 4
    # Full from 0 to 3, when d starts: tokens a a b b b c; prompts 7 + 5 + 3; a, b and c end.
    assert metrics.steady == Window(3, 2.0, 7.0, 1.0)


def test_steady_window_begins_when_the_batch_is_full() -> None:
    """Room for two. a at 0, b at 2, c and d at 3: full from 2, and d leaves the queue at 5."""
    engine = ScriptedEngine(ScriptedClock(), max_num_seqs=2)
    work = workload((1, 4), (1, 3), (1, 2), (1, 2))
    metrics, traces = measure(engine, work, At(0.0, 2.0, 3.0, 3.0))
    assert [trace.started_s for trace in traces] == [0, 2, 4, 5]
    # From 2 to 5: a at 3, 4; b at 3, 4, 5; c at 5. Prompts of b and c; a and b end.
    assert metrics.steady == Window(3, 2.0, 8 / 3, 2 / 3)


def test_steady_window_is_null_where_there_is_none() -> None:
    never_full, _ = measure(ScriptedEngine(ScriptedClock()), workload((1, 1), (1, 1)), At(0.0, 5.0))
    assert never_full.steady == Window()
    # Room for two: a is gone when b comes, and the batch is full at 6, when c, the last, starts.
    engine = ScriptedEngine(ScriptedClock(), max_num_seqs=2)
    one_by_one, _ = measure(engine, workload((1, 1), (1, 2), (1, 2)), At(0.0, 5.0, 6.0))
    assert one_by_one.steady == Window()
    nothing_waits, _ = measure(ScriptedEngine(ScriptedClock()), workload((1, 3), (1, 3)), Offline())
    assert nothing_waits.steady == Window()
    silent = ScriptedEngine(ScriptedClock(), max_num_seqs=1, says_start=False)
    unknown, _ = measure(silent, workload((1, 3), (1, 3)), Offline())
    assert unknown.steady == Window()
    assert unknown.queue_ms == Percentiles()
    assert unknown.ttft_ms.mean == 2500  # 1000 and 4000


def calls(session: str, *starts: float) -> list[RequestTrace]:
    """Calls of a session, each of ten tokens in 10 s."""
    return [
        RequestTrace(
            *(f"{session}.{i}", 5, start, start, start, start + 10),
            *([start + k for k in range(1, 11)], [1] * 10, "length"),
        )
        for i, start in enumerate(starts)
    ]


def test_the_steady_window_of_sessions_ends_when_they_grow_fewer() -> None:
    """Eight at once for 20 s, then one of them alone for 200 s more."""
    traces = [trace for k in range(8) for trace in calls(f"s{k}", 0.0, 10.0)]
    traces += calls("s7", *(20.0 + 10 * i for i in range(20)))
    for sessions in ({}, {trace.request_id: trace.request_id[:2] for trace in traces}):
        metrics = compute(traces, {}, 8, sessions=sessions)
        assert metrics.steady == Window(20, 8.0, 12.0, 0.8)
        assert metrics.counted.steady == 16


def test_sessions_that_think_keep_their_places() -> None:
    """Two sessions with 5 s between their calls, and a third that takes the place of the first."""
    traces = calls("a", 0.0, 15.0) + calls("b", 2.0, 17.0, 32.0) + calls("c", 25.0)
    sessions = {trace.request_id: trace.request_id[0] for trace in traces}
    # Both places are taken from 2 to 35, when c ends; the last call starts at 32.
    assert compute(traces, {}, 2, sessions=sessions).steady.duration_s == 30
    assert compute(traces, {}, 3, sessions=sessions).steady == Window()


def test_a_static_batch_that_drains_while_others_wait_is_steady() -> None:
    """Two at a time, together: 4 s and 10 s, again, and then one alone, who waited for both."""
    times = [(0.0, 4), (0.0, 10), (10.0, 4), (10.0, 10), (20.0, 10)]
    traces = [
        RequestTrace(
            *(f"r{i}", 5, 0.0, 0.0, start, start + count),
            *([start + k + 1 for k in range(count)], [1] * count, "length"),
        )
        for i, (start, count) in enumerate(times)
    ]
    assert compute(traces, {}, 2).steady == Window(20, 28 / 20, 48 / 20, 4 / 20)


def test_the_steady_window_ends_with_the_measurement() -> None:
    traces = [trace for k in range(9) for trace in calls(f"r{k}", 10.0 * (k // 2))]
    assert compute(traces, {}, 2).steady.duration_s == 40
    assert compute(traces, {}, 2, until_s=25.0).steady == Window(25, 2.0, 3.2, 0.16)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(1, 5), st.integers(0, 9)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 25),
    st.sampled_from([{"ttft_ms": 3000.0}, {"ttft_ms": 4000.0, "e2e_ms": 6000.0}, {"tpot_ms": 9e3}]),
)
def test_goodput_counts_some_of_what_throughput_counts(
    requests: list[tuple[int, int, int, int]], until_s: int, slo: dict[str, float]
) -> None:
    traces = []
    for i, (due_s, wait_s, tokens, gap_s) in enumerate(requests):
        times = [float(due_s + wait_s + gap_s * k) for k in range(tokens)]
        trace = RequestTrace(f"r{i}", 5, due_s, due_s, due_s, times[-1], times, [1] * tokens)
        trace.finish_reason = "length"
        traces.append(trace)
    metrics = compute(traces, slo, 4, until_s=float(until_s))
    counted, rate = metrics.counted, metrics.requests_per_s
    if rate is None or metrics.duration_s is None:
        return
    assert rate == pytest.approx(counted.ended / metrics.duration_s)
    if counted.good is None:
        assert metrics.goodput_tokens_per_s is None and metrics.goodput_requests_per_s is None
        return
    assert metrics.goodput_requests_per_s == pytest.approx(counted.good / metrics.duration_s)
    assert counted.good <= counted.ended <= counted.due
    assert (metrics.goodput_tokens_per_s or 0) <= (metrics.output_tokens_per_s or 0) + 1e-9


def test_only_completed_requests_are_measured() -> None:
    engine = ScriptedEngine(ScriptedClock(), refuse={"a"}, abort={"b"})
    metrics, traces = measure(engine, workload((9, 9), (8, 8), (2, 3)), Offline())
    assert [trace.status for trace in traces] == ["refused", "aborted", "ok"]
    assert (metrics.num_requests, metrics.input_tokens, metrics.output_tokens) == (1, 2, 3)
    assert metrics.output_tokens_per_s == 1.0
    rows = request_rows(traces)
    assert [row["ttft_ms"] for row in rows] == [None, None, 1000]
    assert rows[1]["output_tokens"] == 2
    assert "can never fit" in rows[0]["error"]


def test_the_window_begins_with_the_first_arrival_even_of_a_failed_request() -> None:
    engine = ScriptedEngine(ScriptedClock(), refuse={"a"})
    metrics, _ = measure(engine, workload((1, 1), (1, 2)), At(0.0, 2.0))
    assert metrics.duration_s == 4  # b: tokens at 3 and 4
    assert metrics.output_tokens_per_s == 0.5


def test_the_window_ends_with_the_last_request_even_if_that_was_shed() -> None:
    def trace(name: str, end: float, reason: str) -> RequestTrace:
        times = [end - 0.5, end] if reason == "stop" else [0.2]
        return RequestTrace(name, 4, 0.0, 0.0, 0.0, end, times, [1] * len(times), reason)

    one = [trace("a", 1.0, "stop"), trace("b", 60.0, "shed")]
    metrics = compute(one, {"ttft_ms": 1000.0}, 4)
    assert (metrics.duration_s, metrics.requests_per_s, metrics.goodput_requests_per_s) == (
        60,
        1 / 60,
        1 / 60,
    )
    nothing = compute(one[1:], {"ttft_ms": 1000.0}, 4)
    assert (nothing.duration_s, nothing.output_tokens_per_s, nothing.goodput_requests_per_s) == (
        60,
        0,
        0,
    )
    assert nothing.ttft_ms == Percentiles() and nothing.num_requests == 0


def test_nothing_completed_is_null_not_millions() -> None:
    metrics, _ = measure(
        ScriptedEngine(ScriptedClock(), refuse={"a"}), workload((1, 5)), Offline(), ttft_ms=1
    )
    assert metrics == Metrics(counted=RequestCounts(due=1))
    assert metrics.output_tokens_per_s is None
    assert compute([], {}, 4) == Metrics()


def test_percentiles_are_null_below_their_number_of_samples() -> None:
    def known(n: int) -> list[str]:
        found = percentiles([1.0] * n)
        return [name for name in ("p50", "p90", "p95", "p99") if getattr(found, name) is not None]

    assert [len(known(n)) for n in (0, 1, 2, 9, 10, 19, 20, 99, 100)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    hundred = percentiles([float(i) for i in range(100, 0, -1)])
    assert (hundred.mean, hundred.p50, hundred.n) == (50.5, 50.5, 100)
    assert (hundred.p90, hundred.p95, hundred.p99) == pytest.approx((90.1, 95.05, 99.01))


def test_request_rows_count_from_the_origin() -> None:
    _, traces = queue_of_two()
    assert request_rows(traces, origin_s=100.0)[1] == {
        "request_id": "b",
        "scheduled_s": 0,
        "submitted_s": 0,
        "started_s": 3,
        "first_token_s": 4,
        "last_token_s": 5,
        "input_tokens": 5,
        "output_tokens": 2,
        "cached_tokens": None,
        "finish_reason": "length",
        "status": "ok",
        "error": None,
        "ttft_ms": 4000,
        "tpot_ms": 1000,
        "e2e_ms": 5000,
        "queue_ms": 3000,
    }


def test_every_field_of_the_record_has_a_metric() -> None:
    assert [*(metric.name for metric in METRICS), "own"] == [item.name for item in fields(Metrics)]


def test_the_examples_are_the_figures_of_the_scripted_engine() -> None:
    _, traces = queue_of_two()
    traces[0].answer_s, traces[0].reasoning_tokens = 103.0, 3
    metrics = compute(traces, {"ttft_ms": 2000, "e2e_ms": 5000}, 1)
    for entry in glossary()[: len(METRICS)]:
        value = getattr(metrics, entry.name)
        if isinstance(value, Percentiles):
            value = value.mean
        elif isinstance(value, Window):
            value = value.output_tokens_per_s
        elif isinstance(value, Attainment):
            value = value.all
        elif isinstance(value, RequestCounts):
            value = value.served_s
        numbers = re.findall(r"[\d.]*\d", entry.example)
        assert f"{value:.6g}" in numbers, entry


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 20))
def test_gaps_add_up_to_the_time_after_the_first_chunk(bursts: list[int], output_len: int) -> None:
    metrics, traces = measure(
        ScriptedEngine(ScriptedClock(), bursts={"a": bursts}), workload((1, output_len)), Offline()
    )
    times = traces[0].token_times
    after_the_first = 1e3 * (times[-1] - times[0])
    assert metrics.itl_ms.n == output_len - times.count(times[0])
    total = (metrics.itl_ms.mean or 0) * metrics.itl_ms.n
    assert total == pytest.approx(after_the_first)
    assert metrics.tpot_ms.mean == pytest.approx(metrics.itl_ms.mean)
    assert all(gap > 0 for gap in token_gaps(times))


def test_a_first_chunk_of_several_tokens_ends_no_gap() -> None:
    """11 tokens after 110 ms and 9 more after 90: each took 10 ms, and the 11 say nothing of it."""
    trace = RequestTrace("a", 3, 0.0, token_times=[0.11] * 11 + [0.2] * 9, finish_reason="length")
    metrics = compute([trace], {}, 1)
    assert metrics.itl_ms.n == 9
    assert [metrics.itl_ms.p50, metrics.tpot_ms.mean] == pytest.approx([10, 10])
    assert request_rows([trace])[0]["tpot_ms"] == pytest.approx(10)
    trace.token_times = [0.2] * 20
    metrics = compute([trace], {}, 1)
    assert metrics.itl_ms == metrics.tpot_ms == Percentiles()
    assert request_rows([trace])[0]["tpot_ms"] is None


@pytest.mark.parametrize("sweep", ["decoding", "beam-width"])
def test_the_example_records_have_the_gaps_of_their_token_times(sweep: str) -> None:
    """Tokens of a beam search come at once: it has no gap, not one of 0 ms."""
    files = record_files(EXAMPLES / f"{sweep}.tar.xz")
    for file in files:
        found_record = read_record(file)
        metrics = found_record["metrics"]
        rows = read_table(file.parent, REQUESTS, found_record["digests"][REQUESTS]).to_pylist()
        traces = [
            RequestTrace(
                row["request_id"], 1, 0.0, token_times=row["token_times_s"], finish_reason="length"
            )
            for row in rows
        ]
        found = compute(traces, {}, 1)
        for name in ("itl_ms", "tpot_ms"):
            assert metrics[name]["n"] == getattr(found, name).n
            assert metrics[name]["mean"] == pytest.approx(getattr(found, name).mean)
            assert "beam" not in file.parent.name or metrics[name]["mean"] is None
        assert [row["tpot_ms"] for row in rows] == [
            None if row["tpot_ms"] is None else pytest.approx(row["tpot_ms"])
            for row in request_rows(traces)
        ]
    assert len(files) in (6, 10)
