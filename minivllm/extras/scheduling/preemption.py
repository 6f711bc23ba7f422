"""Preemption strategies beside recomputing."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.preemption import Recompute
from minivllm.engine.request import Request
from minivllm.errors import BadInput


class Swap(Recompute):
    """Copy what was computed to host memory and back (Kwon et al. 2023, section 4.5); recompute
    where that is full."""

    name = "swap"

    def fit(self, layout: CacheLayout) -> CacheLayout:
        if not layout.host_slots:
            raise BadInput(
                "batching.preemption=swap has no host memory to swap to: use cache=paged with "
                "cache.swap_space_gb above 0, or batching.preemption=recompute"
            )
        return layout

    def preempt(self, request: Request, cache: CacheManager) -> None:
        if not cache.swap_out(request.cache, request.num_computed_tokens):
            super().preempt(request, cache)


class Reserve(Recompute):
    """Admit a request only if all blocks that it may ever need are there, so that none is
    preempted.

    What Orca and FasterTransformer do with contiguous memory: safe, and fewer requests run at once.
    """

    name = "reserve"

    def check(self, request: Request, cache: CacheManager) -> None:
        if self._worst(request, cache) > cache.pool.num_usable:
            raise BadInput(
                f"request {request.request_id} may need {self._worst(request, cache)} cache "
                f"blocks for its {1 + len(request.unstarted)} samples, and there are "
                f"{cache.pool.num_usable}: lower n, beam_width or max_tokens, raise "
                "cache.num_blocks, or use batching.preemption=recompute"
            )

    def may_admit(self, request: Request, running: Iterable[Request], cache: CacheManager) -> bool:
        promised = sum(
            self._worst(other, cache)
            - len(other.cache.block_table.blocks)
            + cache.must_copy(other.cache, other.num_computed_tokens)
            for other in running
        )
        return promised + self._worst(request, cache) <= cache.pool.num_free

    @staticmethod
    def _worst(request: Request, cache: CacheManager) -> int:
        """Blocks that a request and its further samples hold at their ends, if they share none."""
        return (1 + len(request.unstarted)) * cache.blocks_for(
            cache.footprint(request.max_num_tokens - 1)
        )
