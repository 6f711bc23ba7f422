"""The scheduler: each step, who computes how many tokens. Pure Python, no tensors, no phases."""

from __future__ import annotations

import time
from collections import deque

from minivllm.cache.manager import CacheManager
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.events import BlocksChanged, EventBus, StateChanged, StepPlanned
from minivllm.engine.request import Request, RequestState
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.errors import BadInput


class Scheduler:
    """Plans steps without knowing phases, as vLLM v1 does.

    A request has tokens known and tokens computed, and a step closes some of the gap:
    `min(num_tokens - num_computed_tokens, budget)` for each running request, then for waiting ones
    that the policy and the cache admit. The same lines are prefill, chunked prefill, decode and
    resumption after preemption.

    Args:
        policy: who may join, and the token budget of a step.
        cache: gives blocks to growing requests.
        events: bus for state changes and decisions.
    """

    def __init__(self, policy: BatchingPolicy, cache: CacheManager, events: EventBus) -> None:
        self.policy = policy
        self.cache = cache
        self.events = events
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0  # liveness counters
        self.num_chunks = 0  # parts of a prefill that were not its last

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadInput: it can never fit: into the cache, or with chunked prefill off into one step.
        """
        # The last token is never computed, so it needs no room.
        longest = request.max_num_tokens - 1
        if longest > self.cache.capacity_tokens:
            raise BadInput(
                f"request {request.request_id} may grow to {longest} cached tokens, and the KV cache holds "
                f"{self.cache.capacity_tokens}: lower max_tokens, or raise cache.num_blocks or cache.memory_fraction"
            )
        if not self.policy.chunked_prefill and longest > self.policy.max_num_batched_tokens:
            raise BadInput(
                f"request {request.request_id} may need {longest} tokens in one step (all of them, should it be "
                f"preempted near its end), and a step takes "
                f"{self.policy.max_num_batched_tokens}: raise batching.max_num_batched_tokens, "
                "or set batching.chunked_prefill=true"
            )
        self.waiting.append(request)
        self._changed(request, RequestState.WAITING)

    def plan(self) -> StepPlan:
        """Decide the next step; an empty plan means there is nothing to do."""
        budget = self.policy.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.cache.grow(request, request.num_computed_tokens + count):
                victim = self.running.pop()  # the last to come is the first to go
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                scheduled.append(self._part(request, count))
                budget -= count
                index += 1

        while self.waiting and budget > 0 and not preempted and self.policy.may_admit(len(self.running)):
            request = self.waiting[0]
            count = request.num_tokens - request.num_computed_tokens
            if count > budget:
                if not self.policy.chunked_prefill:
                    break
                count = budget
            if not self.cache.grow(request, request.num_computed_tokens + count):
                break
            self.waiting.popleft()
            self.running.append(request)
            self._changed(request, RequestState.PREFILL)
            scheduled.append(self._part(request, count))
            budget -= count

        plan = StepPlan(tuple(scheduled), tuple(preempted))
        if self.events:
            self._tell(plan)
        return plan

    def _part(self, request: Request, count: int) -> ScheduledRequest:
        prefill = request.state is RequestState.PREFILL
        part = ScheduledRequest(request, request.num_computed_tokens, count, prefill)
        self.num_chunks += prefill and not part.samples
        return part

    def computed(self, part: ScheduledRequest) -> None:
        """Note that a part of a step was computed."""
        request = part.request
        request.num_computed_tokens = part.end
        if request.state is RequestState.PREFILL and part.samples:
            self._changed(request, RequestState.DECODE)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and take its blocks back."""
        if request.state is RequestState.DONE:
            return
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.cache.free(request)
        request.finish_reason = reason
        self._changed(request, RequestState.DONE)

    def _preempt(self, request: Request) -> None:
        """Take a request's cache; it waits at the front and computes its tokens again."""
        self.cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        self._changed(request, RequestState.PREEMPTED)

    def _changed(self, request: Request, state: RequestState) -> None:
        request.state = state
        if self.events:
            self.events.emit(StateChanged(time.monotonic(), request.request_id, state))

    def _tell(self, plan: StepPlan) -> None:
        now = time.monotonic()
        self.events.emit(
            StepPlanned(
                now,
                len(plan.scheduled),
                plan.num_tokens,
                plan.num_prefill_tokens,
                len(plan.preempted),
                len(self.waiting),
            )
        )
        self.events.emit(BlocksChanged(now, self.cache.pool.num_used, self.cache.pool.num_usable))
