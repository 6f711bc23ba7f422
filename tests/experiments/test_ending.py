"""What can be told of a task's end before it begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIMULATED = ("engine=simulated", "engine.bandwidth_gb_s=10", "engine.tflops=1")


@pytest.mark.parametrize(
    "command",
    [
        SIMULATED,
        ("-m", *SIMULATED, "batching=static,continuous"),
        ("-m", *SIMULATED, "batching=static,continuous", "sweep.dry_run=true"),
        (*SIMULATED, "task=capacity", "arrival=poisson", "measure.slo.ttft_ms=500"),
        (*SIMULATED, "preset=tune"),
        ("preset=kernels", "runtime.device=cpu"),
    ],
    ids=["lone", "sweep", "dry run", "capacity", "search", "kernels"],
)
@pytest.mark.parametrize("folder", ["locked", "locked/below/it"])
def test_reports_that_cannot_be_written_are_refused_before_anything_is_measured(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], folder: str
) -> None:
    if "preset=tune" in command:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    access = os.access

    def not_there(path: Any, mode: int, **given: Any) -> bool:  # root may write anywhere
        return Path(path) != Path("locked") and access(path, mode, **given)

    monkeypatch.setattr("os.access", not_there)
    Path("locked").mkdir()
    done = cli(*command, f"reports_dir={folder}")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert f"reports_dir={folder}: {Path('locked').resolve()} cannot be written to" in done.err
    assert os.listdir() == ["locked"] and os.listdir("locked") == []
