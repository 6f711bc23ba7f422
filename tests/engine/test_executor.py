"""A packed step is all that an executor needs: it may be run elsewhere, later, and again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.batch_inputs import PackedStep, pack
from minivllm.engine.executor import Executor, StepResult, fill_in
from minivllm.engine.request import Request, placeholder
from minivllm.engine.step import ScheduledRequest
from tests.engine.traffic import DRAWN, GREEDY, Asked, serve
from tests.reference import make_checkpoint


class Elsewhere:
    """Runs copies of packed steps, as another process would that gets them as bytes."""

    def __init__(self, inner: Executor, copies: bool = True) -> None:
        self.inner, self.copies = inner, copies
        self.steps: list[PackedStep] = []

    def run(self, packed: PackedStep) -> StepResult:
        self.steps.append(packed)
        return self.inner.run(pickle.loads(pickle.dumps(packed)) if self.copies else packed)


KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": replace(DRAWN, top_k=7, top_p=0.9),
    "penalties": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5),
    "masks": replace(GREEDY, allowed_token_ids=tuple(range(3, 60)), logit_bias={9: 1.0}),
    "least length": replace(GREEDY, min_tokens=3),
    "log-probabilities": replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "samples": replace(DRAWN, n=3),
    "beams": SamplingParams(max_tokens=5, beam_width=2),
}


@pytest.fixture(scope="module", params=["false", "true"], ids=["in turn", "overlapping"])
def llm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    knobs = ["model.max_model_len=96", "cache.block_size=4", f"runtime.overlap={request.param}"]
    with LLM(str(path), quant="fp32", device="cpu", overrides=knobs) as made:
        yield made


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_copies_of_packed_steps_give_the_same_tokens(
    llm: LLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [params for name, params in KINDS.items() if kind in (name, "all")]
    asked = [
        Asked([3 + i] * (1 + 5 * i), params, comes=i % 3)
        for i, params in enumerate(kinds * (1 if kind == "all" else 3))
    ]
    expected = serve(llm.engine, asked)
    elsewhere = Elsewhere(llm.engine.launcher.executor)
    monkeypatch.setattr(llm.engine.launcher, "executor", elsewhere)
    assert serve(llm.engine, asked) == expected
    assert elsewhere.steps


def test_a_packed_step_does_not_change_with_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Elsewhere(llm.engine.launcher.executor, copies=False)
    kept: list[Any] = []
    run = elsewhere.run

    def note(packed: PackedStep) -> StepResult:
        kept.append(copy.deepcopy(tuple(packed)))
        return run(packed)

    monkeypatch.setattr(elsewhere, "run", note)
    monkeypatch.setattr(llm.engine.launcher, "executor", elsewhere)
    serve(llm.engine, [Asked([5, 6, 7], params) for params in KINDS.values()])
    assert [repr(step) for step in kept] == [repr(tuple(step)) for step in elsewhere.steps]


def test_logits_come_back_only_where_they_are_read(llm: LLM) -> None:
    runner, cache = llm.engine.runner, llm.engine.cache
    request = Request("a", [5, 6, 7], SamplingParams(), max_num_tokens=9, seed=0)
    cache.grow(request.cache, 0, 3)
    packed = pack([ScheduledRequest(request, 0, 3)], cache.layout.block_size, all_logits=True)
    result = runner.run(packed)
    assert result.logits is not None and len(result.logits) == 3 and result.tokens is None
    assert runner.run(packed._replace(needs_logits=False)).logits is None
    torch.testing.assert_close(result.logits, llm.logits([5, 6, 7]))
    cache.free(request.cache)


def test_placeholders_stand_for_the_tokens_of_the_step_before() -> None:
    known = torch.tensor([4, placeholder(1), placeholder(0), 9])
    assert fill_in(known, torch.tensor([70, 80, 90])).tolist() == [4, 80, 70, 9]
    assert fill_in(known, torch.tensor([70, -5])).tolist() == [4, 0, 70, 9]
