"""Heartbeats: a process says every half second that it runs, and another one notices its silence.

The beats come from a thread of their own, so that a long step is no silence; a process that is
stopped, swapped out or cut off sends none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from minivllm.platform.processes.channel import Channel

BEAT_S = 0.5  # between two beats, and between two looks of a watcher
SILENT_S = 8.0  # without a sign of life, after which a process is given up
# While it is being built: libraries may keep all threads of a process from running.
SILENT_BUILDING_S = 60.0
SILENT_STARTING_S = 120.0  # before the first sign of life: it starts, and imports


class Beat(NamedTuple):
    """The sender runs."""


@contextmanager
def beating(send: Callable[[], None]) -> Iterator[None]:
    """While it is open, `send` is called every BEAT_S in a thread, until it raises OSError."""
    ended = threading.Event()

    def beat() -> None:
        with suppress(OSError):
            while True:
                send()
                if ended.wait(BEAT_S):
                    return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(BEAT_S)


def beat_over(channel: Channel) -> Callable[[], None]:
    """What `beating` calls to send beats over a channel. While earlier messages wait for the other
    end to read them, these are sent instead."""

    def send() -> None:
        if channel.backlog:
            channel.flush()
        else:
            channel.send(Beat())
        if channel.closed:
            raise ConnectionError("the other end is gone")

    return send


class Silence:
    """How long another process has been silent, of the time in which this one ran: between two
    looks no more than two beats are counted, however long this process was stopped.

    Args:
        limit_s: seconds of silence after which the process is given up; before its first sign of
            life they are SILENT_STARTING_S.
        now: a monotonic clock.
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._now = limit_s, now
        self._has_begun, self._silent_s, self._looked_s = False, 0.0, now()

    def heard(self) -> None:
        """Note a sign of life."""
        self._has_begun, self._silent_s = True, 0.0

    @property
    def _most_s(self) -> float:
        return self.limit_s if self._has_begun else max(self.limit_s, SILENT_STARTING_S)

    def is_over_limit(self) -> bool:
        """Whether the process is to be given up. To be called about every BEAT_S, after whatever
        has come is read."""
        now = self._now()
        elapsed, self._looked_s = min(now - self._looked_s, 2 * BEAT_S), now
        self._silent_s += elapsed
        return self._silent_s > self._most_s

    def __str__(self) -> str:
        return f"has not answered for {self._most_s:.0f} s"
