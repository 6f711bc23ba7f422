"""One event of a stream of /v1/responses, checked."""

from __future__ import annotations

from typing import Any

from minivllm.engines.openai import stream_event
from minivllm.engines.openai.stream_event import ServerError, StreamEvent, server_words

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
    event = stream_event.an_object(value, "the event itself")
    kind = event.get("type")
    response = stream_event.an_object(event.get("response") or {}, "response")
    error = event if kind == "error" else event.get("error") or response.get("error")
    if error or kind == "response.failed":
        message = error.get("message", error) if isinstance(error, dict) else error
        raise ServerError(server_words(str(message or "the response failed")))
    delta = event.get("delta") if kind in (*ANSWER, CALL, *REASONING) else ""
    if not isinstance(delta, str):
        raise stream_event.wrong("delta", delta, "text")
    usage = stream_event.an_object(response.get("usage") or {}, "usage") if kind in ENDS else {}
    read, made = (
        stream_event.an_object(usage.get(f"{name}_tokens_details") or {}, f"{name}_tokens_details")
        for name in ("input", "output")
    )
    return StreamEvent(
        holds_choice=bool(delta),
        text="" if kind in REASONING else delta,
        reasoning=delta if kind in REASONING else "",
        token_ids=None,
        count=None,
        total=stream_event.whole_number(usage, "output_tokens"),
        finish_reason=_reason(response) if kind in ENDS else None,
        prompt_tokens=stream_event.whole_number(usage, "input_tokens"),
        cached_tokens=stream_event.whole_number(read, "cached_tokens"),
        reasoning_tokens=stream_event.whole_number(made, "reasoning_tokens"),
    )


def _reason(response: Any) -> str:
    """Why a response has ended, as the chat API says it."""
    if response.get("status") != "incomplete":
        return "stop"
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason in ("max_output_tokens", "max_tokens", None) else str(reason)
