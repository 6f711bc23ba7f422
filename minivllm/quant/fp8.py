"""8-bit floats: e4m3 weights with a scale for each output channel (Micikevicius et al. 2022).

On a GPU that multiplies 8-bit floats, activations become 8-bit too, each token with its own scale.
Elsewhere only the weight is stored in 8 bits, and it is converted for the product."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.quant.base import Quantizer, RowScaled, frozen
from minivllm.quant.kernels.common import by_rows, converted_product

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class FP8(Quantizer, RowScaled):
    """Weights as float8_e4m3fn times a scale per output channel."""

    name = "fp8"

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        rounded = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scale = self.largest(weight).squeeze(1).float() / _LARGEST
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        for part, rows, factor in by_rows(rounded, weight, scale):
            part.copy_(rows.float() / factor[:, None])
        return FP8Linear(rounded, scale, bias, weight.dtype)


def has_kernel(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies 8-bit floats scaled by rows: on Hopper and later, to bfloat16, of
    multiples of 16."""
    fits = dtype is torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return fits and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (9, 0)


class FP8Linear(nn.Module):
    """x W^T = (x Q^T) * scale, with Q float8 [out, in] and scale float32 [out]."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        codes = _is_nan(weight).any(1)
        self.weight, self.scale = frozen(weight), frozen(scale.masked_fill(codes, torch.nan))
        self.bias = None if bias is None else frozen(bias)
        self.matrix_dtype = "float8_e4m3fn" if has_kernel(weight, dtype) else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.matrix_dtype:
            scale = (x.abs().amax(1, keepdim=True).float() / _LARGEST).clamp(min=1e-12)
            rounded = (x / scale).to(torch.float8_e4m3fn)
            out = torch._scaled_mm(
                rounded, self.weight.t(), scale, self.scale[None], out_dtype=x.dtype
            )
        else:
            out = converted_product(x, self.weight, self.scale, _widened)
        return out if self.bias is None else out.add_(self.bias)


class FP8BlockLinear(nn.Module):
    """FP8Linear with a scale for each output and block of inputs, float32 [out, blocks]. The weight
    is converted for the product."""

    def __init__(self, weight: Tensor, scale: Tensor, width: int, bias: Tensor | None) -> None:
        super().__init__()
        blocks = (_is_nan(part).any(1) for part in weight.view(torch.uint8).split(width, 1))
        scale = scale.masked_fill(torch.stack([*blocks], 1), torch.nan)
        self.weight, self.scale, self.width = frozen(weight), frozen(scale), width
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        parts = []
        for stored, factor in by_rows(self.weight, self.scale):
            scales = factor.repeat_interleave(self.width, 1)[:, : stored.shape[1]]
            parts.append(F.linear(x, (_widened(stored).float() * scales).to(x.dtype)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out.add_(self.bias)


def _is_nan(weight: Tensor) -> Tensor:
    """Which weights are NaN: their scale becomes NaN, as the output is with one of them, and the
    product on a CPU needs no look at each code."""
    return weight.view(torch.uint8) & 0x7F == 0x7F


def _widened(stored: Tensor) -> Tensor:
    """The same values, but for NaN; on a CPU in bfloat16, where torch's conversion is not
    vectorised.

    Sign, exponent and mantissa move to their places in a bfloat16, and a factor corrects the
    difference of the exponents' biases."""
    bits = stored.view(torch.int8)
    return (
        stored
        if bits.is_cuda
        else ((bits.to(torch.int16) << 4) & -0x7810).view(torch.bfloat16) * 2.0**120
    )
