"""Layers of a GGUF file that a quantisation method computes with as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Linear
from minivllm.models.load.gguf.blocks import split_iq4_nl, split_q4_0, split_q4_1, split_q8_0
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint
from minivllm.models.load.gguf.formats import AS_STORED, BY_NAME
from minivllm.models.load.gguf.weights import GGUFWeights
from minivllm.models.load.names import part_names
from minivllm.quant.base import QuantMethod, Shapes
from minivllm.quant.int4 import Int4, int4_linear
from minivllm.quant.int8 import Int8, int8_group_linear
from minivllm.quant.iq4_nl import iq4_nl_linear
from minivllm.quant.nf4 import NF4
from minivllm.quant.stored.base import PLAIN

_GROUP = 32  # inputs of a scale, in all of them
_SPLITS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "Q4_0": split_q4_0,
    "Q4_1": split_q4_1,
    "Q8_0": split_q8_0,
    "IQ4_NL": split_iq4_nl,
}


class _Part(NamedTuple):
    """A matrix as it is stored."""

    codes: Tensor  # [rows, inputs]
    scales: Tensor  # float16 [rows, groups]
    minima: Tensor | None  # the same; None: the format has none


class PackedLayers:
    """The layers that need no conversion: those of the formats AS_STORED of the method.

    All have a float16 scale, and Q4_1 a float16 minimum, for 32 inputs. bfloat16 rounds both.
    float32 and float16 hold them, but for the value of code 8 that takes the minimum's place where
    the C++ kernels are not in use, which float16 rounds.

    Args:
        quant: the chosen method.
        reader: the file.
        model: its linear layers may be of these formats.

    Attributes:
        layers: by name.
        shapes: of their weights by name.
        error: the largest change of a weight by the rounding of scales, over the largest magnitude
            that its group can have; of the layers that are loaded.
    """

    quantizes_others = True  # as a 16-bit checkpoint's

    def __init__(self, quant: QuantMethod, reader: GGUFWeights, model: LlamaForCausalLM) -> None:
        self.quant, self.reader = quant, reader
        is_own = type(quant) in (Int4, Int8, NF4)
        forms = AS_STORED.get(quant.name, ()) if is_own else ()
        self.layers: dict[str, Linear] = {}
        self.shapes: Shapes = {}
        self.error = 0.0
        self._again = 0  # layers that the method quantises after their conversion
        tensors = reader.checkpoint.tensors
        for path, module in model.named_modules():
            if not isinstance(module, Linear) or module.exact or not quant.quantizes(path):
                continue
            names = [f"{part}.weight" for part in part_names(path, module)]
            if any(name not in tensors or tensors[name].dtype not in forms for name in names):
                self._again += 1
                continue
            self.layers[path] = module
            for name, rows in zip(names, module.parts.values(), strict=True):
                self.shapes[name] = (rows, module.in_features)

    @property
    def warning(self) -> str:
        """What becomes of all tensors, for the log and the record; complete after the last
        `load`."""
        dtype = str(self.quant.dtype).removeprefix("torch.")
        checkpoint = self.reader.checkpoint
        assert isinstance(checkpoint, GGUFCheckpoint)
        tensors = checkpoint.tensors
        converted = checkpoint.conversion(dtype, self.shapes)
        if self.layers:
            forms = " and ".join(sorted({tensors[name].dtype for name in self.shapes}))
            scales = (
                f", with scales rounded to {dtype} (which changes a weight by up to "
                f"{100 * self.error:.2g} % of its group's largest)"
            ) * bool(self.error)
            converted = (
                f"{len(self.layers)} layers of {forms} are computed as they are stored{scales}"
                f", in groups of {_GROUP} and at the file's levels, whatever quant says; other "
                f"tensors are {converted}"
            )
        return _note(checkpoint, converted, self.quant, self._again)

    def load(self, path: str, bias: Tensor | None, device: torch.device) -> nn.Module:
        """One of `layers`, on its device. `bias` is that of the whole layer, in the compute
        dtype."""
        module = self.layers[path]
        names = [f"{part}.weight" for part in part_names(path, module)]
        parts = [self._part(name, device) for name in names]
        if isinstance(self.quant, Int4):
            return self._int4(parts, bias)
        codes, scales = _joined(parts)
        kept = scales.to(self.quant.dtype)
        self._note_error(_ends(scales, 0, 1), _ends(kept, 0, 1))
        if isinstance(self.quant, NF4):
            return iq4_nl_linear(codes, kept, bias, self.quant)
        assert isinstance(self.quant, Int8)
        return int8_group_linear(codes, kept, bias, self.quant)

    def _part(self, name: str, device: torch.device) -> _Part:
        raw = self.reader.blocks(name).to(device)
        form = self.reader.checkpoint.tensors[name].dtype
        blocks = raw.view(-1, BY_NAME[form].bytes)
        codes, scales, *minima = (part.reshape(len(raw), -1) for part in _SPLITS[form](blocks))
        return _Part(codes, scales, minima[0] if minima else None)

    def _int4(self, parts: list[_Part], bias: Tensor | None) -> nn.Module:
        """A layer of parts that all have minima, or none. Beside others a part without minima has
        the value of code 0, -8 * scale. Where no kernel takes minima, the value of code 8 takes
        their place."""
        assert isinstance(self.quant, Int4)
        dtype = self.quant.dtype
        codes, scales = _joined(parts)
        shape, kept = (codes.shape[0], codes.shape[1]), scales.to(dtype)
        middle, zeros, stored = 8, None, _ends(scales, -8, 7)
        if any(part.minima is not None for part in parts):
            whole = [-8 * p.scales.float() if p.minima is None else p.minima.float() for p in parts]
            minima = torch.cat(whole)
            middle = 0 if self.quant.panels(codes.device, shape[1], _GROUP) else 8
            zeros = (minima + middle * scales.float()).to(dtype)
            stored = _ends(scales, 0, 15, minima)
        self._note_error(stored, _ends(kept, -middle, 15 - middle, zeros))
        piece = codes, kept.t().contiguous(), None if zeros is None else zeros.t().contiguous()
        return int4_linear([piece], shape, _GROUP, bias, self.quant, middle=middle)

    def _note_error(self, stored: Tensor, kept: Tensor) -> None:
        """Take the first and last levels of groups, as they are stored and after rounding, into
        account."""
        change = (kept - stored).abs().amax(0) / stored.abs().amax(0)
        self.error = max(self.error, float(change.nan_to_num(0.0, 0.0).max()))


def conversion_note(path: Path, quant: QuantMethod, again: int) -> str:
    """What becomes of a file of which a part alone is read: all of it is converted.

    Args:
        path: of the file.
        quant: the chosen method.
        again: layers that it quantises after their conversion.
    """
    checkpoint = GGUFCheckpoint.open(path)
    dtype = str(quant.dtype).removeprefix("torch.")
    return _note(checkpoint, checkpoint.conversion(dtype), quant, again)


def _note(checkpoint: GGUFCheckpoint, becomes: str, quant: QuantMethod, again: int) -> str:
    if again and quant.name not in PLAIN:
        becomes += f"; quant={quant.name} quantises {again} layers again"
    return f"{checkpoint.contents()}: {becomes}"


def _joined(parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a whole layer."""
    return torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])


def _ends(scales: Tensor, first: int, last: int, zeros: Tensor | None = None) -> Tensor:
    """Two levels of each group, scale * code + zero: float64 [2, rows, groups]."""
    levels = torch.stack([scales.double() * code for code in (first, last)])
    return levels if zeros is None else levels + zeros.double()
