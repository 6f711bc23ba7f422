"""What the engine says of its own time."""

from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.engine.events import StepTimed


def test_waiting_for_a_fuller_batch_is_no_gap() -> None:
    """Two requests fill a batch; the third one then waits for a fourth that does not come."""
    overrides = ["batching.max_num_seqs=2", "batching.max_wait_ms=2000"]
    steps: list[StepTimed] = []
    with LLM("tiny", device="cpu", batching="dynamic", overrides=overrides) as llm:
        llm.engine.events.subscribe(steps.append, StepTimed)
        llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
    assert [step.num_requests for step in steps] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert steps[4].gap_ms == 0 and all(step.gap_ms > 0 for step in [*steps[1:4], *steps[5:]])
    assert steps[4].start_s - steps[3].start_s > 0.5
