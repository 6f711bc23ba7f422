"""A sweep that is killed again and again ends as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.experiments import cluster

DELAYS, REQUESTS = (0.001, 0.002, 0.003, 0.004), (2, 3, 4, 5)
SWEEP = (
    f"engine.delay_s={','.join(map(str, DELAYS))}",
    f"workload.num_requests={','.join(map(str, REQUESTS))}",
)
CELLS = len(DELAYS) * len(REQUESTS)
KILLS = 10


def kill_sometime(process: subprocess.Popen[str], folder: Path, chance: random.Random) -> bool:
    """Kill the process and all that it started, a few lines of the engine's log from now, or when
    two cells are left; False if it was done."""
    expected = len(cluster.log(folder)) + chance.choice([0, 0, 1, 2, 3])

    def nearly_done() -> bool:
        return len(cluster.record_files(folder)) >= CELLS - 2

    while len(cluster.log(folder)) < expected and process.poll() is None and not nearly_done():
        time.sleep(0.02)
    # anywhere: also while it starts, or writes a record
    killed_at = time.monotonic() + chance.uniform(0, 0.3 if expected else 3)
    while time.monotonic() < killed_at and process.poll() is None and not nearly_done():
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ten_times_and_nothing_is_lost_torn_or_measured_twice(tmp_path: Path) -> None:
    killed, temporary = tmp_path / "killed", tmp_path / "temporary"
    temporary.mkdir()
    chance = random.Random(0)
    kills, seen = 0, {}
    while kills < KILLS:
        process = cluster.start(killed, *SWEEP, temporary=temporary)
        kills += kill_sometime(process, killed, chance)
        assert process.returncode != 0, "the sweep ended before it was killed often enough"
        noted = len(cluster.log(killed))
        for run_id, record in cluster.records(killed).items():  # reads each: none is torn
            seen.setdefault(run_id, (record, noted))
    process = cluster.start(killed, *SWEEP, temporary=temporary)
    out, _ = process.communicate()
    assert process.returncode == 0, out

    # Each run_id is the one that an undisturbed sweep asks for.
    process = cluster.start(killed, *SWEEP, "sweep.dry_run=true", temporary=temporary)
    out_again, _ = process.communicate()
    assert process.returncode == 0 and f"0 of {CELLS} measurements to make" in out_again

    found = cluster.records(killed)
    configs = [record["config"] for record in found.values()]
    cells = [
        (config["engine"]["delay_s"], config["workload"]["num_requests"]) for config in configs
    ]
    assert sorted(cells) == list(itertools.product(DELAYS, REQUESTS))
    assert {record["status"] for record in found.values()} == {"ok"}
    assert 0 < len(seen) < CELLS  # some were finished before a kill, some after the last
    lines = cluster.log(killed)
    for run_id, (record, noted) in seen.items():
        assert found[run_id] == record
        config = record["config"]
        line = f"measured {config['engine']['delay_s']:g} {config['workload']['num_requests']}"
        assert line in lines[:noted] and line not in lines[noted:]
    for directory in (killed / "runs" / cluster.NAME).iterdir():
        if directory.is_dir():
            assert (directory / "record.json").exists() and not list(directory.glob(".*"))
    assert f"{len(seen)} of {CELLS} recorded already, skipped" in out
