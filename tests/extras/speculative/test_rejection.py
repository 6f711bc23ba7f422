"""Rejection sampling against the target's distribution, by G-tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm import SamplingParams
from minivllm.engine.request import Request
from minivllm.extras.speculative.rejection import Rejection, judge
from minivllm.extras.speculative.verification import DraftedRun, uniform
from tests.engine.traffic import GREEDY, Asked, serve
from tests.extras.speculative.drafting import Scripted as Oracle
from tests.extras.speculative.drafting import draft_with, foreseen, load, speculator
from tests.later import Later
from tests.reference import make_checkpoint

stats = Later("scipy.stats")

VOCAB, SEQUENCES = 5, 20_000  # of two tokens each: 40,000 draws
Judge = Callable[[int, int, int | None, Tensor, Tensor | None], tuple[int, bool]]


def distributions(seed: int) -> Tensor:
    """Of the first token, and of the second after each first one: float64 [1 + vocab, vocab]."""
    logits = torch.randn(1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(1.2 * logits.double(), -1)


def pairs(rule: Judge, has_probabilities: bool) -> np.ndarray:
    """How often each pair of tokens comes out, [vocab, vocab].

    The second token is judged in the same step if the first draft was accepted; otherwise it is the
    next step's, which drafts for two sequences of three.
    """
    target, proposer = distributions(0), distributions(1)
    sums = proposer.cumsum(1).numpy()
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(SEQUENCES):
        context, accepted, tokens = 0, True, []
        for position in (7, 8):
            draft: int | None = int(
                np.searchsorted(sums[context], uniform(seed, position, 99), side="right")
            )
            if not has_probabilities:
                draft = context % VOCAB  # what a look-up would find
            if not accepted and seed % 3 == 0:
                draft = None
            known = proposer[context] if has_probabilities and draft is not None else None
            token, accepted = rule(seed, position, draft, target[context], known)
            assert 0 <= token < VOCAB and (not accepted or token == draft)
            tokens.append(token)
            context = 1 + token
        counts[tuple(tokens)] += 1
    return np.array([[counts[a, b] for b in range(VOCAB)] for a in range(VOCAB)])


def fits(counts: np.ndarray) -> tuple[float, float]:
    """The p values of a G-test of the first token, and of the pair."""
    target = distributions(0).numpy()
    expected = target[0][:, None] * target[1:] * counts.sum()
    return tuple(
        stats.power_divergence(found.ravel(), wanted.ravel(), lambda_="log-likelihood").pvalue
        for found, wanted in ((counts.sum(1), expected.sum(1)), (counts, expected))
    )  # type: ignore[return-value]


def takes_all(
    seed: int, position: int, draft: int | None, target: Tensor, proposed: Tensor | None
) -> tuple[int, bool]:
    """A wrong rule: every draft is accepted."""
    return (draft, True) if draft is not None else judge(seed, position, None, target, None)


def keeps_the_mass(
    seed: int, position: int, draft: int | None, target: Tensor, proposed: Tensor | None
) -> tuple[int, bool]:
    """A wrong rule: after a rejection the token comes from the target, nothing subtracted."""
    token, accepted = judge(seed, position, draft, target, proposed)
    return (token, True) if accepted else judge(seed, position, None, target, None)


@pytest.mark.parametrize("has_probabilities", [True, False])
def test_tokens_have_the_distribution_of_the_target(has_probabilities: bool) -> None:
    """Draws go by fixed seeds. Half as many tell each wrong rule below from the target with
    p < 1e-9: a statistic of more than 48, with 4 degrees of freedom. It grows with the draws and
    with the square of the error, so an error of half theirs gives more than 24, and 18.5 are
    p = 0.001."""
    first, both = fits(pairs(judge, has_probabilities))
    assert first > 0.001 and both > 0.001


@pytest.mark.parametrize("rule", [takes_all, keeps_the_mass])
@pytest.mark.parametrize("has_probabilities", [True, False])
def test_a_wrong_rule_has_not(
    rule: Judge, has_probabilities: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.extras.speculative.test_rejection.SEQUENCES", 10_000)
    first, both = fits(pairs(rule, has_probabilities))
    assert first < 1e-9 and both < 1e-9


def test_as_many_are_accepted_as_theory_allows() -> None:
    """1 - d, where d is the total variation distance of the two distributions."""
    target, proposer = distributions(0)[0], distributions(1)[0]
    drafts = [int(torch.searchsorted(proposer.cumsum(0), uniform(s, 3, 99))) for s in range(20_000)]
    accepted = sum(judge(seed, 3, draft, target, proposer)[1] for seed, draft in enumerate(drafts))
    expected = float(torch.minimum(target, proposer).sum())
    assert accepted / 20_000 == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("target", [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
def test_what_has_no_probability_never_comes(target: list[float]) -> None:
    probs = torch.tensor(target, dtype=torch.float64)
    for proposed in (None, probs, torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)):
        for seed in range(200):
            token, _ = judge(seed, 0, seed % 3, probs, proposed)
            assert target[token] > 0


def test_a_draft_that_was_not_drawn_is_judged_as_one_for_certain() -> None:
    """Of a model whose logits are not finite, though a filter or mask may leave finite ones."""
    request = Request("r", [1], SamplingParams(temperature=1.0), max_num_tokens=9, seed=0)
    request.params = replace(request.params, logit_bias={1: -1e9})
    own = torch.tensor([0.0, torch.nan, 0.0])
    logits = torch.log(torch.tensor([[0.3, 0.1, 0.6]] * 2))

    class Masks:
        """Leaves tokens 0 and 2."""

        def adjust_logits(self, *_: object) -> Masks:
            return self

        def apply(self, scores: Tensor) -> None:
            scores[:, 1] = -torch.inf

    rule = Rejection(Masks(), lambda _: [own])  # type: ignore[arg-type]
    counts = Counter()
    for seed in range(5_000):
        request.seed = seed
        counts[rule.verify(DraftedRun(request, 1, [0], [0, 0], logits))[0]] += 1
    found, expected = [counts[0], counts[2]], [5_000 / 3, 10_000 / 3]
    assert counts[1] == 0
    assert stats.power_divergence(found, expected, lambda_="log-likelihood").pvalue > 0.001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab_size=16, eos_token_id=1)
    return path


DRAFT = ["speculative=draft", "quant@speculative.quant=int4", "speculative.adaptive=false"]
REJECTION = "speculative.verify=rejection"


def test_greedy_outputs_are_those_of_no_speculation(folder: Path) -> None:
    params = [GREEDY, replace(GREEDY, frequency_penalty=0.4), replace(GREEDY, logit_bias={3: 2.0})]
    asked = [Asked([2 + i, 5], one) for i, one in enumerate(params * 3)]
    with load(folder) as plain, load(folder, *DRAFT, REJECTION) as llm:
        expected = serve(plain.engine, asked)
        assert serve(llm.engine, asked) == expected
        assert speculator(llm.engine).counters.num_accepted_tokens > 0


@pytest.mark.parametrize("drafts", ["a model's", "foreseen"])
def test_an_engine_draws_as_without_speculation(folder: Path, drafts: str) -> None:
    """Two samples of outputs: those of other seeds without drafts, and those with."""
    params = SamplingParams(
        temperature=0.9, top_k=4, max_tokens=3, ignore_eos=True, allowed_token_ids=range(3, 12)
    )
    count = 1_500

    def outputs(engine: object, first: int) -> list[tuple[int, ...]]:
        made = [replace(params, seed=first + index) for index in range(count)]
        results = engine.generate([[2, 5, 7]] * count, made)  # type: ignore[attr-defined]
        return [tuple(result.outputs[0].token_ids) for result in results]

    options = [*DRAFT, REJECTION] if drafts == "a model's" else []
    with load(folder) as plain, load(folder, *options) as llm:
        expected = outputs(plain, count)
        if not options:
            extensions = llm.engine.launcher.extensions
            likely = Counter(expected).most_common(1)[0][0]
            proposer = Oracle(foreseen([[2, 5, 7, *likely]]))
            draft_with(llm.engine, proposer, Rejection(extensions, proposer.draft_logits))
        found = outputs(llm, 0)
        counters = speculator(llm.engine).counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    for place in range(3):
        before, after = Counter(o[place] for o in expected), Counter(o[place] for o in found)
        kept = [token for token in before if before[token] + after[token] >= 10]
        table = [[one[token] for token in kept] for one in (before, after)]
        assert stats.chi2_contingency(table, lambda_="log-likelihood").pvalue > 0.001
