"""scripts/gpu_compile.py: one of the processes launches each kernel, and a failure stops none of
the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minivllm.bench.microbench import suite
from tests.scripts.load import load_script

script = load_script("gpu_compile")
ROWS, CONTEXTS = (1, 3), (40,)


def test_shares_are_all_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launches(at: str) -> object:
        for name in "abcdefg":
            yield f"{at}-{name}", lambda name=name: launched.append(f"{at}-{name}")

    monkeypatch.setattr(script, "setting", lambda model, device: model)
    monkeypatch.setattr(script, "launches", launches)
    for number in range(3):
        assert script.compile_share(["x", "y"], number, 3, "cpu") == []
    assert sorted(launched) == sorted(f"{at}-{name}" for at in "xy" for name in "abcdefg")


def test_a_failure_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("ptxas failed")

    launched: list[int] = []
    pairs = [("one", fail), ("two", lambda: launched.append(2))]
    monkeypatch.setattr(script, "setting", lambda model, device: model)
    monkeypatch.setattr(script, "launches", lambda at: iter(pairs))
    assert script.compile_share(["x"], 0, 1, "cpu") == ["x: one: ptxas failed"]
    assert launched == [2]


@pytest.mark.slow
def test_kernels_are_those_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the interpreter."""
    at = script.setting("qwen3", "cpu")
    assert at.model.hidden_size == 1024
    assert at.triton and at.copies(1e9) == 1
    assert at.rows == script.ROWS and at.contexts == script.CONTEXTS
    small = replace(at, rows=ROWS, contexts=CONTEXTS, formats=("bf16", "int8"))
    monkeypatch.setattr(script, "PARTS", ("attention", "small steps"))
    names = []
    for name, launch in script.launches(small):
        launch()
        names.append(name)
    assert len(names) == len(set(names)) and any("attention decode" in name for name in names)
    assert any("norm + rotary + write" in name for name in names)
    assert {*script.PARTS} <= {*suite.PARTS}
