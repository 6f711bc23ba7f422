"""The outputs of prompts: completions with their texts, tokens, times and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.engine.tokenizer import Detokenizer
from minivllm.models.load.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.engine.engine import TokenOutput
    from minivllm.engine.request import Request
    from minivllm.extras.beam import BeamSearch, Hypothesis


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str | None = None  # None without a tokenizer
    token_ids: list[int] = field(default_factory=list)
    # For each token: token id -> natural log of the probability.
    logprobs: list[dict[int, float]] | None = None
    # "stop" | "length" | "abort" | "shed" (too late for its deadline)
    finish_reason: str | None = None
    # The stop string or token id that ended the completion; None for the model's own end.
    stop_reason: int | str | None = None
    # Of a beam: natural log of its probability, and that / (tokens ** length_penalty).
    cumulative_logprob: float | None = None
    score: float | None = None

    def add(self, output: TokenOutput) -> None:
        """Append one token of the engine, and note why the completion ended."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.token_id is None:
            return
        self.token_ids.append(output.token_id)
        if self.text is not None:
            self.text += output.text
        if self.logprobs is not None and output.logprobs is not None:
            self.logprobs.append(output.logprobs)


@dataclass
class RequestMetrics:
    """Times of one prompt, in seconds from the call."""

    first_token_s: float | None = None
    finished_s: float | None = None

    def add(self, output: TokenOutput, elapsed: float) -> None:
        """Note the time of one output, in seconds from the call."""
        self.finished_s = elapsed
        if output.token_id is not None and self.first_token_s is None:
            self.first_token_s = elapsed


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float]] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True)
class StreamPiece:
    """One token of a streamed completion; the last piece of an aborted request has no token."""

    token_id: int | None
    text: str
    finish_reason: str | None
    logprobs: dict[int, float] | None = None


def beam_completions(
    request: Request, search: BeamSearch, tokenizer: Tokenizer | None
) -> list[CompletionOutput]:
    """The completions of a finished beam search, the best first; without a tokenizer they have no
    text."""
    completions = []
    for index, hypothesis in enumerate(search.hypotheses):
        completions.append(
            CompletionOutput(
                index,
                None if tokenizer is None else _text(request, hypothesis, tokenizer),
                hypothesis.token_ids,
                finish_reason=hypothesis.finish_reason,
                cumulative_logprob=hypothesis.cumulative_logprob,
                score=hypothesis.score,
            )
        )
    return completions


def _text(request: Request, hypothesis: Hypothesis, tokenizer: Tokenizer) -> str:
    """The text of one hypothesis, without its end token unless the request asks for it."""
    shown = hypothesis.token_ids
    if hypothesis.finish_reason == "stop" and not request.params.include_stop_str_in_output:
        shown = shown[:-1]
    prompt = request.token_ids[: request.num_prompt_tokens]
    detokenizer = Detokenizer(tokenizer, prompt, request.params.skip_special_tokens)
    return "".join(map(detokenizer.push, shown)) + detokenizer.finish()
