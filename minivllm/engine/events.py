"""What the engine tells of itself: typed events on one synchronous bus.

They are tuples, since every step makes three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minivllm.engine.request import RequestState


class StateChanged(NamedTuple):
    """A request entered a state."""

    time_s: float
    request_id: str
    state: RequestState


class StepPlanned(NamedTuple):
    """The scheduler decided a step."""

    time_s: float
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_preempted: int
    num_waiting: int


class BlocksChanged(NamedTuple):
    """Blocks in use once a step is planned."""

    time_s: float
    used: int
    usable: int


class StepTimed(NamedTuple):
    """Where one step's time went, in milliseconds, and what it worked on.

    On an accelerator `forward_ms` is the time to launch the work and `sample_ms` includes waiting
    for it; on a CPU each is the work itself.
    """

    start_s: float
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    context_tokens: int  # cached tokens read by attention, over the requests of the step
    window_tokens: int  # those of them that layers with a sliding window read
    experts_run: int  # experts that got tokens, summed over the layers; 0 in a dense model
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_slots_wasted: int
    kv_slots_allocated: int
    schedule_ms: float
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    emit_ms: float
    gap_ms: float  # from the end of the previous step to the start of this one


Event = StateChanged | StepPlanned | BlocksChanged | StepTimed


class EventBus:
    """Calls every listener with every event, at once and in order.

    A bus without listeners is false: `if bus: bus.emit(...)` costs one test and builds no event.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Add a listener; the function returned removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def emit(self, event: Event) -> None:
        """Hand `event` to all listeners."""
        for listener in self._listeners:
            listener(event)
