"""The runner: a plan becomes tensors, the tensors go through the model, logits come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend
from minivllm.cache.eviction import Eviction
from minivllm.engine.step import ScheduledRequest, StepBatch


class CausalLM(Protocol):
    """What the runner asks of a model."""

    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm: [T, hidden]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""


class Runner:
    """Holds model, attention backend and the geometry of the cache.

    Args:
        model: gives hidden states and logits.
        attention: the backend, which holds the cache's tensors.
        block_size: tokens a cache block.
        device: where the model runs.
        eviction: says which queries' attention is asked for.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        block_size: int,
        device: torch.device,
        eviction: Eviction | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.block_size = block_size
        self.device = device
        self.eviction = eviction if eviction is not None and eviction.scored else None

    def prepare(self, scheduled: Sequence[ScheduledRequest], all_logits: bool = False) -> StepBatch:
        """Tensors of one step.

        Args:
            scheduled: each request's share, its cache blocks already given.
            all_logits: logits of every token, not only of each request's last known one.
        """
        size = self.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        logit_rows: list[int] = []
        tables = [part.request.block_table.blocks for part in scheduled]
        seq_lens = tuple(part.end - part.request.num_evicted_tokens for part in scheduled)
        width = max(-(-length // size) for length in seq_lens)
        for part, blocks in zip(scheduled, tables, strict=True):
            request = part.request
            if part.num_tokens == 1:  # decoding: by far the most frequent case
                position = part.start
                token_ids.append(request.token_ids[position])
                positions.append(position)
                index = position - request.num_evicted_tokens
                slots.append(blocks[index // size] * size + index % size)
            else:
                token_ids.extend(request.token_ids[part.start : part.end])
                span = range(part.start, part.end)
                positions.extend(span)
                held = range(part.start - request.num_evicted_tokens, part.end - request.num_evicted_tokens)
                slots.extend([blocks[index // size] * size + index % size for index in held])
            if all_logits or request.params.prompt_logprobs is not None:
                logit_rows.extend(range(starts[-1], len(token_ids)))
            elif part.samples:
                logit_rows.append(len(token_ids) - 1)
            starts.append(len(token_ids))
        padded = [blocks[:width] + [0] * (width - len(blocks)) for blocks in tables]

        def tensor(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        batch = StepBatch(
            token_ids=tensor(token_ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slot_mapping=tensor(slots, torch.int64),
            query_start_loc=tensor(starts, torch.int32),
            seq_lens=tensor(seq_lens, torch.int32),
            block_table=tensor(padded, torch.int32),
            logit_rows=tensor(logit_rows, torch.int64),
            query_lens_host=tuple(part.num_tokens for part in scheduled),
            seq_lens_host=seq_lens,
            prompt_lens_host=tuple(part.request.num_prompt_tokens for part in scheduled),
        )
        if (policy := self.eviction) is not None:
            counts = zip(seq_lens, batch.query_lens_host, strict=True)
            batch = replace(
                batch,
                mass=torch.zeros(len(scheduled), width, device=self.device),
                observed_host=tuple(policy.observed(length - count, count) for length, count in counts),
            )
        return replace(batch, attention=self.attention.prepare(batch))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [L, vocab] of `batch.logit_rows`, in the model's dtype."""
        hidden = self.model(batch, self.attention)
        if len(batch.logit_rows) != len(hidden):
            hidden = hidden[batch.logit_rows]
        return self.model.compute_logits(hidden)
