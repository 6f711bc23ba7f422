"""Codes of four bits to 16-bit numbers, in registers: NF4's sixteen levels, and integers.

A table in memory costs a load for each weight, and a kernel bound by loads cannot afford it.
NVIDIA's byte permutation, `prmt`, selects each of four bytes from eight by three bits. By a code's
upper three bits it selects the even and the odd level of a pair, four half bytes at once, and the
code's last bit chooses; once for the lower bytes of 16-bit levels and once for the upper. An
integer needs one permutation: 0x43 before a code's byte is 128 + code in bfloat16, and 0x64 1024 +
code in float16 (Kim et al. 2022, "Who Says Elephants Can't Run",
https://arxiv.org/abs/2211.10017)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.common import INTERPRETED, narrow

# Dettmers et al. 2023, appendix E.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Multiplied by this they lose least when rounded to bfloat16: 0.0006 of the weight, 0.0011 as they
# are, and 0.0016 where each weight is rounded after its scale. The eighth, which costs nothing,
# gives both levels of a pair the same upper byte in bfloat16, but for the zero; all the others'
# have the bits of _COMMON.
STRETCH = tl.constexpr(1.437 / 8)
_COMMON = 0x3C

# Four codes, the levels' lower or upper bytes by all 16. 0xE4 takes from its first input where the
# third has ones, else from the second.
_EACH = """
prmt.b32 even, {0}, {1}, index; prmt.b32 odd, {2}, {3}, index;
lop3.b32 {target}, odd, even, last, 0xE4;
"""
# The upper bytes by pairs. The zero's pair lacks _COMMON: 0xF2 adds the third input where the
# second has zeros.
_SHARED = """
prmt.b32 high, {0}, {1}, index;
lop3.b32 high, high, last, {common:#010x}, 0xF2;
"""


def _word(numbers: list[int]) -> str:
    return f"0x{sum(number << 8 * i for i, number in enumerate(numbers)):08x}"


def program(dtype: torch.dtype) -> str:
    """PTX: four bytes in $4 to the stretched levels of their high halves, in $0 and $1, and low
    halves, in $2 and $3.

    Args:
        dtype: of the levels, 16 bits wide.
    """
    bits = (
        (torch.tensor(LEVELS, dtype=torch.float64) * STRETCH.value)
        .to(dtype)
        .view(torch.int16)
        .tolist()
    )
    low, high = ([number >> shift & 0xFF for number in bits] for shift in (0, 8))

    def each(numbers: list[int], target: str) -> str:
        fours = (numbers[:8:2], numbers[8::2], numbers[1:8:2], numbers[9::2])
        return _EACH.format(*map(_word, fours), target=target)

    if dtype is torch.bfloat16:
        high[6] &= ~_COMMON  # the zero is 7
        upper = _SHARED.format(_word(high[:8:2]), _word(high[8::2]), common=_COMMON * 0x01010101)
    else:
        upper = each(high, "high")
    # `index` is the upper three bits of each half byte; `last`, all ones or zeros, its last bit: of
    # bytes 0 to 7, picked by three bits, the odd are ones, and with its fourth bit set a half byte
    # picks the sign of the same.
    half = f"prmt.b32 last, 0xff00ff00, 0xff00ff00, codes;{each(low, 'low')}{upper}"
    return f"""{{
.reg .b32 codes, index, even, odd, last, low, high;
mov.b32 codes, $4;
shr.u32 index, $4, 1;
and.b32 index, index, 0x77777777;
{half}
prmt.b32 $0, low, high, 0x7351; prmt.b32 $2, low, high, 0x6240;
shr.u32 index, index, 16;
shr.u32 codes, codes, 16;
{half}
prmt.b32 $1, low, high, 0x7351; prmt.b32 $3, low, high, 0x6240;
}}"""


def integers(dtype: torch.dtype) -> str:
    """PTX: four bytes in $4 to code - 8 of their high halves, in $0 and $1, and low halves, in $2
    and $3; exact.

    Args:
        dtype: of the integers, 16 bits wide.
    """
    high = 0x43 if dtype is torch.bfloat16 else 0x64
    base = torch.tensor([high << 8], dtype=torch.int16).view(dtype)
    one, minus = (
        int(number.to(dtype).view(torch.int16)) & 0xFFFF
        for number in (torch.tensor(1.0), -8 - base.squeeze())
    )
    # Their difference by `fma`: bfloat16 can be subtracted from Hopper on only.
    fma = "fma.rn.bf16x2" if dtype is torch.bfloat16 else "fma.rn.f16x2"
    return f"""{{
.reg .b32 high, low, one, minus;
mov.b32 one, 0x{one * 0x10001:08x}; mov.b32 minus, 0x{minus * 0x10001:08x};
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
and.b32 low, $4, 0x0f0f0f0f;
prmt.b32 $0, high, 0x{high:02x}, 0x4140; prmt.b32 $1, high, 0x{high:02x}, 0x4342;
prmt.b32 $2, low, 0x{high:02x}, 0x4140; prmt.b32 $3, low, 0x{high:02x}, 0x4342;
{fma} $0, $0, one, minus; {fma} $1, $1, one, minus;
{fma} $2, $2, one, minus; {fma} $3, $3, one, minus;
}}"""


_BFLOAT16 = tl.constexpr(program(torch.bfloat16))
_FLOAT16 = tl.constexpr(program(torch.float16))
_BFLOAT16_INTEGERS = tl.constexpr(integers(torch.bfloat16))
_FLOAT16_INTEGERS = tl.constexpr(integers(torch.float16))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")
_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def look_up(codes, levels, dtype: tl.constexpr):
    """uint8 of two codes each to the levels, times STRETCH, of the codes in their high and in their
    low halves.

    `levels` is the table, float32, for all that is no NVIDIA GPU or has 32 bits.
    """
    if _PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16, _REGISTERS, [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif _PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _FLOAT16, _REGISTERS, [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        first = tl.load(levels + (codes >> 4).to(tl.int32)) * STRETCH
        second = tl.load(levels + (codes & 15).to(tl.int32)) * STRETCH
        return narrow(first, dtype), narrow(second, dtype)


@triton.jit
def count(codes, dtype: tl.constexpr):
    """uint8 of two codes each to code - 8 of their high and of their low halves."""
    if _PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BFLOAT16_INTEGERS,
            _REGISTERS,
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif _PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _FLOAT16_INTEGERS,
            _REGISTERS,
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        first, second = (codes >> 4).to(tl.float32) - 8.0, (codes & 15).to(tl.float32) - 8.0
        return narrow(first, dtype), narrow(second, dtype)
