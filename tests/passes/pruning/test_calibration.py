"""Pruning from the command line's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.passes.pruning.calibration import pruning_plan, workload_prompts
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


def test_a_text_that_is_too_short_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("def main(): pass\n")
    config = Config.of(compose(["pruning=layers", f"pruning.calibration={text}"]))

    def never(_: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(BadInput, match="calibration_tokens=8192"):
        pruning_plan(config, config["model"], config["pruning"], never)


def test_the_prompts_of_the_workload_decide(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path / "model").config
    prompts = tmp_path / "prompts.jsonl"
    lines = [[(7 * i + j) % config.vocab_size for j in range(40)] for i in range(3)]
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in lines))
    asked = (
        *("pruning=layers", "pruning.calibration=workload", "pruning.calibration_tokens=100"),
        *("workload=file", f"workload.path={prompts}"),
    )
    plan = plan_of(tmp_path / "model", *asked)
    assert len(plan.layers) == 2
    with pytest.raises(BadInput, match=r"has 120 tokens, and pruning\.calibration_tokens=200"):
        plan_of(tmp_path / "model", *asked, "pruning.calibration_tokens=200")
    view = Config.of(compose(["model=hf", f"model.path={tmp_path / 'model'}", *asked]))
    made = workload_prompts(view, None, config.vocab_size, 512)
    assert [list(ids) for ids in made] == lines


def test_generated_prompts_of_a_tokenizer_are_held_out() -> None:
    asked = ["pruning=layers", "pruning.calibration=workload", "pruning.calibration_tokens=64"]
    config = Config.of(compose([*asked, "workload.num_requests=4"]))

    def never(_: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(BadInput, match="in the held-out text that quality is measured on"):
        pruning_plan(config, config["model"], config["pruning"], never)


def test_pictures_are_not_calibrated_on() -> None:
    config = Config.of(
        compose(["workload=images", "pruning.calibration=workload", "pruning=layers"])
    )
    with pytest.raises(BadInput, match=r"pruning\.calibration=workload: .* no pictures"):
        workload_prompts(config, None, 500, 2048)
