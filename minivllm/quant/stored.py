"""Checkpoints that were quantised before: which layouts are read, and by which method.

Reading is lossless: the method computes with the integers and scales of the checkpoint, nothing is rounded to
another grid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import QuantMethod, Shapes, StoredFormat
from minivllm.quant.int4 import Int4
from minivllm.quant.int4_stored import AWQ, GPTQ
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.nf4 import NF4, single_scales


def stored_format(settings: Mapping[str, Any], quant: QuantMethod) -> StoredFormat:
    """The reader of a checkpoint's `quantization_config`.

    Raises:
        BadInput: no such layout is read, or `quant` is not the method that computes with it.
    """
    kind = _kind(settings)
    if kind not in _FORMATS:
        raise BadInput(
            f"the checkpoint is quantised as {kind}, which is not read; read are {', '.join(_FORMATS)}: "
            "use one of these or the 16-bit checkpoint"
        )
    option, reader = _FORMATS[kind]
    if quant.name != option:
        raise BadInput(
            f"the checkpoint is quantised as {kind}: choose quant={option} (not {quant.name}), "
            "or use the 16-bit checkpoint"
        )
    return reader(settings, quant)


def _kind(settings: Mapping[str, Any]) -> str:
    method = str(settings.get("quant_method", "bitsandbytes")).lower()
    if method != "bitsandbytes":
        return method
    four_bits = f"4-bit {settings.get('bnb_4bit_quant_type', 'fp4')}"
    return f"bitsandbytes {four_bits if settings.get('load_in_4bit') else '8-bit'}"


class StoredNF4:
    """NF4 as bitsandbytes saves it: `QuantState.as_dict(packed=True)` beside the codes.

    Where several parts become one layer, double quantisation is undone, because each part has blocks of scales
    of its own; the values stay the same.
    """

    described = "bitsandbytes NF4"
    marker = "weight.absmax"
    names: tuple[str, ...] = (
        "weight",
        *(f"weight.{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
        "weight.quant_state.bitsandbytes__nf4",
    )

    def __init__(self, settings: Mapping[str, Any], quant: NF4) -> None:
        self.quant = quant

    def shapes(self, rows: int, columns: int, found: Collection[str]) -> Shapes:
        """See StoredFormat; sizes depend on the block size, which only the quant state tells."""
        required = {"weight", "weight.absmax", "weight.quant_map", self.names[-1]}
        return dict.fromkeys(sorted(required | set(found)))

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        functional, device = self.quant.library.functional, parts[0]["weight"].device
        states = []
        for part, count in zip(parts, rows, strict=True):
            entries = {name: value for name, value in part.items() if name != "weight"}
            state = functional.QuantState.from_dict(entries, device)
            if tuple(state.shape) != (count, columns) or count * columns % state.blocksize:
                raise BadInput(
                    f"the checkpoint has NF4 weights {list(state.shape)} in blocks of {state.blocksize} "
                    f"where config.json asks for {[count, columns]}"
                )
            states.append(state)
        state = states[0]
        if len(states) > 1:
            if len({one.blocksize for one in states}) > 1:
                raise BadInput("the checkpoint has NF4 weights of different block sizes in one fused layer")
            scales = torch.cat([single_scales(functional, one) for one in states])
            shape = torch.Size((sum(rows), columns))
            state = functional.QuantState(scales, shape, state.code, state.blocksize, "nf4")
        state.dtype = self.quant.dtype
        codes = torch.cat([part["weight"].view(torch.uint8).view(-1) for part in parts])
        return self.quant.linear(codes.view(-1, 1), state, bias)


class StoredInt8:
    """LLM.int8 as bitsandbytes saves it: int8 rows beside their largest values."""

    described = "bitsandbytes 8-bit"
    marker = "SCB"
    names: tuple[str, ...] = ("weight", "SCB", "weight_format")

    def __init__(self, settings: Mapping[str, Any], quant: Int8Mixed) -> None:
        self.quant = quant

    def shapes(self, rows: int, columns: int, found: Collection[str]) -> Shapes:
        """See StoredFormat."""
        extra: Shapes = dict.fromkeys(found)
        return extra | {"weight": (rows, columns), "SCB": (rows,)}

    def linear(
        self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int], columns: int, bias: Tensor | None
    ) -> nn.Module:
        """See StoredFormat."""
        if any("weight_format" in part and part["weight_format"].any() for part in parts):
            raise BadInput("the checkpoint's int8 weights are not in rows: save it with a newer bitsandbytes")
        weight, maxima = (torch.cat([part[name] for part in parts]) for name in ("weight", "SCB"))
        return self.quant.linear(weight, maxima.float(), bias)


_FORMATS: dict[str, tuple[str, Callable[[Mapping[str, Any], Any], StoredFormat]]] = {
    "awq": (Int4.name, AWQ),
    "gptq": (Int4.name, GPTQ),
    "bitsandbytes 4-bit nf4": (NF4.name, StoredNF4),
    "bitsandbytes 8-bit": (Int8Mixed.name, StoredInt8),
}
