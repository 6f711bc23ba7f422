"""What a server's stream says against a measurement becomes a reason or a note."""

from __future__ import annotations

from typing import Any

from minivllm.bench.metrics.stream_validity import check_stream

STREAM = {
    "tokens": 80.0,
    "tokens_misplaced": 0.0,
    "requests_uncounted": 0.0,
    "prompt_tokens_sent": 40.0,
    "prompt_tokens_counted": 40.0,
    "end_lag_ms": 1.0,
}
ENGINE = {
    "requests": 4.0,
    "prompts": "ids",
    "tokens_counted_late": 0.0,
    "prompts_of_other_length": 0.0,
}


def check(engine: dict[str, Any] | None = None, **stream: float) -> tuple[list[str], list[str]]:
    return check_stream({"engine": ENGINE | (engine or {}), "stream": STREAM | stream}, 100.0)


def test_nothing_to_say_of_a_good_stream_or_of_none() -> None:
    assert check() == ([], [])
    assert check_stream({"engine": {"requests": 4.0}, "cache": {}}) == ([], [])


def test_tokens_that_nobody_can_count() -> None:
    ((reason,), notes) = check(requests_uncounted=3.0)
    assert "3 of 4 requests" in reason and not notes


def test_tokens_that_nobody_can_place() -> None:
    ((reason,), _) = check({"tokens_counted_late": 64.0}, tokens_misplaced=64.0)
    assert "64 of 80 tokens" in reason
    reasons, (note,) = check({"tokens_counted_late": 64.0}, tokens_misplaced=4.0)
    assert not reasons and "64 of 80 tokens were counted when" in note and "of 4 the chunk" in note


def test_prompts_that_the_server_counts_otherwise() -> None:
    ((reason,), _) = check({"prompts_of_other_length": 4.0}, prompt_tokens_counted=44.0)
    assert "44 prompt tokens where 40 were meant, in 4 of 4 requests" in reason
    text = {"prompts": "text", "prompts_of_other_length": 2.0}
    reasons, (note,) = check(text, prompt_tokens_counted=42.0)
    assert not reasons and "42 prompt tokens where 40" in note
    ((reason,), _) = check(text, prompt_tokens_counted=20.0)
    assert "20 prompt tokens where 40" in reason


def test_streams_that_end_late() -> None:
    reasons, (note,) = check(end_lag_ms=30.0)
    assert not reasons and "30.0 ms after their last token on average, 30 % of the latency" in note


def test_more_tokens_than_text() -> None:
    assert check(tokens_of_texts=80.0, text_tokens=41.0) == ([], [])
    _, (note,) = check(tokens_of_texts=80.0, text_tokens=20.0)
    assert note == (
        "the server counts 80 tokens in answers whose text has 20 by the model's tokenizer: more "
        "tokens than text"
    )
