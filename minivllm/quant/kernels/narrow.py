"""Products of activations in 8 bits with weights of 8 or 4 bits, by the int8 tensor cores, for any
number of rows.

One kernel rounds the rows, a group of inputs at a time; another multiplies. The order of a sum
depends on the weight alone: the number of rows changes the width of a program's tile only, so a row
has the same bits in any batch. Not parted along the inputs, products of few rows have fewer
programs than those of `products.py`."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor, nn

from minivllm.quant.base import frozen
from minivllm.quant.kernels import integers

MOST_STEP = 128  # inputs that are multiplied at once


class NarrowLinear(nn.Module):
    """A linear layer whose activations are rounded to 8 bits at each call.

    Args:
        codes: int8 [outputs, inputs], or uint8 [outputs, inputs / 2], the first of two inputs in
            the high half.
        inputs: of the layer.
        scales: [outputs], or [groups, outputs].
        zeros: [groups, outputs] or None.
        bias: [outputs] or None.
        group: consecutive inputs that share a scale, of activations and of the weight, if that has
            one for each group; a multiple of 32 that divides the inputs.
    """

    kernel_name, matrix_dtype = "NarrowLinear with Triton", "int8"

    def __init__(
        self,
        codes: Tensor,
        inputs: int,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group: int,
    ) -> None:
        super().__init__()
        self.codes, self.scales = frozen(codes), frozen(scales.contiguous())
        self.zeros = None if zeros is None else frozen(zeros.contiguous())
        self.bias = None if bias is None else frozen(bias)
        self.inputs, self.group = inputs, group

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        rows, outputs = len(x), len(self.codes)
        groups = self.inputs // self.group
        rounded = torch.empty(rows, self.inputs, dtype=torch.int8, device=x.device)
        factors = torch.empty(2, rows, groups, dtype=torch.float32, device=x.device)
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        integers.round_rows[(rows, groups)](
            x.contiguous(),
            rounded,
            *factors,
            rows,
            self.inputs,
            GROUP=self.group,
            BLOCK=triton.next_power_of_2(self.group),
        )
        block_m, block_n, warps = tile_of(rows)
        integers.multiply[(triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))](
            rounded,
            *factors,
            self.codes,
            self.scales,
            # Any tensor stands for an argument that the kernel does not read.
            self.scales if self.zeros is None else self.zeros,
            self.scales if self.bias is None else self.bias,
            out,
            rows,
            outputs,
            self.inputs,
            GROUP=self.group,
            STEP=math.gcd(self.group, MOST_STEP),
            PAIRS=self.codes.dtype is torch.uint8,
            GROUPED=self.scales.dim() == 2,
            ZEROS=self.zeros is not None,
            BIASED=self.bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
        )
        return out


def tile_of(rows: int) -> tuple[int, int, int]:
    """Rows and outputs of a program, and its warps."""
    if rows <= 16:
        return 16, 32, 4
    return (64, 64, 4) if rows <= 64 else (128, 128, 8)
