"""Sweeps: what is measured, what is skipped, what is left behind; a stand-in measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.record import Failure, Record
from minivllm.experiments import sweep as sweeping
from minivllm.experiments.jobs import read_job, read_measurements
from minivllm.experiments.preview import estimate
from minivllm.report.inputs import ReportInputs

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ["-m", "cache.block_size=8,16", "batching=sequential,continuous", "sweep.name=mine"]
Cli = Callable[..., Any]


class Bench:
    """Stands in for minivllm.tasks.bench: records every measurement of its job, without
    measuring."""

    def __init__(self) -> None:
        self.jobs: list[list[Measurement]] = []
        self.statuses: dict[str, str] = {}  # arm -> status, where not ok
        self.fault: BaseException | None = None  # raised in the second job

    @property
    def arms(self) -> list[str]:
        return sorted(m.arm for job in self.jobs for m in job)

    def run(self, config: dict[str, Any]) -> int:
        job, _, _ = read_measurements(Path(config["sweep"]["plan"]))
        self.jobs.append(job)
        if self.fault is not None and len(self.jobs) == 2:
            raise self.fault
        for m in job:
            status = self.statuses.get(m.arm, "ok")
            record = Record(m.run_id, m.cell_id, m.sweep, m.arm, m.block, status, m.config)
            record.metrics.output_tokens_per_s = 100.0
            record.metrics.duration_s = 30.0
            if status != "ok":
                record.error = Failure("Error", "it broke")
            storage.write_record(m.path, record, config=m.config)
        return int(any(self.statuses.get(m.arm, "ok") != "ok" for m in job))


def quick_report(inputs: ReportInputs, out_dir: Path, studies: object) -> Path:
    """A report without plots, which take seconds."""
    assert inputs.rows
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "index.html").write_text("report")
    return out_dir / "index.html"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    stand_in = Bench()
    monkeypatch.setattr("minivllm.tasks.bench.run", stand_in.run)
    monkeypatch.setattr("minivllm.report.page.write_report", quick_report)
    return stand_in


@pytest.fixture
def sweep(cli: Cli, plug_in: Callable[[str, str, str], None], user_dir: Path) -> Cli:
    """Run a command with a model that needs no files."""
    plug_in("model", "mine", "_target_: tests.experiments.models.load\npath: nowhere\n")
    return lambda *argv: cli(f"--config-dir={user_dir / 'conf'}", "model=mine", *argv)


def records() -> dict[str, dict[str, Any]]:
    return {record["arm"]: record for record in read_records("runs/mine")}


def test_every_arm_is_measured_and_reported(sweep: Cli, bench: Bench) -> None:
    done = sweep(*SWEEP)
    assert done.code == 0, done.err
    assert sorted(records()) == bench.arms
    assert len(bench.jobs) == 4
    record = records()["batching=sequential cache.block_size=8"]
    assert record["config"]["cache"]["block_size"] == 8
    assert record["config"]["choices"]["batching"] == "sequential"
    assert "report: reports/mine/index.html" in done.out
    assert Path("reports/mine/index.html").exists()


def test_arms_that_share_an_engine_share_a_job(sweep: Cli, bench: Bench) -> None:
    assert (
        sweep("-m", "workload.num_requests=4,8", "cache.block_size=8,16", "measure.repeats=3").code
        == 0
    )
    assert len(bench.jobs) == 2
    for job in bench.jobs:
        assert len({m.config["cache"]["block_size"] for m in job}) == 1
        assert {m.config["workload"]["num_requests"] for m in job} == {4, 8}
        assert sorted(m.block for m in job) == [0, 0, 1, 1, 2, 2]


def test_arms_take_turns_where_each_measurement_has_its_process(sweep: Cli, bench: Bench) -> None:
    command = ["-m", "cache.block_size=8,16,32,64", "measure.repeats=4", "measure.isolation=run"]
    assert sweep(*command).code == 0
    assert [{m.block for m in job} for job in bench.jobs] == [{0}, {1}, {2}, {3}]
    orders = [tuple(m.config["cache"]["block_size"] for m in job) for job in bench.jobs]
    assert all(sorted(order) == [8, 16, 32, 64] for order in orders) and len(set(orders)) > 1
    bench.jobs.clear()
    assert sweep(*command, "sweep.fresh=true").code == 0
    assert [tuple(m.config["cache"]["block_size"] for m in job) for job in bench.jobs] == orders


def test_in_a_single_block_there_are_no_turns_and_jobs_may_run_side_by_side(
    sweep: Cli, bench: Bench
) -> None:
    command = [
        "-m",
        "cache.block_size=8,16,32",
        "workload.num_requests=4,8",
        "measure.isolation=run",
    ]
    assert sweep(*command, "sweep.name=mine").code == 0
    assert [len(job) for job in bench.jobs] == [2, 2, 2]
    assert all(len({m.config["cache"]["block_size"] for m in job}) == 1 for job in bench.jobs)
    bench.jobs.clear()
    # what comes now takes turns
    assert sweep(*command, "sweep.name=mine", "measure.repeats=3").code == 0
    assert [{m.block for m in job} for job in bench.jobs] == [{1}, {2}]
    assert [len(job) for job in bench.jobs] == [6, 6]


def test_the_same_command_resumes(sweep: Cli, bench: Bench) -> None:
    sweep("-m", "cache.block_size=8", "sweep.name=mine")
    before = (Path("runs/mine")).glob("*/record.json")
    stamps = {path: path.stat().st_mtime_ns for path in before}
    done = sweep("-m", "cache.block_size=8", "sweep.name=mine")
    assert done.code == 0 and "1 of 1 recorded already, skipped" in done.out
    assert len(bench.jobs) == 1
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_only_what_is_missing_is_measured(sweep: Cli, bench: Bench) -> None:
    sweep(*SWEEP)
    gone = next(Path("runs/mine").glob("*/record.json"))
    arm = json.loads(gone.read_text())["arm"]
    gone.unlink()
    bench.jobs.clear()
    done = sweep(*SWEEP)
    assert done.code == 0 and "3 of 4 recorded already, skipped" in done.out
    assert bench.arms == [arm]
    assert len(records()) == 4


def test_without_a_name_the_definition_is_the_name(sweep: Cli, bench: Bench) -> None:
    sweep("-m", "cache.block_size=8,16")
    sweep("-m", "cache.block_size=16,8", "sweep.retry=failed")
    assert len(bench.jobs) == 2
    assert len([path for path in Path("runs").iterdir() if path.is_dir()]) == 1


def test_records_keep_the_slo_they_were_made_with_and_the_user_is_told(
    sweep: Cli, bench: Bench
) -> None:
    command = ["-m", "cache.block_size=8,16", "sweep.name=mine", "measure.slo.ttft_ms=200"]
    sweep(*command)
    assert "measure.slo" not in sweep(*command).err
    done = sweep(*command[:-1], "measure.slo.ttft_ms=100", "measure.price.kwh=1")
    assert (
        "warning: 2 records of this sweep had another measure.slo and keep it; sweep.fresh=true"
        in done.err
    )
    assert "2 records of this sweep had another measure.price" in done.err
    assert (
        "2 records of this sweep had another measure.roofline"
        in sweep(*command, "measure.roofline=false").err
    )
    assert len(bench.jobs) == 2
    assert {r["config"]["measure"]["slo"]["ttft_ms"] for r in records().values()} == {200}


def test_failed_cells_are_rows_and_are_retried_only_on_request(sweep: Cli, bench: Bench) -> None:
    arm = "batching=sequential cache.block_size=8"
    bench.statuses = {arm: "oom"}
    assert sweep(*SWEEP).code == 1
    assert records()[arm]["status"] == "oom" and len(records()) == 4
    bench.statuses = {}
    bench.jobs.clear()
    done = sweep(*SWEEP)
    assert done.code == 1 and bench.jobs == []
    assert (
        "4 of 4 recorded already, skipped; 1 of them did not end well: sweep.retry=failed "
        "measures it again\n" in done.out
    )
    done = sweep(*SWEEP, "sweep.retry=failed")
    assert done.code == 0 and "3 of 4 recorded already, skipped\n" in done.out
    assert bench.arms == [arm] and records()[arm]["status"] == "ok"


def test_several_failed_cells_are_counted(sweep: Cli, bench: Bench) -> None:
    bench.statuses = {f"batching=sequential cache.block_size={size}": "timeout" for size in (8, 16)}
    sweep(*SWEEP)
    said = (
        "4 of 4 recorded already, skipped; 2 of them did not end well: sweep.retry=failed "
        "measures them again\n"
    )
    assert said in sweep(*SWEEP, "sweep.dry_run=true").out
    assert said in sweep(*SWEEP).out


def test_fresh_measures_everything_anew(sweep: Cli, bench: Bench) -> None:
    sweep(*SWEEP)
    bench.jobs.clear()
    done = sweep(*SWEEP, "sweep.fresh=true")
    assert done.code == 0 and len(bench.arms) == 4 and "skipped" not in done.out


def test_an_arm_that_cannot_be_composed_is_a_row(sweep: Cli, bench: Bench) -> None:
    done = sweep("-m", "quant=bf16,nf5", "cache.block_size=8,0", "sweep.name=mine")
    assert done.code == 1
    assert bench.arms == ["cache.block_size=8 quant=bf16"]
    assert {arm: record["status"] for arm, record in records().items()} == {
        "cache.block_size=8 quant=bf16": "ok",
        "cache.block_size=0 quant=bf16": "invalid",
        "cache.block_size=8 quant=nf5": "invalid",
        "cache.block_size=0 quant=nf5": "invalid",
    }
    message = records()["cache.block_size=8 quant=nf5"]["error"]["message"]
    assert message.startswith("quant=nf5: no such option")
    assert "cache.block_size=0 must be at least 1" in done.err
    assert Path("reports/mine/index.html").exists()


def test_what_does_not_matter_to_a_cell_does_not_double_its_invalid_row(
    sweep: Cli, bench: Bench
) -> None:
    for repeats in (1, 2):
        sweep("-m", "quant=bf16,nf5", "sweep.name=mine", f"measure.repeats={repeats}")
    assert [
        record["arm"] for record in read_records("runs/mine") if record["status"] == "invalid"
    ] == ["quant=nf5"]


def test_an_arm_that_has_become_valid_loses_its_invalid_row(
    sweep: Cli, bench: Bench, plug_in: Callable[[str, str, str], None]
) -> None:
    command = ["-m", "quant=bf16,later", "sweep.name=mine"]
    assert sweep(*command).code == 1
    plug_in("quant", "later", "_target_: tests.experiments.models.load\npath: nowhere\n")
    assert sweep(*command).code == 0
    assert {record["status"] for record in read_records("runs/mine")} == {"ok"}
    assert len(read_records("runs/mine")) == 2


def test_a_workload_that_cannot_be_made_is_found_before_anything_runs(
    sweep: Cli, bench: Bench
) -> None:
    sweep("-m", "workload=smoke,file", "sweep.name=mine")
    assert records()["workload=file"]["status"] == "invalid"
    assert "workload.path" in records()["workload=file"]["error"]["message"]


def test_dry_run_prints_the_plan_and_does_nothing(sweep: Cli, bench: Bench) -> None:
    done = sweep(*SWEEP, "sweep.dry_run=true")
    assert done.code == 0 and bench.jobs == [] and not Path("runs").exists()
    assert "4 of 4 measurements to make in 4 jobs" in done.out and "unknown" in done.out
    sweep("-m", "cache.block_size=8", "batching=sequential,continuous", "sweep.name=mine")
    done = sweep("-m", "cache.block_size=8,16", "sweep.name=other", "sweep.dry_run=true")
    assert (
        "2 of 2 measurements to make" in done.out
        and "about 60 seconds (1 of them unknown" in done.out
    )
    assert not Path("runs/other").exists()


def test_the_plan_gives_the_reason_of_an_invalid_arm_below_its_table(
    sweep: Cli, bench: Bench
) -> None:
    done = sweep("-m", "quant=bf16,nf5", "sweep.dry_run=true")
    table, _, reasons = done.out.partition("\n\n")
    assert max(map(len, table.splitlines())) < 80
    assert "invalid: quant=nf5: quant=nf5: no such option" in reasons


def test_dry_run_sees_a_record_that_was_put_aside(sweep: Cli, bench: Bench) -> None:
    sweep(*SWEEP)
    path = bench.jobs[0][0].path
    storage.prepare(path, {})  # as a new measurement does that is then killed
    before = sorted(Path("runs").rglob("*"))
    assert "0 of 4 measurements to make" in sweep(*SWEEP, "sweep.dry_run=true").out
    assert sorted(Path("runs").rglob("*")) == before and not (path / storage.RECORD).exists()


def test_estimate_in_words() -> None:
    assert estimate([], {"a": 1.0}) == "nothing left to do"
    assert "unknown" in estimate(["b"], {"a": 1.0})
    assert estimate(["a", "a"], {"a": 40.0}) == "about 80 seconds"
    assert (
        estimate(["a", "b"], {"a": 300.0})
        == "about 10 minutes (1 of them unknown, taken as the mean of the others)"
    )


def test_a_job_that_raises_does_not_end_the_sweep(sweep: Cli, bench: Bench) -> None:
    bench.fault = RuntimeError("a bug in the bench")
    done = sweep(*SWEEP)
    assert done.code == 1 and "a bug in the bench" in done.err
    assert len(bench.jobs) == 4 and len(records()) == 4
    (lost,) = (record for record in records().values() if record["status"] != "ok")
    assert (lost["status"], lost["error"]["type"]) == ("crashed", "JobExit")
    assert lost["validity"]["reasons"][0].startswith("crashed: the job was lost: it ended with")
    assert Path("reports/mine/index.html").exists()


def test_interrupted_sweep_reports_what_there_is_and_resumes(sweep: Cli, bench: Bench) -> None:
    bench.fault = KeyboardInterrupt()
    done = sweep(*SWEEP)
    assert done.code == 130 and len(bench.jobs) == 2 and len(records()) == 1
    assert "1 of 4 measurements are recorded; the same command continues" in done.err
    assert Path("reports/mine/index.html").exists()
    bench.fault = None
    assert sweep(*SWEEP).code == 0
    assert len(bench.jobs) == 2 + 3 and len(records()) == 4


def test_a_fresh_sweep_that_is_interrupted_speaks_of_no_records_that_never_were(
    sweep: Cli, bench: Bench
) -> None:
    bench.fault = KeyboardInterrupt()
    assert "1 of 4 measurements were made again; the same" in sweep(*SWEEP, "sweep.fresh=true").err


def test_a_fresh_sweep_that_is_interrupted_tells_new_records_from_old_ones(
    sweep: Cli, bench: Bench
) -> None:
    sweep(*SWEEP)
    before = {path: path.read_bytes() for path in Path("runs/mine").glob("*/record.json")}
    old = next(iter(before))  # put aside, as by a measurement that was killed
    old.parent.rename(old.parent.with_name(f"{storage.ASIDE}{old.parent.name}"))
    bench.jobs.clear()
    bench.fault = KeyboardInterrupt()
    done = sweep(*SWEEP, "sweep.fresh=true")
    assert done.code == 130 and len(bench.jobs) == 2 and len(records()) == 4
    assert "1 of 4 measurements were made again, and 3 older records kept; the same" in done.err
    bench.fault = None
    bench.jobs.clear()
    assert "without sweep.fresh=true it measures only what has no record" in done.err
    assert sweep(*SWEEP).code == 0 and bench.jobs == []
    assert "the same command begins again" in done.err
    assert sweep(*SWEEP, "sweep.fresh=true").code == 0 and len(bench.arms) == 4


def test_a_report_that_cannot_be_built_fails_the_sweep_but_not_the_records(
    sweep: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(inputs: object, out_dir: object, studies: object) -> Path:
        raise OSError("no space")

    monkeypatch.setattr("minivllm.report.page.write_report", broken)
    done = sweep(*SWEEP)
    assert done.code == 1 and "the report could not be built" in done.err and len(records()) == 4


def test_two_processes_do_not_measure_one_sweep(sweep: Cli, bench: Bench) -> None:
    Path("runs/mine").mkdir(parents=True)
    with filelock.FileLock("runs/mine/.lock"):
        done = sweep(*SWEEP)
    assert done.code == 2 and "running in another process" in done.err and bench.jobs == []


def test_jobs_that_had_not_begun_are_launched_again(
    sweep: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that raises one job's error for all of them has lost those that had begun."""
    run_jobs = sweeping._run_jobs
    launches: list[int] = []

    def breaking(launch: Any, overrides: Any, paths: Any) -> list[Any]:
        def once(jobs: Any) -> Any:
            launches.append(len(jobs))
            if len(launches) == 1:
                launch(jobs[:1])
                read_job(paths[1])  # it has begun
                raise RuntimeError("a worker was killed")
            return launch(jobs)

        return run_jobs(once, overrides, paths)

    monkeypatch.setattr(sweeping, "_run_jobs", breaking)
    done = sweep("-m", "cache.block_size=8,16,32", "sweep.name=mine")
    assert done.code == 1 and launches == [3, 1]
    statuses = sorted(record["status"] for record in records().values())
    assert statuses == ["crashed", "ok", "ok"]


def test_the_plan_is_on_disk(sweep: Cli, bench: Bench) -> None:
    sweep("-m", "cache.block_size=8,16", "sweep.name=mine")
    plan = json.loads(Path("runs/mine/plan.json").read_text())
    assert plan["name"] == "mine"
    assert [arm[0] for arm in plan["definition"]["arms"]] == [
        "cache.block_size=8",
        "cache.block_size=16",
    ]
    assert [len(job) for job in plan["jobs"]] == [1, 1]


def test_hydras_basic_sweeper_can_still_be_chosen(sweep: Cli) -> None:
    done = sweep("-m", "hydra/sweeper=basic", "task=report", "runs=[a],[b]")
    assert done.code == 2 and done.err.count("error: ") == 2
    assert not list(Path().rglob("plan.json"))


@pytest.mark.slow
def test_real_workers_faults_and_resume(
    sweep: Cli,
    plug_in: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The whole path but the engine, which goes wrong in chosen ways."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plug_in("engine", "faulty", "_target_: tests.bench.faulty.FaultyEngine\nfault: null\n")
    command = ["-m", "engine=faulty", "engine.fault=null,raise,kill", "sweep.name=mine"]
    command += ["measure.roofline=false", "workload.num_requests=4", "runtime.device=cpu"]
    done = sweep(*command)
    assert done.code == 1
    assert {arm: record["status"] for arm, record in records().items()} == {
        "engine.fault=null": "ok",
        "engine.fault=raise": "error",
        "engine.fault=kill": "crashed",
    }
    assert Path("reports/mine/index.html").exists() and Path("reports/mine/throughput.png").exists()
    stamps = {path: path.stat().st_mtime_ns for path in Path("runs/mine").glob("*/record.json")}
    assert "3 of 3 recorded already, skipped" in sweep(*command).out
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
