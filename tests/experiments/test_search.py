"""A search: what a trial is worth, and Optuna's sweeper in front of simulated cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import yaml
from omegaconf import DictConfig

from minivllm.analysis.ablation.findings import Goal
from minivllm.analysis.format import sig
from minivllm.bench.records import storage
from minivllm.bench.records.figures import Metrics
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.bench.records.reading import read_records
from minivllm.config import compose as config
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.jobs import read_measurements
from minivllm.experiments.search import WORST, Search, excess, goal_of, validate, worth

Cli = Callable[..., Any]
GOAL = Goal(
    "metrics.output_tokens_per_s", limits={"metrics.ttft_ms.p90": 100.0, "metrics.itl_ms.p90": 20.0}
)


def block(
    speed: float | None, ttft: float = 90.0, itl: float = 10.0, status: str = "ok"
) -> dict[str, Any]:
    metrics = {"output_tokens_per_s": speed, "ttft_ms": {"p90": ttft}, "itl_ms": {"p90": itl}}
    return {"status": status, "metrics": metrics}


def test_within_the_limits_the_objective_counts() -> None:
    assert excess(GOAL, [block(50.0)]) == 0 and worth(GOAL, [block(50.0)]) == 50.0
    assert (
        worth(GOAL, [block(50.0, ttft=60), block(70.0, ttft=140)]) == 60.0
    )  # means over blocks: 100 is allowed


def test_outside_the_limits_anything_is_worse_and_the_further_the_worse() -> None:
    allowed, slightly, far = [block(1.0)], [block(1e6, ttft=110)], [block(1e6, ttft=300, itl=40)]
    assert excess(GOAL, slightly) == pytest.approx(0.1) and excess(GOAL, far) == pytest.approx(3.0)
    failed = [block(1e6), block(1e6, status="oom")]
    values = [worth(GOAL, blocks) for blocks in (allowed, slightly, far, failed, [])]
    assert values[:4] == sorted(values[:4], reverse=True) and values[3] == values[4] < -WORST
    least = Goal("metrics.output_tokens_per_s", False, GOAL.limits)
    values = [worth(least, blocks) for blocks in (allowed, slightly, far, failed)]
    assert values == sorted(values) and values[0] == 1.0
    huge = [[block(4e11)], [block(2e9, ttft=110)]]  # bytes, or operations
    assert worth(least, huge[0]) < worth(least, huge[1])


def goal(objective: str | None, **limits: float) -> Goal:
    return goal_of({"objective": objective, "direction": "minimize", "limits": limits})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("block", "sweep.objective=block: name a number of the record with its group"),
        (None, "sweep.objective is missing"),
        (
            "metrics.output_tokens_per_second",
            "sweep.objective: .* no metrics.output_tokens_per_second; did",
        ),
        ("quality.perplexitty", "a record has no quality.perplexitty; did you mean perplexity"),
        (
            "metrics.ttft_ms",
            r"is no number but a group of them; choose one, e.g. metrics.ttft_ms.\w+",
        ),
        *(
            (name, f"sweep.objective: {name} is no number")
            for name in ("metrics.itl_ms", "metrics.steady")
        ),
    ],
)
def test_a_goal_must_be_a_number_of_the_record(objective: str | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        goal(objective)


def test_limits_must_be_numbers_of_the_record_above_zero() -> None:
    speed = "metrics.output_tokens_per_s"
    assert goal(speed, **{"metrics.ttft_ms.p90": 1.0}) == Goal(
        speed, False, {"metrics.ttft_ms.p90": 1.0}
    )
    with pytest.raises(
        BadInput, match=r"sweep.limits: a record has no metrics.tft_ms.p90; did you mean ttft"
    ):
        goal(speed, **{"metrics.tft_ms.p90": 1.0})
    with pytest.raises(BadInput, match=r"sweep.limits: metrics.ttft_ms.p90=0 must be above 0"):
        goal(speed, **{"metrics.ttft_ms.p90": 0.0})
    with pytest.raises(BadInput, match="a percentile needs more requests"):
        worth(GOAL, [block(None)])


@pytest.mark.parametrize(
    ("name", "overrides", "lacking"),
    [
        ("metrics.ttft_ms.p99", ["workload.num_requests=100"], ["workload.num_requests=99"]),
        ("metrics.ttft_ms.p90", ["workload.num_requests=10"], ["workload.num_requests=9"]),
        ("metrics.ttft_ms.mean", ["workload.num_requests=1"], ["task=quality"]),
        # a sample a token
        ("metrics.itl_ms.p99", ["workload.num_requests=2"], ["task=quality"]),
        # whose requests are its turns
        ("metrics.ttft_ms.p99", ["workload=multi_turn"], ["workload.num_requests=9"]),
        ("metrics.goodput_requests_per_s", ["measure.slo.ttft_ms=500"], []),
        ("quality.perplexity", ["measure.quality=true"], []),
        ("quality.perplexity", ["task=quality"], []),
    ],
)
def test_what_a_record_may_have_is_not_refused(
    name: str, overrides: list[str], lacking: list[str]
) -> None:
    validate(Goal(name), compose(overrides))
    with pytest.raises(BadInput, match=name):
        validate(Goal(name), compose(lacking))


def test_whether_energy_is_there_the_record_alone_can_say() -> None:
    """The objective is looked at before the limits."""
    goal = Goal("energy.joules", limits={"quality.perplexity": 9.0})
    with pytest.raises(BadInput, match=r"sweep.limits: quality.perplexity takes measure.quality"):
        validate(goal, compose([]))


def test_the_limits_are_numbers_of_a_record_too() -> None:
    with pytest.raises(BadInput, match=r"sweep.limits: metrics.e2e_ms.p50 takes task=bench"):
        validate(
            Goal("quality.perplexity", False, {"metrics.e2e_ms.p50": 1.0}),
            compose(["task=quality"]),
        )
    goal = Goal("metrics.output_tokens_per_s", limits={"metrics.e2e_ms.p95": 100.0})
    with pytest.raises(
        BadInput, match=r"sweep.limits: metrics.e2e_ms.p95 takes 20 requests: .*=19"
    ):
        validate(goal, compose(["workload.num_requests=19"]))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir / "index.html"
    )


@pytest.fixture
def optuna(quick: None) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")


class Trials:
    """A search whose trials say which batch they want; a stand-in measures them, and the larger the
    faster."""

    def __init__(self) -> None:
        self.composed: list[str] = []
        fixed = ("engine=simulated", "engine.bandwidth_gb_s=10", "engine.tflops=1")
        self.search = Search(
            Goal("metrics.output_tokens_per_s"), compose(fixed), self.load, self.launch
        )
        self.search.define(fixed, (), "mine", 4)
        self.fixed = fixed

    def load(self, overrides: Sequence[str]) -> DictConfig:
        self.composed.append(
            " ".join(text for text in overrides if text.startswith("batching.max"))
        )
        return config.load(overrides)

    def launch(self, jobs: Sequence[Sequence[str]]) -> list[Any]:
        for overrides in jobs:
            for m in read_measurements(Path(compose(overrides)["sweep"]["plan"]))[0]:
                record = m.record(
                    "ok", metrics=Metrics(output_tokens_per_s=m.config["batching"]["max_num_seqs"])
                )
                storage.write_record(m.path, record, config=m.config)
        return [SimpleNamespace(return_value=0) for _ in jobs]

    def run(self, *sizes: int) -> tuple[int, list[float]]:
        values: list[float] = []

        def propose() -> None:
            for size in sizes:
                values.extend(self.search.measure([(*self.fixed, f"batching.max_num_seqs={size}")]))

        return self.search.run(propose), values


def test_an_invalid_trial_is_one_that_failed_and_the_search_goes_on(cli: Cli, quick: None) -> None:
    code, values = Trials().run(0, 4, 8)
    assert code == 0 and values[0] < -WORST and values[1:] == [4, 8]
    records = {record["arm"]: record for record in read_records("runs/mine")}
    assert [r["status"] for r in sorted(records.values(), key=lambda r: r["position"])] == [
        "invalid",
        "ok",
        "ok",
    ]
    assert "must be at least 1" in records["batching.max_num_seqs=0"]["error"]["message"]


def test_a_trial_that_was_interrupted_is_in_no_count(
    cli: Cli, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = Trials()
    launch = trials.launch

    def once(jobs: Sequence[Sequence[str]]) -> list[Any]:
        if len(trials.search.cells) > 1:
            raise KeyboardInterrupt
        return launch(jobs)

    trials.search.launch = once
    with pytest.raises(KeyboardInterrupt):
        trials.run(4, 8)
    out = capsys.readouterr().out
    assert "Output (tok/s), in 1 trial.\n" in out and "1 trial not measured to the end\n" in out


def test_a_trial_is_planned_once(cli: Cli, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    trials = Trials()
    _, values = trials.run(4, 2, 8, 4)
    assert values == [4, 2, 8, 4]
    assert trials.composed == [f"batching.max_num_seqs={size}" for size in (4, 2, 8)]
    told = [line for line in capsys.readouterr().out.splitlines() if ": trial " in line]
    # the fourth was the first
    assert told == [f"search mine: trial {n} of at most 4" for n in (1, 2, 3)]


def test_a_trial_that_sets_nothing_has_the_name_of_a_sweeps_lone_arm(cli: Cli, quick: None) -> None:
    trials = Trials()
    assert trials.search.run(lambda: trials.search.measure([trials.fixed])) == 0
    assert [record["arm"] for record in read_records("runs/mine")] == [DEFAULT_ARM]


def test_a_search_without_a_valid_trial_is_bad_input(cli: Cli, quick: None) -> None:
    with pytest.raises(
        BadInput, match=r"none of the 2 arms is valid; the first: batching.max_num_seqs=0"
    ):
        Trials().run(0, -1)


def test_two_processes_do_not_make_one_search(cli: Cli, quick: None) -> None:
    Path("runs/mine").mkdir(parents=True)
    with (
        filelock.FileLock("runs/mine/.lock"),
        pytest.raises(BadInput, match="search mine is running in another process"),
    ):
        Trials().run(4)


TUNE = (
    "preset=tune",
    *("engine=simulated", "engine.bandwidth_gb_s=10", "engine.tflops=1", "engine.overhead_ms=1"),
    *("hydra.sweeper.n_trials=5", "hydra.sweeper.sampler.n_startup_trials=3", "sweep.name=mine"),
)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("metrics.ttft_ms.p99", "100 requests: raise workload.num_requests=32"),
        ("metrics.goodput_requests_per_s", "an objective of latency"),
        ("quality.perplexity", "measure.quality=true"),
    ],
)
def test_a_number_that_no_record_will_have_is_refused_before_the_first_trial(
    cli: Cli, optuna: None, name: str, needed: str
) -> None:
    for more in ((), ("sweep.dry_run=true",)):
        done = cli(*TUNE, f"sweep.objective={name}", *more)
        assert done.code == 2 and done.err.startswith(
            f"error: sweep.objective: {name} takes {needed}"
        )
        assert not any(Path().glob("runs/*/*/")) and not Path("reports").exists()


@pytest.mark.slow
def test_the_best_cell_within_the_limits_is_found_and_the_search_resumes(
    cli: Cli, optuna: None
) -> None:
    limits = "sweep.limits={metrics.ttft_ms.p90:2000,metrics.itl_ms.p90:8}"
    done = cli(*TUNE, limits)
    assert done.code == 0, done.err
    records = {record["arm"]: record for record in read_records("runs/mine")}
    goal = Goal(
        "metrics.output_tokens_per_s", True, {"metrics.ttft_ms.p90": 2000, "metrics.itl_ms.p90": 8}
    )
    kept = {arm: worth(goal, [r]) for arm, r in records.items() if not excess(goal, [r])}
    assert f": {len(kept)} of {len(records)} trials kept within these limits." in done.out
    ties = [arm for arm in kept if kept[arm] == max(kept.values())]  # a knob may make no difference
    (headline,) = (
        line for line in done.out.splitlines() if line.startswith("Best within the limits")
    )
    figure, _, label = headline.removesuffix(".").partition(": ")
    assert figure.endswith(f"Output {sig(max(kept.values()))} tok/s")
    values = set(label.partition(";")[0].split(" · "))
    best = next(arm for arm in ties if {part.rpartition(".")[2] for part in arm.split()} == values)
    result = yaml.safe_load(Path("runs/mine/optimization_results.yaml").read_text())
    assert result["best_value"] == pytest.approx(kept[best])
    assert {f"{knob}={value}" for knob, value in result["best_params"].items()} == set(best.split())
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]

    before = {path: path.stat().st_mtime_ns for path in Path("runs/mine").glob("*/record.json")}
    again = cli(*TUNE, limits)
    assert {
        path: path.stat().st_mtime_ns for path in Path("runs/mine").glob("*/record.json")
    } == before
    assert headline in again.out


@pytest.mark.slow
def test_a_knob_that_is_narrowed_on_the_command_line_names_trials_too(
    cli: Cli, optuna: None
) -> None:
    done = cli(
        "-m",
        *TUNE,
        "cache.block_size=16",
        "batching.max_num_seqs=8,12",
        "hydra.sweeper.n_trials=1",
        "++sweep.limits={metrics.ttft_ms.p90:100000,metrics.itl_ms.p90:1000}",
    )
    assert done.code == 0, done.err
    (record,) = read_records("runs/mine")
    knobs = {text.partition("=")[0] for text in record["arm"].split()}
    assert knobs == {"batching.max_num_seqs", "batching.max_num_batched_tokens"}


@pytest.mark.slow
def test_no_cell_within_the_limits_is_an_exit_code(cli: Cli, optuna: None) -> None:
    done = cli(
        *TUNE,
        "++sweep.limits={metrics.e2e_ms.p90:0.001,metrics.ttft_ms.p90:1e9}",
        "hydra.sweeper.n_trials=1",
    )
    assert done.code == 1 and "No trial is within the limits; the nearest, E2E p90 " in done.out


@pytest.mark.parametrize("more", [(), ("-m", "quant=bf16,int8")])
def test_a_goal_without_a_search_is_refused(cli: Cli, more: tuple[str, ...]) -> None:
    done = cli(*more, "sweep.objective=metrics.output_tokens_per_s")
    assert (
        done.code == 2 and done.err == "error: sweep.objective is for a search: add preset=tune\n"
    )
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.fresh=true", "sweep.fresh is not for a search"),
        ("sweep.retry=failed", "sweep.retry is not for a search"),
        ("sweep.objective=null", "sweep.objective is missing"),
        ("sweep.objective=metrics.speed", "sweep.objective: a record has no metrics.speed"),
        ("sweep.direction=up", "sweep.direction='up' must be maximize or minimize"),
        (
            "hydra.sweeper.n_trials=0",
            "hydra.sweeper.n_trials=0 must be a whole number of at least 1",
        ),
        ("hydra.sweeper.n_jobs=0", "hydra.sweeper.n_jobs=0 must be a whole number of at least 1"),
        ("hydra.sweeper.sampler.seed=x", "hydra.sweeper.sampler: "),
        (
            "batching.max_num_seqs=interval(5,1)",
            "batching.max_num_seqs=interval(5,1): Optuna cannot choose from this: ",
        ),
        ("hydra/launcher=nowhere", "hydra/launcher=nowhere: no such option"),
        ("cache.blok_size=3", "cache.blok_size: no such option of cache=paged"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    cli: Cli, optuna: None, override: str, message: str
) -> None:
    done = cli("preset=tune", override)
    assert done.code == 2 and done.err.startswith(f"error: {message}") and done.err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_dry_run_tells_what_is_searched_and_writes_nothing(cli: Cli, optuna: None) -> None:
    done = cli(
        "-m", *TUNE, "cache.block_size=16", "batching.max_num_seqs=8,12", "sweep.dry_run=true"
    )
    assert done.code == 0 and not any(Path().iterdir()), done.err
    space = dict(line.split() for line in done.out.splitlines() if line.startswith("batching."))
    assert space == {
        "batching.max_num_seqs": "8,12",
        "batching.max_num_batched_tokens": "choice(64,128,256,512,1024,2048)",
    }
    assert (
        "search mine: the most metrics.output_tokens_per_s with metrics.ttft_ms.p90 <= 1000 and "
        "metrics.itl_ms.p90 <= 50\n"
        "at most 5 trials, 1 at once, chosen by TPESampler(seed=0, n_startup_trials=3); a trial "
        "is 1 measurement\n"
        "0 measurements recorded: how long one takes is unknown; next: batching.max"
    ) in done.out


@pytest.mark.slow
def test_a_dry_run_follows_a_search_as_far_as_it_is_recorded(cli: Cli, optuna: None) -> None:
    one = (*TUNE, "hydra.sweeper.n_trials=1", "++sweep.limits={metrics.ttft_ms.p90:100000}")
    assert cli(*one).code == 0
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    done = cli(*one, "sweep.dry_run=true")
    assert done.code == 0 and "1 measurement recorded, about " in done.out, done.err
    assert done.out.endswith(" each; nothing is left to measure\n")
    done = cli(*one, "hydra.sweeper.n_trials=2", "sweep.dry_run=true")
    assert done.code == 0 and " each; next: batching.max_num_batched_tokens=" in done.out
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


def test_a_dry_run_without_a_valid_trial_is_bad_input(cli: Cli) -> None:
    trials = Trials()
    with pytest.raises(
        BadInput, match=r"none of the 2 arms is valid; the first: batching.max_num_seqs=0"
    ):
        trials.search.follow(
            lambda: trials.search.measure(
                [(*trials.fixed, f"batching.max_num_seqs={n}") for n in (0, -1)]
            )
        )
    assert not Path("runs").exists()


def test_without_optuna(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper", None)
    done = cli("preset=tune")
    assert (done.code, done.err) == (
        2,
        "error: preset=tune needs Optuna: pip install -e '.[optuna]' -c constraints.txt\n",
    )
