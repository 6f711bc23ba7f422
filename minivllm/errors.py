"""The one exception that means: the input is wrong, not the program."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Sequence

from minivllm.redaction import hide

LONGEST = 4000  # characters of an error's line


class BadInput(ValueError):
    """A mistake of the user's, told in one line: what is wrong, where, and what to do about it.

    The command line prints the line and exits with code 2; nothing has been written by then. No
    secret is in it. Of a line that quotes a very long value the middle is left out; what cannot be
    encoded is escaped.
    """

    def __init__(self, message: str) -> None:
        line = hide(" ".join(message.split())).encode("utf-8", "backslashreplace").decode()
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} [...] {line[-LONGEST // 2 :]}"
        super().__init__(line)


def nearest(name: str, valid: Sequence[str]) -> str:
    """The end of an error about an unknown name: the nearest valid one, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose from {', '.join(valid)}" if valid else "it has none"


def first_line(error: BaseException) -> str:
    """What an error says, or its kind where it says nothing; of CUDA's and compilers' paragraphs
    the first line."""
    return hide((str(error).strip() or type(error).__name__).splitlines()[0])


def last_frame(error: BaseException) -> str:
    """Where an error was raised: "file.py:12 in function"; empty for one that was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


class NonFiniteLogits(BadInput):
    """The logits that a request's next token would be chosen from are NaN or infinite: the request
    ends."""

    @classmethod
    def of(cls, request: str, position: int) -> NonFiniteLogits:
        """Name the request, and the position of the token that was to be chosen."""
        return cls(
            f"request {request}: the logits of its token at position {position} are not finite "
            "(NaN or infinite): the model overflows in this precision, or its weights are "
            "damaged; try quant=bf16 or quant=fp32"
        )


class NotInstalled(BadInput):
    """What is asked for needs a package or a program that is not there; the line says how to get
    it."""
