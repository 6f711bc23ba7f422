"""On how many GPUs a peer computes, and how."""

from __future__ import annotations

from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.platform.devices import device_indices


def degrees(config: Config) -> tuple[int, int]:
    """The tensor and the data parallel degree: those of `parallel`; where it leaves both at 1, a
    rank for each GPU that `runtime.device` names.

    Raises:
        BadInput: `runtime.device` names another number of GPUs.
    """
    tensor, replicas = config.parallel.tensor, config.parallel.replicas
    device = config.runtime.device
    named, wanted = len(device_indices(device)), tensor * replicas
    if wanted == 1:
        return named, 1
    if ":" in device and named != wanted:
        raise BadInput(
            f"parallel.tensor={tensor} with parallel.replicas={replicas} takes {wanted} GPUs, and "
            f"runtime.device={device} names {named}"
        )
    return tensor, replicas
