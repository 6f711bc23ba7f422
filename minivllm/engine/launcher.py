"""The launcher: carries a plan out up to the chosen tokens, which need not have come to the host
yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from minivllm.attention.batch import StepBatch
from minivllm.cache.manager import CacheManager
from minivllm.engine.extension import CORE, Extensions
from minivllm.engine.request import Request
from minivllm.engine.runner import Runner
from minivllm.engine.sampler import SampledToken, SampledTokens, SamplerCounters, SamplerOps, sample
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.kernels.transfer import Download


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that the device was given."""

    plan: StepPlan
    seq_lens: list[int]  # of the requests, see ScheduledRequest
    prepared_s: float  # on the clock of time.perf_counter
    computed_s: float
    sampling: list[Request] = field(default_factory=list)  # each gets one of the sampled
    # parent, and child that starts here
    forks: list[tuple[Request, Request]] = field(default_factory=list)
    sampled: SampledTokens | None = None
    joint: list[Request] = field(default_factory=list)  # members of joint groups
    choices: Any = None  # of these, see JointDecoding
    experts: int | Download = 0  # that it computed, if somebody asks


class StepGraphs(Protocol):
    """Steps that were recorded, to be replayed as a whole; see extras/graphs.py."""

    counters: dict[str, int]
    capture_s: float  # what recording has taken

    @property
    def num_bytes(self) -> int:
        """Device memory of all recordings."""

    def choose(self, scheduled: Sequence[ScheduledRequest], pending: Tensor | None) -> Any:
        """The key of the recording that a step can be replayed with, or None."""

    def fill(self, key: Any, scheduled: Sequence[ScheduledRequest], pending: Tensor | None) -> None:
        """Put the step into the recording's input."""

    def replay(self, key: Any, count: int, counters: SamplerCounters) -> Tensor | SampledTokens:
        """Compute it: the tokens of its `count` requests, or their logits."""


def phase_begins(phase: str) -> float:
    """The time at which a phase of a step begins, "" where the step ends; a profiler puts its own
    in place of this."""
    return time.perf_counter()


class Launcher:
    """Puts runner and sampler together.

    Args:
        runner: makes tensors and logits.
        cache: is told where attention went, if it asks.
        kernels: to choose tokens with.
        one_by_one: sample each request by itself.
        extensions: choose for members of joint groups, and keep log-probabilities of prompts.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        kernels: SamplerOps,
        one_by_one: bool = False,
        extensions: Extensions = CORE,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.kernels, self.one_by_one, self.extensions = kernels, one_by_one, extensions
        self.counters = SamplerCounters()
        self.mark: Callable[[str], float] = phase_begins
        # of steps that only decode, where they can be recorded
        self.graphs: StepGraphs | None = None

    def launch(self, plan: StepPlan, pending: Tensor | None = None) -> InFlightStep:
        """Compute and sample a step.

        Args:
            plan: the step; it schedules something.
            pending: int64 [R], the tokens of the step before, which a request names by
                `placeholder` until the host knows them.
        """
        key = None if self.graphs is None else self.graphs.choose(plan.scheduled, pending)
        seq_lens = [part.seq_len for part in plan.scheduled]
        result: Tensor | SampledTokens
        if self.graphs is not None and key is not None:
            self.graphs.fill(key, plan.scheduled, pending)
            prepared = self.mark("forward")
            result = self.graphs.replay(key, len(plan.scheduled), self.counters)
        else:
            batch = self.runner.prepare(plan.scheduled, pending=pending)
            prepared = self.mark("forward")
            result = self.forward(plan.scheduled, batch)
        in_flight = InFlightStep(plan, seq_lens, prepared, self.mark("sample"))
        sampling = [part.request for part in plan.scheduled if part.samples]
        if isinstance(result, SampledTokens):
            in_flight.sampling, in_flight.sampled = sampling, result
            return in_flight
        logits = result
        if len(logits) != len(sampling):
            assert self.extensions.prompt_logprobs is not None, "this engine has none of prompts"
            logits = self.extensions.prompt_logprobs(plan, logits)
        if any(request.group is not None for request in sampling):
            logits, sampling = self._of_groups(in_flight, logits, sampling)
        in_flight.sampling = sampling
        if sampling:
            in_flight.sampled = sample(
                logits, sampling, self.counters, self.one_by_one, self.kernels
            )
        return in_flight

    def _of_groups(
        self, in_flight: InFlightStep, logits: Tensor, sampling: list[Request]
    ) -> tuple[Tensor, list[Request]]:
        """Let joint members choose from their rows; the rows and requests that are left to sample,
        where each member that starts now has a copy of its leader's row."""
        joint = [row for row, request in enumerate(sampling) if request.is_joint]
        if joint:
            assert self.extensions.joint is not None
            in_flight.joint = [sampling[row] for row in joint]
            in_flight.choices = self.extensions.joint.choose(
                logits[joint], in_flight.joint, self.counters, self.one_by_one
            )
            rows = [row for row, request in enumerate(sampling) if not request.is_joint]
            logits, sampling = logits[rows], [sampling[row] for row in rows]
        in_flight.forks = [
            (request, member) for request in sampling for member in request.unstarted
        ]
        if in_flight.forks:
            rows = [sampling.index(request) for request, _ in in_flight.forks]
            logits = logits[[*range(len(sampling)), *rows]]
            sampling = sampling + [member for _, member in in_flight.forks]
        return logits, sampling

    def may_wait(self, in_flight: InFlightStep) -> bool:
        """Whether the next step can be planned and launched before the tokens of this one are
        known.

        Not where the host has to find out something first: penalties go by the tokens themselves,
        and stop tokens that may not come yet are masked row by row, each of which is a wait.
        """
        return (
            self.runner.eviction is None
            and not in_flight.joint
            and not any(
                r.params.adjusts_logits
                or r.params.logprobs is not None
                or (r.group is not None and r.unstarted)
                or (r.stop_ids and not r.may_stop)
                for r in in_flight.sampling
            )
        )

    def read(self, in_flight: InFlightStep) -> list[SampledToken]:
        """Wait for the tokens of a step, one for each of `in_flight.sampling`."""
        return [] if in_flight.sampled is None else in_flight.sampled.read(self.counters)

    def forward(self, scheduled: Sequence[ScheduledRequest], batch: StepBatch) -> Tensor:
        """Logits of a step [L, vocab]; the cache learns where attention went, if it asked."""
        logits = self.runner.forward(batch)
        if batch.attention_scores is not None:
            steps = (
                (p.request.cache, p.request.num_cached_tokens, p.num_tokens) for p in scheduled
            )
            assert self.cache.evictor is not None
            self.cache.evictor.observe(steps, batch.attention_scores.tolist())
        return logits
