"""scripts/view_cost.py compares rounds with a viewer and without."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.scripts.load import load_script


def test_figures_are_those_of_the_blocks() -> None:
    script = load_script("view_cost")
    three = {
        "nobody": script.Measured(100.0, 1.0),
        "nobody again": script.Measured(100.0, 1.0),
        "viewer": script.Measured(102.0, 1.1),
    }
    odd = three | {"viewer": script.Measured(500.0, 9.0)}  # one round of three met something else
    rows = script.figures(32, [[three, odd, three]] * 6)
    told = {(row["compared"], row["figure"]): row["ratio"] for row in rows}
    assert told == {
        ("one viewer", "cpu_us"): pytest.approx(1.02),
        ("A/A", "cpu_us"): 1.0,
        ("one viewer", "wall_s"): pytest.approx(1.1),
        ("A/A", "wall_s"): 1.0,
    }
    assert all(row["n"] == 6 and row["nobody"] in (100.0, 1.0) for row in rows)


def test_orders_change(monkeypatch: pytest.MonkeyPatch) -> None:
    script, order = load_script("view_cost"), []

    class Idle:
        host, port = "127.0.0.1", 1

    monkeypatch.setattr(script, "viewer", lambda server: order.append("viewer") or NoViewer())
    monkeypatch.setattr(
        script, "measured_round", lambda *_: order.append("round") or script.Measured(1.0, 1.0)
    )
    rounds = script.threes(Idle(), 1)
    places = []
    for _ in range(6):
        order.clear()
        assert set(next(rounds)) == set(script.ARMS)
        places.append(order.index("viewer"))
    assert sorted(places) == [0, 0, 1, 1, 2, 2]


class NoViewer:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("view_cost")
    core = min(script.os.sched_getaffinity(0))
    monkeypatch.setattr(script, "ENGINE_CORE", core)
    monkeypatch.setattr(script, "CLIENT_CORE", core)
    monkeypatch.setattr(script, "TOKENS", {1: 5})
    monkeypatch.setattr(script, "THREES", 1)
    words = ["view_cost.py", "--blocks", "1", "--streams", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "made.json")])
    cores = script.os.sched_getaffinity(0)
    try:
        script.main()
    finally:
        script.os.sched_setaffinity(0, cores)
    made = json.loads((tmp_path / "made.json").read_text())
    assert len(made["figures"]) == 4
    assert all(row["nobody"] > 0 and math.isfinite(row["ratio"]) for row in made["figures"])
