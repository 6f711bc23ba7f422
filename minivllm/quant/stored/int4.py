"""AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022) checkpoints of four bits, for quant=int4.

Both keep eight codes in an int32, `qweight`, beside integer zero points, `qzeros`, packed in the
same way, and `scales` [groups, out]: w = (q - z) * scale. With zero = (8 - z) * scale that is the
form that Int4Linear computes.

AWQ's "gemm" layout: qweight [in, out / 8], eight outputs an int32, the even ones in its low half.
GPTQ's: qweight [in / 8, out], eight inputs an int32 in their order, and zero points less one, but
not in "gptq_v2". With `desc_act` its inputs are in groups by `g_idx`: they are sorted at loading,
as the activations are then at each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.quant.base import Shapes, StoredLayer
from minivllm.quant.int4 import GROUP_SIZES, Int4, int4_linear
from minivllm.quant.kernels.int4 import nibbles

_LAYOUTS = {"awq": ("version", ["gemm"]), "gptq": ("checkpoint_format", ["gptq", "gptq_v2"])}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight outputs in an int32 of AWQ


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The integers of int32 [..., n], the first in the lowest bits: uint8 [..., n * 32 / bits], for
    4 or 8 bits."""
    return nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)


def group_size_of(settings: Mapping[str, Any]) -> int:
    """Inputs that share a scale; -1 for all. Raises BadInput for a value that is no number."""
    size = settings.get("group_size", 128)
    if type(size) is not int:
        raise BadInput(f"quantization_config: group_size={size!r} must be a whole number")
    return size


def as_int4(
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    quant: Int4,
    group: int | None = None,
    order: Tensor | None = None,
) -> nn.Module:
    """The layer of (q - z) * scale.

    Args:
        codes: uint8 [out, in], inputs in the order of their groups.
        zeros, scales: uint8 and float32 [groups, out].
        bias: [out], or None.
        quant: has the dtype and the kernel.
        group: inputs that share a scale; None: the inputs divided by the number of scales.
        order: of the inputs, int32 [in]; None where they are not sorted.
    """
    columns = codes.shape[1]
    group = group or columns // len(scales)
    size = next((size for size in reversed(GROUP_SIZES) if group % size == 0), None)
    if size is None:
        raise BadInput(
            f"one group of {columns} inputs is not read: they are no multiple of {GROUP_SIZES[0]}"
        )
    shifted = (8.0 - zeros) * scales
    scales, shifted = (
        t.repeat_interleave(group // size, 0).to(quant.dtype) for t in (scales, shifted)
    )
    codes = F.pad(codes, (0, len(scales) * size - columns))
    piece = (codes, scales, shifted if bool(shifted.any()) else None)
    return int4_linear([piece], (len(codes), columns), size, bias, quant, order)


class StoredInt4:
    """Weights of four bits that GPTQ or AWQ stored, with scales and zeros of groups."""

    marker = "qweight"
    names: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx", "bias")
    bits = 4

    def __init__(self, settings: Mapping[str, Any], quant: Int4) -> None:
        self.kind, self.quant = str(settings["quant_method"]).lower(), quant
        key, known = _LAYOUTS[self.kind]
        self.layout = str(settings.get(key) or settings.get("format") or known[0]).lower()
        self.group_size, self.symmetric = group_size_of(settings), settings.get("sym") is True
        groups_fit = self.group_size == -1 or (
            self.group_size > 0 and self.group_size % GROUP_SIZES[0] == 0
        )
        bits, zeros = settings.get("bits", 4), settings.get("zero_point", True)
        if bits != self.bits or self.layout not in known or not zeros or not groups_fit:
            raise BadInput(
                f"the checkpoint is {self.kind} with bits={bits}, {key}={self.layout}, "
                f"group_size={self.group_size}, zero_point={zeros}; read are 4 bits, "
                f"{' and '.join(known)}, groups of -1 or a multiple of {GROUP_SIZES[0]}, and "
                "zero points"
            )

    def shapes(self, rows: int, columns: int) -> Shapes:
        groups, per = (
            1 if self.group_size == -1 else -(-columns // self.group_size),
            32 // self.bits,
        )
        packed = (columns, rows // per) if self.kind == "awq" else (columns // per, rows)
        return {"qweight": packed, "qzeros": (groups, rows // per), "scales": (groups, rows)}

    def check(self, part: Mapping[str, Tensor]) -> None:
        """Raise BadInput for what no layer of this layout holds."""
        if any(part[name].dtype is not torch.int32 for name in ("qweight", "qzeros")):
            raise BadInput(f"{self.kind} codes are not packed into int32")
        if "bias" in part and part["bias"].any():  # layers without bias may have one of zeros
            raise BadInput(f"{self.kind} biases are there that config.json does not ask for")

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts, columns = layer.parts, layer.columns
        for part in parts:
            self.check(part)
        codes = torch.cat([self.codes(part["qweight"]) for part in parts])
        scales = torch.cat([part["scales"].float() for part in parts], 1)
        zeros = torch.cat([self.zeros(part["qzeros"]) for part in parts], 1)
        group = columns if self.group_size == -1 else self.group_size
        order = self._order(parts, columns, group)
        codes = codes if order is None else codes.index_select(1, order)
        return as_int4(codes, zeros, scales, layer.bias, self.quant, group, order)

    def weight(self, part: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        self.check(part)
        device = part["qweight"].device
        groups = torch.arange(columns, device=device) // (
            columns if self.group_size == -1 else self.group_size
        )
        groups = part["g_idx"].long() if "g_idx" in part else groups
        zeros, scales = self.zeros(part["qzeros"]).float(), part["scales"].float()
        if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise BadInput(f"the groups (g_idx) are not of {len(scales)}")
        return (self.codes(part["qweight"]).float() - zeros[groups].t()) * scales[groups].t()

    def codes(self, qweight: Tensor) -> Tensor:
        """The weight's integers, uint8 [out, in]."""
        if self.kind == "awq":
            return self.zeros(qweight).t().contiguous()
        return unpacked(qweight[..., None], self.bits).permute(1, 0, 2).flatten(1)

    def zeros(self, qzeros: Tensor) -> Tensor:
        """The zero points, uint8 [groups, out].

        GPTQ's first format stores them less one, the second as they are, and some files name the
        wrong format. Where the file says that it is symmetric, its zero points can only be the
        middle, which shows the format."""
        if self.kind == "awq":
            return nibbles(qzeros).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)
        stored, middle = unpacked(qzeros, self.bits), 1 << (self.bits - 1)
        less_one = self.layout == "gptq"
        if self.symmetric:
            points = stored.unique().tolist()
            if points not in ([middle - 1], [middle]):
                raise BadInput(
                    f"gptq says sym: true, but zero points are {points[:4]}, not all {middle - 1} "
                    f"or all {middle}"
                )
            less_one = points == [middle - 1]
        return (stored + less_one) & (2**self.bits - 1)

    def _order(
        self, parts: Sequence[Mapping[str, Tensor]], columns: int, group: int
    ) -> Tensor | None:
        """The inputs in the order of their groups; None where they are in this order."""
        owners = [part["g_idx"].long() for part in parts if "g_idx" in part]
        in_place = torch.arange(columns, device=parts[0]["qweight"].device) // group
        if all(torch.equal(groups, in_place) for groups in owners):
            return None
        sorted_groups, order = owners[0].sort(stable=True)
        if any(not torch.equal(groups, owners[0]) for groups in owners) or len(owners) < len(parts):
            raise BadInput("the groups (g_idx) differ between layers that are fused here")
        if not torch.equal(sorted_groups, in_place):
            raise BadInput(f"the groups (g_idx) are not of {group} inputs each")
        return order.int()
