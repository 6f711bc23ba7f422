"""A streamed answer in the terminal, with its times; Ctrl-C stops it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minivllm.engine.options import SamplingParams
from minivllm.llm import LLM
from minivllm.outputs import StreamPiece
from minivllm.prompts import Prompt
from minivllm.serving.parsing.reasoning import split_thinking


@dataclass
class Answer:
    """The text of an answer, its tokens and its times.

    `text` has no thinking blocks; `ttft_s` and `finished_s` are seconds from the request.
    """

    text: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    finished_s: float = 0.0
    finish_reason: str = "abort"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first one, divided by their time; None with fewer than two tokens."""
        if self.ttft_s is None or self.num_tokens < 2 or self.finished_s <= self.ttft_s:
            return None
        return (self.num_tokens - 1) / (self.finished_s - self.ttft_s)

    def summary(self) -> str:
        """One line: the tokens of prompt and output, TTFT, tokens/s, and the reason of the end."""
        parts = [f"{self.num_prompt_tokens} prompt tokens", f"{self.num_tokens} output tokens"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1e3:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        reasons = {"abort": "stopped", "length": "length limit reached"}
        if self.finish_reason in reasons:
            parts.append(reasons[self.finish_reason])
        return " · ".join(parts)


def stream_answer(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    show: Callable[[bool, str], None],
    thinking: bool | None = None,
    echo: str = "",
) -> Answer:
    """Stream one completion; Ctrl-C ends it, and the answer holds the text so far.

    Args:
        llm: generates the answer.
        prompt: text or token ids.
        params: the decoding parameters.
        show: called with (whether it is inside a thinking block, text) for each piece.
        thinking: whether the answer begins inside a thinking block; None shows all text, with
            the tags.
        echo: text to show before the answer, after the prompt was accepted.

    Raises:
        BadInput: the prompt cannot be served.
    """
    ids = llm.encode(prompt)
    answer = Answer(num_prompt_tokens=len(ids))
    begin = time.perf_counter()
    pieces = llm.stream(ids, params)
    if echo:
        show(False, echo)

    def texts(source: Iterator[StreamPiece]) -> Iterator[str]:
        for piece in source:
            answer.finished_s = time.perf_counter() - begin
            answer.ttft_s = answer.ttft_s or answer.finished_s
            answer.num_tokens += piece.token_id is not None
            answer.finish_reason = piece.finish_reason or "abort"
            yield piece.text

    spoken: list[str] = []
    try:
        plain = ((False, text) for text in texts(pieces))
        for is_thought, text in (
            plain if thinking is None else split_thinking(texts(pieces), thinking)
        ):
            if not is_thought:
                spoken.append(text)
            show(is_thought, text)
    except KeyboardInterrupt:
        answer.finish_reason = "abort"
    finally:
        pieces.close()  # aborts an unfinished request
    answer.text = "".join(spoken)
    return answer
