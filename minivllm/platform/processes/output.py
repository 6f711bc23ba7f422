"""The output of another process: copied to this process's, and its last lines kept."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from minivllm.platform.untrusted import printable
from minivllm.redaction import hide

TAIL_LINES = 15
LAST = 3  # lines in an error


class CopiedOutput:
    """Copies lines, but for secrets, to descriptor 2, which is whichever log this process writes at
    the time.

    Args:
        prefix: before each line.
        listen: told each line.
    """

    def __init__(self, prefix: str = "", listen: Callable[[str], None] | None = None) -> None:
        self._prefix, self._listen = prefix, listen
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def copy(self, lines: Iterable[bytes]) -> None:
        """Copy until there are no more lines.

        Args:
            lines: a pipe or a socket's file.
        """
        for line in lines:
            text = hide(line.decode(errors="replace"))
            words = printable(text).rstrip()
            self._tail.append(words)
            if self._listen is not None:
                self._listen(words)
            with suppress(OSError):
                os.write(2, f"{self._prefix}{text}".encode())

    @property
    def last(self) -> str:
        """The last lines that are not empty, in one; empty where there are none."""
        return " | ".join([line for line in self._tail if line.strip()][-LAST:])
