"""The layers of a checkpoint that were quantised before, read as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.models.checkpoint import StoredTensor
from minivllm.models.layers import Linear
from minivllm.models.weights import CheckpointWeights
from minivllm.quant.base import QuantMethod
from minivllm.quant.stored import stored_format


class Prequantized:
    """Finds them among a model's linear layers, checks their tensors' shapes, and reads them.

    Args:
        settings: `quantization_config` of the checkpoint's config.json.
        quant: the method asked for.
        reader: the checkpoint.
        linears: the model's linear layers by name.

    Raises:
        BadInput: the layout is not read, `quant` is not the method that computes with it or wants a quantised
            layer in 16 bits, or a tensor is missing or has another shape than config.json asks for.
    """

    layers: dict[str, Linear]  # those that the checkpoint quantises; the others are read as ever
    names: list[str]  # of their tensors, biases of the model aside
    warning: str

    def __init__(
        self,
        settings: Mapping[str, Any],
        quant: QuantMethod,
        reader: CheckpointWeights,
        linears: Mapping[str, Linear],
    ) -> None:
        self.format, self.reader = stored_format(settings, quant), reader
        self.layers = {path: module for path, module in linears.items() if self._holds(path, module)}
        for path in self.layers:
            if any(part in path for part in quant.skip):
                raise BadInput(f"quant.skip asks for {path} in 16 bits, but the checkpoint has it quantised")
        self.names = [name for path, module in self.layers.items() for name in self._check(path, module)]
        self.warning = (
            f"{len(self.layers)} layers were quantised before, as {self.format.described}: they are computed as "
            "they are stored, whatever block or group size quant names"
        )

    def load(self, path: str, bias: Tensor | None, device: torch.device) -> nn.Module:
        """One of `layers`, on its device; `bias` is that of the whole layer, in the compute dtype."""
        module = self.layers[path]
        parts = [
            {name: self.reader.read(prefix + name).to(device) for name in self._found(prefix, module)}
            for prefix in _prefixes(path, module)
        ]
        try:
            return self.format.linear(parts, list(module.parts.values()), module.in_features, bias)
        except BadInput as error:
            raise BadInput(f"{self.reader.checkpoint.folder}: {path}: {error}") from None

    def _holds(self, path: str, module: Linear) -> bool:
        """Whether the checkpoint quantises the layer; all of its parts or none."""
        tensors = self.reader.checkpoint.tensors
        held = [f"{prefix}{self.format.marker}" in tensors for prefix in _prefixes(path, module)]
        if any(held) and not all(held):
            parts = ", ".join(module.parts)
            raise BadInput(f"{path} is fused of {parts}, of which the checkpoint quantises only some")
        return any(held)

    def _check(self, path: str, module: Linear) -> list[str]:
        """The names of a layer's tensors, which are there in their shapes."""
        names = []
        for prefix, rows in zip(_prefixes(path, module), module.parts.values(), strict=True):
            found = self._found(prefix, module)
            for name, shape in self.format.shapes(rows, module.in_features, found).items():
                if name not in found:
                    raise BadInput(f"{self.reader.checkpoint.folder} lacks tensor {prefix}{name}")
                stored = found[name]
                if shape is not None and stored.shape != shape:
                    raise BadInput(
                        f"{stored.file}: tensor {prefix}{name} has shape {list(stored.shape)} where config.json "
                        f"asks for {list(shape)}"
                    )
                names.append(prefix + name)
        return names

    def _found(self, prefix: str, module: Linear) -> dict[str, StoredTensor]:
        """The tensors of one part by their short names; a bias only if the model has none there."""
        tensors = self.reader.checkpoint.tensors
        names = (name for name in self.format.names if name != "bias" or not module.has_bias)
        return {name: tensors[prefix + name] for name in names if prefix + name in tensors}


def _prefixes(path: str, module: Linear) -> Iterator[str]:
    """What the names of a part's tensors begin with."""
    beside = path.rpartition(".")[0]
    return (f"{beside}.{part}." if beside else f"{part}." for part in module.parts)
