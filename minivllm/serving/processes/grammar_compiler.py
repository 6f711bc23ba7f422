"""Grammars of requests, compiled in a thread while the engine goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.extras.masks.structured import Grammars
from minivllm.serving.processes.messages import Submit

POLL_S = 0.001  # while nothing else is to be done


class GrammarCompiler:
    """Requests that wait for their grammar, which one thread compiles.

    Args:
        grammars: of the engine.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[str, tuple[Submit, Future[Any]]] = {}
        # Before the first request needs it. What is missing or wrong is told to those that do.
        self._thread.submit(grammars.tokenizer)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def takes(self, message: Submit) -> bool:
        """Whether a request has to wait; then it does."""
        outputs = message.params.structured_outputs
        if outputs is None or self._grammars.compiled(outputs):
            return False
        future = self._thread.submit(self._grammars.compile, outputs)
        self._waiting[message.request_id] = message, future
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request that has left."""
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting[1].cancel()

    def finished(self) -> list[tuple[Submit, BaseException | None]]:
        """Requests that wait no more, with the error of those whose grammar is wrong."""
        done = [pair for pair in self._waiting.values() if pair[1].done()]
        for message, _ in done:
            del self._waiting[message.request_id]
        return [(message, future.exception()) for message, future in done]
