"""Weights that a host cannot hold are one line before any is filled."""

from __future__ import annotations

import pytest
import torch

from minivllm import fit
from minivllm.config.compose import compose
from minivllm.fit import require_memory_for_weights

HUGE = ("model=qwen3_30b_a3b", "model.weights=random", "runtime.device=cpu")


@pytest.mark.parametrize(
    ("quant", "device", "fits"),
    [
        ("bf16", "cpu", False),
        ("int8", "cpu", False),
        ("nf4", "cpu", True),
        ("bf16", "cuda", True),  # which says so itself
    ],
)
def test_what_is_needed_is_what_the_precision_stores(
    quant: str, device: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda device: 24e9)
    config = compose([*HUGE, f"quant={quant}"])
    if fits:
        require_memory_for_weights(config, torch.device(device))
    else:
        with pytest.raises(MemoryError):
            require_memory_for_weights(config, torch.device(device))


def test_of_a_users_own_precision_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda device: 24e9)
    config = compose([*HUGE])
    with pytest.raises(MemoryError, match="the weights take about"):
        require_memory_for_weights(config, torch.device("cpu"))
    require_memory_for_weights(
        {**config, "quant": {"_target_": "my_package.TwoBits"}}, torch.device("cpu")
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 1 << 18, "the weights take about"),
        ("max_position_embeddings", 1 << 26, "rotary tables of 67,108,864 positions take"),
    ],
)
def test_absurd_sizes_are_told_before_anything_is_made(key: str, value: int, message: str) -> None:
    config = compose(
        ["model=qwen3", "model.weights=random", "model.max_model_len=null", "runtime.device=cpu"]
    )
    config["model"]["architecture"] |= {key: value}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match=message):
        patch.setattr(fit, "free_memory", lambda device: 16e9)
        require_memory_for_weights(config, torch.device("cpu"))
