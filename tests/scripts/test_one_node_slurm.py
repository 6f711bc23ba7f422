"""Jobs on a real Slurm of one node, which scripts/one_node_slurm.sh starts: whatever ends them,
each measurement has one row with the reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 200  # for anything, on a busy machine

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("sbatch") is None or not os.environ.get("SLURM_CONF"),
        reason='no Slurm: eval "$(scripts/one_node_slurm.sh start)" starts one',
    ),
]


def await_(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until it is so, as long as the command runs."""
    end = time.monotonic() + WAIT_S
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing changes"
        time.sleep(0.2)


def states() -> dict[str, str]:
    """Index of a job in the array -> its state."""
    command = ["squeue", "-h", "-r", "-n", "minivllm", "-o", "%i %t"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a sweep of jobs whose engines wait for the file meet/go."""
    started: list[subprocess.Popen[str]] = []
    for group, name, text in (
        ("engine", "faulty", f"FaultyEngine\ndelay_s: 0.001\nmeeting: {tmp_path / 'meet'}\n"),
        ("model", "mine", "load\npath: nowhere\n"),
    ):
        module = {"engine": "tests.bench.faulty", "model": "tests.experiments.models"}[group]
        path = tmp_path / "conf" / group / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"_target_: {module}.{text}")
    (tmp_path / "meet").mkdir()

    def start(*overrides: str) -> subprocess.Popen[str]:
        words = ["--config-dir", "conf", "-m", "model=mine", "engine=faulty", "sweep.name=fates"]
        words += ["measure.roofline=false", "runtime.device=cpu", "measure.warmup_requests=0"]
        words += ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10"]
        words += ["hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1"]
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *words, *overrides],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    subprocess.run(["scancel", "-n", "minivllm"], check=False)
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record by its arm."""
    found = [json.loads(p.read_text()) for p in (folder / "runs" / "fates").glob("*/record.json")]
    assert len({record["run_id"] for record in found}) == len(found)
    return {record["arm"].split()[0].partition("=")[2]: record for record in found}


def test_every_job_has_a_row_with_the_reason(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = sweep("engine.delay_s=0.001,0.002,0.003,0.004", "hydra.launcher.array_parallelism=3")
    await_(lambda: sorted(states().values()) == ["PD", "R", "R", "R"], process)
    array = next(iter(states())).partition("_")[0]
    # The first to measure waits in its second step, the others for the device.
    await_(lambda: (tmp_path / "meet" / "begun").exists(), process)
    subprocess.run(["scancel", f"{array}_1", f"{array}_3"], check=True)
    mine = [
        job
        for job in psutil.process_iter(["cmdline"])
        if "submitit.core._submit" in (job.info["cmdline"] or [])
        and job.environ().get("SLURM_ARRAY_TASK_ID") == "2"
    ]
    assert mine
    for job in mine:
        job.kill()
    await_(lambda: set(states()) == {f"{array}_0"}, process)
    (tmp_path / "meet" / "go").touch()
    out = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 1 and "Traceback" not in out, out
    found = {
        arm: (r["status"], (r["error"] or {}).get("type")) for arm, r in records(tmp_path).items()
    }
    assert found.pop("0.001")[0] in ("ok", "invalid")  # a machine that others fill
    killed = found.pop("0.003")  # which Slurm calls either, by what it sees first
    assert killed in (("crashed", "FAILED"), ("crashed", "CANCELLED"))
    assert found == {"0.002": ("crashed", "CANCELLED"), "0.004": ("crashed", "CANCELLED")}
    assert not (tmp_path / "runs" / "fates" / ".jobs").exists()


def test_jobs_that_go_on_after_ctrl_c_measure_what_they_were_submitted_for(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The next command of that name has another plan."""
    (tmp_path / "meet" / "go").touch()
    begin = "+hydra.launcher.additional_parameters.begin=now+1hour"
    process = sweep("engine.delay_s=0.001,0.002", begin)
    await_(lambda: list(states().values()) == ["PD", "PD"], process)
    array = next(iter(states())).partition("_")[0]
    os.killpg(process.pid, signal.SIGINT)
    out = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 130 and f"scancel {array} ends them" in out, out
    process = sweep("engine.delay_s=0.003")
    await_(lambda: len(states()) == 3, process)
    for index in (0, 1):
        change = ["scontrol", "update", f"jobid={array}_{index}", "starttime=now"]
        subprocess.run(change, check=True)
    out = process.communicate(timeout=WAIT_S)[0]
    end = time.monotonic() + WAIT_S
    while states() and time.monotonic() < end:
        time.sleep(0.2)
    assert set(records(tmp_path)) == {"0.001", "0.002", "0.003"}, out
    assert not (tmp_path / "runs" / "fates" / ".jobs").exists()
