"""Streamed answers of an engine: thinking blocks, timing, interruption."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.interactive.answer import Answer
from minivllm.interactive.local import stream_answer
from minivllm.outputs import StreamPiece


class FakeLLM:
    """Streams prepared pieces; may be interrupted before one of them."""

    def __init__(self, pieces: list[str], interrupt_at: int | None = None) -> None:
        self.pieces, self.interrupt_at, self.closed = pieces, interrupt_at, False

    def encode(self, prompt: object) -> list[int]:
        return [1, 2, 3]

    def stream(self, prompt: object, params: SamplingParams) -> Iterator[StreamPiece]:
        try:
            for index, text in enumerate(self.pieces):
                if index == self.interrupt_at:
                    raise KeyboardInterrupt
                yield StreamPiece(index, text, "stop" if index == len(self.pieces) - 1 else None)
        finally:
            self.closed = True


def test_answer_leaves_out_thoughts_and_counts_all_tokens() -> None:
    shown: list[tuple[bool, str]] = []
    llm = FakeLLM(["<think>", "hm", "</think>", "yes", "!"])
    answer = stream_answer(llm, "x", SamplingParams(), lambda t, s: shown.append((t, s)), False)  # type: ignore[arg-type]
    assert shown == [(True, "hm"), (False, "yes"), (False, "!")]
    assert (answer.text, answer.num_tokens, answer.num_prompt_tokens) == ("yes!", 5, 3)
    assert answer.finish_reason == "stop"
    assert answer.ttft_s is not None and 0 < answer.ttft_s <= answer.finished_s
    assert "5 output tokens" in answer.summary()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    llm = FakeLLM(["a", "b", "c"], interrupt_at=2)
    answer = stream_answer(llm, "x", SamplingParams(), lambda t, s: None)  # type: ignore[arg-type]
    assert (answer.text, answer.finish_reason, llm.closed) == ("ab", "abort", True)
    assert "stopped" in answer.summary()


def test_ctrl_c_while_showing_aborts_the_request_too() -> None:
    llm = FakeLLM(["a", "b", "c"])

    def show(thought: bool, text: str) -> None:
        if text == "b":
            raise KeyboardInterrupt

    answer = stream_answer(llm, "x", SamplingParams(), show)  # type: ignore[arg-type]
    assert answer.finish_reason == "abort"
    assert llm.closed


@pytest.mark.parametrize(("tokens", "rate"), [(0, None), (1, None)])
def test_no_rate_from_fewer_than_two_tokens(tokens: int, rate: float | None) -> None:
    llm = FakeLLM(["a"] * tokens)
    answer = stream_answer(llm, "x", SamplingParams(), lambda t, s: None)  # type: ignore[arg-type]
    assert answer.tokens_per_s is rate


def test_a_rate_counts_the_tokens_after_the_first_piece() -> None:
    answer = Answer(num_tokens=20, num_first_tokens=11, ttft_s=0.11, finished_s=0.2)
    assert answer.tokens_per_s == pytest.approx(100)
    answer.num_first_tokens = 20
    assert answer.tokens_per_s is None and answer.rate == ""
