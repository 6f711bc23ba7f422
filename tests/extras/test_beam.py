"""Beam search: transformers' sequences and scores, whatever the engine does to the beams on the
way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from minivllm.cache.spec import CacheLayout
from minivllm.config.compose import compose
from minivllm.engine.batching import Continuous
from minivllm.engine.events import StepTimed
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.extras.scheduling.batching import Static
from minivllm.llm import RequestOutput
from tests.engine.imaginary import Machine, hypotheses
from tests.reference import VARIANTS, make_checkpoint


def rounds(llm: LLM) -> int:
    """Rounds of beam search so far."""
    return llm.engine.launcher.extensions.joint.counters["beam_rounds"]


PROMPTS = [[5, 17, 3, 99, 42, 8], [7], [9, 4, 30] * 6]
ENDS = tuple(range(2, 128, 3))  # many, since a random model hardly ever says one of few
AMPLE = ["cache.num_blocks=200", "cache.block_size=4"]


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A checkpoint folder and its transformers model; the last family has windows and soft caps."""
    folder = tmp_path_factory.mktemp(request.param)
    family, overrides = VARIANTS[request.param]
    return folder, make_checkpoint(folder, family, seed=11, **overrides)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One checkpoint, for tests in which the family does not matter."""
    folder = tmp_path_factory.mktemp("one")
    return folder, make_checkpoint(folder, "qwen3", seed=11)


@pytest.fixture(scope="module")
def plain(qwen3: tuple[Path, Any]) -> Iterator[LLM]:
    """An LLM with ample memory."""
    with LLM(str(qwen3[0]), device="cpu", quant="fp32", overrides=AMPLE) as llm:
        yield llm


def reference(
    model: Any, prompt: list[int], params: SamplingParams, **more: Any
) -> list[tuple[list[int], float]]:
    """transformers' sequences, without what pads them, and their scores."""
    ends = [*params.stop_token_ids, *([] if params.ignore_eos else [1])]
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ends or None,
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **more,
    )
    found = []
    for sequence, score in zip(
        out.sequences[:, len(prompt) :].tolist(), out.sequences_scores, strict=True
    ):
        end = next((i + 1 for i, token in enumerate(sequence) if token in ends), len(sequence))
        found.append((sequence[:end], float(score)))
    return found


def assert_same(
    ours: RequestOutput, theirs: list[tuple[list[int], float]], penalty: float = 1.0
) -> None:
    assert [output.token_ids for output in ours.outputs] == [ids for ids, _ in theirs]
    for output, (ids, score) in zip(ours.outputs, theirs, strict=True):
        assert output.score == pytest.approx(score, abs=1e-4)
        assert output.cumulative_logprob == pytest.approx(
            score * len(ids) ** penalty, rel=1e-4, abs=1e-4
        )
        assert output.finish_reason in ("stop", "length")
        assert output.finish_reason == "length" or ids[-1] in (1, *ENDS)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [
        (False, 1.0),
        (True, 1.0),
        ("never", 1.0),
        (False, 0.0),
        (True, 2.0),
        ("never", 2.0),
        (False, -0.7),
    ],
)
def test_beams_are_those_of_transformers(
    saved: tuple[Path, Any], early_stopping: Any, length_penalty: float
) -> None:
    folder, model = saved
    params = [
        SamplingParams(
            max_tokens=length,
            beam_width=width,
            n=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=stops,
        )
        for width, n, length, stops in ((4, 3, 14, ENDS), (3, 2, 7, ()), (5, 5, 1, ENDS))
    ]
    with LLM(str(folder), device="cpu", quant="fp32", overrides=AMPLE) as llm:
        for one in params:
            for prompt, ours in zip(PROMPTS, llm.generate(PROMPTS, one), strict=True):
                assert_same(ours, reference(model, prompt, one), length_penalty)
        assert llm.engine.cache.pool.num_used == 0


def test_the_knobs_of_the_search_change_its_outcome(plain: LLM) -> None:
    """What the comparison above compares is not always the same."""

    def search(**knobs: Any) -> tuple[list[list[int]], int]:
        params = SamplingParams(max_tokens=14, beam_width=4, n=4, stop_token_ids=ENDS, **knobs)
        before = rounds(plain)
        outputs = plain.generate([PROMPTS[2]], params)[0].outputs
        return [output.token_ids for output in outputs], rounds(plain) - before

    some = [
        search(),
        search(early_stopping=True),
        search(early_stopping="never"),
        search(length_penalty=-0.7),
        search(length_penalty=2.0),
        search(length_penalty=2.0, early_stopping="never"),
    ]
    assert len({str(outputs) for outputs, _ in some}) == 6
    assert len({len(ids) for ids in some[0][0]}) > 1
    assert some[1][1] < some[0][1] < some[2][1] == 14


@pytest.mark.parametrize(
    ("knobs", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"logit_bias": {7: 3.0, 127: -9.0}}, {"sequence_bias": {(7,): 3.0, (127,): -9.0}}),
        ({"min_tokens": 6}, {"min_new_tokens": 6}),
        (
            {"allowed_token_ids": tuple(range(40))},
            {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(40))},
        ),
    ],
    ids=lambda given: next(iter(given)),
)
def test_bias_penalties_and_masks_act_on_beams_as_in_transformers(
    plain: LLM, qwen3: tuple[Path, Any], knobs: dict[str, Any], theirs: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=10, beam_width=3, n=3, stop_token_ids=ENDS, **knobs)
    for prompt, ours in zip(PROMPTS, plain.generate(PROMPTS, params), strict=True):
        assert_same(ours, reference(qwen3[1], prompt, params, **theirs))


def test_a_mask_may_leave_fewer_continuations_than_beams(plain: LLM) -> None:
    """Two tokens, then only the end: of four beams there are at most four different outputs, in
    every round."""
    asked: list[list[int]] = []

    def mask(prompt: list[int], output: list[int]) -> list[int]:
        asked.append(output)
        return [1] if len(output) == 2 else [10, 20]

    params = SamplingParams(
        max_tokens=8, beam_width=6, n=6, token_mask=mask, early_stopping="never"
    )
    outputs = plain.generate(PROMPTS[0], params)[0].outputs
    assert {tuple(output.token_ids) for output in outputs} == {
        (a, b, 1) for a in (10, 20) for b in (10, 20)
    }
    assert len(outputs) == 4
    assert all(set(output) <= {10, 20} for output in asked)
    assert plain.engine.cache.pool.num_used == 0


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(plain: LLM) -> None:
    forks, counters = plain.engine.scheduler.num_forks, plain.engine.cache.counters
    shared, steps = counters.blocks_shared, list[StepTimed]()
    stop = plain.engine.events.subscribe(steps.append, StepTimed)
    prompt = list(range(2, 42))
    plain.generate(prompt, SamplingParams(max_tokens=2, beam_width=4, ignore_eos=True))
    stop()
    assert max(step.num_tokens for step in steps) == len(prompt)
    assert plain.engine.scheduler.num_forks - forks >= 3
    assert counters.blocks_shared - shared >= 3 * len(prompt) // 4


SERVED = {
    "small steps": ["batching.max_num_batched_tokens=3"],
    "one beam a step": ["batching.max_num_batched_tokens=1"],
    "whole prompts": ["batching.chunked_prefill=false"],
    "few blocks": ["cache.num_blocks=18"],
    "few blocks, swapped": ["cache.num_blocks=18", "batching.preemption=swap"],
    "few blocks, reserved": ["cache.num_blocks=40", "batching.preemption=reserve"],
    "prefix": ["cache.prefix_caching=true", "cache.num_blocks=18"],
    "static": ["batching=static", "batching.max_num_seqs=9", "cache.num_blocks=18"],
    "sequential": ["batching=sequential", "cache.num_blocks=100"],
    "contiguous": ["cache=contiguous", "cache.num_sequences=5"],
    "nothing kept": ["cache=none", "batching.max_num_batched_tokens=64"],
}


@pytest.mark.parametrize("how", SERVED)
def test_beams_are_the_same_however_they_are_served(
    plain: LLM, qwen3: tuple[Path, Any], how: str
) -> None:
    searched = SamplingParams(
        max_tokens=12, beam_width=3, n=3, stop_token_ids=ENDS, early_stopping="never"
    )
    params = [searched, SamplingParams(max_tokens=12, ignore_eos=True), searched, searched]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1]]

    def outcome(llm: LLM) -> list[list[list[int]]]:
        results = llm.generate(prompts, params)
        return [[output.token_ids for output in result.outputs] for result in results]

    expected = outcome(plain)
    overrides = SERVED[how]
    paged = (
        ["cache.block_size=4"] if not any(item.startswith("cache=") for item in overrides) else []
    )
    with LLM(
        str(qwen3[0]),
        device="cpu",
        quant="fp32",
        overrides=[*overrides, *paged, "model.max_model_len=48"],
    ) as llm:
        assert outcome(llm) == expected == outcome(llm)
        assert llm.engine.scheduler.num_preemptions > 0 or "cache.num_blocks=18" not in overrides
        assert llm.engine.cache.pool.num_used == 0
        llm.engine.cache.pool.check_integrity([])
        assert llm.engine.scheduler.num_seqs == 0


def test_an_abort_ends_all_beams(plain: LLM) -> None:
    engine = plain.engine
    for steps in (0, 1, 4):
        engine.add_request(
            "x", PROMPTS[0], SamplingParams(max_tokens=12, beam_width=4, ignore_eos=True)
        )
        for _ in range(steps):
            engine.step()
        engine.abort("x")
        assert not engine.has_unfinished and engine.cache.pool.num_used == 0
        assert not engine._requests
    engine.add_request("x", PROMPTS[0], SamplingParams(max_tokens=12, beam_width=4))
    engine.step()
    engine.abort_all()
    assert not engine.has_unfinished and engine.cache.pool.num_used == 0


def test_a_missed_deadline_ends_all_beams() -> None:
    machine = Machine(Continuous(8, shed=True), CacheLayout(4, 33))
    late = machine.add([1, 2], 8, 3, beam_width=3, deadline_ms=2.5)
    other = machine.add([1, 2], 8)
    machine.run()
    assert {beam.finish_reason for beam in late.joint_members} == {"shed"}
    assert machine.scheduler.num_shed == 1 and other.finish_reason == "length"
    assert machine.scheduler.num_seqs == 0
    machine.check()


def test_a_group_of_beams_is_preempted_and_comes_back_as_one() -> None:
    """It shares again what it shared: a search that fits alone never fails for want of blocks."""
    machine = Machine(Continuous(8, 64, watermark=0), CacheLayout(2, 14))
    urgent = machine.add([1, 2, 0], 9, priority=-1)
    search = machine.add_beams([2] * 7, 5, 3)
    groups = []
    while machine.scheduler.has_unfinished:
        plan = machine.scheduler.plan()
        groups += [one.request for one in plan.preempted if one.request.is_joint]
        machine.carry_out(plan)
        machine.check()
    assert groups and set(groups) == {search}
    assert urgent.num_preemptions == 0
    assert hypotheses(search) == machine.run_alone([2] * 7, 5, 3)


def test_a_batch_reserves_blocks_for_those_that_have_to_wait_for_tokens() -> None:
    machine = Machine(Static(3, 3, preemption="reserve", watermark=0), CacheLayout(1, 8))
    machine.add([0] * 6, 2)
    machine.add([0], 2)
    machine.run()
    assert machine.scheduler.num_preemptions == 0


def test_what_can_never_fit_is_refused_at_once(qwen3: tuple[Path, Any]) -> None:
    params = SamplingParams(max_tokens=8, beam_width=4)
    for overrides, complaint in (
        (
            ["cache.num_blocks=8", "cache.block_size=4"],
            r"10 cache blocks for its 4 beams, and there are 8",
        ),
        (
            ["batching.max_num_seqs=3"],
            r": beam_width=4 samples .* batching\.max_num_seqs=3",
        ),
        (["cache=contiguous", "cache.num_sequences=3"], r"cache.num_sequences"),
    ):
        with (
            LLM(str(qwen3[0]), device="cpu", quant="fp32", overrides=overrides) as llm,
            pytest.raises(BadInput, match=complaint),
        ):
            llm.generate(list(range(2, 11)), params)


def test_streams_refuse_beams(plain: LLM) -> None:
    with pytest.raises(BadInput, match=r"cannot be streamed: decoding\.beam_width must be 1"):
        plain.stream([5], SamplingParams(beam_width=2))
    with pytest.raises(BadInput, match=r"allowed_token_ids must be in \[0, 128\)"):
        plain.generate([5], SamplingParams(allowed_token_ids=(128,)))
    with pytest.raises(BadInput, match=r"logit_bias must be in \[0, 128\)"):
        plain.generate([5], SamplingParams(logit_bias={-1: 1.0}))


def test_the_harness_gets_the_best_beam_at_the_end(plain: LLM, qwen3: tuple[Path, Any]) -> None:
    params = SamplingParams(max_tokens=6, beam_width=3, n=2, ignore_eos=True)
    best = plain.generate(PROMPTS[0], params)[0].outputs[0]
    config = compose(
        ["model=hf", f"model.path={qwen3[0]}", "quant=fp32", "decoding=beam", "runtime.device=cpu"]
    )
    engine = MinivllmEngine(config)
    engine.submit("r", PROMPTS[0], params)
    polls = []
    while not polls or not polls[-1]:
        polls.append(engine.poll())
    assert [token for output in polls[-1] for token in output.token_ids] == best.token_ids
    assert [output.finish_reason for output in polls[-1]] == [None] * 5 + ["length"]
    assert polls[-1][0].started_s is not None
    live = engine.liveness()
    assert live["decoding"]["beam_rounds"] == 6 and live["batching"]["forks"] >= 2
    engine.reset()
    assert engine.liveness()["decoding"]["beam_rounds"] == 0
    config["decoding"] |= {"beam_width": 1, "n": 2}
    with pytest.raises(BadInput, match="one completion a request"):
        MinivllmEngine(config)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_eviction_and_preemption_of_beams(qwen3: tuple[Path, Any], preemption: str) -> None:
    knobs = [
        "cache.eviction=streaming",
        "cache.eviction_budget=24",
        "cache.eviction_sinks=4",
        "cache.eviction_window=8",
    ]
    params = SamplingParams(max_tokens=60, beam_width=3, ignore_eos=True)
    said, preempted = [], []
    for blocks in (200, 24):
        sizes = [
            "cache.block_size=4",
            f"cache.num_blocks={blocks}",
            f"batching.preemption={preemption}",
        ]
        with LLM(str(qwen3[0]), device="cpu", quant="fp32", overrides=[*sizes, *knobs]) as llm:
            said.append(
                [
                    out.outputs[0].token_ids
                    for out in llm.generate([[5 + i, 6, 7] for i in range(5)], params)
                ]
            )
            preempted.append(llm.engine.scheduler.num_preemptions)
    assert said[0] == said[1]
    assert preempted[0] == 0 < preempted[1]
