"""scripts/save_pruned.py on a small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.errors import BadInput
from tests.later import Later
from tests.passes.pruning.pruned import plan_of
from tests.reference import make_checkpoint
from tests.scripts.load import load_script

script = load_script("save_pruned")
save_pruned = script.save_pruned


def test_it_saves_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "whole")
    whole, output = str(tmp_path / "whole"), tmp_path / "pruned"
    assert script.main([whole, str(output), "pruning=layers", "pruning.layers=[0,2]"]) == 0
    assert "layers 0, 2 left out" in capsys.readouterr().out
    assert json.loads((output / "config.json").read_text())["num_hidden_layers"] == 1
    with pytest.raises(BadInput, match="exists already"):
        script.main([whole, str(output), "pruning=layers"])
    with pytest.raises(BadInput, match="nothing is left out"):
        script.main([whole, str(tmp_path / "other"), "pruning=none"])
    assert not (tmp_path / "other").exists()


transformers = Later("transformers")

IDS = [5, 17, 3, 99, 42, 8, 64, 31, 7]
FP32 = ["runtime.device=cpu", "runtime.threads=1"]
KNOBS = {
    "layers": ["pruning.layers=[1]"],
    "width": ["pruning.mlp=0.3", "pruning.heads=0.5", "pruning.calibration_tokens=64"],
    "magnitude": ["pruning.sparsity=0.6"],
    "wanda": ["pruning.sparsity=0.4", "pruning.calibration_tokens=64"],
}


@pytest.mark.parametrize("method", KNOBS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_logits_are_those_of_transformers(tmp_path: Path, model_type: str, method: str) -> None:
    whole = tmp_path / "whole"
    make_checkpoint(whole, model_type, intermediate_size=96)
    overrides = [f"pruning={method}", *KNOBS[method]]
    plan = plan_of(whole, *overrides)
    save_pruned(whole, plan, tmp_path / "pruned")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "pruned", dtype=torch.float32
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    with LLM(str(whole), quant="fp32", overrides=[*FP32, *overrides]) as llm:
        ours = llm.logits(IDS)
        (report,) = (one for one in llm.engine.loaded.passes if one.name == "prune")
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    with LLM(str(tmp_path / "pruned"), quant="fp32", overrides=FP32) as llm:
        assert torch.equal(llm.logits(IDS), ours)
    with LLM(str(whole), quant="fp32", overrides=FP32) as llm:
        assert (llm.logits(IDS) - ours).abs().max() > 1e-2  # it is another model
    assert any(report.counters.values())


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole")
    plan = plan_of(tmp_path / "whole", "pruning=layers", "pruning.layers=[0]")
    (tmp_path / "there").mkdir()
    with pytest.raises(BadInput, match="exists already"):
        save_pruned(tmp_path / "whole", plan, tmp_path / "there")
