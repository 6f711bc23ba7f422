"""One kernel on one shape beside torch's own operations, and what all cases share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.kernels.cpu import library
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.config import ModelConfig

DTYPE = torch.bfloat16
ITEM = 2  # bytes of a number
MOST_COPIES = 64  # of what takes long to make; small activations have as many as it takes
_DISTINCT = 1 << 20  # random numbers, which are repeated to fill what is larger


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    call: Callable[[int], Tensor]  # the i-th copy of the inputs, modulo their number


@dataclass(frozen=True)
class Case:
    """A kernel, a shape, and the least that it has to do.

    Args:
        kernel: what is computed, e.g. "linear int8".
        part: on what, e.g. "gate_up_proj 6144 x 1024".
        rows: tokens, or sequences.
        ours: the kernel. May overwrite its inputs, so what it returns for a copy counts the first
            time only.
        theirs: torch's operations for the same; None where there is no other.
        bytes: that a call has to move, inputs and outputs once.
        operations: of its matrix products, a multiply and an add being two.
        copies: of the inputs, which calls go through in turn.
        tolerance: largest accepted difference of the outputs, relative in the Euclidean norm.
        matrix_dtype: of the products.
        seen: what is compared, given the copy's number and what the call returned: that itself, or
            also what it wrote.
    """

    kernel: str
    part: str
    rows: int
    ours: Side
    theirs: Side | None
    bytes: float
    operations: float
    copies: int
    tolerance: float = 2 * torch.finfo(DTYPE).eps
    matrix_dtype: str = "bfloat16"
    seen: Callable[[int, Tensor], Tensor] = lambda i, out: out


@dataclass(frozen=True)
class Setting:
    """Where and on what shapes.

    Args:
        model: whose shapes.
        device: where.
        triton: Triton's kernels; else the C++ ones.
        cache_bytes: of the last cache before the memory.
        rows: tokens of a product, sequences that decode.
        contexts: tokens that a sequence has.
        drafts: draft tokens of a sequence that are verified at once; 0 leaves verification out.
        formats: of weights: bf16, int8, int4, nf4; w8a8 and w4a8 are int8 and int4 with activations
            in 8 bits.
    """

    model: ModelConfig
    device: torch.device
    triton: bool
    cache_bytes: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    drafts: int
    formats: tuple[str, ...]

    @property
    def kernels(self) -> Kernels | None:
        """The C++ kernels, where these are measured."""
        return library.choose("off" if self.triton else "on", self.device)[0]

    def copies(self, size: float) -> int:
        """How many inputs of `size` bytes are twice the cache: when a copy's turn comes it has left
        the cache."""
        return max(1, math.ceil(2 * self.cache_bytes / size))

    def is_from_memory(self, case: Case) -> bool:
        """Whether a case has as many copies as that takes."""
        return case.copies * case.bytes >= 2 * self.cache_bytes

    def random(self, *shape: int) -> Tensor:
        """Standard normal bfloat16 numbers."""
        count = math.prod(shape)
        some = torch.randn(min(count, _DISTINCT), device=self.device).to(DTYPE)
        return some.repeat(math.ceil(count / len(some)))[:count].view(shape)
