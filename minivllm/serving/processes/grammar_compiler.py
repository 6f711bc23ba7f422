"""Grammars of requests, compiled in threads while the engine goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.extras.masks.structured import Grammars
from minivllm.processes.messages import Submit

POLL_S = 0.001  # while nothing else is to be done
LARGE = 1 << 15  # characters of a grammar


class GrammarCompiler:
    """Requests that wait for their grammar: one thread compiles large ones, one all others.

    Args:
        grammars: of the engine.

    Attributes:
        waiting: requests by their ids, with the result of the thread.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._small, self._large = (ThreadPoolExecutor(1, name) for name in ("small", "large"))
        self.waiting: dict[str, tuple[Submit, Future[Any]]] = {}
        # Before the first request needs it. Those that do hear what is missing or wrong.
        self._small.submit(grammars.tokenizer)

    def takes(self, message: Submit) -> bool:
        """Whether a request with a grammar has to wait for it; then it does."""
        outputs = message.params.structured_outputs
        assert outputs is not None
        if self._grammars.compiled(outputs):
            return False
        thread = self._large if _size(outputs) >= LARGE else self._small
        future = thread.submit(self._grammars.compile, outputs)
        self.waiting[message.request_id] = message, future
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request that has left."""
        if (waiting := self.waiting.pop(request_id, None)) is not None:
            waiting[1].cancel()

    def finished(self) -> list[tuple[Submit, BaseException | None]]:
        """Requests that wait no more, with the error of those whose grammar is wrong."""
        done = [pair for pair in self.waiting.values() if pair[1].done()]
        for message, _ in done:
            del self.waiting[message.request_id]
        return [(message, future.exception()) for message, future in done]


def _size(outputs: StructuredOutputs) -> int:
    """Characters of a grammar."""
    texts = (outputs.json, outputs.regex, outputs.grammar, *(outputs.choice or ()))
    return sum(len(text) for text in texts if isinstance(text, str))
