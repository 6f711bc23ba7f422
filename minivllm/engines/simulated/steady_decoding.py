"""Decode steps of a simulation that need no plan."""

from __future__ import annotations

from typing import Any

from minivllm.engine.events import StepEnded, StepPlanned
from minivllm.engine.request import RequestState
from minivllm.engine.scheduler import Scheduler


class SteadyDecoding:
    """Computes steps whose plan is known before it is made: no request waits, and each that runs
    decodes one token.

    What the scheduler would do in such a step is done here for all requests at once, without the
    objects of a plan: a block for each request whose blocks are full, and a full block into the
    prefix cache. Everything else is left to the scheduler: prompts, admission, preemption,
    speculation, offloading, eviction, rules of extras, and steps that somebody listens to.

    Args:
        scheduler: of the engine.
        allowed: whether the engine needs no plan either.

    Attributes:
        requests: those that decode, in the order of their admission; none: a plan is needed.
        context: tokens that the attention of the last step read.
    """

    def __init__(self, scheduler: Scheduler, allowed: bool) -> None:
        cache = scheduler.cache
        self._scheduler, self._cache = scheduler, cache
        self._allowed = (
            allowed
            and cache.layout.retains_kv
            and cache.tiers is None
            and cache.evictor is None
            and not scheduler.rules
        )
        self.requests: list[Any] = []  # each is a SimulatedRequest
        self.context = 0

    def note_running(self) -> None:
        """Take note of the requests that run, after a step: whether the next one needs a plan."""
        scheduler = self._scheduler
        if self.requests and len(self.requests) == len(scheduler.running):
            return
        self.requests = []
        if not self._allowed or scheduler.waiting.requests:
            return
        running: list[Any] = [*scheduler.running]
        if len(running) <= scheduler.policy.max_num_batched_tokens and all(
            request.state is RequestState.DECODE
            and request.token_ids.length == request.num_computed_tokens + 1
            for request in running
        ):
            self.requests = running
            self.context = sum(request.num_computed_tokens for request in running)

    def compute(self) -> bool:
        """Compute one token of each request. False if a plan is needed; then nothing is computed,
        but some may have the next block already that the plan would give them."""
        cache, requests = self._cache, self.requests
        if not requests or self._needs_plan():
            self.requests = []
            return False
        size = cache.layout.block_size
        for request in requests:
            computed = request.num_computed_tokens
            if not computed % size and not cache.grow(request.cache, computed, computed + 1):
                self.requests = []
                return False
        for request in requests:
            request.num_computed_tokens = computed = request.num_computed_tokens + 1
            if not computed % size:
                cache.computed(request.cache, request.cache_keys, computed, request.max_num_tokens)
        self.context += len(requests)
        return True

    def _needs_plan(self) -> bool:
        scheduler = self._scheduler
        listeners = scheduler.events.listeners
        return bool(
            scheduler.waiting.requests
            or len(self.requests) != len(scheduler.running)
            or listeners[StepPlanned]
            or listeners[StepEnded]
        )
