"""A sweep as a person runs it: a process in a folder of its own, with a fake engine and a log of
what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.forked import popen

ROOT = Path(__file__).resolve().parents[2]
NAME = "mine"
ENGINE = "_target_: tests.experiments.logged.LoggedEngine\ndelay_s: 0.001\n"
MODEL = "_target_: tests.experiments.models.load\npath: nowhere\n"
SETTINGS = (
    "model=mine",
    "engine=logged",
    f"sweep.name={NAME}",
    "measure.roofline=false",
    "runtime.device=cpu",
    "workload.output_len=4",
)

PAINTING_LESS = """
import sys
from tests.forked import paint_less, run
paint_less()
del sys.argv[0]
sys.exit(run([sys.executable, *sys.argv]))
"""


def start(folder: Path, *overrides: str, temporary: Path) -> subprocess.Popen[str]:
    """Start the sweep in `folder`, which is made; its device lock and other shared files go to
    `temporary`."""
    for group, name, text in (("engine", "logged", ENGINE), ("model", "mine", MODEL)):
        path = folder / "conf" / group / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [str(ROOT / "run.py"), "--config-dir", "conf", "-m", *SETTINGS, *overrides]
    # Ray is started by a process that is no fork.
    is_forked = "hydra/launcher=ray" not in overrides
    return (popen() if is_forked else subprocess.Popen)(
        [sys.executable, *([] if is_forked else ["-c", PAINTING_LESS]), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def record_files(folder: Path) -> list[Path]:
    """The file of every record so far."""
    return list((folder / "runs" / NAME).glob("*/record.json"))


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record, by run_id; a torn one fails here."""
    found = [json.loads(path.read_text()) for path in record_files(folder)]
    assert len({record["run_id"] for record in found}) == len(found)
    return {record["run_id"]: record for record in found}


def log(folder: Path) -> list[str]:
    """What the engines have noted so far."""
    path = folder / "engine.log"
    return path.read_text().splitlines() if path.exists() else []
