"""scripts/speculation_lossless.py counts what drafts change, and fails if it is anything."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minivllm.extras.speculative.verification import SameNoise
from tests.scripts.load import load_script

pytestmark = pytest.mark.real  # whole servers


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The script, with few short requests, whose outputs without drafts are computed once."""
    made = load_script("speculation_lossless")
    made.PROMPTS, made.MOST_TOKENS = 1, 6
    comparison = cache(made.Comparison)

    def anew(quant: str, more: Sequence[str] = (), rounds: bool = False) -> Any:
        found = copy.copy(comparison(quant, tuple(more), rounds))
        found.counts, found.by, found.ratios = Counter(), {}, []
        return found

    made.Comparison = anew
    return made


@pytest.fixture
def script(loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    arguments = ["speculation_lossless.py", "--combinations", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--output", str(tmp_path / "made.json")])
    return loaded


def test_it_compares_and_writes(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main()
    made = json.loads((tmp_path / "made.json").read_text())
    for name in ("float32", "invariant", "bfloat16"):
        part = made[name]
        assert part["requests"] >= 8 and part["tokens_compared"] >= 6 * 8 - 6
        assert part["draft_tokens"] >= part["accepted_tokens"] > 0
        assert set(part["by"]) == {*script.axes(script.EMBEDDED), "temperature"}
        for choices in part["by"].values():
            counts = [one.get("tokens_compared", 0) for one in choices.values()]
            assert sum(counts) == part["tokens_compared"]
    assert made["float32"]["tokens_different"] == made["invariant"]["tokens_different"] == 0
    assert "tokens_different: 0" in capsys.readouterr().out


def test_tokens_that_change_are_an_error(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(self: Any, run: Any) -> Any:
        return [run.chosen[0] ^ 1]

    monkeypatch.setattr(SameNoise, "verify", another)
    with pytest.raises(SystemExit, match="changed tokens"):
        script.main()


def test_scores_and_differences(script: Any) -> None:
    assert script.differences([1, 2], [1, 3, 4]) == [1, 2]
    assert script.differences([1, 2], [1, 2]) == []
    judge = script.Judge()
    asked = script.requests(judge._exact)
    heats = {params.temperature for _, params in asked}
    assert heats == set(script.TEMPERATURES) and len({params.seed for _, params in asked}) == 15
    for prompt, params in asked[:3]:
        chosen = script.generate(judge._exact, [(prompt, params)])[0][0]
        assert judge((prompt, params), [chosen, chosen], len(prompt)) == 0
        # what was chosen has the best score of all, by far more than rounding changes
        others = [judge((prompt, params), [chosen, other], len(prompt)) for other in range(1, 9)]
        assert min(others) > 2
