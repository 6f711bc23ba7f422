"""The search for the highest rate that holds: its statistics, its path, and engines whose capacity
is known."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from minivllm.analysis.capacity import Capacity, Criterion, Probe, search
from minivllm.analysis.capacity_runs import from_records, met
from minivllm.bench.driver import drive
from minivllm.bench.metrics.metrics import TTFT, request_rows
from minivllm.bench.records.record import Record
from minivllm.bench.records.storage import prepare, write_record
from minivllm.bench.workloads.arrivals import Constant, Poisson
from minivllm.bench.workloads.synthetic import Smoke
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.simulated.engine import SimulatedEngine
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload

ROOFLINE = ("engine=simulated", "engine.bandwidth_gb_s=20", "engine.tflops=0.5")


def evenly(good: int, total: int) -> list[bool]:
    """So many of the requests, spread as evenly as can be."""
    return [(i + 1) * good // total > i * good // total for i in range(total)]


@pytest.mark.parametrize(("good", "total"), [(0, 10), (5, 10), (80, 100), (90, 100), (100, 100)])
def test_the_interval_is_wilsons_where_runs_agree(good: int, total: int) -> None:
    """Its ends are the shares from which what was seen is so many standard errors away as Student's
    quantile at the last look says."""
    criterion = Criterion(max_blocks=8)
    low, high = Probe(1.0, [evenly(good, total)] * 8).interval(criterion)
    seen, z = good / total, student.ppf(1 - 0.5 * 0.05 / 2, 7)
    for end, limit in ((low, 0.0), (high, 1.0)):
        if seen != limit:
            distance = z * math.sqrt(end * (1 - end) / (8 * total))
            assert abs(seen - end) == pytest.approx(distance, rel=1e-5)
        else:
            assert end == pytest.approx(limit, abs=1e-9)


def test_runs_that_differ_count_for_less() -> None:
    criterion = Criterion(max_blocks=8)
    alike, unlike = [evenly(90, 100)] * 8, [evenly(100, 100)] * 6 + [evenly(60, 100)] * 2
    narrow, wide = (Probe(1.0, blocks).interval(criterion) for blocks in (alike, unlike))
    assert wide[0] < narrow[0] - 0.1 and wide[1] > narrow[1]


def test_order_within_a_run_says_nothing() -> None:
    """A queue may remember longer than a run lasts, so that neighbours that agree tell nothing."""
    criterion = Criterion(max_blocks=8)
    spread, together = ([block] * 8 for block in (evenly(90, 100), [True] * 90 + [False] * 10))
    assert Probe(1.0, spread).interval(criterion) == Probe(1.0, together).interval(criterion)


def test_a_rate_holds_after_enough_runs_and_fails_after_a_few() -> None:
    criterion = Criterion()
    assert [blocks for blocks, _ in criterion.looks] == [10, 20, 32]
    assert Probe(1.0, [[True] * 200] * 9).verdict(criterion) == "undecided"
    assert Probe(1.0, [[True] * 200] * 10).verdict(criterion) == "holds"
    assert Probe(1.0, [[True] * 200] * 19).interval(criterion) == Probe(
        1.0, [[True] * 200] * 10
    ).interval(criterion)
    assert Probe(1.0, [[False] * 200]).verdict(criterion) == "undecided"
    assert Probe(1.0, [[False] * 200] * 2).verdict(criterion) == "fails"
    assert Probe(1.0, [evenly(120, 200)] * 4).verdict(criterion) == "fails"
    assert Probe(1.0, [evenly(180, 200)] * 32).verdict(criterion) == "undecided"


def test_a_look_before_the_last_says_whether_the_share_is_above_and_not_how_far() -> None:
    criterion = Criterion()
    for runs in (10, 20):
        assert Probe(1.0, [[True] * 200] * runs).interval(criterion) == (0.9, 1.0)
        assert Probe(1.0, [evenly(176, 200)] * runs).interval(criterion)[0] < 0.88
    assert Probe(1.0, [[True] * 200] * 32).interval(criterion)[0] > 0.99


def test_early_runs_without_a_long_queue_do_not_exclude_the_truth() -> None:
    """Three runs of forty have a third of their requests in time, and 0.95 are on average: nearly
    half of all searches meet none of these runs in their first ten."""
    criterion, rng = Criterion(), np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        met = [evenly(50 if rng.random() < 0.075 else 150, 150) for _ in range(32)]
        found = search(lambda _, block, met=met: met[block], Criterion(max_rates=1), 1.0)
        low, high = found.probes[0].interval(criterion)
        covered += low <= 0.95 <= high
    assert covered >= 0.93 * 300


def test_few_long_queues_do_not_let_a_rate_hold() -> None:
    """Half of the runs meet one: their spread says that the share is known no better than of so
    many runs, however many requests each has."""
    criterion, rng = Criterion(), np.random.default_rng(0)
    held = covered = 0
    for _ in range(200):
        blocks: list[list[bool]] = []
        while Probe(1.0, blocks or [[True]]).verdict(criterion) == "undecided" and len(blocks) < 32:
            blocks.append(evenly(136 if rng.random() < 0.5 else 200, 200))  # 0.84 on average
        probe = Probe(1.0, blocks)
        low, high = probe.interval(criterion)
        held += probe.verdict(criterion) == "holds"
        covered += low <= 0.84 <= high
    assert held <= 0.05 * 200 and covered >= 0.93 * 200


# ---- the search


def stepwise(capacity: float, tried: list[float]) -> Any:
    """All meet their objectives up to the capacity, none beyond."""

    def measure(rate: float, block: int) -> list[bool]:
        if not block:
            tried.append(rate)
        return [rate <= capacity] * 50

    return measure


@given(st.floats(0.02, 500), st.floats(0.02, 500), st.sampled_from([0.02, 0.05, 0.2]))
def test_any_capacity_is_enclosed_within_the_tolerance(
    truth: float, start: float, tolerance: float
) -> None:
    tried: list[float] = []
    found = search(stepwise(truth, tried), Criterion(tolerance=tolerance, max_rates=40), start)
    assert found.holds is not None and found.beyond is not None and found.beyond == found.fails
    assert found.holds.rate <= truth < found.beyond.rate
    # rates have three digits
    assert found.beyond.rate / found.holds.rate <= max(1 + tolerance, 1.011)
    assert len(tried) == len(set(tried)) == len(found.probes)


def test_the_path_of_a_search() -> None:
    tried: list[float] = []
    found = search(stepwise(5.0, tried), Criterion(tolerance=0.1), 1.0)
    assert tried == [1, 2, 4, 8, 5.66, 4.76, 5.19]
    assert found.sentence() == (
        "capacity: 4.76 requests/s is the highest rate tried that holds, with 90 % of the "
        "requests meeting their objectives (95 % confidence); 5.19 fails"
    )
    assert [row["verdict"] for row in found.rows()] == ["holds"] * 4 + ["fails"] * 3
    assert found.criterion.bisections == 3 and Criterion(tolerance=2).bisections == 0
    tried.clear()
    search(stepwise(0.3, tried), Criterion(), 1.0)
    assert tried[:3] == [1, 0.5, 0.25]


def test_rates_in_doubt_are_measured_again_and_do_not_count() -> None:
    asked: Counter[float] = Counter()

    def measure(rate: float, block: int) -> list[bool]:
        assert block == asked[rate]
        asked[rate] += 1
        return evenly(100 if rate < 4 else 90 if rate < 8 else 0, 100)

    found = search(measure, Criterion(max_blocks=8, min_blocks=2, tolerance=1.5), 1.0)
    assert asked == {1: 8, 2: 8, 4: 8}
    assert found.holds is not None and found.holds.rate == 2 and found.fails is None
    assert found.sentence() == (
        "capacity: at least 2 requests/s, with 90 % of the requests meeting their objectives "
        "(95 % confidence); no rate that was tried failed, 4 is undecided"
    )


def test_a_search_without_an_end_says_so() -> None:
    tried: list[float] = []
    found = search(stepwise(math.inf, tried), Criterion(max_rates=4), 1.0)
    assert tried == [1, 2, 4, 8]
    assert found.sentence() == (
        "capacity: at least 8 requests/s, with 90 % of the requests meeting their objectives "
        "(95 % confidence); no rate that was tried failed"
    )

    burst = search(lambda rate, block: [True] * 50, Criterion(max_rates=4), 16.0)
    assert burst.sentence().endswith(
        "no rate that was tried failed; its 50 requests come within 0.39 s, a burst: raise "
        "workload.num_requests"
    )


@pytest.mark.parametrize(
    ("min_rate", "most", "rates"),
    [
        (0.0, 4, [1, 0.5, 0.25, 0.125]),
        (0.2, 16, [1, 0.5, 0.25, 0.2]),
        (1 / 3.0004, 16, [1, 0.5, 0.333]),
        (1, 16, [1]),
    ],
)
def test_a_search_that_finds_nothing_ends(min_rate: float, most: int, rates: list[float]) -> None:
    tried: list[float] = []
    found = search(stepwise(0.0, tried), Criterion(max_rates=most), 1.0, min_rate)
    assert tried == rates and found.holds is None
    assert found.sentence() == (
        f"capacity: no rate tried from {rates[-1]:g} requests/s up holds, with 90 % of the "
        f"requests meeting their objectives; it is 0 % at {rates[-1]:g} (fails)"
        + "; the search ended at task.max_rates=4"
        * (most == 4)
    )


def test_what_a_search_in_vain_could_not_decide_is_told() -> None:
    met = {16: 0, 8: 26, 4: 0}
    found = search(
        lambda rate, block: evenly(met[int(rate)], 30), Criterion(max_blocks=8, max_rates=3), 16.0
    )
    assert found.sentence().endswith(
        "; it is 0 % at 4 (fails), 86.7 % at 8 (undecided); a lower rate did worse than a "
        "higher one; the search ended at task.max_rates=3"
    )


def test_a_search_that_was_interrupted_is_no_result() -> None:
    """A measurement has failed, or somebody has pressed Ctrl-C: more runs would decide."""
    good = Probe(8.0, tuple(evenly(30, 30) for _ in range(32)))
    cut_off = Probe(16.0, tuple(evenly(met, 30) for met in (30, 30, 30)))
    begun = Capacity((cut_off,), Criterion())
    assert begun.unfinished is cut_off and begun.sentence() == (
        "capacity: not known yet, since the search ended at 16 requests/s after 3 of at most 32 "
        "runs, in which 100 % of the requests met their objectives; the same command goes on"
    )
    further = Capacity((good, cut_off), Criterion())
    assert good.verdict(Criterion()) == "holds"
    assert further.sentence().startswith("capacity: at least 8 requests/s, with 90 %")
    assert "; the search ended at 16 requests/s after 3 of at most 32 runs" in further.sentence()
    assert Capacity((good,), Criterion()).unfinished is None


# ---- engines of known capacity


def test_an_engine_that_serves_four_a_second_is_found_out() -> None:
    """One request at a time, a quarter of a second each, at equal distances: nobody waits up to a
    rate of 4.

    Beyond it each waits 1/4 - 1/rate longer than the one before, so that of 200 the first 180 are
    in time (90 %) while 179 (1/4 - 1/rate) + 1/4 <= 0.5 s: a rate of up to 4.0225.
    """

    def measure(rate: float, block: int) -> list[bool]:
        engine = ScriptedEngine(ScriptedClock(), max_num_seqs=1, step_s=0.25)
        traces = drive(
            engine, workload(*[(3, 1)] * 200), Constant(rate), SamplingParams(), engine.clock
        )
        return [TTFT().samples(trace)[0] <= 500 for trace in traces]

    found = search(measure, Criterion(tolerance=0.01, max_rates=30), 0.7)
    assert found.holds is not None and found.beyond is not None
    assert 3.95 <= found.holds.rate <= 4.0225
    assert found.beyond.rate <= 4.1


def test_a_simulated_queue_has_the_capacity_that_queueing_theory_says() -> None:
    """M/D/1: of Poisson arrivals at a server of 100 ms, P(wait <= t) by Erlang's sum (1909).

    For 90 % to have their first token within 300 ms the wait may be 200 ms, two services.
    """

    def share(rate: float) -> float:
        load, t = rate * 0.1, 2
        terms = (
            (-1) ** k * (load * (t - k)) ** k / math.factorial(k) * math.exp(load * (t - k))
            for k in range(t + 1)
        )
        return (1 - load) * sum(terms)

    truth = next(rate / 100 for rate in range(100, 1000) if share(rate / 100) < 0.9)
    config = compose([*ROOFLINE, "batching=sequential"])
    engine: SimulatedEngine = build(config["engine"], config=config)

    class Service:
        def __call__(self, *args: Any) -> float:
            return 100.0

        def describe(self) -> str:
            return "100 ms"

    engine.step_times = Service()
    work = Smoke(num_requests=1000, input_len=3, output_len=1).generate(None, 9, 99, 0)

    def measure(rate: float, block: int) -> list[bool]:
        engine.reset()
        traces = drive(engine, work, Poisson(rate), SamplingParams(), engine.clock, seed=block)
        return [TTFT().samples(trace)[0] <= 300 + 1e-6 for trace in traces]

    found = search(measure, Criterion(tolerance=0.02, max_blocks=8), 1.0)
    assert found.holds is not None and found.fails is not None
    assert (
        found.holds.rate == pytest.approx(truth, rel=0.12)
        and found.holds.rate < 1.02 * truth < 1.1 * found.fails.rate
    )


# ---- records


def test_a_result_is_read_back_from_records(tmp_path: Path) -> None:
    criterion = Criterion(attainment=0.5, max_blocks=2)
    task = {
        "_target_": "minivllm.tasks.capacity.run",
        "attainment": 0.5,
        "confidence": 0.95,
        "tolerance": 0.05,
        "max_blocks": 2,
        "max_rates": 16,
    }

    def record(
        name: str, rate: float, ttfts: list[float], status: str = "ok", seed: int = 0, **parts: Any
    ) -> Path:
        engine = ScriptedEngine(ScriptedClock())
        traces = drive(
            engine, workload(*[(3, 1)] * len(ttfts)), Constant(1.0), SamplingParams(), engine.clock
        )
        rows = [
            {**row, "ttft_ms": ttft} for row, ttft in zip(request_rows(traces), ttfts, strict=True)
        ]
        config = {
            "task": task,
            "arrival": {"rate": rate},
            "measure": {"repeats": 1, "slo": {"ttft_ms": 50.0, "e2e_ms": None}, "seed": seed},
        }
        made = Record(name, name, "s", name, 0, status, {**config, **parts})
        write_record(tmp_path / name, made, rows if status == "ok" else None)
        return tmp_path / name

    places = [
        record("a", 2.0, [10.0, 50.0, 51.0]),
        record("b", 2.0, [10.0] * 9, seed=1),
        record("c", 4.0, [], status="timeout"),
        record("d", 8.0, [], status="oom"),
        record("e", 1.0, [1.0], task={"_target_": "minivllm.tasks.bench.run"}),
    ]
    (search,) = from_records(places)
    assert search.capacity == Capacity(
        (Probe(2.0, [[True, True, False], [True] * 9]), Probe(4.0, [[False] * 1000])), criterion
    )
    assert search.limits == {"ttft_ms": 50.0} and search.left_out == 0
    assert from_records(places[4:]) == []
    for damage in (
        *(
            {"task": {**task, name: value}}
            for name, value in (("attainment", 5), ("confidence", "much"), ("odd", 1))
        ),
        *(
            {"measure": measure}
            for measure in ({}, {"slo": None}, {"slo": [1]}, {"slo": {"ttft_ms": "fast"}})
        ),
        *({"arrival": {"rate": rate}} for rate in (None, -1.0, 0, "x")),
    ):
        assert from_records([record("g", 2.0, [1.0], **damage)]) == []
    (places[1] / "requests.parquet").write_bytes(b"PAR1 torn")
    (places[0] / "requests.parquet").unlink()
    assert from_records(places)[0].capacity == Capacity((Probe(4.0, [[False] * 1000]),), criterion)
    row = request_rows(
        drive(
            ScriptedEngine(clock := ScriptedClock(), refuse={"a"}),
            workload((1, 1)),
            Constant(),
            SamplingParams(),
            clock,
        )
    )
    write_record(tmp_path / "f", Record("f", "f", "s", "f", 0, "ok", {}), row)
    assert met(
        tmp_path / "f", {"status": "ok", "config": {"measure": {"slo": {"ttft_ms": 1e9}}}}
    ) == [False]


def test_an_answer_in_one_chunk_decides_nothing(tmp_path: Path) -> None:
    """Its time per output token is not known, so neither is whether the rate holds."""
    row = {"status": "ok", "tpot_ms": None, "ttft_ms": 5.0}
    config = {"measure": {"slo": {"tpot_ms": 1e3, "ttft_ms": 1e3}}}
    for name, tokens, expected in (("one", 1, [True]), ("several", 5, None)):
        record = Record(name, name, "s", name, 0, "ok", {})
        write_record(tmp_path / name, record, [{**row, "output_tokens": tokens}])
        assert met(tmp_path / name, {"status": "ok", "config": config}) == expected


# ---- the task


def test_a_search_is_run_recorded_and_resumed(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )  # plots take seconds
    command = (
        "task=capacity",
        *ROOFLINE,
        "arrival=poisson",
        "workload.num_requests=60",
        "workload.output_len=8",
        "measure.slo.ttft_ms=60",
        "task.start_rate=8",
        "task.tolerance=1",
        "task.max_blocks=8",
    )
    done = cli(*command)
    assert done.code == 0, done.err
    (folder,) = (path for path in Path("runs").iterdir() if path.name != "workloads")
    records = [json.loads(path.read_text()) for path in folder.glob("*/record.json")]
    rates = {record["config"]["arrival"]["rate"] for record in records}
    assert 8.0 in rates and 2 <= len(rates) < len(records)
    (told,) = from_records([path.parent for path in folder.glob("*/record.json")])
    found = told.capacity
    assert found.holds is not None
    assert found.sentence() in done.out and f"{found.holds.rate:g} requests/s: " in done.out
    assert f"report: {Path('reports') / folder.name}" in done.out
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*/record.json")}
    again = cli(*command)
    assert again.code == 0 and found.sentence() in again.out
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/record.json")} == stamps
    torn = next(iter(stamps)).parent / "requests.parquet"
    torn.write_bytes(torn.read_bytes()[:40])
    assert cli(*command).code in (0, 1)  # measured anew, which may change what holds
    (measured,) = (path for path in stamps if path.stat().st_mtime_ns != stamps[path])
    assert measured.parent == torn.parent


def test_a_rate_that_takes_longer_than_a_measurement_may_is_told(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timing out would say nothing of the engine, and what says nothing is no record to go
    by."""
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    command = (
        *(
            "task=capacity",
            *ROOFLINE,
            "arrival=constant",
            "workload.num_requests=60",
            "workload.output_len=2",
        ),
        *("measure.slo.ttft_ms=0.01", "task.start_rate=8", "task.min_rate=1", "task.max_blocks=8"),
    )
    done = cli(*command, "measure.timeout_s=20")
    assert done.code == 1
    assert "its requests take 30 s of arrivals and measure.timeout_s is 20: raise that" in done.err
    assert "fails" in done.out and "at 1 " not in done.out
    again = cli(*command, "measure.timeout_s=3600")
    assert again.code == 1 and again.out.strip().splitlines()[-1].startswith("at 1 requests/s")


def test_a_timeout_counts_only_where_all_requests_could_come() -> None:
    def timed_out(rate: float) -> list[bool] | None:
        parts = {
            "workload": {"num_requests": 60},
            "arrival": {"rate": rate},
            "measure": {"timeout_s": 15.0, "slo": {}},
        }
        return met(Path(), {"status": "timeout", "config": parts})

    assert timed_out(3.0) is None and not any(timed_out(6.0) or [True])


@pytest.mark.parametrize(
    ("most", "advice"),
    [(16, "lower task.min_rate"), (2, "raise task.max_rates")],
    ids=["least rate", "rates"],
)
def test_a_search_in_vain_says_how_far_it_was_and_what_ended_it(
    cli: Any, monkeypatch: pytest.MonkeyPatch, most: int, advice: str
) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    done = cli(
        *(
            "task=capacity",
            *ROOFLINE,
            "arrival=poisson",
            "workload.num_requests=60",
            "workload.output_len=2",
        ),
        *("measure.slo.ttft_ms=0.01", "task.start_rate=8", "task.min_rate=4", "task.max_blocks=8"),
        f"task.max_rates={most}",
    )
    assert done.code == 1, done.err
    assert "trying arrival.rate=8: 8 s of arrivals" in done.out
    last = done.out.strip().splitlines()[-1]
    assert re.match(r"at 4 requests/s TTFT p90 is [\d,.]+ ms \(objective 0\.01 ms\)", last)
    assert last.endswith(f": raise the objectives, or {advice} to search below")


def test_a_dry_run_follows_the_search_as_far_as_it_is_recorded(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    command = (
        *(
            "task=capacity",
            *ROOFLINE,
            "arrival=poisson",
            "workload.num_requests=60",
            "workload.output_len=2",
        ),
        *("measure.slo.ttft_ms=60000", "task.start_rate=8", "task.max_blocks=8", "name=mine"),
    )
    dry = cli(*command, "sweep.dry_run=true")
    assert dry.code == 0 and not Path("runs").exists() and not Path("reports").exists(), dry.err
    assert (
        "search mine: the highest arrival.rate at which 90 % of the requests meet ttft_ms <= "
        "60000" in dry.out
    )
    assert (
        "first 8 requests/s, doubled while it holds, halved while it does not, down to 1: 60 s "
        "of" in dry.out
    )
    assert (
        "about 4 more until they are 5 % apart\n"
        "at most 16 rates and 128 measurements (1 to 8 a rate)\n" in dry.out
    )
    assert dry.out.endswith(
        "0 measurements recorded: how long one takes is unknown; next: arrival.rate=8: 8 s of "
        "arrivals\n"
    )
    assert cli(*command, "task.max_rates=2").code == 0
    (folder, *_) = Path("runs/mine").glob("*-*/")
    prepare(folder, {})  # as a new measurement does that is then killed
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    dry = cli(*command, "sweep.dry_run=true")
    assert dry.code == 0 and "16 requests/s: 100.0 % of 480 requests meet" in dry.out, dry.err
    assert (
        "16 measurements recorded, about " in dry.out
        and "each; next: arrival.rate=32: 2 s of" in dry.out
    )
    dry = cli(*command, "task.max_rates=2", "sweep.dry_run=true")
    assert (
        "each; nothing is left to measure\n" in dry.out
        and "capacity: at least 16 requests/s" in dry.out
    )
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["cell", "run"])
def test_the_engine_is_loaded_once_for_all_rates_and_blocks(
    cli: Any,
    isolation: str,
    plug_in: Callable[[str, str, str], None],
    user_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    plug_in(
        "engine",
        "faulty",
        f"_target_: tests.bench.faulty.FaultyEngine\nstate: {tmp_path / 'state'}\n",
    )
    done = cli(
        *(
            f"--config-dir={user_dir / 'conf'}",
            "task=capacity",
            "engine=faulty",
            "runtime.device=cpu",
            "name=mine",
        ),
        *(
            "arrival=constant",
            "task.start_rate=100",
            "task.tolerance=2",
            "task.max_rates=2",
            "measure.repeats=2",
            "task.max_blocks=8",
        ),
        *(
            "workload.num_requests=20",
            "workload.output_len=4",
            "measure.slo.ttft_ms=5000",
            "measure.roofline=false",
        ),
        f"measure.isolation={isolation}",
    )
    assert done.code == 0, done.err
    assert (
        len(list(Path("runs/mine").glob("*/record.json"))) == 16
    )  # 100 and 200 a second hold, eight blocks each
    assert len((tmp_path / "state").read_text().split()) == (1 if isolation == "cell" else 16)


def test_two_processes_do_not_make_one_search(cli: Any) -> None:
    Path("runs/mine").mkdir(parents=True)
    with filelock.FileLock("runs/mine/.lock"):
        done = cli(
            "task=capacity",
            *ROOFLINE,
            "arrival=poisson",
            "measure.slo.ttft_ms=60",
            "name=mine",
            "workload.num_requests=60",
        )
    assert (done.code, done.err) == (
        2,
        "error: search mine is running in another process; wait, or give name=...\n",
    )
    assert not list(Path("runs").rglob("record.json"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("arrival=offline", "measure.slo.ttft_ms=1"),
            "task=capacity searches for a rate: use arrival=poisson",
        ),
        (("sweep.fresh=true",), "sweep.fresh is for sweeps: add -m to the command"),
        (
            ("model=hf", "model.path=missing/", "arrival=offline"),
            "task=capacity searches for a rate: use arrival=poisson",
        ),
        (("arrival=poisson",), "task=capacity needs an objective, e.g. measure.slo.ttft_ms=500"),
        (
            (
                "arrival=poisson",
                "measure.slo.ttft_ms=1",
                "task.attainment=0.99",
                "workload.num_requests=16",
            ),
            "task.attainment=0.99 takes at least 550 requests to be known with 95 % confidence: "
            "raise workload.num_requests=16",
        ),
        (
            ("arrival=poisson", "measure.slo.ttft_ms=1", "task.max_blocks=7"),
            "task.max_blocks=7: whether a rate holds is known from the spread of runs with other "
            "seeds, of which it takes at least 8",
        ),
        (
            ("arrival=poisson", "measure.slo.ttft_ms=1", "task.attainment=1"),
            "task.attainment=1.0 must be at most 0.999",
        ),
        (
            ("arrival=poisson", "measure.slo.ttft_ms=1", "task.min_rate=2"),
            "task.min_rate=2 must be at most task.start_rate=1",
        ),
    ],
)
def test_what_cannot_be_searched_is_said_at_once(
    cli: Any, overrides: tuple[str, ...], message: str
) -> None:
    done = cli("task=capacity", *overrides)
    assert done.code == 2 and message in done.err and not Path("runs").exists()
