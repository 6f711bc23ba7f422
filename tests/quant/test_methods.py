"""Each method's error against the float weight, its bytes, and its edges."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import DTYPES
from minivllm.quant.int8 import Int8
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.nf4 import NF4, NF4CPULinear, quantize
from minivllm.quant.plain import Plain

# Relative error of a product with normal weights. int8: half a step of max/127 where max is about 3.3 standard
# deviations, 0.75 %, and twice that where activations are rounded too; NF4 is about 9 %.
ERRORS = {"plain": 0.004, "int8": 0.010, "int8_mixed": 0.016, "nf4": 0.11}
RATIOS = {"plain": 1.0, "int8": 0.55, "int8_mixed": 0.55, "nf4": 0.30}
SHAPES = [(96, 128), (320, 256), (40, 64), (33, 70), (1, 16)]  # with and without a kernel that fits
METHODS = {"plain": Plain, "int8": Int8, "int8_mixed": Int8Mixed, "nf4": NF4}


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.empty(rows, columns).normal_(generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(packed: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    wanted = x.double() @ weight.double().t()
    if bias is not None:
        wanted += bias.double()
    with torch.inference_mode():
        out = packed(x)
    assert out.shape == wanted.shape
    assert out.dtype == x.dtype
    return float((out.double() - wanted).norm() / wanted.norm())


def stored(packed: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*packed.parameters(), *packed.buffers()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_errors_stay_within_the_method_s_bounds(name: str, dtype: str) -> None:
    method = METHODS[name](dtype)
    for rows, columns in SHAPES:
        weight, bias = matrix(rows, columns, method.dtype) * 0.02, matrix(1, rows, method.dtype, 1)[0]
        packed = method.pack(weight.clone(), bias)
        for count in (1, 3, 9, 50):  # below and above the thresholds at which a method changes its way
            error = relative_error(packed, weight, bias, matrix(count, columns, method.dtype, 2))
            assert error < ERRORS[name] * (2 if columns < 64 else 1), (rows, columns, count)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_of_the_packed_layer(name: str) -> None:
    packed = METHODS[name]().pack(matrix(1024, 1024, torch.bfloat16), None)
    assert stored(packed) / (2 * 1024 * 1024) <= RATIOS[name]
    assert not any(p.requires_grad for p in packed.parameters())


def test_double_quantisation_saves_bytes_where_the_layout_allows() -> None:
    weight = matrix(512, 512, torch.float32)
    double, single = (stored(NF4("float32", double_quant=flag).pack(weight, None)) for flag in (True, False))
    assert 512 * 512 // 2 < double < single


@pytest.mark.parametrize("block_size", [64, 256])
def test_larger_blocks_cost_fewer_bytes_and_more_error(block_size: int) -> None:
    weight, x = matrix(256, 512, torch.bfloat16), matrix(8, 512, torch.bfloat16, 1)
    packed = NF4(block_size=block_size).pack(weight.clone(), None)
    assert relative_error(packed, weight, None, x) < (0.11 if block_size == 64 else 0.14)
    assert stored(packed) <= 256 * 512 * (0.5 + 2 / block_size) + 2000


def test_outlier_columns_are_kept_by_int8_mixed() -> None:
    """What LLM.int8 is for: one large column would otherwise take all of the int8 range."""
    weight, x = matrix(64, 128, torch.float16) * 0.02, matrix(8, 128, torch.float16, 1)
    x[:, 7] *= 100
    mixed, uniform = (
        relative_error(Int8Mixed("float16", threshold=threshold).pack(weight, None), weight, None, x)
        for threshold in (6.0, 0.0)
    )
    x[:, 7] = 0  # the large column's own product hides the loss of the others
    assert mixed < 0.012
    assert uniform > mixed


def test_rows_with_outliers_and_without_are_independent_in_int8() -> None:
    weight = matrix(64, 128, torch.bfloat16)
    weight[3] *= 1000
    packed = Int8().pack(weight, None)
    x = matrix(4, 128, torch.bfloat16, 1)
    wanted = x.double() @ weight.double().t()
    with torch.inference_mode():
        error = ((packed(x).double() - wanted).norm(dim=0) / wanted.norm(dim=0)).max()
    assert error < 0.03


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_of_zeros_gives_zeros(name: str) -> None:
    packed = METHODS[name]().pack(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    with torch.inference_mode():
        for count in (1, 50):
            assert (packed(matrix(count, 64, torch.bfloat16)) == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_row_of_zeros_gives_the_bias(name: str) -> None:
    bias = matrix(1, 64, torch.bfloat16)[0]
    packed = METHODS[name]().pack(matrix(64, 64, torch.bfloat16), bias)
    with torch.inference_mode():
        out = packed(torch.zeros(3, 64, dtype=torch.bfloat16))
    torch.testing.assert_close(out, bias.expand(3, 64))


@pytest.mark.parametrize("name", METHODS)
def test_a_row_s_result_does_not_depend_on_the_number_of_rows(name: str) -> None:
    packed = METHODS[name]().pack(matrix(96, 128, torch.bfloat16), None)
    x = matrix(60, 128, torch.bfloat16, 1)
    with torch.inference_mode():
        alone, together = packed(x[:1]), packed(x)[:1]
    assert (alone - together).norm() / together.norm() < 0.02


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 80), blocks=st.integers(1, 4), double=st.booleans(), seed=st.integers(0, 99))
def test_the_codes_are_bitsandbytes_own(rows: int, blocks: int, double: bool, seed: int) -> None:
    method = NF4()
    functional = method.library.functional
    weight = matrix(rows, 64 * blocks, torch.bfloat16, seed)
    codes, state = quantize(method.library, weight, 64, double)
    wanted, wanted_state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double, quant_type="nf4"
    )
    assert torch.equal(codes, wanted)
    assert torch.equal(state.absmax, wanted_state.absmax)
    assert torch.equal(
        functional.dequantize_4bit(codes, state), functional.dequantize_4bit(wanted, wanted_state)
    )


def test_the_cpu_layout_converts_back_exactly() -> None:
    method = NF4(double_quant=False)
    weight = matrix(128, 192, torch.bfloat16)
    packed = method.pack(weight, None)
    if not isinstance(packed, NF4CPULinear):
        pytest.skip("needs a CPU with AVX512-BF16")
    codes, state = quantize(method.library, weight, 64, False)
    state.absmax = state.absmax.bfloat16().float()  # as the layout stores it
    whole = method.library.functional.dequantize_4bit(codes, state)
    assert torch.equal(packed.weight(0, 128, torch.bfloat16), whole)
    assert torch.equal(packed.weight(32, 96, torch.bfloat16), whole[32:96])


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_dtype_is_bad_input(name: str) -> None:
    with pytest.raises(BadInput, match=r"quant\.dtype='int4'.*bfloat16, float16, float32"):
        METHODS[name]("int4")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: NF4(block_size=100), "block_size=100.*64"),
        (lambda: Int8Mixed(threshold=-1.0), "threshold=-1.0"),
        (lambda: Int8(skip="down_proj"), "skip='down_proj' must be a list"),
        (lambda: Int8(skip=[""]), "skip"),
    ],
)
def test_bad_knobs_are_bad_input(make: Any, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        make()


def test_a_missing_bitsandbytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BadInput, match=r"quant=nf4 needs bitsandbytes.*pip install"):
        NF4()


def test_bitsandbytes_is_imported_only_when_needed() -> None:
    import subprocess

    code = (
        "import sys, minivllm.quant.nf4, minivllm.quant.int8_mixed, minivllm.models.loading\n"
        "from minivllm.quant.int8 import Int8; Int8()\n"
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
