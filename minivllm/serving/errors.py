"""Errors that clients get, with a status of HTTP; each API writes them in its own form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from minivllm.engine.options import SamplingParams, StructuredOutputs
from minivllm.errors import BadInput

# Of an object in memory, as Python writes it: it would help to break into this process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NAMES = "|".join(one.name for one in fields(SamplingParams))
_GROUP = re.compile(rf"\bdecoding\.(?=(?:{_NAMES})\b)")  # which a body has not
_PART = r"(?:\[\d+\]|\.\w+)"  # of a path
# With what the line of an error about a parameter of the engine begins.
_PARAMETER = re.compile(
    rf"(?:request \S+: )?((?:{_NAMES}){_PART}*)(?=[=:]| (?:must|may|needs|in|with)\b)"
)


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one sentence for the client's log.
        kind: the type of error, as OpenAI names it.
        param: the path of the field that is wrong; the message may begin with a longer one. None:
            the parameter of the engine with which the message begins, if it does.
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
        message = _GROUP.sub("", _ADDRESS.sub("", message))
        super().__init__(message)
        longer = _PARAMETER if param is None else re.compile(rf"({re.escape(param)}{_PART}+)")
        if (found := longer.match(message)) is not None:
            param = found[1]
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """The same error in another process."""
        names = ("kind", "param", "code", "retry_after_s")
        facts = {name: getattr(self, name) for name in names}
        return partial(ApiError, **facts), (self.status, self.message)

    @classmethod
    def of(cls, error: BadInput, param: str | None = None) -> ApiError:
        """A request that is wrong."""
        return cls(400, str(error), param=param)


@contextmanager
def naming(paths: Mapping[str, str]) -> Iterator[None]:
    """Errors about a parameter of the engine, or a part of one, name the field of the body that has
    set it.

    Args:
        paths: of fields, by the parameter that an error names.
    """
    try:
        yield
    except ApiError as error:
        name = error.param or ""
        path = paths.get(name) or paths.get(re.split(r"[.[]", name)[0])
        if path is not None:
            if re.match(rf"{re.escape(name)}[=: ]", error.message):
                error.message = path + error.message.removeprefix(name)
            error.param = path
        raise


def form_paths(path: str) -> dict[str, str]:
    """The path of the field that asks for the form of an answer, by what errors name of a
    grammar."""
    kinds = {f"structured_outputs.{one.name}": path for one in fields(StructuredOutputs)}
    return {"structured_outputs": path, **kinds}


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
