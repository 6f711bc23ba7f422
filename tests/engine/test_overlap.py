"""Steps that are launched before the tokens of the one before are known: the same tokens as one step after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request, RequestState
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
    "few blocks, chunks, swap": [*FEW, "batching.preemption=swap", "batching.max_num_batched_tokens=6"],
    "reserve": [*FEW, "cache.num_blocks=26", "batching.preemption=reserve"],
    "contiguous": ["cache=contiguous"],
    "no cache": ["cache=none"],
    "streaming": ["cache.eviction=streaming", "cache.eviction_budget=16", "cache.block_size=4", "attention=eager"],
    "heavy hitters": ["cache.eviction=h2o", "cache.eviction_budget=16", "cache.block_size=4", "attention=eager"],
    "offload": [*FEW, "cache.prefix_caching=true", "cache.offload_gb=1e-4"],
}  # fmt: skip
STOPS = tuple(range(2, 14))  # with a high temperature most requests end before their length
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=14, temperature=2.0, stop_token_ids=STOPS)
KINDS = [
    GREEDY,
    SamplingParams(max_tokens=1),
    DRAWN,
    replace(DRAWN, max_tokens=20, top_p=0.9),
    replace(DRAWN, min_tokens=4),
    replace(DRAWN, repetition_penalty=1.4),
    replace(DRAWN, logprobs=1),
    replace(DRAWN, n=2),
    replace(DRAWN, prompt_logprobs=1, max_tokens=4),
    SamplingParams(max_tokens=6, beam_width=2),
    replace(DRAWN, token_mask=lambda _, output: range(len(output), 120)),
]


@dataclass(frozen=True)
class Asked:
    """A request, the step before which it comes, and the number of tokens after which it is aborted, if it is."""

    prompt: list[int]
    params: SamplingParams
    comes: int = 0
    aborted: int | None = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
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
            str(folder), quant="fp32", device="cpu", overrides=[*groups, *knobs, f"runtime.overlap={overlap}"]
        )
        for overlap in ("false", "true")
    ]
    yield made[0].engine, made[1].engine
    for llm in made:
        llm.close()


def check(engine: Engine) -> None:
    requests = [*engine.scheduler.running, *engine.scheduler.waiting]
    engine.cache.pool.check_integrity(request.block_table for request in requests)
    for request in requests:
        assert all(token >= 0 for token in request.token_ids[:-1])
    if engine.cache.prefix is not None:
        for node in engine.cache.prefix.by_block.values():
            assert all(token >= 0 for token in node.tokens)  # type: ignore[attr-defined]


def serve(engine: Engine, asked: list[Asked]) -> list[list[tuple[list[int], str | None]]]:
    """Tokens and finish reason of each sample of each request, with the cache checked after every step."""
    made: list[list[Request]] = [[] for _ in asked]
    got: dict[Request, tuple[list[int], list[str | None]]] = {}
    step = 0
    while engine.has_unfinished or not all(made):
        for index, one in enumerate(asked):
            if one.comes <= step and not made[index]:
                # Noise goes by the seed, which must not depend on the order of coming.
                params = replace(one.params, seed=index)
                first = engine.add_request(f"{index}", one.prompt, params, detokenize=False)
                made[index] = [first] if first.fellows else [first, *first.siblings]
                got.update((request, ([], [])) for request in made[index])
        for output in engine.step():
            tokens, reasons = got[output.request]
            if output.token_id is not None:
                tokens.append(output.token_id)
            reasons.append(output.finish_reason)
        check(engine)
        for one, requests in zip(asked, made, strict=True):
            for request in requests:
                if one.aborted is not None and len(got[request][0]) >= one.aborted:
                    engine.abort(request.request_id)
                    check(engine)
        step += 1
    for requests in made:
        for request in requests:
            assert request.state is RequestState.DONE
            assert all(token >= 0 for token in request.token_ids), "a placeholder is left over"
    assert engine.cache.pool.num_used == 0
    return [
        [(got[request][0], got[request][1][-1] if got[request][1] else None) for request in requests]
        for requests in made
    ]


@st.composite
def traffic(draw: st.DrawFn) -> list[Asked]:
    shared = draw(st.lists(st.integers(2, 120), min_size=9, max_size=9))
    asked = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(2, 120), min_size=1, max_size=12))
        prompt = shared[: draw(st.sampled_from([0, 0, 8, 9]))] + own
        params = draw(st.sampled_from(KINDS))
        aborted = None if params.n + params.beam_width > 2 else draw(st.sampled_from([None, None, 0, 1, 3]))
        asked.append(Asked(prompt, params, draw(st.integers(0, 6)), aborted))
    return asked


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


def test_every_configuration_overlaps_and_throws_away_little(engines: tuple[Engine, Engine]) -> None:
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
    if overlapping.cache.layout.keeps:
        assert wasted <= stopped
    assert wasted == 0 if scored else wasted > 0


def test_a_stop_string_ends_the_output_where_it_did() -> None:
    params = SamplingParams(max_tokens=60, stop=("e ", "n("), ignore_eos=True)
    results = []
    for overlap in ("false", "true"):
        with LLM("tiny", quant="fp32", device="cpu", overrides=[f"runtime.overlap={overlap}"]) as llm:
            [one] = llm.generate("def main():", params)
            results.append((one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].finish_reason))
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
        engine.add_request("wrong", [9], SamplingParams(allowed_token_ids=(3,), token_mask=lambda *_: [4]))
        with pytest.raises(Exception, match="allow no token"):
            engine.step()
        engine.abort("wrong")
        while engine.has_unfinished:
            outputs += engine.step()
        assert [output.token_id for output in outputs if output.request is first] == expected[0][0]
