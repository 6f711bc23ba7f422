"""The evictor: applies an eviction policy to the sequences of a cache. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm.cache.eviction.policies import Eviction
from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import CachedSequence
from minivllm.cache.spec import CacheCounters


class Evictor:
    """Limits what a sequence holds, and drops blocks of a sequence that has reached the limit.

    Args:
        policy: chooses the blocks.
        pool: gets the dropped blocks.
        counters: count the blocks and tokens evicted, and the queries observed.
    """

    def __init__(self, policy: Eviction, pool: BlockPool, counters: CacheCounters) -> None:
        self.policy, self.pool, self.counters = policy, pool, counters

    def room(self, sequence: CachedSequence, computed: int) -> int:
        """Tokens that the sequence may compute in one step after the first `computed`."""
        return self.policy.capacity - computed + sequence.num_evicted

    def evict(self, sequence: CachedSequence, computed: int, most: int) -> None:
        """Drop blocks of a sequence that has filled its budget and goes on.

        Args:
            sequence: has computed its first `computed` tokens.
            computed: number of those tokens.
            most: tokens that the sequence may come to have. The last one is never computed.
        """
        policy = self.policy
        if self.room(sequence, computed) > 0 or computed >= most - 1:
            return
        scores = sequence.block_scores + [0.0] * (policy.budget - len(sequence.block_scores))
        indices = policy.drop(scores)
        self.pool.release(sequence.block_table.drop(indices))
        dropped = set(indices)
        sequence.block_scores = [
            score for i, score in enumerate(scores) if policy.remembers and i not in dropped
        ]
        sequence.num_evicted += len(indices) * policy.block_size
        self.counters.blocks_evicted += len(indices)
        self.counters.tokens_evicted += len(indices) * policy.block_size

    def observe(
        self, steps: Iterable[tuple[CachedSequence, int, int]], scores: Sequence[Sequence[float]]
    ) -> None:
        """Add the attention that each block of each sequence got in a step.

        Args:
            steps: sequences, the tokens that each held before, and those that it computed.
            scores: a row a sequence, a number a block.
        """
        for (sequence, held, count), row in zip(steps, scores, strict=True):
            self.counters.queries_observed += self.policy.observed(held, count)
            missing = len(sequence.block_table.blocks) - len(sequence.block_scores)
            known = sequence.block_scores + [0.0] * missing
            sequence.block_scores = [old + new for old, new in zip(known, row, strict=False)]
