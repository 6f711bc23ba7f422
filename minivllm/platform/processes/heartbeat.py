"""Heartbeats: a process says every half second that it runs, and another one notices its silence.

The beats come from a thread of their own, so that a long step is no silence; a process that is
stopped, swapped out or cut off sends none. They say which step the working thread is at, so that a
step without end is noticed, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from minivllm.platform.processes.channel import Channel

BEAT_S = 0.5  # between two beats, and between two looks of a watcher
SILENT_S = 8.0  # without a sign of life, after which a process is given up
# While it is being built: libraries may keep all threads of a process from running.
SILENT_BUILDING_S = 60.0
SILENT_STARTING_S = 120.0  # before the first sign of life: it starts, and imports


class Beat(NamedTuple):
    """The sender runs; `step` is the number of the step that it computes, None while it waits."""

    step: int | None = None


class Progress:
    """Which step the working thread of a process is at.

    Attributes:
        step: its number, None while the thread waits for work.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._count = 0

    def begin(self) -> None:
        """Note that a step begins."""
        self._count += 1
        self.step = self._count

    def end(self) -> None:
        """Note that the thread waits from now on."""
        self.step = None


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


def beat_over(channel: Channel, progress: Progress | None = None) -> Callable[[], None]:
    """What `beating` calls to send beats over a channel. While earlier messages wait for the other
    end to read them, these are sent instead.

    Args:
        channel: to the watcher.
        progress: of the thread that works; None: the beats say nothing of it.
    """

    def send() -> None:
        if channel.backlog:
            channel.flush()
        else:
            channel.send(Beat(None if progress is None else progress.step))
        if channel.closed:
            raise ConnectionError("the other end is gone")

    return send


class Silence:
    """How long another process has been silent, or has been at one step, of the time in which this
    process ran: between two looks no more than two beats are counted, however long it was stopped.

    Args:
        limit_s: seconds of silence after which the process is given up; before its first sign of
            life they are SILENT_STARTING_S.
        now: a monotonic clock.
        step_limit_s: seconds of one step after which it is given up.
    """

    def __init__(
        self,
        limit_s: float,
        now: Callable[[], float] = time.monotonic,
        step_limit_s: float = math.inf,
    ) -> None:
        self.limit_s, self._step_limit_s, self._now = limit_s, step_limit_s, now
        self._has_begun, self._silent_s, self._looked_s = False, 0.0, now()
        self._step: int | None = None
        self._step_s = 0.0

    def heard(self, message: Any = None) -> None:
        """Note a sign of life, a beat or any other message."""
        self._has_begun, self._silent_s = True, 0.0
        step = message.step if isinstance(message, Beat) else None
        if step is None or step != self._step:  # any other message comes of a step that has ended
            self._step_s = 0.0
        if isinstance(message, Beat):
            self._step = step

    @property
    def _most_s(self) -> float:
        return self.limit_s if self._has_begun else max(self.limit_s, SILENT_STARTING_S)

    def is_over_limit(self) -> bool:
        """Whether the process is to be given up. To be called about every BEAT_S, after whatever
        has come is read."""
        now = self._now()
        elapsed, self._looked_s = min(now - self._looked_s, 2 * BEAT_S), now
        self._silent_s += elapsed
        self._step_s += 0.0 if self._step is None else elapsed
        return self._silent_s > self._most_s or self._is_stuck

    @property
    def _is_stuck(self) -> bool:
        return self._step_s > self._step_limit_s

    def __str__(self) -> str:
        if self._is_stuck:
            return f"has been at one step for {self._step_limit_s:g} s"
        return f"has not answered for {self._most_s:.0f} s"
