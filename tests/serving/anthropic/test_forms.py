"""Errors, ends and usage in Anthropic's words."""

from __future__ import annotations

import pytest

from minivllm.processes.messages import Piece
from minivllm.serving.anthropic.forms import error_body, is_path, stop_reason
from minivllm.serving.errors import ApiError, internal, overloaded, too_late, unavailable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "x"), "invalid_request_error"),
        (ApiError(401, "x", kind="other"), "authentication_error"),
        (ApiError(403, "x"), "permission_error"),
        (ApiError(404, "x"), "not_found_error"),
        (ApiError(405, "x"), "invalid_request_error"),
        (too_late("x"), "timeout_error"),
        (ApiError(413, "x"), "request_too_large"),
        (overloaded("x", 1), "rate_limit_error"),
        (internal("x"), "api_error"),
        (unavailable("x"), "overloaded_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(error: ApiError, kind: str) -> None:
    assert error_body(error)["error"] == {"type": kind, "message": "x"}
    assert error_body(error)["type"] == "error"


@pytest.mark.parametrize(
    ("finish", "stop", "calls", "tokens", "reason", "sequence"),
    [
        ("stop", None, 0, 5, "end_turn", None),
        ("stop", 7, 0, 5, "end_turn", None),
        ("stop", None, 2, 5, "tool_use", None),
        ("stop", "END", 2, 5, "stop_sequence", "END"),
        ("length", None, 0, 9, "max_tokens", None),
        ("length", None, 1, 9, "max_tokens", None),
        ("length", None, 0, 5, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ended(
    finish: str, stop: int | str | None, calls: int, tokens: int, reason: str, sequence: str | None
) -> None:
    last = Piece("r", 0, None, tokens, "", finish, stop, None, 0, None, None)
    found = stop_reason(last, calls, tokens, 9)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_the_paths_of_this_api() -> None:
    assert is_path("/v1/messages") and is_path("/v1/messages/batches/x")
    assert not is_path("/v1/messagesx") and not is_path("/v1/models")
