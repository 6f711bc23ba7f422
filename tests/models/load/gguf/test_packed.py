"""Layers that are computed as a GGUF file stores them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.models.load.gguf.config import config_of
from minivllm.models.load.gguf.formats import AS_STORED
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.pruning.plan import PruningPlan, by_magnitude
from minivllm.quant.base import QuantMethod
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain
from tests import gguf_files
from tests.gguf_files import LLAMA, SHAPES, Stored, tensors, write

CPU = torch.device("cpu")
METHODS: dict[str, tuple[Any, str]] = {
    "Q4_0": (Int4, "Int4Linear"),
    "Q4_1": (Int4, "Int4Linear"),
    "Q8_0": (Int8, "Int8GroupLinear"),
    "IQ4_NL": (NF4, "IQ4NLLinear"),
}
MODULES = (
    ("mlp.down_proj", ("ffn_down",)),
    ("mlp.gate_up_proj", ("ffn_gate", "ffn_up")),
    ("self_attn.qkv_proj", ("attn_q", "attn_k", "attn_v")),
)


def load(path: Path, quant: QuantMethod, kernels: Kernels | None = None) -> LoadedModel:
    return load_model(ModelOptions(str(path)), quant=quant, context=BuildContext(CPU, kernels))


def quantized(form: str, forms: dict[str, str] | None = None) -> dict[str, Stored]:
    """Tensors of normal values; random blocks may have values beyond float16."""
    generator = torch.Generator().manual_seed(0)

    def made(name: str, own: str) -> Stored:
        values = torch.randn(SHAPES[name], generator=generator)
        return gguf_files.quantized(values.numpy(), own), own

    return {
        name: (data, own) if own == "F32" else made(name, own)
        for name, (data, own) in tensors(forms, form).items()
    }


def values_of(stored: dict[str, Stored], *names: str) -> Tensor:
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


@torch.inference_mode()
def held(layer: Any, name: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weight of a layer: a row of a unit vector is one of its columns."""
    out: Tensor = layer.get_submodule(name)(torch.eye(inputs, dtype=dtype))
    return out.t().float()


def test_every_format_that_is_computed_as_stored_is_tried() -> None:
    assert {form: method.name for form, (method, _) in METHODS.items()} == {
        form: name for name, forms in AS_STORED.items() for form in forms
    }


@pytest.mark.parametrize("form", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_integers_and_scales_are_the_files(form: str, dtype: str, tmp_path: Path) -> None:
    method, kernel = METHODS[form]
    stored = quantized(form)
    loaded = load(write(tmp_path / "q.gguf", LLAMA, stored), method(dtype=dtype))
    layer: Any = loaded.model.model.layers[0]
    assert loaded.quantized_layers == 4 and type(layer.mlp.down_proj).__name__ == kernel
    # Without C++ kernels the value of code 8 takes the place of a minimum.
    exact = dtype == "float32" or (dtype == "float16" and form != "Q4_1")
    assert loaded.warnings[0].endswith(
        "in groups of 32 and at the file's levels, whatever quant says; other tensors are "
        f"converted to {dtype} "
        f"{'without rounding' if dtype == 'float32' else 'and rounded'}"
    )
    assert f"4 layers of {form} are computed as they are stored, " in loaded.warnings[0]
    assert ("stored, in groups" in loaded.warnings[0]) == exact
    if not exact:
        percent = re.search(
            rf"scales rounded to {dtype} .* by up to (\S+) % of", loaded.warnings[0]
        )
        assert percent and 0.01 < float(percent[1]) < 1
    for name, parts in MODULES:
        whole = values_of(stored, *parts)
        weight = held(layer, name, whole.shape[1], getattr(torch, dtype))
        if exact:
            assert torch.equal(weight, whole.to(getattr(torch, dtype)).float())
        else:  # scale, minimum and product are rounded
            step = 2.0**-8 if dtype == "bfloat16" else 2.0**-10
            assert (weight - whole).abs().max() < 2 * step * whole.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("form", METHODS)
def test_a_product_copies_nothing_from_the_host(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph records no such copy."""
    path = write(tmp_path / "q.gguf", LLAMA, quantized(form))
    layer: Any = load(path, METHODS[form][0]()).model.model.layers[0].mlp.down_proj
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    expected = layer(x)
    monkeypatch.delattr(torch, "tensor")
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("form", METHODS)
def test_the_kernels_take_the_files_integers_scales_and_minima(
    form: str, tmp_path: Path, panels: Kernels
) -> None:
    """Rounded are scales and minima, to bfloat16, and nothing else."""
    stored = quantized(form)
    path = write(tmp_path / "q.gguf", LLAMA, stored)
    loaded = load(path, METHODS[form][0](), panels)
    layer: Any = loaded.model.model.layers[0]
    for name, parts in MODULES:
        module = layer.get_submodule(name)
        assert isinstance(module, PanelLinear) and module.group == 32
        kinds = {"Q4_1": Format.UINT4, "Q4_0": Format.INT4, "Q8_0": Format.INT8}
        assert module.form == kinds.get(form, Format.IQ4_NL)
        whole = values_of(stored, *parts)
        weight = held(layer, name, whole.shape[1], torch.bfloat16)
        groups, own = whole.unflatten(1, (-1, 32)), weight.unflatten(1, (-1, 32))
        if form == "Q4_1":
            # A code of 0 is the minimum itself, which every group has.
            least = groups.min(-1, keepdim=True).values
            is_least = groups == least
            rounded = least.bfloat16().float().expand_as(groups)
            assert torch.equal(own[is_least], rounded[is_least])
        largest = groups.abs().amax(-1, keepdim=True)
        # Of 8 bits each: the scale, whose 15 fold may be twice the largest, the minimum, the sum.
        bound = 2.0**-6 if form == "Q4_1" else 2.0**-7
        assert ((own - groups).abs() <= bound * largest).all()
        assert not torch.equal(own, groups)


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1"])
def test_activations_of_8_bits_meet_the_files_integers(
    form: str, tmp_path: Path, panels: Kernels
) -> None:
    stored = quantized(form)
    path = write(tmp_path / "q.gguf", LLAMA, stored)
    wide, narrow = (
        load(path, Int4(activations=kind), panels).model.model.layers[0]
        for kind in ("none", "int8")
    )
    for name, parts in MODULES:
        assert narrow.get_submodule(name).form == (
            Format.UINT4_QUADS if form == "Q4_1" else Format.INT4_QUADS
        )
        inputs = values_of(stored, *parts).shape[1]
        one, two = (held(layer, name, inputs, torch.bfloat16) for layer in (wide, narrow))
        torch.testing.assert_close(one, two, rtol=2.0**-7, atol=2.0**-7)


def test_parts_of_a_fused_layer_may_have_minima_or_not(tmp_path: Path, panels: Kernels) -> None:
    stored = quantized("Q4_1", {"blk.0.attn_k.weight": "Q4_0", "blk.0.ffn_up.weight": "Q4_0"})
    path = write(tmp_path / "q.gguf", LLAMA, stored)
    exact, rounded = load(path, Int4(dtype="float32")), load(path, Int4(), panels)
    assert "4 layers of Q4_0 and Q4_1 are computed as they are stored, in" in exact.warnings[0]
    for name, parts in MODULES:
        whole = values_of(stored, *parts)
        layers: list[Any] = [loaded.model.model.layers[0] for loaded in (exact, rounded)]
        assert torch.equal(held(layers[0], name, whole.shape[1], torch.float32), whole)
        weight = held(layers[1], name, whole.shape[1], torch.bfloat16)
        assert (weight - whole).abs().max() < 2.0**-7 * whole.abs().max()


def test_packed_layers_take_the_files_bytes(tmp_path: Path) -> None:
    for form in ("Q8_0", "IQ4_NL"):
        stored = tensors(form=form)
        path = write(tmp_path / f"{form}.gguf", LLAMA, stored)
        loaded = load(path, METHODS[form][0](dtype="float16"))
        matrices = sum(data.nbytes for name, (data, _) in stored.items() if "blk.0" in name)
        norms = 2 * 256 * 4  # of the layer, which are no linear layers
        levels = 16 * 2 * 4 * (form == "IQ4_NL")  # of each layer
        assert loaded.linear_bytes == matrices - norms + levels


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


def test_a_pruned_file_is_converted_whole_and_said_so(tmp_path: Path) -> None:
    path = write(tmp_path / "q.gguf", LLAMA, tensors(form="Q4_0"))
    plan = PruningPlan(config_of(path), [0], mask=by_magnitude(0.5))
    for quant, end in (
        (Int4(), "bfloat16 and rounded; quant=int4 quantises 4 layers again"),
        (Plain("float32"), "converted to float32 without rounding"),
    ):
        loaded = load_model(
            ModelOptions(str(path)), quant=quant, context=BuildContext(CPU), transform=plan
        )
        (note,) = loaded.warnings
        assert note.startswith("q.gguf stores Q4_0 (") and note.endswith(end)


def test_a_group_of_zeros_has_no_error(tmp_path: Path) -> None:
    stored = quantized("Q8_0")
    for name, (data, form) in stored.items():
        stored[name] = (data if form == "F32" else data * 0, form)
    loaded = load(write(tmp_path / "q.gguf", LLAMA, stored), Int8())
    assert "4 layers of Q8_0 are computed as they are stored, in groups" in loaded.warnings[0]
