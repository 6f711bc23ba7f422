"""The protocol of a stored format: how a checkpoint keeps the layers that it has quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

# Shapes of a layer's stored tensors, None for any shape. A name is what follows the layer's own
# name: "weight", "qweight", ...
Shapes = dict[str, tuple[int, ...] | None]


class StoredFormat(Protocol):
    """How a checkpoint keeps the linear layers that it has quantised.

    One that no method computes with as it is stored has `weight` in place of `linear`, see
    `Converted`.
    """

    marker: str  # the tensor by which a quantised layer is recognised
    names: tuple[str, ...]  # of all tensors that a quantised layer may have

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The tensors that a layer [rows, columns] must have."""

    def linear(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int],
        columns: int,
        bias: Tensor | None,
    ) -> nn.Module:
        """One layer out of the tensors of its parts, which lie one below the other.

        Args:
            parts: by name, on the layer's device.
            rows: of each part.
            columns: inputs.
            bias: [sum of rows] or None.

        Raises:
            BadInput: what is stored cannot be computed with.
        """
