"""The engine's end of the live view: step bundles on their way to the process of HTTP."""

from __future__ import annotations

import json
import time

from minivllm.engine.scheduler import Scheduler
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.platform.processes.channel import Channel
from minivllm.processes.messages import ViewFrame

INTERVAL_S = 0.05  # between two frames
MOST_BACKLOG = 4 << 20  # bytes that the process of HTTP has not taken; then frames are lost
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class ViewOutlet:
    """Sends what each step changed while somebody watches, at most 20 times a second. While nobody
    does, the engine does nothing for it.

    Args:
        scheduler: of the engine.
        channel: to the process of HTTP.

    Attributes:
        is_open: whether somebody watches, or would but for lost frames.
    """

    def __init__(self, scheduler: Scheduler, channel: Channel) -> None:
        self._scheduler, self._channel = scheduler, channel
        self._observer: StepObserver | None = None
        self._bundles: list[StepBundle] = []  # since the last frame
        self._due_s = 0.0  # of the next frame
        self._is_behind = False  # frames were lost: the other process does not take them
        self.is_open = False

    def watch(self, on: bool) -> None:
        """Send the whole state and, from then on, what changes; or nothing more."""
        self._is_behind, self.is_open = False, on
        if not on:
            self._close()
        elif self._observer is None:
            self._observer = StepObserver(self._scheduler, self._bundles.append, phases=False)
            self._send("restart")
        else:
            self._observer.flush()
            self._send("changes")
            if not self._is_behind:
                self._observer.tell_all()
                self._send("state")

    def _close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        self._bundles.clear()

    def wait_s(self) -> float | None:
        """Seconds until the next frame is due; None where none is."""
        return max(0.0, self._due_s - time.perf_counter()) if self._bundles else None

    def send_due(self, is_idle: bool) -> None:
        """Send what has changed, if a frame is due.

        Args:
            is_idle: whether no step follows, which would tell what has changed since the last one.
        """
        if self._observer is None:
            if self._is_behind and not self._channel.backlog:
                self.watch(True)
            return
        if is_idle:
            self._observer.flush()
        if self._bundles and time.perf_counter() >= self._due_s:
            self._send("changes")

    def _send(self, kind: str) -> None:
        if not self._bundles:
            return
        if self._channel.backlog > MOST_BACKLOG:
            self._close()
            self._is_behind = True
            return
        text = _encode(self._bundles)
        self._bundles.clear()
        self._due_s = time.perf_counter() + INTERVAL_S
        self._channel.send(ViewFrame(text, kind))
