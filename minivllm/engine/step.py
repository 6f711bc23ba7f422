"""The plan of one step: which requests compute how many tokens. (Its tensors are a `StepBatch`.)

Plans are tuples, since every step makes one, and one ScheduledRequest for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from minivllm.cache.spec import NOTHING, Transfers
from minivllm.engine.request import Request


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute tokens [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int
    prefill: bool = False  # it computes a prompt, or everything again after a preemption
    num_drafts: int = 0  # tokens at the end of it that are drafts

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
        """Whether the step reaches the request's last known token, drafts included, and so chooses
        the next one."""
        # Without the property `end`: every step evaluates this for every request.
        return self.start + self.num_tokens == len(self.request.token_ids)


class SampledRows(NamedTuple):
    """Which rows of a step's logits choose tokens, and for which requests."""

    requests: list[Request]  # each gets the token of its row; several where it has drafts
    positions: list[int]  # of these tokens
    rows: tuple[int, ...] | None = None  # of the logits; None: all, in order
    forks: tuple[tuple[Request, Request], ...] = ()  # parents, and children that start now
    # Joint members, and the row of the logits of each.
    joint: Mapping[Request, int] = MappingProxyType({})


class Preempted(NamedTuple):
    """A request that gave up its blocks, and the one that needed them (which may be itself)."""

    request: Request
    needed_by: Request


HeldFor = Literal["blocks", "budget", "disk", "reserve"]


class Held(NamedTuple):
    """The most urgent request of those that the cache or the budget did not admit, and why."""

    request: Request
    reason: HeldFor
    num_tokens: int = 0  # that the step would have computed, had there been blocks
    num_free: int = 0  # blocks
    spare: int = 0  # blocks that must stay free


class StepPlan(NamedTuple):
    """The scheduler's decision for one step. Pure Python; nothing of it is a tensor."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Preempted, ...] = ()
    shed: tuple[Request, ...] = ()  # ended unserved: their deadline cannot be met
    transfers: Transfers = NOTHING
    next_poll_s: float | None = None  # requests wait, and nothing can be done before this time
    num_tokens: int = 0  # computed in this step
    # Tokens of prompts, and those computed again after a preemption.
    num_prefill_tokens: int = 0
    num_drafts: int = 0  # drafts to verify in this step
    held: Held | None = None
