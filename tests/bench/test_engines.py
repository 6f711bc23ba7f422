"""engine=minivllm behind the benchmark's interface: what is told before weights are loaded."""

from __future__ import annotations

import pytest

from minivllm.bench import engines
from minivllm.bench.engines import MinivllmEngine, refuse_too_large
from minivllm.bench.worker import classify
from minivllm.config import compose

HUGE = ("model=qwen3_30b_a3b", "model.weights=random", "runtime.device=cpu")


def test_weights_that_a_host_cannot_hold_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda device: 24e9)
    monkeypatch.setattr(engines, "build_engine", lambda *_: pytest.fail("built"))
    with pytest.raises(
        MemoryError, match=r"take about 61 GB, and this machine has 24 GB free: choose fewer bits"
    ) as told:
        MinivllmEngine(compose([*HUGE]))
    assert classify(told.value) == "oom"


@pytest.mark.parametrize(("quant", "fits"), [("bf16", False), ("int8", False), ("nf4", True)])
def test_what_is_needed_is_what_the_precision_stores(
    quant: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda device: 24e9)
    config = compose([*HUGE, f"quant={quant}"])
    if fits:
        refuse_too_large(config)
    else:
        with pytest.raises(MemoryError):
            refuse_too_large(config)


def test_of_a_users_own_precision_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda device: 24e9)
    config = compose([*HUGE])
    refuse_too_large({**config, "quant": {"_target_": "my_package.TwoBits"}})
