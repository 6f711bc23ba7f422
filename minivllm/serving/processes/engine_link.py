"""One engine's process as the server's own process sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from minivllm.processes.started import ConnectedProcess
from minivllm.serving.processes.messages import EngineState, Ready, Step
from minivllm.serving.processes.process_link import ProcessLink


class EngineLink(ProcessLink):
    """The process of one engine and the connection to it.

    Args:
        number: of the engine among its replicas.
        got: told each message that is not the link's own matter.
        lost: see `ProcessLink.gone`.
        step_limit_s: see ProcessLink.

    Attributes:
        is_wanted: whether it is to serve; False: it is taken away, and may still have requests.
        ready: what its engine has said of itself; None: none was built yet.
        state: after its last step.
    """

    ready_kind = Ready
    ready: Ready | None

    def __init__(
        self,
        number: int,
        got: Callable[[EngineLink, Any], None],
        lost: Callable[[EngineLink], None],
        step_limit_s: float = math.inf,
    ) -> None:
        super().__init__(step_limit_s)
        self.number = number
        self.state = EngineState(0, 0, 0, None)
        self.is_wanted = True
        self._got, self._on_lost = got, lost
        self._counters: dict[str, float] = {}  # the last that have come
        self._past: dict[str, float] = {}  # of processes before this one

    async def restart(self, started: ConnectedProcess, first: Any) -> None:
        """See ProcessLink; what the processes before have counted stays."""
        self._past, self._counters = self.counters, {}
        self.state = EngineState(0, 0, 0, None)
        await super().restart(started, first)

    @property
    def counters(self) -> dict[str, float]:
        """Of all its processes so far."""
        names = dict.fromkeys((*self._past, *self._counters))
        return {name: self._past.get(name, 0) + self._counters.get(name, 0) for name in names}

    def take(self, message: Any) -> None:
        """Hand on a message; of a step its state is kept."""
        if isinstance(message, Step):
            message = self._dated(message)
            self.state = message.state
            self._counters = message.state.counters or self._counters
        self._got(self, message)

    def gone(self) -> None:
        """See ProcessLink."""
        self._on_lost(self)

    def _dated(self, message: Step) -> Step:
        """A step whose times are this machine's."""
        ahead_s = 0.0 if self.started is None else self.started.ahead_s
        if not ahead_s:
            return message
        begun = [(request_id, time_s + ahead_s) for request_id, time_s in message.begun]
        return message._replace(time_s=message.time_s + ahead_s, begun=begun)
