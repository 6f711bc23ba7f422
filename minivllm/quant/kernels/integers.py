"""The kernels of products of activations in 8 bits; narrow.py describes how they are used."""

from __future__ import annotations

import triton
import triton.language as tl

from minivllm.kernels.common import narrow

# A number that changes with the step. Triton would compile a kernel for values that are 1 or a
# multiple of 16 while requests are served.
_VARYING = ["rows"]


@triton.jit(do_not_specialize=_VARYING)
def round_rows(
    x,
    out,  # int8 [rows, inputs]
    scales,  # float32 [rows, groups]
    sums,  # float32 [rows, groups]
    rows,
    inputs,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group of a row becomes integers times its scale; beside them the sum of what they stand
    for. A value that is not finite makes the scale NaN."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < GROUP
    at = row * inputs + group * GROUP + k
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    odd = tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 0)
    inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    # adding 1.5 * 2^23 rounds to an integer, ties to even
    whole = (tl.where(odd > 0, 0.0, value) * inverse + 12582912.0) - 12582912.0
    tl.store(out + at, whole.to(tl.int8), mask=inside)
    scale = tl.where(odd > 0, float("nan"), largest / 127.0)
    to = row * tl.num_programs(1) + group
    tl.store(scales + to, scale)
    tl.store(sums + to, scale * tl.sum(whole, 0))


@triton.jit(do_not_specialize=_VARYING)
def multiply(
    x,  # int8 [rows, inputs]
    x_scales,  # float32 [rows, groups]
    x_sums,  # float32 [rows, groups]
    codes,  # int8 [outputs, inputs], or uint8 [outputs, inputs / 2]
    scales,  # [groups, outputs], or [outputs]
    zeros,  # [groups, outputs]
    bias,  # [outputs]
    out,  # [rows, outputs]
    rows,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x W^T + bias. A group's products are added as integers, groups in float32.

    With PAIRS a byte has two codes, the first of two inputs in the high half, which stand for -8 to
    7. GROUPED: the weight has scales, and with ZEROS zeros, for each group."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)
    here, there = (m < rows)[:, None], n < outputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    groups = inputs // GROUP
    for group in range(0, groups):
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for begin in range(0, GROUP, STEP):
            k = group * GROUP + begin + tl.arange(0, STEP)
            a = tl.load(x + row * inputs + k[None, :], mask=here, other=0)
            if PAIRS:
                j = (group * GROUP + begin) // 2 + tl.arange(0, STEP // 2)
                at = codes + column[:, None] * (inputs // 2) + j[None, :]
                both = tl.load(at, mask=there[:, None], other=0)
                high, low = (both >> 4).to(tl.int8) - 8, (both & 15).to(tl.int8) - 8
                b = tl.interleave(high, low)
            else:
                at = codes + column[:, None] * inputs + k[None, :]
                b = tl.load(at, mask=there[:, None], other=0)
            part = tl.dot(a, tl.trans(b), part, out_dtype=tl.int32)
        x_scale = tl.load(x_scales + row * groups + group, mask=here, other=0.0)
        sums = part.to(tl.float32) * x_scale
        if GROUPED:
            scale = tl.load(scales + group * outputs + n, mask=there, other=0.0)
            acc += sums * scale.to(tl.float32)[None, :]
        else:
            acc += sums
        if ZEROS:
            zero = tl.load(zeros + group * outputs + n, mask=there, other=0.0)
            x_sum = tl.load(x_sums + row * groups + group, mask=here, other=0.0)
            acc += x_sum * zero.to(tl.float32)[None, :]
    if not GROUPED:
        acc *= tl.load(scales + n, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + row * outputs + column[None, :]
    tl.store(to, narrow(acc, out.dtype.element_ty), mask=here & there[None, :])
