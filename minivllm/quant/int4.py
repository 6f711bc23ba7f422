"""int4: affine, group-wise; activations in 16 bits or in 8. Unlike in NF4, the 16 levels are evenly
spaced.

Each group of consecutive inputs of an output channel has a scale and a zero point: w = (q - 8) *
scale + zero, q in 0..15, round-to-nearest between the group's smallest and largest weight. The
symmetric form, that of GGUF's Q4_0, has no zeros: the code of the largest magnitude is 0. torch's
packed kernels compute this form (tinygemm on CUDA), and AWQ (Lin et al. 2023) and GPTQ (Frantar et
al. 2022) checkpoints are converted to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import get_args

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.kernels.cpu.linear import Format, PanelLinear
from minivllm.platform.options import type_hints
from minivllm.quant.activations import IntegerQuantizer
from minivllm.quant.base import as_scale
from minivllm.quant.kernels.common import SLICE
from minivllm.quant.kernels.int4 import ROWS, Int4Linear, Piece
from minivllm.quant.options import Int4Options

GROUP_SIZES: tuple[int, ...] = get_args(type_hints(Int4Options)["group_size"])
_FROM_ZERO = {Format.INT4: Format.UINT4, Format.INT4_QUADS: Format.UINT4_QUADS}
_CHUNK = 256 * 1024  # weights quantised at once on a CPU, whose cache holds the float32 temporaries


class Int4(IntegerQuantizer, Int4Options):
    """Weights in four bits, with a scale and a zero point for each group of inputs."""

    name = "int4"

    forms = Format.INT4, Format.INT4_QUADS

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        chunk = _CHUNK if weight.device.type == "cpu" else SLICE
        step = max(ROWS, chunk // weight.shape[1] // ROWS * ROWS)
        make = quantize_symmetric if self.symmetric else quantize
        pieces = (make(part, self.group_size) for part in weight.split(step))
        shape = (weight.shape[0], weight.shape[1])
        return int4_linear(pieces, shape, self.group_size, bias, self)


def int4_linear(
    pieces: Iterable[Piece],
    shape: tuple[int, int],
    group_size: int,
    bias: Tensor | None,
    method: Int4,
    order: Tensor | None = None,
    middle: int = 8,
) -> nn.Module:
    """The layer for the arguments of Int4Linear: a PanelLinear where the C++ kernels support the
    weight and it needs no padding.

    Args:
        middle: the code whose value is the zero: 8, or 0 where `method.panels` has C++ kernels.

    Raises:
        BadInput: activations have 8 bits, and no kernel multiplies them.
    """
    pieces = iter(pieces)
    first = next(pieces)
    if order is not None and method.narrow:
        raise BadInput(
            "quant.activations=int8: no kernel has groups of inputs that are not consecutive "
            "(desc_act); use quant.activations=none"
        )
    panels = None if order is not None else method.panels(first[0].device, shape[1], group_size)
    pieces = itertools.chain([first], pieces)
    if panels is None and method.narrow:
        codes, scales, zeros = _joined(pieces)
        return method.narrow_linear(codes, scales, zeros, bias, group_size)
    if panels is None:
        return Int4Linear(pieces, shape, group_size, bias, order, method.kernel)
    form = panels.form if middle else _FROM_ZERO[panels.form]
    packed = [(panels.kernels.pack(codes, form), scales, zeros) for codes, scales, zeros in pieces]
    codes, scales, zeros = _joined(packed)
    return PanelLinear(panels.kernels, form, [codes], shape, bias, scales, zeros, group_size)


def _joined(pieces: Iterable[Piece]) -> Piece:
    """All outputs in one piece."""
    codes, scales, zeros = zip(*pieces, strict=True)
    return (
        torch.cat(codes),
        torch.cat(scales, 1),
        None if zeros[0] is None else torch.cat(zeros, 1),
    )


def quantize_symmetric(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, None]:
    """Round to the nearest of 16 multiples, -8 to 7, of a group's scale, which makes the weight of
    the largest magnitude -8. Arguments and results are those of `quantize`, without zeros."""
    groups = _padded(weight, group_size).unflatten(1, (-1, group_size)).float()
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = as_scale(largest.abs() / 8, weight.dtype)
    scale = torch.where(largest > 0, -scale, scale)
    codes = (groups / scale.float()).add_(8).round_().clamp_(0, 15)
    return codes.flatten(1).to(torch.uint8), scale.squeeze(-1).t(), None


def _padded(weight: Tensor, group_size: int) -> Tensor:
    """The weight with its last column repeated up to whole groups."""
    missing = -weight.shape[1] % group_size
    return torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1) if missing else weight


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of the 16 levels between each group's smallest and largest weight.

    Args:
        weight: [rows, columns] in the compute dtype.
        group_size: columns that share a scale; the last group is filled up with the last column.

    Returns:
        Codes uint8 [rows, columns rounded up], scales and zeros [groups, rows] in the weight's
        dtype.
    """
    groups = _padded(weight, group_size).unflatten(1, (-1, group_size)).float()
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Rounded to the compute dtype first, so that codes account for the rounding of scales.
    scale = as_scale((high - low) / 15, weight.dtype)
    zero = (low + 8 * scale.float()).to(weight.dtype)
    codes = (groups - zero.float()).div_(scale.float()).add_(8).round_().clamp_(0, 15)
    return codes.flatten(1).to(torch.uint8), scale.squeeze(-1).t(), zero.squeeze(-1).t()
