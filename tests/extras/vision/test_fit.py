"""Knobs and workloads of images for a model that takes none are one line before anything is
loaded."""

from __future__ import annotations

import pytest

from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.preflight import check
from tests.told_early import assert_told_before_weights

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
