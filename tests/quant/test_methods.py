"""Each method's error against the float weight, its bytes, and its edges."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant import fp8, int4
from minivllm.quant.base import DTYPES
from minivllm.quant.fp8 import FP8
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.kernels import int4 as kernels
from minivllm.quant.kernels.int4 import Int4Linear
from minivllm.quant.nf4 import NF4, NF4CPULinear, quantize, single_scales
from minivllm.quant.plain import Plain

# Relative error of a product with normal weights. int8: half a step of max/127 where max is about
# 3.3 standard deviations, 0.75 %, and twice that where activations are rounded too; e4m3 has 3 bits
# after the leading one, 2.7 %; NF4 is about 9 %, and so are 16 even levels between the ends of 32
# weights, 10 % those of 128.
ERRORS = {
    "plain": 0.004,
    "int8": 0.010,
    "int8_mixed": 0.016,
    "fp8": 0.030,
    "nf4": 0.11,
    "int4": 0.125,
}
RATIOS = {"plain": 1.0, "int8": 0.55, "int8_mixed": 0.55, "fp8": 0.55, "nf4": 0.30, "int4": 0.27}
SHAPES = [(96, 128), (320, 256), (40, 64), (33, 70), (1, 16)]  # with and without a kernel that fits
METHODS = {
    "plain": Plain,
    "int8": Int8,
    "int8_mixed": Int8Mixed,
    "fp8": FP8,
    "nf4": NF4,
    "int4": Int4,
}


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (
        torch.empty(rows, columns).normal_(generator=torch.Generator().manual_seed(seed)).to(dtype)
    )


def relative_error(packed: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    with torch.inference_mode():
        out = packed(x)
    assert out.shape == expected.shape
    assert out.dtype == x.dtype and out.is_contiguous()
    return float((out.double() - expected).norm() / expected.norm())


def stored(packed: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*packed.parameters(), *packed.buffers()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_errors_stay_within_the_method_s_bounds(name: str, dtype: str) -> None:
    method = METHODS[name](dtype)
    for rows, columns in SHAPES:
        weight, bias = (
            matrix(rows, columns, method.dtype) * 0.02,
            matrix(1, rows, method.dtype, 1)[0],
        )
        packed = method.pack(weight.clone(), bias)
        # below and above the thresholds at which a method changes its way
        for count in (1, 3, 9, 50):
            error = relative_error(packed, weight, bias, matrix(count, columns, method.dtype, 2))
            assert error < ERRORS[name] * (2 if columns < 64 else 1), (rows, columns, count)


EXTREMES = {
    **METHODS,
    "int4, symmetric": partial(Int4, symmetric=True),
    "nf4, nested": partial(NF4, double_quant=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_small_large_and_zero_weights_keep_their_values(name: str, dtype: str) -> None:
    method = EXTREMES[name](dtype=dtype)
    narrow = dtype == "float16" or name == "int8_mixed"  # which sums in float16
    for size in (1e-5, 1e-4, 1.0, 1e3) if narrow else (1e-30, 1e-7, 1e-5, 1e3, 1e30):
        weight = matrix(96, 128, torch.float32) * size
        weight[5] = 0
        x = matrix(4, 128, torch.float32, 2) * ((1e3 if size < 1 else 1e-2) if narrow else 1 / size)
        weight = weight.to(method.dtype)
        given = weight.clone()
        packed = method.pack(weight, None)
        assert torch.equal(weight, given), "an embedding may share it"
        error = relative_error(packed, weight, None, x.to(method.dtype))
        assert error < 1.3 * ERRORS[name.split(",")[0]], size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_a_weight_that_is_not_finite_spoils_its_own_output_alone(name: str, dtype: str) -> None:
    """So that logits which are not finite are found, and no other value takes its place."""
    method = EXTREMES[name](dtype=dtype)
    for bad in (math.nan, math.inf, -math.inf):
        weight = matrix(96, 128, method.dtype)
        weight[7, 70] = bad
        packed = method.pack(weight, None)
        for count in (1, 4, 50):
            with torch.inference_mode():
                finite = packed(matrix(count, 128, method.dtype, 3)).isfinite().all(0)
            assert (~finite).nonzero().flatten().tolist() == [7], (bad, count)


def test_scales_whose_sum_overflows_have_a_mean() -> None:
    weight = matrix(96, 128, torch.float32) * 1e37
    weight[:48] = 3e38
    out = NF4("float32", double_quant=True).pack(weight, None)(torch.eye(128) * 1e-30)
    assert out.isfinite().all()


def test_a_stored_code_of_no_number_spoils_its_output() -> None:
    weight = matrix(8, 32, torch.float32).to(torch.float8_e4m3fn)
    for row, code in ((3, 0x7F), (4, 0xFF)):
        weight.view(torch.uint8)[row, 5] = code
    for dtype in (torch.bfloat16, torch.float32):
        for layer in (
            fp8.FP8Linear(weight.clone(), torch.ones(8), None, dtype),
            fp8.FP8BlockLinear(weight.clone(), torch.ones(8, 2), 16, None),
        ):
            with torch.inference_mode():
                finite = layer(matrix(2, 32, dtype)).isfinite().all(0)
            assert (~finite).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_sums_are_no_larger_on_the_way_than_in_the_end(name: str, dtype: str) -> None:
    """float16 ends at 65,504, and 4,096 codes of 127 add up to more."""
    packed = METHODS[name](dtype).pack(torch.full((64, 4096), 0.02, dtype=DTYPES[dtype]), None)
    for rows in (1, 9, 65, 300):
        out = packed(torch.ones(rows, 4096, dtype=DTYPES[dtype]))
        torch.testing.assert_close(out.float(), torch.full((rows, 64), 81.92), rtol=0.03, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_packing_does_not_write_to_the_weight(name: str, dtype: str) -> None:
    """It may be the embedding's."""
    weight = matrix(64, 128, DTYPES[dtype])
    METHODS[name](dtype).pack(weight, None)
    assert torch.equal(weight, matrix(64, 128, DTYPES[dtype]))


@pytest.mark.parametrize("name", METHODS)
def test_bytes_of_the_packed_layer(name: str) -> None:
    packed = METHODS[name]().pack(matrix(1024, 1024, torch.bfloat16), None)
    assert stored(packed) / (2 * 1024 * 1024) <= RATIOS[name]
    assert not any(p.requires_grad for p in packed.parameters())


def test_double_quantisation_saves_bytes_where_the_layout_allows() -> None:
    weight = matrix(512, 512, torch.float32)
    double, single = (
        stored(NF4("float32", double_quant=flag).pack(weight, None)) for flag in (True, False)
    )
    assert 512 * 512 // 2 < double < single


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("block_size", [64, 128, 256, 512, 1024, 2048, 4096])
def test_every_block_size_of_nf4(block_size: int, double: bool) -> None:
    """The codes are bitsandbytes' own; both ways of multiplying stay near them; fewer bytes cost
    more error."""
    method = NF4(block_size=block_size, double_quant=double)
    weight = matrix(64, 4096, torch.bfloat16)
    codes, state = quantize(method.library, weight, block_size, double)
    expected, wanted_state = method.library.functional.quantize_4bit(
        weight, blocksize=block_size, compress_statistics=double, quant_type="nf4"
    )
    assert torch.equal(codes, expected)
    assert torch.equal(state.absmax, wanted_state.absmax)
    packed = method.pack(weight, None)
    # 256 values of the map, and one scale
    assert stored(packed) <= 64 * 4096 * (0.5 + 4 / block_size) + 1100
    exact = method.library.functional.dequantize_4bit(codes, state).double()
    for rows in (1, 50):
        x = matrix(rows, 4096, torch.bfloat16, 1)
        assert relative_error(packed, exact, None, x) < 0.006
        assert (
            relative_error(packed, weight, None, x) < 0.09 + 0.011 * (block_size // 64).bit_length()
        )


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("block_size", [128, 512, 4096])
@pytest.mark.parametrize("shape", [(64, 320), (33, 70), (7, 50)])
def test_nf4_blocks_that_begin_within_a_row(
    shape: tuple[int, int], block_size: int, double: bool
) -> None:
    """The product is that of every code's level times its own block's scale."""
    method = NF4("float32", block_size=block_size, double_quant=double)
    weight, x = matrix(*shape, torch.float32), matrix(5, shape[1], torch.float32, 1)
    codes, state = quantize(method.library, weight, block_size, double)
    scales = single_scales(method.library.functional, state).repeat_interleave(block_size)[
        : weight.numel()
    ]
    levels = state.code[torch.stack((codes >> 4, codes & 15), -1).view(-1)[: weight.numel()].long()]
    meant = (levels * scales).view(shape)
    assert relative_error(method.pack(weight, None), meant, None, x) < 1e-6
    assert relative_error(method.pack(weight, None), weight, None, x) < 0.16


def test_larger_groups_of_int4_cost_fewer_bytes_and_more_error() -> None:
    weight, x = matrix(256, 512, torch.bfloat16), matrix(8, 512, torch.bfloat16, 1)
    packed = {size: Int4(group_size=size).pack(weight, None) for size in int4.GROUP_SIZES}
    errors = [relative_error(layer, weight, None, x) for layer in packed.values()]
    assert errors == sorted(errors)
    for size, layer in packed.items():
        assert stored(layer) == 256 * 512 * (0.5 + 4 / size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_keeps_weights_that_lie_on_its_grid(dtype: str) -> None:
    """Sixteen even levels come back as they were, with a zero point far from zero."""
    levels = torch.arange(16.0).repeat(5, 8)[:, torch.randperm(128)] * 0.5 + 3
    packed = Int4(dtype).pack(levels.to(DTYPES[dtype]), None)
    assert isinstance(packed, Int4Linear)
    assert torch.equal(packed.transposed(0, 64)[:, :5].t().float(), levels)


def test_the_int4_layout_is_torch_s_own() -> None:
    layout = kernels.layout_for(torch.device("cpu"), torch.bfloat16)
    if not layout.kernel_rows:
        pytest.skip("needs a CPU with AVX2 or AVX-512")
    codes = torch.randint(0, 16, (192, 96), dtype=torch.uint8)
    packed = layout.pack(codes)
    expected = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(packed.view(192, 48), expected)
    assert torch.equal(layout.unpack(packed, 64, 192).t(), codes[64:])


@pytest.mark.parametrize("columns", [96, 192, 256])
def test_the_tensor_core_layout_is_undone_whatever_its_order(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: a conversion with the shapes of torch's, tiles of 8 rows and 16 n inputs, in an
    order of its own."""

    def convert(pairs: Tensor, inner: int) -> Tensor:
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1)
        tiles = codes.view(codes.shape[0] // 8, 8, -1, 16 * inner).transpose(1, 2).flatten(2)
        order = torch.randperm(tiles.shape[-1], generator=torch.Generator().manual_seed(0))
        low, high = tiles[..., order].unflatten(-1, (-1, 2)).unbind(-1)
        return (low | (high << 4)).view(torch.int32).unflatten(-1, (32, inner // 2))

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", convert)
    layout, codes = kernels.TensorCore(), torch.randint(0, 16, (192, columns), dtype=torch.uint8)
    packed = layout.pack(codes)
    assert torch.equal(layout.unpack(packed, 0, 192).t(), codes)
    assert torch.equal(layout.unpack(packed, 64, 128).t(), codes[64:128])


def test_bytes_widen_to_the_values_of_float8() -> None:
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    expected = values.to(torch.bfloat16)
    finite = ~expected.isnan()
    assert torch.equal(fp8._widened(values.view(torch.int8))[finite], expected[finite])


def test_outlier_columns_are_kept_by_int8_mixed() -> None:
    """What LLM.int8 is for: one large column would otherwise take all of the int8 range."""
    weight, x = matrix(64, 128, torch.float16) * 0.02, matrix(8, 128, torch.float16, 1)
    x[:, 7] *= 100
    mixed, uniform = (
        relative_error(
            Int8Mixed("float16", threshold=threshold).pack(weight, None), weight, None, x
        )
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
    expected = x.double() @ weight.double().t()
    with torch.inference_mode():
        error = ((packed(x).double() - expected).norm(dim=0) / expected.norm(dim=0)).max()
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
@given(
    rows=st.integers(1, 80), blocks=st.integers(1, 4), double=st.booleans(), seed=st.integers(0, 99)
)
def test_the_codes_are_bitsandbytes_own(rows: int, blocks: int, double: bool, seed: int) -> None:
    method = NF4()
    functional = method.library.functional
    weight = matrix(rows, 64 * blocks, torch.bfloat16, seed)
    codes, state = quantize(method.library, weight, 64, double)
    expected, wanted_state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=double, quant_type="nf4"
    )
    assert torch.equal(codes, expected)
    assert torch.equal(state.absmax, wanted_state.absmax)
    assert torch.equal(
        functional.dequantize_4bit(codes, state), functional.dequantize_4bit(expected, wanted_state)
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
    layout, _ = method.library.functional._convert_weight_packed_for_cpu(codes, state)
    assert torch.equal(packed.codes, layout)


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_dtype_is_bad_input(name: str) -> None:
    with pytest.raises(BadInput, match=r"quant\.dtype='int4'.*bfloat16 or float16 or float32"):
        METHODS[name]("int4")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NF4(block_size=100), "block_size=100.*64"),
        (lambda: Int4(group_size=100), "group_size=100.*32 or 64 or 128 or 256"),
        (lambda: Int8Mixed(threshold=-1.0), "threshold=-1.0"),
        (lambda: Int8(skip="down_proj"), "skip='down_proj' must be a list"),
        (lambda: Int8(skip=[""]), "skip"),
    ],
)
def test_bad_knobs_are_bad_input(make: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_a_missing_bitsandbytes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BadInput, match=r"quant=nf4 needs bitsandbytes.*pip install"):
        NF4()


def test_skip_lists_know_fused_names_and_the_head() -> None:
    for cls in (Int8, Int8Mixed, FP8, NF4, Int4):
        method = cls(skip=["down_proj", "layers.0."], lm_head=True)
        names = ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj", "lm_head"]
        assert all(map(method.quantizes, names))
        assert not method.quantizes("model.layers.1.mlp.down_proj")
        assert not method.quantizes("model.layers.0.self_attn.qkv_proj")
        assert not cls().quantizes("lm_head")
        assert not cls(skip=["lm_head"], lm_head=True).quantizes("lm_head")
