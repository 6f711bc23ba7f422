"""What the process of any engine, under measurement or behind a server, and its parent send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput, first_line
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

    `status` is the one that a record has for such an error: invalid, oom or error.
    """

    message: str
    status: str


def failed(error: Exception) -> Failed:
    """The message of an error."""
    if isinstance(error, BadInput):
        return Failed(str(error), "invalid")
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return Failed(first_line(error), "oom" if out_of_memory else "error")
