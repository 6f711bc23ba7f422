"""Methods with one scale for each output, of the largest weight of its row."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class RowScaled:
    """A base class, beside Quantizer, of such methods.

    Attributes:
        over_ranks: the largest values of rows [out, 1] of which this process has a part of the
            inputs, from those of that part; None: it has all inputs.
    """

    over_ranks: Callable[[Tensor], Tensor] | None = None

    def largest(self, weight: Tensor) -> Tensor:
        """The largest magnitude of each row of a weight [out, in]: [out, 1], in its dtype."""
        largest = weight.abs().amax(1, keepdim=True)
        return largest if self.over_ranks is None else self.over_ranks(largest)
