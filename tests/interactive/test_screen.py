"""The line at the bottom of a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import IO

import pytest

from minivllm.interactive.screen import StatusLine, has_status_line


class Terminal:
    """A terminal of a size, and what is written to it."""

    def __init__(self) -> None:
        self.fd, other = pty.openpty()
        self.stream: IO[str] = os.fdopen(other, "w")
        self.resize(10, 20)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, end: str) -> str:
        """What has been written, up to this end."""
        written = ""
        while not written.endswith(end):
            written += os.read(self.fd, 1 << 16).decode()
        return written


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    one = Terminal()
    yield one
    one.stream.close()
    os.close(one.fd)


def test_the_last_row_is_kept_apart_and_given_back(terminal: Terminal) -> None:
    with StatusLine(terminal.stream) as line:
        terminal.until("\x1b[1;9r\x1b8")  # only the rows above it scroll
        line.show("12 tokens/s\x1b[2J", now=True)
        drawn = terminal.until("\x1b[0m\x1b8")
        assert drawn == f"\x1b7\x1b[10;1H\x1b[7m{' 12 tokens/s':20}\x1b[0m\x1b8"
        line.show("13 tokens/s")  # too soon
        line.show("a line that is longer than the terminal", now=True)
        drawn = terminal.until("\x1b[0m\x1b8")
        assert " a line that is long\x1b" in drawn and "13" not in drawn
    assert terminal.until("\x1b[r\x1b8") == "\x1b7\x1b[10;1H\x1b[2K\x1b[r\x1b8"


def test_a_new_size_is_followed(terminal: Terminal) -> None:
    with StatusLine(terminal.stream) as line:
        terminal.until("\x1b[1;9r\x1b8")
        terminal.resize(16, 30)
        line.show("x", now=True)
        written = terminal.until("\x1b[0m\x1b8")
        assert "\x1b[1;15r" in written and f"\x1b[16;1H\x1b[7m{' x':30}" in written


def test_it_is_left_out_where_the_terminal_cannot(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has_status_line(terminal.stream)
    monkeypatch.setenv("TERM", "dumb")
    assert not has_status_line(terminal.stream)
    monkeypatch.setenv("TERM", "xterm")
    terminal.resize(3, 20)
    assert not has_status_line(terminal.stream)
    pipe = io.StringIO()
    with StatusLine(pipe) as line:
        line.show("x", now=True)
    assert pipe.getvalue() == ""
