"""Layers that are computed as a GGUF file stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.quant.base import QuantMethod
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from tests.gguf_files import LLAMA, SHAPES, Stored, tensors, write

CPU = torch.device("cpu")
METHODS = {"Q4_0": (Int4, "Int4Linear"), "Q8_0": (Int8, "Int8GroupLinear")}


def load(path: Path, quant: QuantMethod) -> LoadedModel:
    return load_model(ModelOptions(str(path)), quant=quant, context=BuildContext(CPU))


def quantized(form: str) -> dict[str, Stored]:
    """Tensors of normal values; random blocks may have values beyond float16."""
    generator = torch.Generator().manual_seed(0)
    kind = gguf.GGMLQuantizationType[form]
    return {
        name: (data, own)
        if own == "F32"
        else (gguf.quantize(torch.randn(SHAPES[name], generator=generator).numpy(), kind), own)
        for name, (data, own) in tensors(form=form).items()
    }


def expected(stored: dict[str, Stored], *names: str) -> Tensor:
    """The rows of some tensors of layer 0 as the package has them."""
    parts = []
    for name in names:
        data, form = stored[f"blk.0.{name}.weight"]
        values = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[form]))
        heads = {"attn_q": 4, "attn_k": 2}.get(name)
        if heads:
            values = values.view(heads, 32, 2, -1).transpose(1, 2).reshape(values.shape)
        parts.append(values)
    return torch.cat(parts)


@pytest.mark.parametrize("form", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_integers_and_scales_are_the_files(form: str, dtype: str, tmp_path: Path) -> None:
    method, kernel = METHODS[form]
    stored = quantized(form)
    loaded = load(write(tmp_path / "q.gguf", LLAMA, stored), method(dtype=dtype))
    layer: Any = loaded.model.model.layers[0]
    assert loaded.quantized_layers == 4 and type(layer.mlp.down_proj).__name__ == kernel
    scales = ", with scales rounded to bfloat16" if dtype == "bfloat16" else ""
    kept = "without rounding" if dtype == "float32" else "and rounded"
    said = f"4 layers of {form} are computed as they are stored{scales}, in groups of 32 whatever "
    assert said in loaded.warnings[0]
    assert loaded.warnings[0].endswith(f"other tensors are converted to {dtype} {kept}")
    for module, names in (
        (layer.mlp.down_proj, ("ffn_down",)),
        (layer.mlp.gate_up_proj, ("ffn_gate", "ffn_up")),
        (layer.self_attn.qkv_proj, ("attn_q", "attn_k", "attn_v")),
    ):
        whole = expected(stored, *names)
        with torch.inference_mode():
            # Many rows, for the path that converts: one of a unit vector is the weight itself.
            held = module(torch.eye(whole.shape[1], dtype=getattr(torch, dtype))).t().float()
        if dtype == "bfloat16":  # a scale and a product are rounded
            assert torch.allclose(held, whole, rtol=2.0**-7, atol=0)
        else:
            assert torch.equal(held, whole.to(getattr(torch, dtype)).float())


def test_packed_layers_take_the_files_bytes(tmp_path: Path) -> None:
    stored = tensors(form="Q8_0")
    path = write(tmp_path / "q.gguf", LLAMA, stored)
    loaded = load(path, Int8(dtype="float16"))
    matrices = sum(data.nbytes for name, (data, _) in stored.items() if "blk.0" in name)
    norms = 2 * 256 * 4  # of the layer, which are no linear layers
    assert loaded.linear_bytes == matrices - norms


def test_rows_of_one_block_lie_densely_for_the_kernels(tmp_path: Path) -> None:
    stored = quantized("Q8_0")
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        data, form = stored[f"blk.0.{name}.weight"]
        stored[f"blk.0.{name}.weight"] = (data[:, :34] if name == "ffn_down" else data[:32], form)
    path = write(tmp_path / "q.gguf", LLAMA | {"llama.feed_forward_length": 32}, stored)
    layer: Any = load(path, Int8()).model.model.layers[0]
    assert layer.mlp.down_proj.weight.shape == (256, 32)
    assert layer.mlp.down_proj.weight.is_contiguous()


def test_other_formats_are_quantised_again_and_said_so(tmp_path: Path) -> None:
    stored = tensors({"blk.0.ffn_down.weight": "Q6_K", "blk.0.attn_k.weight": "Q8_0"}, "Q4_0")
    loaded = load(write(tmp_path / "q.gguf", LLAMA, stored), Int4(dtype="float32"))
    assert loaded.quantized_layers == 4
    assert "2 layers of Q4_0 are computed as they are stored" in loaded.warnings[0]
    assert loaded.warnings[0].endswith("; quant=int4 quantises 2 layers again")
    skipped = load(tmp_path / "q.gguf", Int4(dtype="float32", skip=("down_proj", "o_proj")))
    assert skipped.quantized_layers == 2
    assert "1 layers of Q4_0" in skipped.warnings[0] and "1 layers again" in skipped.warnings[0]
