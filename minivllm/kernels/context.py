"""What the construction of an engine's parts needs to know beside their knobs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minivllm.kernels.cpu.library import Kernels
from minivllm.parallel.ranks import ONE_RANK, Ranks


@dataclass(frozen=True)
class BuildContext:
    """Where an engine computes and with what, decided once for each engine.

    The constructor of a model, or of an attention backend, that takes an argument `context` gets
    this object."""

    device: torch.device
    kernels: Kernels | None = None  # C++ kernels of CPUs; None: not in use
    # Whether a request's results are to be independent of other requests in the batch.
    invariant: bool = False
    moe: str = "auto"  # how experts are multiplied: the knob runtime.moe
    ranks: Ranks = ONE_RANK  # the processes that each hold a part of the model
