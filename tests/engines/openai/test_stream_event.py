"""Events of /v1/responses: each kind, each end, and whatever a server may get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.engines.openai.stream_event import ServerError, read_response_event

USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 3},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 4},
}


def ended(**response: Any) -> dict[str, Any]:
    status = response.get("status", "completed")
    return {"type": f"response.{status}", "response": {"status": status, **response}}


@pytest.mark.parametrize(
    ("kind", "text", "reasoning"),
    [
        ("output_text", "ab", ""),
        ("refusal", "ab", ""),
        ("function_call_arguments", "ab", ""),
        ("reasoning_text", "", "ab"),
        ("reasoning_summary_text", "", "ab"),
    ],
)
def test_deltas_are_the_answer_or_thoughts(kind: str, text: str, reasoning: str) -> None:
    seen = read_response_event({"type": f"response.{kind}.delta", "delta": "ab"})
    assert (seen.text, seen.reasoning, seen.finish_reason) == (text, reasoning, None)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (ended(), "stop"),
        (ended(status="incomplete", incomplete_details={"reason": "max_output_tokens"}), "length"),
        (
            ended(status="incomplete", incomplete_details={"reason": "content_filter"}),
            "content_filter",
        ),
        ({"type": "response.output_text.done", "text": "ab"}, None),
        ({"type": "response.created", "response": {"status": "in_progress", "usage": None}}, None),
    ],
)
def test_the_end_says_why_it_ended(event: dict[str, Any], reason: str | None) -> None:
    seen = read_response_event(event)
    assert seen.finish_reason == reason and not seen.text


def test_usage_comes_with_the_end() -> None:
    seen = read_response_event(ended(usage=USAGE))
    assert (seen.prompt_tokens, seen.cached_tokens) == (7, 3)
    assert (seen.total, seen.reasoning_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"type": "error", "message": "too busy"}, "too busy"),
        ({"type": "response.failed", "response": {"error": {"message": "no room"}}}, "no room"),
        ({"type": "response.failed"}, "the response failed"),
        ({"type": "response.output_text.delta", "delta": 3}, "delta is 3, and must be text"),
        (ended(usage={**USAGE, "output_tokens": -1}), "output_tokens is -1"),
        (ended(usage=[1]), "usage is"),
        ([], "the event itself is"),
    ],
)
def test_what_is_wrong_is_one_error(event: Any, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        read_response_event(event)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = ("type", "delta", "response", "error")


@given(
    st.dictionaries(st.sampled_from(NAMES), JSON),
    st.sampled_from(["response.output_text.delta", "response.completed", "response.incomplete"]),
    st.dictionaries(st.sampled_from(("usage", "status", "error", "incomplete_details")), JSON),
)
def test_nothing_but_the_one_error_is_raised(
    event: dict[str, Any], kind: str, response: dict[str, Any]
) -> None:
    for one in (event, {**event, "type": kind}, {"type": kind, "response": response}):
        try:
            seen = read_response_event(one)
        except ServerError as error:
            assert str(error) and "\n" not in str(error)
            continue
        assert isinstance(seen.text, str) and isinstance(seen.reasoning, str)
        counts = (seen.total, seen.prompt_tokens, seen.cached_tokens, seen.reasoning_tokens)
        assert all(count is None or (type(count) is int and count >= 0) for count in counts)
