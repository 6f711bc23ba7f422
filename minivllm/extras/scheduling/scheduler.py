"""A scheduler with what its policy's knobs ask for."""

from __future__ import annotations

import time
from collections.abc import Callable

from minivllm.cache.manager import CacheManager
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.events import EventBus
from minivllm.engine.preemption import Preemption, Recompute
from minivllm.engine.scheduler import Scheduler, SchedulingRule
from minivllm.extras.scheduling.shedding import Shedding


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


def make_scheduler(
    policy: BatchingPolicy,
    cache: CacheManager,
    preemption: Preemption,
    now: Callable[[], float] = time.monotonic,
    rotated_anew_at: int | None = None,
) -> Scheduler:
    """A scheduler of this policy, with the rules that its knobs ask for.

    Args:
        policy: who may join, and the token budget of a step.
        cache: gives blocks to growing requests.
        preemption: the strategy that the policy names.
        now: clock in seconds.
        rotated_anew_at: a sequence that grows to so many tokens has all its keys rotated in another
            way from then on; None: none does.
    """
    rules: list[SchedulingRule] = [Shedding()] if policy.shed else []
    if rotated_anew_at is not None:
        rules.append(RestartRotated(rotated_anew_at))
    return Scheduler(policy, cache, EventBus(), now, preemption, rules)
