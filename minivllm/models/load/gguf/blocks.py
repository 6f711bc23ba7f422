"""The values of GGUF's blocks, equal in float32 to those of ggml and of its `gguf` package.

Each function takes uint8 [blocks, bytes of a block] and returns float32 [blocks, values]. Products
are rounded where ggml rounds them, so nothing here may be fused or reordered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.models.load.gguf.formats import BY_NAME, QUANTIZED

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantized(raw: Tensor, form: str) -> Tensor:
    """The values of consecutive blocks.

    Args:
        raw: uint8 [bytes], contiguous.
        form: name of the format: one of FLOATS or QUANTIZED.

    Returns:
        [values], float32; of FLOATS a view in their own dtype.
    """
    if form in _FLOATS:
        return raw.view(_FLOATS[form])
    return _CONVERTERS[form](raw.view(-1, BY_NAME[form].bytes)).flatten()


def split_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 [blocks, 32] and the float16 scale [blocks, 1] of w = q * scale."""
    return blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2])


def split_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes uint8 [blocks, 32], 0..15, and the float16 scale [blocks, 1] of
    w = (q - 8) * scale."""
    return _nibbles(blocks[:, 2:], 16), _halves(blocks[:, :2])


def _halves(raw: Tensor) -> Tensor:
    """float16 of the bytes of a column or two, which may lie anywhere in their row."""
    return raw.contiguous().view(torch.float16)


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Codes 0..15: of each `run` bytes the low halves, then the high ones."""
    runs = raw.unflatten(1, (-1, run))
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    codes, scale = split_q8_0(blocks)
    return codes.float() * scale.float()


def _q4_0(blocks: Tensor) -> Tensor:
    codes, scale = split_q4_0(blocks)
    return scale.float() * (codes.view(torch.int8) - 8).float()


def _q5_0(blocks: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:6, None] >> bits & 1).flatten(1)  # of value i in bit i
    codes = (_nibbles(blocks[:, 6:], 16) | high << 4).view(torch.int8) - 16
    return _halves(blocks[:, :2]).float() * codes.float()


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
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = blocks[:, None, 16:48] >> groups & 1  # of group g in bit g
    codes = _nibbles(blocks[:, 48:], 32).unflatten(1, (8, 32)) | high << 4
    return (scales * codes.float() - minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, factor = blocks.split((128, 64, 16, 2), 1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)[:, None]
    # Both in two halves of 128 values: of each 64 bytes of low bits, of each 32 of high ones.
    top = (high.unflatten(1, (2, 1, 32)) >> shifts & 3).flatten(1)
    codes = (_nibbles(low, 64) | top << 4).view(torch.int8) - 32
    by_group = (_halves(factor).float() * scales.contiguous().view(torch.int8).float())[..., None]
    return (by_group * codes.float().unflatten(1, (16, 16))).flatten(1)


_CONVERTERS: dict[str, Callable[[Tensor], Tensor]] = dict(
    zip(QUANTIZED, (_q8_0, _q4_0, _q5_0, _q4_k, _q5_k, _q6_k), strict=True)
)
