"""Batching policies: which waiting requests join the running ones, and how a step's token budget
is divided; and the queue of waiting requests, the most urgent first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

from minivllm.cache.manager import CacheManager
from minivllm.engine.options import ContinuousOptions, PreemptionChoice
from minivllm.engine.request import Request
from minivllm.errors import BadInput

Rank = tuple[float, int]


class WaitingQueue:
    """A heap by rank. A preempted request takes its old place.

    Removal leaves the rank in the heap, to be dropped when it reaches the top: each operation costs
    O(log n).

    Attributes:
        requests: those that wait, by rank.
    """

    def __init__(self) -> None:
        self._heap: list[Rank] = []
        self.requests: dict[Rank, Request] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.rank in self.requests

    def push(self, request: Request) -> None:
        """Add a request."""
        self.requests[request.rank] = request
        heapq.heappush(self._heap, request.rank)

    def peek(self) -> Request:
        """The most urgent request. Raises IndexError if none waits."""
        return self.requests[self._heap[0]]

    def in_order(self) -> Iterator[Request]:
        """The most urgent request, repeatedly: once the caller removes it, the next one."""
        while self:
            yield self.peek()

    def front(self) -> Iterator[Request]:
        """Up to seven requests, among them the three most urgent: the first levels of the heap."""
        return (self.requests[rank] for rank in self._heap[:7] if rank in self.requests)

    def remove(self, request: Request) -> None:
        """Remove a request at any place. Raises KeyError if it does not wait."""
        del self.requests[request.rank]
        while self._heap and self._heap[0] not in self.requests:
            heapq.heappop(self._heap)


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
    preemption: PreemptionChoice  # the strategy when the cache is full
    watermark: float
    aging_s: float
    shed: bool

    def candidates(
        self, waiting: WaitingQueue, num_running: int, now_s: float
    ) -> Iterable[Request]:
        """Waiting requests that may join `num_running` running sequences now, in order. The caller
        removes each that it can place from `waiting` and stops at the first that it cannot."""

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """When there will be a candidate, if requests wait, none runs and none is a candidate."""


class Batching:
    """What all policies share; the knobs are those of a policy's options."""

    name: str
    max_num_seqs: int
    prefill_first = fair_prefill = False
    # Whether requests join together even where the budget has no tokens for all of them.
    whole_batch = False

    @property
    def max_num_samples(self) -> int:
        """Most samples of one prompt."""
        return self.max_num_seqs

    def wake_at(self, waiting: WaitingQueue) -> float | None:
        """None: a waiting request is a candidate at once."""
        return None


class Continuous(Batching, ContinuousOptions):
    """Continuous (iteration-level) batching (Orca, Yu et al. 2022): requests join and leave at
    every step."""

    name = "continuous"

    def candidates(
        self, waiting: WaitingQueue, num_running: int, now_s: float
    ) -> Iterator[Request]:
        return requests_that_fit(waiting.in_order(), self.max_num_seqs - num_running)


def requests_that_fit(requests: Iterable[Request], places: int) -> Iterator[Request]:
    """The first requests for which there are places, their further samples included."""
    for request in requests:
        places -= 1 + len(request.unstarted)
        if places < 0:
            return
        yield request


def may_chunk(policy: BatchingPolicy, cache: CacheManager) -> bool:
    """Whether a prompt may be computed over several steps."""
    return policy.chunked_prefill and cache.layout.retains_kv


def require_servable(request: Request, policy: BatchingPolicy, cache: CacheManager) -> None:
    """Raises BadInput if a request can never run: it does not fit the cache, one step, or the
    sequences allowed."""
    chunks = may_chunk(policy, cache)
    # The last token is never computed, so it needs no room.
    longest = request.max_num_tokens - 1
    held = cache.footprint(longest)
    if held > cache.capacity_tokens:
        raise BadInput(
            f"request {request.request_id} may grow to {held} cached tokens, and the KV "
            f"cache holds {cache.capacity_tokens}: ask for fewer tokens, or raise "
            "cache.num_blocks or cache.memory_fraction"
        )
    if not chunks and longest > policy.max_num_batched_tokens:
        raise BadInput(
            f"request {request.request_id} may need {longest} tokens in one step (all of "
            "them, should it be preempted near its end), and a step takes "
            f"{policy.max_num_batched_tokens}: raise batching.max_num_batched_tokens, "
            "or use chunked prefill (batching.chunked_prefill=true) on a cache that keeps "
            "what is computed"
        )
    if not chunks and longest > held:
        raise BadInput(
            f"request {request.request_id} may grow to {longest} tokens, beyond "
            f"cache.eviction_budget (it holds {held}), and what exceeds it cannot be "
            "computed in one step: use batching.chunked_prefill=true"
        )
    samples = 1 + len(request.unstarted)
    if request.group is not None and samples > policy.max_num_samples:
        raise BadInput(
            f"request {request.request_id}: {request.group.knob}={samples} samples at once must "
            f"be at most batching.max_num_seqs={policy.max_num_seqs}: lower the one, or raise the "
            "other"
        )
    if request.group is not None:
        request.group.check(cache)
