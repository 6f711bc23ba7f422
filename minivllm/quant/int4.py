"""Weight-only int4: affine, group-wise. Not NF4: its 16 levels are evenly spaced.

Each group of consecutive inputs of an output channel has a scale and a zero point: w = (q - 8) * scale + zero,
q in 0..15, round-to-nearest between the group's smallest and largest weight. This is the form that torch's
packed kernels compute with (tinygemm on CUDA), and that AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022)
checkpoints are read into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Quantizer, frozen
from minivllm.quant.kernels.int4 import ROWS, layout_for

GROUP_SIZES = (32, 64, 128, 256)
_SLICE = 8 * 1024 * 1024  # weights converted at a time, so that no layer exists whole in 16 bits
_CHUNK = 256 * 1024  # weights quantised at a time on a CPU: its cache holds the float32 temporaries


class Int4(Quantizer):
    """Weights in four bits, with a scale and a zero point for each group of inputs.

    Args:
        dtype: of activations, scales and zero points.
        group_size: consecutive inputs that share a scale: 32, 64, 128 or 256.
        skip: layers to leave alone, by any part of their name.
        lm_head: quantise the head too.
        kernel: of products with few rows: "triton", "torch", or "auto": torch's where it has one for the device and
            the dtype, else Triton's on a GPU.
    """

    name = "int4"

    def __init__(
        self,
        dtype: str = "bfloat16",
        group_size: int = 128,
        skip: Sequence[str] = (),
        lm_head: bool = False,
        kernel: str = "auto",
    ) -> None:
        super().__init__(dtype, skip, lm_head)
        if group_size not in GROUP_SIZES:
            raise BadInput(f"quant.group_size={group_size} must be one of {', '.join(map(str, GROUP_SIZES))}")
        self.group_size, self.kernel = group_size, kernel

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See QuantMethod."""
        chunk = _CHUNK if weight.device.type == "cpu" else _SLICE
        step = max(ROWS, chunk // weight.shape[1] // ROWS * ROWS)
        pieces = (quantize(part, self.group_size) for part in weight.split(step))
        shape = (weight.shape[0], weight.shape[1])
        return Int4Linear(pieces, shape, self.group_size, bias, kernel=self.kernel)


class Int4Linear(nn.Module):
    """A linear layer on torch's packed int4 weight, converted back where rows are many or no kernel fits.

    Args:
        pieces: of the weight, top to bottom, all but the last with a multiple of 64 rows: codes uint8
            [rows, inputs rounded up to the group], scales and zeros [groups, rows] in the compute dtype.
        shape: outputs and inputs.
        group_size: inputs that share a scale.
        bias: [rows] or None.
        order: int32 [columns]; the input that each column of the codes belongs to, None for their own order.
        kernel: see Int4.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Tensor, Tensor, Tensor]],
        shape: tuple[int, int],
        group_size: int,
        bias: Tensor | None,
        order: Tensor | None = None,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        packed, scales = [], []
        for codes, scale, zero in pieces:
            missing = -codes.shape[0] % ROWS
            self.layout = layout_for(codes.device, scale.dtype, kernel)
            packed.append(self.layout.pack(F.pad(codes, (0, 0, 0, missing))))
            scales.append(F.pad(torch.stack((scale, zero), -1), (0, 0, 0, missing)))
        self.weight = frozen(torch.cat(packed) if len(packed) > 1 else packed[0])
        self.scales_and_zeros = frozen(torch.cat(scales, 1))  # [groups, rows, 2]
        self.bias = None if bias is None else frozen(bias)
        self.order = None if order is None else nn.Buffer(order, persistent=False)
        self.shape, self.group_size = shape, group_size
        self.padded = self.scales_and_zeros.shape[0] * group_size
        self.step = max(ROWS, _SLICE // self.padded // ROWS * ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.padded > self.shape[1]:
            x = F.pad(x, (0, self.padded - self.shape[1]))
        if x.shape[0] <= self.layout.kernel_rows:
            out = self.layout.multiply(x.contiguous(), self.weight, self.group_size, self.scales_and_zeros)
        else:
            starts = range(0, self.scales_and_zeros.shape[1], self.step)
            parts = [x @ self.transposed(start, start + self.step) for start in starts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        out = out[:, : self.shape[0]]
        return out if self.bias is None else out.add_(self.bias)

    def transposed(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the padded weight, multiples of 64, as [inputs, rows] in the compute dtype."""
        scale, zero = self.scales_and_zeros[:, None, begin:end].unbind(-1)
        codes = self.layout.unpack(self.weight, begin, end).view(torch.int8).sub_(8).to(scale.dtype)
        groups = codes.unflatten(0, (-1, self.group_size))
        return torch.addcmul(zero.contiguous(), groups, scale.contiguous()).flatten(0, 1)


def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of the 16 levels between each group's smallest and largest weight.

    Args:
        weight: [rows, columns] in the compute dtype.
        group_size: columns that share a scale; the last group is filled up with the last column.

    Returns:
        Codes uint8 [rows, columns rounded up], scales and zeros [groups, rows] in the weight's dtype.
    """
    missing = -weight.shape[1] % group_size
    if missing:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1)
    groups = weight.unflatten(1, (-1, group_size)).float()
    low, high = groups.aminmax(dim=-1, keepdim=True)
    # Rounded to the compute dtype first, so that their rounding is no error of its own.
    scale = ((high - low) / 15).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    zero = (low + 8 * scale.float()).to(weight.dtype)
    codes = (groups - zero.float()).div_(scale.float()).add_(8).round_().clamp_(0, 15)
    return codes.flatten(1).to(torch.uint8), scale.squeeze(-1).t(), zero.squeeze(-1).t()
