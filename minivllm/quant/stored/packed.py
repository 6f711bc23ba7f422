"""Integer weights of checkpoints that are not AWQ's or GPTQ's of four bits: GPTQ of eight bits
(Frantar et al. 2022) and the formats of compressed-tensors (of the vLLM project, written by
llm-compressor).

All mean w = (q - z) * scale. quant=int8 computes with one symmetric scale for each output channel,
quant=int4 with four bits in groups. Other layouts have no kernel: they are converted while they are
read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import Shapes, StoredLayer
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8, int8_linear
from minivllm.quant.stored.int4 import StoredInt4, as_int4, unpacked


class StoredGPTQ8(StoredInt4):
    """GPTQ of eight bits: qweight int32 [in / 4, out], four inputs a word; see StoredFormat."""

    bits = 8
    quant: Int8  # type: ignore[assignment]

    def linear(self, layer: StoredLayer) -> nn.Module:
        """One symmetric scale for each output channel; see StoredFormat."""
        codes, scales = [], []
        for part in layer.parts:
            self.check(part)
            if not (self.zeros(part["qzeros"]) == 128).all():
                raise BadInput(
                    "gptq of 8 bits has zero points, which quant=int8 does not compute with"
                )
            codes.append((self.codes(part["qweight"]).short() - 128).to(torch.int8))
            scales.append(part["scales"][0])
        return int8_linear(
            torch.cat(codes),
            torch.cat(scales).to(self.quant.dtype),
            layer.bias,
            self.quant,
        )


class StoredCompressed:
    """Integers of compressed-tensors: `weight` int8, or `weight_packed` int32 along the inputs; see
    StoredFormat."""

    names: tuple[str, ...] = (
        *(
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
        ),
        *("input_scale", "input_zero_point", "output_scale"),
    )

    def __init__(self, settings: Mapping[str, Any], quant: Int4 | Int8) -> None:
        self.quant = quant
        scheme = compressed_scheme(settings)
        self.bits, self.packed = int(scheme["num_bits"]), scheme["packed"]
        self.group = int(scheme.get("group_size") or 0) if scheme.get("strategy") == "group" else 0
        self.marker = "weight_packed" if self.packed else "weight_scale"

    def shapes(self, rows: int, columns: int) -> Shapes:
        if self.packed:
            return {"weight_packed": (rows, columns * self.bits // 32), "weight_scale": None}
        return {"weight": (rows, columns), "weight_scale": None}

    def _integers(
        self, part: Mapping[str, Tensor], rows: int, columns: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [rows, columns] and zero points [groups, rows], uint8 counted from 0; and scales
        float32 [groups, rows]."""
        middle = 1 << (self.bits - 1)
        if self.packed:
            codes = unpacked(part["weight_packed"], self.bits)
        else:
            codes = (part["weight"].short() + middle).to(torch.uint8)
        in_place = torch.arange(columns, device=codes.device) // (self.group or columns)
        owners = part.get("weight_g_idx", in_place).long()
        # The library writes -1 where the activations have no order.
        if not (torch.equal(owners, in_place) or bool((owners == -1).any())):
            raise BadInput(
                "compressed-tensors weights in the order of activations (weight_g_idx) are not read"
            )
        scales = (
            part["weight_scale"].float().reshape(-1, max(1, part["weight_scale"].numel() // rows))
        )
        scales = scales.expand(rows, -1).t() if scales.shape[0] == 1 else scales.t()
        if self.group and scales.shape[0] * self.group != columns:
            raise BadInput(
                f"weight_scale has {scales.shape[0]} groups for {columns} inputs of {self.group} "
                "each"
            )
        zeros = torch.full_like(scales, middle, dtype=torch.uint8)
        if (stored := part.get("weight_zero_point")) is not None and stored.numel():
            if self.packed:
                zeros = unpacked(stored.t(), self.bits)[:, :rows]
            else:
                zeros = (stored.reshape(rows, -1).t().short() + middle).to(torch.uint8)
        return codes[:, :columns], zeros, scales

    def weight(self, part: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        codes, zeros, scales = self._integers(part, rows, columns)
        per = columns // scales.shape[0]
        zeros, scales = (t.float().repeat_interleave(per, 0).t() for t in (zeros, scales))
        return (codes.float() - zeros) * scales

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts, rows, columns, bias = layer
        pieces = [
            self._integers(part, count, columns) for part, count in zip(parts, rows, strict=True)
        ]
        codes = torch.cat([codes for codes, _, _ in pieces])
        zeros, scales = (torch.cat([piece[i] for piece in pieces], 1) for i in (1, 2))
        if isinstance(self.quant, Int4):
            return as_int4(codes, zeros, scales, bias, self.quant)
        if scales.shape[0] > 1 or not (zeros == 128).all():
            raise BadInput(
                "int8 weights have groups or zero points, which quant=int8 does not compute with"
            )
        integers = (codes.short() - 128).to(torch.int8)
        return int8_linear(integers, scales[0].to(self.quant.dtype), bias, self.quant)


def compressed_scheme(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of compressed-tensors' weights: num_bits, type, strategy, group_size,
    block_structure; and `packed`.

    Raises:
        BadInput: layers are kept in several ways, or the settings are none of theirs.
    """
    groups = settings.get("config_groups")
    nodes = [*groups.values()] if isinstance(groups, dict) else []
    schemes: list[Any] = [node.get("weights") if isinstance(node, dict) else None for node in nodes]
    if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
        raise BadInput(
            "quantization_config of compressed-tensors has no config_groups with weights"
        )
    if any(scheme != schemes[0] for scheme in schemes):
        raise BadInput(
            "the checkpoint keeps layers in several ways (config_groups), which is not read"
        )
    scheme = schemes[0]
    if type(scheme.get("num_bits")) is not int or not isinstance(
        scheme.get("group_size") or 0, int
    ):
        raise BadInput("quantization_config: num_bits and group_size must be whole numbers")
    return {**scheme, "packed": settings.get("format") == "pack-quantized"}
