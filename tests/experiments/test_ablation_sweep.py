"""`+ablation=...` from the command line to verdicts: the plan, its order, resuming, adding
blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.analysis.ablation.effects import analyse
from minivllm.analysis.ablation.findings import Analysis
from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import flatten, read_records
from minivllm.config.compose import compose
from minivllm.experiments.jobs import read_measurements
from minivllm.report.inputs import ReportInputs
from minivllm.report.page import write_report
from minivllm.report.studies.ablation import AblationStudy
from tests.experiments.test_sweep import quick_report

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., Any]
LIST = """# @package ablation
baseline: [cache.block_size=8, batching.max_num_seqs=4]
optimisations:
  slow: {overrides: [cache.block_size=16]}
  free: {overrides: [batching.max_num_seqs=8]}
  after: {overrides: [cache.prefix_caching=true], requires: [slow]}
"""


class Bench:
    """Stands in for minivllm.tasks.bench: `slow` costs 10 %, and every measurement has noise of its
    own."""

    def __init__(self) -> None:
        self.measured: list[Measurement] = []
        self.noise = 0.005
        self.fault_after: int | None = None  # measurements, then Ctrl-C

    def run(self, config: dict[str, Any]) -> int:
        for m in read_measurements(Path(config["sweep"]["plan"]))[0]:
            if self.fault_after is not None and len(self.measured) >= self.fault_after:
                raise KeyboardInterrupt
            self.measured.append(m)
            assert m.ablation is not None
            # Not from run_id, which any edit of the package changes.
            rng = np.random.default_rng([m.block, *m.arm.encode()])
            speed = (
                100
                * math.exp(rng.normal(0, self.noise))
                * (0.9 if "slow" in m.ablation["on"] else 1.0)
            )
            begun = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=len(self.measured))
            provenance = {"host": "here", "code_hash": "c", "device": {"name": "cpu"}}
            record = m.record("ok", provenance={**provenance, "started_at": begun.isoformat()})
            record.metrics.output_tokens_per_s = speed
            storage.write_record(m.path, record, config=m.config)
        return 0

    @property
    def order(self) -> list[tuple[int, str]]:
        return [(m.block, m.arm) for m in self.measured]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    stand_in = Bench()
    monkeypatch.setattr("minivllm.tasks.bench.run", stand_in.run)
    monkeypatch.setattr("minivllm.report.page.write_report", quick_report)
    return stand_in


@pytest.fixture
def ablate(cli: Cli, plug_in: Callable[[str, str, str], None], user_dir: Path) -> Cli:
    """Run an ablation over three optimisations, with a model that needs no files."""
    plug_in("model", "mine", "_target_: tests.experiments.models.load\npath: nowhere\n")
    plug_in("optimisations", "mine", LIST)
    given = [
        f"--config-dir={user_dir / 'conf'}",
        "model=mine",
        "optimisations=mine",
        "sweep.name=mine",
    ]
    return lambda *argv: cli(*given, *argv)


def analysis() -> Analysis:
    found = analyse([flatten(record) for record in read_records("runs/mine")])
    assert found is not None
    return found


def test_a_planted_slowdown_is_found_from_the_command_line(ablate: Cli, bench: Bench) -> None:
    done = ablate("+ablation=leave_one_out")
    assert done.code == 0, done.err
    assert len(bench.measured) == 5 * 9
    assert "slower" in done.out and "A/A" in done.out
    effects = {effect.name: effect for effect in analysis().effects}
    assert {name: effect.verdict for name, effect in effects.items()} == {
        "slow": "slower",
        "free": "none",
        "after": "none",
    }
    slow = effects["slow"]
    assert slow.low is not None and slow.high is not None and slow.low <= 0.9 <= slow.high
    record = next(r for r in read_records("runs/mine") if r["arm"] == "without free")
    assert record["ablation"]["on"] == ["slow", "after"] and record["ablation"]["requires"] == {
        "after": ["slow"]
    }
    assert (
        record["config"]["batching"]["max_num_seqs"] == 4
        and record["config"]["cache"]["block_size"] == 16
    )


def test_blocks_are_shuffled_and_complete(ablate: Cli, bench: Bench) -> None:
    ablate("-m", "+ablation=add_one_in", "measure.repeats=4")
    blocks = [[arm for block, arm in bench.order if block == number] for number in range(4)]
    arms = {"baseline", "baseline again", "with slow", "with free", "with slow+after"}
    assert [block for block, _ in bench.order] == sorted(block for block, _ in bench.order)
    assert all(len(block) == len(arms) and set(block) == arms for block in blocks)
    assert len({tuple(block) for block in blocks}) == 4
    for m in bench.measured:
        assert m.ablation is not None and blocks[m.block].index(m.arm) == m.ablation["order"]
    pairs = {m.arm: m for m in bench.measured if m.block == 0}
    assert pairs["baseline"].cell_id == pairs["baseline again"].cell_id
    assert pairs["baseline"].run_id != pairs["baseline again"].run_id


def test_an_interrupted_ablation_resumes_in_its_order(ablate: Cli, bench: Bench) -> None:
    command = ["+ablation=leave_one_out", "measure.repeats=3"]
    ablate(*command, "runs_dir=undisturbed")
    undisturbed, ids = bench.order, [m.run_id for m in bench.measured]
    bench.measured.clear()
    for stop in (3, 7, 11):
        bench.fault_after = stop
        assert ablate(*command).code == 130
        assert len(bench.measured) == stop
    bench.fault_after = None
    done = ablate(*command)
    assert done.code == 0 and "11 of 15 recorded already, skipped" in done.out
    assert bench.order == undisturbed and [m.run_id for m in bench.measured] == ids


def test_blocks_are_added_until_intervals_are_narrow(ablate: Cli, bench: Bench) -> None:
    command = ["+ablation=leave_one_out", "ablation.only=[slow]", "measure.repeats=4"]
    command += ["measure.target_ci=0.015", "measure.max_repeats=30"]
    done = ablate(*command)
    assert done.code == 0 and "4 blocks: widest interval" in done.out and ": done" in done.out
    blocks = 1 + max(m.block for m in bench.measured)
    assert 4 < blocks <= 30 and len(bench.measured) == 3 * blocks
    (slow,) = analysis().effects
    assert slow.width is not None and slow.width <= 0.015
    before = bench.order
    again = ablate(*command)  # the same decisions, nothing measured
    assert again.code == 0 and bench.order == before


def test_narrow_intervals_are_not_enough_without_a_verdict(ablate: Cli, bench: Bench) -> None:
    given = [
        "ablation.only=[slow]",
        "measure.repeats=3",
        "measure.target_ci=0.9",
        "measure.max_repeats=30",
    ]
    done = ablate("+ablation=leave_one_out", *given)
    assert (
        "3 blocks: widest interval" in done.out
        and ": 3 more" in done.out
        and len(bench.measured) == 3 * 6
    )
    assert "too few blocks" not in {effect.verdict for effect in analysis().effects}


def test_repeats_end_at_the_limit(ablate: Cli, bench: Bench) -> None:
    bench.noise = 0.1
    given = [
        "ablation.only=[slow]",
        "measure.repeats=3",
        "measure.target_ci=0.001",
        "measure.max_repeats=5",
    ]
    done = ablate("+ablation=leave_one_out", *given)
    assert "5 blocks" in done.out and "ended at measure.max_repeats=5" in done.out
    assert len(bench.measured) == 3 * 5


def test_more_repeats_add_to_what_is_there(ablate: Cli, bench: Bench) -> None:
    first = ablate("+ablation=leave_one_out", "ablation.only=[slow]", "measure.repeats=2")
    assert (
        "a verdict over 1 optimisation needs 6 blocks, and 2 are planned: measure.repeats=6"
        in first.err
    )
    assert {effect.verdict for effect in analysis().effects} == {"too few blocks"}
    done = ablate("+ablation=leave_one_out", "ablation.only=[slow]", "measure.repeats=6")
    assert "6 of 18 recorded already, skipped" in done.out and "planned" not in done.err
    assert len(bench.measured) == 3 * 6


def test_a_named_ablation_that_is_changed_is_told_as_it_is_now(
    ablate: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that are reused were made for one optimisation and another metric."""
    analyses: list[Analysis] = []

    def keep(inputs: ReportInputs, out_dir: Path, studies: object) -> Path:
        analysis = AblationStudy().finding(inputs)
        assert analysis is not None
        analyses.append(analysis)
        return out_dir

    monkeypatch.setattr("minivllm.report.page.write_report", keep)
    given = ["+ablation=add_one_in", "measure.repeats=7"]
    ablate(*given, "ablation.only=[slow]", "ablation.metric=requests_per_s")
    done = ablate(*given, "ablation.only=[slow,free]")
    assert "21 of 28 recorded already, skipped" in done.out and len(bench.measured) == 28
    ablate(*given, "ablation.only=[slow]")
    first, more, less = analyses
    assert first.metric == "requests_per_s" and {e.verdict for e in first.effects} == {"failed"}
    assert more.metric == "output_tokens_per_s"
    # The arm of `free` was measured after all others had ended.
    assert {e.name: e.verdict for e in more.effects} == {"slow": "slower", "free": "apart"}
    assert {e.name: e.verdict for e in less.effects} == {"slow": "slower"}
    assert any("7 records of other ablations" in note for note in less.notes)


def test_what_a_sweep_ends_with_is_read_and_analysed_once(
    ablate: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minivllm.analysis import rows
    from minivllm.analysis.ablation import effects as module

    calls: list[str] = []

    def counted(home: Any, name: str) -> None:
        original = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args: calls.append(name) or original(*args))

    counted(module, "analyse")
    counted(rows, "flat_rows_of")
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    monkeypatch.setattr("minivllm.report.page.write_report", write_report)
    done = ablate("+ablation=add_one_in", "ablation.only=[slow]", "measure.repeats=2")
    assert done.code == 0, done.err
    assert sorted(calls) == ["analyse", "flat_rows_of"]
    assert "A/A" in done.out and "A/A" in Path("reports/mine/index.html").read_text()


def test_dry_run_shows_what_is_compared(ablate: Cli, bench: Bench) -> None:
    done = ablate("+ablation=leave_one_out", "measure.target_ci=0.02", "sweep.dry_run=true")
    assert done.code == 0 and bench.measured == [] and not Path("runs").exists()
    assert "5 arms, one of them a copy of the baseline, in 9 shuffled blocks" in done.out
    assert (
        "over 3 optimisations needs 7" in done.out
        and "until every interval is narrower than 2 %" in done.out
    )
    assert "45 of 45 measurements to make in 9 jobs" in done.out


def test_an_arm_that_cannot_be_composed_is_a_failed_effect(
    ablate: Cli, bench: Bench, plug_in: Callable[[str, str, str], None]
) -> None:
    plug_in("optimisations", "mine", LIST.replace("max_num_seqs=8", "max_num_seqs=0"))
    done = ablate("+ablation=add_one_in", "ablation.only=[slow,free]", "measure.repeats=1")
    assert done.code == 1 and "max_num_seqs=0 must be at least 1" in done.err
    assert {effect.name: effect.verdict for effect in analysis().effects}["free"] == "failed"


def test_what_the_command_says_of_a_key_replaces_the_baseline(ablate: Cli, bench: Bench) -> None:
    ablate(
        "+ablation=add_one_in",
        "batching.max_num_seqs=2",
        "ablation.only=[free]",
        "measure.repeats=1",
    )
    sizes = {m.arm: m.config["batching"]["max_num_seqs"] for m in bench.measured}
    assert sizes == {"baseline": 2, "baseline again": 2, "with free": 8}


def test_a_list_has_only_what_can_do_something_on_its_device() -> None:
    """What helps on any of them is one list, which the others extend."""
    lists = {
        name: compose(["+ablation=leave_one_out", f"optimisations={name}"])["ablation"]
        for name in ("any_device", "engine", "gpu")
    }
    shared = lists["any_device"]
    own = {
        "any_device": [],
        "engine": ["cpu_kernels"],
        "gpu": ["fused_kernels", "cuda_graphs", "overlap"],
    }
    for name, found in lists.items():
        assert [*found["optimisations"]] == [*shared["optimisations"], *own[name]]
        assert found["optimisations"].items() >= shared["optimisations"].items()
        assert found["baseline"][: len(shared["baseline"])] == shared["baseline"]
        message = " ".join([*found["baseline"], str(found["optimisations"])])
        assert ("runtime.cpu_kernels" in message) == (name == "engine")
        assert ("runtime.fused_kernels" in message) == (name == "gpu")
    assert compose(["+ablation=leave_one_out"])["ablation"] == lists["engine"]


def test_mistakes_are_one_line(
    ablate: Cli, bench: Bench, plug_in: Callable[[str, str, str], None]
) -> None:
    for argv, message in (
        (["+ablation=leave_one_out", "quant=bf16,int8"], "run one for each value"),
        (
            ["+ablation=leave_one_out", "ablation.only=[fast]"],
            "names fast; choose from slow, free, after",
        ),
        (["+ablation=leave_one_out", "ablation.only=[after]"], "after requires slow"),
        (["+ablation=leave_one_out", "measure.isolation=cell"], "measure.isolation=cell"),
        (["+ablation=leave_one_out", "ablation.metric=speed"], "metric=speed: no such figure"),
        (
            ["+ablation=factorial", "ablation.max_arms=6"],
            "has 7 arms, 70 measurements in 10 blocks",
        ),
        (["+ablation=pair"], "did you mean pairs"),
        (["ablation=leave_one_out"], "as in +ablation="),
        (
            ["+ablation=leave_one_out", "measure.target_ci=0.1", "measure.max_repeats=2"],
            "measure.max_repeats=2",
        ),
    ):
        done = ablate(*argv)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, (
            argv,
            done.err,
        )
    plug_in(
        "optimisations", "mine", LIST.replace("overrides: [cache.block", "override: [cache.block")
    )
    done = ablate("+ablation=leave_one_out")
    assert done.code == 2 and "is wrong at slow" in done.err
    assert not Path("runs").exists() and bench.measured == []


def test_a_plain_sweep_repeats_until_its_own_intervals_are_narrow(
    cli: Cli,
    plug_in: Callable[[str, str, str], None],
    user_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plug_in("model", "mine", "_target_: tests.experiments.models.load\npath: nowhere\n")
    alone = cli("measure.target_ci=0.05")
    assert alone.code == 2 and "measure.target_ci is for sweeps: add -m" in alone.err
    blocks: list[int] = []

    def run(config: dict[str, Any]) -> int:
        for m in read_measurements(Path(config["sweep"]["plan"]))[0]:
            blocks.append(m.block)
            record = m.record("ok")
            noise = np.random.default_rng([m.block, *m.arm.encode()]).normal(0, 0.02)
            record.metrics.output_tokens_per_s = 100 * math.exp(noise)
            storage.write_record(m.path, record, config=m.config)
        return 0

    monkeypatch.setattr("minivllm.tasks.bench.run", run)
    monkeypatch.setattr("minivllm.report.page.write_report", quick_report)
    command = [f"--config-dir={user_dir / 'conf'}", "model=mine", "cache.block_size=8,16"]
    done = cli(
        "-m", *command, "measure.target_ci=0.05", "measure.max_repeats=20", "sweep.name=mine"
    )
    assert done.code == 0 and ": done" in done.out
    assert 4 <= max(blocks) + 1 <= 20 and sorted(blocks) == sorted([*range(max(blocks) + 1)] * 2)


@pytest.mark.slow
def test_real_workers_find_the_planted_slowdown_and_the_dead_knob(
    cli: Cli,
    plug_in: Callable[[str, str, str], None],
    user_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Everything but the weights: processes, records, report. Time is virtual, and its noise is
    planted."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("minivllm.report.page.write_report", quick_report)
    plug_in("engine", "sleepy", "_target_: tests.experiments.sleepy.SleepyEngine\nsleep: 0.0\n")
    plug_in(
        "optimisations",
        "mine",
        "# @package ablation\n"
        "baseline: []\n"
        "optimisations:\n"
        "  nap: {overrides: [engine.sleep=0.1]}\n"
        "  idle: {overrides: [cache.prefix_caching=true]}\n",
    )
    done = cli(
        *(
            f"--config-dir={user_dir / 'conf'}",
            "+ablation=add_one_in",
            "optimisations=mine",
            "engine=sleepy",
        ),
        *(
            "sweep.name=mine",
            "measure.repeats=7",
            "measure.roofline=false",
            "workload.num_requests=4",
        ),
        *("runtime.device=cpu", "workload.output_len=16"),
    )
    assert done.code == 0, done.err
    effects = {effect.name: effect for effect in analysis().effects}
    nap = effects["nap"]
    assert nap.verdict == "slower" and nap.low is not None and nap.high is not None
    assert nap.low <= 1 / 1.1 <= nap.high
    assert effects["idle"].verdict == "not live"
