"""The runner: a plan becomes tensors, the tensors go through the model, logits come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend
from minivllm.attention.batch import StepBatch
from minivllm.cache.eviction.policies import Eviction
from minivllm.engine.batch_inputs import StepInputs, pack
from minivllm.engine.request import placeholder
from minivllm.engine.step import ScheduledRequest


class CausalLM(Protocol):
    """What the runner asks of a model."""

    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm: [T, hidden], or [L, hidden] of the rows whose logits
        are wanted."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""


def fill_in(token_ids: Tensor, pending: Tensor) -> Tensor:
    """Token ids int64 [T] with the tokens int64 [R] that placeholders stand for; nothing waits for
    the device. Of a request that fails, whose token is below 0, what is computed is thrown away."""
    rows = (placeholder(0) - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, pending[rows].clamp_(min=0), token_ids)


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
        self._inputs = StepInputs(device)
        self.rows_trimmed = 0  # tokens that the model gave no hidden states of
        self.eviction = eviction if eviction is not None and eviction.scored else None

    def prepare(
        self,
        scheduled: Sequence[ScheduledRequest],
        all_logits: bool = False,
        pending: Tensor | None = None,
    ) -> StepBatch:
        """Tensors of one step, until the next one is prepared.

        Args:
            scheduled: each request's share, its cache blocks already given.
            all_logits: logits of every token, not only of each request's last known one.
            pending: int64 [R], tokens of the step before, where placeholders stand for them.
        """
        ints, shape = pack(scheduled, self.block_size, all_logits)
        batch = StepBatch(
            **self._inputs.put(ints, shape),
            query_lens_host=tuple([part.num_tokens for part in scheduled]),
            seq_lens_host=shape.seq_lens,
            rotated_lens_host=tuple([part.request.num_rotated_tokens for part in scheduled]),
        )
        if pending is not None:
            batch = batch._replace(token_ids=fill_in(batch.token_ids, pending))
        if (policy := self.eviction) is not None:
            counts = zip(batch.seq_lens_host, batch.query_lens_host, strict=True)
            batch = batch._replace(
                attention_scores=torch.zeros(batch.block_table.shape, device=self.device),
                observed_host=tuple(
                    policy.observed(length - count, count) for length, count in counts
                ),
            )
        shared = self.attention.prepare(batch)
        return batch if shared is None else batch._replace(attention=shared)

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [L, vocab] of `batch.logit_rows`, in the model's dtype."""
        hidden = self.model(batch, self.attention)
        self.rows_trimmed += len(batch.token_ids) - len(hidden)
        if len(batch.logit_rows) != len(hidden):
            hidden = hidden[batch.logit_rows]
        return self.model.compute_logits(hidden)
