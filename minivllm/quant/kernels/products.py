"""Products of few rows with weights that are read as they are stored: in 16 bits, int8, NF4 and int4.

At few rows a product costs the time to read its weight. So a program reads a tile of the weight once, widens it in
registers and multiplies it with all rows at once. Inputs are cut into so many parts that programs fill the GPU, as a
weight has few rows of output; how many depends on the weight alone, so a row's result does not depend on the number
of rows beside it (but for the width of the tile, 8 to 64 rows). The parts are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.common import INTERPRETED, dot, narrow
from minivllm.quant.kernels.lookup import LEVELS, STRETCH, count, look_up

MOST_ROWS = 64  # beyond, converting the weight once and multiplying in 16 bits costs less
_WARPS = 2048  # about 16 for each processor of a large GPU
_BLOCK_N = 64  # outputs of a program
_BLOCK_K = 128  # inputs of a step
_FOUR_BIT_BLOCK_K = 64  # NF4's smallest block of weights with a scale of its own; int4's may have half of it
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Numbers that change with the step: one compiled for each that is 1 or a multiple of 16 would be compiled while serving.
_VARYING = ["rows", "steps"]


@triton.jit
def _store(partial, acc, rows, outputs, m, n):
    """Each part of the inputs has its own place: partial is float32 [parts, rows, outputs]."""
    at = (tl.program_id(1).to(tl.int64) * rows + m[:, None]) * outputs + n[None, :]
    tl.store(partial + at, acc, mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def _whole(
    x,  # [rows, inputs]
    weight,  # int8, or of the dtype of x: [outputs, inputs]
    partial,
    rows,
    outputs,
    inputs,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of outputs, `steps` steps of inputs a program; the weight without its scales."""
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    row = weight + n[None, :].to(tl.int64) * inputs
    for step in range(0, steps):
        k = (tl.program_id(1) * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < inputs
        a = tl.load(
            x + m[:, None] * inputs + k[None, :], mask=(m < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(row + k[:, None], mask=inside[:, None] & (n < outputs)[None, :], other=0)
        if b.dtype == tl.int8:
            b = narrow(b.to(tl.float32), dtype)
        acc = dot(a, b, acc)
    _store(partial, acc, rows, outputs, m, n)


@triton.jit(do_not_specialize=_VARYING)
def _four_bits(
    pairs,  # [rows, inputs / 2]: two inputs, of `dtype`, as one integer
    codes,  # uint8 [outputs, inputs / 2], the first of two inputs in the high half
    levels,  # float32 [16], not if AFFINE
    scales,  # float32 [outputs * inputs / GROUP]; uint8 if NESTED; scales and zeros [inputs / GROUP, outputs, 2] if AFFINE
    nested_levels,  # float32 [256]
    nested_scales,  # float32 [scales / NESTED]
    offset,  # float32 [1]
    partial,
    rows,
    outputs,
    inputs,
    steps,
    dtype: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """NF4 in bitsandbytes' layout, and AFFINE int4 in the same.

    Even and odd inputs are two products, so that half bytes need not be interleaved; a step lies within one block of
    the weight, so its scales multiply sums. The weight is the left factor: the tensor cores take that one from
    registers, and 8 rows at a time of the right.
    """
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    BITS: tl.constexpr = dtype.primitive_bitwidth
    word: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    half = inputs // 2
    row, there = n.to(tl.int64), n < outputs
    begin = tl.program_id(1) * steps
    for step in range(begin, tl.minimum(begin + steps, inputs // BLOCK_K)):
        j = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        group = step * BLOCK_K // GROUP
        if AFFINE:
            block = (group * outputs + row) * 2
            scale = tl.load(scales + block, mask=there, other=0.0).to(tl.float32)
        else:
            block = row * (inputs // GROUP) + group
            if NESTED:
                code = tl.load(scales + block, mask=there, other=0).to(tl.int32)
                scale = tl.load(nested_scales + block // NESTED, mask=there, other=0.0)
                scale = tl.load(nested_levels + code) * scale + tl.load(offset)
            else:
                scale = tl.load(scales + block, mask=there, other=0.0)
        packed = tl.load(codes + row[:, None] * half + j[None, :], mask=there[:, None], other=0)
        if AFFINE:
            even, odd = count(packed, dtype)
        else:
            even, odd = look_up(packed, levels, dtype)
        pair = tl.load(pairs + m[None, :] * half + j[:, None], mask=(m < rows)[None, :], other=0)
        first = pair.to(word).to(dtype, bitcast=True)
        second = (pair >> BITS).to(word).to(dtype, bitcast=True)
        part = dot(even, first, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        acc += dot(odd, second, part) * scale[:, None]
        if AFFINE:
            zero = tl.load(scales + block + 1, mask=there, other=0.0).to(tl.float32)
            acc += zero[:, None] * tl.sum(first.to(tl.float32) + second.to(tl.float32), 0)[None, :]
    if not AFFINE:
        acc *= 1 / STRETCH
    _store(partial, tl.trans(acc), rows, outputs, m, n)


@triton.jit(do_not_specialize=["size", "parts"])  # else the order would depend on the rows
def _add(
    partial,
    scale,
    bias,
    out,
    size,
    outputs,
    parts,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts, in an order that depends on their number alone; then scale and bias of each output.

    All are fetched at once: one after the other would cost the time to fetch for each.
    """
    i, part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PARTS)
    inside = i < size
    there = (part < parts)[:, None] & inside[None, :]
    total = tl.sum(tl.load(partial + part[:, None] * size + i[None, :], mask=there, other=0.0), 0)
    dtype: tl.constexpr = out.dtype.element_ty
    if SCALED:
        total *= tl.load(scale + i % outputs, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        total += tl.load(bias + i % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, narrow(total, dtype), mask=inside)


class _Launch:
    """The cut of one product: rows a tile, parts of the inputs, and where their results go."""

    def __init__(
        self, x: Tensor, outputs: int, block_k: int = _BLOCK_K, warps: int = 4, least_rows: int = 16
    ) -> None:
        self.rows, inputs = x.shape
        self.outputs, self.device, self.dtype = outputs, x.device, x.dtype
        self.block_m = max(least_rows, triton.next_power_of_2(self.rows))
        tiles, steps = triton.cdiv(outputs, _BLOCK_N), triton.cdiv(inputs, block_k)
        wanted = 3 if INTERPRETED else max(1, _WARPS // warps // tiles)
        each = triton.cdiv(steps, min(wanted, steps))  # steps of a part
        self.grid = (tiles, triton.cdiv(steps, each))
        self.partial = torch.empty(self.grid[1], self.rows, outputs, dtype=torch.float32, device=x.device)
        # What every kernel takes after its weight: partial, rows, outputs, inputs, steps.
        self.arguments = (self.partial, self.rows, outputs, inputs, each)

    def add(self, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """The product: [rows, outputs] in the dtype of x."""
        out = torch.empty(self.rows, self.outputs, dtype=self.dtype, device=self.device)
        size = out.numel()
        _add[(triton.cdiv(size, 256),)](
            self.partial,
            out if scale is None else scale,
            out if bias is None else bias,
            out,
            size,
            self.outputs,
            self.grid[1],
            SCALED=scale is not None,
            BIASED=bias is not None,
            PARTS=triton.next_power_of_2(self.grid[1]),
            BLOCK=256,
        )
        return out


def whole_product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x W^T) * scale + bias for a weight of a number each.

    Args:
        x: [rows, inputs], at most 64 rows; weight: int8, or of the dtype of x: [outputs, inputs].
        scale, bias: [outputs] or None.

    Returns:
        [rows, outputs] in the dtype of x.
    """
    cut = _Launch(x, weight.shape[0])
    _whole[cut.grid](
        x.contiguous(),
        weight,
        *cut.arguments,
        BLOCK_M=cut.block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_stages=3,
    )
    return cut.add(scale, bias)


def takes_nf4(state: Any) -> bool:
    """Whether a weight's rows are whole blocks, its blocks whole steps, and its levels those that registers hold.

    Args:
        state: bitsandbytes' QuantState of the weight.
    """
    whole = state.shape[1] % state.blocksize == 0 and state.blocksize % _FOUR_BIT_BLOCK_K == 0
    return whole and torch.equal(state.code.cpu(), torch.tensor(LEVELS))


def nf4_product(
    x: Tensor,
    codes: Tensor,
    shape: tuple[int, int],
    group: int,
    levels: Tensor,
    scales: Tensor,
    nested: tuple[Tensor, Tensor, Tensor, int] | None,
    bias: Tensor | None,
) -> Tensor:
    """x W^T + bias for a weight as bitsandbytes stores it.

    Args:
        x: [rows, inputs], at most 64 rows.
        codes: uint8, `shape[0] * shape[1] / 2` of them; shape: outputs and inputs, inputs a multiple of the group.
        group: consecutive inputs that share a scale; levels: float32 [16].
        scales: one a group: float32, or uint8 with double quantisation.
        nested: with double quantisation the 256 levels of the scales, the scales of each `n` of them, their mean [1],
            and n.
        bias: [outputs] or None.

    Returns:
        [rows, outputs] in the dtype of x.
    """
    nested_levels, nested_scales, offset, count = nested or (levels, levels, levels, 0)
    tables = (levels, scales, nested_levels, nested_scales, offset)
    return _four_bit_product(x, codes, shape[0], tables, bias, AFFINE=False, GROUP=group, NESTED=count)


def int4_product(x: Tensor, codes: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """x W^T for w = (q - 8) * scale + zero.

    Args:
        x: [rows, inputs], at most 64 rows, inputs a multiple of the group.
        codes: uint8 [outputs, inputs / 2], the first of two inputs in the high half.
        group: consecutive inputs that share a scale, a multiple of 32; scales_and_zeros: [inputs / group, outputs, 2].

    Returns:
        [rows, outputs] in the dtype of x.
    """
    tables = (scales_and_zeros,) * 5  # NF4's are not looked at
    return _four_bit_product(x, codes, codes.shape[0], tables, None, AFFINE=True, GROUP=group, NESTED=0)


def _four_bit_product(
    x: Tensor, codes: Tensor, outputs: int, tables: tuple[Tensor, ...], bias: Tensor | None, **form: int
) -> Tensor:
    block_k = min(_FOUR_BIT_BLOCK_K, form["GROUP"])
    cut = _Launch(x, outputs, block_k, warps=2, least_rows=8)
    # Two warps are too few for Hopper's wider products, which would gain nothing here; 64 rows need more registers.
    _four_bits[cut.grid](
        x.contiguous().view(torch.int32 if x.itemsize == 2 else torch.int64),
        codes,
        *tables,
        *cut.arguments,
        dtype=_DTYPES[x.dtype],
        BLOCK_M=cut.block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        num_warps=2 if cut.block_m <= 32 else 4,
        num_stages=4,
        **form,
    )
    return cut.add(None, bias)
