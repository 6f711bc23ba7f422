"""Jobs on a real Slurm of one node, which scripts/one_node_slurm.sh starts: whatever ends them,
each measurement has one row with the reason."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.load import load_script

faults = load_script("slurm_faults")
WAIT_S = 200  # for anything, on a busy machine

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("sbatch") is None or not os.environ.get("SLURM_CONF"),
        reason='no Slurm: eval "$(scripts/one_node_slurm.sh start)" starts one',
    ),
]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Any]:
    """A sweep of jobs whose engines wait for the file meet/go."""
    with faults.sweep_in(tmp_path) as sweep:
        yield sweep


def test_every_job_has_a_row_with_the_reason(sweep: Any, tmp_path: Path) -> None:
    """Three jobs side by side, of which the first to measure waits in its second step, the others
    for the device."""
    sweep.start(
        *("engine.delay_s=0.001,0.002,0.003,0.004", "hydra.launcher.array_parallelism=3"),
        "hydra.launcher.additional_parameters={exclusive:false}",
    )
    sweep.until(lambda: sorted(faults.states().values()) == ["PD", "R", "R", "R"])
    array = next(iter(faults.states())).partition("_")[0]
    sweep.until((tmp_path / "meet" / "begun").exists)
    faults.slurm("scancel", f"{array}_1", f"{array}_3")
    mine = faults.jobs_of(array, "2")
    assert mine
    for job in mine:
        job.kill()
    sweep.until(lambda: set(faults.states()) == {f"{array}_0"})
    sweep.go()
    sweep.end(1)
    found = {
        arm: (r["status"], (r["error"] or {}).get("type")) for arm, r in sweep.records().items()
    }
    assert found.pop("0.001")[0] in ("ok", "invalid")  # a machine that others fill
    killed = found.pop("0.003")  # which Slurm calls either, by what it sees first
    assert killed in (("crashed", "FAILED"), ("crashed", "CANCELLED"))
    assert found == {"0.002": ("crashed", "CANCELLED"), "0.004": ("crashed", "CANCELLED")}
    assert not (tmp_path / "runs" / "fates" / ".jobs").exists()


def test_jobs_that_go_on_after_ctrl_c_measure_what_they_were_submitted_for(
    sweep: Any, tmp_path: Path
) -> None:
    """The next command of that name has another plan."""
    sweep.go()
    begin = "+hydra.launcher.additional_parameters.begin=now+1hour"
    process = sweep.start("engine.delay_s=0.001,0.002", begin)
    sweep.until(lambda: list(faults.states().values()) == ["PD", "PD"])
    array = next(iter(faults.states())).partition("_")[0]
    os.killpg(process.pid, signal.SIGINT)
    assert f"scancel {array} ends them" in sweep.end(130)
    process = sweep.start("engine.delay_s=0.003")
    sweep.until(lambda: len(faults.states()) == 3)
    for index in (0, 1):
        faults.slurm("scontrol", "update", f"jobid={array}_{index}", "starttime=now")
    out = process.communicate(timeout=WAIT_S)[0]
    end = time.monotonic() + WAIT_S
    while faults.states() and time.monotonic() < end:
        time.sleep(0.2)
    assert set(sweep.records()) == {"0.001", "0.002", "0.003"}, out
    assert not (tmp_path / "runs" / "fates" / ".jobs").exists()


def test_the_same_command_waits_for_the_jobs_that_go_on_after_ctrl_c(
    sweep: Any, tmp_path: Path
) -> None:
    """No time of those that wait for the device is used up: they wait in the queue."""
    process = sweep.start(faults.ARMS)
    array = sweep.begun()
    os.killpg(process.pid, signal.SIGINT)
    sweep.end(130)
    sweep.start(faults.ARMS)
    sweep.until((tmp_path / "runs" / "fates" / ".lock").read_text)  # it plans
    sweep.go()
    out = sweep.end()
    assert f"waiting for jobs of an earlier command: {array}_" in out
    assert dict(sweep.measured()) == dict.fromkeys(faults.DELAYS, 1)
    assert set(sweep.records()) == set(faults.DELAYS)
