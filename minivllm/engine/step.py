"""The plan of one step: which requests compute how many tokens. (Its tensors are a `StepBatch`.)

Plans are tuples, since every step makes one, and one ScheduledRequest for every request.
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.cache.spec import Transfers
from minivllm.engine.request import Request


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute tokens [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int
    prefill: bool = False  # it catches up on a prompt, or on everything after a preemption

    @property
    def end(self) -> int:
        """Position after the last token computed in this step."""
        return self.start + self.num_tokens

    @property
    def seq_len(self) -> int:
        """Tokens that the request holds after the step: cached (not those evicted) plus new."""
        return self.start + self.num_tokens - self.request.cache.num_evicted

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last known token and so chooses the next one."""
        # In place of `end` and `num_tokens`, which are calls: this is asked for every request of
        # every step.
        return self.start + self.num_tokens == len(self.request.token_ids)


class StepPlan(NamedTuple):
    """The scheduler's decision for one step. Pure Python; nothing of it is a tensor."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    shed: tuple[Request, ...] = ()  # ended without being served: too late for their deadline
    transfers: Transfers = Transfers()
    next_poll_s: float | None = None  # nothing is to be done before this time, though requests wait
    num_tokens: int = 0  # computed in this step
    # Those of them that catch up on a prompt, or on everything after a preemption.
    num_prefill_tokens: int = 0
