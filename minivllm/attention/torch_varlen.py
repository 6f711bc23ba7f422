"""attention=torch_varlen: torch's varlen_attn, a FlashAttention kernel that comes with torch
itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from minivllm.attention.batch import StepBatch
from minivllm.attention.ragged import (
    PAGE,
    Ragged,
    check_kernel,
    ragged,
    sequence_slots,
    window_size,
)
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.errors import BadInput


@dataclass(frozen=True)
class VarlenPlan:
    """What the layers of one step share."""

    lengths: Ragged
    # int64 [keys], slots of the gathered keys; None: keys are read in place, or are all new.
    slots: Tensor | None


class TorchVarlenBackend:
    """One call for the whole ragged batch.

    Keys are read in place if torch takes block tables (2.12 and later), pages are a multiple of 256
    tokens and the cache is not compressed. Otherwise they are copied one sequence after another,
    for each query head where torch has no grouped queries (2.11).

    Raises:
        BadInput: see `check_kernel`; a layer has a soft cap.
    """

    name = "torch_varlen"

    def __init__(self, specs: Sequence[AttentionSpec], kv: KVCache) -> None:
        check_kernel(self.name, specs, kv)
        if any(spec.soft_cap is not None for spec in specs):
            raise BadInput(
                "attention=torch_varlen cannot apply this model's soft cap on scores; use "
                "attention=triton"
            )
        accepted = inspect.signature(varlen.varlen_attn).parameters
        self.grouped = "enable_gqa" in accepted
        self.paged = (
            "block_table" in accepted and kv.layout.block_size % PAGE == 0 and not kv.compressed
        )
        self.specs, self.kv = specs, kv
        self.library = f"torch {torch.__version__}, keys {'in place' if self.paged else 'gathered'}"
        self.counters = {"launches": 0, "tokens_gathered": 0}

    def prepare(self, batch: StepBatch) -> VarlenPlan:
        """Lengths, and the keys to copy. Prompts without cached tokens need no copy."""
        new = batch.query_lens_host == batch.seq_lens_host and not self.kv.compressed
        if self.paged or new:
            return VarlenPlan(ragged(batch), None)
        return VarlenPlan(ragged(batch), sequence_slots(batch, self.kv.layout.block_size)[2])

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan: VarlenPlan = batch.attention
        spec = self.specs[layer]
        self.kv.write(layer, batch.slot_mapping, k, v)
        given: dict[str, Any] = {}
        if self.paged:
            k, v = self.kv.parts[layer]
            # With paged keys, the kernel's own choice of splits sometimes gives NaN.
            given = {"block_table": batch.block_table, "seqused_k": batch.seq_lens, "num_splits": 1}
        elif plan.slots is not None:
            k, v = self.kv.gather_slots(layer, plan.slots)
            self.counters["tokens_gathered"] += len(plan.slots)
        if spec.num_heads != spec.num_kv_heads:
            if self.grouped:
                given["enable_gqa"] = True
            else:
                k, v = (
                    x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (k, v)
                )
        self.counters["launches"] += 1
        out = varlen.varlen_attn(
            *(q, k, v, batch.query_start_loc, plan.lengths.key_starts),
            *(plan.lengths.max_query_len, plan.lengths.max_seq_len),
            scale=spec.scale,
            window_size=window_size(spec),
            **given,
        )
        assert isinstance(out, Tensor)  # a tuple with further results
        return out
