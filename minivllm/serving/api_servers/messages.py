"""What the server's own process and an API server send each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.serving.errors import ApiError
from minivllm.serving.processes.messages import Ready, Step

# ---- to an API server


class Begin(NamedTuple):
    """Answer clients; the first message.

    `number` counts the processes that were started, `paths` are those of calls that are relayed.
    """

    number: int
    config: dict[str, Any]
    model: str
    created: int
    info: Ready
    paths: frozenset[str]


class Share(NamedTuple):
    """What a step gave to its requests, and how much waits for the engine in the whole server."""

    step: Step
    num_waiting: int
    num_waiting_tokens: int


class Ended(NamedTuple):
    """A request has ended with an error."""

    request_id: str
    error: ApiError


class Sent(NamedTuple):
    """A message of ASGI that answers a call."""

    call: int
    message: Any


class Answered(NamedTuple):
    """The last message that answers a call is sent."""

    call: int


class Drain(NamedTuple):
    """Take no further requests."""


class End(NamedTuple):
    """End once the answers that are complete are read, or at once."""

    at_once: bool


# ---- from an API server


class Serving(NamedTuple):
    """Clients are answered from now on."""


class Submitted(NamedTuple):
    """Serve a request of a client's call; `is_admitted` in the place of another one that was."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    inputs: RequestInputs | None
    session: str | None
    arrived_s: float
    is_admitted: bool
    call: int
    came_s: float  # when the call came


class CallEnded(NamedTuple):
    """The answer of a call with requests is written, or will never be."""

    call: int


class Called(NamedTuple):
    """Answer a call as the application does; its scope, as ASGI has it."""

    call: int
    request_id: str
    scope: dict[str, Any]


class Heard(NamedTuple):
    """A message of ASGI that belongs to a relayed call."""

    call: int
    message: Any


class Taken(NamedTuple):
    """The client of a relayed call has taken the last message `Sent`; until then no other comes."""

    call: int


class Left(NamedTuple):
    """A relayed call is over; no more is sent or taken."""

    call: int


class ClientsCounted(NamedTuple):
    """What clients did since the last time, by name, and how many answers had each status."""

    counts: dict[str, int]
    statuses: dict[int, int]
