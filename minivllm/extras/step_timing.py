"""Where the time of a step goes, for listeners of StepTimed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from minivllm.engine.engine import Engine
from minivllm.engine.events import StepTimed
from minivllm.engine.step import StepPlan
from minivllm.extras.cached_blocks import wasted_slots
from minivllm.kernels.transfer import Download

if TYPE_CHECKING:
    from minivllm.extras.vision.encoder import Encoder


class StepTiming:
    """Emits the timings of an engine's steps; see StepTimer."""

    def __init__(self, engine: Engine, encoder: Encoder | None = None) -> None:
        self._engine = engine
        self._experts: int | Download = 0  # experts that got tokens
        self._blocks = 0, 0  # in use, and empty slots in them
        self._pending: tuple[StepTimed, Download] | None = None
        self._encoder = encoder
        self._seeing = 0.0, 0.0

    def launched(self) -> None:
        """The count is on its way to the host from now on."""
        count = self._engine.loaded.model.experts_run
        self._experts = Download(count[None]) if isinstance(count, Tensor) else count
        if self._encoder is not None:
            self._seeing = self._encoder.step_ms, self._encoder.step_flops

    def computed(self) -> None:
        """The cache is fullest now."""
        cache, running = self._engine.cache, self._engine.scheduler.running
        self._blocks = cache.pool.num_used, wasted_slots(cache, running)

    def emit(self, plan: StepPlan, seq_lens: Sequence[int], marks: Sequence[float | None]) -> None:
        engine, (used, wasted) = self._engine, self._blocks
        ends: list[float] = []
        for mark in marks:
            ends.append(ends[-1] if mark is None else mark)
        gap, schedule, draft, prepare, forward, sample, emit = (
            1e3 * (end - begin) for begin, end in pairwise(ends)
        )
        window, experts = engine.loaded.config.sliding_window, self._experts
        near = seq_lens if window is None else [min(length, window) for length in seq_lens]
        timed = StepTimed(
            start_s=time.monotonic() - (time.perf_counter() - ends[1]),
            num_requests=len(plan.scheduled),
            num_tokens=plan.num_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_drafts=plan.num_drafts,
            context_tokens=sum(seq_lens),
            window_tokens=sum(near),
            experts_run=experts if isinstance(experts, int) else 0,
            waiting=len(engine.scheduler.waiting),
            kv_blocks_used=used,
            kv_blocks_total=engine.cache.pool.num_usable,
            kv_slots_wasted=wasted,
            kv_slots_allocated=used * engine.cache.layout.block_size,
            schedule_ms=schedule,
            draft_ms=draft,
            prepare_ms=prepare,
            forward_ms=forward,
            sample_ms=sample,
            emit_ms=emit,
            gap_ms=gap,
            encoder_ms=self._seeing[0],
            encoder_flops=self._seeing[1],
        )
        if isinstance(experts, Download):
            self._pending = timed, experts
        else:
            engine.events.emit(timed)

    def emit_pending(self) -> None:
        if self._pending is not None:
            (timed, experts), self._pending = self._pending, None
            self._engine.events.emit(timed._replace(experts_run=experts.values()[0]))
