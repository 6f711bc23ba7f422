"""Degrees of parallelism that a peer is started with."""

from __future__ import annotations

import pytest

from minivllm.config.compose import compose
from minivllm.config.typed import Config
from minivllm.engines.support.degrees import degrees
from minivllm.engines.support.supported_knobs import require_supported
from minivllm.errors import BadInput


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (1, 1)),
        (["runtime.device=cuda"], (1, 1)),
        (["runtime.device=cuda:0-3"], (4, 1)),
        (["parallel.tensor=2"], (2, 1)),
        (["parallel.tensor=2", "parallel.replicas=2", "runtime.device=cuda:0-3"], (2, 2)),
    ],
)
def test_gpus_are_shared_as_parallel_says_or_by_tensor(
    overrides: list[str], expected: tuple[int, int]
) -> None:
    assert degrees(Config(compose(["engine=vllm_server", *overrides]))) == expected


def test_a_wrong_number_of_gpus_is_named() -> None:
    config = compose(["engine=sglang", "parallel.tensor=4", "runtime.device=cuda:0-2"])
    with pytest.raises(BadInput, match=r"takes 4 GPUs, and runtime\.device=cuda:0-2 names 3"):
        degrees(Config(config))


@pytest.mark.parametrize("engine", ["vllm", "vllm_server", "sglang"])
def test_a_peer_that_splits_models_takes_the_knob(engine: str) -> None:
    require_supported(compose([f"engine={engine}", "parallel.tensor=2"]))


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_an_engine_that_splits_no_model_rejects_it(engine: str) -> None:
    with pytest.raises(BadInput, match=rf"parallel\.tensor=2.* not supported by engine={engine}"):
        require_supported(compose([f"engine={engine}", "parallel.tensor=2"]))
