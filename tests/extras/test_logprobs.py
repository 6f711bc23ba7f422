"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import pytest
import torch

from minivllm.extras.logprobs import top_logprobs


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 3)
    expected = torch.log_softmax(logits[0], 0)
    none, two, every = top_logprobs(logits, [1, 3, 0], [None, 2, -1])
    assert none is None
    assert two is not None and {0, 1, 3} == set(two)
    assert every is not None and {0, 1, 2, 3} == set(every)
    for found in (two, every):
        for token, value in found.items():
            assert value == pytest.approx(float(expected[token]), abs=1e-6)


def test_equal_logits_are_listed_by_token_id_whoever_is_beside() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 0.0]).expand(2, -1)
    for neighbour in (0, 3, 5, -1):
        row = top_logprobs(logits, [0, 0], [2, neighbour])[0]
        assert row is not None and [*row] == [0, 1, 2]
