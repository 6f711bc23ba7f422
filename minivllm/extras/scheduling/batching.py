"""Batching policies beside the continuous one."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator

from minivllm.engine.batching import Batching, WaitingQueue, requests_that_fit
from minivllm.engine.options import (
    DynamicOptions,
    PreemptionChoice,
    SequentialOptions,
    StaticOptions,
)
from minivllm.engine.request import Request


class Sequential(Batching, SequentialOptions):
    """One request at a time, in order: the baseline every other policy is compared with."""

    name = "sequential"
    max_num_seqs = 1
    max_num_samples = sys.maxsize
    preemption: PreemptionChoice = "recompute"
    watermark = 0.01

    def candidates(
        self, waiting: WaitingQueue, num_running: int, now_s: float
    ) -> Iterator[Request]:
        """The samples of one prompt are one request, and run together."""
        if waiting and not num_running:
            yield waiting.peek()


class Static(Batching, StaticOptions):
    """A batch starts together, and no request joins before its last member has ended.

    No padding is computed: the loss against continuous batching is the places of requests that end
    early.
    """

    name = "static"
    whole_batch = True

    def candidates(
        self, waiting: WaitingQueue, num_running: int, now_s: float
    ) -> Iterator[Request]:
        if num_running or not waiting:
            return iter(())
        most = self.max_num_seqs * (4 if self.group_by_length else 1)
        chosen = [waiting.requests[rank] for rank in heapq.nsmallest(most, waiting.requests)]
        if self.group_by_length:
            # The most urgent request always runs, with those of similar output length.
            length = _output_len(chosen[0])
            chosen.sort(key=lambda request: (abs(_output_len(request) - length), request.rank))
        return requests_that_fit(chosen, self.max_num_seqs)


class Dynamic(Static, DynamicOptions):
    """Static batching that waits for a batch to fill, but not for long (Clipper, Crankshaw et al.
    2017; Triton Inference Server's dynamic batcher): latency given for batch size. A batch is full
    at `max_num_seqs`.
    """

    name = "dynamic"

    def candidates(
        self, waiting: WaitingQueue, num_running: int, now_s: float
    ) -> Iterator[Request]:
        ready = self.wake_at(waiting)
        if ready is not None and now_s < ready:
            return iter(())
        return super().candidates(waiting, num_running, now_s)

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """When the first request has waited long enough; None if the batch is full."""
        if len(waiting) >= self.max_num_seqs:  # a long queue is not counted at every step
            return None
        if (
            not waiting
            or sum(1 + len(request.unstarted) for request in waiting) >= self.max_num_seqs
        ):
            return None
        return min(request.arrival_s for request in waiting) + self.max_wait_ms / 1000


def _output_len(request: Request) -> int:
    return request.max_num_tokens - request.num_prompt_tokens
