"""AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) checkpoints of four bits, for quant=int4.

Both keep eight codes in an int32, `qweight`, beside integer zero points, `qzeros`, packed alike, and `scales`
[groups, out]: w = (q - z) * scale. With zero = (8 - z) * scale that is the form that Int4Linear computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Shapes
from minivllm.quant.int4 import GROUP_SIZES, Int4, Int4Linear, nibbles

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its int32 AWQ keeps each of eight neighbours


class _PackedInt4:
    """What the two layouts share."""

    described = "int4"
    marker = "qweight"
    names: tuple[str, ...] = ("qweight", "qzeros", "scales", "bias")

    def __init__(self, settings: Mapping[str, Any], quant: Int4) -> None:
        self.quant, self.group_size = quant, int(settings.get("group_size", 128))
        if settings.get("bits", 4) != 4:
            raise BadInput(
                f"the checkpoint is {self.described} with {settings['bits']} bits; only 4 are read"
            )
        if self.group_size != -1 and (self.group_size < 1 or self.group_size % min(GROUP_SIZES)):
            raise BadInput(
                f"the checkpoint is {self.described} in groups of {self.group_size}; "
                f"only -1 and multiples of {min(GROUP_SIZES)} are read"
            )

    def shapes(self, rows: int, columns: int, found: Collection[str]) -> Shapes:
        """See StoredFormat."""
        if self.group_size == -1 and columns % min(GROUP_SIZES):
            raise BadInput(
                f"the checkpoint is {self.described} in one group of {columns} inputs, which is not read"
            )
        groups = 1 if self.group_size == -1 else -(-columns // self.group_size)
        wanted: Shapes = {
            "qweight": self.packed_shape(rows, columns),
            "qzeros": (groups, rows // 8),
            "scales": (groups, rows),
        }
        return wanted | {name: (rows,) for name in found if name == "bias"}

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of qweight."""
        raise NotImplementedError

    def codes(self, qweight: Tensor) -> Tensor:
        """The weight's integers, uint8 [out, in]."""
        raise NotImplementedError

    def zeros(self, qzeros: Tensor) -> Tensor:
        """The zero points, uint8 [groups, out]."""
        raise NotImplementedError

    def order(self, parts: Sequence[Mapping[str, Tensor]], columns: int) -> Tensor | None:
        """Inputs in the order of their groups, None where they lie so."""
        return None

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        for part in parts:
            if part["qweight"].dtype is not torch.int32 or part["qzeros"].dtype is not torch.int32:
                raise BadInput(f"the checkpoint's {self.described} codes are not packed into int32")
            if "bias" in part and part["bias"].any():  # zeros are written beside layers that have none
                raise BadInput(
                    f"the checkpoint has {self.described} biases that config.json does not ask for"
                )
        codes = torch.cat([self.codes(part["qweight"]) for part in parts])
        scales = torch.cat([part["scales"].float() for part in parts], 1)
        zeros = (8.0 - torch.cat([self.zeros(part["qzeros"]) for part in parts], 1)) * scales
        order = self.order(parts, columns)
        if order is not None:
            codes = codes.index_select(1, order)
        group = columns if self.group_size == -1 else self.group_size
        size = next(size for size in reversed(GROUP_SIZES) if group % size == 0)
        scales, zeros = (t.repeat_interleave(group // size, 0).to(self.quant.dtype) for t in (scales, zeros))
        codes = F.pad(codes, (0, len(scales) * size - columns))
        return Int4Linear([(codes, scales, zeros)], len(codes), columns, size, bias, order)


class AWQ(_PackedInt4):
    """AutoAWQ's "gemm" layout: qweight [in, out / 8], eight outputs an int32, even ones in its low half."""

    described = "AWQ"

    def __init__(self, settings: Mapping[str, Any], quant: Int4) -> None:
        super().__init__(settings, quant)
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if version != "gemm" or not settings.get("zero_point", True):
            raise BadInput(
                f"the checkpoint is AWQ version={version}, zero_point={settings.get('zero_point', True)}; "
                "only version=gemm with zero points is read"
            )

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """See _PackedInt4."""
        return columns, rows // 8

    def codes(self, qweight: Tensor) -> Tensor:
        """See _PackedInt4."""
        return self.zeros(qweight).t().contiguous()

    def zeros(self, qzeros: Tensor) -> Tensor:
        """See _PackedInt4."""
        return nibbles(qzeros).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)


class GPTQ(_PackedInt4):
    """AutoGPTQ's layout: qweight [in / 8, out], eight inputs an int32; zero points less one, but not in "gptq_v2".

    With `desc_act` the inputs are in groups by `g_idx`: sorted at loading, as the activations are then at each
    call.
    """

    described = "GPTQ"
    names = (*_PackedInt4.names, "g_idx")

    def __init__(self, settings: Mapping[str, Any], quant: Int4) -> None:
        super().__init__(settings, quant)
        version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        if version not in ("gptq", "gptq_v2"):
            raise BadInput(f"the checkpoint is GPTQ in the format {version}; only gptq and gptq_v2 are read")
        self.offset = int(version == "gptq")

    def shapes(self, rows: int, columns: int, found: Collection[str]) -> Shapes:
        """See StoredFormat."""
        wanted = super().shapes(rows, columns, found)
        return wanted | {name: (columns,) for name in found if name == "g_idx"}

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """See _PackedInt4."""
        return columns // 8, rows

    def codes(self, qweight: Tensor) -> Tensor:
        """See _PackedInt4."""
        return nibbles(qweight[..., None]).permute(1, 0, 2).flatten(1)

    def zeros(self, qzeros: Tensor) -> Tensor:
        """See _PackedInt4."""
        return (nibbles(qzeros) + self.offset) & 15

    def order(self, parts: Sequence[Mapping[str, Tensor]], columns: int) -> Tensor | None:
        """See _PackedInt4."""
        if "g_idx" not in parts[0] or self.group_size == -1:
            return None
        groups = parts[0]["g_idx"].long()
        if any(not torch.equal(groups, part["g_idx"].long()) for part in parts[1:]):
            raise BadInput("the checkpoint's GPTQ groups (g_idx) differ between layers that are fused here")
        in_place = torch.arange(columns, device=groups.device) // self.group_size
        if torch.equal(groups, in_place):
            return None
        sorted_groups, order = groups.sort(stable=True)
        if not torch.equal(sorted_groups, in_place):
            raise BadInput(f"the checkpoint's GPTQ groups (g_idx) are not of {self.group_size} inputs each")
        return order.int()
