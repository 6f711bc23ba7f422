"""Weight-only int4: affine, group-wise. Unlike in NF4, the 16 levels are evenly spaced.

Each group of consecutive inputs of an output channel has a scale and a zero point: w = (q - 8) *
scale + zero, q in 0..15, round-to-nearest between the group's smallest and largest weight. torch's
packed kernels compute this form (tinygemm on CUDA), and AWQ (Lin et al. 2023) and GPTQ (Frantar et
al. 2022) checkpoints are converted to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import get_args

import torch
from torch import Tensor, nn

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, PanelLinear, panels_for
from minivllm.platform.options import type_hints
from minivllm.quant.base import Quantizer
from minivllm.quant.kernels.common import SLICE
from minivllm.quant.kernels.int4 import ROWS, Int4Linear
from minivllm.quant.options import Int4Options

GROUP_SIZES: tuple[int, ...] = get_args(type_hints(Int4Options)["group_size"])
_CHUNK = 256 * 1024  # weights quantised at once on a CPU, whose cache holds the float32 temporaries


class Int4(Quantizer, Int4Options):  # type: ignore[misc]  # see Method.dtype
    """Weights in four bits, with a scale and a zero point for each group of inputs."""

    name = "int4"

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See QuantMethod."""
        chunk = _CHUNK if weight.device.type == "cpu" else SLICE
        step = max(ROWS, chunk // weight.shape[1] // ROWS * ROWS)
        pieces = (quantize(part, self.group_size) for part in weight.split(step))
        shape = (weight.shape[0], weight.shape[1])
        return int4_linear(pieces, shape, self.group_size, bias, None, self.kernel, self.kernels)


def int4_linear(
    pieces: Iterable[tuple[Tensor, Tensor, Tensor]],
    shape: tuple[int, int],
    group_size: int,
    bias: Tensor | None,
    order: Tensor | None = None,
    kernel: str = "auto",
    kernels: Kernels | None = None,
) -> nn.Module:
    """The layer for the arguments of Int4Linear: a PanelLinear where the C++ kernels support the
    weight and it needs no padding."""
    pieces = iter(pieces)
    first = next(pieces)
    device, dtype = first[0].device, first[1].dtype
    kernels = (
        panels_for(kernels, device, dtype, shape[1], group_size, kernel) if order is None else None
    )
    pieces = itertools.chain([first], pieces)
    if kernels is None:
        return Int4Linear(pieces, shape, group_size, bias, order, kernel)
    packed = [(kernels.pack(codes, Format.INT4), scales, zeros) for codes, scales, zeros in pieces]
    codes, scales, zeros = zip(*packed, strict=True)
    return PanelLinear(
        kernels,
        Format.INT4,
        codes,
        shape,
        bias,
        torch.cat(scales, 1),
        torch.cat(zeros, 1),
        group_size,
    )


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of the 16 levels between each group's smallest and largest weight.

    Args:
        weight: [rows, columns] in the compute dtype.
        group_size: columns that share a scale; the last group is filled up with the last column.

    Returns:
        Codes uint8 [rows, columns rounded up], scales and zeros [groups, rows] in the weight's
        dtype.
    """
    missing = -weight.shape[1] % group_size
    if missing:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1)
    groups = weight.unflatten(1, (-1, group_size)).float()
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Rounded to the compute dtype first, so that codes account for the rounding of scales.
    scale = ((high - low) / 15).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    zero = (low + 8 * scale.float()).to(weight.dtype)
    codes = (groups - zero.float()).div_(scale.float()).add_(8).round_().clamp_(0, 15)
    return codes.flatten(1).to(torch.uint8), scale.squeeze(-1).t(), zero.squeeze(-1).t()
