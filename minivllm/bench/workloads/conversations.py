"""Conversations and sessions: the order, due time and prompt of each of their requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from minivllm.bench.workloads.lazy_prompt import JoinedPrompt, answer_positions
from minivllm.bench.workloads.workload import WorkloadRequest
from minivllm.errors import BadInput


class Conversations:
    """The requests of a workload, from the answers that they wait for to the moment they are due.

    A turn's prompt is the prompt of the turn before it, the answer that came, and its own tokens.
    Any other request has its prompt to itself.

    Args:
        requests: of the workload. The first one of each conversation or session opens it; these
            requests' indices are in `openings`.
        simulated: answers have no tokens, only positions (`answer_positions`).
        tells_ids: whether the token ids of answers are known, of which later turns are made.

    Raises:
        BadInput: later turns need answers whose ids are not known; a request waits for one that is
            not there or comes later; or a turn follows one that another turn follows.
    """

    def __init__(
        self, requests: Sequence[WorkloadRequest], simulated: bool, tells_ids: bool = True
    ) -> None:
        later = next((request for request in requests if request.follows is not None), None)
        if later is not None and not tells_ids:
            raise BadInput(
                f"the prompt of {later.request_id} holds the answer to {later.follows}, and the "
                "server tells no token ids of its answers: use a server that does (vLLM's "
                "return_token_ids), or workload=agentic, whose prompts hold no answers"
            )
        self._requests, self._simulated = requests, simulated
        self.openings: list[int] = []
        self._opening: list[int] = []  # of each request, the one of its session
        self._roots: dict[int, list[int]] = {}  # opening -> others that wait for no request
        # opening -> requests that have not ended, where there are several
        self._left: dict[int, int] = {}
        self._next: dict[int, int] = {}  # turn -> the one after it
        # request -> those that wait for it, and how long after its end
        self._waiting: dict[int, list[tuple[int, float]]] = {}
        self._missing: dict[int, int] = {}  # request -> answers that it still waits for
        self._earliest: dict[int, float] = {}  # request -> when it is due by those that have come
        self._lost: set[int] = set()
        self._prompts: dict[int, Sequence[int]] = {}  # of conversations that go on
        self._due: list[tuple[float, int]] = []  # heap of requests that wait for their time
        self._link()

    def _link(self) -> None:
        place: dict[str, int] = {}
        sessions: dict[str, int] = {}  # name -> opening
        for i, request in enumerate(self._requests):
            before = [request.follows] if request.follows is not None else list(request.after)
            earlier = [place.get(name, -1) for name in before]
            if -1 in earlier or (request.follows is not None and earlier[0] in self._next):
                name = before[earlier.index(-1)] if -1 in earlier else request.follows
                raise BadInput(
                    f"the workload's request {request.request_id} must follow an earlier "
                    f"request, and no other may follow the same: {name}"
                )
            opening = self._opening[earlier[0]] if earlier else i
            if request.session is not None:
                opening = sessions.setdefault(request.session, opening)
            self._opening.append(opening)
            if opening == i:
                self.openings.append(i)
            else:
                self._left[opening] = self._left.get(opening, 1) + 1
            waits = (request.think_s or 0.0,) if request.follows is not None else request.after_s
            for index, wait_s in zip(earlier, waits, strict=True):
                self._waiting.setdefault(index, []).append((i, wait_s))
            if request.follows is not None:
                self._next[earlier[0]] = i
            if earlier:
                self._missing[i] = len(earlier)
            elif opening != i:
                self._roots.setdefault(opening, []).append(i)
            place[request.request_id] = i

    def begin(self, opening: int, now: float) -> None:
        """Begin a conversation or session: its requests that wait for no other are due, each
        after its own delay."""
        for index in (opening, *self._roots.pop(opening, ())):
            heapq.heappush(self._due, (now + (self._requests[index].think_s or 0.0), index))

    def prompt(self, index: int) -> Sequence[int]:
        """The prompt of a request, whose turn has come; of a later turn all turns before,
        too."""
        prompt = self._prompts.pop(index, self._requests[index].prompt_token_ids)
        if index in self._next:
            self._prompts[index] = prompt
        return prompt

    def answered(self, index: int, token_ids: Sequence[int], now: float) -> None:
        """Take note of an answer that has ended."""
        self._end(index)
        if index in self._next:
            turn = self._next[index]
            if self._simulated:
                token_ids = answer_positions(self._requests[index].request_id, len(token_ids))
            before = self._prompts.pop(index)
            pieces = before.pieces if isinstance(before, JoinedPrompt) else (before,)
            own = self._requests[turn].prompt_token_ids
            self._prompts[turn] = JoinedPrompt((*pieces, token_ids, own))
        for later, wait_s in self._waiting.pop(index, ()):
            self._earliest[later] = max(self._earliest.get(later, -math.inf), now + wait_s)
            self._missing[later] -= 1
            if not self._missing[later]:
                heapq.heappush(self._due, (self._earliest.pop(later), later))

    def broken_off(self, index: int) -> list[int]:
        """The requests that will never come because this one's answer did not, in their order."""
        self._end(index)
        lost: list[int] = []
        reached = [index]
        for one in reached:
            for later, _ in self._waiting.pop(one, ()):
                if later not in self._lost:
                    self._lost.add(later)
                    self._end(later)
                    lost.append(later)
                    reached.append(later)
        return sorted(lost)

    def _end(self, index: int) -> None:
        opening = self._opening[index]
        if opening in self._left:
            self._left[opening] -= 1

    def is_over(self, index: int) -> bool:
        """Whether all requests of this one's conversation or session have ended."""
        return not self._left.get(self._opening[index], 0)

    def next_due(self) -> float:
        """When the next request is due; infinite if none waits for its time."""
        return self._due[0][0] if self._due else math.inf

    def pop(self) -> tuple[float, int]:
        """The next request: when it was due, and its index."""
        return heapq.heappop(self._due)
