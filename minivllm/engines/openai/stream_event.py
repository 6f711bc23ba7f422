"""What a server sends: one event of a stream, its list of models, and its errors, each checked."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from minivllm.errors import BadInput
from minivllm.platform.given import whole
from minivllm.platform.untrusted import parse_json, printable
from minivllm.redaction import hide

T = TypeVar("T")
MOST_TOKENS = 1 << 20  # of a request without a limit of its own
MOST_ERROR = 1 << 16  # characters of an error's text that are looked at
MOST_WORDS = 300  # and that are kept


class ServerError(ValueError):
    """What a server sent is an error, or is not what this API allows; one line that is safe to
    show.

    Args:
        message: the line.
        status: of HTTP, where that is the error.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def server_json(data: bytes | str, what: str) -> Any:
    """The JSON value of what a server sent; ServerError, which begins with `what`, for no JSON."""
    try:
        return parse_json(data, what)
    except BadInput as error:
        raise ServerError(printable(str(error))) from None


def server_words(text: str) -> str:
    """A server's error text, which servers like to wrap in JSON, as one line that is safe to
    show."""
    text = text[:MOST_ERROR]
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(printable(hide(text)).split())[:MOST_WORDS] or "no text"


@dataclass(frozen=True)
class StreamEvent:
    """What is read of one event of a stream, checked."""

    holds_choice: bool  # False for one of usage alone
    text: str
    reasoning: str  # of a thinking block, where the chat API tells it apart
    token_ids: tuple[int, ...] | None  # None: not reported
    count: int | None  # tokens of this chunk, where log-probabilities tell
    total: int | None  # output tokens so far, where the server tells
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    reasoning_tokens: int | None = None  # of the output tokens so far, where the server tells


def read_event(value: Any, vocab_size: int | None = None) -> StreamEvent:
    """Check one event of the completions or the chat API and keep what is needed of it.

    Args:
        value: the JSON value.
        vocab_size: token ids must be below; None: any from 0.

    Raises:
        ServerError: it is an error, or a field has a value that it may not have.
    """
    event = an_object(value, "the event itself")
    error = event.get("error") or (event if event.get("object") == "error" else None)
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ServerError(server_words(str(message)))
    choices = event.get("choices")
    if choices is not None and not isinstance(choices, list):
        raise wrong("choices", choices, "a list")
    if choices and len(choices) > 1:
        raise ServerError(
            f"an event of the stream holds {len(choices)} choices, where one is expected"
        )
    choice = an_object(choices[0], "choices[0]") if choices else {}
    delta = an_object(choice.get("delta") or {}, "delta")  # of the chat API
    usage = an_object(event.get("usage") or {}, "usage")
    timings = an_object(event.get("timings") or {}, "timings")  # of llama.cpp
    details = an_object(usage.get("prompt_tokens_details") or {}, "usage.prompt_tokens_details")
    made = an_object(usage.get("completion_tokens_details") or {}, "completion_tokens_details")
    logprobs = an_object(choice.get("logprobs") or {}, "logprobs")
    count = _length(logprobs, "tokens")
    total = whole_number(usage, "completion_tokens")
    return StreamEvent(
        holds_choice=bool(choices),
        text=_optional(choice, "text", str, "text")
        or _optional(delta, "content", str, "text")
        or _calls(delta)
        or "",
        reasoning=_optional(delta, "reasoning_content", str, "text")
        or _optional(delta, "reasoning", str, "text")
        or "",
        token_ids=_token_ids(choice.get("token_ids"), vocab_size),
        count=_length(logprobs, "content") if count is None else count,
        total=whole_number(timings, "predicted_n") if total is None else total,
        finish_reason=_optional(choice, "finish_reason", str, "text") or None,
        prompt_tokens=whole_number(usage, "prompt_tokens"),
        cached_tokens=whole_number(details, "cached_tokens"),
        reasoning_tokens=whole_number(made, "reasoning_tokens"),
    )


def _calls(delta: Mapping[str, Any]) -> str:
    """What a chunk adds to the calls of tools: names and arguments."""
    calls = _optional(delta, "tool_calls", list, "a list") or []
    old = delta.get("function_call")  # as it was before tools
    functions = [call.get("function") for call in calls if isinstance(call, dict)] + [old]
    words = [f.get(key) for f in functions if isinstance(f, dict) for key in ("name", "arguments")]
    return "".join(word for word in words if isinstance(word, str))


def wrong(name: str, value: Any, expected: str) -> ServerError:
    """The error for a field of an event."""
    shown = printable(reprlib.repr(value))
    return ServerError(
        f"an event of the stream is wrong: {name} is {shown}, and must be {expected}"
    )


def an_object(value: Any, name: str) -> Mapping[str, Any]:
    """The value itself; ServerError where it is no object."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def _optional(node: Mapping[str, Any], name: str, kind: type[T], expected: str) -> T | None:
    value = node.get(name)
    if value is not None and not isinstance(value, kind):
        raise wrong(name, value, expected)
    return value


def whole_number(node: Mapping[str, Any], name: str) -> int | None:
    """A field that counts something; ServerError where it does not, None where it is missing."""
    value = whole(node.get(name))
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise wrong(name, value, "a whole number of 0 or more")
    return value


def _length(node: Mapping[str, Any], name: str) -> int | None:
    value = _optional(node, name, list, "a list")
    return None if value is None else len(value)


def _token_ids(value: Any, vocab_size: int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    limit = vocab_size or MOST_TOKENS << 10
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item < limit for item in value
    ):
        raise wrong("token_ids", value, f"a list of whole numbers from 0 to {limit - 1}")
    return tuple(value)


def served_models(value: Any, knob: str = "engine.url") -> dict[str, int | None]:
    """The answer to /models: names, in the server's order, with the longest context where it says
    one.

    Args:
        value: the JSON value.
        knob: the knob that holds the server's URL, for messages.

    Raises:
        ServerError: it is no such list, or lists nothing.
    """
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list) or not data:
        raise ServerError(
            f"GET /models lists no model, but answers {printable(reprlib.repr(value)):.200}: is "
            f"{knob} right?"
        )
    models: dict[str, int | None] = {}
    for entry in data:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or not entry["id"]:
            raise ServerError(
                f"GET /models: {printable(reprlib.repr(entry))} is no model with an id"
            )
        context = entry.get("max_model_len")
        context = int(context) if isinstance(context, float) and context.is_integer() else context
        if context is not None and (type(context) is not int or context < 1):
            shown = printable(reprlib.repr(context))
            raise ServerError(
                f"GET /models: max_model_len={shown} must be a whole number of 1 or more"
            )
        models[entry["id"]] = context
    return models


ANSWER = ("response.output_text.delta", "response.refusal.delta")
CALL = "response.function_call_arguments.delta"
REASONING = (
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
    "response.reasoning.delta",
)
ENDS = ("response.completed", "response.incomplete")


def read_response_event(value: Any, vocab_size: int | None = None) -> StreamEvent:
    """Check one event and keep what is needed of it; see `read_event`.

    Raises:
        ServerError: it is an error, the response failed, or a field has a value that it may not
            have.
    """
    event = an_object(value, "the event itself")
    kind = event.get("type")
    response = an_object(event.get("response") or {}, "response")
    error = event if kind == "error" else event.get("error") or response.get("error")
    if error or kind == "response.failed":
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ServerError(server_words(str(message or "the response failed")))
    delta = event.get("delta") if kind in (*ANSWER, CALL, *REASONING) else ""
    if not isinstance(delta, str):
        raise wrong("delta", delta, "text")
    usage = an_object(response.get("usage") or {}, "usage") if kind in ENDS else {}
    read, made = (
        an_object(usage.get(f"{name}_tokens_details") or {}, f"{name}_tokens_details")
        for name in ("input", "output")
    )
    return StreamEvent(
        holds_choice=bool(delta),
        text="" if kind in REASONING else delta,
        reasoning=delta if kind in REASONING else "",
        token_ids=None,
        count=None,
        total=whole_number(usage, "output_tokens"),
        finish_reason=_reason(response) if kind in ENDS else None,
        prompt_tokens=whole_number(usage, "input_tokens"),
        cached_tokens=whole_number(read, "cached_tokens"),
        reasoning_tokens=whole_number(made, "reasoning_tokens"),
    )


def _reason(response: Any) -> str:
    """Why a response has ended, as the chat API says it."""
    if response.get("status") != "incomplete":
        return "stop"
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason in ("max_output_tokens", "max_tokens", None) else str(reason)
