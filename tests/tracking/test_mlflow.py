"""Trackers: what MLflow is told, and that nothing it does harms a measurement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minivllm.bench.records import storage
from minivllm.bench.records.reading import read_records
from minivllm.config.compose import compose
from minivllm.report.inputs import ReportInputs
from minivllm.tracking.base import SafeTracker
from minivllm.tracking.mlflow import MLflowTracker

Cli = Callable[..., Any]
SIMULATED = (
    "engine=simulated",
    "engine.bandwidth_gb_s=10",
    "engine.tflops=1",
    "workload.num_requests=2",
)
FAILING = """
class Failing:
    def record(self, directory):
        raise ConnectionError("the server is away\\nand more")

    def report(self, name, page):
        raise ConnectionError("the server is still away")
"""

TELLING = """
import json

class Telling:
    def tell(self, *words):
        with open("told", "a") as file:
            print(*words, file=file)

    def record(self, directory):
        record = json.loads((directory / "record.json").read_text())
        self.tell(record["run_id"], record["status"])

    def report(self, name, page):
        self.tell("report", name)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(inputs: ReportInputs, out_dir: Path, studies: object) -> Path:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "index.html").write_text("report")
        return out_dir / "index.html"

    monkeypatch.setattr("minivllm.report.page.write_report", page)


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_record(cli: Cli, quick: None) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{Path.cwd()}/mlflow.db"
    command = ["-m", *SIMULATED, "cache.block_size=8,16", "sweep.name=mine"]
    done = cli(*command, "tracker=mlflow", f"tracker.uri={uri}")
    assert done.code == 0 and "not tracked" not in done.err, done.err
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("minivllm")
    runs = {
        run.data.tags.get("run_id"): run for run in client.search_runs([experiment.experiment_id])
    }
    records = {record["run_id"]: record for record in read_records("runs/mine")}
    assert set(runs) == {*records, None} and len(records) == 2
    for run_id, record in records.items():
        run = runs[run_id]
        assert run.info.status == "FINISHED" and run.data.tags["arm"] == record["arm"]
        assert run.data.params["cache.block_size"] == str(record["config"]["cache"]["block_size"])
        assert run.data.metrics["metrics.ttft_ms.p50"] == record["metrics"]["ttft_ms"]["p50"]
        assert (
            run.data.metrics["metrics.output_tokens_per_s"]
            == record["metrics"]["output_tokens_per_s"]
        )
        names = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert names == {storage.RECORD, storage.CONFIG, storage.LOG}
    report = runs[None]
    assert report.data.tags["sweep"] == "mine"
    assert [item.path for item in client.list_artifacts(report.info.run_id)] == ["index.html"]
    assert "2 of 2 recorded already, skipped" in cli(*command).out  # the same cells, tracked or not


@pytest.mark.slow
def test_a_tracker_that_fails_is_a_warning(
    cli: Cli, quick: None, user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_tracker.py").write_text(FAILING)
    plug_in("tracker", "failing", "_target_: my_tracker.Failing\n")
    done = cli(f"--config-dir={user_dir / 'conf'}", *SIMULATED, "tracker=failing", "name=mine")
    assert done.code == 0 and "the server is still away" in done.err
    warning = (
        "warning: not tracked: ConnectionError: the server is away; the record is complete without"
    )
    assert warning in done.err.splitlines()
    (record,) = read_records("runs/mine")
    assert record["status"] == "ok"
    (log,) = Path("runs/mine").glob(f"*/{storage.LOG}")
    assert warning in log.read_text().splitlines()


def test_an_arm_that_cannot_be_measured_is_told_of_too(
    cli: Cli, quick: None, user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_tracker.py").write_text(TELLING)
    plug_in("tracker", "telling", "_target_: my_tracker.Telling\n")
    command = [
        "-m",
        f"--config-dir={user_dir / 'conf'}",
        "tracker=telling",
        *SIMULATED,
        "sweep.name=mine",
    ]
    done = cli(*command, "cache.block_size=0,8")
    assert done.code == 1
    told = [line.split() for line in Path("told").read_text().splitlines()]
    records = {record["run_id"]: record["status"] for record in read_records("runs/mine")}
    assert dict(told[:-1]) == records and sorted(records.values()) == ["invalid", "ok"]
    assert told[-1] == ["report", "mine"]


def test_without_mlflow_nothing_begins(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = cli("tracker=mlflow")
    assert (done.code, done.err) == (
        2,
        "error: tracker=mlflow needs MLflow: pip install -e '.[mlflow]' -c constraints.txt\n",
    )
    assert not Path("runs").exists()


class Client:
    """Stands in for MLflow's, and may fail in the middle of a run or lose the race for an
    experiment."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.ended: list[tuple[str, str]] = []
        self.asked = 0
        self.lost_race = self.away = False

    def get_experiment_by_name(self, name: str) -> Any:
        self.asked += 1
        return SimpleNamespace(experiment_id="7") if self.lost_race and self.asked > 1 else None

    def create_experiment(self, name: str) -> str:
        if self.lost_race or self.away:
            raise RuntimeError(f"Experiment '{name}' already exists")
        return "3"

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self.experiment = experiment
        return SimpleNamespace(info=SimpleNamespace(run_id="run"))

    def log_artifact(self, run: str, path: str) -> None:
        if not Path(path).exists():
            raise OSError("no such page")

    def set_terminated(self, run: str, status: str = "FINISHED") -> None:
        self.ended.append((run, status))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client(None)
    monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
    tracking = ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda tracking_uri: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return made


def test_no_run_is_left_running(client: Client, tmp_path: Path) -> None:
    tracker = MLflowTracker()
    with pytest.raises(OSError, match="no such page"):
        tracker.report("mine", tmp_path / "missing")
    assert client.ended == [("run", "FAILED")]
    (tmp_path / "page").touch()
    tracker.report("mine", tmp_path / "page")
    assert client.ended[1:] == [("run", "FINISHED")] and client.experiment == "3"


def test_the_experiment_may_have_been_made_by_another_job_meanwhile(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "page").touch()
    client.lost_race = True
    MLflowTracker().report("mine", tmp_path / "page")
    assert client.experiment == "7"
    client.lost_race, client.away = False, True
    with pytest.raises(RuntimeError, match="already exists"):
        MLflowTracker().report("mine", tmp_path / "page")


def test_nothing_is_told_of_a_measurement_without_a_record(tmp_path: Path) -> None:
    SafeTracker(compose(["tracker=mlflow", "tracker.uri=http://127.0.0.1:9"])).record(tmp_path)
    assert list(tmp_path.iterdir()) == []
