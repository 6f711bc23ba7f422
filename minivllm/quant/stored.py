"""Checkpoints that were quantised before: which layouts are read, and by which method.

Reading is lossless: the method computes with the integers and scales of the checkpoint, nothing is rounded to
another grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import QuantMethod, Shapes, StoredFormat
from minivllm.quant.int4_stored import StoredInt4
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.nf4 import NF4, single_scales


def stored_kind(settings: Mapping[str, Any]) -> str:
    """What a checkpoint's `quantization_config` says it is, in a few words."""
    method = str(settings.get("quant_method", "bitsandbytes")).lower()
    if method != "bitsandbytes":
        return method
    four_bits = f"4-bit {settings.get('bnb_4bit_quant_type', 'fp4')}"
    return f"bitsandbytes {four_bits if settings.get('load_in_4bit') else '8-bit'}"


def stored_format(settings: Mapping[str, Any], quant: QuantMethod) -> StoredFormat:
    """The reader of a checkpoint's `quantization_config`.

    Raises:
        BadInput: no such layout is read, or `quant` is not the method that computes with it.
    """
    kind = stored_kind(settings)
    option, reader = _FORMATS.get(kind, (None, None))
    if reader is None:
        raise BadInput(
            f"the checkpoint is quantised as {kind}, which is not read; read are {', '.join(_FORMATS)}: "
            "use one of these or the 16-bit checkpoint"
        )
    if quant.name != option:
        raise BadInput(
            f"the checkpoint is quantised as {kind}: choose quant={option} (not {quant.name}), "
            "or use the 16-bit checkpoint"
        )
    return reader(settings, quant)


class StoredNF4:
    """NF4 as bitsandbytes saves it: `QuantState.as_dict(packed=True)` beside the codes.

    Where several parts become one layer, double quantisation is undone, because each part has blocks of scales
    of its own; the values stay the same.
    """

    marker = "weight.absmax"
    required = ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4")
    names: tuple[str, ...] = (*required, "weight.nested_absmax", "weight.nested_quant_map")

    def __init__(self, settings: Mapping[str, Any], quant: NF4) -> None:
        self.quant = quant

    def shapes(self, rows: int, columns: int) -> Shapes:
        """See StoredFormat; sizes depend on the block size, which only the quant state tells."""
        return dict.fromkeys(self.required)

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        functional, device, states = self.quant.library.functional, parts[0]["weight"].device, []
        for part, count in zip(parts, rows, strict=True):
            entries = {name: value for name, value in part.items() if name != "weight"}
            state = functional.QuantState.from_dict(entries, device)
            if tuple(state.shape) != (count, columns) or count * columns % state.blocksize:
                raise BadInput(
                    f"NF4 weights {list(state.shape)} in blocks of {state.blocksize} are no layer {[count, columns]}"
                )
            states.append(state)
        if len({state.blocksize for state in states}) > 1:
            raise BadInput("NF4 weights of different block sizes are in one fused layer")
        state = states[0]
        if len(states) > 1:
            scales = torch.cat([single_scales(functional, one) for one in states])
            shape = torch.Size((sum(rows), columns))
            state = functional.QuantState(scales, shape, state.code, state.blocksize, "nf4")
        state.dtype = self.quant.dtype
        codes = torch.cat([part["weight"].view(torch.uint8).view(-1) for part in parts])
        return self.quant.linear(codes.view(-1, 1), state, bias)


class StoredInt8:
    """LLM.int8 as bitsandbytes saves it: int8 rows beside their largest values."""

    marker = "SCB"
    names: tuple[str, ...] = ("weight", "SCB", "weight_format")

    def __init__(self, settings: Mapping[str, Any], quant: Int8Mixed) -> None:
        self.quant = quant

    def shapes(self, rows: int, columns: int) -> Shapes:
        """See StoredFormat."""
        return {"weight": (rows, columns), "SCB": (rows,)}

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        if any("weight_format" in part and part["weight_format"].any() for part in parts):
            raise BadInput("int8 weights are not stored by rows: save them with a newer bitsandbytes")
        weight, maxima = (torch.cat([part[name] for part in parts]) for name in ("weight", "SCB"))
        return self.quant.linear(weight, maxima.float(), bias)


_FORMATS: dict[str, tuple[str, Callable[[Mapping[str, Any], Any], StoredFormat]]] = {
    "awq": ("int4", StoredInt4),
    "gptq": ("int4", StoredInt4),
    "bitsandbytes 4-bit nf4": ("nf4", StoredNF4),
    "bitsandbytes 8-bit": ("int8_mixed", StoredInt8),
}
