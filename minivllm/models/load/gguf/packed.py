"""Layers of a GGUF file that a quantisation method computes with as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Linear
from minivllm.models.load.gguf.blocks import split_q4_0, split_q8_0
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint
from minivllm.models.load.gguf.formats import BY_NAME, FLOATS, QUANTIZED
from minivllm.models.load.gguf.weights import GGUFWeights
from minivllm.models.load.names import part_names
from minivllm.platform.untrusted import size
from minivllm.quant.base import QuantMethod, Shapes
from minivllm.quant.int4 import Int4, int4_linear
from minivllm.quant.int8 import Int8, int8_group_linear
from minivllm.quant.stored.base import PLAIN

_FORMS: dict[type, str] = {Int4: "Q4_0", Int8: "Q8_0"}
_GROUP = 32  # inputs of a scale, in both
# Formats whose every value a compute dtype holds, up to the 1 that is taken from Gemma's norms.
_HELD = {"float32": {*FLOATS, *QUANTIZED}, "float16": {"F16"}, "bfloat16": {"BF16"}}


class PackedLayers:
    """The layers that need no conversion: Q4_0 for quant=int4, Q8_0 for quant=int8.

    Both are integers with a float16 scale for 32 inputs, which quant.dtype=float16 and float32
    hold exactly; bfloat16 rounds the scales.

    Args:
        quant: the chosen method.
        reader: the file.
        model: its linear layers may be of that format.

    Attributes:
        layers: by name.
        shapes: of their weights by name.
        warning: what becomes of all tensors, for the log and the record.
    """

    quantizes_others = True  # as a 16-bit checkpoint's

    def __init__(self, quant: QuantMethod, reader: GGUFWeights, model: LlamaForCausalLM) -> None:
        self.quant, self.reader = quant, reader
        self.form = _FORMS.get(type(quant), "")
        self.layers: dict[str, Linear] = {}
        self.shapes: Shapes = {}
        again = 0  # layers that the method quantises after their conversion
        tensors = reader.checkpoint.tensors
        for path, module in model.named_modules():
            if not isinstance(module, Linear) or module.exact or not quant.quantizes(path):
                continue
            names = [f"{part}.weight" for part in part_names(path, module)]
            held = [name in tensors and tensors[name].dtype == self.form for name in names]
            again += not all(held)
            if all(held):
                self.layers[path] = module
                for name, rows in zip(names, module.parts.values(), strict=True):
                    self.shapes[name] = (rows, module.in_features)
        self.warning = self._described(again)

    def _described(self, again: int) -> str:
        """What becomes of the file's values, in words."""
        dtype = str(self.quant.dtype).removeprefix("torch.")
        checkpoint = self.reader.checkpoint
        assert isinstance(checkpoint, GGUFCheckpoint)
        sizes = [f"{name} ({size(n)})" for name, n in checkpoint.stored_bytes().items()]
        rest = {one.dtype for name, one in checkpoint.tensors.items() if name not in self.shapes}
        converted = (
            f"converted to {dtype} {'without rounding' if rest <= _HELD[dtype] else 'and rounded'}"
        )
        if self.layers:
            scales = f", with scales rounded to {dtype}" if dtype == "bfloat16" else ""
            converted = (
                f"{len(self.layers)} layers of {self.form} are computed as they are stored{scales}"
                f", in groups of {_GROUP} whatever quant says; other tensors are {converted}"
            )
        if again and self.quant.name not in PLAIN:
            converted += f"; quant={self.quant.name} quantises {again} layers again"
        return f"{checkpoint.folder.name} stores {', '.join(sizes)}: {converted}"

    def load(self, path: str, bias: Tensor | None, device: torch.device) -> nn.Module:
        """One of `layers`, on its device. `bias` is that of the whole layer, in the compute
        dtype."""
        module = self.layers[path]
        names = [f"{part}.weight" for part in part_names(path, module)]
        raw = torch.cat([self.reader.blocks(name).to(device) for name in names])
        shape = (len(raw), module.in_features)
        blocks = raw.view(-1, BY_NAME[self.form].bytes)
        codes, scales = (split_q4_0 if self.form == "Q4_0" else split_q8_0)(blocks)
        codes, scales = (
            codes.reshape(shape).contiguous(),
            scales.view(shape[0], -1).to(self.quant.dtype),
        )
        if isinstance(self.quant, Int4):
            scales = scales.t().contiguous()
            return int4_linear([(codes, scales, None)], shape, _GROUP, bias, self.quant)
        assert isinstance(self.quant, Int8)
        return int8_group_linear(codes, scales, bias, self.quant)
