"""The knobs of `tracker`: the system that receives a copy of each record."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.options import Options, option


@option("minivllm.tracking.base.Tracker")
@dataclass(frozen=True)
class NoTrackerOptions(Options):
    """tracker=none."""

    group = "tracker"


@option("minivllm.tracking.mlflow.MLflowTracker")
@dataclass(frozen=True)
class MLflowOptions(Options):
    """tracker=mlflow."""

    group = "tracker"
    uri: str | None = None
    """A server or a database, e.g. http://HOST:5000 or sqlite:///mlflow.db; null: as
    MLFLOW_TRACKING_URI says."""
    experiment: str = "minivllm"
    """Name of the experiment on the server; created if it is new."""
    artifacts: bool = True
    """Also record.json, config.yaml and the log of each record, and the report."""
