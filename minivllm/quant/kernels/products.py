"""Products of few rows with weights that are read as they are stored: in 16 bits, int8, NF4 and int4.

At few rows a product costs the time to read its weight. So a program reads a tile of the weight once, widens it in
registers and multiplies it with all rows at once. Inputs are cut into so many parts that programs fill the GPU, as a
weight has few rows of output; how many depends on the weight alone, so a row's result does not depend on the number
of rows beside it (but for the width of the tile, 8 to 64 rows). The parts are added in their order: of few rows by the
program of a tile that ends last, which saves a launch, of more by a kernel, which has more programs to do it.
"""

from __future__ import annotations

import functools
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
_TILES = _WARPS // 2 // 2  # the most that are cut into parts: programs of two warps, two of them for a tile
# Parts that are fetched at once: one after the other would cost the time to fetch for each.
_TOGETHER = tl.constexpr(16)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Numbers that change with the step: one compiled for each that is 1 or a multiple of 16 would be compiled while serving.
_VARYING = ["rows", "steps"]


@triton.jit
def _finish(
    total,
    scale,
    bias,
    out,
    rows,
    outputs,
    m,
    n,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Scale and bias of each output, in float32, to their place in out [rows, outputs]."""
    total *= FACTOR
    if SCALED:
        total *= tl.load(scale + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * outputs + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts(
    partial,
    scale,
    bias,
    out,
    rows,
    outputs,
    parts,
    m,
    n,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Add the parts one after the other, whatever the layout of the tile; then finish it."""
    total = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    at = partial + m[:, None].to(tl.int64) * outputs + n[None, :]
    left = tl.where((m < rows)[:, None] & (n < outputs)[None, :], parts, 0)
    size = rows.to(tl.int64) * outputs
    for first in tl.range(0, parts, _TOGETHER, num_stages=1):
        fetched = ()
        for i in tl.static_range(_TOGETHER):
            # Past the first cache, which other processors' stores do not reach.
            value = tl.load(at, mask=left > first + i, other=0.0, cache_modifier=".cg")
            fetched += (value,)  # type: ignore[assignment]
            at += size
        for i in tl.static_range(_TOGETHER):
            total += fetched[i]
    _finish(total, scale, bias, out, rows, outputs, m, n, SCALED, BIASED, FACTOR)


@triton.jit
def _end(
    acc,
    partial,
    counters,
    scale,
    bias,
    out,
    rows,
    outputs,
    m,
    n,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTED: tl.constexpr,
    ADDING: tl.constexpr,
):
    """What a program does with its sums [BLOCK_M, BLOCK_N]: they are the product, or a part of it.

    Each part has its own place in partial, float32 [parts, rows, outputs]. Where ADDING is not 0, the program of a tile
    that comes last adds them, so many rows at a time. Its threads see what all the others stored: each program's
    stores come before its barrier, that before its step of the counter, which one thread makes and which releases and
    acquires at the scope of the GPU, and the last program's step before its next barrier, after which threads load.
    No loop goes over the rows: within one, the compiler takes registers away from the loop over the inputs.
    """
    if not PARTED:
        _finish(acc, scale, bias, out, rows, outputs, m, n, SCALED, BIASED, FACTOR)
    else:
        at = (tl.program_id(1).to(tl.int64) * rows + m[:, None]) * outputs + n[None, :]
        tl.store(partial + at, acc, mask=(m < rows)[:, None] & (n < outputs)[None, :])
        if ADDING:
            counter, parts = counters + tl.program_id(0), tl.num_programs(1)
            tl.debug_barrier()
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if before == parts - 1:
                tl.store(counter, 0)  # for the next product, which begins when this one has ended
                for first in tl.static_range(0, m.shape[0], ADDING):
                    if first < rows:
                        few = first + tl.arange(0, ADDING)
                        _add_parts(
                            partial, scale, bias, out, rows, outputs, parts, few, n, SCALED, BIASED, FACTOR
                        )


@triton.jit(do_not_specialize=_VARYING)
def _whole(
    x,  # [rows, inputs]
    weight,  # int8, or of the dtype of x: [outputs, inputs]
    partial,
    counters,
    scale,
    bias,
    out,
    rows,
    outputs,
    inputs,
    steps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTED: tl.constexpr,
    ADDING: tl.constexpr,
):
    """One tile of outputs, `steps` steps of inputs a program."""
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
    _end(
        acc, partial, counters, scale, bias, out, rows, outputs, m, n, SCALED, BIASED, FACTOR, PARTED, ADDING
    )


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
    counters,
    scale,
    bias,
    out,
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
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    PARTED: tl.constexpr,
    ADDING: tl.constexpr,
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
            step_scale = tl.load(scales + block, mask=there, other=0.0).to(tl.float32)
        else:
            block = row * (inputs // GROUP) + group
            if NESTED:
                code = tl.load(scales + block, mask=there, other=0).to(tl.int32)
                step_scale = tl.load(nested_scales + block // NESTED, mask=there, other=0.0)
                step_scale = tl.load(nested_levels + code) * step_scale + tl.load(offset)
            else:
                step_scale = tl.load(scales + block, mask=there, other=0.0)
        packed = tl.load(codes + row[:, None] * half + j[None, :], mask=there[:, None], other=0)
        if AFFINE:
            even, odd = count(packed, dtype)
        else:
            even, odd = look_up(packed, levels, dtype)
        pair = tl.load(pairs + m[None, :] * half + j[:, None], mask=(m < rows)[None, :], other=0)
        first = pair.to(word).to(dtype, bitcast=True)
        second = (pair >> BITS).to(word).to(dtype, bitcast=True)
        part = dot(even, first, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
        acc += dot(odd, second, part) * step_scale[:, None]
        if AFFINE:
            zero = tl.load(scales + block + 1, mask=there, other=0.0).to(tl.float32)
            acc += zero[:, None] * tl.sum(first.to(tl.float32) + second.to(tl.float32), 0)[None, :]
    _end(
        tl.trans(acc),
        partial,
        counters,
        scale,
        bias,
        out,
        rows,
        outputs,
        m,
        n,
        SCALED,
        BIASED,
        FACTOR,
        PARTED,
        ADDING,
    )


@triton.jit(do_not_specialize=["rows"])
def _add(
    partial,
    scale,
    bias,
    out,
    rows,
    outputs,
    parts,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The parts of all tiles, BLOCK_M rows a program."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    _add_parts(partial, scale, bias, out, rows, outputs, parts, m, n, SCALED, BIASED, FACTOR)


@functools.cache
def _kept_counters(device: torch.device) -> Tensor:
    return torch.zeros(_TILES, dtype=torch.int32, device=device)


def _counters(device: torch.device) -> Tensor:
    """How many programs of each tile have stored their part: int32, all zero before and after a product.

    A device has one for all products, since they follow each other in one stream. It is never freed, as captured graphs
    have its address, and comes with the first product, which is never a captured one. A product that fails midway on a
    GPU takes everything on it with it; the interpreter can be stopped, so there it is made anew.
    """
    return torch.zeros(_TILES, dtype=torch.int32) if INTERPRETED else _kept_counters(device)


class _Cut:
    """How one product is cut: rows a tile, parts of the inputs; and where the results go.

    Args:
        x: [rows, inputs].
        outputs: rows of the weight.
        scale, bias: [outputs] or None.
        factor: of all sums.
        warps: of a program with `least_rows` rows, the fewest that it computes.
    """

    def __init__(
        self,
        x: Tensor,
        outputs: int,
        scale: Tensor | None,
        bias: Tensor | None,
        factor: float = 1.0,
        block_k: int = _BLOCK_K,
        warps: int = 4,
        least_rows: int = 16,
    ) -> None:
        rows, inputs = x.shape
        self.block_m = max(least_rows, triton.next_power_of_2(rows))
        self.few = warps  # rows whose parts are added at once: two numbers a thread; with more, fewer are fetched at once
        tiles, steps = triton.cdiv(outputs, _BLOCK_N), triton.cdiv(inputs, block_k)
        wanted = max(1, _WARPS // warps // tiles)
        if INTERPRETED:
            wanted = min(wanted, 3)  # a program costs time, and none run beside it
        each = triton.cdiv(steps, min(wanted, steps))  # steps of a part
        self.grid = (tiles, triton.cdiv(steps, each))
        parts = self.grid[1]
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        # What is not looked at has some tensor in its place.
        self.partial = self.counters = out
        if parts > 1:
            self.partial = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
            self.counters = _counters(x.device)
        self.scale, self.bias, self.out = out if scale is None else scale, out if bias is None else bias, out
        self.rows, self.outputs, self.inputs, self.each = rows, outputs, inputs, each
        self.form = {"SCALED": scale is not None, "BIASED": bias is not None, "FACTOR": factor}
        # A program has time for few rows only: many are added sooner by many programs.
        self.later = parts > 1 and self.block_m > least_rows

    def run(self, kernel: Any, *arguments: Tensor, **options: Any) -> Tensor:
        """The product, [rows, outputs] in the dtype of x, by a kernel that takes x, the weight and so on first."""
        ends = (self.scale, self.bias, self.out, self.rows, self.outputs)
        kernel[self.grid](
            *arguments,
            self.partial,
            self.counters,
            *ends,
            self.inputs,
            self.each,
            BLOCK_M=self.block_m,
            BLOCK_N=_BLOCK_N,
            PARTED=self.grid[1] > 1,
            ADDING=0 if self.later or self.grid[1] == 1 else self.few,
            **self.form,
            **options,
        )
        if self.later:
            _add[(self.grid[0], triton.cdiv(self.rows, self.few))](
                self.partial,
                *ends,
                self.grid[1],
                BLOCK_M=self.few,
                BLOCK_N=_BLOCK_N,
                num_warps=self.few,
                **self.form,
            )
        return self.out


def whole_product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x W^T) * scale + bias for a weight of a number each.

    Args:
        x: [rows, inputs], at most 64 rows; weight: int8, or of the dtype of x: [outputs, inputs].
        scale, bias: [outputs] or None.

    Returns:
        [rows, outputs] in the dtype of x.
    """
    cut = _Cut(x, weight.shape[0], scale, bias)
    return cut.run(_whole, x.contiguous(), weight, BLOCK_K=_BLOCK_K, num_stages=3)


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
    factor = 1.0 if form["AFFINE"] else 1 / STRETCH.value
    cut = _Cut(x, outputs, None, bias, factor, block_k, warps=2, least_rows=8)
    return cut.run(
        _four_bits,
        x.contiguous().view(torch.int32 if x.itemsize == 2 else torch.int64),
        codes,
        *tables,
        dtype=_DTYPES[x.dtype],
        BLOCK_K=block_k,
        # Two warps are too few for Hopper's wider products, which would gain nothing here; 64 rows need more registers.
        num_warps=2 if cut.block_m <= 32 else 4,
        num_stages=4,
        **form,
    )
