"""scripts/harness_overhead.py times what the harness does now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts.load import load_script


def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("harness_overhead")
    compose, per_call = script.compose, script.per_call
    monkeypatch.setattr(
        script,
        "compose",
        lambda overrides: compose([*overrides, "workload.output_len=4", "quant=fp32"]),
    )
    monkeypatch.setattr(script, "per_call", lambda action: per_call(action, repetitions=10))
    monkeypatch.setattr(
        sys,
        "argv",
        ["harness_overhead.py", "--pairs", "2", "--output", str(tmp_path / "made.json")],
    )
    script.main()
    made = json.loads((tmp_path / "made.json").read_text())
    assert (
        made["tokens"] == 4 * 4 and made["steps"] == 4 * 4
    )  # batch 1: a request's prompt gives its first token
    assert made["on_over_off"]["pairs"] == 2
    for figure in ("events_us_per_step", "driver_us_per_token", "share_by_counts", "window_s"):
        assert made[figure] > 0
