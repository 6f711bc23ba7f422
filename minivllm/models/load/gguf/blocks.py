"""The values of GGUF's blocks, equal in float32 to those of ggml and of its `gguf` package.

Each function takes uint8 [blocks, bytes of a block] and returns float32 [blocks, values]. Products
are rounded where ggml rounds them, so nothing here may be fused or reordered. The layouts are those
of ggml's `ggml-common.h` (https://github.com/ggml-org/ggml)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.models.load.gguf.formats import BY_NAME, BY_PACKAGE, QUANTIZED
from minivllm.quant.iq4_nl import LEVELS

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Twice the values of a float of two exponent bits and one mantissa bit.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantized(raw: Tensor, form: str) -> Tensor:
    """The values of consecutive blocks.

    Args:
        raw: uint8 [bytes], contiguous.
        form: name of the format, one of formats.READ.

    Returns:
        [values], float32; of FLOATS a view in their own dtype.
    """
    if form in _FLOATS:
        return raw.view(_FLOATS[form])
    if form in BY_PACKAGE:
        return _by_package(raw, form)
    return _CONVERTERS[form](raw.view(-1, BY_NAME[form].bytes)).flatten()


def _by_package(raw: Tensor, form: str) -> Tensor:
    import gguf  # an extra
    import numpy as np

    with np.errstate(all="ignore"):  # of any bytes
        values = gguf.dequantize(raw.cpu().numpy()[None], gguf.GGMLQuantizationType[form])
    return torch.from_numpy(values).flatten().to(raw.device)


def split_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 [blocks, 32] and the float16 scale [blocks, 1] of w = q * scale."""
    return blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2])


def split_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 [blocks, 32], 0..15, and the float16 scale [blocks, 1] of
    w = (q - 8) * scale."""
    return _nibbles(blocks[:, 2:], 16), _halves(blocks[:, :2])


def split_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes uint8 [blocks, 32], 0..15, the float16 scale [blocks, 1] and the float16 minimum
    [blocks, 1] of w = q * scale + minimum."""
    scale, minimum = _halves(blocks[:, :4]).split(1, 1)
    return _nibbles(blocks[:, 4:], 16), scale, minimum


def split_iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 [blocks, 32], 0..15, and the float16 scale [blocks, 1] of
    w = LEVELS[q] * scale."""
    return split_q4_0(blocks)


def _halves(raw: Tensor) -> Tensor:
    """float16 of the bytes of a column or two, which may lie anywhere in their row."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Codes 0..15: of each `run` bytes the low halves, then the high ones."""
    runs = raw.unflatten(1, (-1, run))
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _fields(raw: Tensor, bits: int, run: int) -> Tensor:
    """Codes of one or two bits: of each `run` bytes the lowest bits, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device)[:, None]
    return (raw.unflatten(1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(1)


def _looked_up(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """The level of each code, float32."""
    table = torch.tensor(levels, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _q8_0(blocks: Tensor) -> Tensor:
    codes, scale = split_q8_0(blocks)
    return codes.float() * scale.float()


def _q4_0(blocks: Tensor) -> Tensor:
    codes, scale = split_q4_0(blocks)
    return scale.float() * (codes.view(torch.int8) - 8).float()


def _q4_1(blocks: Tensor) -> Tensor:
    codes, scale, minimum = split_q4_1(blocks)
    return scale.float() * codes.float() + minimum.float()


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _of_five_bits(blocks[:, 2:]).view(torch.int8) - 16
    return _halves(blocks[:, :2]).float() * codes.float()


def _q5_1(blocks: Tensor) -> Tensor:
    scale, minimum = _halves(blocks[:, :4]).float().split(1, 1)
    return scale * _of_five_bits(blocks[:, 4:]).float() + minimum


def _of_five_bits(raw: Tensor) -> Tensor:
    """The 32 codes of a block whose fifth bits lie before the others, that of value i in bit i."""
    return _nibbles(raw[:, 4:], 16) | _fields(raw[:, :4], 1, 1) << 4


def _q2_k(blocks: Tensor) -> Tensor:
    both, codes, factors = blocks.split((16, 64, 4), 1)
    factor, least = _halves(factors).float().split(1, 1)
    scales = (factor * (both & 15).float())[..., None]
    minima = (least * (both >> 4).float())[..., None]
    groups = _fields(codes, 2, 32).float().unflatten(1, (16, 16))
    return (scales * groups - minima).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, scales, factor = blocks.split((32, 64, 12, 2), 1)
    codes = (_fields(low, 2, 32) | _fields(high, 1, 32) << 2).view(torch.int8) - 4
    # Six bits: four in the halves of the first eight bytes, two in the last four.
    of_groups = _nibbles(scales[:, :8], 8) | _fields(scales[:, 8:], 2, 4) << 4
    by_group = _halves(factor).float() * (of_groups.view(torch.int8) - 32).float()
    return (by_group[..., None] * codes.float().unflatten(1, (16, 16))).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The factors and minima of the eight groups of 32 values, float32 [blocks, 8, 1], of w = code
    * factor - minimum.

    Both have six bits: those of the first four groups in the low bits of bytes of their own, those
    of the others in the halves of further bytes and the two bits that are left."""
    factor, least = _halves(blocks[:, :4]).float().split(1, 1)
    first, second, rest = blocks[:, 4:16].split(4, 1)
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), 1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), 1)
    return (factor * scales.float())[..., None], (least * minima.float())[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    codes = _nibbles(blocks[:, 16:], 32).unflatten(1, (8, 32))
    return (scales * codes.float() - minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    high = _fields(blocks[:, 16:48], 1, 32)  # of group g in bit g
    codes = (_nibbles(blocks[:, 48:], 32) | high << 4).unflatten(1, (8, 32))
    return (scales * codes.float() - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, factor = blocks.split((128, 64, 16, 2), 1)
    # Both in two halves of 128 values: of each 64 bytes of low bits, of each 32 of high ones.
    codes = (_nibbles(low, 64) | _fields(high, 2, 32) << 4).view(torch.int8) - 32
    by_group = (_halves(factor).float() * scales.contiguous().view(torch.int8).float())[..., None]
    return (by_group * codes.float().unflatten(1, (16, 16))).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    codes, scale = split_iq4_nl(blocks)
    return scale.float() * _looked_up(codes, LEVELS)


def _iq4_xs(blocks: Tensor) -> Tensor:
    factor, high, low, codes = blocks.split((2, 2, 4, 128), 1)
    scales = (_nibbles(low, 1) | _fields(high, 2, 1) << 4).view(torch.int8) - 32
    by_group = (_halves(factor).float() * scales.float())[..., None]
    levels = _looked_up(_nibbles(codes, 16), LEVELS)
    return (by_group * levels.unflatten(1, (8, 32))).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    """Five digits of base 3 a byte, the first from its upper bits; four in each of the last
    four."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)[:, None]
    first, second, last, factor = blocks[:, None].split((32, 16, 4, 2), 2)
    parts = (first * powers, second * powers, last * powers[:4])  # without what is above a byte
    digits = torch.cat([part.flatten(1) for part in parts], 1)
    codes = (digits.short() * 3 >> 8) - 1
    return _halves(factor[:, 0]).float() * codes.float()


def _tq2_0(blocks: Tensor) -> Tensor:
    codes = _fields(blocks[:, :64], 2, 32).view(torch.int8) - 1
    return _halves(blocks[:, 64:]).float() * codes.float()


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is half of a power of two, whose exponent is the first byte."""
    power = blocks[:, :1].int()
    bits = torch.where(power < 2, 0x200000 << power.clamp(max=1), (power - 1) << 23)
    return bits.view(torch.float32) * _looked_up(_nibbles(blocks[:, 1:], 16), _E2M1)


def _nvfp4(blocks: Tensor) -> Tensor:
    """The four scales are halves of floats with four exponent and three mantissa bits."""
    raw = blocks[:, :4].int()
    power, fraction = raw >> 3 & 15, raw & 7
    normal = (power + 119 << 23 | fraction << 20).view(torch.float32)
    scales = torch.where(power == 0, fraction.float() * 2.0**-10, normal)
    scales = torch.where(raw == 0x7F, 0.0, scales)[..., None]
    levels = _looked_up(_nibbles(blocks[:, 4:], 8), _E2M1)
    return (scales * levels.unflatten(1, (4, 16))).flatten(1)


_CONVERTERS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(
        QUANTIZED,
        (
            *(_q4_0, _q4_1, _q5_0, _q5_1, _q8_0, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k),
            *(_iq4_nl, _iq4_xs, _tq1_0, _tq2_0, _mxfp4, _nvfp4),
        ),
        strict=True,
    )
)
