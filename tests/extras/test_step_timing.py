"""Timings of steps: the phases fill the time between marks, and drafts and blocks are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.engine.events import StepTimed
from minivllm.engine.step import StepPlan
from tests.engine.traffic import GREEDY, Asked, serve
from tests.extras.speculative.drafting import load, speculator
from tests.reference import make_checkpoint

PHASES = ("schedule", "draft", "prepare", "forward", "sample", "emit")
ASKED = [Asked([5, 6, 5, 6, 5], GREEDY, comes=i) for i in range(3)]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["speculative=ngram", "speculative.prompt_lookup_min=1"],
        ["speculative=draft", "quant@speculative.quant=int4"],
    ],
    ids=["none", "ngram", "draft"],
)
def test_the_phases_of_a_step(tmp_path: Path, options: list[str]) -> None:
    make_checkpoint(tmp_path)
    knobs = ["speculative.adaptive=false"] if options else []
    steps: list[StepTimed] = []
    with load(tmp_path, *options, *knobs) as llm:
        llm.engine.events.subscribe(steps.append, StepTimed)
        serve(llm.engine, ASKED)
        drafted = speculator(llm.engine).counters if options else None
    for step in steps:
        assert all(getattr(step, f"{phase}_ms") >= 0 for phase in PHASES)
        assert step.forward_ms > 0 and step.gap_ms >= 0
        assert (step.draft_ms > 0) == (step.num_drafts > 0)
        assert step.num_drafts < step.num_tokens
        assert step.kv_slots_allocated == 4 * step.kv_blocks_used
        assert 0 <= step.kv_slots_wasted < step.kv_slots_allocated
    assert sum(step.num_drafts for step in steps) == (drafted.num_draft_tokens if drafted else 0)
    assert sum(step.num_prefill_tokens for step in steps) == sum(len(one.prompt) for one in ASKED)


def test_times_lie_between_marks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    steps: list[StepTimed] = []
    with load(tmp_path) as llm:
        llm.engine.events.subscribe(steps.append, StepTimed)
        llm.engine.timer.emit(StepPlan((), num_tokens=5), (9, 4), (1, 2, 4, 7, 11, 16, 22, 29))
    (step,) = steps
    assert [getattr(step, f"{phase}_ms") for phase in ("gap", *PHASES)] == [
        1000 * seconds for seconds in (1, 2, 3, 4, 5, 6, 7)
    ]
    assert (step.num_tokens, step.context_tokens) == (5, 13)


def test_the_experts_of_a_step_are_counted(tmp_path: Path) -> None:
    """Their number is on the device when the step ends: its timing waits for it."""
    make_checkpoint(tmp_path, "qwen3_moe")
    steps: list[StepTimed] = []
    with load(tmp_path) as llm:
        stop = llm.engine.events.subscribe(steps.append, StepTimed)
        serve(llm.engine, ASKED)
        told = len(steps)
        stop()
        serve(llm.engine, ASKED)
    assert len(steps) == told
    # three layers of eight experts, of which each token takes two
    assert all(3 * 2 <= step.experts_run <= 3 * 8 for step in steps)
