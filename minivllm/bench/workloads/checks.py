"""What a class's knobs must be, and what fits a context; built-in options are checked by options.py
first."""

from __future__ import annotations

import math
from typing import Any

from minivllm.errors import BadInput

MOST_REQUESTS = 5_000_000  # of a workload; each takes about a kilobyte
MOST_TOKENS = 1 << 28  # of its prompts; each takes up to 36 bytes


def at_least_one(knob: str, value: Any) -> int:
    """The value of a knob that counts. Raises BadInput unless it is a whole number of at least
    1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{knob}={value!r} must be a whole number of at least 1")
    return value


def positive(knob: str, value: Any) -> float:
    """The value of a knob that measures. Raises BadInput unless it is a finite number above 0."""
    if not _finite(value) or value <= 0:
        raise BadInput(f"{knob}={value!r} must be a finite number above 0")
    return float(value)


def not_negative(knob: str, value: Any) -> float:
    """The same for one that may be 0."""
    if not _finite(value) or value < 0:
        raise BadInput(f"{knob}={value!r} must be a finite number of at least 0")
    return float(value)


def one_of(knob: str, value: Any, choices: tuple[str, ...]) -> str:
    """The value of a knob that chooses. Raises BadInput unless it is one of the words."""
    if value not in choices:
        raise BadInput(f"{knob}={value!r} must be one of {', '.join(choices)}")
    return str(value)


def check_fits(
    what: str, prompt_len: int, output_len: int, max_model_len: int, advice: str
) -> None:
    """Raise BadInput, with `advice`, if prompt and output are together longer than the context."""
    if prompt_len + output_len > max_model_len:
        raise BadInput(
            f"{what} has {prompt_len} prompt + {output_len} output = {prompt_len + output_len} "
            f"tokens, and the context holds {max_model_len}: {advice}"
        )


def check_amount(what: str, requests: int, tokens: float, advice: str) -> None:
    """Raise BadInput, with `advice`, if a workload of so many requests and prompt tokens is more
    than memory should hold."""
    if requests > MOST_REQUESTS or tokens > MOST_TOKENS:
        raise BadInput(
            f"{what}: {requests:,} requests with about {tokens:.3g} prompt tokens, and a "
            f"workload has at most {MOST_REQUESTS:,} with {MOST_TOKENS:.3g}; {advice}"
        )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
