"""What the server's own process and an API server send each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.processes.messages import Ready
from minivllm.serving.errors import ApiError
from minivllm.serving.http.access import Accesses

# ---- to an API server, beside a `Step` with what it gave to its requests, and `Queued`, how much
# waits for the engine in the whole server


class ApiServerStart(NamedTuple):
    """Answer clients; the first message.

    `number` counts the processes that were started, `relayed` is what the routes of
    relayed calls declare.
    """

    number: int
    config: dict[str, Any]
    model: str
    created: int
    info: Ready
    relayed: Accesses


class RequestFailed(NamedTuple):
    """A request has ended with an error."""

    request_id: str
    error: ApiError


class ToClient(NamedTuple):
    """A message of ASGI that answers a relayed call."""

    call: int
    message: Any


class AnswerComplete(NamedTuple):
    """The last message that answers a relayed call is sent."""

    call: int


class MessageWanted(NamedTuple):
    """Send the next message of the client of a relayed call."""

    call: int


class Drain(NamedTuple):
    """Take no further requests."""


class End(NamedTuple):
    """End once the answers that are complete are read, or at once."""

    at_once: bool


# ---- from an API server, beside `Abort`


class ApiServerReady(NamedTuple):
    """Clients are answered from now on."""


class NewRequests(NamedTuple):
    """Serve the requests of a client's call, all or none.

    `prompts` are token ids by the requests' ids. `is_admitted`: they come in the place of others
    that were admitted.
    """

    prompts: dict[str, list[int]]
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


class RelayedCall(NamedTuple):
    """Answer a call as the application does; its scope, as ASGI has it."""

    call: int
    request_id: str
    scope: dict[str, Any]


class FromClient(NamedTuple):
    """A message of ASGI that belongs to a relayed call."""

    call: int
    message: Any


class MessageDelivered(NamedTuple):
    """The client of a relayed call has the last message `ToClient`; until then no other comes."""

    call: int


class CallCancelled(NamedTuple):
    """A relayed call is over; no more is sent or taken."""

    call: int


class ClientCounts(NamedTuple):
    """What clients did since the last time, by name, and how many answers had each status."""

    counts: dict[str, int]
    statuses: dict[int, int]
