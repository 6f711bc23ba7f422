"""How a kernel reads and writes numbers of the cache: 16 or 32 bits, int8 or fp8 bits with a scale.

The results equal those of minivllm/cache/compression.py, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

FORMATS = {"auto": 0, "int8": 1, "fp8": 2}  # by KVCache.kv_dtype
_INT8 = tl.constexpr(FORMATS["int8"])
_FP8 = tl.constexpr(FORMATS["fp8"])
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
# Adding it rounds to the nearest integer, even in the middle.
_ROUND = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def widen(bits, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Stored numbers, without their scale, in `dtype`: exact, as both formats have fewer bits than
    any dtype.

    e4m3's sign, exponent and mantissa move to their places in a float32, and a factor corrects the
    difference of the exponents' biases. So no GPU needs to support the format."""
    if FORMAT == _FP8:
        moved = (bits.to(tl.int32) << 20) & -0x78100000  # sign-extended, so that bit 11 is the sign
        return (moved.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0).to(
            dtype
        )  # 2^120
    elif FORMAT == _INT8:
        return bits.to(tl.float32).to(dtype)
    else:
        return bits


@triton.jit
def scale_of(x, FORMAT: tl.constexpr):
    """The scale of each vector: x float32 [rows, n] to [rows]."""
    if FORMAT == _FP8:
        scale = tl.div_rn(tl.max(tl.abs(x), 1), 448.0)
    else:
        scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
    return tl.maximum(scale, _TINY)


@triton.jit
def shorten(x, FORMAT: tl.constexpr):
    """x / scale, float32, rounded to what is stored: int8 bits."""
    if FORMAT == _FP8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 numbers are multiples of 2^-9; 2^14 has that as the value of its last bit.
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0.015625, small, normal)
        return tl.where(x < 0, code | 0x80, code).to(tl.int8)
    else:
        x = (x + _ROUND) - _ROUND
        return tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int8)
