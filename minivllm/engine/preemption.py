"""Preemption: how a running request gives up its blocks when the cache is full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, runtime_checkable

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.request import Request


@runtime_checkable
class Preemption(Protocol):
    """A `batching.preemption` choice."""

    name: str

    def fit(self, layout: CacheLayout) -> CacheLayout:
        """The cache's layout with the host memory that the strategy uses. Raises BadInput if it
        lacks what it needs."""

    def check(self, request: Request, cache: CacheManager) -> None:
        """Raises BadInput if the request could never be admitted."""

    def may_admit(self, request: Request, running: Iterable[Request], cache: CacheManager) -> bool:
        """Whether the blocks that `request` may need later allow it to join `running`."""

    def preempt(self, request: Request, cache: CacheManager) -> None:
        """Free the request's blocks, so that it can resume later."""


class Recompute:
    """Drop what was computed; the request computes all its tokens again (vLLM v1's only way)."""

    name = "recompute"

    def fit(self, layout: CacheLayout) -> CacheLayout:
        """Nothing goes to host memory."""
        return replace(layout, host_slots=0)

    def check(self, request: Request, cache: CacheManager) -> None:
        """Whatever fits the cache alone will be admitted."""

    def may_admit(self, request: Request, running: Iterable[Request], cache: CacheManager) -> bool:
        """Always."""
        return True

    def preempt(self, request: Request, cache: CacheManager) -> None:
        cache.free(request.cache)
        request.num_computed_tokens = 0
