"""Batching policies: which waiting requests join the running ones, and how a step's tokens are shared out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Protocol

from minivllm.engine.options import (
    ContinuousOptions,
    DynamicOptions,
    PreemptionName,
    SequentialOptions,
    StaticOptions,
)
from minivllm.engine.preemption import Preemption, make_preemption
from minivllm.engine.queue import WaitingQueue
from minivllm.engine.request import Request


class BatchingPolicy(Protocol):
    """A `batching` option. The scheduler asks; the policy keeps no state of requests."""

    name: str
    max_num_seqs: int
    max_num_samples: int  # of one prompt
    max_num_batched_tokens: int
    chunked_prefill: bool
    prefill_first: bool
    fair_prefill: bool
    whole_batch: bool
    preemption_strategy: Preemption  # what becomes of running requests when the cache is full
    watermark: float
    aging_s: float
    shed: bool

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterable[Request]:
        """Waiting requests that may join `num_running` running sequences now, in order. The caller takes each
        that it can place out of `waiting` and stops at the first that it cannot."""

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """With requests waiting, none running and no candidate: when there will be one."""


class Batching:
    """What all policies share; the knobs are those of a policy's options."""

    name: str
    max_num_seqs: int
    preemption: PreemptionName
    prefill_first = fair_prefill = False
    whole_batch = False  # whether requests join together even where the step has no tokens left for them

    @property
    def max_num_samples(self) -> int:
        """Most samples of one prompt."""
        return self.max_num_seqs

    @cached_property
    def preemption_strategy(self) -> Preemption:
        """The strategy that `preemption` names."""
        return make_preemption(self.preemption)

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """Never: candidates are there as soon as a request waits."""
        return None


class Continuous(Batching, ContinuousOptions):
    """Continuous (iteration-level) batching (Orca, Yu et al. 2022): requests join and leave at every step."""

    name = "continuous"

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        return _that_fit(waiting.in_order(), self.max_num_seqs - num_running)


class Sequential(Batching, SequentialOptions):
    """One request at a time, in order: the baseline every other policy is compared with."""

    name = "sequential"
    max_num_seqs = 1
    max_num_samples = sys.maxsize
    preemption: PreemptionName = "recompute"
    watermark = 0.01

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy. The samples of one prompt are one request, and run together."""
        if waiting and not num_running:
            yield waiting.peek()


class Static(Batching, StaticOptions):
    """A batch starts together, and nobody joins before its last member has ended.

    No padding is computed: what it loses against continuous batching are the places of those that end early.
    """

    name = "static"
    whole_batch = True

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        if num_running or not waiting:
            return iter(())
        chosen = waiting.most_urgent(self.max_num_seqs * (4 if self.group_by_length else 1))
        if self.group_by_length:
            # The most urgent one always runs; with it those that will take about as long.
            wanted = _output_len(chosen[0])
            chosen.sort(key=lambda request: (abs(_output_len(request) - wanted), request.rank))
        return _that_fit(chosen, self.max_num_seqs)


class Dynamic(Static, DynamicOptions):
    """Static batching that waits for a batch to fill, but not for long (Clipper, Crankshaw et al. 2017; Triton
    Inference Server's dynamic batcher): latency given for batch size. A batch is full at `max_num_seqs`.
    """

    name = "dynamic"

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        ready = self.wake_at(waiting)
        if ready is not None and now_s < ready:
            return iter(())
        return super().candidates(waiting, num_running, now_s)

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """When the first to come has waited long enough; None if the batch is full."""
        if len(waiting) >= self.max_num_seqs:  # so that a long line is not counted at every step
            return None
        if not waiting or sum(1 + len(request.unstarted) for request in waiting) >= self.max_num_seqs:
            return None
        return min(request.arrival_s for request in waiting) + self.max_wait_ms / 1000


def _that_fit(requests: Iterable[Request], places: int) -> Iterator[Request]:
    """The first of the requests, as far as they and their further samples find a place."""
    for request in requests:
        places -= 1 + len(request.unstarted)
        if places < 0:
            return
        yield request


def _output_len(request: Request) -> int:
    return request.max_num_tokens - request.num_prompt_tokens
