"""What replicas behind a router do alike, whether they compute or are simulated."""

from __future__ import annotations

from minivllm.engines.adapter import Adapter
from minivllm.engines.base import EngineOutput
from minivllm.processes.handover import Handovers, Rest
from minivllm.processes.router import Router


class RoutedEngine(Adapter):
    """Base of engines that are several. Subclasses set the attributes when they are built."""

    router: Router
    _handovers: Handovers | None
    _keep_prefixes: bool
    _sessions: dict[str, str]  # of requests that are to come

    def note_session(self, request_id: str, session: str) -> None:
        self._sessions[request_id] = session

    def reset(self) -> None:
        self._end_all("reset")
        if not self._keep_prefixes:
            self.router.forget_prefixes()

    def recount(self) -> None:
        self._end_all("recount")

    def _end_all(self, method: str) -> None:
        """End all requests, call a method of every replica, and count from 0."""
        raise NotImplementedError

    def _count_anew(self) -> None:
        self._sessions.clear()
        self.router.recount()
        if self._handovers is not None:
            self._handovers.recount()

    def _forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self.router.end(request_id)
        if self._handovers is not None:
            self._handovers.end(request_id)

    def _rest(self, output: EngineOutput) -> Rest | None:
        """What another replica has to do of a request whose last output this is; None: nothing, and
        the request is forgotten."""
        rest = None
        if self._handovers is not None:
            rest = self._handovers.rest(output.request_id, output.finish_reason)
        if rest is None:
            self._forget(output.request_id)
        else:
            self.router.end(output.request_id)
        return rest
