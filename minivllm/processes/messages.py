"""What the process of any engine, under measurement or behind a server, sends its parent."""

from __future__ import annotations

from typing import NamedTuple

from minivllm.errors import BadInput, first_line


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
