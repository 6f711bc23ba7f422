"""Batching policies: which waiting requests join the running ones, and how a step's tokens are shared out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
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
    preemption: Preemption
    watermark: float
    aging_s: float
    shed: bool

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterable[Request]:
        """Waiting requests that may join `num_running` running sequences now, in order. The caller takes each
        that it can place out of `waiting` and stops at the first that it cannot."""

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """With requests waiting, none running and no candidate: when there will be one."""


class Continuous:
    """Continuous (iteration-level) batching (Orca, Yu et al. 2022): requests join and leave at every step.

    Args:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        chunked_prefill: long prompts are cut into pieces that share steps with decoding requests
            (Sarathi-Serve, Agrawal et al. 2024); off, a prompt is computed in one step.
        prefill_first: prompts come before decoding requests in a step, as in Orca; off, decoding requests
            come first and prompts get what they leave.
        fair_prefill: prompts being computed share the step's tokens evenly; off, one after another gets all.
        preemption: "recompute", "swap" or "reserve": see preemption.py.
        watermark: share of the blocks that admission leaves free, so that those running can grow.
        aging_s: a request gains one step of priority for every so many seconds that it waits.
        shed: end requests that can no longer meet their deadline.
    """

    name = "continuous"
    whole_batch = False  # whether requests join together even where the step has no tokens left for them

    def __init__(
        self,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        chunked_prefill: bool = True,
        prefill_first: bool = False,
        fair_prefill: bool = False,
        preemption: str = "recompute",
        watermark: float = 0.01,
        aging_s: float = 60.0,
        shed: bool = False,
    ) -> None:
        self.max_num_seqs = self.max_num_samples = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.prefill_first = prefill_first
        self.fair_prefill = fair_prefill
        self.preemption = make_preemption(preemption)
        self.watermark = watermark
        self.aging_s = aging_s
        self.shed = shed

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        free = self.max_num_seqs - num_running
        while waiting:
            request = waiting.peek()
            free -= 1 + len(request.siblings)
            if free < 0:
                return
            yield request

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """Never: candidates are there as soon as a request waits."""
        return None


class Sequential(Continuous):
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


class Static(Continuous):
    """A batch starts together, and nobody joins before its last member has ended.

    No padding is computed: what it loses against continuous batching are the places of those that end early.

    Args:
        group_by_length: batches are made of requests of similar output length, from the `4 * max_num_seqs` most
            urgent ones: those that end early wait less for the last (as Fairseq and transformers group by length).

    The others are those of Continuous.
    """

    name = "static"
    whole_batch = True

    def __init__(
        self,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        chunked_prefill: bool = True,
        group_by_length: bool = False,
        preemption: str = "recompute",
        watermark: float = 0.01,
        aging_s: float = 60.0,
        shed: bool = False,
    ) -> None:
        super().__init__(
            max_num_seqs,
            max_num_batched_tokens,
            chunked_prefill,
            preemption=preemption,
            watermark=watermark,
            aging_s=aging_s,
            shed=shed,
        )
        self.group_by_length = group_by_length

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        if num_running or not waiting:
            return
        chosen = waiting.most_urgent(self.max_num_seqs * (4 if self.group_by_length else 1))
        if self.group_by_length:
            # The most urgent one always runs; with it those that will take about as long.
            wanted = _output_len(chosen[0])
            chosen.sort(key=lambda request: (abs(_output_len(request) - wanted), request.rank))
        free = self.max_num_seqs
        for request in chosen:
            free -= 1 + len(request.siblings)
            if free < 0:
                return
            yield request


class Dynamic(Static):
    """Static batching that waits for a batch to fill, but not for long (Clipper, Crankshaw et al. 2017; Triton
    Inference Server's dynamic batcher): latency given for batch size.

    Args:
        max_wait_ms: most milliseconds that the first request of a batch waits for others.

    The others are those of Static; a batch is full at `max_num_seqs`.
    """

    name = "dynamic"

    def __init__(
        self,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_wait_ms: float = 50.0,
        chunked_prefill: bool = True,
        group_by_length: bool = False,
        preemption: str = "recompute",
        watermark: float = 0.01,
        aging_s: float = 60.0,
        shed: bool = False,
    ) -> None:
        super().__init__(
            max_num_seqs,
            max_num_batched_tokens,
            chunked_prefill,
            group_by_length,
            preemption,
            watermark,
            aging_s,
            shed,
        )
        self.max_wait_s = max_wait_ms / 1000

    def candidates(self, waiting: WaitingQueue, num_running: int, now_s: float) -> Iterator[Request]:
        """See BatchingPolicy."""
        ready = self.wake_at(waiting)
        if ready is None or now_s >= ready:
            yield from super().candidates(waiting, num_running, now_s)

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """When the first to come has waited long enough; None if the batch is full."""
        if not waiting or len(waiting) >= self.max_num_seqs:
            return None
        return min(request.arrival_s for request in waiting) + self.max_wait_s


def _output_len(request: Request) -> int:
    return request.max_num_tokens - request.num_prompt_tokens
