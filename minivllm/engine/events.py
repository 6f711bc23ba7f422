"""What the engine tells of itself: typed events on one synchronous bus.

They are tuples, since every step makes three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
KINDS = (StateChanged, StepPlanned, BlocksChanged, StepTimed)


class EventBus:
    """Calls who listens with every event of the kinds that were asked for, at once and in order.

    Who tells asks before: `if bus.has_subscribers(StepTimed): bus.emit(StepTimed(...))` costs one
    look-up where nobody listens, and builds no event.
    """

    def __init__(self) -> None:
        self._listeners: dict[type[Event], list[Callable[[Any], None]]] = {
            kind: [] for kind in KINDS
        }

    def has_subscribers(self, kind: type[Event]) -> bool:
        """Whether anybody listens to such events."""
        return bool(self._listeners[kind])

    def subscribe(self, listener: Callable[[Any], None], *kinds: type[Event]) -> Callable[[], None]:
        """Add a listener to events of these kinds, or of all where none is named; the function
        returned removes it."""
        lists = [self._listeners[kind] for kind in kinds or KINDS]
        for listeners in lists:
            listeners.append(listener)

        def remove() -> None:
            for listeners in lists:
                listeners.remove(listener)

        return remove

    def emit(self, event: Event) -> None:
        """Hand `event` to who listens to its kind."""
        for listener in self._listeners[type(event)]:
            listener(event)
