"""CUDA graphs and overlapping steps on a GPU; tests/extras/test_graphs.py and
tests/engine/test_launcher.py have the logic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from tests.engine.traffic import DRAWN, GREEDY, KINDS, Asked, serve, traffic
from tests.extras.speculative.drafting import speculator
from tests.extras.test_graphs import graphs_of
from tests.reference import make_checkpoint

pytestmark = pytest.mark.gpu
KNOBS = [
    "model.max_model_len=1200",
    "cache.block_size=16",
    "cache.num_blocks=200",
    "batching.max_num_seqs=12",
]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved small model of each family."""
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param, max_position_embeddings=2048)
    return path


def load(folder: Path, *knobs: str, attention: str = "triton") -> LLM:
    options = [knob for knob in knobs if "." not in knob.split("=")[0] or "@" in knob]
    own = [*options, *KNOBS, *(knob for knob in knobs if knob not in options)]
    return LLM(str(folder), device="cuda", quant="fp32", attention=attention, overrides=own)


def asked() -> list[Asked]:
    prompts = [[(7 * i + j) % 100 + 14 for j in range(1 + 40 * i)] for i in range(9)]
    kinds = [GREEDY, DRAWN, *KINDS]
    made = [Asked(prompt, kinds[i % len(kinds)], comes=i // 2) for i, prompt in enumerate(prompts)]
    return [*made, Asked([9] * 1100, replace(GREEDY, max_tokens=40))]


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_tokens_are_those_of_plain_steps(folder: Path, graphs: str, overlap: str) -> None:
    with load(folder, "runtime.cuda_graphs=false") as llm:
        expected = serve(llm.engine, asked())
    with load(folder, f"runtime.cuda_graphs={graphs}", f"runtime.overlap={overlap}") as llm:
        assert serve(llm.engine, asked()) == expected
        keeper = graphs_of(llm.engine)
        assert (keeper is not None) == (graphs == "true")
        if keeper is not None:
            assert keeper.counters["graph_replays"] > 40
            assert {key.kind for key in keeper.graphs} == {"greedy", "drawn", "logits"}
        assert (llm.engine.overlap.steps > 0) == (overlap == "true")


@settings(max_examples=20)
@given(requests=traffic())
def test_any_traffic_gives_the_same_tokens(folder: Path, requests: list[Asked]) -> None:
    found = []
    for knobs in (
        ["runtime.cuda_graphs=false"],
        ["runtime.cuda_graphs=true", "runtime.overlap=true"],
    ):
        with load(folder, *knobs, "model.max_model_len=128") as llm:
            found.append(serve(llm.engine, requests))
    for one, expected, tokens in zip(requests, *found, strict=True):
        if one.aborted is None:
            assert tokens == expected


@pytest.mark.parametrize(
    "drafts",
    [
        ["speculative=ngram", "speculative.prompt_lookup_min=1"],
        ["speculative=early_exit", "speculative.exit_layer=2"],
        ["speculative=draft", "quant@speculative.quant=int8"],
    ],
)
@pytest.mark.parametrize("adaptive", ["false", "true"])
def test_drafts_in_graphs_change_no_token(folder: Path, drafts: list[str], adaptive: str) -> None:
    with load(folder, "runtime.cuda_graphs=false") as llm:
        expected = serve(llm.engine, asked())
    knobs = [*drafts, f"speculative.adaptive={adaptive}", "runtime.cuda_graphs=true"]
    with load(folder, *knobs) as llm:
        keeper = graphs_of(llm.engine)
        assert keeper is not None and len(keeper.others) == (drafts[0] != "speculative=ngram")
        assert serve(llm.engine, asked()) == expected
        assert keeper.counters["graph_replays"] > 10
        if adaptive == "false":
            assert speculator(llm.engine).counters.num_accepted_tokens > 0


def test_drafts_of_one_request_at_a_time_are_replayed(folder: Path) -> None:
    """Those that a model makes, and their verification, in graphs of one memory."""
    few = ["model.max_model_len=48", "batching.max_num_seqs=1"]
    drafts = ["speculative=early_exit", "speculative.exit_layer=2", "speculative.adaptive=false"]
    one_by_one = [Asked([5] * 4, replace(one, max_tokens=6)) for one in (GREEDY, DRAWN)]
    with load(folder, "runtime.cuda_graphs=false", *few) as llm:
        expected = serve(llm.engine, one_by_one)
    with load(folder, "runtime.cuda_graphs=true", *few, *drafts) as llm:
        assert serve(llm.engine, one_by_one) == expected
        keeper = graphs_of(llm.engine)
        assert keeper is not None and {key.queries for key in keeper.graphs} == {1, 4}
        counters = speculator(llm.engine).counters
        # One for each step that verifies, and at least one to draft.
        assert keeper.counters["graph_replays"] >= 2 * counters.steps > 0


def test_attention_without_graphs_says_so(folder: Path) -> None:
    with pytest.raises(BadInput, match="attention=sdpa lays each step out on the host"):
        load(folder, "runtime.cuda_graphs=true", attention="sdpa")
    with load(folder, attention="sdpa") as llm:
        assert graphs_of(llm.engine) is None
        assert any("no CUDA graphs" in warning for warning in llm.engine.loaded.warnings)


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_decoding_step_waits_for_nothing(folder: Path, graphs: str, overlap: str) -> None:
    """torch raises where the host waits for the device, but for the one event that brings the
    tokens."""
    few = ["model.max_model_len=48", "batching.max_num_seqs=2"]
    with load(folder, f"runtime.cuda_graphs={graphs}", f"runtime.overlap={overlap}", *few) as llm:
        engine = llm.engine
        params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
        for index in range(2):
            engine.add_request(str(index), [5 + index] * 20, params)
        for _ in range(4):
            engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        replayed = graphs_of(engine)
        assert (replayed is not None) == (graphs == "true")
        if replayed is not None:
            assert replayed.counters["graph_replays"] >= 6
        engine.abort_all()
