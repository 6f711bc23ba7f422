"""tracker=mlflow: an MLflow run for each record, with its configuration, numbers and files."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minivllm.bench.records import storage
from minivllm.bench.records.reading import flatten, read_record
from minivllm.errors import BadInput, install
from minivllm.tracking.base import Tracker
from minivllm.tracking.options import MLflowOptions

NUMBERS = ("metrics", "cold", "memory", "energy", "cost", "roofline", "breakdown", "quality")
TAGS = ("run_id", "cell_id", "sweep", "arm", "block", "status")
FILES = (storage.RECORD, storage.CONFIG, storage.LOG)
BATCH = 100  # most parameters of one MLflow call
LONGEST = 500  # most characters of a parameter in every version of MLflow
# Turns off MLflow's usage data, and its minutes of retries for an absent server.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MLflowTracker(MLflowOptions, Tracker):
    """Logs records through MLflow's client, which is imported and connected at the first record.

    Raises:
        BadInput: MLflow is not installed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("mlflow") is None:
            raise BadInput(f"tracker=mlflow needs MLflow: {install('mlflow')}")
        self._connected: tuple[Any, str] | None = None

    def record(self, directory: Path) -> None:
        from mlflow.entities import Metric, Param

        record = read_record(directory / storage.RECORD)
        columns = flatten(record)
        now = int(time.time() * 1000)
        numbers = {
            name: value
            for name, value in columns.items()
            if name.partition(".")[0] in NUMBERS
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        }
        settings = [
            Param(name.removeprefix("config."), str(value)[:LONGEST])
            for name, value in columns.items()
            if name.startswith(("choices.", "config."))
        ]
        with self._run(directory.name, {name: str(record[name]) for name in TAGS}) as (client, run):
            for first in range(0, len(settings), BATCH):
                client.log_batch(run, params=settings[first : first + BATCH])
            client.log_batch(
                run, metrics=[Metric(name, value, now, 0) for name, value in numbers.items()]
            )
            if self.artifacts:
                for path in (directory / name for name in FILES):
                    if path.exists():
                        client.log_artifact(run, str(path))
            client.set_terminated(run, "FINISHED" if record["status"] == "ok" else "FAILED")

    def report(self, name: str, page: Path) -> None:
        """See Tracker; the page goes into an MLflow run of its own."""
        if not self.artifacts:
            return
        with self._run(f"report {name}", {"sweep": name}) as (client, run):
            client.log_artifact(run, str(page))
            client.set_terminated(run)

    @contextmanager
    def _run(self, name: str, tags: dict[str, str]) -> Iterator[tuple[Any, str]]:
        """A new MLflow run, as the client and the run's id; marked FAILED where the body raises."""
        if self._connected is None:
            for variable, value in ENVIRONMENT.items():
                os.environ.setdefault(variable, value)
            from mlflow.tracking import MlflowClient

            client = MlflowClient(tracking_uri=self.uri)
            self._connected = client, self._experiment_of(client)
        client, experiment = self._connected
        run = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        try:
            yield client, run
        except BaseException:
            with suppress(Exception):  # the server may be gone
                client.set_terminated(run, "FAILED")
            raise

    def _experiment_of(self, client: Any) -> str:
        """The id of the experiment on the server, which is created if it is new."""
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self.experiment))
            except Exception:
                experiment = client.get_experiment_by_name(self.experiment)
                if experiment is None:  # no other job of the sweep has created it meanwhile
                    raise
        return str(experiment.experiment_id)
