"""How one request is to be decoded."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from minivllm.errors import BadInput

# Called with the ids of the prompt and of the output so far, before each token: the ids that may come next (integers,
# or a bool tensor [vocab]), or None for all of them. It must not keep state: a request may be asked about twice.
TokenMask = Callable[[list[int], list[int]], Iterable[int] | Any]


def _token_ids(what: str, ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise BadInput(f"{what}={ids!r} must be token ids, whole numbers") from None


@dataclass(frozen=True)
class SamplingParams:
    """Decoding parameters of one request, named as vLLM names them; checked when made.

    Args:
        max_tokens: most tokens to generate; None goes on to the end of the context.
        min_tokens: end-of-sequence and stop tokens cannot be chosen before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (nucleus sampling,
            Holtzman et al. 2020).
        min_p: keep tokens at least this fraction as likely as the likeliest one.
        repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens that
            occur in the prompt or the output (CTRL, Keskar et al. 2019).
        presence_penalty: subtracted once from the logits of tokens in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: token id -> what is added to its logit, before the penalties; None adds nothing.
        allowed_token_ids: only these may be generated; None allows all. End-of-sequence tokens are no exception.
        token_mask: the same, asked anew for each token: a function given from Python, see TokenMask.
        seed: noise comes from (seed, position), so that neighbours in the batch change nothing;
            None lets the engine derive a seed for each request.
        n: completions per prompt.
        beam_width: beams of a beam search, of which the best n are returned; 1 is no beam search.
        length_penalty: a beam's score is the sum of its log-probabilities / (tokens ** length_penalty).
        early_stopping: when a beam search with `beam_width` outputs stops: True, at once; False, when the best beam
            as it is would not be among them; "never", when no beam can come to be (as in transformers).
        bad_words: strings that may not be generated: the last token of one is forbidden where those before it have come.
        stop: strings that end the output. One that is the text of a special token ends it at that token.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: leave what ended the output, a stop string or token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        ignore_eos: go on past the model's end-of-sequence token.
        logprobs: also return the log-probabilities of this many most likely tokens at each step
            (and of the chosen one); None returns none.
        prompt_logprobs: the same for every prompt token after the first.
        priority: lower is more urgent; a request gains one for every `batching.aging_s` it waits.
        deadline_ms: milliseconds after arrival by which the request should have ended; among requests of
            equal priority the earliest deadline is served first.

    Raises:
        BadInput: a value is out of range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    token_mask: TokenMask | None = None
    seed: int | None = None
    n: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else tuple(texts or ())
            object.__setattr__(self, name, texts)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (ids := getattr(self, name)) is not None:
                object.__setattr__(self, name, _token_ids(f"decoding.{name}", ids))
        if self.logit_bias is not None:
            try:  # JSON has no keys but strings
                biases = {int(token): float(bias) for token, bias in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError):
                raise BadInput(
                    f"decoding.logit_bias={self.logit_bias!r} must be {{token id: number}}"
                ) from None
            object.__setattr__(self, "logit_bias", biases)
        for name in (
            *("max_tokens", "min_tokens", "top_k", "seed", "n", "beam_width"),
            *("priority", "logprobs", "prompt_logprobs"),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise BadInput(f"decoding.{name}={value!r} must be a whole number")
        for name in (
            *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("length_penalty", "deadline_ms"),
        ):
            value = getattr(self, name)
            if not (value is None and name == "deadline_ms") and (
                isinstance(value, bool) or not isinstance(value, Real)
            ):
                raise BadInput(f"decoding.{name}={value!r} must be a number")
        rules = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1, or null"),
            (
                "min_tokens",
                0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
                "in [0, max_tokens]",
            ),
            (
                "temperature",
                self.temperature == 0 or 1e-3 <= self.temperature < math.inf,
                "0 (greedy), or 0.001 or more and finite",
            ),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63), or null"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 and finite"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("logit_bias", all(map(math.isfinite, (self.logit_bias or {}).values())), "of finite numbers"),
            ("allowed_token_ids", self.allowed_token_ids != (), "at least one id, or null for all"),
            ("n", self.n >= 1, "at least 1"),
            ("beam_width", self.beam_width >= 1, "at least 1"),
            ("length_penalty", math.isfinite(self.length_penalty), "a finite number"),
            ("early_stopping", self.early_stopping in (True, False, "never"), "true, false or never"),
            ("stop", all(isinstance(text, str) and text for text in self.stop), "non-empty strings"),
            ("bad_words", all(isinstance(word, str) and word.strip() for word in self.bad_words), "words"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or null"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "0 or more, or null",
            ),
            ("deadline_ms", self.deadline_ms is None or self.deadline_ms > 0, "above 0, or null"),
        )
        for name, holds, wanted in rules:
            if not holds:
                raise BadInput(f"decoding.{name}={getattr(self, name)!r} must be {wanted}")
        if self.beam_width > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        rules = (
            ("n", self.n <= self.beam_width, "at most beam_width"),
            ("temperature", self.greedy, "0: it keeps the likeliest beams, and draws none"),
            ("stop", not self.stop, "empty: a beam ends at token ids; use stop_token_ids"),
            ("logprobs", self.logprobs is None, "null: each output has its cumulative_logprob"),
        )
        for name, holds, wanted in rules:
            if not holds:
                raise BadInput(
                    f"decoding.{name}={getattr(self, name)!r} with beam_width={self.beam_width} must be {wanted}"
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether the most likely token is always taken, as the model says it."""
        return self.greedy and not self.adjusts_logits

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether a bias, a penalty or a mask changes logits before a token is chosen."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias) or self.masks

    @cached_property
    def filters(self) -> bool:
        """Whether a draw leaves unlikely tokens out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @cached_property
    def masks(self) -> bool:
        """Whether only some tokens are allowed."""
        return self.allowed_token_ids is not None or self.token_mask is not None
