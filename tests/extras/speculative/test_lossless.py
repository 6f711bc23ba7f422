"""Drafts change no token: every proposer, policy, cache and parameter, in combinations that
Hypothesis picks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM
from minivllm.extras import extensions
from minivllm.extras.speculative.verification import DraftedRun, SameNoise
from tests.engine.traffic import DRAWN, GREEDY, Asked, serve, traffic
from tests.extras.speculative.drafting import (
    LONGEST,
    PROPOSERS,
    draft_with,
    foreseen,
    leaves_nothing,
    load,
    same,
    script,
    speculator,
)
from tests.extras.speculative.drafting import Scripted as Oracle
from tests.reference import make_checkpoint

FEW_WORDS = tuple(range(20, 24))  # so that every short run of tokens occurs again
LONG = replace(GREEDY, max_tokens=24)
KINDS = [
    LONG,
    replace(LONG, temperature=0.8),
    replace(LONG, temperature=1.0, allowed_token_ids=FEW_WORDS),
    replace(LONG, temperature=1.0, top_k=3, frequency_penalty=0.3, presence_penalty=0.2),
    replace(DRAWN, min_tokens=12, logit_bias={3: 2.0, 5: -1.0}, max_tokens=30),
    replace(LONG, logprobs=2, allowed_token_ids=FEW_WORDS, temperature=0.7, top_p=0.9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder, "attention=eager") as llm:
        yield llm


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Any:
    second = tmp_path_factory.mktemp("second")
    make_checkpoint(second, "llama", num_hidden_layers=2)
    model = ("model@speculative.model=hf", f"speculative.model.path={second}")
    return script.axes(script.Sizes(4, LONGEST, 2, model))


EVERY = script.axes(script.Sizes(4, LONGEST, 2, ()))


combinations = st.fixed_dictionaries(
    {axis: st.sampled_from(list(options)) for axis, options in EVERY.items()}
).filter(script.possible)


@st.composite
def loads(draw: st.DrawFn) -> list[Asked]:
    """Traffic, and longer outputs of tokens that come again."""
    asked = draw(traffic())
    for index, params in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=4))):
        prompt = draw(st.lists(st.sampled_from(FEW_WORDS), min_size=1, max_size=20))
        asked.append(Asked(prompt, params, comes=index))
    return asked


@settings(max_examples=12)
@given(one=combinations, asked=loads())
def test_every_combination_gives_the_tokens_of_no_speculation(
    folder: Path, plain: LLM, choices: Any, one: dict[str, str], asked: list[Asked]
) -> None:
    if one["cache"] not in ("paged", "prefix"):  # several outputs of one request do not fit
        asked = [each for each in asked if each.params.n == each.params.beam_width == 1]
    with load(folder, *script.overrides(choices, one)) as llm:
        cold = same(llm.engine, plain.engine, asked)
        warm = serve(llm.engine, [replace(each, comes=0, aborted=None) for each in asked])
        for each, first, again in zip(asked, cold, warm, strict=True):
            if each.aborted is None:
                assert again == first
        leaves_nothing(llm.engine)


MIXED = [Asked([5 + i, *FEW_WORDS[: i % 4], 20], one) for i, one in enumerate(KINDS * 2)]


INT8 = ["cache.kv_dtype=int8", "cache.prefix_caching=true", "batching.max_num_batched_tokens=7"]
INVARIANT = ["attention=invariant", "runtime.determinism=batch"]


@pytest.mark.parametrize(
    ("proposer", "quant", "options"),
    [
        pytest.param("draft", "fp32", INT8, id="int8 cache, draft"),
        pytest.param("early_exit", "fp32", INT8, id="int8 cache, early_exit"),
        pytest.param("ngram", "bf16", INVARIANT, id="invariant, ngram"),
        pytest.param("draft", "bf16", INVARIANT, id="invariant, draft"),
    ],
)
def test_it_changes_nothing_where_numbers_are_rounded(
    folder: Path, proposer: str, quant: str, options: list[str]
) -> None:
    with (
        load(folder, *options, quant=quant) as without,
        load(
            folder, *options, *PROPOSERS[proposer], "speculative.adaptive=false", quant=quant
        ) as llm,
    ):
        for _ in range(2):  # cold, and with the prefixes of the first time
            same(llm.engine, without.engine, MIXED)
        assert speculator(llm.engine).counters.num_accepted_tokens > 20


def test_log_probabilities_are_those_of_no_speculation(folder: Path, plain: LLM) -> None:
    prompts = [[*FEW_WORDS, 20 + i, 21] for i in range(4)]
    params = [
        replace(LONG, logprobs=3, prompt_logprobs=2),
        replace(LONG, logprobs=0, temperature=1.0, allowed_token_ids=FEW_WORDS),
        LONG,
        replace(LONG, logprobs=-1, max_tokens=9, temperature=0.8),
    ]
    # Seeds of an engine's own go by how many requests it has had.
    params = [replace(one, seed=index) for index, one in enumerate(params)]
    expected = plain.generate(prompts, params)
    for proposer in PROPOSERS.values():
        with load(folder, *proposer, "speculative.adaptive=false") as llm:
            found = llm.generate(prompts, params)
            assert speculator(llm.engine).counters.num_accepted_tokens > 0
        for one, other in zip(found, expected, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            pairs = [(one.prompt_logprobs, other.prompt_logprobs)]
            pairs.append((one.outputs[0].logprobs, other.outputs[0].logprobs))
            for ours, theirs in pairs:
                assert (ours is None) == (theirs is None)
                for entry, wanted in zip(ours or (), theirs or (), strict=True):
                    assert entry == pytest.approx(wanted, abs=1e-4)


class Wrong(SameNoise):
    """A rule of verification with a fault: `accepted` says how many drafts it keeps, from the
    number of right ones and of all."""

    def __init__(self, accepted: Callable[[int, int], int]) -> None:
        self.accepted = accepted

    def verify(self, run: DraftedRun) -> list[int]:
        """Keep too many."""
        right = len(super().verify(run)) - 1
        kept = self.accepted(right, len(run.drafts))
        return [*run.drafts[:kept], run.chosen[kept]]


@pytest.fixture
def texts(plain: LLM) -> list[list[int]]:
    """The prompts and outputs of MIXED, without drafts."""
    outputs = serve(plain.engine, MIXED)
    return [one.prompt + tokens for one, ((tokens, _),) in zip(MIXED, outputs, strict=True)]


@pytest.mark.parametrize(
    "accepted",
    [
        pytest.param(lambda right, _: right, id="right"),
        pytest.param(lambda right, most: min(right + 1, most), id="one too many"),
        pytest.param(lambda _, most: most, id="all"),
    ],
)
def test_a_wrong_rule_is_found_out(
    folder: Path, plain: LLM, texts: list[list[int]], accepted: Callable[[int, int], int]
) -> None:
    with load(folder) as llm:
        draft_with(llm.engine, Oracle(foreseen(texts, wrong_every=5)), Wrong(accepted))
        if accepted(0, 3) == 0:
            same(llm.engine, plain.engine, MIXED)
        else:
            with pytest.raises(AssertionError):
                same(llm.engine, plain.engine, MIXED)


def test_noise_at_a_wrong_position_is_found_out(
    folder: Path, plain: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are drawn with the noise of the step's first position, as if there were none."""

    def shifted(plan: Any) -> Any:
        rows = extensions_rows(plan)
        firsts: dict[Any, int] = {}
        pairs = zip(rows.requests, rows.positions, strict=True)
        positions = [firsts.setdefault(request, position) for request, position in pairs]
        return rows._replace(positions=positions)

    extensions_rows = extensions.sampled_rows
    drawn = [one for one in MIXED if not one.params.greedy and not one.params.adjusts_logits]
    with load(folder) as llm:
        draft_with(llm.engine, Oracle(foreseen(texts)))
        same(llm.engine, plain.engine, drawn)
        monkeypatch.setattr(extensions, "sampled_rows", shifted)
        with pytest.raises(AssertionError):
            same(llm.engine, plain.engine, drawn)
