"""scripts/save_pruned.py on a small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from tests.reference import make_checkpoint
from tests.scripts.load import load_script

script = load_script("save_pruned")


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
