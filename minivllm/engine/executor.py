"""The executor: a packed step in, chosen tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.engine.batch_inputs import PackedStep, SamplingColumns, StepInputs
from minivllm.engine.request import placeholder
from minivllm.engine.sampler import TORCH, SamplerOps, choose
from minivllm.kernels.cpu.library import Kernels

if TYPE_CHECKING:
    from minivllm.cache.eviction.policies import Eviction


class StepResult(NamedTuple):
    """What a step has computed. Tensors are on the device, which need not be done yet."""

    prepared_s: float  # end of the preparation, on the clock of time.perf_counter
    computed_s: float  # end of the forward pass
    tokens: Tensor | None = None  # int64 [S], see `sampler.choose`
    argmax: Tensor | None = None  # int64 [S], the model's own; None where that is what was chosen
    logits: Tensor | None = None  # [L, vocab]; None where the step does not need them
    attention_scores: Tensor | None = None  # float32 [R, B], of each block, if they are needed


class Executor(Protocol):
    """Runs packed steps, one after another. What it returns holds until the next one."""

    def run(self, packed: PackedStep) -> StepResult:
        """Compute a step and choose its tokens. Nothing waits for the device."""


class CausalLM(Protocol):
    """What the runner asks of a model."""

    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm: [T, hidden], or [L, hidden] of the rows whose logits
        are wanted."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""


def phase_begins(phase: str) -> float:
    """The time at which a phase of a step begins ("": the step ends). A profiler replaces this
    function."""
    return time.perf_counter()


def fill_in(token_ids: Tensor, pending: Tensor) -> Tensor:
    """Token ids int64 [T] with the tokens int64 [R] that placeholders stand for; nothing waits for
    the device. Of a request that fails, whose token is below 0, what is computed is thrown away."""
    rows = (placeholder(0) - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, pending[rows].clamp_(min=0), token_ids)


class ModelRunner:
    """The executor that computes each step afresh.

    Args:
        model: gives hidden states and logits.
        attention: the backend, which holds the cache's tensors.
        device: where the model runs.
        ops: to choose tokens with.
        eviction: selects the queries whose attention is returned.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        device: torch.device,
        ops: SamplerOps = TORCH,
        eviction: Eviction | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.device = device
        self.ops = ops
        self.eviction = eviction if eviction is not None and eviction.scored else None
        self.mark: Callable[[str], float] = phase_begins
        self.rows_trimmed = 0  # tokens whose last layer was skipped
        # int64 [S], of the last step, which placeholders in the next one stand for
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._inputs = StepInputs(device)

    def run(self, packed: PackedStep) -> StepResult:
        batch = self.prepare(packed)
        prepared_s = self.mark("forward")
        return self.sample(packed, self.forward(batch), prepared_s, batch.attention_scores)

    def prepare(self, packed: PackedStep) -> StepBatch:
        """Tensors of one step, until the next one is prepared."""
        batch = StepBatch(
            **self._inputs.put(packed.ints, packed.shape),
            query_lens_host=packed.query_lens,
            seq_lens_host=packed.shape.seq_lens,
            rotated_lens_host=packed.rotated_lens,
            inputs=packed.inputs,
        )
        if packed.has_placeholders:
            batch = batch._replace(token_ids=fill_in(batch.token_ids, self.tokens))
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

    def sample(
        self, packed: PackedStep, logits: Tensor, prepared_s: float, scores: Tensor | None = None
    ) -> StepResult:
        """The result of a step with logits [L, vocab] and, where they are needed, attention
        scores."""
        computed_s = self.mark("sample")
        tokens = argmax = None
        if packed.sampling is not None:
            tokens, argmax = choose(logits, packed.sampling, self.ops)
            self.tokens = tokens
        kept = logits if packed.needs_logits else None
        return StepResult(prepared_s, computed_s, tokens, argmax, kept, scores)


@cache
def sampler_ops(cpu: Kernels | None, triton: bool) -> SamplerOps:
    """What tokens are chosen with: Triton's kernels if they are to be used, else those for CPUs as
    far as there are any."""
    if triton:
        from minivllm.engine.sampling_kernels import argmax, draw  # imports Triton

        return SamplerOps(partial(argmax, flag=True), draw, fused=True)
    if cpu is None:
        return TORCH

    def draw_on_cpu(scores: Tensor, columns: SamplingColumns) -> Tensor:
        return cast(
            Tensor, cpu.draw(scores, columns.seeds, columns.positions, columns.temperatures)
        )

    return SamplerOps(partial(cpu.argmax, flag=True), draw_on_cpu)
