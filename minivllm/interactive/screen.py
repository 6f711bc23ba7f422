"""`Screen`, which shows a conversation on a terminal or in a pipe, and the line at the bottom of a
terminal that stays there while text scrolls above it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Protocol

from rich.cells import set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

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


NOTE, THOUGHT, HEADING, DIFFERENT = "dim", "dim italic", "bold", "yellow"
WIDE = 100  # columns of a terminal that has room for two texts
GAP = 3  # columns between them


class Screen:
    """Shows text of a model and notes about the conversation.

    On a terminal text is shown without escape sequences; a pipe gets it unchanged.

    Args:
        console: where to print; None is standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._in_line = False  # whether the last line has no end yet
        self._status: StatusLine | None = None  # while text streams

    def write(self, is_thought: bool, text: str) -> None:
        """Show text of a model; thinking is dimmed."""
        if not text:
            return
        if is_thought:
            self.console.print(Text(printable(text), style=THOUGHT), end="", soft_wrap=True)
        else:  # rich would expand tabs
            self.console.file.write(printable(text) if self.console.is_terminal else text)
            self.console.file.flush()
        self._in_line = not text.endswith("\n")

    def note(self, text: str) -> None:
        """Show a line about the conversation, on a line of its own; a terminal wraps it between
        words."""
        if self._in_line:
            self.write(False, "\n")
        whole = not self.console.is_terminal
        self.console.print(Text(printable(text), style=NOTE), soft_wrap=whole)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """The time in which text streams, and the terminal has a status line."""
        with StatusLine(self.console.file) as self._status:
            try:
                yield
            finally:
                self._status = None

    def status(self, text: str, now: bool = False) -> None:
        """Show the state of what streams, if there is a line for it; see `StatusLine.show`."""
        if self._status is not None:
            self._status.show(text, now)

    @contextmanager
    def pair(self, headings: Sequence[str]) -> Iterator[TwoTexts]:
        """Two texts that grow one after the other: side by side where the terminal is wide enough,
        else one below the other."""
        if not (self.console.is_terminal and self.console.width >= WIDE):
            with self.streaming():
                yield TextBlocks(self, headings)
            return
        columns = TextColumns(self.console, headings)
        with Live(
            get_renderable=columns.ends, console=self.console, auto_refresh=False, transient=True
        ) as live:
            columns.live = live
            yield columns
        self.console.print(columns.whole())


class TwoTexts(Protocol):
    """Two texts on the screen, see `Screen.pair`."""

    def begin(self, index: int) -> None:
        """What is written from now on belongs to this text, 0 or 1."""

    def write(self, is_thought: bool, text: str) -> None:
        """Add text of a model."""

    def status(self, text: str) -> None:
        """Show the state of the text that grows."""

    def mark(self, lengths: Sequence[int]) -> None:
        """Mark the last characters of each text, which differ from the other text's."""


class TextBlocks:
    """Two texts one below the other.

    Args:
        screen: where they are shown.
        headings: of the texts.
    """

    def __init__(self, screen: Screen, headings: Sequence[str]) -> None:
        self._screen, self._headings = screen, headings

    def begin(self, index: int) -> None:
        self._screen.note(f"--- {self._headings[index]}")

    def write(self, is_thought: bool, text: str) -> None:
        self._screen.write(is_thought, text)

    def status(self, text: str) -> None:
        self._screen.status(text)

    def mark(self, lengths: Sequence[int]) -> None:
        """See TwoTexts; what has scrolled by cannot be marked."""


class TextColumns:
    """Two texts side by side: while they grow their last lines, then the whole of both.

    Args:
        console: where they are shown.
        headings: of the texts.
    """

    def __init__(self, console: Console, headings: Sequence[str]) -> None:
        self.live: Live | None = None
        self._console, self._headings = console, headings
        self._texts = [Text() for _ in headings]
        self._index, self._status, self._drawn_s = 0, "", 0.0

    def begin(self, index: int) -> None:
        self._index = index

    def write(self, is_thought: bool, text: str) -> None:
        self._texts[self._index].append(printable(text), style=THOUGHT if is_thought else None)
        if self.live is not None and time.monotonic() - self._drawn_s >= EVERY_S:
            self.live.refresh()
            self._drawn_s = time.monotonic()

    def status(self, text: str) -> None:
        """See TwoTexts; it is a line below the columns."""
        self._status = printable(text)

    def mark(self, lengths: Sequence[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            if length:
                text.stylize(DIFFERENT, len(text) - length)

    def ends(self) -> Group:
        """The last lines of each text, as many as the screen has room for."""
        width = (self._console.width - GAP) // 2
        room = self._console.height - 3  # heading, status, cursor
        lines = [text.wrap(self._console, width)[-room:] for text in self._texts]
        status = Text(self._status, style=NOTE, no_wrap=True, overflow="ellipsis")
        return Group(self._table([Text("\n").join(one) for one in lines]), status)

    def whole(self) -> Table:
        """Both texts from their beginnings."""
        return self._table(self._texts)

    def _table(self, texts: Sequence[Text]) -> Table:
        table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False, expand=True)
        for _ in texts:
            table.add_column(ratio=1, overflow="fold")
        table.add_row(*(Text(printable(one), style=HEADING) for one in self._headings))
        table.add_row(*texts)
        return table
