"""A streamed answer with its times, from any source; Ctrl-C stops it. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from minivllm.serving.parsing.reasoning import ThinkingSplitter


@dataclass
class Answer:
    """The text of an answer, its tokens (those of its first piece apart) and its times.

    `text` has no thinking blocks; `ttft_s` and `finished_s` are seconds from the request, which is
    made at `begun_s` of `time.perf_counter`. A server may not tell how many tokens a prompt has
    (None), or an answer: `num_tokens` are then pieces of text.
    """

    text: str = ""
    num_prompt_tokens: int | None = 0
    num_tokens: int = 0
    num_first_tokens: int = 0
    is_counted: bool = True
    ttft_s: float | None = None
    finished_s: float = 0.0
    finish_reason: str = "abort"
    begun_s: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after those of the first piece, divided by their time; None where there are
        none."""
        later = self.num_tokens - max(1, self.num_first_tokens)
        if self.ttft_s is None or later < 1 or self.finished_s <= self.ttft_s:
            return None
        return later / (self.finished_s - self.ttft_s)

    @property
    def rate(self) -> str:
        """The tokens (or pieces of text) per second; empty where there is no rate."""
        unit = "tokens/s" if self.is_counted else "pieces/s"
        return "" if self.tokens_per_s is None else f"{self.tokens_per_s:.1f} {unit}"

    def summary(self) -> str:
        """One line: the tokens of prompt and output, TTFT, tokens/s, and the reason of the end."""
        unit = "output tokens" if self.is_counted else "pieces of text"
        parts = [f"{self.num_tokens} {unit}"]
        if self.num_prompt_tokens is not None:
            parts.insert(0, f"{self.num_prompt_tokens} prompt tokens")
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1e3:.0f} ms")
        reasons = {"abort": "stopped", "length": "length limit reached"}
        parts += [self.rate, reasons.get(self.finish_reason, "")]
        return " · ".join(filter(None, parts))


@dataclass(frozen=True)
class AnswerPiece:
    """What comes at once of an answer: text, and how many tokens it has."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    is_thought: bool = False  # known to be of a thinking block, without tags


def collect(
    answer: Answer,
    pieces: Generator[AnswerPiece],
    show: Callable[[bool, str], None],
    thinking: bool | None = None,
    watch: Callable[[Answer], None] = lambda answer: None,
) -> None:
    """Show an answer as it comes; Ctrl-C ends it, and the answer holds the text so far.

    Args:
        answer: gets the text, the tokens and the times.
        pieces: the answer; closed at the end, which stops an unfinished request.
        show: called with (whether it is inside a thinking block, text) for each piece.
        thinking: whether the answer begins inside a thinking block; None shows all text, with
            the tags.
        watch: called with the answer after each piece, shown or not.
    """
    splitter = None if thinking is None else ThinkingSplitter(thinking)
    spoken: list[str] = []

    def pass_on(parts: Iterable[tuple[bool, str]]) -> None:
        for is_thought, text in parts:
            if not is_thought:
                spoken.append(text)
            show(is_thought, text)

    try:
        for piece in pieces:
            answer.finished_s = time.perf_counter() - answer.begun_s
            if answer.ttft_s is None:
                answer.ttft_s, answer.num_first_tokens = answer.finished_s, piece.num_tokens
            answer.num_tokens += piece.num_tokens
            answer.finish_reason = piece.finish_reason or "abort"
            watch(answer)
            if splitter is None or piece.is_thought:
                pass_on([(piece.is_thought, piece.text)])
            else:
                pass_on(splitter.push(piece.text))
        pass_on([] if splitter is None else splitter.finish())
        watch(answer)  # a server may count the tokens at the end
    except KeyboardInterrupt:
        answer.finish_reason = "abort"
    finally:
        pieces.close()  # aborts an unfinished request
        answer.text = "".join(spoken)
