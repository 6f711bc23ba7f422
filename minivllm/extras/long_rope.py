"""Requests whose keys are rotated in another way once they have grown (rope type longrope)."""

from __future__ import annotations

from minivllm.engine.preemption import Recompute
from minivllm.engine.scheduler import Scheduler, SchedulingRule


class RestartRotated(SchedulingRule):
    """Lets requests that have grown to `length` tokens compute all of them again, with keys rotated
    for long sequences; see SchedulingRule."""

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
