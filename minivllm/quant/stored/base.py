"""Quantised checkpoints: which layouts are supported, and by which method.

Reading is lossless where a method computes with the integers and scales of the checkpoint: nothing
is rounded to another grid. Other layouts are converted to 16 or 32 bits while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.quant.base import QuantMethod, Shapes, StoredFormat, StoredLayer
from minivllm.quant.bnb import import_bitsandbytes
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.nf4 import NF4, single_scales
from minivllm.quant.plain import Plain
from minivllm.quant.stored.fp8 import StoredFP8
from minivllm.quant.stored.int4 import StoredInt4, group_size_of
from minivllm.quant.stored.packed import StoredCompressed, StoredGPTQ8, compressed_scheme

PLAIN = (
    "bf16",
    "fp16",
    "fp32",
)  # methods for checkpoints that have to be converted


def stored_kind(settings: Mapping[str, Any]) -> str:
    """The layout that a checkpoint's `quantization_config` names, in a few words."""
    method = str(settings.get("quant_method", "bitsandbytes")).lower()
    if method == "gptq" and settings.get("bits") == 8:
        by_channel = group_size_of(settings) == -1 and settings.get("sym") is True
        return "gptq of 8 bits" + ("" if by_channel else " in groups")
    if method == "compressed-tensors":
        return _compressed_kind(compressed_scheme(settings))
    if method != "bitsandbytes":
        return method
    four_bits = f"4-bit {settings.get('bnb_4bit_quant_type', 'fp4')}"
    return f"bitsandbytes {four_bits if settings.get('load_in_4bit') else '8-bit'}"


def _compressed_kind(scheme: Mapping[str, Any]) -> str:
    numbers = {"int": "int", "float": "fp"}.get(
        str(scheme.get("type", "int")), str(scheme.get("type"))
    )
    strategy = str(scheme.get("strategy"))
    shared = {"tensor": "", "channel": "", "group": " in groups", "block": " in blocks"}.get(
        strategy, f" by {strategy}"
    )
    if numbers == "int" and scheme["num_bits"] == 4:  # kernels have groups there
        shared = (
            ""
            if scheme["packed"] and strategy in ("channel", "group")
            else f" by {strategy}, not packed"
        )
    return f"compressed-tensors {numbers}{scheme['num_bits']}{shared}"


def stored_format(settings: Mapping[str, Any], quant: QuantMethod) -> StoredFormat:
    """The reader of a checkpoint's `quantization_config`.

    Raises:
        BadInput: no such layout is read, or `quant` is not the method that computes with it.
    """
    kind = stored_kind(settings)
    option, reader = _FORMATS.get(kind, (None, None))
    if reader is None:
        raise BadInput(
            f"the checkpoint is quantised as {kind}, which is not read; read are "
            f"{', '.join(_FORMATS)}: use one of these or the 16-bit checkpoint"
        )
    if option is None:
        if quant.name not in PLAIN:
            raise BadInput(
                f"the checkpoint is quantised as {kind}, which no option computes with as it is "
                f"stored: choose quant={', quant='.join(PLAIN)} (not {quant.name}), to which it "
                "is converted while it is read"
            )
        return Converted(reader(settings, quant), quant)
    if quant.name != option:
        raise BadInput(
            f"the checkpoint is quantised as {kind}: choose quant={option} (not {quant.name}), "
            "or use the 16-bit checkpoint"
        )
    return reader(settings, quant)


class Converted:
    """Layers that are computed in another layout than they are stored in; see StoredFormat.

    Args:
        stored: the stored layout, with a method `weight`: float32 [rows, columns] from the tensors
            of one part.
        quant: the method that computes the layers.
    """

    def __init__(self, stored: Any, quant: QuantMethod) -> None:
        self.stored, self.quant = stored, quant
        self.marker: str = stored.marker
        self.names: tuple[str, ...] = stored.names

    def shapes(self, rows: int, columns: int) -> Shapes:
        shapes: Shapes = self.stored.shapes(rows, columns)
        return shapes

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts, rows, columns, bias = layer
        weights = (
            self.stored.weight(part, count, columns)
            for part, count in zip(parts, rows, strict=True)
        )
        whole = torch.cat([weight.to(self.quant.dtype) for weight in weights])
        return self.quant.pack(whole, bias)


class StoredFP4:
    """FP4 as bitsandbytes saves it; see StoredFormat. There is no kernel for it here."""

    marker = "weight.absmax"
    required = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.quant_state.bitsandbytes__fp4",
    )
    names: tuple[str, ...] = (*required, "weight.nested_absmax", "weight.nested_quant_map")

    def __init__(self, settings: Mapping[str, Any], quant: Plain) -> None:
        self.functional = import_bitsandbytes("a checkpoint in fp4").functional

    def shapes(self, rows: int, columns: int) -> Shapes:
        return dict.fromkeys(self.required)

    def weight(self, part: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        entries = {name: value for name, value in part.items() if name != "weight"}
        state = self.functional.QuantState.from_dict(entries, part["weight"].device)
        if tuple(state.shape) != (rows, columns):
            raise BadInput(f"fp4 weights {list(state.shape)} are no layer {[rows, columns]}")
        state.dtype = torch.float32
        weight: Tensor = self.functional.dequantize_4bit(part["weight"], state)
        return weight


class StoredNF4:
    """NF4 as bitsandbytes saves it: `QuantState.as_dict(packed=True)` beside the codes.

    Where several parts become one layer, double quantisation is removed, because each part has its
    own blocks of scales. The values stay the same."""

    marker = "weight.absmax"
    required = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.quant_state.bitsandbytes__nf4",
    )
    names: tuple[str, ...] = (*required, "weight.nested_absmax", "weight.nested_quant_map")

    def __init__(self, settings: Mapping[str, Any], quant: NF4) -> None:
        self.quant = quant

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Names alone: sizes depend on the block size, which only the quant state has."""
        return dict.fromkeys(self.required)

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts, rows, columns, bias = layer
        functional, device, states = self.quant.library.functional, parts[0]["weight"].device, []
        for part, count in zip(parts, rows, strict=True):
            entries = {name: value for name, value in part.items() if name != "weight"}
            state = functional.QuantState.from_dict(entries, device)
            if tuple(state.shape) != (count, columns) or count * columns % state.blocksize:
                raise BadInput(
                    f"NF4 weights {list(state.shape)} in blocks of {state.blocksize} are no "
                    f"layer {[count, columns]}"
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
        return {"weight": (rows, columns), "SCB": (rows,)}

    def linear(self, layer: StoredLayer) -> nn.Module:
        parts = layer.parts
        if any("weight_format" in part and part["weight_format"].any() for part in parts):
            raise BadInput(
                "int8 weights are not stored by rows: save them with a newer bitsandbytes"
            )
        weight, maxima = (torch.cat([part[name] for part in parts]) for name in ("weight", "SCB"))
        return self.quant.linear(weight, maxima.float(), layer.bias)


# The option that computes with a layout as stored (None: the layout is converted), and the reader,
# by `stored_kind`.
_FORMATS: dict[str, tuple[str | None, Callable[[Mapping[str, Any], Any], Any]]] = {
    "awq": ("int4", StoredInt4),
    "gptq": ("int4", StoredInt4),
    "gptq of 8 bits": ("int8", StoredGPTQ8),
    "gptq of 8 bits in groups": (None, StoredGPTQ8),
    "bitsandbytes 4-bit nf4": ("nf4", StoredNF4),
    "bitsandbytes 4-bit fp4": (None, StoredFP4),
    "bitsandbytes 8-bit": ("int8_mixed", StoredInt8),
    "fp8": ("fp8", StoredFP8),
    "fbgemm_fp8": ("fp8", StoredFP8),
    "compressed-tensors fp8": ("fp8", StoredFP8),
    "compressed-tensors int4": ("int4", StoredCompressed),
    "compressed-tensors int8": ("int8", StoredCompressed),
    "compressed-tensors int8 in groups": (None, StoredCompressed),
}
