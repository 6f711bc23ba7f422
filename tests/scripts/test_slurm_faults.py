"""scripts/slurm_faults.py, without a Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.load import load_script

faults = load_script("slurm_faults")


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "states", dict)
    monkeypatch.setattr(subprocess, "run", lambda command, check: None)  # scancel


def write(sweep: Any, arms: dict[str, str], log: str) -> None:
    """Records of a sweep by arm, and what its engines have noted."""
    for arm, status in arms.items():
        folder = sweep.folder / "runs" / faults.NAME / arm
        folder.mkdir(parents=True)
        record = {"run_id": arm, "status": status, "config": {"engine": {"delay_s": float(arm)}}}
        error = None if status == "ok" else {"type": "CANCELLED", "message": "it was"}
        (folder / "record.json").write_text(json.dumps({**record, "error": error}))
    (sweep.folder / "engine.log").write_text(log)


@pytest.mark.parametrize(
    ("arms", "measured", "wrong"),
    [
        ({"0.001": "crashed", "0.002": "ok", "0.003": "ok"}, ("0.002", "0.003"), None),
        ({"0.001": "crashed", "0.002": "ok"}, ("0.002",), "rows of"),
        ({"0.001": "ok", "0.002": "ok", "0.003": "ok"}, faults.DELAYS, "0.001 is ok"),
        (
            *({"0.001": "crashed", "0.002": "ok", "0.003": "ok"}, ("0.002", "0.003", "0.003")),
            "0.003 was measured 2 times",
        ),
    ],
)
def test_rows_that_are_missing_wrong_or_measured_twice_are_found(
    arms: dict[str, str], measured: tuple[str, ...], wrong: str | None, tmp_path: Path
) -> None:
    def kind(sweep: Any, number: int) -> dict[str, tuple[str, ...]]:
        write(sweep, arms, "".join(f"build 1\nmeasured {arm} 2\n" for arm in measured))
        return {"0.001": ("crashed CANCELLED",)}

    if wrong is None:
        says = faults.run(kind, 0, tmp_path)
        assert says == {"0.001": "crashed CANCELLED", "0.002": "ok", "0.003": "ok"}
    else:
        with pytest.raises(AssertionError, match=wrong):
            faults.run(kind, 0, tmp_path)


def test_there_are_20_runs_and_one_that_is_wrong_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(kind: Any, number: int, folder: Path) -> dict[str, str]:
        if (kind, number) == (faults.kill, 1):
            raise AssertionError("no row")
        return dict.fromkeys(faults.DELAYS, "ok")

    monkeypatch.setattr(faults, "run", run)
    output = tmp_path / "record.json"
    assert faults.main(["--output", str(output)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22 and lines[-1] == "19 of 20 with every row, none measured twice"
    assert [line for line in lines if "WRONG: no row" in line] == [lines[10]]
    record = json.loads(output.read_text())
    assert len(record["rows"]) == record["summary"]["all"]["runs"] == 20
    assert record["summary"]["kill"] == {"runs": 3, "right": 2}
    assert record["rows"]["kill-1"]["failure"] == "no row"
    monkeypatch.setattr(faults, "run", lambda *_: dict.fromkeys(faults.DELAYS, "ok"))
    assert faults.main(["--kinds", "kill", "--output", str(output)]) == 0
    record = json.loads(output.read_text())  # keeps its other rows
    assert record["summary"]["all"] == {"runs": 20, "right": 20}
    assert "failure" not in record["rows"]["kill-1"]
