"""What the committed record says of verdicts, and that the script finds what is planted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.load import load_script

ablation_power = load_script("ablation_power")
RECORD = Path(__file__).resolve().parents[2] / "reports/examples/cpu/ablation_power.json"


def test_an_effect_beyond_all_noise_is_found_and_none_is_not() -> None:
    def quiet(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
        return 1e-3 * rng.normal(size=shape)

    found = ablation_power.ablations(quiet, 20)
    assert {rule["power"] for rule in found.values()} == {1.0}
    assert max(rule["family_error"] for rule in found.values()) <= 0.05


@pytest.mark.parametrize("name", ablation_power.KINDS)
def test_every_kind_of_noise_deals_the_arms_alike(name: str) -> None:
    drawn = ablation_power.KINDS[name](np.random.default_rng(0), (400, 3, 9))
    assert drawn.shape == (400, 3, 9)
    ranks = drawn.ravel().argsort(kind="stable").argsort().reshape(drawn.shape) / drawn.size
    assert ranks.mean(axis=(0, 2)) == pytest.approx(0.5, abs=0.03)


def test_the_committed_record_keeps_the_error_that_is_promised() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["ablations"].keys() == record["sweeps"].keys() == ablation_power.KINDS.keys()
    assert len(ablation_power.KINDS) == 11
    for kind, rules in record["ablations"].items():
        assert rules[ablation_power.RULE]["family_error"] <= 0.05, kind
        assert max(record["sweeps"][kind].values()) <= 0.05, kind
