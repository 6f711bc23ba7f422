"""scripts/serving_overhead.py compares both arms, and says what the blocks say."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests.forked import fork_known
from tests.scripts.load import load_script

pytestmark = pytest.mark.real  # whole servers


def test_figures_are_those_of_the_blocks() -> None:
    script = load_script("serving_overhead")

    def record(tokens_per_s: float, ttft: float) -> dict[str, object]:
        return {"metrics": {"output_tokens_per_s": tokens_per_s, "ttft_ms": {"p50": ttft}}}

    pairs = [(record(100.0 + i, 5.0), record(90.0 + i, 6.0 + i)) for i in range(6)]
    row = script.figures("tiny", 32, pairs)
    assert row["blocks"] == 6 and row["served_tokens_per_s"] == 92.5
    assert row["ttft_p50_more_ms"] == 3.5
    assert row["ratio"] == pytest.approx(math.exp(math.log(92.5 / 102.5)), abs=0.005)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are compared")
def test_it_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_known(monkeypatch)
    script = load_script("serving_overhead")
    monkeypatch.setattr(script, "STREAMS", 2)
    monkeypatch.setattr(script, "OUTPUT_LEN", {"tiny": 8})
    monkeypatch.setattr(script, "ROUNDS", {"tiny": 1})
    words = ["serving_overhead.py", "--blocks", "1", "--models", "tiny"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path / "made.json")])
    script.main()
    made = json.loads((tmp_path / "made.json").read_text())
    assert [row["streams"] for row in made["figures"]] == [2, 1]
    for row in made["figures"]:
        assert row["served_tokens_per_s"] > 0 and row["served_ttft_p50_ms"] > 0
