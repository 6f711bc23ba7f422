"""The queue that searches for capacity are simulated on, and what the committed record says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.load import load_script

capacity_coverage = load_script("capacity_coverage")
RECORD = Path(__file__).resolve().parents[2] / "reports/examples/cpu/capacity_coverage.json"


def test_waits_follow_from_lindleys_recursion() -> None:
    found = capacity_coverage.waits(np.random.default_rng(3), 0.8, 2, 50)
    rng, spread = np.random.default_rng(3), np.log(2.0)
    services = rng.lognormal(-spread / 2, np.sqrt(spread), (2, 49))
    gaps = rng.exponential(1 / 0.8, (2, 49))
    waited = np.zeros((2, 50))
    for i in range(49):
        waited[:, i + 1] = np.maximum(0, waited[:, i] + services[:, i] - gaps[:, i])
    assert found == pytest.approx(waited)


def test_a_queue_at_half_its_load_waits_as_long_as_theory_says() -> None:
    """Pollaczek and Khinchine: load (1 + cv^2) / (2 (1 - load)) services, here of load 0.5."""
    waited = capacity_coverage.waits(np.random.default_rng(0), 0.5, 2000, 400)
    assert waited[:, 200:].mean() == pytest.approx(1.0, rel=0.05)


def test_the_committed_searches_are_as_sure_as_they_say() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert {one["load"] for one in record["rates"]} == {*capacity_coverage.LOADS}
    assert record["searches"] == capacity_coverage.SEARCHES
    for one in record["rates"]:
        assert one["coverage"] >= 0.93, one
        assert one["truth"] > 0.9 or one["holds"] <= 0.05, one
