"""The kernels of products with few rows; products.py describes how a product is cut."""

from __future__ import annotations

import triton
import triton.language as tl

from minivllm.kernels.common import dot, narrow
from minivllm.quant.kernels.lookup import count, look_up

# Parts that are fetched at once, so that their latencies overlap.
_TOGETHER = tl.constexpr(16)
# Numbers that change with the step. Triton would compile a kernel for values that are 1 or a
# multiple of 16 while requests are served.
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
    """Store each output in out [rows, outputs], after its scale and bias in float32."""
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
    """Add the parts in their order, whatever the layout of the tile, and finish the tile."""
    total = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    at = partial + m[:, None].to(tl.int64) * outputs + n[None, :]
    left = tl.where((m < rows)[:, None] & (n < outputs)[None, :], parts, 0)
    size = rows.to(tl.int64) * outputs
    for first in tl.range(0, parts, _TOGETHER, num_stages=1):
        fetched = ()
        for i in tl.static_range(_TOGETHER):
            # Not from the first-level cache, as other multiprocessors' stores do not reach it.
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
    """Store a program's sums [BLOCK_M, BLOCK_N], which are the product or a part of it.

    Each part has its own place in partial, float32 [parts, rows, outputs]. Where ADDING is not 0,
    the last program of a tile adds the parts, ADDING rows at a time. Its threads see the stores of
    all other programs: each program's stores come before its barrier; the barrier comes before its
    step of the counter, which one thread makes and which releases and acquires at the scope of the
    GPU; and the last program's step comes before its next barrier, after which threads load. No
    loop goes over the rows: within one, the compiler takes registers away from the loop over the
    inputs."""
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
                tl.store(counter, 0)  # for the next product, which begins after this one
                for first in tl.static_range(0, m.shape[0], ADDING):
                    if first < rows:
                        few = first + tl.arange(0, ADDING)
                        _add_parts(
                            partial,
                            scale,
                            bias,
                            out,
                            rows,
                            outputs,
                            parts,
                            few,
                            n,
                            SCALED,
                            BIASED,
                            FACTOR,
                        )


@triton.jit(do_not_specialize=_VARYING)
def whole(
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
    """A program computes one tile of outputs over `steps` steps of inputs."""
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    row = weight + n[None, :].to(tl.int64) * inputs
    for step in range(0, steps):
        k = (tl.program_id(1) * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < inputs
        a = tl.load(
            x + m[:, None] * inputs + k[None, :],
            mask=(m < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(row + k[:, None], mask=inside[:, None] & (n < outputs)[None, :], other=0)
        if b.dtype == tl.int8:
            b = narrow(b.to(tl.float32), dtype)
        acc = dot(a, b, acc)
    _end(
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
        SCALED,
        BIASED,
        FACTOR,
        PARTED,
        ADDING,
    )


@triton.jit(do_not_specialize=_VARYING)
def four_bits(
    pairs,  # [rows, inputs / 2]: two inputs, of `dtype`, as one integer
    codes,  # uint8 [outputs, inputs / 2], the first of two inputs in the high half
    levels,  # float32 [16], not if AFFINE
    # float32 [outputs * inputs / GROUP]; uint8 if NESTED; scales and zeros [inputs / GROUP,
    # outputs, 2] if AFFINE
    scales,
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
    """NF4 in bitsandbytes' layout, and AFFINE int4 in the same layout.

    Even and odd inputs are two products, so that half bytes need not be interleaved. A step lies
    within one block of the weight, so its scales multiply sums. The weight is the left factor: the
    tensor cores take the left factor from registers, and 8 rows at a time of the right one."""
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
def add(
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
    """A program adds the parts of BLOCK_M rows of all tiles."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    _add_parts(partial, scale, bias, out, rows, outputs, parts, m, n, SCALED, BIASED, FACTOR)
