"""What comes back of prompts: completions with their texts, tokens, times and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str | None = None  # None without a tokenizer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None  # one a token: token id -> natural log
    # "stop" | "length" | "abort" | "shed" (too late for its deadline)
    finish_reason: str | None = None
    # The stop string or token id that ended it; None: the model's own end.
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # of a beam: natural log of its probability
    score: float | None = None  # of a beam: cumulative_logprob / (tokens ** length_penalty)


@dataclass
class RequestMetrics:
    """Times of one prompt, in seconds from the call."""

    first_token_s: float | None = None
    finished_s: float | None = None


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
    """One token of a streamed completion; the last piece has none where the request was ended
    without one."""

    token_id: int | None
    text: str
    finish_reason: str | None
    logprobs: dict[int, float] | None = None
