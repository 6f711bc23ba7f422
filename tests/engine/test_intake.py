"""What becomes of a prompt before it is served."""

from __future__ import annotations

from minivllm.engine.intake import Intake
from minivllm.engine.params import SamplingParams


def test_ends_that_the_vocabulary_lacks_are_none() -> None:
    intake = Intake(10, 20, (3, 10, 99), tokenizer=None, seed=0, now=lambda: 0.0)
    assert intake.request("0", [1], SamplingParams(stop_token_ids=(5,))).stop_ids == {3, 5}
    assert intake.request("1", [1], SamplingParams(ignore_eos=True)).stop_ids == frozenset()
