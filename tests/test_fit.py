"""Weights that a host cannot hold, and knobs of images for a model that takes none, are one line
before any weight is loaded."""

from __future__ import annotations

import pytest
import torch

from minivllm import fit
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.preflight import check
from minivllm.fit import require_memory_for_weights
from tests.told_early import assert_told_before_weights

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


SMOLVLM = ["model=smolvlm_256m", "model.weights=random"]
WRONG = [
    (["vision.max_images=3"], "vision.max_images=3 is for models that take images"),
    ([*SMOLVLM, "vision.processor={sise: 3}"], "vision.processor: no such setting sise"),
]


@pytest.mark.parametrize(("overrides", "words"), WRONG, ids=["a text model", "a misspelt setting"])
def test_it_is_said_before_weights_are_loaded(
    overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([*overrides, "runtime.device=cpu"])
    assert_told_before_weights(config, words, monkeypatch)


@pytest.mark.parametrize(
    "overrides",
    [[], [*SMOLVLM, "engine=simulated"], [*SMOLVLM, "engine=transformers_continuous"]],
    ids=["a text model", "simulated", "transformers_continuous"],
)
def test_a_workload_of_images_is_for_engines_and_models_that_take_them(
    overrides: list[str],
) -> None:
    with pytest.raises(BadInput, match=r"workload\.images: .* takes no images"):
        check(compose(["workload=images", *overrides]))


def test_images_of_a_model_that_takes_them_pass() -> None:
    check(compose([*SMOLVLM, "workload=images", "model.max_model_len=2048"]))
