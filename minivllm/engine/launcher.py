"""The launcher: packs a plan for an executor. The chosen tokens need not be on the host yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.cache.manager import CacheManager
from minivllm.engine.batch_inputs import PackedStep, Sampling, pack, pack_draws
from minivllm.engine.executor import Executor, ModelRunner, StepResult
from minivllm.engine.extension import Extensions, Speculation
from minivllm.engine.request import Request
from minivllm.engine.sampler import SampledTokens, SamplerCounters
from minivllm.engine.step import SampledRows, ScheduledRequest, StepPlan


class SampledToken(NamedTuple):
    """The chosen token of one request, with log-probabilities if it wants them."""

    token_id: int  # below 0: there is none, its logits are not finite
    logprobs: dict[int, float] | None = None  # token id -> natural log of the model's probability


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that was launched on the device."""

    plan: StepPlan
    rows: SampledRows
    # Ends of draft (None: there was none), prepare and forward, on the clock of time.perf_counter.
    ends: tuple[float | None, float, float]
    choices: Any = None  # of joint members, see JointDecoding
    sampled: SampledTokens | None = None
    logits: Tensor | None = None  # [S, vocab], if a request wants log-probabilities
    # Whether the next step can be launched before the host knows the tokens of this one.
    deferrable: bool = False
    seq_lens: tuple[int, ...] = ()  # of the requests, see ScheduledRequest


class Launcher:
    """Packs steps for an executor and keeps what its results say.

    Args:
        runner: computes steps.
        cache: gets the attention scores that its evictor asks for.
        extensions: for requests that need more than the core does.
        one_by_one: sample each request by itself.
        speculation: drafts and verifies; None: no plan has drafts.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        extensions: Extensions,
        one_by_one: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self.runner, self.speculation = runner, speculation
        self.executor: Executor = runner  # or one that hands on to it
        self.cache = cache
        self.one_by_one, self.extensions = one_by_one, extensions
        self.counters = SamplerCounters()
        self._fused_draws = runner.ops.fused

    def launch(self, plan: StepPlan, follows: bool = False) -> InFlightStep:
        """Compute and sample a step.

        Args:
            plan: the step; it schedules something.
            follows: tokens of the step before may not be known yet; a request names its own by
                `placeholder`.
        """
        requests = [part.request for part in plan.scheduled if part.samples]
        rows = SampledRows(requests, [len(request.token_ids) for request in requests])
        speculation = self.speculation if plan.num_drafts else None
        drafted_s = None
        if speculation is not None:
            self.runner.mark("draft")
            speculation.draft(plan)
            drafted_s = self.runner.mark("prepare")
        packed = pack(plan.scheduled, self.cache.layout.block_size)
        num_rows = packed.shape.logit_rows
        of_prompts = num_rows != len(requests) + plan.num_drafts
        if num_rows != len(requests) or any(request.group is not None for request in requests):
            rows = self.extensions.sampled_rows(plan)
        sampling = self._pack_sampling(rows) if rows.requests else None
        wants_logprobs = any(r.params.logprobs is not None for r in rows.requests)
        keeps_logits = wants_logprobs or (speculation is not None and speculation.needs_logits)
        needs_logits = of_prompts or keeps_logits or bool(rows.joint)
        inputs = self.inputs(plan.scheduled) if plan.num_prefill_tokens else None
        packed = packed._replace(
            sampling=sampling, has_placeholders=follows, needs_logits=needs_logits, inputs=inputs
        )
        result = self.run(plan.scheduled, packed)
        ends = drafted_s, result.prepared_s, result.computed_s
        step = InFlightStep(plan, rows, ends, seq_lens=packed.shape.seq_lens)
        if of_prompts:
            assert result.logits is not None
            self.extensions.prompt_logprobs(plan, result.logits)
        if rows.joint:
            assert result.logits is not None
            self.counters.rows_adjusted += sum(r.params.adjusts_logits for r in rows.joint)
            logits = result.logits[list(rows.joint.values())]
            step.choices = self.extensions.joint.choose(logits, list(rows.joint))
        if result.tokens is not None:
            step.sampled = SampledTokens(result.tokens, result.argmax)
        if keeps_logits and result.logits is not None:
            step.logits = result.logits if rows.rows is None else result.logits[list(rows.rows)]
        # Penalties and masks go by the tokens themselves, and so does what groups do next.
        step.deferrable = not (
            rows.joint
            or rows.forks
            or keeps_logits
            or plan.num_drafts
            or result.attention_scores is not None
            or (sampling is not None and sampling.adjustment is not None)
        )
        return step

    def inputs(self, scheduled: Sequence[ScheduledRequest]) -> Any:
        """What of images a step carries that computes prompts; None where no request has any."""
        if any(part.request.inputs is not None for part in scheduled):
            return self.extensions.inputs(scheduled)
        return None

    def _pack_sampling(self, rows: SampledRows) -> Sampling:
        requests, positions, adjustment = rows.requests, rows.positions, None
        if any(map(Request.adjusts_logits, requests, positions)):
            adjustment = self.extensions.adjust_logits(requests, positions)
        draws = pack_draws(requests, positions, self.one_by_one)
        sampling = Sampling(rows.rows, draws, adjustment)
        self.counters.note(sampling, self._fused_draws)
        return sampling

    def run(self, scheduled: Sequence[ScheduledRequest], packed: PackedStep) -> StepResult:
        """Compute a packed step; attention scores go to the evictor that asks for them."""
        result = self.executor.run(packed)
        if result.attention_scores is not None:
            steps = (
                (p.request.cache, p.request.num_cached_tokens, p.num_tokens) for p in scheduled
            )
            assert self.cache.evictor is not None
            self.cache.evictor.observe(steps, result.attention_scores.tolist())
        return result

    def read(self, step: InFlightStep) -> list[SampledToken]:
        """Wait for the tokens of a step, one for each of `step.rows.requests`, where only accepted
        drafts remain."""
        if step.sampled is None:
            return []
        token_ids, logits = step.sampled.read(self.counters), step.logits
        if step.plan.num_drafts and self.speculation is not None:
            step.plan, accepted = self.speculation.verify(step.plan, token_ids, logits)
            requests = [step.rows.requests[row] for row, _ in accepted]
            step.rows = step.rows._replace(requests=requests)
            token_ids = [token_id for _, token_id in accepted]
            logits = None if logits is None else logits[[row for row, _ in accepted]]
        if logits is None:
            return [SampledToken(token_id) for token_id in token_ids]
        known = [max(token_id, 0) for token_id in token_ids]
        logprobs = self.extensions.logprobs(logits, known, step.rows.requests)
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]
