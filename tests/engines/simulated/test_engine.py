"""The simulated engine: the real scheduler, virtual time, predicted steps, tokens that are
nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.assembly import build_engine
from minivllm.bench.driver import drive
from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records.identity import cell_id
from minivllm.bench.workloads.arrivals import Offline, Poisson
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.simulated.engine import SimulatedEngine
from minivllm.engines.simulated.recorded_steps import fit_records
from minivllm.engines.simulated.step_times import (
    FEATURES,
    RooflineTimes,
    fit,
    nonnegative_least_squares,
)
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs
from minivllm.platform.files import write_parquet
from tests.bench.scripted import workload
from tests.scripts.load import load_script

ROOT = Path(__file__).parents[3]
ROOFLINE = (
    "engine=simulated",
    "engine.bandwidth_gb_s=20",
    "engine.tflops=0.5",
    "engine.overhead_ms=1",
)


def engine(*overrides: str) -> SimulatedEngine:
    config = compose([*ROOFLINE, *overrides])
    built: SimulatedEngine = build(config["engine"], config=config)
    return built


class Planted:
    """100 ms a step and 1 ms a prompt token."""

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: int, pairs: float, drafts: int
    ) -> float:
        return 100.0 + prefill

    def describe(self) -> str:
        return "planted"


def run(work: Workload, *overrides: str) -> tuple[SimulatedEngine, list[RequestTrace]]:
    under_test = engine(*overrides)
    under_test.step_times = Planted()
    return under_test, drive(under_test, work, Offline(), SamplingParams(), under_test.clock)


# ---- the scheduler under virtual time


def test_a_hand_computed_case() -> None:
    under_test, (a, b) = run(workload((3, 2), (5, 3)))
    assert a.token_times == pytest.approx([0.108, 0.208])
    assert b.token_times == pytest.approx([0.108, 0.208, 0.308])
    assert a.started_s == b.started_s == 0 and a.finish_reason == b.finish_reason == "length"
    names = ("num_requests", "num_tokens", "num_prefill_tokens", "context_tokens", "forward_ms")
    rows = [tuple(step[name] for name in names) for step in under_test.steps()]
    assert rows == [(2, 8, 8, 8, 108), (2, 2, 0, 4 + 6, 100), (1, 1, 0, 7, 100)]
    assert [step["start_s"] for step in under_test.steps()] == pytest.approx([0, 0.108, 0.208])


def test_a_hand_computed_case_with_chunks_and_a_queue() -> None:
    knobs = ("batching.max_num_batched_tokens=6", "batching.max_num_seqs=2")
    under_test, (a, b, c) = run(workload((3, 2), (5, 2), (2, 1)), *knobs)
    # 3 of a and 3 of b; a's second token and the rest of b; b's second token and c.
    assert a.token_times == pytest.approx([0.106, 0.208])
    assert b.token_times == pytest.approx([0.208, 0.310])
    assert c.token_times == pytest.approx([0.310])
    assert (b.started_s, c.started_s) == pytest.approx((0, 0.208))
    assert [s["waiting"] for s in under_test.steps()] == [1, 1, 0]
    counters = under_test.liveness()
    assert (
        counters["batching"]["prefill_chunks"] == 1 and counters["batching"]["largest_batch"] == 2
    )
    assert counters["engine"] == {"steps": 3, "steps_a_row": 1}


def test_sequential_is_one_after_the_other() -> None:
    _, (a, b) = run(workload((3, 2), (5, 1)), "batching=sequential")
    assert [*a.token_times, *b.token_times] == pytest.approx([0.103, 0.203, 0.308])


def test_preemption_is_the_schedulers() -> None:
    work = workload(*[(16, 40)] * 6)
    under_test, traces = run(work, "cache.num_blocks=8", "cache.block_size=16")
    assert under_test.liveness()["batching"]["preemptions"] > 0
    assert [len(trace.token_ids) for trace in traces] == [40] * 6
    assert under_test.cache.pool.num_used == 0
    under_test.cache.pool.check_integrity([])


def test_the_dynamic_policy_waits_in_virtual_time() -> None:
    under_test, traces = run(
        workload((3, 1), (5, 1)),
        "batching=dynamic",
        "batching.max_num_seqs=4",
        "batching.max_wait_ms=40",
    )
    assert [trace.started_s for trace in traces] == pytest.approx([0.04, 0.04])
    assert [trace.token_times for trace in traces] == [pytest.approx([0.148])] * 2
    assert under_test.liveness()["batching"]["largest_batch"] == 2


def test_what_is_hopeless_is_told_alike_after_a_reset() -> None:
    under_test = engine("batching.shed=true", "batching.max_num_seqs=1")
    under_test.step_times = Planted()
    reasons = []
    for _ in range(2):
        for name, deadline_ms in (("a", None), ("b", 250.0), ("c", 2000.0)):
            params = SamplingParams(max_tokens=5, ignore_eos=True, deadline_ms=deadline_ms)
            under_test.submit(name, [1, 2, 3], params)
        ended: dict[str, str] = {}
        while len(ended) < 3:
            ended |= {o.request_id: o.finish_reason for o in under_test.poll() if o.finish_reason}
        reasons.append((ended, under_test.clock.now()))
        under_test.reset()
    assert reasons[0] == reasons[1] and reasons[0][0]["b"] == "shed"


def test_deadlines_are_virtual() -> None:
    under_test = engine("batching.shed=true", "batching.max_num_seqs=1")
    under_test.step_times = Planted()
    for name, deadline_ms in (("a", None), ("b", 250.0), ("c", 2000.0)):
        params = SamplingParams(max_tokens=5, ignore_eos=True, deadline_ms=deadline_ms)
        under_test.submit(name, [1, 2, 3], params)
    ended = {}
    while len(ended) < 3:
        for output in under_test.poll():
            if output.finish_reason:
                ended[output.request_id] = output.finish_reason, round(under_test.clock.now(), 3)
    # The earlier deadline goes first, but 5 steps of 100 ms take longer.
    assert ended["b"][0] == "shed" and ended["a"][0] == ended["c"][0] == "length"
    assert ended["c"][1] < ended["a"][1] < 1.4


def test_prefixes_are_found_in_lazy_prompts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(0, 600, [0, 1]), (10_000, 700, [0, 2]), (20_000, 512, [0])]
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": ms, "input_length": n, "output_length": 4, "hash_ids": ids})
            for ms, n, ids in lines
        )
    )
    config = compose(["workload=trace", f"workload.path={trace}", "arrival=replay"])
    work, arrival = build(config["workload"]).generate(None, 512, 2048, 0), build(config["arrival"])
    for caching, computed in (("true", [600, 700 - 512, 16]), ("false", [600, 700, 512])):
        under_test = engine(f"cache.prefix_caching={caching}", "cache.block_size=16")
        under_test.step_times = Planted()
        traces = drive(under_test, work, arrival, SamplingParams(), under_test.clock)
        assert [1e3 * (t.token_times[0] - t.scheduled_s) - 100 for t in traces] == pytest.approx(
            computed
        )


def test_swapping_takes_the_time_that_it_is_told() -> None:
    work = workload(*[(16, 40)] * 6)
    knobs = ("cache.num_blocks=8", "cache.block_size=16", "batching.preemption=swap")
    ends = []
    for speed in ((), ("engine.host_gb_s=0.001",)):
        under_test, traces = run(work, *knobs, *speed)
        assert under_test.liveness()["cache"]["blocks_swapped_out"] > 0
        ends.append(
            (max(trace.token_times[-1] for trace in traces), under_test.liveness()["cache"])
        )
    (free, counts), (slow, same) = ends
    moved = counts["blocks_swapped_out"] + counts["blocks_swapped_in"]
    assert counts == same
    assert slow - free == pytest.approx(moved * 16 * 4096 / 1e6)
    with pytest.raises(BadInput, match="no host memory to swap to"):
        engine("batching.preemption=swap", "cache.swap_space_gb=0")


def test_nothing_kept_is_computed_again() -> None:
    _, (a,) = run(workload((10, 3)), "cache=none")
    assert a.token_times == pytest.approx([0.110, 0.110 + 0.111, 0.110 + 0.111 + 0.112])


def test_a_virtual_day_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it slept"))
    under_test = engine()
    traces = drive(
        under_test,
        workload(*[(4, 3)] * 20),
        Poisson(20 / 86_400),
        SamplingParams(),
        under_test.clock,
    )
    assert all(trace.completed for trace in traces)
    assert under_test.clock.now() > 40_000
    assert max(trace.token_times[0] - trace.scheduled_s for trace in traces) < 0.1


def test_the_same_seed_gives_the_same_figures() -> None:
    def measure(seed: int) -> metrics.Metrics:
        under_test = engine("workload=chat")
        config = compose(["workload=chat"])
        work = build(config["workload"]).generate(under_test.encode, 512, 2048, seed)
        traces = drive(
            under_test, work, Poisson(3.0), SamplingParams(), under_test.clock, seed=seed
        )
        return metrics.compute(traces, {}, 64)

    assert measure(0) == measure(0) != measure(1)


def test_rows_are_thinned_and_counted() -> None:
    under_test, _ = run(workload((1, 100)), "engine.step_rows=10")
    rows = under_test.steps()
    counted = under_test.liveness()["engine"]
    assert counted["steps"] == 100 and counted["steps_a_row"] == 16 and len(rows) == 7
    assert [row["start_s"] for row in rows] == pytest.approx(
        [0, *(0.001 + 1.6 * k for k in range(1, 7))]
    )


def test_abort_and_reset_leave_nothing() -> None:
    under_test = engine()
    for name in "abc":
        under_test.submit(name, [1, 2, 3], SamplingParams(max_tokens=5))
    under_test.poll()
    under_test.abort("b")
    under_test.abort("unknown")
    assert {output.request_id for output in under_test.poll()} == {"a", "c"}
    under_test.reset()
    assert (
        under_test.poll(0.5) == []
        and under_test.cache.pool.num_used == 0
        and under_test.steps() == []
    )


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "has an empty prompt"),
        ([1] * 2048, 5, "the prompt has 2048 tokens and the context is 2048"),
        ([1] * 900, 900, "may grow to 1799 cached tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(prompt: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        engine("cache.num_blocks=100").submit("a", prompt, SamplingParams(max_tokens=max_tokens))


def test_memory_is_the_machines_that_is_simulated() -> None:
    blocks = {gb: engine(f"engine.memory_gb={gb}").cache.pool.num_blocks for gb in (0.03, 0.1)}
    assert blocks[0.03] < blocks[0.1] < engine().cache.pool.num_blocks
    with pytest.raises(BadInput, match="the KV cache gets no block"):
        engine("engine.memory_gb=0.019")
    said = r"engine\.memory_gb=0\.01 does not hold the weights, which are 0\.0189 GB"
    with pytest.raises(BadInput, match=said):
        engine("engine.memory_gb=0.01")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_compressed_tokens_take_what_they_take_in_the_engine(kv_dtype: str) -> None:
    knobs = [f"cache.kv_dtype={kv_dtype}", "cache.num_blocks=4", "cache.swap_space_gb=0.001"]
    knobs.append("batching.preemption=swap")
    simulated, real = engine(*knobs), build_engine(compose(knobs))
    try:
        counters = simulated.liveness()["cache"]
        assert counters["kv_bytes_per_token"] == real.kv.bytes_per_token
        assert counters["kv_dtype"] == ("bfloat16" if kv_dtype == "auto" else kv_dtype)
        assert simulated.cache.layout == real.cache.layout  # as many host slots
        assert simulated.step_times(1, 1, 0, 10_000, 0.0, 0) == pytest.approx(  # type: ignore[attr-defined]
            1
            + 1e3
            * (
                simulated.step_times.costs["streamed_weight_bytes"]
                + 10_000 * real.kv.bytes_per_token
            )
            / 20e9  # type: ignore[attr-defined]
        )
    finally:
        real.close()


def test_layers_with_a_window_take_the_time_of_what_they_see() -> None:
    """Of Gemma 3 1B's 26 layers 22 see 512 tokens."""
    under_test = engine(
        "model=gemma3_1b",
        "model.weights=random",
        "model.max_model_len=8192",
        "engine.overhead_ms=0",
    )
    costs = under_test.step_times.costs  # type: ignore[attr-defined]
    drive(under_test, workload((4000, 3)), Offline(), SamplingParams(), under_test.clock)
    last = under_test.steps()[-1]
    assert last["context_tokens"] == 4002
    read = costs["streamed_weight_bytes"] + costs["kv_bytes_per_token"] * (4 * 4002 + 22 * 512) / 26
    assert last["forward_ms"] == pytest.approx(1e3 * read / 20e9)


def test_what_was_evicted_is_not_read() -> None:
    knobs = (
        "cache.block_size=16",
        "cache.eviction_budget=64",
        "cache.eviction_sinks=4",
        "cache.eviction_window=16",
    )
    under_test = engine("cache.eviction=streaming", *knobs)
    asked: list[tuple[int, int, float]] = []

    class Asked(Planted):
        def __call__(
            self, requests: int, tokens: int, prefill: int, context: int, pairs: float, drafts: int
        ) -> float:
            asked.append((prefill, context, pairs))
            return super().__call__(requests, tokens, prefill, context, pairs, drafts)

    under_test.step_times = Asked()
    drive(under_test, workload((200, 40)), Offline(), SamplingParams(), under_test.clock)
    assert under_test.liveness()["cache"]["tokens_evicted"] > 0
    assert (
        max(context for _, context, _ in asked)
        == 64
        == max(s["context_tokens"] for s in under_test.steps())
    )
    # A block of sinks and one of the window stay; then 32 more tokens, each with all before it.
    assert asked[:2] == [(64, 64, 64 * 65 / 2), (32, 64, 32 * (33 + 64) / 2)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cache.eviction=h2o"], "goes by attention scores"),
        (["cache.eviction=snapkv"], "goes by attention scores"),
        (
            ["cache.eviction=streaming", "model=gemma3_1b", "model.weights=random"],
            "sliding window of 512",
        ),
    ],
)
def test_eviction_that_cannot_be_simulated_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        engine("cache.eviction_budget=64", "cache.prefix_caching=false", *overrides)


def test_it_says_what_it_needs() -> None:
    with pytest.raises(
        BadInput, match=r"set engine\.steps=RUNS .* or engine\.bandwidth_gb_s and engine\.tflops"
    ):
        config = compose(["engine=simulated", "engine.tflops=1"])
        build(config["engine"], config=config)


# ---- step times


@example([0.0] * 3, [[0.0, 0.0, 5e-324]] * 6, [0.0, 1.0] * 6)
@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0, 9), min_size=3, max_size=3), min_size=6, max_size=12),
    st.lists(st.floats(-5, 5), min_size=12, max_size=12),
)
def test_least_squares_stay_non_negative_and_best(
    planted: list[float], rows: list[list[float]], noise: list[float]
) -> None:
    a = np.array(rows)
    b = a @ np.array(planted) + np.array(noise[: len(rows)])
    x = nonnegative_least_squares(a, b)
    assert (x >= 0).all()
    best = np.linalg.norm(a @ x - b)
    for step in np.random.default_rng(0).normal(size=(200, 3)):
        assert np.linalg.norm(a @ np.maximum(x + step, 0) - b) >= best - 1e-6


PLANTED = (4.0, 0.2, 0.3, 12.0, 0.05, 0.06, 0.002, 0.0001, 0.7)


def steps(n: int, rng: np.random.Generator) -> dict[str, Any]:
    """Recorded steps that took exactly as long as PLANTED says, split over the phases."""
    requests = rng.integers(1, 65, n)
    prefill = np.where(rng.random(n) < 0.2, rng.integers(1, 1500, n), 0)
    context = requests * rng.integers(20, 900, n) + prefill
    pairs = prefill * (context - prefill / 2) / requests
    some, few = np.minimum(prefill, 1), np.minimum(prefill, 256)
    drafts = np.where(rng.random(n) < 0.3, requests * rng.integers(1, 5, n), 0)
    rows, verifying = requests + drafts, np.minimum(drafts, 1)
    above = np.maximum(rows - 16, 0)
    columns = [np.ones(n), rows, above, some, prefill, few, context, pairs, verifying]
    features = np.stack(columns, 1)
    total = features @ np.array(PLANTED)
    shares = {
        "schedule_ms": 0.02,
        "prepare_ms": 0.03,
        "forward_ms": 0.8,
        "sample_ms": 0.1,
        "emit_ms": 0.03,
        "gap_ms": 0.02,
    }
    return {
        "features": features,
        "times": total,
        "rows": {
            "num_requests": requests,
            "num_tokens": rows + prefill,
            "num_drafts": drafts,
            "draft_ms": np.where(drafts > 0, drafts / requests * 0.3 + 0.1 * drafts, 0.0),
            "num_prefill_tokens": prefill,
            "context_tokens": context,
            **{name: share * total for name, share in shares.items()},
        },
    }


def test_the_fit_recovers_planted_coefficients() -> None:
    rng = np.random.default_rng(0)
    made = steps(2000, rng)
    coefficients, error = fit(made["features"], made["times"])
    assert coefficients == pytest.approx(PLANTED, rel=1e-6) and error < 1e-9
    noisy = made["times"] * rng.lognormal(0, 0.1, 2000)
    noisy[rng.random(2000) < 0.05] *= 20  # the machine was busy
    coefficients, error = fit(made["features"], noisy)
    assert coefficients == pytest.approx(PLANTED, rel=0.25)
    predicted = made["features"] @ coefficients
    assert predicted / made["times"] == pytest.approx(np.ones(2000), rel=0.08)
    assert 0.04 < error < 0.1


def test_a_feature_that_never_occurs_costs_nothing() -> None:
    made = steps(500, np.random.default_rng(1))
    narrow = made["features"][made["features"][:, 1] <= 16]
    coefficients, _ = fit(narrow, narrow @ np.array(PLANTED))
    assert coefficients[FEATURES.index("rows_above_16")] == 0


def write_run(
    folder: Path, config: dict[str, Any], n: int = 400, seed: int = 0, **changes: Any
) -> Path:
    """A measured record with steps."""
    rows = steps(n, np.random.default_rng(seed))["rows"]
    columns = {name: values.tolist() for name, values in rows.items()}
    folder.mkdir(parents=True)
    write_parquet(
        folder / "steps.parquet",
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    )
    record = {
        "schema_version": 1,
        "run_id": folder.name,
        "cell_id": "c",
        "status": "ok",
        "config": config,
    }
    (folder / "record.json").write_text(json.dumps({**record, **changes}))
    return folder


def test_records_of_the_same_model_are_fitted(tmp_path: Path) -> None:
    real = compose([])
    for i in range(2):
        write_run(tmp_path / "runs" / "a" / f"cell-{i}", real, seed=i)
    write_run(tmp_path / "runs" / "a" / "failed", real, status="oom")
    write_run(tmp_path / "runs" / "a" / "other", compose(["quant=fp32"]))
    write_run(tmp_path / "runs" / "a" / "peer", compose(["engine=transformers"]))
    # A step that was launched before the one before it had ended holds the wait for that one.
    write_run(
        tmp_path / "runs" / "a" / "overlapped", real, liveness={"runtime": {"overlap_steps": 3}}
    )
    # Batching and the length of the context may differ: a step costs the same.
    # So do steps of records that were profiled afterwards, or made when nothing could be.
    write_run(tmp_path / "runs" / "a" / "profiled", compose(["runtime.profile=true"]), seed=2)
    before = {knob: value for knob, value in real["runtime"].items() if knob != "profile"}
    write_run(tmp_path / "runs" / "a" / "before", {**real, "runtime": before}, seed=3)
    expected = compose(["batching=sequential", "model.max_model_len=512"])
    fitted = fit_records(str(tmp_path / "runs" / "a"), expected)
    assert (fitted.steps, fitted.records) == (1600, 4)
    assert fitted.coefficients == pytest.approx(PLANTED, rel=1e-6)
    assert fitted(20, 20 + 7, 7, 900, 50.0, 0) == pytest.approx(
        4 + 4 + 1.2 + 12 + 0.35 + 0.42 + 1.8 + 0.005
    )
    assert "1600 steps of 4 records" in fitted.describe() and "0.2 rows" in fitted.describe()
    with pytest.raises(
        BadInput,
        match=r"0 of 7 records there have the same model, quant, pruning, attention, runtime, "
        r"parallel and cache.kv_dtype",
    ):
        fit_records(str(tmp_path / "runs"), compose(["quant=nf4"]))
    with pytest.raises(BadInput, match="0 of 7 records"):
        fit_records(str(tmp_path / "runs"), compose(["cache.kv_dtype=int8"]))
    with pytest.raises(BadInput, match="no such file or folder"):
        fit_records(str(tmp_path / "none"), expected)


def test_other_steps_are_another_cell(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write_run(tmp_path / name / "cell", compose([]), seed=seed)
    ids = [
        cell_id(compose(["engine=simulated", f"engine.steps={tmp_path / name}"]), "f")
        for name in "abc"
    ]
    assert ids[0] == ids[2] != ids[1]
    assert cell_id(compose(["engine=simulated", "engine.steps=nowhere"]), "f") not in ids


def test_the_roofline_of_an_architecture() -> None:
    config = compose(["model=qwen3"])
    model = ModelConfig.from_dict(config["model"]["architecture"])
    costs, weight_bytes = architecture_costs(model, {"dtype": "bfloat16"})
    assert weight_bytes == pytest.approx(2 * 596e6, rel=0.01)  # Qwen3-0.6B, its head tied
    assert costs["kv_bytes_per_token"] == 28 * 2 * 8 * 128 * 2
    nf4, _ = architecture_costs(model, {"dtype": "bfloat16", "_target_": "minivllm.quant.nf4.NF4"})
    assert nf4["streamed_weight_bytes"] == pytest.approx(0.53 * 440e6 + 2 * 155.6e6, rel=0.01)
    times = RooflineTimes(costs, bandwidth=1e12, flops=1e14, overhead_ms=0.5)
    by_memory = 0.5 + 1e3 * weight_bytes / 1e12
    assert times(1, 1, 0, 0, 0, 0) == pytest.approx(by_memory)
    prompt = times(1, 4096, 4096, 4096, 4096 * 4097 / 2, 0)
    operations = 4096 * 2 * 440e6 + 28 * 16 * 128 * 4 * 4096 * 4097 / 2
    assert prompt == pytest.approx(0.5 + 1e3 * operations / 1e14, rel=0.01)  # by the matrix rate


def test_the_roofline_of_a_mixture_of_experts() -> None:
    architecture = {
        "architectures": ["MixtralForCausalLM"],
        **{"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    }
    costs, weight_bytes = architecture_costs(
        ModelConfig.from_dict(architecture), {"dtype": "float16"}
    )
    expert = 3 * 64 * 128
    assert weight_bytes == 2 * (2 * (4 * 64 * 64 + 8 * expert) + 2 * 64_000)
    assert costs["flops_per_token"] == 2 * 2 * (4 * 64 * 64 + 2 * expert)
    times = RooflineTimes(costs, bandwidth=1e6, flops=1e15, overhead_ms=0)
    # 2 experts a layer, then 4, then all 8
    read = [times(n, n, 0, 0, 0, 0) for n in (1, 2, 4, 100)]
    assert [b - a for a, b in pairwise(read)] == pytest.approx(
        [4 * 2 * expert / 1e3, 8 * 2 * expert / 1e3, 0]
    )


def test_the_embedded_models_costs_are_those_of_its_weights() -> None:
    from minivllm.engines.minivllm.engine import MinivllmEngine

    config = compose([])
    real = MinivllmEngine(config)
    try:
        simulated = engine()
        assert isinstance(simulated.step_times, RooflineTimes)
        for name, value in real.info.model.items():
            if isinstance(value, int | float):
                assert simulated.step_times.costs[name] == pytest.approx(value, rel=0.01), name
        assert simulated.info.fingerprint == real.info.fingerprint
        assert simulated.encode("def main():") == real.encode("def main():")
    finally:
        real.close()


# ---- the record

SESSION = """
import json, sys
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.session import Session
from minivllm.config.compose import compose

config = compose(sys.argv[2:])
session = Session(config, lambda event, **details: None)
results = [
    session.measure(Measurement(f"r{i}", "c", "s", "a", i, f"{sys.argv[1]}/s/cell-r{i}", config))
    for i in range(2)
]
assert "torch" not in sys.modules
rows = [
    {**result.record.to_dict(), "window": result.window_s, "rows": len(result.requests),
     "columns": list(result.requests[0])}
    for result in results
]
print(json.dumps(rows, default=str))
"""


def test_a_record_of_a_simulation(tmp_path: Path) -> None:
    """Measured twice in one process that never imports torch: equal figures, and nothing of this
    machine's."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        + "".join(f"2023-11-16 18:{m:02}:00.0000000,{100 + m},{5 + m}\r\n" for m in range(20))
    )
    knobs = [
        *ROOFLINE,
        "workload=trace",
        f"workload.path={trace}",
        "arrival=replay",
        "measure.price.device_hour=2",
        "speculative=draft",
        "speculative.acceptance=0.5",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(tmp_path), *knobs],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (
        first["metrics"] == second["metrics"] and first["workload_hash"] == second["workload_hash"]
    )
    assert first["metrics"]["num_requests"] == first["rows"] == 20
    assert first["metrics"]["duration_s"] == pytest.approx(19 * 60, rel=0.01)
    assert first["validity"]["ok"] and any(
        "simulated: step times" in note for note in first["validity"]["notes"]
    )
    assert first["window"] is None and "token_ids" not in first["columns"]
    assert first["energy"]["reason"].startswith("simulated")
    assert {k for k, v in first["memory"].items() if v is not None} == {"kv_waste"}
    for part in ("cold", "roofline"):
        assert not any(first[part].values()), part
    assert [path.name for path in (tmp_path / "workloads").iterdir()] == [
        f"{first['workload_hash']}.parquet"
    ]


def test_simulated_through_the_command_line(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minivllm.bench.device_lock.open_gpu", lambda device: pytest.fail("it uses no device")
    )
    knobs = ["workload.num_requests=4", "arrival=poisson", "arrival.rate=0.01"]
    done = cli(*ROOFLINE, "name=sim", "model=qwen3", "model.weights=random", *knobs)
    assert done.code == 0, done.err
    assert (
        "weights are random" not in done.out + done.err
        and "Simulated: nothing was computed" in done.out
    )
    (path,) = Path("runs/sim").glob("*/record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["metrics"]["duration_s"] > 60
    assert not any("weights are random" in note for note in record["validity"]["notes"])
    assert record["memory"]["host_rss_peak"] is None and "simulated" in path.parent.name
    assert Path("reports/sim/index.html").exists()


# ---- the soak


@pytest.mark.parametrize(
    "overrides",
    [
        ["batching=continuous"],
        ["batching=continuous", "batching.chunked_prefill=false", "cache.prefix_caching=true"],
        ["batching=continuous", "batching.preemption=swap", "batching.shed=true"],
        ["batching=continuous", "batching.preemption=reserve", "batching.fair_prefill=true"],
        ["batching=continuous", "batching.prefill_first=true", "cache.prefix_caching=true"],
        ["batching=continuous", "batching.max_num_seqs=4", "cache=contiguous"],
        ["batching=static", "batching.max_num_seqs=16", "batching.group_by_length=true"],
        ["batching=dynamic", "batching.max_num_seqs=16", "batching.shed=true"],
        ["batching=sequential", "cache.num_blocks=80"],
        ["batching=continuous", "speculative=suffix", "speculative.acceptance=0.6"],
        ["batching=static", "speculative=early_exit", "speculative.acceptance=[0.9,0.2]"],
    ],
    ids=" ".join,
)
def test_virtual_minutes_at_one_and_a_half_times_capacity(overrides: list[str]) -> None:
    """Arrivals, cancellations, preemptions; what must hold is asserted by the soak itself."""

    soak = load_script("soak")
    # one request at a time is slow, so that few come in five minutes
    seconds = 600.0 if "batching=sequential" in overrides else 300.0
    found = soak.soak(soak.make_engine(overrides), seconds)
    assert sum(found["ended"].values()) == found["requests"] > 100
    assert found["ended"]["cancelled"] > 0.05 * found["requests"]
    assert found["checks"] > 50
    counters = found["counters"]
    if overrides[0] == "batching=continuous" and not {
        "cache=contiguous",
        "batching.preemption=reserve",
    } & {*overrides}:
        assert counters["batching"]["preemptions"] > 0
    if "batching.shed=true" in overrides:
        assert found["ended"]["shed"] == counters["batching"]["requests_shed"] > 0


def test_cold_prefixes_come_back_from_lower_tiers_without_any_memory() -> None:
    common = ("cache.num_blocks=12", "cache.prefix_caching=true", "model=tiny")
    prompts = [tuple(range(100 * i, 100 * i + 64)) for i in range(9)]

    def reused(*overrides: str) -> dict[str, float | str]:
        one = engine(*common, *overrides)
        for number in range(18):
            one.submit(
                str(number), prompts[number % 9], SamplingParams(max_tokens=2, ignore_eos=True)
            )
            while one.scheduler.has_unfinished:
                one.poll()
        return one.liveness()["cache"]

    assert reused()["prefix_tokens_reused"] == 0
    assert reused("cache.offload_gb=0.1")["prefix_tokens_reused"] == 9 * 48
    disk = reused(
        "cache.offload_gb=6e-4", "cache.offload_disk_gb=0.1"
    )  # nine blocks, and all that is asked for
    assert disk["prefix_tokens_reused"] == 9 * 48
    assert float(disk["blocks_from_disk"]) > 0
