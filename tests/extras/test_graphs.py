"""Steps recorded once and replayed, with stand-ins for CUDA's graphs: the same tokens as steps
computed afresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.engine.batch_inputs import SamplingColumns, StepShape, pack, pack_draws
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.engines.minivllm import engine as bench_engines
from minivllm.errors import BadInput
from minivllm.extras import graphs
from minivllm.extras.capture import CudaCapture, record_all, unrecordable
from minivllm.extras.graphs import GraphExecutor, padding, put_draw, put_step
from tests.engine.traffic import DRAWN, GREEDY, Asked, check, serve, traffic
from tests.reference import VARIANTS, make_checkpoint

Step = Callable[[], tuple[Tensor, ...]]


class Recorder(TorchDispatchMode):
    """A CUDA graph on a CPU: notes each operation with the very tensors and numbers it was given.

    A replay repeats the operations, never the Python code around them; what the host decides while
    it records is baked in. To read a tensor on the host, or to make one from the host's numbers, is
    an error, as it is on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        indices = (
            args[1] if str(function).startswith("aten.index") and isinstance(args[1], list) else ()
        )
        masked = any(index is not None and index.dtype is torch.bool for index in indices)
        assert not masked and "nonzero" not in str(function), (
            "a shape that goes by values while recording"
        )
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for function, args, kwargs, out in self.operations:
            new = function(*args, **kwargs)
            many = isinstance(out, tuple | list)
            for old, now in zip(out if many else [out], new if many else [new], strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != now.data_ptr():
                    old.copy_(now)


class Refusal(TorchFunctionMode):
    """No number goes from the device to the host or back: a GPU that records cannot do that."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        words = (
            "tolist",
            "item",
            "cpu",
            "numpy",
            "tensor",
            "as_tensor",
            "__bool__",
            "__int__",
            "__float__",
        )
        assert name not in words, f"{name}() while recording"
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def record(step: Step) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """Capture by the Recorder; outputs are poisoned before each replay."""
    step()
    with Refusal(), Recorder() as recorder:
        outputs = step()

    @torch.inference_mode()
    def replay() -> None:
        for tensor in outputs:
            tensor.fill_(torch.nan if tensor.is_floating_point() else -(10**6))
        recorder.replay()

    return outputs, replay


@torch.inference_mode()
def run_again(step: Step) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
    """Capture for Triton's interpreter, whose kernels the Recorder does not see: the function
    itself is run again."""
    outputs = step()

    @torch.inference_mode()
    def replay() -> None:
        for old, new in zip(outputs, step(), strict=True):
            old.copy_(new)

    return outputs, replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


def load(folder: Path, *overrides: str) -> LLM:
    common = [
        "model.max_model_len=96",
        "cache.block_size=4",
        "batching.max_num_seqs=10",
        "cache.num_blocks=60",
    ]
    groups = [item for item in overrides if "." not in item.split("=")[0]]
    knobs = [item for item in overrides if item not in groups]
    return LLM(str(folder), quant="fp32", device="cpu", overrides=[*groups, *common, *knobs])


def graphs_of(engine: Engine) -> GraphExecutor | None:
    executor = engine.launcher.executor
    return executor if isinstance(executor, GraphExecutor) else None


def keep(engine: Engine, capture: Any = record) -> GraphExecutor:
    """Let the engine replay what `capture` records, in a cache whose reserved block is poisoned
    before every step."""
    keeper = GraphExecutor(
        engine.runner,
        engine.launcher.one_by_one,
        engine.cache.layout.block_size,
        engine.scheduler.policy.max_num_seqs,
        engine.max_model_len,
        capture,
        engine.loaded.warnings,
    )
    engine.launcher.executor = keeper
    fill = keeper.fill

    def poisoned(*args: Any) -> None:
        for parts in engine.kv.parts:
            for part in parts:
                part[0] = torch.nan if part.is_floating_point() else 99
        fill(*args)

    keeper.fill = poisoned  # type: ignore[method-assign]
    return keeper


@pytest.fixture(scope="module", params=["", "overlap", "prefixes", "streaming"])
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Without graphs, and with them; several widths in a short context."""
    knobs = {
        "": [],
        "overlap": ["runtime.overlap=true"],
        "prefixes": ["cache.prefix_caching=true", "cache.num_blocks=24", "runtime.overlap=true"],
        "streaming": ["cache.eviction=streaming", "cache.eviction_budget=16"],
    }[request.param]
    same = knobs if request.param == "streaming" else []  # which changes tokens
    with (
        load(folder, "attention=cpu", *same) as plain,
        load(folder, "attention=cpu", *knobs) as replayed,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "LEAST_TOKENS", 8)
            keep(replayed.engine)
        yield plain.engine, replayed.engine


@settings(max_examples=25)
@given(asked=traffic())
def test_replayed_steps_give_the_same_tokens(
    engines: tuple[Engine, Engine], asked: list[Asked]
) -> None:
    expected, found = (serve(engine, asked) for engine in engines)
    for one, tokens, others in zip(asked, expected, found, strict=True):
        if one.aborted is None:
            assert others == tokens


def test_decoding_is_replayed_and_recorded_once(engines: tuple[Engine, Engine]) -> None:
    keeper = graphs_of(engines[1])
    assert keeper is not None
    loads = [
        [Asked([3 + i] * (1 + 5 * i), params, comes=i % 3) for i, params in enumerate(kinds * 2)]
        for kinds in (
            [GREEDY] * 4,
            [GREEDY, DRAWN] * 2,
            [GREEDY, DRAWN, GREEDY, SamplingParams(max_tokens=9, logprobs=1)],
        )
    ]
    tokens = [serve(engines[0], asked) for asked in loads]
    before = dict(keeper.counters)
    assert [serve(engines[1], asked) for asked in loads] == tokens
    replays = keeper.counters["graph_replays"] - before["graph_replays"]
    assert replays >= 15
    counts = keeper.counters["graph_captures"]
    assert counts == len(keeper.graphs)
    assert {key.kind for key in keeper.graphs} == {"greedy", "drawn", "logits"}
    assert len({key.requests for key in keeper.graphs}) > 1
    # else all may hold less than the narrowest graph reads
    if engines[1].cache.layout.eviction is None:
        assert len({key.blocks for key in keeper.graphs}) > 1
    assert [serve(engines[1], asked) for asked in loads] == tokens
    assert keeper.counters["graph_captures"] == counts, "what was recorded is recorded again"


def test_sizes_and_widths(folder: Path) -> None:
    with load(folder, "attention=cpu", "batching.max_num_seqs=33") as llm:
        keeper = keep(llm.engine)
        assert keeper.sizes == {1: [1, 2, 4, 8, 16, 24, 32, 33]}
        assert keeper.widths == [24]  # 96 tokens in blocks of 4: less than the narrowest
        keeper.capture_all(GREEDY)
        made = [(key.requests, key.kind) for key in keeper.graphs]
        assert made == [(size, "greedy") for size in (33, 32, 24, 16, 8, 4, 2, 1)]
        check(llm.engine)


def test_rows_and_recordings_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, "attention=cpu", "batching.max_num_seqs=700") as llm:
        sizes = keep(llm.engine).sizes[1]
        assert sizes[-1] == 512 and sizes == sorted(set(sizes)) and {256, 272, 496} < set(sizes)
    monkeypatch.setattr(graphs, "MOST_ROWS", 2)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    asked = [Asked([3 + i] * 4, replace(GREEDY, max_tokens=4 + i)) for i in range(3)]
    with load(folder, "attention=cpu") as llm:
        expected = serve(llm.engine, asked)
        keeper = keep(llm.engine)
        keeper.capture_all(GREEDY)
        assert keeper.sizes == {1: [1, 2]} and [key.requests for key in keeper.graphs] == [2]
        assert serve(llm.engine, asked) == expected
        assert keeper.counters["graph_captures"] == 1 <= keeper.counters["graph_replays"]


@pytest.mark.parametrize(
    ("params", "kinds"),
    [
        (GREEDY, ["greedy"]),
        (DRAWN, ["drawn", "greedy"]),
        (replace(DRAWN, top_k=5), ["logits", "greedy"]),
        (replace(GREEDY, logprobs=1), ["logits", "greedy"]),
        (replace(DRAWN, min_tokens=2), ["drawn", "logits", "greedy"]),
        (SamplingParams(beam_width=2), ["logits", "greedy"]),
    ],
)
def test_what_decodes_as_configured_is_recorded_at_start(
    params: SamplingParams, kinds: list[str], folder: Path
) -> None:
    with load(folder, "attention=cpu", "batching.max_num_seqs=2") as llm:
        assert record_all(llm.engine, record, params) is None
        keeper = graphs_of(llm.engine)
        assert (
            keeper is not None and list(dict.fromkeys(key.kind for key in keeper.graphs)) == kinds
        )
        before = keeper.counters["graph_captures"]
        serve(
            llm.engine,
            [Asked([5, 6, 7], replace(params, max_tokens=6, ignore_eos=True, stop_token_ids=()))],
        )
        assert (
            keeper.counters["graph_captures"] == before < before + keeper.counters["graph_replays"]
        )


def test_graphs_that_end_with_logits_share_their_memory(folder: Path) -> None:
    with load(folder, "attention=cpu", "batching.max_num_seqs=4") as llm:
        assert record_all(llm.engine, record, replace(DRAWN, top_k=5)) is None
        keeper = graphs_of(llm.engine)
        assert keeper is not None
        found = [graph.outputs[0] for key, graph in keeper.graphs.items() if key.kind == "logits"]
        assert len(found) >= 3 and len({logits.data_ptr() for logits in found}) == 1
        assert {len(logits) for logits in found} == {1, 2, 4}


def out_of_memory(step: Step) -> Any:
    step()
    raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 MiB.\nSee the documentation")


def test_a_recording_that_fails_at_start_leaves_plain_steps(folder: Path) -> None:
    with load(folder, "attention=cpu") as llm:
        reason = record_all(llm.engine, out_of_memory, GREEDY)
        assert reason == "recording failed: out of memory. Tried to allocate 2 MiB."
        assert graphs_of(llm.engine) is None
        assert record_all(llm.engine, record, GREEDY) is None and graphs_of(llm.engine) is not None


def test_a_recording_that_fails_while_serving_ends_its_kind(folder: Path) -> None:
    long = [
        replace(params, ignore_eos=True, stop_token_ids=(), max_tokens=6)
        for params in (DRAWN, GREEDY)
    ]
    asked = [Asked([3 + i] * 4, params) for i, params in enumerate(long)]
    with load(folder, "attention=cpu") as llm:
        expected = [serve(llm.engine, [one]) for one in asked]
        keeper = keep(llm.engine)
        keeper.capture_all(GREEDY)
        keeper.capture = out_of_memory
        assert [serve(llm.engine, [one]) for one in [*asked, asked[0]]] == [*expected, expected[0]]
        assert keeper.counters["graph_replays"] > 0, "what has been recorded goes on"
        assert {key.kind for key in keeper.graphs} == {"greedy"}
        [warning] = [line for line in llm.engine.loaded.warnings if "CUDA graphs" in line]
        assert warning.startswith(
            "no more CUDA graphs of the kind drawn: recording failed: out of memory"
        )


def test_triton_kernels_are_laid_out_for_the_longest_request(folder: Path) -> None:
    """In the interpreter: pieces of the keys are those of the graph's width, more than a short
    request has."""
    asked = [Asked([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))]
    asked.append(Asked([9] * 66, SamplingParams(max_tokens=2, ignore_eos=True)))
    results = []
    for recorded in (False, True):
        with load(folder, "attention=triton", "attention.split_size=64") as llm:
            keeper = keep(llm.engine, run_again) if recorded else None
            results.append(serve(llm.engine, asked))
            assert keeper is None or keeper.counters["graph_replays"] > 0
            counters = llm.engine.runner.attention.counters  # type: ignore[attr-defined]
            assert counters["launches_split"] > 0
    assert results[0] == results[1]


def test_draws_in_a_kernel_are_those_of_torch_and_padding_takes_no_part(folder: Path) -> None:
    long = [
        replace(params, ignore_eos=True, stop_token_ids=(), max_tokens=6)
        for params in (GREEDY, DRAWN)
    ]
    asked = [Asked([3 + i] * (2 + i), long[i % 2]) for i in range(5)]
    results = []
    for fused in ("off", "triton"):
        with load(folder, "attention=cpu", f"runtime.fused_kernels={fused}") as llm:
            keeper, counters = keep(llm.engine, run_again), llm.engine.launcher.counters
            results.append(serve(llm.engine, asked))
            assert {(key.requests, key.kind) for key in keeper.graphs} == {(8, "drawn")}
            assert counters.tokens_drawn == 12 and counters.drawn_fused == (
                12 if fused == "triton" else 0
            )
    assert results[0] == results[1]


def test_the_stand_in_refuses_what_a_graph_cannot_do() -> None:
    values = torch.arange(3)
    for wrong in (
        lambda: (values + values.tolist()[0],),
        lambda: (values + torch.tensor([1, 2, 3]),),
        lambda: (values[values > 1],),
    ):
        with pytest.raises(AssertionError, match="while recording"):
            record(wrong)


def test_the_stand_in_bakes_numbers_in() -> None:
    count, source = [1], torch.tensor([5])
    outputs, replay = record(lambda: (source * count[0],))
    count[0], source[0] = 2, 7
    replay()
    assert outputs[0].tolist() == [7]


@pytest.mark.parametrize(
    ("variant", "overrides", "reason"),
    [
        ("llama", ["attention=cpu"], None),
        ("llama", ["attention=sdpa"], "attention=sdpa lays each step out on the host"),
        ("llama", ["attention=cpu", "cache=none"], "cache=none computes whole sequences"),
        ("llama", ["attention=eager", "cache.eviction=h2o"], "attention=eager"),
        ("mixtral", ["attention=cpu"], "MoE waits for the device"),
        ("llama dynamic rope", ["attention=cpu"], "rope scaling"),
    ],
)
def test_what_stands_in_the_way_is_said(
    variant: str, overrides: list[str], reason: str | None, tmp_path: Path
) -> None:
    family, config = VARIANTS[variant]
    make_checkpoint(tmp_path, family, **config)
    knobs = [*overrides, "model.max_model_len=32"]
    with LLM(str(tmp_path), quant="fp32", device="cpu", overrides=knobs) as llm:
        engine = llm.engine
        found = unrecordable(
            engine.runner.attention, engine.loaded.model, engine.loaded.config, engine.cache.layout
        )
        assert (reason is None) == (found is None)
        assert found is None or (reason is not None and reason in found)


def test_recording_is_not_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of recording are those of compiling, and not of loading as well."""
    recording_s = 1000.0

    def build(*args: Any) -> Engine:
        engine = build_engine(*args)
        keep(engine).own_capture_s = recording_s
        return engine

    monkeypatch.setattr(bench_engines, "build_engine", build)
    config = compose(
        ["model=hf", f"model.path={folder}", "quant=fp32", "runtime.device=cpu", "attention=cpu"]
    )
    info = bench_engines.MinivllmEngine(config).info
    assert info.compile_s is not None and info.compile_s >= recording_s
    assert info.load_s < 0, "no time has gone by here but what is taken off"


def test_what_was_overlapped_and_replayed_is_in_the_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any) -> Engine:
        engine = build_engine(*args)
        keep(engine)
        return engine

    def counted(*overrides: str) -> dict[str, float | str]:
        model = [
            "model=hf",
            f"model.path={folder}",
            "quant=fp32",
            "runtime.device=cpu",
            "attention=cpu",
        ]
        engine = bench_engines.MinivllmEngine(
            compose([*model, "model.max_model_len=96", *overrides])
        )
        engine.reset()
        engine.submit("0", [3, 4, 5], GREEDY)
        while not any(output.finish_reason for output in engine.poll()):
            pass
        return engine.liveness()["runtime"]

    plain, overlapped = counted(), counted("runtime.overlap=true")
    assert plain["overlap_steps"] == plain["graph_replays"] == plain["graph_captures"] == 0
    assert float(overlapped["overlap_steps"]) > 0
    monkeypatch.setattr(bench_engines, "build_engine", build)
    replayed = counted()
    assert float(replayed["graph_replays"]) > 0 and float(replayed["graph_captures"]) > 0


def test_a_cpu_has_no_graphs(folder: Path) -> None:
    with pytest.raises(BadInput, match="cuda_graphs=true: the device is cpu"):
        load(folder, "runtime.cuda_graphs=true")
    with load(folder, "runtime.cuda_graphs=auto") as llm:
        assert graphs_of(llm.engine) is None


def test_recordings_share_a_stream_that_is_no_other_engine_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS keeps a workspace a stream, and torch frees it with any graph of that stream."""
    recorded: list[Any] = []

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    @contextmanager
    def graph(made: Any, pool: Any, stream: Any) -> Iterator[None]:
        recorded.append(stream)
        yield

    stand_ins = {
        "graph_pool_handle": object,
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream(),
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "stream": nullcontext,
        "graph": graph,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (free.pop(0), 100),
    }
    free = [90, 70, 70, 65, 65, 80]  # before and after each
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    captures = [CudaCapture(torch.device("cuda")) for _ in range(2)]
    for capture in (captures[0], captures[0], captures[1]):
        capture(lambda: ())
    # somebody else gave memory back meanwhile
    assert [capture.num_bytes for capture in captures] == [25, 0]
    assert recorded[0] is recorded[1] is captures[0].stream
    assert recorded[2] is captures[1].stream is not recorded[0]


@given(data=st.data())
def test_padding_changes_no_request_of_a_step(data: st.DataObject) -> None:
    """What is missing are requests of one token in block 0, and tokens of none; columns lie where
    their rows are."""
    block_size, count = 4, data.draw(st.integers(1, 5))
    size, blocks = data.draw(st.integers(count, 8)), data.draw(st.integers(40, 50))
    queries = data.draw(st.integers(1, 4))
    rows, parts = size * queries, []
    for index in range(count):
        tokens = data.draw(st.integers(1, queries))
        length = data.draw(st.integers(tokens, 100))
        params = SamplingParams(temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0])))
        made = Request(str(index), list(range(length)), params, max_num_tokens=200, seed=index)
        made.cache.block_table.extend(range(30 * index + 1, 30 * index + 27))
        parts.append(ScheduledRequest(made, length - tokens, tokens, num_drafts=tokens - 1))
    packed = pack(parts, block_size)
    num_tokens = packed.shape.tokens
    ints = np.concatenate((padding(size, rows, 8 * rows), np.zeros(size * blocks, np.int32)))
    put_step(packed, ints[8 * rows :], size, rows)
    shape = StepShape(rows, (0,) * size, blocks, rows)
    tensors = shape.unpack(torch.from_numpy(ints[8 * rows :]))
    unpadded = torch.frombuffer(bytearray(packed.ints), dtype=torch.int32)
    for name, own in packed.shape.unpack(unpadded).items():
        if name == "block_table":
            width = min(blocks, own.shape[1])
            own, found = own[:, :width], tensors[name][:count, :width]
        else:
            found = tensors[name][: len(own)]
        assert torch.equal(found, own), name
    assert tensors["logit_rows"].tolist() == list(range(rows))
    missing = size - count
    starts = tensors["query_start_loc"][count:].tolist()
    assert starts == list(range(num_tokens, num_tokens + missing + 1)) and starts[-1] <= rows
    assert tensors["seq_lens"][count:].tolist() == [1] * missing
    assert not tensors["block_table"][count:].any()
    for name in ("token_ids", "positions", "slot_mapping"):
        assert not tensors[name][num_tokens:].any()
    drawing = [part.request for part in parts for _ in range(part.num_tokens)]
    positions = [place + 1 for part in parts for place in range(part.start, part.end)]
    for draw in pack_draws(drawing, positions):
        put_draw(draw, ints[: 8 * rows], rows)
    columns = SamplingColumns.unpack(torch.from_numpy(ints[: 8 * rows]))
    temperatures = [request.params.temperature for request in drawing]
    assert columns.temperatures.tolist() == temperatures + [0.0] * (rows - num_tokens)
    drawn = [row for row, temperature in enumerate(temperatures) if temperature]
    assert columns.seeds[drawn].tolist() == [drawing[row].seed for row in drawn]
    assert columns.positions[drawn].tolist() == [positions[row] for row in drawn]
