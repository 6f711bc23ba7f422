"""Weight-only int4: affine, group-wise. Not NF4: its 16 levels are evenly spaced.

Each group of consecutive inputs of an output channel has a scale and a zero point: w = (q - 8) * scale + zero,
q in 0..15, round-to-nearest between the group's smallest and largest weight. This is the form that torch's
packed kernels compute with (tinygemm on CUDA), and that AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022)
checkpoints are read into.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Quantizer, frozen

GROUP_SIZES = (32, 64, 128, 256)
_BLOCK = 64  # rows are padded to a multiple: the kernels' largest tile
# Two threads on AVX-512, layers of Qwen3-0.6B in bfloat16: the CPU kernel took 0.03 of the time of converting and
# multiplying at one row, 0.3 at 16, 1.1 at 64, 3 at 256. In float16 and float32 it is not vectorised, and slower
# at every number of rows.
_CPU_KERNEL_ROWS = 48
# The CUDA kernel computes 16 rows at a time and reads the weight again for each 16.
_CUDA_KERNEL_ROWS = 128
_SLICE = 8 * 1024 * 1024  # weights converted at a time, so that no layer exists whole in 16 bits
_CHUNK = (
    256 * 1024
)  # weights quantised at a time: what the processor's cache holds, half the time of larger ones


class Int4(Quantizer):
    """Weights in four bits, with a scale and a zero point for each group of inputs.

    Args:
        dtype: of activations, scales and zero points.
        group_size: consecutive inputs that share a scale: 32, 64, 128 or 256.
        skip: layers to leave alone, by any part of their name.
        lm_head: quantise the head too.
    """

    name = "int4"

    def __init__(
        self,
        dtype: str = "bfloat16",
        group_size: int = 128,
        skip: Sequence[str] = (),
        lm_head: bool = False,
    ) -> None:
        super().__init__(dtype, skip, lm_head)
        if group_size not in GROUP_SIZES:
            raise BadInput(f"quant.group_size={group_size} must be one of {', '.join(map(str, GROUP_SIZES))}")
        self.group_size = group_size

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See QuantMethod."""
        chunk = _CHUNK if weight.device.type == "cpu" else _SLICE
        step = max(_BLOCK, chunk // weight.shape[1] // _BLOCK * _BLOCK)
        pieces = (quantize(part, self.group_size) for part in weight.split(step))
        return Int4Linear(pieces, weight.shape[0], weight.shape[1], self.group_size, bias)


class Int4Linear(nn.Module):
    """A linear layer on torch's packed int4 weight, converted back where rows are many or no kernel fits.

    Args:
        pieces: of the weight, top to bottom, all but the last with a multiple of 64 rows: codes uint8
            [rows, inputs rounded up to the group], scales and zeros [groups, rows] in the compute dtype.
        rows: outputs.
        columns: inputs.
        group_size: inputs that share a scale.
        bias: [rows] or None.
        order: int32 [columns]; the input that each column of the codes belongs to, None for their own order.
    """

    def __init__(
        self,
        pieces: Iterable[tuple[Tensor, Tensor, Tensor]],
        rows: int,
        columns: int,
        group_size: int,
        bias: Tensor | None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        packed, scales = [], []
        for codes, scale, zero in pieces:
            missing = -codes.shape[0] % _BLOCK
            self.layout = _layout(codes.device, scale.dtype)
            packed.append(self.layout.pack(F.pad(codes, (0, 0, 0, missing))))
            scales.append(F.pad(torch.stack((scale, zero), -1), (0, 0, 0, missing)))
        self.weight = frozen(torch.cat(packed) if len(packed) > 1 else packed[0])
        self.scales_and_zeros = frozen(torch.cat(scales, 1))  # [groups, rows, 2]
        self.bias = None if bias is None else frozen(bias)
        self.order = None if order is None else nn.Buffer(order, persistent=False)
        self.rows, self.columns, self.group_size = rows, columns, group_size
        self.padded = self.scales_and_zeros.shape[0] * group_size
        self.step = max(_BLOCK, _SLICE // self.padded // _BLOCK * _BLOCK)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.padded > self.columns:
            x = F.pad(x, (0, self.padded - self.columns))
        if x.shape[0] <= self.layout.kernel_rows:
            out = self.layout.multiply(x.contiguous(), self.weight, self.group_size, self.scales_and_zeros)
        else:
            starts = range(0, self.scales_and_zeros.shape[1], self.step)
            parts = [x @ self.transposed(start, start + self.step) for start in starts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        out = out[:, : self.rows]
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


class _Interleaved:
    """The layout of torch's CPU kernel; without a kernel, on any device, the same.

    `2 * half` output rows together; for each input `half` bytes, of which byte r holds row r in its low half
    and row r + half in its high half: uint8 [rows / 2 half, inputs, half].
    """

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

    def multiply(self, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
        """The kernel: x [rows, inputs] to [rows, outputs]."""
        weight = packed.view(scales_and_zeros.shape[1], -1)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, group_size, scales_and_zeros)
        return out


class _TensorCore:
    """The layout of torch's CUDA kernel: int32 [rows / 8, inputs / n, 32, n / 32], tiles of 8 rows and n inputs.

    In which order a tile holds its values is asked of torch's own conversion, once.
    """

    kernel_rows = _CUDA_KERNEL_ROWS

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
def _layout(device: torch.device, dtype: torch.dtype) -> _Interleaved | _TensorCore:
    """The layout of the kernel that this device has for this dtype."""
    if dtype is not torch.bfloat16:
        return _Interleaved(32, 0)
    if device.type == "cuda" and torch.version.cuda is not None:
        return _TensorCore() if torch.cuda.get_device_capability(device) >= (8, 0) else _Interleaved(32, 0)
    if device.type == "cpu":
        half = {"AVX512": 32, "AVX2": 16}.get(torch.backends.cpu.get_cpu_capability())
        if half is not None:
            return _Interleaved(half, _CPU_KERNEL_ROWS)
    return _Interleaved(32, 0)
