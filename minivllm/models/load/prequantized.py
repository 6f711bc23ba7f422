"""Layers that the checkpoint has quantised, read as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Linear
from minivllm.models.load.names import part_names
from minivllm.models.load.weights import CheckpointWeights
from minivllm.quant.base import QuantMethod, Shapes, StoredLayer
from minivllm.quant.stored.base import PLAIN, stored_format, stored_kind


class Prequantized:
    """The quantised layers of a checkpoint, found among a model's linear layers.

    Args:
        settings: `quantization_config` of the checkpoint's config.json.
        quant: the chosen method.
        reader: the checkpoint.
        model: its linear layers may be quantised in the checkpoint.

    Attributes:
        layers: quantised layers by name; other layers are read as floats.
        shapes: shapes of their tensors by name, without the model's biases.

    Raises:
        BadInput: the layout is not read, `quant` is not the method that computes with it or wants a
            quantised layer in 16 bits, or only a part of a fused layer is quantised.
    """

    quantizes_others = False  # a layer that the checkpoint has in 16 bits stays so

    def __init__(
        self,
        settings: Mapping[str, Any],
        quant: QuantMethod,
        reader: CheckpointWeights,
        model: LlamaForCausalLM,
    ) -> None:
        self.format, self.reader = stored_format(settings, quant), reader
        self.layers: dict[str, Linear] = {}
        self.shapes: Shapes = {}
        tensors, tied = reader.checkpoint.tensors, model.config.tie_word_embeddings
        for path, module in model.named_modules():
            if not isinstance(module, Linear) or (tied and path == "lm_head"):
                continue
            parts = part_names(path, module)
            held = [f"{part}.{self.format.marker}" in tensors for part in parts]
            if any(held) and not all(held):
                what = ", ".join(module.parts)
                raise BadInput(
                    f"{path} is fused of {what}, of which the checkpoint quantises only some"
                )
            if any(held) and any(entry in path for entry in quant.skip):
                raise BadInput(
                    f"quant.skip asks for {path} in 16 bits, but the checkpoint has it quantised"
                )
            if not any(held):
                continue
            self.layers[path] = module
            own = {"bias"} if module.has_bias else set()  # read with the model's other floats
            for part, rows in zip(parts, module.parts.values(), strict=True):
                required = self.format.shapes(rows, module.in_features)
                names = {name for name in self.format.names if f"{part}.{name}" in tensors} - own
                self.shapes |= {
                    f"{part}.{name}": required.get(name) for name in names.union(required)
                }
        computed = (
            f"they are converted to quant={quant.name}, and take its memory"
            if quant.name in PLAIN
            else "they are computed as they are stored, whatever levels, block or group size quant "
            "names"
        )
        self.warning = (
            f"{len(self.layers)} layers were quantised before, as {stored_kind(settings)}: "
            f"{computed}"
        )

    def load(self, path: str, bias: Tensor | None, device: torch.device) -> nn.Module:
        """One of `layers`, on its device. `bias` is that of the whole layer, in the compute
        dtype."""
        module = self.layers[path]
        names = [
            {
                name: f"{part}.{name}"
                for name in self.format.names
                if f"{part}.{name}" in self.shapes
            }
            for part in part_names(path, module)
        ]
        parts = [
            {name: self.reader.read(full).to(device) for name, full in part.items()}
            for part in names
        ]
        try:
            rows = list(module.parts.values())
            return self.format.linear(StoredLayer(parts, rows, module.in_features, bias))
        except BadInput as error:
            raise BadInput(f"{self.reader.checkpoint.folder}: {path}: {error}") from None
