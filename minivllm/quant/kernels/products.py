"""Products of few rows with weights in their stored form: 16 bits, int8, NF4 and int4.

With few rows a product takes the time to read its weight. So a program reads a tile of the weight
once, widens it in registers and multiplies it with all rows at once. Inputs are cut into parts, so
that programs fill the GPU although a weight has few rows of output. The number of parts depends on
the weight alone, so a row's result does not depend on the number of other rows (except for the
width of the tile, 8 to 64 rows). The parts are added in their order: with few rows by the last
program of a tile, which saves a launch, with more rows by a kernel with more programs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from minivllm.kernels.common import INTERPRETED
from minivllm.quant.kernels import few_rows
from minivllm.quant.kernels.lookup import LEVELS, STRETCH
from minivllm.quant.plain import PlainLinear

MOST_ROWS = 64  # with more rows, converting the weight once and multiplying in 16 bits costs less
_WARPS = 2048  # about 16 for each processor of a large GPU
_BLOCK_N = 64  # outputs of a program
_BLOCK_K = 128  # inputs of a step
# The smallest block of NF4 weights with one scale; a group of int4 may have half as many.
_FOUR_BIT_BLOCK_K = 64
# The most tiles that are cut into parts: programs of two warps, two programs for a tile.
_TILES = _WARPS // 2 // 2
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@functools.cache
def _kept_counters(device: torch.device) -> Tensor:
    return torch.zeros(_TILES, dtype=torch.int32, device=device)


def _counters(device: torch.device) -> Tensor:
    """The number of programs of each tile that have stored their part: int32, all zero before and
    after a product.

    A device has one tensor for all products, since they follow each other: engines of a device run
    in one thread, and a stream that records graphs waits for the other stream. The tensor is never
    freed, as captured graphs have its address, and is created by the first product, which is never
    a captured one. A product that fails midway on a GPU ends all work on that GPU; the interpreter
    can be stopped midway, so there each product creates one."""
    return torch.zeros(_TILES, dtype=torch.int32) if INTERPRETED else _kept_counters(device)


class _Cut:
    """How one product is cut: rows of a tile and parts of the inputs; and the memory of the
    results.

    Args:
        x: [rows, inputs].
        outputs: rows of the weight.
        scale, bias: [outputs] or None.
        factor: factor of all sums.
        warps: warps of a program with `least_rows` rows, the fewest that it computes.
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
        # Rows whose parts are added at once: two numbers a thread. With more rows, fewer parts
        # would be fetched at once.
        self.few = warps
        tiles, steps = triton.cdiv(outputs, _BLOCK_N), triton.cdiv(inputs, block_k)
        most_parts = max(1, _WARPS // warps // tiles)
        if INTERPRETED:
            most_parts = min(most_parts, 3)  # programs run one after another
        each = triton.cdiv(steps, min(most_parts, steps))  # steps of a part
        self.grid = (tiles, triton.cdiv(steps, each))
        parts = self.grid[1]
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        # Any tensor stands for an argument that the kernel does not read.
        self.partial = self.counters = out
        if parts > 1:
            self.partial = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
            self.counters = _counters(x.device)
        self.scale, self.bias, self.out = (
            out if scale is None else scale,
            out if bias is None else bias,
            out,
        )
        self.rows, self.outputs, self.inputs, self.each = rows, outputs, inputs, each
        self.form = {"SCALED": scale is not None, "BIASED": bias is not None, "FACTOR": factor}
        # Many rows are added faster by a kernel with many programs.
        self.later = parts > 1 and self.block_m > least_rows

    def run(self, kernel: Any, *arguments: Tensor, **options: Any) -> Tensor:
        """The product, [rows, outputs] in the dtype of x, by a kernel that takes x, the weight and
        so on first."""
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
            few_rows.add[(self.grid[0], triton.cdiv(self.rows, self.few))](
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
    """(x W^T) * scale + bias for a weight with one number an element.

    Args:
        x: [rows, inputs], at most 64 rows; weight: int8, or of the dtype of x: [outputs, inputs].
        scale, bias: [outputs] or None.

    Returns:
        [rows, outputs] in the dtype of x.
    """
    cut = _Cut(x, weight.shape[0], scale, bias)
    return cut.run(few_rows.whole, x.contiguous(), weight, BLOCK_K=_BLOCK_K, num_stages=3)


def takes_nf4(state: Any) -> bool:
    """Whether a weight's rows are whole blocks, its blocks whole steps, and its levels those of the
    lookup in registers.

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
        codes: uint8, `shape[0] * shape[1] / 2` of them; shape: outputs and inputs, inputs a
            multiple of the group.
        group: consecutive inputs that share a scale; levels: float32 [16].
        scales: one a group: float32, or uint8 with double quantisation.
        nested: with double quantisation the 256 levels of the scales, the scales of each `n` of
            them, their mean [1], and n.
        bias: [outputs] or None.

    Returns:
        [rows, outputs] in the dtype of x.
    """
    nested_levels, nested_scales, offset, count = nested or (levels, levels, levels, 0)
    tables = (levels, scales, nested_levels, nested_scales, offset)
    return _four_bit_product(
        x, codes, shape[0], tables, bias, AFFINE=False, GROUP=group, NESTED=count
    )


def int4_product(x: Tensor, codes: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """x W^T for w = (q - 8) * scale + zero.

    Args:
        x: [rows, inputs], at most 64 rows, inputs a multiple of the group.
        codes: uint8 [outputs, inputs / 2], the first of two inputs in the high half.
        group: consecutive inputs that share a scale, a multiple of 32; scales_and_zeros: [inputs /
            group, outputs, 2].

    Returns:
        [rows, outputs] in the dtype of x.
    """
    tables = (scales_and_zeros,) * 5  # the kernel does not read NF4's tables
    return _four_bit_product(
        x, codes, codes.shape[0], tables, None, AFFINE=True, GROUP=group, NESTED=0
    )


def _four_bit_product(
    x: Tensor,
    codes: Tensor,
    outputs: int,
    tables: tuple[Tensor, ...],
    bias: Tensor | None,
    **form: int,
) -> Tensor:
    block_k = min(_FOUR_BIT_BLOCK_K, form["GROUP"])
    factor = 1.0 if form["AFFINE"] else 1 / STRETCH.value
    cut = _Cut(x, outputs, None, bias, factor, block_k, warps=2, least_rows=8)
    return cut.run(
        few_rows.four_bits,
        x.contiguous().view(torch.int32 if x.itemsize == 2 else torch.int64),
        codes,
        *tables,
        dtype=_DTYPES[x.dtype],
        BLOCK_K=block_k,
        # Two warps are too few for Hopper's wider products, which gain nothing here; 64 rows
        # need more registers.
        num_warps=2 if cut.block_m <= 32 else 4,
        num_stages=4,
        **form,
    )


class StreamedLinear(PlainLinear):
    """PlainLinear whose kernel reads the weight once for up to 64 rows; torch multiplies more
    rows."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] > MOST_ROWS:
            return super().forward(x)
        return whole_product(x, self.weight, None, self.bias)


def stream(model: nn.Module) -> int:
    """Replace every PlainLinear in 16 bits below `model` by a StreamedLinear. Returns the number of
    replaced layers.

    The layers keep their weights."""
    replaced = 0
    for name, module in list(model.named_modules()):
        if type(module) is PlainLinear and module.weight.itemsize == 2:
            model.set_submodule(name, StreamedLinear(module.weight, module.bias))
            replaced += 1
    return replaced
