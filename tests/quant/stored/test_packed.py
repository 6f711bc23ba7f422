"""Further layouts of quantised checkpoints: each means the weights that its library's own formula
gives."""

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
from minivllm.quant.base import StoredLayer
from minivllm.quant.fp8 import FP8
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.plain import Plain
from minivllm.quant.stored.base import stored_format
from tests.models.test_parity import PROMPTS, run
from tests.quant.stored.test_base import GPTQ, load, saved_by_transformers, v2_tensors
from tests.reference import make_checkpoint

GROUP = 32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
# as stored, and the float32 weight [rows, columns] that it means
Layer = tuple[dict[str, Tensor], Tensor]


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, m * bits / 32] of codes [n, m], the first in the lowest bits."""
    per = 32 // bits
    shifted = codes.long().unflatten(-1, (-1, per)) << (torch.arange(per) * bits)
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def integers(
    rows: int, columns: int, bits: int, group: int, seed: int, symmetric: bool
) -> tuple[Tensor, ...]:
    """Codes [rows, columns], zero points and float16 scales [rows, groups]; and the weight."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // group
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    zeros = torch.full((rows, groups), 1 << (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, (rows, groups), generator=generator)
    scales = ((torch.rand(rows, groups, generator=generator) + 0.5) * 2 ** (1 - bits)).half()
    weight = (codes - zeros.repeat_interleave(group, 1)).float() * scales.float().repeat_interleave(
        group, 1
    )
    return codes, zeros, scales, weight


def gptq8(
    rows: int, columns: int, seed: int, group: int, symmetric: bool = True, less: int = 1
) -> Layer:
    codes, zeros, scales, weight = integers(rows, columns, 8, group, seed, symmetric)
    return {
        "qweight": words(codes, 8).t().contiguous(),
        "qzeros": words((zeros.t() - less) & 255, 8),
        "scales": scales.t().contiguous(),
    }, weight


def packed_int(rows: int, columns: int, seed: int, bits: int, group: int, symmetric: bool) -> Layer:
    codes, zeros, scales, weight = integers(rows, columns, bits, group, seed, symmetric)
    stored = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        stored["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    return stored, weight


def plain_int8(rows: int, columns: int, seed: int) -> Layer:
    codes, _, scales, weight = integers(rows, columns, 8, columns, seed, True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, weight


def floats(
    rows: int, columns: int, seed: int, name: str, block: tuple[int, int] | None, shared: bool
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    if block is not None:
        scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) * 0.1
        each = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[
            :, :columns
        ]
    else:
        scale = each = torch.rand(1 if shared else rows, 1, generator=generator) * 0.1
    return {"weight": weight, name: scale.reshape(()) if shared else scale}, weight.float() * each


def compressed(
    bits: int, strategy: str, kind: str = "int", format: str = "pack-quantized"
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    weights |= {"group_size": GROUP} if strategy == "group" else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


def without_order(layer: Layer, columns: int) -> Layer:
    """The layer with the -1 that compressed-tensors writes where activations have no order."""
    pieces, weight = layer
    return pieces | {"weight_g_idx": torch.full((columns,), -1, dtype=torch.int32)}, weight


GPTQ8 = GPTQ | {"bits": 8, "group_size": -1, "sym": True}
BLOCK = (48, 40)
CASES: dict[str, tuple[dict[str, Any], Any, Callable[[int, int, int], Layer]]] = {
    "gptq 8, by channel": (GPTQ8, Int8("float32"), lambda r, c, s: gptq8(r, c, s, c)),
    "gptq 8, as v2": (GPTQ8, Int8("float32"), lambda r, c, s: gptq8(r, c, s, c, less=0)),
    "gptq 8, in groups": (
        GPTQ8 | {"group_size": GROUP, "sym": False},
        Plain("float32"),
        lambda r, c, s: gptq8(r, c, s, GROUP, symmetric=False),
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [*BLOCK]},
        FP8("float32"),
        lambda r, c, s: floats(r, c, s, "weight_scale_inv", BLOCK, False),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        FP8("float32"),
        lambda r, c, s: floats(r, c, s, "weight_scale_inv", None, True),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        FP8("float32"),
        lambda r, c, s: floats(r, c, s, "weight_scale", None, False),
    ),
    "compressed fp8": (
        compressed(8, "channel", "float", "float-quantized"),
        FP8("float32"),
        lambda r, c, s: floats(r, c, s, "weight_scale", None, False),
    ),
    "compressed int4": (
        compressed(4, "group"),
        Int4("float32"),
        lambda r, c, s: packed_int(r, c, s, 4, GROUP, True),
    ),
    "compressed int4, without an order of activations": (
        compressed(4, "group"),
        Int4("float32"),
        lambda r, c, s: without_order(packed_int(r, c, s, 4, GROUP, True), c),
    ),
    "compressed int4, by channel, asymmetric": (
        compressed(4, "channel"),
        Int4("float32"),
        lambda r, c, s: packed_int(r, c, s, 4, c, False),
    ),
    "compressed int8": (
        compressed(8, "channel", format="int-quantized"),
        Int8("float32"),
        plain_int8,
    ),
    "compressed int8, packed in groups": (
        compressed(8, "group"),
        Plain("float32"),
        lambda r, c, s: packed_int(r, c, s, 8, GROUP, False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_computes_what_its_weights_mean(case: str, tmp_path: Path) -> None:
    settings, quant, make = CASES[case]
    make_checkpoint(tmp_path / "plain", dtype=torch.float32, **SIZES)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    stored = dict(tensors)
    for seed, name in enumerate(sorted(n for n in tensors if "_proj.weight" in n)):
        pieces, tensors[name] = make(*tensors[name].shape, seed)
        del stored[name]
        stored |= {name.removesuffix("weight") + part: value for part, value in pieces.items()}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings})
    )
    for place, values in (("plain", tensors), ("packed", stored)):
        save_file(
            {n: t.contiguous() for n, t in values.items()}, tmp_path / place / "model.safetensors"
        )
    loaded = load(tmp_path / "packed", quant)
    expected = run(load(tmp_path / "plain", Plain("float32")), PROMPTS)[1]
    torch.testing.assert_close(run(loaded, PROMPTS)[1], expected, atol=2e-4, rtol=1e-4)
    assert loaded.quantized_layers == 12
    assert ("converted to" in loaded.warnings[-1]) == isinstance(quant, Plain)


def test_fp4_of_bitsandbytes_is_converted(tmp_path: Path) -> None:
    model = saved_by_transformers(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="fp4")
    tensors = {n: t.float() for n, t in load_file(tmp_path / "plain" / "model.safetensors").items()}
    from bitsandbytes import functional

    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            state = module.weight.quant_state
            state.dtype = torch.float32
            tensors[f"{name}.weight"] = functional.dequantize_4bit(module.weight.data, state)
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    expected = run(load(tmp_path / "plain", Plain("float32")), PROMPTS)[1]
    out = run(load(tmp_path / "packed", Plain("float32")), PROMPTS)[1]
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=1e-4)


def test_a_label_that_zero_points_contradict_is_not_believed() -> None:
    """`sym: true` leaves the middle alone, so a file labelled as the first format may turn out to
    be of the second."""
    codes, scales = torch.randint(0, 16, (16, 64)), torch.ones(2, 16).half()
    groups = torch.arange(64) // GROUP
    expected = (codes - 8).float()
    for label in ("gptq", "gptq_v2"):
        settings = GPTQ | {"sym": True, "checkpoint_format": label}
        for stored in (7, 8):
            part = v2_tensors(codes, torch.full((2, 16), stored), scales, groups)
            packed: Any = stored_format(settings, Int4("float32")).linear(
                StoredLayer([part], [16], 64, None)
            )
            assert torch.equal(packed.transposed(0, 64)[:, :16].t(), expected)
        part = v2_tensors(codes, torch.full((2, 16), 3), scales, groups)
        with pytest.raises(BadInput, match=r"sym: true, but zero points are \[3\]"):
            stored_format(settings, Int4("float32")).linear(StoredLayer([part], [16], 64, None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPTQ8 | {"group_size": "x"}, "group_size='x' must be a whole number"),
        (GPTQ | {"bits": 3}, "bits=3"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "no config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "no config_groups"),
        (
            compressed(4, "group", format="marlin-24"),
            "int4 by group, not packed, which is not read",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_settings_that_mean_nothing_are_one_line(settings: dict[str, Any], message: str) -> None:
    quant: Any = FP8() if settings["quant_method"] == "fp8" else Int4()
    with pytest.raises(BadInput, match=message):
        stored_format(settings, quant)
