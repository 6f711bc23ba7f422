"""NF4: four bits a weight, on the quantiles of a normal distribution, scaled by blocks.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", which also describes double
quantisation: the blocks' scales are stored in eight bits. bitsandbytes computes the products."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.cpu.linear import PANEL, Format, PanelLinear, panels_for
from minivllm.kernels.device import takes_triton
from minivllm.quant.base import Quantizer, frozen
from minivllm.quant.bnb import import_bitsandbytes, require_bitsandbytes
from minivllm.quant.kernels.common import SLICE, TWO_PRODUCTS_BELOW, triton_products
from minivllm.quant.options import NF4Options

# bitsandbytes' AVX-512 kernel costs the same for each row of activations; above about 40 rows it
# was slower than converting the weight and multiplying (4 times slower at 256 rows).
_KERNEL_ROWS = 40
_NESTED_BLOCK = 256  # scales per scale, fixed by bitsandbytes' kernels
_CHUNK = 128 * 1024  # weights encoded at once on a CPU, whose cache holds the float32 temporaries
# Bins of [-1, 1] for the look-up of codes: no bin contains two of the 15 bounds.
_BINS = 64


class NF4(Quantizer, NF4Options):
    """Weights in NF4."""

    name = "nf4"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_bitsandbytes(self.name)

    @cached_property
    def library(self) -> Any:
        """bitsandbytes, imported when a weight is quantised: one that the C++ kernels multiply and
        that was packed before needs none of it."""
        return import_bitsandbytes(self.name)

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return self.linear(
            *quantize(self.library, weight, self.block_size, self.double_quant), bias
        )

    def linear(self, codes: Tensor, state: Any, bias: Tensor | None) -> nn.Module:
        """The layer of a quantised weight: uint8 [out * in / 2, 1] and its QuantState, as
        `quantize` gives them."""
        rows, columns = state.shape
        functional = self.library.functional
        if kernels := panels_for(
            self.kernels, codes.device, self.dtype, columns, state.blocksize, self.kernel
        ):
            scales = single_scales(functional, state).view(rows, -1).t()
            step = max(PANEL, SLICE // columns // PANEL * PANEL)
            packed = [
                kernels.pack(_nibbles(part), Format.NF4)
                for part in codes.view(rows, -1).split(step)
            ]
            return PanelLinear(
                kernels, Format.NF4, packed, (rows, columns), bias, scales, group=state.blocksize
            )
        triton = takes_triton(
            "quant.kernel", self.kernel, "bitsandbytes", codes.device, TWO_PRODUCTS_BELOW
        )
        kernel_fits = (
            codes.device.type == "cpu"
            and not triton
            and self.dtype is not torch.float32  # as the kernel computes in bfloat16
            and rows % 32 == 0
            and columns % state.blocksize == 0
            and functional.has_avx512bf16()
        )
        if not kernel_fits:
            return NF4Linear(self.library, codes, state, bias, triton)
        scales = single_scales(functional, state).view(rows, -1).t().to(torch.bfloat16).contiguous()
        return NF4CPULinear(self.library, interleave(codes.view(rows, -1)), scales, state, bias)


class NF4Linear(nn.Module):
    """A linear layer on bitsandbytes' `matmul_4bit`. On CPUs the whole weight is converted, as
    bitsandbytes does.

    With `triton`, products with few rows use a kernel that reads the same layout, if rows of the
    weight are whole blocks and the levels are NF4's own."""

    def __init__(
        self, library: Any, codes: Tensor, state: Any, bias: Tensor | None, triton: bool = False
    ) -> None:
        super().__init__()
        # two weights a byte; one a block
        self.codes, self.scales = frozen(codes), frozen(state.absmax)
        if state.nested:
            self.nested_scales, self.nested_map = (
                frozen(state.state2.absmax),
                frozen(state.state2.code),
            )
        self.bias = None if bias is None else frozen(bias)
        self.library, self.state = library, state
        self.products = triton_products() if triton and triton_products().takes_nf4(state) else None
        if self.products is not None:
            self.kernel_name = "NF4Linear with Triton"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.products is not None and x.shape[0] <= self.products.MOST_ROWS:
            return self._few_rows(x)
        if x.device.type == "cpu":
            scales = single_scales(self.library.functional, self.state)
            weight = converted(self.codes, scales, self.state.blocksize, self.state.shape, x.dtype)
            return F.linear(x, weight, self.bias)
        out: Tensor = self.library.matmul_4bit(
            x, self.codes.t(), quant_state=self.state, bias=self.bias
        )
        return out

    def _few_rows(self, x: Tensor) -> Tensor:
        assert self.products is not None
        state = self.state
        nested = None
        if state.nested:
            nested = (
                self.nested_map,
                self.nested_scales,
                state.offset.view(1),
                state.state2.blocksize,
            )
        out: Tensor = self.products.nf4_product(
            x, self.codes, state.shape, state.blocksize, state.code, self.scales, nested, self.bias
        )
        return out


class NF4CPULinear(nn.Module):
    """A linear layer on bitsandbytes' layout for AVX512-BF16. The weight is converted back where
    rows are many.

    The layout is that of `interleave`; scales are bfloat16 [in / block, out]."""

    def __init__(
        self, library: Any, codes: Tensor, scales: Tensor, state: Any, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.codes, self.scales = frozen(codes), frozen(scales)
        self.bias = None if bias is None else frozen(bias)
        self.multiply = library.matmul_4bit
        self.state = library.functional.QuantState(
            scales, state.shape, state.code, state.blocksize, state.quant_type, torch.bfloat16
        )
        self.state.packing_format_for_cpu = True
        self.rows, self.columns = state.shape
        self.step = max(32, SLICE // self.columns // 32 * 32)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] <= _KERNEL_ROWS:
            out: Tensor = self.multiply(x, self.codes, quant_state=self.state, bias=self.bias)
            return out
        starts = range(0, self.rows, self.step)
        out = torch.cat(
            [F.linear(x, self.weight(i, min(i + self.step, self.rows), x.dtype)) for i in starts],
            -1,
        )
        return out if self.bias is None else out.add_(self.bias)

    def weight(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows [begin, end), multiples of 32, of the weight [out, in] in `dtype`."""
        codes, scales = deinterleave(self.codes[begin:end]), self.scales[:, begin:end].t().float()
        return converted(
            codes, scales.reshape(-1), self.state.blocksize, (end - begin, self.columns), dtype
        )


def quantize(
    library: Any, weight: Tensor, block_size: int, double_quant: bool
) -> tuple[Tensor, Any]:
    """bitsandbytes' `quantize_4bit`: packed codes [out * in / 2, 1] and its QuantState.

    On the CPU the codes are looked up instead of searched for, which took a fifteenth of the time;
    the bytes are the same."""
    functional = library.functional
    # A block that is not finite would spoil the second quantisation of all scales.
    double_quant = double_quant and bool(weight.isfinite().all())
    if weight.device.type != "cpu" or weight.numel() % block_size:
        if weight.device.type == "cuda":  # on whose default stream quantize_4bit always launches
            current = torch.cuda.current_stream(weight.device)
            assert current == torch.cuda.default_stream(weight.device)
        codes, state = functional.quantize_4bit(
            weight, blocksize=block_size, compress_statistics=double_quant, quant_type="nf4"
        )
        return codes, state
    levels = functional.get_4bit_type("nf4", device="cpu")
    bounds = (levels[:-1] + levels[1:]) / 2
    bins = _bin(bounds)
    # The code at the lower end of each bin.
    lowest = (torch.arange(_BINS)[:, None] > bins).sum(1).to(torch.uint8)
    # The value at which the next code begins.
    bound = torch.full((_BINS,), 2.0).index_put_((bins.long(),), bounds)
    blocks = weight.reshape(-1, block_size)
    encoded = [_encode(part, lowest, bound) for part in blocks.split(_CHUNK // block_size)]
    codes, scales = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    offset = nested = None
    if double_quant:
        offset = scales.double().mean().float()  # whose sum does not overflow
        scales, nested = functional.quantize_blockwise(scales - offset, blocksize=_NESTED_BLOCK)
    state = functional.QuantState(
        scales, weight.shape, levels, block_size, "nf4", weight.dtype, offset=offset, state2=nested
    )
    return codes.view(-1, 1), state


def single_scales(functional: Any, state: Any) -> Tensor:
    """The scale of every block in float32, without double quantisation."""
    if not state.nested:
        scales: Tensor = state.absmax.float()
        return scales
    outer: Tensor = functional.dequantize_blockwise(state.absmax, state.state2)
    return outer.float() + state.offset


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [rows, n], two codes a byte, the first in the high half, to uint8 [rows, 2 n]."""
    return torch.stack((codes >> 4, codes & 15), -1).flatten(1)


def _bin(scaled: Tensor) -> Tensor:
    """The bin of each value of [-1, 1]: int32."""
    return (scaled + 1).mul_((_BINS - 1) / 2).int()


def _encode(blocks: Tensor, lowest: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the largest absolute value of each block."""
    values = blocks.float()
    largest = values.abs().amax(-1)
    scaled = (values * (1.0 / largest.clamp(min=1e-38)[:, None])).view(-1)
    scaled = scaled.nan_to_num_(0.0, 1.0, -1.0)  # of a block whose scale is not finite
    bins = _bin(scaled)
    codes = lowest.index_select(0, bins)
    codes += (scaled > bound.index_select(0, bins)).view(torch.uint8)
    return (codes[::2] << 4) | codes[1::2], largest


def interleave(codes: Tensor) -> Tensor:
    """Codes uint8 [out, in / 2], the first of a pair of inputs in the high half, to the layout of
    bitsandbytes' kernel for AVX512-BF16, uint8 [out, in / 2].

    32 output rows are stored together, with 32 bytes for each pair of inputs; byte 2 r + p holds
    input p of the pair, for row r in its low half and for row r + 16 in its high half.
    bitsandbytes' own conversion takes 32 bits for each code meanwhile."""
    upper, lower = codes.unflatten(0, (-1, 2, 16)).unbind(1)
    first, second = (upper >> 4) | (lower & 0xF0), (upper & 0x0F) | (lower << 4)
    return torch.stack((first, second), -1).transpose(1, 2).reshape(codes.shape)


def deinterleave(packed: Tensor) -> Tensor:
    """The inverse of `interleave`."""
    groups, pairs = packed.shape[0] // 32, packed.shape[1]
    words = packed.view(torch.int16).view(groups, pairs, 16).transpose(1, 2).contiguous()
    codes = torch.empty(groups, 2, 16, pairs, dtype=torch.uint8)
    codes[:, 0] = ((words << 4) & 0xF0) | ((words >> 8) & 0x0F)
    codes[:, 1] = (words & 0xF0) | ((words >> 12) & 0x0F)
    return codes.view(packed.shape)


def converted(
    codes: Tensor, scales: Tensor, block_size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The weight of this shape, by bitsandbytes' conversion for CPUs (0.50.2).

    The conversion takes the scales of blocks that begin within a row from the wrong place, and
    compiles itself again for blocks above 1024. So each block becomes a row of its own, and larger
    blocks become several with the same scale."""
    size, count = min(block_size, 1024), math.prod(shape)
    rows = (count // size, size) if count % size == 0 else (1, count)
    scales = scales.repeat_interleave(block_size // size)
    out: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scales, size, "nf4", rows, dtype
    )
    return out.view(shape)
