"""Conversations of several turns: each turn's order, due time and prompt."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from minivllm.bench.workloads.lazy_prompt import JoinedPrompt, answer_positions
from minivllm.bench.workloads.workload import WorkloadRequest
from minivllm.errors import BadInput


class Conversations:
    """The later turns of a workload, from the answer that they wait for to the moment they are due.

    A turn's prompt is the prompt of the turn before it, the answer that came, and its own tokens.

    Args:
        requests: of the workload. One that follows no other opens a conversation; its index is in
            `openings`.
        simulated: answers have no tokens, only positions (`answer_positions`).

    Raises:
        BadInput: a turn follows a request that is not there, or that another turn follows.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], simulated: bool) -> None:
        self._requests, self._simulated = requests, simulated
        place = {request.request_id: i for i, request in enumerate(requests)}
        self.openings = [i for i, request in enumerate(requests) if request.follows is None]
        self._next: dict[int, int] = {}  # turn -> the one after it
        for i, request in enumerate(requests):
            if request.follows is not None:
                before = place.get(request.follows, i)
                if before >= i or before in self._next:
                    raise BadInput(
                        f"the workload's request {request.request_id} must follow an earlier "
                        f"request, and no other may follow the same: {request.follows}"
                    )
                self._next[before] = i
        self._prompts: dict[int, Sequence[int]] = {}  # of conversations that go on
        self._due: list[tuple[float, int]] = []  # heap of turns that wait for their time

    def prompt(self, index: int) -> Sequence[int]:
        """The prompt of a request, whose turn has come; of a later turn all that was said before,
        too."""
        prompt = self._prompts.pop(index, self._requests[index].prompt_token_ids)
        if index in self._next:
            self._prompts[index] = prompt
        return prompt

    def answered(self, index: int, token_ids: Sequence[int], now: float) -> bool:
        """Take note of an answer that has ended; returns whether its conversation goes on."""
        if index not in self._next:
            return False
        turn = self._next[index]
        request = self._requests[turn]
        if self._simulated:
            token_ids = answer_positions(self._requests[index].request_id, len(token_ids))
        before = self._prompts.pop(index)
        pieces = before.pieces if isinstance(before, JoinedPrompt) else (before,)
        self._prompts[turn] = JoinedPrompt((*pieces, token_ids, request.prompt_token_ids))
        heapq.heappush(self._due, (now + (request.think_s or 0.0), turn))
        return True

    def broken_off(self, index: int) -> list[int]:
        """The turns that will never come because this one's answer did not, in their order."""
        lost: list[int] = []
        while (index := self._next.get(index, -1)) >= 0:
            lost.append(index)
        return lost

    def next_due(self) -> float:
        """When the next turn is due; infinite if none waits for its time."""
        return self._due[0][0] if self._due else math.inf

    def pop(self) -> tuple[float, int]:
        """The next turn: when it was due, and its index."""
        return heapq.heappop(self._due)
