"""torch's packed int4 kernels: how each wants its weights, and what it is good for.

All compute w = (q - 8) * scale + zero, with scales and zeros as one tensor [groups, rows, 2].
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from minivllm.kernels.choice import takes_triton

ROWS = 64  # of weights come in multiples of this, the kernels' largest tile
# Two threads on AVX-512, layers of Qwen3-0.6B in bfloat16: the CPU kernel took 0.03 of the time of converting and
# multiplying at one row, 0.3 at 16, 1.1 at 64, 3 at 256. In float16 and float32 it is not vectorised, and slower
# at every number of rows.
_CPU_KERNEL_ROWS = 48
# The CUDA kernel computes 16 rows at a time and reads the weight again for each 16.
_CUDA_KERNEL_ROWS = 128


class Interleaved:
    """The layout of torch's CPU kernel and of the Triton kernel; without a kernel, on any device, the same.

    `2 * half` output rows together; for each input `half` bytes, of which byte r holds row r in its low half
    and row r + half in its high half: uint8 [rows / 2 half, inputs, half].
    """

    def __init__(self, half: int, kernel_rows: int, products: ModuleType | None = None) -> None:
        self.half, self.kernel_rows, self.products = half, kernel_rows, products

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

    def multiply(self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        if self.products is not None:
            product: Tensor = self.products.int4_product(x, packed, group_size, scales_and_zeros)
            return product
        weight = packed.view(scales_and_zeros.shape[1], -1)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scales_and_zeros)
        return out


class TensorCore:
    """The layout of torch's CUDA kernel: int32 [rows / 8, inputs / n, 32, n / 32], tiles of 8 rows and n inputs.

    In which order a tile holds its values is asked of torch's own conversion, once.
    """

    kernel_rows = _CUDA_KERNEL_ROWS
    products = None

    def __init__(self) -> None:
        self._orders: dict[tuple[int, torch.device], Tensor] = {}

    def pack(self, codes: Tensor) -> Tensor:
        """Codes [rows, inputs]; rows a multiple of 64, inputs of 32."""
        inner = next(n for n in (8, 4, 2) if codes.shape[1] % (16 * n) == 0)  # the more, the wider its loads
        pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
        out: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, inner)
        return out

    def unpack(self, packed: Tensor, begin: int, end: int) -> Tensor:
        """Codes of the rows [begin, end), as [inputs, rows]."""
        width = 32 * packed.shape[-1]
        values = nibbles(packed[begin // 8 : end // 8].flatten(2))
        tiles = values.index_select(-1, self._order(width, packed.device)).unflatten(-1, (8, width))
        return tiles.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)

    def _order(self, width: int, device: torch.device) -> Tensor:
        """Where in a tile's memory each of its values lies, row by row: int64 [8 * width]."""
        key = (width, device)
        if key not in self._orders:
            index = torch.arange(8 * width, device=device).view(8, width)
            low, middle, high = (
                nibbles(self.pack((index >> bits & 15).byte()).flatten()).int() for bits in (0, 4, 8)
            )
            self._orders[key] = (low | (middle << 4) | (high << 8)).argsort()
        return self._orders[key]

    def multiply(self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_and_zeros)
        return out


def nibbles(words: Tensor) -> Tensor:
    """The half bytes of int32 [..., n] in the order of memory, low half first: uint8 [..., 8 n]."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


@functools.cache
def layout_for(device: torch.device, dtype: torch.dtype, kernel: str = "auto") -> Interleaved | TensorCore:
    """The layout of the kernel that this device has for this dtype; see Int4 for `kernel`.

    Raises:
        BadInput: Triton's is asked for and cannot run here.
    """
    triton = takes_triton("quant.kernel", kernel, "torch", device)
    tensor_cores = (
        dtype is torch.bfloat16
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    if tensor_cores and kernel != "triton":
        return TensorCore()
    if triton:
        from minivllm.quant.kernels import products

        return Interleaved(32, products.MOST_ROWS, products)
    if dtype is not torch.bfloat16:
        return Interleaved(32, 0)
    if device.type == "cpu":
        half = {"AVX512": 32, "AVX2": 16}.get(torch.backends.cpu.get_cpu_capability())
        if half is not None:
            return Interleaved(half, _CPU_KERNEL_ROWS)
    return Interleaved(32, 0)
