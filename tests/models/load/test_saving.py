"""Checkpoints that are written: every tensor under the name that transformers gives it, or no
folder."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.saving import save_checkpoint
from minivllm.models.load.weights import CheckpointWeights
from tests import qwen_vl
from tests.reference import make_checkpoint
from tests.seeing import make_smolvlm

MAKERS: dict[str, Any] = {
    "qwen3": make_checkpoint,
    "mixtral": lambda folder: make_checkpoint(folder, "mixtral"),
    "smolvlm": make_smolvlm,
    "qwen2_5_vl": lambda folder: qwen_vl.make_checkpoint(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: qwen_vl.make_checkpoint(folder, "qwen3_vl"),
}


@pytest.mark.parametrize("family", MAKERS)
def test_names_and_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    reference = MAKERS[family](tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    weights = CheckpointWeights(Checkpoint.open(tmp_path / "first"))
    again = tmp_path / "below" / "again"
    count = save_checkpoint(
        again, config, weights.fill, lambda folder: (folder / "more.txt").write_text("x") and None
    )
    saved = load_file(again / "model.safetensors")
    known = reference.state_dict()
    if family == "mixtral":  # whose experts are fused in memory, not in files
        known = revert_weight_conversion(reference, known)
    assert count == len(saved) and (again / "more.txt").is_file()
    assert known.keys() - saved.keys() <= {"lm_head.weight"} and saved.keys() <= known.keys()
    assert all(torch.equal(tensor, known[name]) for name, tensor in saved.items())


def test_all_files_have_the_permissions_of_new_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    weights = CheckpointWeights(Checkpoint.open(tmp_path / "first"))
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "new", config, weights.fill, lambda folder: None)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}


def test_a_weight_beyond_the_dtype_is_named_and_an_infinite_one_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text()) | {"dtype": "float16"}

    def fill(weight: float, name: str, out: Tensor) -> None:
        out.copy_(torch.full(out.shape, weight if name == "model.norm.weight" else 1.0))

    with pytest.raises(BadInput, match=r"model\.norm\.weight has the weight -1e\+06, beyond the r"):
        save_checkpoint(tmp_path / "new", config, partial(fill, -1e6), lambda folder: None)
    assert not (tmp_path / "new").exists()
    save_checkpoint(tmp_path / "new", config, partial(fill, float("inf")), lambda folder: None)
    assert load_file(tmp_path / "new" / "model.safetensors")["model.norm.weight"].isinf().all()


def test_what_lies_beside_the_weights_is_written_before_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    filled: list[str] = []

    def broken(folder: Path) -> None:
        raise BadInput("no tokenizer")

    with pytest.raises(BadInput, match="no tokenizer"):
        save_checkpoint(tmp_path / "new", config, lambda name, out: filled.append(name), broken)
    assert filled == []


def test_nothing_is_left_of_what_is_not_complete(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "first")
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    weights = CheckpointWeights(Checkpoint.open(tmp_path / "first"))

    def full(folder: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(BadInput, match="new/one cannot be written: no space left"):
        save_checkpoint(tmp_path / "new" / "one", config, weights.fill, full)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(BadInput, match="exists already"):
        save_checkpoint(tmp_path / "first", config, weights.fill, full)
