"""Errors that clients get, with a status of HTTP; each API writes them in its own form."""

from __future__ import annotations

import re

from minivllm.errors import BadInput

# Of an object in memory, as Python writes it: it would help to break into this process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence for the client's log.
        kind: the type of error, as OpenAI names it.
        param: the field of the request that is wrong.
        code: of the error, as OpenAI's clients read it; None: it has none.
        retry_after_s: when the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = _ADDRESS.sub("", message)
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    @classmethod
    def of(cls, error: BadInput, param: str | None = None) -> ApiError:
        """A request that is wrong."""
        return cls(400, str(error), param=param)


class PromptTooLong(ApiError):
    """A prompt that leaves no room for an answer. Each API words it as its clients expect: agents
    then make their conversation shorter.

    Args:
        num_tokens: of the prompt.
        context: tokens of prompt and answer, at most.
    """

    def __init__(self, num_tokens: int, context: int) -> None:
        self.num_tokens, self.context = num_tokens, context
        message = (
            f"This model's maximum context length is {context} tokens, and the prompt has "
            f"{num_tokens}: there is no room for an answer"
        )
        super().__init__(400, message, param="prompt", code="context_length_exceeded")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """Too many requests wait already."""
    kind, code = "rate_limit_error", "rate_limit_exceeded"
    return ApiError(429, message, kind=kind, code=code, retry_after_s=retry_after_s)


def unavailable(message: str) -> ApiError:
    """The engine is not there, or the server is about to end."""
    return ApiError(503, message, kind="server_error", code="server_is_overloaded", retry_after_s=1)


def internal(message: str) -> ApiError:
    """The engine could not finish a request."""
    return ApiError(500, message, kind="server_error", code="server_error")


def too_late(message: str) -> ApiError:
    """A request did not end before its deadline."""
    return ApiError(408, message, kind="timeout_error")
