"""Load shedding: requests that can no longer meet their deadline are ended at once."""

from __future__ import annotations

import heapq
import math

from minivllm.engine.request import Request, RequestState
from minivllm.engine.scheduler import Scheduler, SchedulingRule


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
