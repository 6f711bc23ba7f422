"""The engine against transformers, and every knob off against on (ladder 1 to 3 of the design)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from minivllm.extras.speculative.speculation import Speculator
from minivllm.platform.progress_bar import ProgressBar
from tests.reference import PROMPTS, make_checkpoint

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint folder and its transformers model, for each family."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, request.param, initializer_range=0.2)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, for tests in which the family does not matter."""
    folder = tmp_path_factory.mktemp("one")
    make_checkpoint(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def plain(qwen3: Path) -> Iterator[LLM]:
    """An LLM with ample memory."""
    with LLM(str(qwen3), quant="fp32", overrides=["cache.num_blocks=200"]) as llm:
        yield llm


def test_an_option_may_take_a_value_of_a_whole_run(qwen3: Path, plain: LLM, tmp_path: Path) -> None:
    """The groups of a run are there where they are named, and only there."""
    (tmp_path / "decoding").mkdir()
    target = "_target_: minivllm.engine.options.SamplingParams"
    (tmp_path / "decoding" / "mine.yaml").write_text(f"{target}\nseed: ${{measure.seed}}\n")
    small = ["cache.num_blocks=8", "quant=fp32"]
    for given in (
        {"decoding": "mine", "config_dir": tmp_path, "overrides": small},
        {"overrides": [*small, "decoding.seed=${measure.seed}"]},
    ):
        with LLM(str(qwen3), **cast(Any, given)) as llm:
            assert llm.default_params.seed == 0 and "measure" in llm.config["choices"]
    assert "measure" not in plain.config["choices"]
    with pytest.raises(BadInput, match=r"measure\.sed"):
        LLM(str(qwen3), overrides=["decoding.seed=${measure.sed}"])


def tokens(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Generated ids of each prompt."""
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy continuation, past any end-of-sequence token."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def assert_equal_but_for_near_ties(model: Any, prompt: list[int], ours: list[int]) -> None:
    """Against a bf16 transformers model: the first other token must have been as good, up to
    rounding."""
    theirs = reference_tokens(model, prompt, len(ours))
    parting = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if parting is None:
        return
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours[:parting]])).logits[0, -1].float()
    gap = float(logits[theirs[parting]] - logits[ours[parting]])
    # bf16 keeps 8 bits; the error of a logit adds up over the layers' sums.
    assert abs(gap) <= 8 * 2**-8 * float(logits.abs().max()), (parting, gap)


def test_speculation_gives_the_same_outputs_in_fewer_steps(plain: LLM, qwen3: Path) -> None:
    repeating = [[5, 6, 7, 8] * 6, [9, 3] * 8]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    knobs = [
        "cache.num_blocks=200",
        "speculative.adaptive=false",
        "speculative.prompt_lookup_min=1",
    ]
    with LLM(str(qwen3), quant="fp32", speculative="ngram", overrides=knobs) as llm:
        speculator = llm.engine.launcher.speculation
        assert isinstance(speculator, Speculator)
        assert tokens(llm, repeating, params) == tokens(plain, repeating, params)
        assert speculator.counters.num_accepted_tokens > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_logits_equal_transformers(saved: tuple[Path, Any], attention: str, cache: str) -> None:
    folder, model = saved
    ids = PROMPTS[0] + PROMPTS[3]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    overrides = ["batching.max_num_batched_tokens=16"]  # through several chunks
    with LLM(
        str(folder), quant="fp32", attention=attention, cache=cache, overrides=overrides
    ) as llm:
        torch.testing.assert_close(llm.logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_greedy_tokens_equal_transformers(saved: tuple[Path, Any], attention: str) -> None:
    folder, model = saved
    expected = [reference_tokens(model, prompt, 24) for prompt in PROMPTS]
    with LLM(
        str(folder), quant="fp32", attention=attention, overrides=["cache.num_blocks=200"]
    ) as llm:
        assert tokens(llm, PROMPTS, GREEDY) == expected


def test_bf16_tokens_differ_from_transformers_only_at_near_ties(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    with LLM(str(folder), overrides=["cache.num_blocks=200"]) as llm:
        for prompt, ours in zip(PROMPTS, tokens(llm, PROMPTS, GREEDY), strict=True):
            assert_equal_but_for_near_ties(half, prompt, ours)


POLICIES: list[list[str]] = [
    ["batching=continuous"],
    ["batching=continuous", "batching.max_num_batched_tokens=8"],
    ["batching=continuous", "batching.max_num_seqs=2"],
    ["batching=continuous", "batching.chunked_prefill=false"],
    ["batching=sequential"],
    ["batching=sequential", "batching.max_num_batched_tokens=5"],
]
CACHES: list[list[str]] = [
    ["cache=paged", "cache.num_blocks=200"],
    ["cache=paged", "cache.num_blocks=200", "cache.block_size=1"],
    ["cache=paged", "cache.num_blocks=25", "cache.block_size=3"],  # ends in preemption
    ["cache=contiguous", "cache.num_sequences=2"],
]


SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
KINDS = [GREEDY, SAMPLED, GREEDY, SAMPLED, SAMPLED]


@pytest.fixture(scope="module")
def alone(plain: LLM) -> list[list[int]]:
    """Ids of each of PROMPTS by itself, one of KINDS each."""
    return [tokens(plain, [prompt], one)[0] for prompt, one in zip(PROMPTS, KINDS, strict=True)]


@pytest.mark.parametrize(
    ("policy", "cache"),
    list(itertools.product(POLICIES, CACHES)),
    ids=lambda overrides: " ".join(overrides),
)
def test_batching_and_cache_change_no_token(
    alone: list[list[int]], qwen3: Path, policy: list[str], cache: list[str]
) -> None:
    with LLM(str(qwen3), quant="fp32", overrides=[*policy, *cache]) as llm:
        assert tokens(llm, PROMPTS, KINDS) == alone
        assert tokens(llm, PROMPTS[::-1], KINDS[::-1]) == alone[::-1]
        if "cache.num_blocks=25" in cache and policy == POLICIES[0]:
            assert llm.engine.scheduler.num_preemptions > 0
        assert llm.engine.cache.pool.num_used == 0


def test_two_runs_sample_alike_and_seeds_matter(qwen3: Path) -> None:
    def run(seed: int | None) -> list[list[int]]:
        with LLM(str(qwen3), quant="fp32") as llm:
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)
            return tokens(llm, [[5], [5]], params)

    first = run(None)
    assert first == run(None)
    assert first[0] != first[1], "requests without a seed must not share one"
    fixed = run(3)
    assert fixed[0] == fixed[1]
    assert fixed != run(4)


def test_parallel_samples_and_stream_agree_with_generate(plain: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=3, ignore_eos=True)
    output = plain.generate([[5, 6]], params)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    one = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    pieces = list(plain.stream([5, 6], one))
    assert [p.token_id for p in pieces] == output.outputs[0].token_ids
    assert [p.finish_reason for p in pieces] == [None] * 7 + ["length"]


FORMS = {
    "list": [5, 6, 7],
    "tuple": (5, 6, 7),
    "range": range(5, 8),
    "torch": torch.tensor([5, 6, 7]),
    "numpy": np.array([5, 6, 7], dtype=np.int32),
    "dictionary": {"prompt_token_ids": [5, 6, 7]},
    "dictionary of a tensor": {"prompt_token_ids": torch.tensor([5, 6, 7])},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_of_ids_has_several_forms(plain: LLM, form: str) -> None:
    prompt: Any = FORMS[form]
    params = SamplingParams(max_tokens=3, ignore_eos=True, stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    [expected] = tokens(plain, [[5, 6, 7]], params)
    (alone,) = plain.generate(prompt, params)
    assert alone.prompt_token_ids == [5, 6, 7] and alone.outputs[0].token_ids == expected
    assert tokens(plain, [prompt, [5, 6, 7]], params) == [expected, expected]
    assert [piece.token_id for piece in plain.stream(prompt, params)] == expected
    assert torch.equal(plain.logits(prompt), plain.logits([5, 6, 7]))


def test_a_matrix_of_ids_is_a_batch(plain: LLM) -> None:
    for batch in (torch.tensor([[5, 6], [7, 8]]), np.array([[5, 6], [7, 8]])):
        assert [one.prompt_token_ids for one in plain.generate(batch, GREEDY)] == [[5, 6], [7, 8]]  # type: ignore[arg-type]
    assert plain.generate([]) == []


@pytest.mark.parametrize(
    "wrong", [None, 5, b"text", [5.0], [None], torch.tensor(5), {"text": "x"}, [[[5]]], 1.5]
)
def test_what_is_no_prompt_is_refused_in_one_line(plain: LLM, wrong: Any) -> None:
    with pytest.raises(BadInput, match="prompt"):
        plain.generate(wrong, GREEDY)
    assert not plain.engine.has_unfinished


def test_a_model_s_name_that_is_nearly_one_is_told() -> None:
    with pytest.raises(
        BadInput, match=r"model\.path=tinny is no local folder.*; did you mean tiny\?"
    ):
        LLM("tinny")
    with pytest.raises(BadInput, match=r"model\.path=x+"):
        LLM("x" * 300)
    with pytest.raises(BadInput, match="did you mean attention"):
        LLM(attenton="sdpa")


def test_conversations_are_answered_by_the_chat_template(plain: LLM) -> None:
    conversation = [{"role": "user", "content": "ab"}]
    with LLM("tiny", device="cpu") as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}{{ "
            "add_generation_prompt }}"
        )
        params = SamplingParams(max_tokens=3)
        (one,) = llm.chat(conversation, params)
        assert one.prompt == "abTrue" and one.prompt_token_ids == llm.tokenizer.encode(
            "abTrue", False
        )
        assert (
            one.outputs[0].token_ids
            == llm.generate([one.prompt_token_ids], params)[0].outputs[0].token_ids
        )
        both = llm.chat(
            [conversation, conversation * 2],
            [params, params],
            add_generation_prompt=False,
            chat_template_kwargs={"extra": "!"},
        )
        assert [output.prompt for output in both] == ["ab!False", "abab!False"]
        (own,) = llm.chat(
            conversation, params, chat_template_kwargs={"add_generation_prompt": False}
        )
        assert own.prompt == "abFalse"
        for kwargs in ({"messages": []}, {1: 2}):
            with pytest.raises(BadInput, match="must have names of variables"):
                llm.chat(conversation, params, chat_template_kwargs=kwargs)  # type: ignore[arg-type]
        for wrong in ([], "ab", [[]], ["ab"], [conversation, "ab"], {"role": "user"}):
            with pytest.raises(BadInput, match="is no conversation"):
                llm.chat(wrong, params)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="has no tokenizer"):
        plain.chat(conversation)


def test_one_seed_for_several_prompts_is_told_once(qwen3: Path) -> None:
    drawn = SamplingParams(max_tokens=3, temperature=1.0, seed=3)
    with (
        LLM(str(qwen3), quant="fp32", overrides=["cache.num_blocks=50"]) as llm,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        llm.generate([[5], [6]], replace(drawn, seed=None))
        llm.generate([[5], [6]], [drawn, replace(drawn, seed=4)])
        llm.generate([[5], [6]], SamplingParams(max_tokens=3, seed=3))
        assert not told
        llm.generate([[5], [6]], drawn)
        llm.generate([[5], [6]], drawn)
    assert ["draw with the same noise" in str(warning.message) for warning in told] == [True]
    assert told[0].filename == __file__, "the line of the caller is shown"


def test_samples_of_neighbouring_seeds_are_others(plain: LLM) -> None:
    """The second sample of seed 1 is not the first one of seed 2."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=2, ignore_eos=True)
    first, second = plain.generate([[5, 6]], [params])[0].outputs
    assert [first.token_ids] == tokens(plain, [[5, 6]], replace(params, n=1))
    assert [second.token_ids] != tokens(plain, [[5, 6]], replace(params, n=1, seed=2))


def test_calls_and_outputs_have_the_names_of_vllm(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[int, int]] = []

    class Bar(ProgressBar):
        def __call__(self, done: int, total: int) -> None:
            bars.append((done, total))

    monkeypatch.setattr("minivllm.llm.ProgressBar", Bar)
    overrides = ["cache.num_blocks=50", "cache.prefix_caching=true"]
    with LLM(str(qwen3), quant="fp32", device="cpu", overrides=overrides) as llm:
        bars.clear()
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        prompts = [list(range(1, 41)), [5]]
        first = llm.generate(prompts=prompts, sampling_params=params)
        assert set(bars) == {(0, 2), (2, 2)}
        bars.clear()
        again = llm.generate(prompts=prompts, sampling_params=params, use_tqdm=False)
        assert not bars
        stream = llm.stream(prompt=prompts[1], sampling_params=params)
        assert [piece.token_id for piece in stream] == again[1].outputs[0].token_ids
    outputs = [*first, *again]
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 4
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 32, 0]


def test_closing_a_stream_frees_its_blocks(plain: LLM) -> None:
    stream = plain.stream([5, 6], GREEDY)
    next(stream)
    assert plain.engine.cache.pool.num_used > 0
    stream.close()
    assert plain.engine.cache.pool.num_used == 0
    assert not plain.engine.has_unfinished


def test_a_wrong_prompt_of_several_is_named_by_its_place(plain: LLM) -> None:
    with pytest.raises(BadInput, match=r"^prompts\[1\]: .* empty prompt"):
        plain.generate([[1, 2], [], [3]])
    with pytest.raises(BadInput, match=r"^request \S+ has an empty prompt"):
        plain.generate([[]])
    assert not plain.engine.has_unfinished


def test_a_stream_that_is_never_read_leaves_nothing(plain: LLM) -> None:
    pieces = plain.stream([1, 2, 3])
    assert plain.engine.has_unfinished
    del pieces
    assert not plain.engine.has_unfinished and not plain._requests.uncollected
    with pytest.raises(BadInput, match="empty prompt"):
        plain.stream([])


@pytest.mark.parametrize("beam_width", [1, 2])
def test_what_a_mask_raises_ends_its_own_request_alone(plain: LLM, beam_width: int) -> None:
    def mask(prompt: Sequence[int], output: Sequence[int]) -> range:
        if len(output) == 2:
            raise ZeroDivisionError("mine")
        return range(100)

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    expected = plain.generate([[4, 5, 6]], params)[0].outputs[0].token_ids
    good = plain.stream([4, 5, 6], params)
    first = next(good).token_id
    with pytest.raises(ZeroDivisionError, match="mine"):
        masked = replace(params, token_mask=mask, beam_width=beam_width)
        plain.generate([[7, 8]], masked, on_error="raise")
    assert [first, *(piece.token_id for piece in good)] == expected
    if beam_width == 1:
        with pytest.raises(ZeroDivisionError, match="mine"):
            list(plain.stream([7, 8], replace(params, token_mask=mask)))
    assert not plain.engine.has_unfinished and not plain.engine.cache.pool.num_used


def test_one_failure_leaves_the_answers_of_its_call(plain: LLM) -> None:
    def mask(prompt: Sequence[int], output: Sequence[int]) -> range:
        if len(output) == 2:
            raise ZeroDivisionError("mine")
        return range(100)

    good = SamplingParams(max_tokens=5, ignore_eos=True)
    bad = replace(good, token_mask=mask)
    params = [good, bad, replace(bad, n=2), replace(bad, beam_width=2), good]
    prompts = [[4, 5, 6], [7, 8], [8, 7], [9, 8], [6, 5, 4]]
    expected = plain.generate([prompts[0], prompts[-1]], good)
    with pytest.warns(UserWarning, match="4 of 6 completions .* of prompt 1: mine"):
        results = plain.generate(prompts, params)
    found = [[(o.finish_reason, len(o.token_ids)) for o in result.outputs] for result in results]
    end, wrong = [("length", 5)], ("error", 2)
    assert found == [end, [wrong], [wrong] * 2, [("error", 0)], end]
    assert all(isinstance(o.error, ZeroDivisionError) for r in results[1:4] for o in r.outputs)
    assert [results[0].outputs, results[-1].outputs] == [result.outputs for result in expected]
    asked: list[int] = []

    def late(prompt: Sequence[int], output: Sequence[int]) -> range:
        asked.append(len(output))
        return range(100)

    with pytest.raises(ZeroDivisionError, match="mine"):
        plain.generate(prompts[:2], [replace(good, token_mask=late), bad], on_error="raise")
    assert max(asked) == 4, "it was raised before the other prompt was done"
    with pytest.raises(BadInput, match="on_error='ignore' must be one of return, raise"):
        plain.generate([[4]], good, on_error="ignore")  # type: ignore[arg-type]
    assert not plain.engine.has_unfinished and not plain.engine.cache.pool.num_used


def test_samples_that_have_not_started_end_with_all(plain: LLM) -> None:
    engine = plain.engine
    engine.add_request("a", [1, 2, 4], SamplingParams(max_tokens=4, n=3))
    engine.abort_all()
    assert not engine.has_unfinished and not engine._requests


def test_a_sample_never_takes_the_id_of_a_request(plain: LLM) -> None:
    engine = plain.engine
    engine.add_request("a.1", [1], SamplingParams(max_tokens=4))
    with pytest.raises(BadInput, match="is being served, and a sample of a would"):
        engine.add_request("a", [1], SamplingParams(max_tokens=4, n=2))
    assert list(engine._requests) == ["a.1"]
    engine.abort_all()


def test_streams_and_batches_may_interleave(plain: LLM) -> None:
    alone = [[p.token_id for p in plain.stream([token], GREEDY)] for token in (5, 6)]
    first, second = plain.stream([5], GREEDY), plain.stream([6], GREEDY)
    head = next(first).token_id
    assert [p.token_id for p in second] == alone[1]
    assert tokens(plain, [[7]], GREEDY) == tokens(plain, [[7]], GREEDY)
    assert [head, *(p.token_id for p in first)] == alone[0]
    with pytest.raises(BadInput, match=r"decoding\.n must be 1"):
        plain.stream([5], SamplingParams(n=2))


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_step_that_is_interrupted_leaves_nobody_waiting(
    qwen3: Path, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["cache.num_blocks=40", f"runtime.overlap={overlap}"]
    with LLM(str(qwen3), quant="fp32", device="cpu", overrides=overrides) as llm:
        alone = [piece.token_id for piece in llm.stream([6], GREEDY)]
        first, second = llm.stream([5], GREEDY), llm.stream([6], GREEDY)
        heads = [next(second).token_id]
        next(first)
        land = llm.engine._accept_tokens

        def interrupted(*arguments: Any) -> Any:
            monkeypatch.setattr(llm.engine, "_accept_tokens", land)
            raise KeyboardInterrupt

        monkeypatch.setattr(llm.engine, "_accept_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(first)
        rest = list(second)
        assert rest[-1].finish_reason == "abort" and rest[-1].token_id is None
        heads += [piece.token_id for piece in rest[:-1]]
        assert heads == alone[: len(heads)] and len(heads) < len(alone)
        assert llm.engine.cache.pool.num_used == 0
        assert [piece.token_id for piece in llm.stream([6], GREEDY)] == alone


def test_logprobs_and_prompt_logprobs_are_those_of_logits(plain: LLM) -> None:
    prompt = PROMPTS[0]
    params = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    with_neighbour = plain.generate([prompt, [5]], [params, GREEDY])[0]
    ids = prompt + with_neighbour.outputs[0].token_ids
    expected = torch.log_softmax(plain.logits(ids), dim=-1)
    assert with_neighbour.prompt_logprobs is not None
    assert len(with_neighbour.prompt_logprobs) == len(prompt) - 1
    for position, entry in enumerate(with_neighbour.prompt_logprobs):
        assert entry[prompt[position + 1]] == pytest.approx(
            float(expected[position, prompt[position + 1]]), abs=1e-4
        )
    logprobs = with_neighbour.outputs[0].logprobs
    assert logprobs is not None
    for step, entry in enumerate(logprobs):
        row = expected[len(prompt) + step - 1]
        assert entry[ids[len(prompt) + step]] == pytest.approx(float(row.max()), abs=1e-4)
        assert len(entry) == 2


def test_generation_ends_at_stop_tokens_and_the_end_of_the_context(plain: LLM) -> None:
    free = tokens(plain, [[5]], GREEDY)[0]
    stop = free[3]
    first = free.index(stop)
    stopped = plain.generate(
        [[5]], SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
    )[0]
    assert stopped.outputs[0].token_ids == free[: first + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    long = plain.generate([[5] * 250], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(long.outputs[0].token_ids) == plain.engine.max_model_len - 250
    assert long.outputs[0].finish_reason == "length"


def test_one_prompt_is_not_a_batch(plain: LLM) -> None:
    assert (
        tokens(plain, [[5, 6]], GREEDY)[0] == plain.generate([5, 6], GREEDY)[0].outputs[0].token_ids
    )
    assert plain.generate([], GREEDY) == []
    assert tokens(plain, np.array([5, 6]), GREEDY) == tokens(plain, [[5, 6]], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params", "complaint"),
    [
        ([[]], GREEDY, "empty prompt"),
        ([[5] * 256], GREEDY, "raise model.max_model_len if it is below the model's own"),
        ([[128]], GREEDY, r"must be in \[0, 128\)"),
        ([[1.5, 2.5]], GREEDY, "must be whole numbers"),
        (["text"], GREEDY, "no tokenizer"),
        ([[5]], SamplingParams(stop=("x",)), "use stop_token_ids"),
        ([[5]], SamplingParams(stop_token_ids=(999_999,)), r"stop_token_ids must be in \[0, 128\)"),
        ([[5], [6]], [GREEDY], "2 prompts and 1 SamplingParams"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    plain: LLM, prompts: list[Any], params: Any, complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint):
        plain.generate([[5], *prompts] if not isinstance(params, list) else prompts, params)
    assert not plain.engine.has_unfinished
    assert plain.engine.cache.pool.num_used == 0


def test_a_closed_one_says_so(qwen3: Path) -> None:
    llm = LLM(str(qwen3), device="cpu")
    stream = llm.stream([1, 2])
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate([[1]]),
        lambda: llm.stream([1]),
        lambda: llm.logits([1]),
        lambda: list(stream),
    ):
        with pytest.raises(BadInput, match="this LLM is closed"):
            use()


def test_a_request_larger_than_the_cache_is_refused_at_once(qwen3: Path) -> None:
    with (
        LLM(str(qwen3), quant="fp32", overrides=["cache.num_blocks=3"]) as llm,
        pytest.raises(BadInput, match=r"KV cache holds 48: .*cache.num_blocks"),
    ):
        llm.generate([[5] * 40], SamplingParams(max_tokens=30))
    with pytest.raises(BadInput, match=r"lower model\.max_model_len"):
        LLM(str(qwen3), cache="contiguous", overrides=["cache.memory_fraction=1e-9"])


def test_logits_refuses_what_it_cannot_do(plain: LLM) -> None:
    with pytest.raises(BadInput, match="give 1 to 256"):
        plain.logits([5] * 257)
    with pytest.raises(BadInput, match="must be in"):
        plain.logits([999_999])
    stream = plain.stream([5, 6], GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="finish or abort"):
        plain.logits([5])
    stream.close()


def test_weights_that_a_host_cannot_hold_are_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.fit.free_memory", lambda device: 24e9)
    with pytest.raises(
        BadInput, match=r"the weights take about 61 GB, and this machine has 24 GB free"
    ):
        LLM("qwen3_30b_a3b", device="cpu", overrides=["model.weights=random"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 3}}, "speculative="),
        ({"speculative_config": {"model": "/a b/c", "x": [1, "a=b", None]}}, "speculative="),
        ({"data_parallel_size": 2}, r"parallel\.replicas"),
        ({"limit_mm_per_prompt": {"image": 1}}, ""),
        ({"allowed_media_domains": ["a.example"]}, ""),
    ],
)
def test_settings_of_other_tools_are_named_whatever_their_values(
    given: dict[str, Any], words: str
) -> None:
    (name,) = given
    with pytest.raises(BadInput, match=f"^{name}: no such group or setting.*{words}"):
        LLM("tiny", device="cpu", **given)
