"""scripts/save_random.py: what it saves is a checkpoint with the weights of
`model.weights=random`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import RandomWeights
from tests.scripts.load import load_script

script = load_script("save_random")


def test_it_saves_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "random"
    assert script.main([str(folder), "model=tiny", "model.seed=3"]) == 0
    assert "tensors in" in capsys.readouterr().out
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = torch.empty_like(tensors[name])
    RandomWeights(3).fill(name, expected)
    assert torch.equal(tensors[name], expected) and expected.std() > 0.01
    assert script.main([str(folder), "model=tiny"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("size", [100, 1000])
def test_its_tokenizer_has_a_text_for_each_id(tmp_path: Path, size: int) -> None:
    made = script.any_tokenizer(size)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None and made.get_vocab_size() == size
    assert len({made.decode([index]) for index in range(size)} - {""}) > 0.8 * size
