"""A stream of server-sent events, and the tokens of one request in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from minivllm.bench.engine import EngineOutput

DATA, DONE = b"data:", b"[DONE]"
UNKNOWN = 0  # stands for a token whose id the server did not tell
REASONS = {"stop": "stop", "length": "length"}


class Tokens:
    """Counts the tokens of one stream as they come, and hands them on.

    A chunk with `token_ids` says which tokens it holds. One without is taken for a single token while it comes;
    what `usage` counts beyond that at the end is added to the last chunk, and `late` says how many that were.

    Args:
        request_id: of the request.
        deliver: takes the outputs.
    """

    def __init__(self, request_id: str, deliver: Callable[[EngineOutput], None]) -> None:
        self._request_id, self._deliver = request_id, deliver
        self._reason: str | None = None
        self._ended = False
        self._completion = 0  # tokens in all, as the server counts them
        self.produced = 0
        self.chunks = 0
        self.late = 0  # tokens that were only counted at the end
        self.prompt_tokens: int | None = None  # as the server counts them
        self.cached_tokens = 0  # of the prompt, that the server had computed before

    def take(self, event: dict[str, Any]) -> None:
        """One event of the stream.

        Raises:
            ValueError: it is an error.
        """
        if event.get("error"):
            error = event["error"]
            raise ValueError(error.get("message", error) if isinstance(error, dict) else error)
        if usage := event.get("usage"):
            self._usage(usage)
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if ids is None:
                ids = [UNKNOWN] if choice.get("text") else []
            self._reason = choice.get("finish_reason") or self._reason
            if ids:
                self.chunks += 1
                self._pass_on(tuple(ids))

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self._completion = int(usage.get("completion_tokens") or 0)
        self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def _pass_on(self, ids: tuple[int, ...], reason: str | None = None, error: str | None = None) -> None:
        self.produced += len(ids)
        self._ended = reason is not None
        self._deliver(EngineOutput(self._request_id, ids, reason, error=error))

    def end(self) -> None:
        """The stream is over; one that gave no reason for it was cut off."""
        if self._reason is None:
            self.fail("the server closed the stream before it was done")
            return
        self.late = max(0, self._completion - self.produced)
        reason = REASONS.get(self._reason, "abort")
        self._pass_on((UNKNOWN,) * self.late, reason, self._reason if reason == "abort" else None)

    def fail(self, why: str) -> None:
        """The request ends without its answer."""
        if not self._ended:
            self._pass_on((), "abort", why)


async def read_stream(lines: AsyncIterator[bytes], tokens: Tokens) -> None:
    """Read server-sent events to their end.

    Args:
        lines: of the response's body.
        tokens: takes them.

    Raises:
        ValueError: a line is no JSON, or an error.
    """
    async for line in lines:
        if not line.startswith(DATA):
            continue  # a comment, or the empty line after each event
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            break
        tokens.take(json.loads(data))
    tokens.end()
