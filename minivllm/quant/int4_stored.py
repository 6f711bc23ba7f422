"""AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) checkpoints of four bits, for quant=int4.

Both keep eight codes in an int32, `qweight`, beside integer zero points, `qzeros`, packed alike, and `scales`
[groups, out]: w = (q - z) * scale. With zero = (8 - z) * scale that is the form that Int4Linear computes.

AWQ's "gemm" layout: qweight [in, out / 8], eight outputs an int32, the even ones in its low half. GPTQ's: qweight
[in / 8, out], eight inputs an int32 in their order, and zero points less one, but not in "gptq_v2". With `desc_act`
its inputs are in groups by `g_idx`: they are sorted at loading, as the activations are then at each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Shapes
from minivllm.quant.int4 import GROUP_SIZES, Int4, int4_linear
from minivllm.quant.kernels.int4 import nibbles

_LAYOUTS = {"awq": ("version", ["gemm"]), "gptq": ("checkpoint_format", ["gptq", "gptq_v2"])}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its int32 AWQ keeps each of eight neighbours


class StoredInt4:
    """See StoredFormat."""

    marker = "qweight"
    names: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx", "bias")

    def __init__(self, settings: Mapping[str, Any], quant: Int4) -> None:
        self.kind, self.quant = str(settings["quant_method"]).lower(), quant
        key, known = _LAYOUTS[self.kind]
        self.layout = str(settings.get(key) or settings.get("format") or known[0]).lower()
        self.group_size = int(settings.get("group_size", 128))
        groups_fit = self.group_size == -1 or (self.group_size > 0 and self.group_size % GROUP_SIZES[0] == 0)
        bits, zeros = settings.get("bits", 4), settings.get("zero_point", True)
        if bits != 4 or self.layout not in known or not zeros or not groups_fit:
            raise BadInput(
                f"the checkpoint is {self.kind} with bits={bits}, {key}={self.layout}, group_size={self.group_size}, "
                f"zero_point={zeros}; read are 4 bits, {' and '.join(known)}, groups of -1 or a multiple of "
                f"{GROUP_SIZES[0]}, and zero points"
            )

    def shapes(self, rows: int, columns: int) -> Shapes:
        """See StoredFormat."""
        groups = 1 if self.group_size == -1 else -(-columns // self.group_size)
        packed = (columns, rows // 8) if self.kind == "awq" else (columns // 8, rows)
        return {"qweight": packed, "qzeros": (groups, rows // 8), "scales": (groups, rows)}

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        if any(part[name].dtype is not torch.int32 for part in parts for name in ("qweight", "qzeros")):
            raise BadInput(f"{self.kind} codes are not packed into int32")
        if any(
            "bias" in part and part["bias"].any() for part in parts
        ):  # zeros stand beside layers that have none
            raise BadInput(f"{self.kind} biases are there that config.json does not ask for")
        codes = torch.cat([self._codes(part["qweight"]) for part in parts])
        scales = torch.cat([part["scales"].float() for part in parts], 1)
        zeros = (8.0 - torch.cat([self._zeros(part["qzeros"]) for part in parts], 1)) * scales
        group = columns if self.group_size == -1 else self.group_size
        order = self._order(parts, columns, group)
        codes = codes if order is None else codes.index_select(1, order)
        size = next((size for size in reversed(GROUP_SIZES) if group % size == 0), None)
        if size is None:
            raise BadInput(
                f"one group of {columns} inputs is not read: they are no multiple of {GROUP_SIZES[0]}"
            )
        scales, zeros = (t.repeat_interleave(group // size, 0).to(self.quant.dtype) for t in (scales, zeros))
        codes = F.pad(codes, (0, len(scales) * size - columns))
        return int4_linear(
            [(codes, scales, zeros)], (len(codes), columns), size, bias, order, self.quant.kernel
        )

    def _codes(self, qweight: Tensor) -> Tensor:
        """The weight's integers, uint8 [out, in]."""
        if self.kind == "awq":
            return self._zeros(qweight).t().contiguous()
        return nibbles(qweight[..., None]).permute(1, 0, 2).flatten(1)

    def _zeros(self, qzeros: Tensor) -> Tensor:
        """The zero points, uint8 [groups, out]."""
        if self.kind == "awq":
            return nibbles(qzeros).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)
        return (nibbles(qzeros) + (self.layout == "gptq")) & 15

    def _order(self, parts: Sequence[Mapping[str, Tensor]], columns: int, group: int) -> Tensor | None:
        """The inputs in the order of their groups, None where they lie so."""
        found = [part["g_idx"].long() for part in parts if "g_idx" in part]
        in_place = torch.arange(columns, device=parts[0]["qweight"].device) // group
        if all(torch.equal(groups, in_place) for groups in found):
            return None
        sorted_groups, order = found[0].sort(stable=True)
        if any(not torch.equal(groups, found[0]) for groups in found) or len(found) < len(parts):
            raise BadInput("the groups (g_idx) differ between layers that are fused here")
        if not torch.equal(sorted_groups, in_place):
            raise BadInput(f"the groups (g_idx) are not of {group} inputs each")
        return order.int()
