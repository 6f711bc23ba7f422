"""The largest scores of rows, in an order that equal scores do not leave open."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row in descending order, and their token ids; of equal scores the
    smaller id comes first.

    So a row's first k tokens do not depend on `count`, which goes by the other rows of a step;
    torch.topk leaves the order of equal values open. Rows with NaN are in any order.

    Args:
        scores: float32 [R, vocab].
        count: how many of each row, 1 to vocab.

    Returns:
        float32 and int64 [R, count].
    """
    if count == scores.shape[1]:
        return _sorted(scores)
    values, ids = scores.topk(count + 1, dim=-1)
    cut = values[:, count - 1] == values[:, count]  # rows with equal scores on both sides
    values, ids = values[:, :count], ids[:, :count]
    if scores.device.type != "cpu":
        ids = torch.where(values > values[:, -1:], ids, _last_equal(scores, values))
    else:
        own, places, every = values.numpy(), ids.numpy(), scores.numpy()
        for row in cut.numpy().nonzero()[0]:
            last = own[row, -1]
            start = np.count_nonzero(own[row] > last)
            places[row, start:] = np.flatnonzero(every[row] == last)[: count - start]
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _sorted(scores: Tensor) -> tuple[Tensor, Tensor]:
    """See `largest`, of all tokens."""
    if scores.device.type != "cpu":
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # numpy sorts integers several times faster than torch sorts floats. The bits of floats are in
    # the order of their values once those of negative ones are turned; 0.0 makes -0.0 equal to 0.
    bits = (scores + 0.0).numpy().view(np.int32)
    descending = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    keys = np.sort(descending << 32 | np.arange(scores.shape[1]), axis=-1)
    ids = torch.from_numpy(keys & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def _last_equal(scores: Tensor, values: Tensor) -> Tensor:
    """The first tokens of each row that have its last value, each at a place of that value; found
    without waiting for the device.

    Args:
        scores: float32 [R, vocab].
        values: the largest of them in descending order, float32 [R, K].

    Returns:
        int64 [R, K]; any token where the value is larger.
    """
    last = values[:, -1:]
    above = (values > last).sum(-1, keepdim=True)
    wanted = torch.arange(1, values.shape[1] + 1, device=values.device) - above
    equal = (scores == last).cumsum(-1, dtype=torch.int32)
    found = torch.searchsorted(equal, wanted.clamp_(min=1).int())
    return found.clamp_(max=scores.shape[1] - 1)  # beyond it only with NaN
