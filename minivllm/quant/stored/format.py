"""The protocol of a stored format: how a checkpoint stores its quantised layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

# Shapes of a layer's stored tensors, None for any shape. A name is what follows the layer's own
# name: "weight", "qweight", ...
Shapes = dict[str, tuple[int, ...] | None]


class StoredLayer(NamedTuple):
    """One linear layer as it is stored, in parts that are stacked along the rows."""

    parts: Sequence[Mapping[str, Tensor]]  # the tensors of each by name, on the layer's device
    rows: Sequence[int]  # of each part
    columns: int  # number of inputs
    bias: Tensor | None  # [sum of rows]


class StoredFormat(Protocol):
    """How a checkpoint stores its quantised layers.

    A format without a kernel has `weight` in place of `linear`, see `Converted`."""

    marker: str  # the tensor that every quantised layer has
    names: tuple[str, ...]  # of the tensors that a quantised layer may have

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The tensors that a layer [rows, columns] must have."""

    def linear(self, layer: StoredLayer) -> nn.Module:
        """The module that multiplies with a layer. Raises BadInput where what is stored cannot be
        computed with."""
