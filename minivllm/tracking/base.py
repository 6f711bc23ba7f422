"""Telling others of what is recorded. The records are the result; a tracker is a copy for a
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
    """Is told of everything that is recorded; this one does nothing with it."""

    def record(self, directory: Path) -> None:
        """A measurement has left its record in this directory, whatever its status."""

    def report(self, name: str, page: Path) -> None:
        """The report on the records of this name has been built."""


class SafeTracker(Tracker):
    """What another tracker does, except that its failures are warnings: a measurement does not fail
    by them.

    Args:
        config: the resolved configuration.

    Raises:
        BadInput: the configured tracker cannot be had.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        node = config.get("tracker")
        self.tracker = build(node) if node else Tracker()

    def record(self, directory: Path) -> None:
        """See Tracker; a failure is also written into the record's log."""
        if not (directory / storage.RECORD).exists():
            return
        warning = _attempt(lambda: self.tracker.record(directory))
        if warning:
            with suppress(OSError), (directory / storage.LOG).open("a", encoding="utf-8") as log:
                log.write(f"{warning}\n")

    def report(self, name: str, page: Path) -> None:
        """See Tracker."""
        _attempt(lambda: self.tracker.report(name, page))


def _attempt(what: Callable[[], None]) -> str:
    """Do something; the warning if that failed, which has been printed."""
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
