"""Logits of GGUF files are those of transformers on the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minivllm.errors import BadInput
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint
from minivllm.models.load.gguf.formats import READ
from minivllm.models.load.gguf.weights import GGUFWeights
from tests.gguf_files import LLAMA, SHAPES, script, tensors, write
from tests.models.test_parity import PROMPTS, load, run
from tests.reference import LLAMA3_ROPE, LONG_ROPE, TWO_ROPES, VARIANTS, YARN_ROPE, make_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # of rows that are whole blocks
GEMMA3 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
    "rope_parameters": TWO_ROPES,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen2", "qwen3", "gemma", "mixtral", "phi3")},
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", GEMMA3),
    "llama tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "yarn": ("llama", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 32}),
    "linear": ("llama", VARIANTS["llama linear rope"][1]),
    "phi3 longrope": (
        "phi3",
        {
            "rope_parameters": LONG_ROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
}


def quantized_(model: Any, kind: str) -> None:
    """Replace the matrices of a model by what a file of this kind gives back."""
    form = gguf.GGMLQuantizationType[kind.upper()]
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith("mlp.gate.weight") or parameter.data_ptr() in seen:
            continue
        seen.add(parameter.data_ptr())
        values = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), form), form)
        parameter.data.copy_(torch.from_numpy(values))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_family_are_those_of_transformers(
    case: str, kind: str, tmp_path: Path
) -> None:
    family, overrides = CASES[case]
    model = make_checkpoint(tmp_path / "model", family, **(SIZES | overrides))
    script().save(str(tmp_path / "model"), tmp_path / "file.gguf", kind)
    quantized_(model, kind)
    loaded = load(tmp_path / "file.gguf")
    assert set(loaded.stored_bytes) == {"F32", kind.upper()}
    _, logits = run(loaded, PROMPTS)
    expected = torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_1", "mxfp4"])
def test_transformers_reads_the_same_logits_from_the_file(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path / "model", "llama", **SIZES)
    script().save(str(tmp_path / "model"), tmp_path / "file.gguf", kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="file.gguf", dtype=torch.float32
    )
    expected = torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    _, logits = run(load(tmp_path / "file.gguf"), PROMPTS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# Of IQ1_M random blocks have infinities: its scale's parts lie in several bytes.
@pytest.mark.parametrize("form", [form for form in READ if form not in ("F32", "IQ1_M")])
def test_values_are_the_packages_and_rounded_once(form: str, tmp_path: Path) -> None:
    stored = tensors(form=form)
    write(tmp_path / "file.gguf", LLAMA, stored)
    reader = GGUFWeights(GGUFCheckpoint.open(tmp_path / "file.gguf"))
    names = {
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    }
    for theirs, ours in names.items():
        data, kind = stored[theirs]
        expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
        if "attn_q" in theirs:  # the rows of both halves of a head in turn
            expected = expected.view(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.empty(SHAPES[theirs], dtype=dtype)
            reader.fill(ours, out)
            assert torch.equal(out, expected.to(dtype))


def test_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file.gguf", LLAMA, tensors())
    whole = GGUFWeights(GGUFCheckpoint.open(path))
    monkeypatch.setattr("minivllm.models.load.gguf.weights._VALUES", 1000)
    pieces = GGUFWeights(GGUFCheckpoint.open(path))
    for name in ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"):
        rows = {"mlp.down_proj": 512}.get(name, 256)
        a, b = (torch.empty(128 if "k_" in name else 256, rows) for _ in range(2))
        whole.fill(f"model.layers.0.{name}.weight", a)
        pieces.fill(f"model.layers.0.{name}.weight", b)
        assert torch.equal(a, b)


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    write(tmp_path / "q.gguf", LLAMA, tensors())
    said = {dtype: load(tmp_path / "q.gguf", dtype).warnings for dtype in ("float32", "bfloat16")}
    kinds = "q.gguf stores Q8_0 (638 KiB), F32 (3 KiB): converted to "
    assert said == {
        "float32": [f"{kinds}float32 without rounding"],
        "bfloat16": [f"{kinds}bfloat16 and rounded"],
    }


def test_a_format_that_is_not_read_is_one_line_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = {name: "Q1_0" for name, shape in SHAPES.items() if len(shape) > 1}
    path = write(tmp_path / "q.gguf", LLAMA, tensors(forms | {"blk.0.attn_q.weight": "Q8_0"}))
    monkeypatch.setattr(GGUFWeights, "fill", None)
    with pytest.raises(BadInput) as raised:
        load(path)
    names = "token_embd.weight, blk.0.attn_k.weight, blk.0.attn_v.weight and 4 more as Q1_0"
    assert f"q.gguf stores {names}; only F32, F16, BF16, Q4_0" in str(raised.value)


def test_a_format_of_the_package_says_where_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "q.gguf", LLAMA, tensors({"blk.0.ffn_up.weight": "IQ2_S"}))
    assert load(path).stored_bytes["IQ2_S"] == 512 * 82
    monkeypatch.setattr("minivllm.models.load.gguf.weights.find_spec", lambda name: None)
    monkeypatch.setattr(GGUFWeights, "fill", None)
    message = r"stores blk.0.ffn_up.weight as IQ2_S, which the package gguf converts: pip install"
    with pytest.raises(BadInput, match=message):
        load(path)


def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path) -> None:
    more = tensors() | {"blk.1.attn_norm.weight": (np.ones(256, np.float32), "F32")}
    with pytest.raises(BadInput, match=r"blk.1.attn_norm.weight .* has no place .* its metadata"):
        load(write(tmp_path / "more.gguf", LLAMA, more))
    fewer = {name: value for name, value in tensors().items() if "ffn_up" not in name}
    with pytest.raises(BadInput, match=r"lacks tensor model.layers.0.mlp.up_proj.weight"):
        load(write(tmp_path / "fewer.gguf", LLAMA, fewer))
    wrong = LLAMA | {"llama.feed_forward_length": 544}
    with pytest.raises(BadInput, match=r"has shape \[512, 256\] where its metadata asks for"):
        load(write(tmp_path / "wrong.gguf", wrong, tensors()))
