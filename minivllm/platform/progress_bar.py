"""A progress bar, shown on a terminal after the first second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 1.0  # work that ends sooner shows no bar


class ProgressBar:
    """A context manager that is called with (done, total), as by `load_model(progress=...)`.

    Args:
        title: the words before the bar.
        stream: where to draw, if that is a terminal. None takes stderr.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressBar:
        self._began = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Draw the progress."""
        if self._bar is None:
            if not self._stream.isatty() or self._clock() - self._began < PATIENCE_S:
                return
            self._bar = self._start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn(self._title),
            BarColumn(24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        # Standard output holds answers, so the bar's stream must not take it over.
        bar = Progress(
            *columns, console=Console(file=self._stream), transient=True, redirect_stdout=False
        )
        bar.add_task(self._title)
        bar.start()
        return bar
