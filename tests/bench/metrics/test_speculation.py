"""What drafts did and cost, by cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.rows import recorded_requests
from minivllm.bench.metrics.speculation import (
    SpeculationReport,
    acceptance_notes,
    require_trained,
    solve,
    speculation,
    step_costs,
)
from minivllm.bench.records.feature_figures import SpeculationFigures
from minivllm.bench.records.schema import checker
from minivllm.extras.speculative.options import SpeculativeOptions
from minivllm.extras.speculative.proposer import SpeculationCounters


def step(forward_ms: float, drafts: int = 0, requests: int = 1, prompts: int = 0) -> dict[str, Any]:
    """A step that samples in 1 ms."""
    tokens = requests + drafts + prompts
    times = {"forward_ms": forward_ms, "sample_ms": 1.0}
    counts = {"num_requests": requests, "num_tokens": tokens, "num_drafts": drafts}
    return {**times, **counts, "num_prefill_tokens": prompts}


def counted() -> SpeculationCounters:
    """Three drafts in three steps of one request, which decodes in four."""
    counters = SpeculationCounters(steps=3, draft_s=0.006, num_request_steps=4)
    counters.note("a", 3, 3)
    counters.note("a", 3, 1)
    counters.note("a", 2, 0)
    return counters


def reported(steps: list[dict[str, Any]], **knobs: Any) -> SpeculationFigures:
    options = SpeculativeOptions(**knobs)
    return speculation(SpeculationReport("ngram", options, counted()), steps)


def test_counts_are_named_as_in_vllm() -> None:
    section = reported([])
    assert (section.num_drafts, section.num_draft_tokens, section.num_accepted_tokens) == (3, 8, 4)
    assert section.draft_acceptance_rate == 4 / 8
    assert section.mean_acceptance_length == 1 + 4 / 3
    assert section.acceptance_by_position == [2 / 3, 1 / 3, 1 / 3]  # of all three drafts
    assert section.acceptance_by_length == {"2": 0.0, "3": 4 / 6}
    assert section.tokens_per_step == 1 + 4 / 4
    assert section.draft_ms == pytest.approx(2.0)
    rate = section.token_acceptance
    assert rate is not None
    assert (2 * (rate + rate**2 + rate**3) + rate + rate**2) / 3 == pytest.approx(4 / 3)


def test_break_even_is_where_costs_and_tokens_balance() -> None:
    steps = [step(9.0), step(12.0, drafts=3), step(12.0, drafts=3), step(14.0, drafts=2)]
    section = reported(steps)
    assert section.plain_ms == pytest.approx(10.0)
    assert section.verify_ms == pytest.approx((13 + 13 + 15) / 3)
    rate = section.break_even_acceptance
    assert rate is not None and 0 < rate < 1
    # One request, which drafts in each of these steps: 2 of 3 drafts have 3 tokens, one has 2.
    gain = (2 * (rate + rate**2 + rate**3) + rate + rate**2) / 3
    assert 1 + gain == pytest.approx((2 + (13 + 13 + 15) / 3) / 10)


def test_where_half_of_the_requests_draft_twice_the_acceptance_is_needed() -> None:
    counters = SpeculationCounters(steps=1, num_request_steps=2)
    counters.note("a", 1, 1)
    report = SpeculationReport("ngram", SpeculativeOptions(), counters)
    alone = speculation(report, [step(9.0), step(10.0, drafts=1)])
    of_two = speculation(report, [step(9.0, requests=2), step(10.0, drafts=1, requests=2)])
    assert alone.break_even_acceptance == pytest.approx(0.1)
    assert of_two.break_even_acceptance == pytest.approx(0.2)


def test_steps_of_other_sizes_and_of_prompts_are_no_comparison() -> None:
    verifying = [step(12.0, drafts=3, requests=2), step(99.0, drafts=3, requests=2, prompts=5)]
    assert step_costs([*verifying, step(9.0), step(9.0, requests=2, prompts=7)]) == (
        *(13.0, None, None, 2.0),
    )
    section = reported([*verifying, step(9.0)])
    assert section.verify_ms == 13.0
    assert section.plain_ms is None and section.break_even_acceptance is None
    # Most steps with drafts have one request, so that those stand for all.
    more = [step(11.0, drafts=1), step(13.0, drafts=1), step(9.0)]
    assert step_costs([*verifying, *more]) == (
        pytest.approx((12 + 14 + 13) / 3),
        pytest.approx(10.0),
        pytest.approx(13.0),
        pytest.approx(4 / 3),
    )


def test_a_rate_that_is_needed_is_found_beyond_what_drafts_can_have() -> None:
    assert solve(lambda rate: rate + rate**2 - 0.75) == pytest.approx(0.5)
    assert solve(lambda rate: rate - 3) == pytest.approx(3)
    assert solve(lambda rate: rate + 1) == 0


def test_without_a_draft_there_is_nothing_to_divide_by() -> None:
    report = SpeculationReport("draft", SpeculativeOptions(), SpeculationCounters())
    section = speculation(report, [step(9.0)])
    rates = section.draft_acceptance_rate, section.mean_acceptance_length, section.tokens_per_step
    costs = section.draft_ms, section.verify_ms, section.plain_ms, section.break_even_acceptance
    assert (*rates, *costs, section.token_acceptance) == (None,) * 8
    assert section.acceptance_by_position == [] and section.acceptance_by_length == {}


def test_an_acceptance_that_was_set_is_recorded_and_said() -> None:
    section = reported([], acceptance=(0.9, 0.5))
    assert section.given_acceptance == [0.9, 0.5]
    (note,) = acceptance_notes(section, "random")
    assert note.startswith("acceptance set: drafts were accepted at 0.9, 0.5")
    assert acceptance_notes(reported([]), "checkpoint") == acceptance_notes(None, "random") == []


def test_the_section_is_what_the_schema_reads() -> None:
    check = checker(SpeculationFigures)
    assert check(vars(reported([step(9.0), step(10.0, drafts=1)]))) is None
    assert check({"acceptance_by_length": {"2": "half"}}) is not None


def test_each_request_has_its_own_counts() -> None:
    traces = [RequestTrace(name, 1, 0.0, token_times=[1.0], token_ids=[7]) for name in "ab"]
    rows = recorded_requests(traces, drafts=counted())
    assert [(row["draft_tokens"], row["accepted_tokens"]) for row in rows] == [(8, 4), (0, 0)]
    rows = recorded_requests(traces)
    assert [(row["draft_tokens"], row["accepted_tokens"]) for row in rows] == [(None, None)] * 2


def test_random_weights_have_no_rates_of_their_own() -> None:
    section = reported([])
    assert section.draft_acceptance_rate is not None
    require_trained(section, "checkpoint")
    assert section.draft_acceptance_rate is not None
    require_trained(section, "random")
    assert section.draft_acceptance_rate is section.mean_acceptance_length is None
    assert section.acceptance_by_position == [] and section.num_accepted_tokens == 4
    (note,) = acceptance_notes(section, "random")
    assert "set speculative.acceptance" in note
