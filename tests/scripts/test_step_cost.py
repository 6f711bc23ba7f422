"""scripts/step_cost.py compares two checkouts by the processor time of their steps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.scripts.load import SCRIPTS, load_script


def test_two_checkouts_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which checkout is measured first alternates; the ratio is that of the blocks."""
    script = load_script("step_cost")
    before, order = tmp_path / "before", []
    (before / "minivllm").mkdir(parents=True)

    def measured(checkout: Path, models: list[str]) -> dict[str, float]:
        order.append("before" if checkout == before else "after")
        return {"a step": 100.0 if checkout == before else 110.0}

    monkeypatch.setattr(script, "measured", measured)
    output = tmp_path / "made.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["step_cost.py", str(before), ".", "--blocks", "6", "--output", str(output)],
    )
    script.main()
    assert order == ["before", "after", "after", "before"] * 3
    made = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out)["figures"] == made["figures"]
    (row,) = made["figures"]
    assert row["before_us"] == 100 and row["after_us"] == 110 and row["n"] == 6
    assert math.isclose(row["ratio"], 1.1) and math.isclose(row["low"], 1.1)
    assert row["found_from"] == 0 and len(made["blocks"]) == 6


def test_the_embedded_model_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("step_cost")
    monkeypatch.setattr(script, "ROUNDS", {"tiny": 1})
    monkeypatch.setattr(script, "STEPS", {"tiny": 2})
    monkeypatch.setattr(script, "PLANNED", (1, 3))
    monkeypatch.setattr(script, "BATCHES", (2,))
    figures = script.probe(["tiny"])
    assert list(figures) == [
        "planning, 1 running",
        "planning, 3 running",
        "step of tiny, 2 running",
    ]
    assert all(value > 0 for value in figures.values())


def test_a_folder_that_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("step_cost")
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "step_cost.py"), str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "must be a checkout of this project" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="the probe failed"):
        script.measured(tmp_path, ["no-such-model"])
