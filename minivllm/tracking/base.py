"""The tracker protocol. Records are the result; a tracker copies them, for example to a
dashboard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm.bench.records import storage
from minivllm.config.compose import build
from minivllm.errors import first_line


class Tracker:
    """Receives every record and every report; this base class ignores them."""

    def record(self, directory: Path) -> None:
        """Receive the directory of a measurement's record, of any status."""

    def report(self, name: str, page: Path) -> None:
        """Receive the page of a report, and the name of its records."""


class SafeTracker(Tracker):
    """Wraps the configured tracker, and turns its failures into warnings.

    Args:
        config: the resolved configuration.

    Raises:
        BadInput: the configured tracker cannot be built.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        node = config.get("tracker")
        self.tracker = build(node) if node else Tracker()

    def record(self, directory: Path) -> None:
        """See Tracker; a warning also goes into the record's log."""
        if not (directory / storage.RECORD).exists():
            return
        warning = _attempt(lambda: self.tracker.record(directory))
        if warning:
            with suppress(OSError), (directory / storage.LOG).open("a", encoding="utf-8") as log:
                log.write(f"{warning}\n")

    def report(self, name: str, page: Path) -> None:
        _attempt(lambda: self.tracker.report(name, page))


def _attempt(what: Callable[[], None]) -> str:
    """Call `what`; returns the printed warning if it failed, else an empty text."""
    try:
        what()
    except Exception as error:
        reason = first_line(error)
        warning = (
            f"warning: not tracked: {type(error).__name__}: {reason}; the record is complete "
            "without"
        )
        print(warning, file=sys.stderr, flush=True)
        return warning
    return ""
