"""Penalties, biases and masks: by hand, as transformers has them, of their own request alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minivllm.engine.options import SamplingParams
from minivllm.engine.sampler import SamplerCounters
from minivllm.errors import BadInput
from minivllm.extras.adjust_logits import adjust_logits
from tests.engine.sampling import sample
from tests.engine.test_sampler import request


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[1.0, 1.1, -1.0, 0.0]])
    greedy = SamplingParams(repetition_penalty=2.0)  # token 1 was seen: 1.1 / 2 falls below 1.0
    assert sample(logits, [request(greedy, [1])])[0] == 0
    # only output counts, and token 1 is in the prompt
    presence = SamplingParams(presence_penalty=0.2)
    assert sample(logits, [request(presence, [1])])[0] == 1
    assert sample(logits, [request(presence, [0, 1])])[0] == 0
    frequency = SamplingParams(frequency_penalty=0.06)  # two occurrences: 1.1 - 0.12 < 1.0
    assert sample(logits, [request(frequency, [0, 1])])[0] == 1
    assert sample(logits, [request(frequency, [0, 1, 1])])[0] == 0


PENALTIES = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(logit_bias={3: -2.5, 7: 1.5}),
    SamplingParams(allowed_token_ids=(2, 5, 9)),
    SamplingParams(min_tokens=8),
    SamplingParams(
        logit_bias={4: 2.0}, repetition_penalty=1.3, allowed_token_ids=(4, 5, 6), min_tokens=8
    ),
]


@pytest.mark.parametrize("params", PENALTIES)
def test_what_changes_logits_is_what_transformers_does(params: SamplingParams) -> None:
    from transformers.generation import logits_process as theirs

    ids, prompt = [4, 3, 4, 9, 0], 3
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    processors: list[theirs.LogitsProcessor] = []
    if params.logit_bias:
        processors.append(
            theirs.SequenceBiasLogitsProcessor(
                {(token,): bias for token, bias in params.logit_bias.items()}
            )
        )
    if params.repetition_penalty != 1:
        processors.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        processors.append(
            theirs.MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, 5, "cpu")
        )
    allowed = params.allowed_token_ids
    if allowed is not None:
        processors.append(theirs.PrefixConstrainedLogitsProcessor(lambda *_: list(allowed), 1))
    for processor in processors:
        expected = processor(torch.tensor([ids]), expected)
    assert not torch.equal(expected, logits)
    adjust_logits([request(params, ids, prompt)], [len(ids)], 12).apply(logits)
    torch.testing.assert_close(logits, expected)


def test_a_token_mask_is_asked_before_each_token() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def mask(prompt: list[int], output: list[int]) -> list[int] | torch.Tensor | None:
        asked.append((prompt, output))
        return [[1, 2], None, torch.arange(4) == 0][len(output)]

    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    picks = [
        sample(logits, [request(SamplingParams(token_mask=mask), [9 % 4, *output])])[0]
        for output in ([], [2], [2, 3])
    ]
    assert picks == [2, 3, 0]
    assert asked == [([1], []), ([1], [2]), ([1], [2, 3])]
    counters = SamplerCounters()
    sample(logits, [request(SamplingParams(token_mask=mask))], counters)
    assert counters == SamplerCounters(rows_adjusted=1, tokens_changed=1)
    sample(logits, [request(SamplingParams(temperature=0.001))], counters)
    assert counters == SamplerCounters(rows_adjusted=1, tokens_changed=1, tokens_drawn=1)


def test_a_mask_that_allows_nothing_is_an_error_of_its_request_alone() -> None:
    params = SamplingParams(allowed_token_ids=(1, 2), token_mask=lambda prompt, output: [3])
    wrong = [request(params), request(SamplingParams(token_mask=lambda prompt, output: [8]))]
    right = request(SamplingParams(allowed_token_ids=(5,)))
    assert sample(torch.zeros(3, 8), [wrong[0], right, wrong[1]])[1] == 5
    assert right.error is None
    assert isinstance(wrong[0].error, BadInput) and "allow no token after 0 generated ones" in str(
        wrong[0].error
    )
    assert isinstance(wrong[1].error, IndexError)


@pytest.mark.parametrize(
    ("mask", "token"),
    [
        ([True, False, True, False], 2),
        (np.array([True, True, False, False]), 1),
        (np.array([0, 1]), 1),
        ((2, 0), 2),
    ],
)
def test_masks_are_ids_or_whether_each_may_come(mask: Any, token: int) -> None:
    made = request(SamplingParams(token_mask=lambda prompt, output: mask))
    assert sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [made])[0] == token


@pytest.mark.parametrize("mask", [[-1], [1.5], torch.tensor([0.0, 1.0])])
def test_what_is_no_token_id_is_an_error_of_its_request(mask: Any) -> None:
    made = request(SamplingParams(token_mask=lambda prompt, output: mask))
    sample(torch.zeros(1, 4), [made])
    assert isinstance(made.error, BadInput) and "a mask of token ids holds what is none" in str(
        made.error
    )


def test_biases_may_be_keyed_by_text_as_json_does() -> None:
    assert SamplingParams(logit_bias={"3": 1}).logit_bias == {3: 1.0}  # type: ignore[dict-item]


def test_end_of_sequence_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5], logits[0, 6] = 9.0, 1.0
    params = SamplingParams(min_tokens=2, max_tokens=10)
    assert sample(logits, [request(params, [0, 1])])[0] == 6
    assert sample(logits, [request(params, [0, 1, 1])])[0] == 5
    assert sample(logits, [request(SamplingParams(), [0, 1])])[0] == 5
