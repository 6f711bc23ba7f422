"""engine=transformers: the same tokens as this project's engine, at honest times, and no knob
ignored."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.engines.base import EngineOutput
from minivllm.engines.supported_knobs import require_supported
from minivllm.engines.transformers.engine import TransformersEngine, _Batch
from minivllm.engines.transformers.options import TransformersOptions
from minivllm.kernels.device import BuildContext
from minivllm.platform.support import Knobs, Support
from tests.engines.driving import requests, run
from tests.reference import LLAMA3_ROPE, PROMPTS, SMALL, make_checkpoint

LENGTHS = [12, 30, 1, 24, 7]


def configuration(folder: Path, *overrides: str) -> dict[str, Any]:
    return compose(
        [
            *(
                "engine=transformers",
                "model=hf",
                f"model.path={folder}",
                "quant=fp32",
                "runtime.device=cpu",
            ),
            *overrides,
        ]
    )


def workload(ignore_eos: bool = True) -> Workload:
    return requests(PROMPTS, LENGTHS, ignore_eos)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "qwen3")
    # As published checkpoints have it: it must neither turn greedy decoding into sampling nor end a
    # request.
    (path / "generation_config.json").write_text(
        json.dumps(
            {"do_sample": True, "temperature": 0.6, "top_k": 3, "eos_token_id": list(range(100))}
        )
    )
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["cache.num_blocks=200"]) as llm:
        yield llm


def expected(llm: LLM, ignore_eos: bool) -> list[list[int]]:
    params = [SamplingParams(max_tokens=length, ignore_eos=ignore_eos) for length in LENGTHS]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def test_greedy_tokens_are_those_of_our_engine(engine: TransformersEngine, ours: LLM) -> None:
    traces = run(engine, workload())
    assert [trace.token_ids for trace in traces] == expected(ours, ignore_eos=True)
    assert {trace.finish_reason for trace in traces} == {"length"}
    assert engine.liveness()["engine"]["generate_calls"] == 1


def test_end_of_sequence_ends_a_request_and_not_its_neighbours(
    engine: TransformersEngine, ours: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected(ours, ignore_eos=True)
    last = tokens[1][5]  # becomes an end-of-sequence token
    monkeypatch.setattr(engine, "_eos", frozenset([last]))
    want = [ids[: ids.index(last) + 1] if last in ids else ids for ids in tokens]
    traces = run(engine, workload(ignore_eos=False))
    assert [trace.token_ids for trace in traces] == want
    assert traces[1].finish_reason == "stop" and len(traces[1].token_ids) <= 6
    assert [trace.finish_reason == "stop" for trace in traces] == [ids[-1] == last for ids in want]
    longest = max(map(len, want))
    assert len(engine.steps()) == longest, "generate goes on after the last answer"


def test_tokens_are_stamped_as_they_come(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step ends before the driver has the tokens of the last, which it would wait for in vain
    if they came in lumps."""
    handed, lumps = threading.Event(), list[float]()
    put, poll = _Batch.put, engine.poll

    def put_after_hand_over(batch: _Batch, value: torch.Tensor) -> None:
        if not handed.wait(60):
            lumps.append(Clock.now())
        if value.dim() == 1:  # the prompts come first
            handed.clear()
        put(batch, value)

    def poll_and_tell(timeout_s: float | None = None) -> list[EngineOutput]:
        if outputs := poll(timeout_s):
            handed.set()
        return outputs

    handed.set()
    monkeypatch.setattr(_Batch, "put", put_after_hand_over)
    monkeypatch.setattr(engine, "poll", poll_and_tell)
    begin = Clock.now()
    traces = run(engine, workload())
    end = Clock.now()
    assert not lumps
    for trace in traces:
        times = trace.token_times
        assert trace.started_s is not None
        assert begin <= trace.scheduled_s <= trace.started_s < times[0] <= times[-1] < end
        assert times == sorted(set(times))
    # The 30-token request is answered long after the 1-token request is done.
    assert traces[2].token_times[-1] < traces[1].token_times[1]
    # Hand-over is immediate: a token is with the driver before the step after the next one has
    # ended.
    ends = [step["start_s"] + step["forward_ms"] / 1e3 for step in engine.steps()]
    assert len(ends) == 30
    for seen, after in zip(traces[1].token_times, ends[2:], strict=False):
        assert seen < after


def test_batches_are_static(folder: Path, engine: TransformersEngine) -> None:
    config = configuration(folder, "engine.batch_size=2")
    small = build(config["engine"], config=config)
    try:
        traces = run(small, workload())
        assert [trace.token_ids for trace in traces] == [
            trace.token_ids for trace in run(engine, workload())
        ]
        assert small.liveness()["engine"]["generate_calls"] == 3
        assert small.liveness()["batching"]["largest_batch"] == 2
        # The second batch starts when the first one's longest answer is done.
        assert traces[2].started_s is not None and traces[2].started_s >= traces[1].token_times[-1]
        small.reset()
        run(small, workload(), Concurrency(1))
        assert small.liveness()["engine"] == {
            "generate_calls": 5.0,
            "padded_tokens": 0.0,
            "wasted_decode_tokens": 0.0,
        }
    finally:
        small.close()


def test_steps_count_what_was_asked_for(engine: TransformersEngine) -> None:
    run(engine, workload())
    steps, counts = engine.steps(), engine.liveness()["engine"]
    assert len(steps) == max(LENGTHS)
    prompts = [len(prompt) for prompt in PROMPTS]
    assert steps[0]["num_prefill_tokens"] == steps[0]["num_tokens"] == sum(prompts)
    assert sum(step["num_tokens"] for step in steps[1:]) == sum(length - 1 for length in LENGTHS)
    assert steps[1]["context_tokens"] == sum(
        p + 1 for p, n in zip(prompts, LENGTHS, strict=True) if n > 1
    )
    assert all(step["num_prefill_tokens"] == 0 for step in steps[1:])
    assert counts["padded_tokens"] == sum(max(prompts) - p for p in prompts)
    assert counts["wasted_decode_tokens"] == sum(max(LENGTHS) - n for n in LENGTHS)
    assert steps[0]["kv_slots_wasted"] == counts["padded_tokens"]


def test_sampling_is_asked_for_and_repeatable(engine: TransformersEngine, ours: LLM) -> None:
    first, second = (run(engine, workload(), temperature=1.0, seed=7) for _ in range(2))
    assert [t.token_ids for t in first] == [t.token_ids for t in second]
    assert [t.token_ids for t in first] != expected(ours, ignore_eos=True)
    most_likely = run(engine, workload(), temperature=1.0, top_k=1, seed=7)
    assert [t.token_ids for t in most_likely] == expected(ours, ignore_eos=True)


def test_reset_ends_a_running_batch(engine: TransformersEngine, ours: LLM) -> None:
    engine.submit("long", PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    assert engine.poll(30.0)
    engine.submit("waiting", PROMPTS[1], SamplingParams(max_tokens=3))
    engine.reset()
    assert engine.poll(0.0) == [] and engine.steps() == []
    assert [trace.token_ids for trace in run(engine, workload())] == expected(ours, ignore_eos=True)


def test_a_failure_of_generate_reaches_the_driver(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**kwargs: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._loaded.model, "generate", fail)
        with pytest.raises(MemoryError, match="no room"):
            run(engine, workload())
        engine.reset()
        patch.setattr(engine._loaded.model, "generate", lambda **kwargs: None)
        with pytest.raises(RuntimeError, match="5 requests unfinished"):
            run(engine, workload())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([500], "in \\[0, 128\\)"), (list(range(100)) * 3, "context is 256")],
)
def test_requests_that_cannot_be_served(
    engine: TransformersEngine, prompt: list[int], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        engine.submit("x", prompt, SamplingParams())


def test_what_it_says_of_itself(engine: TransformersEngine, folder: Path) -> None:
    from minivllm.engines.minivllm.engine import MinivllmEngine

    info = engine.info
    ours = MinivllmEngine(configuration(folder, "engine=minivllm", "runtime.trim_last_layer=false"))
    assert info.name == "transformers" and info.weights == "checkpoint" and info.max_num_seqs == 32
    assert info.attention_backend == "sdpa" and info.max_model_len == 256 and info.load_s > 0
    assert (info.fingerprint, info.vocab_size) == (ours.info.fingerprint, ours.info.vocab_size)
    assert info.eos_token_ids == ours.info.eos_token_ids == tuple(range(100))
    same = ("kv_bytes_per_token", "attention_flops_per_token_pair", "dtype")
    assert {k: info.model[k] for k in same} == {k: ours.info.model[k] for k in same}
    # Our engine keeps a head's norm once for each head, transformers once for all.
    repeated = 3 * (4 + 2 - 2) * 16
    assert ours.info.model["flops_per_token"] - info.model["flops_per_token"] == 2 * repeated
    for ours_bytes, theirs in (
        (ours.info.memory["weights"], info.memory["weights"]),
        (ours.info.model["streamed_weight_bytes"], info.model["streamed_weight_bytes"]),
    ):
        assert ours_bytes - theirs == 4 * repeated
    assert info.memory["linear"] == ours.info.memory["linear"]


@pytest.mark.parametrize(
    "architecture",
    [
        {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1000000},
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": True,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_ROPE,
        },
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "rope_theta": 1000000},
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "rope_theta": 1000000,
        },
    ],
)
def test_random_weights_are_our_random_weights(architecture: dict[str, Any]) -> None:
    sizes = {
        key: value for key, value in SMALL.items() if key not in ("bos_token_id", "pad_token_id")
    }
    config = compose(["engine=transformers", "model=qwen3", "quant=fp32", "runtime.device=cpu"])
    config["model"] |= {"weights": "random", "max_model_len": 200, "seed": 3, "path": ""}
    config["model"]["architecture"] = {"rms_norm_eps": 1e-6, **sizes, **architecture}
    engine = TransformersEngine(config, TransformersOptions())
    try:
        assert engine.info.weights == "random" and engine.info.max_model_len == 200
        model = engine._loaded.model
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == bool(architecture.get("tie_word_embeddings"))
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
        from minivllm.models.load.loading import load_model
        from minivllm.models.options import ModelOptions
        from minivllm.quant.plain import Plain
        from tests.reference import CausalAttention, make_batch

        node = {k: v for k, v in config["model"].items() if k != "_target_"}
        loaded = load_model(
            ModelOptions(**node), quant=Plain("float32"), context=BuildContext(torch.device("cpu"))
        )
        assert loaded.fingerprint == engine.info.fingerprint
        with torch.no_grad():
            hidden = loaded.model(
                make_batch([PROMPTS[0]]), CausalAttention(loaded.model.attention_specs)
            )
            want = model(torch.tensor([PROMPTS[0]])).logits[0]
            torch.testing.assert_close(
                loaded.model.compute_logits(hidden), want, atol=1e-4, rtol=1e-4
            )
            assert want.std() > 0
        assert engine.info.memory["linear"] == loaded.linear_bytes
        read = loaded.config
        experts = read.num_experts * (read.num_layers - len(read.dense_layers))
        assert engine.info.model["expert_weight_bytes"] * experts == loaded.model.expert_bytes
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quant=nf4", "quant=nf4 is not supported by engine=transformers: use quant=bf16"),
        (
            "attention=eager",
            "attention=eager .* leave it out, engine=transformers has its own attention",
        ),
        (
            "batching=sequential",
            "batching=sequential .* leave it out, engine=transformers has its own batching",
        ),
        ("batching.max_num_seqs=8", "batching.max_num_seqs=8 .* leave it out"),
        ("cache=contiguous", "cache=contiguous"),
        ("cache.block_size=32", "cache.block_size=32"),
        ("decoding.repetition_penalty=1.2", "decoding.repetition_penalty=1.2"),
        ("decoding.stop_token_ids=[5]", r"decoding.stop_token_ids=\[5\]"),
    ],
)
def test_knobs_that_are_not_supported_are_refused(
    folder: Path, override: str, message: str
) -> None:
    config = configuration(folder, override)
    with pytest.raises(BadInput, match=message) as refusal:
        build(config["engine"], config=config)
    assert "quant=bf16, fp16 or fp32" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("quant=fp16", "decoding=sample", "decoding.seed=1"),
        ("runtime.threads=1", "model.max_model_len=99", "engine.batch_size=1"),
        ("workload=chat", "arrival=poisson", "measure.repeats=3"),
    ],
)
def test_supported_knobs_pass(folder: Path, overrides: tuple[str, ...]) -> None:
    """One that is not supported is all that is refused of them."""
    require_supported(configuration(folder, *overrides))
    with pytest.raises(BadInput) as refusal:
        require_supported(configuration(folder, *overrides, "cache.block_size=32"))
    assert str(refusal.value).startswith("cache.block_size=32 is not supported")


def test_a_peer_may_stand_for_more_options(folder: Path) -> None:
    peer = Support("engine=x", {"quant": Knobs(("dtype",), ("minivllm.quant.nf4.NF4",))})
    nf4 = {"quant": compose(["quant=nf4", "quant.dtype=float16"])["quant"]}
    require_supported(nf4, peer)
    with pytest.raises(BadInput, match=r"quant.double_quant=false .* use quant.double_quant=true"):
        require_supported({"quant": nf4["quant"] | {"double_quant": False}}, peer)


@pytest.mark.parametrize("override", ["engine.batch_size=0", "engine.attn_implementation=paged"])
def test_wrong_values_of_its_own_knobs(folder: Path, override: str) -> None:
    with pytest.raises(BadInput, match=override.partition("=")[0]):
        configuration(folder, override)


def test_an_attention_that_cannot_be_had_is_a_clear_error(folder: Path) -> None:
    config = configuration(folder, "engine.attn_implementation=flash_attention_2")
    with pytest.raises(BadInput, match="attn_implementation=flash_attention_2"):
        build(config["engine"], config=config)


def test_without_transformers_the_remedy_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"pip install -e '\.\[peers\]'"):
        build(config["engine"], config=config)


def test_a_cell_from_the_command_line(cli: Any, folder: Path) -> None:
    result = cli(
        *(
            "engine=transformers",
            "model=hf",
            f"model.path={folder}",
            "quant=fp32",
            "runtime.device=cpu",
        ),
        *(
            "workload=smoke",
            "workload.num_requests=4",
            "workload.input_len=20",
            "workload.output_len=8",
        ),
        *("name=peer", "engine.batch_size=2", "measure.roofline=false"),
    )
    assert result.code == 0, result.err
    (path,) = Path("runs/peer").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["validity"]["ok"], record["validity"]
    assert record["liveness"]["engine"]["generate_calls"] == 2
    assert record["metrics"]["ttft_ms"]["mean"] < record["metrics"]["e2e_ms"]["mean"]
    assert record["breakdown"]["steps"] == 16 and record["attention_backend"] == "sdpa"


def test_a_static_cache_gives_the_same_tokens(folder: Path, ours: LLM) -> None:
    config = configuration(folder, "engine.mode=static_cache")
    static = build(config["engine"], config=config)
    try:
        assert [trace.token_ids for trace in run(static, workload())] == expected(
            ours, ignore_eos=True
        )
        first = static._cache
        assert [trace.token_ids for trace in run(static, workload())] == expected(
            ours, ignore_eos=True
        )
        assert static._cache is first, "the cache is used again"
        counts = static.liveness()["engine"]
        assert (counts["static_cache_tokens"], counts["compiled"]) == (256.0, 0.0)
        assert {step["kv_slots_allocated"] for step in static.steps()} == {256 * len(PROMPTS)}
    finally:
        static.close()


def test_a_static_cache_holds_a_batch_of_mixed_lengths(folder: Path) -> None:
    """Padded to one width they take more than the context's length, which each of them fits."""
    config = configuration(folder, "engine.mode=static_cache", "model.max_model_len=64")
    static = build(config["engine"], config=config)
    try:
        traces = run(static, requests([list(range(5, 55)), [5, 6, 7, 8]], [4, 50], True))
        assert [len(trace.token_ids) for trace in traces] == [4, 50]
    finally:
        static.close()


def test_compiling_is_asked_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(
        folder, "engine.mode=static_cache", "engine.compile=true", "engine.batch_size=1"
    )
    compiling = build(config["engine"], config=config)
    try:
        calls: list[Any] = []
        model = compiling._loaded.model

        def compiled(compile_config: Any) -> Any:
            calls.append(compile_config)
            return model.__call__

        monkeypatch.setattr(model, "get_compiled_call", compiled)
        run(compiling, Workload(workload().requests[:2]))
        assert calls and {call.mode for call in calls} == {"default"}
    finally:
        compiling.close()
    with pytest.raises(BadInput, match=r"engine\.compile=true needs engine\.mode=static_cache"):
        configuration(folder, "engine.compile=true")
