"""The figures that a feature adds to a record: drafts, images, jobs, quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.records.figures import Percentiles
from minivllm.platform.described import measured


@dataclass
class SpeculationFigures:
    """What drafts did to the decoding of a window, in vLLM's names; definitions in
    metrics/speculation.py."""

    proposer: str = ""
    """The option of `speculative`."""
    num_speculative_tokens: int = 0
    """Most draft tokens of a request in a step."""
    adaptive: bool = False
    """Whether drafts are only as long as they pay."""
    verify: str = ""
    """`same_noise` or `rejection`."""
    given_acceptance: list[float] | None = None
    """The rates of `speculative.acceptance` by position, at which drafts were accepted whatever
    they were ("acceptance set"); null: drafts were judged."""
    num_drafts: int = 0
    """Drafts verified."""
    num_draft_tokens: int = 0
    """Tokens of these drafts."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    draft_acceptance_rate: float | None = measured("share", "higher")
    """Share of the draft tokens that were accepted; tokens after a wrong one are not.

    Formula: accepted tokens / draft tokens.
    Example: drafts of 3 tokens each, of which 3 and 1 are accepted: 4 of 6, 0.667.
    """
    mean_acceptance_length: float | None = measured("tokens", "higher")
    """Tokens that a step gives to a request that drafts.

    Formula: 1 + accepted tokens / drafts.
    Example: 4 accepted tokens of 2 drafts: 3.
    """
    acceptance_by_position: list[float] = field(default_factory=list)
    """For each position, the share of all drafts whose token there is accepted; a draft that is
    shorter counts as not accepted there."""
    acceptance_by_length: dict[str, float] = field(default_factory=dict)
    """Accepted tokens / draft tokens of the drafts of each length."""
    tokens_per_step: float | None = measured("tokens", "higher")
    """Tokens that a step gives to a decoding request, with a draft or without: what ITL gains by,
    if steps take no longer.

    Formula: 1 + accepted tokens / decoding requests, summed over the steps.
    Example: 4 accepted tokens in 2 steps with drafts and 6 without, of one request: 1.5.
    """
    draft_ms: float | None = measured("ms", "lower")
    """Drafting in a step that verifies drafts, attempts that found no draft included.

    Formula: time spent on drafting / steps with drafts.
    Example: 12 ms in 6 steps: 2 ms.
    """
    verify_ms: float | None = measured("ms", "lower")
    """Forward pass and sampling of a step that verifies drafts and computes no prompt.

    Formula: sum of forward and sampling times / these steps.
    Example: 6 such steps of 11 ms and 1 ms: 12 ms.
    """
    plain_ms: float | None = measured("ms", "lower")
    """The same of steps without drafts, at the numbers of requests that steps with drafts have;
    null unless half of these have a match.

    Formula: mean forward and sampling time for each number of requests, weighted by the steps with
    drafts.
    Example: 10 ms for one request and 14 ms for two, and as many steps with drafts of each: 12 ms.
    """
    token_acceptance: float | None = measured("share", "higher")
    """Probability that a draft token is right if those before it are.

    Formula: a with mean over drafts of (a + a^2 + ... + a^D) = accepted tokens / drafts.
    Example: drafts of 2 tokens with 0.75 accepted on average: 0.5 + 0.25, so 0.5.
    """
    break_even_acceptance: float | None = measured("share", "lower")
    """The token acceptance from which on drafts pay, at the measured costs; above 1 not even
    perfect drafts do. Null without `plain_ms`.

    Formula: a with 1 + share of requests that draft * mean over drafts of (a + a^2 + ... + a^D) =
    (draft_ms + verify_ms) / plain_ms.
    Example: drafts of 1 token for every request, 2 + 12 ms against 10 ms: 1 + a = 1.4, so 0.4.
    """


@dataclass
class EncoderFigures:
    """The images of a window, and what their towers did; definitions in docs/vision.md."""

    images_encoded: int = 0
    """Images that a tower computed."""
    encoder_cache_hits: int = 0
    """Images of prompts whose embeddings were kept from before, or computed for another prompt of
    the same step; not those that the prefix cache had."""
    hit_rate: float | None = measured("share", "higher")
    """Share of the cache's hits among all images of prompts."""
    image_tokens: int = 0
    """Embeddings that steps took in place of those of tokens."""
    encoder_ms: float = measured("ms", default=0.0)
    """Time of all towers."""
    encoder_flops: float = measured("FLOP", default=0.0)
    """Operations of all towers."""

    @classmethod
    def of(cls, liveness: Mapping[str, Mapping[str, Any]]) -> EncoderFigures | None:
        """The figures by the engine's counters of `vision`; None where prompts had no images."""
        counts = liveness.get("vision") or {}
        hits, encoded = (int(counts.get(k, 0)) for k in ("encoder_cache_hits", "images_encoded"))
        if not counts.get("image_tokens"):
            return None
        return cls(
            images_encoded=encoded,
            encoder_cache_hits=hits,
            hit_rate=hits / (hits + encoded) if hits + encoded else None,
            image_tokens=int(counts["image_tokens"]),
            encoder_ms=float(counts["encoder_ms"]),
            encoder_flops=float(counts["encoder_flops"]),
        )


@dataclass
class JobFigures:
    """The sessions of an agentic workload, each of which is a job; definitions in
    metrics/jobs.py."""

    sessions: int = 0
    """Sessions of the window."""
    num_jobs: int = 0
    """Sessions that ran from their beginning to their end."""
    latency_s: Percentiles = measured("s", "lower", default=Percentiles)
    """How long a job takes: a session of an agent with its sub-agents and tools.

    Formula: end of its last answer - scheduled start of its first call, a sample a job.
    Example: first call due at 10 s, last answer at 55 s: 45 s.
    """
    jobs_per_hour: float | None = measured("jobs/h", "higher")
    """Jobs that ran from their beginning to their end, per hour of the window.

    Formula: 3600 * jobs / length of the window.
    Example: 8 jobs in 120 s: 240.
    """
    jobs_per_hour_per_device: float | None = measured("jobs/h", "higher")
    """The same for each device that the engine computes on.

    Formula: jobs_per_hour / devices.
    Example: 240 jobs an hour on 2 devices: 120.
    """
    jobs_per_hour_per_user: float | None = measured("jobs/h", "higher")
    """Jobs that one user gets done who begins the next when the last has ended.

    Formula: 3600 / mean job latency.
    Example: jobs of 45 s: 80.
    """
    hit_rate: float | None = measured("share", "higher")
    """Share of the prompt tokens that the prefix cache had; null where the engine does not say.

    Formula: cached prompt tokens / prompt tokens.
    Example: prompts of 100 and 180 tokens, 96 of the second cached: 0.343.
    """
    optimal_hit_rate: float | None = measured("share", "higher")
    """The same of a cache that drops nothing and knows a prompt once it is submitted.

    Formula: sum of the whole blocks that a prompt begins with as an earlier one does / prompt
    tokens.
    Example: the second prompt begins with all 100 tokens of the first, blocks of 16: 96 / 280,
    0.343.
    """
    session_hit_rate: Percentiles = measured("share", "higher", default=Percentiles)
    """The hit rate of each session."""
    live_tokens: int | None = measured("tokens")
    """Most tokens that sessions under way had computed at one time, each counted once: a cache of
    that size keeps every session whole.

    Formula: maximum over time of the sum over sessions of (prompt - shareable + output tokens) so
    far.
    Example: two sessions at once, which have computed 3,000 and 2,000 tokens: 5,000.
    """
    joules_per_job: float | None = measured("J", "lower")
    """Energy of a job, where all sessions are jobs; null without an energy counter.

    Formula: joules / jobs.
    Example: 4,000 J for 8 jobs: 500 J.
    """
    cost_per_job: float | None = measured("currency", "lower")
    """Money for a job by the hours and the energy, where all sessions are jobs.

    Formula: (device-hours * their price + kWh * their price) / jobs.
    Example: 120 s at 3.60 an hour for 8 jobs: 0.015.
    """
    token_cost_per_job: float | None = measured("currency", "lower")
    """Money for a job by its tokens, with cached ones at a price of their own.

    Formula: (uncached * million_input + cached * million_cached + output * million_output) / 1e6 /
    jobs.
    Example: 1 million uncached at 3.00, 9 million cached at 0.30, for 10 jobs: 0.57.
    """
    cache_state: str = ""
    """The prefix cache at the start: `cold`, `primed` (sessions that start midway have their
    context in it), `warm` (`measure.prefix_cache=warm`) or `kept` (a server whose cache cannot be
    emptied)."""
    primed_tokens: int = 0
    """Prompt tokens that were run before the window."""
    client_lag_ms: Percentiles = measured("ms", "lower", default=Percentiles)
    """From a call's due time to its submission: the driver's own delay."""


@dataclass
class Quality:
    """What is left of the model's quality, against a reference precision; definitions in
    quality.py."""

    perplexity: float | None = measured("1", "lower")
    """How surprised the model is by a held-out text; null if the logits were not finite.

    Formula: exp(mean negative log-likelihood of the next token).
    Example: tokens predicted with probabilities 1/2 and 1/8: exp((ln 2 + ln 8) / 2) = 4.
    """
    bits_per_byte: float | None = measured("bits/byte", "lower")
    """The same in bits per byte of text; null where the tokens do not decode to the text."""
    tokens: int = 0
    """Predicted tokens of perplexity and top-1."""
    kl_mean: float | None = measured("nats/token", "lower")
    """Kullback-Leibler divergence of the next-token distribution from the reference precision's.

    Formula: mean over tokens of sum of p_reference * ln(p_reference / p).
    Example: reference (1/2, 1/2) and here (1/4, 3/4): 0.144 nats.
    """
    kl_p99: float | None = measured("nats/token", "lower")
    """99th percentile over tokens of that divergence; from 100 tokens on."""
    kl_tokens: int = 0
    """The number of first tokens with stored reference distributions."""
    top1_agreement: float | None = measured("share", "higher")
    """Share of tokens at which the likeliest next one is the reference's.

    Formula: tokens with the same argmax / tokens.
    Example: 992 of 1,000: 0.992.
    """
    prefix_mean: float | None = measured("tokens", "higher")
    """Greedy tokens identical with the reference's before the first that differs, mean over
    prompts.

    Formula: sum of the identical prefixes / prompts.
    Example: 64 and 20 tokens: 42.
    """
    prefix_min: int | None = measured("tokens", "higher")
    """Least over the prompts of the same prefix."""
    prefix_of: int = 0
    """Greedy tokens of each prompt."""
    prompts: int = 0
    """Number of prompts."""
    reference: str = ""
    """The reference precision."""
    reference_id: str = ""
    """Names the folder in `runs/quality/`; values of one id are comparable."""
    reference_perplexity: float | None = measured("1")
    """Perplexity of the reference itself."""
