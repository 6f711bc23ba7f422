"""What backends on flash-attention's kernels share: a step as ragged sequences, and the constraints
of those kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.batch import StepBatch
from minivllm.cache.eviction.policies import require_unscored
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.errors import BadInput

# FlashAttention-2, flash-attn's and torch's, reads pages of a multiple of so many tokens. torch's
# returns wrong values for other sizes, without an error.
PAGE = 256


@dataclass(frozen=True)
class Ragged:
    """Lengths of a step as flash-attention's kernels take them."""

    # int32 [R + 1], first key of each request among the keys of all requests in a row
    key_starts: Tensor
    max_query_len: int
    max_seq_len: int


def ragged(batch: StepBatch) -> Ragged:
    """The lengths of a batch's keys; `query_start_loc` has those of the queries."""
    starts = F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return Ragged(starts, max(batch.query_lens_host), max(batch.seq_lens_host))


def sequence_slots(batch: StepBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens that the requests hold, one request after another.

    Returns:
        Three int64 tensors [sum of seq_lens]: row of the batch, index in the request, slot of the
        cache.
    """
    count = sum(batch.seq_lens_host)
    rows = torch.repeat_interleave(batch.seq_lens, output_size=count)
    starts = batch.seq_lens.cumsum(0) - batch.seq_lens
    index = torch.arange(count, device=rows.device) - starts[rows]
    return (
        rows,
        index,
        batch.block_table[rows, index // block_size] * block_size + index % block_size,
    )


def window_size(spec: AttentionSpec) -> tuple[int, int]:
    """Keys to the left and to the right of a query's own, as the kernels count them; -1: all of
    them."""
    return (-1 if spec.window is None else spec.window - 1, 0)


def check_kernel(name: str, specs: Sequence[AttentionSpec], kv: KVCache) -> tuple[int, int]:
    """Check what all versions of flash-attention need.

    Returns:
        The GPU's compute capability.

    Raises:
        BadInput: device, dtype or head size is none of theirs; eviction goes by attention, which
            they do not return.
    """
    require_unscored(name, kv.layout.eviction)
    device = kv.parts[0][0].device
    if device.type != "cuda":
        raise BadInput(
            f"attention={name} needs an NVIDIA GPU; use attention=auto or attention=sdpa"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise BadInput(
            f"attention={name} needs a GPU of compute capability 8.0 or later; use attention=sdpa"
        )
    if kv.dtype not in (torch.float16, torch.bfloat16):
        raise BadInput(
            f"attention={name} computes in 16 bits only; use quant=bf16, or attention=sdpa"
        )
    if any(spec.head_dim % 8 or spec.head_dim > 256 for spec in specs):
        raise BadInput(
            f"attention={name} takes heads of a multiple of 8 up to 256; use attention=triton or "
            "attention=sdpa"
        )
    return capability
