"""The bar comes with the second second, on a terminal alone, and goes without a trace."""

from __future__ import annotations

import contextlib
import io
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from minivllm import LLM
from minivllm.models.load.weights import CheckpointWeights
from minivllm.platform.progress_bar import ProgressBar
from tests.reference import make_checkpoint


class Terminal:
    """A pseudo-terminal: what is written to `stream` can be read."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.stream: TextIO = os.fdopen(slave, "w")

    def read(self) -> str:
        """What has appeared since the last call."""
        self.stream.flush()
        seen = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                seen += os.read(self._master, 1 << 16)
        return seen.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Terminal()
    yield found
    found.close()


def test_nothing_for_a_second_then_a_bar_that_disappears(terminal: Terminal) -> None:
    now = [100.0]
    with ProgressBar("loading", terminal.stream, lambda: now[0]) as bar:
        bar(0, 100)
        now[0] = 100.9
        bar(30, 100)
        assert terminal.read() == ""
        now[0] = 101.0
        bar(45, 100)
        assert bar._bar is not None
        bar._bar.refresh()  # which it does by itself ten times a second
        assert "loading" in (shown := terminal.read()) and "45%" in shown
    assert terminal.read().endswith("\x1b[2K")  # the line is cleared


def test_what_loads_within_a_second_shows_nothing(terminal: Terminal) -> None:
    with ProgressBar("loading", terminal.stream, lambda: 0.0) as bar:
        bar(100, 100)
    assert terminal.read() == ""


def test_nothing_is_drawn_into_a_file() -> None:
    stream, now = io.StringIO(), iter(range(0, 1000, 100))
    with ProgressBar("loading", stream, lambda: float(next(now))) as bar:
        bar(50, 100)
    assert stream.getvalue() == ""


def test_a_model_that_loads_slowly_shows_the_bar(
    tmp_path: Path,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_checkpoint(tmp_path)
    now, fill = [0.0], CheckpointWeights.fill

    def slow(self: CheckpointWeights, name: str, out: Any) -> None:
        now[0] += 0.2
        fill(self, name, out)

    monkeypatch.setattr(CheckpointWeights, "fill", slow)
    monkeypatch.setattr(
        "minivllm.llm.ProgressBar",
        lambda title: ProgressBar(title, terminal.stream, lambda: now[0]),
    )
    LLM(str(tmp_path), device="cpu", quant="fp32").close()
    assert "loading" in terminal.read()
    assert capsys.readouterr().out == ""
