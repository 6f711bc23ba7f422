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
    """Rounds of the two alternate; a block's ratio is the median of its pairs."""
    script = load_script("step_cost")
    before = tmp_path / "before"
    (before / "minivllm").mkdir(parents=True)
    order: list[str] = []
    # The machine is three times as slow in the middle of each block.
    slow = [1.0, 1.0, 1.0, 3.0, 3.0, 1.0]

    class Checkout:
        def __init__(self, path: Path) -> None:
            self.name, self.rounds = ("before" if path == before else "after"), 0

        def round_us(self, figure: tuple[str, str, int]) -> float:
            order.append(self.name)
            self.rounds += 1
            return (100.0 if self.name == "before" else 110.0) * slow[self.rounds - 1]

        def close(self) -> None:
            order.append("closed")

    monkeypatch.setattr(script, "Checkout", Checkout)
    monkeypatch.setattr(script, "PAIRS", {"tiny": 5})
    monkeypatch.setattr(script, "figures", lambda models: [("planning", "tiny", 64)])
    output = tmp_path / "made.json"
    arguments = [str(before), ".", "--blocks", "6", "--output", str(output), "--models", "tiny"]
    monkeypatch.setattr(sys, "argv", ["step_cost.py", *arguments])
    script.main()
    turns = ["before", "after", "after", "before"]
    one_block = ["before", "after", *turns, *turns, "before", "after", "closed", "closed"]
    assert order == one_block * 6
    made = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out)["figures"] == made["figures"]
    (row,) = made["figures"]
    assert row["figure"] == "planning, 64 running" and row["n"] == 6
    assert row["before_us"] == 100 and row["after_us"] == 110
    assert math.isclose(row["ratio"], 1.1) and math.isclose(row["low"], 1.1)
    assert row["found_from"] == 0 and len(made["blocks"]) == 6


def test_what_is_measured() -> None:
    script = load_script("step_cost")
    assert script.figures(["qwen3"]) == [("step", "qwen3", 1), ("step", "qwen3", 32)]
    kinds = [kind for kind, *_ in script.figures(["tiny"])]
    assert kinds == ["planning"] * 3 + ["step"] * 2


def test_a_process_answers_with_a_round_or_fails() -> None:
    script = load_script("step_cost")
    checkout = script.Checkout(SCRIPTS.parent)
    try:
        for figure in (("planning", "tiny", 2), ("step", "tiny", 2), ("step", "tiny", 1)):
            assert checkout.round_us(figure) > 0
        with pytest.raises(SystemExit, match="the probe failed"):
            checkout.round_us(("step", "no-such-model", 1))
    finally:
        checkout.close()


def test_a_process_imports_only_what_every_checkout_has(tmp_path: Path) -> None:
    (tmp_path / "minivllm").mkdir()
    (tmp_path / "minivllm" / "__init__.py").write_text(
        "class LLM:\n"
        "    def __init__(self, *given, **options):\n"
        "        print(7.5, flush=True)\n"
        "        raise SystemExit\n"
    )
    checkout = load_script("step_cost").Checkout(tmp_path)
    try:
        assert checkout.round_us(("step", "tiny", 1)) == 7.5
    finally:
        checkout.close()


def test_a_folder_that_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("step_cost")
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "step_cost.py"), str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "must be a checkout of this project" in capsys.readouterr().err
