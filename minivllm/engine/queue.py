"""The queue of waiting requests, the most urgent first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from minivllm.engine.request import Request

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
