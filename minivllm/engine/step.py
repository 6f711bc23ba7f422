"""The two frozen records that carry one step: what to do (plan), and the tensors to do it with (batch).

They are tuples, since every step makes one of each, and one ScheduledRequest for every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.cache.manager import Transfers

if TYPE_CHECKING:  # the scheduler imports this file and must stay free of torch
    from torch import Tensor

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
        return self.start + self.num_tokens - self.request.num_evicted_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last known token and so chooses the next one."""
        # In place of `end` and `num_tokens`, which are calls: this is asked for every request of every step.
        return self.start + self.num_tokens == len(self.request.token_ids)


class StepPlan(NamedTuple):
    """The scheduler's decision for one step. Pure Python; nothing of it is a tensor."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    shed: tuple[Request, ...] = ()  # ended without being served: too late for their deadline
    transfers: Transfers = Transfers()
    wake_at_s: float | None = None  # nothing is to be done before this time, though requests wait
    num_tokens: int = 0  # computed in this step
    # Those of them that catch up on a prompt, or on everything after a preemption.
    num_prefill_tokens: int = 0


class StepBatch(NamedTuple):
    """One step's tensors, ragged (no padding), passed through model, layer and attention.

    Requests lie one after another along the token axis. T tokens, R requests, B blocks, at least those of the
    longest request, L rows whose logits are wanted.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], position of each token in its sequence
    slot_mapping: Tensor  # int64 [T], where each token's key and value are written in the cache
    query_start_loc: Tensor  # int32 [R + 1], first token of each request; the last entry is T
    seq_lens: Tensor  # int32 [R], tokens that each request holds: cached (not those evicted) plus new
    block_table: Tensor  # int32 [R, B], cache blocks of each request, padded with block 0
    logit_rows: Tensor  # int64 [L], rows of the hidden states to compute logits for
    query_lens_host: tuple[int, ...]  # the same lengths on the host, so that no backend has to wait
    seq_lens_host: tuple[int, ...]
    rotated_lens_host: tuple[int, ...]  # the length of each request that some rotary scalings go by
    # float32 [R, B], where backends add the attention that each block gets; None: unasked
    mass: Tensor | None = None
    observed_host: tuple[int, ...] = ()  # with `mass`: how many of each request's last queries count
    attention: Any = None  # what the attention backend's prepare() made of this batch
