"""The devices that `runtime.device` names. Torch-free."""

from __future__ import annotations


def device_indices(device: str) -> list[int]:
    """The numbers of GPUs that a device names: "cuda" is 0, "cuda:1" is 1, "cuda:0-2,5" are 0, 1, 2
    and 5; "auto" is 0."""
    indices: list[int] = []
    for part in device.partition(":")[2].split(","):
        first, _, last = part.partition("-")
        indices += range(int(first or 0), int(last or first or 0) + 1)
    return list(dict.fromkeys(indices))


def devices_of_ranks(device: str, size: int) -> list[str]:
    """The device of each of `size` ranks of one machine: the GPUs that `runtime.device` names, or
    the first ones."""
    if size == 1 or not device.startswith("cuda"):
        return [device] * size
    named = device_indices(device) if ":" in device else range(size)
    return [f"cuda:{index}" for index in named]
