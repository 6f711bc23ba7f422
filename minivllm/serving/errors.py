"""Errors that clients get, with a status of HTTP; each API writes them in its own form."""

from __future__ import annotations

from minivllm.errors import BadInput


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence for the client's log.
        kind: the type of error, as OpenAI names it.
        param: the field of the request that is wrong.
        retry_after_s: when the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.retry_after_s = param, retry_after_s

    @classmethod
    def of(cls, error: BadInput, param: str | None = None) -> ApiError:
        """A request that is wrong."""
        return cls(400, str(error), param=param)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """Too many requests wait already."""
    return ApiError(429, message, kind="rate_limit_error", retry_after_s=retry_after_s)


def unavailable(message: str) -> ApiError:
    """The engine is not there, or the server is about to end."""
    return ApiError(503, message, kind="server_error", retry_after_s=1)


def internal(message: str) -> ApiError:
    """The engine could not finish a request."""
    return ApiError(500, message, kind="server_error")


def too_late(message: str) -> ApiError:
    """A request did not end before its deadline."""
    return ApiError(408, message, kind="timeout_error")
