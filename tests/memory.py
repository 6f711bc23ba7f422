"""What memory the process has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor


def in_large_pages(tensors: Sequence[Tensor]) -> int:
    """Bytes in pages of 2 MB of the memory that the tensors lie in."""
    begin = min(tensor.data_ptr() for tensor in tensors)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
    large = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            low, _, high = word.partition("-")
            inside = max(0, min(end, int(high, 16)) - max(begin, int(low, 16)))
        elif word == "AnonHugePages:":
            large += min(inside, int(rest.split()[0]) * 1024)
    return large
