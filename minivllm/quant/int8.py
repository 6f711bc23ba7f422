"""int8: one symmetric scale for each output channel; activations in 16 bits, or in 8.

This is the round-to-nearest scheme of LLM.int8 (Dettmers et al. 2022) without its outlier columns,
which only activations with one scale a token need: here they have one for each group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.kernels.cpu.linear import MOST_IN_GROUP, Format, PanelLinear
from minivllm.kernels.device import takes_triton
from minivllm.quant.activations import IntegerQuantizer, Panels
from minivllm.quant.base import RowScaled, as_scale, frozen
from minivllm.quant.kernels.common import by_rows, converted_product, triton_products
from minivllm.quant.options import Int8Options

# torch's int8 kernel for CPUs works on four rows at a time and only bfloat16 is vectorised:
# measured in bfloat16 on AVX-512, one row took 0.35 of the time of converting and multiplying, 8
# rows 0.7, 16 rows 1.3.
_KERNEL_ROWS = 8


class Int8(IntegerQuantizer, RowScaled, Int8Options):
    """Weights as int8 times a scale per output channel."""

    name = "int8"

    forms = Format.INT8, Format.INT8_QUADS

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return int8_linear(*quantize(weight, self.largest(weight)), bias, self)


def int8_linear(
    weight: Tensor, scale: Tensor, bias: Tensor | None, method: Int8 | None = None
) -> nn.Module:
    """The layer for the arguments of Int8Linear: a PanelLinear where the C++ kernels support the
    weight."""
    method = method or Int8()
    if panels := _panels(method, weight):
        packed = panels.kernels.pack(weight, panels.form)
        return PanelLinear(
            panels.kernels,
            panels.form,
            [packed],
            weight.shape,
            bias,
            scale[None],
            group=panels.group,
        )
    if method.narrow:
        return method.narrow_linear(weight, scale, None, bias)
    triton = takes_triton("quant.kernel", method.kernel, "torch", weight.device)
    return Int8Linear(weight, scale, bias, triton)


def int8_group_linear(
    weight: Tensor, scale: Tensor, bias: Tensor | None, method: Int8 | None = None
) -> nn.Module:
    """The layer for the arguments of Int8GroupLinear: a PanelLinear where the C++ kernels support
    the weight.

    Raises:
        BadInput: `quant.kernel` names Triton's, which has no groups.
    """
    method = method or Int8()
    if method.kernel == "triton" and not method.narrow:
        raise BadInput("quant.kernel=triton: Triton's kernel has no int8 in groups; use auto")
    group = weight.shape[1] // scale.shape[1]
    panels = _panels(method, weight, group)
    if panels is None and method.narrow:
        return method.narrow_linear(weight, scale.t(), None, bias, group)
    if panels is None or (group > MOST_IN_GROUP and not method.narrow):
        return Int8GroupLinear(weight, scale, bias)
    packed = panels.kernels.pack(weight, panels.form)
    return PanelLinear(
        panels.kernels, panels.form, [packed], weight.shape, bias, scale.t(), group=group
    )


def _panels(method: Int8, weight: Tensor, group: int = 0) -> Panels | None:
    """The panels of a weight, if it has some. One with -128, which `quantize` does not make, has
    none in 16 bits: the kernels store a magnitude in seven."""
    panels = method.panels(weight.device, weight.shape[1], group)
    return None if panels and not method.narrow and bool((weight == -128).any()) else panels


def quantize(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Round [out, in] to int8 [out, in] and a scale for each output, [out] in the weight's dtype.
    `largest`: of each row, [out, 1]."""
    # Rounded to the compute dtype first, so that integers account for the rounding of scales.
    scale = as_scale(largest.float() / 127, weight.dtype)
    quantized = torch.empty_like(weight, dtype=torch.int8)
    for part, rows, factor in by_rows(quantized, weight, scale):
        part.copy_((rows.float() / factor.float()).round_().clamp_(-127, 127))
    return quantized, scale.squeeze(1)


class Int8Linear(nn.Module):
    """x W^T = (x Q^T) * scale, with Q int8 [out, in] and scale [out] in the compute dtype."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, triton: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.scale = frozen(weight), frozen(scale)
        self.bias = None if bias is None else frozen(bias)
        self.products = triton_products() if triton else None
        if triton:
            self.kernel_name = "Int8Linear with Triton"
        # The kernel reads past the end of rows and columns that are no multiple of its blocks.
        fits = weight.shape[0] % 32 == 0 and weight.shape[1] % 32 == 0
        self.has_kernel = weight.device.type == "cpu" and scale.dtype is torch.bfloat16 and fits

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.products is not None and x.shape[0] <= self.products.MOST_ROWS:
            product: Tensor = self.products.whole_product(x, self.weight, self.scale, self.bias)
            return product
        if self.has_kernel and x.shape[0] <= _KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x, self.weight, self.scale)
        else:
            out = converted_product(x, self.weight, self.scale)
        return out if self.bias is None else out.add_(self.bias)


class Int8GroupLinear(nn.Module):
    """x W^T with W = Q * scale, where Q is int8 [out, in], and scale [out, groups] in the compute
    dtype belongs to groups of consecutive inputs. Converted some rows at a time, at every call."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.scale = frozen(weight), frozen(scale)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        parts = []
        for stored, factor in by_rows(self.weight, self.scale):
            groups = stored.to(x.dtype).unflatten(1, (factor.shape[1], -1))
            parts.append(F.linear(x, groups.mul_(factor[..., None]).flatten(1)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out.add_(self.bias)
