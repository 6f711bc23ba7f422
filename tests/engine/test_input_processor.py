"""What becomes of a prompt before it is served."""

from __future__ import annotations

from minivllm.engine.input_processor import InputProcessor
from minivllm.engine.options import SamplingParams
from minivllm.extras.extensions import RequestExtras


def processor(eos_token_ids: tuple[int, ...]) -> InputProcessor:
    return InputProcessor(10, 20, eos_token_ids, None, 0, lambda: 0.0, RequestExtras(10))


def test_ends_that_the_vocabulary_lacks_are_none() -> None:
    intake = InputProcessor(
        10, 20, (3, 10, 99), tokenizer=None, seed=0, now=lambda: 0.0, extensions=RequestExtras(10)
    )
    assert intake.request("0", [1], SamplingParams(stop_token_ids=(5,))).stop_ids == {3, 5}
    assert intake.request("1", [1], SamplingParams(ignore_eos=True)).stop_ids == frozenset()


def test_samples_of_neighbouring_seeds_share_no_seed() -> None:
    intake = InputProcessor(
        10, 20, (), tokenizer=None, seed=0, now=lambda: 0.0, extensions=RequestExtras(10)
    )

    def seeds(seed: int, n: int) -> list[int]:
        first = intake.request("0", [1], SamplingParams(seed=seed, n=n))
        return [one.seed for one in (first, *first.unstarted)]

    assert seeds(7, 3)[0] == 7 and seeds(7, 3) == seeds(7, 5)[:3]
    every = [one for seed in range(50) for one in seeds(seed, 8)]
    derived = [intake.request("0", [1], SamplingParams()).seed for _ in range(50)]
    assert len({*every, *derived}) == 450 and all(0 <= one < 2**63 for one in every)
