"""Checkpoints that were quantised before: the integers and scales on file are those that are
computed with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.quant.base import StoredLayer
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.int8_mixed import Int8Mixed, Int8MixedLinear
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain
from minivllm.quant.stored.base import stored_format
from tests.models.test_parity import PROMPTS, run
from tests.reference import make_checkpoint

GROUP = 32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "version": "gemm",
    "zero_point": True,
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": False,
}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
ACT_ORDER = GPTQ | {"desc_act": True}

# ---- the layouts, written out as their libraries describe them


def packed_rows(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [n, m / 8] of codes [n, m]: nibble i of a word holds column order[i] of its eight."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            words[:, word] |= codes[:, 8 * word + column].long() << (4 * place)
    return words.to(torch.int32)


def awq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """AutoAWQ's WQLinear_GEMM: codes [out, in], zeros and scales [groups, out]."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed_rows(codes.t(), order),
        "qzeros": packed_rows(zeros, order),
        "scales": scales,
    }


def gptq_tensors(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """AutoGPTQ's QuantLinear, of which the first format keeps zero points less one."""
    stored = v2_tensors(codes, (zeros.long() - 1) & 15, scales, groups)
    return stored | {
        "bias": torch.zeros(codes.shape[0], dtype=torch.float16)
    }  # it wrote them for every layer


def v2_tensors(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> dict[str, Tensor]:
    qweight = packed_rows(codes).t().contiguous()  # eight inputs a word
    return {
        "qweight": qweight,
        "qzeros": packed_rows(zeros),
        "scales": scales,
        "g_idx": groups.int(),
    }


PACKERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "awq": awq_tensors,
    "gptq": gptq_tensors,
    "gptq_v2": v2_tensors,
    "act_order": gptq_tensors,
}
SETTINGS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": V2, "act_order": ACT_ORDER}


def layer(rows: int, columns: int, seed: int, shuffled: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """Random codes, zeros, float16 scales and groups; and the float32 weight [rows, columns] that
    they mean."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    zeros = torch.randint(0, 16, (columns // GROUP, rows), generator=generator)
    scales = (torch.rand(columns // GROUP, rows, generator=generator) * 0.02 + 0.01).half()
    groups = torch.arange(columns) // GROUP
    if shuffled:  # the same for all layers that share their input
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    weight = (codes - zeros[groups].t()).float() * scales.float()[groups].t()
    return (codes, zeros, scales, groups), weight


def quantized_copy(
    folder: Path, kind: str, skip: str = "nothing", settings: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """A checkpoint whose layers are quantised in a layout, and beside it the same in float32."""
    make_checkpoint(folder / "plain", dtype=torch.float32, **SIZES)
    tensors = load_file(folder / "plain" / "model.safetensors")
    stored = dict(tensors)
    for seed, name in enumerate(
        sorted(n for n in tensors if "_proj.weight" in n and skip not in n)
    ):
        pieces, tensors[name] = layer(*tensors[name].shape, seed, kind == "act_order")
        prefix = name.removesuffix("weight")
        del stored[name]
        stored |= {prefix + part: value for part, value in PACKERS[kind](*pieces).items()}
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "packed").mkdir()
    (folder / "packed" / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings or SETTINGS[kind]})
    )
    for place, values in (("plain", tensors), ("packed", stored)):
        save_file(
            {n: t.contiguous() for n, t in values.items()}, folder / place / "model.safetensors"
        )
    return folder / "packed", folder / "plain"


def load(folder: Path, quant: Any) -> LoadedModel:
    return load_model(
        ModelOptions(str(folder)), quant=quant, context=BuildContext(torch.device("cpu"))
    )


# ---- AWQ and GPTQ


@pytest.mark.parametrize("kind", PACKERS)
def test_codes_and_scales_are_read_exactly(kind: str) -> None:
    """Two parts of one layer; in float32 every product of an integer and a float16 scale is
    exact."""
    made = [layer(rows, 96, seed, kind == "act_order") for seed, rows in enumerate((24, 48))]
    parts = [PACKERS[kind](*pieces) for pieces, _ in made]
    packed: Any = stored_format(SETTINGS[kind], Int4("float32")).linear(
        StoredLayer(parts, [24, 48], 96, None)
    )
    weight = torch.cat([weight for _, weight in made])
    read = packed.transposed(0, 128)[:, :72].t()
    if packed.order is not None:
        weight = weight[:, packed.order]
    assert torch.equal(read, weight)
    assert (packed.order is not None) == (kind == "act_order")
    # scales rounded to the compute dtype
    for dtype, error in (("float16", 0.002), ("bfloat16", 0.006)):
        for rows in (3, 60):
            x = torch.randn(rows, 96)
            half: Any = stored_format(SETTINGS[kind], Int4(dtype)).linear(
                StoredLayer(parts, [24, 48], 96, None)
            )
            expected = x @ torch.cat([weight for _, weight in made]).t()
            out = half(x.to(half.scales_and_zeros.dtype)).float()
            assert (out - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("group", [-1, 512])
def test_groups_that_no_kernel_has_are_split(group: int) -> None:
    codes, scales = (
        torch.randint(0, 16, (16, 1024)),
        (torch.rand(1024 // group if group > 0 else 1, 16) + 1).half(),
    )
    zeros = torch.full(scales.shape, 7)
    groups = torch.arange(1024) // (group if group > 0 else 1024)
    packed: Any = stored_format(GPTQ | {"group_size": group}, Int4("float32")).linear(
        StoredLayer([gptq_tensors(codes, zeros, scales, groups)], [16], 1024, None)
    )
    assert packed.group_size == 256
    expected = (codes - 7).float() * scales.float()[groups].t()
    assert torch.equal(packed.transposed(0, 64)[:, :16].t(), expected)


@pytest.mark.parametrize("kind", PACKERS)
def test_a_quantised_checkpoint_computes_what_its_weights_mean(kind: str, tmp_path: Path) -> None:
    packed, plain = quantized_copy(tmp_path, kind)
    loaded = load(packed, Int4("float32", group_size=256))
    expected = run(load(plain, Plain("float32")), PROMPTS)[1]
    torch.testing.assert_close(run(loaded, PROMPTS)[1], expected, atol=2e-4, rtol=1e-4)
    assert loaded.quantized_layers == 12
    assert "quantised before" in loaded.warnings[-1]
    assert loaded.linear_bytes < 0.45 * loaded.linear_bytes_16bit


def test_layers_that_a_checkpoint_leaves_alone_stay_so(tmp_path: Path) -> None:
    packed, plain = quantized_copy(tmp_path, "awq", skip="layers.0.mlp.down_proj")
    loaded = load(packed, Int4("float32"))
    assert type(loaded.model.model.layers[0].mlp.down_proj).__name__ != "Int4Linear"
    assert loaded.quantized_layers == 11
    expected = run(load(plain, Plain("float32")), PROMPTS)[1]
    torch.testing.assert_close(run(loaded, PROMPTS)[1], expected, atol=2e-4, rtol=1e-4)
    # the head is the user's choice all the same
    with_head = load(packed, Int4("float32", lm_head=True))
    assert with_head.quantized_layers == 12
    assert type(with_head.model.lm_head).__name__ == "Int4Linear"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "awq with bits=8.*read are 4 bits"),
        ({"version": "gemv"}, "version=gemv.*read are 4 bits, gemm"),
        ({"zero_point": False}, "zero_point=False"),
        ({"group_size": 48}, "group_size=48.*multiple of 32"),
        ({"quant_method": "hqq"}, "quantised as hqq, which is not read; read are awq, gptq"),
        ({"quant_method": "fp8"}, r"quantised as fp8: choose quant=fp8 \(not int4\)"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "checkpoint_format=marlin.*gptq and gptq_v2",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            r"4-bit fp4, which no option .*: choose quant=bf16, quant=fp16, quant=fp32 \(not "
            r"int4\)",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"quant=int8_mixed \(not int4\)"),
    ],
)
def test_layouts_that_are_not_read_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        stored_format(AWQ | change, Int4())


@pytest.mark.parametrize("quant", [Plain(), Int8(), NF4()])
def test_another_option_is_told_the_right_one(quant: Any, tmp_path: Path) -> None:
    packed, _ = quantized_copy(tmp_path, "gptq")
    with pytest.raises(BadInput, match=rf"as gptq: choose quant=int4 \(not {quant.name}\)"):
        load(packed, quant)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Let `change` alter the quantised checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q + "scales"), f"lacks tensor {Q}scales"),
        (
            lambda t: t.update({Q + "scales": t[Q + "scales"][:1].clone()}),
            rf"{Q}scales has shape \[1, 64\].*\[2, 64\]",
        ),
        (lambda t: t.update({Q + "qweight": t[Q + "qweight"].long()}), "not packed into int32"),
        (lambda t: t.update({Q + "bias": torch.ones(64)}), "layers.1.self_attn.qkv_proj: .*biases"),
        (
            lambda t: t.update({Q + "g_idx": t[Q + "g_idx"].flip(0)}),
            "g_idx.* differ between layers that are fused",
        ),
        (lambda t: t.update({Q + "extra": torch.ones(1)}), f"{Q}extra.*no place"),
        (
            lambda t: (t.pop(Q + "qweight"), t.update({Q + "weight": torch.ones(64, 64)})),
            "q_proj, k_proj, v_proj, of which the checkpoint quantises only some",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[..., Any], message: str, tmp_path: Path
) -> None:
    packed, _ = quantized_copy(tmp_path, "gptq")
    spoil(packed, change)
    with pytest.raises(BadInput, match=message) as caught:
        load(packed, Int4("float32"))
    assert "\n" not in str(caught.value)


def test_a_quantised_layer_cannot_be_skipped(tmp_path: Path) -> None:
    packed, _ = quantized_copy(tmp_path, "awq")
    with pytest.raises(BadInput, match=r"quant\.skip asks for model\.layers\.0\.mlp\.down_proj"):
        load(packed, Int4(skip=["down_proj"]))


# ---- bitsandbytes, saved by transformers itself


def saved_by_transformers(folder: Path, **options: Any) -> Any:
    """A small model quantised and saved by transformers; returns it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_checkpoint(folder / "plain", dtype=torch.bfloat16, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "plain",
        quantization_config=BitsAndBytesConfig(
            llm_int8_skip_modules=["lm_head", "layers.2.mlp.down_proj"], **options
        ),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    model.save_pretrained(folder / "packed")
    return model


@pytest.mark.parametrize("double", [True, False])
def test_nf4_of_bitsandbytes_is_read_exactly(double: bool, tmp_path: Path) -> None:
    model = saved_by_transformers(
        tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
    )
    method = NF4("float32", block_size=512)
    loaded = load(tmp_path / "packed", method)
    assert loaded.quantized_layers == 11
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors = {name: value.float() for name, value in tensors.items()}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            state = module.weight.quant_state
            state.dtype = torch.float32
            tensors[f"{name}.weight"] = method.library.functional.dequantize_4bit(
                module.weight.data, state
            )
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    expected = run(load(tmp_path / "plain", Plain("float32")), PROMPTS)[1]
    torch.testing.assert_close(run(loaded, PROMPTS)[1], expected, atol=2e-4, rtol=1e-4)
    # and with the 16-bit kernel, whose scales are rounded to bfloat16
    close = run(load(tmp_path / "packed", NF4()), PROMPTS)[1].float()
    assert (close - expected).norm() / expected.norm() < 0.03


def test_int8_of_bitsandbytes_is_read_exactly(tmp_path: Path) -> None:
    model = saved_by_transformers(tmp_path, load_in_8bit=True)
    loaded = load(tmp_path / "packed", Int8Mixed())
    layers = loaded.model.model.layers
    assert loaded.quantized_layers == 11
    for ours, theirs in zip(layers, model.model.layers, strict=True):
        attention = theirs.self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        packed = ours.self_attn.qkv_proj
        assert isinstance(packed, Int8MixedLinear)
        assert torch.equal(packed.weight, torch.cat([part.weight.data for part in parts]))
        assert torch.equal(packed.maxima, torch.cat([part.weight.SCB for part in parts]))
    expected = run(load(tmp_path / "plain", Plain("float32")), PROMPTS)[1]
    out = run(loaded, PROMPTS)[1].float()
    assert (out - expected).norm() / expected.norm() < 0.05


def test_a_fused_layer_of_two_block_sizes_is_refused() -> None:
    method = NF4("float32")
    functional, parts = method.library.functional, []
    for size in (64, 128):
        codes, state = functional.quantize_4bit(
            torch.randn(32, 128), blocksize=size, quant_type="nf4"
        )
        parts.append(
            {"weight": codes} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
        )
    # without quant_method, as once written
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    reader = stored_format(settings, method)
    assert reader.linear(StoredLayer(parts[:1], [32], 128, None))(torch.ones(1, 128)).shape == (
        1,
        32,
    )
    with pytest.raises(BadInput, match="different block sizes"):
        reader.linear(StoredLayer(parts, [32, 32], 128, None))
    with pytest.raises(BadInput, match=r"NF4 weights \[32, 128\].*\[32, 64\]"):
        reader.linear(StoredLayer(parts[:1], [32], 64, None))
