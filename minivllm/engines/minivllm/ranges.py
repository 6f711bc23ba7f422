"""The phases of our engine's steps as ranges of torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.profiler import record_function

from minivllm.engine.engine import Engine


class _Ranges:
    """One open range at a time."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._name = ""

    def mark(self, phase: str) -> float:
        """Let the range of this phase begin, and the one before end; see `phase_begins`."""
        if phase != self._name:
            self._open.close()
            self._name = phase
            if phase:
                self._open.enter_context(record_function(phase))
        return time.perf_counter()


@contextmanager
def phase_ranges(engine: Engine) -> Iterator[None]:
    """While it is open, a step is the ranges schedule, prepare, forward, sample and emit, one after
    the other.

    They begin where the engine takes the times of its breakdown. With `runtime.overlap` the first
    step of all reads no tokens, so its `sample` goes on to its end; the last one computes nothing,
    so it has no `prepare` and `forward`.
    """
    ranges, usual = _Ranges(), engine.runner.mark
    engine.runner.mark = ranges.mark
    try:
        yield
    finally:
        engine.runner.mark = usual
        ranges.mark("")
