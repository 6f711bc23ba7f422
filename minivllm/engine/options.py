"""The knobs of `batching`, and how one request is to be decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from json import dumps, loads
from typing import Any, Literal

from minivllm.errors import BadInput
from minivllm.platform.given import (
    FLOAT32,
    LEAST,
    Range,
    as_given,
    biases,
    is_salt,
    known_fields_only,
    named,
    texts,
    token_ids,
)
from minivllm.platform.options import Options, knob, option
from minivllm.platform.plug_ins import names_class

# A name, or a class of the user's own with its knobs.
PreemptionChoice = Literal["recompute", "swap", "reserve"] | dict[str, Any]


@dataclass(frozen=True)
class BatchingOptions(Options):
    """What every option of batching that runs several requests at once has."""

    group = "batching"
    max_num_seqs: int = knob(64, at_least=1)
    """Most requests running at once; of a static batch its size."""
    max_num_batched_tokens: int = knob(2048, at_least=1)
    """Most tokens computed in one step."""
    chunked_prefill: bool = True
    """Cut long prompts so that they share steps with decoding requests (Sarathi-Serve, Agrawal et
    al. 2024); false: a prompt is computed in one step."""
    preemption: PreemptionChoice = "recompute"
    """recompute, swap (to host memory), reserve (blocks for the worst case on admission, so no
    preemption), or your own as {_target_: my_package.MyPreemption, ...}."""
    watermark: float = knob(0.01, at_least=0, at_most=1)
    """Share of the cache's blocks that admission leaves free for running requests."""
    aging_s: float = knob(60.0, above=0)
    """A waiting request gains one step of priority in this many seconds."""
    shed: bool = False
    """End requests that can no longer meet their decoding.deadline_ms."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.preemption, dict) and not names_class(self.preemption):
            raise self.bad("preemption", "must name a class, as {_target_: my_package.MyClass}")


@option("minivllm.engine.batching.Continuous")
@dataclass(frozen=True)
class ContinuousOptions(BatchingOptions):
    """batching=continuous."""

    prefill_first: bool = False
    """true: a step takes prompts before decoding requests, as in Orca; false: decoding requests
    first."""
    fair_prefill: bool = False
    """true: prompts share a step's tokens evenly; false: first come, first served."""


@option("minivllm.extras.scheduling.batching.Sequential")
@dataclass(frozen=True)
class SequentialOptions(Options):
    """batching=sequential; its knobs are those of the same names in `BatchingOptions`."""

    group = "batching"
    max_num_batched_tokens: int = knob(2048, at_least=1)
    """Most tokens computed in one step."""
    chunked_prefill: bool = True
    """Cut long prompts."""
    aging_s: float = knob(60.0, above=0)
    """A waiting request gains one step of priority in this many seconds."""
    shed: bool = False
    """true: end requests that can no longer meet their decoding.deadline_ms."""


@option("minivllm.extras.scheduling.batching.Static")
@dataclass(frozen=True)
class StaticOptions(BatchingOptions):
    """batching=static."""

    group_by_length: bool = False
    """Make batches of requests with similar output lengths, from the 4 * max_num_seqs most urgent
    ones, as Fairseq and transformers do."""


@option("minivllm.extras.scheduling.batching.Dynamic")
@dataclass(frozen=True)
class DynamicOptions(StaticOptions):
    """batching=dynamic."""

    max_wait_ms: float = knob(50.0, at_least=0)
    """Longest wait of a batch's first request for others."""


# Called with the ids of the prompt and of the output so far, before each token: the ids that may
# come next (integers, or a bool tensor [vocab]), or None for all of them. It must not keep state: a
# request may be passed twice.
TokenMask = Callable[[list[int], list[int]], Iterable[int] | Any]
MOST_SAMPLES = 16384  # of a prompt, as in vLLM: each is a request
_INF = math.inf
_REQUEST = {"whole": True, "as_float": True}  # of a request in JSON
_RANGES: dict[str, Range] = {
    "max_tokens": Range(1, _INF, "at least 1, or null", nullable=True, **_REQUEST),
    "min_tokens": Range(0, _INF, "in [0, max_tokens]", **_REQUEST),
    "temperature": Range(0, FLOAT32, "0 (greedy), or 0.001 or more and finite"),
    "top_k": Range(-1, _INF, "0 or -1 (all tokens), or more", **_REQUEST),
    "top_p": Range(0, 1, "in (0, 1]"),
    "min_p": Range(0, 1, "in [0, 1]"),
    "repetition_penalty": Range(
        LEAST["repetition_penalty"], 1e30, "above 0 and finite: in [1e-30, 1e30]"
    ),
    "presence_penalty": Range(-2, 2, "in [-2, 2]"),
    "frequency_penalty": Range(-2, 2, "in [-2, 2]"),
    "seed": Range(-1, 2**63 - 1, "in [0, 2**63), or null", nullable=True, **_REQUEST),
    "n": Range(1, MOST_SAMPLES, f"in [1, {MOST_SAMPLES}]", **_REQUEST),
    "beam_width": Range(1, MOST_SAMPLES, f"in [1, {MOST_SAMPLES}]", whole=True),
    "length_penalty": Range(-32, 32, "in [-32, 32]"),
    "logprobs": Range(-1, _INF, "0 or more, -1 for all tokens, or null", nullable=True, **_REQUEST),
    "prompt_logprobs": Range(
        -1, _INF, "0 or more, -1 for all tokens, or null", nullable=True, **_REQUEST
    ),
    "priority": Range(-(2**31), 2**31 - 1, "in [-2**31, 2**31)", whole=True),
    "deadline_ms": Range(5e-324, FLOAT32, "above 0, or null", nullable=True),
}
_EARLY = (True, False, "never")
_FLAGS = ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos")


@known_fields_only
@dataclass(frozen=True, repr=False)
class StructuredOutputs:
    """What the text of an output has to be: exactly one of these, named as vLLM names them.

    Args:
        json: JSON that satisfies this schema, a dictionary or its text; kept as text.
        json_object: any JSON object.
        regex: what this regular expression matches as a whole, in the syntax of Rust's crate regex
            (no look-around).
        choice: one of these texts.
        grammar: a sentence of this context-free grammar, in llguidance's variant of Lark; its first
            rule is `start`.

    Raises:
        BadInput: none or several are given, or one has another form.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        what = "decoding.structured_outputs"
        names = [item.name for item in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if self.json is False:
            raise BadInput(f"{what}.json=false allows no output")
        if len(given) != 1:
            raise BadInput(
                f"{what} must hold exactly one of {', '.join(names)}, and has "
                f"{' and '.join(given) or 'none'}"
            )
        value = getattr(self, given[0])
        if given[0] == "json":
            object.__setattr__(self, "json", _schema_text(f"{what}.json", value))
        elif given[0] == "json_object" and value is not True:
            raise BadInput(f"{what}.json_object={value!r} must be true or false")
        elif given[0] == "choice":
            if isinstance(value, str) or not value:
                raise BadInput(f"{what}.choice={value!r} must be a list of texts, at least one")
            object.__setattr__(self, "choice", texts(f"{what}.choice", value))
        elif given[0] != "json_object" and [*texts(f"{what}.{given[0]}", value)] != [value]:
            raise BadInput(f"{what}.{given[0]}={value!r} must be one text")

    @classmethod
    def of(cls, value: Any) -> StructuredOutputs | None:
        """One of a dictionary, as a configuration or a body has it; None stays None."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise BadInput(
                f"decoding.structured_outputs={value!r} must be a dictionary such as "
                '{"regex": "[0-9]+"}, or null'
            )
        return cls(**named("decoding.structured_outputs", cls, value))

    __repr__ = as_given


def _schema_text(what: str, schema: Any) -> str:
    """The text of a JSON schema. Raises BadInput for what is none."""
    try:
        value = loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{what} is no JSON ({error})") from None
    if not isinstance(value, Mapping) and value is not True:
        raise BadInput(f"{what} must be a JSON schema, a dictionary")
    return text


@option("minivllm.engine.options.SamplingParams")
@known_fields_only
@dataclass(frozen=True)
class SamplingParams:
    """Decoding parameters of one request, named as vLLM names them; checked when made.

    Raises:
        BadInput: a value is out of range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate, which a workload sets for each request; null: to the end of the
    context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be chosen before this many tokens."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling, Holtzman et
    al. 2020)."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one."""
    repetition_penalty: float = 1.0
    """Divides (positive) or multiplies (negative) the logits of tokens that occur in the prompt or
    the output (CTRL, Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: dict[int, float] | None = None
    """{token id: number added to its logit}, before the penalties; 1e30 forces its token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be generated, without exception for those that end the sequence;
    null: all."""
    token_mask: TokenMask | None = None
    """The token ids that may come next, called before each token: a function given from Python, see
    TokenMask."""
    structured_outputs: StructuredOutputs | None = knob(None, unasked=True)
    """What the text has to be, which ends with it: {regex: "[0-9]+"}, or json, json_object, choice,
    grammar (a StructuredOutputs); null: any text."""
    seed: int | None = None
    """Noise comes from (seed, position), so that neighbours in the batch change nothing; null or
    -1: the engine derives a seed for each request from measure.seed."""
    n: int = 1
    """Completions a prompt; the first has the noise of `seed`, the others that of seeds hashed from
    it."""
    beam_width: int = 1
    """Above 1: beam search; the best n beams are returned."""
    length_penalty: float = 1.0
    """For beam search: score = sum of log-probabilities / (tokens ** length_penalty)."""
    early_stopping: bool | Literal["never"] = False
    """A beam search with beam_width outputs stops at once (true), when the best beam as it is would
    not be among them (false), or when no beam can come to be (never), as in transformers."""
    bad_words: tuple[str, ...] = knob((), unasked=True)
    """Strings that may not be generated."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; one that is the text of a special token ends it at that
    token."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = knob(False, unasked=True)
    """The text includes the stop string, or the stop token's text."""
    skip_special_tokens: bool = knob(True, unasked=True)
    """The text excludes special tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    logprobs: int | None = None
    """Most likely tokens at each step whose log-probabilities are returned, beside the chosen
    one's; null: none; -1: all."""
    prompt_logprobs: int | None = None
    """The same for every prompt token after the first."""
    cache_salt: str | None = knob(None, unasked=True)
    """Requests of another salt, or without one, share no prefix with these."""
    priority: int = 0
    """Lower is more urgent; a request gains one for every batching.aging_s that it waits."""
    deadline_ms: float | None = None
    """Milliseconds after arrival by which a request should have ended; earlier deadlines are served
    first, and batching.shed=true gives up on late ones."""

    def __post_init__(self) -> None:
        settled: dict[str, Any] = {
            name: allowed.number(f"decoding.{name}", getattr(self, name))
            for name, allowed in _RANGES.items()
        }
        settled |= {"top_k": max(settled["top_k"], 0)} | (
            {"seed": None} if settled["seed"] == -1 else {}
        )
        settled |= {
            name: texts(f"decoding.{name}", getattr(self, name)) for name in ("stop", "bad_words")
        }
        settled["stop_token_ids"] = token_ids("decoding.stop_token_ids", self.stop_token_ids) or ()
        settled["allowed_token_ids"] = token_ids(
            "decoding.allowed_token_ids", self.allowed_token_ids
        )
        settled["structured_outputs"] = StructuredOutputs.of(self.structured_outputs)
        settled["logit_bias"] = biases("decoding.logit_bias", self.logit_bias)
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        rules = (
            (
                "min_tokens",
                self.min_tokens <= (self.max_tokens or self.min_tokens),
                "in [0, max_tokens]",
            ),
            (
                "temperature",
                self.greedy or self.temperature >= LEAST["temperature"],
                _RANGES["temperature"].words,
            ),
            ("top_p", self.top_p >= LEAST["top_p"], _RANGES["top_p"].words),
            ("allowed_token_ids", self.allowed_token_ids != (), "at least one id, or null for all"),
            ("cache_salt", is_salt(self.cache_salt), "1 to 1,024 characters, or null"),
            ("bad_words", all(word.strip() for word in self.bad_words), "words"),
            (
                "token_mask",
                self.token_mask is None or callable(self.token_mask),
                "a function, or null",
            ),
            *((name, isinstance(getattr(self, name), bool), "true or false") for name in _FLAGS),
            ("early_stopping", self.early_stopping in _EARLY, "true, false or never"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise BadInput(f"decoding.{name}={getattr(self, name)!r} must be {expected}")
        if self.beam_width > 1:
            self._check_beams()

    def _check_beams(self) -> None:
        rules = (
            ("n", self.n <= self.beam_width, "at most beam_width"),
            ("temperature", self.greedy, "0: it keeps the likeliest beams, and draws none"),
            ("stop", not self.stop, "empty: a beam ends at token ids; use stop_token_ids"),
            ("logprobs", self.logprobs is None, "null: each output has its cumulative_logprob"),
            ("structured_outputs", self.structured_outputs is None, "null: a grammar has one text"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise BadInput(
                    f"decoding.{name}={getattr(self, name)!r} with beam_width={self.beam_width} "
                    f"must be {expected}"
                )

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

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
        masks = (self.allowed_token_ids, self.token_mask, self.structured_outputs)
        return any(mask is not None for mask in masks)

    @cached_property
    def reads_text(self) -> bool:
        """Whether the text of an output decides where it ends."""
        return bool(self.stop) or self.structured_outputs is not None
