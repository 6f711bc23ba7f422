"""GGUF files of the script hold what the checkpoint does, or are not made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from minivllm.errors import BadInput
from tests.gguf_files import script
from tests.reference import VARIANTS, make_checkpoint
from tests.scripts.load import load_script

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["save_gguf.py", *arguments])
    return load_script("program").exit_code(script().main)


def test_the_package_reads_back_what_the_checkpoint_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", **SIZES)
    held = load_file(tmp_path / "model" / "model.safetensors")
    for kind in script().TYPES:
        out = tmp_path / f"{kind}.gguf"
        assert run(monkeypatch, str(tmp_path / "model"), str(out), "--type", kind) == 0
        assert capsys.readouterr().out == f"{out}: {out.stat().st_size:,} bytes\n"
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
        assert len(found) == len(held)
        form = gguf.GGMLQuantizationType[kind.upper()]
        down = held["model.layers.2.mlp.down_proj.weight"]
        stored = found["blk.2.ffn_down.weight"]
        assert stored.tensor_type == form
        np.testing.assert_array_equal(
            gguf.dequantize(stored.data, form), gguf.dequantize(gguf.quantize(down, form), form)
        )
        norm = found["blk.1.attn_norm.weight"]
        np.testing.assert_array_equal(norm.data, held["model.layers.1.input_layernorm.weight"])


def test_rows_that_are_no_blocks_are_float16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", hidden_size=64)  # and 80 inputs of down_proj
    script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "file.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


LOST = {
    "qwen3 window": "GGUF has no place for layer_types",
    "llama dynamic rope": "GGUF has no place for .*rope",
    "gemma2": "GGUF has no place for attention_scale",
}


@pytest.mark.parametrize("case", LOST)
def test_what_gguf_has_no_place_for_is_not_saved(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family, overrides = VARIANTS[case]
    make_checkpoint(tmp_path / "model", family, **overrides)
    assert run(monkeypatch, str(tmp_path / "model"), str(tmp_path / "file.gguf")) == 2
    with pytest.raises(BadInput, match=LOST[case]):
        script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "GGUF has no place" in capsys.readouterr().err


def test_a_tokenizer_without_a_name_in_llama_cpp_is_not_saved(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    make_checkpoint(tmp_path / "model", "qwen3", **SIZES)
    fast = Tokenizer(models.BPE({"a": 0}, []))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(BadInput, match="the tokenizer is not a byte-level BPE whose rule"):
        script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "f16")


def test_a_file_is_never_overwritten_and_never_the_source(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", **SIZES)
    script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "f16")
    with pytest.raises(BadInput, match=r"file.gguf exists already"):
        script().save(str(tmp_path / "model"), tmp_path / "file.gguf", "f16")
    with pytest.raises(BadInput, match="must be a folder with a checkpoint in 16 or 32 bits"):
        script().save(str(tmp_path / "file.gguf"), tmp_path / "other.gguf", "f16")
    config = tmp_path / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": ["XForCausalLM"]})
    )
    with pytest.raises(BadInput, match="architecture XForCausalLM is not supported"):
        script().save(str(tmp_path / "model"), tmp_path / "other.gguf", "f16")
