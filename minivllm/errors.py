"""`BadInput`, the exception for wrong input, and what its messages are made of."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from minivllm.redaction import hide

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 4000  # characters of an error's line
OOM_PHRASES = (
    "alloc_failed",  # cuBLAS and cuDNN
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
)


class BadInput(ValueError):
    """The user's input is wrong; the message is one line: what is wrong, where, and what to do.

    The command line prints the message and exits with code 2 before anything is written. Secrets in
    the message are masked, unencodable characters are escaped, and the middle of a very long
    message is left out.
    """

    def __init__(self, message: str) -> None:
        line = hide(" ".join(message.split())).encode("utf-8", "backslashreplace").decode()
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} [...] {line[-LONGEST // 2 :]}"
        super().__init__(line)


def meant(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """A question for whoever wrote an unknown name: whether the nearest valid one was meant; empty
    where none is as similar as `cutoff` (1: the same)."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else ""


def nearest(name: str, valid: Sequence[str]) -> str:
    """The advice in an error about an unknown name: the nearest valid name, or all of them."""
    if question := meant(name, valid):
        return question
    return f"choose from {', '.join(valid)}" if valid else "it has none"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where the message is empty."""
    return hide((str(error).strip() or type(error).__name__).splitlines()[0])


def last_frame(error: BaseException) -> str:
    """Where an error was raised: "file.py:12 in function"; empty where it was not raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


class Crashed(RuntimeError):
    """A process that computes has died; the message says which, and how."""


def classify(error: BaseException) -> str:
    """The record's status for an exception: invalid (the user's mistake), oom, crashed (a process
    that the worker has started), or error."""
    if isinstance(error, BadInput):
        return "invalid"
    if isinstance(error, Crashed):
        return "crashed"
    cause: BaseException | None = error
    while cause is not None:
        # By name, since torch may not be there to compare its class with.
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return "oom"
        if isinstance(cause, RuntimeError) and any(
            words in str(cause).lower() for words in OOM_PHRASES
        ):
            return "oom"
        cause = cause.__cause__
    return "error"


class NonFiniteLogits(BadInput):
    """The logits of a request's next token are NaN or infinite, so the request ends."""

    @classmethod
    def of(cls, request: str, position: int) -> NonFiniteLogits:
        """The error for a request, and for the position of its next token."""
        return cls(
            f"request {request}: the logits of its token at position {position} are not finite "
            "(NaN or infinite): the model overflows in this precision, or its weights are "
            "damaged; try quant=bf16 or quant=fp32"
        )


def install(extra: str) -> str:
    """The command that installs an optional extra: into a clone with the versions of its
    constraints.txt, or of an installed package."""
    if (ROOT / "constraints.txt").exists():
        return f"pip install -e '.[{extra}]' -c constraints.txt"
    return f"pip install 'minivllm[{extra}]'"


# Packages of the extra "run", which the class `LLM` does without.
OF_RUN = ("bitsandbytes", "matplotlib", "pandas", "prompt_toolkit", "pyarrow", "scipy")


class NotInstalled(BadInput):
    """A package or a program is missing; the message says how to install it."""

    @classmethod
    def of(cls, error: ModuleNotFoundError) -> NotInstalled | None:
        """The error for a failed import of a package of the extra "run"; None for any other."""
        package = str(error.name).partition(".")[0]
        if package not in OF_RUN:
            return None
        return cls(f"{package} is not installed: {install('run')}")
