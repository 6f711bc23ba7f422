"""Speculative decoding: drafts ride on planned steps, and the right ones are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minivllm.engine.preemption import Recompute
from minivllm.engine.request import Request
from minivllm.engine.scheduler import PlanBuilder, Scheduler, SchedulingRule
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.errors import BadInput
from minivllm.extras.speculative.lengths import AdaptiveLengths, DraftLengths, FixedLengths
from minivllm.extras.speculative.proposer import Proposer, SpeculationCounters
from minivllm.extras.speculative.verification import (
    DraftedRun,
    GivenAcceptance,
    SameNoise,
    Verifier,
)

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.engine.engine import Engine


class Speculator(SchedulingRule):
    """Extends the decoding requests of a planned step by drafts, and keeps those that the target
    chooses too; see Speculation.

    The step is planned without drafts, which take what is left of its budget and of free blocks:
    they displace nothing of that step. Rejected drafts leave blocks, which stay with their request,
    and keys and values, which the next step overwrites.

    A wrong draft may have keys that are no numbers, which spoil the logits of the tokens before it,
    too: attention multiplies them by 0. So a request some of whose logits are not finite gets no
    token from a step with drafts. It computes all its tokens again, in cleared blocks, and drafts
    no more.

    Args:
        proposer: drafts.
        lengths: how many tokens each request may draft.
        verifier: which drafts are kept.
        clear: fills cache blocks with zeros.
        longest: no draft makes a sequence longer than so many tokens (its keys would be rotated in
            another way); None: no limit.
        now: clock in seconds, for what drafting takes.
        vocab_size: of the target, against which draft tokens are checked; None: they are no ids.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: DraftLengths,
        verifier: Verifier,
        clear: Callable[[Sequence[int]], None],
        longest: int | None = None,
        now: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
    ) -> None:
        self.proposer, self.lengths, self.verifier = proposer, lengths, verifier
        self.needs_logits = verifier.needs_logits
        self.counters = SpeculationCounters()
        self._clear, self._longest, self._now = clear, longest, now
        self._vocab_size = vocab_size
        self._unverified: list[ScheduledRequest] = []
        # Of the last step, if it decodes only: its beginning, what was spent on drafting before,
        # its tokens, and whether it has drafts.
        self._decoding: tuple[float, float, int, bool] | None = None
        # Requests that a step with drafts gave no number, and whether they are computing again.
        self._spoilt: dict[Request, bool] = {}

    def before_step(self, scheduler: Scheduler, now: float) -> None:
        """Withdraw the drafts of a step that failed, and restart requests that drafts have
        spoilt."""
        self._withdraw()
        for request in [one for one, restarted in self._spoilt.items() if not restarted]:
            self._clear(scheduler.cache.discard(request.cache))
            scheduler.preempt(request, Recompute())
            self._spoilt[request] = True

    def _withdraw(self) -> None:
        """Drop drafts, accepted ones too, of parts that the scheduler does not know as computed."""
        for part in self._unverified:
            if part.request.num_computed_tokens <= part.start:
                del part.request.token_ids[part.start + 1 :]
        self._unverified.clear()

    def extend(self, scheduler: Scheduler, step: PlanBuilder) -> None:
        """Add drafts to the requests that decode."""
        begin, drafting_s = self._now(), self.counters.draft_s
        if self._decoding is not None:
            began, before_s, num_tokens, has_drafts = self._decoding
            seconds = begin - began - (drafting_s - before_s)
            self.lengths.stepped(num_tokens, has_drafts, 1e3 * seconds)
        planned = scheduler.policy.max_num_batched_tokens - step.budget
        self._add_drafts(scheduler, step, planned)
        self._decoding = None
        if step.scheduled and not step.num_prefill_tokens:
            num_tokens = planned + step.num_drafts
            self._decoding = begin, drafting_s, num_tokens, step.num_drafts > 0

    def _add_drafts(self, scheduler: Scheduler, step: PlanBuilder, num_tokens: int) -> None:
        """Add drafts to a step that computes `num_tokens` without them."""
        decoding = [
            index
            for index, part in enumerate(step.scheduled)
            if part.num_tokens == 1
            and not part.prefill
            and part.samples
            and not part.request.is_joint
            and part.request not in self._spoilt
        ]
        self.counters.num_request_steps += len(decoding)
        if not decoding or step.budget < 1:
            return
        requests = [step.scheduled[index].request for index in decoding]
        for index, most in zip(decoding, self.lengths.allot(requests, num_tokens), strict=True):
            if most and step.budget:
                self._extend(scheduler, step, index, min(most, step.budget))

    def _extend(self, scheduler: Scheduler, step: PlanBuilder, index: int, most: int) -> None:
        part = step.scheduled[index]
        request, known = part.request, len(part.request.token_ids)
        most = min(most, request.max_num_tokens - known - 1)  # The step itself adds a token.
        if self._longest is not None and known <= self._longest:
            most = min(most, self._longest - known)
        most = room(scheduler, part, most)
        if most < 1:
            return
        begin = self._now()
        drafts = self.proposer.propose(request, most)[:most]
        self.counters.draft_s += self._now() - begin
        if not drafts:
            return
        if self._vocab_size is not None and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            raise BadInput(
                f"speculative={self.proposer.name}: it drafts token ids that the model does not "
                f"have: {list(drafts)}"
            )
        grown = scheduler.cache.grow(request.cache, part.start, part.end + len(drafts))
        assert grown, "`room` has made sure of free blocks"
        request.token_ids.extend(drafts)
        longer = part._replace(num_tokens=1 + len(drafts), num_drafts=len(drafts))
        step.scheduled[index] = longer
        step.budget -= len(drafts)
        step.num_drafts += len(drafts)
        self._unverified.append(longer)

    def draft(self, plan: StepPlan) -> None:
        begin = self._now()
        self.proposer.fill(plan)
        seconds = self._now() - begin
        self.counters.draft_s += seconds
        self.lengths.drafted(
            [n for part in plan.scheduled if (n := part.num_drafts)], 1e3 * seconds
        )

    def verify(
        self, plan: StepPlan, token_ids: Sequence[int], logits: Tensor | None
    ) -> tuple[StepPlan, list[tuple[int, int]]]:
        parts: list[ScheduledRequest] = []
        kept: list[tuple[int, int]] = []
        row = 0
        for part in plan.scheduled:
            if part.num_drafts:
                end = row + 1 + part.num_drafts
                own = None if logits is None else logits[row:end]
                added = self._verify(part, token_ids[row:end], own)
                kept += enumerate(added, row)
                accepted = max(0, len(added) - 1)
                part = part._replace(num_tokens=len(added), num_drafts=accepted)
                row = end
            elif part.samples and not part.request.is_joint:
                kept.append((row, token_ids[row]))
                row += 1
            parts.append(part)
        kept += enumerate(token_ids[row:], row)  # of group members that start
        self.counters.steps += 1
        return plan._replace(scheduled=tuple(parts)), kept

    def _verify(
        self, part: ScheduledRequest, chosen: Sequence[int], logits: Tensor | None
    ) -> list[int]:
        """The tokens that a request gets from a step: its accepted drafts, and one more; none
        where its logits are not finite."""
        request, start = part.request, part.start + 1
        if min(chosen) < 0:
            del request.token_ids[start:]
            self._spoilt[request] = False
            return []
        drafts = request.token_ids[start:]  # fewer than planned where a mask has failed
        added = self.verifier.verify(DraftedRun(request, start, drafts, chosen, logits))
        accepted = len(added) - 1
        del request.token_ids[start + accepted :]
        self.counters.note(request.request_id, part.num_drafts, accepted)
        self.lengths.note(request, len(drafts), accepted)
        return added

    def ended(self, request: Request) -> None:
        """Forget a request. One that ends after a step that failed has drafts."""
        self._withdraw()
        self._spoilt.pop(request, None)
        self.proposer.finished(request)
        self.lengths.finished(request)

    def reset(self) -> None:
        """Zero the counters, and let the proposer forget what it learned of finished requests."""
        self.counters = SpeculationCounters()
        self._decoding = None
        self.proposer.forget()


def room(scheduler: Scheduler, part: ScheduledRequest, most: int) -> int:
    """How many of `most` drafts have room: in the blocks that a request has, or in free blocks as
    long as one is left for each running request."""
    cache = scheduler.cache
    held = len(part.request.cache.block_table.blocks) * cache.layout.block_size
    spare = max(0, cache.pool.num_free - len(scheduler.running)) * cache.layout.block_size
    return min(most, held + spare - part.end)


def speculate(engine: Engine, proposer: Proposer) -> Speculator:
    """Let an engine draft and verify.

    Args:
        engine: with all passes applied; replays its graphs, if it has any.
        proposer: attached to the engine.
    """
    options, policy = proposer.options, engine.scheduler.policy
    most_drafts = options.num_speculative_tokens
    lengths: DraftLengths = FixedLengths(most_drafts)
    if options.adaptive:
        from minivllm.extras.speculative.step_cost import StepCost, measure

        most = min(policy.max_num_seqs * (1 + most_drafts), policy.max_num_batched_tokens)
        step_ms = measure(engine.launcher.executor, most, policy.max_num_seqs)
        draft_ms = proposer.cost(policy.max_num_seqs) or StepCost([1], [0.0])
        lengths = AdaptiveLengths(most_drafts, step_ms, draft_ms)
    verifier: Verifier = SameNoise()
    if options.rates is not None:
        verifier = GivenAcceptance(options.rates)
    elif options.verify == "rejection":
        from minivllm.extras.speculative.rejection import Rejection

        verifier = Rejection(engine.launcher.extensions, proposer.draft_logits)
    restart = engine.loaded.config.rope.restarts_at
    longest = None if restart is None else restart - 1
    vocab_size = engine.loaded.config.vocab_size
    speculator = Speculator(
        *(proposer, lengths, verifier, engine.kv.clear, longest), vocab_size=vocab_size
    )
    engine.launcher.speculation = speculator
    # First, so that the other rules see no drafts of a step that failed.
    engine.scheduler.rules = (speculator, *engine.scheduler.rules)
    return speculator
