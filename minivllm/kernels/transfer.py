"""Copies between host and device without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: bytearray | NDArray[np.int32], device: torch.device, into: Tensor | None = None
) -> Tensor:
    """Copy to `device`, into a new tensor int32 [n] or an existing one, without a wait: a GPU
    copies from pinned memory, in the order of its stream."""
    host = torch.frombuffer(values, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    return (
        host.to(device, non_blocking=True) if into is None else into.copy_(host, non_blocking=True)
    )


class Download:
    """A copy of a tensor to the host, without a wait before `values()`. The tensor may be
    overwritten meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._arrived = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._values = tensor.tolist()

    def values(self) -> list[Any]:
        """The numbers of the tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._values = self._host.tolist()
        return self._values
