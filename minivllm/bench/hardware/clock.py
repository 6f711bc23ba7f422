"""The clock that every time stamp of a measurement comes from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

APART_S = 0.05  # by which clocks of one machine may differ that are read one after the other
# The same as a share of the time between two readings: a clock that is being set right runs 0.05 %
# faster or slower.
APART_SHARE = 1e-3
TICKS_READ = 4


class ClockProtocol(Protocol):
    """What the driver needs of a clock; a simulation's and a test's implement it too."""

    def now(self) -> float:
        """Monotonic seconds."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass; returns at once if it is not positive."""


class VirtualClock:
    """Time that advances only by `sleep`: simulations take no longer than their computing."""

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
    """The machine's monotonic clock: `time.monotonic`, whose seconds engines also stamp their steps
    with."""

    now = staticmethod(time.monotonic)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Sleep; returns at once if `seconds` is not positive."""
        if seconds > 0:
            time.sleep(seconds)


def tick_s(patience_s: float = 0.5) -> float:
    """Seconds between two values of the machine's clock: the least of some, read one after the
    other; of a clock that stands still for `patience_s`, that much."""
    ticks: list[float] = []
    end, last = time.perf_counter() + patience_s, Clock.now()
    while len(ticks) < TICKS_READ:
        if (now := Clock.now()) != last:
            ticks.append(now - last)
            last = now
        elif time.perf_counter() > end:
            break
    # the first began before it was looked at
    return min(ticks[1:], default=patience_s)


@dataclass(frozen=True)
class Reading:
    """What the clocks of the machine say at one moment, seconds since whenever each began.

    Args:
        monotonic: the clock of every time stamp.
        counter: the performance counter.
        wall: the time of day.
        boot: as the monotonic clock, and goes on while the machine is suspended; None where there
            is none.
    """

    monotonic: float
    counter: float
    wall: float
    boot: float | None

    @classmethod
    def take(cls) -> Reading:
        """Read them now; again where something came in between."""
        for _ in range(10):
            before = Clock.now()
            reading = cls(before, time.perf_counter(), time.time(), _boot())
            if abs(Clock.now() - before) < APART_S / 10:
                break
        return reading

    def jumped(self, later: Reading) -> str | None:
        """Why times between the two readings cannot be trusted; None where the clocks agree.

        The time of day alone may be set at any moment; it is believed only where no other clock
        tells a suspended machine.
        """
        went = later.monotonic - self.monotonic
        apart = APART_S + APART_SHARE * abs(went)
        others = {"performance counter": later.counter - self.counter}
        if self.boot is not None and later.boot is not None:
            others["clock since booting"] = later.boot - self.boot
        else:
            others["time of day"] = later.wall - self.wall
        for name, other in others.items():
            if abs(other - went) > apart:
                return (
                    f"the monotonic clock went {went:.2f} s and the {name} {other:.2f} s within "
                    "the measured window: it jumped, or the machine was suspended"
                )
        return None


def _boot() -> float | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return None if clock is None else time.clock_gettime(clock)
