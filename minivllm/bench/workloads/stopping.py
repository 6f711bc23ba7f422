"""When a measurement stops before its workload is over: by time, or because too much fails."""

from __future__ import annotations

import math
from dataclasses import dataclass

FEWEST_ENDED = 10  # requests, before a share of them that failed says anything


@dataclass
class Stopping:
    """The rules of one measurement, and how many of its requests have ended and failed.

    With `duration_s` requests are measured that are due within so many seconds of the start. For
    the `cooldown_s` after that further ones keep up the load, and are not measured. What is due
    later is never sent; what was sent is waited for.

    Args:
        duration_s: `measure.duration_s`; None goes on to the end of the workload.
        cooldown_s: `measure.cooldown_s`.
        max_error_rate: `measure.max_error_rate`; None never stops.
    """

    duration_s: float | None = None
    cooldown_s: float = 0.0
    max_error_rate: float | None = None
    start_s: float = 0.0  # of the measurement, by its clock
    ended: int = 0
    failed: int = 0

    @property
    def measured_until_s(self) -> float:
        """Requests that are due from here on are not measured; infinite without a duration."""
        return math.inf if self.duration_s is None else self.start_s + self.duration_s

    @property
    def sent_until_s(self) -> float:
        """Requests that are due from here on are not sent; infinite without a duration."""
        return self.measured_until_s + self.cooldown_s

    def in_time(self, due_s: float) -> float:
        """When a request that is due then is sent: infinite where that is too late."""
        return due_s if due_s < self.sent_until_s else math.inf

    def note_end(self, failed: bool) -> None:
        """Take note of a request that has ended."""
        self.ended += 1
        self.failed += failed

    @property
    def failing(self) -> bool:
        """Whether a larger share of the requests has failed than may."""
        if self.max_error_rate is None or self.ended < FEWEST_ENDED:
            return False
        return self.failed > self.max_error_rate * self.ended

    def reason(self) -> str | None:
        """Why the measurement was broken off; None where it was not."""
        if not self.failing:
            return None
        return (
            f"stopped early: {self.failed} of the first {self.ended} requests to end had failed, "
            f"more than measure.max_error_rate={self.max_error_rate:g} allows"
        )
