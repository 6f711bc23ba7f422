"""The phases of our engine's steps as ranges of torch's profiler, opened and closed from outside the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch.profiler import record_function

from minivllm.engine.engine import Engine


class _Ranges:
    """One open range at a time."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._name: str | None = None

    def enter(self, name: str | None) -> None:
        """Close the range that is open, unless it is this one, and open this one; None opens none."""
        if name != self._name:
            self._open.close()
            self._name = name
            if name is not None:
                self._open.enter_context(record_function(name))


@contextmanager
def phase_ranges(engine: Engine) -> Iterator[None]:
    """While it is open, a step is the ranges schedule, prepare, forward, sample and emit, one after the other.

    They begin and end with the calls at which the engine takes the times of its breakdown. With
    `runtime.overlap` the first step of all reads no tokens, so its `sample` goes on to its end. Outside, the
    engine is as it was: nothing is asked at a step whether somebody profiles.
    """
    ranges, launcher, graphs = _Ranges(), engine.launcher, engine.launcher.graphs
    # Object, method, the range that its call begins, the one that its return begins.
    calls: list[tuple[Any, str, str, str | None]] = [
        (engine, "step", "schedule", None),
        (launcher, "launch", "prepare", "sample"),
        (launcher, "forward", "forward", "sample"),
        (launcher, "read", "sample", "emit"),
    ]
    if graphs is not None:
        calls.append((graphs, "replay", "forward", "sample"))
    for owner, name, before, after in calls:
        setattr(owner, name, _between(ranges, getattr(owner, name), before, after))
    try:
        yield
    finally:
        for owner, name, _, _ in calls:
            delattr(owner, name)  # the class has it still


def _between(ranges: _Ranges, call: Callable[..., Any], before: str, after: str | None) -> Callable[..., Any]:
    @wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        ranges.enter(before)
        try:
            return call(*args, **kwargs)
        finally:
            ranges.enter(after)

    return within
