"""The command line on a real terminal: what is drawn, typed and interrupted there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import RUN, popen, take_terminal

WHERE = b"\x1b[6n"  # a program asks where the cursor is
PATIENCE_S = 200.0

pytestmark = [pytest.mark.real, pytest.mark.slow]  # the command line, and what it starts


class Terminal:
    """A command on a terminal of its own.

    Args:
        folder: where it runs.
        argv: arguments of run.py.
    """

    def __init__(self, folder: Path, *argv: str) -> None:
        self.seen, self.at = b"", 0
        screen = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        # nobody else has this device's lock
        environment = {**os.environ, **screen, "TMPDIR": str(folder)}
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = popen()(
            [sys.executable, RUN, *argv],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)

    @property
    def text(self) -> str:
        """What has been written, without colours and movements of the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace"))

    def until(self, words: str) -> None:
        """Read on until these words come, after those that were waited for before."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.text.find(words, self.at)) < 0:
            assert time.monotonic() < deadline and self._read(), (
                f"no {words!r} in {self.text[-2000:]!r}"
            )
        self.at = found + len(words)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code. Who does not end is killed."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._read():
            pass
        if time.monotonic() >= deadline:
            self.process.kill()
        return self.process.wait()

    def _read(self) -> bool:
        if not select.select([self.fd], [], [], PATIENCE_S)[0]:
            return False
        try:
            chunk = os.read(self.fd, 1 << 16)
        except OSError:  # nobody holds the other side any more
            return False
        if WHERE in chunk:
            self.type("\x1b[1;1R")
        self.seen += chunk
        return bool(chunk)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened = []

    def start(*argv: str) -> Terminal:
        opened.append(Terminal(tmp_path, *argv))
        return opened[-1]

    yield start
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.fd)


QUICK = ("runtime.device=cpu", "workload.num_requests=2", "measure.roofline=false")


def test_a_measurement_has_a_live_line_and_ends_in_a_table(
    terminal: Callable[..., Terminal],
) -> None:
    run = terminal(*QUICK)
    assert run.end() == 0
    assert b"\r" in run.seen and b"\x1b[" in run.seen
    assert "tok/s" in run.text and "report: " in run.text


def test_ctrl_c_ends_a_measurement_and_leaves_no_half_record(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    run = terminal(*QUICK, "workload.output_len=900", "measure.repeats=9")
    run.until("measuring")
    run.type("\x03")
    assert run.end() == 130
    assert "Traceback" not in run.text
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_chat_is_typed_and_left(terminal: Callable[..., Terminal]) -> None:
    # An answer of 40 tokens is over before the line below it is drawn again.
    lasting = ("decoding.max_tokens=800", "decoding.ignore_eos=true")
    chat = terminal("preset=chat", "runtime.device=cpu", *lasting)
    chat.until(">")
    chat.until("tiny · bf16")  # below the prompt
    chat.type("def f(\\\ra,\x1b\rb):\r")  # on three lines
    chat.until("KV cache")  # while it streams
    chat.until(" · 800 output tokens")
    chat.until(">")  # asks again
    chat.type("/compare quant=int8\r")
    chat.until("quant=int8")
    chat.until("the texts ")
    chat.until(">")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.text
