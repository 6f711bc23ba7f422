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
    """tracker=mlflow.

    Args:
        uri: of the tracking server or database; None takes MLflow's own setting.
        experiment: its name on the server; created if it is new.
        artifacts: whether files are uploaded too.
    """

    group = "tracker"
    uri: str | None = None
    experiment: str = "minivllm"
    artifacts: bool = True
