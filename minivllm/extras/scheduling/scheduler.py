"""A scheduler with what its policy's knobs ask for: preemption and rules."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable

from minivllm.cache.manager import CacheManager
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.events import EventBus
from minivllm.engine.options import PreemptionChoice
from minivllm.engine.preemption import Preemption, Recompute
from minivllm.engine.request import Request, RequestState
from minivllm.engine.scheduler import Scheduler, SchedulingRule
from minivllm.platform.plug_ins import locate, make_own

# Each is imported where it is chosen.
STRATEGIES = {
    "recompute": "minivllm.engine.preemption.Recompute",
    "swap": "minivllm.extras.scheduling.preemption.Swap",
    "reserve": "minivllm.extras.scheduling.preemption.Reserve",
}
OWN = "no preemption strategy: derive it from minivllm.engine.preemption.Recompute"


class Shedding(SchedulingRule):
    """Ends requests whose deadline has passed, and those that would miss it even if they ran alone;
    see SchedulingRule."""

    def __init__(self) -> None:
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._step_s = math.inf  # the shortest step so far

    def added(self, request: Request) -> None:
        """Remember its deadline. Joint members end with the first of them."""
        starts_later = request.is_joint and not request.unstarted
        if request.params.deadline_ms is not None and not starts_later:
            heapq.heappush(self._deadlines, (request.deadline_s, request.rank[1], request))

    def before_step(self, scheduler: Scheduler, now: float) -> None:
        """End every request whose deadline has passed."""
        if scheduler.worked_at_s is not None:
            self._step_s = min(self._step_s, now - scheduler.worked_at_s)
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request.state is not RequestState.DONE:
                scheduler.shed(request)

    def rejects(self, request: Request, now: float) -> bool:
        """Whether its deadline would pass even if it ran alone, at the shortest step seen so
        far."""
        steps = 1
        if request.params.ignore_eos and not request.stop_ids and not request.params.stop:
            steps = request.max_num_tokens - request.num_tokens
        shortest = 0.0 if self._step_s == math.inf else self._step_s
        return now + steps * shortest > request.deadline_s


class RestartRotated(SchedulingRule):
    """Lets requests that have grown to `length` tokens compute all of them again, with keys rotated
    for long sequences (rope type longrope); see SchedulingRule."""

    def __init__(self, length: int) -> None:
        self.length = length

    def before_step(self, scheduler: Scheduler, now: float) -> None:
        """Let requests that have just grown so long start again."""
        for request in list(scheduler.running):
            has_grown = request.num_rotated_tokens < self.length <= request.num_tokens
            goes_on = request.num_tokens < request.max_num_tokens
            if has_grown and goes_on and request in scheduler.running:  # joint members go together
                for one in request.joint_members:
                    one.num_rotated_tokens = self.length
                scheduler.preempt(request, Recompute())


def make_preemption(choice: PreemptionChoice) -> Preemption:
    """The strategy that `batching.preemption` names. Raises BadInput if a class of the user's own
    is none."""
    strategy: Preemption
    if isinstance(choice, dict):
        strategy = make_own("batching.preemption", choice, Preemption, OWN)
    else:
        strategy = locate(STRATEGIES[choice])()
    return strategy


def make_scheduler(
    policy: BatchingPolicy,
    cache: CacheManager,
    preemption: Preemption,
    now: Callable[[], float] = time.monotonic,
    restarts_at: int | None = None,
) -> Scheduler:
    """A scheduler of this policy, with the rules that its knobs ask for.

    Args:
        policy: who may join, and the token budget of a step.
        cache: gives blocks to growing requests.
        preemption: the strategy that the policy names.
        now: clock in seconds.
        restarts_at: a sequence that grows to so many tokens has all its keys rotated in another
            way from then on; None: none does.
    """
    rules: list[SchedulingRule] = [Shedding()] if policy.shed else []
    if restarts_at is not None:
        rules.append(RestartRotated(restarts_at))
    return Scheduler(policy, cache, EventBus(), now, preemption, rules)
