"""Drafts on planned steps: what becomes of them where outputs end, steps fail and room is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import TokenOutput
from minivllm.engine.request import Request
from minivllm.errors import BadInput
from minivllm.extras.speculative.lengths import AdaptiveLengths, FixedLengths
from minivllm.extras.speculative.rejection import Rejection
from minivllm.extras.speculative.verification import GivenAcceptance, SameNoise
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.traffic import DRAWN, GREEDY, Asked, check, serve
from tests.extras.speculative.drafting import (
    Scripted,
    draft_with,
    foreseen,
    leaves_nothing,
    load,
    same,
    speculator,
)
from tests.reference import VARIANTS, make_checkpoint

LONG = replace(GREEDY, max_tokens=24)
PROMPTS = [[5, 6, 7], [30, 31, 32, 33, 34, 35, 36], [90]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, vocab_size=257, eos_token_id=256)
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder, "attention=eager") as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(plain: LLM) -> list[list[int]]:
    """Prompts with their outputs, beyond where a request of the tests ends."""
    asked = [Asked(prompt, replace(LONG, max_tokens=60)) for prompt in PROMPTS]
    outputs = serve(plain.engine, asked)
    return [prompt + tokens for prompt, ((tokens, _),) in zip(PROMPTS, outputs, strict=True)]


@pytest.fixture
def llm(folder: Path, texts: list[list[int]]) -> Iterator[LLM]:
    """Every draft has some right tokens."""
    with load(folder) as made:
        proposer = Scripted(foreseen(texts, wrong_every=7), num_speculative_tokens=5)
        draft_with(made.engine, proposer)
        yield made


def events(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[Any, int]:
    """What each request was told, token by token, and the most tokens of one in a step."""
    engine = llm.engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    told: dict[str, list[Any]] = {}
    most = 0
    while engine.has_unfinished:
        outputs: list[TokenOutput] = engine.step()
        names = [output.request.request_id for output in outputs]
        most = max([most, *map(names.count, names)])
        for name, output in zip(names, outputs, strict=True):
            told.setdefault(name, []).append(output[1:4] + output[5:])
        check(engine)
    return told, most


@pytest.mark.parametrize("most", range(1, 9))
def test_an_output_ends_at_its_length(llm: LLM, plain: LLM, most: int) -> None:
    """No draft is longer than what may follow, and none makes an output longer."""
    params = replace(LONG, max_tokens=most)
    asked = [Asked(prompt, params) for prompt in PROMPTS]
    found = same(llm.engine, plain.engine, asked)
    assert all(len(tokens) == most and why == "length" for ((tokens, why),) in found)
    assert (speculator(llm.engine).counters.num_draft_tokens > 0) == (most > 2)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("least", [0, 4])
def test_an_output_ends_at_a_token_within_a_draft(
    llm: LLM, plain: LLM, texts: list[list[int]], place: int, least: int
) -> None:
    ends = {text[len(prompt) + place] for prompt, text in zip(PROMPTS, texts, strict=True)}
    params = replace(LONG, stop_token_ids=tuple(ends), min_tokens=least)
    found = same(llm.engine, plain.engine, [Asked(prompt, params) for prompt in PROMPTS])
    assert any(why == "stop" for ((_, why),) in found)


@pytest.mark.parametrize("least", [0, 9])
def test_texts_and_reasons_come_token_by_token(
    llm: LLM, plain: LLM, texts: list[list[int]], least: int
) -> None:
    """Several tokens of a step are told one after another, and nothing after the end: a stop
    string, which tokens within a draft complete, or one that a draft holds the half of."""
    assert plain.tokenizer is not None
    outputs = [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts, strict=True)]
    wholes = [plain.tokenizer.decode(output, True) for output in outputs]
    stops = tuple({text[5:7] for text in wholes} | {wholes[0][12:13] + "never"})
    for params in (LONG, replace(LONG, stop=stops, min_tokens=least)):
        expected, one = events(plain, PROMPTS, params)
        found, several = events(llm, PROMPTS, params)
        assert found == expected
        assert one == 1 and several > 2
    reasons = {told[-1][2] for told in found.values()}
    assert "stop" in reasons
    leaves_nothing(llm.engine)


@pytest.mark.parametrize(
    "params", [replace(LONG, n=3, temperature=0.9), replace(LONG, beam_width=3)]
)
def test_groups_beside_drafts(llm: LLM, plain: LLM, params: SamplingParams) -> None:
    """Samples draft like any other; beams, which choose their tokens together, do not."""
    asked = [Asked(prompt, LONG, comes=i) for i, prompt in enumerate(PROMPTS)]
    asked.insert(1, Asked([40, 41], params, comes=1))
    same(llm.engine, plain.engine, asked)
    drafted = speculator(llm.engine).counters.requests
    assert ("1" in drafted) == (params.beam_width == 1)
    assert {"0", "2", "3"} <= drafted.keys()


@pytest.mark.parametrize("after", range(4))
def test_an_abort_between_steps_leaves_nothing(llm: LLM, plain: LLM, after: int) -> None:
    asked = [Asked(PROMPTS[0], LONG, aborted=after), *(Asked(one, LONG) for one in PROMPTS[1:])]
    same(llm.engine, plain.engine, asked)


class Failure(Exception):
    """What a step fails with."""


@pytest.mark.parametrize("where", ["propose", "fill", "run", "read"])
@pytest.mark.parametrize("step", [2, 3])
def test_drafts_of_a_step_that_fails_are_withdrawn(
    llm: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    """The step is planned again, and outputs are the same; a request that ends instead has kept no
    draft, and the proposer learns none."""
    engine = llm.engine
    owners = {"propose": "propose", "fill": "fill", "run": "run", "read": "verify"}
    owner = speculator(engine).proposer if where in ("propose", "fill") else engine.launcher
    owner = speculator(engine).verifier if where == "read" else owner
    own, calls = getattr(owner, owners[where]), iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == step:
            raise Failure
        return own(*args)

    expected = serve(plain.engine, [Asked(prompt, LONG) for prompt in PROMPTS])
    for gives_up in (False, True):
        calls = iter(range(100))
        monkeypatch.setattr(owner, owners[where], failing)
        requests = [engine.add_request(str(i), prompt, LONG) for i, prompt in enumerate(PROMPTS)]
        failed = False
        while engine.has_unfinished and not (failed and gives_up):
            try:
                engine.step()
            except Failure:
                failed = True
        assert failed
        monkeypatch.setattr(owner, owners[where], own)
        engine.abort_all()
        for request, ((tokens, _),) in zip(requests, expected, strict=True):
            found = request.output_token_ids
            assert found == tokens[: len(found)] and (gives_up or found == tokens)
        leaves_nothing(engine)


def test_accepted_drafts_of_a_step_that_fails_are_withdrawn(
    llm: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails after its drafts were verified: no accepted token is lost."""
    engine, params = llm.engine, replace(LONG, logprobs=1)
    own, calls = engine.launcher.extensions.logprobs, iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == 3:
            raise Failure
        return own(*args)

    monkeypatch.setattr(engine.launcher.extensions, "logprobs", failing)
    expected = serve(plain.engine, [Asked(prompt, params) for prompt in PROMPTS])
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    told: dict[str, list[int | None]] = {request.request_id: [] for request in requests}
    while engine.has_unfinished:
        with suppress(Failure):
            for output in engine.step():
                told[output.request.request_id].append(output.token_id)
    for request, ((tokens, _),) in zip(requests, expected, strict=True):
        assert request.output_token_ids == told[request.request_id] == tokens
    leaves_nothing(engine)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_proposer_that_drafts_no_tokens_of_the_model_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    engine = llm.engine
    monkeypatch.setattr(speculator(engine).proposer, "propose", lambda request, most: [token] * 99)
    engine.add_request("a", PROMPTS[0], LONG)
    with pytest.raises(BadInput, match="drafts token ids that the model does not have"):
        while engine.has_unfinished:
            engine.step()
    engine.abort_all()
    leaves_nothing(engine)


def test_keys_that_are_rotated_anew(tmp_path: Path) -> None:
    """A request that grows to 33 tokens has all of them computed again, with other rotations: no
    draft is verified with the old ones beyond that, and none before that with the new ones."""
    family, values = VARIANTS["phi3 longrope"]
    make_checkpoint(tmp_path, family, **values)
    asked = [Asked([7 + i] * length, LONG) for i, length in enumerate((20, 26, 29, 31, 32, 33, 34))]
    asked += [replace(one, params=replace(LONG, temperature=0.8)) for one in asked]
    with load(tmp_path) as without, load(tmp_path) as llm:
        outputs = serve(without.engine, asked)
        texts = [one.prompt + out[0][0] for one, out in zip(asked, outputs, strict=True)]
        for count in (1, 2, 5):
            proposer = Scripted(foreseen(texts), num_speculative_tokens=count)
            llm.engine.scheduler.rules = without.engine.scheduler.rules
            draft_with(llm.engine, proposer)
            same(llm.engine, without.engine, asked)


def test_a_request_of_no_number_ends_alone(tmp_path: Path) -> None:
    """Logits that are not finite, at a right draft, after a wrong one, and at the step's own
    token."""
    make_checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    broken = replace(LONG, token_mask=lambda _, output: [77] if len(output) == 6 else range(20, 40))
    asked = [Asked(prompt, params) for prompt in PROMPTS for params in (LONG, broken)]
    with load(tmp_path) as without, load(tmp_path) as llm:
        expected = serve(without.engine, asked)
        assert [reason for ((_, reason),) in expected][1::2] == ["error"] * 3
        texts = [one.prompt + out[0][0] for one, out in zip(asked, expected, strict=True)]
        for draft in (foreseen(texts), foreseen(texts, 3), lambda _: [77] * 5):
            llm.engine.scheduler.rules = ()
            draft_with(llm.engine, Scripted(draft, num_speculative_tokens=5))
            same(llm.engine, without.engine, asked)
            assert all(part[1:].isfinite().all() for parts in llm.engine.kv.parts for part in parts)


@settings(max_examples=10)
@given(
    blocks=st.integers(15, 24),
    count=st.integers(1, 8),
    budget=st.integers(4, 12),
    wrong=st.integers(0, 5),
)
def test_drafts_take_what_is_left(
    folder: Path,
    plain: LLM,
    texts: list[list[int]],
    blocks: int,
    count: int,
    budget: int,
    wrong: int,
) -> None:
    """No step exceeds its budget, few blocks serve everybody, and no token changes."""
    knobs = [
        f"cache.num_blocks={blocks}",
        "model.max_model_len=48",
        f"batching.max_num_batched_tokens={budget}",
    ]
    asked = [Asked(prompt, LONG) for prompt in PROMPTS * 2]
    with load(folder, *knobs) as llm:
        proposer = Scripted(foreseen(texts, wrong), num_speculative_tokens=count)
        found = draft_with(llm.engine, proposer)
        plans: list[Any] = []
        own = llm.engine.scheduler.plan

        def planned() -> Any:
            plans.append(own())
            return plans[-1]

        llm.engine.scheduler.plan = planned  # type: ignore[method-assign]
        same(llm.engine, plain.engine, asked)
        assert all(sum(p.num_tokens for p in plan.scheduled) <= budget for plan in plans)
        assert all(p.num_drafts <= count for plan in plans for p in plan.scheduled)
        assert found.counters.num_draft_tokens > 0


def test_every_request_that_ends_is_told_of(llm: LLM) -> None:
    """Also one that was never drafted for."""
    proposer = speculator(llm.engine).proposer
    assert isinstance(proposer, Scripted)
    serve(llm.engine, [Asked(PROMPTS[0], DRAWN), Asked(PROMPTS[1], SamplingParams(max_tokens=1))])
    llm.engine.add_request("waits", PROMPTS[2], LONG)
    llm.engine.abort("waits")
    assert [request.request_id for request in proposer.ended].count("waits") == 1
    assert len({id(request) for request in proposer.ended}) == 3
    assert all(isinstance(request, Request) for request in proposer.ended)


@pytest.fixture
def drafting(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    knobs = [f"speculative.{knob}" for knob in request.param]
    with load(folder, "speculative=ngram", *knobs) as made:
        yield made


@pytest.mark.parametrize(
    ("drafting", "kind"),
    [
        ((), SameNoise),
        (("verify=rejection",), Rejection),
        (("acceptance=0.5",), GivenAcceptance),
        (("acceptance=[0.9,0.5]",), GivenAcceptance),
    ],
    indirect=["drafting"],
)
def test_verifiers(drafting: LLM, kind: type) -> None:
    found = speculator(drafting.engine)
    assert type(found.verifier) is kind
    assert found.needs_logits == (kind is Rejection)
    if isinstance(found.verifier, GivenAcceptance):
        assert found.verifier.rates in [(0.5,), (0.9, 0.5)]


@pytest.mark.parametrize(
    ("drafting", "kind"),
    [((), AdaptiveLengths), (("adaptive=false", "num_speculative_tokens=5"), FixedLengths)],
    indirect=["drafting"],
)
def test_lengths(drafting: LLM, kind: type) -> None:
    found = speculator(drafting.engine)
    assert type(found.lengths) is kind
    if isinstance(found.lengths, AdaptiveLengths):
        assert found.lengths.longest == 3
        assert 0 < found.lengths.step_ms(1) <= found.lengths.step_ms(64)
        assert found.lengths.draft_ms(64) == 0.0  # a look-up
    # measuring has left nothing behind
    assert drafting.engine.cache.pool.num_used == 0
    drafting.engine.cache.pool.check_integrity([])


@pytest.mark.parametrize("drafting", [()], indirect=True)
def test_drafts_of_a_failed_step_are_withdrawn_before_any_other_rule_looks(drafting: LLM) -> None:
    assert drafting.engine.scheduler.rules[0] is speculator(drafting.engine)
    assert drafting.engine.launcher.speculation is speculator(drafting.engine)


def test_no_draft_reaches_the_length_of_another_rotation(tmp_path: Path) -> None:
    """32 tokens have the short rotations, and from 33 on all have the long ones."""
    family, values = VARIANTS["phi3 longrope"]
    make_checkpoint(tmp_path, family, **values)
    seen: set[int] = set()
    with load(tmp_path, "speculative=ngram", "speculative.adaptive=false") as llm:
        engine = llm.engine
        plan = engine.scheduler.plan

        def planned():  # type: ignore[no-untyped-def]
            made = plan()
            seen.update(
                part.seq_len
                for part in made.scheduled
                if part.num_drafts and part.request.num_rotated_tokens < 33
            )
            return made

        engine.scheduler.plan = planned  # type: ignore[method-assign]
        serve(engine, [Asked([7, 8] * 8, GREEDY), Asked([7, 8, 9] * 9, GREEDY)])
    assert seen and max(seen) <= 32
