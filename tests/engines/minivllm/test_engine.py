"""engine=minivllm behind the benchmark's interface: what is told before weights are loaded, and
what it says of its drafts."""

from __future__ import annotations

from collections import Counter

import pytest

from minivllm import assembly, fit
from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.metrics.latency import ITL
from minivllm.bench.metrics.speculation import speculation
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import SpeculatingEngine
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.errors import classify


def test_weights_that_a_host_cannot_hold_are_a_failure_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "free_memory", lambda device: 24e9)
    monkeypatch.setattr(assembly, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(
        MemoryError, match=r"take about 61 GB, and this machine has 24 GB free: choose fewer bits"
    ) as told:
        MinivllmEngine(
            compose(["model=qwen3_30b_a3b", "model.weights=random", "runtime.device=cpu"])
        )
    assert classify(told.value) == "oom"


REPEATING = tuple(range(100, 108)) * 8  # tokens that proposers foresee


def drafting(*overrides: str) -> MinivllmEngine:
    """The embedded model on one thread, whose drafts have always three tokens."""
    knobs = ("runtime.threads=1", "runtime.device=cpu", "speculative.adaptive=false")
    return MinivllmEngine(compose([*overrides, *(knobs if overrides else knobs[:2])]))


def asked(count: int = 1) -> Workload:
    return Workload(
        tuple(WorkloadRequest(f"r{i}", REPEATING, 24, ignore_eos=True) for i in range(count))
    )


def test_tokens_that_a_step_accepts_come_in_one_poll_and_share_its_gap() -> None:
    engine = drafting(
        "speculative=early_exit", "speculative.exit_layer=1", "speculative.acceptance=1.0"
    )
    assert isinstance(engine, SpeculatingEngine)
    (trace,) = drive(engine, asked(), Offline(), SamplingParams(), Clock())
    together = list(Counter(trace.token_times).values())
    assert together == [1, 4, 4, 4, 4, 4, 3]  # of the last draft there was room for two tokens
    gaps = ITL().samples(trace)
    assert gaps[0] == gaps[3] > 0 and len(gaps) == 23
    told = engine.speculation()
    assert told is not None
    section = speculation(told, engine.steps())
    assert section.proposer == "early_exit" and section.given_acceptance == [1.0]
    assert (section.num_drafts, section.num_draft_tokens, section.num_accepted_tokens) == (
        6,
        17,
        17,
    )
    assert section.tokens_per_step == section.mean_acceptance_length == pytest.approx(23 / 6)
    assert section.verify_ms is not None and section.draft_ms is not None
    assert told.counters.requests == {"r0": (6, 17, 17)}
    counts = {"drafts": 6.0, "draft_tokens": 17.0, "accepted_tokens": 17.0}
    assert engine.liveness()["speculative"] == counts
    engine.reset()
    assert set(engine.liveness()["speculative"].values()) == {0.0}
    engine.close()


def test_steps_without_a_draft_count_for_tokens_per_step() -> None:
    engine = drafting(
        "speculative=early_exit", "speculative.exit_layer=1", "speculative.acceptance=0.0"
    )
    drive(engine, asked(2), Offline(), SamplingParams(), Clock())
    told = engine.speculation()
    assert told is not None
    # The last token of a request has no draft.
    assert (told.counters.num_drafts, told.counters.num_request_steps) == (2 * 22, 2 * 23)
    section = speculation(told, engine.steps())
    assert section.tokens_per_step == section.mean_acceptance_length == 1.0
    assert section.plain_ms is not None and section.break_even_acceptance is not None
    engine.close()


def test_a_repeat_does_not_find_its_own_answers() -> None:
    """What a proposer learned of one window is not there in the next."""
    engine = drafting("speculative=suffix")
    seen = []
    for _ in range(3):
        drive(engine, asked(2), Offline(), SamplingParams(), Clock())
        told = engine.speculation()
        assert told is not None
        seen.append(told.counters.requests)
        engine.reset()
    assert seen[0] == seen[1] == seen[2] and seen[0]
    engine.close()


def test_an_engine_that_does_not_draft_says_nothing_of_drafts() -> None:
    engine = drafting()
    assert engine.speculation() is None
    counts = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    assert engine.liveness()["speculative"] == counts
    engine.close()
