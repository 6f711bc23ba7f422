"""Sampling: distributions, filters, penalties, and independence from the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine import sampler
from minivllm.engine.batch_inputs import SamplingColumns, pack_sampling
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.sampler import (
    SampledToken,
    SamplerCounters,
    adjust,
    exponential_noise,
    filter_probs,
)
from minivllm.errors import BadInput


def request(
    params: SamplingParams, tokens: list[int] | None = None, prompt: int = 1, seed: int = 0
) -> Request:
    made = Request(
        "r", (tokens or [0])[:prompt], params, max_num_tokens=100, seed=seed, eos_token_ids=(5,)
    )
    made.token_ids.extend((tokens or [0])[prompt:])
    return made


def sample(logits: torch.Tensor, requests: list[Request]) -> list[SampledToken]:
    return sampler.sample(logits, requests, counters := SamplerCounters()).read(counters)


def columns(requests: list[Request]) -> SamplingColumns:
    return SamplingColumns.unpack(torch.from_numpy(pack_sampling(requests, range(len(requests)))))


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """Frequencies of each token over `count` seeds."""
    requests = [request(params, seed=seed) for seed in range(count)]
    picked = torch.tensor([s.token_id for s in sample(logits.expand(count, -1), requests)])
    return torch.bincount(picked, minlength=logits.numel()) / count


def test_noise_is_exponential_and_depends_on_seed_position_and_token() -> None:
    seeds, positions = torch.tensor([1, 1, 2, 1 + (1 << 40)]), torch.tensor([7, 8, 7, 7])
    tokens = torch.arange(50_000)[None]
    noise = exponential_noise(seeds, positions, tokens)
    assert torch.equal(noise, exponential_noise(seeds, positions, tokens))
    some = tokens[:, 100:200].flip(1)
    assert torch.equal(noise[:, 100:200].flip(1), exponential_noise(seeds, positions, some))
    assert noise.min() > 0
    for row in noise:
        assert row.mean() == pytest.approx(1.0, abs=0.03)
        assert row.var() == pytest.approx(1.0, abs=0.08)
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 0.02
    # Neighbouring seeds at one token must look independent too.
    across = exponential_noise(
        torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64), torch.arange(3)[None]
    )
    assert (torch.corrcoef(across.T) - torch.eye(3)).abs().max() < 0.03
    assert across.mean() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("seed", [0, 4266111, 4483634, 2**63 - 1])
def test_no_seed_draws_the_number_of_each_position(seed: int) -> None:
    """Where a seed's hash is small (0 for 0, 4258 and 296 for the next), positions and tokens must
    not cancel out."""
    positions = torch.arange(64)
    noise = exponential_noise(torch.full((64,), seed), positions, torch.arange(6144)[None])
    drawn = noise.argmin(dim=1)
    assert len({int(token) for token in drawn ^ positions}) > 50
    square = noise[:, :64]
    assert float(torch.corrcoef(torch.stack([square.flatten(), square.T.flatten()]))[0, 1]) < 0.1


def test_noise_is_never_zero() -> None:
    """Zero would draw a token that the filters left out: it happened about once in a vocabulary of
    2**24."""
    tokens = torch.arange(150_000)[None]
    smallest = min(
        float(exponential_noise(torch.tensor([seed]), torch.tensor([18]), tokens).min())
        for seed in range(400)
    )
    assert smallest > 0


@pytest.mark.parametrize("top_k", [4, 2**31, 2**63])
def test_a_top_k_beyond_the_vocabulary_keeps_all_tokens(top_k: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for seed in range(20):
        every, some = (
            request(SamplingParams(temperature=2.0, top_k=k), seed=seed) for k in (0, top_k)
        )
        assert sample(logits, [every]) == sample(logits, [some])


def test_frequencies_follow_the_softmax_at_a_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, 0)
        error = (draws(logits, SamplingParams(temperature=temperature)) - expected).abs().max()
        assert error < 4 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1, top_k=2), {0, 1}),
        # 0.64 does not reach 0.7, the next one does
        (SamplingParams(temperature=1, top_p=0.7), {0, 1}),
        (SamplingParams(temperature=1, top_p=0.6), {0}),
        (SamplingParams(temperature=1, min_p=0.2), {0, 1}),  # 0.24/0.64 is kept, 0.09/0.64 is not
        (SamplingParams(temperature=1, top_k=3, top_p=0.99), {0, 1, 2}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(
    params: SamplingParams, kept: set[int]
) -> None:
    probs = torch.softmax(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), -1)
    assert (
        set(filter_probs(probs, columns([request(params)]))[0].nonzero().flatten().tolist()) == kept
    )
    assert (
        set(draws(torch.tensor([2.0, 1.0, 0.0, -1.0]), params, 500).nonzero().flatten().tolist())
        == kept
    )


def test_filters_add_up_whole_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of floats along a row are what torch refuses on a GPU where only deterministic kernels
    are wanted."""
    plain = torch.Tensor.cumsum

    def cumsum(self: torch.Tensor, dim: int) -> torch.Tensor:
        assert not self.is_floating_point()
        return plain(self, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    assert (
        sample(torch.tensor([[2.0, 1.0, 0.0]]), [request(SamplingParams(top_p=0.5))])[0].token_id
        == 0
    )


def test_a_row_without_top_p_keeps_what_hardly_ever_comes() -> None:
    probs = torch.tensor([[1.0, 1e-13, 1e-20]]).expand(2, -1)
    kept = filter_probs(probs, columns([request(SamplingParams(top_p=p)) for p in (1.0, 0.99)]))
    assert (kept > 0).tolist() == [[True] * 3, [True, False, False]]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.0]),
            top_k=st.integers(0, 8),
            top_p=st.sampled_from([0.5, 0.9, 1.0]),
            min_p=st.sampled_from([0.0, 0.1]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            presence_penalty=st.sampled_from([0.0, 0.5]),
            frequency_penalty=st.sampled_from([0.0, -0.5]),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_a_token_does_not_depend_on_its_neighbours(params: list[SamplingParams]) -> None:
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(0))
    requests = [request(p, [3, 4, 3, 9], prompt=2, seed=i) for i, p in enumerate(params)]
    together = [s.token_id for s in sample(logits, requests)]
    alone = [sample(logits[i : i + 1], [r])[0].token_id for i, r in enumerate(requests)]
    backwards = [s.token_id for s in sample(logits.flip(0), requests[::-1])][::-1]
    assert together == alone == backwards


def test_parameters_reach_the_device_to_the_bit() -> None:
    params = SamplingParams(temperature=0.3, top_k=7, top_p=0.9, min_p=0.05)
    requests = [request(params, [1] * n, seed=2**63 - n) for n in (1, 5, 9)]
    found = columns(requests)
    assert found.seeds.tolist() == [2**63 - n for n in (1, 5, 9)]
    assert found.positions.tolist() == [1, 5, 9] and found.rows.tolist() == [0, 1, 2]
    assert found.top_k.tolist() == [7] * 3
    reals = torch.tensor([0.3, 0.9, 0.05])[:, None].expand(3, 3)
    assert torch.equal(torch.stack((found.temperatures, found.top_p, found.min_p)), reals)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[1.0, 1.1, -1.0, 0.0]])
    greedy = SamplingParams(repetition_penalty=2.0)  # token 1 was seen: 1.1 / 2 falls below 1.0
    assert sample(logits, [request(greedy, [1])])[0].token_id == 0
    # only output counts, and token 1 is in the prompt
    presence = SamplingParams(presence_penalty=0.2)
    assert sample(logits, [request(presence, [1])])[0].token_id == 1
    assert sample(logits, [request(presence, [0, 1])])[0].token_id == 0
    frequency = SamplingParams(frequency_penalty=0.06)  # two occurrences: 1.1 - 0.12 < 1.0
    assert sample(logits, [request(frequency, [0, 1])])[0].token_id == 1
    assert sample(logits, [request(frequency, [0, 1, 1])])[0].token_id == 0


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
    adjust(logits, [request(params, ids, prompt)])
    torch.testing.assert_close(logits, expected)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 1000),
    st.sampled_from([0, 1, 3, 20, 50]),
    st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    from transformers.generation import logits_process as theirs

    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 3
    expected = (
        theirs.TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    )
    # In the order in which transformers' generate() applies them.
    if top_k:
        expected = theirs.TopKLogitsWarper(min(top_k, 40))(None, expected)
    if top_p < 1:
        expected = theirs.TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = theirs.MinPLogitsWarper(min_p)(None, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs, token_ids = torch.softmax(logits / temperature, -1).sort(descending=True)
    ours = torch.zeros_like(logits).scatter(
        1, token_ids, filter_probs(probs, columns([request(params)]))
    )
    torch.testing.assert_close(ours / ours.sum(), torch.softmax(expected, -1))


def test_a_token_mask_is_asked_before_each_token() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def mask(prompt: list[int], output: list[int]) -> list[int] | torch.Tensor | None:
        asked.append((prompt, output))
        return [[1, 2], None, torch.arange(4) == 0][len(output)]

    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    picks = [
        sample(logits, [request(SamplingParams(token_mask=mask), [9 % 4, *output])])[0].token_id
        for output in ([], [2], [2, 3])
    ]
    assert picks == [2, 3, 0]
    assert asked == [([1], []), ([1], [2]), ([1], [2, 3])]
    counters = SamplerCounters()
    sampler.sample(logits, [request(SamplingParams(token_mask=mask))], counters).read(counters)
    assert counters == SamplerCounters(rows_adjusted=1, tokens_changed=1)
    sampler.sample(logits, [request(SamplingParams(temperature=0.001))], counters).read(counters)
    assert counters == SamplerCounters(rows_adjusted=1, tokens_changed=1, tokens_drawn=1)


def test_a_mask_that_allows_nothing_is_an_error_of_its_request_alone() -> None:
    params = SamplingParams(allowed_token_ids=(1, 2), token_mask=lambda prompt, output: [3])
    wrong = [request(params), request(SamplingParams(token_mask=lambda prompt, output: [8]))]
    right = request(SamplingParams(allowed_token_ids=(5,)))
    assert sample(torch.zeros(3, 8), [wrong[0], right, wrong[1]])[1].token_id == 5
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
    assert sample(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), [made])[0].token_id == token


@pytest.mark.parametrize("mask", [[-1], [1.5], torch.tensor([0.0, 1.0])])
def test_what_is_no_token_id_is_an_error_of_its_request(mask: Any) -> None:
    made = request(SamplingParams(token_mask=lambda prompt, output: mask))
    sample(torch.zeros(1, 4), [made])
    assert isinstance(made.error, BadInput) and "a mask of token ids holds what is none" in str(
        made.error
    )


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_what_logits_are_divided_by_is_finite(name: str) -> None:
    with pytest.raises(BadInput, match=rf"decoding.{name}=inf must be .* finite"):
        SamplingParams(**{name: math.inf})


def test_biases_may_be_keyed_by_text_as_json_does() -> None:
    assert SamplingParams(logit_bias={"3": 1}).logit_bias == {3: 1.0}  # type: ignore[dict-item]


def test_end_of_sequence_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5], logits[0, 6] = 9.0, 1.0
    params = SamplingParams(min_tokens=2, max_tokens=10)
    assert sample(logits, [request(params, [0, 1])])[0].token_id == 6
    assert sample(logits, [request(params, [0, 1, 1])])[0].token_id == 5
    assert sample(logits, [request(SamplingParams(), [0, 1])])[0].token_id == 5


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=0.5, logprobs=2, seed=3)
    picked = sample(logits, [request(params, seed=11)])[0]
    expected = torch.log_softmax(logits[0], 0)
    assert picked.logprobs is not None
    assert {0, 1, picked.token_id} == set(picked.logprobs)
    for token, value in picked.logprobs.items():
        assert value == pytest.approx(float(expected[token]), abs=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"seed": "abc"},
        {"seed": 2**64},
        {"temperature": 1e-40},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"n": 0},
        {"stop": ("",)},
        {"stop": [5]},
        {"stop_token_ids": [3.0]},
        {"stop_token_ids": ["a"]},
        {"allowed_token_ids": [1.7]},
        {"temperature": "0.5"},
        {"top_p": None},
        {"length_penalty": True},
        {"min_tokens": 20, "max_tokens": 10},
        {"beam_width": 0},
        {"beam_width": 2.0},
        {"length_penalty": math.inf},
        {"early_stopping": "always"},
        {"logit_bias": {3: math.nan}},
        {"logit_bias": {"x": 1.0}},
        {"allowed_token_ids": ()},
        {"n": 5, "beam_width": 4},
        {"temperature": 0.5, "beam_width": 4},
        {"stop": ("x",), "beam_width": 4},
        {"logprobs": 1, "beam_width": 4},
        {"priority": 1.5},
        {"deadline_ms": 0.0},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=f"decoding.{next(iter(wrong))}="):
        SamplingParams(**wrong)  # type: ignore[arg-type]
