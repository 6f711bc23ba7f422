"""What a simulation takes from records of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import compose
from minivllm.engines.simulated.cluster import SimulatedCluster
from minivllm.engines.simulated.recorded_steps import fit_records, measured_driver_us
from minivllm.errors import BadInput
from tests.engines.simulated.test_engine import write_run

TWO = "parallel.replicas=2"


def write_replicas(folder: Path, driver_us: float, cores: int = 2, **changes: Any) -> None:
    """A record of two replicas of one thread each."""
    counted = {"driver_us": driver_us, "threads": "1 | 1"}
    write_run(
        folder,
        compose([TWO]),
        n=60,
        liveness={"parallel": counted},
        provenance={"cpu": {"usable_cores": cores}},
        **changes,
    )


def test_the_driving_process_is_measured_by_records_of_replicas(tmp_path: Path) -> None:
    for number, driver_us in enumerate((40.0, 60.0, 500.0)):
        write_replicas(tmp_path / f"two-{number}", driver_us)
    write_run(tmp_path / "one", compose([]), n=80)
    wanted = compose([TWO, "batching=sequential"])
    assert measured_driver_us(str(tmp_path), wanted) == 60
    # what the driving process takes of their cores lies in the steps of replicas already
    assert fit_records(str(tmp_path), wanted).steps == 260
    assert fit_records(str(tmp_path), wanted, of_replicas=False).steps == 80
    simulated = compose(
        [TWO, "engine=simulated", f"engine.steps={tmp_path}", "engine.driver_us=measured"]
    )
    said = SimulatedCluster(simulated).info.warnings[0]
    assert "80 steps of 1 records" in said and "60 us a token for the driving process" in said


def test_a_driving_process_with_a_core_of_its_own_takes_nothing(tmp_path: Path) -> None:
    write_replicas(tmp_path / "two", 40.0, cores=3)
    assert measured_driver_us(str(tmp_path), compose([TWO])) == 0


@pytest.mark.parametrize("knobs", [["quant=int8"], ["runtime.threads=7"]])
def test_without_records_of_such_replicas_nothing_is_measured(
    tmp_path: Path, knobs: list[str]
) -> None:
    write_replicas(tmp_path / "two", 40.0)
    write_replicas(tmp_path / "failed", 40.0, status="oom")
    with pytest.raises(BadInput, match=r"engine.driver_us=measured: no record .* parallel.replic"):
        measured_driver_us(str(tmp_path), compose([TWO, *knobs]))
