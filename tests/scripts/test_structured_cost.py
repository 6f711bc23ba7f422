"""The script that measures structured outputs measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.extras.masks.structured import Grammars
from tests.scripts.load import load_script


def test_masks_steps_and_compilations_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("structured_cost")
    monkeypatch.setattr(script, "ROWS", 2)
    tokenizer = script.large_tokenizer(tmp_path, 400)
    row = script.masks(Grammars(tokenizer, 400), "choice", 400, 3)
    assert row["masks"] >= 3 * 15 and 0 < row["p50_us"] <= row["p99_us"]
    assert script.application(400, 2)["rows"] == 2
    small, large = script.compiling(tokenizer, 400, (2,))
    assert small["kb"] < large["kb"] and large["schema"] == "2 objects"
    assert script.building(tokenizer, 400)["ms"] > 0
    with LLM("tiny", overrides=["runtime.threads=1", "cache.num_blocks=400"]) as llm:
        masked = script.steps(llm, script.FORMS["regex"], 8)
        assert 0 < masked["share"] < 1 and masked["masks_ms"] > 0 < masked["apply_ms"]
        plain = script.steps(llm, None, 8)
        assert plain["share"] == 0 and plain["steps"] >= 5
        assert script.beside(llm, 3)["steps"] > 0
