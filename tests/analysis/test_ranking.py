"""One rule for what is compared: throughput, or latencies where the load's own pace sets the
throughput."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.analysis.ablation.design import Design
from minivllm.analysis.ablation.effects import analyse
from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.comparison import compare
from minivllm.analysis.ranking import LATENCIES, caution, keeps_up, rank
from minivllm.analysis.rows import Row
from minivllm.bench.driver import drive
from minivllm.bench.offered_load import OfferedLoad
from minivllm.bench.options import MeasureOptions
from minivllm.bench.records.figures import Percentiles
from minivllm.bench.workloads.arrivals import Constant
from minivllm.engine.options import SamplingParams
from minivllm.report.ranking import not_separated
from minivllm.report.tables import speedups
from minivllm.report.verdict import verdict
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload
from tests.experiments.synthetic import ablation_rows
from tests.report.synthetic import make_record, write

POISSON = {"_target_": "minivllm.bench.workloads.arrivals.Poisson", "rate": 4.0}
ONE = Design("add_one_in", {"int8": ()})


def row(**fields: Any) -> Row:
    """A row of one ok record; in a name `__` stands for a dot."""
    known = {"status": "ok", "run_id": "r", "cell_id": "c", "arm": "a", "block": 0, "sweep": "s"}
    return known | {name.replace("__", "."): value for name, value in fields.items()}


def cell(**fields: Any) -> Cell:
    return gather([row(**fields)])[0]


def served(arrival: dict[str, Any] | str, **figures: float) -> Cell:
    """A cell of 100 requests with these figures below `metrics`."""
    arrivals = {"choices__arrival": arrival} if isinstance(arrival, str) else {}
    knobs = arrival if isinstance(arrival, dict) else {}
    return cell(
        **arrivals,
        **{f"config__arrival__{name}": value for name, value in knobs.items()},
        config__workload__num_requests=100,
        **{f"metrics__{name}": value for name, value in figures.items()},
    )


@pytest.mark.parametrize(
    "name", ["poisson", "gamma", "constant", "ramp", "replay", "one_of_a_users_own"]
)
def test_arrivals_by_the_clock_set_the_throughput(name: str) -> None:
    assert keeps_up(served(name)) is True
    assert rank([served(name)]).metrics == LATENCIES


@pytest.mark.parametrize("name", ["offline", "concurrency"])
def test_an_engine_that_is_waited_for_sets_its_own(name: str) -> None:
    assert keeps_up(served(name)) is None
    assert rank([served(name)]).metrics == ("output_tokens_per_s",)


@pytest.mark.parametrize(
    ("arrival", "figures", "well"),
    [
        # Of a Poisson process of 4 a second and seed 0 the last of 100 requests comes after some 25
        # s.
        (POISSON, {"duration_s": 26.0, "e2e_ms__mean": 500.0}, True),
        (POISSON, {"duration_s": 60.0, "e2e_ms__mean": 18_000.0}, False),
        # A few requests that all come before the first is done: the window is theirs, not the
        # arrivals'.
        (POISSON | {"rate": 400.0}, {"duration_s": 5.0, "e2e_ms__mean": 4800.0}, False),
        # A trace's own times are not in the record; a queue that grew is.
        ("replay", {"duration_s": 3600.0, "queue_ms__mean": 3.0}, True),
        ("replay", {"duration_s": 3600.0, "queue_ms__mean": 900_000.0}, False),
        # the engine tells no queue
        ("replay", {"duration_s": 3600.0, "ttft_ms__mean": 900_000.0}, False),
        ({"rate": 50.0}, {"requests_per_s": 5.0}, False),
        ({"rate": 5.0}, {"requests_per_s": 5.0}, True),
    ],
)
def test_what_comes_faster_than_it_is_served_caps_nothing(
    arrival: Any, figures: dict[str, float], well: bool
) -> None:
    found = served("poisson" if isinstance(arrival, dict) else arrival, **figures)
    if isinstance(arrival, dict):
        for knob, value in arrival.items():
            found.rows[0][f"config.arrival.{knob}"] = value
    assert keeps_up(found) is well
    ranking = rank([found])
    assert ranking.metrics == (LATENCIES if well else ("output_tokens_per_s",))
    assert ("sets the throughput" in ranking.notes[0]) is well
    assert ("not keep up" in ranking.notes[0]) is not well


@pytest.mark.parametrize(("rate", "well"), [(0.25, True), (3.0, False), (10.0, False)])
def test_an_overload_that_ends_by_time_is_not_kept_up_with(rate: float, well: bool) -> None:
    """An engine that serves a request a second, measured for a minute of a longer workload."""
    measure = MeasureOptions(duration_s=60.0)
    load = OfferedLoad.of(workload(*[(2, 1)] * 1000), Constant(rate), SamplingParams(), measure)
    engine = ScriptedEngine(ScriptedClock(), max_num_seqs=1)
    traces = drive(
        *(engine, load.workload, load.arrival, load.params, engine.clock), stopping=load.stopping
    )
    figures = load.figures(traces, 1)[1]
    assert figures.duration_s == 60 and figures.counted.due == 60 * rate
    found = cell(
        config__arrival___target_=f"{Constant.__module__}.Constant",
        config__arrival__rate=rate,
        choices__arrival="constant",
        config__workload__num_requests=1000,
        config__measure__duration_s=60.0,
        **{f"metrics__{name}": getattr(figures, name) for name in ("duration_s", "requests_per_s")},
        metrics__e2e_ms__mean=figures.e2e_ms.mean,
        metrics__counted__served_s=figures.counted.served_s,
    )
    assert keeps_up(found) is well


def test_users_who_think_longer_than_they_wait_set_the_throughput() -> None:
    conversation = {"choices__arrival": "concurrency", "config__workload__turns": 4}
    for think_s, e2e_ms, well in ((0.5, 100.0, True), (0.5, 900.0, False), (0.0, 100.0, None)):
        found = cell(
            **conversation, config__workload__think_s=think_s, metrics__e2e_ms__mean=e2e_ms
        )
        assert keeps_up(found) is well
    assert (
        keeps_up(
            cell(**{**conversation, "config__workload__turns": 1}, config__workload__think_s=0.5)
        )
        is None
    )


def test_of_several_cells_one_that_keeps_up_is_enough() -> None:
    """Its throughput is the load's, so that no throughput says how far it is ahead."""
    well = served("poisson", duration_s=30.0, ttft_ms__mean=10.0)
    behind = served("poisson", duration_s=60.0, ttft_ms__mean=20_000.0)
    ranking = rank([well, behind])
    assert ranking.metrics == LATENCIES and len(ranking.behind) == 1 and len(ranking.notes) == 2
    assert rank([well, served("offline")]).metrics == ("output_tokens_per_s",)
    assert rank([well]).sets("metrics.steady.output_tokens_per_s") and rank([well]).sets(
        "requests_per_s"
    )
    assert not rank([well]).sets("metrics.goodput_requests_per_s") and not rank([behind]).sets(
        "duration_s"
    )


def test_a_search_is_warned_before_it_begins() -> None:
    speed = "metrics.output_tokens_per_s"
    assert "sweep.direction=minimize" in (caution(speed, row(choices__arrival="poisson")) or "")
    assert caution("metrics.e2e_ms.p50", row(choices__arrival="poisson")) is None
    assert caution(speed, row(choices__arrival="concurrency")) is None


def paced(rows: list[Row], **latencies: Callable[[Row], float]) -> list[Row]:
    """Rows whose requests came at a rate that was kept up with: one throughput, and these
    latencies."""
    rng = np.random.default_rng(0)
    for one in rows:
        one["choices.arrival"] = "poisson"
        one["metrics.output_tokens_per_s"] = 1000.0 * math.exp(rng.normal(0, 1e-4))
        for name, value in latencies.items():
            one[f"metrics.{name}.p50"] = value(one) * math.exp(rng.normal(0, 0.005))
    return rows


def test_an_ablation_goes_by_latency_where_the_load_sets_the_throughput() -> None:
    rows = ablation_rows(ONE, {}, blocks=8)

    def ms(one: Row) -> float:
        return 80.0 if one["arm"] == "with int8" else 100.0

    found = analyse(paced(rows, e2e_ms=ms, itl_ms=ms))
    assert found is not None and (found.metric, found.direction) == ("e2e_ms.p50", "lower")
    (effect,) = found.effects
    assert effect.verdict == "faster" and effect.ratio == pytest.approx(0.8, rel=0.02)
    assert any("the load sets the throughput" in note for note in found.notes)
    for one in rows:  # who asks for the throughput gets it, and is told what it is
        one["ablation.named"] = True
    named = analyse(rows)
    assert named is not None and named.metric == "output_tokens_per_s"
    assert (
        named.effects[0].verdict == "none"
        and "was asked for, and the load sets it" in named.notes[0]
    )


def test_a_change_that_reads_as_one_is_none_however_certain() -> None:
    found = analyse(ablation_rows(ONE, {"int8": 1.003}, noise=1e-6, blocks=8))
    assert found is not None and found.effects[0].p_holm is not None
    assert found.effects[0].p_holm < 0.05 and found.effects[0].verdict == "none"
    assert found.effects[0].minimum_detectable == pytest.approx(0.005)


def test_compare_looks_at_the_latencies_where_the_load_sets_the_throughput() -> None:
    def run(factor: float, day: int) -> list[Row]:
        rows = ablation_rows(ONE, {}, blocks=6, ablation=None)
        for one in rows:
            one["provenance.started_at"] = one["provenance.started_at"].replace(
                "-01T", f"-{day:02d}T"
            )
        kept = [one for one in rows if one["arm"] == "baseline"]
        return paced(
            kept, e2e_ms=lambda _: 900.0, ttft_ms=lambda _: 20.0 * factor, itl_ms=lambda _: 9.0
        )

    worse = compare(run(1.0, 1), run(3.0, 2), None, 0.02, 0.25)
    assert worse.exit_code == 1 and {one.metric for one in worse.cells} == {*LATENCIES}
    assert [one.metric for one in worse.cells if one.verdict == "slower"] == ["ttft_ms.p50"]
    assert (
        worse.conclusion.startswith("Regression of ")
        and "in 1 of 3 figures of 1: " in worse.conclusion
    )
    assert compare(run(1.0, 1), run(1.0, 2), None, 0.02, 0.25).exit_code == 0
    asked = compare(run(1.0, 1), run(3.0, 2), "output_tokens_per_s", 0.02, 0.25)
    assert asked.exit_code == 0 and "was asked for, and the load sets it" in asked.notes[0]


def test_pages_and_terminal_go_by_the_same_rule(tmp_path: Path) -> None:
    records = [
        make_record(block=b, index=i, cell_id=f"c{i}", run_id=f"{i}{b}")
        for i in (0, 1)
        for b in (0, 1)
    ]
    for record in records:
        record.config["choices"]["arrival"] = "poisson"
        record.config["batching"]["knob"] = record.cell_id
        record.metrics.queue_ms = Percentiles(mean=1.0, p50=1.0)
    from minivllm.analysis.rows import read_rows

    cells = gather(read_rows(write(tmp_path, records, parquet=False))[0])
    assert speedups(cells) == []  # no ratio of what the load sets
    assert verdict(cells).headline.startswith("Lowest E2E p50: ")
    assert not any("fastest" in line for line in not_separated(cells))
