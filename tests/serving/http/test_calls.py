"""Ids of calls, and the line that each leaves in the log."""

from __future__ import annotations

import pytest

from minivllm.serving.http.calls import (
    CALL,
    LONGEST_IGNORED,
    MOST_IGNORED,
    Call,
    ignore,
    request_id_of,
)
from tests.serving.raw import ask
from tests.serving.running import KEY, RunningServer, line_of

WITH_KEY = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("given", [None, "", "with space", "x" * 129, "ü", "a\nb"])
def test_an_id_that_is_not_plain_is_replaced(given: str | None) -> None:
    assert request_id_of(given) != given
    assert request_id_of("plain-1") == "plain-1"


def test_a_call_is_one_line_without_its_prompt_or_key(guarded: RunningServer) -> None:
    headers = WITH_KEY | {"x-request-id": "call-1"}
    body = {"prompt": "confidential", "max_tokens": 5, "ignore_eos": True, "n": 2}
    answer = ask(guarded.url, "/v1/completions", body, headers)
    assert answer.headers["x-request-id"] == "call-1"
    line = line_of(guarded, "call-1")
    assert (line["status"], line["method"], line["path"]) == (200, "POST", "/v1/completions")
    assert (line["client"], line["output_tokens"], line["finish_reason"]) == (
        "127.0.0.1",
        10,
        "length",
    )
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["ms"]
    assert guarded.log is not None
    text = guarded.log.read_text()
    assert "confidential" not in text and KEY not in text


def test_a_path_without_a_route_is_logged_without_its_secrets(guarded: RunningServer) -> None:
    headers = WITH_KEY | {"x-request-id": "call-4"}
    path = "/v1/models/sk-abcdefghijklmnop1"
    assert ask(guarded.url, path, headers=headers, method="GET").status == 404
    assert line_of(guarded, "call-4")["path"] == "/v1/models/***"


def test_the_line_names_what_is_ignored(guarded: RunningServer) -> None:
    headers = WITH_KEY | {"x-request-id": "call-3"}
    fields = {"user": "me", "stream": True, "stream_options": {"include_obfuscation": False}}
    fields["reasoning_effort"] = None
    answer = ask(
        guarded.url, "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}, headers
    )
    assert answer.status == 200
    assert line_of(guarded, "call-3")["ignored"] == ["user", "stream_options.include_obfuscation"]


def test_no_line_grows_with_what_is_ignored() -> None:
    token = CALL.set(Call("r", "c"))
    try:
        for number in range(1000):
            ignore(f"{number}" * 1000)
        ignored = CALL.get().summary()["ignored"]  # type: ignore[union-attr]
    finally:
        CALL.reset(token)
    assert len(ignored) == MOST_IGNORED and max(map(len, ignored)) == LONGEST_IGNORED


def test_a_refused_call_has_its_line_and_id_too(guarded: RunningServer) -> None:
    headers = {"x-request-id": "call-2", "authorization": "Bearer wrong-key-7"}
    answer = ask(guarded.url, "/v1/completions?key=wrong-key-7", {"prompt": "x"}, headers)
    assert answer.headers["x-request-id"] == "call-2"
    assert line_of(guarded, "call-2")["status"] == 401
    assert guarded.log is not None and "wrong-key-7" not in guarded.log.read_text()
