"""The script that measures planning plans what it says."""

from __future__ import annotations

from tests.scripts.load import load_script


def test_it_plans_full_batches_and_serves_everybody() -> None:
    script = load_script("planning_cost")
    row = script.decoding(running=20, waiting=30, steps=40)  # asserts who runs and who waits
    assert row["steps"] == 40 and 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    model = script.Model(4, script.PROMPT + 8)
    model.add(10, 8)
    for _ in range(3 * 8):  # three batches of four, none preempted
        assert model.scheduler.has_unfinished
        model.step()
    assert not model.scheduler.has_unfinished and model.scheduler.num_preemptions == 0
    assert script.life(10)["us_a_request"] > 0
