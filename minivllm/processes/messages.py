"""What the process of any engine, under measurement or behind a server, and its parent send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput, Crashed, classify, first_line
from minivllm.models.vision.inputs import RequestInputs
from minivllm.parallel.handover import Content, Handover


class Submit(NamedTuple):
    """Serve a request, or with `hands_over` its prompt and the first token alone, with a `Prefix`
    for another engine.

    Args:
        inputs: images of the prompt.
        prefix: keys and values of the prompt's first blocks, which another engine has computed.
        output_token_ids: of the answer, from other engines: the rest follows.
        confirm: whether an engine under measurement replies that it takes the request.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    inputs: RequestInputs | None = None
    hands_over: Handover | None = None
    prefix: Content = b""
    output_token_ids: Sequence[int] = ()
    confirm: bool = False


class Prefix(NamedTuple):
    """Keys and values of the full blocks of a request's prompt, which another engine continues."""

    request_id: str
    content: Content


class Failed(NamedTuple):
    """Building, a step or a call has failed; after any but bad input the process ends.

    `status` is the one that a record has for such an error, see `classify`.
    """

    message: str
    status: str

    @property
    def error(self) -> Exception:
        """An error that a record has the same status for."""
        kinds = {"invalid": BadInput, "oom": MemoryError, "crashed": Crashed}
        return kinds.get(self.status, RuntimeError)(self.message)


def failed(error: Exception) -> Failed:
    """The message of an error."""
    line = str(error) if isinstance(error, BadInput) else first_line(error)
    return Failed(line, classify(error))


# ---- to an engine behind a server


class Abort(NamedTuple):
    """End a request; one that has ended is ignored."""

    request_id: str


class ResetPrefixCache(NamedTuple):
    """Empty the prefix cache, which a `Reset` answers."""


class Watch(NamedTuple):
    """Send the whole state and what changes, as frames of the live view; or send none any more."""

    on: bool


# ---- from an engine behind a server


class Ready(NamedTuple):
    """The engine is built; what clients and the server need to know of it."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    num_blocks: int
    block_size: int
    default_params: SamplingParams  # of the configuration and the checkpoint
    warnings: list[str]


class Rejected(NamedTuple):
    """The engine does not take a request."""

    request_id: str
    message: str


class Piece(NamedTuple):
    """One token of one completion of a request, or its end."""

    request_id: str
    completion: int  # its number among those of the request
    token_id: int | None
    num_output: int  # tokens of this completion, with this one
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[int, float] | None
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[dict[int, float]] | None  # with the first token of completion 0
    error: str | None
    bad_input: bool = False  # the error is one of the request, as a grammar beyond a limit


class EngineState(NamedTuple):
    """Counts and gauges of the engine after a step; counters grow from its start."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    counters: dict[str, float] | None  # None: not read again since the last time


class Step(NamedTuple):
    """What one step of the engine gave."""

    time_s: float  # time.perf_counter, which all processes of a machine share
    pieces: list[Piece]
    state: EngineState
    begun: list[tuple[str, float]]  # requests that the engine has begun, and when


class Reset(NamedTuple):
    """The prefix cache is empty, or was not emptied since requests are running."""

    done: bool


class ViewFrame(NamedTuple):
    """Step bundles for those who watch.

    `kind` is "changes"; "state", the whole state as those know it who have seen all changes; or
    "restart", the whole state, after which what came before is void.
    """

    text: str  # a list in JSON
    kind: str
