"""What speculation did within a window, and what it cost.

Names are vLLM's. A draft is what a request verifies in one step: D tokens, of which the first A are
accepted; the request gets A + 1 tokens.

    draft_acceptance_rate    = accepted tokens / draft tokens
    mean_acceptance_length   = 1 + accepted tokens / drafts
    acceptance_by_position   = drafts whose token at position i is accepted / all drafts
    acceptance_by_length     = accepted tokens / draft tokens, of the drafts of one length
    tokens_per_step          = 1 + accepted tokens / decoding requests, summed over the steps

Costs are milliseconds of a step. Steps that compute prompts too are left out of `verify_ms` and
`plain_ms`.

    draft_ms   = all time spent on drafting, attempts that found no draft included
                 / the steps that verified drafts
    verify_ms  = mean forward + sampling of the steps with drafts
    plain_ms   = the same of steps without drafts, weighted by how many steps with drafts had as
                 many requests; None unless most of these have a match

Speculation pays from the acceptance `a` on at which

    1 + share * mean over drafts of (a + a^2 + ... + a^D) = (draft_ms + verify_ms) / plain_ms

where every draft token is right with probability `a` if those before it are, `share` is the share
of a step's requests that draft, and `verify_ms` is that of the matched steps. It is above 1 where
not even perfect drafts pay. `token_acceptance` is the `a` that gives the window's accepted tokens;
the acceptance rate is lower, since it counts tokens after a wrong one as rejected.

Leviathan et al. 2023 (arXiv:2211.17192) have every request draft D tokens and a verification cost
as much as a plain step: 1 + a + ... + a^D = 1 + c D, where c is the cost of a draft token over that
of a plain step; so it pays from a = c on if D = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from minivllm.bench.metrics.roofline import decodes
from minivllm.bench.records.feature_figures import SpeculationFigures
from minivllm.extras.speculative.options import SpeculativeOptions
from minivllm.extras.speculative.proposer import SpeculationCounters

Rows = list[dict[str, Any]]
MATCHED = 0.5  # least share of the steps with drafts for which there are plain ones as large


class SpeculationReport(NamedTuple):
    """What an engine says of its drafts."""

    proposer: str
    options: SpeculativeOptions
    counters: SpeculationCounters


class StepCosts(NamedTuple):
    """Milliseconds of pure decode steps, forward and sampling."""

    verify_ms: float | None  # all steps with drafts
    plain_ms: float | None  # see above
    matched_ms: float | None  # steps with drafts that have plain ones beside them
    num_requests: float | None  # of a step with drafts


def speculation(report: SpeculationReport, steps: Rows) -> SpeculationFigures:
    """The record's section.

    Args:
        report: of the engine.
        steps: `BenchEngine.steps()` of the same window.
    """
    options, counters = report.options, report.counters
    drafts, drafted = counters.num_drafts, counters.num_draft_tokens
    accepted, decoded = counters.num_accepted_tokens, counters.num_request_steps
    costs = step_costs(steps)
    result = SpeculationFigures(
        proposer=report.proposer,
        num_speculative_tokens=options.num_speculative_tokens,
        adaptive=options.adaptive,
        verify=options.verify,
        given_acceptance=None if options.rates is None else list(options.rates),
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / drafts if drafts else None,
        acceptance_by_position=[
            counters.accepted_per_pos[position] / drafts
            for position in range(len(counters.drafted_per_pos))
        ],
        acceptance_by_length={
            str(length): counters.accepted_of_length[length] / (length * count)
            for length, count in sorted(counters.drafts_of_length.items())
        },
        tokens_per_step=1 + accepted / decoded if decoded else None,
        draft_ms=1e3 * counters.draft_s / counters.steps if counters.steps else None,
        verify_ms=costs.verify_ms,
        plain_ms=costs.plain_ms,
    )
    lengths = counters.drafts_of_length
    if drafts:
        result.token_acceptance = solve(lambda rate: _expected(rate, lengths) - accepted / drafts)
    if result.draft_ms is not None and costs.plain_ms and costs.matched_ms is not None:
        assert costs.num_requests is not None
        ratio = (result.draft_ms + costs.matched_ms) / costs.plain_ms
        share = min(1.0, drafts / counters.steps / costs.num_requests)
        result.break_even_acceptance = solve(
            lambda rate: share * _expected(rate, lengths) - (ratio - 1)
        )
    return result


def require_trained(section: SpeculationFigures | None, weights: str | None) -> None:
    """Drop rates of acceptance that random weights decided: they say nothing of any model."""
    if section is None or section.given_acceptance is not None or weights != "random":
        return
    section.draft_acceptance_rate = section.mean_acceptance_length = None
    section.token_acceptance = section.tokens_per_step = None
    section.acceptance_by_position, section.acceptance_by_length = [], {}


def acceptance_notes(section: SpeculationFigures | None, weights: str | None) -> list[str]:
    """A note on drafts that were accepted without a look at them, or by random weights."""
    if section is None:
        return []
    if section.given_acceptance is None:
        return [
            "random weights accept drafts as no trained model does: rates of acceptance are left "
            "out; set speculative.acceptance"
        ] * (weights == "random")
    rates = ", ".join(f"{rate:g}" for rate in section.given_acceptance)
    return [
        f"acceptance set: drafts were accepted at {rates}, whatever they were; speed is that of a "
        "model with this acceptance, and outputs mean nothing"
    ]


def step_costs(steps: Rows) -> StepCosts:
    """What steps with and without drafts take, compared at equal numbers of requests."""
    verifying: dict[int, list[float]] = {}
    plain: dict[int, list[float]] = {}
    for step in filter(decodes, steps):
        if step.get("forward_ms") is not None and step.get("sample_ms") is not None:
            of = verifying if step.get("num_drafts") else plain
            time_ms = step["forward_ms"] + step["sample_ms"]
            of.setdefault(step["num_requests"], []).append(time_ms)
    num_steps = sum(map(len, verifying.values()))
    if not num_steps:
        return StepCosts(None, None, None, None)
    verify_ms = sum(map(sum, verifying.values())) / num_steps
    num_requests = sum(count * len(times) for count, times in verifying.items()) / num_steps
    matched = {count: times for count, times in verifying.items() if count in plain}
    num_matched = sum(map(len, matched.values()))
    if num_matched < MATCHED * num_steps:
        return StepCosts(verify_ms, None, None, num_requests)
    plain_ms = sum(
        len(times) * sum(plain[count]) / len(plain[count]) for count, times in matched.items()
    )
    matched_ms = sum(map(sum, matched.values()))
    return StepCosts(verify_ms, plain_ms / num_matched, matched_ms / num_matched, num_requests)


def _expected(rate: float, drafts_of_length: dict[int, int]) -> float:
    """Accepted tokens of a mean draft, whose tokens are right with probability `rate`."""
    total = sum(drafts_of_length.values())
    return (
        sum(
            count * sum(rate**position for position in range(1, length + 1))
            for length, count in drafts_of_length.items()
        )
        / total
    )


def solve(surplus: Callable[[float], float]) -> float:
    """The rate from 0 on at which an increasing function is no longer negative."""
    low, high = 0.0, 1.0
    if surplus(low) >= 0:
        return low
    while surplus(high) < 0:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if surplus(middle) >= 0 else (middle, high)
    return high
