"""NF4: four bits a weight, on the quantiles of a normal distribution, scaled by blocks.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs"; double quantisation, too, is theirs:
the blocks' scales are stored in eight bits. Computed by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Quantizer, frozen
from minivllm.quant.bnb import import_bitsandbytes

_BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
_NESTED_BLOCK = 256  # scales per scale, fixed by bitsandbytes' kernels
_ENCODE_ROWS = 1024  # encoded at a time on the CPU, to keep the float32 temporaries small
# bitsandbytes' AVX-512 kernel costs the same for each row of activations; above about 40 rows it was slower
# than converting the weight and multiplying (4 times slower at 256 rows).
_KERNEL_ROWS = 40
_SLICE = 8 * 1024 * 1024  # weights converted at a time, so that no layer exists whole in 16 bits


class NF4(Quantizer):
    """Weights in NF4.

    Args:
        dtype: of activations.
        block_size: weights that share a scale: 64, 128, ... 4096.
        double_quant: store the scales in eight bits too. On CPUs with AVX512-BF16 the kernel wants them in
            bfloat16, so there the rounding of double quantisation is kept but not its saving.
        skip: layers to leave alone, by any part of their name.
    """

    name = "nf4"

    def __init__(
        self,
        dtype: str = "bfloat16",
        block_size: int = 64,
        double_quant: bool = True,
        skip: Sequence[str] = (),
    ) -> None:
        super().__init__(dtype, skip)
        if block_size not in _BLOCK_SIZES:
            raise BadInput(
                f"quant.block_size={block_size} must be one of {', '.join(map(str, _BLOCK_SIZES))}"
            )
        self.block_size, self.double_quant = block_size, double_quant
        self.library = import_bitsandbytes(self.name)

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See QuantMethod."""
        codes, state = quantize(self.library, weight, self.block_size, self.double_quant)
        functional = self.library.functional
        rows, columns = weight.shape
        kernel_fits = (
            weight.device.type == "cpu"
            and weight.dtype is not torch.float32  # the kernel computes in bfloat16
            and rows % 32 == 0
            and columns % self.block_size == 0
            and hasattr(functional, "_convert_weight_packed_for_cpu")
            and functional.has_avx512bf16()
        )
        if kernel_fits:
            codes, state = functional._convert_weight_packed_for_cpu(codes, state)
            return NF4CPULinear(self.library, codes, state, bias)
        return NF4Linear(self.library, codes, state, bias)


class NF4Linear(nn.Module):
    """A linear layer through bitsandbytes' `matmul_4bit`."""

    def __init__(self, library: Any, codes: Tensor, state: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.codes = frozen(codes)  # two weights a byte
        self.scales = frozen(state.absmax)
        if state.nested:
            self.nested_scales, self.nested_map = frozen(state.state2.absmax), frozen(state.state2.code)
        self.bias = None if bias is None else frozen(bias)
        self.multiply, self.state = library.matmul_4bit, state

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        out: Tensor = self.multiply(x, self.codes.t(), quant_state=self.state, bias=self.bias)
        return out


class NF4CPULinear(nn.Module):
    """A linear layer on bitsandbytes' layout for AVX512-BF16, converted back where rows are many.

    The layout: 32 output rows together, for each pair of inputs 32 bytes; byte 2 r + p holds input p of the
    pair, for row r in its low half and for row r + 16 in its high half. Scales are bfloat16 [in / block, out].
    """

    def __init__(self, library: Any, codes: Tensor, state: Any, bias: Tensor | None) -> None:
        super().__init__()
        self.codes, self.scales = frozen(codes), frozen(state.absmax)
        self.bias = None if bias is None else frozen(bias)
        self.multiply, self.state = library.matmul_4bit, state
        self.rows, self.columns = state.shape
        self.step = max(32, _SLICE // self.columns // 32 * 32)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if x.shape[0] <= _KERNEL_ROWS:
            out: Tensor = self.multiply(x, self.codes, quant_state=self.state, bias=self.bias)
            return out
        starts = range(0, self.rows, self.step)
        out = torch.cat(
            [F.linear(x, self.weight(i, min(i + self.step, self.rows), x.dtype)) for i in starts], -1
        )
        return out if self.bias is None else out.add_(self.bias)

    def weight(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Rows [begin, end), multiples of 32, of the weight [out, in] in `dtype`."""
        groups, pairs = (end - begin) // 32, self.columns // 2
        packed = self.codes[begin:end].view(torch.int16).view(groups, pairs, 16).transpose(1, 2).contiguous()
        codes = torch.empty(
            groups, 32, pairs, dtype=torch.uint8
        )  # the first weight of a pair in the high half
        codes[:, :16] = ((packed << 4) & 0xF0) | ((packed >> 8) & 0x0F)
        codes[:, 16:] = (packed & 0xF0) | ((packed >> 12) & 0x0F)
        scales = self.scales[:, begin:end].t().float().contiguous()
        out: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            codes.view(-1, 1), scales, self.state.blocksize, "nf4", (end - begin, self.columns), dtype
        )
        return out


def quantize(library: Any, weight: Tensor, block_size: int, double_quant: bool) -> tuple[Tensor, Any]:
    """bitsandbytes' `quantize_4bit`: packed codes [out * in / 2, 1] and its QuantState.

    On the CPU the codes are found by comparisons instead of its binary search, which takes 2.5 times as long;
    the bytes are the same.
    """
    functional = library.functional
    if weight.device.type != "cpu" or weight.shape[1] % block_size:
        codes, state = functional.quantize_4bit(
            weight, blocksize=block_size, compress_statistics=double_quant, quant_type="nf4"
        )
        return codes, state
    levels = functional.get_4bit_type("nf4", device="cpu")
    bounds = ((levels[:-1] + levels[1:]) / 2).tolist()
    encoded = [_encode(part, bounds, block_size) for part in weight.split(_ENCODE_ROWS)]
    codes, scales = (torch.cat(parts) for parts in zip(*encoded, strict=True))
    offset = nested = None
    if double_quant:
        offset = scales.mean()
        scales, nested = functional.quantize_blockwise(scales - offset, blocksize=_NESTED_BLOCK)
    state = functional.QuantState(
        absmax=scales,
        shape=weight.shape,
        code=levels,
        blocksize=block_size,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=offset,
        state2=nested,
    )
    return codes.view(-1, 1), state


def _encode(weight: Tensor, bounds: list[float], block_size: int) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the largest absolute value of each block."""
    blocks = weight.reshape(-1, block_size).float()
    largest = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / largest.clamp(min=1e-38)[:, None])).view(-1)
    codes = (scaled > bounds[0]).view(torch.uint8)
    for bound in bounds[1:]:
        codes += (scaled > bound).view(torch.uint8)
    return (codes[::2] << 4) | codes[1::2], largest
