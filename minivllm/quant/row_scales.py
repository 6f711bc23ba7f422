"""Scales, and methods with one scale for each output, of the largest weight of its row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def as_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales that are not negative, float32, in the dtype that they are stored in, above 0.

    Below the normal numbers of float16 they are rounded up: rounded down, the largest weight would
    need a larger integer than there is; clamped there (6.1e-5), small weights would vanish."""
    least = torch.finfo(dtype).tiny
    if dtype is torch.float16:
        step = 2.0**-24  # between its subnormal numbers
        raised = (scale / step).ceil_().clamp_(min=1) * step
        scale = torch.where(scale < least, raised, scale)
        least = step
    return scale.clamp(min=least).to(dtype)


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
