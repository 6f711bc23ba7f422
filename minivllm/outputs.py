"""The outputs of prompts: completions with their texts, tokens, times and log-probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from minivllm.engine.tokenizer import Detokenizer
from minivllm.errors import BadInput, first_line
from minivllm.models.load.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.engine.engine import TokenOutput
    from minivllm.engine.request import Request
    from minivllm.extras.beam import BeamSearch, Hypothesis

# What becomes of completions that failed: they are returned with their error, or it is raised.
OnError = Literal["return", "raise"]


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str | None = None  # None without a tokenizer
    token_ids: list[int] = field(default_factory=list)
    # For each token: token id -> natural log of the probability.
    logprobs: list[dict[int, float]] | None = None
    # "stop" | "length" | "abort" | "shed" (too late for its deadline) | "error"
    finish_reason: str | None = None
    error: Exception | None = None  # what ended the completion with the reason "error"
    # The stop string or token id that ended the completion; None for the model's own end.
    stop_reason: int | str | None = None
    # Of a beam: natural log of its probability, and that / (tokens ** length_penalty).
    cumulative_logprob: float | None = None
    score: float | None = None

    def add(self, output: TokenOutput) -> None:
        """Append one token of the engine, and note why the completion ended."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.request.error
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
    request_id: str = ""  # of its first completion; unique in one LLM
    finished: bool = False  # whether all completions have ended
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    def add(self, completion: CompletionOutput, output: TokenOutput, elapsed: float) -> None:
        """Append one token to a completion; `elapsed` is in seconds from the call."""
        if self.metrics.first_token_s is None:  # a preempted request finds its own tokens later
            self.num_cached_tokens = output.request.cache.num_reused
        completion.add(output)
        self.metrics.add(output, elapsed)


def new_completions(first: Request, has_text: bool) -> Iterator[tuple[str, CompletionOutput]]:
    """The empty completions of a prompt's requests, by request id."""
    streams = (first,) if first.is_joint else (first, *first.unstarted)
    logprobs = first.params.logprobs is not None
    for index, request in enumerate(streams):
        text = "" if has_text else None
        yield request.request_id, CompletionOutput(index, text, logprobs=[] if logprobs else None)


def check_on_error(on_error: str) -> None:
    """Raises BadInput for a value of `on_error` that does not exist."""
    if on_error not in get_args(OnError):
        raise BadInput(f"on_error={on_error!r} must be one of {', '.join(get_args(OnError))}")


def report_errors(results: list[RequestOutput], on_error: OnError) -> list[RequestOutput]:
    """The results, after a warning of those that have an error; with "raise" the first error is
    raised instead."""
    failed = [
        (index, completion.error)
        for index, result in enumerate(results)
        for completion in result.outputs
        if completion.error is not None
    ]
    if failed:
        index, error = failed[0]
        if on_error == "raise":
            raise error
        warnings.warn(
            f"{len(failed)} of {sum(len(result.outputs) for result in results)} completions ended "
            f"with an error, which they hold; the first, of prompt {index}: {first_line(error)}",
            stacklevel=4,
        )
    return results


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
