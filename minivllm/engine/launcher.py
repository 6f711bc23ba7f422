"""The launcher: packs a plan for an executor. The chosen tokens need not be on the host yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.cache.manager import CacheManager
from minivllm.engine.batch_inputs import PackedStep, Sampling, pack, pack_draws
from minivllm.engine.executor import Executor, ModelRunner, StepResult
from minivllm.engine.extension import Extensions
from minivllm.engine.request import Request
from minivllm.engine.sampler import SampledTokens, SamplerCounters
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.kernels.transfer import Download


class SampledToken(NamedTuple):
    """The chosen token of one request, with log-probabilities if it asked for them."""

    token_id: int  # below 0: there is none, its logits are not finite
    logprobs: dict[int, float] | None = None  # token id -> natural log of the model's probability


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that was launched on the device."""

    plan: StepPlan
    sampling: list[Request]  # each gets one of the sampled tokens
    prepared_s: float = 0.0  # see StepResult
    computed_s: float = 0.0
    # Parents, and children that start with this step.
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    # Joint members, and the row of the logits of each.
    joint: dict[Request, int] = field(default_factory=dict)
    choices: Any = None  # of joint members, see JointDecoding
    sampled: SampledTokens | None = None
    logits: Tensor | None = None  # [S, vocab], if a request wants log-probabilities
    # Whether the next step can be launched before the host knows the tokens of this one.
    deferrable: bool = False
    seq_lens: tuple[int, ...] = ()  # of the requests, see ScheduledRequest
    experts: int | Download = 0  # experts that got tokens, if StepTimed has subscribers

    def separate(self) -> tuple[int, ...]:
        """Take members of joint groups from those that sample, and let each member of a group that
        starts now sample from its leader's logits; the row of the logits for each that samples."""
        row, rows = -1, {}
        for part in self.plan.scheduled:
            asks = part.request.params.prompt_logprobs is not None  # for the logits of all tokens
            row += part.num_tokens if asks else part.samples
            if part.samples:
                rows[part.request] = row
        self.joint = {request: row for request, row in rows.items() if request.is_joint}
        own = [request for request in rows if not request.is_joint]
        self.forks = [(request, member) for request in own for member in request.unstarted]
        self.sampling = own + [member for _, member in self.forks]
        return tuple(rows[request] for request in (*own, *(parent for parent, _ in self.forks)))


class Launcher:
    """Packs steps for an executor and keeps what its results say.

    Args:
        runner: computes steps.
        cache: gets the attention scores that its evictor asks for.
        extensions: for requests that need more than the core does.
        one_by_one: sample each request by itself.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        extensions: Extensions,
        one_by_one: bool = False,
    ) -> None:
        self.runner = runner
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
        packed = pack(plan.scheduled, self.cache.block_size)
        step = InFlightStep(plan, [part.request for part in plan.scheduled if part.samples])
        step.seq_lens = packed.shape.seq_lens
        of_prompts = packed.shape.logit_rows != len(step.sampling)
        rows = None
        if of_prompts or any(request.group is not None for request in step.sampling):
            rows = step.separate()
        sampling = self._pack_sampling(step, rows) if step.sampling else None
        wants_logprobs = any(r.params.logprobs is not None for r in step.sampling)
        needs_logits = of_prompts or wants_logprobs or bool(step.joint)
        packed = packed._replace(
            sampling=sampling, has_placeholders=follows, needs_logits=needs_logits
        )
        result = self.run(plan.scheduled, packed)
        step.prepared_s, step.computed_s = result.prepared_s, result.computed_s
        if of_prompts:
            assert result.logits is not None
            self.extensions.prompt_logprobs(plan, result.logits)
        if step.joint:
            assert result.logits is not None
            self.counters.rows_adjusted += sum(r.params.adjusts_logits for r in step.joint)
            logits = result.logits[list(step.joint.values())]
            step.choices = self.extensions.joint.choose(logits, list(step.joint))
        if result.tokens is not None:
            step.sampled = SampledTokens(result.tokens, result.argmax)
        if wants_logprobs and result.logits is not None:
            step.logits = result.logits if rows is None else result.logits[list(rows)]
        # Penalties and masks go by the tokens themselves, and so does what groups do next.
        step.deferrable = not (
            step.joint
            or step.forks
            or wants_logprobs
            or result.attention_scores is not None
            or (sampling is not None and sampling.adjustment is not None)
        )
        return step

    def _pack_sampling(self, step: InFlightStep, rows: tuple[int, ...] | None) -> Sampling:
        requests, adjustment = step.sampling, None
        if any(request.adjusts_logits for request in requests):
            adjustment = self.extensions.adjust_logits(requests)
        sampling = Sampling(rows, pack_draws(requests, self.one_by_one), adjustment)
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
        """Wait for the tokens of a step, one for each of `step.sampling`."""
        if step.sampled is None:
            return []
        token_ids = step.sampled.read(self.counters)
        if step.logits is None:
            return [SampledToken(token_id) for token_id in token_ids]
        known = [max(token_id, 0) for token_id in token_ids]
        logprobs = self.extensions.logprobs(step.logits, known, step.sampling)
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]
