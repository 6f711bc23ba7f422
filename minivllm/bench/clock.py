"""The clock that every time stamp of a measurement comes from."""

from __future__ import annotations

import time
from typing import Protocol


class ClockProtocol(Protocol):
    """What the driver needs of a clock; a simulation's and a test's implement it too."""

    def now(self) -> float:
        """Monotonic seconds."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass; returns at once if it is not positive."""


class VirtualClock:
    """Time that passes only when somebody lets it: simulations take no longer than their computing."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Let this much time pass, at once."""
        if seconds > 0:
            self.time += seconds


class Clock:
    """The machine's monotonic clock: `time.monotonic`, whose seconds engines also stamp their steps with."""

    now = staticmethod(time.monotonic)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Sleep; returns at once if `seconds` is not positive."""
        if seconds > 0:
            time.sleep(seconds)
