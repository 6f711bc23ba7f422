"""Batching policies: which waiting requests join the running ones, and how a step's tokens are shared out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(eq=False)
class Batching:
    """What all policies share.

    Args:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        chunked_prefill: long prompts are cut into pieces that share steps with decoding requests
            (Sarathi-Serve, Agrawal et al. 2024); off, a prompt is computed in one step.
        preemption: "recompute", "swap" or "reserve": see preemption.py.
        watermark: share of the blocks that admission leaves free, so that those running can grow.
        aging_s: a request gains one step of priority for every so many seconds that it waits.
        shed: end requests that can no longer meet their deadline.
    """

    prefill_first = fair_prefill = False
    whole_batch = False  # whether requests join together even where the step has no tokens left for them

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    chunked_prefill: bool = True
    preemption: str = "recompute"
    watermark: float = 0.01
    aging_s: float = 60.0
    shed: bool = False

    def __post_init__(self) -> None:
        self.max_num_samples = self.max_num_seqs
        self.preemption_strategy = make_preemption(self.preemption)

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """Never: candidates are there as soon as a request waits."""
        return None


@dataclass(eq=False)
class Continuous(Batching):
    """Continuous (iteration-level) batching (Orca, Yu et al. 2022): requests join and leave at every step.

    Args:
        prefill_first: prompts come before decoding requests in a step, as in Orca; off, decoding requests
            come first and prompts get what they leave.
        fair_prefill: prompts being computed share the step's tokens evenly; off, one after another gets all.

    The others are those of Batching.
    """

    name = "continuous"

    prefill_first: bool = False
    fair_prefill: bool = False

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        return _that_fit(waiting.in_order(), self.max_num_seqs - num_running)


class Sequential(Batching):
    """One request at a time, in order: the baseline every other policy is compared with.

    Args:
        max_num_batched_tokens: most tokens computed in one step.
        chunked_prefill: cut longer prompts into pieces; off, a prompt is computed in one step.
        aging_s: a request gains one step of priority for every so many seconds that it waits.
        shed: end requests that can no longer meet their deadline.
    """

    name = "sequential"

    def __init__(
        self,
        max_num_batched_tokens: int = 2048,
        chunked_prefill: bool = True,
        aging_s: float = 60.0,
        shed: bool = False,
    ) -> None:
        super().__init__(1, max_num_batched_tokens, chunked_prefill, aging_s=aging_s, shed=shed)
        self.max_num_samples = sys.maxsize

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy. The samples of one prompt are one request, and run together."""
        if waiting and not num_running:
            yield waiting.peek()


@dataclass(eq=False)
class Static(Batching):
    """A batch starts together, and nobody joins before its last member has ended.

    No padding is computed: what it loses against continuous batching are the places of those that end early.

    Args:
        group_by_length: batches are made of requests of similar output length, from the `4 * max_num_seqs` most
            urgent ones: those that end early wait less for the last (as Fairseq and transformers group by length).

    The others are those of Batching.
    """

    name = "static"
    whole_batch = True

    group_by_length: bool = False

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


@dataclass(eq=False)
class Dynamic(Static):
    """Static batching that waits for a batch to fill, but not for long (Clipper, Crankshaw et al. 2017; Triton
    Inference Server's dynamic batcher): latency given for batch size.

    Args:
        max_wait_ms: most milliseconds that the first request of a batch waits for others.

    The others are those of Static; a batch is full at `max_num_seqs`.
    """

    name = "dynamic"

    max_wait_ms: float = 50.0

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
