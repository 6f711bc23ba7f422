"""engine=transformers_continuous: our engine's tokens, as they come, and no knob ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm import LLM, BadInput, SamplingParams
from minivllm.bench.workloads.arrivals import Concurrency, Offline
from minivllm.bench.workloads.synthetic import Workload
from minivllm.config.compose import build, compose
from minivllm.engines.transformers.continuous import TransformersContinuousEngine
from tests.engines.driving import requests, run

PROMPTS = [list(range(3, 40)), [9, 8, 7], list(range(60, 120, 2)), [11, 12, 13, 14, 15, 16, 17]]
LENGTHS = [12, 20, 1, 7]


def configuration(folder: Path, *overrides: str) -> dict[str, Any]:
    fixed = ("engine=transformers_continuous", "model=hf", f"model.path={folder}", "quant=fp32")
    return compose(
        [*fixed, "runtime.device=cpu", "cache.num_blocks=64", "cache.block_size=8", *overrides]
    )


class OneTokenAtATime:
    """A manager of transformers that has one token for each time that it is asked."""

    def __init__(self) -> None:
        self._results: list[SimpleNamespace | None] = []

    def add_request(self, prompt: list[int], name: str, max_new_tokens: int, **_: Any) -> None:
        """Have every token of a request ready, one result for each, and none in between."""
        for count in range(1, max_new_tokens + 1):
            self._results += [
                SimpleNamespace(
                    error=None,
                    request_id=name,
                    generated_tokens=list(range(count)),
                    is_finished=lambda ended=count == max_new_tokens: ended,
                ),
                None,
            ]

    def get_result(self, timeout: float) -> SimpleNamespace | None:
        """The next result, or that there is none yet."""
        return self._results.pop(0)

    def is_running(self) -> bool:
        """That it has not ended."""
        return True


def workload(ignore_eos: bool = True) -> Workload:
    return requests(PROMPTS, LENGTHS, ignore_eos)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["cache.num_blocks=200"]) as llm:
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in LENGTHS]
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_greedy_tokens_are_those_of_our_engine(
    engine: TransformersContinuousEngine, expected: list[list[int]]
) -> None:
    for arrival in (Offline(), Concurrency(2)):
        traces = run(engine, workload(), arrival)
        assert [trace.token_ids for trace in traces] == expected
        assert {trace.finish_reason for trace in traces} == {"length"}
    assert engine.liveness()["engine"] == {
        "requests": 8.0,
        "cuda_graphs": 0.0,
        "async_batching": 0.0,
    }
    assert engine.liveness()["cache"] == {
        "block_size": 8.0,
        "num_blocks": 64.0,
        "prefix_caching": 0.0,
    }


def test_an_older_release_is_told_in_its_own_words(
    engine: TransformersContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5.17: a page is a block there, and the name of the attention says that it is not to be
    another."""

    @dataclass
    class Settings:
        block_size: int = 256
        num_blocks: int | None = None
        max_requests_per_batch: int | None = None
        max_batch_tokens: int | None = None
        max_memory_percent: float | None = None
        allow_block_sharing: bool = True
        default_compile_level: int = 0
        use_async_batching: bool | None = None
        cuda_graph_booleans: tuple[bool, bool] = (False, False)
        seed: int | None = None

    given: list[Any] = []
    manager = SimpleNamespace(start=lambda: None, continuous_batching_config=Settings(8, 64))
    model = SimpleNamespace(
        set_attn_implementation=given.append,
        init_continuous_batching=lambda continuous_batching_config, **_: (
            given.append(continuous_batching_config) or manager
        ),
    )
    older = SimpleNamespace(
        ContinuousBatchingConfig=Settings, GenerationConfig=engine._transformers.GenerationConfig
    )
    monkeypatch.setattr(engine, "_transformers", older)
    monkeypatch.setattr(engine, "_manager", manager)
    monkeypatch.setattr(engine, "_finish_one", lambda: None)
    for name in ("sdpa", "paged|sdpa"):  # also where it has been told before
        monkeypatch.setattr(
            engine, "_loaded", SimpleNamespace(model=model, attn_implementation=name)
        )
        engine._start()
        assert engine.liveness()["attention"] == {"kernel": "sdpa"}
    assert given[0] == given[2] == "paged|sdpa" and given[1].block_size == 8
    assert engine.liveness()["cache"]["block_size"] == 8.0
    for graphs, asynchronous in (((True, False), True), ((False, False), False)):
        manager.continuous_batching_config.cuda_graph_booleans = graphs
        manager.continuous_batching_config.use_async_batching = asynchronous
        told = engine.liveness()["engine"]
        assert told["cuda_graphs"] == told["async_batching"] == float(asynchronous)


def test_tokens_are_stamped_as_they_come(
    engine: TransformersContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trace in run(engine, workload()):
        assert (
            trace.token_times == sorted(trace.token_times)
            and trace.scheduled_s < trace.token_times[0]
        )
    monkeypatch.setattr(engine, "_manager", OneTokenAtATime())
    for trace in run(engine, workload()):
        assert trace.token_times == sorted(set(trace.token_times)), "tokens came in lumps"


def test_end_of_sequence_ends_a_request_and_not_its_neighbours(
    engine: TransformersContinuousEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = expected[1][5]  # becomes an end-of-sequence token
    monkeypatch.setattr(engine.info, "eos_token_ids", (last,))
    traces = run(engine, workload(ignore_eos=False))
    assert [t.token_ids for t in traces] == [
        ids[: ids.index(last) + 1] if last in ids else ids for ids in expected
    ]
    assert traces[1].finish_reason == "stop"


def test_reset_drops_what_is_under_way(
    engine: TransformersContinuousEngine, expected: list[list[int]]
) -> None:
    engine.submit("r0", PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    assert engine.poll(60.0)
    engine.submit("waiting", PROMPTS[1], SamplingParams(max_tokens=3))
    engine.reset()
    assert engine.poll(0.0) == [] and engine.liveness()["engine"]["requests"] == 0
    assert [trace.token_ids for trace in run(engine, workload())] == expected


def test_prefixes_are_forgotten_at_reset(folder: Path, expected: list[list[int]]) -> None:
    config = configuration(folder, "cache.prefix_caching=true", "batching.max_num_seqs=2")
    engine = build(config["engine"], config=config)
    try:
        manager = engine._manager
        assert [trace.token_ids for trace in run(engine, workload())] == expected
        engine.reset()
        assert engine._manager is not manager and engine.liveness()["cache"]["prefix_caching"] == 1
        assert [trace.token_ids for trace in run(engine, workload())] == expected
    finally:
        engine.close()


def test_a_failure_within_transformers_reaches_the_driver(folder: Path) -> None:
    config = configuration(folder)
    engine = build(config["engine"], config=config)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    try:
        engine._loaded.model.forward = fail
        with pytest.raises(RuntimeError, match=r"no room|thread has ended"):
            run(engine, workload())
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quant=nf4", "quant=nf4 is not supported by engine=transformers_continuous"),
        ("batching.chunked_prefill=false", "batching.chunked_prefill=false"),
        ("decoding.repetition_penalty=1.2", "decoding.repetition_penalty=1.2"),
        ("engine.attn_implementation=flash_attention_2", "attn_implementation=flash_attention_2"),
    ],
)
def test_what_is_not_supported_is_refused(folder: Path, override: str, message: str) -> None:
    config = configuration(folder, override)
    with pytest.raises(BadInput, match=message):
        build(config["engine"], config=config)


def test_requests_share_one_way_of_decoding(engine: TransformersContinuousEngine) -> None:
    with pytest.raises(BadInput, match="share one way of decoding"):
        engine.submit("x", [5], SamplingParams(temperature=0.5))


def test_sampling_is_asked_for(folder: Path, expected: list[list[int]]) -> None:
    config = configuration(folder, "decoding=sample")
    engine = build(config["engine"], config=config)
    try:
        params = {name: config["decoding"][name] for name in ("temperature", "top_k", "top_p")}
        assert [t.token_ids for t in run(engine, workload(), **params)] != expected
    finally:
        engine.close()


def test_a_cell_from_the_command_line(cli: Any, folder: Path) -> None:
    result = cli(
        *(
            "engine=transformers_continuous",
            "model=hf",
            f"model.path={folder}",
            "quant=fp32",
            "name=peer",
        ),
        *(
            "runtime.device=cpu",
            "workload=smoke",
            "workload.num_requests=4",
            "workload.input_len=20",
        ),
        *("workload.output_len=8", "measure.roofline=false", "cache.num_blocks=64"),
    )
    assert result.code == 0, result.err
    (path,) = Path("runs/peer").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["validity"]["ok"], record["validity"]
    assert record["metrics"]["output_tokens"] == 32
