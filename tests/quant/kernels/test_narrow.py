"""Triton's products of activations in 8 bits: in the interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.kernels.device import BuildContext
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8, int8_group_linear
from minivllm.quant.kernels.narrow import NarrowLinear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KNOBS: dict[str, Any] = {"activations": "int8", "kernel": "triton"}
METHODS = {
    "int8": lambda dtype: Int8(dtype, **KNOBS),
    "int8-token": lambda dtype: Int8(dtype, activation_group_size=0, **KNOBS),
    "int4": lambda dtype: Int4(dtype, **KNOBS),
    "int4-symmetric": lambda dtype: Int4(dtype, group_size=32, symmetric=True, **KNOBS),
}


def layer_of(name: str, weight: Tensor, bias: Tensor | None = None) -> NarrowLinear:
    dtype = str(weight.dtype).removeprefix("torch.")
    method = METHODS[name](dtype).within(BuildContext(DEVICE))
    layer = method.pack(weight, bias)
    assert isinstance(layer, NarrowLinear)
    return layer


def stored(layer: NarrowLinear) -> Tensor:
    """The weight [out, in] that the layer's bytes stand for, in float64."""
    codes = layer.codes
    if codes.dtype is torch.uint8:
        codes = torch.stack((codes >> 4, codes & 15), -1).flatten(1).double() - 8
    groups = layer.inputs // layer.group
    per = [
        torch.zeros((), device=DEVICE, dtype=torch.float64)
        if t is None
        else t.double()[:, None]
        if t.dim() == 1
        else t.double().t().repeat_interleave(layer.inputs // groups, 1)
        for t in (layer.scales, layer.zeros)
    ]
    return codes.double() * per[0] + per[1]


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations as they are multiplied, float64."""
    groups = x.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # not a reciprocal, times 127
    return ((groups * inverse).round() * (largest / 127)).double().flatten(1)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_products_are_those_of_rounded_activations(name: str, dtype: torch.dtype) -> None:
    bias = random(70, dtype=dtype, seed=1)
    layer = layer_of(name, random(70, 256, dtype=dtype), bias)
    weight = stored(layer)
    for rows in (1, 17, 65):
        x = random(rows, 256, dtype=dtype, seed=rows)
        exact = rounded(x, layer.group) @ weight.t() + bias.double()
        error = (layer(x).double() - exact).abs().max()
        assert float(error) <= max(torch.finfo(dtype).eps, 1e-6) * float(exact.abs().max())


@pytest.mark.parametrize("name", METHODS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    layer = layer_of(name, random(64, 256))
    x = random(70, 256, seed=2)
    x[7] *= 1000
    whole = layer(x)
    for begin, end in ((0, 1), (60, 70), (5, 27)):
        assert torch.equal(layer(x[begin:end]), whole[begin:end])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(value: float) -> None:
    layer = layer_of("int8", random(64, 256))
    x = random(3, 256, seed=3)
    x[1, 200] = value
    x[2] = 0
    out = layer(x)
    assert not out[1].isfinite().any() and out[0].isfinite().all() and not out[2].any()


def test_int8_in_groups() -> None:
    """GGUF's Q8_0."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (64, 128), generator=generator, dtype=torch.int8).to(DEVICE)
    scale = random(64, 4, seed=1)
    method = Int8(**KNOBS).within(BuildContext(DEVICE))
    layer = int8_group_linear(weight, scale, None, method)
    assert isinstance(layer, NarrowLinear)
    x = random(5, 128, seed=2)
    exact = rounded(x, 32) @ stored(layer).t()
    assert float((layer(x).double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
