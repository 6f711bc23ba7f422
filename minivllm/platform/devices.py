"""The devices that `runtime.device` names, and this machine's processor. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


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


def cpu_info(names: str) -> str:
    """What Linux says of the first processor; "" where it says nothing, and on other systems.

    Args:
        names: of the field, as it is called on different processors, such as "flags|Features".
    """
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return ""
    found = re.search(rf"^({names})[ \t]*:(.*)$", text, re.MULTILINE)
    return found.group(2).strip() if found else ""
