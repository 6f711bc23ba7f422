"""Kernels of packed int4, torch's and Triton's: the layout of each kernel's weights, its range of
rows, and the layer on them.

All compute w = (q - 8) * scale + zero, with scales and zeros as one tensor [groups, rows, 2]."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.device import takes_triton
from minivllm.quant.base import frozen
from minivllm.quant.kernels.common import SLICE, TWO_PRODUCTS_BELOW, triton_products

Piece = tuple[Tensor, Tensor, Tensor | None]
"""Some outputs of a weight: codes, scales, zeros; see Int4Linear."""
ROWS = 64  # weights have a multiple of so many rows, the kernels' largest tile
# Two threads on AVX-512, layers of Qwen3-0.6B in bfloat16: the CPU kernel took 0.03 of the time of
# converting and multiplying at one row, 0.3 at 16, 1.1 at 64, 3 at 256. In float16 and float32 it
# is not vectorised, and slower at every number of rows.
_CPU_KERNEL_ROWS = 48
# The CUDA kernel computes 16 rows at a time and reads the weight again for each 16.
_CUDA_KERNEL_ROWS = 128


class Interleaved:
    """The layout of torch's CPU kernel, and of any device without a kernel.

    `2 * half` output rows are stored together; for each input `half` bytes, of which byte r holds
    row r in its low half and row r + half in its high half: uint8 [rows / 2 half, inputs, half]."""

    products = None

    def __init__(self, half: int, kernel_rows: int) -> None:
        self.half, self.kernel_rows = half, kernel_rows

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [rows, inputs]; rows a multiple of 64."""
        low, high = codes.unflatten(0, (-1, 2, self.half)).unbind(1)
        return (low | (high << 4)).transpose(1, 2).contiguous()

    def unpack(self, packed: Tensor, begin: int, end: int) -> Tensor:
        """Codes of the rows [begin, end), as [inputs, rows]."""
        pairs = packed[begin // (2 * self.half) : end // (2 * self.half)].transpose(0, 1)
        codes = pairs.new_empty(*pairs.shape[:2], 2, self.half)
        torch.bitwise_and(pairs, 15, out=codes[:, :, 0])
        torch.bitwise_right_shift(pairs, 4, out=codes[:, :, 1])
        return codes.flatten(1)

    def multiply(
        self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor
    ) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        weight = packed.view(scales_and_zeros.shape[1], -1)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, weight, group_size, scales_and_zeros
        )
        return out


class Paired:
    """The layout of the Triton kernel: uint8 [rows, inputs / 2], the first of two inputs in the
    high half."""

    def __init__(self, products: ModuleType) -> None:
        self.products, self.kernel_rows = products, products.MOST_ROWS

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [rows, inputs]; inputs a multiple of 2."""
        return paired(codes)

    def unpack(self, packed: Tensor, begin: int, end: int) -> Tensor:
        """Codes of the rows [begin, end), as [inputs, rows]."""
        pairs = packed[begin:end].t()
        return torch.stack((pairs >> 4, pairs & 15), 1).flatten(0, 1)

    def multiply(
        self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor
    ) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        out: Tensor = self.products.int4_product(x, packed, group_size, scales_and_zeros)
        return out


class TensorCore:
    """The layout of torch's CUDA kernel: int32 [rows / 8, inputs / n, 32, n / 32], tiles of 8 rows
    and n inputs.

    torch's own conversion of one tile shows the order of a tile's values."""

    kernel_rows = _CUDA_KERNEL_ROWS
    products = None

    def __init__(self) -> None:
        self._orders: dict[tuple[int, torch.device], Tensor] = {}

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [rows, inputs]; rows a multiple of 64, inputs of 32."""
        # more inputs make wider loads
        inner = next(n for n in (8, 4, 2) if codes.shape[1] % (16 * n) == 0)
        out: Tensor = torch.ops.aten._convert_weight_to_int4pack(paired(codes), inner)
        return out

    def unpack(self, packed: Tensor, begin: int, end: int) -> Tensor:
        """Codes of the rows [begin, end), as [inputs, rows]."""
        width = 32 * packed.shape[-1]
        values = nibbles(packed[begin // 8 : end // 8].flatten(2))
        tiles = values.index_select(-1, self._order(width, packed.device)).unflatten(-1, (8, width))
        return tiles.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)

    def _order(self, width: int, device: torch.device) -> Tensor:
        """The place in a tile's memory of each of its values, row by row: int64 [8 * width]."""
        key = (width, device)
        if key not in self._orders:
            index = torch.arange(8 * width, device=device).view(8, width)
            low, middle, high = (
                nibbles(self.pack((index >> bits & 15).byte()).flatten()).int()
                for bits in (0, 4, 8)
            )
            self._orders[key] = (low | (middle << 4) | (high << 8)).argsort()
        return self._orders[key]

    def multiply(
        self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor
    ) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_and_zeros)
        return out


def paired(codes: Tensor) -> Tensor:
    """Codes [rows, inputs], two a byte, the first in the high half: [rows, inputs / 2]."""
    return (codes[:, ::2] << 4) | codes[:, 1::2]


def nibbles(words: Tensor) -> Tensor:
    """The half bytes of int32 [..., n] in the order of memory, low half first: uint8 [..., 8 n]."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


@functools.cache
def layout_for(
    device: torch.device, dtype: torch.dtype, kernel: str = "auto"
) -> Interleaved | Paired | TensorCore:
    """The layout for this device's kernel and this dtype; see Int4 for `kernel`.

    Raises:
        BadInput: Triton's is wanted and cannot run here.
    """
    triton = takes_triton("quant.kernel", kernel, "torch", device, TWO_PRODUCTS_BELOW)
    tensor_cores = (
        dtype is torch.bfloat16
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    if tensor_cores and kernel != "triton":
        return TensorCore()
    if triton:
        return Paired(triton_products())
    if dtype is not torch.bfloat16:
        return Interleaved(32, 0)
    if device.type == "cpu":
        half = {"AVX512": 32, "AVX2": 16}.get(torch.backends.cpu.get_cpu_capability())
        if half is not None:
            return Interleaved(half, _CPU_KERNEL_ROWS)
    return Interleaved(32, 0)


class Int4Linear(nn.Module):
    """A linear layer on a packed int4 weight. The weight is converted back where rows are many or
    no kernel fits.

    Args:
        pieces: of the weight, top to bottom, all but the last with a multiple of 64 rows: codes
            uint8 [rows, inputs rounded up to the group], scales and zeros [groups, rows] in the
            compute dtype, or None for zeros that are 0.
        shape: outputs and inputs.
        group_size: inputs that share a scale.
        bias: [rows] or None.
        order: int32 [columns]; the input that each column of the codes belongs to, None for their
            own order.
        kernel: see Int4.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
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
            zero = torch.zeros_like(scale) if zero is None else zero
            packed.append(self.layout.pack(F.pad(codes, (0, 0, 0, missing))))
            scales.append(F.pad(torch.stack((scale, zero), -1), (0, 0, 0, missing)))
        if self.layout.products is not None:
            self.kernel_name = "Int4Linear with Triton"
        self.weight = frozen(torch.cat(packed) if len(packed) > 1 else packed[0])
        self.scales_and_zeros = frozen(torch.cat(scales, 1))  # [groups, rows, 2]
        self.bias = None if bias is None else frozen(bias)
        self.order = None if order is None else nn.Buffer(order, persistent=False)
        self.shape, self.group_size = shape, group_size
        self.padded = self.scales_and_zeros.shape[0] * group_size
        self.step = max(ROWS, SLICE // self.padded // ROWS * ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.padded > self.shape[1]:
            x = F.pad(x, (0, self.padded - self.shape[1]))
        if x.shape[0] <= self.layout.kernel_rows:
            out = self.layout.multiply(
                x.contiguous(), self.weight, self.group_size, self.scales_and_zeros
            )
        else:
            starts = range(0, self.scales_and_zeros.shape[1], self.step)
            parts = [x @ self.transposed(start, start + self.step) for start in starts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        out = out[:, : self.shape[0]].contiguous()
        return out if self.bias is None else out.add_(self.bias)

    def transposed(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of the padded weight, multiples of 64, as [inputs, rows] in the compute
        dtype."""
        scale, zero = self.scales_and_zeros[:, None, begin:end].unbind(-1)
        codes = self.layout.unpack(self.weight, begin, end).view(torch.int8).sub_(8).to(scale.dtype)
        groups = codes.unflatten(0, (-1, self.group_size))
        return torch.addcmul(zero.contiguous(), groups, scale.contiguous()).flatten(0, 1)
