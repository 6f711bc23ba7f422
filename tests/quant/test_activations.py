"""Activations in 8 bits against the same arithmetic in float64: errors, bits in any batch,
extremes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8, int8_group_linear, int8_linear

CPU = torch.device("cpu")


def narrow(method: Any, kernels: Kernels) -> Any:
    """The method with activations in 8 bits, on the kernels."""
    return replace(method, dtype="bfloat16", activations="int8").within(BuildContext(CPU, kernels))


METHODS = {
    "int8": Int8(),
    "int8-token": Int8(activation_group_size=0),
    "int8-32": Int8(activation_group_size=32),
    "int4": Int4(),
    "int4-32": Int4(group_size=32),
    "int4-256": Int4(group_size=256),
    "int4-symmetric": Int4(group_size=32, symmetric=True),
}


def group_of(method: Any, inputs: int) -> int:
    """Inputs of a token that share a scale."""
    size = method.group_size if isinstance(method, Int4) else method.activation_group_size
    return size or inputs


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations as they are multiplied, float64."""
    groups = x.float().unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # not a reciprocal, times 127
    return ((groups * inverse).round() * (largest / 127)).double().flatten(1)


def stored(layer: nn.Module, inputs: int) -> Tensor:
    """The weight that a layer multiplies with, float64 [in, out]: activations of one and zeros are
    exact in 8 bits."""
    return layer(torch.eye(inputs, dtype=torch.bfloat16)).double()


def weight_of(outputs: int, inputs: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(outputs, inputs).bfloat16()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 1024), (17, 768)])
def test_products_are_those_of_rounded_activations(
    panels: Kernels, name: str, outputs: int, inputs: int
) -> None:
    """The error is at most twice that of multiplying the same numbers in bfloat16."""
    method = METHODS[name]
    layer = narrow(method, panels).pack(weight_of(outputs, inputs), None)
    assert isinstance(layer, PanelLinear) and layer.matrix_dtype == "int8"
    weight = stored(layer, inputs)
    for rows in (1, 2, 5, 6, 7, 20, 33, 300):
        x = torch.randn(rows, inputs).bfloat16()
        exact = rounded(x, group_of(method, inputs)) @ weight
        plain = (x.float() @ weight.float()).bfloat16().double()
        out = layer(x)
        # what a weight's scale and zero lose where `stored` rounds their sum
        slack = 2.0**-9 * float(exact.abs().max())
        limit = float(((x.double() @ weight) - plain).abs().max())
        assert float((out.double() - exact).abs().max()) <= 2 * limit + slack


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_those_of_the_method(panels: Kernels, name: str) -> None:
    method, weight = METHODS[name], weight_of(130, 512)
    wide = method.within(BuildContext(CPU, panels)).pack(weight.clone(), None)
    both = [
        stored(layer, 512) for layer in (wide, narrow(method, panels).pack(weight.clone(), None))
    ]
    torch.testing.assert_close(*both, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_row_has_the_same_bits_in_any_batch(panels: Kernels, name: str) -> None:
    bias = torch.randn(96).bfloat16()
    layer = narrow(METHODS[name], panels).pack(weight_of(96, 1536), bias)
    x = torch.randn(300, 1536).bfloat16()
    x[7] *= 1000
    whole = layer(x)
    pieces = ((0, 1), (299, 300), (5, 12), (190, 240), *((n, 2 * n) for n in range(2, 14)))
    for begin, end in pieces:
        assert torch.equal(layer(x[begin:end]), whole[begin:end])


def test_extremes_neither_saturate_nor_wrap(panels: Kernels) -> None:
    """All of 127 and -128 in one sum, at every sign; four bits at both ends."""
    inputs = 4096
    signs = torch.tensor([[1], [-1]]).repeat(32, inputs).to(torch.int8)
    integers = torch.cat((signs * 127, torch.full((64, inputs), -128, dtype=torch.int8)))
    method = narrow(Int8(activation_group_size=0), panels)
    layer = int8_linear(integers, torch.ones(128).bfloat16(), None, method)
    x = torch.stack((torch.ones(inputs), -torch.ones(inputs), torch.ones(inputs))).bfloat16()
    x[2, ::2] = -1
    exact = x.double() @ integers.double().t()
    for rows in (x, x.repeat(20, 1)):
        torch.testing.assert_close(layer(rows).double()[:3], exact, rtol=2**-8, atol=0.0)
    ends = torch.tensor([0.0, 15.0]).repeat(64, inputs // 2).bfloat16()
    four = narrow(Int4(), panels).pack(ends, None)
    torch.testing.assert_close(four(x).double(), x.double() @ ends.double().t(), rtol=2**-7, atol=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_finite(panels: Kernels, value: float) -> None:
    layer = narrow(Int8(), panels).pack(weight_of(64, 256), None)
    x = torch.randn(3, 256).bfloat16()
    x[1, 200] = value
    out = layer(x)
    assert not out[1].isfinite().any() and out[0].isfinite().all() and out[2].isfinite().all()


def test_zeros_and_the_smallest_numbers(panels: Kernels) -> None:
    bias = torch.randn(64).bfloat16()
    layer = narrow(Int4(), panels).pack(weight_of(64, 256), bias)
    x = torch.zeros(2, 256).bfloat16()
    x[1] = 1e-40
    torch.testing.assert_close(layer(x), bias.expand(2, 64))


@pytest.mark.parametrize(("outputs", "group"), [(70, 32), (64, 128)])
def test_int8_in_groups(panels: Kernels, outputs: int, group: int) -> None:
    """GGUF's Q8_0 has groups of 32; -128 is a weight like others."""
    weight = torch.randint(-128, 128, (outputs, 512), dtype=torch.int8)
    scale = torch.rand(outputs, 512 // group).add(0.5).bfloat16()
    layer = int8_group_linear(weight, scale, None, narrow(Int8(), panels))
    dense = weight.double() * scale.double().repeat_interleave(group, 1)
    x = torch.randn(40, 512).bfloat16()
    exact = rounded(x, group) @ dense.t()
    assert float((layer(x).double() - exact).abs().max()) <= 2**-8 * float(exact.abs().max())
    assert torch.equal(layer(x)[-1:], layer(x[-1:]))


@pytest.mark.parametrize(
    ("method", "context", "message"),
    [
        (Int8(activations="int8"), BuildContext(CPU), "C\\+\\+ kernels.*runtime.cpu_kernels"),
        (Int4(activations="int8", kernel="torch"), None, "quant.kernel=torch.*kernel=auto"),
        (Int8("float32", activations="int8"), None, "quant.dtype is float32"),
        (Int8(activations="int8"), BuildContext(torch.device("meta")), "on meta"),
    ],
)
def test_what_no_kernel_multiplies_is_told_before_loading(
    panels: Kernels, method: Any, context: BuildContext | None, message: str
) -> None:
    with pytest.raises(BadInput, match=f"quant.activations=int8.*{message}"):
        method.within(context or BuildContext(CPU, panels))


def test_a_layer_that_has_no_whole_groups_is_told(panels: Kernels) -> None:
    with pytest.raises(BadInput, match=r"quant.activations=int8.*192 inputs.*128.*quant\.skip"):
        narrow(Int8(), panels).pack(weight_of(64, 192), None)


def test_symmetric_levels_are_multiples_of_a_scale(panels: Kernels) -> None:
    """The largest magnitude is exact, and there are no zeros to store."""
    weight = weight_of(64, 256)
    method = Int4(group_size=32, symmetric=True)
    layer = method.within(BuildContext(CPU, panels)).pack(weight.clone(), None)
    assert isinstance(layer, PanelLinear) and layer.zeros is None
    assert sum(t.nbytes for t in layer.parameters()) == 64 * 256 * 4.5 / 8
    groups = weight.float().unflatten(1, (-1, 32))
    restored = stored(layer, 256).t().float().unflatten(1, (-1, 32))
    at = groups.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(restored.gather(-1, at), groups.gather(-1, at), rtol=2**-7, atol=0)
    torch.testing.assert_close(
        method.pack(weight.clone(), None)(torch.eye(256).bfloat16()),
        layer(torch.eye(256).bfloat16()),
        rtol=2**-7,
        atol=1e-6,
    )
