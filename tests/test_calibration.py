"""Pruning from the command line's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.assembly import build_engine
from minivllm.calibration import pruning_plan
from minivllm.config.compose import compose
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from tests.passes.pruning.pruned import plan_of
from tests.reference import make_checkpoint


def test_activations_choose_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    by_influence = plan_of(tmp_path, "pruning=layers", "pruning.calibration_tokens=64")
    assert len(by_influence.layers) == 2 and by_influence.config["num_hidden_layers"] == 2


def test_a_model_class_of_ones_own_is_not_pruned() -> None:
    config = Config.of(compose(["pruning=layers"]))
    own: dict[str, Any] = {"_target_": "my_package.load"}
    with pytest.raises(BadInput, match="model class of your own"):
        pruning_plan(config, own, config["pruning"], build_engine)
    assert pruning_plan(config, own, compose([])["pruning"], build_engine) is None


def test_a_text_that_is_too_short_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("def main(): pass\n")
    config = Config.of(compose(["pruning=layers", f"pruning.calibration={text}"]))

    def never(_: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(BadInput, match="calibration_tokens=8192"):
        pruning_plan(config, config["model"], config["pruning"], never)
