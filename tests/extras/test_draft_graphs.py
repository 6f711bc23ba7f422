"""Steps that verify drafts, and those of drafting models, recorded once and replayed: the same
tokens as without drafts and without graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from minivllm import LLM
from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.options import TritonAttentionOptions
from minivllm.attention.triton import TritonBackend
from minivllm.cache.kv import kv_cache
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.batch_inputs import StepShape, pack
from minivllm.engine.engine import Engine
from minivllm.engine.executor import ModelRunner
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput
from minivllm.extras import capture, graphs
from minivllm.extras.capture import record_all, record_drafts, unrecordable
from minivllm.extras.graphs import GraphExecutor, GraphKey, padding, put_step
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts
from minivllm.extras.speculative.step_cost import measure
from minivllm.kernels.device import BuildContext
from tests.attention.test_backends import CPU, SPECS, cpu
from tests.engine.traffic import DRAWN, GREEDY, Asked, serve, traffic
from tests.extras.speculative.drafting import Scripted, Served, draft_with, speculator
from tests.extras.test_graphs import graphs_of, load, record, run_again
from tests.reference import make_checkpoint

DRAFTS = 3
LONG = {"ignore_eos": True, "stop_token_ids": (), "max_tokens": 16}


class Engines(NamedTuple):
    """Without drafts and graphs, and with both."""

    plain: Engine
    replayed: Engine
    known: dict[int, list[int]]  # outputs by seed, of which drafts are made

    def asked(self, asked: list[Asked]) -> Served:
        """Outputs without drafts, of which drafts will be made."""
        expected = serve(self.plain, asked)
        self.known.update((seed, samples[0][0]) for seed, samples in enumerate(expected))
        return expected


def guesses(known: dict[int, list[int]]) -> Scripted:
    """Drafts of every length from 0, right and wrong ones."""

    def draft(request: Request) -> list[int]:
        chance = random.Random(f"{request.seed} {request.num_tokens}")
        tokens = known.get(request.seed, [])[request.num_tokens - request.num_prompt_tokens :]
        tokens = [*tokens, *(chance.randint(2, 120) for _ in range(DRAFTS))]
        tokens = [token if chance.random() < 0.85 else 99 for token in tokens]
        return tokens[: chance.randint(0, DRAFTS)]

    return Scripted(draft, num_speculative_tokens=DRAFTS)


def poison(engine: Engine) -> None:
    """What is read of the cache must have been written; the reserved block holds anything."""
    for part in (part for parts in engine.kv.parts for part in parts):
        part.fill_(torch.nan if part.is_floating_point() else 99)


# What belongs to no request is whatever memory held: here torch fills it with NaN.
FILLED = "runtime.determinism=run"


def drafts(kind: str, *knobs: str) -> list[str]:
    own = ["speculative.adaptive=false", f"speculative.num_speculative_tokens={DRAFTS}"]
    return [f"speculative={kind}", *own, FILLED, *knobs]


def replaying(llm: LLM, capture: Any = record) -> GraphExecutor:
    """Let the engine replay its steps, and those of its drafting model."""
    proposer = speculator(llm.engine).proposer
    assert record_all(llm.engine, capture, GREEDY, proposer) is None
    if isinstance(proposer, ModelDrafts):
        assert record_drafts(llm.engine, GREEDY, proposer) is None
    poison(llm.engine)
    keeper = graphs_of(llm.engine)
    assert keeper is not None
    return keeper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module", params=["", "prefixes", "chunks"])
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engines]:
    knobs = {
        "": [],
        "prefixes": ["cache.prefix_caching=true", "cache.num_blocks=24"],
        "chunks": ["batching.max_num_batched_tokens=24"],
    }[request.param]
    known: dict[int, list[int]] = {}
    with (
        load(folder, "attention=cpu") as plain,
        load(folder, "attention=cpu", FILLED, *knobs) as replayed,
    ):
        draft_with(replayed.engine, guesses(known))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "LEAST_TOKENS", 8)
            replaying(replayed)
        yield Engines(plain.engine, replayed.engine, known)


@settings(max_examples=25)
@given(asked=traffic())
def test_replayed_drafts_change_no_token(engines: Engines, asked: list[Asked]) -> None:
    expected = engines.asked(asked)
    for one, tokens, others in zip(asked, expected, serve(engines.replayed, asked), strict=True):
        if one.aborted is None:
            assert others == tokens


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        (GREEDY, {"greedy"}),
        (DRAWN, {"drawn"}),
        (replace(DRAWN, top_k=9, top_p=0.9), {"logits"}),
        (replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.5), {"logits"}),
        (replace(GREEDY, logprobs=2), {"logits"}),
    ],
)
def test_every_step_without_prompts_is_replayed(
    engines: Engines, params: SamplingParams, kinds: set[str]
) -> None:
    asked = [Asked([3 + i, 4], replace(params, **LONG)) for i in range(5)]
    engine, expected = engines.replayed, engines.asked(asked)
    keeper, found = graphs_of(engine), speculator(engine)
    assert keeper is not None
    counters, replays = replace(found.counters), keeper.counters["graph_replays"]
    used: set[GraphKey] = set()
    fill = keeper.fill
    keeper.fill = lambda key, packed: used.add(key) or fill(key, packed)  # type: ignore[method-assign]
    steps, step = [0], engine.step
    engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign]
    try:
        assert serve(engine, asked) == expected
    finally:
        del keeper.fill, engine.step
    verified = found.counters.steps - counters.steps
    accepted = found.counters.num_accepted_tokens - counters.num_accepted_tokens
    assert verified > 3 and accepted > 10
    assert {key.kind for key in used} == kinds and 4 in {key.queries for key in used}
    # All prompts are in the first step.
    assert keeper.counters["graph_replays"] - replays == sum(steps) - 1


def test_the_sizes_of_drafts_count_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_ROWS", 10)
    with load(folder, "attention=cpu", *drafts("ngram"), "batching.max_num_seqs=3") as llm:
        keeper = replaying(llm)
        assert keeper.sizes == {1: [1, 2, 3], 4: [1, 2]} and keeper.most_rows == 8
        found = [(key.requests, key.queries) for key in keeper.graphs]
        assert found == [(2, 4), (1, 4), (3, 1), (2, 1), (1, 1)]
        counts = [key.columns for key in (GraphKey(2, 1, "drawn", 4), GraphKey(2, 1, "greedy", 4))]
        assert counts == [64, 0]


def test_where_logits_are_read_graphs_end_with_them(folder: Path) -> None:
    knobs = drafts("early_exit", "speculative.exit_layer=1", "speculative.verify=rejection")
    with load(folder, "attention=cpu", *knobs, "batching.max_num_seqs=2") as llm:
        keeper = replaying(llm)
        assert {(key.queries, key.kind) for key in keeper.graphs} == {
            *((4, "logits"), (4, "greedy"), (1, "greedy"))
        }
        [other] = keeper.others
        assert {(key.queries, key.kind) for key in other.graphs} == {(1, "logits"), (1, "greedy")}
        captures = keeper.counters["graph_captures"]
        serve(llm.engine, [Asked([5, 6, 7], replace(GREEDY, **LONG))])
        assert keeper.counters["graph_captures"] == captures


MODELS = {
    "early_exit": drafts("early_exit", "speculative.exit_layer=2"),
    "same weights": drafts("draft", "quant@speculative.quant=int8"),
    "a second model": drafts("draft", "model@speculative.model=hf", "quant@speculative.quant=fp32"),
}


@pytest.mark.parametrize("params", [GREEDY, DRAWN, replace(DRAWN, repetition_penalty=1.3)])
@pytest.mark.parametrize("name", MODELS)
def test_a_drafting_model_replays_its_own_graphs(
    name: str, params: SamplingParams, folder: Path
) -> None:
    second = name == "a second model"
    knobs = [*MODELS[name], *([f"speculative.model.path={folder}"] if second else [])]
    asked = [Asked([3 + i] * (2 + i), replace(params, **LONG), comes=i) for i in range(3)]
    with load(folder, "attention=cpu") as plain:
        expected = serve(plain.engine, asked)
    with load(folder, "attention=cpu", *knobs) as llm:
        found = serve(llm.engine, asked)
        without = replace(speculator(llm.engine).counters)
        assert found == expected
    with load(folder, "attention=cpu", *knobs) as llm:
        keeper = replaying(llm)
        [other] = keeper.others
        assert speculator(llm.engine).proposer.executor is other  # type: ignore[attr-defined]
        own, steps = [], other.run
        other.run = lambda packed: own.append(other.choose(packed)) or steps(packed)  # type: ignore
        assert serve(llm.engine, asked) == expected
        counters = speculator(llm.engine).counters
        assert counters.num_accepted_tokens == without.num_accepted_tokens
        assert counters.drafts_of_length == without.drafts_of_length
        # Without a cache of its own it computes no prompt.
        assert len([key for key in own if key]) > 10 and (second or all(own))
        assert {key.queries for key in own if key} == ({1, 2} if second else {1})
        if second:  # itself, so that all its drafts are right
            assert counters.num_accepted_tokens == counters.num_draft_tokens > 20
        captured = len(keeper.graphs) + len(other.graphs)
        assert keeper.counters["graph_captures"] == captured
        assert keeper.capture_s == keeper.own_capture_s + other.own_capture_s > other.own_capture_s


def test_an_engine_is_put_together_with_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there when the costs of steps are measured."""

    def obstacle(runner: Any, loaded: Any, layout: Any, chosen: Any) -> str | None:
        return unrecordable(runner.attention, loaded.model, loaded.config, layout)

    monkeypatch.setattr(capture, "_obstacle", obstacle)
    monkeypatch.setattr(capture, "CudaCapture", lambda device: record)
    knobs = drafts("early_exit", "speculative.exit_layer=1", "runtime.cuda_graphs=true")
    knobs = [*knobs, "speculative.adaptive=true", "batching.max_num_seqs=2"]
    with load(folder, "attention=cpu", *knobs) as llm:
        keeper = graphs_of(llm.engine)
        assert keeper is not None and list(keeper.sizes) == [1, 4]
        proposer = speculator(llm.engine).proposer
        assert isinstance(proposer, ModelDrafts) and proposer.executor is keeper.others[0]
        # Of 1, 2, 3, 4, 5, 6, 8 tokens, and of 1, 2 to draft for.
        assert keeper.counters["graph_replays"] == 7 * (7 + 2)
        assert keeper.counters["graph_captures"] == len(keeper.graphs) + len(
            keeper.others[0].graphs
        )
    with pytest.raises(BadInput, match="true: the drafting model: attention=none"):
        monkeypatch.setattr(
            capture,
            "_obstacle",
            lambda runner, *rest: "attention=none" if runner.model is not rest[0].model else None,
        )
        load(folder, "attention=cpu", *knobs)


def test_a_drafting_model_that_cannot_be_recorded_goes_on_without(folder: Path) -> None:
    knobs = drafts("early_exit", "speculative.exit_layer=1")
    with load(folder, "attention=cpu", *knobs) as llm:
        proposer = speculator(llm.engine).proposer
        assert isinstance(proposer, ModelDrafts)
        assert record_all(llm.engine, record, GREEDY, proposer) is None
        keeper = graphs_of(llm.engine)
        assert keeper is not None

        def fails(step: Callable[[], Any]) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        keeper.capture = fails
        reason = record_drafts(llm.engine, GREEDY, proposer)
        assert reason == "recording failed: out of memory"
        assert proposer.executor is proposer.runner and not keeper.others


def test_measured_steps_are_those_that_are_replayed(folder: Path) -> None:
    with load(folder, "attention=cpu", *drafts("ngram"), "batching.max_num_seqs=3") as llm:
        keeper = replaying(llm)
        keys: list[GraphKey | None] = []
        run = keeper.run
        keeper.run = lambda packed: keys.append(keeper.choose(packed)) or run(packed)  # type: ignore
        costs = measure(keeper, 12, 3)
        assert costs.sizes == [1, 2, 3, 4, 5, 6, 8, 12]
        sizes = [(key.requests, key.queries) for key in keys[:8] if key is not None]
        assert sizes == [(1, 1), (2, 1), (3, 1), *[(3, 4)] * 5]


def test_triton_kernels_read_drafts_where_they_lie(folder: Path) -> None:
    """In the interpreter."""
    asked = [
        Asked([5 + i] * 3, replace(one, **LONG | {"max_tokens": 5}))
        for i, one in enumerate((GREEDY, DRAWN))
    ]
    few = ["attention=triton", "batching.max_num_seqs=2"]
    with load(folder, *few) as plain:
        expected = serve(plain.engine, asked)
    with load(folder, *few, FILLED) as llm:
        known = dict(enumerate(samples[0][0] for samples in expected))
        draft_with(llm.engine, guesses(known))
        keeper = replaying(llm, run_again)
        assert serve(llm.engine, asked) == expected
        assert keeper.counters["graph_replays"] > 0 < speculator(llm.engine).counters.steps


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


KERNELS: dict[str, Callable[..., AttentionBackend]] = {
    "cpu": cpu,
    "triton": partial(TritonBackend, options=TritonAttentionOptions(64)),
    "invariant": partial(TritonBackend, context=BuildContext(CPU, None, True)),
}


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("queries", [4, 9])
@pytest.mark.parametrize("name", ["grouped", "one kv head, window, wide"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_laid_out_for_many_tokens_takes_fewer(
    kernel: str, name: str, queries: int
) -> None:
    """A recorded layout, with requests of all lengths in it and rows that belong to none: what is
    not the step's own is NaN, before and in the output."""
    spec, layout = SPECS[name], CacheLayout(16, 20)
    torch.manual_seed(queries)
    chance = random.Random(queries)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    size, blocks, rows = 3, 6, 3 * queries
    for count in (2, 3):
        kv = kv_cache([spec], layout, torch.float32, CPU)
        backend = KERNELS[kernel]([spec], kv)
        for part in kv.parts[0]:
            part.fill_(torch.nan)
        manager, runner = CacheManager(layout), ModelRunner(nn.Identity(), backend, CPU)
        requests, parts = [], []
        for index in range(count):
            own, context = chance.randint(1, queries), (70, 0, 5)[index]
            made = Request(
                str(index), [7] * (context + own), SamplingParams(), max_num_tokens=999, seed=0
            )
            assert manager.grow(made.cache, 0, context + own)
            requests.append(made)
            if context:
                batch = runner.prepare(pack([ScheduledRequest(made, 0, context)], 16))
                q, k, v = (torch.randn(context, h, spec.head_dim) for h in heads)
                if isinstance(backend, TritonBackend):  # an interpreter's attention is slow
                    backend.write.write(kv, 0, batch.slot_mapping, k, v)
                else:
                    backend.forward(0, q, k, v, batch)
            parts.append(ScheduledRequest(made, context, own, num_drafts=own - 1))
        packed = pack(parts, 16)
        qkv = [torch.full((rows, h, spec.head_dim), torch.nan) for h in heads]
        for x in qkv:
            x[: packed.shape.tokens] = torch.randn(packed.shape.tokens, *x.shape[1:])
        inputs = (x[: packed.shape.tokens] for x in qkv)
        expected = backend.forward(0, *inputs, runner.prepare(packed))
        ints = np.concatenate((padding(size, rows, 0), np.zeros(size * blocks, np.int32)))
        put_step(packed, ints, size, rows)
        recorded = StepBatch(
            **StepShape(rows, (0,) * size, blocks, rows).unpack(torch.from_numpy(ints)),
            query_lens_host=(queries,) * size,
            seq_lens_host=(blocks * 16,) * size,
            rotated_lens_host=(0,) * size,
        )
        recorded = recorded._replace(attention=backend.prepare(recorded))
        found = backend.forward(0, *qkv, recorded)[: packed.shape.tokens]
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
