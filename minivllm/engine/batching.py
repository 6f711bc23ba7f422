"""Batching policies: who may join the running batch, and how large a step may be."""

from __future__ import annotations

from typing import Protocol

from minivllm.errors import BadInput


class BatchingPolicy(Protocol):
    """A `batching` option. The scheduler asks; the policy keeps no state of requests."""

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool

    def may_admit(self, num_running: int) -> bool:
        """Whether one more waiting request may join `num_running` running ones."""


class Continuous:
    """Continuous (iteration-level) batching (Orca, Yu et al. 2022): requests join and leave at every step.

    Args:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        chunked_prefill: long prompts are cut into pieces that share steps with decoding requests
            (Sarathi-Serve, Agrawal et al. 2024); off, a prompt is computed in one step.
        preemption: what happens to a request that loses its cache: "recompute".
    """

    name = "continuous"

    def __init__(
        self,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        chunked_prefill: bool = True,
        preemption: str = "recompute",
    ) -> None:
        if preemption != "recompute":
            raise BadInput(f"batching.preemption={preemption!r} is not built; use recompute")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill

    def may_admit(self, num_running: int) -> bool:
        """See BatchingPolicy."""
        return num_running < self.max_num_seqs


class Sequential:
    """One request at a time, in order of arrival: the baseline every other policy is compared with.

    Args:
        max_num_batched_tokens: most tokens computed in one step.
        chunked_prefill: cut longer prompts into pieces; off, a prompt is computed in one step.
    """

    name = "sequential"
    max_num_seqs = 1

    def __init__(self, max_num_batched_tokens: int = 2048, chunked_prefill: bool = True) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill

    def may_admit(self, num_running: int) -> bool:
        """See BatchingPolicy."""
        return num_running == 0
