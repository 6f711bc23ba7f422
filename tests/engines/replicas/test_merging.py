"""Sums of what replicas say of themselves."""

from __future__ import annotations

from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.engines.base import EngineInfo
from minivllm.engines.replicas.merging import (
    merged_info,
    merged_liveness,
    merged_speculation,
    merged_steps,
)
from minivllm.extras.speculative.options import SpeculativeOptions
from minivllm.extras.speculative.proposer import SpeculationCounters


def test_the_time_to_load_is_without_that_to_compile() -> None:
    words = ("pretended", "random", "f", 100, 64, (0,), 4)
    infos = [EngineInfo(*words, load_s=2.0, compile_s=seconds) for seconds in (None, 3.0, 7.0)]
    merged = merged_info(infos, 10.0, "cpu")
    assert (merged.load_s, merged.compile_s) == (3.0, 7.0)
    merged = merged_info(infos[:1], 2.5, "cpu")
    assert (merged.load_s, merged.compile_s) == (2.5, None)


def test_work_is_summed_and_words_are_said_once() -> None:
    one = {"cache": {"blocks": 2.0, "block_size": 16.0, "dtype": "bf16"}, "model": {"experts": 1.0}}
    two = {"cache": {"blocks": 3.0, "block_size": 16.0, "dtype": "fp32"}}
    assert merged_liveness([one, two]) == {
        "cache": {"blocks": 5.0, "block_size": 16.0, "dtype": "bf16 | fp32"},
        "model": {"experts": 1.0},
    }


def test_steps_are_in_the_order_of_their_beginning() -> None:
    rows = merged_steps([[{"start_s": 1.0}, {"start_s": 3.0}], [{"start_s": 2.0}]])
    assert [(row["start_s"], row["replica"]) for row in rows] == [(1.0, 0), (2.0, 1), (3.0, 0)]


def test_drafts_are_summed() -> None:
    options = SpeculativeOptions(num_speculative_tokens=4)
    reports = []
    for request_id, accepted in (("a", 1), ("b", 3)):
        counters = SpeculationCounters(steps=1, draft_s=0.5)
        counters.note(request_id, 3, accepted)
        reports.append(SpeculationReport("ngram", options, counters))
    merged = merged_speculation(reports)
    assert merged is not None and merged_speculation([None, None]) is None
    counters = merged.counters
    assert (counters.num_drafts, counters.num_accepted_tokens, counters.draft_s) == (2, 4, 1.0)
    assert counters.accepted_per_pos == {0: 2, 1: 1, 2: 1}
    assert counters.requests == {"a": (1, 3, 1), "b": (1, 3, 3)}
