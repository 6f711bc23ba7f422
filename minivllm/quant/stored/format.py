"""The protocol of a stored format: how a checkpoint stores its quantised layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

# Shapes of a layer's stored tensors, None for any shape. A name is what follows the layer's own
# name: "weight", "qweight", ...
Shapes = dict[str, tuple[int, ...] | None]


class StoredFormat(Protocol):
    """How a checkpoint stores its quantised layers.

    A format without a kernel has `weight` in place of `linear`, see `Converted`."""

    marker: str  # the tensor that every quantised layer has
    names: tuple[str, ...]  # of the tensors that a quantised layer may have

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The tensors that a layer [rows, columns] must have."""

    def linear(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int],
        columns: int,
        bias: Tensor | None,
    ) -> nn.Module:
        """One layer from the tensors of its parts, which are stacked along the rows.

        Args:
            parts: tensors by name, on the layer's device.
            rows: number of rows of each part.
            columns: number of inputs.
            bias: [sum of rows] or None.

        Raises:
            BadInput: what is stored cannot be computed with.
        """
