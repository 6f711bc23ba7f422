"""workload.num_requests=auto: one pilot, one number for every arm, block and resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.reading import read_records
from minivllm.config.compose import build, compose
from minivllm.errors import BadInput
from minivllm.experiments import filling
from minivllm.experiments.filling import PilotResult

Cli = Callable[..., Any]
SIMULATED = (
    *("engine=simulated", "engine.bandwidth_gb_s=1", "engine.tflops=0.2"),
    *("workload.num_requests=auto", "workload.fill_s=3", "workload.output_len=16"),
)


def numbers(folder: str) -> set[Any]:
    return {record["config"]["workload"]["num_requests"] for record in read_records(folder)}


@pytest.fixture
def no_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> PilotResult:
        raise AssertionError("a pilot was made")

    monkeypatch.setattr(filling, "find", find)


def test_every_arm_block_and_resume_has_the_number_of_one_pilot(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("-m", *SIMULATED, "batching=sequential,continuous", "sweep.name=filled")
    done = cli(*command, "measure.repeats=2")
    assert done.code == 0, done.err
    assert done.err.count("pilot: how many requests fill 3 s, on batching=continuous") == 1
    (number,) = numbers("runs/filled")
    assert isinstance(number, int)
    plan = json.loads(Path("runs/filled/plan.json").read_text())
    assert plan["filled"]["num_requests"] == number and plan["filled"]["requests_per_s"] > 0
    records = read_records("runs/filled")
    durations = {r["arm"]: r["metrics"]["duration_s"] for r in records}
    # the fastest arm fills about the time, the others take longer
    assert 2 < durations["batching=continuous"] < 6
    assert durations["batching=sequential"] > durations["batching=continuous"]
    assert not [*Path("runs").glob(".pilot*")]
    monkeypatch.setattr(filling, "find", lambda *_: pytest.fail("a pilot was made"))
    again = cli(*command, "measure.repeats=3")
    assert again.code == 0 and "4 of 6 recorded already" in again.out
    assert numbers("runs/filled") == {number} and len(read_records("runs/filled")) == 6


def test_a_run_of_one_cell_has_a_pilot_too(cli: Cli) -> None:
    done = cli(*SIMULATED, "name=lone")
    assert done.code == 0, done.err
    (record,) = read_records("runs/lone")
    assert record["config"]["workload"]["num_requests"] > 16
    assert 2 < record["metrics"]["duration_s"] < 6


@pytest.mark.usefixtures("no_pilot")
def test_a_dry_run_makes_no_pilot(cli: Cli) -> None:
    for words in ((*SIMULATED, "sweep.dry_run=true"), ("-m", *SIMULATED, "sweep.dry_run=true")):
        done = cli(*words)
        assert done.code == 0, done.err
    assert not Path("runs").exists()


def test_an_open_loop_needs_no_pilot(cli: Cli) -> None:
    done = cli(*SIMULATED, "arrival=constant", "arrival.rate=20", "name=open")
    assert done.code == 0, done.err
    assert numbers("runs/open") == {60} and "pilot" not in done.err


@pytest.mark.usefixtures("no_pilot")
def test_other_tasks_refuse_it(cli: Cli) -> None:
    words = ("task=capacity", "arrival=poisson", "measure.slo.ttft_ms=500")
    done = cli(*words, "workload.num_requests=auto")
    assert done.code == 2 and "workload.num_requests='auto' is for task=bench" in done.err


def test_a_pilot_that_fails_says_so(cli: Cli) -> None:
    done = cli("-m", *SIMULATED, "measure.timeout_s=0.001", "sweep.name=late")
    assert done.code == 2 and "the pilot ended as timeout" in done.err, done.err
    assert not [*Path("runs").glob(".pilot*")] and not [*Path("runs").glob("late/*/record.json")]


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        (["cache=none", "batching.max_num_seqs=64"], ["batching=sequential"]),
        (["batching=sequential"], ["batching=continuous"]),
        (["batching=static"], ["batching=continuous", "batching.max_num_seqs=2"]),
        (["attention=eager"], ["attention=sdpa"]),
        (["runtime.cpu_kernels=off"], ["batching.max_num_seqs=2"]),
        (["batching.max_num_seqs=4"], ["batching.max_num_seqs=32"]),
        (["arrival=concurrency", "arrival.concurrency=1"], ["batching.max_num_seqs=2"]),
    ],
)
def test_the_pilot_is_made_on_what_should_be_fastest(slow: list[str], fast: list[str]) -> None:
    assert filling.slowness(compose(fast)) < filling.slowness(compose(slow))


def test_a_plan_that_says_nothing_is_of_no_pilot(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert filling.known(plan) is None
    for text in ("{", "{}", '{"filled": 3}', '{"filled": {"num_requests": 3}}'):
        plan.write_text(text)
        assert filling.known(plan) is None
    found = PilotResult(512, "quant=nf4", 51.2)
    plan.write_text(json.dumps(filling.field(found)))
    assert filling.known(plan) == found and filling.field(None) == {}


def test_a_workload_whose_number_is_not_found_yet_cannot_be_made() -> None:
    workload = build(compose(["workload.num_requests=auto"])["workload"])
    with pytest.raises(BadInput, match="give a number"):
        workload.check_lengths(1024)
