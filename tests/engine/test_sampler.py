"""Sampling: distributions, filters, penalties, and independence from the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.batch_inputs import SamplingColumns, pack_columns
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.sampler import exponential_noise, filter_probs
from minivllm.errors import BadInput
from tests.engine.sampling import sample


def request(
    params: SamplingParams, tokens: list[int] | None = None, prompt: int = 1, seed: int = 0
) -> Request:
    made = Request(
        "r", (tokens or [0])[:prompt], params, max_num_tokens=100, seed=seed, eos_token_ids=(5,)
    )
    made.token_ids.extend((tokens or [0])[prompt:])
    return made


def columns(requests: list[Request]) -> SamplingColumns:
    packed = pack_columns(requests, range(len(requests)), [r.num_tokens for r in requests])
    return SamplingColumns.upload(packed, torch.device("cpu"))


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> torch.Tensor:
    """Frequencies of each token over `count` seeds."""
    requests = [request(params, seed=seed) for seed in range(count)]
    picked = torch.tensor(sample(logits.expand(count, -1), requests))
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
    assert sample(torch.tensor([[2.0, 1.0, 0.0]]), [request(SamplingParams(top_p=0.5))])[0] == 0


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
    ),
    st.booleans(),
)
def test_a_token_does_not_depend_on_its_neighbours(
    params: list[SamplingParams], ties: bool
) -> None:
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(0))
    logits = logits.round() if ties else logits
    requests = [request(p, [3, 4, 3, 9], prompt=2, seed=i) for i, p in enumerate(params)]
    together = [s for s in sample(logits, requests)]
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    backwards = [s for s in sample(logits.flip(0), requests[::-1])][::-1]
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


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_what_logits_are_divided_by_is_finite(name: str) -> None:
    with pytest.raises(BadInput, match=rf"decoding.{name}=inf must be .* finite"):
        SamplingParams(**{name: math.inf})


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
