"""One request of a trace, and its numbers as files have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.given import whole

HASHES = 2**64
LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `line` is its line number, from 1."""

    line: int
    time_s: float  # after the trace's first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks, where the trace has them
    block_tokens: int = 512  # that a hash id stands for
    kind: str = "text"  # what its prompt was, where the trace says so
    chat: object = None  # its name, in traces of conversations
    parent: object = None  # the name of the turn before

    @property
    def later_turn(self) -> bool:
        """Whether it is a later turn of a conversation."""
        return self.parent is not None


def hash_ids(value: Any, where: str) -> tuple[int, ...]:
    """Names of a prompt's blocks; none where there are none. Raises BadInput, starting with
    `where`."""
    ids = [] if value is None else value
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < HASHES for i in ids):
        raise BadInput(f"{where}: hash_ids must be a list of whole numbers in [0, 2^64)")
    return tuple(ids)


def finite(parse: Callable[[Any], float], value: Any, what: str, kind: str) -> float:
    """A finite number. Raises BadInput, starting with `what`, for a value that is not `kind`."""
    try:
        result = parse(value)
    except (ValueError, TypeError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise BadInput(f"{what}={value!r:.60} is not {kind}")
    return result


def seconds(value: Any) -> float:
    """A number that is one. Raises ValueError or TypeError."""
    if isinstance(value, bool):
        raise ValueError("true is no time")
    return float(value)


def length(value: Any, what: str) -> int:
    """A number of tokens. Raises BadInput, starting with `what`."""
    tokens = whole(finite(seconds, value, what, "a number of tokens"))
    if not isinstance(tokens, int) or not 0 <= tokens <= LONGEST:
        raise BadInput(f"{what}={value!r:.60} is not a number of tokens")
    return tokens
