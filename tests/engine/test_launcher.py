"""Steps that are launched before the tokens of the one before are known: the same tokens as one
step after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine
from tests.engine.traffic import DRAWN, GREEDY, Asked, serve, traffic
from tests.reference import make_checkpoint

FEW = ["cache.num_blocks=13", "cache.block_size=4", "model.max_model_len=48"]
CONFIGURATIONS = {
    "plain": ["cache.block_size=4"],
    "sequential": ["batching=sequential"],
    "static": ["batching=static", "batching.max_num_seqs=3"],
    "dynamic": ["batching=dynamic", "batching.max_num_seqs=3", "batching.max_wait_ms=1"],
    "prefill first": ["batching.prefill_first=true", "batching.max_num_batched_tokens=9"],
    "chunks": ["batching.max_num_batched_tokens=5", "cache.block_size=4"],
    "prefixes": ["cache.prefix_caching=true", "cache.block_size=4"],
    "few blocks": FEW,
    "few blocks, prefixes": [*FEW, "cache.prefix_caching=true"],
    "few blocks, chunks, swap": [
        *FEW,
        "batching.preemption=swap",
        "batching.max_num_batched_tokens=6",
    ],
    "reserve": [*FEW, "cache.num_blocks=26", "batching.preemption=reserve"],
    "contiguous": ["cache=contiguous"],
    "no cache": ["cache=none"],
    "streaming": [
        "cache.eviction=streaming",
        "cache.eviction_budget=16",
        "cache.block_size=4",
        "attention=eager",
    ],
    "heavy hitters": [
        "cache.eviction=h2o",
        "cache.eviction_budget=16",
        "cache.block_size=4",
        "attention=eager",
    ],
    "offload": [*FEW, "cache.prefix_caching=true", "cache.offload_gb=1e-4"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Without overlap, and with it."""
    overrides = CONFIGURATIONS[request.param]
    groups = [item for item in overrides if "." not in item.split("=")[0]]
    knobs = [item for item in overrides if item not in groups]
    if not any(item.startswith("model.") for item in overrides):
        knobs.append("model.max_model_len=96")
    made = [
        LLM(
            str(folder),
            quant="fp32",
            device="cpu",
            overrides=[*groups, *knobs, f"runtime.overlap={overlap}"],
        )
        for overlap in ("false", "true")
    ]
    yield made[0].engine, made[1].engine
    for llm in made:
        llm.close()


@settings(max_examples=25)
@given(asked=traffic())
def test_tokens_are_those_of_one_step_after_another(
    engines: tuple[Engine, Engine], asked: list[Asked]
) -> None:
    plain, overlapped = (serve(engine, asked) for engine in engines)
    for one, expected, found in zip(asked, plain, overlapped, strict=True):
        if one.aborted is None:
            assert found == expected
        else:  # the abort may come a step earlier or later
            (tokens, _), (others, _) = found[0], expected[0]
            shorter = min(len(tokens), len(others))
            assert tokens[:shorter] == others[:shorter]
    assert engines[0].overlap.steps == 0


def test_every_configuration_overlaps_and_throws_away_little(
    engines: tuple[Engine, Engine],
) -> None:
    prompts = [[(5 * i + j) % 100 + 14 for j in range(3 + i)] for i in range(6)]
    asked = [Asked(prompt, replace(DRAWN, max_tokens=20)) for prompt in prompts]
    one_by_one, overlapping = engines
    steps, wasted = overlapping.overlap.steps, overlapping.overlap.wasted_tokens
    found = serve(overlapping, asked)
    assert found == serve(one_by_one, asked)
    scored = overlapping.runner.eviction is not None
    assert (overlapping.overlap.steps > steps) == (not scored)
    stopped = sum(reason == "stop" for [(_, reason)] in found)
    assert stopped >= 3
    wasted = overlapping.overlap.wasted_tokens - wasted
    if overlapping.cache.layout.retains_kv:
        assert wasted <= stopped
    assert wasted == 0 if scored else wasted > 0


def test_a_stop_string_ends_the_output_where_it_did() -> None:
    params = SamplingParams(max_tokens=60, stop=("e ", "n("), ignore_eos=True)
    results = []
    for overlap in ("false", "true"):
        with LLM(
            "tiny", quant="fp32", device="cpu", overrides=[f"runtime.overlap={overlap}"]
        ) as llm:
            [one] = llm.generate("def main():", params)
            results.append(
                (one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].finish_reason)
            )
            streamed = "".join(piece.text for piece in llm.stream("def main():", params))
            assert streamed == one.outputs[0].text
    assert results[0] == results[1]
    assert results[0][2] == "stop"


def test_what_cannot_be_sampled_loses_no_token_of_the_others(folder: Path) -> None:
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["runtime.overlap=true"]) as llm:
        engine = llm.engine
        [expected] = serve(engine, [Asked([5, 6, 7], GREEDY)])
        first = engine.add_request("first", [5, 6, 7], GREEDY, detokenize=False)
        outputs = engine.step() + engine.step()
        wrong = engine.add_request(
            "wrong", [9], SamplingParams(allowed_token_ids=(3,), token_mask=lambda *_: [4])
        )
        while engine.has_unfinished:
            outputs += engine.step()
        assert wrong.finish_reason == "error" and "allow no token" in str(wrong.error)
        assert [output.token_id for output in outputs if output.request is first] == expected[0][0]


def test_a_step_is_read_at_once_until_the_output_may_end(folder: Path) -> None:
    """Stop tokens are masked row by row, and a GPU is waited for."""
    params = SamplingParams(max_tokens=8, min_tokens=5, temperature=1.0, seed=3)
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["runtime.overlap=true"]) as llm:
        assert llm.engine.loaded.config.eos_token_ids
        request = llm.engine.add_request("a", [5, 6, 7], params, detokenize=False)
        for count in range(1, 6):
            llm.engine.step()
            assert request.num_output_tokens == count and request.token_ids[-1] >= 0
        llm.engine.step()
        assert llm.engine.overlap.steps == 0 and request.token_ids[-1] < 0, "only now it overlaps"
        llm.engine.abort_all()
