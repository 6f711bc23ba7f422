"""A line at the bottom of a terminal that stays there while text scrolls above it."""

from __future__ import annotations

import os
import time
from typing import IO

from rich.cells import set_cell_size

from minivllm.platform.untrusted import printable

LEAST_ROWS = 4
EVERY_S = 0.1  # between two drawings
# Sequences that terminals have had since the VT100.
SAVE, RESTORE = "\x1b7", "\x1b8"  # the cursor
ROOM_BELOW = "\x1bD\x1b[A"  # one line down, scrolling where there is none, and up again
CLEAR_LINE, WHOLE_SCREEN = "\x1b[2K", "\x1b[r"
REVERSE, PLAIN = "\x1b[7m", "\x1b[0m"


def has_status_line(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that can keep a line apart from what scrolls."""
    if os.name != "posix" or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    return stream.isatty() and _rows_and_columns(stream)[0] >= LEAST_ROWS


def _rows_and_columns(stream: IO[str]) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except OSError:
        return 0, 0
    return rows, columns


class StatusLine:
    """A context manager that keeps the terminal's last line, where the terminal can.

    The terminal scrolls only the lines above (DECSTBM), so text is written as always.

    Args:
        stream: the terminal, or anything else, which is left alone.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._size = (0, 0)  # rows and columns for which it is set up; (0, 0): it is not
        self._drawn_s = 0.0

    def __enter__(self) -> StatusLine:
        if has_status_line(self._stream):
            self._reserve()
        return self

    def __exit__(self, *_: object) -> None:
        if self._size[0]:
            self._put(f"{SAVE}\x1b[{self._size[0]};1H{CLEAR_LINE}{WHOLE_SCREEN}{RESTORE}")
            self._size = (0, 0)

    def _reserve(self) -> None:
        """Keep the last line free, whatever the size is now; the cursor stays where it is."""
        self._size = _rows_and_columns(self._stream)
        rows = self._size[0]
        self._put(f"{SAVE}{WHOLE_SCREEN}{RESTORE}{ROOM_BELOW}{SAVE}\x1b[1;{rows - 1}r{RESTORE}")

    def show(self, text: str, now: bool = False) -> None:
        """Draw the line, unless it was drawn a moment ago.

        Args:
            text: cut off at the width of the terminal.
            now: draw it in any case.
        """
        if not self._size[0] or (not now and time.monotonic() - self._drawn_s < EVERY_S):
            return
        if _rows_and_columns(self._stream) != self._size:
            self._reserve()
        self._drawn_s = time.monotonic()
        rows, columns = self._size
        line = set_cell_size(f" {' '.join(printable(text).split())}", columns)
        self._put(f"{SAVE}\x1b[{rows};1H{REVERSE}{line}{PLAIN}{RESTORE}")

    def _put(self, sequence: str) -> None:
        self._stream.write(sequence)
        self._stream.flush()
