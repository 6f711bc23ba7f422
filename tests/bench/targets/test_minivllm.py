"""engine=minivllm behind the benchmark's interface: what is told before weights are loaded."""

from __future__ import annotations

import pytest

from minivllm import assembly
from minivllm.bench.completion import classify
from minivllm.bench.targets.minivllm import MinivllmEngine
from minivllm.config.compose import compose


def test_weights_that_a_host_cannot_hold_are_a_failure_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "free_memory", lambda device: 24e9)
    monkeypatch.setattr(assembly, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(
        MemoryError, match=r"take about 61 GB, and this machine has 24 GB free: choose fewer bits"
    ) as told:
        MinivllmEngine(
            compose(["model=qwen3_30b_a3b", "model.weights=random", "runtime.device=cpu"])
        )
    assert classify(told.value) == "oom"
