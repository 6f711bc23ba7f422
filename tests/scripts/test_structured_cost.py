"""The script that measures structured outputs measures what it says."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from minivllm import LLM
from minivllm.engine.options import StructuredOutputs
from minivllm.extras.masks.structured import Grammars
from tests.scripts.load import load_script


def hold_until_a_step_is_over(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each compilation begin when a step has ended that began after the compilation's thread:
    a small schema may be compiled before any step begins."""
    grammars = cast(Any, llm.engine.launcher.extensions).grammars
    compile_now, step = grammars.compile, llm.engine.step
    asked, stepped = threading.Event(), threading.Event()

    def compile_later(outputs: StructuredOutputs) -> Any:
        asked.set()
        assert stepped.wait(60)
        return compile_now(outputs)

    def told() -> Any:
        is_beside = asked.is_set()
        done = step()
        if is_beside:
            stepped.set()
        return done

    monkeypatch.setattr(grammars, "compile", compile_later)
    monkeypatch.setattr(llm.engine, "step", told)


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
        hold_until_a_step_is_over(llm, monkeypatch)
        assert script.beside(llm, 3)["steps"] > 0
