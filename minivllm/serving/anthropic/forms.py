"""Parts of answers that Anthropic's APIs share."""

from __future__ import annotations

from typing import Any

from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError, PromptTooLong
from minivllm.serving.http.answers import event
from minivllm.serving.http.calls import CALL
from minivllm.serving.processes.token_stream import TokenStream

PATH = "/v1/messages"
# Types of errors by status; others are those of the class of their status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_path(path: str) -> bool:
    """Whether a path belongs to this API."""
    return path == PATH or path.startswith(f"{PATH}/")


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error"],
}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form, see ERROR_SCHEMA."""
    general = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, general)
    message = error.message
    if isinstance(error, PromptTooLong):  # as Claude Code reads it, which then compacts
        message = f"prompt is too long: {error.num_tokens} tokens > {error.context - 1} maximum"
    call = CALL.get()
    about = {} if call is None else {"request_id": call.request_id}
    return {"type": "error", "error": {"type": kind, "message": message}, **about}


def error_event(error: ApiError) -> bytes:
    """An error after the headers of a stream, which ends it."""
    return event(error_body(error), "error")


def usage(stream: TokenStream, num_output: int, num_thinking: int) -> dict[str, Any]:
    """How many tokens a call has taken so far. Input tokens are those that were computed; a prompt
    has those found in the prefix cache, too.

    Args:
        stream: of the call, the first one.
        num_output: tokens of the answer.
        num_thinking: tokens of thoughts among them.
    """
    return {
        "input_tokens": stream.num_prompt_tokens - stream.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stream.num_cached_tokens,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


def stop_reason(piece: Piece, num_calls: int, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Why an answer ended, in Anthropic's words, and what a message says beside it.

    Args:
        piece: the last one.
        num_calls: tool calls of the answer.
        num_tokens: of the answer.
        max_tokens: that it could have.
    """
    sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None
    if piece.finish_reason == "length" and num_tokens < max_tokens:
        reason = "model_context_window_exceeded"
    elif piece.finish_reason == "length":
        reason = "max_tokens"
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if num_calls else "end_turn"
    return ending(reason, sequence)


def ending(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """What a message says of its end; None while it goes on."""
    return {"stop_reason": reason, "stop_sequence": sequence}
