"""Logs of the server: one JSON object a line on stderr, written by a thread of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

MOST_WAITING = 10_000  # lines; more are dropped and counted
CLOSE_S = 2.0  # for the last lines to be written
LOGGERS = {"minivllm.serving": logging.INFO, "uvicorn.error": logging.ERROR}


class JsonFormatter(logging.Formatter):
    """A line of JSON: time, level, message, the fields of a record, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)


class LineWriter(logging.Handler):
    """Hands lines to a thread, so that a terminal or a pipe that nobody reads stops no request.

    A line that finds too many waiting is dropped; the next one that is written says how many were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, daemon=True, name="log")
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line += "\n" + json.dumps({"level": "warning", "dropped_lines": dropped})
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Write what waits, as far as somebody reads it."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(CLOSE_S)
        super().close()


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Write the logs of the server while the context is open."""
    handler = LineWriter()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    saved = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.propagate = False
        one.setLevel(LOGGERS[one.name])
    try:
        yield
    finally:
        for one, (level, propagate) in zip(loggers, saved, strict=True):
            one.removeHandler(handler)
            one.propagate = propagate
            one.setLevel(level)
        handler.close()
