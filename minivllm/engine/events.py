"""Typed events of the engine on one synchronous bus.

They are tuples, since every step makes three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from minivllm.engine.request import Request, RequestState
from minivllm.engine.step import StepPlan


class StateChanged(NamedTuple):
    """A request entered a state."""

    time_s: float
    request: Request
    state: RequestState


class StepPlanned(NamedTuple):
    """The scheduler decided a step; nothing of it is computed yet."""

    time_s: float
    plan: StepPlan


class StepEnded(NamedTuple):
    """A step is over: its tokens are in their requests, and blocks of finished requests are free.

    With overlapping steps the tokens are those of the step before.
    """

    time_s: float
    plan: StepPlan  # where it had drafts, with the accepted ones only


class StepTimed(NamedTuple):
    """Where one step's time went, in milliseconds, and what it worked on.

    On an accelerator `forward_ms` is the time to launch the work and `sample_ms` includes waiting
    for it; on a CPU each is the work itself.
    """

    start_s: float
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_drafts: int  # of these tokens, drafts that the step verifies
    context_tokens: int  # cached tokens read by attention, over the requests of the step
    window_tokens: int  # of these, those within sliding windows
    experts_run: int  # experts that got tokens, summed over the layers; 0 in a dense model
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_slots_wasted: int
    kv_slots_allocated: int
    schedule_ms: float
    draft_ms: float  # drafting by a model
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    emit_ms: float
    gap_ms: float  # from the end of the previous step to the start of this one
    encoder_ms: float = 0.0  # of prepare_ms, towers of images
    encoder_flops: float = 0.0


Event = StateChanged | StepPlanned | StepEnded | StepTimed
KINDS = (StateChanged, StepPlanned, StepEnded, StepTimed)


class EventBus:
    """Calls each listener with the events of the kinds that it subscribed to, at once and in order.

    The engine looks for listeners before it builds an event: `if bus.listeners[StepTimed]:
    bus.emit(StepTimed(...))` costs one look-up without listeners.
    """

    def __init__(self) -> None:
        self.listeners: dict[type[Event], list[Callable[[Any], None]]] = {
            kind: [] for kind in KINDS
        }

    def subscribe(self, listener: Callable[[Any], None], *kinds: type[Event]) -> Callable[[], None]:
        """Add a listener to events of these kinds, or of all where none is named; the function
        returned removes it."""
        lists = [self.listeners[kind] for kind in kinds or KINDS]
        for listeners in lists:
            listeners.append(listener)

        def remove() -> None:
            for listeners in lists:
                listeners.remove(listener)

        return remove

    def emit(self, event: Event) -> None:
        """Call the listeners of this kind of event."""
        for listener in self.listeners[type(event)]:
            listener(event)
