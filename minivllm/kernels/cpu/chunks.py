"""Memory that packed weights share, in pages of 2 MB.

A weight with memory of its own has pages of 4 KB at both ends, up to the next multiple of 2 MB, and
a product of one row waits for a translation at each of these pages."""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 26  # bytes; weights of this size or more stay where they are: their ends count little
_ALIGNED = 64  # bytes
_lock = threading.Lock()
# The chunk that was begun last, while a weight needs it, and the bytes of it that are used.
_last: weakref.ref[mmap.mmap] | None = None
_used = 0


def new_memory(size: int, advise: Callable[[Tensor], object]) -> mmap.mmap:
    """Memory that is nobody else's, from the start of a page on.

    Args:
        size: bytes, at least 1.
        advise: asks for pages of 2 MB for a tensor.
    """
    memory = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    advise(torch.frombuffer(memory, dtype=torch.uint8))
    return memory


def gathered(pieces: Sequence[Tensor], advise: Callable[[Tensor], object]) -> Tensor:
    """The pieces of a weight as one tensor, in memory that it shares with other weights where it is
    small.

    Args:
        pieces: uint8 [panels, bytes] on the CPU.
        advise: asks for pages of 2 MB for a tensor.
    """
    rows, width = sum(len(piece) for piece in pieces), pieces[0].shape[1]
    if rows * width >= CHUNK:
        whole = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
        advise(whole)
        return whole
    return torch.cat(list(pieces), out=_empty((rows, width), advise))


def _empty(shape: tuple[int, ...], advise: Callable[[Tensor], object]) -> Tensor:
    """Memory of a chunk as uint8; a chunk is freed with the last tensor in it."""
    global _last, _used
    size = math.prod(shape)
    with _lock:
        chunk = None if _last is None else _last()
        if chunk is None or _used + size > CHUNK:
            chunk = new_memory(CHUNK, advise)
            _last, _used = weakref.ref(chunk), 0
        begin = _used
        _used += -(-size // _ALIGNED) * _ALIGNED
    return torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=begin).view(shape)
